"""Objects whose kinds others define: no key but those that were held against their definitions.

Seen valid, with unknown fields as errors, by the definitions of KEDA 2.12 and 2.20, the Prometheus
operator 0.65 and 0.93, cert-manager 1.13 and 1.21, the Gateway API's standard channel 1.2 and 1.6.
These are too large to lie here. So a key that is new in a template fails here, until it was looked
up and is written down.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.helm.conftest import Render
from tests.helm.test_rendered import FOREIGN, MATRIX

_ROUTE = {
    *("parentRefs[].name", "hostnames[]"),
    *("rules[].backendRefs[].name", "rules[].backendRefs[].port"),
}
KNOWN: dict[tuple[str, str], set[str]] = {
    ("cert-manager.io/v1", "Certificate"): {
        *("secretName", "duration", "renewBefore", "commonName", "dnsNames[]", "uris[]"),
        *("usages[]", "issuerRef.group", "issuerRef.kind", "issuerRef.name"),
        *("privateKey.algorithm", "privateKey.size", "privateKey.rotationPolicy"),
    },
    ("gateway.networking.k8s.io/v1", "GRPCRoute"): _ROUTE,
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): {
        *_ROUTE,
        *("rules[].matches[].path.type", "rules[].matches[].path.value"),
        "rules[].timeouts.request",  # of the standard channel since 1.2
    },
    ("keda.sh/v1alpha1", "ScaledObject"): {
        *("scaleTargetRef.apiVersion", "scaleTargetRef.kind", "scaleTargetRef.name"),
        *("minReplicaCount", "maxReplicaCount", "pollingInterval"),
        *("triggers[].type", "triggers[].metricType", "triggers[].metadata"),
        "advanced.horizontalPodAutoscalerConfig.behavior.scaleDown.stabilizationWindowSeconds",
    },
    ("monitoring.coreos.com/v1", "PodMonitor"): {
        "selector.matchLabels",
        *(f"podMetricsEndpoints[].{key}" for key in ("port", "path", "interval")),
        *(
            f"podMetricsEndpoints[].relabelings[].{key}"
            for key in ("action", "replacement", "sourceLabels[]", "targetLabel")
        ),
    },
    ("monitoring.coreos.com/v1", "PrometheusRule"): {
        "groups[].name",
        *(f"groups[].rules[].{key}" for key in ("alert", "expr", "for", "annotations", "labels")),
    },
}
NEEDED = {
    "Certificate": {"secretName", "issuerRef"},
    "GRPCRoute": {"parentRefs", "rules"},
    "HTTPRoute": {"parentRefs", "rules"},
    "PodMonitor": {"selector", "podMetricsEndpoints"},
    "PrometheusRule": {"groups"},
    "ScaledObject": {"scaleTargetRef", "triggers"},
}
# Of text to text: their keys are anybody's. metadata: KEDA's takes nothing but texts.
_MAPS = {"matchLabels", "metadata", "annotations", "labels"}


def _paths(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, dict) and path.rpartition(".")[2] in _MAPS:
        assert all(isinstance(each, str) for each in value.values()), path
        yield path
    elif isinstance(value, dict):
        assert value, path
        for key, each in value.items():
            yield from _paths(each, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        assert value, path
        for each in value:
            yield from _paths(each, f"{path}[]")
    else:
        yield path


def test_every_key_was_held_against_its_definition(render: Render) -> None:
    met: dict[tuple[str, str], set[str]] = {}
    for name, values in MATRIX.items():
        for each in render(*values):
            if each["kind"] not in FOREIGN:
                continue
            kind = (each["apiVersion"], each["kind"])
            found = set(_paths(each["spec"]))
            assert found <= KNOWN[kind], (name, kind, found - KNOWN[kind])
            assert NEEDED[each["kind"]] <= each["spec"].keys(), (name, kind)
            met.setdefault(kind, set()).update(found)
    assert met.keys() == KNOWN.keys() and {kind for _, kind in KNOWN} == FOREIGN
    for kind, found in met.items():  # no key is written down that nobody renders
        assert KNOWN[kind] - found <= {"hostnames[]"}, kind


def test_no_route_cuts_an_answer(render: Render) -> None:
    """In the Gateway API 0s is no limit; left out, it is whatever the gateway takes."""
    (route,) = [each for each in render(*MATRIX["everything"]) if each["kind"] == "HTTPRoute"]
    assert [rule["timeouts"]["request"] for rule in route["spec"]["rules"]] == ["0s"]
