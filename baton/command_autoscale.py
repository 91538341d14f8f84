"""`baton autoscale`: how many workers there shall be, and what the autoscaler decided why."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import sys
from collections.abc import Sequence
from typing import Any

import grpc.aio
from google.protobuf import json_format
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from baton import command_options, provenance_view
from baton.errors import InvalidArgument, Unavailable
from baton.tables import table
from process import serving
from process.access import Role
from process.serving import Dialer
from protos import autoscaler_pb2, autoscaler_pb2_grpc

_TIMEOUT_S = 5.0


def add_parser(commands: Any) -> None:
    """`baton autoscale` and its options."""
    parser = commands.add_parser(
        "autoscale", help="show what the autoscaler decided, and why", description=__doc__
    )
    parser.add_argument(
        "-n", type=int, default=10, metavar="N", help="decisions, newest first; default: 10"
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="also decisions to leave everything as it is; default: those that changed something",
    )
    parser.add_argument(
        "--why", action="store_true", help="with the figures that each decision was made from"
    )
    parser.add_argument("--json", action="store_true", help="the whole record as one JSON object")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="the router's, of a cluster that you started here; elsewhere the autoscaler's own, as "
        "a port-forward has it; default: the cluster that `baton up` started last",
    )
    command_options.add_cluster_name(where)
    command_options.add_credentials(parser)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Returns: 0. Raises: Unavailable where no autoscaler answers; what it says."""
    if parsed.n < 1:
        raise InvalidArgument("-n", "must be at least 1")
    request = autoscaler_pb2.GetDecisionsRequest(
        num_decisions=parsed.n, only_actions=not parsed.all
    )
    dial = command_options.dialer_of(parsed)
    reply = asyncio.run(_ask(dial, _address(parsed), request))
    if parsed.json:
        sys.stdout.write(json.dumps(to_plain(reply)) + "\n")
    else:
        provenance_view.show(decisions_view(reply, with_why=parsed.why))
    return 0


def to_plain(reply: autoscaler_pb2.GetDecisionsReply) -> dict[str, Any]:
    """All of it, in the names of the proto; the whys as objects."""
    plain: dict[str, Any] = json_format.MessageToDict(
        reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    for decision in plain["decisions"]:
        decision["why"] = json.loads(decision.pop("why_json") or "{}")
    return plain


def decisions_view(
    reply: autoscaler_pb2.GetDecisionsReply, *, with_why: bool = False
) -> RenderableType:
    """The pools, what is not as it should be, and the decisions."""
    acts = "acts" if reply.is_leader else "does not act: another one leads, or nobody can"
    parts: list[RenderableType] = [Text(f"{reply.autoscaler_id} {acts}")]
    parts += [Text(f"problem: {problem}", style="bold red") for problem in reply.problems]
    parts.append(Padding(_pools(reply.pools), (1, 0, 1, 0)))
    if not reply.decisions:
        parts.append(Text("nothing was decided yet (--all: also what changed nothing)"))
    for decision in reply.decisions:
        parts.append(_line(decision))
        if with_why:
            parts.append(Padding(_why(decision), (0, 0, 1, 2)))
    return Group(*parts)


def _address(parsed: argparse.Namespace) -> str:
    """Where the autoscaler answers. Raises: Unavailable."""
    state = command_options.state_of(parsed)
    if state is None and parsed.address:
        return str(parsed.address)
    if state is None:
        raise Unavailable(
            "no cluster of yours runs here; start one with `baton up --autoscale`, or give "
            "--address"
        )
    if not state.autoscaler_address:
        raise Unavailable("the cluster has no autoscaler; start it with `baton up --autoscale`")
    return state.autoscaler_address


async def _ask(
    dial: Dialer, address: str, request: autoscaler_pb2.GetDecisionsRequest
) -> autoscaler_pb2.GetDecisionsReply:
    async with dial(address, Role.AUTOSCALER) as channel:
        stub = autoscaler_pb2_grpc.AutoscalerStub(channel)
        try:
            reply: autoscaler_pb2.GetDecisionsReply = await stub.GetDecisions(
                request, timeout=_TIMEOUT_S
            )
            return reply
        except grpc.aio.AioRpcError as error:
            raise serving.error_from_rpc(error) from None


def _pools(pools: Sequence[autoscaler_pb2.PoolView]) -> Table:
    made = table("pool", numbers=("asked for", "ready", "draining"))
    for pool in pools:
        made.add_row(pool.role, str(pool.num_wanted), str(pool.num_ready), str(pool.num_draining))
    return made


def _line(decision: autoscaler_pb2.ScalingDecision) -> Text:
    at = datetime.datetime.fromtimestamp(decision.decided_unix_ms / 1000)
    outcome = f" [{decision.outcome}]" if decision.outcome else ""
    failure = f": {decision.problem}" if decision.problem else ""
    return Text(f"{at:%H:%M:%S}  {decision.summary}{outcome}{failure}")


def _why(decision: autoscaler_pb2.ScalingDecision) -> RenderableType:
    why = json.loads(decision.why_json or "{}")
    made = table("term", numbers=("value",))
    for name, value in why.get("terms", {}).items():
        made.add_row(name, f"{value:g}")
    candidates = Text(
        f"{why.get('num_candidates', 0)} pairs within the limits, "
        f"{why.get('num_affordable', 0)} of "
        "them within the budget"
    )
    return Group(made, candidates, *(Text(f"note: {note}") for note in why.get("notes", ())))
