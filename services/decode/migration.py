"""`take_out` and `pack`: the migration of a decode request to another worker. They take the request
out of the engine's steps, store its KV, and make a handle that names it.

Blocks that cannot be stored make the handle shorter, or leave none: the other worker recomputes
them, and they are counted here by reason. Invariant: the held blocks do not change until `pack` has
returned or was cancelled; a cancelled put never commits, and its lease is released. Used on the
event loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.errors import UnknownRequest
from engine.outputs import FilledBlock
from engine.request import DetachedRequest
from kvstore.errors import MISSING, STORE_UNAVAILABLE
from process.deadline import Deadline
from services.decode.request_spec import DecodeRequestSpec
from services.worker import handle as handles
from services.worker.handle_builder import HandleBuilder, HandleSubject, LeasedBlocks
from services.worker.provenance import LegProvenance
from services.worker.runtime import WorkerCore
from services.worker.store_writer import BlockWriter, TailSource

DRAINING = "draining"
SEVERAL_SAMPLES = "several_samples"
"""Metrics reasons, beside those of `kvstore.errors`: a request moves because its worker drains, or
moves without its KV."""


@dataclass(frozen=True)
class MigratedKv:
    """Result of a migration: the handle that the request takes along. `reason`: DRAINING, or why it
    is not all of its KV."""

    handle: handles.Handle | None
    reason: str


async def take_out(
    core: WorkerCore, ask: DecodeRequestSpec, engine_id: str, is_over: Callable[[], bool]
) -> DetachedRequest | None:
    """Take a request out of the engine's steps; no events follow. Returns: None where several
    samples or beams cannot be taken along, or where it has just ended (`is_over`)."""
    if ask.num_samples > 1 or ask.beam is not None:
        return None
    try:
        return await core.thread.call(lambda engine: engine.detach(engine_id))
    except UnknownRequest:
        if not is_over():  # its last news was delivered before this
            raise
        return None


async def pack(
    core: WorkerCore,
    ask: HandleSubject,
    engine_id: str,
    held: DetachedRequest,
    leg: LegProvenance,
    *,
    ttl_s: float,
    deadline: Deadline,
) -> MigratedKv:
    """Store the held blocks as far as the deadline allows, and record that in the leg.

    Args:
        ask: the request whose blocks they are.
        engine_id: an id that no other attempt of this request has.
        ttl_s: lease time of the handle in seconds.
    """
    client = core.connector.client
    num_full, num_rest = divmod(held.num_computed_tokens, core.model.block_size)
    # An unfilled block of a quantized cache has no bytes of its own; `held` counts none then.
    tail = None
    if num_rest:
        name = f"{engine_id}@{core.identity.incarnation.hex()}"
        tail = TailSource(name, held.block_ids[num_full], num_rest)
    num_wanted = num_full + (tail is not None)
    if not num_wanted:
        return MigratedKv(None, MISSING)
    if client is None:
        leg.not_stored[STORE_UNAVAILABLE] += num_wanted
        return MigratedKv(None, STORE_UNAVAILABLE)
    writer = BlockWriter(
        core.connector,
        client,
        lease_id="",
        refs=(),
        block_size=core.model.block_size,
        ttl_s=ttl_s,
        put_budget_s=core.limits.put_budget_s,
        deadline=deadline,
        tenant=ask.tenant,
    )
    handle: handles.Handle | None = None
    try:
        writer.add(
            FilledBlock(index, block_id, chain_hash)
            for index, (block_id, chain_hash) in enumerate(
                zip(held.block_ids, held.chain_hashes, strict=False)
            )
        )
        written = await writer.finish(tail)
        leg.bytes_written[client.transport_name] += written.num_bytes
        handle = HandleBuilder(core, ask, held.num_computed_tokens).whole(
            [LeasedBlocks(client, written.lease_id, written.refs)], written.tail, ttl_s
        )
    finally:
        if handle is None:
            writer.cancel()
    num_missing = num_wanted - len(written.refs) - (written.tail is not None)
    if num_missing:
        leg.not_stored[written.problem or MISSING] += num_missing
    return MigratedKv(handle, written.problem or DRAINING)
