// Layers over steps: a heat map for each run, with one scale.

import { ask, unpack } from "./data.js";
import { card, el, problems } from "./dom.js";
import { HeatMap, spanOf } from "./heat.js";
import { number, percent, whole } from "./numbers.js";

export const title = "Layers";

const KINDS = ["grad", "activation", "cotangent", "param", "state", "update", "updated", "accumulated", "reduced", "optimizer"];

export function open(main, page) {
  const measure = el("select", { "aria-label": "Measure" });
  const select = el("input", { type: "search", value: "grad/*", "aria-label": "Which tensors", list: "selections" });
  const count = el("span", { class: "quiet", role: "status" });
  const trouble = el("div");
  const room = el("div", { class: "cards maps" });
  const maps = new Map();
  for (const [value, text] of Object.entries(page.measures)) measure.append(el("option", { value }, text));
  const listed = el("datalist", { id: "selections" }, ...["*", ...KINDS.map((kind) => `${kind}/*`)].map((value) => el("option", { value })));
  main.replaceChildren(
    trouble,
    el("div", { class: "bar" }, el("label", {}, "measure", measure), el("label", {}, "tensors", select), listed, count),
    room,
  );

  async function refresh() {
    const answers = await ask("layers", { runs: page.chosen(), measure: measure.value, select: select.value });
    const names = page.names();
    trouble.replaceChildren(
      ...problems(answers, names),
      ...answers.flatMap((answer) => (answer.problems ?? []).map((text) => el("p", { class: "problem" }, text))),
    );
    const good = answers.filter((answer) => answer.names?.length);
    const found = good.map((answer) => ({ ...answer, values: unpack(answer.values) }));
    const log = measure.value === "rms";
    const span = measure.value === "zero" ? [0, 1] : spanOf(found.map(({ values }) => values), log);
    const form = measure.value === "zero" ? percent : number;
    for (const [run, { element }] of maps) element.hidden = !found.some((answer) => answer.run === run);
    for (const answer of found) {
      const made = maps.get(answer.run) ?? make(answer.run, names);
      made.map = { ...answer, marksBad: measure.value === "nonfinite" };
      made.form = form;
      made.heat.label = `${page.measures[measure.value]} of ${select.value}, ${names[answer.run]}`;
      made.heat.update(made.map, span, log, form);
    }
    const total = Math.max(0, ...found.map((answer) => answer.total));
    const most = Math.max(0, ...found.map((answer) => answer.names.length));
    count.textContent = !found.length
      ? "No records match. Taps with reduce=\"stats\" show most."
      : total > most ? `${whole(most)} of ${whole(total)} tensors` : `${whole(total)} tensors`;
    main.setAttribute("aria-busy", "false");
  }

  function make(run, names) {
    const made = {};
    made.heat = new HeatMap(page.palette, {
      describe: (row, column, value) => {
        const { names: rows, first, width } = made.map;
        const from = first + column * width;
        const when = width > 1 ? `steps ${whole(from)} to ${whole(from + width - 1)}` : `step ${whole(from)}`;
        const what = Number.isNaN(value) ? "nothing recorded" : made.form(value);
        return `${rows[row]}, ${when}: ${what}`;
      },
      onOpen: (row) => page.show("tensors", made.map.names[row].split(" [")[0]),
    });
    made.element = card(names[run], made.heat.element);
    maps.set(run, made);
    room.append(made.element);
    return made;
  }

  let waiting = 0;
  measure.addEventListener("change", () => page.refresh());
  select.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => page.refresh(), 200);
  });
  return { refresh, close: () => maps.forEach(({ heat }) => heat.close()), search: () => select.focus() };
}
