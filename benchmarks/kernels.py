"""Kernels of baton_kernels on one CUDA device: microseconds of a launch, and its share of a ceiling
of the same run (a large copy, a large read, a large product), beside the library where it has one.

Figures are medians of CUDA graphs of many launches. Each launch gets the next of several sets of
buffers, so that nothing is timed from a cache that would not hold it in a model.

    python -m benchmarks.kernels linear
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import click
import torch
from baton_kernels import block_checksums as block_checksums_op
from baton_kernels import layer_ops, logit_ops
from baton_kernels import prefill_attention as prefill_op
from baton_kernels.attention import (
    decode_attention,
    decode_attention_reference,
    rotate_and_attend,
    tree_attention,
)
from baton_kernels.block_rows import BlockRows, Tails
from baton_kernels.fp8_linear import Fp8Weight, fp8_linear
from baton_kernels.kv_quantization import quantize
from baton_kernels.linear import HalfNorm
from baton_kernels.linear import linear as linear_op
from baton_kernels.lora import add_lora, group_rows
from baton_kernels.sampling import DrawnTokens, Needs, SamplingRows, draw_tokens_reference

from benchmarks import harness
from benchmarks.harness import Several, attempt, graph_s, num_sets, stream_s

BLOCK = 16
DIM = 128
BF16 = torch.bfloat16


def relative_error(out: torch.Tensor, truth: torch.Tensor) -> float:
    """Norm of the difference of two tensors by the norm of the true one."""
    return float((out.double() - truth.double()).norm() / truth.double().norm())


def rate(seconds: float, num_bytes: float, ceiling_gb_per_s: float) -> dict[str, Any]:
    """Columns of a table for a launch that moves bytes."""
    gb_per_s = num_bytes / seconds / 1e9
    return {
        "us": round(seconds * 1e6, 2),
        "GB/s": round(gb_per_s),
        "of ceiling": f"{gb_per_s / ceiling_gb_per_s:.0%}",
    }


def flop_rate(seconds: float, flop: float, ceiling_tflop_per_s: float) -> dict[str, Any]:
    """Columns of a table for a launch that multiplies."""
    tflop_per_s = flop / seconds / 1e12
    return {
        "us": round(seconds * 1e6, 1),
        "TFLOP/s": round(tflop_per_s),
        "of ceiling": f"{tflop_per_s / ceiling_tflop_per_s:.0%}",
    }


def _begin() -> dict[str, float]:
    """Check that there is a CUDA device, and measure its ceilings. Raises: click.UsageError without
    one. Returns: the ceilings."""
    harness.needs_cuda()
    torch.manual_seed(0)
    return harness.device_ceilings()


def _end(title: str, ceilings: dict[str, float], rows: list[dict[str, Any]]) -> dict[str, Any]:
    harness.show(f"{title}: {ceilings}", rows)
    return {**harness.device_context(), "ceilings": ceilings, "rows": rows}


# -- attention of decodes and of token trees


@dataclass(frozen=True)
class Attention:
    """One shape of one attention operation over the paged cache."""

    name: str
    batch: int
    context: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    v_head_dim: int = 128
    dtype: str = ""
    scales: int = 1
    is_latent: bool = False
    num_nodes: int = 0
    """Number of tokens of the tree of each sequence; 0: decode."""
    exact: bool = False
    rotates: bool = False
    """Whether the launch rotates queries and keys, and writes keys and values, too."""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def bytes_per_layer(self) -> int:
        numbers = self.head_dim + (0 if self.is_latent else self.v_head_dim)
        per_position = numbers * (1 if self.dtype else 2)
        if self.dtype:
            per_position += 8 if self.scales > 1 else 8 // BLOCK
        return self.batch * self.context * self.num_kv_heads * per_position


def _attention_cases() -> Iterator[Attention]:
    for batch in (1, 8, 64, 256):
        yield Attention("8B", batch, 1024)
        yield Attention("0.6B", batch, 1024, num_heads=16)
        yield Attention("8B rotated", batch, 1024, rotates=True)
    for batch in (1, 8):
        yield Attention("0.6B rotated", batch, 1024, num_heads=16, rotates=True)
        yield Attention("8B exact", 8 * batch, 1024, exact=True)
    yield Attention("8B int8/block", 64, 1024, dtype="int8")
    yield Attention("8B fp8/token", 64, 1024, dtype="fp8_e4m3", scales=BLOCK)
    mla = Attention("MLA", 1, 4096, 16, 1, 576, 512, is_latent=True)
    yield from (mla, replace(mla, batch=64, context=1024))
    yield Attention("8B tree 32", 1, 1024, num_nodes=32)
    yield Attention("8B tree 8", 16, 1024, num_nodes=8)


def _attention_sweep() -> Iterator[Attention]:
    """Other configurations than `attention_plan.py` chooses."""
    from baton_kernels.attention_plan import Config

    for shape in ((16, 32, 2, 4), (16, 16, 1, 5), (4, 16, 1, 5), (16, 16, 2, 5), (8, 32, 2, 4)):
        for batch, splits in ((1, (8, 16)), (8, (4, 8)), (64, (1,))):
            for num_splits in splits:
                options = {"config": Config(*shape), "num_splits": num_splits}
                yield Attention("8B", batch, 1024, options=options)
    for shape in ((32, 32, 2, 3), (32, 16, 2, 4), (32, 16, 1, 4)):
        yield Attention("8B tree 32", 1, 1024, num_nodes=32, options={"config": Config(*shape)})


@dataclass(frozen=True)
class Prepared:
    """The inputs of a case on the device."""

    launch: Callable[[int], object]
    layers: list[BlockRows]
    tables: torch.Tensor
    ends: torch.Tensor
    query: torch.Tensor
    out: torch.Tensor
    tails: Tails | None
    common: dict[str, Any]


def _prepare(one: Attention, num_layers: int) -> Prepared:
    blocks_each = -(-(one.context + one.num_nodes) // BLOCK)
    num_blocks = one.batch * blocks_each
    tables = torch.randperm(num_blocks, device="cuda").int().view(one.batch, blocks_each)
    ends = torch.full((one.batch,), one.context, dtype=torch.int32, device="cuda")
    layers = _cache(one, num_blocks, num_layers)
    num_rows = one.batch * max(1, one.num_nodes)
    query = torch.randn(num_rows, one.num_heads, one.head_dim, device="cuda").bfloat16()
    out = query.new_full((num_rows, one.num_heads, one.v_head_dim), float("nan"))
    common: dict[str, Any] = {"scaling": one.head_dim**-0.5}
    given: dict[str, Any] = {"out": out, "exact": one.exact} | common | one.options
    tails = None
    if one.num_nodes:
        tree = _chains(one, num_rows)

        def launch(layer: int) -> object:
            return tree_attention(
                query, layers[layer], tables, ends, *tree, max_num_nodes=one.num_nodes, **given
            )
    elif one.rotates:
        num_all = one.num_heads + 2 * one.num_kv_heads
        qkv = torch.randn(one.batch, num_all * one.head_dim, device="cuda").bfloat16()
        angles = torch.randn(one.context, one.head_dim // 2, device="cuda")
        cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
        positions = ends - 1
        query = layer_ops.rotate_reference(qkv, positions, cos_sin, num_heads=one.num_heads)[0]

        def launch(layer: int) -> object:
            return rotate_and_attend(
                qkv, positions, cos_sin, layers[layer], tables, num_heads=one.num_heads, **given
            )
    else:
        if one.dtype:
            tails = Tails(_raw_rows(one), torch.arange(one.batch, device="cuda").int())

        def launch(layer: int) -> object:
            return decode_attention(query, layers[layer], tables, ends, tails=tails, **given)

    return Prepared(launch, layers, tables, ends, query, out, tails, common)


def _measure_attention(one: Attention, copy_gb_per_s: float) -> dict[str, Any]:
    # Keys and values that a graph reads before it reads the same again: five times the L2.
    num_layers = max(2, min(32, math.ceil((256 << 20) / one.bytes_per_layer)))
    its = _prepare(one, num_layers)
    count = max(20, num_layers)
    seconds = graph_s(lambda index: its.launch(index % num_layers), count)
    its.out.fill_(float("nan"))
    its.launch(0)
    error = _attention_error(one, its)
    found = rate(seconds, one.bytes_per_layer, copy_gb_per_s)
    said = " ".join(str(value) for value in one.options.values())
    return found | {"error": error, "options": said}


def _attention_error(one: Attention, its: Prepared) -> float:
    """Relative error of attention against float64. A node of a chain is the newest token of a
    sequence that ends with it."""
    if nodes := one.num_nodes:
        ends = its.ends[:1] + 1 + torch.arange(nodes, device="cuda").int()
        truth = decode_attention_reference(
            its.query[:nodes].double(), _double(its.layers[0]), its.tables[:1].expand(nodes, -1),
            ends, **its.common,
        )  # fmt: skip
        return relative_error(its.out[:nodes], truth)
    few = slice(0, min(4, one.batch))
    tails = None if its.tails is None else Tails(_double(its.tails.rows), its.tails.slots[few])
    truth = decode_attention_reference(
        its.query[few].double(), _double(its.layers[0]), its.tables[few], its.ends[few],
        tails=tails, **its.common,
    )  # fmt: skip
    return relative_error(its.out[few], truth)


def _chains(one: Attention, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Every sequence's nodes one after the other: causal, so that truth is easily had."""
    nodes = one.num_nodes
    starts = torch.arange(0, num_rows + 1, nodes, device="cuda").int()
    depths = torch.arange(nodes, device="cuda").int().repeat(one.batch)
    visible = torch.ones(nodes, nodes, device="cuda").tril().bool().repeat(one.batch, 1)
    return starts, depths, visible


