// One image, whole, with what is known of it.

import { byId, make, say, show } from "./elements.js";
import { count, size } from "./text.js";

const dialog = byId("viewer"), image = byId("viewer-image");
let number = null; // the image that is shown

const day = (seconds) => new Date(seconds * 1000).toLocaleString("en-GB", { day: "numeric", month: "short", year: "numeric", hour: "2-digit", minute: "2-digit" });

function facts(known) {
  const lines = [
    ["Size", known.width ? `${count(known.width)} × ${count(known.height)}, ${size(known.bytes)}` : size(known.bytes)],
    known.taken === null ? ["Changed", day(known.modified)] : ["Taken", day(known.taken)],
  ];
  byId("viewer-facts").replaceChildren(...lines.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
}

async function copy() {
  const path = byId("viewer-path");
  try {
    await navigator.clipboard.writeText(path.textContent);
    say("viewer-status", "Copied.");
  } catch { // a browser allows it on this machine's own addresses and over https
    getSelection().selectAllChildren(path);
    say("viewer-status", "Selected: copy it with the keyboard.");
  }
}

function missing() {
  image.hidden = true;
  show("viewer-missing", true);
}

// Shows an image: { number, name, first, last }, where first and last say whether there are others before and after.
export async function view(row) {
  byId("viewer-previous").disabled = row.first;
  byId("viewer-next").disabled = row.last;
  if (!dialog.open) dialog.showModal();
  if (number === row.number) return;
  const shown = number = row.number;
  say("viewer-name", row.name);
  say("viewer-status", "");
  for (const id of ["viewer-path", "viewer-facts"]) byId(id).replaceChildren();
  show("viewer-missing", false);
  image.hidden = false;
  image.alt = row.name;
  image.style.maxWidth = "";
  image.src = `/images/${shown}/small`;
  const whole = new Image();
  whole.onload = () => { if (number === shown) image.src = whole.src; };
  whole.onerror = () => { if (number === shown) missing(); };
  whole.src = `/images/${shown}/whole`;
  try {
    const answer = await fetch(`/images/${shown}`, { cache: "no-store" });
    const known = answer.ok ? await answer.json() : null;
    if (number !== shown) return;
    if (!known) { missing(); return; }
    say("viewer-name", known.name);
    say("viewer-path", known.path);
    image.alt = known.name;
    if (known.width) image.style.maxWidth = `${Math.max(2 * known.width, 360)}px`; // a small one is not blown up
    facts(known);
  } catch { /* the image says it, if the server is gone */ }
}

export function shut() {
  number = null;
  image.removeAttribute("src");
  if (dialog.open) dialog.close();
}

export const shown = () => number;

// What the viewer's buttons and keys do: leave(), step(-1 or 1), like(number).
export function listen({ leave, step, like }) {
  byId("viewer-close").addEventListener("click", leave);
  byId("viewer-previous").addEventListener("click", () => step(-1));
  byId("viewer-next").addEventListener("click", () => step(1));
  byId("viewer-like").addEventListener("click", () => like(number));
  byId("viewer-copy").addEventListener("click", copy);
  dialog.addEventListener("cancel", (event) => { event.preventDefault(); leave(); });
  dialog.addEventListener("click", (event) => { if (event.target === dialog) leave(); }); // beside it
  dialog.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    const steps = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 };
    if (event.key === "Escape") leave();
    else if (event.key in steps) step(steps[event.key]);
    else return;
    event.preventDefault();
  });
}
