"""What a leader says of what it wants comes back as it was; what nobody of ours says is nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.autoscaler import app
from services.autoscaler.signals import ByRole

NUM_WORKERS = st.integers(0, 1_000_000)


@given(NUM_WORKERS, NUM_WORKERS)
def test_what_is_said_is_heard(prefill: int, decode: int) -> None:
    wanted = ByRole(prefill, decode)
    assert app.wanted_from_text(app.published_text(wanted)) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[1, 2]",
        '"prefill"',
        "{}",
        '{"prefill": 1}',
        '{"prefill": 1, "decode": -1}',
        '{"prefill": 1, "decode": 1000001}',
        '{"prefill": 1, "decode": 1.0}',
        '{"prefill": true, "decode": 1}',
        '{"prefill": 1, "decode": NaN}',
        '{"prefill": 1, "decode": 2',
        "[" * 200_000,
        '{"a":' * 200_000,
        "9" * 200_000,
        '{"prefill": 1, "decode": 2}' + " " * 1000,
    ],
    ids=lambda text: f"{text[:28]}...{len(text)}" if len(text) > 40 else text,
)
def test_what_no_leader_of_ours_says_is_nothing(text: str) -> None:
    assert app.wanted_from_text(text) is None


@given(st.text(max_size=300))
def test_no_text_ends_who_reads_it(text: str) -> None:
    app.wanted_from_text(text)
