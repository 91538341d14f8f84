"""A Kubernetes API over real HTTP: kmock's emulator, and what an autoscaler relies on that it
lacks: versions that conflict, label selectors, the /scale of Deployments, and a controller that
makes and ends the pods, lowest deletion cost first, when a test tells it to.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp.web
import attrs
import kmock
from kmock import KubernetesError

from services.autoscaler.config import KubernetesSettings
from services.autoscaler.kubernetes_scaler import COMPONENT, DELETION_COST

NAMESPACE = "here"
_DEPLOYMENT = kmock.resource("apps/v1/deployments")
_POD = kmock.resource("v1/pods")
DEPLOYMENTS = {"prefill": "baton-prefill", "decode": "baton-decode"}


@attrs.define(kw_only=True)
class ApiServer(kmock.KubernetesEmulator):
    """See the module."""

    version: int = 100
    num_pods_made: int = 0
    down: str = ""
    """Said, with status 500, to every request while it is set."""
    refused: tuple[str, ...] = ()
    """Plurals (with subresource) that the user may not touch; "POST leases": not by that method."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        for plural in ("v1/pods", "v1/events", "apps/v1/deployments"):
            self.resources[plural] = {}
        self.resources["coordination.k8s.io/v1/leases"] = {}

    async def _handle(self, request: Any) -> aiohttp.web.StreamResponse:
        try:
            if self.down:
                raise KubernetesError(status=500, reason="InternalError", message=self.down)
            return await self._serve(request)
        except KubernetesError as error:
            return await self._render_error(error)

    async def _serve(self, request: Any) -> aiohttp.web.StreamResponse:
        plural = request.resource.plural if request.resource else ""
        what = f"{plural}/{request.subresource}" if request.subresource else plural
        if what in self.refused or f"{request._raw_request.method} {what}" in self.refused:
            raise KubernetesError(status=403, reason="Forbidden", message=f"{what} is forbidden")
        if what == "deployments/scale":
            return self._scale(request)
        if what == "pods" and request.action == kmock.action.LIST:
            return self._list_pods(request)
        if request._raw_request.method == "PUT":
            return self._replace(request)
        if request.action in (kmock.action.CREATE, kmock.action.UPDATE):
            self._next_version(request)
        return await super()._handle(request)

    def _replace(self, request: Any) -> aiohttp.web.StreamResponse:
        key = (request.resource, request.namespace, request.name)
        if key not in self.objects:
            raise KubernetesError(status=404, reason="NotFound", message=f"no {request.name}")
        metadata = request.data["metadata"]
        _check_version(metadata.get("resourceVersion"), self.objects[key].raw)
        self.version += 1
        metadata["resourceVersion"] = str(self.version)
        del self.objects[key]
        self.objects[key] = request.data
        return aiohttp.web.json_response(request.data)

    def _next_version(self, request: Any) -> None:
        """What is written gets a version of its own; of one that was read, only the newest."""
        metadata = request.data.setdefault("metadata", {})
        asked = metadata.get("resourceVersion")
        if request.action == kmock.action.UPDATE:
            key = (request.resource, request.namespace, request.name)
            there = self.objects[key].raw if key in self.objects else None
            _check_version(asked, there)
        self.version += 1
        metadata["resourceVersion"] = str(self.version)

    def _scale(self, request: Any) -> aiohttp.web.StreamResponse:
        key = (_DEPLOYMENT, request.namespace, request.name)
        if key not in self.objects:
            raise KubernetesError(status=404, reason="NotFound", message=f"no {request.name}")
        there = self.objects[key].raw
        if request.data is not None:
            _check_version(request.data.get("metadata", {}).get("resourceVersion"), there)
            self.version += 1
            self.objects[key].patch(
                {
                    "metadata": {"resourceVersion": str(self.version)},
                    "spec": {"replicas": request.data["spec"].get("replicas", 0)},
                }
            )
            there = self.objects[key].raw
        replicas = there["spec"]["replicas"]
        return aiohttp.web.json_response(
            {
                "kind": "Scale",
                "apiVersion": "autoscaling/v1",
                "metadata": there["metadata"],
                # As the real one: 0 is left out.
                "spec": {"replicas": replicas} if replicas else {},
                "status": {"replicas": len(self.pods(request.name))},
            }
        )

    def _list_pods(self, request: Any) -> aiohttp.web.StreamResponse:
        selector = request.params.get("labelSelector", "")
        items = [pod for pod in self.pods() if _selects(selector, pod["metadata"]["labels"])]
        return aiohttp.web.json_response(
            {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items}
        )

    # What a test does and sees

    def add_deployment(self, component: str, replicas: int) -> None:
        """A Deployment with its pods, serving."""
        name = DEPLOYMENTS[component]
        self.objects[_DEPLOYMENT, NAMESPACE, name] = {
            "metadata": {"name": name, "namespace": NAMESPACE, "resourceVersion": "1"},
            "spec": {"replicas": replicas},
        }
        self.reconcile()

    def replicas(self, component: str) -> int:
        key = (_DEPLOYMENT, NAMESPACE, DEPLOYMENTS[component])
        return int(self.objects[key].raw["spec"]["replicas"])

    def pods(self, deployment: str = "") -> list[dict[str, Any]]:
        found = []
        for resource, namespace, name in list(self.objects.keys()):
            if resource.plural == "pods" and namespace == NAMESPACE:
                pod = self.objects[resource, namespace, name].raw
                if (
                    not deployment
                    or DEPLOYMENTS[pod["metadata"]["labels"][COMPONENT]] == deployment
                ):
                    found.append(pod)
        return found

    def set_ready(self, pod: str, is_ready: bool) -> None:
        condition = {"type": "Ready", "status": "True" if is_ready else "False"}
        self.objects[_POD, NAMESPACE, pod].patch({"status": {"conditions": [condition]}})

    def set_leaving(self, pod: str) -> None:
        self.objects[_POD, NAMESPACE, pod].patch(
            {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}
        )

    def reconcile(self) -> None:
        """What Kubernetes' controllers do: pods as many as replicas, all of them serving."""
        for component, deployment in DEPLOYMENTS.items():
            if (_DEPLOYMENT, NAMESPACE, deployment) not in self.objects:
                continue
            pods = sorted(self.pods(deployment), key=_cost)
            missing = self.replicas(component) - len(pods)
            for pod in pods[: max(0, -missing)]:
                del self.objects[_POD, NAMESPACE, pod["metadata"]["name"]]
            for _ in range(missing):
                self._make_pod(component)

    def _make_pod(self, component: str) -> None:
        name = f"{DEPLOYMENTS[component]}-{self.num_pods_made}"
        self.num_pods_made += 1
        self.objects[_POD, NAMESPACE, name] = {
            "metadata": {
                "name": name,
                "namespace": NAMESPACE,
                "labels": {COMPONENT: component, "app.kubernetes.io/instance": "baton"},
                "annotations": {},
            },
            "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
        }

    def events(self) -> list[Mapping[str, Any]]:
        keys = [key for key in list(self.objects.keys()) if key[0].plural == "events"]
        return [self.objects[key].raw for key in keys]


