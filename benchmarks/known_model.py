"""A model whose next token is known, on one GPU, and a drafter that knows it and is right as often
as it is told: for what guessing costs and brings, whoever guesses (speculation_gpu.py).
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Sequence
from typing import Any

import torch

from engine.config import EngineConfig
from engine.decoder.ahead import make_ahead
from engine.decoder.decoder import Decoder
from engine.decoder.model import DecoderModel, kv_layout
from engine.decoder.plain_graphs import make_plain_graphs
from engine.decoder.shape import DecoderShape, rope_table
from engine.decoder.sources import random_weights
from engine.decoder.weights import DecoderWeights
from engine.request import ModelInfo
from engine.schedule.order import Key
from engine.speculation.drafter import Draft, Task
from engine.speculation.tree import TokenTree

DEVICE = "cuda:0"
BLOCK_SIZE = 16
WINDOW = 4096
NUM_BRANCHES = 4
DEPTH = 4


def make_weights(shape: DecoderShape) -> DecoderWeights:
    """Whose next token is `successor` of the last one, by far."""
    weights = random_weights(shape, dtype=torch.bfloat16, device=torch.device(DEVICE), seed=0)
    for layer in weights.layers:
        layer.o.weight.mul_(1e-3)  # type: ignore[union-attr]
        layer.down.weight.mul_(1e-3)  # type: ignore[union-attr]
    assert weights.norm is not None and weights.embedding is not None and weights.head is not None
    weights.norm.fill_(1.0)
    if not shape.is_tied:
        weights.head.weight.copy_(weights.embedding.roll(1, 0))  # type: ignore[union-attr]
    return weights


def successor(token_id: int, shape: DecoderShape) -> int:
    """The next token, by the weights above."""
    return token_id if shape.is_tied else (token_id + 1) % shape.vocab_size


def make_model(weights: DecoderWeights, config: EngineConfig, *, num_nodes: int) -> DecoderModel:
    """A model of its own on the same weights.

    Args:
        num_nodes: guesses for one sequence in a step; 0: nobody guesses.
    """
    shape = weights.shape
    info = ModelInfo(
        model="random",
        model_type="llama",
        fingerprint="",
        tokenizer_digest="",
        dtype="bfloat16",
        context_window=WINDOW,
        vocab_size=shape.vocab_size,
        eos_token_ids=(),
        block_size=BLOCK_SIZE,
        num_blocks=0,
        device=DEVICE,
        linear="fused kernels",
        fused=(),
        num_parameters=shape.num_parameters,
        weight_bytes=weights.num_bytes,
    )
    sizes: dict[str, Any] = {
        "max_rows": config.max_num_running,
        "max_tokens": config.max_num_tokens_per_step,
        "context_window": WINDOW,
    }
    return DecoderModel(
        Decoder(weights, rope_table(shape, WINDOW, torch.device(DEVICE))),
        info,
        kv_layout(shape, block_size=BLOCK_SIZE, dtype="bfloat16"),
        make_ahead=functools.partial(make_ahead, **sizes, max_num_nodes=num_nodes),
        make_graphs=functools.partial(make_plain_graphs, **sizes, max_num_nodes=num_nodes),
    )


class Scripted:
    """A Drafter that knows the rule, and is right as often as it is told.

    Attributes:
        num_nodes: of a tree of wrong guesses; 0: paths, as far as `depth`, each token of which is
            right with `chance`.
        seconds: that its calls took.
    """

    name = "scripted"

    def __init__(self, shape: DecoderShape) -> None:
        self.num_nodes = 0
        self.depth = DEPTH
        self.chance = 0.0
        self.seconds = 0.0
        self._shape = shape

    def propose(self, tasks: Sequence[Task]) -> list[Draft]:
        """See Drafter."""
        began = time.perf_counter()
        make = self._wrong if self.num_nodes else self._path
        drafts = [Draft(make(task), {}) for task in tasks]
        self.seconds += time.perf_counter() - began
        return drafts

    def forget(self, key: Key) -> None:
        """See Drafter."""

    def check_integrity(self) -> None:
        """See Drafter."""

    def _wrong(self, task: Task) -> TokenTree:
        num_nodes = min(self.num_nodes, task.num_nodes)
        right = successor(task.token_ids[-1], self._shape)
        token_ids: list[int] = []
        parents: list[int] = []
        for branch in range(NUM_BRANCHES):
            parent = -1
            for node in range(len(parents), num_nodes * (branch + 1) // NUM_BRANCHES):
                token_ids.append((right + 1 + node) % self._shape.vocab_size)
                parents.append(parent)
                parent = node
        return _tree(token_ids, parents, [0.5] * num_nodes)

    def _path(self, task: Task) -> TokenTree:
        depth = min(self.depth, task.num_nodes)
        token = task.token_ids[-1]
        token_ids, chances = [], []
        # By sequence and place: the same guesses however many are computed.
        draws = random.Random(hash((task.key, len(task.token_ids))))
        for _ in range(depth):
            token = successor(token, self._shape)
            if draws.random() >= self.chance:
                token = (token + 7) % self._shape.vocab_size
            token_ids.append(token)
            chances.append(self.chance ** len(token_ids))
        return _tree(token_ids, list(range(-1, depth - 1)), chances)


def _tree(token_ids: list[int], parents: list[int], chances: list[float]) -> TokenTree:
    tries = ((),) * len(token_ids)
    return TokenTree(tuple(token_ids), tuple(parents), tuple(chances), tries)


def chance_for(tokens_per_step: float, depth: int) -> float:
    """Of each token of a path to be right, for so many tokens a step: 1 + p + p^2 + ..."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**power for power in range(depth + 1)) < tokens_per_step:
            low = middle
        else:
            high = middle
    return low
