"""One request of a load, and how those of a load are made: random prompts, prompts that share
prefixes, or the lines of a trace. Pure: the same seed gives the same load. Knows nothing of whom it
is sent to, but for how many token ids there are.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from process.errors import InvalidArgument

FIRST_TOKEN_ID = 8
"""Below are control tokens of the bundled models, and of many others."""


@dataclass(frozen=True)
class Planned:
    """What is sent, and when."""

    at_s: float
    """Seconds after the load's beginning."""
    prompt_token_ids: tuple[int, ...]
    num_output_tokens: int


@dataclass(frozen=True)
class Lengths:
    """Token counts of prompts and answers, uniform within a share of those given."""

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
        """(tokens of a prompt, tokens of its answer)"""
        return self._one(rng, self.num_input_tokens), self._one(rng, self.num_output_tokens)

    def _one(self, rng: random.Random, mean: int) -> int:
        if not self.spread:
            return mean
        return max(1, round(mean * (1 + self.spread * (2 * rng.random() - 1))))


@dataclass(frozen=True)
class SharedPrefixes:
    """Prompts of a few groups, as of so many system prompts: all of a group begin alike."""

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
    """A request for each arrival. With `shared`, a group's prefix (the same for all loads of this
    seed) comes before each prompt, and groups are drawn alike often.
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
    """Token ids that are no control tokens. Raises: InvalidArgument for too small a vocabulary."""
    if vocab_size <= FIRST_TOKEN_ID:
        raise InvalidArgument("vocab_size", f"{vocab_size} leaves no token but control tokens")
    return tuple(rng.randrange(FIRST_TOKEN_ID, vocab_size) for _ in range(num_tokens))
