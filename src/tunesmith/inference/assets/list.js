// The list of runs: shows what the board pushes, sorts, filters, and counts the selected runs.
const rows = document.getElementById("rows"), pattern = document.getElementById("line").content;
const filter = document.getElementById("filter"), kind = document.getElementById("kind"), order = document.getElementById("order"), go = document.getElementById("go");
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

// A long name may break after a separator, as in the server-side template.
const breakable = (parent, selector, text) => {
  const found = parent.querySelector(selector);
  if (found.textContent !== text) found.replaceChildren(...text.split(/(?<=[_./\\:=])/).flatMap((part, k) => (k ? [document.createElement("wbr"), part] : [part])));
};

// Sort keys, ascending; missing values come last in both directions.
const TROUBLE = ["failed", "damaged", "interrupted"], TONES = ["bad", "warn", "info", "good"];
const KEYS = {
  when: (run) => run.place,
  name: (run) => run.name,
  state: (run) => run.status,
  found: (run) => (run.verdict ? TONES.indexOf(run.verdict[0]) + run.verdict[1] : null),
  result: (run) => (run.score ? -run.score[1] : null),
  curve: (run) => run.loss,
};
const KINDS = {
  running: (run) => run.status === "running",
  finished: (run) => run.status === "finished",
  trouble: (run) => TROUBLE.includes(run.status) || Boolean(run.verdict && ["bad", "warn"].includes(run.verdict[0])),
};
let turned = false;

const arrange = () => {
  const key = KEYS[order.value], sign = turned ? -1 : 1;
  const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
  const sorted = [...rows.children].sort((one, two) => {
    const a = key(one.run), b = key(two.run);
    if (a === null || b === null) return (a === null) - (b === null) || one.run.place - two.run.place;
    return sign * compare(a, b) || one.run.place - two.run.place;
  });
  sorted.forEach((row, place) => { if (rows.children[place] !== row) rows.insertBefore(row, rows.children[place] || null); });
  const falling = ["when", "result"].includes(order.value);  // newest and best first
  for (const head of document.querySelectorAll("th[data-by]")) {
    if (head.dataset.by === order.value) head.setAttribute("aria-sort", turned === falling ? "ascending" : "descending");
    else head.removeAttribute("aria-sort");
  }
};

const fill = (row, run) => {
  row.run = run;
  row.dataset.run = run.id;
  const tick = row.querySelector("input"), name = row.querySelector(".name"), pill = row.querySelector(".pill");
  tick.value = run.id;
  tick.setAttribute("aria-label", "compare " + run.name);
  name.href = "/runs/" + encodeURIComponent(run.id);
  breakable(row, ".name", run.name);
  breakable(row, ".model", run.model);
  set(row, ".trouble", run.problem || "");
  pill.className = "pill " + run.status;
  set(row, ".pill", run.status);
  const bar = row.querySelector("progress");
  bar.max = run.num_steps || 1;
  bar.value = run.step;
  set(row, ".count", number(run.step) + (run.num_steps ? " of " + number(run.num_steps) : "") + " steps");
  set(row, ".loss", run.loss !== null ? "loss " + run.loss.toFixed(3) : run.step ? "loss is NaN" : "");
  set(row, ".value", run.score ? run.score[1].toFixed(3) : "");
  set(row, ".detail", run.score ? run.score[0].replaceAll("_", " ") : "");
  set(row, ".range", run.score && run.score[2] !== null && run.score[3] !== null ? run.score[2].toFixed(3) + " to " + run.score[3].toFixed(3) : "");
  row.querySelector(".tone").className = "tone " + (run.verdict ? run.verdict[0] : "");
  set(row, ".tone", run.verdict ? run.verdict[1] : "");
  row.querySelector(".when").dataset.time = run.updated;
};

const update = (runs) => {
  const known = new Map([...rows.children].map((row) => [row.dataset.run, row]));
  runs.forEach((run, place) => {
    let row = known.get(run.id);
    if (row) known.delete(run.id);
    else row = pattern.firstElementChild.cloneNode(true);
    run.place = place;
    fill(row, run);
    if (!row.isConnected) rows.append(row);
  });
  for (const row of known.values()) row.remove();
  document.getElementById("none").hidden = runs.length > 0;
  arrange();
  look();
};

const look = () => {
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const row of rows.children) {
    const text = [".name", ".model", ".pill", ".tone"].map((part) => row.querySelector(part).textContent).join(" ").toLowerCase();
    const wanted = KINDS[kind.value];
    row.hidden = !words.every((word) => text.includes(word)) || Boolean(wanted && !wanted(row.run));
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
    live.textContent = "disconnected";
    if (source && source.readyState === EventSource.CLOSED) { source = null; setTimeout(connect, 2000); }
  });
};
// A browser opens at most six connections to a host, so a hidden page closes its own.
document.addEventListener("visibilitychange", () => { if (document.hidden && source) { source.close(); source = null; } else connect(); });
filter.addEventListener("input", look);
kind.addEventListener("change", look);
order.addEventListener("change", () => { turned = false; arrange(); });
for (const head of document.querySelectorAll("th[data-by]")) {
  head.addEventListener("click", () => { turned = order.value === head.dataset.by && !turned; order.value = head.dataset.by; arrange(); });
}
rows.addEventListener("change", look);
setInterval(look, 20000);
connect();
