// The answer to a question, a part at a time: what is looked at is asked for, what is passed over is not.

const PART = 200; // as the server has it

export class Refused extends Error {}

export function sameQuestion(one, other) {
  return Boolean(one && other) && one.words === other.words && one.like === other.like && one.picture === other.picture;
}

export class Results {
  constructor(question, changed) {
    this.question = question;
    this.changed = changed; // called with an error, or without one when a part has come
    this.total = null; // not known yet
    this.ms = 0;
    this.parts = new Map(); // part -> rows
    this.asked = new Map(); // part -> its AbortController
    this.failed = new Map(); // part -> when it may be asked for again
  }

  row(at) {
    const rows = this.parts.get(Math.floor(at / PART));
    return rows && rows[at % PART];
  }

  // Where a picture stands, as far as is known.
  placeOf(number) {
    for (const [part, rows] of this.parts) {
      const at = rows.findIndex((row) => row.number === number);
      if (at >= 0) return part * PART + at;
    }
    return null;
  }

  // Have these rows come; others that are on their way and were not asked for again are let go.
  need(first, last) {
    const from = Math.floor(Math.max(0, first) / PART);
    const to = Math.floor(Math.max(0, this.total === null ? 0 : Math.min(last, this.total - 1)) / PART);
    for (const [part, stopping] of this.asked) if (part < from || part > to) stopping.abort();
    for (let part = from; part <= to; part += 1) {
      if (!this.parts.has(part) && !this.asked.has(part) && !(this.failed.get(part) > Date.now())) this.fetch(part);
    }
  }

  async fetch(part) {
    const stopping = new AbortController();
    this.asked.set(part, stopping);
    const { words, like, picture } = this.question;
    const given = new URLSearchParams({ part });
    if (words) given.set("words", words);
    if (like !== null) given.set("like", like);
    if (picture) given.set("picture", picture);
    try {
      const answer = await fetch(`/search?${given}`, { cache: "no-store", signal: stopping.signal });
      if (!answer.ok) throw new Refused((await answer.text()).trim());
      const { results, total, ms } = await answer.json();
      if (this.asked.get(part) !== stopping) return;
      if (this.total === null) this.ms = ms;
      this.total = total;
      this.parts.set(part, results);
      this.asked.delete(part);
      this.changed(null);
    } catch (error) {
      const mine = this.asked.get(part) === stopping;
      if (mine) this.asked.delete(part);
      if (error.name === "AbortError" || !mine) return;
      this.failed.set(part, Date.now() + 2000);
      this.changed(error);
    }
  }

  stop() {
    for (const stopping of this.asked.values()) stopping.abort();
    this.asked.clear();
    this.changed = () => {};
  }
}
