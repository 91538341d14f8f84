"""Constraints: the engine's use of grammars: the requests that wait for the compilation of theirs,
the masks of the rows to sample, and the tokens that a grammar forces. Grammars themselves are
implemented in engine/grammar/.

A waiting request takes part in no step and delays no other; `poll` returns those whose wait is
over. The service is created by `prepare`, or when the first request with a grammar arrives: an
engine without such requests starts no thread and no process for it, and reads no vocabulary. Engine
thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from engine.errors import EngineError, InvalidRequest
from engine.request import Request, Sampling
from engine.sampling.metadata import SamplingRequest
from engine.sequence import Sequence as Sample
from engine.sequence_group import Group

if TYPE_CHECKING:
    from engine.grammar.service import Compilation, GrammarService
    from engine.grammar.state import GrammarState

MakeService = Callable[[], "GrammarService"]


class Constraints:
    """Compiles the grammars of requests, and masks their logits.

    Args:
        make_service: creates the GrammarService without blocking; None: the model has no tokenizer,
            and every grammar is rejected by name.
        jump_forward: EngineConfig.jump_forward.
    """

    def __init__(
        self,
        make_service: MakeService | None,
        *,
        eos_token_ids: frozenset[int],
        jump_forward: str,
    ) -> None:
        self._make_service = make_service
        self._service: GrammarService | None = None
        self._eos_token_ids = eos_token_ids
        self._jump_forward = jump_forward
        self._waiting: dict[str, Group] = {}

    @property
    def has_waiting(self) -> bool:
        """Whether a request waits for a grammar."""
        return bool(self._waiting)

    def ask(self, request: Request) -> Compilation | None:
        """Start to compile the request's grammar, if it has one, without waiting. Raises:
        InvalidRequest naming what is wrong with it; GrammarBusy."""
        spec = request.sampling.grammar
        if spec is None:
            return None
        service = self._made_service()
        if service is None:
            raise InvalidRequest("grammar", "this engine's model has no tokenizer to follow it")
        return service.submit(spec, request.cache_root)

    def prepare(self) -> None:
        """Create the service and read the vocabulary now, so that the first grammar does not wait
        for it. Blocks; called before the first request."""
        service = self._made_service()
        if service is not None:
            service.prepare()

    def _made_service(self) -> GrammarService | None:
        if self._service is None and self._make_service is not None:
            self._service = self._make_service()
        return self._service

    # -- waiting

    def is_ready(self, group: Group) -> bool:
        """Whether the request has no grammar, or its compilation has ended, with an error or
        without."""
        return group.compilation is None or group.compilation.is_done

    def wait_for(self, group: Group) -> None:
        """Add a request to those that `poll` returns once their grammar is ready."""
        self._waiting[group.request.request_id] = group

    def forget(self, group: Group) -> None:
        """Drop a request that ended; its compilation ends, too, if no other request waits for
        it."""
        self._waiting.pop(group.request.request_id, None)
        if group.compilation is not None and self._service is not None:
            self._service.release(group.compilation)
            group.compilation = None

    def poll(self) -> list[Group]:
        """Return the requests whose wait is over, in the order in which they began to wait."""
        ready = [group for group in self._waiting.values() if self.is_ready(group)]
        for group in ready:
            del self._waiting[group.request.request_id]
        return ready

    def wait(self, timeout_s: float) -> None:
        """Wait until a request may be ready, for at most `timeout_s` seconds."""
        for group in self._waiting.values():
            if group.compilation is not None:
                group.compilation.wait(timeout_s)
                return

    def enter(self, group: Group) -> EngineError | None:
        """Set the request's first sample to the beginning of its grammar, and advance it by the
        output tokens that the sample has. Returns: the error that ends the request; None: it can
        continue."""
        if group.compilation is None:
            return None
        if group.compilation.error is not None:
            return group.compilation.error
        sampling = group.request.sampling
        ends = end_token_ids(sampling, self._eos_token_ids)
        try:
            state = group.compilation.state(ends)
        except EngineError as error:
            return error
        group.prompt.grammar = state
        for token_id in group.prompt.output_token_ids:
            if not state.accept(token_id):
                return state.error or InvalidRequest(
                    "outputs", f"token {token_id} of an earlier leg is not in the grammar"
                )
        if state.is_complete:
            return InvalidRequest("outputs", "the grammar is complete: nothing is left to draw")
        return state.error

    # -- the step

    def begin_masks(self, rows: Sequence[GrammarState | None]) -> Masks | None:
        """Begin to fill the masks of rows of logits, each with its grammar state, or None without
        grammar. Returns: None if no row needs one."""
        if self._service is None or not any(row is not None for row in rows):
            return None
        return Masks(self._service, rows)

    def forced(self, sample: Sample) -> tuple[int, ...]:
        """Return the tokens that the sample's grammar forces next; empty if the model must be
        asked.

        Each is the only token that its mask allows, so that they only save time. Tokens are sampled
        one by one if other processors affect each token (hard masks), or log probabilities are
        wanted.
        """
        if sample.grammar is None or self._jump_forward != "tokens":
            return ()
        return sample.grammar.forced() if _may_jump(sample.request.sampling) else ()

    def retokenized(self, sample: Sample, token_id: int) -> tuple[int, ...]:
        """Return the tokens that replace a sampled one if forced text is tokenized together with it
        (`jump_forward=retokenize`); else that token alone."""
        if (
            sample.grammar is None
            or self._jump_forward != "retokenize"
            or not _may_jump(sample.request.sampling)
        ):
            return (token_id,)
        return sample.grammar.retokenized(token_id) or (token_id,)

    def close(self) -> None:
        """End the service's threads and process. Waiting requests get its error."""
        if self._service is not None:
            self._service.close()

    def check_integrity(self) -> None:
        """Check the set of waiting requests. Raises: IntegrityError."""
        if self._service is not None:
            self._service.check_integrity()


