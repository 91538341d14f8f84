"""Handles taken from a prefill worker and handed to a decode worker by somebody who is no router:
changed on their way, or handed over twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from process import rpc
from protos import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    inference_pb2,
    prefill_pb2,
    prefill_pb2_grpc,
)
from tests.harness.handles import blocks_of, forge
from tests.harness.prefill_decode_pair import Answer, PrefillCall, RouterStream, sampling_params

MAX_TOKENS = 8
CALL_S = 30.0
AGAIN_S = 0.2
TENANT = "somebody"
SALT = bytes(range(32))

Forgery = Callable[[common_pb2.KvHandle], None]


def _other_signature(handle: common_pb2.KvHandle) -> None:
    handle.signature = secrets.token_bytes(len(handle.signature))


def _no_signature(handle: common_pb2.KvHandle) -> None:
    handle.signature = b""


def _unknown_key(handle: common_pb2.KvHandle) -> None:
    handle.key_id = f"{handle.key_id}x"


def _other_checksum(handle: common_pb2.KvHandle) -> None:
    forge(handle.runs[0], 0, checksum=blocks_of(handle.runs[0])[0].checksum ^ 1)


def _other_frame(handle: common_pb2.KvHandle) -> None:
    forge(handle.runs[0], 0, frame=blocks_of(handle.runs[0])[0].frame + 1)


def _other_store(handle: common_pb2.KvHandle) -> None:
    handle.runs[0].store_address = "127.0.0.1:1"


def _other_lease(handle: common_pb2.KvHandle) -> None:
    handle.runs[0].lease_id = secrets.token_hex(16)


def _longer_life(handle: common_pb2.KvHandle) -> None:
    handle.deadline_unix_ms += 3_600_000


def _another_nonce(handle: common_pb2.KvHandle) -> None:
    handle.nonce = secrets.token_bytes(len(handle.nonce))


def _shorter(handle: common_pb2.KvHandle) -> None:
    handle.num_tokens -= 1


FORGERIES: dict[str, Forgery] = {
    "other signature": _other_signature,
    "no signature": _no_signature,
    "unknown key": _unknown_key,
    "other checksum": _other_checksum,
    "other frame": _other_frame,
    "other store": _other_store,
    "other lease": _other_lease,
    "longer life": _longer_life,
    "another nonce": _another_nonce,
    "shorter": _shorter,
}


@dataclass(frozen=True)
class Workers:
    """Whom to speak to, and which model they have."""

    prefill_address: str
    decode_address: str
    fingerprint: str


def workers_of(status: inference_pb2.GetClusterStatusReply) -> Workers:
    """One of each role."""
    by_role = {worker.role: worker for worker in status.workers}
    return Workers(
        by_role["prefill"].address, by_role["decode"].address, by_role["prefill"].model_fingerprint
    )


async def forged(workers: Workers, prompt: Sequence[int], forgery: str) -> Answer:
    """One request whose handle was changed on its way."""
    async with _decode_stream(workers) as stream:
        handed = await _handed_over(stream, workers, prompt)
        FORGERIES[forgery](handed.handle)
        return await _generate(stream, handed.key, handed)


async def replayed(workers: Workers, prompt: Sequence[int]) -> tuple[Answer, Answer]:
    """One request, and then the same again with the handle of the first."""
    async with _decode_stream(workers) as stream:
        handed = await _handed_over(stream, workers, prompt)
        first = await _generate(stream, handed.key, handed)
        key = await _reserve(stream, workers, prompt, handed.name)
        return first, await _generate(stream, key, handed)


@dataclass(frozen=True)
class _HandedOver:
    """A reserved request, and what its prefill gave for it."""

    name: str
    key: int
    handle: common_pb2.KvHandle
    token_ids: list[int]


async def _handed_over(
    stream: RouterStream, workers: Workers, prompt: Sequence[int]
) -> _HandedOver:
    """One whose whole prompt was handed over. A small store may have no room for it now: then
    another one, until those who have it leave."""
    async with asyncio.timeout(CALL_S):
        while True:
            name = f"forged-{secrets.token_hex(8)}"
            key = await _reserve(stream, workers, prompt, name)
            account, tokens = await _prefill(workers, prompt, name)
            if account.handle.runs and not account.leg.not_stored:
                return _HandedOver(name, key, account.handle, tokens)
            await stream.cancel(key)
            await stream.collect(key)
            await asyncio.sleep(AGAIN_S)


@contextlib.asynccontextmanager
async def _decode_stream(workers: Workers) -> AsyncIterator[RouterStream]:
    async with rpc.channel(workers.decode_address) as channel:
        stream = RouterStream(decode_pb2_grpc.DecodeStub(channel).Stream())
        try:
            yield stream
        finally:
            await stream.close()


async def _reserve(stream: RouterStream, workers: Workers, prompt: Sequence[int], name: str) -> int:
    key = await stream.reserve(
        decode_pb2.ReserveDecode(
            request_id=name,
            tenant=TENANT,
            tenant_salt=SALT,
            prompt_token_ids=prompt,
            sampling=sampling_params(max_tokens=MAX_TOKENS),
            model_fingerprint=workers.fingerprint,
            budget_ms=int(CALL_S * 1000),
        )
    )
    event = await stream.next(key)
    assert event.WhichOneof("event") == "reserved", event
    return key


async def _prefill(
    workers: Workers, prompt: Sequence[int], name: str
) -> tuple[prefill_pb2.PrefillReply, list[int]]:
    """Returns: the message with the whole handle, and the first token."""
    request = prefill_pb2.PrefillRequest(
        request_id=name,
        tenant=TENANT,
        tenant_salt=SALT,
        prompt_token_ids=prompt,
        sampling=sampling_params(max_tokens=MAX_TOKENS),
        model_fingerprint=workers.fingerprint,
        wants_handle=True,
    )
    tokens: list[int] = []
    account = prefill_pb2.PrefillReply()
    async with rpc.channel(workers.prefill_address) as channel:
        stub = prefill_pb2_grpc.PrefillStub(channel)
        async for reply in PrefillCall(stub, request, timeout_s=CALL_S):
            tokens += reply.token_ids
            if reply.HasField("leg"):
                account = reply
    return account, tokens


async def _generate(stream: RouterStream, key: int, handed: _HandedOver) -> Answer:
    command = decode_pb2.GenerateFromHandle(handle=handed.handle, output_token_ids=handed.token_ids)
    await stream.generate_from(key, command)
    answer = await stream.collect(key)
    answer.token_ids[:0] = handed.token_ids
    return answer
