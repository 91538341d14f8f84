"""Ranks on GPUs of their own, over NCCL: the logits and tokens of one GPU, CUDA graphs with
the ranks' sums inside, and a rank that is killed while others wait for it on the device."""

from __future__ import annotations

import dataclasses
import mmap
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import pytest
import torch
import transformers

from engine.batch import Batch, TokenSpan
from engine.config import EngineConfig
from engine.engine import LLMEngine, load_engine
from engine.errors import RankFailed
from engine.request import Request, Sampling
from kvstore.transport.base import BlockMemory
from kvstore.transport.device import wait_for
from services.worker.device_memory import block_memory, kernel_wait
from tests.conftest import SESSION_SEED
from tests.harness.engines import block_hash
from tests.harness.models import save

Bytes = npt.NDArray[np.uint8]

NUM_DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0
GRIDS = [(2, 1), (1, 2), (2, 2), (4, 1)]
MAX_ERROR = {"float32": 1e-4, "bfloat16": 0.05}
BOUND_S = 120.0

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.fixture(params=GRIDS, ids=lambda grid: f"{grid[0]}x{grid[1]}")
def grid(request: pytest.FixtureRequest) -> tuple[int, int]:
    """(shares, stages); skipped where there are not as many devices."""
    shares, stages = request.param
    if shares * stages > NUM_DEVICES:
        pytest.skip(f"NO TEST ON {shares * stages} GPUS: torch finds {NUM_DEVICES}")
    return shares, stages


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes: dict[str, Any] = {
        "vocab_size": 260,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 1024,
        "head_dim": 64,
        "eos_token_id": 1,
        "initializer_range": 0.1,
        "dtype": "float32",
    }
    path = tmp_path_factory.mktemp("qwen3")
    save(transformers.Qwen3Config(**sizes, tie_word_embeddings=True), path, SESSION_SEED)
    return path


@pytest.fixture
def engines() -> Iterator[list[LLMEngine]]:
    """Closed afterwards."""
    made: list[LLMEngine] = []
    yield made
    for engine in made:
        engine.close()


def _load(folder: Path, grid: tuple[int, int] = (1, 1), **fields: Any) -> LLMEngine:
    settings: dict[str, Any] = {
        "model": str(folder),
        "device": "cuda:0",
        "dtype": "float32",
        "num_blocks": 300,
        "max_num_running": 16,
        "tensor_parallel": grid[0],
        "pipeline_parallel": grid[1],
        "rank_timeout_s": BOUND_S,
    }
    return load_engine(EngineConfig(**settings | fields))


