// The state of a run, and the parts of its model, as a person reads them.

import { count, known } from "./text.js";

export function parameters(value) {
  if (!known(value)) return "";
  return value >= 1e9 ? `${(value / 1e9).toFixed(1)} billion parameters`
    : value >= 1e5 ? `${(value / 1e6).toFixed(1)} million parameters` : `${count(value)} parameters`;
}

export function part(name) {
  const [tower, place] = [name.split(".")[0], name.split(".").slice(1).join(".")];
  if (!place || !["image", "text"].includes(tower)) return name;
  return /^\d+$/.test(place) ? `${tower} block ${Number(place) + 1}` : `${tower} ${place}`;
}

const STATES = { starting: "Starting", running: "Training", finished: "Finished", stopped: "Stopped", failed: "Failed", died: "Died" };

export const atWork = (run) => run.state === "running" || run.state === "starting";

export function state(run) {
  if (run.waits_for) return `Waiting for ${run.waits_for}`;
  if (run.state === "running" && run.paused) return "Paused";
  if (run.state === "running" && !run.step) return "Starting";
  return STATES[run.state] || String(run.state);
}

export const ordinal = (rank) => ["first", "second", "third", "fourth", "fifth"][rank - 1] || `number ${count(rank)}`;
