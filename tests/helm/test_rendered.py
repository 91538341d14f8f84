"""What helm renders, over a matrix of values, is what a strict API server takes, and what a cluster
with restricted Pod Security lets run."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.golden.recorded import check
from tests.helm.conftest import CHART, Render, containers, of_kind, pod_specs

VERSION = "1.34"
# Kinds whose schemas are not Kubernetes' own: their definitions are installed by others.
FOREIGN = {
    "Certificate",
    "GRPCRoute",
    "HTTPRoute",
    "PodMonitor",
    "PrometheusRule",
    "ScaledObject",
}

EVERYTHING = (
    "router.ingress.enabled=true",
    "router.ingress.host=api.example.com",
    "router.ingress.grpcHost=grpc.example.com",
    "router.ingress.tlsSecret=edge",
    "router.gateway.enabled=true",
    "router.gateway.parentRefs[0].name=edge",
    "router.gateway.httpHostnames[0]=api.example.com",
    "clients.apiKeysSecret=keys-of-clients",
    "clients.tlsSecret=shown-to-clients",
    "monitoring.podMonitor.enabled=true",
    "monitoring.alerts.enabled=true",
    "monitoring.dashboards.enabled=true",
    "monitoring.tracing.endpoint=collector.observability:4317",
    "images.registry=registry.example.com/team",
    "images.pullSecrets[0]=pull",
    "networkPolicy.clientsFrom[0].namespaceSelector.matchLabels.team=web",
    "networkPolicy.metricsFrom[0].namespaceSelector.matchLabels.team=sre",
)
GPU = tuple(
    f"{role}.{value}"
    for role in ("prefill", "decode")
    for value in (
        "gpus=2",
        "settings.engine.tensor_parallel=2",
        "resources.limits.memory=64Gi",
        "resources.requests.memory=64Gi",
        "resources.requests.cpu=8",
        "shmSizeLimit=4Gi",
        "nodeSelector.accelerator=h100",
        "tolerations[0].key=nvidia.com/gpu",
        "tolerations[0].operator=Exists",
        "priorityClassName=serving",
        "runtimeClassName=nvidia",
        "env.NCCL_DEBUG=WARN",
    )
)
OUTSIDE_REDIS = (
    "redis.enabled=false",
    "redis.url=rediss://redis.example.com:6379/0",
    "redis.existingSecret=redis",
    "redis.hasCa=true",
    "redis.user=baton",
)
MATRIX = {
    "default": (),
    "everything": EVERYTHING,
    "gpu_hub": (
        *GPU,
        "model.source=hub",
        "model.name=Qwen/Qwen3-8B",
        "model.hub.tokenSecret=hf",
        "model.hub.endpoint=https://hub.example.com",
        "kvstore.capacity=32Gi",
    ),
    "gpu_nixl": (*GPU, "prefill.settings.transport=nixl", "decode.settings.transport=nixl"),
    "pvc": ("model.source=pvc", "model.name=mine", "model.pvc.claimName=models"),
    "image": ("model.source=image", "model.name=mine", "model.image.reference=registry/m:1"),
    "daemonset": ("kvstore.placement=daemonset", "tls.mode=self-made"),
    "huge_pages": ("kvstore.hugepages=2Mi", "kvstore.fileTier=10Gi"),
    "daemonset_huge_pages": (
        "kvstore.placement=daemonset",
        "kvstore.hugepages=1Gi",
        "kvstore.capacity=32Gi",
        "kvstore.hostPath=/dev/hugepages/baton",
        "tls.mode=self-made",
    ),
    "file_tier": ("kvstore.fileTier=10Gi",),
    "no_store": ("kvstore.placement=none",),
    "outside_redis": OUTSIDE_REDIS,
    "open_redis": ("redis.enabled=false", "redis.url=redis://redis.example.com:6379/0"),
    "autoscaler_tls": (
        "scaling.by=autoscaler",
        "scaling.prefill.min=0",
        "scaling.decode.min=0",
        "tls.mode=self-made",
    ),
    "cert_manager": (
        "scaling.by=autoscaler",
        "tls.mode=cert-manager",
        "tls.certManager.issuerRef.name=ca",
    ),
    "keda": ("scaling.by=keda",),
    "hpa": ("scaling.by=hpa", "networkPolicy.enabled=false"),
    "drafts": (
        *("draft.replicas=2", "draft.model=Qwen/Qwen3-0.6B", "draft.gpus=1"),
        *("draft.tolerations[0].key=nvidia.com/gpu", "draft.tolerations[0].operator=Exists"),
        *("draft.nodeSelector.accelerator=l4", "draft.priorityClassName=spare"),
        "draft.settings.engine.speculation.max_num_nodes=8",
        *("model.source=hub", "model.name=Qwen/Qwen3-8B", "model.hub.tokenSecret=hf"),
        "tls.mode=self-made",
    ),
    "drafts_pvc": (
        *("draft.replicas=1", "draft.model=small", "draft.pvc.subPath=small"),
        *("model.source=pvc", "model.name=mine", "model.pvc.claimName=models"),
        *("tls.mode=cert-manager", "tls.certManager.issuerRef.name=ca"),
    ),
    "own_secrets": ("secrets.existingSecret=ours", "redis.existingSecret=ours-redis"),
}


@pytest.fixture(scope="module", params=sorted(MATRIX))
def objects(request: pytest.FixtureRequest, render: Render) -> list[dict[str, Any]]:
    return render(*MATRIX[request.param])


def test_helm_finds_nothing_to_mend(helm: Callable[..., str]) -> None:
    told = helm("lint", "--strict", str(CHART))
    assert "0 chart(s) failed" in told


def test_every_object_is_that_which_was_recorded(render: Render) -> None:
    """By the first digits of each one's SHA-256: a change of the chart shows which it touches."""
    found = {}
    for name, values in MATRIX.items():
        digests = {}
        for each in render(*values):
            # Each rendering draws other keys and passwords.
            drawn = {"data": sorted(each["data"])} if each["kind"] == "Secret" else {}
            text = json.dumps({**each, **drawn}, sort_keys=True)
            key = f"{each['kind']}/{each['metadata']['name']}"
            digests[key] = hashlib.sha256(text.encode()).hexdigest()[:12]
        found[name] = digests
    check("chart", found)


