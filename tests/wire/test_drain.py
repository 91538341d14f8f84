"""Workers that drain. A decode worker, or its store, drains while a request is in each of its
states, or ends meanwhile in each way; streams move at random moments, and the tokens do not show
it. A prefill worker answers what was taken in, stores what is behind, waits for what is lent, and
only then leaves the registry."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from process.rpc_errors import Unavailable
from protos import common_pb2
from tests.conftest import third
from tests.harness.bundled_pair import alone, bundled_engine
from tests.harness.decode_movers import (
    LEAVE_S,
    Movers,
    Told,
    fake_engines,
    movers,
    release_when_taken_out,
)
from tests.harness.gated_engine import GatedModel, prompt_of
from tests.harness.prefill_decode_pair import WAIT_S, Pair, Sample, pair, patient, whole
from tests.harness.waiting import Deadlines, Gate, until
from tests.harness.worker_probe import Beats, HeldWrites

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.usefixtures("one_compile_process"),
]

# ---- in each state


NUM_TOKENS = 40
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE.value[0]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def m(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Movers]:
    async with movers(tmp_path_factory.mktemp("movers")) as made:
        yield made


async def finish(m: Movers, moved: Any, sample: Sample, prompt: tuple[int, ...]) -> Any:
    """Go on at worker 1 to the end; the answer is exact. Returns: the last word."""
    finished = await m.go_on(1, moved, [sample], prompt, max_tokens=NUM_TOKENS)
    assert sample.token_ids == GatedModel().generate(prompt, NUM_TOKENS)
    return finished


def assert_nothing_computed(finished: Any) -> None:
    assert finished.leg.num_tokens_computed == 0 and not finished.leg.recomputed


@dataclass
class Held:
    """A request at worker 0 that stays in a state. `moved`: the handle that it comes with."""

    prompt: tuple[int, ...]
    key: int
    moved: Any
    sample: Sample = field(default_factory=Sample)
    """What it was sent."""


@contextlib.asynccontextmanager
async def held_in(m: Movers, state: str) -> AsyncIterator[Held]:
    prompt = m.new_prompt(30)
    moved, sample = await m.moved(prompt, max_tokens=NUM_TOKENS)
    stream, model = m.streams[0], m.at(0).model
    busy = None
    if state == "reserving":
        busy = await m.begin_held(1, m.new_prompt(5), name="busy", max_tokens=200)
    key = await stream.reserve(m.reserve(prompt, "r", max_tokens=NUM_TOKENS))
    if state != "reserving":
        assert (await stream.next(key)).HasField("reserved")
    gate: Gate | None = None
    if state == "fetching":
        gate = m.at(0).home.hold("get")
    if state == "moving":
        gate = m.at(0).home.hold("put")
    if state in ("running", "moving"):
        model.hold()
    if state in ("fetching", "running", "moving"):
        await m.hand_over(0, key, moved, [sample])
    if state == "moving":
        await until(lambda: "running" in m.states(0))
        await until(model.is_held.is_set)
        release_when_taken_out(m, 0)
        m.leave(0, 60.0)
    try:
        await until(lambda: state in m.states(0))
        yield Held(prompt, key, moved, sample)
    finally:
        if gate is not None:
            gate.open()
        model.release()
        if busy is not None:
            await stream.cancel(busy)
        m.stay(0)


@pytest.mark.parametrize("state", ["reserving", "reserved"])
async def test_what_has_no_handover_yet_is_sent_elsewhere(m: Movers, state: str) -> None:
    async with held_in(m, state) as held:
        m.leave(0)
        failed = (await m.last_word(0, held.key, held.sample)).failed
        assert failed.code == UNAVAILABLE and "draining" in failed.message
        assert failed.HasField("retry_after_s") and failed.retry_after_s == 0
        refused = await m.streams[0].reserve(m.reserve(held.prompt, "new", max_tokens=4))
        assert (await m.streams[0].next(refused)).failed.code == UNAVAILABLE
    assert_nothing_computed(await finish(m, held.moved, held.sample, held.prompt))
    await m.check()


@pytest.mark.parametrize("state", ["fetching", "running"])
async def test_what_runs_moves_with_its_kv(m: Movers, state: str) -> None:
    before = m.at(0).counts("baton_decode_moved_requests").get("draining", 0)
    async with held_in(m, state) as held:
        m.at(0).model.hold()
        release_when_taken_out(m, 0)
        m.leave(0)
        Gate.open_all()
        moved = (await m.last_word(0, held.key, held.sample)).moved
        assert list(moved.num_output_tokens) == [len(held.sample.token_ids)]
        num_tokens = len(held.prompt) + len(held.sample.token_ids) - 1
        assert moved.handle.num_tokens == num_tokens and moved.reason == "draining"
        assert [time.stage for time in moved.times][-1] == "decode_move"
    assert_nothing_computed(await finish(m, moved, held.sample, held.prompt))
    await m.check()
    # The one that made the handle, too.
    assert m.at(0).counts("baton_decode_moved_requests")["draining"] == before + 2


@pytest.mark.parametrize("state", ["fetching", "running", "moving"])
async def test_what_does_not_get_ready_in_time_moves_without_its_kv(m: Movers, state: str) -> None:
    """The store is slow, or the engine is in a long step: neither is waited for."""
    async with held_in(m, state) as held:
        if state == "moving":
            m.shorten(0, 0.05)
        else:
            m.leave(0, 0.05)
        moved = (await m.last_word(0, held.key, held.sample)).moved
        assert not moved.HasField("handle") and moved.reason == "deadline"
        assert moved.HasField("leg") == (state != "fetching")
        assert list(moved.num_output_tokens) == [len(held.sample.token_ids)]
    finished = await finish(m, moved, held.sample, held.prompt)
    assert {one.reason for one in finished.leg.recomputed} == {"missing"}
    await m.check()


@pytest.mark.parametrize("end", ["cancel", "deadline", "stream"])
@pytest.mark.parametrize("state", ["reserved", "fetching", "running", "moving"])
async def test_a_request_may_end_while_it_is_told_to_leave(
    m: Movers, state: str, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines = Deadlines(monkeypatch)
    async with held_in(m, state) as held:
        time_over = deadlines.of(m.at(0), held.key)
        if state != "moving":
            m.leave(0)
        if end == "cancel":
            await m.streams[0].cancel(held.key)
        elif end == "stream":
            await m.reopen(0)
        else:
            await time_over()
        if end != "stream":
            event = await m.last_word(0, held.key, held.sample)
            kind = event.WhichOneof("event")
            if state == "reserved":  # whichever came first
                assert kind in ("failed", "finished")
            else:
                assert kind == {"cancel": "finished", "deadline": "failed"}[end]
        await until(lambda: not m.states(0))
    if state == "reserved":  # its handle was never handed over
        m.at(0).release_later(held.moved.handle)
    await m.check()


async def test_a_request_that_ends_in_the_step_before_does_not_move(m: Movers) -> None:
    model, prompt = m.at(0).model, m.new_prompt(10)  # one step
    key = await m.begin_held(1, prompt, max_tokens=1)
    m.leave(0)
    await asyncio.sleep(0)
    model.release()
    event = await m.last_word(0, key, Sample())
    m.stay(0)
    assert event.HasField("finished"), event
    assert list(event.finished.token_ids) == GatedModel().generate(prompt, 1)
    await m.check()


@pytest.mark.parametrize("trouble", ["away", "full"])
async def test_a_store_that_takes_nothing_leaves_no_handle(tmp_path: Path, trouble: str) -> None:
    """Or one that is shorter. The next worker computes the rest, and says why."""
    store_bytes = 16 * 1024 * 1024 if trouble == "away" else 3 * 4096
    async with movers(tmp_path, store_bytes=store_bytes) as m:
        sample, prompt = Sample(), m.new_prompt(30)
        key = await m.begin_held(5, prompt, max_tokens=NUM_TOKENS)
        if trouble == "away":
            m.at(0).stall_store()
        release_when_taken_out(m, 0)
        m.leave(0)
        moved = (await m.last_word(0, key, sample)).moved
        num_blocks = -(-(len(prompt) + len(sample.token_ids) - 1) // 4)
        not_stored = {one.reason: one.num_blocks for one in moved.leg.not_stored}
        if trouble == "away":
            assert not moved.HasField("handle") and moved.reason == "store_unavailable"
            assert not_stored["store_unavailable"] >= num_blocks  # and of the write-back
        else:
            # None at all where a write-back had the frames just then.
            assert moved.reason == "no_room" and moved.handle.num_tokens in (0, 4, 8, 12)
            assert not_stored["no_room"] >= num_blocks - moved.handle.num_tokens // 4
        leg = (await finish(m, moved, sample, prompt)).leg
        assert leg.num_tokens_computed + leg.num_tokens_local >= 30 - 12 and leg.recomputed
        if trouble == "away":
            m.at(0).wake_store()
        await m.check()


@pytest.mark.parametrize("n", [1, 2])
async def test_what_leaves_inside_its_prompt_has_computed_no_more_than_that(
    m: Movers, n: int
) -> None:
    """Chunks of 16; several samples leave without a handle, and wait for no second one."""
    sample, model, prompt = Sample(), m.at(0).model, m.new_prompt(60)
    before = m.at(0).status().num_prompt_tokens_computed
    key = await m.begin_held(2, prompt, max_tokens=NUM_TOKENS, n=n)
    if n == 1:
        release_when_taken_out(m, 0)
    m.leave(0)
    moved = (await m.last_word(0, key, sample)).moved
    model.release()
    m.stay(0)
    assert not sample.token_ids
    num_computed = moved.leg.num_tokens_computed
    assert num_computed == (32 if n == 1 else 16)
    assert m.at(0).status().num_prompt_tokens_computed - before == num_computed
    if n == 1:
        assert num_computed == moved.handle.num_tokens
        finished = await finish(m, moved, sample, prompt)
        assert finished.leg.num_tokens_computed == 60 - moved.handle.num_tokens
    await m.check()


async def test_what_is_cancelled_inside_its_prompt_has_computed_no_more_than_that(
    m: Movers,
) -> None:
    model = m.at(0).model
    key = await m.begin_held(2, m.new_prompt(60), max_tokens=NUM_TOKENS)
    await m.streams[0].cancel(key)
    leg = (await m.last_word(0, key, Sample())).finished.leg
    model.release()
    assert leg.num_tokens_computed == 16
    await m.check()


async def test_a_beam_search_moves_without_anything(m: Movers) -> None:
    model = m.at(0).model
    model.hold()
    beam = common_pb2.BeamParams(num_beams=3)
    key = await m.begin(0, m.new_prompt(30), max_tokens=150, beam=beam, n=2)
    await until(model.is_held.is_set)
    m.leave(0)
    moved = (await m.last_word(0, key, Sample())).moved  # which asks nothing of the engine
    model.release()
    assert list(moved.num_output_tokens) == [0, 0] and not moved.HasField("handle")
    m.stay(0)
    await m.check()


async def test_several_samples_move_without_their_kv_and_go_on_exactly(m: Movers) -> None:
    """Each was told how far it had come; what is computed again is counted."""
    prompt, model = m.new_prompt(30), m.at(0).model
    options: dict[str, Any] = {"n": 3, "temperature": 1.0, "max_tokens": 30}
    key = await m.begin_held(6, prompt, **options)
    samples = [Sample() for _ in range(3)]
    m.leave(0)
    while not (event := await m.streams[0].next(key)).HasField("moved"):
        samples[event.tokens.sample_index].add(event.tokens)
    model.release()  # not before: it might come to its end
    m.stay(0)
    moved = event.moved
    assert list(moved.num_output_tokens) == [len(one.token_ids) for one in samples]
    assert not moved.HasField("handle") and moved.reason == "several_samples"
    finished = await m.go_on(1, moved, samples, prompt, **options)
    assert [one.token_ids for one in samples] == m.alone(prompt, **options)
    assert {r.reason: r.num_blocks for r in finished.leg.recomputed} == {"missing": 8}
    await m.check()


async def test_a_handle_that_the_router_was_not_told_of_gives_its_leases_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router does not read, and then its stream breaks."""
    HeldWrites(monkeypatch, "decode", until=lambda event: event.HasField("moved"))
    async with movers(tmp_path) as m:
        await m.begin_held(5, m.new_prompt(30), max_tokens=NUM_TOKENS)
        release_when_taken_out(m, 0)
        m.leave(0)
        await until(lambda: m.at(0).is_idle)
        assert m.at(0).counts("baton_decode_moved_requests") == {"draining": 1}
        await m.streams[0].close()
        m.stay(0)
        await m.check()


