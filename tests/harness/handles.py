"""The blocks of a handle's run on the wire, one by one, for tests that look at or forge them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from kvstore.block import Block
from kvstore.packed import PackedBlocks
from protos import common_pb2


def blocks_of(run: common_pb2.BlockRun) -> list[Block]:
    return list(PackedBlocks(run.blocks))


def set_blocks(run: common_pb2.BlockRun, blocks: Iterable[Block]) -> None:
    run.blocks = PackedBlocks.of(blocks).data


def forge(run: common_pb2.BlockRun, index: int, **changes: Any) -> None:
    """Set fields of one block to other values."""
    blocks = blocks_of(run)
    blocks[index] = dataclasses.replace(blocks[index], **changes)
    set_blocks(run, blocks)
