"""Does the model fit into what its workers may have? Pure but for `sizes_of`, which reads files or
asks the Hugging Face hub.

Finds the workers' settings where the chart puts them: ConfigMaps with `prefill.toml`, `decode.toml`
and `draft.toml`. On CPUs the container's memory limit counts, on GPUs what the nodes' labels say of
their memory (`nvidia.com/gpu.memory`, set by GPU feature discovery).
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import huggingface_hub

from baton.preflight import quantities
from baton.preflight.cluster_view import Cluster
from baton.preflight.findings import Finding, Status
from baton.preflight.model_memory import ModelMemory, estimate
from baton.preflight.needs import Needs, PodNeed
from checkpoints import CheckpointError, bundled_names, resolve
from checkpoints.files import read_config, weight_files

PROCESS_BYTES = 450 * 2**20
"""A worker before it has a model: Python and torch. Measured on CPU."""

_HUB_S = 15.0
_GPU_MEMORY = "nvidia.com/gpu.memory"
_ROLES = ("prefill", "decode", "draft")
DRAFT_KV_BYTES, DRAFT_NUM_RUNNING = 256 * 2**20, 64
"""Of a draft worker whose settings say nothing else: engine.speculation.draft_kv_bytes, and
engine.max_num_running."""


@dataclass(frozen=True)
class Sizes:
    """What is known of a checkpoint without loading it."""

    config: Mapping[str, Any]
    """Its config.json."""

    stored_bytes: float
    """Of its weights' files."""


def engines(needs: Needs) -> dict[str, Mapping[str, Any]]:
    """The engine's settings of each role, as the chart has written them."""
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
    """Of a bundled model, a folder here, or one on the hub; a line that says why not. Blocking."""
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


def check(needs: Needs, cluster: Cluster, sizes: Mapping[str, Sizes | str]) -> Iterator[Finding]:
    """One finding for each role. `sizes`: of each model that `engines` names."""
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
    engine: Mapping[str, Any], memory: ModelMemory, pod: PodNeed, cluster: Cluster
) -> Finding:
    """A draft worker's KV has a bound of its own, and is all taken at start."""
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
    # Its part of a GPU is what it takes: no share is set aside, and nothing is launched ahead.
    whole = {**engine, "memory_share": 1.0}
    memory = replace(memory, context_window=num_tokens, stack_bytes=0.0)
    return _fits("draft", whole, memory, pod, cluster)


def _fits(
    role: str, engine: Mapping[str, Any], memory: ModelMemory, pod: PodNeed, cluster: Cluster
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
        return Finding("model", Status.WARN, f"{asks}; nobody says what there is")
    if needed <= has:
        return Finding("model", Status.OK, f"{asks}; {place} {_gib(has)}")
    if role == "draft":
        fix += ", or less draft.settings.engine.speculation.draft_kv_bytes"
    else:
        fix += f", or {role}.settings.engine.context_window={memory.context_window // 2} or less"
    return Finding("model", Status.FAIL, f"{asks}; {place} {_gib(has)}", fix)


def _is_own(engine: Mapping[str, Any], *, has_gpu: bool) -> bool:
    """Our own decoder computes the whole model: it alone launches rows with adapters. That it does
    not do every family is not looked at."""
    num_ranks = int(engine.get("tensor_parallel", 1)) * int(engine.get("pipeline_parallel", 1))
    decoder = engine.get("decoder", "auto")
    is_whole = num_ranks == 1 and not engine.get("weights_device_bytes")
    return is_whole and (decoder == "own" or (decoder == "auto" and has_gpu))


def _gpu_bytes(cluster: Cluster) -> float | None:
    mebibytes = [
        float(node.labels[_GPU_MEMORY])
        for node in cluster.nodes or ()
        if node.labels.get(_GPU_MEMORY, "").isdecimal()
    ]
    return max(mebibytes) * 2**20 if mebibytes else None


def _limit_bytes(pod: PodNeed) -> float | None:
    """Of the worker's own container, which holds the model."""
    for container in pod.spec.get("containers") or ():
        limits = (container.get("resources") or {}).get("limits") or {}
        if "memory" in limits:
            return quantities.parse(limits["memory"])
    return None


def _gib(amount: float) -> str:
    return f"{amount / 2**30:.1f} GiB"
