"""Bad input is INVALID_ARGUMENT with the field's name, over the real wire, before any worker hears
of it; and whatever comes over gRPC, valid or not, gets an answer that clients know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from process.rpc_errors import InvalidArgument
from protos import inference_pb2
from tests.conftest import LONG
from tests.harness.router_bench import Bench, Served, error_from_rpc, request, running, served

pytestmark = pytest.mark.oracle

# ---- refused by name


GENERATE = "/baton.v1.Inference/Generate"


async def _refusal(bench: Bench, message: Any) -> InvalidArgument:
    """What the client learns about a message (or raw bytes) that must be refused."""
    data = message if isinstance(message, bytes) else message.SerializeToString()
    call = bench.channel.unary_stream(GENERATE)(data, timeout=30)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, caught.value.details()
    error = error_from_rpc(caught.value)
    assert isinstance(error, InvalidArgument)
    # Field violations and message name the same field.
    assert (caught.value.details() or "").startswith(error.field + ":")
    return error


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"text": ""}, "prompt"),
        ({"token_ids": {"ids": []}}, "token_ids.ids"),
        ({"token_ids": {"ids": [1, 2, 10_000_000]}}, "token_ids.ids[2]"),
        ({"token_ids": {"ids": [1] * 512}}, "token_ids.ids"),
        ({"text": "x" * 513}, "text"),
        ({"chat": {"messages": [{"role": "user", "content": "x" * 600}]}}, "chat"),
        ({"sampling": {"temperature": -1.0}}, "sampling.temperature"),
        ({"sampling": {"temperature": float("nan")}}, "sampling.temperature"),
        ({"sampling": {"top_p": 0.0}}, "sampling.top_p"),
        ({"sampling": {"max_tokens": 0, "n": 2}}, "sampling.n"),
        ({"sampling": {"max_tokens": 4_000_000_000}}, "sampling.max_tokens"),
        ({"sampling": {"stop_token_ids": [999_999]}}, "sampling.stop_token_ids[0]"),
        ({"model": "another"}, "model"),
        ({"request_id": "white space"}, "request_id"),
        ({"sampling": {"n": 17}}, "sampling.n"),
    ],
)
async def test_refused_by_name_before_any_work(
    bench: Bench, fields: dict[str, Any], field: str
) -> None:
    message = request(**fields) if fields != {"text": ""} else inference_pb2.GenerateRequest()
    error = await _refusal(bench, message)
    assert error.field == field
    assert error.retry_after_s is None
    assert not bench.prefill.requests and not bench.decode.num_reserved
    status = await bench.status()
    assert status.num_requests_failed == 0


async def test_broken_bytes_name_their_field(bench: Bench) -> None:
    good = request(text="MARK", request_id="ID").SerializeToString()
    broken_text = good.replace(b"MARK", b"M\xff\xfeK")
    assert (await _refusal(bench, broken_text)).field == "text"
    assert (await _refusal(bench, good[:-1])).field == "request"
    assert (await _refusal(bench, b"\xff\xff\xff")).field == "request"
    assert (await _refusal(bench, b"")).field == "prompt"
    assert not bench.prefill.requests


async def test_oversize_messages() -> None:
    limits = {"max_request_bytes": 10_000, "hard_request_bytes": 50_000}
    async with running(limits=limits) as bench:
        assert (await _refusal(bench, request(text="x" * 20_000))).field == "request"
        # Above the hard bound gRPC itself refuses, without reading the message.
        assert await bench.code_of(text="x" * 60_000) is grpc.StatusCode.RESOURCE_EXHAUSTED
        # And the router is none the worse.
        assert await bench.generate(sampling={"max_tokens": 2})


# ---- anything at all


ANY = settings(max_examples=2000 if LONG else 60, suppress_health_check=list(HealthCheck))
SERVICE = "/baton.v1.Inference/"
FINE = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}

_NUMBERS = {
    FieldDescriptor.TYPE_DOUBLE: st.floats(),
    FieldDescriptor.TYPE_FLOAT: st.floats(width=32),
    FieldDescriptor.TYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT32: st.integers(0, 2**32 - 1) | st.integers(0, 20),
    FieldDescriptor.TYPE_UINT64: st.integers(0, 2**64 - 1),
    FieldDescriptor.TYPE_FIXED64: st.integers(0, 2**64 - 1),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_STRING: st.text(max_size=20) | st.just("{}"),
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=20),
}


@pytest.fixture(scope="module")
def router() -> Iterator[Served]:
    with served() as bench:
        yield bench


@pytest.fixture
def channel(router: Served) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(
        router.bench.router.address, options=[("grpc.use_local_subchannel_pool", 1)]
    ) as channel:
        yield channel


def messages(kind: Descriptor, depth: int = 0) -> st.SearchStrategy[dict[str, Any]]:
    """Any message of this kind, as the keywords that make it."""
    fields = {field.name: _values(field, depth) for field in kind.fields if depth < 4}
    return st.fixed_dictionaries({}, optional=fields)


def _values(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is None:
        one: st.SearchStrategy[Any] = _NUMBERS.get(field.type, st.integers(0, 20))
    elif field.message_type.GetOptions().map_entry:
        return st.dictionaries(st.integers(0, 2**32 - 1), st.floats(), max_size=3)
    else:
        one = messages(field.message_type, depth + 1)
    return st.lists(one, max_size=3) if field.is_repeated else one


def status_of(channel: grpc.Channel, method: str, data: bytes) -> tuple[grpc.StatusCode, str]:
    call = channel.unary_stream(SERVICE + method)(data, timeout=20)
    try:
        for _ in call:
            pass
    except grpc.RpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


def test_any_message_is_answered(channel: grpc.Channel) -> None:
    @ANY
    @given(messages(inference_pb2.GenerateRequest.DESCRIPTOR), st.integers(0, 2))
    def answered(fields: dict[str, Any], fix: int) -> None:
        request = inference_pb2.GenerateRequest(**fields)
        request.budget_ms = 2000
        if fix:  # so that more than the first check is met
            request.text, request.model = "hello", ""
        if fix > 1:
            request.ClearField("request_id")
            request.ClearField("tenant")
            request.ClearField("adapter")
            request.ClearField("session")
        code, details = status_of(channel, "Generate", request.SerializeToString())
        assert code in FINE, (code, details)

    answered()


@pytest.mark.parametrize("method", ["Generate", "ListModels", "GetClusterStatus", "Explain"])
def test_any_bytes_are_answered(channel: grpc.Channel, method: str) -> None:
    valid = inference_pb2.GenerateRequest(text="hello", request_id="a", budget_ms=500)
    valid.sampling.max_tokens = 2

    @ANY
    @given(st.binary(max_size=60), st.integers(0, 40), st.booleans())
    def answered(noise: bytes, at: int, is_whole: bool) -> None:
        start = valid.SerializeToString()
        data = noise if is_whole else start[:at] + noise + start[at:]
        code, details = status_of(channel, method, data)
        assert code in FINE, (code, details)

    answered()


def test_the_router_is_whole_afterwards(router: Served, channel: grpc.Channel) -> None:
    request = inference_pb2.GenerateRequest(text="hello")
    request.sampling.max_tokens = 2
    assert status_of(channel, "Generate", request.SerializeToString())[0] is grpc.StatusCode.OK
    router.bench.router.check_integrity()
