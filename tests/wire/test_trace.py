"""One request, one trace: over a real router, a real store and real workers, to a real receiver."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from baton.client import Client
from process.rpc_errors import Unavailable
from tests.harness.otlp_receiver import (
    WAIT_S,
    OtlpReceiver,
    Received,
    TraceContext,
    TracingSettings,
    assert_sums,
    receiving,
    root_of,
    stages_of,
)
from tests.harness.router_bench import BOUND_S, TOKENIZER, failure, request, running
from tests.harness.waiting import until

pytestmark = pytest.mark.oracle

PARENT = TraceContext(0xA1, 0xB2, True)
SILENT = TraceContext(0xA1, 0xB2, False)


def is_over(spans: Sequence[Received]) -> bool:
    return any(each.service == "baton-router" and each.span.kind == 2 for each in spans)


class Trace:
    """What came of a router's requests."""

    def __init__(self, receiver: OtlpReceiver) -> None:
        self._receiver = receiver

    @property
    def spans(self) -> Sequence[Received]:
        """Once a request is over."""
        return self._receiver.wait(is_over)

    @property
    def root(self) -> Received:
        return root_of(self.spans)

    @property
    def stages(self) -> list[Received]:
        return stages_of(self.spans, self.root)

    def check_sums(self) -> list[str]:
        return assert_sums(self.spans, self.root)


@asynccontextmanager
async def traced(*, is_silent: bool = False, **options: Any) -> AsyncIterator[tuple[Any, Trace]]:
    """A bench that tells a receiver of its requests. Args: is_silent: of none. options: of its
    TracingSettings, or its own."""
    own = {name: options.pop(name) for name in ("sample_ratio", "baggage") if name in options}
    with receiving() as receiver:
        settings = TracingSettings(
            endpoint=receiver.address, send_interval_s=0.02, stop_timeout_s=WAIT_S, **own
        )
        async with running(tracing=settings, **options) as bench:
            yield bench, Trace(receiver)
        assert receiver.spans == [] if is_silent else receiver.wait(is_over)


async def test_stages_follow_each_other_and_sum_to_the_time_to_the_first_token() -> None:
    async with traced() as (bench, trace):
        messages = await bench.generate(
            text="hello", sampling={"max_tokens": 20, "seed": 7}, request_id="r1"
        )
    root = trace.root
    assert {each.trace_id for each in trace.spans} == {root.trace_id}
    names = trace.check_sums()
    assert names[:2] == ["receive", "queue"] and names[-1] == "stream"
    assert {"tokenize", "lookup", "choose", "reserve", "prefill_wire", "handover"} <= set(names)
    assert root.attributes["gen_ai.request.seed"] == 7
    # What the client is told and what is traced are one account.
    told = {stage.stage: stage.seconds for stage in messages[-1].times}
    shown: dict[str, float] = {}
    for each in trace.stages:
        shown[each.name] = shown.get(each.name, 0.0) + (each.end_ns - each.begin_ns) / 1e9
    for stage in set(told) - {"stream"}:
        assert shown.get(stage, 0.0) == pytest.approx(told[stage], abs=1e-7)
    assert shown["stream"] >= told["stream"] - 1e-7, "the last message is sent after its account"


async def test_the_span_speaks_the_words_of_the_conventions() -> None:
    from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as words

    async with traced() as (bench, trace):
        messages = await bench.generate(
            text="hello",
            sampling={"max_tokens": 5, "seed": 2**63 + 1, "n": 2},
            request_id="r1",
            session="s1",
            tenant="t1",
        )
    root = trace.root
    known = root.attributes
    assert root.name == f"text_completion {known[words.GEN_AI_REQUEST_MODEL]}"
    conventional = {key for key in known if key.startswith("gen_ai.")}
    assert conventional <= {value for value in vars(words).values() if isinstance(value, str)}
    assert known[words.GEN_AI_OPERATION_NAME] == "text_completion"
    assert known[words.GEN_AI_PROVIDER_NAME] == "baton"
    assert known[words.GEN_AI_RESPONSE_ID] == "r1"
    assert known[words.GEN_AI_CONVERSATION_ID] == "s1"
    assert known[words.GEN_AI_REQUEST_MAX_TOKENS] == 5
    assert known[words.GEN_AI_REQUEST_CHOICE_COUNT] == 2
    assert known[words.GEN_AI_USAGE_INPUT_TOKENS] == messages[-1].usage.num_prompt_tokens
    assert known[words.GEN_AI_USAGE_OUTPUT_TOKENS] == 10, "of both samples"
    assert known[words.GEN_AI_RESPONSE_FINISH_REASONS] == ["length", "length"]
    assert known["baton.request.seed"] == str(2**63 + 1)
    assert words.GEN_AI_REQUEST_SEED not in known, "it does not fit into 63 bits"
    assert known[words.GEN_AI_REQUEST_STREAM] is True
    assert root.resource["host.name"] == socket.gethostname()
    assert root.schema_url.startswith("https://opentelemetry.io/schemas/1.")
    assert known["baton.tenant"] == "t1" and known["baton.outcome"] == "finished"
    assert "hello" not in str(trace.spans), "never what was asked"


