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

SWITCH_S = 0.0005
"""Python's own is 5 ms: a decode step's whole length. Each switch costs some 10 us."""


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
    here on a thread that waits for the interpreter waits SWITCH_S at most for each that computes
    before it, and for calls into C that keep the lock."""
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_S)
