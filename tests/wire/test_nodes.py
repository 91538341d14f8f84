"""Several nodes. A prefix that lies at another node's store is fetched from there by prefill,
verified, and copied home; a handle whose blocks lie in other nodes' stores is fetched part by part
by decode, over the transport for other nodes, and each lease given back where it was granted. What
does not come is computed and counted by reason. A request that is cancelled, out of time, or loses
that store meanwhile leaves nothing held at any node. With real stores."""

from __future__ import annotations

import contextlib
import random
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from process.rpc_errors import Cancelled, DeadlineExceeded, InvalidArgument
from protos import common_pb2
from tests.harness.gated_engine import BLOCK_SIZE, GatedModel, prompt_of
from tests.harness.handles import blocks_of, partial, sign, split
from tests.harness.prefill_decode_pair import WAIT_S, Answer, Pair, PrefillCall, pair, whole
from tests.harness.prefill_nodes import Node, Nodes, nodes, way
from tests.harness.waiting import Deadlines, Gate, until

pytestmark = [pytest.mark.oracle, pytest.mark.asyncio(loop_scope="module")]

NUM_TOKENS = 42
NUM_FULL = 10


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def n(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Nodes]:
    """Three nodes."""
    async with nodes(tmp_path_factory.mktemp("nodes"), num_nodes=3) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cold(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Nodes]:
    """Three that leave a prefix where it is."""
    folder = tmp_path_factory.mktemp("cold")
    async with nodes(folder, num_nodes=3, replicate_after_hits=100) as made:
        yield made


def tokens_by_node(reply: Any) -> dict[str, int]:
    counts = {count.node_id: count.num_tokens for count in reply.leg.from_store}
    return {node_id: num_tokens for node_id, num_tokens in counts.items() if num_tokens}


def recomputed(reply: Any) -> dict[str, int]:
    return {count.reason: count.num_blocks for count in reply.leg.recomputed}


def shape(handle: common_pb2.KvHandle) -> list[tuple[str, int, int]]:
    """(node, first block, number of blocks) of each run."""
    return [(run.node_id, run.first_block, len(blocks_of(run))) for run in handle.runs]


async def fill(n: Nodes, node: Node, prompt: tuple[int, ...]) -> Any:
    """Have `node` compute and store a prompt, and keep none of it on its device."""
    reply = await n.run(node, prompt, name="fill", wants_handle=False)
    await n.forget(node)
    return reply


async def test_the_second_node_s_hit_comes_from_the_first_node_s_store(n: Nodes) -> None:
    prompt = n.new_prompt(NUM_TOKENS)
    await fill(n, n[0], prompt)
    reply = await n.run(n[1], prompt, [n[0].hint(0, NUM_FULL)])
    assert tokens_by_node(reply) == {"store-0": NUM_FULL * BLOCK_SIZE}
    assert reply.leg.num_bytes_read == NUM_FULL * n[1].block_bytes
    assert reply.leg.num_tokens_computed == 2
    assert recomputed(reply) == {}
    # A copy lies at home now, and that is what is handed over.
    assert shape(reply.handle) == [("store-1", 0, NUM_FULL)]
    assert reply.handle.tail.node_id == "store-1"
    assert n[1].holds(n[1].hashes(prompt)) == NUM_FULL
    await n.check(reply.handle)
    await n.forget(n[1])
    await n[0].kill_store()
    again = await n.run(n[1], prompt, name="again", wants_handle=False)
    assert tokens_by_node(again) == {"store-1": NUM_FULL * BLOCK_SIZE}
    await n.check()
    await n.restart_store(n[0])


