"""Where a Prometheus finds the processes of a local cluster: `prometheus.yml` and the list of
targets that it names, in the cluster's run folder.

The list is written anew whenever a part is ready, for a new life of it listens on another port;
each file is replaced as a whole, so that a reader never sees half of one. Pure but for the writing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

SCRAPE_INTERVAL_S = 5
_CONFIG = "prometheus.yml"
_TARGETS = "targets.json"


@dataclass(frozen=True)
class Target:
    """One process that serves /metrics. address: host:port."""

    name: str
    kind: str
    address: str


def config_text(targets_path: Path) -> str:
    """A Prometheus configuration that follows the targets of one cluster."""
    return (
        "# Start it with: prometheus --config.file=THIS_FILE\n"
        "global:\n"
        f"  scrape_interval: {SCRAPE_INTERVAL_S}s\n"
        f"  evaluation_interval: {SCRAPE_INTERVAL_S}s\n"
        "scrape_configs:\n"
        "  - job_name: baton\n"
        "    file_sd_configs:\n"
        f"      - files: [{json.dumps(str(targets_path))}]\n"
        f"        refresh_interval: {SCRAPE_INTERVAL_S}s\n"
    )


def targets_text(targets: Iterable[Target]) -> str:
    """The targets as Prometheus' file discovery reads them, one group each, labelled by who it
    is."""
    groups: list[Mapping[str, object]] = [
        {"targets": [each.address], "labels": {"part": each.name, "kind": each.kind}}
        for each in sorted(targets, key=lambda each: each.name)
    ]
    return json.dumps(groups, indent=2) + "\n"


def write(folder: Path, targets: Iterable[Target]) -> Path:
    """Both files. Returns: the configuration's path. Raises: OSError."""
    targets_path, config_path = folder / _TARGETS, folder / _CONFIG
    _replace(targets_path, targets_text(targets))
    _replace(config_path, config_text(targets_path))
    return config_path


def _replace(path: Path, text: str) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(text, encoding="utf-8")
    os.replace(fresh, path)
