"""Which workers a request is given to, and why: policies and the why-record, decode workers that
compute short prompts themselves, conversations that stay where they are, and where a prefix lies
over several stores, as prefill workers are told. A whole router over fake workers and the real
index; stores are registered, not run."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest

from process.rpc_errors import InvalidArgument, NoCapacity, Unavailable
from protos import common_pb2
from tests.harness.router_bench import (
    BOUND_S,
    SHORT_WAITS,
    TOKENIZER,
    Bench,
    FakeDecode,
    FakePrefill,
    code_of,
    failure,
    fake_model,
    http_bench,
    ids_of,
    lease_store,
    request,
    rest_of,
    running,
    take_heartbeats_of_any_age,
)

pytestmark = pytest.mark.oracle

PROMPT = list(range(5, 105))
"""Six full blocks and four tokens."""
SECRET = "hush"
SHORT: dict[str, Any] = {"max_tokens": 4, "seed": 5}


def _ask(prompt: list[int] = PROMPT, **fields: Any) -> Any:
    sampling = {**SHORT, **fields.pop("sampling", {})}
    return request(token_ids={"ids": prompt}, sampling=sampling, **fields)


def _legs(messages: list[Any]) -> dict[str, Any]:
    return {leg.role: leg for leg in messages[-1].provenance.legs}


async def test_every_choice_is_explained() -> None:
    async with running(num_prefill=2, num_decode=3) as bench:
        begin_s = time.perf_counter()
        messages = await bench.generate(_ask(request_id="r1", tenant="a"))
        generated_s = time.perf_counter() - begin_s
        legs = _legs(messages)
        reply = await bench.explain("r1")
        assert (reply.request_id, reply.tenant, reply.model) == ("r1", "a", "fake")
        (decision,) = reply.decisions
        assert (decision.occasion, decision.policy, decision.unit) == ("first", "joint", "s")
        assert decision.prefill_id == legs["prefill"].worker_id
        assert decision.decode_id == legs["decode"].worker_id
        assert (decision.num_prefill, decision.num_decode, decision.num_pairs) == (2, 3, 6)
        assert decision.num_prompt_tokens == decision.num_computed == 100
        assert 0 < decision.took_s < generated_s
        of_role: dict[str, list[Any]] = {"prefill": [], "decode": []}
        for candidate in decision.candidates:
            of_role[candidate.role].append(candidate)
            assert sum(term.value for term in candidate.terms) == pytest.approx(candidate.cost)
            assert candidate.cost >= decision.cost - 1e-9
        assert [len(rows) for rows in of_role.values()] == [2, 3]
        for role, leg in legs.items():
            assert [c.worker_id for c in of_role[role] if c.chosen] == [leg.worker_id]


async def test_the_latest_request_is_explained_without_its_id(bench: Bench) -> None:
    for number in range(3):
        await bench.generate(_ask(request_id=f"r{number}"))
    assert (await bench.explain()).request_id == "r2"
    assert (await bench.explain("r0")).request_id == "r0"


async def test_the_beginning_of_one_id_is_enough_and_of_several_is_refused_by_their_names(
    bench: Bench,
) -> None:
    for request_id in ("abc1", "abc2", "abc"):
        await bench.generate(_ask(request_id=request_id, tenant="a"))
    assert (await bench.explain("abc1")).request_id == "abc1"
    assert (await bench.explain("abc")).request_id == "abc"  # an id of its own
    await bench.generate(_ask(request_id="xyz", tenant="a"))
    assert (await bench.explain("x")).request_id == "xyz"
    code, error = await failure(bench.explain("ab"))
    assert code is grpc.StatusCode.INVALID_ARGUMENT and "'ab' begins 3 ids: abc, abc1, abc2" in str(
        error
    )


@pytest.mark.parametrize(("request_id", "tenant"), [("r9", ""), ("r0", "b"), ("r", "b")])
async def test_what_is_not_known_is_not_found(bench: Bench, request_id: str, tenant: str) -> None:
    await bench.generate(_ask(request_id="r0", tenant="a"))
    assert await code_of(bench.explain(request_id, tenant)) is grpc.StatusCode.NOT_FOUND


async def test_a_refusal_is_another_choice_and_explained() -> None:
    async with running(num_decode=2) as bench:
        await bench.generate(_ask())
        (favourite,) = (worker for worker in bench.decodes if worker.num_reserved)
        favourite.error = NoCapacity("full")
        await bench.generate(_ask(request_id="r1"))
        first, second = (await bench.explain("r1")).decisions
        assert (first.occasion, second.occasion) == ("first", "decode refused")
        assert first.decode_id == favourite.worker_id != second.decode_id


async def test_an_answer_of_one_token_has_no_decode_worker(bench: Bench) -> None:
    await bench.generate(_ask(request_id="r1", sampling={"max_tokens": 1}))
    (decision,) = (await bench.explain("r1")).decisions
    assert (decision.prefill_id, decision.decode_id) == ("p0", "")
    assert {candidate.role for candidate in decision.candidates} == {"prefill"}


async def test_round_robin_gives_each_worker_its_turn() -> None:
    async with running(num_prefill=3, num_decode=2, routing_policy="round_robin") as bench:
        for _ in range(6):
            await bench.generate(_ask())
        assert [len(worker.requests) for worker in bench.prefills] == [2, 2, 2]
        assert [worker.num_reserved for worker in bench.decodes] == [3, 3]
        (decision,) = (await bench.explain()).decisions
        assert (decision.policy, decision.unit) == ("round_robin", "turns")


# ---- a decode worker computes the prompt itself


async def test_a_short_prompt_is_computed_by_decode_exactly_and_said_so() -> None:
    async with running(short_prefill_tokens=100) as bench:
        messages = await bench.generate(_ask(request_id="r1"))
        assert ids_of(messages) == bench.expected_ids(PROMPT, 5, 4)
        assert not bench.prefill.requests
        (told,) = bench.decode.generated
        assert told.computes_prompt and not told.HasField("handle")
        assert not told.output_token_ids
        legs = _legs(messages)
        assert list(legs) == ["decode"] and legs["decode"].num_tokens_computed == 100
        assert not legs["decode"].recomputed
        assert messages[-1].provenance.model_fingerprint == bench.model.fingerprint
        assert [d.prefill_id for d in (await bench.explain("r1")).decisions][-1] == ""


async def test_a_reservation_of_ones_own_disturbs_nobody() -> None:
    """What the worker says of its load after the reservation has this very request in it."""
    async with running(short_prefill_tokens=100) as bench:
        bench.decode.num_blocks = 7  # of this request
        bench.decode.num_tokens_local = 16  # which nobody knew: the choice is made again
        await bench.publish(bench.decode)
        await bench.generate(_ask(request_id="r1"))
        assert not bench.prefill.requests
        decisions = (await bench.explain("r1")).decisions
        assert [d.occasion for d in decisions] == ["first", "decode reserved"]
        for decision in decisions:
            terms = {t.name: t.value for c in decision.candidates for t in c.terms}
            assert terms["decode_disturb"] == terms["decode_full"] == 0


async def test_each_of_several_samples_is_drawn_there() -> None:
    async with running(short_prefill_tokens=100) as bench:
        bench.decode.num_tokens_local = 96
        messages = await bench.generate(_ask(sampling={"n": 3}))
        assert not bench.prefill.requests and len(bench.decode.generated[0].outputs) == 3
        ends = [message for message in messages if message.finish_reason]
        assert len(ends) == 3
        assert {message.usage.num_cached_tokens for message in ends} == {96}
        by_sample = {i: [m for m in messages if m.sample_index == i] for i in range(3)}
        assert ids_of(by_sample[0]) == bench.expected_ids(PROMPT, 5, 4)
        assert len({tuple(ids_of(sample)) for sample in by_sample.values()}) == 3


@pytest.mark.parametrize(
    ("most", "sampling"),
    [(0, {}), (99, {}), (1000, {"max_tokens": 1}), (1000, {"beam": {"num_beams": 2}})],
)
async def test_prefill_is_not_skipped_otherwise(most: int, sampling: dict[str, Any]) -> None:
    async with running(short_prefill_tokens=most) as bench:
        try:
            await bench.generate(_ask(sampling=sampling))
        except grpc.aio.AioRpcError:
            assert "beam" in sampling  # these fakes know none
        assert len(bench.prefill.requests) == 1


async def test_a_busy_decode_worker_is_not_disturbed() -> None:
    """By cost: one stream there waits as long as this request gains."""
    async with running(short_prefill_tokens=1000) as bench:
        for worker in (bench.prefill, bench.decode):
            worker.store_node_id = "n0"
            await bench.publish(worker)
        bench.decode.token_gate.close()
        calls = [bench.call(_ask())]
        await bench.decode.token_gate.reached.wait()
        assert not bench.prefill.requests
        calls.append(bench.call(_ask()))
        await calls[1].read()
        assert len(bench.prefill.requests) == 1
        bench.decode.token_gate.open()
        for call in calls:
            assert await rest_of(call)


async def test_what_decode_has_decides_once_it_is_known() -> None:
    """The router remembers that the prompt lay there; the worker has evicted it."""
    async with running(short_prefill_tokens=20) as bench:
        await bench.add_store("n0")
        await bench.generate(_ask())
        assert len(bench.prefill.requests) == 1
        await bench.generate(_ask(request_id="r1"))
        first, second = (await bench.explain("r1")).decisions
        assert (first.prefill_id, first.num_computed) == ("", 4)
        assert (second.occasion, second.prefill_id) == ("decode reserved", "p0")
        assert len(bench.prefill.requests) == 2
        # And the other way round: it has what nobody knew of.
        bench.decode.num_tokens_local = 96
        await bench.generate(_ask(list(range(6, 106)), request_id="r2"))
        first, second = (await bench.explain("r2")).decisions
        assert (first.prefill_id, second.prefill_id) == ("p0", "")
        assert len(bench.prefill.requests) == 2


async def test_a_decode_worker_that_dies_while_it_computes_is_unavailable() -> None:
    async with running(short_prefill_tokens=1000, times=SHORT_WAITS) as bench:
        bench.decode.token_gate.close()
        call = bench.call(_ask())
        await bench.decode.token_gate.reached.wait()
        await bench.decode.stop()
        assert await code_of(call.read()) is grpc.StatusCode.UNAVAILABLE


# ---- conversations


async def test_the_next_turn_goes_where_the_last_one_was() -> None:
    async with running(num_prefill=3, num_decode=3) as bench:
        await bench.add_store("n0")
        for number in range(6):
            prompt = [number + 5] * 100
            messages = await bench.generate(_ask(prompt))
            met = {role: leg.worker_id for role, leg in _legs(messages).items()}
            turn = [*prompt, *ids_of(messages)[:3], *range(30, 60)]
            messages = await bench.generate(_ask(turn, session=f"another {number}"))
            assert {role: leg.worker_id for role, leg in _legs(messages).items()} == met
            (decision,) = (await bench.explain()).decisions
            assert decision.num_computed == len(turn) - 96


async def test_a_growing_conversation_on_an_idle_cluster_stays_where_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The heartbeats that come after each turn were written while it ran, and say so."""
    take_heartbeats_of_any_age(monkeypatch)
    async with running(num_prefill=2, num_decode=2) as bench:
        await bench.add_store("n0")
        turn, met = [5] * 100, []
        for _ in range(4):
            messages = await bench.generate(_ask(turn))
            places = {role: leg.worker_id for role, leg in _legs(messages).items()}
            met.append(places)
            turn = [*turn, *ids_of(messages)[:3], *range(30, 60)]
            for worker in (*bench.prefills, *bench.decodes):
                is_there = worker.worker_id in places.values()
                worker.num_running = worker.num_queued_tokens = int(is_there)
                await bench.publish(worker)
        assert met == met[:1] * 4