async def test_device_then_home_then_the_other_node(n: Nodes) -> None:
    """Each gives what the ones before it have not, and no byte is moved twice."""
    prompt = n.new_prompt(NUM_TOKENS)
    await fill(n, n[0], prompt)
    await fill(n, n[1], prompt[: 6 * BLOCK_SIZE])
    await n.run(n[1], prompt[:13], name="short", wants_handle=False)  # three blocks on device
    hints = [n[1].hint(0, 6), n[0].hint(6, NUM_FULL - 6)]
    reply = await n.run(n[1], prompt, hints)
    assert reply.leg.num_tokens_local == 3 * BLOCK_SIZE
    assert tokens_by_node(reply) == {"store-1": 3 * BLOCK_SIZE, "store-0": 4 * BLOCK_SIZE}
    block_bytes = n[1].block_bytes
    assert reply.leg.num_bytes_read == 7 * block_bytes
    assert reply.leg.transport == "grpc, shm"
    by_node = {count.node_id: count.transport for count in reply.leg.from_store}
    assert by_node == {"store-1": "shm", "store-0": "grpc"}
    moved = {each.transport: each for each in reply.leg.transports}
    assert moved["shm"].num_bytes_read == 3 * block_bytes
    assert moved["grpc"].num_bytes_read == 4 * block_bytes
    assert moved["shm"].num_bytes_written == reply.leg.num_bytes_written > 0
    assert moved["grpc"].num_bytes_written == 0
    assert shape(reply.handle) == [("store-1", 0, NUM_FULL)]
    await n.check(reply.handle)


async def test_a_prefix_over_three_nodes(n: Nodes) -> None:
    prompt = n.new_prompt(NUM_TOKENS)
    await fill(n, n[1], prompt[: 6 * BLOCK_SIZE])
    await fill(n, n[2], prompt)
    await fill(n, n[0], prompt[: 3 * BLOCK_SIZE])
    hints = [n[0].hint(0, 3), n[1].hint(3, 3), n[2].hint(6, 4)]
    reply = await n.run(n[0], prompt, hints)
    tokens = {"store-0": 3, "store-1": 3, "store-2": 4}
    assert tokens_by_node(reply) == {name: 4 * count for name, count in tokens.items()}
    assert n[0].holds(n[0].hashes(prompt)) == NUM_FULL
    await n.check(reply.handle)


async def test_a_cold_prefix_stays_where_it_is_and_the_handle_has_two_runs(tmp_path: Path) -> None:
    """Without a copy the blocks behind it go to the store that has their parents."""
    async with nodes(tmp_path, replicate_after_hits=2) as n:
        prompt = n.new_prompt(NUM_TOKENS)
        longer = prompt + prompt_of(20, start=8)
        num_longer = len(longer) // BLOCK_SIZE
        await fill(n, n[0], prompt)
        await fill(n, n[1], prompt[: 4 * BLOCK_SIZE])
        hashes = n[1].hashes(longer)
        hints = [n[1].hint(0, 4), n[0].hint(4, NUM_FULL - 4)]
        for number in range(4):
            reply = await n.run(n[1], longer, hints, name=f"r{number}")
            # The first one stores the rest there; its last block is hot when it was matched twice.
            is_copied = number == 3
            if is_copied:
                assert shape(reply.handle) == [("store-1", 0, num_longer)]
            else:
                assert shape(reply.handle) == [("store-1", 0, 4), ("store-0", 4, num_longer - 4)]
                assert reply.handle.tail.node_id == "store-0"
                assert len({run.lease_id for run in reply.handle.runs}) == 2
            assert reply.handle.num_tokens == len(longer)
            assert n[0].holds(hashes) == num_longer
            assert n[1].holds(hashes) == (num_longer if is_copied else 4)
            await n.check(reply.handle)
            await n.forget(n[1])


async def test_home_is_away_and_the_other_node_takes_what_comes(n: Nodes) -> None:
    prompt = n.new_prompt(NUM_TOKENS)
    await fill(n, n[0], prompt[: 6 * BLOCK_SIZE])
    await n[1].kill_store()
    await until(lambda: not n[1].has_store)
    reply = await n.run(n[1], prompt, [n[0].hint(0, 6)])
    assert tokens_by_node(reply) == {"store-0": 24}
    assert recomputed(reply) == {"store_unavailable": 4}
    assert shape(reply.handle) == [("store-0", 0, NUM_FULL)]
    assert n[0].holds(n[0].hashes(prompt)) == NUM_FULL
    await n.check(reply.handle)
    await n.restart_store(n[1])


async def test_a_worker_that_pulls_from_none(tmp_path: Path) -> None:
    """By its settings: nothing was lost."""
    async with nodes(tmp_path, remote_transport="") as n:
        prompt = n.new_prompt(NUM_TOKENS)
        await fill(n, n[0], prompt)
        reply = await n.run(n[1], prompt, [n[0].hint(0, NUM_FULL)], wants_handle=False)
        assert (tokens_by_node(reply), recomputed(reply)) == ({}, {})
        await n.check()


