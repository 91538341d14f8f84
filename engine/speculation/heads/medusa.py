"""MedusaHeads: several heads on the target's last hidden state, each of which guesses the token one
place further (Medusa, arXiv 2401.10774): residual blocks x + SiLU(W x + b), then a projection to
the vocabulary; in the legacy format, version 2, that is the target's own head. The input is what
the target's head takes: its last norm is in it.

No head knows what another one chose, so that a tree is the product of each place's best tokens.
They need the newest hidden state and nothing of the past: after a preemption, a handover or a
prefix hit they guess again as soon as one token was computed here.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import linear, silu

from engine.errors import LoadError
from engine.models.interface import Ends
from engine.sequence import Key
from engine.speculation.drafter import Draft, Task
from engine.speculation.heads.checkpoint import HeadCheckpoint
from engine.speculation.heads.children import Children, best_children
from engine.speculation.heads.hidden import Computed, Wants
from engine.speculation.tree import EMPTY, ROOT, TokenTree, ordered


class Head(NamedTuple):
    """One of them."""

    blocks: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """(weight [hidden, hidden], bias [hidden])"""

    projection: torch.Tensor | None
    """[V, hidden]; None: the target's head."""


class MedusaHeads:
    """A Drafter (speculation/drafter.py) that ReadsHidden. See the module.

    Args:
        ends: of the target; used where heads have no projection.
        expansion: best tokens that are taken at each place, place by place.
    """

    wants = Wants.DRAWN
    layers: tuple[int, ...] = ()

    def __init__(
        self, name: str, heads: Sequence[Head], ends: Ends | None, expansion: Sequence[int]
    ) -> None:
        if ends is None and any(head.projection is None for head in heads):
            raise LoadError(
                f"speculation.draft_heads: the heads of {name} use the target's own head, which "
                "cannot be called by itself here; name heads that have projections"
            )
        self.name = name
        self._heads = tuple(heads)
        self._ends = ends
        self._expansion = tuple(expansion)
        self._seen: dict[Key, tuple[int, torch.Tensor]] = {}
        """(position, [hidden]) of each sequence's newest token that was computed."""

    def see(self, computed: Sequence[Computed]) -> None:
        """See ReadsHidden."""
        for one in computed:
            self._seen[one.key] = one.start + len(one.hidden) - 1, one.hidden[-1]
        if computed:
            # All anew: a row of what a step left would keep the whole of it.
            own = torch.stack([hidden for _, hidden in self._seen.values()])
            self._seen = {
                key: (position, hidden)
                for (key, (position, _)), hidden in zip(self._seen.items(), own, strict=True)
            }

    @torch.inference_mode()
    def propose(self, tasks: Sequence[Task]) -> list[Draft]:
        """See Drafter."""
        rows: list[tuple[Task, int]] = []  # and how many tokens ahead of its own next one
        inputs: dict[int, list[tuple[int, torch.Tensor]]] = {}  # by head: (row, hidden)
        for task in tasks:
            position, hidden = self._seen.get(task.key, (-1, None))
            # Tokens that a grammar forced are known without having been computed: the heads that
            # guess them have nothing to say.
            first_head = len(task.token_ids) - 2 - position
            if hidden is None or first_head < 0:
                continue
            last = min(len(self._heads), first_head + len(self._expansion))
            for ahead, head in enumerate(range(first_head, last)):
                inputs.setdefault(head, []).append((len(rows), hidden))
                rows.append((task, ahead))
        if not rows:
            return [Draft(EMPTY, {}) for _ in tasks]
        logits = self._logits(inputs)
        children = best_children(logits, rows, [self._expansion[ahead] for _, ahead in rows])
        places: dict[Key, list[Children]] = {}
        for (task, _), own in zip(rows, children, strict=True):
            places.setdefault(task.key, []).append(own)
        return [Draft(product_tree(places.get(task.key, []), task.num_nodes), {}) for task in tasks]

    def logits(self, head: int, hidden: torch.Tensor) -> torch.Tensor:
        """One head's: [B, hidden] -> [B, V]."""
        blocks, projection = self._heads[head]
        for weight, bias in blocks:
            hidden = hidden + silu(linear(hidden, weight, bias))
        if projection is not None:
            return linear(hidden, projection)
        if self._ends is None:
            raise AssertionError("checked when it was made")
        return self._ends.head(hidden)

    def _logits(self, inputs: dict[int, list[tuple[int, torch.Tensor]]]) -> torch.Tensor:
        """[rows, V] in the order of the rows."""
        order: list[int] = []
        parts: list[torch.Tensor] = []
        for head, own in inputs.items():
            order += [row for row, _ in own]
            parts.append(self.logits(head, torch.stack([hidden for _, hidden in own])))
        logits = torch.cat(parts)
        places = torch.empty(len(order), dtype=torch.long)
        places[order] = torch.arange(len(order))
        return logits[places.to(logits.device)]

    def forget(self, key: Key) -> None:
        """See Drafter."""
        self._seen.pop(key, None)

    def check_integrity(self) -> None:
        """See Drafter. One hidden state a sequence is all there is."""


