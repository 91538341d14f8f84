"""The decoder on the kernels: what every operation is given, and gives, fits the next one."""

from __future__ import annotations

import pytest
import torch
import transformers
from baton_kernels.lora import group_rows

from engine.batch import Batch, TokenSpan
from engine.decoder.inputs import DecodeInputs, mixed_inputs, singles_first
from engine.kv.memory import KvMemory
from engine.lora.stacked_weights import StackedLora
from engine.models.llama import (
    LlamaDecoder,
    block_rows,
    find_sites,
    kv_layout,
    read_llama_config,
    rope_table,
)
from engine.models.weights import random_weights

_STEPS = (
    (TokenSpan(0, 7, (3, 1)), TokenSpan(0, 1, (2,)), TokenSpan(0, 3, (5,))),
    (
        TokenSpan(7, 1, (3, 1)),
        TokenSpan(1, 5, (2, 0)),
        TokenSpan(3, 4, (5, 4), branches=(-1, 0, -1)),
    ),
)
"""Chunks, and a token tree, beside single tokens, off and on block borders."""


_KINDS = [(torch.float32, "")]
if torch.cuda.is_available():  # interpreted, they take many seconds
    _KINDS += [(torch.bfloat16, ""), (torch.float32, "fp8_e4m3"), (torch.bfloat16, "fp8_e4m3")]


@pytest.mark.parametrize(("dtype", "weight_dtype"), _KINDS)
def test_kernels_together_give_what_plain_torch_gives(
    dtype: torch.dtype, weight_dtype: str, device: str, seed: int
) -> None:
    config = transformers.Qwen3Config(
        vocab_size=50, hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    shape, on = read_llama_config(config), torch.device(device)
    weights = random_weights(shape, dtype=dtype, device=on, seed=seed, weight_dtype=weight_dtype)
    name = "float32" if dtype is torch.float32 else "bfloat16"
    layout = kv_layout(shape, block_size=4, dtype=name)
    decoder = LlamaDecoder(weights, rope_table(shape, 64, on))
    stacks = StackedLora(find_sites(weights), num_slots=2, max_rank=3, dtype=dtype, device=on)
    decoder.stack(stacks)
    generator = torch.Generator(on).manual_seed(seed)
    for stack in stacks.by_linear.values():
        stack.a.normal_(generator=generator)
        stack.b.normal_(generator=generator).mul_(0.02)
    adapted = group_rows([1, -1, 0], on, num_tiles=3)
    logits = {}
    for backend in ("reference", "triton"):
        decoder.use_backend(backend)  # type: ignore[arg-type]
        memory = KvMemory(layout, 6, device)
        decoder.attach([block_rows(view, layout) for view in memory.layer_views()])
        parts = []
        with torch.inference_mode():
            for spans in _STEPS:
                num_tokens = sum(span.num_tokens for span in spans)
                token_ids = tuple((7 * i + seed) % 50 for i in range(num_tokens))
                batch = singles_first(Batch(token_ids, spans, tuple(range(num_tokens))))
                parts.append(decoder.forward(mixed_inputs(batch, on)))
            tables = torch.tensor([[3, 1], [2, 0], [0, 0]], dtype=torch.int32, device=on)
            ids, positions = (
                torch.tensor(values, dtype=torch.int32, device=on)
                for values in ([5, 6, 0], [7, 6, -1])
            )
            parts.append(decoder.decode(DecodeInputs(ids, positions, tables)))
            ids, positions = (
                torch.tensor(values, dtype=torch.int32, device=on)
                for values in ([5, 6, 7], [7, 6, 2])
            )
            tables[2] = 5
            parts.append(decoder.decode(DecodeInputs(ids, positions, tables, adapted)))
        logits[backend] = torch.cat(parts).float()
    error = (logits["triton"] - logits["reference"]).norm() / logits["reference"].norm()
    bound = {"float32": 1e-5, "bfloat16": 0.05}[name]
    assert float(error) < (0.2 if weight_dtype else bound)  # fp8: rounding edges
