"""Which connection to Kubernetes is taken, and what is said when there is none."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from process import kubernetes_config
from process.settings import SettingsError

# Its import takes a second, which only a process that runs these tests has to spend.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("kubernetes") is None, reason="needs the kubernetes client"
)

KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: here
contexts: [{name: here, context: {cluster: c, user: u, namespace: mine}}]
clusters: [{name: c, cluster: {server: "http://127.0.0.1:1"}}]
users: [{name: u, user: {}}]
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without a kubeconfig, outside of a pod."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr(kubernetes_config, "NAMESPACE_FILE", tmp_path / "namespace")
    return tmp_path


@pytest.fixture
def pod(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same inside a pod with a ServiceAccount."""
    from kubernetes import config

    def load(client_configuration: Any) -> None:
        client_configuration.host = "https://in-cluster"

    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setattr(config, "load_incluster_config", load)
    (home / "namespace").write_text("pods-own\n")
    return home


def test_the_kubeconfig_is_taken_outside_of_a_pod(home: Path) -> None:
    (home / ".kube").mkdir()
    (home / ".kube" / "config").write_text(KUBECONFIG)
    found, namespace = kubernetes_config.load()
    assert (found.host, namespace, found.retries) == ("http://127.0.0.1:1", "mine", False)


@pytest.mark.parametrize("named", ["", None])
def test_a_pod_takes_its_service_account(
    pod: Path, monkeypatch: pytest.MonkeyPatch, named: str | None
) -> None:
    """Also with a kubeconfig in its home, or an empty KUBECONFIG."""
    if named is not None:
        monkeypatch.setenv("KUBECONFIG", named)
    (pod / ".kube").mkdir()
    (pod / ".kube" / "config").write_text(KUBECONFIG)
    found, namespace = kubernetes_config.load()
    assert (found.host, namespace) == ("https://in-cluster", "pods-own")
    (pod / "namespace").unlink()
    assert kubernetes_config.load()[1] == ""


def test_a_kubeconfig_that_is_named_is_taken_in_a_pod_too(
    pod: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pod / "mine").write_text(KUBECONFIG)
    monkeypatch.setenv("KUBECONFIG", str(pod / "mine"))
    found, namespace = kubernetes_config.load()
    assert (found.host, namespace) == ("http://127.0.0.1:1", "mine")


@pytest.mark.parametrize("text", ["a: [", "a: b", None])
def test_a_kubeconfig_that_does_not_work_is_one_line(
    home: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    file = home / "broken"
    if text is not None:
        file.write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(file))
    with pytest.raises(SettingsError) as caught:
        kubernetes_config.load()
    assert "\n" not in str(caught.value) and "kubectl config" in str(caught.value)
