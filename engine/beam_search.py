"""Beam search as pure functions over values: chooses which continuations of the open beams stay
open, which are finished, and when the search is over. It knows no requests, no blocks and no
model; any thread.

    start -> `step` with the prompt's row, or `begin` with its candidates -> `step` ... -> is_over

One step, with k = num_beams:

1. of all continuations (open beam, token), the `num_candidates` with the greatest sums of log
   probabilities are considered, so that at least k of them do not end;
2. a candidate ends with one of `end_token_ids`, or by its length. Those among the k best become
   finished hypotheses with the score sum / length ** length_penalty (the end token counts), and the
   k best finished ones are kept;
3. the k best that do not end are the open beams;
4. the search is over when every candidate has ended; or when there are k finished ones, and either
   early_stopping is set or the best open beam's score at its present length is no better than the
   worst of them.

It equals transformers' greedy beam search (5.23, early_stopping False and True), in float32 and in
its order of operations, so that equal logits give equal scores to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine.errors import InvalidLogits, InvalidRequest
from engine.request import Beam

Candidates = tuple[tuple[int, float], ...]
"""(token id, log probability) of each candidate, best first."""

MAX_LENGTH_PENALTY = 5.0


@dataclass(frozen=True)
class Hypothesis:
    """A finished beam."""

    token_ids: tuple[int, ...]
    """The output tokens, the end token included."""
    score: float
    """Sum of log probabilities / len(token_ids) ** length_penalty."""


@dataclass(frozen=True)
class BeamState:
    """The state of a search. Before the first step there is one open beam, the prompt."""

    beam: Beam
    end_token_ids: frozenset[int]
    max_tokens: int
    """Number of output tokens after which a beam ends."""

    open_token_ids: tuple[tuple[int, ...], ...] = ((),)
    """The output tokens of each open beam, all of one length; the best beam first."""
    open_scores: tuple[float, ...] = (0.0,)
    """The sum of log probabilities of each open beam, rounded to float32."""
    finished: tuple[Hypothesis, ...] = ()
    """The finished hypotheses, at most num_beams, best first; exactly num_beams when the search is
    over."""
    is_over: bool = False

    @property
    def num_tokens(self) -> int:
        """The number of output tokens of each open beam."""
        return len(self.open_token_ids[0]) if self.open_token_ids else self.max_tokens


@dataclass(frozen=True)
class BeamStep:
    """The result of one step. Row i of the next step's log probabilities must be that of new open
    beam i."""

    state: BeamState
    parents: tuple[int, ...]
    """The index of the old beam that each new open beam continues; empty when the search is
    over."""
    token_ids: tuple[int, ...]
    """The newest token of each new open beam."""


def num_candidates(num_beams: int, num_end_token_ids: int) -> int:
    """Return the number of continuations that one step considers: so many that num_beams of them do
    not end, even if every beam's best ones are all end tokens."""
    return num_beams * max(2, 1 + num_end_token_ids)


def check_beam(beam: Beam, num_samples: int, vocab_size: int, num_end_token_ids: int) -> None:
    """Check the parameters of a search. Raises: InvalidRequest naming the field of a search that
    cannot be run."""
    if beam.num_beams < 2:
        raise InvalidRequest("beam.num_beams", f"{beam.num_beams} is below 2: that is no search")
    if num_samples > beam.num_beams:
        raise InvalidRequest(
            "num_samples", f"{num_samples} hypotheses wanted of {beam.num_beams} beams"
        )
    # Also NaN. Beyond (a guess), scores of long outputs would leave float32.
    if not -MAX_LENGTH_PENALTY <= beam.length_penalty <= MAX_LENGTH_PENALTY:
        raise InvalidRequest(
            "beam.length_penalty", f"{beam.length_penalty} is not within +-{MAX_LENGTH_PENALTY}"
        )
    wanted = num_candidates(beam.num_beams, num_end_token_ids)
    if wanted > vocab_size:
        raise InvalidRequest(
            "beam.num_beams",
            f"{beam.num_beams} beams and {num_end_token_ids} end tokens look at {wanted} "
            f"candidates, but the vocabulary has {vocab_size} tokens",
        )


def start(beam: Beam, end_token_ids: frozenset[int], max_tokens: int) -> BeamState:
    """Return the state of a search before its first step. `max_tokens` is at least 1."""
    return BeamState(beam, end_token_ids, max_tokens)


