"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const SVG = "http://www.w3.org/2000/svg";

  function el(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) if (value !== null) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }
  function svg(tag, attributes = {}, text = null) {
    const node = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (text !== null) node.textContent = text;
    return node;
  }
  const colour = (k) => `var(--c${k % 8})`;
  // Shapes of the first eight series, the next eight, and so on, about one unit in radius, as in the figures.
  const SHAPES = [
    "M-1 0a1 1 0 1 0 2 0a1 1 0 1 0-2 0z", "M-.9-.9H.9V.9H-.9z", "M0-1.2L1.1.9H-1.1z", "M0-1.3L1.3 0 0 1.3-1.3 0z", "M0 1.2L1.1-.9H-1.1z",
    "M-.4-1.2H.4V-.4H1.2V.4H.4V1.2H-.4V.4H-1.2V-.4H-.4z", "M0-.5L.6-1.1 1.1-.6.5 0 1.1.6.6 1.1 0 .5-.6 1.1-1.1.6-.5 0-1.1-.6-.6-1.1z",
    "M0-1.4L.33-.45 1.33-.43.53.17.82 1.13 0 .56-.82 1.13-.53.17-1.33-.43-.33-.45z",
  ];
  const level = (k) => Math.floor(k / 8);
  const dash = (k) => ["", "5 3", "2 2"][level(k) % 3];
  const mark = (k, x, y, r) => svg("path", { class: "mark", d: SHAPES[level(k) % SHAPES.length], transform: `translate(${x} ${y}) scale(${r})`, style: `fill:${colour(k)}` });
  const golden = (k, light, full) => `hsl(${((k * 137.508) % 360).toFixed(1)} ${full}% ${light}%)`;
  const hue = (k) => (k < 0 ? "#8c8c8c" : golden(k, 50, 72));
  const classHue = (k) => golden(k, [42, 55, 34][k % 3], 62);

  // Round numbers that cover low to high, about n of them.
  function ticks(low, high, n = 4) {
    if (!(high > low)) { const pad = Math.abs(low) * 0.1; low -= pad; high += pad || 1; } // nothing but zeros: from 0 to 1
    const rough = (high - low) / n, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough) || 10 * power;
    const found = [];
    for (let v = Math.floor(low / step) * step; v < high + step * 0.999; v += step) found.push(Number(v.toPrecision(10)));
    return found;
  }
  const plain = (v) => (Math.abs(v) >= 1e4 || (v !== 0 && Math.abs(v) < 1e-3) ? v.toExponential(0) : String(Number(v.toPrecision(6))));
  const tell = (v, digits) => (v === null || v === undefined ? "–" : v.toFixed(digits));

  class Chart {
    constructor(host, chart) {
      this.chart = chart;
      this.small = host.closest(".small") !== null;
      this.shown = chart.series.map(() => true);
      this.at = chart.kind === "dots" ? 0 : chart.x.length - 1;
      this.moved = chart.kind === "dots"; // until then, the values are the last ones of each line
      this.readout = el("output");
      this.plot = svg("svg", { class: "plot", tabindex: "0", role: "img" });
      this.plot.setAttribute("aria-label", `${chart.title}. Arrow keys move along ${chart.x_label}; the values are below.`);
      this.values = [];
      const keys = el("ul", { class: "keys" });
      chart.series.forEach((series, k) => {
        const value = el("span", { class: "value" });
        this.values.push(value);
        const key = svg("svg", { class: "key", viewBox: "0 0 28 12", width: 28, height: 12, "aria-hidden": "true" });
        if (chart.kind !== "dots") key.append(svg("line", { x1: 0, x2: 28, y1: 6, y2: 6, style: `stroke:${colour(series.colour)}`, "stroke-width": 2.5, "stroke-dasharray": dash(series.colour) }));
        if (chart.kind === "dots" || level(series.colour)) key.append(mark(series.colour, 14, 6, 4.2));
        const button = el("button", { type: "button", "aria-pressed": "true" }, key, el("span", { class: "name" }, series.name), value);
        button.addEventListener("click", () => {
          this.shown[k] = !this.shown[k];
          button.setAttribute("aria-pressed", String(this.shown[k]));
          this.draw();
        });
        keys.append(el("li", {}, button));
      });
      host.append(el("h4", {}, el("span", {}, chart.title), this.readout), this.plot, keys);
      if (chart.note) host.append(el("p", { class: "note" }, chart.note));
      const point = (event) => this.point(event);
      this.plot.addEventListener("pointermove", point);
      this.plot.addEventListener("pointerdown", point);
      this.plot.addEventListener("keydown", (event) => {
        const step = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1, Home: -1e9, End: 1e9 }[event.key];
        if (step === undefined) return;
        event.preventDefault();
        this.move(this.at + step);
      });
      new ResizeObserver(() => this.draw()).observe(host);
      this.draw();
    }
    move(at) {
      this.moved = true;
      this.at = Math.max(0, Math.min(this.chart.x.length - 1, at));
      this.guide();
    }
    point(event) {
      const box = this.plot.getBoundingClientRect();
      const [x, y] = [event.clientX - box.left, event.clientY - box.top];
      let best = this.at, least = Infinity;
      this.chart.x.forEach((_, i) => {
        const gap = Math.abs(this.chart.kind === "dots" ? this.rows(i) - y : this.x(i) - x);
        if (gap < least) [least, best] = [gap, i];
      });
      this.move(best);
    }
    draw() {
      const width = Math.max(200, this.plot.parentElement.clientWidth);
      const dots = this.chart.kind === "dots";
      const left = dots ? Math.min(140, 14 + 7 * Math.max(...this.chart.x.map((name) => String(name).length))) : 46;
      const [right, top, bottom] = [12, 8, 34], height = dots ? top + bottom + 24 * this.chart.x.length : this.small ? 160 : 230;
      this.plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
      this.plot.setAttribute("height", height);
      this.plot.replaceChildren();
      const values = this.chart.series.flatMap((s, k) => (this.shown[k] ? [s.y, s.low || [], s.high || []].flat() : [])).filter((v) => v !== null);
      const log = this.chart.log_y && values.every((v) => v > 0);
      const scaled = (v) => (log ? Math.log10(v) : v);
      const [least, most] = values.length ? [Math.min(...values.map(scaled)), Math.max(...values.map(scaled))] : [0, 1];
      let marks = log ? [] : ticks(least, most);
      if (log) for (let p = Math.floor(least); p <= Math.ceil(most + 1e-9) || marks.length < 2; p++) marks.push(p);
      const [low, high] = [marks[0], marks[marks.length - 1]];
      const span = (v) => (scaled(v) - low) / (high - low || 1);
      if (dots) {
        this.x = (v) => left + span(v) * (width - left - right);
        this.rows = (i) => top + 24 * i + 12;
        this.marker = [];
        this.chart.x.forEach((name, i) => {
          const row = svg("rect", { class: "row", x: 0, y: top + 24 * i, width, height: 24 });
          this.marker.push(row);
          this.plot.append(row, svg("text", { x: left - 10, y: this.rows(i) + 4, "text-anchor": "end" }, name));
        });
        for (const mark of marks) {
          this.plot.append(svg("line", { class: "grid", x1: this.x(mark), x2: this.x(mark), y1: top, y2: height - bottom }));
          this.plot.append(svg("text", { x: this.x(mark), y: height - bottom + 16, "text-anchor": "middle" }, plain(mark)));
        }
        this.plot.append(svg("text", { x: width - right, y: height - 2, "text-anchor": "end" }, this.chart.y_label));
        this.chart.series.forEach((series, k) => {
          if (!this.shown[k]) return;
          series.y.forEach((v, i) => {
            if (v !== null) this.plot.append(mark(series.colour, this.x(v), this.rows(i), 4.5));
          });
        });
      } else {
        const n = this.chart.x.length, numbers = this.chart.x.map(Number);
        const [first, last] = [numbers[0], numbers[n - 1]];
        this.x = (i) => left + (last > first ? (numbers[i] - first) / (last - first) : 0.5) * (width - left - right);
        const y = (v) => height - bottom - span(v) * (height - top - bottom);
        for (const mark of marks) {
          const v = log ? 10 ** mark : mark;
          this.plot.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: y(v), y2: y(v) }));
          this.plot.append(svg("text", { x: left - 7, y: y(v) + 4, "text-anchor": "end" }, plain(v)));
        }
        for (const mark of ticks(first, last, Math.min(6, width / 90)).filter((v) => v >= first && v <= last && Number.isInteger(v))) {
          const at = left + (last > first ? (mark - first) / (last - first) : 0.5) * (width - left - right);
          this.plot.append(svg("text", { x: at, y: height - bottom + 16, "text-anchor": "middle" }, plain(mark)));
        }
        this.plot.append(svg("text", { x: width - right, y: height - 2, "text-anchor": "end" }, this.chart.x_label));
        this.chart.series.forEach((series, k) => {
          if (!this.shown[k]) return;
          if (series.low && series.high) {
            const at = series.low.map((v, i) => i).filter((i) => series.low[i] !== null && (!log || series.low[i] > 0));
            const up = at.map((i) => `${this.x(i)},${y(series.high[i])}`), down = at.map((i) => `${this.x(i)},${y(series.low[i])}`).reverse();
            this.plot.append(svg("polygon", { points: [...up, ...down].join(" "), style: `fill:${colour(series.colour)}`, "fill-opacity": 0.13 }));
          }
          let path = "", pen = "M";
          series.y.forEach((v, i) => {
            if (v === null || (log && v <= 0)) { pen = "M"; return; }
            path += `${pen}${this.x(i).toFixed(1)} ${y(v).toFixed(1)}`;
            pen = "L";
          });
          this.plot.append(svg("path", { d: path, fill: "none", style: `stroke:${colour(series.colour)}`, "stroke-width": 1.8, "stroke-dasharray": dash(series.colour), "stroke-linejoin": "round" }));
          const empty = (i) => i < 0 || i >= n || series.y[i] === null || (log && series.y[i] <= 0);
          const every = n < 25 ? 1 : Math.floor(n / 12);
          series.y.forEach((v, i) => {  // marks, and values between gaps, which no line shows
            const alone = empty(i - 1) && empty(i + 1), marked = level(series.colour) && i % every === 0;
            if (!empty(i) && (alone || marked)) this.plot.append(mark(series.colour, this.x(i), y(v), 3));
          });
        });
        this.line = svg("line", { class: "guide", y1: top, y2: height - bottom });
        this.plot.append(this.line);
      }
      this.guide();
    }
    guide() {
      if (this.chart.kind === "dots") this.marker.forEach((row, i) => row.classList.toggle("on", i === this.at));
      else for (const end of ["x1", "x2"]) this.line.setAttribute(end, this.x(this.at));
      if (this.line) this.line.style.display = this.moved ? "" : "none";
      this.readout.textContent = this.moved ? `${this.chart.x_label} ${this.chart.x[this.at]}` : `last ${this.chart.x_label}`;
      this.values.forEach((value, k) => {
        const y = this.chart.series[k].y;
        value.textContent = tell(this.moved ? y[this.at] : y.findLast((v) => v !== null), this.chart.digits);
      });
    }
  }

  // A select that shows one of several parts.
  for (const box of document.querySelectorAll("[data-choose]")) {
    const parts = [...box.querySelectorAll(":scope > [data-name]")];
    if (parts.length < 2) continue;
    const select = el("select", {}, ...parts.map((part, k) => el("option", { value: k }, part.dataset.name)));
    const show = () => parts.forEach((part, k) => { part.hidden = String(k) !== select.value; });
    select.value = String(parts.length - 1);
    select.addEventListener("change", show);
    box.prepend(el("label", { class: "choose" }, box.dataset.choose, select));
    show();
  }
  for (const host of document.querySelectorAll("[data-chart]")) new Chart(host, data.charts[Number(host.dataset.chart)]);

  class Knowledge {
    constructor(host, site) {
      this.site = site;
      this.thumbs = el("div", { class: "thumbs", role: "group", "aria-label": "Pictures" });
      this.picture = el("div", { class: "picture" });
      this.right = el("div", {});
      this.story = el("p", { class: "story", "aria-live": "polite" });
      this.bars = el("div", {});
      this.right.append(this.story, this.bars);
      host.prepend(this.thumbs, el("div", { class: "knowledge" }, this.picture, this.right));
      site.pictures.forEach((picture, n) => {
        const button = el("button", { type: "button", "aria-pressed": "false", "aria-label": `Picture of ${picture.true}` }, el("img", { src: picture.png, alt: "" }));
        button.addEventListener("click", () => this.open(n));
        this.thumbs.append(button);
      });
      new ResizeObserver(() => this.tell()).observe(this.right);
      this.open(0);
    }
    name(k) {
      if (!this.site.per_class) return String(k);
      return `${this.site.classes[Math.floor(k / this.site.per_class)]}.${(k % this.site.per_class) + 1}`;
    }
    open(n) {
      this.n = n;
      [...this.thumbs.children].forEach((button, k) => button.setAttribute("aria-pressed", String(k === n)));
      const picture = this.site.pictures[n], [h, w] = this.site.size;
      const map = el("div", { class: "map", role: "group", "aria-label": "Locations; arrow keys move" });
      map.style.gridTemplate = `repeat(${h}, 1fr) / repeat(${w}, 1fr)`;
      this.buttons = picture.locations.map((at, k) => {
        const label = `row ${Math.floor(k / w) + 1}, column ${(k % w) + 1}: ${this.name(at.k)}`;
        const button = el("button", { type: "button", tabindex: "-1", "aria-pressed": "false", "aria-label": label });
        button.style.setProperty("--hue", hue(at.c));
        for (const event of ["pointerenter", "click", "focus"]) button.addEventListener(event, () => this.choose(k));
        return button;
      });
      map.append(...this.buttons);
      map.addEventListener("keydown", (event) => {
        const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -w, ArrowDown: w }[event.key];
        if (step === undefined) return;
        event.preventDefault();
        const to = this.k + step;
        if (to >= 0 && to < this.buttons.length && !(Math.abs(step) === 1 && Math.floor(to / w) !== Math.floor(this.k / w))) this.buttons[to].focus();
      });
      this.picture.replaceChildren(el("img", { src: picture.png, alt: `The picture, class ${picture.true}` }), map);
      this.choose(Math.floor(h / 2) * w + Math.floor(w / 2));
    }
    choose(k) {
      this.k = k;
      this.buttons.forEach((button, n) => {
        button.setAttribute("aria-pressed", String(n === k));
        button.tabIndex = n === k ? 0 : -1;
      });
      this.tell();
    }
    tell() {
      const picture = this.site.pictures[this.n], at = picture.locations[this.k];
      const what = this.site.per_class ? "sub-class" : "label";
      const kept = at.P === null ? "There is no KD layer here, so nothing is added to the features." :
        at.P.length === 0 ? "The student discards everything here: x̂ = x." :
        `The student adds α‖x'‖ = ${at.added.toFixed(2)} ‖x‖.`;
      this.story.textContent = `Class ${picture.true}, predicted as ${picture.taken}. The teacher's ${what} here is ${this.name(at.k)}. ${kept}`;
      this.bars.replaceChildren(
        this.histogram("p_T: what the teacher says", at.T, hue(at.c)),
        this.histogram("p_S: what the student predicts", at.S, "var(--c0)"),
      );
      if (at.P !== null) this.bars.append(this.histogram("kept after BN-ReLU, shares", at.P, "var(--c2)"));
    }
    histogram(title, entries, fill) {
      const width = Math.max(220, this.right.clientWidth), [left, top, height, bottom] = [30, 4, 64, 16];
      const plot = svg("svg", { class: "plot", viewBox: `0 0 ${width} ${height + top + bottom}`, height: height + top + bottom, role: "img" });
      const M = this.site.labels, x = (k) => left + ((k + 0.5) / M) * (width - left - 4), full = [0.1, 0.2, 0.5, 1].find((v) => entries.every((entry) => entry[1] <= v)) || 1, y = (v) => top + height * (1 - v / full);
      for (const v of [0, full / 2, full]) {
        plot.append(svg("line", { class: "grid", x1: left, x2: width - 4, y1: y(v), y2: y(v) }));
        plot.append(svg("text", { x: left - 6, y: y(v) + 4, "text-anchor": "end" }, v));
      }
      if (this.site.per_class) {
        const classes = this.site.classes, room = Math.max(1, Math.ceil((classes.length * 7 * Math.max(...classes.map((c) => c.length))) / (width - left)));
        classes.forEach((name, c) => {
          const at = x(c * this.site.per_class - 0.5);
          plot.append(svg("line", { class: "grid", x1: at, x2: at, y1: y(0), y2: y(0) + 4 }));
          if (c % room === 0) plot.append(svg("text", { x: at, y: y(0) + 15 }, name));
        });
      } else plot.append(svg("text", { x: left, y: y(0) + 14 }, "0"), svg("text", { x: width - 4, y: y(0) + 14, "text-anchor": "end" }, M - 1));
      const thick = Math.max(2, (0.8 * (width - left)) / M);
      for (const [k, v] of entries) plot.append(svg("rect", { x: x(k) - thick / 2, y: y(v), width: thick, height: Math.max(0.5, (height * v) / full), style: `fill:${fill}` }));
      const words = entries.slice(0, 4).map(([k, v]) => `${this.name(k)}\u00a0${v.toFixed(2)}`).join(", ") || "nothing";
      plot.setAttribute("aria-label", `${title}: ${words}`);
      return el("div", { class: "bars" }, el("h4", {}, title), plot, el("p", {}, words));
    }
  }
  for (const host of document.querySelectorAll("[data-knowledge]")) new Knowledge(host, data.knowledge[Number(host.dataset.knowledge)]);

  for (const host of document.querySelectorAll("[data-planes]")) {
    const planes = data.planes[Number(host.dataset.planes)];
    const panels = el("div", { class: "panels" }), hidden = new Set(), points = [];
    planes.panels.forEach((panel) => {
      const plot = svg("svg", { viewBox: "-1.1 -1.1 2.2 2.2", role: "img", "aria-label": `Features of ${panel.title}` });
      panel.at.forEach(([x, y], n) => {
        const circle = svg("circle", { cx: x, cy: -y, r: 0.028, fill: classHue(planes.labels[n]) });
        points.push([circle, planes.labels[n]]);
        plot.append(circle);
      });
      panels.append(el("figure", {}, el("figcaption", {}, panel.title), plot));
    });
    const keys = el("ul", { class: "keys" });
    planes.classes.forEach((name, c) => {
      const mark = el("span", { class: "dot" });
      mark.style.background = classHue(c);
      const button = el("button", { type: "button", "aria-pressed": "true" }, mark, el("span", { class: "name" }, name));
      button.addEventListener("click", () => {
        hidden.has(c) ? hidden.delete(c) : hidden.add(c);
        button.setAttribute("aria-pressed", String(!hidden.has(c)));
        for (const [circle, label] of points) circle.style.opacity = hidden.has(label) ? 0.06 : 1;
      });
      keys.append(el("li", {}, button));
    });
    keys.style.gridTemplateColumns = "repeat(auto-fill, minmax(5rem, 1fr))";
    host.append(panels, keys);
  }
})();
