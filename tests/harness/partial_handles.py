"""Partial handles, as a prefill worker makes them while it still runs, cut out of a final one."""

from __future__ import annotations

from protos import common_pb2, decode_pb2
from services.worker import handle as handles
from tests.harness.handles import blocks_of, set_blocks
from tests.harness.prefill_decode_pair import Pair, RouterStream


def partial(p: Pair, handle: common_pb2.KvHandle, num_blocks: int) -> common_pb2.KvHandle:
    """What was stored when prefill had stored so many full blocks; signed."""
    early = common_pb2.KvHandle()
    early.CopyFrom(handle)
    early.ClearField("tail")
    set_blocks(early.runs[0], blocks_of(early.runs[0])[:num_blocks])
    early.num_tokens = num_blocks * early.block_size
    early.is_partial = True
    early.nonce = handles.new_nonce()
    handles.sign(early, p.prefill.core.handle_keys)
    return early


async def prefetch(stream: RouterStream, key: int, handle: common_pb2.KvHandle) -> None:
    """As the router forwards one."""
    command = decode_pb2.PrefetchDecode(handle=handle)
    await stream._write(decode_pb2.DecodeCommand(key=key, prefetch=command))
