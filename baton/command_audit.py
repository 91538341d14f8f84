"""`baton audit`: compare the prefix index in Redis with what each store really holds.

Exit code 1 when an index has drifted (entries are missing or false that are not just on their way),
or when a store that has a heartbeat could not be compared.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from baton import audit, command_options, provenance_view, tables
from baton.audit import StoreAudit
from baton.command_options import seconds

DEFAULT_SETTLE_S = 5.0
DEFAULT_TIMEOUT_S = 60.0


def add_parser(commands: Any) -> None:
    """`baton audit` and its options."""
    parser = commands.add_parser(
        "audit", help="compare the prefix index with the stores", description=__doc__
    )
    command_options.add_redis(parser)
    parser.add_argument(
        "--settle",
        type=seconds,
        default=DEFAULT_SETTLE_S,
        metavar="SECONDS",
        help="longest wait for a store to tell Redis what is on its way; default: 5",
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=DEFAULT_TIMEOUT_S,
        metavar="SECONDS",
        help="for reading one store and its index; default: 60",
    )
    parser.add_argument("--json", action="store_true", help="all numbers as one JSON object")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Returns: 0 when every index is right, else 1. Raises: Unavailable when Redis is away."""
    url = command_options.redis_url_of(parsed)
    dial = command_options.dialer_of(parsed)
    audits = asyncio.run(
        audit.audit(
            url,
            settle_s=parsed.settle,
            timeout_s=parsed.timeout,
            dial=dial,
            access=command_options.redis_access_of(parsed),
        )
    )
    if parsed.json:
        sys.stdout.write(json.dumps(to_plain(audits)) + "\n")
    else:
        provenance_view.show(audit_table(audits))
    return 1 if audit.found_fault(audits) else 0


def to_plain(audits: Sequence[StoreAudit]) -> dict[str, Any]:
    """The audits as JSON values."""
    stores = [
        {
            **dataclasses.asdict(one),
            "precision": one.precision,
            "recall": one.recall,
            "state": state_of(one),
        }
        for one in audits
    ]
    return {"found_fault": audit.found_fault(audits), "stores": stores}


def audit_table(audits: Sequence[StoreAudit]) -> RenderableType:
    """One row a store. Pure."""
    if not audits:
        return Text("no store is registered there")
    made = tables.table(
        "index of",
        numbers=(
            "in the store",
            "in the index",
            "precision",
            "recall",
            "missing",
            "false",
            "in flight",
            "lag",
            "behind for",
        ),
    )
    made.add_column("state")
    for one in audits:
        made.add_row(one.node_id, *_numbers(one), state_of(one))
    return Group(made)


def state_of(one: StoreAudit) -> str:
    """In a word or a sentence."""
    if one.problem:
        return one.problem
    if one.has_drifted:
        return "DRIFTED"
    dead = f"; {one.num_dead_lives} dead lives in Redis" if one.num_dead_lives else ""
    return ("ok" if one.is_settled else "not settled in time: nothing can be said") + dead


def _numbers(one: StoreAudit) -> list[str]:
    if one.problem:
        return ["-"] * 9
    behind = "-" if one.staleness_s is None else provenance_view.format_seconds(one.staleness_s)
    return [
        str(one.num_present),
        str(one.num_indexed),
        f"{100 * one.precision:.2f} %",
        f"{100 * one.recall:.2f} %",
        str(one.num_missing),
        str(one.num_false),
        str(one.num_in_flight),
        str(one.sequence_lag),
        behind,
    ]
