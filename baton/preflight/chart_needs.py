"""The objects of a Helm chart (pods, services, ...), and what they need of a cluster.

The objects come from a chart that `helm template` renders, or from a file with YAML (which needs
PyYAML, of `baton[kubernetes]`). All else is pure and takes objects as dicts. It knows the kinds of
Kubernetes and no key of Baton's chart: what the chart or a user's values ask for is seen here as
the API server will see it. Each pod counts as often as its owner wants it.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.errors import BatonError

Object = Mapping[str, Any]
"""One object of Kubernetes, as its YAML has it."""
Amounts = Mapping[str, float]
"""Amounts by resource, in cores, bytes, or a count."""

_HELM_S = 60.0
"""Limit of a rendering; the bundled chart takes well below a second."""
_MAX_BYTES = 64 * 1024 * 1024


class PreflightError(BatonError):
    """Preflight could not look at the chart or at the cluster, so it found out nothing."""


@dataclass(frozen=True)
class Release:
    """The release of the chart that would be installed."""

    chart: Path
    """Folder or archive of the chart."""

    name: str
    """Name of the release."""

    namespace: str
    """Namespace that the release would be installed into."""

    value_files: tuple[str, ...] = ()
    """Files of values, as helm's --values."""

    values: tuple[str, ...] = ()
    """Single values, as helm's --set."""


def render(release: Release, kubernetes_version: tuple[int, int]) -> tuple[Object, ...]:
    """Render the chart's objects, as helm would send them to a cluster of this version. Blocking,
    at most 60 s.

    Raises: PreflightError with helm's own words, or that helm is missing.
    """
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
    """Read the Kubernetes objects in a file; "-" is standard input. Raises: PreflightError."""
    if file == "-":
        text = sys.stdin.read(_MAX_BYTES)
    else:
        try:
            text = Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PreflightError(f"--manifests {file}: {error}") from error
    return parse(text, what=f"--manifests {file}")


def parse(text: str, *, what: str) -> tuple[Object, ...]:
    """Parse the Kubernetes objects of a YAML text; empty ones are left out. Raises: PreflightError
    naming `what`."""
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


# -- quantities

