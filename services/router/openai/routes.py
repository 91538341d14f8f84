"""OpenAiRoutes: the handlers of the OpenAI API's paths, and of /health, /ready and /openapi.json.
They know RouterService and the translation modules, not the meaning of fields. One asyncio loop.

Each HTTP request is one handler; a client that disconnects cancels it, which ends the request at
its workers. The handler reads the body (`Bodies`), translates it (`ParsedBody`), serves its prompts
at the same time (`EachPrompt`), and answers at once (`collect`) or as server-sent events (`stream`,
`EventStream`).

An error before the first byte is a status with a body. After that it is the last event of the
stream, which then ends without `[DONE]`: OpenAI's client raises the error, and other clients see
that the end is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web

from process import logs, trace_spans
from process.background_tasks import end_tasks, start_task
from process.deadline import Deadline
from process.memory_budget import MemoryGrant
from process.rpc_errors import AlreadyExists, BatonError, Cancelled, InvalidArgument
from process.trace_spans import Attributes
from protos import inference_pb2
from services.router import identity
from services.router.callers import Caller
from services.router.client_limits import Clients
from services.router.http_errors import ModelNotFound, http_error_of
from services.router.http_server import error_response
from services.router.openai import chat, completions, openapi
from services.router.openai.answers import Envelope, OutputSample, account_of
from services.router.openai.chat import tool_use
from services.router.openai.json_pieces import JsonPieces
from services.router.openai.schemas import (
    CHAT,
    COMPLETION,
    EMBEDDING,
    MAX_PROMPTS,
    BodyRecord,
    ResponseOptions,
    json_name,
    response_options,
)
from services.router.request_stats import StageTimes
from services.router.served_models import OneModel, ServedModels
from services.router.service import RouterService
from services.router.tracing import TracedCall


def adapters_of(model: OneModel) -> set[str]:
    """Return the names of a model's adapters that requests may use."""
    return set(model.candidates.adapter_names())


def with_model(
    fields: Mapping[str, Any], models: ServedModels
) -> tuple[Mapping[str, Any], OneModel]:
    """Find the model that a body's `model` names, directly or by a loaded adapter. Returns: the
    body's fields, with an adapter moved to `baton.adapter`, and the model.

    Raises: ModelNotFound for a name that is neither; InvalidArgument for two adapters.
    """
    name = fields.get("model", "")
    for model in models:
        if name in adapters_of(model) - models.all_names:
            own = fields.get("baton", {})
            if own.get("adapter", name) != name:
                raise InvalidArgument("baton.adapter", "differs from the adapter that model names")
            return {**fields, "model": model.name, "baton": {**own, "adapter": name}}, model
    try:
        return fields, models.find(name)
    except InvalidArgument as error:
        raise ModelNotFound(str(error).removeprefix("model: ")) from None


REQUEST_ID = "x-request-id"
IDEMPOTENCY_KEY = "idempotency-key"
BUDGET_MS = "x-baton-budget-ms"
PROVENANCE = "x-baton-provenance"

_MAX_TRACED_CHARS = 512
_MAX_BYTES_ON_LOOP = 32 * 1024
"""Largest body that is parsed on the loop. It takes about half a millisecond; a switch to a thread
costs a tenth of that.
"""


class Bodies:
    """Reader of JSON bodies. Large bodies are parsed on one thread, one at a time, so that the loop
    keeps sending tokens. `close` ends the thread.
    """

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: limit for a body to arrive."""
        self._timeout_s = timeout_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bodies")

    async def read(
        self, request: web.Request, grant: MemoryGrant, record: BodyRecord
    ) -> dict[str, Any]:
        """Read a body and check it as a `record`. Headers set fields that the body leaves out.
        `grant`: memory reserved for the longest allowed body; it shrinks to the actual length.

        Returns: the fields of the body.
        Raises: InvalidArgument; NoCapacity when the body arrives slowly while others wait for its
            memory; HTTPException for what HTTP itself refuses.
        """
        data = await _received(request, self._timeout_s, grant)
        grant.shrink(len(data))
        if len(data) <= _MAX_BYTES_ON_LOOP:
            return record.read(_with_headers(parse_body(data), request.headers), "")
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, _fields_of, data, request.headers, record
        )

    def close(self) -> None:
        """End the thread, and drop bodies that it has not parsed."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _fields_of(data: bytes, headers: Mapping[str, str], record: BodyRecord) -> dict[str, Any]:
    return record.read(_with_headers(parse_body(data), headers), "")


