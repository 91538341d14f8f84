"""GrpcDraftChannel: the gRPC client of one draft worker for speculative decoding, used from the
engine's thread (engine/speculation/draft_protocol.py). DraftPeers has the channels of all draft
workers in a worker's settings.

Every call runs on the worker's event loop; the caller gets a future. After a draft worker was
unreachable, the next call makes a new connection, which also presents a certificate that was
renewed meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import grpc.aio
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.speculation.draft_protocol import DraftModelInfo, DraftRequest, DraftResponse
from engine.speculation.remote import DraftPeer, DraftTraces
from process import rpc
from process.authorization import PeerRole
from process.metrics import MetricsServer, counters, gauges
from process.rpc import Dialer
from protos import draft_pb2, draft_pb2_grpc
from services.worker.runtime import Identity

FORGET_S = 1.0

T = TypeVar("T")


class GrpcDraftChannel:
    """DraftChannel over gRPC to one draft worker. Created and closed on the event loop's thread."""

    def __init__(self, address: str, dial: Dialer) -> None:
        self.address = address
        self._dial = dial
        self._loop = asyncio.get_running_loop()
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None
        self._calls: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    def describe(self, timeout_s: float) -> Future[DraftModelInfo]:
        """Ask which model the draft worker has; bounded by `timeout_s` seconds."""
        return self._begin(self._describe(timeout_s))

    def propose(
        self, verifier: bytes, requests: Sequence[DraftRequest], timeout_s: float
    ) -> Future[Sequence[DraftResponse]]:
        """Ask the draft worker for draft tokens; bounded by `timeout_s` seconds."""
        return self._begin(self._propose(_request(verifier, requests), timeout_s))

    def forget(self, verifier: bytes, sessions: Sequence[int]) -> None:
        """Tell the draft worker that these sessions have ended, without waiting for it."""
        self._begin(self._forget(draft_pb2.ForgetRequest(verifier=verifier, sessions=sessions)))

    async def close(self) -> None:
        """Close the connection; calls in progress fail."""
        self._is_closed = True
        for call in list(self._calls):
            call.cancel()
        await self._disconnect()

    def _begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        future: Future[T] = Future()
        try:
            self._loop.call_soon_threadsafe(self._start, work, future)
        except RuntimeError as error:  # the loop is closed: this process ends
            work.close()
            future.set_exception(error)
        return future

    def _start(self, work: Coroutine[Any, Any, T], future: Future[T]) -> None:
        if self._is_closed:
            work.close()
            future.set_exception(ConnectionError(f"{self.address}: closed"))
            return
        call = self._loop.create_task(self._settle(work, future))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _settle(self, work: Coroutine[Any, Any, T], future: Future[T]) -> None:
        try:
            future.set_result(await work)
        except grpc.aio.AioRpcError as error:
            future.set_exception(rpc.error_from_rpc(error))
        except asyncio.CancelledError:
            future.set_exception(ConnectionError(f"{self.address}: closed"))
        except Exception as error:  # whoever holds the future is told
            future.set_exception(error)

    async def _describe(self, timeout_s: float) -> DraftModelInfo:
        await self._disconnect()
        reply = await self._connected().Describe(
            draft_pb2.DescribeDraftRequest(), timeout=timeout_s
        )
        return DraftModelInfo(reply.model, reply.tokenizer_digest, reply.vocab_size)

    async def _propose(
        self, request: draft_pb2.ProposeRequest, timeout_s: float
    ) -> Sequence[DraftResponse]:
        reply = await self._connected().Propose(request, timeout=timeout_s)
        return [
            DraftResponse(
                not tree.is_unknown, list(tree.token_ids), list(tree.parents), list(tree.chances)
            )
            for tree in reply.trees
        ]

    async def _forget(self, request: draft_pb2.ForgetRequest) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):  # they give way by themselves
            await self._connected().Forget(request, timeout=FORGET_S)

    def _connected(self) -> Any:
        if self._channel is None:
            self._channel = self._dial(self.address, PeerRole.DRAFT)
            self._stub = draft_pb2_grpc.DraftStub(self._channel)
        return self._stub

    async def _disconnect(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(0)


def _request(verifier: bytes, requests: Sequence[DraftRequest]) -> draft_pb2.ProposeRequest:
    """Build the request message, on the caller's thread to spare the event loop."""
    return draft_pb2.ProposeRequest(
        verifier=verifier,
        tasks=[
            draft_pb2.DraftTask(
                session=one.session,
                start=one.start,
                token_ids=one.token_ids,
                num_prompt_tokens=one.num_prompt_tokens,
                num_nodes=one.num_nodes,
                temperature=one.temperature,
                top_p=one.top_p,
                top_k=one.top_k,
                min_p=one.min_p,
                seed=one.seed,
                sample_index=one.sample_index,
            )
            for one in requests
        ],
    )


class DraftPeers(Collector):
    """Channels to all of a worker's draft workers, with counters of their calls. Created and closed
    on the event loop's thread."""

    def __init__(self, addresses: Iterable[str], dial: Dialer) -> None:
        self._channels = [GrpcDraftChannel(address, dial) for address in addresses]
        self.traces = DraftTraces()
        self.peers = tuple(DraftPeer(channel, traces=self.traces) for channel in self._channels)
        self._identity: Callable[[], Identity] | None = None

    def show(self, metrics: MetricsServer, identity: Callable[[], Identity]) -> None:
        """Export the counters as those of this worker in its present role; does nothing without
        draft workers."""
        if self.peers:
            self._identity = identity
            metrics.add(self)

    async def close(self) -> None:
        """Close all channels."""
        for channel in self._channels:
            await channel.close()

    def collect(self) -> Iterable[Metric]:
        """Return the metrics of all channels; any thread."""
        if self._identity is None:
            return
        identity = self._identity()
        labels = {"worker_id": identity.worker_id, "role": identity.role}
        yield gauges(
            "baton_draft_worker_ready",
            "1 while the draft worker is asked, or rests because its answers come late.",
            labels,
            "peer",
            [(one.channel.address, one.counts.is_ready) for one in self.peers],
        )
        calls = CounterMetricFamily(
            "baton_draft_calls",
            "Calls of draft workers, by what became of them.",
            labels=(*labels, "peer", "outcome"),
        )
        for one in self.peers:
            counts = one.counts
            for outcome, num in (
                ("answered", counts.num_answered),
                ("late", counts.num_late),
                ("failed", counts.num_failed),
            ):
                calls.add_metric((*labels.values(), one.channel.address, outcome), num)
        yield calls
        yield counters(
            "baton_draft_received_nodes",
            "Guesses that came in time.",
            labels,
            "peer",
            [(one.channel.address, one.counts.num_nodes) for one in self.peers],
        )
        yield counters(
            "baton_draft_resent_sequences",
            "Sequences that a draft worker wanted whole again.",
            labels,
            "peer",
            [(one.channel.address, one.counts.num_resent) for one in self.peers],
        )
