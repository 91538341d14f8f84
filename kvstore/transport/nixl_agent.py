"""NixlAgent: one agent of NIXL (the transfer library), used by one thread: descriptors in, WRITEs
out, completion on the asyncio loop.

NIXL is used for pushing only. Why each rule here is one (measured with NIXL 1.5.1, UCX 1.23):
- ONE thread makes every agent call; others leave jobs in a queue and await futures.
- `transfer()` may copy everything before it returns (same host), so it is called in that thread
  only, in pieces of at most PIECE_BYTES, one piece of each transfer in turn.
- Passing a deadline does not end a transfer: releasing its handle does not stop the bytes. `done`
  answers the waiter, `settled` says that no byte moves any more. Until then memory is not reused.
- Adjacent descriptors are not merged by NIXL: `merge_runs` does it.
- A peer's descriptors are never deserialized (NIXL pickles them): peers exchange integers.

- The stock progress thread burns a whole core: its delay is patched when the agent is made
  (`make_agent`). It is event-driven, so the delay costs no latency.
- UCX listens on every interface unless told otherwise, and NIXL fails when HOME cannot be read:
  both are settled in the environment before the library is loaded (`prepare_environment`).

A process that holds an agent's metadata can write anywhere in the agent's process: one trust domain
only.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from kvstore.errors import TransferFailed
from process.deadline import Deadline
from process.rpc_errors import DeadlineExceeded, FailedPrecondition

_PIECES_IN_FLIGHT = 4
_NAP_MIN_S, _NAP_MAX_S, _NAP_ABANDONED_S = 50e-6, 1e-3, 20e-3

Result = TypeVar("Result")


@dataclass(frozen=True)
class Region:
    """Memory that is registered with NIXL. memory: DRAM or VRAM; device_id: of the GPU, 0 for
    DRAM."""

    address: int
    num_bytes: int
    memory: str = "DRAM"
    device_id: int = 0


class Transfer:
    """One WRITE under way, seen from the loop that asked for it.

    done: resolves to None when all bytes lie at the peer, to an error otherwise (DeadlineExceeded,
    TransferFailed); it never raises. settled: resolves when no byte moves any more.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        self.done: asyncio.Future[Exception | None] = loop.create_future()
        self.settled: asyncio.Future[None] = loop.create_future()
        self.abandoned = False
        self._wake = wake

    def abandon(self) -> None:
        """Start no further piece of the transfer; `settled` resolves when those under way are
        over."""
        self.abandoned = True
        self._wake()


@dataclass(eq=False)
class _Moving:
    """The agent thread's side of a Transfer."""

    transfer: Transfer
    loop: asyncio.AbstractEventLoop
    peer: str
    local: Region
    remote: Region
    pieces: deque[list[Run]]
    deadline: Deadline
    flying: list[Any] = field(default_factory=list)
    error: Exception | None = None
    answered: bool = False


@dataclass(eq=False)
class _Job:
    call: Callable[[Any], Any]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]


