"""load_heads: the draft heads that the settings name, with their weights in place, checked against
the target. Takes memory on its device: before its own cache is sized. Engine thread only.
"""

from __future__ import annotations

from checkpoints.errors import CheckpointError
from engine.config import EngineConfig
from engine.errors import LoadError
from engine.kv.layout import KvLayout
from engine.kv.memory import TORCH_DTYPES, KvMemory
from engine.models.interface import Ends, LoadedModel
from engine.speculation.drafter import Drafter
from engine.speculation.heads.checkpoint import HeadCheckpoint
from engine.speculation.heads.eagle import EagleHead
from engine.speculation.heads.eagle3_network import is_eagle3, read_eagle3
from engine.speculation.heads.eagle_network import is_eagle, read_eagle
from engine.speculation.heads.medusa import MedusaHeads, read_medusa
from engine.speculation.heads.network import Network


def load_heads(config: EngineConfig, target: LoadedModel) -> list[Drafter]:
    """In the order of the settings.

    Raises: LoadError, also for heads that were made for another model, and for a target that keeps
        no hidden states.
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
    drafters: list[Drafter] = []
    for name in wanted:
        try:
            drafters.append(_load(name, config, target, ends))
        except CheckpointError as error:
            raise LoadError(f"speculation.draft_heads: {error}") from error
    return drafters


def _load(name: str, config: EngineConfig, target: LoadedModel, ends: Ends) -> Drafter:
    info, expansion = target.info, config.speculation.expansion
    checkpoint = HeadCheckpoint(name, dtype=TORCH_DTYPES[info.dtype], device=info.device)
    if "medusa_num_heads" in checkpoint.config:
        heads = read_medusa(checkpoint, hidden_size=ends.hidden_size, vocab_size=info.vocab_size)
        return MedusaHeads(checkpoint.name, heads, ends, expansion)
    if is_eagle3(checkpoint):
        network: Network = read_eagle3(checkpoint, ends, vocab_size=info.vocab_size)
    elif is_eagle(checkpoint):
        network = read_eagle(checkpoint, ends, vocab_size=info.vocab_size)
    else:
        raise LoadError(
            f"speculation.draft_heads: {checkpoint.name} is neither in Medusa's format (its "
            "config.json has no medusa_num_heads) nor in EAGLE's (it has no tensor fc.weight)"
        )
    layout = network.layout(info.block_size, info.dtype)
    memory = KvMemory(layout, _num_blocks(checkpoint.name, layout, config, target), info.device)
    return EagleHead(
        checkpoint.name,
        network,
        memory,
        expansion,
        context_window=info.context_window,
        max_num_tokens=config.max_num_tokens_per_step,
    )


def _num_blocks(name: str, layout: KvLayout, config: EngineConfig, target: LoadedModel) -> int:
    """For every running request's whole window, or as many as the bytes hold."""
    least = layout.num_blocks_for(target.info.context_window)
    most_bytes = config.speculation.draft_kv_bytes
    num_blocks = min(config.max_num_running * least, most_bytes // layout.block_bytes)
    if num_blocks < least:
        raise LoadError(
            f"speculation.draft_kv_bytes: {most_bytes} hold {num_blocks} blocks of {name}; one "
            f"context window takes {least}: {least * layout.block_bytes} bytes"
        )
    return num_blocks
