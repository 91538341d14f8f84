"""One prefill and one decode worker, real ones or fakes, asked as a router asks them: what the
router may rely on is held by both."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from process import rpc
from protos import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from services.router.testing.fake_workers import FakeDecode, FakePrefill, FakeServedModel
from tests.harness.gated_engine import SALT
from tests.harness.prefill_decode_pair import (
    WAIT_S,
    PrefillCall,
    RouterStream,
    handover_of,
    pair,
    sampling_params,
)
from tests.harness.waiting import until

PROMPT = [1 + index % 90 for index in range(100)]
MAX_TOKENS = 6


class HeldModel:
    """Holds a model's third forward pass, which is its last chance for a partial handle."""

    def __init__(self, model: Any) -> None:
        self._forward = model.forward
        self._num_passes = 0
        self._is_released = threading.Event()
        model.forward = self

    def release(self) -> None:
        self._is_released.set()

    def __call__(self, batch: Any) -> Any:
        self._num_passes += 1
        if self._num_passes == 3:
            assert self._is_released.wait(WAIT_S), "no partial handle came of two chunks"
        return self._forward(batch)


@dataclass
class Workers:
    """One prefill and one decode worker of a kind."""

    prefill: prefill_pb2_grpc.PrefillStub
    decode: decode_pb2_grpc.DecodeStub
    fingerprint: str
    holds: HeldModel | None = None
    """Keeps a real prefill worker computing until its first partial handle is here."""

    async def prefilled(
        self, request: prefill_pb2.PrefillRequest
    ) -> list[prefill_pb2.PrefillReply]:
        """All messages of one call."""
        messages = []
        async for message in PrefillCall(self.prefill, request, timeout_s=WAIT_S):
            messages.append(message)
            if self.holds is not None and message.handle.is_partial:
                self.holds.release()
        return messages

    def prefill_request(self, **sampling: Any) -> prefill_pb2.PrefillRequest:
        return prefill_pb2.PrefillRequest(**self._fields(sampling), wants_handle=True)

    def reserve(self, **sampling: Any) -> decode_pb2.ReserveDecode:
        return decode_pb2.ReserveDecode(**self._fields(sampling), budget_ms=10_000)

    @contextlib.asynccontextmanager
    async def stream(self) -> AsyncIterator[RouterStream]:
        stream = RouterStream(self.decode.Stream())
        try:
            yield stream
        finally:
            await stream.close()

    async def serve_out(
        self,
        messages: Sequence[prefill_pb2.PrefillReply],
        num_samples: int = 1,
        *,
        early: Sequence[common_pb2.KvHandle] = (),
    ) -> list[int]:
        """`decoded` on a stream of its own."""
        async with self.stream() as stream:
            return await self.decoded(stream, messages, num_samples, early=early)

    async def decoded(
        self,
        stream: RouterStream,
        messages: Sequence[prefill_pb2.PrefillReply],
        num_samples: int = 1,
        *,
        early: Sequence[common_pb2.KvHandle] = (),
    ) -> list[int]:
        """As the router does it with the messages of a prefill, and with `early` handles before
        them. Returns: the tokens of all samples, in the order in which they came."""
        sampling = {"n": num_samples} if num_samples > 1 else {}
        key = await stream.reserve(self.reserve(**sampling))
        assert (await stream.next(key)).WhichOneof("event") == "reserved"
        for handle in early:
            await stream.prefetch(key, handle)
        firsts = []
        for message in messages[:-1]:
            if message.handle.is_partial:
                await stream.prefetch(key, message.handle)
            else:
                firsts.append(message)
        await stream.generate_from(key, handover_of(messages[-1], firsts))
        answer = await stream.collect(key)
        assert answer.failed is None and answer.finished is not None
        return answer.token_ids

    def _fields(self, sampling: dict[str, Any]) -> dict[str, Any]:
        return {
            "request_id": "r",
            "tenant": "t",
            "tenant_salt": SALT,
            "prompt_token_ids": PROMPT,
            "sampling": sampling_params(max_tokens=MAX_TOKENS, **sampling),
            "model_fingerprint": self.fingerprint,
        }


@contextlib.asynccontextmanager
async def real_workers(folder: Path) -> AsyncIterator[Workers]:
    async with pair(folder) as workers:
        yield Workers(
            workers.prefill_stub,
            workers.decode_stub,
            workers.model.info.fingerprint,
            HeldModel(workers.prefill_model),
        )
        await workers.check()


@contextlib.asynccontextmanager
async def fake_workers(_: Path) -> AsyncIterator[Workers]:
    model = FakeServedModel(block_size=4)
    prefill, decode = FakePrefill("p0", model), FakeDecode("d0", model)
    prefill.num_partials, prefill.num_late_partials = 3, 1
    await prefill.start()
    await decode.start()
    async with rpc.channel(prefill.address) as first, rpc.channel(decode.address) as second:
        yield Workers(
            prefill_pb2_grpc.PrefillStub(first),
            decode_pb2_grpc.DecodeStub(second),
            model.fingerprint,
        )
        await until(lambda: not (prefill.num_active or decode.num_open))
    await prefill.stop()
    await decode.stop()
