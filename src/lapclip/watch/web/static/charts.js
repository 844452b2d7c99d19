// Charts by plotly.js in the page's own colours: drawn when seen, again when their data or the colours change. Each
// stands above the same as a table, for those who cannot see it.

import { make, say, table } from "./elements.js";

const charts = new Map(); // id -> { figure, plot, caption, details, spec, stale, seen }
const root = document.documentElement;
const touch = matchMedia("(pointer: coarse)").matches;
let spent = 0; // milliseconds of drawing since last asked

const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();

// plotly.js reads simple markup in texts.
export const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

// A text such as "--accent" is the name of a colour of page.css.
function painted(value) {
  if (Array.isArray(value)) return value.every((part) => typeof part === "number") ? value : value.map(painted);
  if (value && typeof value === "object")
    return Object.fromEntries(Object.entries(value).map(([key, part]) => [key, painted(part)]));
  return typeof value === "string" && /^--[a-z0-9-]+$/.test(value) ? colour(value) : value;
}

const axis = (own = {}) => ({
  gridcolor: "--edge", linecolor: "--edge", zeroline: false, automargin: true, tickfont: { color: "--muted" }, fixedrange: touch,
  ...own, title: { text: own.title || "", font: { size: 12, color: "--muted" }, standoff: 8 },
});

const layout = (spec) => ({
  paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
  font: { color: "--ink", size: 12, family: getComputedStyle(document.body).fontFamily },
  margin: { l: 44, r: touch ? 8 : 34, t: 8, b: 36 }, // on the right there is room for the tools, beside the legend
  modebar: { orientation: "v", bgcolor: "rgba(0,0,0,0)", color: "--muted", activecolor: "--accent" },
  hovermode: spec.heat ? "closest" : "x unified",
  hoverlabel: { bgcolor: "--card", bordercolor: "--edge", font: { color: "--ink" } },
  dragmode: touch ? false : "zoom", // on a touch screen a drag scrolls the page
  showlegend: spec.traces.filter((trace) => trace.showlegend !== false).length > 1,
  legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", font: { size: 12, color: "--muted" } },
  uirevision: spec.revision || "same", // a zoom outlasts new data
  ...spec.layout, xaxis: axis(spec.x), yaxis: axis(spec.y),
});

const config = { responsive: true, displaylogo: false, displayModeBar: touch ? false : "hover",
  modeBarButtons: [["zoomIn2d", "zoomOut2d", "resetScale2d", "toImage"]] };

let arrives = null;

// plotly.js is large: it comes when the first chart is seen. It brings a style for maps, which we do not draw and our
// policy would refuse, so that is left out.
function plotly() {
  arrives ??= new Promise((resolve, reject) => {
    const { head } = document;
    head.appendChild = (element) => (element.tagName === "STYLE" ? element : Node.prototype.appendChild.call(head, element));
    const script = make("script", { src: "/plotly.js" });
    script.onload = () => { delete head.appendChild; resolve(window.Plotly); };
    script.onerror = () => { delete head.appendChild; arrives = null; reject(new Error("plotly.js did not come")); };
    head.append(script);
  });
  return arrives;
}

function draw(chart) {
  if (!chart.stale || !chart.seen || chart.figure.hidden) return;
  if (!window.Plotly) { plotly().then(() => draw(chart), () => {}); return; }
  chart.stale = false;
  const began = performance.now();
  chart.plot.style.height = `${chart.spec.height || 260}px`;
  window.Plotly.react(chart.plot, painted(chart.spec.traces), painted(layout(chart.spec)), config);
  spent += performance.now() - began;
}

const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const chart = charts.get(entry.target.id);
    if (!chart) continue;
    chart.seen = entry.isIntersecting;
    draw(chart);
  }
}, { rootMargin: "200px" });

function tabulate(chart) {
  if (!chart.details.open) return;
  const { columns, rows } = chart.spec.table();
  chart.details.querySelector(".table").replaceChildren(table(columns, rows, chart.spec.title));
}

function frame(id, spec) {
  const plot = make("div", { class: "plot", id, role: "img", "aria-labelledby": `${id}-title`, "aria-describedby": `${id}-caption` });
  const caption = make("figcaption", { id: `${id}-caption`, class: "muted small" });
  const details = make("details", {}, make("summary", {}, "As a table"),
    make("div", { class: "table", tabindex: "0", role: "region", "aria-label": `${spec.title} as a table` }));
  const figure = make("figure", { class: `card${spec.wide ? " wide" : ""}` },
    make("h3", { id: `${id}-title` }, spec.title), caption, plot, details);
  const chart = { figure, plot, caption, details, spec, stale: true, seen: false };
  details.addEventListener("toggle", () => tabulate(chart));
  charts.set(id, chart);
  watcher.observe(plot);
  return chart;
}

// Put a chart into its parent, or bring it up to date. Without a specification there is nothing to show.
export function chart(parent, id, spec) {
  let found = charts.get(id);
  if (!spec) { if (found) found.figure.hidden = true; return; }
  if (!found) { found = frame(id, spec); parent.append(found.figure); }
  found.figure.hidden = false;
  Object.assign(found, { spec, stale: true });
  say(found.caption, spec.caption || "");
  tabulate(found);
  draw(found);
}

// How long drawing took since the last question: who asks rarely draws rarely.
export function drawingTime() {
  const took = spent;
  spent = 0;
  return took;
}

addEventListener("themechange", () => {
  for (const each of charts.values()) { each.stale = true; draw(each); }
});
