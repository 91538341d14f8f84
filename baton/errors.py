"""Exceptions that a call to Baton can raise. `retry_after_s` is None when trying again cannot help.

BatonError
  InvalidArgument     the request is wrong at `field`
  Unauthenticated     the cluster needs an API key, and no valid one was sent
  PermissionDenied    the API key does not allow this
  NotFound            no such model
  AlreadyExists       this request id runs with another body
  FailedPrecondition  the request does not fit the state or the model of the cluster
  NoCapacity          no capacity now, nothing was computed; try again after `retry_after_s`
  Unavailable         no answer from there, or a part of the cluster is not running; try again
  DeadlineExceeded    the request took longer than its time limit
  Cancelled           the request was cancelled
  Internal            a bug in Baton; the message says where to look
  ClusterError        the local cluster did not start or did not stay up
  ModelError          the checkpoint named is missing or broken
"""

from __future__ import annotations

from process.rpc_errors import (
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
