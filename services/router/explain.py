"""`explain` returns how one request was scheduled: its queue position and what it waits for, the
workers that were compared, their cost terms, and the chosen ones.

Built from the request log, the admission queue and the placement log, only when a client asks.
Reads state and changes none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from process.rpc_errors import InvalidArgument, NotFound
from protos import common_pb2, inference_pb2
from services.router.admission import Admission, AdmissionEntry
from services.router.placement import Key, PlacementDecision
from services.router.policies import Candidate, TransferPath
from services.router.request_stats import RequestLog
from services.router.served_models import ServedModels

_MAX_SHOWN = 8
"""Most request ids in one error message."""

_Found = tuple[str, Key, Sequence[PlacementDecision]]
"""Model name, key of the request, its placement decisions."""

_PATHS = {
    TransferPath.STORE: common_pb2.HANDOVER_PATH_STORE,
    TransferPath.DIRECT: common_pb2.HANDOVER_PATH_DIRECT,
}


def explain(
    models: ServedModels,
    log: RequestLog,
    admission: Admission,
    request: inference_pb2.ExplainRequest,
) -> inference_pb2.ExplainReply:
    """Return how a request was scheduled; the request is named by its id or a prefix of the id.

    Raises: NotFound when this router does not know the request (any more); InvalidArgument when
        several ids begin with the prefix.
    """
    reply = _known(models, log, admission, request.request_id, request.tenant)
    if reply is None:
        whole = _whole_id(models, log, request.request_id, request.tenant)
        reply = _known(models, log, admission, whole, request.tenant) if whole else None
    if reply is None:
        which = f"{request.request_id[:128]!r} is not known" if request.request_id else "none was"
        raise NotFound(
            f"request_id: {which} here (any more); a router remembers its own latest requests"
        )
    return reply


def _known(
    models: ServedModels, log: RequestLog, admission: Admission, request_id: str, tenant: str
) -> inference_pb2.ExplainReply | None:
    """Return the reply for the latest request with this id, or None. Without an id: for the request
    that was placed last, since later ones may still wait."""
    reply = inference_pb2.ExplainReply()
    if found := _find(models, request_id, tenant):
        name, (tenant, request_id), decisions = max(found, key=lambda f: f[2][-1].decided_unix_s)
        reply.request_id, reply.tenant, reply.model = request_id, tenant, name
        reply.decisions.extend(_decision(decision) for decision in decisions)
    record = log.find(request_id, tenant)
    if record is not None:
        if not record.entry.turn:
            del reply.decisions[:]  # those of an earlier attempt
        reply.request_id, reply.tenant = record.request_id, record.tenant
        reply.model = record.model
        reply.request.CopyFrom(record.to_proto())
        reply.admission.CopyFrom(_admission(admission, record.entry))
    return reply if reply.request_id else None


def _admission(admission: Admission, entry: AdmissionEntry) -> inference_pb2.Admission:
    told = inference_pb2.Admission(arrival=entry.arrival, turn=entry.turn)
    if (standing := admission.standing(entry)) is not None:
        told.standing.CopyFrom(
            inference_pb2.Standing(
                position=standing.position,
                num_in_line=standing.num_in_line,
                num_waiting=standing.num_waiting,
                waits_for=standing.waits_for,
                due_in_s=standing.due_in_s,
                expected_wait_s=standing.expected_wait_s,
            )
        )
    return told


def _find(models: ServedModels, request_id: str, tenant: str) -> list[_Found]:
    return [
        (model.name, *known)
        for model in models
        if (known := model.routing.decisions.find(request_id, tenant))
    ]


def _whole_id(models: ServedModels, log: RequestLog, prefix: str, tenant: str) -> str:
    """Return the only id with this prefix; empty: none. Raises: InvalidArgument for several."""
    chosen = {i for model in models for i in model.routing.decisions.ids_with(prefix, tenant)}
    ids = sorted(chosen | log.ids_with(prefix, tenant))
    if len(ids) > 1:
        more = f" and {len(ids) - _MAX_SHOWN} more" if len(ids) > _MAX_SHOWN else ""
        raise InvalidArgument(
            "request_id",
            f"{prefix[:128]!r} begins {len(ids)} ids: {', '.join(ids[:_MAX_SHOWN])}{more}",
        )
    return ids[0] if ids else ""


def _decision(decision: PlacementDecision) -> inference_pb2.RoutingDecision:
    choice = decision.choice
    return inference_pb2.RoutingDecision(
        occasion=decision.occasion,
        policy=decision.policy.name,
        unit=decision.policy.unit,
        decided_unix_ms=round(decision.decided_unix_s * 1000),
        took_s=decision.took_s,
        prefill_id=choice.prefill_id or "",
        decode_id=choice.decode_id or "",
        cost=choice.cost,
        num_prefill=len(decision.pools.prefill),
        num_decode=len(decision.pools.decode),
        num_pairs=choice.num_pairs,
        handover=_PATHS[choice.path] if choice.prefill_id and choice.decode_id else None,
        num_prompt_tokens=decision.ask.num_prompt_tokens,
        num_computed=choice.num_computed,
        runs=[
            common_pb2.PrefixRun(
                node_id=run.node_id, first_block=run.first_block, num_blocks=run.num_blocks
            )
            for run in choice.runs
        ],
        candidates=[_candidate(candidate) for candidate in decision.weighed()],
    )


def _candidate(candidate: Candidate) -> inference_pb2.RoutingCandidate:
    return inference_pb2.RoutingCandidate(
        worker_id=candidate.worker_id,
        role=candidate.role,
        chosen=candidate.is_chosen,
        cost=candidate.cost,
        terms=_terms(candidate.why),
    )


def _terms(why: Mapping[str, float]) -> list[inference_pb2.CostTerm]:
    return [inference_pb2.CostTerm(name=name, value=value) for name, value in why.items()]