@pytest.mark.parametrize(("max_tokens", "num_kept"), [(28, 112), (29, 128)])
async def test_what_is_noted_is_prompt_and_answer_but_for_the_last_token(
    max_tokens: int, num_kept: int
) -> None:
    async with running(short_prefill_tokens=1000) as bench:
        await bench.add_store("n0")
        answer = ids_of(await bench.generate(_ask(sampling={"max_tokens": max_tokens})))
        assert len(answer) == max_tokens
        turn = [*PROMPT, *answer, *range(30, 60)]
        await bench.generate(_ask(turn))
        first, *_ = (await bench.explain()).decisions
        assert first.num_computed == len(turn) - num_kept


# ---- workers that differ


async def test_requests_go_to_windows_that_hold_them() -> None:
    """And no request is refused that some pair can take."""
    async with running(model=fake_model(context_window=128)) as bench:
        long = fake_model(context_window=512)
        await bench.add(FakePrefill("p-long", long))
        await bench.add(FakeDecode("d-long", long))
        messages = await bench.generate(_ask([7] * 300))
        assert {leg.worker_id for leg in _legs(messages).values()} == {"p-long", "d-long"}
        for number in range(4):
            messages = await bench.generate(_ask([number + 5] * 50))
            assert {leg.worker_id for leg in _legs(messages).values()} == {"p0", "d0"}
        assert await bench.code_of(_ask([7] * 512)) is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_worker_that_comes_back_with_another_model_is_not_asked(bench: Bench) -> None:
    bench.decode.reserve_gate.close()
    call = bench.call(sampling={"max_tokens": 4, "seed": 1})
    async with asyncio.timeout(BOUND_S):
        await bench.decode.reserve_gate.reached.wait()  # the prefill worker is chosen by now
    await bench.prefill.stop()
    other = FakePrefill("p0", fake_model(name="other", fingerprint="cd" * 32))
    await bench.add(other)
    await bench.add(FakePrefill("p1", bench.model))
    bench.decode.reserve_gate.open()
    messages = await rest_of(call)
    assert not other.requests and len(bench.prefills[-1].requests) == 1
    ids = ids_of(messages)
    assert ids == bench.expected_ids(TOKENIZER.encode("hello"), 1, 4)


