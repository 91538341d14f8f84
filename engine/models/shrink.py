"""shrink: a config of the same architecture, small enough to run a random instance in milliseconds.

Every switch stays (norms, biases, tied embeddings, RoPE, softcaps, sinks, routing); only sizes go
down, by the names that transformers' configs use for them, and the layers are thinned out so that
one of each kind is left. A size under a name that is not known stays as it is. Pure; knows no
weights.
"""

from __future__ import annotations

from typing import Any

VOCAB_SIZE = 96
WINDOW = 5
"""Sliding window of a shrunken config: shorter than the rehearsal's prompts."""

_MIN_LAYERS = 4
_HIDDEN = 64
_NUM_HEADS = 4
_HEAD_DIM = 16
_OTHER_HEAD_DIM = 32
"""Where the heads do not add up to the hidden size: they shall not here, either."""

_HIDDEN_NAMES = ("hidden_size", "n_embd", "d_model", "dim")
_HEADS_NAMES = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
_KV_HEADS_NAMES = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv")
_LAYERS_NAMES = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HIDDEN_TOO = ("word_embed_proj_dim", "embedding_size", "emb_dim")
"""Sizes that go with the hidden size where they equal it."""

_AT_MOST = {
    "intermediate_size": 96,
    "ffn_dim": 96,
    "n_inner": 96,
    "ffn_hidden_size": 96,
    "dense_intermediate_size": 96,
    "intermediate_size_mlp": 96,
    "moe_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "expert_hidden_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "zero_expert_num": 2,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_top_k": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 24,
    "v_head_dim": 16,
    "rotary_dim": 8,
    "num_global_key_value_heads": 2,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
    "attention_chunk_size": WINDOW,
    "index_topk": WINDOW,
    "index_topk_blocks": 1,
    "sliding_window": WINDOW,
    "sliding_window_size": WINDOW,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}
_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")
_PER_LAYER = "per_layer_config"
"""What single layers have otherwise, by index."""
_NUM_SHARED = "num_kv_shared_layers"
"""How many of the last layers use an earlier layer's keys and values."""
_INDEX_LISTS = ("moe_layers", "full_attn_idxs", "mlp_only_layers")
"""Lists of layer indices."""
_NO_LAYERS = (*_IDS, *_INDEX_LISTS, "architectures", "suppress_tokens")
"""Lists that are not one entry per layer, whatever their length."""


def shrink(config: Any) -> Any:
    """A config of the same class. Raises: ValueError where it names no hidden size, heads or
    layers."""
    old: dict[str, Any] = config.to_dict()
    new = dict(old)
    for name in ("quantization_config", "dtype", "torch_dtype", "transformers_version"):
        new.pop(name, None)
    hidden = _find(config, _HIDDEN_NAMES)
    heads = _find(config, _HEADS_NAMES)
    num_layers = _find(config, _LAYERS_NAMES)
    kept = _kept_layers(old, old[num_layers])
    for name, value in old.items():
        if name in _INDEX_LISTS and isinstance(value, list):
            new[name] = [kept.index(index) for index in value if index in kept]
        elif _is_per_layer(name, value, old[num_layers]):
            new[name] = [value[index] for index in kept]
        elif name in _HIDDEN_TOO and value == old[hidden]:
            new[name] = _HIDDEN
        else:
            new[name] = _smaller(name, value)
    new[num_layers] = len(kept)
    new[hidden] = _HIDDEN
    _shrink_heads(old, new, heads, hidden)
    if old.get(_PER_LAYER):
        new[_PER_LAYER] = {
            str(kept.index(int(index))): {key: _smaller(key, each) for key, each in part.items()}
            for index, part in old[_PER_LAYER].items()
            if int(index) in kept
        }
    if old.get(_NUM_SHARED):
        new[_NUM_SHARED] = sum(index >= old[num_layers] - old[_NUM_SHARED] for index in kept)
    new["vocab_size"] = VOCAB_SIZE
    for index, name in enumerate(_IDS):
        if new.get(name) is not None:
            new[name] = index
    return type(config).from_dict(new)


def _shrink_heads(old: dict[str, Any], new: dict[str, Any], heads: str, hidden: str) -> None:
    """As many heads per kv head as before where that is one or all, else two."""
    new[heads] = _NUM_HEADS
    for name in _KV_HEADS_NAMES:
        if isinstance(old.get(name), int):
            share = old[heads] // max(1, old[name])
            new[name] = _NUM_HEADS if share == 1 else 1 if old[name] == 1 else _NUM_HEADS // 2
    if isinstance(old.get("head_dim"), int):
        is_even = old["head_dim"] * old[heads] == old[hidden]
        new["head_dim"] = min(old["head_dim"], _HEAD_DIM if is_even else _OTHER_HEAD_DIM)
        if old["head_dim"] == old.get("qk_rope_head_dim"):  # MLA: the dims that RoPE turns
            new["head_dim"] = new["qk_rope_head_dim"]


def _smaller(name: str, value: Any) -> Any:
    if name not in _AT_MOST or not isinstance(value, int) or isinstance(value, bool):
        return value
    return min(value, _AT_MOST[name])


def _find(config: Any, names: tuple[str, ...]) -> str:
    data = config.to_dict()
    for name in names:
        if isinstance(data.get(name), int):
            return name
    raise ValueError(f"{type(config).__name__} has none of {', '.join(names)}")


def _is_per_layer(name: str, value: Any, num_layers: int) -> bool:
    return isinstance(value, list) and len(value) == num_layers and name not in _NO_LAYERS


def _kept_layers(config: dict[str, Any], num_layers: int) -> list[int]:
    """The first layer of each kind, and the first ones beside, in order."""
    lists = [value for name, value in config.items() if _is_per_layer(name, value, num_layers)]
    others = {int(index): part for index, part in (config.get(_PER_LAYER) or {}).items()}
    first_shared = num_layers - (config.get(_NUM_SHARED) or 0)
    kinds: dict[str, int] = {}
    for index in range(num_layers):
        kind = [*(values[index] for values in lists), others.get(index), index >= first_shared]
        kinds.setdefault(repr(kind), index)
    kept = set(kinds.values())
    for index in range(num_layers):
        if len(kept) < _MIN_LAYERS:
            kept.add(index)
    return sorted(kept)