def product_tree(places: Sequence[Children], num_nodes: int) -> TokenTree:
    """The likeliest nodes of the tree in which every path takes one of each place's tokens.

    Args:
        places: of each place, best first.
        num_nodes: at most.
    """
    token_ids: list[int] = []
    parents: list[int] = []
    chances: list[float] = []
    waiting: list[tuple[float, int, int, int, int]] = []  # -chance, counter, parent, depth, child
    counter = 0

    def offer(parent: int, depth: int, above: float) -> None:
        nonlocal counter
        if depth < len(places):
            for child, (_, share) in enumerate(places[depth]):
                heapq.heappush(waiting, (-above * share, counter, parent, depth, child))
                counter += 1

    offer(ROOT, 0, 1.0)
    while waiting and len(token_ids) < num_nodes:
        negative, _, parent, depth, child = heapq.heappop(waiting)
        token_ids.append(places[depth][child][0])
        parents.append(parent)
        chances.append(-negative)
        offer(len(token_ids) - 1, depth + 1, -negative)
    return ordered(token_ids, parents, chances)


def read_medusa(
    checkpoint: HeadCheckpoint, *, hidden_size: int, vocab_size: int
) -> tuple[Head, ...]:
    """The heads of a checkpoint whose config.json names `medusa_num_heads`. Head i's tensors are
    `i.j.linear.weight` and `.bias` of block j, and `i.<number of blocks>.weight`. A file may hold
    more heads than its config.json says; some published ones do.

    Raises: LoadError.
    """
    least = checkpoint.number("medusa_num_heads", 1)
    num_blocks = checkpoint.number("medusa_num_layers", 1)
    numbers = {key.partition(".")[0] for key in checkpoint.keys}
    num_heads = max([least, *(int(one) + 1 for one in numbers if one.isdecimal())])
    has_projections = any(f"{head}.{num_blocks}.weight" in checkpoint.keys for head in range(least))
    heads: list[Head] = []
    known: set[str] = set()
    for head in range(num_heads):
        blocks: list[tuple[torch.Tensor, torch.Tensor]] = []
        for block in range(num_blocks):
            name = f"{head}.{block}.linear"
            weight = checkpoint.tensor(f"{name}.weight", (hidden_size, hidden_size))
            blocks.append((weight, checkpoint.tensor(f"{name}.bias", (hidden_size,))))
            known |= {f"{name}.weight", f"{name}.bias"}
        projection = None
        if has_projections:
            name = f"{head}.{num_blocks}.weight"
            projection = checkpoint.tensor(name, (vocab_size, hidden_size))
            known.add(name)
        heads.append(Head(tuple(blocks), projection))
    checkpoint.check_known(known)
    return tuple(heads)
