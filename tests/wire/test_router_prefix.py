"""Where a prefix lies over several stores, as prefill workers are told; tenants and scopes; links.

A whole router over the real index; stores are registered, not run.
"""

from __future__ import annotations

from typing import Any

from kvstore import block_hash
from process import serving
from process.errors import Unavailable
from protos import inference_pb2, kvstore_pb2, kvstore_pb2_grpc
from services.router import identity
from services.router.fakes.prefill import FakePrefill
from services.router.tenants import TenantSalts, parse_scopes
from tests.harness.router_bench import BOUND_S, Bench, request, running
from tests.harness.waiting import until

PROMPT = list(range(5, 105))  # six full blocks and four tokens
SHORT = {"max_tokens": 2}
SECRET = "hush"


def _chain(bench: Bench, salt: bytes, prompt: list[int] = PROMPT) -> list[bytes]:
    root = block_hash.root_key(salt, bench.model.fingerprint)
    return block_hash.chain(root, prompt, bench.model.block_size)


def _salt(tenant: str = "default") -> bytes:
    return identity.tenant_salt(tenant, SECRET)


async def _at(bench: Bench, worker: FakePrefill, node_id: str) -> None:
    worker.store_node_id = node_id
    await bench.publish(worker)


async def _hints(bench: Bench, tenant: str = "", **fields: Any) -> list[tuple[str, int, int]]:
    """What the prefill worker was told of the prompt, as (node, first block, number of blocks)."""
    ask = {"token_ids": {"ids": PROMPT}, "sampling": SHORT, **fields}
    await bench.generate(request(tenant=tenant, **ask))
    (asked,) = (r for worker in bench.prefills for r in worker.requests[-1:])
    return [(hint.node_id, hint.first_block, hint.num_blocks) for hint in asked.hints]


async def test_hints_are_runs_over_the_union_home_first() -> None:
    async with running(tenant_secret=SECRET) as bench:
        await _at(bench, bench.prefill, "n0")
        lives = {
            node: await bench.add_store(node, f"127.0.0.1:{port}")
            for node, port in (
                ("n0", 10),
                ("n1", 11),
                ("n2", 12),
            )
        }
        chain = _chain(bench, _salt())
        assert await _hints(bench) == []
        await bench.hold("n1", lives["n1"], chain[:3])
        assert await _hints(bench) == [("n1", 0, 3)]
        await bench.hold("n0", lives["n0"], chain[:2])
        await bench.hold("n2", lives["n2"], chain[:5])
        assert await _hints(bench) == [("n0", 0, 2), ("n2", 2, 3)]
        home, far = bench.prefill.requests[-1].hints
        assert (home.store_address, far.store_address) == ("127.0.0.1:10", "127.0.0.1:12")
        assert far.store_incarnation.hex() == lives["n2"]
        await bench.hold("n0", lives["n0"], chain)
        assert await _hints(bench) == [("n0", 0, 6)]


async def test_what_an_earlier_life_held_is_not_hinted() -> None:
    async with running(tenant_secret=SECRET) as bench:
        await _at(bench, bench.prefill, "n0")
        await bench.add_store("n0")
        await bench.hold("n1", await bench.add_store("n1"), _chain(bench, _salt())[:3])
        assert await _hints(bench) == [("n1", 0, 3)]
        await bench.add_store("n1")  # started again
        assert await _hints(bench) == []


async def test_a_retry_asks_where_the_prefix_lies_by_now() -> None:
    """The first worker stored two blocks at its own node before it failed."""
    async with running(num_prefill=2, tenant_secret=SECRET) as bench:
        lives = {}
        for worker, node in zip(bench.prefills, ("n0", "n1"), strict=True):
            await _at(bench, worker, node)
            lives[worker.worker_id] = (node, await bench.add_store(node))
            worker.gate.close()
        call = bench.stub.Generate(
            request(token_ids={"ids": PROMPT}, sampling=SHORT), timeout=BOUND_S
        )
        await until(lambda: any(worker.num_active for worker in bench.prefills))
        victim = next(worker for worker in bench.prefills if worker.num_active)
        other = next(worker for worker in bench.prefills if worker is not victim)
        node, life = lives[victim.worker_id]
        await bench.hold(node, life, _chain(bench, _salt())[:2])
        victim.error = Unavailable("failed")
        other.gate.open()
        victim.gate.open()
        assert [m async for m in call]
        (told,) = other.requests
        assert [(h.node_id, h.num_blocks) for h in told.hints] == [(node, 2)]


