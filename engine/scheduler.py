"""Scheduler: which sequences compute how many tokens in the next step.

1. `_admit`  a waiting sequence gets a place in the steps, and blocks if it has none
2. `_plan`   a sequence with a place gets tokens; prefill, a chunk of it, and decode differ in their
             number only
3. `_grant`  a sequence with tokens gets the blocks for them; if there are none left, another
             sequence is preempted

The class keeps the sequences and applies the decisions. The policy is pure functions over values:
`admit`, `may_share_batch`, `plan_step`, `choose_victim`.

| policy      | order of admission                                                           |
|-------------|------------------------------------------------------------------------------|
| fcfs        | first come, first served                                                     |
| priority    | the higher priority, then first come, first served                           |
| cache_aware | the higher priority, then sequences that were passed too often, then the     |
|             | longest cached prefix, then first come, first served                         |

A sequence is passed if a later one of no higher priority is admitted before it: because its prefix
is cached, or because it fits where the earlier one does not. Each pass is counted, and a sequence
that was passed `max_passes` times is not passed again: no sequence starves behind others of its own
priority. Source of the cache-aware order: Zheng et al. 2024 (SGLang), section 3; the ageing is
ours.

Every sequence is in one of four places: `queued` (no blocks yet), `waiting` (blocks, no place yet),
`preempted` (lost its blocks), `running` (has a place). RESERVED and HOLDING sequences are in none
of them. The class is for the engine thread only; the functions for any thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from operator import attrgetter
from typing import Literal, NamedTuple, cast

from engine.config import EngineConfig
from engine.errors import IntegrityError, NoBlocks
from engine.in_flight import Planned
from engine.kv.cache_manager import KVCacheManager
from engine.metrics import EngineMetrics
from engine.models.interface import LaunchRow
from engine.preemption import Preemptor
from engine.request import STARTED, WITHOUT_BLOCKS, RequestState
from engine.sequence import Key, Sequence

SchedulingPolicy = Literal["fcfs", "priority", "cache_aware"]

NUM_LOOKED_AT = 256
"""Largest number of queued sequences considered in one step: those of the highest priority that
came first. It bounds the cost of a step; guessed."""

MAX_PROMPT_ROWS = 256
"""Largest number of prompt tokens of one step whose log probabilities are reported. Each needs a
row of logits: 67 MB of bfloat16 for all of them with a vocabulary of 131,072. Guessed: with more
tokens, a GPU's step takes time in proportion to them."""

_EMPTY: Mapping[Key, Planned] = {}

_BY_ORDER = attrgetter("group.order")
_BY_PRIORITY = attrgetter("request.priority")


