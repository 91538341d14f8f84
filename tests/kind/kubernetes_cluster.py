"""A Kubernetes cluster under test: kubectl and helm in one namespace, load from inside of it.

All calls are bounded in time and say what the tool said when it failed. Knows the chart's names,
and nothing of how the cluster came to be.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "baton"
VALUES = Path(__file__).parent / "values.yaml"

_SAFE = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "runAsUser": 65532,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


class ToolFailed(AssertionError):
    """kubectl or helm said no."""


def run(*command: str, timeout_s: float = 120.0, stdin: str = "") -> str:
    """What the command printed. Raises: ToolFailed with what it said."""
    try:
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise ToolFailed(f"{' '.join(command)}: no end within {timeout_s:g} s") from None
    if done.returncode != 0:
        raise ToolFailed(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


@dataclass(frozen=True)
class Load:
    """What `baton bench serve` said of a load from inside the cluster."""

    num_served: int
    """Requests answered in full."""

    failures: list[Any]
    """The others, by kind."""


@dataclass(frozen=True)
class KubernetesCluster:
    """See the module."""

    context: str
    """Of kubectl's configuration."""

    namespace: str
    """Of the release, which has one to itself."""

    release: str = "baton"
    """Helm's."""

    def kubectl(self, *arguments: str, timeout_s: float = 120.0, stdin: str = "") -> str:
        """In this context and namespace."""
        where = ("--context", self.context, "--namespace", self.namespace)
        return run("kubectl", *where, *arguments, timeout_s=timeout_s, stdin=stdin)

    def helm(self, *arguments: str, timeout_s: float = 120.0) -> str:
        """In this context and namespace."""
        where = ("--kube-context", self.context, "--namespace", self.namespace)
        return run(os.environ.get("HELM", "helm"), *arguments, *where, timeout_s=timeout_s)

    def upgrade(self, *values: str) -> None:
        """Install the chart, or change its values, and wait until all of it is ready."""
        sets = [word for value in values for word in ("--set", value)]
        chart = (self.release, str(CHART), "--values", str(VALUES))
        self.helm("upgrade", "--install", *chart, *sets)
        self.wait_ready()

    def names(self, kind: str, component: str = "") -> list[str]:
        """Of all objects of that kind, or of those of one component."""
        selector = f"app.kubernetes.io/instance={self.release}"
        if component:
            selector += f",app.kubernetes.io/component={component}"
        listed = self.kubectl("get", kind, "--selector", selector, "--output", "name")
        return [line.partition("/")[2] for line in listed.splitlines()]

    def get(self, kind: str, name: str) -> Any:
        """One object, as JSON has it."""
        return json.loads(self.kubectl("get", kind, name, "--output", "json"))

    def wait_ready(self, timeout_s: float = 300.0) -> None:
        """Until every Deployment and StatefulSet has rolled out, and no pod of before is left."""
        for kind in ("statefulset", "deployment"):
            for name in self.names(kind):
                limit = f"--timeout={timeout_s:g}s"
                self.kubectl("rollout", "status", f"{kind}/{name}", limit, timeout_s=timeout_s + 10)

    def wait(self, what: str, is_true: Callable[[], bool], timeout_s: float = 180.0) -> None:
        """Poll until it is true. Raises: AssertionError naming `what`, with the pods there are."""
        deadline_s = time.monotonic() + timeout_s
        while not is_true():
            if time.monotonic() > deadline_s:
                pods = self.kubectl("get", "pods", "--output", "wide")
                raise AssertionError(f"not within {timeout_s:g} s: {what}\n{pods}")
            time.sleep(1.0)

    @contextlib.contextmanager
    def forward(self, service: str, port: int) -> Iterator[str]:
        """host:port on this machine that leads to the service's port."""
        command = ["kubectl", "--context", self.context, "--namespace", self.namespace]
        command += ["port-forward", f"service/{service}", f":{port}"]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT) as process:
            try:
                yield f"127.0.0.1:{_forwarded_port(process)}"
            finally:
                process.terminate()

    @contextlib.contextmanager
    def load(self, name: str, *options: str, timeout_s: float = 600.0) -> Iterator[list[Load]]:
        """`baton bench serve` with these options, in a pod, while the block runs; afterwards the
        list holds what came of it.

        Only inside does a client see what clients see: a Service whose pods come and go.
        """
        image = self._image_of("router")
        address = f"{self.release}-router.{self.namespace}.svc:8500"
        arguments = ["bench", "serve", "--json", "--address", address, *options]
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name},
            "spec": {
                "restartPolicy": "Never",
                "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
                "containers": [
                    {
                        "name": "load",
                        "image": image,
                        "imagePullPolicy": "Never",
                        "command": ["baton", *arguments],
                        "resources": {"limits": {"cpu": "500m", "memory": "512Mi"}},
                        "securityContext": _SAFE,
                        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
                    }
                ],
                "volumes": [{"name": "tmp", "emptyDir": {}}],
            },
        }
        self.kubectl("apply", "--filename", "-", stdin=yaml.safe_dump(pod))
        found: list[Load] = []
        try:
            self.wait(f"pod {name} runs", lambda: self._phase(name) != "Pending")
            yield found
            ends = ("Succeeded", "Failed")
            self.wait(f"load {name} ends", lambda: self._phase(name) in ends, timeout_s)
            lines = self.kubectl("logs", name).strip().splitlines()
            # Its exit code is not 0 when nothing was served, too; what it says counts.
            if not (lines and lines[-1].startswith("{")):
                raise ToolFailed(f"load {name}: {' '.join(lines[-5:])}")
            result = json.loads(lines[-1])
            found.append(Load(result["num_served"], result["failures"]))
        finally:
            self.kubectl("delete", "pod", name, "--ignore-not-found", "--grace-period=1")

    def _phase(self, pod: str) -> str:
        return str(self.get("pod", pod)["status"].get("phase", "Pending"))

    def _image_of(self, component: str) -> str:
        deployment = self.get("deployment", f"{self.release}-{component}")
        return str(deployment["spec"]["template"]["spec"]["containers"][0]["image"])


def _forwarded_port(process: subprocess.Popen[bytes]) -> int:
    """What kubectl says that it took. Raises: ToolFailed with what it said instead."""
    assert process.stdout is not None
    said = b""
    deadline_s = time.monotonic() + 30.0
    while time.monotonic() < deadline_s and process.poll() is None:
        if select.select([process.stdout], [], [], 1.0)[0]:
            said += os.read(process.stdout.fileno(), 4096)
            if found := re.search(rb"Forwarding from 127\.0\.0\.1:(\d+)", said):
                return int(found[1])
    raise ToolFailed(f"kubectl port-forward: {said.decode(errors='replace').strip()}")
