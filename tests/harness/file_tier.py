"""The file tier of a store in this process: what lies where, how tests damage it, and a disk that
does not answer."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

from kvstore.block_refs import Block
from kvstore.page_file import SUFFIX, PageFile
from kvstore.prefix_tree import TreeNode
from tests.harness.store import LocalStore
from tests.harness.waiting import WAIT_S, until


class FileTierOf:
    """That of a store to which a worker has attached."""

    def __init__(self, store: LocalStore) -> None:
        self._node = store.node

    async def caught_up(self) -> None:
        """Until as many frames can come free as there should be, or the tier is off."""
        await until(lambda: self._node.tier is None or not self._node.tier._is_short())

    @property
    def num_moving(self) -> int:
        """Blocks on their way between memory and disk."""
        return self._store.table.num_moving

    def names(self) -> set[bytes]:
        """Chain hashes of blocks that lie on disk, whether or not they are in memory, too."""
        return {node.chain_hash for node in self._store.tree if node.page is not None}

    def in_memory_only(self, chain_hash: bytes) -> Block:
        node = self._node_of(chain_hash)
        assert node.block is not None and node.page is None
        return node.block

    def flip_bit(self, chain_hash: bytes, at: int, bit: int) -> None:
        """Of a block that lies on disk only: one of this byte."""
        node, tier = self._node_of(chain_hash), self._node.tier
        assert node.block is None and node.page is not None and tier is not None
        layout = tier._pages.layout
        offset = layout.data_offset + node.page.index * layout.stride_bytes + at
        settings = self._node.settings
        with (Path(settings.file_tier_dir) / f"{settings.node_id}{SUFFIX}").open("r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ (1 << bit)]))

    @property
    def _store(self) -> Any:
        assert self._node.store is not None
        return self._node.store

    def _node_of(self, chain_hash: bytes) -> TreeNode:
        node = self._store.tree.find(chain_hash)
        assert isinstance(node, TreeNode)
        return node


class StalledReads:
    """From the read of this number on, the disk answers when this is over."""

    def __init__(self, num_quick: int) -> None:
        self._num_quick = num_quick
        self._may_go_on = threading.Event()

    def __enter__(self) -> StalledReads:
        self._read = read = PageFile.read
        counted = itertools.count()

        def stalling(file: PageFile, *arguments: Any) -> bool:
            if next(counted) >= self._num_quick:
                assert self._may_go_on.wait(2 * WAIT_S)
            return read(file, *arguments)

        PageFile.read = stalling  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        self._may_go_on.set()
        PageFile.read = self._read  # type: ignore[method-assign]
