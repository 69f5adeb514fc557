// The page: which view is open, which runs are chosen, and what happens when a run grows.

import * as about from "./about.js";
import { ask, listen } from "./data.js";
import { el, runColour } from "./dom.js";
import { makePalette } from "./heat.js";
import * as layers from "./layers.js";
import { whole } from "./numbers.js";
import * as overview from "./overview.js";
import * as pipeline from "./pipeline.js";
import * as tensors from "./tensors.js";

const VIEWS = { overview, tensors, layers, pipeline, runs: about };
const MOST_AT_FIRST = 8;
const byId = (id) => document.getElementById(id);

class Page {
  runs = [];
  shown = [];
  range = null;
  log = false;
  view = null;
  busy = false;
  again = false;

  names = () => this.runs.map(({ name }) => name);
  chosen = () => this.shown.join(",") || "none";

  async start() {
    this.theme(localStorage.getItem("tailrace-theme") ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
    await this.look();
    this.shown = this.runs.map(({ number }) => number).slice(0, MOST_AT_FIRST);
    for (const [name, { title }] of Object.entries(VIEWS)) {
      byId("views").append(el("a", { href: `${location.pathname}${location.search}#${name}`, "data-view": name }, title));
    }
    this.chips();
    addEventListener("hashchange", () => this.route());
    addEventListener("keydown", (event) => this.key(event));
    byId("theme").addEventListener("click", () => this.turn());
    byId("keys").addEventListener("click", () => byId("help").showModal());
    this.route();
    listen(
      (versions) => this.changed(versions),
      (on) => this.connection(on),
    );
  }

  async look() {
    const { runs, scale, nonfinite, formats, measures } = await ask("overview");
    Object.assign(this, { runs, formats, measures });
    this.palette ??= makePalette(scale, nonfinite);
  }

  chips() {
    byId("runs").replaceChildren(
      ...this.runs.map((run) => {
        const made = el(
          "button",
          {
            type: "button",
            class: "run",
            "aria-pressed": String(this.shown.includes(run.number)),
            title: run.directory,
            onclick: () => this.choose(run.number),
          },
          el("span", { class: "name" }, run.name),
          el("span", { class: "facts" }, run.problem && !run.steps ? "unreadable" : `${run.state} · ${whole(run.steps)} steps`),
        );
        made.style.setProperty("--colour", runColour(run.number));
        return made;
      }),
    );
  }

  choose(number) {
    const others = this.shown.filter((shown) => shown !== number);
    this.shown = others.length < this.shown.length ? others : [...others, number].sort((a, b) => a - b);
    this.chips();
    this.open();
  }

  route() {
    const [name, ...rest] = location.hash.slice(1).split("/");
    this.name = name in VIEWS ? name : "overview";
    this.wanted = decodeURIComponent(rest.join("/"));
    for (const link of byId("views").children) {
      if (link.dataset.view === this.name) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    this.open();
  }

  open() {
    this.view?.close();
    byId("main").setAttribute("aria-busy", "true");
    this.view = VIEWS[this.name].open(byId("main"), this, this.wanted);
    document.title = `${VIEWS[this.name].title} · Tailrace`;
    return this.refresh();
  }

  // One refresh at a time; what changes meanwhile is shown by one more afterwards.
  async refresh() {
    if (this.busy) {
      this.again = true;
      return;
    }
    this.busy = true;
    do {
      this.again = false;
      const started = performance.now();
      try {
        await this.view.refresh();
      } catch (error) {
        byId("live").textContent = error.message;
      }
      document.documentElement.dataset.updated = (performance.now() - started).toFixed(1);
    } while (this.again);
    this.busy = false;
  }

  async changed(versions) {
    const same = versions.every((version, number) => this.runs[number]?.version === version);
    if (same) return;
    // One after the other: the view is at least as new as the versions that are known now. What it
    // lacked otherwise would not be asked for again.
    const before = this.runs.length;
    await this.look();
    // Runs that began meanwhile are shown as those at the start are: the first few.
    const added = this.runs.slice(before).map(({ number }) => number);
    this.shown = [...this.shown, ...added.slice(0, Math.max(0, MOST_AT_FIRST - this.shown.length))];
    await this.refresh();
    this.chips();
    this.connection(true);
    document.documentElement.dataset.versions = versions.join(",");
  }

  connection(on) {
    const going = this.runs.some(({ state }) => state.startsWith("growing"));
    byId("live").className = on && going ? "on" : "";
    byId("live").textContent = on ? (going ? "following" : "up to date") : "the server has gone";
  }

  show(name, rest = "") {
    location.hash = `${name}/${encodeURIComponent(rest)}`;
  }

  remember(name, rest) {
    this.wanted = rest;
    history.replaceState(null, "", `${location.pathname}${location.search}#${name}/${encodeURIComponent(rest)}`);
  }

  zoom(range) {
    this.range = range;
    this.refresh();
  }

  toggleLog() {
    this.log = !this.log;
    this.refresh();
  }

  theme(name) {
    document.documentElement.dataset.theme = name;
    byId("theme").textContent = name === "dark" ? "Light" : "Dark";
  }

  turn() {
    const name = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    localStorage.setItem("tailrace-theme", name);
    this.theme(name);
    this.chips();
    this.open();
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || byId("help").open) return;
    if (event.target.closest("input, select, textarea")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const number = Number(event.key);
    const views = Object.keys(VIEWS);
    if (number >= 1 && number <= views.length) this.show(views[number - 1]);
    else if (event.key === "0") this.zoom(null);
    else if (event.key === "/") this.search();
    else if (event.key === "j") this.view.step?.(1);
    else if (event.key === "k") this.view.step?.(-1);
    else if (event.key === "l") this.toggleLog();
    else if (event.key === "t") this.turn();
    else if (event.key === "?") byId("help").showModal();
    else return;
    event.preventDefault();
  }

  search() {
    // At once, if this view has a box: what is typed next belongs into it.
    if (this.view.search) return this.view.search();
    this.show("tensors");
    setTimeout(() => this.view.search?.(), 0);
  }
}

new Page().start();
