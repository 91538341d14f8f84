"""Router: the router process's composition root, which builds all parts from the settings, starts
and stops them, and checks their invariants.

`start` returns when clients are served. `stop` lets running requests finish for a while, then ends
everything that `start` began. `ServedCheckpoint` is a checkpoint as far as the router needs it:
tokenizer files, no weights. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import grpc.aio
from prometheus_client.metrics_core import Metric

import checkpoints
from checkpoints.sampling_defaults import SamplingDefaults
from kvstore import index
from process import entrypoint, grpc_server, logs, metrics, registry
from process.authorization import RULES, PeerRole
from process.grpc_server import HealthServicer, ReflectionServicer
from process.metrics import HealthProbes, Labels, MetricsServer
from process.rpc import Dialer
from process.rpc_errors import BatonError, Unavailable
from process.settings import SettingsError
from process.tls import TlsIdentity, is_loopback
from process.tracing import Tracing
from services.router import http_server, policies, request
from services.router.adapter_changes import AdapterChanges
from services.router.admission import DEFAULT_STEP_TOKENS, Admission, Holding
from services.router.attempts import Attempts
from services.router.callers import ApiKeys
from services.router.circuit_breaker import Probation, Prober
from services.router.client_limits import Clients
from services.router.cluster_status import ClusterStatus
from services.router.config import RouterSettings, TenantSalts, parse_scopes
from services.router.grpc_service import SERVICE, InferenceServicer
from services.router.http_server import Cors, HttpServer
from services.router.lease_release import LeaseRelease
from services.router.metrics import AdmissionMetrics, HttpMetrics, RouterMetrics, Traffic
from services.router.metrics import make_beat as make_beat
from services.router.openai.routes import OpenAiRoutes
from services.router.page.routes import LivePage
from services.router.placement import Placer
from services.router.policies import DECODE, PREFILL
from services.router.prefixes import PrefixLookup
from services.router.rate_limit import RateLimits
from services.router.registry import Registry
from services.router.request import Preparer, PromptEncoder, RoutingServices
from services.router.request_stats import RequestLog, UsageHistory
from services.router.served_models import OneModel, ServedModels
from services.router.service import AdapterUse, RouterService
from services.router.worker_client import DecodeStreams, PrefillClient
from services.router.worker_directory import WorkerDirectory
from services.router.worker_views import ServedModel, Snapshot, hung_workers
from tokens.chat_template import ChatTemplate
from tokens.errors import TokensError
from tokens.tokenizer import Tokenizer


class ServedCheckpoint:
    """Checkpoint of a served model, without weights: names, tokenizer, chat template, sampling
    defaults."""

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


def load_model(model: str) -> ServedCheckpoint:
    """Resolve the checkpoint of `model` and read its tokenizer files; blocking.

    Raises: SettingsError, one line: what is wrong with `model` and how to fix it.
    """
    try:
        checkpoint = checkpoints.resolve(model, files="tokenizer")
        return ServedCheckpoint(
            checkpoint.name,
            served=ServedModel(
                (checkpoint.name, model), checkpoints.tokenizer_digest(checkpoint.path)
            ),
            tokenizer=Tokenizer.load(checkpoint.path),
            template=ChatTemplate.find(checkpoint.path),
            defaults=request.read_defaults(checkpoint.path),
        )
    except (checkpoints.CheckpointError, TokensError) as error:
        raise SettingsError(f"model: {error}") from error


logger = logging.getLogger(__name__)

_LAST_WORDS_S = 2.0
"""Seconds for the errors of requests that are ended at shutdown to reach their clients."""


class Router:
    """One router process."""

    def __init__(self, settings: RouterSettings, *models: ServedCheckpoint) -> None:
        """models: the checkpoints that `settings` name, in the same order."""
        times = settings.times
        self.router_id = settings.router_id or f"router-{secrets.token_hex(4)}"
        self.address = ""
        """host:port of the gRPC server; known once started."""
        self._settings = settings
        self._redis = registry.connect_redis(
            settings.redis_url, times.redis_timeout_s, settings.redis
        )
        self._index_redis = registry.connect_redis(
            settings.redis_url, times.lookup_timeout_s, settings.redis
        )
        self._dial = Dialer(TlsIdentity.of(settings.tls, PeerRole.ROUTER))
        self._client_tls = TlsIdentity.of(settings.client_tls)
        self._clients = Clients(settings.limits, times)
        self._keys = ApiKeys(Path(settings.api_keys_file)) if settings.api_keys_file else None
        self._streams = DecodeStreams(times, time.monotonic, self._dial)
        self._leases = LeaseRelease(timeout_s=times.status_timeout_s, dial=self._dial)
        self._prefills = PrefillClient(times, give_back=self._leases.release, dial=self._dial)
        self._registry = Registry(
            self._redis,
            poll_interval_s=times.poll_interval_s,
            timeout_s=times.redis_timeout_s,
            on_change=self._on_registry,
        )
        self._in_flight = Attempts(
            max_requests=settings.limits.max_requests_in_flight,
            supersede_wait_s=times.supersede_wait_s,
        )
        self._admission = Admission(
            settings.admission,
            RateLimits(self._redis, settings.admission.rate_timeout_s),
            limits_of=lambda tenant: self._keys.tenants.get(tenant) if self._keys else None,
            step_tokens=self._step_tokens,
            has_decode_place=lambda model, num_ahead: self.desk.models.find(
                model
            ).candidates.has_decode_place(num_ahead),
        )
        self._encoders = [PromptEncoder(model.tokenizer, model.template) for model in models]
        self._probation = Probation(
            first_s=times.suspect_s, most_s=times.max_suspect_s, clock=time.monotonic
        )
        self._index = index.PrefixIndex(self._index_redis, times.lookup_timeout_s)
        self._lookup = PrefixLookup(
            self._index,
            lambda: self._registry.snapshot.stores,
            timeout_s=times.lookup_timeout_s,
        )
        self.metrics = RouterMetrics(
            self.router_id,
            lambda: self._in_flight.num_attempts,
            lambda: self._registry.snapshot,
            self._other_metrics,
        )
        self._log = RequestLog()
        self._history = UsageHistory(lambda: self._log.totals, self._usage_levels)
        http_metrics = HttpMetrics(self.router_id)
        self._health = HealthProbes()
        self._metrics_server = MetricsServer(
            self.metrics,
            AdmissionMetrics(self._admission, self.router_id),
            http_metrics,
            health=self._health,
        )
        self.tracing = Tracing.of(settings.tracing, "router", self.router_id)
        self._prober = Prober(
            self._probation,
            self._registry.find,
            timeout_s=times.status_timeout_s,
            on_probe=self.metrics.on_probe,
            dial=self._dial,
        )
        self._traffic = Traffic(model.name for model in models)
        self._holding = Holding(settings.hold_without_workers_s, settings.limits.max_held_requests)
        self._beat = make_beat(
            settings.redis_url,
            settings.redis,
            router_id=self.router_id,
            incarnation=entrypoint.new_incarnation().hex(),
            address=lambda: self.address,
            traffic=self._traffic,
            adapters=lambda: self._changes.to_proto(),
        )
        self._adapter_use = AdapterUse()
        self._changes = AdapterChanges(
            self._registry,
            self._redis,
            self._adapter_use,
            router_id=self.router_id,
            times=times,
            models=lambda: self.desk.models,
            beat_now=self._beat.beat_now,
            dial=self._dial,
        )
        self.desk = self._make_desk(models)
        # After the callbacks of the worker directories, which must know of the change first.
        self._streams.on_change.append(lambda worker_id: self._admission.look())
        self._http = HttpServer(
            [
                *(
                    [http_server.add_role_check]
                    if self._client_tls and self._client_tls.asks_clients
                    else []
                ),
                Cors(settings.cors_origins).add_to,
                *(
                    []
                    if self._keys or settings.allow_anonymous
                    else [partial(http_server.add_origin_check, others=settings.cors_origins)]
                ),
                http_metrics.add_to,
                OpenAiRoutes(self.desk, self._clients).add_to,
                self._live_page().add_to,
            ],
            max_body_bytes=settings.limits.max_request_bytes,
            drain_s=times.drain_s + _LAST_WORDS_S,
            max_connections=settings.limits.max_connections,
            stall_s=times.stall_s,
            idle_s=times.idle_s,
        )
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Start serving. Raises: Unavailable when the port is taken."""
        self._health.follow()
        if self._settings.metrics_listen:  # first: its probes report what is not ready yet
            self._metrics_server.start(self._settings.metrics_listen)
        # The first encoding initializes the tokenizer library; no client should wait for it.
        for encoder in self._encoders:
            encoder.tokenizer.encode("warm up")
        self.tracing.start()
        self.desk.pace.start()
        await self._registry.start()
        with contextlib.suppress(Unavailable):  # a later lookup reports it
            await self._index.prepare()
        self._prober.start()
        self._history.start()
        self._server, self.address = await grpc_server.listen(
            self._settings.listen,
            [
                InferenceServicer(self.desk, self._clients, self._changes).add_to,
                HealthServicer({SERVICE: self._is_ready}).add_to,
                ReflectionServicer((SERVICE,)).add_to,
            ],
            max_message_bytes=self._settings.limits.hard_request_bytes,
            identity=self._client_tls,
            rules=RULES[PeerRole.ROUTER],
            limits=self._clients.port_limits(SERVICE, self.desk.caller_of),
        )
        if self._settings.http_listen:
            client_tls = self._client_tls
            await self._http.start(
                self._settings.http_listen, client_tls.http_context() if client_tls else None
            )
        self._beat.start()
        self._health.set_check(self._why_not_ready)

    @property
    def metrics_address(self) -> str:
        """host:port of /metrics; empty: it is not served."""
        return self._metrics_server.address

    @property
    def http_address(self) -> str:
        """host:port of the HTTP API; empty: it is not served."""
        return self._http.address

    async def stop(self) -> None:
        """Refuse new requests, let running ones finish for `times.drain_s`, then end them with an
        error that their clients see."""
        self._health.end()
        drain_s = self._settings.times.drain_s
        async with asyncio.TaskGroup() as group:
            group.create_task(self._in_flight.drain(drain_s, _LAST_WORDS_S))
            group.create_task(self._http.stop())
            if self._server is not None:
                group.create_task(self._server.stop(drain_s + _LAST_WORDS_S))
        await self._beat.stop()
        await self.desk.pace.stop()
        await asyncio.to_thread(self._metrics_server.stop)
        await self._history.stop()
        await self._prober.stop()
        await self._registry.stop()
        await self._changes.stop()
        await self._streams.close()
        await self._prefills.close()
        await self._leases.close()
        for encoder in self._encoders:
            encoder.close()
        await self._admission.close()
        await self._redis.aclose()
        await self._index_redis.aclose()
        await asyncio.to_thread(self.tracing.stop)

    def check_integrity(self, *, is_idle: bool = False) -> None:
        """Check every invariant of this process; with `is_idle`, also that nothing is left over.

        Raises: BatonError naming the invariant that is broken.
        """
        self._in_flight.check_integrity()
        self._admission.check_integrity()
        self._streams.check_integrity()
        self._prefills.check_integrity()
        self._probation.check_integrity()
        self.desk.models.check_integrity()
        self.tracing.check_integrity()
        self._clients.check_integrity()
        self._holding.check_integrity()
        self._traffic.check_integrity(is_idle=is_idle)
        if is_idle:
            left = {
                "requests in flight": self._in_flight.num_attempts,
                "requests admitted": self._admission.num_active,
                "requests waiting": self._admission.num_waiting,
                "requests held": self._holding.num_held,
                "open decode legs": self._streams.num_open_legs,
                "prefill calls": self._prefills.num_calls,
                "stores being told": self._leases.num_under_way,
                "requests followed": self._log.num_live,
                "requests with adapters": self._adapter_use.num_requests,
                **self._clients.left,
            }
            if any(left.values()):
                raise BatonError(f"idle, but left over: {left}")

    def _other_metrics(self, labels: Labels) -> Iterator[Metric]:
        """Return the metrics that other parts of the router count."""
        counts = self.tracing.counters
        yield metrics.trace_spans(
            labels, counts.num_exported, counts.num_failed, counts.num_dropped
        )
        yield metrics.counter(
            "baton_router_traces_not_followed",
            "Requests that have no trace though their client wanted one, beyond "
            "tracing.max_followed_per_s.",
            labels,
            self.tracing.num_not_followed,
        )
        yield from self._clients.families(labels)
        yield from self._http.families(labels)

    def _live_page(self) -> LivePage:
        return LivePage(
            self.desk.cluster_status,
            self.desk.caller_of,
            explain=self.desk.explain,
            is_on_loopback=is_loopback(self._settings.http_listen),
        )

    def _step_tokens(self) -> Sequence[int]:
        """Return the tokens per step of each prefill worker, by its last heartbeat."""
        told = [w.num_step_tokens for w in self._registry.statuses() if w.role == PREFILL]
        return [tokens or DEFAULT_STEP_TOKENS for tokens in told] or [DEFAULT_STEP_TOKENS]

    def _usage_levels(self) -> tuple[int, int]:
        """Return the requests in flight here, and those that wait at workers by their last
        heartbeats."""
        num_waiting = sum(worker.num_waiting for worker in self._registry.statuses())
        return self._in_flight.num_attempts, num_waiting

    def _why_not_ready(self) -> str:
        """Return why the readiness probe fails; empty: it succeeds. Missing workers are no reason:
        a router gives clients a better error than a load balancer without routers. Neither is a
        Redis that went away later."""
        return (
            "" if self._registry.has_met_redis else "Redis was not reached yet: no worker is known"
        )

    def _is_ready(self) -> bool:
        """Return whether the gRPC health check reports SERVING."""
        try:
            self.desk.ready()
        except Unavailable:
            return False
        return True

    def _integrity_error(self) -> str:
        """Return the broken invariant, or an empty string."""
        try:
            self.check_integrity()
        except BatonError as error:
            return f"router: {error}"
        return ""

    def _on_registry(self, snapshot: Snapshot) -> None:
        """Pass a new snapshot to every part that follows the registry."""
        self._streams.reconcile(w for w in snapshot.workers if w.role == DECODE)
        self._prefills.reconcile(w for w in snapshot.workers if w.role == PREFILL)
        self._probation.reconcile({w.worker_id: w.incarnation for w in snapshot.workers})
        self._drop_hung(snapshot)
        for model in self.desk.models:
            model.candidates.note_seen()
        self.desk.note_workers()
        self._changes.note(snapshot)
        self._admission.look()

    def _drop_hung(self, snapshot: Snapshot) -> None:
        """Close the streams to workers whose engines hang, so that their requests go on
        elsewhere."""
        max_step_s = self._settings.times.max_step_s
        for worker in hung_workers(snapshot.workers, max_step_s).values():
            clients = self._streams if worker.role == DECODE else self._prefills
            why = (
                f"{worker.role} worker {worker.worker_id} hangs: its engine has been inside one "
                f"step for {worker.step_age_s:.0f} s (times.max_step_s is {max_step_s:g})"
            )
            if clients.drop(worker.worker_id, why):
                logs.event(logger, "worker_hangs", level=logging.WARNING, why=why)

    def _make_desk(self, models: Sequence[ServedCheckpoint]) -> RouterService:
        """Build the front end with one entry for each model."""
        settings = self._settings
        salts = TenantSalts(settings.tenant_secret, parse_scopes(settings.tenant_scopes))
        status = ClusterStatus(
            self._registry,
            self._lookup,
            served=[model.served for model in models],
            router_id=self.router_id,
            timeout_s=settings.times.status_timeout_s,
            max_step_s=settings.times.max_step_s,
            check_integrity=self._integrity_error,
            dial=self._dial,
        )
        return RouterService(
            models=ServedModels(
                [
                    self._make_model(model, encoder, salts)
                    for model, encoder in zip(models, self._encoders, strict=True)
                ]
            ),
            in_flight=self._in_flight,
            limits=settings.limits,
            status=status,
            metrics=self.metrics,
            admission=self._admission,
            traffic=self._traffic,
            holding=self._holding,
            adapter_use=self._adapter_use,
            keys=self._keys,
            log=self._log,
            history=self._history,
            tracing=self.tracing,
            log_prompts=settings.log_prompts,
        )

    def _make_model(
        self, model: ServedCheckpoint, encoder: PromptEncoder, salts: TenantSalts
    ) -> OneModel:
        """Return what serves one model: its own workers and placement, over the parts that all
        models share."""
        settings = self._settings
        candidates = WorkerDirectory(
            self._registry,
            self._streams,
            self._prefills,
            self._probation,
            served=model.served,
            costs=settings.costs,
            return_wait_s=settings.times.failover_wait_s,
            max_step_s=settings.times.max_step_s,
        )
        routing = Placer.of(
            candidates,
            policies.make(settings.routing_policy, settings.costs, settings.handover),
            self._probation,
            self.metrics,
            max_own_tokens=settings.short_prefill_tokens,
            num_decisions_kept=settings.limits.num_decisions_kept,
            num_prefixes_kept=settings.limits.num_prefixes_kept,
        )
        return OneModel(
            model.name,
            model.served,
            Preparer(
                candidates=candidates,
                encoder=encoder,
                defaults=model.defaults,
                limits=settings.limits,
                salts=salts,
            ),
            RoutingServices(
                routing=routing,
                streams=self._streams,
                prefills=self._prefills,
                lookup=self._lookup,
                leases=self._leases,
                times=settings.times,
                model=model.name,
                max_failovers=settings.limits.max_failovers,
            ),
        )
