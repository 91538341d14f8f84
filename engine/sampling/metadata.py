"""The values of sampling: SamplingRequest and SamplerOutput, one of each per row and step, and
SamplingMetadata, the parts of a `Sampling` that a step reads.

Requests and outputs are named tuples, not dataclasses: a step makes some hundred of them, and a
named tuple takes a third of the time. Metadata are made once per `Sampling` and looked up by
identity, since hashing twenty fields for each row of each step would cost more than sampling. It
knows no logits. Engine thread only.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from baton_kernels.sampling import Needs
from numpy.typing import NDArray

from engine.errors import EngineError
from engine.outputs import PositionLogprobs, SampleTrace
from engine.request import Sampling
from engine.sampling.token_history import TokenHistory, needs_history
from engine.speculation.rejection_sampler import Proposals


class SamplingRequest(NamedTuple):
    """The sampling of one row: the request's parameters, and the state that they depend on at this
    step."""

    sampling: Sampling

    position: int
    """Position of the sampled token in the sequence; 0 is the prompt's first token."""

    sample_index: int = 0
    """Index of the sample in its request; a part of the key of the noise."""

    num_output_tokens: int = 0
    """Number of output tokens before this one."""

    end_token_ids: frozenset[int] = frozenset()
    """EOS (unless it is ignored) and the stop token ids; masked until there are `min_tokens` output
    tokens."""

    history: TokenHistory | None = None
    """The sequence's tokens; required if `needs_history(sampling)`."""

    bitmask: torch.Tensor | None = None
    """The grammar's mask, int32 [ceil(V / 32)] on CPU: bit i of word w allows token 32 * w + i."""

    proposals: Proposals | None = None
    """The draft tokens from which multi-step acceptance chooses the token (rejection_sampler.py),
    in place of the noise; None: not used."""


class SamplerOutput(NamedTuple):
    """The result of one row: a token, or the error that ends its request."""

    token_id: int
    """The sampled token; -1 with an error."""

    logprobs: PositionLogprobs | None = None
    trace: SampleTrace | None = None
    error: EngineError | None = None


LATE = SamplerOutput(-1)
"""The output of a row whose grammar mask was not ready in time: no token was sampled, and the next
step computes the sequence's last token again."""


@dataclass(frozen=True, eq=False, slots=True)
class SamplingMetadata:
    """The parameters of one Sampling, in the form that a step uses."""

    is_plain: bool
    """Whether the token is the argmax of the raw logits and nothing else is reported, unless a
    grammar masks them."""

    needs: Needs
    """The kind of sampling that `draw_tokens` must do: "greedy", "sampled" or "truncated"."""

    adjusts: bool
    """Whether logits are changed or masked at every step, apart from grammar and `min_tokens`."""

    needs_history: bool

    bias_ids: NDArray[np.int64]
    bias_values: NDArray[np.float32]

    bad_ids: NDArray[np.int64]
    """The bad words of one token, which are masked at every step; ascending."""

    allowed_words: NDArray[np.int32] | None
    """The `allowed_token_ids`, packed like a grammar's bitmask up to the highest allowed id; None:
    all tokens are allowed."""

    names_before: tuple[str, ...]
    """The active processors before the grammar's mask, by name and parameter."""

    names_after: tuple[str, ...]
    """The active processors after `min_tokens`, by name and parameter."""


class Row(NamedTuple):
    """A row of logits that needs more than an argmax of the model's own logits."""

    place: int
    """Index of the row among those that are sampled together."""

    request: SamplingRequest
    metadata: SamplingMetadata

    @property
    def masks_ends(self) -> bool:
        """Whether end tokens are masked at this step, since there are fewer than `min_tokens`
        output tokens."""
        return masks_ends(self.request)

    @property
    def adjusting_names(self) -> tuple[str, ...]:
        """The processors that change this row's logits at this step (steps 1 to 9), in order."""
        names = self.metadata.names_before
        if self.request.bitmask is not None:
            names = (*names, "grammar")
        if self.masks_ends:
            names = (*names, f"min_tokens={self.request.sampling.min_tokens}")
        return names

    @property
    def names(self) -> tuple[str, ...]:
        """All processors of this row at this step, in order."""
        return self.adjusting_names + self.metadata.names_after


