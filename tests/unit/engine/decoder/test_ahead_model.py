"""Launches ahead of the real decoder: tokens are those of its plain steps, over caches full of
NaN."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

import pytest
import torch
from transformers import Qwen3Config

from engine.batch import Batch, Span
from engine.decoder.ahead import make_ahead
from engine.decoder.decoder import Decoder
from engine.decoder.model import DecoderModel, kv_layout
from engine.decoder.shape import read_shape, rope_table
from engine.decoder.sources import random_weights
from engine.kv.memory import KvMemory
from engine.models.interface import DRAWN_BEFORE, DecodeRow
from engine.request import ModelInfo, Sampling
from engine.sampling import pipeline
from engine.sampling.row import Draw

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
BLOCK = 8
WINDOW = 128
NUM_BLOCKS = 200
MAX_ROWS = 6


def _model(device: str, dtype: torch.dtype, seed: int, *, is_exact: bool = False) -> DecoderModel:
    config = Qwen3Config(
        num_hidden_layers=3,  # a step's graph ends behind two, and another one begins
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=96,
        vocab_size=211,
        tie_word_embeddings=True,
        max_position_embeddings=WINDOW,
    )
    shape = read_shape(config)
    weights = random_weights(shape, dtype=dtype, device=torch.device(device), seed=seed)
    dtype_name = str(dtype).removeprefix("torch.")
    info = ModelInfo(
        model="random",
        model_type="qwen3",
        fingerprint="",
        tokenizer_digest="",
        dtype=dtype_name,
        context_window=WINDOW,
        vocab_size=shape.vocab_size,
        eos_token_ids=(),
        block_size=BLOCK,
        num_blocks=0,
        device=device,
        linear="",
        fused=(),
        num_parameters=0,
        weight_bytes=0,
    )
    return DecoderModel(
        Decoder(weights, rope_table(shape, WINDOW, torch.device(device)), is_exact=is_exact),
        info,
        kv_layout(shape, block_size=BLOCK, dtype=dtype_name),
        make_ahead=functools.partial(
            make_ahead, max_rows=MAX_ROWS, max_tokens=64, context_window=WINDOW
        ),
    )


class _Run:
    """Sequences on one memory."""

    def __init__(self, model: DecoderModel, prompts: list[list[int]], rng: random.Random) -> None:
        self.model = model
        memory = KvMemory(model.layout, NUM_BLOCKS, model.info.device)
        memory.cache.fill_(torch.nan)
        model.attach(memory)
        order = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
        each = WINDOW // BLOCK
        self.tables = [tuple(order[at * each : (at + 1) * each]) for at in range(len(prompts))]
        self.tokens = [list(prompt) for prompt in prompts]

    def blocks(self, at: int, num_tokens: int) -> tuple[int, ...]:
        return self.tables[at][: -(-num_tokens // BLOCK)]

    def plain(self, indices: list[int], samplings: list[Sampling], num_tokens: int | None) -> None:
        """A plain step: of one token each, or of the whole prompts."""
        spans, token_ids, ends, draws = [], [], [], []
        for at in indices:
            own = self.tokens[at]
            start = 0 if num_tokens is None else len(own) - num_tokens
            spans.append(Span(start, len(own) - start, self.blocks(at, len(own))))
            token_ids += own[start:]
            ends.append(len(token_ids) - 1)
            draws.append(Draw(samplings[at], len(own), at))
        logits = self.model.forward(Batch(tuple(token_ids), tuple(spans), tuple(ends)))
        for at, drawn in zip(indices, pipeline.draw(logits, draws), strict=True):
            self.tokens[at].append(drawn.token_id)


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_are_those_of_plain_steps(
    device: str, seed: int, scale: Callable[[int], int]
) -> None:
    """40 batches of up to six prompts, 30 tokens each, some leaving early and some joining late."""
    rng = random.Random(seed)
    model = _model(device, torch.float32, seed)
    for _ in range(scale(40)):
        prompts = [
            [rng.randrange(211) for _ in range(rng.randrange(1, 60))] for _ in range(MAX_ROWS)
        ]
        samplings = [
            Sampling(
                max_tokens=99,
                temperature=rng.choice([0.0, 0.7, 1.3]),
                top_k=rng.choice([0, 7]),
                top_p=rng.choice([1.0, 0.8]),
                min_p=rng.choice([0.0, 0.02]),
                seed=rng.randrange(1 << 64),
            )
            for _ in range(MAX_ROWS)
        ]
        lives = [(rng.randrange(0, 10), rng.randrange(15, 30)) for _ in range(MAX_ROWS)]
        everyone = list(range(MAX_ROWS))
        plain = _Run(model, prompts, rng)
        plain.plain(everyone, samplings, None)
        for _ in range(30):
            plain.plain(everyone, samplings, 1)
        ahead = _launched(model, prompts, samplings, lives, rng)
        for at, tokens in enumerate(ahead.tokens):
            assert tokens == plain.tokens[at][: len(tokens)]


def _launched(
    model: DecoderModel,
    prompts: list[list[int]],
    samplings: list[Sampling],
    lives: list[tuple[int, int]],
    rng: random.Random,
) -> _Run:
    """The same by launches: sequence i takes part in those from the first to the second of its two
    numbers."""
    run = _Run(model, prompts, rng)
    run.plain(list(range(len(prompts))), samplings, None)
    ahead = model.ahead
    assert ahead is not None
    ahead.warm_up()
    under_way = []
    for step in range(30):
        rows, indices = [], []
        for at, (first, last) in enumerate(lives):
            if not first <= step < last:
                continue
            is_in_flight = bool(under_way) and at in under_way[-1][1]
            position = len(run.tokens[at]) - 1 + is_in_flight
            token_id = DRAWN_BEFORE if is_in_flight else run.tokens[at][-1]
            draw = Draw(samplings[at], position + 1, at)
            blocks = run.blocks(at, position + 1)
            rows.append(DecodeRow((str(at), 0), token_id, position, blocks, draw))
            indices.append(at)
        if rows:
            rng.shuffle(rows)
            indices = [int(row.key[0]) for row in rows]
            under_way.append((ahead.launch(rows), indices))
        if under_way and (len(under_way) == 2 or not rows):
            _read(run, under_way.pop(0))
    for launched in under_way:
        _read(run, launched)
    return run


def _read(run: _Run, launched: tuple) -> None:  # type: ignore[type-arg]
    launch, indices = launched
    for at, drawn in zip(indices, run.model.ahead.read(launch), strict=True):
        assert drawn.error is None
        run.tokens[at].append(drawn.token_id)


@pytest.mark.parametrize("device", DEVICES)
def test_a_warm_up_leaves_the_cache_as_it_is(device: str, seed: int) -> None:
    model = _model(device, torch.bfloat16, seed)
    run = _Run(model, [[1]], random.Random(seed))
    assert model.ahead is not None
    model.ahead.warm_up()
    assert run.model._memory is not None
    assert run.model._memory.cache.isnan().all()
