"""The checks of preflight: what is needed against what there is. Pure: values in, findings out.

Two of them rehearse what Kubernetes will do. `place` is the scheduler: it looks at requests, node
selectors, required node affinity of the plain operators, and taints; not at affinity between pods
or spreading, which the chart only prefers. `breaks` is Pod Security admission: the rules of the
levels baseline and restricted that a serving chart may break; SELinux types, AppArmor, sysctls and
/proc mounts are not looked at.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from baton.preflight.chart_needs import Amounts, Needs, PodNeed, format_amount, total
from baton.preflight.cluster import KubernetesFacts, Node, Taint

OLDEST = (1, 29)
"""The first version of Kubernetes that has sidecars (init containers that restart) by default."""

OLDEST_FOR_IMAGE_VOLUMES = (1, 33)
"""The first version of Kubernetes whose image volumes are beta."""

_FIXES = {
    "monitoring.coreos.com": "install the Prometheus operator, or switch off "
    "monitoring.podMonitor and monitoring.alerts",
    "gateway.networking.k8s.io": "install the Gateway API's CRDs and a controller, or set "
    "router.gateway.enabled=false",
    "cert-manager.io": "install cert-manager, or set tls.mode=self-made",
    "keda.sh": "install KEDA, or set scaling.by=autoscaler",
}

_HPA_APIS = {
    "Resource": ("metrics.k8s.io", "install metrics-server"),
    "ContainerResource": ("metrics.k8s.io", "install metrics-server"),
    "Pods": ("custom.metrics.k8s.io", "install prometheus-adapter or another metrics adapter"),
    "Object": ("custom.metrics.k8s.io", "install prometheus-adapter or another metrics adapter"),
    "External": ("external.metrics.k8s.io", "install KEDA, prometheus-adapter or the like"),
}


class Status(Enum):
    """The severity of a finding."""

    OK = "ok"
    WARN = "warn"
    """The deployment may work, or it could not be checked."""
    FAIL = "fail"
    """The installed deployment would not work."""


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    check: str
    """The name of the check, in one or two words."""

    status: Status

    what: str
    """Result of the check, in one line."""

    fix: str = ""
    """Advice to the user on what to do about it; empty: nothing needs to be done."""


def all_of(needs: Needs, cluster: KubernetesFacts) -> tuple[Finding, ...]:
    """Run every check. Returns: the findings, good ones included, in the order in which to fix
    them."""
    return (
        *version(needs, cluster),
        *kinds(needs, cluster),
        *permissions(needs, cluster),
        *security(needs, cluster),
        *references(needs, cluster),
        *devices(needs, cluster),
        *room(needs, cluster),
        *metrics(needs, cluster),
        *images(needs, cluster),
    )


def version(needs: Needs, cluster: KubernetesFacts) -> Iterator[Finding]:
    """Check whether Kubernetes is new enough for what these pods use."""
    oldest, what = (1, 25), "these pods"
    if any(_has_sidecar(pod) for pod in needs.pods):
        oldest, what = OLDEST, "a store beside each worker (a native sidecar)"
    if any("image" in volume for pod in needs.pods for volume in pod.spec.get("volumes") or ()):
        oldest, what = OLDEST_FOR_IMAGE_VOLUMES, "a model out of an image volume"
    shown, least = (f"{major}.{minor}" for major, minor in (cluster.version, oldest))
    if cluster.version < oldest:
        fix = "upgrade the cluster"
        if oldest == OLDEST:
            fix += ", or set kvstore.placement=daemonset or none"
        yield Finding("version", Status.FAIL, f"Kubernetes {shown}; {what} need {least}", fix)
    else:
        yield Finding("version", Status.OK, f"Kubernetes {shown} ({least} is needed)")


def _has_sidecar(pod: PodNeed) -> bool:
    first = pod.spec.get("initContainers") or ()
    return any(each.get("restartPolicy") == "Always" for each in first)


def kinds(needs: Needs, cluster: KubernetesFacts) -> Iterator[Finding]:
    """Check whether the API server knows all kinds of the objects."""
    unknown = [kind for kind in needs.kinds if cluster.resources.get(kind) is None]
    for kind in unknown:
        fix = _FIXES.get(kind.group, f"install what brings {kind.group or 'it'}, or switch it off")
        yield Finding(
            "kinds", Status.FAIL, f"the cluster knows no {kind.name} of {kind.api_version}", fix
        )
    if not unknown:
        yield Finding("kinds", Status.OK, f"all {len(needs.kinds)} kinds of objects are known")


def permissions(needs: Needs, cluster: KubernetesFacts) -> Iterator[Finding]:
    """Check whether this user may make these objects."""
    denied = sorted(asked for asked, may in cluster.allowed.items() if not may)
    by_verb: dict[str, list[str]] = defaultdict(list)
    for verb, group, plural in denied:
        by_verb[verb].append(f"{plural}.{group}" if group else plural)
    for verb, names in by_verb.items():
        yield Finding(
            "permissions",
            Status.FAIL,
            f"you may not {verb} {', '.join(names)} in namespace {cluster.namespace}",
            "have an administrator grant you the role `admin` there (ClusterRoles and what they "
            "bind need more)",
        )
    if not denied:
        yield Finding("permissions", Status.OK, f"all {len(cluster.allowed)} that are needed")


def security(needs: Needs, cluster: KubernetesFacts) -> Iterator[Finding]:
    """Check whether the namespace's Pod Security level lets the pods in."""
    labels = cluster.namespace_labels
    if labels is None:
        exists = "may not be looked at" if not cluster.is_namespace_known else "does not exist yet"
        status = Status.WARN if not cluster.is_namespace_known else Status.OK
        worst = next((level for level in reversed(LEVELS) if _all_fit(needs, level)), "")
        yield Finding(
            "pod security", status, f"namespace {cluster.namespace} {exists}; the pods fit {worst}"
        )
        return
    level = labels.get("pod-security.kubernetes.io/enforce", "privileged")
    if level not in LEVELS:
        level = "restricted"  # what the API server takes an unknown level for
    is_broken = False
    for pod in needs.pods:
        for what in breaks(pod, level):
            is_broken = True
            yield Finding(
                "pod security",
                Status.FAIL,
                f"{pod.owner}: {what}; namespace {cluster.namespace} enforces {level}",
                "use a namespace with a looser level, or kvstore.placement=sidecar where the "
                "DaemonSet's hostPath is meant",
            )
    if not is_broken:
        yield Finding("pod security", Status.OK, f"the pods fit {level}, which is enforced")


