"""What a call to Baton can raise. `retry_after_s` is None when trying again cannot help.

BatonError
  InvalidArgument     the request is wrong at `field`
  Unauthenticated     the cluster wants an API key, and none that is valid was given
  PermissionDenied    the API key does not allow this
  NotFound            no such model
  AlreadyExists       this request id runs with another body
  FailedPrecondition  the two sides do not fit
  NoCapacity          no room now, nothing was done; try again after `retry_after_s`
  Unavailable         nobody answers there, or a part of the cluster is away; try again
  DeadlineExceeded    the request's time is over
  Cancelled           somebody ended it
  Internal            a mistake of ours; the message says where to look
  ClusterError        the local cluster did not start or did not stay up
  ModelError          the checkpoint named is missing or broken
"""

from __future__ import annotations

from process.errors import (
    AlreadyExists,
    BatonError,
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NoCapacity,
    NotFound,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)

__all__ = [
    "AlreadyExists",
    "BatonError",
    "Cancelled",
    "ClusterError",
    "DeadlineExceeded",
    "FailedPrecondition",
    "Internal",
    "InvalidArgument",
    "ModelError",
    "NoCapacity",
    "NotFound",
    "PermissionDenied",
    "Unauthenticated",
    "Unavailable",
]


class ClusterError(BatonError):
    """The local cluster did not start, or a part of it did not come back."""


class ModelError(BatonError):
    """The checkpoint is missing or broken; the message says how to fix it."""
