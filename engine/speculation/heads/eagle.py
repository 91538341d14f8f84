"""EagleHead: EAGLE's head (eagle_network.py) or EAGLE-3's (eagle3_network.py) guesses token after
token, level by level of a tree with a configuration <k1, ..., km>, as a draft model does; but what
it goes on from is the target's hidden states.

Its layers have a KV cache of their own, with an entry for every token whose hidden state the target
left here, at the token's place in the sequence: its window. A token that was computed elsewhere, or
found in the prefix cache, left none. The window begins behind the newest such gap, and grows from
there: after a handover at the first token that is computed here. Guesses are worse meanwhile, and
answers the same: the target judges them.

Entry i of a sequence is made of token i + 1 and the hidden state of token i, so that the newest
token, which has no hidden state yet, is in the last one. A tree's nodes are computed anew with each
of its levels, and nothing of them is kept. Engine thread only.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from engine.batch import Batch, Span
from engine.errors import IntegrityError
from engine.kv.memory import KvMemory
from engine.layers.torch_attention import TorchPagedAttention
from engine.sequence import Key
from engine.speculation.draft_cache import DraftCache, Held
from engine.speculation.drafter import Draft, Task
from engine.speculation.heads.children import best_children
from engine.speculation.heads.hidden import Computed, Wants
from engine.speculation.heads.network import Network
from engine.speculation.tree import EMPTY, ROOT, ordered

_Waiting = list[tuple[tuple[int, ...], torch.Tensor]]
"""Entries that are not computed: (tokens [n], features [n, hidden])."""


@dataclass(slots=True)
class _Window:
    """What is known of one sequence."""

    first: int
    """Position of its first entry."""
    num_computed: int = 0
    """Entries whose KV is in the cache."""
    newest: torch.Tensor | None = None
    """[hidden] that came out of the last of them."""
    waiting: _Waiting = field(default_factory=list)

    @property
    def num_waiting(self) -> int:
        return sum(len(token_ids) for token_ids, _ in self.waiting)

    @property
    def end(self) -> int:
        """Position of the next entry."""
        return self.first + self.num_computed + self.num_waiting


@dataclass(slots=True)
class _Growing:
    """One task's tree, parents before children."""

    task: Task
    window: _Window
    held: Held
    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    features: list[torch.Tensor] = field(default_factory=list)
    """[hidden] that each node's entry is made with: what came out at its parent."""
    newest: list[int] = field(default_factory=lambda: [ROOT])
    """Whose children come next."""


