"""Checks of a model at start.

- `check_architecture`: compares this engine's computation of the architecture with transformers',
  on a small random instance of the same config (`tiny_config`), before any weights are loaded. The
  instance runs a script of prompts, chunks and decodes of different lengths through the paged
  cache, with shared blocks; every token's logits are compared with those of the same instance under
  transformers' own eager attention, one sequence at a time. An architecture that fails is rejected
  by name. Float32 on CPU; tens of milliseconds.
- `probe_kv_layout`: one tiny forward pass that finds what a transformers model caches, and rejects
  a model that would be computed wrongly. It reads shapes from the tensors that reach the attention
  function, not from the config.
- `check_kernels`, `compare_logits`: compare the kernels of this device with plain torch on the
  weights that are served.

Imports transformers only where an architecture is checked: ranks start without it. Start-up only.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from engine.batch import Batch, TokenSpan
from engine.decoder.inputs import attending_inputs, mixed_inputs, singles_first
from engine.errors import LoadError, ModelNotSupported
from engine.kv.layout import KvLayout, LayerKv, layout_of
from engine.kv.memory import KvMemory
from engine.layers.torch_attention import TorchPagedAttention
from engine.models.llama import (
    LlamaDecoder,
    block_rows,
    kv_layout,
    on_device,
    pack_weights,
    read_llama_config,
    rope_table,
)
from engine.models.weights import take_weights

if TYPE_CHECKING:
    from engine.models.checkpoint_config import Way

# -- the kernels of this device


NUM_VERIFY_TOKENS = 40
"""Number of tokens of a comparison: a chunk that is longer than a block and ends inside one, and
one decode."""

_MAX_RELATIVE_ERROR = {"float32": 1e-4, "bfloat16": 0.1}
"""Largest relative error (L2) of logits through the kernels against plain torch with the same
weights, by dtype; sums are rounded in another order. Measured on 32 layers: 0.01 to 0.07 in
bfloat16; a wrong kernel is off by 0.5 and more."""

_MAX_FP8_ERROR = 0.5
"""Largest relative error (L2) with fp8 matrices, where numbers on rounding edges fall to either
side. Measured: 0.18 on 32 layers of random numbers; unrelated logits are off by 1.4."""


def verify_logits(
    forward: Callable[[Batch], torch.Tensor], vocab_size: int, layout: KvLayout
) -> torch.Tensor:
    """Compute float32 logits [40, V] of a fixed prompt, by a chunk and a decode, through a cache of
    at least `layout.num_blocks_for(NUM_VERIFY_TOKENS)` unused blocks; [0, V] on a rank without a
    head."""
    token_ids = tuple((7919 * i + 17) % vocab_size for i in range(NUM_VERIFY_TOKENS))
    cut = NUM_VERIFY_TOKENS - 1
    parts: list[torch.Tensor] = []
    for start, end in ((0, cut), (cut, NUM_VERIFY_TOKENS)):
        span = TokenSpan(start, end - start, tuple(range(layout.num_blocks_for(end))))
        batch = Batch(token_ids[start:end], (span,), tuple(range(end - start)))
        parts.append(forward(batch).float())
    return torch.cat(parts)


def compare_logits(
    actual: torch.Tensor, expected: torch.Tensor, *, dtype: str, is_fp8: bool, device: str
) -> None:
    """Compare logits through the kernels with those of plain torch. Raises: LoadError if they
    differ by more than rounding."""
    error = float((actual - expected).norm() / expected.norm())
    max_error = _MAX_FP8_ERROR if is_fp8 else _MAX_RELATIVE_ERROR[dtype]
    if not error <= max_error:  # NaN is a difference, too
        raise LoadError(
            f"kernels: logits on {device} are {error:.2g} off those of plain torch: this device or "
            "its libraries compute something else; use decoder=transformers"
        )


Forward = Callable[[Batch], torch.Tensor]
"""Computes a batch and returns logits [R, V]."""


def attending(decoder: LlamaDecoder, memory: KvMemory) -> Forward:
    """Return a function that computes batches with `decoder` and torch's attention."""
    views, block_size = memory.layer_views(), memory.layout.block_size
    device = memory.cache.device

    @torch.inference_mode()
    def forward(batch: Batch) -> torch.Tensor:
        step = TorchPagedAttention(batch, views, block_size)
        return decoder.forward_attending(*attending_inputs(batch, device), step)

    return forward


