"""Quantities as Kubernetes writes them, and how people read them. Pure."""

from __future__ import annotations

from collections.abc import Mapping

_FACTORS: dict[str, float] = {
    **{unit: 1024 ** (power + 1) for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi"))},
    **{unit: 1000 ** (power + 1) for power, unit in enumerate(("k", "M", "G", "T", "P"))},
    "n": 1e-9,
    "u": 1e-6,
    "m": 1e-3,
}

Amounts = Mapping[str, float]
"""Of each resource: cores, bytes, or a count."""


def parse(text: str | int | float) -> float:
    """Cores, bytes or a count. Raises: ValueError for what is no quantity."""
    written = str(text).strip()
    for unit in sorted(_FACTORS, key=len, reverse=True):
        if written.endswith(unit):
            return float(written.removesuffix(unit)) * _FACTORS[unit]
    return float(written)


def parse_all(amounts: Mapping[str, str | int | float]) -> dict[str, float]:
    """A map of resources as `requests`, `limits` and `allocatable` have them."""
    return {name: parse(amount) for name, amount in amounts.items()}


def total(*parts: Amounts) -> dict[str, float]:
    """The sum, resource by resource."""
    summed: dict[str, float] = {}
    for part in parts:
        for name, amount in part.items():
            summed[name] = summed.get(name, 0.0) + amount
    return summed


def most(*parts: Amounts) -> dict[str, float]:
    """The largest, resource by resource."""
    largest: dict[str, float] = {}
    for part in parts:
        for name, amount in part.items():
            largest[name] = max(largest.get(name, 0.0), amount)
    return largest


def shown(name: str, amount: float) -> str:
    """As people read it: "1.5 cores", "4.0 GiB memory", "2 nvidia.com/gpu"."""
    if name == "cpu":
        return f"{amount:.2g} cores" if amount < 10 else f"{amount:.0f} cores"
    if name in ("memory", "ephemeral-storage") or name.startswith("hugepages-"):
        return f"{amount / 2**30:.1f} GiB {name}"
    return f"{amount:g} {name}"
