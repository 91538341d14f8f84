"""Settings of speculation. Frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import Meta

from process.settings import PositiveInt, SettingsError, check_address, check_ranges

DRAFTERS = ("ngram",)
MAX_DRAFT_DEADLINE_S = 60.0
ACCEPTANCES = ("exact", "multi_step", "naive")


@dataclass(frozen=True)
class NgramConfig:
    """Prompt lookup (engine/speculation/ngram.py). Raises SettingsError for a value out of
    range."""

    max_length: int = 4
    """Number of newest tokens that are looked up together: the longest match is taken."""

    min_length: int = 2
    """Shortest match."""

    max_matches: PositiveInt = 4
    """Number of earlier places, newest first, whose continuations go into the tree."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if not 1 <= self.min_length <= self.max_length:
            raise SettingsError(
                f"min_length: {self.min_length} is not in [1, {self.max_length}], the max_length"
            )


@dataclass(frozen=True)
class SpeculationConfig:
    """Drafting several tokens a step; on where a proposer is named. Answers are those of plain
    decoding up to rounding, as with batching. Raises SettingsError for a value out of range."""

    REMOVED: ClassVar[Mapping[str, str]] = {
        "draft_share_bytes": "no store keeps draft models' KV any more; leave it out"
    }
    """Keys of earlier versions, and the error message of each."""

    drafters: tuple[str, ...] = ()
    """Proposers without a model: "ngram" proposes what followed the newest tokens before, in prompt
    or output."""

    draft_models: tuple[str, ...] = ()
    """Small models that propose tokens: bundled names, local folders, or Hugging Face names, with
    the tokenizer of the model that they propose for. Their trees are merged."""

    draft_heads: tuple[str, ...] = ()
    """Draft heads that were trained for this model and propose by its hidden states: folders, or
    Hugging Face names, in the published format of Medusa, of EAGLE (EAGLE-2's is the same) or of
    EAGLE-3, as safetensors. Their trees are merged with the others'."""

    expansion: tuple[int, ...] = (2, 1, 1, 1)
    """Number of children that a draft model gives each of its newest nodes, step by step:
    SpecInfer's <k1, ..., km>. For Medusa's heads, the number of tokens of each head."""

    draft_kv_bytes: PositiveInt = 256 * 2**20
    """Largest size of each draft model's own KV cache, and of an EAGLE head's."""

    draft_workers: tuple[str, ...] = ()
    """host:port or unix:/path of each draft worker (`python -m services.draft`), whose model runs
    on a device of its own. Every sequence is with one of them; one that does not answer costs its
    drafts. For decode workers."""

    draft_deadline_s: Annotated[float, Meta(gt=0, le=MAX_DRAFT_DEADLINE_S)] = 0.05
    """Longest time that a step waits for draft workers; later drafts are dropped."""

    max_num_nodes: PositiveInt = 16
    """Largest number of draft tokens of one sample in one step. Fewer are computed where more do
    not pay."""

    acceptance: str = "exact"
    """Which draft tokens a sampled answer accepts. "exact": those that plain decoding would sample;
    drafts are chosen with the same noise. "multi_step": SpecInfer's multi-step speculative sampling
    of drafts that are drawn independently, or, of heads, draft workers and lookups, chosen without
    any noise; answers are distributed as plain decoding's, but other ones, and the drafts have a
    say in which. "naive": as "exact", with such drafts; for comparison."""

    always: bool = False
    """Compute all draft tokens, whatever they cost: for measurements and tests."""

    ngram: NgramConfig = NgramConfig()
    """Prompt lookup."""

    def __post_init__(self) -> None:
        check_ranges(self)
        for name in self.drafters:
            if name not in DRAFTERS:
                raise SettingsError(f"drafters: {name!r} is none of {', '.join(DRAFTERS)}")
        for name, named in (
            ("drafters", self.drafters),
            ("draft_models", self.draft_models),
            ("draft_workers", self.draft_workers),
            ("draft_heads", self.draft_heads),
        ):
            if len(set(named)) < len(named):
                raise SettingsError(f"{name}: one is named twice")
        if self.acceptance not in ACCEPTANCES:
            raise SettingsError(
                f"acceptance: {self.acceptance!r} is none of {', '.join(ACCEPTANCES)}"
            )
        if not self.expansion or min(self.expansion) < 1:
            raise SettingsError(f"expansion: {self.expansion} is not a row of counts above 0")
        for address in self.draft_workers:
            check_address("draft_workers", address)
            if address.endswith(":0"):
                raise SettingsError(f"draft_workers: {address!r} names no port")

    @property
    def is_on(self) -> bool:
        """Some proposer is named."""
        return any((self.drafters, self.draft_models, self.draft_workers, self.draft_heads))
