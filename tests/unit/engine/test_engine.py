"""One request's life through the engine, on a FakeModel that reads its history from the blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from baton_kernels import gumbel_noise

from engine.batch import Batch
from engine.errors import (
    DuplicateRequest,
    InvalidLogits,
    InvalidRequest,
    NoBlocks,
    RequestTooLong,
    UnknownRequest,
    WrongState,
)
from engine.outputs import RequestOutput
from engine.request import Beam, FinishReason, Request
from engine.testing.ahead_model import AheadModel
from engine.testing.fake_model import FakeModel
from tests.harness.engines import (
    PROMPT,
    SIZE,
    fake_model,
    finish,
    hand_over,
    make,
    make_request,
    tokens_of,
)

Make = Callable[..., Any]
MODEL = FakeModel(context_window=256)


def _start(engine: Any, request: Any, **start: Any) -> Any:
    reservation = engine.reserve(request)
    engine.start(request.request_id, **start)
    return reservation


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33])
@pytest.mark.parametrize("budget", [1, 3, 4, 5, 16, 100])
def test_output_does_not_depend_on_chunks(length: int, budget: int, make_engine: Make) -> None:
    engine = make_engine(budget=budget, running=1)
    prompt = [(7 * i) % 90 + 1 for i in range(length)]
    _start(engine, make_request("a", prompt, max_tokens=10))
    events = finish(engine)["a"]
    assert tokens_of(events) == MODEL.generate(prompt, 10)
    assert events[-1].finish_reason is FinishReason.LENGTH
    assert events[-1].num_computed_tokens == length + 9
    assert not any(e.token_ids for e in events[: -(-length // budget) - 1])


def test_a_ragged_batch_gives_each_what_it_gets_alone(make_engine: Make) -> None:
    engine = make_engine(budget=11, running=5, num_blocks=200)
    prompts = {str(i): [(5 * i + j) % 90 + 1 for j in range(1 + 3 * i)] for i in range(12)}
    for name, prompt in prompts.items():
        _start(engine, make_request(name, prompt, max_tokens=1 + len(prompt) % 7))
    events = finish(engine)
    for name, prompt in prompts.items():
        expected = FakeModel(context_window=800).generate(prompt, 1 + len(prompt) % 7)
        assert tokens_of(events[name]) == expected, name
    assert engine.stats().num_referenced_blocks == 0


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 12, 13])
def test_a_second_prompt_computes_what_follows_the_last_full_block_before_its_end(
    length: int, make_engine: Make
) -> None:
    engine = make_engine()
    prompt = list(range(1, length + 1))
    _start(engine, make_request("first", prompt, max_tokens=3))
    first = tokens_of(finish(engine)["first"])
    before = engine.stats().num_computed_tokens
    reservation = _start(engine, make_request("second", prompt, max_tokens=3))
    assert reservation.num_local_tokens == (length - 1) // 4 * 4
    assert tokens_of(finish(engine)["second"]) == first
    computed = engine.stats().num_computed_tokens - before
    assert computed == length - (length - 1) // 4 * 4 + 2
    assert engine.stats().num_local_prefix_tokens == (length - 1) // 4 * 4


def test_roots_do_not_share(make_engine: Make) -> None:
    engine = make_engine()
    _start(engine, make_request("a", PROMPT, root=b"tenant 1"))
    finish(engine)
    assert engine.reserve(make_request("b", PROMPT, root=b"tenant 2")).num_local_tokens == 0
    assert engine.reserve(make_request("c", PROMPT, root=b"tenant 1")).num_local_tokens == 12


def test_equal_prompts_in_flight_keep_their_own_blocks(make_engine: Make) -> None:
    """The second commit of a hash keeps the first mapping."""
    engine = make_engine()
    one, two = (_start(engine, make_request(name, PROMPT)) for name in "ab")
    assert not set(one.block_ids) & set(two.block_ids)
    events = finish(engine)
    assert tokens_of(events["a"]) == tokens_of(events["b"])
    third = engine.reserve(make_request("c", PROMPT))
    assert third.block_ids[:3] == one.block_ids[:3]


def test_filled_blocks_are_named_once_in_order_with_their_hashes(make_engine: Make) -> None:
    engine = make_engine(budget=5, running=1)
    reservation = _start(engine, make_request("a", PROMPT, max_tokens=8))
    events = finish(engine)["a"]
    filled = [block for event in events for block in event.filled]
    assert [block.index for block in filled] == [0, 1, 2, 3, 4]
    assert tuple(block.block_id for block in filled) == reservation.block_ids[:5]
    assert tuple(block.chain_hash for block in filled[:3]) == reservation.chain_hashes
    for event in events:
        assert all(4 * (block.index + 1) <= event.num_computed_tokens for block in event.filled)


def test_reservation_covers_all_that_is_ever_computed(make_engine: Make) -> None:
    engine = make_engine()
    assert len(engine.reserve(make_request("a", PROMPT, max_tokens=3)).block_ids) == 4
    assert len(engine.reserve(make_request("b", PROMPT, max_tokens=4)).block_ids) == 5
    held = engine.reserve(make_request("c", PROMPT, max_tokens=100, hold_after=1))
    assert len(held.block_ids) == 4


# -- the end --


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_eos_ends_a_request_and_is_reported_or_is_a_token_like_any_other(
    ignore_eos: bool, make_engine: Make
) -> None:
    expected = MODEL.generate(PROMPT, 8)
    engine = make_engine(eos_token_ids=(expected[4],))
    _start(engine, make_request("a", PROMPT, ignore_eos=ignore_eos))
    events = finish(engine)["a"]
    end = (events[-1].finish_reason, events[-1].stop_token_id)
    assert end == ((FinishReason.LENGTH, None) if ignore_eos else (FinishReason.EOS, expected[4]))
    assert tokens_of(events) == expected[: 8 if ignore_eos else 5]


@pytest.mark.parametrize("min_tokens", [0, 3, 4])
def test_stop_tokens_are_drawn_from_min_tokens_on(min_tokens: int, make_engine: Make) -> None:
    """Before, they are masked: the next best token is drawn in their place."""
    model = FakeModel(context_window=256)
    whole = model.generate(PROMPT, 8)
    stop = frozenset({whole[0], whole[2], whole[6]})
    expected: list[int] = []
    while len(expected) < 8 and not (stop & set(expected)):
        logits = model.logits([*PROMPT, *expected])
        if len(expected) < min_tokens:
            logits[list(stop)] = -torch.inf
        expected.append(int(logits.argmax()))
    engine = make_engine()
    _start(engine, make_request("a", PROMPT, stop_token_ids=stop, min_tokens=min_tokens))
    events = finish(engine)["a"]
    assert tokens_of(events) == expected and len(expected) > min_tokens
    if expected[-1] in stop:
        assert events[-1].finish_reason is FinishReason.STOP_TOKEN
        assert events[-1].stop_token_id == expected[-1]


def test_the_window_ends_a_request_and_a_prompt_that_fills_it_is_refused(make_engine: Make) -> None:
    engine = make_engine(context_window=20)
    _start(engine, make_request("a", PROMPT, max_tokens=1000))
    events = finish(engine)["a"]
    assert len(tokens_of(events)) == 6
    assert (events[-1].finish_reason, events[-1].stop_token_id) == (FinishReason.LENGTH, None)
    with pytest.raises(RequestTooLong, match="prompt_token_ids"):
        engine.reserve(make_request("b", range(20)))


def test_no_blocks_takes_nothing_and_can_be_tried_again(make_engine: Make) -> None:
    engine = make_engine(num_blocks=5, context_window=20)
    engine.reserve(make_request("a", range(1, 9), max_tokens=9))  # 4 blocks
    before = engine.stats()
    with pytest.raises(NoBlocks) as caught:
        engine.reserve(make_request("b", range(1, 3), max_tokens=8))  # 3 blocks
    assert caught.value.retry_after_s is not None
    assert engine.stats() == before
    engine.abort("a")
    engine.reserve(make_request("b", range(1, 3), max_tokens=8))


@pytest.mark.parametrize(
    ("prompt", "fields", "named"),
    [
        ((), {}, "prompt_token_ids"),
        ((-1,), {}, "prompt_token_ids"),
        ((1, 97), {}, "prompt_token_ids"),
        (PROMPT, {"top_p": 1.1}, "top_p"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(
    prompt: tuple[int, ...], fields: dict[str, Any], named: str, make_engine: Make
) -> None:
    """Each range of a sampling parameter: test_input_processor.py."""
    engine = make_engine()
    with pytest.raises(InvalidRequest, match=named) as caught:
        engine.reserve(make_request("a", prompt, **fields))
    assert caught.value.field == named
    assert engine.stats().num_free_blocks == 64


# -- hold --


def test_hold_keeps_the_blocks_until_release(make_engine: Make) -> None:
    engine = make_engine()
    reservation = _start(engine, make_request("a", PROMPT, hold_after=1))
    events = finish(engine)["a"]
    assert len(tokens_of(events)) == 1 and events[-1].finish_reason is None
    assert engine.stats().num_holding == 1
    assert engine.stats().num_referenced_blocks == len(reservation.block_ids)
    engine.release("a")
    assert engine.stats().num_referenced_blocks == 0
    assert engine.stats().num_cached_blocks == 3
    with pytest.raises(UnknownRequest):
        engine.release("a")


def test_a_holding_request_that_finished_says_why_and_still_holds(make_engine: Make) -> None:
    engine = make_engine()
    _start(engine, make_request("a", PROMPT, hold_after=5, max_tokens=2))
    assert finish(engine)["a"][-1].finish_reason is FinishReason.LENGTH
    assert engine.stats().num_holding == 1
    engine.release("a")


# -- a handover: what prefill did is loaded, not computed --


@pytest.mark.parametrize(
    ("length", "num_loaded"),
    [*((n, n) for n in (1, 3, 4, 5, 14, 16, 17)), *((14, n) for n in (0, 1, 4, 6, 13))],
)
def test_a_handover_computes_what_was_not_loaded(
    length: int, num_loaded: int, make_engine: Make
) -> None:
    """All of it, a part of it, or nothing at all gives the same tokens."""
    prefill, decode = make_engine(budget=5, running=1), make_engine()
    prompt = list(range(1, length + 1))
    decode.reserve(make_request("a", prompt))
    _start(prefill, make_request("a", prompt, hold_after=1))
    first = tokens_of(finish(prefill)["a"])
    hand_over(prefill, decode, "a", num_loaded)
    prefill.release("a")
    decode.start("a", num_loaded_tokens=num_loaded, outputs=[first])
    assert first + tokens_of(finish(decode)["a"]) == MODEL.generate(prompt, 8)
    assert decode.stats().num_computed_tokens == length - num_loaded + 7
    again = decode.reserve(make_request("b", prompt))
    assert again.num_local_tokens == (length - 1) // 4 * 4  # loaded blocks are cached


def test_a_fully_loaded_prompt_without_output_computes_its_last_token(make_engine: Make) -> None:
    """The last block is full and loaded, yet written once more: nobody may share it before."""
    prefill, other = make_engine(), make_engine()
    prompt = PROMPT[:12]
    _start(prefill, make_request("a", prompt, hold_after=1))
    finish(prefill)
    other.reserve(make_request("a", prompt))
    hand_over(prefill, other, "a", 12)
    other.start("a", num_loaded_tokens=12)
    assert other.reserve(make_request("b", (*prompt, 1))).num_local_tokens == 8
    events = finish(other)["a"]
    assert events[0].filled[0].index == 2
    assert tokens_of(events) == MODEL.generate(prompt, 8)
    assert other.stats().num_computed_tokens == 8


def test_a_corrupt_load_is_seen_in_the_tokens(make_engine: Make) -> None:
    """The fake can fail: this is what makes the tests above worth something."""
    decode = make_engine()
    decode.reserve(make_request("a", PROMPT))
    decode.start("a", num_loaded_tokens=14)
    assert tokens_of(finish(decode)["a"]) != MODEL.generate(PROMPT, 8)


@pytest.mark.parametrize(
    ("start", "field"),
    [
        ({"num_loaded_tokens": -1}, "num_loaded_tokens"),
        ({"num_loaded_tokens": 15}, "num_loaded_tokens"),
        ({"outputs": [(97,)]}, "outputs"),
        ({"outputs": [tuple(range(8))]}, "outputs"),
    ],
)
def test_start_refuses_what_does_not_fit(
    start: dict[str, Any], field: str, make_engine: Make
) -> None:
    engine = make_engine()
    engine.reserve(make_request("a", PROMPT))
    with pytest.raises(InvalidRequest, match=field):
        engine.start("a", **start)
    engine.start("a")


def test_calls_out_of_order_are_refused(make_engine: Make) -> None:
    engine = make_engine()
    with pytest.raises(UnknownRequest):
        engine.start("a")
    _start(engine, make_request("a", PROMPT))
    with pytest.raises(WrongState):
        engine.start("a")
    with pytest.raises(WrongState):
        engine.release("a")
    with pytest.raises(DuplicateRequest):
        engine.reserve(make_request("a", PROMPT))


# -- errors inside a step --


def test_nan_logits_end_their_request_only_and_leave_nothing_behind(make_engine: Make) -> None:
    engine = make_engine(poison=frozenset({50}))
    _start(engine, make_request("bad", (*range(1, 12), 50)))
    _start(engine, make_request("good", PROMPT))
    events = finish(engine)
    assert events["bad"][-1].error is not None and events["bad"][-1].token_ids == ()
    assert tokens_of(events["good"]) == MODEL.generate(PROMPT, 8)
    assert engine.reserve(make_request("next", (*range(1, 12), 50))).num_local_tokens == 8
    # ... of the good one's prompt, which begins alike: the bad one's own blocks are not found
    assert engine.stats().num_referenced_blocks == 5


def test_a_failing_forward_leaves_every_request_as_it_was(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(budget=5, running=2)
    _start(engine, make_request("a", PROMPT))
    engine.step()

    def fail(batch: object) -> None:
        raise RuntimeError("out of memory")

    computing = getattr(engine._model, "_model", engine._model)  # also what was launched
    with monkeypatch.context() as patch:
        patch.setattr(computing, "forward", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.step()
    engine.check_integrity()
    assert tokens_of(finish(engine)["a"]) == MODEL.generate(PROMPT, 8)


def test_logprobs_come_with_tokens(make_engine: Make) -> None:
    engine = make_engine(budget=5, running=2)
    _start(engine, make_request("a", PROMPT, logprobs=2))
    _start(engine, make_request("b", PROMPT))
    events: dict[str, list[RequestOutput]] = finish(engine)
    for event in events["a"]:
        assert (event.logprobs is None) == (event.token_ids == ())
        for token_id, one in zip(event.token_ids, event.logprobs or (), strict=True):
            assert one.token_id == token_id == one.top[0][0]
    assert all(event.logprobs is None for event in events["b"])


def test_noise_is_that_of_the_place_which_the_token_takes(make_engine: Make, seed: int) -> None:
    """A contract between workers: the first token of a prompt of n tokens is drawn at n."""
    engine = make_engine(budget=5, running=1)
    sampling = {"temperature": 0.7, "seed": seed, "sample_index": 3}
    _start(engine, make_request("a", PROMPT, **sampling))
    drawn = tokens_of(finish(engine)["a"])
    model = FakeModel(context_window=256)
    history = list(PROMPT)
    for token_id in drawn:
        key = torch.tensor([gumbel_noise.row_key(seed, 3, len(history))])
        scores = model.logits(history) / 0.7 + gumbel_noise.gumbel(key, torch.arange(97))
        assert token_id == int(scores.argmax())
        history.append(token_id)


def test_step_without_work_is_empty() -> None:
    model = fake_model()
    engine = make(model)
    assert not engine.has_work()
    output = engine.step()
    assert (output.events, output.num_scheduled_tokens, model.num_forwards) == ((), 0, 0)


# -- embeddings


def _embedding(prompt: tuple[int, ...]) -> Any:
    """What a prompt's must be."""
    expected = torch.nn.functional.normalize(MODEL.logits(prompt)[:8].float(), dim=0)
    return pytest.approx(expected.tolist(), abs=1e-6)