async def test_the_decision_who_was_chosen_and_why_is_in_the_trace() -> None:
    async with traced() as (bench, trace):
        await bench.generate(sampling={"max_tokens": 3})
    stages = {each.name: each.attributes for each in trace.stages}
    choice = stages["choose"]
    assert choice["baton.choice.prefill"] == "p0" and choice["baton.choice.decode"] == "d0"
    assert any(key.startswith("baton.choice.why.") for key in choice)
    calls = {
        each.name: each.attributes["baton.worker_id"] for each in trace.spans if each.span.kind == 3
    }
    assert calls == {"call prefill": "p0", "call decode": "d0"}
    for each in trace.spans:
        if each.span.kind == 3:
            worker = bench.prefill if each.name == "call prefill" else bench.decode
            host, _, port = worker.address.rpartition(":")
            assert each.attributes["server.address"] == host
            assert each.attributes["server.port"] == int(port)
            service = "Prefill" if each.name == "call prefill" else "Decode"
            assert each.attributes["rpc.method"] == f"baton.v1.{service}/Stream"
            assert each.attributes["rpc.system.name"] == "grpc"


async def test_workers_are_told_of_the_trace() -> None:
    async with traced() as (bench, trace):
        await bench.generate(metadata=PARENT.headers, sampling={"max_tokens": 3})
    of_decode, of_prefill = bench.decode.traceparents, bench.prefill.traceparents
    calls = {each.name: each for each in trace.spans if each.span.kind == 3}
    root = trace.root
    assert root.parent_id == f"{0xB2:016x}" and root.trace_id == f"{0xA1:032x}"
    assert of_decode == [f"00-{root.trace_id}-{calls['call decode'].span_id}-01"]
    assert of_prefill == [f"00-{root.trace_id}-{calls['call prefill'].span_id}-01"]


@pytest.mark.parametrize("headers", [(), SILENT.headers])
async def test_who_is_not_sampled_leaves_nothing(headers: tuple[tuple[str, str], ...]) -> None:
    async with traced(is_silent=True, sample_ratio=0.0) as (bench, _):
        await bench.generate(metadata=tuple(headers), sampling={"max_tokens": 3})
        assert bench.router.tracing.counters.num_ended == 0
        assert bench.decode.traceparents == bench.prefill.traceparents == [""]


@pytest.mark.parametrize(
    "headers",
    [
        [("traceparent", "00-" + "0" * 32 + "-" + "0" * 16 + "-01")],
        [("traceparent", "ff" * 3000)],
        [("traceparent", f"{PARENT.traceparent},{SILENT.traceparent}")],
        [("tracestate", "a=b," * 1000), ("baggage", "=;=,%%%" * 500)],
    ],
)
async def test_hostile_headers_cost_nothing_but_their_trace(headers: list[tuple[str, str]]) -> None:
    async with traced(baggage=("k",)) as (bench, trace):
        messages = await bench.generate(metadata=tuple(headers), sampling={"max_tokens": 3})
    assert messages[-1].finish_reason
    root = trace.root
    assert root.parent_id == "" and root.trace_id != f"{0xA1:032x}"


async def test_a_refused_request_is_traced_by_the_field_that_is_wrong() -> None:
    async with traced() as (bench, trace):
        await bench.failure(text="my secret", sampling={"stop": ["my secret" * 100]})
    root = trace.root
    trace.check_sums()
    assert root.attributes["error.type"] == "InvalidArgument"
    assert root.attributes["baton.outcome"] == "refused"
    assert root.attributes["rpc.method"] == "baton.v1.Inference/Generate"
    assert root.attributes["rpc.response.status_code"] == "INVALID_ARGUMENT"
    assert "secret" not in str(trace.spans)


