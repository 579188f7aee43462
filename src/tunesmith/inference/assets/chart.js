// Draws one chart as SVG from plain numbers. Text only ever goes through textContent.
const NS = "http://www.w3.org/2000/svg";
const LEFT = 50, RIGHT = 14, TOP = 10, BOTTOM = 26, RATIO = 0.58;

const element = (name, attributes, parent) => {
  const made = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (parent) parent.append(made);
  return made;
};

export const show = (value) => {
  if (value === null || value === undefined) return "NaN";
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e7)) return value.toExponential(2);
  return size >= 1000 ? Math.round(value).toLocaleString("en") : Number(value.toPrecision(4)).toString();
};

const short = (value) => {
  const size = Math.abs(value);
  if (size >= 1e6) return Number((value / 1e6).toPrecision(3)) + "M";
  if (size >= 1e4) return Number((value / 1e3).toPrecision(3)) + "k";
  if (size !== 0 && size < 1e-3) return value.toExponential(0);
  return String(Number(value.toPrecision(4)));
};

// Round numbers between two values, about `count` of them.
export const ticks = (low, high, count) => {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= rough * 0.75);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  return found;
};

// Index of the point whose x is nearest; x ascends.
export const nearest = (xs, x) => {
  let low = 0, high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1; else high = middle;
  }
  return low > 0 && x - xs[low - 1] <= xs[low] - x ? low - 1 : low;
};

const limits = (panel) => {
  const xs = panel.lines.flatMap((l) => (l.x.length ? [l.x[0], l.x[l.x.length - 1]] : []));
  const values = (kinds) => panel.lines.filter((l) => kinds.includes(l.kind)).flatMap((l) => l.y.filter((v) => v !== null));
  const raw = values(["raw"]).sort((a, b) => a - b), rest = values(["smooth", "points", "dashed"]);
  // One spike of 40 must not press the curve flat: nearly all raw points, and all of the others.
  const top = Math.max(raw.length ? raw[Math.floor(0.995 * (raw.length - 1))] : -Infinity, ...(rest.length ? [rest.reduce((a, b) => Math.max(a, b))] : []));
  const bottom = Math.min(raw.length ? raw[0] : Infinity, ...(rest.length ? [rest.reduce((a, b) => Math.min(a, b))] : []));
  let y = [0, 1];
  if (Number.isFinite(top)) {
    if (panel.key === "metric") {
      const middle = (top + bottom) / 2, half = Math.max((top - bottom) * 0.62, 0.05);
      y = [middle - half, middle + half];
    } else y = [Math.min(0, bottom), top > 0 ? top * 1.08 : 1];
  }
  const [low, high] = panel.x || [xs.length ? Math.min(...xs) : 0, xs.length ? Math.max(...xs) : 1];
  return { x: low === high ? [low - 1, high + 1] : [low, high], y };
};

export class Chart {
  constructor(parent, key, onZoom) {
    this.key = key;
    this.onZoom = onZoom;
    this.at = null;
    this.figure = document.createElement("figure");
    this.figure.className = "chart";
    this.figure.tabIndex = 0;
    this.head = document.createElement("div");
    this.head.className = "head";
    this.svg = element("svg", { class: "plot", role: "img" });
    this.words = document.createElement("figcaption");
    this.hint();
    this.figure.append(this.head, this.svg, this.words);
    parent.append(this.figure);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerdown", (event) => { this.from = this.place(event); if (event.pointerType === "mouse") this.svg.setPointerCapture(event.pointerId); });
    this.svg.addEventListener("pointerup", (event) => this.drop(event));
    this.svg.addEventListener("pointercancel", () => { this.from = null; });
    this.svg.addEventListener("pointerleave", () => { if (document.activeElement !== this.figure) { this.at = null; this.draw(); this.hint(); } });
    this.svg.addEventListener("dblclick", () => this.onZoom(null));
    this.figure.addEventListener("keydown", (event) => this.press(event));
    new ResizeObserver(() => this.draw()).observe(this.figure);
  }

  hint() {
    const text = document.createElement("span");
    text.className = "hint";
    text.textContent = "Point, tap or use the arrow keys to read values.";
    this.words.replaceChildren(text);
  }

  update(panel) {
    this.panel = panel;
    const title = document.createElement("b");
    title.textContent = panel.title;
    this.head.replaceChildren(title);
    for (const line of panel.lines) {
      const key = document.createElement("span");
      key.className = "key " + line.color + " " + line.kind;
      key.textContent = line.name;
      this.head.append(key);
    }
    const last = panel.lines.filter((l) => l.y.length).map((l) => l.name + " " + show(l.y[l.y.length - 1]));
    this.svg.setAttribute("aria-label", panel.title + " by step; now " + last.join(", "));
    this.figure.setAttribute("aria-label", panel.title + ". Arrow keys read values.");
    this.draw();
  }