def _all_fit(needs: Needs, level: str) -> bool:
    return not any(breaks(pod, level) for pod in needs.pods)


def references(needs: Needs, cluster: KubernetesFacts) -> Iterator[Finding]:
    """Check whether the objects exist that pods refer to and the chart does not create."""
    num_known = 0
    for wanted in needs.references:
        key = (wanted.kind, wanted.name)
        if key not in cluster.found:
            yield Finding(
                "references",
                Status.WARN,
                f"{wanted.needed_by} needs {wanted.kind} {wanted.name}, which you may not look at",
                "make sure that it is there",
            )
            continue
        keys = cluster.found[key]
        if keys is None:
            yield Finding(
                "references",
                Status.FAIL,
                f"{wanted.needed_by} needs {wanted.kind} {wanted.name}, which is not there",
                f"make it in namespace {cluster.namespace}, or correct its name in your values",
            )
        elif missing := [each for each in wanted.keys if each not in keys]:
            yield Finding(
                "references",
                Status.FAIL,
                f"{wanted.kind} {wanted.name} has no key {', '.join(missing)}, which "
                f"{wanted.needed_by} needs",
                "add it",
            )
        else:
            num_known += 1
    if num_known == len(needs.references):
        what = f"all {num_known} are there" if num_known else "none: the chart brings all"
        yield Finding("references", Status.OK, what)


