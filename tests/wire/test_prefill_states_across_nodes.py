"""A prefill request that takes its prefix from another node's store is cancelled, out of time, or
loses that store, in each state: nothing stays held at any node, and the next one is served.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import Quarantine, TransferCancelled
from process.errors import Cancelled, DeadlineExceeded
from services.prefill.job import PrefillState
from services.worker import stores
from tests.harness.gated_engine import prompt_of
from tests.harness.prefill_decode_pair import KEY, WAIT_S, PrefillCall, whole
from tests.harness.prefill_nodes import Nodes, nodes, remote_client
from tests.harness.waiting import Deadlines, Gate, until

PROMPT = prompt_of(42, start=3)
NUM_FILLED = 7

NAMES = {
    "attaching": PrefillState.FETCHING,
    "matching": PrefillState.FETCHING,
    "copying": PrefillState.FETCHING,
    "computing": PrefillState.COMPUTING,
    "storing": PrefillState.STORING,
}
STATES = list(NAMES)


@contextlib.asynccontextmanager
async def held_in(n: Nodes, state: str) -> AsyncIterator[Any]:
    """A call at node 1 whose prefix comes from node 0, and that stays in `state` there. `storing`
    and `computing` come with the policy that leaves the prefix where it is.
    """
    await n.run(n[0], PROMPT[: NUM_FILLED * 4], name="fill", wants_handle=False)
    gates: list[Gate] = []
    if state == "attaching":
        gates.append(Gate(stores, "attach"))
    else:
        client = await remote_client(n[1], n[0])
        if state == "computing":
            n[1].model.hold()
        else:
            method = {"matching": "match", "copying": "get_blocks", "storing": "put_blocks"}[state]
            gates.append(Gate(client, method))
    hints = [n[0].hint(0, NUM_FILLED)]
    call = PrefillCall(n[1].stub, n.request(PROMPT, hints), timeout_s=WAIT_S)
    try:
        for gate in gates:
            await gate.wait_entered()
        await until(lambda: NAMES[state] in n[1].prefills.states.values())
        yield call
    finally:
        n[1].model.release()
        for gate in gates:
            gate.open()
        call.vanish()


def policy_of(state: str) -> dict[str, int]:
    return {"replicate_after_hits": 100 if state in ("computing", "storing") else 0}


async def assert_served(n: Nodes) -> None:
    """Both nodes are as good as new."""
    for number, node in enumerate(n.all):
        reply = await n.run(node, prompt_of(35, start=8 + number), name="after")
        await n.release(reply.handle)
    await n.check()


@pytest.mark.parametrize("state", STATES)
async def test_cancel_in_each_state_leaves_nothing(tmp_path: Path, state: str) -> None:
    async with nodes(tmp_path, **policy_of(state)) as n:
        async with held_in(n, state) as call:
            call.cancel()
            assert isinstance(await call.error(), Cancelled)
            if state != "computing":  # there the abort comes after the step that is held
                await until(lambda: not n[1].prefills.states)
        await n.check()
        await assert_served(n)


@pytest.mark.parametrize("state", STATES)
async def test_the_deadline_ends_it_in_each_state(
    tmp_path: Path, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines = Deadlines(monkeypatch)
    async with nodes(tmp_path, **policy_of(state)) as n:
        async with held_in(n, state) as call:
            deadlines.end_newest(f"prefill {KEY}")
            with pytest.raises(DeadlineExceeded):
                await whole(call)
        await n.check()
        await assert_served(n)


@pytest.mark.parametrize("state", STATES)
async def test_the_other_node_s_store_dies_in_each_state_and_the_answer_still_comes(
    tmp_path: Path, state: str
) -> None:
    async with nodes(tmp_path, **policy_of(state)) as n:
        async with held_in(n, state) as call:
            await n[0].kill_store()
            n[1].model.release()
            for gate in list(Gate.closed):
                gate.open()
            reply = await whole(call)
        assert list(reply.token_ids) == n.model.generate(PROMPT, 1)
        leg = reply.leg
        num_from_store = sum(count.num_tokens for count in leg.from_store)
        assert leg.num_tokens_computed + leg.num_tokens_local + num_from_store == len(PROMPT)
        reasons = {count.reason for count in (*leg.recomputed, *leg.not_stored)}
        assert reasons <= {"store_unavailable", "transport"}
        assert reasons, "it was counted"
        await n.release(reply.handle)
        await n.check()
        await n[0].start_store()
        await assert_served(n)


async def test_a_silent_store_costs_its_budget_and_not_the_request(tmp_path: Path) -> None:
    async with nodes(tmp_path, transfer_budget_s=0.3) as n:
        await n.run(n[0], PROMPT, name="fill", wants_handle=False)
        client = await remote_client(n[1], n[0])

        async def silent(method: Any, request: Any, deadline: Any, **options: Any) -> Any:
            async with deadline.timeout("the store"):
                await asyncio.Event().wait()

        call, client._rpc.call = client._rpc.call, silent  # type: ignore[method-assign]
        reply = await n.run(n[1], PROMPT, [n[0].hint(0, 10)])
        client._rpc.call = call  # type: ignore[method-assign]
        assert {count.reason: count.num_blocks for count in reply.leg.recomputed} == {
            "deadline": 10
        }
        await n.release(reply.handle)
        await n.check()


async def test_a_cancel_while_bytes_come_keeps_their_blocks_out_of_use_until_none_can_come(
    tmp_path: Path,
) -> None:
    """A transfer of another node's store that cannot be called back."""
    async with nodes(tmp_path) as n:
        await n.run(n[0], PROMPT, name="fill", wants_handle=False)
        client = await remote_client(n[1], n[0])
        entered = asyncio.Event()
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def uncallable(lease_id: str, items: Any, deadline: Any, **options: Any) -> Any:
            entered.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError as error:
                block_ids = tuple(block_id for _, block_id in items)
                raise TransferCancelled("under way", Quarantine(block_ids, settled)) from error

        client.get_blocks = uncallable  # type: ignore[method-assign]
        call = PrefillCall(n[1].stub, n.request(PROMPT, [n[0].hint(0, 10)]), timeout_s=WAIT_S)
        async with asyncio.timeout(WAIT_S):
            await entered.wait()
        call.cancel()
        await until(lambda: not n[1].prefills.states)
        await until(lambda: n[1].core.thread.stats.num_quarantined_blocks == 10)
        await until(lambda: n[1].core.thread.stats.num_referenced_blocks == 0)
        await n[1].core.thread.call(lambda engine: engine.check_integrity())
        settled.set_result(None)
        await until(lambda: n[1].core.thread.stats.num_quarantined_blocks == 0)
        await n.check()


