"""Terms: the numbers that a decision was made from, by name, and what people should know beside
them. For the record only: nothing reads them to decide. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

from services.autoscaler.case import Asked
from services.autoscaler.limits import ScaleLimits
from services.autoscaler.signals import Observations, Role


def levels(seen: Observations, limits: ScaleLimits) -> Mapping[str, float]:
    """What is there, known also without any traffic."""
    found: dict[str, float] = {"budget_devices": limits.budget}
    for role in Role:
        pool = seen.pools.of(role)
        found[f"{role.value}.ready"] = pool.num_ready
        found[f"{role.value}.starting"] = pool.num_starting
        found[f"{role.value}.draining"] = pool.num_draining
    blocks = [worker for worker in seen.pools.decode.workers if worker.num_blocks]
    if blocks:
        num_free = sum(worker.num_free_blocks for worker in blocks)
        found["decode.free_blocks_share"] = num_free / sum(worker.num_blocks for worker in blocks)
    return found


def terms(asked: Asked) -> Mapping[str, float]:
    """What the load is, what workers do, and what that needs; rates per second, times in
    seconds."""
    load, capacity, rates = asked.load, asked.capacity, asked.rates
    a, b = capacity.decode.line
    found = {
        "arrivals_per_s": load.arriving,
        "trend_per_s": load.trend,
        "backlog_per_s": load.backlog,
        "most_carried_per_s": load.most,
        "prompt_tokens": capacity.prompt_tokens.value,
        "output_tokens": capacity.output_tokens.value,
        "cached_share": capacity.cached.value,
        "prefill.tokens_per_s": 1 / capacity.token_s.value,
        "prefill.wait_s": rates.bounds.wait_s,
        "decode.step_s": a,
        "decode.stream_s": b,
        "decode.max_batch": rates.bounds.max_batch,
        "decode.stream_blocks": capacity.stream_blocks.value,
    }
    for role in Role:
        found[f"{role.value}.wished"] = load.wished.of(role)
        found[f"{role.value}.needed"] = load.needed.of(role)
        found[f"{role.value}.enough"] = load.enough.of(role)
        found[f"{role.value}.strain"] = asked.pressure.strain.of(role)
    if asked.pressure.ttft_s is not None:
        found["ttft_s"] = asked.pressure.ttft_s
    if asked.pressure.tpot_s is not None:
        found["tpot_s"] = asked.pressure.tpot_s
    return found


def notes(asked: Asked) -> tuple[str, ...]:
    """What is still believed rather than seen, targets that cannot be met, and why latencies that
    are missed lead to nothing."""
    missing = asked.capacity.missing
    return (
        *([f"from settings, not seen yet: {', '.join(missing)}"] if missing else []),
        *asked.rates.bounds.problems,
        *([asked.pressure.note] if asked.pressure.note else []),
    )
