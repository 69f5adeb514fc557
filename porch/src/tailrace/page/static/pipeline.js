// The grid of a pipeline: devices down, ticks across; a cell opens the records behind it.

import { ask } from "./data.js";
import { card, el, problems } from "./dom.js";
import { number, percent, whole } from "./numbers.js";

export const title = "Pipeline";

const COLUMNS = ["mean", "std", "min", "max", "zero", "nan", "inf", "norm"];

export function open(main, page) {
  const trouble = el("div");
  const room = el("div", { class: "cards" });
  main.replaceChildren(trouble, room);
  let drawn = "";
  const opened = new Map();

  async function refresh() {
    const answers = await ask("plan", { runs: page.chosen() });
    trouble.replaceChildren(...problems(answers, page.names()));
    const plans = answers.filter(({ grid }) => grid);
    const shape = JSON.stringify(plans);
    if (shape !== drawn) {
      drawn = shape;
      opened.clear();
      room.replaceChildren(...plans.map((plan) => grid(plan)));
      if (!plans.length) room.append(el("p", { class: "quiet" }, "None of these runs has a pipeline."));
    }
    await Promise.all([...opened.values()].map((again) => again()));
    main.setAttribute("aria-busy", "false");
  }

  function grid({ run, grid }) {
    const panel = el("div", { role: "status" });
    const { devices, ticks, stages } = grid;
    const heads = ticks.map((_, tick) => el("th", { scope: "col" }, String(tick)));
    const rows = devices.map((device) => {
      const cells = ticks.map((tick) => {
        const units = tick.filter(([at]) => at === device);
        return el("td", {}, ...units.map((unit) => button(unit)));
      });
      return el("tr", {}, el("th", { scope: "row" }, `device ${device}`), ...cells);
    });
    const table = el(
      "table",
      { class: "pipeline", onkeydown: move },
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "tick"), ...heads)),
      el("tbody", {}, ...rows),
    );
    table.querySelector("button")?.setAttribute("tabindex", "0");
    const cut = grid.num_ticks > ticks.length ? ` The first ${whole(ticks.length)} of ${whole(grid.num_ticks)} ticks.` : "";
    const made = card(
      `${page.names()[run]}: ${grid.schedule}, ${whole(grid.microbatches)} microbatches, ${stages.length} stages, bubble ${percent(grid.bubble)}.${cut}`,
      el("div", { class: "scroll", tabindex: "-1" }, table),
      panel,
    );
    made.classList.add("wide");
    return made;

    function button([, kind, stage, microbatch]) {
      const text = `${kind}${stages.length > devices.length ? `${stage}.` : ""}${microbatch}`;
      const label = `${kind === "F" ? "forward" : "backward"} of microbatch ${microbatch} in ${stages[stage]}`;
      const attributes = {
        type: "button",
        class: kind,
        title: label,
        "aria-label": `${text}: ${label}`,
        tabindex: "-1",
        onclick: (event) => choose(event.currentTarget, kind, stage, microbatch, label),
      };
      return el("button", attributes, text);
    }

    async function choose(pressed, kind, stage, microbatch, label) {
      table.querySelector('[aria-pressed="true"]')?.setAttribute("aria-pressed", "false");
      pressed.setAttribute("aria-pressed", "true");
      const again = async () => {
        const { records } = await ask("cell", { runs: String(run), kind, stage, microbatch });
        panel.replaceChildren(el("h2", {}, `The ${label}`), listed(records));
      };
      opened.set(run, again);
      await again();
    }
  }

  function listed(records) {
    if (!records.length) {
      return el("p", { class: "quiet" }, "Nothing was recorded here. Taps with reduce=\"stats\" or \"norm\" on activation/*, cotangent/* or grad/* fill these cells.");
    }
    const there = COLUMNS.filter((name) => records.some((record) => record[name] != null));
    const head = ["tensor", "step", ...there].map((name) => el("th", { scope: "col" }, name));
    const rows = records.map((record) =>
      el(
        "tr",
        {},
        el("td", {}, el("button", { type: "button", class: "mono", onclick: () => page.show("tensors", record.name) }, record.name)),
        el("td", {}, whole(record.step)),
        ...there.map((name) => el("td", {}, name === "zero" ? percent(record[name]) : number(record[name]))),
      ),
    );
    return el("div", { class: "scroll", tabindex: "0" }, el("table", { class: "facts records" }, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows)));
  }

  return { refresh, close: () => {} };
}

// Arrows go from cell to cell; idle cells are passed over.
function move(event) {
  const by = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  const from = event.target.closest("td");
  if (!by || !from) return;
  event.preventDefault();
  const rows = [...event.currentTarget.tBodies[0].rows];
  let row = rows.indexOf(from.parentElement) + by[0];
  let column = from.cellIndex + by[1];
  while (row >= 0 && row < rows.length && column > 0 && column < rows[row].cells.length) {
    const next = rows[row].cells[column].querySelector("button");
    if (next) {
      event.target.setAttribute("tabindex", "-1");
      next.setAttribute("tabindex", "0");
      next.focus();
      return;
    }
    row += by[0];
    column += by[1];
  }
}
