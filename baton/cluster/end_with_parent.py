"""Runs a program that ends with its parent:
`python -m baton.cluster.end_with_parent redis-server ...`.

The kernel kills the program when the parent ends (PR_SET_PDEATHSIG, which stays set over exec), so
the program itself, such as redis-server, needs no support for it.
"""

from __future__ import annotations

import os
import sys

from process import entrypoint, rpc_errors


def main() -> int:
    """Become the named program, which dies with this process's parent. Returns: 2 without a
    program, or when the parent has ended already."""
    if len(sys.argv) < 2:
        sys.stderr.write("with_parent: name a program to run\n")
        return 2
    try:
        entrypoint.die_with_parent()
        os.execvp(sys.argv[1], sys.argv[1:])
    except (rpc_errors.Unavailable, OSError) as error:
        sys.stderr.write(f"with_parent: {sys.argv[1]}: {error}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
