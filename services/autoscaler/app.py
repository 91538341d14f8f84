"""Autoscaler: the autoscaler service. At every interval it observes the pools, plans their sizes,
acts, and records the decision.

    registry + scaler -> Observer -> plan (pure) -> Actuator -> DecisionLog

Every replica observes and plans, so that every replica can answer for its decisions. Only the
leader acts. The leader also publishes the wanted numbers of workers as one line of JSON
(`published_text`), which the other replicas read. When the leadership changes, a replica drops its
plan state, so all windows of the plan begin anew. One asyncio loop.

With act=false another system (KEDA, an HPA) changes the pools, with its own delay. The plan is then
told that the pools already have the size that was advised last (`as_advised`). Otherwise a pool
that does not have this size yet would look like a change by another party, and the advice would
oscillate. With act=false no workers are flipped.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import grpc.aio
from prometheus_client.metrics_core import Metric

from process import grpc_server, logs
from process.authorization import RULES, PeerRole
from process.background_tasks import end_tasks, start_task
from process.grpc_server import HealthServicer, ReflectionServicer
from process.metrics import HealthProbes, LoopCollector, MetricsServer
from process.registry import connect_redis
from process.rpc import Dialer
from process.rpc_errors import BatonError, Unavailable
from process.tls import TlsIdentity
from protos import autoscaler_pb2, common_pb2
from services.autoscaler import metrics, observer
from services.autoscaler.actuator import Actuator, RoleFlips
from services.autoscaler.config import AutoscalerSettings
from services.autoscaler.decision import Decision, DecisionLog, DecisionRecord
from services.autoscaler.grpc_services import (
    MAX_REQUEST_BYTES,
    SERVICE,
    AutoscalerServicer,
    ExternalScaler,
    callers,
    max_reply_bytes,
)
from services.autoscaler.kubernetes_scaler import KubernetesApi, KubernetesScaler
from services.autoscaler.leader import Alone, Leadership, LeaseLeader
from services.autoscaler.local_scaler import LocalScaler
from services.autoscaler.observer import ObservationInputs, Observer, RegistryLook
from services.autoscaler.plan import PlanState, plan
from services.autoscaler.scaler import PoolScale, Scaler, ScalerError
from services.autoscaler.signals import ByRole, Observations, Role

# ---- what a leader wants, as text for followers

_MAX_WORKERS = 1_000_000
_MAX_CHARS = 200


def published_text(wanted: ByRole[int]) -> str:
    """Return the wanted numbers of workers as one line of JSON, by role name."""
    return json.dumps({role.value: wanted.of(role) for role in Role})


def wanted_from_text(text: str) -> ByRole[int] | None:
    """Return the wanted numbers of workers from a leader's `published_text`; None if the text is
    empty or is not one."""
    if len(text) > _MAX_CHARS:
        return None
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict):
        return None
    nums = [said.get(role.value) for role in (Role.PREFILL, Role.DECODE)]
    prefill, decode = (
        num if type(num) is int and 0 <= num <= _MAX_WORKERS else None for num in nums
    )
    return None if prefill is None or decode is None else ByRole(prefill, decode)


# ---- decisions that another system carries out


def as_advised(seen: Observations, last: Decision | None) -> Observations:
    """Return `seen` with the pool sizes that `last` wanted, and with no worker that can flip.

    Args:
        last: the last advice; None: there was none, so the observed sizes stay.
    """
    pools = seen.pools.map(
        lambda role, pool: replace(
            pool,
            wanted=pool.wanted if last is None else last.wanted.of(role),
            workers=tuple(replace(worker, can_flip=False) for worker in pool.workers),
        )
    )
    return replace(seen, pools=pools)


# ---- the autoscaler

logger = logging.getLogger(__name__)


class Autoscaler:
    """One replica of the autoscaler service: its loop, its gRPC services and its metrics."""

    def __init__(
        self,
        settings: AutoscalerSettings,
        scaler: Scaler | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            scaler: used instead of the scaler that the settings name; closed by `stop`.
            clock: monotonic, in seconds; for observations, decisions and leadership.

        Raises: SettingsError when the scaler that the settings name cannot be made.
        """
        self.autoscaler_id = settings.autoscaler_id or f"autoscaler-{secrets.token_hex(4)}"
        self.address = ""
        """host:port of the gRPC services; empty before `start`."""
        self._settings = settings
        self._clock = clock
        self._identity = TlsIdentity.of(settings.tls, PeerRole.AUTOSCALER)
        self._redis = connect_redis(settings.redis_url, settings.look_timeout_s, settings.redis)
        self._leadership: Leadership = Alone()
        self._scaler = scaler or self._make_scaler()
        self._flips = RoleFlips(
            Dialer(self._identity),
            timeout_s=settings.flip_timeout_s,
            on_end=self._on_flip_end,
            clock=clock,
        )
        self._acting = Actuator(
            self._scaler,
            self._flips,
            self._leadership,
            act=settings.act,
            timeout_s=settings.act_timeout_s,
        )
        self._observing = Observer(settings.model, self._can_flip)
        self._state = PlanState()
        self.records = DecisionLog(settings.num_decisions_kept)
        self._led: Decision | None = None
        """The last decision, if this autoscaler was the leader when it was made; None after a
        change of the leadership."""
        self._observations: Observations | None = None
        self._problems: tuple[str, ...] = ()
        self._keda = ExternalScaler(self._wanted)
        self._health = HealthProbes()
        self._metrics_server: MetricsServer | None = None
        self._server: grpc.aio.Server | None = None
        self._task: asyncio.Task[None] | None = None

    def _make_scaler(self) -> Scaler:
        settings = self._settings
        if settings.scaler == "local":
            return LocalScaler(settings.local_address, settings.act_timeout_s)
        api, kubernetes = KubernetesApi(settings.kubernetes), settings.kubernetes
        if not settings.act:
            # A separate Lease: an advising replica must never keep an acting one from leading.
            kubernetes = replace(kubernetes, lease_name=f"{kubernetes.lease_name}-advice")
        self._leadership = LeaseLeader(
            api,
            kubernetes,
            self.autoscaler_id,
            clock=self._clock,
            on_change=self._on_leadership,
            publish=self._to_publish,
        )
        return KubernetesScaler(api, settings.kubernetes, self.autoscaler_id)

    async def start(self) -> None:
        """Start the servers, the leader election and the autoscaling loop.

        Raises: Unavailable when a port is taken.
        """
        self._health.follow()
        collector = LoopCollector(
            asyncio.get_running_loop(), self._read_metrics, lambda: metrics.silent(self._labels)
        )
        self._metrics_server = MetricsServer(collector, health=self._health)
        if self._settings.metrics_listen:
            self._metrics_server.start(self._settings.metrics_listen)
        self._server, self.address = await grpc_server.listen(
            self._settings.listen,
            [
                AutoscalerServicer(self._answer).add_to,
                self._keda.add_to,
                HealthServicer({SERVICE: lambda: not self._why_not_ready()}).add_to,
                ReflectionServicer((SERVICE, "externalscaler.ExternalScaler")).add_to,
            ],
            max_message_bytes=MAX_REQUEST_BYTES,
            max_reply_bytes=max_reply_bytes(self._settings.num_decisions_kept),
            identity=self._identity,
            rules=RULES[PeerRole.AUTOSCALER],
            limits=callers(),
        )
        self._leadership.start()
        self._task = start_task(self._run(), "autoscaling")
        self._health.set_check(self._why_not_ready)

    async def stop(self) -> None:
        """Stop the loop, release the leadership, and close all connections. Workers that were told
        to flip continue."""
        self._health.end()
        await end_tasks([self._task])
        await self._flips.stop()
        await self._leadership.stop()
        if self._server is not None:
            await self._server.stop(1.0)
        if self._metrics_server is not None:
            await asyncio.to_thread(self._metrics_server.stop)
        await self._scaler.close()
        await self._redis.aclose()

    @property
    def metrics_address(self) -> str:
        """host:port of /metrics; empty: there is no metrics server."""
        return self._metrics_server.address if self._metrics_server is not None else ""

    def check_integrity(self) -> None:
        """Check the autoscaler's invariants.

        Raises: Internal naming the broken invariant.
        """
        self._flips.check_integrity()

    async def decide(self) -> DecisionRecord:
        """Run one interval: observe, plan, act and record. Return the record."""
        now_s = self._clock()
        registry, problems = await self._look()
        self._observing.take(registry, now_s)
        flipping = self._flips.under_way
        roles = self._observing.roles(flipping)
        scale = await self._scale(roles, problems)
        observations = self._observing.observe(ObservationInputs(now_s, registry, scale, flipping))
        leads = self._leads
        if not self._settings.act:
            observations = as_advised(observations, self._advised())
        settings = self._settings.plan
        decision, self._state = plan(
            observations,
            settings.targets,
            settings.limits,
            self._state,
            pace=settings.pace,
            priors=settings.priors,
        )
        outcome, problem = await self._acting.act(
            decision,
            roles=roles,
            leave_first=self._observing.leave_first(),
            workers=self._workers(),
        )
        record = DecisionRecord(time.time_ns() // 1_000_000, decision, outcome, problem)
        self._led = decision if leads and self._leads else None
        self._note(record, observations, [*problems, *self._observing.problems])
        return record

    def _note(
        self, record: DecisionRecord, observations: Observations, problems: Sequence[str]
    ) -> None:
        last, decision = self.records.last, record.decision
        is_news = last is None or (last.decision.direction, last.decision.reason) != (
            decision.direction,
            decision.reason,
        )
        if is_news or decision.is_action:
            logs.event(
                logger,
                "decision",
                level=logging.WARNING if record.problem else logging.INFO,
                summary=decision.line(),
                outcome=record.outcome.value,
                problem=record.problem,
                why=decision.to_json(),
            )
        for problem in set(problems) - set(self._problems):
            logs.event(logger, "problem", level=logging.WARNING, why=problem)
        self._problems = tuple(dict.fromkeys(problems))
        self._observations = observations
        self.records.add(record)
        self._keda.changed()

    async def _run(self) -> None:
        while True:
            began_s = time.monotonic()
            try:
                await self.decide()
                self.check_integrity()
            except Exception:  # the last line of defence: nothing restarts this loop
                logger.exception("decision_failed")
            took_s = time.monotonic() - began_s
            await asyncio.sleep(max(0.0, self._settings.interval_s - took_s))

    async def _look(self) -> tuple[RegistryLook | None, list[str]]:
        try:
            return await observer.look_at_registry(self._redis, self._settings.look_timeout_s), []
        except Unavailable as error:
            return None, [str(error)]

    async def _scale(self, roles: dict[str, Role], problems: list[str]) -> ByRole[PoolScale] | None:
        try:
            async with asyncio.timeout(self._settings.act_timeout_s):
                return await self._scaler.get(roles)
        except ScalerError as error:
            problems.append(str(error))
        except TimeoutError:
            problems.append(f"workers were not counted in {self._settings.act_timeout_s:g} s")
        return None

    def _workers(self) -> dict[str, common_pb2.WorkerStatus]:
        return {each.entry_id: each.status for each in self._observing.registry.workers}

    def _can_flip(self, worker: common_pb2.WorkerStatus) -> bool:
        limits = self._settings.plan.limits
        is_alike = limits.prefill.num_devices == limits.decode.num_devices
        return self._settings.allow_flips and is_alike and self._flips.may_ask(worker)

    def _on_flip_end(self, worker_id: str, to: Role, problem: str) -> None:
        self.records.outcomes["failed" if problem else "done"] += 1

    def _on_leadership(self, is_leader: bool) -> None:
        self._state = PlanState()
        self._led = None
        self._keda.changed()

    @property
    def _leads(self) -> bool:
        return self._leadership.left_s > 0

    @property
    def _acts(self) -> bool:
        return self._settings.act and self._leads

    def _advised(self) -> Decision | None:
        """Return the last advice: the last decision, on a follower with the leader's numbers."""
        last = self.records.last
        if last is None:
            return None
        heard = wanted_from_text(self._leadership.heard)
        return last.decision if heard is None else replace(last.decision, wanted=heard)

    def _led_wanted(self) -> ByRole[int] | None:
        """Return the wanted numbers of this autoscaler while it leads; else None."""
        return self._led.wanted if self._led is not None and self._leads else None

    def _to_publish(self) -> str:
        # No check of the leadership: the text is read only if the write of the Lease succeeds.
        return "" if self._led is None else published_text(self._led.wanted)

    def _wanted(self) -> ByRole[int]:
        own, heard = self._led_wanted(), wanted_from_text(self._leadership.heard)
        if own is not None:
            return own
        if heard is not None:
            return heard
        why = self._leadership.problem or (
            "this one has come to lead, and has not decided yet"
            if self._leads
            else "this one does not lead, and no other has said what is wanted"
        )
        raise Unavailable(f"wanted workers are not known: {why}", retry_after_s=1.0)

    def _why_not_ready(self) -> str:
        return "" if self.records.last is not None else "nothing was decided yet"

    @property
    def _labels(self) -> dict[str, str]:
        return {"autoscaler_id": self.autoscaler_id}

    def _all_problems(self) -> list[str]:
        found = [*self._problems, *filter(None, [self._leadership.problem])]
        try:
            self.check_integrity()
        except BatonError as error:
            found.append(str(error))
        return found

    def _read_metrics(self) -> Sequence[Metric]:
        return metrics.read(
            self._labels,
            self.records,
            self._observations,
            wanted=(self._led_wanted() if self._leadership.led_s >= metrics.SILENCE_S else None),
            is_leader=self._leads,
            num_problems=len(self._all_problems()),
        )

    def _answer(
        self, request: autoscaler_pb2.GetDecisionsRequest
    ) -> autoscaler_pb2.GetDecisionsReply:
        kept = self.records.newest(request.num_decisions, only_actions=request.only_actions)
        reply = autoscaler_pb2.GetDecisionsReply(
            autoscaler_id=self.autoscaler_id,
            is_leader=self._acts,
            decisions=[record.to_proto() for record in kept],
            problems=self._all_problems(),
        )
        if self._observations is not None:
            for role in Role:
                pool = self._observations.pools.of(role)
                reply.pools.add(
                    role=role.value,
                    num_wanted=pool.wanted,
                    num_ready=pool.num_ready,
                    num_draining=pool.num_draining,
                )
        return reply
