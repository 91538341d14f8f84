"""`baton preflight`: what a Kubernetes cluster lacks for Baton, before anything is installed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from baton.cli import options, render
from baton.cli.options import FILE, value
from baton.preflight import chart_needs, checks, cluster, memory_check
from baton.preflight.chart_needs import PreflightError, Release
from baton.preflight.checks import Finding, Status

_STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "red"}


@options.command("preflight")
@value("--chart", "FOLDER", "Render the chart in this folder.", "helm/baton", type=FILE)
@value("--release", "NAME", "Render it under this release name.", "baton")
@value(
    "--values",
    "FILE",
    "Take the chart's values from this file, as `helm --values`.",
    short="-f",
    multiple=True,
)
@value(
    "--set",
    "KEY=VALUE",
    "Set this value of the chart, as `helm --set`.",
    dest="sets",
    multiple=True,
)
@value(
    "--manifests",
    "FILE",
    "Check the rendered objects in this file (- for standard input) instead of the chart.",
    "",
    dest="rendered",
)
@value("--context", "NAME", "Use this context of your kubeconfig.", "")
@value(
    "--namespace", "NAME", "Check this namespace. By default it is the context's.", "", short="-n"
)
@options.as_json()
def preflight(
    chart: Path,
    release: str,
    values: Sequence[str],
    sets: Sequence[str],
    rendered: str,
    context: str,
    namespace: str,
    as_json: bool,
) -> int:
    """Show what a Kubernetes cluster lacks for Baton, before anything is installed.

    Renders the chart with your values, as `helm install` would, and compares what its objects need
    with what the cluster has: version, kinds, permissions, Pod Security, secrets, devices, room on
    nodes, memory for the model, metrics, images. It changes nothing. Exit code 1: something must be
    fixed.
    """
    reader = cluster.connect(context, namespace)
    version = reader.version()
    if rendered:
        objects = chart_needs.read(rendered)
    else:
        install = Release(chart, release, reader.namespace, tuple(values), tuple(sets))
        objects = chart_needs.render(install, version)
    try:
        asked = chart_needs.collect_needs(objects)
    except ValueError as error:
        raise PreflightError(str(error)) from error
    there = reader.look(asked)
    names = {str(engine.get("model", "")) for engine in memory_check.engines(asked).values()}
    sizes = {name: memory_check.sizes_of(name) for name in sorted(names) if name}
    findings = (*checks.all_of(asked, there), *memory_check.check(asked, there, sizes))
    is_bad = any(finding.status is Status.FAIL for finding in findings)
    if as_json:
        render.print_json(_findings_as_json(findings))
    else:
        render.show(_table(findings))
    return int(is_bad)


def _findings_as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    return {
        "is_ready": not any(finding.status is Status.FAIL for finding in findings),
        "findings": [
            dataclasses.asdict(finding) | {"status": finding.status.value} for finding in findings
        ],
    }


def _table(findings: Sequence[Finding]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        what = Text(finding.what)
        if finding.fix and finding.status is not Status.OK:
            what.append(f"\n{finding.fix}", style="dim")
        status = Text(finding.status.value, style=_STYLES[finding.status])
        table.add_row(status, finding.check, what)
    return table
