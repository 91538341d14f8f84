"""Which Pod Security level a pod fits: Kubernetes' own rules, as far as charts break them. Pure.

"restricted" is the strictest, then "baseline", then "privileged", where all goes. Rules of baseline
that no part of a serving chart comes near (SELinux types, AppArmor, sysctls, /proc mounts) are not
looked at: the API server does, with its own words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from baton.preflight.needs import PodNeed

LEVELS = ("privileged", "baseline", "restricted")
"""From the loosest to the strictest."""

_VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image"),
    *("persistentVolumeClaim", "projected", "secret"),
}
_BASELINE_CAPABILITIES = {
    *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD"),
    *("NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
}


def breaks(pod: PodNeed, level: str) -> tuple[str, ...]:
    """What that level forbids in this pod, each in a few words; nothing: the pod fits it."""
    if level == "privileged":
        return ()
    found = list(_baseline(pod))
    if level == "restricted":
        found += _restricted(pod)
    return tuple(dict.fromkeys(found))


def _baseline(pod: PodNeed) -> Iterator[str]:
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.spec.get(name):
            yield name
    for volume in pod.spec.get("volumes") or ():
        if "hostPath" in volume:
            yield f"hostPath volume {volume.get('name')}"
    for container in pod.containers:
        context = container.get("securityContext") or {}
        who = container.get("name")
        if context.get("privileged"):
            yield f"{who}: privileged"
        added = set((context.get("capabilities") or {}).get("add") or ())
        if added - _BASELINE_CAPABILITIES:
            yield f"{who}: capabilities {', '.join(sorted(added - _BASELINE_CAPABILITIES))}"
        if any(port.get("hostPort") for port in container.get("ports") or ()):
            yield f"{who}: hostPort"


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
    who = container.get("name")
    if own.get("allowPrivilegeEscalation") is not False:
        yield f"{who}: allowPrivilegeEscalation is not false"
    capabilities = own.get("capabilities") or {}
    if "ALL" not in (capabilities.get("drop") or ()):
        yield f"{who}: capabilities are not dropped"
    if set(capabilities.get("add") or ()) - {"NET_BIND_SERVICE"}:
        yield f"{who}: adds capabilities"
    if both.get("runAsNonRoot") is not True:
        yield f"{who}: runAsNonRoot is not true"
    if both.get("runAsUser") == 0:
        yield f"{who}: runs as root"
    profile = (both.get("seccompProfile") or {}).get("type")
    if profile not in ("RuntimeDefault", "Localhost"):
        yield f"{who}: no seccompProfile"