def attached(decoder: LlamaDecoder, memory: KvMemory) -> Forward:
    """Return a function that computes batches with `decoder` and the kernels, on an unquantized
    cache. For a decoder of all layers only."""
    decoder.attach([block_rows(view, memory.layout) for view in memory.layer_views()])
    device = memory.cache.device

    @torch.inference_mode()
    def forward(batch: Batch) -> torch.Tensor:
        with on_device(device):
            return decoder.forward(mixed_inputs(singles_first(batch), device))

    return forward


def check_kernels(decoder: LlamaDecoder, layout: KvLayout, device: str, dtype: str) -> None:
    """Compare logits through this device's kernels with those of plain torch with the same weights;
    on CPU do nothing.

    Raises: LoadError if they differ by more than rounding.
    """
    if torch.device(device).type != "cuda":
        return
    raw, vocab_size = layout.raw, decoder.shape.vocab_size
    forward = attached(decoder, KvMemory(raw, raw.num_blocks_for(NUM_VERIFY_TOKENS), device))
    actual = verify_logits(forward, vocab_size, raw)
    decoder.use_backend("reference")
    expected = verify_logits(forward, vocab_size, raw)
    decoder.use_backend("auto")
    is_fp8 = decoder.weights.is_fp8
    compare_logits(actual, expected, dtype=dtype, is_fp8=is_fp8, device=device)


# -- what a transformers model caches


_NUM_PROBE_TOKENS = 3


@dataclass(frozen=True)
class Probed:
    """The properties of each attention layer that a probe found, in order."""

    layers: tuple[LayerKv, ...]
    """The heads and dims that each layer caches per token."""
    windows: tuple[int | None, ...]
    """The sliding window of each layer, in tokens; None: it attends to all tokens before."""


class Recorder:
    """A stand-in for TorchPagedAttention that records each layer's dims and window, and returns
    zeros."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerKv] = {}
        self.windows: dict[int, int | None] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        is_latent: bool = False,
    ) -> torch.Tensor:
        """Record one layer. Raises: TypeError for a shape that paged attention does not support."""
        if layer in self.layers:
            raise TypeError(f"layer {layer} attends twice")
        if key.shape[1] != query.shape[1] or value.shape[1] != query.shape[1]:
            raise TypeError(
                f"layer {layer} attends to {key.shape[1]} keys for {query.shape[1]} tokens"
            )
        if query.shape[0] % key.shape[0] or query.shape[2] != key.shape[2]:
            raise TypeError(
                f"layer {layer} has queries {tuple(query.shape)} and keys {tuple(key.shape)}"
            )
        num_v_heads = 0 if is_latent else value.shape[0]
        self.layers[layer] = LayerKv(key.shape[0], key.shape[2], num_v_heads, value.shape[2])
        self.windows[layer] = window
        return query.new_zeros(query.shape[1], query.shape[0], value.shape[2])


@torch.inference_mode()
def probe_kv_layout(model: Any, *, num_layers: int, device: str) -> Probed:
    """Run a tiny forward pass to find what each layer caches per token, and its sliding window.

    Args:
        model: a transformers causal language model that uses `transformers_backend.ATTENTION_NAME`.
        num_layers: the number of layers in its config.
    Raises: ModelNotSupported if the paged cache cannot serve the model.
    """
    recorder = Recorder()
    positions = torch.arange(_NUM_PROBE_TOKENS, device=device)[None]
    name = type(model).__name__
    try:
        model(
            input_ids=torch.zeros_like(positions),
            position_ids=positions,
            use_cache=False,
            baton_step=recorder,
        )
    except TypeError as error:
        raise ModelNotSupported(f"{name} cannot run on the paged cache: {error}") from error
    if sorted(recorder.layers) != list(range(num_layers)):
        raise ModelNotSupported(
            f"{name} has {num_layers} layers, but attention ran in layers {sorted(recorder.layers)}"
        )
    return Probed(
        tuple(recorder.layers[index] for index in range(num_layers)),
        tuple(recorder.windows[index] for index in range(num_layers)),
    )


# -- a tiny config of the same architecture


VOCAB_SIZE = 96
WINDOW = 5
"""Sliding window of a shrunken config, in tokens: shorter than the check's prompts."""

