"""The whole sampler: tokens against a slow reference that takes no short cut, its order, that
neither errors nor neighbours reach into another row, and that what the next step reads is there
without a wait; by each version of the kernels (tests/kernels compares CUDA's with the reference).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from baton_kernels import gumbel_noise
from baton_kernels import sampling as kernels
from baton_kernels.dispatch import Backend
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import EmptySupport, InvalidLogits
from engine.request import Sampling
from engine.sampling import logprobs, sampler
from engine.sampling.host_device_copies import Fetched, bring
from engine.sampling.logprobs import rows_per_pass
from engine.sampling.metadata import SamplerOutput, SamplingRequest
from engine.sampling.sampler import Sampler
from engine.speculation.rejection_sampler import Proposal, Proposals
from tests.conftest import LONG
from tests.unit.engine.cuda_waits import refused_waits
from tests.unit.engine.sampling.reference import (
    VOCAB_SIZE,
    batch,
    bitmask_of,
    make_draw,
    make_logits,
    plain,
    processed,
    rows_of_batches,
    sample,
)

EXAMPLES = 1000 if LONG else 50
BACKENDS: tuple[Backend, ...] = ("auto", "reference")
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.4, "frequency_penalty": 0.3}


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
    keys = torch.tensor([gumbel_noise.row_key(one.seed, one.sample_index, draw.position)])
    scores = (logits.float() - logits.float().max()) / one.temperature
    scores = scores + gumbel_noise.gumbel(keys, torch.arange(logits.shape[0]))
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


@pytest.mark.parametrize("spread", [0.01, 3.0, 30.0])
def test_a_draw_is_the_argmax_over_the_whole_support(spread: float, seed: int) -> None:
    """Pruning by what the noise can be must never change a result; nor do sorts that rows share."""
    generator = torch.Generator().manual_seed(seed)
    fields = FILTERS * (40 if LONG else 6)
    logits = torch.randn(len(fields), 3000, generator=generator) * spread
    draws = [_draw(seed=seed + row, position=row, **one) for row, one in enumerate(fields)]
    drawn = sample(logits, draws)
    assert not any(one.error for one in drawn)
    expected = [_reference_token(*row) for row in zip(logits, draws, strict=True)]
    assert [one.token_id for one in drawn] == expected


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
    together = plain(sample(logits, draws))
    shuffled = plain(sample(logits[order], [draws[row] for row in order]))
    assert shuffled == [together[row] for row in order]
    alone = [plain(sample(logits[row : row + 1], [one])) for row, one in enumerate(draws)]
    assert alone == [[one] for one in together]


@settings(max_examples=EXAMPLES)
@given(
    rows=rows_of_batches,
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    backend=st.sampled_from(BACKENDS),
    shift=st.integers(0, 40),
)
def test_tokens_are_left_for_the_next_step_whatever_the_rows_ask_for(
    rows: list[Any], seed: int, dtype: torch.dtype, backend: Backend, shift: int
) -> None:
    """By either backend, of whichever rows of logits. Rows in error leave a valid id; the logits
    stay as they are, and the result does not read them again."""
    requests = batch(rows)
    logits = make_logits(seed, len(requests) + 2, VOCAB_SIZE, dtype)
    before = logits.clone()
    places = [(at * 7 + shift) % len(logits) for at in range(len(requests))]  # some twice
    expected = sample(logits[places], requests)
    into = torch.full((len(requests),), -7, dtype=torch.int32)
    pending = Sampler(backend).begin(logits, requests, places, into=into)
    for left, one in zip(into.tolist(), expected, strict=True):
        assert left == one.token_id if one.error is None else 0 <= left < VOCAB_SIZE
    assert logits.view(torch.uint8).equal(before.view(torch.uint8))
    logits.fill_(torch.nan)
    into.fill_(-7)  # the next step's tokens
    assert plain(pending.result()) == plain(expected)
    first = before[: len(requests)]
    assert plain(Sampler(backend).begin(first, requests).result()) == plain(sample(first, requests))


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
    keys = torch.tensor([gumbel_noise.row_key(one.seed, one.sample_index, draw.position)])
    scaled = (wanted - wanted.max()) / one.temperature
    scores = scaled + gumbel_noise.gumbel(keys, torch.arange(len(wanted)))
    better = (scores > scores[got.token_id]).nonzero()[:, 0].tolist()
    # Whoever would have won is out: by a filter, of which the token drawn is not out.
    edge = float(scaled[got.token_id])
    assert all(float(scaled[token_id]) < edge for token_id in better)
    assert not better or one.top_k or one.top_p < 1.0 or one.min_p


def test_groups_of_rows_that_are_worked_on_apart_give_the_same(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large batch goes through in several passes, by either backend."""
    assert rows_per_pass(torch.empty(30, 100_000)) == 10
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(30, 700, generator=generator) * 3
    fields: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "trace": True},
        {"repetition_penalty": 1.5, "logprobs": 3},
        {"temperature": 2.0, "top_p": 0.8, "frequency_penalty": 1.0},
        {"allowed_token_ids": frozenset(range(0, 500, 7)), "trace": True},
    ]
    draws = [make_draw((3, 4), (5, row), seed=row, **fields[row % 5]) for row in range(30)]
    for own in (logits, logits.bfloat16()):
        expected = plain(sample(own, draws))
        with monkeypatch.context() as patch:
            patch.setattr(logprobs, "_CPU_PASS", 2000)
            assert rows_per_pass(own) < 10
            for backend in BACKENDS:
                assert plain(Sampler(backend).begin(own, draws).result()) == expected


