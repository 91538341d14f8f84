"""What spans say of a store's calls and of the way of blocks, and the calls of a store or lender as
spans of the requests that made them.

Nothing is said of a request that is not traced. Chain hashes are keyed by tenant: they tell nobody
what a prompt is. Knows no store.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import grpc.aio

from kvstore.blocks import Block
from process import rpc
from process.spans import NOOP_SPAN, Span, Value, parse_headers, rpc_attributes, trace_headers
from process.tracing import Tracing

Request = TypeVar("Request")
Reply = TypeVar("Reply")
Context = grpc.aio.ServicerContext[Any, Any]
Unary = Callable[[Any, Request, Context], Awaitable[Reply]]


class Servicer(Protocol):
    """Whose calls are traced."""

    tracing: Tracing

    @property
    def node_id(self) -> str: ...


@contextmanager
def span_of(servicer: Servicer, name: str, context: Context) -> Iterator[None]:
    """Within it the span of one call, which lies within the caller's, is the current one."""
    with _follow(servicer, name, context) as span:
        try:
            yield
        except Exception as error:
            span.set({"rpc.response.status_code": rpc.status_of(error)[0].name})
            raise
        span.set({"rpc.response.status_code": "OK"})


def _follow(servicer: Servicer, name: str, context: Context) -> Span:
    if not servicer.tracing.is_on:
        return NOOP_SPAN
    headers = trace_headers(context.invocation_metadata() or ())
    about: dict[str, Value] = {
        "baton.store.node_id": servicer.node_id,
        **rpc_attributes("KvStore", name),
    }
    return servicer.tracing.follow(f"kvstore {name}", parse_headers(headers), about)


def call(handler: Unary[Request, Reply]) -> Unary[Request, Reply]:
    """Wrap a servicer's unary method: while it runs, its span is the current one."""
    name = handler.__name__

    @functools.wraps(handler)
    async def wrapped(self: Servicer, request: Request, context: Context) -> Reply:
        with span_of(self, name, context):
            return await handler(self, request, context)

    return wrapped


def of_match(node_id: str, asked: Sequence[bytes], found: Sequence[Block]) -> dict[str, Value]:
    """A lookup at one store."""
    about: dict[str, Value] = {
        "baton.store.node_id": node_id,
        "baton.num_blocks_asked": len(asked),
        "baton.num_blocks": len(found),
    }
    return about | of_blocks(found)


def of_transfer(
    node_id: str, transport: str, num_bytes: int, num_blocks: int, failed: Mapping[str, int]
) -> dict[str, Value]:
    """A put into a store or a get out of it. failed: number of blocks by reason."""
    about: dict[str, Value] = {
        "baton.store.node_id": node_id,
        "baton.transport": transport,
        "baton.num_bytes": num_bytes,
        "baton.num_blocks": num_blocks,
    }
    for reason, num_failed in failed.items():
        about[f"baton.not_usable.{reason}"] = num_failed
    return about


def of_blocks(blocks: Sequence[Block]) -> dict[str, Value]:
    """Which blocks: by the first and the last, and by tier."""
    hashes = [block.chain_hash for block in blocks if block.chain_hash]
    about: dict[str, Value] = {}
    if hashes:
        about |= {"baton.block.first": hashes[0].hex(), "baton.block.last": hashes[-1].hex()}
    for tier, num_blocks in Counter(block.tier for block in blocks).items():
        about[f"baton.tier.{tier.name.lower()}"] = num_blocks
    return about
