"""JSON values as schemas list them: read, compared, and whether they can be an output.

Pure functions over values; any thread.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any, NoReturn

MAX_INTEGER = 1 << 53
"""The compiler computes in float64."""


def read(text: str) -> object:
    """Raises: ValueError for what is no JSON, or has a key twice; RecursionError."""
    return json.loads(text, object_pairs_hook=_no_twins, parse_constant=_no_constant)


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key appears twice in one object")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def problem_of(value: object, level: int, max_num_levels: int) -> str:
    """Why it cannot be an output; empty: it can.

    Args:
        level: of what it lies in.
    """
    if level > max_num_levels:
        return f"a value deeper than {max_num_levels} levels"
    if isinstance(value, float) and not math.isfinite(value):
        return "a number beyond float64"
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        return f"an integer beyond {MAX_INTEGER}"
    inner: Iterable[object] = ()
    if isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, list):
        inner = value
    problems = (problem_of(item, level + 1, max_num_levels) for item in inner)
    return next(filter(None, problems), "")


def canonical(value: object) -> str:
    """Equal for equal JSON values: 1 and 1.0 are."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


def is_whole(value: object) -> bool:
    """1.0 is, too."""
    if isinstance(value, bool):
        return False
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer())


def type_of(value: object) -> str:
    """As schemas name it; "number" for whole ones, too."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, str):
        return "string"
    if isinstance(value, list):
        return "array"
    return "object" if isinstance(value, dict) else "number"


def types_of(value: object) -> set[str]:
    """All that schemas name it."""
    return {type_of(value)} | ({"integer"} if is_whole(value) else set())
