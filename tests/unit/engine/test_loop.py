"""One request's life through the engine, on a FakeModel that reads its history from the blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from baton_kernels import noise

from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.errors import (
    DuplicateRequest,
    InvalidRequest,
    NoBlocks,
    RequestTooLong,
    UnknownRequest,
    WrongState,
)
from engine.outputs import RequestOutput
from engine.request import FinishReason
from engine.testing.fake_model import FakeModel

Make = Callable[..., Any]
PROMPT = tuple(range(1, 15))  # 3 full blocks of 4, and 2 tokens


def _start(engine: Any, request: Any, **start: Any) -> Any:
    reservation = engine.reserve(request)
    engine.start(request.request_id, **start)
    return reservation


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33])
@pytest.mark.parametrize("budget", [1, 3, 4, 5, 16, 100])
def test_output_does_not_depend_on_chunks(
    length: int, budget: int, make_engine: Make, make_request: Make, finish: Make, tokens: Make
) -> None:
    engine = make_engine(budget=budget, running=1)
    prompt = [(7 * i) % 90 + 1 for i in range(length)]
    _start(engine, make_request("a", prompt, max_tokens=10))
    events = finish(engine)["a"]
    assert tokens(events) == FakeModel(context_window=256).generate(prompt, 10)
    assert events[-1].finish_reason is FinishReason.LENGTH
    assert events[-1].num_computed_tokens == length + 9
    assert [e.token_ids for e in events[: -(-length // budget) - 1]] == [()] * (
        -(-length // budget) - 1
    )


def test_a_ragged_batch_gives_each_what_it_gets_alone(
    make_engine: Make, make_request: Make, finish: Make, tokens: Make
) -> None:
    engine = make_engine(budget=11, running=5, num_blocks=200)
    prompts = {str(i): [(5 * i + j) % 90 + 1 for j in range(1 + 3 * i)] for i in range(12)}
    for name, prompt in prompts.items():
        _start(engine, make_request(name, prompt, max_tokens=1 + len(prompt) % 7))
    events = finish(engine)
    for name, prompt in prompts.items():
        expected = FakeModel(context_window=800).generate(prompt, 1 + len(prompt) % 7)
        assert tokens(events[name]) == expected, name
    assert engine.stats().num_referenced_blocks == 0


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 12, 13])
def test_a_second_prompt_computes_what_follows_the_last_full_block_before_its_end(
    length: int, make_engine: Make, make_request: Make, finish: Make, tokens: Make
) -> None:
    engine = make_engine()
    prompt = list(range(1, length + 1))
    _start(engine, make_request("first", prompt, max_tokens=3))
    first = tokens(finish(engine)["first"])
    before = engine.stats().num_computed_tokens
    reservation = _start(engine, make_request("second", prompt, max_tokens=3))
    assert reservation.num_local_tokens == (length - 1) // 4 * 4
    assert tokens(finish(engine)["second"]) == first
    computed = engine.stats().num_computed_tokens - before
    assert computed == length - (length - 1) // 4 * 4 + 2
    assert engine.stats().num_local_prefix_tokens == (length - 1) // 4 * 4


def test_roots_do_not_share(make_engine: Make, make_request: Make, finish: Make) -> None:
    engine = make_engine()
    _start(engine, make_request("a", PROMPT, root=b"tenant 1"))
    finish(engine)
    assert engine.reserve(make_request("b", PROMPT, root=b"tenant 2")).num_local_tokens == 0
    assert engine.reserve(make_request("c", PROMPT, root=b"tenant 1")).num_local_tokens == 12


def test_equal_prompts_in_flight_keep_their_own_blocks(
    make_engine: Make, make_request: Make, finish: Make, tokens: Make
) -> None:
    """The second commit of a hash keeps the first mapping."""
    engine = make_engine()
    one, two = (_start(engine, make_request(name, PROMPT)) for name in "ab")
    assert not set(one.block_ids) & set(two.block_ids)
    events = finish(engine)
    assert tokens(events["a"]) == tokens(events["b"])
    third = engine.reserve(make_request("c", PROMPT))
    assert third.block_ids[:3] == one.block_ids[:3]


def test_filled_blocks_are_named_once_in_order_with_their_hashes(
    make_engine: Make, make_request: Make, finish: Make
) -> None:
    engine = make_engine(budget=5, running=1)
    reservation = _start(engine, make_request("a", PROMPT, max_tokens=8))
    events = finish(engine)["a"]
    filled = [block for event in events for block in event.filled]
    assert [block.index for block in filled] == [0, 1, 2, 3, 4]
    assert tuple(block.block_id for block in filled) == reservation.block_ids[:5]
    assert tuple(block.chain_hash for block in filled[:3]) == reservation.chain_hashes
    for event in events:
        assert all(4 * (block.index + 1) <= event.num_computed_tokens for block in event.filled)


def test_reservation_covers_all_that_is_ever_computed(
    make_engine: Make, make_request: Make
) -> None:
    engine = make_engine()
    assert len(engine.reserve(make_request("a", PROMPT, max_tokens=3)).block_ids) == 4
    assert len(engine.reserve(make_request("b", PROMPT, max_tokens=4)).block_ids) == 5
    held = engine.reserve(make_request("c", PROMPT, max_tokens=100, hold_after=1))
    assert len(held.block_ids) == 4


# -- the end --


def test_eos_ends_a_request_and_is_reported(
    make_engine: Make, make_request: Make, finish: Make
) -> None:
    expected = FakeModel(context_window=256).generate(PROMPT, 8)
    engine = make_engine(eos_token_ids=(expected[4],))
    _start(engine, make_request("a", PROMPT, ignore_eos=False))
    last = finish(engine)["a"][-1]
    assert (last.finish_reason, last.stop_token_id) == (FinishReason.EOS, expected[4])
    assert last.token_ids == (expected[4],)


def test_ignored_eos_is_a_token_like_any_other(
    make_engine: Make, make_request: Make, finish: Make, tokens: Make
) -> None:
    expected = FakeModel(context_window=256).generate(PROMPT, 8)
    engine = make_engine(eos_token_ids=(expected[4],))
    _start(engine, make_request("a", PROMPT, ignore_eos=True))
    assert tokens(finish(engine)["a"]) == expected


@pytest.mark.parametrize("min_tokens", [0, 3, 4])
def test_stop_tokens_are_drawn_from_min_tokens_on(
    min_tokens: int, make_engine: Make, make_request: Make, finish: Make, tokens: Make
) -> None:
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
    _start(
        engine := make_engine(),
        make_request("a", PROMPT, stop_token_ids=stop, min_tokens=min_tokens),
    )
    events = finish(engine)["a"]
    assert tokens(events) == expected and len(expected) > min_tokens
    if expected[-1] in stop:
        assert events[-1].finish_reason is FinishReason.STOP_TOKEN
        assert events[-1].stop_token_id == expected[-1]


def test_the_window_ends_a_request(
    make_engine: Make, make_request: Make, finish: Make, tokens: Make
) -> None:
    engine = make_engine(context_window=20)
    _start(engine, make_request("a", PROMPT, max_tokens=1000))
    events = finish(engine)["a"]
    assert len(tokens(events)) == 6
    assert events[-1].finish_reason is FinishReason.LENGTH
    assert events[-1].stop_token_id is None


def test_a_prompt_that_fills_the_window_is_refused(make_engine: Make, make_request: Make) -> None:
    engine = make_engine(context_window=14)
    with pytest.raises(RequestTooLong, match="prompt_token_ids"):
        engine.reserve(make_request("a", PROMPT))


def test_no_blocks_takes_nothing_and_can_be_tried_again(
    make_engine: Make, make_request: Make
) -> None:
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
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("top_k", -1),
        ("min_p", 1.5),
        ("seed", -1),
        ("seed", 1 << 64),
        ("logprobs", 65),
    ],
)
def test_a_field_out_of_range_is_named(
    field: str, value: float, make_engine: Make, make_request: Make
) -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequest, match=field) as caught:
        engine.reserve(make_request("a", PROMPT, **{field: value}))
    assert caught.value.field == field
    assert engine.stats().num_free_blocks == 64


@pytest.mark.parametrize("prompt", [(), (-1,), (1, 97)])
def test_prompts_of_no_or_foreign_tokens_are_refused(
    prompt: tuple[int, ...], make_engine: Make, make_request: Make
) -> None:
    with pytest.raises(InvalidRequest, match="prompt_token_ids"):
        make_engine().reserve(make_request("a", prompt))


# -- hold --


def test_hold_keeps_the_blocks_until_release(
    make_engine: Make, make_request: Make, finish: Make, tokens: Make
) -> None:
    engine = make_engine()
    reservation = _start(engine, make_request("a", PROMPT, hold_after=1))
    events = finish(engine)["a"]
    assert len(tokens(events)) == 1 and events[-1].finish_reason is None
    assert engine.stats().num_holding == 1
    assert engine.stats().num_referenced_blocks == len(reservation.block_ids)
    engine.release("a")
    assert engine.stats().num_referenced_blocks == 0
    assert engine.stats().num_cached_blocks == 3
    with pytest.raises(UnknownRequest):
        engine.release("a")


def test_a_holding_request_that_finished_says_why_and_still_holds(
    make_engine: Make, make_request: Make, finish: Make
) -> None:
    engine = make_engine()
    _start(engine, make_request("a", PROMPT, hold_after=5, max_tokens=2))
    assert finish(engine)["a"][-1].finish_reason is FinishReason.LENGTH
    assert engine.stats().num_holding == 1
    engine.release("a")


# -- a handover: what prefill did is loaded, not computed --


def _hand_over(source: Any, target: Any, taken: Any, given: Any, num_tokens: int) -> None:
    for index in range(-(-num_tokens // 4)):
        block = source.kv.host_view[taken.block_ids[index]]
        target.kv.host_view[given.block_ids[index]] = block


@pytest.mark.parametrize("length", [1, 3, 4, 5, 14, 16, 17])
def test_a_handover_computes_no_prompt_token(
    length: int, make_engine: Make, make_request: Make, finish: Make, tokens: Make
) -> None:
    prefill, decode = make_engine(budget=5, running=1), make_engine()
    prompt = list(range(1, length + 1))
    given = decode.reserve(make_request("a", prompt, max_tokens=8))
    taken = _start(prefill, make_request("a", prompt, max_tokens=8, hold_after=1))
    first = tokens(finish(prefill)["a"])
    _hand_over(prefill, decode, taken, given, length)
    prefill.release("a")
    decode.start("a", num_loaded_tokens=length, outputs=[first])
    rest = tokens(finish(decode)["a"])
    assert first + rest == FakeModel(context_window=256).generate(prompt, 8)
    assert decode.stats().num_computed_tokens == 7
    again = decode.reserve(make_request("b", prompt))
    assert again.num_local_tokens == (length - 1) // 4 * 4  # loaded blocks are cached


@pytest.mark.parametrize("num_loaded", [0, 1, 4, 6, 13, 14])
def test_what_was_not_loaded_is_computed(
    num_loaded: int, make_engine: Make, make_request: Make, finish: Make, tokens: Make
) -> None:
    """A partial load, or nothing at all, gives the same tokens."""
    prefill, decode = make_engine(), make_engine()
    given = decode.reserve(make_request("a", PROMPT))
    taken = _start(prefill, make_request("a", PROMPT, hold_after=1))
    first = tokens(finish(prefill)["a"])
    _hand_over(prefill, decode, taken, given, num_loaded)
    decode.start("a", num_loaded_tokens=num_loaded, outputs=[first])
    assert first + tokens(finish(decode)["a"]) == FakeModel(context_window=256).generate(PROMPT, 8)
    assert decode.stats().num_computed_tokens == 14 - num_loaded + 7


def test_a_fully_loaded_prompt_without_output_computes_its_last_token(
    make_engine: Make, make_request: Make, finish: Make, tokens: Make
) -> None:
    """The last block is full and loaded, yet written once more: nobody may share it before."""
    prefill, other = make_engine(), make_engine()
    prompt = PROMPT[:12]
    taken = _start(prefill, make_request("a", prompt, hold_after=1))
    finish(prefill)
    given = other.reserve(make_request("a", prompt))
    _hand_over(prefill, other, taken, given, 12)
    other.start("a", num_loaded_tokens=12)
    peek = other.reserve(make_request("b", (*prompt, 1)))
    assert peek.num_local_tokens == 8
    events = finish(other)["a"]
    assert events[0].filled[0].index == 2
    assert tokens(events) == FakeModel(context_window=256).generate(prompt, 8)
    assert other.stats().num_computed_tokens == 8


def test_a_corrupt_load_is_seen_in_the_tokens(
    make_engine: Make, make_request: Make, finish: Make, tokens: Make
) -> None:
    """The fake can fail: this is what makes the tests above worth something."""
    decode = make_engine()
    decode.reserve(make_request("a", PROMPT))
    decode.start("a", num_loaded_tokens=14)
    assert tokens(finish(decode)["a"]) != FakeModel(context_window=256).generate(PROMPT, 8)


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
    start: dict[str, Any], field: str, make_engine: Make, make_request: Make
) -> None:
    engine = make_engine()
    engine.reserve(make_request("a", PROMPT))
    with pytest.raises(InvalidRequest, match=field):
        engine.start("a", **start)
    engine.start("a")


def test_calls_out_of_order_are_refused(make_engine: Make, make_request: Make) -> None:
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


def test_nan_logits_end_their_request_only_and_leave_nothing_behind(
    make_engine: Make, make_request: Make, finish: Make, tokens: Make
) -> None:
    engine = make_engine(poison=frozenset({50}))
    _start(engine, make_request("bad", (*range(1, 12), 50)))
    _start(engine, make_request("good", PROMPT))
    events = finish(engine)
    assert events["bad"][-1].error is not None and events["bad"][-1].token_ids == ()
    assert tokens(events["good"]) == FakeModel(context_window=256).generate(PROMPT, 8)
    assert engine.reserve(make_request("next", (*range(1, 12), 50))).num_local_tokens == 8
    # ... of the good one's prompt, which begins alike: the bad one's own blocks are not found
    assert engine.stats().num_referenced_blocks == 5


def test_a_failing_forward_leaves_every_request_as_it_was(
    make_engine: Make,
    make_request: Make,
    finish: Make,
    tokens: Make,
    monkeypatch: pytest.MonkeyPatch,
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
    assert tokens(finish(engine)["a"]) == FakeModel(context_window=256).generate(PROMPT, 8)


def test_logprobs_come_with_tokens(make_engine: Make, make_request: Make, finish: Make) -> None:
    engine = make_engine(budget=5, running=2)
    _start(engine, make_request("a", PROMPT, logprobs=2))
    _start(engine, make_request("b", PROMPT))
    events: dict[str, list[RequestOutput]] = finish(engine)
    for event in events["a"]:
        assert (event.logprobs is None) == (event.token_ids == ())
        for token_id, one in zip(event.token_ids, event.logprobs or (), strict=True):
            assert one.token_id == token_id == one.top[0][0]
    assert all(event.logprobs is None for event in events["b"])


def test_noise_is_that_of_the_place_which_the_token_takes(
    make_engine: Make, make_request: Make, finish: Make, tokens: Make, seed: int
) -> None:
    """A contract between workers: the first token of a prompt of n tokens is drawn at n."""
    engine = make_engine(budget=5, running=1)
    sampling = {"temperature": 0.7, "seed": seed, "sample_index": 3}
    _start(engine, make_request("a", PROMPT, **sampling))
    drawn = tokens(finish(engine)["a"])
    model = FakeModel(context_window=256)
    history = list(PROMPT)
    for token_id in drawn:
        key = torch.tensor([noise.row_key(seed, 3, len(history))])
        scores = model.logits(history) / 0.7 + noise.gumbel(key, torch.arange(97))
        assert token_id == int(scores.argmax())
        history.append(token_id)


def test_step_without_work_is_empty() -> None:
    model = FakeModel(context_window=256)
    engine = LLMEngine(EngineConfig(num_blocks=64), model)
    assert not engine.has_work()
    output = engine.step()
    assert output.events == () and output.num_scheduled_tokens == 0
    assert model.num_forwards == 0
