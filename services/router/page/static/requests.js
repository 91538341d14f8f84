// Requests: a table, and one of them in full: its waterfall and where its KV came from.

import { bytes, el, number, percent, replace, seconds, strip, svg } from "./dom.js";

const FAMILIES = {
  receive: "router", tokenize: "router", lookup: "router", choose: "router", reserve: "router",
  queue: "wait", admission: "wait", prefill_queue: "wait", decode_queue: "wait", "waiting for decode blocks": "wait",
  "waiting for a prefill worker": "wait", "waiting for a decode worker": "wait", "waiting for a decode place": "wait",
  handover: "handover", decode_fetch: "handover", decode: "decode", stream: "stream", decoding: "decode", prefilling: "prefill",
};
export const STAGE_LEGEND = [
  ["router", "router"], ["wait", "waiting for a turn"], ["prefill", "prefill"], ["handover", "KV handover"],
  ["decode", "decode"], ["stream", "streaming"],
];
const TIERS = { TIER_DEVICE: "device", TIER_HOST: "host memory", TIER_FILE: "file tier", TIER_OBJECT: "object store" };

const family = (stage) =>
  FAMILIES[stage] ?? (stage.startsWith("prefill") ? "prefill" : stage.startsWith("decode") ? "decode" : "router");
export const keyOf = (request) => `${request.tenant}/${request.request_id}/${request.arrived_unix_ms}`;
const words = (stage) => stage.replaceAll("_", " ");

// A request keeps its row, so that a click or the focus is not lost when its numbers change.
export function showTable(body, requests, selected) {
  const rows = new Map([...body.children].map((row) => [row.dataset.key, row]));
  const wanted = requests.map((request) => {
    const key = keyOf(request);
    const row = rows.get(key) ?? el("tr", { tabindex: 0, "data-key": key });
    row.setAttribute("aria-selected", key === selected);
    const told = JSON.stringify(request);
    if (row.told !== told) replace(row, ...cells(request));
    row.told = told;
    return row;
  });
  const isSame = wanted.length === body.children.length && wanted.every((row, at) => body.children[at] === row);
  if (!isSame) replaceKeepingFocus(body, wanted);
}

function replaceKeepingFocus(body, rows) {
  const focused = document.activeElement;
  replace(body, ...rows);
  if (rows.includes(focused)) focused.focus({ preventScroll: true });
}

export function onRowChosen(body, choose) {
  const keyAt = (event) => event.target.closest("tr")?.dataset.key;
  body.addEventListener("click", (event) => keyAt(event) && choose(keyAt(event)));
  body.addEventListener("keydown", (event) => {
    if ((event.key !== "Enter" && event.key !== " ") || !keyAt(event)) return;
    event.preventDefault();
    choose(keyAt(event));
  });
}

function cells(request) {
  const outcome = request.outcome || "live";
  const state = request.outcome ? request.outcome + (request.code && request.outcome !== "cancelled" ? `: ${words(request.code)}` : "") : request.state;
  const legs = [request.prefill_id, request.decode_id].filter(Boolean).join(" → ");
  const told = (name, ...children) => el("td", { "data-name": name }, ...children);
  const num = (name, words) => el("td.num", { "data-name": name }, words);
  return [
    told("Request", el("span", {}, el("span.id", { title: request.request_id }, request.request_id), el("small", {}, request.tenant))),
    told("State", el("span.mark", { "data-outcome": outcome }, state)),
    told("Ran on", legs || "–"),
    num("Prompt", number(request.num_prompt_tokens)),
    num("Output", number(request.num_output_tokens)),
    num("First token", request.first_token_s ? seconds(request.first_token_s) : "–"),
    num("Time", seconds(request.elapsed_s)),
    told("", strip(request.spans.map((span) => [family(span.stage), span.end_s - span.begin_s, `${words(span.stage)} ${seconds(span.end_s - span.begin_s)}`]), request.elapsed_s, "thin")),
  ];
}

// why: what the router recorded of its choices; null: nothing (yet).
export function showDetail(title, body, request, why) {
  title.textContent = request.request_id;
  const when = new Date(request.arrived_unix_ms);
  const facts = [
    ["arrived", when.toLocaleTimeString()], ["tenant", request.tenant], ["model", request.model],
    ["outcome", request.outcome || request.state], ["time", seconds(request.elapsed_s)],
    ["first token", request.first_token_s ? seconds(request.first_token_s) : "not yet"],
  ];
  replace(body,
    el("p.facts", {}, ...facts.map(([name, value]) => el("span", {}, `${name} `, el("b", {}, value)))),
    el("h5", {}, "Where its time went"), waterfall(request),
    el("h5", {}, "Where its KV came from"), provenance(request),
    ...(why?.decisions?.length ? [el("h5", {}, "Why it went there"), ...why.decisions.map(decisionView)] : []));
}

