"""A prefill worker without a model. Law: `num_active` prompts have not had their last word. One
asyncio loop.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial
from typing import Any

import grpc.aio

from process import rpc
from process.errors import BatonError, Cancelled
from protos import common_pb2, prefill_pb2, prefill_pb2_grpc
from services.router.fakes.gate import Gate
from services.router.fakes.model import FakeModel, logprobs, prompt_logprobs
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
        self.account_error: BatonError | None = None
        """Raised instead of the account."""
        self.error: BatonError | None = None
        """Raised instead of an answer, or behind `error_after` first tokens of it."""
        self.error_after = 0
        self.num_local = 0
        """Prompt tokens that its accounts say to have been in its own cache."""
        self.store_address = ""
        """Store that its handles say to hold leases of."""
        self.requests: list[prefill_pb2.PrefillRequest] = []
        self.traceparents: list[str] = []
        """Of the prompts, in their order; empty for one without."""
        self.num_active = 0
        self.num_cancelled = 0
        self.num_cancelled_late = 0
        """Cancels of prompts whose last word was said."""
        self.idle = asyncio.Event()
        self.idle.set()

    @rpc.streaming
    async def Stream(
        self, commands: AsyncIterator[prefill_pb2.PrefillCommand], context: Context
    ) -> AsyncGenerator[prefill_pb2.PrefillEvents, None]:
        events: asyncio.Queue[prefill_pb2.PrefillEvent | None] = asyncio.Queue()
        tasks: dict[int, asyncio.Task[None]] = {}
        reader = asyncio.create_task(self._obey(commands, tasks, events))
        try:
            while (event := await events.get()) is not None:
                yield prefill_pb2.PrefillEvents(events=[event])
        finally:
            reader.cancel()
            for task in tasks.values():
                task.cancel()

    async def _obey(
        self,
        commands: AsyncIterator[prefill_pb2.PrefillCommand],
        tasks: dict[int, asyncio.Task[None]],
        events: asyncio.Queue[prefill_pb2.PrefillEvent | None],
    ) -> None:
        async for command in commands:
            key = command.key
            if command.WhichOneof("command") == "prefill":
                tasks[key] = asyncio.create_task(self._live(key, command.prefill, events))
                tasks[key].add_done_callback(partial(_forget, tasks, key))
            elif key in tasks:
                tasks[key].cancel()
            else:
                self.num_cancelled_late += 1
        events.put_nowait(None)

    async def _live(
        self,
        key: int,
        request: prefill_pb2.PrefillRequest,
        events: asyncio.Queue[prefill_pb2.PrefillEvent | None],
    ) -> None:
        self.requests.append(request)
        self.traceparents.append(request.traceparent)
        self.num_active += 1
        self.idle.clear()
        problem: BatonError | None = None
        try:
            async for reply in self._replies(request):
                events.put_nowait(prefill_pb2.PrefillEvent(key=key, reply=reply))
        except asyncio.CancelledError:
            self.num_cancelled += 1
            problem = Cancelled("cancelled")
        except BatonError as error:
            problem = error
        finally:
            self.num_active -= 1
            if not self.num_active:
                self.idle.set()
        if problem is not None:
            code, message = rpc.status_of(problem)
            failed = prefill_pb2.PrefillFailed(
                code=rpc.code_number(code),
                message=message,
                retry_after_s=problem.retry_after_s,
            )
            events.put_nowait(prefill_pb2.PrefillEvent(key=key, failed=failed))

    async def _replies(
        self, request: prefill_pb2.PrefillRequest
    ) -> AsyncIterator[prefill_pb2.PrefillReply]:
        for reply in self._partials(request, 0, self.num_partials):
            yield reply
        told = []
        if request.HasField("prompt_logprobs"):
            told = prompt_logprobs(request.prompt_token_ids, request.prompt_logprobs)
        half = -(-len(told) // 2)
        if told:
            yield prefill_pb2.PrefillReply(prompt_logprobs=told[:half])
        await self.gate.passed()
        if told[half:]:
            yield prefill_pb2.PrefillReply(prompt_logprobs=told[half:])
        firsts = [self._first(request, index) for index in range(request.sampling.n or 1)]
        for index, first in enumerate(firsts):
            if self.error is not None and index == self.error_after:
                raise self.error
            yield first
        for reply in self._partials(request, self.num_partials, self.num_late_partials):
            yield reply
        await self.account_gate.passed()
        if self.account_error is not None:
            raise self.account_error
        yield self._last(request, is_over=all(first.finish_reason for first in firsts))

    async def GetWorkerStatus(
        self, request: common_pb2.GetWorkerStatusRequest, context: Context
    ) -> common_pb2.WorkerStatus:
        await self.status_gate.passed()
        return self.status()

    def _first(
        self, request: prefill_pb2.PrefillRequest, sample_index: int
    ) -> prefill_pb2.PrefillReply:
        prompt, sampling, num_drawn = (
            request.prompt_token_ids,
            request.sampling,
            len(request.output_token_ids),
        )
        token_id = self.model.token(prompt, sampling, num_drawn, sample_index)
        reason = self.model.reason(token_id, sampling, num_drawn + 1)
        reply = prefill_pb2.PrefillReply(
            sample_index=sample_index,
            token_ids=[token_id],
            logprobs=logprobs([token_id], request.sampling),
            finish_reason=reason,
        )
        if reason in (common_pb2.FINISH_REASON_EOS, common_pb2.FINISH_REASON_STOP_TOKEN):
            reply.stop_token_id = token_id
        if request.wants_embedding:
            reply.embedding.extend(self.model.embedding(request.prompt_token_ids))
        return reply

    def _last(
        self, request: prefill_pb2.PrefillRequest, *, is_over: bool
    ) -> prefill_pb2.PrefillReply:
        reply = prefill_pb2.PrefillReply(
            leg=self.leg(len(request.prompt_token_ids), is_computed=True, num_local=self.num_local),
            times=[common_pb2.StageTime(stage="prefill_compute", seconds=1e-6)],
        )
        if request.wants_handle and not is_over:
            num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
            reply.handle.CopyFrom(self._handle(request, num_tokens))
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


def _forget(tasks: dict[int, asyncio.Task[None]], key: int, task: asyncio.Task[None]) -> None:
    del tasks[key]
