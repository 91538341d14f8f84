"""DistributedRanks: `Ranks` over torch.distributed: gloo between CPU processes of one host, NCCL
between GPUs. One of these in each rank's process.

Two process groups a rank: the shares of its stage, and the stages of its share. They are objects of
our own, not torch's default group, which belongs to whoever embeds the engine. Ranks meet in a file
that only they have open (a descriptor their parent made), so nobody else can join and nothing is
left on disk. gloo's own connections are on the loopback interface.

Every wait has the deadline `timeout_s`: gloo raises, NCCL's kernels are ended by `abort`, which any
thread may call; all else belongs to the thread that computes. NCCL parts from its peers only when
the last CUDA graph that speaks to them is gone, so the parting goes on beside whoever asked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from engine.errors import RankFailed
from engine.parallel.rank_grid import Grid

_c10d: Any = torch.distributed
"""Its process groups have no types, nor public names for all of their options."""

_TAG = 1
_NCCL_GRACE = timedelta(seconds=60.0)
_FAR_DESCRIPTOR = 700
"""Smallest number of duplicated descriptors: the kernel assigns the lowest free number, and a
process has at most 1,024 by default."""
_PART_S = 10.0
"""Longest time in seconds for NCCL to close connections after all graphs that use them are freed;
after it, it is abandoned."""
_FORM_S = 60.0
"""Longest time in seconds for all ranks, which have loaded by then, to form the groups."""


class DistributedRanks:
    """The `Ranks` of one rank's process, over torch.distributed.

    Args:
        timeout_s: longest wait for another rank.
        part_s: longest time for NCCL to close connections.
    """

    def __init__(
        self, grid: Grid, rank: int, device: str, timeout_s: float, *, part_s: float = _PART_S
    ) -> None:
        self.place = grid.place(rank)
        self._device = torch.device(device)
        self._timeout = timedelta(seconds=timeout_s)
        self._part_s = part_s
        self._shares: Any = None
        self._stages: Any = None
        self._is_aborted = False
        self._parting: list[threading.Thread] = []
        self._meeting_file = -1

    def form(self, meeting_file: int) -> None:
        """Connect to the other ranks, and send one number over every connection that will be used.
        All ranks call it at the same time.

        Args: meeting_file: the descriptor of an empty file that all ranks have open.
        Raises: RankFailed if some did not come in time.
        """
        place = self.place
        with self._telling():
            num_ranks = place.num_shares * place.num_stages
            self._meeting_file = _far_duplicate(meeting_file)
            store = _c10d.FileStore(f"/proc/self/fd/{self._meeting_file}", num_ranks)
            store.set_timeout(timedelta(seconds=_FORM_S))
            if place.num_shares > 1:
                self._shares = self._group(
                    f"stage{place.stage}", store, place.share, place.num_shares
                )
            if place.num_stages > 1:
                self._stages = self._group(
                    f"share{place.share}", store, place.stage, place.num_stages
                )
        number = torch.ones(1, place.num_shares, device=self._device)
        if not place.is_first:
            self.receive(number)
        self.add_up(number)
        if not place.is_last:
            self.send(number)
        self.pass_tokens(number)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _group(self, name: str, store: Any, rank: int, size: int) -> Any:
        store = _c10d.PrefixStore(name, store)
        if self._device.type == "cuda":
            options = _c10d.ProcessGroupNCCL.Options()
            # Its watchdog would only log that it is over; `abort` has come by then.
            options._timeout = self._timeout + _NCCL_GRACE  # noqa: SLF001
            options.group_name = name
            with _own_error_handling():
                return _c10d.ProcessGroupNCCL(store, rank, size, options)
        options = _c10d.ProcessGroupGloo._Options()  # noqa: SLF001
        options._devices = [  # noqa: SLF001
            _c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")
        ]
        options._threads = 1  # noqa: SLF001
        options._timeout = self._timeout  # noqa: SLF001
        return _c10d.ProcessGroupGloo(store, rank, size, options)

    # -- Ranks

    @property
    def rank(self) -> int:
        """Index of this rank among those that share its layers."""
        return self.place.share

    def add_up(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum `partial` over the shares of this stage, in place (all-reduce)."""
        if self._shares is not None:
            with self._telling():
                _end(self._shares.allreduce([partial], _in_order(_c10d.AllreduceOptions())))
        return partial

    def join_columns(self, part: torch.Tensor) -> torch.Tensor:
        """Concatenate the shares' columns (all-gather). Also called without rows: when it is done,
        every share has written its KV."""
        if self._shares is None:
            return part
        num_rows, num_shares = part.shape[0], self.place.num_shares
        if num_rows == 0:
            self.add_up(part.new_zeros(1))
            return part.new_empty(0, part.shape[1] * num_shares)
        gathered = part.new_empty(num_shares * num_rows, part.shape[1])
        with self._telling():
            options = _in_order(_c10d.distributed_c10d.AllgatherOptions())
            part = part.contiguous()
            _end(self._shares._allgather_base(gathered, part, options))  # noqa: SLF001
        by_row = gathered.view(num_shares, num_rows, -1).transpose(0, 1)
        return by_row.reshape(num_rows, -1)

    def receive(self, hidden: torch.Tensor) -> None:
        """Fill `hidden` with the output of the stage before."""
        with self._telling():
            _end(self._stages.recv([hidden], self.place.stage - 1, _TAG))

    def send(self, hidden: torch.Tensor) -> None:
        """Send `hidden` to the stage after."""
        with self._telling():
            _end(self._stages.send([hidden], self.place.stage + 1, _TAG))

    def pass_tokens(self, token_ids: torch.Tensor) -> None:
        """Send the last stage's tokens to the first stage, in place."""
        place = self.place
        if place.num_stages == 1:
            return
        with self._telling():
            if place.is_last:
                _end(self._stages.send([token_ids], 0, _TAG))
            elif place.is_first:
                _end(self._stages.recv([token_ids], place.num_stages - 1, _TAG))

    def abort(self) -> None:
        """End every wait for other ranks, here and on the device; no call may follow. Does not wait
        for NCCL's connections to close. Any thread."""
        with _aborting:
            if self._is_aborted:
                return
            self._is_aborted = True
            if self._device.type == "cuda":
                groups = [each for each in (self._shares, self._stages) if each is not None]
                self._parting = [
                    threading.Thread(target=_part, args=(each,), name="ranks part", daemon=True)
                    for each in groups
                ]
        for thread in self._parting:
            thread.start()

    def close(self) -> None:
        """Destroy the process groups, after all graphs were freed, in bounded time. For the thread
        that computes; idempotent."""
        self.abort()
        ends_s = time.monotonic() + self._part_s
        for thread in self._parting:
            thread.join(max(0.0, ends_s - time.monotonic()))
        self._shares = self._stages = None
        if self._meeting_file >= 0:
            os.close(self._meeting_file)
            self._meeting_file = -1

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Return a context that converts torch's errors to RankFailed, since their texts are
        long."""
        if self._is_aborted:
            raise RankFailed("the ranks of this engine have parted")
        try:
            yield
        except RuntimeError as error:  # DistBackendError is one
            raise RankFailed(f"another rank is gone or too late ({_first_line(error)})") from error


def _far_duplicate(file: int) -> int:
    """Return a duplicate of a descriptor with a high number, which is not assigned to other files
    before `close`. torch's FileStore opens its file by that number again when it is destroyed,
    and ends the process if another file is there; the garbage collector decides when that
    happens."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, min(_FAR_DESCRIPTOR, limit // 2))


_aborting = threading.Lock()


def _part(group: Any) -> None:
    with contextlib.suppress(RuntimeError):  # of a peer that has parted before
        group.abort()


@contextlib.contextmanager
def _own_error_handling() -> Iterator[None]:
    """Return a context in which process groups are created without NCCL's watchdog ending the
    process at an error, which would hide the reason. NCCL reads the setting when a group is
    created."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _end(work: Any) -> None:
    """Make later work of this stream (on CPU: of this thread) wait for `work`. NCCL returns no work
    where that is so already."""
    if work is not None:
        work.wait()


def _in_order(options: Any) -> Any:
    """Return options of a group that uses the computing stream, not a side stream, so that it needs
    no events and CUDA graphs can contain it."""
    options.asyncOp = False
    return options


def _first_line(error: Exception) -> str:
    line = str(error).partition("\n")[0]
    _, bracket, rest = line.partition("] ")  # gloo begins with its source's file and line
    return (rest if bracket else line).partition(". ")[0]