# ---- where the prefix lies, tenants and scopes, links


async def _at(bench: Bench, worker: FakePrefill, node_id: str) -> None:
    worker.store_node_id = node_id
    await bench.publish(worker)


async def _hints(bench: Bench, tenant: str = "", **fields: Any) -> list[tuple[str, int, int]]:
    """What the prefill worker was told of the prompt, as (node, first block, number of blocks)."""
    await bench.generate(_ask(tenant=tenant, **fields))
    (asked,) = (r for worker in bench.prefills for r in worker.requests[-1:])
    return [(hint.node_id, hint.first_block, hint.num_blocks) for hint in asked.hints]


async def test_hints_are_runs_over_the_union_home_first() -> None:
    async with running(tenant_secret=SECRET) as bench:
        await _at(bench, bench.prefill, "n0")
        lives = {
            node: await bench.add_store(node, f"127.0.0.1:{port}")
            for node, port in (("n0", 10), ("n1", 11), ("n2", 12))
        }
        chain = bench.chain(PROMPT)
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
        await bench.hold("n1", await bench.add_store("n1"), bench.chain(PROMPT)[:3])
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
        call = bench.call(_ask())
        victim, other = await bench.busy_prefill()
        node, life = lives[victim.worker_id]
        await bench.hold(node, life, bench.chain(PROMPT)[:2])
        victim.error = Unavailable("failed")
        other.gate.open()
        victim.gate.open()
        assert [m async for m in call]
        (told,) = other.requests
        assert [(h.node_id, h.num_blocks) for h in told.hints] == [(node, 2)]


