// Follows the server's overview and shows it. The operator key stays in this module's memory.

import { update } from "./dom.js";
import { span, whole } from "./format.js";
import { decisions, engine, heatmaps, heats, map, replicas, series, slowest, status, tiles } from "./panels.js";
import { Refusal, ask, events, headers } from "./stream.js";
import { arrange, detail, emptyRow, row } from "./tenants.js";

const find = document.getElementById("find");
const order = document.getElementById("order");
const dialog = document.getElementById("key-dialog");
const PAUSE_S = 1;
const LONGEST_PAUSE_S = 16;

let data = null;
let came = 0; // ms, when data did
let link = { tone: "quiet", text: "connecting" };
let chosen = null;
let key = "";
const said = new Map(); // tenant -> what came of applying its suggestion

function show() {
  const tenants = data?.tenants ?? [];
  const list = arrange(tenants, order.value, find.value);
  chosen ??= list[0]?.tenant ?? null;
  update("tiles", tiles(data));
  update("tenants", list.length ? list.map((tenant) => row(tenant, chosen)) : emptyRow(nobody(tenants)));
  update("tenants-note", note(tenants));
  update("detail", detail(tenants.find((tenant) => tenant.tenant === chosen), data?.time));
  update("tokens", series(data, "tokens_per_s", "Throughput", "tokens/s"));
  update("latency", series(data, "tpot_p99_ms", "Time per output token, P99", "ms"));
  update("engine", engine(data));
  update("map", map(data));
  update("replicas", replicas(data));
  update("heat", heats(data, chosen, Boolean(key), said));
  update("decisions", decisions(data));
  update("slowest", slowest(data));
  showStatus();
}

function nobody(tenants) {
  if (tenants.length) return "No tenant has this in its name.";
  return data ? "No tenant has sent a request yet." : "Waiting for the server.";
}

function note(tenants) {
  if (!data) return "";
  const all = data.tenant_count ?? tenants.length;
  if (all > tenants.length) return `the ${tenants.length} busiest of ${whole(all)}`;
  return tenants.length >= data.limit ? `the ${data.limit} busiest; the server shows no more` : `${tenants.length}`;
}

function showStatus() {
  update("status", status(data, link));
  const alarm = data && (data.speculation === false || data.controller?.state !== "ok");
  document.title = `${alarm || link.tone === "alarm" ? "⚠ " : ""}gammaray`;
}

const say = (tone, text) => {
  link = { tone, text };
  showStatus();
};

const pause = (seconds) => new Promise((done) => setTimeout(done, 1000 * seconds));

async function follow() {
  for (let wait = PAUSE_S; ; wait = Math.min(2 * wait, LONGEST_PAUSE_S)) {
    try {
      for await (const event of events("dashboard/events", key)) {
        if (event.error) throw new Refusal(503, event.error.message);
        data = event;
        came = Date.now();
        wait = PAUSE_S / 2;
        link = { tone: "fine", text: `live; the controller ticks every ${span(data.interval_s)}` };
        show();
      }
    } catch (error) {
      if (error.wantsKey) {
        say("alarm", "this server wants the operator key");
        askForKey(key ? error.message : "");
        await new Promise((done) => dialog.addEventListener("key", done, { once: true }));
        continue;
      }
      if (!(error instanceof Refusal)) console.error(error);
      const why = error instanceof Refusal ? error.message : "this page could not show what the server sent";
      say("alarm", `${why}; ${came ? `what you see is ${span((Date.now() - came) / 1000)} old` : "trying again"}`);
    }
    await pause(wait);
  }
}

function askForKey(why) {
  document.getElementById("key-error").textContent = why;
  if (!dialog.open) dialog.showModal();
}

async function takeKey(event) {
  event.preventDefault();
  const entered = document.getElementById("key").value;
  try {
    await ask("gammaray/v1/health", { headers: headers(entered) });
  } catch (error) {
    document.getElementById("key-error").textContent = error.message;
    return;
  }
  key = entered;
  document.getElementById("key-form").reset();
  document.getElementById("key-button").textContent = "Change operator key";
  dialog.close();
  dialog.dispatchEvent(new Event("key"));
  show();
}

async function apply(tenant) {
  const { suggestion } = heatmaps(data).find((one) => one.tenant === tenant);
  if (!confirm(`Give tenant ${tenant} a class for prompts over ${suggestion.prompt_tokens_over} tokens?`)) return;
  said.set(tenant, { busy: true, text: "asking the server" });
  show();
  try {
    await ask(`gammaray/v1/tenants/${encodeURIComponent(tenant)}/suggestion`, {
      method: "POST",
      headers: headers(key),
    });
    said.set(tenant, { tone: "good", text: "applied; new requests use the class" });
  } catch (error) {
    said.set(tenant, { tone: "bad", text: error.message });
  }
  show();
}

document.addEventListener("click", (event) => {
  const line = event.target.closest("[data-tenant]");
  const button = event.target.closest("[data-apply]");
  if (line) {
    chosen = line.dataset.tenant;
    show();
    const panel = document.getElementById("detail");
    panel.scrollTop = 0;
    if (matchMedia("(max-width: 1199px)").matches) panel.parentElement.scrollIntoView();
  }
  if (button) apply(button.dataset.apply);
});
find.addEventListener("input", show);
order.addEventListener("change", show);
document.getElementById("key-button").addEventListener("click", () => askForKey(""));
document.getElementById("key-cancel").addEventListener("click", () => dialog.close());
document.getElementById("key-form").addEventListener("submit", takeKey);
document.getElementById("about").textContent = location.host;
show();
follow();
