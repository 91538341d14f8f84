"""DraftChoice: whether the KV that a draft model lacks of a text is fetched or computed again, by
what both have taken so far; and whether writing it for others is worth while.

    recompute   tokens * seconds per token
    fetch       a fixed part + pages found * seconds per page + what was not found, recomputed

Both are running averages. What has never been measured is tried: computing first, which measures
itself; fetching a bounded number of times until something is found. What is not chosen is looked at
again rarely, and the more rarely the longer it does not pay. Where fetching would not pay, next to
nothing is written either: so little that it is found out when that changes.

Pure: no clock, no randomness, no I/O. One per draft model; no thread of its own.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

MEMORY = 16
"""Observations that an average remembers. Guessed: a change of load shows within as many texts."""

NUM_PROBES = 8
"""Fetches that may find nothing before it is believed that there is nothing."""

FIRST_WAIT, LAST_WAIT = 4, 64
"""Choices of computing between two looks at fetching: doubled from the one up to the other."""

RECOMPUTE_AGAIN = 64
"""One in so many texts is computed although fetching pays: what that takes changes with load."""

NUM_UNPROVEN = 64
"""Texts that are written before a fetch has shown whether it pays."""

WRITE_UNPROVEN = 8
"""One in so many is, beyond that."""

WRITE_ANYWAY = 64
"""One in so many is where fetching does not pay."""


class Way(enum.Enum):
    """How a draft model comes by the KV of tokens that it has not seen."""

    FETCH = "fetch"
    RECOMPUTE = "recompute"


@dataclass(slots=True)
class _Average:
    """The mean of all observations while they are few, then with MEMORY of them."""

    value: float = 0.0
    count: int = 0

    def observe(self, value: float) -> None:
        self.count += 1
        self.value += (value - self.value) / min(self.count, MEMORY)


@dataclass(slots=True)
class _Line:
    """Seconds over pages, fitted by least squares with fading weights. A part below 0 is none."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def observe(self, x: float, y: float) -> None:
        fade = 1.0 - 1.0 / MEMORY
        self.weight = self.weight * fade + 1.0
        self.x = self.x * fade + x
        self.y = self.y * fade + y
        self.xx = self.xx * fade + x * x
        self.xy = self.xy * fade + x * y

    def fit(self) -> tuple[float, float]:
        """(fixed part, slope), both at least 0."""
        if not self.weight:
            return 0.0, 0.0
        x, y = self.x / self.weight, self.y / self.weight
        spread = self.xx / self.weight - x * x
        if spread <= 1e-9 * max(x * x, 1.0):
            return (0.0, y / x) if x > 0.0 else (y, 0.0)
        slope = (self.xy / self.weight - x * y) / spread
        slope = min(max(slope, 0.0), y / x if x > 0.0 else 0.0)
        return max(y - slope * x, 0.0), slope


@dataclass(slots=True)
class DraftChoice:
    """See the module. Attributes: page_tokens: tokens of a page."""

    page_tokens: int
    _token_s: _Average = field(default_factory=_Average)
    _fetch: _Line = field(default_factory=_Line)
    _found: _Average = field(default_factory=_Average)
    """Share of the pages asked for that came."""
    _num_pages: _Average = field(default_factory=_Average)
    """Of what was asked for."""
    _has_found: bool = False
    _num_looks: int = 0
    _num_passed: int = 0
    """Choices of computing since fetching was tried or paid."""
    _wait: int = FIRST_WAIT
    _num_fetches: int = 0
    """Choices of fetching since computing was measured."""
    _num_texts: int = 0

    # ---- what is asked

    def choose(self, num_pages: int) -> Way:
        """How to come by so many pages, at least 1. Counts as asked."""
        if not self._token_s.count:
            return Way.RECOMPUTE
        if not self._has_found and self._num_looks < NUM_PROBES:
            self._num_looks += 1
            return Way.FETCH
        if self._has_found and self.fetch_s(num_pages) < self.recompute_s(num_pages):
            self._num_passed, self._wait = 0, FIRST_WAIT
            self._num_fetches += 1
            if self._num_fetches < RECOMPUTE_AGAIN:
                return Way.FETCH
            self._num_fetches = 0
            return Way.RECOMPUTE
        self._num_passed += 1
        if self._num_passed <= self._wait:
            return Way.RECOMPUTE
        self._num_passed, self._wait = 0, min(2 * self._wait, LAST_WAIT)
        return Way.FETCH

    def writes(self) -> bool:
        """Whether this text's pages are worth writing. Asked once for each text, and counted."""
        self._num_texts += 1
        if self._is_proven:
            return self._pays_when_found() or self._num_texts % WRITE_ANYWAY == 0
        return self._num_texts <= NUM_UNPROVEN or self._num_texts % WRITE_UNPROVEN == 0

    def recompute_s(self, num_pages: int) -> float:
        """Expected; 0 before the first measurement."""
        return num_pages * self.page_tokens * self._token_s.value

    def fetch_s(self, num_pages: int) -> float:
        """Expected until all of it is there, with what is not found computed again."""
        fixed_s, page_s = self._fetch.fit()
        num_found = self._found.value * num_pages
        return fixed_s + num_found * page_s + self.recompute_s(1) * (num_pages - num_found)

    # ---- what became of it

    def on_recomputed(self, num_tokens: int, seconds: float) -> None:
        """So many tokens were computed together, at least 1."""
        self._token_s.observe(max(seconds, 0.0) / num_tokens)

    def on_fetched(self, num_asked: int, num_found: int, seconds: float) -> None:
        """So many of the pages asked for came within these seconds, their way into the cache
        included. Nothing is learnt of those that were refused."""
        self._fetch.observe(num_found, max(seconds, 0.0))
        self._found.observe(num_found / num_asked)
        self._num_pages.observe(num_asked)
        self._has_found |= num_found > 0

    @property
    def _is_proven(self) -> bool:
        return self._has_found and self._token_s.count > 0

    def _pays_when_found(self) -> bool:
        fixed_s, page_s = self._fetch.fit()
        num_pages = max(self._num_pages.value, 1.0)
        return fixed_s + num_pages * page_s < num_pages * self.recompute_s(1)
