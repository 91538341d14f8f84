"""The facts of a Kubernetes cluster, as one user may see it: a `KubernetesReader` makes
`KubernetesFacts`.

The reader uses the official client (`baton[kubernetes]`, imported when it is needed: that takes a
second) and changes nothing there. Each call is bounded in time. What the user may not look at is
left out of the facts, so that the checks can say so; only a cluster that does not answer is an
error. Blocking.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from baton.preflight.chart_needs import (
    Kind,
    Needs,
    PodNeed,
    PreflightError,
    parse_quantities,
    total,
)
from process import kubernetes_config
from process.settings import SettingsError

CALL_S = 15.0
"""Time limit of one call to Kubernetes' API server."""

_PAGE = 500
_MAX_PAGES = 1000
_MAX_CHARS = 200


@dataclass(frozen=True)
class Taint:
    """A taint of a node: pods that do not tolerate it stay off the node."""

    key: str
    value: str
    """Value of the taint; may be empty."""
    effect: str
    """Effect of the taint: NoSchedule, PreferNoSchedule or NoExecute."""


@dataclass(frozen=True)
class Node:
    """A node, as the API server describes it."""

    name: str
    allocatable: Mapping[str, float]
    """Amounts that all pods of the node together may use."""

    requested: Mapping[str, float] = field(default_factory=dict)
    """Amounts that the node's pods ask for; empty where the user may not list pods."""

    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()
    images: frozenset[str] = frozenset()
    """Names of the images that the node reports."""

    is_ready: bool = True
    """Whether the node is ready and takes new pods."""


@dataclass(frozen=True)
class Resource:
    """A kind of objects as the API server serves it."""

    plural: str
    """Name of the kind in URLs, such as deployments."""

    is_namespaced: bool
    """Whether objects of this kind belong to a namespace."""


@dataclass(frozen=True)
class KubernetesFacts:
    """The facts of a Kubernetes cluster that the checks use."""

    version: tuple[int, int]
    """Version of Kubernetes, such as (1, 33)."""

    namespace: str
    """The namespace that the objects would be created in."""

    namespace_labels: Mapping[str, str] | None = None
    """The labels of that namespace; None: it does not exist, or the user may not look at it."""

    is_namespace_known: bool = True
    """Whether the user may look at the namespace."""

    resources: Mapping[Kind, Resource | None] = field(default_factory=dict)
    """The kinds that are needed, as the server serves them; None: the server does not know the
    kind."""

    groups: frozenset[str] = frozenset()
    """API groups that the server has, such as metrics.k8s.io."""

    allowed: Mapping[tuple[str, str, str], bool] = field(default_factory=dict)
    """Whether the user may do (verb, group, plural)."""

    nodes: tuple[Node, ...] | None = None
    """The nodes of the cluster; None: the user may not list nodes."""

    is_usage_known: bool = False
    """Whether the user may list pods, so that `Node.requested` is known."""

    found: Mapping[tuple[str, str], frozenset[str] | None] = field(default_factory=dict)
    """Keys of each object that pods refer to, by (kind, name); None: it does not exist. An object
    that the user may not look at is left out."""


