"""A store that is asked to stop: what has leases on it is served, nothing new is stored, and it
ends when nobody reads any more, or when its time is over."""

from __future__ import annotations

import asyncio
from pathlib import Path

from process.deadline import Deadline
from tests.harness.decode_movers import going_on, hold_at, movers, release_when_taken_out
from tests.harness.gated_engine import GatedModel, prompt_of
from tests.harness.prefill_decode_pair import WAIT_S, Sample
from tests.harness.waiting import until

PROMPT = prompt_of(30, start=3)


async def test_a_moved_stream_is_fetched_from_a_store_that_drains(tmp_path: Path) -> None:
    async with movers(tmp_path) as m:
        node, sample = m.store.node, Sample()
        model = m.engine(0)._model
        hold_at(model, 5)
        key = await m.begin(0, PROMPT, max_tokens=40)
        await until(model.is_held.is_set)
        release_when_taken_out(m, 0)
        m.leave(0)
        while not (event := await m.streams[0].next(key)).HasField("moved"):
            sample.add(event.tokens)
        draining = asyncio.create_task(node.drain(Deadline.after(20.0)))
        await until(lambda: node.is_draining)
        client = m.workers[1].core.connector.client
        put = await client.put_blocks(
            None, b"", [(bytes(16), 0)], ("t", 1, 2), 5.0, Deadline.after(WAIT_S), num_tokens=4
        )
        assert (put.refs, put.tail, put.not_stored) == ((), None, 2)
        await client.release([put.lease_id], deadline=Deadline.after(WAIT_S))
        await asyncio.sleep(0.1)
        assert not draining.done(), "the handle's lease lives"
        stream = m.streams[1]
        key = await stream.reserve(m.reserve(PROMPT, "r", max_tokens=40))
        await stream.next(key)
        await stream.generate_from(key, going_on(event.moved, [sample]))
        assert await draining
        while not (event := await stream.next(key)).HasField("finished"):
            sample.add(event.tokens)
        sample.add(event.finished)
        assert sample.token_ids == GatedModel().generate(PROMPT, 40)
        assert event.finished.leg.num_tokens_computed == 0 and not event.finished.leg.recomputed


async def test_a_lease_that_nobody_gives_back_does_not_keep_it(tmp_path: Path) -> None:
    async with movers(tmp_path) as m:
        assert await m.store.node.drain(Deadline.after(WAIT_S))
        m.store.node.store.writes.is_closed = False
        client = m.workers[0].core.connector.client
        key = await m.begin(0, PROMPT, max_tokens=4)
        await m.streams[0].collect(key)
        await m.workers[0].core.connector.settle()
        hashes = [ref for ref in m.store.node.present()]
        await client.match(hashes[:1], pin=True, ttl_s=20.0, deadline=Deadline.after(WAIT_S))
        assert not await m.store.node.drain(Deadline.after(0.2))
