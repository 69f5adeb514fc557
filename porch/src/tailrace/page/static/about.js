// What ran: a column a run; rows in which runs differ are marked.

import { ask } from "./data.js";
import { card, el, problems } from "./dom.js";

export const title = "Runs";

export function open(main, page) {
  async function refresh() {
    const answers = await ask("about", { runs: page.chosen() });
    const good = answers.filter(({ sections }) => sections);
    const numbers = good.map(({ run }) => page.runs[run].numbers);
    const sections = [["Numbers", numbers]];
    for (const name of new Set(good.flatMap(({ sections }) => Object.keys(sections)))) {
      sections.push([name, good.map(({ sections }) => sections[name] ?? [])]);
    }
    const names = good.map(({ run }) => page.names()[run]);
    main.replaceChildren(
      ...problems(answers, page.names()),
      el("div", { class: "cards" }, ...sections.map(([name, rows]) => section(name, names, rows))),
    );
    main.setAttribute("aria-busy", "false");
  }

  return { refresh, close: () => {} };
}

function section(title, names, columns) {
  const tables = columns.map((rows) => new Map(rows));
  const labels = [...new Set(columns.flatMap((rows) => rows.map(([label]) => label)))];
  const own = ["directory", "began"];
  const body = labels.map((label) => {
    const texts = tables.map((table) => table.get(label) ?? "");
    const differs = new Set(texts).size > 1 && title !== "Numbers" && !own.includes(label);
    return el("tr", { class: differs ? "differs" : null }, el("th", { scope: "row" }, label), ...texts.map((text) => el("td", {}, text)));
  });
  const head = names.length > 1 ? el("thead", {}, el("tr", {}, el("td"), ...names.map((name) => el("th", { scope: "col" }, name)))) : null;
  const made = card(title, el("div", { class: "scroll", tabindex: "0" }, el("table", { class: names.length > 1 ? "facts beside" : "facts" }, head, el("tbody", {}, ...body))));
  if (names.length > 1) made.classList.add("wide");
  return made;
}
