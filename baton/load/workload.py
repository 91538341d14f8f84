"""The requests of a load and when they are sent, made from a seed or read from a trace.

Requests are sent at their time whether or not earlier ones have ended (an open loop). A random load
has arrival times of `arrival_times` and prompts of random token ids. A trace has the format that
Mooncake published: one JSON object a line, with `timestamp` (milliseconds), `input_length`,
`output_length` (tokens) and `hash_ids`, one id for each 512 tokens of the prompt; prompts whose
first ids are equal share that prefix. The trace has no text, so each id stands for random tokens,
the same wherever the id occurs.

Pure, except that `read_trace` reads a file: the same seed gives the same load.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from process.rpc_errors import InvalidArgument

ArrivalKind = Literal["poisson", "constant"]

MAX_REQUESTS = 1_000_000
"""Most requests of a load: the outcomes of more would not fit into memory."""
FIRST_TOKEN_ID = 8
"""Lowest token id of random prompts: lower ids are control tokens of the bundled and many other
models."""
BLOCK_TOKENS = 512
"""Number of prompt tokens that one hash id of a trace stands for."""


@dataclass(frozen=True)
class Planned:
    """A request of a load that is to be sent."""

    at_s: float
    """Time to send the request, in seconds since the load began."""
    prompt_token_ids: tuple[int, ...]
    num_output_tokens: int


@dataclass(frozen=True)
class Lengths:
    """Distribution of the token counts of prompts and answers: uniform within +-`spread` (a share)
    of the given ones."""

    num_input_tokens: int = 128
    num_output_tokens: int = 64
    spread: float = 0.0

    def __post_init__(self) -> None:
        if self.num_input_tokens < 1:
            raise InvalidArgument("--input-len", f"{self.num_input_tokens} is less than 1")
        if self.num_output_tokens < 1:
            raise InvalidArgument("--output-len", f"{self.num_output_tokens} is less than 1")
        if not 0 <= self.spread < 1:
            raise InvalidArgument("--spread", f"{self.spread} is outside [0, 1)")

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """Draw the numbers of tokens of one prompt and of its answer."""
        return self._one(rng, self.num_input_tokens), self._one(rng, self.num_output_tokens)

    def _one(self, rng: random.Random, mean: int) -> int:
        if not self.spread:
            return mean
        return max(1, round(mean * (1 + self.spread * (2 * rng.random() - 1))))


@dataclass(frozen=True)
class SharedPrefixes:
    """A few prefixes, such as system prompts; each prompt begins with one of them."""

    num_groups: int
    num_prefix_tokens: int

    def __post_init__(self) -> None:
        if self.num_groups < 1:
            raise InvalidArgument("--prefix-groups", f"{self.num_groups} is less than 1")
        if self.num_prefix_tokens < 1:
            raise InvalidArgument("--prefix-len", f"{self.num_prefix_tokens} is less than 1")


def random_load(
    arrivals_s: Sequence[float],
    lengths: Lengths,
    *,
    vocab_size: int,
    seed: int,
    shared: SharedPrefixes | None = None,
) -> list[Planned]:
    """Plan a request with a random prompt for each arrival. With `shared`, each prompt begins with
    one of the prefixes, chosen at random with equal chance. The prefixes depend on the seed alone.
    """
    prefixes = []
    if shared is not None:
        rng = random.Random(f"prefixes {seed}")
        prefixes = [
            random_ids(rng, shared.num_prefix_tokens, vocab_size) for _ in range(shared.num_groups)
        ]
    rng = random.Random(f"prompts {seed}")
    load = []
    for at_s in arrivals_s:
        num_input, num_output = lengths.draw(rng)
        prefix = rng.choice(prefixes) if prefixes else ()
        load.append(Planned(at_s, (*prefix, *random_ids(rng, num_input, vocab_size)), num_output))
    return load


def random_ids(rng: random.Random, num_tokens: int, vocab_size: int) -> tuple[int, ...]:
    """Draw random token ids, no control tokens. Raises: InvalidArgument where the vocabulary has
    only those."""
    if vocab_size <= FIRST_TOKEN_ID:
        raise InvalidArgument("vocab_size", f"{vocab_size} leaves no token but control tokens")
    return tuple(rng.randrange(FIRST_TOKEN_ID, vocab_size) for _ in range(num_tokens))


# -- arrival times


@dataclass(frozen=True)
class Phase:
    """A part of a load with one rate of requests, or with a rate that changes linearly."""

    rate_per_s: float
    end_rate_per_s: float
    seconds: float
    """Length of the phase in seconds; infinite: it has no end."""

    @property
    def num_expected(self) -> float:
        return (self.rate_per_s + self.end_rate_per_s) / 2 * self.seconds

    def when(self, num: float) -> float:
        """Seconds into the phase at which `num` requests are expected: the inverse of the integral
        of the rate."""
        if math.isinf(self.seconds) or self.rate_per_s == self.end_rate_per_s:
            return num / self.rate_per_s
        slope = (self.end_rate_per_s - self.rate_per_s) / self.seconds
        root = math.sqrt(max(0.0, self.rate_per_s**2 + 2 * slope * num))
        return (root - self.rate_per_s) / slope


def parse_rates(text: str) -> list[Phase]:
    """Parse the phases of a text such as "4" (4 requests a second, without end), "2:30,8:10" (30 s
    at 2, then 10 s at 8) or "0..8:60" (from 0 to 8 within 60 s).

    Raises: InvalidArgument naming the wrong part.
    """
    parts = text.split(",")
    if len(parts) == 1 and ":" not in text:
        rate = _rate(text, text)
        if rate <= 0:
            raise InvalidArgument("--rate", f"{text}: must be more than 0")
        return [Phase(rate, rate, math.inf)]
    phases = []
    for part in parts:
        rates, colon, seconds_text = part.partition(":")
        if not colon:
            raise InvalidArgument("--rate", f"{part!r}: of several phases each is RATE:SECONDS")
        first, dots, last = rates.partition("..")
        rate, seconds = _rate(first, part), _rate(seconds_text, part)
        if seconds <= 0:
            raise InvalidArgument("--rate", f"{part!r}: seconds must be more than 0")
        phases.append(Phase(rate, _rate(last, part) if dots else rate, seconds))
    if not any(phase.num_expected for phase in phases):
        raise InvalidArgument("--rate", f"{text!r} sends nothing")
    return phases


def arrival_times(
    phases: Sequence[Phase],
    *,
    num_requests: int | None,
    kind: ArrivalKind = "poisson",
    burstiness: float = 1.0,
    seed: int = 0,
) -> list[float]:
    """Plan when to send requests, in seconds since the load began, in order.

    Args: num_requests: at most this many; None: until the phases end. kind: "constant" spaces them
        evenly; "poisson" draws the gaps from a gamma distribution with the shape `burstiness`, as
        vLLM's benchmark: 1 is Poisson, less than 1 comes in bursts.
    Raises: InvalidArgument when the load has no end, or a number is out of range.
    """
    if num_requests is None and math.isinf(phases[-1].seconds):
        raise InvalidArgument("--requests", "needed where --rate has no end")
    if num_requests is not None and num_requests < 1:
        raise InvalidArgument("--requests", f"{num_requests} is less than 1")
    if not (math.isfinite(burstiness) and burstiness > 0):
        raise InvalidArgument("--burstiness", f"{burstiness} is not above 0")
    times: list[float] = []
    for at_s in _times(phases, _gaps(kind, burstiness, random.Random(f"arrivals {seed}"))):
        if num_requests is not None and len(times) >= num_requests:
            break
        if len(times) >= MAX_REQUESTS:
            raise InvalidArgument("--rate", f"more than {MAX_REQUESTS} requests; shorten the load")
        times.append(at_s)
    return times


def _gaps(kind: ArrivalKind, burstiness: float, rng: random.Random) -> Iterator[float]:
    """Gaps with the mean 1; a constant load begins at 0."""
    if kind == "constant":
        yield 0.0
        yield from itertools.repeat(1.0)
    while True:
        yield rng.gammavariate(burstiness, 1 / burstiness)


def _times(phases: Sequence[Phase], gaps: Iterator[float]) -> Iterator[float]:
    """Arrivals at rate 1, stretched to the rate of each phase."""
    begin_s = num_before = num_now = 0.0
    num_now = next(gaps)
    for phase in phases:
        while num_now - num_before < phase.num_expected:
            yield begin_s + phase.when(num_now - num_before)
            num_now += next(gaps)
        begin_s, num_before = begin_s + phase.seconds, num_before + phase.num_expected


def _rate(text: str, part: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise InvalidArgument("--rate", f"{part!r}: {text!r} is not a number") from None
    if not (math.isfinite(value) and value >= 0):
        raise InvalidArgument("--rate", f"{part!r}: {text!r} is not 0 or more")
    return value


# -- traces


@dataclass(frozen=True)
class TraceLine:
    """One request of a recorded trace of requests."""

    timestamp_ms: float
    num_input_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...]


def read_trace(file: Path, *, limit: int | None = None) -> list[TraceLine]:
    """Read the first `limit` requests of a trace file, ordered by time.

    Raises: InvalidArgument naming the line and the field that is wrong; OSError.
    """
    lines: list[TraceLine] = []
    with file.open(encoding="utf-8") as source:
        for number, text in enumerate(source, start=1):
            if limit is not None and len(lines) >= limit:
                break
            if text.strip():
                lines.append(_trace_line(text, f"{file.name}, line {number}"))
    if not lines:
        raise InvalidArgument("--trace", f"{file} has no request")
    return sorted(lines, key=lambda line: line.timestamp_ms)


def replay_trace(
    trace: Sequence[TraceLine], *, vocab_size: int, seed: int, speed: float = 1.0, shrink: int = 1
) -> list[Planned]:
    """Plan the requests of a trace.

    Args: speed: 2.0 sends them in half of the time that they took. shrink: divide all lengths by
        this, so that a trace of long prompts fits a small window; equal prefixes stay equal.
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


def _trace_line(text: str, where: str) -> TraceLine:
    try:
        entry = json.loads(text)
    except ValueError as error:
        raise InvalidArgument("--trace", f"{where}: not JSON: {error}") from None
    if not isinstance(entry, dict):
        raise InvalidArgument("--trace", f"{where}: not a JSON object")
    hash_ids = entry.get("hash_ids")
    if not isinstance(hash_ids, list) or not all(type(i) is int for i in hash_ids):
        raise InvalidArgument("--trace", f"{where}: hash_ids: not a list of integers")
    line = TraceLine(
        timestamp_ms=_trace_number(entry, "timestamp", 0, where),
        num_input_tokens=int(_trace_number(entry, "input_length", 1, where)),
        num_output_tokens=int(_trace_number(entry, "output_length", 1, where)),
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


def _trace_number(entry: Mapping[str, Any], name: str, least: float, where: str) -> float:
    value = entry.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= least:
        raise InvalidArgument("--trace", f"{where}: {name}: not a number of at least {least}")
    return float(value)