async def test_the_worker_at_the_longest_prefix_is_preferred_and_others_pull() -> None:
    async with running(num_prefill=2, tenant_secret=SECRET) as bench:
        chain = _chain(bench, _salt())
        for worker, (node, num_held) in zip(bench.prefills, (("n0", 1), ("n1", 6)), strict=True):
            await _at(bench, worker, node)
            await bench.hold(node, await bench.add_store(node), chain[:num_held])
        for number in range(8):  # whatever the tie-break of its session says
            await bench.generate(
                request(token_ids={"ids": PROMPT}, sampling=SHORT, session=f"s{number}")
            )
        assert len(bench.prefills[1].requests) == 8
        bench.prefills[1].is_draining = True
        await bench.publish(bench.prefills[1])
        await bench.generate(request(token_ids={"ids": PROMPT}, sampling=SHORT))
        (told,) = bench.prefills[0].requests
        assert [(h.node_id, h.num_blocks) for h in told.hints] == [("n0", 1), ("n1", 5)]


async def test_two_tenants_never_share() -> None:
    """The same prompt; one's blocks are everywhere, the other is told of none."""
    async with running(tenant_secret=SECRET) as bench:
        await _at(bench, bench.prefill, "n0")
        for node in ("n0", "n1"):
            await bench.hold(node, await bench.add_store(node), _chain(bench, _salt("a")))
        assert await _hints(bench, "a") == [("n0", 0, 6)]
        for other in ("b", "", "default", "A", "a=", "a/b"):
            assert await _hints(bench, other) == []
        salts = [bytes(r.tenant_salt) for r in bench.prefill.requests]
        assert len(set(salts)) == 6  # of seven names; "" is "default"


async def test_a_scope_is_shared_by_its_tenants_only() -> None:
    scopes = ("a=team", "b=team", "c=other")
    async with running(tenant_secret=SECRET, tenant_scopes=scopes) as bench:
        salts = TenantSalts(SECRET, parse_scopes(scopes))
        await _at(bench, bench.prefill, "n0")
        await bench.hold("n0", await bench.add_store("n0"), _chain(bench, salts.of("a")))
        for tenant in ("a", "b"):
            assert await _hints(bench, tenant) == [("n0", 0, 6)]
        # Nobody gets in by being called like the scope.
        for tenant in ("c", "d", "team", "other", "a=team"):
            assert await _hints(bench, tenant) == []
        # The tenant itself is told apart everywhere else.
        assert {r.tenant for r in bench.prefill.requests} >= {"a", "b"}


async def test_another_tenant_s_blocks_move_no_choice() -> None:
    """Which worker a request meets depends on what its own tenant left, not on others' hits."""
    # The router shall not remember where it sent the same prompt before.
    forgets = {"num_prefixes_kept": 1}
    async with running(num_prefill=3, tenant_secret=SECRET, limits=forgets) as bench:
        lives = {}
        for number, worker in enumerate(bench.prefills):
            await _at(bench, worker, f"n{number}")
            lives[worker.worker_id] = await bench.add_store(f"n{number}")
        before = [await _met(bench, "b", number) for number in range(12)]
        assert set(before) == {"p0", "p1", "p2"}  # ties spread
        for number in range(12):
            await bench.hold("n2", lives["p2"], _chain(bench, _salt("a"), _prompt(number)))
        assert [await _met(bench, "b", number) for number in range(12)] == before
        assert {await _met(bench, "a", number) for number in range(12)} == {"p2"}


def _prompt(number: int) -> list[int]:
    """One of many that differ from the first token on."""
    return [number + 5, *PROMPT]


async def _met(bench: Bench, tenant: str, number: int) -> str:
    """Which prefill worker a request met."""
    before = [len(worker.requests) for worker in bench.prefills]
    await bench.generate(request(token_ids={"ids": _prompt(number)}, sampling=SHORT, tenant=tenant))
    (met,) = (
        worker.worker_id
        for worker, num_requests in zip(bench.prefills, before, strict=True)
        if len(worker.requests) > num_requests
    )
    return met


