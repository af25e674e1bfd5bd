// Drawings. The SVG stretches with its box; labels are HTML, so that they stay readable at any width.

import { h, s } from "./dom.js";
import { fixed, interval, percent, rate, span, whole } from "./format.js";

const SHAPES = {
  on: ["good", "M6 1a5 5 0 1 0 0 10a5 5 0 0 0 0-10z"],
  contract: ["warn", "M6 1a5 5 0 1 0 0 10a5 5 0 0 0 0-10zm0 1.5v7a3.5 3.5 0 0 1 0-7z"],
  ramp: ["warn", "M6 1.2l5.2 9.6H.8z"],
  probe: ["warn", "M6 .4L11.6 6L6 11.6L.4 6zM6 3.2L3.2 6L6 8.8L8.8 6z"],
  warmup: ["info", "M6 1a5 5 0 1 0 0 10a5 5 0 0 0 0-10zm0 1.6a3.4 3.4 0 1 1 0 6.8a3.4 3.4 0 0 1 0-6.8zM5 5h2v2H5z"],
  shadow: ["info", "M6 1a5 5 0 1 0 0 10a5 5 0 0 0 0-10zm0 1.6a3.4 3.4 0 1 1 0 6.8a3.4 3.4 0 0 1 0-6.8z"],
  emergency: ["bad", "M3.5.5h5l3 3v5l-3 3h-5l-3-3v-5zM5.2 2.6h1.6v4.2H5.2zM5.2 7.8h1.6v1.6H5.2z"],
  off: ["bad", "M1.5 1.5h9v9h-9z"],
  pinned_off: ["quiet", "M1.5 1.5h9v9h-9zM3 5.2h6v1.6H3z"],
};
const UNKNOWN = ["quiet", "M2 5.2h8v1.6H2z"];
export const WORST_FIRST = ["pinned_off", "off", "emergency", "shadow", "probe", "ramp", "warmup", "contract", "on"];

// A state by shape, colour and word.
export function badge(state) {
  const [tone, path] = SHAPES[state] ?? UNKNOWN;
  const shape = s("svg", { viewBox: "0 0 12 12", "aria-hidden": "true" }, s("path", { d: path }));
  return h("span", { class: `badge ${tone}` }, shape, String(state ?? "unknown").replaceAll("_", " "));
}

const stretched = (width, height, label, ...children) =>
  s("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
    ...children);

const ticks = (side, labels) => h("div", { class: `ticks ${side}`, "aria-hidden": "true" }, labels.map((l) => h("span", null, l)));

// Heights of bins in a box of 50; one request among many is still seen.
function heights(counts) {
  const most = Math.max(1, ...counts);
  return counts.map((count) => (count ? Math.max(1.5, (48 * count) / most) : 0));
}

// Requests by alpha as a small shape for a row.
export function sparkline(counts, label) {
  const bars = heights(counts).map((tall, i) => (tall ? `M${4 * i + 0.3} 50v${-tall.toFixed(1)}h3.4V50z` : ""));
  return stretched(100, 50, label, s("path", { class: "bars", d: bars.join("") }));
}

// Requests by alpha in 25 bins, and a dashed line at each peak.
export function histogram(key) {
  const counts = key.histogram ?? [];
  const total = counts.reduce((a, b) => a + b, 0);
  if (!total) return h("p", { class: "muted empty" }, "No request with 32 tested tokens yet.");
  const peaks = key.peaks ?? [];
  const bars = heights(counts).map((tall, i) =>
    s("rect", { class: "bars", x: 4 * i + 0.3, y: 50 - tall, width: 3.4, height: tall },
      s("title", null, `α ${fixed(i / 25)} to ${fixed((i + 1) / 25)}: ${whole(counts[i])} requests`)));
  const marks = peaks.map((peak) => s("line", { class: "mark", x1: 100 * peak, x2: 100 * peak, y1: 0, y2: 50 }));
  const at = peaks.map((peak) => fixed(peak)).join(" and ");
  const label = `Acceptance of ${whole(total)} requests${at && `, peaks at ${at}`}`;
  return h("figure", { class: "chart histogram" },
    h("div", { class: "plot" }, stretched(100, 50, label, bars, marks)),
    ticks("x", ["0", "0.25", "0.5", "0.75", "1"]));
}

// S with its bounds on a scale from 0.5 to 2.5; the line is break-even.
export function speedup(one) {
  const x = (value) => 4 + 52 * Math.min(1, Math.max(0, (value - 0.5) / 2));
  const parts = [s("line", { class: "axis", x1: x(1), x2: x(1), y1: 1, y2: 13 })];
  if (one.S_low !== null && one.S_high !== null && one.S_low !== undefined)
    parts.push(s("line", { class: "whisker", x1: x(one.S_low), x2: x(one.S_high), y1: 7, y2: 7 }));
  const title = `S ${fixed(one.S)}, ${interval(one.S_low, one.S_high)}; the line is 1, break-even`;
  const tone = one.S_low > 1 ? "good" : one.S_high < 1 && one.S_high !== null ? "bad" : "open";
  if (typeof one.S === "number")
    parts.push(tone === "bad" ? s("rect", { class: tone, x: x(one.S) - 3, y: 4, width: 6, height: 6 })
      : s("circle", { class: tone, cx: x(one.S), cy: 7, r: 3 }));
  return s("svg", { class: "speedup", width: 60, height: 14, role: "img", "aria-label": title },
    s("title", null, title), parts);
}

