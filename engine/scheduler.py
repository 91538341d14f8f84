"""Scheduler: the started sequences, and who of them computes how much in the next step. It gathers
values, asks the pure functions of engine/schedule/, and does what they say with the blocks:

1. `_admit`  who waits gets a place in steps, and blocks if it has none   engine/schedule/admit.py
2. `_plan`   who has a place gets tokens                                 engine/schedule/step.py
3. `_grant`  who has tokens gets the blocks that they need; where there
             are none, somebody loses its own                            engine/schedule/victim.py

Every sequence is in one of four: `queued` (no blocks yet), `waiting` (blocks, no place yet),
`preempted` (lost its blocks), `running` (has a place). Those that are RESERVED or HOLDING are none
of its business. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from operator import attrgetter

from engine.config import EngineConfig
from engine.errors import IntegrityError, NoBlocks
from engine.in_flight import Planned
from engine.kv.cache_manager import KVCacheManager
from engine.line import Line
from engine.metrics import EngineMetrics
from engine.outlook import Following, outlook
from engine.preemptor import Preemptor
from engine.request import STARTED, WITHOUT_BLOCKS, State
from engine.schedule.admit import Admission, Room, admit, admit_ranked
from engine.schedule.compatibility import BatchTraits
from engine.schedule.order import Key, Waiting, policy_of
from engine.schedule.step import Candidate, plan_step
from engine.schedule.victim import Holder, choose_victim
from engine.sequence import Sequence

NUM_LOOKED_AT = 256
"""Of those that wait for their first blocks, as many are looked at in one step: of the highest
priority, who came first. Bounds a step's cost; guessed."""

_NOBODY: Mapping[Key, Planned] = {}

_BY_ORDER = attrgetter("group.order")
_BY_PRIORITY = attrgetter("request.priority")


