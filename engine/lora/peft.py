"""adapter_config.json of a published PEFT LoRA adapter: what it says of which module, and the
refusal by name of whatever would make us compute something else than PEFT does.

Pure functions over plain values; no torch, any thread. Source: PEFT's LoraConfig and its
`check_target_module_exists` and `get_pattern_key` (behaviour, not code).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.lora.errors import InvalidAdapter

CONFIG = "adapter_config.json"
ALL_LINEAR = "all-linear"

_MAX_CONFIG_BYTES = 1 << 20
_MAX_PATTERN_CHARS = 512
_MAX_UNBOUNDED_REPEATS = 5

_READ = frozenset(
    {
        "peft_type", "task_type", "r", "lora_alpha", "use_rslora", "target_modules",
        "exclude_modules", "layers_to_transform", "layers_pattern", "rank_pattern",
        "alpha_pattern", "bias", "init_lora_weights",
    }
)  # fmt: skip

_HARMLESS = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "revision", "peft_version", "inference_mode",
        "lora_dropout", "megatron_core", "qalora_group_size", "loftq_config", "eva_config",
    }
)  # fmt: skip
"""Fields that say nothing of what is computed when serving. Any other that is set is refused."""

_REASONS = {
    "use_dora": "DoRA scales the base weights, too",
    "modules_to_save": "whole retrained modules are not LoRA",
    "target_parameters": "adapters on bare parameters (MoE experts)",
    "trainable_token_indices": "retrained embeddings",
    "layer_replication": "a model with copied layers is another model",
    "alora_invocation_tokens": "an adapter that begins in the middle of a prompt",
    "lora_bias": "biases beside B",
    "fan_in_fan_out": "transposed weights",
    "use_qalora": "pooled inputs",
}

_HARMLESS_INITS = frozenset({True, False, None, "gaussian", "eva"})
"""Ways to start training that leave the base weights alone; PiSSA, OLoRA, CorDA, LoftQ do not."""


@dataclass(frozen=True)
class PeftConfig:
    """What counts of an adapter_config.json."""

    rank: int
    alpha: float
    is_rank_stabilised: bool
    targets: str | tuple[str, ...]
    excluded: str | tuple[str, ...]
    layers: frozenset[int] | None
    """None: all."""
    layers_patterns: tuple[str, ...]
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    def rank_of(self, module: str) -> int:
        """The rank of one module."""
        return self.rank_pattern.get(_find_pattern(self.rank_pattern, module), self.rank)

    def scale_of(self, module: str) -> float:
        """What B @ A is multiplied with: alpha / rank, or alpha / sqrt(rank) (rsLoRA,
        arXiv:2312.03732)."""
        alpha = self.alpha_pattern.get(_find_pattern(self.alpha_pattern, module), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)

    def is_target(self, module: str) -> bool:
        """Whether PEFT would put an adapter on the linear layer of this name. All of them are
        candidates but the head, which the caller leaves out."""
        if _is_named(self.excluded, module):
            return False
        if self.targets == ALL_LINEAR:
            return True
        if not _is_named(self.targets, module):
            return False
        if self.layers is None or isinstance(self.targets, str) or module in self.targets:
            return True
        for pattern in self.layers_patterns or (r"[^.]*",):
            found = re.match(rf".*\.{pattern}\.(\d+)\.", module)
            if found:
                return int(found.group(1)) in self.layers
        return False


def read_config(folder: Path) -> PeftConfig:
    """The adapter's config. Raises: InvalidAdapter naming the field and what to do."""
    path = folder / CONFIG
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise InvalidAdapter(CONFIG, f"above {_MAX_CONFIG_BYTES} bytes; give a PEFT adapter")
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidAdapter(
            CONFIG, f"{folder} has none; give the folder that PEFT's save_pretrained wrote"
        ) from None
    except (OSError, ValueError) as error:
        raise InvalidAdapter(CONFIG, f"cannot be read as JSON ({error}); fetch it again") from None
    if not isinstance(values, dict):
        raise InvalidAdapter(CONFIG, "is no JSON object; fetch it again")
    return parse(values)


