// Keeps the list of runs as the board pushes it, and counts the ticked ones.
const rows = document.getElementById("rows"), pattern = document.getElementById("line").content;
const filter = document.getElementById("filter"), go = document.getElementById("go");
const live = document.getElementById("live"), count = document.getElementById("count");
const number = (value) => value.toLocaleString("en");

const ago = (time) => {
  const seconds = Math.max(0, Date.now() / 1000 - time);
  for (const [limit, unit, name] of [[90, 1, "second"], [5400, 60, "minute"], [129600, 3600, "hour"]]) {
    if (seconds < limit) { const n = Math.round(seconds / unit); return n + " " + name + (n === 1 ? "" : "s") + " ago"; }
  }
  return Math.round(seconds / 86400) + " days ago";
};

const set = (parent, selector, text) => {
  const found = parent.querySelector(selector);
  if (found.textContent !== text) found.textContent = text;
};

const fill = (row, run) => {
  row.dataset.run = run.id;
  const tick = row.querySelector("input"), name = row.querySelector(".name"), pill = row.querySelector(".pill");
  tick.value = run.id;
  tick.setAttribute("aria-label", "compare " + run.name);
  name.href = "/runs/" + encodeURIComponent(run.id);
  set(row, ".name", run.name);
  set(row, ".model", run.model);
  set(row, ".trouble", run.problem || "");
  pill.className = "pill " + run.status;
  set(row, ".pill", run.status);
  const bar = row.querySelector("progress");
  bar.max = run.num_steps || 1;
  bar.value = run.step;
  set(row, ".count", number(run.step) + (run.num_steps ? " of " + number(run.num_steps) : "") + " steps");
  row.querySelector("polyline").setAttribute("points", run.spark);
  set(row, ".loss", run.loss === null ? "" : "loss " + run.loss.toFixed(3));
  set(row, ".value", run.score ? run.score[1].toFixed(3) : "");
  const interval = run.score && run.score[2] !== null && run.score[3] !== null ? ", " + run.score[2].toFixed(3) + " to " + run.score[3].toFixed(3) : "";
  set(row, ".detail", run.score ? run.score[0].replaceAll("_", " ") + interval : "");
  row.querySelector(".when").dataset.time = run.updated;
};

const update = (runs) => {
  const known = new Map([...rows.children].map((row) => [row.dataset.run, row]));
  runs.forEach((run, place) => {
    let row = known.get(run.id);
    if (row) known.delete(run.id);
    else row = pattern.firstElementChild.cloneNode(true);
    fill(row, run);
    if (rows.children[place] !== row) rows.insertBefore(row, rows.children[place] || null);
  });
  for (const row of known.values()) row.remove();
  document.getElementById("none").hidden = runs.length > 0;
  look();
};

const look = () => {
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const row of rows.children) {
    const text = (row.querySelector(".name").textContent + " " + row.querySelector(".model").textContent + " " + row.querySelector(".pill").textContent).toLowerCase();
    row.hidden = !words.every((word) => text.includes(word));
    shown += row.hidden ? 0 : 1;
    set(row, ".when", ago(Number(row.querySelector(".when").dataset.time)));
  }
  const all = rows.children.length;
  count.textContent = (shown === all ? number(all) : number(shown) + " of " + number(all)) + (all === 1 ? " run" : " runs");
  const ticked = rows.querySelectorAll("input:checked").length;
  go.disabled = ticked < 2 || ticked > 8;
  go.textContent = ticked > 8 ? "At most 8 runs" : ticked ? "Compare " + ticked : "Compare";
};

let source = null;
const connect = () => {
  if (source || document.hidden) return;
  source = new EventSource("/events");
  source.addEventListener("runs", (event) => { live.className = "live on"; live.textContent = "live"; update(JSON.parse(event.data)); });
  source.addEventListener("open", () => { live.className = "live on"; live.textContent = "live"; });
  source.addEventListener("error", () => {
    live.className = "live off";
    live.textContent = "the board is away";
    if (source && source.readyState === EventSource.CLOSED) { source = null; setTimeout(connect, 2000); }
  });
};
// A browser opens six connections to one host: a hidden page gives its own back.
document.addEventListener("visibilitychange", () => { if (document.hidden && source) { source.close(); source = null; } else connect(); });
filter.addEventListener("input", look);
rows.addEventListener("change", look);
setInterval(look, 20000);
look();
connect();
