"""What the router may rely on about partial handles, held by real workers and by the fakes alike:
the router's tests are worth as much as the fakes are like the real ones.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from process import serving
from protos import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from services.router.fakes.decode import FakeDecode
from services.router.fakes.model import FakeModel
from services.router.fakes.prefill import FakePrefill
from tests.harness.gated_engine import SALT
from tests.harness.prefill_decode_pair import (
    WAIT_S,
    PrefillCall,
    RouterStream,
    handover,
    pair,
    sampling_params,
)
from tests.harness.waiting import until

PROMPT = [1 + index % 90 for index in range(100)]
MAX_TOKENS = 6


class _HeldModel:
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
    holds: _HeldModel | None = None
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
async def _real(folder: Path) -> AsyncIterator[Workers]:
    async with pair(folder) as workers:
        yield Workers(
            workers.prefill_stub,
            workers.decode_stub,
            workers.model.info.fingerprint,
            _HeldModel(workers.prefill_model),
        )
        await workers.check()


@contextlib.asynccontextmanager
async def _fakes(_: Path) -> AsyncIterator[Workers]:
    model = FakeModel(block_size=4)
    prefill, decode = FakePrefill("p0", model), FakeDecode("d0", model)
    prefill.num_partials, prefill.num_late_partials = 3, 1
    await prefill.start()
    await decode.start()
    async with serving.channel(prefill.address) as first, serving.channel(decode.address) as second:
        yield Workers(
            prefill_pb2_grpc.PrefillStub(first),
            decode_pb2_grpc.DecodeStub(second),
            model.fingerprint,
        )
        await until(lambda: not (prefill.num_active or decode.num_open))
    await prefill.stop()
    await decode.stop()


@pytest.fixture(params=["fake", "real"])
async def workers(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Workers]:
    async with {"fake": _fakes, "real": _real}[request.param](tmp_path) as made:
        yield made


def _partials(messages: Sequence[prefill_pb2.PrefillReply]) -> list[common_pb2.KvHandle]:
    return [message.handle for message in messages if message.handle.is_partial]


@pytest.mark.parametrize("num_samples", [1, 3])
async def test_partial_handles_come_before_the_account_and_grow(
    workers: Workers, num_samples: int
) -> None:
    request = workers.prefill_request(n=num_samples)
    messages = await workers.prefilled(request)
    *others, account = messages
    partials = _partials(messages)
    assert partials
    # Each is alone in its message; the rest is what it is without them.
    for message in others:
        says_more = bool(message.token_ids) or message.HasField("leg")
        assert message.handle.is_partial != says_more
    assert len([m for m in others if m.token_ids]) == num_samples
    assert account.HasField("leg") and not account.handle.is_partial
    # Only full blocks, never fewer than before, none that the last one has not.
    covered = [handle.num_tokens for handle in partials]
    assert covered == sorted(covered) and covered[0] > 0
    assert covered[-1] <= account.handle.num_tokens == len(PROMPT)
    assert all(num_tokens % 4 == 0 for num_tokens in covered)
    assert not any(handle.HasField("tail") for handle in partials)
    # No two are equal, so that one that comes twice is seen.
    nonces = [handle.nonce for handle in (*partials, account.handle)]
    assert len(set(nonces)) == len(nonces) and {len(nonce) for nonce in nonces} == {16}
    # What it names goes on under the same request.
    assert {handle.request_id for handle in partials} == {account.handle.request_id}
    await _serve_out(workers, messages, num_samples)


async def test_nobody_is_told_early_of_what_is_not_handed_over(workers: Workers) -> None:
    request = workers.prefill_request()
    request.wants_handle = False
    if workers.holds is not None:
        workers.holds.release()
    messages = await workers.prefilled(request)
    assert not any(message.HasField("handle") for message in messages)


async def test_early_handles_change_no_token(workers: Workers) -> None:
    """Each of them, then the last; and then the same request without any."""
    request = workers.prefill_request()
    messages = await workers.prefilled(request)
    with_early = await _serve_out(workers, messages, 1)
    again = await workers.prefilled(request)
    without = await _serve_out(workers, [m for m in again if not m.handle.is_partial], 1)
    assert with_early == without and len(with_early) == MAX_TOKENS - 1


async def test_an_early_handle_that_cannot_be_used_is_no_failure(workers: Workers) -> None:
    """Of nobody's making: another request's, and unsigned."""
    request = workers.prefill_request()
    messages = await workers.prefilled(request)
    forged = common_pb2.KvHandle(request_id="x", num_tokens=4, is_partial=True)
    mixed = [prefill_pb2.PrefillReply(handle=forged), *messages]
    assert len(await _serve_out(workers, mixed, 1)) == MAX_TOKENS - 1


async def test_a_cancel_between_early_handles_has_one_last_word(workers: Workers) -> None:
    request = workers.prefill_request()
    messages = await workers.prefilled(request)
    first, *_ = _partials(messages)
    async with workers.stream() as stream:
        key = await stream.reserve(workers.reserve())
        assert (await stream.next(key)).WhichOneof("event") == "reserved"
        await stream.prefetch(key, first)
        await stream.cancel(key)
        await stream.prefetch(key, first)  # too late, as one may be that crossed the last word
        await stream.prefetch(key + 1_000_000, first)  # nobody's
        answer = await stream.collect(key)
        assert answer.finished is not None
        assert answer.finished.finish_reason == common_pb2.FINISH_REASON_CANCELLED
        # The stream still serves.
        assert len(await _decode(stream, workers, messages, 1)) == MAX_TOKENS - 1
        assert [event.key for message in stream.messages for event in message.events].count(
            key
        ) == 2


async def _serve_out(
    workers: Workers, messages: Sequence[prefill_pb2.PrefillReply], num_samples: int
) -> list[int]:
    async with workers.stream() as stream:
        return await _decode(stream, workers, messages, num_samples)


async def _decode(
    stream: RouterStream,
    workers: Workers,
    messages: Sequence[prefill_pb2.PrefillReply],
    num_samples: int,
) -> list[int]:
    """As the router does it with the messages of a prefill. Returns: the tokens of all samples, in
    the order in which they came."""
    sampling = {"n": num_samples} if num_samples > 1 else {}
    key = await stream.reserve(workers.reserve(**sampling))
    assert (await stream.next(key)).WhichOneof("event") == "reserved"
    firsts = []
    for message in messages[:-1]:
        if message.handle.is_partial:
            await stream.prefetch(key, message.handle)
        else:
            firsts.append(message)
    await stream.generate_from(key, handover(messages[-1], firsts))
    answer = await stream.collect(key)
    assert answer.failed is None and answer.finished is not None
    return answer.token_ids
