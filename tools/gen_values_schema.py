"""Writes helm/baton/values.schema.json: every value of the chart, and every setting of its parts.

    python tools/gen_values_schema.py           write it
    python tools/gen_values_schema.py --check   fail if what lies there is something else

What stands under `settings` of a part comes from the very class that its process loads, less what
the chart says itself or the process does not heed (`MANAGED`): that is refused there, because
another value decides it, or none. All else comes from values.yaml: a value's kind is that of its
default, and keys that are not there are refused, but for groups that Kubernetes defines (`FREE`).
Helm checks values by the schema before anything is installed.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from msgspec import Meta

from engine.config import EngineConfig
from engine.speculation.config import SpeculationConfig
from kvstore.config import KvStoreSettings
from process.settings import field_docstrings, ranges
from services.autoscaler.config import AutoscalerSettings
from services.draft.config import HEEDED, HEEDED_SPECULATION, DraftSettings
from services.router.config import RouterSettings
from services.worker.config import WorkerSettings

CHART = Path(__file__).parent.parent / "helm" / "baton"
SCHEMA = CHART / "values.schema.json"

Schema = dict[str, Any]

_EVERYWHERE = ("metrics_listen", "redis_url", "redis", "tls", "listen")
_TRACING = ("tracing.endpoint", "tracing.sample_ratio")
_WORKER = (
    *_EVERYWHERE,
    *_TRACING,
    "advertised",
    "worker_id",
    "store_address",
    "handle_keys_file",
    "engine.model",
    "engine.device",
    "limits.drain_s",
)
_DRAFT = (
    "listen",
    "metrics_listen",
    "tls",
    "worker_id",
    "engine.model",
    "engine.device",
    "limits.drain_s",
    *(f"engine.{one.name}" for one in dataclasses.fields(EngineConfig) if one.name not in HEEDED),
    *(
        f"engine.speculation.{one.name}"
        for one in dataclasses.fields(SpeculationConfig)
        if one.name not in HEEDED_SPECULATION
    ),
)
MANAGED: Mapping[str, tuple[type, tuple[str, ...]]] = {
    "router": (
        RouterSettings,
        (
            *_EVERYWHERE,
            *_TRACING,
            "http_listen",
            "router_id",
            "model",
            "client_tls",
            "api_keys_file",
            "allow_anonymous",
            "tenant_secret",
            "times.drain_s",
        ),
    ),
    "prefill": (WorkerSettings, _WORKER),
    "decode": (WorkerSettings, _WORKER),
    "draft": (DraftSettings, _DRAFT),
    "kvstore": (
        KvStoreSettings,
        (
            *_EVERYWHERE,
            *_TRACING,
            "advertise",
            "node_id",
            "capacity_bytes",
            "slab_dir",
            "drain_s",
            "file_tier_dir",
            "file_tier_bytes",
        ),
    ),
    "autoscaler": (
        AutoscalerSettings,
        (
            *_EVERYWHERE,
            "autoscaler_id",
            "scaler",
            "local_address",
            "act",
            "model",
            "flip_timeout_s",
            "kubernetes.api_url",
            "kubernetes.namespace",
            "kubernetes.prefill_deployment",
            "kubernetes.decode_deployment",
            "kubernetes.pod_selector",
            "kubernetes.lease_name",
            *(
                f"plan.limits.{role}.{key}"
                for role in ("prefill", "decode")
                for key in ("min_workers", "max_workers", "num_devices")
            ),
        ),
    ),
}
"""The settings class of each part of the chart that has `settings`, and the settings that the chart
sets itself or that are not used there."""

_KINDS: Mapping[type, str] = {str: "string", bool: "boolean", int: "integer", float: "number"}

_OBJECT: Schema = {"type": "object"}
_STRINGS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
_OBJECTS: Schema = {"type": "array", "items": _OBJECT}
_NAMES: Schema = {"type": "array", "items": {"type": "string", "minLength": 1}}
_QUANTITY: Schema = {
    "type": ["string", "integer"],
    "pattern": r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$",
}
_BYTES: Schema = {**_QUANTITY, "pattern": r"^[0-9]+(\.[0-9]+)?(k|M|G|T|Ki|Mi|Gi|Ti)?$"}
_OPTIONAL_BYTES: Schema = {**_QUANTITY, "pattern": r"^([0-9]+(\.[0-9]+)?(k|M|G|T|Ki|Mi|Gi|Ti)?)?$"}
_RESOURCES: Schema = {
    "type": "object",
    "properties": {
        kind: {"type": "object", "additionalProperties": _QUANTITY}
        for kind in ("requests", "limits")
    },
    "additionalProperties": False,
}
FREE: Mapping[str, Schema] = {
    "nodeSelector": _STRINGS,
    "env": _STRINGS,
    "podLabels": _STRINGS,
    "podAnnotations": _STRINGS,
    "annotations": _STRINGS,
    "labels": _STRINGS,
    "tolerations": _OBJECTS,
    "parentRefs": _OBJECTS,
    "clientsFrom": _OBJECTS,
    "metricsFrom": _OBJECTS,
    "kedaFrom": _OBJECTS,
    "affinity": _OBJECT,
    "updateStrategy": _OBJECT,
    "pullSecrets": _NAMES,
    "httpHostnames": _NAMES,
    "grpcHostnames": _NAMES,
    "resources": _RESOURCES,
    "capacity": _BYTES,
    "shmSizeLimit": _BYTES,
    "cacheSizeLimit": _BYTES,
    "fileTier": _OPTIONAL_BYTES,
    "maxUnavailable": {"type": ["integer", "string"], "pattern": "^[0-9]+%$", "minimum": 0},
}
"""Schemas of values without a settings class, by the value's name, wherever it stands."""