function decisionView(decision) {
  const pair = [decision.prefill_id, decision.decode_id].filter(Boolean).join(" → ");
  const cost = (value) => (decision.unit === "s" ? seconds(value) : `${Number(value.toPrecision(3))} ${decision.unit}`);
  const rows = decision.candidates.map((candidate) =>
    el("tr", candidate.chosen ? { class: "chosen" } : {},
      el("td", {}, candidate.role), el("td", {}, candidate.worker_id), el("td.num", {}, cost(candidate.cost)),
      el("td", {}, candidate.terms.filter((term) => term.value !== 0).map((term) => `${words(term.name)} ${cost(term.value)}`).join(", ") || "nothing")));
  return el("div.why", {},
    el("p.facts", {},
      el("span", {}, el("b", {}, pair), ` by policy ${decision.policy}`),
      el("span", {}, `${words(decision.occasion)} choice in ${seconds(decision.took_s)}, ${number(Number(decision.num_pairs))} ways weighed`),
      el("span", {}, `${number(decision.num_computed)} of ${number(decision.num_prompt_tokens)} tokens to be computed`)),
    el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, "Role"), el("th", {}, "Worker"), el("th.num", {}, "Cost"), el("th.wide", {}, "Made of"))), el("tbody", {}, ...rows)));
}

function waterfall(request) {
  const whole = request.elapsed_s || 1e-9;
  const rows = request.spans.flatMap((span) => {
    const length = span.end_s - span.begin_s;
    const marks = [svg(`rect.f-${family(span.stage)}`, { x: (100 * span.begin_s) / whole, y: 0, height: 10, width: Math.max((100 * length) / whole, 0.25), rx: 0.4 })];
    if (request.first_token_s) marks.push(svg("rect.f-first", { x: (100 * request.first_token_s) / whole, y: -4, width: 0.12, height: 18, opacity: 0.45 }));
    const quiet = length < whole / 2000 ? ".zero" : "";
    return [
      el(`span${quiet}`, {}, words(span.stage)),
      el("div.lane", {}, svg("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" }, ...marks)),
      el(`span.num${quiet}`, {}, seconds(length)),
    ];
  });
  return rows.length ? el("div.falls", {}, ...rows) : el("p.quiet", {}, "Nothing to show yet.");
}

function provenance(request) {
  const legs = request.provenance?.legs ?? [];
  if (!legs.length) return el("p.quiet", {}, request.outcome ? "It left no account." : "Told when it ends.");
  return el("div.legs", {}, ...legs.map((leg) => legView(leg, request.provenance.num_prompt_tokens)));
}

function legView(leg, whole) {
  const stored = leg.from_store.map((count) => ["store", count.num_tokens, `${number(count.num_tokens)} from ${count.node_id || "a store"}, ${TIERS[count.tier] ?? count.tier} (${bytes(Number(count.num_bytes))})`]);
  const parts = [
    ["computed", leg.num_tokens_computed, `${number(leg.num_tokens_computed)} computed`],
    ["local", leg.num_tokens_local, `${number(leg.num_tokens_local)} in its own cache`],
    ...stored,
  ].filter((part) => part[1] > 0);
  const again = leg.recomputed.map((count) => `${number(count.num_blocks)} blocks computed again: ${words(count.reason)}`);
  const moved = [["read", Number(leg.num_bytes_read)], ["wrote", Number(leg.num_bytes_written)]].filter((each) => each[1] > 0);
  return el("div", {},
    el("p.facts", {}, el("span", {}, `${leg.role} on `, el("b", {}, leg.worker_id)), leg.transport ? el("span", {}, `over ${leg.transport}`) : ""),
    strip(parts, whole, "tall"),
    el("div.legend", {}, ...parts.map(([colour, size, name]) => el("span", {}, el(`i.c-${colour}`), `${name} (${percent(size, whole)})`))),
    moved.length ? el("p.facts", {}, ...moved.map(([verb, size]) => el("span", {}, `${verb} `, el("b", {}, bytes(size))))) : "",
    again.length ? el("p.bad", {}, again.join("; ")) : "");
}
