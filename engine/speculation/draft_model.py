"""DraftModel: a small model guesses (SpecInfer's SSM), by an expansion-based token tree with a
configuration <k1, ..., km>: at step i each newest node gets its k_i best children (section 3.2).

Children are chosen for the exact mode: by the model's scores with the very noise that the target's
draw after the same tokens will have (baton_kernels/noise.py), so that both draw the same token as
often as their distributions allow; without noise where the request is greedy. A task that
`is_drawn` gets k_i draws instead (drawing.py); what was drawn twice is one node with two tries.

It has a KV cache of its own, for the tokens that the sequence has. Of one path each node is
computed once; nodes of a tree that has branched are computed anew with each step of it. Nothing of
them is kept for the next call. A sequence that it has not caught up with (a long prompt, a new
worker) gets no draft until all its tokens are computed. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from baton_kernels import noise

from engine.batch import Batch, Span
from engine.models.interface import Guesses, LoadedModel
from engine.request import ModelInfo
from engine.sequence import Key
from engine.speculation.draft_cache import DraftCache
from engine.speculation.drafter import Distribution, Draft, Place, Task
from engine.speculation.drawing import Children, Parent, draw_children, proposing
from engine.speculation.tree import EMPTY, ROOT, Try, ordered


@dataclass(slots=True)
class _Growing:
    """One task's tree, parents before children."""

    task: Task
    block_ids: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    newest: list[int] = field(default_factory=lambda: [ROOT])
    """Whose children come next."""
    has_branched: bool = False
    """Nodes that are on no common path were computed: a cell may be a sibling's."""
    tries: list[tuple[Try, ...]] = field(default_factory=list)
    """Of each node, if it is drawn."""
    distributions: dict[Place, Distribution] = field(default_factory=dict)

    def path(self, node: int) -> tuple[int, ...]:
        """Tokens from the root's child down to `node`."""
        token_ids: list[int] = []
        while node != ROOT:
            token_ids.append(self.token_ids[node])
            node = self.parents[node]
        return tuple(reversed(token_ids))


