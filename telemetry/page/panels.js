// Every panel but the tenants: each function takes a part of the overview and gives elements.

import { badge, heat, line, meter, shares } from "./charts.js";
import { h } from "./dom.js";
import { fixed, ms, percent, rate, span, whole, words } from "./format.js";
import { standing } from "./tenants.js";

const empty = (text) => h("p", { class: "muted empty" }, text);
const named = (text) => h("bdi", { title: text }, String(text ?? "–"));
const cell = (tone, title, text) =>
  h("div", { class: tone }, h("b", { role: tone === "alarm" && "alert" }, title), h("span", null, text));

// Three cells that are always there, so that an alarm moves nothing.
export function status(data, link) {
  const connection = cell(link.tone, "Connection", link.text);
  if (!data) return [cell("quiet", "Speculation", "unknown"), cell("quiet", "Controller", "unknown"), connection];
  const silent = data.controller?.state !== "ok";
  const age = span(data.controller?.age_s);
  const [alarm, ...more] = data.alarms ?? [];
  const also = more.length ? `; and ${whole(more.length)} more` : "";
  return [
    data.speculation === false
      ? cell("alarm", "Kill switch is on", "every tenant decodes plainly")
      : alarm
        ? cell("alarm", "Weekly check", `${alarm.key}: ${alarm.text}${also}`)
        : cell("fine", "Speculation", "allowed, the kill switch is off"),
    silent
      ? cell("alarm", "Controller silent", `for ${age}; the last policy stays in force`)
      : cell("fine", "Controller", `ok, last heard ${age} ago, policy version ${whole(data.version)}`),
    connection,
  ];
}

const tile = (name, value, note) =>
  h("div", { class: "tile" }, h("span", { class: "muted" }, name), h("b", null, value), h("small", { class: "muted" }, note));

export function tiles(data) {
  const now = data?.throughput?.at(-1);
  const tenants = data?.tenants ?? [];
  const stopped = (one) => {
    const { state, having, of } = standing(one);
    return data.speculation === false || (having === of && ["off", "pinned_off", "emergency"].includes(state));
  };
  const { target_kv_used: used, target_kv_total: total } = data?.memory ?? {};
  const replicas = data?.replicas ?? [];
  const sum = (name) => replicas.reduce((all, one) => all + (one[name] ?? 0), 0);
  return [
    tile("Tokens", rate(now?.tokens_per_s), "per second"),
    tile("Requests", rate(now?.requests_per_s), "per second"),
    tile("TPOT p99", ms(now?.tpot_p99_ms), "per output token"),
    tile("Speculating", `${tenants.filter((one) => !stopped(one)).length} of ${tenants.length}`, "tenants shown"),
    tile("Target KV", total ? percent(used / total, 0) : "–", total ? `${whole(used)} of ${whole(total)}` : "in use"),
    tile("Sequences", replicas.length ? whole(sum("running")) : "–", replicas.length ? `running, ${whole(sum("waiting"))} waiting` : "running"),
  ];
}

export const series = (data, field, name, unit) =>
  line((data?.throughput ?? []).map((one) => ({ time: one.time, value: one[field] })), name, unit);

const PHASES = ["draft", "verify", "schedule", "commit"];

export function engine(data) {
  const phases = data?.phases ?? {};
  const parts = PHASES.map((name) => ({ name, value: phases[`${name}_s`] ?? 0 }));
  const ratio = phases.draft_per_token_over_AR;
  const label = parts.map((part) => `${part.name} ${fixed(part.value, 3)} s`).join(", ");
  return [
    parts.some((part) => part.value) ? shares(parts, label) : empty("No step has run yet."),
    ratio > 0 && h("p", null, "Drafting a token takes ", h("b", null, percent(ratio, 0)), " of a target step's time",
      ratio > 0.3 ? h("span", { class: "chip warn" }, "above 30 %") : "."),
  ];
}

// Members of islands are [node, gpu]; a bare number is a GPU of the only node.
function place(member, seats) {
  return Array.isArray(member) ? member : [seats.find((seat) => seat.gpu === member)?.node ?? null, member];
}

export function map(data) {
  const seats = data?.placement?.seats ?? [];
  const islands = (data?.placement?.islands ?? []).map((island) => island.map((member) => place(member, seats)));
  const on = (node, gpu) => seats.filter((seat) => seat.node === node && seat.gpu === gpu);
  const mapped = (seat) => islands.flat().some(([node, gpu]) => seat.node === node && seat.gpu === gpu);
  const nodes = [...new Set(seats.filter((seat) => !mapped(seat)).map((seat) => seat.node))];
  const boxes = [
    ...islands.map((island) => h("section", { class: "island" },
      h("h3", null, island.length > 1 ? `Island of ${island.length}, joined by NVLink` : "Alone, no NVLink that counts"),
      h("div", { class: "gpus" }, island.map(([node, gpu]) => device(`GPU ${gpu}`, node, on(node, gpu)))))),
    ...nodes.map((node) => h("section", { class: "island" },
      h("h3", null, "Outside the islands"),
      h("div", { class: "gpus" }, device("CPU", node, seats.filter((seat) => seat.node === node && !mapped(seat)))))),
  ];
  return [boxes.length ? h("div", { class: "islands" }, boxes) : empty("No placement is known yet.")];
}

const device = (name, node, seats) =>
  h("div", { class: seats.length ? "gpu" : "gpu free" },
    h("b", null, name), node !== null && h("small", { class: "muted" }, named(node)),
    seats.length ? h("ul", null, seats.map(seat)) : h("span", { class: "muted" }, "free"));