# -- errors of one row


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_an_error_is_its_rows_own_and_names_its_cause(temperature: float) -> None:
    """And touches no neighbour, sampled or greedy."""
    logits = torch.randn(1, 50).repeat(7, 1)
    logits[1, 20], logits[2, 20], logits[3] = math.nan, math.inf, -math.inf
    logits[4, 3] = 3e38
    fields: dict[str, Any] = {"temperature": temperature, "logprobs": 1, "trace": True}
    calm = make_draw((1, 2), **fields)
    loud = make_draw((3,), repetition_penalty=1e-6, **fields)
    nothing = {"allowed_token_ids": frozenset({8, 9}), "bad_words": ((7, 8),), "min_tokens": 4}
    empty = make_draw((1, 2), (7,), ends=(9,), **nothing, **fields)
    drawn = sample(logits, [calm, calm, calm, calm, loud, empty, calm])
    assert drawn[0] == drawn[6] == sample(logits[:1], [calm])[0]
    assert drawn[0].error is None
    assert all(isinstance(one.error, InvalidLogits) for one in drawn[1:5])
    assert "repetition_penalty=1e-06" in str(drawn[4].error)
    error = drawn[5].error
    assert isinstance(error, EmptySupport)
    assert error.processors == ("allowed_token_ids=2 tokens", "bad_words=1 words", "min_tokens=4")
    assert error.position == 3 and "bad_words=1 words" in str(error)
    assert drawn[5].token_id == -1 and drawn[5].logprobs is None and drawn[5].trace is None


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


NOT_69 = torch.tensor([-1, -1, ~(1 << 5)], dtype=torch.int32)
ORDERS: list[tuple[list[float], Any, dict[str, Any], int]] = [
    # logits, output after prompt (0,), fields, token
    ([5.0, 4.0, 3.0, 2.0], (0,), {}, 0),
    ([5.0, 4.0, 3.0, 2.0], (0,), {"repetition_penalty": 2.0}, 1),
    ([5.0, 4.0, 3.0, 2.0], (0,), {"logit_bias": ((3, 10.0),)}, 3),
    ([5.0, 4.0, 3.0, 2.0], (0,), {"presence_penalty": 1.5}, 1),
    ([5.0, 4.0, 3.0, 2.0], (0,), {"bad_words": ((0,), (1,))}, 2),
    ([5.0, 4.0, 3.0, 2.0], (0,), {"allowed_token_ids": frozenset({2, 3})}, 2),
    ([5.0, 4.0, 3.0, 2.0], (0,), {"no_repeat_ngram": 1}, 1),
    # End tokens come back once min_tokens are there.
    ([5.0, 4.0, 3.0], (), {"min_tokens": 2, "ends": (0, 77)}, 1),
    ([5.0, 4.0, 3.0], (2,), {"min_tokens": 2, "ends": (0, 77)}, 1),
    ([5.0, 4.0, 3.0], (2, 2), {"min_tokens": 2, "ends": (0, 77)}, 0),
    ([5.0, 4.0, 3.0], (), {"min_tokens": 2}, 0),  # nothing ends it
    # Bits of a grammar past the vocabulary, and words past the highest allowed id.
    ([*range(70)], (), {"bitmask": NOT_69}, 68),
    ([*range(70)], (), {"bitmask": NOT_69, "allowed_token_ids": frozenset({3, 69})}, 3),
    ([*range(70)], (), {"bitmask": NOT_69, "allowed_token_ids": frozenset({3, 31})}, 31),
]


