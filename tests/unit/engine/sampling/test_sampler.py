"""The whole sampler: tokens against a slow reference that takes no short cut, its order, and
that neither errors nor neighbours reach into another row."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from baton_kernels import noise
from baton_kernels import sampling as kernels
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import EmptySupport, InvalidLogits
from engine.request import Sampling
from engine.sampling.logprobs import rows_per_pass
from engine.sampling.metadata import SamplerOutput, SamplingRequest
from tests.conftest import LONG
from tests.unit.engine.sampling.reference import (
    VOCAB_SIZE,
    batch,
    make_draw,
    make_logits,
    processed,
    rows_of_batches,
    sample,
)

EXAMPLES = 1000 if LONG else 50


def _draw(position: int = 5, **fields: Any) -> SamplingRequest:
    return SamplingRequest(Sampling(**({"max_tokens": 1} | fields)), position)


def _reference_support(logits: torch.Tensor, sampling: Sampling) -> set[int]:
    """Filters by sorting everything, in double precision."""
    scaled = logits.double() / sampling.temperature
    order = torch.sort(scaled, descending=True, stable=True).indices.tolist()
    kept = order
    if sampling.top_k:
        kept = kept[: sampling.top_k]
    if sampling.top_p < 1.0:
        mass = torch.softmax(scaled[kept], dim=0)
        count = int((mass.cumsum(0) < sampling.top_p).sum()) + 1
        kept = kept[:count]
    if sampling.min_p:
        best = float(scaled[order[0]])
        kept = [i for i in kept if math.exp(float(scaled[i]) - best) >= sampling.min_p]
    return set(kept)


def _reference_token(logits: torch.Tensor, draw: SamplingRequest) -> int:
    """argmax over the whole support, noise for every token."""
    one = draw.sampling
    keys = torch.tensor([noise.row_key(one.seed, one.sample_index, draw.position)])
    scores = (logits.float() - logits.float().max()) / one.temperature
    scores = scores + noise.gumbel(keys, torch.arange(logits.shape[0]))
    support = _reference_support(logits, one)
    return max(sorted(support), key=lambda token_id: float(scores[token_id]))


FILTERS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 5.0},
    {"temperature": 1e-6},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 2.0, "top_k": 5000},
    {"temperature": 1.0, "top_k": 2000},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 3.0, "top_p": 0.999},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.3, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 2.0, "top_k": 1500, "top_p": 0.9},
]


@pytest.mark.parametrize("fields", FILTERS)
@pytest.mark.parametrize("spread", [0.01, 3.0, 30.0])
def test_a_draw_is_the_argmax_over_the_whole_support(
    fields: dict[str, Any], spread: float, seed: int
) -> None:
    """Pruning by what the noise can be must never change a result."""
    generator = torch.Generator().manual_seed(seed)
    num_rows = 40 if LONG else 12
    logits = torch.randn(num_rows, 3000, generator=generator) * spread
    draws = [_draw(seed=seed + row, position=row, **fields) for row in range(num_rows)]
    drawn = sample(logits, draws)
    for row, one in enumerate(drawn):
        assert one.error is None
        assert one.token_id == _reference_token(logits[row], draws[row])


def test_filters_of_all_kinds_in_one_batch(seed: int) -> None:
    """Rows share sorts; each must get its own result."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(FILTERS) * 3, 3000, generator=generator)
    draws = [_draw(seed=seed, position=row, **FILTERS[row % len(FILTERS)]) for row in range(45)]
    drawn = sample(logits, draws)
    assert [one.token_id for one in drawn] == [
        _reference_token(logits[row], draws[row]) for row in range(45)
    ]