async def test_bytes_that_are_no_request_are_traced() -> None:
    async with traced() as (bench, trace):
        method: Any = bench.channel.unary_stream("/baton.v1.Inference/Generate")
        await failure(method(b"\xff\xff", metadata=PARENT.headers, timeout=BOUND_S).read())
    root = trace.root
    assert root.name == "baton.v1.Inference/Generate" and root.parent_id == f"{0xB2:016x}"
    assert root.attributes["rpc.response.status_code"] == "INVALID_ARGUMENT"


HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("path", "body", "status", "is_streamed"),
    [
        ("chat/completions", {"messages": HI, "max_tokens": 4}, 200, False),
        ("chat/completions", {"messages": HI, "max_tokens": 4, "stream": True}, 200, True),
        ("chat/completions", {"messages": "my secret"}, 400, None),
        ("completions", {"prompt": "my secret", "my secret": 1}, 400, None),
        ("embeddings", {"input": {"my secret": 1}}, 400, None),
        ("completions", {"prompt": "my secret", "model": "my secret"}, 404, None),
        ("completions", {"prompt": "hi", "max_tokens": 4, "logit_bias": {"999999": 1}}, 400, False),
    ],
)
async def test_an_http_request_says_its_route_and_status_also_when_it_is_refused(
    path: str, body: dict[str, Any], status: int, is_streamed: bool | None
) -> None:
    async with traced(http_listen="127.0.0.1:0") as (bench, trace):
        url = f"http://{bench.router.http_address}/v1/{path}"
        async with aiohttp.ClientSession() as session:
            async with session.post(url, json=body) as response:
                assert response.status == status, await response.text()
                await response.read()
        port = int(bench.router.http_address.rpartition(":")[2])
    root = trace.root
    known = root.attributes
    assert known["http.request.method"] == "POST"
    assert known["http.route"] == known["url.path"] == f"/v1/{path}"
    assert known["http.response.status_code"] == status
    assert (known["server.address"], known["server.port"]) == ("127.0.0.1", port)
    assert known.get("gen_ai.request.stream") is is_streamed
    assert ("error.type" in known) == (root.span.status.code == 2) == (status != 200)
    if is_streamed is None:
        assert root.name == f"POST /v1/{path}" and known["baton.outcome"] == "refused"
    assert "secret" not in str(trace.spans)


async def test_a_cancelled_request_ends_with_the_stage_that_it_was_in() -> None:
    async with traced() as (bench, trace):
        bench.decode.token_gate.close()
        asked = request(text="hello", sampling={"max_tokens": 9})
        call = bench.call(asked)
        await call.read()
        await until(lambda: bench.probe.num_shown)  # noted once the message is out
        call.cancel()
        await asyncio.to_thread(lambda: trace.spans)
        bench.decode.token_gate.open()
    root = trace.root
    assert trace.check_sums()[-1] == "unfinished"
    known = root.attributes
    assert known["baton.outcome"] == "cancelled"
    assert root.span.status.code == 0 and "error.type" not in known, "no error of the server's"
    assert known["gen_ai.usage.input_tokens"] == len(TOKENIZER.encode("hello"))
    assert known["rpc.response.status_code"] == "CANCELLED"
    assert 1 <= known["gen_ai.usage.output_tokens"] < 9, "those that were sent"


async def test_a_request_cancelled_before_its_prefill_s_account_is_cut_at_its_first_token() -> None:
    """The stage that it was in began before the first token."""
    async with traced() as (bench, trace):
        bench.prefill.account_gate.close()
        call = bench.call(sampling={"max_tokens": 9})
        await call.read()
        await until(lambda: bench.probe.num_shown)  # noted once the message is out
        call.cancel()
        await asyncio.to_thread(lambda: trace.spans)
        bench.prefill.account_gate.open()
    root = trace.root
    assert trace.check_sums()[-2:] == ["unfinished", "unfinished"]
    assert [event.name for event in root.span.events] == ["first_token"]


async def test_a_failed_prefill_shows_both_tries() -> None:
    async with traced(num_prefill=2) as (bench, trace):
        for worker in bench.prefills:
            worker.error = Unavailable("broken")
        await bench.failure(sampling={"max_tokens": 3})
    calls = [each for each in trace.spans if each.name == "call prefill"]
    assert len(calls) == 2 and all(each.span.status.code == 2 for each in calls)
    assert len({each.attributes["baton.worker_id"] for each in calls}) == 2
    root = trace.root
    trace.check_sums()
    assert root.span.status.code == 2 and root.attributes["error.type"] == "Unavailable"
    assert root.attributes["gen_ai.usage.input_tokens"] > 0
    assert root.attributes["gen_ai.usage.output_tokens"] == 0


