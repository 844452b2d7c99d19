// The page: asks the server what there is, draws it, and listens for what is new. Whole snapshots come now and then,
// rarer where drawing takes long; the newest step comes at once. Of each run one snapshot is held, so a page that
// is open for a day is as large as a new one.

import { drawingTime } from "./charts.js";
import { AXES, drawComparison } from "./comparison.js";
import { announce, byId, choice, say, show } from "./elements.js";
import { drawRun, RANGES } from "./run_charts.js";
import { drawProbes } from "./probes.js";
import { follow } from "./stream.js";
import { drawOverview, drawStep } from "./overview.js";
import { drawPicker, pick, picked } from "./picker.js";

const LEAST = 2000, LONGEST = 20000, SHARE = 0.02; // milliseconds between two looks, and the share of them spent drawing
const STREAMS = 3; // connections of one tab at most
const asked = JSON.parse(document.querySelector('meta[name="lapclip-runs"]').content);
const runs = new Map(); // name -> { tag, snapshot, latest }
let rows = [];
let range = "all", axis = "step";
let wakeUp = () => {};
let missed = 0;

const faults = new Map(); // name -> why its snapshot cannot be had

class Gone extends Error {}
class Fault extends Error {}

async function ask(address, tag) {
  const answer = await fetch(address, { cache: "no-store", headers: tag ? { "If-None-Match": tag } : {} });
  if (answer.status === 304) return null;
  if (answer.status === 404) throw new Gone(address);
  if (!answer.ok) throw new Fault((await answer.text()).trim() || `status ${answer.status}`);
  return { tag: answer.headers.get("ETag"), value: await answer.json() };
}

function notice(text) {
  say("notice", text);
  show("notice", Boolean(text));
}

// What to show: what the address says, else what was asked for at the start, else what is at work, else the newest.
function choose() {
  const names = rows.map((row) => row.name);
  if (picked().length) return;
  const present = asked.filter((name) => names.includes(name));
  const working = rows.filter((row) => row.working).map((row) => row.name);
  if (present.length) pick(present);
  else if (asked.length) notice(`Waiting for ${asked.join(", ")} to begin.`);
  else if (names.length) pick([working[working.length - 1] || names[names.length - 1]]);
}

async function load(name) {
  const known = runs.get(name);
  const row = rows.find((each) => each.name === name);
  if (!row) { if (known) known.gone = true; return; }
  // The list and the snapshots are read at different times: as long as they differ, there is something to come.
  const same = known && !known.gone && Object.keys(row).every((field) => known.snapshot[field] === row[field]);
  if (same && !known.stale) return;
  try {
    const found = await ask(`/runs/${encodeURIComponent(name)}`, known && known.tag);
    const snapshot = found ? found.value : known.snapshot;
    runs.set(name, { tag: found ? found.tag : known.tag, snapshot, latest: known && known.latest, gone: false, stale: false });
    faults.delete(name);
  } catch (error) {
    if (error instanceof Gone) { if (known) known.gone = true; } else if (error instanceof Fault) faults.set(name, error.message);
    else throw error;
  }
}

function draw() {
  const names = picked();
  drawPicker(rows);
  const found = names.map((name) => runs.get(name)).filter(Boolean);
  const one = found.length === 1 && names.length === 1 ? found[0] : null;
  show("empty", !rows.length && !found.length);
  show("overview", Boolean(one));
  show("comparison", found.length > 1);
  if (one) {
    const { snapshot } = one;
    snapshot.latest = one.latest && one.latest.step >= snapshot.step ? one.latest : last(snapshot);
    drawOverview(snapshot);
    drawProbes(snapshot);
    drawRun(snapshot, range);
  } else {
    for (const id of ["probes", "learning", "machine"]) show(id, false);
    if (found.length) drawComparison(found.map((each) => each.snapshot), axis);
  }
  const lost = names.filter((name) => !rows.some((row) => row.name === name));
  if (rows.length || found.length) {
    if (lost.length) notice(found.length ? `The folder of ${lost.join(", ")} is gone. What you see is from before.` : `There is no run called ${lost.join(", ")} here yet.`);
    else notice(names.filter((name) => faults.has(name)).map((name) => `${name} cannot be read: ${faults.get(name)}.`).join(" "));
  }
}

// The newest step of the snapshot, in the form of the stream.
function last({ curves, step }) {
  const end = (points) => points.y[points.y.length - 1];
  if (!curves.loss.y.length) return null;
  return { step, loss: end(curves.loss), t2i_accuracy: end(curves.accuracy), i2t_accuracy: end(curves.accuracy),
    temperature: end(curves.temperature), grad_norm: end(curves.gradient_norm) };
}

function hear(name, { kind, event }) {
  const run = runs.get(name);
  if (!run) return;
  if (kind === "event" && event.type === "step") {
    run.latest = event;
    if (picked().length === 1 && picked()[0] === name && !document.hidden) drawStep(run.snapshot, event);
    return;
  }
  if (kind === "restart") Object.assign(run, { tag: null, latest: null });
  // What is rare changes more than the latest numbers: look again soon.
  if (kind !== "event" || ["evaluation", "looked", "paused", "went_on", "finished", "stopped", "failed", "resumed", "started", "fell_back"].includes(event.type)) {
    run.stale = true;
    setTimeout(() => wakeUp(), 400);
  }
}

function listen() {
  const working = picked().filter((name) => runs.get(name) && !runs.get(name).gone && runs.get(name).snapshot.working);
  const streamed = document.hidden ? [] : working.slice(0, STREAMS);
  follow(streamed.map((name) => [name, () => runs.get(name).snapshot.position]), hear);
}

async function look() {
  rows = (await ask("/runs")).value;
  choose();
  for (const name of [...runs.keys()]) if (!picked().includes(name)) runs.delete(name);
  for (const name of picked()) await load(name);
  draw();
  listen();
}

async function forever() {
  for (;;) {
    if (document.hidden) listen();
    else {
      try {
        await look();
        if (missed) announce("The server answers again.");
        missed = 0;
      } catch (error) {
        missed += 1;
        console.info(`lapclip: ${error.message}`);
        if (missed > 1) notice("The server does not answer: what you see is old. To start it again: lapclip watch --web");
      }
    }
    const rest = Math.min(LONGEST, Math.max(LEAST, drawingTime() / SHARE, missed * LEAST));
    await new Promise((resolve) => {
      const timer = document.hidden ? 0 : setTimeout(resolve, rest);
      wakeUp = () => { clearTimeout(timer); resolve(); };
    });
  }
}

if (matchMedia("(max-width: 800px)").matches) byId("picker").open = false;
choice("range", RANGES, range, (value) => { range = value; draw(); });
choice("comparison-axis", AXES, axis, (value) => { axis = value; draw(); });
addEventListener("hashchange", () => wakeUp());
document.addEventListener("visibilitychange", () => wakeUp());
addEventListener("DOMContentLoaded", forever);
