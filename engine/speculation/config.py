"""Settings of speculative decoding: frozen values, checked when created."""

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
    """Settings of prompt lookup (engine/speculation/ngram.py). Raises SettingsError for a value out
    of range."""

    max_length: int = 4
    """Length of the longest n-gram, the newest tokens, that is searched for; the longest match
    counts."""

    min_length: int = 2
    """Length of the shortest n-gram that is searched for."""

    max_matches: PositiveInt = 4
    """Number of earlier occurrences, newest first, whose continuations become draft tokens."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if not 1 <= self.min_length <= self.max_length:
            raise SettingsError(
                f"min_length: {self.min_length} is not in [1, {self.max_length}], the max_length"
            )


@dataclass(frozen=True)
class SpeculationConfig:
    """Settings of speculative decoding, which is on if a proposer is named. Answers equal those of
    plain decoding up to rounding, except with `acceptance="multi_step"`, which keeps their
    distribution. Raises SettingsError for a value out of range."""

    REMOVED: ClassVar[Mapping[str, str]] = {
        "draft_share_bytes": "no store keeps draft models' KV any more; leave it out"
    }
    """Settings of earlier versions that were removed, with the error message of each."""

    drafters: tuple[str, ...] = ()
    """Proposers without a model; the only one is "ngram", which proposes the tokens that followed
    the same n-gram earlier in the prompt or the output."""

    draft_models: tuple[str, ...] = ()
    """Draft models: bundled names, local folders, or Hugging Face names, with the tokenizer of the
    target model. The trees of all proposers are merged."""

    draft_heads: tuple[str, ...] = ()
    """Draft heads trained for the target model, which propose tokens from its hidden states:
    folders, or Hugging Face names, in the published format of Medusa, EAGLE (EAGLE-2's is the
    same) or EAGLE-3, as safetensors."""

    expansion: tuple[int, ...] = (2, 1, 1, 1)
    """Number of children of each node at each level of a draft model's tree: SpecInfer's <k1, ...,
    km>. For Medusa, the number of tokens of each head."""

    draft_kv_bytes: PositiveInt = 256 * 2**20
    """Largest size in bytes of the KV cache of each draft model and each EAGLE head."""

    draft_workers: tuple[str, ...] = ()
    """Addresses (host:port or unix:/path) of the draft workers (`python -m services.draft`), whose
    models run on devices of their own. Each sequence is assigned to one of them and has no
    drafts while that one does not respond. For decode workers."""

    draft_deadline_s: Annotated[float, Meta(gt=0, le=MAX_DRAFT_DEADLINE_S)] = 0.05
    """Longest time in seconds that a step waits for draft workers; drafts that arrive later are
    dropped."""

    max_num_nodes: PositiveInt = 16
    """Largest number of draft tokens of one sample in one step. Fewer are verified where more would
    not raise throughput."""

    acceptance: str = "exact"
    """The acceptance rule of sampled (not greedy) answers. "exact": accepts the draft tokens that
    plain decoding would sample, with the same random numbers. "multi_step": SpecInfer's
    multi-step speculative sampling; answers have the distribution of plain decoding, but are
    other ones. "naive": verifies as "exact" does, but with drafts drawn as for "multi_step"; for
    comparison."""

    always: bool = False
    """Verify all draft tokens, whatever they cost; for measurements and tests."""

    ngram: NgramConfig = NgramConfig()
    """Settings of the "ngram" proposer."""

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
        """Whether a proposer is named."""
        return any((self.drafters, self.draft_models, self.draft_workers, self.draft_heads))
