"""`baton api-key`: the keys by which clients are known to a router, and their tenants.

The router is told the file by its setting `api_keys_file`, and reads it again when it changes: an
added key works at once, a removed one is refused at once. The file holds digests only; a key is
shown once, when it is made. Limits of a tenant are a table of the same file, `[tenants.NAME]`,
with weight, max_requests_per_min, max_tokens_per_min, max_queued_requests, max_active_requests.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from baton import command_options, key_files
from baton.errors import InvalidArgument
from baton.key_files import KeyFileError
from process import api_keys


def add_parser(commands: Any) -> None:
    """`baton api-key add|list|remove`."""
    parser = commands.add_parser(
        "api-key", help="make, list or remove clients' API keys", description=__doc__
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    add = actions.add_parser("add", help="make a key and show it, this once")
    add.add_argument("--tenant", required=True, metavar="NAME")
    add.add_argument("--admin", action="store_true", help="may also see the whole cluster")
    add.add_argument("--min-priority", type=int, default=-100, metavar="N")
    add.add_argument("--max-priority", type=int, default=0, metavar="N", help="default: 0")
    add.add_argument("--expires", default="", metavar="DATE", help="such as 2027-01-31; UTC")
    add.set_defaults(run=run_add)
    show = actions.add_parser("list", help="show the keys of a file: ids, tenants, bounds")
    show.set_defaults(run=run_list)
    remove = actions.add_parser("remove", help="take a key out; it is refused from then on")
    remove.add_argument("key_id", metavar="KEY_ID")
    remove.set_defaults(run=run_remove)
    for action in (add, show, remove):
        where = action.add_mutually_exclusive_group()
        command_options.add_cluster_name(where)
        where.add_argument(
            "--file",
            type=Path,
            metavar="FILE",
            help="default: that of the cluster which `baton up --api-keys` started last",
        )


def run_add(parsed: argparse.Namespace) -> int:
    """Returns: 0. Raises: SettingsError, KeyFileError, InvalidArgument for a date in the past."""
    path = _file(parsed)
    key, key_id, entry = api_keys.new_key(
        parsed.tenant,
        is_admin=parsed.admin,
        min_priority=parsed.min_priority,
        max_priority=parsed.max_priority,
        expires=parsed.expires,
    )
    expires_s = entry.expires_unix_s()
    if expires_s is not None and expires_s <= time.time():
        raise InvalidArgument("--expires", f"{parsed.expires} is in the past")
    key_files.add(path, key_id, entry)
    sys.stderr.write(f"{path}: key {key_id} of tenant {parsed.tenant}; it is not shown again\n")
    sys.stdout.write(f"{key}\n")
    return 0


def run_list(parsed: argparse.Namespace) -> int:
    """Returns: 0. Raises: SettingsError."""
    for key_id, entry in sorted(api_keys.load(_file(parsed)).keys.items()):
        admin = ", admin" if entry.is_admin else ""
        expires = f", expires {entry.expires}" if entry.expires else ""
        sys.stdout.write(
            f"{key_id}: tenant {entry.tenant}, priority {entry.min_priority} to "
            f"{entry.max_priority}{admin}{expires}\n"
        )
    return 0


def run_remove(parsed: argparse.Namespace) -> int:
    """Returns: 0. Raises: SettingsError, KeyFileError when there is no such key."""
    path = _file(parsed)
    key_files.remove(path, parsed.key_id)
    sys.stdout.write(f"{path}: key {parsed.key_id} is gone\n")
    return 0


def _file(parsed: argparse.Namespace) -> Path:
    if parsed.file is not None:
        return Path(parsed.file)
    state = command_options.state_of(parsed)
    if state is None or not state.api_keys_file:
        raise KeyFileError("--file: needed; no cluster of yours runs that asks for API keys")
    return Path(state.api_keys_file)
