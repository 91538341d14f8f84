"""Streams whose decode worker leaves or dies: they go on at another one, and their client sees at
most a gap. A whole router over fake workers."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from process.rpc_errors import FailedPrecondition, NoCapacity, Unavailable
from tests.harness.router_bench import (
    SHORT_WAITS,
    TOKENIZER,
    Bench,
    FakeDecode,
    FakePrefill,
    Looks,
    code_of,
    failure,
    fake_model,
    ids_of,
    lease_store,
    request,
    running,
)
from tests.harness.waiting import Deadlines, until

pytestmark = pytest.mark.oracle

PROMPT = TOKENIZER.encode("hello")
SEED = 5


def _expected(bench: Bench, num_tokens: int, index: int = 0) -> list[int]:
    return bench.expected_ids(PROMPT, SEED, num_tokens, index)


def _asked(max_tokens: int = 12, **sampling: Any) -> Any:
    return request(sampling={"max_tokens": max_tokens, "seed": SEED, **sampling})


def _legs(messages: Sequence[Any]) -> list[tuple[str, str]]:
    (account,) = [m.provenance for m in messages if m.HasField("provenance")]
    return [(leg.worker_id, leg.ended_by) for leg in account.legs]


async def _leave(worker: FakeDecode) -> None:
    worker.move_all()


async def _leave_without(worker: FakeDecode) -> None:
    worker.move_all(with_handles=False)


async def _die(worker: FakeDecode) -> None:
    await worker.stop()


Goes = Callable[[FakeDecode], Awaitable[None]]
GOES = (_leave, _leave_without, _die)


def _pause(bench: Bench, at: int) -> None:
    for worker in bench.decodes:
        worker.pause_at = at


async def _paused(bench: Bench) -> FakeDecode:
    """The worker that has a request and draws no more of it."""
    await until(lambda: any(map(_is_paused, bench.decodes)))
    return next(filter(_is_paused, bench.decodes))


def _is_paused(worker: FakeDecode) -> bool:
    gate = worker.token_gate
    is_there = worker.is_alive and worker.num_generating > 0
    return is_there and gate.reached.is_set() and not gate.is_open


async def _begun(bench: Bench, asked: Any, at: int) -> tuple[asyncio.Task[Any], FakeDecode]:
    """A request, and its worker once a sample has `at` tokens."""
    _pause(bench, at)
    generating = asyncio.create_task(bench.generate(asked))
    return generating, await _paused(bench)


async def _moved(
    bench: Bench, asked: Any, at: int, goes: Goes, *, num_samples_cancelled: int = 0
) -> list[Any]:
    """All messages of `asked`, whose worker goes when a sample has `at` tokens and the router has
    ended so many samples."""
    generating, worker = await _begun(bench, asked, at)
    await until(lambda: worker.num_samples_cancelled >= num_samples_cancelled)
    # What a dead worker had sent may be lost on the way: what is told again is known only then.
    await until(lambda: _has_heard(bench, worker))
    _pause(bench, -1)
    await goes(worker)
    return await generating


def _check_text(messages: Sequence[Any], token_ids: list[int]) -> None:
    """No token is lost or comes twice, in numbers, text and account."""
    assert ids_of(messages) == token_ids
    assert "".join(message.text for message in messages) == TOKENIZER.decode(token_ids)
    assert messages[-1].usage.num_output_tokens == len(token_ids)


def _has_heard(bench: Bench, worker: FakeDecode) -> bool:
    """Whether the router knows all tokens that `worker` has drawn."""
    return all(bench.probe.num_heard(index) == num for index, num in worker.num_drawn.items())


def _is_moving(bench: Bench) -> bool:
    return any("moved" in state for state in bench.probe.states)


async def test_a_worker_that_leaves_hands_its_stream_to_another() -> None:
    async with running(num_decode=2) as bench:
        messages = await _moved(bench, _asked(), 5, _leave)
        _check_text(messages, _expected(bench, 12))
        old, new = sorted(bench.decodes, key=lambda worker: not worker.is_draining)
        (moved,) = old.moved
        (told,) = new.generated
        assert told.handle == moved.handle
        assert told.handle.num_tokens == len(PROMPT) + 5 - 1
        assert list(told.output_token_ids) == _expected(bench, 5)
        assert not told.computes_prompt
        assert len(bench.prefill.requests) == 1
        assert _legs(messages) == [("p0", ""), (old.worker_id, "moved"), (new.worker_id, "")]
        times = {entry.stage: entry.seconds for entry in messages[-1].times}
        assert times["move"] > 0 and times["handover"] >= 0


async def test_a_stream_moves_again_and_again() -> None:
    async with running(num_decode=4) as bench:
        _pause(bench, 3)
        generating = asyncio.create_task(bench.generate(_asked(20)))
        for at in (6, 9, 12):
            worker = await _paused(bench)
            _pause(bench, at)
            worker.move_all()
        (await _paused(bench)).token_gate.open()
        messages = await generating
        assert ids_of(messages) == _expected(bench, 20)
        legs = _legs(messages)
        assert [ended_by for _, ended_by in legs] == ["", "moved", "moved", "moved", ""]
        assert len({worker_id for worker_id, _ in legs}) == 5
        assert len(bench.prefill.requests) == 1


@pytest.mark.parametrize("goes", [_leave_without, _die])
async def test_without_a_handle_a_prefill_worker_goes_on_first(goes: Goes) -> None:
    async with running(num_decode=2) as bench:
        messages = await _moved(bench, _asked(), 5, goes)
        _check_text(messages, _expected(bench, 12))
        first, again = bench.prefill.requests
        assert not first.output_token_ids
        assert list(again.output_token_ids) == _expected(bench, 5)
        last_id, _ = _legs(messages)[-1]
        (told,) = next(d for d in bench.decodes if d.worker_id == last_id).generated
        assert told.HasField("handle")
        assert list(told.output_token_ids) == _expected(bench, 6)
        why = "moved" if goes is _leave_without else "worker_lost"
        assert [ended_by for _, ended_by in _legs(messages)] == ["", why, "", ""]
        (recomputed,) = messages[-1].provenance.legs[2].recomputed
        assert (recomputed.reason, recomputed.num_blocks) == (why, 1)


def _unix_ms(left_s: float) -> int:
    return int((time.time() + left_s) * 1000)


LONG = "abcdefghijkl" * 10


@pytest.mark.parametrize("what", ["lapsed", "short", "empty"])
async def test_a_handle_that_leaves_much_to_compute_is_not_used(what: str) -> None:
    """A prefill worker computes the rest, as of a new request; the leases are given back."""
    fields = {
        "lapsed": {"deadline_unix_ms": _unix_ms(-1.0)},
        "short": {"num_tokens": 80, "block_size": 16, "deadline_unix_ms": _unix_ms(60.0)},
        "empty": {"num_tokens": 0, "block_size": 16},
    }[what]

    async def leave(worker: FakeDecode) -> None:
        worker.store_address = store.address
        worker.move_all(**fields)

    async with lease_store() as store:
        async with running(num_decode=2, short_prefill_tokens=30) as bench:
            asked = request(text=LONG, sampling={"max_tokens": 12, "seed": SEED})
            messages = await _moved(bench, asked, 5, leave)
            assert len(ids_of(messages)) == 12
            _, again = bench.prefill.requests
            assert list(again.output_token_ids) == ids_of(messages)[:5]
            last_id, _ = _legs(messages)[-1]
            (told,) = next(d for d in bench.decodes if d.worker_id == last_id).generated
            assert told.handle.num_tokens == len(TOKENIZER.encode(LONG)) + 5
            assert [ended_by for _, ended_by in _legs(messages)] == ["", "moved", "", ""]
            (recomputed,) = messages[-1].provenance.legs[2].recomputed
            assert recomputed.reason == "moved"
            await until(lambda: "lease-moved" in store.released)


async def test_a_handle_that_leaves_little_to_compute_is_used() -> None:
    async def leave(worker: FakeDecode) -> None:
        worker.move_all(num_tokens=100, block_size=16, deadline_unix_ms=_unix_ms(60.0))

    async with running(num_decode=2, short_prefill_tokens=30) as bench:
        asked = request(text=LONG, sampling={"max_tokens": 12, "seed": SEED})
        messages = await _moved(bench, asked, 5, leave)
        assert len(ids_of(messages)) == 12 and len(bench.prefill.requests) == 1


async def test_a_handle_that_lapses_while_a_worker_is_looked_for_is_not_used() -> None:
    async with running(num_decode=2) as bench:
        generating, worker = await _begun(bench, _asked(), 4)
        (other,) = (d for d in bench.decodes if d is not worker)
        other.error = NoCapacity("full", retry_after_s=1.0)
        deadline_unix_ms = _unix_ms(0.5)
        worker.move_all(deadline_unix_ms=deadline_unix_ms)
        await until(lambda: other.num_refused >= 2 and _unix_ms(0.0) > deadline_unix_ms)
        other.error, other.pause_at = None, -1
        messages = await generating
        assert ids_of(messages) == _expected(bench, 12)
        assert len(bench.prefill.requests) == 2
        (told,) = other.generated
        assert list(told.output_token_ids) == _expected(bench, 5)


async def test_a_worker_that_lacks_something_is_not_the_end() -> None:
    """Its adapter was unloaded between the reservation and the start."""
    async with running(num_decode=2) as bench:
        generating, worker = await _begun(bench, _asked(), 5)
        _pause(bench, -1)
        worker.error = FailedPrecondition("adapter: it was unloaded")
        worker.fail_all()
        messages = await generating
        assert ids_of(messages) == _expected(bench, 12)
        assert [ended_by for _, ended_by in _legs(messages)] == ["", "worker_lost", "", ""]


async def test_what_no_worker_has_is_the_end_and_stays_a_precondition() -> None:
    """Each is asked once more, not until the time for failover is over."""
    async with running(num_decode=2) as bench:
        generating, worker = await _begun(bench, _asked(), 5)
        for each in bench.decodes:
            each.error = FailedPrecondition("adapter: it was unloaded")
        worker.fail_all()
        code, error = await failure(generating)
        assert code is grpc.StatusCode.FAILED_PRECONDITION and "no other worker took over: " in str(
            error
        )
        assert [each.num_refused for each in bench.decodes] == [1, 1]


@pytest.mark.parametrize("goes", GOES)
async def test_samples_go_on_from_what_was_told_whatever_is_drawn_again(goes: Goes) -> None:
    """Kernels that depend on the batch: the second prefill draws other first tokens."""
    async with running(num_decode=2) as bench:

        async def goes_otherwise(worker: FakeDecode) -> None:
            other = "".join(TOKENIZER.decode(_expected(bench, 1, index)) for index in range(3))
            letters = tuple(i for i in bench.model.alphabet if TOKENIZER.decode([i]) not in other)
            bench.prefill.model = replace(bench.prefill.model, alphabet=letters)
            await goes(worker)

        messages = await _moved(bench, _asked(20, n=3), 10, goes_otherwise)
        assert len(bench.prefill.requests) == 2
        for index in range(3):
            assert ids_of(messages, index) == _expected(bench, 20, index)
        ends = [m.sample_index for m in messages if m.finish_reason]
        assert sorted(ends) == [0, 1, 2]


async def test_wherever_it_happens_no_token_is_lost_or_comes_twice(
    seed: int, scale: Callable[[int], int]
) -> None:
    rng = random.Random(seed)
    for _ in range(scale(200)):
        num_tokens = rng.randint(3, 30)
        n = rng.choice([1, 1, 3])
        eos_at = rng.choice([None, rng.randint(2, 30)])
        async with running(num_decode=3, model=fake_model(eos_at=eos_at)) as bench:
            asked = _asked(num_tokens, n=n, logprobs=1)
            last = num_tokens if eos_at is None else min(num_tokens, eos_at + 1)
            points = sorted(rng.sample(range(1, 31), 2))
            _pause(bench, points[0])
            generating = asyncio.create_task(bench.generate(asked))
            for at, then in ((points[0], points[1]), (points[1], -1)):
                if at >= last:
                    break
                worker = await _paused(bench)
                _pause(bench, then)
                await rng.choice(GOES)(worker)
            _pause(bench, -1)
            for worker in bench.decodes:
                worker.token_gate.open()
            messages = await generating
            for index in range(n):
                shown = _expected(bench, last, index)
                assert ids_of(messages, index) == shown, (points, num_tokens, eos_at)
                probs = [
                    entry.chosen.token_id
                    for message in messages
                    if message.sample_index == index
                    for entry in message.logprobs
                ]
                assert probs == shown
                ends = [m for m in messages if m.sample_index == index and m.finish_reason]
                assert len(ends) == 1 and ends[0].usage.num_output_tokens == last


@pytest.mark.parametrize("goes", GOES)
async def test_held_back_text_and_a_stop_string_across_the_move(goes: Goes) -> None:
    async with running(num_decode=2) as bench:
        ids = _expected(bench, 12)
        text = TOKENIZER.decode(ids)
        stop = text[3:8]
        assert text.index(stop) == 3
        messages = await _moved(bench, _asked(stop=[stop]), 6, goes)
        assert "".join(m.text for m in messages) == text[:3]
        assert messages[-1].stop_string == stop
        assert ids_of(messages) == ids[:8]


@pytest.mark.parametrize("goes", GOES)
async def test_samples_that_ended_before_are_not_ended_twice(goes: Goes) -> None:
    async with running(num_decode=2) as bench:
        texts = [TOKENIZER.decode(_expected(bench, 20, index)) for index in range(3)]
        stop = texts[1][2:5]
        assert all(stop not in texts[other] for other in (0, 2))
        asked = _asked(20, n=3, stop=[stop])
        messages = await _moved(bench, asked, 10, goes, num_samples_cancelled=1)
        for index in (0, 2):
            assert ids_of(messages, index) == _expected(bench, 20, index)
        assert "".join(m.text for m in messages if m.sample_index == 1) == texts[1][:2]
        ends = [m.sample_index for m in messages if m.finish_reason]
        assert sorted(ends) == [0, 1, 2]
        told = [command for worker in bench.decodes for command in worker.generated][-1]
        assert [output.is_over for output in told.outputs] == [False, True, False]


async def test_tokens_that_did_not_come_are_not_passed_over() -> None:
    async with running(num_decode=2) as bench:

        async def lose_one(worker: FakeDecode) -> None:
            worker.move_all(num_lost=1)

        code, error = await failure(_moved(bench, _asked(), 5, lose_one))
        assert code is grpc.StatusCode.INTERNAL and "sent [6] tokens, and [5] came" in str(error)


@pytest.mark.parametrize("is_lapsed", [False, True])
@pytest.mark.parametrize("goes", GOES)
async def test_a_stream_waits_for_another_worker_to_come(
    bench: Bench, goes: Goes, is_lapsed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It once ended with UNAVAILABLE as soon as the registry had dropped the only worker."""
    looks = Looks(monkeypatch)
    generating, worker = await _begun(bench, _asked(), 4)
    await until(lambda: _has_heard(bench, worker))
    await goes(worker)
    await until(lambda: _is_moving(bench))
    if is_lapsed:
        await looks.more(3)  # the registry still has it: it is asked, and does not answer
        await bench.lapse(worker)
        await looks.more(3)
    await bench.add(FakeDecode("later", bench.model))
    messages = await generating
    assert ids_of(messages) == _expected(bench, 12)
    assert _legs(messages)[-1] == ("later", "")


