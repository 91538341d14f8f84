"""A router made of nothing but answers, on a real gRPC port of loopback."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import pytest

from process import grpc_server, rpc
from protos import common_pb2, inference_pb2, inference_pb2_grpc


def last_message(request_id: str = "r") -> inference_pb2.GenerateResponse:
    """As a router sends it: one prompt of 40 tokens, 32 of them moved through the store."""
    counts = [common_pb2.TierCount(tier=common_pb2.TIER_HOST, num_tokens=32, num_bytes=4096)]
    legs = [
        common_pb2.KvLeg(
            role="prefill",
            worker_id="prefill-0",
            transport="shm",
            dtype="float32",
            num_tokens_computed=40,
            num_bytes_written=5120,
        ),
        common_pb2.KvLeg(
            role="decode",
            worker_id="decode-0",
            transport="shm",
            dtype="float32",
            num_tokens_local=8,
            from_store=counts,
            num_bytes_read=4096,
            recomputed=[common_pb2.RecomputeCount(reason="checksum", num_blocks=1)],
            num_tokens_early=16,
            num_blocks_written_back=2,
        ),
    ]
    return inference_pb2.GenerateResponse(
        request_id=request_id,
        text="!",
        token_ids=[3],
        finish_reason=common_pb2.FINISH_REASON_STOP_TOKEN,
        usage=common_pb2.Usage(num_prompt_tokens=40, num_output_tokens=3, num_cached_tokens=0),
        provenance=common_pb2.Provenance(model="tiny", num_prompt_tokens=40, legs=legs),
        times=[
            common_pb2.StageTime(stage="tokenize", seconds=0.001),
            common_pb2.StageTime(stage="decode", seconds=1.5),
        ],
        seed=11,
        stop_token_id=3,
    )


@dataclass
class FakeRouter(inference_pb2_grpc.InferenceServicer):
    """Answers with `messages`; `fail` raises first, `hang` never ends."""

    messages: list[inference_pb2.GenerateResponse] = field(default_factory=list)
    fail: Exception | None = None
    hang: bool = False
    requests: list[inference_pb2.GenerateRequest] = field(default_factory=list)
    status: inference_pb2.GetClusterStatusReply = field(
        default_factory=inference_pb2.GetClusterStatusReply
    )
    cancelled: threading.Event = field(default_factory=threading.Event)
    models: list[inference_pb2.ModelInfo] = field(
        default_factory=lambda: [inference_pb2.ModelInfo(model="tiny")]
    )
    address: str = ""

    @rpc.streaming
    async def Generate(
        self, request: Any, context: Any
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        self.requests.append(request)
        if self.fail is not None:
            raise self.fail
        ended = False
        try:
            for message in self.messages:
                yield message
            if self.hang:
                await asyncio.Event().wait()
            ended = True
        finally:
            # Whether it is met in the wait or while a message is being written.
            if not ended:
                self.cancelled.set()

    @rpc.unary
    async def ListModels(self, request: Any, context: Any) -> inference_pb2.ListModelsReply:
        return inference_pb2.ListModelsReply(models=self.models)

    @rpc.unary
    async def GetClusterStatus(
        self, request: Any, context: Any
    ) -> inference_pb2.GetClusterStatusReply:
        return self.status


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    """Served from a thread of its own, so that blocking clients can be tested, too."""
    fake = FakeRouter(
        messages=[
            inference_pb2.GenerateResponse(request_id="r", text="Hel", token_ids=[1]),
            inference_pb2.GenerateResponse(request_id="r", text="lo", token_ids=[2]),
            last_message(),
        ]
    )
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def call(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(10)

    add: Callable[[grpc.aio.Server], None] = lambda server: (  # noqa: E731
        inference_pb2_grpc.add_InferenceServicer_to_server(fake, server)
    )
    server, fake.address = call(grpc_server.listen("127.0.0.1:0", [add]))
    yield fake
    call(server.stop(0.1))
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
