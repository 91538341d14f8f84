"""`baton explain` and `baton autoscale`: why a request went to its workers, and why the autoscaler
started or stopped workers.
"""

from __future__ import annotations

import asyncio
import datetime
import functools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import click
import grpc.aio
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from baton.cli import options, render
from baton.cli.options import RouterTarget, flag, value
from baton.cli.render import number, text
from baton.errors import InvalidArgument, Unavailable
from process import rpc
from process.authorization import PeerRole
from process.rpc import Dialer
from protos import autoscaler_pb2, autoscaler_pb2_grpc, common_pb2, inference_pb2

_SMALL = 0.001
"""Below it a number is shown by its digits that count."""
_TIMEOUT_S = 5.0


@options.command("explain")
@click.argument("request_id", default="")
@value("--tenant", "NAME", "Look only at requests of this tenant.", "")
@options.as_json()
@options.router_target()
def explain(request_id: str, tenant: str, as_json: bool, target: RouterTarget) -> None:
    """Show the state of a request, what it waits for, and why it went to its workers.

    REQUEST_ID may be the beginning of an id, as `baton top` shows it. By default it is the latest
    request.
    """
    with target.client() as client:
        # `baton top` marks an id that it shortens with this sign, which is not part of the id.
        reply = client.explain(request_id.removesuffix("…"), tenant=tenant)
    if as_json:
        render.print_json(render.to_dict(reply))
    else:
        render.show(explanation(reply))


def explanation(reply: inference_pb2.ExplainReply) -> RenderableType:
    """The explanation of a request: a headline, the state of the request, then each decision with
    its candidates by role."""
    parts: list[RenderableType] = [
        Text(f"request {reply.request_id} of {reply.tenant}, model {reply.model}", style="bold")
    ]
    if reply.HasField("request"):
        parts += [Text(line) for line in standing(reply.request, reply.admission)]
    for place, decision in enumerate(reply.decisions, start=1):
        parts += [Text(""), Text(f"{place}. {headline(decision)}")]
        parts += [Text(line, style="dim") for line in _details(decision)]
        for role in ("prefill", "decode"):
            of_role = [c for c in decision.candidates if c.role == role]
            if of_role:
                parts += [Text(""), _candidates(role, decision, of_role)]
    return Group(*parts)


def standing(request: inference_pb2.RequestInfo, admission: inference_pb2.Admission) -> list[str]:
    """A line with the state of the request and, before its admission, its place in the queue."""
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
    """A line with the workers that were chosen for the request."""
    if not decision.prefill_id:
        won = f"{decision.decode_id} computes the prompt itself"
    elif not decision.decode_id:
        won = f"{decision.prefill_id} alone, for an answer of one token"
    else:
        path = common_pb2.HandoverPath.Name(decision.handover).removeprefix("HANDOVER_PATH_")
        won = f"{decision.prefill_id} -> {decision.decode_id}, KV by the {path.lower()} path"
        won = won.replace("store path", "store").replace("by the store", "through the store")
    return f"{decision.occasion}: {won} ({_number(decision.cost, f' {decision.unit}')})"


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
    def term(candidate: inference_pb2.RoutingCandidate, name: str) -> str:
        values = {one.name: one.value for one in candidate.terms}
        return _number(values[name]) if name in values else ""

    columns = [
        text("", lambda candidate: ">" if candidate.chosen else ""),
        text(role, "worker_id"),
        number("cost", lambda candidate: _number(candidate.cost, f" {decision.unit}")),
        *(
            number(name.replace("_", " "), functools.partial(term, name=name))
            for name in _names(candidates)
        ),
    ]
    return render.table(columns, candidates)


def _names(candidates: Iterable[inference_pb2.RoutingCandidate]) -> list[str]:
    """Terms that are not 0 for each of them, in their order."""
    names: dict[str, None] = {}
    for candidate in candidates:
        for term in candidate.terms:
            if term.value:
                names[term.name] = None
    return list(names)


def _number(value: float, unit: str = "") -> str:
    if abs(value) >= 1e6:
        return "last choice"
    return f"{value:.1e}{unit}" if value and abs(value) < _SMALL else f"{value:.4g}{unit}"


# -- autoscale