_MIN_LAYERS = 4
_HIDDEN = 64
_NUM_HEADS = 4
_HEAD_DIM = 16
_OTHER_HEAD_DIM = 32
"""Head dim where heads * head_dim is not the hidden size in the original config, so that it is not
in the shrunken one."""

_HIDDEN_NAMES = ("hidden_size", "n_embd", "d_model", "dim")
_HEADS_NAMES = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
_KV_HEADS_NAMES = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv")
_LAYERS_NAMES = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HIDDEN_TOO = ("word_embed_proj_dim", "embedding_size", "emb_dim")
"""Sizes that are shrunken with the hidden size if they are equal to it."""

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
"""Key of settings of single layers that differ from the common ones, by index."""
_NUM_SHARED = "num_kv_shared_layers"
"""Key of the number of last layers that use an earlier layer's keys and values."""
_INDEX_LISTS = ("moe_layers", "full_attn_idxs", "mlp_only_layers")
"""Keys of lists of layer indices."""
_NO_LAYERS = (*_IDS, *_INDEX_LISTS, "architectures", "suppress_tokens")
"""Keys of lists that do not have one entry per layer, whatever their length."""


def tiny_config(config: Any) -> Any:
    """Return a small config of the same class. Raises: ValueError if the config names no hidden
    size, heads or layers."""
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
    """Shrink the numbers of heads: as many query heads per kv head as before if that is one or all,
    else two."""
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
    """Return the indices of the first layer of each kind, and of the first layers up to
    `_MIN_LAYERS`, ascending."""
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


# -- the architecture


BLOCK_SIZE = 4
"""Block size of the check's cache, in tokens."""
_SCRIPT = (
    ((0, 0, 13), (1, 0, 1), (2, 0, 6)),
    ((0, 13, 14), (1, 1, 2), (2, 6, 19), (3, 8, 9)),
    ((0, 14, 15), (1, 2, 3), (2, 19, 20), (3, 9, 30)),
    ((0, 15, 16),),
)
"""Steps of the check, each of (prompt, start, end): whole prompts, chunks that end inside and at
the end of blocks, decodes; nearly every step mixes them."""
_LENGTHS = (16, 3, 20, 30)
_SHARED = 8
"""Number of tokens that the last prompt has in common with the first, and finds in its blocks."""

_MAX_ERROR = 1e-3
"""Largest error of any logit in float32, relative to the greatest one. Measured: below 1e-5 where
the computation is right; 1e-1 and more where it is wrong."""


Prepared = tuple[KvLayout, Callable[[KvMemory], Forward]]
"""The layout of a small model's cache, and a function that attaches it to such a cache."""


def check_architecture(config: Any, name: str, way: Way = "transformers") -> None:
    """Compare a small random instance of `config` with transformers.

    Args:
        config: a transformers config; not changed.
        name: the checkpoint's name, for the message.
        way: how the instance is computed.
    Raises: ModelNotSupported in one line if the instance cannot be built, does not run on the paged
        cache, or has other logits than transformers.
    """
    try:
        small = tiny_config(config)
        model = random_instance(small, seed=0)
        expected = _expected(model, _prompts())
        layout, attach = _prepared(copy.deepcopy(model), way)
        actual = _paged(layout, attach, _prompts())
    except ModelNotSupported as error:
        raise ModelNotSupported(f"{name}: {error}") from error
    except Exception as error:  # whatever the modelling code raises on our way of calling it
        line = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ModelNotSupported(
            f"{name}: a small random instance of this architecture ({config.model_type}) does not "
            f"run on the paged cache ({line})"
        ) from error
    errors = [
        float((want - got).abs().max() / want.abs().max())
        for want, got in zip(expected, actual, strict=True)
    ]
    if not all(error <= _MAX_ERROR for error in errors):  # NaN is a difference, too
        raise ModelNotSupported(
            f"{name}: a small random instance of this architecture ({config.model_type}) gives "
            f"logits {max(errors, key=abs):.2g} off those of transformers"
        )


