"""Partial handles: what prefill has stored can be fetched while it still runs; its leases stay
prefill's, whatever comes of the request.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from kvstore.block import Block
from kvstore.client import StoreClient
from kvstore.transport.base import BlockMemory
from process.deadline import Deadline
from process.errors import Cancelled, DeadlineExceeded, Unavailable
from protos import common_pb2, prefill_pb2
from services.worker import handle as handles
from tests.harness.gated_engine import BLOCK_SIZE, prompt_of
from tests.harness.handles import blocks_of
from tests.harness.prefill_decode_pair import KEY, WAIT_S, PrefillCall
from tests.harness.prefill_nodes import Node, Nodes, SteppedModel, nodes
from tests.harness.waiting import Deadlines, until

PROMPT = prompt_of(90, start=3)  # six chunks of 16 tokens
NUM_FULL = 22


def refs_of(handle: common_pb2.KvHandle) -> list[Block]:
    """All full blocks, without a gap."""
    refs: list[Block] = []
    for run in handle.runs:
        assert run.first_block == len(refs)
        refs += blocks_of(run)
    return refs


async def rest(call: Any) -> list[prefill_pb2.PrefillReply]:
    """What comes besides further partial handles."""
    messages = []
    while isinstance(message := await call.read(), prefill_pb2.PrefillReply):
        if not message.handle.is_partial:
            messages.append(message)
    return messages


class Reader:
    """As a decode worker: verifies handles, and fetches under their lease into its own memory."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def __aenter__(self) -> Reader:
        block_bytes = self._node.core.layout.block_bytes
        self.memory = BlockMemory.of(np.zeros((64, block_bytes), np.uint8))
        self._client = await StoreClient.attach(
            self._node.settings.listen,
            worker_id="decode-0",
            worker_incarnation=bytes(16),
            fingerprint=self._node.core.model.fingerprint,
            memory=self.memory,
            transport="shm",
            timeout_s=WAIT_S,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def fetch(self, message: common_pb2.KvHandle) -> int:
        """Returns: blocks that came and verified."""
        core = self._node.core
        handle = handles.from_proto(message, core.handle_keys)
        handles.check(
            handle,
            request_id="r",
            tenant="t",
            adapter="",
            model_fingerprint=core.model.fingerprint,
            block_size=BLOCK_SIZE,
        )
        (run,) = handle.runs
        got = await self._client.get_blocks(
            run.lease_id,
            [(block, index) for index, block in enumerate(run.blocks)],
            Deadline.after(WAIT_S),
            incarnation=run.store_incarnation,
        )
        return len(run.blocks) - len(got.failed)


async def test_what_is_stored_is_told_while_prefill_runs(tmp_path: Path) -> None:
    """After each step one partial handle: it can be fetched at once, says more than the one before,
    and is a prefix of the last. None comes after the first token.
    """
    async with nodes(tmp_path, num_nodes=1, make_model=SteppedModel) as n, Reader(n[0]) as reader:
        node = n[0]
        call = PrefillCall(node.stub, n.request(PROMPT), timeout_s=WAIT_S)
        partials: list[common_pb2.KvHandle] = []
        for num_steps in range(1, 6):
            node.model.allow()
            message = await call.read()
            assert message == prefill_pb2.PrefillReply(handle=message.handle), "only a handle"
            partial = message.handle
            assert partial.is_partial and not partial.HasField("tail")
            assert len(refs_of(partial)) == 4 * num_steps
            assert partial.num_tokens == 4 * num_steps * BLOCK_SIZE
            assert await reader.fetch(partial) == 4 * num_steps
            partials.append(partial)
        node.model.allow()
        first, account = await call.read(), await call.read()
        assert list(first.token_ids) == n.model.generate(PROMPT, 1)
        whole = account.handle
        assert len(refs_of(whole)) == NUM_FULL and not whole.is_partial
        for partial in partials:
            assert refs_of(whole)[: len(refs_of(partial))] == refs_of(partial)
            assert [run.lease_id for run in partial.runs] == [whole.runs[0].lease_id]
        assert len({handle.nonce for handle in (*partials, whole)}) == 6
        assert await call.read() is grpc.aio.EOF
        assert (await node.store_status()).num_leases == 1  # the whole handle's
        await n.release(whole)
        await n.check()


async def test_what_the_store_had_is_told_before_the_first_step(tmp_path: Path) -> None:
    async with nodes(tmp_path, num_nodes=1, make_model=SteppedModel) as n:
        node = n[0]
        for _ in range(4):
            node.model.allow()
        await n.run(node, PROMPT[:50], name="fill", wants_handle=False)
        call = PrefillCall(node.stub, n.request(PROMPT), timeout_s=WAIT_S)
        message = await call.read()
        assert len(refs_of(message.handle)) == 12
        node.model.release()
        _, account = await rest(call)
        await n.release(account.handle)
        await n.check()


async def test_who_wants_no_handle_is_told_of_none(tmp_path: Path) -> None:
    async with nodes(tmp_path, num_nodes=1, make_model=SteppedModel) as n:
        partials: list[common_pb2.KvHandle] = []
        running = asyncio.create_task(n.run(n[0], PROMPT, partials=partials, wants_handle=False))
        for num_steps in range(1, 7):
            n[0].model.allow()
            num_stored = min(4 * num_steps, NUM_FULL)
            await until(lambda: n[0].holds(n.hashes(n[0], PROMPT)) == num_stored)  # noqa: B023
        await running
        assert not partials
        await n.check()


async def held_after_a_partial(n: Nodes) -> tuple[Any, common_pb2.KvHandle]:
    """A call that has told of its first chunk and computes no more."""
    call = PrefillCall(n[0].stub, n.request(PROMPT), timeout_s=WAIT_S)
    n[0].model.allow()
    message = await call.read()
    return call, message.handle


async def test_a_cancel_takes_the_leases_of_a_partial_handle_along(tmp_path: Path) -> None:
    async with nodes(tmp_path, num_nodes=1, make_model=SteppedModel) as n:
        call, partial = await held_after_a_partial(n)
        leases = n[0].store.node.store.leases
        assert leases.find(partial.runs[0].lease_id) is not None
        call.cancel()
        await until(lambda: leases.find(partial.runs[0].lease_id) is None)
        n[0].model.release()
        await n.check()


async def test_the_store_dies_after_a_partial_handle_and_the_answer_still_comes(
    tmp_path: Path,
) -> None:
    async with nodes(tmp_path, num_nodes=1, make_model=SteppedModel) as n:
        call, _ = await held_after_a_partial(n)
        client = n[0].core.connector.client
        assert client is not None
        await n[0].kill_store()
        await until(lambda: client.broken is not None)
        n[0].model.release()
        first, account = await rest(call)
        assert list(first.token_ids) == n.model.generate(PROMPT, 1)
        assert {count.reason for count in account.leg.not_stored} == {"store_unavailable"}
        await n.check()


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_the_end_while_a_partial_handle_is_on_its_way(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router that does not read does not hold anything for ever."""
    entered = asyncio.Event()

    async def stuck(self: object, handle: handles.Handle) -> None:
        entered.set()
        await asyncio.Event().wait()

    deadlines = Deadlines(monkeypatch)
    monkeypatch.setattr("services.prefill.server._Caller.show_partial", stuck)
    async with nodes(tmp_path, num_nodes=1, make_model=SteppedModel) as n:
        n[0].model.allow()
        call = PrefillCall(n[0].stub, n.request(PROMPT), timeout_s=WAIT_S)
        async with asyncio.timeout(WAIT_S):
            await entered.wait()
        if how == "cancel":
            call.cancel()
        else:
            deadlines.end_newest(f"prefill {KEY}")
        with pytest.raises(Cancelled if how == "cancel" else DeadlineExceeded):
            await rest(call)
        n[0].model.release()
        await n.check()


async def test_a_caller_that_is_gone_at_a_partial_handle_is_no_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone(self: object, handle: handles.Handle) -> None:
        raise Unavailable("the connection is gone")

    monkeypatch.setattr("services.prefill.server._Caller.show_partial", gone)
    async with nodes(tmp_path, num_nodes=1, make_model=SteppedModel) as n:
        n[0].model.allow()
        with pytest.raises(Unavailable):
            await n.run(n[0], PROMPT)
        n[0].model.release()
        await n.check()


async def test_a_handle_that_is_not_delivered_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every store that it names."""

    def broken(answer: object, core: object) -> None:
        raise Unavailable("the connection is gone")

    async with nodes(tmp_path, replicate_after_hits=100) as n:
        await n.run(n[1], PROMPT[:40], name="fill", wants_handle=False)
        await n.run(n[0], PROMPT[:20], name="fill", wants_handle=False)
        monkeypatch.setattr("services.prefill.server._last_message", broken)
        with pytest.raises(Unavailable):
            await n.run(n[0], PROMPT, [n[0].hint(0, 5), n[1].hint(5, 5)])
        await n.check()


async def test_a_partial_handle_over_two_stores(tmp_path: Path) -> None:
    """A prefix that is not copied home is told of where it lies, before the first step."""
    async with nodes(tmp_path, replicate_after_hits=100, make_model=SteppedModel) as n:
        n[1].model.release()
        for _ in range(2):
            n[0].model.allow()
        await n.run(n[1], PROMPT[:40], name="fill", wants_handle=False)
        await n.run(n[0], PROMPT[:20], name="fill", wants_handle=False)
        hints = [n[0].hint(0, 5), n[1].hint(5, 5)]
        call = PrefillCall(n[0].stub, n.request(PROMPT, hints), timeout_s=WAIT_S)
        message = await call.read()
        shape = [(run.node_id, run.first_block, len(blocks_of(run))) for run in message.handle.runs]
        assert shape == [("store-0", 0, 5), ("store-1", 5, 5)]
        call.cancel()
        n[0].model.release()
        await n.check()
