"""Tokens that are queued and waited for later are those of one call, of whichever rows; and what
the next step reads is there without a wait, whatever the rows ask for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from baton_kernels.dispatch import Backend
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import EmptySupport, InvalidLogits
from engine.sampling.host_device_copies import Fetched, bring
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
    rows_of_batches,
    sample,
)

BACKENDS: tuple[Backend, ...] = ("auto", "reference")
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.4, "frequency_penalty": 0.3}


def _plain(outputs: list[SamplerOutput]) -> list[str]:
    """Comparable: errors are equal if they say the same."""
    return [repr(one) for one in outputs]


@settings(max_examples=300 if LONG else 8)
@given(rows=rows_of_batches, seed=st.integers(0, 2**31), shift=st.integers(0, 40))
def test_of_any_rows(rows: list[Any], seed: int, shift: int) -> None:
    requests = batch(rows)
    logits = make_logits(seed, len(requests) + 2, VOCAB_SIZE, torch.float32)
    places = [(at * 7 + shift) % len(logits) for at in range(len(requests))]  # some twice
    expected = _plain(sample(logits[places], requests))
    assert _plain(Sampler().begin(logits, requests, places).result()) == expected
    first = logits[: len(requests)]
    assert _plain(Sampler().begin(first, requests).result()) == _plain(sample(first, requests))


@settings(max_examples=300 if LONG else 20)
@given(rows=rows_of_batches, seed=st.integers(0, 2**31), backend=st.sampled_from(BACKENDS))
def test_tokens_are_left_for_the_next_step_whatever_the_rows_ask_for(
    rows: list[Any], seed: int, backend: Backend
) -> None:
    """Rows in error leave a valid id; the result does not read the logits again."""
    requests = batch(rows)
    logits = make_logits(seed, len(requests), VOCAB_SIZE, torch.float32)
    expected = sample(logits, requests)
    into = torch.full((len(requests),), -7, dtype=torch.int32)
    pending = Sampler(backend).begin(logits, requests, into=into)
    for left, one in zip(into.tolist(), expected, strict=True):
        assert left == one.token_id if one.error is None else 0 <= left < VOCAB_SIZE
    logits.fill_(torch.nan)
    into.fill_(-7)  # the next step's tokens
    assert _plain(pending.result()) == _plain(expected)


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
    by_reference = Sampler("reference").begin(logits, requests).result()
    assert _plain(by_reference) == _plain(found)


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
    assert _plain(found) == _plain(expected)
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
