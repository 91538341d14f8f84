"""The routes of the OpenAI API, and those that probes and tools ask for.

Each request is one handler, whose cancellation (its client went away) ends the request at both
workers. Knows the front desk and how bodies are translated, not what they mean. One asyncio loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from aiohttp import web

from process import logs
from process.errors import BatonError
from process.memory_budget import MemoryGrant
from protos import inference_pb2
from services.router.caller import Caller
from services.router.clients import Clients
from services.router.front_desk import FrontDesk
from services.router.http_errors import ModelNotFound, http_error_of
from services.router.http_server import error_response
from services.router.openai import embeddings, openapi
from services.router.openai.answers import account_of
from services.router.openai.bodies import (
    REQUEST_ID,
    Bodies,
    authorization_of,
    request_id_of,
    traced_id_of,
)
from services.router.openai.each_prompt import EachPrompt, name_requests
from services.router.openai.event_stream import EventStream
from services.router.openai.fields import CHAT, COMPLETION, EMBEDDING, MAX_PROMPTS
from services.router.openai.generation import Read, collect, read_chat, read_completion, stream
from services.router.openai.http_call import HttpCall
from services.router.openai.model_names import adapters_of, with_model
from services.router.openai.records import Record
from services.router.openai.sampling import json_name
from services.router.times import StageTimes

logger = logging.getLogger(__name__)


class OpenAiRoutes:
    """See the module."""

    def __init__(self, desk: FrontDesk, clients: Clients) -> None:
        self._desk = desk
        self._clients = clients
        self._bodies = Bodies(clients.read_s)
        self._keep_alive_s = clients.keep_alive_s
        self._started_s = int(time.time())

    def add_to(self, app: web.Application) -> None:
        """Register every path."""
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
        """/v1/completions."""
        return await self._generate(request, COMPLETION, read_completion)

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """/v1/chat/completions."""
        return await self._generate(request, CHAT, read_chat)

    async def embeddings(self, request: web.Request) -> web.StreamResponse:
        """/v1/embeddings."""
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
                    requests = embeddings.requests_of(fields)
                most = embeddings.MOST_AT_ONCE
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
        text = await embeddings.answer(fields, name, messages, accounts)
        return web.json_response(text=text, headers=headers)

    async def models(self, request: web.Request) -> web.Response:
        """/v1/models."""
        self._caller(request)
        return web.json_response({"object": "list", "data": self._models()})

    async def model(self, request: web.Request) -> web.Response:
        """/v1/models/{model}."""
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
        """/health: this process answers."""
        return web.json_response({"status": "ok"})

    async def ready(self, request: web.Request) -> web.Response:
        """/ready: each model that is not scaled to zero has a worker of each role."""
        self._desk.ready()
        return web.json_response({"status": "ready"})

    async def openapi(self, request: web.Request) -> web.Response:
        """/openapi.json."""
        return web.json_response(openapi.document())

    async def _generate(
        self, request: web.Request, record: Record, read: Read
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
        """What the request is called here. Adds to `headers` what its answer says of that: a
        client's own word for it comes back, and is told beside ours in the log.

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
        """Those served, each with what its workers can take if there are any or they are waited
        for, and the workers' adapters, which are asked for in the same way."""
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
