"""What a user of Baton imports: clients, their values and errors, and a cluster on this machine.

Knows the wire and the command lines of the services, none of their code; runs without torch.
`LLM` and `SamplingParams`, the engine as a library, are imported when they are first asked for:
they need torch, and the package `engine_client`. So they are not in `__all__`.
"""

import importlib
import typing

from baton.client import Client, SyncClient
from baton.cluster.local_cluster import ClusterConfig, LocalCluster
from baton.credentials import Credentials
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
from baton.messages import (
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

_LIBRARY = {"LLM": "engine_client.llm", "SamplingParams": "engine_client.params"}


def __getattr__(name: str) -> typing.Any:
    """Not kept in this module: what `import *` gives must not depend on what was used before."""
    if name not in _LIBRARY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LIBRARY[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LIBRARY])
