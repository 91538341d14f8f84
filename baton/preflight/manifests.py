"""Where the objects come from: a chart that `helm template` renders, or a file with YAML.

Blocking: runs helm, bounded in time. Needs PyYAML, which comes with `baton[kubernetes]`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.errors import BatonError
from baton.preflight.needs import Object

_HELM_S = 60.0
"""For rendering; the bundled chart takes well below a second."""

_MAX_BYTES = 64 * 1024 * 1024


class PreflightError(BatonError):
    """What keeps preflight from looking at all; nothing was found out about the cluster."""


@dataclass(frozen=True)
class Release:
    """What would be installed."""

    chart: Path
    """The chart's folder or archive."""

    name: str
    """Of the release."""

    namespace: str
    """Where it would go."""

    value_files: tuple[str, ...] = ()
    """As helm's --values."""

    values: tuple[str, ...] = ()
    """As helm's --set."""


def render(release: Release, kubernetes_version: tuple[int, int]) -> tuple[Object, ...]:
    """The chart's objects, as helm would send them to a cluster of that version. Raises:
    PreflightError with helm's own words, or saying that helm is missing."""
    helm = shutil.which(os.environ.get("HELM", "helm"))
    if helm is None:
        raise PreflightError(
            "no helm on PATH; install it, name it in HELM, or give --manifests FILE"
        )
    if not release.chart.exists():
        raise PreflightError(f"--chart {release.chart}: is not there; where is Baton's helm/baton?")
    command = [helm, "template", release.name, str(release.chart)]
    command += ["--namespace", release.namespace]
    command += ["--kube-version", f"v{kubernetes_version[0]}.{kubernetes_version[1]}.0"]
    for file in release.value_files:
        command += ["--values", file]
    for value in release.values:
        command += ["--set", value]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_HELM_S, check=False)
    except subprocess.TimeoutExpired:
        raise PreflightError(f"helm took more than {_HELM_S:g} s to render the chart") from None
    if done.returncode != 0:
        words = done.stderr.decode(errors="replace").strip().splitlines()
        # helm warns first; what went wrong stands last.
        raise PreflightError(f"helm: {(words or ['failed without a word'])[-1]}")
    return parse(done.stdout.decode(errors="replace"), what="what helm rendered")


def read(file: str) -> tuple[Object, ...]:
    """The objects in that file, "-" for standard input. Raises: PreflightError."""
    if file == "-":
        text = sys.stdin.read(_MAX_BYTES)
    else:
        try:
            text = Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PreflightError(f"--manifests {file}: {error}") from error
    return parse(text, what=f"--manifests {file}")


def parse(text: str, *, what: str) -> tuple[Object, ...]:
    """The objects of a YAML text, empty ones left out. Raises: PreflightError naming `what`."""
    import yaml

    # Errors of helm's own templates can be long; one line says enough.
    try:
        documents: Sequence[object] = list(yaml.load_all(text, Loader=yaml.CSafeLoader))
    except yaml.YAMLError as error:
        raise PreflightError(f"{what}: is no YAML: {' '.join(str(error).split())}") from error
    if bad := [each for each in documents if each and not isinstance(each, dict)]:
        raise PreflightError(f"{what}: {str(bad[0])[:60]!r} is no object of Kubernetes")
    objects = tuple(each for each in documents if isinstance(each, dict) and each)
    if not objects:
        raise PreflightError(f"{what}: holds no objects")
    return objects
