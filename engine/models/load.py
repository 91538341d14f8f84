"""load_model: from a checkpoint's name to a probed, fused and verified model. Everything that can
be wrong is said in one line.

    resolve the folder -> refuse by config.json (checkpoints/architectures.py) -> our own decoder or
    transformers' code -> rehearse a small random instance of the same config, where no earlier
    start did -> only now read weights (and, beside, take their digest) -> build, and verify ->
    measure the largest step -> fingerprint

transformers_backend.py is imported where a model needs it: that takes two CPU seconds. Knows no
requests and no blocks. Start-up only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from checkpoints import architectures, digests, files
from checkpoints.errors import CheckpointError
from checkpoints.files import read_config
from checkpoints.resolve import resolve
from engine.config import EngineConfig
from engine.decoder import load
from engine.decoder.ahead import AheadDecoder, make_ahead
from engine.decoder.decoder import Decoder
from engine.decoder.model import DecoderModel, kv_layout
from engine.decoder.plain_graphs import PlainGraphs, make_plain_graphs
from engine.decoder.tree_graphs import reserved_bytes
from engine.errors import LoadError, ModelNotSupported
from engine.fingerprint import fingerprint
from engine.kv.layout import DTYPE_BYTES
from engine.kv.memory import TORCH_DTYPES, KvMemory
from engine.models import weight_room
from engine.models.background import Background
from engine.models.checkpoint_config import (
    CheckpointConfig,
    Rehearsed,
    Way,
    read_checkpoint_config,
    transformers_config,
)
from engine.models.largest_step import largest_step_bytes
from engine.models.phases import Phases
from engine.models.weight_streaming import WHY_PLAIN
from engine.models.weights import read_weights
from engine.parallel.load import check_parallel, load_parallel
from engine.parallel.model import ParallelModel
from engine.request import ModelInfo

if TYPE_CHECKING:
    from engine.models.transformers_backend import TransformersModel

Progress = Callable[[str, int, int], None]

Loaded: TypeAlias = "DecoderModel | TransformersModel | ParallelModel"
_Make = Callable[
    [EngineConfig, Path, CheckpointConfig, ModelInfo, Phases, Progress | None],
    Loaded,
]


def load_model(
    config: EngineConfig, *, progress: Progress | None = None, is_draft: bool = False
) -> Loaded:
    """Load `config.model`.

    Args:
        is_draft: it guesses for others: it computes token trees, whoever guesses for it.
    Raises: LoadError; the message is one line.
    """
    phases = Phases()
    try:
        checkpoint = resolve(config.model, files="all", progress=progress)
        before = files.stamps(checkpoint.path)
        raw_config = read_config(checkpoint.path)
        check_supported(raw_config, checkpoint.name)
        rehearsed = Rehearsed(checkpoint.path)
        with rehearsed.alone():
            model_config = rehearsed.config or read_checkpoint_config(checkpoint.path)
            device = choose_device(config.device)
            dtype = choose_dtype(config.dtype, raw_config)
            window = choose_window(config.context_window, model_config, checkpoint.name)
            weight_room.check(config, checkpoint.path, checkpoint.name, device, dtype)
            is_streamed = weight_room.is_streamed(config, checkpoint.path, dtype)
            reason: str | None = WHY_PLAIN
            if not is_streamed:
                reason = load.why_not(config, model_config, device, checkpoint.name)
            if config.num_ranks > 1:
                check_parallel(config, model_config.decoder_shape, device, checkpoint.name)
            uses_kernels = load.uses_kernels(config, device)
            way: Way = "transformers" if reason else "own kernels" if uses_kernels else "own"
            with phases.timed("rehearsal"):
                if not rehearsed.has(way):
                    _rehearse(checkpoint.path, checkpoint.name, way)
                    rehearsed.keep(model_config, way)
        tokenizer_digest = digests.tokenizer_digest(checkpoint.path)
    except CheckpointError as error:
        raise LoadError(str(error)) from error
    info = ModelInfo(
        model=checkpoint.name,
        model_type=model_config.model_type,
        fingerprint="",
        tokenizer_digest=tokenizer_digest,
        dtype=dtype,
        context_window=window,
        vocab_size=model_config.vocab_size,
        eos_token_ids=model_config.eos_token_ids,
        block_size=config.block_size,
        num_blocks=0,
        device=device,
        linear="",
        fused=(),
        num_parameters=0,
        weight_bytes=0,
        decoder="own" if reason is None else f"transformers ({reason})",
        gives_embeddings=config.num_ranks == 1,
    )
    takes_guesses = is_draft or config.speculation.is_on
    own = partial(_make_own, takes_guesses, uses_kernels)
    make: _Make = own if reason is None else partial(_make_transformers, is_streamed)
    if config.num_ranks > 1:
        make = _make_parallel
    with Background(partial(digests.weights_digest, checkpoint.path), progress) as digest:
        try:
            model = make(config, checkpoint.path, model_config, info, phases, digest.telling())
            step_bytes, weights_digest = _measure(
                model,
                config,
                phases,
                digest,
                lambda: files.check_unchanged(checkpoint.path, before),
            )
        except CheckpointError as error:
            raise LoadError(str(error)) from error
    model.info = dataclasses.replace(
        model.info,
        fingerprint=fingerprint(
            weights_digest=weights_digest,
            config=raw_config | _numerics(config),
            tokenizer_digest=tokenizer_digest,
            layout=model.layout.fingerprint_part,
        ),
        step_bytes=step_bytes,
        seconds=phases.seconds,
    )
    return model


def _rehearse(folder: Path, name: str, way: Way) -> None:
    from engine.models.rehearsal import rehearse

    rehearse(transformers_config(folder), name, way)


def _measure(
    model: Loaded,
    config: EngineConfig,
    phases: Phases,
    digest: Background[str],
    check_files: Callable[[], None],
) -> tuple[int, str]:
    """Bytes of the largest step, and the weights' digest, which was taken beside all that. A model
    that gets no further is closed.

    Args:
        check_files: raises where what was digested may not be what was loaded: both opened the
            files by name, each in its own time.
    """
    try:
        with phases.timed("measure"):
            step_bytes = largest_step_bytes(model, config)
        with phases.timed("digest"):  # what is left of it
            weights_digest = digest.result()
        check_files()
        return step_bytes, weights_digest
    except BaseException:
        model.close()
        raise


def _make_own(
    takes_guesses: bool,
    uses_kernels: bool,
    config: EngineConfig,
    folder: Path,
    model_config: CheckpointConfig,
    info: ModelInfo,
    phases: Phases,
    progress: Progress | None,
) -> DecoderModel:
    """Our own decoder; `info` filled in with what it is."""
    shape = model_config.decoder_shape
    layout = kv_layout(
        shape,
        block_size=config.block_size,
        dtype=info.dtype,
        kv_dtype="" if config.kv_dtype == "auto" else config.kv_dtype,
        scale=config.kv_scale,
    )
    if config.exact and layout.dtype != info.dtype:
        raise LoadError(
            f"exact: not with kv_dtype={config.kv_dtype} where {info.dtype} is computed in: over "
            "such a cache a step's other rows have a say in the order of sums; leave kv_dtype at "
            "auto"
        )
    device = info.device
    with phases.timed("weights"):
        decoder = load.load_decoder(
            folder,
            shape,
            device=device,
            dtype=info.dtype,
            num_positions=info.context_window,
            is_exact=config.exact,
            weight_dtype=config.weight_dtype,
            progress=progress,
        )
        linear = "fused kernels" if uses_kernels else load.pack(decoder, info.dtype)
    with phases.timed("verify"):
        load.check_kernels(decoder, layout, device, info.dtype)
        scales = load.fixed_scales(
            decoder, layout, num_positions=info.context_window, device=device
        )
    info = dataclasses.replace(
        info,
        linear=linear,
        fused=(f"{shape.num_layers} of {shape.num_layers} decoder layers",),
        num_parameters=shape.num_parameters,
        weight_bytes=decoder.weights.num_bytes,
    )

    def ahead(decoder: Decoder, memory: KvMemory) -> AheadDecoder:
        return make_ahead(
            decoder,
            memory,
            max_rows=config.max_num_running,
            max_tokens=config.max_num_tokens_per_step,
            context_window=info.context_window,
            max_num_nodes=config.speculation.max_num_nodes if takes_guesses else 0,
        )

    def graphs(decoder: Decoder, memory: KvMemory) -> PlainGraphs | None:
        return make_plain_graphs(
            decoder,
            memory,
            max_rows=config.max_num_running,
            max_tokens=config.max_num_tokens_per_step,
            context_window=info.context_window,
            max_num_nodes=config.speculation.max_num_nodes,
        )

    graph_bytes = reserved_bytes(
        config.max_num_tokens_per_step,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        element_bytes=DTYPE_BYTES[info.dtype],
    )
    return DecoderModel(
        decoder,
        info,
        layout,
        lora=config.lora,
        fixed_scales=scales,
        uses_kernels=uses_kernels,
        make_ahead=ahead if config.overlap and uses_kernels else None,
        make_graphs=graphs if takes_guesses else None,
        graph_bytes=graph_bytes if takes_guesses else 0,
        launches_prompts=config.overlap_prompts,
    )


def _make_parallel(
    config: EngineConfig,
    folder: Path,
    model_config: CheckpointConfig,
    info: ModelInfo,
    phases: Phases,
    progress: Progress | None,
) -> ParallelModel:
    """Our own decoder over several processes; `info` filled in with what it is."""
    with phases.timed("weights"):
        return load_parallel(config, folder, model_config.decoder_shape, info, progress=progress)


def _make_transformers(
    is_streamed: bool,
    config: EngineConfig,
    folder: Path,
    model_config: CheckpointConfig,
    info: ModelInfo,
    phases: Phases,
    progress: Progress | None,
) -> TransformersModel:
    """The universal backend; `info` filled in with what it is."""
    from engine.models.transformers_backend import TransformersModel, build

    with phases.timed("weights"):
        built = build(
            transformers_config(folder),
            lambda: read_weights(
                folder, TORCH_DTYPES[info.dtype], progress, is_kept=info.device == "cpu"
            ),
            device=info.device,
            dtype=info.dtype,
            block_size=config.block_size,
            kv_dtype="" if config.kv_dtype == "auto" else config.kv_dtype,
            kv_scale=config.kv_scale,
            streamed_to_bytes=config.weights_device_bytes if is_streamed else 0,
        )
    weight_bytes = built.num_parameters * DTYPE_BYTES[info.dtype]
    info = dataclasses.replace(
        info,
        linear=built.linear,
        fused=built.fused,
        num_parameters=built.num_parameters,
        weight_bytes=weight_bytes if built.stream is None else built.stream.plan.device_bytes,
    )
    return TransformersModel(
        built.model, info, built.layout, config.lora, built.fixed_scales, built.stream
    )


def _numerics(config: EngineConfig) -> dict[str, object]:
    """For the fingerprint: what gives other keys and values than the checkpoint's own dtype does.
    Rounding of another order is not among them, but where every bit was promised."""
    found: dict[str, object] = {}
    if config.weight_dtype != "auto":
        found["baton_weight_dtype"] = config.weight_dtype
        if config.tensor_parallel > 1:  # each share has scales of its own
            found["baton_weight_shares"] = config.tensor_parallel
    if config.exact:
        found["baton_exact"] = [config.tensor_parallel, config.pipeline_parallel]
    return found


# -- what may be loaded


def check_supported(config: Mapping[str, Any], name: str) -> None:
    """Raises: ModelNotSupported for a config.json that this engine would compute wrongly or cannot
    load."""
    reason = architectures.refusal(config)
    if reason is not None:
        raise ModelNotSupported(f"{name}: {reason}")


def choose_device(device: str) -> str:
    """The device by kind and number. Raises: LoadError when CUDA, or that one, is asked for and
    absent."""
    if device == "auto":
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return device
    if not torch.cuda.is_available():
        raise LoadError(f"device: {device} was asked for, but torch finds none; use device=cpu")
    index, num_devices = int(number or 0), torch.cuda.device_count()
    if index >= num_devices:
        raise LoadError(
            f"device: {device} was asked for, but torch finds {num_devices}; the last one is "
            f"cuda:{num_devices - 1}"
        )
    return f"cuda:{index}"


def choose_dtype(dtype: str, config: Mapping[str, Any]) -> str:
    """The dtype to compute in. "auto": the checkpoint's; float32 where it has another one or names
    none."""
    if dtype != "auto":
        return dtype
    named = config.get("dtype") or config.get("torch_dtype")
    return "bfloat16" if named == "bfloat16" else "float32"


def choose_window(wanted: int, model_config: CheckpointConfig, name: str) -> int:
    """The context window. Raises: LoadError when more is wanted than the model was made for, or
    where neither says how much."""
    limit = model_config.max_position_embeddings or wanted
    if not limit:
        raise LoadError(
            f"context_window: the config.json of {name} names no max_position_embeddings; set it"
        )
    if wanted > limit:
        raise LoadError(
            f"context_window: {wanted} is above what {name} was made for ({limit}); lower it"
        )
    return wanted or limit
