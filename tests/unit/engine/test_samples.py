"""Several samples of one prompt: computed once, shared by copy-on-write, each its own from there
on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.errors import InvalidRequest, RequestTooLong
from engine.outputs import RequestOutput
from engine.request import FinishReason, Request
from tests.harness.engines import fake_model, finish, hand_over, make_request
from tests.harness.workloads import outcomes

Make = Callable[..., Any]


def _sampled(prompt: Any, num_samples: int, **fields: Any) -> Request:
    fields = {"temperature": 3.0, "seed": 11, "num_samples": num_samples} | fields
    return make_request("a", prompt, **fields)


def _alone(make_engine: Make, prompt: Any, index: int) -> tuple[int, ...]:
    engine = make_engine()
    engine.submit(_sampled(prompt, 1, sample_index=index))
    return outcomes(finish(engine)["a"])[0][0]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 13])
@pytest.mark.parametrize("preemption", ["never", "recompute"])
def test_each_sample_is_what_it_is_alone(length: int, preemption: str, make_engine: Make) -> None:
    engine = make_engine(budget=9, preemption=preemption, num_blocks=80)
    prompt = range(1, length + 1)
    engine.submit(_sampled(prompt, 4))
    events = finish(engine)["a"]
    assert sum(event.is_request_over for event in events) == 1 and events[-1].is_request_over
    found = outcomes(events)
    for index in range(4):
        expected = _alone(make_engine, prompt, index)
        assert found[index][0] == expected, index
    assert len({one[0] for one in found.values()}) == 4
    assert engine.stats().num_computed_tokens == length + 4 * 7  # the prompt once
    assert engine.stats().num_referenced_blocks == 0


def test_the_prompt_is_shared_and_its_last_block_copied(make_engine: Make) -> None:
    engine = make_engine()
    engine.submit(_sampled(range(1, 15), 3))
    engine.step()
    assert len({engine.block_ids("a", index)[:4] for index in range(3)}) == 1
    engine.step()
    tables = [engine.block_ids("a", index) for index in range(3)]
    assert len({table[:3] for table in tables}) == 1 and len({table[3] for table in tables}) == 3


def test_a_sample_that_ends_gives_its_blocks_back(make_engine: Make) -> None:
    """And no more than its own: the law is checked after each step."""
    plain = make_engine()
    plain.submit(_sampled(range(1, 7), 5, max_tokens=20))
    drawn = outcomes(finish(plain)["a"])
    stops = frozenset({drawn[0][0][2], drawn[1][0][5], drawn[2][0][11]})
    engine = make_engine()
    engine.submit(_sampled(range(1, 7), 5, max_tokens=20, stop_token_ids=stops))
    levels = []
    while engine.has_work():
        engine.step()
        engine.check_integrity()
        levels.append(engine.stats().num_referenced_blocks)
    assert levels == sorted(levels, reverse=True) and len(set(levels)) > 2


def test_samples_hold_together(make_engine: Make) -> None:
    engine = make_engine()
    assert len(engine.reserve(_sampled(range(1, 15), 3, hold_after=1)).block_ids) == 4
    engine.start("a")
    events = finish(engine)["a"]
    assert [event.sample_index for event in events] == [0, 1, 2]
    assert [event.is_request_over for event in events] == [False, False, True]
    assert [block.index for block in events[0].filled] == [0, 1, 2] and not events[1].filled
    assert engine.stats().num_holding == 1
    engine.release("a")
    assert engine.stats().num_referenced_blocks == 0


@pytest.mark.parametrize("length", [4, 14, 16])
@pytest.mark.parametrize("num_loaded", [0, 3, 4, 100])
def test_a_handover_of_several_samples(length: int, num_loaded: int, make_engine: Make) -> None:
    prompt = range(1, length + 1)
    request = _sampled(prompt, 3)
    prefill, decode = make_engine(), make_engine()
    prefill.reserve(dataclasses.replace(request, hold_after=1))
    prefill.start("a")
    first = {i: one[0] for i, one in outcomes(finish(prefill)["a"]).items()}
    decode.reserve(request)
    num_loaded = min(num_loaded, length)
    hand_over(prefill, decode, "a", num_loaded)
    prefill.release("a")
    decode.start("a", num_loaded_tokens=num_loaded, outputs=[first[i] for i in range(3)])
    rest = outcomes(finish(decode)["a"])
    for index in range(3):
        expected = _alone(make_engine, prompt, index)
        assert first[index] + rest[index][0] == expected
    assert decode.stats().num_computed_tokens == length - num_loaded + 3 * 7


def test_a_sample_that_an_earlier_leg_ended_takes_no_part(make_engine: Make) -> None:
    engine = make_engine()
    engine.reserve(_sampled(range(1, 7), 3, stop_token_ids=frozenset({50})))
    engine.start("a", outputs=[(7,), (50,), (9,)])
    events = finish(engine)["a"]
    assert {event.sample_index for event in events if event.token_ids} == {0, 2}
    assert events[-1].is_request_over


@pytest.mark.parametrize(
    "outputs", [[(1,)], [(1,), (2,), ()], [(1,), (2,), (97,)], [(50,)] * 3, [(1,) * 8] * 3]
)
def test_outputs_that_do_not_fit_are_refused(
    outputs: list[tuple[int, ...]], make_engine: Make
) -> None:
    engine = make_engine()
    engine.reserve(_sampled(range(1, 7), 3, stop_token_ids=frozenset({50})))
    with pytest.raises(InvalidRequest, match="outputs"):
        engine.start("a", outputs=outputs)
    engine.start("a")


def test_a_sample_can_be_finished_from_outside(make_engine: Make) -> None:
    engine = make_engine()
    engine.submit(_sampled(range(1, 7), 3))
    engine.finish_sample("a", 1)  # before there is one
    for _ in range(3):
        engine.step()
        engine.check_integrity()
    engine.finish_sample("a", 0)
    engine.finish_sample("a", 0)
    with pytest.raises(InvalidRequest):
        engine.finish_sample("a", 3)
    events: list[RequestOutput] = finish(engine)["a"]
    assert {event.sample_index for event in events} == {2}
    assert events[-1].is_request_over
    engine.finish_sample("a", 2)
    engine.submit(_sampled(range(1, 7), 2))
    for index in range(2):
        engine.finish_sample("a", index)
    assert not engine.has_work() and engine.stats().num_referenced_blocks == 0


@pytest.mark.parametrize("num_samples", [0, -1, 9, 1000])
def test_too_many_samples_are_refused(num_samples: int, make_engine: Make) -> None:
    with pytest.raises(InvalidRequest) as caught:
        make_engine(running=8).reserve(_sampled([1], num_samples))
    assert caught.value.field == "num_samples"


def test_samples_that_never_fit_together_are_refused(make_engine: Make) -> None:
    request = _sampled(range(1, 7), 4, max_tokens=40)
    with pytest.raises(RequestTooLong):
        make_engine(num_blocks=16).reserve(request)
    engine = make_engine(num_blocks=16, preemption="recompute")  # one after another, they do
    engine.submit(request)
    found = outcomes(finish(engine)["a"])
    assert [len(found[index][0]) for index in range(4)] == [40] * 4


def test_the_stop_policy_ends_a_sample() -> None:
    seen: list[tuple[int, int]] = []

    def policy(view: Any) -> bool:
        seen.append((view.sample_index, len(view.output_token_ids)))
        if view.request_id == "bad":
            raise ValueError("what is this")
        return bool(view.sample_index == 1 and len(view.output_token_ids) == 2)

    engine = LLMEngine(EngineConfig(num_blocks=64), fake_model(), stop_policy=policy)
    engine.submit(_sampled(range(1, 7), 2))
    engine.submit(make_request("bad", range(1, 7)))
    events = finish(engine)
    found = outcomes(events["a"])
    assert found[1][1] is FinishReason.POLICY and len(found[1][0]) == 2
    assert found[0][1] is FinishReason.LENGTH and len(found[0][0]) == 8
    assert "ValueError: what is this" in str(events["bad"][-1].error)
    assert seen[0] == (0, 1)


def test_an_end_before_the_others_began_is_told(make_engine: Make) -> None:
    """One sample is not wanted before the prompt is computed, the other ends at its first token."""
    engine = make_engine()
    engine.submit(_sampled(range(1, 7), 2, max_tokens=1))
    engine.finish_sample("a", 1)
    events = finish(engine)["a"]
    assert events[-1].is_request_over


def test_a_sample_that_has_all_it_holds_after_is_refused(make_engine: Make) -> None:
    """It would draw one more than its blocks were counted for."""
    engine = make_engine()
    engine.reserve(_sampled(range(1, 7), 2, hold_after=3))
    with pytest.raises(InvalidRequest, match="hold after 3"):
        engine.start("a", outputs=[(1,), (1, 2, 3)])
    engine.start("a")
