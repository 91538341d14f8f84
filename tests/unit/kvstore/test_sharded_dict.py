"""ShardedDict is a dict, and can be listed in pieces while it changes."""

from __future__ import annotations

import random

import pytest

from kvstore.prefix_tree import ShardedDict


def test_it_holds_what_a_dict_holds(seed: int) -> None:
    draw = random.Random(seed)
    sharded, plain = ShardedDict[int, int](), dict[int, int]()
    for _ in range(20_000):
        key = draw.randrange(5000)
        if draw.random() < 0.6:
            assert sharded.add(key, key + 1) == (key not in plain)
            plain.setdefault(key, key + 1)
        elif key in plain:
            sharded.remove(key)
            del plain[key]
        else:
            with pytest.raises(KeyError):
                sharded.remove(key)
        assert (sharded.get(key), key in sharded) == (plain.get(key), key in plain)
    assert dict(sharded.items()) == plain and len(sharded) == len(plain)


@pytest.mark.parametrize("num_keys", [1, 7, 100, 5000])
def test_a_key_that_stays_is_in_one_piece(seed: int, num_keys: int) -> None:
    draw = random.Random(seed)
    sharded = ShardedDict[int, None]()
    for key in range(2000):
        sharded.add(key, None)
    stay, found, pieces = set(range(1000)), list[int](), list[int]()
    for piece in sharded.keys_in_pieces(num_keys):
        pieces.append(len(piece))
        found += piece
        key = draw.randrange(1000, 3000)
        if not sharded.add(key, None):
            sharded.remove(key)
    assert [key for key in sorted(found) if key in stay] == sorted(stay)
    assert set(pieces[:-1]) <= {num_keys} and pieces[-1] < num_keys


def test_an_empty_one_is_one_empty_piece() -> None:
    assert list(ShardedDict[int, int]().keys_in_pieces(4)) == [[]]