  draw() {
    if (!this.panel) return;
    const width = Math.max(260, this.figure.clientWidth), height = Math.round(width * RATIO);
    const { x, y } = limits(this.panel);
    this.scale = { x, y, width, height };
    this.svg.setAttribute("viewBox", "0 0 " + width + " " + height);
    this.svg.replaceChildren();
    const px = (v) => LEFT + (width - LEFT - RIGHT) * (v - x[0]) / (x[1] - x[0]);
    const py = (v) => TOP + (height - TOP - BOTTOM) * (1 - (Math.min(v, y[1]) - y[0]) / (y[1] - y[0]));
    this.px = px;
    for (const v of ticks(y[0], y[1], 5)) {
      element("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: py(v), y2: py(v) }, this.svg);
      element("text", { x: LEFT - 8, y: py(v) + 4, "text-anchor": "end" }, this.svg).textContent = short(v);
    }
    for (const v of ticks(x[0], x[1], width < 420 ? 4 : 7)) {
      if (!Number.isInteger(v) || px(v) < LEFT + 12) continue;
      element("text", { x: px(v), y: height - 6, "text-anchor": "middle" }, this.svg).textContent = short(v);
    }
    element("text", { x: LEFT - 8, y: height - 6, "text-anchor": "end" }, this.svg).textContent = "step";
    for (const line of this.panel.lines) this.line(line, px, py);
    if (this.at !== null && this.at >= x[0] && this.at <= x[1]) element("line", { class: "hairline", x1: px(this.at), x2: px(this.at), y1: TOP, y2: height - BOTTOM }, this.svg);
    if (this.from !== null && this.from !== undefined && this.to !== undefined && this.to !== null) {
      element("rect", { class: "chosen", x: Math.min(px(this.from), px(this.to)), width: Math.abs(px(this.to) - px(this.from)), y: TOP, height: height - TOP - BOTTOM }, this.svg);
    }
  }

  line(line, px, py) {
    let path = "", pen = "M";
    line.x.forEach((x, k) => {
      if (line.y[k] === null) { pen = "M"; return; }
      path += pen + px(x).toFixed(1) + " " + py(line.y[k]).toFixed(1);
      pen = "L";
    });
    element("path", { class: "line " + line.color + " " + line.kind, d: path }, this.svg);
    if ((line.kind === "points" || line.kind === "dashed") && line.x.length <= 60) {
      line.x.forEach((x, k) => { if (line.y[k] !== null) element("circle", { class: "dot " + line.color, cx: px(x), cy: py(line.y[k]), r: 4 }, this.svg); });
    }
  }

  place(event) {
    const frame = this.svg.getBoundingClientRect(), { x, width } = this.scale;
    const at = (event.clientX - frame.left) / frame.width * width;
    const share = (at - LEFT) / (width - LEFT - RIGHT);
    return x[0] + Math.min(1, Math.max(0, share)) * (x[1] - x[0]);
  }

  densest() { return this.panel.lines.reduce((a, b) => (b.x.length > a.x.length ? b : a), this.panel.lines[0]); }

  point(event) {
    if (!this.panel || !this.panel.lines.length) return;
    const x = this.place(event);
    this.to = event.buttons === 1 && event.pointerType === "mouse" ? x : null;
    const xs = this.densest().x;
    if (xs.length) this.read(xs[nearest(xs, x)]);
  }

  drop(event) {
    const from = this.from, to = this.place(event), { x, width } = this.scale;
    this.from = this.to = null;
    if (event.pointerType === "mouse" && from !== null && from !== undefined && Math.abs(to - from) * width / (x[1] - x[0]) > 10) this.onZoom([Math.min(from, to), Math.max(from, to)]);
    else this.draw();
  }

  press(event) {
    if (event.key === "Escape") { this.onZoom(null); return; }
    const jump = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (jump === undefined || !this.panel || !this.panel.lines.length) return;
    event.preventDefault();
    const sparse = this.panel.lines.reduce((a, b) => (b.x.length < a.x.length && b.x.length ? b : a));
    const xs = event.shiftKey ? this.densest().x : sparse.x;
    const now = this.at === null ? (jump > 0 ? -1 : xs.length) : nearest(xs, this.at);
    this.read(xs[Math.min(xs.length - 1, Math.max(0, now + jump))]);
  }

  read(x) {
    this.at = x;
    this.draw();
    const place = document.createElement("span");
    place.className = "read";
    place.textContent = "step " + x.toLocaleString("en");
    this.words.replaceChildren(place);
    for (const line of this.panel.lines) {
      if (!line.x.length) continue;
      const k = nearest(line.x, x);
      const part = document.createElement("span"), name = document.createElement("b");
      part.className = "read " + (line.color === "val" ? "c3" : "c0");
      name.textContent = line.name;
      part.append(name, " " + show(line.y[k]) + (line.x[k] === x ? "" : " (step " + line.x[k] + ")"));
      this.words.append(part);
    }
  }
}
