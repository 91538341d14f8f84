"""Authorization of gRPC calls: which method a peer may call, by the role in its TLS certificate.

A role is a URI among the certificate's names (SAN), `baton://role/<role>`. A certificate names one
role, or prefill and decode together for a worker that may change its role; such a worker may call
what either role may, and nothing more. A method that the table does not name is refused to every
role. Pure; `process.grpc_server` checks each call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum

_URI = "baton://role/"


class PeerRole(Enum):
    """The role of a process or client, as its certificate names it."""

    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"
    KVSTORE = "kvstore"
    DRAFT = "draft"
    """Role of a draft worker: it runs the draft model for decode workers (speculative decoding)."""
    AUTOSCALER = "autoscaler"
    """Role of the autoscaler: it starts and stops workers and changes their roles."""
    CLIENT = "client"
    """Role of a client: it sends requests to routers."""
    ADMIN = "admin"
    """Role of an operator: inspects and changes the cluster by `baton status`, `adapter`,
    `audit`."""

    @property
    def uri(self) -> str:
        """The URI by which a certificate names this role."""
        return _URI + self.value

    @property
    def server_name(self) -> str:
        """The DNS name in a certificate by which clients know a process of this role, since its
        addresses come and go. (`.internal` is reserved for private use.)
        """
        return f"{self.value}.baton.internal"


WORKERS = frozenset({PeerRole.PREFILL, PeerRole.DECODE})
"""The two roles that one certificate may name together: a worker takes the other one by SetRole."""

Rules = Mapping[str, frozenset[PeerRole]]
"""The roles that may call each method, by its path `/service/method`."""


def _rules(
    service: str, allowed: Mapping[str, Iterable[PeerRole]]
) -> dict[str, frozenset[PeerRole]]:
    return {
        f"/{service}/{method}": frozenset(roles)
        for methods, roles in allowed.items()
        for method in methods.split()
    }


_OBSERVERS = (PeerRole.ROUTER, PeerRole.ADMIN)
_CONTROL = _rules("baton.v1.WorkerControl", {"SetRole": [PeerRole.AUTOSCALER, PeerRole.ADMIN]})
_STANDARD = {
    **_rules("grpc.health.v1.Health", {"Check Watch List": PeerRole}),
    **_rules("grpc.reflection.v1alpha.ServerReflection", {"ServerReflectionInfo": PeerRole}),
    **_rules("grpc.reflection.v1.ServerReflection", {"ServerReflectionInfo": PeerRole}),
}

RULES: Mapping[PeerRole, Rules] = {
    PeerRole.PREFILL: {
        **_rules(
            "baton.v1.Prefill",
            {
                "Stream": [PeerRole.ROUTER],
                "GetWorkerStatus": _OBSERVERS,
                "LoadAdapter UnloadAdapter": [PeerRole.ROUTER, PeerRole.ADMIN],
            },
        ),
        # As the owner of blocks that others read.
        **_rules(
            "baton.v1.KvStore",
            {
                "Attach Detach Match Pin Renew Push GetPush Read Report": [PeerRole.DECODE],
                "Hold AwaitLent": [PeerRole.DECODE],
                "Release": [PeerRole.DECODE, PeerRole.ROUTER],
                "GetStatus": [PeerRole.DECODE, *_OBSERVERS],
                "Reserve Commit Abort Write List GetBlockHistory": [],
            },
        ),
        **_CONTROL,
        **_STANDARD,
    },
    PeerRole.DECODE: {
        **_rules(
            "baton.v1.Decode",
            {
                "Stream": [PeerRole.ROUTER],
                "GetWorkerStatus": _OBSERVERS,
                "LoadAdapter UnloadAdapter": [PeerRole.ROUTER, PeerRole.ADMIN],
            },
        ),
        **_CONTROL,
        **_STANDARD,
    },
    PeerRole.KVSTORE: {
        **_rules(
            "baton.v1.KvStore",
            {
                "Attach Detach Match Reserve Commit Abort Pin Renew": WORKERS,
                "Push GetPush Write Read Report": WORKERS,
                "Release": [*WORKERS, PeerRole.ROUTER],
                "GetStatus": [*WORKERS, *_OBSERVERS],
                "List GetBlockHistory": [PeerRole.ADMIN],
                "Hold AwaitLent": [],
            },
        ),
        **_STANDARD,
    },
    PeerRole.DRAFT: {
        **_rules("baton.v1.Draft", {"Describe Propose Forget": [PeerRole.DECODE]}),
        **_STANDARD,
    },
    PeerRole.AUTOSCALER: {
        **_rules("baton.v1.Autoscaler", {"GetDecisions": [PeerRole.ADMIN]}),
        # KEDA has a client's certificate, and learns numbers of workers alone.
        **_rules(
            "externalscaler.ExternalScaler",
            {"IsActive StreamIsActive GetMetricSpec GetMetrics": [PeerRole.CLIENT, PeerRole.ADMIN]},
        ),
        **_STANDARD,
    },
    # Only where clients need certificates; they need API keys besides.
    PeerRole.ROUTER: {
        **_rules(
            "baton.v1.Inference",
            {
                "Generate ListModels": [PeerRole.CLIENT, PeerRole.ADMIN],
                "GetClusterStatus Explain LoadAdapter UnloadAdapter": [PeerRole.ADMIN],
            },
        ),
        **_STANDARD,
    },
}
"""The rules of each server (which roles may call which method), by the server's role."""


def roles_of(uris: Iterable[str]) -> frozenset[PeerRole]:
    """The roles that the URIs of a certificate name: one, or those of `WORKERS`. Empty for no role,
    for other combinations and for an unknown role."""
    known = {role.uri: role for role in PeerRole}
    named = [uri for uri in uris if uri.startswith(_URI)]
    roles = frozenset(known[uri] for uri in named if uri in known)
    is_whole = len(roles) == len(named)
    return roles if is_whole and (len(roles) == 1 or roles == WORKERS) else frozenset()


def names_of(roles: frozenset[PeerRole]) -> str:
    """The roles as words for errors and logs, such as "prefill and decode"."""
    return " and ".join(role.value for role in PeerRole if role in roles)


def refusal(rules: Rules, method: str, roles: frozenset[PeerRole]) -> str:
    """Why a peer of those roles may not call the method; empty: it may."""
    if not roles:
        return (
            f"{method}: your certificate names no role of Baton's (or several that do not go "
            "together)"
        )
    if not roles & rules.get(method, frozenset()):
        return f"{method}: not for a peer of role {names_of(roles)}"
    return ""
