// The course of the runs: findings, loss, metrics, speed.

import { ask } from "./data.js";
import { CurveCard } from "./curves.js";
import { el, problems, runColour } from "./dom.js";
import { whole } from "./numbers.js";

export const title = "Overview";

export function open(main, page) {
  const bar = el("div", { class: "bar" });
  const log = el("button", { type: "button", onclick: () => page.toggleLog() }, "Logarithmic");
  const reset = el("button", { type: "button", onclick: () => page.zoom(null) }, "All steps");
  const range = el("span", { class: "quiet" });
  bar.append(log, reset, range);
  const sentences = el("section", { class: "card wide", "aria-label": "Findings" });
  const trouble = el("div");
  const room = el("div", { class: "cards" }, sentences);
  const cards = new Map();
  main.replaceChildren(trouble, bar, room);

  async function refresh() {
    const [first, last] = page.range ?? [];
    const answers = await ask("curves", { runs: page.chosen(), first, last });
    trouble.replaceChildren(...problems(answers, page.names()));
    log.setAttribute("aria-pressed", page.log);
    reset.hidden = !page.range;
    range.textContent = page.range ? `steps ${whole(first)} to ${whole(last)}` : "";
    const names = [...new Set(answers.flatMap(({ curves }) => Object.keys(curves ?? {})))];
    names.sort((a, b) => rank(a) - rank(b));
    for (const name of names) {
      if (cards.has(name)) continue;
      const made = new CurveCard(name, { wide: name === "loss", onZoom: (r) => page.zoom(r) });
      cards.set(name, made);
      if (name === "loss") room.prepend(made.element);
      else room.append(made.element);
    }
    for (const [name, made] of cards) {
      const lines = answers.map(({ run, curves }) => ({ name: page.names()[run], run, curve: curves?.[name] }));
      made.update(lines, { log: page.log && name !== "steps/s" });
    }
    main.setAttribute("aria-busy", "false");
    tell();
  }

  let asking = false;
  async function tell() {
    if (asking) return;
    asking = true;
    if (!sentences.childElementCount) sentences.append(el("p", { class: "quiet" }, "Looking for findings…"));
    try {
      const answers = await ask("findings", { runs: page.chosen() });
      sentences.replaceChildren(el("h2", {}, "Findings"), ...answers.map((answer) => said(answer, page)));
    } finally {
      asking = false;
    }
  }

  return { refresh, close: () => cards.forEach((made) => made.close()) };
}

const rank = (name) => (name === "loss" ? 0 : name === "steps/s" ? 2 : 1);

function said({ run, findings }, page) {
  const several = page.shown.length > 1;
  const head = several ? el("h3", { class: "value" }, page.names()[run]) : null;
  head?.style.setProperty("--colour", runColour(run));
  if (!findings?.length) return el("div", {}, head, el("p", { class: "quiet" }, "None in what was recorded."));
  const items = findings.map((one) =>
    el(
      "li",
      { class: one.severity },
      el("b", {}, one.topic),
      one.text,
      one.tensor ? el("button", { type: "button", onclick: () => page.show("tensors", one.tensor) }, "Look") : null,
    ),
  );
  return el("div", {}, head, el("ul", { class: "findings" }, ...items));
}
