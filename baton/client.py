"""Clients of a router: `Client` for asyncio, `SyncClient` for other programs.

    async with Client("127.0.0.1:8500") as client:
        async for chunk in client.generate("Once upon a time", max_tokens=40):
            show(chunk.text)

They call the `Inference` service and know nothing of the processes behind it. Leaving the loop
early cancels the request on the server. A `Client` belongs to one event loop; a `SyncClient` may be
used from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import (
    AsyncGenerator,
    Callable,
    Coroutine,
    Generator,
    Iterable,
)
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from baton import errors
from baton.answers import (
    Chunk,
    Completion,
    Embedding,
    chunk_from,
    completions_from,
    embedding_from,
)
from baton.request import Prompt, build_embed_request, build_request
from process import rpc
from process.tls import TlsIdentity, TlsSettings
from protos import inference_pb2, inference_pb2_grpc

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")

_STATUS_TIMEOUT_S = 10.0

_SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name

_ANSWER = "a whole answer"

_OWN_DEADLINE = "Deadline Exceeded"
"""Part of gRPC's message when the client's own deadline passed and the server sent nothing."""

_GRACE_S = 1.0
"""Time that the client waits longer than the request's budget: the router ends a request at its
budget and says where the time went."""

_NO_HANDSHAKE = ("handshake failed", "Socket closed", "erification")
"""Parts of gRPC's message when a server is there and the TLS handshake failed."""

_OTHER_PROTOCOL = "http1.x server"
"""Part of gRPC's message when the server speaks HTTP/1."""