async def test_the_tenant_is_told_to_the_store(n: Nodes) -> None:
    home = n[0].home
    puts = home.watch("put")
    await n.run(n[0], n.new_prompt(NUM_TOKENS), wants_handle=False, tenant="blue")
    home.restore("put")
    assert {chain.tenant for (chains, *_), _ in puts for chain in chains} == {"blue"}


# ---- what goes wrong

Spoil = Callable[[Nodes, Any, common_pb2.PrefixRun], None]


def flip(index: int) -> Spoil:
    return lambda n, filled, hint: n[0].flip_bit(blocks_of(filled.handle.runs[0])[index])


def other_life(n: Nodes, filled: Any, hint: common_pb2.PrefixRun) -> None:
    hint.store_incarnation = bytes(16)


def other_node(n: Nodes, filled: Any, hint: common_pb2.PrefixRun) -> None:
    hint.node_id = "store-7"


def not_there(n: Nodes, filled: Any, hint: common_pb2.PrefixRun) -> None:
    hint.store_address = "127.0.0.1:1"


def too_long(n: Nodes, filled: Any, hint: common_pb2.PrefixRun) -> None:
    hint.num_blocks = 100  # more than there is


@pytest.mark.parametrize(
    ("spoil", "num_tokens", "num_loaded", "reasons"),
    [
        (flip(0), 42, 0, {"checksum": 10}),
        (flip(4), 42, 4, {"checksum": 6}),
        (flip(9), 42, 9, {"checksum": 1}),
        (other_life, 42, 0, {"incarnation": 10}),
        (other_node, 42, 0, {"incarnation": 10}),
        (not_there, 42, 0, {"store_unavailable": 10}),
        (too_long, 27, 6, {"missing": 4}),
    ],
)
async def test_what_cannot_be_used_is_computed_and_counted(
    n: Nodes, spoil: Spoil, num_tokens: int, num_loaded: int, reasons: dict[str, int]
) -> None:
    prompt = n.new_prompt(NUM_TOKENS)
    filled = await n.run(n[0], prompt[:num_tokens], name="fill")
    await n.release(filled.handle)
    hint = n[0].hint(0, NUM_FULL)
    spoil(n, filled, hint)
    reply = await n.run(n[1], prompt, [hint])
    assert sum(tokens_by_node(reply).values()) == num_loaded * BLOCK_SIZE
    assert recomputed(reply) == reasons
    assert n[1].holds(n[1].hashes(prompt)) == NUM_FULL
    assert shape(reply.handle) == [("store-1", 0, NUM_FULL)]
    await n.check(reply.handle)


async def test_a_lease_at_home_outlives_a_slow_pull(tmp_path: Path) -> None:
    """What home had stays pinned while another node takes longer than a lease lives."""
    async with nodes(tmp_path, lease_ttl_s=(ttl_s := 4.0)) as n:
        prompt = n.new_prompt(NUM_TOKENS)
        await fill(n, n[0], prompt)
        await fill(n, n[1], prompt[: 4 * BLOCK_SIZE])
        far, renewed_s = await way(n[1], n[0]), 0.0

        async def noted(renew: Any, *arguments: Any, **options: Any) -> None:
            nonlocal renewed_s
            await renew(*arguments, **options)
            renewed_s = time.monotonic()

        async def slow(match: Any, *arguments: Any, **options: Any) -> Any:
            lapses_s = time.monotonic() + ttl_s
            await until(lambda: renewed_s > lapses_s)  # it would have lapsed
            return await match(*arguments, **options)

        n[1].home.replace("renew", noted)
        far.replace("match", slow)
        reply = await n.run(n[1], prompt, [n[1].hint(0, 4), n[0].hint(4, 6)])
        assert tokens_by_node(reply) == {"store-1": 16, "store-0": 24}
        assert not reply.leg.not_stored
        assert shape(reply.handle) == [("store-1", 0, NUM_FULL)]
        await n.check(reply.handle)


