"""The handle: what travels instead of KV, as a value, built by prefill and checked by decode.

A handle is a claim of another process: `check` refuses one that is not for exactly this tenant,
model, layout and prompt, or is too old. What it names is verified again, block by block, when it is
fetched. Signature fields stay empty in this version. Pure; wall-clock time comes in as an argument.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore import wire
from kvstore.block import Block
from kvstore.errors import DEADLINE, INCARNATION
from process.errors import BatonError
from protos import common_pb2
from services.worker.provenance import FINGERPRINT

VERSION = 1

CLOCK_SLACK_S = 2.0
"""Guessed: how far the clocks of two machines may differ before a handle seems too old."""

INCARNATION_BYTES = 16
_TAIL_HASH = b""

WallClock = Callable[[], float]


class HandleRefused(BatonError):
    """The handle is not used; `reason` is the word that provenance counts its blocks under."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Run:
    """Consecutive blocks of one prompt in one store, pinned by one lease."""

    node_id: str
    store_address: str
    store_incarnation: bytes
    lease_id: str
    first_block: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Handle:
    """One prompt's KV: full blocks 0.. in `runs`, then the tail."""

    request_id: str
    tenant: str
    adapter: str
    model_fingerprint: str
    producer_id: str
    producer_incarnation: bytes
    block_size: int
    num_tokens: int
    runs: tuple[Run, ...]
    tail: Run | None
    deadline_unix_ms: int

    @property
    def lease_ids(self) -> tuple[str, ...]:
        """Each once, in order."""
        runs = (*self.runs, *((self.tail,) if self.tail else ()))
        return tuple(dict.fromkeys(run.lease_id for run in runs if run.lease_id))


def deadline_unix_ms(left_s: float, now: WallClock = time.time) -> int:
    """The wall-clock moment `left_s` from now."""
    return int((now() + left_s) * 1000)


def to_proto(handle: Handle) -> common_pb2.KvHandle:
    """The handle on the wire."""
    message = common_pb2.KvHandle(
        version=VERSION,
        request_id=handle.request_id,
        tenant=handle.tenant,
        model_fingerprint=bytes.fromhex(handle.model_fingerprint),
        producer_id=handle.producer_id,
        producer_incarnation=handle.producer_incarnation,
        block_size=handle.block_size,
        num_tokens=handle.num_tokens,
        runs=[_run_to_proto(run) for run in handle.runs],
        deadline_unix_ms=handle.deadline_unix_ms,
        adapter=handle.adapter,
    )
    if handle.tail is not None:
        message.tail.CopyFrom(_run_to_proto(handle.tail))
    return message


def from_proto(message: common_pb2.KvHandle) -> Handle:
    """Parse. Raises: HandleRefused for another version or a shape that no producer makes."""
    if message.version != VERSION:
        raise HandleRefused(FINGERPRINT, f"handle version {message.version}, ours is {VERSION}")
    if len(message.producer_incarnation) != INCARNATION_BYTES:
        raise HandleRefused(INCARNATION, "the producer's incarnation is not 16 bytes")
    return Handle(
        request_id=message.request_id,
        tenant=message.tenant,
        adapter=message.adapter,
        model_fingerprint=message.model_fingerprint.hex(),
        producer_id=message.producer_id,
        producer_incarnation=message.producer_incarnation,
        block_size=message.block_size,
        num_tokens=message.num_tokens,
        runs=tuple(_run_from_proto(run) for run in message.runs),
        tail=_run_from_proto(message.tail) if message.HasField("tail") else None,
        deadline_unix_ms=message.deadline_unix_ms,
    )


def check(
    handle: Handle,
    *,
    request_id: str,
    tenant: str,
    adapter: str,
    model_fingerprint: str,
    block_size: int,
    now: WallClock = time.time,
) -> None:
    """Refuse a handle that is not for this request.

    Raises: HandleRefused with the reason to count.
    """
    expected = (
        ("request id", handle.request_id, request_id),
        ("tenant", handle.tenant, tenant),
        ("adapter", handle.adapter, adapter),
        ("model fingerprint", handle.model_fingerprint, model_fingerprint.lower()),
        ("block size", handle.block_size, block_size),
    )
    for what, theirs, ours in expected:
        if theirs != ours:
            raise HandleRefused(FINGERPRINT, f"the handle is of another {what}")
    if now() * 1000 > handle.deadline_unix_ms + CLOCK_SLACK_S * 1000:
        raise HandleRefused(DEADLINE, "the handle's deadline has passed")


def blocks_in_order(
    handle: Handle, chain_hashes: Sequence[bytes]
) -> tuple[list[tuple[Run, Block]], str | None]:
    """The handle's full blocks from block 0, as far as each is the one that the prompt asks for.

    Args: chain_hashes: of the prompt's full blocks, computed here with our own tenant key.
    Returns: (run, block) per leading block, and why it ends before the handle does (None: it does
    not).
    """
    found: list[tuple[Run, Block]] = []
    for run in handle.runs:
        if run.first_block != len(found):
            return found, FINGERPRINT
        for block in run.blocks:
            index = len(found)
            is_ours = index < len(chain_hashes) and block.chain_hash == chain_hashes[index]
            if not is_ours or block.num_tokens != handle.block_size:
                return found, FINGERPRINT
            found.append((run, block))
    return found, None


def tail_block(handle: Handle, num_full_blocks: int) -> tuple[Run, Block] | None:
    """The tail behind `num_full_blocks` full blocks; None if there is none that fits."""
    tail = handle.tail
    if tail is None or tail.first_block != num_full_blocks or len(tail.blocks) != 1:
        return None
    block = tail.blocks[0]
    fits = (
        block.chain_hash == _TAIL_HASH
        and 0 < block.num_tokens < handle.block_size
        and num_full_blocks * handle.block_size + block.num_tokens == handle.num_tokens
    )
    return (tail, block) if fits else None


def _run_to_proto(run: Run) -> common_pb2.BlockRun:
    return common_pb2.BlockRun(
        node_id=run.node_id,
        store_address=run.store_address,
        store_incarnation=run.store_incarnation,
        lease_id=run.lease_id,
        first_block=run.first_block,
        blocks=[wire.block_to_proto(block) for block in run.blocks],
    )


def _run_from_proto(run: common_pb2.BlockRun) -> Run:
    return Run(
        node_id=run.node_id,
        store_address=run.store_address,
        store_incarnation=run.store_incarnation,
        lease_id=run.lease_id,
        first_block=run.first_block,
        blocks=tuple(wire.blocks_from_proto(run.blocks)),
    )
