"""Memory check of preflight: does the model fit, with its KV cache, into the memory that its
workers may use?

The estimate is the formula of docs/sizing.md over a checkpoint's config:

    weights + blocks x (2 x layers x KV heads x head dim x bytes per number) x tokens per block

For latent attention (MLA) the latent and its rotary part take the place of keys and values.
Adapters take their room from the start (lora.max_launched_rank). It is an estimate: the worker
measures what a step needs and refuses to start where that does not fit.

The engine's settings are those of the chart: ConfigMaps with `prefill.toml`, `decode.toml` and
`draft.toml`. On a CPU the container's memory limit counts; on a GPU, what the nodes' labels say
(`nvidia.com/gpu.memory`, set by GPU feature discovery). Pure but for `sizes_of`, which reads files
or asks the Hugging Face hub.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import huggingface_hub

from baton.preflight.chart_needs import Needs, PodNeed, parse_quantity
from baton.preflight.checks import Finding, Status
from baton.preflight.cluster import KubernetesFacts
from checkpoints import CheckpointError, bundled_names, resolve
from checkpoints.files import read_config, weight_files

PROCESS_BYTES = 450 * 2**20
"""Memory that a worker takes before it loads a model: Python and torch, measured on CPU."""

_HUB_S = 15.0
_GPU_MEMORY = "nvidia.com/gpu.memory"
_ROLES = ("prefill", "decode", "draft")
DRAFT_KV_BYTES, DRAFT_NUM_RUNNING = 256 * 2**20, 64
"""Defaults of a draft worker: engine.speculation.draft_kv_bytes and engine.max_num_running."""
_BYTES = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "int8": 1.0,
    "fp8_e4m3": 1.0,
}
_MAX_GUESSED_WINDOW = 8192
"""The context window in tokens, where neither the settings nor the config name one."""
MAX_NUM_ADAPTERS = 8
"""Most LoRA adapters of a worker by default (lora.max_num_adapters of the engine)."""


@dataclass(frozen=True)
class ModelMemory:
    """The memory that one worker of a model needs, in bytes."""

    weight_bytes: float
    """Bytes of all weights, in the dtype that they are computed with."""

    kv_bytes_per_token: float
    """Bytes of the KV of one token, over all layers."""

    context_window: int
    """Length of the longest request, in tokens."""

    streamed_bytes: float = 0.0
    """Bytes of weights that stay in host memory beside a GPU (weights_device_bytes)."""

    stack_bytes: float = 0.0
    """Bytes of room for launched adapters of Baton's own decoder, taken at the start."""

    @property
    def least_bytes(self) -> float:
        """Bytes that a worker needs to start: weights, room for adapters, and the KV of one request
        that fills the window."""
        kv_bytes = self.kv_bytes_per_token * self.context_window
        return self.weight_bytes + self.stack_bytes + kv_bytes


def estimate(
    config: Mapping[str, Any], stored_bytes: float, engine: Mapping[str, Any]
) -> ModelMemory | None:
    """Estimate the memory of a checkpoint with this config.json, run with these settings of the
    engine.

    Args: stored_bytes: the size of its weights' files.
    Returns: None where the config does not say enough.
    """
    config = {**config, **(config.get("text_config") or {})}
    stored = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    computed = stored if engine.get("dtype", "auto") == "auto" else str(engine["dtype"])
    if stored not in _BYTES or computed not in _BYTES:
        return None
    factor = _BYTES[computed] / _BYTES[stored]
    if engine.get("weight_dtype", "auto") == "fp8_e4m3":
        factor = _BYTES["fp8_e4m3"] / _BYTES[stored]
    kv = computed if engine.get("kv_dtype", "auto") == "auto" else str(engine["kv_dtype"])
    numbers = _kv_numbers_per_token(config)
    if numbers is None or kv not in _BYTES:
        return None
    window = int(
        engine.get("context_window") or config.get("max_position_embeddings") or _MAX_GUESSED_WINDOW
    )
    weight_bytes = stored_bytes * factor
    given = float(engine.get("weights_device_bytes") or 0)
    streamed_bytes = max(0.0, weight_bytes - given) if given else 0.0
    is_stacked = kv == computed and engine.get("overlap", True) and not engine.get("exact", False)
    stack_bytes = _stack_numbers(config, engine) * _BYTES[computed] if is_stacked else 0.0
    return ModelMemory(weight_bytes, numbers * _BYTES[kv], window, streamed_bytes, stack_bytes)