def test_every_way_to_find_the_winner_finds_it(
    seed: int, scale: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise for all candidates, bits for the candidates, bits for all tokens, in small blocks and
    large."""
    ways = [
        {"_MANY": 10**9},
        {"_MANY": 0, "_GRID_SHARE": 2.0, "_BLOCK": 100},
        {"_MANY": 0, "_GRID_SHARE": 2.0},
        {"_MANY": 0, "_GRID_SHARE": 0.0, "_BLOCK": 1000},
        {"_MANY": 0, "_GRID_SHARE": 0.0},
    ]
    for number in range(scale(100)):
        generator = torch.Generator().manual_seed(seed + number)
        spread = [0.0, 0.1, 2.0, 9.0][number % 4]
        logits = torch.randn(15, 700, generator=generator) * spread
        logits[torch.rand(15, 700, generator=generator) < 0.3] = -math.inf
        draws = [_draw(seed=seed, position=row, **FILTERS[row]) for row in range(15)]
        found = []
        for way in ways:
            for name, value in way.items():
                monkeypatch.setattr(kernels, name, value)
            found.append([one.token_id for one in sample(logits, draws)])
            monkeypatch.undo()
        assert all(token_ids == found[0] for token_ids in found)


PINNED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.2},
    {"temperature": 3.0, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 2.0, "min_p": 0.05},
    {"temperature": 1.3, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.7, "top_p": 0.999, "seed": 2**64 - 1, "sample_index": 3},
]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (
            torch.float32,
            {
                0: [1822, 829, 1162, 1597, 258, 1845, 1871, 489],
                1: [1822, 303, 920, 1614, 432, 1199, 372, 539],
                600: [1822, 1187, 838, 1688, 256, 838, 684, 575],
                131071: [1822, 922, 1993, 423, 599, 374, 1908, 1014],
            },
        ),
        (
            torch.bfloat16,
            {
                0: [490, 829, 1162, 1597, 258, 1845, 535, 489],
                1: [490, 303, 920, 1614, 432, 1199, 372, 539],
                600: [490, 1187, 838, 1688, 256, 838, 684, 575],
                131071: [490, 922, 1993, 423, 599, 374, 1908, 1014],
            },
        ),
    ],
)
def test_pinned_draws_never_change(dtype: torch.dtype, expected: dict[int, list[int]]) -> None:
    """By the first version of the sampler, before there were processors: recorded requests must
    replay."""
    words = noise.words(torch.arange(8)[:, None], torch.arange(2000)[None])
    logits = (noise.uniform(words) * 12.0).round(decimals=3).to(dtype)
    for position, token_ids in expected.items():
        draws = [
            SamplingRequest(
                Sampling(**({"max_tokens": 1, "seed": 77} | fields)),
                position,
                sample_index=fields.get("sample_index", 0),
            )
            for fields in PINNED
        ]
        assert [one.token_id for one in sample(logits, draws)] == token_ids


# -- rows and their neighbours


@settings(max_examples=EXAMPLES)
@given(
    rows=rows_of_batches,
    logits_seed=st.integers(0, 10**6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    data=st.data(),
)
def test_a_row_does_not_depend_on_its_batch(
    rows: list[Any], logits_seed: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    """Equal to the last bit alone, in the batch, and in the batch in another order."""
    draws = batch(rows)
    logits = make_logits(logits_seed, len(draws), VOCAB_SIZE, dtype)
    order = data.draw(st.permutations(range(len(draws))))
    together = [_plain(one) for one in sample(logits, draws)]
    shuffled = sample(logits[order], [draws[row] for row in order])
    assert [_plain(one) for one in shuffled] == [together[row] for row in order]
    for row, one in enumerate(draws):
        assert _plain(sample(logits[row : row + 1], [one])[0]) == together[row]


@settings(max_examples=EXAMPLES)
@given(rows=rows_of_batches, logits_seed=st.integers(0, 10**6))
def test_every_combination_is_what_the_slow_reference_says(
    rows: list[Any], logits_seed: int
) -> None:
    """Steps 1 to 9 to the last bit; the draw is checked by the noise it must have used."""
    draws = batch(rows)
    logits = make_logits(logits_seed, len(draws), VOCAB_SIZE, torch.float32)
    drawn = sample(logits, draws)
    for (_, prompt, output, _, _), row, one, got in zip(rows, logits, draws, drawn, strict=True):
        wanted = processed(row, one, prompt, output)
        if not torch.isfinite(row).any():
            assert isinstance(got.error, InvalidLogits)
        elif not torch.isfinite(wanted).any():
            assert isinstance(got.error, EmptySupport) and got.token_id == -1
        elif one.sampling.temperature == 0.0:
            assert got.error is None and got.token_id == int(wanted.argmax())
        else:
            assert got.error is None
            _check_draw(wanted, one, got)


def _check_draw(wanted: torch.Tensor, draw: SamplingRequest, got: SamplerOutput) -> None:
    one = draw.sampling
    keys = torch.tensor([noise.row_key(one.seed, one.sample_index, draw.position)])
    scaled = (wanted - wanted.max()) / one.temperature
    scores = scaled + noise.gumbel(keys, torch.arange(len(wanted)))
    better = (scores > scores[got.token_id]).nonzero()[:, 0].tolist()
    # Whoever would have won is out: by a filter, of which the token drawn is not out.
    edge = float(scaled[got.token_id])
    assert all(float(scaled[token_id]) < edge for token_id in better)
    assert not better or one.top_k or one.top_p < 1.0 or one.min_p


def _plain(drawn: SamplerOutput) -> tuple[Any, ...]:
    """Comparable: errors are equal if they say the same."""
    return (drawn.token_id, drawn.logprobs, drawn.trace, repr(drawn.error))


def test_groups_of_rows_that_are_worked_on_apart_give_the_same(seed: int) -> None:
    """A large batch goes through in several passes."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(30, 100_000, generator=generator) * 3
    assert rows_per_pass(logits) == 10
    fields: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "trace": True},
        {"repetition_penalty": 1.5, "logprobs": 3},
        {"temperature": 2.0, "top_p": 0.8, "frequency_penalty": 1.0},
        {"allowed_token_ids": frozenset(range(0, 500, 7)), "trace": True},
    ]
    draws = [make_draw((3, 4), (5, row), seed=row, **fields[row % 5]) for row in range(30)]
    for own in (logits, logits.bfloat16()):
        together = sample(own, draws)
        alone = [sample(own[row : row + 1], draws[row : row + 1])[0] for row in range(30)]
        assert [_plain(one) for one in together] == [_plain(one) for one in alone]


