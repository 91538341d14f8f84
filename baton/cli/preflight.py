"""`baton preflight`: what a Kubernetes cluster lacks for Baton, before anything is installed."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from baton.cli import options, render
from baton.cli.options import FILE, value
from baton.preflight import checks, manifests, model_check, needs
from baton.preflight.findings import Finding, Status
from baton.preflight.manifests import PreflightError, Release

_STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "red"}


@options.command("preflight")
@value("--chart", "FOLDER", "Render the chart in this folder.", "helm/baton", type=FILE)
@value("--release", "NAME", "Under this release's name.", "baton")
@value(
    "--values",
    "FILE",
    "With the values in this file, as helm takes them.",
    short="-f",
    multiple=True,
)
@value("--set", "KEY=VALUE", "With this value, as helm takes it.", dest="sets", multiple=True)
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
@options.as_json("Print the same as one JSON object.")
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
    from baton.preflight import reading  # the Kubernetes client takes a second to import

    reader = reading.connect(context, namespace)
    version = reader.version()
    if rendered:
        objects = manifests.read(rendered)
    else:
        install = Release(chart, release, reader.namespace, tuple(values), tuple(sets))
        objects = manifests.render(install, version)
    try:
        asked = needs.of(objects)
    except ValueError as error:
        raise PreflightError(str(error)) from error
    cluster = reader.look(asked)
    models = {str(engine.get("model", "")) for engine in model_check.engines(asked).values()}
    sizes = {model: model_check.sizes_of(model) for model in sorted(models) if model}
    findings = (*checks.all_of(asked, cluster), *model_check.check(asked, cluster, sizes))
    is_bad = any(finding.status is Status.FAIL for finding in findings)
    if as_json:
        sys.stdout.write(json.dumps(_findings_as_json(findings)) + "\n")
    else:
        render.show(_table(findings))
    return int(is_bad)


def _findings_as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    return {
        "is_ready": not any(finding.status is Status.FAIL for finding in findings),
        "findings": [
            {
                "check": finding.check,
                "status": finding.status.value,
                "what": finding.what,
                "fix": finding.fix,
            }
            for finding in findings
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
