"""Dashboards and alert rules ask for metrics that exist, in words that Prometheus understands."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools import gen_dashboards

ROOT = Path(__file__).parents[3]
ALERTS = ROOT / "helm" / "baton" / "alerts"
DOCS = ROOT / "docs" / "metrics.md"
_ROW = re.compile(r"\| `(\w+)` \| (\w+) \| (.*?) \|")
_SELECTED = re.compile(r"\b((?:baton|process)_\w+|up)\b(\{[^}]*\})?")
_PARTS = {"histogram": ("_bucket", "_sum", "_count")}
_WHO = {"worker_id", "role", "router_id", "node_id", "le"}
# Added by who scrapes.
_SCRAPED = {"job", "instance", "part", "kind"}


def _series() -> dict[str, set[str]]:
    """Series name -> the labels that it can have, by docs/metrics.md."""
    found = {"up": set(_SCRAPED)}
    for name, kind, labels in _ROW.findall(DOCS.read_text(encoding="utf-8")):
        own = set(re.findall(r"`(\w+)`", labels)) | _WHO | _SCRAPED
        for suffix in _PARTS.get(kind, ("",)):
            found[name + suffix] = own
    return found


def _check_query(query: str, series: dict[str, set[str]]) -> None:
    # What stands in `by (...)` and in braces is labels; the rest of the names are series.
    groups = re.findall(r"\b(?:by|on|without) \(([^)]*)\)", query)
    bare = re.sub(r"\b(?:by|on|without) \([^)]*\)", "", query)
    selected = _SELECTED.findall(bare)
    assert selected, query
    for name, braces in selected:
        assert name in series, f"{name} does not exist: {query}"
        for label in re.findall(r"(\w+)(?:=~|!~|!=|=)", braces):
            assert label in series[name], f"{name} has no label {label}: {query}"
    every = set.union(*(series[name] for name, _ in selected))
    for group in groups:
        for label in filter(None, (each.strip() for each in group.split(","))):
            assert label in every, f"no series has the label {label}: {query}"


def _dashboards() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(gen_dashboards.FOLDER.glob("*.json"))]


def test_what_lies_there_is_what_the_tool_makes() -> None:
    assert gen_dashboards.main(["--check"]) == 0
    names = {path.name for path in gen_dashboards.FOLDER.iterdir()}
    assert names == set(gen_dashboards.texts())


def test_every_panel_asks_for_what_there_is() -> None:
    series = _series()
    for dashboard in _dashboards():
        for panel in dashboard["panels"]:
            for target in panel["targets"]:
                _check_query(target["expr"], series)
                for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                    by = re.search(r"by \(([^)]*)\)", target["expr"])
                    if by:
                        assert label in re.split(r", *", by[1]), (panel["title"], label)


def test_panels_do_not_overlap_and_have_titles_of_their_own() -> None:
    for dashboard in _dashboards():
        places: set[tuple[int, int]] = set()
        for panel in dashboard["panels"]:
            at = panel["gridPos"]
            own = {
                (x, y)
                for x in range(at["x"], at["x"] + at["w"])
                for y in range(at["y"], at["y"] + at["h"])
            }
            assert not own & places, panel["title"]
            assert max(x for x, _ in own) < 24
            places |= own
        assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_every_alert_asks_for_what_there_is_and_says_what_to_do() -> None:
    series = _series()
    rules = [
        rule
        for group in yaml.safe_load((ALERTS / "baton.yaml").read_text())["groups"]
        for rule in group["rules"]
    ]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    tested = (ALERTS / "baton.test.yaml").read_text()
    for rule in rules:
        _check_query(rule["expr"], series)
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"] and rule["annotations"]["fix"]
        metric = _SELECTED.findall(rule["expr"])[0][0]
        assert metric in tested, f"{rule['alert']} has no test"


def test_a_wrong_query_is_found() -> None:
    series = _series()
    for query in (
        "sum(baton_nothing_total)",
        'baton_up{request_id="r"}',
        "sum by (what) (baton_up)",
    ):
        with pytest.raises(AssertionError):
            _check_query(query, series)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize(
    "words", [["check", "rules", "baton.yaml"], ["test", "rules", "baton.test.yaml"]]
)
def test_prometheus_takes_the_rules_and_they_fire_when_they_should(words: list[str]) -> None:
    ran = subprocess.run(
        ["promtool", *words], cwd=ALERTS, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