class Scheduler:
    """The started sequences, and the plan of the next step."""

    def __init__(
        self,
        config: EngineConfig,
        cache_manager: KVCacheManager,
        preemptor: Preemptor,
        metrics: EngineMetrics,
    ) -> None:
        self._config = config
        self._cache_manager = cache_manager
        self._preemptor = preemptor
        self._metrics = metrics
        self._policy = cast(SchedulingPolicy, config.policy)  # EngineConfig has checked it
        self._is_preempting = config.preemption != "never"
        self.queued = RequestQueue(has_priorities=self._policy != "fcfs")
        self.waiting: dict[Key, Sequence] = {}
        self.preempted: dict[Key, Sequence] = {}
        self.running: dict[Key, Sequence] = {}

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for a place: WAITING with its blocks, or QUEUED without."""
        if sequence.state is RequestState.QUEUED:
            self.queued.add(sequence)
        else:
            self.waiting[sequence.key] = sequence

    def add_fork(self, sequence: Sequence, twin: Sequence) -> None:
        """Put a fork where its source is: among the running or the waiting sequences."""
        (self.running if sequence.key in self.running else self.waiting)[twin.key] = twin

    def add_running(self, sequence: Sequence) -> None:
        """Add a sequence that has a place already: that of a beam that was dropped."""
        self.running[sequence.key] = sequence

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence from whatever place it has."""
        self.queued.pop(sequence.key)
        for sequences in (self.running, self.waiting, self.preempted):
            sequences.pop(sequence.key, None)

    @property
    def has_queued(self) -> bool:
        """Whether a sequence waits for blocks."""
        return bool(self.queued or self.preempted)

    @property
    def has_preempted(self) -> bool:
        """Whether a preempted sequence waits for blocks."""
        return bool(self.preempted)

    def has_prompts(self) -> bool:
        """Whether a sequence with more than one token to compute waits for a place or for
        blocks."""
        if self.queued or self.preempted:
            return True
        return any(one.num_pending_tokens > 1 for one in self.waiting.values())

    def has_work(self) -> bool:
        """Whether `next_plan` would plan anything, or wait for a swap. False if all blocks belong
        to reserved or held requests: a release or abort must come first."""
        if self.running or self.waiting:
            return True
        return bool(self.queued or self.preempted) and bool(self._choose().keys)

    @property
    def is_settled(self) -> bool:
        """Whether no sequence waits for a place or for blocks and each running one has one token to
        compute: then the next plan is known, unless a sequence is added or removed."""
        return not (self.waiting or self.queued or self.preempted) and self._is_decoding

    def has_places(self, num_rows: int) -> bool:
        """Whether there are places for `num_rows` more rows."""
        num_running = sum(one.group.num_places for one in self.running.values())
        return num_running + num_rows <= self._config.max_num_running

    def next_plan(self, *, is_admitting: bool = True) -> dict[Key, int]:
        """Plan a step. Returns: the number of tokens of each sequence, all of which have the blocks
        for them.

        Args:
            is_admitting: False: no sequence gets a place, because a request waits for several
                places at once.
        """
        self._begin_plan(_EMPTY, is_admitting=is_admitting)
        return self._grant(self._plan())

    def plan_after(
        self, live: Mapping[Key, Planned], *, is_admitting: bool = True, takes_prompts: bool = True
    ) -> NextPlan:
        """Plan the step after the pending one, by what is known of that one's outcome. Allocates no
        blocks for it, and preempts no sequence.

        Args:
            live: the sequences of the pending step.
            is_admitting: as for `next_plan`.
            takes_prompts: False: a sequence that is admitted takes part in a plain step, which is
                planned after the pending one was read.
        Returns: an empty plan if the next sequence should wait for blocks that are being filled,
            because it can share them afterwards.
        """
        ahead_of = live if takes_prompts else _EMPTY
        if not self._begin_plan(ahead_of, is_admitting=is_admitting):
            return NextPlan([], is_decoding=False)
        if self._is_decoding:
            return NextPlan([(one, 1) for one in self.running.values()], is_decoding=True)
        candidates: list[RunningSequence] = []
        for key, one in self.running.items():
            if one.state is RequestState.SWAPPING:
                continue
            seen = predict(one, live.get(key))
            if not seen.is_over:
                priority, order = one.request.priority, one.group.order
                candidates.append(
                    RunningSequence(
                        key,
                        seen.num_pending_tokens,
                        seen.has_drawn,
                        priority,
                        order,
                        one.is_scored,
                    )
                )
        plan = self._plan_step(candidates)
        planned = [(self.running[key], num_tokens) for key, num_tokens in plan.items()]
        return NextPlan(planned, is_decoding=False)

    def _begin_plan(self, live: Mapping[Key, Planned], *, is_admitting: bool) -> bool:
        """Start a plan. Returns: False if it should wait for the pending step."""
        for sequence in list(self.running.values()):
            if sequence.state is RequestState.SWAPPING:
                self._preemptor.bring_back(sequence)
        if is_admitting and (self.waiting or self.queued or self.preempted):
            return self._admit(live)
        return True

    # -- 1. places

    def _admit(self, live: Mapping[Key, Planned]) -> bool:
        """Admit waiting sequences. Returns: False if no sequence was admitted, because one of them
        could share blocks that are being computed."""
        num_rows = sum(one.group.num_places for one in self.running.values())
        if num_rows >= self._config.max_num_running:
            return True
        admission = self._choose(live)
        if live and self._would_miss(admission.keys, live):
            return False
        for key, num_passes in admission.num_passes.items():
            self._find_waiting(key).num_passes += num_passes
        for key in admission.keys:
            sequence = self._find_waiting(key)
            if sequence.state in WITHOUT_BLOCKS:
                try:
                    self._cache_manager.allocate_first(sequence.group, sequence)
                except NoBlocks:
                    # Sequences admitted before it took what was cached for it: it is tried again in
                    # the next step.
                    return True
            if sequence.state is RequestState.QUEUED:
                self._metrics.on_prefix(sequence.num_local_tokens)
            self.remove(sequence)
            self.running[key] = sequence
            if sequence.state is RequestState.PARKED:
                self._preemptor.bring_back(sequence)
            elif sequence.state is not RequestState.WAITING:
                sequence.move(RequestState.WAITING)
        return True

    def _would_miss(self, keys: Iterable[Key], live: Mapping[Key, Planned]) -> bool:
        """Whether the pending step fills the first block that the prefix cache lacks of one of
        these."""
        starting = [self._find_waiting(key) for key in keys]
        starting = [one for one in starting if one.state in WITHOUT_BLOCKS]
        if not starting:
            return False
        size = self._cache_manager.block_size
        filling: set[bytes] = set()
        for sequence, row in live.values():
            first, end = row.position // size, (row.position + row.num_tokens) // size
            if first < end:
                sequence.chain_hash(end - 1, size)  # and all before it
                filling.update(sequence.chain_hashes[first:end])
        if not filling:
            return False
        return any(self._cache_manager.next_uncached_hash(one) in filling for one in starting)

    def _find_waiting(self, key: Key) -> Sequence:
        return next(one for one in (self.waiting, self.queued, self.preempted) if key in one)[key]

    def _choose(self, live: Mapping[Key, Planned] = _EMPTY) -> AdmissionResult:
        running = self.running.values()
        num_tokens = self._config.max_num_tokens_per_step
        num_rows = 0
        for one in running:
            num_rows += one.group.num_places
            if not live:
                num_tokens -= 1 if one.state is RequestState.RUNNING else one.num_pending_tokens
                continue
            seen = predict(one, live.get(one.key))
            if not seen.is_over:
                num_tokens -= 1 if seen.has_drawn else seen.num_pending_tokens
        num_blocks = self._cache_manager.num_available
        if self._is_preempting:
            # Each running sequence may soon need one more block, and would preempt to get it. Not
            # below 0, because a sequence that has its blocks takes none.
            num_blocks = max(0, num_blocks - len(running))
        adapters = frozenset(one.request.adapter for one in running if one.request.adapter)
        capacity = FreeCapacity(
            num_blocks=num_blocks,
            num_tokens=num_tokens,
            batch=BatchTraits(num_rows, adapters),
            max_num_rows=self._config.max_num_running,
            max_num_adapters=self._config.max_num_adapters_per_step,
        )
        if num_tokens <= 0 or num_rows >= self._config.max_num_running:
            return AdmissionResult((), {})
        values = self._values(self.next_in_line())
        if self._policy == "cache_aware":
            return admit(values, capacity, self._policy, self._config.max_passes)
        return admit_ranked(values, capacity, self._policy, self._config.max_passes)

    def next_in_line(self) -> list[Sequence]:
        """The waiting sequences to consider, in the order in which they would be admitted if all
        fitted and nothing were cached (`rank`)."""
        # Stable sorts that ask for one field each: one sort by `rank` takes three times as long.
        preempted = sorted(self.preempted.values(), key=_BY_ORDER)
        looked_at = self.queued.first(NUM_LOOKED_AT)
        others = sorted(chain(self.waiting.values(), looked_at), key=_BY_ORDER)
        if self._policy == "fcfs":
            return preempted + others
        return sorted(preempted + others, key=_BY_PRIORITY, reverse=True)

    def precompute_block_hashes(self, planned: Iterable[tuple[Sequence, int]]) -> None:
        """Make chain hashes while the device computes a step: of the blocks that the step fills,
        and of waiting prompts. To be called after the step is queued, before its tokens are waited
        for.

        Hashes follow from tokens that are known whatever is sampled, so no result depends on
        whether they were made here: a caller that needs a missing one makes it
        (Sequence.chain_hash). Of waiting prompts no more tokens are hashed than the step computes,
        so that a short step does not wait for the hashes.

        Args:
            planned: (sequence, number of its tokens that the step computes).
        Raises: whatever a request's `block_hasher` raises.
        """
        size, num_tokens_left = self._cache_manager.block_size, 0
        for sequence, num_tokens in planned:
            num_tokens_left += num_tokens
            num_full = (sequence.num_computed_tokens + num_tokens) // size
            if sequence.request.beam is not None:
                num_full = min(num_full, sequence.num_prompt_tokens // size)
            if num_full > len(sequence.chain_hashes):
                sequence.chain_hash(num_full - 1, size)  # and all before it
        if not self.has_queued:
            return
        for sequence in self.next_in_line():
            if sequence.state not in WITHOUT_BLOCKS:
                continue
            num_known = len(sequence.chain_hashes)
            # As many as KVCacheManager.allocate_first looks up: the last token is left out.
            num_wanted = (len(sequence.token_ids) - 1) // size - num_known
            num_more = min(num_wanted, num_tokens_left // size)
            if num_more > 0:
                sequence.chain_hash(num_known + num_more - 1, size)
                num_tokens_left -= num_more * size
            if num_tokens_left < size:
                return

    def _values(self, sequences: Iterable[Sequence]) -> Iterator[WaitingSequence]:
        """Iterate over the waiting sequences as values, one by one, because each needs look-ups in
        the prefix cache."""
        for sequence in sequences:
            group, request = sequence.group, sequence.request
            num_blocks, num_matched = 0, sequence.num_computed_tokens
            if sequence.state in WITHOUT_BLOCKS:
                num_blocks, num_matched = self._cache_manager.count_needed(group, sequence)
            yield WaitingSequence(
                key=sequence.key,
                priority=request.priority,
                order=group.order,
                num_tokens=len(sequence.token_ids) - num_matched,
                num_blocks=num_blocks,
                num_places=group.num_places,
                num_matched_tokens=num_matched,
                num_passes=sequence.num_passes,
                is_preempted=sequence.state in (RequestState.PREEMPTED, RequestState.PARKED),
                adapter=request.adapter,
            )

    # -- 2. tokens

    @property
    def _is_decoding(self) -> bool:
        """Whether each running sequence has one token to compute, and will have one after it."""
        running = self.running.values()
        return len(running) <= self._config.max_num_tokens_per_step and all(
            one.state is RequestState.RUNNING and len(one.token_ids) == one.num_computed_tokens + 1
            for one in running
        )

    def _plan(self) -> dict[Key, int]:
        if self._is_decoding:
            return dict.fromkeys(self.running, 1)  # what plan_step returns; most steps are so
        return self._plan_step(
            RunningSequence(
                key,
                len(sequence.token_ids) - sequence.num_computed_tokens,
                sequence.state is RequestState.RUNNING,
                sequence.request.priority,
                sequence.group.order,
                sequence.is_scored,
            )
            for key, sequence in self.running.items()
            if sequence.state is not RequestState.SWAPPING
        )

    def _plan_step(self, candidates: Iterable[RunningSequence]) -> dict[Key, int]:
        return plan_step(
            candidates,
            num_tokens_budget=self._config.max_num_tokens_per_step,
            max_num_tokens_each=self._config.max_num_tokens_per_request_step,
            policy=self._policy,
        )

    # -- 3. blocks

    def _grant(self, plan: dict[Key, int]) -> dict[Key, int]:
        """Allocate the blocks for the plan; sequences for which there are none leave it. The most
        important sequence is served first, so no sequence is preempted for a less important
        one."""
        planned = list(plan.items())
        if self._is_preempting:
            planned.sort(key=lambda one: self._rank(one[0]))
        for key, num_tokens in planned:
            if len(plan) < len(planned) and key not in plan:
                continue  # preempted above
            sequence = self.running[key]
            end = sequence.num_computed_tokens + num_tokens
            if end <= len(sequence.block_ids) * self._cache_manager.block_size:
                if not sequence.is_tail_shared:
                    continue
            while not self._has_room(sequence, end):
                victim = choose_victim(self._holders(), self._policy)
                if victim is None:
                    raise IntegrityError(f"no blocks for {key}, which was promised its own")
                plan.pop(victim, None)
                self._preempt(victim)
                if victim == key:
                    break
            else:
                self._cache_manager.allocate_slots(sequence, end)
        return plan

    def _rank(self, key: Key) -> tuple[int, int, int]:
        sequence = self.running[key]
        priority = 0 if self._policy == "fcfs" else -sequence.request.priority
        return (priority, sequence.group.order, key[1])

    def _has_room(self, sequence: Sequence, end: int) -> bool:
        if sequence.group.is_whole:
            return True
        num_missing = self._cache_manager.num_missing(sequence, end)
        return num_missing <= self._cache_manager.num_available

    def _holders(self) -> Iterator[BlockHolder]:
        """The sequences that may be preempted."""
        for sequence in chain(self.running.values(), self.waiting.values()):
            if sequence.state in STARTED and not sequence.group.is_whole and sequence.block_ids:
                yield BlockHolder(sequence.key, sequence.request.priority, sequence.group.order)

    def _preempt(self, key: Key) -> None:
        sequence = self.running.pop(key, None) or self.waiting.pop(key)
        self._preemptor.preempt(sequence)
        self.preempted[key] = sequence

    def preempt(self, key: Key) -> bool:
        """Preempt a sequence although its blocks are not needed. Returns: False if it has no blocks
        that may be taken."""
        if key not in {holder.key for holder in self._holders()}:
            return False
        self._preempt(key)
        return True

    def check_integrity(self) -> None:
        """Check that every sequence is in one place and in a state that fits it. Raises:
        IntegrityError."""
        places = {
            "queued": (self.queued.items(), {RequestState.QUEUED}),
            "waiting": (self.waiting.items(), {RequestState.WAITING}),
            "preempted": (self.preempted.items(), {RequestState.PREEMPTED, RequestState.PARKED}),
            "running": (self.running.items(), STARTED | {RequestState.SWAPPING}),
        }
        seen: set[Key] = set()
        for name, (items, states) in places.items():
            for key, sequence in items:
                if key != sequence.key or key in seen:
                    raise IntegrityError(f"{key} is {name} under another name, or twice")
                if sequence.state not in states:
                    raise IntegrityError(f"{key} is {name}, but {sequence.state.value}")
                seen.add(key)


class RequestQueue:
    """Sequences that wait for their first blocks, by priority and then first come, first served.
    Looking at the first of them costs the same, however many there are.

    Args:
        has_priorities: False: priorities are ignored.
    """

    def __init__(self, *, has_priorities: bool) -> None:
        self._has_priorities = has_priorities
        self._levels: dict[int, dict[Key, Sequence]] = {}
        self._level_of: dict[Key, int] = {}

    def add(self, sequence: Sequence) -> None:
        """Append a sequence to those of its priority."""
        level = sequence.request.priority if self._has_priorities else 0
        self._levels.setdefault(level, {})[sequence.key] = sequence
        self._level_of[sequence.key] = level

    def pop(self, key: Key) -> Sequence | None:
        """Remove a sequence. Returns: None if it is not queued."""
        level = self._level_of.pop(key, None)
        if level is None:
            return None
        sequence = self._levels[level].pop(key)
        if not self._levels[level]:
            del self._levels[level]
        return sequence

    def first(self, num: int) -> Iterator[Sequence]:
        """Iterate over the first `num` sequences in order."""
        levels = (self._levels[level] for level in sorted(self._levels, reverse=True))
        return islice(chain.from_iterable(one.values() for one in levels), num)

    def items(self) -> Iterator[tuple[Key, Sequence]]:
        """Iterate over all sequences, in no particular order."""
        return chain.from_iterable(one.items() for one in self._levels.values())

    def __getitem__(self, key: Key) -> Sequence:
        return self._levels[self._level_of[key]][key]

    def __contains__(self, key: object) -> bool:
        return key in self._level_of

    def __len__(self) -> int:
        return len(self._level_of)


class WaitingSequence(NamedTuple):
    """A sequence that waits for a place in the steps, and maybe for blocks."""

    key: Key
    priority: int
    order: int
    """Number of its `start` or `submit` call."""

    num_tokens: int
    """Number of tokens to compute before the next one can be sampled."""

    num_blocks: int = 0
    """Free or evictable blocks that it needs; 0 if it has its blocks already."""

    num_places: int = 1
    """Rows that it will have in a batch: more than one if it forks into samples or beams."""

    num_matched_tokens: int = 0
    """Its tokens whose KV is cached or computed."""

    num_passes: int = 0
    is_preempted: bool = False
    """Whether it was preempted, so that no other sequence of its priority is admitted before it."""

    adapter: str = ""


def is_aged(waiting: WaitingSequence, max_passes: int) -> bool:
    """Whether no other sequence may pass this one any more."""
    return waiting.is_preempted or waiting.num_passes >= max_passes


def rank(
    waiting: WaitingSequence, policy: SchedulingPolicy, max_passes: int
) -> tuple[int, int, int, int, int]:
    """Sort key of waiting sequences: the first is admitted first."""
    priority = 0 if policy == "fcfs" else -waiting.priority
    aged = is_aged(waiting, max_passes)
    num_matched = waiting.num_matched_tokens if policy == "cache_aware" and not aged else 0
    is_last = policy == "cache_aware" and not aged
    return (
        priority,
        0 if waiting.is_preempted else 1,
        1 if is_last else 0,
        -num_matched,
        waiting.order,
    )


def is_pass(waiting: WaitingSequence, first: WaitingSequence, policy: SchedulingPolicy) -> bool:
    """Whether `waiting` is passed if `first` is admitted before it."""
    if policy != "fcfs" and first.priority > waiting.priority:
        return False
    if waiting.is_preempted != first.is_preempted:
        return waiting.is_preempted
    return first.order > waiting.order


class BatchTraits(NamedTuple):
    """The running sequences."""

    num_rows: int
    adapters: frozenset[str]
    """Names of the adapters, without "" (no adapter)."""


def may_share_batch(
    batch: BatchTraits, *, num_rows: int, adapter: str, max_num_rows: int, max_num_adapters: int
) -> bool:
    """Whether a request may join the batch. Sampling parameters, grammars and seeds are per row,
    and positions and blocks per sequence, so only two things count: the number of rows, since each
    must get its token in every step, and the number of different adapters, since each costs every
    layer another pair of small products.

    Args:
        num_rows: those that the request has after it has forked into samples or beams.
        max_num_adapters: 0: no bound.
    """
    if batch.num_rows + num_rows > max_num_rows:
        return False
    if not adapter or adapter in batch.adapters or max_num_adapters == 0:
        return True
    return len(batch.adapters) < max_num_adapters


class FreeCapacity(NamedTuple):
    """The capacity that is available for sequences to be admitted."""

    num_blocks: int
    """Free or evictable blocks, less those that are kept for running sequences."""

    num_tokens: int
    """Number of tokens of the step's budget that running sequences leave. A sequence that is
    admitted gets at least one."""

    batch: BatchTraits
    max_num_rows: int
    max_num_adapters: int = 0


@dataclass(frozen=True)
class AdmissionResult:
    """The sequences that `admit` chose, and those that they passed."""

    keys: tuple[Key, ...]
    """The admitted sequences, in order."""

    num_passes: Mapping[Key, int]
    """Number of times that each of the other sequences was passed by these; sequences that were not
    passed are left out."""


def admit(
    waiting: Iterable[WaitingSequence],
    capacity: FreeCapacity,
    policy: SchedulingPolicy,
    max_passes: int,
) -> AdmissionResult:
    """Choose the waiting sequences that get a place, and blocks, now.

    All are tried in the order of `rank`. One that does not fit is skipped, and a later one that
    fits passes it, until it was passed `max_passes` times: from then on no sequence that needs what
    it lacks is admitted before it. (A sequence that has its blocks may still pass one that lacks
    only blocks: it takes none, and frees some when it ends.)

    The admitted sequences fit into `capacity` together.
    """
    ranked = sorted(waiting, key=lambda one: rank(one, policy, max_passes))
    return admit_ranked(ranked, capacity, policy, max_passes)


def admit_ranked(
    ranked: Iterable[WaitingSequence],
    capacity: FreeCapacity,
    policy: SchedulingPolicy,
    max_passes: int,
) -> AdmissionResult:
    """Choose sequences as `admit` does, from sequences sorted by `rank`.

    Args: ranked: read one by one, only until no further sequence can be admitted; for "cache_aware"
        all at once, because there a later one's cached prefix can go first.
    """
    num_blocks, num_tokens, batch = capacity.num_blocks, capacity.num_tokens, capacity.batch
    keys: list[Key] = []
    passes: Counter[Key] = Counter()
    lacks_only_blocks: set[Key] = set()
    # Sequences that may be passed: those that did not fit and, for "cache_aware", the later ones.
    left: dict[Key, WaitingSequence] = {}
    if policy == "cache_aware":
        ranked = tuple(ranked)
        left = {one.key: one for one in ranked}

    def may_go(one: WaitingSequence) -> bool:
        return all(
            other.num_passes + passes[other.key] < max_passes and not other.is_preempted
            for other in left.values()
            if is_passed_by(other, one)
        )

    def is_passed_by(other: WaitingSequence, one: WaitingSequence) -> bool:
        is_harmless = one.num_blocks == 0 and other.key in lacks_only_blocks
        return is_pass(other, one, policy) and not is_harmless

    candidates = iter(ranked)
    while num_tokens > 0 and batch.num_rows < capacity.max_num_rows:
        one = next(candidates, None)
        if one is None:
            break
        can_share = may_share_batch(
            batch,
            num_rows=one.num_places,
            adapter=one.adapter,
            max_num_rows=capacity.max_num_rows,
            max_num_adapters=capacity.max_num_adapters,
        )
        if not (can_share and one.num_blocks <= num_blocks and may_go(one)):
            if can_share and one.num_blocks > num_blocks:
                lacks_only_blocks.add(one.key)
            left[one.key] = one
            continue
        left.pop(one.key, None)
        passes.update(other.key for other in left.values() if is_passed_by(other, one))
        keys.append(one.key)
        num_blocks -= one.num_blocks
        num_tokens -= one.num_tokens
        adapters = batch.adapters | {one.adapter} if one.adapter else batch.adapters
        batch = BatchTraits(batch.num_rows + one.num_places, adapters)
    admitted = set(keys)
    return AdmissionResult(
        tuple(keys), {key: n for key, n in passes.items() if key not in admitted}
    )


class RunningSequence(NamedTuple):
    """A sequence that has a place in the steps."""

    key: Key
    num_pending_tokens: int
    """Number of tokens known but not computed, at least 1. The next token is sampled after the last
    one."""
    has_drawn: bool
    priority: int
    order: int
    """Number of its `start` or `submit` call."""
    is_scored: bool = False
    """Log probabilities of its prompt are wanted."""


def plan_step(
    sequences: Iterable[RunningSequence],
    *,
    num_tokens_budget: int,
    max_num_tokens_each: int = 0,
    policy: SchedulingPolicy = "priority",
) -> dict[Key, int]:
    """Choose the number of tokens of each sequence for one step, in the order in which they lie in
    the batch.

    Decodes first: a sequence that has sampled a token gets one token in every step, and the rest of
    its pending tokens (text that its grammar forced) if the budget allows. The remaining budget
    goes to prompts in the order of the policy, the last one cut to a chunk. Every value is at least
    1 and at most the sequence's pending tokens; a prompt's is at most `max_num_tokens_each` (0: no
    bound), and all scored prompts together have at most MAX_PROMPT_ROWS; the sum is at most the
    budget. If there are no more sequences than tokens in the budget, each that has sampled a token
    is in the plan.
    """
    decodes: list[RunningSequence] = []
    prompts: list[RunningSequence] = []
    for sequence in sequences:
        (decodes if sequence.has_drawn else prompts).append(sequence)
    plan = {sequence.key: 1 for sequence in decodes[:num_tokens_budget]}
    num_tokens_left = num_tokens_budget - len(plan)
    for sequence in decodes:
        if sequence.num_pending_tokens > 1 and sequence.key in plan:
            num_more = min(sequence.num_pending_tokens - 1, num_tokens_left)
            plan[sequence.key] += num_more
            num_tokens_left -= num_more
    if policy == "fcfs":
        prompts.sort(key=lambda one: one.order)
    else:
        prompts.sort(key=lambda one: (-one.priority, one.order))
    bound = max_num_tokens_each or num_tokens_budget
    num_rows_left = MAX_PROMPT_ROWS
    for sequence in prompts:
        if num_tokens_left == 0:
            break
        num_tokens = min(sequence.num_pending_tokens, num_tokens_left, bound)
        if sequence.is_scored:
            num_tokens = min(num_tokens, num_rows_left)
            num_rows_left -= num_tokens
            if num_tokens == 0:
                continue
        plan[sequence.key] = num_tokens
        num_tokens_left -= num_tokens
    return plan


class BlockHolder(NamedTuple):
    """A sequence that may be preempted."""

    key: Key
    priority: int
    order: int
    """Number of its `start` or `submit` call; a preemption does not change it."""


def choose_victim(holders: Iterable[BlockHolder], policy: SchedulingPolicy) -> Key | None:
    """Choose the sequence to preempt: that of the lowest priority, among equals the one that came
    last, and of one request its last sample. So the most important running sequence is never
    preempted; it ends and frees its blocks, which excludes a livelock
    (tests/unit/engine/test_preemption.py). Returns: None if there is none."""
    victim = max(
        holders,
        key=lambda one: (0 if policy == "fcfs" else -one.priority, one.order, one.key[1]),
        default=None,
    )
    return None if victim is None else victim.key


class NextPlan(NamedTuple):
    """The plan of the step after the pending one."""

    planned: list[tuple[Sequence, int]]
    """The sequences of the step, each with the number of its tokens. One that the pending step is
    known to end may be among them."""

    is_decoding: bool
    """Whether each sequence has sampled a token and has one token to compute in both steps."""


class PredictedSequence(NamedTuple):
    """The predicted state of a sequence after the pending step: the number of its tokens, and an
    end by length, are known whatever the tokens are; an end by a token is not."""

    num_computed_tokens: int

    num_tokens: int
    """Known tokens, and the one that is being sampled."""

    has_drawn: bool

    is_over: bool
    """Whether its length ends it."""

    @property
    def num_pending_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens


def predict(sequence: Sequence, planned: Planned | None) -> PredictedSequence:
    """Predict the state of `sequence` after the pending step.

    Args: planned: its part of that step; None: it has none, and does not change.
    """
    num_computed, num_tokens = sequence.num_computed_tokens, len(sequence.token_ids)
    has_drawn = sequence.state is RequestState.RUNNING
    if planned is None:
        return PredictedSequence(num_computed, num_tokens, has_drawn, False)
    row = planned[1]
    is_drawing = row.draw is not None
    return PredictedSequence(
        num_computed + row.num_tokens,
        num_tokens + is_drawing,
        has_drawn or is_drawing,
        samples_last_token(sequence, row),
    )


def samples_last_token(sequence: Sequence, row: LaunchRow) -> bool:
    """Whether the row samples the last token that its sequence may have."""
    if row.draw is None:
        return False
    num_drawn = row.draw.position + 1 - sequence.num_prompt_tokens
    return num_drawn >= sequence.group.max_output_tokens