def devices(needs: Needs, cluster: KubernetesFacts) -> Iterator[Finding]:
    """Check whether nodes offer the devices that pods ask for."""
    names = sorted({name for pod in needs.pods for name in pod.requests if "/" in name})
    if cluster.nodes is None:
        return  # `room` says so
    for name in names:
        offered = sum(node.allocatable.get(name, 0.0) for node in cluster.nodes)
        if offered:
            yield Finding("devices", Status.OK, f"{offered:g} {name} on the nodes")
        else:
            fix = f"install the device plugin that offers {name}, or set gpus=0 to compute on CPUs"
            yield Finding("devices", Status.FAIL, f"no node offers {name}", fix)


def room(needs: Needs, cluster: KubernetesFacts) -> Iterator[Finding]:
    """Check whether all pods find a node with room."""
    if cluster.nodes is None:
        yield Finding(
            "room",
            Status.WARN,
            "you may not list nodes, so whether there is room is not known",
            "ask an administrator to run this",
        )
        return
    stay = tuple(pod for pod in needs.pods if not pod.is_brief)
    left_out = place(stay, cluster.nodes)
    for each in left_out:
        yield Finding(
            "room",
            Status.FAIL,
            f"{each.num_pods} of {each.owner} find no room: {each.why}",
            "add a node, or ask for less (replicas, resources)",
        )
    if not left_out:
        num_pods = sum(pod.num_pods or len(cluster.nodes) for pod in stay)
        found = f"for {num_pods} pods on {len(cluster.nodes)} nodes"
        if cluster.is_usage_known:
            yield Finding("room", Status.OK, found)
        else:
            yield Finding("room", Status.WARN, f"{found}, if nothing else runs there", "")
        yield from _room_to_update(stay, cluster.nodes)


def _room_to_update(pods: Sequence[PodNeed], nodes: Sequence[Node]) -> Iterator[Finding]:
    """Is there room for one more pod of each Deployment whose rolling update starts one?"""
    for pod in pods:
        if not pod.starts_new_first:
            continue
        more = [replace(each, num_pods=each.num_pods + (each is pod)) for each in pods]
        short = place(more, nodes)
        if short:
            yield Finding(
                "room",
                Status.WARN,
                f"{pod.owner} cannot be updated: a new pod starts before an old one ends "
                f"(maxUnavailable: 0), and there is no room for it: {short[0].why}",
                "leave room for one more pod, or set its updateStrategy to {rollingUpdate: "
                "{maxSurge: 0, maxUnavailable: 1}}: requests wait while a single pod is replaced",
            )


def metrics(needs: Needs, cluster: KubernetesFacts) -> Iterator[Finding]:
    """Check whether the cluster serves the metrics APIs that the HorizontalPodAutoscalers ask."""
    asked: dict[str, str] = {}
    for each in needs.objects:
        if each["kind"] == "HorizontalPodAutoscaler":
            for metric in (each.get("spec") or {}).get("metrics") or ():
                if metric.get("type") in _HPA_APIS:
                    group, fix = _HPA_APIS[metric["type"]]
                    asked[group] = fix
    for group, fix in asked.items():
        if group in cluster.groups:
            yield Finding("metrics", Status.OK, f"{group} is served")
        else:
            what = f"the cluster does not serve {group}, which the HorizontalPodAutoscaler asks"
            yield Finding("metrics", Status.FAIL, what, f"{fix}, or set scaling.by=autoscaler")


def images(needs: Needs, cluster: KubernetesFacts) -> Iterator[Finding]:
    """Check whether the images are on the nodes, or can be pulled."""
    names = dict.fromkeys(image for pod in needs.pods for image in pod.images)
    absent = []
    for image in names:
        number = sum(_has_image(node.images, image) for node in cluster.nodes or ())
        if number:
            what = f"{image} is on {number} of {len(cluster.nodes or ())} nodes"
            yield Finding("images", Status.OK, what)
        else:
            absent.append(image)
    for image in absent:
        if "." in image.partition("/")[0] or ":" in image.partition("/")[0]:
            fix = (
                "the nodes pull it when pods start; if its registry needs a login, name a Secret "
                "in images.pullSecrets"
            )
        else:
            fix = (
                "set images.registry to the registry that you pushed it to, or load it (kind load)"
            )
        yield Finding("images", Status.WARN, f"{image} is on no node, as far as nodes say", fix)