def test_every_object_is_valid(objects: list[dict[str, Any]]) -> None:
    """Strictly: a key that no schema has is a mistake."""
    names = set()
    for each in objects:
        name = (each["kind"], each["metadata"]["name"])
        assert name not in names, f"{name} twice"
        names.add(name)
        if each["kind"] not in FOREIGN:
            _validate(json.dumps(each))
        assert each["metadata"]["namespace"] == "models"
        assert len(each["metadata"]["name"]) <= 63


@functools.cache
def _validate(each: str) -> None:
    """Most objects are the same for most values, and each takes its while."""
    import kubernetes_validate  # a second, in each process that collects tests

    kubernetes_validate.validate(json.loads(each), VERSION, strict=True)


def test_restricted_pod_security_holds(objects: list[dict[str, Any]]) -> None:
    for name, pod in pod_specs(objects).items():
        security = pod["securityContext"]
        assert security["runAsNonRoot"] and security["runAsUser"] == 65532, name
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert pod["enableServiceLinks"] is False, name  # their names are taken for settings
        for container in containers(pod).values():
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False, name
            assert own["readOnlyRootFilesystem"] is True, name
            assert own["capabilities"] == {"drop": ["ALL"]}, name
            assert own["runAsNonRoot"] and own["seccompProfile"]["type"] == "RuntimeDefault", name
            assert "privileged" not in own, name
        for volume in pod.get("volumes", []):
            # Only the one placement that says so leaves what "restricted" allows.
            path = volume.get("hostPath", {}).get("path")
            assert path in (None, "/dev/shm", "/dev/hugepages/baton"), name
        assert not any(pod.get(key) for key in ("hostNetwork", "hostPID", "hostIPC")), name


def test_only_the_daemonset_takes_what_is_the_nodes(render: Render) -> None:
    for name, values in MATRIX.items():
        pods = pod_specs(render(*values)).values()
        asks = any(
            "hostPath" in volume for pod in pods for volume in pod.get("volumes", [])
        ) or any(
            "hostPort" in port
            for pod in pods
            for container in containers(pod).values()
            for port in container.get("ports", [])
        )
        assert asks == name.startswith("daemonset"), name


def test_who_gets_a_token_of_the_cluster(objects: list[dict[str, Any]]) -> None:
    """Those with something to ask it, and each only with a Role of its own."""
    roles = of_kind(objects, "Role")
    for name, pod in pod_specs(objects).items():
        needs = name.rpartition("/")[2].split("-")[1] in ("autoscaler", "certs")
        assert pod["automountServiceAccountToken"] is needs, name
        assert (pod["serviceAccountName"] in roles) is needs, name
    for role in roles.values():
        for rule in role["rules"]:
            assert "*" not in rule["verbs"] + rule["resources"] + rule["apiGroups"]
            if rule["resources"] == ["secrets"]:
                assert rule["verbs"] == ["create"] or rule["resourceNames"]
    assert not of_kind(objects, "ClusterRole")


def test_every_volume_is_there_and_used(objects: list[dict[str, Any]]) -> None:
    for name, pod in pod_specs(objects).items():
        known = [volume["name"] for volume in pod.get("volumes", [])]
        used = {
            mount["name"] for each in containers(pod).values() for mount in each["volumeMounts"]
        }
        assert set(known) == used and len(known) == len(used), name
        for container in containers(pod).values():
            paths = [mount["mountPath"] for mount in container["volumeMounts"]]
            assert len(set(paths)) == len(paths), name
            assert "/tmp" in paths, name  # nothing else may be written to


