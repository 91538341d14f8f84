"""Who is traced, and how spans reach a receiver: over OTLP's real wire, where there is one."""

from __future__ import annotations

import datetime
import ipaddress
import logging
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from process.settings import SettingsError
from process.trace_spans import (
    NOOP_SPAN,
    RecordingSpan,
    SpanKind,
    TraceContext,
    current_span,
    parse_traceparent,
)
from process.tracing import BATCH_SPANS, OFF, OtlpExporter, SpanCounters, Tracing, TracingSettings
from tests.harness.otlp_receiver import receiving
from tests.harness.waiting import block_until

PARENT = TraceContext(0xA1, 0xB2, True, "vendor=1")
SILENT = TraceContext(0xA1, 0xB2, False)


MEASURED_SPANS = 19
"""Of one request in the router, see docs/tracing.md."""


class _Kept:
    """An exporter that keeps what it gets."""

    def __init__(self) -> None:
        self.counters = SpanCounters()
        self.spans: list[RecordingSpan] = []

    def start(self) -> None: ...
    def take(self, span: RecordingSpan) -> None:
        self.spans.append(span)

    def stop(self, timeout_s: float) -> None: ...


def tracing(**settings: Any) -> tuple[Tracing, list[RecordingSpan]]:
    kept = _Kept()
    return Tracing(TracingSettings(endpoint="127.0.0.1:4317", **settings), kept), kept.spans


def test_a_caller_decides_and_its_trace_goes_on() -> None:
    traced, ended = tracing(sample_ratio=0.0)
    assert traced.begin("x", {}) is NOOP_SPAN, "our share is none of them"
    assert traced.begin("x", dict(SILENT.headers)) is NOOP_SPAN
    span = traced.begin("x", dict(PARENT.headers))
    span.end()
    (data,) = ended
    assert (data.context.trace_id, data.context.state) == (0xA1, "vendor=1")
    assert data.parent == PARENT and data.is_parent_remote and data.kind is SpanKind.SERVER
    assert parse_traceparent(span.traceparent) == TraceContext(0xA1, data.context.span_id, True)


def test_callers_need_not_be_followed() -> None:
    traced, ended = tracing(sample_ratio=1.0, follow_callers=False)
    traced.begin("x", dict(SILENT.headers)).end()
    (data,) = ended
    assert data.parent is None and data.context.trace_id != 0xA1
    assert [link.context for link in data.links] == [SILENT]


def test_callers_cannot_have_everything_traced() -> None:
    kept, now_s = _Kept(), 100.0
    settings = TracingSettings(endpoint="127.0.0.1:4317", sample_ratio=0.0, max_followed_per_s=2.0)
    traced = Tracing(settings, kept, clock=lambda: now_s)

    def num_traced(num: int) -> int:
        begun = [traced.begin("x", dict(PARENT.headers)) for _ in range(num)]
        return sum(span is not NOOP_SPAN for span in begun)

    assert num_traced(100) == 2 and traced.num_not_followed == 98
    now_s += 0.5
    assert num_traced(100) == 1
    now_s += 3600.0
    assert num_traced(100) == 2, "what was not used is not saved up"
    # Who asks for none costs none, and takes none from others.
    assert all(traced.begin("x", dict(SILENT.headers)) is NOOP_SPAN for _ in range(100))
    now_s += 0.5
    assert num_traced(1) == 1


def test_a_trace_that_is_sampled_anyway_is_always_joined() -> None:
    """It costs what a trace of our own would: behind a gateway that traces, one trace stays one."""
    kept = _Kept()
    settings = TracingSettings(endpoint="127.0.0.1:4317", max_followed_per_s=1.0)
    traced = Tracing(settings, kept, clock=lambda: 0.0)
    for _ in range(1000):
        traced.begin("x", dict(PARENT.headers)).end()
    assert len(kept.spans) == 1000 and traced.num_not_followed == 0
    assert {data.context.trace_id for data in kept.spans} == {0xA1}


def test_callers_cannot_choose_ids_that_are_always_joined() -> None:
    """Whether the share takes a trace is not read from the id that a stranger made."""
    kept = _Kept()
    settings = TracingSettings(
        endpoint="127.0.0.1:4317", sample_ratio=0.001, max_followed_per_s=1.0
    )
    traced = Tracing(settings, kept, clock=lambda: 0.0)
    low = TraceContext(1, 0xB2, True)
    for _ in range(200):
        traced.begin("x", dict(low.headers)).end()
    # One by the bound, and by the share so many (0.2 on average): 20 in one of 10 ** 32 runs.
    assert 1 <= len(kept.spans) < 20
    assert traced.num_not_followed == 200 - len(kept.spans)


