"""What goes in and what comes out for one row of logits: plain values, one per row and step.

Named tuples and not dataclasses: some hundred are made in every step, at a third of the price.
Knows no order of processors. Any thread.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine.errors import EngineError
from engine.outputs import SampleTrace, TokenLogprobs
from engine.request import Sampling
from engine.sampling.history import TokenHistory
from engine.speculation.rejection_sampler import Proposals


class Draw(NamedTuple):
    """What to draw in one row: whose parameters, and all that they depend on at this step."""

    sampling: Sampling

    position: int
    """The place that the drawn token will take; 0 is the prompt's first token."""

    sample_index: int = 0
    """Which sample of the request: part of the key of the noise."""

    num_output_tokens: int = 0
    """Output tokens so far; this one is not counted."""

    end_token_ids: frozenset[int] = frozenset()
    """EOS unless it is ignored, and stop token ids: masked until `min_tokens` are there."""

    history: TokenHistory | None = None
    """Must be there if `needs_history(sampling)`."""

    bitmask: torch.Tensor | None = None
    """int32 [ceil(V / 32)] on CPU, bit i of word w set: the grammar allows token 32 * w + i."""

    proposals: Proposals | None = None
    """What a sampled row draws by the multi-step rule from (rejection_sampler.py), in place of
    its noise."""


class Drawn(NamedTuple):
    """The outcome of one row: a token, or the error that ends its request."""

    token_id: int
    """-1 with an error."""

    logprobs: TokenLogprobs | None = None
    trace: SampleTrace | None = None
    error: EngineError | None = None


LATE = Drawn(-1)
"""Of a row whose grammar's mask was not there: nothing was drawn, and its last token is computed
again by the next step."""
