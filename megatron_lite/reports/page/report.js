"use strict";
// Draws the charts of the page from its embedded numbers: curves, marks, a read-out under the pointer, zoom by dragging.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const HEIGHT = 230, LEFT = 58, RIGHT = 12, TOP = 8, BOTTOM = 22, LEAST_DRAG = 8;
  const all = data.charts.flatMap((chart) => chart.series.flatMap((series) => [series.x[0], series.x[series.x.length - 1]]));
  const full = [Math.min(...all), Math.max(...all)];
  if (full[0] === full[1]) { full[0] -= 1; full[1] += 1; }
  let range = full.slice();
  const charts = [];

  function element(name, attributes, parent, text) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    if (text !== undefined) made.textContent = text;
    if (parent) parent.appendChild(made);
    return made;
  }

  function number(value) {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e6 || size < 1e-4) return Number(value.toPrecision(3)).toExponential().replace("e+", "e");
    return Number(value.toPrecision(5)).toLocaleString("en-US", { maximumFractionDigits: 9 });
  }

  function count(value, style = {}) { return Math.round(value).toLocaleString("en-US", style); }
  function short(value) { return count(value, value < 1e4 ? {} : { notation: "compact", maximumSignificantDigits: 6 }); }

  function ticks(low, high, wanted) {
    const rough = (high - low) / wanted, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
    const found = [];
    for (let tick = Math.ceil(low / step - 1e-9); tick * step <= high + step * 1e-9; tick++) found.push(tick * step + 0);  // -0 becomes 0
    return found;
  }

  function powers(low, high) {  // numbers of one digit between two powers of ten, round ones first, none too close to another
    const found = [];
    for (const digit of [1, 5, 2, 3, 7, 4, 6, 8, 9]) {
      for (let power = Math.floor(low); power <= high; power++) {
        const place = Math.log10(digit) + power, close = (other) => Math.abs(Math.log10(other) - place) < (high - low) / 7;
        if (place >= low && place <= high && !found.some(close)) found.push(digit * 10 ** power);
      }
    }
    return found.length >= 3 ? found : ticks(10 ** low, 10 ** high, 4);
  }

  function nearest(sorted, value) {  // index of the closest number
    let low = 0, high = sorted.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (sorted[middle] < value) low = middle; else high = middle; }
    return Math.abs(sorted[low] - value) <= Math.abs(sorted[high] - value) ? low : high;
  }

  function setRange(low, high) {
    range = [Math.max(full[0], low), Math.min(full[1], high)];
    if (range[1] - range[0] < 1) range = full.slice();
    for (const chart of charts) chart.draw();
    const zoomed = range[0] !== full[0] || range[1] !== full[1];
    for (const button of document.querySelectorAll(".reset")) button.hidden = !zoomed;
  }

  class Chart {
    constructor(figure, description) {
      this.description = description;
      this.hidden = new Set();
      this.log = description.log;
      this.clip = `clip${charts.length}`;
      this.svg = figure.querySelector("svg");
      this.readout = figure.querySelector(".readout");
      figure.querySelector(".reset").addEventListener("click", () => setRange(...full));
      const log = figure.querySelector(".log");
      log.setAttribute("aria-pressed", this.log);
      log.addEventListener("click", () => {
        this.log = !this.log; log.setAttribute("aria-pressed", this.log); this.draw();
      });
      figure.querySelectorAll(".legend button").forEach((button, index) => button.addEventListener("click", () => {
        if (!this.hidden.delete(index)) this.hidden.add(index);
        button.setAttribute("aria-pressed", !this.hidden.has(index)); this.draw();
      }));
      this.svg.addEventListener("pointerdown", (event) => this.press(event));
      this.svg.addEventListener("pointermove", (event) => this.move(event));
      this.svg.addEventListener("pointerup", (event) => this.release(event));
      this.svg.addEventListener("pointercancel", () => { this.from = undefined; this.clear(); });
      // A finger leaves when it is lifted: the read-out of a tap stays.
      this.svg.addEventListener("pointerleave", (event) => { if (this.from === undefined && event.pointerType !== "touch") this.clear(); });
      this.svg.addEventListener("dblclick", () => setRange(...full));
    }

    visible() {  // series that are shown
      return this.description.series.filter((series) => !this.hidden.has(series.legend));
    }

    draw() {
      const width = this.width = Math.max(this.svg.clientWidth, 200);
      this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
      this.svg.style.height = `${HEIGHT}px`;
      this.svg.replaceChildren();
      this.scale();
      this.axes();
      this.marks();
      const inside = element("clipPath", { id: this.clip }, element("defs", {}, this.svg));
      element("rect", { x: LEFT, y: 0, width: this.width - LEFT - RIGHT, height: HEIGHT - BOTTOM + 2 }, inside);
      for (const series of this.visible()) this.curve(series);
      this.overlay = element("g", {}, this.svg);
      this.clear();
    }

    scale() {
      let low = Infinity, high = -Infinity, positive = true;
      for (const series of this.visible()) series.x.forEach((x, index) => {
        if (x < range[0] || x > range[1]) return;
        const y = series.y[index];
        low = Math.min(low, y); high = Math.max(high, y); positive = positive && y > 0;
      });
      if (low > high) { low = 0; high = 1; }
      this.logarithmic = this.log && positive;
      if (this.logarithmic) { low = Math.log10(low); high = Math.log10(high); }
      const margin = (high - low) * 0.06 || Math.abs(high) * 0.06 || 1;
      this.low = low - margin; this.high = high + margin;
      if (!this.logarithmic && low >= 0 && this.low < 0) this.low = 0;
    }

    x(iteration) { return LEFT + (iteration - range[0]) / (range[1] - range[0]) * (this.width - LEFT - RIGHT); }

    y(value) {
      const place = this.logarithmic ? Math.log10(value) : value;
      return HEIGHT - BOTTOM - (place - this.low) / (this.high - this.low) * (HEIGHT - TOP - BOTTOM);
    }

    iteration(event) {
      const box = this.svg.getBoundingClientRect();
      const share = ((event.clientX - box.left) / box.width * this.width - LEFT) / (this.width - LEFT - RIGHT);
      return range[0] + Math.min(Math.max(share, 0), 1) * (range[1] - range[0]);
    }

    axes() {
      const values = this.logarithmic ? powers(this.low, this.high) : ticks(this.low, this.high, 5);
      for (const value of values) {
        const y = this.y(value);
        element("line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y }, this.svg);
        element("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, this.svg, number(value));
      }
      const found = [110, 85, 60, 35].map((pixels) => ticks(range[0], range[1], this.width / pixels).filter(Number.isInteger));
      for (const tick of found.find((some) => some.length > 1) || found[0]) {
        const words = short(tick), room = this.width - this.x(tick);  // a character takes 7 pixels at most
        const place = room < words.length * 3.5 ? { x: this.width, "text-anchor": "end" } : { x: this.x(tick), "text-anchor": "middle" };
        element("text", { ...place, y: HEIGHT - 6 }, this.svg, words);
      }
    }

    marks() {
      for (const run of data.runs) {
        for (const [iteration, text] of run.starts) this.mark(iteration, text, (x) => element(
          "line", { class: "start", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }, this.svg));
        for (const [iteration, text] of run.dropped) this.mark(iteration, text, (x) => element(
          "path", { class: "dropped", d: `M${x} ${HEIGHT - BOTTOM - 8}l5 8h-10z` }, this.svg));
      }
    }

    mark(iteration, text, make) {
      if (iteration >= range[0] && iteration <= range[1]) element("title", {}, make(this.x(iteration)), text);
    }

    curve(series) {
      const parts = [];
      let pen = "M", before = -1;
      series.x.forEach((x, index) => {
        // One point beyond either end, so that the line reaches the border.
        const inside = x >= range[0] && x <= range[1];
        if (!inside && !(series.x[index + 1] >= range[0] && x < range[0]) && !(before >= range[0] && before <= range[1])) {
          before = x; return;
        }
        if (!this.logarithmic || series.y[index] > 0) { parts.push(`${pen}${this.x(x).toFixed(1)} ${this.y(series.y[index]).toFixed(1)}`); pen = "L"; }
        before = x;
      });
      const width = 1.6 * series.widen, style = `stroke:var(--s${series.color});stroke-width:${series.raw ? 1 : width}`;
      const attributes = { class: series.raw ? "curve raw" : "curve", d: parts.join(""), style, "clip-path": `url(#${this.clip})` };
      if (series.dash) attributes["stroke-dasharray"] = series.dash;
      element("path", attributes, this.svg);
      if (series.x.length <= 60 && !series.raw) series.x.forEach((x, index) => {
        if (x < range[0] || x > range[1] || (this.logarithmic && series.y[index] <= 0)) return;
        element("circle", { cx: this.x(x), cy: this.y(series.y[index]), r: 1 + width, style: `fill:var(--s${series.color})` }, this.svg);
      });
    }

    press(event) {
      if (event.button > 0) return;
      this.from = this.iteration(event);
      if (event.pointerType !== "touch" && this.svg.setPointerCapture && event.isTrusted) this.svg.setPointerCapture(event.pointerId);
      this.move(event);
    }

    move(event) {
      const at = this.iteration(event);
      this.overlay.replaceChildren();
      if (this.from !== undefined) {
        const [low, high] = [Math.min(this.from, at), Math.max(this.from, at)];
        element("rect", { class: "selection", x: this.x(low), width: this.x(high) - this.x(low), y: TOP, height: HEIGHT - TOP - BOTTOM }, this.overlay);
      }
      this.show(at);
    }

    release(event) {
      const from = this.from, to = this.iteration(event);
      this.from = undefined;
      if (from === undefined) return;
      if (Math.abs(this.x(to) - this.x(from)) >= LEAST_DRAG) setRange(Math.min(from, to), Math.max(from, to));
      else this.move(event);
    }

    show(at) {
      const shown = this.visible().filter((series) => series.name && series.x.length);
      if (!shown.length) return;
      const first = shown[0], iteration = first.x[nearest(first.x, at)];
      element("line", { class: "cross", x1: this.x(iteration), x2: this.x(iteration), y1: TOP, y2: HEIGHT - BOTTOM }, this.overlay);
      const words = shown.map((series) => {
        const index = nearest(series.x, iteration);
        element("circle", { cx: this.x(series.x[index]), cy: this.y(series.y[index]), r: 3.5, style: `fill:var(--s${series.color})` }, this.overlay);
        const place = series.x[index] === iteration ? "" : ` (at ${count(series.x[index])})`;
        return `${series.name} ${number(series.y[index])}${place}`;
      });
      this.readout.textContent = `iteration ${count(iteration)}: ${words.join(", ")}`;
    }

    clear() { this.show(range[1]); this.overlay.replaceChildren(); }  // back to the last numbers
  }

  document.querySelectorAll("figure.chart").forEach((figure, index) => charts.push(new Chart(figure, data.charts[index])));
  const redraw = () => charts.forEach((chart) => chart.draw());
  redraw();
  let width = window.innerWidth;
  window.addEventListener("resize", () => { if (window.innerWidth !== width) { width = window.innerWidth; redraw(); } });
  document.documentElement.dataset.drawn = charts.length;
})();
