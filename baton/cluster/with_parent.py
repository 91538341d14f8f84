"""Run a program that dies with our parent: `python -m baton.cluster.with_parent redis-server ...`.

The wish is the kernel's to keep (PR_SET_PDEATHSIG) and outlives the exec, so a program that knows
nothing of it, such as redis-server, is bound too.
"""

from __future__ import annotations

import os
import sys

from process import entrypoint, errors


def main() -> int:
    """Becomes the program. Returns: 2 when called wrong, or when the parent is gone already."""
    if len(sys.argv) < 2:
        sys.stderr.write("with_parent: name a program to run\n")
        return 2
    try:
        entrypoint.die_with_parent()
        os.execvp(sys.argv[1], sys.argv[1:])
    except (errors.Unavailable, OSError) as error:
        sys.stderr.write(f"with_parent: {sys.argv[1]}: {error}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
