"""What a prefill worker still computes is asked for at itself: the last blocks come before their
handle does, count only if that names them just so, and nobody waits at the lender any more however
it ends.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore import errors
from kvstore.client import KvStoreClient
from kvstore.transport.device import PeerCopies
from process.rpc_errors import BatonError, DeadlineExceeded, Unavailable
from protos import common_pb2
from services.decode import kv_loader as decode_ahead
from services.decode.request_spec import DecodeState
from services.worker import handle as handles
from services.worker.provenance import FINGERPRINT
from services.worker.store_pool import RemoteStores, StoreConnector, StoreUnusable
from tests.harness.direct_pair import (
    CHUNK,
    FOR_EVER_S,
    NUM_BLOCKS,
    PATIENT,
    PROMPT,
    Ahead,
    ahead,
    on_devices,
)
from tests.harness.gated_engine import BLOCK_SIZE
from tests.harness.handles import forge
from tests.harness.prefill_decode_pair import WAIT_S
from tests.harness.sources import end_promises
from tests.harness.waiting import Deadlines, Gate, task_of, until


def failed(a: Ahead) -> Any:
    """Early pulls that failed at decode, by reason."""
    return a.p.decode.core.counts.early_pulls_failed


def check_all_early(a: Ahead, answer: Any) -> None:
    assert answer.leg.num_tokens_early == len(PROMPT) and answer.recomputed == {}
    assert not failed(a)


@pytest.fixture(autouse=True)
def _asks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader asks again no sooner than a test fails, and its request lives longer than that."""
    monkeypatch.setattr(decode_ahead, "MAX_WAIT_S", WAIT_S)


async def test_the_last_blocks_are_here_before_their_handle(tmp_path: Path) -> None:
    async with ahead(tmp_path) as a:
        await a.asked()
        reply = await a.copied()
        (client,) = a.p.decode.core.remote_stores.clients
        gate = Gate(client, "get_blocks")  # nothing is read again
        answer = await a.answer(reply)
        assert not gate.entered.is_set()
        gate.open()
        check_all_early(a, answer)
        assert answer.leg.num_tokens_computed == 0
        (count,) = answer.leg.from_store
        assert (count.node_id, count.num_tokens) == (a.lender.node_id, len(PROMPT))


async def test_the_last_blocks_come_while_their_checksums_are_computed(tmp_path: Path) -> None:
    async with ahead(tmp_path) as a:
        await a.asked()
        gate = Gate(a.lender, "seal")
        computing = asyncio.create_task(a.computed())
        await gate.wait_entered()
        await until(lambda: a.num_read == NUM_BLOCKS)
        await until(lambda: a.num_waiting == 0 and a.state == [DecodeState.RESERVED])
        assert not computing.done(), "no handle can be made"
        (request,) = a.p.decode_role.worker._requests.values()
        gate.open()
        answer = await a.answer(await computing)
        check_all_early(a, answer)
        assert request.state is DecodeState.FINISHED


