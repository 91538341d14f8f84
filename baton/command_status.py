"""`baton status`: workers and their blocks, stores and their leases, hit rates."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from baton import command_options, provenance_view
from baton.status_view import status_tables, to_plain


def add_parser(commands: Any) -> None:
    """`baton status` and its options."""
    parser = commands.add_parser("status", help="show the cluster", description=__doc__)
    parser.add_argument("--json", action="store_true", help="all numbers as one JSON object")
    command_options.add_address(parser)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Returns: 0. Raises: what the client raises."""
    with command_options.client_of(parsed) as client:
        status = client.status()
    if parsed.json:
        sys.stdout.write(json.dumps(to_plain(status)) + "\n")
    else:
        provenance_view.show(status_tables(status))
    return 0
