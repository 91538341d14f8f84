// Workers and stores as cards, and the figures above them.

import { bytes, el, number, percent, replace, short, seconds, strip } from "./dom.js";

const WINDOW_POINTS = 30; // the figures are of the last minute

export function showFigures(node, status, history) {
  const samples = status.workers.reduce((total, worker) => total + worker.num_running + worker.num_waiting, 0);
  const late = history.slice(-WINDOW_POINTS);
  const sum = (name) => late.reduce((total, point) => total + point[name], 0);
  const spanS = late.length > 1 ? (late.at(-1).unix_ms - late[0].unix_ms) / 1000 : 0;
  const hits = sum("num_tokens_local") + sum("num_tokens_from_store");
  const prompt = hits + sum("num_tokens_computed");
  const firsts = late.map((point) => point.first_token_s).filter((value) => value > 0);
  const first = firsts.length ? seconds(firsts.reduce((a, b) => a + b) / firsts.length).split(" ") : ["–"];
  const figures = [
    [number(status.num_requests_in_flight), "", "requests in flight", [["", `${number(samples)} running or waiting on workers`]]],
    [spanS ? short(sum("num_output_tokens") / spanS) : "–", "/s", "output tokens"],
    [first[0], first[1] ?? "", "to the first token"],
    [prompt ? Math.round((100 * hits) / prompt).toString() : "–", prompt ? "%" : "", "of prompts from cache"],
    [short(status.num_requests_finished), "", "requests finished"],
    [short(status.num_requests_failed), "", "refused or failed", failedByCode(status)],
  ];
  replace(node, ...figures.map(([value, unit, name, parts = []]) =>
    el("div.figure", {}, el("b", {}, value, unit ? el("small", {}, unit) : ""), el("span", {}, name),
      ...parts.map(([tone, words]) => el("span.part", tone ? { "data-tone": tone } : {}, words)))));
}

// Codes that are answers to what the client sent or how much of it; all others are the cluster's own failures.
const REFUSALS = new Set(["invalid_argument", "not_found", "already_exists", "permission_denied", "unauthenticated",
  "resource_exhausted", "failed_precondition", "out_of_range", "unimplemented"]);

// [[tone, words], ...], the most frequent code first.
function failedByCode(status) {
  const failed = Object.entries(status.num_requests_failed_by_code ?? {}).map(([code, num]) => [code, Number(num)]);
  failed.sort((a, b) => b[1] - a[1] || (a[0] < b[0] ? -1 : 1));
  return failed.map(([code, num]) => [REFUSALS.has(code) ? "refused" : "failed", `${number(num)} ${code.replaceAll("_", " ")}`]);
}

export function showWorkers(node, workers) {
  const cards = workers.map(workerCard);
  replace(node, ...(cards.length ? cards : [el("p.none", {}, "No worker is registered.")]));
}

function workerCard(worker) {
  const used = worker.num_blocks - worker.num_free_blocks - worker.num_cached_blocks - worker.num_quarantined_blocks;
  const parts = [
    ["used", used, `${number(used)} in use`],
    ["cached", worker.num_cached_blocks, `${number(worker.num_cached_blocks)} cached`],
    ["out", worker.num_quarantined_blocks, `${number(worker.num_quarantined_blocks)} quarantined`],
  ];
  const [state, words] = stateOf(worker);
  const hits = worker.num_prompt_tokens_local + worker.num_prompt_tokens_from_store;
  const role = worker.role === "prefill"
    ? row("prefix hits", percent(hits, hits + worker.num_prompt_tokens_computed))
    : row("output tokens", short(worker.num_output_tokens));
  return el("article.card", { "data-state": state },
    el("header", {}, el("h4", { title: worker.address }, worker.worker_id), el("span.state", {}, words)),
    strip(parts, worker.num_blocks),
    row("cache blocks in use", `${number(used)} of ${number(worker.num_blocks)}`, "used"),
    row("kept for later", number(worker.num_cached_blocks), "cached"),
    worker.num_quarantined_blocks ? row("quarantined", number(worker.num_quarantined_blocks), "out") : "",
    worker.num_lent_blocks ? row("lent", number(worker.num_lent_blocks)) : "",
    role,
    row("computes on", `${worker.device}, ${worker.dtype}`));
}

function stateOf(worker) {
  if (worker.goneS) return ["bad", `gone for ${worker.goneS} s`];
  if (worker.integrity_error) return ["bad", worker.integrity_error];
  if (worker.draining) return ["draining", "draining"];
  const waiting = worker.num_waiting ? `, ${worker.num_waiting} waiting` : "";
  if (worker.num_running || worker.num_waiting) {
    return [worker.role === "prefill" ? "prefilling" : "busy", `${worker.num_running} running${waiting}`];
  }
  return ["idle", "idle"];
}

export function showStores(node, stores) {
  const cards = stores.map(storeCard);
  replace(node, ...(cards.length ? cards : [el("p.none", {}, "No store: every prompt is computed.")]));
}

function storeCard(store) {
  const idle = store.num_committed - store.num_pinned;
  const parts = [
    ["pinned", store.num_pinned, `${number(store.num_pinned)} held by leases`],
    ["cached", idle, `${number(idle)} blocks`],
    ["writing", store.num_writing, `${number(store.num_writing)} being written`],
    ["out", store.num_quarantined, `${number(store.num_quarantined)} quarantined`],
  ];
  const bad = store.integrity_error || store.file_tier_problem;
  const size = store.num_frames ? bytes(store.num_frames * store.frame_bytes) : "nobody attached yet";
  return el("article.card", { "data-state": bad ? "bad" : "idle" },
    el("header", {}, el("h4", { title: store.address }, store.node_id), el("span.state", {}, bad || size)),
    strip(parts, store.num_frames),
    row("blocks in memory", `${number(store.num_committed)} of ${number(store.num_frames)}`, "cached"),
    row(`held by ${number(store.num_leases)} leases`, number(store.num_pinned), "pinned"),
    store.num_quarantined ? row("quarantined", number(store.num_quarantined), "out") : "",
    store.num_pages ? strip([["cached", store.num_pages_used, `${number(store.num_pages_used)} pages`]], store.num_pages, "thin") : "",
    store.num_pages ? row("in the file tier", `${number(store.num_pages_used)} of ${number(store.num_pages)}`) : "",
    row("hits", percent(store.num_blocks_matched, store.num_blocks_asked)),
    row("written, read", `${bytes(store.num_bytes_written)}, ${bytes(store.num_bytes_read)}`),
    store.num_evictions ? row("evicted", short(store.num_evictions)) : "");
}

// colour: that of the bar's part which the row is about.
function row(name, value, colour = "") {
  return el("div.row", {}, el("span", {}, colour ? el(`i.c-${colour}`) : "", name), el("b", {}, value));
}
