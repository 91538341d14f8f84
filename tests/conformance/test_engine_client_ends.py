"""How engines in processes of their own end: killed, stuck, failed, refused, closed, orphaned. Each
time everyone who waits hears of it in bounded time, and no process is left."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.errors import LoadError
from engine.request import Sampling
from engine.testing.fake_model import FakeModel
from engine_client import child_process_link, messages
from engine_client.async_client import AsyncProcessClient
from engine_client.config import ClientLimits
from engine_client.in_process import InProcessClient
from engine_client.interface import Ask, EngineClient, News
from engine_client.process_client import DataParallelClient, ProcessClient
from process.rpc_errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    Unavailable,
)
from tests.harness.engine_clients import fake
from tests.harness.fake_engine_child import HANGS, TRIPS
from tests.harness.waiting import block_until, until

ROOT = Path(__file__).resolve().parents[2]
CONFIG = EngineConfig(num_blocks=8000, num_threads=1)
BOUND_S = 60.0


def make_ask(name: str, num_prompt_tokens: int = 3, **sampling: object) -> Ask:
    fields = {"max_tokens": 15_000, "ignore_eos": True} | sampling
    prompt = tuple(range(5, 5 + num_prompt_tokens))
    return Ask(name, prompt, Sampling(**fields))  # type: ignore[arg-type]


def pids(client: DataParallelClient | AsyncProcessClient) -> list[int]:
    return [pid for pid in client.pids if pid is not None]


def assert_gone(*pids_of_children: int) -> None:
    """A process that is gone has no entry; one that ends is waited for."""
    processes = []
    for pid in pids_of_children:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    _, alive = psutil.wait_procs(processes, timeout=BOUND_S)
    assert not alive


def wait_news(client: EngineClient, names: set[str], *, over: bool) -> list[News]:
    """News until each of `names` has had some, or (`over`) its last."""
    news: list[News] = []
    ends_s = time.monotonic() + BOUND_S
    while names - {each.request_id for each in news if each.is_over or not over}:
        assert time.monotonic() < ends_s
        news += client.receive(1.0)
    return news


def wait_refused(client: EngineClient, rank: int, says: str) -> None:
    """An engine that failed says so, and ends a moment later."""
    names = map(str, itertools.count())

    def is_refused() -> bool:
        try:
            client.submit(make_ask(next(names)), rank=rank)
        except Unavailable as error:
            assert says in str(error)
            return True
        return False

    block_until(is_refused, BOUND_S)


@pytest.fixture(scope="module")
def ranks() -> Iterator[DataParallelClient]:
    """Three engines, of which each test ends one."""
    limits = ClientLimits(stop_timeout_s=0.2)
    with DataParallelClient(CONFIG, 3, program=fake("fine"), limits=limits) as client:
        children = pids(client)
        assert len(children) == client.num_engines == 3
        yield client
        client.close()  # and once more
    assert_gone(*children)


@pytest.mark.parametrize(
    ("rank", "how", "kind", "says"),
    [
        (0, "killed", Unavailable, "signal 9"),
        (1, "hangs", Unavailable, "said nothing for 300 s"),
        (2, "trips", Internal, "RuntimeError: the model tripped"),
    ],
)
def test_an_engine_that_ends_fails_what_it_served_and_the_others_go_on(
    ranks: DataParallelClient,
    rank: int,
    how: str,
    kind: type[BatonError],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SIGKILL in the middle of a generation; a step that never ends, which only its silence shows;
    one that raises, whose words are told."""
    beside = ["beside-1", "beside-2"] if how == "killed" else []
    for other, name in enumerate(beside, 1):
        ranks.submit(make_ask(name), rank=other)
    ranks.submit(make_ask(how, {"hangs": HANGS, "trips": TRIPS}.get(how, 3)), rank=rank)
    news = wait_news(ranks, {how, *beside}, over=False)
    with monkeypatch.context() as patch:
        if how == "killed":
            os.kill(pids(ranks)[rank], signal.SIGKILL)
        if how == "hangs":  # days pass between any two looks at the clock
            days = itertools.count(0.0, 86_400.0)
            patch.setattr(child_process_link, "time", SimpleNamespace(monotonic=lambda: next(days)))
        news += wait_news(ranks, {how}, over=True)
    (last,) = [each for each in news if each.is_over]
    assert last.request_id == how and last.failure is not None
    assert says in last.failure.message and isinstance(last.failure.to_error(), kind)
    wait_refused(ranks, rank, says)
    assert_gone(pids(ranks)[rank])
    if how == "trips":  # the last of them
        for refused in (lambda: ranks.submit(make_ask("after")), ranks.stats):
            with pytest.raises(Unavailable, match=r"no engine is alive: .*signal 9"):
                refused()
        return
    for name in beside:
        ranks.cancel(name)
    wait_news(ranks, set(beside), over=True)
    ranks.submit(make_ask(f"beside {how}", max_tokens=4))
    news = wait_news(ranks, {f"beside {how}"}, over=True)
    assert sum(len(each.token_ids) for each in news if each.request_id == f"beside {how}") == 4
    assert len(ranks.stats()) == 2 - rank
    ranks.check_integrity()


