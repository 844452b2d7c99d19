// The charts of one run.

import { chart, plain } from "./charts.js";
import { byId, make, say, show, table } from "./elements.js";
import { count, duration, significant, percent, size } from "./text.js";

export const RANGES = { all: "All", half: "Last half", recent: "Last 200" };

function from(range, step) {
  return range === "half" ? step / 2 : range === "recent" ? step - 200 : -Infinity;
}

const cut = (points, first) => {
  const at = points.x.findIndex((x) => x >= first);
  return at <= 0 ? points : { x: points.x.slice(at), y: points.y.slice(at) };
};

export const line = (name, points, colour, extra = {}) => ({
  type: "scatter", mode: "lines", name: plain(name), x: points.x, y: points.y,
  hovertemplate: `${plain(name)}: %{y:.4~g}<extra></extra>`, ...extra, line: { color: colour, width: 2, ...extra.line },
});
const faint = { line: { width: 1 }, showlegend: false, hoverinfo: "skip", hovertemplate: null };
const level = (name, x, value, extra = {}) => line(name, { x: [x[0], x[x.length - 1]], y: [value, value] }, "--muted",
  { ...extra, line: { width: 1, dash: "dot" } });
const shares = (name) => ({ hovertemplate: `${plain(name)}: %{y:.1%}<extra></extra>` });

// A few rows of some curves: the latest value at or before each of eight points.
export function tableOf(x, curves, text = significant) {
  const longest = Object.values(curves).reduce((a, b) => (b.x.length > a.x.length ? b : a));
  const most = Math.min(8, longest.x.length);
  const points = Array.from({ length: most }, (_, at) => longest.x[Math.round(at * (longest.x.length - 1) / Math.max(1, most - 1))]);
  const value = (each, last) => {
    let found;
    for (let at = 0; at < each.x.length && each.x[at] <= last; at += 1) found = each.y[at];
    return text(found);
  };
  return { columns: [x, ...Object.keys(curves)],
    rows: points.map((at) => [count(at), ...Object.values(curves).map((each) => value(each, at))]) };
}

function marks(run) {
  const shapes = run.marks.map(({ step }) => ({ type: "line", x0: step, x1: step, y0: 0, y1: 1, yref: "paper",
    line: { color: "--muted", width: 1, dash: "dot" } }));
  const annotations = run.marks.map(({ step, text }) => ({ x: step, y: 1, yref: "paper", yanchor: "top", xanchor: "left",
    showarrow: false, text: plain(text), font: { size: 11, color: "--muted" } }));
  return { shapes, annotations };
}

const metricTitles = new Set(); // of all runs that were shown, so that another run's charts are hidden
const steps = { title: "step", tickformat: ",", hoverformat: "," };

function loss(run, first) {
  const raw = cut(run.curves.loss, first);
  const mean = cut(run.curves.loss_smoothed, first);
  if (!raw.x.length) return null;
  const guess = run.about.chance_loss;
  const traces = [line("each step", raw, "--faint", faint), line("loss", mean, "--accent")];
  if (guess) traces.push(level("guessing", raw.x, guess, { hoverinfo: "skip", hovertemplate: null }));
  return { title: "Loss", caption: "Lower is better. Whether more time would help shows in the held-out recall beside it.", traces, layout: marks(run),
    x: steps, y: {}, table: () => tableOf("step", { "each step": raw, smoothed: mean }) };
}

