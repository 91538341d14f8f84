"""Who may call what: the role in a peer's certificate decides, method by method.

A role is a URI among a certificate's names, `baton://role/<role>`. A certificate names one, or both
of a worker that may take the other; its owner may then call what either may, and nothing more. What
the table does not name is refused, to every role. Pure values and functions; `process.rpc` asks
them before each call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum

_URI = "baton://role/"


class Role(Enum):
    """What a process is, or whom a client acts for."""

    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"
    KVSTORE = "kvstore"
    DRAFT = "draft"
    """Guesses for decode workers."""
    AUTOSCALER = "autoscaler"
    """Has workers started, stopped and flipped."""
    CLIENT = "client"
    """Asks routers for answers."""
    ADMIN = "admin"
    """Looks at and changes the cluster: `baton status`, `adapter`, `audit`."""

    @property
    def uri(self) -> str:
        """As certificates have it."""
        return _URI + self.value

    @property
    def server_name(self) -> str:
        """The DNS name in a certificate by which who dials a process of this role knows it: its
        addresses come and go. (`.internal` is nobody's on the Internet.)
        """
        return f"{self.value}.baton.internal"


WORKERS = frozenset({Role.PREFILL, Role.DECODE})
"""The only roles that one certificate may name together: a worker takes the other by SetRole."""

Rules = Mapping[str, frozenset[Role]]
"""Roles that may call a method, by its path `/service/method`."""


def _rules(service: str, allowed: Mapping[str, Iterable[Role]]) -> dict[str, frozenset[Role]]:
    return {
        f"/{service}/{method}": frozenset(roles)
        for methods, roles in allowed.items()
        for method in methods.split()
    }


_LOOKING_ON = (Role.ROUTER, Role.ADMIN)
_CONTROL = _rules("baton.v1.WorkerControl", {"SetRole": [Role.AUTOSCALER, Role.ADMIN]})
_STANDARD = {
    **_rules("grpc.health.v1.Health", {"Check Watch List": Role}),
    **_rules("grpc.reflection.v1alpha.ServerReflection", {"ServerReflectionInfo": Role}),
    **_rules("grpc.reflection.v1.ServerReflection", {"ServerReflectionInfo": Role}),
}

RULES: Mapping[Role, Rules] = {
    Role.PREFILL: {
        **_rules(
            "baton.v1.Prefill",
            {
                "Stream": [Role.ROUTER],
                "GetWorkerStatus": _LOOKING_ON,
                "LoadAdapter UnloadAdapter": [Role.ROUTER, Role.ADMIN],
            },
        ),
        # As a lender of its own blocks, to who reads them.
        **_rules(
            "baton.v1.KvStore",
            {
                "Attach Detach Match Pin Renew Push GetPush Read Report": [Role.DECODE],
                "Confirm AwaitLent": [Role.DECODE],
                "Release": [Role.DECODE, Role.ROUTER],
                "GetStatus": [Role.DECODE, *_LOOKING_ON],
                "Reserve Commit Abort Write List GetBlockHistory": [],
            },
        ),
        **_CONTROL,
        **_STANDARD,
    },
    Role.DECODE: {
        **_rules(
            "baton.v1.Decode",
            {
                "Stream": [Role.ROUTER],
                "GetWorkerStatus": _LOOKING_ON,
                "LoadAdapter UnloadAdapter": [Role.ROUTER, Role.ADMIN],
            },
        ),
        **_CONTROL,
        **_STANDARD,
    },
    Role.KVSTORE: {
        **_rules(
            "baton.v1.KvStore",
            {
                "Attach Detach Match Reserve Commit Abort Pin Renew": WORKERS,
                "Push GetPush Write Read Report": WORKERS,
                "Release": [*WORKERS, Role.ROUTER],
                "GetStatus": [*WORKERS, *_LOOKING_ON],
                "List GetBlockHistory": [Role.ADMIN],
                "Confirm AwaitLent": [],
            },
        ),
        **_STANDARD,
    },
    Role.DRAFT: {
        **_rules("baton.v1.Draft", {"Describe Propose Forget": [Role.DECODE]}),
        **_STANDARD,
    },
    Role.AUTOSCALER: {
        **_rules("baton.v1.Autoscaler", {"GetDecisions": [Role.ADMIN]}),
        # KEDA has a client's certificate; numbers of workers are all that it is told.
        **_rules(
            "externalscaler.ExternalScaler",
            {"IsActive StreamIsActive GetMetricSpec GetMetrics": [Role.CLIENT, Role.ADMIN]},
        ),
        **_STANDARD,
    },
    # Only where clients are asked for certificates; API keys are asked for besides.
    Role.ROUTER: {
        **_rules(
            "baton.v1.Inference",
            {
                "Generate ListModels": [Role.CLIENT, Role.ADMIN],
                "GetClusterStatus Explain LoadAdapter UnloadAdapter": [Role.ADMIN],
            },
        ),
        **_STANDARD,
    },
}
"""By the role of the process that is called."""


def roles_of(uris: Iterable[str]) -> frozenset[Role]:
    """The roles that a certificate's URIs name: one, or those of `WORKERS`. Empty: none, or others
    together, or one that there is not: whoever signed that has made a mistake."""
    known = {role.uri: role for role in Role}
    named = [uri for uri in uris if uri.startswith(_URI)]
    roles = frozenset(known[uri] for uri in named if uri in known)
    is_whole = len(roles) == len(named)
    return roles if is_whole and (len(roles) == 1 or roles == WORKERS) else frozenset()


def names_of(roles: frozenset[Role]) -> str:
    """For people."""
    return " and ".join(role.value for role in Role if role in roles)


def refusal(rules: Rules, method: str, roles: frozenset[Role]) -> str:
    """Why a peer of those roles may not call the method; empty: it may."""
    if not roles:
        return (
            f"{method}: your certificate names no role of Baton's (or several that do not go "
            "together)"
        )
    if not roles & rules.get(method, frozenset()):
        return f"{method}: not for a peer of role {names_of(roles)}"
    return ""
