"""Whether pods find room on nodes: a rehearsal of what the scheduler will do. Pure.

Looks at requests, node selectors, required node affinity of the plain operators, and taints; not at
affinity between pods or spreading, which the chart only prefers. Largest pods first, each to the
node that it leaves fullest: where that finds room for all, there is room.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from baton.preflight import quantities
from baton.preflight.cluster_view import Node, Taint
from baton.preflight.needs import PodNeed

_MOST_NAMED = 3


@dataclass(frozen=True)
class NoRoom:
    """Pods of one owner that found none."""

    owner: str
    """Whose."""

    num_pods: int
    """How many of them."""

    why: str
    """In a few words: what is short, or why no node may be taken."""


def place(pods: Iterable[PodNeed], nodes: Iterable[Node]) -> tuple[NoRoom, ...]:
    """Who finds no room; nothing: all do."""
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
                    free[node.name] = quantities.total(free[node.name], _negative(asked))
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
            free[fullest.name] = quantities.total(free[fullest.name], _negative(asked))
            placed += 1
        if placed < pod.num_pods:
            why = _why(pod, nodes, suiting, free)
            left_out.append(NoRoom(pod.owner, pod.num_pods - placed, why))
    return tuple(left_out)


def may_run(pod: PodNeed, node: Node) -> bool:
    """By selectors, affinity and taints, whatever room there is."""
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
    return quantities.total({"pods": 110.0, **node.allocatable}, _negative(node.requested))


def _negative(amounts: quantities.Amounts) -> dict[str, float]:
    return {name: -amount for name, amount in amounts.items()}


def _fits(asked: quantities.Amounts, free: quantities.Amounts) -> bool:
    # Sums of decimal fractions: a thousandth of a core is the scheduler's own unit.
    return all(amount <= free.get(name, 0.0) + 1e-6 for name, amount in asked.items())


def _weight(pod: PodNeed) -> tuple[float, float]:
    asked = pod.requests
    devices = sum(amount for name, amount in asked.items() if "/" in name)
    # Those of which each node gets one have the first claim.
    return (float("inf") if pod.num_pods == 0 else devices, asked.get("memory", 0.0))


def _why(
    pod: PodNeed,
    nodes: tuple[Node, ...],
    suiting: tuple[Node, ...],
    free: Mapping[str, quantities.Amounts],
) -> str:
    if not nodes:
        return "no node is ready"
    if not suiting:
        return "its nodeSelector, affinity or tolerations suit no node"
    short = []
    for name, amount in sorted(pod.requests.items()):
        most = max(free[node.name].get(name, 0.0) for node in suiting)
        if amount > most + 1e-6:
            asked, left = quantities.shown(name, amount), quantities.shown(name, max(0.0, most))
            short.append(f"asks for {asked}, the most that a node has left is {left}")
    return "; ".join(short) or "what it asks for is not left on any one node"
