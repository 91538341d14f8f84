"""As much of an API server as helm asks for: it keeps objects, merges what is patched, and fills in
the one default that counts here, a Deployment's replicas.

Lists are replaced, where a real one would merge them by their keys.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

KINDS = {
    "v1": ("ConfigMap", "Secret", "Service", "ServiceAccount", "Pod"),
    "apps/v1": ("Deployment", "DaemonSet"),
    "batch/v1": ("Job", "CronJob"),
    "policy/v1": ("PodDisruptionBudget",),
    "networking.k8s.io/v1": ("NetworkPolicy",),
    "rbac.authorization.k8s.io/v1": ("Role", "RoleBinding"),
    "autoscaling/v2": ("HorizontalPodAutoscaler",),
    "coordination.k8s.io/v1": ("Lease",),
}
_PLURALS = {"NetworkPolicy": "networkpolicies"}

Object = dict[str, Any]


class FakeCluster:
    """Objects by their path, such as /apis/apps/v1/namespaces/models/deployments/baton-decode."""

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        self.address = ""

    def deployment(self, name: str, namespace: str) -> Object:
        return self.objects[f"/apis/apps/v1/namespaces/{namespace}/deployments/{name}"]

    def answer(self, method: str, url: str, body: Any) -> tuple[int, Object]:
        """Returns: status and body."""
        path, query = urlsplit(url).path, parse_qs(urlsplit(url).query)
        told = _discovery(path)
        if told is not None:
            return 200, told
        if method == "POST":
            path = f"{path}/{body['metadata']['name']}"
        if method in ("POST", "PUT"):
            self.objects[path] = _defaulted(body)
        elif path not in self.objects:
            return self._listed(path, query)
        elif method == "PATCH":
            self.objects[path] = _defaulted(_merged(self.objects[path], body))
        elif method == "DELETE":
            return 200, self.objects.pop(path)
        return 200, self.objects[path]

    def _listed(self, path: str, query: dict[str, list[str]]) -> tuple[int, Object]:
        if not any(
            path.endswith(f"/{_plural(kind)}") for kinds in KINDS.values() for kind in kinds
        ):
            return 404, {"kind": "Status", "apiVersion": "v1", "code": 404, "reason": "NotFound"}
        wanted = dict(
            each.split("=") for each in query.get("labelSelector", [""])[0].split(",") if each
        )
        found = [
            each
            for where, each in self.objects.items()
            if where.startswith(f"{path}/")
            and wanted.items() <= each["metadata"].get("labels", {}).items()
        ]
        return 200, {"kind": "SecretList", "apiVersion": "v1", "metadata": {}, "items": found}


@contextmanager
def running() -> Iterator[FakeCluster]:
    """On a free port of loopback."""
    cluster = FakeCluster()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            status, told = cluster.answer(self.command, self.path, body)
            content = json.dumps(told).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        cluster.address = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield cluster
        finally:
            server.shutdown()
            thread.join()


def _plural(kind: str) -> str:
    return _PLURALS.get(kind, f"{kind.lower()}s")


def _discovery(path: str) -> Object | None:
    if path == "/version":
        return {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        groups = [
            {"name": each.partition("/")[0], "versions": [version], "preferredVersion": version}
            for each in KINDS
            if each != "v1"
            for version in [{"groupVersion": each, "version": each.partition("/")[2]}]
        ]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    for api_version, kinds in KINDS.items():
        if path == ("/api/v1" if api_version == "v1" else f"/apis/{api_version}"):
            resources = [
                {"name": _plural(kind), "singularName": "", "namespaced": True, "kind": kind}
                | {"verbs": ["get", "list", "create", "update", "patch", "delete"]}
                for kind in kinds
            ]
            return {
                "kind": "APIResourceList",
                "apiVersion": "v1",
                "groupVersion": api_version,
                "resources": resources,
            }
    return None


def _merged(now: Any, patch: Any) -> Any:
    if not (isinstance(now, dict) and isinstance(patch, dict)):
        return patch
    made = {key: each for key, each in now.items() if patch.get(key, ...) is not None}
    for key, each in patch.items():
        if each is not None and not key.startswith("$"):
            made[key] = _merged(made.get(key, {}), each)
    return made


def _defaulted(each: Object) -> Object:
    if each["kind"] == "Deployment":
        return {**each, "spec": {"replicas": 1, **each["spec"]}}
    return each