def test_the_callers_logits_stay_as_they_are() -> None:
    logits = torch.randn(3, 50)
    before = logits.clone()
    sample(
        logits,
        [
            make_draw((1, 2), (3,), repetition_penalty=2.0, allowed_token_ids=frozenset({4, 5})),
            make_draw(temperature=1.0, top_p=0.5),
            make_draw(logit_bias=((4, 100.0),), trace=True),
        ],
    )
    assert torch.equal(logits, before)


# -- errors of one row


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_fail_their_row_only(bad: float, temperature: float) -> None:
    logits = torch.randn(3, 50)
    logits[1, 20] = bad
    drawn = sample(logits, [_draw(temperature=temperature)] * 3)
    assert isinstance(drawn[1].error, InvalidLogits)
    assert drawn[0].error is None and drawn[2].error is None


def test_logits_without_a_finite_one_are_the_models_fault() -> None:
    drawn = sample(torch.full((1, 9), -math.inf), [_draw(temperature=1.0)])
    assert isinstance(drawn[0].error, InvalidLogits)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_an_empty_support_names_what_emptied_it(temperature: float) -> None:
    """And touches no neighbour, sampled or greedy."""
    logits = torch.randn(1, 50).expand(3, -1)
    fields: dict[str, Any] = {"temperature": temperature, "logprobs": 1, "trace": True}
    calm = make_draw((1, 2), **fields)
    empty = make_draw(
        (1, 2),
        (7,),
        ends=(9,),
        min_tokens=4,
        allowed_token_ids=frozenset({8, 9}),
        bad_words=((7, 8),),
        **fields,
    )
    drawn = sample(logits, [calm, empty, calm])
    error = drawn[1].error
    assert isinstance(error, EmptySupport)
    assert error.processors == ("allowed_token_ids=2 tokens", "bad_words=1 words", "min_tokens=4")
    assert error.position == 3 and "bad_words=1 words" in str(error)
    assert drawn[1].token_id == -1 and drawn[1].logprobs is None and drawn[1].trace is None
    assert drawn[0] == drawn[2] == sample(logits[:1], [calm])[0]
    assert drawn[0].error is None


def test_a_penalty_that_leaves_float32_fails_its_row_only() -> None:
    logits = torch.full((2, 9), 1.0)
    logits[:, 3] = 3e38
    loud = make_draw((3,), repetition_penalty=1e-6)
    drawn = sample(logits, [loud, make_draw((3,))])
    assert isinstance(drawn[0].error, InvalidLogits)
    assert "repetition_penalty=1e-06" in str(drawn[0].error)
    assert drawn[1].token_id == 3


def test_a_history_that_is_missing_is_never_ignored() -> None:
    with pytest.raises(AssertionError):
        sample(torch.randn(1, 9), [_draw(repetition_penalty=1.1)])


def test_an_id_without_a_logit_never_changes_another_row() -> None:
    """Rows lie behind one another: the id past the end of one is the first of the next."""
    draws = [make_draw((50,), (1,), repetition_penalty=2.0), make_draw()]
    with pytest.raises(AssertionError, match="without a logit"):
        sample(torch.randn(2, 50), draws)
    logits = torch.zeros(2, 50)
    logits[:, 0] = 1.0
    ends = make_draw(ends=(50, 51), min_tokens=3)
    assert [one.token_id for one in sample(logits, [ends, ends])] == [0, 0]


# -- what the order means


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_lowest_id_among_equals(dtype: torch.dtype) -> None:
    logits = torch.zeros(1, 300, dtype=dtype)
    logits[0, [37, 200, 290]] = 2.0
    assert sample(logits, [_draw()])[0].token_id == 37