async def test_a_stream_does_not_go_back_to_a_worker_that_let_it_go(bench: Bench) -> None:
    """Not even where it would take it: the router may not have heard yet that it drains."""
    generating, worker = await _begun(bench, _asked(), 4)
    worker.move_all()
    worker.error, worker.pause_at = None, -1
    await until(lambda: _is_moving(bench))
    await bench.add(FakeDecode("later", bench.model))
    assert _legs(await generating)[-1] == ("later", "")
    assert worker.num_reserved == 1


async def test_a_stream_waits_for_a_prefill_worker_too() -> None:
    async with running(num_decode=2) as bench:
        generating, worker = await _begun(bench, _asked(), 4)
        _pause(bench, -1)
        bench.prefill.error = Unavailable("starting again", retry_after_s=1.0)
        await worker.stop()
        await until(lambda: len(bench.prefill.requests) >= 3)
        bench.prefill.error = None
        messages = await generating
        assert ids_of(messages) == _expected(bench, 12)
        assert [ended_by for _, ended_by in _legs(messages)] == ["", "worker_lost", "", ""]


async def test_a_stream_that_no_prefill_worker_takes_up_ends_in_time() -> None:
    async with running(num_decode=2, times=SHORT_WAITS) as bench:

        async def die(worker: FakeDecode) -> None:
            bench.prefill.error = Unavailable("out of order", retry_after_s=1.0)
            await worker.stop()

        code, error = await failure(_moved(bench, _asked(), 4, die))
        assert code is grpc.StatusCode.UNAVAILABLE and "no other worker took over: " in str(error)
        assert error.retry_after_s is not None