def test_a_prompt_of_which_one_token_is_left_is_not_launched_ahead() -> None:
    prompt = PROMPT[: 2 * SIZE + 1]  # all but the last token is found in the prefix cache
    engine = make(AheadModel(fake_model(), is_late=True))
    for name in ("first", "again"):
        engine.submit(make_request(name, prompt, max_tokens=1, wants_embedding=True))
        assert [event.embedding for event in finish(engine)[name]][-1] == _embedding(prompt)


def test_it_comes_once_also_when_the_request_was_preempted() -> None:
    """Recomputed with what it drew already, its last token is not the prompt's."""
    engine = make(fake_model(context_window=32), num_blocks=9, preemption="recompute")
    for name in ("other", "one"):
        engine.submit(make_request(name, PROMPT, max_tokens=12, wants_embedding=name == "one"))
    told = [event.embedding for event in finish(engine)["one"] if event.token_ids]
    assert engine.stats().num_preemptions
    assert told == [_embedding(PROMPT), *[None] * (len(told) - 1)]


# -- log probabilities of a prompt


def _scored(name: str, prompt: Sequence[int], **fields: Any) -> Request:
    return make_request(name, prompt, prompt_logprobs=2, **fields)


def _check(prompt: Sequence[int], events: Sequence[RequestOutput]) -> None:
    """Each token has them once."""
    found = [one for event in events for one in event.prompt_logprobs or ()]
    assert [one.token_id for one in found] == list(prompt)
    assert math.isnan(found[0].logprob) and not found[0].top
    for end, one in enumerate(found[1:], 1):
        row = torch.log_softmax(MODEL.logits(prompt[:end]).float(), dim=-1)
        values, token_ids = row.topk(2)
        assert one.logprob == pytest.approx(float(row[prompt[end]]))
        assert [token_id for token_id, _ in one.top] == token_ids.tolist()
        assert [value for _, value in one.top] == pytest.approx(values.tolist())