_FACTORS: dict[str, float] = {
    **{unit: 1024 ** (power + 1) for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi"))},
    **{unit: 1000 ** (power + 1) for power, unit in enumerate(("k", "M", "G", "T", "P"))},
    "n": 1e-9,
    "u": 1e-6,
    "m": 1e-3,
}


def parse_quantity(text: str | int | float) -> float:
    """Parse a quantity as Kubernetes writes it. Returns: cores, bytes or a count. Raises:
    ValueError."""
    written = str(text).strip()
    for unit in sorted(_FACTORS, key=len, reverse=True):
        if written.endswith(unit):
            return float(written.removesuffix(unit)) * _FACTORS[unit]
    return float(written)


def parse_quantities(amounts: Mapping[str, str | int | float]) -> dict[str, float]:
    """Parse a map of quantities by resource, such as `requests`, `limits` or `allocatable`."""
    return {name: parse_quantity(amount) for name, amount in amounts.items()}


def total(*parts: Amounts) -> dict[str, float]:
    """Add up amounts, resource by resource."""
    names = dict.fromkeys(itertools.chain(*parts))
    return {name: sum(part.get(name, 0.0) for part in parts) for name in names}


def most(*parts: Amounts) -> dict[str, float]:
    """The largest amount of each resource among several amounts."""
    names = dict.fromkeys(itertools.chain(*parts))
    return {name: max(part.get(name, 0.0) for part in parts) for name in names}


def format_amount(name: str, amount: float) -> str:
    """Write an amount with its unit, such as "1.5 cores", "4.0 GiB memory", "2 nvidia.com/gpu"."""
    if name == "cpu":
        return f"{amount:.2g} cores" if amount < 10 else f"{amount:.0f} cores"
    if name in ("memory", "ephemeral-storage") or name.startswith("hugepages-"):
        return f"{amount / 2**30:.1f} GiB {name}"
    return f"{amount:g} {name}"


# -- needs

_TEMPLATES = {
    "Deployment": ("spec", "template"),
    "StatefulSet": ("spec", "template"),
    "ReplicaSet": ("spec", "template"),
    "DaemonSet": ("spec", "template"),
    "Job": ("spec", "template"),
    "CronJob": ("spec", "jobTemplate", "spec", "template"),
}


@dataclass(frozen=True)
class Kind:
    """One kind of Kubernetes objects."""

    api_version: str
    """API group and version, such as apps/v1."""

    name: str
    """Name of the kind, such as Deployment."""

    @property
    def group(self) -> str:
        """API group, such as apps; empty for the core."""
        return self.api_version.rpartition("/")[0]


@dataclass(frozen=True)
class PodNeed:
    """The pods of one owner, such as a Deployment, and what they need of a node."""

    owner: str
    """Owner of the pods, such as Deployment baton-decode."""

    num_pods: int
    """Number of pods that run at once; 0: one on each node."""

    spec: Object = field(repr=False)
    """Spec of the pods, as Kubernetes has it."""

    is_brief: bool = False
    """Whether the pods belong to a job or a test, which needs room for a moment only."""

    starts_new_first: bool = False
    """Whether a rolling update starts a new pod before it ends an old one: it needs room for one
    more."""

    @property
    def containers(self) -> tuple[Object, ...]:
        """All containers of a pod: init containers, then containers."""
        return (*(self.spec.get("initContainers") or ()), *(self.spec.get("containers") or ()))

    @property
    def images(self) -> tuple[str, ...]:
        """The images of its containers, each once."""
        return tuple(dict.fromkeys(str(each.get("image", "")) for each in self.containers))

    @property
    def requests(self) -> dict[str, float]:
        """Amounts that a node must have free for one pod, as the scheduler counts: the larger of
        two sums: all containers and sidecars; or one init container and the sidecars that start
        before it."""
        sidecars: dict[str, float] = {}
        largest_before: dict[str, float] = {}
        for each in self.spec.get("initContainers") or ():
            asked = _asked(each)
            if each.get("restartPolicy") == "Always":
                sidecars = total(sidecars, asked)
            else:
                largest_before = most(largest_before, total(sidecars, asked))
        running = total(sidecars, *map(_asked, self.spec.get("containers") or ()))
        return most(running, largest_before)


@dataclass(frozen=True)
class Reference:
    """An object that a pod names and that is not among these objects."""

    kind: str
    """Kind of the object: Secret, ConfigMap, PersistentVolumeClaim, ServiceAccount or
    PriorityClass."""

    name: str
    keys: tuple[str, ...] = ()
    """Keys that the object must have."""

    needed_by: str = ""
    """The owner of the pod, such as Deployment baton-decode."""


@dataclass(frozen=True)
class Needs:
    """The needs of a chart's objects: kinds, pods, and objects that they refer to."""

    kinds: tuple[Kind, ...]
    """Kinds of the objects, each once, in the order of the objects."""

    pods: tuple[PodNeed, ...]
    """The pods of all owners."""

    references: tuple[Reference, ...]
    """Objects that pods refer to, each once."""

    objects: tuple[Object, ...] = field(repr=False, default=())
    """The objects themselves."""


def collect_needs(objects: Iterable[Object]) -> Needs:
    """Collect what Kubernetes objects need of a cluster: their kinds, their pods, and objects that
    pods name but that are not among them. Raises: ValueError naming an entry without `kind` or
    `apiVersion`."""
    objects = tuple(_flat(objects))
    kinds = dict.fromkeys(Kind(str(each["apiVersion"]), str(each["kind"])) for each in objects)
    pods = tuple(pod for each in objects if (pod := _pod(each)) is not None)
    have = {(each["kind"], _name(each)) for each in objects}
    missing: dict[tuple[str, str], Reference] = {}
    for pod in pods:
        for found in _references(pod):
            if (found.kind, found.name) in have:
                continue
            before = missing.get((found.kind, found.name), found)
            keys = tuple(dict.fromkeys((*before.keys, *found.keys)))
            missing[found.kind, found.name] = Reference(
                found.kind, found.name, keys, before.needed_by
            )
    return Needs(tuple(kinds), pods, tuple(missing.values()), objects)


def _flat(objects: Iterable[Object]) -> Iterator[Object]:
    for each in objects:
        if not each:
            continue  # a template that rendered to nothing
        if not (isinstance(each, Mapping) and each.get("kind") and each.get("apiVersion")):
            raise ValueError(f"no object of Kubernetes: {str(each)[:80]!r}")
        if each["kind"] == "List":
            yield from _flat(each.get("items") or ())
        else:
            yield each


def _name(object_: Object) -> str:
    return str((object_.get("metadata") or {}).get("name", ""))


def _pod(object_: Object) -> PodNeed | None:
    kind, owner = str(object_["kind"]), f"{object_['kind']} {_name(object_)}"
    annotations = (object_.get("metadata") or {}).get("annotations") or {}
    is_hook = "helm.sh/hook" in annotations
    if kind == "Pod":
        return PodNeed(owner, 1, object_.get("spec") or {}, is_brief=is_hook)
    if kind not in _TEMPLATES:
        return None
    template: Any = object_
    for key in _TEMPLATES[kind]:
        template = template.get(key) or {}
    spec = object_.get("spec") or {}
    is_job = kind in ("Job", "CronJob")
    num_pods = 0 if kind == "DaemonSet" else 1 if is_job else int(spec.get("replicas", 1))
    return PodNeed(
        owner,
        num_pods,
        template.get("spec") or {},
        is_brief=is_hook or is_job,
        starts_new_first=kind == "Deployment" and _starts_new_first(spec, num_pods),
    )


def _starts_new_first(spec: Object, num_pods: int) -> bool:
    """By `strategy` of a Deployment, with Kubernetes' defaults; a share of pods is rounded down."""
    strategy = spec.get("strategy") or {}
    if strategy.get("type", "RollingUpdate") != "RollingUpdate" or num_pods == 0:
        return False
    unavailable = str((strategy.get("rollingUpdate") or {}).get("maxUnavailable", "25%"))
    if unavailable.endswith("%"):
        return num_pods * int(unavailable.removesuffix("%")) < 100
    return int(unavailable) == 0


def _asked(container: Object) -> dict[str, float]:
    resources = container.get("resources") or {}
    # Where only a limit is given it is the request, too.
    asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return parse_quantities(asked)


def _references(pod: PodNeed) -> Iterator[Reference]:
    spec, owner = pod.spec, pod.owner
    for pull in spec.get("imagePullSecrets") or ():
        yield Reference("Secret", str(pull["name"]), (".dockerconfigjson",), owner)
    if spec.get("priorityClassName"):
        yield Reference("PriorityClass", str(spec["priorityClassName"]), (), owner)
    if spec.get("serviceAccountName", "default") != "default":
        yield Reference("ServiceAccount", str(spec["serviceAccountName"]), (), owner)
    for volume in spec.get("volumes") or ():
        yield from _of_volume(volume, owner)
    for container in pod.containers:
        for variable in container.get("env") or ():
            source = variable.get("valueFrom") or {}
            for kind, field_name in (("Secret", "secretKeyRef"), ("ConfigMap", "configMapKeyRef")):
                ref = source.get(field_name)
                if ref and not ref.get("optional"):
                    yield Reference(kind, str(ref["name"]), (str(ref["key"]),), owner)


def _of_volume(volume: Object, owner: str) -> Iterator[Reference]:
    claim = volume.get("persistentVolumeClaim")
    if claim:
        yield Reference("PersistentVolumeClaim", str(claim["claimName"]), (), owner)
    sources = [volume, *((volume.get("projected") or {}).get("sources") or ())]
    for source in sources:
        for kind, field_name, name in (
            ("Secret", "secret", "secretName"),
            ("ConfigMap", "configMap", "name"),
        ):
            found = source.get(field_name)
            if not found or found.get("optional"):
                continue
            keys = tuple(str(item["key"]) for item in found.get("items") or ())
            yield Reference(kind, str(found.get(name) or found.get("name")), keys, owner)
