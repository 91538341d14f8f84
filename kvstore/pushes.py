"""Pushes: whoever has frames to be read, a store or a lender, WRITEs them into a worker's blocks,
and knows for each push whether it is over.

States of a push: unknown -> moving -> terminal. Asking about an unknown one makes it terminal, so
that a request which is still on its way is refused when it comes: after a "terminal" nothing moves.
The frames of a push are held until it is over, so they cannot be reused under it.

One asyncio loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvstore.blocks import Block
from kvstore.errors import GENERATION, TransferFailed
from kvstore.nixl_agent import NixlAgent, Region, Transfer
from kvstore.nixl_runs import merge_runs
from process.deadline import Deadline
from process.errors import AlreadyExists, InvalidArgument

REMEMBERED = 65_536
"""How many terminal pushes are remembered; a forgotten one is unknown, hence terminal, too."""


@dataclass(frozen=True)
class Target:
    """A worker's blocks as NIXL reaches them."""

    peer: str
    region: Region
    num_blocks: int


@dataclass(frozen=True)
class Frames:
    """Our own frames as NIXL reaches them; `stride_bytes` from one to the next."""

    region: Region
    stride_bytes: int


class Readable(Protocol):
    """What a push needs of the truth about frames; a Store fits it, and a LoanTable."""

    @property
    def frame_bytes(self) -> int: ...
    @property
    def refused(self) -> Counter[str]: ...
    def hold(self, blocks: Sequence[Block]) -> tuple[str, list[bool]]:
        """Keep frames as they are. Returns: an id for `unhold`, and for each block whether it still
        is what it says."""

    def unhold(self, hold_id: str) -> None: ...


@dataclass(frozen=True)
class PushOutcome:
    """terminal: all bytes of all blocks but the `stale` ones have arrived."""

    terminal: bool
    num_bytes: int = 0
    stale: list[int] = field(default_factory=list)


class PushTable:
    """See the module."""

    def __init__(self, source: Readable, frames: Frames, agent: NixlAgent) -> None:
        self._source = source
        self._frames = frames
        self._agent = agent
        self._moving: dict[str, tuple[str, Transfer]] = {}  # push -> (peer, transfer)
        self._terminal: OrderedDict[str, None] = OrderedDict()

    @property
    def num_moving(self) -> int:
        return len(self._moving)

    def is_terminal(self, push_id: str) -> bool:
        """Whether nothing moves for this push, now and later."""
        if push_id in self._moving:
            return False
        self._end(push_id)
        return True

    async def quiet(self, peer: str) -> None:
        """Wait until nothing moves to a peer."""
        while waiting := [t.settled for p, t in self._moving.values() if p == peer]:
            await asyncio.wait(waiting)

    async def push(
        self,
        push_id: str,
        target: Target,
        blocks: Sequence[Block],
        destinations: Sequence[int],
        deadline: Deadline,
    ) -> PushOutcome:
        """Write blocks into the worker's blocks of the same index in `destinations`.

        Raises: InvalidArgument; AlreadyExists for an id that was used; TransferFailed when it ended
            with an error or could not begin. Cancelled or late, it goes on until its pieces under
            way are over.
        """
        if not push_id:
            raise InvalidArgument("push_id", "must be given")
        if len(blocks) != len(destinations):
            raise InvalidArgument("destinations", "one for each block")
        if any(destination >= target.num_blocks for destination in destinations):
            raise InvalidArgument("destinations", f"the region has {target.num_blocks} blocks")
        if push_id in self._moving or push_id in self._terminal:
            raise AlreadyExists(f"push {push_id} was there already")
        hold_id, held = self._source.hold(blocks)
        stale = [index for index, holds in enumerate(held) if not holds]
        self._source.refused[GENERATION] += len(stale)
        try:
            transfer = self._start(target, blocks, destinations, held, deadline)
        except BaseException:  # the agent is closed: nothing moves
            self._source.unhold(hold_id)
            raise
        self._moving[push_id] = (target.peer, transfer)

        def over(_: asyncio.Future[None]) -> None:
            del self._moving[push_id]
            self._end(push_id)
            self._source.unhold(hold_id)

        transfer.settled.add_done_callback(over)
        try:
            error = await asyncio.shield(transfer.done)
        except asyncio.CancelledError:
            transfer.abandon()
            raise
        if error is not None and not isinstance(error, TransferFailed):
            return PushOutcome(terminal=False)
        await asyncio.wait([transfer.settled])  # the hold is let go before the answer is out
        if error is not None:
            raise error
        num_bytes = (len(blocks) - len(stale)) * self._source.frame_bytes
        return PushOutcome(terminal=True, num_bytes=num_bytes, stale=stale)

    def _start(
        self,
        target: Target,
        blocks: Sequence[Block],
        destinations: Sequence[int],
        held: Sequence[bool],
        deadline: Deadline,
    ) -> Transfer:
        own, stride = self._frames.region, self._frames.stride_bytes
        frame_bytes = self._source.frame_bytes
        runs = merge_runs(
            (
                (
                    own.address + block.frame * stride,
                    target.region.address + destination * frame_bytes,
                )
                for block, destination, holds in zip(blocks, destinations, held, strict=True)
                if holds
            ),
            frame_bytes,
        )
        return self._agent.write(target.peer, runs, deadline, local=own, remote=target.region)

    def _end(self, push_id: str) -> None:
        self._terminal[push_id] = None
        while len(self._terminal) > REMEMBERED:
            self._terminal.popitem(last=False)