function recall(run, first) {
  const mean = cut(run.curves.accuracy_smoothed, first);
  const shown = run.evaluations.filter((each) => each.step >= first);
  const of = (name) => {
    const found = shown.filter((each) => typeof each[name] === "number");
    return { x: found.map((each) => each.step), y: found.map((each) => each[name]) };
  };
  const kept = shown.find((each) => each.step === run.best_step);
  const one = of("t2i_r1"), five = of("t2i_r5"), back = of("i2t_r1");
  if (!mean.x.length && !one.x.length) return null;
  const traces = [];
  if (mean.x.length) traces.push(line("training batches", mean, "--faint", shares("training batches")));
  if (five.x.length) traces.push(line("in the first five", five, "--accent",
    { ...shares("in the first five"), mode: "lines", line: { dash: "dot", width: 1.5 } }));
  if (one.x.length) {
    const ends = shown.filter((each) => typeof each.t2i_r1 === "number").map((each) => each.interval || [each.t2i_r1, each.t2i_r1]);
    traces.push(line("first", one, "--accent", { ...shares("first"), mode: "lines+markers", marker: { size: 6 },
      error_y: { type: "data", symmetric: false, array: ends.map((end, at) => end[1] - one.y[at]),
        arrayminus: ends.map((end, at) => one.y[at] - end[0]), thickness: 1, width: 0 } }));
  }
  if (kept && typeof kept.t2i_r1 === "number")
    traces.push(line("model kept", { x: [kept.step], y: [kept.t2i_r1] }, "--accent",
      { ...shares(`model kept, step ${count(kept.step)}`), mode: "markers", marker: { size: 12, symbol: "star" } }));
  const chance = shown.length ? shown[shown.length - 1].chance : null;
  const x = [...mean.x, ...one.x];
  if (chance) traces.push(level("guessing", [Math.min(...x), Math.max(...x)], chance, { hoverinfo: "skip", hovertemplate: null }));
  const curves = { "training batches": mean, "R@1 text to image": one, "R@5 text to image": five, "R@1 image to text": back };
  return { title: "Accuracy and recall", traces, layout: marks(run),
    caption: "How often the right image comes first (R@1), or in the first five (R@5), on pairs never trained on (split val).",
    x: steps, y: { tickformat: ".0%", rangemode: "tozero" },
    table: () => tableOf("step", Object.fromEntries(Object.entries(curves).filter(([, points]) => points.x.length)), percent) };
}

function single(title, caption, points, extra = {}) {
  if (!points.x.length) return null;
  return { title, caption, traces: [line(title, points, "--accent")], x: extra.x || steps, y: extra.y || {}, layout: {},
    table: () => tableOf(extra.x ? extra.x.title : "step", { [title]: points }), height: extra.height || 220 };
}

const twoColumns = matchMedia("(min-width: 1101px)");
const heatHeight = (names) => 70 + Math.max(18, Math.min(26, 400 / Math.max(1, names.length))) * names.length;

function heat(title, caption, x, names, values, shade, text, extra = {}) {
  if (!x.length || !names.length) return null;
  const shades = values.map((row) => row.map((value) => (value === null ? null : shade(value))));
  return { title, caption, heat: true, height: heatHeight(names),
    traces: [{ type: "heatmap", x, y: names.map(plain), z: shades, text: values.map((row) => row.map(text)),
      hovertemplate: "%{y}, step %{x}: %{text}<extra></extra>", showscale: false, hoverongaps: false, xgap: 0, ygap: 2,
      colorscale: [[0, "--heat-low"], [1, "--heat-high"]], ...extra }],
    layout: {}, x: { ...steps, showgrid: false }, y: { autorange: "reversed", type: "category", showgrid: false, dtick: 1 },
    table: () => ({ columns: ["", "first", "latest", "highest"], rows: names.map((name, at) => {
      const found = values[at].filter((value) => value !== null);
      return [name, text(found[0]), text(found[found.length - 1]), text(found.length ? Math.max(...found) : undefined)];
    }) }) };
}

function gradients(run, first) {
  const { x, names, values } = run.gradients;
  const at = Math.max(0, x.findIndex((step) => step >= first));
  return heat("Gradient norms", "Each row is a part of the model; a strong column is a step that shook it.",
    x.slice(at), names, values.map((row) => row.slice(at)), (value) => (value > 0 ? Math.log10(value) : null), (value) => significant(value));
}

function memory(run) {
  const giga = (points) => ({ x: points.x, y: points.y.map((bytes) => bytes / 1e9) });
  const now = giga(run.memory.now), peak = giga(run.memory.peak);
  if (!now.x.length) return null;
  const whole = run.memory.machine ? ` The machine has ${size(run.memory.machine)}.` : "";
  return { title: "Memory", caption: `Level is good; climbing without end is a leak.${whole}`, height: 220,
    traces: [line("now, GB", now, "--accent"), line("peak, GB", peak, "--muted", { line: { dash: "dot", width: 1.5 } })],
    x: steps, y: { title: "GB", rangemode: "tozero" }, layout: {}, table: () => tableOf("step", { "now, GB": now, "peak, GB": peak }) };
}

const TONES = { load: 0, preprocess: 1, transfer: 2, forward: 3, backward: 4, optimizer: 5, exchange: 6 };

