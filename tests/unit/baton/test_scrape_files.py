"""The files by which a Prometheus finds a local cluster."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from baton.cluster import local_cluster
from baton.cluster.local_cluster import ScrapeTarget


def test_the_configuration_names_the_targets(tmp_path: Path) -> None:
    folder = tmp_path / 'with "quotes" and spaces'
    folder.mkdir()
    targets = [
        ScrapeTarget("router", "router", "127.0.0.1:2"),
        ScrapeTarget("decode-0", "decode", "127.0.0.1:1"),
    ]
    path = local_cluster.write_scrape_files(folder, targets)
    (job,) = yaml.safe_load(path.read_text())["scrape_configs"]
    (found,) = job["file_sd_configs"][0]["files"]
    assert json.loads(Path(found).read_text()) == [
        {"targets": ["127.0.0.1:1"], "labels": {"part": "decode-0", "kind": "decode"}},
        {"targets": ["127.0.0.1:2"], "labels": {"part": "router", "kind": "router"}},
    ]
    local_cluster.write_scrape_files(folder, targets[:1])
    assert len(json.loads(Path(found).read_text())) == 1
    assert {each.name for each in folder.iterdir()} == {"prometheus.yml", "targets.json"}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_reads_it(tmp_path: Path) -> None:
    path = local_cluster.write_scrape_files(
        tmp_path, [ScrapeTarget("store", "store", "127.0.0.1:1")]
    )
    checked = subprocess.run(
        ["promtool", "check", "config", str(path)], capture_output=True, text=True, timeout=30
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