async def test_stages_sum_across_a_move() -> None:
    async with traced(num_decode=2) as (bench, trace):
        for worker in bench.decodes:
            worker.pause_at = 4
        asked = asyncio.create_task(bench.generate(sampling={"max_tokens": 8}))
        await until(lambda: any(worker.num_generating for worker in bench.decodes))
        old, new = sorted(bench.decodes, key=lambda worker: -worker.num_generating)
        await old.token_gate.reached.wait()
        new.pause_at = -1
        old.move_all()
        await asked
    root = trace.root
    assert "move" in trace.check_sums()
    assert list(root.attributes["baton.moves"]) == [f"{old.worker_id}: moved"]
    assert root.attributes["baton.decode.worker_id"] == new.worker_id
    calls = [each for each in trace.spans if each.name == "call decode"]
    assert {each.attributes["baton.worker_id"] for each in calls} == {"d0", "d1"}


async def test_stages_sum_too_where_decode_draws_the_first_token() -> None:
    async with traced(short_prefill_tokens=100) as (bench, trace):
        await bench.generate(text="hello", sampling={"max_tokens": 5})
        assert bench.prefill.requests == [], "decode computed the prompt itself"
    names = trace.check_sums()
    assert "decode_wire" in names and "prefill_wire" not in names
    assert names.index("decode_wire") < names.index("decode")


async def test_our_own_client_passes_a_trace_on() -> None:
    async with traced(sample_ratio=0.0) as (bench, trace):
        async with Client(bench.router.address) as client:
            await client.complete("hello", max_tokens=3)
            await client.complete("hello", max_tokens=3, traceparent=PARENT.traceparent)
    root = trace.root
    assert root.parent_id == f"{0xB2:016x}"


async def test_an_http_request_is_in_its_callers_trace() -> None:
    async with traced(sample_ratio=0.0, http_listen="127.0.0.1:0") as (bench, trace):
        url = f"http://{bench.router.http_address}/v1/chat/completions"
        async with aiohttp.ClientSession() as session:
            for headers in ({}, {"Traceparent": PARENT.traceparent, "TraceState": "v=1"}):
                asked = session.post(url, json={"messages": HI, "max_tokens": 4}, headers=headers)
                async with asked as response:
                    assert response.status == 200
                    await response.read()
    root = trace.root
    assert (root.trace_id, root.parent_id) == (f"{0xA1:032x}", f"{0xB2:016x}")
    assert root.span.trace_state == "v=1"
    trace.check_sums()


@pytest.mark.parametrize(
    ("fields", "operation"),
    [
        ({"chat": {"messages": [{"role": "user", "content": "hi"}]}}, "chat"),
        ({"text": "hi", "embed": True}, "embeddings"),
    ],
)
async def test_operations_are_told_apart(fields: dict[str, Any], operation: str) -> None:
    async with traced() as (bench, trace):
        await bench.generate(**fields)
    root = trace.root
    trace.check_sums()
    assert root.name.startswith(f"{operation} ")
    assert root.attributes["gen_ai.operation.name"] == operation


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [f"{record.getMessage()} {vars(record)}" for record in caplog.records]


async def test_what_is_said_goes_into_the_log_only_where_that_is_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """At the finest level, too, and for requests that are refused."""
    mark = "xyzzyplugh"
    with caplog.at_level(logging.DEBUG):
        async with running() as bench:
            await bench.generate(text=mark, sampling={"max_tokens": 3})
            await bench.failure(text=mark, sampling={"stop": [mark * 100]})
        assert _lines(caplog) and not [line for line in _lines(caplog) if mark in line]
        caplog.clear()
        async with running(log_prompts=True) as bench:
            messages = await bench.generate(text=mark, sampling={"max_tokens": 3, "seed": 1})
    fields = [vars(record) for record in caplog.records]
    (prompt,) = [each["fields"] for each in fields if each["message"] == "prompt"]
    assert prompt["text"] == mark and prompt["request_id"] == messages[-1].request_id
    answers = [each["fields"] for each in fields if each["message"] == "answer"]
    assert "".join(each["text"] for each in answers) == "".join(each.text for each in messages)
