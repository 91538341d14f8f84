"""Senders of a load's requests: over Baton's gRPC, or to any server of the OpenAI API
(`/v1/completions` with token ids as the prompt, streamed, with usage).

A sender belongs to one event loop.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from baton.client import Client
from baton.load.workload import Planned
from process import rpc_errors

_LINE_LIMIT_BYTES = 4 * 1024 * 1024
"""Limit of a line of a stream: the last chunk has the account of a long prompt."""

_ERROR_LIMIT_CHARS = 500


@dataclass(frozen=True)
class Update:
    """The content of one message of an answer, as a load counts it."""

    num_tokens: int = 0
    num_cached_tokens: int | None = None
    num_output_tokens: int | None = None
    """Number of output tokens of the whole answer; None: this message does not say."""
    stages: tuple[tuple[str, float], ...] = ()


class Sender(Protocol):
    """The interface of a load generator's client of one server."""

    def send(self, planned: Planned, timeout_s: float) -> AsyncGenerator[Update, None]:
        """Send a request and yield its messages until the answer ends. Closing the generator early
        cancels the request. Raises: BatonError."""

    async def vocab_size(self) -> int:
        """The vocabulary size of the model; 0: the server does not say. Raises: BatonError."""

    async def close(self) -> None:
        """Close all connections."""


class GrpcSender:
    """Sends a load's requests over gRPC, by `baton.client.Client`."""

    def __init__(self, client: Client, options: Mapping[str, Any]) -> None:
        """Args: options: further arguments of `Client.generate`, such as model and tenant."""
        self._client = client
        self._options = dict(options)

    async def send(self, planned: Planned, timeout_s: float) -> AsyncGenerator[Update, None]:
        """Send a request and yield its messages until the answer ends. Raises: BatonError."""
        chunks = self._client.generate(
            list(planned.prompt_token_ids),
            max_tokens=planned.num_output_tokens,
            ignore_eos=True,
            timeout_s=timeout_s,
            **self._options,
        )
        try:
            async for chunk in chunks:
                end = chunk.end
                yield Update(
                    num_tokens=len(chunk.token_ids),
                    num_cached_tokens=end.usage.num_cached_tokens if end else None,
                    num_output_tokens=end.usage.num_output_tokens if end else None,
                    stages=tuple(end.times.items()) if end else (),
                )
        finally:
            await chunks.aclose()

    async def vocab_size(self) -> int:
        """The vocabulary size of the model. Raises: BatonError."""
        models = await self._client.models()
        wanted = self._options.get("model", "")
        sizes = [model.vocab_size for model in models if wanted in ("", model.model)]
        if not sizes:
            raise rpc_errors.NotFound(f"{wanted or 'a model'} is not served there")
        return min(sizes)

    async def close(self) -> None:
        """Close the connection to the router."""
        await self._client.close()


class OpenAiSender:
    """Sends a load's requests over HTTP to a server of the OpenAI API."""

    def __init__(
        self,
        url: str,
        *,
        model: str,
        api_key: str = "",
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            url: the base, with the version, such as http://127.0.0.1:8501/v1.
            extra: further fields of each body, such as {"ignore_eos": true}.
        """
        import aiohttp

        self._url = url.rstrip("/")
        self._model = model
        self._extra = dict(extra or {})
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # No limit of connections: in an open loop no request waits for another.
        self._session = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0),
            read_bufsize=_LINE_LIMIT_BYTES,
        )

    async def send(self, planned: Planned, timeout_s: float) -> AsyncGenerator[Update, None]:
        """Send a request and yield its messages until the answer ends. Raises: BatonError."""
        import aiohttp

        body = {
            "model": self._model,
            "prompt": list(planned.prompt_token_ids),
            "max_tokens": planned.num_output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._extra,
        }
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.post(
                f"{self._url}/completions", json=body, timeout=timeout
            ) as response:
                if response.status != 200:
                    raise _http_error(
                        response.status, await response.text(), response.headers.get("Retry-After")
                    )
                async for update in _read_events(response.content):
                    yield update
        except TimeoutError as error:
            raise rpc_errors.DeadlineExceeded(f"no end within {timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            raise rpc_errors.Unavailable(f"{self._url}: {error or type(error).__name__}") from error

    async def vocab_size(self) -> int:
        """Always 0 (unknown): the API has no call for it."""
        return 0

    async def close(self) -> None:
        """Close all HTTP connections."""
        await self._session.close()


async def _read_events(lines: AsyncIterable[bytes]) -> AsyncIterator[Update]:
    """Server-sent events up to `[DONE]`. Raises: BatonError for an error event, or a stream that
    ends without `[DONE]`."""
    async for line in lines:
        text = line.decode("utf-8", "replace").strip()
        if not text.startswith("data:"):
            continue
        data = text.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError as error:
            raise rpc_errors.Internal(f"an event is not JSON: {data[:80]!r}") from error
        if not isinstance(event, dict):
            raise rpc_errors.Internal(f"an event is not an object: {data[:80]!r}")
        if "error" in event:
            raise _stream_error(event["error"])
        yield _update(event)
    raise rpc_errors.Internal("the stream ended without [DONE]")


def _update(event: Mapping[str, Any]) -> Update:
    # The API does not say how many tokens a chunk has, only whether there are some. The usage in
    # the last chunk counts all of them.
    choices = event.get("choices") or ()
    has_tokens = any(choice.get("text") or choice.get("token_ids") for choice in choices)
    usage = event.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    return Update(
        num_tokens=int(has_tokens),
        num_cached_tokens=details.get("cached_tokens"),
        num_output_tokens=usage.get("completion_tokens"),
    )


def _http_error(status: int, text: str, retry_after: str | None) -> rpc_errors.BatonError:
    message = f"HTTP {status}: {_message_of(text)}"
    retry_after_s = float(retry_after) if retry_after and retry_after.isdecimal() else None
    if status == 429:
        return rpc_errors.NoCapacity(message, retry_after_s=retry_after_s)
    if status in (502, 503):
        return rpc_errors.Unavailable(message, retry_after_s=retry_after_s)
    if status in (408, 504):
        return rpc_errors.DeadlineExceeded(message)
    if status == 404:
        return rpc_errors.NotFound(message)
    if 400 <= status < 500:
        return rpc_errors.FailedPrecondition(message)
    return rpc_errors.Internal(message)


def _stream_error(error: Any) -> rpc_errors.BatonError:
    code = error.get("code") if isinstance(error, dict) else None
    status = code if isinstance(code, int) and 400 <= code < 600 else 500
    return _http_error(status, json.dumps({"error": error}), None)


def _message_of(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])[:_ERROR_LIMIT_CHARS]
    except (ValueError, KeyError, TypeError):
        return text.strip()[:_ERROR_LIMIT_CHARS]
