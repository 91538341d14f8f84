"""The cluster of these tests: one that kind makes, with images built from this checkout in it.

    make kind                            # makes it, runs the tests, removes it
    BATON_KIND_KEEP=1 make kind          # leaves it for a look
    BATON_KIND_CONTEXT=NAME make kind    # a cluster of yours instead, which has the images already

Without docker, kind, kubectl or helm all of it is skipped, and says so.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.kind.kubernetes_cluster import CHART, ROOT, KubernetesCluster, ToolFailed, run

_NAME = "baton-test"
_TARGETS = ("control", "worker-cpu")
_BUILD_S = 3600.0


def _missing() -> str:
    """Why no cluster can be made or used here; empty: it can."""
    if os.environ.get("BATON_KIND") != "1":
        return "needs a Kubernetes cluster: `make kind` makes one and runs them"
    is_given = bool(os.environ.get("BATON_KIND_CONTEXT"))
    tools = ["kubectl", os.environ.get("HELM", "helm"), *([] if is_given else ["docker", "kind"])]
    absent = [tool for tool in tools if shutil.which(tool) is None]
    if absent:
        return f"NOT TESTED on Kubernetes: {', '.join(absent)} is not installed"
    if not is_given and subprocess.run(["docker", "info"], capture_output=True).returncode:
        return "NOT TESTED on Kubernetes: no docker daemon answers here"
    return ""


@pytest.fixture(scope="session")
def context() -> Iterator[str]:
    """The name of a context whose cluster has the images."""
    if why := _missing():
        pytest.skip(why)
    given = os.environ.get("BATON_KIND_CONTEXT")
    if given:
        yield given
        return
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    images = [f"baton/{target}:{project['version']}" for target in _TARGETS]
    for target, image in zip(_TARGETS, images, strict=True):
        index = f"TORCH_INDEX_URL={os.environ.get('TORCH_INDEX_URL', '')}"
        build = ("docker", "build", "--target", target, "--build-arg", index)
        run(*build, "--tag", image, str(ROOT), timeout_s=_BUILD_S)
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    redis = "{repository}:{tag}".format(**values["images"]["redis"])
    run("docker", "pull", redis, timeout_s=_BUILD_S)
    if _NAME not in run("kind", "get", "clusters").split():
        config = str(Path(__file__).parent / "cluster.yaml")
        run("kind", "create", "cluster", "--name", _NAME, "--config", config, timeout_s=600)
    try:
        run("kind", "load", "docker-image", "--name", _NAME, *images, redis, timeout_s=_BUILD_S)
        yield f"kind-{_NAME}"
    finally:
        if not os.environ.get("BATON_KIND_KEEP"):
            run("kind", "delete", "cluster", "--name", _NAME, timeout_s=300)


@pytest.fixture(scope="module")
def cluster(context: str) -> Iterator[KubernetesCluster]:
    """A namespace that lets only restricted pods in, with the release in it."""
    name = os.environ.get("BATON_KIND_NAMESPACE", "baton-kind")
    made = KubernetesCluster(context, name)
    level = "pod-security.kubernetes.io/enforce=restricted"
    made.kubectl("create", "namespace", name)
    made.kubectl("label", "namespace", name, level)
    try:
        yield made
    finally:
        with contextlib.suppress(ToolFailed):  # the last test has done it already
            made.helm("uninstall", made.release)
        made.kubectl("delete", "namespace", name, timeout_s=300)
