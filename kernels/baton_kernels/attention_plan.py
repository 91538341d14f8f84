"""Launch plans of decode and tree attention: how the work is cut into programs, and the workspace
and counters of a launch.

A plan depends on shapes alone: measuring at run time would make results differ between workers and
runs. The tables were measured on an H100 (`python -m benchmarks.kernels attention`). Knows no
kernel.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass

import torch

from baton_kernels.block_rows import BlockRows

LOG2_E = 1.4426950408889634

SPLIT_POSITIONS = 512
TILE_POSITIONS = 64
EXACT_ROWS = 64
EXACT_WARPS = 4
"""Exact kernels cut positions into splits of SPLIT_POSITIONS and compute tiles of [EXACT_ROWS,
TILE_POSITIONS] scores with EXACT_WARPS warps (paged_walk_triton.py)."""

MAX_PART_BYTES = 256 << 20
"""Most bytes of partial results of one launch; exact attention of longer sequences uses no
splits."""

_SERIAL_SHARE = 1.5
"""Programs per multiprocessor from which on exact sequences are not split: a partial result costs a
program more than its bytes."""

LONG_POSITIONS = 4096
SPAN_POSITIONS = 1024
"""Positions per split above which (LONG_POSITIONS) a long sequence is cut into more splits, and the
most positions of a split then (SPAN_POSITIONS). One program reads some 30 bytes a nanosecond, so
that one sequence far longer than the others would set the time of the launch (measured: a sequence
of 8192 positions beside 16 short ones cost 0.18 ms more in each layer). Short sequences are cut as
they would be without it."""

_MAX_LONG_PART_BYTES = 64 << 20
"""Most bytes of partial results of a launch whose splits are bounded by SPAN_POSITIONS."""

_MANY_ROWS = 64
"""Query rows per program where a sequence has more of them for a kv head (with a tree: more than
half as many): each program reads all keys and values of its split, so fewer rows per program mean
more reads."""

_LEAST_SHARED, _MOST_SHARED, _MOST_LONG_SHARED = 0.75, 2.0, 4.0
"""Pairs of sequence and kv head per multiprocessor between which a launch is cut into equal shares:
the least, the most, and the most where some sequence may be long. The least is the same for both,
so that a warm-up with short contexts compiles all kernels that are needed."""

_SHARES = 2
"""Programs per multiprocessor of a launch by equal shares: as many as fit with six tiles in flight.
(On an H200 a step with three programs of four tiles was 2 to 8 % slower, with four of three 1 %
slower to 2 % faster.)"""

_MAX_FUSED_NUMBERS = 2048
"""Most numbers of a partial result that the attention kernel merges; larger ones are merged by a
kernel of their own."""


@dataclass(frozen=True)
class Config:
    """Tile sizes and pipeline depth of an attention kernel; they decide speed and the order of
    sums."""

    block_m: int
    """Query rows per program."""
    block_n: int
    """Positions per tile."""
    num_warps: int
    num_stages: int
    """Number of tiles being loaded into shared memory at a time."""
    prefetch_positions: int = 128
    """Positions whose keys and values a program prefetches into L2 before it waits for the kernel
    ahead."""
    min_split_positions: int = 64
    """Fewest positions of a split that is not exact, or of a share: shorter ones would not pay for
    their merging."""
    merges_apart: bool = False
    """Whether partial results are merged by a separate kernel, however small they are."""


@dataclass(frozen=True)
class Tree:
    """Tensors that describe token trees when the query rows are tree nodes."""

    node_starts: torch.Tensor
    """Start of each sequence's nodes, [B + 1] int32: sequence b's nodes are query rows
    node_starts[b] to node_starts[b + 1]."""
    depths: torch.Tensor
    """Depth of each node below its root, [N] int32."""
    visible: torch.Tensor
    """Visibility mask, [N, W] uint8, rows dense: which nodes of its own sequence each node sees."""


@dataclass(frozen=True)
class Rotation:
    """Arguments that turn a fused QKV projection into queries, keys and values; the shapes are
    those of `layer_ops.rotate_and_write`."""

    cos_sin: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    norm_eps: float


class Workspace:
    """Counters that every launch finds at zero and leaves at zero. Launches that may run at the
    same time (on two streams) need one workspace each; a CUDA graph keeps the one it was captured
    with."""

    num_counters = 1 << 16

    def __init__(self, device: torch.device) -> None:
        self.counters = torch.zeros(self.num_counters, dtype=torch.int32, device=device)


_workspaces: dict[tuple[int, torch.device], Workspace] = {}


def own_workspace(device: torch.device) -> Workspace:
    """Return the calling thread's workspace on `device`, made at the first call. It is never freed,
    since CUDA graphs hold its address."""
    key = (threading.get_ident(), device)
    if key not in _workspaces:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("attention: run it once, eagerly, on this thread before capturing")
        _workspaces[key] = Workspace(device)
    return _workspaces[key]


@functools.cache
def num_sms(device: torch.device) -> int:
    """Return the number of streaming multiprocessors of `device`; 4 where Triton's interpreter is
    used instead of a GPU."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def config_for(
    rows: BlockRows,
    num_rows: int,
    dtype: torch.dtype,
    exact: bool,
    *,
    fills: bool = True,
    is_tree: bool = False,
) -> Config:
    """Choose tile sizes from shapes alone, never by measuring: results must not differ between
    workers or runs.

    Args:
        num_rows: query rows of a kv head in one sequence: query heads per kv head, times nodes.
        fills: whether there is more than one program for each multiprocessor without splitting.
            Otherwise each program has more shared memory for tiles in flight.
    """
    width = max(rows.k_head_dim, rows.v_head_dim) * dtype.itemsize // 2
    if dtype == torch.float32:  # its products use no matrix unit: small tiles
        return Config(16, TILE_POSITIONS if exact else 32, 4, 2)
    if exact:
        stages = 3 if width <= 128 else 2 if width <= 256 else 1
        return Config(EXACT_ROWS, TILE_POSITIONS, EXACT_WARPS if width <= 256 else 8, stages)
    if width <= 128 and num_rows > _MANY_ROWS // (2 if is_tree else 1) and not rows.dtype:
        return Config(_MANY_ROWS, 32, 4, 3)
    block_m = 16 if num_rows <= 16 else 32
    if width <= 128 and rows.dtype:
        return Config(block_m, 128, 4, 3)
    if width <= 128 and block_m == 16:
        return Config(block_m, 32, 2, 4 if fills else 6)
    return Config(block_m, 32, 4, 3)


