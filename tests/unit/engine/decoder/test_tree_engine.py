"""An engine that guesses over our decoder's inputs and graphs: what a step is cut into, padded to
and put back together from, to the token. The decoder itself is a fake that finds what each row sees
by the step's tensors alone."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from engine.batch import Batch
from engine.decoder.inputs import MixedInputs, mixed_inputs, singles_first
from engine.decoder.plain_graphs import PlainGraphs
from engine.decoder.step_graphs import StepGraphs
from engine.decoder.tree_graphs import TreeGraphs
from engine.kv.memory import KvMemory
from engine.testing.fake_model import FakeModel
from tests.harness.workloads import (
    SIZE,
    VOCAB,
    WINDOW,
    Bench,
    disturbed,
    small_engine,
    undisturbed,
    workload,
)
from tests.unit.engine.speculation.test_manager import GuessingBench, KnowsTheAnswers

CPU = torch.device("cpu")


class FakeByTensors(FakeModel):
    """A FakeModel that is given what our decoder is given. `num_graphs`: steps with guesses that a
    graph took, or two."""

    def __init__(self, max_num_nodes: int) -> None:
        super().__init__(context_window=WINDOW, block_size=SIZE)
        self.num_graphs = 0
        self._max_num_nodes = max_num_nodes

    def attach(self, memory: KvMemory) -> None:
        super().attach(memory)
        common = {"context_window": WINDOW, "block_size": SIZE, "device": CPU}
        self._graphs = PlainGraphs(
            StepGraphs(self._compute, max_singles=6, max_tokens=40, **common),  # type: ignore[arg-type]
            TreeGraphs(
                self._compute,
                max_sequences=5,
                max_num_nodes=self._max_num_nodes,
                max_rows=32,
                **common,  # type: ignore[arg-type]
            ),
        )
        self._graphs.capture()

    def forward(self, batch: Batch) -> torch.Tensor:
        if batch.wants_hidden:
            return super().forward(batch)
        ordered = singles_first(batch)
        logits = self._graphs.verify(batch)
        if logits is None:
            logits = self._graphs.run(ordered)
        self.num_graphs += logits is not None and len(batch.draw_indices) > len(batch.spans)
        return self._compute(mixed_inputs(ordered, CPU)) if logits is None else logits

    def _compute(self, inputs: MixedInputs) -> torch.Tensor:
        """Logits [R, V] of the rows that are drawn from; 0 of padding."""
        cells = self._cells()
        slots = inputs.positions if inputs.slots is None else inputs.slots
        tables = inputs.block_tables
        seen = _seen(inputs)
        for row, position in enumerate(inputs.positions.tolist()):
            if position >= 0:
                slot = int(slots[row])
                block = tables[inputs.sequence_ids[row], slot // SIZE]
                cells[block, 0, slot % SIZE] = float(inputs.token_ids[row])
                cells[block, 1, slot % SIZE] = float(position)
        wanted = range(inputs.num_rows)
        if inputs.draw_indices is not None:
            wanted = inputs.draw_indices.tolist()  # type: ignore[assignment]
        logits = torch.zeros(len(wanted), self.info.vocab_size)
        for at, row in enumerate(wanted):
            if inputs.positions[row] < 0:
                continue
            blocks = tables[inputs.sequence_ids[row]].long()
            own = torch.tensor(seen[row])
            history = cells[blocks[own // SIZE], :, own % SIZE].t().contiguous().numpy().tobytes()
            logits[at] = self._logits(history, int(inputs.token_ids[row]))
        return logits


def _seen(inputs: MixedInputs) -> dict[int, list[int]]:
    """Slots that each row sees, as the kernels are told."""
    found = {row: list(range(end)) for row, end in enumerate(inputs.ends.tolist())}
    firsts = inputs.query_starts.tolist()
    for index, start in enumerate(inputs.starts.tolist()):
        for row in range(firsts[index], firsts[index + 1]):
            found[inputs.num_singles + row] = list(range(start + 1 + row - firsts[index]))
    trees = inputs.trees
    if trees is None:
        return found
    first_node, starts = inputs.num_rows - trees.num_nodes, trees.node_starts.tolist()
    for index, cached in enumerate(trees.num_cached.tolist()):
        for row in range(starts[index], starts[index + 1]):
            assert starts[index + 1] - starts[index] <= trees.max_num_nodes
            nodes = trees.visible[row, : starts[index + 1] - starts[index]].nonzero()[:, 0]
            found[first_node + row] = [*range(cached), *(nodes + cached).tolist()]
            assert int(inputs.positions[first_node + row]) == cached + int(trees.depths[row])
    return found


def test_random_workloads_end_as_without_guesses(seed: int, scale: Callable[[int], int]) -> None:
    """100 workloads: some steps in one graph, some in two, some in none."""
    num_kept = num_graphs = 0
    for index in range(scale(100)):
        rng = random.Random(f"trees {seed} {index}")
        requests = workload(rng, Bench())
        expected = undisturbed(requests, Bench())
        model = FakeByTensors(max_num_nodes=rng.choice([5, 10]))
        proposer = KnowsTheAnswers(rng, expected, VOCAB)
        bench = GuessingBench(make_model=lambda model=model: model, proposer=proposer)
        engine = small_engine(rng, bench)
        assert disturbed(engine, requests, rng, expected) == expected
        num_kept += engine.metrics().num_kept_tokens
        num_graphs += model.num_graphs
    assert num_kept > 0 and num_graphs > 0