def _check_version(asked: str | None, there: Mapping[str, Any] | None) -> None:
    if asked and there is not None and asked != there["metadata"].get("resourceVersion"):
        raise KubernetesError(status=409, reason="Conflict", message="the object was modified")


def _cost(pod: Mapping[str, Any]) -> int:
    return int(pod["metadata"]["annotations"].get(DELETION_COST, 0))


def _selects(selector: str, labels: Mapping[str, str]) -> bool:
    for term in re.split(r",(?![^(]*\))", selector):
        among = re.fullmatch(r"(\S+) in \((.*)\)", term.strip())
        if among is not None:
            key, values = among[1], [value.strip() for value in among[2].split(",")]
        else:
            key, _, value = term.strip().partition("=")
            values = [value]
        if labels.get(key) not in values:
            return False
    return True


def settings_for(server: kmock.Server, **changes: Any) -> KubernetesSettings:
    """Of an autoscaler that speaks to it."""
    times = {"lease_s": 1.2, "renew_s": 0.8, "retry_s": 0.05, "api_timeout_s": 10.0}
    return KubernetesSettings(
        api_url=str(server.url).rstrip("/"), namespace=NAMESPACE, **{**times, **changes}
    )


@asynccontextmanager
async def running(prefill: int = 1, decode: int = 1) -> AsyncIterator[tuple[ApiServer, Any]]:
    """A cluster with both Deployments. Yields: its content, and the server that speaks HTTP."""
    api = ApiServer()
    async with api, kmock.Server(api) as server:
        api.add_deployment("prefill", prefill)
        api.add_deployment("decode", decode)
        yield api, server
