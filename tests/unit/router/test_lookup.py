"""Prefix hints from the real index, and what happens without it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from kvstore import block_hash, index
from process import redis_client
from process.errors import Unavailable
from services.router.lookup import PrefixLookup
from tests.unit.router.bench import RedisServer

FINGERPRINT = "ab" * 32


class _Index:
    def __init__(self, error: Exception | None = None, wait: bool = False) -> None:
        self.error, self.wait = error, wait

    async def lookup(
        self, chain_hashes: Sequence[bytes], nodes: Mapping[str, str]
    ) -> Mapping[str, int]:
        if self.wait:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        return {node: len(chain_hashes) for node in nodes}


async def test_tokens_by_node_and_fingerprint() -> None:
    lookup = PrefixLookup(_Index(), lambda: {"n0": "aa"}, timeout_s=1)
    found = await lookup.find(range(50), b"salt", [(FINGERPRINT, 16), ("cd" * 32, 8)])
    assert found == {(FINGERPRINT, "n0"): 48, ("cd" * 32, "n0"): 48}
    assert lookup.problem is None


async def test_long_prompts_are_hashed_alike() -> None:
    lookup = PrefixLookup(_Index(), lambda: {"n0": "aa"}, timeout_s=5)
    found = await lookup.find(range(20_000), b"salt", [(FINGERPRINT, 16)])
    assert found == {(FINGERPRINT, "n0"): 20_000}


async def test_a_failing_or_slow_index_is_no_hint_and_a_problem() -> None:
    failing, index_ = _Index(Unavailable("away")), _Index(wait=True)
    for broken in (failing, index_):
        lookup = PrefixLookup(broken, lambda: {"n0": "aa"}, timeout_s=0.02)
        assert await lookup.find(range(50), b"salt", [(FINGERPRINT, 16)]) == {}
        assert lookup.problem is not None
    failing.error = None
    lookup = PrefixLookup(failing, lambda: {"n0": "aa"}, timeout_s=0.02)
    await lookup.find(range(50), b"salt", [(FINGERPRINT, 16)])
    assert lookup.problem is None


async def test_without_stores_nothing_is_asked() -> None:
    lookup = PrefixLookup(_Index(Unavailable("asked")), dict, timeout_s=1)
    assert await lookup.find(range(50), b"salt", [(FINGERPRINT, 16)]) == {}
    assert lookup.problem is None


async def test_against_the_real_index() -> None:
    """The hashes the router makes are the ones a store publishes."""
    server = RedisServer()
    try:
        await server.start()
        client = redis_client.connect(server.url, 1.0)
        hashes = block_hash.chain(block_hash.root_key(b"salt", FINGERPRINT), range(64), 16)
        for chain_hash in hashes[:3]:
            await client.hset(index.index_key("n0", "aa"), chain_hash, 1)
        lookup = PrefixLookup(
            index.PrefixIndex(client, 1.0), lambda: {"n0": "aa", "n1": "bb"}, timeout_s=1
        )
        found = await lookup.find(range(70), b"salt", [(FINGERPRINT, 16)])
        assert found == {(FINGERPRINT, "n0"): 48, (FINGERPRINT, "n1"): 0}
        other = await lookup.find(range(70), b"other tenant", [(FINGERPRINT, 16)])
        assert set(other.values()) == {0}
        await client.aclose()
    finally:
        server.remove()