@dataclass(frozen=True)
class Credentials:
    """The credentials with which a client and a router authenticate each other."""

    tls: TlsSettings | None = None
    """TLS files of the client; None: without TLS. Without a `ca_file` the CAs of this machine are
    trusted."""

    api_key: str = field(default="", repr=False)
    """API key that `baton api-key add` showed; empty: none."""

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The gRPC metadata of each call: the API key."""
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()

    def identity(self) -> TlsIdentity | None:
        """The TLS identity of channels; None: without TLS. Raises: SettingsError naming the file
        that cannot be used."""
        return None if self.tls is None else TlsIdentity(self.tls)


NO_CREDENTIALS = Credentials()


class Client:
    """A connection of a client to one router. `generate` and `complete` take the options of
    `build_request`."""

    def __init__(self, address: str, credentials: Credentials = NO_CREDENTIALS) -> None:
        """Args: address: "host:port". The first call connects.
        Raises: SettingsError naming the file of `credentials` that cannot be used.
        """
        self.address = address
        self._metadata = credentials.metadata
        self._channel = rpc.channel(address, identity=credentials.identity())
        self._stub: Any = inference_pb2_grpc.InferenceStub(self._channel)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; requests in flight are cancelled."""
        await self._channel.close()

    async def generate(
        self, prompt: Prompt, *, traceparent: str = "", **options: Any
    ) -> AsyncGenerator[Chunk, None]:
        """Stream a generation. The last chunk of each sample has `end`; the last chunk of the
        request has its provenance, too. Closing the generator early cancels the request.

        Args: traceparent: the W3C header of the span that the request is part of.
        Raises: a `baton.errors.BatonError`.
        """
        request = build_request(prompt, **options)
        async with contextlib.aclosing(self.send(request, traceparent=traceparent)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def send(
        self, request: inference_pb2.GenerateRequest, *, traceparent: str = ""
    ) -> AsyncGenerator[Chunk, None]:
        """Stream the generation of a request that is built already, as `generate`."""
        ended = False
        async with contextlib.aclosing(self._stream(request, traceparent)) as replies:
            async for reply in replies:
                chunk = chunk_from(reply)
                ended = chunk.end is not None and chunk.end.provenance is not None
                yield chunk
        if not ended:
            raise errors.Internal("the stream ended without its last message; see the router's log")

    async def complete(self, /, prompt: Prompt, **options: Any) -> Completion:
        """Generate one sample and return it whole. Raises: as `generate`."""
        if options.get("n", 1) > 1:
            raise errors.InvalidArgument("sampling.n", "complete_samples gives all samples")
        (completion,) = await self.complete_samples(prompt, **options)
        return completion

    async def complete_samples(self, /, prompt: Prompt, **options: Any) -> list[Completion]:
        """Generate all samples of a request and return them whole, in their order, of a beam search
        the best first. Raises: as `generate`."""
        return completions_from([chunk async for chunk in self.generate(prompt, **options)])

    async def embed(self, /, prompt: Prompt, **options: Any) -> Embedding:
        """Compute the embedding of a prompt. Takes the options of `build_embed_request`. Raises: a
        `baton.errors.BatonError`."""
        request = build_embed_request(prompt, **options)
        replies = [reply async for reply in self._stream(request)]
        if len(replies) != 1:
            raise errors.Internal(f"an embedding came in {len(replies)} messages")
        return embedding_from(replies[0])

    async def models(self, timeout_s: float = _STATUS_TIMEOUT_S) -> list[inference_pb2.ModelInfo]:
        """Ask for the models that the cluster serves."""
        request = inference_pb2.ListModelsRequest()
        reply = await self._call(self._stub.ListModels, request, "its models", timeout_s)
        return list(reply.models)

    async def status(
        self,
        timeout_s: float = _STATUS_TIMEOUT_S,
        request: inference_pb2.GetClusterStatusRequest | None = None,
    ) -> inference_pb2.GetClusterStatusReply:
        """Ask the router for the state of its workers and stores. `request` may ask for more."""
        request = request or inference_pb2.GetClusterStatusRequest()
        reply: inference_pb2.GetClusterStatusReply = await self._call(
            self._stub.GetClusterStatus, request, "its status", timeout_s
        )
        return reply

    async def is_ready(self, timeout_s: float = _STATUS_TIMEOUT_S) -> bool:
        """Whether each model that is not scaled to zero has a worker of each role, as the HTTP path
        `/ready` says."""
        request = health_pb2.HealthCheckRequest(service=_SERVICE)
        reply = await self._call(self._health.Check, request, "whether it is ready", timeout_s)
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    async def explain(
        self, request_id: str = "", tenant: str = "", timeout_s: float = _STATUS_TIMEOUT_S
    ) -> inference_pb2.ExplainReply:
        """Ask why the router sent a request (empty: the latest one) to its workers. Raises:
        NotFound when the router does not know the request, or not any more."""
        request = inference_pb2.ExplainRequest(request_id=request_id, tenant=tenant)
        reply: inference_pb2.ExplainReply = await self._call(
            self._stub.Explain, request, "why it chose its workers", timeout_s
        )
        return reply

    async def load_adapter(
        self, request: inference_pb2.LoadClusterAdapterRequest, *, timeout_s: float
    ) -> inference_pb2.LoadClusterAdapterReply:
        """Load a LoRA adapter on every worker of its model or on none. Needs an admin's API key.
        Returns when requests may use the adapter.

        Raises: InvalidArgument, FailedPrecondition, Unavailable and others, with the reason.
        """
        reply: inference_pb2.LoadClusterAdapterReply = await self._call(
            self._stub.LoadAdapter, request, "an adapter to be loaded", timeout_s
        )
        return reply

    async def unload_adapter(
        self, request: inference_pb2.UnloadClusterAdapterRequest, *, timeout_s: float
    ) -> inference_pb2.UnloadClusterAdapterReply:
        """Unload a LoRA adapter from every worker or from none. Needs an admin's API key.

        Raises: NotFound, FailedPrecondition and others, with the reason.
        """
        reply: inference_pb2.UnloadClusterAdapterReply = await self._call(
            self._stub.UnloadAdapter, request, "an adapter to be unloaded", timeout_s
        )
        return reply

    async def _stream(
        self, request: inference_pb2.GenerateRequest, traceparent: str = ""
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """The messages of an answer. Closing the generator cancels the call."""
        trace = (("traceparent", traceparent),) if traceparent else ()
        budget_s = request.budget_ms / 1000
        call = self._stub.Generate(
            request, timeout=budget_s + _GRACE_S, metadata=(*self._metadata, *trace)
        )
        try:
            async for reply in call:
                yield reply
        except grpc.aio.AioRpcError as error:
            raise self._error(error, _ANSWER, budget_s) from None
        finally:
            call.cancel()

    async def _call(self, method: Any, request: Any, asked: str, timeout_s: float) -> Any:
        """Make one unary call of the router.

        Args: asked: what the router is asked for, for errors.
        """
        try:
            return await method(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise self._error(error, asked, timeout_s) from None

    def _error(
        self, error: grpc.aio.AioRpcError, asked: str, timeout_s: float
    ) -> errors.BatonError:
        """The error to raise; one line that says what to do.

        Args: timeout_s: how long the call was allowed to take.
        """
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
                f"no router answers at {self.address}; start a cluster with `baton up`, or name "
                "another address"
            )
        return rpc.error_from_rpc(error)


def collect_chunks(chunks: Iterable[Chunk]) -> Completion:
    """Join all chunks of a generation of one sample. Raises: Internal when the last one is
    missing."""
    (completion,) = completions_from(chunks)
    return completion


def _blocking(
    method: Callable[Concatenate[Client, Arguments], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[SyncClient, Arguments], Result]:
    """A method of `Client` as one of `SyncClient`, which waits for the result."""

    @functools.wraps(method)
    def call(self: SyncClient, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return self._run(method(self._client, *args, **kwargs))

    return call


class SyncClient:
    """A client of a router without asyncio: its event loop runs in a thread of its own until
    `close`. Its methods are those of `Client`."""

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

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection and end the thread. A second call does nothing."""
        if self._loop.is_closed():
            return
        self._run(_end(self._client))
        self._end_loop()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def generate(self, prompt: Prompt, **options: Any) -> Generator[Chunk, None, None]:
        """Stream a generation, as `Client.generate`. Closing the generator early cancels the
        request."""
        return self._steps(self._client.generate(prompt, **options))

    def send(
        self, request: inference_pb2.GenerateRequest, *, traceparent: str = ""
    ) -> Generator[Chunk, None, None]:
        """Stream the generation of a request that is built already, as `Client.send`."""
        return self._steps(self._client.send(request, traceparent=traceparent))

    complete = _blocking(Client.complete)
    complete_samples = _blocking(Client.complete_samples)
    embed = _blocking(Client.embed)
    models = _blocking(Client.models)
    status = _blocking(Client.status)
    is_ready = _blocking(Client.is_ready)
    explain = _blocking(Client.explain)
    load_adapter = _blocking(Client.load_adapter)
    unload_adapter = _blocking(Client.unload_adapter)

    def _steps(self, chunks: AsyncGenerator[Chunk, None]) -> Generator[Chunk, None, None]:
        steps = _Steps(chunks)
        try:
            while (chunk := self._run(steps.next())) is not None:
                yield chunk
        finally:
            if not self._loop.is_closed():
                self._run(steps.close())

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        future: Future[Result] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            # Ctrl-C in the waiting thread: do not leave the work running behind it.
            future.cancel()
            raise


async def _end(client: Client) -> None:
    """Close the client and wait for every task of the loop: a cancelled call still has one."""
    await client.close()
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()


async def _make_client(address: str, credentials: Credentials) -> Client:
    return Client(address, credentials)


class _Steps:
    """Takes a generation step by step for another thread. Ctrl-C may interrupt that thread at any
    moment, so `close` ends the step in progress before it closes the generation."""

    def __init__(self, chunks: AsyncGenerator[Chunk, None]) -> None:
        self._chunks = chunks
        self._step: asyncio.Task[Any] | None = None

    async def next(self) -> Chunk | None:
        """The next chunk; None after the last."""
        self._step = asyncio.current_task()
        return await anext(self._chunks, None)

    async def close(self) -> None:
        """End the generation; it is cancelled if it is still in progress."""
        if self._step is not None and not self._step.done():
            self._step.cancel()
            await asyncio.wait([self._step])
        await self._chunks.aclose()
