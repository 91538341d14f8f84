"""Loaders of the proposers that the settings name, with their weights in place: `load_proposers`
runs before the target's KV cache is sized, since its models use memory on the target's device;
`load_heads` runs after the target is loaded, and checks the heads against it; `load_draft_model`
serves a draft worker. Engine thread only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from checkpoints.errors import CheckpointError
from engine.config import EngineConfig
from engine.errors import LoadError
from engine.kv.layout import KvLayout
from engine.kv.memory import TORCH_DTYPES, KvMemory
from engine.models.interface import Ends, LoadedModel, Progress
from engine.models.loader import closed_on_failure, load_model
from engine.request import ModelInfo
from engine.speculation.config import SpeculationConfig
from engine.speculation.draft_model import DraftModelProposer, warm_up
from engine.speculation.eagle import (
    DraftNetwork,
    EagleProposer,
    is_eagle,
    is_eagle3,
    read_eagle,
    read_eagle3,
)
from engine.speculation.head_checkpoint import HeadCheckpoint
from engine.speculation.medusa import MedusaProposer, read_medusa
from engine.speculation.ngram import NgramProposer
from engine.speculation.proposer import Proposer
from engine.speculation.remote import DraftPeer, RemoteProposer


def load_proposers(
    config: EngineConfig,
    target: ModelInfo,
    progress: Progress | None = None,
    peers: Sequence[DraftPeer] = (),
) -> list[Proposer]:
    """Load the n-gram, draft model and draft worker proposers, in this order.

    Args: peers: the channels to `speculation.draft_workers`.
    Raises: LoadError, also for a draft model with another tokenizer, or one that is too large.
    """
    wanted = config.speculation
    proposers: list[Proposer] = [NgramProposer(wanted.ngram) for _ in wanted.drafters]
    with closed_on_failure() as closes:
        for name in wanted.draft_models:
            proposers.append(_load_draft_model(name, config, target, progress, closes))
        if wanted.draft_workers:
            proposers.append(_connect_workers(wanted, target, peers))
    return proposers


def load_draft_model(config: EngineConfig, progress: Progress | None = None) -> DraftModelProposer:
    """Load `config.model` as the draft model of a draft worker, for the targets of other engines.
    Raises: LoadError."""
    with closed_on_failure() as closes:
        return _load_draft_model(config.model, config, None, progress, closes)


def _connect_workers(
    wanted: SpeculationConfig, target: ModelInfo, peers: Sequence[DraftPeer]
) -> RemoteProposer:
    if tuple(peer.channel.address for peer in peers) != wanted.draft_workers:
        raise LoadError(
            "speculation.draft_workers: are for prefill and decode workers, which connect to them; "
            "here, name draft_models"
        )
    proposer = RemoteProposer(peers, target, deadline_s=wanted.draft_deadline_s)
    proposer.connect()
    return proposer


def _load_draft_model(
    name: str,
    config: EngineConfig,
    target: ModelInfo | None,
    progress: Progress | None,
    closes: list[Callable[[], None]],
) -> DraftModelProposer:
    """Load one draft model.

    Args:
        target: the model that it proposes tokens for; None: targets of other engines.
        closes: a list to which the model's `close` is added, for the caller to call on an error.
    """
    own = replace(
        config,
        model=name,
        # A sequence beyond the draft model's window gets no draft.
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
        _check_tokenizer(name, model.info, target)
    proposer = DraftModelProposer(
        model,
        config.speculation.expansion,
        num_blocks=_num_blocks(model, config),
        max_num_tokens=config.max_num_tokens_per_step,
    )
    model.warm_up(progress)
    warm_up(proposer, config.speculation.max_num_nodes)
    return proposer


def _check_tokenizer(name: str, draft: ModelInfo, target: ModelInfo) -> None:
    if draft.vocab_size != target.vocab_size or draft.tokenizer_digest != target.tokenizer_digest:
        raise LoadError(
            f"speculation.draft_models: {name} has another tokenizer than {target.model}; its "
            "tokens mean other texts. Name a model of the same family"
        )


def _num_blocks(model: LoadedModel, config: EngineConfig) -> int:
    """Return the number of KV blocks: the context window of every running request, or what
    `speculation.draft_kv_bytes` allows."""
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


def load_heads(config: EngineConfig, target: LoadedModel) -> list[Proposer]:
    """Load the draft heads, in the order of the settings, and check them against the target.

    Raises: LoadError, also for heads that were made for another model, or a target that keeps no
        hidden states.
    """
    wanted = config.speculation.draft_heads
    if not wanted:
        return []
    info, ends = target.info, target.ends
    if ends is None or not info.gives_embeddings:
        raise LoadError(
            f"speculation.draft_heads: {info.model} keeps no hidden states to go by (a model that "
            "several ranks share does not); leave it empty, or set tensor_parallel and "
            "pipeline_parallel to 1"
        )
    heads: list[Proposer] = []
    for name in wanted:
        try:
            heads.append(_load_head(name, config, target, ends))
        except CheckpointError as error:
            raise LoadError(f"speculation.draft_heads: {error}") from error
    return heads


def _load_head(name: str, config: EngineConfig, target: LoadedModel, ends: Ends) -> Proposer:
    info, expansion = target.info, config.speculation.expansion
    checkpoint = HeadCheckpoint(name, dtype=TORCH_DTYPES[info.dtype], device=info.device)
    if "medusa_num_heads" in checkpoint.config:
        heads = read_medusa(checkpoint, hidden_size=ends.hidden_size, vocab_size=info.vocab_size)
        return MedusaProposer(checkpoint.name, heads, ends, expansion)
    if is_eagle3(checkpoint):
        network: DraftNetwork = read_eagle3(checkpoint, ends, vocab_size=info.vocab_size)
    elif is_eagle(checkpoint):
        network = read_eagle(checkpoint, ends, vocab_size=info.vocab_size)
    else:
        raise LoadError(
            f"speculation.draft_heads: {checkpoint.name} is neither in Medusa's format (its "
            "config.json has no medusa_num_heads) nor in EAGLE's (it has no tensor fc.weight)"
        )
    layout = network.layout(info.block_size, info.dtype)
    memory = KvMemory(
        layout, _num_head_blocks(checkpoint.name, layout, config, target), info.device
    )
    return EagleProposer(
        checkpoint.name,
        network,
        memory,
        expansion,
        context_window=info.context_window,
        max_num_tokens=config.max_num_tokens_per_step,
    )


def _num_head_blocks(name: str, layout: KvLayout, config: EngineConfig, target: LoadedModel) -> int:
    """Return the number of KV blocks of a head: the context window of every running request, or
    what `speculation.draft_kv_bytes` allows."""
    least = layout.num_blocks_for(target.info.context_window)
    most_bytes = config.speculation.draft_kv_bytes
    num_blocks = min(config.max_num_running * least, most_bytes // layout.block_bytes)
    if num_blocks < least:
        raise LoadError(
            f"speculation.draft_kv_bytes: {most_bytes} hold {num_blocks} blocks of {name}; one "
            f"context window takes {least}: {least * layout.block_bytes} bytes"
        )
    return num_blocks
