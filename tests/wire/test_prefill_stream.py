"""The stream between a router and a prefill worker: many prompts on one, cancels and breaks that
touch their own only, and handles that somebody owns at any time.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from process import serving
from process.errors import AlreadyExists, InvalidArgument
from protos import prefill_pb2
from services.router.fakes.prefill import FakePrefill
from services.router.fakes.worker import Context
from services.worker import multiplexed
from tests.harness.gated_engine import BLOCK_SIZE, prompt_of
from tests.harness.prefill_decode_pair import KEY, WAIT_S, Pair, PrefillCall, pair
from tests.harness.prefill_nodes import Nodes, SteppedModel, nodes
from tests.harness.router_bench import BOUND_S, SHORT_WAITS, request, rest_of, running
from tests.harness.waiting import until

PROMPT = prompt_of(30, start=3)


class Stream:
    """A router's end: commands out, events in as messages."""

    def __init__(self, stub: Any) -> None:
        self.call = stub.Stream()

    async def send(self, key: int, **command: Any) -> None:
        await self.call.write(prefill_pb2.PrefillCommand(key=key, **command))

    async def read(self) -> list[prefill_pb2.PrefillEvent]:
        """One message."""
        async with asyncio.timeout(WAIT_S):
            message = await self.call.read()
        assert isinstance(message, prefill_pb2.PrefillEvents)
        return list(message.events)

    async def until_over(self, keys: set[int]) -> dict[int, list[prefill_pb2.PrefillEvent]]:
        """All that comes until each of `keys` has had its last word."""
        events: dict[int, list[prefill_pb2.PrefillEvent]] = {key: [] for key in keys}
        left = set(keys)
        while left:
            for event in await self.read():
                events[event.key].append(event)
                if event.HasField("failed") or event.reply.HasField("leg"):
                    left.remove(event.key)
        return events


def _ask(p: Pair, number: int, **options: Any) -> prefill_pb2.PrefillRequest:
    return p.prefill_request(prompt_of(20 + number, start=number), name=f"r{number}", **options)


async def test_many_prompts_share_one_stream(tmp_path: Path) -> None:
    """Each has its own answer; what one step gave comes as one message."""
    async with pair(tmp_path) as p:
        stream = Stream(p.prefill_stub)
        p.prefill_model.hold()
        for number in range(8):
            await stream.send(number, prefill=_ask(p, number, wants_handle=False))
        await until(lambda: len(p.prefill_role.worker.states) == 8)
        p.prefill_model.release()
        events = await stream.until_over(set(range(8)))
        for number in range(8):
            prompt = prompt_of(20 + number, start=number)
            first = events[number][0].reply
            assert list(first.token_ids) == p.expected(prompt, 1)
            assert events[number][-1].reply.leg.num_tokens_computed == len(prompt)
        await stream.call.done_writing()
        assert await stream.call.read() is grpc.aio.EOF
        assert await stream.call.code() is grpc.StatusCode.OK
        await p.check()


async def test_a_cancel_ends_its_own_prompt_only(tmp_path: Path) -> None:
    async with pair(tmp_path) as p:
        stream = Stream(p.prefill_stub)
        p.prefill_model.hold()
        for number in (1, 2, 3):
            await stream.send(number, prefill=_ask(p, number, wants_handle=False))
        await until(lambda: len(p.prefill_role.worker.states) == 3)
        await stream.send(2, cancel={})
        (event,) = await stream.read()
        assert event.key == 2 and event.failed.code == grpc.StatusCode.CANCELLED.value[0]
        await stream.send(2, cancel={})  # over: nothing
        await stream.send(77, cancel={})  # never known: nothing
        p.prefill_model.release()
        events = await stream.until_over({1, 3})
        for number in (1, 3):
            expected = p.expected(prompt_of(20 + number, start=number), 1)
            assert list(events[number][0].reply.token_ids) == expected
        stream.call.cancel()
        await p.check()


