"""Needs of rendered objects: pods, requests, references, quantities."""

from __future__ import annotations

from typing import Any

import pytest

from baton.preflight import chart_needs
from baton.preflight.chart_needs import Kind, Reference


def _deployment(name: str, spec: dict[str, Any], replicas: int = 1) -> dict[str, Any]:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {"replicas": replicas, "template": {"spec": spec}},
    }


def _container(cpu: str, memory: str, **more: Any) -> dict[str, Any]:
    return {"name": "c", "resources": {"requests": {"cpu": cpu, "memory": memory}}, **more}


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("1", 1.0),
        (2, 2.0),
        ("250m", 0.25),
        ("1.5Gi", 1.5 * 2**30),
        ("512Mi", 2**29),
        ("128974848", 128974848),
        ("129M", 129e6),
        ("1e3", 1000.0),
        ("100n", 1e-7),
    ],
)
def test_quantities_are_read_as_kubernetes_reads_them(text: str, amount: float) -> None:
    assert chart_needs.parse_quantity(text) == pytest.approx(amount)


@pytest.mark.parametrize("text", ["", "Gi", "1 GiB", "lots", "1Gib"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        chart_needs.parse_quantity(text)


def test_a_sidecar_runs_beside_the_containers_and_what_runs_first_does_not() -> None:
    pod = {
        "initContainers": [
            _container("1", "3Gi"),  # runs before all
            _container("100m", "1Gi", restartPolicy="Always"),  # the store
            _container("2", "1Gi"),  # runs while the store is there
        ],
        "containers": [_container("500m", "1Gi"), {"name": "bare"}],
    }
    (found,) = chart_needs.collect_needs([_deployment("d", pod, 3)]).pods
    assert found.num_pods == 3
    assert found.requests == pytest.approx({"cpu": 2.1, "memory": 3 * 2**30})


def test_a_limit_alone_is_the_request_too() -> None:
    gpu = {"name": "c", "resources": {"limits": {"nvidia.com/gpu": "2", "memory": "1Gi"}}}
    (found,) = chart_needs.collect_needs([_deployment("d", {"containers": [gpu]})]).pods
    assert found.requests == {"nvidia.com/gpu": 2.0, "memory": 2**30}


def test_what_pods_name_and_nobody_brings_is_a_reference() -> None:
    pod = {
        "serviceAccountName": "runner",
        "priorityClassName": "high",
        "imagePullSecrets": [{"name": "pull"}],
        "containers": [
            {
                "name": "c",
                "env": [
                    {"name": "A", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
                    {
                        "name": "B",
                        "valueFrom": {"secretKeyRef": {"name": "x", "key": "y", "optional": True}},
                    },
                ],
            }
        ],
        "volumes": [
            {"name": "v", "secret": {"secretName": "hub", "items": [{"key": "more"}]}},
            {"name": "own", "configMap": {"name": "settings"}},
            {"name": "m", "persistentVolumeClaim": {"claimName": "models"}},
            {"name": "p", "projected": {"sources": [{"secret": {"name": "keys"}}]}},
        ],
    }
    own = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "settings"}}
    found = chart_needs.collect_needs([_deployment("d", pod), own])
    by = "Deployment d"
    assert set(found.references) == {
        Reference("ServiceAccount", "runner", (), by),
        Reference("PriorityClass", "high", (), by),
        Reference("Secret", "pull", (".dockerconfigjson",), by),
        Reference("Secret", "hub", ("more", "token"), by),
        Reference("PersistentVolumeClaim", "models", (), by),
        Reference("Secret", "keys", (), by),
    }
    assert found.kinds == (Kind("apps/v1", "Deployment"), Kind("v1", "ConfigMap"))


def test_lists_are_opened_and_tests_and_jobs_are_brief() -> None:
    test = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "t", "annotations": {"helm.sh/hook": "test"}},
        "spec": {"containers": []},
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "CronJob",
        "metadata": {"name": "j"},
        "spec": {"jobTemplate": {"spec": {"template": {"spec": {"containers": []}}}}},
    }
    found = chart_needs.collect_needs(
        [{}, {"apiVersion": "v1", "kind": "List", "items": [test, job]}]
    )
    assert [(pod.owner, pod.is_brief) for pod in found.pods] == [
        ("Pod t", True),
        ("CronJob j", True),
    ]


@pytest.mark.parametrize("what", [{"kind": "Pod"}, {"apiVersion": "v1"}, "text"])
def test_what_is_no_object_is_refused(what: Any) -> None:
    with pytest.raises(ValueError, match="no object of Kubernetes"):
        chart_needs.collect_needs([what])
