"""`baton preflight` against an API server that speaks Kubernetes' HTTP API, by the official client.

The server is kmock's, which has discovery and errors of its own; objects and access reviews are
told to it. It keeps what it is asked, so that a write would be seen.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import kmock
import pytest
import yaml

from baton import cli

pytestmark = pytest.mark.oracle

_NODE = {
    "metadata": {"name": "node-0"},
    "status": {
        "allocatable": {"cpu": "4", "memory": "8Gi", "pods": "110"},
        "conditions": [{"type": "Ready", "status": "True"}],
        "images": [{"names": ["example.com/baton-worker:1"]}],
    },
}


class ApiServer:
    """One cluster with one node, and a user who may do all but what `denied` names."""

    def __init__(self, api: kmock.KubernetesScaffold) -> None:
        self.api = api
        self.denied: set[str] = set()
        self.labels: dict[str, str] = {}
        self.pods: list[dict[str, Any]] = []
        kinds = {
            "v1/namespaces": ("Namespace", False),
            "v1/nodes": ("Node", False),
            "v1/pods": ("Pod", True),
            "v1/secrets": ("Secret", True),
            "v1/configmaps": ("ConfigMap", True),
            "apps/v1/deployments": ("Deployment", True),
        }
        for name, (kind, is_namespaced) in kinds.items():
            api.resources[name].kind = kind
            api.resources[name].namespaced = is_namespaced
        self.knows_user = True
        api["get /version/"] << self._version
        reviews = "post /apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        api[reviews] << self._review
        api["get /apis/"] << {"kind": "APIGroupList", "groups": []}
        api["get /api/v1/namespaces/ml"] << (
            lambda: {"kind": "Namespace", "metadata": {"name": "ml", "labels": self.labels}}
        )
        api["get /api/v1/nodes"] << {"kind": "NodeList", "items": [_NODE]}
        api["get /api/v1/pods"] << (lambda: {"kind": "PodList", "items": self.pods})

    def _version(self) -> dict[str, str]:
        if not self.knows_user:
            raise kmock.KubernetesError(status=401, reason="Unauthorized", message="who?")
        rest = ("gitVersion", "gitCommit", "gitTreeState", "buildDate", "goVersion", "compiler")
        return {"major": "1", "minor": "33+", "platform": "x", **dict.fromkeys(rest, "x")}

    def _review(self, request: Any) -> dict[str, Any]:
        asked = request.data["spec"]["resourceAttributes"]
        is_allowed = asked["resource"] not in self.denied
        return {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": request.data["spec"],
            "status": {"allowed": is_allowed},
        }

    def occupy(self, cores: str) -> None:
        """Somebody's pod on that node."""
        container = {"name": "c", "resources": {"requests": {"cpu": cores}}}
        spec = {"nodeName": "node-0", "containers": [container]}
        status = {"phase": "Running"}
        self.pods.append({"metadata": {"name": "p"}, "spec": spec, "status": status})

    def secret(self, name: str, data: dict[str, str]) -> None:
        """A secret in the namespace; `data` may change later."""
        self.api[f"get /api/v1/namespaces/ml/secrets/{name}"] << (
            lambda: {"kind": "Secret", "metadata": {"name": name}, "data": dict(data)}
        )

    @property
    def num_writes(self) -> int:
        """Requests that could have changed something; access reviews change nothing."""
        return sum(
            request.method not in ("GET", "HEAD")
            and not request.url.path.endswith("/selfsubjectaccessreviews")
            for request in self.api
        )


def _kubeconfig(server: str, **user: str) -> str:
    context = {"cluster": "c", "user": "u", "namespace": "ml"}
    config = {
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "x", "context": context}],
        "current-context": "x",
    }
    return yaml.safe_dump(config)


@pytest.fixture
async def api_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiServer]:
    # Entered, it turns what is not there into Kubernetes' own 404.
    async with kmock.KubernetesScaffold() as api, kmock.Server(api):
        file = tmp_path / "kubeconfig"
        file.write_text(_kubeconfig(str(api.url).rstrip("/"), token="t"))
        monkeypatch.setenv("KUBECONFIG", str(file))
        yield ApiServer(api)


Preflight = Callable[..., Any]