async def test_the_worker_at_the_longest_prefix_is_preferred_and_others_pull() -> None:
    async with running(num_prefill=2, tenant_secret=SECRET) as bench:
        chain = bench.chain(PROMPT)
        for worker, (node, num_held) in zip(bench.prefills, (("n0", 1), ("n1", 6)), strict=True):
            await _at(bench, worker, node)
            await bench.hold(node, await bench.add_store(node), chain[:num_held])
        for number in range(8):  # whatever the tie-break of its session says
            await bench.generate(_ask(session=f"s{number}"))
        assert len(bench.prefills[1].requests) == 8
        bench.prefills[1].is_draining = True
        await bench.publish(bench.prefills[1])
        await bench.generate(_ask())
        (told,) = bench.prefills[0].requests
        assert [(h.node_id, h.num_blocks) for h in told.hints] == [("n0", 1), ("n1", 5)]


async def test_two_tenants_never_share() -> None:
    """The same prompt; one's blocks are everywhere, the other is told of none."""
    async with running(tenant_secret=SECRET) as bench:
        await _at(bench, bench.prefill, "n0")
        for node in ("n0", "n1"):
            await bench.hold(node, await bench.add_store(node), bench.chain(PROMPT, "a"))
        assert await _hints(bench, "a") == [("n0", 0, 6)]
        for other in ("b", "", "default", "A", "a=", "a/b"):
            assert await _hints(bench, other) == []
        salts = [bytes(r.tenant_salt) for r in bench.prefill.requests]
        assert len(set(salts)) == 6  # of seven names; "" is "default"


