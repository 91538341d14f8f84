"""One router put together: started, stopped, and its laws checked. Knows every part, does none of
their work.

`Router.start` returns when clients are served; `stop` lets requests finish for a while, then ends
everything that `start` began, in the reverse order. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import secrets
import time

import grpc.aio

import checkpoints
from checkpoints.sampling_defaults import SamplingDefaults
from kvstore import index
from process import redis_client, serving
from process.errors import BatonError
from process.metrics import MetricsServer
from process.settings import SettingsError
from services.router import sampling_defaults
from services.router.candidates import Candidates
from services.router.config import RouterSettings
from services.router.decode_streams import DecodeStreams
from services.router.inflight import InFlight
from services.router.job import Cluster
from services.router.lease_release import LeaseRelease
from services.router.lookup import PrefixLookup
from services.router.metrics import RouterMetrics
from services.router.policy import DECODE, PREFILL
from services.router.prefill_client import PrefillClient
from services.router.prompt import PromptEncoder
from services.router.registry import Registry
from services.router.server import Counters, Front, InferenceServicer
from services.router.status import ClusterStatus
from services.router.tenants import TenantSalts, parse_scopes
from services.router.views import ServedModel, Snapshot
from tokens.chat_template import ChatTemplate
from tokens.errors import TokensError
from tokens.tokenizer import Tokenizer


class Model:
    """What the router needs of the checkpoint it serves: names, tokenizer, template, defaults."""

    def __init__(
        self,
        name: str,
        *,
        served: ServedModel,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        defaults: SamplingDefaults,
    ) -> None:
        self.name = name
        self.served = served
        self.tokenizer = tokenizer
        self.template = template
        self.defaults = defaults


def load_model(model: str) -> Model:
    """Find the checkpoint and read its tokenizer files; blocking.

    Raises: SettingsError, one line: what is wrong with `model` and how to fix it.
    """
    try:
        checkpoint = checkpoints.resolve(model, files="tokenizer")
        return Model(
            checkpoint.name,
            served=ServedModel(
                (checkpoint.name, model), checkpoints.tokenizer_digest(checkpoint.path)
            ),
            tokenizer=Tokenizer.load(checkpoint.path),
            template=ChatTemplate.find(checkpoint.path),
            defaults=sampling_defaults.read_defaults(checkpoint.path),
        )
    except (checkpoints.CheckpointError, TokensError) as error:
        raise SettingsError(f"model: {error}") from error


class Router:
    """See the module."""

    def __init__(self, settings: RouterSettings, model: Model) -> None:
        times = settings.times
        self.router_id = settings.router_id or f"router-{secrets.token_hex(4)}"
        self.address = ""
        """host:port clients speak to; known once started."""
        self._settings = settings
        self._redis = redis_client.connect(settings.redis_url, times.redis_timeout_s)
        self._index_redis = redis_client.connect(settings.redis_url, times.lookup_timeout_s)
        self._streams = DecodeStreams(times, time.monotonic)
        self._prefills = PrefillClient()
        self._leases = LeaseRelease(timeout_s=times.status_timeout_s)
        self._registry = Registry(
            self._redis,
            poll_interval_s=times.poll_interval_s,
            timeout_s=times.redis_timeout_s,
            on_change=self._on_registry,
        )
        self._in_flight = InFlight(
            max_requests=settings.limits.max_requests_in_flight,
            supersede_wait_s=times.supersede_wait_s,
        )
        self._encoder = PromptEncoder(model.tokenizer, model.template)
        self._lookup = PrefixLookup(
            index.PrefixIndex(self._index_redis, times.lookup_timeout_s),
            lambda: self._registry.snapshot.stores,
            timeout_s=times.lookup_timeout_s,
        )
        self.metrics = RouterMetrics(self.router_id, lambda: self._in_flight.num_attempts)
        self._metrics_server = MetricsServer(self.metrics)
        self._servicer = self._make_servicer(model)
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Serve. Raises: Unavailable when the port is taken."""
        # The first encoding of a process sets the library up; no client should wait for that.
        self._encoder.tokenizer.encode("warm up")
        await self._registry.start()
        if self._settings.metrics_listen:
            self._metrics_server.start(self._settings.metrics_listen)
        self._server, self.address = await serving.listen(
            self._settings.listen,
            [self._servicer.add_to],
            max_message_bytes=self._settings.limits.hard_request_bytes,
        )

    @property
    def metrics_address(self) -> str:
        """host:port of /metrics; empty: nobody listens."""
        return self._metrics_server.address

    async def stop(self) -> None:
        """Take no new request, let those under way finish for a while, then end them."""
        if self._server is not None:
            await self._server.stop(self._settings.times.drain_s)
        await asyncio.to_thread(self._metrics_server.stop)
        await self._registry.stop()
        await self._streams.close()
        await self._prefills.close()
        await self._leases.close()
        self._encoder.close()
        await self._redis.aclose()
        await self._index_redis.aclose()

    def check_integrity(self, *, is_idle: bool = False) -> None:
        """Recompute every law of this process; with `is_idle`, also that nothing is left over.

        Raises: Internal naming the law that is broken.
        """
        self._in_flight.check_integrity()
        self._streams.check_integrity()
        self._prefills.check_integrity()
        if is_idle:
            left = {
                "requests in flight": self._in_flight.num_attempts,
                "open decode legs": self._streams.num_open_legs,
                "prefill calls": self._prefills.num_calls,
                "stores being told": self._leases.num_under_way,
            }
            if any(left.values()):
                raise BatonError(f"idle, but left over: {left}")

    def _integrity_error(self) -> str:
        try:
            self.check_integrity()
        except BatonError as error:
            return f"router: {error}"
        return ""

    def _on_registry(self, snapshot: Snapshot) -> None:
        self._streams.reconcile(w for w in snapshot.workers if w.role == DECODE)
        self._prefills.reconcile(w for w in snapshot.workers if w.role == PREFILL)

    def _make_servicer(self, model: Model) -> InferenceServicer:
        settings = self._settings
        candidates = Candidates(
            self._registry,
            self._streams,
            self._prefills,
            served=model.served,
            times=settings.times,
            clock=time.monotonic,
        )
        cluster = Cluster(
            candidates=candidates,
            streams=self._streams,
            prefills=self._prefills,
            lookup=self._lookup,
            leases=self._leases,
            costs=settings.costs,
            times=settings.times,
            model=model.name,
            handover=settings.handover,
        )
        status = ClusterStatus(
            self._registry,
            self._lookup,
            served=model.served,
            router_id=self.router_id,
            timeout_s=settings.times.status_timeout_s,
            check_integrity=self._integrity_error,
        )
        return InferenceServicer(
            Front(
                cluster=cluster,
                candidates=candidates,
                encoder=self._encoder,
                in_flight=self._in_flight,
                counters=Counters(),
                limits=settings.limits,
                defaults=model.defaults,
                served=model.served,
                status=status,
                salts=TenantSalts(settings.tenant_secret, parse_scopes(settings.tenant_scopes)),
                metrics=self.metrics,
            )
        )