async def test_home_dies_during_the_pull_and_the_other_node_takes_what_comes(n: Nodes) -> None:
    prompt = n.new_prompt(NUM_TOKENS)
    await fill(n, n[0], prompt[: 6 * BLOCK_SIZE])
    home, far = n[1].home, await way(n[1], n[0])

    async def meanwhile(match: Any, *arguments: Any, **options: Any) -> Any:
        await n[1].kill_store()
        await until(lambda: home.is_broken)
        return await match(*arguments, **options)

    far.replace("match", meanwhile)
    reply = await n.run(n[1], prompt, [n[0].hint(0, 6)])
    far.restore("match")
    assert tokens_by_node(reply) == {"store-0": 24}
    assert shape(reply.handle) == [("store-0", 0, NUM_FULL)]
    await n.check(reply.handle)
    await n.restart_store(n[1])


async def test_what_came_before_the_time_ran_out_is_used(tmp_path: Path) -> None:
    """Batches of three blocks, of which the third is not over in time."""
    batch_bytes = 3 * GatedModel().layout.block_bytes
    async with nodes(tmp_path, fetch_batch_bytes=batch_bytes) as n:
        prompt = n.new_prompt(NUM_TOKENS)
        await fill(n, n[0], prompt)
        batches = (await way(n[1], n[0])).miss_get(3)
        reply = await n.run(n[1], prompt, [n[0].hint(0, NUM_FULL)])
        assert batches == [3, 3, 3]
        assert tokens_by_node(reply) == {"store-0": 6 * BLOCK_SIZE}
        assert recomputed(reply) == {"deadline": 4}
        assert n[1].holds(n[1].hashes(prompt)) == NUM_FULL
        await n.check(reply.handle)


async def test_a_bad_block_at_home_comes_from_the_other_node(n: Nodes) -> None:
    prompt = n.new_prompt(NUM_TOKENS)
    await fill(n, n[0], prompt)
    filled = await n.run(n[1], prompt, name="fill")
    await n.release(filled.handle)
    await n.forget(n[1])
    n[1].flip_bit(blocks_of(filled.handle.runs[0])[5])
    hints = [n[1].hint(0, NUM_FULL), n[0].hint(NUM_FULL, 1)]
    reply = await n.run(n[1], prompt, hints, wants_handle=False)
    assert tokens_by_node(reply) == {"store-1": 20, "store-0": 20}
    assert recomputed(reply) == {}
    await n.check()


async def test_after_a_transfer_that_ran_out_of_time_no_other_writes_there(tmp_path: Path) -> None:
    """Its blocks may still be written into; a second store's bytes must not go there."""
    # The client of the late store is dropped: what it may have pinned there lapses.
    async with nodes(tmp_path, num_nodes=3, lease_ttl_s=2.0) as n:
        prompt = n.new_prompt(NUM_TOKENS)
        for node in (n[0], n[2]):
            await fill(n, node, prompt)
        late = (await way(n[1], n[0])).late_gets()
        asked = (await way(n[1], n[2])).watch("match")
        reply = await n.run(n[1], prompt, [n[0].hint(0, 5), n[2].hint(5, 5)])
        assert recomputed(reply) == {"deadline": 10}
        assert not asked
        await n[1].quarantined(NUM_FULL)
        assert len(late.block_ids) == NUM_FULL
        late.settle()
        await n[1].quarantined(0)
        await n.check(reply.handle)


@pytest.mark.parametrize(
    "change",
    [
        lambda hints: hints[1].__setattr__("first_block", 7),
        lambda hints: hints[0].__setattr__("first_block", 1),
        lambda hints: hints[1].__setattr__("num_blocks", 0),
        lambda hints: hints[0].__setattr__("store_incarnation", b"short"),
        lambda hints: hints[0].__setattr__("store_address", ""),
    ],
)
async def test_hints_that_no_router_makes_are_refused_by_name(
    n: Nodes, change: Callable[[list[common_pb2.PrefixRun]], None]
) -> None:
    prompt = n.new_prompt(NUM_TOKENS)
    hints = [n[1].hint(0, 6), n[0].hint(6, 4)]
    change(hints)
    with pytest.raises(InvalidArgument) as caught:
        await whole(PrefillCall(n[1].stub, n.request(prompt, hints), timeout_s=WAIT_S))
    assert caught.value.field == "hints"


