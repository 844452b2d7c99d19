// The model and its queue, asked every second, and a box to compare captions with an image. Whatever comes is text.
import { byId, make, say, show } from "./elements.js";
import { ago, count, percent, significant, size } from "./text.js";

function fact(name, value) {
  return make("div", {}, make("dt", {}, name), make("dd", {}, value));
}

function present(state) {
  const model = state.model;
  say("name", model.name);
  document.title = `${model.name}: lapclip serve`;
  say("about", `model ${model.fingerprint}, ${model.dimension} numbers a vector, ${model.engine} on ${model.device} with ${model.threads} ${model.threads === 1 ? "thread" : "threads"}, since ${ago(model.since)}`);
  const queue = state.queue;
  const waiting = queue.items ? `${count(queue.items)} items, about ${significant(queue.seconds)} s of work` : "nothing";
  const asked = state.cache.hits + state.cache.misses;
  byId("now").replaceChildren(
    fact("waiting", waiting),
    fact("from the cache", asked ? percent(state.cache.hits / asked, 0) : "–"),
    fact("memory", size(state.memory_bytes)),
  );
  byId("reasons").replaceChildren(...model.reasons.map((reason) => make("li", {}, reason)));
}

async function refresh() {
  try {
    const answer = await fetch("/state");
    if (!answer.ok) throw new Error(answer.status === 401 ? "Open the whole address that lapclip serve printed." : `The server answers ${answer.status}.`);
    const state = await answer.json();
    present(state);
    say("notice", state.notes.join(" "));
    show("notice", state.notes.length > 0);
    say("standing", "serving");
    byId("standing").classList.remove("failed");
  } catch (error) {
    say("standing", "not answering");
    byId("standing").classList.add("failed");
    say("notice", error instanceof TypeError ? "The server does not answer. It may have ended." : error.message);
    show("notice", true);
  }
  setTimeout(refresh, document.hidden ? 5000 : 1000);
}

let chosen = null;

function choose(file) {
  if (!file) return;
  chosen = file;
  const reader = new FileReader();
  reader.onload = () => { byId("preview").src = reader.result; byId("preview").alt = file.name; show("preview", true); show("drop-text", false); };
  reader.readAsDataURL(file);
}

function asDataUri(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.replace(/^data:[^,]*,/, ""));
    reader.onerror = () => reject(new Error("The file cannot be read."));
    reader.readAsDataURL(file);
  });
}

async function compare(event) {
  event.preventDefault();
  const captions = byId("captions").value.split("\n").map((line) => line.trim()).filter(Boolean).slice(0, 50);
  if (!chosen || !captions.length) { say("try-status", "It takes an image and a caption."); return; }
  say("try-status", "comparing");
  try {
    const items = [{ image: await asDataUri(chosen) }, ...captions.map((text) => ({ text }))];
    const began = performance.now();
    const answer = await fetch("/embed", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ items }) });
    const content = await answer.json();
    if (!answer.ok) throw new Error(content.error.message);
    const [image, ...texts] = content.embeddings;
    const found = texts.map((vector, at) => ({ caption: captions[at], score: vector.reduce((sum, value, each) => sum + value * image[each], 0) }));
    found.sort((first, second) => second.score - first.score);
    byId("results").replaceChildren(...found.map(({ caption, score }) => make("li", {},
      make("span", {}, caption), make("span", { class: "score" }, score.toFixed(3)),
      make("meter", { min: 0, max: 1, value: Math.max(0, score) }))));
    say("try-status", `Cosine of image and caption; ${Math.round(performance.now() - began)} ms. Only the order means something: how high a score is differs from model to model.`);
  } catch (error) {
    byId("results").replaceChildren();
    say("try-status", error.message);
  }
}

byId("file").addEventListener("change", () => choose(byId("file").files[0]));
byId("try").addEventListener("submit", compare);
for (const kind of ["dragover", "dragleave", "drop"]) byId("drop").addEventListener(kind, (event) => {
  event.preventDefault();
  byId("drop").classList.toggle("over", kind === "dragover");
  if (kind === "drop") choose(event.dataTransfer.files[0]);
});
refresh();
