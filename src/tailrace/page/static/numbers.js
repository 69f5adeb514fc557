// Numbers for people.

export function number(value, digits = 4) {
  if (value == null) return "none";
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(digits - 2);
  return Number(value.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 8 });
}

export const whole = (value) => Math.round(value).toLocaleString("en");
export const percent = (value) => `${number(100 * value, 3)} %`;

// The labels of an axis, with as many digits as they need to differ.
export function labels(values, form) {
  for (let digits = 3; ; digits++) {
    const texts = values.map((value) => (value == null ? "" : form(value, digits)));
    const shown = texts.filter(Boolean);
    if (digits === 8 || new Set(shown).size === shown.length) return texts;
  }
}
