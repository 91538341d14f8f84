"""Speak to a router: `Client` for asyncio, `SyncClient` for everything else.

    async with Client("127.0.0.1:8500") as client:
        async for chunk in client.generate("Once upon a time", max_tokens=40):
            show(chunk.text)

Knows the `Inference` service and nothing behind it. Leaving the loop early cancels the request on
the server. A `Client` belongs to one event loop; a `SyncClient` may be used from any thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Coroutine,
    Generator,
    Iterable,
)
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from baton import errors
from baton.credentials import NO_CREDENTIALS, Credentials
from baton.messages import (
    Chunk,
    Completion,
    Embedding,
    chunk_from,
    completions_from,
    embedding_from,
)
from baton.request import Prompt, build_embed_request, build_request
from process import rpc
from protos import inference_pb2, inference_pb2_grpc

Result = TypeVar("Result")

_STATUS_TIMEOUT_S = 10.0

_SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name

_ANSWER = "a whole answer"

_OWN_DEADLINE = "Deadline Exceeded"
"""In gRPC's words where our own time was over, and no server said anything."""

_LAST_WORD_S = 1.0
"""How much longer than a request's budget its answer is waited for: the router ends it, and says
where the time went."""

_NO_HANDSHAKE = ("handshake failed", "Socket closed", "erification")
"""In gRPC's words for a server that is there, where TLS did not come about."""

_OTHER_PROTOCOL = "http1.x server"
"""In gRPC's words for a server that answers, and speaks HTTP/1."""