@pytest.mark.parametrize("is_stuck", [False, True])
async def test_stopping_moves_what_runs_and_ends_in_time(tmp_path: Path, is_stuck: bool) -> None:
    """The whole of it, as a signal begins it."""
    limits = patient(drain_s=1.0 if is_stuck else 30.0)
    async with movers(tmp_path, limits=limits) as m:
        sample, model, prompt = Sample(), m.at(0).model, m.new_prompt(30)
        key = await m.begin_held(5, prompt, max_tokens=NUM_TOKENS)
        if not is_stuck:
            release_when_taken_out(m, 0)
        stopping = asyncio.create_task(m.workers[0].stop())
        moved = (await m.last_word(0, key, sample)).moved
        assert moved.HasField("handle") != is_stuck
        if is_stuck:
            assert moved.reason == "deadline"  # no sooner than it must
        model.release()
        await stopping
        await finish(m, moved, sample, prompt)
        with pytest.raises(Unavailable):
            await m.at(0).ask_engine()


async def test_another_node_fetches_what_the_leaving_worker_stored(tmp_path: Path) -> None:
    async with movers(tmp_path, has_two_nodes=True) as m:
        prompt, model = prompt_of(30), m.at(0).model
        model.hold()
        following = [asyncio.create_task(m.follow(prompt, max_tokens=60)) for _ in range(3)]
        await until(lambda: m.states(0) == ["running"] * 3)
        await until(model.is_held.is_set)
        model.allow(10)
        await until(model.is_held.is_set)
        release_when_taken_out(m, 0)
        m.leave(0)
        for one in await asyncio.gather(*following):
            assert one.sample.token_ids == GatedModel().generate(prompt, 60)
            assert [moved.HasField("handle") for moved in one.moved] == [True]
            assert one.legs[1].num_tokens_computed == 0 and not one.legs[1].recomputed
            assert {count.node_id for count in one.legs[1].from_store} <= {m.node_id}
        m.stay(0)
        await m.check()