async def test_any_prefix_anywhere_gives_the_same_answer(
    tmp_path: Path, seed: int, scale: Callable[[int], int]
) -> None:
    """Hints that are right, short or too long, and stores that forget."""
    rng = random.Random(seed)
    async with nodes(tmp_path, num_nodes=3, replicate_after_hits=1, num_frames=96) as n:
        for number in range(scale(400)):
            prompt = prompt_of(rng.randint(5, 90), start=100 + number)
            hashes = n[0].hashes(prompt)
            for node in rng.sample(n.all, rng.randint(0, 2)):
                part = prompt[: rng.randint(1, len(prompt))]
                await n.run(node, part, name=f"fill{number}", wants_handle=False)
            where = rng.choice(n.all)
            hints, end = [], 0
            for node in sorted(n.all, key=lambda node: node is not where):
                claimed = node.holds(hashes) + rng.choice([-1, 0, 0, 0, 2])
                if claimed > end:
                    hints.append(node.hint(end, claimed - end))
                    end = claimed
            if rng.random() < 0.2:
                await n.forget(where)
                await where.settle()  # what is still pinned takes room
            partials: list[common_pb2.KvHandle] = []
            reply = await n.run(where, prompt, hints, name=f"r{number}", partials=partials)
            for node in n.all:
                node.holds(hashes)
            assert reply.handle.num_tokens == len(prompt), reply.leg
            await n.check(reply.handle)


# ---- in each state

STATES = {
    "attaching": "fetching",
    "matching": "fetching",
    "copying": "fetching",
    "computing": "computing",
    "storing": "storing",
}


@contextlib.asynccontextmanager
async def held_in(n: Nodes, state: str) -> AsyncIterator[PrefillCall]:
    """A call at node 1 whose prefix comes from node 0, and that stays in `state` there. `storing`
    and `computing` come with the policy that leaves the prefix where it is.
    """
    prompt = n.new_prompt(NUM_TOKENS)
    await n.run(n[0], prompt[: 7 * BLOCK_SIZE], name="fill", wants_handle=False)
    gate: Gate | None = None
    if state == "attaching":
        await n[1].forget_ways()
        gate = n[1].hold_attaching()
    else:
        far = await way(n[1], n[0])
        if state == "computing":
            n[1].model.hold()
        else:
            gate = far.hold({"matching": "match", "copying": "get", "storing": "put"}[state])
    call = PrefillCall(n[1].stub, n.request(prompt, [n[0].hint(0, 7)]), timeout_s=WAIT_S)
    try:
        if gate is not None:
            await gate.wait_entered()
        await until(lambda: STATES[state] in n[1].states())
        yield call
    finally:
        n[1].model.release()
        if gate is not None:
            gate.open()
        call.vanish()


async def assert_served(n: Nodes) -> None:
    """Both nodes are as good as new."""
    await n.check()
    for node in n.all[:2]:
        reply = await n.run(node, n.new_prompt(35), name="after")
        await n.check(reply.handle)


def _with_policy_of(state: str, n: Nodes, cold: Nodes) -> Nodes:
    return cold if state in ("computing", "storing") else n


@pytest.mark.parametrize("state", STATES)
async def test_cancel_in_each_state_leaves_nothing(n: Nodes, cold: Nodes, state: str) -> None:
    n = _with_policy_of(state, n, cold)
    async with held_in(n, state) as call:
        call.cancel()
        assert isinstance(await call.error(), Cancelled)
        if state != "computing":  # there the abort comes after the step that is held
            await until(lambda: not n[1].states())
    await assert_served(n)


