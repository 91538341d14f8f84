"""A prefill worker without a model. Law: `num_active` calls are under way. One asyncio loop."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import grpc.aio

from process import serving
from process.errors import BatonError
from protos import common_pb2, prefill_pb2, prefill_pb2_grpc
from services.router.fakes.gate import Gate
from services.router.fakes.model import FakeModel, logprobs
from services.router.fakes.worker import Context, FakeWorker


class FakePrefill(FakeWorker, prefill_pb2_grpc.PrefillServicer):
    """A prefill worker."""

    role = "prefill"

    def __init__(self, worker_id: str, model: FakeModel) -> None:
        super().__init__(worker_id, model)
        self.gate = Gate()
        """Before the first token."""
        self.num_partials = 0
        """Partial handles before the first token."""
        self.num_late_partials = 0
        """Partial handles between the first tokens and the account."""
        self.account_gate = Gate()
        """Between the token and the account."""
        self.end_gate = Gate()
        """Between the account and the end of the call."""
        self.account_error: BatonError | None = None
        """Raised instead of the account."""
        self.error: BatonError | None = None
        """Raised instead of an answer, or behind `error_after` first tokens of it."""
        self.error_after = 0
        self.store_address = ""
        """Store that its handles say to hold leases of."""
        self.requests: list[prefill_pb2.PrefillRequest] = []
        self.num_active = 0
        self.num_cancelled = 0
        self.idle = asyncio.Event()
        self.idle.set()

    @serving.unary
    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Context) -> None:
        self.requests.append(request)
        self.num_active += 1
        self.idle.clear()
        try:
            for message in self._partials(request, 0, self.num_partials):
                await context.write(message)
            await self.gate.passed()
            firsts = [self._first(request, index) for index in range(request.sampling.n or 1)]
            for index, first in enumerate(firsts):
                if self.error is not None and index == self.error_after:
                    raise self.error
                await context.write(first)
            for message in self._partials(request, self.num_partials, self.num_late_partials):
                await context.write(message)
            await self.account_gate.passed()
            if self.account_error is not None:
                raise self.account_error
            is_over = all(first.finish_reason for first in firsts)
            await context.write(self._last(request, is_over=is_over))
            await self.end_gate.passed()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_active -= 1
            if not self.num_active:
                self.idle.set()

    async def GetWorkerStatus(
        self, request: common_pb2.GetWorkerStatusRequest, context: Context
    ) -> common_pb2.WorkerStatus:
        return self.status()

    def _first(
        self, request: prefill_pb2.PrefillRequest, sample_index: int
    ) -> prefill_pb2.PrefillReply:
        token_id = self.model.token(request.prompt_token_ids, request.sampling, 0, sample_index)
        reason = self.model.reason(token_id, request.sampling, 1)
        reply = prefill_pb2.PrefillReply(
            sample_index=sample_index,
            token_ids=[token_id],
            logprobs=logprobs([token_id], request.sampling),
            finish_reason=reason,
        )
        if reason in (common_pb2.FINISH_REASON_EOS, common_pb2.FINISH_REASON_STOP_TOKEN):
            reply.stop_token_id = token_id
        return reply

    def _last(
        self, request: prefill_pb2.PrefillRequest, *, is_over: bool
    ) -> prefill_pb2.PrefillReply:
        reply = prefill_pb2.PrefillReply(
            leg=self.leg(len(request.prompt_token_ids), is_computed=True),
            times=[common_pb2.StageTime(stage="prefill_compute", seconds=1e-6)],
        )
        if request.wants_handle and not is_over:
            reply.handle.CopyFrom(self._handle(request, len(request.prompt_token_ids)))
            if self.store_address:
                reply.handle.tail.store_address = self.store_address
                reply.handle.tail.lease_id = "lease-tail"
        return reply

    def _partials(
        self, request: prefill_pb2.PrefillRequest, first: int, count: int
    ) -> list[prefill_pb2.PrefillReply]:
        if not request.wants_handle:
            return []
        return [self._partial(request, index) for index in range(first, first + count)]

    def _partial(self, request: prefill_pb2.PrefillRequest, index: int) -> prefill_pb2.PrefillReply:
        """What is stored after chunk `index`, of one block each. Its lease stays ours."""
        size = self.model.block_size
        num_tokens = min((index + 1) * size, len(request.prompt_token_ids) // size * size)
        handle = self._handle(request, num_tokens)
        handle.is_partial = True
        return prefill_pb2.PrefillReply(handle=handle)

    def _handle(self, request: prefill_pb2.PrefillRequest, num_tokens: int) -> common_pb2.KvHandle:
        handle = common_pb2.KvHandle(
            request_id=request.request_id, num_tokens=num_tokens, nonce=os.urandom(16)
        )
        if self.store_address:
            handle.runs.add(store_address=self.store_address, lease_id="lease-run")
        return handle

    def _add_to(self, server: grpc.aio.Server) -> None:
        add: Any = prefill_pb2_grpc.add_PrefillServicer_to_server
        add(self, server)
