"""What a prefill worker lends is stored behind: the store has it in the end, and costs the handover
nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstore import errors
from services.prefill import puts_behind
from services.worker.config import WorkerLimits
from tests.harness.direct_pair import DIRECT, FULL, PROMPT, all_back, direct, generate
from tests.harness.handles import blocks_of
from tests.harness.prefill_decode_pair import WAIT_S, Pair
from tests.harness.waiting import Gate, until


def stored(p: Pair, reply: Any) -> list[bool]:
    """Whether each full block of the handle lies in the store."""
    hashes = [block.chain_hash for block in blocks_of(reply.handle.runs[0])]
    return [p.store.node.store.catalog.find(each) is not None for each in hashes]


async def test_the_store_has_the_prompt_behind(tmp_path: Path) -> None:
    """The handle goes out while the put is held, and its blocks stay although decode has read them
    and given the lease back; then the put ends and the store has them."""
    async with direct(tmp_path) as p:
        client = p.prefill.core.connector.client
        gate = Gate(client, "put_blocks")
        answer = await generate(p, PROMPT)
        assert answer.token_ids == p.expected(PROMPT, 8)
        reply, lender = answer.prefill, p.prefill.core.lender
        assert reply is not None and lender is not None
        assert reply.leg.num_blocks_behind == FULL and not reply.leg.not_stored
        await until(lambda: lender.loans.num_leases == 0)
        assert lender.num_lent_blocks == FULL
        assert p.prefill_role.worker.behind.num_writers == 1
        gate.open()
        await all_back(p)
        assert stored(p, reply) == [True] * FULL
        assert not p.prefill_role.worker.behind.not_stored


@pytest.mark.parametrize("is_read", [True, False])
async def test_the_last_puts_wait_for_whoever_reads_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_read: bool
) -> None:
    """A prompt of one chunk: all of its blocks are the last step's."""
    monkeypatch.setattr(puts_behind, "YIELD_S", 1e9 if is_read else 0.01)
    limits = WorkerLimits(
        store_wait_s=WAIT_S, attach_budget_s=5.0, drain_s=0.2, stop_grace_s=0.05, put_budget_s=1e10
    )
    async with direct(tmp_path, limits=limits) as p:
        reply = await p.run_prefill(PROMPT[:6], handover=DIRECT)
        lender = p.prefill.core.lender
        assert lender is not None and reply.leg.num_blocks_behind == 1
        if is_read:
            await until(lambda: p.prefill_role.worker.behind.num_writers == 1)
            assert stored(p, reply) == [False] and lender.loans.num_leases == 1
        else:
            await until(lambda: stored(p, reply) == [True])
            assert lender.loans.num_leases == 1
        lender.release(reply.handle.runs[0].lease_id)
        await until(lambda: stored(p, reply) == [True])


async def test_a_put_behind_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    limits = WorkerLimits(
        store_wait_s=WAIT_S, attach_budget_s=5.0, drain_s=0.2, stop_grace_s=0.05, put_budget_s=0.3
    )
    async with direct(tmp_path, limits=limits) as p:
        gate = Gate(p.prefill.core.connector.client, "put_blocks")
        answer = await generate(p, PROMPT)
        assert answer.token_ids == p.expected(PROMPT, 8)
        await all_back(p)
        gate.open()
        assert p.prefill_role.worker.behind.not_stored == {errors.DEADLINE: FULL}
        assert (await generate(p, PROMPT, name="again")).token_ids == answer.token_ids


async def test_a_store_that_is_away_costs_the_handover_nothing(tmp_path: Path) -> None:
    async with direct(tmp_path) as p:
        client = p.prefill.core.connector.client
        assert client is not None
        await p.kill_store()
        await until(lambda: p.prefill.core.connector.client is None)
        answer = await generate(p, PROMPT)
        assert answer.token_ids == p.expected(PROMPT, 8)
        assert answer.leg.num_tokens_computed == 0 and answer.recomputed == {}
        assert answer.prefill is not None
        (count,) = answer.prefill.leg.not_stored
        assert (count.reason, count.num_blocks) == (errors.STORE_UNAVAILABLE, FULL)
