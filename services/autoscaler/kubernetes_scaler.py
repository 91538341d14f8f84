"""KubernetesScaler: the pods of two Deployments, by their `/scale`.

    wanted   the Deployments' replicas, flipped pods counted where they are
    ready    pods whose readiness probe holds
    leaving  pods that are being deleted, and still there

Kubernetes chooses which pod a smaller Deployment loses; so those that shall go are given the lowest
deletion cost first, and those that have one from a removal that failed lose it. Whatever is written
is of the version that was read: somebody else's change in between makes this one fail instead of
undoing it. One asyncio loop.
"""

from __future__ import annotations

import datetime
import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from process import logs
from process.errors import BatonError
from services.autoscaler import scaler
from services.autoscaler.config import KubernetesSettings
from services.autoscaler.decision import Decision
from services.autoscaler.kubernetes_api import ApiError, KubernetesApi
from services.autoscaler.scaler import Fence, PoolScale, ScalerError, Unit, UnitState
from services.autoscaler.signals import ByRole, Role

logger = logging.getLogger(__name__)

COMPONENT = "app.kubernetes.io/component"
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
_LEAVE_FIRST = -1000
"""Below every pod's own cost, which is 0; the first to leave has the lowest."""
_MAX_NOTE_CHARS = 1000
"""Of an event; Kubernetes takes 1,024."""


class KubernetesScaler:
    """See the module."""

    def __init__(
        self, api: KubernetesApi, settings: KubernetesSettings, autoscaler_id: str
    ) -> None:
        """`api` is closed with this one. autoscaler_id: whom events name."""
        self._api = api
        self._settings = settings
        self._id = autoscaler_id
        self._deployments = {
            Role.PREFILL: settings.prefill_deployment,
            Role.DECODE: settings.decode_deployment,
        }

    async def get(self, roles: Mapping[str, Role]) -> ByRole[PoolScale]:
        """See Scaler."""
        try:
            scales = {role: await self._api.scale(name) for role, name in self._deployments.items()}
            units = _units(await self._pods())
        except ApiError as error:
            raise ScalerError(str(error)) from error
        return scaler.count(units, {role: scale[0] for role, scale in scales.items()}, roles)

    async def set(
        self,
        role: Role,
        wanted: int,
        *,
        roles: Mapping[str, Role],
        leave_first: Sequence[str],
        fence: Fence,
    ) -> None:
        """See Scaler."""
        try:
            scales = {home: await self._api.scale(name) for home, name in self._deployments.items()}
            pods = await self._pods()
            units = _units(pods)
            marked = {pod.metadata.name for pod in pods if _is_marked(pod)}
            asked = {home: scale[0] for home, scale in scales.items()}
            change = wanted - scaler.count(units, asked, roles).of(role).wanted
            homes: Mapping[Role, int] = {role: -change}
            if change < 0:
                gone = scaler.removal(
                    role, -change, units=units, asked=asked, roles=roles, leave_first=leave_first
                )
                homes = gone.homes
                # Of a removal that failed: they would leave with those that are chosen now.
                for worker_id in sorted(marked - set(gone.worker_ids)):
                    await self._api.annotate_pod(worker_id, DELETION_COST, "0", fence)
                for index, worker_id in enumerate(gone.worker_ids):
                    cost = str(_LEAVE_FIRST - len(gone.worker_ids) + index)
                    await self._api.annotate_pod(worker_id, DELETION_COST, cost, fence)
            for home, num_fewer in homes.items():
                if num_fewer:
                    replicas, version = scales[home]
                    await self._api.set_scale(
                        self._deployments[home], max(0, replicas - num_fewer), version, fence
                    )
        except ApiError as error:
            raise ScalerError(str(error)) from error

    async def announce(self, decision: Decision, outcome: str, problem: str, fence: Fence) -> None:
        """An event on each Deployment that the decision is about."""
        for role, deployment in self._deployments.items():
            if decision.change(role) or problem:
                body = self._event(deployment, decision, problem)
                try:
                    await self._api.create_event(body, fence)
                except BatonError as error:  # the log and the metrics have it
                    logs.event(logger, "event_lost", level=logging.WARNING, why=str(error))

    async def close(self) -> None:
        """See Scaler."""
        await self._api.close()

    async def _pods(self) -> Sequence[Any]:
        return await self._api.pods(
            f"{self._settings.pod_selector},{COMPONENT} in (prefill, decode)"
        )

    def _event(self, deployment: str, decision: Decision, problem: str) -> dict[str, Any]:
        now = _timestamp()
        said = f"{decision.line()}; failed: {problem}" if problem else decision.line()
        return {
            "metadata": {
                "name": f"{deployment}.{secrets.token_hex(8)}",
                "namespace": self._api.namespace,
            },
            "involvedObject": {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "name": deployment,
                "namespace": self._api.namespace,
            },
            "type": "Warning" if problem else "Normal",
            "reason": "ScalingFailed" if problem else f"Scaling{decision.direction.title()}",
            "message": said[:_MAX_NOTE_CHARS],
            "source": {"component": "baton-autoscaler", "host": self._id},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }


def _units(pods: Sequence[Any]) -> list[Unit]:
    return [unit for pod in pods if (unit := _unit(pod)) is not None]


def _is_marked(pod: Any) -> bool:
    """Whether it was told to leave first, and is still there."""
    try:
        cost = int((pod.metadata.annotations or {}).get(DELETION_COST, 0))
    except ValueError:  # somebody else's
        return False
    return cost < _LEAVE_FIRST and pod.metadata.deletion_timestamp is None


def _unit(pod: Any) -> Unit | None:
    """None: the pod is over (evicted, for instance), and its Deployment has another for it."""
    try:
        home = Role((pod.metadata.labels or {})[COMPONENT])
    except (KeyError, ValueError):
        return None
    status = pod.status
    if status is not None and status.phase in ("Failed", "Succeeded"):
        return None
    state = UnitState.STARTING
    if pod.metadata.deletion_timestamp is not None:
        state = UnitState.LEAVING
    elif status is not None and any(
        condition.type == "Ready" and condition.status == "True"
        for condition in status.conditions or ()
    ):
        state = UnitState.READY
    return Unit(pod.metadata.name, home, state)


def _timestamp() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
