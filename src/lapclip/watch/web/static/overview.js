// The three questions at the top: is it learning, when is it done, is something wrong.

import { announce, byId, make, say } from "./elements.js";
import { ago, count, duration, known, significant, percent } from "./text.js";

const announced = new Map(); // name -> the state and the alarms that were announced

function parameters(value) {
  if (!known(value)) return "";
  return value >= 1e9 ? `${(value / 1e9).toFixed(1)} billion parameters`
    : value >= 1e5 ? `${(value / 1e6).toFixed(1)} million parameters` : `${count(value)} parameters`;
}

// How a run ended badly, in the form of a finding.
function ending(run) {
  const resume = `lapclip resume ${run.name}`;
  if (run.state === "died")
    return [{ id: "died", severity: "alarm", title: "This run died without a word", evidence: `Its process is gone; the last step it wrote is ${count(run.step)}. What it had saved is safe.`, next: resume }];
  if (run.state === "failed")
    return [{ id: "failed", severity: "alarm", title: "This run failed", evidence: run.ending.error || `See runs/${run.name}/log.txt.`, next: resume }];
  return [];
}

function done(run) {
  const left = run.forecast;
  switch (run.state) {
    case "finished": return ["Done", `${ago(run.ending.time)}, after ${duration(run.elapsed)} of work`.replace(/^, /, "")];
    case "stopped": return ["Stopped", `${run.stopped}. To go on: lapclip resume ${run.name}`];
    case "failed": return ["Not by itself", `It failed ${ago(run.ending.time)}.`];
    case "died": return ["Not by itself", "It needs to be resumed."];
    default: break;
  }
  if (run.paused) return ["Paused", `${run.paused}. It goes on by itself.`];
  if (!left) return ["Not known yet", run.step ? "A few more steps will tell." : "Training is being set up."];
  const range = left.low !== null && left.high !== null ? `Between ${duration(left.low)} and ${duration(left.high)}. ` : "";
  const speed = run.pairs_per_second ? `${count(run.pairs_per_second)} pairs a second.` : "";
  return [`In ${duration(left.seconds)}`, `${range}${speed}`];
}

function wrong(findings) {
  const alarms = findings.filter((each) => each.severity === "alarm").length;
  const warnings = findings.filter((each) => each.severity === "warning").length;
  const many = (number, word) => (number ? [`${number} ${word}${number > 1 ? "s" : ""}`] : []);
  if (!alarms && !warnings) return ["No", "Nothing in its events looks wrong.", "fine"];
  const counts = [...many(alarms, "alarm"), ...many(warnings, "warning")].join(", ");
  return [alarms ? "Yes" : "Perhaps", `${counts}: see below.`, alarms ? "alarm" : "warning"];
}

function alarm(finding) {
  const label = { alarm: "Alarm", warning: "Warning", note: "Note" }[finding.severity] || "Note";
  return make("li", { class: `finding ${label.toLowerCase()}` },
    make("p", { class: "finding-title" }, make("span", { class: "tag" }, label), ` ${finding.title}`),
    finding.evidence ? make("p", {}, finding.evidence) : null,
    finding.next ? make("p", { class: "next" }, make("span", { class: "muted" }, "Next: "), finding.next) : null);
}

let drawnAlarms = "";
function alarms(findings) {
  const now = JSON.stringify(findings);
  if (now === drawnAlarms) return;
  drawnAlarms = now;
  byId("alarms").replaceChildren(...findings.map(alarm));
}

function announceChanges(run, findings) {
  const before = announced.get(run.name);
  const titles = findings.filter((each) => each.severity === "alarm").map((each) => each.title);
  const now = { state: run.status, titles };
  announced.set(run.name, now);
  if (!before) return;
  if (before.state !== now.state) announce(`${run.name}: ${now.state}`);
  const fresh = titles.filter((title) => !before.titles.includes(title));
  if (fresh.length) announce(`${run.name}: alarm: ${fresh.join("; ")}`);
}

export function drawOverview(run) {
  const findings = [...ending(run).filter(({ id }) => !run.findings.some((each) => each.id === id)), ...run.findings];
  say("title", run.name);
  say("state", run.status);
  byId("state").className = `pill ${run.paused ? "paused" : run.state}`;
  const { about } = run;
  const device = about.devices.length ? `on ${about.devices.join(" and ")}${about.chip ? ` (${about.chip})` : ""}` : "";
  say("about", [about.model, parameters(about.parameters), about.batch_size ? `batches of ${count(about.batch_size)}` : "", about.dtype, device,
    run.started ? `started ${ago(run.started)}` : ""].filter(Boolean).join(" · "));
  say("learning-answer", run.learning.answer);
  say("learning-detail", run.learning.detail);
  const [when, detail] = done(run);
  say("done-answer", when);
  say("done-detail", detail);
  const [answer, why, tone] = wrong(findings);
  say("wrong-answer", answer);
  say("wrong-detail", why);
  byId("wrong").className = `card question ${tone}`;
  alarms(findings);
  drawNow(run);
  announceChanges(run, findings);
}

const NOW = {
  loss: ["Loss", (event) => significant(event.loss)],
  accuracy: ["Batch accuracy", (event) => percent((event.t2i_accuracy + event.i2t_accuracy) / 2)],
  temperature: ["Temperature", (event) => significant(event.temperature)],
  gradient: ["Gradient norm", (event) => significant(event.grad_norm)],
};

function put(list, id, name, value) {
  let element = byId(`now-${id}`);
  if (!element) {
    element = make("dd", { id: `now-${id}` });
    list.append(make("div", {}, make("dt", {}, name), element));
  }
  say(element, value);
}

// The numbers that change with every step. `event` is the newest step, straight from the stream.
export function drawStep(run, event) {
  const list = byId("now");
  if (event) for (const [id, [name, text]] of Object.entries(NOW)) put(list, id, name, text(event));
  const step = event ? Math.max(event.step, run.state === "running" ? 0 : run.step) : run.step;
  const part = run.steps ? Math.min(1, step / run.steps) : 0;
  const endedEarly = run.state === "finished" && step < run.steps;
  byId("progress").value = endedEarly ? 1 : part;
  const epoch = event && event.epoch ? ` · epoch ${count(event.epoch)}` : "";
  let text = "Setting up";
  if (endedEarly) text = `Ended early, after step ${count(step)} of ${count(run.steps)}`;
  else if (run.steps) text = `Step ${count(step)} of ${count(run.steps)} · ${percent(part, 0)}${epoch}`;
  say("progress-text", text);
  document.title = run.state === "running" ? `${percent(part, 0)} ${run.name} · lapclip` : `${run.status}: ${run.name} · lapclip`;
}

function drawNow(run) {
  const list = byId("now");
  const memory = run.memory.now.y;
  put(list, "recall", "Text to image R@1, val", percent(run.best ?? run.scores.t2i_r1));
  put(list, "kept", "Model kept", run.best_step === null ? "–" : `step ${count(run.best_step)}`);
  drawStep(run, run.latest);
  put(list, "speed", "Speed", run.pairs_per_second ? `${count(run.pairs_per_second)} pairs/s` : "–");
  put(list, "memory", "Memory", memory.length ? `${(memory[memory.length - 1] / 1e9).toFixed(2)} GB` : "–");
  put(list, "energy", "Energy", run.energy.joules === null ? "–" : `${run.energy.at_least ? "at least " : ""}${significant(run.energy.joules / 3600)} Wh`);
}