async def test_a_stream_waits_for_room() -> None:
    async with running(num_decode=2) as bench:
        generating, worker = await _begun(bench, _asked(), 4)
        (other,) = (d for d in bench.decodes if d is not worker)
        other.error = NoCapacity("full", retry_after_s=1.0)
        worker.move_all()
        await until(lambda: other.num_refused >= 2)
        other.error, other.pause_at = None, -1
        assert ids_of(await generating) == _expected(bench, 12)


@pytest.mark.parametrize("goes", GOES)
async def test_nobody_else_in_time_is_unavailable_with_a_retry_time(goes: Goes) -> None:
    async with running(times=SHORT_WAITS) as bench:
        code, error = await failure(_moved(bench, _asked(), 4, goes))
        assert code is grpc.StatusCode.UNAVAILABLE and error.retry_after_s is not None


async def test_a_request_that_breaks_workers_is_given_up() -> None:
    async with running(num_decode=3, limits={"max_failovers": 1}) as bench:
        _pause(bench, 4)
        generating = asyncio.create_task(bench.generate(_asked()))
        for then in (8, -1):
            worker = await _paused(bench)
            _pause(bench, then)
            await worker.stop()
        code, error = await failure(generating)
        assert code is grpc.StatusCode.UNAVAILABLE and "the last of 2 decode workers" in str(error)


