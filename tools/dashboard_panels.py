"""The panels of the Grafana dashboards: what is asked of Prometheus, under which title. Where each
stands is gen_dashboards.py's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Panel:
    """One panel of a dashboard. queries: (legend, PromQL). kind: timeseries, stat, heatmap or
    table."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    text: str = ""


def _rate(name: str, by: str = "", where: str = "") -> str:
    group = f" by ({by})" if by else ""
    return f"sum{group} (rate({name}{{{where}}}[$__rate_interval]))"


def _quantile(share: float, name: str, where: str = "") -> str:
    rates = f"sum by (le) (rate({name}_bucket{{{where}}}[$__rate_interval]))"
    return f"histogram_quantile({share}, {rates})"


def _quantiles(name: str, where: str = "") -> tuple[tuple[str, str], ...]:
    return tuple((f"p{share * 100:g}", _quantile(share, name, where)) for share in (0.5, 0.9, 0.99))


def _share(part: str, whole: str) -> str:
    return f"{part} / ({whole} > 0)"


_HIT_TOKENS = 'source=~"local|store"'

OVERVIEW = (
    Panel("Processes up", (("", 'sum(up{job="baton"})'),), kind="stat", width=4),
    Panel(
        "Requests in flight",
        (("", "sum(baton_router_requests_in_flight)"),),
        kind="stat",
        width=4,
    ),
    Panel(
        "Requests a second",
        (("", _rate("baton_router_requests_total")),),
        "reqps",
        "stat",
        4,
    ),
    Panel(
        "Output tokens a second",
        (("", _rate("baton_router_output_tokens_total")),),
        "short",
        "stat",
        4,
    ),
    Panel(
        "Prefix hit rate",
        (
            (
                "",
                _share(
                    _rate("baton_router_prompt_tokens_total", where=_HIT_TOKENS),
                    _rate("baton_router_prompt_tokens_total"),
                ),
            ),
        ),
        "percentunit",
        "stat",
        4,
    ),
    Panel(
        "Failed requests",
        (
            (
                "",
                _share(
                    _rate("baton_router_requests_total", where='outcome="failed"'),
                    _rate("baton_router_requests_total"),
                ),
            ),
        ),
        "percentunit",
        "stat",
        4,
    ),
    Panel(
        "Requests by how they ended",
        (("{{outcome}}", _rate("baton_router_requests_total", "outcome")),),
        "reqps",
    ),
    Panel(
        "Time to first token, as clients see it",
        _quantiles("baton_router_time_to_first_token_seconds"),
        "s",
    ),
    Panel(
        "Time between tokens, as clients see it",
        _quantiles("baton_router_inter_token_latency_seconds"),
        "s",
    ),
    Panel(
        "Where prompts' KV came from",
        (("{{source}}", _rate("baton_router_prompt_tokens_total", "source")),),
        "short",
    ),
    Panel(
        "Requests at the workers",
        (("{{role}} {{state}}", "sum by (role, state) (baton_engine_requests)"),),
    ),
    Panel(
        "Cache blocks in use",
        (("{{worker_id}}", "baton_kv_utilisation_ratio"),),
        "percentunit",
    ),
    Panel(
        "Prompt tokens computed a second",
        (("{{worker_id}}", _rate("baton_prefill_tokens_total", "worker_id")),),
    ),
    Panel(
        "Output tokens a second",
        (("{{worker_id}}", _rate("baton_output_tokens_total", "worker_id")),),
    ),
    Panel(
        "Step time of decode, p50 and p99",
        (
            ("p50", _quantile(0.5, "baton_step_seconds", 'role="decode"')),
            ("p99", _quantile(0.99, "baton_step_seconds", 'role="decode"')),
        ),
        "s",
    ),
    Panel(
        "CPU", (("{{part}}", "rate(process_cpu_seconds_total[$__rate_interval])"),), "percentunit"
    ),
    Panel("Memory", (("{{part}}", "process_resident_memory_bytes"),), "bytes"),
    Panel(
        "Preemptions",
        (("{{worker_id}} {{cause}}", _rate("baton_preemptions_total", "worker_id, cause")),),
    ),
)

