"""The prefix index against a real Redis: what routers find is what the store has, again after Redis
was emptied, restarted or away."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import redis.asyncio

from kvstore import index, index_publisher
from kvstore.block_changes import ChangeLog
from kvstore.index import PrefixIndex
from kvstore.index_publisher import BATCH, PrefixIndexPublisher
from kvstore.prefix_tree import ShardedDict
from process import registry
from process.rpc_errors import Unavailable
from protos import inference_pb2
from tests.harness.redis_server import RedisServer
from tests.harness.waiting import until

LIFE, NEXT_LIFE = b"a" * 16, b"b" * 16
NewStore = Callable[..., "_Store"]


def _chain(name: str, length: int) -> list[bytes]:
    return [f"{name}{i}".encode().ljust(16, b"-") for i in range(length)]


class _Store:
    """What a store would publish."""

    def __init__(
        self,
        redis_url: str,
        client: redis.asyncio.Redis,
        life: bytes = LIFE,
        node: str = "n1",
        heartbeat_s: float = 0.05,
        heartbeat_ttl_s: float = 60.0,
        changes: ChangeLog | None = None,
        **options: Any,
    ) -> None:
        self._client = client
        self.is_stopped = False
        self.present: ShardedDict[bytes, None] = ShardedDict()
        self.changes = ChangeLog() if changes is None else changes
        self.node = node
        self.life = life
        self.publisher = PrefixIndexPublisher(
            redis_url,
            node_id=node,
            incarnation=life,
            status=lambda: inference_pb2.StoreStatus(
                node_id=node, address="127.0.0.1:1", incarnation=life.hex(), num_frames=9
            ),
            changes=self.changes,
            snapshot=self.snapshot,
            heartbeat_s=heartbeat_s,
            heartbeat_ttl_s=heartbeat_ttl_s,
            timeout_s=20.0,
            **options,
        )

    def snapshot(self, num_hashes: int) -> Iterator[list[bytes]]:
        """As a store's: each list is of the moment in which it is asked for."""
        self.changes.clear()
        return self.present.keys_in_pieces(num_hashes)

    async def start(self, *hashes: bytes) -> None:
        """With these blocks, until Redis has them."""
        self.add(*hashes)
        self.publisher.start()
        await self.published()

    async def published(self) -> None:
        """Until Redis holds exactly what the store has."""
        await until(lambda: self.publisher.synced)
        fields = await self._client.hgetall(index.index_key(self.node, self.life.hex()))
        assert fields.pop(b"sequence") == b"%d" % self.publisher.sequence
        assert set(fields) == {chain_hash for chain_hash, _ in self.present.items()}

    async def stop(self) -> None:
        if not self.is_stopped:
            self.is_stopped = True
            await self.publisher.stop()

    def kill(self) -> None:
        """No goodbye."""
        for task in (self.publisher._task, self.publisher.heartbeat._task):
            assert task is not None
            task.cancel()

    def add(self, *hashes: bytes) -> None:
        for chain_hash in hashes:
            self.present.add(chain_hash, None)
            self.changes.append(True, chain_hash)

    def drop(self, *hashes: bytes) -> None:
        for chain_hash in hashes:
            self.present.remove(chain_hash)
            self.changes.append(False, chain_hash)


@pytest.fixture
async def client(redis_server: RedisServer) -> AsyncIterator[redis.asyncio.Redis]:
    client = registry.connect_redis(redis_server.url, 20.0)
    yield client
    await client.aclose()


@pytest.fixture
async def new_store(
    client: redis.asyncio.Redis, redis_server: RedisServer
) -> AsyncIterator[Callable[..., _Store]]:
    """`new_store(**options)`: see _Store."""
    made: list[_Store] = []

    def make(*life: bytes, **options: Any) -> _Store:
        made.append(_Store(redis_server.url, client, *life, **options))
        return made[-1]

    yield make
    for store in made:
        await store.stop()


@pytest.fixture
async def store(new_store: NewStore) -> _Store:
    return new_store()