class NixlAgent:
    """A NIXL agent and its thread. Methods are for the asyncio loop; all agent calls happen in the
    thread."""

    def __init__(self, name: str) -> None:
        self.name = name
        # No SimpleQueue: before Python 3.13 its `get` waits for ever where the time that it is to
        # wait is over before it has begun.
        self._queue: queue.Queue[_Job | _Moving | None] = queue.Queue()
        self._moving: list[_Moving] = []
        self._closing = False
        self._thread: threading.Thread | None = None

    @classmethod
    async def start(cls, name: str, net_devices: str, deadline: Deadline) -> NixlAgent:
        """Load NIXL, make the agent and its thread.

        Args: name: unique among all peers, for instance a role and a random id. net_devices: as
            UCX_NET_DEVICES, `all` for every one; the first agent of a process decides.
        Raises: FailedPrecondition when NIXL is not installed or cannot be used here.
        """
        self = cls(name)
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[Exception | None] = loop.create_future()
        self._thread = threading.Thread(
            target=self._run, args=(net_devices, loop, ready), name=f"nixl-{name}", daemon=True
        )
        self._thread.start()
        try:
            async with deadline.timeout("starting NIXL"):
                error = await ready
        except BaseException:
            self._closing = True  # the thread ends by itself, as soon as it can
            self._wake()
            raise
        if error is not None:
            raise FailedPrecondition(f"transport nixl: cannot be used here: {error}") from error
        return self

    async def call(self, job: Callable[[Any], Result]) -> Result:
        """Run a short agent call in the thread. Raises: TransferFailed once `close` was called."""
        self._check_open()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        self._queue.put(_Job(job, loop, future))
        return await future

    async def register(self, region: Region, *, before: Callable[[], None] = lambda: None) -> bytes:
        """Register memory with the agent; it must stay mapped for good.

        Args: before: called in the agent's thread first, to make a device current there.
        Returns: the agent's metadata, with the memory in it. Raises: FailedPrecondition if it
            cannot be registered.
        """

        def job(agent: Any) -> bytes:
            before()
            rows = [(region.address, region.num_bytes, region.device_id, "")]
            agent.register_memory(rows, mem_type=region.memory)
            return bytes(agent.get_agent_metadata())

        self._check_open()
        try:
            return await self.call(job)
        except Exception as error:  # NIXL's own exceptions have no common base of theirs
            raise FailedPrecondition(f"transport nixl: cannot register memory: {error}") from error

    async def add_peer(self, metadata: bytes) -> str:
        """Make a peer's agent known by its metadata. Returns: the peer's name. Raises:
        FailedPrecondition if that cannot be."""

        def job(agent: Any) -> str:
            name = agent.add_remote_agent(metadata)
            return name.decode() if isinstance(name, bytes) else str(name)

        self._check_open()
        try:
            return await self.call(job)
        except Exception as error:  # NIXL's own exceptions have no common base of theirs
            raise FailedPrecondition(f"transport nixl: the peer's metadata: {error}") from error

    async def remove_peer(self, peer: str) -> None:
        """Forget a peer's agent; one that is unknown or dead already is passed over."""

        def job(agent: Any) -> None:
            try:
                agent.remove_remote_agent(peer)
            except Exception:  # whatever it is, the peer is of no use any more
                return

        await self.call(job)

    async def is_gone(self, peer: str) -> bool:
        """Whether the peer's process is known to be dead; one that has stalled is not."""

        def job(agent: Any) -> bool:
            try:
                agent.send_notif(peer, b"there?")
            except Exception as error:
                return type(error).__name__ in ("nixlRemoteDisconnectError", "nixlNotFoundError")
            return False

        return await self.call(job)

    def write(
        self,
        peer: str,
        runs: Sequence[Run],
        deadline: Deadline,
        *,
        local: Region,
        remote: Region,
    ) -> Transfer:
        """Start to WRITE runs of `local` into `remote` at the peer. Returns at once.

        Raises: TransferFailed once `close` was called.
        """
        self._check_open()
        loop = asyncio.get_running_loop()
        transfer = Transfer(loop, self._wake)
        is_copied_here = local.memory == "DRAM" or remote.memory == "DRAM"
        piece_bytes = PIECE_BYTES if is_copied_here else DEVICE_PIECE_BYTES
        pieces = deque(split_pieces(runs, piece_bytes))
        self._queue.put(_Moving(transfer, loop, peer, local, remote, pieces, deadline))
        return transfer

    async def close(self, deadline: Deadline) -> bool:
        """End the thread when nothing moves any more.

        Returns: False when something still moves at the deadline; the thread then ends by itself
        after that is over.
        """
        self._closing = True
        self._wake()
        thread = self._thread
        if thread is None:
            return True
        while thread.is_alive():
            if deadline.expired:
                return False
            await asyncio.sleep(0.002)
        return True

    def _check_open(self) -> None:
        if self._closing:
            raise TransferFailed(f"NIXL agent {self.name} is closed")

    # -- the thread

    def _wake(self) -> None:
        self._queue.put(None)

    def _run(
        self,
        net_devices: str,
        loop: asyncio.AbstractEventLoop,
        ready: asyncio.Future[Exception | None],
    ) -> None:
        try:
            agent = make_agent(self.name, net_devices)
        except (
            Exception
        ) as error:  # import errors, RuntimeErrors and NIXL's own: all mean "no NIXL"
            _resolve(loop, ready, error)
            return
        _resolve(loop, ready, None)
        nap = _NAP_MIN_S
        while not (self._closing and not self._moving and self._queue.empty()):
            if self._take_job(agent, nap):
                nap = _NAP_MIN_S
                continue
            progressed = False
            for moving in list(self._moving):
                progressed |= self._advance(agent, moving)
            longest = _NAP_MAX_S
            if all(moving.answered for moving in self._moving):
                longest = _NAP_ABANDONED_S  # a stalled peer, and no caller waits any more
            nap = 0.0 if progressed else min(longest, max(_NAP_MIN_S, nap * 1.5))

    def _take_job(self, agent: Any, nap: float) -> bool:
        """Take one job from the queue, waiting at most `nap` for it when something moves. Returns:
        whether there was one."""
        try:
            if not self._moving:
                job = self._queue.get()
            else:
                job = self._queue.get(block=nap > 0, timeout=nap)
        except queue.Empty:
            return False
        if isinstance(job, _Moving):
            self._moving.append(job)
            self._advance(agent, job)
        elif isinstance(job, _Job):
            try:
                agent.get_new_notifs()  # liveness questions of peers pile up otherwise
                result = job.call(agent)
            except Exception as error:  # goes to the waiter as it is
                _resolve(job.loop, job.future, error=error)
            else:
                _resolve(job.loop, job.future, result)
        else:
            for moving in list(self._moving):
                self._advance(agent, moving)
        return True

    def _advance(self, agent: Any, moving: _Moving) -> bool:
        """Post the next piece, look after those under way, answer. Returns: whether all that
        helped."""
        progressed = False
        if moving.transfer.abandoned and not moving.answered:
            moving.pieces.clear()
            self._answer(moving, TransferFailed("the transfer was abandoned"))
        if not moving.answered and moving.deadline.expired and (moving.pieces or moving.flying):
            moving.pieces.clear()
            self._answer(moving, DeadlineExceeded("transfer: the time for it ran out"))
        if moving.pieces and len(moving.flying) < _PIECES_IN_FLIGHT:
            progressed = True
            try:
                handle = _post(agent, moving, moving.pieces.popleft())
                if handle is not None:
                    moving.flying.append(handle)
            except Exception as error:  # NIXL's own, for instance a peer that is gone
                moving.pieces.clear()
                moving.error = moving.error or error
        for handle in list(moving.flying):
            try:
                if agent.check_xfer_state(handle) == "PROC":
                    continue
            except Exception as error:
                moving.pieces.clear()
                moving.error = moving.error or error
            progressed = True
            moving.flying.remove(handle)
            handle.release()
        if not moving.pieces and not moving.flying:
            self._moving.remove(moving)
            failed = moving.error
            self._answer(moving, TransferFailed(_describe(failed)) if failed else None)
            _resolve(moving.loop, moving.transfer.settled, None)
        return progressed

    def _answer(self, moving: _Moving, error: Exception | None) -> None:
        if not moving.answered:
            moving.answered = True
            _resolve(moving.loop, moving.transfer.done, error)


