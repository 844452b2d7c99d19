// The answer to a question, a page at a time: what is looked at is asked for, what is passed over is not.

const PAGE = 200; // as the server has it

export class Refused extends Error {}

export function sameQuestion(one, other) {
  return Boolean(one && other) && one.words === other.words && one.like === other.like && one.image === other.image;
}

export class Results {
  constructor(question, changed) {
    this.question = question;
    this.changed = changed; // called with an error, or without one when a page has come
    this.total = null; // not known yet
    this.every = 0; // images that could be found
    this.reading = null; // which reading of the index the rows are from
    this.ms = 0;
    this.pages = new Map(); // page -> rows
    this.asked = new Map(); // page -> its AbortController
    this.failed = new Map(); // page -> when it may be asked for again
  }

  row(at) {
    const rows = this.pages.get(Math.floor(at / PAGE));
    return rows && rows[at % PAGE];
  }

  // Where an image stands, as far as is known.
  indexOf(number) {
    for (const [page, rows] of this.pages) {
      const at = rows.findIndex((row) => row.number === number);
      if (at >= 0) return page * PAGE + at;
    }
    return null;
  }

  // Have these rows come; others that are on their way and were not asked for again are let go.
  need(first, last) {
    const from = Math.floor(Math.max(0, first) / PAGE);
    const to = Math.floor(Math.max(0, this.total === null ? 0 : Math.min(last, this.total - 1)) / PAGE);
    for (const [page, stopping] of this.asked) if (page < from || page > to) stopping.abort();
    for (let page = from; page <= to; page += 1) {
      if (!this.pages.has(page) && !this.asked.has(page) && !(this.failed.get(page) > Date.now())) this.fetch(page);
    }
  }

  async fetch(page) {
    const stopping = new AbortController();
    this.asked.set(page, stopping);
    const { words, like, image } = this.question;
    const given = new URLSearchParams({ page });
    if (words) given.set("words", words);
    if (like !== null) given.set("like", like);
    if (image) given.set("image", image);
    try {
      const answer = await fetch(`/search?${given}`, { cache: "no-store", signal: stopping.signal });
      if (!answer.ok) throw new Refused((await answer.text()).trim());
      const { results, total, count, reading, ms } = await answer.json();
      if (this.asked.get(page) !== stopping) return;
      if (this.total === null) this.ms = ms;
      if (this.reading !== reading) this.pages.clear(); // the index has changed: other rows may have moved
      Object.assign(this, { total, reading, every: count });
      this.pages.set(page, results);
      this.asked.delete(page);
      this.changed(null);
    } catch (error) {
      const mine = this.asked.get(page) === stopping;
      if (mine) this.asked.delete(page);
      if (error.name === "AbortError" || !mine) return;
      this.failed.set(page, Date.now() + 2000);
      this.changed(error);
    }
  }

  // Ask for the first page again: where the index has changed, the others come again as they are needed.
  again() {
    if (!this.asked.size) this.fetch(0);
  }

  stop() {
    for (const stopping of this.asked.values()) stopping.abort();
    this.asked.clear();
    this.changed = () => {};
  }
}