function round(most) {
  const unit = 10 ** Math.floor(Math.log10(most));
  return unit * [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((step) => step * unit >= most * 0.9999);
}

// One series over time: points of {time (s), value}; a gap where the value is unknown.
export function line(points, name, unit) {
  const values = points.map((point) => point.value).filter((value) => typeof value === "number");
  if (values.length < 2) return h("p", { class: "muted empty" }, "Needs two ticks with traffic.");
  const [first, last] = [points[0].time, points.at(-1).time];
  const most = round(Math.max(...values) || 1);
  const x = (time) => (100 * (time - first)) / (last - first || 1);
  const y = (value) => 50 - (49 * value) / most;
  let pen = "M";
  const path = points.map((point) => {
    if (typeof point.value !== "number") return ((pen = "M"), "");
    const step = `${pen}${x(point.time).toFixed(2)} ${y(point.value).toFixed(2)}`;
    pen = "L";
    return step;
  }).join("");
  const wide = 100 / points.length;
  const columns = points.map((point) =>
    s("rect", { class: "column", x: x(point.time) - wide / 2, y: 0, width: wide, height: 50 },
      s("title", null, `${span(last - point.time)} ago: ${rate(point.value)} ${unit}`)));
  const label = `${name}: now ${rate(values.at(-1))} ${unit}, lowest ${rate(Math.min(...values))}, ` +
    `highest ${rate(Math.max(...values))} in the last ${span(last - first)}`;
  const rules = [1, 25.5].map((at) => s("line", { class: "rule", x1: 0, x2: 100, y1: at, y2: at }));
  return h("figure", { class: "chart line" },
    ticks("y", [rate(most), rate(most / 2), "0"]),
    h("div", { class: "plot" }, stretched(100, 50, label, rules, s("path", { class: "series", d: path }), columns)),
    ticks("x", [`${span(last - first)} ago`, "now"]));
}

// counts[prompt bin][alpha bin]; low alpha is at the bottom, and lengths that nobody sent are left out.
export function heat(map) {
  const { counts, prompt_edges: prompt, alpha_edges: alpha } = map;
  const used = counts.map((column) => column.some(Boolean));
  const [first, end] = [Math.max(0, used.indexOf(true)), used.lastIndexOf(true) + 1 || 1];
  const rows = alpha.length - 1;
  const most = Math.max(1, ...counts.flat());
  const cells = counts.slice(first, end).flatMap((column, i) => column.map((count, j) => {
    if (!count) return null;
    const title = `${whole(prompt[first + i])} to ${whole(prompt[first + i + 1])} prompt tokens, ` +
      `α ${fixed(alpha[j])} to ${fixed(alpha[j + 1])}: ${whole(count)} requests`;
    const shade = 0.15 + 0.85 * Math.sqrt(count / most);
    return s("rect", { x: i, y: rows - 1 - j, width: 0.97, height: 0.95, "fill-opacity": shade.toFixed(2) },
      s("title", null, title));
  }));
  const label = `Requests by prompt length and acceptance, correlation ${fixed(map.r)}`;
  const middle = first + Math.round((end - first) / 2);
  return h("figure", { class: "chart heat" },
    ticks("y", ["α 1", "0.5", "0"]),
    h("div", { class: "plot" }, stretched(end - first, rows, label, cells)),
    ticks("x", [whole(prompt[first]), whole(prompt[middle]), `${whole(prompt[end])} tokens`]));
}

// Parts of a whole as one bar, each with its share written beside it.
export function shares(parts, label) {
  const total = parts.reduce((sum, part) => sum + part.value, 0) || 1;
  let left = 0;
  const bars = parts.map((part, i) => {
    const width = (100 * part.value) / total;
    const bar = s("rect", { class: `part${i}`, x: left, y: 0, width, height: 10 });
    left += width;
    return bar;
  });
  const legend = parts.map((part, i) =>
    h("li", null, s("svg", { class: `swatch part${i}`, viewBox: "0 0 10 10", "aria-hidden": "true" }, s("rect", { width: 10, height: 10 })),
      part.name, " ", h("b", null, percent(part.value / total, 0))));
  return h("div", { class: "shares" }, stretched(100, 10, label, bars), h("ul", null, legend));
}

export const meter = (share, label) =>
  h("span", { class: "meter" },
    stretched(100, 6, label, s("rect", { class: "track", width: 100, height: 6 }),
      s("rect", { class: share > 0.9 ? "bad" : share > 0.8 ? "warn" : "good", width: 100 * Math.min(1, share), height: 6 })));