HANDOVER = (
    Panel(
        "Handovers by path",
        (("{{path}}", _rate("baton_kv_handovers_total", "path")),),
        "reqps",
        text="store: written to the store and read there. direct: out of prefill's own cache.",
    ),
    Panel(
        "Bytes moved a second",
        (
            (
                "{{direction}} {{transport}} {{place}}",
                _rate("baton_transfer_bytes_sum", "direction, transport, place"),
            ),
        ),
        "Bps",
    ),
    Panel("Transfer time, reading", _quantiles("baton_transfer_seconds", 'direction="read"'), "s"),
    Panel("Transfer time, writing", _quantiles("baton_transfer_seconds", 'direction="write"'), "s"),
    Panel(
        "Blocks that failed, by reason",
        (
            (
                "{{direction}} {{reason}}",
                _rate("baton_transfer_failed_blocks_total", "direction, reason"),
            ),
        ),
        text="checksum and generation: found by verification, never used.",
    ),
    Panel(
        "Blocks computed again, by reason",
        (("{{reason}}", _rate("baton_kv_recomputed_blocks_total", "reason")),),
    ),
    Panel(
        "Fetched while prefill still ran",
        (
            (
                "share of handed-over tokens",
                _share(
                    _rate("baton_kv_early_tokens_total", where='role="decode"'),
                    _rate("baton_kv_source_tokens_total", where='role="decode",source="store"'),
                ),
            ),
        ),
        "percentunit",
    ),
    Panel(
        "Store frames",
        (("{{node_id}} {{state}}", "sum by (node_id, state) (baton_store_frames)"),),
    ),
    Panel(
        "File tier pages",
        (("{{node_id}} {{state}}", "sum by (node_id, state) (baton_store_pages)"),),
    ),
    Panel(
        "Store hit rate",
        (
            (
                "{{node_id}}",
                _share(
                    _rate("baton_store_blocks_found_total", "node_id"),
                    _rate("baton_store_blocks_asked_total", "node_id"),
                ),
            ),
        ),
        "percentunit",
    ),
    Panel(
        "Evicted, demoted, promoted",
        (
            ("evicted", _rate("baton_store_evictions_total")),
            ("demoted", _rate("baton_store_demoted_blocks_total")),
            ("promoted", _rate("baton_store_promoted_blocks_total")),
        ),
    ),
    Panel(
        "Leases",
        (
            ("{{node_id}} live", "baton_store_leases"),
            ("{{node_id}} lapsed a second", _rate("baton_store_leases_lapsed_total", "node_id")),
        ),
    ),
    Panel(
        "Refused by the store, by reason",
        (("{{node_id}} {{reason}}", _rate("baton_store_refused_blocks_total", "node_id, reason")),),
    ),
    Panel(
        "Index behind by",
        (("{{node_id}}", "baton_index_lag_seconds"),),
        "s",
    ),
    Panel(
        "Links as measured",
        (
            (
                "{{worker_id}} {{direction}} {{peer}} {{transport}}",
                "baton_link_bytes_per_second",
            ),
        ),
        "Bps",
    ),
    Panel(
        "Blocks out of use",
        (("{{worker_id}}", 'baton_kv_blocks{class="quarantined"}'),),
        text="A transfer may still write into them.",
    ),
    Panel(
        "Blocks that tenants hold",
        (("{{node_id}} {{tenant}}", "baton_store_tenant_blocks"),),
    ),
    Panel(
        "Answers' blocks stored for the next turn",
        (
            ("stored", _rate("baton_kv_written_back_blocks_total")),
            ("not: {{reason}}", _rate("baton_kv_not_written_back_blocks_total", "reason")),
        ),
    ),
    Panel(
        "Blocks put again, with what they follow",
        (
            (
                "{{transport}} {{place}}",
                _rate("baton_transfer_put_again_blocks_total", "transport, place"),
            ),
        ),
        text="the store had lost what they follow: no failure.",
    ),
)

