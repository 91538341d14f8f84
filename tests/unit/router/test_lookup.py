"""Prefix hints from the real index, and what happens without it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kvstore import block_hash, index
from kvstore.block_hash import TURN_TOKENS
from process import registry
from process.rpc_errors import Unavailable
from protos import inference_pb2
from services.router.prefixes import NO_PREFIXES, PrefixLookup
from services.router.worker_views import StoreView
from tests.harness.redis_server import RedisServer

FINGERPRINT = "ab" * 32


STORE = StoreView("n0", "127.0.0.1:1", "aa")
LAYOUT = (FINGERPRINT, 16)


class _Index:
    def __init__(self, error: Exception | None = None, wait: bool = False) -> None:
        self.error, self.wait = error, wait
        self.num_calls = 0

    async def lookup_all(
        self, chains: Sequence[Sequence[bytes]], nodes: Mapping[str, str]
    ) -> Sequence[Mapping[str, int]]:
        self.num_calls += 1
        if self.wait:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        return [{node: len(chain) for node in nodes} for chain in chains]


async def test_blocks_by_layout_and_node_in_one_call() -> None:
    index_ = _Index()
    lookup = PrefixLookup(index_, lambda: [STORE], timeout_s=1)
    found = await lookup.find(range(50), b"salt", [LAYOUT, (FINGERPRINT, 8), ("cd" * 32, 8)])
    assert found.of(LAYOUT) == {"n0": 3}
    assert found.of((FINGERPRINT, 8)) == found.of(("cd" * 32, 8)) == {"n0": 6}
    assert found.of(("ef" * 32, 8)) == {}
    assert found.stores == {"n0": STORE}
    assert lookup.problem is None and index_.num_calls == 1


async def test_hashing_is_not_charged_to_the_index() -> None:
    lookup = PrefixLookup(_Index(), lambda: [STORE], timeout_s=0.02)

    async def slow() -> None:
        while True:
            time.sleep(0.01)  # a loop that is kept busy
            await asyncio.sleep(0)

    beside = asyncio.create_task(slow())
    found = await lookup.find(range(8 * TURN_TOKENS), b"salt", [LAYOUT])
    beside.cancel()
    assert lookup.problem is None and found.held


async def test_an_adapter_is_in_the_hashes() -> None:
    lookup = PrefixLookup(_Index(), lambda: [STORE], timeout_s=1)
    found = await lookup.find(range(16), b"salt", [LAYOUT], "cd")
    root = block_hash.root_key(b"salt", FINGERPRINT, "cd")
    assert found.chains[LAYOUT] == block_hash.chain(root, range(16), 16)


async def test_what_was_drawn_is_looked_up_behind_the_prompt() -> None:
    lookup = PrefixLookup(_Index(), lambda: [STORE], timeout_s=1)
    prompt = inference_pb2.TokenIds(ids=range(20)).ids
    found = await lookup.find(prompt, b"salt", [LAYOUT], drawn=list(range(20, 40)))
    root = block_hash.root_key(b"salt", FINGERPRINT)
    assert found.chains[LAYOUT] == block_hash.chain(root, range(40), 16)


async def test_a_failing_or_slow_index_is_no_hint_and_a_problem() -> None:
    failing, index_ = _Index(Unavailable("away")), _Index(wait=True)
    for broken in (failing, index_):
        lookup = PrefixLookup(broken, lambda: [STORE], timeout_s=0.02)
        found = await lookup.find(range(50), b"salt", [LAYOUT])
        assert not found.held and not found.stores
        # What this router remembers itself is found by these.
        root = block_hash.root_key(b"salt", LAYOUT[0])
        assert found.chains == {LAYOUT: block_hash.chain(root, range(50), LAYOUT[1])}
        assert lookup.problem is not None
    failing.error = None
    lookup = PrefixLookup(failing, lambda: [STORE], timeout_s=0.02)
    await lookup.find(range(50), b"salt", [LAYOUT])
    assert lookup.problem is None


async def test_without_stores_or_workers_nothing_is_asked() -> None:
    index_ = _Index()
    for lookup, layouts in (
        (PrefixLookup(index_, list, timeout_s=1), [LAYOUT]),
        (PrefixLookup(index_, lambda: [STORE], timeout_s=1), []),
    ):
        assert await lookup.find(range(50), b"salt", layouts) == NO_PREFIXES
        assert lookup.problem is None
    assert not index_.num_calls


async def test_against_the_real_index() -> None:
    """The hashes the router makes are the ones a store publishes; one round trip whatever is
    asked."""
    server = RedisServer()
    try:
        await server.start()
        client = registry.connect_redis(server.url, 5.0)
        stores = [STORE, StoreView("n1", "127.0.0.1:2", "bb")]
        for size, num_held in ((16, 700), (8, 3)):
            root = block_hash.root_key(b"salt", FINGERPRINT)
            for chain_hash in block_hash.chain(root, range(16_400), size)[:num_held]:
                await client.hset(index.index_key("n0", "aa"), chain_hash, 1)
        lookup = PrefixLookup(index.PrefixIndex(client, 5.0), lambda: stores, timeout_s=5)
        await lookup.find(range(70), b"salt", [LAYOUT])  # Redis has the script now
        before = await _num_commands(client)
        found = await lookup.find(range(16_400), b"salt", [LAYOUT, (FINGERPRINT, 8)])
        after = await _num_commands(client)
        assert found.of(LAYOUT) == {"n0": 700, "n1": 0}
        assert found.of((FINGERPRINT, 8)) == {"n0": 3, "n1": 0}
        # What the script does inside counts as commands of its own.
        assert {name: after[name] - before.get(name, 0) for name in after} == {
            **dict.fromkeys(after, 0),
            "cmdstat_evalsha": 1,
            "cmdstat_info": 1,
            "cmdstat_hexists": after["cmdstat_hexists"] - before["cmdstat_hexists"],
        }
        assert after["cmdstat_hexists"] - before["cmdstat_hexists"] < 100
        other = await lookup.find(range(70), b"other tenant", [LAYOUT])
        assert set(other.of(LAYOUT).values()) == {0}
        await client.aclose()
    finally:
        server.remove()


async def _num_commands(client: Any) -> dict[str, int]:
    return {name: row["calls"] for name, row in (await client.info("commandstats")).items()}
