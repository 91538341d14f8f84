"""Launches ahead of the real decoder: tokens are those of its plain steps, over caches full of
NaN."""

from __future__ import annotations

import dataclasses
import gc
import random
import weakref
from collections.abc import Callable

import pytest
import torch

from engine.config import EngineConfig
from engine.decoder import ahead as ahead_module
from engine.decoder.mixed_launch import warm_up_mixed
from engine.engine import LLMEngine
from engine.errors import IntegrityError, WrongState
from engine.models.interface import DRAWN_BEFORE, DecodeRow, MixedRow
from engine.models.llama import LlamaModel
from engine.request import Request, Sampling
from engine.sampling.metadata import SamplingRequest
from tests.harness.engines import hasher
from tests.unit.engine.decoder.small_decoder import (
    DEVICES,
    MAX_ROWS,
    NUM_BLOCKS,
    Run,
    random_sampling,
    small_model,
)


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_are_those_of_plain_steps(
    device: str, seed: int, scale: Callable[[int], int]
) -> None:
    """40 batches of up to six prompts, 30 tokens each, some leaving early and some joining late."""
    rng = random.Random(seed)
    model = small_model(device, torch.float32, seed)
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
        plain = Run(model, prompts, rng)
        plain.plain(everyone, samplings, None)
        for _ in range(30):
            plain.plain(everyone, samplings, 1)
        ahead = _launched(model, prompts, samplings, lives, rng)
        for at, tokens in enumerate(ahead.tokens):
            assert tokens == plain.tokens[at][: len(tokens)]


def _launched(
    model: LlamaModel,
    prompts: list[list[int]],
    samplings: list[Sampling],
    lives: list[tuple[int, int]],
    rng: random.Random,
) -> Run:
    """The same by launches: sequence i takes part in those from the first to the second of its two
    numbers."""
    run = Run(model, prompts, rng)
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
            draw = SamplingRequest(samplings[at], position + 1, at)
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


def _read(run: Run, launched: tuple) -> None:  # type: ignore[type-arg]
    launch, indices = launched
    for at, drawn in zip(indices, run.model.ahead.read(launch), strict=True):
        assert drawn.error is None
        run.tokens[at].append(drawn.token_id)


@pytest.mark.parametrize("device", DEVICES)
def test_a_warm_up_leaves_the_cache_as_it_is(device: str, seed: int) -> None:
    model = small_model(device, torch.bfloat16, seed)
    run = Run(model, [[1]], random.Random(seed))
    assert model.ahead is not None
    model.ahead.warm_up()
    assert run.model._memory is not None
    assert run.model._memory.cache.isnan().all()


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_of_mixed_launches_are_those_of_plain_steps(
    device: str, seed: int, scale: Callable[[int], int]
) -> None:
    """20 batches of six prompts that come at different times, in chunks of any size; launches of
    decodes alone are the others, and a token is taken from either kind."""
    rng = random.Random(f"mixed {seed}")
    model = small_model(device, torch.float32, seed)
    for _ in range(scale(20)):
        lengths = [50, *(rng.randrange(1, 50) for _ in range(MAX_ROWS - 1))]
        prompts = [[rng.randrange(211) for _ in range(length)] for length in lengths]
        samplings = [random_sampling(rng) for _ in range(MAX_ROWS)]
        begins = [0, *(rng.randrange(0, 12) for _ in range(MAX_ROWS - 1))]
        ahead, kinds = _mixed(model, prompts, samplings, begins, rng)
        assert kinds == {DecodeRow, MixedRow}
        everyone = list(range(MAX_ROWS))
        plain = Run(model, prompts, rng)
        plain.plain(everyone, samplings, None)
        nums = [len(own) - length for own, length in zip(ahead.tokens, lengths, strict=True)]
        for _ in range(max(nums) - 1):
            plain.plain(everyone, samplings, 1)
        assert min(nums) > 0
        for at, tokens in enumerate(ahead.tokens):
            assert tokens == plain.tokens[at][: len(tokens)]


