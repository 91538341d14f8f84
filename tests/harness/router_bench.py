"""A whole router in this process: a real Redis server, real gRPC on free ports, fake workers behind
it; with its HTTP port open, too, and models that say what a test wants.

`served` runs one in a thread with a loop of its own, for clients that block and for many tests of
one module.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.client
import json
import socket
import string
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc
import grpc.aio
import pytest

from kvstore import block_hash, index
from process import entrypoint, grpc_server, registry, rpc
from process.rpc import channel as channel
from process.rpc import error_from_rpc as error_from_rpc
from process.rpc_errors import BatonError
from process.settings import SettingsError as SettingsError
from protos import common_pb2, inference_pb2, inference_pb2_grpc, kvstore_pb2, kvstore_pb2_grpc
from services.router import client_limits, http_server, worker_client
from services.router.app import Router, ServedCheckpoint
from services.router.config import (
    AdmissionSettings,
    RouterLimits,
    RouterSettings,
    RouterTimes,
    TenantSalts,
    parse_scopes,
)
from services.router.placement import Placer
from services.router.request import SamplingDefaults
from services.router.testing.fake_workers import FakeDecode as FakeDecode
from services.router.testing.fake_workers import FakePrefill as FakePrefill
from services.router.testing.fake_workers import FakeServedModel as FakeServedModel
from services.router.testing.fake_workers import FakeWorker as FakeWorker
from services.router.testing.fake_workers import Gate as Gate
from services.router.worker_views import ServedModel
from services.worker.runtime import Heartbeat
from tests.harness.redis_server import RedisServer
from tests.harness.router_probe import RouterProbe
from tests.harness.small_tokenizers import byte_level
from tests.harness.waiting import until
from tokens.chat_template import ChatTemplate
from tokens.token_bytes import TokenBytes

TOKENIZER = byte_level()
LETTERS = tuple(TOKENIZER.encode(letter)[0] for letter in string.ascii_lowercase)
EOS = TOKENIZER.find_token_id("<|end|>") or 0


def bytes_of(token_id: int) -> bytes:
    """That a token of the benches' tokenizer stands for."""
    return TokenBytes(TOKENIZER).of(token_id)


def save_tokenizer(folder: Path) -> None:
    """The benches' tokenizer as a checkpoint has it."""
    TOKENIZER._backend.save(str(folder / "tokenizer.json"))


JSON = {"content-type": "application/json"}

BOUND_S = 30.0
"""No wait of a test may take longer; far above what any should take."""

SHORT_WAITS = {"reserve_wait_s": 0.3, "failover_wait_s": 0.3}
"""Times of a router, for tests that see a request's wait for a worker run out."""

TEMPLATE = (
    "{% for m in messages %}{{ '<|user|>' if m.role == 'user' else '' }}{{ m.content }}"
    "{{ ' (' + m.name + ')' if m.name else '' }}{% endfor %}<|end|>"
)


