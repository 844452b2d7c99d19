// Several runs on one axis.

import { chart } from "./charts.js";
import { byId, make } from "./elements.js";
import { line, tableOf } from "./run_charts.js";
import { pick } from "./picker.js";
import { count, duration, percent } from "./text.js";

export const AXES = { step: "Steps", minutes: "Minutes of work" };
const COLOURS = ["--accent", "--second", "--third", "--fourth", "--fifth", "--sixth"];
const DASHES = ["solid", "dash", "dot", "dashdot"];

// Where a step lies on the axis: between the known points around it.
function along(run, axis) {
  if (axis === "step") return (step) => step;
  const { x, y } = run.curves.seconds;
  return (step) => {
    const at = x.findIndex((each) => each >= step);
    if (at === -1) return (y[y.length - 1] || 0) / 60;
    const [x0, y0] = at ? [x[at - 1], y[at - 1]] : [0, 0];
    return (y0 + (y[at] - y0) * (step - x0) / Math.max(1e-9, x[at] - x0)) / 60;
  };
}

function spec(title, caption, runs, axis, points, extra = {}) {
  const curves = {};
  const traces = runs.map((run, at) => {
    const position = along(run, axis);
    const found = points(run);
    const moved = { x: found.x.map(position), y: found.y };
    if (moved.x.length) curves[run.name] = moved;
    return line(run.name, moved, COLOURS[at % COLOURS.length], { ...extra.trace,
      line: { dash: DASHES[Math.floor(at / COLOURS.length) % DASHES.length] } });
  });
  if (!Object.keys(curves).length) return null;
  const name = axis === "step" ? "step" : "minutes";
  return { title, caption, traces, layout: {}, x: { title: name }, y: extra.y || {}, height: 320, wide: true,
    revision: `${axis} ${runs.map((run) => run.name).join(" ")}`, table: () => tableOf(name, curves, extra.text) };
}

const evaluated = (name) => (run) => {
  const found = run.evaluations.filter((each) => typeof each[name] === "number");
  return { x: found.map((each) => each.step), y: found.map((each) => each[name]) };
};

export function drawComparison(runs, axis) {
  const head = ["run", "state", "step", "best R@1, val", "work", "pairs/s", "model", "batch"];
  const rows = runs.map((run, at) => make("tr", {},
    make("th", { scope: "row" }, make("span", { class: `dot line-${at % COLOURS.length}`, "aria-hidden": "true" }),
      make("button", { type: "button", class: "link", on: { click: () => pick([run.name]) } }, run.name)),
    ...[run.status, `${count(run.step)} of ${count(run.steps)}`, percent(run.best), duration(run.elapsed), count(run.pairs_per_second),
      run.about.model || "–", count(run.about.batch_size)].map((text) => make("td", {}, String(text)))));
  const table = byId("comparison-table");
  const focused = table.contains(document.activeElement) ? document.activeElement.textContent : null;
  table.replaceChildren(make("thead", {}, make("tr", {}, ...head.map((name) => make("th", { scope: "col" }, name)))), make("tbody", {}, ...rows));
  if (focused) [...table.querySelectorAll("button")].find((button) => button.textContent === focused)?.focus();
  const parent = byId("comparison-charts");
  const shares = { text: percent, y: { tickformat: ".0%", rangemode: "tozero" } };
  chart(parent, "compare-recall", spec("Held-out R@1, val", "How often the right image comes first, on pairs never trained on. Higher is better.", runs, axis,
    evaluated("t2i_r1"), { ...shares, trace: { mode: "lines+markers", marker: { size: 6 } } }));
  chart(parent, "compare-loss", spec("Loss", "Smoothed. Losses compare only between runs of the same batch size.", runs, axis, (run) => run.curves.loss_smoothed));
  chart(parent, "compare-speed", spec("Speed", "Pairs a second.", runs, axis, (run) => run.curves.speed, { y: { rangemode: "tozero" } }));
  document.title = `${runs.length} runs · lapclip`;
}
