// One run, live: draws the state that the board pushes.
import { Chart, show } from "/assets/chart.js";

const base = "/runs/" + encodeURIComponent(document.body.dataset.run);
const at = (id) => document.getElementById(id);
const FIRST = ["loss", "metric"];
const charts = new Map();
let zoomed = null, newest = null, findings = "";

const make = (name, className, text) => {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
};

const tidy = (value) => (Math.abs(value) < 10 ? value.toFixed(3) : show(value));

const duration = (seconds) => {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 90) return Math.round(seconds) + " s";
  if (seconds < 5400) return Math.round(seconds / 60) + " min";
  return (seconds / 3600).toFixed(1) + " h";
};

const within = (line) => {
  const kept = line.x.flatMap((x, k) => (!zoomed || (x >= zoomed[0] && x <= zoomed[1]) ? [k] : []));
  return { ...line, x: kept.map((k) => line.x[k]), y: kept.map((k) => line.y[k]) };
};

const draw_panels = (panels) => {
  at("reading").hidden = panels.some((panel) => panel.lines.length);
  at("more").hidden = !panels.some((panel) => !FIRST.includes(panel.key));
  // All charts have the same range of steps.
  const ends = panels.flatMap((panel) => panel.lines.flatMap((line) => (line.x.length ? [line.x[0], line.x[line.x.length - 1]] : [])));
  const x = zoomed || [Math.min(...ends), Math.max(...ends)];
  for (const panel of panels) {
    if (!panel.lines.length) continue;
    if (!charts.has(panel.key)) charts.set(panel.key, new Chart(at(FIRST.includes(panel.key) ? "charts" : "charts-more"), panel.key, zoom));
    charts.get(panel.key).update({ ...panel, x, lines: panel.lines.map(within) });
  }
};

const zoom = (range) => {
  zoomed = range;
  at("reset").hidden = !range;
  at("zoom").textContent = range ? "Steps " + Math.round(range[0]).toLocaleString("en") + " to " + Math.round(range[1]).toLocaleString("en") + "." : "Drag to zoom.";
  if (newest) draw_panels(newest.panels);
};

const draw_findings = (list) => {
  const mark = JSON.stringify(list);
  if (mark === findings) return;
  findings = mark;
  at("findings").replaceChildren(...list.map((finding, place) => {
    const box = make("div", "verdict " + finding.kind + (place ? " second" : ""));
    const head = make("h3", "", (place ? "Also: " : "") + finding.title);
    box.append(head, make("p", "", finding.evidence.charAt(0).toUpperCase() + finding.evidence.slice(1) + "."));
    if (finding.advice.length) {
      const steps = make("ol");
      for (const advice of finding.advice) {
        const item = make("li");
        if (/^--[^:(]*$/.test(advice)) advice.split(/ (?=--)/).forEach((flag) => item.append(make("code", "", flag), " "));
        else item.append(advice);
        steps.append(item);
      }
      box.append(make("p", "next", "Next, in this order:"), steps);
    }
    return box;
  }));
};

const update = (state) => {
  newest = state;
  at("status").className = "pill " + state.status;
  at("status").textContent = state.status;
  at("problem").hidden = !state.problem;
  at("problem").textContent = state.problem || "";
  if (state.step === undefined) return;
  at("bar").max = state.num_steps || 1;
  at("bar").value = state.step;
  at("step").textContent = state.step.toLocaleString("en") + (state.num_steps ? " of " + state.num_steps.toLocaleString("en") : "");
  at("epoch").textContent = state.epoch === null ? "–" : state.epoch.toFixed(2);
  at("loss").textContent = state.loss === null ? "–" : state.loss.toFixed(3);
  at("best-name").textContent = state.best ? "best " + state.best.metric.replaceAll("_", " ") : "best";
  at("best").replaceChildren(state.best ? tidy(state.best.value) + " " : "–", ...(state.best ? [make("small", "", "step " + state.best.step.toLocaleString("en"))] : []));
  at("left").textContent = state.status === "running" ? duration(state.seconds_left) : "–";
  at("diagnosis-title").textContent = state.status === "running" ? "Diagnosis so far" : "Diagnosis";
  draw_findings(state.findings);
  at("notes").hidden = !state.notes.length;
  at("note-list").replaceChildren(...state.notes.map((note) => make("li", "", note)));
  draw_panels(state.panels);
};

at("reset").addEventListener("click", () => zoom(null));

let source = null;
const connect = () => {
  if (source || document.hidden) return;
  source = new EventSource(base + "/events");
  const good = () => { at("live").className = "live on"; at("live").textContent = "live"; };
  source.addEventListener("open", good);
  source.addEventListener("run", (event) => { good(); update(JSON.parse(event.data)); });
  source.addEventListener("error", () => {
    at("live").className = "live off";
    at("live").textContent = "disconnected";
    if (source && source.readyState === EventSource.CLOSED) { source = null; setTimeout(connect, 2000); }
  });
};
document.addEventListener("visibilitychange", () => { if (document.hidden && source) { source.close(); source = null; } else connect(); });
connect();
