"""Replay of a trace in the format that Mooncake published: one JSON object a line, with `timestamp`
(milliseconds), `input_length`, `output_length` (tokens) and `hash_ids`, one id for each 512 tokens
of the prompt; equal ids in front mean equal prefixes.

The trace has no text, so each id stands for random tokens that are always the same for the id. Pure
but for reading the file.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.load.planned import Planned, random_ids
from process.errors import InvalidArgument

BLOCK_TOKENS = 512
"""That one hash id of the format stands for."""


@dataclass(frozen=True)
class TraceLine:
    """One request of a trace."""

    timestamp_ms: float
    num_input_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...]


def read_trace(file: Path, *, limit: int | None = None) -> list[TraceLine]:
    """The requests in order of their time.

    Raises: InvalidArgument naming the line and the field that is wrong; OSError.
    """
    lines: list[TraceLine] = []
    with file.open(encoding="utf-8") as source:
        for number, text in enumerate(source, start=1):
            if limit is not None and len(lines) >= limit:
                break
            if text.strip():
                lines.append(_line(text, f"{file.name}, line {number}"))
    if not lines:
        raise InvalidArgument("--trace", f"{file} has no request")
    return sorted(lines, key=lambda line: line.timestamp_ms)


def replay(
    trace: Sequence[TraceLine], *, vocab_size: int, seed: int, speed: float = 1.0, shrink: int = 1
) -> list[Planned]:
    """The trace as a load.

    Args:
        speed: times as fast as it was.
        shrink: all lengths divided by it, so that a long trace fits a small window. Prefixes stay
            equal where they were.
    Raises: InvalidArgument when a number is out of range.
    """
    if not speed > 0:
        raise InvalidArgument("--speed", f"{speed} is not above 0")
    if not 1 <= shrink <= BLOCK_TOKENS:
        raise InvalidArgument("--shrink", f"{shrink} is outside 1 to {BLOCK_TOKENS}")
    num_block_tokens = BLOCK_TOKENS // shrink
    begin_ms = trace[0].timestamp_ms
    blocks: dict[int, tuple[int, ...]] = {}
    load = []
    for line in trace:
        ids: list[int] = []
        for hash_id in line.hash_ids:
            if hash_id not in blocks:
                rng = random.Random(f"block {seed} {hash_id}")
                blocks[hash_id] = random_ids(rng, num_block_tokens, vocab_size)
            ids += blocks[hash_id]
        load.append(
            Planned(
                at_s=(line.timestamp_ms - begin_ms) / 1000 / speed,
                prompt_token_ids=tuple(ids[: max(1, line.num_input_tokens // shrink)]),
                num_output_tokens=max(1, line.num_output_tokens // shrink),
            )
        )
    return load


def _line(text: str, where: str) -> TraceLine:
    try:
        entry = json.loads(text)
    except ValueError as error:
        raise InvalidArgument("--trace", f"{where}: no JSON: {error}") from None
    if not isinstance(entry, dict):
        raise InvalidArgument("--trace", f"{where}: not a JSON object")
    hash_ids = entry.get("hash_ids")
    if not isinstance(hash_ids, list) or not all(type(i) is int for i in hash_ids):
        raise InvalidArgument("--trace", f"{where}: hash_ids: not a list of integers")
    line = TraceLine(
        timestamp_ms=_number(entry, "timestamp", 0, where),
        num_input_tokens=int(_number(entry, "input_length", 1, where)),
        num_output_tokens=int(_number(entry, "output_length", 1, where)),
        hash_ids=tuple(hash_ids),
    )
    num_needed = -(-line.num_input_tokens // BLOCK_TOKENS)
    if len(line.hash_ids) != num_needed:
        raise InvalidArgument(
            "--trace",
            f"{where}: hash_ids: {len(line.hash_ids)} ids for {line.num_input_tokens} tokens; one "
            f"for each {BLOCK_TOKENS} makes {num_needed}",
        )
    return line


def _number(entry: Mapping[str, Any], name: str, least: float, where: str) -> float:
    value = entry.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= least:
        raise InvalidArgument("--trace", f"{where}: {name}: not a number of at least {least}")
    return float(value)
