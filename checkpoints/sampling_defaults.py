"""What a sampling field means that nobody set: the model's own default, as `transformers` would
read it.

`generation_config.json` says so: with `do_sample` its temperature, top_p and top_k; without it (or
without the file) greedy. Pure but for one read of the file.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints.errors import CheckpointError


@dataclass(frozen=True)
class SamplingDefaults:
    """A model's defaults."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


def read_sampling_defaults(folder: Path) -> SamplingDefaults:
    """The defaults of the checkpoint in `folder`.

    Raises: CheckpointError when `generation_config.json` is there but cannot be used.
    """
    file = folder / "generation_config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return SamplingDefaults()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(config, dict) or not config.get("do_sample"):
        return SamplingDefaults()
    top_p, min_p = _number(file, config, "top_p", 1.0), _number(file, config, "min_p", 0.0)
    temperature, top_k = _number(file, config, "temperature", 1.0), config.get("top_k") or 0
    is_sane = temperature >= 0 and 0 < top_p <= 1 and 0 <= min_p < 1
    if not (is_sane and isinstance(top_k, int) and top_k >= 0):
        raise CheckpointError(f"{file}: temperature, top_p, top_k or min_p is out of range")
    return SamplingDefaults(temperature, top_p, top_k, min_p)


def _number(file: Path, config: dict[str, Any], key: str, default: float) -> float:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise CheckpointError(f"{file}: {key} is no number")
    return float(value)
