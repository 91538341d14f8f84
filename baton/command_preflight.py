"""`baton preflight`: what a Kubernetes cluster lacks for Baton, before anything is installed.

Renders the chart with your values, as `helm install` would, and compares what its objects need with
what the cluster has: version, kinds, permissions, Pod Security, secrets, devices, room on nodes,
memory for the model, metrics, images. It changes nothing. Exit code 1: something must be fixed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from baton.preflight import checks, manifests, model_check, needs
from baton.preflight.findings import Finding, Status
from baton.preflight.manifests import PreflightError, Release
from baton.provenance_view import show

_STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "red"}


def add_parser(commands: Any) -> None:
    """`baton preflight` and its options."""
    parser = commands.add_parser(
        "preflight", help="what a Kubernetes cluster lacks for Baton", description=__doc__
    )
    parser.add_argument(
        "--chart",
        type=Path,
        default=Path("helm/baton"),
        metavar="FOLDER",
        help="default: helm/baton",
    )
    parser.add_argument("--release", default="baton", metavar="NAME", help="default: baton")
    parser.add_argument(
        "-f", "--values", action="append", default=[], metavar="FILE", help="as helm's; repeatable"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="as helm's; repeatable"
    )
    parser.add_argument(
        "--manifests",
        metavar="FILE",
        help="objects that are rendered already, - for standard input; instead of the chart",
    )
    parser.add_argument("--context", default="", metavar="NAME", help="of your kubeconfig")
    parser.add_argument(
        "-n", "--namespace", default="", metavar="NAME", help="default: the context's"
    )
    parser.add_argument("--json", action="store_true", help="the same as one JSON object")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Returns: 0 if nothing must be fixed, else 1. Raises: PreflightError when no look is
    possible."""
    from baton.preflight import reading  # the Kubernetes client takes a second to import

    reader = reading.connect(parsed.context, parsed.namespace)
    version = reader.version()
    if parsed.manifests:
        objects = manifests.read(parsed.manifests)
    else:
        release = Release(
            parsed.chart,
            parsed.release,
            reader.namespace,
            tuple(parsed.values),
            tuple(parsed.set),
        )
        objects = manifests.render(release, version)
    try:
        asked = needs.of(objects)
    except ValueError as error:
        raise PreflightError(str(error)) from error
    cluster = reader.look(asked)
    models = {str(engine.get("model", "")) for engine in model_check.engines(asked).values()}
    sizes = {model: model_check.sizes_of(model) for model in sorted(models) if model}
    findings = (*checks.all_of(asked, cluster), *model_check.check(asked, cluster, sizes))
    is_bad = any(finding.status is Status.FAIL for finding in findings)
    if parsed.json:
        sys.stdout.write(json.dumps(_as_json(findings)) + "\n")
    else:
        show(_table(findings))
    return int(is_bad)


def _as_json(findings: Sequence[Finding]) -> dict[str, Any]:
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
