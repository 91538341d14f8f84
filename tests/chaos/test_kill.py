"""A part dies in the middle, or all are restarted in their turn: no request fails, every stream is
exact, nothing leaks, and the next lives are met by incarnation. An adapter that is loaded, reloaded
or unloaded meanwhile is so on every worker, or on none, and stays so."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from baton import ClusterConfig, LocalCluster, cli
from baton.answers import Completion
from baton.client import Client, SyncClient
from baton.cluster.supervisor import ProcessInfo, ProcessState
from baton.errors import BatonError, InvalidArgument
from tests.conftest import LONG, TURN, third
from tests.harness.adapters import merged, save_adapter
from tests.harness.cluster import STORE_SIZE, Oracle, assert_idle, oracle, prompts, streamed
from tests.harness.rolling import LONG_TOKENS, Load, asks

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.e2e,
    pytest.mark.chaos,
    pytest.mark.timeout(1500 if LONG else 240),
]

MODEL = ClusterConfig().model
BUDGET_S = 30.0
KILL_BUDGET_S = 240.0
"""Of a request whose only decode worker is killed, and starts again beside everything else."""
NUM_STREAMS = 8 if LONG else 5
MAX_TOKENS = 64
GREEDY: dict[str, Any] = {
    "max_tokens": MAX_TOKENS,
    "temperature": 0.0,
    "ignore_eos": True,
    "timeout_s": BUDGET_S,
}
VICTIMS = ("store", "prefill-0", "prefill-1", "redis", "decode-0")
ADAPTER_VICTIMS = ("prefill-0", "decode-0", "router", "redis")
"""A third of them in the short run. That a worker or Redis dies under a change, each time:
tests/wire/test_adapter_changes.py."""
ADAPTER_BUDGET_S = 90.0
ADAPTER_TOKENS = 12
# (transport, victim). The other rows of the failure table are tests/wire's each time.
KILLS = [
    (transport, victim)
    for transport, victim in itertools.product(("shm", "nixl", "grpc"), VICTIMS)
    if LONG or (transport == "shm" and victim in ("store", "decode-0"))
]


@pytest.fixture(scope="module")
def pairs(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    config = ClusterConfig(
        port=0,
        num_prefill=2,
        num_decode=2,
        transport=request.param,
        # What a dead router or decode worker leaves (handles, an adapter that was prepared) is soon
        # forgotten.
        overrides=(
            STORE_SIZE,
            "worker.limits.lease_ttl_s=5.0",
            "router.times.adapter_s=30.0",
            "router.times.max_step_s=10",
        ),
    )
    with LocalCluster(config) as running:
        yield running


@pytest.fixture(scope="module")
def lone() -> Iterator[LocalCluster]:
    """One worker of each role, as by default, and as the chart's."""
    config = ClusterConfig(
        port=0, overrides=(STORE_SIZE, "worker.limits.lease_ttl_s=5.0", "router.times.max_step_s=6")
    )
    with LocalCluster(config) as running:
        yield running


@pytest.fixture(scope="module")
def reference() -> Oracle:
    return oracle(MODEL)


async def _disturbed(
    cluster: LocalCluster, wanted: Sequence[Sequence[int]], victim: str
) -> list[Completion | BaseException]:
    """Run all streams; SIGKILL `victim` (it is restarted) once the first token has come."""
    began = time.monotonic()
    started = asyncio.Event()
    async with Client(cluster.address) as client:
        streams = [
            asyncio.create_task(streamed(client, prompt, started, **GREEDY)) for prompt in wanted
        ]
        async with asyncio.timeout(BUDGET_S):
            await started.wait()
        await asyncio.to_thread(cluster.kill, victim)
        answers = await asyncio.gather(*streams, return_exceptions=True)
    assert time.monotonic() - began < BUDGET_S + 5, "a stream outlived its deadline"
    return list(answers)


def _expected(reference: Oracle, wanted: Sequence[Sequence[int]]) -> list[list[int]]:
    """All MAX_TOKENS tokens of each: EOS ends none of them."""
    reference.model.generation_config.eos_token_id, eos = None, reference.eos_token_ids
    try:
        return [reference.greedy(prompt, MAX_TOKENS) for prompt in wanted]
    finally:
        reference.model.generation_config.eos_token_id = sorted(eos)