class EagleHead:
    """A Drafter (speculation/drafter.py) that ReadsHidden. See the module.

    Args:
        expansion: k1, k2, ...: children at each level.
        memory: its cache, nobody else's.
        context_window: the target's.
        max_num_tokens: entries of one pass; so many wait at most.
    """

    wants = Wants.EVERY

    def __init__(
        self,
        name: str,
        network: Network,
        memory: KvMemory,
        expansion: Sequence[int],
        *,
        context_window: int,
        max_num_tokens: int,
    ) -> None:
        self.name = name
        self.layers = network.layers
        self._network = network
        self._memory = memory
        self._views = memory.layer_views()
        self._block_size = memory.layout.block_size
        self._cache = DraftCache(memory.num_blocks, self._block_size)
        self._expansion = tuple(expansion)
        self._context_window = context_window
        self._max_num_tokens = max_num_tokens
        self._windows: dict[Key, _Window] = {}

    def see(self, computed: Sequence[Computed]) -> None:
        """See ReadsHidden."""
        features = self._network.features(computed)
        for one, own in zip(computed, features, strict=True):
            window = self._windows.get(one.key)
            if window is None or window.end != one.start:
                self.forget(one.key)
                window = self._windows[one.key] = _Window(one.start)
            end = one.start + len(own)
            window.waiting.append((tuple(one.token_ids[one.start + 1 : end + 1]), own))
        # Not for long: features of long prompts are large.
        if sum(window.num_waiting for window in self._windows.values()) > self._max_num_tokens:
            self._catch_up([one.key for one in computed])
        _compact(self._windows.values())

    @torch.inference_mode()
    def propose(self, tasks: Sequence[Task]) -> list[Draft]:
        """See Drafter."""
        self._catch_up([task.key for task in tasks])
        growing = [one for task in tasks if (one := self._begin(task, tasks)) is not None]
        trees = {one.task.key: one for one in growing}
        for depth, width in enumerate(self._expansion):
            growing = [one for one in growing if one.newest and _has_room(one)]
            if not growing:
                break
            if depth == 0:
                made = [one.window.newest for one in growing if one.window.newest is not None]
                features = torch.stack(made)
            else:
                features = self._forward(growing)
            self._expand(growing, features, depth, width)
        drafts: list[Draft] = []
        for task in tasks:
            one = trees.get(task.key)
            tree = EMPTY if one is None else ordered(one.token_ids, one.parents, one.chances)
            drafts.append(Draft(tree.best(task.num_nodes), {}))
        return drafts

    def forget(self, key: Key) -> None:
        """See Drafter."""
        self._windows.pop(key, None)
        self._cache.forget(key)

    def check_integrity(self) -> None:
        """See Drafter."""
        self._cache.check_integrity()
        for key, window in self._windows.items():
            if (window.newest is None) != (window.num_computed == 0):
                raise IntegrityError(f"{key}: {window.num_computed} entries of an EAGLE window")

    # -- what the target computed

    def _catch_up(self, keys: Collection[Key]) -> None:
        """Compute the entries of these sequences that wait."""
        busy = set(keys)
        while True:
            left = self._max_num_tokens
            token_ids: list[int] = []
            features: list[torch.Tensor] = []
            positions: list[int] = []
            spans: list[Span] = []
            taken: list[tuple[_Window, Held, _Waiting]] = []
            for key in keys:
                window = self._windows.get(key)
                if window is None or not window.waiting or left == 0:
                    continue
                held = self._room(key, window, busy)
                if held is None:
                    continue
                own_tokens, own_features, rest = _first(window.waiting, left)
                start, count = window.num_computed, len(own_tokens)
                left -= count
                token_ids += own_tokens
                features.append(own_features)
                positions += range(window.first + start, window.first + start + count)
                spans.append(self._span(held, start, count))
                taken.append((window, held, rest))
            if not spans:
                return
            out = self._pass(token_ids, torch.cat(features), positions, spans)
            ends = itertools.accumulate(span.num_tokens for span in spans)
            newest = [out[end - 1].clone() for end in ends]
            # Nothing can fail any more: before, the books would say what was not computed.
            for (window, held, rest), span, last in zip(taken, spans, newest, strict=True):
                window.num_computed = held.num_tokens = span.end
                window.waiting, window.newest = rest, last

    def _room(self, key: Key, window: _Window, busy: Collection[Key]) -> Held | None:
        """Blocks for all entries and a tree. None: it must begin anew, or there is no room; then it
        keeps nothing, and begins with what is seen next."""
        num_entries = window.num_computed + window.num_waiting
        held = self._cache.hold(key, num_entries + self._num_nodes, busy)
        if held is None:
            self.forget(key)
            return None
        if held.num_tokens != window.num_computed:  # others took its blocks meanwhile
            window.first += window.num_computed
            window.num_computed, window.newest = 0, None
        return held

    @property
    def _num_nodes(self) -> int:
        """Most nodes that are ever computed of one tree."""
        total, level = 0, 1
        for width in self._expansion[:-1]:
            level *= width
            total += level
        return total

    # -- trees

    def _begin(self, task: Task, tasks: Sequence[Task]) -> _Growing | None:
        """None: the newest hidden state is not here. After tokens that a grammar forced, it comes
        with the next step."""
        window = self._windows.get(task.key)
        num_tokens = len(task.token_ids)
        if window is None or window.waiting or window.end != num_tokens - 1:
            return None
        if num_tokens + self._num_nodes > self._context_window:
            return None
        held = self._room(task.key, window, {one.key for one in tasks})
        return None if held is None or window.newest is None else _Growing(task, window, held)

    def _forward(self, growing: Sequence[_Growing]) -> torch.Tensor:
        """What comes out at each tree's newest nodes, tree after tree: [rows, hidden]."""
        token_ids: list[int] = []
        features: list[torch.Tensor] = []
        positions: list[int] = []
        spans: list[Span] = []
        wanted: list[int] = []
        for one in growing:
            nodes = _computed(one)
            places = {ROOT: ROOT, **{node: place for place, node in enumerate(nodes)}}
            branches = tuple(places[one.parents[node]] for node in nodes)
            wanted += [len(token_ids) + places[node] for node in one.newest]
            token_ids += [one.token_ids[node] for node in nodes]
            features += [one.features[node] for node in nodes]
            start = one.window.num_computed
            span = self._span(one.held, start, len(nodes))._replace(branches=branches)
            positions += [one.window.first + position for position in span.positions]
            spans.append(span if span.is_tree else span._replace(branches=()))
        return self._pass(token_ids, torch.stack(features), positions, spans)[wanted]

    def _expand(
        self, growing: Sequence[_Growing], features: torch.Tensor, depth: int, width: int
    ) -> None:
        """Children of all newest nodes.

        Args:
            features: [their number, hidden].
        """
        rows = [(one.task, depth) for one in growing for _ in one.newest]
        logits = self._network.logits(features)
        best = best_children(logits, rows, [width] * len(rows), self._network.token_ids)
        children = iter(zip(best, features, strict=True))
        for one in growing:
            added: list[int] = []
            for parent in one.newest:
                found, feature = next(children)
                above = 1.0 if parent == ROOT else one.chances[parent]
                for token_id, share in found:
                    added.append(len(one.token_ids))
                    one.token_ids.append(token_id)
                    one.parents.append(parent)
                    one.chances.append(above * share)
                    one.features.append(feature)
            one.newest = added

    # -- the network

    def _span(self, held: Held, start: int, count: int) -> Span:
        """Of entries, in the places of its window. Blocks that are entered are cleared: what an
        earlier sequence left there is read with weight 0."""
        size, end = self._block_size, start + count
        for index in range(-(-start // size), -(-end // size)):
            self._memory.clear(held.block_ids[index])
        return Span(start, count, tuple(held.block_ids[: -(-end // size)]))

    @torch.inference_mode()
    def _pass(
        self,
        token_ids: Sequence[int],
        features: torch.Tensor,
        positions: Sequence[int],
        spans: Sequence[Span],
    ) -> torch.Tensor:
        device = features.device
        batch = Batch(tuple(token_ids), tuple(spans), ())
        return self._network.forward(
            torch.tensor(token_ids, device=device),
            features,
            torch.tensor(positions, device=device),
            TorchPagedAttention(batch, self._views, self._block_size),
        )


def _first(waiting: _Waiting, most: int) -> tuple[tuple[int, ...], torch.Tensor, _Waiting]:
    """The first entries that wait, at most so many, and what waits then."""
    token_ids = tuple(token_id for part, _ in waiting for token_id in part)
    hidden = torch.cat([part for _, part in waiting])
    # A copy: the rest may wait for long, and is not to keep the first ones.
    rest = [(token_ids[most:], hidden[most:].clone())] if len(token_ids) > most else []
    return token_ids[:most], hidden[:most], rest


def _compact(windows: Collection[_Window]) -> None:
    """What waits lies in what a step left for several sequences; if the others' part of that is the
    larger one, it is copied, and theirs is free: no more than twice its own bytes is kept."""
    parts = [hidden for window in windows for _, hidden in window.waiting]
    held = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}
    if sum(held.values()) <= 2 * sum(part.nbytes for part in parts):
        return
    for window in windows:
        window.waiting = [(token_ids, hidden.clone()) for token_ids, hidden in window.waiting]


def _has_room(one: _Growing) -> bool:
    return len(one.token_ids) < one.task.num_nodes


def _computed(one: _Growing) -> list[int]:
    """The nodes above and among the newest."""
    wanted: set[int] = set()
    for node in one.newest:
        while node != ROOT and node not in wanted:
            wanted.add(node)
            node = one.parents[node]
    return sorted(wanted)
