"""StepGraphs: a padded step gives the logits, and leaves the KV, of the step as it is."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.batch import Batch, TokenSpan
from engine.decoder.inputs import singles_first
from engine.decoder.mixed_launch import begin_mixed, place_of
from engine.decoder.step_graphs import StepGraphs, StepShape, max_chunk_tokens, step_shapes
from engine.kv.memory import KvMemory
from engine.models.llama import LlamaModel
from engine.request import Request, Sampling
from tests.harness.engines import hasher, recording_engine
from tests.unit.engine.decoder.small_decoder import BLOCK, DEVICES, WINDOW, small_model

NUM_BLOCKS = 400
MAX_SINGLES = 20
MAX_TOKENS = 150


def _steps(model: LlamaModel) -> StepGraphs:
    return StepGraphs(
        model.decoder.forward,
        max_singles=MAX_SINGLES,
        max_tokens=MAX_TOKENS,
        context_window=WINDOW,
        block_size=BLOCK,
        device=torch.device(model.info.device),
    )


def _random_batch(rng: random.Random, num_singles: int, num_chunks: int) -> Batch:
    order = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    spans, token_ids, draws = [], [], []
    for index in range(num_singles + num_chunks):
        num_tokens = 1 if index < num_singles else rng.randrange(2, 20)
        start = rng.choice([0, rng.randrange(WINDOW - num_tokens)])
        count = -(-(start + num_tokens) // BLOCK)
        blocks, order = tuple(order[:count]), order[count:]
        spans.append(TokenSpan(start, num_tokens, blocks))
    rng.shuffle(spans)
    for span in spans:
        token_ids += [rng.randrange(211) for _ in range(span.num_tokens)]
        if span.num_tokens == 1 or rng.random() < 0.7:
            draws.append(len(token_ids) - 1)
    return singles_first(Batch(tuple(token_ids), tuple(spans), tuple(draws)))


def _finite_memory(model: LlamaModel, batch: Batch, seed: int) -> KvMemory:
    """What sequences have cached is there; all the rest is NaN."""
    memory = KvMemory(model.layout, NUM_BLOCKS, model.info.device)
    memory.cache.fill_(torch.nan)
    generator = torch.Generator().manual_seed(seed)
    for span in batch.spans:
        for position in range(span.start):
            block = memory.cache[span.block_ids[position // BLOCK]]
            block[..., position % BLOCK, :] = torch.randn(
                block[..., 0, :].shape, generator=generator
            )
    return memory


def _taking(rng: random.Random, batch: Batch) -> tuple[Batch, torch.Tensor]:
    """The same step, of whose tokens some stand among [R] int32 that were drawn."""
    num = len(batch.token_ids)
    drawn = [rng.randrange(211) for _ in range(num)]
    token_ids = list(batch.token_ids)
    places = rng.sample(range(num), num)
    for at in rng.sample(range(num), num // 2):
        drawn[places[at]] = token_ids[at]
        token_ids[at] = place_of(places[at])
    taking = dataclasses.replace(batch, token_ids=tuple(token_ids))
    return taking, torch.tensor(drawn, dtype=torch.int32)


@pytest.mark.parametrize("device", DEVICES)
def test_a_padded_step_is_the_step(device: str, seed: int, scale: Callable[[int], int]) -> None:
    """200 steps of decodes, of chunks, and of both."""
    rng = random.Random(seed)
    model = small_model(device, torch.float32, seed)
    model.attach(KvMemory(model.layout, NUM_BLOCKS, device))
    steps = _steps(model)
    memory = None
    for index in range(scale(200)):
        num_singles, num_chunks = rng.choice([(1, 0), (17, 0), (0, 1), (0, 5), (9, 2), (3, 8)])
        batch = _random_batch(rng, num_singles, num_chunks)
        expected_memory = _finite_memory(model, batch, seed + index)
        if memory is None:  # graphs keep its address
            memory = KvMemory(model.layout, NUM_BLOCKS, device)
            model.attach(memory)
            steps.capture()
        memory.cache.copy_(expected_memory.cache)
        shape = steps.shape_of(batch)
        assert shape is not None
        model.attach(memory)
        taking, drawn = _taking(rng, batch)
        found = steps.run(shape, taking, drawn.to(device)).clone()
        model.attach(expected_memory)
        expected = model.forward(batch)
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            memory.cache, expected_memory.cache, rtol=1e-4, atol=1e-4, equal_nan=True
        )


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_takes_no_pinned_memory(
    device: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To take some makes the host wait, and zeros of another step's size are none of this one's:
    the largest step's memory is taken once."""
    rng = random.Random(seed)
    model = small_model(device, torch.float32, seed)
    memory = KvMemory(model.layout, NUM_BLOCKS, device)
    memory.cache.zero_()
    model.attach(memory)
    steps = _steps(model)
    steps.capture()
    steps.reserve()
    taken: list[object] = []
    for name in ("empty", "zeros"):
        make = getattr(torch, name)

        def noted(*args: Any, make: Any = make, **fields: Any) -> Any:
            if "pin_memory" in fields:
                taken.append(args)
            return make(*args, **fields)

        monkeypatch.setattr(torch, name, noted)
    for num_singles, num_chunks in ((17, 0), (9, 2), (0, 1), (17, 0)):
        batch = _random_batch(rng, num_singles, num_chunks)
        shape = steps.shape_of(batch)
        assert shape is not None
        steps.run(shape, batch)
    assert not taken