def _cache(one: Attention, num_blocks: int, num_layers: int) -> list[BlockRows]:
    """A cache as the engine lays it out: [blocks, kv heads, layers, keys and values, P, D]."""
    dims = [one.head_dim] if one.is_latent else [one.head_dim, one.v_head_dim]
    count = num_blocks * one.num_kv_heads * num_layers
    rows_per_block, views, scales = one.num_kv_heads * num_layers, [], []
    for dim in dims:
        numbers = torch.randn(count, BLOCK, dim, device="cuda", dtype=BF16)
        if one.dtype:
            pieces: Any = numbers.split(4096)  # type: ignore[no-untyped-call]
            parts = [quantize(part, one.dtype, one.scales, None) for part in pieces]
            scales.append(torch.cat([part[1] for part in parts]))
            numbers = torch.cat([part[0] for part in parts])
        views.append(numbers)
    return [
        BlockRows(
            keys=views[0][layer:],
            values=None if one.is_latent else views[1][layer:],
            v_head_dim=one.v_head_dim,
            num_heads=one.num_kv_heads,
            rows_per_block=rows_per_block,
            head_step=num_layers,
            k_scales=scales[0][layer:] if one.dtype else None,
            v_scales=scales[-1][layer:] if one.dtype else None,
            dtype=one.dtype,
        )
        for layer in range(num_layers)
    ]


def _raw_rows(one: Attention) -> BlockRows:
    """Tails: one slot per sequence."""
    count = one.batch * one.num_kv_heads
    keys, values = (
        torch.randn(count, BLOCK, dim, device="cuda", dtype=BF16)
        for dim in (one.head_dim, one.v_head_dim)
    )
    return BlockRows(keys, values, one.v_head_dim, one.num_kv_heads, one.num_kv_heads, 1)


def _double(rows: BlockRows) -> BlockRows:
    """The same tensor in float64; a quantized cache is read as it is."""
    if rows.dtype:
        return rows
    values = None if rows.values is None else rows.values.double()
    return replace(rows, keys=rows.keys.double(), values=values)