class Client:
    """One connection to one router. Options of `generate` and `complete` are `build_request`'s."""

    def __init__(self, address: str, credentials: Credentials = NO_CREDENTIALS) -> None:
        """`address` is "host:port". Connects with the first call.

        Raises: SettingsError naming the file of `credentials` that cannot be used.
        """
        self.address = address
        self._metadata = credentials.metadata
        self._channel = rpc.channel(address, identity=credentials.identity())
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the connection; generations under way are cancelled."""
        await self._channel.close()

    async def generate(
        self, prompt: Prompt, *, traceparent: str = "", **options: Any
    ) -> AsyncGenerator[Chunk, None]:
        """Stream a generation; the last chunk of each sample has `end`, the very last one with the
        request's provenance.

        Args: traceparent: W3C's header of the span that the request is part of.
        Closing the generator early cancels the request. Raises: a `baton.errors.BatonError`.
        """
        async for chunk in self.send(build_request(prompt, **options), traceparent=traceparent):
            yield chunk

    async def send(
        self, request: inference_pb2.GenerateRequest, *, traceparent: str = ""
    ) -> AsyncGenerator[Chunk, None]:
        """`generate` of a request that is built already."""
        trace = (("traceparent", traceparent),) if traceparent else ()
        call = self._stub.Generate(
            request,
            timeout=request.budget_ms / 1000 + _LAST_WORD_S,
            metadata=(*self._metadata, *trace),
        )
        ended = False
        try:
            async for reply in call:
                chunk = chunk_from(reply)
                ended = chunk.end is not None and chunk.end.provenance is not None
                yield chunk
        except grpc.aio.AioRpcError as error:
            raise self._error(error, _ANSWER, request.budget_ms / 1000) from None
        finally:
            call.cancel()
        if not ended:
            raise errors.Internal("the stream ended without its last message; see the router's log")

    async def complete(self, prompt: Prompt, **options: Any) -> Completion:
        """`generate`, put together; of one sample."""
        (completion,) = await self.complete_samples(prompt, **_of_one_sample(options))
        return completion

    async def complete_samples(self, prompt: Prompt, **options: Any) -> list[Completion]:
        """`generate`, put together, sample by sample in their order (of a beam search: best
        first)."""
        return await collect_samples(self.generate(prompt, **options))

    async def embed(self, prompt: Prompt, **options: Any) -> Embedding:
        """The embedding of a prompt. Options are `build_embed_request`'s.

        Raises: a `baton.errors.BatonError`.
        """
        request = build_embed_request(prompt, **options)
        call = self._stub.Generate(
            request,
            timeout=request.budget_ms / 1000 + _LAST_WORD_S,
            metadata=self._metadata,
        )
        try:
            replies = [reply async for reply in call]
        except grpc.aio.AioRpcError as error:
            raise self._error(error, _ANSWER, request.budget_ms / 1000) from None
        finally:
            call.cancel()
        if len(replies) != 1:
            raise errors.Internal(f"an embedding came in {len(replies)} messages")
        return embedding_from(replies[0])

    async def models(self, timeout_s: float = _STATUS_TIMEOUT_S) -> list[inference_pb2.ModelInfo]:
        """The models served."""
        request = inference_pb2.ListModelsRequest()
        try:
            reply = await self._stub.ListModels(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise self._error(error, "its models", timeout_s) from None
        return list(reply.models)

    async def status(
        self,
        timeout_s: float = _STATUS_TIMEOUT_S,
        request: inference_pb2.GetClusterStatusRequest | None = None,
    ) -> inference_pb2.GetClusterStatusReply:
        """What the router knows of its workers and stores, and of what `request` asks for."""
        request = request or inference_pb2.GetClusterStatusRequest()
        try:
            reply: inference_pb2.GetClusterStatusReply = await self._stub.GetClusterStatus(
                request, timeout=timeout_s, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise self._error(error, "its status", timeout_s) from None
        return reply

    async def is_ready(self, timeout_s: float = _STATUS_TIMEOUT_S) -> bool:
        """Whether each model that is not scaled to zero has a worker of each role: what `/ready`
        says, too."""
        request = health_pb2.HealthCheckRequest(service=_SERVICE)
        try:
            reply = await self._health.Check(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise self._error(error, "whether it is ready", timeout_s) from None
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    async def explain(
        self, request_id: str = "", tenant: str = "", timeout_s: float = _STATUS_TIMEOUT_S
    ) -> inference_pb2.ExplainReply:
        """Why a request (empty: the latest one) went to the workers that it went to.

        Raises: NotFound when the router does not know it (any more).
        """
        request = inference_pb2.ExplainRequest(request_id=request_id, tenant=tenant)
        try:
            reply: inference_pb2.ExplainReply = await self._stub.Explain(
                request, timeout=timeout_s, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise self._error(error, "why it chose its workers", timeout_s) from None
        return reply

    async def load_adapter(
        self, request: inference_pb2.LoadClusterAdapterRequest, *, timeout_s: float
    ) -> inference_pb2.LoadClusterAdapterReply:
        """On every worker of its model or on none; as an admin. Returns: when it can be asked for.

        Raises: InvalidArgument, FailedPrecondition, Unavailable and others, saying what refused it.
        """
        try:
            reply: inference_pb2.LoadClusterAdapterReply = await self._stub.LoadAdapter(
                request, timeout=timeout_s, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise self._error(error, "an adapter to be loaded", timeout_s) from None
        return reply

    async def unload_adapter(
        self, request: inference_pb2.UnloadClusterAdapterRequest, *, timeout_s: float
    ) -> inference_pb2.UnloadClusterAdapterReply:
        """Off every worker or off none; as an admin. Raises: NotFound, FailedPrecondition and
        others, saying what refused it."""
        try:
            reply: inference_pb2.UnloadClusterAdapterReply = await self._stub.UnloadAdapter(
                request, timeout=timeout_s, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise self._error(error, "an adapter to be unloaded", timeout_s) from None
        return reply

    def _error(
        self, error: grpc.aio.AioRpcError, asked: str, timeout_s: float
    ) -> errors.BatonError:
        """asked: what for. timeout_s: how long it was waited for."""
        details = error.details() or ""
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and _OWN_DEADLINE in details:
            remedy = (
                "ask for fewer tokens, or give it more time (timeout_s)"
                if asked == _ANSWER
                else "check that this is the port for gRPC of a router, that nothing between here "
                "and there holds the connection up, and that the router is not overloaded"
            )
            return errors.DeadlineExceeded(
                f"{self.address} was asked for {asked}, which was not there within "
                f"{timeout_s:g} s; {remedy}"
            )
        if error.code() is grpc.StatusCode.UNAVAILABLE and "failed to connect" in details:
            if any(sign in details for sign in _NO_HANDSHAKE):
                return errors.Unavailable(
                    f"{self.address} is there, but no connection comes about: its certificate or "
                    "yours is not trusted or not given, or only one of you speaks TLS; see "
                    "--ca-file and --cert-file"
                )
            if _OTHER_PROTOCOL in details:
                return errors.Unavailable(
                    f"{self.address} is an HTTP port, as that of the OpenAI API; gRPC has another "
                    "port, by default 8500"
                )
            return errors.Unavailable(
                f"nobody answers at {self.address}; start a cluster with `baton up`, or name "
                "another address"
            )
        return rpc.error_from_rpc(error)


async def collect_samples(chunks: AsyncIterator[Chunk]) -> list[Completion]:
    """All chunks of one generation as one value for each sample."""
    return completions_from([chunk async for chunk in chunks])


def collect_chunks(chunks: Iterable[Chunk]) -> Completion:
    """All chunks of a generation of one sample as one value. Raises: Internal when the last one is
    missing."""
    (completion,) = completions_from(chunks)
    return completion


class SyncClient:
    """`Client` without asyncio: its event loop runs in a thread of its own until `close`."""

    def __init__(self, address: str, credentials: Credentials = NO_CREDENTIALS) -> None:
        self.address = address
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="baton-client", daemon=True
        )
        self._thread.start()
        try:
            self._client = self._run(_make_client(address, credentials))
        except BaseException:
            self._end_loop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connection and the thread. Idempotent."""
        if self._loop.is_closed():
            return
        self._run(_end(self._client))
        self._end_loop()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def generate(self, prompt: Prompt, **options: Any) -> Generator[Chunk, None, None]:
        """As `Client.generate`. Closing the generator early cancels the request."""
        return self._steps(self._client.generate(prompt, **options))

    def send(
        self, request: inference_pb2.GenerateRequest, *, traceparent: str = ""
    ) -> Generator[Chunk, None, None]:
        """As `Client.send`."""
        return self._steps(self._client.send(request, traceparent=traceparent))

    def _steps(self, chunks: AsyncGenerator[Chunk, None]) -> Generator[Chunk, None, None]:
        steps = _Steps(chunks)
        try:
            while (chunk := self._run(steps.next())) is not None:
                yield chunk
        finally:
            if not self._loop.is_closed():
                self._run(steps.close())

    def complete(self, prompt: Prompt, **options: Any) -> Completion:
        """As `Client.complete`."""
        return self._run(self._client.complete(prompt, **options))

    def complete_samples(self, prompt: Prompt, **options: Any) -> list[Completion]:
        """As `Client.complete_samples`."""
        return self._run(self._client.complete_samples(prompt, **options))

    def embed(self, prompt: Prompt, **options: Any) -> Embedding:
        """As `Client.embed`."""
        return self._run(self._client.embed(prompt, **options))

    def models(self, timeout_s: float = _STATUS_TIMEOUT_S) -> list[inference_pb2.ModelInfo]:
        """As `Client.models`."""
        return self._run(self._client.models(timeout_s))

    def status(
        self,
        timeout_s: float = _STATUS_TIMEOUT_S,
        request: inference_pb2.GetClusterStatusRequest | None = None,
    ) -> inference_pb2.GetClusterStatusReply:
        """As `Client.status`."""
        return self._run(self._client.status(timeout_s, request))

    def is_ready(self, timeout_s: float = _STATUS_TIMEOUT_S) -> bool:
        """As `Client.is_ready`."""
        return self._run(self._client.is_ready(timeout_s))

    def explain(
        self, request_id: str = "", tenant: str = "", timeout_s: float = _STATUS_TIMEOUT_S
    ) -> inference_pb2.ExplainReply:
        """As `Client.explain`."""
        return self._run(self._client.explain(request_id, tenant, timeout_s))

    def load_adapter(
        self, request: inference_pb2.LoadClusterAdapterRequest, *, timeout_s: float
    ) -> inference_pb2.LoadClusterAdapterReply:
        """As `Client.load_adapter`."""
        return self._run(self._client.load_adapter(request, timeout_s=timeout_s))

    def unload_adapter(
        self, request: inference_pb2.UnloadClusterAdapterRequest, *, timeout_s: float
    ) -> inference_pb2.UnloadClusterAdapterReply:
        """As `Client.unload_adapter`."""
        return self._run(self._client.unload_adapter(request, timeout_s=timeout_s))

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        future: Future[Result] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            # Ctrl-C in the waiting thread: do not leave the work running behind it.
            future.cancel()
            raise


async def _end(client: Client) -> None:
    """Close, and see every task of the loop to its end: cancelled calls still have one each."""
    await client.close()
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()


async def _make_client(address: str, credentials: Credentials) -> Client:
    return Client(address, credentials)


def _of_one_sample(options: dict[str, Any]) -> dict[str, Any]:
    """Raises: InvalidArgument where more than one is asked for."""
    if options.get("n", 1) > 1:
        raise errors.InvalidArgument("sampling.n", "complete_samples gives all samples")
    return options


class _Steps:
    """A generation taken step by step from another thread, which Ctrl-C may tear away at any
    moment: the step under way is then ended here, before the close."""

    def __init__(self, chunks: AsyncGenerator[Chunk, None]) -> None:
        self._chunks = chunks
        self._step: asyncio.Task[Any] | None = None

    async def next(self) -> Chunk | None:
        """The next chunk; None after the last."""
        self._step = asyncio.current_task()
        return await anext(self._chunks, None)

    async def close(self) -> None:
        """End the generation; cancels it if it is under way."""
        if self._step is not None and not self._step.done():
            self._step.cancel()
            await asyncio.wait([self._step])
        await self._chunks.aclose()