async def test_a_scope_is_shared_by_its_tenants_only() -> None:
    scopes = ("a=team", "b=team", "c=other")
    async with running(tenant_secret=SECRET, tenant_scopes=scopes) as bench:
        await _at(bench, bench.prefill, "n0")
        await bench.hold("n0", await bench.add_store("n0"), bench.chain(PROMPT, "a"))
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
            await bench.hold("n2", lives["p2"], bench.chain(_prompt(number), "a"))
        assert [await _met(bench, "b", number) for number in range(12)] == before
        assert {await _met(bench, "a", number) for number in range(12)} == {"p2"}


def _prompt(number: int) -> list[int]:
    """One of many that differ from the first token on."""
    return [number + 5, *PROMPT]


async def _met(bench: Bench, tenant: str, number: int) -> str:
    """Which prefill worker a request met."""
    before = [len(worker.requests) for worker in bench.prefills]
    await bench.generate(_ask(_prompt(number), tenant=tenant))
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
        chains = [bench.chain(_prompt(number)) for number in range(8)]
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


async def test_degraded_links_are_problems_with_their_rates(bench: Bench) -> None:
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
    status = await bench.status()
    assert [p for p in status.problems if "link" in p] == [
        "link of p0 to store n1 over nixl is degraded: it writes 2.5 MB/s and reads 1.25 MB/s, "
        "its floor is 100 MB/s",
        "link of p0 to store n2 over grpc was not measured: the store is full",
        "link of p0 to store n3 over nixl is degraded: too slow",
    ]
    (worker,) = (w for w in status.workers if w.worker_id == "p0")
    assert len(worker.links) == 4


async def test_a_store_s_tiers_and_tenants_are_shown_and_a_tier_that_is_off_is_a_problem() -> None:
    async with lease_store() as store, running() as bench:
        store.status = {
            "num_pages": 9,
            "num_pages_bad": 2,
            "num_damaged": 3,
            "file_tier_problem": "the disk is full",
            "tenants": [{"tenant": "a", "num_blocks": 3, "num_blocks_guaranteed": 4}],
        }
        await bench.add_store("n0", store.address)
        status = await bench.status()
        (shown,) = status.stores
        assert (shown.num_pages, shown.num_pages_bad) == (9, 2)
        (usage,) = shown.tenants
        assert (usage.tenant, usage.num_blocks, usage.num_blocks_guaranteed) == ("a", 3, 4)
        assert "the file tier of store n0 is off: the disk is full" in status.problems
        (damaged,) = [each for each in status.problems if "damaged" in each]
        assert damaged.startswith("store n0 found 3 damaged blocks since it started")


