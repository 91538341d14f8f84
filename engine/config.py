"""EngineConfig: what one engine is told at start. A frozen value; what depends on the machine and
model is `ModelInfo`."""

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
    """A bundled model's name, a local folder, or a Hugging Face name. Resolved by
    checkpoints.resolve."""

    device: str = "auto"
    """"cpu", "cuda" (the first one), "cuda:N", or "auto": cuda where there is one."""

    dtype: str = "auto"
    """"float32", "bfloat16", or "auto": the dtype that the checkpoint's config names, float32 where
    it names none."""

    decoder: str = "auto"
    """Whose code computes the model: "auto": our own for Llama, Mistral, Qwen2 and Qwen3, else
    transformers'; "transformers": any supported model; "own": our own, by its kernels (on a CPU by
    their reference, which is slow)."""

    exact: bool = False
    """A request's tokens do not depend, to the last bit, on what else is in a step, on how its
    prompt was cut, or on what was cached. Slower; by our own decoder's kernels, without adapters
    only. Not with a `kv_dtype` that is not the dtype computed in: over such a cache a step's other
    rows have a say in the order of sums."""

    weight_dtype: str = "auto"
    """What the layers' matrices are kept in: "fp8_e4m3" (a scale per output channel; activations
    are quantized per token), or "auto": the dtype computed in. Our own decoder only. Part of the
    model fingerprint."""

    weights_device_bytes: NonNegativeInt = 0
    """Device memory that the weights may take; 0: all of them lie there. Of a model with more,
    layers lie in host memory and are copied to the device as they are computed, by transformers'
    code. In one process; without `exact` and `weight_dtype`, which our own decoder has."""

    kv_dtype: str = "auto"
    """What the KV cache stores: "float32", "bfloat16", "int8", "fp8_e4m3", or "auto": the dtype
    computed in. With the last two a block is quantized when it is full, and an unfilled one is kept
    as computed beside the cache. Part of the model fingerprint."""

    kv_scale: str = "token_head"
    """What one scale is for, where the KV cache is quantized: "tensor" (all keys, or values, of a
    layer; found at start), "block" (one head's in one block), "token_head" (one head's of one
    token). Scales are part of the block's bytes."""

    block_size: PositiveInt = 16
    """Tokens per block. Part of the model fingerprint: every worker and store of a deployment has
    the same."""

    num_blocks: NonNegativeInt = 0
    """Blocks of the KV cache; 0: as many as `kv_bytes` hold."""

    kv_bytes: NonNegativeInt = 0
    """Bytes of the KV cache; 0: on CUDA what `memory_share` leaves; on CPU four full context
    windows or 256 MiB, whichever is more, and at most a quarter of the memory free at start."""

    memory_share: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """Of a CUDA device's memory, what this engine may use: weights, its largest step (measured at
    start), and the KV cache, which gets the rest. Of no account where that is sized otherwise."""

    max_num_tokens_per_step: PositiveInt = 512
    """Token budget of one step: decodes first, prefill chunks in the remainder."""

    max_num_running: PositiveInt = 64
    """Most requests that take part in one step; at most `max_num_tokens_per_step`, so that each
    decode has its token."""

    max_num_tokens_per_request_step: NonNegativeInt = 0
    """Most prompt tokens of one request in one step, so that several prompts advance together; 0:
    as many as the budget leaves."""

    policy: str = "priority"
    """Order of the requests that wait for blocks: "fcfs": first come, first served; "priority":
    higher priority first, then as "fcfs"; "cache_aware": as "priority", but among equal priorities
    the longest cached prefix first."""

    max_passes: NonNegativeInt = 32
    """How often a request that waits may be passed by later ones of no higher priority (because
    they fit, or have more cached); after that it goes before them, and they wait for it."""

    max_num_adapters_per_step: NonNegativeInt = 0
    """Most different adapters in one batch; 0: no bound."""

    preemption: str = "never"
    """What happens when blocks run out. "never": a request takes all blocks that it may need before
    it begins, or waits for them. "recompute", "swap": a request takes blocks as it needs them, and
    when they run out, the least urgent request loses its own. It computes them again, or gets them
    back from where they were parked: the worker's KV store, or host memory where there is none."""

    park_bytes: NonNegativeInt = 0
    """Host memory for swapped blocks, with a KV store for those on their way to it and back; 0: as
    much as the KV cache has. What does not fit is computed again, and counted."""

    overlap: bool = True
    """Launch a decode step before the tokens of the last one were read, where the model can: the
    device does not wait for the host. A token depends on it as little as on the other requests of
    the step."""

    overlap_prompts: bool = False
    """With `overlap`, without speculation and parallel ranks: launch steps with prompts ahead, too.
    A request that comes meanwhile waits for both steps."""

    jump_forward: str = "tokens"
    """What is done where a grammar forces the text that follows. tokens: it is taken in the tokens
    that the model would be made to draw one by one, without running the model for them; the answer
    is the same. retokenize: the token that was just drawn and the forced text are cut into tokens
    anew, together: nearer to text that the model was trained on, and another answer. off: every
    token is drawn. Tokens are drawn one by one for requests with log probabilities or hard masks of
    their own."""

    grammar: GrammarLimits = GrammarLimits()  # noqa: RUF009  (a frozen value)
    """What one grammar may cost."""

    context_window: NonNegativeInt = 0
    """Most tokens of one request, prompt and output together; 0: the model's own."""

    tensor_parallel: PositiveInt = 1
    """Processes that share every layer's heads and columns. With `pipeline_parallel`, so many times
    as many in all; on CUDA each has a device of its own, from `device` on."""

    pipeline_parallel: PositiveInt = 1
    """Stages of consecutive layers, each computed by processes of its own."""

    rank_timeout_s: Annotated[float, Meta(gt=0, le=MAX_RANK_TIMEOUT_S)] = 120.0
    """Longest silence of one of several processes that compute a model together: loading, or in a
    step. After it the engine fails."""

    num_threads: NonNegativeInt = 0
    """torch's CPU threads; 0: leave torch's own. One each when several engines share few cores."""

    speculation: SpeculationConfig = SpeculationConfig()  # noqa: RUF009  (a frozen value)
    """Drafting several tokens a step. Steps are launched ahead (`overlap`) while no proposer
    proposes tokens."""

    lora: LoraLimits = LoraLimits()  # noqa: RUF009  (a frozen value)
    """Bounds on LoRA adapters: how many, how large."""

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
        """Processes that compute one step together."""
        return self.tensor_parallel * self.pipeline_parallel
