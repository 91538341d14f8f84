"""A decode worker without a model. Law: `num_open` reservations have not had their last word. One
asyncio loop.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from process import rpc
from process.errors import BatonError, NoCapacity, Unavailable
from protos import common_pb2, decode_pb2, decode_pb2_grpc
from services.router.fakes.gate import Gate
from services.router.fakes.model import FakeModel, logprobs
from services.router.fakes.worker import Context, FakeWorker

Events = asyncio.Queue[decode_pb2.DecodeEvent | None]


@dataclass(eq=False)
class _Leg:
    reserve: decode_pb2.ReserveDecode
    table: dict[int, _Leg]
    """Of its stream."""
    key: int
    events: Events
    task: asyncio.Task[None] | None = None
    outputs: list[list[int]] = field(default_factory=list)
    open: set[int] = field(default_factory=set)
    """Samples that go on."""
    num_blocks: int = 0
    is_generating: bool = False
    is_alone: bool = False
    """It computes the prompt itself."""


class FakeDecode(FakeWorker, decode_pb2_grpc.DecodeServicer):
    """A decode worker. Its law: `num_open` reservations have not had their last word."""

    role = "decode"

    def __init__(self, worker_id: str, model: FakeModel) -> None:
        super().__init__(worker_id, model)
        self.read_gate = Gate()
        """Before a command is taken off its stream."""
        self.reserve_gate = Gate()
        """Before a reservation is answered."""
        self.place_gate = Gate()
        """Before a reservation that has its blocks is answered: while it is closed, the request is
        told that it is queued."""
        self.token_gate = Gate()
        """Before each token."""
        self.pause_at: int | None = None
        """Output position at which the token gate closes by itself."""
        self.error: BatonError | None = None
        """Answers reservations instead of blocks."""
        self.num_tokens_local = 0
        """Prompt tokens that it says to have, of each request."""
        self.num_free_places: int | None = None
        """That it says to have; None: it does not say."""
        self.most_taken = 0
        """Blocks that were reserved at once."""
        self.generated: list[decode_pb2.GenerateFromHandle] = []
        self.prefetched: list[tuple[str, common_pb2.KvHandle]] = []
        """Partial handles by request id of the reservation, in the order in which they came."""
        self.traceparents: list[str] = []
        """Of the reservations, in their order."""
        self.num_misplaced = 0
        """Prefetches for a key that generates, or that the router has cancelled itself."""
        self.moved: list[decode_pb2.DecodeMoved] = []
        """What it said of requests that it moved."""
        self.store_address = ""
        """Store that the handles of those say to hold leases of."""
        self.num_reserved = 0
        self.num_refused = 0
        self.num_cancelled = 0
        self.num_samples_cancelled = 0
        self.num_streams = 0
        self.num_open = 0
        self._legs: list[_Leg] = []
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def num_generating(self) -> int:
        """Requests that draw, whichever router they are of."""
        return sum(leg.is_generating for leg in self._legs)

    @property
    def num_drawn(self) -> dict[int, int]:
        """Tokens of each sample that goes on, of its only request."""
        (leg,) = self._legs
        return {index: len(leg.outputs[index]) for index in leg.open}

    def move_all(self, *, with_handles: bool = True, num_lost: int = 0, **handle: int) -> None:
        """Leave as a draining worker does: what runs is moved, what only holds blocks is given up,
        nothing new is taken. `num_lost`: tokens that it says to have sent, but did not. `handle`:
        fields of the handles that say something else than what is.
        """
        self.is_draining = True
        self.error = Unavailable(f"{self.worker_id} is leaving", retry_after_s=0.0)
        for leg in list(self._legs):
            self._end(leg.table, leg.key)
            if leg.is_generating:
                moved = self._moved(leg, with_handle=with_handles, num_lost=num_lost)
                for name, value in handle.items():
                    setattr(moved.handle, name, value)
                self.moved.append(moved)
                leg.events.put_nowait(decode_pb2.DecodeEvent(key=leg.key, moved=moved))
            else:
                failed = _failed(self.error)
                leg.events.put_nowait(decode_pb2.DecodeEvent(key=leg.key, failed=failed))

    def fail_all(self) -> None:
        """End all that it has with `error`."""
        assert self.error is not None
        for leg in list(self._legs):
            self._end(leg.table, leg.key)
            failed = decode_pb2.DecodeEvent(key=leg.key, failed=_failed(self.error))
            leg.events.put_nowait(failed)

    def _moved(self, leg: _Leg, *, with_handle: bool, num_lost: int) -> decode_pb2.DecodeMoved:
        num_prompt_tokens = len(leg.reserve.prompt_token_ids)
        moved = decode_pb2.DecodeMoved(
            num_output_tokens=[len(output) + num_lost for output in leg.outputs],
            leg=self.leg(num_prompt_tokens, is_computed=leg.is_alone),
            times=[common_pb2.StageTime(stage="decode", seconds=1e-6)],
            reason="draining",
        )
        if with_handle and len(leg.outputs) == 1:
            moved.handle.request_id = leg.reserve.request_id
            moved.handle.num_tokens = num_prompt_tokens + len(leg.outputs[0]) - 1
            moved.handle.nonce = os.urandom(16)
            if self.store_address:
                moved.handle.runs.add(store_address=self.store_address, lease_id="lease-moved")
        return moved

    def _blocks_for(self, reserve: decode_pb2.ReserveDecode) -> int:
        tokens = len(reserve.prompt_token_ids) + reserve.sampling.max_tokens - 1
        return -(-tokens // self.model.block_size)

    @rpc.streaming
    async def Stream(
        self, commands: AsyncIterator[decode_pb2.DecodeCommand], context: Context
    ) -> AsyncGenerator[decode_pb2.DecodeEvents, None]:
        events: Events = asyncio.Queue()
        legs: dict[int, _Leg] = {}
        self.num_streams += 1
        reader = asyncio.create_task(self._obey(commands, legs, events))
        try:
            while (event := await events.get()) is not None:
                yield decode_pb2.DecodeEvents(
                    events=[event],
                    num_free_blocks=self.num_free_blocks,
                    num_running=self.num_generating,
                    num_free_places=self.num_free_places,
                )
        finally:
            self.num_streams -= 1
            reader.cancel()
            for key in list(legs):
                self._end(legs, key)

    def status(self) -> common_pb2.WorkerStatus:
        status = super().status()
        if self.num_free_places is not None:
            status.num_free_places = self.num_free_places
        return status

    async def GetWorkerStatus(
        self, request: common_pb2.GetWorkerStatusRequest, context: Context
    ) -> common_pb2.WorkerStatus:
        await self.status_gate.passed()
        return self.status()

    async def _obey(
        self,
        commands: AsyncIterator[decode_pb2.DecodeCommand],
        legs: dict[int, _Leg],
        events: Events,
    ) -> None:
        cancelled: set[int] = set()
        async for command in commands:
            await self.read_gate.passed()
            key, kind = command.key, command.WhichOneof("command")
            if kind == "prefetch":
                self._prefetch(command, legs.get(key), was_cancelled=key in cancelled)
            elif kind == "reserve":
                self.traceparents.append(command.reserve.traceparent)
                legs[key] = _Leg(command.reserve, legs, key, events)
                self._legs.append(legs[key])
                self.num_open += 1
                self.idle.clear()
                legs[key].task = asyncio.create_task(self._reserve(legs, key, events))
            elif key not in legs:
                continue  # its last word has been said
            elif kind == "generate":
                self.generated.append(command.generate)
                _take_over(legs[key], command.generate)
                legs[key].task = asyncio.create_task(self._generate(legs, key, events))
            elif kind == "cancel_sample":
                self.num_samples_cancelled += 1
                legs[key].open.discard(command.cancel_sample.sample_index)
                if not legs[key].open:
                    self._cancel(legs, key, events)
            elif kind == "cancel":
                self.num_cancelled += 1
                cancelled.add(key)
                self._cancel(legs, key, events)
        events.put_nowait(None)

    def _prefetch(
        self, command: decode_pb2.DecodeCommand, leg: _Leg | None, *, was_cancelled: bool
    ) -> None:
        # One that crossed our own last word on its key is nobody's fault.
        if was_cancelled or (leg is not None and leg.outputs):
            self.num_misplaced += 1
        elif leg is not None:
            self.prefetched.append((leg.reserve.request_id, command.prefetch.handle))

    def _cancel(
        self,
        legs: dict[int, _Leg],
        key: int,
        events: Events,
    ) -> None:
        leg = self._end(legs, key)
        finished = decode_pb2.DecodeFinished(
            finish_reason=common_pb2.FINISH_REASON_CANCELLED,
            leg=self.leg(len(leg.reserve.prompt_token_ids), is_computed=False),
        )
        events.put_nowait(decode_pb2.DecodeEvent(key=key, finished=finished))

    async def _reserve(
        self,
        legs: dict[int, _Leg],
        key: int,
        events: Events,
    ) -> None:
        await self.reserve_gate.passed()
        leg, error = legs[key], self.error
        num_blocks = self._blocks_for(leg.reserve)
        if error is None and num_blocks > self.num_free_blocks:
            error = NoCapacity("no room for so many blocks")
        if error is None:
            self.num_reserved += 1
            leg.num_blocks = num_blocks
            self.num_blocks_taken += num_blocks
            self.most_taken = max(self.most_taken, self.num_blocks_taken)
            if not self.place_gate.is_open:
                queued = decode_pb2.DecodeQueued()
                events.put_nowait(decode_pb2.DecodeEvent(key=key, queued=queued))
            await self.place_gate.passed()
            reserved = decode_pb2.DecodeReserved(num_tokens_local=self.num_tokens_local)
            events.put_nowait(decode_pb2.DecodeEvent(key=key, reserved=reserved))
            return
        self.num_refused += 1
        self._end(legs, key, by_itself=True)
        events.put_nowait(decode_pb2.DecodeEvent(key=key, failed=_failed(error)))

    async def _generate(
        self,
        legs: dict[int, _Leg],
        key: int,
        events: Events,
    ) -> None:
        leg = legs[key]
        leg.is_generating = True
        while True:
            if max(map(len, leg.outputs)) == self.pause_at:
                self.token_gate.close()
            await self.token_gate.passed()
            for index in sorted(leg.open):
                tokens = self._draw(leg, index)
                if leg.open:
                    events.put_nowait(decode_pb2.DecodeEvent(key=key, tokens=tokens))
                    continue
                finished = decode_pb2.DecodeFinished(
                    sample_index=index,
                    token_ids=tokens.token_ids,
                    logprobs=tokens.logprobs,
                    finish_reason=tokens.finish_reason,
                    leg=self.leg(
                        len(leg.reserve.prompt_token_ids),
                        is_computed=leg.is_alone,
                        num_local=self.num_tokens_local,
                    ),
                    times=[common_pb2.StageTime(stage="decode", seconds=1e-6)],
                )
                if tokens.HasField("stop_token_id"):
                    finished.stop_token_id = tokens.stop_token_id
                self._end(legs, key, by_itself=True)
                events.put_nowait(decode_pb2.DecodeEvent(key=key, finished=finished))
                return
            await asyncio.sleep(0)

    def _draw(self, leg: _Leg, index: int) -> decode_pb2.DecodeTokens:
        """One token of one sample, which may end with it."""
        output, params = leg.outputs[index], leg.reserve.sampling
        token_id = self.model.token(leg.reserve.prompt_token_ids, params, len(output), index)
        output.append(token_id)
        reason = self.model.reason(token_id, params, len(output))
        tokens = decode_pb2.DecodeTokens(
            sample_index=index,
            token_ids=[token_id],
            logprobs=logprobs([token_id], params),
            finish_reason=reason,
        )
        if reason in (common_pb2.FINISH_REASON_EOS, common_pb2.FINISH_REASON_STOP_TOKEN):
            tokens.stop_token_id = token_id
        if reason:
            leg.open.discard(index)
        return tokens

    def _end(self, legs: dict[int, _Leg], key: int, *, by_itself: bool = False) -> _Leg:
        leg = legs.pop(key)
        self.num_blocks_taken -= leg.num_blocks
        self._legs.remove(leg)
        if leg.task is not None and not by_itself:
            leg.task.cancel()
        self.num_open -= 1
        if not self.num_open:
            self.idle.set()
        return leg

    def _add_to(self, server: grpc.aio.Server) -> None:
        add: Any = decode_pb2_grpc.add_DecodeServicer_to_server
        add(self, server)


def _failed(error: BatonError) -> decode_pb2.DecodeFailed:
    code, message = rpc.status_of(error)
    return decode_pb2.DecodeFailed(
        code=rpc.code_number(code), message=message, retry_after_s=error.retry_after_s
    )


def _take_over(leg: _Leg, command: decode_pb2.GenerateFromHandle) -> None:
    """What was drawn already, and who goes on."""
    leg.is_alone = command.computes_prompt
    if not command.outputs:
        leg.outputs, leg.open = [list(command.output_token_ids)], {0}
        return
    leg.outputs = [list(output.token_ids) for output in command.outputs]
    leg.open = {index for index, output in enumerate(command.outputs) if not output.is_over}