def _post(agent: Any, moving: _Moving, piece: list[Run]) -> Any | None:
    """Start one piece. Returns: its handle, or None when it is over already."""
    table = np.array(piece, dtype=np.uint64)  # [N, 3] (local, remote, bytes)
    local = np.empty((len(piece), 3), dtype=np.uint64)
    remote = np.empty_like(local)
    local[:, 0], remote[:, 0] = table[:, 0], table[:, 1]
    local[:, 1] = remote[:, 1] = table[:, 2]
    local[:, 2], remote[:, 2] = moving.local.device_id, moving.remote.device_id
    handle = agent.initialize_xfer(
        "WRITE",
        agent.get_xfer_descs(local, mem_type=moving.local.memory),
        agent.get_xfer_descs(remote, mem_type=moving.remote.memory),
        moving.peer,
    )
    try:
        state = agent.transfer(handle)
    except BaseException:
        handle.release()
        raise
    if state == "PROC":
        return handle
    handle.release()
    if state != "DONE":
        raise RuntimeError(f"transfer state {state}")
    return None


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _resolve(
    loop: asyncio.AbstractEventLoop,
    future: asyncio.Future[Any],
    result: Any = None,
    *,
    error: Exception | None = None,
) -> None:
    """Answer a future from the thread. On a loop that is closed by now nothing waits for it."""

    def answer() -> None:
        if not future.done():
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

    try:
        loop.call_soon_threadsafe(answer)
    except RuntimeError:
        if not loop.is_closed():
            raise


