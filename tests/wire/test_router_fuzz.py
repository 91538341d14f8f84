"""Whatever bytes come as a GenerateRequest: an answer or an error that names what is wrong, never
INTERNAL, never a hang; and the router goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protos import inference_pb2
from tests.conftest import LONG
from tests.harness.router_bench import Served, served

pytestmark = pytest.mark.oracle

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