@pytest.fixture
async def quiet(new_store: NewStore) -> _Store:
    """One that looks after Redis by no heartbeat."""
    return new_store(heartbeat_s=1000.0)


async def test_what_was_there_before_and_what_comes_later(
    client: redis.asyncio.Redis, store: _Store
) -> None:
    chain = _chain("a", 5000)
    await store.start(*chain[:3000])
    store.add(*chain[3000:])  # more than one batch
    assert len(chain) - 3000 > 0 and len(chain) > BATCH
    assert not store.publisher.synced
    await store.published()
    store.drop(*reversed(chain[100:]))
    store.add(*chain[100:102])
    await store.published()
    lookup = PrefixIndex(client, 5.0)
    nodes = {"n1": LIFE.hex(), "n2": LIFE.hex()}
    assert await lookup.lookup(chain, nodes) == {"n1": 102, "n2": 0}


async def test_lookup_is_the_longest_prefix_for_every_length(
    new_store: NewStore, client: redis.asyncio.Redis, seed: int
) -> None:
    """Against a plain scan; 200 random cases over 4 nodes."""
    draw = random.Random(seed)
    stores = [new_store(node=f"n{i}") for i in range(4)]
    chain = _chain("c", 300)
    lengths = {}
    for each in stores:
        lengths[each.node] = draw.randrange(301)
        await each.start(*chain[: lengths[each.node]])
    lookup = PrefixIndex(client, 5.0)
    nodes = {each.node: LIFE.hex() for each in stores}
    for _ in range(200):
        asked = draw.randrange(301)
        found = await lookup.lookup(chain[:asked], nodes)
        assert found == {node: min(asked, length) for node, length in lengths.items()}
    other = [*chain[:7], *_chain("other", 50)]
    expected = {node: min(7, length) for node, length in lengths.items()}
    assert await lookup.lookup(other, nodes) == expected
    assert await lookup.lookup([], nodes) == dict.fromkeys(nodes, 0)
    # Several chains at once, an empty one among them, are as each alone.
    several = [chain[:100], [], other, chain]
    alone = [await lookup.lookup(each_chain, nodes) for each_chain in several]
    assert await lookup.lookup_all(several, nodes) == alone
    assert await lookup.lookup_all([], nodes) == []
    assert await lookup.lookup(chain, {}) == {}


async def test_a_publisher_that_fails_by_itself_publishes_everything_again(store: _Store) -> None:
    """Not Redis fails here, but the publisher."""
    await store.start()
    take = store.changes.take

    def broken(num_changes: int) -> Any:
        store.changes.take = take  # type: ignore[method-assign]
        raise RuntimeError("the test broke it")

    store.changes.take = broken  # type: ignore[method-assign]
    store.add(*_chain("a", 3))
    await until(lambda: store.publisher.num_full_publications == 2)
    await store.published()
    assert store.publisher.num_failures == 1


