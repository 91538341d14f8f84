"""KubernetesScaler: the Scaler of a cluster. It scales two Deployments of workers by their `/scale`
subresource.

    wanted   the Deployments' replicas; a flipped pod counts for its present role
    ready    pods whose readiness probe holds
    leaving  pods that are being deleted and still exist

Kubernetes chooses which pod a shrinking Deployment loses. So the pods to remove first get the
lowest deletion cost, and a pod that still has one from a failed removal loses it. Each change of a
scale names the version that was read: a change by another party in between makes the write fail
instead of being undone.

KubernetesApi: the few calls to the API server that scaling and leader election need. Each call has
a timeout, and each error is one line. The official client is imported when the first KubernetesApi
is made. It blocks, so every call runs in a thread; a scaling call checks its fence in that thread
right before it is sent. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from process import kubernetes_config, logs
from process.kubernetes_config import NAMESPACE_FILE
from process.rpc_errors import BatonError
from process.settings import SettingsError
from services.autoscaler import scaler
from services.autoscaler.config import KubernetesSettings
from services.autoscaler.decision import Decision
from services.autoscaler.scaler import Fence, PoolScale, ScalerError, Unit, UnitState
from services.autoscaler.signals import ByRole, Role

# ---- the API server

Result = TypeVar("Result")

_MAX_SAID_CHARS = 200
_MANY = 2000
"""Limit of one list of pods; more than any release has."""


def import_client() -> Any:
    """Return the module of the official client; the first import takes seconds.

    Raises: SettingsError when the client is not installed.
    """
    try:
        from kubernetes import client
    except ImportError as error:
        raise SettingsError(
            "scaler=kubernetes needs the official client: install baton[kubernetes]"
        ) from error
    return client


class ApiError(BatonError):
    """The API server refused a call or did not answer. `status`: the HTTP status; 0: no answer."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class KubernetesApi:
    """Client of the Kubernetes API server for one namespace."""

    def __init__(self, settings: KubernetesSettings) -> None:
        """
        Raises: SettingsError when the official client is not installed, or when no API server or no
            namespace is known.
        """
        client = import_client()
        self._timeout_s = settings.api_timeout_s
        self._rest_error = client.exceptions.ApiException
        configuration, self.namespace = _connection(settings)
        self._client = client.ApiClient(configuration)
        self._apps: Any = client.AppsV1Api(self._client)
        self._core: Any = client.CoreV1Api(self._client)
        self._leases: Any = client.CoordinationV1Api(self._client)

    async def scale(self, deployment: str) -> tuple[int, str]:
        """Return a Deployment's wanted replicas and the resource version that was read.

        Raises: ApiError.
        """
        read = self._apps.read_namespaced_deployment_scale
        found = await self._call(
            f"reading the scale of {deployment}", lambda **k: read(deployment, self.namespace, **k)
        )
        return int(found.spec.replicas or 0), str(found.metadata.resource_version or "")

    async def set_scale(
        self, deployment: str, replicas: int, version: str, fence: Callable[[], None]
    ) -> None:
        """Set a Deployment's wanted replicas, if its resource version is still `version`.

        Raises: ApiError, with status 409 after another change; what `fence` raises.
        """
        patch = self._apps.patch_namespaced_deployment_scale
        body = {"metadata": {"resourceVersion": version}, "spec": {"replicas": replicas}}
        await self._call(
            f"scaling {deployment} to {replicas}",
            lambda **k: patch(deployment, self.namespace, body, **k),
            fence,
        )

    async def pods(self, selector: str) -> list[Any]:
        """Return the pods that the label selector selects.

        Raises: ApiError, also when it selects more than 2,000.
        """
        read = self._core.list_namespaced_pod
        found = await self._call(
            "listing pods",
            lambda **k: read(self.namespace, label_selector=selector, limit=_MANY, **k),
        )
        if found.metadata is not None and getattr(found.metadata, "_continue", None):
            raise ApiError(f"listing pods: {selector} selects more than {_MANY}")
        return list(found.items)

    async def annotate_pod(self, pod: str, key: str, value: str, fence: Callable[[], None]) -> None:
        """Set one annotation of a pod.

        Raises: ApiError; what `fence` raises.
        """
        patch = self._core.patch_namespaced_pod
        body = {"metadata": {"annotations": {key: value}}}
        await self._call(
            f"annotating pod {pod}", lambda **k: patch(pod, self.namespace, body, **k), fence
        )

    async def create_event(self, body: dict[str, Any], fence: Callable[[], None]) -> None:
        """Create an Event.

        Raises: ApiError; what `fence` raises.
        """
        create = self._core.create_namespaced_event
        await self._call("creating an event", lambda **k: create(self.namespace, body, **k), fence)

    async def lease(self, name: str) -> Any | None:
        """Return the Lease of that name; None: there is none.

        Raises: ApiError.
        """
        read = self._leases.read_namespaced_lease
        try:
            return await self._call(
                f"reading lease {name}", lambda **k: read(name, self.namespace, **k)
            )
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def create_lease(self, body: dict[str, Any]) -> None:
        """Create a Lease.

        Raises: ApiError, with status 409 when it exists already.
        """
        create = self._leases.create_namespaced_lease
        await self._call("creating the lease", lambda **k: create(self.namespace, body, **k))

    async def replace_lease(self, name: str, body: dict[str, Any]) -> None:
        """Replace a Lease, if its resource version is still the one in `body`.

        Raises: ApiError, with status 409 when the version has changed.
        """
        replace = self._leases.replace_namespaced_lease
        await self._call(
            f"writing lease {name}", lambda **k: replace(name, self.namespace, body, **k)
        )

    async def close(self) -> None:
        """Close the connections."""
        await asyncio.to_thread(self._client.close)

    async def _call(
        self,
        what: str,
        call: Callable[..., Result],
        fence: Callable[[], None] | None = None,
    ) -> Result:
        def ask() -> Result:
            if fence is not None:
                fence()
            return call(_request_timeout=(self._timeout_s, self._timeout_s))

        try:
            async with asyncio.timeout(2 * self._timeout_s):
                return await asyncio.to_thread(ask)
        except self._rest_error as error:
            reason = _reason(error)
            raise ApiError(
                f"{what}: the API server says {reason}", int(error.status or 0)
            ) from error
        except BatonError:
            raise
        except Exception as error:  # urllib3's many kinds, and the timeout above
            problem = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ApiError(f"{what}: no answer of the API server: {problem[:200]}") from error


