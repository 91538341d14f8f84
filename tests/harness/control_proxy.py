"""A TCP proxy that stands between two processes and can delay, hold, cut or spoil what they say.

It runs on a loop of its own, in a thread of its own, so that a cluster can be started and stopped
from blocking code. Its methods may be called from any thread. Everything it draws comes from its
own generator, seeded by the caller; when bytes arrive is the machine's affair.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

CHUNK_BYTES = 16 * 1024
UPSTREAM_WAIT_S = 30.0
"""How long a connection waits for the far end to be known or to listen."""
STOP_S = 5.0
_GOAWAY = re.compile(rb"\x07.\x00\x00\x00\x00", re.DOTALL)
"""Type, flags and stream of an HTTP/2 frame. gRPC 1.85.1 ends the process of a client that gets one
with an error code that HTTP/2 does not name; a ping whose type has turned is one."""


@dataclass(frozen=True)
class Mischief:
    """What happens to bytes on their way, both ways."""

    delay_s: float = 0.0
    """Most that a piece waits; each draws its own wait."""
    garble: float = 0.0
    """Probability that one bit of a piece is turned."""
    drop: float = 0.0
    """Probability that a piece never arrives."""


CALM = Mischief()


class ControlProxy:
    """One listening port; `upstream` may become known later, and change."""

    def __init__(self, seed: str) -> None:
        self.upstream = ""
        """host:port, or the path of a Unix socket. Empty: those who come wait."""
        self.address = ""
        self.num_garbled = 0
        self.num_dropped = 0
        self._rng = random.Random(seed)
        self._mischief = CALM
        self._open: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._flowing: asyncio.Event
        self._server: asyncio.Server
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="control-proxy")

    def __enter__(self) -> Self:
        self._thread.start()
        self._call(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_S)
        self._loop.close()

    # -- from any thread

    def behave(self, mischief: Mischief = CALM) -> None:
        """From now on."""
        self._on_loop(lambda: setattr(self, "_mischief", mischief))

    def hold(self) -> None:
        """Nothing passes, nothing is refused: a peer that does not answer."""
        self._on_loop(lambda: self._flowing.clear())

    def go_on(self) -> None:
        """What was held passes, in order."""
        self._on_loop(lambda: self._flowing.set())

    def cut(self) -> None:
        """Every connection ends now; new ones are taken."""

        def end_all() -> None:
            for writer in self._open:
                writer.transport.abort()

        self._on_loop(end_all)

    # -- on the loop

    async def _start(self) -> None:
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = f"{host}:{port}"

    async def _stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # connections that were aborted say so

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._open.add(writer)
        far: asyncio.StreamWriter | None = None
        try:
            far_reader, far = await self._connect()
            self._open.add(far)
            ways = {
                asyncio.create_task(self._pass_on(reader, far)),
                asyncio.create_task(self._pass_on(far_reader, writer)),
            }
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except (OSError, TimeoutError, asyncio.CancelledError):
            return  # the near end sees its connection close
        finally:
            for end in (writer, far):
                if end is not None:
                    self._open.discard(end)
                    end.transport.abort()
            self._tasks.discard(task)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        async with asyncio.timeout(UPSTREAM_WAIT_S):
            while not self.upstream:
                await asyncio.sleep(0.02)
            if self.upstream.startswith("/"):
                return await asyncio.open_unix_connection(self.upstream)
            host, _, port = self.upstream.rpartition(":")
            return await asyncio.open_connection(host, int(port))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(CHUNK_BYTES):
                mischief = self._mischief
                if mischief.delay_s:
                    await asyncio.sleep(self._rng.uniform(0.0, mischief.delay_s))
                await self._flowing.wait()
                if self._rng.random() < mischief.drop:
                    self.num_dropped += 1
                    continue
                if self._rng.random() < mischief.garble:
                    piece = self._garbled(piece)
                writer.write(piece)
                await writer.drain()

    def _garbled(self, piece: bytes) -> bytes:
        spoiled = bytearray(piece)
        spoiled[self._rng.randrange(len(spoiled))] ^= 1 << self._rng.randrange(8)
        if _GOAWAY.search(spoiled):
            return piece
        self.num_garbled += 1
        return bytes(spoiled)

    def _call(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(STOP_S)

    def _on_loop(self, work: Callable[[], None]) -> None:
        done = threading.Event()

        def run() -> None:
            work()
            done.set()

        self._loop.call_soon_threadsafe(run)
        assert done.wait(STOP_S), "the proxy's loop does not run"
