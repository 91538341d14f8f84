"""Launches wait for nothing: torch itself looks out for calls that do, on a GPU. What they draw is
looked at everywhere."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence

import pytest
import torch

from engine.decoder.row_table import Words
from engine.models.interface import DRAWN_BEFORE, DecodeRow, Launch, MixedRow
from engine.request import Sampling
from engine.sampling.metadata import SamplingRequest
from tests.unit.engine.cuda_waits import refused_waits
from tests.unit.engine.decoder.small_decoder import DEVICES, Run, random_sampling, small_model


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_mixed_launch_does_not_wait_for_the_device(seed: int) -> None:
    """torch itself looks out for calls that wait: two launches, by a graph and kernel by kernel,
    the second of which takes tokens of the first."""
    rng = random.Random(seed)
    model = small_model("cuda", torch.float32, seed)
    lengths = (20, 30, 9)
    prompts = [[rng.randrange(211) for _ in range(length)] for length in lengths]
    samplings = [random_sampling(rng) for _ in prompts]
    plain = Run(model, prompts, rng)
    plain.plain([0, 1, 2], samplings, None)
    plain.plain([0, 1], samplings, 1)
    for uses_graphs in (True, False):
        run = Run(model, prompts, rng)
        ahead = model.ahead
        assert ahead is not None
        ahead.warm_up()
        if not uses_graphs:
            model._graphs = None

        def row(at: int, start: int, tokens: list[int], *, draws: bool = True) -> MixedRow:
            end = start + len(tokens)
            draw = SamplingRequest(samplings[at], end, at) if draws else None
            return MixedRow((str(at), 0), tuple(tokens), start, run.blocks(at, end), draw)  # noqa: B023

        first = [
            row(0, 0, prompts[0]),
            row(1, 0, prompts[1]),
            row(2, 0, prompts[2][:4], draws=False),
        ]
        second = [row(0, 20, [DRAWN_BEFORE]), row(1, 30, [DRAWN_BEFORE]), row(2, 4, prompts[2][4:])]
        for launch in [ahead.launch_mixed(rows) for rows in (first, second)]:
            ahead.read(launch)  # whatever is compiled on the first use
        torch.cuda.synchronize()
        with refused_waits():
            with pytest.raises(RuntimeError):
                torch.zeros(1, device="cuda").cpu()  # it does look
            launches = [ahead.launch_mixed(rows) for rows in (first, second)]
        found = [[one.token_id for one in ahead.read(launch)] for launch in launches]
        own = plain.tokens
        assert found == [[own[0][20], own[1][30]], [own[0][21], own[1][31], own[2][9]]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_launch_of_decodes_does_not_wait_for_the_device(seed: int) -> None:
    """Greedy and sampled rows; the second launch takes tokens of the first. Captured, so that no
    capture is under way while torch looks."""
    rng = random.Random(seed)
    model = small_model("cuda", torch.float32, seed)
    prompts = [[rng.randrange(211) for _ in range(length)] for length in (20, 31, 9)]
    samplings = [Sampling(max_tokens=99), random_sampling(rng), random_sampling(rng)]
    plain = Run(model, prompts, rng)
    plain.plain([0, 1, 2], samplings, None)
    for _ in range(2):
        plain.plain([0, 1, 2], samplings, 1)
    run = Run(model, prompts, rng)
    run.plain([0, 1, 2], samplings, None)
    ahead = model.ahead
    assert ahead is not None
    ahead.warm_up()

    def rows(step: int) -> list[DecodeRow]:
        found = []
        for at, prompt in enumerate(prompts):
            position = len(prompt) + step
            draw = SamplingRequest(samplings[at], position + 1, at)
            token_id = DRAWN_BEFORE if step else run.tokens[at][-1]
            blocks = run.blocks(at, position + 1)
            found.append(DecodeRow((str(at), 0), token_id, position, blocks, draw))
        return found

    for launch in [ahead.launch(rows(step)) for step in (0, 1)]:
        ahead.read(launch)  # whatever is loaded on the first use
    torch.cuda.synchronize()
    with refused_waits():
        with pytest.raises(RuntimeError):
            torch.zeros(1, device="cuda").cpu()  # it does look
        launches = [ahead.launch(rows(step)) for step in (0, 1)]
    found = [[one.token_id for one in ahead.read(launch)] for launch in launches]
    assert found == [[own[-2] for own in plain.tokens], [own[-1] for own in plain.tokens]]


_LONG = (100, 112, 90, 97, 105, 118)
"""Tokens of prompts: 12 to 15 blocks. The first three, and the others, are launched together."""

Begin = Callable[[Run, Sequence[int], Sequence[Sampling]], list[Launch]]


def _begin_mixed(run: Run, indices: Sequence[int], samplings: Sequence[Sampling]) -> list[Launch]:
    """A launch of whole prompts, and one that takes their tokens."""
    ahead = run.model.ahead
    assert ahead is not None
    prompts, decodes = [], []
    for at in indices:
        key, length = (str(at), 0), _LONG[at]
        first, second = (SamplingRequest(samplings[at], length + step, at) for step in (0, 1))
        prompts.append(
            MixedRow(key, tuple(run.tokens[at][:length]), 0, run.blocks(at, length), first)
        )
        blocks = run.blocks(at, length + 1)
        decodes.append(DecodeRow(key, DRAWN_BEFORE, length, blocks, second))
    return [ahead.launch_mixed(prompts), ahead.launch(decodes)]


def _begin_decodes(run: Run, indices: Sequence[int], samplings: Sequence[Sampling]) -> list[Launch]:
    """Two launches behind the first token, which a plain step drew."""
    ahead = run.model.ahead
    assert ahead is not None
    launches = []
    for step in (0, 1):
        rows = []
        for at in indices:
            position = _LONG[at] + step
            token_id = DRAWN_BEFORE if step else run.tokens[at][position]
            blocks, draw = (
                run.blocks(at, position + 1),
                SamplingRequest(samplings[at], position + 1, at),
            )
            rows.append(DecodeRow((str(at), 0), token_id, position, blocks, draw))
        launches.append(ahead.launch(rows))
    return launches


@pytest.mark.parametrize("begin", [_begin_mixed, _begin_decodes])
@pytest.mark.parametrize("device", DEVICES)
def test_tables_that_an_image_has_no_room_for_are_brought_without_a_wait(
    device: str, begin: Begin, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has room for one row's. The first three rows are those on whose launches everything is
    loaded and compiled; the others' blocks are other ones, in the same places."""
    rng = random.Random(seed)
    model = small_model(device, torch.float32, seed, max_changes=16)
    prompts = [[rng.randrange(211) for _ in range(length)] for length in _LONG]
    samplings = [random_sampling(rng) for _ in prompts]
    plain = Run(model, prompts, rng)
    plain.plain(list(range(6)), samplings, None)
    for _ in range(2):
        plain.plain(list(range(6)), samplings, 1)
    run = Run(model, prompts, rng)
    if begin is _begin_decodes:
        run.plain(list(range(6)), samplings, None)
    ahead = model.ahead
    assert ahead is not None
    ahead.warm_up()
    for launch in begin(run, (0, 1, 2), samplings):
        ahead.read(launch)
    applied: list[int] = []
    apply = ahead._step.apply  # type: ignore[attr-defined]

    def counted(changes: Words) -> None:
        applied.append(len(changes))
        apply(changes)

    monkeypatch.setattr(ahead._step, "apply", counted)  # type: ignore[attr-defined]
    if device == "cuda":
        torch.cuda.synchronize()
    with refused_waits() if device == "cuda" else contextlib.nullcontext():
        launches = begin(run, (3, 4, 5), samplings)
    first = 0 if begin is _begin_mixed else 1
    for step, launch in enumerate(launches, first):
        found = [one.token_id for one in ahead.read(launch)]
        assert found == [plain.tokens[at][_LONG[at] + step] for at in (3, 4, 5)]
    assert applied and sum(applied) > 16