async def test_a_worker_of_another_model_does_not_go_on() -> None:
    """Other weights under the same name: the answer would be another one from there on."""
    async with running(times=SHORT_WAITS) as bench:
        foreign = fake_model(fingerprint="cd" * 32)
        await bench.add(FakePrefill("p9", foreign))
        await bench.add(FakeDecode("d9", foreign))
        generating, worker = await _begun(bench, _asked(), 4)
        (other,) = (d for d in bench.decodes if d is not worker)
        worker.move_all()
        assert await code_of(generating) is grpc.StatusCode.UNAVAILABLE
        assert not other.generated


async def test_a_worker_that_leaves_while_the_prompt_is_computed() -> None:
    """It only held blocks: the handle goes to another one."""
    async with running(num_decode=2) as bench:
        bench.prefill.gate.close()
        generating = asyncio.create_task(bench.generate(_asked()))
        await bench.prefill.gate.reached.wait()
        (worker,) = (d for d in bench.decodes if d.num_reserved)
        worker.move_all()
        await until(lambda: not bench.probe.num_open_legs)
        bench.prefill.gate.open()
        messages = await generating
        assert ids_of(messages) == _expected(bench, 12)
        assert len(bench.prefill.requests) == 1
        (other,) = (d for d in bench.decodes if d is not worker)
        assert _legs(messages) == [("p0", ""), (other.worker_id, "")]
        assert other.generated[0].HasField("handle")


