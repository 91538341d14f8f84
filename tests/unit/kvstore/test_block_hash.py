"""Chain hashes must name (tenant, model, adapter, all tokens so far) and nothing less. Prompts that
are hashed at once on one loop: in whose turn, how much of it, and who gives up."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import block_hash
from kvstore.block_hash import MAX_LOOP_SHARE, TURN_TOKENS, HashTurns

ROOT = block_hash.root_key(b"salt", "ab" * 32)
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=70)


def test_the_chain_is_the_documented_construction() -> None:
    """Another implementation must be able to compute it from the description alone."""
    tokens = [1, 2, 2**32 - 1, 4]
    data = b"".join(token.to_bytes(4, "little") for token in tokens)
    expected = hashlib.blake2b(
        bytes(16) + data, key=ROOT, digest_size=16, person=b"baton-chain-v1"
    ).digest()
    assert block_hash.chain(ROOT, tokens, 4) == [expected]
    following = hashlib.blake2b(
        expected + data, key=ROOT, digest_size=16, person=b"baton-chain-v1"
    ).digest()
    assert block_hash.chain(ROOT, tokens * 2, 4) == [expected, following]


@given(TOKENS, st.integers(1, 20))
def test_only_full_blocks_are_hashed(tokens: list[int], block_size: int) -> None:
    assert len(block_hash.chain(ROOT, tokens, block_size)) == len(tokens) // block_size


@given(TOKENS, st.integers(1, 20), st.integers(0, 4))
def test_a_chain_continues_from_a_parent(tokens: list[int], size: int, split: int) -> None:
    whole = block_hash.chain(ROOT, tokens, size)
    split = min(split, len(whole))
    parent = whole[split - 1] if split else b""
    assert whole[:split] + block_hash.chain(ROOT, tokens[split * size :], size, parent) == whole


@given(TOKENS, st.integers(1, 20), st.integers(0, 80), st.integers(0, 80))
def test_a_chain_goes_on_from_what_is_known(
    tokens: list[int], size: int, split: int, num_known: int
) -> None:
    whole = block_hash.chain(ROOT, tokens, size)
    parts = (tokens[:split], tokens[split:])
    assert block_hash.chain_on(ROOT, whole[:num_known], parts, size) == whole
    columns = [np.asarray(part, dtype=np.uint32) for part in parts]
    assert block_hash.chain_on(ROOT, whole[:num_known], columns, size) == whole


@given(TOKENS, st.integers(1, 20))
def test_a_chain_is_made_of_its_blocks_one_by_one(tokens: list[int], size: int) -> None:
    parent, hashes = b"", []
    for start in range(0, len(tokens) - size + 1, size):
        parent = block_hash.extend(ROOT, parent, tokens[start : start + size])
        hashes.append(parent)
    assert block_hash.chain(ROOT, tuple(tokens), size) == hashes


@given(st.lists(st.integers(0, 9), min_size=8, max_size=8), st.integers(0, 7))
def test_one_other_token_changes_every_later_hash(tokens: list[int], at: int) -> None:
    """False alarm: a collision of 128 bits."""
    other = list(tokens)
    other[at] += 1
    one, two = block_hash.chain(ROOT, tokens, 2), block_hash.chain(ROOT, other, 2)
    assert one[: at // 2] == two[: at // 2]
    assert all(a != b for a, b in zip(one[at // 2 :], two[at // 2 :], strict=True))


def test_tenants_models_and_adapters_never_meet() -> None:
    roots = {
        block_hash.root_key(b"a", "00"),
        block_hash.root_key(b"b", "00"),
        block_hash.root_key(b"a", "01"),
        block_hash.root_key(b"a", "00", "x"),
        block_hash.root_key(b"", "61" + "00"),  # parts are length-prefixed, not joined
    }
    assert len(roots) == 5
    assert len({block_hash.extend(root, b"", [1]) for root in roots}) == 5


@pytest.mark.parametrize("token", [-1, 2**32])
@pytest.mark.parametrize("as_array", [False, True])
def test_a_token_id_out_of_range_is_an_error(token: int, as_array: bool) -> None:
    """NumPy would wrap it to another token's id."""
    tokens = np.array([token], dtype=np.int64) if as_array else [token]
    with pytest.raises(OverflowError):
        block_hash.extend(ROOT, b"", tokens)  # type: ignore[arg-type]


def test_a_parent_of_another_length_is_an_error() -> None:
    with pytest.raises(ValueError, match="16"):
        block_hash.extend(ROOT, b"short", [1])
    with pytest.raises(ValueError, match="block_size"):
        block_hash.chain(ROOT, [1], 0)


def test_the_checksum_sees_one_bit() -> None:
    data = np.zeros(10_001, dtype=np.uint8)
    before = block_hash.checksum(data)
    data[7777] = 1
    assert block_hash.checksum(data) != before
    assert block_hash.checksum(data) == block_hash.checksum(data.tobytes())


@given(st.lists(st.binary(max_size=400), max_size=8))
def test_a_checksum_in_pieces_is_that_of_the_whole(pieces: list[bytes]) -> None:
    """Whatever the pieces, empty ones among them."""
    running = block_hash.RunningChecksum()
    for at, piece in enumerate(pieces):
        running.update(np.frombuffer(piece, dtype=np.uint8) if at % 2 else piece)
        running.update(memoryview(b""))
    assert running.value == block_hash.checksum(b"".join(pieces))