async def test_a_stream_that_breaks_cancels_all_of_its_prompts_and_no_others(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path) as p:
        stream, other = Stream(p.prefill_stub), Stream(p.prefill_stub)
        p.prefill_model.hold()
        for number in range(4):
            await stream.send(number, prefill=_ask(p, number))
        await other.send(9, prefill=_ask(p, 9, wants_handle=False))
        await until(lambda: len(p.prefill_role.worker.states) == 5)
        stream.call.cancel()
        await until(lambda: len(p.prefill_role.worker.states) == 1)
        p.prefill_model.release()
        assert list((await other.until_over({9}))[9][0].reply.token_ids)
        other.call.cancel()
        await p.check()


async def test_a_wrong_command_is_told_under_its_key_and_the_stream_goes_on(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path) as p:
        stream = Stream(p.prefill_stub)
        p.prefill_model.hold()
        await stream.send(1, prefill=_ask(p, 1, wants_handle=False))
        await until(lambda: p.prefill_role.worker.states)
        without_salt = _ask(p, 3)
        without_salt.ClearField("tenant_salt")
        for key, command, kind in (
            (2, {}, InvalidArgument),
            (3, {"prefill": without_salt}, InvalidArgument),
            (1, {"prefill": _ask(p, 4)}, AlreadyExists),
        ):
            await stream.send(key, **command)
            (event,) = await stream.read()
            assert event.key == key
            error = serving.error_of_code(event.failed.code, event.failed.message)
            assert isinstance(error, kind), error
        p.prefill_model.release()
        assert (await stream.until_over({1}))[1][-1].reply.HasField("leg")
        stream.call.cancel()
        await p.check()


async def test_an_account_that_was_not_written_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router is gone while its messages wait: nobody heard of the handle, so its lease ends
    now, not when it would lapse."""
    written, real = asyncio.Event(), multiplexed.serve

    async def stuck(
        commands: Any, obey: Any, session: Any, outbox: Any, write: Any, *others: Any
    ) -> None:
        async def never(events: Any) -> None:
            if any(event.reply.HasField("leg") for event in events):
                written.set()
                await asyncio.Event().wait()
            await write(events)

        await real(commands, obey, session, outbox, never, *others)

    monkeypatch.setattr("services.prefill.server.serve", stuck)
    async with pair(tmp_path) as p:
        # The lease would live longer than the check below waits.
        call = PrefillCall(p.prefill_stub, p.prefill_request(PROMPT), timeout_s=6 * WAIT_S)
        async with asyncio.timeout(WAIT_S):
            await written.wait()
        assert (await p.store_status()).num_leases == 1
        call.vanish()
        await p.check()


def _is_stored(n: Nodes, prompt: Any, num_blocks: int) -> bool:
    return n[0].holds(n.hashes(n[0], prompt)) == num_blocks


async def test_of_partial_handles_that_wait_only_the_newest_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router that does not read holds one of each prompt, however much is computed."""
    prompt, real = prompt_of(90, start=3), multiplexed.serve
    batches: list[list[int]] = []
    outboxes: list[Any] = []
    may_write, is_waiting = asyncio.Event(), asyncio.Event()

    async def slow(
        commands: Any, obey: Any, session: Any, outbox: Any, write: Any, *others: Any
    ) -> None:
        async def gated(events: Any) -> None:
            batches.append([event.reply.handle.num_tokens for event in events])
            is_waiting.set()
            await may_write.wait()
            await write(events)

        outboxes.append(outbox)
        await real(commands, obey, session, outbox, gated, *others)

    monkeypatch.setattr("services.prefill.server.serve", slow)
    async with nodes(tmp_path, num_nodes=1, make_model=SteppedModel) as n:
        node = n[0]
        call = PrefillCall(node.stub, n.request(prompt), timeout_s=WAIT_S)
        node.model.allow()
        async with asyncio.timeout(WAIT_S):
            await is_waiting.wait()
        for num_steps in range(2, 6):
            node.model.allow()
            num_blocks = 4 * num_steps
            await until(
                lambda num_blocks=num_blocks: node.holds(n.hashes(node, prompt)) == num_blocks
            )
        ((job,), (outbox,)) = node.prefills._jobs.values(), outboxes
        # The last one is made behind its put, or not at all: one for each step.
        await until(lambda: job.early._num_stored == 20 and not job.early.is_due)
        (waiting,) = outbox._events
        assert waiting.reply.handle.num_tokens > 4 * BLOCK_SIZE
        may_write.set()
        node.model.release()
        last = [message async for message in call][-1]
        assert batches[0] == [4 * BLOCK_SIZE]
        assert len([tokens for batch in batches for tokens in batch if tokens]) <= 4
        await n.release(last.handle)
        await n.check()


