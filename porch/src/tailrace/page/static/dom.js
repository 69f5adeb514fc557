// Elements made by hand. Text from a run only ever becomes text, never markup.

export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child != null));
  return made;
}

export function card(title, ...children) {
  return el("section", { class: "card" }, el("h2", {}, el("span", {}, title)), ...children);
}

export function problems(answers, names) {
  return answers
    .filter((answer) => answer.problem)
    .map((answer) => el("p", { class: "problem" }, `${names[answer.run]}: ${answer.problem}`));
}

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

export const runColour = (number) => colour(`run${number % 8}`);