def _may_jump(one: Sampling) -> bool:
    return (
        one.logprobs is None
        and one.allowed_token_ids is None
        and not one.bad_words
        and one.no_repeat_ngram == 0
    )


def end_token_ids(sampling: Sampling, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Return the tokens that may end an output: EOS unless it is ignored, and stop token ids."""
    ends = sampling.stop_token_ids
    if sampling.ignore_eos:
        return ends
    return ends | eos_token_ids if ends else eos_token_ids


class Masks:
    """The masks of one step's rows, which are being filled. Created before the model runs."""

    def __init__(self, service: GrammarService, rows: Sequence[GrammarState | None]) -> None:
        self._service = service
        self._rows = rows
        service.filler.submit([row for row in rows if row is not None])

    def wait(self) -> None:
        """Wait until the grammar states may be changed again."""
        self._service.filler.wait([row for row in self._rows if row is not None], None)

    def masked(
        self, draws: Sequence[SamplingRequest], rows: Sequence[int]
    ) -> list[SamplingRequest | None]:
        """Return the sampling requests with their rows' masks; rows without a grammar are
        unchanged. None: the mask is late, and the row samples in a later step.

        At least one request is not None: the step waits a moment for all masks, and, if no row is
        ready then, until one is.

        Args: rows: the row of each request.
        """
        filler = self._service.filler
        states = [(place, self._rows[row]) for place, row in enumerate(rows)]
        own = [(place, state) for place, state in states if state is not None]
        late = filler.wait([state for _, state in own], self._service.limits.mask_wait_s)
        if len(late) == len(draws):
            late = filler.wait([state for _, state in own], None)
        found: list[SamplingRequest | None] = list(draws)
        for index, (place, state) in enumerate(own):
            mask = None if index in late else torch.from_numpy(state.mask())
            found[place] = None if mask is None else draws[place]._replace(bitmask=mask)
        return found
