"""How engines in processes of their own end: killed, stuck, failed, refused, closed, orphaned. Each
time everyone who waits hears of it in bounded time, and no process is left."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.errors import LoadError
from engine.request import Sampling
from engine.testing.fake_model import FakeModel
from engine_client import messages
from engine_client.async_client import AsyncProcessClient
from engine_client.config import ClientLimits
from engine_client.in_process import InProcessClient
from engine_client.interface import Ask, EngineClient, News
from engine_client.process_client import ProcessClient
from process.errors import Cancelled, DeadlineExceeded, FailedPrecondition, Internal, Unavailable
from tests.harness.engine_clients import AsyncFace, fake, make_client

ROOT = Path(__file__).resolve().parents[2]
CONFIG = EngineConfig(num_blocks=8000, num_threads=1)
IN_CHILDREN = ("process", "async", "data_parallel")
BOUND_S = 60.0
QUICK = ClientLimits(silence_timeout_s=1.0, stop_timeout_s=2.0)


def make_ask(name: str, **sampling: object) -> Ask:
    fields = {"max_tokens": 15_000, "ignore_eos": True} | sampling
    return Ask(name, (5, 6, 7), Sampling(**fields))  # type: ignore[arg-type]


@contextlib.contextmanager
def started(
    kind: str, mode: str = "fine", limits: ClientLimits | None = None
) -> Iterator[EngineClient]:
    """A client over children with a FakeModel; afterwards its processes are gone."""
    client = make_client(kind, CONFIG, program=fake(mode), limits=limits)
    processes = [psutil.Process(pid) for pid in pids(client)]
    assert len(processes) == client.num_engines
    try:
        yield client
    finally:
        client.close()
        if isinstance(client, AsyncFace):
            client.end_loop()
    assert_gone(processes)


def pids(client: EngineClient) -> list[int]:
    return [pid for pid in client.pids if pid is not None]  # type: ignore[attr-defined]


def assert_gone(processes: list[psutil.Process]) -> None:
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


@pytest.mark.parametrize("kind", IN_CHILDREN)
def test_a_killed_engine_fails_what_it_served(kind: str) -> None:
    """SIGKILL in the middle of a generation. Other ranks go on; close comes twice, and last."""
    with started(kind) as client:
        for rank in range(client.num_engines):
            client.submit(make_ask(f"on-{rank}"), rank=rank)
        news = wait_news(client, {f"on-{rank}" for rank in range(client.num_engines)}, over=False)
        os.kill(pids(client)[0], signal.SIGKILL)
        news += wait_news(client, {"on-0"}, over=True)
        (last,) = [n for n in news if n.is_over]
        assert last.request_id == "on-0" and last.failure is not None
        error = last.failure.to_error()
        assert isinstance(error, Unavailable) and "signal 9" in str(error)
        with pytest.raises(Unavailable, match="signal 9"):
            client.submit(make_ask("after"), rank=0)
        if client.num_engines == 1:
            with pytest.raises(Unavailable, match="signal 9"):
                client.submit(make_ask("after"))
            with pytest.raises(Unavailable, match="signal 9"):
                client.stats()
        else:
            client.submit(make_ask("short", max_tokens=4))
            news += wait_news(client, {"short"}, over=True)
            assert sum(len(n.token_ids) for n in news if n.request_id == "short") == 4
            assert len(client.stats()) == 1
            client.cancel("on-1")
            if not any(n.is_over for n in news if n.request_id == "on-1"):
                wait_news(client, {"on-1"}, over=True)
            client.check_integrity()
        client.close()
        client.close()


def test_close_ends_what_is_live() -> None:
    with started("async") as client:
        client.submit(make_ask("live"))
        wait_news(client, {"live"}, over=False)
        client.close()
        for refused in (lambda: client.submit(make_ask("x")), client.stats, client.check_integrity):
            with pytest.raises(FailedPrecondition, match="closed"):
                refused()
        client.close()


def test_a_stuck_engine_is_killed() -> None:
    """It is alive and says nothing: only its silence shows that."""
    with started("process", "stuck", QUICK) as client:
        client.submit(make_ask("live"))
        last = wait_news(client, {"live"}, over=True)[-1]
        assert last.failure is not None and "said nothing for 1 s" in last.failure.message


@pytest.fixture(scope="module")
def odd() -> Iterator[EngineClient]:
    """Of an engine that takes its time to say how it is, and trips over another question."""
    with started("process", "odd", ClientLimits(silence_timeout_s=4.0)) as client:
        yield client


def test_an_engine_that_was_idle_for_long_may_be_asked(odd: EngineClient) -> None:
    """Its silence counts from the question on, not from what it said before."""
    odd.stats()
    time.sleep(4.5)
    (stats,) = odd.stats()
    assert stats.num_running == 0
    odd.check_integrity()


def test_a_question_that_trips_the_engine_ends_nothing_else(odd: EngineClient) -> None:
    odd.submit(make_ask("live"))
    wait_news(odd, {"live"}, over=False)
    with pytest.raises(Internal, match="RuntimeError: the question tripped"):
        odd.adapters()
    odd.check_integrity()
    odd.cancel("live")
    last = wait_news(odd, {"live"}, over=True)[-1]
    assert last.failure is not None and last.failure.kind == "Cancelled"


def test_a_failed_step_is_told_in_its_own_words() -> None:
    """The exception of the model reaches the caller; the process ends."""
    with started("process", "failing") as client:
        client.submit(make_ask("live"))
        last = wait_news(client, {"live"}, over=True)[-1]
        assert last.failure is not None
        assert isinstance(last.failure.to_error(), Internal)
        assert "RuntimeError: the model tripped" in last.failure.message
        for pid in pids(client):
            with contextlib.suppress(psutil.NoSuchProcess):
                assert_gone([psutil.Process(pid)])


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
    with pytest.raises(LoadError, match="no such bundled model") as caught:
        ProcessClient(EngineConfig(model="baton-nothing"))
    assert "\n" not in str(caught.value)
    assert not _children()


def test_a_program_that_ends_at_once_is_no_engine() -> None:
    with pytest.raises(Unavailable, match="exit code 3"):
        ProcessClient(CONFIG, program=(sys.executable, "-c", "raise SystemExit(3)"))
    with pytest.raises(Unavailable, match="cannot be started"):
        ProcessClient(CONFIG, program=("/no/such/program",))
    with pytest.raises(Unavailable, match="null byte"):
        ProcessClient(CONFIG, program=("a\0b",), limits=ClientLimits(start_timeout_s=5.0))
    assert not _children()


def _children() -> list[psutil.Process]:
    """But for that of `odd`, which stays."""
    engines = [each for each in psutil.Process().children() if "engine" in " ".join(each.cmdline())]
    return [each for each in engines if "odd" not in each.cmdline()]


def test_a_client_that_is_dropped_takes_its_engine_with_it() -> None:
    client = ProcessClient(CONFIG, program=fake("fine"))
    processes = [psutil.Process(pid) for pid in pids(client)]
    del client
    gc.collect()
    assert_gone(processes)


PARENT = """
import sys, time
from engine.config import EngineConfig
from engine_client.process_client import ProcessClient
if __name__ == "__main__":
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
        child = psutil.Process(int(parent.stdout.readline()))
        if end == "stay":
            assert child.is_running()
            parent.kill()
        assert parent.wait(BOUND_S) == (-signal.SIGKILL if end == "stay" else 0)
        assert_gone([child])


async def test_iterators_of_one_client_are_independent() -> None:
    """Several at once; one is left early, one is cancelled, one gives up waiting: the others go on,
    and the engine keeps nothing. A start that is cancelled leaves no process."""
    starting = asyncio.create_task(AsyncProcessClient.start(CONFIG, program=fake("fine")))
    await asyncio.sleep(0.05)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not _children()
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
    limits = ClientLimits(start_timeout_s=2.0 if is_silent else BOUND_S, stop_timeout_s=0.2)
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
