// Draws the charts in the page's own colours, again when the reader's system changes them, and in light for paper.
(() => {
  "use strict";
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const root = document.documentElement;
  const touch = matchMedia("(pointer: coarse)").matches;
  const narrow = () => root.clientWidth < 600;

  // A text such as "--blue" is the name of a colour of page.css.
  const painted = (value) => {
    if (Array.isArray(value)) return value.map(painted);
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([key, part]) => [key, painted(part)]));
    if (typeof value === "string" && /^--[a-z-]+$/.test(value))
      return getComputedStyle(root).getPropertyValue(value).trim() || value;
    return value;
  };

  const axis = (own) => ({
    gridcolor: "--edge", linecolor: "--edge", zerolinecolor: "--edge", automargin: true, ...own,
    title: { ...(own || {}).title, font: { size: 12 }, standoff: 8 },
  });

  const layout = (own, height, short) => ({
    paper_bgcolor: "--paper", plot_bgcolor: "--paper",
    font: { color: "--ink", size: 12, family: getComputedStyle(document.body).fontFamily },
    margin: { l: 48, r: 12, t: 24, b: 40 },
    hovermode: "x unified", hoverlabel: { bgcolor: "--card", bordercolor: "--edge", font: { color: "--ink" } },
    // On a touch screen a drag scrolls the page; the buttons of the chart zoom it.
    dragmode: touch ? false : "zoom",
    ...own,
    xaxis: axis(own.xaxis), yaxis: axis(own.yaxis),
    legend: { orientation: "h", yanchor: "top", y: -80 / height, x: 0, traceorder: "normal", font: { size: narrow() ? 10 : 12 }, ...(narrow() && short ? { entrywidth: 96 } : {}) },
  });

  const config = {
    responsive: true, displaylogo: false, displayModeBar: touch ? true : "hover",
    modeBarButtons: [["zoomIn2d", "zoomOut2d", "resetScale2d", "toImage"]],
  };

  const draw = () => {
    for (const [name, chart] of Object.entries(charts)) {
      const closest = chart.data.some((trace) => trace.type !== "scatter") ? { hovermode: "closest" } : {};
      const element = document.getElementById(name);
      const short = chart.data.every((trace) => (trace.name || "").length < 18);
      Plotly.react(element, painted(chart.data), painted({ ...layout(chart.layout, element.clientHeight, short), ...closest }), config);
    }
  };

  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  addEventListener("beforeprint", () => { root.classList.add("paper"); draw(); });
  addEventListener("afterprint", () => { root.classList.remove("paper"); draw(); });
})();