@pytest.mark.parametrize("device", DEVICES)
def test_a_capture_writes_no_kv(device: str, seed: int) -> None:
    model = small_model(device, torch.bfloat16, seed)
    memory = KvMemory(model.layout, NUM_BLOCKS, device)
    memory.cache.fill_(torch.nan)
    model.attach(memory)
    steps = _steps(model)
    captured = []
    steps.capture(on_captured=lambda: captured.append(1))
    assert len(captured) == len(steps.shapes)
    assert memory.cache.isnan().all()


def test_shapes() -> None:
    shapes = step_shapes(20, 150)
    assert shapes[0] == StepShape(20, 150)
    assert StepShape(0, 64) in shapes and StepShape(8, 0) in shapes
    assert StepShape(0, 0) not in shapes
    assert max(shape.num_singles for shape in shapes) == 20
    sizes = [shape.num_rows for shape in shapes]
    assert sizes == sorted(sizes, reverse=True)
    many = step_shapes(256, 2000)
    assert many[0] == StepShape(256, 2000)
    assert StepShape(8, 512) in many and StepShape(8, 768) not in many
    assert StepShape(128, 1024) in many and StepShape(128, 1536) not in many
    assert StepShape(0, 1536) in many
    assert step_shapes(256, 1 << 20)[0] == StepShape(256, 8192)
    assert len(set(many)) == len(many)


def test_large_models_have_shapes_of_few_tokens() -> None:
    assert max_chunk_tokens(7_000_000_000) == 1024
    assert max_chunk_tokens(440_000_000) > 8192
    assert max_chunk_tokens(400_000_000_000) == 0
    assert all(shape.num_chunks == 0 for shape in step_shapes(256, 0))


def test_what_fits_no_shape_is_not_taken(seed: int) -> None:
    model = small_model("cpu", torch.float32, seed)
    model.attach(KvMemory(model.layout, NUM_BLOCKS, "cpu"))
    steps = _steps(model)
    single, chunk = TokenSpan(3, 1, (1,)), TokenSpan(0, 4, (2,))

    def taken(*spans: TokenSpan) -> StepShape | None:
        num_tokens = sum(span.num_tokens for span in spans)
        return steps.shape_of(Batch((1,) * num_tokens, spans, (num_tokens - 1,)))

    assert taken(single) is None, "nothing is captured yet"
    steps.capture()
    assert taken(single) == (8, 0)
    assert taken(chunk) == (0, 64)
    assert taken(single, chunk) == (8, 64)
    half = TokenSpan(0, 75, tuple(range(10)))
    assert taken(*[single] * 20, half, half) == (20, 150)
    assert taken(*[single] * 21) is None
    assert taken(half, half._replace(num_tokens=76)) is None
    assert taken(*[chunk] * 16) == (0, 64)
    assert taken(*[chunk] * 17) is None
    assert taken(single._replace(adapter=1)) is None
    assert taken(single._replace(block_ids=())) is None, "a warm-up"
    assert taken(single._replace(block_ids=tuple(range(WINDOW // BLOCK + 1)))) is None


def test_the_first_chunk_of_a_long_prompt_has_a_shape() -> None:
    """It is launched with the blocks of its own tokens, however many the prompt has."""
    block_size, window = 16, 32768
    steps = StepGraphs(
        lambda inputs: torch.zeros(inputs.num_draws, 4),
        max_singles=4,
        max_tokens=64,
        context_window=window,
        block_size=block_size,
        device=torch.device("cpu"),
    )
    steps.capture()
    engine, ahead = recording_engine(
        takes_prompts=True,
        context_window=window,
        block_size=block_size,
        num_blocks=window // block_size,
        max_num_tokens_per_step=64,
    )
    prompt = tuple(1 + at % 90 for at in range(20_000))
    engine.submit(Request("a", prompt, Sampling(max_tokens=2), hasher()))
    engine.step()
    assert len(ahead.launched) == 2
    for rows in ahead.launched:
        batches: list[Batch] = []

        def forward(batch: Batch, drawn: torch.Tensor | None, into: list[Batch] = batches) -> Any:
            into.append(batch)
            return torch.zeros(len(batch.draw_indices), 4)

        begin_mixed(rows, {}, torch.zeros(4, dtype=torch.int32), forward, vocab_size=4)
        assert steps.shape_of(singles_first(batches[0])) == (0, 64)


def test_a_step_with_more_draws_than_a_shape_has_is_not_taken(seed: int) -> None:
    """Every token of a prompt is drawn from where its log probabilities are asked for."""
    model = small_model("cpu", torch.float32, seed)
    model.attach(KvMemory(model.layout, NUM_BLOCKS, "cpu"))
    steps = _steps(model)
    steps.capture()
    chunk = TokenSpan(0, 40, tuple(range(5)))

    def taken(num_draws: int) -> StepShape | None:
        return steps.shape_of(Batch((1,) * 40, (chunk,), tuple(range(num_draws))))

    assert taken(16) == (0, 64)
    assert taken(17) == (8, 64), "the smallest with room for its logits"
    assert taken(37) is None
