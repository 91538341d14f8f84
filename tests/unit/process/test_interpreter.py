"""What importing and begin_serving leave behind, in a process of its own: garbage is gone, what
stays is not looked at again, and a thread that waits for the interpreter waits but shortly."""

from __future__ import annotations

import subprocess
import sys

CODE = """if True:
    import gc
    import sys
    import weakref

    from process import interpreter

    class Node:
        pass

    garbage = Node()
    garbage.itself = garbage
    gone = weakref.ref(garbage)
    del garbage
    kept = [[] for _ in range(1000)]
    interpreter.begin_serving()
    assert gone() is None
    assert gc.get_freeze_count() > len(kept)
    assert not any(each is kept for each in gc.get_objects())  # no collection comes upon it
    assert round(sys.getswitchinterval() * 1e6) == interpreter.SWITCH_S * 1e6 < 1000  # in whole us
    later = Node()
    later.itself = later
    gone = weakref.ref(later)
    del later
    gc.collect()
    assert gone() is None  # what is made from here on is collected as ever
"""

IMPORTING_CODE = """if True:
    import gc

    from process import interpreter

    class Broken(Exception):
        pass

    try:
        with interpreter.importing():
            assert not gc.isenabled()
            kept = [[] for _ in range(1000)]
            raise Broken
    except Broken:
        pass
    assert gc.isenabled() and not any(each is kept for each in gc.get_objects())
    gc.disable()
    with interpreter.importing():
        assert not gc.isenabled()
    assert not gc.isenabled()  # as it was
"""


def test_the_collector_rests_while_something_is_imported_and_then_goes_on() -> None:
    subprocess.run([sys.executable, "-c", IMPORTING_CODE], timeout=60, check=True)


def test_what_is_loaded_is_out_of_the_collectors_way() -> None:
    subprocess.run([sys.executable, "-c", CODE], timeout=60, check=True)
