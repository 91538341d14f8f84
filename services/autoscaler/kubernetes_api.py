"""KubernetesApi: the few calls of the API server that an autoscaler needs, each bounded, each error
one line. The official client underneath; it is imported when the first of these is made.

That client blocks, so every call runs in a thread. What changes something asks a fence in that
thread, in the moment before it is sent. Knows no plan and no pool. Used by one asyncio loop.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, TypeVar

from process import kubernetes_config
from process.errors import BatonError
from process.kubernetes_config import NAMESPACE_FILE
from process.settings import SettingsError
from services.autoscaler.config import KubernetesSettings

Result = TypeVar("Result")

_MAX_SAID_CHARS = 200
_MANY = 2000
"""Pods of one list; more than any release has."""


def import_client() -> Any:
    """The official client's module; the first time takes seconds. Raises: SettingsError."""
    try:
        from kubernetes import client
    except ImportError as error:
        raise SettingsError(
            "scaler=kubernetes needs the official client: install baton[kubernetes]"
        ) from error
    return client


class ApiError(BatonError):
    """The API server said no, or nothing; `status` is the HTTP status, 0: there was none."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class KubernetesApi:
    """See the module."""

    def __init__(self, settings: KubernetesSettings) -> None:
        """Raises: SettingsError where the client is not installed, or knows no API server."""
        client = import_client()
        self._timeout_s = settings.api_timeout_s
        self._rest_error = client.exceptions.ApiException
        configuration, self.namespace = _connection(settings)
        self._client = client.ApiClient(configuration)
        self._apps: Any = client.AppsV1Api(self._client)
        self._core: Any = client.CoreV1Api(self._client)
        self._leases: Any = client.CoordinationV1Api(self._client)

    async def scale(self, deployment: str) -> tuple[int, str]:
        """How many replicas a Deployment shall have, and the version of that. Raises: ApiError."""
        read = self._apps.read_namespaced_deployment_scale
        found = await self._call(
            f"reading the scale of {deployment}", lambda **k: read(deployment, self.namespace, **k)
        )
        return int(found.spec.replicas or 0), str(found.metadata.resource_version or "")

    async def set_scale(
        self, deployment: str, replicas: int, version: str, fence: Callable[[], None]
    ) -> None:
        """Ask for so many replicas, unless somebody changed the Deployment after `version` was
        read. Raises: ApiError; what `fence` raises."""
        patch = self._apps.patch_namespaced_deployment_scale
        body = {"metadata": {"resourceVersion": version}, "spec": {"replicas": replicas}}
        await self._call(
            f"scaling {deployment} to {replicas}",
            lambda **k: patch(deployment, self.namespace, body, **k),
            fence,
        )

    async def pods(self, selector: str) -> list[Any]:
        """The pods that carry these labels. Raises: ApiError."""
        read = self._core.list_namespaced_pod
        found = await self._call(
            "listing pods",
            lambda **k: read(self.namespace, label_selector=selector, limit=_MANY, **k),
        )
        if found.metadata is not None and getattr(found.metadata, "_continue", None):
            raise ApiError(f"listing pods: {selector} selects more than {_MANY}")
        return list(found.items)

    async def annotate_pod(self, pod: str, key: str, value: str, fence: Callable[[], None]) -> None:
        """Set one annotation of a pod. Raises: ApiError; what `fence` raises."""
        patch = self._core.patch_namespaced_pod
        body = {"metadata": {"annotations": {key: value}}}
        await self._call(
            f"annotating pod {pod}", lambda **k: patch(pod, self.namespace, body, **k), fence
        )

    async def create_event(self, body: dict[str, Any], fence: Callable[[], None]) -> None:
        """Raises: ApiError; what `fence` raises."""
        create = self._core.create_namespaced_event
        await self._call("creating an event", lambda **k: create(self.namespace, body, **k), fence)

    async def lease(self, name: str) -> Any | None:
        """The Lease of that name; None: there is none. Raises: ApiError."""
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
        """Raises: ApiError, with status 409 when somebody was first."""
        create = self._leases.create_namespaced_lease
        await self._call("creating the lease", lambda **k: create(self.namespace, body, **k))

    async def replace_lease(self, name: str, body: dict[str, Any]) -> None:
        """Of the version in `body`. Raises: ApiError, with status 409 when it is another by now."""
        replace = self._leases.replace_namespaced_lease
        await self._call(
            f"writing lease {name}", lambda **k: replace(name, self.namespace, body, **k)
        )

    async def close(self) -> None:
        """Give the connections back."""
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
        except Exception as error:  # urllib3's many, and our own timeout
            problem = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ApiError(f"{what}: no answer of the API server: {problem[:200]}") from error


def _reason(error: Any) -> str:
    """Status and, where the server gave one, its own sentence."""
    try:
        said = json.loads(error.body or "{}").get("message", "")
    except (ValueError, AttributeError):
        said = str(error.body)
    first = " ".join(str(said).split())[:_MAX_SAID_CHARS]
    return f"{error.status} {error.reason}" + (f": {first}" if first else "")


def _connection(settings: KubernetesSettings) -> tuple[Any, str]:
    """The client's configuration, and the namespace. Raises: SettingsError."""
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
    found.retries = False  # the caller tries again, with what is true by then
    try:
        return found, settings.namespace or NAMESPACE_FILE.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise SettingsError(
            "kubernetes.namespace: needed with kubernetes.api_url outside of a pod"
        ) from error
