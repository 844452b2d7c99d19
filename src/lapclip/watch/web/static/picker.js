// The list of runs: a name shows one run, ticks compare several. What is shown is in the address, so that a reload and
// the back button keep it.

import { byId, make, say } from "./elements.js";
import { percent } from "./text.js";

const rows = new Map(); // name -> the parts of its line, reused so that focus stays where it is

export function picked() {
  return new URLSearchParams(location.hash.slice(1)).getAll("run");
}

export function pick(names) {
  const hash = new URLSearchParams(names.map((name) => ["run", name])).toString();
  if (`#${hash}` !== location.hash) location.hash = hash; // fires hashchange, which draws
}

function toggle(name, on) {
  const before = picked();
  const after = on ? [...before, name] : before.filter((each) => each !== name);
  if (after.length) pick([...new Set(after)]);
  else rows.get(name).box.checked = true; // at least one run is shown
}

function line(name) {
  const label = make("span", { class: "run-name" }, name);
  const detail = make("span", { class: "muted small" });
  const button = make("button", { type: "button", class: "run", on: { click: () => pick([name]) } }, label, detail);
  const box = make("input", { type: "checkbox", "aria-label": `Compare ${name}`, title: "Compare",
    on: { change: (event) => toggle(name, event.target.checked) } });
  return { item: make("li", {}, button, box), button, box, detail };
}

export function drawPicker(runs) {
  const list = byId("runs");
  const chosen = picked();
  const wanted = [...runs].reverse(); // the newest first
  for (const name of rows.keys()) if (!runs.some((run) => run.name === name)) { rows.get(name).item.remove(); rows.delete(name); }
  wanted.forEach((run, at) => {
    if (!rows.has(run.name)) rows.set(run.name, line(run.name));
    const { item, button, box, detail } = rows.get(run.name);
    if (list.children[at] !== item) list.insertBefore(item, list.children[at] || null);
    const progress = run.state === "running" && run.steps ? ` ${percent(run.step / run.steps, 0)}` : "";
    say(detail, `${run.status}${progress}${run.best !== null ? ` · val R@1 ${percent(run.best, 0)}` : ""}`);
    item.classList.toggle("live", run.working);
    const isChosen = chosen.includes(run.name);
    box.checked = isChosen;
    if (isChosen) button.setAttribute("aria-current", "true");
    else button.removeAttribute("aria-current");
  });
  say("picked", chosen.length === 1 ? chosen[0] : chosen.length ? `${chosen.length} compared` : "");
}
