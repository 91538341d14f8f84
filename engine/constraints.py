"""Constraints: the engine's side of grammars: which requests wait for theirs to be compiled, whose
row of the next draw is masked, and what a drawn token forces. The grammars themselves are
engine/grammar/'s.

A request that waits takes part in no step, and others pass it; `poll` finds those whose wait is
over. The service is made by `prepare`, or when the first request with a grammar comes: an engine
that is not prepared and never sees one starts no thread and no process for it, and reads no
vocabulary. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from engine.errors import EngineError, InvalidRequest
from engine.group import Group
from engine.request import Request, Sampling
from engine.sampling.metadata import SamplingRequest
from engine.sequence import Sequence as Sample

if TYPE_CHECKING:
    from engine.grammar.service import Compilation, GrammarService
    from engine.grammar.state import GrammarState

MakeService = Callable[[], "GrammarService"]


class Constraints:
    """See the module.

    Args:
        make_service: must not block. None: this engine's model has no tokenizer to constrain, and
            every grammar is refused by name.
        jump_forward: as in EngineConfig.
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
        """Somebody waits for a grammar."""
        return bool(self._waiting)

    def ask(self, request: Request) -> Compilation | None:
        """Have the request's grammar compiled, if it has one. Never waits.

        Raises: InvalidRequest naming what is wrong with it; GrammarBusy.
        """
        spec = request.sampling.grammar
        if spec is None:
            return None
        service = self._made_service()
        if service is None:
            raise InvalidRequest("grammar", "this engine's model has no tokenizer to follow it")
        return service.submit(spec, request.cache_root)

    def prepare(self) -> None:
        """Have ready what the first grammar would wait for. Blocks while it reads the vocabulary:
        before the first request."""
        service = self._made_service()
        if service is not None:
            service.prepare()

    def _made_service(self) -> GrammarService | None:
        if self._service is None and self._make_service is not None:
            self._service = self._make_service()
        return self._service

    # -- waiting

    def is_ready(self, group: Group) -> bool:
        """It has no grammar, or a compiled one, or an error for one."""
        return group.compilation is None or group.compilation.is_done

    def wait_for(self, group: Group) -> None:
        """`poll` gives it back once it is ready."""
        self._waiting[group.request.request_id] = group

    def forget(self, group: Group) -> None:
        """It ended. A compilation that no other request waits for ends with it."""
        self._waiting.pop(group.request.request_id, None)
        if group.compilation is not None and self._service is not None:
            self._service.release(group.compilation)
            group.compilation = None

    def poll(self) -> list[Group]:
        """Those whose wait is over, in the order in which it began."""
        ready = [group for group in self._waiting.values() if self.is_ready(group)]
        for group in ready:
            del self._waiting[group.request.request_id]
        return ready

    def wait(self, timeout_s: float) -> None:
        """Until one that waits may be ready, for at most this long."""
        for group in self._waiting.values():
            if group.compilation is not None:
                group.compilation.wait(timeout_s)
                return

    def enter(self, group: Group) -> EngineError | None:
        """Put the request's first sample at the beginning of its grammar, and follow the output
        tokens that it has. Returns: why it cannot go on."""
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
        """Begin to make the masks of these rows of logits; None for a row without grammar. Returns:
        None if no row needs one."""
        if self._service is None or not any(row is not None for row in rows):
            return None
        return Masks(self._service, rows)

    def forced(self, sample: Sample) -> tuple[int, ...]:
        """The tokens that the sample's grammar makes of what follows; empty where the model is
        asked all the same. Taking them changes nothing but time: each is the only one that its
        mask allows. Where other processors have a say in each token (hard masks), or the model must
        be asked for its log probability, tokens are drawn one by one."""
        if sample.grammar is None or self._jump_forward != "tokens":
            return ()
        return sample.grammar.forced() if _may_jump(sample.request.sampling) else ()

    def retokenized(self, sample: Sample, token_id: int) -> tuple[int, ...]:
        """What a drawn token becomes where forced text is cut into tokens anew, together with it
        (`jump_forward=retokenize`); else itself."""
        if (
            sample.grammar is None
            or self._jump_forward != "retokenize"
            or not _may_jump(sample.request.sampling)
        ):
            return (token_id,)
        return sample.grammar.retokenized(token_id) or (token_id,)

    def close(self) -> None:
        """End the service's threads and process. Those who wait get its error."""
        if self._service is not None:
            self._service.close()

    def check_integrity(self) -> None:
        """Raises: IntegrityError."""
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
    """Tokens that may end an output: EOS unless it is ignored, and stop token ids."""
    ends = sampling.stop_token_ids
    if sampling.ignore_eos:
        return ends
    return ends | eos_token_ids if ends else eos_token_ids


class Masks:
    """The masks of one step's rows on their way. Made before the model runs."""

    def __init__(self, service: GrammarService, rows: Sequence[GrammarState | None]) -> None:
        self._service = service
        self._rows = rows
        service.filler.submit([row for row in rows if row is not None])

    def wait(self) -> None:
        """Until their states may be touched again."""
        self._service.filler.wait([row for row in self._rows if row is not None], None)

    def masked(
        self, draws: Sequence[SamplingRequest], rows: Sequence[int]
    ) -> list[SamplingRequest | None]:
        """The draws with their rows' masks; those without a grammar as they were, so that their
        traces name none. None: the mask is late, and the row draws in a later step. At least one
        draw is there: the step waits a moment for all masks, and if it has no other draw, until it
        has.

        Args:
            rows: the row of each draw.
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
