"""DraftSharing: which of an engine's draft models share their own KV with other workers
(draft_share.py), and the law of what all of them have asked for. Engine thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from engine.kv.layout import KvLayout
from engine.speculation.draft_pages import DraftPages, page_blocks
from engine.speculation.drafter import Drafter, SharesPages

logger = logging.getLogger(__name__)


class DraftSharing:
    """See the module. Models whose blocks do not fit into the target's always compute.

    Args:
        max_bytes: of memory for pages on their way.
        layout: the target's.
    """

    def __init__(self, max_bytes: int, layout: KvLayout, drafters: Sequence[Drafter]) -> None:
        self._sharers: list[SharesPages] = []
        self._pages: DraftPages | None = None
        for drafter in drafters:
            if not isinstance(drafter, SharesPages) or not max_bytes:
                continue
            own = drafter.layout
            if own.block_size == layout.block_size and page_blocks(layout.block_bytes, own):
                self._sharers.append(drafter)
            else:
                logger.info(
                    "draft model %s: a block of %d bytes for %d tokens does not fit its target's "
                    "of %d bytes for %d: no store keeps its KV",
                    drafter.name,
                    own.block_bytes,
                    own.block_size,
                    layout.block_bytes,
                    layout.block_size,
                )
        fits = max_bytes >= layout.block_bytes
        self.num_bytes = max_bytes if self._sharers and fits else 0
        """Of memory that pages on their way may take; 0: nothing is shared."""

    def use(self, pages: DraftPages | None) -> None:
        """Share through these from now on; None: no more. For who has a way to a store only when
        the engine is loaded, and may have another one later, or none."""
        self._pages = pages
        for sharer in self._sharers:
            sharer.share(pages)

    def check_integrity(self) -> None:
        """Raises: IntegrityError where fetches and rows of memory do not add up."""
        if self._pages is not None:
            self._pages.check_integrity([one for each in self._sharers for one in each.fetches])