def _retried(cluster: LocalCluster, worker_id: str) -> set[str]:
    """Requests that the router gave to another prefill worker after `worker_id` failed them."""
    log = cluster.processes["router"].log_path.read_text(encoding="utf-8")
    lines = [json.loads(line) for line in log.splitlines() if '"prefill_retried"' in line]
    return {line["request_id"] for line in lines if line["worker_id"] == worker_id}


async def _meet_both_prefill_workers(client: Client) -> None:
    """Connected, a stopped worker keeps its calls; not yet, the router soon takes another."""
    met: set[str] = set()
    for index in range(200):
        answer = await client.complete([100 + index] * 5, max_tokens=1, timeout_s=BUDGET_S)
        met.update(leg.worker_id for leg in answer.provenance.legs)
        if met >= {"prefill-0", "prefill-1"}:
            return
    raise AssertionError(f"200 prompts met only {met}")


@pytest.mark.long
@pytest.mark.parametrize("pairs", ["shm"], indirect=True)
async def test_a_prefill_worker_killed_before_its_answer_is_replaced(
    pairs: LocalCluster, reference: Oracle, seed: int
) -> None:
    """Stopped first, so that it surely holds prompts that it has not answered when it dies."""
    wanted = prompts(reference, random.Random(f"{seed}-stopped"), NUM_STREAMS)
    request_ids = [f"stopped-{index}" for index in range(NUM_STREAMS)]
    has_token = [asyncio.Event() for _ in wanted]
    async with Client(pairs.address) as client:
        await _meet_both_prefill_workers(client)
        os.kill(pairs.processes["prefill-0"].pid, signal.SIGSTOP)
        try:
            streams = [
                asyncio.create_task(
                    streamed(client, prompt, started, request_id=request_id, **GREEDY)
                )
                for prompt, started, request_id in zip(wanted, has_token, request_ids, strict=True)
            ]
            # One ran to its end: by then the others were given to a worker long ago.
            done, _ = await asyncio.wait(
                streams, timeout=BUDGET_S / 2, return_when=asyncio.FIRST_COMPLETED
            )
            assert done, "prefill-1 serves nothing"
            without = {
                request_id
                for request_id, started in zip(request_ids, has_token, strict=True)
                if not started.is_set()
            }
        finally:
            await asyncio.to_thread(pairs.kill, "prefill-0")
        answers = await asyncio.gather(*streams)
    assert 0 < len(without) < NUM_STREAMS
    retried = _retried(pairs, "prefill-0") & set(request_ids)
    assert retried, "the router gave the stopped worker nothing"
    assert retried & without, "what it held at its death was not given to the other"
    for answer, right in zip(answers, _expected(reference, wanted), strict=True):
        assert list(answer.token_ids) == right
        (prefill,) = (leg for leg in answer.provenance.legs if leg.role == "prefill")
        assert prefill.worker_id == "prefill-1"
    await asyncio.to_thread(pairs.wait_ready, 60)
    await asyncio.to_thread(assert_idle, pairs)


@pytest.mark.long
@pytest.mark.parametrize("pairs", ["shm"], indirect=True)
async def test_a_stream_leaves_a_decode_worker_that_is_stopped(
    pairs: LocalCluster, seed: int
) -> None:
    """SIGSTOP: its connection stays, its heartbeat does not."""
    await asyncio.to_thread(pairs.wait_ready, KILL_BUDGET_S)
    (ask,) = asks(MODEL, seed, 1, LONG_TOKENS)
    options = {**ask.options, "timeout_s": KILL_BUDGET_S}
    tokens: list[int] = []
    victim, pid, end = "", 0, None
    async with Client(pairs.address) as client:
        try:
            async for chunk in client.generate(list(ask.prompt), request_id="left", **options):
                tokens += chunk.token_ids
                end = chunk.end
                if not victim and len(tokens) > 1:  # the first may be the prefill worker's
                    victim = (await client.explain("left")).decisions[-1].decode_id
                    pid = pairs.processes[victim].pid
                    os.kill(pid, signal.SIGSTOP)
        finally:
            if pid:
                os.kill(pid, signal.SIGCONT)
    assert tokens == list(ask.right)
    assert end is not None and end.provenance is not None
    lost = [leg.worker_id for leg in end.provenance.legs if leg.ended_by == "worker_lost"]
    assert lost == [victim], end.provenance.legs
    await asyncio.to_thread(pairs.wait_ready, KILL_BUDGET_S)
    await asyncio.to_thread(assert_idle, pairs)