def first_candidates(logprobs: torch.Tensor, count: int) -> Candidates:
    """Return the best candidates of the prompt's row: all that a search needs to begin on another
    engine, with `count` = `num_candidates(...)`.

    Args: logprobs: [V] float32, natural logarithms.
    Raises: InvalidLogits for NaN or +inf.
    """
    values, token_ids = torch.topk(logprobs, min(count, logprobs.shape[0]))
    _check_finite(float(values[0]))
    return tuple(zip(token_ids.tolist(), values.tolist(), strict=True))


def begin(state: BeamState, candidates: Candidates) -> BeamStep:
    """Do the first step from `first_candidates` of the prompt's row, with the same result as `step`
    with that row."""
    ranked = [(logprob, 0, token_id) for token_id, logprob in candidates]
    wanted = num_candidates(state.beam.num_beams, len(state.end_token_ids))
    return _advance(state, ranked[:wanted])


def step(state: BeamState, logprobs: torch.Tensor) -> BeamStep:
    """Continue every open beam by one token.

    Args: logprobs: [number of open beams, V] float32, natural logarithms, row i for open beam i;
        -inf for a token that must not be chosen. Read only.
    Raises: InvalidLogits for NaN or +inf, or if fewer than num_beams continuations are possible.
    """
    vocab_size = logprobs.shape[1]
    scores = torch.tensor(state.open_scores, dtype=torch.float32, device=logprobs.device)
    totals = (logprobs + scores[:, None]).reshape(-1)
    wanted = num_candidates(state.beam.num_beams, len(state.end_token_ids))
    best, places = torch.topk(totals, min(wanted, totals.shape[0]))
    ranked = [
        (total, place // vocab_size, place % vocab_size)
        for total, place in zip(best.tolist(), places.tolist(), strict=True)
    ]
    return _advance(state, ranked)


def _advance(state: BeamState, ranked: Sequence[tuple[float, int, int]]) -> BeamStep:
    """Sort candidates (sum of log probabilities, open beam, token), best first, into open and
    finished ones."""
    beam, num_tokens = state.beam, state.num_tokens + 1
    _check_finite(ranked[0][0])
    is_last = num_tokens >= state.max_tokens
    ends = [is_last or token_id in state.end_token_ids for _, _, token_id in ranked]
    divisor = float(num_tokens) ** beam.length_penalty
    scores = _divide([total for total, _, _ in ranked], divisor)
    finished = list(state.finished)
    for (total, parent, token_id), score, is_end in list(zip(ranked, scores, ends, strict=True))[
        : beam.num_beams
    ]:
        if is_end and total > -torch.inf:
            finished.append(Hypothesis((*state.open_token_ids[parent], token_id), score))
    finished.sort(key=lambda one: -one.score)
    kept = [one for one, is_end in zip(ranked, ends, strict=True) if not is_end]
    kept = [one for one in kept if one[0] > -torch.inf][: beam.num_beams]
    after = replace(
        state,
        open_token_ids=tuple((*state.open_token_ids[p], token_id) for _, p, token_id in kept),
        open_scores=tuple(total for total, _, _ in kept),
        finished=tuple(finished[: beam.num_beams]),
    )
    if all(ends) or _is_settled(after, divisor):
        over = replace(after, open_token_ids=(), open_scores=(), is_over=True)
        return BeamStep(over, (), ())
    if len(kept) < beam.num_beams:
        raise InvalidLogits(
            f"only {len(kept)} continuations are possible, {beam.num_beams} beams need one each"
        )
    return BeamStep(after, tuple(p for _, p, _ in kept), tuple(t for _, _, t in kept))


def _is_settled(state: BeamState, divisor: float) -> bool:
    """Return whether the search can stop before all beams end: there are num_beams finished
    hypotheses, and no open beam is expected to exceed the worst."""
    if len(state.finished) < state.beam.num_beams:
        return False
    if state.beam.early_stopping or not state.open_scores:
        return True
    (best_open,) = _divide(state.open_scores[:1], divisor)
    return not best_open > state.finished[-1].score


def _divide(values: Sequence[float], divisor: float) -> list[float]:
    """Divide in float32, the precision of scores."""
    divided: list[float] = (torch.tensor(values, dtype=torch.float32) / divisor).tolist()
    return divided


def _check_finite(best: float) -> None:
    if not -torch.inf < best < torch.inf:  # also NaN, which topk puts first
        raise InvalidLogits(f"the best continuation has a log probability of {best}")