def parse(values: Mapping[str, Any]) -> PeftConfig:
    """A config from the values of its file. Raises: InvalidAdapter naming the field."""
    _check_refused(values)
    layers = values.get("layers_to_transform")
    if isinstance(layers, int):
        layers = [layers]
    return PeftConfig(
        rank=_positive_int("r", values.get("r")),
        alpha=_finite("lora_alpha", values.get("lora_alpha")),
        is_rank_stabilised=bool(values.get("use_rslora")),
        targets=_names("target_modules", values.get("target_modules")),
        excluded=_names("exclude_modules", values.get("exclude_modules") or ()),
        layers=frozenset(_ints("layers_to_transform", layers)) if layers else None,
        layers_patterns=_layers_patterns(values.get("layers_pattern")),
        rank_pattern={
            _pattern("rank_pattern", key): _positive_int(f"rank_pattern.{key}", value)
            for key, value in _mapping("rank_pattern", values).items()
        },
        alpha_pattern={
            _pattern("alpha_pattern", key): _finite(f"alpha_pattern.{key}", value)
            for key, value in _mapping("alpha_pattern", values).items()
        },
    )


def _check_refused(values: Mapping[str, Any]) -> None:
    if values.get("peft_type") != "LORA":
        raise InvalidAdapter("peft_type", f"{values.get('peft_type')!r}; only LORA is served")
    if values.get("task_type") not in (None, "CAUSAL_LM"):
        raise InvalidAdapter(
            "task_type", f"{values.get('task_type')!r}; only CAUSAL_LM adapters are served"
        )
    if values.get("bias", "none") != "none":
        raise InvalidAdapter(
            "bias", f"{values['bias']!r} is not supported; train with bias='none' or merge it"
        )
    init = values.get("init_lora_weights")
    if not isinstance(init, bool | str | None) or init not in _HARMLESS_INITS:
        raise InvalidAdapter(
            "init_lora_weights",
            f"{init!r} changes the base weights; save the adapter converted to plain LoRA "
            "(path_initial_model_for_weight_conversion) or merge it",
        )
    for name, value in values.items():
        if name in _READ or name in _HARMLESS or value in (None, False, "", [], {}):
            continue
        reason = _REASONS.get(name, "this engine does not know the field")
        raise InvalidAdapter(name, f"{value!r} is not supported ({reason}); merge the adapter")


def _layers_patterns(value: Any) -> tuple[str, ...]:
    listed = [value] if isinstance(value, str) else value or []
    return tuple(_pattern("layers_pattern", one) for one in _strings("layers_pattern", listed))


def _names(field: str, value: Any) -> str | tuple[str, ...]:
    if isinstance(value, str):
        return value if value == ALL_LINEAR else _pattern(field, value)
    if value is None:
        raise InvalidAdapter(field, "missing; name the modules that the adapter is on")
    return tuple(sorted(_strings(field, value)))


def _strings(field: str, value: Any) -> list[str]:
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
        raise InvalidAdapter(field, "is neither a string nor a list of strings")
    return list(value)


def _ints(field: str, value: Any) -> list[int]:
    if not isinstance(value, list) or not all(type(one) is int for one in value):
        raise InvalidAdapter(field, "is no list of layer numbers")
    return value


def _mapping(field: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    value = values.get(field) or {}
    if not isinstance(value, dict):
        raise InvalidAdapter(field, "is no JSON object")
    return value


def _positive_int(field: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise InvalidAdapter(field, f"{value!r} is no positive integer")
    return value


def _finite(field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidAdapter(field, f"{value!r} is no finite number")
    return float(value)


def _pattern(field: str, pattern: str) -> str:
    """A regular expression that cannot run for long on a module's name.

    Python's matcher has no deadline, so what could be exponential (a repeated group) and a high
    polynomial (many unbounded repeats) is refused; plain names and PEFT's usual patterns are not.
    """
    repeats = re.sub(r"\\.|\[[^\]]*\]", "x", pattern)  # what is escaped or in a class repeats none
    if (
        len(pattern) > _MAX_PATTERN_CHARS
        or re.search(r"\)[*+{]", repeats)
        or len(re.findall(r"[*+]|\{\d+,\}", repeats)) > _MAX_UNBOUNDED_REPEATS
    ):
        raise InvalidAdapter(field, f"{pattern[:80]!r} could match for too long; list the modules")
    try:
        re.compile(pattern)
    except re.error as error:
        raise InvalidAdapter(field, f"{pattern[:80]!r} is no pattern ({error})") from None
    return pattern


def _is_named(names: str | tuple[str, ...], module: str) -> bool:
    """By a pattern that matches the whole name, or by a list of names and their last parts."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _find_pattern(patterns: Mapping[str, Any], module: str) -> str:
    """The first key that matches the end of the name; empty: none does."""
    for pattern in patterns:
        if re.match(rf"(.*\.)?({pattern})$", module):
            return pattern
    return ""
