// The table of tenants, and the one that was chosen in detail.

import { WORST_FIRST, badge, histogram, sparkline, speedup } from "./charts.js";
import { h } from "./dom.js";
import { fixed, interval, ms, percent, rate, span, whole, words } from "./format.js";

const keysOf = (tenant) => (tenant.classes ?? []).flatMap((one) => one.keys ?? []);

const rank = (state) => WORST_FIRST.indexOf(state);
const worst = (states) => states.reduce((a, b) => (rank(b) < rank(a) ? b : a));

// The worst state among a tenant's drafters, each as its class and tenant leave it, and how many have it.
export function standing(tenant) {
  const all = (tenant.classes ?? []).flatMap((one) =>
    (one.keys ?? []).map((key) => worst([tenant.state, one.state, key.state])));
  const state = all.length ? worst(all) : tenant.state;
  return { state, having: all.filter((one) => one === state).length, of: all.length };
}

// All keys of a tenant in one histogram.
function together(tenant) {
  const sum = Array(25).fill(0);
  for (const key of keysOf(tenant)) (key.histogram ?? []).forEach((count, i) => (sum[i] += count));
  return sum;
}

function range(values) {
  const found = values.filter((value) => typeof value === "number");
  if (!found.length) return "–";
  const [low, high] = [Math.min(...found), Math.max(...found)];
  return low === high ? `${low}` : `${low}–${high}`;
}

const ORDERS = {
  state: (a, b) => rank(standing(a).state) - rank(standing(b).state),
  tenant: () => 0,
  requests_per_s: (a, b) => (b.requests_per_s ?? -1) - (a.requests_per_s ?? -1),
  S: (a, b) => (a.S ?? Infinity) - (b.S ?? Infinity),
  FR: (a, b) => (b.FR ?? -1) - (a.FR ?? -1),
};

export function arrange(tenants, order, find) {
  const wanted = find.trim().toLowerCase();
  return tenants
    .filter((one) => one.tenant.toLowerCase().includes(wanted))
    .sort((a, b) => ORDERS[order](a, b) || (a.tenant < b.tenant ? -1 : 1));
}

export function row(tenant, chosen) {
  const keys = keysOf(tenant);
  const current = tenant.tenant === chosen;
  const { state, having, of: all } = standing(tenant);
  const name = h("button", { type: "button", class: "name", "aria-pressed": String(current), title: tenant.tenant },
    h("bdi", null, tenant.tenant));
  const number = (text, extra = false) => h("td", { class: extra ? "number extra" : "number" }, text);
  return h("tr", { "data-key": tenant.tenant, "data-tenant": tenant.tenant, class: current && "chosen" },
    h("th", { scope: "row" }, name),
    h("td", null, badge(state), having < all && h("small", { class: "part-of" }, `${having} of ${all} drafters`)),
    h("td", { class: "spark", "data-alpha": fixed(tenant.alpha) }, sparkline(together(tenant), `Requests of ${tenant.tenant} by acceptance`)),
    number(fixed(tenant.alpha), true),
    number(fixed(tenant.tau), true),
    h("td", { class: "number" }, speedup(tenant), h("span", { class: "value" }, fixed(tenant.S)),
      h("small", { class: "bounds" }, interval(tenant.S_low, tenant.S_high))),
    number(percent(tenant.FR)),
    number(`${range(keys.map((key) => key.gamma))} / ${range(keys.map((key) => key.width))}`, true),
    number(rate(tenant.requests_per_s), true),
    number(rate(tenant.tokens_per_s), true));
}

export const emptyRow = (text) => h("tr", { class: "none" }, h("td", { colspan: 10, class: "muted" }, text));

const fact = (name, value, note) =>
  h("div", null, h("dt", null, name), h("dd", null, value, note && h("small", null, note)));

const latency = (name, values) =>
  fact(name, ms(values?.p50), `p95 ${ms(values?.p95)}, p99 ${ms(values?.p99)}`);

export function detail(tenant, now) {
  if (!tenant) return [h("p", { class: "muted empty" }, "Choose one of the tenants to see its classes and drafters.")];
  const causes = Object.entries(tenant.causes ?? {}).filter(([, count]) => count);
  return [
    h("h3", { class: "who" }, h("bdi", null, tenant.tenant), badge(tenant.state)),
    why(tenant, now, tenant.region && `in region ${tenant.region}`),
    h("dl", { class: "facts" },
      fact("α", fixed(tenant.alpha)),
      fact("τ", fixed(tenant.tau)),
      fact("S", fixed(tenant.S), interval(tenant.S_low, tenant.S_high)),
      fact("FR", percent(tenant.FR)),
      fact("SE", fixed(tenant.SE)),
      fact("KRR", fixed(tenant.KRR)),
      latency("TPOT", tenant.tpot_ms),
      latency("TTFT", tenant.ttft_ms)),
    causes.length > 0 && h("p", { class: "causes" }, "Fallbacks: ",
      causes.map(([name, count]) => h("span", { class: "chip" }, `${words(name)} ${whole(count)}`))),
    (tenant.classes ?? []).map((one) => classBlock(one, now)),
  ];
}

const why = (one, now, more) =>
  h("p", { class: "reason" },
    h("span", { class: "muted" }, `for ${span(now - one.since)}: `), one.reason || "no reason recorded",
    more && h("span", { class: "muted" }, `; ${more}`));

const classBlock = (one, now) =>
  h("section", { class: "class" },
    h("h4", null, "class ", h("bdi", null, one.class), badge(one.state)),
    (one.keys ?? []).map((key) => keyBlock(key, now)));

function keyBlock(key, now) {
  const quantiles = key.quantiles ?? {};
  const version = key.version ? `, version ${key.version}` : "";
  const until = typeof key.until === "number" && key.until > now ? `next step in ${span(key.until - now)}` : "";
  return h("article", { class: "key" },
    h("h5", null, h("bdi", null, key.drafter ?? "plain"), h("small", null, `${key.method ?? ""}${version}`), badge(key.state)),
    why(key, now, until),
    histogram(key),
    h("p", { class: "modes" }, key.bimodal && h("span", { class: "chip warn" }, "two kinds of requests"),
      `P5 ${fixed(quantiles.p5)}, P50 ${fixed(quantiles.p50)}, P95 ${fixed(quantiles.p95)}, P99 ${fixed(quantiles.p99)}`),
    h("dl", { class: "facts" },
      fact("γ / w", `${key.gamma ?? "–"} / ${key.width ?? "–"}`),
      fact("share", percent(key.share, 0)),
      fact("α", fixed(key.alpha)),
      fact("τ", fixed(key.tau)),
      fact("S", fixed(key.S), interval(key.S_low, key.S_high)),
      fact("FR", percent(key.FR)),
      fact("TWE", fixed(key.TWE)),
      fact("node yield", fixed(key.node_yield))));
}
