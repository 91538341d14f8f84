"""A small random decoder of our own, and sequences that it computes: for tests of its launches."""

from __future__ import annotations

import functools
import random

import torch
from transformers import Qwen3Config

from engine.batch import Batch, TokenSpan
from engine.decoder.ahead import MAX_CHANGES, make_ahead
from engine.kv.memory import KvMemory
from engine.lora.limits import LoraLimits
from engine.models.llama import LlamaDecoder, LlamaModel, kv_layout, read_llama_config, rope_table
from engine.models.weights import random_weights
from engine.request import ModelInfo, Sampling
from engine.sampling.metadata import SamplingRequest
from tests.unit.engine.sampling.reference import sample

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
BLOCK = 8
WINDOW = 128
NUM_BLOCKS = 200
MAX_ROWS = 6
VOCAB = 211


def small_model(
    device: str,
    dtype: torch.dtype,
    seed: int,
    *,
    num_layers: int = 3,
    window: int = WINDOW,
    max_rows: int = MAX_ROWS,
    lora: LoraLimits | None = None,
    is_exact: bool = False,
    launches_prompts: bool = True,
    max_changes: int = MAX_CHANGES,
) -> LlamaModel:
    """Random weights, of heads that our kernels take.

    Args:
        num_layers: with three, a step's graph ends behind two, and another one begins.
    """
    config = Qwen3Config(
        num_hidden_layers=num_layers,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=96,
        vocab_size=VOCAB,
        tie_word_embeddings=True,
        max_position_embeddings=window,
    )
    shape = read_llama_config(config)
    weights = random_weights(shape, dtype=dtype, device=torch.device(device), seed=seed)
    dtype_name = str(dtype).removeprefix("torch.")
    info = ModelInfo(
        model="random",
        model_type="qwen3",
        fingerprint="",
        tokenizer_digest="",
        dtype=dtype_name,
        context_window=window,
        vocab_size=shape.vocab_size,
        eos_token_ids=(),
        block_size=BLOCK,
        num_blocks=0,
        device=device,
        linear="",
        fused=(),
        num_parameters=0,
        weight_bytes=0,
    )
    return LlamaModel(
        LlamaDecoder(weights, rope_table(shape, window, torch.device(device)), is_exact=is_exact),
        info,
        kv_layout(shape, block_size=BLOCK, dtype=dtype_name),
        make_ahead=functools.partial(
            make_ahead,
            max_rows=max_rows,
            max_tokens=64,
            context_window=window,
            max_changes=max_changes,
        ),
        lora=lora,
        launches_prompts=launches_prompts,
    )


class Run:
    """Sequences on one memory."""

    def __init__(self, model: LlamaModel, prompts: list[list[int]], rng: random.Random) -> None:
        self.model = model
        memory = KvMemory(model.layout, NUM_BLOCKS, model.info.device)
        memory.cache.fill_(torch.nan)
        model.attach(memory)
        order = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
        each = WINDOW // BLOCK
        self.tables = [tuple(order[at * each : (at + 1) * each]) for at in range(len(prompts))]
        self.tokens = [list(prompt) for prompt in prompts]

    def blocks(self, at: int, num_tokens: int) -> tuple[int, ...]:
        return self.tables[at][: -(-num_tokens // BLOCK)]

    def plain(self, indices: list[int], samplings: list[Sampling], num_tokens: int | None) -> None:
        """A plain step: of one token each, or of the whole prompts."""
        spans, token_ids, ends, draws = [], [], [], []
        for at in indices:
            own = self.tokens[at]
            start = 0 if num_tokens is None else len(own) - num_tokens
            spans.append(TokenSpan(start, len(own) - start, self.blocks(at, len(own))))
            token_ids += own[start:]
            ends.append(len(token_ids) - 1)
            draws.append(SamplingRequest(samplings[at], len(own), at))
        logits = self.model.forward(Batch(tuple(token_ids), tuple(spans), tuple(ends)))
        for at, drawn in zip(indices, sample(logits, draws), strict=True):
            self.tokens[at].append(drawn.token_id)


def random_sampling(rng: random.Random) -> Sampling:
    return Sampling(
        max_tokens=99,
        temperature=rng.choice([0.0, 0.7, 1.3]),
        top_k=rng.choice([0, 7]),
        top_p=rng.choice([1.0, 0.8]),
        seed=rng.randrange(1 << 64),
    )
