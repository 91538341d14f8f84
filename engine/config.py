"""EngineConfig: the settings of one engine at start. A frozen value; properties that depend on the
machine and the model are in `ModelInfo`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from engine.grammar.config import GrammarLimits
from engine.lora.limits import LoraLimits
from engine.speculation.config import SpeculationConfig
from process.settings import NonNegativeInt, PositiveInt, SettingsError, check_ranges

DEVICES = ("auto", "cpu", "cuda", "cuda:N")
_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,4})?")
DTYPES = ("auto", "float32", "bfloat16")
KV_DTYPES = (*DTYPES, "int8", "fp8_e4m3")
KV_SCALES = ("tensor", "block", "token_head")
PREEMPTIONS = ("never", "recompute", "swap")
MAX_RANK_TIMEOUT_S = 3600.0
POLICIES = ("fcfs", "priority", "cache_aware")
WEIGHT_DTYPES = ("auto", "fp8_e4m3")
JUMP_FORWARD = ("tokens", "retokenize", "off")
DECODERS = ("auto", "own", "transformers")


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine. Raises SettingsError for a value out of range."""

    model: str = ""
    """The model: a bundled model's name, a local folder, or a Hugging Face name; resolved by
    checkpoints.resolve."""

    device: str = "auto"
    """The device: "cpu", "cuda" (the first one), "cuda:N", or "auto": cuda if there is one."""

    dtype: str = "auto"
    """The dtype to compute in: "float32", "bfloat16", or "auto": bfloat16 if the checkpoint's
    config names it, else float32."""

    decoder: str = "auto"
    """The implementation of the model: "auto": our own decoder for Llama, Mistral, Qwen2 and Qwen3,
    else transformers' code; "transformers": transformers' code, for any supported model; "own":
    our own decoder with its kernels (on a CPU their reference, which is slow)."""

    exact: bool = False
    """Whether a request's tokens must not depend, to the last bit, on the other rows of a step, on
    the chunks of its prompt, or on cached prefixes. Slower; our own decoder's kernels only,
    without adapters, and not with a `kv_dtype` other than the compute dtype, since over such a
    cache the order of sums depends on a step's other rows."""

    weight_dtype: str = "auto"
    """The dtype in which the layers' matrices are stored: "fp8_e4m3" (a scale per output channel;
    activations are quantized per token), or "auto": the compute dtype. Our own decoder only.
    Part of the model fingerprint."""

    weights_device_bytes: NonNegativeInt = 0
    """Bytes of device memory that the weights may use; 0: all weights lie there. Layers of a larger
    model lie in host memory and are copied to the device when they are computed, by
    transformers' code. For one process; not with `exact` or `weight_dtype`."""

    kv_dtype: str = "auto"
    """The dtype of the KV cache: "float32", "bfloat16", "int8", "fp8_e4m3", or "auto": the compute
    dtype. With int8 and fp8_e4m3 a block is quantized when it is full, and an unfilled one is
    kept unquantized in separate memory. Part of the model fingerprint."""

    kv_scale: str = "token_head"
    """The range of one scale of a quantized KV cache: "tensor" (all keys, or all values, of a
    layer; found at start), "block" (one head of one block), "token_head" (one head of one
    token). Scales are part of the block's bytes."""

    block_size: PositiveInt = 16
    """Number of tokens per block. Part of the model fingerprint: every worker and store of a
    deployment has the same."""

    num_blocks: NonNegativeInt = 0
    """Number of blocks of the KV cache; 0: as many as `kv_bytes` hold."""

    kv_bytes: NonNegativeInt = 0
    """Bytes of the KV cache; 0: on CUDA the part of `memory_share` that remains; on CPU four full
    context windows or 256 MiB, whichever is more, and at most a quarter of the memory free at
    start."""

    memory_share: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """Share of a CUDA device's memory that this engine may use, for weights, its largest step
    (measured at start), and the KV cache, which gets the rest. Ignored if `num_blocks` or
    `kv_bytes` is set."""

    max_num_tokens_per_step: PositiveInt = 512
    """Largest number of tokens of one step (token budget): decodes first, prefill chunks in the
    remainder."""

    max_num_running: PositiveInt = 64
    """Largest number of requests that take part in one step; at most `max_num_tokens_per_step`, so
    that each decode has its token."""

    max_num_tokens_per_request_step: NonNegativeInt = 0
    """Largest number of prompt tokens of one request in one step, so that several prompts advance
    together; 0: as many as the budget leaves."""

    policy: str = "priority"
    """Admission order of the requests that wait for blocks: "fcfs": first come, first served;
    "priority": higher priority first, then as "fcfs"; "cache_aware": as "priority", but among
    equal priorities the longest cached prefix first."""

    max_passes: NonNegativeInt = 32
    """Number of times that later requests of no higher priority may pass a waiting one (because
    they fit, or have a longer cached prefix); after that none of them is admitted before it."""

    max_num_adapters_per_step: NonNegativeInt = 0
    """Largest number of different adapters in one batch; 0: unlimited."""

    preemption: str = "never"
    """Reaction to a lack of blocks. "never": a request gets all blocks that it may need before it
    begins, or waits for them. "recompute", "swap": a request gets blocks as it needs them; if
    none are left, the least urgent request loses its blocks. Later their KV is recomputed, or
    copied back from the worker's KV store, or from host memory if there is none."""

    park_bytes: NonNegativeInt = 0
    """Bytes of host memory for swapped blocks, or, with a KV store, for blocks on their way to it
    and back; 0: as much as the KV cache has. Blocks that do not fit are recomputed, and counted."""

    overlap: bool = True
    """Launch a decode step before the tokens of the previous one are read, if the model supports
    it, so that the device does not wait for the host. It does not change tokens beyond rounding."""

    overlap_prompts: bool = False
    """Launch steps with prompts ahead, too; with `overlap`, without speculation and parallel ranks.
    A request that arrives meanwhile waits for both steps."""

    jump_forward: str = "tokens"
    """How text that a grammar forces is added. "tokens": as the tokens that would be sampled one by
    one, without running the model for them; the answer is the same. "retokenize": the last
    sampled token and the forced text are tokenized together; closer to the model's training
    data, and a different answer. "off": every token is sampled. Requests with log probabilities
    or hard masks of their own sample every token."""

    grammar: GrammarLimits = GrammarLimits()  # noqa: RUF009  (a frozen value)
    """Limits of the cost of one grammar."""

    context_window: NonNegativeInt = 0
    """Largest number of tokens of one request, prompt and output together; 0: that of the model."""

    tensor_parallel: PositiveInt = 1
    """Number of processes that split every layer's heads and columns. The total is this times
    `pipeline_parallel`; on CUDA each has a device of its own, from `device` on."""

    pipeline_parallel: PositiveInt = 1
    """Number of stages of consecutive layers, each computed by processes of its own."""

    rank_timeout_s: Annotated[float, Meta(gt=0, le=MAX_RANK_TIMEOUT_S)] = 120.0
    """Longest time in seconds without a message from a process that computes a part of the model,
    while loading or in a step. After it the engine fails."""

    num_threads: NonNegativeInt = 0
    """Number of torch's CPU threads; 0: torch's default. Set 1 where several engines share few
    cores."""

    speculation: SpeculationConfig = SpeculationConfig()  # noqa: RUF009  (a frozen value)
    """Settings of speculative decoding. Steps are launched ahead (`overlap`) only while no proposer
    proposes tokens."""

    lora: LoraLimits = LoraLimits()  # noqa: RUF009  (a frozen value)
    """Limits of LoRA adapters: number and sizes."""

    def __post_init__(self) -> None:
        if not _DEVICE.fullmatch(self.device):
            raise SettingsError(f"device: {self.device!r} is none of {', '.join(DEVICES)}")
        if self.dtype not in DTYPES:
            raise SettingsError(f"dtype: {self.dtype!r} is none of {', '.join(DTYPES)}")
        for name, known in (
            ("preemption", PREEMPTIONS),
            ("policy", POLICIES),
            ("kv_dtype", KV_DTYPES),
            ("kv_scale", KV_SCALES),
            ("decoder", DECODERS),
            ("jump_forward", JUMP_FORWARD),
            ("weight_dtype", WEIGHT_DTYPES),
        ):
            if getattr(self, name) not in known:
                raise SettingsError(
                    f"{name}: {getattr(self, name)!r} is none of {', '.join(known)}"
                )
        check_ranges(self)
        if self.max_num_running > self.max_num_tokens_per_step:
            raise SettingsError(
                f"max_num_running: {self.max_num_running} is above max_num_tokens_per_step "
                f"({self.max_num_tokens_per_step}); each running request needs a token per step"
            )
        if self.weights_device_bytes:
            self._check_streaming()

    def _check_streaming(self) -> None:
        for name, value, allowed in (
            ("decoder", self.decoder, ("auto", "transformers")),
            ("exact", self.exact, (False,)),
            ("weight_dtype", self.weight_dtype, ("auto",)),
            ("tensor_parallel", self.tensor_parallel, (1,)),
            ("pipeline_parallel", self.pipeline_parallel, (1,)),
        ):
            if value not in allowed:
                raise SettingsError(
                    f"{name}: {value} does not go with weights_device_bytes: layers are streamed "
                    "by transformers' code alone, in one process; leave one of the two away"
                )

    @property
    def num_ranks(self) -> int:
        """The number of processes that compute one step together."""
        return self.tensor_parallel * self.pipeline_parallel