PROGRESS_DELAY_US = 10_000
"""Delay of NIXL's progress thread in microseconds: 0.4 % of a core when idle instead of 98.8 %, at
the same latency (measured; 0.06 % at 100 ms). Also how long an event that was missed can hold a
step of a transfer up: once, for no cause that was found, some hundred steps in a row took long,
with 100 ms here."""

_making_agent = threading.Lock()


def make_agent(name: str, net_devices: str) -> Any:
    """Load NIXL and make an agent.

    Args: net_devices: as UCX_NET_DEVICES, `all` for every one; the first agent of a process
        decides.
    Raises: ImportError without NIXL, and what NIXL raises.
    """
    prepare_environment(net_devices)
    api, bindings = _load()
    config_type = bindings.nixlAgentConfig

    class PatientConfig(config_type):  # type: ignore[misc, valid-type]
        def __setattr__(self, key: str, value: Any) -> None:
            super().__setattr__(key, PROGRESS_DELAY_US if key == "pthrDelay" else value)

    with _making_agent:
        bindings.nixlAgentConfig = PatientConfig
        try:
            return api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
        finally:
            bindings.nixlAgentConfig = config_type


def prepare_environment(net_devices: str) -> None:
    """Set the environment variables that NIXL and UCX read when they are loaded; a variable that
    the operator has set stays."""
    if net_devices != "all":
        os.environ.setdefault("UCX_NET_DEVICES", net_devices)
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    home = os.environ.get("HOME", "")
    if not home or not os.access(home, os.R_OK | os.X_OK):
        os.environ.setdefault("NIXL_CONFIG_FILE", os.devnull)


def _load() -> tuple[Any, Any]:
    """The installed build of NIXL; on a machine without CUDA both work alike. The meta package is
    not used: it imports torch."""
    tried: list[str] = []
    for package in ("nixl_cu13", "nixl_cu12"):
        try:
            api = importlib.import_module(f"{package}._api")
            return api, importlib.import_module(f"{package}._bindings")
        except ImportError as error:
            tried.append(str(error))
    raise ImportError("install nixl-cu13 (or nixl-cu12): " + "; ".join(tried))


PIECE_BYTES = 16 * 1024 * 1024
"""Most bytes that one `transfer()` call of NIXL may copy: 16 MiB take about 8 ms by CMA
(measured)."""
DEVICE_PIECE_BYTES = 256 * 1024 * 1024
"""Most bytes of one `transfer()` call between devices. It only starts the copy there, so large
pieces block no thread; 16 MiB ones reached half the rate (measured)."""

Run = tuple[int, int, int]
"""One contiguous piece of a transfer: (local address, remote address, bytes)."""


def merge_runs(pairs: Iterable[tuple[int, int]], num_bytes: int) -> list[Run]:
    """Join (local, remote) pieces of `num_bytes` each into runs where they continue one another on
    both sides."""
    runs: list[Run] = []
    for local, remote in pairs:
        if runs:
            last_local, last_remote, length = runs[-1]
            if last_local + length == local and last_remote + length == remote:
                runs[-1] = (last_local, last_remote, length + num_bytes)
                continue
        runs.append((local, remote, num_bytes))
    return runs


def split_pieces(runs: Sequence[Run], piece_bytes: int = PIECE_BYTES) -> list[list[Run]]:
    """Cut runs into pieces: lists of runs of at most `piece_bytes` together, in order."""
    pieces: list[list[Run]] = []
    room = 0
    for local, remote, left in runs:
        while left:
            if not room:
                pieces.append([])
                room = piece_bytes
            take = min(left, room)
            pieces[-1].append((local, remote, take))
            local, remote, left, room = local + take, remote + take, left - take, room - take
    return pieces
