"""The hidden states of the tokens that a step computed and that stay. A guess that was refused is
not among them. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from engine.models.interface import LoadedModel
from engine.request import State
from engine.schedule.order import Key
from engine.sequence import Sequence as Sample
from engine.speculation.drafter import Guess
from engine.speculation.heads.hidden import Computed
from engine.speculation.tree import ROOT
from engine.step_builder import Step


def computed(
    step: Step,
    planned: Sequence[tuple[Sample, int]],
    guesses: Mapping[Key, Guess],
    model: LoadedModel,
) -> list[tuple[Sample, Computed]]:
    """What a step that wanted hidden states leaves for drafters, once it is booked, and whose.

    Args:
        planned: as the step was built of.
    """
    drawn, every = model.hidden(), model.every_hidden()
    rows: dict[int, int] = {}  # by sample: its first row of logits
    for row, sample in enumerate(step.samples):
        rows.setdefault(id(sample), row)
    found: list[tuple[Sample, Computed]] = []
    first = 0
    for (sample, num_tokens), span in zip(planned, step.batch.spans, strict=True):
        first_row = rows.get(id(sample))
        nodes = _kept_nodes(sample, guesses.get(sample.key), span.start + num_tokens)
        if every is not None:
            places = [first + num_tokens + node for node in nodes]
            trunk, behind = every[first : first + num_tokens], every[places]
        elif first_row is not None:
            places = [first_row + 1 + node for node in nodes]
            trunk, behind = drawn[first_row : first_row + 1], drawn[places]
        else:
            trunk = behind = drawn[:0]
        first += span.num_tokens
        start = span.start + num_tokens - len(trunk)
        for one in _who_has_them(sample, is_drawn=first_row is not None):
            hidden = torch.cat((trunk, behind)) if nodes else trunk
            hidden = hidden[: max(0, one.num_computed_tokens - start)]
            if len(hidden):
                found.append((one, Computed(one.key, one.token_ids, start, hidden)))
    return found


def _kept_nodes(sample: Sample, guess: Guess | None, end: int) -> list[int]:
    """Nodes of its tree whose tokens are its own now, from position `end` on."""
    nodes: list[int] = []
    if guess is None:
        return nodes
    for token_id in sample.token_ids[end : sample.num_computed_tokens]:
        node = guess.tree.child(nodes[-1] if nodes else ROOT, token_id)
        if node is None:
            break
        nodes.append(node)
    return nodes


def _who_has_them(sample: Sample, *, is_drawn: bool) -> Iterator[Sample]:
    """The sample, and those that a prompt forked into in this step, which computed nothing else;
    as far as they go on here."""
    yield from filter(_goes_on, (sample,))
    if is_drawn and sample.num_output_tokens == 1:
        for one in sample.group.samples.values():
            if one is not sample and one.num_output_tokens == 1 and _goes_on(one):
                yield one


def _goes_on(sample: Sample) -> bool:
    request = sample.request
    is_here = sample.state in (State.PREFILLING, State.RUNNING)
    return is_here and request.beam is None and request.hold_after is None
