// The page as a whole: snapshots come in, everything is drawn anew. See feed.js for how they come.

import { chart } from "./charts.js";
import { showFigures, showStores, showWorkers } from "./cluster.js";
import { el, legend, percent, replace, seconds, short } from "./dom.js";
import { Feed } from "./feed.js";
import { keyOf, onRowChosen, showDetail, showTable, STAGE_LEGEND } from "./requests.js";

const SPAN_MS = 600000;
const SPANS_MS = [60000, 120000, 240000, SPAN_MS]; // the shortest that shows all there is
const GONE_MS = 60000; // a worker that is told no more is shown for so long
const NUM_REMEMBERED = 200;
const SOURCES = [["computed", "computed"], ["local", "found in the worker’s cache"], ["store", "found in a store"]];
const by = (id) => document.getElementById(id);
const byName = (name) => (a, b) => (a[name] < b[name] ? -1 : 1);

let history = [];
let selected = "";
let requests = new Map();
let workersSeen = new Map(); // id -> {worker, when}
const whys = new Map();

const feed = new Feed("/live/events", { state: showState, snapshot });

function showState(state, why) {
  const words = { connecting: "connecting", live: "live", lost: "reconnecting", locked: "needs a key" };
  by("link").dataset.state = state;
  by("link").lastElementChild.textContent = words[state];
  by("link").title = why;
  by("main").classList.toggle("stale", state === "lost");
  by("key-form").hidden = state !== "locked";
  by("key-problem").textContent = state === "locked" ? why : "";
  if (state === "locked") by("key").focus();
  by("waiting").hidden = state === "live" || state === "locked" || !by("main").hidden;
  by("waiting").textContent = state === "lost" ? `The router does not answer (${why}). Trying again…` : "Waiting for the router…";
  if (state === "locked") by("main").hidden = true;
}

// A mistake in drawing is the page's, not the stream's.
function snapshot(told) {
  try {
    draw(told);
  } catch (error) {
    console.error(error);
    replace(by("problems"), el("li", {}, `This page cannot show what it was told: ${error.message}`));
  }
}

function draw({ status, requests: told, history: points }) {
  const intervalMs = status.history_interval_ms || 2000;
  by("main").hidden = false;
  by("waiting").hidden = true;
  // A stream that was begun again tells all of it again.
  const known = new Map([...history, ...points.map(plainPoint)].map((point) => [point.unix_ms, point]));
  history = [...known.values()].slice(-SPAN_MS / intervalMs);
  by("model").textContent = [...new Set(status.workers.map((worker) => worker.model))].join(", ");
  by("router").textContent = status.router_id;
  replace(by("problems"), ...status.problems.map((problem) => el("li", {}, problem)));
  const workers = withGone(status.workers.map(plainWorker)).sort(byName("worker_id"));
  showFigures(by("figures"), plainStatus(status), history);
  showWorkers(by("prefill"), workers.filter((worker) => worker.role === "prefill"));
  showWorkers(by("decode"), workers.filter((worker) => worker.role === "decode"));
  showStores(by("stores"), status.stores.map(plainStore).sort(byName("node_id")));
  showCharts(intervalMs / 1000);
  showRequests(told);
}

// Those that were told a while ago and are not any more, too.
function withGone(told) {
  const now = Date.now();
  for (const worker of told) workersSeen.set(worker.worker_id, { worker, when: now });
  workersSeen = new Map([...workersSeen].filter(([, seen]) => now - seen.when < GONE_MS));
  return [...workersSeen.values()].map(({ worker, when }) => ({ ...worker, goneS: Math.round((now - when) / 1000) }));
}

