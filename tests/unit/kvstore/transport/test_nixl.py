"""The NIXL thread: pieces, neighbours, deadlines that do not end a transfer, peers that die. What
is cancelled while a failed transfer is waited for is cancelled, whatever it failed by.

Real agents; UCX over TCP on loopback where a stalled peer is needed (over CMA a stopped peer's
memory is written all the same).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.block_refs import Block
from kvstore.errors import TransferFailed
from kvstore.transport.base import GetItems, PutItem
from kvstore.transport.nixl import NixlTransport
from kvstore.transport.nixl_agent import (
    NixlAgent,
    Region,
    merge_runs,
    prepare_environment,
    split_pieces,
)
from process.deadline import Deadline
from process.rpc_errors import DeadlineExceeded, FailedPrecondition, NotFound

MIB = 1024 * 1024


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_merging_moves_the_same_bytes(pairs: list[tuple[int, int]]) -> None:
    pieces = [(local * 4, remote * 4) for local, remote in pairs]
    runs = merge_runs(pieces, 4)
    moved = [(a + i, b + i) for a, b, length in runs for i in range(0, length, 4)]
    assert moved == pieces
    for one, two in itertools.pairwise(runs):
        assert (one[0] + one[2], one[1] + one[2]) != (two[0], two[1])


@given(
    st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99), st.integers(1, 40)), max_size=8),
    st.integers(1, 16),
)
def test_pieces_are_bounded_and_move_the_same_bytes(
    runs: list[tuple[int, int, int]], piece_bytes: int
) -> None:
    pieces = split_pieces(runs, piece_bytes)
    assert all(0 < sum(length for _, _, length in piece) <= piece_bytes for piece in pieces)
    moved = [(a + i, b + i) for piece in pieces for a, b, n in piece for i in range(n)]
    assert moved == [(a + i, b + i) for a, b, n in runs for i in range(n)]


class _Peer:
    """A NIXL agent in a process of its own, with 32 MiB of registered memory."""

    SCRIPT = """
