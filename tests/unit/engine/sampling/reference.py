"""What a row's logits must become, computed the slow way: one row, one token, one loop at a time,
in the words of the documentation and with none of the package's code; and the rows to try it on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from engine.request import Sampling
from engine.sampling.metadata import SamplerOutput, SamplingRequest, pack
from engine.sampling.sampler import Sampler
from engine.sampling.token_history import TokenHistory, needs_history

F = np.float32


def sample(logits: torch.Tensor, requests: Sequence[SamplingRequest]) -> list[SamplerOutput]:
    """One call's outputs."""
    return Sampler().begin(logits, requests).result()


def plain(outputs: Sequence[SamplerOutput]) -> list[str]:
    """Comparable: errors are equal if they say the same."""
    return [repr(one) for one in outputs]


def banned(sampling: Sampling, tokens: Sequence[int]) -> set[int]:
    """By bad words and n-grams, from the whole sequence."""
    banned: set[int] = set()
    for word in sampling.bad_words:
        *before, last = word
        if len(before) <= len(tokens) and list(tokens[len(tokens) - len(before) :]) == before:
            banned.add(last)
    size = sampling.no_repeat_ngram
    if size and len(tokens) >= size - 1:
        now = list(tokens[len(tokens) - (size - 1) :])
        for start in range(len(tokens) - size + 1):
            if list(tokens[start : start + size - 1]) == now:
                banned.add(tokens[start + size - 1])
    return banned


def processed(
    logits: torch.Tensor, draw: SamplingRequest, prompt: Sequence[int], output: Sequence[int]
) -> torch.Tensor:
    """[V] in any dtype -> [V] float32 after steps 1 to 9."""
    one, values = draw.sampling, [F(value) for value in logits.float().tolist()]
    for token_id in range(len(values)):
        if one.repetition_penalty != 1.0 and (token_id in prompt or token_id in output):
            penalty = F(one.repetition_penalty)
            value = values[token_id]
            values[token_id] = value / penalty if value > 0 else value * penalty
        count = list(output).count(token_id)
        if count:
            values[token_id] = values[token_id] - F(one.presence_penalty)
            values[token_id] = values[token_id] - F(one.frequency_penalty) * F(count)
        for biased, bias in one.logit_bias:
            if biased == token_id:
                values[token_id] = values[token_id] + F(bias)
    out = banned(one, [*prompt, *output])
    if draw.num_output_tokens < one.min_tokens:
        out |= draw.end_token_ids
    for token_id in range(len(values)):
        is_allowed = one.allowed_token_ids is None or token_id in one.allowed_token_ids
        if draw.bitmask is not None:
            word = int(draw.bitmask[token_id // 32]) & 0xFFFFFFFF
            is_allowed = is_allowed and bool(word >> (token_id % 32) & 1)
        if token_id in out or not is_allowed:
            values[token_id] = F(-np.inf)
    return torch.tensor(np.array(values, dtype=F))


def make_draw(
    prompt: Sequence[int] = (1,),
    output: Sequence[int] = (),
    *,
    ends: Sequence[int] = (),
    bitmask: torch.Tensor | None = None,
    **fields: Any,
) -> SamplingRequest:
    """As the engine would after `output`."""
    sampling = Sampling(**({"max_tokens": 1000} | fields))
    return SamplingRequest(
        sampling,
        position=len(prompt) + len(output),
        sample_index=sampling.sample_index,
        num_output_tokens=len(output),
        end_token_ids=frozenset(ends),
        history=TokenHistory(sampling, prompt, output) if needs_history(sampling) else None,
        bitmask=bitmask,
    )


VOCAB_SIZE = 40
token_lists = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=12)
shifts = st.sampled_from([0.0, 0.0, -1.5, 0.7, 3.0])
samplings = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.0, 0.4, 1.0, 7.0]),
        "top_p": st.sampled_from([1.0, 1.0, 0.3, 0.9]),
        "top_k": st.sampled_from([0, 0, 1, 5, 30]),
        "min_p": st.sampled_from([0.0, 0.0, 0.2]),
        "min_tokens": st.sampled_from([0, 0, 3, 20]),
        "seed": st.integers(0, 2**64 - 1),
        "logprobs": st.sampled_from([None, None, 0, 4]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 0.8, 1.7]),
        "presence_penalty": shifts,
        "frequency_penalty": shifts,
        "logit_bias": st.dictionaries(
            st.integers(0, VOCAB_SIZE - 1), st.floats(-9, 9, width=32), max_size=4
        ).map(lambda bias: tuple(bias.items())),
        "bad_words": st.lists(
            st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=3).map(tuple), max_size=4
        ).map(tuple),
        "allowed_token_ids": st.none() | st.frozensets(st.integers(0, VOCAB_SIZE - 1), min_size=1),
        "no_repeat_ngram": st.sampled_from([0, 0, 1, 2, 3]),
        "trace": st.booleans(),
    }
)
rows_of_batches = st.lists(
    st.tuples(
        samplings,
        token_lists.filter(bool),
        token_lists,
        st.frozensets(st.integers(0, VOCAB_SIZE - 1), max_size=2),
        st.none() | st.frozensets(st.integers(0, VOCAB_SIZE - 1), min_size=1),
    ),
    min_size=1,
    max_size=12,
)


def batch(rows: list[Any]) -> list[SamplingRequest]:
    return [
        make_draw(
            prompt,
            output,
            ends=ends,
            bitmask=None if grammar is None else bitmask_of(grammar, VOCAB_SIZE),
            **fields,
        )
        for fields, prompt, output, ends, grammar in rows
    ]


def bitmask_of(allowed: frozenset[int], num_tokens: int) -> torch.Tensor:
    words = np.zeros(-(-num_tokens // 32), dtype=np.int32)
    own = pack(allowed)
    words[: len(own)] = own
    return torch.from_numpy(words)


def make_logits(seed: int, num_rows: int, num_tokens: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, num_tokens, generator=generator) * 4
    logits[torch.rand(num_rows, num_tokens, generator=generator) < 0.05] = -torch.inf
    return logits.to(dtype)
