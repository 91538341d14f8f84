"""`baton block`: what happened to a KV block: written, pulled, verified, demoted, evicted, at each
store, by whom, and in which traced request.

A block is named by its chain hash, or the first digits of it, as traces and logs have it; without
one the blocks with the latest news are shown.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import sys
from collections.abc import Sequence
from typing import Any

from google.protobuf import json_format
from rich.console import Group, RenderableType
from rich.text import Text

from baton import block_history, command_options, provenance_view
from baton.block_history import Told
from baton.command_options import seconds
from baton.errors import InvalidArgument, NotFound, Unavailable
from baton.tables import table
from kvstore.block_hash import CHAIN_HASH_BYTES
from protos import common_pb2, kvstore_pb2

DEFAULT_BLOCKS = 8


def add_parser(commands: Any) -> None:
    """`baton block` and its options."""
    parser = commands.add_parser(
        "block", help="show what happened to a KV block", description=__doc__
    )
    parser.add_argument(
        "chain_hash", nargs="?", default="", metavar="HASH", help="or its first digits"
    )
    parser.add_argument(
        "--num",
        type=int,
        default=DEFAULT_BLOCKS,
        metavar="N",
        help=f"most blocks to show of each store; default: {DEFAULT_BLOCKS}",
    )
    command_options.add_redis(parser)
    parser.add_argument("--timeout", type=seconds, default=5.0, metavar="SECONDS")
    parser.add_argument("--json", action="store_true", help="all of it as one JSON object")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Returns: 0. Raises: InvalidArgument for what is no hash; NotFound when no store remembers
    such a block; Unavailable when there is no Redis or no store answers."""
    told = asyncio.run(
        block_history.ask(
            command_options.redis_url_of(parsed),
            prefix_of(parsed.chain_hash),
            max_blocks=max(1, parsed.num),
            timeout_s=parsed.timeout,
            dial=command_options.dialer_of(parsed),
            access=command_options.redis_access_of(parsed),
        )
    )
    if told and all(each.problem for each in told):
        raise Unavailable("; ".join(f"{each.node_id}: {each.problem}" for each in told))
    if not any(each.blocks for each in told):
        named = f"of block {parsed.chain_hash}" if parsed.chain_hash else "of any block"
        raise NotFound(f"no store remembers anything {named}")
    if parsed.json:
        sys.stdout.write(json.dumps(to_plain(told)) + "\n")
    else:
        provenance_view.show(histories(told))
    return 0


def prefix_of(digits: str) -> bytes:
    """The bytes that a chain hash begins with. Raises: InvalidArgument."""
    try:
        prefix = bytes.fromhex(digits)
    except ValueError as error:
        raise InvalidArgument(
            "HASH", f"{digits[:80]!r} is not hexadecimal, two digits a byte"
        ) from error
    if len(prefix) > CHAIN_HASH_BYTES:
        raise InvalidArgument("HASH", f"a chain hash has {2 * CHAIN_HASH_BYTES} digits")
    return prefix


def to_plain(told: Sequence[Told]) -> dict[str, Any]:
    """All of it as JSON values; hashes in hex."""
    return {
        "stores": [
            {
                "node_id": each.node_id,
                "problem": each.problem,
                "blocks": [_plain(block) for block in each.blocks],
            }
            for each in told
        ]
    }


def histories(told: Sequence[Told]) -> RenderableType:
    """A table for each block of each store. Pure."""
    parts: list[RenderableType] = []
    for each in told:
        if each.problem:
            parts.append(Text(f"{each.node_id}: {each.problem}", style="red"))
        for block in each.blocks:
            parts += [Text(), _heading(each.node_id, block), _events(block)]
    return Group(*parts[isinstance(parts[0], Text) and not parts[0] :])


def _heading(node_id: str, block: kvstore_pb2.BlockHistory) -> Text:
    where = ", ".join(_tier(tier) for tier in block.tiers) or "not there any more"
    text = Text(f"{block.chain_hash.hex()}", style="bold")
    text.append(f" at {node_id}: {where}", style="not bold")
    if block.tiers:
        text.append(f", {block.num_hits} hits, {block.num_pins} pins", style="not bold")
        after = block.parent.hex() if block.parent else "the beginning of a prompt"
        text.append(f", after {after}", style="not bold")
    return text


def _events(block: kvstore_pb2.BlockHistory) -> RenderableType:
    made = table("when", "what", "by", "trace")
    if block.num_events_forgotten:
        made.add_row("", f"({block.num_events_forgotten} earlier)", "", "")
    for event in block.events:
        when = datetime.datetime.fromtimestamp(event.unix_us / 1e6)
        made.add_row(
            when.isoformat(sep=" ", timespec="milliseconds"),
            event.what.replace("_", " "),
            event.worker_id or "the store",
            event.trace_id or "-",
        )
    return made


def _tier(number: int) -> str:
    return common_pb2.Tier.Name(number).removeprefix("TIER_").lower()


def _plain(block: kvstore_pb2.BlockHistory) -> dict[str, Any]:
    plain: dict[str, Any] = json_format.MessageToDict(
        block, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    plain["chain_hash"], plain["parent"] = block.chain_hash.hex(), block.parent.hex()
    plain["tiers"] = [_tier(tier) for tier in block.tiers]
    for event, message in zip(plain["events"], block.events, strict=True):
        event["unix_us"] = message.unix_us
    return plain
