"""Chain hashes must name (tenant, model, adapter, all tokens so far) and nothing less."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import block_hash

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
