"""The checks of preflight: what is needed against what there is. Pure: values in, findings out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from baton.preflight import fitting, pod_security
from baton.preflight.cluster_view import Cluster, Node
from baton.preflight.findings import Finding, Status
from baton.preflight.needs import Needs, PodNeed

OLDEST = (1, 29)
"""The first Kubernetes that runs sidecars (init containers that restart) without being asked to."""

OLDEST_FOR_IMAGE_VOLUMES = (1, 33)
"""The first whose image volumes are more than an experiment."""

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


def all_of(needs: Needs, cluster: Cluster) -> tuple[Finding, ...]:
    """Every finding, good ones too, in the order in which one would fix them."""
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


def version(needs: Needs, cluster: Cluster) -> Iterator[Finding]:
    """Is Kubernetes new enough for what these pods use?"""
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


def kinds(needs: Needs, cluster: Cluster) -> Iterator[Finding]:
    """Does the API server know all kinds?"""
    unknown = [kind for kind in needs.kinds if cluster.resources.get(kind) is None]
    for kind in unknown:
        fix = _FIXES.get(kind.group, f"install what brings {kind.group or 'it'}, or switch it off")
        yield Finding(
            "kinds", Status.FAIL, f"the cluster knows no {kind.name} of {kind.api_version}", fix
        )
    if not unknown:
        yield Finding("kinds", Status.OK, f"all {len(needs.kinds)} kinds of objects are known")


def permissions(needs: Needs, cluster: Cluster) -> Iterator[Finding]:
    """May this user make these objects?"""
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


def security(needs: Needs, cluster: Cluster) -> Iterator[Finding]:
    """Does the namespace's Pod Security level let the pods in?"""
    labels = cluster.namespace_labels
    if labels is None:
        exists = "may not be looked at" if not cluster.is_namespace_known else "does not exist yet"
        status = Status.WARN if not cluster.is_namespace_known else Status.OK
        worst = next(
            (level for level in reversed(pod_security.LEVELS) if _all_fit(needs, level)), ""
        )
        yield Finding(
            "pod security", status, f"namespace {cluster.namespace} {exists}; the pods fit {worst}"
        )
        return
    level = labels.get("pod-security.kubernetes.io/enforce", "privileged")
    if level not in pod_security.LEVELS:
        level = "restricted"  # as the API server reads what it does not know
    is_broken = False
    for pod in needs.pods:
        for what in pod_security.breaks(pod, level):
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
    return not any(pod_security.breaks(pod, level) for pod in needs.pods)


def references(needs: Needs, cluster: Cluster) -> Iterator[Finding]:
    """Is there what pods name and the chart does not bring?"""
    num_known = 0
    for wanted in needs.references:
        place = (wanted.kind, wanted.name)
        if place not in cluster.found:
            yield Finding(
                "references",
                Status.WARN,
                f"{wanted.needed_by} needs {wanted.kind} {wanted.name}, which you may not look at",
                "make sure that it is there",
            )
            continue
        keys = cluster.found[place]
        if keys is None:
            yield Finding(
                "references",
                Status.FAIL,
                f"{wanted.needed_by} needs {wanted.kind} {wanted.name}, which is not there",
                f"make it in namespace {cluster.namespace}, or correct its name in your values",
            )
        elif missing := [key for key in wanted.keys if key not in keys]:
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


def devices(needs: Needs, cluster: Cluster) -> Iterator[Finding]:
    """Do nodes offer the devices that pods ask for?"""
    names = sorted({name for pod in needs.pods for name in pod.requests if "/" in name})
    if cluster.nodes is None:
        return  # said with the room
    for name in names:
        offered = sum(node.allocatable.get(name, 0.0) for node in cluster.nodes)
        if offered:
            yield Finding("devices", Status.OK, f"{offered:g} {name} on the nodes")
        else:
            fix = f"install the device plugin that offers {name}, or set gpus=0 to compute on CPUs"
            yield Finding("devices", Status.FAIL, f"no node offers {name}", fix)


def room(needs: Needs, cluster: Cluster) -> Iterator[Finding]:
    """Do all pods find a node?"""
    if cluster.nodes is None:
        yield Finding(
            "room",
            Status.WARN,
            "you may not list nodes: nobody knows whether there is room",
            "ask an administrator to run this",
        )
        return
    stay = tuple(pod for pod in needs.pods if not pod.is_brief)
    left_out = fitting.place(stay, cluster.nodes)
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
    """Can each Deployment start one pod more, where its rolling update must?"""
    for pod in pods:
        if not pod.starts_new_first:
            continue
        more = [replace(each, num_pods=each.num_pods + (each is pod)) for each in pods]
        short = fitting.place(more, nodes)
        if short:
            yield Finding(
                "room",
                Status.WARN,
                f"{pod.owner} cannot be updated: a new pod starts before an old one ends "
                f"(maxUnavailable: 0), and there is no room for it: {short[0].why}",
                "leave room for one more pod, or set its updateStrategy to {rollingUpdate: "
                "{maxSurge: 0, maxUnavailable: 1}}: requests wait while a single pod is replaced",
            )


def metrics(needs: Needs, cluster: Cluster) -> Iterator[Finding]:
    """Are the APIs there that the autoscaling of pods asks?"""
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
            what = f"nobody serves {group}, which the HorizontalPodAutoscaler asks"
            yield Finding("metrics", Status.FAIL, what, f"{fix}, or set scaling.by=autoscaler")


def images(needs: Needs, cluster: Cluster) -> Iterator[Finding]:
    """Are the images on the nodes, or can they be pulled?"""
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
                "the nodes pull it when pods start; where its registry asks who they are, name a "
                "Secret in images.pullSecrets"
            )
        else:
            fix = (
                "set images.registry to the registry that you pushed it to, or load it (kind load)"
            )
        yield Finding("images", Status.WARN, f"{image} is on no node, as far as nodes say", fix)


def _has_image(present: frozenset[str], image: str) -> bool:
    """Nodes name images in full: docker.io/library/baton-control:0.1.0."""
    names = {image, f"docker.io/{image}", f"docker.io/library/{image}", f"localhost/{image}"}
    return bool(names & present)