# ---- the store drains: what has leases on it is served, and nothing new is stored


async def test_a_moved_stream_is_fetched_from_a_store_that_drains(tmp_path: Path) -> None:
    async with movers(tmp_path) as m:
        prompt = m.new_prompt(30)
        moved, sample = await m.moved(prompt, max_tokens=NUM_TOKENS)
        draining = asyncio.create_task(m.drain_store(20.0))
        await until(lambda: m.is_store_draining)
        assert await m.at(1).put_one() == 2, "nothing new is stored"
        assert not draining.done(), "the handle's lease lives"
        assert_nothing_computed(await finish(m, moved, sample, prompt))
        assert await draining


async def test_a_lease_that_is_not_given_back_does_not_keep_it(tmp_path: Path) -> None:
    async with movers(tmp_path) as m:
        key = await m.begin(0, m.new_prompt(30), max_tokens=4)
        await m.streams[0].collect(key)
        await m.at(0).settle()
        await m.pin_one(20.0)
        assert not await m.drain_store(0.2)


async def test_a_store_without_leases_ends_at_once(tmp_path: Path) -> None:
    async with movers(tmp_path) as m:
        assert await m.drain_store(20.0)


SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'


async def drained_meanwhile(
    m: Movers, rng: random.Random, asks: list[tuple[list[int], dict[str, Any]]]
) -> list[Told]:
    """Run all at once; again and again, after some more tokens, whichever worker serves drains."""
    num_tokens = 0
    news = asyncio.Event()

    def on_tokens() -> None:
        nonlocal num_tokens
        num_tokens += 1
        news.set()

    async def drain() -> None:
        index = 0
        while True:
            wanted = num_tokens + rng.randint(1, 40)
            while num_tokens < wanted:
                news.clear()
                await news.wait()
            m.stay(1 - index)
            m.leave(index, LEAVE_S)
            await until(lambda index=index: not m.states(index), LEAVE_S + WAIT_S)
            index = 1 - index

    draining = asyncio.create_task(drain())
    told = await asyncio.gather(*(m.follow(prompt, on_tokens, **ask) for prompt, ask in asks))
    if draining.done():
        draining.result()  # its error
    draining.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await draining
    for index in range(2):
        m.stay(index)
    return told