@pytest.mark.parametrize("replicate_after_hits", [0, 100])
@pytest.mark.parametrize("where", ["home", "other", "both", "home is gone"])
async def test_a_lease_that_ends_during_the_pull_costs_no_answer(
    tmp_path: Path, where: str, replicate_after_hits: int
) -> None:
    """Renewed too late, or the store ended it: what was copied under it is here, and is stored."""
    async with nodes(tmp_path, num_nodes=3, replicate_after_hits=replicate_after_hits) as n:
        for node, num_blocks in ((n[0], 7), (n[1], 4), (n[2], 10)):
            await n.run(node, PROMPT[: num_blocks * 4], name="fill", wants_handle=False)
            await n.forget(node)
        await remote_client(n[1], n[0])
        last = await remote_client(n[1], n[2])
        match = last.match

        async def meanwhile(*arguments: Any, **options: Any) -> Any:
            matched = await match(*arguments, **options)
            ended = {"other": [n[0]], "both": [n[1], n[0]]}.get(where, [n[1]])
            if where == "home is gone":
                home = n[1].core.connector.client
                assert home is not None
                await n[1].kill_store()
                await until(lambda: home.broken is not None)
            else:
                for node in ended:
                    truth = node.store.node.store
                    truth.release([lease.lease_id for lease in truth.leases], now_s=0.0)
            (job,) = n[1].prefills._jobs.values()
            await job.pins.renew()  # as it does from time to time
            assert len(job.pins.held) == 2 - len(ended)
            return matched

        last.match = meanwhile  # type: ignore[method-assign]
        hints = [n[1].hint(0, 4), n[0].hint(4, 3), n[2].hint(7, 3)]
        reply = await n.run(n[1], PROMPT, hints)
        assert reply.leg.num_tokens_computed == 2 and not reply.leg.not_stored
        assert reply.handle.num_tokens == len(PROMPT)
        await n.release(reply.handle)
        await n.check()