@pytest.fixture
def preflight(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Preflight:
    async def ask(*objects: dict[str, Any]) -> tuple[int, dict[str, list[dict[str, str]]]]:
        """Exit code, and findings by check."""
        code = await _told(tmp_path, *objects, options=["--json"])
        found: dict[str, list[dict[str, str]]] = {}
        answer = json.loads(capsys.readouterr().out)
        assert answer["is_ready"] is (code == 0)
        for each in answer["findings"]:
            found.setdefault(each["check"], []).append(each)
        return code, found

    return ask


async def _told(folder: Path, *objects: dict[str, Any], options: Sequence[str] = ()) -> int:
    """The command, of these objects. Returns: its exit code."""
    file = folder / "objects.yaml"
    file.write_text(yaml.safe_dump_all(objects))
    return await asyncio.to_thread(cli.main, ["preflight", "--manifests", str(file), *options])


def _deployment(**resources: str) -> dict[str, Any]:
    safe = {
        "allowPrivilegeEscalation": False,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    container = {
        "name": "worker",
        "image": "example.com/baton-worker:1",
        "resources": {"limits": {"cpu": "1", "memory": "1Gi", **resources}},
        "securityContext": safe,
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "baton-decode"},
        "spec": {"replicas": 2, "template": {"spec": {"containers": [container]}}},
    }


async def test_a_cluster_that_has_all_is_ready_and_left_as_it_was(
    api_server: ApiServer, preflight: Preflight
) -> None:
    api_server.labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    code, found = await preflight(_deployment())
    assert code == 0, found
    assert {each["status"] for every in found.values() for each in every} == {"ok"}
    assert found["version"][0]["what"].startswith("Kubernetes 1.33")
    assert "2 pods on 1 nodes" in found["room"][0]["what"]
    assert api_server.num_writes == 0


async def test_each_thing_that_is_missing_is_named_with_a_fix(
    api_server: ApiServer, preflight: Preflight
) -> None:
    api_server.denied = {"secrets", "deployments"}
    wants = _deployment(**{"nvidia.com/gpu": "1"})
    pod = wants["spec"]["template"]["spec"]
    pod["volumes"] = [{"name": "v", "secret": {"secretName": "hub"}}]
    monitor = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": {"name": "m"},
    }
    code, found = await preflight(wants, monitor)
    assert code == 1
    bad = {
        check: [each["what"] for each in every if each["status"] == "fail"]
        for check, every in found.items()
        if any(each["status"] == "fail" for each in every)
    }
    assert bad == {
        "kinds": ["the cluster knows no PodMonitor of monitoring.coreos.com/v1"],
        "permissions": ["you may not create secrets, deployments.apps in namespace ml"],
        "devices": ["no node offers nvidia.com/gpu"],
        "room": [
            "2 of Deployment baton-decode find no room: asks for 1 nvidia.com/gpu, the most that a "
            "node has left is 0 nvidia.com/gpu"
        ],
    }
    # Whether that secret is there this user may not know.
    assert [each["status"] for each in found["references"]] == ["warn"]
    assert all(
        each["fix"] for every in found.values() for each in every if each["status"] == "fail"
    )
    assert api_server.num_writes == 0


async def test_a_secret_is_looked_for(api_server: ApiServer, preflight: Preflight) -> None:
    wants = _deployment()
    item = {"key": "token", "path": "token"}
    secret = {"secretName": "hub", "items": [item]}
    wants["spec"]["template"]["spec"]["volumes"] = [{"name": "v", "secret": secret}]
    code, found = await preflight(wants)
    assert code == 1 and "which is not there" in found["references"][0]["what"]
    data = {"other": "eA=="}
    api_server.secret("hub", data)
    code, found = await preflight(wants)
    assert code == 1 and "has no key token" in found["references"][0]["what"]
    data["token"] = "eA=="
    code, found = await preflight(wants)
    assert code == 0, found


async def test_a_secret_is_in_no_error(
    api_server: ApiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also not where the answer is nothing that the client expects."""
    wants = _deployment()
    volume = {"name": "v", "secret": {"secretName": "hub"}}
    wants["spec"]["template"]["spec"]["volumes"] = [volume]
    api_server.secret("hub", {"token": ["hidden-word"]})  # type: ignore[dict-item]
    assert await _told(tmp_path, wants) == 1
    said = capsys.readouterr()
    assert "read_namespaced_secret with what the client cannot read" in said.err
    assert "hidden-word" not in said.err + said.out


async def test_what_runs_there_already_is_not_free(
    api_server: ApiServer, preflight: Preflight
) -> None:
    api_server.occupy("2500m")
    code, found = await preflight(_deployment())
    assert code == 1
    assert found["room"][0]["what"].startswith("1 of Deployment baton-decode find no room")


async def test_pods_that_the_namespace_forbids_are_named(
    api_server: ApiServer, preflight: Preflight
) -> None:
    api_server.labels = {"pod-security.kubernetes.io/enforce": "baseline"}
    wants = _deployment()
    host = {"name": "slab", "hostPath": {"path": "/dev/shm"}}
    wants["spec"]["template"]["spec"]["volumes"] = [host]
    code, found = await preflight(wants)
    assert code == 1
    assert "hostPath volume slab" in found["pod security"][0]["what"]


async def test_the_table_says_the_same_as_the_json(
    api_server: ApiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    api_server.denied = {"deployments"}
    assert await _told(tmp_path, _deployment()) == 1
    shown = capsys.readouterr().out
    assert "fail" in shown and "permissions" in shown and "deployments.apps" in shown
    assert "role `admin`" in shown


async def test_a_server_that_does_not_know_you_is_one_line(
    api_server: ApiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    api_server.knows_user = False
    assert await _told(tmp_path, _deployment()) == 1
    assert "does not know you (401)" in capsys.readouterr().err


async def test_nobody_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert await asyncio.to_thread(cli.main, ["preflight"]) == 1
    assert "no cluster is configured" in capsys.readouterr().err
    (tmp_path / "none").write_text(_kubeconfig("http://127.0.0.1:1"))
    assert await asyncio.to_thread(cli.main, ["preflight"]) == 1
    assert "no answer from the API server http://127.0.0.1:1" in capsys.readouterr().err
