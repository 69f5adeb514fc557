// Curves over steps, one line a run; where steps share a point, their range is a band.

import { colour, el, runColour } from "./dom.js";
import { labels, number, whole } from "./numbers.js";

const HEIGHT = 220;
const sync = "steps";

export class CurveCard {
  constructor(title, { wide = false, height = HEIGHT, onZoom = null, form = number, range = null } = {}) {
    this.title = title;
    this.height = height;
    this.onZoom = onZoom;
    this.form = form;
    this.range = range;
    this.readout = el("span", { class: "readout" });
    this.wrong = el("p", { class: "wrong", hidden: true });
    this.room = el("div", { role: "img" });
    this.element = el(
      "section",
      { class: wide ? "card wide" : "card" },
      el("h2", {}, el("span", {}, title), this.readout),
      this.room,
      this.wrong,
    );
    this.plot = null;
    this.shape = "";
    this.resized = new ResizeObserver(() => this.fit());
    this.resized.observe(this.room);
  }

  // lines: [{name, run, curve, dash}], where a curve is {steps, mean, low, high}.
  update(lines, { log = false } = {}) {
    lines = lines.filter((line) => line.curve && line.curve.steps.length);
    this.lines = lines;
    this.element.hidden = !lines.length;
    this.tellWrong(lines);
    if (!lines.length) return;
    const tables = lines.map(({ curve }) => {
      const fit = (values) => (log ? values.map((v) => (v > 0 ? v : null)) : values);
      const mean = fit(curve.mean);
      return [curve.steps, mean, fit(curve.low ?? curve.mean), fit(curve.high ?? curve.mean)];
    });
    const data = tables.length > 1 ? uPlot.join(tables) : tables[0];
    const theme = document.documentElement.dataset.theme;
    const shape = JSON.stringify([lines.map((line) => [line.name, line.run]), log, theme]);
    if (this.plot && shape === this.shape) this.plot.setData(data);
    else this.make(data, lines, log);
    this.shape = shape;
    this.room.setAttribute("aria-label", this.described(lines));
  }

  make(data, lines, log) {
    this.plot?.destroy();
    const soft = colour("soft");
    const axis = {
      stroke: soft,
      font: "11px system-ui, sans-serif",
      grid: { stroke: colour("line"), width: 1 },
      ticks: { show: false },
    };
    const series = [{}];
    const bands = [];
    for (const { run, dash } of lines) {
      const stroke = runColour(run);
      const hidden = { stroke: "transparent", width: 0, points: { show: false } };
      const first = series.length;
      const few = data[0].length < 2;
      series.push({ stroke, width: 1.5, dash, points: { show: few, size: 5, fill: stroke } }, hidden, hidden);
      bands.push({ series: [first + 2, first + 1], fill: `${stroke}33` });
    }
    this.plot = new uPlot(
      {
        width: Math.max(100, this.room.clientWidth),
        height: this.height,
        legend: { show: false },
        scales: { x: { time: false }, y: { distr: log ? 3 : 1, ...(this.range ? { range: this.range } : {}) } },
        axes: [
          { ...axis, size: 28, grid: { show: false }, values: (_, at) => at.map((v) => (v % 1 ? "" : whole(v))) },
          { ...axis, size: 56, values: (_, at) => labels(at, this.form) },
        ],
        cursor: { sync: { key: sync }, drag: { x: true, y: false, setScale: false }, points: { size: 6 } },
        series,
        bands,
        hooks: {
          setCursor: [(plot) => this.tell(plot.cursor.idx)],
          setSelect: [(plot) => this.zoom(plot)],
        },
      },
      data,
      this.room,
    );
  }

  zoom(plot) {
    if (plot.select.width < 4 || !this.onZoom) return;
    const first = plot.posToVal(plot.select.left, "x");
    const last = plot.posToVal(plot.select.left + plot.select.width, "x");
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.onZoom([Math.max(0, Math.floor(first)), Math.ceil(last)]);
  }

  tell(index) {
    this.readout.replaceChildren();
    if (index == null || !this.plot) return;
    this.readout.append(`step ${whole(this.plot.data[0][index])}`);
    this.lines.forEach(({ name, run }, place) => {
      const value = this.plot.data[1 + 3 * place][index];
      if (value == null) return;
      const told = el("span", { class: "value" }, `${this.lines.length > 1 ? `${name} ` : ""}${this.form(value)}`);
      told.style.setProperty("--colour", runColour(run));
      this.readout.append(told);
    });
  }

  tellWrong(lines) {
    const bad = lines.filter(({ curve }) => curve.nonfinite);
    this.wrong.hidden = !bad.length;
    this.wrong.textContent = bad
      .map(({ name, curve }) => `${name}: ${whole(curve.nonfinite)} values are NaN or Inf, first in step ${whole(curve.first_nonfinite)}.`)
      .join(" ");
  }

  described(lines) {
    const last = lines.map(({ name, curve }) => `${name}: last ${this.form(curve.last)}`);
    return `${this.title} over steps. ${last.join("; ")}`;
  }

  fit() {
    if (this.plot && this.room.clientWidth > 0) {
      this.plot.setSize({ width: this.room.clientWidth, height: this.height });
    }
  }

  close() {
    this.resized.disconnect();
    this.plot?.destroy();
  }
}
