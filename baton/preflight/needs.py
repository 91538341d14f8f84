"""What a set of rendered objects needs of a cluster. Pure: the objects come as dicts, as YAML has
them.

Knows Kubernetes' own kinds, and no key of Baton's chart: whatever the chart or a user's values ask
for is seen here as the API server will see it. Each pod counts as often as its owner wants it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from baton.preflight import quantities

Object = Mapping[str, Any]

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
    """One kind of objects."""

    api_version: str
    """Such as apps/v1."""

    name: str
    """Such as Deployment."""

    @property
    def group(self) -> str:
        """Such as apps; empty for the core."""
        return self.api_version.rpartition("/")[0]


@dataclass(frozen=True)
class PodNeed:
    """The pods of one owner."""

    owner: str
    """Such as Deployment baton-decode."""

    num_pods: int
    """How many at once; 0 for one on each node."""

    spec: Object = field(repr=False)
    """The pod's, as Kubernetes has it."""

    is_brief: bool = False
    """A job or a test: it needs room for a moment only."""

    starts_new_first: bool = False
    """A rolling update ends no old pod before a new one is ready: it needs room for one more."""

    @property
    def containers(self) -> tuple[Object, ...]:
        """All of them, those that run first included."""
        return (*(self.spec.get("initContainers") or ()), *(self.spec.get("containers") or ()))

    @property
    def images(self) -> tuple[str, ...]:
        """Images of its containers, each once."""
        return tuple(dict.fromkeys(str(each.get("image", "")) for each in self.containers))

    @property
    def requests(self) -> dict[str, float]:
        """What a node must have free for one pod, as the scheduler counts: containers and sidecars
        together, or what one that runs before them needs beside the sidecars before it."""
        sidecars: dict[str, float] = {}
        largest_before: dict[str, float] = {}
        for each in self.spec.get("initContainers") or ():
            asked = _asked(each)
            if each.get("restartPolicy") == "Always":
                sidecars = quantities.total(sidecars, asked)
            else:
                largest_before = quantities.most(largest_before, quantities.total(sidecars, asked))
        running = quantities.total(sidecars, *map(_asked, self.spec.get("containers") or ()))
        return quantities.most(running, largest_before)


@dataclass(frozen=True)
class Reference:
    """Something that a pod names and that these objects do not hold."""

    kind: str
    """Secret, ConfigMap, PersistentVolumeClaim, ServiceAccount or PriorityClass."""

    name: str
    """Its name."""

    keys: tuple[str, ...] = ()
    """Keys that must be in it."""

    needed_by: str = ""
    """Who names it."""


@dataclass(frozen=True)
class Needs:
    """See the module."""

    kinds: tuple[Kind, ...]
    """Each once, in the order of the objects."""

    pods: tuple[PodNeed, ...]
    """Of all owners."""

    references: tuple[Reference, ...]
    """Each once."""

    objects: tuple[Object, ...] = field(repr=False, default=())
    """All of them."""


def of(objects: Iterable[Object]) -> Needs:
    """The needs of these objects. Raises: ValueError naming one that is no object of
    Kubernetes."""
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
    return quantities.parse_all(asked)


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