# ---- the router's end


class _AccountAtCancel(FakePrefill):
    """Whose account crosses the cancel: it says its last word when it hears of it."""

    async def _live(self, key: int, asked: Any, events: Any) -> None:
        await super()._live(key, asked, events)
        word = events._queue[-1]
        assert word.failed.code == grpc.StatusCode.CANCELLED.value[0]
        word.reply.CopyFrom(self._last(asked, is_over=False))


async def test_a_handle_that_comes_after_the_cancel_is_given_back() -> None:
    async with running(num_prefill=0) as bench:
        released: list[Any] = []
        bench.router._prefills._give_back = released.append
        worker = _AccountAtCancel("p0", bench.model)
        await bench.add(worker)
        worker.account_gate.close()
        call = bench.stub.Generate(request(sampling={"max_tokens": 4}), timeout=BOUND_S)
        await worker.account_gate.reached.wait()
        call.cancel()
        await until(lambda: worker.num_cancelled == 1)
        await until(lambda: bench.router._prefills.num_calls == 0)
        (handle,) = released
        assert handle.opened().num_tokens > 0


async def test_prompts_of_a_stream_that_ends_are_asked_again_once_the_worker_is_met_again() -> None:
    class _Ending(FakePrefill):
        ends = asyncio.Event()
        num_streams = 0

        async def Stream(self, commands: Any, context: Context) -> Any:
            self.num_streams += 1
            inner = super().Stream(commands, context)
            reading = asyncio.ensure_future(anext(inner))
            while True:
                ending = asyncio.create_task(self.ends.wait())
                done, _ = await asyncio.wait({reading, ending}, return_when=asyncio.FIRST_COMPLETED)
                ending.cancel()
                if reading not in done:
                    self.ends.clear()  # this stream, not the one that it is met again by
                    reading.cancel()
                    await asyncio.gather(reading, return_exceptions=True)
                    return
                yield reading.result()
                reading = asyncio.ensure_future(anext(inner))

    async with running(num_prefill=0) as bench:
        worker = _Ending("p0", bench.model)
        await bench.add(worker)
        worker.gate.close()
        call = bench.stub.Generate(request(sampling={"max_tokens": 2}), timeout=BOUND_S)
        await worker.gate.reached.wait()
        worker.ends.set()
        await until(lambda: not worker.ends.is_set())
        worker.gate.open()
        messages = await rest_of(call)
        assert messages[-1].usage.num_output_tokens == 2
        assert worker.num_streams == 2


async def test_a_message_that_cannot_be_read_ends_the_stream_not_the_router() -> None:
    class _Garbling(FakePrefill):
        garbles = True

        async def Stream(self, commands: Any, context: Context) -> Any:
            async for message in super().Stream(commands, context):
                if self.garbles:
                    message.events.add(key=KEY)  # without news
                yield message

    async with running(num_prefill=0, times=SHORT_WAITS) as bench:
        worker = _Garbling("p0", bench.model)
        await bench.add(worker)
        call = bench.stub.Generate(request(sampling={"max_tokens": 2}), timeout=BOUND_S)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest_of(call)
        assert "cannot be read" in str(serving.error_from_rpc(caught.value))
        worker.garbles = False
        await until(lambda: bench.router._prefills.is_up("p0"))
        assert await bench.generate(request(sampling={"max_tokens": 2}))


async def test_a_worker_that_refuses_connections_is_known_at_once() -> None:
    """Not after the whole time for one attempt: the client may have another worker to go to."""
    async with running(num_prefill=2, times={**SHORT_WAITS, "connect_timeout_s": 60.0}) as bench:
        for worker in bench.prefills:
            await worker.stop()
            await until(lambda worker=worker: not bench.router._prefills.is_up(worker.worker_id))
        call = bench.stub.Generate(request(sampling={"max_tokens": 2}), timeout=2 * BOUND_S)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(rest_of(call), BOUND_S)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
