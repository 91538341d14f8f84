"""What a user of Baton imports: clients, their values and errors, and a cluster on this machine.

Knows the wire and the command lines of the services, none of their code; runs without torch.
"""

from baton.client import Client, SyncClient
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
    Unavailable,
)
from baton.local_cluster import ClusterConfig, LocalCluster
from baton.messages import Chunk, Completion, End, KvLeg, Provenance, TierCount, Usage

__all__ = [
    "AlreadyExists",
    "BatonError",
    "Cancelled",
    "Chunk",
    "Client",
    "ClusterConfig",
    "ClusterError",
    "Completion",
    "DeadlineExceeded",
    "End",
    "FailedPrecondition",
    "Internal",
    "InvalidArgument",
    "KvLeg",
    "LocalCluster",
    "ModelError",
    "NoCapacity",
    "NotFound",
    "Provenance",
    "SyncClient",
    "TierCount",
    "Unavailable",
    "Usage",
]
