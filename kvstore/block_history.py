"""BlockHistory: the latest events of each KV block of one store (written, read, evicted ...), by
chain hash.

    written      a worker committed it              refused    a reader found its bytes bad
    demoted      its bytes are in a page, too       damaged    the store looked, and they are
    left_memory  it lies in a page only             evicted    it gave way to others
    promoted     its bytes are in a frame again     lost       what it hangs on is gone
    pulled       the store sent its bytes
    verified     a reader has it and compared its checksum

Kept after the block itself is gone, until other blocks have newer events; bounded in blocks and in
events of one block. A traced request leaves its trace, and an event within one goes into its span,
linked to the request that wrote the block. What a store does by itself is in no trace: the history
says it. Tail blocks, which have no chain hash, have no history.

Knows no store. Plain and synchronous, one thread; the clock is the wall's.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from process.trace_spans import MAX_LINKS, SpanLink, TraceContext, Value, current_span

MAX_EVENTS = 24
"""Most events that are kept of one block; the oldest ones are dropped."""

WRITTEN = "written"
DEMOTED = "demoted"
LEFT_MEMORY = "left_memory"
PROMOTED = "promoted"
PULLED = "pulled"
VERIFIED = "verified"
REFUSED = "refused"
DAMAGED = "damaged"
EVICTED = "evicted"
LOST = "lost"


class BlockEvent(NamedTuple):
    """One event of a block: what happened, when, and by which worker. A tuple: one is made for each
    block of each prompt."""

    unix_s: float
    what: str
    worker_id: str
    """The worker that caused the event; empty: the store itself."""
    trace: TraceContext | None
    """The span in which the event happened, if the request is traced."""


class OneHistory:
    """The events of one block, oldest first."""

    __slots__ = ("events", "num_events", "writer")

    def __init__(self) -> None:
        self.events: list[BlockEvent] = []
        self.num_events = 0
        self.writer: TraceContext | None = None
        """The span that last wrote the block, if that request was traced."""


class BlockHistory:
    """Keeps the events of the `max_blocks` blocks that had any most recently; of none for 0."""

    def __init__(self, max_blocks: int = 0, *, wall_clock: Callable[[], float] = time.time) -> None:
        self._max_blocks = max_blocks
        self._clock = wall_clock
        self._blocks: OrderedDict[bytes, OneHistory] = OrderedDict()  # by the latest news

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def is_kept(self) -> bool:
        return self._max_blocks > 0

    def note(
        self,
        what: str,
        chain_hashes: Sequence[bytes],
        worker_id: str = "",
        trace: TraceContext | None = None,
    ) -> None:
        """Enter the event `what`, now, for each of these blocks; in the span `trace`, or the
        current one."""
        if not self._max_blocks or not chain_hashes:
            return
        if trace is None:
            self._trace(what, chain_hashes)
            trace = current_span().context
        event = BlockEvent(self._clock(), what, worker_id, trace)
        blocks = self._blocks
        for chain_hash in chain_hashes:
            if not chain_hash:
                continue
            one = blocks.get(chain_hash)
            if one is None:
                one = blocks[chain_hash] = OneHistory()
                if len(blocks) > self._max_blocks:
                    blocks.popitem(last=False)
            else:
                blocks.move_to_end(chain_hash)
            if len(one.events) == MAX_EVENTS:
                del one.events[0]
            one.events.append(event)
            one.num_events += 1
            if what is WRITTEN:
                one.writer = event.trace

    def find(self, prefix: bytes, max_blocks: int) -> list[tuple[bytes, OneHistory]]:
        """Find the blocks whose chain hash begins with `prefix`, at most `max_blocks`, those with
        the latest event first. Takes O(n) except for a whole hash."""
        whole = self._blocks.get(prefix)
        if whole is not None:
            return [(prefix, whole)]
        found: list[tuple[bytes, OneHistory]] = []
        for chain_hash in reversed(self._blocks):
            if len(found) == max_blocks:
                break
            if chain_hash.startswith(prefix):
                found.append((chain_hash, self._blocks[chain_hash]))
        return found

    def links(self, chain_hashes: Iterable[bytes]) -> list[SpanLink]:
        """Links to the traced spans that wrote these blocks, each span once."""
        found: dict[tuple[int, int], SpanLink] = {}
        for chain_hash in chain_hashes:
            one = self._blocks.get(chain_hash)
            if one is not None and one.writer is not None:
                place = (one.writer.trace_id, one.writer.span_id)
                if place not in found and len(found) < MAX_LINKS:
                    about = {"baton.block": chain_hash.hex(), "baton.link": WRITTEN}
                    found[place] = SpanLink(one.writer, about)
        return list(found.values())

    def _trace(self, what: str, chain_hashes: Sequence[bytes]) -> None:
        """Add the event to the current span, and link that to the spans that wrote the blocks."""
        span = current_span()
        if not span.is_recording:
            return
        about: dict[str, Value] = {
            "baton.num_blocks": len(chain_hashes),
            "baton.block.first": chain_hashes[0].hex(),
        }
        span.event(f"block {what}", about)
        for link in self.links(chain_hashes) if what is not WRITTEN else ():
            span.link(link.context, link.attributes)