def _stack_numbers(config: Mapping[str, Any], engine: Mapping[str, Any]) -> float:
    """Numbers in the factors of as many adapters as may be loaded, over all linear layers. Modules
    whose weights are one matrix have their ranks side by side (engine/lora/stacked_weights.py)."""
    lora = engine.get("lora") or {}
    rank = float(lora.get("max_launched_rank") or 0)
    num_adapters = float(lora.get("max_num_adapters", MAX_NUM_ADAPTERS))
    hidden, inner = config.get("hidden_size"), config.get("intermediate_size")
    num_heads, num_layers = config.get("num_attention_heads"), config.get("num_hidden_layers")
    if not (rank and num_adapters and hidden and inner and num_heads and num_layers):
        return 0.0
    head_dim = config.get("head_dim") or hidden // num_heads
    query = num_heads * head_dim
    key = (config.get("num_key_value_heads") or num_heads) * head_dim
    linears = (
        (3, hidden + query + 2 * key),
        (1, query + hidden),
        (2, hidden + 2 * inner),
        (1, inner + hidden),
    )
    each = sum(num_modules * features for num_modules, features in linears)
    return float(num_layers * num_adapters * rank * each)


def _kv_numbers_per_token(config: Mapping[str, Any]) -> float | None:
    num_layers = config.get("num_hidden_layers") or config.get("n_layer")
    if not num_layers:
        return None
    if config.get("kv_lora_rank"):
        latent = config["kv_lora_rank"] + (config.get("qk_rope_head_dim") or 0)
        return float(num_layers * latent)
    num_heads = config.get("num_attention_heads") or config.get("n_head")
    hidden = config.get("hidden_size") or config.get("n_embd")
    if not num_heads or not hidden:
        return None
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    head_dim = config.get("head_dim") or hidden // num_heads
    return float(2 * num_layers * num_kv_heads * head_dim)


@dataclass(frozen=True)
class Sizes:
    """Config and size of a checkpoint that was not loaded."""

    config: Mapping[str, Any]
    """Content of the checkpoint's config.json."""

    stored_bytes: float
    """Size of the files with its weights."""


def engines(needs: Needs) -> dict[str, Mapping[str, Any]]:
    """The engine's settings by role, read from the chart's ConfigMaps."""
    found: dict[str, Mapping[str, Any]] = {}
    for each in needs.objects:
        if each["kind"] != "ConfigMap":
            continue
        for role in _ROLES:
            text = (each.get("data") or {}).get(f"{role}.toml")
            if text:
                found[role] = tomllib.loads(text).get("engine") or {}
    return found


def sizes_of(model: str) -> Sizes | str:
    """Find the config and size of a bundled model, a folder here, or a model on the hub; or one
    line that says why they are not known. Blocking; the hub is asked for at most 15 s."""
    try:
        if model.startswith("/"):
            return f"{model} is a folder in the pods: it cannot be looked at from here"
        checkpoint = resolve(model, files="tokenizer")
        config = read_config(checkpoint.path)
        if model in bundled_names():
            files = weight_files(checkpoint.path)
            return Sizes(config, float(sum(file.stat().st_size for file in files)))
        name, _, revision = model.partition("@")
        info = huggingface_hub.HfApi().model_info(
            name, revision=revision or None, files_metadata=True, timeout=_HUB_S
        )
    except CheckpointError as error:
        return str(error)
    except Exception as error:
        # The border to the hub's library, whose errors differ from version to version.
        return f"{model}: the hub did not answer ({type(error).__name__})"
    sizes = [
        each.size or 0
        for each in info.siblings or ()
        if each.rfilename.endswith(".safetensors") and "/" not in each.rfilename
    ]
    return Sizes(config, float(sum(sizes)))


def check(
    needs: Needs, cluster: KubernetesFacts, sizes: Mapping[str, Sizes | str]
) -> Iterator[Finding]:
    """Check whether the model fits into a worker's memory: one finding for each role.

    Args: sizes: what `sizes_of` gave for each model that `engines` names.
    """
    for role, engine in engines(needs).items():
        pod = next((each for each in needs.pods if each.owner.endswith(f"-{role}")), None)
        known = sizes.get(str(engine.get("model", "")))
        if pod is None or known is None:
            continue
        if isinstance(known, str):
            yield Finding("model", Status.WARN, f"{role}: {known}")
            continue
        memory = estimate(known.config, known.stored_bytes, engine)
        if memory is None:
            what = f"{role}: {engine['model']} says too little of its shape to know its memory"
            yield Finding("model", Status.WARN, what)
        elif role == "draft":
            yield _drafts(engine, memory, pod, cluster)
        else:
            yield _fits(role, engine, memory, pod, cluster)


