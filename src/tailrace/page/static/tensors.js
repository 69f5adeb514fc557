// The catalogue with search, and one tensor: its statistics and its values by exponent over steps.

import { ask, unpack } from "./data.js";
import { CurveCard } from "./curves.js";
import { card, el, problems } from "./dom.js";
import { HeatMap } from "./heat.js";
import { number, percent, whole } from "./numbers.js";

export const title = "Tensors";

const TITLES = {
  mean: "mean",
  std: "standard deviation",
  min: "smallest value",
  max: "largest value",
  zero: "share of zeros",
  nan: "NaN values",
  inf: "Inf values",
  norm: "norm",
};

export function open(main, page, wanted) {
  const search = el("input", { type: "search", placeholder: "Search names, such as grad attn", "aria-label": "Search tensors" });
  const only = el("input", { type: "checkbox", checked: true });
  const count = el("span", { class: "quiet", role: "status" });
  const list = el("ul");
  const detail = el("div", {});
  const trouble = el("div");
  main.replaceChildren(
    trouble,
    el("div", { class: "bar" }, search, el("label", {}, only, "recorded only"), count),
    el("div", { class: "split" }, el("section", { class: "card list", "aria-label": "Tensors" }, list), detail),
  );
  let chosen = wanted || "";
  let parts = null;

  async function refresh() {
    await Promise.all([names(), chosen ? show() : null]);
    main.setAttribute("aria-busy", "false");
  }

  async function names() {
    const run = page.shown[0];
    if (run == null) return;
    try {
      const query = { runs: String(run), search: search.value, recorded: only.checked ? "1" : "" };
      const { total, tensors } = await ask("catalogue", query);
      // An answer may come after that to a later question, which has more letters.
      if (query.search !== search.value || query.recorded !== (only.checked ? "1" : "")) return;
      count.textContent = total > tensors.length ? `${whole(tensors.length)} of ${whole(total)} tensors` : `${whole(total)} tensors`;
      list.replaceChildren(...tensors.map(row));
      trouble.replaceChildren();
      if (!chosen && tensors.length) {
        const first = tensors.find(({ recorded }) => recorded.length) ?? tensors[0];
        await choose(first.name, false);
      }
    } catch (error) {
      trouble.replaceChildren(el("p", { class: "problem" }, error.message));
    }
  }

  function row({ name, shape, dtype, stage, recorded }) {
    const facts = [`[${shape.join(", ")}]`, dtype, ...(stage >= 0 ? [`stage ${stage}`] : []), ...recorded];
    return el(
      "li",
      {},
      el(
        "button",
        {
          type: "button",
          class: recorded.length ? null : "silent",
          "data-name": name,
          "aria-current": name === chosen ? "true" : null,
          onclick: () => choose(name),
        },
        el("span", { class: "name" }, name),
        el("span", { class: "facts" }, facts.join(" · ")),
      ),
    );
  }

  async function choose(name, remember = true) {
    chosen = name;
    if (remember) page.remember("tensors", name);
    for (const button of list.querySelectorAll("button")) {
      if (button.dataset.name === name) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
    }
    await show();
  }

  async function show() {
    const [first, last] = page.range ?? [];
    const answers = await ask("tensor", { runs: page.chosen(), name: chosen, first, last });
    if (parts?.name !== chosen) {
      parts?.close();
      parts = new Detail(detail, chosen, page);
    }
    parts.update(answers);
  }

  function step(by) {
    const buttons = [...list.querySelectorAll("button")];
    const at = buttons.findIndex((button) => button.dataset.name === chosen);
    const next = buttons[Math.max(0, Math.min(buttons.length - 1, at + by))];
    next?.scrollIntoView({ block: "nearest" });
    if (next) choose(next.dataset.name);
  }

  let waiting = 0;
  search.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(names, 120);
  });
  only.addEventListener("change", names);
  return { refresh, close: () => parts?.close(), search: () => search.focus(), step };
}

class Detail {
  constructor(room, name, page) {
    this.name = name;
    this.page = page;
    this.trouble = el("div");
    this.room = el("div", { class: "cards" });
    this.cards = new Map();
    this.maps = new Map();
    room.replaceChildren(el("h2", { class: "mono" }, name), this.trouble, this.room);
  }