def check_sums(told: Told, prompt: list[int]) -> None:
    """A leg that drew had all of the prompt by its own account; one that moved before it did, no
    more than that."""
    ends = [moved.num_output_tokens[0] for moved in told.moved] + [len(told.sample.token_ids)]
    for leg, before, end in zip(told.legs, [0, *ends], ends, strict=False):
        total = leg.num_tokens_computed + leg.num_tokens_local
        total += sum(count.num_tokens for count in leg.from_store)
        assert total == len(prompt) if end > before else total <= len(prompt), (leg, before, end)


def check_legs(told: Told, prompt: list[int]) -> None:
    """Every leg behind a move had the prompt's KV by the handle, and what each says sums up."""
    check_sums(told, prompt)
    legs = zip(told.moved, told.legs[1:], told.had_handle[1:], strict=True)
    for moved, leg, had_handle in legs:
        if moved.reason == "missing":  # nothing was computed yet
            assert moved.num_output_tokens[0] == 0 and not moved.HasField("handle")
            assert not moved.HasField("leg")
            continue
        assert moved.HasField("handle") and moved.reason == "draining", moved
        assert moved.HasField("leg")
        num_left = len(prompt) + moved.num_output_tokens[0] - 1 - moved.handle.num_tokens
        assert 0 <= num_left
        if had_handle and moved.handle.num_tokens >= len(prompt):
            assert leg.num_tokens_computed == 0 and not leg.recomputed, leg


