"""Which workers should still have which prompt's KV in their own caches, since this router had them
compute or decode it: so that the next turn of a conversation can go where the last one was.

Keyed by chain hash, which binds all tokens before it, the tenant and the model: nothing is found
for other tokens, or for somebody else. Hints, never truth: what a worker really has it says when it
is asked. A hint ends when so much was sent to its worker since that its cache must have turned
over, and when others were used later. No I/O. One asyncio loop.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from process.errors import Internal

_EVERY = 8
"""Of a prompt's blocks each eighth is noted, and its last one: a prompt that branches off in the
middle is found within 8 blocks of the branch."""

_MAX_WORKERS = 4
"""Workers known for one prefix, the latest."""

MAX_LIVES = 10_000
"""Incarnations of workers that are kept; the one that was longest without a request goes first."""

_Hint = tuple[str, int]
"""Incarnation, and how many blocks it had been sent by then."""


class Conversations:
    """See the module."""

    def __init__(self, max_entries: int, max_lives: int = MAX_LIVES) -> None:
        self._max_entries = max_entries
        self._max_lives = max_lives
        self._places: OrderedDict[bytes, tuple[_Hint, ...]] = OrderedDict()
        self._num_sent: OrderedDict[str, int] = OrderedDict()

    def note(self, chain_hashes: Sequence[bytes], incarnations: Sequence[str]) -> None:
        """These lives have the blocks of `chain_hashes`, from the first one on."""
        if not (incarnations and chain_hashes):
            return
        known = self._known(chain_hashes)
        hints: list[_Hint] = []
        for life in incarnations:
            num_sent = self._num_sent.pop(life, 0) + len(chain_hashes) - known.get(life, 0)
            self._num_sent[life] = num_sent
            hints.append((life, num_sent))
        while len(self._num_sent) > self._max_lives:
            self._num_sent.popitem(last=False)
        last = len(chain_hashes) - 1
        noted = list(chain_hashes[_EVERY - 1 :: _EVERY])
        if (last + 1) % _EVERY:
            noted.append(chain_hashes[last])
        for chain_hash in noted:
            before = self._places.pop(chain_hash, ())
            others = (hint for hint in before if hint[0] not in incarnations)
            self._places[chain_hash] = (*hints, *others)[:_MAX_WORKERS]
        while len(self._places) > self._max_entries:
            self._places.popitem(last=False)

    def find(self, chain_hashes: Sequence[bytes], num_blocks: Mapping[str, int]) -> dict[str, int]:
        """By incarnation: leading blocks of `chain_hashes` that it should have.

        Args: num_blocks: what the cache of each life holds; who is not in it has nothing.
        """
        found: dict[str, int] = {}
        places = self._places
        for index in range(len(chain_hashes) - 1, -1, -1):
            hints = places.get(chain_hashes[index])
            if hints is None:
                continue
            for life, num_sent in hints:
                if self._num_sent.get(life, num_sent) - num_sent <= num_blocks.get(life, -1):
                    found.setdefault(life, index + 1)
            if len(found) >= _MAX_WORKERS:
                break
        return found

    def check_integrity(self) -> None:
        """Raises: Internal when more is kept than may be."""
        if len(self._places) > self._max_entries or len(self._num_sent) > self._max_lives:
            raise Internal(
                f"{len(self._places)} prefixes and {len(self._num_sent)} lives are remembered"
            )

    def _known(self, chain_hashes: Sequence[bytes]) -> dict[str, int]:
        """By incarnation: leading blocks that were noted of it, however long ago."""
        known: dict[str, int] = {}
        for index in range(len(chain_hashes) - 1, -1, -1):
            hints = self._places.get(chain_hashes[index], ())
            for life, _ in hints:
                known.setdefault(life, index + 1)
            if hints:
                break
        return known
