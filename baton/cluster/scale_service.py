"""baton.v1.LocalScale, the service by which the autoscaler starts and stops workers of `baton up`,
at a socket file that only this user may open.

It runs in an event loop in a thread of its own, and calls the cluster in threads that may block.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import grpc.aio

from baton.errors import ClusterError
from process import grpc_server, rpc
from process.rpc_errors import BatonError, InvalidArgument, Unavailable
from protos import local_scale_pb2, local_scale_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

ROLES = ("prefill", "decode")
_WAIT_S = 10.0
"""Limit of the start and of the stop."""


class Workers(Protocol):
    """The interface by which the service lists, starts and stops a cluster's workers;
    `LocalCluster` has it."""

    def list_workers(self) -> Sequence[tuple[str, str, str]]:
        """Name, role at its start, and state (as in the proto) of each worker."""

    def start_workers(self, role: str, num: int) -> Sequence[str]:
        """Start more workers. Returns: their names. Raises: ClusterError."""

    def stop_workers(self, names: Sequence[str]) -> None:
        """Ask workers to end. Raises: ClusterError for an unknown name."""


class ScaleService:
    """Serves the gRPC service LocalScale for the workers of one cluster, so that the autoscaler can
    start and stop them."""

    def __init__(self, workers: Workers, socket: Path) -> None:
        """Args: socket: the socket file to listen at, in a private folder."""
        self.address = f"unix:{socket}"
        self._workers = workers
        self._changing = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="scale service", daemon=True)

    def start(self) -> None:
        """Start to serve at the socket. Raises: ClusterError."""
        self._thread.start()
        try:
            self._ready.result(_WAIT_S)
        except (BatonError, TimeoutError) as error:
            raise ClusterError(f"workers cannot be scaled: {error}") from error

    def stop(self) -> None:
        """Stop serving, within a limited time. A second call does nothing."""
        loop = self._loop
        if loop is not None and self._thread.is_alive():
            loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(_WAIT_S)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            server, _ = await grpc_server.listen(self.address, [self._add_to])
        except BaseException as error:
            self._ready.set_exception(error)
            return
        self._ready.set_result(None)
        await self._stop.wait()
        await server.stop(0.5)

    def _add_to(self, server: grpc.aio.Server) -> None:
        add: Any = local_scale_pb2_grpc.add_LocalScaleServicer_to_server
        add(self, server)

    @rpc.unary
    async def ListWorkers(
        self, request: local_scale_pb2.ListWorkersRequest, context: Context
    ) -> local_scale_pb2.ListWorkersReply:
        """Answer with all workers, including those that are ending."""
        reply = local_scale_pb2.ListWorkersReply()
        for name, role, state in await asyncio.to_thread(self._workers.list_workers):
            reply.workers.add(worker_id=name, role=role, state=state)
        return reply

    @rpc.unary
    async def StartWorkers(
        self, request: local_scale_pb2.StartWorkersRequest, context: Context
    ) -> local_scale_pb2.StartWorkersReply:
        """Start more workers of a role, and answer with their names."""
        if request.role not in ROLES:
            raise InvalidArgument("role", f"is one of {', '.join(ROLES)}")
        if not request.num_workers:
            raise InvalidArgument("num_workers", "must be at least 1")
        try:
            async with self._changing:
                names = await asyncio.to_thread(
                    self._workers.start_workers, request.role, request.num_workers
                )
        except ClusterError as error:
            raise Unavailable(str(error)) from error
        return local_scale_pb2.StartWorkersReply(worker_ids=names)

    @rpc.unary
    async def StopWorkers(
        self, request: local_scale_pb2.StopWorkersRequest, context: Context
    ) -> local_scale_pb2.StopWorkersReply:
        """Ask the named workers to end."""
        try:
            async with self._changing:
                await asyncio.to_thread(self._workers.stop_workers, list(request.worker_ids))
        except ClusterError as error:
            raise InvalidArgument("worker_ids", str(error)) from error
        return local_scale_pb2.StopWorkersReply()