function showCharts(intervalS) {
  const times = history.map((point) => point.unix_ms);
  const rate = (name) => history.map((point) => point[name] / intervalS);
  const rangeMs = history.length ? times.at(-1) - times[0] : 0;
  const options = { spanMs: SPANS_MS.find((span) => span >= rangeMs) ?? SPAN_MS };
  const sources = [["computed", "num_tokens_computed"], ["local", "num_tokens_local"], ["store", "num_tokens_from_store"]];
  chart(by("chart-kv"), times, sources.map(([colour, name]) => ({ colour, values: rate(name) })), { ...options, format: short, stacked: true });
  // Of the minute before each point: prompts come now and then, and a point for each would be dots.
  const minute = times.map((_, at) => history.slice(Math.max(0, at + 1 - Math.round(60 / intervalS)), at + 1));
  const hits = minute.map((points) => {
    const total = (name) => points.reduce((sum, point) => sum + point[name], 0);
    const found = total("num_tokens_local") + total("num_tokens_from_store");
    return found + total("num_tokens_computed") > 0 ? found / (found + total("num_tokens_computed")) : null;
  });
  chart(by("chart-hits"), times, [{ colour: "local", values: hits }], { ...options, format: (value) => percent(value, 1), top: 1 });
  chart(by("chart-output"), times, [{ colour: "store", values: rate("num_output_tokens") }], { ...options, format: short });
  const firsts = minute.map((points) => {
    const known = points.map((point) => point.first_token_s).filter((value) => value > 0);
    return known.length ? known.reduce((a, b) => a + b) / known.length : null;
  });
  chart(by("chart-first"), times, [{ colour: "computed", values: firsts }], { ...options, format: seconds });
}

function showRequests(told) {
  const now = new Map(told.map((request) => [keyOf(request), plainRequest(request)]));
  // Those that are told no more have ended long ago; one that is looked at stays.
  requests = new Map([...now, ...[...requests].filter(([key, request]) => !now.has(key) && (request.outcome || key === selected))].slice(0, NUM_REMEMBERED));
  const shown = [...requests.values()].sort((a, b) => Boolean(a.outcome) - Boolean(b.outcome) || b.arrived_unix_ms - a.arrived_unix_ms).slice(0, 40);
  by("no-requests").hidden = shown.length > 0;
  by("requests").parentElement.hidden = shown.length === 0;
  by("stage-legend").hidden = shown.length === 0;
  showTable(by("requests").tBodies[0], shown, selected);
  drawDetail();
}

function select(key) {
  selected = selected === key ? "" : key;
  for (const row of by("requests").tBodies[0].children) row.setAttribute("aria-selected", row.dataset.key === selected);
  drawDetail();
  if (selected) by("detail").scrollIntoView({ block: "nearest", behavior: "smooth" });
}

function drawDetail() {
  const request = requests.get(selected);
  by("detail").hidden = !request;
  if (!request) return;
  if (!whys.has(selected)) learnWhy(selected, request);
  const told = JSON.stringify([request, whys.get(selected)]);
  if (by("detail").told !== told) showDetail(by("detail-title"), by("detail-body"), request, whys.get(selected));
  by("detail").told = told;
}

// Asked once for a request that ended; one that goes on may be chosen for again.
async function learnWhy(key, request) {
  if (!request.outcome) return;
  whys.set(key, null);
  if (whys.size > NUM_REMEMBERED) whys.delete(whys.keys().next().value);
  const query = new URLSearchParams({ request_id: request.request_id, tenant: request.tenant });
  try {
    whys.set(key, await feed.ask(`/live/explain.json?${query}`));
  } catch {
    whys.delete(key); // away just now: asked again with the next look
    return;
  }
  if (selected === key) drawDetail();
}

// protobuf's JSON has 64-bit numbers as strings.
const numbers = (names) => (value) => ({ ...value, ...Object.fromEntries(names.map((name) => [name, Number(value[name])])) });
const plainPoint = numbers(["unix_ms", "num_tokens_computed", "num_tokens_local", "num_tokens_from_store", "num_output_tokens"]);
const plainWorker = numbers(["num_prompt_tokens_computed", "num_prompt_tokens_local", "num_prompt_tokens_from_store", "num_output_tokens"]);
const plainStore = numbers(["frame_bytes", "num_blocks_matched", "num_blocks_asked", "num_bytes_written", "num_bytes_read", "num_evictions"]);
const plainStatus = numbers(["num_requests_finished", "num_requests_failed"]);
const plainRequest = numbers(["arrived_unix_ms"]);

replace(by("legend-kv"), ...legend(SOURCES));
replace(by("stage-legend"), ...legend(STAGE_LEGEND));
onRowChosen(by("requests").tBodies[0], select);
by("detail-close").addEventListener("click", () => select(selected));
by("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  showState("connecting", "");
  feed.useKey(by("key").value);
  by("key").value = "";
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && selected) select(selected);
});
feed.run();
