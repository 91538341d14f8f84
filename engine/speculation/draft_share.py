"""DraftShare: what of one draft model's own KV comes from other workers and goes to them, in pages
(draft_pages.py).

Life of a text, which is one sequence's tokens as far as they are known:

    expected   its request was reserved: pages may be on their way before anybody asks for a guess
    COMING     asked for; no guess meanwhile, for at most twice the time that computing would take
    settled    what came is in the cache, the rest is computed: nothing more is asked for, unless
               the cache gives its blocks to somebody else
    written    its full pages are put as they fill, a few a call, if that is worth while

No token depends on it, and nothing here is a request's error: what does not come is computed again
and counted. Engine thread only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.kv.memory import TORCH_DTYPES, KvMemory
from engine.schedule.order import Key
from engine.speculation.draft_cache import DraftCache, Held
from engine.speculation.draft_choice import DraftChoice, Way
from engine.speculation.draft_pages import (
    ENDED,
    SLOW,
    STOPPED,
    DraftPages,
    Fetch,
    PagePut,
    Pages,
    PagesRefused,
    page_blocks,
)

MAX_PUT_PAGES = 8
"""Pages that one call copies out, so that no step waits long for it. Guessed: 0.1 ms each."""

MAX_UNASKED = 8
"""Requests in a row that pages are fetched for before anybody asked for a guess."""

PATIENCE = 2.0
PATIENCE_S = 0.05
"""How long a text waits for its pages: so many times what computing would take, and so long."""

MIN_MEASURED_TOKENS = 32
"""Fewer tokens computed together say little of what one costs; where a page has fewer, a page's."""


@dataclass(slots=True)
class _Text:
    """One sequence's. Pages are counted from its first token."""

    chain_hashes: Sequence[bytes] = ()
    """Of the target's full blocks, as many as are known; it grows."""
    fetch: Fetch | None = None
    first_page: int = 0
    """Of `fetch`."""
    wanted_s: float | None = None
    """Since when a guess waits for it."""
    is_early: bool = False
    """Nobody has asked for a guess yet."""
    is_left: bool = False
    """It was chosen to be computed before anybody asked for a guess."""
    num_there: int = 0
    """Leading pages that are in the store, on their way there, or taken to be there."""
    writes: bool | None = None
    """None: not decided yet."""
    put: PagePut | None = None
    """The newest."""


