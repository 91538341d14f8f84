"""CacheRoots: which adapter a cache root belongs to. A second line of defence: whoever makes chain
hashes keys their root with the adapter's digest; a root seen with two contents would let one
adapter read the KV of another.

Bounded: the roots used least recently are forgotten, and with them what was known of them. Engine
thread only.
"""

from __future__ import annotations

from collections import OrderedDict

from engine.errors import IntegrityError, InvalidRequest

MAX_NUM_ROOTS = 65_536
"""About 10 MB. There is one root per (tenant, adapter)."""


class CacheRoots:
    """See the module."""

    def __init__(self, max_num_roots: int = MAX_NUM_ROOTS) -> None:
        self._max_num_roots = max_num_roots
        self._digest_of: OrderedDict[bytes, str] = OrderedDict()

    def check(self, cache_root: bytes, digest: str) -> None:
        """Note that blocks under `cache_root` are the KV of this adapter (empty: of the model as it
        is).

        Raises: InvalidRequest where they are another's.
        """
        known = self._digest_of.setdefault(cache_root, digest)
        if known != digest:
            raise InvalidRequest(
                "cache_root",
                f"was used with {known[:12] or 'no adapter'} and now with "
                f"{digest[:12] or 'no adapter'}; key it with the adapter's digest",
            )
        self._digest_of.move_to_end(cache_root)
        if len(self._digest_of) > self._max_num_roots:
            self._digest_of.popitem(last=False)

    def __len__(self) -> int:
        return len(self._digest_of)

    def check_integrity(self) -> None:
        """Raises: IntegrityError when it outgrew its bound."""
        if len(self._digest_of) > self._max_num_roots:
            raise IntegrityError(f"{len(self._digest_of)} cache roots are known")