@pytest.mark.parametrize("state", STATES)
async def test_the_deadline_ends_it_in_each_state(
    n: Nodes, cold: Nodes, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines, n = Deadlines(monkeypatch), _with_policy_of(state, n, cold)
    async with held_in(n, state) as call:
        deadlines.end_prefill()
        with pytest.raises(DeadlineExceeded):
            await whole(call)
    await assert_served(n)


@pytest.mark.parametrize("state", STATES)
async def test_the_other_node_s_store_dies_in_each_state_and_the_answer_still_comes(
    n: Nodes, cold: Nodes, state: str
) -> None:
    n = _with_policy_of(state, n, cold)
    async with held_in(n, state) as call:
        await n[0].kill_store()
        n[1].model.release()
        Gate.open_all()
        reply = await whole(call)
    assert list(reply.token_ids) == n.model.generate(call.prompt, 1)
    leg = reply.leg
    num_from_store = sum(count.num_tokens for count in leg.from_store)
    assert leg.num_tokens_computed + leg.num_tokens_local + num_from_store == NUM_TOKENS
    reasons = {count.reason for count in (*leg.recomputed, *leg.not_stored)}
    assert reasons <= {"store_unavailable", "transport"}
    assert reasons, "it was counted"
    await n.check(reply.handle)
    await n.restart_store(n[0])
    await assert_served(n)


async def test_a_silent_store_costs_its_budget_and_not_the_request(tmp_path: Path) -> None:
    async with nodes(tmp_path, transfer_budget_s=0.3) as n:
        prompt = n.new_prompt(NUM_TOKENS)
        await n.run(n[0], prompt, name="fill", wants_handle=False)
        far = await way(n[1], n[0])
        far.silence()
        reply = await n.run(n[1], prompt, [n[0].hint(0, 10)])
        far.speak()
        assert recomputed(reply) == {"deadline": 10}
        await n.check(reply.handle)


async def test_a_cancel_while_bytes_come_keeps_their_blocks_out_of_use_until_none_can_come(
    n: Nodes,
) -> None:
    """A transfer of another node's store that cannot be called back."""
    prompt = n.new_prompt(NUM_TOKENS)
    await n.run(n[0], prompt, name="fill", wants_handle=False)
    far = await way(n[1], n[0])
    late = far.uncallable_gets()
    call = PrefillCall(n[1].stub, n.request(prompt, [n[0].hint(0, 10)]), timeout_s=WAIT_S)
    await late.wait_entered()
    call.cancel()
    await until(lambda: not n[1].states())
    await n[1].quarantined(10)
    await n[1].unreferenced()
    late.settle()
    await n[1].quarantined(0)
    far.restore("get")
    await n.check()


@pytest.mark.parametrize("is_copied", [True, False])
@pytest.mark.parametrize("where", ["home", "other", "both", "home is gone"])
async def test_a_lease_that_ends_during_the_pull_costs_no_answer(
    n: Nodes, cold: Nodes, where: str, is_copied: bool
) -> None:
    """Renewed too late, or the store ended it: what was copied under it is here, and is stored."""
    n = n if is_copied else cold
    prompt = n.new_prompt(NUM_TOKENS)
    for node, num_blocks in ((n[0], 7), (n[1], 4), (n[2], 10)):
        await fill(n, node, prompt[: num_blocks * BLOCK_SIZE])
    await way(n[1], n[0])
    last = await way(n[1], n[2])
    ended = {"other": [n[0]], "both": [n[1], n[0]]}.get(where, [n[1]])

    async def meanwhile(match: Any, *arguments: Any, **options: Any) -> Any:
        matched = await match(*arguments, **options)
        if where == "home is gone":
            home = n[1].home
            await n[1].kill_store()
            await until(lambda: home.is_broken)
        else:
            for node in ended:
                node.end_leases()
        assert await n[1].renew_pins() == 2 - len(ended)
        return matched

    last.replace("match", meanwhile)
    reply = await n.run(n[1], prompt, [n[1].hint(0, 4), n[0].hint(4, 3), n[2].hint(7, 3)])
    last.restore("match")
    assert reply.leg.num_tokens_computed == 2 and not reply.leg.not_stored
    assert reply.handle.num_tokens == len(prompt)
    await n.check(reply.handle)
    if where == "home is gone":
        await n.restart_store(n[1])


# ---- decode


NUM_FAR = 30
NUM_BLOCKS = 8  # seven full ones and the tail
SIZE = 4
HOME = "decode-home"

SpoilHandle = Callable[[common_pb2.KvHandle], Awaitable[None]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one_pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    """Prefill beside its store, and a decode worker that has another store at home."""
    async with pair(tmp_path_factory.mktemp("pair"), has_two_nodes=True) as made:
        yield made


@pytest.fixture
def far(p: Pair) -> str:
    """The prefill worker's node."""
    return p.node_id


def transports(answer: Answer) -> dict[str, str]:
    """By the node that was read."""
    return {count.node_id: count.transport for count in answer.leg.from_store}


async def generate(p: Pair, prompt: Sequence[int], spoil: SpoilHandle | None = None) -> Answer:
    """A request whose handle may be spoiled, and is signed again."""
    async with p.reserved(prompt) as (stream, key):
        reply = await p.run_prefill(prompt)
        if spoil is not None:
            await spoil(reply.handle)
            sign(p, reply.handle)
        answer = await stream.answer(key, reply)
    assert answer.token_ids == p.expected(prompt, 8)
    leg = answer.leg
    num_from_store = sum(tokens_by_node(answer).values())
    assert leg.num_tokens_computed + leg.num_tokens_local + num_from_store == len(prompt)
    return answer


async def forget(p: Pair) -> None:
    """Push everything out of decode's device cache; its store keeps it, once it has it."""
    await p.check()
    for _ in range(5):
        async with p.reserved(p.new_prompt(200), name="filler", max_tokens=40) as (stream, key):
            await stream.compute(key)
            await stream.collect(key)
    await p.check()


async def failed_writes(p: Pair) -> dict[tuple[str, ...], float]:
    """Blocks that decode's puts failed to store, by reason."""
    shown = await p.at_decode.metrics()
    return {
        name: value
        for name, value in shown.items()
        if name[0] == "baton_transfer_failed_blocks_total" and "write" in name and value
    }


async def put_again(p: Pair) -> float:
    """Blocks that decode put again with what they follow."""
    shown = await p.at_decode.metrics()
    return sum(shown[name] for name in shown if name[0] == "baton_transfer_put_again_blocks_total")


async def test_another_nodes_blocks_are_fetched_from_there(p: Pair, far: str) -> None:
    prompt, before = p.new_prompt(NUM_FAR), p.at_decode.count("baton_kv_written_back_blocks")
    answer = await generate(p, prompt)
    assert tokens_by_node(answer) == {far: NUM_FAR} and answer.recomputed == {}
    assert answer.leg.num_tokens_computed == 0
    assert transports(answer) == {far: "grpc"} and answer.leg.transport == "grpc"
    await p.check()  # the lease was given back there
    # The prompt came into decode's own store before the answer.
    text = [*prompt, *answer.token_ids]
    assert p.num_stored(text, p.decode_store) == (NUM_FAR + 7) // SIZE
    assert p.at_decode.count("baton_kv_written_back_blocks") == before + 2
    assert await failed_writes(p) == {}  # it was not tried without the prompt first


async def test_a_put_whose_parent_the_store_lost_is_put_again_with_it(p: Pair) -> None:
    """That is counted apart: no transfer failed."""
    prompt = p.new_prompt(NUM_FAR)

    async def lose(handle: common_pb2.KvHandle) -> None:
        await split(p, handle, at=7)
        p.lose_chain(prompt, p.decode_store)

    await generate(p, prompt)
    await p.check()
    answer = await generate(p, prompt, lose)
    await p.check()
    text = [*prompt, *answer.token_ids]
    assert p.num_stored(text, p.decode_store) == (NUM_FAR + 7) // SIZE
    assert await failed_writes(p) == {} and await put_again(p) > 0


async def test_a_handle_of_two_stores_is_fetched_from_both(p: Pair, far: str) -> None:
    prompt = p.new_prompt(NUM_FAR)
    await generate(p, prompt)
    await forget(p)
    answer = await generate(p, prompt, lambda handle: split(p, handle))
    assert tokens_by_node(answer) == {HOME: 16, far: 14} and answer.recomputed == {}
    assert transports(answer) == {HOME: "shm", far: "grpc"}
    assert answer.leg.transport == "grpc, shm"
    assert answer.leg.num_tokens_computed == 0


async def test_what_lies_behind_a_store_that_is_gone_is_computed(tmp_path: Path) -> None:
    async with pair(tmp_path, has_two_nodes=True) as p:
        prompt = p.new_prompt(NUM_FAR)
        await generate(p, prompt)
        await forget(p)

        async def in_two(handle: common_pb2.KvHandle) -> None:
            way = await p.at_decode.way_by(handle)
            await split(p, handle)
            await p.kill_store()
            await until(lambda: way.is_broken)

        answer = await generate(p, prompt, in_two)
        assert tokens_by_node(answer) == {HOME: 16}
        assert answer.recomputed == {"store_unavailable": 4}
        await p.check()


async def test_a_store_in_another_life_is_not_used(p: Pair) -> None:
    """Nothing that may gives its lease back: it lapses by itself."""
    given: list[common_pb2.KvHandle] = []

    async def other_life(handle: common_pb2.KvHandle) -> None:
        given.append(common_pb2.KvHandle())
        given[0].CopyFrom(handle)
        for run in (handle.runs[0], handle.tail):
            run.store_incarnation = secrets.token_bytes(16)

    answer = await generate(p, p.new_prompt(NUM_FAR), other_life)
    assert answer.recomputed == {"incarnation": NUM_BLOCKS} and tokens_by_node(answer) == {}
    await p.check_store(leases=1)
    p.at_prefill.release_later(*given)
    await p.check()
    await p.at_decode.forget_ways()


async def test_a_bad_block_of_another_node_is_computed(p: Pair, far: str) -> None:
    async def flip(handle: common_pb2.KvHandle) -> None:
        p.flip_bit(blocks_of(handle.runs[0])[2])

    answer = await generate(p, p.new_prompt(NUM_FAR), flip)
    assert answer.recomputed == {"checksum": 6} and tokens_by_node(answer) == {far: 8}


async def test_without_a_transport_for_other_nodes_nothing_is_pulled(tmp_path: Path) -> None:
    async with pair(tmp_path, has_two_nodes=True, remote_transport="") as p:
        answer = await generate(p, p.new_prompt(NUM_FAR))
        assert answer.recomputed == {"store_unavailable": NUM_BLOCKS}
        await p.check_store(leases=1)  # there is no way to give it back


async def test_early_pulls_come_from_other_nodes_too(p: Pair, far: str) -> None:
    prompt = p.new_prompt(NUM_FAR)
    reply = await p.run_prefill(prompt)
    gate = (await p.at_decode.way_by(reply.handle)).hold("get")
    async with p.reserved(prompt) as (stream, key):
        await stream.prefetch(key, partial(p, reply.handle, 5))
        await gate.wait_entered()
        await stream.generate(key, reply)
        gate.open()
        answer = await stream.collect(key)
    assert [*reply.token_ids, *answer.token_ids] == p.expected(prompt, 8)
    assert tokens_by_node(answer) == {far: NUM_FAR}
    assert answer.leg.num_tokens_early == 20


@pytest.mark.parametrize("how", ["cancel", "stream"])
async def test_a_cancel_in_the_middle_of_a_pull_from_another_node(p: Pair, how: str) -> None:
    """Quarantine first; the lease goes back to the store that granted it."""
    prompt = p.new_prompt(NUM_FAR)
    reply = await p.run_prefill(prompt)
    way = await p.at_decode.way_by(reply.handle)
    late = way.uncallable_gets()
    async with p.reserved(prompt) as (stream, key):
        await stream.generate(key, reply)
        await late.wait_entered()
        if how == "cancel":
            await stream.end(key)
        else:
            await stream.close()
    await p.at_decode.quarantined(NUM_BLOCKS)
    late.settle()
    await p.at_decode.quarantined(0)
    way.restore("get")


@pytest.mark.parametrize("stops", [False, True])
async def test_a_cancel_while_the_other_store_is_being_met(tmp_path: Path, stops: bool) -> None:
    """The lease goes back all the same; a worker that stops meets the store for it."""
    async with pair(tmp_path, has_two_nodes=True) as p:
        prompt = p.new_prompt(NUM_FAR)
        reply = await p.run_prefill(prompt)
        gate: Any = p.at_decode.hold_meeting()
        async with p.reserved(prompt) as (stream, key):
            await stream.generate(key, reply)
            await gate.wait_entered()
            await stream.end(key)
        assert (await p.store_status()).num_leases == 1
        gate.open()
        if stops:
            await p.decode.stop()
            assert (await p.store_status()).num_leases == 0
        else:
            await p.check()
