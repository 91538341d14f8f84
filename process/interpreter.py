"""How this process' Python interpreter shares itself among threads, where one of them must not
wait: a worker's engine thread, while the loop takes a long prompt in.

Two things hold all threads up at once. The garbage collector, when it looks at every object there
is: hundreds of thousands after a model is loaded, none of which will ever be garbage. And the
interpreter's lock, which a thread that computes keeps for its whole switch interval although others
wait for it.

And how it starts: a tenth of the time that large packages take to import is the collector's, who
looks for garbage where there is none.

Settings of the whole process; for whoever runs it.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator

SWITCH_S = 0.0001
"""Python's own is 5 ms: a decode step's whole length. Each switch costs some 10 us.

A thread that lets the lock go for a moment, as the loop does between two turns, has taken it again
before the one that waits for it is awake, whose time begins anew then: beside a loop with one short
turn behind the other an engine's thread waits not for 0.5 ms but until the loop rests. With six
turns of 0.3 ms now and then (benchmarks/results/2026-11-23-switch-interval.json), after a device's
end 99 of 100 times within ms:

| SWITCH_S | the engine's thread wakes up | it has launched what comes next | the loop has told |
|---|---|---|---|
| 0.5 ms | 1.8 | 2.2 | 2.6 |
| 0.2 ms | 0.8 | 1.6 | 1.3 |
| 0.1 ms | 0.4 | 1.7 | 1.7 |
| 0.05 ms | 0.2 | 1.1 | 1.3 |

What it costs: the turns end 0.4 ms later, 1.2 at most, when the other thread comes between them.
Beside a loop that only tells, the launch is made after 0.7 ms instead of 0.4, since the telling has
part of that time now, and ends when it did. A device that computes a step ahead does not see it."""


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """While large packages are imported: the collector rests, and never looks at what there is in
    the end. For imports alone: what else is made meanwhile and is garbage in cycles stays."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def begin_serving() -> None:
    """Once, when all that stays is loaded: collect; what is left is never looked at again. From
    here on a thread that waits for the interpreter waits SWITCH_S for each that computes before it,
    and for calls into C that keep the lock."""
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_S)
