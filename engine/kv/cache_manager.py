"""KVCacheManager: allocates, shares and frees the KV blocks of sequences. It stands between the
sequences on one side and the block pool, the prefix cache and the cache's bytes on the other.
Which sequence gets blocks is decided by engine/scheduler.py.

Copy-on-write: an unfilled block belongs to one sequence, or to several right after a fork. The
first of them that is about to write gets a copy, the last one the block itself. Full blocks are
never written again.

A block that a pending step still writes when its sequence frees it is held until that step is over
(engine/in_flight.py). A caller that needs more blocks than are free without those waits for it.

Engine thread only. Every block that a sequence or a group's spare list names, or that is lent, is
referenced once for it, and by nothing else (`check_integrity` recomputes that). A draft token's KV
that `keep_accepted` was asked to move is not in its place before `compact_accepted_kv`, and no
output names its block before that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Values

from engine.errors import IntegrityError, NoBlocks, WrongState
from engine.in_flight import InFlight
from engine.kv.memory import KvMemory
from engine.kv.prefix_cache import PrefixCache
from engine.outputs import FilledBlock
from engine.parking import Blocks
from engine.request import STARTED, WITHOUT_BLOCKS, RequestState
from engine.sequence import HOLE, Sequence
from engine.sequence_group import Group


class KVCacheManager:
    """Allocates, shares and frees the KV blocks of all sequences.

    Args: kv: the device cache; prefix_cache: the prefix cache, with its block pool; in_flight: the
        pending steps.
    """

    def __init__(self, kv: KvMemory, prefix_cache: PrefixCache, in_flight: InFlight) -> None:
        self.kv = kv
        self.prefix_cache = prefix_cache
        self.pool = prefix_cache.pool
        self.in_flight = in_flight
        self.block_size = kv.layout.block_size
        self.lent: set[int] = set()
        """Blocks that `lend_blocks` returned, which no request owns; each is referenced once."""
        self._moves: list[tuple[int, int, int, int]] = []
        """Moves that `compact_accepted_kv` will do: (source block, slot, target block, slot)."""
        self.num_local_prefix_tokens = 0
        """Number of prompt tokens, summed over requests, whose KV was cached when the request got
        its first blocks."""

    @property
    def num_available(self) -> int:
        """The number of blocks that can be allocated, those that pending steps will free
        included."""
        num_waited_for = self.in_flight.num_idle_blocks + self.num_draft_blocks
        return self.pool.num_available + num_waited_for

    @property
    def num_used(self) -> int:
        """The number of referenced blocks, without those of draft tokens that other sequences can
        get."""
        return self.pool.num_referenced - self.num_draft_blocks

    @property
    def num_draft_blocks(self) -> int:
        """The number of blocks that hold only draft tokens of a begun step: they are freed when a
        sequence needs blocks and too few others are available."""
        num_blocks = 0
        for sequence in self.in_flight.growing():
            surplus = self._surplus(sequence)
            if surplus and not sequence.group.is_whole:
                num_blocks += len(surplus) - sum(map(self.pool.is_held, surplus))
        return num_blocks

    def _make_room(self, num_blocks: int) -> None:
        """Make `num_blocks` allocatable, if possible: wait for the pending step, then give up a
        begun step that has blocks for draft tokens. Does neither if both together would not
        suffice."""
        num_missing = num_blocks - self.pool.num_available
        if num_missing <= 0:
            return
        num_idle = self.in_flight.num_idle_blocks
        if num_missing > num_idle + self.num_draft_blocks:
            return
        if num_idle:
            self.in_flight.settle()
        if num_blocks > self.pool.num_available:
            for sequence in self.in_flight.give_up_step():
                self.free_draft_blocks(sequence)

    # -- first blocks

    def num_required(self, group: Group, sequence: Sequence) -> int:
        """Return the number of blocks to allocate for a sequence without any, the group's spare
        ones included."""
        size = self.block_size
        if not group.is_whole:
            return -(-len(sequence.token_ids) // size)
        return sequence.num_prompt_tokens // size + group.num_rows * group.num_own_blocks

    def count_needed(self, group: Group, sequence: Sequence) -> tuple[int, int]:
        """Return (free or evictable blocks that `allocate_first` would use, tokens that are
        cached)."""
        num_shared, num_reused = self.prefix_cache.match_counts(self._shareable(sequence))
        num_fresh = self.num_required(group, sequence) - num_shared
        return num_fresh + num_reused, num_shared * self.block_size

    def next_uncached_hash(self, sequence: Sequence) -> bytes | None:
        """Return the chain hash of the first full block that a sequence without blocks could share
        and that is not cached; None if all of them are cached."""
        hashes = self._shareable(sequence)
        num_shared = self.prefix_cache.match_length(hashes)
        return hashes[num_shared] if num_shared < len(hashes) else None

    def allocate_first(self, group: Group, sequence: Sequence) -> None:
        """Allocate blocks for all tokens of the sequence (of a group that `is_whole`: for all
        tokens that its samples can have): those of the longest cached prefix, and new ones.

        The shared prefix ends at least one token before the sequence's last token, which must be
        computed to sample the next one. Raises: NoBlocks; no block is allocated then.
        """
        size = self.block_size
        num_blocks = self.num_required(group, sequence)
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
            return self.prefix_cache.reserve(chain_hashes, num_blocks)
        except NoBlocks:
            num_shared, num_reused = self.prefix_cache.match_counts(chain_hashes)
            self._make_room(num_blocks - num_shared + num_reused)
            return self.prefix_cache.reserve(chain_hashes, num_blocks)

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
        """Allocate blocks in place of the HOLE entries that `quarantine` left. Raises: NoBlocks; no
        block is allocated then."""
        if HOLE in sequence.block_ids:
            holes = [index for index, block_id in enumerate(sequence.block_ids) if block_id == HOLE]
            self._make_room(len(holes))
            for index, block_id in zip(holes, self.prefix_cache.take(len(holes)), strict=True):
                sequence.block_ids[index] = block_id

    def lend_blocks(self, num_blocks: int) -> tuple[int, ...]:
        """Allocate scratch blocks for a caller that is not a request, without evicting any: at most
        half of the free blocks. Returns: at most `num_blocks` ids."""
        block_ids = self.prefix_cache.take(min(num_blocks, self.pool.num_free // 2))
        self.lent.update(block_ids)
        return block_ids

    def return_blocks(self, block_ids: tuple[int, ...]) -> None:
        """Free blocks that `lend_blocks` returned. Raises: WrongState for a block that is not lent
        or is named twice; no block is freed then."""
        if len(set(block_ids)) < len(block_ids) or not self.lent.issuperset(block_ids):
            raise WrongState(f"blocks {block_ids}: one is not lent, or was named twice")
        self.lent.difference_update(block_ids)
        self.pool.put_back(block_ids)

    def share_cached(self, sequence: Sequence) -> None:
        """Share the cached prefix with a sequence without blocks, and allocate no new blocks."""
        block_ids = self.prefix_cache.match(self._shareable(sequence))
        self.pool.share(block_ids)
        sequence.block_ids = list(block_ids)
        sequence.num_cached_blocks = len(block_ids)
        sequence.num_local_tokens = len(block_ids) * self.block_size
        sequence.num_computed_tokens = sequence.num_local_tokens

    # -- more blocks

    def num_missing(self, sequence: Sequence, end: int) -> int:
        """Return the number of blocks to allocate before tokens up to position `end` (exclusive)
        can be computed, the copy of a shared tail block included."""
        num_more = -(-end // self.block_size) - len(sequence.block_ids)
        num_missing = max(num_more, 0)
        if sequence.is_tail_shared:
            block_id = sequence.block_ids[sequence.num_computed_tokens // self.block_size]
            sequence.is_tail_shared = self.pool.num_references(block_id) > 1
            num_missing += sequence.is_tail_shared
        return num_missing

    def allocate_slots(self, sequence: Sequence, end: int) -> None:
        """Allocate the blocks for tokens up to position `end` (exclusive), from the group's spare
        blocks if it `is_whole`. Raises: NoBlocks."""
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
            sequence.block_ids += self.prefix_cache.take(num_missing)

    def fit_draft_blocks(self, sequence: Sequence, num_guesses: int) -> None:
        """Allocate or free blocks so that the sequence has exactly those of its tokens and of
        `num_guesses` draft tokens after them; blocks of earlier draft tokens are reused. Raises:
        NoBlocks."""
        self.free_draft_blocks(sequence, num_guesses)
        self.allocate_slots(sequence, len(sequence.token_ids) + num_guesses)

    def _own_tail(self, sequence: Sequence) -> None:
        index = sequence.num_computed_tokens // self.block_size
        if sequence.group.is_whole:
            self.pool.put_back((sequence.group.spare_block_ids.pop(),))  # allocated again below
        block_id, source = self.prefix_cache.writable(sequence.block_ids[index])
        if source is not None:
            self.kv.copy(source, block_id)
            self.in_flight.has_copied = True
        sequence.block_ids[index] = block_id
        sequence.block_table = ()
        sequence.is_tail_shared = False

    def fork(self, sequence: Sequence, sample_index: int) -> Sequence:
        """Create another sample that shares the blocks of the computed tokens (copy-on-write)."""
        twin = sequence.fork(sample_index)
        num_blocks = -(-sequence.num_computed_tokens // self.block_size)
        del twin.block_ids[num_blocks:]
        self.pool.share(twin.block_ids)
        if sequence.num_computed_tokens % self.block_size:
            sequence.is_tail_shared = twin.is_tail_shared = True
        return twin

    def max_draft_tokens(self, sequence: Sequence, *, num_kept_blocks: int) -> int:
        """Return how many draft tokens have room after the sequence's last token: in its own
        blocks, in its group's spare ones, or in free ones, `num_kept_blocks` of which stay free.
        No block is evicted for draft tokens."""
        size = self.block_size
        num_own = len(sequence.block_ids)
        if sequence.group.is_whole:
            num_own = sequence.num_prompt_tokens // size + sequence.group.num_own_blocks
        else:
            num_own += max(0, self.pool.num_free - num_kept_blocks)
        return num_own * size - len(sequence.token_ids)

    def discard_draft_blocks(self, sequence: Sequence) -> None:
        """Free the blocks of draft tokens, and zero the slots after the computed tokens in the tail
        block: their KV may be NaN, and 0 times NaN is NaN."""
        self.free_draft_blocks(sequence)
        place = sequence.num_computed_tokens
        if self.kv.tails is not None:
            return  # draft tokens leave nothing in a quantized cache
        if place % self.block_size and self.kv.is_whole:  # other ranks' kernels read no further
            block_id = sequence.block_ids[place // self.block_size]
            self.kv.clear_tokens(block_id, place % self.block_size)

    def _surplus(self, sequence: Sequence, num_guesses: int = 0) -> list[int]:
        num_tokens = len(sequence.token_ids) + num_guesses
        num_kept = max(-(-num_tokens // self.block_size), sequence.num_cached_blocks)
        return sequence.block_ids[num_kept:]

    def free_draft_blocks(self, sequence: Sequence, num_guesses: int = 0) -> None:
        """Free the blocks after those of the sequence's tokens and of its next `num_guesses` draft
        tokens."""
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
        """Insert blocks that became full into the prefix cache. Returns: those that no output has
        reported yet."""
        size = self.block_size
        num_full = sequence.num_computed_tokens // size
        if self.kv.tails is not None:
            # A loaded block has no tail of its own, but one may be left of a former owner that
            # freed the block unfilled.
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
        self.prefix_cache.insert(parent_hash, hashes, block_ids)
        num_told = max(0, sequence.num_told_blocks - first)
        unreported = zip(
            range(first + num_told, num_full), block_ids[num_told:], hashes[num_told:], strict=True
        )
        filled = tuple(map(FilledBlock._make, unreported))
        sequence.num_cached_blocks = num_full
        sequence.num_told_blocks = max(sequence.num_told_blocks, num_full)
        return filled

    def uncache(self, sequence: Sequence) -> None:
        """Remove the sequence's own blocks from the prefix cache. Called when its logits are NaN or
        infinite, so that its KV may be, too."""
        own = sequence.block_ids[sequence.num_trusted_blocks :]
        self.prefix_cache.forget([block_id for block_id in own if block_id != HOLE])

    def num_resumable(self, num_tokens: int) -> int:
        """Return how many of `num_tokens` computed tokens can be restored from the blocks: all of
        them, or in a quantized cache those of full blocks, since unfilled blocks lie in
        KvMemory.tails."""
        if self.kv.tails is None:
            return num_tokens
        return num_tokens // self.block_size * self.block_size

    def num_computed_before_last(self, sequence: Sequence, num_tokens: int) -> int:
        """Return how many tokens stay computed if the last one of a step is to be computed again:
        those before it. In a quantized cache a step that fills a block leaves the unquantized
        values of its tokens nowhere, so all of its tokens in that block are computed again.

        Args:
            num_tokens: of the sequence in the step, which is not counted as computed yet.
        """
        start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + num_tokens
        if self.kv.tails is None or end % self.block_size:
            return end - 1
        return max(start, end - self.block_size)

    def copy_out(self, sequence: Sequence) -> Blocks:
        """Copy the KV blocks of the sequence's computed tokens, up to `num_resumable`, to other
        host memory. CPU cache only."""
        num_blocks = -(-self.num_resumable(sequence.num_computed_tokens) // self.block_size)
        return self.kv.host_view[sequence.block_ids[:num_blocks]]

    def copy_in(self, sequence: Sequence, blocks: Blocks, num_tokens: int) -> None:
        """Write the blocks that `copy_out` returned for `num_tokens` tokens back into the
        sequence's blocks, except those found in the prefix cache."""
        for index in range(sequence.num_local_tokens // self.block_size, len(blocks)):
            self.kv.host_view[sequence.block_ids[index]] = blocks[index]
        num_tokens = self.num_resumable(num_tokens)
        sequence.num_computed_tokens = max(num_tokens, sequence.num_local_tokens)

    # -- quarantine: blocks that a transfer may still touch stay out of use until it is over
    # (engine/kv/block_pool.py), whatever becomes of their request

    def quarantine(self, group: Group, block_ids: tuple[int, ...]) -> None:
        """Hold blocks of one request that a transfer may still touch (see LLMEngine.quarantine); a
        reserved request loses them and has HOLE in their place. Raises: WrongState for a block
        that is not the request's own or is named twice; no block is held then."""
        is_reserved = group.state is RequestState.RESERVED
        sequence = next(iter(group.samples.values()))
        first = sequence.num_local_tokens // self.block_size if is_reserved else 0
        own = {block_id: first + i for i, block_id in enumerate(sequence.block_ids[first:])}
        for sample in group.samples.values():
            if not is_reserved:
                own.update(dict.fromkeys(sample.block_ids, 0))
        for block_id, num_named in Counter(block_ids).items():
            if block_id == HOLE or block_id not in own or num_named > 1:
                name = group.request.request_id
                raise WrongState(f"block {block_id} is not {name}'s own, or was named twice")
        self.pool.hold(block_ids)
        if is_reserved:
            for block_id in block_ids:
                sequence.block_ids[own[block_id]] = HOLE
            self.pool.put_back(block_ids)

    def hold_cached(self, chain_hashes: Values[bytes], first: int) -> tuple[int, ...]:
        """Hold the blocks from index `first` on of a chain's longest cached prefix. Returns: their
        ids, in order."""
        block_ids = self.prefix_cache.match(chain_hashes, first)
        self.pool.hold(block_ids)
        return block_ids

    # -- accepted draft tokens

    def keep_accepted(self, block_ids: Values[int], first: int, nodes: Values[int]) -> None:
        """Record that the KV of accepted nodes of a token tree moves to the slots of their
        positions. `compact_accepted_kv` moves it, and must be called before an output names the
        blocks. In a quantized cache the KV moves at once, because a block that it fills is
        cached at once.

        Args:
            block_ids: the blocks of the tree's sequence.
            first: the position of the tree's first node, and of the first accepted token.
            nodes: the indices of the accepted nodes, the root's child first.
        """
        size = self.block_size
        if self.kv.tails is not None:
            self.kv.tails.keep(block_ids, first, nodes)
            self.in_flight.has_copied = self.in_flight.has_copied or len(nodes) > 0
            return
        for place, node in enumerate(nodes):
            if place != node:
                source, target = first + node, first + place
                self._moves.append(
                    (
                        *(block_ids[source // size], source % size),
                        *(block_ids[target // size], target % size),
                    )
                )

    def compact_accepted_kv(self) -> None:
        """Move the KV that `keep_accepted` recorded since the last call, of all sequences in one
        operation."""
        if self._moves:
            self.kv.move_tokens(self._moves)
            self._moves = []
            # On a device the move is queued after the sampling, so no wait for sampled tokens says
            # when it is over.
            self.in_flight.has_copied = True

    # -- free

    def free(self, sequence: Sequence) -> None:
        """Free the sequence's blocks, in an order that evicts the tail of its chain first."""
        self.in_flight.let_go(sequence)
        self.pool.put_back(reversed(sequence.held_block_ids))
        sequence.block_ids = []
        sequence.block_table = ()
        sequence.is_tail_shared = False

    def free_to_spare(self, sequence: Sequence) -> None:
        """Free the blocks of a sequence that another sample of its whole group replaces: blocks
        that no other sequence references become spare blocks of the group."""
        num_shared = sequence.num_prompt_tokens // self.block_size
        for block_id in sequence.block_ids[num_shared:]:
            if self.pool.num_references(block_id) == 1:
                sequence.group.spare_block_ids.append(block_id)
            else:
                self.pool.put_back((block_id,))
        del sequence.block_ids[num_shared:]
        self.free(sequence)

    def free_spare(self, group: Group) -> None:
        """Free the spare blocks of a whole group that its live samples cannot need any more. Called
        when a sample has ended."""
        if not group.spare_block_ids:
            return
        num_kept = len(group.samples) * group.num_own_blocks - self.num_distinct(group)
        self.pool.put_back(group.spare_block_ids[num_kept:])
        del group.spare_block_ids[num_kept:]

    def num_distinct(self, group: Group) -> int:
        """Return the number of different blocks after the prompt's full blocks that the group's
        live samples have."""
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
        samples share, each group's spare blocks and the lent blocks, and check the pending
        steps.

        Args: groups: the live requests by id.
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
        self.prefix_cache.check_integrity()

    def _check_group(self, group: Group) -> None:
        name = group.request.request_id
        if not group.samples:
            raise IntegrityError(f"{name} is live without samples")
        if not group.is_whole:
            if group.spare_block_ids:
                raise IntegrityError(f"{name} keeps blocks that it was not promised")
            return
        sequence = next(iter(group.samples.values()))
        if sequence.state in WITHOUT_BLOCKS | {
            RequestState.RESERVED,
            RequestState.WAITING_FOR_GRAMMAR,
        }:
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
    if (
        state not in (RequestState.RESERVED, RequestState.WAITING_FOR_GRAMMAR)
        and HOLE in sequence.block_ids
    ):
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
