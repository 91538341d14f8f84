"""Ranks as threads of one process, over gloo: what they say to each other is real, and nothing has
to be started."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from engine.batch import Batch, TokenSpan
from engine.kv.layout import KvLayout
from engine.kv.memory import TORCH_DTYPES, KvMemory
from engine.models.llama import kv_layout, read_llama_config
from engine.models.self_check import random_instance
from engine.models.weights import take_weights
from engine.parallel.distributed_ranks import DistributedRanks
from engine.parallel.rank_grid import Grid
from engine.parallel.rank_model import RankModel, share_of
from engine.parallel.ranks import OneRank, Ranks

BLOCK_SIZE = 4
NUM_POSITIONS = 64

Result = TypeVar("Result")


def run_ranks(
    grid: Grid, act: Callable[[int, DistributedRanks], Result], *, timeout_s: float = 20.0
) -> list[Result]:
    """`act(rank, ranks)` at every rank at once: what each returned. Raises the first error."""
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}
    meeting_file = os.memfd_create("meeting")

    def go(rank: int) -> None:
        ranks = DistributedRanks(grid, rank, "cpu", timeout_s)
        try:
            ranks.form(meeting_file)
            results[rank] = act(rank, ranks)
        except BaseException as error:
            errors[rank] = error
        finally:
            ranks.close()

    threads = [threading.Thread(target=go, args=(rank,)) for rank in range(grid.num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(meeting_file)
    for error in errors.values():
        raise error
    return [results[rank] for rank in range(grid.num_ranks)]


class Model:
    """A small random model of a transformers config, of which ranks take their parts."""

    def __init__(
        self, config: Any, seed: int, dtype: str = "float32", weight_dtype: str = ""
    ) -> None:
        self.config = config
        self.dtype, self.weight_dtype = dtype, weight_dtype
        self.shape = read_llama_config(config)
        self.tensors = random_instance(config, seed).state_dict()
        self.layout: KvLayout = kv_layout(self.shape, block_size=BLOCK_SIZE, dtype=dtype)

    def part(self, ranks: Ranks, memory: KvMemory, *, is_exact: bool = False) -> RankModel:
        """One rank's, attached."""
        weights = take_weights(
            self.tensors,
            self.shape,
            dtype=TORCH_DTYPES[self.dtype],
            device=torch.device("cpu"),
            share=share_of(ranks.place, self.shape),
            weight_dtype=self.weight_dtype,
        )
        part = RankModel(
            weights, ranks, num_positions=NUM_POSITIONS, device="cpu", is_exact=is_exact
        )
        part.attach(memory)
        return part

    def whole(self, memory: KvMemory) -> RankModel:
        """All of it in one rank."""
        return self.part(OneRank(), memory)

    def memory(self, num_blocks: int = 40) -> KvMemory:
        """A cache for whole blocks in which what was never written shows."""
        memory = KvMemory(self.layout, num_blocks)
        memory.cache.fill_(1e3)
        return memory

    def steps(self, seed: int) -> list[Batch]:
        """Prompts, chunks and decodes of several requests, mixed; in one step nothing is drawn."""
        generator = torch.Generator().manual_seed(seed)
        lengths = (13, 1, 30)
        cuts = ((0, 0, 9), (0, 9, 13), (0, 13, 14), (0, 14, 15))
        tables, free = [], torch.randperm(40, generator=generator).tolist()
        for length in lengths:
            tables.append(tuple(free.pop() for _ in range(self.layout.num_blocks_for(length + 8))))
        steps: list[Batch] = []
        for index, members in enumerate(
            (
                (cuts[0], (1, 0, 1)),
                (cuts[1], (1, 1, 2), (2, 0, 22)),
                ((2, 22, 29),),
                (cuts[2], (1, 2, 3), (2, 29, 30)),
                (cuts[3], (1, 3, 4), (2, 30, 31)),
            )
        ):
            spans = tuple(
                TokenSpan(start, end - start, tables[request][: self.layout.num_blocks_for(end)])
                for request, start, end in members
            )
            num_tokens = sum(span.num_tokens for span in spans)
            token_ids = torch.randint(self.shape.vocab_size, (num_tokens,), generator=generator)
            draws = () if index == 2 else tuple(range(num_tokens))
            steps.append(Batch(tuple(token_ids.tolist()), spans, draws))
        return steps