async def test_the_first_lookup_is_one_round_trip(bench: Bench) -> None:
    """Its connection is there, and Redis has its script, before a router takes requests."""
    await _at(bench, bench.prefill, "n0")
    await bench.hold("n0", await bench.add_store("n0"), bench.chain(PROMPT)[:3])
    before = (await bench.redis_client.info("commandstats"))["cmdstat_evalsha"]
    await bench.generate(_ask())
    after = (await bench.redis_client.info("commandstats"))["cmdstat_evalsha"]
    assert after["calls"] > before["calls"]
    assert after["failed_calls"] == before["failed_calls"]


# ---- which way the KV goes


STORE, DIRECT = common_pb2.HANDOVER_PATH_STORE, common_pb2.HANDOVER_PATH_DIRECT


async def _set(bench: Bench, *workers: Any, **fields: Any) -> None:
    for worker in workers:
        vars(worker).update(fields)
        await bench.publish(worker)


async def _pair(bench: Bench, transport: str) -> None:
    """One prefill worker that lends, and one decode worker, both with the same store."""
    workers = (bench.prefill, bench.decode)
    await _set(bench, *workers, store_node_id="n0", transport=transport)
    await _set(bench, bench.prefill, lender_node_id="p0/lent")


async def _told(bench: Bench, **sampling: Any) -> int:
    """What the prefill worker that answered was told last."""
    options = {"max_tokens": 2, **sampling}
    (end,) = [
        message.provenance
        for message in await bench.generate(token_ids={"ids": PROMPT}, sampling=options)
        if message.HasField("provenance")
    ]
    (name,) = (leg.worker_id for leg in end.legs if leg.role == "prefill")
    (worker,) = (worker for worker in bench.prefills if worker.worker_id == name)
    return worker.requests[-1].handover


@pytest.mark.parametrize(
    ("mode", "shm", "grpc"),
    [("auto", STORE, DIRECT), ("store", STORE, STORE), ("direct", DIRECT, DIRECT)],
)
async def test_the_setting_says_which_way(mode: str, shm: int, grpc: int) -> None:
    async with running(handover=mode) as bench:
        await _pair(bench, "shm")
        assert await _told(bench) == shm
        await _pair(bench, "grpc")
        assert await _told(bench) == grpc


async def test_only_where_both_workers_can() -> None:
    async with running(handover="direct") as bench:
        await _pair(bench, "grpc")
        assert await _told(bench) == DIRECT
        await _set(bench, bench.decode, remote_transport="")
        assert await _told(bench) == STORE
        await _set(bench, bench.decode, remote_transport="nixl")
        assert await _told(bench) == DIRECT
        await _set(bench, bench.prefill, lender_node_id="")
        assert await _told(bench) == STORE
        await _pair(bench, "grpc")
        assert await _told(bench, max_tokens=1) == STORE  # nothing is handed over


async def test_a_link_that_was_found_slow_is_gone_around(bench: Bench) -> None:
    await _pair(bench, "grpc")
    links = [
        {"node_id": "n0", "read_bytes_per_s": 1e9},
        {"node_id": "p0/lent", "read_bytes_per_s": 1e7},
    ]
    await _set(bench, bench.decode, links=links)
    assert await _told(bench) == STORE
    links[0]["read_bytes_per_s"] = 1e6
    await _set(bench, bench.decode, links=links)
    assert await _told(bench) == DIRECT


