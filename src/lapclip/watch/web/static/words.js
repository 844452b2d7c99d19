// Figures as a person reads them. What is not known is a dash.

const UNKNOWN = "–";
const known = (value) => typeof value === "number" && Number.isFinite(value);

export const percent = (value, digits = 1) => (known(value) ? `${(value * 100).toFixed(digits)} %` : UNKNOWN);
export const count = (value) => (known(value) ? Math.round(value).toLocaleString("en") : UNKNOWN);

export function figure(value, digits = 3) {
  if (!known(value)) return UNKNOWN;
  if (value !== 0 && (Math.abs(value) < 1e-4 || Math.abs(value) >= 1e6)) return value.toExponential(digits - 1);
  return Math.abs(value) >= 10 ** digits ? count(value) : String(Number(value.toPrecision(digits)));
}

export function size(bytes) {
  if (!known(bytes)) return UNKNOWN;
  return bytes >= 1e9 ? `${(bytes / 1e9).toFixed(2)} GB` : `${Math.round(bytes / 1e6)} MB`;
}

export function duration(seconds) {
  if (!known(seconds)) return UNKNOWN;
  if (seconds < 1) return "under a second";
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 10) return `${minutes} min ${Math.round(seconds % 60)} s`;
  if (minutes < 60) return `${Math.round(seconds / 60)} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.round(hours / 24)} days`;
}

// A clock may have been set back: a time to come is "just now".
export function ago(time) {
  if (!known(time)) return "";
  const seconds = Date.now() / 1000 - time;
  if (seconds < 60) return "just now";
  if (seconds < 3600) return `${Math.round(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.round(seconds / 3600)} h ago`;
  return new Date(time * 1000).toLocaleDateString("en", { day: "numeric", month: "short", year: "numeric" });
}

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
  if (run.state === "running" && run.paused) return "Paused";
  if (run.state === "running" && !run.step) return "Starting";
  return STATES[run.state] || String(run.state);
}

export const ordinal = (rank) => ["first", "second", "third", "fourth", "fifth"][rank - 1] || `number ${count(rank)}`;
