"""A store, a prefill and a decode worker of the small bundled model in one process, for what the
fake model cannot show: text, weights and adapters.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.engine import LLMEngine, load_engine
from kvstore import store_process
from kvstore.config import KvStoreSettings
from process import rpc
from protos import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from services.worker import main
from services.worker.config import WorkerLimits
from tests.harness.gated_engine import SALT
from tests.harness.prefill_decode_pair import (
    PrefillCall,
    RouterStream,
    Sample,
    handover_of,
    keys_in,
    sampling_params,
    served_by,
    started,
)
from tests.harness.worker_probe import translated

MODEL = "baton-5m-draft"
WAIT_S = 20.0
PATIENCE_S = 90.0
"""The first grammar of a worker starts a process."""
PROMPT = tuple(range(40, 61))
NUM_TOKENS = 8


@dataclasses.dataclass
class Workers:
    """Both workers of one test."""

    prefill: main.Worker
    decode: main.Worker
    stubs: tuple[Any, Any]
    reference: LLMEngine | None = None
    """One engine alone, once it was asked."""

    async def load(self, name: str, folder: Path) -> list[str]:
        """At run time, on both. Returns: the digests they say. Raises: BatonError."""
        return [await self.load_at(index, name, folder) for index in range(2)]

    async def load_at(self, index: int, name: str, folder: Path) -> str:
        """On prefill (0) or decode (1)."""
        request = common_pb2.LoadAdapterRequest(name=name, folder=str(folder))
        with translated():
            reply = await self.stubs[index].LoadAdapter(request, timeout=WAIT_S)
        return str(reply.adapter.digest)

    async def unload_at(self, index: int, name: str) -> None:
        request = common_pb2.UnloadAdapterRequest(name=name)
        with translated():
            await self.stubs[index].UnloadAdapter(request, timeout=WAIT_S)

    async def statuses(self) -> list[common_pb2.WorkerStatus]:
        """Of prefill and decode; every law holds."""
        request = common_pb2.GetWorkerStatusRequest()
        found = [await stub.GetWorkerStatus(request, timeout=WAIT_S) for stub in self.stubs]
        assert all(status.integrity_error == "" for status in found)
        return found

    async def alone(self, prompt: Sequence[int] = PROMPT, **sampling: Any) -> list[Sample]:
        """See the function of this name. Not on the loop: what is under way there has deadlines."""
        if self.reference is None:
            self.reference = await asyncio.to_thread(load_engine, self.prefill.core.settings.engine)
        return await asyncio.to_thread(alone, self.reference, prompt, **sampling)

    async def ask_prefill(
        self,
        name: str,
        drawn: Sequence[int] = (),
        *,
        adapter: str = "",
        digest: str = "",
        **sampling: Any,
    ) -> list[prefill_pb2.PrefillReply]:
        """First tokens behind those that others drew, and the account. Raises: BatonError."""
        fields = self.fields(PROMPT, name, adapter, digest, **sampling)
        request = prefill_pb2.PrefillRequest(wants_handle=True, output_token_ids=drawn, **fields)
        return await PrefillCall(self.stubs[0], request, timeout_s=PATIENCE_S).answer()

    async def ask_decode(
        self,
        name: str,
        outputs: Sequence[Sequence[int]] = ((),),
        *,
        handle: common_pb2.KvHandle | None = None,
        over: Sequence[int] = (),
        **sampling: Any,
    ) -> tuple[dict[int, Sample], decode_pb2.DecodeFinished]:
        """What decode draws behind these tokens, by sample, and its last word. Without a handle it
        computes the prompt. over: samples that are complete."""
        fields = self.fields(PROMPT, name, "", "", **sampling)
        samples: dict[int, Sample] = defaultdict(Sample)
        stream = RouterStream(self.stubs[1].Stream())
        try:
            reserve = decode_pb2.ReserveDecode(budget_ms=int(PATIENCE_S * 1000), **fields)
            key = await stream.begin(reserve, PATIENCE_S)
            if len(outputs) > 1:
                await stream.go_on(
                    key, outputs, handle=handle, over=over, computes_prompt=handle is None
                )
            else:
                command = decode_pb2.GenerateFromHandle(
                    handle=handle, output_token_ids=outputs[0], computes_prompt=handle is None
                )
                await stream.generate_from(key, command)
            return samples, await stream.finish(key, samples, PATIENCE_S)
        finally:
            await stream.close()

    def fields(
        self, prompt: Sequence[int], name: str, adapter: str, digest: str, **sampling: Any
    ) -> dict[str, Any]:
        """What both legs are told of a request."""
        return {
            "request_id": name,
            "tenant": "t",
            "tenant_salt": SALT,
            "prompt_token_ids": prompt,
            "sampling": sampling_params(**sampling),
            "model_fingerprint": self.prefill.core.model.fingerprint,
            "adapter": adapter,
            "adapter_digest": digest,
        }

    async def generate(
        self,
        prompt: Sequence[int] = PROMPT,
        *,
        name: str = "r",
        adapter: str = "",
        digest: str = "",
        **sampling: Any,
    ) -> dict[int, Sample]:
        """One answer through both workers, nothing of its prompt computed twice; by sample."""
        fields = self.fields(prompt, name, adapter, digest, **sampling)
        prefill_stub, decode_stub = self.stubs
        samples: dict[int, Sample] = defaultdict(Sample)
        stream = RouterStream(decode_stub.Stream())
        try:
            key = await stream.begin(decode_pb2.ReserveDecode(budget_ms=20_000, **fields))
            request = prefill_pb2.PrefillRequest(wants_handle=True, **fields)
            call = PrefillCall(prefill_stub, request, timeout_s=WAIT_S)
            firsts, account = await stream.forward(key, call)
            for first in firsts:
                if not first.beam_start:
                    samples[first.sample_index].add(first)
            if samples and all(sample.finish_reason for sample in samples.values()):
                await stream.end(key)
                return samples
            await stream.generate_from(key, handover_of(account, firsts))
            finished = await stream.finish(key, samples)
        finally:
            await stream.close()
        leg = finished.leg
        assert leg.num_tokens_computed == 0 and not leg.recomputed, (leg, account.leg)
        return samples

    async def check(self) -> None:
        """Every law of both workers holds."""
        await self.statuses()


def bundled_engine(index: int = 0) -> LLMEngine:
    """Of the bundled model, alone; the caller closes it."""
    return load_engine(EngineConfig(model=MODEL, device="cpu", kv_bytes=8 * 1024 * 1024))


def alone(engine: LLMEngine, prompt: Sequence[int] = PROMPT, **sampling: Any) -> list[Sample]:
    """What one engine gives that serves the whole request by itself."""
    return served_by(engine, b"alone", prompt, **sampling)


@contextlib.asynccontextmanager
async def workers(slab_dir: Path, *adapters: str) -> AsyncIterator[Workers]:
    """A store and two workers of the bundled draft model, with these adapters from the start."""
    limits = WorkerLimits(
        store_wait_s=WAIT_S,
        attach_budget_s=5.0,
        # The store shares a loop and its interpreter with two models: late is not away.
        ping_budget_s=WAIT_S,
        drain_s=0.2,
        stop_grace_s=0.05,
    )
    store_settings = KvStoreSettings(
        slab_dir=str(slab_dir), capacity_bytes=16 * 1024 * 1024, stop_timeout_s=0.0
    )
    async with contextlib.AsyncExitStack() as stack:
        store = await stack.enter_async_context(store_process.running(store_settings))
        made = []
        own = {"handle_keys_file": keys_in(slab_dir), "limits": limits, "adapters": adapters}
        for role in ("prefill", "decode"):
            # Not on the loop, where the other worker keeps its ways to the store.
            engine = await asyncio.to_thread(bundled_engine)
            worker = started(role, engine, store.address, **own)
            made.append(await stack.enter_async_context(worker))
        channels = [await stack.enter_async_context(rpc.channel(worker.address)) for worker in made]
        stubs = (prefill_pb2_grpc.PrefillStub(channels[0]), decode_pb2_grpc.DecodeStub(channels[1]))
        both = Workers(made[0], made[1], stubs)
        yield both
        if both.reference is not None:
            both.reference.close()
