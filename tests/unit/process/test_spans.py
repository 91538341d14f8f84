"""Spans: what they hold, whose they are, and that a request that is not traced leaves nothing."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import random
import sys
from collections.abc import AsyncGenerator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased

from process import background_tasks, logs, trace_spans
from process.rpc_errors import Cancelled, InvalidArgument, Unavailable
from process.trace_spans import (
    NOOP_SPAN,
    RecordingSpan,
    SpanKind,
    TraceContext,
    parse_headers,
    parse_traceparent,
    trace_headers,
)
from tests.harness.waiting import settled

CONTEXT = TraceContext(0xABC, 0xDEF, True, "vendor=1")


@pytest.fixture
def ended() -> list[RecordingSpan]:
    return []


def root(ended: list[RecordingSpan]) -> RecordingSpan:
    return RecordingSpan(ended.append, "root", CONTEXT, None, kind=SpanKind.SERVER, begin_s=100.0)


def test_children_share_the_trace_and_the_very_moments(ended: list[RecordingSpan]) -> None:
    span = root(ended)
    span.add_child("first", 100.0, 100.1 + 0.2, {"a": 1})
    span.add_child("second", 100.1 + 0.2, 101.0)
    span.end(at_s=101.0)
    first, second, whole = ended
    assert {each.context.trace_id for each in ended} == {0xABC}
    assert {each.context.state for each in ended} == {"vendor=1"}
    assert first.parent == second.parent == CONTEXT and whole.parent is None
    assert first.begin_ns == whole.begin_ns and first.end_ns == second.begin_ns
    assert second.end_ns == whole.end_ns and whole.end_ns - whole.begin_ns == 10**9
    assert len({each.context.span_id for each in ended}) == 3
    assert first.attributes == {"a": 1}


def test_an_end_counts_once_and_never_lies_before_the_beginning(ended: list[RecordingSpan]) -> None:
    span = root(ended)
    span.end(at_s=50.0)
    span.end()
    assert len(ended) == 1 and ended[0].end_ns == ended[0].begin_ns


def test_what_a_span_holds_is_bounded(ended: list[RecordingSpan]) -> None:
    span = root(ended)
    span.set({f"key{n}": "x" * 5000 for n in range(500)})
    for n in range(500):
        span.event(f"event{n}", {"n": n})
        span.link(CONTEXT, {"n": n})
    span.set({"key0": "replaced"})
    span.link(None)
    span.end()
    (data,) = ended
    assert len(data.attributes) == trace_spans.MAX_ATTRIBUTES
    assert len(data.events) == trace_spans.MAX_EVENTS and len(data.links) == trace_spans.MAX_LINKS
    assert data.attributes["key0"] == "replaced"
    assert len(str(data.attributes["key1"])) == trace_spans.MAX_VALUE_CHARS


@pytest.mark.parametrize(
    ("error", "problem", "kind"),
    [
        (Unavailable("p0 is gone"), "p0 is gone", "Unavailable"),
        (InvalidArgument("sampling.regex", "'my secret' is none"), "sampling.regex", None),
        (InvalidArgument("my secret", "unknown"), "a field", "InvalidArgument"),
        (ValueError("my secret"), "ValueError", "ValueError"),
        (Cancelled("a newer attempt"), None, ""),
        (asyncio.CancelledError("my secret"), None, ""),
    ],
)
def test_why_it_failed_says_nothing_of_what_was_asked(
    ended: list[RecordingSpan], error: BaseException, problem: str | None, kind: str | None
) -> None:
    root(ended).end(error)
    (data,) = ended
    assert data.problem == problem
    assert data.attributes.get("error.type", "") == kind or kind is None
    assert ("baton.cancelled" in data.attributes) == (kind == "")
    assert "my secret" not in repr(vars(data))


def test_nobody_is_nobody() -> None:
    with NOOP_SPAN as span, span.child("x", {"a": 1}) as child:
        child.set({"a": 1})
        child.event("e")
        child.link(CONTEXT)
        child.add_child("y", 1.0, 2.0)
        assert child is NOOP_SPAN and trace_spans.current_span() is NOOP_SPAN
    assert (NOOP_SPAN.context, NOOP_SPAN.headers, NOOP_SPAN.traceparent) == (None, None, "")


async def test_the_current_span_is_the_tasks_own(ended: list[RecordingSpan]) -> None:
    with root(ended) as span:
        assert trace_spans.current_span() is span
        with span.child("inner") as inner:
            assert trace_spans.current_span() is inner

            async def look() -> trace_spans.Span:
                return trace_spans.current_span()

            assert await asyncio.create_task(look()) is inner
            assert (
                await asyncio.create_task(look(), context=trace_spans.without_span()) is NOOP_SPAN
            )
        assert trace_spans.current_span() is span
    assert trace_spans.current_span() is NOOP_SPAN
    assert [each.name for each in ended] == ["inner", "root"]


async def test_a_stream_that_another_task_closes_ends_its_span(ended: list[RecordingSpan]) -> None:
    """As asyncio does with what nobody reads any more, in a context of its own."""
    span = root(ended)

    async def stream() -> AsyncGenerator[int, None]:
        with span:
            yield 1

    numbers = stream()
    async for _ in numbers:
        break
    await asyncio.create_task(numbers.aclose())  # raises nothing
    assert [each.name for each in ended] == ["root"]


async def test_a_task_that_outlives_its_request_works_for_nobody(
    ended: list[RecordingSpan],
) -> None:
    go, seen = asyncio.Event(), []

    async def linger() -> None:
        seen.append(trace_spans.current_span())
        await go.wait()
        seen.append(trace_spans.current_span())

    with root(ended) as span:
        task = background_tasks.start_task(linger(), "linger")
        await settled()
    go.set()
    await task
    assert seen == [span, NOOP_SPAN]


async def test_a_task_for_many_inherits_nobodys_span(ended: list[RecordingSpan]) -> None:
    seen = []

    async def work() -> None:
        seen.append(trace_spans.current_span())

    with root(ended):
        await background_tasks.start_task(work(), "work", is_for_many=True)
    assert seen == [NOOP_SPAN]


def test_log_lines_name_the_trace_while_there_is_one(
    ended: list[RecordingSpan], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, logging_root = io.StringIO(), logging.getLogger()
    before = logging_root.handlers[:], logging_root.level
    monkeypatch.setattr(sys, "stderr", out)
    try:
        logs.configure("test")
        with root(ended):
            logs.event(logging.getLogger("x"), "inside")
        logs.event(logging.getLogger("x"), "outside")
    finally:
        logging_root.handlers[:] = before[0]
        logging_root.setLevel(before[1])
    inside, outside = map(json.loads, out.getvalue().splitlines())
    assert inside["trace_id"] == f"{0xABC:032x}" and inside["span_id"] == f"{0xDEF:016x}"
    assert not {"trace_id", "span_id"} & set(outside)


TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"
GOOD = f"00-{TRACE}-{SPAN}-01"
PARSED = TraceContext(int(TRACE, 16), int(SPAN, 16), True)


def test_it_goes_into_a_header_and_comes_back() -> None:
    assert parse_traceparent(GOOD) == PARSED
    assert PARSED.traceparent == GOOD
    assert PARSED.headers == (("traceparent", GOOD),)
    silent = TraceContext(1, 2, False, "vendor=x")
    assert parse_traceparent(silent.traceparent, silent.state) == silent
    assert parse_headers(dict(silent.headers)) == silent


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
    assert parse_traceparent(header) is None


@pytest.mark.parametrize("header", [f"01-{TRACE}-{SPAN}-01", f"cc-{TRACE}-{SPAN}-01-later-part"])
def test_a_later_version_is_read_as_far_as_it_is_known(header: str) -> None:
    assert parse_traceparent(header) == PARSED


@pytest.mark.parametrize(
    ("flags", "is_sampled"), [("00", False), ("01", True), ("02", False), ("ff", True)]
)
def test_only_one_flag_says_that_it_is_sampled(flags: str, is_sampled: bool) -> None:
    found = parse_traceparent(f"00-{TRACE}-{SPAN}-{flags}")
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
    found = parse_traceparent(GOOD, state)
    assert found is not None and found.state == kept


def test_a_traceparent_that_comes_twice_is_none() -> None:
    assert parse_headers(trace_headers([("traceparent", GOOD), ("traceparent", GOOD)])) is None
    assert parse_headers(trace_headers([("traceparent", b"\xff")])) is None
    assert trace_headers([("other", "x")]) == {}
    twice = [("Traceparent", GOOD), ("tracestate", "a=1"), ("TraceState", "b=2")]
    found = parse_headers(trace_headers(twice))
    assert found is not None and found.state == "a=1,b=2"


@given(st.text(max_size=300), st.text(max_size=600), st.text(max_size=600))
@example(GOOD, "\ud800=1", "k=%ff%fe")
def test_whatever_comes_nothing_is_raised(parent: str, state: str, baggage: str) -> None:
    found = parse_traceparent(parent, state)
    assert found is None or found.trace_id > 0
    assert set(trace_spans.parse_baggage(baggage, ["k"])) <= {"k"}


def test_baggage_is_taken_by_name_and_bounded() -> None:
    header = "team=core%20a;prop=1, user = u1 ,other=x"
    assert trace_spans.parse_baggage(header, ["team", "user"]) == {"team": "core a", "user": "u1"}
    assert trace_spans.parse_baggage(header, []) == {}
    assert trace_spans.parse_baggage("k=" + "v" * 9000, ["k"]) == {}
    assert trace_spans.parse_baggage("k=" + "v" * 4000, ["k"]) == {"k": "v" * 256}
    late = ",".join(f"x{n}=1" for n in range(64)) + ",k=1"
    assert trace_spans.parse_baggage(late, ["k"]) == {}, "only so many are looked at"


@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.5, 1.0])
def test_who_is_sampled_is_as_opentelemetry_has_it(ratio: float, seed: int) -> None:
    sampler, source = TraceIdRatioBased(ratio), random.Random(seed)
    for _ in range(2000):
        trace_id = source.getrandbits(128)
        theirs = sampler.should_sample(None, trace_id, "x").decision.is_sampled()
        assert trace_spans.is_sampled_id(trace_id, ratio) is theirs