@pytest.mark.parametrize(("logits", "output", "fields", "expected"), ORDERS)
def test_greedy_goes_through_penalties_and_masks(
    logits: list[float], output: tuple[int, ...], fields: dict[str, Any], expected: int
) -> None:
    draw = make_draw((0,), output, **fields)
    assert sample(torch.tensor([logits]).float(), [draw])[0].token_id == expected


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


def test_no_rows_are_no_tokens() -> None:
    assert sample(torch.empty(0, 9), []) == []


# -- what is queued and waited for later


def _of_every_kind(num_tokens: int) -> tuple[torch.Tensor, list[SamplingRequest]]:
    """[R, num_tokens] logits on CPU, and requests: five of the rows are in error."""
    grammar = bitmask_of(frozenset(range(0, num_tokens, 3)), num_tokens)
    nothing = {"allowed_token_ids": frozenset({5}), "bad_words": ((5,),)}
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8},
        {"temperature": 1.0, "top_p": 0.9},
        {"logprobs": 3},
        {"temperature": 1.0, "top_k": 40, "logprobs": 0},
        {"temperature": 1.0, "top_p": 0.7, "trace": True},
        {"temperature": 0.7, **PENALTIES, "logprobs": 20, "trace": True},
        {"presence_penalty": 0.5, "logit_bias": ((7, 3.0),)},
        {"temperature": 1.0, "bitmask": grammar},
        {"temperature": 1.0, "bitmask": grammar, "no_repeat_ngram": 2, "trace": True},
        {
            "temperature": 1.0,
            "min_tokens": 9,
            "ends": (1, 2),
            "allowed_token_ids": frozenset({2, 8}),
        },
        {"temperature": 1.0, **nothing, "logprobs": 2},
        {**nothing, "trace": True},
        {"temperature": 1.0, "repetition_penalty": 1e-6},
        {"temperature": 1.0, "logprobs": 1},
        {"temperature": 1.0, **PENALTIES},
    ]
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(len(kinds), num_tokens, generator=generator) * 3
    logits[-3, 3] = 3e38  # a penalty makes it infinite
    logits[-2, 9] = math.nan
    logits[-1] = -math.inf
    return logits, [make_draw((3, 4), (5, at), seed=at, **one) for at, one in enumerate(kinds)]


def test_every_kind_of_row_at_once() -> None:
    logits, requests = _of_every_kind(700)
    into = torch.full((len(requests),), -7, dtype=torch.int32)
    found = Sampler().begin(logits, requests, into=into).result()
    errors = [type(one.error) for one in found[-5:]]
    assert errors == [EmptySupport, EmptySupport, InvalidLogits, InvalidLogits, InvalidLogits]
    assert all(one.error is None for one in found[:-5])
    assert into.tolist()[:-5] == [one.token_id for one in found[:-5]]
    assert all(0 <= left < 700 for left in into.tolist())
    assert found[6].logprobs is not None and len(found[6].logprobs.top) == 20
    assert found[9].trace is not None and found[9].trace.processors[-1] == "grammar"
    assert plain(Sampler("reference").begin(logits, requests).result()) == plain(found)


def test_a_judged_row_leaves_what_it_is_told() -> None:
    """On CPU; on CUDA its proposals are judged on the host."""
    logits = torch.zeros(2, 9)
    proposals = Proposals((Proposal(6, 1.0, None), Proposal(2, 1.0, None)), key=11)
    request = make_draw(temperature=1.0, allowed_token_ids=frozenset({2, 6}))
    into = torch.full((2,), -7, dtype=torch.int32)
    requests = [request._replace(proposals=proposals), make_draw()]
    found = Sampler().begin(logits, requests, into=into).result()
    assert into.tolist() == [one.token_id for one in found]
    assert found[0].token_id in (2, 6)


def test_small_arrays_come_and_go_as_they_are() -> None:
    words = np.arange(-3, 9, dtype=np.int32).reshape(3, 4)
    brought = bring(words, torch.device("cpu"))
    assert brought.tolist() == words.tolist() and brought.dtype == torch.int32
    assert Fetched(brought).wait().tolist() == words.tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("is_half", [False, True])