@pytest.mark.parametrize("pairs", ["shm"], indirect=True)
async def test_a_frozen_decode_worker_is_named_and_started_again(
    pairs: LocalCluster, seed: int
) -> None:
    """Its stream goes on at the other one, token for token."""
    await asyncio.to_thread(pairs.wait_ready, KILL_BUDGET_S)
    (ask,) = asks(MODEL, seed, 1, LONG_TOKENS)
    options = {**ask.options, "timeout_s": KILL_BUDGET_S}
    tokens: list[int] = []
    end = None
    async with Client(pairs.address) as client:
        stream = client.generate(list(ask.prompt), request_id="frozen", **options)
        while len(tokens) < 2:  # the first may be the prefill worker's
            tokens += (await anext(stream)).token_ids
        victim = (await client.explain("frozen")).decisions[-1].decode_id
        frozen = pairs.processes[victim]
        os.kill(frozen.pid, signal.SIGSTOP)
        await _until_named(pairs, client, frozen)
        async for chunk in stream:
            tokens += chunk.token_ids
            end = chunk.end
        assert tokens == list(ask.right)
        assert end is not None and end.provenance is not None
        lost = [leg.worker_id for leg in end.provenance.legs if leg.ended_by == "worker_lost"]
        assert lost == [victim], end.provenance.legs
        async with asyncio.timeout(KILL_BUDGET_S):
            while pairs.processes[victim].num_restarts == frozen.num_restarts:
                await asyncio.sleep(0.1)
        await asyncio.to_thread(pairs.wait_ready, KILL_BUDGET_S)
        assert not [said for said in (await client.status()).problems if victim in said]
    await asyncio.to_thread(assert_idle, pairs)


async def _until_named(cluster: LocalCluster, client: Client, frozen: ProcessInfo) -> None:
    """By its heartbeat, before it is started again."""
    named = f"decode worker {frozen.name} has no heartbeat"
    while not any(named in each for each in (await client.status()).problems):
        assert cluster.processes[frozen.name].num_restarts == frozen.num_restarts
        await asyncio.sleep(0.1)


@pytest.mark.long
async def test_a_stream_of_the_only_decode_worker_waits_for_its_next_life(
    lone: LocalCluster, seed: int
) -> None:
    """It is frozen, named and started again; the stream goes on there, token for token."""
    (ask,) = asks(MODEL, seed, 1, LONG_TOKENS)
    options = {**ask.options, "timeout_s": KILL_BUDGET_S}
    tokens: list[int] = []
    async with Client(lone.address) as client:
        stream = client.generate(list(ask.prompt), **options)
        while len(tokens) < 2:  # the first may be the prefill worker's
            tokens += (await anext(stream)).token_ids
        frozen = lone.processes["decode-0"]
        os.kill(frozen.pid, signal.SIGSTOP)
        await _until_named(lone, client, frozen)
        async for chunk in stream:
            tokens += chunk.token_ids
        assert tokens == list(ask.right)
        assert lone.processes["decode-0"].num_restarts == frozen.num_restarts + 1
        assert not (await client.status()).problems
    await asyncio.to_thread(assert_idle, lone)


@pytest.mark.parametrize(("pairs", "victim"), KILLS, indirect=["pairs"])
async def test_killing_a_part_leaves_every_stream_exact(
    pairs: LocalCluster, reference: Oracle, seed: int, victim: str
) -> None:
    rng = random.Random(f"{seed}-{victim}")
    wanted = prompts(reference, rng, NUM_STREAMS)
    answers = await _disturbed(pairs, wanted, victim)
    expected = _expected(reference, wanted)
    for answer, right in zip(answers, expected, strict=True):
        assert not isinstance(answer, BaseException), repr(answer)
        assert list(answer.token_ids) == right
    await asyncio.to_thread(pairs.wait_ready, 60)
    await asyncio.to_thread(assert_idle, pairs)
    # The new life serves, and by the usual way.
    async with Client(pairs.address) as client:
        again = await client.complete(
            list(wanted[0]), max_tokens=4, temperature=0.0, ignore_eos=True
        )
        assert list(again.token_ids) == expected[0][:4]
        assert [leg.role for leg in again.provenance.legs] == ["prefill", "decode"]
    await asyncio.to_thread(assert_idle, pairs)


