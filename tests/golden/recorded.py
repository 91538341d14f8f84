"""Recorded answers: what a test finds is compared with tests/golden/NAME.json, entry by entry.

`BATON_RECORD=1 pytest tests/golden` writes them anew; review the difference like code.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
DIGITS = 4
TOLERANCE = 5e-4
"""Of numbers that are not whole: log probabilities differ in their last digits between CPUs."""


def rounded(value: Any) -> Any:
    """A JSON value whose numbers have `DIGITS` digits."""
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, Mapping):
        return {key: rounded(one) for key, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list | tuple) else value


def is_alike(one: Any, other: Any) -> bool:
    """Equal, but for the last digits of numbers."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=0, abs_tol=TOLERANCE)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_alike(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_alike, one, other))
    return type(one) is type(other) and one == other


def check(name: str, found: Mapping[str, Any]) -> None:
    """Compare what was found with the record of that name, or write it. Raises: AssertionError with
    all that differs, by entry."""
    path = FOLDER / f"{name}.json"
    entries = {key: rounded(value) for key, value in found.items()}
    if os.environ.get("BATON_RECORD") == "1":
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in entries.items()]
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        return
    known = json.loads(path.read_text())
    entries = json.loads(json.dumps(entries))
    keys = [*known, *(key for key in entries if key not in known)]
    nothing = "nothing"
    different = [
        f"{key}\n  was: {json.dumps(known.get(key, nothing))}\n"
        f"  is:  {json.dumps(entries.get(key, nothing))}"
        for key in keys
        if not is_alike(known.get(key, nothing), entries.get(key, nothing))
    ]
    assert not different, f"{len(different)} of {name}.json differ:\n" + "\n".join(different)
