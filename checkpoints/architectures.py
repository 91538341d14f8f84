"""Which model types are served, by which route, and why the others are not. Plain data and pure
functions over `config.json`: readable without torch, by the command line as by the engine.

Each line of SERVED was earned: a small random checkpoint of that type gives transformers' own
greedy tokens through the paged cache (tests/parity/test_architectures.py). A line says what is true
of the type as such; what a single config asks beyond that, `refusal` says, and the rest is found by
the engine's rehearsal of that very config (engine/models/self_check.py). Types are those of
transformers' MODEL_FOR_CAUSAL_LM_MAPPING. Any thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

FUSED, UNIVERSAL = "fused", "universal"
"""Routes. Fused: Llama-shaped decoder layers, replaced by ours after loading. Universal:
transformers' modelling code as it is. Both on our paged attention."""

SERVED: dict[str, tuple[str, str]] = {
    "afmoe": ("universal", "moe sliding"),
    "apertus": ("universal", ""),
    "arcee": ("universal", ""),
    "aria_text": ("universal", "moe"),
    "axk1": ("universal", "mla moe"),
    "beam": ("universal", "logit-softcap moe sliding"),
    "biogpt": ("universal", ""),
    "bitnet": ("universal", ""),
    "cohere": ("universal", ""),
    "cohere2": ("universal", "sliding"),
    "cohere2_moe": ("universal", "moe sliding"),
    "cohere_compass_text": ("universal", "sliding"),
    "ctrl": ("universal", ""),
    "cwm": ("fused", "sliding"),
    "deepseek_v2": ("universal", "mla moe"),
    "deepseek_v3": ("universal", "mla moe"),
    "dots1": ("universal", "moe"),
    "ernie4_5": ("universal", ""),
    "ernie4_5_moe": ("universal", "moe"),
    "exaone4": ("universal", "sliding"),
    "exaone_moe": ("universal", "moe sliding"),
    "flex_olmo": ("universal", "moe"),
    "flint": ("universal", "moe sinks sliding"),
    "gemma": ("universal", ""),
    "gemma2": ("universal", "logit-softcap sliding softcap"),
    "gemma3_text": ("universal", "sliding"),
    "gemma3n_text": ("universal", "logit-softcap moe shared-kv sliding"),
    "gemma4_text": ("universal", "layer-dims shared-kv sliding"),
    "gemma4_unified_text": ("universal", "layer-dims sliding"),
    "glm": ("universal", ""),
    "glm4": ("universal", ""),
    "glm4_moe": ("universal", "moe"),
    "glm4_moe_lite": ("universal", "mla moe"),
    "gpt-sw3": ("universal", ""),
    "gpt2": ("universal", ""),
    "gpt_bigcode": ("universal", ""),
    "gpt_neox": ("universal", ""),
    "gpt_oss": ("universal", "moe sinks sliding"),
    "granite": ("universal", ""),
    "granite_swa": ("universal", "sinks sliding"),
    "granitemoe": ("universal", "moe"),
    "granitemoe_swa": ("universal", "moe sinks sliding"),
    "granitemoeshared": ("universal", "moe"),
    "helium": ("universal", ""),
    "hunyuan_v1_dense": ("universal", ""),
    "hunyuan_v1_moe": ("universal", "moe"),
    "hy_v3": ("universal", "moe"),
    "hyperclovax": ("universal", ""),
    "internlm3": ("fused", ""),
    "iquestcoder": ("fused", ""),
    "jais2": ("universal", ""),
    "jetmoe": ("universal", "moe"),
    "kolibri1": ("universal", "moe sliding"),
    "laguna": ("universal", "moe"),
    "llama": ("fused", ""),
    "longcat_flash": ("universal", "mla moe"),
    "mellum": ("universal", "moe"),
    "mimo_v2_flash": ("universal", "kv-dims layer-dims moe sinks sliding"),
    "minicpm3": ("universal", "mla"),
    "minimax_m2": ("universal", "moe"),
    "ministral": ("fused", "sliding"),
    "ministral3": ("universal", ""),
    "mistral": ("fused", "sliding"),
    "mixtral": ("universal", "moe"),
    "modernbert-decoder": ("universal", "sliding"),
    "nanochat": ("universal", "logit-softcap"),
    "olmo": ("universal", ""),
    "olmo2": ("universal", ""),
    "olmo3": ("universal", "sliding"),
    "olmoe": ("universal", "moe"),
    "opt": ("universal", ""),
    "persimmon": ("universal", ""),
    "phi": ("universal", ""),
    "phi3": ("universal", ""),
    "phimoe": ("universal", "moe"),
    "qwen2": ("fused", ""),
    "qwen2_moe": ("universal", "moe"),
    "qwen3": ("fused", ""),
    "qwen3_moe": ("universal", "moe"),
    "seed_oss": ("fused", ""),
    "smollm3": ("universal", ""),
    "solar_open": ("universal", "moe"),
    "starcoder2": ("universal", ""),
    "vaultgemma": ("universal", "logit-softcap sliding softcap"),
    "youtu": ("universal", "mla"),
}

