// The dashboard: /metrics every two seconds, as tiles, charts and tables.

import { remedy, request } from "../lib/api.js";
import { themeButton } from "../lib/appearance.js";
import { byId, el } from "../lib/dom.js";
import { Chart } from "./chart.js";
import { History, parseMetrics } from "./metrics.js";

const EVERY = 2; // seconds
const KEPT = 300; // seconds
const RATE_OVER = 10;
const LATENCY_OVER = 60;

const NONE = "–";
const number = (value) =>
  value === null ? NONE : value.toLocaleString("en-US", { maximumFractionDigits: value < 10 ? 1 : 0 });
const UNITS = ["B", "KB", "MB", "GB", "TB"];
const bytes = (value) => {
  if (value === null) return NONE;
  const power = Math.min(UNITS.length - 1, Math.max(0, Math.floor(Math.log10(Math.max(1, value)) / 3)));
  return `${number(value / 1000 ** power)} ${UNITS[power]}`;
};
const duration = (value) => {
  if (value === null) return NONE;
  const [d, h, m] = [86400, 3600, 60].map((unit) => Math.floor(value / unit));
  if (d) return `${d} d ${h % 24} h`;
  if (h) return `${h} h ${m % 60} min`;
  return m ? `${m} min ${Math.floor(value % 60)} s` : `${Math.floor(value)} s`;
};
const percent = (value) =>
  value === null ? NONE : `${(value * 100).toFixed(value > 0 && value < 0.1 ? 1 : 0)}%`;
const time = (value) => {
  if (value === null) return NONE;
  if (value < 1) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  return `${Number.isInteger(value) ? value : value.toFixed(value < 10 ? 2 : 0)} s`;
};

const LATENCIES = [
  ["Time to first token", "time_to_first_token_seconds"],
  ["Between tokens", "inter_token_latency_seconds"],
  ["Whole answer", "e2e_request_latency_seconds"],
  ["In the queue", "request_queue_time_seconds"],
];
const QUANTILES = [
  ["p50", 0.5],
  ["p90", 0.9],
  ["p99", 0.99],
];

const hitRate = (h) => h.share("prefix_cache_hits_total", "prefix_cache_queries_total", LATENCY_OVER);
const stepTime = (h) => h.share("step_seconds_sum", "step_seconds_count", RATE_OVER);
const refusals = (h) => h.rate("admission_rejections_total", RATE_OVER);

const TILES = [
  ["Running", (h) => number(h.value("num_requests_running"))],
  ["Waiting", (h) => number(h.value("num_requests_waiting"))],
  ["KV in use", (h) => percent(h.value("kv_cache_usage_perc"))],
  ["Prefix hits", (h) => percent(hitRate(h))],
  ["Tokens/s out", (h) => number(h.rate("generation_tokens_total", RATE_OVER))],
  ["Tokens/s in", (h) => number(h.rate("prompt_tokens_total", RATE_OVER))],
  ["First token p50", (h) => time(h.quantile(LATENCIES[0][1], 0.5, LATENCY_OVER))],
  ["Token gap p50", (h) => time(h.quantile(LATENCIES[1][1], 0.5, LATENCY_OVER))],
  ["Memory", (h) => bytes(h.value("resident_memory_bytes"))],
  ["Uptime", (h) => duration(h.value("uptime_seconds"))],
];

const points = KEPT / EVERY + 1;
const latencyChart = ([title, name]) =>
  new Chart({
    title,
    format: time,
    points,
    every: EVERY,
    series: QUANTILES.map(([label, q]) => ({ label, value: (h) => h.quantile(name, q, LATENCY_OVER) })),
  });

const charts = [
  new Chart({
    title: "Batch and queue",
    format: number,
    points,
    every: EVERY,
    series: [
      { label: "running", value: (h) => h.value("num_requests_running") },
      { label: "waiting", value: (h) => h.value("num_requests_waiting") },
    ],
  }),
  new Chart({
    title: "Tokens a second",
    format: number,
    points,
    every: EVERY,
    series: [
      { label: "out", value: (h) => h.rate("generation_tokens_total", RATE_OVER) },
      { label: "in", value: (h) => h.rate("prompt_tokens_total", RATE_OVER) },
    ],
  }),
  new Chart({
    title: "KV blocks and prefix cache",
    format: percent,
    points,
    every: EVERY,
    top: 1,
    series: [
      { label: "in use", value: (h) => h.value("kv_cache_usage_perc") },
      { label: "hits", value: hitRate },
    ],
  }),
  ...LATENCIES.slice(0, 3).map(latencyChart),
  new Chart({ title: "Step", format: time, points, every: EVERY, series: [{ label: "mean", value: stepTime }] }),
  new Chart({
    title: "Host memory",
    format: bytes,
    points,
    every: EVERY,
    series: [{ label: "in use", value: (h) => h.value("resident_memory_bytes") }],
  }),
  new Chart({
    title: "Answers and refusals a second",
    format: number,
    points,
    every: EVERY,
    series: [
      { label: "ended", value: (h) => h.rate("request_success_total", RATE_OVER) },
      { label: "refused", value: refusals },
    ],
  }),
];

