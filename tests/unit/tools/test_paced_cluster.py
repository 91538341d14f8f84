"""What the scaling benchmark has a local cluster start, and how it judges what came of a load;
without starting anything."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from baton import ClusterConfig
from baton.cluster import command_lines as cluster_plan
from baton.cluster.command_lines import ProcessSpec, WorkerSpec
from baton.load.report import Limits
from baton.load.runner import MessageArrival, RequestOutcome
from benchmarks import autoscaling
from benchmarks.autoscaling import Course, Drive, Moment, PoolSize, paced
from engine.config import EngineConfig
from engine.engine import load_engine
from engine.models import loader
from engine.testing.paced_model import DevicePace, PacedModel
from services.worker.testing.paced_worker import pace_models

_PARTS = WorkerSpec("redis://x", ("127.0.0.1:1",), "/x/handle.keys", Path("/x"))
_CONFIG = ClusterConfig(autoscale=True)


def _specs() -> dict[str, ProcessSpec]:
    return {
        role: cluster_plan.numbered_worker(_CONFIG, role, 3, _PARTS)
        for role in ("prefill", "decode")
    }


def test_a_paced_worker_is_told_its_pace_and_all_that_any_worker_is() -> None:
    plain = _specs()
    with paced({"decode": DevicePace(0.5, 0.001)}):
        given = _specs()
    assert given["prefill"] == plain["prefill"], "only roles with a pace"
    before, after = plain["decode"].argv, given["decode"].argv
    assert before[:4] == (sys.executable, "-P", "-m", "services.decode")
    told = ("-m", "services.worker.testing.paced_worker", "decode", "0.5", "0.001")
    assert after == (*before[:2], *told, *before[4:])
    assert given["decode"].name == plain["decode"].name
    assert _specs() == plain, "it is over with the block"


def test_a_worker_that_has_a_pace_loads_models_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "load_model", loader.load_model)  # as it was, after the test
    pace_models(DevicePace(step_s=0.01))
    engine = load_engine(EngineConfig(model="baton-5m", device="cpu", num_threads=1))
    try:
        assert isinstance(engine._model, PacedModel)
    finally:
        engine.close()


def test_workers_are_as_they_were_after_an_error() -> None:
    plain = _specs()
    with pytest.raises(RuntimeError), paced({"decode": DevicePace(0.5)}):
        raise RuntimeError
    assert _specs() == plain


def test_a_worker_that_is_started_in_another_way_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = ProcessSpec("decode-3", "decode", (sys.executable, "-P", "decode.pyz"))
    monkeypatch.setattr(cluster_plan, "numbered_worker", lambda *args: other)
    with paced({"decode": DevicePace(0.5)}), pytest.raises(ValueError, match=r"decode\.pyz"):
        cluster_plan.numbered_worker(_CONFIG, "decode", 3, _PARTS)


def _drive(*reactions_s: float | None, sent: dict[float, float], tpot_s: float = 0.1) -> Drive:
    """Workers of prefill and decode that were added at these times; requests by when they were
    sent, with their wait for the first of two tokens. No wait: it failed."""

    def size(reaction_s: float | None, at_s: float) -> PoolSize:
        num = 1 if reaction_s is None or at_s < reaction_s else 2
        return PoolSize(num, num)

    moments = [
        Moment(
            float(at_s),
            {
                "prefill": size(reactions_s[0], at_s),
                "decode": size(reactions_s[1], at_s),
            },
        )
        for at_s in range(-1, 100)
    ]
    outcomes = [
        RequestOutcome(
            at_s,
            at_s,
            at_s + wait_s + tpot_s,
            (MessageArrival(at_s + wait_s, 1), MessageArrival(at_s + wait_s + tpot_s, 1))
            if wait_s
            else (),
            error="" if wait_s else "NoCapacity",
        )
        for at_s, wait_s in sent.items()
    ]
    return Drive(outcomes, Course(tuple(moments)))


_TARGETS = Limits(ttft_ms=1000.0, tpot_ms=200.0)


def test_requests_are_judged_before_workers_came_and_once_they_had_time() -> None:
    """The later pool counts; what was sent while the backlog is cleared is in neither."""
    late, in_time = 2.0, 0.5
    sent = {0.0: in_time, 5.0: late, 9.0: late, 9.9: late}
    sent |= {10.0: late, 19.9: late}
    sent |= {20.0: in_time, 30.0: late, 40.0: in_time, 50.0: in_time}
    spans = _drive(4.0, 10.0, sent=sent).met_before_and_after(_TARGETS)
    assert spans is not None
    before, after = spans
    assert (before.num_requests, before.ttft_share, before.tpot_share) == (4, 0.25, 1.0)
    assert (after.num_requests, after.ttft_share, after.tpot_share) == (4, 0.75, 1.0)
    assert after.reaches(0.75)
    assert not after.reaches(0.76)
    assert not before.reaches(0.75)


def test_both_targets_count_and_who_failed_met_none() -> None:
    slow = _drive(1.0, 1.0, sent={5.0: 0.5}, tpot_s=0.3).met(_TARGETS, 0.0, 10.0)
    assert (slow.ttft_share, slow.tpot_share) == (1.0, 0.0)
    assert not slow.reaches(0.5)
    failed = _drive(1.0, 1.0, sent={5.0: 0.0, 6.0: 0.5}).met(_TARGETS, 0.0, 10.0)
    assert (failed.ttft_share, failed.tpot_share) == (0.5, 0.5)


def test_where_a_pool_never_grew_nothing_is_judged() -> None:
    assert _drive(4.0, None, sent={5.0: 0.5}).met_before_and_after(_TARGETS) is None


def test_nobody_asked_means_that_nothing_was_met() -> None:
    empty = _drive(1.0, 1.0, sent={5.0: 0.5}).met(_TARGETS, 6.0, 10.0)
    assert empty.num_requests == 0
    assert not empty.reaches(0.1)


def test_a_load_can_be_judged_when_enough_of_it_is_behind_what_had_piled_up() -> None:
    """Late workers move the moment away by twice as much; until then it goes on."""
    whole = _drive(4.0, 10.0, sent={}).course.moments
    judged_s = 2 * 10.0 + autoscaling.JUDGED_S
    for at, moment in enumerate(whole):
        seen = Course(whole[: at + 1])
        assert autoscaling.have_come(seen) == (moment.at_s >= 10.0)
        assert autoscaling.can_be_judged(seen) == (moment.at_s >= judged_s)
    never = _drive(4.0, None, sent={}).course
    assert not autoscaling.can_be_judged(never)


def test_a_paced_stretch_is_one_even_load_without_gaps_whose_prompts_all_differ() -> None:
    rates = autoscaling.SHAPES["paced"]
    stretch = autoscaling.paced_stretch(
        rates, vocab_size=2048, seed=7, enough=autoscaling.can_be_judged
    )
    assert len(stretch.rounds) == autoscaling.MAX_ROUNDS
    assert stretch.round_s is not None
    sent_s = [
        each.at_s + at * stretch.round_s for at, load in enumerate(stretch.rounds) for each in load
    ]
    rate = float(rates.partition(":")[0])
    assert sent_s == pytest.approx([at / rate for at in range(len(sent_s))])
    assert len({each.prompt_token_ids for load in stretch.rounds for each in load}) == len(sent_s)
    assert rate * autoscaling.JUDGED_S == 100
    once = autoscaling.paced_stretch("0..2.5:90", vocab_size=2048, seed=7)
    assert (len(once.rounds), once.round_s) == (1, 90.0)


def test_the_paced_load_is_too_much_for_one_worker_and_not_for_two() -> None:
    """By arithmetic alone: what a prompt and an answer take, and how many at once."""
    rate = float(autoscaling.SHAPES["paced"].partition(":")[0])
    lengths, paces = autoscaling.PACED_LENGTHS, autoscaling.PACED
    prompt_s = paces["prefill"].seconds(lengths.num_input_tokens)
    answer_s = paces["decode"].seconds(0) * (lengths.num_output_tokens - 1)
    for one_carries in (1 / prompt_s, autoscaling.PACED_SLOTS / answer_s):
        assert 1.2 * one_carries < rate < 0.8 * 2 * one_carries
    targets = autoscaling.PACED_TARGETS
    assert targets.ttft_ms is not None
    assert targets.tpot_ms is not None
    assert 2 * prompt_s < targets.ttft_ms / 1e3
    assert 2 * paces["decode"].seconds(0) <= targets.tpot_ms / 1e3
