"""load_model: loads, fuses and verifies the model of a checkpoint's name. Every error is one line.

    resolve the folder
    -> reject by config.json (checkpoints/architectures.py)
    -> choose_backend: LlamaDecoder or transformers' code
    -> check a small random instance of the same config, unless an earlier start did (self_check.py)
    -> only now read weights (and, in parallel, compute their digest)
    -> build, and verify
    -> measure the largest step
    -> fingerprint

A model over several processes is started, loaded and joined by `load_parallel`.

The fingerprint of a model is a digest over everything, except the tokens, that a block's bytes
depend on: two engines may exchange KV only if theirs are equal.

transformers_backend.py is imported only for models that need it: importing it takes two CPU
seconds. It knows no requests and no blocks. Start-up only.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import torch

from checkpoints import architectures, digests, files
from checkpoints.errors import CheckpointError
from checkpoints.files import read_config
from checkpoints.resolve import resolve
from engine.batch import Batch
from engine.config import EngineConfig
from engine.decoder.ahead import AheadDecoder, make_ahead
from engine.decoder.plain_graphs import PlainGraphs, make_plain_graphs
from engine.decoder.tree_graphs import reserved_bytes
from engine.errors import LoadError, ModelNotSupported
from engine.kv.layout import DTYPE_BYTES, KvLayout
from engine.kv.memory import TORCH_DTYPES, KvMemory
from engine.layers.quantized_attention import Scales, calibrate_scales
from engine.models.checkpoint_config import (
    CheckpointConfig,
    Rehearsed,
    Way,
    read_checkpoint_config,
    transformers_config,
)
from engine.models.llama import (
    LlamaConfig,
    LlamaDecoder,
    LlamaModel,
    kv_layout,
    on_device,
    pack_weights,
    rope_table,
)
from engine.models.memory_profile import largest_step_bytes
from engine.models.self_check import check_architecture, check_kernels, compare_logits
from engine.models.weight_streaming import WHY_PLAIN
from engine.models.weights import (
    Progress,
    check_memory,
    must_stream,
    read_tensors,
    read_weights,
)
from engine.parallel import rank_model
from engine.parallel.distributed_ranks import DistributedRanks
from engine.parallel.messages import Meet, Met, StartRank, Verify
from engine.parallel.parallel_model import Others, ParallelModel
from engine.parallel.rank_grid import Grid, check_degrees
from engine.parallel.rank_processes import PROGRAM, RankProcesses
from engine.request import ModelInfo

if TYPE_CHECKING:
    from engine.models.transformers_backend import TransformersModel

logger = logging.getLogger(__name__)

Loaded: TypeAlias = "LlamaModel | TransformersModel | ParallelModel"

_Make: TypeAlias = """Callable[
    [EngineConfig, Path, CheckpointConfig, ModelInfo, StartupPhases, Progress | None], Loaded
]"""


def load_model(
    config: EngineConfig, *, progress: Progress | None = None, is_draft: bool = False
) -> Loaded:
    """Load the model `config.model`.

    Args: is_draft: it is a draft model, which must compute token trees in any case.
    Raises: LoadError with a message of one line.
    """
    phases = StartupPhases()
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
            check_memory(config, checkpoint.path, checkpoint.name, device, dtype)
            is_streamed = must_stream(config, checkpoint.path, dtype)
            reason: str | None = WHY_PLAIN
            if not is_streamed:
                reason = choose_backend(config, model_config, device, checkpoint.name)
            if config.num_ranks > 1:
                check_parallel(config, model_config.decoder_shape, device, checkpoint.name)
            uses_kernels = runs_kernels(config, device)
            way: Way = "transformers" if reason else "own kernels" if uses_kernels else "own"
            with phases.timed("rehearsal"):
                if not rehearsed.has(way):
                    _check_architecture(checkpoint.path, checkpoint.name, way)
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


def _check_architecture(folder: Path, name: str, way: Way) -> None:
    check_architecture(transformers_config(folder), name, way)


def _measure(
    model: Loaded,
    config: EngineConfig,
    phases: StartupPhases,
    digest: Background[str],
    check_files: Callable[[], None],
) -> tuple[int, str]:
    """Measure the largest step, and wait for the weights' digest. Returns: (bytes of the step,
    digest). Closes the model on any error.

    Args: check_files: raises if the files that were digested may differ from those that were
        loaded, since both were opened by name at different times.
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
    phases: StartupPhases,
    progress: Progress | None,
) -> LlamaModel:
    """Load a model for LlamaDecoder, and fill in `info`."""
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
        decoder = load_decoder(
            folder,
            shape,
            device=device,
            dtype=info.dtype,
            num_positions=info.context_window,
            is_exact=config.exact,
            weight_dtype=config.weight_dtype,
            progress=progress,
        )
        linear = "fused kernels" if uses_kernels else pack_weights(decoder, info.dtype)
    with phases.timed("verify"):
        check_kernels(decoder, layout, device, info.dtype)
        scales = fixed_scales(decoder, layout, num_positions=info.context_window, device=device)
    info = dataclasses.replace(
        info,
        linear=linear,
        fused=(f"{shape.num_layers} of {shape.num_layers} decoder layers",),
        num_parameters=shape.num_parameters,
        weight_bytes=decoder.weights.num_bytes,
    )

    def ahead(decoder: LlamaDecoder, memory: KvMemory) -> AheadDecoder:
        return make_ahead(
            decoder,
            memory,
            max_rows=config.max_num_running,
            max_tokens=config.max_num_tokens_per_step,
            context_window=info.context_window,
            max_num_nodes=config.speculation.max_num_nodes if takes_guesses else 0,
        )

    def graphs(decoder: LlamaDecoder, memory: KvMemory) -> PlainGraphs | None:
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
    return LlamaModel(
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
    phases: StartupPhases,
    progress: Progress | None,
) -> ParallelModel:
    """Load a model over several processes, and fill in `info`."""
    with phases.timed("weights"):
        return load_parallel(config, folder, model_config.decoder_shape, info, progress=progress)