def _drafts(
    engine: Mapping[str, Any], memory: ModelMemory, pod: PodNeed, cluster: KubernetesFacts
) -> Finding:
    """A draft worker takes all its KV at the start, up to `draft_kv_bytes`."""
    speculation = engine.get("speculation") or {}
    bound = float(speculation.get("draft_kv_bytes", DRAFT_KV_BYTES))
    window_bytes = memory.kv_bytes_per_token * memory.context_window
    if window_bytes > bound:
        return Finding(
            "model",
            Status.FAIL,
            f"draft: {engine.get('model')}: {memory.context_window} tokens of KV take "
            f"{_gib(window_bytes)}, draft_kv_bytes are {_gib(bound)}",
            "raise draft.settings.engine.speculation.draft_kv_bytes, or lower "
            "draft.settings.engine.context_window",
        )
    num_running = int(engine.get("max_num_running", DRAFT_NUM_RUNNING))
    num_tokens = int(min(num_running * window_bytes, bound) // memory.kv_bytes_per_token)
    # It takes what it needs of a GPU: no share is set aside, and no adapters are launched.
    whole = {**engine, "memory_share": 1.0}
    memory = replace(memory, context_window=num_tokens, stack_bytes=0.0)
    return _fits("draft", whole, memory, pod, cluster)


def _fits(
    role: str,
    engine: Mapping[str, Any],
    memory: ModelMemory,
    pod: PodNeed,
    cluster: KubernetesFacts,
) -> Finding:
    num_gpus = max((amount for name, amount in pod.requests.items() if "gpu" in name), default=0.0)
    if not _is_own(engine, has_gpu=num_gpus > 0):
        memory = replace(memory, stack_bytes=0.0)
    weight_bytes, beside = memory.weight_bytes, ""
    if num_gpus:
        if memory.streamed_bytes:
            weight_bytes -= memory.streamed_bytes
            beside = f", beside {_gib(memory.streamed_bytes)} of weights in host memory"
        needed = (memory.least_bytes - memory.streamed_bytes) / num_gpus
        has = _gpu_bytes(cluster)
        has = has and has * float(engine.get("memory_share", 0.9))
        place, fix = "each GPU may use", "more GPUs (tensor_parallel), or larger ones"
        if role == "draft":
            fix = "a larger GPU"
        if beside:
            fix = f"lower {role}.settings.engine.weights_device_bytes, or larger GPUs"
    else:
        needed, has = memory.least_bytes + PROCESS_BYTES, _limit_bytes(pod)
        place, fix = "the container's limit is", f"raise {role}.resources"
    model = engine.get("model")
    stacks = f"{_gib(memory.stack_bytes)} for adapters, " if memory.stack_bytes else ""
    if stacks:
        fix += f", or lower {role}.settings.engine.lora.max_launched_rank"
    asks = (
        f"{role}: {model} needs about {_gib(needed)} ({_gib(weight_bytes)} of weights, {stacks}"
        f"{memory.context_window} tokens of KV at {memory.kv_bytes_per_token / 1024:.1f} KiB)"
        f"{beside}"
    )
    host_bytes = memory.streamed_bytes + PROCESS_BYTES if beside else 0.0
    limit = _limit_bytes(pod)
    if limit is not None and host_bytes > limit:
        what = f"{asks}; the container's limit is {_gib(limit)}"
        fix_host = f"raise {role}.resources, or {role}.settings.engine.weights_device_bytes"
        return Finding("model", Status.FAIL, what, fix_host)
    if has is None:
        unknown = "no node says how much memory a GPU has" if num_gpus else "it has no memory limit"
        return Finding("model", Status.WARN, f"{asks}; {unknown}")
    if needed <= has:
        return Finding("model", Status.OK, f"{asks}; {place} {_gib(has)}")
    if role == "draft":
        fix += ", or less draft.settings.engine.speculation.draft_kv_bytes"
    else:
        fix += f", or {role}.settings.engine.context_window={memory.context_window // 2} or less"
    return Finding("model", Status.FAIL, f"{asks}; {place} {_gib(has)}", fix)


def _is_own(engine: Mapping[str, Any], *, has_gpu: bool) -> bool:
    """Whether Baton's own decoder computes the whole model; only it launches adapters. Whether it
    supports the model's family is not checked."""
    num_ranks = int(engine.get("tensor_parallel", 1)) * int(engine.get("pipeline_parallel", 1))
    decoder = engine.get("decoder", "auto")
    is_whole = num_ranks == 1 and not engine.get("weights_device_bytes")
    return is_whole and (decoder == "own" or (decoder == "auto" and has_gpu))


def _gpu_bytes(cluster: KubernetesFacts) -> float | None:
    mebibytes = [
        float(node.labels[_GPU_MEMORY])
        for node in cluster.nodes or ()
        if node.labels.get(_GPU_MEMORY, "").isdecimal()
    ]
    return max(mebibytes) * 2**20 if mebibytes else None


def _limit_bytes(pod: PodNeed) -> float | None:
    """The memory limit of the worker's container; None: it has none."""
    for container in pod.spec.get("containers") or ():
        limits = (container.get("resources") or {}).get("limits") or {}
        if "memory" in limits:
            return parse_quantity(limits["memory"])
    return None


def _gib(amount: float) -> str:
    return f"{amount / 2**30:.1f} GiB"
