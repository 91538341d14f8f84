"""What comes with an HTTP request: its JSON body, and headers that say more. Strict, bounded.

A large body is read by a thread of its own, one at a time, so that everybody's tokens go out
meanwhile. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aiohttp import web

from process.errors import InvalidArgument
from process.memory_budget import MemoryGrant
from services.router import identity
from services.router.openai.json_pieces import JsonPieces
from services.router.openai.records import Record

REQUEST_ID = "x-request-id"
IDEMPOTENCY_KEY = "idempotency-key"
BUDGET_MS = "x-baton-budget-ms"
PROVENANCE = "x-baton-provenance"

_MAX_TRACED_CHARS = 512
_MAX_BYTES_ON_LOOP = 32 * 1024
"""About half a millisecond; a thread costs a tenth of that."""


class Bodies:
    """Reads them, and ends its thread with `close`."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: for a body to arrive."""
        self._timeout_s = timeout_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bodies")

    async def read(
        self, request: web.Request, grant: MemoryGrant, record: Record
    ) -> dict[str, Any]:
        """The fields of a body that is a `record`, with what headers say that it could have said
        itself; it has the last word. `grant` was taken for the longest body that may come.

        Raises: InvalidArgument; NoCapacity when it arrives slowly and others wait for its bytes;
        HTTPException for what HTTP itself refuses.
        """
        data = await _received(request, self._timeout_s, grant)
        grant.shrink(len(data))
        if len(data) <= _MAX_BYTES_ON_LOOP:
            return record.read(_with_headers(parse(data), request.headers), "")
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, _fields_of, data, request.headers, record
        )

    def close(self) -> None:
        """What is still read is thrown away."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _fields_of(data: bytes, headers: Mapping[str, str], record: Record) -> dict[str, Any]:
    return record.read(_with_headers(parse(data), headers), "")


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


def parse(data: bytes) -> Mapping[str, Any]:
    """Raises: InvalidArgument, saying where it is no JSON."""
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
    """What the request is called here: the client's key for sending it again, or a fresh id.

    Raises: InvalidArgument for a key that no answer could carry.
    """
    given = headers.get(IDEMPOTENCY_KEY, "")
    if not _is_plain(given):
        raise InvalidArgument(IDEMPOTENCY_KEY, "must be printable ASCII")
    return given or identity.fresh_request_id()


def traced_id_of(headers: Mapping[str, str]) -> str:
    """What a client or a proxy before it calls the request in its own logs, maybe several requests
    the same; empty: nothing that an answer could carry.
    """
    given = headers.get(REQUEST_ID, "")
    return given if _is_plain(given) and len(given) <= _MAX_TRACED_CHARS else ""


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isprintable()


def authorization_of(headers: Mapping[str, str]) -> str:
    """What says who asks; empty: nothing. Bytes that are no text match no key."""
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
