"""The real helm, and what it makes of the chart with some values."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).parents[2] / "helm" / "baton"
KUBERNETES = "1.34.0"
NAMESPACE = "models"

Objects = list[dict[str, Any]]
Render = Callable[..., Objects]


class Refused(Exception):
    """What helm said."""


def find_helm() -> str | None:
    return os.environ.get("HELM") or shutil.which("helm")


@pytest.fixture(scope="session")
def helm() -> Callable[..., str]:
    """Runs helm with arguments: what it printed. Raises: Refused with what it said."""
    program = find_helm()
    if program is None:
        pytest.skip("no helm: install it, or name it in $HELM; the chart was NOT tested")

    def run(*arguments: str) -> str:
        result = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=60, check=False
        )
        if result.returncode:
            raise Refused(result.stderr.strip() or result.stdout.strip())
        return result.stdout

    return run


@pytest.fixture(scope="session")
def render(helm: Callable[..., str]) -> Render:
    """Objects of the chart with `--set` values, to look at only; `release`: its name."""

    @functools.cache
    def made(*values: str, release: str = "baton", files: Sequence[Path] = ()) -> Objects:
        options = ["--kube-version", KUBERNETES, "--namespace", NAMESPACE]
        for value in values:
            options += ["--set", value]
        for file in files:
            options += ["--values", str(file)]
        text = helm("template", release, str(CHART), *options)
        return [each for each in yaml.load_all(text, Loader=yaml.CSafeLoader) if each]

    return made


def of_kind(objects: Objects, kind: str) -> dict[str, dict[str, Any]]:
    """Objects of a kind, by name."""
    return {each["metadata"]["name"]: each for each in objects if each["kind"] == kind}


def pod_specs(objects: Objects) -> dict[str, dict[str, Any]]:
    """Of everything that runs pods, by kind and name."""
    found = {}
    for each in objects:
        spec = each.get("spec", {})
        if each["kind"] == "CronJob":
            spec = spec["jobTemplate"]["spec"]
        pod = spec if each["kind"] == "Pod" else spec.get("template", {}).get("spec")
        if pod:
            found[f"{each['kind']}/{each['metadata']['name']}"] = pod
    return found


def containers(pod: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """All of a pod, by name."""
    return {each["name"]: each for each in pod.get("initContainers", []) + pod["containers"]}


def data_of(objects: Objects, name: str) -> dict[str, str]:
    """Of a ConfigMap."""
    found: dict[str, str] = of_kind(objects, "ConfigMap")[name]["data"]
    return found


BYTES = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def num_bytes(quantity: str | int) -> int:
    """Of a quantity of memory."""
    text = str(quantity)
    number = text.rstrip("KMGTi")
    return round(float(number) * BYTES[text[len(number) :]])


def num_cores(quantity: str | float) -> float:
    """Of a quantity of CPU."""
    text = str(quantity)
    return float(text[:-1]) / 1000 if text.endswith("m") else float(text)