@pytest.mark.parametrize("goes", GOES)
async def test_an_answer_that_decode_draws_alone_goes_on(goes: Goes) -> None:
    async with running(num_decode=2, short_prefill_tokens=100) as bench:
        messages = await _moved(bench, _asked(), 5, goes)
        assert ids_of(messages) == _expected(bench, 12)
        assert not bench.prefill.requests
        (told,) = [c for d in bench.decodes if not d.is_draining for c in d.generated][-1:]
        assert list(told.output_token_ids) == _expected(bench, 5)


@pytest.mark.parametrize("ends", ["cancel", "deadline", "nobody", "overshoot"])
async def test_a_handle_that_nobody_takes_over_is_given_back(
    ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines = Deadlines(monkeypatch)
    async with lease_store() as store:
        times = SHORT_WAITS if ends == "nobody" else {}
        async with running(times=times) as bench:
            bench.decode.store_address = store.address
            bench.decode.pause_at = 4
            call = bench.call(_asked())
            worker = await _paused(bench)
            if ends == "overshoot":
                # It moves before it hears that the client is gone.
                worker.read_gate.close()
                call.cancel()
                await until(lambda: not bench.probe.num_requests)
                worker.move_all()
                worker.read_gate.open()
            else:
                worker.move_all()
                if ends != "nobody":
                    await until(lambda: _is_moving(bench))
                if ends == "cancel":
                    call.cancel()
                elif ends == "deadline":
                    deadlines.end_all()
                    assert await code_of(call) is grpc.StatusCode.DEADLINE_EXCEEDED
                else:
                    await failure(call)
            await until(lambda: store.released)
            assert store.released == ["lease-moved"]


async def test_it_is_counted_and_told() -> None:
    async with running(num_decode=2) as bench:
        await _moved(bench, _asked(), 5, _leave)
        (told,) = (await bench.status(num_requests=1)).requests
        assert told.outcome == "finished"
        assert "move" in {span.stage for span in told.spans}
        explained = await bench.explain(told.request_id)
        assert "decode left" in {decision.occasion for decision in explained.decisions}


@pytest.mark.parametrize("goes", [_leave, _die])
async def test_both_workers_go_while_the_prompt_is_computed(goes: Goes) -> None:
    """Who asked the second prefill worker once forgot that a decode worker is needed."""
    async with running(num_prefill=2, num_decode=2) as bench:
        for prefill in bench.prefills:
            prefill.gate.close()
        generating = asyncio.create_task(bench.generate(_asked()))
        first, other = await bench.busy_prefill()
        (decode,) = (worker for worker in bench.decodes if worker.num_reserved)
        await goes(decode)
        await until(lambda: not bench.probe.num_open_legs)
        other.gate.open()
        await first.stop()
        assert ids_of(await generating) == _expected(bench, 12)


async def test_waiting_for_a_prefill_worker_asks_now_and_then() -> None:
    """Not as fast as it is refused: that would hit a cluster when it is weakest."""
    async with running(num_decode=2, times={"failover_wait_s": 1.0}) as bench:

        async def die(worker: FakeDecode) -> None:
            bench.prefill.error = Unavailable("out of order", retry_after_s=1.0)
            await worker.stop()

        await failure(_moved(bench, _asked(), 4, die))
        assert 2 <= len(bench.prefill.requests) <= 1 + 1.0 / 0.2 + 2


async def test_those_who_wait_for_room_do_not_wake_one_another() -> None:
    """A refusal is no room for somebody else."""
    async with running(num_decode=1, times={"reserve_wait_s": 1.0}) as bench:
        bench.decode.error = NoCapacity("full", retry_after_s=1.0)
        asked = [request(text="hello", request_id=f"r{i}") for i in range(4)]
        ended = await asyncio.gather(*map(bench.generate, asked), return_exceptions=True)
        assert all(isinstance(error, grpc.aio.AioRpcError) for error in ended)
        assert bench.decode.num_refused <= 4 * 13


async def test_the_second_prefill_worker_is_told_of_the_answers_blocks() -> None:
    """However often it is asked for."""
    async with running(num_decode=2) as bench:
        at = 2 * bench.model.block_size - len(PROMPT)
        bench.prefill.store_node_id = "n0"
        await bench.publish(bench.prefill)
        life = await bench.add_store("n0")
        await bench.hold("n0", life, bench.chain([*PROMPT, *_expected(bench, at)]))

        async def die(worker: FakeDecode) -> None:
            bench.prefill.error = Unavailable("out of order", retry_after_s=0.0)
            await worker.stop()
            await until(lambda: len(bench.prefill.requests) > 3)
            bench.prefill.error = None

        assert ids_of(await _moved(bench, _asked(2 * at), at, die)) == _expected(bench, 2 * at)
        first, *others = (
            [(hint.node_id, hint.num_blocks) for hint in asked.hints]
            for asked in bench.prefill.requests
        )
        assert first == [] and len(others) >= 3
        assert all(hints == [("n0", 2)] for hints in others)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_what_a_worker_holds_whose_engine_hangs_goes_on_elsewhere(role: str) -> None:
    """Its process beats and answers: a request once waited there until its budget was spent."""
    async with running(num_prefill=2, num_decode=2, times={"max_step_s": 30.0}) as bench:
        workers: Any = bench.prefills if role == "prefill" else bench.decodes
        for worker in workers:
            worker.token_gate.close() if role == "decode" else worker.gate.close()
        generating = asyncio.create_task(bench.generate(_asked()))
        held = "num_generating" if role == "decode" else "num_active"
        await until(lambda: any(getattr(worker, held) for worker in workers))
        (hung,) = (worker for worker in workers if getattr(worker, held))
        (other,) = (worker for worker in workers if worker is not hung)
        other.token_gate.open() if role == "decode" else other.gate.open()
        hung.step_age_s = 31.0
        await bench.publish(hung)
        assert ids_of(await generating) == _expected(bench, 12)
        assert bench.probe.standing(hung) != "trusted"
        problems = (await bench.status(as_heard=True)).problems
        assert any(f"{hung.worker_id} hangs" in problem for problem in problems)
        # It gets nothing new, until its step has ended.
        assert bench.probe.usable(role) == [other.worker_id]
        hung.step_age_s = 0.0
        await bench.publish(hung)
        assert len(bench.probe.usable(role)) == 2


async def test_a_lone_worker_in_a_long_step_keeps_its_streams(bench: Bench) -> None:
    bench.decode.token_gate.close()
    generating = asyncio.create_task(bench.generate(_asked()))
    await until(lambda: bench.decode.num_generating)
    bench.decode.step_age_s = 1000.0
    await bench.publish(bench.decode)
    bench.decode.token_gate.open()
    assert _legs(await generating) == [("p0", ""), ("d0", "")]