def masks_ends(request: SamplingRequest) -> bool:
    """Return whether end tokens are masked at this step: none of the first `min_tokens` output
    tokens may be one, as in transformers' MinNewTokensLengthLogitsProcessor."""
    return request.num_output_tokens < request.sampling.min_tokens and bool(request.end_token_ids)


_made: dict[int, tuple[weakref.ref[Sampling], SamplingMetadata]] = {}


def metadata_of(sampling: Sampling) -> SamplingMetadata:
    """Return the metadata of `sampling`, created at the first call and kept while `sampling`
    lives."""
    key = id(sampling)
    found = _made.get(key)
    if found is not None and found[0]() is sampling:
        return found[1]
    metadata = _make(sampling)
    # Called before the memory, and so the id, can be used again.
    _made[key] = (weakref.ref(sampling, lambda _: _made.pop(key, None)), metadata)
    return metadata


def _make(one: Sampling) -> SamplingMetadata:
    bad_ids = sorted({word[0] for word in one.bad_words if len(word) == 1})
    adjusts = (
        needs_history(one)
        or bool(one.logit_bias)
        or bool(bad_ids)
        or one.allowed_token_ids is not None
    )
    return SamplingMetadata(
        is_plain=(
            one.temperature == 0.0
            and not adjusts
            and one.min_tokens == 0
            and one.logprobs is None
            and not one.trace
        ),
        needs=_needs(one),
        adjusts=adjusts,
        needs_history=needs_history(one),
        bias_ids=np.array([token_id for token_id, _ in one.logit_bias], dtype=np.int64),
        bias_values=np.array([value for _, value in one.logit_bias], dtype=np.float32),
        bad_ids=np.array(bad_ids, dtype=np.int64),
        allowed_words=None if one.allowed_token_ids is None else pack(one.allowed_token_ids),
        names_before=_names_before(one),
        names_after=_names_after(one),
    )


def _needs(one: Sampling) -> Needs:
    if one.temperature == 0.0:
        return "greedy"
    return "truncated" if one.top_k > 0 or one.top_p < 1.0 else "sampled"


def pack(token_ids: frozenset[int]) -> NDArray[np.int32]:
    """Pack token ids into int32 words, bit i of word w set for token 32 * w + i, up to the highest
    id."""
    bits = np.zeros((max(token_ids) // 32 + 1) * 32, dtype=np.bool_)
    bits[np.fromiter(token_ids, dtype=np.int64)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def _names_before(one: Sampling) -> tuple[str, ...]:
    names = (
        (one.repetition_penalty != 1.0, f"repetition_penalty={one.repetition_penalty:g}"),
        (one.presence_penalty != 0.0, f"presence_penalty={one.presence_penalty:g}"),
        (one.frequency_penalty != 0.0, f"frequency_penalty={one.frequency_penalty:g}"),
        (bool(one.logit_bias), f"logit_bias={len(one.logit_bias)} tokens"),
        (
            one.allowed_token_ids is not None,
            f"allowed_token_ids={len(one.allowed_token_ids or ())} tokens",
        ),
        (bool(one.bad_words), f"bad_words={len(one.bad_words)} words"),
        (one.no_repeat_ngram > 0, f"no_repeat_ngram={one.no_repeat_ngram}"),
    )
    return tuple(name for is_on, name in names if is_on)


def _names_after(one: Sampling) -> tuple[str, ...]:
    if one.temperature == 0.0:
        return ()
    names = (
        (one.temperature != 1.0, f"temperature={one.temperature:g}"),
        (one.top_k > 0, f"top_k={one.top_k}"),
        (one.top_p < 1.0, f"top_p={one.top_p:g}"),
        (one.min_p > 0.0, f"min_p={one.min_p:g}"),
    )
    return tuple(name for is_on, name in names if is_on)