async def _received(request: web.Request, timeout_s: float, grant: MemoryGrant) -> bytes:
    if request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType(text="content-type: must be application/json")
    if request.headers.get("content-encoding", "identity") != "identity":
        raise web.HTTPUnsupportedMediaType(text="content-encoding: send the body as it is")
    try:
        async with asyncio.timeout(timeout_s), grant.reading():
            return await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout(text="the body did not arrive in time") from None


def parse_body(data: bytes) -> Mapping[str, Any]:
    """Parse a body as a JSON object. Raises: InvalidArgument with the position of the error."""
    try:
        value = _PIECES.loads(data.decode())
    except UnicodeDecodeError:
        raise InvalidArgument("body", "is not UTF-8") from None
    except RecursionError:
        raise InvalidArgument("body", "is nested too deep") from None
    except ValueError as error:
        where = f" at character {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        raise InvalidArgument("body", f"is no JSON{where}") from None
    if not isinstance(value, dict):
        raise InvalidArgument("body", "must be an object")
    return value


def request_id_of(headers: Mapping[str, str]) -> str:
    """Return the request id: the client's idempotency key, or a fresh id.

    Raises: InvalidArgument for a key that no header can carry.
    """
    given = headers.get(IDEMPOTENCY_KEY, "")
    if not _is_plain(given):
        raise InvalidArgument(IDEMPOTENCY_KEY, "must be printable ASCII")
    return given or identity.fresh_request_id()


def traced_id_of(headers: Mapping[str, str]) -> str:
    """Return the id that a client or proxy uses for the request in its own logs (x-request-id);
    several requests may share one. Empty: none, or one that no header can carry.
    """
    given = headers.get(REQUEST_ID, "")
    return given if _is_plain(given) and len(given) <= _MAX_TRACED_CHARS else ""


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isprintable()


def authorization_of(headers: Mapping[str, str]) -> str:
    """Return the Authorization header; empty: none. Bytes outside ASCII are replaced, and match no
    key.
    """
    return headers.get("authorization", "").encode("ascii", "replace").decode()


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_PIECES = JsonPieces(_no_constant)


def _with_headers(body: Mapping[str, Any], headers: Mapping[str, str]) -> Mapping[str, Any]:
    own: dict[str, Any] = {}
    if BUDGET_MS in headers:
        text = headers[BUDGET_MS]
        if not (text.isascii() and text.isdecimal() and len(text) <= 10):
            raise InvalidArgument(BUDGET_MS, "must be a whole number of milliseconds")
        own["budget_ms"] = int(text)
    if PROVENANCE in headers:
        if headers[PROVENANCE] not in ("0", "1"):
            raise InvalidArgument(PROVENANCE, "must be 0 or 1")
        own["provenance"] = headers[PROVENANCE] == "1"
    given = body.get("baton")
    if not own or not (given is None or isinstance(given, dict)):
        return body
    return {**body, "baton": {**own, **(given or {})}}


_LAST_WORD_S = 1.0
"""Seconds for the event of an error to be written: a client that has stopped reading is not waited
for.
"""
_END_S = 60.0
"""Seconds for the end of an answer to be written. Guessed: far above what a slow connection needs
for the buffered bytes.
"""

_COMMENT = b": keep-alive\n\n"

_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx and similar proxies would buffer events
}
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


