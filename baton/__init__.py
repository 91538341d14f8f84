"""The public names of Baton: clients, their values and errors, and a cluster on this machine.

The package runs without torch and imports no code of the services. A module is imported when one of
its names is first used: a client imports no Redis library, and a command's help no gRPC. `LLM` and
`SamplingParams`, the engine as a library, need torch and the package `engine_client`, so they are
not in `__all__`.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from baton.answers import (
        Chunk,
        Completion,
        Embedding,
        End,
        KvLeg,
        Provenance,
        TierCount,
        TransportCount,
        Usage,
    )
    from baton.client import Client, Credentials, SyncClient
    from baton.cluster.local_cluster import ClusterConfig, LocalCluster
    from baton.errors import (
        AlreadyExists,
        BatonError,
        Cancelled,
        ClusterError,
        DeadlineExceeded,
        FailedPrecondition,
        Internal,
        InvalidArgument,
        ModelError,
        NoCapacity,
        NotFound,
        PermissionDenied,
        Unauthenticated,
        Unavailable,
    )
    from process.tls import TlsSettings

__all__ = [
    "AlreadyExists",
    "BatonError",
    "Cancelled",
    "Chunk",
    "Client",
    "ClusterConfig",
    "ClusterError",
    "Completion",
    "Credentials",
    "DeadlineExceeded",
    "Embedding",
    "End",
    "FailedPrecondition",
    "Internal",
    "InvalidArgument",
    "KvLeg",
    "LocalCluster",
    "ModelError",
    "NoCapacity",
    "NotFound",
    "PermissionDenied",
    "Provenance",
    "SyncClient",
    "TierCount",
    "TlsSettings",
    "TransportCount",
    "Unauthenticated",
    "Unavailable",
    "Usage",
]

_MODULES = {
    **dict.fromkeys(("Client", "Credentials", "SyncClient"), "baton.client"),
    **dict.fromkeys(("ClusterConfig", "LocalCluster"), "baton.cluster.local_cluster"),
    **dict.fromkeys(
        (
            *("AlreadyExists", "BatonError", "Cancelled", "ClusterError", "DeadlineExceeded"),
            *("FailedPrecondition", "Internal", "InvalidArgument", "ModelError", "NoCapacity"),
            *("NotFound", "PermissionDenied", "Unauthenticated", "Unavailable"),
        ),
        "baton.errors",
    ),
    **dict.fromkeys(
        (
            *("Chunk", "Completion", "Embedding", "End", "KvLeg", "Provenance", "TierCount"),
            *("TransportCount", "Usage"),
        ),
        "baton.answers",
    ),
    "TlsSettings": "process.tls",
    "LLM": "engine_client.llm",
    "SamplingParams": "engine_client.params",
}
"""The module of each public name."""


def __getattr__(name: str) -> typing.Any:
    """The name is not stored in this module, so that `import *` never depends on earlier uses."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
