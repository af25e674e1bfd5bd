// Numbers and times as text; what is unknown is a dash.

const NONE = "–";
const integer = new Intl.NumberFormat("en", { maximumFractionDigits: 0 }); // slow to make, so once
const known = (value) => typeof value === "number" && Number.isFinite(value);

export const fixed = (value, digits = 2) => (known(value) ? value.toFixed(digits).replace("-", "−") : NONE);
export const percent = (value, digits = 1) => (known(value) ? `${(100 * value).toFixed(digits)} %` : NONE);
export const whole = (value) => (known(value) ? integer.format(value) : NONE);
export const rate = (value) => (known(value) && value < 10 ? value.toFixed(1) : whole(value));
export const ms = (value) => (known(value) ? `${rate(value)} ms` : NONE);
export const words = (value) => String(value ?? NONE).replaceAll("_", " ");

export function span(seconds) {
  if (!known(seconds)) return NONE;
  const value = Math.max(0, seconds);
  if (value < 90) return `${Math.round(value)} s`;
  if (value < 5400) return `${Math.round(value / 60)} min`;
  return value < 129600 ? `${Math.round(value / 3600)} h` : `${Math.round(value / 86400)} d`;
}

export const interval = (low, high, digits = 2) =>
  known(low) && known(high) ? `${fixed(low, digits)}–${fixed(high, digits)}` : "no bounds";