@pytest.mark.parametrize("budget", [8, 9, 16, 64])
@pytest.mark.parametrize("num_samples", [1, 3])
def test_each_token_has_them_once_computed_or_cached(
    budget: int, num_samples: int, make_engine: Make
) -> None:
    engine = make_engine(budget=budget)
    prompt = tuple(range(1, 30))
    for name in ("computed", "cached"):
        _start(engine, _scored(name, prompt, num_samples=num_samples))
        _start(engine, make_request("beside", prompt[:9] + (3,) * 9))
        events = finish(engine)
        _check(prompt, events[name])
        assert not any(event.prompt_logprobs for event in events["beside"])
        for index in range(num_samples):
            drawn = tokens_of(event for event in events[name] if event.sample_index == index)
            assert drawn == MODEL.generate(prompt, 8)
    # Others find what it has computed.
    assert engine.reserve(make_request("plain", prompt)).num_local_tokens == 28
    engine.abort("plain")


def test_a_preempted_prompt_is_not_told_twice_and_misses_none() -> None:
    model = fake_model(context_window=32)
    engine = make(model, num_blocks=16, preemption="recompute", max_num_tokens_per_step=8)
    engine.submit(_scored("one", PROMPT, max_tokens=4))
    events = list(engine.step().events)
    engine.preempt("one")
    # Meanwhile all of its prompt comes into the prefix cache.
    engine.submit(make_request("other", PROMPT, max_tokens=1, priority=1))
    _check(PROMPT, events + finish(engine)["one"])