def _logits(engine: LLMEngine) -> torch.Tensor:
    """Of a chunk of 37 tokens, the rest of the prompt, and two decodes."""
    generator = torch.Generator().manual_seed(SESSION_SEED)
    token_ids = torch.randint(260, (60,), generator=generator).tolist()
    found = []
    for start, end in ((0, 37), (37, 58), (58, 59), (59, 60)):
        span = TokenSpan(start, end - start, tuple(range(5, 5 + -(-end // 16))))
        draws = tuple(range(end - start))
        logits = engine._model.forward(Batch(tuple(token_ids[start:end]), (span,), draws))
        found.append(logits.float().cpu())  # a graph's own hold until the next step only
    return torch.cat(found)


@pytest.mark.parametrize("dtype", MAX_ERROR)
def test_several_devices_give_the_logits_of_one(
    grid: tuple[int, int], dtype: str, folder: Path, engines: list[LLMEngine]
) -> None:
    engines.append(_load(folder, dtype=dtype))
    expected = _logits(engines[0])
    engines.append(_load(folder, grid, dtype=dtype))
    actual = _logits(engines[1])
    error = float((actual - expected).norm() / expected.norm())
    assert error < MAX_ERROR[dtype]


def _run(engine: LLMEngine, num_tokens: int) -> dict[str, list[int]]:
    """Requests of ragged lengths that come while others decode."""
    generator = torch.Generator().manual_seed(SESSION_SEED)
    requests = []
    for index, length in enumerate((3, 40, 1, 400, 17, 130, 2, 64)):
        prompt = torch.randint(2, 260, (length,), generator=generator).tolist()
        sampling = Sampling(max_tokens=num_tokens, ignore_eos=True)
        if index % 3 == 2:
            sampling = dataclasses.replace(sampling, temperature=0.8, top_p=0.9, seed=index)
        requests.append(Request(f"r{index}", tuple(prompt), sampling, block_hash))
    outputs: dict[str, list[int]] = {request.request_id: [] for request in requests}
    while requests or engine.has_work():
        if requests:
            engine.submit(requests.pop())
        for event in engine.step().events:
            assert event.error is None
            outputs[event.request_id] += event.token_ids
    engine.check_integrity()
    return outputs


@pytest.mark.parametrize("overlap", [True, False])
def test_several_devices_give_the_tokens_of_one(
    grid: tuple[int, int], overlap: bool, folder: Path, engines: list[LLMEngine]
) -> None:
    """Launched ahead, in CUDA graphs with the ranks' sums inside, and step by step."""
    engines.append(_load(folder))
    expected = _run(engines[0], 24)
    engines.append(_load(folder, grid, overlap=overlap))
    actual = _run(engines[1], 24)
    assert all(len(tokens) == 24 for tokens in actual.values())
    same = [name for name in expected if actual[name] == expected[name]]
    assert len(same) == len(expected)


def _move(memory: BlockMemory, block_ids: list[int], whole: Bytes | None = None) -> Bytes:
    """Whole blocks [n, block_bytes] of a cache; or write these over them."""
    device = memory.device
    assert device is not None
    size = len(block_ids) * memory.block_bytes
    rows = np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8).reshape(len(block_ids), -1)
    if whole is not None:
        rows[:] = whole
    device.register(rows.ctypes.data, size)
    queue = device.new_queue()
    copies = [
        (memory.address + block_id * memory.block_bytes, row.ctypes.data, memory.block_bytes)
        for block_id, row in zip(block_ids, rows, strict=True)
    ]
    move = queue.to_host if whole is None else queue.to_device
    move(np.array(copies, dtype=np.uint64))
    assert wait_for(queue.mark())
    queue.close()
    device.unregister(rows.ctypes.data)
    return rows


def _last_logits(engine: LLMEngine, token_ids: list[int], blocks: tuple[int, ...]) -> torch.Tensor:
    """Of a decode of the last token, all others being in the blocks."""
    end = len(token_ids)
    batch = Batch((token_ids[-1],), (TokenSpan(end - 1, 1, blocks),), (0,))
    return engine._model.forward(batch).float().cpu()


def test_blocks_of_one_device_are_read_by_several_and_the_other_way_round(
    grid: tuple[int, int], folder: Path, engines: list[LLMEngine]
) -> None:
    """Rank 0 reads and writes whole blocks, though each device has its part of them."""
    engines += [_load(folder), _load(folder, grid)]
    one, many = engines
    memories = [block_memory(engine.kv) for engine in engines]
    expected = _logits(one)[-1:]  # 60 tokens in blocks 5 to 8
    _logits(many)
    for engine, memory in zip(engines, memories, strict=True):
        kernel_wait(memory, engine.kv.settle)()
    here, there = (_move(memory, [5, 6, 7, 8]) for memory in memories)
    numbers, others = (rows.view(np.float32) for rows in (here, there))
    used = numbers != 0  # slots that nobody wrote
    assert used.mean() > 0.9 and np.abs(numbers - others)[used].max() < 1e-2 * np.abs(numbers).max()

    generator = torch.Generator().manual_seed(SESSION_SEED)
    token_ids = torch.randint(260, (60,), generator=generator).tolist()
    other_blocks = (20, 11, 33, 2)
    for engine, memory, rows in ((many, memories[1], here), (one, memories[0], there)):
        _move(memory, list(other_blocks), rows)
        error = (_last_logits(engine, token_ids, other_blocks) - expected).norm() / expected.norm()
        assert float(error) < MAX_ERROR["float32"]

    many.kv.clear(20)
    many.kv.copy(33, 11)
    kernel_wait(memories[1], many.kv.settle)()
    now = _move(memories[1], list(other_blocks))
    assert not now[0].any() and np.array_equal(now[1], now[2]) and now[2].any()


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_rank_that_is_gone_ends_the_engine(
    how: str, folder: Path, engines: list[LLMEngine]
) -> None:
    """Rank 0's kernels wait for it on the device, and are given up within the deadline."""
    if NUM_DEVICES < 2:
        pytest.skip(f"NO TEST ON 2 GPUS: torch finds {NUM_DEVICES}")
    timeout_s = BOUND_S if how == "killed" else 20.0
    engine = _load(folder, (2, 1), rank_timeout_s=timeout_s)
    engines.append(engine)
    (pid,) = engine._model.pids  # type: ignore[attr-defined]
    sampling = Sampling(max_tokens=900, ignore_eos=True)
    engine.submit(Request("r", (5, 6, 7), sampling, block_hash))
    for _ in range(20):
        engine.step()
    os.kill(pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    with pytest.raises(RankFailed) as caught:
        while True:
            engine.step()
    assert "\n" not in str(caught.value)
    assert ("signal 9" if how == "killed" else "took more than 20 s") in str(caught.value)
    _, alive = psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], 20.0)
    assert not alive
