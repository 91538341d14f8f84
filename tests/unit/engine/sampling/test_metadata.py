"""Metadata are found by identity, and go when their Sampling goes."""

from __future__ import annotations

import gc

import torch

from engine.request import Sampling
from engine.sampling import metadata
from engine.sampling.metadata import metadata_of, pack


def test_one_sampling_has_one_metadata_and_equal_ones_their_own() -> None:
    a, b = Sampling(max_tokens=1, logprobs=3), Sampling(max_tokens=1, logprobs=3)
    assert metadata_of(a) is metadata_of(a)
    assert metadata_of(a) is not metadata_of(b)


def test_nothing_is_kept_of_a_sampling_that_is_gone() -> None:
    """However many requests come and go, and whatever ids Python gives them."""
    gc.collect()
    before = len(metadata._made)
    for number in range(1000):
        one = Sampling(max_tokens=1, logit_bias=((number, 1.0),))
        assert metadata_of(one).bias_ids.tolist() == [number]
    del one
    gc.collect()
    assert len(metadata._made) == before


def test_packed_bits_are_those_of_a_grammars_bitmask() -> None:
    words = torch.from_numpy(pack(frozenset({0, 31, 33, 64})))
    assert words.tolist() == [1 - (1 << 31), 2, 1]


def test_only_what_needs_more_than_an_argmax_is_not_plain() -> None:
    assert metadata_of(Sampling(max_tokens=1, top_k=5, top_p=0.3, min_p=0.1)).is_plain
    for fields in (
        {"temperature": 0.1},
        {"min_tokens": 1},
        {"logprobs": 0},
        {"trace": True},
        {"logit_bias": ((1, 1.0),)},
        {"bad_words": ((1,),)},
        {"allowed_token_ids": frozenset({1})},
        {"no_repeat_ngram": 2},
        {"presence_penalty": 0.1},
    ):
        assert not metadata_of(Sampling(**({"max_tokens": 1} | fields))).is_plain, fields