def plan_splits(num_pairs: int, max_positions: int, min_split_positions: int, sms: int) -> int:
    """Return how many equal splits a sequence has, so that a launch of `num_pairs` unsplit programs
    comes to about two programs per multiprocessor. More than fit at a time would take a second
    wave."""
    wanted = max(1, round(2 * sms / num_pairs))
    return min(wanted, -(-max_positions // min_split_positions))


def suits_shares(num_pairs: int, is_long: bool, sms: int) -> bool:
    """Decide whether equal shares are faster than splits: they are where pairs of sequence and kv
    head do not fill the device evenly, by their number or since some sequence may be far longer.

    With fewer pairs, splits give as many programs as shares would; with more, programs that end
    early make room for others.
    """
    most = _MOST_LONG_SHARED if is_long else _MOST_SHARED
    return _LEAST_SHARED * sms <= num_pairs <= most * sms


def cut_long(num_equal: int, max_positions: int) -> tuple[int, int]:
    """Bound the splits where some sequence may be far longer than the others. Programs beyond a
    sequence's end exit at once. Returns: (most splits of a sequence, most positions of a split).

    Args:
        num_equal: splits of a sequence where all have the same length, as `plan_splits` returns.
    """
    if -(-max_positions // num_equal) <= LONG_POSITIONS:
        return num_equal, max_positions
    return max(num_equal, -(-max_positions // SPAN_POSITIONS)), SPAN_POSITIONS


@dataclass(frozen=True)
class Plan:
    """Grid, tile sizes and merge method of one attention launch."""

    config: Config
    num_programs: int
    """Number of programs of a launch by equal shares (attention_shares_triton.py), which needs no
    splits and no merge kernel; 0: a launch by splits."""
    num_lengths: int
    """Number of sequence lengths that each of these programs reads, a power of two, at least the
    number of sequences: the same for all launches of a model, so that one kernel is compiled."""
    num_m_blocks: int
    """Number of programs that share the query rows of a kv head."""
    num_pairs: int
    """Number of programs without splitting."""
    num_splits: int
    """Most splits of one sequence."""
    num_equal: int
    """Number of splits of a sequence, unless they would be longer than `max_split` or shorter than
    `min_split`."""
    min_split: int
    """Fewest positions of a split."""
    max_split: int
    """Most positions of a split, rounded up to whole tiles."""
    grid: tuple[int, int, int]
    is_serial: bool
    """Whether one program computes all exact splits of its sequence, one after the other."""
    merges: int
    """Merge method of partial results: 0: no splits; 1: in the attention kernel; 2: in a kernel of
    their own."""
    pitch: int
    """Rows of a partial result."""
    num_merged_rows: int
    """Rows of a partial result, rounded up to a power of two."""
    block_s: int
    """Number of partial results that are merged at a time."""
    tail_n: int
    """Positions per tile of an unquantized tail block."""
    d0: int
    """Key columns of the first tile, a power of two."""
    d1: int
    """Key columns of the second tile, padded to a power of two; 0: there is none."""
    dv_width: int
    """Value columns, padded to a power of two."""
    num_prefetched: int
    """Number of blocks that a program prefetches into L2, a power of two."""


def plan_launch(
    rows: BlockRows,
    block_tables: torch.Tensor,
    num_sequences: int,
    group: int,
    max_num_nodes: int,
    dtype: torch.dtype,
    *,
    window: int | None,
    exact: bool,
    is_tree: bool,
    has_tails: bool,
    config: Config | None,
    num_splits: int | None,
) -> Plan:
    """Plan one launch of `attention_triton.launch`, whose arguments these are; `group` is the
    number of query heads per kv head."""
    sms = num_sms(block_tables.device)
    max_positions = block_tables.shape[1] * rows.block_size
    is_shared = not (exact or is_tree or has_tails or window is not None or num_splits is not None)
    is_shared = is_shared and _can_be_shared(rows, num_sequences, group, config)
    if is_shared:
        num_pairs = num_sequences * rows.num_heads
        num_equal = plan_splits(num_pairs, max_positions, 1, sms)
        is_shared = suits_shares(num_pairs, max_positions > LONG_POSITIONS * num_equal, sms)
    fills = (num_sequences * rows.num_heads > sms or is_tree) and not is_shared
    config = config or config_for(
        rows, group * max_num_nodes, dtype, exact, fills=fills, is_tree=is_tree
    )
    num_m_blocks = -(-group * max_num_nodes // config.block_m)
    num_pairs = num_sequences * rows.num_heads * num_m_blocks
    is_serial = False
    pitch = config.block_m if is_tree else min(group, config.block_m)
    if exact:
        num_splits, min_split = -(-max_positions // SPLIT_POSITIONS), SPLIT_POSITIONS
        num_equal, max_split = num_splits, SPLIT_POSITIONS
        # The same bits: one program or several, that is a matter of filling the device, and of not
        # waiting for one sequence that is far longer than the others.
        fills = num_pairs >= _SERIAL_SHARE * sms
        fills = fills and max_positions <= LONG_POSITIONS
        is_large = _part_bytes(num_pairs, num_splits, pitch, rows) > MAX_PART_BYTES
        if (fills or is_large) and not is_tree and not has_tails:
            is_serial, num_splits = True, 1
    else:
        if window is not None:
            max_positions = min(max_positions, window + max_num_nodes + config.block_n)
        min_split = config.min_split_positions
        num_equal = num_splits or plan_splits(num_pairs, max_positions, min_split, sms)
        max_split = max_positions
        if num_splits is None:
            num_splits, max_split = cut_long(num_equal, max_positions)
            while (
                num_splits > 1
                and _part_bytes(num_pairs, num_splits, pitch, rows) > _MAX_LONG_PART_BYTES
            ):
                num_equal, max_split = -(-num_equal // 2), 2 * max_split
                num_splits = max(num_equal, -(-max_positions // max_split))
    d0, d1, dv_width = widths(rows)
    num_merged_rows = _power_of_two(pitch)
    merges_apart = (
        config.merges_apart
        or num_merged_rows * dv_width > _MAX_FUSED_NUMBERS
        or num_pairs > Workspace.num_counters
    )
    merged_at_a_time = 32 * config.num_warps * (128 if config.num_warps > 1 else 64)
    return Plan(
        config=config,
        num_programs=_SHARES * sms if is_shared else 0,
        num_lengths=_power_of_two(
            max(num_sequences, round(_MOST_LONG_SHARED * sms) // rows.num_heads)
        ),
        num_m_blocks=num_m_blocks,
        num_pairs=num_pairs,
        num_splits=num_splits,
        num_equal=num_equal,
        min_split=min_split,
        max_split=max_split,
        grid=(rows.num_heads * num_m_blocks, num_sequences, num_splits),
        is_serial=is_serial,
        merges=0 if num_splits == 1 else 2 if merges_apart else 1,
        pitch=pitch,
        num_merged_rows=num_merged_rows,
        block_s=max(1, min(16, merged_at_a_time // (num_merged_rows * dv_width))),
        tail_n=min(config.block_n, max(16, 1 << (rows.block_size - 1).bit_length())),
        d0=d0,
        d1=d1,
        dv_width=dv_width,
        num_prefetched=1 << (max(1, config.prefetch_positions // rows.block_size) - 1).bit_length(),
    )


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def _can_be_shared(rows: BlockRows, num_sequences: int, group: int, config: Config | None) -> bool:
    """Return whether a launch by equal shares is possible: one program must hold all query rows of
    a kv head and merge them itself."""
    _, _, dv_width = widths(rows)
    num_merged_rows = _power_of_two(group)
    return (
        group <= (config.block_m if config else 16)
        and not (config and config.merges_apart)
        and num_merged_rows * dv_width <= _MAX_FUSED_NUMBERS
        and num_sequences * rows.num_heads <= Workspace.num_counters
    )


def _part_bytes(num_pairs: int, num_splits: int, pitch: int, rows: BlockRows) -> int:
    return 4 * num_pairs * num_splits * pitch * rows.v_head_dim


def widths(rows: BlockRows) -> tuple[int, int, int]:
    """Return the padded column counts of a tile of keys, of a second tile for the rest (0: none),
    and of a tile of values."""
    dim = rows.k_head_dim
    d0 = max(16, 1 << (dim.bit_length() - 1))
    d1 = max(16, 1 << (dim - d0 - 1).bit_length()) if dim > d0 else 0
    return d0, d1, max(16, 1 << (rows.v_head_dim - 1).bit_length())


def steps(matrices: torch.Tensor, rows: BlockRows) -> tuple[int, int]:
    """Return the distance in elements from one block to the next, and from one head to the next."""
    row_stride = matrices.stride(0)
    return rows.rows_per_block * row_stride, rows.head_step * row_stride


def quantization(rows: BlockRows) -> int:
    """Return the QUANT constant of the kernels: 0 not quantized, 1 int8, 2 e4m3, 3 and 4 the same
    with conversion by PTX, which Triton's interpreter does not know."""
    if not rows.dtype:
        return 0
    import triton

    return (1 if rows.dtype == "int8" else 2) + (0 if triton.knobs.runtime.interpret else 2)
