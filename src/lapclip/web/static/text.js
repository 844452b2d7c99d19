// Numbers as a person reads them. What is not known is a dash.

const UNKNOWN = "–";
export const known = (value) => typeof value === "number" && Number.isFinite(value);

export const percent = (value, digits = 1) => (known(value) ? `${(value * 100).toFixed(digits)} %` : UNKNOWN);
export const count = (value) => (known(value) ? Math.round(value).toLocaleString("en") : UNKNOWN);

export function significant(value, digits = 3) {
  if (!known(value)) return UNKNOWN;
  if (value !== 0 && (Math.abs(value) < 1e-4 || Math.abs(value) >= 1e6)) return value.toExponential(digits - 1);
  return Math.abs(value) >= 10 ** digits ? count(value) : String(Number(value.toPrecision(digits)));
}

export function size(bytes) {
  if (!known(bytes)) return UNKNOWN;
  if (bytes >= 1e9) return `${(bytes / 1e9).toFixed(2)} GB`;
  return bytes >= 1e6 ? `${Math.round(bytes / 1e6)} MB` : `${Math.ceil(bytes / 1e3)} kB`;
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
