"""Snapshots: the cluster's status as JSON for the live page. A snapshot is made at most every
INTERVAL_S / 2, for all viewers together; the history is sent to each viewer from where it left off.

The status is what the last heartbeats said: a snapshot calls no worker and rechecks no invariant.
Bounded by NUM_REQUESTS requests and the length of the history. One asyncio loop.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable

from google.protobuf import json_format
from google.protobuf.message import Message

from process.deadline import Clock
from protos import inference_pb2

INTERVAL_S = 1.0
"""Seconds between two snapshots to one viewer."""

NUM_REQUESTS = 32

Status = Callable[
    [inference_pb2.GetClusterStatusRequest], Awaitable[inference_pb2.GetClusterStatusReply]
]


class Snapshots:
    """Maker of snapshots. What cannot change any more, a finished request or a past interval, is
    encoded once, so that viewers do not delay the loop that serves requests.
    """

    def __init__(self, status: Status, clock: Clock = time.monotonic) -> None:
        self._status = status
        self._clock = clock
        self._made_s = float("-inf")
        self._text = ""
        self._points: dict[int, str] = {}
        self._ended: dict[tuple[str, str, int], str] = {}

    async def text(self, after_unix_ms: int = 0) -> tuple[str, int]:
        """Return one JSON object: `status`, `requests`, and the `history` after `after_unix_ms`.

        Returns: the text, and the end of its history in milliseconds since the epoch.
        """
        if self._clock() - self._made_s >= INTERVAL_S / 2:
            # Set first: a viewer that asks meanwhile gets the previous text.
            made_s, self._made_s = self._made_s, self._clock()
            try:
                await self._make()
            except BaseException:
                self._made_s = made_s
                raise
        if not self._text:
            await self._make()
        new = [text for unix_ms, text in self._points.items() if unix_ms > after_unix_ms]
        last_ms = max(self._points, default=0)
        return f'{self._text},"history":[{",".join(new)}]}}', max(last_ms, after_unix_ms)

    async def _make(self) -> None:
        reply = await self._status(
            inference_pb2.GetClusterStatusRequest(
                as_heard=True, num_requests=NUM_REQUESTS, with_history=True
            )
        )
        self._points = {
            point.unix_ms: self._points.get(point.unix_ms) or to_json(point)
            for point in reply.history
        }
        texts = [self._request(request) for request in reply.requests]
        self._ended = {
            key: self._ended[key] for key in map(_key, reply.requests) if key in self._ended
        }
        for name in ("history", "requests"):
            reply.ClearField(name)
        self._text = f'{{"status":{to_json(reply)},"requests":[{",".join(texts)}]'

    def _request(self, request: inference_pb2.RequestInfo) -> str:
        if not request.outcome:
            return to_json(request)
        key = _key(request)
        if key not in self._ended:
            self._ended[key] = to_json(request)
        return self._ended[key]


def _key(request: inference_pb2.RequestInfo) -> tuple[str, str, int]:
    return request.tenant, request.request_id, request.arrived_unix_ms


def to_json(message: Message) -> str:
    """Return all fields of a message by name, on one line. 64-bit integers are strings, as in
    protobuf's JSON.
    """
    values = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return json.dumps(values, separators=(",", ":"))
