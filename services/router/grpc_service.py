"""InferenceServicer: the gRPC service of the router (baton.v1.Inference). It translates between
gRPC messages and `RouterService`, and decides nothing. One asyncio loop.

Generate takes raw bytes. protobuf refuses invalid UTF-8 while it parses, and gRPC would answer that
with INTERNAL; `parse_request` answers INVALID_ARGUMENT with the name of the broken field. Generate
writes through its context instead of yielding messages, so that a cancelled attempt ends at once
even while a slow reader blocks a write.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from typing import Any

import grpc
import grpc.aio
from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from process import logs, rpc, trace_spans
from process.rpc_errors import BatonError, InvalidArgument
from process.trace_spans import Attributes
from protos import inference_pb2
from services.router.adapter_changes import AdapterChanges
from services.router.callers import Caller
from services.router.client_limits import Clients, authorization_of
from services.router.metrics import code_of
from services.router.request_stats import StageTimes
from services.router.sealed_handle import LENGTH, fields_of
from services.router.service import RouterService
from services.router.tracing import TracedCall

MAX_PARTS = 32_768
"""Limit of nested messages (chat messages, tool calls and the like) in one request. Checking one
takes microseconds on the loop that serves all requests.
"""

MAX_SEARCHED_BYTES = 64 * 1024
"""Largest damaged message, in bytes, that is searched for the name of the broken field. The search
runs on the loop, too.
"""


def parse_request(data: bytes, *, max_bytes: int) -> inference_pb2.GenerateRequest:
    """Parse a GenerateRequest of at most `max_bytes` bytes.

    Raises: InvalidArgument naming the field: too large, not UTF-8, damaged, or with fields unknown
        to this version. Unknown fields are refused, since ignoring one could change what the
        request means.
    """
    if len(data) > max_bytes:
        raise InvalidArgument("request", f"has {len(data)} bytes, at most {max_bytes} are allowed")
    try:
        request = inference_pb2.GenerateRequest.FromString(data)
    except DecodeError as error:
        if len(data) > MAX_SEARCHED_BYTES:
            why = "is no GenerateRequest: damaged message, or text that is not valid UTF-8"
            raise InvalidArgument("request", why) from error
        field = find_broken_text(inference_pb2.GenerateRequest(), data)
        if field is not None:
            raise InvalidArgument(field, "is not valid UTF-8") from error
        raise InvalidArgument("request", "is no GenerateRequest: damaged message") from error
    _check_known(request, "")
    return request


def _check_known(message: Message, path: str, left: int = MAX_PARTS) -> int:
    """Check a message and its nested messages for unknown fields. `left`: number of nested messages
    that are still allowed.

    Returns: the number that is left after this message.
    Raises: InvalidArgument naming the first message with an unknown field, or the list that exceeds
        the limit.
    """
    for unknown in UnknownFieldSet(message):  # type: ignore[attr-defined]
        raise InvalidArgument(
            path or "request", f"has field number {unknown.field_number}, unknown here"
        )
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue  # the maps here hold numbers
        name = f"{path}.{field.name}" if path else field.name
        if isinstance(value, Message):
            left = _check_known(value, name, left)
            continue
        left -= len(value)
        if left < 0:
            raise InvalidArgument(name, f"has too many entries: {MAX_PARTS} are allowed in all")
        for index, part in enumerate(value):
            left = _check_known(part, f"{name}[{index}]", left)
    return left


def find_broken_text(kind: Message, data: bytes, path: str = "") -> str | None:
    """Return the path of the first string field of an encoded `kind` that is not UTF-8. None: there
    is no such field, or the bytes are damaged.
    """
    with contextlib.suppress(ValueError):
        return _find_broken_text(kind, data, path)
    return None


def _find_broken_text(kind: Message, data: bytes, path: str) -> str | None:
    """Return the same as `find_broken_text`. Raises: ValueError where the bytes are damaged."""
    seen: Counter[int] = Counter()
    for number, wire_type, _, begin, end in fields_of(data):
        field = kind.DESCRIPTOR.fields_by_number.get(number)
        if field is None or wire_type != LENGTH:
            continue
        is_single = isinstance(getattr(kind, field.name), str | bytes | Message)
        name = path + field.name + ("" if is_single else f"[{seen[number]}]")
        seen[number] += 1
        if field.type == FieldDescriptor.TYPE_STRING and not _is_utf8(data[begin:end]):
            return name
        if field.message_type is not None:
            inner = _empty(field.message_type)
            found = find_broken_text(inner, data[begin:end], name + ".")
            if found is not None:
                return found
    return None


def _empty(kind: Any) -> Message:
    # Any: the type stubs have two names for a descriptor.
    return message_factory.GetMessageClass(kind)()


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


logger = logging.getLogger(__name__)

SERVICE = "baton.v1.Inference"

Context = grpc.aio.ServicerContext[Any, Any]


class GrpcCall(TracedCall):
    """A call of Generate, as its trace span describes it."""

    name = f"{SERVICE}/Generate"

    def __init__(self, context: Context) -> None:
        self.headers = trace_spans.trace_headers(context.invocation_metadata() or ())

    def about(self) -> Attributes:
        return trace_spans.rpc_attributes("Inference", "Generate")

    def status(self, error: BaseException | None, *, has_begun: bool) -> Attributes:
        code = "OK" if error is None else code_of(error).upper()
        return {"rpc.response.status_code": code}


class InferenceServicer:
    """gRPC servicer of baton.v1.Inference: checks the caller, parses the request, and calls
    RouterService.
    """

    def __init__(self, desk: RouterService, clients: Clients, changes: AdapterChanges) -> None:
        self._desk = desk
        self._clients = clients
        self._changes = changes

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register every method with a server. The registration function that protoc generates is
        not used: it would parse a GenerateRequest before this class sees its bytes.
        """
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Generate": grpc.unary_stream_rpc_method_handler(self.generate),
            "ListModels": grpc.unary_unary_rpc_method_handler(
                self.list_models,
                request_deserializer=inference_pb2.ListModelsRequest.FromString,
                response_serializer=inference_pb2.ListModelsReply.SerializeToString,
            ),
            "GetClusterStatus": grpc.unary_unary_rpc_method_handler(
                self.get_cluster_status,
                request_deserializer=inference_pb2.GetClusterStatusRequest.FromString,
                response_serializer=inference_pb2.GetClusterStatusReply.SerializeToString,
            ),
            "Explain": grpc.unary_unary_rpc_method_handler(
                self.explain,
                request_deserializer=inference_pb2.ExplainRequest.FromString,
                response_serializer=inference_pb2.ExplainReply.SerializeToString,
            ),
            "LoadAdapter": grpc.unary_unary_rpc_method_handler(
                self.load_adapter,
                request_deserializer=inference_pb2.LoadClusterAdapterRequest.FromString,
                response_serializer=inference_pb2.LoadClusterAdapterReply.SerializeToString,
            ),
            "UnloadAdapter": grpc.unary_unary_rpc_method_handler(
                self.unload_adapter,
                request_deserializer=inference_pb2.UnloadClusterAdapterRequest.FromString,
                response_serializer=inference_pb2.UnloadClusterAdapterReply.SerializeToString,
            ),
        }
        server.add_registered_method_handlers(SERVICE, handlers)

    @rpc.unary
    async def generate(self, data: bytes, context: Context) -> None:
        """Serve one request. Its messages are written through `context` as they are produced."""
        desk, times = self._desk, StageTimes()
        caller = self._caller(context)
        call = GrpcCall(context)
        try:
            request = parse_request(data, max_bytes=desk.limits.max_request_bytes)
        except BatonError as error:
            desk.trace_unread(call, times, error)
            raise
        reader = self._clients.readers.reader()
        has_written = False

        async def send(message: inference_pb2.GenerateResponse) -> None:
            nonlocal has_written
            reader.begin()
            data = message.SerializeToString()
            try:
                if has_written:
                    await context.write(data)
                else:
                    has_written = True
                    await rpc.write_first(context, data)
            except rpc.CallOver as error:
                raise ConnectionError("the call is over") from error
            reader.took()

        try:
            async with reader:
                await desk.serve(
                    request,
                    caller,
                    deadline=desk.deadline(request, context.time_remaining()),
                    send=send,
                    times=times,
                    call=call,
                )
        finally:
            if reader.is_stalled:
                logs.event(
                    logger,
                    "reader_stalled",
                    level=logging.WARNING,
                    request_id=request.request_id,
                    tenant=caller.tenant,
                    peer=context.peer(),
                )

    @rpc.unary
    async def list_models(
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsReply:
        """Return the served models, one entry for each fingerprint among a model's workers."""
        self._caller(context)
        return self._desk.list_models()

    @rpc.unary
    async def get_cluster_status(
        self, request: inference_pb2.GetClusterStatusRequest, context: Context
    ) -> inference_pb2.GetClusterStatusReply:
        """Return workers, stores, counters and detected problems. Admins only."""
        self._caller(context).check_admin()
        return await self._desk.cluster_status(request)

    @rpc.unary
    async def explain(
        self, request: inference_pb2.ExplainRequest, context: Context
    ) -> inference_pb2.ExplainReply:
        """Return why a request was placed on its workers. Admins only."""
        self._caller(context).check_admin()
        return self._desk.explain(request)

    @rpc.unary
    async def load_adapter(
        self, request: inference_pb2.LoadClusterAdapterRequest, context: Context
    ) -> inference_pb2.LoadClusterAdapterReply:
        """Load an adapter on every worker or on none. Admins only."""
        self._caller(context).check_admin()
        return await self._changes.load(request)

    @rpc.unary
    async def unload_adapter(
        self, request: inference_pb2.UnloadClusterAdapterRequest, context: Context
    ) -> inference_pb2.UnloadClusterAdapterReply:
        """Unload an adapter from every worker or from none. Admins only."""
        self._caller(context).check_admin()
        return await self._changes.unload(request, context.time_remaining())

    def _caller(self, context: Context) -> Caller:
        """Return the caller that the call's authorization names. Raises: Unauthenticated."""
        return self._desk.caller_of(authorization_of(context))