ROUTER = (
    Panel("Requests in flight", (("{{router_id}}", "baton_router_requests_in_flight"),), width=8),
    Panel(
        "Errors by status",
        (("{{code}}", _rate("baton_router_errors_total", "code")),),
        "reqps",
    ),
    Panel(
        "Answers over HTTP",
        (("{{path}} {{code}}", _rate("baton_router_http_answers_total", "path, code")),),
        "reqps",
    ),
    Panel(
        "Workers known",
        (("{{router_id}} {{role}}", "sum by (router_id, role) (baton_router_workers)"),),
    ),
    Panel(
        "Where requests' time goes",
        (("{{stage}}", _rate("baton_router_stage_seconds_total", "stage")),),
        "s",
        width=16,
        text="Seconds of each stage per second: the stages of a request sum to all of it.",
    ),
    Panel(
        "Served and waiting to be admitted",
        (
            ("{{router_id}} served", "baton_router_admission_active_requests"),
            ("{{router_id}} waiting", "baton_router_admission_waiting_requests"),
        ),
    ),
    Panel("Time until admitted", _quantiles("baton_router_queue_seconds"), "s"),
    Panel(
        "Refused before any work, by reason",
        (("{{reason}}", _rate("baton_router_admission_refused_requests_total", "reason")),),
        "reqps",
    ),
    Panel("Whole request", _quantiles("baton_router_request_seconds"), "s"),
    Panel("Time to first token", _quantiles("baton_router_time_to_first_token_seconds"), "s"),
    Panel(
        "Time per output token",
        _quantiles("baton_router_time_per_output_token_seconds"),
        "s",
    ),
    Panel(
        "Time to first token, spread",
        (
            (
                "{{le}}",
                "sum by (le) (increase(baton_router_time_to_first_token_seconds_bucket"
                "[$__rate_interval]))",
            ),
        ),
        "s",
        "heatmap",
    ),
    Panel(
        "Decisions a second",
        (("{{policy}}", _rate("baton_router_choices_total", "policy")),),
    ),
    Panel("Time of a decision", _quantiles("baton_router_choice_seconds"), "s"),
    Panel(
        "What the chosen pairs cost, by term",
        (("{{term}}", _rate("baton_router_choice_cost_seconds_total", "term")),),
        "s",
    ),
    Panel("Prefix lookup", _quantiles("baton_router_lookup_seconds"), "s"),
    Panel(
        "Lookups without an answer",
        (("{{router_id}}", _rate("baton_router_lookups_failed_total", "router_id")),),
    ),
    Panel(
        "Legs tried again or given up",
        (("{{what}}", _rate("baton_router_retries_total", "what")),),
    ),
    Panel(
        "Suspected workers and looks at them",
        (
            ("suspected {{role}}", _rate("baton_router_suspects_total", "role")),
            ("look: {{outcome}}", _rate("baton_router_probes_total", "outcome")),
        ),
    ),
    Panel(
        "Samples by how they ended",
        (("{{reason}}", _rate("baton_router_samples_total", "reason")),),
    ),
    Panel("Redis reachable", (("{{router_id}}", "baton_router_redis_reachable"),), "bool_yes_no"),
)

DASHBOARDS: Mapping[str, tuple[str, str, Sequence[Panel]]] = {
    "baton-overview": (
        "Baton: overview",
        "Is it well, how fast is it, what is it doing.",
        OVERVIEW,
    ),
    "baton-kv-handover": (
        "Baton: KV handover",
        "KV between prefill, store and decode: bytes, time, what was verified and refused.",
        HANDOVER,
    ),
    "baton-router": ("Baton: router", "Requests, decisions, latencies, retries.", ROUTER),
}
