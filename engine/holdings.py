"""Holdings: which sequence has which blocks of the device cache: first ones, more as it grows, a
fork's, a preempted one's, and back. Between the sequences on one side and the pool, the prefix tree
and the cache's bytes on the other. Decides nothing: who gets blocks is engine/scheduler.py's.

Copy-on-write: a block that is being filled belongs to one sequence, or to several right after a
fork; the first that is about to write gets a copy, the last one the block itself. Full blocks are
never written again.

What a launch still writes into when its sequence gives it back is held until that is over
(engine/in_flight.py): whoever takes more than is free without it waits for the launch.

Engine thread only. Every block that a sequence or a group's spare list names, or that is lent, is
referenced once for it, and by nothing else (`check_integrity` recomputes that).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from engine.errors import IntegrityError, NoBlocks, WrongState
from engine.group import Group
from engine.in_flight import InFlight
from engine.kept_paths import KeptPaths
from engine.kv.memory import KvMemory
from engine.kv.radix_tree import RadixTree
from engine.outputs import FilledBlock
from engine.parking import Blocks
from engine.request import STARTED, WITHOUT_BLOCKS, State
from engine.sequence import HOLE, Sequence


class Holdings:
    """See the module."""

    def __init__(self, kv: KvMemory, tree: RadixTree, in_flight: InFlight) -> None:
        self.kv = kv
        self.tree = tree
        self.pool = tree.pool
        self.in_flight = in_flight
        self.block_size = kv.layout.block_size
        self.lent: set[int] = set()
        """Blocks of somebody who is no request, referenced once each."""
        self.kept_paths = KeptPaths(kv, in_flight)
        self.num_local_prefix_tokens = 0
        """Prompt tokens whose KV was cached when their request got its first blocks."""

    @property
    def num_available(self) -> int:
        """Blocks that can be taken."""
        num_waited_for = self.in_flight.num_idle_blocks + self.num_for_guesses
        return self.pool.num_available + num_waited_for

    @property
    def num_used(self) -> int:
        """Blocks that somebody has, and nobody else can get."""
        return self.pool.num_referenced - self.num_for_guesses

    @property
    def num_for_guesses(self) -> int:
        """Blocks that are there for the guesses of a begun step alone: free, for who needs them."""
        num_blocks = 0
        for sequence in self.in_flight.growing():
            surplus = self._surplus(sequence)
            if surplus and not sequence.group.is_whole:
                num_blocks += len(surplus) - sum(map(self.pool.is_held, surplus))
        return num_blocks

    def _make_room(self, num_blocks: int) -> None:
        """Have so many that can be taken: by waiting for what is in flight, or else by giving up a
        step that has some for guesses. Neither is done where both would not suffice."""
        num_missing = num_blocks - self.pool.num_available
        if num_missing <= 0:
            return
        num_idle = self.in_flight.num_idle_blocks
        if num_missing > num_idle + self.num_for_guesses:
            return
        if num_idle:
            self.in_flight.settle()
        if num_blocks > self.pool.num_available:
            for sequence in self.in_flight.give_up_step():
                self.shrink(sequence)

    # -- first blocks

    def num_wanted(self, group: Group, sequence: Sequence) -> int:
        """Blocks that a sequence without any must get, and the group's spare ones with them."""
        size = self.block_size
        if not group.is_whole:
            return -(-len(sequence.token_ids) // size)
        return sequence.num_prompt_tokens // size + group.num_rows * group.num_own_blocks

    def count(self, group: Group, sequence: Sequence) -> tuple[int, int]:
        """(free or evictable blocks that `give_first` would use up, tokens that are cached)."""
        num_shared, num_reused = self.tree.match_counts(self._shareable(sequence))
        num_fresh = self.num_wanted(group, sequence) - num_shared
        return num_fresh + num_reused, num_shared * self.block_size

    def next_missing(self, sequence: Sequence) -> bytes | None:
        """Of a sequence without blocks, the chain hash of the first full block that it could share,
        and that is not cached; None: all are, but for what must be computed anyway."""
        hashes = self._shareable(sequence)
        num_shared = self.tree.match_length(hashes)
        return hashes[num_shared] if num_shared < len(hashes) else None

    def give_first(self, group: Group, sequence: Sequence) -> None:
        """Reference blocks for all tokens that the sequence has (all that it may have, if the group
        `is_whole`): those that hold its longest cached prefix, and new ones.

        The shared prefix ends at least one token before its last: that one is computed, to draw the
        next. Raises: NoBlocks, and nothing was taken.
        """
        size = self.block_size
        num_blocks = self.num_wanted(group, sequence)
        block_ids, num_shared = self._reserve(self._shareable(sequence), num_blocks)
        num_kept = num_blocks
        if group.is_whole:
            num_kept = sequence.num_prompt_tokens // size + group.num_own_blocks
            group.spare_block_ids = list(block_ids[num_kept:])
        sequence.block_ids = list(block_ids[:num_kept])
        sequence.block_table = ()
        sequence.num_local_tokens = num_shared * size
        sequence.num_computed_tokens = sequence.num_local_tokens
        sequence.num_cached_blocks = num_shared
        sequence.num_told_blocks = max(sequence.num_told_blocks, num_shared)
        if sequence.num_trusted_blocks < 0:
            sequence.num_trusted_blocks = num_shared
            self.num_local_prefix_tokens += sequence.num_local_tokens
        sequence.is_tail_shared = False

    def _reserve(self, chain_hashes: list[bytes], num_blocks: int) -> tuple[tuple[int, ...], int]:
        try:
            return self.tree.reserve(chain_hashes, num_blocks)
        except NoBlocks:
            num_shared, num_reused = self.tree.match_counts(chain_hashes)
            self._make_room(num_blocks - num_shared + num_reused)
            return self.tree.reserve(chain_hashes, num_blocks)

    def _shareable(self, sequence: Sequence) -> list[bytes]:
        """Chain hashes of the full blocks before the first token whose logits are needed."""
        num_needless = len(sequence.token_ids) - 1
        if sequence.is_scored:
            num_needless = sequence.scored_places(num_needless).start
        num_shareable = num_needless // self.block_size
        if num_shareable:
            sequence.chain_hash(num_shareable - 1, self.block_size)
        return sequence.chain_hashes[:num_shareable]

    def fill_holes(self, sequence: Sequence) -> None:
        """New blocks in place of those quarantined. Raises: NoBlocks, and nothing was taken."""
        if HOLE in sequence.block_ids:
            holes = [index for index, block_id in enumerate(sequence.block_ids) if block_id == HOLE]
            self._make_room(len(holes))
            for index, block_id in zip(holes, self.tree.take(len(holes)), strict=True):
                sequence.block_ids[index] = block_id

    def lend(self, num_blocks: int) -> tuple[int, ...]:
        """Reference blocks for somebody who is no request: at most half of the free ones, and
        nothing is evicted. Returns: at most `num_blocks` ids."""
        block_ids = self.tree.take(min(num_blocks, self.pool.num_free // 2))
        self.lent.update(block_ids)
        return block_ids

    def take_back(self, block_ids: tuple[int, ...]) -> None:
        """End of `lend`. Raises: WrongState for a block that is not lent, or named twice; nothing
        was done."""
        if len(set(block_ids)) < len(block_ids) or not self.lent.issuperset(block_ids):
            raise WrongState(f"blocks {block_ids}: one is not lent, or was named twice")
        self.lent.difference_update(block_ids)
        self.pool.put_back(block_ids)

    def share_cached(self, sequence: Sequence) -> None:
        """Reference what the prefix cache has of a sequence without blocks, and nothing more."""
        block_ids = self.tree.match(self._shareable(sequence))
        self.tree.share(block_ids)
        sequence.block_ids = list(block_ids)
        sequence.num_cached_blocks = len(block_ids)
        sequence.num_local_tokens = len(block_ids) * self.block_size
        sequence.num_computed_tokens = sequence.num_local_tokens

    # -- more blocks

    def num_missing(self, sequence: Sequence, end: int) -> int:
        """Blocks to take before tokens up to `end` can be computed, a copy of a shared one
        included."""
        num_more = -(-end // self.block_size) - len(sequence.block_ids)
        num_missing = max(num_more, 0)
        if sequence.is_tail_shared:
            block_id = sequence.block_ids[sequence.num_computed_tokens // self.block_size]
            sequence.is_tail_shared = self.pool.num_references(block_id) > 1
            num_missing += sequence.is_tail_shared
        return num_missing

    def grow(self, sequence: Sequence, end: int) -> None:
        """Take them: the group's own spare ones, if it `is_whole`. Raises: NoBlocks."""
        group = sequence.group
        num_missing = self.num_missing(sequence, end)
        if num_missing == 0:
            return
        if not group.is_whole:
            self._make_room(num_missing)
            if num_missing > self.pool.num_available:
                raise NoBlocks(f"{num_missing} blocks wanted, {self.pool.num_available} are free")
        if sequence.is_tail_shared:
            num_missing -= 1
            self._own_tail(sequence)
        if group.is_whole:
            spare = group.spare_block_ids
            sequence.block_ids += spare[len(spare) - num_missing :]
            del spare[len(spare) - num_missing :]
        else:
            sequence.block_ids += self.tree.take(num_missing)

    def fit(self, sequence: Sequence, num_guesses: int) -> None:
        """Have blocks for its tokens and so many guesses behind them, and no more: of those that
        the last step's guesses had, as many as there are. Raises: NoBlocks."""
        self.shrink(sequence, num_guesses)
        self.grow(sequence, len(sequence.token_ids) + num_guesses)

    def _own_tail(self, sequence: Sequence) -> None:
        index = sequence.num_computed_tokens // self.block_size
        if sequence.group.is_whole:
            self.pool.put_back((sequence.group.spare_block_ids.pop(),))  # taken again right away
        block_id, source = self.tree.writable(sequence.block_ids[index])
        if source is not None:
            self.kv.copy(source, block_id)
            self.in_flight.has_copied = True
        sequence.block_ids[index] = block_id
        sequence.block_table = ()
        sequence.is_tail_shared = False

    def fork(self, sequence: Sequence, sample_index: int) -> Sequence:
        """Another sample with the same computed tokens in the same blocks."""
        twin = sequence.fork(sample_index)
        num_blocks = -(-sequence.num_computed_tokens // self.block_size)
        del twin.block_ids[num_blocks:]
        self.tree.share(twin.block_ids)
        if sequence.num_computed_tokens % self.block_size:
            sequence.is_tail_shared = twin.is_tail_shared = True
        return twin

    def room(self, sequence: Sequence, *, num_kept_blocks: int) -> int:
        """Tokens after its last known one that may be computed at once: as many as the blocks hold
        that it has, may take of its group's own, or that are free but for `num_kept_blocks`.
        Nothing is evicted for guesses."""
        size = self.block_size
        num_own = len(sequence.block_ids)
        if sequence.group.is_whole:
            num_own = sequence.num_prompt_tokens // size + sequence.group.num_own_blocks
        else:
            num_own += max(0, self.pool.num_free - num_kept_blocks)
        return num_own * size - len(sequence.token_ids)

    def forget_guesses(self, sequence: Sequence) -> None:
        """Blocks that were for guesses go back, and what those left behind the known tokens is
        zero: it may not be numbers, and 0 times NaN is NaN."""
        self.shrink(sequence)
        place = sequence.num_computed_tokens
        if self.kv.tails is not None:
            return  # they left nothing
        if place % self.block_size and self.kv.is_whole:  # other ranks' kernels read no further
            block_id = sequence.block_ids[place // self.block_size]
            self.kv.clear_tokens(block_id, place % self.block_size)

    def _surplus(self, sequence: Sequence, num_guesses: int = 0) -> list[int]:
        num_tokens = len(sequence.token_ids) + num_guesses
        num_kept = max(-(-num_tokens // self.block_size), sequence.num_cached_blocks)
        return sequence.block_ids[num_kept:]

    def shrink(self, sequence: Sequence, num_guesses: int = 0) -> None:
        """Give back blocks that hold none of its tokens, nor of so many guesses behind them: they
        were for others."""
        surplus = self._surplus(sequence, num_guesses)
        if not surplus:
            return
        del sequence.block_ids[-len(surplus) :]
        sequence.block_table = ()
        if sequence.group.is_whole:
            sequence.group.spare_block_ids += reversed(surplus)
        else:
            self.pool.put_back(reversed(surplus))

    # -- content

    def cache_full_blocks(self, sequence: Sequence) -> tuple[FilledBlock, ...]:
        """Offer blocks that became full to the prefix cache. Returns those that no event named
        yet."""
        size = self.block_size
        num_full = sequence.num_computed_tokens // size
        if self.kv.tails is not None:
            # It may also be a former owner's, who gave a block back unfilled: one that was loaded
            # has none of its own.
            for block_id in sequence.block_ids[sequence.num_cached_blocks : num_full]:
                self.kv.tails.close(block_id)
        if sequence.request.beam is not None:
            num_full = min(num_full, sequence.num_prompt_tokens // size)
        if num_full == sequence.num_cached_blocks:
            return ()
        first = sequence.num_cached_blocks
        sequence.chain_hash(num_full - 1, size)  # and all before it
        parent_hash = sequence.chain_hashes[first - 1] if first else b""
        hashes = sequence.chain_hashes[first:num_full]
        block_ids = sequence.block_ids[first:num_full]
        self.tree.insert_chain(parent_hash, hashes, block_ids)
        num_told = max(0, sequence.num_told_blocks - first)
        untold = zip(
            range(first + num_told, num_full), block_ids[num_told:], hashes[num_told:], strict=True
        )
        filled = tuple(map(FilledBlock._make, untold))
        sequence.num_cached_blocks = num_full
        sequence.num_told_blocks = max(sequence.num_told_blocks, num_full)
        return filled

    def distrust(self, sequence: Sequence) -> None:
        """Its logits were not numbers, so its KV may not be either: nobody else shall find it."""
        for block_id in sequence.block_ids[sequence.num_trusted_blocks :]:
            if block_id != HOLE:
                self.tree.forget(block_id)

    def num_resumable(self, num_tokens: int) -> int:
        """Of so many computed tokens, those whose bytes in the blocks are all there is of them: of
        a quantized cache the full blocks', since an unfilled one lies beside (KvMemory.tails)."""
        if self.kv.tails is None:
            return num_tokens
        return num_tokens // self.block_size * self.block_size

    def content(self, sequence: Sequence) -> Blocks:
        """A copy of the blocks that hold its computed tokens, as far as they can go on from it. CPU
        only."""
        num_blocks = -(-self.num_resumable(sequence.num_computed_tokens) // self.block_size)
        return self.kv.host_view[sequence.block_ids[:num_blocks]]

    def fill(self, sequence: Sequence, blocks: Blocks, num_tokens: int) -> None:
        """Write `content` of `num_tokens` tokens back into the blocks that are not found in the
        prefix cache."""
        for index in range(sequence.num_local_tokens // self.block_size, len(blocks)):
            self.kv.host_view[sequence.block_ids[index]] = blocks[index]
        num_tokens = self.num_resumable(num_tokens)
        sequence.num_computed_tokens = max(num_tokens, sequence.num_local_tokens)

    # -- back

    def give_back(self, sequence: Sequence) -> None:
        """Its references end, the tail of the chain to be evicted first."""
        self.in_flight.let_go(sequence)
        self.pool.put_back(reversed(sequence.held_block_ids))
        sequence.block_ids = []
        sequence.block_table = ()
        sequence.is_tail_shared = False

    def make_spare(self, sequence: Sequence) -> None:
        """`give_back` for a sequence of a whole group whose place another takes: blocks that nobody
        else has stay the group's."""
        num_shared = sequence.num_prompt_tokens // self.block_size
        for block_id in sequence.block_ids[num_shared:]:
            if self.pool.num_references(block_id) == 1:
                sequence.group.spare_block_ids.append(block_id)
            else:
                self.pool.put_back((block_id,))
        del sequence.block_ids[num_shared:]
        self.give_back(sequence)

    def give_back_spare(self, group: Group) -> None:
        """What a whole group's live samples cannot need any more, after one of them ended."""
        if not group.spare_block_ids:
            return
        num_kept = len(group.samples) * group.num_own_blocks - self.num_distinct(group)
        self.pool.put_back(group.spare_block_ids[num_kept:])
        del group.spare_block_ids[num_kept:]

    def num_distinct(self, group: Group) -> int:
        """Different blocks that its live samples have after the prompt's full ones."""
        num_shared = len(group.request.prompt_token_ids) // self.block_size
        return len(
            {
                block_id
                for sequence in group.samples.values()
                for block_id in sequence.block_ids[num_shared:]
            }
        )

    # -- invariants

    def check_integrity(self, groups: Mapping[str, Group]) -> None:
        """Recompute every block's class and reference count from the live requests, the blocks that
        samples share, each group's spare blocks and the lent blocks; check the pending steps, too.
        Cheap enough for every step in a test and every idle moment of a worker.

        Args:
            groups: the live requests by id.
        Raises: IntegrityError naming the block or the request.
        """
        references: Counter[int] = Counter(self.lent)
        for group in groups.values():
            references.update(group.spare_block_ids)
            for sequence in group.samples.values():
                references.update(sequence.held_block_ids)
                _check_sequence(sequence, self.block_size)
                self._check_tail(sequence)
            self._check_group(group)
        self.pool.check_integrity(references)
        self.in_flight.check_integrity(
            sequence for group in groups.values() for sequence in group.samples.values()
        )
        self.tree.check_integrity()

    def _check_group(self, group: Group) -> None:
        name = group.request.request_id
        if not group.samples:
            raise IntegrityError(f"{name} is live without samples")
        if not group.is_whole:
            if group.spare_block_ids:
                raise IntegrityError(f"{name} keeps blocks that it was not promised")
            return
        sequence = next(iter(group.samples.values()))
        if sequence.state in WITHOUT_BLOCKS | {State.RESERVED, State.WAITING_FOR_GRAMMAR}:
            return  # no blocks yet, or with holes
        num_rows = len(group.samples) if group.is_forked else group.num_rows
        num_promised = num_rows * group.num_own_blocks
        num_there = len(group.spare_block_ids) + self.num_distinct(group)
        if num_there != num_promised:
            raise IntegrityError(
                f"{name} has {num_there} blocks of its own, {num_promised} promised"
            )

    def _check_tail(self, sequence: Sequence) -> None:
        """In a quantized cache: of the blocks of computed tokens, the unfilled one has a tail, and
        no other."""
        tails, size = self.kv.tails, self.block_size
        if tails is None or sequence.state not in STARTED:
            return
        num_computed = sequence.num_computed_tokens
        num_full = num_computed // size
        name = f"{sequence.request.request_id}/{sequence.sample_index}"
        for block_id in sequence.block_ids[:num_full]:
            if block_id in tails:
                raise IntegrityError(f"block {block_id} of {name} is full and has a tail")
        if num_computed % size and sequence.block_ids[num_full] not in tails:
            raise IntegrityError(f"{name} computed a part of a block that has no tail")


def _check_sequence(sequence: Sequence, block_size: int) -> None:
    name, state = f"{sequence.request.request_id}/{sequence.sample_index}", sequence.state
    if state not in (State.RESERVED, State.WAITING_FOR_GRAMMAR) and HOLE in sequence.block_ids:
        raise IntegrityError(f"{name} is {state.value} and misses a block")
    if state in WITHOUT_BLOCKS and sequence.block_ids:
        raise IntegrityError(f"{name} is {state.value} and has blocks")
    if not 0 <= sequence.num_computed_tokens <= len(sequence.token_ids):
        raise IntegrityError(f"{name} computed more tokens than it has")
    if sequence.num_computed_tokens > len(sequence.block_ids) * block_size:
        raise IntegrityError(f"{name} computed beyond its blocks")
    is_continued = sequence.group.is_continued
    if state in STARTED and sequence.num_pending_tokens < 1 and not is_continued:
        raise IntegrityError(f"{name} is {state.value} with nothing to compute")