function phases(parent, run) {
  const id = "phases";
  const total = Object.values(run.phases).reduce((a, b) => a + b, 0);
  byId(id)?.remove();
  if (!total) return;
  const bar = make("div", { class: "bar", "aria-hidden": "true" });
  const list = make("ul", { class: "legend" });
  Object.entries(run.phases).forEach(([name, seconds], at) => {
    const tone = `tone-${Object.hasOwn(TONES, name) ? TONES[name] : at % 7}`;
    const block = make("span", { class: `block ${tone}`, title: name });
    block.style.flexGrow = String(seconds / total);
    bar.append(block);
    list.append(make("li", {}, make("span", { class: `dot ${tone}`, "aria-hidden": "true" }), `${name} `,
      make("strong", {}, percent(seconds / total, 0)), make("span", { class: "muted" }, ` ${significant(seconds * 1000)} ms`)));
  });
  parent.prepend(make("figure", { class: "card", id }, make("h3", {}, "Where the time of a step goes"),
    make("figcaption", { class: "muted small" }, "Forward and backward should fill the bar. A wide load means waiting for data."), bar, list));
}

// Where several ranks train: what each does of the work, and how much of its time it waits for the others.
function together(parent, run) {
  const id = "together";
  byId(id)?.remove();
  say("machine-title", run.machines ? "The machines at work" : "The machine at work");
  if (!run.machines) return;
  const { ranks, waiting, advice } = run.machines;
  const more = run.machines.count - ranks.length;
  const rows = ranks.map((rank) => [rank.name, count(rank.rows), percent(rank.share, 0), percent(rank.waited, 0)]);
  parent.prepend(make("figure", { class: "card", id }, make("h3", {}, "Machines"),
    make("figcaption", { class: "muted small" }, "The rows of each batch, and how much of its time each waits for the others."),
    make("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Machines as a table" },
      table(["", "rows", "share", "waits"], rows, "Machines")),
    more > 0 ? make("p", { class: "muted small" }, `and ${count(more)} more`) : null,
    waiting ? make("p", {}, make("strong", {}, waiting)) : null, advice ? make("p", {}, `${advice}.`) : null));
}

function energy(parent, run) {
  const id = "energy";
  byId(id)?.remove();
  const { joules, reason, at_least } = run.energy;
  if (joules === null && !reason) return;
  const text = joules === null ? "Cannot be measured here." : `${at_least ? "At least " : ""}${significant(joules / 3600)} Wh in ${duration(run.elapsed)} of work.`;
  parent.append(make("figure", { class: "card", id }, make("h3", {}, "Energy"), make("p", {}, text), reason ? make("p", { class: "muted small" }, reason) : null));
}

export function drawRun(run, range) {
  const first = from(range, run.step);
  const learning = byId("learning-charts"), machine = byId("machine-charts");
  const revision = `${run.name} ${range}`;
  const put = (parent, id, spec) => chart(parent, id, spec && { ...spec, revision });
  put(learning, "loss", loss(run, first));
  put(learning, "recall", recall(run, first));
  put(learning, "gradients", gradients(run, first));
  put(learning, "temperature", single("Temperature", "How sharply the model compares: falling means surer. It cannot go below 0.01.", cut(run.curves.temperature, first), { height: twoColumns.matches ? heatHeight(run.gradients.names) : 220 }));
  for (const { title } of run.metrics) metricTitles.add(title);
  for (const title of metricTitles) {
    const metric = run.metrics.find((each) => each.title === title);
    put(learning, `metric-${title.replace(/\W/g, "-")}`, metric ? single(title, metric.meaning, cut(metric.points, first)) : null);
  }
  together(machine, run);
  phases(machine, run);
  put(machine, "speed", single("Speed", "Pairs a second. A sag means heat, a battery, or another program.", run.curves.speed, { y: { rangemode: "tozero" } }));
  put(machine, "memory", memory(run));
  put(machine, "cores", heat("Use of the cores", "Strong is busy. A faint row is a core that training does not use.", run.cores.x,
    run.cores.values.map((_, at) => `core ${at}`), run.cores.values, (value) => value, (value) => percent(value, 0), { zmin: 0, zmax: 1 }));
  const minutes = (points) => ({ x: points.x.map((seconds) => seconds / 60), y: points.y });
  put(machine, "power", single("Power, W", "What the measured parts of the machine draw.", minutes(run.energy.watts), { x: { title: "minutes" }, y: { rangemode: "tozero" } }));
  put(machine, "heat", single("Heat, °C", "Near 100 °C most processors slow down.", minutes(run.energy.celsius), { x: { title: "minutes" } }));
  energy(machine, run);
  show("learning", run.curves.loss.x.length > 0 || run.evaluations.length > 0);
  show("machine", run.curves.loss.x.length > 0);
}