class Scheduler:
    """See the module."""

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
        self._policy = policy_of(config.policy)
        self._is_preempting = config.preemption != "never"
        self.queued = Line(has_priorities=self._policy != "fcfs")
        self.waiting: dict[Key, Sequence] = {}
        self.preempted: dict[Key, Sequence] = {}
        self.running: dict[Key, Sequence] = {}

    def add(self, sequence: Sequence) -> None:
        """It wants a place: WAITING with its blocks, or QUEUED without."""
        if sequence.state is State.QUEUED:
            self.queued.add(sequence)
        else:
            self.waiting[sequence.key] = sequence

    def add_fork(self, sequence: Sequence, twin: Sequence) -> None:
        """A fork has the place, or waits, as the one it came from does."""
        (self.running if sequence.key in self.running else self.waiting)[twin.key] = twin

    def add_running(self, sequence: Sequence) -> None:
        """It has a place already, or takes that of a beam that is no more."""
        self.running[sequence.key] = sequence

    def remove(self, sequence: Sequence) -> None:
        """It wants nothing any more."""
        self.queued.pop(sequence.key)
        for sequences in (self.running, self.waiting, self.preempted):
            sequences.pop(sequence.key, None)

    @property
    def has_line(self) -> bool:
        """Somebody waits for blocks."""
        return bool(self.queued or self.preempted)

    @property
    def has_preempted(self) -> bool:
        """Somebody who lost its blocks waits for new ones."""
        return bool(self.preempted)

    def has_prompts(self) -> bool:
        """Somebody who has more than its last token to compute waits for a place or for blocks."""
        if self.queued or self.preempted:
            return True
        return any(one.num_pending_tokens > 1 for one in self.waiting.values())

    def has_work(self) -> bool:
        """Whether `next_plan` would plan anything, or wait for bytes on their way. False where all
        blocks are others': a release or abort must come first."""
        if self.running or self.waiting:
            return True
        return bool(self.queued or self.preempted) and bool(self._choose().keys)

    @property
    def is_settled(self) -> bool:
        """Nobody waits for a place or for blocks, and who has a place has one token to compute: the
        next plan is known, unless somebody comes or goes."""
        return not (self.waiting or self.queued or self.preempted) and self._is_decoding

    def has_places(self, num_rows: int) -> bool:
        """So many more rows may take part in steps."""
        num_running = sum(one.group.num_places for one in self.running.values())
        return num_running + num_rows <= self._config.max_num_running

    def next_plan(self, *, is_admitting: bool = True) -> dict[Key, int]:
        """Tokens per sequence, all of which have the blocks for them.

        Args:
            is_admitting: False: nobody gets a place; somebody waits for several at once.
        """
        self._begin_plan(_NOBODY, is_admitting=is_admitting)
        return self._grant(self._plan())

    def plan_after(
        self, live: Mapping[Key, Planned], *, is_admitting: bool = True, takes_prompts: bool = True
    ) -> Following:
        """The step after one that is in flight, by what is known of that one's outcome. Nobody has
        got blocks for it, and nobody loses any.

        Args:
            live: who is in flight.
            is_admitting: as of `next_plan`.
            takes_prompts: False: whoever is let in waits for a plain step, which is planned when
                what is in flight was read.
        Returns: nobody where whoever comes next should wait for blocks that are being filled: it
            shares them once they are.
        """
        ahead_of = live if takes_prompts else _NOBODY
        if not self._begin_plan(ahead_of, is_admitting=is_admitting):
            return Following([], is_decoding=False)
        if self._is_decoding:
            return Following([(one, 1) for one in self.running.values()], is_decoding=True)
        candidates: list[Candidate] = []
        for key, one in self.running.items():
            if one.state is State.SWAPPING:
                continue
            seen = outlook(one, live.get(key))
            if not seen.is_over:
                priority, order = one.request.priority, one.group.order
                candidates.append(
                    Candidate(
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
        return Following(planned, is_decoding=False)

    def _begin_plan(self, live: Mapping[Key, Planned], *, is_admitting: bool) -> bool:
        """False: it should wait for what is in flight."""
        for sequence in list(self.running.values()):
            if sequence.state is State.SWAPPING:
                self._preemptor.bring_back(sequence)
        if is_admitting and (self.waiting or self.queued or self.preempted):
            return self._admit(live)
        return True

    # -- 1. places

    def _admit(self, live: Mapping[Key, Planned]) -> bool:
        """False: nobody was let in, since one of them would miss what is being computed."""
        num_rows = sum(one.group.num_places for one in self.running.values())
        if num_rows >= self._config.max_num_running:
            return True
        admission = self._choose(live)
        if live and self._would_miss(admission.keys, live):
            return False
        for key, num_passes in admission.num_passes.items():
            self._who_waits(key).num_passes += num_passes
        for key in admission.keys:
            sequence = self._who_waits(key)
            if sequence.state in WITHOUT_BLOCKS:
                try:
                    self._cache_manager.allocate_first(sequence.group, sequence)
                except NoBlocks:
                    # Those let in before took what was cached for it: its turn comes again.
                    return True
            if sequence.state is State.QUEUED:
                self._metrics.on_prefix(sequence.num_local_tokens)
            self.remove(sequence)
            self.running[key] = sequence
            if sequence.state is State.PARKED:
                self._preemptor.bring_back(sequence)
            elif sequence.state is not State.WAITING:
                sequence.move(State.WAITING)
        return True

    def _would_miss(self, keys: Iterable[Key], live: Mapping[Key, Planned]) -> bool:
        """The first block that the prefix cache lacks of one of these is being filled."""
        starting = [self._who_waits(key) for key in keys]
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

    def _who_waits(self, key: Key) -> Sequence:
        return next(one for one in (self.waiting, self.queued, self.preempted) if key in one)[key]

    def _choose(self, live: Mapping[Key, Planned] = _NOBODY) -> Admission:
        running = self.running.values()
        num_tokens = self._config.max_num_tokens_per_step
        num_rows = 0
        for one in running:
            num_rows += one.group.num_places
            if not live:
                num_tokens -= 1 if one.state is State.RUNNING else one.num_pending_tokens
                continue
            seen = outlook(one, live.get(one.key))
            if not seen.is_over:
                num_tokens -= 1 if seen.has_drawn else seen.num_pending_tokens
        num_blocks = self._cache_manager.num_available
        if self._is_preempting:
            # Each may need one more soon; else it would take it back. Never below none: who has its
            # blocks already takes none.
            num_blocks = max(0, num_blocks - len(running))
        adapters = frozenset(one.request.adapter for one in running if one.request.adapter)
        room = Room(
            num_blocks=num_blocks,
            num_tokens=num_tokens,
            batch=BatchTraits(num_rows, adapters),
            max_num_rows=self._config.max_num_running,
            max_num_adapters=self._config.max_num_adapters_per_step,
        )
        if num_tokens <= 0 or num_rows >= self._config.max_num_running:
            return Admission((), {})
        values = self._values(self.next_in_line())
        if self._policy == "cache_aware":
            return admit(values, room, self._policy, self._config.max_passes)
        return admit_ranked(values, room, self._policy, self._config.max_passes)

    def next_in_line(self) -> list[Sequence]:
        """Those that are looked at, in the order in which they would be let in if all fitted and
        nothing were cached (order.py:rank)."""
        # Stable sorts that ask for one field each: one sort by `rank` takes thrice as long.
        preempted = sorted(self.preempted.values(), key=_BY_ORDER)
        looked_at = self.queued.first(NUM_LOOKED_AT)
        others = sorted(chain(self.waiting.values(), looked_at), key=_BY_ORDER)
        if self._policy == "fcfs":
            return preempted + others
        return sorted(preempted + others, key=_BY_PRIORITY, reverse=True)

    def _values(self, sequences: Iterable[Sequence]) -> Iterator[Waiting]:
        """One by one: what somebody takes is asked of the prefix cache."""
        for sequence in sequences:
            group, request = sequence.group, sequence.request
            num_blocks, num_matched = 0, sequence.num_computed_tokens
            if sequence.state in WITHOUT_BLOCKS:
                num_blocks, num_matched = self._cache_manager.count_needed(group, sequence)
            yield Waiting(
                key=sequence.key,
                priority=request.priority,
                order=group.order,
                num_tokens=len(sequence.token_ids) - num_matched,
                num_blocks=num_blocks,
                num_places=group.num_places,
                num_matched_tokens=num_matched,
                num_passes=sequence.num_passes,
                is_preempted=sequence.state in (State.PREEMPTED, State.PARKED),
                adapter=request.adapter,
            )

    # -- 2. tokens

    @property
    def _is_decoding(self) -> bool:
        """Each has one token to compute, and will have one then."""
        running = self.running.values()
        return len(running) <= self._config.max_num_tokens_per_step and all(
            one.state is State.RUNNING and len(one.token_ids) == one.num_computed_tokens + 1
            for one in running
        )

    def _plan(self) -> dict[Key, int]:
        if self._is_decoding:
            return dict.fromkeys(self.running, 1)  # as plan_step has it: most steps are so
        return self._plan_step(
            Candidate(
                key,
                len(sequence.token_ids) - sequence.num_computed_tokens,
                sequence.state is State.RUNNING,
                sequence.request.priority,
                sequence.group.order,
                sequence.is_scored,
            )
            for key, sequence in self.running.items()
            if sequence.state is not State.SWAPPING
        )

    def _plan_step(self, candidates: Iterable[Candidate]) -> dict[Key, int]:
        return plan_step(
            candidates,
            num_tokens_budget=self._config.max_num_tokens_per_step,
            max_num_tokens_each=self._config.max_num_tokens_per_request_step,
            policy=self._policy,
        )

    # -- 3. blocks

    def _grant(self, plan: dict[Key, int]) -> dict[Key, int]:
        """Blocks for all of the plan, less what must wait for lack of them. Who matters most takes
        first, so nobody's are taken for one that matters less."""
        planned = list(plan.items())
        if self._is_preempting:
            planned.sort(key=lambda one: self._rank(one[0]))
        for key, num_tokens in planned:
            if len(plan) < len(planned) and key not in plan:
                continue  # a victim
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

    def _holders(self) -> Iterator[Holder]:
        """Whoever has blocks that may be taken."""
        for sequence in chain(self.running.values(), self.waiting.values()):
            if sequence.state in STARTED and not sequence.group.is_whole and sequence.block_ids:
                yield Holder(sequence.key, sequence.request.priority, sequence.group.order)

    def _preempt(self, key: Key) -> None:
        sequence = self.running.pop(key, None) or self.waiting.pop(key)
        self._preemptor.preempt(sequence)
        self.preempted[key] = sequence

    def preempt(self, key: Key) -> bool:
        """Take a sequence's blocks away although nobody needs them. False: it has none that may be
        taken."""
        if key not in {holder.key for holder in self._holders()}:
            return False
        self._preempt(key)
        return True

    def check_integrity(self) -> None:
        """Everybody is in one place, in a state that fits it. Raises: IntegrityError."""
        places = {
            "queued": (self.queued.items(), {State.QUEUED}),
            "waiting": (self.waiting.items(), {State.WAITING}),
            "preempted": (self.preempted.items(), {State.PREEMPTED, State.PARKED}),
            "running": (self.running.items(), STARTED | {State.SWAPPING}),
        }
        seen: set[Key] = set()
        for name, (items, states) in places.items():
            for key, sequence in items:
                if key != sequence.key or key in seen:
                    raise IntegrityError(f"{key} is {name} under another name, or twice")
                if sequence.state not in states:
                    raise IntegrityError(f"{key} is {name}, but {sequence.state.value}")
                seen.add(key)