PUBLISHED_REFUSED: dict[str, str] = {
    "deepseek_v3": "published checkpoint is quantized (fp8) and refused",
    "gpt_oss": "published checkpoint is quantized (mxfp4) and refused",
}
"""Of SERVED: the architecture is served, with weights that are not quantized, but what its makers
published has a `quantization_config`, which `refusal` refuses."""
"""Model type -> (route, features). Features: `sliding` windows, `softcap` of scores, attention
`sinks`, `moe` (experts), `mla` (the compressed latent is cached), `kv-dims` (keys and values of
different dims), `layer-dims` (layers of different dims), `shared-kv` (layers that use another's),
`logit-softcap`."""

_ENCODER = "it is an encoder: its tokens see those after them, too"
_DECODER = "it is the decoder of an encoder-decoder"
_COMPOSITE = "it is several models in one (text with images, sound or bytes)"
_STATE = "some layers keep a recurrent or convolution state, which is no KV block"
_SPARSE = "an indexer chooses the tokens that each one attends to"
_ALIBI = "positions are a bias on the attention scores (ALiBi)"
_OWN_CODE = "its attention code does not go through transformers' attention interface"
_BIAS = "it adds a position bias to the attention scores"
_TWICE = "it attends more than once in one layer"
_CHUNKED = "chunked attention: the attention function is not told the chunk size"
_MASK = "it builds an attention mask of its own"
_WINDOW = "transformers disagrees with itself: its cache has a window, its attention has none"
_DRAFT = "it is a draft model that reads another model's states"