@harness.case
@click.option("--sweep", is_flag=True, help="other configurations, too")
def attention(sweep: bool) -> dict[str, Any]:
    """Attention of decodes and token trees over the paged cache; ceiling: a large copy.

    `error` is relative to float64.
    """
    ceilings = _begin()
    cases = [*_attention_cases(), *(_attention_sweep() if sweep else ())]
    rows = [
        attempt(
            f"{one.name} b{one.batch} c{one.context}",
            _measure_attention,
            one,
            ceilings["copy_gb_per_s"],
        )
        for one in cases
    ]
    return _end("attention", ceilings, rows)


# -- attention of prompts

ATEN = torch.ops.aten
"""torch's own operators, below its functions: these have no choice of their own, and give the
softmax's sums."""

PROMPTS: dict[str, list[tuple[int, int]]] = {
    "1x8192": [(0, 8192)],
    "4x2048": [(0, 2048)] * 4,
    "16x2048": [(0, 2048)] * 16,
    "1x2048": [(0, 2048)],
    "8x1024": [(0, 1024)] * 8,
    "1x2048 after 6144": [(6144, 2048)],
    "1x512 after 7680": [(7680, 512)],
    "ragged 900..4000": [(0, 900), (0, 1500), (0, 3000), (0, 4000), (512, 1024)],
}
"""Steps with prompts: (cached tokens, new tokens) of each sequence of a step."""

VERSIONS = ("auto", "triton", "exact", "cudnn", "flash")


