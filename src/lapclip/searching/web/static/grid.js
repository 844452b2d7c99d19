// A grid of any length. Only the tiles on the screen, and a few beyond, are in the page; the rest is empty height.

import { make } from "./elements.js";
import { drop, load } from "./loading.js";

const GAP = 10, WIDE = 210; // pixels between tiles, and about their side
const BEYOND = 2; // rows above and below the screen

export class Grid {
  constructor(list, open, leave) {
    this.list = list;
    this.open = open; // called with the index of a tile
    this.leave = leave; // called when the arrows lead out at the top
    this.results = null;
    this.tiles = new Map(); // at -> { item, button, image, number }
    this.current = 0; // the tile that the keyboard is at
    this.due = false;
    addEventListener("scroll", () => this.drawSoon(), { passive: true });
    new ResizeObserver(() => this.drawSoon()).observe(list);
    list.addEventListener("keydown", (event) => this.walk(event));
    list.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (button) this.enter(Number(button.dataset.at));
    });
    list.addEventListener("focusin", (event) => {
      if (event.target.dataset.at) this.choose(Number(event.target.dataset.at));
    });
  }

  show(results) {
    this.results = results;
    const focused = this.list.contains(document.activeElement);
    for (const at of [...this.tiles.keys()]) this.remove(at);
    this.current = 0;
    this.draw();
    if (focused) this.focus(0);
  }

  get count() {
    return this.results && this.results.total !== null ? this.results.total : 0;
  }

  measure() {
    const width = this.list.clientWidth;
    this.gap = width < 600 ? 6 : GAP;
    this.columns = width < 330 ? 2 : width < 600 ? 3 : Math.max(3, Math.round((width + GAP) / (WIDE + GAP)));
    this.side = (width - this.gap * (this.columns - 1)) / this.columns;
    this.step = this.side + this.gap;
    const height = Math.max(0, Math.ceil(this.count / this.columns) * this.step - this.gap);
    this.list.style.height = `${height}px`;
  }

  drawSoon() {
    if (this.due) return;
    this.due = true;
    requestAnimationFrame(() => { this.due = false; this.draw(); });
  }

  draw() {
    if (!this.results) return;
    this.measure();
    const top = -this.list.getBoundingClientRect().top;
    const first = Math.max(0, Math.floor(top / this.step) - BEYOND) * this.columns;
    const last = Math.min(this.count, (Math.ceil((top + innerHeight) / this.step) + BEYOND) * this.columns) - 1;
    for (const [at, { button }] of this.tiles) {
      // The one that has the focus stays, or the keyboard would lose its place.
      if ((at < first || at > last) && button !== document.activeElement) this.remove(at);
    }
    for (let at = first; at <= last; at += 1) if (!this.tiles.has(at)) this.add(at);
    for (const [at, tile] of this.tiles) this.fill(at, tile);
    if (last >= first) this.results.need(first, last);
  }

  add(at) {
    const image = make("img", { alt: "", draggable: "false" });
    const name = make("span", { class: "name", "aria-hidden": "true" });
    const level = make("span", { class: "level" });
    const bar = make("span", { class: "bar", "aria-hidden": "true" }, level);
    const button = make("button", { type: "button", class: "tile", "data-at": at, tabindex: at === this.current ? 0 : -1 }, image, name, bar);
    const item = make("li", { "aria-posinset": at + 1 }, button);
    this.tiles.set(at, { item, button, image, name, bar, level, number: null });
    // In the order of the images, which is that of screen readers.
    const after = [...this.list.children].find((other) => Number(other.firstChild.dataset.at) > at);
    this.list.insertBefore(item, after || null);
  }

  fill(at, tile) {
    const { item, button, image, name, bar, level } = tile;
    item.setAttribute("aria-setsize", this.count);
    item.style.width = item.style.height = `${this.side}px`;
    item.style.transform = `translate(${(at % this.columns) * this.step}px, ${Math.floor(at / this.columns) * this.step}px)`;
    const row = this.results.row(at);
    if (!row) return;
    bar.hidden = row.bar === null; // the same image has another similarity to another question
    level.style.width = `${100 * (row.bar || 0)}%`;
    if (tile.number === row.number) return;
    tile.number = row.number;
    image.alt = row.name;
    name.textContent = row.name;
    button.classList.remove("missing");
    load(image, `/images/${row.number}/small`, (worked) => button.classList.add(worked ? "there" : "missing"));
  }

  remove(at) {
    const { item, image } = this.tiles.get(at);
    drop(image);
    item.remove();
    this.tiles.delete(at);
  }

  choose(at) {
    const before = this.tiles.get(this.current), now = this.tiles.get(at);
    if (before) before.button.tabIndex = -1;
    if (now) now.button.tabIndex = 0;
    this.current = at;
  }

  enter(at) {
    if (this.results.row(at)) this.open(at);
  }

  // Bring a tile onto the screen and give it the focus.
  focus(at) {
    if (!this.count) return;
    at = Math.min(Math.max(0, at), this.count - 1);
    const top = this.list.getBoundingClientRect().top + Math.floor(at / this.columns) * this.step;
    const covered = document.querySelector(".asking").getBoundingClientRect().height + this.gap;
    const over = top - covered, under = top + this.side + this.gap - innerHeight;
    if (over < 0) scrollBy(0, over);
    else if (under > 0) scrollBy(0, Math.min(under, over));
    this.choose(at);
    this.draw();
    this.tiles.get(at).button.focus({ preventScroll: true });
  }

  walk(event) {
    if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    const at = this.current, rows = Math.max(1, Math.floor(innerHeight / this.step) - 1);
    const lower = (by) => (at + by < this.count ? at + by : Math.max(at, this.count - 1));
    const upper = (by) => (at - by >= 0 ? at - by : at % this.columns);
    const targets = {
      ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: lower(this.columns), ArrowUp: at - this.columns,
      PageDown: lower(rows * this.columns), PageUp: upper(rows * this.columns), Home: 0, End: this.count - 1,
    };
    if (!(event.key in targets)) return;
    event.preventDefault();
    if (targets[event.key] < 0) this.leave();
    else this.focus(targets[event.key]);
  }
}
