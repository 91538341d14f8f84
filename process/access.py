"""Who may call what: the role in a peer's certificate decides, method by method.

A role is a URI among a certificate's names, `baton://role/<role>`. What the table does not name is
refused, to every role. Pure values and functions; `process.serving` asks them before each call.
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


Rules = Mapping[str, frozenset[Role]]
"""Roles that may call a method, by its path `/service/method`."""


def _rules(service: str, allowed: Mapping[str, Iterable[Role]]) -> dict[str, frozenset[Role]]:
    return {
        f"/{service}/{method}": frozenset(roles)
        for methods, roles in allowed.items()
        for method in methods.split()
    }


_WORKERS = (Role.PREFILL, Role.DECODE)
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
                "LoadAdapter UnloadAdapter": [Role.ADMIN],
            },
        ),
        # As a lender of its own blocks, to who reads them.
        **_rules(
            "baton.v1.KvStore",
            {
                "Attach Detach Match Pin Renew Push GetPush Confirm Read Report": [Role.DECODE],
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
                "LoadAdapter UnloadAdapter": [Role.ADMIN],
            },
        ),
        **_CONTROL,
        **_STANDARD,
    },
    Role.KVSTORE: {
        **_rules(
            "baton.v1.KvStore",
            {
                "Attach Detach Match Reserve Commit Abort Pin Renew": _WORKERS,
                "Push GetPush Write Read Report": _WORKERS,
                "Release": [*_WORKERS, Role.ROUTER],
                "GetStatus": [*_WORKERS, *_LOOKING_ON],
                "List GetBlockHistory": [Role.ADMIN],
                "Confirm": [],
            },
        ),
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
                "GetClusterStatus Explain": [Role.ADMIN],
            },
        ),
        **_STANDARD,
    },
}
"""By the role of the process that is called."""


def role_of(uris: Iterable[str]) -> Role | None:
    """The role that a certificate's URIs name; None: none, or more than one."""
    known = {role.uri: role for role in Role}
    named = [uri for uri in uris if uri.startswith(_URI)]
    return known.get(named[0]) if len(named) == 1 else None


def refusal(rules: Rules, method: str, role: Role | None) -> str:
    """Why a peer of that role may not call the method; empty: it may."""
    if role is None:
        return f"{method}: your certificate names no role of Baton's (or several)"
    if role not in rules.get(method, frozenset()):
        return f"{method}: not for a peer of role {role.value}"
    return ""
