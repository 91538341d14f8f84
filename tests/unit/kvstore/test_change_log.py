"""The log of changes: in order, bounded, with the age of the oldest."""

from __future__ import annotations

from kvstore.block_changes import ChangeLog, NullLog


def test_changes_are_taken_in_order_and_the_oldest_gives_the_age() -> None:
    now = [1.0]
    log = ChangeLog(clock=lambda: now[0])
    assert log.since_s is None and not log.appended.is_set()
    log.append(True, b"a")
    now[0] = 2.0
    log.append(False, b"a")
    log.append(True, b"b")
    assert log.appended.is_set() and log.since_s == 1.0
    assert [(each.is_present, each.chain_hash) for each in log.take(1)] == [(True, b"a")]
    assert (len(log), log.since_s) == (2, 2.0)
    assert [each.since_s for each in log.take(9)] == [2.0, 2.0]
    assert (len(log), log.since_s, log.take(9)) == (0, None, [])


def test_beyond_its_bound_it_drops_all_and_keeps_the_age_until_it_is_cleared() -> None:
    now = [1.0]
    log = ChangeLog(max_changes=2, clock=lambda: now[0])
    for name in (b"a", b"b"):
        log.append(True, name)
        now[0] += 1.0
    assert not log.overflowed
    log.append(True, b"c")
    log.append(True, b"d")
    assert (log.overflowed, len(log), log.since_s) == (True, 0, 1.0)
    assert log.take(9) == [] and log.since_s == 1.0
    log.clear()
    assert (log.overflowed, log.since_s) == (False, None)
    log.append(False, b"a")
    assert (len(log), log.since_s) == (1, 3.0)


def test_without_an_index_nothing_is_kept() -> None:
    log = NullLog()
    log.append(True, b"a")
    assert (len(log), log.overflowed, log.appended.is_set()) == (0, False, False)
