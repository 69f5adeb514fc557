// Heat maps: a canvas with names on the left, steps below, a cursor that keys and pointer move.

import { colour, el } from "./dom.js";
import { number, whole } from "./numbers.js";

const ROW = 16;
const MOST_HEIGHT = 620;
const TOP = 7;
const FONT = "11px ui-monospace, 'DejaVu Sans Mono', monospace";
const CHARACTER = 6.7; // its width in this font

const rgbOf = (text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));

export function makePalette(scale, bad) {
  const stops = scale.map(rgbOf);
  const shades = [];
  for (let shade = 0; shade < 254; shade++) {
    const at = (shade / 253) * (stops.length - 1);
    const low = Math.floor(at);
    const high = Math.min(stops.length - 1, low + 1);
    shades.push(stops[low].map((v, c) => Math.round(v + (stops[high][c] - v) * (at - low))));
  }
  return { shades, bad: rgbOf(bad) };
}

export function spanOf(arrays, log) {
  let low = Infinity;
  let high = -Infinity;
  for (const values of arrays) {
    for (const v of values) {
      if (Number.isFinite(v) && (!log || v > 0)) {
        if (v < low) low = v;
        if (v > high) high = v;
      }
    }
  }
  if (low > high) return log ? [1e-3, 1] : [0, 1];
  if (!log) return high > low ? [low, high] : [low, low + 1];
  low = 10 ** Math.floor(Math.log10(low));
  high = 10 ** Math.ceil(Math.log10(high));
  return [low, high > low ? high : 10 * low];
}