class DraftShare:
    """See the module.

    Args:
        pages: of as many bytes as the target's blocks; may be others', too.
        memory: the draft model's cache.
        clock: seconds; what fetching and computing cost is measured by it.
    """

    def __init__(
        self,
        pages: DraftPages,
        model_fingerprint: str,
        memory: KvMemory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        layout = memory.layout
        self._pages = pages
        self._fingerprint = model_fingerprint
        self._memory = memory
        self._clock = clock
        self._block_bytes = layout.block_bytes
        self._num_page_blocks = page_blocks(pages.page_bytes, layout)
        self.page_tokens = self._num_page_blocks * layout.block_size
        self.choice = DraftChoice(self.page_tokens)
        self._texts: dict[Key, _Text] = {}
        self._early: set[Key] = set()
        self._num_unasked = 0

    # ---- in

    def expect(self, key: Key, chain_hashes: Sequence[bytes]) -> None:
        """A sequence that begins with these full blocks of the target's will want guesses, if
        anybody does."""
        self._num_unasked += 1
        if self._num_unasked > MAX_UNASKED:
            return
        text = self._text(key, chain_hashes)
        num_pages = len(chain_hashes) // self._num_page_blocks
        if num_pages < 1 or text.fetch is not None:
            return
        text.is_left = not self._ask(text, 0, num_pages)
        if text.fetch is not None:
            text.is_early = True
            self._early.add(key)

    def settle(self, cache: DraftCache) -> None:
        """A call for guesses begins. What came early goes where it belongs, as far as there is room
        that is nobody's."""
        self._num_unasked = 0
        for key in list(self._early):
            text = self._texts[key]
            if text.fetch is None or not text.fetch.is_done:
                continue
            num_slots = (text.first_page + text.fetch.num_asked) * self.page_tokens
            if cache.has_room(key, num_slots):
                held = cache.hold(key, num_slots, ())
                if held is not None:
                    self._take(text, held)
                    self._early.discard(key)

    def is_coming(
        self, key: Key, held: Held, num_tokens: int, chain_hashes: Sequence[bytes]
    ) -> bool:
        """A guess is asked for after so many tokens of a sequence: bring in what is here, ask for
        what is missing. Returns: pages are on their way, so that there is no guess yet."""
        text = self._text(key, chain_hashes)
        text.is_early = False
        self._early.discard(key)
        while True:
            if text.fetch is None and not held.is_settled:
                self._consider(text, held, num_tokens)
            if text.fetch is None:
                return False
            if not text.fetch.is_done:
                return not self._gives_up(text, held)
            self._take(text, held)

    def _consider(self, text: _Text, held: Held, num_tokens: int) -> None:
        """Ask for what is missing, or settle."""
        size = self.page_tokens
        num_full = min(num_tokens // size, len(text.chain_hashes) // self._num_page_blocks)
        is_behind = num_full * size - held.num_tokens >= size
        first = held.num_tokens // size
        if text.is_left or not is_behind or not self._ask(text, first, num_full - first):
            held.is_settled = True
        text.is_left = False

    def _ask(self, text: _Text, first_page: int, num_pages: int) -> bool:
        """By choice. Returns: they are on their way."""
        counts = self._pages.counts
        way = self.choice.choose(num_pages)
        counts.choices[way.value] += 1
        if way is Way.RECOMPUTE:
            return False
        keys = self._keys(text, first_page, first_page + num_pages)
        try:
            text.fetch = self._pages.get(keys, self.page_tokens)
        except PagesRefused as refused:
            counts.not_fetched[refused.reason] += num_pages
            return False
        text.first_page, text.wanted_s = first_page, None
        return True

    def _gives_up(self, text: _Text, held: Held) -> bool:
        """On pages that take much longer than computing them would."""
        fetch, now_s = text.fetch, self._clock()
        if text.wanted_s is None:
            text.wanted_s = now_s
        assert fetch is not None
        waited_s = now_s - text.wanted_s
        computing_s = self.choice.recompute_s(fetch.num_asked)
        if not computing_s or waited_s <= PATIENCE * computing_s + PATIENCE_S:
            return False
        self.choice.on_fetched(fetch.num_asked, 0, waited_s)
        self._pages.counts.not_fetched[SLOW] += fetch.num_asked
        self._drop(text)
        held.is_settled = True
        return True

    def _take(self, text: _Text, held: Held) -> None:
        """What came lies in the cache from here on."""
        assert text.fetch is not None
        num_asked, began_s = text.fetch.num_asked, self._clock()
        pages, reason, seconds = text.fetch.result()
        end = text.first_page + len(pages)
        blocks = slice(text.first_page * self._num_page_blocks, end * self._num_page_blocks)
        if len(pages):
            self._write(held.block_ids[blocks], pages)
            held.num_tokens = max(held.num_tokens, end * self.page_tokens)
            text.num_there = max(text.num_there, end)
        self._drop(text)
        self.choice.on_fetched(num_asked, len(pages), seconds + self._clock() - began_s)
        if reason:
            held.is_settled = True

    def is_late(self, held: Held, num_tokens: int) -> bool:
        """A page or more of what was never seen is missing of so many tokens."""
        return not held.is_caught_up and num_tokens - held.num_tokens >= self.page_tokens

    def on_computed(self, num_tokens: int, num_late_tokens: int, seconds: float) -> None:
        """A call computed so many tokens of texts that it was behind with.

        Args:
            num_late_tokens: those of texts that it was a page or more behind with; at least one.
            seconds: for all of them.
        """
        self._pages.counts.num_recomputed_tokens += num_late_tokens
        if num_late_tokens >= min(MIN_MEASURED_TOKENS, self.page_tokens):
            self.choice.on_recomputed(num_tokens, seconds)

    # ---- out

    def keep(
        self, key: Key, held: Held, chain_hashes: Sequence[bytes], most: int = MAX_PUT_PAGES
    ) -> int:
        """Put what a sequence has filled, at most so many pages. Returns: how many were put."""
        text = self._text(key, chain_hashes)
        num_full = self._num_full(text, held)
        if num_full <= text.num_there:
            return 0
        if text.writes is None:
            text.writes = self.choice.writes()
        if text.writes and text.put is not None and text.put.is_lost:
            text.writes = False  # what follows it would be of no use
        end = min(num_full, text.num_there + min(most, self._pages.max_put_pages))
        if not text.writes or end <= text.num_there:
            return 0
        first = text.num_there
        keys = self._keys(text, max(first - 1, 0), end)
        parent = keys.pop(0) if first else b""
        blocks = slice(first * self._num_page_blocks, end * self._num_page_blocks)
        try:
            text.put = self._pages.put(
                keys, parent, self._read(held.block_ids[blocks]), self.page_tokens
            )
        except PagesRefused as refused:
            if refused.reason == STOPPED:
                text.writes = False
            return 0
        text.num_there = end
        return end - first

    def forget(self, key: Key, held: Held | None) -> None:
        """The sequence is over, or has lost its place.

        Args:
            held: what the cache has of it.
        """
        self._early.discard(key)
        text = self._texts.get(key)
        if text is None:
            return
        self._drop(text)
        try:
            if held is not None:
                self.keep(key, held, text.chain_hashes)
                if text.writes:
                    num_left = self._num_full(text, held) - text.num_there
                    self._pages.counts.not_put[ENDED] += max(num_left, 0)
        finally:
            del self._texts[key]

    # ---- both

    @property
    def fetches(self) -> list[Fetch]:
        """Asked for and not dropped."""
        return [text.fetch for text in self._texts.values() if text.fetch is not None]

    def close(self) -> None:
        """Nothing is wanted any more."""
        for text in self._texts.values():
            self._drop(text)
        self._texts.clear()
        self._early.clear()

    def _text(self, key: Key, chain_hashes: Sequence[bytes]) -> _Text:
        text = self._texts.get(key)
        if text is None:
            text = self._texts[key] = _Text()
        text.chain_hashes = chain_hashes
        return text

    def _drop(self, text: _Text) -> None:
        if text.fetch is not None:
            self._pages.drop(text.fetch)
            text.fetch = None

    def _num_full(self, text: _Text, held: Held) -> int:
        """Pages of it that are full and have a name."""
        return min(
            held.num_tokens // self.page_tokens, len(text.chain_hashes) // self._num_page_blocks
        )

    def _keys(self, text: _Text, first_page: int, end_page: int) -> list[bytes]:
        num_blocks = self._num_page_blocks
        return [
            self._pages.key(
                self._fingerprint, self.page_tokens, text.chain_hashes[(page + 1) * num_blocks - 1]
            )
            for page in range(first_page, end_page)
        ]

    def _read(self, block_ids: Sequence[int]) -> Pages:
        """A copy of these blocks, a page's side by side. On a device, behind all it was given."""
        num_pages = len(block_ids) // self._num_page_blocks
        num_bytes = self._num_page_blocks * self._block_bytes
        pages = np.zeros((num_pages, self._pages.page_bytes), dtype=np.uint8)
        if torch.device(self._memory.device).type == "cpu":
            blocks = self._memory.host_view[list(block_ids)]
        else:
            found = self._memory.cache[list(block_ids)].reshape(len(block_ids), -1)
            blocks = found.view(torch.uint8).cpu().numpy()
        pages[:, :num_bytes] = blocks.reshape(num_pages, num_bytes)
        return pages

    def _write(self, block_ids: Sequence[int], pages: Pages) -> None:
        """The reverse. Returns when nothing reads the pages any more."""
        num_bytes = self._num_page_blocks * self._block_bytes
        blocks = np.ascontiguousarray(pages[:, :num_bytes]).reshape(-1, self._block_bytes)
        if torch.device(self._memory.device).type == "cpu":
            self._memory.host_view[list(block_ids)] = blocks
            return
        layout = self._memory.layout
        found = torch.from_numpy(blocks).view(TORCH_DTYPES[layout.dtype])
        self._memory.cache[list(block_ids)] = found.view(len(block_ids), *layout.block_shape).to(
            self._memory.device
        )
