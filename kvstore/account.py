"""What a store says of itself in messages: levels, counts, tenants, and what happened to a block.
Values to messages; reads, changes nothing. One asyncio loop."""

from __future__ import annotations

from kvstore import tenancy
from kvstore.block_store import BlockStore
from kvstore.history import OneHistory
from kvstore.slot_pool import SlotState
from protos import common_pb2, kvstore_pb2

MAX_TENANTS_TOLD = 64


def fill(reply: kvstore_pb2.GetStatusReply, store: BlockStore) -> None:
    """The levels and counts of a status."""
    reply.frame_bytes = store.frame_bytes
    reply.num_frames = store.frames.num_slots
    reply.num_free = store.frames.count(SlotState.FREE)
    reply.num_writing = store.frames.count(SlotState.WRITING)
    reply.num_committed = store.frames.count(SlotState.COMMITTED)
    reply.num_quarantined = store.frames.count(SlotState.QUARANTINED)
    reply.num_pinned = store.num_pinned()
    reply.num_leases = len(store.leases)
    reply.num_attachments = len(store.attachments)
    reply.num_tails = store.num_tails
    counters = store.counters
    reply.num_lookups = counters.num_lookups
    reply.num_blocks_asked = counters.num_blocks_asked
    reply.num_blocks_matched = counters.num_blocks_matched
    reply.num_bytes_written = counters.num_bytes_written
    reply.num_bytes_read = counters.num_bytes_read
    reply.num_evictions = store.table.num_evictions
    reply.num_leases_lapsed = counters.num_leases_lapsed
    reply.num_pages = store.table.pages.num_slots
    reply.num_pages_used = store.table.pages.count(SlotState.COMMITTED)
    reply.num_demoted = store.table.num_demoted
    reply.num_promoted = store.table.num_promoted
    reply.num_pages_bad = store.table.num_pages_bad
    reply.num_damaged = counters.num_damaged
    reply.tenants.extend(tenants(store))
    for reason, num_blocks in sorted(store.refused.items()):
        if num_blocks:
            reply.refused.add(reason=reason, num_blocks=num_blocks)


def history(chain_hash: bytes, past: OneHistory, store: BlockStore) -> kvstore_pb2.BlockHistory:
    """A block's events, and how it stands now."""
    message = kvstore_pb2.BlockHistory(
        chain_hash=chain_hash, num_events_forgotten=past.num_events - len(past.events)
    )
    for event in past.events:
        trace_id = f"{event.trace.trace_id:032x}" if event.trace is not None else ""
        message.events.add(
            unix_us=int(event.unix_s * 1e6),
            what=event.what,
            worker_id=event.worker_id,
            trace_id=trace_id,
        )
    node = store.tree.find(chain_hash)
    if node is not None:
        if node.block is not None:
            message.tiers.append(common_pb2.TIER_HOST)
        if node.page is not None:
            message.tiers.append(common_pb2.TIER_FILE)
        message.num_hits, message.num_pins = node.num_hits, node.num_pins
        message.parent = node.parent.chain_hash if node.parent is not None else b""
    return message


def tenants(store: BlockStore) -> list[common_pb2.TenantUsage]:
    """Those with a share of their own, and of the others those that hold most."""
    usage = tenancy.usage([store.table.frame_account, store.table.page_account])
    return [
        common_pb2.TenantUsage(
            tenant=each.tenant,
            num_blocks=each.num_slots,
            num_blocks_guaranteed=each.num_guaranteed,
        )
        for each in usage[:MAX_TENANTS_TOLD]
    ]
