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
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from baton import ClusterConfig, LocalCluster
from baton.load import workload
from baton.load.workload import TraceLine
from benchmarks import autoscaling
from benchmarks.autoscaling import ROLES, Course, Drive, Stretch, paced
from tests.harness.cluster import assert_idle

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

_VOCAB_SIZE = 2048
_SETTLE_S = 120.0
_FEWEST_JUDGED = 50
# No CPU meets these, so that a little load is too much for one worker, on any machine.
_TIGHT = ("autoscaler.plan.targets.ttft_s=0.005", "autoscaler.plan.targets.tpot_s=0.001")


def _run(
    stretches: Sequence[Stretch], name: str, tmp_path: Path, *, config: ClusterConfig | None = None
) -> Drive:
    with LocalCluster(config or autoscaling.config(*_TIGHT, most=2)) as cluster:
        driven = asyncio.run(autoscaling.drive(cluster, stretches, settle_s=_SETTLE_S))
        assert_idle(cluster)
    folder = Path(os.environ.get("BATON_ARTEFACTS", tmp_path))
    picture = folder / f"autoscaling-{name}.png"
    autoscaling.draw({name: (driven.outcomes, driven.course)}, picture)
    return driven


def _paced(*parts: tuple[str, Callable[[Course], bool] | None], seed: int) -> list[Stretch]:
    """Rates, and until when they are sent again and again; None: once."""
    return [
        autoscaling.paced_stretch(rates, vocab_size=_VOCAB_SIZE, seed=seed + at, enough=enough)
        for at, (rates, enough) in enumerate(parts)
    ]


def _run_paced(stretches: Sequence[Stretch], name: str, tmp_path: Path) -> Drive:
    """What a worker carries is known here, whatever the machine does beside: one prefill worker
    about 0.85 requests a second within the targets, one decode worker 1.4."""
    with paced(autoscaling.PACED):
        return _run(stretches, name, tmp_path, config=autoscaling.paced_config())


def _assert_kept(driven: Drive, *, max_turns: int) -> None:
    """No request failed, workers of both roles were asked for, all that came have left, and nothing
    went to and fro. When those that were asked for serve is the machine's to say: a trace may be
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


def _assert_came(driven: Drive) -> None:
    """Those of each role that were asked for have served: for loads that last until they do."""
    most = {role: driven.course.most_ready(role) for role in ROLES}
    assert all(num == 2 for num in most.values()), f"no worker came while the load lasted: {most}"


def test_a_step_of_load_adds_workers_and_its_end_removes_them(seed: int, tmp_path: Path) -> None:
    """It lasts until a worker of each role was added, however long a worker takes to start."""
    load = autoscaling.shaped("6:4", vocab_size=_VOCAB_SIZE, seed=seed)
    step = Stretch([load] * 60, autoscaling.have_come)
    driven = _run([step], "step", tmp_path)
    _assert_kept(driven, max_turns=1)
    _assert_came(driven)


_HAVE_COME = autoscaling.have_come
_RAMP = (("0..2.5:90", None), ("2.5:10", _HAVE_COME), ("2.5..0:90", None))
_BURST = (
    *(("0.2:15", None), ("3:60", None), ("2.5:10", _HAVE_COME)),
    *(("0.2:90", None), ("3:60", None), ("0.2:30", None)),
)


@pytest.mark.long
@pytest.mark.parametrize(("name", "parts", "max_turns"), [("ramp", _RAMP, 1), ("burst", _BURST, 3)])
def test_other_shapes(
    name: str,
    parts: tuple[tuple[str, Callable[[Course], bool] | None], ...],
    max_turns: int,
    seed: int,
    tmp_path: Path,
) -> None:
    """Requests come evenly: chance in a few of them near what one worker carries would be more than
    the slack, and a turn that follows it no mistake. A ramp's top and the first burst outlast the
    start of a worker of each role."""
    driven = _run_paced(_paced(*parts, seed=seed), name, tmp_path)
    _assert_kept(driven, max_turns=max_turns)
    _assert_came(driven)


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
    load = workload.replay_trace(ordered, vocab_size=_VOCAB_SIZE, seed=seed, shrink=8)
    _assert_kept(_run_paced([Stretch([load])], "trace", tmp_path), max_turns=1)


@pytest.mark.long
def test_targets_are_met_when_workers_have_come(seed: int, tmp_path: Path) -> None:
    """The first workers are too few and requests are late; with those that the autoscaler adds, and
    once what had piled up is cleared, so many are in time as the targets ask.

    Requests come evenly, so that they are late at first whatever chance does, and as long as it
    takes until enough of them can be judged.
    """
    load = _paced((autoscaling.SHAPES["paced"], autoscaling.can_be_judged), seed=seed)
    driven = _run_paced(load, "paced", tmp_path)
    _assert_kept(driven, max_turns=1)
    _assert_came(driven)
    spans = driven.met_before_and_after(autoscaling.PACED_TARGETS)
    assert spans is not None
    before, after = spans
    assert not before.reaches(autoscaling.QUANTILE), before
    assert after.num_requests >= _FEWEST_JUDGED, f"workers came too late to be judged: {after}"
    assert after.reaches(autoscaling.QUANTILE), after