@pytest.mark.parametrize(
    ("preemption", "is_ahead"),
    third(itertools.product(["never", "recompute", "swap"], [False, True])),
)
async def test_moved_streams_draw_what_they_would_have_drawn(
    tmp_path: Path, preemption: str, is_ahead: bool, seed: int, scale: Callable[[int], int]
) -> None:
    """60 rounds of 6 requests."""
    rng = random.Random(seed)
    fake, make_engine = GatedModel(), fake_engines(preemption=preemption, is_ahead=is_ahead)
    num_moved = num_whole = 0  # of those that had drawn something
    async with movers(tmp_path, make_engine=make_engine) as m:
        round_ = 0
        # A machine that is slow moves few; on and on until that shows something, too.
        while round_ < scale(60) or num_moved <= scale(60):
            assert round_ < 20 * scale(60), (num_moved, num_whole)
            round_ += 1
            asks = []
            for place in range(6):
                prompt = prompt_of(rng.randint(1, 40), start=rng.randint(1, 9) + place)
                asks.append((list(prompt), {"max_tokens": rng.randint(1, 60)}))
            told = await drained_meanwhile(m, rng, asks)
            for one, (prompt, ask) in zip(told, asks, strict=True):
                assert one.sample.token_ids == fake.generate(prompt, ask["max_tokens"]), round_
                drawn = [moved for moved in one.moved if moved.num_output_tokens[0] > 0]
                num_moved += len(drawn)
                num_whole += sum(moved.HasField("handle") for moved in drawn)
                if preemption == "never":
                    check_legs(one, prompt)
            await m.check()
    assert num_whole > num_moved / 2, (num_moved, num_whole)


KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 7, "logprobs": 2},
    {"temperature": 0.8, "seed": 8, "min_p": 0.02, "top_k": 40, "repetition_penalty": 1.2},
    {"presence_penalty": 0.8, "frequency_penalty": 0.4, "logprobs": 0, "trace": True},
    {"json_schema": SCHEMA, "ignore_eos": False, "temperature": 0.7, "seed": 3},
    {"regex": "(ab|cd){3,30} [0-9]+", "ignore_eos": False, "temperature": 1.0, "seed": 5},
    {"stop_token_ids": list(range(0, 2048, 17)), "temperature": 1.0, "seed": 11, "min_tokens": 9},
    {"no_repeat_ngram": 2, "temperature": 0.5, "seed": 12},
]


async def test_a_real_model_goes_on_exactly_with_every_kind_of_parameter(
    tmp_path: Path, seed: int, scale: Callable[[int], int]
) -> None:
    """20 rounds of all kinds at once, against one engine alone."""
    rng = random.Random(seed)
    reference = bundled_engine()
    num_moved = 0
    async with movers(tmp_path, make_engine=bundled_engine) as m:
        round_ = 0
        while round_ < scale(20) or num_moved < scale(20) * 4:
            assert round_ < 20 * scale(20), num_moved
            round_ += 1
            asks = []
            for kind in KINDS:
                length = rng.choice([5, 16, 21, 40])
                prompt = [rng.randrange(30, 2000) for _ in range(length)]
                asks.append((prompt, {"max_tokens": 40, **kind}))
            told = await drained_meanwhile(m, rng, asks)
            for one, (prompt, ask) in zip(told, asks, strict=True):
                # Not on the loop: what is under way there has deadlines.
                (expected,) = await asyncio.to_thread(alone, reference, prompt, **ask)
                assert one.sample.token_ids == expected.token_ids, (round_, ask)
                assert one.sample.finish_reason == expected.finish_reason, (round_, ask)
                num_tokens = len(one.sample.token_ids)
                assert len(one.sample.logprobs) == (num_tokens if "logprobs" in ask else 0)
                assert len(one.sample.traces) == (num_tokens if "trace" in ask else 0)
                num_moved += len(one.moved)
                check_legs(one, prompt)
            await m.check()
    reference.close()