async def test_an_index_that_is_no_longer_published_expires_although_the_store_lives(
    client: redis.asyncio.Redis, store: _Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.start(*_chain("a", 3))
    publisher = store.publisher
    with monkeypatch.context() as patch:
        patch.setattr(index_publisher, "_INDEX_TTL_S", 0.3)
        num_beats = publisher.heartbeat.num_beats
        await until(lambda: publisher.heartbeat.num_beats > num_beats + 1)

        def broken(num_changes: int) -> Any:
            raise RuntimeError("the test broke it")

        patch.setattr(publisher, "_snapshot", broken)
        patch.setattr(store.changes, "take", broken)
        store.add(*_chain("b", 3))
        await until(lambda: publisher.num_failures)
        key = index.index_key(store.node, store.life.hex())
        await until(lambda: _is_gone(client, key))
        assert publisher.heartbeat.is_registered and not publisher.synced
    await store.published()


async def _is_gone(client: redis.asyncio.Redis, key: str) -> bool:
    return not await client.exists(key)


@pytest.mark.parametrize("how", ["flush", "restart", "entries lost", "older copy"])
async def test_a_redis_that_lost_something_gets_everything_again(
    client: redis.asyncio.Redis, store: _Store, redis_server: RedisServer, how: str
) -> None:
    await store.start(*_chain("a", 100))
    before = store.publisher.sequence
    key = index.index_key("n1", LIFE.hex())
    if how == "flush":
        await client.flushall()
    elif how == "restart":
        redis_server.kill()
        store.add(*_chain("b", 10))
        await until(lambda: not store.publisher.heartbeat.is_registered)
        assert not store.publisher.synced
        await redis_server.start()
    elif how == "entries lost":
        await client.unlink(key)
    else:
        await client.hset(key, "sequence", 0)
    await until(lambda: store.publisher.sequence > before)
    await store.published()
    (row,) = await PrefixIndex(client, 5.0).stores()
    assert (row.node_id, row.reachable) == ("n1", True)


async def test_a_batch_on_top_of_nothing_is_refused(
    quiet: _Store, client: redis.asyncio.Redis
) -> None:
    """Between two heartbeats the batch itself must find out that Redis was emptied: it would leave
    blocks without their parents in the index."""
    await quiet.start(*_chain("a", 100))
    await client.flushdb()
    quiet.add(*_chain("b", 3))
    await quiet.published()


async def test_what_is_published_again_is_not_synced_before_the_last_of_it(
    quiet: _Store, client: redis.asyncio.Redis
) -> None:
    await quiet.start(*_chain("a", 3))
    finish, seen = quiet.publisher._finish, []

    async def watched(**told: Any) -> Any:
        seen.append((quiet.publisher.synced, quiet.publisher.lag_s > 0))
        return await finish(**told)

    quiet.publisher._finish = watched  # type: ignore[assignment]
    await client.flushdb()
    quiet.add(*_chain("b", 3))  # refused, for there is nothing that it could be on top of
    await until(lambda: quiet.publisher.num_full_publications == 2)
    assert seen == [(False, True)]
    await quiet.published()


async def test_changes_that_are_too_many_meanwhile_make_a_publication_no_younger(
    new_store: NewStore,
) -> None:
    store = new_store(heartbeat_s=1000.0, changes=ChangeLog(1))
    store.add(*_chain("a", 3))
    publisher, seen = store.publisher, []
    finish = publisher._finish

    async def watched(**told: Any) -> Any:
        publisher._finish = finish
        before_s = publisher.lag_s
        store.add(*_chain("b", 3))
        seen.append((before_s, publisher.lag_s))
        return await finish(**told)

    publisher._finish = watched  # type: ignore[assignment]
    await store.start()
    ((before_s, after_s),) = seen
    assert after_s >= before_s > 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the publisher and its log take for now: the only number in it."""
    now = [100.0]
    monkeypatch.setattr(index_publisher, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


async def test_the_lag_is_of_a_change_that_waits_and_of_none_before(
    new_store: NewStore, clock: list[float]
) -> None:
    """Two seconds each, though something waits all the time."""
    changes = ChangeLog(clock=lambda: clock[0])
    store = new_store(heartbeat_s=1000.0, changes=changes, batch_size=2)
    publisher, lags = store.publisher, list[float]()
    await store.start()
    apply = publisher._apply

    async def watched(**told: Any) -> Any:
        clock[0] += 1.0
        if len(lags) < 10:
            store.add(*_chain(f"b{len(lags)}", 2))
        lags.append(publisher.lag_s)
        return await apply(**told)

    publisher._apply = watched  # type: ignore[assignment]
    store.add(*_chain("a", 4))
    await store.published()
    assert lags == [1.0] + [2.0] * 11
    assert publisher.lag_s == 0.0


@pytest.mark.parametrize("is_refused", [True, False])
async def test_changes_that_a_full_publication_is_to_bring_wait_as_long_as_before(
    new_store: NewStore, client: redis.asyncio.Redis, clock: list[float], is_refused: bool
) -> None:
    """A batch is refused, for Redis was emptied; or there are too many, while it is on its way."""
    changes = ChangeLog(3, clock=lambda: clock[0])
    store = new_store(heartbeat_s=1000.0, changes=changes)
    publisher, lags = store.publisher, list[float]()
    await store.start()
    apply, finish = publisher._apply, publisher._finish

    async def late(**told: Any) -> Any:
        publisher._apply = apply
        clock[0] += 5.0
        if not is_refused:
            store.add(*_chain("c", 2))
            clock[0] += 2.0
            store.add(*_chain("d", 2))
            lags.append(publisher.lag_s)
        return await apply(**told)

    async def watched(**told: Any) -> Any:
        lags.append(publisher.lag_s)
        return await finish(**told)

    publisher._apply, publisher._finish = late, watched  # type: ignore[assignment]
    if is_refused:
        await client.flushdb()
    store.add(*_chain("b", 3))
    await until(lambda: publisher.num_full_publications == 2)
    # The batch that was under way counts, whether it is confirmed or not.
    assert lags == ([5.0] if is_refused else [7.0, 7.0])
    await store.published()


async def test_a_redis_that_is_emptied_during_a_full_publication_gets_all_of_it(
    new_store: NewStore, client: redis.asyncio.Redis
) -> None:
    """Half a publication is never taken for a whole one, not even when its first half is lost."""
    store = new_store(batch_size=10)
    load, num_loads = store.publisher._apply, itertools.count()

    async def emptied(**told: Any) -> Any:
        if next(num_loads) == 2:
            await client.flushall()
        return await load(**told)

    store.publisher._apply = emptied  # type: ignore[assignment]
    await store.start(*_chain("a", 50))


async def test_what_changes_during_a_full_publication_is_in_it(
    new_store: NewStore, client: redis.asyncio.Redis, seed: int
) -> None:
    """The store comes and goes between its pieces; the index shows what was there before until all
    of it is replaced, and is never a mixture."""
    draw = random.Random(seed)
    store = new_store(heartbeat_s=1000.0, batch_size=7)
    publisher, key = store.publisher, index.index_key("n1", LIFE.hex())
    chain = _chain("a", 60)
    await store.start(*chain)
    step, finish, num_present = publisher._apply, publisher._finish, 60
    await client.hset(key, "sequence", 0)  # the next batch is refused

    async def changing(**told: Any) -> Any:
        nonlocal num_present
        before, num_present = num_present, draw.randrange(60)
        store.drop(*reversed(chain[num_present:before]))
        store.add(*chain[before:num_present])
        if publisher._is_filling:
            assert await client.hlen(key) == 61
        return await step(**told)

    async def finishing(**told: Any) -> Any:
        publisher._apply = step
        return await finish(**told)

    publisher._apply, publisher._finish = changing, finishing  # type: ignore[assignment]
    num_present = 59
    store.drop(chain[59])
    await until(lambda: publisher.num_full_publications == 2)
    await store.published()
    assert num_present == len(store.present)


async def test_what_arrives_late_of_an_earlier_publication_is_refused(store: _Store) -> None:
    """A call that we gave up may still lie in a socket, and be read after all that came later."""
    load, late = store.publisher._apply, []

    async def stuck(**told: Any) -> Any:
        if not late:
            late.append(told)
            raise TimeoutError
        return await load(**told)

    store.publisher._apply = stuck  # type: ignore[assignment]
    chain = _chain("a", 20)
    await store.start(*chain)
    store.drop(*reversed(chain[5:]))
    await store.published()
    await load(**late[0])
    await store.published()


async def test_a_store_stays_reachable_while_it_publishes_everything(
    new_store: NewStore, client: redis.asyncio.Redis
) -> None:
    """Millions of blocks take longer than a heartbeat counts."""
    store = new_store(batch_size=10)
    load, heartbeat, found = store.publisher._apply, store.publisher.heartbeat, []

    async def slow(**told: Any) -> Any:
        await client.delete(index.beat_key("n1"))
        num_beats = heartbeat.num_beats
        await until(lambda: heartbeat.num_beats > num_beats + 1)
        found.append(await client.get(index.beat_key("n1")))
        return await load(**told)

    store.publisher._apply = slow  # type: ignore[assignment]
    await store.start(*_chain("a", 50))
    assert found == [LIFE.hex().encode()] * 5
    assert store.publisher.num_full_publications == 1


async def test_other_keys_in_redis_do_not_keep_a_store_from_publishing(
    client: redis.asyncio.Redis, store: _Store
) -> None:
    """Earlier lives are looked for in few round trips, each with its own time."""
    for at in range(0, 20_000, 1000):
        await client.mset({f"other:{i}": b"" for i in range(at, at + 1000)})
    await client.config_resetstat()
    await store.start()
    stats = await client.info("commandstats")
    assert 1 <= stats["cmdstat_scan"]["calls"] <= 20


async def test_a_row_that_nobody_can_read_hides_no_other(
    client: redis.asyncio.Redis, store: _Store, caplog: pytest.LogCaptureFixture
) -> None:
    await store.start()
    for name, row in (("no json", b"{"), ("other type", b'{"num_frames": "x"}'), ("raw", b"\xff")):
        await client.hset(index.STORES_KEY, name, row)
    (row,) = await PrefixIndex(client, 5.0).stores()
    assert (row.node_id, row.reachable) == ("n1", True)
    told = [r for r in caplog.records if r.getMessage() == "registry_row_unreadable"]
    assert len(told) == 3


async def test_a_new_life_drops_the_index_of_the_earlier_one(
    new_store: NewStore, client: redis.asyncio.Redis
) -> None:
    first = new_store()
    await first.start(*_chain("a", 10))
    first.kill()
    second = new_store(NEXT_LIFE)
    await second.start()
    assert not await client.exists(index.index_key("n1", LIFE.hex()))
    (row,) = await PrefixIndex(client, 5.0).stores()
    assert row.incarnation == NEXT_LIFE.hex()
    await first.stop()  # a late goodbye of the earlier life
    (row,) = await PrefixIndex(client, 5.0).stores()
    assert (row.incarnation, row.reachable) == (NEXT_LIFE.hex(), True)
    await second.stop()
    assert await PrefixIndex(client, 5.0).stores() == []
    assert await client.keys("baton:*") == []


async def test_a_publisher_can_be_stopped_at_each_moment(new_store: NewStore) -> None:
    """Stopped after 0 to 79 turns of the loop while it talks to Redis without a pause: no cancel
    may be lost."""
    for num_turns in range(80):
        store = new_store(heartbeat_s=0.0)
        store.publisher.start()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        async with asyncio.timeout(20):
            await store.stop()
        assert store.publisher._task is not None and store.publisher._task.done()


async def test_a_store_without_heartbeat_is_not_reachable(
    new_store: NewStore, client: redis.asyncio.Redis
) -> None:
    store = new_store(heartbeat_ttl_s=0.5)
    await store.start()
    store.kill()
    lookup = PrefixIndex(client, 5.0)
    async with asyncio.timeout(20):
        while (await lookup.stores())[0].reachable:
            await asyncio.sleep(0.02)


async def test_a_redis_that_is_away_is_unavailable(redis_server: RedisServer) -> None:
    client = registry.connect_redis(redis_server.url, 0.5)
    redis_server.kill()
    lookup = PrefixIndex(client, 0.5)
    with pytest.raises(Unavailable, match="prefix index"):
        await lookup.lookup(_chain("a", 3), {"n1": LIFE.hex()})
    with pytest.raises(Unavailable, match="registry"):
        await lookup.stores()
    await client.aclose()


async def test_changes_beyond_the_bound_become_one_publication(new_store: NewStore) -> None:
    store = new_store(changes=ChangeLog(10))
    await store.start()
    store.add(*_chain("a", 50))
    assert not store.publisher.synced
    await store.published()
