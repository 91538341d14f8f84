"""Guesses over a quantized KV cache: tokens and bytes are those of plain decoding over the same
cache. (In random workloads: test_manager.py; on real attention: tests/parity.)"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.batch import Batch
from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.request import Request
from engine.speculation.config import SpeculationConfig
from tests.harness.engines import all_events
from tests.harness.quantized_fake import QuantizedFake
from tests.harness.workloads import VOCAB, WINDOW, Bench, undisturbed
from tests.unit.engine.speculation.test_manager import (
    Expected,
    KnowsTheAnswers,
    Right,
    Same,
    _counts,
)

SIZES: dict[str, Any] = {"context_window": WINDOW, "block_size": 4}


def _expected(request: Request, scale: str = "block", size: int = 4) -> Expected:
    fields = SIZES | {"block_size": size}
    model = QuantizedFake(scale, **fields)
    return undisturbed([request], Bench(make_model=lambda: model, size=size))


def test_the_fake_tells_what_is_quantized_from_what_is_not(
    make_request: Callable[..., Request],
) -> None:
    """Its tokens depend on where blocks end, but on no kind of scale."""
    request = make_request("r", range(1, 21), max_tokens=12)
    by_block = _expected(request)
    assert by_block == _expected(request, "tensor") == _expected(request, "token_head")
    assert by_block != _expected(request, size=16)


@pytest.mark.parametrize("length", [1, 3, 5])
def test_an_accepted_run_ends_anywhere_in_a_block(
    length: int, make_request: Callable[..., Request]
) -> None:
    """All that is guessed is right, and goes over a border between blocks, or several: a block that
    guesses fill is offered to others at once, and is what plain decoding makes of it."""

    request = make_request("r", [1, 2, 3], max_tokens=40)
    expected = _expected(request)
    speculation = SpeculationConfig(always=True, max_num_nodes=2 * length)
    proposer = Right(random.Random(0), expected, VOCAB)
    proposer.length = 2 * length
    config = EngineConfig(num_blocks=40, speculation=speculation)
    engine = LLMEngine(config, QuantizedFake("block", **SIZES), proposers=[proposer])
    plain = LLMEngine(EngineConfig(num_blocks=40), QuantizedFake("block", **SIZES))
    content: list[list[bytes]] = []
    for one in (engine, plain):
        one.submit(request)
        filled: list[bytes] = []
        token_ids: list[int] = []
        while one.has_work():
            num_kept = one.metrics().num_kept_tokens
            events = one.step().events
            is_moved = one.metrics().num_kept_tokens > num_kept
            assert one.is_device_behind or not is_moved, "or blocks are read before they are made"
            for event in events:
                token_ids += event.token_ids
                # As they are when they are told: others may read them from now on.
                filled += [one.kv.host_view[block.block_id].tobytes() for block in event.filled]
            one.check_integrity()
        assert tuple(token_ids) == expected["r"][0][0]
        content.append(filled)
    assert content[0] == content[1] and len(content[0]) == 10
    guessed, kept = _counts(engine)
    assert guessed == kept >= 20


def test_a_guess_that_is_no_number_costs_no_token(make_request: Callable[..., Request]) -> None:
    """The step is computed again without guesses, whatever block its token fills."""

    class Poisoned(QuantizedFake):
        def forward(self, batch: Batch) -> torch.Tensor:
            logits = super().forward(batch)
            if any(span.branches for span in batch.spans):
                logits[:] = float("nan")
            return logits

    for length in range(1, 5):  # the prompt: then a first decode at any place of a block
        request = make_request("r", range(1, 1 + length), max_tokens=8)
        expected = _expected(request)
        config = EngineConfig(num_blocks=40, speculation=SpeculationConfig(always=True))
        engine = LLMEngine(config, Poisoned("block", **SIZES), proposers=[Same(1, 2, 3)])
        engine.submit(request)
        token_ids: list[int] = []
        for event in all_events(engine):
            assert event.error is None
            token_ids += event.token_ids
        assert tuple(token_ids) == expected["r"][0][0]
        assert _counts(engine)[0] > 0


def test_logits_that_are_no_numbers_end_a_request_that_there_was_no_room_to_guess_for(
    make_request: Callable[..., Request],
) -> None:
    """Its draws are tried although none is computed; its token fills a block, and there is nothing
    to compute again without."""
    request = make_request("r", [1, 2, 3], max_tokens=8, temperature=1.0)
    config = EngineConfig(
        num_blocks=WINDOW // 4,
        preemption="recompute",
        speculation=SpeculationConfig(always=True, acceptance="multi_step"),
    )
    model = QuantizedFake("block", **SIZES)
    engine = LLMEngine(config, model, proposers=[Same(1, 2, 3)])
    engine.reserve(make_request("other", range(1, WINDOW - 4)))  # all blocks but one
    engine.submit(request)
    (first,) = engine.step().events
    assert len(first.token_ids) == 1
    model.poison = frozenset(range(VOCAB))
    (second,) = engine.step().events
    assert second.error is not None and second.is_request_over
    engine.check_integrity()
    engine.abort("other")


@pytest.mark.parametrize("guesses", [False, True])
def test_a_step_that_fails_when_all_is_computed_is_computed_again(
    guesses: bool, make_request: Callable[..., Request]
) -> None:
    """Every other one: also those that fill a block."""

    class Failing(QuantizedFake):
        def forward(self, batch: Batch) -> torch.Tensor:
            logits = super().forward(batch)
            if self.num_forwards % 2:
                raise RuntimeError("the device is gone for a moment")
            return logits

    request = make_request("r", range(1, 8), max_tokens=20)
    expected = _expected(request)
    failing = Failing("block", **SIZES)
    proposer = KnowsTheAnswers(random.Random(1), expected, VOCAB)
    config = EngineConfig(
        num_blocks=40,
        max_num_tokens_per_step=5,
        max_num_running=4,
        speculation=SpeculationConfig(always=True),
    )
    engine = LLMEngine(config, failing, proposers=[proposer] if guesses else [])
    engine.submit(request)
    token_ids: list[int] = []
    num_failures = 0
    while engine.has_work():
        try:
            events = engine.step().events
        except RuntimeError:
            num_failures += 1
            assert num_failures < 100
            continue
        finally:
            engine.check_integrity()
        for event in events:
            token_ids += event.token_ids
    assert tuple(token_ids) == expected["r"][0][0]
    assert num_failures > 2