async def test_the_next_blocks_are_entered_while_they_are_computed(tmp_path: Path) -> None:
    """So that only the word of it is left to be said then; and nobody hears of them before."""
    async with ahead(tmp_path) as a:
        await a.asked()
        loans, num_told = a.lender.loans, CHUNK // BLOCK_SIZE
        await until(lambda: loans.num_lent == len(PROMPT) // BLOCK_SIZE)
        (lease_id,) = loans.kept
        assert len(loans.blocks_of(lease_id, 0)) == num_told and a.num_waiting == 1
        entered: list[int] = []
        enter = a.lender.enter

        def noted(offers: Any, *rest: Any, **options: Any) -> str:
            entered.append(len(offers))
            return enter(offers, *rest, **options)

        a.lender.enter = noted  # type: ignore[method-assign]
        answer = await a.answer(await a.copied())
        assert entered == [1], "the unfilled last block"
        check_all_early(a, answer)


async def test_over_a_mapping_what_was_promised_to_stay_is_not_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between caches on devices; also while nobody has said the checksums."""
    on_devices(monkeypatch, PeerCopies(hold_s=FOR_EVER_S))
    limits = replace(PATIENT, max_hold_s=FOR_EVER_S)
    options = {"direct_transport": "cuda_ipc", "lend_mapped": True}
    async with ahead(tmp_path, lender_limits=limits, **options) as a:
        await a.asked()
        await a.p.decode.core.links.settle()  # what measures them is asked about
        asked: list[Any] = []
        monkeypatch.setattr(a.lender.lender, "hold", lambda *question: asked.append(question))
        gate = Gate(a.lender, "seal")
        computing = asyncio.create_task(a.computed())
        await gate.wait_entered()
        await until(lambda: a.num_read == NUM_BLOCKS)
        gate.open()
        answer = await a.answer(await computing)
        assert asked == []
        check_all_early(a, answer)
        assert a.lender.loans.num_pins == 1
        await until(lambda: a.p.at_prefill.num_chains_behind == 0)
        await until(lambda: a.lender.loans.num_leases == 0)
        assert a.lender.num_lent_blocks == NUM_BLOCKS - CHUNK // BLOCK_SIZE
        end_promises(a.lender.loans)


@pytest.mark.parametrize("how", ["fails", "stops", "ends", "is cancelled"])
async def test_a_lender_that_told_and_never_vouched_is_not_believed(
    tmp_path: Path, how: str
) -> None:
    """Nobody says the checksums: the handle is the store's, or none comes; nothing stays lent."""
    async with ahead(tmp_path) as a:
        await a.asked()
        gate = Gate(a.lender, "seal")
        computing = asyncio.create_task(a.computed())
        await gate.wait_entered()
        await until(lambda: a.num_read == NUM_BLOCKS)
        if how == "is cancelled":
            computing.cancel()
            a.call.cancel()
            await until(lambda: not a.p.prefill_role.worker.states)
            gate.open()
            await a.stream.cancel(a.key)
            return

        def fails(block_ids: Any) -> Any:
            raise errors.TransferFailed("the device is gone")

        memory = a.lender.lender.memory
        release, is_early = a.lender.release, list[bool]()

        def released(lease_id: str) -> None:
            is_early.append(bool(a.lender.open_prompts))
            release(lease_id)

        a.lender.release = released  # type: ignore[method-assign]
        if how == "fails":
            object.__setattr__(memory, "checksums", fails)
        elif how == "ends":
            a.lender.loans.end_all()
        else:
            await a.lender.lender.stop(WAIT_S)
        gate.open()
        reply = await computing
        assert [run.node_id for run in reply.handle.runs] == [a.p.store.node.node_id]
        assert is_early[0], "whoever reads hears of it before the request is over"
        answer = await a.answer(reply)
        assert answer.leg.num_tokens_computed == 0 and answer.recomputed == {}
        assert {count.node_id: count.num_tokens for count in answer.leg.from_store} == {
            a.lender.node_id: CHUNK,
            a.p.store.node.node_id: len(PROMPT) - CHUNK,
        }
        assert failed(a) == {FINGERPRINT: 1}


async def test_a_handle_that_is_faster_waits_for_what_is_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is looked at meanwhile."""
    looks: list[bool] = []
    stretches = handles.stretches

    def looked(handle: handles.Handle, *hashes: Any) -> Any:
        looks.append(handle.is_partial)
        return stretches(handle, *hashes)

    monkeypatch.setattr(handles, "stretches", looked)
    async with ahead(tmp_path) as a:
        await a.asked()
        (client,) = a.p.decode.core.remote_stores.clients
        gate = Gate(client, "get_blocks")
        reply = await a.computed()
        await gate.wait_entered()
        assert a.state == [DecodeState.PREFETCHING]
        (waiting,) = a.p.decode_role.worker._requests.values()
        await a.stream.generate(a.key, reply)
        await until(lambda: waiting.arrival.is_over)
        assert looks == [True, False]
        waited_s = time.monotonic()
        gate.open()
        answer = await a.stream.collect(a.key)
        assert looks == [True, False], "once"
        assert [*reply.token_ids, *answer.token_ids] == a.p.expected(PROMPT, 8)
        check_all_early(a, answer)
        stages = [stage for stage, from_s, to_s in waiting._clock.laps if from_s <= waited_s < to_s]
        assert stages == ["decode_fetch"], "it waits for its KV, and says so"


async def test_who_hears_of_nothing_new_for_a_while_asks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_ahead, "MAX_WAIT_S", 0.01)
    monkeypatch.setattr(decode_ahead, "ANSWER_S", WAIT_S)  # however busy the machine is
    async with ahead(tmp_path) as a:
        await until(lambda: a.num_asked >= 3 and a.num_read == CHUNK // BLOCK_SIZE)
        answer = await a.answer(await a.copied())
        check_all_early(a, answer)


async def test_who_knows_more_asks_anew_and_not_twice(tmp_path: Path) -> None:
    async with ahead(tmp_path, num_told=CHUNK // BLOCK_SIZE - 2) as a:
        await a.asked()
        assert a.num_asked == 1
        await a.stream.prefetch(a.key, a.first)
        await until(lambda: a.num_read == CHUNK // BLOCK_SIZE and a.num_asked == 2)
        await until(lambda: a.num_waiting == 1)
        answer = await a.answer(await a.copied())
        assert a.num_asked == 2
        check_all_early(a, answer)


LAST_FULL = len(PROMPT) // BLOCK_SIZE - 1


def _other_checksum(handle: common_pb2.KvHandle) -> None:
    forge(handle.runs[0], LAST_FULL, checksum=1)


def _other_generation(handle: common_pb2.KvHandle) -> None:
    forge(handle.runs[0], LAST_FULL, generation=4)


def _other_tail(handle: common_pb2.KvHandle) -> None:
    forge(handle.tail, 0, checksum=1)


@pytest.mark.parametrize(
    ("change", "num_early", "reasons", "why"),
    [
        (_other_checksum, LAST_FULL * BLOCK_SIZE, {errors.CHECKSUM}, errors.CHECKSUM),
        (
            _other_generation,
            LAST_FULL * BLOCK_SIZE,
            {errors.GENERATION, errors.CHECKSUM},
            FINGERPRINT,
        ),
        (_other_tail, (LAST_FULL + 1) * BLOCK_SIZE, {errors.CHECKSUM}, errors.CHECKSUM),
    ],
)
async def test_only_what_the_handle_names_just_so_counts(
    tmp_path: Path,
    change: Callable[[common_pb2.KvHandle], None],
    num_early: int,
    reasons: set[str],
    why: str,
) -> None:
    """Signed, and of other blocks than the lender spoke of: the handle decides."""
    async with ahead(tmp_path) as a:
        await a.asked()
        reply = await a.copied()
        change(reply.handle)
        handles.sign(reply.handle, a.p.prefill.core.handle_keys)
        answer = await a.answer(reply)
        assert set(answer.recomputed) <= reasons and answer.recomputed
        assert answer.leg.num_tokens_early == num_early
        assert failed(a) == {why: 1}


async def test_without_a_handle_that_names_it_what_came_is_not_used(tmp_path: Path) -> None:
    async with ahead(tmp_path) as a:
        await a.asked()
        reply = await a.copied()
        lease_id = reply.handle.runs[0].lease_id
        reply.ClearField("handle")
        answer = await a.answer(reply)
        assert answer.leg.num_tokens_early == CHUNK
        assert answer.leg.num_tokens_computed == len(PROMPT) - CHUNK
        a.lender.release(lease_id)


async def test_bytes_that_are_not_those_that_the_lender_vouches_for_are_found(
    tmp_path: Path,
) -> None:
    """Blocks that are named before their checksums are known are found when the handle comes."""
    async with ahead(tmp_path) as a:
        await a.asked()
        loans = a.lender.loans
        seal = loans.seal

        def otherwise(lease_id: str, checksums: dict[int, int]) -> Any:
            frame = list(checksums)[-2]
            return seal(lease_id, checksums | {frame: checksums[frame] ^ 1})

        loans.seal = otherwise  # type: ignore[method-assign, assignment]
        reply = await a.computed()
        await until(lambda: a.num_read == NUM_BLOCKS)
        assert not failed(a)
        await until(lambda: a.state == [DecodeState.RESERVED])
        answer = await a.answer(reply)
        assert failed(a) == {errors.CHECKSUM: 1}
        # Whoever reports it ends the lease: the handle may be asked about behind that.
        assert set(answer.recomputed) <= {errors.CHECKSUM, errors.LEASE_LAPSED, errors.GENERATION}
        assert answer.leg.num_tokens_early == LAST_FULL * BLOCK_SIZE


async def test_a_lender_with_no_room_for_those_who_wait_is_as_good_without(tmp_path: Path) -> None:
    async with ahead(tmp_path, lender_limits=replace(PATIENT, max_waiting=0)) as a:
        await until(lambda: failed(a).total() == 1)
        await until(lambda: a.num_read == CHUNK // BLOCK_SIZE)
        reply = await a.computed()
        answer = await a.answer(reply)
        assert answer.recomputed == {} and answer.leg.num_tokens_early == CHUNK


async def test_a_lender_that_cannot_be_reached_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By who pulls, not by who asks as well."""
    is_away, num_tries = True, 0
    way = RemoteStores.client

    async def client(stores: RemoteStores, *place: Any) -> Any:
        nonlocal num_tries
        if not is_away:
            return await way(stores, *place)
        num_tries += 1
        raise StoreUnusable("nobody is there", errors.STORE_UNAVAILABLE)

    monkeypatch.setattr(RemoteStores, "client", client)
    async with ahead(tmp_path) as a:
        await until(lambda: num_tries == 2 and a.state == [DecodeState.RESERVED])
        is_away = False
        answer = await a.answer(await a.computed())
        assert answer.recomputed == {} and answer.leg.num_tokens_early == 0
        assert failed(a) == {errors.STORE_UNAVAILABLE: 1}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (DeadlineExceeded("no answer"), errors.DEADLINE),
        (Unavailable("the connection is gone"), errors.STORE_UNAVAILABLE),
        (errors.LeaseLapsed("released"), ""),
    ],
)
async def test_a_question_that_fails_is_counted_and_its_lender_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BatonError, reason: str
) -> None:
    """But not one whose prompt was given up."""
    has_failed = False
    suspected: list[tuple[BatonError, float]] = []

    async def fails(*_: Any, **options: Any) -> Any:
        nonlocal has_failed
        assert options["num_wanted"] > options["num_known"]
        has_failed = True
        raise error

    def suspect(_: Any, client: KvStoreClient, why: BatonError, *, had_s: float = math.inf) -> None:
        if why is error:
            suspected.append((why, had_s))

    monkeypatch.setattr(KvStoreClient, "await_lent", fails)
    monkeypatch.setattr(StoreConnector, "suspect", suspect)
    async with ahead(tmp_path) as a:
        await until(lambda: has_failed and a.num_read == CHUNK // BLOCK_SIZE)
        await until(lambda: a.state == [DecodeState.RESERVED])
        assert failed(a) == ({reason: 1} if reason else {})
        assert suspected == ([(error, decode_ahead.ANSWER_S)] if reason else [])
        answer = await a.answer(await a.computed())
        assert answer.recomputed == {}


@pytest.mark.parametrize(
    ("state", "how"),
    [
        *((state, "cancel") for state in ("asking", "copying", "copied")),
        ("asking", "deadline"),
        ("copied", "stream"),
    ],
)
async def test_ended_in_each_state_nobody_waits_at_the_lender(
    tmp_path: Path, state: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines = Deadlines(monkeypatch)
    async with ahead(tmp_path) as a:
        await a.asked()
        gate: Gate | None = None
        if state == "copying":
            (client,) = a.p.decode.core.remote_stores.clients
            gate = Gate(client, "get_blocks")
            reply = await a.computed()
            await gate.wait_entered()
        elif state == "copied":
            reply = await a.copied()
        if how == "cancel":
            await a.stream.cancel(a.key)
        elif how == "deadline":
            await deadlines.end(task_of(a.p.decode_role.worker, a.key))
        else:
            await a.stream.close()
        await until(lambda: not a.p.decode_role.worker.states)
        await until(lambda: a.num_waiting == 0)
        if gate is not None:
            gate.open()
        if state == "asking":
            reply = await a.computed()
        a.lender.release(reply.handle.runs[0].lease_id)