def test_secrets_and_maps_that_pods_mount_are_made_or_named(objects: list[dict[str, Any]]) -> None:
    """A misspelt name would leave the pod waiting for ever."""
    made = set(of_kind(objects, "Secret"))
    made |= {each["spec"]["secretName"] for each in of_kind(objects, "Certificate").values()}
    if of_kind(objects, "CronJob"):
        made |= {f"baton-tls-{role}" for role in _names_of_job(objects)}
    given = {"keys-of-clients", "shown-to-clients", "hf", "redis", "ours", "ours-redis"}
    maps = of_kind(objects, "ConfigMap")
    for name, pod in pod_specs(objects).items():
        for volume in pod.get("volumes", []):
            if "secret" in volume:
                assert volume["secret"]["secretName"] in made | given, name
                assert volume["secret"]["defaultMode"] == 0o440, name
            if "configMap" in volume:
                assert volume["configMap"]["name"] in maps, name


def _names_of_job(objects: list[dict[str, Any]]) -> set[str]:
    from process.authorization import PeerRole

    pod = pod_specs(objects)["CronJob/baton-certs"]
    servers = [arg for arg in containers(pod)["certs"]["args"] if arg.startswith("--server=")]
    return {role.value for role in PeerRole} | {each.split("=")[1] for each in servers}


def test_the_job_may_write_the_secrets_that_it_writes(render: Render) -> None:
    objects = render(*MATRIX["autoscaler_tls"])
    (rule,) = [
        rule
        for rule in of_kind(objects, "Role")["baton-certs"]["rules"]
        if rule["resources"] == ["secrets"] and "resourceNames" in rule
    ]
    written = {f"baton-tls-{name}" for name in _names_of_job(objects) | {"ca"}}
    assert set(rule["resourceNames"]) == written
    for pod in pod_specs(objects).values():  # nobody is shown the CA's key
        assert "baton-tls-ca" not in str(pod.get("volumes"))


def test_selectors_select_their_own(objects: list[dict[str, Any]]) -> None:
    pods = {
        each["metadata"]["name"]: each["spec"]["template"]["metadata"]["labels"]
        for each in objects
        if each["kind"] in ("Deployment", "DaemonSet", "StatefulSet")
    }
    selectors = {
        (each["kind"], each["metadata"]["name"]): selector
        for each in objects
        for selector in [_selector(each)]
        if selector
    }
    for (kind, name), selector in selectors.items():
        matched = [pod for pod, labels in pods.items() if selector.items() <= labels.items()]
        assert matched == [name], (kind, name)
    for kind in ("Deployment", "PodDisruptionBudget"):
        for role in ("router", "prefill", "decode"):
            assert (kind, f"baton-{role}") in selectors


def _selector(each: dict[str, Any]) -> dict[str, str]:
    spec = each.get("spec", {})
    if each["kind"] == "Service":
        return dict(spec["selector"])
    if each["kind"] == "NetworkPolicy":
        return dict(spec["podSelector"]["matchLabels"])
    if each["kind"] in ("Deployment", "DaemonSet", "StatefulSet", "PodDisruptionBudget"):
        return dict(spec["selector"]["matchLabels"])
    return {}


def test_ports_are_named_and_the_names_are_there(objects: list[dict[str, Any]]) -> None:
    named: dict[str, set[str]] = {}
    for name, pod in pod_specs(objects).items():
        ports = [port for each in containers(pod).values() for port in each.get("ports", [])]
        names = [port["name"] for port in ports]
        assert len(set(names)) == len(names), name
        assert len({port["containerPort"] for port in ports}) == len(ports), name
        named[name.rpartition("/")[2]] = set(names)
        for container in containers(pod).values():
            for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
                probe = container.get(kind, {})
                asked = (probe.get("httpGet") or probe.get("tcpSocket") or {}).get("port")
                assert asked in (None, *[port["name"] for port in container.get("ports", [])])
    for service in of_kind(objects, "Service").values():
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in named[service["metadata"]["name"]]
            assert port["appProtocol"]


def test_images_are_pinned(objects: list[dict[str, Any]]) -> None:
    for name, pod in pod_specs(objects).items():
        for container in containers(pod).values():
            assert re.search(r":[\w.-]+$|@sha256:", container["image"]), name
            assert not container["image"].endswith(":latest"), name


def test_every_container_says_what_it_needs(objects: list[dict[str, Any]]) -> None:
    for name, pod in pod_specs(objects).items():
        for container in containers(pod).values():
            resources = container["resources"]
            assert {"cpu", "memory"} <= set(resources["requests"]), name
            assert "memory" in resources["limits"], name