def _reason(error: Any) -> str:
    """Return the HTTP status, its reason and, if there is one, the server's message; one line."""
    try:
        said = json.loads(error.body or "{}").get("message", "")
    except (ValueError, AttributeError):
        said = str(error.body)
    first = " ".join(str(said).split())[:_MAX_SAID_CHARS]
    return f"{error.status} {error.reason}" + (f": {first}" if first else "")


def _connection(settings: KubernetesSettings) -> tuple[Any, str]:
    """Return the client's configuration and the namespace.

    Raises: SettingsError when no API server or no namespace is known.
    """
    if not settings.api_url:
        try:
            found, namespace = kubernetes_config.load()
        except SettingsError as error:
            raise SettingsError(f"scaler=kubernetes: {error}") from error
        namespace = settings.namespace or namespace
        if not namespace:
            raise SettingsError("kubernetes.namespace: needed; this pod does not say its own")
        return found, namespace
    from kubernetes import client

    found = client.Configuration()
    found.host = settings.api_url
    found.retries = False  # the caller tries again, with the then current state
    try:
        return found, settings.namespace or NAMESPACE_FILE.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise SettingsError(
            "kubernetes.namespace: needed with kubernetes.api_url outside of a pod"
        ) from error


# ---- the scaler

logger = logging.getLogger(__name__)

COMPONENT = "app.kubernetes.io/component"
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
_LEAVE_FIRST = -1000
"""Upper bound of the deletion costs that are set here; far below the default cost, 0. The pod to
remove first gets the lowest."""
_MAX_NOTE_CHARS = 1000
"""Longest message of an Event; Kubernetes allows 1,024."""


class KubernetesScaler:
    """Scaler of the two Deployments of a release in Kubernetes."""

    def __init__(
        self, api: KubernetesApi, settings: KubernetesSettings, autoscaler_id: str
    ) -> None:
        """
        Args:
            api: closed by `close`.
            autoscaler_id: reporting host of the Events.
        """
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
                # Pods marked by a failed removal would leave instead of those chosen now.
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
        """Create an Event at each Deployment that the decision changes or, after a failure, at
        both. An Event that cannot be created is logged."""
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
    """Return whether the pod has a deletion cost set here, and is not being deleted."""
    try:
        cost = int((pod.metadata.annotations or {}).get(DELETION_COST, 0))
    except ValueError:  # set by another party
        return False
    return cost < _LEAVE_FIRST and pod.metadata.deletion_timestamp is None


def _unit(pod: Any) -> Unit | None:
    """Return the worker of a pod; None: it is no worker's pod, or it has ended (evicted, for
    instance) and its Deployment has replaced it."""
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
