"""`baton explain`: where a request stands and what it waits for, and why it went to the workers
that it went to: which were weighed, by what.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from google.protobuf import json_format
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from baton import command_options, provenance_view
from baton.tables import table
from protos import common_pb2, inference_pb2

_SMALL = 0.001
"""Below it a number is shown by its digits that count."""


def add_parser(commands: Any) -> None:
    """`baton explain` and its options."""
    parser = commands.add_parser(
        "explain", help="show why a request went where it did", description=__doc__
    )
    parser.add_argument(
        "request_id",
        nargs="?",
        default="",
        help="or its beginning, as `baton top` shows it; default: the latest request",
    )
    parser.add_argument("--tenant", default="", help="whose request; default: whoever's is latest")
    parser.add_argument("--json", action="store_true", help="the whole record as one JSON object")
    command_options.add_address(parser)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Returns: 0. Raises: what the client raises; NotFound for a request that is not known."""
    with command_options.client_of(parsed) as client:
        # `baton top` ends what it shortens with a sign that is no part of the id.
        reply = client.explain(parsed.request_id.removesuffix("…"), tenant=parsed.tenant)
    if parsed.json:
        sys.stdout.write(json.dumps(to_plain(reply)) + "\n")
    else:
        provenance_view.show(explanation(reply))
    return 0


def to_plain(reply: inference_pb2.ExplainReply) -> dict[str, Any]:
    """All of it, in the names of the proto."""
    plain: dict[str, Any] = json_format.MessageToDict(
        reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return plain


def explanation(reply: inference_pb2.ExplainReply) -> RenderableType:
    """A headline, where it stands, then each choice with its candidates, role by role."""
    parts: list[RenderableType] = [
        Text(f"request {reply.request_id} of {reply.tenant}, model {reply.model}", style="bold")
    ]
    if reply.HasField("request"):
        parts += [Text(line) for line in standing(reply.request, reply.admission)]
    for number, decision in enumerate(reply.decisions, start=1):
        parts += [Text(""), Text(f"{number}. {headline(decision)}")]
        parts += [Text(line, style="dim") for line in _details(decision)]
        for role in ("prefill", "decode"):
            of_role = [c for c in decision.candidates if c.role == role]
            if of_role:
                parts += [Text(""), _candidates(role, decision, of_role)]
    return Group(*parts)


def standing(request: inference_pb2.RequestInfo, admission: inference_pb2.Admission) -> list[str]:
    """How far it has come, and before its turn where in line it stands."""
    spent = {span.stage: span.end_s - span.begin_s for span in request.spans}
    came = f"came as number {admission.arrival}"
    if admission.HasField("standing"):
        now = admission.standing
        turn = "not known yet"
        if now.HasField("expected_wait_s"):
            turn = f"expected in {now.expected_wait_s:.1f} s"
        return [
            f"{request.state} for {spent.get(request.state, 0.0):.1f} s: {came}, number "
            f"{now.position} of {now.num_in_line} in its line ({now.num_waiting} wait in all), due "
            f"in {now.due_in_s:.1f} s; its turn is {turn}",
            f"it waits for {now.waits_for}",
        ]
    doing = request.state or request.outcome
    if request.code:
        doing += f" ({request.code})"
    if not admission.turn:
        return [f"{doing} before its turn" + (f": {came}" if admission.arrival else "")]
    first = "no token yet"
    if request.first_token_s:
        first = f"first token after {request.first_token_s:.3g} s"
    return [
        f"{doing}: {came}, admitted as number {admission.turn} after "
        f"{spent.get('queue', 0.0):.3g} s in the queue; {first}"
    ]


def headline(decision: inference_pb2.RoutingDecision) -> str:
    """Who won."""
    if not decision.prefill_id:
        won = f"{decision.decode_id} computes the prompt itself"
    elif not decision.decode_id:
        won = f"{decision.prefill_id} alone, for an answer of one token"
    else:
        path = common_pb2.HandoverPath.Name(decision.handover).removeprefix("HANDOVER_PATH_")
        won = f"{decision.prefill_id} -> {decision.decode_id}, KV by the {path.lower()} path"
        won = won.replace("store path", "store").replace("by the store", "through the store")
    return f"{decision.occasion}: {won} ({_number(decision.cost)} {decision.unit})"


def _details(decision: inference_pb2.RoutingDecision) -> list[str]:
    lines = [
        f"{decision.policy}, {decision.num_pairs} ways over {decision.num_prefill} prefill and "
        f"{decision.num_decode} decode workers, decided in {decision.took_s * 1e6:.0f} us; "
        f"{decision.num_prompt_tokens} prompt tokens, {decision.num_computed} to compute"
    ]
    if decision.runs:
        runs = ", ".join(
            f"{run.num_blocks} blocks from {run.first_block} at {run.node_id}"
            for run in decision.runs
        )
        lines.append(f"prefix: {runs}")
    return lines


def _candidates(
    role: str,
    decision: inference_pb2.RoutingDecision,
    candidates: Sequence[inference_pb2.RoutingCandidate],
) -> Table:
    names = _names(candidates)
    made = table("", role, numbers=["cost", *(name.replace("_", " ") for name in names)])
    for candidate in candidates:
        terms = {term.name: term.value for term in candidate.terms}
        made.add_row(
            ">" if candidate.chosen else "",
            candidate.worker_id,
            f"{_number(candidate.cost)} {decision.unit}",
            *(_number(terms[name]) if name in terms else "" for name in names),
        )
    return made


def _names(candidates: Iterable[inference_pb2.RoutingCandidate]) -> list[str]:
    """Terms that are not 0 for all of them, in their order."""
    names: dict[str, None] = {}
    for candidate in candidates:
        for term in candidate.terms:
            if term.value:
                names[term.name] = None
    return list(names)


def _number(value: float) -> str:
    if value and abs(value) < _SMALL:
        return f"{value:.1e}"
    return f"{value:.4g}" if abs(value) < 1e6 else "last choice"
