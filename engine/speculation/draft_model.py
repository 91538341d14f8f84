"""DraftModel: a small model guesses (SpecInfer's SSM), by an expansion-based token tree with a
configuration <k1, ..., km>: at step i each newest node gets its k_i best children (section 3.2).

Children are chosen for the exact mode: by the model's scores with the very noise that the target's
draw after the same tokens will have (engine/noise.py), so that both draw the same token as often as
their distributions allow; without noise where the request is greedy. It has a KV cache of its own,
for the tokens that the sequence has; nodes are computed anew with each step of a tree, and nothing
of them is kept. A sequence that it has not caught up with (a long prompt, a new worker) gets no
draft until it has.

Engine thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from engine import noise
from engine.batch import Batch, Span
from engine.models.interface import Guesses, LoadedModel
from engine.schedule.order import Key
from engine.speculation.draft_cache import DraftCache
from engine.speculation.drafter import Draft, Task
from engine.speculation.tree import EMPTY, ROOT, TokenTree, ordered


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


class DraftModel:
    """A Drafter (drafter.py). See the module.

    Args:
        model: with the target's vocabulary; nobody else's.
        expansion: k1, k2, ...: children at each step.
        num_blocks: of its cache.
        max_num_tokens: that one call computes to catch up.
    """

    def __init__(
        self, model: LoadedModel, expansion: Sequence[int], *, num_blocks: int, max_num_tokens: int
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

    def propose(self, tasks: Sequence[Task]) -> list[Draft]:
        """See Drafter."""
        trees: dict[Key, TokenTree] = {}
        growing, logits = self._begin(tasks)
        for depth, width in enumerate(self._expansion):
            growing = [one for one in growing if one.newest and _has_room(one)]
            if not growing:
                break
            if depth > 0:
                logits = self._forward(growing)
            self._expand(growing, logits, width)
            for one in growing:
                trees[one.task.key] = ordered(one.token_ids, one.parents, one.chances)
        return [Draft(trees.get(task.key, EMPTY).best(task.num_nodes), {}) for task in tasks]

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
        return growing, self._model.forward(Batch(tuple(token_ids), tuple(spans), tuple(draws)))

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
            first = len(token_ids) + 1
            own, branches = self._computed(one)
            token_ids += [one.task.token_ids[last], *(one.token_ids[node] for node in own)]
            end = last + 1 + len(own)
            self._clear(one.block_ids, last + 1, end)
            span = Span(
                last,
                1 + len(own),
                one.block_ids[: -(-end // self._block_size)],
                branches=branches,
            )
            spans.append(span if span.is_tree else span._replace(branches=()))
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
        row = 0
        for one, ids in _by_tree(growing, best.indices.tolist()):
            added: list[int] = []
            for parent, children in zip(one.newest, ids, strict=True):
                above = 1.0 if parent == ROOT else one.chances[parent]
                depth = 1 if parent == ROOT else one.depths[parent] + 1
                for token_id, share in zip(children, shares[row], strict=True):
                    added.append(len(one.token_ids))
                    one.token_ids.append(token_id)
                    one.parents.append(parent)
                    one.chances.append(above * share)
                    one.depths.append(depth)
                row += 1
            # A model without a mask for trees goes on from the likeliest alone.
            one.newest = added if self._takes_trees else added[:1]

    def _scores(self, growing: Sequence[_Growing], logits: torch.Tensor) -> torch.Tensor:
        """[rows, V] float32: what the target's draw would compare, if it were this model."""
        scores = logits.float().clone()
        temperatures: list[float] = []
        seeds: list[int] = []
        samples: list[int] = []
        positions: list[int] = []
        for one in growing:
            task = one.task
            for node in one.newest:
                temperatures.append(task.sampling.temperature)
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


def _has_room(one: _Growing) -> bool:
    return len(one.token_ids) < one.task.num_nodes


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
