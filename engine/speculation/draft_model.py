"""DraftModelProposer: a small model proposes tokens (SpecInfer's SSM), by an expansion-based token
tree with a configuration <k1, ..., km>: at step i each newest node gets its k_i best children
(section 3.2).

Children are chosen for the exact mode (`best_children`): by the model's scores with the noise that
the target adds after the same tokens, so that both sample the same token as often as their
distributions allow; without noise where the request is greedy. A task that `is_drawn` gets k_i
draws instead (rejection_sampler.py); a token that was drawn twice is one node with two tries.

The model has a KV cache of its own (DraftKVCache) for the tokens of each sequence. Each node of a
single path is computed once; nodes of a tree that has branched are computed again with each level
of it. No node is kept for the next call. A sequence with tokens that are not computed yet (a long
prompt, a new worker) gets no draft until they are. Engine thread only.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from baton_kernels import gumbel_noise

from engine.batch import Batch, TokenSpan
from engine.errors import IntegrityError
from engine.models.interface import Guesses, LoadedModel
from engine.request import ModelInfo, Sampling
from engine.sampling.metadata import SamplingRequest
from engine.sampling.sampler import Sampler
from engine.sequence import Key
from engine.speculation.proposer import Draft, DraftTask, Proposer
from engine.speculation.rejection_sampler import (
    Distribution,
    DistributionKey,
    DrawnChildren,
    draw_children,
    proposal_sampling,
    random_key,
)
from engine.speculation.token_tree import EMPTY, ROOT, Try, ordered

_OWN = 0
"""The proposer index in the tries of a draft model's own draft; the SpeculationManager replaces
it."""


@dataclass(slots=True)
class DraftBlocks:
    """The blocks of one sequence in a DraftKVCache."""

    block_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0
    """Number of the sequence's first tokens whose KV is in the blocks."""