import asyncio, sys
import numpy as np
from kvstore.transport.nixl_agent import NixlAgent, Region
from process.deadline import Deadline
async def main():
    agent = await NixlAgent.start(sys.argv[1], "lo", Deadline.after(30))
    memory = np.zeros(32 * 2**20, dtype=np.uint8)
    metadata = await agent.register(Region(memory.ctypes.data, memory.nbytes))
    print(metadata.hex(), memory.ctypes.data, flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        at, value = map(int, line.split())
        print(int((memory[:at] == value).sum()), flush=True)
asyncio.run(main())
"""

    def __init__(self) -> None:
        name = f"peer-{secrets.token_hex(8)}"
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.SCRIPT, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        metadata, address = self.process.stdout.readline().split()
        self.metadata = bytes.fromhex(metadata)
        self.region = Region(int(address), 32 * MIB)

    def count(self, num_bytes: int, value: int) -> int:
        """How many of its first bytes have that value."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{num_bytes} {value}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def stop(self) -> None:
        """It does nothing any more when this returns."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def end(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.communicate(timeout=30)


@pytest.fixture(scope="module", params=["default", "tcp"])
def tls(request: pytest.FixtureRequest) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "tcp":
            patch.setenv("UCX_TLS", "tcp")
        yield str(request.param)


@pytest.fixture
async def agent(tls: str) -> AsyncIterator[NixlAgent]:
    agent = await NixlAgent.start(f"test-{secrets.token_hex(8)}", "lo", Deadline.after(30))
    yield agent
    assert await agent.close(Deadline.after(30))


@pytest.fixture(scope="module")
def peer(tls: str) -> Iterator[_Peer]:
    """No test ends it; each writes bytes of its own."""
    peer = _Peer()
    yield peer
    peer.end()


@pytest.fixture
def mortal(tls: str) -> Iterator[_Peer]:
    """One that the test ends."""
    peer = _Peer()
    yield peer
    peer.end()


async def _memory(agent: NixlAgent, value: int) -> tuple[np.ndarray, Region]:
    memory = np.full(32 * MIB, value, dtype=np.uint8)
    region = Region(int(memory.ctypes.data), memory.nbytes)
    await agent.register(region)
    return memory, region


async def test_bytes_arrive_whole_and_in_place(agent: NixlAgent, peer: _Peer) -> None:
    _kept, own = await _memory(agent, 5)
    name = await agent.add_peer(peer.metadata)
    runs = [(own.address, peer.region.address, 20 * MIB)]  # two pieces
    transfer = agent.write(name, runs, Deadline.after(20), local=own, remote=peer.region)
    assert await transfer.done is None
    await asyncio.wait_for(transfer.settled, 30)
    assert peer.count(32 * MIB, 5) == 20 * MIB
    assert not await agent.is_gone(name)


@pytest.mark.parametrize("tls", ["tcp"], indirect=True)
async def test_a_deadline_is_not_an_end(agent: NixlAgent, peer: _Peer) -> None:
    """The peer stalls; the waiter is answered, and the bytes land when it wakes: `settled` must not
    come before."""
    _kept, own = await _memory(agent, 6)
    name = await agent.add_peer(peer.metadata)
    first = agent.write(
        name,
        [(own.address, peer.region.address, 64)],
        Deadline.after(30),
        local=own,
        remote=peer.region,
    )
    assert await first.done is None
    await asyncio.to_thread(peer.stop)
    runs = [(own.address, peer.region.address, 16 * MIB)]
    transfer = agent.write(name, runs, Deadline.after(0.3), local=own, remote=peer.region)
    assert isinstance(await transfer.done, DeadlineExceeded)
    await asyncio.wait([transfer.settled], timeout=0.5)
    assert not transfer.settled.done()
    assert not await agent.is_gone(name)  # stalled is not gone
    peer.process.send_signal(signal.SIGCONT)
    await asyncio.wait_for(transfer.settled, 20)
    assert peer.count(16 * MIB, 6) == 16 * MIB  # it did write after its deadline


async def test_an_abandoned_transfer_settles(agent: NixlAgent, peer: _Peer) -> None:
    kept, own = await _memory(agent, 7)
    name = await agent.add_peer(peer.metadata)
    runs = [(own.address, peer.region.address, 32 * MIB)]
    transfer = agent.write(name, runs, Deadline.after(20), local=own, remote=peer.region)
    transfer.abandon()
    answer = await transfer.done
    assert answer is None or isinstance(answer, TransferFailed)
    await asyncio.wait_for(transfer.settled, 20)
    before = peer.count(32 * MIB, 7)
    kept[:] = 8
    assert peer.count(32 * MIB, 8) == 0
    assert peer.count(32 * MIB, 7) == before


async def test_a_dead_peer_ends_transfers_and_is_known_to_be_gone(
    agent: NixlAgent, mortal: _Peer
) -> None:
    _kept, own = await _memory(agent, 9)
    name = await agent.add_peer(mortal.metadata)
    runs = [(own.address, mortal.region.address, 8 * MIB)]
    first = agent.write(name, runs, Deadline.after(20), local=own, remote=mortal.region)
    assert await first.done is None
    mortal.process.kill()
    await asyncio.to_thread(mortal.process.wait)
    second = agent.write(name, runs, Deadline.after(20), local=own, remote=mortal.region)
    assert isinstance(await second.done, TransferFailed)
    await asyncio.wait_for(second.settled, 30)
    async with asyncio.timeout(30):
        while not await agent.is_gone(name):
            await asyncio.sleep(0.01)
    await agent.remove_peer(name)
    await agent.remove_peer(name)  # what is gone stays gone


async def test_a_peer_that_died_before_the_first_transfer_is_gone(
    agent: NixlAgent, mortal: _Peer
) -> None:
    name = await agent.add_peer(mortal.metadata)
    mortal.process.kill()
    await asyncio.to_thread(mortal.process.wait)
    async with asyncio.timeout(30):
        while not await agent.is_gone(name):
            await asyncio.sleep(0.01)


async def test_a_restarted_peer_is_added_under_its_new_name(agent: NixlAgent, peer: _Peer) -> None:
    _kept, own = await _memory(agent, 3)
    await agent.remove_peer(await agent.add_peer(peer.metadata))
    again = await agent.add_peer(peer.metadata)
    runs = [(own.address, peer.region.address, 1000)]
    transfer = agent.write(again, runs, Deadline.after(20), local=own, remote=peer.region)
    assert await transfer.done is None
    assert peer.count(MIB, 3) == 1000


def test_a_nap_ends_however_short_it_is() -> None:
    """A thread that is held up between two looks at the clock has waited too long already, and must
    not wait on: a transfer would never be looked at again."""
    jobs = NixlAgent("x")._queue

    def naps() -> None:
        for _ in range(200_000):
            jobs.put(None)
            jobs.get()
            with contextlib.suppress(queue.Empty):
                jobs.get(timeout=1e-9)

    thread = threading.Thread(target=naps, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


async def test_a_closed_agent_says_so() -> None:
    agent = await NixlAgent.start(f"test-{secrets.token_hex(8)}", "lo", Deadline.after(30))
    assert await agent.close(Deadline.after(30))
    with pytest.raises(TransferFailed, match="closed"):
        await agent.add_peer(b"")
    region = Region(0, 1)
    with pytest.raises(TransferFailed, match="closed"):
        agent.write("x", [], Deadline.after(1), local=region, remote=region)


async def test_without_nixl_there_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr("kvstore.transport.nixl_agent.importlib.import_module", absent)
    with pytest.raises(FailedPrecondition, match="install nixl-cu13"):
        await NixlAgent.start("x", "lo", Deadline.after(30))


def test_the_environment_is_settled_before_nixl_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX listens on every interface otherwise, and NIXL fails without a readable HOME."""
    for name in ("UCX_NET_DEVICES", "NIXL_CONFIG_FILE", "HOME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    prepare_environment("lo")
    assert os.environ["UCX_NET_DEVICES"] == "lo"
    assert os.environ["NIXL_CONFIG_FILE"] == os.devnull
    monkeypatch.setenv("UCX_NET_DEVICES", "eth7")
    monkeypatch.delenv("NIXL_CONFIG_FILE")
    monkeypatch.setenv("HOME", "/")
    prepare_environment("lo")
    assert os.environ["UCX_NET_DEVICES"] == "eth7"  # the operator's word
    assert "NIXL_CONFIG_FILE" not in os.environ
    monkeypatch.delenv("UCX_NET_DEVICES")
    prepare_environment("all")
    assert "UCX_NET_DEVICES" not in os.environ


@pytest.mark.parametrize("tls", ["default"], indirect=True)
async def test_garbage_metadata_is_refused(agent: NixlAgent) -> None:
    with pytest.raises(FailedPrecondition, match="metadata"):
        await agent.add_peer(b"garbage")


async def test_a_write_outside_the_peers_region_fails(agent: NixlAgent, peer: _Peer) -> None:
    _kept, own = await _memory(agent, 1)
    name = await agent.add_peer(peer.metadata)
    runs = [(own.address, peer.region.address + 40 * MIB, 1000)]
    transfer = agent.write(name, runs, Deadline.after(20), local=own, remote=peer.region)
    assert isinstance(await transfer.done, TransferFailed)


_BLOCK = Block(frame=0, generation=1, chain_hash=bytes(16), checksum=1, num_tokens=16)


class _Rpc:
    """A store that refuses each push, and says whether one is over when it is told to."""

    def __init__(self) -> None:
        self.stub = SimpleNamespace(Push="push", GetPush="get")
        self.is_asked, self.is_over = asyncio.Event(), asyncio.Event()

    def check(self) -> None:
        pass

    def mark_broken(self, why: str) -> None:
        pass

    def reading(self) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    async def call(self, method: str, *_: Any, **__: Any) -> Any:
        if method == "push":
            raise NotFound("the lease is over")
        self.is_asked.set()
        await self.is_over.wait()
        return SimpleNamespace(terminal=True)


def _transport(rpc: _Rpc, write: Callable[..., Any]) -> NixlTransport:
    memory = SimpleNamespace(
        address=0, num_blocks=4, block_bytes=64, device=None, checksums=lambda ids: [0] * len(ids)
    )
    agent = SimpleNamespace(write=write)
    attached = SimpleNamespace(frame_bytes=64, num_frames=4, region_address=0, attachment_id="a")
    return NixlTransport(memory, rpc, agent, "peer", attached)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_over", [False, True])
async def test_of_a_push_that_was_refused(is_over: bool) -> None:
    rpc = _Rpc()
    transport = _transport(rpc, write=lambda: None)
    items = GetItems([(_BLOCK, 0)])
    getting = asyncio.create_task(transport.get("lease", items, Deadline.after(30.0)))
    await rpc.is_asked.wait()
    if is_over:
        rpc.is_over.set()
    getting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await getting
    rpc.is_over.set()


async def test_of_a_put_that_failed() -> None:
    done: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
    settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    transfer = SimpleNamespace(done=done, settled=settled, abandon=lambda: None)
    transport = _transport(_Rpc(), write=lambda *_, **__: transfer)
    item = PutItem(block_id=0, frame=0, generation=1)
    putting = asyncio.create_task(transport.put("lease", [item], Deadline.after(30.0)))
    await asyncio.sleep(0)
    done.set_result(TransferFailed("the peer has gone"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    putting.cancel()
    with pytest.raises(BaseException) as caught:
        await putting
    cause = getattr(caught.value, "cause", caught.value)
    assert isinstance(cause, asyncio.CancelledError), caught.value
    settled.set_result(None)
