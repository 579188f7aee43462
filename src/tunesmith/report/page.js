
"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("chart-data").textContent);

  // Index of the point whose x is nearest (points ascend in x); points that are gaps stay gaps.
  const nearest = (points, x) => {
    let low = 0, high = points.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (points[middle][0] < x) low = middle + 1; else high = middle;
    }
    return low > 0 && x - points[low - 1][0] <= points[low][0] - x ? low - 1 : low;
  };

  const show = (value) => {
    if (value === null) return "NaN or infinite";
    const size = Math.abs(value);
    return size >= 1000 ? value.toFixed(0) : size > 0 && size < 0.001 ? value.toExponential(2) : value.toFixed(4);
  };

  const set_up = (figure) => {
    const chart = charts[figure.dataset.chart];
    const picture = figure.querySelector(".picture"), hair = figure.querySelector(".hair");
    const words = figure.querySelector("figcaption");
    const [left, top, width, height] = chart.box, [from, to] = chart.x;
    const densest = chart.series.reduce((a, b) => (b.points.length > a.points.length ? b : a)).points;
    const sparse = chart.series.reduce((a, b) => (b.points.length < a.points.length ? b : a)).points;
    let at = null;

    const read = (x) => {
      at = x;
      const share = left + width * (x - from) / (to - from);
      hair.hidden = false;
      hair.style.left = 100 * share + "%";
      hair.style.top = 100 * top + "%";
      hair.style.height = 100 * height + "%";
      words.textContent = "";
      const place = document.createElement("span");
      place.className = "read";
      place.textContent = chart.unit + " " + (chart.unit === "step" ? x : x.toFixed(3));
      words.append(place);
      chart.series.forEach((series, number) => {
        const [px, py] = series.points[nearest(series.points, x)];
        const part = document.createElement("span"), name = document.createElement("b");
        part.className = "read c" + (series.name === "validation" || series.name === "right" ? 3 : number === 0 ? 0 : 1);
        name.textContent = series.name;
        const where = chart.unit === "step" && px !== x ? " (step " + px + ")" : "";
        part.append(name, " " + show(py) + where);
        words.append(part);
      });
    };

    const from_pointer = (event) => {
      const frame = picture.getBoundingClientRect();
      const share = ((event.clientX - frame.left) / frame.width - left) / width;
      const x = from + Math.min(1, Math.max(0, share)) * (to - from);
      read(densest[nearest(densest, x)][0]);
    };
    picture.addEventListener("pointermove", from_pointer);
    picture.addEventListener("pointerdown", from_pointer);
    picture.addEventListener("pointerleave", () => { if (document.activeElement !== figure) hair.hidden = true; });

    figure.addEventListener("keydown", (event) => {
      const jump = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      const ends = { Home: 0, End: sparse.length - 1 }[event.key];
      if (jump === undefined && ends === undefined) return;
      event.preventDefault();
      // Shift: every point of the densest curve; without: from evaluation to evaluation.
      const points = event.shiftKey ? densest : sparse;
      const now = at === null ? (jump > 0 ? -1 : points.length) : nearest(points, at);
      const next = ends === undefined ? now + jump : ends;
      read(points[Math.min(points.length - 1, Math.max(0, next))][0]);
    });
  };

  document.querySelectorAll("figure[data-chart]").forEach(set_up);
})();