@pytest.fixture(scope="module")
def odd() -> Iterator[ProcessClient]:
    """Of an engine that takes its time to say how it is, and trips over another question."""
    with ProcessClient(CONFIG, program=fake("odd")) as client:
        children = pids(client)
        yield client
    assert_gone(*children)


def test_a_question_that_trips_the_engine_ends_nothing_else(odd: ProcessClient) -> None:
    odd.submit(make_ask("asked"))
    wait_news(odd, {"asked"}, over=False)
    with pytest.raises(Internal, match="RuntimeError: the question tripped"):
        odd.adapters()
    odd.check_integrity()
    odd.cancel("asked")
    last = wait_news(odd, {"asked"}, over=True)[-1]
    assert last.failure is not None and last.failure.kind == "Cancelled"


def test_an_engine_that_was_idle_for_long_may_be_asked(
    odd: ProcessClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its silence counts from the question on, not from what it said before."""
    odd.stats()
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 86_400.0)
    monkeypatch.setattr(child_process_link, "time", later)
    (stats,) = odd.stats()
    assert stats.num_running == 0
    odd.check_integrity()


def test_close_ends_what_is_live(odd: ProcessClient) -> None:
    """Last of these."""
    odd.submit(make_ask("live"))
    wait_news(odd, {"live"}, over=False)
    odd.close()
    for refused in (lambda: odd.submit(make_ask("x")), odd.stats, odd.check_integrity):
        with pytest.raises(FailedPrecondition, match="closed"):
            refused()
    odd.close()


def test_a_failed_step_in_this_process() -> None:
    class Failing(FakeModel):
        def forward(self, batch):  # type: ignore[no-untyped-def]
            if self.num_forwards == 2:
                raise RuntimeError("the model tripped")
            return super().forward(batch)

    client = InProcessClient(LLMEngine(EngineConfig(num_blocks=80), Failing()))
    client.submit(make_ask("live", max_tokens=20))
    client.submit(make_ask("next", max_tokens=20))
    news = wait_news(client, {"live", "next"}, over=True)
    failures = [each.failure for each in news if each.is_over]
    assert all(f is not None and "the model tripped" in f.message for f in failures)
    with pytest.raises(Unavailable, match="the model tripped"):
        client.submit(make_ask("after", max_tokens=2))
    client.close()


def test_what_cannot_be_loaded_is_refused_in_one_line() -> None:
    with pytest.raises(LoadError, match=r"^there is no such model$"):
        ProcessClient(CONFIG, program=fake("refusing"))
    assert not _children()


def test_a_program_that_ends_at_once_is_no_engine() -> None:
    with pytest.raises(Unavailable, match="exit code 3"):
        ProcessClient(CONFIG, program=(sys.executable, "-c", "raise SystemExit(3)"))
    with pytest.raises(Unavailable, match="cannot be started"):
        ProcessClient(CONFIG, program=("/no/such/program",))
    with pytest.raises(Unavailable, match="null byte"):
        ProcessClient(CONFIG, program=("a\0b",), limits=ClientLimits(start_timeout_s=5.0))
    assert not _children()


def _children() -> list[str]:
    """Command lines of engines that this process has started."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(" ".join(child.cmdline()))
    return [each for each in found if "engine" in each]


def test_a_client_that_is_dropped_takes_its_engine_with_it() -> None:
    client = ProcessClient(CONFIG, program=fake("fine"))
    children = pids(client)
    del client
    gc.collect()
    assert_gone(*children)


PARENT = """
import sys, time
from engine.config import EngineConfig
from engine_client.process_client import ProcessClient
if __name__ == "__main__":
    assert "torch" not in sys.modules, "only the engine needs it"
    end, *program = sys.argv[1:]
    client = ProcessClient(EngineConfig(num_blocks=8000), program=program)
    sys.stdout.write(f"{client.pids[0]}\\n")
    sys.stdout.flush()
    if end == "stay":
        time.sleep(3600)
"""


@pytest.mark.parametrize("end", ["stay", pytest.param("leave", marks=pytest.mark.long)])
def test_no_engine_outlives_its_parent(end: str) -> None:
    """The parent is killed, or just ends without a word (then the client is dropped, as above)."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, end, *fake("fine")],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    with parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        if end == "stay":
            assert psutil.pid_exists(child)
            parent.kill()
        assert parent.wait(BOUND_S) == (-signal.SIGKILL if end == "stay" else 0)
        assert_gone(child)


async def test_iterators_of_one_client_are_independent() -> None:
    """Several at once; one is left early, one is cancelled, one gives up waiting: the others go on,
    and the engine keeps nothing. When it is killed they hear of it."""
    async with await AsyncProcessClient.start(CONFIG, program=fake("fine")) as client:

        async def leave() -> None:
            news = client.generate(make_ask("left"))
            async for _ in news:
                break
            await news.aclose()

        async def be_cancelled() -> None:
            with pytest.raises(Cancelled):
                async for _ in client.generate(make_ask("cancelled")):
                    client.cancel("cancelled")

        async def give_up() -> None:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    async for _ in client.generate(make_ask("given-up")):
                        pass

        async def finish(name: str) -> int:
            ask = make_ask(name, max_tokens=50)
            return sum([len(news.token_ids) async for news in client.generate(ask)])

        done = await asyncio.gather(
            finish("first"), leave(), be_cancelled(), give_up(), finish("second")
        )
        assert (done[0], done[-1]) == (50, 50)
        async with asyncio.timeout(BOUND_S):
            while (await client.stats())[0].num_running:
                await asyncio.sleep(0.01)
        (stats,) = await client.stats()
        assert stats.num_waiting == stats.num_referenced_blocks == 0
        await client.check_integrity()
        live = client.generate(make_ask("live"))
        await anext(live)
        children = pids(client)
        os.kill(children[0], signal.SIGKILL)
        with pytest.raises(Unavailable, match="signal 9"):
            async for _ in live:
                pass
        with pytest.raises(Unavailable, match="signal 9"):
            await anext(client.generate(make_ask("after")))
        with pytest.raises(Unavailable, match="signal 9"):
            await client.stats()
    assert_gone(*children)


async def test_a_start_that_is_cancelled_leaves_no_process() -> None:
    limits = ClientLimits(stop_timeout_s=0.2)
    start = AsyncProcessClient.start(CONFIG, program=fake("fine"), limits=limits)
    starting = asyncio.create_task(start)
    await until(_children)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not _children()


LIARS = {
    "garbage": r"s.sendall(b'\x03\x00\x00\x00abc')",
    "too long": r"s.sendall(b'\xff\xff\xff\xff')",
    "another version": "s.sendall(struct.pack('<I', len(hello)) + hello)",
    "silence": "pass",
}


@pytest.mark.parametrize("lie", LIARS)
def test_a_child_that_breaks_the_rules_is_ended(lie: str) -> None:
    """Bytes that are no message, a length out of bounds, another version, nothing at all."""
    model = FakeModel().info
    hello = messages.encode(messages.Hello(messages.VERSION + 1, model))
    script = (
        "import socket, struct, sys, time\n"
        f"hello = {hello!r}\n"
        "s = socket.socket(fileno=int(sys.argv[1]))\n"
        f"{LIARS[lie]}\n"
        "time.sleep(3600)\n"
    )
    is_silent = lie == "silence"
    limits = ClientLimits(start_timeout_s=0.2 if is_silent else BOUND_S, stop_timeout_s=0.2)
    expected = DeadlineExceeded if is_silent else Unavailable
    with pytest.raises(expected):
        ProcessClient(CONFIG, program=(sys.executable, "-c", script), limits=limits)
    assert not [each for each in psutil.Process().children() if "socket" in str(each.cmdline())]


def test_an_engine_process_ends_when_its_client_breaks_the_rules() -> None:
    """Garbage, another version, or a client that is gone before it said a word."""
    start = messages.encode(messages.Start(messages.VERSION + 1, CONFIG))
    frames = {"garbage": b"abc", "another version": start, "gone": None}
    started_with = {lie: _engine_process(frame) for lie, frame in frames.items()}
    for lie, (process, ours) in started_with.items():
        with process, ours:
            assert process.wait(BOUND_S) == (0 if lie == "gone" else 2), lie


def _engine_process(frame: bytes | None) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """One that hears this frame; or the end, where there is none."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [*fake("fine"), str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stderr=subprocess.DEVNULL,
        )
    if frame is None:
        ours.close()
    else:
        ours.sendall(struct.pack("<I", len(frame)) + frame)
    return process, ours