def random_instance(config: Any, seed: int) -> Any:
    """Create a float32 model of `config` on CPU with random parameters that all affect the result:
    matrices keep the scale of their inputs, norms and biases differ from 1 and 0."""
    import transformers

    config = copy.deepcopy(config)
    config._attn_implementation = "eager"  # noqa: SLF001  (as transformers' own loading sets it)
    model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.random.fork_rng(devices=[]):  # the process's own draws shall not change
        torch.manual_seed(seed)
        model = model_class(config)
    model = model.to(torch.float32).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            gain = 4.0 if "embed" in name else 1.5
            deviation = gain / math.sqrt(parameter.shape[-1])
            parameter.normal_(0.0, deviation, generator=generator)
        elif "norm" in name and name.endswith("weight"):
            parameter.uniform_(0.5, 1.5, generator=generator)
        else:
            parameter.normal_(0.0, 0.3, generator=generator)
    return model


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    prompts: list[list[int]] = [
        torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in _LENGTHS
    ]
    prompts[-1][:_SHARED] = prompts[0][:_SHARED]
    return prompts


@torch.inference_mode()
def _expected(model: Any, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Compute each prompt's logits [T, V] with transformers alone."""
    return [
        model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0] for prompt in prompts
    ]


def _prepared(model: Any, way: Way) -> Prepared:
    """Prepare a model to be computed in the given way; `model` may be changed."""
    return _transformers_code(model) if way == "transformers" else _own_decoder(model, way)


def _own_decoder(model: Any, way: Way) -> Prepared:
    """Prepare a LlamaDecoder with the weights of `model`."""
    shape, device = read_llama_config(model.config), torch.device("cpu")
    weights = take_weights(model.state_dict(), shape, dtype=torch.float32, device=device)
    positions = int(model.config.max_position_embeddings)
    decoder = LlamaDecoder(weights, rope_table(shape, min(positions, 64), device))
    layout = kv_layout(shape, block_size=BLOCK_SIZE, dtype="float32")
    if way == "own kernels":
        return layout, lambda memory: attached(decoder, memory)
    pack_weights(decoder, "float32")
    return layout, lambda memory: attending(decoder, memory)


def _transformers_code(model: Any) -> Prepared:
    from engine.models.transformers_backend import ATTENTION_NAME, cache_latents, run

    model.set_attn_implementation(ATTENTION_NAME)
    cache_latents(model)
    probed = probe_kv_layout(model, num_layers=int(model.config.num_hidden_layers), device="cpu")

    def attach(memory: KvMemory) -> Forward:
        views = memory.layer_views()

        def forward(batch: Batch) -> torch.Tensor:
            step = TorchPagedAttention(batch, views, BLOCK_SIZE)
            return run(model, batch, step, torch.device("cpu"))

        return forward

    return layout_of(probed.layers, block_size=BLOCK_SIZE, dtype="float32"), attach


@torch.inference_mode()
def _paged(
    layout: KvLayout, attach: Callable[[KvMemory], Forward], prompts: list[list[int]]
) -> list[torch.Tensor]:
    """Compute each prompt's logits [T, V] by the steps of the script, through the paged cache."""
    tables, num_blocks = _tables(layout)
    memory = KvMemory(layout, num_blocks)
    memory.cache.fill_(1e3)  # a slot that is read before it was written must show
    forward = attach(memory)
    found: list[list[torch.Tensor]] = [[] for _ in prompts]
    for members in _SCRIPT:
        spans = tuple(
            TokenSpan(start, end - start, tables[index][: layout.num_blocks_for(end)])
            for index, start, end in members
        )
        token_ids = [token for index, start, end in members for token in prompts[index][start:end]]
        batch = Batch(tuple(token_ids), spans, tuple(range(len(token_ids))))
        logits = forward(batch)
        first = 0
        for (index, _, _), span in zip(members, spans, strict=True):
            if index == len(prompts) - 1 and span.start == _SHARED:
                found[index].append(found[0][0][:_SHARED])
            found[index].append(logits[first : first + span.num_tokens])
            first += span.num_tokens
    return [torch.cat(parts) for parts in found]


def _tables(layout: KvLayout) -> tuple[list[tuple[int, ...]], int]:
    """Return block ids of each prompt, in random order, and their number; the last prompt begins
    with blocks of the first one."""
    counts = [layout.num_blocks_for(length) for length in _LENGTHS]
    num_shared = _SHARED // layout.block_size
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(2)).tolist()
    tables = [tuple(order.pop() for _ in range(count)) for count in counts]
    tables[-1] = tables[0][:num_shared] + tables[-1][num_shared:]
    return tables, sum(counts)
