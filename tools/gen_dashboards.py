"""Writes the Grafana dashboards in helm/baton/dashboards from the panels of dashboard_panels.py.

    python -m tools.gen_dashboards           write them
    python -m tools.gen_dashboards --check   fail if what lies there is something else

A panel is a title, a unit and its queries; where it stands is computed. Every query is checked
against the metrics that exist (tests/unit/tools/test_dashboards.py), and against a real Prometheus
where there is one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.dashboard_panels import DASHBOARDS, Panel

FOLDER = Path(__file__).parent.parent / "helm" / "baton" / "dashboards"
_WIDTH, _HEIGHT, _STAT_HEIGHT = 24, 8, 4
_SOURCE = {"type": "prometheus", "uid": "${source}"}


def dashboard(uid: str, title: str, text: str, panels: Sequence[Panel]) -> dict[str, Any]:
    """Make one dashboard as Grafana imports it."""
    return {
        "uid": uid,
        "title": title,
        "description": text,
        "tags": ["baton"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "source",
                    "label": "Data source",
                    "type": "datasource",
                    "query": "prometheus",
                    "current": {},
                    "hide": 0,
                }
            ]
        },
        "annotations": {"list": []},
        "panels": _placed(panels),
    }


def _placed(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """Row by row, left to right; a row is as high as its first panel."""
    made, x, y, height = [], 0, 0, 0
    for number, panel in enumerate(panels, start=1):
        own = _STAT_HEIGHT if panel.kind == "stat" else _HEIGHT
        if x + panel.width > _WIDTH or (x and own != height):
            x, y = 0, y + height
        height = own
        place = {"x": x, "y": y, "w": panel.width, "h": own}
        made.append(_panel(number, panel, place))
        x += panel.width
    return made


def _panel(number: int, panel: Panel, place: Mapping[str, int]) -> dict[str, Any]:
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": _SOURCE,
            "expr": query,
            "legendFormat": legend,
            **({"format": "heatmap"} if panel.kind == "heatmap" else {}),
        }
        for index, (legend, query) in enumerate(panel.queries)
    ]
    options: dict[str, Any] = {}
    if panel.kind == "stat":
        options = {"colorMode": "value", "graphMode": "area", "reduceOptions": {"calcs": ["last"]}}
    elif panel.kind == "timeseries":
        options = {"legend": {"displayMode": "list", "placement": "bottom"}}
    return {
        "id": number,
        "title": panel.title,
        "description": panel.text,
        "type": panel.kind,
        "datasource": _SOURCE,
        "gridPos": dict(place),
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": options,
        "targets": targets,
    }


def texts() -> dict[str, str]:
    """Make the content of each dashboard's file, by file name."""
    return {
        f"{uid}.json": json.dumps(dashboard(uid, *parts), indent=1) + "\n"
        for uid, parts in DASHBOARDS.items()
    }


def main(arguments: Sequence[str]) -> int:
    """Write the dashboards, or check that they are up to date. Returns: the exit code."""
    stale = [
        name
        for name, text in texts().items()
        if not (FOLDER / name).is_file() or (FOLDER / name).read_text(encoding="utf-8") != text
    ]
    if "--check" in arguments:
        if stale:
            sys.stderr.write(f"not as tools/gen_dashboards.py makes them: {', '.join(stale)}\n")
        return 1 if stale else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in texts().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
