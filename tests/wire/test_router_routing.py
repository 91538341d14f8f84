"""A whole router over fake workers: policies, the why-record, decode workers that compute short
prompts themselves, and conversations that stay where they are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio
import pytest

from process.errors import NoCapacity
from protos import inference_pb2
from services.router import others_load
from services.router.fakes.decode import FakeDecode
from services.router.fakes.prefill import FakePrefill
from services.router.routing import Routing
from tests.harness.router_bench import (
    BOUND_S,
    SHORT_WAITS,
    TOKENIZER,
    Bench,
    expected_ids,
    fake_model,
    request,
    rest_of,
    running,
)

PROMPT = list(range(5, 105))
SHORT: dict[str, Any] = {"max_tokens": 4, "seed": 5}


def _ask(prompt: list[int] = PROMPT, **fields: Any) -> Any:
    sampling = {**SHORT, **fields.pop("sampling", {})}
    return request(token_ids={"ids": prompt}, sampling=sampling, **fields)


async def _explain(bench: Bench, request_id: str = "", tenant: str = "") -> Any:
    ask = inference_pb2.ExplainRequest(request_id=request_id, tenant=tenant)
    return await bench.stub.Explain(ask, timeout=BOUND_S)


def _legs(messages: list[Any]) -> dict[str, Any]:
    return {leg.role: leg for leg in messages[-1].provenance.legs}


def _ids(messages: list[Any]) -> list[int]:
    return [token_id for message in messages for token_id in message.token_ids]


async def test_every_choice_is_explained() -> None:
    async with running(num_prefill=2, num_decode=3) as bench:
        begin_s = time.perf_counter()
        messages = await bench.generate(_ask(request_id="r1", tenant="a"))
        generated_s = time.perf_counter() - begin_s
        legs = _legs(messages)
        reply = await _explain(bench, "r1")
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


async def test_the_latest_request_is_explained_without_its_id() -> None:
    async with running() as bench:
        for number in range(3):
            await bench.generate(_ask(request_id=f"r{number}"))
        assert (await _explain(bench)).request_id == "r2"
        assert (await _explain(bench, "r0")).request_id == "r0"


async def test_the_beginning_of_one_id_is_enough_and_of_several_is_refused_by_their_names() -> None:
    async with running() as bench:
        for request_id in ("abc1", "abc2", "abc"):
            await bench.generate(_ask(request_id=request_id, tenant="a"))
        assert (await _explain(bench, "abc1")).request_id == "abc1"
        assert (await _explain(bench, "abc")).request_id == "abc"  # an id of its own
        await bench.generate(_ask(request_id="xyz", tenant="a"))
        assert (await _explain(bench, "x")).request_id == "xyz"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _explain(bench, "ab")
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "'ab' begins 3 ids: abc, abc1, abc2" in (caught.value.details() or "")


@pytest.mark.parametrize(("request_id", "tenant"), [("r9", ""), ("r0", "b"), ("r", "b")])
async def test_what_is_not_known_is_not_found(request_id: str, tenant: str) -> None:
    async with running() as bench:
        await bench.generate(_ask(request_id="r0", tenant="a"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _explain(bench, request_id, tenant)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_refusal_is_another_choice_and_explained() -> None:
    async with running(num_decode=2) as bench:
        await bench.generate(_ask())
        (favourite,) = (worker for worker in bench.decodes if worker.num_reserved)
        favourite.error = NoCapacity("full")
        await bench.generate(_ask(request_id="r1"))
        first, second = (await _explain(bench, "r1")).decisions
        assert (first.occasion, second.occasion) == ("first", "decode refused")
        assert first.decode_id == favourite.worker_id != second.decode_id


async def test_an_answer_of_one_token_has_no_decode_worker() -> None:
    async with running() as bench:
        await bench.generate(_ask(request_id="r1", sampling={"max_tokens": 1}))
        (decision,) = (await _explain(bench, "r1")).decisions
        assert (decision.prefill_id, decision.decode_id) == ("p0", "")
        assert {candidate.role for candidate in decision.candidates} == {"prefill"}


async def test_round_robin_gives_each_worker_its_turn() -> None:
    async with running(num_prefill=3, num_decode=2, routing_policy="round_robin") as bench:
        for _ in range(6):
            await bench.generate(_ask())
        assert [len(worker.requests) for worker in bench.prefills] == [2, 2, 2]
        assert [worker.num_reserved for worker in bench.decodes] == [3, 3]
        (decision,) = (await _explain(bench)).decisions
        assert (decision.policy, decision.unit) == ("round_robin", "turns")


# ---- a decode worker computes the prompt itself


async def test_a_short_prompt_is_computed_by_decode_exactly_and_said_so() -> None:
    async with running(short_prefill_tokens=100) as bench:
        messages = await bench.generate(_ask(request_id="r1"))
        assert _ids(messages) == expected_ids(bench, PROMPT, 5, 4)
        assert not bench.prefill.requests
        (told,) = bench.decode.generated
        assert told.computes_prompt and not told.HasField("handle")
        assert not told.output_token_ids
        legs = _legs(messages)
        assert list(legs) == ["decode"] and legs["decode"].num_tokens_computed == 100
        assert not legs["decode"].recomputed
        assert messages[-1].provenance.model_fingerprint == bench.model.fingerprint
        assert [d.prefill_id for d in (await _explain(bench, "r1")).decisions][-1] == ""


async def test_a_reservation_of_ones_own_disturbs_nobody() -> None:
    """What the worker says of its load after the reservation has this very request in it."""
    async with running(short_prefill_tokens=100) as bench:
        bench.decode.num_blocks = 7  # of this request
        bench.decode.num_tokens_local = 16  # which nobody knew: the choice is made again
        await bench.publish(bench.decode)
        await bench.generate(_ask(request_id="r1"))
        assert not bench.prefill.requests
        decisions = (await _explain(bench, "r1")).decisions
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
        assert _ids(by_sample[0]) == expected_ids(bench, PROMPT, 5, 4)
        assert len({tuple(_ids(sample)) for sample in by_sample.values()}) == 3


@pytest.mark.parametrize(
    ("most", "sampling"),
    [
        (0, {}),
        (99, {}),
        (1000, {"max_tokens": 1}),
        (1000, {"beam": {"num_beams": 2}}),
    ],
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
        calls = [bench.stub.Generate(_ask(), timeout=BOUND_S)]
        await bench.decode.token_gate.reached.wait()
        assert not bench.prefill.requests
        calls.append(bench.stub.Generate(_ask(), timeout=BOUND_S))
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
        first, second = (await _explain(bench, "r1")).decisions
        assert (first.prefill_id, first.num_computed) == ("", 4)
        assert (second.occasion, second.prefill_id) == ("decode reserved", "p0")
        assert len(bench.prefill.requests) == 2
        # And the other way round: it has what nobody knew of.
        bench.decode.num_tokens_local = 96
        await bench.generate(_ask(list(range(6, 106)), request_id="r2"))
        first, second = (await _explain(bench, "r2")).decisions
        assert (first.prefill_id, second.prefill_id) == ("p0", "")
        assert len(bench.prefill.requests) == 2


async def test_a_decode_worker_that_dies_while_it_computes_is_unavailable() -> None:
    async with running(short_prefill_tokens=1000, times=SHORT_WAITS) as bench:
        bench.decode.token_gate.close()
        call = bench.stub.Generate(_ask(), timeout=BOUND_S)
        await bench.decode.token_gate.reached.wait()
        await bench.decode.stop()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


# ---- conversations


async def test_the_next_turn_goes_where_the_last_one_was() -> None:
    async with running(num_prefill=3, num_decode=3) as bench:
        await bench.add_store("n0")
        for number in range(6):
            prompt = [number + 5] * 100
            messages = await bench.generate(_ask(prompt))
            met = {role: leg.worker_id for role, leg in _legs(messages).items()}
            turn = [*prompt, *_ids(messages)[:3], *range(30, 60)]
            messages = await bench.generate(_ask(turn, session=f"another {number}"))
            assert {role: leg.worker_id for role, leg in _legs(messages).items()} == met
            (decision,) = (await _explain(bench)).decisions
            assert decision.num_computed == len(turn) - 96


async def test_a_growing_conversation_on_an_idle_cluster_stays_where_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The heartbeats that come after each turn were written while it ran, and say so."""
    monkeypatch.setattr(others_load, "BEAT_AGE_S", 1e9)
    async with running(num_prefill=2, num_decode=2) as bench:
        await bench.add_store("n0")
        turn, met = [5] * 100, []
        for _ in range(4):
            messages = await bench.generate(_ask(turn))
            places = {role: leg.worker_id for role, leg in _legs(messages).items()}
            met.append(places)
            turn = [*turn, *_ids(messages)[:3], *range(30, 60)]
            for worker in (*bench.prefills, *bench.decodes):
                is_there = worker.worker_id in places.values()
                worker.num_running = worker.num_queued_tokens = int(is_there)
                await bench.publish(worker)
        assert met == met[:1] * 4


