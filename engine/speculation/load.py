"""load_drafters: those that the settings name, draft models with their weights in place. Takes
memory on the target's device: before the target's own cache is sized. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.config import EngineConfig
from engine.errors import LoadError
from engine.models.interface import LoadedModel, Progress
from engine.models.loader import closed_on_failure, load_model
from engine.request import ModelInfo
from engine.speculation.config import SpeculationConfig
from engine.speculation.draft_model import DraftModel
from engine.speculation.draft_port import DraftPeer
from engine.speculation.draft_warm_up import warm_up
from engine.speculation.drafter import Drafter
from engine.speculation.ngram import PromptLookup
from engine.speculation.remote import RemoteDrafter


def load_drafters(
    config: EngineConfig,
    target: ModelInfo,
    progress: Progress | None = None,
    peers: Sequence[DraftPeer] = (),
) -> list[Drafter]:
    """In the order of the settings: lookups, draft models, draft workers.

    Args:
        peers: the ways to `speculation.draft_workers`.
    Raises: LoadError, also for a draft model of another tokenizer, or too large a one.
    """
    wanted = config.speculation
    drafters: list[Drafter] = [PromptLookup(wanted.ngram) for _ in wanted.drafters]
    with closed_on_failure() as closes:
        for name in wanted.draft_models:
            drafters.append(_load(name, config, target, progress, closes))
        if wanted.draft_workers:
            drafters.append(_remote(wanted, target, peers))
    return drafters


def load_draft_model(config: EngineConfig, progress: Progress | None = None) -> DraftModel:
    """`config.model` for a draft worker, which guesses for others' targets: its settings are this
    model's own. Raises: LoadError."""
    with closed_on_failure() as closes:
        return _load(config.model, config, None, progress, closes)


def _remote(
    wanted: SpeculationConfig, target: ModelInfo, peers: Sequence[DraftPeer]
) -> RemoteDrafter:
    if tuple(peer.channel.address for peer in peers) != wanted.draft_workers:
        raise LoadError(
            "speculation.draft_workers: are for prefill and decode workers, which connect to them; "
            "here, name draft_models"
        )
    drafter = RemoteDrafter(peers, target, deadline_s=wanted.draft_deadline_s)
    drafter.meet()
    return drafter


def _load(
    name: str,
    config: EngineConfig,
    target: ModelInfo | None,
    progress: Progress | None,
    closes: list[Callable[[], None]],
) -> DraftModel:
    """
    Args:
        target: whose tokens it guesses; None: others'.
        closes: takes what closes the model where this, or what comes after it, fails.
    """
    own = replace(
        config,
        model=name,
        # Of a target's settings; what is beyond the window gets no draft.
        context_window=config.context_window if target is None else 0,
        weight_dtype=config.weight_dtype if target is None else "auto",
        kv_dtype="auto",
        tensor_parallel=1,
        pipeline_parallel=1,
        weights_device_bytes=0,
        exact=False,
        overlap=False,
        speculation=SpeculationConfig(max_num_nodes=config.speculation.max_num_nodes),
    )
    model = load_model(own, progress=progress, is_draft=True)
    closes.append(model.close)
    if target is not None:
        _check(name, model.info, target)
    drafter = DraftModel(
        model,
        config.speculation.expansion,
        num_blocks=_num_blocks(model, config),
        max_num_tokens=config.max_num_tokens_per_step,
    )
    model.warm_up(progress)
    warm_up(drafter, config.speculation.max_num_nodes)
    return drafter


def _check(name: str, draft: ModelInfo, target: ModelInfo) -> None:
    if draft.vocab_size != target.vocab_size or draft.tokenizer_digest != target.tokenizer_digest:
        raise LoadError(
            f"speculation.draft_models: {name} has another tokenizer than {target.model}; its "
            "tokens mean other texts. Name a model of the same family"
        )


def _num_blocks(model: LoadedModel, config: EngineConfig) -> int:
    """For every running request's whole window, or as many as the bytes hold."""
    size = model.layout.block_size
    most = config.max_num_running * -(-model.info.context_window // size)
    num_blocks = min(most, config.speculation.draft_kv_bytes // model.layout.block_bytes)
    least = -(-model.info.context_window // size)
    if num_blocks < least:
        raise LoadError(
            f"speculation.draft_kv_bytes: {config.speculation.draft_kv_bytes} hold {num_blocks} "
            f"blocks of {model.info.model}; one context window takes {least}: "
            f"{least * model.layout.block_bytes} bytes"
        )
    return num_blocks
