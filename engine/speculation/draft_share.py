"""DraftShare: what of one draft model's own KV comes from other workers and goes to them, in pages
(draft_pages.py).

Life of a text, which is one sequence's tokens as far as they are known:

    expected   its request was reserved: pages may be on their way before anybody asks for a guess,
               in a few of the rows
    COMING     asked for; no guess meanwhile, for at most twice the time that computing would take
    settled    what came is in the cache, the rest is computed: nothing more is asked for, unless
               the cache gives its blocks to somebody else
    written    its full pages are put as they fill, a few a call, if that is worth while

No token depends on it, and nothing here is a request's error: what does not come is computed again
and counted. Engine thread only.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.errors import IntegrityError
from engine.kv.memory import TORCH_DTYPES, KvMemory
from engine.sequence import Key
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
from engine.speculation.drafter import Task

MAX_PUT_PAGES = 8
"""Pages that one call copies out, and as many that all who end in a step do, so that no step waits
long for it. Guessed: 2 MiB take about 1 ms."""

EARLY_SHARE = 4
"""One in so many pages that may be on their way at once, and at least one, is for texts that nobody
has asked a guess for: what is asked for finds rows."""

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
    owner: str = ""
    """Of the task, once there was one: nothing is put before."""
    fetch: Fetch | None = None
    first_page: int = 0
    """Of `fetch`."""
    wanted_s: float | None = None
    """Since when a guess waits for it."""
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
        self._early: dict[Key, Fetch] = {}
        """Of texts that nobody has asked a guess for, in the order asked."""
        self._num_unasked = 0
        self._end_left = MAX_PUT_PAGES
        """Pages that who is forgotten before the next step may still put."""

    # ---- in

    def expect(self, key: Key, chain_hashes: Sequence[bytes]) -> bool:
        """A sequence that begins with these full blocks of the target's will want guesses, if
        anybody does. Returns: something is kept for it until `forget`."""
        self._num_unasked += 1
        if key in self._texts:
            return True
        num_pages = len(chain_hashes) // self._num_page_blocks
        num_early = sum(fetch.num_asked for fetch in self._early.values())
        most = max(1, self._pages.max_get_pages // EARLY_SHARE) - num_early
        most = min(most, self._pages.num_free_get_pages)
        if self._num_unasked > MAX_UNASKED or num_pages < 1 or most < 1:
            return False
        text = self._text(key, chain_hashes)
        text.is_left = not self._ask(text, 0, num_pages, most)
        if text.fetch is not None:
            self._early[key] = text.fetch
        return True

    def settle(self, cache: DraftCache, asked: Collection[Key]) -> None:
        """A call for guesses begins. What came early goes where it belongs, as far as there is room
        that is nobody's; else it is dropped, for others need its rows.

        Args:
            asked: whoever a guess is asked for: these may take room of others (`is_coming`).
        """
        self._num_unasked = 0
        for key, fetch in list(self._early.items()):
            if not fetch.is_done or key in asked:
                continue
            text, held = self._texts[key], None
            num_slots = fetch.num_asked * self.page_tokens
            if cache.has_room(key, num_slots):
                held = cache.hold(key, num_slots, ())
            if held is None:
                self._drop(text)
            else:
                self._take(text, held)
            del self._early[key]

    def is_coming(self, task: Task, held: Held) -> bool:
        """A guess is asked for: bring in what is here, ask for what is missing. Returns: pages are
        on their way, so that there is no guess yet."""
        text = self._text_of(task)
        self._early.pop(task.key, None)
        while True:
            if text.fetch is not None and not self._follows(text, held):
                self._drop(text)
            if text.fetch is None and not held.is_settled:
                self._consider(text, held, len(task.token_ids))
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

    def _follows(self, text: _Text, held: Held) -> bool:
        """All before what was asked for lies there; not so where `held` is new, since another
        sequence took the blocks of the one before."""
        return text.first_page * self.page_tokens <= held.num_tokens

    def _ask(self, text: _Text, first_page: int, num_pages: int, most: int = sys.maxsize) -> bool:
        """By choice, and the leading `most` of them at most. Returns: they are on their way."""
        counts = self._pages.counts
        way = self.choice.choose(num_pages)
        counts.choices[way.value] += 1
        if way is Way.RECOMPUTE:
            return False
        num_keys = min(num_pages, most, max(self._pages.num_free_get_pages, 1))
        keys = self._keys(text, first_page, first_page + num_keys)
        try:
            text.fetch = self._pages.get(keys, self.page_tokens)
        except PagesRefused as refused:
            counts.add_not_fetched(refused.reason, num_pages)
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
        self._pages.counts.add_not_fetched(SLOW, fetch.num_asked)
        self._drop(text)
        held.is_settled = True
        return True

    def _take(self, text: _Text, held: Held) -> None:
        """What came lies in the cache from here on. Raises: IntegrityError where it follows what is
        not there."""
        assert text.fetch is not None
        if not self._follows(text, held):
            raise IntegrityError(f"page {text.first_page} follows {held.num_tokens} tokens")
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

    def keep(self, task: Task, held: Held, most: int) -> int:
        """Put what a sequence has filled, at most so many pages. Returns: how many more may be put
        now; 0 once one was refused."""
        return self._put_full(self._text_of(task), held, most)

    def _put_full(self, text: _Text, held: Held, most: int) -> int:
        """See `keep`."""
        num_full = self._num_full(text, held)
        if num_full <= text.num_there:
            return most
        if text.writes is None:
            text.writes = self.choice.writes()
        if text.writes and text.put is not None and text.put.is_lost:
            text.writes = False  # what follows it would be of no use
        if not text.writes:
            return most
        first = text.num_there
        end = min(num_full, first + min(most, self._pages.num_free_put_pages))
        if end <= first:
            return 0
        keys = self._keys(text, max(first - 1, 0), end)
        parent = keys.pop(0) if first else b""
        blocks = slice(first * self._num_page_blocks, end * self._num_page_blocks)
        try:
            pages = self._read(held.block_ids[blocks])
            text.put = self._pages.put(keys, parent, pages, self.page_tokens, owner=text.owner)
        except PagesRefused as refused:
            if refused.reason == STOPPED:
                text.writes = False
            return 0
        text.num_there = end
        return most - (end - first)

    def begin_step(self) -> None:
        """See SharesPages (drafter.py)."""
        self._end_left = MAX_PUT_PAGES

    def forget(self, key: Key, held: Held | None) -> None:
        """The sequence is over, or has lost its place.

        Args:
            held: what the cache has of it.
        """
        self._early.pop(key, None)
        text = self._texts.get(key)
        if text is None:
            return
        self._drop(text)
        try:
            if held is not None:
                self._end_left = self._put_full(text, held, self._end_left)
                if text.writes:
                    num_left = self._num_full(text, held) - text.num_there
                    self._pages.counts.add_not_put(ENDED, max(num_left, 0))
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

    def _text_of(self, task: Task) -> _Text:
        text = self._text(task.key, task.chain_hashes)
        text.owner = task.owner
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
