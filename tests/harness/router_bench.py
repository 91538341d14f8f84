"""A whole router in this process: a real Redis server, real gRPC on free ports, fake workers behind
it; with its HTTP port open, too, and models that say what a test wants.

`served` runs one in a thread with a loop of its own, for clients that block and for many tests of
one module.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import string
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from kvstore import index
from process import incarnation, registry_beat, serving
from process.errors import BatonError
from process.serving import channel as channel
from process.serving import error_from_rpc as error_from_rpc
from protos import (
    common_pb2,
    inference_pb2,
    inference_pb2_grpc,
    kvstore_pb2,
    kvstore_pb2_grpc,
)
from services.router.admission_settings import AdmissionSettings
from services.router.app import Router
from services.router.config import RouterLimits, RouterSettings, RouterTimes
from services.router.fakes.decode import FakeDecode
from services.router.fakes.model import FakeModel
from services.router.fakes.prefill import FakePrefill
from services.router.fakes.worker import FakeWorker
from services.router.model import Model
from services.router.routing import Routing
from services.router.sampling_defaults import SamplingDefaults
from services.router.views import ServedModel
from tests.harness.redis_server import RedisServer
from tests.harness.small_tokenizers import byte_level
from tests.harness.waiting import until
from tokens.chat_template import ChatTemplate

TOKENIZER = byte_level()
LETTERS = tuple(TOKENIZER.encode(letter)[0] for letter in string.ascii_lowercase)
EOS = TOKENIZER.find_token_id("<|end|>") or 0


def save_tokenizer(folder: Path) -> None:
    """The benches' tokenizer as a checkpoint has it."""
    TOKENIZER._backend.save(str(folder / "tokenizer.json"))


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

    def __init__(self, redis_server: RedisServer, model: FakeModel) -> None:
        self.redis = redis_server
        self.model = model
        self.prefills: list[FakePrefill] = []
        self.decodes: list[FakeDecode] = []
        self.router: Router
        self.channel: grpc.aio.Channel
        self.stub: Any
        self._is_stopping = False

    def watch_releases(self) -> list[Any]:
        """Handles whose leases the router gives back from here on, instead of giving them back."""
        released: list[Any] = []
        self.router._prefills._give_back = released.append
        return released

    def is_up(self, prefill: FakePrefill) -> bool:
        """The router's stream to that worker is."""
        return self.router._prefills.is_up(prefill.worker_id)

    @property
    def prefill(self) -> FakePrefill:
        return self.prefills[0]

    @property
    def decode(self) -> FakeDecode:
        return self.decodes[0]

    @property
    def num_open_legs(self) -> int:
        """Of requests, on streams to decode workers."""
        return self.router._streams.num_open_legs

    @property
    def model_for_router(self) -> Model:
        return model_for_router(self.model)

    async def add(self, worker: FakeWorker) -> None:
        """Start a worker, and have the router meet it: until then it is the last choice."""
        await worker.start()
        (self.prefills if isinstance(worker, FakePrefill) else self.decodes).append(worker)  # type: ignore[arg-type]
        await self.publish(worker)
        await until(lambda: self._has_met(worker))

    def _has_met(self, worker: FakeWorker) -> bool:
        role = self.router._prefills if isinstance(worker, FakePrefill) else self.router._streams
        stream = role._streams.find(worker.worker_id)
        return stream is not None and stream.incarnation == worker.incarnation and stream.is_up

    async def publish(self, worker: FakeWorker, *, ttl_ms: int = 60_000) -> None:
        """A worker may still do so in the background while the bench ends: then there is no router
        that could look."""
        if self._is_stopping:
            return
        client = self.redis.client()
        try:
            await worker.register(client, ttl_ms=ttl_ms)
        finally:
            await client.aclose()
        if not self._is_stopping:
            await self.router._registry.poll()

    async def lapse(self, worker: FakeWorker) -> None:
        """The worker has no heartbeat any more, and the router knows."""
        client = self.redis.client()
        try:
            await client.delete(registry_beat.beat_key("worker", worker.worker_id))
        finally:
            await client.aclose()
        await self.router._registry.poll()

    async def add_store(self, node_id: str, address: str = "127.0.0.1:9") -> str:
        """Register a store that is alive, without a process. Returns: its incarnation (hex)."""
        life = incarnation.new().hex()
        entry = {"node_id": node_id, "address": address, "incarnation": life}
        client = self.redis.client()
        try:
            await client.hset(index.STORES_KEY, node_id, json.dumps(entry))
            await client.set(index.beat_key(node_id), life, px=60_000)
        finally:
            await client.aclose()
        await self.router._registry.poll()
        return life

    async def hold(self, node_id: str, life: str, chain_hashes: Sequence[bytes]) -> None:
        """Have the index say that the store holds these blocks."""
        client = self.redis.client()
        try:
            entries = dict.fromkeys(chain_hashes, 1)
            await client.hset(index.index_key(node_id, life), mapping=entries)
        finally:
            await client.aclose()

    async def start_router(self, settings: RouterSettings, *others: Model) -> None:
        """`others`: models served beside the bench's own."""
        self.router = Router(settings, self.model_for_router, *others)
        await self.router.start()
        self.channel = serving.channel(self.router.address)
        self.stub = inference_pb2_grpc.InferenceStub(self.channel)

    async def is_idle(self) -> bool:
        try:
            self.router.check_integrity(is_idle=True)
        except BatonError:
            return False
        workers_idle = not any(d.num_open for d in self.decodes)
        return workers_idle and not any(p.num_active for p in self.prefills)

    async def stop(self, *, expect_idle: bool = True) -> None:
        """Check the conservation laws, then stop everything."""
        try:
            if expect_idle:
                await until(self.is_idle)
                self.router.check_integrity(is_idle=True)
            assert not any(decode.num_misplaced for decode in self.decodes)
        finally:
            self._is_stopping = True
            await self.channel.close()
            await self.router.stop()
            for worker in (*self.prefills, *self.decodes):
                await worker.stop()

    async def generate(self, request: Any, **options: Any) -> list[Any]:
        """All messages of one request."""
        return [m async for m in self.stub.Generate(request, timeout=BOUND_S, **options)]


