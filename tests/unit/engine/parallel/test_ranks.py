"""Several ranks compute what one does; their caches are parts of the same blocks."""

from __future__ import annotations

import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from engine.batch import Batch, TokenSpan
from engine.errors import RankFailed
from engine.kv.memory import KvMemory
from engine.models.self_check import NUM_VERIFY_TOKENS, verify_logits
from engine.parallel.distributed_ranks import DistributedRanks
from engine.parallel.microbatches import pieces
from engine.parallel.parallel_model import ParallelModel
from engine.parallel.rank_grid import Grid
from engine.parallel.rank_memory import RankMemory, runs
from tests.unit.engine.parallel.threads import Model, run_ranks

_SIZES: dict[str, Any] = {
    "vocab_size": 104, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 64,
    "head_dim": 16,
}  # fmt: skip
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(
        **_SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=False
    ),
    "qwen3": lambda: transformers.Qwen3Config(**_SIZES, tie_word_embeddings=True),
}
GRIDS = [Grid(2, 1), Grid(4, 1), Grid(1, 2), Grid(1, 3), Grid(2, 2)]
MAX_ERROR = {"float32": 1e-5, "bfloat16": 0.05}
"""Of logits, relative to the greatest one: sums in another order."""


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual.float() - expected.float()).abs().max() / expected.float().abs().max())


@pytest.mark.parametrize(
    ("grid", "family", "dtype"),
    [
        *((grid, family, "float32") for grid in GRIDS for family in CONFIGS),
        (Grid(2, 2), "llama", "bfloat16"),
    ],
    ids=str,
)
def test_several_ranks_give_the_logits_of_one(
    grid: Grid, family: str, dtype: str, seed: int
) -> None:
    """Biases are added once, norms by every share; ties are cut as heads are."""
    model = Model(CONFIGS[family](), seed, dtype)
    steps = model.steps(seed)
    alone = model.memory()
    whole = model.whole(alone)
    expected = [whole.forward(step) for step in steps]
    shared = model.memory()

    def act(rank: int, ranks: DistributedRanks) -> list[torch.Tensor]:
        part = model.part(ranks, shared)
        return [part.forward(step) for step in steps]

    for rank, logits in enumerate(run_ranks(grid, act)):
        for actual, wanted in zip(logits, expected, strict=True):
            if grid.place(rank).is_last and len(wanted):
                assert _error(actual, wanted) < MAX_ERROR[dtype]
            assert actual.shape[1] == model.shape.vocab_size
    assert _error(shared.cache, alone.cache) < MAX_ERROR[dtype]


def test_kernels_are_checked_at_all_ranks_together(seed: int) -> None:
    """On CPU both ways are plain torch: the same logits twice, and those of one rank."""
    model = Model(CONFIGS["qwen3"](), seed)
    whole = model.whole(model.memory())
    expected = verify_logits(whole.forward, model.shape.vocab_size, model.layout)
    assert len(expected) == NUM_VERIFY_TOKENS

    def act(rank: int, ranks: DistributedRanks) -> tuple[torch.Tensor, torch.Tensor]:
        return model.part(ranks, model.memory()).verify(model.layout)

    by_kernels, by_torch = run_ranks(Grid(2, 2), act)[0]
    assert torch.equal(by_kernels, by_torch)
    assert _error(by_kernels, expected) < MAX_ERROR["float32"]


def test_several_ranks_with_weights_in_fp8(seed: int) -> None:
    """Of the output and the down projection each share has scales of its own, and quantizes its
    part of the activations by itself: other numbers than one rank's, and as near the plain ones."""
    exact, model = (
        Model(CONFIGS["llama"](), seed, weight_dtype=weight_dtype)
        for weight_dtype in ("", "fp8_e4m3")
    )
    steps = model.steps(seed)
    plain, alone = exact.whole(exact.memory()), model.whole(model.memory())
    expected = torch.cat([plain.forward(step) for step in steps])
    of_one = torch.cat([alone.forward(step) for step in steps])
    shared = model.memory()

    def act(rank: int, ranks: DistributedRanks) -> torch.Tensor:
        part = model.part(ranks, shared)
        assert part.is_fp8 and part.weight_bytes < alone.weight_bytes
        return torch.cat([part.forward(step) for step in steps])

    of_four = run_ranks(Grid(2, 2), act)[0]
    its_own = float((of_one - expected).norm())
    assert 0.05 < its_own / float(expected.norm()) < 0.4  # measured: 0.14 to 0.20
    assert float((of_four - expected).norm()) < 1.25 * its_own  # measured: 0.89 to 1.05