def _mixed(
    model: LlamaModel,
    prompts: list[list[int]],
    samplings: list[Sampling],
    begins: list[int],
    rng: random.Random,
) -> tuple[Run, set[type]]:
    """The same by launches of both kinds; each is launched before the one before it is read."""
    run = Run(model, prompts, rng)
    ahead = model.ahead
    assert ahead is not None
    ahead.warm_up()
    num_launched, num_drawn = [0] * len(prompts), [0] * len(prompts)
    kinds: set[type] = set()
    under_way: list[tuple] = []  # type: ignore[type-arg]
    num_steps = num_decoding = 0
    while num_decoding < 8:
        num_decoding += min(num_drawn) > 0
        parts = []
        for at, begin in enumerate(begins):
            if num_steps < begin or (num_launched[at] and rng.random() < 0.05):
                continue
            num_known = len(prompts[at]) + num_drawn[at]
            if num_drawn[at]:
                num_tokens = 1
            else:
                num_tokens = rng.randint(1, num_known - num_launched[at])
            parts.append((at, num_tokens, num_launched[at] + num_tokens == num_known))
        is_mixed = any(num > 1 or not is_drawing for _, num, is_drawing in parts)
        rows: list = []  # type: ignore[type-arg]
        was_there = set() if not under_way else set(under_way[-1][1])
        for at, num_tokens, is_drawing in parts:
            start = num_launched[at]
            end = start + num_tokens
            known = run.tokens[at][start:end]
            if not known and at not in was_there:
                continue  # drawn by a launch that is not the last one
            draw = SamplingRequest(samplings[at], end, at) if is_drawing else None
            token_ids = tuple(known) or (DRAWN_BEFORE,)
            key, blocks = (str(at), 0), run.blocks(at, end)
            if is_mixed:
                rows.append(MixedRow(key, token_ids, start, blocks, draw))
            elif draw is not None:
                rows.append(DecodeRow(key, token_ids[0], start, blocks, draw))
            num_launched[at] = end
            num_drawn[at] += is_drawing
        if rows:
            rng.shuffle(rows)
            launch = ahead.launch_mixed(rows) if is_mixed else ahead.launch(rows)
            drawing = [int(row.key[0]) for row in rows if row.draw is not None]
            under_way.append((launch, drawing))
            kinds.add(type(rows[0]))
        if under_way and (len(under_way) == 2 or not rows):
            _read(run, under_way.pop(0))
        num_steps += 1
    for launched in under_way:
        _read(run, launched)
    return run, kinds


@pytest.mark.parametrize("device", DEVICES)
def test_an_engine_that_launches_prompts_draws_what_one_that_does_not(
    device: str, seed: int, scale: Callable[[int], int]
) -> None:
    """20 workloads of five requests that come at different times."""
    rng = random.Random(f"engine {seed}")
    for _ in range(scale(20)):
        requests = [
            Request(
                f"r{index}",
                tuple(rng.randrange(211) for _ in range(rng.randrange(1, 60) if index else 59)),
                dataclasses.replace(random_sampling(rng), max_tokens=rng.randrange(1, 12)),
                hasher(),
            )
            for index in range(5)
        ]
        comes = [0, *(rng.randrange(6) for _ in range(4))]
        found = []
        for overlap in (False, True):
            model = small_model(device, torch.float32, seed)
            config = EngineConfig(
                num_blocks=NUM_BLOCKS,
                max_num_running=MAX_ROWS,
                max_num_tokens_per_step=24,
                overlap=overlap,
                overlap_prompts=True,
            )
            engine = LLMEngine(config, model)
            engine.warm_up()
            kinds = _noted(model)
            tokens: dict[str, list[int]] = {}
            step = 0
            while engine.has_work() or step <= max(comes):
                for request, at in zip(requests, comes, strict=True):
                    if at == step:
                        engine.submit(request)
                for event in engine.step().events:
                    tokens.setdefault(event.request_id, []).extend(event.token_ids)
                engine.check_integrity()
                step += 1
            assert bool(kinds) is overlap
            found.append(tokens)
        assert found[0] == found[1]


def _noted(model: LlamaModel) -> list[int]:
    """Takes the number of rows of each mixed launch."""
    ahead = model.ahead
    assert ahead is not None
    launch_mixed = ahead.launch_mixed
    noted: list[int] = []
    ahead.launch_mixed = lambda rows: noted.append(len(rows)) or launch_mixed(rows)  # type: ignore
    return noted


