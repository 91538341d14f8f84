"""The hidden states of the tokens that a step computed and that stay. A guess that was refused is
not among them. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from engine.models.interface import LoadedModel
from engine.request import State
from engine.sampling.copies import bring
from engine.sequence import Key
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
    """What a step that wanted hidden states leaves for drafters, once it is booked, and whose: all
    in one memory of that size, no view of the model's.

    Args:
        planned: as the step was built of.
    """
    every = model.every_hidden()
    kept = step.drawn_of(model.hidden()) if every is None else every
    rows: dict[int, int] = {}  # by sample: its first row of logits
    for row, sample in enumerate(step.samples):
        rows.setdefault(id(sample), row)
    found: list[tuple[Sample, int, int]] = []  # whose, position of the first, how many
    places: list[int] = []  # in `kept`: of all of them
    first = 0
    for (sample, num_tokens), span in zip(planned, step.batch.spans, strict=True):
        first_row = rows.get(id(sample))
        nodes = _kept_nodes(sample, guesses.get(sample.key), span.start + num_tokens)
        if every is not None:
            trunk = range(first, first + num_tokens)
        elif first_row is not None:
            trunk = range(first_row, first_row + 1)
        else:
            trunk = range(0)
        own = [*trunk, *(trunk.stop + node for node in nodes)] if trunk else []
        first += span.num_tokens
        start = span.start + num_tokens - len(trunk)
        for one in _who_has_them(sample, is_drawn=first_row is not None):
            own_places = own[: max(0, one.num_computed_tokens - start)]
            if own_places:
                found.append((one, start, len(own_places)))
                places += own_places
    if not found:
        return []
    # A copy: views would keep the hidden states of the whole step on the device.
    counts = [count for _, _, count in found]

    def split(of_all: torch.Tensor, wanted: Sequence[int]) -> tuple[torch.Tensor, ...]:
        rows = bring(np.array(wanted, dtype=np.int64), of_all.device)
        return torch.split(of_all.index_select(0, rows), counts)

    parts = split(kept, places)
    if every is None:
        draw_indices = step.draw_indices
        places = [draw_indices[place] for place in places]
    layers = {layer: split(rows, places) for layer, rows in model.layer_inputs().items()}
    return [
        (
            one,
            Computed(
                one.key,
                one.token_ids,
                start,
                parts[index],
                {layer: own[index] for layer, own in layers.items()},
            ),
        )
        for index, (one, start, _) in enumerate(found)
    ]


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
