"""Growth: a sample grows by what was drawn for it, with the tokens that its grammar forces besides,
up to one that ends it. Decides why it ends; books nothing. Engine thread only.
"""

from __future__ import annotations

from engine.constraints import Constraints
from engine.errors import IntegrityError, PolicyFailed
from engine.request import FinishReason, StopPolicy, StopView
from engine.sampling.row import Drawn
from engine.sequence import Sequence, finish_reason


class Growth:
    """See the module."""

    def __init__(
        self,
        constraints: Constraints,
        *,
        eos_token_ids: frozenset[int],
        stop_policy: StopPolicy | None,
    ) -> None:
        self._constraints = constraints
        self._eos_token_ids = eos_token_ids
        self._stop_policy = stop_policy

    def accept(self, sequence: Sequence, drawn: Drawn) -> FinishReason | None:
        """Raises: EngineError from its grammar or the stop policy."""
        if sequence.grammar is None or self._stop_policy is not None:  # it sees every token
            reason = self.add(sequence, (drawn.token_id,))
        else:
            reason = self.add(sequence, self._constraints.retokenized(sequence, drawn.token_id))
            if reason is None:
                reason = self.add(sequence, self._constraints.forced(sequence))
        if reason is None and self._stop_policy is not None:
            reason = _ask_policy(sequence, self._stop_policy)
        return reason

    def add(self, sequence: Sequence, token_ids: tuple[int, ...]) -> FinishReason | None:
        """Take tokens up to one that ends the sample. Raises: EngineError from its grammar."""
        grammar = sequence.grammar
        for token_id in token_ids:
            if grammar is not None and not grammar.accept(token_id):
                raise grammar.error or IntegrityError(
                    f"{sequence.key}: token {token_id} was drawn against its grammar"
                )
            sequence.add_token(token_id)
            reason = finish_reason(
                sequence.request.sampling,
                token_id,
                len(sequence.token_ids) - sequence.num_prompt_tokens,
                sequence.group.max_output_tokens,
                self._eos_token_ids,
            )
            if reason is not None:
                return reason
        if grammar is not None and grammar.is_complete:
            return FinishReason.GRAMMAR
        return None


def _ask_policy(sequence: Sequence, policy: StopPolicy) -> FinishReason | None:
    request = sequence.request
    view = StopView(
        request.request_id,
        sequence.sample_index,
        request.prompt_token_ids,
        sequence.output_token_ids,
    )
    try:
        return FinishReason.POLICY if policy(view) else None
    except Exception as error:  # the border to code that is not ours
        raise PolicyFailed(f"the stop policy raised {type(error).__name__}: {error}") from error
