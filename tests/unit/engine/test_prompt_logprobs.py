"""Log probabilities of a prompt come once each, chunk by chunk, whatever becomes of the request:
with what is cached, after it was preempted, with several samples; and rows of logits are bounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.batch import Batch
from engine.engine import LLMEngine
from engine.errors import InvalidLogits, InvalidRequest
from engine.outputs import PositionLogprobs, RequestOutput
from engine.request import Beam, Request
from engine.scheduler import MAX_PROMPT_ROWS, RunningSequence, plan_step
from engine.testing.fake_model import FakeModel
from tests.harness.engines import PROMPT, all_events, fake_model, make


def _scored(request: Request, num_top: int = 2) -> Request:
    return replace(request, prompt_logprobs=num_top)


def _told(events: Sequence[RequestOutput]) -> list[PositionLogprobs]:
    return [one for event in events for one in event.prompt_logprobs or ()]


def _check(model: FakeModel, prompt: Sequence[int], found: Sequence[PositionLogprobs]) -> None:
    assert [one.token_id for one in found] == list(prompt)
    assert math.isnan(found[0].logprob) and not found[0].top
    for end, one in enumerate(found[1:], 1):
        row = torch.log_softmax(model.logits(prompt[:end]).float(), dim=-1)
        values, token_ids = row.topk(2)
        assert one.logprob == pytest.approx(float(row[prompt[end]]))
        assert [token_id for token_id, _ in one.top] == token_ids.tolist()
        assert [value for _, value in one.top] == pytest.approx(values.tolist())


@pytest.mark.parametrize("budget", [8, 9, 16, 64])
@pytest.mark.parametrize("num_samples", [1, 3])
def test_each_token_has_them_once_computed_or_cached(
    budget: int,
    num_samples: int,
    make_engine: Callable[..., LLMEngine],
    make_request: Callable[..., Request],
    finish: Callable[..., dict[str, list[RequestOutput]]],
) -> None:
    model = fake_model()
    engine = make_engine(budget=budget)
    prompt = tuple(range(1, 30))
    for name in ("computed", "cached"):
        request = replace(_scored(make_request(name, prompt)), num_samples=num_samples)
        for one in (request, make_request("beside", prompt[:9] + (3,) * 9)):
            engine.reserve(one)
            engine.start(one.request_id)
        events = finish(engine)
        _check(model, prompt, _told(events[name]))
        assert not _told(events["beside"])
        for index in range(num_samples):
            drawn = [t for e in events[name] if e.sample_index == index for t in e.token_ids]
            assert drawn == model.generate(prompt, 8)
    plain = make_request("plain", prompt)
    assert engine.reserve(plain).num_local_tokens == 28  # others find what it has computed
    engine.abort("plain")


def test_a_preempted_prompt_is_not_told_twice_and_misses_none(
    make_request: Callable[..., Request],
) -> None:
    model = fake_model(context_window=32)
    engine = make(model, num_blocks=16, preemption="recompute", max_num_tokens_per_step=8)
    engine.submit(_scored(make_request("one", PROMPT, max_tokens=4)))
    events = list(engine.step().events)
    engine.preempt("one")
    # Meanwhile all of its prompt comes into the prefix cache.
    engine.submit(make_request("other", PROMPT, max_tokens=1, priority=1))
    events += all_events(engine)
    _check(fake_model(), PROMPT, _told([one for one in events if one.request_id == "one"]))


def test_an_embedding_beside_them_is_its_own_prompts(
    make_request: Callable[..., Request], finish: Callable[..., dict[str, list[RequestOutput]]]
) -> None:
    model, engine = fake_model(), make(fake_model())
    engine.submit(_scored(make_request("scored", PROMPT, max_tokens=1)))
    other = (7, 5, 3)
    engine.submit(replace(make_request("e", other, max_tokens=1), wants_embedding=True))
    events = finish(engine)
    _check(model, PROMPT, _told(events["scored"]))
    expected = torch.nn.functional.normalize(model.logits(other)[:8].float(), dim=0)
    assert events["e"][0].embedding == pytest.approx(expected.tolist(), abs=1e-6)


def test_they_do_not_go_with_what_has_been_loaded_or_with_beams(
    make_engine: Callable[..., LLMEngine], make_request: Callable[..., Request]
) -> None:
    engine = make_engine()
    request = _scored(make_request("r", PROMPT))
    with pytest.raises(InvalidRequest, match=r"prompt_logprobs.*beam"):
        engine.reserve(replace(request, beam=Beam(2)))
    with pytest.raises(InvalidRequest, match=r"prompt_logprobs.*from 0 to 64"):
        engine.reserve(replace(request, prompt_logprobs=65))
    engine.reserve(request)
    with pytest.raises(InvalidRequest, match=r"num_loaded_tokens.*prompt_logprobs"):
        engine.start("r", num_loaded_tokens=4)
    engine.abort("r")


class _Spoiled(FakeModel):
    """The logits behind its third token are no numbers."""

    def forward(self, batch: Batch) -> torch.Tensor:
        logits = super().forward(batch)
        if len(logits) > 4:
            logits[2] = math.nan
        return logits


def test_logits_that_are_no_numbers_end_the_request(make_request: Callable[..., Request]) -> None:
    engine = make(_Spoiled(context_window=64, block_size=4))
    engine.submit(_scored(make_request("r", PROMPT)))
    (event,) = engine.step().events
    assert isinstance(event.error, InvalidLogits) and event.is_request_over
    assert not engine.has_work()
    engine.check_integrity()


def test_rows_of_a_step_are_bounded() -> None:
    def prompt(name: str, order: int, **fields: Any) -> RunningSequence:
        return RunningSequence((name, 0), 1000, has_drawn=False, priority=0, order=order, **fields)

    plan = plan_step(
        [
            prompt("first", 1, is_scored=True),
            prompt("second", 2, is_scored=True),
            prompt("plain", 3),
        ],
        num_tokens_budget=2000,
    )
    assert plan == {("first", 0): MAX_PROMPT_ROWS, ("plain", 0): 1000}