  update(answers) {
    const names = this.page.names();
    this.trouble.replaceChildren(...problems(answers, names));
    for (const answer of answers) this.exponents(answer, names);
    const titles = [...new Set(answers.flatMap(({ curves }) => Object.keys(curves ?? {})))];
    const dull = (title) =>
      ["nan", "inf"].includes(title) &&
      answers.every(({ curves }) => !curves?.[title]?.mean.some((value) => value));
    for (const title of titles) {
      if (!this.cards.has(title) && !dull(title)) {
        const form = title === "zero" ? percent : number;
        const made = new CurveCard(TITLES[title] ?? title, { height: 170, form, range: title === "zero" ? [0, 1] : null, onZoom: (r) => this.page.zoom(r) });
        this.cards.set(title, made);
        this.room.append(made.element);
      }
      const lines = answers.map(({ run, curves }) => ({ name: names[run], run, curve: curves?.[title] }));
      this.cards.get(title)?.update(lines, { log: this.page.log && ["std", "norm", "max"].includes(title) });
    }
    const empty = !titles.length && !this.maps.size;
    if (empty && !this.room.childElementCount) {
      this.room.append(el("p", { class: "quiet" }, "Nothing was recorded of this tensor. A tap, such as tr.Tap(\"grad/*\"), records it."));
    }
  }

  exponents({ run, exponents }, names) {
    if (!exponents) return;
    const { formats, palette } = this.page;
    let made = this.maps.get(run);
    if (!made) {
      const heat = new HeatMap(palette, {
        rowHeight: 9,
        mostHeight: 420,
        label: `Values of ${this.name} by binary exponent`,
        describe: (row, column, value) => {
          const { first, width } = made.shown;
          const exponent = made.shown.top - row;
          return `step ${whole(first + column * width)}: ${percent(value || 0)} of the values are between 2^${exponent} and 2^${exponent + 1}`;
        },
      });
      const sentences = el("ul", { class: "sentences" });
      const title = names.length > 1 ? `Values by exponent: ${names[run]}` : "Values by exponent";
      const element = card(title, heat.element, sentences);
      element.classList.add("wide");
      made = { heat, sentences };
      this.maps.set(run, made);
      this.room.append(element);
    }
    const limits = shownLimits(exponents, formats);
    const top = limits.high;
    const rows = limits.high - limits.low + 1;
    const values = new Float32Array(rows * exponents.columns).fill(0);
    const counts = unpack(exponents.counts);
    for (let row = 0; row < exponents.rows; row++) {
      const at = top - (exponents.least + row);
      values.set(counts.subarray(row * exponents.columns, (row + 1) * exponents.columns), at * exponents.columns);
    }
    const labels = Array.from({ length: rows }, (_, row) => `2^${top - row}`);
    made.shown = { first: exponents.first, width: exponents.width, top };
    const lines = limits.lines.map(({ exponent, text }) => ({ at: top - exponent + 1, text }));
    const map = { ...made.shown, names: labels, columns: exponents.columns, values, lines, blankZero: true };
    made.heat.update(map, [1e-6, 1], true, percent);
    const bad = exponents.nonfinite.reduce((sum, value) => sum + (value || 0), 0);
    const last = exponents.zero.at(-1);
    const head = `Zeros: ${percent(last || 0)} in the last column.${bad ? ` NaN and Inf: ${whole(bad)}.` : ""}`;
    made.sentences.replaceChildren(...[head, ...exponents.sentences].map((text) => el("li", {}, text)));
  }

  close() {
    this.cards.forEach((made) => made.close());
    this.maps.forEach(({ heat }) => heat.close());
  }
}

// The exponents to show: those of the values, and the limits of float formats that are near.
function shownLimits({ least, rows }, formats) {
  let low = least - 1;
  let high = least + rows;
  const lines = [];
  const short = { float16: "float16", bfloat16: "bfloat16", float8_e4m3fn: "e4m3", float8_e5m2: "e5m2" };
  for (const { name, smallest, least: normal, most } of formats) {
    const named = short[name] ?? name;
    const marks = [
      [normal, `${named} normal`],
      [smallest, `${named} least`],
      [most, `${named} most`],
    ];
    for (const [exponent, text] of marks) {
      if (exponent < least - 8 || exponent > least + rows + 8) continue;
      const same = lines.find((line) => line.exponent === exponent);
      if (same) same.text += `, ${named}`;
      else lines.push({ exponent, text });
      low = Math.min(low, exponent - 1);
      high = Math.max(high, exponent);
    }
  }
  return { low, high, lines };
}
