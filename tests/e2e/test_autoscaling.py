"""A whole cluster whose workers come and go with the load, and no request that notices.

The plan's promises (budget, hysteresis, freezing) are property tests of the plan; here the real
router counts, the real autoscaler decides and real processes start and drain. Latency is drawn, not
judged, for on two cores more workers compute no more; but for workers whose devices take as long as
they are told, so that slots bind and not cores. Pictures of load, workers and waiting are left in
BATON_ARTEFACTS, where that names a folder.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.cluster_config import ClusterConfig
from baton.load import course, trace_file
from baton.load.arrivals import Kind
from baton.load.course import ROLES, Moment
from baton.load.planned import Planned
from baton.load.trace_file import TraceLine
from baton.local_cluster import LocalCluster
from benchmarks import autoscaling_local
from benchmarks.autoscaling_local import Drive
from benchmarks.paced_worker import paced
from tests.e2e.conftest import assert_idle

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

_VOCAB_SIZE = 2048
_SETTLE_S = 120.0
_FEWEST_JUDGED = 50
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
    config: ClusterConfig | None = None,
) -> Drive:
    with LocalCluster(config or autoscaling_local.config(*_TIGHT, most=2)) as cluster:
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


def _paced(rates: str, seed: int, kind: Kind) -> list[Planned]:
    return autoscaling_local.shaped(
        rates,
        vocab_size=_VOCAB_SIZE,
        seed=seed,
        lengths=autoscaling_local.PACED_LENGTHS,
        kind=kind,
    )


def _run_paced(load: list[Planned], name: str, tmp_path: Path) -> Drive:
    """What a worker carries is known here, whatever the machine does beside: one prefill worker
    about 0.85 requests a second within the targets, one decode worker 1.4."""
    with paced(autoscaling_local.PACED):
        return _run(load, name, tmp_path, config=autoscaling_local.paced_config())


def _assert_kept(driven: Drive, *, max_turns: int) -> None:
    """No request failed, workers of both roles were asked for, all that came have left, and nothing
    went to and fro. When those that were asked for serve is the machine's to say: a load may be
    over before."""
    failed = [outcome for outcome in driven.outcomes if not outcome.is_served]
    assert not failed, failed[:3]
    seen = driven.course
    most = [max(moment.pools[role].num_wanted for moment in seen.moments) for role in ROLES]
    assert most == [2, 2], "as many as the load needs, and there may be"
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
    [("ramp", "0..2.5:90,2.5..0:90", 1), ("burst", "0.2:15,3:60,0.2:90,3:60,0.2:30", 3)],
)
def test_other_shapes(name: str, rates: str, max_turns: int, seed: int, tmp_path: Path) -> None:
    """Requests come evenly: chance in a few of them near what one worker carries would be more than
    the slack, and a turn that follows it no mistake. A burst outlasts the start of a worker."""
    _assert_kept(_run_paced(_paced(rates, seed, "constant"), name, tmp_path), max_turns=max_turns)


@pytest.mark.long
def test_a_trace(seed: int, tmp_path: Path) -> None:
    """Conversations whose turns share prefixes, a crowd of them in the beginning."""
    lines = [
        TraceLine(
            timestamp_ms=turn * 20_000 + talk * (400 if 5 <= talk < 55 else 3000),
            num_input_tokens=512 * (turn + 1),
            num_output_tokens=104,
            hash_ids=tuple(talk * 100 + block for block in range(turn + 1)),
        )
        for talk in range(61)
        for turn in range(4)
    ]
    ordered = sorted(lines, key=lambda line: line.timestamp_ms)
    load = trace_file.replay(ordered, vocab_size=_VOCAB_SIZE, seed=seed, shrink=8)
    _assert_kept(_run_paced(load, "trace", tmp_path), max_turns=1)


@pytest.mark.long
def test_targets_are_met_when_workers_have_come(seed: int, tmp_path: Path) -> None:
    """The first workers are too few and requests are late; with those that the autoscaler adds, and
    once what had piled up is cleared, so many are in time as the targets ask.

    Requests come evenly, so that they are late at first whatever chance does.
    """
    load = _paced(autoscaling_local.SHAPES["paced"], seed, "constant")
    driven = _run_paced(load, "paced", tmp_path)
    _assert_kept(driven, max_turns=1)
    assert all(driven.course.most_ready(role) == 2 for role in ROLES)
    spans = driven.met_before_and_after(autoscaling_local.PACED_TARGETS)
    assert spans is not None
    before, after = spans
    assert not before.reaches(autoscaling_local.QUANTILE), before
    assert after.num_requests >= _FEWEST_JUDGED, f"workers came too late to be judged: {after}"
    assert after.reaches(autoscaling_local.QUANTILE), after
