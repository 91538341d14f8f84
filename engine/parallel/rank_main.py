"""A rank's process: one part of a model, computed together with the engine that started it.

    python -m engine.parallel.rank_main <socket> <meeting file> <cache file>  (descriptors)

Messages: StartRank, RankLoading, Ready, Meet, Attach, and ComputeBatch until StopRank or until the
socket is closed. It ends with its parent in any case (`process.entrypoint.die_with_parent`). Exit
codes: 0 told to stop, 1 it failed, 2 it could not load, 3 (rank_processes.FOLLOWED) another rank is
gone. Imports no transformers. One thread.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from pathlib import Path
from typing import NoReturn

import torch

from engine.errors import LoadError, RankFailed
from engine.kv.layout import KvLayout
from engine.kv.memory import KvMemory
from engine.kv.sizing import free_memory_bytes
from engine.models.llama import kv_layout
from engine.parallel.cuda_ipc import SharedCache, share
from engine.parallel.distributed_ranks import DistributedRanks
from engine.parallel.framing import FrameReader, FrameWriter
from engine.parallel.messages import (
    Attach,
    Attached,
    Change,
    ComputeBatch,
    Drain,
    FromRank,
    LaunchWords,
    Meet,
    Met,
    RankFailure,
    RankLoading,
    RankRefused,
    Ready,
    Settle,
    Settled,
    StartRank,
    StopRank,
    ToRank,
    Verify,
    WarmUp,
    encode,
    read_to_rank,
)
from engine.parallel.parallel_launches import FollowingDecoder, build
from engine.parallel.rank_grid import Grid
from engine.parallel.rank_memory import RankMemory
from engine.parallel.rank_model import RankModel, load_rank
from engine.parallel.rank_processes import FOLLOWED
from process import entrypoint, logs
from process.rpc_errors import BatonError, FailedPrecondition, Unavailable

_START_S = 60.0
"""Deadline in seconds of the first message, which is sent before this process has begun."""
_WRITE_S = 60.0
"""Deadline in seconds for the engine's process to read a message."""
_READ_S = 3600.0
"""Timeout in seconds of one wait for messages while there are none; then the process waits
again."""
_SIGN_OF_LIFE_S = 0.5
"""Interval in seconds of messages while loading."""

logger = logging.getLogger(__name__)


def main() -> int:
    """Serve on the descriptors that the arguments name. Returns: the exit code."""
    logs.configure("rank", "warning")
    try:
        entrypoint.die_with_parent()
        socket_file, meeting_file, cache_file = map(int, sys.argv[1:4])
        connection = socket.socket(fileno=socket_file)
    except (Unavailable, OSError, ValueError) as error:
        sys.stderr.write(f"engine.parallel.rank_main: {error}\n")
        return 2
    with connection:
        return _Child(connection, meeting_file, cache_file).run()


class _Child:
    def __init__(self, connection: socket.socket, meeting_file: int, cache_file: int) -> None:
        self._reader = FrameReader(connection)
        self._writer = FrameWriter(connection)
        self._meeting_file = meeting_file
        self._cache_file = cache_file
        self._told_s = 0.0

    def run(self) -> int:
        try:
            start = self._read()
            if not isinstance(start, StartRank):
                raise FailedPrecondition("the first message is no StartRank")
            loaded = self._load(start)
            return 2 if loaded is None else self._serve(start, *loaded)
        except EOFError:
            return 0  # the engine has gone
        except RankFailed as error:
            return self._fail(str(error), FOLLOWED)
        except (
            Exception
        ) as error:  # the engine must hear of it; what is not ours is shown here, too
            if not isinstance(error, BatonError):
                logger.error("rank_failed", exc_info=error)
            return self._fail(f"{type(error).__name__}: {error}".partition("\n")[0], 1)

    def _fail(self, reason: str, code: int) -> int:
        try:
            self._write(RankFailure(reason))
        except EOFError:
            return 0
        return code

    def _load(self, start: StartRank) -> tuple[RankModel, DistributedRanks] | None:
        config = start.config
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        if torch.device(config.device).type == "cuda":
            torch.cuda.set_device(config.device)
        grid = Grid(config.tensor_parallel, config.pipeline_parallel)
        ranks = DistributedRanks(grid, start.rank, config.device, config.rank_timeout_s)
        try:
            model = load_rank(config, Path(start.folder), start.shape, ranks, progress=self._show)
        except BatonError as error:
            self._write(RankRefused(str(error)))
            return None
        self._write(Ready(model.weight_bytes))
        return model, ranks

    def _serve(self, start: StartRank, model: RankModel, ranks: DistributedRanks) -> int:
        config = start.config
        layout = kv_layout(start.shape, block_size=config.block_size, dtype=config.dtype)
        memory: KvMemory | None = None
        ahead: FollowingDecoder | None = None
        while True:
            match self._read():
                case LaunchWords() as launch if ahead:
                    ahead.follow(launch)
                case ComputeBatch(batch) if memory:
                    model.forward(batch)
                case Change(block_id, source) if memory:
                    if source < 0:
                        memory.clear(block_id)
                    else:
                        memory.copy(source, block_id)
                case Drain() if ahead:
                    ahead.drain()
                case Settle():
                    if torch.device(config.device).type == "cuda":
                        torch.cuda.synchronize(config.device)
                    self._write(Settled())
                case Meet():
                    ranks.form(self._meeting_file)
                    self._write(Met(free_memory_bytes(config.device)))
                case Verify():
                    model.verify(layout)
                case Attach(num_blocks):
                    memory = self._memory(layout, ranks, num_blocks, config.device)
                    model.attach(memory)
                    if not memory.is_whole:
                        self._write(Attached(_share(memory)))
                    ahead = build(
                        FollowingDecoder,
                        model,
                        ranks,
                        memory,
                        max_rows=config.max_num_running,
                        context_window=config.context_window,
                    )
                case WarmUp() if ahead:
                    ahead.warm_up()
                case StopRank():
                    return 0
                case message:
                    raise FailedPrecondition(f"{type(message).__name__} does not belong here")

    def _memory(
        self, layout: KvLayout, ranks: DistributedRanks, num_blocks: int, device: str
    ) -> KvMemory:
        if torch.device(device).type == "cpu":
            return KvMemory(layout, num_blocks, device, shared_file=self._cache_file)
        return RankMemory(layout, ranks.place, num_blocks, device)

    def _show(self, what: str, done: int, total: int) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s > _SIGN_OF_LIFE_S:
            self._told_s = now_s
            self._write(RankLoading(what, done, total))

    def _read(self) -> ToRank:
        timeout_s = _READ_S if self._told_s else _START_S
        while (frame := self._reader.read(timeout_s)) is None:
            if not self._told_s:
                raise EOFError("no first message")
        self._told_s = self._told_s or time.monotonic()
        return read_to_rank(frame)

    def _write(self, message: FromRank) -> None:
        self._writer.write(encode(message), _WRITE_S)


def _share(memory: KvMemory) -> SharedCache:
    device = memory.cache.device
    try:
        return share(device.index, memory.address)
    except LoadError as error:  # whoever wants to move blocks is refused, with this in the log
        logs.event(logger, "cache_not_shared", level=logging.WARNING, error=str(error))
        return SharedCache(device.index, b"", 0)


def run() -> NoReturn:
    """Run `main` and exit the process immediately, since an orderly shutdown of torch and its
    process groups can wait for ranks that have ended."""
    code = main()
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run()
