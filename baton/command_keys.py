"""`baton keys`: make and rotate the file of keys that a deployment's handles are signed with.

Every worker is told the file by its setting `handle_keys_file`, and reads it again when it has
changed. Where all workers read one file, `rotate` is one step: the new key signs, the one before
stays valid. Where each has a copy (a Kubernetes secret arrives at different moments), rotate in
three, each brought to all workers before the next: `--step add`, `--step use`, `--step drop`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from process import keys

_STEPS = {
    "": (keys.rotate, "signs now; the key before it stays valid"),
    "add": (keys.add_next, "is valid now and does not sign yet; next: --step use"),
    "use": (keys.use_next, "signs now; next: --step drop"),
    "drop": (keys.drop_old, "is the only key now"),
}


def add_parser(commands: Any) -> None:
    """`baton keys new FILE` and `baton keys rotate FILE`."""
    parser = commands.add_parser(
        "keys", help="make or rotate the keys of handles", description=__doc__
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    new = actions.add_parser("new", help="make a key file, readable by you only")
    new.add_argument("file", type=Path, metavar="FILE")
    new.set_defaults(run=run_new)
    rotate = actions.add_parser("rotate", help="put a new key in; the old one stays valid")
    rotate.add_argument("file", type=Path, metavar="FILE")
    rotate.add_argument(
        "--step",
        choices=[step for step in _STEPS if step],
        default="",
        help="one of three steps, where copies of the file arrive at different moments",
    )
    rotate.set_defaults(run=run_rotate)


def run_new(parsed: argparse.Namespace) -> int:
    """Returns: 0. Raises: SettingsError when there is a file already, or no place for one."""
    key = keys.create(parsed.file)
    sys.stdout.write(
        f"{parsed.file}: key {key.key_id}; workers take it as handle_keys_file={parsed.file}\n"
    )
    return 0


def run_rotate(parsed: argparse.Namespace) -> int:
    """Returns: 0. Raises: SettingsError for a file that cannot be used."""
    change, what = _STEPS[parsed.step]
    key = change(parsed.file)
    sys.stdout.write(f"{parsed.file}: key {key.key_id} {what}\n")
    return 0