def test_pieces_of_a_step_give_its_logits(seed: int) -> None:
    """A later piece finds the KV of the earlier ones at its own stage."""
    model = Model(CONFIGS["qwen3"](), seed)
    steps = model.steps(seed)
    whole = model.whole(model.memory())
    expected = [whole.forward(step) for step in steps]
    shared = model.memory()

    def act(rank: int, ranks: DistributedRanks) -> list[torch.Tensor]:
        part = model.part(ranks, shared)
        cut = [pieces(step, 2, 1) for step in steps]
        assert any(len(parts) == 2 for parts in cut)
        return [torch.cat([part.forward(piece) for piece in parts]) for parts in cut]

    for actual, wanted in zip(run_ranks(Grid(1, 2), act)[0], expected, strict=True):
        assert not len(wanted) or _error(actual, wanted) < MAX_ERROR["float32"]


@pytest.mark.parametrize("grid", [Grid(2, 1), Grid(2, 2)], ids=str)
def test_exact_rows_do_not_depend_on_others_in_the_step(grid: Grid, seed: int) -> None:
    """A sum of two is the same in either order."""
    model = Model(CONFIGS["qwen3"](), seed)
    steps = model.steps(seed)
    caches = [model.memory(), model.memory()]

    def act(rank: int, ranks: DistributedRanks) -> list[list[torch.Tensor]]:
        together, alone = (model.part(ranks, memory, is_exact=True) for memory in caches)
        found = []
        for step in steps:
            rows = together.forward(step)
            first = 0
            for span in step.spans:
                end = first + span.num_tokens
                draws = tuple(index - first for index in step.draw_indices if first <= index < end)
                own = alone.forward(Batch(step.token_ids[first:end], (span,), draws))
                if step.draw_indices:
                    found.append([rows[first:end], own])
                first = end
        return found

    pairs = run_ranks(grid, act)[0]
    assert len(pairs) > 6
    assert all(torch.equal(row, own) for row, own in pairs)


# -- the same blocks, whatever the degree


def _prompt(model: Model, seed: int) -> tuple[Batch, tuple[int, ...]]:
    token_ids = torch.randint(104, (21,), generator=torch.Generator().manual_seed(seed)).tolist()
    blocks = (7, 2, 9, 0, 5, 4, 11)
    return Batch(tuple(token_ids), (TokenSpan(0, 21, blocks[:6]),), (20,)), blocks