@pytest.mark.parametrize("pairs", ["shm"], indirect=True)
async def test_no_request_fails_while_all_parts_are_restarted(
    pairs: LocalCluster, seed: int
) -> None:
    """As in a rollout of every role at once, and then with fewer workers for a while. The short
    run only restarts one part of each kind, the decode worker in the middle of a stream."""
    waves = [("prefill-0", "router"), ("store",)]
    if LONG:
        waves = [("prefill-0", "decode-0", "router"), ("store",)]
        waves += [("prefill-1", "decode-1", "router-1")]
    load = Load(pairs, asks(MODEL, seed, 60 if LONG else 8), num_wanted=2000 if LONG else 20)
    (long,) = asks(MODEL, seed, 1, LONG_TOKENS)
    async with load, asyncio.TaskGroup() as group:
        group.create_task(load.run())
        before = {name: info.pid for name, info in pairs.processes.items()}
        for names in waves:
            await load.restart(*names)
        after = {name: info.pid for name, info in pairs.processes.items()}
        await load.restart_under(long)
        if LONG:
            await load.scale_down_and_up("prefill-0", "decode-1")
        load.is_enough = True
    assert load.num_right == load.num_asked >= load.num_wanted
    assert all(before[name] != after[name] for names in waves for name in names)
    assert load.moves["moved"] > 0, f"no stream was moved: {load.moves}"
    await asyncio.to_thread(assert_idle, pairs)


@dataclass(frozen=True)
class _Change:
    """A command about the adapter `tales`."""

    command: list[str]
    took_s: float
    """Undisturbed."""
    right: list[int]
    """What the adapter answers after it; nothing where it is not loaded."""


@pytest.fixture(scope="module")
def prompt(reference: Oracle) -> list[int]:
    return list(prompts(reference, random.Random(3), 1)[0])


@pytest.fixture(scope="module")
def changes(
    pairs: LocalCluster,
    reference: Oracle,
    prompt: list[int],
    tmp_path_factory: pytest.TempPathFactory,
) -> list[_Change]:
    """Load, reload with other weights, and unload: nothing is loaded before and after them."""
    base = tmp_path_factory.mktemp("adapters")
    folders = [save_adapter(base / str(seed), reference.model, seed) for seed in (1, 2)]
    commands = [["load", "tales", str(folder)] for folder in folders] + [["unload", "tales"]]
    answers = [
        Oracle(reference.path, merged(reference.model, folder), reference.tokenizer).greedy(
            prompt, ADAPTER_TOKENS
        )
        for folder in folders
    ]
    assert answers[0] != answers[1]
    made = []
    for command, right in zip(commands, [*answers, []], strict=True):
        began_s = time.monotonic()
        assert _adapter(pairs, command) == 0
        made.append(_Change(command, time.monotonic() - began_s, right))
    return made


def _adapter(cluster: LocalCluster, command: list[str]) -> int:
    return cli.main(["adapter", *command, "--address", cluster.address])


def _ask_adapter(cluster: LocalCluster, prompt: list[int]) -> list[int]:
    """An answer; none: there is no such adapter. Retries while parts are away."""
    deadline_s = time.monotonic() + ADAPTER_BUDGET_S
    asked: dict[str, Any] = {"adapter": "tales", "max_tokens": ADAPTER_TOKENS, "temperature": 0.0}
    while True:
        try:
            with SyncClient(cluster.address) as client:
                return list(client.complete(prompt, timeout_s=BUDGET_S, **asked).token_ids)
        except InvalidArgument:
            return []
        except BatonError:
            assert time.monotonic() < deadline_s
            time.sleep(0.1)


def _wait_alike(cluster: LocalCluster, num_adapters: int) -> None:
    """Until every worker has the same contents, and so many."""
    deadline_s = time.monotonic() + ADAPTER_BUDGET_S
    while True:
        found = _contents(cluster)
        if found and all(each == found[0] and len(each) == num_adapters for each in found):
            return
        assert time.monotonic() < deadline_s, found
        time.sleep(0.1)


def _contents(cluster: LocalCluster) -> list[set[str]]:
    """Digests of each worker's adapters; nothing while a part is away."""
    try:
        with SyncClient(cluster.address) as client:
            status = client.status()
    except BatonError:
        return []
    if len(status.workers) < 4 or not status.redis_reachable:
        return []
    return [{adapter.digest for adapter in worker.adapters} for worker in status.workers]


