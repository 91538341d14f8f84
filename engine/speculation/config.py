"""Settings of speculation. Frozen values."""

from __future__ import annotations

from dataclasses import dataclass

from process.settings import SettingsError

DRAFTERS = ("ngram",)


@dataclass(frozen=True)
class NgramConfig:
    """Of prompt lookup (engine/speculation/ngram.py). Raises SettingsError for a value out of
    range."""

    max_length: int = 4
    """Newest tokens that are looked up together: the longest match is taken."""

    min_length: int = 2
    """A shorter match is none."""

    max_matches: int = 4
    """Earlier places, newest first, whose continuations go into the tree."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_length <= self.max_length:
            raise SettingsError(
                f"min_length: {self.min_length} is not in [1, {self.max_length}], the max_length"
            )
        if self.max_matches < 1:
            raise SettingsError(f"max_matches: {self.max_matches} is below 1")


@dataclass(frozen=True)
class SpeculationConfig:
    """Guessing several tokens a step; on where somebody guesses. Answers are those of plain
    decoding up to rounding, as with batching. Raises SettingsError for a value out of range."""

    drafters: tuple[str, ...] = ()
    """Who guesses beside the draft models: "ngram" (what followed the newest tokens before, in
    prompt or output)."""

    draft_models: tuple[str, ...] = ()
    """Small models that guess, too: bundled names, local folders, or Hugging Face names, with the
    tokenizer of the model that they guess for. Their trees are merged."""

    expansion: tuple[int, ...] = (2, 1, 1, 1)
    """Children that a draft model gives each of its newest nodes, step by step: SpecInfer's <k1,
    ..., km>."""

    draft_kv_bytes: int = 256 * 2**20
    """Of each draft model's own KV cache, at most."""

    max_num_nodes: int = 16
    """Most guessed tokens of one sample in one step. Fewer are computed where more do not pay."""

    always: bool = False
    """Compute all that is guessed, whatever it costs: for measurements and tests."""

    ngram: NgramConfig = NgramConfig()
    """Of prompt lookup."""

    def __post_init__(self) -> None:
        for name in self.drafters:
            if name not in DRAFTERS:
                raise SettingsError(f"drafters: {name!r} is none of {', '.join(DRAFTERS)}")
        for name, named in (("drafters", self.drafters), ("draft_models", self.draft_models)):
            if len(set(named)) < len(named):
                raise SettingsError(f"{name}: one is named twice")
        if not self.expansion or min(self.expansion) < 1:
            raise SettingsError(f"expansion: {self.expansion} is not a row of counts above 0")
        if self.draft_kv_bytes < 1:
            raise SettingsError(f"draft_kv_bytes: {self.draft_kv_bytes} is below 1")
        if self.max_num_nodes < 1:
            raise SettingsError(f"max_num_nodes: {self.max_num_nodes} is below 1")

    @property
    def is_on(self) -> bool:
        """Somebody guesses."""
        return bool(self.drafters or self.draft_models)
