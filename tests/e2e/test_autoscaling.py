"""A whole cluster whose workers come and go with the load, and no request that notices.

The plan's promises (budget, hysteresis, freezing) are property tests of the plan; here the real
router counts, the real autoscaler decides and real processes start and drain. Latency is drawn, not
judged: on two cores more workers compute no more. Pictures of load, workers and waiting are left in
BATON_ARTEFACTS, where that names a folder.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.load import course, trace_file
from baton.load.course import ROLES, Moment
from baton.load.planned import Planned
from baton.load.trace_file import TraceLine
from baton.local_cluster import LocalCluster
from benchmarks import autoscaling_local
from benchmarks.autoscaling_local import Drive
from tests.e2e.conftest import assert_idle

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

_VOCAB_SIZE = 2048
_SETTLE_S = 120.0
# No CPU meets these, so that a little load is too much for one worker, on any machine.
_TIGHT = (
    "autoscaler.plan.targets.ttft_s=0.005",
    "autoscaler.plan.targets.tpot_s=0.001",
)


def _run(
    load: list[Planned],
    name: str,
    tmp_path: Path,
    *,
    enough: Callable[[Moment], bool] = lambda moment: True,
    max_rounds: int = 1,
) -> Drive:
    config = autoscaling_local.config(*_TIGHT, most=2)
    with LocalCluster(config) as cluster:
        driven = asyncio.run(
            autoscaling_local.drive(
                cluster, load, settle_s=_SETTLE_S, enough=enough, max_rounds=max_rounds
            )
        )
        assert_idle(cluster)
    folder = Path(os.environ.get("BATON_ARTEFACTS", tmp_path))
    course.draw(driven.outcomes, driven.course, folder / f"autoscaling-{name}.png", name)
    return driven


def _shaped(rates: str, seed: int) -> list[Planned]:
    return autoscaling_local.shaped(rates, vocab_size=_VOCAB_SIZE, seed=seed)


def _assert_kept(driven: Drive, *, max_turns: int) -> None:
    """No request failed, workers came, all that came have left, and nothing went to and fro."""
    failed = [outcome for outcome in driven.outcomes if not outcome.is_served]
    assert not failed, failed[:3]
    seen = driven.course
    assert any(seen.most_ready(role) > 1 for role in ROLES), "nothing was added"
    for role in ROLES:
        assert seen.most_ready(role) <= 2, role
        assert seen.num_turns(role) <= max_turns, role
    assert [seen.last_wanted(role) for role in ROLES] == [1, 1], "what was added has left"


def test_a_step_of_load_adds_workers_and_its_end_removes_them(seed: int, tmp_path: Path) -> None:
    """It lasts until a worker of each role was added, however long a worker takes to start."""

    def enough(moment: Moment) -> bool:
        return all(moment.pools[role].num_ready > 1 for role in ROLES)

    driven = _run(_shaped("6:4", seed), "step", tmp_path, enough=enough, max_rounds=60)
    _assert_kept(driven, max_turns=1)
    assert all(driven.course.most_ready(role) == 2 for role in ROLES)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "rates", "max_turns"),
    [("ramp", "0.5..10:60,10..0.5:60", 1), ("burst", "0.5:20,12:15,0.5:60,12:15,0.5:30", 3)],
)
def test_other_shapes(name: str, rates: str, max_turns: int, seed: int, tmp_path: Path) -> None:
    _assert_kept(_run(_shaped(rates, seed), name, tmp_path), max_turns=max_turns)


@pytest.mark.long
def test_a_trace(seed: int, tmp_path: Path) -> None:
    """Conversations whose turns share prefixes, a crowd of them in the middle."""
    lines = [
        TraceLine(
            timestamp_ms=turn * 9000 + talk * (200 if 10 <= talk < 60 else 1500),
            num_input_tokens=512 * (turn + 1),
            num_output_tokens=400,
            hash_ids=tuple(talk * 100 + block for block in range(turn + 1)),
        )
        for talk in range(70)
        for turn in range(4)
    ]
    ordered = sorted(lines, key=lambda line: line.timestamp_ms)
    load = trace_file.replay(ordered, vocab_size=_VOCAB_SIZE, seed=seed, shrink=8)
    _assert_kept(_run(load, "trace", tmp_path), max_turns=3)
