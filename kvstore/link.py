"""Link: one worker's way to one store, as it was measured when the two met; and whether it is
degraded. Values and pure functions.

A transfer path that falls back to something slow, or a network that is not the one meant, works and
is a hundred times too slow, and nobody notices. So each attachment is measured, and judged against
what the operator expects and, through memory that is mapped, against a plain copy in the same
process at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass

SHM_FLOOR_SHARE = 1 / 50
"""Of a plain copy's rate. Through shared memory 1/2 is usual and 1/10 a bad day (measured), between
GPUs ten times as much."""


@dataclass(frozen=True)
class Rates:
    """Bytes/s of one transfer of `num_bytes`, best of a few. latency_s: of reading one block,
    checksum included, best of a few. copy_bytes_per_s: of a plain copy of as many bytes on a thread
    of this process.

    A lender takes no writes: there write_bytes_per_s is 0.
    """

    num_bytes: int
    write_bytes_per_s: float
    read_bytes_per_s: float
    latency_s: float
    copy_bytes_per_s: float


@dataclass(frozen=True)
class Link:
    """rates None: `problem` says why it was not measured. is_fault: that is the link's own fault
    (too slow to measure, wrong bytes), not for instance a full store's."""

    node_id: str
    address: str
    transport: str
    measured_unix_ms: int
    rates: Rates | None = None
    problem: str = ""
    is_fault: bool = False


@dataclass(frozen=True)
class Verdict:
    """floor_bytes_per_s: what was demanded of each direction that is used; 0: nothing."""

    floor_bytes_per_s: float
    degraded: bool


def judge(link: Link, floor_bytes_per_s: float) -> Verdict:
    """Whether the link is as fast as it has to be. Source: ours.

    Args: floor_bytes_per_s: the operator's; 0: none.
    """
    rates = link.rates
    if rates is None:
        return Verdict(floor_bytes_per_s, link.is_fault)
    floor = floor_bytes_per_s
    if link.transport in ("shm", "cuda_ipc"):
        floor = max(floor, rates.copy_bytes_per_s * SHM_FLOOR_SHARE)
    slowest = min(rates.write_bytes_per_s or rates.read_bytes_per_s, rates.read_bytes_per_s)
    return Verdict(floor, slowest < floor)