def test_an_embedding_beside_them_is_its_own_prompts() -> None:
    engine = make(fake_model())
    engine.submit(_scored("scored", PROMPT, max_tokens=1))
    engine.submit(make_request("e", (7, 5, 3), max_tokens=1, wants_embedding=True))
    events = finish(engine)
    _check(PROMPT, events["scored"])
    assert events["e"][0].embedding == _embedding((7, 5, 3))


def test_they_do_not_go_with_what_has_been_loaded_or_with_beams(make_engine: Make) -> None:
    engine = make_engine()
    request = _scored("r", PROMPT)
    with pytest.raises(InvalidRequest, match=r"prompt_logprobs.*beam"):
        engine.reserve(replace(request, beam=Beam(2)))
    with pytest.raises(InvalidRequest, match=r"prompt_logprobs.*from 0 to 64"):
        engine.reserve(replace(request, prompt_logprobs=65))
    engine.reserve(request)
    with pytest.raises(InvalidRequest, match=r"num_loaded_tokens.*prompt_logprobs"):
        engine.start("r", num_loaded_tokens=4)


class _Spoiled(FakeModel):
    """The logits behind its third token are no numbers."""

    def forward(self, batch: Batch) -> torch.Tensor:
        logits = super().forward(batch)
        if len(logits) > 4:
            logits[2] = math.nan
        return logits


def test_logits_that_are_no_numbers_end_the_request() -> None:
    engine = make(_Spoiled(context_window=64, block_size=4))
    engine.submit(_scored("r", PROMPT))
    (event,) = finish(engine)["r"]
    assert isinstance(event.error, InvalidLogits) and event.is_request_over