def test_mixed_launches_that_cannot_be(seed: int) -> None:
    rng = random.Random(seed)
    model = small_model("cpu", torch.float32, seed)
    run = Run(model, [[1, 2, 3], [4, 5]], rng)
    ahead = model.ahead
    assert ahead is not None and ahead.takes_prompts
    sampling = Sampling(max_tokens=9)

    def row(at: int, start: int, tokens: tuple[int, ...], *, draws: bool = True) -> MixedRow:
        end = start + len(tokens)
        draw = SamplingRequest(sampling, end, at) if draws else None
        return MixedRow((str(at), 0), tokens, start, run.blocks(at, end), draw)

    with pytest.raises(IntegrityError, match="drew none"):
        ahead.launch_mixed([row(0, 3, (DRAWN_BEFORE,)), row(1, 0, (4, 5))])
    first = ahead.launch_mixed([row(0, 0, (1, 2, 3)), row(1, 0, (4,), draws=False)])
    second = ahead.launch_mixed([row(0, 3, (DRAWN_BEFORE,)), row(1, 1, (5,))])
    with pytest.raises(WrongState, match="not read yet"):
        ahead.launch_mixed([row(0, 4, (DRAWN_BEFORE,))])
    with pytest.raises(WrongState, match="in order"):
        ahead.read(second)
    assert [len(ahead.read(one)) for one in (first, second)] == [1, 2]
    with pytest.raises(WrongState, match="0 rows"):
        ahead.launch_mixed([])
    third = ahead.launch_mixed([row(0, 4, (7, 7), draws=False), row(1, 2, (7,), draws=False)])
    with pytest.raises(IntegrityError, match="was not in it"):
        ahead.launch(
            [
                DecodeRow(
                    ("0", 0), DRAWN_BEFORE, 6, run.blocks(0, 7), SamplingRequest(sampling, 7, 0)
                )
            ]
        )
    assert ahead.read(third) == []


def test_what_launches_prompts_keeps_no_model_alive(seed: int) -> None:
    """Its weights go when the last one lets it go, not when the collector comes."""
    model = small_model("cpu", torch.float32, seed)
    run = Run(model, [[1, 2, 3]], random.Random(seed))
    ahead = model.ahead
    assert ahead is not None
    ahead.warm_up()
    draw = SamplingRequest(Sampling(max_tokens=9), 3, 0)
    row = MixedRow(("0", 0), (1, 2, 3), 0, run.blocks(0, 3), draw)
    ahead.read(ahead.launch_mixed([row]))
    model_alive = weakref.ref(model)
    gc.disable()
    try:
        del model, run
        assert model_alive() is None
    finally:
        gc.enable()
    with pytest.raises(WrongState, match="no prompts"):
        ahead.launch_mixed([row])


def test_a_warm_up_leaves_what_was_drawn(seed: int) -> None:
    drawn = torch.randint(-2, 300, (MAX_ROWS,), generator=torch.Generator().manual_seed(seed))
    last_drawn = drawn.int()
    warm_up_mixed(last_drawn, 1000, vocab_size=211)
    assert last_drawn.tolist() == drawn.tolist()


def test_where_no_prompts_are_launched_no_memory_is_taken_for_them(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(
        ahead_module, "warm_up_mixed", lambda last, num_words, **_: taken.append(num_words)
    )
    for launches_prompts in (False, True):
        model = small_model("cpu", torch.float32, seed, launches_prompts=launches_prompts)
        run = Run(model, [[1, 2, 3]], random.Random(seed))
        ahead = model.ahead
        assert ahead is not None and ahead.takes_prompts is launches_prompts
        ahead.warm_up()
        assert len(taken) == launches_prompts
    row = MixedRow(("0", 0), (1, 2, 3), 0, run.blocks(0, 3), None)
    ahead.read(ahead.launch_mixed([row]))
    none = small_model("cpu", torch.float32, seed, launches_prompts=False)
    Run(none, [[1, 2, 3]], random.Random(seed))
    assert none.ahead is not None
    with pytest.raises(WrongState, match="no prompts"):
        none.ahead.launch_mixed([row])
