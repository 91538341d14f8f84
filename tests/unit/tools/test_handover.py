"""What the handover benchmark makes of requests: everything between two tokens, and of it the waits
for KV; without starting anything."""

from __future__ import annotations

import pytest

from benchmarks.cluster import Series, figures_of, rows_of


def _series(*accounts: dict[str, float]) -> Series:
    """Requests of 200 ms to the first token, 12 ms to the second one, and 5 ms to each other."""
    made = Series()
    for account in accounts:
        made.add([10.0, 10.2, 10.212, 10.217, 10.222, 10.227])
        made.num_bytes.append(64)
        if account:
            made.stages.append(account)
    return made


def test_of_all_that_is_exposed_the_waits_for_kv_are_told_apart() -> None:
    """Of each request both of its waits, and the median of that: not of each wait."""
    figures = _series(
        {"prefill_store": 0.001, "decode_fetch": 0.004, "decode_queue": 0.006},
        {"prefill_store": 0.003, "decode_fetch": 0.001, "decode_queue": 0.006},
        {"prefill_store": 0.002, "decode_queue": 0.006},
    ).figures()
    assert (figures["exposed_p50_ms"], figures["exposed_share_of_ttft"]) == (7.0, 0.035)
    assert figures["exposed_transfer_p50_ms"] == 4.0
    assert figures["exposed_transfer_share_of_ttft"] == 0.02
    assert figures["stage_p50_ms"] == {
        "decode_fetch": 1.0,
        "decode_queue": 6.0,
        "prefill_store": 2.0,
    }


def test_a_request_without_an_account_has_no_waits() -> None:
    """Its row is empty there, and says no 0 that was not measured."""
    store, direct = _series({}), _series({"prefill_store": 0.001, "decode_fetch": 0.0005})
    assert "exposed_transfer_p50_ms" not in store.figures()
    figure = figures_of("shm", 8192, {"store": store, "direct": direct})
    rows = list(rows_of([{"direct_transport": "cuda_ipc", **figure}]))
    assert [list(row.values()) for row in rows] == [
        ["shm", 8192, "store", "200.0", "7.00", "3.5 %", "", ""],
        ["cuda_ipc", 8192, "direct", "200.0", "7.00", "3.5 %", "1.50", "0.8 %"],
    ]


@pytest.mark.parametrize("late_s", [0.0, 0.004])
def test_a_second_token_that_is_no_later_than_others_exposes_nothing(late_s: float) -> None:
    made = Series()
    made.add([0.0, 0.1, 0.105 + late_s, 0.110 + late_s, 0.115 + late_s])
    assert made.exposed_s == [pytest.approx(late_s)]