class Bench:
    """Router, workers, client stub."""

    def __init__(self, redis_server: RedisServer, model: FakeServedModel) -> None:
        self.redis = redis_server
        self.model = model
        self.prefills: list[FakePrefill] = []
        self.decodes: list[FakeDecode] = []
        self.router: Router
        self.probe: RouterProbe
        self.channel: grpc.aio.Channel
        self.stub: Any
        self._is_stopping = False
        self._num_publishing = 0
        # One: each reads the version of its library from files.
        self.redis_client = redis_server.client()

    @property
    def prefill(self) -> FakePrefill:
        return self.prefills[0]

    @property
    def decode(self) -> FakeDecode:
        return self.decodes[0]

    @property
    def model_for_router(self) -> ServedCheckpoint:
        return model_for_router(self.model)

    async def busy_prefill(self) -> tuple[FakePrefill, FakePrefill]:
        """The one of two prefill workers that has come to have a request, and the other."""
        await until(lambda: any(worker.num_active for worker in self.prefills))
        busy, other = sorted(self.prefills, key=lambda worker: not worker.num_active)
        return busy, other

    async def add(self, *workers: FakeWorker) -> None:
        """Start workers, and have the router meet them: until then they are the last choice."""
        for worker in workers:
            await worker.start()
            (self.prefills if isinstance(worker, FakePrefill) else self.decodes).append(worker)  # type: ignore[arg-type]
            await self.publish(worker)
        await until(lambda: all(map(self.probe.has_met, workers)))

    async def publish(self, worker: FakeWorker, *, ttl_ms: int = 60_000) -> None:
        """A worker may still do so in the background while the bench ends, which waits for it: a
        connection that is being made while its client is closed stays open."""
        if self._is_stopping:
            return
        self._num_publishing += 1
        try:
            await worker.register(self.redis_client, ttl_ms=ttl_ms)
            await self.probe.look()
        finally:
            self._num_publishing -= 1

    @asynccontextmanager
    async def beating(self, *workers: FakeWorker) -> AsyncIterator[list[Heartbeat]]:
        """The workers register as real ones do."""
        beats = [
            Heartbeat(
                self.redis.url,
                worker_id=worker.worker_id,
                incarnation=worker.incarnation,
                status=worker.status,
            )
            for worker in workers
        ]
        for beat in beats:
            beat.start()
        try:
            await until(lambda: all(beat.is_registered for beat in beats))
            yield beats
        finally:
            for beat in beats:
                await beat.stop()

    async def silence(self, worker: FakeWorker) -> None:
        """The worker has no heartbeat any more."""
        await self.redis_client.delete(registry.beat_key("worker", worker.worker_id))

    async def lapse(self, worker: FakeWorker) -> None:
        """As `silence`, and the router knows."""
        await self.silence(worker)
        await self.probe.look()

    @asynccontextmanager
    async def starting_decode(self, worker_id: str) -> AsyncIterator[None]:
        """This decode worker has said that it starts, and the router knows."""
        entry = {"worker_id": worker_id, "role": "decode", "model": self.model.name}
        beat = registry.RegistryHeartbeat(
            self.redis.url,
            registry.STARTING_WORKER,
            entry_id=worker_id,
            incarnation=entrypoint.new_incarnation().hex(),
            entry=lambda: json.dumps(entry),
        )
        beat.start()
        try:
            await until(lambda: self.probe.num_starting)
            yield
        finally:
            await beat.stop()

    async def add_store(self, node_id: str, address: str = "127.0.0.1:9") -> str:
        """Register a store that is alive, without a process. Returns: its incarnation (hex)."""
        life = entrypoint.new_incarnation().hex()
        entry = {"node_id": node_id, "address": address, "incarnation": life}
        await self.redis_client.hset(index.STORES_KEY, node_id, json.dumps(entry))
        await self.redis_client.set(index.beat_key(node_id), life, px=60_000)
        await self.probe.look()
        return life

    def chain(self, token_ids: Sequence[int], tenant: str = "default") -> list[bytes]:
        """Hashes of the full blocks of these tokens, as the router looks them up."""
        root = block_hash.root_key(self._salts.of(tenant), self.model.fingerprint)
        return block_hash.chain(root, token_ids, self.model.block_size)

    async def hold(self, node_id: str, life: str, chain_hashes: Sequence[bytes]) -> None:
        """Have the index say that the store holds these blocks."""
        entries = dict.fromkeys(chain_hashes, 1)
        await self.redis_client.hset(index.index_key(node_id, life), mapping=entries)

    async def start_router(self, settings: RouterSettings, *others: ServedCheckpoint) -> None:
        """`others`: models served beside the bench's own."""
        self._salts = TenantSalts(settings.tenant_secret, parse_scopes(settings.tenant_scopes))
        self.router = Router(settings, self.model_for_router, *others)
        self.probe = RouterProbe(self.router)
        await self.router.start()
        self.channel = rpc.channel(self.router.address)
        self.stub = inference_pb2_grpc.InferenceStub(self.channel)

    @asynccontextmanager
    async def another_router(self, **changes: Any) -> AsyncIterator[tuple[RouterProbe, Any]]:
        """A second router on the same workers, which it has met; on leaving, it may have nothing
        left over. Yields: it, and a stub."""
        router = Router(settings_for(self.redis, **changes), self.model_for_router)
        probe = RouterProbe(router)
        try:
            await router.start()
            async with channel(router.address) as to_it:
                workers = (*self.prefills, *self.decodes)
                await until(lambda: all(map(probe.has_met, workers)))
                yield probe, inference_pb2_grpc.InferenceStub(to_it)
                await until(probe.is_idle)
        finally:
            await router.stop()

    async def status(self, **fields: Any) -> Any:
        """The cluster's, as clients read it."""
        asked = inference_pb2.GetClusterStatusRequest(**fields)
        return await self.stub.GetClusterStatus(asked, timeout=BOUND_S)

    async def explain(self, request_id: str = "", tenant: str = "") -> Any:
        """Why a request was given to its workers; by default the latest."""
        asked = inference_pb2.ExplainRequest(request_id=request_id, tenant=tenant)
        return await self.stub.Explain(asked, timeout=BOUND_S)

    def is_idle(self) -> bool:
        workers_idle = not any(d.num_open for d in self.decodes)
        prefills_idle = not any(p.num_active for p in self.prefills)
        return workers_idle and prefills_idle and self.probe.is_idle()

    async def stop(self, *, expect_idle: bool = True) -> None:
        """Check the conservation laws, then stop everything."""
        try:
            if expect_idle:
                await until(self.is_idle)
                self.router.check_integrity(is_idle=True)
            assert not any(decode.num_misplaced for decode in self.decodes)
        finally:
            self._is_stopping = True
            await until(lambda: not self._num_publishing)
            await self.channel.close()
            await self.router.stop()
            for worker in (*self.prefills, *self.decodes):
                await worker.stop()
            await self.redis_client.aclose()

    def call(self, asked: Any = None, *, metadata: Any = None, **fields: Any) -> Any:
        """A request under way, whole or named by its fields: the stream of its messages."""
        asked = request(**fields) if asked is None else asked
        return self.stub.Generate(asked, timeout=BOUND_S, metadata=metadata)

    async def generate(self, asked: Any = None, **options: Any) -> list[Any]:
        """All messages of one request; see `call`."""
        return await rest_of(self.call(asked, **options))

    async def failure(
        self, asked: Any = None, **options: Any
    ) -> tuple[grpc.StatusCode, BatonError]:
        """What one request ends with; see the function of this name, and `call`."""
        return await failure(self.call(asked, **options))

    async def code_of(self, asked: Any = None, **options: Any) -> grpc.StatusCode:
        return (await self.failure(asked, **options))[0]

    def expected_ids(
        self, prompt: Sequence[int], seed: int, num_tokens: int, sample_index: int = 0
    ) -> list[int]:
        """What the fakes draw."""
        params = common_pb2.SamplingParams(seed=seed)
        return [self.model.token(prompt, params, at, sample_index) for at in range(num_tokens)]


