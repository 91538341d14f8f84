"""Chunks that do not fit together must never become a block."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore import block_hash
from kvstore.block_refs import Block
from kvstore.errors import GENERATION, TRANSPORT, TransferFailed
from kvstore.transport.base import BlockMemory, GetItems, PutItem
from kvstore.transport.grpc import GrpcTransport
from process.deadline import Deadline
from protos import kvstore_pb2

BLOCK_BYTES = 10
ITEMS = GetItems(
    [(Block(b"h" * 16, frame, 2, 0, 16), block_id) for frame, block_id in ((0, 3), (1, 1))]
)


def _chunk(index: int, offset: int, data: bytes, stale: bool = False) -> kvstore_pb2.ReadChunk:
    return kvstore_pb2.ReadChunk(index=index, offset=offset, data=data, stale=stale)


def _transport(chunks: list[kvstore_pb2.ReadChunk], view: np.ndarray) -> GrpcTransport:
    """Over a store that answers with just these chunks."""

    class Call:
        def __init__(self, request: kvstore_pb2.ReadRequest, timeout: float, metadata: Any) -> None:
            assert [block.frame for block in request.blocks] == [0, 1]
            self.cancelled = False

        async def __aiter__(self) -> AsyncIterator[Any]:
            for chunk in chunks:
                assert not self.cancelled
                yield chunk

        def cancel(self) -> None:
            self.cancelled = True

    rpc: Any = SimpleNamespace(
        check=lambda: None,
        stub=SimpleNamespace(Read=Call),
        closing_is_unavailable=contextlib.nullcontext,
    )
    attached: Any = SimpleNamespace(attachment_id="a")
    return GrpcTransport(BlockMemory.of(view), rpc, attached)


WHOLE = [_chunk(0, 0, b"abcdefg"), _chunk(0, 7, b"hij"), _chunk(1, 0, b"0123456789")]


@pytest.mark.parametrize(
    ("chunks", "failed"),
    [
        (WHOLE, {}),
        ([WHOLE[2], *WHOLE[:2]], {}),  # blocks may come in any order
        (WHOLE[:1] + WHOLE[2:], {0: TRANSPORT}),  # an end is missing
        ([WHOLE[1], WHOLE[2]], {0: TRANSPORT}),  # a beginning is missing
        ([WHOLE[0], *WHOLE], {0: TRANSPORT}),  # twice the same
        ([*WHOLE, _chunk(1, 10, b"x")], {1: TRANSPORT}),  # longer than a block
        ([*WHOLE[:2], _chunk(1, 0, b"", stale=True)], {1: GENERATION}),
        ([], {0: TRANSPORT, 1: TRANSPORT}),
    ],
)
async def test_only_whole_blocks_arrive(
    chunks: list[kvstore_pb2.ReadChunk], failed: dict[int, str]
) -> None:
    view = np.zeros((4, BLOCK_BYTES), dtype=np.uint8)
    got = await _transport(chunks, view).get("lease", ITEMS, Deadline.after(30))
    assert got.failed == failed
    for index, (row, text) in enumerate([(3, b"abcdefghij"), (1, b"0123456789")]):
        assert (view[row].tobytes() == text) or index in failed
    assert not view[[0, 2]].any()  # whatever came, the others are untouched
    whole = {index: block_hash.checksum(view[row]) for index, row in ((0, 3), (1, 1))}
    assert got.checksums == {i: each for i, each in whole.items() if i not in failed}


async def test_a_write_that_ends_before_all_blocks_were_taken_is_none() -> None:
    """Whoever answers so did not see them all."""
    view = np.zeros((4, BLOCK_BYTES), dtype=np.uint8)
    num_taken = 0

    async def write(chunks: AsyncIterator[kvstore_pb2.WriteChunk]) -> None:
        nonlocal num_taken
        async for _ in chunks:
            num_taken += 1
            if num_taken == 1:
                return

    async def call(method: Any, chunks: AsyncIterator[Any], deadline: Deadline) -> None:
        await method(chunks)

    rpc: Any = SimpleNamespace(call=call, stub=SimpleNamespace(Write=write))
    attached: Any = SimpleNamespace(attachment_id="a")
    transport = GrpcTransport(BlockMemory.of(view), rpc, attached)
    items = [PutItem(block_id, frame, 1) for frame, block_id in ((0, 3), (1, 1))]
    with pytest.raises(TransferFailed, match="all blocks"):
        await transport.put("lease", items, Deadline.after(30))
    num_taken = 1
    assert len(await transport.put("lease", items, Deadline.after(30))) == 2


async def test_a_block_that_was_not_asked_for_ends_the_transfer() -> None:
    view = np.zeros((4, BLOCK_BYTES), dtype=np.uint8)
    chunks = [_chunk(2, 0, b"x"), *WHOLE]
    with pytest.raises(TransferFailed, match="not asked for"):
        await _transport(chunks, view).get("lease", ITEMS, Deadline.after(30))
    assert not view.any()
