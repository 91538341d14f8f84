"""MedusaProposer: several heads on the target's last hidden state, each of which predicts the token
one place further (Medusa, arXiv 2401.10774). A head is a series of residual blocks x + SiLU(W x
+ b), then a projection to the vocabulary; in the legacy format, version 2, that is the target's
LM head. Its input is that of the target's LM head, after the final norm.

No head depends on another one's choice, so that the tree is the product of each place's best
tokens. The heads need the newest hidden state only: after a preemption, a handoff or a prefix cache
hit they propose again as soon as one token was computed here.
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
from engine.speculation.draft_model import Children, best_children
from engine.speculation.head_checkpoint import HeadCheckpoint
from engine.speculation.proposer import Draft, DraftTask, HiddenStates, HiddenStateScope
from engine.speculation.token_tree import EMPTY, ROOT, TokenTree, ordered


class MedusaHead(NamedTuple):
    """The weights of one head."""

    blocks: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """The residual blocks: (weight [hidden, hidden], bias [hidden]) of each."""

    projection: torch.Tensor | None
    """The projection to the vocabulary, [V, hidden]; None: the target's LM head."""


class MedusaProposer:
    """A HiddenStateProposer that runs Medusa's heads.

    Args:
        ends: the target's embedding and LM head; the latter serves heads without a projection.
        expansion: number of best tokens at each place, place by place.
    """

    hidden_state_scope = HiddenStateScope.SAMPLED
    aux_layers: tuple[int, ...] = ()

    def __init__(
        self, name: str, heads: Sequence[MedusaHead], ends: Ends | None, expansion: Sequence[int]
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
        self._newest: dict[Key, tuple[int, torch.Tensor]] = {}
        """(position, hidden state [hidden]) of the newest computed token of each sequence."""

    def feed_hidden_states(self, computed: Sequence[HiddenStates]) -> None:
        """Keep a copy of the newest hidden state of each sequence."""
        for one in computed:
            self._newest[one.key] = one.start + len(one.hidden) - 1, one.hidden[-1]
        if computed:
            # A copy of all rows: a view of one row would keep all hidden states of its step.
            own = torch.stack([hidden for _, hidden in self._newest.values()])
            self._newest = {
                key: (position, hidden)
                for (key, (position, _)), hidden in zip(self._newest.items(), own, strict=True)
            }

    @torch.inference_mode()
    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        """Propose for each task the tree of the heads' best tokens; an empty tree where the hidden
        state of the newest token is unknown."""
        rows: list[tuple[DraftTask, int]] = []  # (task, tokens ahead of its next one)
        inputs: dict[int, list[tuple[int, torch.Tensor]]] = {}  # by head: (row, hidden)
        for task in tasks:
            position, hidden = self._newest.get(task.key, (-1, None))
            # Tokens that a grammar forced are known and not computed: the heads that would predict
            # them are skipped.
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
        """Compute the logits of one head: hidden states [B, hidden] -> [B, V]."""
        blocks, projection = self._heads[head]
        for weight, bias in blocks:
            hidden = hidden + silu(linear(hidden, weight, bias))
        if projection is not None:
            return linear(hidden, projection)
        if self._ends is None:
            raise AssertionError("checked in __init__")
        return self._ends.head(hidden)

    def _logits(self, inputs: dict[int, list[tuple[int, torch.Tensor]]]) -> torch.Tensor:
        """Compute the logits of all rows, in their order: [rows, V]."""
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
        """Drop the hidden state of a sequence."""
        self._newest.pop(key, None)

    def check_integrity(self) -> None:
        """Check nothing: one hidden state is kept for each sequence, and they do not depend on one
        another."""


def product_tree(places: Sequence[Children], num_nodes: int) -> TokenTree:
    """Return the likeliest nodes of the tree in which every path has one of each place's tokens.

    Args:
        places: the children of each place, the likeliest first.
        num_nodes: largest number of nodes.
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
) -> tuple[MedusaHead, ...]:
    """Read the heads of a checkpoint whose config.json names `medusa_num_heads`. Head i's tensors
    are `i.j.linear.weight` and `.bias` of block j, and `i.<number of blocks>.weight`. A file may
    hold more heads than its config.json says; some published ones do.

    Raises: LoadError.
    """
    least = checkpoint.number("medusa_num_heads", 1)
    num_blocks = checkpoint.number("medusa_num_layers", 1)
    numbers = {key.partition(".")[0] for key in checkpoint.keys}
    num_heads = max([least, *(int(one) + 1 for one in numbers if one.isdecimal())])
    has_projections = any(f"{head}.{num_blocks}.weight" in checkpoint.keys for head in range(least))
    heads: list[MedusaHead] = []
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
        heads.append(MedusaHead(tuple(blocks), projection))
    checkpoint.check_known(known)
    return tuple(heads)