def _decode(part: Any, first_token: int, blocks: tuple[int, ...]) -> list[int]:
    """Four more greedy tokens after the prompt."""
    token_ids = [first_token]
    for position in range(21, 25):
        span = TokenSpan(position, 1, blocks[: position // 4 + 1])
        token_ids.append(int(part.forward(Batch((token_ids[-1],), (span,), (0,)))[0].argmax()))
    return token_ids


def _token(logits: torch.Tensor) -> int:
    return int(logits[0].argmax())


@pytest.mark.parametrize("grid", [Grid(2, 1), Grid(2, 2)], ids=str)
def test_blocks_of_a_prefill_by_several_ranks_are_read_by_one(grid: Grid, seed: int) -> None:
    """And the other way round, through caches of the ranks' own, as on CUDA: what travels is whole
    blocks, put together from the ranks' runs and taken apart again."""
    model = Model(CONFIGS["llama"](), seed)
    prompt, blocks = _prompt(model, seed)
    alone = model.memory(12)
    whole = model.whole(alone)
    first = _token(whole.forward(prompt))
    written = alone.cache.clone()
    expected = _decode(whole, first, blocks)
    alone.cache.copy_(written)

    def prefill(rank: int, ranks: DistributedRanks) -> tuple[KvMemory, torch.Tensor]:
        memory = RankMemory(model.layout, ranks.place, 12, "cpu")
        return memory, model.part(ranks, memory).forward(prompt)

    joined = model.memory(12)
    parts = run_ranks(grid, prefill)
    for rank, (memory, _) in enumerate(parts):
        for block_offset, record_offset, num_bytes in runs(model.layout, grid.place(rank)):
            joined.host_view[:, block_offset : block_offset + num_bytes] = memory.host_view[
                :, record_offset : record_offset + num_bytes
            ]
    assert _decode(model.whole(joined), _token(parts[0][1]), blocks) == expected

    def decode(rank: int, ranks: DistributedRanks) -> list[int]:
        memory = RankMemory(model.layout, ranks.place, 12, "cpu")
        for block_offset, record_offset, num_bytes in runs(model.layout, ranks.place):
            memory.host_view[:, record_offset : record_offset + num_bytes] = alone.host_view[
                :, block_offset : block_offset + num_bytes
            ]
        part = model.part(ranks, memory)
        if ranks.place.is_last:
            return _decode(part, first, blocks)
        for token_id, position in zip(expected, range(21, 25), strict=False):
            span = TokenSpan(position, 1, blocks[: position // 4 + 1])
            part.forward(Batch((token_id,), (span,), (0,)))
        return expected

    assert run_ranks(grid, decode) == [expected] * grid.num_ranks


# -- when it ends


def test_a_rank_that_does_not_come_is_waited_for_within_the_deadline() -> None:
    def act(rank: int, ranks: DistributedRanks) -> None:
        if rank == 0:
            ranks.add_up(torch.zeros(3))

    with pytest.raises(RankFailed) as caught:
        run_ranks(Grid(2, 1), act, timeout_s=0.5)
    assert "gone or too late" in str(caught.value) and "\n" not in str(caught.value)


def test_after_an_abort_nothing_is_waited_for() -> None:
    def act(rank: int, ranks: DistributedRanks) -> None:
        ranks.abort()
        with pytest.raises(RankFailed):
            ranks.add_up(torch.zeros(3))

    run_ranks(Grid(2, 1), act)


class _Group:
    """NCCL's, as far as its end is concerned: it parts when no graph is left."""

    def __init__(self) -> None:
        self.graphs_are_gone = threading.Event()
        self.num_aborts = 0
        self.has_parted = False

    def abort(self) -> None:
        self.num_aborts += 1
        assert self.graphs_are_gone.wait(20)
        self.has_parted = True
        raise RuntimeError("NCCL error: the peer has parted before")


def test_an_abort_does_not_wait_for_graphs_and_an_end_waits_a_bounded_time() -> None:
    """Whoever sees a rank die aborts while the graph that waits for it still runs."""
    for graphs_go in (True, False):
        part_s = 20.0 if graphs_go else 0.05
        ranks, group = DistributedRanks(Grid(2, 1), 0, "cuda:0", 1.0, part_s=part_s), _Group()
        ranks._shares = group
        ranks.abort()
        ranks.abort()
        assert not group.has_parted
        if graphs_go:
            group.graphs_are_gone.set()
        ranks.close()
        assert (group.num_aborts, group.has_parted) == (1, graphs_go)
        group.graphs_are_gone.set()
        for thread in ranks._parting:
            thread.join(20)


def test_an_end_lets_the_graphs_go_before_the_ranks_part() -> None:
    ended: list[str] = []
    model = ParallelModel.__new__(ParallelModel)
    model._processes = SimpleNamespace(close=lambda: ended.append("processes"))  # type: ignore[assignment]
    model._finalizer = lambda: ended.append("ranks")  # type: ignore[assignment, method-assign]
    model.ahead = SimpleNamespace(close=lambda: ended.append("graphs"))  # type: ignore[assignment]
    model.close()
    assert ended == ["processes", "graphs", "ranks"]


_OUTLIVED = """
import gc, os, socket, threading, torch
from engine.errors import RankFailed
from engine.parallel.rank_grid import Grid
from engine.parallel.distributed_ranks import DistributedRanks

held, meeting_file = [], os.memfd_create("meeting")

def go(rank):
    ranks = DistributedRanks(Grid(2, 1), rank, "cpu", 0.5)
    ranks.form(meeting_file)
    try:
        if rank == 0:
            ranks.add_up(torch.zeros(3))
    except RankFailed as error:
        held.append(error)
    ranks.close()

gc.disable()
threads = [threading.Thread(target=go, args=(rank,)) for rank in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
os.close(meeting_file)
assert held
sockets = [socket.socket() for _ in range(64)]  # they get the numbers of files that were closed
held.clear()
gc.collect()
print("alive")
"""


def test_an_error_that_outlives_its_ranks_does_not_end_the_process() -> None:
    """It holds on to what they met in, which looks for its file when it goes."""
    ended = subprocess.run(
        [sys.executable, "-c", _OUTLIVED], capture_output=True, text=True, timeout=60
    )
    assert ended.stdout == "alive\n", ended.stderr[-2000:]
