"""Where the time of a whole read through a mapped cache goes: until the first copy is given, while
nothing overlaps it; while copies run; and from the last byte that was seen to the result."""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kvstore.transport.cuda_ipc import CudaIpcTransport

PARTS = ("before", "copies", "after")
LAST_PIECES_MIB = (16, 32, 64, 128)
"""The largest is that of all pieces: then none is shorter."""


async def by_last_piece(
    transport: CudaIpcTransport, read: Callable[[], Awaitable[float]], repeats: int
) -> dict[str, float]:
    """Medians in ms of `read`, which says its seconds, by the least MiB of a copy's last pieces;
    all sizes in turn, so that none has a quieter machine."""
    pump: Any = transport._pipeline  # noqa: SLF001  a policy of the transport, which is left as it was
    block_bytes, kept = transport._memory.block_bytes, pump._least_items  # noqa: SLF001
    seconds: dict[int, list[float]] = {mib: [] for mib in LAST_PIECES_MIB}
    for _ in range(repeats):
        for mib, found in seconds.items():
            pump._least_items = max(1, mib * 2**20 // block_bytes)  # noqa: SLF001
            found.append(await read())
    pump._least_items = kept  # noqa: SLF001
    return {f"last pieces of {mib} MiB": statistics.median(s) * 1e3 for mib, s in seconds.items()}


@dataclass
class ReadParts:
    """Of reads through one transport, one after another; s each. Whoever reads calls `done`."""

    before: list[float] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    num_confirmed: int = 0
    """Reads that were asked about when the last byte was here."""
    _given_s: float = 0.0
    _here_s: float = 0.0

    def done(self, began_s: float, end_s: float) -> float:
        """One read, by `time.perf_counter`. Returns: s of all of it."""
        self.before.append(self._given_s - began_s)
        self.copies.append(self._here_s - self._given_s)
        self.after.append(end_s - self._here_s)
        self._given_s = self._here_s = 0.0
        return end_s - began_s

    def row(self, first: int) -> dict[str, float]:
        """Medians in ms of all reads from the `first` on."""
        seconds: dict[str, list[float]] = {part: getattr(self, part) for part in PARTS}
        found = {f"{part}_ms": statistics.median(s[first:]) * 1e3 for part, s in seconds.items()}
        return found | {"num_confirmed": self.num_confirmed}

    @contextmanager
    def of(self, transport: CudaIpcTransport) -> Iterator[None]:
        """Look at what it does; it is left as it was."""
        names = ("_copies_between", "_copy_in", "_confirm")
        give, copy_in, confirm = (getattr(transport, name) for name in names)

        def given(*arguments: Any) -> Any:
            self._given_s = self._given_s or time.perf_counter()
            return give(*arguments)

        def copied(flight: Any, blocks: Any, is_stopped: Any, on_here: Any) -> Any:
            def here() -> None:
                self._here_s = time.perf_counter()
                on_here()

            return copy_in(flight, blocks, is_stopped, here)

        def confirmed(*arguments: Any) -> Any:
            self.num_confirmed += 1
            return confirm(*arguments)

        for name, instead in zip(names, (given, copied, confirmed), strict=True):
            setattr(transport, name, instead)
        try:
            yield
        finally:
            for name in names:
                delattr(transport, name)
