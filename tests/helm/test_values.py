"""A wrong value is one line before anything is installed."""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from pathlib import Path
from typing import Any

import pytest

from tests.helm.conftest import CHART, Refused, Render, of_kind
from tests.helm.test_rendered import MATRIX
from tools import gen_values_schema


def test_the_schema_is_the_one_that_the_settings_make() -> None:
    assert gen_values_schema.SCHEMA.read_text() == gen_values_schema.text(), (
        "run `python tools/gen_values_schema.py`"
    )


def test_the_schema_knows_every_setting_or_the_chart_sets_it() -> None:
    made = json.loads(gen_values_schema.text())
    for part, (cls, managed) in gen_values_schema.MANAGED.items():
        known = made["properties"][part]["properties"]["settings"]
        for path in _paths(cls, ""):
            node = _find(known, path)
            is_managed = any(path == each or path.startswith(f"{each}.") for each in managed)
            assert (node is None) == is_managed, f"{part}.{path}"


def _paths(cls: Any, prefix: str) -> list[str]:
    hints = typing.get_type_hints(cls)
    found = []
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        path = f"{prefix}{field.name}"
        found += _paths(hint, f"{path}.") if dataclasses.is_dataclass(hint) else [path]
    return found


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("decod.replicas=2", "Additional property decod is not allowed"),
        ("decode.replica=2", "decode: Additional property replica is not allowed"),
        (
            "decode.settings.engine.blok_size=32",
            "decode.settings.engine: Additional property blok_size is not allowed",
        ),
        ("decode.settings.engine.block_size=many", "decode.settings.engine.block_size: Invalid"),
        ("decode.replicas=-1", "decode.replicas: Must be greater than or equal to 0"),
        ("router.replicas=0", "router.replicas: Must be greater than or equal to 1"),
        ("router.drainSeconds=0", "router.drainSeconds: Must be greater than or equal to 1"),
        ("monitoring.tracing.sampleRatio=2", "sampleRatio: Must be less than or equal to 1"),
        ("kvstore.capacity=lots", "kvstore.capacity: Does not match pattern"),
        ("router.settings.routing_policy=best", "router.settings.routing_policy"),
        ("tls.mode=yes", "tls.mode"),
        # Renewed once a month: what lasts less is over before.
        ("tls.selfMade.days=39", "tls.selfMade.days: Must be greater than or equal to 40"),
        # What other values decide.
        ("router.settings.tenant_secret=hush", "Additional property tenant_secret"),
        ("decode.settings.limits.drain_s=1", "Additional property drain_s is not allowed"),
        (
            "autoscaler.settings.flip_timeout_s=1",
            "Additional property flip_timeout_s is not allowed",
        ),
        # scaling.by says it: the Role lets an autoscaler that acts write another Lease.
        ("autoscaler.settings.act=false", "Additional property act is not allowed"),
        # What a draft worker does not heed.
        ("draft.settings.engine.tensor_parallel=2", "Additional property tensor_parallel"),
        ("draft.settings.engine.kv_bytes=2000000", "Additional property kv_bytes is not allowed"),
        ("draft.settings.limits.drain_s=9", "Additional property drain_s is not allowed"),
        ("decode.resources.limit.memory=1Gi", "Additional property limit is not allowed"),
    ],
)
def test_a_wrong_value_is_named(render: Render, value: str, message: str) -> None:
    with pytest.raises(Refused) as told:
        render(value)
    lines = [line for line in str(told.value).splitlines() if line.startswith("- ")]
    assert len(lines) == 1 and message in lines[0], told.value
    assert "hush" not in str(told.value)


