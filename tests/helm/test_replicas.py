"""Who scales has the say about replicas, whatever helm does: the real helm, against as much of an
API server as it asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import LONG, TURN
from tests.helm import fake_cluster
from tests.helm.conftest import CHART, NAMESPACE, Render, of_kind
from tests.helm.fake_cluster import FakeCluster

PLANNERS = ("autoscaler", "hpa") if LONG else ("autoscaler", "hpa")[TURN % 2 :][:1]
"""Each upgrade is a start of helm: a short run takes one of them."""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    """Of helm's own: neither a user's credentials nor what helm keeps of other clusters."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with fake_cluster.running() as running:
        yield running


class Release:
    """One, in that cluster."""

    def __init__(self, helm: Callable[..., str], cluster: FakeCluster) -> None:
        self._helm = helm
        self._cluster = cluster

    def put(self, *values: str) -> None:
        """Install it, or upgrade it."""
        options = ["--install", "--disable-openapi-validation"]
        options += [option for value in values for option in ("--set", value)]
        self._run("upgrade", options, str(CHART))

    def roll_back(self, revision: int) -> None:
        self._run("rollback", [], str(revision))

    def scale(self, num_workers: int) -> None:
        """As a scaler does."""
        for role in ("prefill", "decode"):
            name = f"baton-{role}"
            self._cluster.deployment(name, NAMESPACE)["spec"]["replicas"] = num_workers

    @property
    def num_workers(self) -> int:
        """Of each pool."""
        found = {
            self._cluster.deployment(f"baton-{role}", NAMESPACE)["spec"]["replicas"]
            for role in ("prefill", "decode")
        }
        (num_workers,) = found
        return int(num_workers)

    def _run(self, command: str, options: list[str], what: str) -> None:
        place = ["--kube-apiserver", self._cluster.address, "--namespace", NAMESPACE]
        self._helm(command, *options, *place, "baton", what)


@pytest.fixture
def release(helm: Callable[..., str], cluster: FakeCluster) -> Release:
    return Release(helm, cluster)


FIXED = ("prefill.replicas=3", "decode.replicas=3")


@pytest.mark.parametrize("by", PLANNERS)
def test_a_release_that_was_always_scaled_is_never_set_back(release: Release, by: str) -> None:
    release.put(f"scaling.by={by}", *FIXED)
    assert release.num_workers == 1
    release.scale(4)
    release.put(f"scaling.by={by}", *FIXED, "logLevel=debug")
    assert release.num_workers == 4
    release.scale(2)
    release.roll_back(1)
    assert release.num_workers == 2
    release.put(f"scaling.by={by}", *FIXED)
    assert release.num_workers == 2


@pytest.mark.parametrize("by", PLANNERS)
def test_turning_scaling_on_takes_no_worker_away(release: Release, by: str) -> None:
    release.put(*FIXED)
    assert release.num_workers == 3
    release.put(f"scaling.by={by}")
    assert release.num_workers == 3
    release.scale(4)
    release.put(f"scaling.by={by}", "logLevel=debug")
    assert release.num_workers == 4
    # What a rollback of such a release does: the number of that revision.
    release.roll_back(2)
    assert release.num_workers == 3
    release.put(*FIXED)  # and off again
    assert release.num_workers == 3


def test_an_hpa_that_takes_over_from_none_is_woken(release: Release) -> None:
    idle = ("scaling.prefill.min=0", "scaling.decode.min=0")
    release.put("scaling.by=autoscaler", *idle)
    release.scale(0)
    release.put("scaling.by=autoscaler", *idle, "logLevel=debug")
    assert release.num_workers == 0
    release.put("scaling.by=hpa", *idle)
    assert release.num_workers == 1


def test_rendered_without_a_cluster_nothing_is_said(render: Render) -> None:
    """Or each synchronisation of Argo CD and its like would set it back."""
    for by in ("autoscaler", "keda", "hpa"):
        deployments = of_kind(render(f"scaling.by={by}", *FIXED), "Deployment")
        for role in ("prefill", "decode"):
            made = deployments[f"baton-{role}"]
            assert "replicas" not in made["spec"]
            assert made["metadata"]["annotations"] == {"baton/replicas": "scaler"}
    fixed = of_kind(render(*FIXED), "Deployment")["baton-decode"]
    assert fixed["spec"]["replicas"] == 3 and "annotations" not in fixed["metadata"]
