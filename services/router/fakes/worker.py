"""What both fake roles share: an address, a life, a status. One asyncio loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import grpc.aio
from google.protobuf import json_format

from process import entrypoint, grpc_server, rpc
from process.errors import BatonError
from protos import common_pb2
from services.router.fakes.gate import Gate
from services.router.fakes.model import FakeModel

Context = grpc.aio.ServicerContext[Any, Any]


class FakeWorker:
    """What both roles share: an address, a life, a status."""

    role = ""

    def __init__(self, worker_id: str, model: FakeModel) -> None:
        self.worker_id = worker_id
        self.model = model
        self.incarnation = entrypoint.new_incarnation().hex()
        self.address = ""
        self.is_draining = False
        self.num_blocks = 1000
        self.num_blocks_taken = 0
        self.num_queued_tokens = 0
        """Prompt tokens that it says to have yet to compute."""
        self.num_running = 0
        """Requests that its heartbeat says to run."""
        self.step_age_s = 0.0
        """How long it says that its engine is inside one step."""
        self.store_node_id = ""
        self.transport = "shm"
        self.remote_transport = "grpc"
        self.lender_node_id = ""
        self.adapters: dict[str, str] = {}
        """Digest of each adapter that it says to have, by name."""
        self.loaded: set[tuple[str, str]] = set()
        """Name and digest of adapters that it says to have beside those, of `LoadAdapter`."""
        self.held: dict[tuple[str, str], int] = {}
        """Of those, what was not wished yet, and the version of the wish that is to change."""
        self.load_gate = Gate()
        """Before it loads an adapter, whose digest is its folder's name."""
        self.load_error: BatonError | None = None
        """Raised instead."""
        self.on_loaded: Callable[[], Awaitable[None]] | None = None
        """Called when `loaded` has changed."""
        self.links: Sequence[Mapping[str, Any]] = ()
        """Fields of the LinkStatus of each store that it says to have met."""
        self.status_gate = Gate()
        """Before it says how it is."""
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Listen on a free port of loopback."""
        self._server, self.address = await grpc_server.listen("127.0.0.1:0", [self._add_to])

    @property
    def is_alive(self) -> bool:
        """It was started, and was not stopped."""
        return self._server is not None

    async def stop(self) -> None:
        """Vanish at once, as a killed process does."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    def status(self) -> common_pb2.WorkerStatus:
        """What a real worker's heartbeat says."""
        model = self.model
        return common_pb2.WorkerStatus(
            worker_id=self.worker_id,
            role=self.role,
            address=self.address,
            incarnation=self.incarnation,
            model=model.name,
            model_fingerprint=model.fingerprint,
            tokenizer_digest=model.tokenizer_digest,
            dtype="float32",
            block_size=model.block_size,
            block_bytes=1024,
            num_blocks=self.num_blocks,
            num_free_blocks=self.num_free_blocks,
            num_queued_tokens=self.num_queued_tokens,
            num_running=self.num_running,
            context_window=model.context_window,
            vocab_size=model.vocab_size,
            num_step_tokens=512,
            step_age_s=self.step_age_s,
            store_node_id=self.store_node_id,
            transport=self.transport,
            remote_transport=self.remote_transport,
            lender_node_id=self.lender_node_id,
            draining=self.is_draining,
            adapters=[
                common_pb2.AdapterStatus(name=name, digest=digest)
                for name, digest in sorted({*self.adapters.items(), *self.loaded})
            ],
            links=[common_pb2.LinkStatus(**link) for link in self.links],
        )

    async def register(self, client: Any, *, ttl_ms: int = 60_000) -> None:
        """Write entry and heartbeat with a Redis `client`, once."""
        entry = json_format.MessageToJson(self.status(), indent=None)
        await client.hset("baton:workers", self.worker_id, entry)
        await client.set(f"baton:worker:{self.worker_id}:beat", self.incarnation, px=ttl_ms)

    @rpc.unary
    async def LoadAdapter(
        self, request: common_pb2.LoadAdapterRequest, context: Context
    ) -> common_pb2.LoadAdapterReply:
        await self.load_gate.passed()
        if self.load_error is not None:
            raise self.load_error
        digest = PurePath(request.folder).name
        self.loaded.add((request.name, digest))
        self.held[request.name, digest] = request.version
        if self.on_loaded is not None:
            await self.on_loaded()
        status = common_pb2.AdapterStatus(name=request.name, digest=digest)
        return common_pb2.LoadAdapterReply(adapter=status)

    @rpc.unary
    async def UnloadAdapter(
        self, request: common_pb2.UnloadAdapterRequest, context: Context
    ) -> common_pb2.UnloadAdapterReply:
        self.loaded.discard((request.name, request.digest))
        if self.on_loaded is not None:
            await self.on_loaded()
        return common_pb2.UnloadAdapterReply()

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody has reserved."""
        return self.num_blocks - self.num_blocks_taken

    def leg(self, num_tokens: int, *, is_computed: bool, num_local: int = 0) -> common_pb2.KvLeg:
        """An account: all computed here but for `num_local`, or all from the store."""
        leg = common_pb2.KvLeg(
            role=self.role,
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            transport="shm",
            dtype="float32",
        )
        if is_computed:
            leg.num_tokens_local = num_local
            leg.num_tokens_computed = num_tokens - num_local
        else:
            leg.from_store.add(tier=common_pb2.TIER_HOST, node_id="fake", num_tokens=num_tokens)
        return leg

    def _add_to(self, server: grpc.aio.Server) -> None:
        raise NotImplementedError
