"""Handles on the wire: the blocks of a run, one by one, for tests that look at or forge them; and
partial ones, as a prefill worker makes them while it still runs, cut out of a final one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from kvstore.block import Block
from kvstore.packed import PackedBlocks
from protos import common_pb2
from services.worker import handle as handles
from tests.harness.prefill_decode_pair import Pair, RouterStream


def blocks_of(run: common_pb2.BlockRun) -> list[Block]:
    return list(PackedBlocks(run.blocks))


def set_blocks(run: common_pb2.BlockRun, blocks: Iterable[Block]) -> None:
    run.blocks = PackedBlocks.of(blocks).data


def forge(run: common_pb2.BlockRun, index: int, **changes: Any) -> None:
    """Set fields of one block to other values."""
    blocks = blocks_of(run)
    blocks[index] = dataclasses.replace(blocks[index], **changes)
    set_blocks(run, blocks)


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


def sign(p: Pair, handle: common_pb2.KvHandle) -> None:
    """As a prefill worker that has the key."""
    handles.sign(handle, p.prefill.core.handle_keys)


prefetch = RouterStream.prefetch
"""As the router forwards one."""
