"""How this process' Python interpreter shares itself among threads, where one of them must not
wait: a worker's engine thread, while the loop takes a long prompt in.

Two things hold all threads up at once. The garbage collector, when it looks at every object there
is: hundreds of thousands after a model is loaded, none of which will ever be garbage. And the
interpreter's lock, which a thread that computes keeps for its whole switch interval although others
wait for it.

Settings of the whole process; called once, by whoever runs it, when all that stays is loaded.
"""

from __future__ import annotations

import gc
import sys

SWITCH_S = 0.0005
"""Python's own is 5 ms: a decode step's whole length. Each switch costs some 10 us."""


def begin_serving() -> None:
    """Collect once; what is left is never looked at again. From here on a thread that waits for the
    interpreter waits SWITCH_S at most for each that computes before it, and for calls into C that
    keep the lock."""
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_S)
