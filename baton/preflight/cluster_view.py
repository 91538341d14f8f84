"""What preflight saw of a cluster: values, without a way back to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.preflight.needs import Kind


@dataclass(frozen=True)
class Taint:
    """What keeps pods off a node that do not tolerate it."""

    key: str
    """Its key."""

    value: str
    """Its value; may be empty."""

    effect: str
    """NoSchedule, PreferNoSchedule or NoExecute."""


@dataclass(frozen=True)
class Node:
    """One node."""

    name: str
    """Its name."""

    allocatable: Mapping[str, float]
    """What pods may have of it, all together."""

    requested: Mapping[str, float] = field(default_factory=dict)
    """What pods there have asked for; nothing where usage is not known."""

    labels: Mapping[str, str] = field(default_factory=dict)
    """Its labels."""

    taints: tuple[Taint, ...] = ()
    """Its taints."""

    images: frozenset[str] = frozenset()
    """Names of images that it says it has."""

    is_ready: bool = True
    """Ready, and takes new pods."""


@dataclass(frozen=True)
class Resource:
    """How the API server serves a kind."""

    plural: str
    """Such as deployments."""

    is_namespaced: bool
    """Lives in a namespace."""


@dataclass(frozen=True)
class Cluster:
    """See the module."""

    version: tuple[int, int]
    """Such as (1, 33)."""

    namespace: str
    """Where the objects would go."""

    namespace_labels: Mapping[str, str] | None = None
    """Of that namespace; None: it does not exist, or nothing may be known of it."""

    is_namespace_known: bool = True
    """False: this user may not look at it."""

    resources: Mapping[Kind, Resource | None] = field(default_factory=dict)
    """Of the kinds that are needed; None: the server does not know it."""

    groups: frozenset[str] = frozenset()
    """Groups of its API, such as metrics.k8s.io."""

    allowed: Mapping[tuple[str, str, str], bool] = field(default_factory=dict)
    """(verb, group, plural): whether this user may."""

    nodes: tuple[Node, ...] | None = None
    """None: this user may not list nodes."""

    is_usage_known: bool = False
    """Whether `requested` of the nodes was read."""

    found: Mapping[tuple[str, str], frozenset[str] | None] = field(default_factory=dict)
    """(kind, name) of what pods refer to: the keys in it; None: there is none. Not in it: this user
    may not look.
    """