_DRAFTS = ("draft.replicas=1", "draft.model=baton-5m-draft")
_PVC = ("draft.replicas=1", "model.source=pvc", "model.name=m", "model.pvc.claimName=c")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["model.name=Qwen/Qwen3-8B"], 'model.name: "Qwen/Qwen3-8B" is no bundled model'),
        (["model.source=pvc", "model.name=m"], "model.pvc.claimName: needed"),
        (["model.source=image", "model.name=m"], "model.image.reference: needed"),
        (["redis.enabled=false"], "redis.url: needed"),
        (["redis.url=redis://x:1"], "redis.url: is for redis.enabled=false"),
        (["redis.enabled=false", "redis.url=redis://:pw@x:1"], "redis.url: holds a user"),
        (["redis.user=me"], "redis.user: needs redis.existingSecret"),
        (["decode.gpus=2"], "decode.gpus: 2, but decode.settings.engine has"),
        (["router.service.type=LoadBalancer"], "clients.apiKeysSecret: needed for a router"),
        (["clients.allowAnonymous=never"], "clients.apiKeysSecret: needed with"),
        (["tls.mode=cert-manager"], "tls.certManager.issuerRef.name: needed"),
        (["scaling.decode.min=5"], "scaling.decode.min: 5 is above max, 4"),
        (["scaling.by=keda", "tls.mode=self-made"], "scaling.by: KEDA"),
        (
            ["scaling.by=hpa", "scaling.prefill.min=0", "scaling.prefill.max=0"],
            "scaling.prefill.max: 0",
        ),
        (
            ["scaling.by=keda", "scaling.decode.min=0", "scaling.decode.max=0"],
            "scaling.decode.max: 0, but the HPA that KEDA makes",
        ),
        (
            [r"decode.podLabels.app\.kubernetes\.io/component=prefill"],
            'decode.podLabels: "app.kubernetes.io/component" is the chart\'s own',
        ),
        (
            [r"router.podLabels.app\.kubernetes\.io/instance=other"],
            'router.podLabels: "app.kubernetes.io/instance" is the chart\'s own',
        ),
        (["kvstore.placement=daemonset"], "kvstore.placement: daemonset opens port 8520 of"),
        (["draft.replicas=1"], "draft.model: needed with draft.replicas"),
        (["draft.replicas=1", "draft.model=Qwen/x"], 'draft.model: "Qwen/x" is no bundled model'),
        ([*_PVC, "draft.model=a/b"], 'draft.model: "a/b": name the folder of draft.pvc'),
        ([*_PVC, "draft.model=d"], "draft.pvc: is the folder of model.pvc"),
        ([*_PVC, "draft.model=d", "draft.pvc.claimName=c"], "draft.pvc: is the folder of"),
        (
            [
                *("draft.replicas=1", "draft.model=d"),
                *("model.source=image", "model.name=m", "model.image.reference=r/m:1"),
            ],
            "draft.image.reference: needed with draft.replicas",
        ),
        ([*_DRAFTS, "draft.gpus=2"], "draft.gpus: 2, but a draft worker computes on one GPU"),
        (
            [*_DRAFTS, "decode.settings.engine.speculation.draft_workers[0]=x:1"],
            "decode.settings.engine.speculation.draft_workers: the chart names its own",
        ),
        (
            [r"draft.podLabels.app\.kubernetes\.io/component=decode"],
            'draft.podLabels: "app.kubernetes.io/component" is the chart\'s own',
        ),
        (
            ["router.gateway.enabled=true", "clients.allowAnonymous=anywhere"],
            "router.gateway.parentRefs: needed",
        ),
    ],
)
def test_values_that_do_not_fit_together_are_named(
    render: Render, values: list[str], message: str
) -> None:
    with pytest.raises(Refused) as told:
        render(*values)
    first, *rest = str(told.value).splitlines()
    assert f"baton: {message}" in first
    assert not [line for line in rest if line and "--debug" not in line]
    assert ":pw@" not in first


def test_what_is_asked_for_by_name_is_taken(render: Render) -> None:
    """The other side of two refusals above."""
    assert render("kvstore.placement=daemonset", "kvstore.allowPlaintext=true")
    labelled = render(r"decode.podLabels.app\.kubernetes\.io/part-of=search")
    labels = of_kind(labelled, "Deployment")["baton-decode"]["spec"]["template"]["metadata"]
    assert labels["labels"]["app.kubernetes.io/part-of"] == "search"


def test_what_the_matrix_sets_is_all_known(render: Render) -> None:
    """The messages above come from wrong values, not from a chart that refuses everything."""
    assert all(render(*values) for values in MATRIX.values())


def test_the_values_in_the_page_on_installing_are_taken(render: Render, tmp_path: Path) -> None:
    page = (CHART.parents[1] / "docs" / "install.md").read_text()
    blocks = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 2
    for index, block in enumerate(blocks):
        file = tmp_path / f"{index}.yaml"
        file.write_text(block)
        assert render(files=(file,))
    named = re.findall(r"`((?:\w+\.)+\w+)(?:=[\w-]+)?`", page)
    schema = json.loads(gen_values_schema.text())
    for name in named:
        if name.partition(".")[0] in schema["properties"]:
            known = name.partition(".resources.")[0]  # what lies in there Kubernetes knows
            assert _find(schema, known) is not None, f"install.md names {name}"


def _find(schema: Any, path: str) -> Any:
    for key in path.split("."):
        schema = (schema or {}).get("properties", {}).get(key)
    return schema