class DraftModel:
    """A Drafter (drafter.py). See the module.

    Args:
        model: with the target's vocabulary; nobody else's.
        expansion: k1, k2, ...: children at each step.
        num_blocks: of its cache.
        max_num_tokens: that one call computes to catch up.
    """

    def __init__(
        self,
        model: LoadedModel,
        expansion: Sequence[int],
        *,
        num_blocks: int,
        max_num_tokens: int,
    ) -> None:
        self.name = model.info.model
        self._model = model
        self._expansion = tuple(expansion)
        self._max_num_tokens = max_num_tokens
        self._memory = model.make_memory(num_blocks)
        model.attach(self._memory)
        self._block_size = model.layout.block_size
        self._cache = DraftCache(num_blocks, self._block_size)
        self._takes_trees = model.guesses is Guesses.TREES

    @property
    def info(self) -> ModelInfo:
        """What was loaded."""
        return self._model.info

    def close(self) -> None:
        """See Closes: the model."""
        self._model.close()

    def propose(self, tasks: Sequence[Task]) -> list[Draft]:
        """See Drafter."""
        growing, logits = self._begin(tasks)
        begun = {one.task.key: one for one in growing}
        for depth, width in enumerate(self._expansion):
            growing = [one for one in growing if one.newest and _has_room(one, depth)]
            if not growing:
                break
            if depth > 0:
                logits = self._forward(growing)
            self._expand(growing, logits, width)
        return [
            _draft(begun[task.key]) if task.key in begun else Draft(EMPTY, {}) for task in tasks
        ]

    def num_cached(self, key: Key) -> int:
        """See CachingDrafter (draft_sessions.py)."""
        return self._cache.num_tokens(key)

    def has_room(self, key: Key, num_tokens: int) -> bool:
        """See CachingDrafter."""
        num_slots = num_tokens + self._num_nodes
        is_short = num_slots <= self._model.info.context_window
        return is_short and self._cache.has_room(key, num_slots)

    def forget(self, key: Key) -> None:
        """See Drafter."""
        self._cache.forget(key)

    def check_integrity(self) -> None:
        """See Drafter."""
        self._cache.check_integrity()

    def _begin(self, tasks: Sequence[Task]) -> tuple[list[_Growing], torch.Tensor]:
        """Compute what each sequence has and the cache has not. Returns: those that are caught up
        with, and logits [number of them, V] after their last tokens."""
        busy = {task.key for task in tasks}
        left = self._max_num_tokens
        token_ids: list[int] = []
        spans: list[Span] = []
        draws: list[int] = []
        growing: list[_Growing] = []
        for task in tasks:
            num_tokens = len(task.token_ids)
            num_slots = num_tokens + self._num_nodes
            held = None
            if num_slots <= self._model.info.context_window:
                held = self._cache.hold(task.key, num_slots, busy)
            if held is None or left == 0:
                continue
            # The last one is computed in any case: its logits are wanted.
            start = min(held.num_tokens, num_tokens - 1)
            count = min(num_tokens - start, left)
            left -= count
            end = start + count
            token_ids += task.token_ids[start:end]
            block_ids = tuple(held.block_ids)
            self._clear(held.block_ids, start, end)
            spans.append(Span(start, count, block_ids[: -(-end // self._block_size)]))
            held.num_tokens = end
            if end == num_tokens:
                draws.append(len(token_ids) - 1)
                growing.append(_Growing(task, block_ids))
        if not spans:
            return [], torch.empty(0)
        batch = Batch(tuple(token_ids), tuple(spans), tuple(draws))
        return growing, self._model.forward(batch)

    @property
    def _num_nodes(self) -> int:
        """Most nodes that are ever computed of one tree."""
        total, level = 0, 1
        for width in self._expansion[:-1]:
            level *= width if self._takes_trees else 1
            total += level
        return total

    def _clear(self, block_ids: Sequence[int], start: int, end: int) -> None:
        """Blocks that are entered: what an earlier sequence left there is read with weight 0."""
        if not self._model.reads_unwritten:
            return
        size = self._block_size
        for index in range(-(-start // size), -(-end // size)):
            self._memory.clear(block_ids[index])

    def _forward(self, growing: Sequence[_Growing]) -> torch.Tensor:
        """Logits after each tree's newest nodes, tree after tree."""
        token_ids: list[int] = []
        spans: list[Span] = []
        draws: list[int] = []
        for one in growing:
            last = len(one.task.token_ids) - 1
            own, branches = self._computed(one)
            end = last + 1 + len(own)
            block_ids = one.block_ids[: -(-end // self._block_size)]
            if not one.has_branched:
                # One path: what lies above its end was computed by the forwards before.
                self._clear(one.block_ids, end - 1, end)
                spans.append(Span(end - 1, 1, block_ids))
                draws.append(len(token_ids))
                token_ids.append(one.token_ids[own[-1]])
                continue
            first = len(token_ids) + 1
            token_ids += [one.task.token_ids[last], *(one.token_ids[node] for node in own)]
            self._clear(one.block_ids, last + 1, end)
            spans.append(Span(last, 1 + len(own), block_ids, branches=branches))
            places = {node: first + place for place, node in enumerate(own)}
            draws += [places[node] for node in one.newest]
        return self._model.forward(Batch(tuple(token_ids), tuple(spans), tuple(draws)))

    def _computed(self, one: _Growing) -> tuple[list[int], tuple[int, ...]]:
        """The nodes above and among the newest, and which of them each follows."""
        wanted: set[int] = set()
        for node in one.newest:
            while node != ROOT and node not in wanted:
                wanted.add(node)
                node = one.parents[node]
        own = sorted(wanted)
        places = {ROOT: ROOT, **{node: place for place, node in enumerate(own)}}
        return own, tuple(places[one.parents[node]] for node in own)

    def _expand(self, growing: Sequence[_Growing], logits: torch.Tensor, width: int) -> None:
        """Children of all newest nodes.

        Args:
            logits: [their number, V].
        """
        scores = self._scores(growing, logits)
        count = min(width, scores.shape[-1])
        best = scores.topk(count, dim=-1)
        shares = torch.softmax(scores, dim=-1).gather(-1, best.indices).nan_to_num(0.0).tolist()
        drawn = _drawn(growing, logits, width)
        row = 0
        for one, ids in _by_tree(growing, best.indices.tolist()):
            added: list[int] = []
            for parent, children in zip(one.newest, ids, strict=True):
                above = 1.0 if parent == ROOT else one.chances[parent]
                depth = 1 if parent == ROOT else one.depths[parent] + 1
                if one.task.is_drawn:
                    children, shares[row] = _note(one, parent, drawn[row])
                for token_id, share in zip(children, shares[row], strict=True):
                    added.append(len(one.token_ids))
                    one.token_ids.append(token_id)
                    one.parents.append(parent)
                    one.chances.append(above * share)
                    one.depths.append(depth)
                row += 1
            # A model without a mask for trees goes on from the likeliest alone.
            one.newest = added if self._takes_trees else added[:1]
            one.has_branched |= len(one.newest) > 1

    def _scores(self, growing: Sequence[_Growing], logits: torch.Tensor) -> torch.Tensor:
        """[rows, V] float32: what the target's draw would compare, if it were this model."""
        scores = logits.float().clone()
        temperatures: list[float] = []
        seeds, samples, positions = list[int](), list[int](), list[int]()
        for one in growing:
            task = one.task
            for node in one.newest:
                temperatures.append(0.0 if task.is_drawn else task.sampling.temperature)
                seeds.append(task.sampling.seed)
                samples.append(task.sample_index)
                depth = 0 if node == ROOT else one.depths[node]
                positions.append(len(task.token_ids) + depth)
        sampled = np.flatnonzero(np.array(temperatures) > 0.0)
        if len(sampled):
            rows = torch.from_numpy(sampled).to(scores.device)
            keys = torch.from_numpy(noise.row_keys(seeds, samples, positions)).to(scores.device)
            heat = torch.tensor(temperatures, device=scores.device)[rows, None]
            every = torch.arange(scores.shape[-1], device=scores.device)[None]
            scores[rows] = scores[rows] / heat + noise.gumbel(keys[rows, None], every)
        return scores


def _draft(one: _Growing) -> Draft:
    tree = ordered(one.token_ids, one.parents, one.chances, one.tries)
    if one.task.is_drawn:
        return Draft(tree, dict(one.distributions))
    return Draft(tree.best(one.task.num_nodes), {})


def _drawn(
    growing: Sequence[_Growing], logits: torch.Tensor, width: int
) -> dict[int, Children | None]:
    """By row: of those newest nodes whose children are draws."""
    parents: dict[int, Parent] = {}
    row = 0
    for one in growing:
        if one.task.is_drawn:
            sampling = proposing(one.task.sampling)
            for place, node in enumerate(one.newest):
                parents[row + place] = Parent(sampling, one.path(node))
        row += len(one.newest)
    if not parents:
        return {}
    rows = list(parents)
    own = logits if len(rows) == len(logits) else logits[rows]
    return dict(zip(rows, draw_children(own, list(parents.values()), width), strict=True))


def _note(one: _Growing, parent: int, drawn: Children | None) -> tuple[list[int], list[float]]:
    """Take what was drawn after a node. Returns: its distinct tokens, and their shares."""
    if drawn is None:
        return [], []
    one.distributions[one.path(parent), _OWN] = drawn.distribution
    shares: list[float] = []
    for token_id, count in drawn.counts.items():
        shares.append(min(1.0, float(drawn.distribution[token_id])))
        one.tries.append((Try(_OWN, shares[-1]),) * count)
    return list(drawn.counts), shares


_OWN = 0
"""Under which a draft's tries name their one drafter."""


def _has_room(one: _Growing, depth: int) -> bool:
    return len(one.token_ids) < one.task.num_nodes and depth < one.task.max_depth


def _by_tree(
    growing: Sequence[_Growing], rows: list[list[int]]
) -> list[tuple[_Growing, list[list[int]]]]:
    """The rows of each tree's newest nodes."""
    parts: list[tuple[_Growing, list[list[int]]]] = []
    first = 0
    for one in growing:
        parts.append((one, rows[first : first + len(one.newest)]))
        first += len(one.newest)
    return parts
