"""The Inference servicer: raw bytes in, requests to the front desk, messages out. Translates only.

A GenerateRequest comes as bytes so that what protobuf refuses gets INVALID_ARGUMENT with a field's
name instead of gRPC's INTERNAL. Generate writes through its context rather than yielding, so that
cancelling an attempt reaches it while a slow reader holds a write up. One asyncio loop.
"""

from __future__ import annotations

import logging
from typing import Any

import grpc
import grpc.aio

from process import logs, rpc, trace_spans
from process.errors import BatonError
from process.trace_spans import Attributes
from protos import inference_pb2
from services.router.adapter_changes import AdapterChanges
from services.router.caller import Caller
from services.router.clients import Clients, authorization_of
from services.router.front_desk import FrontDesk
from services.router.metrics import code_of
from services.router.request_trace import Call
from services.router.times import StageTimes
from services.router.wire_format import parse_request

logger = logging.getLogger(__name__)

SERVICE = "baton.v1.Inference"

Context = grpc.aio.ServicerContext[Any, Any]


class GrpcCall(Call):
    """A call of Generate."""

    name = f"{SERVICE}/Generate"

    def __init__(self, context: Context) -> None:
        self.headers = trace_spans.trace_headers(context.invocation_metadata() or ())

    def about(self) -> Attributes:
        return trace_spans.rpc_attributes("Inference", "Generate")

    def status(self, error: BaseException | None, *, has_begun: bool) -> Attributes:
        code = "OK" if error is None else code_of(error).upper()
        return {"rpc.response.status_code": code}


class InferenceServicer:
    """See the module."""

    def __init__(self, desk: FrontDesk, clients: Clients, changes: AdapterChanges) -> None:
        self._desk = desk
        self._clients = clients
        self._changes = changes

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register every method. (The generated helper would parse a GenerateRequest before we see
        it.)
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
        """Serve one request; its messages go out through `context` as they come."""
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
        """The model served, once for each fingerprint among its workers."""
        self._caller(context)
        return self._desk.list_models()

    @rpc.unary
    async def get_cluster_status(
        self, request: inference_pb2.GetClusterStatusRequest, context: Context
    ) -> inference_pb2.GetClusterStatusReply:
        """Workers, stores, counters, and what is not as it should be. For admins."""
        self._caller(context).check_admin()
        return await self._desk.cluster_status(request)

    @rpc.unary
    async def explain(
        self, request: inference_pb2.ExplainRequest, context: Context
    ) -> inference_pb2.ExplainReply:
        """Why a request went where it did. For admins."""
        self._caller(context).check_admin()
        return self._desk.explain(request)

    @rpc.unary
    async def load_adapter(
        self, request: inference_pb2.LoadClusterAdapterRequest, context: Context
    ) -> inference_pb2.LoadClusterAdapterReply:
        """On every worker or on none. For admins."""
        self._caller(context).check_admin()
        return await self._changes.load(request)

    @rpc.unary
    async def unload_adapter(
        self, request: inference_pb2.UnloadClusterAdapterRequest, context: Context
    ) -> inference_pb2.UnloadClusterAdapterReply:
        """Off every worker or off none. For admins."""
        self._caller(context).check_admin()
        return await self._changes.unload(request, context.time_remaining())

    def _caller(self, context: Context) -> Caller:
        """Raises: Unauthenticated."""
        return self._desk.caller_of(authorization_of(context))
