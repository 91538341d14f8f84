"""Trace contexts: what is believed of headers from anybody, and who is sampled."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased

from process import trace_context
from process.trace_context import TraceContext, from_headers, headers_of, parse

TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"
GOOD = f"00-{TRACE}-{SPAN}-01"
CONTEXT = TraceContext(int(TRACE, 16), int(SPAN, 16), True)


def test_it_goes_into_a_header_and_comes_back() -> None:
    assert parse(GOOD) == CONTEXT
    assert CONTEXT.traceparent == GOOD
    assert CONTEXT.headers == (("traceparent", GOOD),)
    silent = TraceContext(1, 2, False, "vendor=x")
    assert parse(silent.traceparent, silent.state) == silent
    assert from_headers(dict(silent.headers)) == silent


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        GOOD.upper(),
        GOOD + "-",
        GOOD + "-what-00-must-not-have",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-0g",
        f"00-{TRACE}-{SPAN}-01\n",
        f" {GOOD}",
        f"01-{TRACE}-{SPAN}-01" + "x" * 10,
        f"01-{TRACE}-{SPAN}-01-" + "x" * 100_000,
        "00-" + "\N{ARABIC-INDIC DIGIT ONE}" * 32 + f"-{SPAN}-01",
        "\x00" * 55,
    ],
)
def test_what_is_not_of_the_form_is_no_trace(header: str) -> None:
    assert parse(header) is None


@pytest.mark.parametrize("header", [f"01-{TRACE}-{SPAN}-01", f"cc-{TRACE}-{SPAN}-01-later-part"])
def test_a_later_version_is_read_as_far_as_it_is_known(header: str) -> None:
    assert parse(header) == CONTEXT


@pytest.mark.parametrize(
    ("flags", "is_sampled"), [("00", False), ("01", True), ("02", False), ("ff", True)]
)
def test_only_one_flag_says_that_it_is_sampled(flags: str, is_sampled: bool) -> None:
    found = parse(f"00-{TRACE}-{SPAN}-{flags}")
    assert found is not None and found.is_sampled is is_sampled


@pytest.mark.parametrize(
    ("state", "kept"),
    [
        ("a=1,b=2", "a=1,b=2"),
        (" a=1 ,, b=2 ", "a=1,b=2"),
        ("tenant@vendor=x/y", "tenant@vendor=x/y"),
        ("A=1", ""),
        ("a=\x01", ""),
        ("a", ""),
        ("a=1," + "x" * 600, ""),
        (",".join(f"k{n}=1" for n in range(33)), ""),
    ],
)
def test_a_broken_state_is_dropped_and_the_trace_goes_on(state: str, kept: str) -> None:
    found = parse(GOOD, state)
    assert found is not None and found.state == kept


def test_a_traceparent_that_comes_twice_is_none() -> None:
    assert from_headers(headers_of([("traceparent", GOOD), ("traceparent", GOOD)])) is None
    assert from_headers(headers_of([("traceparent", b"\xff")])) is None
    assert headers_of([("other", "x")]) == {}
    twice = [("Traceparent", GOOD), ("tracestate", "a=1"), ("TraceState", "b=2")]
    found = from_headers(headers_of(twice))
    assert found is not None and found.state == "a=1,b=2"


@given(st.text(max_size=300), st.text(max_size=600), st.text(max_size=600))
@example(GOOD, "\ud800=1", "k=%ff%fe")
def test_whatever_comes_nothing_is_raised(parent: str, state: str, baggage: str) -> None:
    found = parse(parent, state)
    assert found is None or found.trace_id > 0
    assert set(trace_context.baggage(baggage, ["k"])) <= {"k"}


def test_baggage_is_taken_by_name_and_bounded() -> None:
    header = "team=core%20a;prop=1, user = u1 ,other=x"
    assert trace_context.baggage(header, ["team", "user"]) == {"team": "core a", "user": "u1"}
    assert trace_context.baggage(header, []) == {}
    assert trace_context.baggage("k=" + "v" * 9000, ["k"]) == {}
    assert trace_context.baggage("k=" + "v" * 4000, ["k"]) == {"k": "v" * 256}
    late = ",".join(f"x{n}=1" for n in range(64)) + ",k=1"
    assert trace_context.baggage(late, ["k"]) == {}, "only so many are looked at"


@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.5, 1.0])
def test_who_is_sampled_is_as_opentelemetry_has_it(ratio: float, seed: int) -> None:
    sampler, source = TraceIdRatioBased(ratio), random.Random(seed)
    for _ in range(2000):
        trace_id = source.getrandbits(128)
        theirs = sampler.should_sample(None, trace_id, "x").decision.is_sampled()
        assert trace_context.is_taken(trace_id, ratio) is theirs
