"""Spans: what they hold, whose they are, and that a request that is not traced leaves nothing."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sys
from collections.abc import AsyncGenerator

import pytest

from process import logs, spans, tasks
from process.errors import Cancelled, InvalidArgument, Unavailable
from process.spans import NOBODY, Kind, Recording, SpanData
from process.trace_context import TraceContext
from tests.harness.waiting import settled

CONTEXT = TraceContext(0xABC, 0xDEF, True, "vendor=1")


@pytest.fixture
def ended() -> list[SpanData]:
    return []


def root(ended: list[SpanData]) -> Recording:
    return Recording(ended.append, "root", CONTEXT, None, kind=Kind.SERVER, begin_s=100.0)


def test_children_share_the_trace_and_the_very_moments(ended: list[SpanData]) -> None:
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


def test_an_end_counts_once_and_never_lies_before_the_beginning(ended: list[SpanData]) -> None:
    span = root(ended)
    span.end(at_s=50.0)
    span.end()
    assert len(ended) == 1 and ended[0].end_ns == ended[0].begin_ns


def test_what_a_span_holds_is_bounded(ended: list[SpanData]) -> None:
    span = root(ended)
    span.set({f"key{n}": "x" * 5000 for n in range(500)})
    for n in range(500):
        span.event(f"event{n}", {"n": n})
        span.link(CONTEXT, {"n": n})
    span.set({"key0": "replaced"})
    span.link(None)
    span.end()
    (data,) = ended
    assert len(data.attributes) == spans.MAX_ATTRIBUTES
    assert len(data.events) == spans.MAX_EVENTS and len(data.links) == spans.MAX_LINKS
    assert data.attributes["key0"] == "replaced"
    assert len(str(data.attributes["key1"])) == spans.MAX_VALUE_CHARS


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
    ended: list[SpanData], error: BaseException, problem: str | None, kind: str | None
) -> None:
    root(ended).end(error)
    (data,) = ended
    assert data.problem == problem
    assert data.attributes.get("error.type", "") == kind or kind is None
    assert ("baton.cancelled" in data.attributes) == (kind == "")
    assert "my secret" not in repr(data)


def test_nobody_is_nobody() -> None:
    with NOBODY as span, span.child("x", {"a": 1}) as child:
        child.set({"a": 1})
        child.event("e")
        child.link(CONTEXT)
        child.add_child("y", 1.0, 2.0)
        assert child is NOBODY and spans.current() is NOBODY
    assert (NOBODY.context, NOBODY.headers, NOBODY.traceparent) == (None, None, "")


async def test_the_current_span_is_the_tasks_own(ended: list[SpanData]) -> None:
    with root(ended) as span:
        assert spans.current() is span
        with span.child("inner") as inner:
            assert spans.current() is inner

            async def look() -> spans.Span:
                return spans.current()

            assert await asyncio.create_task(look()) is inner
            assert await asyncio.create_task(look(), context=spans.detached()) is NOBODY
        assert spans.current() is span
    assert spans.current() is NOBODY
    assert [each.name for each in ended] == ["inner", "root"]


async def test_a_stream_that_another_task_closes_ends_its_span(ended: list[SpanData]) -> None:
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


async def test_a_task_that_outlives_its_request_works_for_nobody(ended: list[SpanData]) -> None:
    go, seen = asyncio.Event(), []

    async def linger() -> None:
        seen.append(spans.current())
        await go.wait()
        seen.append(spans.current())

    with root(ended) as span:
        task = tasks.start_task(linger(), "linger")
        await settled()
    go.set()
    await task
    assert seen == [span, NOBODY]


async def test_a_task_for_many_inherits_nobodys_span(ended: list[SpanData]) -> None:
    seen = []

    async def work() -> None:
        seen.append(spans.current())

    with root(ended):
        await tasks.start_task(work(), "work", is_for_many=True)
    assert seen == [NOBODY]


def test_log_lines_name_the_trace_while_there_is_one(
    ended: list[SpanData], monkeypatch: pytest.MonkeyPatch
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
