"""A strict reader of /metrics: the text as Prometheus' own format demands it, and our rules on top
of that, which Prometheus would forgive.
"""

from __future__ import annotations

import asyncio
import math
import re
import urllib.request
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

UNITS = ("seconds", "bytes", "ratio", "total", "info")
MAX_SERIES = 200
"""Of one process and family, buckets counted once. More would be a label without a bound."""
MAX_LABEL_CHARS = 64
_NAME = re.compile(r"(baton|process)_[a-z][a-z0-9_]*")
WHO = ({"worker_id", "role"}, {"router_id"}, {"node_id"}, {"autoscaler_id"})
"""Who a sample of ours is of: on every one, and nothing else says it."""
BY = {
    *("le", "state", "class", "reason", "source", "direction", "transport", "place", "path"),
    *("outcome", "code", "stage", "policy", "term", "what", "role", "tenant", "peer", "cause"),
    "signal",
}
"""All other labels there are. Each has few values, known before."""


@dataclass(frozen=True)
class Family:
    """One metric: `name` as its TYPE line says it."""

    name: str
    type: str
    help: str
    samples: tuple[Sample, ...]

    @property
    def labels(self) -> set[str]:
        """Of all samples."""
        return {name for sample in self.samples for name in sample.labels if name != "le"}


def read(text: str) -> dict[str, Family]:
    """Families by name. Raises: AssertionError naming what is not as it should be."""
    assert text.endswith("\n")
    names = _check_lines(text)
    families = {}
    for parsed in text_string_to_metric_families(text):
        # The parser takes `_total` off a counter's name; the text has it on its TYPE line.
        name = f"{parsed.name}_total" if parsed.type == "counter" else parsed.name
        family = Family(name, parsed.type, parsed.documentation, tuple(parsed.samples))
        _check_family(family)
        families[name] = family
    assert set(families) == set(names)
    return families


async def scrape(address: str) -> dict[str, Family]:
    """What /metrics there says now; see `read`."""

    def get() -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as reply:
            assert "text/plain" in reply.headers["Content-Type"]
            return str(reply.read().decode())

    return read(await asyncio.to_thread(get))


def values(families: Mapping[str, Family]) -> dict[str, float]:
    """Of the samples, by name and what else than who it is of they are labelled with, in the order
    of the labels' names; with commas."""
    found = {}
    for sample in (sample for family in families.values() for sample in family.samples):
        who = next((who for who in WHO if who <= set(sample.labels)), set())
        labels = [value for name, value in sorted(sample.labels.items()) if name not in who]
        found[",".join([sample.name, *labels])] = sample.value
    return found


def check_grown(before: Mapping[str, Family], after: Mapping[str, Family]) -> None:
    """What counts since start never goes down, and no series of it goes away."""
    for name, family in before.items():
        if family.type not in ("counter", "histogram"):
            continue
        later = {_series(sample): sample.value for sample in after[name].samples}
        for sample in family.samples:
            assert later[_series(sample)] >= sample.value, f"{_series(sample)} went down"


def _check_lines(text: str) -> list[str]:
    """HELP, TYPE, then the samples of that family and no other's. Returns: names in order."""
    names: list[str] = []
    helped = ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            helped, _, words = line.removeprefix("# HELP ").partition(" ")
            assert words.strip(), f"{helped} has no help"
        elif line.startswith("# TYPE "):
            name, _, kind = line.removeprefix("# TYPE ").partition(" ")
            assert name == helped, f"TYPE of {name} does not follow its HELP"
            assert kind in ("counter", "gauge", "histogram"), f"{name} is a {kind}"
            names.append(name)
        else:
            assert line and not line.startswith("#"), f"unexpected line {line!r}"
            assert re.match(rf"{names[-1]}(_bucket|_sum|_count)?[{{ ]", line), line
    assert len(set(names)) == len(names), "a family comes twice"
    return names


def _check_family(family: Family) -> None:
    name, samples = family.name, family.samples
    assert _NAME.fullmatch(name), name
    assert (family.type == "counter") == name.endswith("_total"), f"{name} is a {family.type}"
    series = Counter(_series(sample) for sample in samples)
    assert not [key for key, count in series.items() if count > 1], f"{name}: a series comes twice"
    assert len({_series(s) for s in samples if "le" not in s.labels}) <= MAX_SERIES, name
    for sample in samples:
        _check_labels(sample)
        assert not math.isnan(sample.value), sample
        if family.type != "gauge":
            assert sample.value >= 0 and math.isfinite(sample.value), sample
    if family.type == "histogram":
        assert name.endswith(UNITS[:2]), f"{name}: no unit"
        _check_histogram(name, samples)


def _check_labels(sample: Sample) -> None:
    labels = sample.labels
    if sample.name.startswith("process_"):
        assert not labels, sample
        return
    assert any(who <= set(labels) for who in WHO), f"{sample}: nobody's"
    extra = set(labels) - {name for who in WHO for name in who} - BY
    assert not extra, f"{sample.name}: labels without a bound: {extra}"
    assert all(0 < len(value) <= MAX_LABEL_CHARS for value in labels.values()), sample


def _check_histogram(name: str, samples: Iterable[Sample]) -> None:
    buckets: dict[frozenset[tuple[str, str]], list[tuple[float, float]]] = {}
    ends: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for sample in samples:
        own = frozenset((k, v) for k, v in sample.labels.items() if k != "le")
        if sample.name == f"{name}_bucket":
            buckets.setdefault(own, []).append((float(sample.labels["le"]), sample.value))
        else:
            ends[sample.name.removeprefix(f"{name}_"), own] = sample.value
    for own, found in buckets.items():
        bounds, counts = zip(*found, strict=True)
        assert list(bounds) == sorted(set(bounds)) and bounds[-1] == math.inf, name
        assert list(counts) == sorted(counts), f"{name}: buckets are not cumulative"
        assert ends["count", own] == counts[-1] and ("sum", own) in ends, name
    assert {own for kind, own in ends if kind == "count"} == set(buckets), name


def _series(sample: Sample) -> tuple[str, tuple[tuple[str, str], ...]]:
    return sample.name, tuple(sorted(sample.labels.items()))
