"""Checks of preflight, each with what it must let pass and what it must name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest

from baton.preflight import chart_needs, checks, memory_check
from baton.preflight.chart_needs import Kind
from baton.preflight.checks import Finding, Status
from baton.preflight.cluster import KubernetesFacts, Node, Resource
from baton.preflight.memory_check import Sizes
from engine.config import EngineConfig

_GIB = 2**30
_SAFE: dict[str, Any] = {
    "allowPrivilegeEscalation": False,
    "runAsNonRoot": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


def _container(**more: Any) -> dict[str, Any]:
    resources = {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "1Gi"}}
    base = {"name": "worker", "image": "example.com/w:1", "resources": resources}
    return {**base, "securityContext": _SAFE, **more}


def _deployment(name: str = "x-decode", **spec: Any) -> dict[str, Any]:
    spec = {"containers": [_container()], **spec}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {"replicas": 2, "template": {"spec": spec}},
    }


_DEPLOYMENT = Kind("apps/v1", "Deployment")
_CLUSTER = KubernetesFacts(
    version=(1, 33),
    namespace="ml",
    namespace_labels={"pod-security.kubernetes.io/enforce": "restricted"},
    resources={_DEPLOYMENT: Resource("deployments", True)},
    groups=frozenset({"apps"}),
    allowed={("create", "apps", "deployments"): True},
    nodes=(Node("n", {"cpu": 8.0, "memory": 16.0 * _GIB}, images=frozenset({"example.com/w:1"})),),
    is_usage_known=True,
)


def _bad(findings: Iterable[Finding]) -> list[tuple[str, Status, str]]:
    return [
        (each.check, each.status, each.what) for each in findings if each.status is not Status.OK
    ]


def _all(objects: list[dict[str, Any]], **changes: Any) -> tuple[Finding, ...]:
    return checks.all_of(
        chart_needs.collect_needs(objects), dataclasses.replace(_CLUSTER, **changes)
    )


def test_a_cluster_that_has_all_gets_no_word_of_blame() -> None:
    findings = _all([_deployment()])
    assert not _bad(findings)
    assert {each.check for each in findings} >= {
        *("version", "kinds", "permissions", "pod security", "references", "room", "images")
    }


def test_a_sidecar_needs_a_cluster_that_knows_them() -> None:
    sidecar = {**_container(name="kvstore"), "restartPolicy": "Always"}
    with_sidecar = _deployment(initContainers=[sidecar])
    assert not _bad(_all([with_sidecar], version=(1, 29)))
    ((check, status, what),) = _bad(_all([with_sidecar], version=(1, 28)))
    assert (check, status) == ("version", Status.FAIL)
    assert "1.28" in what and "1.29" in what
    assert not _bad(_all([_deployment()], version=(1, 28)))


def test_a_model_in_an_image_volume_needs_a_newer_one() -> None:
    volume = {"name": "models", "image": {"reference": "example.com/m:1"}}
    ((check, _, what),) = _bad(_all([_deployment(volumes=[volume])], version=(1, 30)))
    assert check == "version" and "1.33" in what


def test_a_kind_that_nobody_serves_is_named_with_what_brings_it() -> None:
    monitor = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": {"name": "m"},
    }
    (finding,) = [each for each in _all([_deployment(), monitor]) if each.status is Status.FAIL]
    assert finding.what == "the cluster knows no PodMonitor of monitoring.coreos.com/v1"
    assert "Prometheus operator" in finding.fix


def test_what_you_may_not_do_is_said_in_one_line() -> None:
    allowed = {
        ("create", "apps", "deployments"): False,
        ("create", "", "secrets"): False,
        ("create", "", "services"): True,
    }
    ((check, status, what),) = _bad(_all([_deployment()], allowed=allowed))
    assert (check, status) == ("permissions", Status.FAIL)
    assert what == "you may not create secrets, deployments.apps in namespace ml"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"securityContext": {}}, "allowPrivilegeEscalation"),
        ({"securityContext": {**_SAFE, "runAsNonRoot": False}}, "runAsNonRoot"),
        ({"securityContext": {**_SAFE, "runAsUser": 0}}, "runs as root"),
        ({"securityContext": {**_SAFE, "capabilities": {}}}, "capabilities"),
        ({"securityContext": {**_SAFE, "seccompProfile": {}}}, "seccompProfile"),
        ({"ports": [{"containerPort": 1, "hostPort": 1}]}, "hostPort"),
        ({"securityContext": {**_SAFE, "privileged": True}}, "privileged"),
    ],
)
def test_a_pod_that_the_namespace_forbids_is_named(change: dict[str, Any], word: str) -> None:
    found = _bad(_all([_deployment(containers=[_container(**change)])]))
    assert any(check == "pod security" and word in what for check, _, what in found)
    assert not _bad(_all([_deployment(containers=[_container(**change)])], namespace_labels={})), (
        "a namespace without a level lets all in"
    )


def test_levels_are_ordered() -> None:
    """What restricted lets in, baseline does; what baseline forbids, restricted forbids."""
    host = {"name": "slab", "hostPath": {"path": "/dev/shm"}}
    bare = chart_needs.collect_needs(
        [_deployment(volumes=[host], containers=[{"name": "c"}])]
    ).pods[0]
    broken = [set(checks.breaks(bare, level)) for level in checks.LEVELS]
    assert broken[0] < broken[1] < broken[2]
    assert broken[1] == {"hostPath volume slab"}


def test_a_namespace_that_is_not_there_is_no_fault_but_an_unknown_one_is_said() -> None:
    assert not _bad(_all([_deployment()], namespace_labels=None))
    ((check, status, what),) = _bad(
        _all([_deployment()], namespace_labels=None, is_namespace_known=False)
    )
    assert (check, status) == ("pod security", Status.WARN) and "fit restricted" in what


def test_a_secret_that_is_missing_or_lacks_a_key_is_named() -> None:
    volume = {"name": "v", "secret": {"secretName": "hub", "items": [{"key": "token"}]}}
    pods = [_deployment(volumes=[volume])]
    place = ("Secret", "hub")
    assert not _bad(_all(pods, found={place: frozenset({"token"})}))
    ((_, status, what),) = _bad(_all(pods, found={place: None}))
    assert status is Status.FAIL
    assert what == "Deployment x-decode needs Secret hub, which is not there"
    ((_, status, what),) = _bad(_all(pods, found={place: frozenset({"other"})}))
    assert status is Status.FAIL and "has no key token" in what
    ((_, status, what),) = _bad(_all(pods, found={}))
    assert status is Status.WARN and "may not look at" in what


def test_devices_that_no_node_offers_are_named_and_have_no_room() -> None:
    limits = {"limits": {"nvidia.com/gpu": "1"}}
    pods = [_deployment(containers=[_container(resources=limits)])]
    found = _bad(_all(pods))
    assert ("devices", Status.FAIL, "no node offers nvidia.com/gpu") in found
    assert any(check == "room" for check, _, _ in found)
    with_gpu = Node("g", {"cpu": 8.0, "memory": _GIB * 8.0, "nvidia.com/gpu": 3.0})
    assert not [each for each in _bad(_all(pods, nodes=(with_gpu,))) if each[0] != "images"]


@pytest.mark.parametrize(
    ("strategy", "has_room"),
    [
        ({"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}, False),
        ({}, False),  # Kubernetes' default, a quarter of two pods, is none
        ({"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}, True),
        ({"rollingUpdate": {"maxUnavailable": "50%"}}, True),
        ({"type": "Recreate"}, True),
    ],
)
def test_an_update_that_starts_a_new_pod_first_needs_room_for_it(
    strategy: dict[str, Any], has_room: bool
) -> None:
    """Two pods of one core fill two cores: the third, which the update waits for, never starts."""
    deployment = _deployment()
    deployment["spec"]["strategy"] = strategy
    full = Node("n", {"cpu": 2.0, "memory": 16.0 * _GIB}, images=frozenset({"example.com/w:1"}))
    found = _bad(_all([deployment], nodes=(full,)))
    assert bool(found) is not has_room
    for check, status, what in found:
        assert (check, status) == ("room", Status.WARN)
        assert "Deployment x-decode cannot be updated" in what and "asks for 1 cores" in what
    roomy = dataclasses.replace(full, allocatable={"cpu": 3.0, "memory": 16.0 * _GIB})
    assert not _bad(_all([deployment], nodes=(roomy,)))


def test_room_is_only_promised_where_usage_is_known() -> None:
    ((check, status, what),) = _bad(_all([_deployment()], is_usage_known=False))
    assert (check, status) == ("room", Status.WARN) and "if nothing else runs" in what
    found = dict((check, status) for check, status, _ in _bad(_all([_deployment()], nodes=None)))
    assert found["room"] is Status.WARN


@pytest.mark.parametrize(
    ("kind", "group"),
    [
        ("Resource", "metrics.k8s.io"),
        ("Pods", "custom.metrics.k8s.io"),
        ("External", "external.metrics.k8s.io"),
    ],
)
def test_an_autoscaler_of_pods_needs_the_api_that_it_asks(kind: str, group: str) -> None:
    hpa = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "h"},
        "spec": {"metrics": [{"type": kind}]},
    }
    known = {
        **_CLUSTER.resources,
        Kind("autoscaling/v2", "HorizontalPodAutoscaler"): Resource("h", True),
    }
    objects = [_deployment(), hpa]
    ((check, _, what),) = _bad(_all(objects, resources=known))
    assert check == "metrics" and group in what
    assert not _bad(_all(objects, resources=known, groups=frozenset({group})))


def test_images_are_matched_by_the_names_that_nodes_give_them() -> None:
    pods = [_deployment(containers=[_container(image="baton-control:0.1.0")])]
    ((check, status, what),) = _bad(_all(pods))
    assert (check, status) == ("images", Status.WARN) and "baton-control:0.1.0" in what
    names = frozenset({"docker.io/library/baton-control:0.1.0"})
    node = dataclasses.replace(_CLUSTER.nodes[0], images=names)
    assert not _bad(_all(pods, nodes=(node,)))


def _config_map(role: str, engine: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "c"},
        "data": {f"{role}.toml": f"[engine]\n{engine}\n"},
    }


_LLAMA_8B = {
    "dtype": "bfloat16",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 8192,
}


def test_the_memory_of_a_known_shape() -> None:
    found = memory_check.estimate(_LLAMA_8B, 16.06e9, {})
    assert found is not None
    assert found.kv_bytes_per_token == 131072  # 128 KiB a token, 2 MiB a block
    assert found.least_bytes == 16.06e9 + 2**30
    small = memory_check.estimate(
        _LLAMA_8B, 16.06e9, {"kv_dtype": "int8", "weight_dtype": "fp8_e4m3", "context_window": 10}
    )
    assert small is not None
    assert (small.weight_bytes, small.kv_bytes_per_token) == (8.03e9, 65536)
    latent = {**_LLAMA_8B, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 61}
    mla = memory_check.estimate(latent, 1.0, {})
    assert mla is not None and mla.kv_bytes_per_token == 61 * 576 * 2
    assert memory_check.estimate({"dtype": "bfloat16"}, 1.0, {}) is None


def test_room_for_adapters_is_counted_where_our_own_decoder_launches() -> None:
    """8 of rank 64 on an 8B model: 3.75 GiB."""
    node = dataclasses.replace(_CLUSTER.nodes[0], labels={"nvidia.com/gpu.memory": "20480"})
    cluster = dataclasses.replace(_CLUSTER, nodes=(node,))
    sizes = {"a/b": Sizes({**_LLAMA_8B, "intermediate_size": 14336}, 16e9)}

    def found(settings: str, **limits: str) -> Finding:
        limits = {"memory": "18Gi", **limits}
        pod = _deployment(containers=[_container(resources={"limits": limits})])
        asked = chart_needs.collect_needs(
            [pod, _config_map("decode", f'model = "a/b"\n{settings}')]
        )
        (finding,) = memory_check.check(asked, cluster, sizes)
        return finding

    gpu, lora = {"nvidia.com/gpu": "1"}, "[engine.lora]\nmax_launched_rank = 64"
    assert found("", **gpu).status is Status.OK
    short = found(lora, **gpu)
    assert short.status is Status.FAIL
    assert "14.9 GiB of weights, 3.8 GiB for adapters, 8192 tokens of KV" in short.what
    assert "decode.settings.engine.lora.max_launched_rank" in short.fix
    for elsewhere in (
        found(f'decoder = "transformers"\n{lora}', **gpu),
        found(f"tensor_parallel = 2\n{lora}", **gpu),
        found(lora),
    ):
        assert elsewhere.status is Status.OK and "adapters" not in elsewhere.what
    assert found(f'decoder = "own"\n{lora}').status is Status.FAIL


def test_a_model_that_does_not_fit_is_named_with_what_it_needs() -> None:
    objects = [_deployment(), _config_map("decode", 'model = "a/b"')]
    asked = chart_needs.collect_needs(objects)
    assert memory_check.engines(asked) == {"decode": {"model": "a/b"}}
    big, small = Sizes(_LLAMA_8B, 16e9), Sizes({**_LLAMA_8B, "num_hidden_layers": 1}, 1e8)
    (finding,) = memory_check.check(asked, _CLUSTER, {"a/b": big})
    assert finding.status is Status.FAIL
    assert "decode: a/b needs about 16.3 GiB" in finding.what
    assert "the container's limit is 1.0 GiB" in finding.what
    assert "decode.resources" in finding.fix
    (finding,) = memory_check.check(asked, _CLUSTER, {"a/b": small})
    assert finding.status is Status.OK
    (finding,) = memory_check.check(asked, _CLUSTER, {"a/b": "a/b: not on the hub"})
    assert finding.status is Status.WARN


def test_a_model_on_gpus_is_measured_against_what_nodes_say_of_them() -> None:
    limits = {"limits": {"nvidia.com/gpu": "1", "memory": "1Gi"}}
    pods = [_deployment(containers=[_container(resources=limits)])]
    asked = chart_needs.collect_needs([*pods, _config_map("decode", 'model = "a/b"')])
    sizes = {"a/b": Sizes(_LLAMA_8B, 16e9)}
    (finding,) = memory_check.check(asked, _CLUSTER, sizes)
    assert finding.status is Status.WARN and "no node says how much memory" in finding.what
    for mebibytes, status in (("16384", Status.FAIL), ("24576", Status.OK)):
        node = dataclasses.replace(_CLUSTER.nodes[0], labels={"nvidia.com/gpu.memory": mebibytes})
        cluster = dataclasses.replace(_CLUSTER, nodes=(node,))
        (finding,) = memory_check.check(asked, cluster, sizes)
        assert finding.status is status


def test_a_model_whose_layers_are_streamed_takes_host_memory_for_the_rest() -> None:
    node = dataclasses.replace(_CLUSTER.nodes[0], labels={"nvidia.com/gpu.memory": "16384"})
    cluster = dataclasses.replace(_CLUSTER, nodes=(node,))
    sizes = {"a/b": Sizes(_LLAMA_8B, 16e9)}

    def found(memory: str | None, device_bytes: int = 10 * _GIB) -> Finding:
        settings = f'model = "a/b"\nweights_device_bytes = {device_bytes}'
        limits = {"nvidia.com/gpu": "1", **({} if memory is None else {"memory": memory})}
        pod = _deployment(containers=[_container(resources={"limits": limits})])
        asked = chart_needs.collect_needs([pod, _config_map("decode", settings)])
        (finding,) = memory_check.check(asked, cluster, sizes)
        return finding

    fits = found("8Gi")
    assert fits.status is Status.OK
    assert "needs about 11.0 GiB (10.0 GiB of weights" in fits.what
    assert "4.9 GiB of weights in host memory" in fits.what
    short = found("5Gi")
    assert short.status is Status.FAIL
    assert "the container's limit is 5.0 GiB" in short.what
    assert "decode.resources" in short.fix and "weights_device_bytes" in short.fix
    assert found(None).status is Status.OK
    much = found("8Gi", 14 * _GIB)
    assert much.status is Status.FAIL and "each GPU may use 14.4 GiB" in much.what
    assert much.fix.startswith("lower decode.settings.engine.weights_device_bytes")
    whole = found("8Gi", 16 * _GIB)  # more than they take: nothing is streamed
    assert whole.status is Status.FAIL
    assert "host memory" not in whole.what and "more GPUs" in whole.fix


def test_the_bundled_model_can_be_looked_at_without_a_network() -> None:
    known = memory_check.sizes_of("baton-5m")
    assert isinstance(known, Sizes)
    found = memory_check.estimate(known.config, known.stored_bytes, {})
    assert found is not None and found.least_bytes < 64 * 2**20
    assert "cannot be looked at" in str(memory_check.sizes_of("/models/x"))


def test_a_draft_worker_is_looked_at_as_the_others() -> None:
    """Its pods are a StatefulSet's; its KV has a bound of its own."""
    small = {"nvidia.com/gpu": "1", "memory": "1Gi"}
    pod = _deployment(
        "x-draft",
        containers=[_container(image="r.io/draft:1", resources={"limits": small})],
    ) | {"kind": "StatefulSet"}
    pod["spec"]["template"]["spec"]["volumes"] = [
        {"name": "m", "persistentVolumeClaim": {"claimName": "small-models"}}
    ]
    missing = {("PersistentVolumeClaim", "small-models"): None}
    found = _bad(_all([pod], found=missing))
    told = [f"{check}: {what}" for check, _, what in found]
    for words in (
        "references: StatefulSet x-draft needs PersistentVolumeClaim small-models",
        "devices: no node offers nvidia.com/gpu",
        "room: 2 of StatefulSet x-draft find no room",
        "images: r.io/draft:1 is on no node",
    ):
        assert any(line.startswith(words) for line in told), (words, told)

    node = dataclasses.replace(_CLUSTER.nodes[0], labels={"nvidia.com/gpu.memory": "24576"})
    cluster = dataclasses.replace(_CLUSTER, nodes=(node,))
    sizes = {"a/b": Sizes(_LLAMA_8B, 16e9)}
    plain = EngineConfig()
    assert memory_check.DRAFT_KV_BYTES == plain.speculation.draft_kv_bytes
    assert memory_check.DRAFT_NUM_RUNNING == plain.max_num_running
    bound = "speculation.draft_kv_bytes = "
    for settings, status, words, fix in (
        ("", Status.FAIL, "8192 tokens of KV take 1.0 GiB, draft_kv_bytes are 0.2 GiB", "raise"),
        (f"{bound}{2 * _GIB}", Status.OK, "16384 tokens of KV", ""),
        (f"{bound}{16 * _GIB}", Status.FAIL, "each GPU may use 24.0 GiB", "a larger GPU"),
        (f"{bound}{_GIB}\nmax_num_running = 1", Status.OK, "8192 tokens of KV", ""),
        ("context_window = 1024", Status.OK, "needs about 15.2 GiB", ""),
    ):
        asked = chart_needs.collect_needs([pod, _config_map("draft", f'model = "a/b"\n{settings}')])
        (one,) = memory_check.check(asked, cluster, sizes)
        assert one.status is status and words in one.what, (settings, one)
        assert one.fix.startswith(fix) and bool(one.fix) == bool(fix)