def _has_image(present: frozenset[str], image: str) -> bool:
    """Nodes report full names, such as docker.io/library/baton-control:0.1.0."""
    names = {image, f"docker.io/{image}", f"docker.io/library/{image}", f"localhost/{image}"}
    return bool(names & present)


# -- room on nodes

_MOST_NAMED = 3


@dataclass(frozen=True)
class NoRoom:
    """Pods of one owner for which no node has room."""

    owner: str
    num_pods: int
    why: str
    """The resource that is short, or why no node suits."""


def place(pods: Iterable[PodNeed], nodes: Iterable[Node]) -> tuple[NoRoom, ...]:
    """Place all pods on nodes. Returns: the pods that found no node.

    The largest pods come first, and each goes to the node with the least memory left.
    """
    nodes = tuple(node for node in nodes if node.is_ready)
    free = {node.name: _free(node) for node in nodes}
    left_out: list[NoRoom] = []
    for pod in sorted(pods, key=_weight, reverse=True):
        suiting = tuple(node for node in nodes if may_run(pod, node))
        asked = {**pod.requests, "pods": 1.0}
        if pod.num_pods == 0:  # one on each node
            short = tuple(node for node in suiting if not _fits(asked, free[node.name]))
            for node in suiting:
                if node not in short:
                    free[node.name] = total(free[node.name], _negative(asked))
            if short:
                where = ", ".join(node.name for node in short[:_MOST_NAMED])
                more = ", ..." if len(short) > _MOST_NAMED else ""
                why = f"{_why(pod, nodes, short, free)} (on {where}{more})"
                left_out.append(NoRoom(pod.owner, len(short), why))
            continue
        placed = 0
        while placed < pod.num_pods:
            candidates = [node for node in suiting if _fits(asked, free[node.name])]
            if not candidates:
                break
            fullest = min(candidates, key=lambda node: free[node.name].get("memory", 0.0))
            free[fullest.name] = total(free[fullest.name], _negative(asked))
            placed += 1
        if placed < pod.num_pods:
            why = _why(pod, nodes, suiting, free)
            left_out.append(NoRoom(pod.owner, pod.num_pods - placed, why))
    return tuple(left_out)


