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
    Mapping,
    Sequence,
)
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
import grpc.aio

from baton import errors
from baton.messages import Chunk, Completion, chunk_from
from process import serving
from protos import common_pb2, inference_pb2, inference_pb2_grpc

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or chat messages ({"role": ..., "content": ...})."""

Result = TypeVar("Result")

DEFAULT_TIMEOUT_S = 300.0
"""For a whole generation: the bundled model fills its window on one core in a tenth of it."""
_STATUS_TIMEOUT_S = 10.0


def build_request(
    prompt: Prompt,
    *,
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    seed: int | None = None,
    stop: Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    model: str = "",
    request_id: str = "",
    tenant: str = "",
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> inference_pb2.GenerateRequest:
    """The request as it goes over the wire. What is None is left to the model's defaults.

    Raises: InvalidArgument for what cannot be put on the wire at all; the router judges the rest.
    """
    try:
        sampling = common_pb2.SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=seed,
            stop=[stop] if isinstance(stop, str) else list(stop),
            stop_token_ids=list(stop_token_ids),
            ignore_eos=ignore_eos,
        )
    except (ValueError, TypeError) as error:
        raise errors.InvalidArgument("sampling", _one_line(error)) from error
    request = inference_pb2.GenerateRequest(
        model=model,
        sampling=sampling,
        request_id=request_id,
        tenant=tenant,
        budget_ms=max(1, int(timeout_s * 1000)),
    )
    _set_prompt(request, prompt)
    return request


def _set_prompt(request: inference_pb2.GenerateRequest, prompt: Prompt) -> None:
    try:
        if isinstance(prompt, str):
            request.text = prompt
        elif prompt and isinstance(prompt[0], Mapping):
            request.chat.SetInParent()
            for message in prompt:
                request.chat.messages.add(**message)  # type: ignore[arg-type]
        else:
            request.token_ids.SetInParent()
            request.token_ids.ids.extend(prompt)  # type: ignore[arg-type]
    except (ValueError, TypeError, AttributeError) as error:
        raise errors.InvalidArgument("prompt", _one_line(error)) from error


class Client:
    """One connection to one router. Options of `generate` and `complete` are `build_request`'s."""

    def __init__(self, address: str) -> None:
        """`address` is "host:port". Connects with the first call."""
        self.address = address
        self._channel = serving.channel(address)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

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

    async def generate(self, prompt: Prompt, **options: Any) -> AsyncGenerator[Chunk, None]:
        """Stream a generation; the last chunk has `end`.

        Closing the generator early cancels the request. Raises: a `baton.errors.BatonError`.
        """
        request = build_request(prompt, **options)
        call = self._stub.Generate(request, timeout=request.budget_ms / 1000)
        ended = False
        try:
            async for reply in call:
                chunk = chunk_from(reply)
                ended = ended or chunk.end is not None
                yield chunk
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None
        finally:
            call.cancel()
        if not ended:
            raise errors.Internal("the stream ended without its last message; see the router's log")

    async def complete(self, prompt: Prompt, **options: Any) -> Completion:
        """`generate`, put together."""
        return await collect(self.generate(prompt, **options))

    async def models(self) -> list[inference_pb2.ModelInfo]:
        """The models served."""
        request = inference_pb2.ListModelsRequest()
        try:
            reply = await self._stub.ListModels(request, timeout=_STATUS_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None
        return list(reply.models)

    async def status(
        self, timeout_s: float = _STATUS_TIMEOUT_S
    ) -> inference_pb2.GetClusterStatusReply:
        """What the router knows of its workers and stores."""
        request = inference_pb2.GetClusterStatusRequest()
        try:
            reply: inference_pb2.GetClusterStatusReply = await self._stub.GetClusterStatus(
                request, timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None
        return reply

    def _error(self, error: grpc.aio.AioRpcError) -> errors.BatonError:
        if error.code() is grpc.StatusCode.UNAVAILABLE and "failed to connect" in (
            error.details() or ""
        ):
            return errors.Unavailable(
                f"nobody answers at {self.address}; start a cluster with `baton up`, or name "
                "another address"
            )
        return serving.error_from_rpc(error)


async def collect(chunks: AsyncIterator[Chunk]) -> Completion:
    """All chunks of one generation as one value."""
    return collect_chunks([chunk async for chunk in chunks])


def collect_chunks(chunks: Iterable[Chunk]) -> Completion:
    """All chunks of one generation as one value. Raises: Internal when the last one is missing."""
    texts: list[str] = []
    token_ids: list[int] = []
    last: Chunk | None = None
    for last in chunks:
        texts.append(last.text)
        token_ids.extend(last.token_ids)
    if last is None or last.end is None:
        raise errors.Internal("the stream ended without its last message")
    return Completion(
        request_id=last.request_id,
        text="".join(texts),
        token_ids=tuple(token_ids),
        finish_reason=last.end.finish_reason,
        usage=last.end.usage,
        provenance=last.end.provenance,
        times=last.end.times,
        seed=last.end.seed,
        stop_token_id=last.end.stop_token_id,
        stop_string=last.end.stop_string,
    )


class SyncClient:
    """`Client` without asyncio: its event loop runs in a thread of its own until `close`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="baton-client", daemon=True
        )
        self._thread.start()
        self._client = self._run(_make_client(address))

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
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def generate(self, prompt: Prompt, **options: Any) -> Generator[Chunk, None, None]:
        """As `Client.generate`. Closing the generator early cancels the request."""
        steps = _Steps(self._client.generate(prompt, **options))
        try:
            while (chunk := self._run(steps.next())) is not None:
                yield chunk
        finally:
            if not self._loop.is_closed():
                self._run(steps.close())

    def complete(self, prompt: Prompt, **options: Any) -> Completion:
        """As `Client.complete`."""
        return self._run(self._client.complete(prompt, **options))

    def models(self) -> list[inference_pb2.ModelInfo]:
        """As `Client.models`."""
        return self._run(self._client.models())

    def status(self, timeout_s: float = _STATUS_TIMEOUT_S) -> inference_pb2.GetClusterStatusReply:
        """As `Client.status`."""
        return self._run(self._client.status(timeout_s))

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


async def _make_client(address: str) -> Client:
    return Client(address)


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


def _one_line(error: Exception) -> str:
    return str(error).splitlines()[0]