@pytest.mark.timeout(2300 if LONG else 600)
@pytest.mark.parametrize("pairs", ["shm"], indirect=True)
@pytest.mark.parametrize("victim", third(ADAPTER_VICTIMS))
def test_a_change_of_an_adapter_is_whole_or_not_at_all(
    pairs: LocalCluster, changes: list[_Change], prompt: list[int], victim: str, seed: int
) -> None:
    """The long run kills each victim 50 times; any other one once, under a change by the seed's
    turn, so that the turns meet all of them."""
    rng = random.Random(f"{seed}{victim}")
    first = 0 if LONG else (TURN + ADAPTER_VICTIMS.index(victim)) % len(changes)
    now: list[int] = []
    for change in changes[:first]:
        assert _adapter(pairs, change.command) == 0
        now = change.right
    num_kills = 50 if LONG else 1
    num_within = 0
    for number in range(first, first + num_kills):
        change = changes[number % len(changes)]
        codes: list[int] = []
        thread = threading.Thread(
            target=lambda codes=codes, change=change: codes.append(_adapter(pairs, change.command))
        )
        thread.start()
        time.sleep(rng.uniform(0.0, change.took_s))
        num_within += not codes
        pairs.kill(victim)
        thread.join(ADAPTER_BUDGET_S)
        assert codes, f"{change.command} does not end"
        found = _ask_adapter(pairs, prompt)
        assert found == change.right or (codes[0] != 0 and found == now)
        pairs.wait_ready(ADAPTER_BUDGET_S)  # the killed worker's next life counts, too
        _wait_alike(pairs, int(bool(found)))
        assert [_ask_adapter(pairs, prompt) for _ in range(4)] == [found] * 4
        now = found
    print(f"{victim}: {num_kills} kills, {num_within} before the change had ended")  # noqa: T201
    if now:
        assert _adapter(pairs, ["unload", "tales"]) == 0
    assert_idle(pairs)


@pytest.mark.long
def test_the_next_answer_after_a_kill_of_the_only_decode_worker_is_right(
    lone: LocalCluster,
) -> None:
    """README, "A cluster for your own tests": the next request was refused for 6.5 s once. Every
    time over the command line: tests/e2e/test_cli.py."""
    with SyncClient(lone.address) as client:
        before = client.complete("Once upon a time", temperature=0.0, timeout_s=KILL_BUDGET_S)
        lone.kill("decode-0")
        after = client.complete("Once upon a time", temperature=0.0, timeout_s=KILL_BUDGET_S)
    assert after.token_ids == before.token_ids
    lone.wait_ready(KILL_BUDGET_S)
    assert_idle(lone)


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "ignore_eos": True},
    "seeded": {"temperature": 1.0, "seed": 7, "ignore_eos": True},
    "schema": {
        "temperature": 1.0,
        "seed": 8,
        "json_schema": {
            "type": "object",
            "properties": {name: {"type": "string", "minLength": 12} for name in ("who", "where")},
            "required": ["who", "where"],
        },
    },
    "regex": {"temperature": 1.0, "seed": 9, "regex": "([a-z]{3,8} ){12}the end"},
    "samples": {"temperature": 1.0, "seed": 10, "n": 2, "ignore_eos": True},
    "penalties": {
        "temperature": 0.7,
        "seed": 11,
        "ignore_eos": True,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
    },
}
"""Requests that decode workers are killed under, by what they ask for."""


