"""Prefix-closed presence of the catalog, in memory and on disk."""

from __future__ import annotations

import pytest

from kvstore.blocks import Block, Page
from kvstore.catalog import Catalog, Entry
from kvstore.errors import IntegrityError


def _hash(name: str) -> bytes:
    return name.encode().ljust(16, b"-")


def _add(catalog: Catalog, name: str, parent: Entry | None) -> Entry:
    frame = len(catalog)
    return catalog.insert(_hash(name), parent, block=Block(_hash(name), frame, 2, 0, 16))


def _chain(catalog: Catalog, name: str, length: int) -> list[Entry]:
    entries: list[Entry] = []
    for i in range(length):
        entries.append(_add(catalog, f"{name}{i}", entries[-1] if entries else None))
    return entries


def test_an_entry_needs_its_parent_and_comes_once() -> None:
    catalog = Catalog()
    a = _add(catalog, "a", None)
    with pytest.raises(IntegrityError):
        _add(catalog, "a", None)
    catalog.remove(a)
    with pytest.raises(IntegrityError):
        _add(catalog, "child", a)
    catalog.check_integrity()


def test_only_leaves_without_a_page_can_be_removed() -> None:
    catalog = Catalog()
    above, below = _chain(catalog, "c", 2)
    with pytest.raises(IntegrityError):
        catalog.remove(above)
    catalog.set_page(above, Page(0, 0, 16))
    catalog.remove(below)
    with pytest.raises(IntegrityError):
        catalog.remove(above)
    catalog.set_page(above, None)
    catalog.remove(above)
    catalog.check_integrity()


def test_the_file_tier_is_prefix_closed_by_itself() -> None:
    catalog = Catalog()
    above, below = _chain(catalog, "c", 2)
    with pytest.raises(IntegrityError):
        catalog.set_page(below, Page(0, 0, 16))
    catalog.set_page(above, Page(0, 0, 16))
    catalog.set_page(below, Page(1, 0, 16))
    catalog.check_integrity()
    assert not above.may_leave_page and below.may_leave_page
    assert above.is_clean  # its children do not matter: it stays present


def test_what_lies_in_a_page_only_keeps_its_prefix_and_its_pins() -> None:
    catalog = Catalog()
    above, below = _chain(catalog, "c", 2)
    catalog.set_page(above, Page(0, 0, 16))
    catalog.set_block(above, None)
    assert not above.may_leave_page  # `below` needs it to be present
    catalog.remove(below)
    assert above.may_leave_page
    catalog.pin(above)
    assert not above.may_leave_page


def test_all_below_comes_before_what_it_is_below_of() -> None:
    catalog = Catalog()
    trunk = _chain(catalog, "t", 3)
    branch = _add(catalog, "b", trunk[1])
    other = _add(catalog, "o", None)
    found = catalog.with_all_below([trunk[1], branch])
    assert set(found) == {trunk[1], trunk[2], branch} and found[-1] is trunk[1]
    assert catalog.with_all_below([]) == []
    for entry in found:
        catalog.remove(entry)
    assert list(catalog) == [trunk[0], other]
    catalog.check_integrity()


def test_unpinning_once_too_often_is_an_error() -> None:
    catalog = Catalog()
    a = _add(catalog, "a", None)
    with pytest.raises(IntegrityError):
        catalog.unpin(a)


def test_changes_are_told_in_order() -> None:
    told: list[tuple[bool, bytes]] = []
    catalog = Catalog(lambda present, chain_hash: told.append((present, chain_hash)))
    a, b = _chain(catalog, "c", 2)
    catalog.remove(b)
    catalog.remove(a)
    names = [_hash("c0"), _hash("c1")]
    assert told == [(True, names[0]), (True, names[1]), (False, names[1]), (False, names[0])]
