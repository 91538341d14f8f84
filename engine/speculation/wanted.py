"""make_speculator: the speculator that an engine's settings ask for, if they ask for one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.config import EngineConfig
from engine.kv.cache_manager import KVCacheManager
from engine.models.interface import Guesses
from engine.speculation.drafter import Drafter
from engine.speculation.ngram import PromptLookup
from engine.speculation.speculator import Speculator
from process.settings import SettingsError


def make_speculator(
    config: EngineConfig,
    cache_manager: KVCacheManager,
    drafters: Sequence[Drafter] | None = None,
    *,
    guesses: Guesses,
    context_window: int,
    eos_token_ids: frozenset[int],
    clock: Callable[[], float],
) -> Speculator | None:
    """None where nobody guesses.

    Args:
        drafters: None: those that the config names.
    Raises: SettingsError for settings that do not go together.
    """
    wanted = config.speculation
    if drafters is None:
        drafters = [PromptLookup(wanted.ngram) for _ in wanted.drafters]
    num_wanted = len(wanted.drafters) + len(wanted.draft_models) + bool(wanted.draft_workers)
    num_wanted += len(wanted.draft_heads)
    if len(drafters) < num_wanted:
        raise SettingsError("speculation.draft_models: whoever makes the engine must load them")
    if not drafters:
        return None
    if config.exact and wanted.acceptance == "multi_step":
        raise SettingsError(
            "speculation.acceptance: multi_step is not for exact=true: which tokens are drawn "
            "depends on what was guessed, and so on what else is in a step; leave it at exact"
        )
    return Speculator(
        wanted,
        drafters,
        cache_manager,
        guesses=guesses,
        context_window=context_window,
        max_num_tokens=config.max_num_tokens_per_step,
        eos_token_ids=eos_token_ids,
        clock=clock,
    )