def test_the_default_bound_leaves_room_among_the_spans_that_wait() -> None:
    """MEASURED_SPANS of one request in the process that has most of them."""
    settings = TracingSettings()
    num_spans = settings.max_followed_per_s * settings.send_interval_s * MEASURED_SPANS
    assert num_spans <= settings.max_waiting_spans


def test_a_broken_header_begins_a_trace_of_our_own() -> None:
    traced, ended = tracing()
    traced.begin("x", {"traceparent": "00-zz", "tracestate": "\x00"}).end()
    assert ended[0].parent is None


def test_workers_only_follow() -> None:
    traced, ended = tracing(sample_ratio=1.0)
    assert traced.follow("x", None) is NOOP_SPAN
    assert traced.follow("x", SILENT) is NOOP_SPAN
    traced.follow("x", PARENT, {"a": 1}).end()
    assert ended[0].parent == PARENT and ended[0].attributes == {"a": 1}


def test_baggage_becomes_attributes_by_name_only() -> None:
    traced, ended = tracing(baggage=("team",))
    traced.begin("x", {"baggage": "team=a,user=b"}).end()
    assert ended[0].attributes == {"baggage.team": "a"}


def test_off_means_nothing_and_loads_nothing() -> None:
    assert not OFF.is_on and OFF.begin("x", dict(PARENT.headers)) is NOOP_SPAN
    assert OFF.follow("x", PARENT) is NOOP_SPAN
    OFF.start()
    OFF.stop()
    assert Tracing.of(TracingSettings(), "router", "r").is_on is False


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"endpoint": "4317"}, "endpoint"),
        ({"endpoint": "host:99999"}, "endpoint"),
        ({"ca_file": "x"}, "ca_file"),
        ({"sample_ratio": 1.5}, "sample_ratio"),
        ({"sample_ratio": float("nan")}, "sample_ratio"),
        ({"max_waiting_spans": 0}, "max_waiting_spans"),
        ({"send_interval_s": 0.0}, "send_interval_s"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(SettingsError, match=word):
        TracingSettings(**settings)


def test_a_certificate_that_is_not_there_is_named() -> None:
    settings = TracingSettings(endpoint="127.0.0.1:1", ca_file="/no/such.pem")
    for make in (lambda: Tracing.of(settings, "router", "r"), lambda: Tracing.check(settings)):
        with pytest.raises(SettingsError, match=r"tracing\.ca_file"):
            make()


def test_without_opentelemetry_the_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise ImportError(f"no module {name}")

    monkeypatch.setattr("process.tracing.importlib.import_module", refuse)
    with pytest.raises(SettingsError, match="opentelemetry-sdk"):
        Tracing.of(TracingSettings(endpoint="127.0.0.1:1"), "router", "r")


# ---- on the wire


@pytest.fixture
def quick() -> dict[str, Any]:
    return {"send_interval_s": 0.02, "send_timeout_s": 2.0, "stop_timeout_s": 5.0}


def test_all_of_a_span_arrives(quick: dict[str, Any]) -> None:
    with receiving() as receiver:
        settings = TracingSettings(endpoint=receiver.address, **quick)
        exporter = OtlpExporter(settings, "router", "router-1")
        traced = Tracing(settings, exporter)
        traced.start()
        span = traced.begin("whole", dict(PARENT.headers), begin_s=100.0)
        values = {"text": "a", "flag": True, "number": 7, "part": 0.5, "list": ["x", "y"]}
        span.set(values)
        span.event("happened", {"n": 1}, at_s=101.0)
        span.link(SILENT, {"why": "z"})
        span.child("call", kind=SpanKind.CLIENT, begin_s=100.5).end(at_s=101.5)
        span.end(ValueError("hidden"), at_s=102.0)
        traced.stop()
        call, whole = sorted(receiver.spans, key=lambda each: each.name)
        exporter.check_integrity()
        assert traced.counters.num_exported == 2
    assert whole.attributes == values | {"error.type": "ValueError"}
    assert (whole.trace_id, whole.parent_id) == (f"{0xA1:032x}", f"{0xB2:016x}")
    assert call.parent_id == whole.span_id and call.trace_id == whole.trace_id
    assert whole.span.trace_state == call.span.trace_state == "vendor=1"
    assert (whole.span.kind, call.span.kind) == (2, 3), "server, client"
    assert whole.span.status.code == 2 and whole.span.status.message == "ValueError"
    assert whole.end_ns - whole.begin_ns == 2 * 10**9
    assert call.begin_ns - whole.begin_ns == 5 * 10**8
    (event,) = whole.span.events
    assert event.name == "happened" and event.time_unix_nano - whole.begin_ns == 10**9
    (link,) = whole.span.links
    assert link.trace_id == (0xA1).to_bytes(16, "big")
    assert whole.service == "baton-router"
    assert whole.resource["service.instance.id"] == "router-1"


def test_a_receiver_behind_tls_must_be_the_one_that_the_authority_knows(
    quick: dict[str, Any], tmp_path: Path
) -> None:
    certificate, key = self_signed()
    other, _ = self_signed()
    num_exported = []
    with receiving(credentials=grpc.ssl_server_credentials([(key, certificate)])) as receiver:
        for name, authority in (("ours", certificate), ("other", other)):
            path = tmp_path / f"{name}.pem"
            path.write_bytes(authority)
            settings = TracingSettings(
                endpoint=receiver.address,
                ca_file=str(path),
                **(quick | {"send_timeout_s": 0.5, "stop_timeout_s": 2.0}),
            )
            exporter = OtlpExporter(settings, "router", "r")
            traced = Tracing(settings, exporter)
            traced.start()
            traced.begin(name, {}).end()
            traced.stop()
            exporter.check_integrity()
            num_exported.append(exporter.counters.num_exported)
        assert [each.name for each in receiver.spans] == ["ours"]
    assert num_exported == [1, 0]


def self_signed() -> tuple[bytes, bytes]:
    """A certificate for 127.0.0.1 that is its own authority, and its key; PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "collector")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return certificate.public_bytes(serialization.Encoding.PEM), private


def test_a_receiver_that_comes_back_gets_what_ends_from_then_on(
    quick: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with receiving() as receiver:
        address = receiver.address
    settings = TracingSettings(endpoint=address, **(quick | {"send_timeout_s": 0.3}))
    exporter = OtlpExporter(settings, "router", "r")
    traced = Tracing(settings, exporter)
    with caplog.at_level(logging.INFO):
        traced.start()
        traced.begin("lost", {}).end()
        block_until(lambda: exporter.counters.num_failed == 1)
        with receiving(address) as receiver:
            for _ in range(200):  # its connection is made again with growing pauses
                traced.begin("found", {}).end()
                if exporter.counters.num_exported:
                    break
                threading.Event().wait(0.05)
            traced.stop()
            assert {each.name for each in receiver.spans} == {"found"}
    exporter.check_integrity()
    told = [record.getMessage() for record in caplog.records]
    assert told.count("trace_receiver_lost") == 1
    assert told.count("trace_receiver_reached") == 1


def test_a_stop_does_not_wait_for_a_receiver_that_is_away(quick: dict[str, Any]) -> None:
    with receiving() as receiver:
        address = receiver.address
    settings = TracingSettings(endpoint=address, **(quick | {"stop_timeout_s": 0.2}))
    exporter = OtlpExporter(settings, "router", "r")
    traced = Tracing(settings, exporter)
    traced.start()
    for _ in range(3):
        traced.begin("lost", {}).end()
    traced.stop()
    traced.stop()
    traced.begin("after the end", {}).end()
    exporter.stop(0.1)
    exporter.check_integrity()
    assert exporter.counters.num_ended == 4 and exporter.counters.num_exported == 0


class _Stuck:
    """A receiver that never answers, as long as the gate is closed."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def export(self, batch: Any) -> Any:
        self.gate.wait(30)
        return types.SimpleNamespace(value=0)

    def shutdown(self) -> None:
        self.gate.set()


@pytest.fixture
def stuck() -> Iterator[_Stuck]:
    sender = _Stuck()
    yield sender
    sender.gate.set()


def test_what_waits_is_bounded_and_the_rest_is_counted(
    quick: dict[str, Any], stuck: _Stuck
) -> None:
    settings = TracingSettings(endpoint="127.0.0.1:1", max_waiting_spans=100, **quick)
    exporter = OtlpExporter(settings, "router", "r", stuck)
    traced = Tracing(settings, exporter)
    traced.start()
    for _ in range(250):
        traced.begin("x", {}).end()
    exporter.check_integrity()
    assert exporter.counters.num_dropped == 150
    stuck.gate.set()
    block_until(lambda: exporter.counters.num_exported == 100)
    traced.begin("x", {}).end()
    traced.stop()
    exporter.check_integrity()
    assert exporter.counters.num_exported == 101


def test_many_threads_lose_none(quick: dict[str, Any]) -> None:
    num_each = BATCH_SPANS
    with receiving() as receiver:
        settings = TracingSettings(endpoint=receiver.address, **quick)
        exporter = OtlpExporter(settings, "router", "r")
        traced = Tracing(settings, exporter)
        traced.start()

        def work() -> None:
            for _ in range(num_each):
                with traced.begin("x", {}) as span:
                    assert current_span() is span

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        traced.stop()
        assert len(receiver.spans) == 4 * num_each
        assert len({each.span_id for each in receiver.spans}) == 4 * num_each
        assert receiver.num_calls >= 4
    exporter.check_integrity()
