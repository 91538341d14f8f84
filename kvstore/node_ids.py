"""The node id of a lender, a worker whose KV cache other workers read over the gRPC service of a
store: made of its worker id, and distinguished from the id of a store."""

from __future__ import annotations

_SUFFIX = "/lent"

PROBE_HASH = b"baton link probe"
"""The one name that a lender's Match finds, in place of a chain hash: free blocks of the lender,
one for each time that it is asked for, to measure the link with. No chain hash is equal to it but
by chance (2^-128)."""


def lender_node_id(worker_id: str) -> str:
    """The node id under which a worker lends its blocks; handles and attachments name it."""
    return worker_id + _SUFFIX


def is_lender(node_id: str) -> bool:
    """Whether a node id is a lender's, and not a store's."""
    return node_id.endswith(_SUFFIX)
