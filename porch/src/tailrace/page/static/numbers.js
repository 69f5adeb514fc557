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
