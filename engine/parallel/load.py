"""load_parallel: a model over several processes: what refuses, starts, loads and joins them. Called
by engine/models/load.py, which has rehearsed the model in one process. Start-up only.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.decoder.model import kv_layout
from engine.decoder.shape import DecoderShape
from engine.decoder.verify import check_close
from engine.errors import LoadError
from engine.models.interface import Progress
from engine.parallel import rank_model
from engine.parallel.messages import Meet, Met, Start, Verify
from engine.parallel.model import Others, ParallelModel
from engine.parallel.place import Grid, check_degrees
from engine.parallel.process_ranks import ProcessRanks
from engine.parallel.processes import PROGRAM, RankProcesses
from engine.request import ModelInfo


def grid_of(config: EngineConfig) -> Grid:
    """The ranks that are asked for."""
    return Grid(config.tensor_parallel, config.pipeline_parallel)


def check_parallel(config: EngineConfig, shape: DecoderShape, device: str, name: str) -> None:
    """Refuse what cannot be shared by several processes, before any weights are read.

    Args:
        shape: of a model that our own decoder does.
        device: rank 0's, by kind and number.
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
    shape: DecoderShape,
    info: ModelInfo,
    *,
    progress: Progress | None = None,
    program: Sequence[str] = PROGRAM,
) -> ParallelModel:
    """Start the other ranks, load every part, and let them meet.

    Args:
        info: device, dtype and window are settled; filled in with what the model is.
        program: what each other rank runs.
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
            check_close(actual, expected, dtype=info.dtype, is_fp8=part.is_fp8, device=info.device)
        return ParallelModel(part, others, info, layout, settled, free_bytes)
    except BaseException:
        others.close()
        raise


def _start(
    config: EngineConfig, folder: Path, shape: DecoderShape, grid: Grid, program: Sequence[str]
) -> Others:
    kind, _, first = config.device.partition(":")
    starts = []
    for rank in range(1, grid.num_ranks):
        device = f"{kind}:{int(first) + rank}" if first else kind
        own = dataclasses.replace(config, device=device)
        starts.append(Start(own, str(folder), shape, rank))
    ranks = ProcessRanks(grid, 0, config.device, config.rank_timeout_s)
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
    """Of each rank: where nobody chose, ranks on CPU share its cores, or they stall one another."""
    if config.num_threads or torch.device(device).type != "cpu":
        return config.num_threads
    return max(1, (os.cpu_count() or 1) // grid.num_ranks)