@options.command("autoscale")
@value("-n", "N", "Show at most N decisions, the newest first.", 10)
@flag("--all", "Show decisions that changed nothing, too.", dest="with_all")
@flag("--why", "Show the figures that each decision was made from.")
@options.as_json()
@options.router_target(
    "The router's address of a cluster that you started here; for another cluster the address of "
    "its autoscaler, for example of a port-forward."
)
def autoscale(n: int, with_all: bool, why: bool, as_json: bool, target: RouterTarget) -> None:
    """Show how many workers the autoscaler wants, and what it decided and why."""
    if n < 1:
        raise InvalidArgument("-n", "must be at least 1")
    request = autoscaler_pb2.GetDecisionsRequest(num_decisions=n, only_actions=not with_all)
    reply = asyncio.run(_ask(target.dialer(), _autoscaler_address(target), request))
    if as_json:
        render.print_json(decisions_as_json(reply))
    else:
        render.show(decisions_view(reply, with_why=why))


def decisions_as_json(reply: autoscaler_pb2.GetDecisionsReply) -> dict[str, Any]:
    """The reply as JSON values with the names of the proto; each `why` is an object."""
    plain = render.to_dict(reply)
    for decision in plain["decisions"]:
        decision["why"] = json.loads(decision.pop("why_json") or "{}")
    return plain


def decisions_view(
    reply: autoscaler_pb2.GetDecisionsReply, *, with_why: bool = False
) -> RenderableType:
    """The view of the autoscaler's reply: its pools, problems and decisions."""
    acts = "acts" if reply.is_leader else "does not act: it is not the leader"
    parts: list[RenderableType] = [Text(f"{reply.autoscaler_id} {acts}")]
    parts += [Text(f"problem: {problem}", style="bold red") for problem in reply.problems]
    parts.append(Padding(render.table(_POOLS, reply.pools), (1, 0, 1, 0)))
    if not reply.decisions:
        parts.append(Text("no decision yet (--all shows those that changed nothing, too)"))
    for decision in reply.decisions:
        parts.append(_line(decision))
        if with_why:
            parts.append(Padding(_why(decision), (0, 0, 1, 2)))
    return Group(*parts)


def _autoscaler_address(target: RouterTarget) -> str:
    """The address of the cluster's autoscaler. Raises: Unavailable where none is known."""
    if target.state is None and target.address:
        return target.address
    if target.state is None:
        raise Unavailable(
            "no cluster of yours runs here; start one with `baton up --autoscale`, or give "
            "--address"
        )
    if not target.state.autoscaler_address:
        raise Unavailable("the cluster has no autoscaler; start it with `baton up --autoscale`")
    return target.state.autoscaler_address


async def _ask(
    dial: Dialer, address: str, request: autoscaler_pb2.GetDecisionsRequest
) -> autoscaler_pb2.GetDecisionsReply:
    async with dial(address, PeerRole.AUTOSCALER) as channel:
        stub = autoscaler_pb2_grpc.AutoscalerStub(channel)
        try:
            reply: autoscaler_pb2.GetDecisionsReply = await stub.GetDecisions(
                request, timeout=_TIMEOUT_S
            )
            return reply
        except grpc.aio.AioRpcError as error:
            raise rpc.error_from_rpc(error) from None


_POOLS = (
    text("pool", "role"),
    number("asked for", "num_wanted"),
    number("ready", "num_ready"),
    number("draining", "num_draining"),
)


def _line(decision: autoscaler_pb2.ScalingDecision) -> Text:
    at = datetime.datetime.fromtimestamp(decision.decided_unix_ms / 1000)
    outcome = f" [{decision.outcome}]" if decision.outcome else ""
    failure = f": {decision.problem}" if decision.problem else ""
    return Text(f"{at:%H:%M:%S}  {decision.summary}{outcome}{failure}")


def _why(decision: autoscaler_pb2.ScalingDecision) -> RenderableType:
    why = json.loads(decision.why_json or "{}")
    columns = (text("term", lambda item: item[0]), number("value", lambda item: f"{item[1]:g}"))
    made = render.table(columns, why.get("terms", {}).items())
    candidates = Text(
        f"{why.get('num_candidates', 0)} pairs within the limits, "
        f"{why.get('num_affordable', 0)} of "
        "them within the budget"
    )
    return Group(made, candidates, *(Text(f"note: {note}") for note in why.get("notes", ())))
