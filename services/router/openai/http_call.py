"""HttpCall: what the trace of a request says of the HTTP call that brought it."""

from __future__ import annotations

import asyncio

from aiohttp import web

from process import trace_spans
from process.errors import Cancelled
from process.trace_spans import Attributes
from services.router.http_errors import http_error_of
from services.router.openai.bodies import traced_id_of
from services.router.request_trace import Call


class HttpCall(Call):
    """See the module. `is_streamed` is set when the body was read."""

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
