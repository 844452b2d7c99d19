// Watch it learn: what the model answered to the same captions at each evaluation.

import { byId, make, say, show } from "./elements.js";
import { count, significant } from "./text.js";

const PLACES = ["first", "second", "third", "fourth", "fifth"];
const SVG = "http://www.w3.org/2000/svg";
const TICK = 900; // milliseconds that each evaluation is shown while playing
let looked = [];
let run = null;
let at = 0;
let playing = null;
let cards = [];

const rankOf = (answer) => {
  const index = answer.top.findIndex((each) => each.picture === answer.right);
  return index >= 0 ? index + 1 : answer.rank;
};

function verdict(answer) {
  if (answer.own) return "Your own caption: judge for yourself.";
  const rank = rankOf(answer);
  if (rank === null || rank === undefined) return "";
  if (PLACES[rank - 1]) return `The right image comes ${PLACES[rank - 1]}.`;
  const of = run.evaluations.length ? run.evaluations[run.evaluations.length - 1].candidates : null;
  return `The right image is not among these: number ${count(rank)}${of ? ` of ${count(of)}` : ""}.`;
}

function shape(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

// The rank over the evaluations: first place at the top, by powers of ten below it.
function ranks(caption) {
  const found = looked.map((each) => each.answers.find((answer) => answer.caption === caption)).map((answer) => (answer ? rankOf(answer) : null));
  const worst = Math.max(10, ...found.filter((rank) => rank !== null));
  const width = 150, height = 44, edge = 5;
  const x = (place) => edge + (looked.length > 1 ? place / (looked.length - 1) : 1) * (width - 2 * edge);
  const y = (rank) => edge + Math.log(rank) / Math.log(worst) * (height - 2 * edge);
  const known = found.map((rank, place) => [rank, place]).filter(([rank]) => rank !== null && rank >= 1);
  if (!known.length) return null;
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, class: "ranks", role: "img",
    "aria-label": `Rank of the right image: ${known.map(([rank, place]) => `${count(rank)} at epoch ${count(looked[place].epoch)}`).join(", ")}` });
  svg.append(shape("line", { x1: edge, x2: width - edge, y1: y(1), y2: y(1), class: "first-place" }));
  svg.append(shape("polyline", { points: known.map(([rank, place]) => `${x(place).toFixed(1)},${y(rank).toFixed(1)}`).join(" "), class: "rank-line" }));
  const now = known.filter(([, place]) => place <= at).pop();
  if (now) svg.append(shape("circle", { cx: x(now[1]), cy: y(now[0]), r: 4, class: "rank-now" }));
  return svg;
}

function thumbnail() {
  const image = make("img", { alt: "", width: 96, height: 96, loading: "lazy", decoding: "async" });
  const item = make("li", { class: "thumbnail" }, image);
  image.addEventListener("error", () => item.classList.add("missing"));
  image.addEventListener("load", () => item.classList.remove("missing"));
  return { item, image };
}

function card(caption, own) {
  const images = Array.from({ length: 5 }, thumbnail);
  const text = make("p", { class: "verdict" });
  const chart = make("div", { class: "rank-chart" });
  const element = make("article", { class: "card answer-card" },
    make("h3", {}, `“${caption}”`, own ? make("span", { class: "tag own" }, "yours") : null),
    make("ol", { class: "thumbnails" }, ...images.map((each) => each.item)),
    make("div", { class: "answer-foot" }, text, chart));
  return { caption, own, images, text, chart, element };
}

function fill(each, answer) {
  each.element.hidden = !answer;
  if (!answer) return;
  each.images.forEach(({ item, image }, place) => {
    const found = answer.top[place];
    item.hidden = !found;
    if (!found) return;
    const source = `/runs/${encodeURIComponent(run.name)}/pictures/${found.picture}.png?v=${Math.round(run.started || 0)}`;
    if (image.getAttribute("src") !== source) image.setAttribute("src", source);
    const right = !answer.own && found.picture === answer.right;
    item.classList.toggle("right", right);
    image.alt = `Image ${found.picture}${right ? ", the right one" : ""}${found.score === null ? "" : `, similarity ${significant(found.score, 2)}`}`;
  });
  say(each.text, verdict(answer));
  each.text.classList.toggle("found", !answer.own && rankOf(answer) === 1);
  const drawn = answer.own ? null : ranks(answer.caption);
  each.chart.replaceChildren(...(drawn ? [drawn, make("span", { class: "muted small", "aria-hidden": "true" }, "its rank, best on top")] : []));
}

function draw() {
  const look = looked[at];
  const captions = looked[looked.length - 1].answers;
  const order = [...captions.filter((answer) => answer.own), ...captions.filter((answer) => !answer.own)];
  if (cards.length !== order.length || cards.some((each, place) => each.caption !== order[place].caption || each.own !== order[place].own)) {
    cards = order.map((answer) => card(answer.caption, answer.own));
    byId("answers").replaceChildren(...cards.map((each) => each.element));
  }
  for (const each of cards) fill(each, look.answers.find((answer) => answer.caption === each.caption && answer.own === each.own));
  const slider = byId("epoch");
  slider.max = String(looked.length - 1);
  slider.value = String(at);
  const text = `Epoch ${count(look.epoch)} · step ${count(look.step)}`;
  slider.setAttribute("aria-valuetext", text);
  say("epoch-text", text);
  const asked = look.answers.filter((answer) => !answer.own);
  const first = asked.filter((answer) => rankOf(answer) === 1).length;
  const five = asked.filter((answer) => { const rank = rankOf(answer); return rank !== null && rank <= 5; }).length;
  say("probes-summary", asked.length ? `Right image first for ${first} of ${asked.length} captions, among the first five for ${five}.` : "");
}

function stop() {
  clearInterval(playing);
  playing = null;
  say("play", "Play");
}

function play() {
  if (playing) { stop(); return; }
  if (at >= looked.length - 1) at = 0;
  draw();
  say("play", "Pause");
  playing = setInterval(() => {
    if (at >= looked.length - 1) { stop(); return; }
    at += 1;
    draw();
  }, TICK);
}

export function drawProbes(shown) {
  const same = run && run.name === shown.name && run.started === shown.started;
  const wasLast = !same || at >= looked.length - 1;
  if (!same) stop();
  run = shown;
  looked = shown.looked;
  show("probes", looked.length > 0);
  if (!looked.length) { stop(); return; }
  // Whoever looks at the newest goes on with it; whoever went back stays there.
  if (wasLast && !playing) at = looked.length - 1;
  at = Math.min(at, looked.length - 1);
  draw();
}

byId("play").addEventListener("click", play);
byId("epoch").addEventListener("input", (event) => {
  stop();
  at = Number(event.target.value);
  draw();
});