# ---- a prefill worker


PROMPT = prompt_of(30, start=3)
LONG = prompt_of(200, start=3)
DIRECT = common_pb2.HANDOVER_PATH_DIRECT


async def decoded(
    p: Pair, reply: Any, prompt: tuple[int, ...] = PROMPT, name: str = "r"
) -> list[int]:
    """All tokens, of a handle that must be of use."""
    answer = await p.decode_from(reply, prompt, name=name)
    assert answer.leg.num_tokens_computed == 0 and not answer.recomputed
    return answer.token_ids


async def test_what_was_taken_in_is_answered_and_what_is_new_is_not(tmp_path: Path) -> None:
    async with pair(tmp_path, limits=patient(drain_s=60.0), prefill_blocks=64) as p:
        beats = Beats(p.at_prefill)
        p.prefill_model.hold()
        calls = {}
        for name in ("running", "queued"):  # the second waits for the first one's blocks
            calls[name] = p.call(LONG, name=name)
            await until(lambda: len(p.at_prefill.states()) == len(calls))
        await until(p.prefill_model.is_held.is_set)
        stopping = asyncio.create_task(p.prefill.stop())
        await until(lambda: p.at_prefill.is_draining)
        assert beats.told == ["draining"]
        with pytest.raises(Unavailable, match="draining") as refused:
            await p.run_prefill(PROMPT, name="new")
        assert refused.value.retry_after_s == 0
        p.prefill_model.release()
        for name, call in calls.items():
            tokens = await decoded(p, await whole(call), LONG, name)
            assert tokens == p.expected(LONG, 8)
        await stopping
        assert beats.told == ["draining", "gone, 0 live, 0 lent"]


@pytest.mark.parametrize("is_taken", [True, False])
async def test_lent_blocks_are_waited_for_as_long_as_there_is_time(
    tmp_path: Path, is_taken: bool
) -> None:
    async with pair(tmp_path, limits=patient(drain_s=60.0 if is_taken else 0.3)) as p:
        beats = Beats(p.at_prefill)
        reply = await p.run_prefill(PROMPT, handover=DIRECT)
        stopping = asyncio.create_task(p.prefill.stop())
        await until(lambda: p.at_prefill.is_draining)
        if is_taken:
            assert beats.told == ["draining"]
            assert await decoded(p, reply) == p.expected(PROMPT, 8)
        await stopping
        num_lent = 0 if is_taken else 8
        assert beats.told == ["draining", f"gone, 0 live, {num_lent} lent"]


async def test_a_prompt_without_a_handle_is_stored_before_it_ends(tmp_path: Path) -> None:
    async with pair(tmp_path, limits=patient(drain_s=60.0)) as p:
        gate = p.at_prefill.home.hold("put")
        await whole(p.call(PROMPT, max_tokens=1, wants_handle=False))
        stopping = asyncio.create_task(p.prefill.stop())
        await until(lambda: p.at_prefill.is_draining)
        gate.open()
        await stopping
        assert not p.at_prefill.not_stored_behind
        assert p.num_stored(PROMPT) == 7


async def test_blocks_behind_the_answer_are_stored_before_it_ends(tmp_path: Path) -> None:
    async with pair(tmp_path, limits=patient(drain_s=60.0)) as p:
        gate = p.at_prefill.home.hold("put")
        reply = await p.run_prefill(PROMPT, handover=DIRECT)
        assert reply.leg.num_blocks_behind == 7
        stopping = asyncio.create_task(p.prefill.stop())
        await until(lambda: p.at_prefill.is_draining)
        assert await decoded(p, reply) == p.expected(PROMPT, 8)
        gate.open()
        await stopping
        assert not p.at_prefill.not_stored_behind
        assert p.num_stored(PROMPT) == 7