@pytest.mark.parametrize(("lends", "told"), [("", STORE), ("p1/lent", DIRECT)])
async def test_who_tries_again_is_told_its_own_way(lends: str, told: int) -> None:
    """The second worker's way is to the decode worker that holds blocks already."""
    async with running(num_prefill=2, handover="direct") as bench:
        first, second = bench.prefills
        await _set(bench, first, lender_node_id="p0/lent")
        await _set(bench, second, lender_node_id=lends, store_node_id="n0")
        first.error = Unavailable("not today")
        second.is_draining = True
        await bench.publish(second)
        first.gate.close()
        asking = request(token_ids={"ids": PROMPT}, sampling={"max_tokens": 2})
        call = bench.call(asking)
        await first.gate.reached.wait()
        await _set(bench, second, is_draining=False)
        first.gate.open()
        assert [message async for message in call][-1].HasField("provenance")
        assert first.requests[-1].handover == DIRECT
        assert second.requests[-1].handover == told


# ---- adapters


OLD, NEW = "11" * 32, "22" * 32


async def _load(bench: Bench, **digests: str) -> None:
    """Have each worker say which content it has under the name "tales" ("": none)."""
    for worker in (*bench.prefills, *bench.decodes):
        digest = digests.get(worker.worker_id, "")
        worker.adapters = {"tales": digest} if digest else {}
        await bench.publish(worker)


def _tales(bench: Bench, adapter: str = "tales", session: str = "") -> Any:
    """All messages of a request with an adapter."""
    return bench.generate(adapter=adapter, sampling={"max_tokens": 3}, session=session)


async def test_only_workers_that_have_it_are_asked() -> None:
    async with running(num_prefill=2, num_decode=2) as bench:
        await _load(bench, p1=NEW, d0=NEW, d1=OLD)
        for index in range(6):
            await _tales(bench, session=f"s{index}")
        assert not bench.prefills[0].requests and len(bench.prefills[1].requests) == 6
        assert bench.decodes[0].num_reserved == 6 and bench.decodes[1].num_reserved == 0
        asked = bench.prefills[1].requests[0]
        assert (asked.adapter, asked.adapter_digest) == ("tales", NEW)
        # Without an adapter everybody serves.
        for index in range(12):
            await bench.generate(sampling={"max_tokens": 1}, session=f"t{index}")
        assert bench.prefills[0].requests
        assert not bench.prefills[0].requests[0].adapter_digest


async def test_what_nobody_has_is_wrong_and_what_only_one_role_has_may_come() -> None:
    async with running(times=SHORT_WAITS) as bench:
        await _load(bench, p0=NEW)
        error = (await failure(_tales(bench, "nothing")))[1]
        assert isinstance(error, InvalidArgument) and error.field == "adapter"
        assert "loaded are: tales" in str(error)
        assert isinstance((await failure(_tales(bench)))[1], Unavailable)
        await _load(bench, p0=NEW, d0=OLD)
        error = (await failure(_tales(bench)))[1]
        assert isinstance(error, Unavailable) and "same content" in str(error)
        assert not bench.prefill.requests


async def test_of_two_contents_the_one_on_more_workers_serves() -> None:
    async with running(num_prefill=3, num_decode=2) as bench:
        await _load(bench, p0=OLD, p1=NEW, p2=NEW, d0=OLD, d1=NEW)
        for index in range(6):
            await _tales(bench, session=f"s{index}")
        assert not bench.prefills[0].requests and bench.decodes[0].num_reserved == 0


async def test_no_adapter_is_asked_for_under_the_name_of_any_model() -> None:
    """Not of another model's workers either, which cannot know that name."""
    other = fake_model(name="other")
    async with http_bench(others=[other], num_prefill=1, num_decode=1) as bench:
        for worker in (bench.prefill, bench.decode):
            worker.adapters = {"other": NEW, "tales": NEW}
            await bench.publish(worker)
        async with aiohttp.ClientSession(bench.url) as session:
            async with session.get("/v1/models") as answer:
                ids = [entry["id"] for entry in (await answer.json())["data"]]
            assert sorted(ids) == ["fake", "other", "tales"]
            body = {"model": "other", "prompt": "x", "max_tokens": 1}
            async with session.post("/v1/completions", json=body) as answer:
                assert answer.status == 503  # of `other` there are no workers
        assert not bench.prefill.requests