def test_the_device_is_not_waited_for(is_half: bool) -> None:
    """torch itself looks out for calls that wait, in rows of every kind, in error too."""
    on_host, requests = _of_every_kind(5000)
    if is_half:
        on_host = on_host.to(torch.bfloat16)
    logits = on_host.cuda()
    expected = Sampler().begin(logits, requests).result()
    into = torch.full((len(requests),), -7, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    with refused_waits():
        with pytest.raises(RuntimeError):
            logits.cpu()  # it does look
        pending = Sampler().begin(logits, requests, into=into)
        logits.fill_(torch.nan)  # queued after it: the result does not read the logits again
    found = pending.result()
    assert plain(found) == plain(expected)
    for left, one in zip(into.tolist(), found, strict=True):
        assert left == one.token_id if one.error is None else 0 <= left < 5000
    on_cpu = sample(on_host, requests)
    assert [one.token_id for one in on_cpu] == [one.token_id for one in found]
    assert [repr(one.error) for one in on_cpu] == [repr(one.error) for one in found]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_judged_rows_of_a_device_are_those_of_the_host() -> None:
    """And leave a valid token for the next step."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(8, 300, generator=generator)
    requests = []
    for at in range(8):
        proposals = Proposals((Proposal(at, 1.0, None), Proposal(9, 1.0, None)), key=at)
        request = make_draw((1, 2), (3,), temperature=1.0, trace=True, logprobs=2, seed=at)
        requests.append(request._replace(proposals=proposals if at % 2 else None))
    into = torch.full((8,), -7, dtype=torch.int32, device="cuda")
    found = Sampler().begin(logits.cuda(), requests, into=into).result()
    on_cpu = sample(logits, requests)
    assert [one.token_id for one in found] == [one.token_id for one in on_cpu]
    assert all(0 <= left < 300 for left in into.tolist())


# -- for the kernels


def test_the_best_by_keys_are_the_best(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a device finds them: best first, and the lowest id first among equals."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.log_softmax(torch.randn(9, 50, generator=generator).round(), dim=-1)
    values[3, 7:40] = -torch.inf
    values[4] = 0.0
    values[4, ::2] = -0.0
    monkeypatch.setattr(logprobs, "_KEYS_PASS", 100)
    for count in (1, 7, 50):
        on_cpu, by_keys = logprobs.best_of(values, count), logprobs._best_by_keys(values, count)
        order = values.sort(dim=-1, descending=True, stable=True).indices[:, :count]
        assert on_cpu[1].tolist() == by_keys[1].tolist() == order.tolist()
        assert on_cpu[0].equal(by_keys[0])
    assert [one.shape for one in logprobs.best_of(values, 0)] == [(9, 0), (9, 0)]


def test_parameters_reach_the_device_as_they_are() -> None:
    draws = [
        SamplingRequest(
            Sampling(max_tokens=1, temperature=0.5, top_k=1 << 40, top_p=0.25, seed=2**64 - 1), 7
        ),
        SamplingRequest(
            Sampling(max_tokens=1, temperature=2.0, min_p=0.125, seed=3), 9, sample_index=5
        ),
        SamplingRequest(Sampling(max_tokens=1, temperature=2.0, top_k=3), 0),
    ]
    rows = sampler._parameters(draws, torch.empty(3, 100), "truncated", [False, False, True])
    assert rows.temperature.tolist() == [0.5, 2.0, 0.0]
    assert rows.top_k.tolist() == [100, 0, 3]
    assert rows.top_p.tolist() == [0.25, 1.0, 1.0]
    assert rows.min_p.tolist() == [0.0, 0.125, 0.0]
    assert rows.positions.tolist() == [7, 9, 0]
    keys = [
        gumbel_noise.seed_key(2**64 - 1, 0),
        gumbel_noise.seed_key(3, 5),
        gumbel_noise.seed_key(0, 0),
    ]
    assert rows.seed_keys.tolist() == keys
    assert all(each.is_contiguous() for each in rows)


def test_a_warm_up_samples_in_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the kernel's variants, from the model's logits and from a copy that was changed."""
    seen = []

    def draw_tokens(logits: torch.Tensor, rows: Any, *, needs: Any, **fields: Any) -> Any:
        seen.append((logits.dtype, needs))
        return kernels.draw_tokens(logits, rows, needs=needs, **fields)

    monkeypatch.setattr(sampler, "draw_tokens", draw_tokens)
    Sampler("reference")._warm_up_kernels(torch.randn(1, 77).to(torch.bfloat16))
    for needs in ("greedy", "sampled", "truncated"):
        assert (torch.float32, needs) in seen and (torch.bfloat16, needs) in seen