def may_run(pod: PodNeed, node: Node) -> bool:
    """Whether selectors, affinity and taints let the pod run on the node, apart from room."""
    selector: Mapping[str, str] = pod.spec.get("nodeSelector") or {}
    if any(node.labels.get(key) != value for key, value in selector.items()):
        return False
    affinity = (pod.spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    terms = required.get("nodeSelectorTerms") or ()
    if terms and not any(_matches(term, node) for term in terms):
        return False
    tolerations = pod.spec.get("tolerations") or ()
    return all(
        taint.effect == "PreferNoSchedule" or any(_tolerates(each, taint) for each in tolerations)
        for taint in node.taints
    )


def _matches(term: Mapping[str, Any], node: Node) -> bool:
    for rule in term.get("matchExpressions") or ():
        value, values = node.labels.get(rule["key"]), rule.get("values") or ()
        holds = {
            "In": value in values,
            "NotIn": value not in values,
            "Exists": value is not None,
            "DoesNotExist": value is None,
        }
        if not holds.get(rule.get("operator", ""), True):
            return False
    return True


def _tolerates(toleration: Mapping[str, Any], taint: Taint) -> bool:
    if toleration.get("effect") not in (None, "", taint.effect):
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return toleration.get("key") in (None, "", taint.key)
    return toleration.get("key") == taint.key and toleration.get("value", "") == taint.value


def _free(node: Node) -> dict[str, float]:
    return total({"pods": 110.0, **node.allocatable}, _negative(node.requested))


def _negative(amounts: Amounts) -> dict[str, float]:
    return {name: -amount for name, amount in amounts.items()}


def _fits(asked: Amounts, free: Amounts) -> bool:
    # Requests are sums of decimal fractions; the scheduler counts in thousandths of a core.
    return all(amount <= free.get(name, 0.0) + 1e-6 for name, amount in asked.items())


def _weight(pod: PodNeed) -> tuple[float, float]:
    asked = pod.requests
    devices = sum(amount for name, amount in asked.items() if "/" in name)
    # Pods of a DaemonSet come first: each node gets one.
    return (float("inf") if pod.num_pods == 0 else devices, asked.get("memory", 0.0))


def _why(
    pod: PodNeed,
    nodes: tuple[Node, ...],
    suiting: tuple[Node, ...],
    free: Mapping[str, Amounts],
) -> str:
    if not nodes:
        return "no node is ready"
    if not suiting:
        return "its nodeSelector, affinity or tolerations suit no node"
    short = []
    for name, amount in sorted(pod.requests.items()):
        most = max(free[node.name].get(name, 0.0) for node in suiting)
        if amount > most + 1e-6:
            asked, left = format_amount(name, amount), format_amount(name, max(0.0, most))
            short.append(f"asks for {asked}, the most that a node has left is {left}")
    return "; ".join(short) or "what it asks for is not left on any one node"


# -- Pod Security

LEVELS = ("privileged", "baseline", "restricted")
"""The levels of Pod Security, the loosest first; privileged allows everything."""

_VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image"),
    *("persistentVolumeClaim", "projected", "secret"),
}
_BASELINE_CAPABILITIES = {
    *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD"),
    *("NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
}


def breaks(pod: PodNeed, level: str) -> tuple[str, ...]:
    """The parts of a pod that this level of Pod Security forbids, in a few words each; empty: the
    pod fits the level."""
    if level == "privileged":
        return ()
    found = list(_baseline(pod))
    if level == "restricted":
        found += _restricted(pod)
    return tuple(dict.fromkeys(found))


def _baseline(pod: PodNeed) -> Iterator[str]:
    yield from (field for field in ("hostNetwork", "hostPID", "hostIPC") if pod.spec.get(field))
    for volume in pod.spec.get("volumes") or ():
        if "hostPath" in volume:
            yield f"hostPath volume {volume.get('name')}"
    for container in pod.containers:
        context = container.get("securityContext") or {}
        name = container.get("name")
        if context.get("privileged"):
            yield f"{name}: privileged"
        added = set((context.get("capabilities") or {}).get("add") or ())
        if added - _BASELINE_CAPABILITIES:
            yield f"{name}: capabilities {', '.join(sorted(added - _BASELINE_CAPABILITIES))}"
        if any(port.get("hostPort") for port in container.get("ports") or ()):
            yield f"{name}: hostPort"


def _restricted(pod: PodNeed) -> Iterator[str]:
    for volume in pod.spec.get("volumes") or ():
        kinds = set(volume) - {"name"}
        if kinds - _VOLUMES - {"hostPath"}:
            yield f"volume {volume.get('name')}: {', '.join(sorted(kinds))}"
    of_pod = pod.spec.get("securityContext") or {}
    for container in pod.containers:
        yield from _restricted_container(container, of_pod)


def _restricted_container(container: Mapping[str, Any], of_pod: Mapping[str, Any]) -> Iterator[str]:
    own = container.get("securityContext") or {}
    both = {**of_pod, **own}
    name = container.get("name")
    if own.get("allowPrivilegeEscalation") is not False:
        yield f"{name}: allowPrivilegeEscalation is not false"
    capabilities = own.get("capabilities") or {}
    if "ALL" not in (capabilities.get("drop") or ()):
        yield f"{name}: capabilities are not dropped"
    if set(capabilities.get("add") or ()) - {"NET_BIND_SERVICE"}:
        yield f"{name}: adds capabilities"
    if both.get("runAsNonRoot") is not True:
        yield f"{name}: runAsNonRoot is not true"
    if both.get("runAsUser") == 0:
        yield f"{name}: runs as root"
    profile = (both.get("seccompProfile") or {}).get("type")
    if profile not in ("RuntimeDefault", "Localhost"):
        yield f"{name}: no seccompProfile"
