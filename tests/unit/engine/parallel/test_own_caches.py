"""Ranks with caches of their own, as on CUDA, here on CPU: what the engine does to a block is done
at every rank, and `settle` waits for it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from engine.batch import Batch, TokenSpan
from engine.config import EngineConfig
from engine.engine import LLMEngine, load_engine
from engine.models import loader
from engine.parallel.messages import Change
from engine.parallel.parallel_model import ParallelModel
from engine.parallel.rank_memory import RankMemory
from engine.parallel.rank_processes import RankProcesses
from tests.conftest import SESSION_SEED
from tests.harness.models import save

_CHILD = """
from engine.parallel import rank_main
from engine.parallel.rank_memory import RankMemory
from engine.parallel.cuda_ipc import SharedCache
child._Child._memory = lambda self, layout, ranks, n, device: RankMemory(
    layout, ranks.place, n, device
)
child._share = lambda memory: SharedCache(0, b"", 0)
child.run()
"""
_CONFIG = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "head_dim": 16,
    "eos_token_id": 1,
    "initializer_range": 0.3,
    "dtype": "float32",
}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the other rank is told."""
    messages: list[object] = []
    real = RankProcesses.tell

    def tell(self: RankProcesses, message: Any) -> None:
        messages.append(message)
        real(self, message)

    monkeypatch.setattr(RankProcesses, "tell", tell)
    return messages


@pytest.fixture
def engine(tmp_path: Path, told: list[object], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two shares."""
    save(transformers.LlamaConfig(**_CONFIG), tmp_path, SESSION_SEED)
    real = loader.load_parallel

    def load(*args: Any, **fields: Any) -> ParallelModel:
        return real(*args, **fields, program=(sys.executable, "-P", "-c", _CHILD))

    def make_memory(self: ParallelModel, num_blocks: int) -> RankMemory:
        return RankMemory(
            self.layout,
            self._place,
            num_blocks,
            "cpu",
            on_change=self._processes.tell,
            settle=self._settle,
        )

    monkeypatch.setattr(loader, "load_parallel", load)
    monkeypatch.setattr(ParallelModel, "make_memory", make_memory)
    made = load_engine(
        EngineConfig(
            model=str(tmp_path),
            device="cpu",
            decoder="own",
            num_threads=1,
            num_blocks=40,
            block_size=4,
            max_num_tokens_per_step=64,
            max_num_running=4,
            tensor_parallel=2,
            context_window=128,
        )
    )
    yield made
    made.close()


def _decode(engine: LLMEngine, blocks: tuple[int, ...]) -> torch.Tensor:
    """Logits of a ninth token, whose predecessors are in the first two blocks."""
    batch = Batch((17,), (TokenSpan(8, 1, blocks),), (0,))
    return engine._model.forward(batch).clone()


def test_blocks_are_cleared_and_copied_at_every_rank(engine: LLMEngine, told: list[object]) -> None:
    kv = engine.kv
    assert not kv.is_whole and kv.parts == (), "nobody can reach the other rank's part"
    assert kv.cache.nbytes == 40 * kv.layout.block_bytes // 2
    prompt = Batch(tuple(range(5, 13)), (TokenSpan(0, 8, (3, 4)),), (7,))
    engine._model.forward(prompt)
    expected = _decode(engine, (3, 4, 9))

    kv.copy(3, 20)
    kv.copy(4, 21)
    kv.clear(3)
    kv.clear(4)
    assert told[-4:] == [Change(20, 3), Change(21, 4), Change(3), Change(4)]
    kv.settle()
    num_told = len(told)
    kv.settle()
    assert len(told) == num_told, "nothing has changed since"
    assert torch.equal(_decode(engine, (20, 21, 9)), expected)

    # What is left of (3, 4) is zeros at both ranks: the same as of blocks that nobody wrote.
    assert not np.asarray(kv.host_view[[3, 4]]).any()
    assert torch.equal(_decode(engine, (3, 4, 9)), _decode(engine, (30, 31, 9)))
    assert not torch.allclose(_decode(engine, (3, 4, 9)), expected)