def _make_transformers(
    is_streamed: bool,
    config: EngineConfig,
    folder: Path,
    model_config: CheckpointConfig,
    info: ModelInfo,
    phases: StartupPhases,
    progress: Progress | None,
) -> TransformersModel:
    """Load a model for transformers' code, and fill in `info`."""
    from engine.models.transformers_backend import TransformersModel, build

    with phases.timed("weights"):
        built = build(
            transformers_config(folder),
            lambda: read_tensors(
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
    """Return the settings, for the fingerprint, with which keys and values differ from those of the
    checkpoint's dtype by more than rounding; with `exact`, also those that change rounding."""
    found: dict[str, object] = {}
    if config.weight_dtype != "auto":
        found["baton_weight_dtype"] = config.weight_dtype
        if config.tensor_parallel > 1:  # each share has scales of its own
            found["baton_weight_shares"] = config.tensor_parallel
    if config.exact:
        found["baton_exact"] = [config.tensor_parallel, config.pipeline_parallel]
    return found


# -- what may be loaded, and how


def check_supported(config: Mapping[str, Any], name: str) -> None:
    """Check that this engine can load and compute a config.json. Raises: ModelNotSupported."""
    reason = architectures.refusal(config)
    if reason is not None:
        raise ModelNotSupported(f"{name}: {reason}")


def choose_device(device: str) -> str:
    """Return the device by kind and number ("cpu", "cuda:0"). Raises: LoadError if the CUDA device
    does not exist."""
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
    """Return the dtype to compute in. "auto": bfloat16 if the checkpoint is stored in it, else
    float32."""
    if dtype != "auto":
        return dtype
    named = config.get("dtype") or config.get("torch_dtype")
    return "bfloat16" if named == "bfloat16" else "float32"


def choose_window(wanted: int, model_config: CheckpointConfig, name: str) -> int:
    """Return the context window in tokens. Raises: LoadError if `wanted` exceeds that of the model,
    or if neither is given."""
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


MIN_HEAD_DIM = 16
"""Smallest head dim of the kernels: that of one product of the tensor cores."""


def choose_backend(
    config: EngineConfig, model_config: CheckpointConfig, device: str, name: str
) -> str | None:
    """Return why transformers' code computes this model; None: LlamaDecoder does.

    Raises: ModelNotSupported, or LoadError for settings that only LlamaDecoder supports, if it does
        not support the model.
    """
    is_cuda = torch.device(device).type == "cuda"
    shape = model_config.shape
    reason: str | None = None
    if config.decoder == "transformers":
        reason = "decoder=transformers"
    elif shape is None:
        reason = model_config.refusal
    elif is_cuda and shape.head_dim < MIN_HEAD_DIM:
        reason = f"heads of {shape.head_dim} dimensions: kernels want {MIN_HEAD_DIM}"
    if config.num_ranks > 1 and reason is not None:
        raise LoadError(
            f"tensor_parallel, pipeline_parallel: only our own decoder is computed by several "
            f"processes, and it does not run {name} ({reason})"
        )
    if reason is None:
        return None
    if config.decoder == "own":
        raise ModelNotSupported(
            f"{name}: decoder=own does not do it: {reason}; use decoder=transformers"
        )
    for setting, is_set in (
        ("exact", config.exact),
        (f"weight_dtype={config.weight_dtype}", config.weight_dtype != "auto"),
    ):
        if is_set:
            raise LoadError(
                f"{setting}: needs our own decoder, which does not run {name} ({reason}); "
                "use decoder=own where that can be"
            )
    return reason


def runs_kernels(config: EngineConfig, device: str) -> bool:
    """Return whether LlamaDecoder uses the kernels' attention and products. On a CPU these are the
    kernels' reference, row by row and slow: used if `exact` or several ranks need it, and with
    decoder=own, which computes the same as on a GPU."""
    is_cuda = torch.device(device).type == "cuda"
    return is_cuda or config.decoder == "own" or config.exact or config.num_ranks > 1


# -- our own decoder


def load_decoder(
    folder: Path,
    shape: LlamaConfig,
    *,
    device: str,
    dtype: str,
    num_positions: int,
    is_exact: bool,
    weight_dtype: str,
    progress: Progress | None,
) -> LlamaDecoder:
    """Read weights from `folder` to the device and create the decoder.

    Args:
        num_positions: number of positions of the longest request.
        weight_dtype: that of EngineConfig.
    Raises: LoadError, CheckpointError.
    """
    on = torch.device(device)
    with on_device(on):
        try:
            weights = read_weights(
                folder,
                shape,
                dtype=TORCH_DTYPES[dtype],
                device=on,
                weight_dtype="" if weight_dtype == "auto" else weight_dtype,
                progress=progress,
            )
        except torch.cuda.OutOfMemoryError as error:
            raise LoadError(
                f"the weights need {shape.num_parameters * TORCH_DTYPES[dtype].itemsize} bytes, "
                f"which {device} has not free ({str(error).splitlines()[0]})"
            ) from error
        return LlamaDecoder(weights, rope_table(shape, num_positions, on), is_exact=is_exact)


def fixed_scales(
    decoder: LlamaDecoder, layout: KvLayout, *, num_positions: int, device: str
) -> tuple[Scales, ...]:
    """Calibrate one pair of scales per layer, if the layout has such scales; else return an empty
    tuple."""
    if layout.scale != "tensor":
        return ()
    on = torch.device(device)

    def forward(batch: Batch, step: Any) -> torch.Tensor:
        token_ids, positions, draw_indices = (
            torch.tensor(values, dtype=torch.int32, device=on)
            for values in (batch.token_ids, batch.positions, batch.draw_indices)
        )
        return decoder.forward_attending(token_ids, positions, draw_indices, step)

    with on_device(on):
        return calibrate_scales(
            forward,
            layout,
            vocab_size=decoder.shape.vocab_size,
            num_positions=num_positions,
            device=device,
        )


# -- several processes


def grid_of(config: EngineConfig) -> Grid:
    """Return the grid of ranks that the settings ask for."""
    return Grid(config.tensor_parallel, config.pipeline_parallel)


def check_parallel(config: EngineConfig, shape: LlamaConfig, device: str, name: str) -> None:
    """Check that a model can be split between the configured processes, before any weights are
    read.

    Args:
        shape: the sizes of a model that LlamaDecoder supports.
        device: rank 0's device, by kind and number.
    Raises: LoadError in one line, with the setting.
    """
    grid = grid_of(config)
    check_degrees(
        grid,
        name=name,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        intermediate_size=shape.intermediate_size,
        vocab_size=shape.vocab_size,
    )
    if config.kv_dtype not in ("auto", *_computed_dtypes(config)):
        raise LoadError(
            f"kv_dtype: {config.kv_dtype} is not for a model of several ranks; use auto, or "
            "tensor_parallel=1 and pipeline_parallel=1"
        )
    if config.exact and config.tensor_parallel > 2:
        raise LoadError(
            f"exact: the sum over {config.tensor_parallel} ranks has no fixed order; "
            "set tensor_parallel to 1 or 2"
        )
    kind, _, first = device.partition(":")
    if kind == "cuda":
        num_devices = torch.cuda.device_count() - int(first or 0)
        if num_devices < grid.num_ranks:
            raise LoadError(
                f"tensor_parallel, pipeline_parallel: {grid.num_ranks} ranks need a device each, "
                f"but there are {num_devices} from {device} on"
            )


def _computed_dtypes(config: EngineConfig) -> tuple[str, ...]:
    return () if config.dtype == "auto" else (config.dtype,)


def load_parallel(
    config: EngineConfig,
    folder: Path,
    shape: LlamaConfig,
    info: ModelInfo,
    *,
    progress: Progress | None = None,
    program: Sequence[str] = PROGRAM,
) -> ParallelModel:
    """Start the other ranks, load every part, and connect the ranks.

    Args:
        info: has device, dtype and window set; the rest is filled in.
        program: the command that each other rank runs.
    Raises: LoadError, RankFailed; no process is left then.
    """
    grid = grid_of(config)
    num_threads = _num_threads(config, grid, info.device)
    settled = dataclasses.replace(
        config,
        dtype=info.dtype,
        context_window=info.context_window,
        device=info.device,
        num_threads=num_threads,
    )
    if num_threads:
        torch.set_num_threads(num_threads)
    others = _start(settled, folder, shape, grid, program)
    try:
        part = rank_model.load_rank(settled, folder, shape, others.ranks, progress=progress)
        ready = others.processes.wait_ready()
        with others.processes.step():
            others.processes.tell(Meet())
            others.ranks.form(others.meeting_file)
            free_bytes = [met.free_bytes for met in others.processes.answers(Met)]
        info = dataclasses.replace(
            info,
            linear=f"fused kernels, {grid.num_ranks} ranks",
            fused=(f"{shape.num_layers} of {shape.num_layers} decoder layers",),
            num_parameters=shape.num_parameters,
            weight_bytes=part.weight_bytes + sum(each.weight_bytes for each in ready),
        )
        layout = kv_layout(shape, block_size=config.block_size, dtype=info.dtype)
        if torch.device(info.device).type == "cuda":
            with others.processes.step():
                others.processes.tell(Verify())
                actual, expected = part.verify(layout)
                torch.cuda.synchronize(info.device)
            compare_logits(
                actual, expected, dtype=info.dtype, is_fp8=part.is_fp8, device=info.device
            )
        return ParallelModel(part, others, info, layout, settled, free_bytes)
    except BaseException:
        others.close()
        raise


def _start(
    config: EngineConfig, folder: Path, shape: LlamaConfig, grid: Grid, program: Sequence[str]
) -> Others:
    kind, _, first = config.device.partition(":")
    starts = []
    for rank in range(1, grid.num_ranks):
        device = f"{kind}:{int(first) + rank}" if first else kind
        own = dataclasses.replace(config, device=device)
        starts.append(StartRank(own, str(folder), shape, rank))
    ranks = DistributedRanks(grid, 0, config.device, config.rank_timeout_s)
    meeting_file, cache_file = os.memfd_create("baton-ranks"), os.memfd_create("baton-kv")
    processes = RankProcesses(
        grid,
        starts,
        timeout_s=config.rank_timeout_s,
        files=(meeting_file, cache_file),
        on_failure=ranks.abort,
        program=program,
    )
    others = Others(processes, ranks, cache_file, meeting_file)
    try:
        processes.start()
    except BaseException:
        others.close()
        raise
    return others


def _num_threads(config: EngineConfig, grid: Grid, device: str) -> int:
    """Return the number of threads of each rank: as configured, or on a CPU an equal share of its
    cores, since ranks with more threads would stall one another."""
    if config.num_threads or torch.device(device).type != "cpu":
        return config.num_threads
    return max(1, (os.cpu_count() or 1) // grid.num_ranks)


# -- the fingerprint


_NOT_MODEL = frozenset(
    {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"}
)
"""Keys of config.json that do not affect the computation; the dtype is part of the layout."""


def normalised_config(config: Mapping[str, Any]) -> str:
    """Return config.json as one line that does not depend on the order of keys or on the program
    that saved it."""
    kept = {key: value for key, value in config.items() if key not in _NOT_MODEL}
    return json.dumps(kept, sort_keys=True, ensure_ascii=True, separators=(",", ":"))


def fingerprint(
    *, weights_digest: str, config: Mapping[str, Any], tokenizer_digest: str, layout: str
) -> str:
    """Return the fingerprint over weights, config, tokenizer, dtype of the KV and block layout: 64
    hexadecimal characters. Device, threads, the computation of linear layers and the
    tensor-parallel degree are not in it.

    Args: layout: KvLayout.fingerprint_part.
    """
    digest = hashlib.blake2b(digest_size=32, person=b"baton-model-v1")
    for part in (weights_digest, normalised_config(config), tokenizer_digest, layout):
        data = part.encode()
        digest.update(
            len(data).to_bytes(8, "little") + data
        )  # so that no two lists of parts look alike
    return digest.hexdigest()


# -- parts of a start


_DIGITS = 3


class StartupPhases:
    """The durations of a start's phases."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def timed(self, name: str) -> Generator[None, None, None]:
        """Add the duration of the body to this phase."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - begun

    @property
    def seconds(self) -> tuple[tuple[str, float], ...]:
        """Return (phase, seconds) pairs, in the order in which the phases first began."""
        return tuple((name, round(value, _DIGITS)) for name, value in self._seconds.items())


@contextlib.contextmanager
def closed_on_failure() -> Generator[list[Callable[[], None]], None, None]:
    """Return a context whose value is a list of callables that are called, the last first, if the
    body fails. Their exceptions are only logged; the body's is raised."""
    closes: list[Callable[[], None]] = []
    try:
        yield closes
    except BaseException:
        for close in reversed(closes):
            try:
                close()
            except Exception:
                logger.exception("a start has failed, and not all of it could be closed")
        raise


T = TypeVar("T")


_LOOK_EVERY_S = 0.1


class _NotWanted(Exception):
    """Raised in the thread of a Background whose result is not wanted any more."""


class Background(Generic[T]):
    """Work of a start that runs in a thread while the caller does other work, and whose progress
    the caller's thread reports.

    At the end of the `with` block the thread has ended: work that reports progress stops at its
    next report. The thread does not keep a process from ending.

    Args:
        work: called in the thread with a callback for its progress.
        progress: called by `tell` and `result`, in the caller's thread.
    """

    def __init__(self, work: Callable[[Progress], T], progress: Progress | None) -> None:
        self._progress = progress
        self._latest: tuple[str, int, int] | None = None
        self._told: tuple[str, int, int] | None = None
        self._is_over = False
        self._work = work
        self._future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, name="background", daemon=True)
        self._thread.start()

    def __enter__(self) -> Background[T]:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._is_over = True
        self._thread.join()

    def _run(self) -> None:
        try:
            self._future.set_result(self._work(self._note))
        except BaseException as error:  # the caller's
            self._future.set_exception(error)

    def _note(self, what: str, done: int, total: int) -> None:
        if self._is_over:
            raise _NotWanted
        self._latest = (what, done, total)

    def tell(self) -> None:
        """Report the work's progress, if it has changed."""
        latest = self._latest
        if latest is not None and latest != self._told and self._progress is not None:
            self._told = latest
            self._progress(*latest)

    def telling(self) -> Progress | None:
        """Return a progress callback for the caller's own work, which reports this work's progress,
        too; None without `progress`."""
        progress = self._progress
        if progress is None:
            return None

        def both(what: str, done: int, total: int) -> None:
            self.tell()
            progress(what, done, total)

        return both

    def result(self) -> T:
        """Wait for the work and return its result, reporting progress meanwhile. Raises: the work's
        exception."""
        while not self._future.done():
            concurrent.futures.wait((self._future,), timeout=_LOOK_EVERY_S)
            self.tell()
        self.tell()
        return self._future.result()