ROOT = b"r" * 32
SIZE = 16
PART_S = 50e-6


def prompt_of(num_parts: int, start: int = 0) -> range:
    return range(start, start + num_parts * TURN_TOKENS)


class _Loop:
    """Counts the turns of the loop, each of which takes others so long, and hashing a part of a
    prompt PART_S."""

    def __init__(self, others_s: float = 0.0) -> None:
        self.others_s = others_s
        self.now_s = 0.0
        self.num_turns = 0
        self.num_parts: list[int] = []
        """In each turn."""
        self._counting: asyncio.Task[None] | None = None

    def read(self) -> float:
        return self.now_s

    def hashed(self) -> None:
        self.now_s += PART_S
        self.num_parts[-1] += 1

    async def __aenter__(self) -> _Loop:
        self._counting = asyncio.create_task(self._count())
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._counting is not None
        self._counting.cancel()

    async def _count(self) -> None:
        while True:
            self.num_turns += 1
            self.num_parts.append(0)
            self.now_s += self.others_s
            await asyncio.sleep(0)


@pytest.fixture
def hashing(monkeypatch: pytest.MonkeyPatch) -> Callable[[_Loop], HashTurns]:
    """Of a loop whose clock goes on with what is hashed."""
    real = block_hash.chain

    def of(loop: _Loop) -> HashTurns:
        def chain(*args: object) -> list[bytes]:
            loop.hashed()
            return real(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(block_hash, "chain", chain)
        return HashTurns(loop.read)

    return of


async def test_a_short_prompt_does_not_wait_for_long_ones() -> None:
    turns = HashTurns()
    async with _Loop() as loop:
        long = [asyncio.create_task(turns.chain(ROOT, prompt_of(64), SIZE)) for _ in range(5)]
        await asyncio.sleep(0)
        begun = loop.num_turns
        short = prompt_of(2, start=7)
        assert await turns.chain(ROOT, short, SIZE) == block_hash.chain(ROOT, short, SIZE)
        assert loop.num_turns - begun <= 4
        assert not any(task.done() for task in long)
        wanted = block_hash.chain(ROOT, prompt_of(64), SIZE)
        assert await asyncio.gather(*long) == [wanted] * 5


async def test_of_those_that_are_alike_one_is_done_before_the_next_is_begun() -> None:
    turns, ended = HashTurns(lambda: 0.0), []

    async def one(index: int) -> None:
        await turns.chain(ROOT, prompt_of(8, start=index), SIZE)
        ended.append((index, loop.num_turns))

    async with _Loop() as loop:
        begun = loop.num_turns
        await asyncio.gather(*(one(index) for index in range(6)))
    assert [index for index, _ in ended] == list(range(6))
    assert ended[0][1] - begun <= 8 + 3 and ended[-1][1] - begun >= 6 * 8


async def test_of_an_idle_loop_a_turn_is_one_part(hashing: Callable[[_Loop], HashTurns]) -> None:
    async with _Loop() as loop:
        turns = hashing(loop)
        await asyncio.gather(*(turns.chain(ROOT, prompt_of(8), SIZE) for _ in range(3)))
        assert sum(loop.num_parts) == 24
        assert max(loop.num_parts) == 1


async def test_long_turns_of_others_leave_hashing_its_share(
    hashing: Callable[[_Loop], HashTurns],
) -> None:
    others_s = 40 * PART_S
    async with _Loop(others_s) as loop:
        turns = hashing(loop)
        await asyncio.gather(*(turns.chain(ROOT, prompt_of(16), SIZE) for _ in range(10)))
        assert sum(loop.num_parts) == 160
        assert max(loop.num_parts) <= MAX_LOOP_SHARE * 40 + 1
        # All but the first and the last turn are full.
        assert (
            len([number for number in loop.num_parts if number]) <= 160 / (MAX_LOOP_SHARE * 40) + 2
        )


async def test_who_gives_up_is_not_hashed_and_holds_nobody_up(
    hashing: Callable[[_Loop], HashTurns],
) -> None:
    async with _Loop() as loop:
        turns = hashing(loop)
        gone = [asyncio.create_task(turns.chain(ROOT, prompt_of(4), SIZE)) for _ in range(3)]
        stays = asyncio.create_task(turns.chain(ROOT, prompt_of(8), SIZE))
        await asyncio.sleep(0)
        for task in gone:
            task.cancel()
        await stays
        assert all(isinstance(e, asyncio.CancelledError) for e in await _ends(gone))
        assert sum(loop.num_parts) <= 8 + 1
        # And where all have gone, the next one is served.
        last = asyncio.create_task(turns.chain(ROOT, prompt_of(4), SIZE))
        await asyncio.sleep(0)
        last.cancel()
        await _ends([last])
        assert len(await turns.chain(ROOT, prompt_of(2), SIZE)) == 2 * TURN_TOKENS // SIZE


async def test_what_cannot_be_hashed_is_told_to_who_asked() -> None:
    turns = HashTurns()
    bad = [*prompt_of(2), -1, *range(TURN_TOKENS)]
    good = asyncio.create_task(turns.chain(ROOT, prompt_of(4), SIZE))
    with pytest.raises((OverflowError, ValueError)):
        await turns.chain(ROOT, bad, SIZE)
    assert await good == block_hash.chain(ROOT, prompt_of(4), SIZE)


async def _ends(tasks: list[asyncio.Task[list[bytes]]]) -> list[object]:
    return list(await asyncio.gather(*tasks, return_exceptions=True))
