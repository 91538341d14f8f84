"""What a sampling field means that the client left out: the model's own default, as `transformers`
would read it.

`generation_config.json` says so: with `do_sample` its temperature, top_p and top_k; without it (or
without the file) greedy. Workers always get every field. Pure but for one read of the file at
start.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from process.settings import SettingsError
from protos import common_pb2


@dataclass(frozen=True)
class SamplingDefaults:
    """A model's defaults."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


def read_defaults(folder: Path) -> SamplingDefaults:
    """The defaults of the checkpoint in `folder`.

    Raises: SettingsError when `generation_config.json` is there but cannot be used.
    """
    file = folder / "generation_config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return SamplingDefaults()
    except (OSError, ValueError) as error:
        raise SettingsError(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(config, dict) or not config.get("do_sample"):
        return SamplingDefaults()
    top_p, min_p = _number(file, config, "top_p", 1.0), _number(file, config, "min_p", 0.0)
    temperature, top_k = _number(file, config, "temperature", 1.0), config.get("top_k") or 0
    is_sane = temperature >= 0 and 0 < top_p <= 1 and 0 <= min_p < 1
    if not (is_sane and isinstance(top_k, int) and top_k >= 0):
        raise SettingsError(f"{file}: temperature, top_p, top_k or min_p is out of range")
    return SamplingDefaults(temperature, top_p, top_k, min_p)


def fill(
    asked: common_pb2.SamplingParams, defaults: SamplingDefaults, *, max_tokens: int, seed: int
) -> common_pb2.SamplingParams:
    """`asked` with every field set that a worker reads; what only the router reads is left out."""
    filled = common_pb2.SamplingParams()
    filled.CopyFrom(asked)
    for name in ("temperature", "top_p", "top_k", "min_p"):
        if not asked.HasField(name):
            setattr(filled, name, getattr(defaults, name))
    filled.max_tokens = max_tokens
    filled.seed = seed
    for name in ("stop", "include_stop_text", "n"):
        filled.ClearField(name)
    return filled


def _number(file: Path, config: dict[str, Any], key: str, default: float) -> float:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise SettingsError(f"{file}: {key} is no number")
    return float(value)
