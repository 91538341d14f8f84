"""The node id of a lender, a worker whose KV cache other workers read over the gRPC service of a
store: made of its worker id, and told from the id of a store."""

from __future__ import annotations

_SUFFIX = "/lent"

PROBE_HASH = b"baton link probe"
"""The one name that a lender's Match knows, as often as blocks are wanted: a few of its free ones,
lent for a while to measure the way with. No chain hash is ever this one but by chance, and chance
is 2^-128."""


def lender_node_id(worker_id: str) -> str:
    """The node id under which a worker lends: what handles and attachments say."""
    return worker_id + _SUFFIX


def is_lender(node_id: str) -> bool:
    """Whether a node id is a lender's, and not a store's."""
    return node_id.endswith(_SUFFIX)