const seat = (one) => h("li", { class: one.what?.startsWith("target") ? "target" : "draft" },
  named(one.what), one.tenant && h("small", null, named(one.tenant)));

export function replicas(data) {
  const list = data?.replicas ?? [];
  if (!list.length) return [empty("No replica has told of itself yet.")];
  return [h("ul", { class: "replicas" }, list.map(replica))];
}

function replica(one) {
  const share = one.kv_total_blocks ? one.kv_used_blocks / one.kv_total_blocks : 0;
  return h("li", null,
    h("h3", null, named(one.source)),
    h("small", null, named(one.node), one.gpus?.length ? `, GPU ${one.gpus.join(", ")}` : ""),
    h("p", null, `${whole(one.running)} running, ${whole(one.waiting)} waiting`),
    h("p", null, meter(share, `${percent(share, 0)} of the KV blocks are in use`), `${percent(share, 0)} of KV`),
    h("p", null, "draft workers: ", links(one.links ?? [])));
}

function links(list) {
  if (!list.length) return "none";
  const sum = (name) => list.reduce((all, one) => all + (one[name] ?? 0), 0);
  return `${sum("workers")} connected` + (sum("resting") ? `, ${sum("resting")} resting` : "");
}

function table(heads, rows, numbers = []) {
  const tone = (i) => (numbers.includes(i) ? "number" : null);
  return h("table", { class: "plain" },
    h("thead", null, h("tr", null, heads.map((head, i) => h("th", { scope: "col", class: tone(i) }, head)))),
    h("tbody", null, rows.map((row) => h("tr", null, row.map((content, i) =>
      h("td", { class: tone(i), "data-label": heads[i] }, content))))));
}

export const heatmaps = (data) => [data?.heatmap ?? []].flat();

const SHOWN = 6;

// Flagged ones first. `canApply`: a key was entered; `said`: tenant -> what the server said.
export function heats(data, chosen, canApply, said) {
  const order = (one) => (one.flagged ? 2 : 0) + (one.tenant === chosen ? 1 : 0);
  const all = heatmaps(data).sort((a, b) => order(b) - order(a) || (a.tenant < b.tenant ? -1 : 1));
  if (!all.length) return [empty("Appears once a tenant has 100 finished requests.")];
  const cut = all.length > SHOWN && empty(`${all.length - SHOWN} more; choose a tenant to see its own.`);
  return [h("div", { class: "heats" }, all.slice(0, SHOWN).map((one) => oneHeat(one, canApply, said))), cut];
}

function oneHeat(one, canApply, said) {
  return h("section", { class: "heat-of", "data-key": one.tenant },
    h("h3", null, named(one.tenant), h("span", { class: one.flagged ? "chip warn" : "chip" }, `r ${fixed(one.r)}`, one.flagged && ", depends on length")),
    heat(one),
    one.suggestion && suggestion(one, canApply, said.get(one.tenant)));
}

function suggestion(one, canApply, answer) {
  const { class: name, prompt_tokens_over: over } = one.suggestion;
  return h("div", { class: "suggestion" },
    h("p", null, "Give prompts of more than ", h("b", null, whole(over)), " tokens a class of their own, ", named(name), "."),
    canApply
      ? h("button", { type: "button", "data-apply": one.tenant, disabled: answer?.busy }, "Apply")
      : h("p", { class: "muted" }, "Enter the operator key to apply it."),
    h("p", { role: "status", class: answer?.tone }, answer?.text));
}

const hour = new Intl.DateTimeFormat("en-GB", { timeStyle: "medium" });
const clock = (time) => (typeof time === "number" ? hour.format(1000 * time) : "–");

const facts = (numbers) => Object.entries(numbers ?? {})
  .filter(([, value]) => ["number", "string", "boolean"].includes(typeof value))
  .map(([name, value]) => `${words(name)} ${typeof value === "number" ? +value.toPrecision(4) : value}`).join(", ");

export function decisions(data) {
  const list = data?.decisions ?? [];
  if (!list.length) return [empty("Nothing has been decided yet.")];
  return [table(["When", "About", "State", "Why"], list.map((one) => [
    h("time", { title: clock(one.time) }, `${span(data.time - one.time)} ago`),
    about(one),
    h("span", { class: "change" }, badge(one.old?.state), "→", badge(one.new?.state)),
    [one.reason, h("small", { class: "muted" }, ` ${words(one.rule)}${facts(one.numbers) && `: ${facts(one.numbers)}`}`)],
  ]))];
}

function about(one) {
  const [tenant, name, drafter] = one.key ?? [];
  if (one.level === "global") return "everything";
  return [named(tenant), name && h("small", null, " class ", named(name)), drafter && h("small", null, " drafter ", named(drafter))];
}

export function slowest(data) {
  const list = data?.slowest ?? [];
  if (!list.length) return [empty("No request has finished yet.")];
  const heads = ["Request", "Tenant", "State", "TTFT", "TPOT", "Prompt", "Output", "α", "Fallback", "Diagnosis"];
  return [table(heads, list.map((one) => [
    h("code", { title: one.request_id }, String(one.request_id)),
    [named(one.tenant), h("small", null, " ", named(one.class))],
    badge(one.state),
    ms(one.ttft_ms),
    ms(one.tpot_ms),
    whole(one.prompt_tokens),
    whole(one.output_tokens),
    fixed(one.alpha),
    one.fallback ? h("span", { class: "warn" }, words(one.fallback)) : "none",
    one.diagnosis ?? "–",
  ]), [3, 4, 5, 6, 7])];
}
