"""Who scales, of what the chart makes: it is told the truth once, by those that may tell it, and
leaves a worker where nothing could wake one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helm.conftest import Render, of_kind
from tests.helm.test_meaning import _lets, loaded

PLANNERS = ("autoscaler", "keda", "hpa")


def test_a_flip_is_waited_for_as_long_as_a_worker_may_drain(render: Render, tmp_path: Path) -> None:
    """Or the autoscaler forgets it while it goes on, and takes the next worker, too."""
    for values, drain_s in (((), 120), (("prefill.drainSeconds=400",), 400)):
        objects = render("scaling.by=autoscaler", *values)
        told = loaded(objects, "Deployment/baton-autoscaler", "autoscaler", tmp_path)
        assert told.flip_timeout_s >= drain_s + 30


@pytest.mark.parametrize("by", PLANNERS)
def test_of_several_autoscalers_the_lease_says_which_one_speaks(
    render: Render, tmp_path: Path, by: str
) -> None:
    """An HPA takes the sum of all series that it finds: of two pods it would be twice the plan. So
    they have a Lease also where others act, and may write that one, and no other."""
    objects = render(f"scaling.by={by}", "autoscaler.replicas=2")
    spec = of_kind(objects, "Deployment")["baton-autoscaler"]["spec"]
    assert spec["replicas"] == 2 and "strategy" not in spec
    told = loaded(objects, "Deployment/baton-autoscaler", "autoscaler", tmp_path)
    name = f"{told.kubernetes.lease_name}{'' if told.act else '-advice'}"
    rules = of_kind(objects, "Role")["baton-autoscaler"]["rules"]
    (rule,) = [rule for rule in rules if rule["resources"] == ["leases"]]
    # It is made by the release and goes with it: the autoscaler may create none that would stay.
    assert (rule["resourceNames"], rule["verbs"]) == ([name], ["get", "update"])
    (lease,) = of_kind(objects, "Lease").values()
    assert lease["metadata"]["name"] == name and "spec" not in lease
    assert lease["metadata"]["labels"]["app.kubernetes.io/instance"] == "baton"


def test_an_hpa_looks_at_its_own_release(render: Render) -> None:
    objects = render("scaling.by=hpa", "monitoring.podMonitor.enabled=true", release="mine")
    for role in ("prefill", "decode"):
        hpa = of_kind(objects, "HorizontalPodAutoscaler")[f"mine-baton-{role}"]
        (metric,) = hpa["spec"]["metrics"]
        labels = metric["external"]["metric"]["selector"]["matchLabels"]
        assert labels == {"role": role, "namespace": "models", "release": "mine"}
    monitor = of_kind(objects, "PodMonitor")["mine-baton-monitoring"]
    for endpoint in monitor["spec"]["podMetricsEndpoints"]:
        (made,) = [each for each in endpoint["relabelings"] if each["targetLabel"] == "release"]
        assert made["replacement"] == "mine"


def test_an_hpa_is_never_left_with_no_worker(render: Render) -> None:
    """From 0 it wakes nobody."""
    none = [f"scaling.{role}.min=0" for role in ("prefill", "decode")]
    none += [f"{role}.replicas=0" for role in ("prefill", "decode")]
    for by in PLANNERS:
        objects = render(f"scaling.by={by}", *none)
        deployments = of_kind(objects, "Deployment")
        for role in ("prefill", "decode"):
            # Nothing is said, so the API server makes it 1; test_replicas.py has what is there.
            assert "replicas" not in deployments[f"baton-{role}"]["spec"], by
            hpa = of_kind(objects, "HorizontalPodAutoscaler").get(f"baton-{role}")
            assert (hpa is not None) == (by == "hpa")
            assert hpa is None or hpa["spec"]["minReplicas"] == 1


def test_only_keda_reaches_the_autoscaler(render: Render) -> None:
    for by in PLANNERS:
        policy = of_kind(render(f"scaling.by={by}"), "NetworkPolicy")["baton-autoscaler"]
        rules = [
            rule["from"]
            for rule in policy["spec"]["ingress"]
            if 8530 in [each["port"] for each in rule["ports"]]
        ]
        keda = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "keda"}}}
        assert rules == ([[keda]] if by == "keda" else []), by
        assert not _lets(policy, "decode", 8530)
        assert _lets(policy, "stranger", 9100)
    named = "networkPolicy.kedaFrom[0].namespaceSelector.matchLabels.team=scaling"
    policy = of_kind(render("scaling.by=keda", named), "NetworkPolicy")["baton-autoscaler"]
    assert "'team': 'scaling'" in str(policy) and "'keda'" not in str(policy)