class DraftKVCache:
    """The blocks of a draft model's own KV cache by sequence. No prefix is shared, and no block
    outlives its sequence. An evicted block costs a draft, never a token of the answer. Every
    block is free or belongs to one sequence."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._free = list(range(num_blocks))
        self._sequences: dict[Key, DraftBlocks] = {}  # the least recently used comes first

    def num_tokens(self, key: Key) -> int:
        """Return the number of the sequence's first tokens whose KV is cached."""
        own = self._sequences.get(key)
        return 0 if own is None else own.num_tokens

    def has_room(self, key: Key, num_slots: int) -> bool:
        """Whether `allocate` has blocks for the sequence without evicting another one."""
        own = self._sequences.get(key)
        num_own = 0 if own is None else len(own.block_ids)
        return -(-num_slots // self._block_size) - num_own <= len(self._free)

    def allocate(self, key: Key, num_slots: int, busy: Collection[Key]) -> DraftBlocks | None:
        """Allocate blocks for `num_slots` tokens of a sequence, evicting the least recently used
        sequences that are not in `busy`. Returns: its blocks; None if there is no room, and the
        sequence keeps the blocks that it had."""
        own = self._sequences.pop(key, None) or DraftBlocks()
        self._sequences[key] = own
        num_missing = -(-num_slots // self._block_size) - len(own.block_ids)
        if num_missing > len(self._free) and not self._free_up(num_missing, {key, *busy}):
            return None
        for _ in range(num_missing):
            own.block_ids.append(self._free.pop())
        return own

    def _free_up(self, num_blocks: int, kept: Collection[Key]) -> bool:
        """Evict sequences not in `kept` until `num_blocks` blocks are free; evict none if that
        cannot be reached. Returns: whether they are free."""
        victims: list[Key] = []
        num_free = len(self._free)
        for key, own in self._sequences.items():
            if num_free >= num_blocks:
                break
            if key not in kept:
                victims.append(key)
                num_free += len(own.block_ids)
        if num_free < num_blocks:
            return False
        for key in victims:
            self.forget(key)
        return True

    def forget(self, key: Key) -> None:
        """Free the sequence's blocks, if it has any."""
        own = self._sequences.pop(key, None)
        if own is not None:
            self._free += own.block_ids

    def check_integrity(self) -> None:
        """Check the blocks. Raises: IntegrityError where a block is lost or belongs to two
        sequences."""
        owned = [block_id for own in self._sequences.values() for block_id in own.block_ids]
        if sorted([*owned, *self._free]) != list(range(self._num_blocks)):
            raise IntegrityError(f"{len(owned)} + {len(self._free)} of {self._num_blocks} blocks")
        for key, own in self._sequences.items():
            if own.num_tokens > len(own.block_ids) * self._block_size:
                raise IntegrityError(f"{key}: {own.num_tokens} tokens drafted beyond its blocks")


Children = list[tuple[int, float]]
"""Tokens after one parent: (token id, the proposer's probability that it is sampled), best
first."""


def best_children(
    logits: torch.Tensor,
    rows: Sequence[tuple[DraftTask, int]],
    widths: Sequence[int],
    token_ids: torch.Tensor | None = None,
) -> list[Children]:
    """Return the best next tokens of each row for exact acceptance: by the scores that the target
    would compare, its noise included; without noise if the request is greedy or `is_drawn`.

    Args:
        logits: [rows, V].
        rows: the task of each row, and the number of tokens between its sequence's newest token and
            the token to choose.
        widths: number of children of each row.
        token_ids: [V] int64, the target's token of each logit; None: the same vocabulary.
    """
    scores = _noisy_scores(logits, rows, token_ids)
    count = min(max(widths), scores.shape[-1])
    best = scores.topk(count, dim=-1)
    ids = best.indices if token_ids is None else token_ids[best.indices]
    shares = torch.softmax(scores, dim=-1).gather(-1, best.indices).nan_to_num(0.0)
    return [
        list(zip(own[:width], beliefs[:width], strict=True))
        for own, beliefs, width in zip(ids.tolist(), shares.tolist(), widths, strict=True)
    ]


def _noisy_scores(
    logits: torch.Tensor, rows: Sequence[tuple[DraftTask, int]], token_ids: torch.Tensor | None
) -> torch.Tensor:
    """Return logits with temperature and the target's noise applied, [rows, V] float32."""
    scores = logits.float().clone()
    temperatures = np.array([task.sampling.temperature for task, _ in rows])
    sampled = np.flatnonzero(temperatures > 0.0)
    if not len(sampled):
        return scores
    device = scores.device
    places = torch.from_numpy(sampled).to(device)
    heat = torch.from_numpy(temperatures[sampled]).to(device, torch.float32)[:, None]
    scores[places] /= heat
    coupled = [row for row in sampled.tolist() if not rows[row][0].is_drawn]
    if coupled:
        own = [rows[row] for row in coupled]
        keys = gumbel_noise.row_keys(
            [task.sampling.seed for task, _ in own],
            [task.sample_index for task, _ in own],
            [len(task.token_ids) + ahead for task, ahead in own],
        )
        if token_ids is None:
            token_ids = torch.arange(scores.shape[-1], device=device)
        own_keys = torch.from_numpy(keys).to(device)[:, None]
        scores[torch.tensor(coupled, device=device)] += gumbel_noise.gumbel(
            own_keys, token_ids[None]
        )
    return scores


@dataclass(slots=True)
class _Growing:
    """The growing draft tree of one task; parents come before children."""

    task: DraftTask
    block_ids: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    newest: list[int] = field(default_factory=lambda: [ROOT])
    """Nodes whose children are added next."""
    has_branched: bool = False
    """Whether nodes of different paths were computed, so that a slot may hold a sibling's KV."""
    tries: list[tuple[Try, ...]] = field(default_factory=list)
    """Tries of each node, if the task is drawn."""
    distributions: dict[DistributionKey, Distribution] = field(default_factory=dict)

    def path(self, node: int) -> tuple[int, ...]:
        """Return the tokens from the root's child down to `node`."""
        token_ids: list[int] = []
        while node != ROOT:
            token_ids.append(self.token_ids[node])
            node = self.parents[node]
        return tuple(reversed(token_ids))


class DraftModelProposer:
    """A Proposer that runs a draft model.

    Args:
        model: a model with the target's vocabulary, used by this proposer alone.
        expansion: number of children of each node, level by level (k1, k2, ...).
        num_blocks: number of blocks of its KV cache.
        max_num_tokens: largest number of new tokens that one call computes.
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
        self._cache = DraftKVCache(num_blocks, self._block_size)
        self._takes_trees = model.guesses is Guesses.TREES

    @property
    def info(self) -> ModelInfo:
        """The name, sizes and other facts of the loaded draft model."""
        return self._model.info

    def close(self) -> None:
        """Close the draft model."""
        self._model.close()

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        """Compute the tasks' new tokens and propose trees, level by level; an empty draft for a
        sequence whose tokens are not all computed yet, or whose tokens have no room in the KV
        cache."""
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
        """Return the number of the sequence's first tokens whose KV is in the draft model's
        cache."""
        return self._cache.num_tokens(key)

    def has_room(self, key: Key, num_tokens: int) -> bool:
        """Whether a sequence of `num_tokens` tokens and its tree fit in the context window, and in
        the KV cache without evicting another sequence."""
        num_slots = num_tokens + self._num_nodes
        is_short = num_slots <= self._model.info.context_window
        return is_short and self._cache.has_room(key, num_slots)

    def forget(self, key: Key) -> None:
        """Free the sequence's blocks."""
        self._cache.forget(key)

    def check_integrity(self) -> None:
        """Check the KV cache's blocks. Raises: IntegrityError where one is lost or belongs to two
        sequences."""
        self._cache.check_integrity()

    def _begin(self, tasks: Sequence[DraftTask]) -> tuple[list[_Growing], torch.Tensor]:
        """Compute tokens of the sequences that are not in the cache. Returns: the sequences that
        are complete now, and the logits [their number, V] after their last tokens."""
        busy = {task.key for task in tasks}
        left = self._max_num_tokens
        token_ids: list[int] = []
        spans: list[TokenSpan] = []
        draws: list[int] = []
        growing: list[_Growing] = []
        for task in tasks:
            num_tokens = len(task.token_ids)
            num_slots = num_tokens + self._num_nodes
            blocks = None
            if num_slots <= self._model.info.context_window:
                blocks = self._cache.allocate(task.key, num_slots, busy)
            if blocks is None or left == 0:
                continue
            # The last token is computed in any case: its logits are needed.
            start = min(blocks.num_tokens, num_tokens - 1)
            count = min(num_tokens - start, left)
            left -= count
            end = start + count
            token_ids += task.token_ids[start:end]
            block_ids = tuple(blocks.block_ids)
            self._clear(blocks.block_ids, start, end)
            spans.append(TokenSpan(start, count, block_ids[: -(-end // self._block_size)]))
            blocks.num_tokens = end
            if end == num_tokens:
                draws.append(len(token_ids) - 1)
                growing.append(_Growing(task, block_ids))
        if not spans:
            return [], torch.empty(0)
        batch = Batch(tuple(token_ids), tuple(spans), tuple(draws))
        return growing, self._model.forward(batch)

    @property
    def _num_nodes(self) -> int:
        """Largest number of nodes of one tree that are computed."""
        total, level = 0, 1
        for width in self._expansion[:-1]:
            level *= width if self._takes_trees else 1
            total += level
        return total

    def _clear(self, block_ids: Sequence[int], start: int, end: int) -> None:
        """Zero the blocks that begin in these positions, if the model reads slots that were not
        written (with weight 0)."""
        if not self._model.reads_unwritten:
            return
        size = self._block_size
        for index in range(-(-start // size), -(-end // size)):
            self._memory.clear(block_ids[index])

    def _forward(self, growing: Sequence[_Growing]) -> torch.Tensor:
        """Compute the logits after each tree's newest nodes, tree after tree: [rows, V]."""
        token_ids: list[int] = []
        spans: list[TokenSpan] = []
        draws: list[int] = []
        for one in growing:
            last = len(one.task.token_ids) - 1
            own, branches = self._computed(one)
            end = last + 1 + len(own)
            block_ids = one.block_ids[: -(-end // self._block_size)]
            if not one.has_branched:
                # One path: the nodes above its end were computed by the passes before.
                self._clear(one.block_ids, end - 1, end)
                spans.append(TokenSpan(end - 1, 1, block_ids))
                draws.append(len(token_ids))
                token_ids.append(one.token_ids[own[-1]])
                continue
            first = len(token_ids) + 1
            token_ids += [one.task.token_ids[last], *(one.token_ids[node] for node in own)]
            self._clear(one.block_ids, last + 1, end)
            spans.append(TokenSpan(last, 1 + len(own), block_ids, branches=branches))
            places = {node: first + place for place, node in enumerate(own)}
            draws += [places[node] for node in one.newest]
        return self._model.forward(Batch(tuple(token_ids), tuple(spans), tuple(draws)))

    def _computed(self, one: _Growing) -> tuple[list[int], tuple[int, ...]]:
        """Return the newest nodes and all nodes above them, and the index of each one's parent in
        that list."""
        wanted: set[int] = set()
        for node in one.newest:
            while node != ROOT and node not in wanted:
                wanted.add(node)
                node = one.parents[node]
        own = sorted(wanted)
        places = {ROOT: ROOT, **{node: place for place, node in enumerate(own)}}
        return own, tuple(places[one.parents[node]] for node in own)

    def _expand(self, growing: Sequence[_Growing], logits: torch.Tensor, width: int) -> None:
        """Add `width` children to each of the newest nodes. Args: logits: [number of newest nodes,
        V]."""
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
        """Return the scores that the target would compare, if it were this model: [rows, V]
        float32."""
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
            keys = torch.from_numpy(gumbel_noise.row_keys(seeds, samples, positions)).to(
                scores.device
            )
            heat = torch.tensor(temperatures, device=scores.device)[rows, None]
            every = torch.arange(scores.shape[-1], device=scores.device)[None]
            scores[rows] = scores[rows] / heat + gumbel_noise.gumbel(keys[rows, None], every)
        return scores


def _draft(one: _Growing) -> Draft:
    tree = ordered(one.token_ids, one.parents, one.chances, one.tries)
    if one.task.is_drawn:
        return Draft(tree, dict(one.distributions))
    return Draft(tree.best(one.task.num_nodes), {})


def _drawn(
    growing: Sequence[_Growing], logits: torch.Tensor, width: int
) -> dict[int, DrawnChildren | None]:
    """Draw the children of the newest nodes of drawn tasks. Returns: the draws by row."""
    rows: list[int] = []
    draws: list[SamplingRequest] = []
    keys: list[int] = []
    row = 0
    for one in growing:
        if one.task.is_drawn:
            sampling = proposal_sampling(one.task.sampling)
            for place, node in enumerate(one.newest):
                rows.append(row + place)
                draws.append(SamplingRequest(sampling, 0))  # no position: no noise is drawn
                keys.append(random_key(sampling.seed, *one.path(node)))
        row += len(one.newest)
    if not rows:
        return {}
    own = logits if len(rows) == len(logits) else logits[rows]
    children = draw_children(Sampler().distributions(own, draws), keys, width)
    return dict(zip(rows, children, strict=True))


def _note(one: _Growing, parent: int, drawn: DrawnChildren | None) -> tuple[list[int], list[float]]:
    """Record the draws after a node. Returns: its distinct tokens, and their probabilities."""
    if drawn is None:
        return [], []
    one.distributions[one.path(parent), _OWN] = drawn.distribution
    shares: list[float] = []
    for token_id, count in drawn.counts.items():
        shares.append(min(1.0, float(drawn.distribution[token_id])))
        one.tries.append((Try(_OWN, shares[-1]),) * count)
    return list(drawn.counts), shares


def _has_room(one: _Growing, depth: int) -> bool:
    return len(one.token_ids) < one.task.num_nodes and depth < one.task.max_depth


def _by_tree(
    growing: Sequence[_Growing], rows: list[list[int]]
) -> list[tuple[_Growing, list[list[int]]]]:
    """Split the rows of all newest nodes by tree."""
    parts: list[tuple[_Growing, list[list[int]]]] = []
    first = 0
    for one in growing:
        parts.append((one, rows[first : first + len(one.newest)]))
        first += len(one.newest)
    return parts


_NUM_WARM_UP_TOKENS = 4
_MAX_WARM_UP_ROWS = 20
"""Largest number of tokens of a warm-up pass: those of a few sequences with a few accepted tokens
each. On a CPU a matrix product with a new number of rows is compiled when it is first used."""
_UNUSED_KEY: Key = ("", -1)
"""The key of the warm-up's sequence; samples of requests have no index below 0."""
_WARM_UP_SAMPLINGS = (
    (Sampling(max_tokens=1), False),
    (Sampling(max_tokens=1, temperature=1.0), False),
    (Sampling(max_tokens=1, temperature=1.0), True),
)
"""Sampling parameters of the warm-up, with whether children are drawn."""


def warm_up(proposer: Proposer, num_nodes: int) -> None:
    """Make a proposer's first drafts, so that no request waits for compilation and allocation, and
    the controller does not measure them. They are for a made-up sequence that is new, has grown
    by a token, or has grown by more; it is forgotten afterwards.

    Args: num_nodes: largest number of nodes of a tree.
    """
    for sampling, is_drawn in _WARM_UP_SAMPLINGS:
        task = _warm_up_task((0,) * _NUM_WARM_UP_TOKENS, sampling, num_nodes, is_drawn=is_drawn)
        proposer.propose([task])
        proposer.propose([task._replace(token_ids=(0,) * (_NUM_WARM_UP_TOKENS + 1))])
        proposer.forget(_UNUSED_KEY)
    num_tokens = 0
    for num_rows in range(1, _MAX_WARM_UP_ROWS + 1):
        num_tokens += num_rows
        task = _warm_up_task((0,) * num_tokens, _WARM_UP_SAMPLINGS[0][0], num_nodes, max_depth=1)
        proposer.propose([task])
    proposer.forget(_UNUSED_KEY)


def _warm_up_task(
    token_ids: Sequence[int],
    sampling: Sampling,
    num_nodes: int,
    *,
    max_depth: int = sys.maxsize,
    is_drawn: bool = False,
) -> DraftTask:
    return DraftTask(
        _UNUSED_KEY,
        token_ids,
        num_prompt_tokens=_NUM_WARM_UP_TOKENS,
        sampling=sampling,
        sample_index=0,
        num_nodes=num_nodes,
        max_depth=max_depth,
        is_drawn=is_drawn,
    )