async def test_a_degraded_link_is_not_pulled_over_and_not_met_by_choice() -> None:
    """A block takes 3.2 ms to compute by the default costs, and 100 ms over this link."""
    slow = {"read_bytes_per_s": 1e4, "degraded": True}
    async with running(num_prefill=2, tenant_secret=SECRET) as bench:
        lives = {node: await bench.add_store(node) for node in ("n0", "n1")}
        for worker in bench.prefills:
            await _at(bench, worker, "n0")
        first, second = bench.prefills
        chains = [_chain(bench, _salt(), _prompt(number)) for number in range(8)]
        for chain in chains:
            await bench.hold("n0", lives["n0"], chain[:4])
        first.links = [{"node_id": "n0", **slow}]
        await bench.publish(first)
        assert {await _met(bench, "", number) for number in range(8)} == {"p1"}
        # The home store is asked whatever its link; another one only where that is quicker.
        await bench.hold("n1", lives["n1"], chains[0])
        second.links = [{"node_id": "n1", **slow}]
        await bench.publish(second)
        first.is_draining = True
        await bench.publish(first)
        await _met(bench, "", 0)
        assert [(h.node_id, h.num_blocks) for h in second.requests[-1].hints] == [("n0", 4)]


async def test_degraded_links_are_problems_with_their_rates() -> None:
    async with running() as bench:
        bench.prefill.links = [
            {"node_id": "n0", "transport": "shm", "read_bytes_per_s": 9e9},
            {
                "node_id": "n1",
                "transport": "nixl",
                "write_bytes_per_s": 2.5e6,
                "read_bytes_per_s": 1.25e6,
                "floor_bytes_per_s": 1e8,
                "degraded": True,
            },
            {"node_id": "n2", "transport": "grpc", "problem": "the store is full"},
            {"node_id": "n3", "transport": "nixl", "problem": "too slow", "degraded": True},
        ]
        await bench.publish(bench.prefill)
        status = await bench.stub.GetClusterStatus(
            inference_pb2.GetClusterStatusRequest(), timeout=BOUND_S
        )
        assert [p for p in status.problems if "link" in p] == [
            "link of p0 to store n1 over nixl is degraded: it writes 2.5 MB/s and reads 1.25 MB/s, "
            "its floor is 100 MB/s",
            "link of p0 to store n2 over grpc was not measured: the store is full",
            "link of p0 to store n3 over nixl is degraded: too slow",
        ]
        (worker,) = (w for w in status.workers if w.worker_id == "p0")
        assert len(worker.links) == 4


class _Store(kvstore_pb2_grpc.KvStoreServicer):
    """Only says how it is."""

    async def GetStatus(self, request: Any, context: Any) -> Any:
        return kvstore_pb2.GetStatusReply(
            num_pages=9,
            num_pages_bad=2,
            num_damaged=3,
            file_tier_problem="the disk is full",
            tenants=[{"tenant": "a", "num_blocks": 3, "num_blocks_guaranteed": 4}],
        )


async def test_a_store_s_tiers_and_tenants_are_shown_and_a_tier_that_is_off_is_a_problem() -> None:
    server, address = await serving.listen(
        "127.0.0.1:0", [lambda s: kvstore_pb2_grpc.add_KvStoreServicer_to_server(_Store(), s)]
    )
    try:
        async with running() as bench:
            await bench.add_store("n0", address)
            status = await bench.stub.GetClusterStatus(
                inference_pb2.GetClusterStatusRequest(), timeout=BOUND_S
            )
            (store,) = status.stores
            assert (store.num_pages, store.num_pages_bad) == (9, 2)
            (usage,) = store.tenants
            assert (usage.tenant, usage.num_blocks, usage.num_blocks_guaranteed) == ("a", 3, 4)
            assert "the file tier of store n0 is off: the disk is full" in status.problems
            (damaged,) = [each for each in status.problems if "damaged" in each]
            assert damaged.startswith("store n0 found 3 damaged blocks since it started")
    finally:
        await server.stop(None)


async def test_the_first_lookup_is_one_round_trip() -> None:
    """Its connection is there, and Redis has its script, before a router takes requests."""
    async with running() as bench:
        await _at(bench, bench.prefill, "n0")
        await bench.hold("n0", await bench.add_store("n0"), _chain(bench, _salt())[:3])
        redis = bench.redis.client()
        try:
            before = (await redis.info("commandstats"))["cmdstat_evalsha"]
            await bench.generate(request(token_ids={"ids": PROMPT}, sampling=SHORT))
            after = (await redis.info("commandstats"))["cmdstat_evalsha"]
            assert after["calls"] > before["calls"]
            assert after["failed_calls"] == before["failed_calls"]
        finally:
            await redis.aclose()