class KubernetesReader:
    """Reads the facts of a Kubernetes cluster as one user."""

    def __init__(self, api: Any, namespace: str) -> None:
        """Args: api: an ApiClient of the official package."""
        from kubernetes import client

        self._api = api
        self._client = client
        self._core = client.CoreV1Api(api)
        self.namespace = namespace

    def version(self) -> tuple[int, int]:
        """The version of Kubernetes, such as (1, 33). Raises: PreflightError without an answer."""
        body = self._call(self._client.VersionApi(self._api).get_code)
        if body is None:
            raise PreflightError("the API server does not say its version")
        # Some providers write "33+".
        major, minor = (re.sub(r"\D.*", "", str(body[key])) for key in ("major", "minor"))
        return int(major), int(minor)

    def look(self, needs: Needs) -> KubernetesFacts:
        """Read the facts that the checks use. Raises: PreflightError without an answer."""
        resources = {kind: self._resource(kind) for kind in needs.kinds}
        labels, is_known = self._namespace()
        nodes, is_usage_known = self._nodes()
        asked = {
            ("create", kind.group, resource.plural)
            for kind, resource in resources.items()
            if resource is not None
        }
        asked.add(("create", "", "secrets"))  # where helm keeps its releases
        return KubernetesFacts(
            version=self.version(),
            namespace=self.namespace,
            namespace_labels=labels,
            is_namespace_known=is_known,
            resources=resources,
            groups=self._groups(),
            allowed={each: self._may(*each) for each in sorted(asked)},
            nodes=nodes,
            is_usage_known=is_usage_known,
            found=dict(self._references(needs)),
        )

    def _call(self, what: Any, *arguments: Any, **options: Any) -> Any:
        """The answer as JSON values; None: not there (404) or not allowed (403).

        Raises: PreflightError.
        """
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        try:
            answer = what(*arguments, _request_timeout=CALL_S, **options)
        except ApiException as error:
            if error.status in (403, 404):
                return None
            if error.status == 401:
                raise PreflightError(
                    "the API server does not know you (401): renew the credentials of your "
                    "kubeconfig's context"
                ) from None
            words = " ".join(str(error.body or error.reason).split())[:_MAX_CHARS]
            raise PreflightError(f"the API server answered {error.status}: {words}") from None
        except HTTPError as error:
            host = self._api.configuration.host
            reason = " ".join(str(getattr(error, "reason", error)).split())[:_MAX_CHARS]
            raise PreflightError(
                f"no answer from the API server {host}: {reason}; check --context, or the network"
            ) from None
        except ValueError:
            # The client checks answers. Its error may quote the answer, such as a Secret's content.
            name = getattr(what, "__name__", "a call")
            raise PreflightError(
                f"the API server answered {name} with what the client cannot read"
            ) from None
        return self._api.sanitize_for_serialization(answer)

    def _resource(self, kind: Kind) -> Resource | None:
        if kind.group:
            listing = self._client.CustomObjectsApi(self._api).get_api_resources
            body = self._call(listing, *kind.api_version.split("/"))
        else:
            body = self._call(self._core.get_api_resources)
        for each in (body or {}).get("resources") or ():
            if each["kind"] == kind.name and "/" not in each["name"]:
                return Resource(each["name"], bool(each["namespaced"]))
        return None

    def _groups(self) -> frozenset[str]:
        body = self._call(self._client.ApisApi(self._api).get_api_versions) or {}
        return frozenset(each["name"] for each in body.get("groups") or ())

    def _namespace(self) -> tuple[Mapping[str, str] | None, bool]:
        """The labels (None: absent or hidden), and whether the user may look at the namespace."""
        body = self._call(self._core.read_namespace, self.namespace)
        if body is not None:
            return body["metadata"].get("labels") or {}, True
        return None, self._may("get", "", "namespaces")

    def _may(self, verb: str, group: str, plural: str) -> bool:
        client = self._client
        asked = client.V1ResourceAttributes(
            verb=verb, group=group, resource=plural, namespace=self.namespace
        )
        review = client.V1SelfSubjectAccessReview(
            spec=client.V1SelfSubjectAccessReviewSpec(resource_attributes=asked)
        )
        authorization = client.AuthorizationV1Api(self._api)
        answer = self._call(authorization.create_self_subject_access_review, review)
        return answer is not None and bool(answer["status"]["allowed"])

    def _all(self, listing: Any) -> list[dict[str, Any]] | None:
        """A whole list, read page by page; None: not allowed."""
        items: list[dict[str, Any]] = []
        token = None
        for _ in range(_MAX_PAGES):
            page = self._call(listing, limit=_PAGE, **({"_continue": token} if token else {}))
            if page is None:
                return None
            items += page.get("items") or ()
            token = (page.get("metadata") or {}).get("continue")
            if not token:
                return items
        raise PreflightError(f"a list of the API server has more than {_MAX_PAGES * _PAGE} items")

    def _nodes(self) -> tuple[tuple[Node, ...] | None, bool]:
        listed = self._all(self._core.list_node)
        if listed is None:
            return None, False
        pods = self._all(self._core.list_pod_for_all_namespaces)
        requested: dict[str, dict[str, float]] = {}
        for pod in pods or ():
            name, phase = pod["spec"].get("nodeName"), pod.get("status", {}).get("phase")
            if name and phase not in ("Succeeded", "Failed"):
                asked = {**PodNeed("", 1, pod["spec"]).requests, "pods": 1.0}
                requested[name] = total(requested.get(name, {}), asked)
        nodes = tuple(_node(each, requested.get(each["metadata"]["name"], {})) for each in listed)
        return nodes, pods is not None

    def _references(self, needs: Needs) -> Iterator[tuple[tuple[str, str], frozenset[str] | None]]:
        core, classes = self._core, self._client.SchedulingV1Api(self._api)
        readers = {
            "Secret": (core.read_namespaced_secret, "", "secrets"),
            "ConfigMap": (core.read_namespaced_config_map, "", "configmaps"),
            "PersistentVolumeClaim": (
                core.read_namespaced_persistent_volume_claim,
                "",
                "persistentvolumeclaims",
            ),
            "ServiceAccount": (core.read_namespaced_service_account, "", "serviceaccounts"),
            "PriorityClass": (
                classes.read_priority_class,
                "scheduling.k8s.io",
                "priorityclasses",
            ),
        }
        for wanted in needs.references:
            read, group, plural = readers[wanted.kind]
            where = () if wanted.kind == "PriorityClass" else (self.namespace,)
            body = self._call(read, wanted.name, *where)
            if body is not None:
                keys = frozenset((*(body.get("data") or ()), *(body.get("binaryData") or ())))
                yield (wanted.kind, wanted.name), keys
            elif self._may("get", group, plural):
                yield (wanted.kind, wanted.name), None


def _node(body: Mapping[str, Any], requested: Mapping[str, float]) -> Node:
    spec, status = body.get("spec") or {}, body.get("status") or {}
    conditions = {each["type"]: each["status"] for each in status.get("conditions") or ()}
    return Node(
        name=body["metadata"]["name"],
        allocatable=parse_quantities(status.get("allocatable") or {}),
        requested=requested,
        labels=body["metadata"].get("labels") or {},
        taints=tuple(
            Taint(each["key"], each.get("value", ""), each["effect"])
            for each in spec.get("taints") or ()
        ),
        images=frozenset(
            name for each in status.get("images") or () for name in each.get("names") or ()
        ),
        is_ready=conditions.get("Ready") == "True" and not spec.get("unschedulable"),
    )


def connect(context: str, namespace: str) -> KubernetesReader:
    """Connect to a Kubernetes cluster as the user's kubeconfig says, or in a pod without one as its
    service account. Returns: a reader.

    Args: namespace: empty: that of the context.
    Raises: PreflightError.
    """
    try:
        settings, own_namespace = kubernetes_config.load(context)
    except SettingsError as error:
        raise PreflightError(f"no cluster is configured: {error}") from None
    from kubernetes import client

    return KubernetesReader(client.ApiClient(settings), namespace or own_namespace or "default")