@dataclass
class _Answer:
    """What came of one request."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    """By sample."""
    reasons: dict[int, str] = field(default_factory=dict)
    longest_gap_s: float = 0.0
    num_lost: int = 0
    """Workers that it lost."""


async def _ask(
    client: Client, prompt: Sequence[int], kind: str, on_tokens: Callable[[int], None]
) -> _Answer:
    answer, last_s = _Answer(), time.monotonic()
    async for chunk in client.generate(
        list(prompt), max_tokens=MAX_TOKENS, timeout_s=KILL_BUDGET_S, **KINDS[kind]
    ):
        now_s = time.monotonic()
        answer.longest_gap_s, last_s = max(answer.longest_gap_s, now_s - last_s), now_s
        answer.tokens.setdefault(chunk.sample_index, []).extend(chunk.token_ids)
        on_tokens(len(chunk.token_ids))
        if chunk.end is not None:
            answer.reasons[chunk.sample_index] = chunk.end.finish_reason
            if chunk.end.provenance is not None:
                legs = chunk.end.provenance.legs
                answer.num_lost = sum(leg.ended_by == "worker_lost" for leg in legs)
    return answer


class _Kills:
    """Rounds of one request of each kind, in each of which a decode worker is killed at a random
    token of theirs."""

    def __init__(self, cluster: LocalCluster, client: Client, rng: random.Random) -> None:
        self._cluster = cluster
        self._client = client
        self._rng = rng
        self.num_kills = 0
        self.num_streams = 0
        self.gaps_s: list[float] = []
        """The longest of each stream that lost a worker."""

    async def round(self, prompt: Sequence[int], right: dict[str, _Answer]) -> None:
        """Raises: AssertionError naming the request that was answered otherwise."""
        num_all = sum(len(ids) for answer in right.values() for ids in answer.tokens.values())
        kill_at = self._rng.randrange(1, num_all // 2)
        num_seen, is_time = 0, asyncio.Event()

        def on_tokens(num: int) -> None:
            nonlocal num_seen
            num_seen += num
            if num_seen >= kill_at:
                is_time.set()

        async with asyncio.timeout(2 * KILL_BUDGET_S), asyncio.TaskGroup() as group:
            streams = {
                kind: group.create_task(_ask(self._client, prompt, kind, on_tokens))
                for kind in right
            }
            await is_time.wait()
            await asyncio.to_thread(self._cluster.kill, self._victim())
            self.num_kills += 1
        for kind, stream in streams.items():
            answer = stream.result()
            about = (kind, kill_at, answer)
            assert answer.tokens == right[kind].tokens, about
            assert answer.reasons == right[kind].reasons, about
            self.num_streams += 1
            if answer.num_lost:
                self.gaps_s.append(answer.longest_gap_s)
        if self._rng.random() < 0.5:  # otherwise the next kill may come while this one restarts
            await asyncio.to_thread(self._cluster.wait_ready, KILL_BUDGET_S)

    def _victim(self) -> str:
        """Any decode worker that serves."""
        return self._rng.choice(
            [
                info.name
                for info in self._cluster.processes.values()
                if info.kind == "decode" and info.state is ProcessState.READY
            ]
        )

    def report(self) -> str:
        """The figures of all rounds."""
        gaps = sorted(self.gaps_s)
        p99 = gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))]
        return (
            f"{self.num_kills} kills, {self.num_streams} streams, {len(gaps)} of them lost a "
            f"worker; longest gap of those: p50 {statistics.median(gaps):.2f} s, p99 {p99:.2f} s"
        )


@pytest.mark.long
@pytest.mark.timeout(5400)
async def test_kills_of_the_only_decode_worker_cost_no_stream_a_token(
    lone: LocalCluster, reference: Oracle, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever is asked for, at whichever token: each waits for the worker's next life."""
    with capsys.disabled():
        await _kill_again_and_again(lone, reference, random.Random(f"{seed}-one"))


@pytest.mark.parametrize("pairs", ["shm"], indirect=True)
@pytest.mark.long
@pytest.mark.timeout(5400)
async def test_kills_of_two_decode_workers_cost_no_stream_a_token(
    pairs: LocalCluster, reference: Oracle, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same; the other one may be restarting from the kill before."""
    with capsys.disabled():
        await _kill_again_and_again(pairs, reference, random.Random(f"{seed}-two"))


async def _kill_again_and_again(
    cluster: LocalCluster, reference: Oracle, rng: random.Random
) -> None:
    (prompt,) = prompts(reference, rng, 1)
    async with Client(cluster.address) as client:
        right = {kind: await _ask(client, prompt, kind, lambda num: None) for kind in KINDS}
        assert all(len(ids) > 8 for answer in right.values() for ids in answer.tokens.values())
        kills = _Kills(cluster, client, rng)
        for _ in range(100):
            await kills.round(prompt, right)
    assert kills.gaps_s, "no stream lost its worker"
    sys.stdout.write(f"\n{kills.report()}\n")
    await asyncio.to_thread(cluster.wait_ready, KILL_BUDGET_S)
    await asyncio.to_thread(assert_idle, cluster)
