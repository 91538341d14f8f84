"""What one WRITE moves, as runs of bytes: joined where they continue one another, which NIXL does
not do, and cut into pieces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

PIECE_BYTES = 16 * 1024 * 1024
"""Most bytes that one `transfer()` call may copy: 16 MiB take about 8 ms by CMA (measured)."""
DEVICE_PIECE_BYTES = 256 * 1024 * 1024
"""Between devices `transfer()` only starts the copy, so large pieces block nobody; 16 MiB ones
reached half the rate (measured)."""

Run = tuple[int, int, int]
"""(local address, remote address, bytes)"""


def merge_runs(pairs: Iterable[tuple[int, int]], num_bytes: int) -> list[Run]:
    """Join (local, remote) pieces of `num_bytes` each that continue one another on both sides."""
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
    """The same bytes as lists of runs of at most `piece_bytes` together, in order."""
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