def test_ties_at_the_edge_of_a_filter_stay_in(seed: int) -> None:
    """A filter must not depend on how a sort orders equal logits."""
    logits = torch.tensor([[1.0, 1.0, 1.0, 1.0, -9.0]])
    for fields in ({"top_k": 2}, {"top_p": 0.3}, {"min_p": 1.0}, {"top_k": 2, "top_p": 0.6}):
        draws = [_draw(seed=seed, position=i, temperature=1.0, **fields) for i in range(300)]
        seen = {d.token_id for d in sample(logits.expand(300, -1), draws)}
        assert seen == {0, 1, 2, 3}, fields  # one of four missing: 4 * 0.75^300 = 1e-37


def test_masked_tokens_are_never_drawn(seed: int) -> None:
    logits = torch.full((200, 30), -math.inf)
    logits[:, 4] = -3.0
    draws = [_draw(seed=seed, position=i, temperature=9.0) for i in range(200)]
    assert {d.token_id for d in sample(logits, draws)} == {4}


def test_truncation_shares_out_the_mass_that_masks_left(seed: int) -> None:
    """Masks first: the two best tokens are not allowed, and top-k takes the two best that are."""
    logits = torch.tensor([9.0, 8.0, 3.0, 2.9, 2.8])
    draws = [
        make_draw(
            (0,) * (i + 1),
            temperature=5.0,
            top_k=2,
            seed=seed,
            allowed_token_ids=frozenset({2, 3, 4}),
        )
        for i in range(200)
    ]
    drawn = sample(logits.expand(200, -1), draws)
    assert {one.token_id for one in drawn} == {2, 3}


def test_greedy_goes_through_penalties_and_masks() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0]])
    for fields, expected in (
        ({}, 0),
        ({"repetition_penalty": 2.0}, 1),
        ({"logit_bias": ((3, 10.0),)}, 3),
        ({"presence_penalty": 1.5}, 1),
        ({"bad_words": ((0,), (1,))}, 2),
        ({"allowed_token_ids": frozenset({2, 3})}, 2),
        ({"no_repeat_ngram": 1}, 1),
    ):
        draw = make_draw((0,), (0,), **fields)
        assert sample(logits, [draw])[0].token_id == expected, fields


def test_end_tokens_come_back_once_min_tokens_are_there() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0]])
    for num_output, expected in ((0, 1), (1, 1), (2, 0), (3, 0)):
        draw = make_draw((2,), (2,) * num_output, min_tokens=2, ends=(0, 77))
        assert sample(logits, [draw])[0].token_id == expected
    assert sample(logits, [make_draw(min_tokens=2)])[0].token_id == 0  # nothing ends it


def test_a_grammars_bits_and_allowed_ids_are_combined() -> None:
    """Bits past the vocabulary, and words past the highest allowed id, are of no account."""
    logits = torch.arange(70.0)[None]
    bitmask = torch.full((3,), -1, dtype=torch.int32)
    bitmask[2] = ~(1 << 5)  # not 69
    for fields, expected in (
        ({}, 68),
        ({"allowed_token_ids": frozenset({3, 69})}, 3),
        ({"allowed_token_ids": frozenset({3, 31})}, 31),
    ):
        draw = make_draw(bitmask=bitmask, **fields)
        assert sample(logits, [draw])[0].token_id == expected


def test_no_rows_is_no_draw() -> None:
    assert sample(torch.empty(0, 9), []) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_draws_the_same_tokens(seed: int) -> None:
    """Every path once: arithmetic is the same, so are tokens, supports and names."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(60, 5000, generator=generator) * 3
    logits[:, 17] = logits[:, 4000]  # ties
    logits[59, 3] = math.nan
    fields = [
        *FILTERS,
        {},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
        {"logit_bias": ((17, 30.0), (4000, 30.0)), "bad_words": ((17,), (5, 6))},
        {"allowed_token_ids": frozenset(range(0, 5000, 3)), "temperature": 1.0},
        {"allowed_token_ids": frozenset({9}), "bad_words": ((9,),)},
    ]
    draws = [
        make_draw((3, 4), (5, row), seed=row, trace=row % 2 == 0, logprobs=4, **fields[row % 20])
        for row in range(60)
    ]
    for dtype in (torch.float32, torch.bfloat16):
        on_cpu = sample(logits.to(dtype), draws)
        on_cuda = sample(logits.to(dtype).cuda(), draws)
        for a, b in zip(on_cpu, on_cuda, strict=True):
            assert a.token_id == b.token_id and repr(a.error) == repr(b.error)
            assert (a.trace is None) == (b.trace is None)
            if a.trace is not None and b.trace is not None:
                assert a.trace.support_size == b.trace.support_size
                assert a.trace.rng_key == b.trace.rng_key
            if a.logprobs is not None and b.logprobs is not None:
                assert a.logprobs.logprob == pytest.approx(b.logprobs.logprob, abs=1e-4)
