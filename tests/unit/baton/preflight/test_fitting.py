"""Room on nodes: what is placed fits, what is left out could not have been placed."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from baton.preflight import checks
from baton.preflight.chart_needs import PodNeed
from baton.preflight.cluster import Node, Taint

_GIB = 2**30


def _pod(owner: str, num_pods: int = 1, **more: Any) -> PodNeed:
    requests = more.pop("requests", {"cpu": "1", "memory": "1Gi"})
    container = {"name": "c", "resources": {"requests": requests}}
    return PodNeed(owner, num_pods, {"containers": [container], **more})


def _node(name: str, cpu: float, memory: float, **more: Any) -> Node:
    return Node(name, {"cpu": cpu, "memory": memory * _GIB, "pods": 110.0}, **more)


def test_all_find_room() -> None:
    assert checks.place([_pod("a", 3)], [_node("x", 2, 8), _node("y", 1, 8)]) == ()


def test_what_is_short_is_named_with_what_is_left() -> None:
    (left,) = checks.place([_pod("a", 3)], [_node("x", 2, 8)])
    assert (left.owner, left.num_pods) == ("a", 1)
    assert left.why == "asks for 1 cores, the most that a node has left is 0 cores"


def test_what_others_asked_for_is_not_free() -> None:
    node = _node("x", 2, 8, requested={"cpu": 1.5})
    (left,) = checks.place([_pod("a")], [node])
    assert "the most that a node has left is 0.5 cores" in left.why


def test_a_pod_of_a_daemonset_takes_room_on_each_node() -> None:
    nodes = [_node("x", 2, 8), _node("y", 2, 8)]
    (left,) = checks.place([_pod("a", 4), _pod("each", 0)], nodes)
    assert (left.owner, left.num_pods) == ("a", 2)


def test_a_node_without_huge_pages_keeps_a_daemonset_s_pod_waiting() -> None:
    """It takes nothing there then."""
    asked = {"cpu": "1", "memory": "1Gi", "hugepages-2Mi": "4Gi"}
    nodes = [_node(name, 2, 8) for name in "wxyz"]
    with_pages = Node("v", {**nodes[0].allocatable, "hugepages-2Mi": 4.0 * _GIB})
    (left,) = checks.place([_pod("each", 0, requests=asked), _pod("a", 9)], [with_pages, *nodes])
    assert (left.owner, left.num_pods) == ("each", 4)
    assert left.why == (
        "asks for 4.0 GiB hugepages-2Mi, the most that a node has left is 0.0 GiB hugepages-2Mi "
        "(on w, x, y, ...)"
    )


@pytest.mark.parametrize(
    ("pod", "is_taken"),
    [
        ({}, False),
        ({"tolerations": [{"operator": "Exists"}]}, True),
        ({"tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}]}, True),
        ({"tolerations": [{"key": "gpu", "value": "yes"}]}, True),
        ({"tolerations": [{"key": "gpu", "value": "no"}]}, False),
        ({"tolerations": [{"key": "gpu", "value": "yes", "effect": "NoExecute"}]}, False),
    ],
)
def test_taints_keep_out_who_does_not_tolerate_them(pod: dict[str, Any], is_taken: bool) -> None:
    node = _node("x", 2, 8, taints=(Taint("gpu", "yes", "NoSchedule"),))
    left = checks.place([_pod("a", **pod)], [node])
    assert (not left) is is_taken
    if left:
        assert left[0].why == "its nodeSelector, affinity or tolerations suit no node"


@pytest.mark.parametrize(
    ("pod", "is_taken"),
    [
        ({"nodeSelector": {"zone": "a"}}, True),
        ({"nodeSelector": {"zone": "b"}}, False),
        ([{"key": "zone", "operator": "In", "values": ["a", "b"]}], True),
        ([{"key": "zone", "operator": "NotIn", "values": ["a"]}], False),
        ([{"key": "zone", "operator": "Exists"}, {"key": "x", "operator": "Exists"}], False),
        ([{"key": "x", "operator": "DoesNotExist"}], True),
    ],
)
def test_labels_decide_where_a_pod_may_go(pod: Any, is_taken: bool) -> None:
    if isinstance(pod, list):
        terms = {"nodeSelectorTerms": [{"matchExpressions": pod}]}
        required = {"requiredDuringSchedulingIgnoredDuringExecution": terms}
        pod = {"affinity": {"nodeAffinity": required}}
    node = _node("x", 2, 8, labels={"zone": "a"})
    assert (not checks.place([_pod("a", **pod)], [node])) is is_taken


def test_a_node_that_is_not_ready_does_not_count() -> None:
    (left,) = checks.place([_pod("a")], [_node("x", 2, 8, is_ready=False)])
    assert left.why == "no node is ready"


def test_devices_come_first_and_are_not_taken_by_others() -> None:
    gpu = {"cpu": "1", "memory": "1Gi", "nvidia.com/gpu": "1"}
    with_gpu = Node("g", {"cpu": 1.0, "memory": 4 * _GIB, "pods": 110.0, "nvidia.com/gpu": 1.0})
    pods = [_pod("plain"), _pod("gpu", requests=gpu)]
    assert checks.place(pods, [with_gpu, _node("x", 1, 4)]) == ()


def test_nothing_is_said_to_fit_that_cannot(seed: int) -> None:
    """Against trying every way: what is called possible is possible."""
    rng = random.Random(seed)
    num_left_out = 0
    for _ in range(300):
        nodes = [_node(f"n{i}", rng.randint(1, 4), 64) for i in range(rng.randint(1, 3))]
        asks = [rng.randint(1, 3) for _ in range(rng.randint(1, 5))]
        pods = [
            _pod(f"p{i}", requests={"cpu": str(ask), "memory": "1Gi"}) for i, ask in enumerate(asks)
        ]
        ways = itertools.product(range(len(nodes)), repeat=len(asks))
        is_possible = any(
            all(
                sum(ask for ask, at in zip(asks, way, strict=True) if at == i)
                <= node.allocatable["cpu"]
                for i, node in enumerate(nodes)
            )
            for way in ways
        )
        left_out = checks.place(pods, nodes)
        assert is_possible or left_out, f"{seed=}"
        num_left_out += bool(left_out)
    assert 0 < num_left_out < 300, "both happen"