class LeaseStore(kvstore_pb2_grpc.KvStoreServicer):
    """A store that only hears which leases are given back, and says how it is."""

    def __init__(self) -> None:
        self.address = ""
        self.released: list[str] = []
        self.status: dict[str, Any] = {}
        """Fields of its status."""

    async def GetStatus(self, request: Any, context: Any) -> Any:
        return kvstore_pb2.GetStatusReply(**self.status)

    async def Release(self, request: Any, context: Any) -> Any:
        self.released += request.lease_ids
        return kvstore_pb2.ReleaseReply(num_released=len(request.lease_ids))


@asynccontextmanager
async def lease_store() -> AsyncIterator[LeaseStore]:
    store = LeaseStore()
    server, store.address = await grpc_server.listen(
        "127.0.0.1:0", [lambda s: kvstore_pb2_grpc.add_KvStoreServicer_to_server(store, s)]
    )
    try:
        yield store
    finally:
        await server.stop(None)


class Looks:
    """How often it was looked which workers a request may be given to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._num = 0
        pools = Placer.pools

        def counted(routing: Placer, *args: Any, **options: Any) -> Any:
            self._num += 1
            return pools(routing, *args, **options)

        monkeypatch.setattr(Placer, "pools", counted)

    async def more(self, num: int) -> None:
        """Until it was looked `num` times more. Raises: TimeoutError after BOUND_S."""
        wanted = self._num + num
        await until(lambda: self._num >= wanted)


def take_heartbeats_of_any_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the router ever had at a worker may be in the heartbeat that it reads."""
    monkeypatch.setattr(worker_client, "BEAT_AGE_S", 1e9)


