// The page: what is asked and which image is open stand in the address, so that a reload and the back button keep them.

import { byId, say, show } from "./elements.js";
import { Grid } from "./grid.js";
import { listenForImages } from "./dropping.js";
import { Refused, Results, sameQuestion } from "./results.js";
import * as viewer from "./viewer.js";
import { count } from "./text.js";

const PAUSE = 120; // milliseconds without a key before a question is sent
const facts = JSON.parse(document.querySelector('meta[name="lapclip-facts"]').content);
const words = byId("words");
const grid = new Grid(byId("grid"), (at) => open(at), () => words.focus());
let results = null; // what is on the screen
let coming = null; // the answer that is waited for
let typing = false; // whether the address was changed by typing, which makes one entry of the history, not one a letter
let timer = 0;
let walked = null; // the index of the open image among the results

function number(text) {
  return /^\d{1,15}$/.test(text || "") ? Number(text) : null;
}

function state() {
  const given = new URLSearchParams(location.hash.slice(1));
  return { words: (given.get("words") || "").trim(), like: number(given.get("like")), image: given.get("image") || "", open: number(given.get("open")) };
}

function go(next, { replace = false, opened = false } = {}) {
  const given = new URLSearchParams();
  for (const [name, value] of Object.entries(next)) if (value !== null && value !== "") given.set(name, value);
  const address = `${location.pathname}#${given}`;
  const saved = { ...(history.state || {}), scroll: scrollY };
  if (replace) history.replaceState(saved, "", address);
  else {
    history.replaceState(saved, "");
    history.pushState({ opened }, "", address);
  }
  apply();
}

function apply(scroll = null) {
  const now = state();
  if (!sameQuestion(coming ? coming.question : results && results.question, now)) ask(now, scroll);
  if (now.open === null) {
    if (viewer.shown() !== null) shut();
    return;
  }
  const index = results ? results.indexOf(now.open) : null;
  if (index !== null) walked = index;
  const row = index === null ? { number: now.open, name: "", first: true, last: true }
    : { ...results.row(index), first: index === 0, last: index === results.total - 1 };
  viewer.view(row);
}

function ask(question, scroll) {
  if (coming) coming.stop();
  if (!typing) words.value = question.words;
  chip(question);
  document.title = question.words ? `${question.words} · lapclip search` : "lapclip search";
  const asked = coming = new Results(question, (error) => {
    if (error) fail(error, asked);
    else if (asked === results) { stand(); grid.drawSoon(); apply(); }
    else arrive(asked, scroll);
  });
  asked.need(0, 0);
}

function arrive(asked, scroll) {
  if (results) results.stop();
  results = asked;
  coming = null;
  walked = null;
  grid.show(results);
  scrollTo(0, scroll || 0);
  stand();
  apply(); // an image that is open has its index among them now
}

function fail(error, asked) {
  const lost = !(error instanceof Refused);
  say("standing", lost ? "The server does not answer. To start it again: lapclip search FOLDER --web" : error.message);
  if (lost) setTimeout(() => { if (asked === coming) asked.need(0, 0); else if (asked === results) grid.drawSoon(); }, 2500);
  else if (asked === coming) {
    if (results) results.stop();
    [results, coming] = [asked, null];
    results.total = 0;
    grid.show(results);
    empty("Nothing to show", error.message);
  }
}

function stand() {
  const { question, total, every, ms } = results;
  show("empty", false);
  show("ranking", false);
  if (!total) {
    say("standing", "No images");
    if (every) empty("Nothing found", "This image is not in the index.");
    else empty("No images", `There is nothing to show in ${facts.name}, or --since and --exclude leave nothing.`);
    return;
  }
  const asked = question.words || question.like !== null || question.image;
  const all = total < every - 1 ? `${count(total)} of ${count(every)} images` : `${count(total)} images`;
  say("standing", asked ? `${all}, best first · ${count(ms)} ms` : `${all}, newest first`);
  show("ranking", Boolean(asked));
}

function empty(title, text) {
  say("empty-title", title);
  say("empty-words", text);
  show("empty", true);
}

// What is searched by, where that is not words.
function chip({ like, image }) {
  const source = like !== null ? `/images/${like}/small` : image ? `/asked/${encodeURIComponent(image)}` : null;
  show("by", source !== null);
  if (source === null) byId("by-image").removeAttribute("src");
  else if (byId("by-image").getAttribute("src") !== source) byId("by-image").src = source;
  say("by-words", like !== null ? "More like this" : "Like your image");
  words.placeholder = source === null ? "What is in the image?" : "or in words";
}

function open(at) {
  typing = false;
  walked = at;
  go({ ...state(), open: results.row(at).number }, { opened: true });
}

function shut() {
  viewer.shut();
  if (walked !== null) grid.focus(walked);
  else words.focus();
}

function leave() {
  if (history.state && history.state.opened) history.back();
  else go({ ...state(), open: null }, { replace: true });
}

function step(by) {
  const at = walked === null ? -1 : walked + by;
  if (at < 0 || at >= results.total) return;
  results.need(at - 20, at + 20);
  if (!results.row(at)) return; // it is on its way
  walked = at;
  go({ ...state(), open: results.row(at).number }, { replace: true });
}

function typed() {
  clearTimeout(timer);
  timer = setTimeout(() => {
    const next = { words: words.value.trim(), like: null, image: "", open: null };
    if (sameQuestion(next, state())) return;
    const replace = typing;
    typing = true;
    go(next, { replace });
  }, PAUSE);
}

function showNotes() {
  const text = facts.notes.join(" ");
  const remembered = () => { try { return localStorage.getItem("lapclip-notes"); } catch { return null; } };
  say("notes-first", facts.notes[0] || "");
  say("notes-rest", facts.notes.slice(1).join(" "));
  show("notes", Boolean(text) && remembered() !== text);
  byId("notes-end").addEventListener("click", () => {
    show("notes", false);
    try { localStorage.setItem("lapclip-notes", text); } catch { /* they are shown again the next time */ }
    words.focus();
  });
}

history.scrollRestoration = "manual"; // the page is as high as its answers, which come later
say("folder", facts.name);
showNotes();
viewer.listen({ leave, step, like: (wanted) => go({ words: "", like: wanted, image: "", open: null }) });
listenForImages((image) => { typing = false; go({ words: "", like: null, image, open: null }); }, (text) => say("standing", text));
words.addEventListener("input", typed);
words.addEventListener("blur", () => { typing = false; });
words.addEventListener("keydown", (event) => {
  if (event.key === "ArrowDown") { event.preventDefault(); grid.focus(grid.current); }
});
byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  typing = false;
  grid.focus(0);
});
byId("by-image").addEventListener("error", () => byId("by-image").removeAttribute("src"));
byId("by-end").addEventListener("click", () => { go({ words: "", like: null, image: "", open: null }); words.focus(); });
addEventListener("keydown", (event) => {
  if (byId("viewer").open || event.altKey || event.ctrlKey || event.metaKey) return;
  if (event.key === "/" && document.activeElement !== words) { event.preventDefault(); words.select(); words.focus(); }
  if (event.key === "Escape" && document.activeElement !== words) words.focus();
});
document.addEventListener("visibilitychange", () => { if (!document.hidden && results) results.again(); }); // the index may have grown
addEventListener("popstate", (event) => { typing = false; clearTimeout(timer); apply(event.state && event.state.scroll); });
if (matchMedia("(hover: hover)").matches && state().open === null) words.focus({ preventScroll: true });
apply();