const history = new History(KEPT);
const tiles = TILES.map(([label, value]) => ({ node: el("dd", {}, NONE), label, value }));
let paused = false;

byId("tiles").append(
  ...tiles.map(({ label, node }) => el("div", { class: "tile" }, el("dt", {}, label), node)),
);
byId("charts").append(...charts.map((chart) => chart.node));
themeButton(byId("theme"));
byId("pause").addEventListener("click", () => {
  paused = !paused;
  byId("pause").setAttribute("aria-pressed", String(paused));
  byId("pause").textContent = paused ? "Go on" : "Pause";
  if (paused) say("Paused");
  else tick();
});
document.addEventListener("visibilitychange", () => document.hidden || tick());

let slowAllowed = true;
let timer = null;
tick();

/** One scrape and its drawing; the next one follows while the page is seen and not paused. */
async function tick() {
  clearTimeout(timer);
  if (paused || document.hidden) return;
  const now = Date.now() / 1000;
  try {
    const metrics = parseMetrics(await (await request("/metrics")).text());
    if (history.push(now, metrics)) charts.forEach((chart) => chart.clear());
    charts.forEach((chart) => chart.push(now, history));
    tiles.forEach(({ node, value }) => (node.textContent = value(history)));
    drawTables();
    await drawSlow();
    byId("failure").hidden = true;
    const served = metrics.get("engine_info")?.[0].labels;
    say(served ? `${served.model_name} on ${served.device}, every ${EVERY} s` : `Every ${EVERY} s`);
  } catch (error) {
    charts.forEach((chart) => chart.push(now, null));
    byId("failure").hidden = false;
    byId("failure").textContent = `${error.message} ${remedy(error)}`;
    say(`No figures since ${new Date(now * 1000).toLocaleTimeString()}`);
    if (error.status === 401) return; // until a reload: asking again would open the dialog again
  }
  if (!paused) timer = setTimeout(tick, EVERY * 1000);
}

/** The state, for all to see; told to screen readers only where it changes. */
function say(text) {
  if (byId("state").textContent !== text) byId("state").textContent = text;
}

function drawTables() {
  fillTable(
    "latency",
    ["", "p50", "p90", "p99", "p50", "p90", "p99"],
    LATENCIES.map(([label, name]) => [
      label,
      ...[LATENCY_OVER, null].flatMap((seconds) =>
        QUANTILES.map(([, q]) => time(history.quantile(name, q, seconds))),
      ),
    ]),
    [
      ["", 1],
      ["last minute", 3],
      ["since the start", 3],
    ],
  );
  fillTable(
    "ranges",
    ["", "now", "lowest", "highest"],
    charts.flatMap((chart) =>
      chart
        .ranges()
        .map((values, i) => [`${chart.title}: ${chart.series[i].label}`, ...values.map(chart.format)]),
    ),
  );
  fillTable(
    "counts",
    ["", ""],
    [
      ...history
        .byLabel("request_success_total", "finished_reason")
        .map(([reason, value]) => [`Answers ended: ${reason}`, number(value)]),
      ...history
        .byLabel("admission_rejections_total", "reason")
        .map(([reason, value]) => [`Refused: ${reason}`, number(value)]),
      ["Preemptions", number(history.value("num_preemptions_total"))],
      ["Prompt tokens", number(history.value("prompt_tokens_total"))],
      ["of them cached", number(history.value("prompt_tokens_cached_total"))],
      ["Tokens generated", number(history.value("generation_tokens_total"))],
      ["Seconds to start", time(history.value("startup_seconds"))],
    ],
  );
}

/** The last slow requests, while the server takes a trace and this tab may see them. */
async function drawSlow() {
  if (!history.value("trace_recording")) byId("slow-section").hidden = true;
  else if (slowAllowed) {
    try {
      const { requests } = await (await request("/debug/slow")).json();
      byId("slow-section").hidden = false;
      fillTable(
        "slow",
        ["", "took", "lost", "cause", "what happened"],
        requests.map((r) => [
          `${new Date(r.began * 1000).toLocaleTimeString()} ${r.id}`,
          time(r.seconds),
          time(r.lost),
          r.cause,
          r.sentence,
        ]),
      );
    } catch (error) {
      if (error.status !== 403) throw error;
      slowAllowed = false; // another key than an admin's: asking again would change nothing
    }
  }
}

/** Writes a table anew; `groups` stand above its head: [[text, columns]]. */
function fillTable(id, head, rows, groups = []) {
  const top = groups.length
    ? [
        el(
          "tr",
          {},
          ...groups.map(([text, columns]) =>
            text ? el("th", { colspan: columns, scope: "colgroup" }, text) : el("td"),
          ),
        ),
      ]
    : [];
  const names = head.some(Boolean)
    ? [el("tr", {}, ...head.map((text) => (text ? el("th", { scope: "col" }, text) : el("td"))))]
    : [];
  const body = rows.map(([label, ...cells]) =>
    el("tr", {}, el("th", { scope: "row" }, label), ...cells.map((cell) => el("td", {}, cell))),
  );
  byId(id).replaceChildren(el("thead", {}, ...top, ...names), el("tbody", {}, ...body));
}