def say_something_after(monkeypatch: pytest.MonkeyPatch, grace_s: float) -> None:
    """An HTTP client that has ended its direction hears that it is being answered."""
    monkeypatch.setattr(http_server, "_GRACE_S", grace_s)


def abort_after(monkeypatch: pytest.MonkeyPatch, wait_s: float) -> None:
    """What a gRPC client is told last waits so long for it to read."""
    monkeypatch.setattr(rpc, "ABORT_S", wait_s)


class ReaderClock:
    """The clock of StalledReaders: time passes when a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(client_limits, "reader_clock_s", lambda: self.now_s)


async def rest_of(call: Any) -> list[Any]:
    """All messages that `call.read` has not given yet."""
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


async def failure(work: Any) -> tuple[grpc.StatusCode, BatonError]:
    """What a call, or what awaits one, ends with: its status, and the error that clients read."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (rest_of(work) if hasattr(work, "read") else work)
    return caught.value.code(), error_from_rpc(caught.value)


async def code_of(work: Any) -> grpc.StatusCode:
    """See `failure`."""
    return (await failure(work))[0]


@asynccontextmanager
async def raw(address: str, data: bytes) -> AsyncIterator[asyncio.StreamReader]:
    """A bare connection, with something sent."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(data)
        async with asyncio.timeout(BOUND_S):
            yield reader
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def settings_for(redis_server: RedisServer, **changes: Any) -> RouterSettings:
    # None may run out because the machine is busy: a test that sees one run out names its own.
    patient = (
        *("connect_timeout_s", "finish_wait_s", "lookup_timeout_s", "redis_timeout_s"),
        *("status_timeout_s", "reserve_answer_s", "reserve_wait_s", "failover_wait_s"),
        *("lapse_grace_s", "drain_s"),
    )
    times = {**dict.fromkeys(patient, BOUND_S), "suspect_s": 0.5}
    limits = changes.pop("limits", {})
    admission = {"rate_timeout_s": BOUND_S, **changes.pop("admission", {})}
    return RouterSettings(
        model="fake",
        redis_url=redis_server.url,
        times=RouterTimes(**{**times, **changes.pop("times", {})}),
        limits=RouterLimits(**limits),
        admission=AdmissionSettings(**admission),
        **changes,
    )


@functools.cache
def _compiled(template: str) -> ChatTemplate:
    return ChatTemplate(template, special_tokens={})


def model_for_router(model: FakeServedModel) -> ServedCheckpoint:
    """What a router knows of it."""
    return ServedCheckpoint(
        model.name,
        served=ServedModel((model.name,), model.tokenizer_digest),
        tokenizer=TOKENIZER,
        template=_compiled(TEMPLATE),
        defaults=SamplingDefaults(),
    )


def fake_model(**changes: Any) -> FakeServedModel:
    base = {"alphabet": LETTERS, "eos_token_id": EOS, "vocab_size": TOKENIZER.vocab_size}
    return FakeServedModel(**{**base, **changes})


@asynccontextmanager
async def running(
    *,
    num_prefill: int = 1,
    num_decode: int = 1,
    model: FakeServedModel | None = None,
    expect_idle: bool = True,
    make: Callable[[RedisServer, FakeServedModel], Bench] | None = None,
    others: Sequence[FakeServedModel] = (),
    **changes: Any,
) -> AsyncIterator[Bench]:
    """A bench with that many workers, of another class if `make` says so; on leaving, nothing may
    be left over. `others`: models that the router serves beside the workers'.
    """
    server = RedisServer()
    try:
        await server.start()
        bench = (make or Bench)(server, model or fake_model())
        await bench.start_router(settings_for(server, **changes), *map(model_for_router, others))
        try:
            prefills = [FakePrefill(f"p{index}", bench.model) for index in range(num_prefill)]
            decodes = [FakeDecode(f"d{index}", bench.model) for index in range(num_decode)]
            await bench.add(*prefills, *decodes)
            yield bench
        except BaseException:
            expect_idle = False
            raise
        finally:
            await bench.stop(expect_idle=expect_idle)
    finally:
        server.remove()


def ids_of(messages: Sequence[Any], sample_index: int | None = None) -> list[int]:
    """The tokens that messages brought, of one sample or of all."""
    own = [m for m in messages if sample_index is None or m.sample_index == sample_index]
    return [token_id for message in own for token_id in message.token_ids]


def request(**fields: Any) -> Any:
    """A GenerateRequest; `sampling` as a dict."""
    message = inference_pb2.GenerateRequest(**fields)
    if message.WhichOneof("prompt") is None:
        message.text = "hello"
    return message


TOOL_TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}"
    'call as <tool_call>{"name": ..., "arguments": ...}</tool_call>{% endif %}'
    "{% for m in messages %}{{ m.role }}: "
    "{{ '(' + m.reasoning_content + ')' if m.reasoning_content else '' }}{{ m.content }}"
    "{% for c in m.tool_calls or () %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]"
    "{% endfor %}{{ ' re ' + m.tool_call_id if m.tool_call_id else '' }}\n{% endfor %}"
    "{{ mood or '' }}assistant:"
)
"""One that takes tools in the tagged form."""


@dataclass(frozen=True)
class ScriptedModel(FakeServedModel):
    """Says its script, token by token, then ends; sample by sample the same."""

    script: tuple[int, ...] = ()

    def token(
        self,
        prompt: Sequence[int],
        params: common_pb2.SamplingParams,
        position: int,
        sample_index: int = 0,
    ) -> int:
        """The output token at `position`."""
        return self.script[position] if position < len(self.script) else self.eos_token_id


def saying(text: str) -> ScriptedModel:
    """A model whose every answer is `text`."""
    base = fake_model()
    return ScriptedModel(
        alphabet=base.alphabet,
        eos_token_id=base.eos_token_id,
        vocab_size=base.vocab_size,
        context_window=4096,
        script=tuple(TOKENIZER.encode(text)),
    )


class HttpBench(Bench):
    """A bench whose model has the tools' template."""

    @property
    def model_for_router(self) -> ServedCheckpoint:
        model = super().model_for_router
        model.template = _compiled(TOOL_TEMPLATE)
        return model

    @property
    def url(self) -> str:
        return f"http://{self.router.http_address}"

    async def publish(self, worker: FakeWorker, *, ttl_ms: int = 3_600_000) -> None:
        """As a bench does; it has to last for all tests of a module."""
        await super().publish(worker, ttl_ms=ttl_ms)