class LeaseStore(kvstore_pb2_grpc.KvStoreServicer):
    """A store that only hears which leases are given back."""

    def __init__(self) -> None:
        self.address = ""
        self.released: list[str] = []

    async def Release(self, request: Any, context: Any) -> Any:
        self.released += request.lease_ids
        return kvstore_pb2.ReleaseReply(num_released=len(request.lease_ids))


@asynccontextmanager
async def lease_store() -> AsyncIterator[LeaseStore]:
    store = LeaseStore()
    server, store.address = await serving.listen(
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
        pools = Routing.pools

        def counted(routing: Routing, *args: Any, **options: Any) -> Any:
            self._num += 1
            return pools(routing, *args, **options)

        monkeypatch.setattr(Routing, "pools", counted)

    async def more(self, num: int) -> None:
        """Until it was looked `num` times more. Raises: TimeoutError after BOUND_S."""
        wanted = self._num + num
        await until(lambda: self._num >= wanted)


async def rest_of(call: Any) -> list[Any]:
    """All messages that `call.read` has not given yet."""
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


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


def model_for_router(model: FakeModel) -> Model:
    """What a router knows of it."""
    return Model(
        model.name,
        served=ServedModel((model.name,), model.tokenizer_digest),
        tokenizer=TOKENIZER,
        template=ChatTemplate(TEMPLATE, special_tokens={}),
        defaults=SamplingDefaults(),
    )


def fake_model(**changes: Any) -> FakeModel:
    base = {
        "alphabet": LETTERS,
        "eos_token_id": EOS,
        "vocab_size": TOKENIZER.vocab_size,
    }
    return FakeModel(**{**base, **changes})


@asynccontextmanager
async def running(
    *,
    num_prefill: int = 1,
    num_decode: int = 1,
    model: FakeModel | None = None,
    expect_idle: bool = True,
    make: Callable[[RedisServer, FakeModel], Bench] | None = None,
    others: Sequence[FakeModel] = (),
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
            for index in range(num_prefill):
                await bench.add(FakePrefill(f"p{index}", bench.model))
            for index in range(num_decode):
                await bench.add(FakeDecode(f"d{index}", bench.model))
            yield bench
        except BaseException:
            expect_idle = False
            raise
        finally:
            await bench.stop(expect_idle=expect_idle)
    finally:
        server.remove()


def expected_ids(bench: Bench, prompt: list[int], seed: int, num_tokens: int) -> list[int]:
    """What the fakes draw."""
    params = inference_pb2.GenerateRequest().sampling
    params.seed = seed
    return [bench.model.token(prompt, params, position) for position in range(num_tokens)]


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
class ScriptedModel(FakeModel):
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
    def num_open_legs(self) -> int:
        """Of requests, on streams to decode workers."""
        return self.router._streams.num_open_legs

    @property
    def model_for_router(self) -> Model:
        model = super().model_for_router
        model.template = ChatTemplate(TOOL_TEMPLATE, special_tokens={})
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
