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
from typing import Any, TypeVar

from engine.lora.errors import InvalidAdapter
from engine.lora.patterns import NotAPattern, Pattern

T = TypeVar("T")

CONFIG = "adapter_config.json"
ALL_LINEAR = "all-linear"

_MAX_CONFIG_BYTES = 1 << 20
_MAX_PATTERNS = 64
"""With repeats or alternatives; plain names may be as many as the file holds."""

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
    targets: str | Pattern | tuple[str, ...]
    """A string: ALL_LINEAR."""
    excluded: Pattern | tuple[str, ...]
    layers: frozenset[int] | None
    """None: all."""
    layers_patterns: tuple[str, ...]
    rank_pattern: Mapping[Pattern, int]
    alpha_pattern: Mapping[Pattern, float]

    def rank_of(self, module: str) -> int:
        """The rank of one module."""
        return _find(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """What B @ A is multiplied with: alpha / rank, or alpha / sqrt(rank) (rsLoRA,
        arXiv:2312.03732)."""
        alpha = _find(self.alpha_pattern, module, self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)

    def is_target(self, module: str) -> bool:
        """Whether PEFT would put an adapter on the linear layer of this name. All of them are
        candidates but the head, which the caller leaves out."""
        if _is_named(self.excluded, module):
            return False
        if isinstance(self.targets, str):
            return True
        if not _is_named(self.targets, module):
            return False
        if self.layers is None or isinstance(self.targets, Pattern) or module in self.targets:
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
        if not path.is_file():
            raise InvalidAdapter(
                CONFIG, f"{folder} has none; give the folder that PEFT's save_pretrained wrote"
            )
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise InvalidAdapter(CONFIG, f"above {_MAX_CONFIG_BYTES} bytes; give a PEFT adapter")
        values = json.loads(path.read_text(encoding="utf-8"))
    except InvalidAdapter:
        raise
    except (OSError, ValueError, RecursionError) as error:
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
    config = PeftConfig(
        rank=_positive_int("r", values.get("r")),
        alpha=_finite("lora_alpha", values.get("lora_alpha")),
        is_rank_stabilised=bool(values.get("use_rslora")),
        targets=_names("target_modules", values.get("target_modules")),
        excluded=_listed("exclude_modules", values.get("exclude_modules") or ()),
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
    for field in ("rank_pattern", "alpha_pattern"):
        num_patterns = sum(not pattern.is_plain for pattern in getattr(config, field))
        if num_patterns > _MAX_PATTERNS:
            raise InvalidAdapter(
                field, f"{num_patterns} patterns, above {_MAX_PATTERNS}; name the modules"
            )
    return config


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
    for one in _strings("layers_pattern", listed):
        if not re.fullmatch(r"\w{1,64}", one):
            raise InvalidAdapter("layers_pattern", f"{one[:80]!r} is no name of a list of layers")
    return tuple(listed)


def _names(field: str, value: Any) -> str | Pattern | tuple[str, ...]:
    if value is None:
        raise InvalidAdapter(field, "missing; name the modules that the adapter is on")
    return ALL_LINEAR if value == ALL_LINEAR else _listed(field, value)


def _listed(field: str, value: Any) -> Pattern | tuple[str, ...]:
    if isinstance(value, str):
        return _pattern(field, value)
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
    try:
        if isinstance(value, int | float) and type(value) is not bool and math.isfinite(value):
            return float(value)
    except OverflowError:  # an integer beyond the floats
        raise InvalidAdapter(field, "is no finite number: too large") from None
    raise InvalidAdapter(field, f"{value!r} is no finite number")


def _pattern(field: str, text: str) -> Pattern:
    try:
        return Pattern.parse(text)
    except NotAPattern as error:
        raise InvalidAdapter(
            field, f"{text[:80]!r} is no pattern that is matched here ({error}); list the modules"
        ) from None


def _is_named(names: Pattern | tuple[str, ...], module: str) -> bool:
    """By a pattern that matches the whole name, or by a list of names and their last parts."""
    if isinstance(names, Pattern):
        return names.is_whole(module)
    return any(module == name or module.endswith(f".{name}") for name in names)


def _find(patterns: Mapping[Pattern, T], module: str, default: T) -> T:
    """The value of the first key that matches the end of the name."""
    return next((each for pattern, each in patterns.items() if pattern.is_end(module)), default)