@asynccontextmanager
async def http_bench(**options: Any) -> AsyncIterator[HttpBench]:
    """`bench.running` with the HTTP port open."""
    async with running(http_listen="127.0.0.1:0", make=HttpBench, **options) as bench:
        assert isinstance(bench, HttpBench)
        yield bench


@dataclass
class Served:
    """A bench in a thread of its own."""

    bench: HttpBench
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        return self.bench.url

    def ask(
        self,
        path: str,
        body: Mapping[str, Any] | bytes,
        headers: Mapping[str, str] = MappingProxyType(JSON),
    ) -> tuple[int, Any]:
        """Post it. Returns: status and parsed answer."""
        connection = http.client.HTTPConnection(self.bench.router.http_address, timeout=BOUND_S)
        try:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            connection.request("POST", path, data, dict(headers))
            response = connection.getresponse()
            assert response.getheader("server") == "baton"
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def connect(self) -> socket.socket:
        """A bare connection."""
        host, _, port = self.bench.router.http_address.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=BOUND_S)

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine where the router runs."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(2 * BOUND_S)


@contextlib.contextmanager
def served(**options: Any) -> Iterator[Served]:
    """See `Served`; on leaving, nothing may be left over."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="http-bench")
    thread.start()
    bench, bound_s = http_bench(**options), 2 * BOUND_S
    try:
        entered = asyncio.run_coroutine_threadsafe(bench.__aenter__(), loop).result(bound_s)
        yield Served(entered, loop)
        left = bench.__aexit__(None, None, None)
        asyncio.run_coroutine_threadsafe(left, loop).result(bound_s)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()
