"""InFlight: the launches whose results are not applied yet (DecodesAhead,
engine/models/interface.py), or the plain step that was begun early (engine/runner.py), and the
blocks that are held because of them. It knows no scheduling and no outputs.

A launched step is the engine's next step, computed early: until its results are applied, every
sequence has the state of before. So a sequence may end, be preempted or be detached while a launch
still has a row of it. Then the row is left over: its sample is dropped, and the blocks that it
writes are held (quarantined, engine/kv/block_pool.py) until the launch was read, so that they are
neither allocated nor transferred. Its other blocks are only read, for a sample that is dropped, and
are freed at once.

Held blocks count as available: `settle` frees them by waiting for the launch. So do blocks that
samples of a begun step have for draft tokens: a caller that needs them gives the step up
(`give_up_step`), and it is computed again. No other state of the engine depends on steps in flight.

Invariants: at most two launches are unread, or one begun step has live rows; every live row
computes the first pending tokens of its sequence, all of them if it samples; every block that a
left-over row in an unread launch or step writes is held. Engine thread only.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import NamedTuple, Protocol, cast

from engine.errors import IntegrityError
from engine.kv.block_pool import BlockPool
from engine.models.interface import DecodeRow, DecodesAhead, Launch, LaunchRow, MixedRow
from engine.sampling.metadata import SamplerOutput
from engine.sequence import Key, Sequence

Planned = tuple[Sequence, LaunchRow]


class Begun(Protocol):
    """Protocol of a plain step that was begun."""

    def draws(self) -> list[SamplerOutput]:
        """Wait for the step and return its samples. Called once."""
        ...

    def wait(self) -> None:
        """Wait until the step no longer touches the cache; its samples are dropped."""
        ...


class StepRow(NamedTuple):
    """The part of a begun step for one sample: its last token, and draft tokens after it."""

    key: Key

    position: int
    """Position of the last token."""

    num_tokens: int
    """Number of slots that are written, from that position on."""

    block_ids: tuple[int, ...]
    """The blocks of all tokens up to the last one."""


class FinishedLaunch(NamedTuple):
    """A launch that was read."""

    planned: list[tuple[Sequence, int]]
    """The sequences of its live rows, and the number of tokens that each computed."""

    drawn: list[SamplerOutput]
    """The samples of the rows that sample, in their order."""


class _Flight:
    """One launch: its rows, the live ones among them, and their samples once it was read."""

    __slots__ = ("drawn", "has_prompts", "held", "launch", "live", "rows")

    def __init__(self, launch: Launch, planned: Iterable[Planned], *, has_prompts: bool) -> None:
        self.launch: Launch | None = launch  # None: it was read
        self.live = {row.key: (sequence, row) for sequence, row in planned}
        self.rows = tuple(self.live)
        """Keys of the rows that sample."""
        if has_prompts:
            self.rows = tuple(row.key for _, row in self.live.values() if row.draw is not None)
        self.has_prompts = has_prompts
        self.drawn: dict[Key, SamplerOutput] = {}
        self.held: list[int] = []


class _Step:
    """One begun step: its live rows, and their samples once it was waited for."""

    __slots__ = ("begun", "drawn", "held", "live")

    def __init__(self, begun: Begun, planned: Iterable[tuple[Sequence, StepRow]]) -> None:
        self.begun: Begun | None = begun  # None: it is over
        self.live = {row.key: (sequence, row) for sequence, row in planned}
        self.drawn: list[SamplerOutput] = []
        self.held: list[int] = []


class InFlight:
    """The launches and the begun step whose results are not applied yet. Between two steps it
    contains at most one launch, or one begun step.

    Args: ahead: the model's launches; None: it has none, and no launch is ever in flight.
    """

    def __init__(self, ahead: DecodesAhead | None, pool: BlockPool, block_size: int) -> None:
        self._ahead = ahead
        self._pool = pool
        self._block_size = block_size
        self._flights: deque[_Flight] = deque()
        self._step: _Step | None = None
        self.num_left_over = 0
        """Number of rows whose results were dropped, since start."""
        self.has_copied = False
        """Whether a block was copied behind the work in flight, so that no wait for a sample shows
        when the copy is done, while its source block may be reused. Set by code that copies,
        cleared by code that waits."""

    # -- the step

    @property
    def is_live(self) -> bool:
        """Whether the next step, or a part of it, was launched or begun already."""
        if self._step is not None and self._step.live:
            return True
        return any(flight.live for flight in self._flights)

    def live(self) -> dict[Key, Planned]:
        """Return the live rows of the oldest launch that has any, in order."""
        return next((flight.live for flight in self._flights if flight.live), {})

    def launch(self, planned: list[Planned]) -> None:
        """Launch a step of these rows, all of one kind. At most one earlier launch with live rows
        may be unread; others are waited for. An exception leaves nothing in flight."""
        if self._ahead is None:
            raise IntegrityError("a launch for a model that cannot")
        rows = [row for _, row in planned]
        is_mixed = isinstance(rows[0], MixedRow)
        try:
            if is_mixed:
                launch = self._ahead.launch_mixed(cast("list[MixedRow]", rows))
            else:
                launch = self._ahead.launch(cast("list[DecodeRow]", rows))
        except BaseException:
            self.abandon()
            raise
        self._flights.append(_Flight(launch, planned, has_prompts=is_mixed))
        self._drop_left_over()

    def next_planned(self) -> list[tuple[Sequence, int]]:
        """Return the sequences and numbers of tokens that `take` will return for the oldest launch
        with live rows; empty if it has no prompts."""
        flight = next((flight for flight in self._flights if flight.live), None)
        if flight is None or not flight.has_prompts:
            return []
        return [(sequence, row.num_tokens) for sequence, row in flight.live.values()]

    def take(self) -> FinishedLaunch:
        """Wait for the oldest launch with live rows, and remove it. An exception leaves nothing in
        flight."""
        self._drop_left_over()
        flight = self._flights[0]
        self._read(flight)
        self._flights.popleft()
        live, drawn = flight.live, flight.drawn
        if not flight.has_prompts:  # as below, in half the time: most steps are so
            planned = [(sequence, 1) for sequence, _ in live.values()]
            return FinishedLaunch(planned, [drawn[key] for key in live])
        return FinishedLaunch(
            [(sequence, row.num_tokens) for sequence, row in live.values()],
            [drawn[key] for key in flight.rows if key in live],
        )

    def begin(self, planned: Iterable[tuple[Sequence, StepRow]], begun: Begun) -> None:
        """Add a plain step that was begun. Nothing else may be in flight."""
        if self._flights or self._step is not None:
            raise IntegrityError("a step was begun beside another, or beside a launch")
        self._step = _Step(begun, planned)

    def take_step(self) -> tuple[list[SamplerOutput], Set[Key]]:
        """Wait for the begun step, and remove it. An exception leaves nothing in flight. Returns:
        all its samples, those of rows that are no longer live included; and the keys of the live
        rows."""
        step = self._step
        if step is None:
            raise IntegrityError("no step was begun")
        self._wait_for_step()
        self._step = None
        return step.drawn, step.live.keys()

    def growing(self) -> list[Sequence]:
        """Return the sequences that may have blocks for draft tokens of a begun step."""
        return [] if self._step is None else [one for one, _ in self._step.live.values()]

    def give_up_step(self) -> list[Sequence]:
        """Wait for the begun step, and discard it as if it had never begun. Returns: the sequences
        that may have too many blocks now."""
        growing, step = self.growing(), self._step
        self._step = None
        if step is None:
            return []
        try:
            if step.begun is not None:
                step.begun.wait()
        finally:
            self._unhold(step)
        return growing

    def _wait_for_step(self) -> None:
        step = self._step
        if step is None or step.begun is None:
            return
        try:
            if step.live:
                step.drawn = step.begun.draws()
            else:
                step.begun.wait()
        except BaseException:
            self.abandon()
            raise
        step.begun = None
        self._unhold(step)

    def _drop_left_over(self) -> None:
        """Wait for the oldest launches while they have no live row, except for the only one."""
        while len(self._flights) > 1 and not self._flights[0].live:
            self._read(self._flights[0])
            self._flights.popleft()

    def settle(self) -> bool:
        """Wait for all steps in flight; samples of live rows are kept for the next step. Returns:
        whether blocks were held for them."""
        if not self._flights and self._step is None:
            return False
        has_held = any(one.held for one in self._all())
        self._wait_for_step()
        if self._step is not None and not self._step.live:
            self._step = None
        for flight in tuple(self._flights):
            self._read(flight)
            if not flight.live:
                self._flights.remove(flight)
        return has_held

    def _read(self, flight: _Flight) -> None:
        if flight.launch is None or self._ahead is None:
            return
        try:
            drawn = self._ahead.read(flight.launch)
        except BaseException:
            self.abandon()
            raise
        flight.launch = None
        flight.drawn = dict(zip(flight.rows, drawn, strict=True))
        self._unhold(flight)
        step = self._step
        if step is not None and not step.live:  # queued before the launch, and so over, too
            self._step = None
            self._unhold(step)

    def abandon(self) -> None:
        """Wait for all steps in flight, and discard them as if they had never begun."""
        if self._ahead is not None:
            self._ahead.drain()
        if self._step is not None and self._step.begun is not None:
            # A device that failed touches nothing any more, and says so again at the next step.
            with contextlib.suppress(RuntimeError):
                self._step.begun.wait()
        everything = self._all()
        self._flights, self._step = deque(), None
        for one in everything:
            self._unhold(one)

    def close(self) -> None:
        """Wait for all steps in flight. No launch may follow."""
        if self._all():
            self.abandon()

    # -- blocks

    def let_go(self, sequence: Sequence) -> None:
        """Mark the rows of a sequence that will lose its blocks, or has ended, as left over, and
        hold the blocks that they write. Called before the sequence's references end."""
        for flight in self._flights:
            sequence_there, row = flight.live.get(sequence.key, (None, None))
            if row is None or sequence_there is not sequence:
                continue
            del flight.live[sequence.key]
            self.num_left_over += 1
            if flight.launch is not None:
                self._hold(flight, row)
        step = self._step
        if step is not None and step.live.get(sequence.key, (None,))[0] is sequence:
            _, own = step.live.pop(sequence.key)
            self.num_left_over += 1
            if step.begun is not None:
                self._hold(step, own)

    def _hold(self, flight: _Flight | _Step, row: LaunchRow | StepRow) -> None:
        block_ids = row.block_ids[self._written(row)]
        self._pool.hold(block_ids)
        flight.held += block_ids

    def _written(self, row: LaunchRow | StepRow) -> slice:
        """Return the slice of the row's blocks that it writes."""
        size = self._block_size
        return slice(row.position // size, -(-(row.position + row.num_tokens) // size))

    def _all(self) -> list[_Flight | _Step]:
        return [*self._flights] if self._step is None else [*self._flights, self._step]

    def _unhold(self, flight: _Flight | _Step) -> None:
        held, flight.held = flight.held, []
        if held:
            self._pool.unhold(held)

    def _held(self) -> Counter[int]:
        return Counter(block_id for one in self._all() for block_id in one.held)

    @property
    def num_idle_blocks(self) -> int:
        """Number of blocks that `settle` would free: no request references and no transfer holds
        them."""
        if not any(one.held for one in self._all()):
            return 0
        return sum(
            not self._pool.num_references(block_id) and self._pool.num_holds(block_id) == num_held
            for block_id, num_held in self._held().items()
        )

    # -- accounts

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Check the steps in flight between two steps.

        Args: sequences: all live ones.
        Raises: IntegrityError.
        """
        if len(self._flights) > 1:
            raise IntegrityError(f"{len(self._flights)} launches are in flight between steps")
        known = {sequence.key: sequence for sequence in sequences}
        for key, (sequence, row) in self._live_rows():
            if known.get(key) is not sequence:
                raise IntegrityError(f"{key} is in flight, and is no more")
            position = sequence.num_computed_tokens
            num_left = len(sequence.token_ids) - position - row.num_tokens
            is_over = num_left == 0 if row.draw is not None else num_left > 0
            if row.position != position or not is_over:
                raise IntegrityError(f"{key} is in flight at {row.position}, but at {position}")
            if isinstance(row, DecodeRow) and row.adapter != sequence.group.adapter_slot:
                raise IntegrityError(f"{key} is in flight with adapter slot {row.adapter}")
            written = self._written(row)
            if tuple(sequence.block_ids[written]) != row.block_ids[written]:
                raise IntegrityError(f"{key} is in flight in a block that it lost")
        for flight in self._flights:
            if flight.held and flight.launch is None:
                raise IntegrityError("blocks are held for a launch that was read")
        if self._step is not None:
            self._check_step(self._step, known)
        for block_id, num_held in self._held().items():
            if self._pool.num_holds(block_id) < num_held:
                raise IntegrityError(f"block {block_id} is written by a launch, but not held")

    def _live_rows(self) -> Iterator[tuple[Key, Planned]]:
        for flight in self._flights:
            yield from flight.live.items()

    def _check_step(self, step: _Step, known: Mapping[Key, Sequence]) -> None:
        if self._flights and step.live:
            raise IntegrityError("a step is under way beside a launch")
        if step.held and step.begun is None:
            raise IntegrityError("blocks are held for a step that is over")
        for key, (sequence, row) in step.live.items():
            if known.get(key) is not sequence:
                raise IntegrityError(f"{key} is in a step, and is no more")
            if row.position != sequence.num_computed_tokens or sequence.num_pending_tokens != 1:
                raise IntegrityError(f"{key} is in a step at {row.position}, and is elsewhere")
            written = self._written(row)
            if tuple(sequence.block_ids[written]) != row.block_ids[written]:
                raise IntegrityError(f"{key} is in a step in a block that it lost")