async def test_what_is_noted_is_prompt_and_answer_but_for_the_last_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted: list[tuple[Sequence[int], Sequence[int]]] = []
    note = Routing.note_answer

    def spy(self: Routing, *arguments: Any) -> None:
        _, _, prompt, drawn, _ = arguments
        noted.append((list(prompt), list(drawn)))
        note(self, *arguments)

    monkeypatch.setattr(Routing, "note_answer", spy)
    async with running() as bench:
        await bench.add_store("n0")
        answer = _ids(await bench.generate(_ask(sampling={"max_tokens": 29})))
    assert len(answer) == 29 and noted == [(PROMPT, answer[:-1])]


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
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await bench.generate(_ask([7] * 512))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_worker_that_comes_back_with_another_model_is_not_asked() -> None:
    async with running() as bench:
        bench.decode.reserve_gate.close()
        call = bench.stub.Generate(request(sampling={"max_tokens": 4, "seed": 1}), timeout=BOUND_S)
        async with asyncio.timeout(BOUND_S):
            await bench.decode.reserve_gate.reached.wait()  # the prefill worker is chosen by now
        await bench.prefill.stop()
        other = FakePrefill("p0", fake_model(name="other", fingerprint="cd" * 32))
        await bench.add(other)
        await bench.add(FakePrefill("p1", bench.model))
        bench.decode.reserve_gate.open()
        messages = await rest_of(call)
        assert not other.requests and len(bench.prefills[-1].requests) == 1
    ids = [token for message in messages for token in message.token_ids]
    assert ids == expected_ids(bench, TOKENIZER.encode("hello"), 1, 4)