REFUSED: dict[str, str] = {
    "axk2": _SPARSE,
    "bailing_hybrid": _STATE,
    "bamba": _STATE,
    "bart": _DECODER,
    "bert": _ENCODER,
    "bert-generation": _ENCODER,
    "big_bird": _ENCODER,
    "bigbird_pegasus": _DECODER,
    "blenderbot": _DECODER,
    "blenderbot-small": _DECODER,
    "bloom": _ALIBI,
    "blt": _COMPOSITE,
    "camembert": _ENCODER,
    "codegen": _OWN_CODE,
    "cpmant": _OWN_CODE,
    "data2vec-text": _ENCODER,
    "dbrx": _OWN_CODE,
    "deepseek_v32": _SPARSE,
    "deepseek_v4": _SPARSE,
    "diffllama": _TWICE,
    "doge": _MASK,
    "dots3_note": _COMPOSITE,
    "dots3_note_text": _SPARSE,
    "electra": _ENCODER,
    "emu3": _COMPOSITE,
    "ernie": _ENCODER,
    "falcon": _OWN_CODE,
    "falcon_h1": _STATE,
    "falcon_mamba": _STATE,
    "fuyu": _COMPOSITE,
    "gemma3": _COMPOSITE,
    "gemma3n": _COMPOSITE,
    "gemma4": _COMPOSITE,
    "gemma4_assistant": _DRAFT,
    "gemma4_unified": _COMPOSITE,
    "gemma4_unified_assistant": _DRAFT,
    "git": _COMPOSITE,
    "glm_moe_dsa": _SPARSE,
    "got_ocr2": _COMPOSITE,
    "gpt_neo": _OWN_CODE,
    "gpt_neox_japanese": _OWN_CODE,
    "gptj": _OWN_CODE,
    "granitemoehybrid": _STATE,
    "hrm_text": _TWICE,
    "hy_v4": _SPARSE,
    "inkling2_text": _BIAS,
    "inkling_text": _BIAS,
    "jamba": _STATE,
    "kimi_linear": _STATE,
    "lfm2": _STATE,
    "lfm2_moe": _STATE,
    "lfm3": _STATE,
    "llama4": _COMPOSITE,
    "llama4_text": _CHUNKED,
    "mamba": _STATE,
    "mamba2": _STATE,
    "marian": _DECODER,
    "mbart": _DECODER,
    "megatron-bert": _ENCODER,
    "minimax": _STATE,
    "minimax_m3_vl_text": _SPARSE,
    "mllama": _COMPOSITE,
    "moshi": _WINDOW,
    "moss_transcribe_diarize": _COMPOSITE,
    "mpt": _ALIBI,
    "musicgen": _DECODER,
    "musicgen_melody": _DECODER,
    "mvp": _DECODER,
    "nemotron": _OWN_CODE,
    "nemotron_h": _STATE,
    "olmo_hybrid": _STATE,
    "openai-gpt": _OWN_CODE,
    "pegasus": _DECODER,
    "phi4_multimodal": _COMPOSITE,
    "plbart": _DECODER,
    "prophetnet": _DECODER,
    "qwen3_5": _COMPOSITE,
    "qwen3_5_moe": _COMPOSITE,
    "qwen3_5_moe_text": _STATE,
    "qwen3_5_text": _STATE,
    "qwen3_next": _STATE,
    "qwen4_exp": _COMPOSITE,
    "qwen4_exp_text": _SPARSE,
    "recurrent_gemma": _STATE,
    "reformer": _ENCODER,
    "rembert": _ENCODER,
    "roberta": _ENCODER,
    "roberta-prelayernorm": _ENCODER,
    "roc_bert": _ENCODER,
    "roformer": _ENCODER,
    "rwkv": _STATE,
    "stablelm": _OWN_CODE,
    "trocr": _DECODER,
    "whisper": _DECODER,
    "xglm": _OWN_CODE,
    "xlm": _ENCODER,
    "xlm-roberta": _ENCODER,
    "xlm-roberta-xl": _ENCODER,
    "xlnet": _ENCODER,
    "xlstm": _STATE,
    "xmod": _ENCODER,
    "zamba": _STATE,
    "zamba2": _STATE,
    "zaya": _STATE,
}
"""Model type -> why it is not served. Known ones; any other type is refused as unknown."""

ROPE_TYPES = frozenset({"default", "linear", "llama3", "proportional", "yarn"})
"""Others ("dynamic", "longrope") turn by the longest position of the batch: batch-mates would
change each other."""

LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def refusal(config: Mapping[str, Any]) -> str | None:
    """Why this `config.json` is not served, in one line; None: nothing in it says so."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in SERVED:
        reason = REFUSED.get(str(model_type), "it is not known here; `baton models` lists what is")
        return f"model type {model_type!r} is not supported: {reason}"
    if config.get("quantization_config"):
        return "quantized weights are not supported; give the original checkpoint"
    for name, kind in (
        ("rope_parameters", Mapping),
        ("rope_scaling", Mapping),
        ("layer_types", list),
    ):
        value = config.get(name)
        if value is not None and not isinstance(value, kind):
            return f"{name}: {str(value)[:80]!r} is no {'list' if kind is list else 'JSON object'}"
    for rope_type in _rope_types(config):
        if rope_type not in ROPE_TYPES:
            return (
                f"RoPE type {rope_type!r} is not supported; supported are "
                f"{', '.join(sorted(ROPE_TYPES))}"
            )
    others = sorted({str(each) for each in config.get("layer_types") or ()} - LAYER_TYPES)
    if others:
        return (
            f"layers of type {', '.join(others)} are not supported; supported are "
            f"{', '.join(sorted(LAYER_TYPES))}"
        )
    if config.get("use_bidirectional_attention") not in (None, False, "vision"):  # images only
        return "use_bidirectional_attention: tokens that see those after them are not supported"
    return None


def _rope_types(config: Mapping[str, Any]) -> Iterator[str]:
    """Of all layers, or layer type by layer type where the config has it so."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name) or {}
        parts = [part for part in rope.values() if isinstance(part, Mapping)]
        if not parts or "rope_type" in rope or "type" in rope:
            parts.append(rope)
        for part in parts:
            yield str(part.get("rope_type") or part.get("type") or "default")