export class HeatMap {
  // describe(row, column, value) makes the text beside the cursor; onOpen(row) answers Enter and click.
  constructor(palette, { describe, onOpen = null, rowHeight = ROW, mostHeight = MOST_HEIGHT, label = "" }) {
    Object.assign(this, { palette, describe, onOpen, rowHeight, mostHeight, label });
    this.canvas = el("canvas", { tabindex: "0", role: "img" });
    this.readout = el("p", { class: "readout", "aria-live": "polite" });
    this.bar = el("canvas", { "aria-hidden": "true" });
    this.ends = [el("span"), el("span")];
    this.legend = el("div", { class: "legend" }, this.ends[0], this.bar, this.ends[1]);
    this.element = el("div", {}, this.readout, this.canvas, this.legend);
    this.image = document.createElement("canvas");
    this.at = null;
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => this.move(null));
    this.canvas.addEventListener("click", (event) => {
      this.point(event);
      if (this.at) this.onOpen?.(this.at[0]);
    });
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.resized = new ResizeObserver(() => this.draw());
    this.resized.observe(this.element);
  }

  // map: {names, first, width, columns, values, lines}, where lines are [{at, text}] across rows.
  update(map, [low, high], log, form = number) {
    Object.assign(this, { map, low, high, log, form });
    const { shades, bad } = this.palette;
    const quiet = rgbOf(colour("tint"));
    const rows = map.names.length;
    this.image.width = Math.max(1, map.columns);
    this.image.height = Math.max(1, rows);
    const context = this.image.getContext("2d");
    const pixels = context.createImageData(this.image.width, this.image.height);
    const scale = log ? 253 / Math.log(high / low) : 253 / (high - low);
    for (let i = 0; i < map.values.length; i++) {
      const value = map.values[i];
      if (Number.isNaN(value) || (map.blankZero && value === 0)) continue;
      const share = log ? Math.log(Math.max(value, low) / low) * scale : (value - low) * scale;
      const shade = map.marksBad ? quiet : shades[Math.max(0, Math.min(253, Math.round(share)))];
      const rgb = !Number.isFinite(value) || (map.marksBad && value > 0) ? bad : shade;
      const at = 4 * i;
      pixels.data[at] = rgb[0];
      pixels.data[at + 1] = rgb[1];
      pixels.data[at + 2] = rgb[2];
      pixels.data[at + 3] = 255;
    }
    context.putImageData(pixels, 0, 0);
    this.canvas.setAttribute("aria-label", `${this.label}: ${rows} rows over ${map.columns} columns of steps`);
    this.legend.hidden = Boolean(map.marksBad);
    this.ends[0].textContent = form(low);
    this.ends[1].textContent = form(high);
    this.draw();
    this.move(this.at);
  }

  draw() {
    if (!this.map || !this.element.clientWidth) return;
    const { names, first, width, columns, lines = [] } = this.map;
    const wide = this.element.clientWidth;
    const ratio = window.devicePixelRatio || 1;
    const context = this.canvas.getContext("2d");
    context.font = FONT;
    const longest = Math.max(...names.slice(0, 2000).map((name) => name.length), 4) * CHARACTER + 12;
    this.left = Math.min(longest, wide * (wide < 600 ? 0.3 : 0.34));
    this.tall = Math.min(this.mostHeight, Math.max(24, names.length * this.rowHeight));
    const beside = Math.max(...lines.map(({ text }) => text.length), 0) * CHARACTER + 10;
    this.right = wide - (lines.length ? Math.min(beside, Math.max(132, wide * 0.25)) : 2);
    const height = TOP + this.tall + 22;
    this.canvas.style.height = `${height}px`;
    this.canvas.width = wide * ratio;
    this.canvas.height = height * ratio;
    context.setTransform(ratio, 0, 0, ratio, 0, TOP * ratio);
    context.font = FONT;
    context.imageSmoothingEnabled = false;
    context.drawImage(this.image, this.left, 0, this.right - this.left, this.tall);
    context.fillStyle = colour("soft");
    this.drawNames(context, names);
    this.drawSteps(context, first, width, columns);
    this.drawLines(context, lines);
    if (this.at) this.drawCursor(context);
  }

  drawNames(context, names) {
    const each = this.tall / names.length;
    const every = Math.max(1, Math.ceil(13 / each));
    // The tolerance: 8 characters times their width, divided by it, may be 7.999.
    const most = Math.floor((this.left - 12) / CHARACTER + 1e-6);
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (let row = 0; row < names.length; row += every) {
      const name = names[row];
      const short = name.length > most ? `…${name.slice(1 - most)}` : name;
      context.fillText(short, this.left - 8, (row + 0.5) * each);
    }
  }

  drawSteps(context, first, width, columns) {
    const total = columns * width;
    const pixels = this.right - this.left;
    const rough = total / Math.max(2, Math.floor(pixels / 90));
    const power = 10 ** Math.floor(Math.log10(Math.max(1, rough)));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough) ?? power;
    context.textBaseline = "alphabetic";
    for (let at = Math.ceil(first / step) * step; at < first + total; at += step) {
      const x = this.left + ((at - first) / total) * pixels;
      context.textAlign = x < this.left + 12 ? "left" : x > this.right - 24 ? "right" : "center";
      context.fillText(whole(at), x, this.tall + 16);
    }
  }

  // Texts of lines that are near each other move apart.
  drawLines(context, lines) {
    const spacing = 12;
    let free = -spacing;
    context.strokeStyle = colour("soft");
    context.textAlign = "left";
    context.textBaseline = "middle";
    for (const { at, text } of [...lines].sort((a, b) => a.at - b.at)) {
      const y = Math.round((at / this.map.names.length) * this.tall) + 0.5;
      context.setLineDash([3, 3]);
      context.beginPath();
      context.moveTo(this.left, y);
      context.lineTo(this.right, y);
      context.stroke();
      free = Math.max(y, free + spacing);
      context.fillText(text, this.right + 6, free);
    }
    context.setLineDash([]);
  }

  drawCursor(context) {
    const [row, column] = this.at;
    const { names, columns } = this.map;
    const x = this.left + ((column + 0.5) / columns) * (this.right - this.left);
    const y = ((row + 0.5) / names.length) * this.tall;
    context.strokeStyle = colour("ink");
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(this.left, y);
    context.lineTo(this.right, y);
    context.moveTo(x, 0);
    context.lineTo(x, this.tall);
    context.stroke();
  }

  point(event) {
    if (!this.map) return;
    const x = (event.offsetX - this.left) / (this.right - this.left);
    const y = (event.offsetY - TOP) / this.tall;
    const inside = y >= 0 && y < 1 && x < 1;
    const column = Math.max(0, Math.floor(x * this.map.columns));
    this.move(inside ? [Math.floor(y * this.map.names.length), column] : null);
  }

  move(at) {
    if (at) {
      const rows = this.map.names.length;
      at = [Math.max(0, Math.min(rows - 1, at[0])), Math.max(0, Math.min(this.map.columns - 1, at[1]))];
      if (!rows || !this.map.columns) at = null;
    }
    this.at = at;
    this.readout.textContent = at ? this.describe(...at, this.map.values[at[0] * this.map.columns + at[1]]) : "";
    this.draw();
    this.drawBar();
  }

  key(event) {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const by = moves[event.key];
    if (by) {
      const at = this.at ?? [0, this.map.columns - 1];
      this.move([at[0] + by[0], at[1] + by[1]]);
    } else if (event.key === "Enter" && this.at) this.onOpen?.(this.at[0]);
    else return;
    event.preventDefault();
  }

  drawBar() {
    const { shades } = this.palette;
    this.bar.width = shades.length;
    this.bar.height = 1;
    const context = this.bar.getContext("2d");
    const pixels = context.createImageData(shades.length, 1);
    shades.forEach((rgb, i) => pixels.data.set([...rgb, 255], 4 * i));
    context.putImageData(pixels, 0, 0);
  }

  close() {
    this.resized.disconnect();
  }
}