class PromptStep:
    """The attention of a step with prompts over one layer of a two-layer cache, blocks in random
    order."""

    def __init__(self, spans: list[tuple[int, int]], num_heads: int, num_kv_heads: int) -> None:
        self.spans, self.num_heads = spans, num_heads
        each = [-(-(start + count) // BLOCK) for start, count in spans]
        num_blocks = sum(each)
        cache = torch.randn(num_blocks * num_kv_heads, 4, BLOCK, DIM, device="cuda", dtype=BF16)
        self.rows = BlockRows(cache[:, 2], cache[:, 3], DIM, num_kv_heads, num_kv_heads, 1)
        order = torch.randperm(num_blocks, device="cuda").to(torch.int32)
        self.tables = torch.zeros(len(each), max(each), dtype=torch.int32, device="cuda")
        for index, count in enumerate(each):
            self.tables[index, :count], order = order[:count], order[count:]
        self.key, self.value = self._dense(is_new=True)
        self.query = torch.randn(len(self.key), num_heads, DIM, device="cuda", dtype=BF16)
        self.out = torch.empty_like(self.query)
        self.firsts = [0, *itertools.accumulate(count for _, count in spans)]
        int32: dict[str, Any] = {"dtype": torch.int32, "device": "cuda"}
        self.query_starts = torch.tensor(self.firsts, **int32)
        self.starts = torch.tensor([start for start, _ in spans], **int32)
        ends = [start + count for start, count in spans]
        self.all_firsts = torch.tensor([0, *itertools.accumulate(ends)], **int32)
        self.longest, self.end = max(count for _, count in spans), max(ends)
        self.all_key, self.all_value = self._dense(is_new=False)

    @property
    def flop(self) -> float:
        """Operations of the products that causality asks for, no more."""
        pairs = sum(count * start + count * (count + 1) // 2 for start, count in self.spans)
        return 4.0 * self.num_heads * DIM * pairs

    def _dense(self, *, is_new: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values side by side, of the new tokens or of all."""
        keys, values = [], []
        for index, (start, count) in enumerate(self.spans):
            k, v = prefill_op.sequence_rows(self.rows, self.tables[index], start + count)
            first = start if is_new else 0
            keys.append(k[:, first:].transpose(0, 1))
            values.append(v[:, first:].transpose(0, 1))
        return torch.cat(keys).contiguous(), torch.cat(values).contiguous()

    def auto(self, *, exact: bool = False) -> torch.Tensor:
        return prefill_op.prefill_attention(
            self.query, self.rows, self.tables, self.query_starts, self.starts,
            max_query_len=self.longest, max_end=self.end, scaling=DIM**-0.5, out=self.out,
            exact=exact,
        )  # fmt: skip

    def exact(self) -> torch.Tensor:
        return self.auto(exact=True)

    def triton(self) -> torch.Tensor:
        """Run our Triton kernel on the step."""
        from baton_kernels import prefill_attention_triton

        prefill_attention_triton.prefill_attention(
            self.query, self.rows, self.tables, self.query_starts, self.starts, self.longest,
            DIM**-0.5, None, None, None, self.out,
        )  # fmt: skip
        return self.out

    def cudnn(self) -> torch.Tensor:
        """Run cuDNN's attention: one call for all sequences, which must be equally long and without
        cached tokens."""
        if len(set(self.spans)) > 1 or self.spans[0][0] > 0:
            raise ValueError("not equal and fresh")
        q, k, v = (
            x.view(len(self.spans), -1, *x.shape[1:]).transpose(1, 2)
            for x in (self.query, self.key, self.value)
        )
        out: torch.Tensor = ATEN._scaled_dot_product_cudnn_attention(  # noqa: SLF001
            q, k, v, None, False, 0.0, True, False, scale=DIM**-0.5
        )[0]
        return out.transpose(1, 2).reshape(self.query.shape)

    def flash(self) -> torch.Tensor:
        """Run Flash-Attention 2 through torch."""
        out: torch.Tensor = ATEN._flash_attention_forward(  # noqa: SLF001
            self.query, self.all_key, self.all_value, self.query_starts, self.all_firsts,
            self.longest, self.end, 0.0, True, False, scale=DIM**-0.5,
        )[0]  # fmt: skip
        return out

    def error(self, out: torch.Tensor) -> float:
        """Relative error against float32, of the last tokens of the first and the last sequence."""
        found, truth = [], []
        for index in (0, len(self.spans) - 1):
            start, count = self.spans[index]
            some = min(count, 64)
            last = slice(self.firsts[index + 1] - some, self.firsts[index + 1])
            k, v = prefill_op.sequence_rows(self.rows, self.tables[index], start + count)
            found.append(out[last])
            truth.append(
                prefill_op.prefill_attention_reference(
                    self.query[last].float(), k.float(), v.float(), start + count - some, DIM**-0.5
                )
            )
        return relative_error(torch.cat(found), torch.cat(truth))

    def timed(self, run: Callable[[], torch.Tensor], tflop_per_s: float) -> dict[str, Any]:
        self.out.fill_(float("nan"))
        error = self.error(run())
        return flop_rate(stream_s(lambda _: run(), 5), self.flop, tflop_per_s) | {"error": error}


@harness.case
@click.option("--versions", type=Several(click.Choice(VERSIONS)), default=",".join(VERSIONS))
def prefill_attention(versions: Sequence[str]) -> dict[str, Any]:
    """Attention of prompts over the paged cache: ours, cuDNN's and Flash-Attention 2 through torch
    over dense keys; ceiling: a large product."""
    ceilings = _begin()
    rows = []
    for (num_heads, num_kv_heads), name in itertools.product(((32, 8), (16, 8)), PROMPTS):
        step = PromptStep(PROMPTS[name], num_heads, num_kv_heads)
        for version in versions:
            case, run = f"{num_heads} heads, {name}, {version}", getattr(step, version)
            rows.append(attempt(case, step.timed, run, ceilings["matmul_tflop_per_s"]))
    return _end("prefill attention", ceilings, rows)


# -- norms, SwiGLU, rotation

SHAPES = {"8B": (4096, 14336, 32, 8, False), "0.6B": (1024, 3072, 16, 8, True)}
"""Shapes of models: hidden size, intermediate size, query heads, kv heads, QK-norm. Heads have 128
elements."""


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(BF16)


def _rotation(name: str, num_tokens: int, ceiling: float) -> dict[str, Any]:
    """Sequences at random places (a decode), or one prompt where there are more than 256 tokens."""
    from baton_kernels import layer_ops_triton

    is_prompt = num_tokens > 256
    _, _, heads, kv_heads, has_norms = SHAPES[name]
    width = (heads + 2 * kv_heads) * DIM
    sets = num_sets(2 * num_tokens * width * 2)
    num_blocks = max(2048, num_tokens // BLOCK + 1)
    keys = _randn(num_blocks * kv_heads * 2, BLOCK, DIM)
    rows = BlockRows(keys[:-1], keys[1:], DIM, kv_heads, kv_heads * 2, 2)
    qkv = [_randn(num_tokens, width) for _ in range(sets)]
    out_q = torch.empty(num_tokens, heads, DIM, device="cuda", dtype=BF16)
    count = num_tokens if is_prompt else 64 * BLOCK
    angles = torch.randn(max(count, 1024), DIM // 2, device="cuda")
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1).contiguous()
    int32: dict[str, Any] = {"dtype": torch.int32, "device": "cuda"}
    ids, kv = None, list[torch.Tensor | None]((None, None))
    if is_prompt:
        positions = torch.arange(num_tokens, **int32)
        ids = torch.zeros(num_tokens, **int32)
        tables = torch.randperm(num_blocks, device="cuda").to(torch.int32)[None]
        kv = [torch.empty(num_tokens, kv_heads, DIM, device="cuda", dtype=BF16) for _ in range(2)]
    else:
        positions = torch.randint(0, 64 * BLOCK, (num_tokens,), **int32)
        picked = torch.randperm(num_blocks, device="cuda")[: 64 * min(num_tokens, 32)]
        tables = picked.to(torch.int32).view(-1, 64).repeat(-(-num_tokens // 32), 1)
        tables = tables[:num_tokens].contiguous()
    norms = (_randn(DIM), _randn(DIM)) if has_norms else (None, None)
    num_bytes = 2 * qkv[0].nbytes + (2 * kv[0].nbytes if kv[0] is not None else 0)

    def launch(index: int) -> None:
        layer_ops_triton.rotate_and_write(
            qkv[index % sets], positions, cos_sin, rows, tables, ids, None, norms[0], norms[1],
            1e-6, out_q, kv[0], kv[1],
        )  # fmt: skip

    seconds = graph_s(launch)
    truth = layer_ops.rotate_reference(
        qkv[39 % sets].double(), positions, cos_sin, num_heads=heads, q_norm=norms[0],
        k_norm=norms[1],
    )[0]  # fmt: skip
    return rate(seconds, num_bytes, ceiling) | {"error": relative_error(out_q, truth)}


def _norm(hidden: int, num_tokens: int, ceiling: float) -> dict[str, Any]:
    from baton_kernels import layer_ops_triton

    sets = num_sets(4 * num_tokens * hidden * 2)
    x = [_randn(num_tokens, hidden) for _ in range(sets)]
    weight, out = _randn(hidden), [torch.empty_like(x[0]) for _ in range(sets)]

    def launch(index: int) -> None:
        layer_ops_triton.rms_norm(x[index % sets], weight, 1e-5, out[index % sets])

    return rate(graph_s(launch), 2 * x[0].nbytes, ceiling)


def _silu_mul(width: int, num_tokens: int, ceiling: float) -> dict[str, Any]:
    from baton_kernels import layer_ops_triton

    sets = num_sets(3 * num_tokens * width * 2)
    gate_up = [_randn(num_tokens, 2 * width) for _ in range(sets)]
    out = [gate_up[0].new_empty(num_tokens, width) for _ in range(sets)]
    seconds = graph_s(
        lambda index: layer_ops_triton.silu_mul(gate_up[index % sets], out[index % sets])
    )
    return rate(seconds, 3 * out[0].nbytes, ceiling)


@harness.case
def layers() -> dict[str, Any]:
    """Norms, SwiGLU and rotate-and-write; ceiling: a large copy."""
    ceilings = _begin()
    copy = ceilings["copy_gb_per_s"]
    rows = []
    for (name, (hidden, width, *_)), count in itertools.product(
        SHAPES.items(), (1, 8, 64, 256, 2048, 8192)
    ):
        for what, run in (
            ("rms_norm", partial(_norm, hidden, count, copy)),
            ("silu_mul", partial(_silu_mul, width, count, copy)),
            ("rotate_and_write", partial(_rotation, name, count, copy)),
        ):
            rows.append(attempt(f"{what} {name} T={count}", run))
    return _end("layers", ceilings, rows)


# -- products of few rows: the chain of linear layers that a decode step runs


@dataclass(frozen=True)
class Linear:
    """One linear layer of a model."""

    name: str
    width: int
    depth: int
    is_gated: bool = False
    has_norm: bool = False
    has_residual: bool = False

    @property
    def weight_shape(self) -> tuple[int, int]:
        return self.width * (2 if self.is_gated else 1), self.depth

    @property
    def num_bytes(self) -> int:
        return 2 * self.weight_shape[0] * self.depth

    def extras(self, norm: torch.Tensor, residual: torch.Tensor) -> dict[str, Any]:
        """Parts that a decoder fuses into this layer, such as a norm."""
        return {
            "residual": residual if self.has_residual else None,
            "norm_weight": norm if self.has_norm else None,
            "activation": "silu_mul" if self.is_gated else None,
        }


def _model(hidden: int, qkv: int, attended: int, inner: int, vocab: int) -> list[Linear]:
    return [
        Linear("qkv", qkv, hidden, has_norm=True),
        Linear("o", hidden, attended, has_residual=True),
        Linear("gate_up", inner, hidden, is_gated=True, has_norm=True),
        Linear("down", hidden, inner, has_residual=True),
        Linear("head", vocab, hidden, has_norm=True),
    ]


MODELS = {
    "8B": (32, _model(4096, 6144, 4096, 14336, 128256)),
    "0.6B": (28, _model(1024, 4096, 2048, 3072, 151936)),
}


class Pool:
    """Random weights, far more than the L2 cache holds, handed out one after another, round and
    round."""

    def __init__(self, num_bytes: int) -> None:
        self.numbers = torch.empty(num_bytes // 2, dtype=BF16, device="cuda")
        for part in self.numbers.split(1 << 28):  # type: ignore[no-untyped-call]
            part.normal_(std=0.02)
        self._next = 0

    def take(self, height: int, depth: int) -> torch.Tensor:
        size = height * depth
        if self._next + size > self.numbers.numel():
            self._next = 0
        first = self._next
        self._next += size
        return self.numbers[first : first + size].view(height, depth)


def _step_s(
    pool: Pool,
    model: str,
    num_rows: int,
    run: Callable[..., torch.Tensor],
    only: Linear | None = None,
) -> tuple[float, int]:
    """Time of all linear layers of a step, or of one of every layer: (seconds, bytes of
    weights)."""
    num_layers, shapes = MODELS[model]
    stack = [shape for _ in range(num_layers) for shape in shapes[:-1]] + [shapes[-1]]
    if only is not None:
        stack = [shape for shape in stack if shape == only]
    weights = [pool.take(*shape.weight_shape) for shape in stack]
    inputs = {s.depth: torch.randn(num_rows, s.depth, device="cuda").bfloat16() for s in shapes}
    norms = {depth: torch.rand(depth, device="cuda").bfloat16() for depth in inputs}
    outs = {s.name: torch.randn(num_rows, s.width, device="cuda").bfloat16() for s in shapes}

    def chain(_: int) -> None:
        for shape, weight in zip(stack, weights, strict=True):
            run(
                inputs[shape.depth],
                weight,
                out=outs[shape.name],
                **shape.extras(norms[shape.depth], outs[shape.name]),
            )

    return graph_s(chain, 1, 3), sum(shape.num_bytes for shape in stack)


def _library(x: torch.Tensor, weight: torch.Tensor, **_: Any) -> torch.Tensor:
    """The library's product alone, nothing around it."""
    return torch.mm(x, weight.t())


@dataclass(frozen=True)
class Way:
    """A way to compute a linear layer: a tile (None: the library's product), with its norm in the
    launch."""

    tile: Any
    fuses_norm: bool = False


class Chain:
    """Some layers of one decode step, norms half done between products where tiles can, each launch
    with a way that can be replaced.

    A launch alone, or many equal ones, would mislead: between its like a kernel fills its
    neighbour's gaps as it never does between others.
    """

    def __init__(self, pool: Pool, model: str, num_rows: int, num_layers: int) -> None:
        self.shapes = MODELS[model][1][:-1]
        self.num_layers, self._num_rows = num_layers, num_rows
        self._weights = {
            shape: [pool.take(*shape.weight_shape) for _ in range(num_layers)]
            for shape in self.shapes
        }
        rows = {s: (torch.randn(num_rows, s.depth, device="cuda").bfloat16()) for s in self.shapes}
        self._inputs = rows
        self._norms = {s: torch.rand(s.depth, device="cuda").bfloat16() for s in self.shapes}
        self._outs = {
            s: torch.randn(num_rows, s.width, device="cuda").bfloat16() for s in self.shapes
        }

    def default_way(self, shape: Linear) -> Way:
        """The way that `linear` of baton_kernels takes for a layer."""
        from baton_kernels.linear_tiles import Product, choose_tile, takes_norm

        product = Product(self._num_rows, shape.weight_shape[0], shape.depth, 2, shape.is_gated)
        tile = choose_tile(product, exact=False, forced=False)
        if tile is None or self._num_rows > 1 or not shape.has_norm:
            return Way(tile)
        return Way(tile, fuses_norm=takes_norm(tile, product))

    def _halves(self, ways: dict[Linear, Way]) -> dict[Linear, HalfNorm]:
        """By the layer that takes it: o's result is gate_up's input, down's is the next qkv's."""
        qkv, o, gate_up, down = self.shapes
        halves = {}
        for maker, taker in ((o, gate_up), (down, qkv)):
            first, second = ways[maker].tile, ways[taker].tile
            if first is None or second is None or first.is_row or second.is_row:
                continue
            scaled = torch.zeros_like(self._outs[maker])
            runs = -(-maker.width // first.block_n)
            squares = torch.ones(runs, self._num_rows, device="cuda")
            halves[taker] = HalfNorm(self._norms[taker], 1e-6, scaled, squares)
        return halves

    def seconds(self, replaced: Linear | None, way: Way | None, *, halves: bool = True) -> float:
        """Seconds of one layer, with `replaced` done that way, the others as `linear` does them."""
        ways = {shape: self.default_way(shape) for shape in self.shapes}
        if replaced is not None and way is not None:
            ways[replaced] = way
        takes = self._halves(ways) if halves else {}
        qkv, o, gate_up, down = self.shapes
        leaves = {o: takes.get(gate_up), down: takes.get(qkv)}

        def chain(_: int) -> None:
            for index in range(self.num_layers):
                for shape in self.shapes:
                    x, out, norm = self._inputs[shape], self._outs[shape], self._norms[shape]
                    _launch(
                        x, self._weights[shape][index], out, norm, shape, ways[shape],
                        takes.get(shape), leaves.get(shape),
                    )  # fmt: skip

        return graph_s(chain, 1, 5) / self.num_layers

    def row(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        """The figure of `seconds` as a row of a table."""
        return {"us a layer": self.seconds(*arguments, **options) * 1e6}


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    norm: torch.Tensor,
    shape: Linear,
    way: Way,
    half_norm: HalfNorm | None,
    leaves: HalfNorm | None,
) -> None:
    from baton_kernels import linear_triton

    if shape.has_norm and not way.fuses_norm and half_norm is None:
        x = layer_ops.rms_norm(x, norm, 1e-6)
    if way.tile is not None:
        linear_triton.launch(
            x,
            weight,
            out,
            way.tile,
            residual=out if shape.has_residual else None,
            norm_weight=norm if shape.has_norm and way.fuses_norm else None,
            norm_eps=1e-6,
            half_norm=half_norm,
            leaves=leaves,
            is_gated=shape.is_gated,
        )
    elif shape.is_gated:
        layer_ops.silu_mul(torch.mm(x, weight.t()), out=out)
    elif shape.has_residual:
        torch.addmm(out, x, weight.t(), out=out)
    else:
        torch.mm(x, weight.t(), out=out)


@harness.case
def linear() -> dict[str, Any]:
    """Linear layers of few rows in the chain of a decode step: ours, exact, and the library's
    products alone; one layer by part; fp8 weights; rows with adapters. Ceiling: a large read."""
    ceilings = _begin()
    read, rows = ceilings["read_gb_per_s"], []
    pool = Pool(17_000_000_000)

    def step(model: str, num_rows: int, run: Any, only: Linear | None = None) -> dict[str, Any]:
        seconds, num_bytes = _step_s(pool, model, num_rows, run, only)
        per_layer = {} if only is None else {"us a layer": seconds / MODELS[model][0] * 1e6}
        return rate(seconds, num_bytes, read) | per_layer

    ours = {"ours": linear_op, "exact": partial(linear_op, exact=True), "library": _library}
    for model, num_rows in itertools.product(MODELS, (1, 2, 4, 8, 16, 32, 64, 128, 256, 2048)):
        for name, run in ours.items():
            case = f"step {model} M={num_rows} {name}"
            rows.append(attempt(case, step, model, num_rows, run))
    for model, num_rows in itertools.product(MODELS, (2, 8, 16, 32, 64)):
        chain = Chain(pool, model, num_rows, num_layers=16)
        for name, halves in (("norms half done", True), ("norms by themselves", False)):
            case = f"layer {model} M={num_rows} {name}"
            rows.append(attempt(case, chain.row, None, None, halves=halves))
    for model, num_rows in itertools.product(MODELS, (1, 8, 16, 32, 64)):
        for shape in MODELS[model][1][:-1]:
            case = f"{shape.name} {model} M={num_rows}"
            rows.append(attempt(case, step, model, num_rows, linear_op, shape))
    rows += _fp8_rows(pool, read)
    rows += _lora_rows(pool)
    return _end("linear", ceilings, rows)


def _fp8_rows(pool: Pool, read: float) -> Iterator[dict[str, Any]]:
    scales: dict[int, torch.Tensor] = {}

    def run_fp8(x: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
        one = scales.setdefault(weight.shape[0], torch.ones(weight.shape[0], device="cuda"))
        half = weight.reshape(-1)[: weight.numel() // 2]  # any bytes will do
        narrowed = half.view(torch.float8_e4m3fn).view(weight.shape)
        return fp8_linear(x, Fp8Weight(narrowed, one), **options)

    def row(num_rows: int) -> dict[str, Any]:
        seconds, num_bytes = _step_s(pool, "8B", num_rows, run_fp8)
        return rate(seconds, num_bytes / 2, read)

    for num_rows in (1, 8):
        yield attempt(f"step 8B M={num_rows} fp8", row, num_rows)


def _lora_rows(pool: Pool) -> Iterator[dict[str, Any]]:
    """Rows of the table for both launches of rows with four adapters of rank 16."""

    def row(num_rows: int, width: int, depth: int) -> dict[str, Any]:
        x, out = (pool.take(num_rows, length) for length in (depth, width))
        factors = [
            (pool.take(64, depth).view(4, 16, depth), pool.take(64, width).view(4, 16, width))
        ]
        factors += [(torch.randn_like(a), torch.randn_like(b)) for a, b in factors * 19]
        rows = group_rows([row % 4 for row in range(num_rows)], "cuda")

        def chain(_: int) -> None:
            for a, b in factors:
                add_lora(out, x, a, b, rows)

        return {"us": graph_s(chain, 1, 3) / len(factors) * 1e6}

    sizes = ((6144, 4096), (4096, 14336))
    for num_rows, (width, depth) in itertools.product((1, 8, 64, 512), sizes):
        case = f"adapters M={num_rows} {width}x{depth}"
        yield attempt(case, row, num_rows, width, depth)


def _ways(shape: Linear, num_rows: int) -> Iterator[Way]:
    """The tiles that are worth a try: enough programs for the device, no more shared memory than it
    has."""
    from baton_kernels.linear_tiles import Tile

    if num_rows == 1:
        for block_n, block_k, warps in (
            (2, 1024, 4), (4, 1024, 4), (2, 1024, 2), (2, 2048, 4), (1, 1024, 1), (1, 2048, 2),
            (4, 512, 4), (8, 512, 4), (2, 512, 2),
        ):  # fmt: skip
            if block_k < 2 * shape.depth:
                yield Way(Tile(0, block_n, block_k, 1, warps, 1), fuses_norm=shape.has_norm)
        return
    if num_rows > 16:
        yield Way(None)
    block_m = max(8, num_rows)
    cuts = [(64, 128, 4, stages, False) for stages in (2, 3, 4)]
    if block_m > 16:
        cuts += [(64, 64, 4, 4, False), (32, 128, 4, 4, False), (128, 128, 8, 2, False)]
    else:
        by_warps = [(16, 256, 4, 1), (16, 512, 4, 1), (16, 1024, 8, 1), (16, 512, 4, 3)]
        cuts += [(64, 128, 4, 5, False), *((*cut, True) for cut in by_warps)]
    for (block_n, block_k, warps, stages, splits_warps), split in itertools.product(
        cuts, (1, 2, 4, 8)
    ):
        num_programs = -(-shape.width // block_n) * split
        heights = block_n * (2 if shape.is_gated else 1)
        shared = 2 * max(1, stages) * (heights + block_m) * block_k
        steps = -(-shape.depth // block_k) // split
        if shared > 220_000 or steps < max(1, stages - 1) or block_k >= 2 * shape.depth:
            continue
        if (split == 1 or num_programs <= 800) and num_programs >= (60 if splits_warps else 96):
            yield Way(
                Tile(block_m, block_n, block_k, split, warps, stages, splits_warps=splits_warps)
            )


@harness.case
@click.option("--rows", type=Several(int), default="8,64", help="numbers of rows")
@click.option("--num-best", default=6, help="ways that are shown of each layer")
def linear_tiles(rows: Sequence[int], num_best: int) -> dict[str, Any]:
    """Many tiles for each linear layer in turn, the others as `linear` does them: microseconds of a
    whole layer. Each way is compiled when it is first timed."""
    ceilings = _begin()
    pool, found = Pool(6_000_000_000), []
    for num_rows, model in itertools.product(rows, MODELS):
        chain = Chain(pool, model, num_rows, num_layers=8)
        name = f"{model} M={num_rows}"
        found.append(attempt(f"{name} as it is", chain.row, None, None))
        for shape in chain.shapes:
            swept = [
                attempt(f"{name} {shape.name} {way.tile or 'library'}", chain.row, shape, way)
                for way in _ways(shape, num_rows)
            ]
            swept.sort(key=lambda row: row.get("us a layer", math.inf))
            found += swept[:num_best]
    return _end("tiles of linear layers", ceilings, found)


# -- SwiGLU of many rows


def _gated_rows(name: str, num_rows: int, tflop_per_s: float) -> Iterator[dict[str, Any]]:
    """Four weights take turns: none is in L2 when it is read."""
    depth, width = {"8B": (4096, 14336), "0.6B": (1024, 3072)}[name]
    x, out = _randn(num_rows, depth), torch.empty(num_rows, width, device="cuda", dtype=BF16)
    weights = [_randn(2 * width, depth) / depth**0.5 for _ in range(4)]
    gate, up = (x.float() @ weights[0].float().t()).chunk(2, dim=1)
    truth = torch.nn.functional.silu(gate) * up

    def library(weight: torch.Tensor) -> object:
        return layer_ops.silu_mul(x @ weight.t(), out=out)

    def ours(weight: torch.Tensor) -> object:
        from baton_kernels.gated_linear_hopper import silu_gated

        return silu_gated(x, weight, out=out, group_m=16)

    def row(run: Callable[[torch.Tensor], object]) -> dict[str, Any]:
        seconds = graph_s(lambda index: run(weights[index % 4]), 4)
        out.fill_(torch.nan)
        run(weights[0])
        flop = 4.0 * num_rows * depth * width
        return flop_rate(seconds, flop, tflop_per_s) | {"error": relative_error(out, truth)}

    for what, run in (("library, then silu_mul", library), ("ours", ours)):
        yield attempt(f"{name} M={num_rows} {what}", row, run)


@harness.case
def gated() -> dict[str, Any]:
    """SwiGLU of many rows: our one launch (Hopper) beside the library's product and the launch
    behind it; ceiling: a large product."""
    ceilings = _begin()
    rows: list[dict[str, Any]] = []
    counts = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
    for name, num_rows in itertools.product(("8B", "0.6B"), counts):
        rows += _gated_rows(name, num_rows, ceilings["matmul_tflop_per_s"])
    return _end("SwiGLU of many rows", ceilings, rows)


# -- logits


class Kind(NamedTuple):
    """The sampling parameters that all rows of a batch ask for."""

    name: str
    needs: Needs
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


KINDS = (
    Kind("greedy", "greedy"),
    Kind("temperature", "sampled", 1.0),
    Kind("min-p", "sampled", 1.0, min_p=0.05),
    Kind("top-k", "truncated", 1.0, top_k=50),
    Kind("top-p", "truncated", 1.0, top_p=0.9),
    Kind("all three", "truncated", 0.7, 50, 0.9, 0.02),
)


def _sampling(num_rows: int, num_tokens: int, spread: float, kind: Kind) -> dict[str, Any]:
    from baton_kernels import sampling_triton as gpu

    generator = torch.Generator(device="cuda").manual_seed(0)
    buffers = [
        (torch.randn(num_rows, num_tokens, device="cuda", generator=generator) * spread).bfloat16()
        for _ in range(num_sets(num_rows * num_tokens * 2, most=20))
    ]

    def filled(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device="cuda")

    rows = SamplingRows(
        filled(kind.temperature, torch.float32),
        torch.arange(num_rows, device="cuda") * 0x5DEECE66D + 11,
        torch.arange(num_rows, dtype=torch.int32, device="cuda"),
        filled(kind.top_k, torch.int32),
        filled(kind.top_p, torch.float32),
        filled(kind.min_p, torch.float32),
    )
    out = DrawnTokens(filled(0, torch.int32), filled(0, torch.float32))
    counters = torch.zeros(num_rows, dtype=torch.int32, device="cuda")
    expected = draw_tokens_reference(buffers[0][:8], SamplingRows(*(each[:8] for each in rows)))
    gpu.draw_tokens(buffers[0], rows, kind.needs, out, counters)
    is_right = out.token_ids[:8].equal(expected.token_ids)
    most = torch.empty(num_rows, dtype=BF16, device="cuda")
    read = graph_s(lambda i: torch.amax(buffers[i % len(buffers)], dim=1, out=most), 20)
    seconds = graph_s(
        lambda i: gpu.draw_tokens(buffers[i % len(buffers)], rows, kind.needs, out, counters), 20
    )
    return {
        "us": round(seconds * 1e6, 1),
        "read us": round(read * 1e6, 1),
        "of ceiling": f"{read / seconds:.0%}",
        "is right": is_right,
    }


@harness.case
def sampling() -> dict[str, Any]:
    """draw_tokens, by rows, vocabulary and kind of draw; ceiling: torch's amax over the same
    logits. "peaked" rows are as a language model gives them, "flat" ones as random weights do."""
    ceilings = _begin()
    rows = []
    for (spread, name), tokens, count in itertools.product(
        ((1.0, "flat"), (4.0, "peaked")), (128_256, 151_936), (1, 8, 64, 256)
    ):
        for kind in KINDS:
            case = f"{name} {count} x {tokens} {kind.name}"
            rows.append(attempt(case, _sampling, count, tokens, spread, kind))
    return _end("sampling", ceilings, rows)


@harness.case
def logits() -> dict[str, Any]:
    """Penalties, biases and grammar masks for every row of a step; ceiling: a large copy.

    Of penalties and biases each token counts as two sectors of 32 bytes of logits and its own
    numbers; of masks the words, and the logits that are masked.
    """
    ceilings, vocab = _begin(), 128_256
    copy, rows = ceilings["copy_gb_per_s"], []

    def row(what: str, num_rows: int, num_tokens: int) -> dict[str, Any]:
        sets = [
            torch.randn(num_rows, vocab, device="cuda")
            for _ in range(num_sets(4 * num_rows * vocab))
        ]
        picked = [torch.randperm(vocab, device="cuda")[:num_tokens] for _ in range(num_rows)]
        ids = torch.stack(picked).to(torch.int32)
        ones, values = torch.ones(num_rows, device="cuda"), torch.randn(ids.shape, device="cuda")
        given = logit_ops.Penalties(
            ids, torch.ones(ids.shape, device="cuda"), ones * 1.1, ones * 0.1, ones * 0.1
        )
        words = torch.ones(num_rows, -(-vocab // 32), dtype=torch.int32, device="cuda")
        num_bytes = ids.numel() * (2 * 32 + 8)
        if what == "apply_bitmask":
            num_bytes = words.nbytes + sets[0].nbytes
        ops: dict[str, Callable[[torch.Tensor], object]] = {
            "penalise": lambda logits: logit_ops.penalise(logits, given),
            "add_bias": lambda logits: logit_ops.add_bias(logits, ids, values),
            "apply_bitmask": lambda logits: logit_ops.apply_bitmask(logits, words),
        }
        run = ops[what]
        seconds = graph_s(lambda index: run(sets[index % len(sets)]))
        return rate(seconds, num_bytes, copy)

    for count in (1, 8, 64, 256):
        for what, tokens in itertools.product(("penalise", "add_bias"), (64, 1024)):
            rows.append(attempt(f"{what} {count} rows, {tokens} tokens", row, what, count, tokens))
        rows.append(attempt(f"apply_bitmask {count} rows", row, "apply_bitmask", count, 1))
    return _end("logits", ceilings, rows)


# -- checksums of KV blocks


@harness.case
def checksums() -> dict[str, Any]:
    """XXH3-64 of KV blocks of 2 MiB on the device: each of the two kernels, and a whole call as a
    worker makes it; ceiling: torch's sum over the same bytes."""
    import triton
    from baton_kernels import block_checksums_triton

    from services.worker.device_checksums import CudaChecksums

    harness.needs_cuda()
    block_bytes, num_blocks, rows = 2 * 2**20, 1024, []
    cache = torch.randint(0, 256, (num_blocks, block_bytes), dtype=torch.uint8, device="cuda")
    words, keys = cache.view(torch.int64), block_checksums_op.keys(cache.device)
    whole = CudaChecksums(cache)

    def bench_s(run: Callable[[], object]) -> float:
        return float(triton.testing.do_bench(run, warmup=20, rep=100, return_mode="median")) / 1e3

    for count in (1, 16, 128, 512):
        ids = torch.randperm(num_blocks, device="cuda")[:count].to(torch.int32)
        out = torch.empty(count, dtype=torch.int64, device="cuda")
        room = block_checksums_op.room(count, block_bytes)
        sums = torch.empty(room, dtype=torch.int64, device="cuda")
        part = words[:count]
        read_s = bench_s(part.sum)
        sums_s = bench_s(partial(block_checksums_triton.sum_pieces, words, ids, sums, keys))
        chain_s = bench_s(partial(block_checksums_triton.chain_pieces, words, ids, out, sums, keys))
        block_ids, times = ids.tolist(), []
        for _ in range(20):
            began = time.perf_counter()
            whole.begin(block_ids).result()
            times.append(time.perf_counter() - began)
        tera = count * block_bytes / 1e12
        rows.append(
            {
                "case": f"{count} blocks",
                "sums us": sums_s * 1e6,
                "sums TB/s": tera / sums_s,
                "read TB/s": tera / read_s,
                "chain us": chain_s * 1e6,
                "whole call us": statistics.median(times) * 1e6,
            }
        )
    return _end("checksums", {}, rows)


main = harness.program(
    __doc__,
    *(attention, prefill_attention, layers, linear, linear_tiles),
    *(gated, sampling, logits, checksums),
)

if __name__ == "__main__":
    main()