CHOICES: Mapping[str, tuple[str, ...]] = {
    "model.source": ("bundled", "hub", "pvc", "image"),
    "kvstore.placement": ("sidecar", "daemonset", "none"),
    "kvstore.hugepages": ("", "2Mi", "1Gi"),
    "clients.allowAnonymous": ("inside", "anywhere", "never"),
    "tls.mode": ("off", "self-made", "cert-manager"),
    "tls.certManager.issuerRef.kind": ("Issuer", "ClusterIssuer"),
    "scaling.by": ("none", "autoscaler", "keda", "hpa"),
    "router.service.type": ("ClusterIP", "NodePort", "LoadBalancer"),
    "images.pullPolicy": ("IfNotPresent", "Always", "Never"),
    "logLevel": ("debug", "info", "warning", "error"),
}
_LEAST: Mapping[str, int] = {
    "router.replicas": 1,
    "router.drainSeconds": 1,
    "tls.selfMade.days": 40,
}
_MOST: Mapping[str, float] = {"monitoring.tracing.sampleRatio": 1}


def schema() -> Schema:
    """Make the whole JSON schema of the chart's values."""
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    made = _of_value(values, "")
    made["properties"]["global"] = {**_OBJECT, "description": "Helm's, of a chart above this one."}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the baton chart",
        "description": "Made by tools/gen_values_schema.py; do not edit.",
        **made,
    }


def _of_value(value: Any, path: str) -> Schema:
    """Make the schema of one of values.yaml, by its default."""
    name = path.rpartition(".")[2]
    if name == "settings":
        cls, managed = MANAGED[path.partition(".")[0]]
        return of_settings(cls, managed)
    if path in CHOICES:
        return {"enum": list(CHOICES[path])}
    if name in FREE:
        return FREE[name]
    if isinstance(value, dict):
        return {
            "type": "object",
            "properties": {
                key: _of_value(each, f"{path}.{key}" if path else key)
                for key, each in value.items()
            },
            "additionalProperties": False,
        }
    if isinstance(value, bool):
        return {"type": "boolean"}
    if isinstance(value, int):
        return {"type": "integer", "minimum": _LEAST.get(path, 0)}
    if isinstance(value, float):
        return {"type": "number", "minimum": 0} | (
            {"maximum": _MOST[path]} if path in _MOST else {}
        )
    if isinstance(value, str):
        return {"type": "string"}
    raise TypeError(f"values.yaml: {path}: say in FREE what a {type(value).__name__} may hold")


@dataclass(frozen=True)
class SettingsField:
    """One field of a settings class."""

    name: str
    hint: Any
    """Type of the field, resolved."""
    default: Any
    """Default of the field; `dataclasses.MISSING` for a group."""
    text: str
    """Docstring of the field, as one line."""
    ranges: Sequence[Meta]
    """Ranges of the field's value."""

    @property
    def group(self) -> type[Any] | None:
        """The settings class that the field holds, if it is a group of settings."""
        return typing.cast(type[Any], self.hint) if dataclasses.is_dataclass(self.hint) else None


def settings_fields(cls: Any) -> Iterator[SettingsField]:
    """List the fields of a settings class, in their order."""
    hints, explained = typing.get_type_hints(cls), field_docstrings(cls)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        default = dataclasses.MISSING if dataclasses.is_dataclass(hint) else field.default
        text = explained.get(field.name, "")
        yield SettingsField(field.name, hint, default, text, ranges(cls)[field.name])


def of_settings(cls: type[Any], managed: Sequence[str]) -> Schema:
    """Make the schema of a settings class, less what is managed. Raises: KeyError for a managed key
    that is not there (any more)."""
    fields = list(settings_fields(cls))
    for key in managed:
        if key.partition(".")[0] not in [field.name for field in fields]:
            raise KeyError(f"{cls.__name__} has no {key}")
    properties = {}
    for field in fields:
        name = field.name
        if name in managed:
            continue
        inner = [key.partition(".")[2] for key in managed if key.startswith(f"{name}.")]
        made = _of_hint(field.hint, inner) | _of_ranges(field.ranges)
        properties[name] = _described(made, field.text)
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _of_hint(hint: Any, managed: Sequence[str]) -> Schema:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return of_settings(typing.cast(type[Any], hint), managed)
    if origin in (types.UnionType, typing.Union):
        (inner,) = (each for each in arguments if each is not type(None))
        return _of_hint(inner, managed)  # null takes a key away, in Helm
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin is tuple:
        return {"type": "array", "items": _of_hint(arguments[0], managed)}
    return {"type": _KINDS[hint]}


def _of_ranges(metas: Sequence[Meta]) -> Schema:
    # typing keeps one of two equal Annotated types: 3600 may come out as 3600.0.
    return {
        key: int(bound) if bound == int(bound) else bound
        for meta in metas
        for key, bound in (
            ("minimum", meta.ge),
            ("exclusiveMinimum", meta.gt),
            ("maximum", meta.le),
            ("exclusiveMaximum", meta.lt),
        )
        if bound is not None
    }


def _described(made: Schema, text: str) -> Schema:
    return {"description": text, **made} if text else made


def text() -> str:
    """Make the content of values.schema.json."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Write values.schema.json, or check that it is up to date. Returns: the exit code."""
    made = text()
    if "--check" in arguments:
        is_stale = not SCHEMA.is_file() or SCHEMA.read_text(encoding="utf-8") != made
        if is_stale:
            sys.stderr.write(f"{SCHEMA.name}: not as tools/gen_values_schema.py makes it\n")
        return int(is_stale)
    SCHEMA.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
