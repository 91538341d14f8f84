"""BlockPusher: the sending side of NIXL. A store or a lender WRITEs its frames into the KV blocks
of a worker that asked for them (a push), and knows for each push whether it is over.

States of a push: unknown -> moving -> terminal. Asking about an unknown one makes it terminal, so
that a request which is still on its way is refused when it comes: after a "terminal" nothing moves.
The frames of a push are held until it is over, so they cannot be reused under it.

One asyncio loop.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvstore.block_refs import Block
from kvstore.errors import GENERATION, TransferFailed
from kvstore.transport.nixl_agent import NixlAgent, Region, Transfer, merge_runs
from process.background_tasks import complete_despite_cancel
from process.deadline import Deadline
from process.rpc_errors import AlreadyExists, FailedPrecondition, Internal, InvalidArgument

REMEMBERED = 65_536
"""Most terminal pushes that are remembered; a forgotten one is unknown, and so counts as terminal,
too."""

START_S = 30.0
"""Longest time to start NIXL."""

_CLOSE_S = 1.0


@dataclass(frozen=True)
class PeerBlocks:
    """A worker's blocks as it describes them when it attaches: its agent's metadata and its one
    registered region."""

    metadata: bytes
    region: Region
    num_blocks: int
    block_bytes: int


@dataclass(frozen=True)
class Target:
    """A worker's blocks as our NIXL agent reaches them."""

    peer: str
    region: Region
    num_blocks: int


@dataclass(frozen=True)
class Frames:
    """The frames of the sending process as its NIXL agent reaches them; `stride_bytes` from one to
    the next."""

    region: Region
    stride_bytes: int


class Readable(Protocol):
    """The owner of frames that a push reads; `BlockStore` and `ExportedBlocks` are."""

    @property
    def frame_bytes(self) -> int:
        """The size of a frame without padding."""

    @property
    def refused(self) -> Counter[str]:
        """Blocks that were asked for and not given, counted by reason."""

    def hold(self, blocks: Sequence[Block]) -> tuple[str, list[bool]]:
        """Keep frames as they are until `unhold`. Returns: an id for `unhold`, and for each block
        whether it still is what its reference says."""

    def unhold(self, hold_id: str) -> None:
        """End a `hold`."""


@dataclass(frozen=True)
class PushOutcome:
    """The outcome of a push. terminal: all bytes of all blocks but the `stale` ones have arrived;
    else the push may still write."""

    terminal: bool
    num_bytes: int = 0
    stale: list[int] = field(default_factory=list)


class BlockPusher:
    """The NIXL agent of a store or lender, made for the first peer; the peer of each attachment;
    and the pushes to them.

    Life of a peer: `meet` -> `add` -> pushes -> it is not among those that `keep` names: it is
    forgotten once nothing moves to it any more.
    """

    def __init__(
        self,
        source: Readable,
        frames: Frames,
        net_devices: str,
        *,
        name: str,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """Args: name: the agent's name begins with it. before: called in the agent's thread before
        memory is registered (NixlAgent.register)."""
        self.name = f"{name}-{secrets.token_hex(16)}"
        """The name of the NIXL agent."""
        self.metadata = b""
        self._source = source
        self._frames = frames
        self._net_devices = net_devices
        self._before = before
        self._starting = asyncio.Lock()
        self._agent: NixlAgent | None = None
        self._targets: dict[str, Target] = {}  # by attachment
        self._moving: dict[str, tuple[str, Transfer]] = {}  # push -> (peer, transfer)
        self._terminal: OrderedDict[str, None] = OrderedDict()
        self._forgetting: set[asyncio.Task[None]] = set()

    @property
    def num_moving(self) -> int:
        """The number of pushes under way."""
        return len(self._moving)

    # -- peers

    async def meet(self, peer: PeerBlocks) -> Target:
        """Make a worker's NIXL agent known to ours, which is started for the first worker.

        Returns: the worker's blocks, for `add`.
        Raises: InvalidArgument when its region is too small for its blocks, or it has none;
            FailedPrecondition when NIXL cannot be used here, or refuses the worker's metadata.
        """
        if peer.num_blocks < 1 or peer.region.num_bytes < peer.num_blocks * peer.block_bytes:
            raise InvalidArgument("region_num_blocks", "more blocks than the region holds, or none")
        async with self._starting:
            if self._agent is None:
                starting = asyncio.ensure_future(self._start())
                await complete_despite_cancel(starting)
                starting.result()
        if self._agent is None:
            raise Internal("NIXL was started and is not there")
        adding = asyncio.ensure_future(self._agent.add_peer(peer.metadata))
        try:
            await complete_despite_cancel(adding)
        except asyncio.CancelledError:  # the caller has left, and no other knows the peer
            if adding.exception() is None:
                self._forget_later(adding.result())
            raise
        return Target(adding.result(), peer.region, peer.num_blocks)

    def add(self, attachment_id: str, target: Target) -> None:
        """Enter the target that the pushes of an attachment go to."""
        self._targets[attachment_id] = target

    def keep(self, attachment_ids: Collection[str]) -> None:
        """Forget the peers of all attachments but these, each once nothing moves to it."""
        for attachment_id in self._targets.keys() - set(attachment_ids):
            self._forget_later(self._targets.pop(attachment_id).peer)

    async def close(self, timeout_s: float) -> bool:
        """End the NIXL agent. Returns: whether nothing moved any more in time; else the agent ends
        by itself when that is over."""
        if self._agent is None:
            return True
        return await self._agent.close(Deadline.after(timeout_s))

    # -- pushes

    def close_push(self, push_id: str) -> bool:
        """Whether no byte of this push moves, now and later: a push that is not known is refused
        from here on."""
        if push_id in self._moving:
            return False
        self._end(push_id)
        return True

    async def push(
        self,
        attachment_id: str,
        push_id: str,
        blocks: Sequence[Block],
        destinations: Sequence[int],
        deadline: Deadline,
    ) -> PushOutcome:
        """Write blocks into the worker's blocks of the same index in `destinations`.

        Raises: InvalidArgument; FailedPrecondition for an attachment of another transport;
            AlreadyExists for an id that was used; TransferFailed when it ended with an error or
            could not begin. Cancelled or late, it goes on until its pieces under way are over.
        """
        target = self._targets.get(attachment_id)
        if target is None or self._agent is None:
            raise FailedPrecondition("push: this worker is not attached with transport nixl")
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
            transfer = self._write(self._agent, target, blocks, destinations, held, deadline)
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

    # -- inside

    def _write(
        self,
        agent: NixlAgent,
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
        return agent.write(target.peer, runs, deadline, local=own, remote=target.region)

    def _end(self, push_id: str) -> None:
        self._terminal[push_id] = None
        while len(self._terminal) > REMEMBERED:
            self._terminal.popitem(last=False)

    async def _start(self) -> None:
        deadline = Deadline.after(START_S)
        agent = await NixlAgent.start(self.name, self._net_devices, deadline)
        try:
            self.metadata = await agent.register(self._frames.region, before=self._before)
        except BaseException:
            await agent.close(Deadline.after(_CLOSE_S))
            raise
        self._agent = agent

    def _forget_later(self, peer: str) -> None:
        task = asyncio.create_task(self._forget(peer))
        self._forgetting.add(task)
        task.add_done_callback(self._forgetting.discard)

    async def _forget(self, peer: str) -> None:
        while waiting := [t.settled for p, t in self._moving.values() if p == peer]:
            await asyncio.wait(waiting)
        if self._agent is not None:
            await self._agent.remove_peer(peer)
