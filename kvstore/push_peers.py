"""PushPeers: the NIXL side of whoever lets workers read its frames: its agent, made for the first
peer, and which peer each attachment is.

Life of a peer: `meet` -> pushes -> `forget`, which waits until nothing moves to it any more. One
asyncio loop.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from kvstore.blocks import Block
from kvstore.nixl_agent import NixlAgent, Region
from kvstore.pushes import Frames, PushOutcome, PushTable, Readable, Target
from process.deadline import Deadline
from process.errors import FailedPrecondition, Internal, InvalidArgument
from process.tasks import complete_despite_cancel

START_S = 30.0
_CLOSE_S = 1.0


@dataclass(frozen=True)
class PeerBlocks:
    """What a worker says of its blocks: its agent's metadata and its one registered region."""

    metadata: bytes
    region: Region
    num_blocks: int
    block_bytes: int


class PushPeers:
    """See the module."""

    def __init__(
        self,
        source: Readable,
        frames: Frames,
        net_devices: str,
        *,
        name: str,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """name: of the agent, with a random part behind it. before: see NixlAgent.register."""
        self._source = source
        self._frames = frames
        self._net_devices = net_devices
        self._name = f"{name}-{secrets.token_hex(16)}"
        self._before = before
        self._starting = asyncio.Lock()
        self._targets: dict[str, Target] = {}
        self._forgetting: set[asyncio.Task[None]] = set()
        self._agent: NixlAgent | None = None
        self._pushes: PushTable | None = None
        self.metadata = b""

    @property
    def name(self) -> str:
        """Of the agent."""
        return self._name

    @property
    def num_moving(self) -> int:
        return self._pushes.num_moving if self._pushes is not None else 0

    async def meet(self, peer: PeerBlocks) -> Target:
        """Bring the two agents together. Raises: InvalidArgument, FailedPrecondition when NIXL
        cannot be used here."""
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
        except asyncio.CancelledError:  # whoever asked has left, and nobody else knows of the peer
            if adding.exception() is None:
                self._forget_later(adding.result())
            raise
        return Target(adding.result(), peer.region, peer.num_blocks)

    def add(self, attachment_id: str, target: Target) -> None:
        """Pushes of this attachment go there."""
        self._targets[attachment_id] = target

    async def push(
        self,
        attachment_id: str,
        push_id: str,
        blocks: Sequence[Block],
        destinations: Sequence[int],
        deadline: Deadline,
    ) -> PushOutcome:
        """See PushTable. Raises: FailedPrecondition for an attachment of another transport."""
        target = self._targets.get(attachment_id)
        if target is None or self._pushes is None:
            raise FailedPrecondition("push: this worker is not attached with transport nixl")
        return await self._pushes.push(push_id, target, blocks, destinations, deadline)

    def is_terminal(self, push_id: str) -> bool:
        """See PushTable; without an agent nothing moves."""
        return self._pushes is None or self._pushes.is_terminal(push_id)

    def keep(self, attachment_ids: Collection[str]) -> None:
        """Forget the peers of all others, each once nothing moves to it."""
        for attachment_id in self._targets.keys() - set(attachment_ids):
            self._forget_later(self._targets.pop(attachment_id).peer)

    async def close(self, timeout_s: float) -> bool:
        """End the agent. Returns: whether nothing moved any more in time; the agent then ends by
        itself when that is over."""
        if self._agent is None:
            return True
        return await self._agent.close(Deadline.after(timeout_s))

    async def _start(self) -> None:
        deadline = Deadline.after(START_S)
        agent = await NixlAgent.start(self._name, self._net_devices, deadline)
        try:
            self.metadata = await agent.register(self._frames.region, before=self._before)
        except BaseException:
            await agent.close(Deadline.after(_CLOSE_S))
            raise
        self._pushes = PushTable(self._source, self._frames, agent)
        self._agent = agent

    def _forget_later(self, peer: str) -> None:
        task = asyncio.create_task(self._forget(peer))
        self._forgetting.add(task)
        task.add_done_callback(self._forgetting.discard)

    async def _forget(self, peer: str) -> None:
        if self._pushes is not None and self._agent is not None:
            await self._pushes.quiet(peer)
            await self._agent.remove_peer(peer)
