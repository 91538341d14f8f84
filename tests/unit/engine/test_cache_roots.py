"""One cache root, one adapter."""

from __future__ import annotations

import pytest

from engine.errors import InvalidRequest
from engine.input_processor import CacheRootGuard


def test_a_root_belongs_to_the_content_it_was_used_with() -> None:
    roots = CacheRootGuard()
    roots.check(b"base", "")
    roots.check(b"one", "d1")
    roots.check(b"one", "d1")
    for root, digest in ((b"one", "d2"), (b"one", ""), (b"base", "d1")):
        with pytest.raises(InvalidRequest, match=r"^cache_root: was used with") as raised:
            roots.check(root, digest)
        assert raised.value.field == "cache_root"
    roots.check(b"one", "d1")


def test_the_least_recently_used_is_forgotten() -> None:
    roots = CacheRootGuard(max_num_roots=2)
    for root in (b"a", b"b", b"a", b"c"):
        roots.check(root, "d1")
        roots.check_integrity()
    assert len(roots) == 2
    roots.check(b"b", "d2")  # forgotten; a is not
    with pytest.raises(InvalidRequest):
        roots.check(b"c", "d2")
