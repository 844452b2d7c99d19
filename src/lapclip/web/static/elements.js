// Making elements. Whatever comes from a run is text here, never markup: nothing in this page parses HTML.

export const byId = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [kind, handler] of Object.entries(value)) element.addEventListener(kind, handler);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

// Only what differs is touched, so that a reader's selection and a screen reader's position stay.
export function say(id, text) {
  const element = typeof id === "string" ? byId(id) : id;
  if (element.textContent !== text) element.textContent = text;
}

export function show(id, visible) {
  byId(id).hidden = !visible;
}

export function table(columns, rows, caption) {
  return make("table", {},
    caption ? make("caption", { class: "unseen" }, caption) : null,
    make("thead", {}, make("tr", {}, ...columns.map((column) => make("th", { scope: "col" }, column)))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((cell, at) =>
      at === 0 ? make("th", { scope: "row" }, cell) : make("td", {}, cell))))));
}

// A row of radio buttons that looks like one switch.
export function choice(id, options, chosen, onChange) {
  const parent = byId(id);
  for (const [value, text] of Object.entries(options)) {
    const input = make("input", { type: "radio", name: id, value, checked: value === chosen, on: { change: () => onChange(value) } });
    parent.append(make("label", {}, input, make("span", {}, text)));
  }
}

const spoken = { last: "" };

// Spoken by screen readers: changes of state, not every step.
export function announce(text) {
  if (text === spoken.last) return;
  spoken.last = text;
  say("spoken", text);
}
