"""Who does gRPC's reading and writing in a Baton process: the one thread that hands events to the
loop, and no pool beside it.

gRPC's own choice (1.85) is an engine of several threads which hand each other every read and write
before the loop hears of it: twelve switches between threads for one call against five. What a
process of ours does with what it reads is Python, on one thread, in any case. Figures:
docs/decisions.md.

Importing this module makes the choice, and gRPC reads it when it is first imported: so it is
`process.entry`'s first import, and the first of each `__main__`. An environment that has
GRPC_EXPERIMENTS, be it empty, is left as it is. Knows no server and no channel.
"""

from __future__ import annotations

import os

VARIABLE = "GRPC_EXPERIMENTS"

EXPERIMENTS = (
    "-event_engine_client",
    "-event_engine_listener",
    "-event_engine_for_all_other_endpoints",
)
"""Switched off, by gRPC's own names; tests/unit/process/test_grpc_io.py fails when a new version
does not know them any more."""

os.environ.setdefault(VARIABLE, ",".join(EXPERIMENTS))


def chosen() -> str:
    """What gRPC was told, for the log; empty: nothing, so its own choice."""
    return os.environ[VARIABLE]