class EventStream:
    """Server-sent events to one client.

    The stream begins with its first event, so that an earlier error still has a status of its own.
    After `keep_alive_s` without an event a comment is sent, which clients ignore: proxies close a
    connection that is silent for long, also before its first byte. A slow client blocks its writer,
    with at most the socket's buffer between them; messages produced meanwhile are merged upstream.
    """

    def __init__(
        self, request: web.Request, headers: Mapping[str, str], keep_alive_s: float
    ) -> None:
        """`keep_alive_s`: seconds without an event after which a comment is sent."""
        self._request = request
        self._keep_alive_s = keep_alive_s
        self._written_s = asyncio.get_running_loop().time()
        self._writing = asyncio.Lock()
        self._response = web.StreamResponse(headers={**_HEADERS, **headers})
        self.has_begun = False
        """Whether the status was sent."""

    @property
    def response(self) -> web.StreamResponse:
        """Response that the handler returns."""
        return self._response

    async def send(self, event: Mapping[str, Any]) -> None:
        """Send one event. Raises: ConnectionError when the client has disconnected."""
        async with self._writing:
            await self._write(f"data: {_encode(event)}\n\n".encode())

    @contextlib.asynccontextmanager
    async def kept_alive(self) -> AsyncIterator[None]:
        """Send a comment whenever nothing else is sent for `keep_alive_s` while the body runs. The
        first comment begins the stream, so a later error is an event.
        """
        commenting = start_task(self._comment(), "keep an event stream alive")
        try:
            yield
        finally:
            await end_tasks([commenting])

    async def end(self, last: Mapping[str, Any] | None = None, *, end_s: float = _END_S) -> None:
        """Send `last`, if any, and `[DONE]`, and end the stream. The request's deadline no longer
        applies; a client that does not read the end within `end_s` has its connection aborted.
        Raises: ConnectionError when the client has disconnected.
        """
        try:
            async with asyncio.timeout(end_s):
                if last is not None:
                    await self.send(last)
                await self._response.write(b"data: [DONE]\n\n")
                await self._response.write_eof()
        except TimeoutError:
            self._abort()

    async def fail(self, event: Mapping[str, Any]) -> None:
        """End the stream with an error event and without `[DONE]`. Never raises; a client that does
        not read it in time has its connection aborted.
        """
        try:
            async with asyncio.timeout(_LAST_WORD_S):
                await self.send(event)
                await self._response.write_eof()
        except (TimeoutError, ConnectionError):
            self._abort()

    async def _comment(self) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionError):  # the next event raises it, too
            while True:
                await asyncio.sleep(self._written_s + self._keep_alive_s - loop.time())
                async with self._writing:
                    if loop.time() >= self._written_s + self._keep_alive_s:
                        await self._write(_COMMENT)

    async def _write(self, data: bytes) -> None:
        if not self.has_begun:
            self.has_begun = True
            await self._response.prepare(self._request)
        await self._response.write(data)
        self._written_s = asyncio.get_running_loop().time()

    def _abort(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()


Take = Callable[[int, inference_pb2.GenerateResponse], Awaitable[None]]
"""Callback for each message, with the number of its prompt."""


_PROMPT_FIELDS = ("text", "token_ids.ids")


@dataclass(frozen=True)
class EachPrompt:
    """The requests of one body, served at the same time."""

    desk: RouterService
    caller: Caller
    requests: Sequence[inference_pb2.GenerateRequest]
    times: StageTimes
    """Stage times, which began with the HTTP request; used for the first prompt."""
    call: TracedCall
    most_at_once: int
    rename: Callable[[str], str]
    """Returns the body's name of a field of its requests."""

    async def serve(self, take: Take) -> None:
        """Serve all requests, at most `most_at_once` at a time.

        Raises: the first BatonError, which names fields as the body does, or the first
            ConnectionError of `take`. The other requests are cancelled by then.
        """
        # One deadline for the body: a request that waits for its turn gets no extra time.
        deadline = self.desk.deadline(self.requests[0])
        if len(self.requests) == 1:
            await self._one(0, take, deadline)
            return
        room = asyncio.Semaphore(self.most_at_once)

        async def in_turn(prompt: int) -> None:
            async with room:
                await self._one(prompt, take, deadline)

        problem: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as group:
                for prompt in range(len(self.requests)):
                    group.create_task(in_turn(prompt))
        except* (BatonError, ConnectionError) as errors:
            problem = _first(errors)
        # Not raised inside except*, which might wrap it in an exception group.
        if problem is not None:
            raise problem from None

    async def _one(self, prompt: int, take: Take, deadline: Deadline) -> None:
        try:
            await self.desk.serve(
                self.requests[prompt],
                self.caller,
                deadline=deadline,
                send=partial(take, prompt),
                times=self.times if prompt == 0 else StageTimes(),
                call=self.call,
            )
        except InvalidArgument as error:
            field = error.field if len(self.requests) == 1 else _of_prompt(error.field, prompt)
            raise error.renamed(self.rename(field)) from None
        except AlreadyExists:
            raise AlreadyExists(
                f"idempotency-key: {self.requests[prompt].request_id} is under way with another "
                "body; send the same one, or another key"
            ) from None


def name_requests(requests: Sequence[inference_pb2.GenerateRequest], request_id: str) -> None:
    """Set the ids of a body's requests. Each of several prompts gets its own, the same when the
    body is sent again.
    """
    for number, request in enumerate(requests):
        request.request_id = request_id if len(requests) == 1 else f"{request_id}.{number}"


def _of_prompt(name: str, prompt: int) -> str:
    """Return a field's name with the number of the prompt in it, if the field is a part of the
    prompt.
    """
    field, bracket, rest = name.partition("[")
    return f"{field}[{prompt}]{bracket}{rest}" if field in _PROMPT_FIELDS else name


def _first(errors: BaseExceptionGroup[Exception]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ParsedBody:
    """One body, translated: its requests and how to build the answer."""

    requests: Sequence[inference_pb2.GenerateRequest]
    look: ResponseOptions
    make_sample: Callable[[int, int], OutputSample]
    """Creates a choice from the number of its prompt and of its sample."""
    kind: str
    answer_id: str
    model: str
    """Name of the model as the client wrote it."""
    rename: Callable[[str], str]
    """Returns the body's name of a field of its requests."""

    def samples(self) -> dict[tuple[int, int], OutputSample]:
        """Create every choice of the answer, in the order of their indices."""
        num_samples = self.requests[0].sampling.n or 1
        return {
            (prompt, index): self.make_sample(prompt, index)
            for prompt in range(len(self.requests))
            for index in range(num_samples)
        }

    def envelope(self) -> Envelope:
        """Create the fields around the choices."""
        return Envelope(self.kind, self.answer_id, self.model, self.look)


Read = Callable[[Mapping[str, Any], str, ServedModels], ParsedBody]
"""Translates a body's fields, given its request id and the served models. Raises: InvalidArgument.
"""


def read_completion(given: Mapping[str, Any], request_id: str, models: ServedModels) -> ParsedBody:
    """Translate a body of /v1/completions. Raises: InvalidArgument."""
    fields, model = with_model(given, models)
    encoder = model.preparer.encoder
    requests, look = completions.completion_requests(fields), response_options(fields)
    num_samples = requests[0].sampling.n or 1

    @functools.cache
    def text_of(prompt: int) -> str:
        return completions.text_of(requests[prompt], encoder.tokenizer)

    def make_sample(prompt: int, index: int) -> OutputSample:
        return completions.CompletionSample(
            prompt * num_samples + index,
            fields,
            requests[prompt],
            look,
            functools.partial(text_of, prompt),
            encoder.names,
        )

    return ParsedBody(
        requests,
        look,
        make_sample,
        kind=completions.KIND,
        answer_id=f"cmpl-{request_id}",
        model=given.get("model") or model.name,
        rename=functools.partial(json_name, body=given),
    )


def read_chat(given: Mapping[str, Any], request_id: str, models: ServedModels) -> ParsedBody:
    """Translate a body of /v1/chat/completions. Raises: InvalidArgument."""
    fields, model = with_model(given, models)
    encoder = model.preparer.encoder
    use = tool_use(fields, encoder.tool_call_format, takes_tools=encoder.takes_tools)
    request, look = chat.chat_request(fields, use), response_options(fields)

    def make_sample(prompt: int, index: int) -> OutputSample:
        return chat.ChatSample(index, request_id, request, look, use, encoder.names)

    return ParsedBody(
        [request],
        look,
        make_sample,
        kind=chat.CHUNK_KIND if look.is_streamed else chat.KIND,
        answer_id=f"chatcmpl-{request_id}",
        model=given.get("model") or model.name,
        rename=functools.partial(json_name, body=given),
    )


async def collect(asked: ParsedBody, each: EachPrompt) -> dict[str, Any]:
    """Serve the requests and return the whole answer. Raises: BatonError."""
    envelope, samples = asked.envelope(), asked.samples()

    async def take(prompt: int, message: inference_pb2.GenerateResponse) -> None:
        envelope.take(prompt, message)
        samples[prompt, message.sample_index].delta(message)

    await each.serve(take)
    return envelope.whole([sample.whole() for sample in samples.values()])


async def stream(asked: ParsedBody, each: EachPrompt, events: EventStream) -> web.StreamResponse:
    """Serve the requests and send the answer as events. Raises: errors before the first byte; later
    ones are events.
    """
    envelope, samples = asked.envelope(), asked.samples()

    async def take(prompt: int, message: inference_pb2.GenerateResponse) -> None:
        envelope.take(prompt, message)
        choice = samples[prompt, message.sample_index].delta(message)
        await events.send(envelope.chunk(choice, message))

    try:
        async with events.kept_alive():
            await each.serve(take)
        await events.end(envelope.usage_chunk() if asked.look.has_usage else None)
    except ConnectionError:
        # The answer is complete, but its client has disconnected.
        with contextlib.suppress(ConnectionError):
            await events.response.write_eof()
    except Exception as error:
        if not events.has_begun:
            raise
        found = http_error_of(error)
        if found.status == 500:
            logs.event(logger, "stream_failed", level=logging.ERROR, exc_info=True)
        await events.fail(found.body())
    return events.response


class OpenAiRoutes:
    """Handlers of the OpenAI API, and of the paths for probes and tools."""

    def __init__(self, desk: RouterService, clients: Clients) -> None:
        self._desk = desk
        self._clients = clients
        self._bodies = Bodies(clients.read_s)
        self._keep_alive_s = clients.keep_alive_s
        self._started_s = int(time.time())

    def add_to(self, app: web.Application) -> None:
        """Register every path with `app`."""
        app.on_cleanup.append(self._close)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_post("/v1/chat/completions", self.chat_completions)
        app.router.add_post("/v1/embeddings", self.embeddings)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/v1/models/{model:.+}", self.model)
        app.router.add_get("/health", self.health)
        app.router.add_get("/ready", self.ready)
        app.router.add_get("/openapi.json", self.openapi)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Serve POST /v1/completions."""
        return await self._generate(request, COMPLETION, read_completion)

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """Serve POST /v1/chat/completions."""
        return await self._generate(request, CHAT, read_chat)

    async def embeddings(self, request: web.Request) -> web.StreamResponse:
        """Serve POST /v1/embeddings."""
        times, headers = StageTimes(), dict[str, str]()
        found: dict[int, inference_pb2.GenerateResponse] = {}

        async def take(prompt: int, message: inference_pb2.GenerateResponse) -> None:
            found[prompt] = message

        try:
            request_id = self._name(request, headers)
            caller = self._caller(request)
            call = HttpCall(request)
            async with self._grant(request, caller) as grant:
                with self._unread_traced(call, times):
                    given = await self._bodies.read(request, grant, EMBEDDING)
                    fields, model = with_model(given, self._desk.models)
                    requests = completions.embedding_requests(fields)
                most = completions.MOST_AT_ONCE
                rename = partial(json_name, body=given)
                name_requests(requests, request_id)
                each = EachPrompt(self._desk, caller, requests, times, call, most, rename)
                await each.serve(take)
        except BatonError as error:
            return _refused(error, headers)
        messages = [found[prompt] for prompt in range(len(requests))]
        wants_accounts = fields.get("baton", {}).get("provenance", False)
        accounts = [account_of(message) for message in messages] if wants_accounts else []
        name = given.get("model") or model.name
        text = await completions.embedding_answer(fields, name, messages, accounts)
        return web.json_response(text=text, headers=headers)

    async def models(self, request: web.Request) -> web.Response:
        """Serve GET /v1/models."""
        self._caller(request)
        return web.json_response({"object": "list", "data": self._models()})

    async def model(self, request: web.Request) -> web.Response:
        """Serve GET /v1/models/{model}."""
        self._caller(request)
        name = request.match_info["model"]
        by_other_name = {
            other: model.name for model in self._desk.models for other in model.served.names
        }
        for entry in self._models():
            if entry["id"] == by_other_name.get(name, name):
                return web.json_response(entry)
        raise ModelNotFound(f"'{name[:128]}' is not served here")

    async def health(self, request: web.Request) -> web.Response:
        """Serve GET /health: 200 while this process answers."""
        return web.json_response({"status": "ok"})

    async def ready(self, request: web.Request) -> web.Response:
        """Serve GET /ready: 200 when each model that is not scaled to zero has a worker of each
        role.
        """
        self._desk.ready()
        return web.json_response({"status": "ready"})

    async def openapi(self, request: web.Request) -> web.Response:
        """Serve GET /openapi.json."""
        return web.json_response(openapi.document())

    async def _generate(
        self, request: web.Request, record: BodyRecord, read: Read
    ) -> web.StreamResponse:
        times, headers = StageTimes(), dict[str, str]()
        try:
            request_id = self._name(request, headers)
            caller = self._caller(request)
            call = HttpCall(request)
            async with self._grant(request, caller) as grant:
                with self._unread_traced(call, times):
                    fields = await self._bodies.read(request, grant, record)
                    asked = read(fields, request_id, self._desk.models)
                call.is_streamed = asked.look.is_streamed
                name_requests(asked.requests, request_id)
                each = EachPrompt(
                    self._desk, caller, asked.requests, times, call, MAX_PROMPTS, asked.rename
                )
                if asked.look.is_streamed:
                    return await stream(
                        asked, each, EventStream(request, headers, self._keep_alive_s)
                    )
                return web.json_response(await collect(asked, each), headers=headers)
        except BatonError as error:
            return _refused(error, headers)

    @contextmanager
    def _unread_traced(self, call: HttpCall, times: StageTimes) -> Iterator[None]:
        try:
            yield
        except BatonError as error:
            self._desk.trace_unread(call, times, error)
            raise

    def _name(self, request: web.Request, headers: dict[str, str]) -> str:
        """Return the request id. Adds the answer's x-request-id to `headers`: the client's own,
        which is then logged together with the request id, or the request id.

        Raises: InvalidArgument.
        """
        traced_id = traced_id_of(request.headers)
        if traced_id:
            headers[REQUEST_ID] = traced_id
        request_id = request_id_of(request.headers)
        if traced_id:
            logs.event(logger, "http_request", request_id=request_id, x_request_id=traced_id)
        headers.setdefault(REQUEST_ID, request_id)
        return request_id

    async def _close(self, app: web.Application) -> None:
        self._bodies.close()

    def _grant(self, request: web.Request, caller: Caller) -> MemoryGrant:
        return self._clients.grant(caller, request.remote or "", request.content_length)

    def _caller(self, request: web.Request) -> Caller:
        return self._desk.caller_of(authorization_of(request.headers))

    def _models(self) -> list[dict[str, Any]]:
        """Return entries of the served models and of their workers' adapters. `max_model_len` is
        the smallest context window among a model's workers; absent where it is unknown.
        """
        listed = []
        for model in self._desk.models:
            windows = [info.context_window for info in self._desk.infos(model)]
            more: dict[str, Any] = {"max_model_len": min(windows)} if windows else {}
            listed.append(self._entry(model.name, more))
            for adapter in sorted(adapters_of(model) - self._desk.models.all_names):
                listed.append(self._entry(adapter, {**more, "parent": model.name}))
        return listed

    def _entry(self, name: str, more: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._started_s,
            "owned_by": "baton",
            **more,
        }


def _refused(error: BatonError, headers: Mapping[str, str]) -> web.Response:
    response = error_response(http_error_of(error))
    response.headers.update(headers)
    return response


class HttpCall(TracedCall):
    """An HTTP request as its trace span describes it. `is_streamed`: set after the body is read."""

    is_streamed = False

    def __init__(self, request: web.Request) -> None:
        self._request = request
        resource = request.match_info.route.resource
        self._route = resource.canonical if resource is not None else request.path
        self.name = f"{request.method} {self._route}"
        self.headers = trace_spans.trace_headers(request.headers.items())

    def about(self) -> Attributes:
        request = self._request
        about: dict[str, str | int] = {
            "http.request.method": request.method,
            "http.route": self._route,
            "url.path": request.path,
            "url.scheme": request.scheme,
        }
        traced_id = traced_id_of(request.headers)
        if traced_id:
            about["http.request.header.x-request-id"] = traced_id
        ours = request.get_extra_info("sockname")
        if ours:
            about |= {"server.address": ours[0], "server.port": ours[1]}
        return about

    def status(self, error: BaseException | None, *, has_begun: bool) -> Attributes:
        if error is None or (has_begun and self.is_streamed):
            return {"http.response.status_code": 200}
        if isinstance(error, Cancelled | asyncio.CancelledError | ConnectionError):
            return {}  # the client is gone
        return {"http.response.status_code": http_error_of(error).status}
