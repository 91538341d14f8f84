"""Token trees in our own decoder: every node has the logits of its own path, by itself and in a
padded step; and what a step is cut into for it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from engine.batch import Batch, TokenSpan
from engine.decoder.inputs import mixed_inputs, singles_first
from engine.decoder.plain_graphs import PlainGraphs
from engine.decoder.step_graphs import StepGraphs
from engine.decoder.tree_graphs import (
    MAX_COPIED_TABLES,
    TreeGraphs,
    TreeShape,
    max_exact_trees,
    reserved_bytes,
    tree_shapes,
)
from engine.decoder.tree_inputs import cut_trunks, topology
from engine.kv.memory import KvMemory
from engine.models.interface import Guesses
from engine.models.llama import LlamaModel
from tests.unit.engine.decoder.small_decoder import BLOCK, DEVICES, WINDOW, small_model

NUM_BLOCKS = 200
MAX_NODES = 12
"""Rows of one sequence in a padded step, at most."""


def _branches(rng: random.Random, num_nodes: int) -> tuple[int, ...]:
    """A random tree, depth first."""
    parents: list[int] = []
    path = [-1]
    for node in range(num_nodes):
        del path[rng.randint(1, len(path)) :]
        parents.append(path[-1])
        path.append(node)
    return tuple(parents)


def _batch(rng: random.Random, kinds: Sequence[str], *, draws_all: bool = False) -> Batch:
    """Spans of these kinds: "one", "chunk", "chain", "tree", "late" (a tree on several tokens)."""
    order = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    spans: list[TokenSpan] = []
    token_ids: list[int] = []
    draws: list[int] = []
    for kind in kinds:
        trunk = {"chunk": rng.randrange(MAX_NODES + 1, 30), "late": rng.randrange(2, 4)}.get(
            kind, 1
        )
        num_nodes = {"tree": rng.randrange(2, MAX_NODES), "late": rng.randrange(2, MAX_NODES - 3)}
        branches = _branches(rng, num_nodes.get(kind, 0))
        if kind == "chain":
            trunk = rng.randrange(2, MAX_NODES)
        length = trunk + len(branches)
        start = rng.choice([0, rng.randrange(WINDOW - length)])
        count = -(-(start + length) // BLOCK)
        blocks, order = tuple(order[:count]), order[count:]
        spans.append(TokenSpan(start, length, blocks, branches=branches))
        first = len(token_ids)
        token_ids += [rng.randrange(211) for _ in range(length)]
        is_guessed = kind in ("chain", "tree", "late") or draws_all
        first_drawn = length - 1 if not is_guessed else trunk - 1 if branches else 0
        draws += range(first + first_drawn, first + length)
    return Batch(tuple(token_ids), tuple(spans), tuple(draws))


def _elsewhere(rng: random.Random, batch: Batch, *, as_before: bool) -> Batch:
    """Other tokens, at other places, as many of each sequence, half of them in the same blocks,
    the others in other ones; `as_before`: in the same trees."""
    staying = [rng.random() < 0.5 for _ in batch.spans]
    kept = {
        block
        for span, stays in zip(batch.spans, staying, strict=True)
        if stays
        for block in span.block_ids
    }
    order = [block for block in rng.sample(range(NUM_BLOCKS), NUM_BLOCKS) if block not in kept]
    spans: list[TokenSpan] = []
    for span, stays in zip(batch.spans, staying, strict=True):
        if stays:
            end = rng.randrange((len(span.block_ids) - 1) * BLOCK, len(span.block_ids) * BLOCK) + 1
            start, blocks = max(min(end, WINDOW) - span.num_tokens, 0), span.block_ids
        else:
            start = rng.randrange(WINDOW - span.num_tokens)
            count = -(-(start + span.num_tokens) // BLOCK)
            blocks, order = tuple(order[:count]), order[count:]
        branches = span.branches if as_before else _branches(rng, len(span.branches))
        spans.append(span._replace(start=start, block_ids=blocks, branches=branches))
    token_ids = tuple(rng.randrange(211) for _ in batch.token_ids)
    return replace(batch, token_ids=token_ids, spans=tuple(spans))


def _memory(model: LlamaModel, batch: Batch, seed: int) -> KvMemory:
    """What sequences have cached is there; all the rest is NaN."""
    memory = KvMemory(model.layout, NUM_BLOCKS, model.info.device)
    memory.cache.fill_(torch.nan)
    generator = torch.Generator().manual_seed(seed)
    for span in batch.spans:
        for slot in range(span.start):
            block = memory.cache[span.block_ids[slot // BLOCK]]
            block[..., slot % BLOCK, :] = torch.randn(block[..., 0, :].shape, generator=generator)
    return memory


def _by_paths(model: LlamaModel, batch: Batch, seed: int) -> list[torch.Tensor]:
    """Logits of each draw: the tokens that it sees, as a text of their own."""
    logits = []
    first = 0
    for span in batch.spans:
        trunk = span.num_tokens - len(span.branches)
        for row in range(span.num_tokens):
            if first + row not in batch.draw_indices:
                continue
            seen = [slot - span.start for slot in span.slots_seen(row) if slot >= span.start]
            text = tuple(batch.token_ids[first + at] for at in seen)
            assert trunk <= len(text) or row < trunk
            model.attach(_memory(model, batch, seed))
            alone = span._replace(num_tokens=len(text), branches=())
            logits.append(model.forward(Batch(text, (alone,), (len(text) - 1,)))[0].clone())
        first += span.num_tokens
    return logits


def test_a_topology_is_what_the_span_says(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        trunk, branches = rng.randrange(1, 5), _branches(rng, rng.randrange(9))
        span = TokenSpan(rng.randrange(40), trunk + len(branches), (), branches=branches)
        found = topology(span.num_tokens, branches)
        assert (found.depths + span.start).tolist() == span.positions
        for row in range(span.num_tokens):
            own = [span.start + node for node in found.visible[row].nonzero()[0].tolist()]
            assert [*range(span.start), *own] == span.slots_seen(row)


def _rows(batch: Batch) -> list[tuple[int, int, int, tuple[int, ...], tuple[int, ...]]]:
    """Of each row: token, slot, position, what it sees, its blocks."""
    rows = []
    token_ids = iter(batch.token_ids)
    for span in batch.spans:
        for row, position in enumerate(span.positions):
            seen = tuple(span.slots_seen(row))
            rows.append((next(token_ids), span.start + row, position, seen, span.block_ids))
    return rows


def test_every_row_stays_itself(seed: int) -> None:
    """Trees are cut off the tokens before them, and come last."""
    rng = random.Random(seed)
    for _ in range(50):
        kinds = rng.choices(["one", "chunk", "chain", "tree", "late"], k=rng.randrange(1, 6))
        batch = _batch(rng, kinds)
        ordered = singles_first(batch)
        before, after = _rows(batch), _rows(ordered)
        assert sorted(before) == sorted(after)
        assert [before[row] for row in batch.draw_indices] == [
            after[row] for row in ordered.draw_indices
        ]
        order = [(len(span.branches) > 0, span.num_tokens > 1) for span in ordered.spans]
        assert order == sorted(order)
        for span in ordered.spans:
            assert len(span.branches) in (0, span.num_tokens - 1)
        inputs = mixed_inputs(ordered, torch.device("cpu"))
        assert inputs.positions.tolist() == [position for _, _, position, _, _ in after]
        slots = inputs.positions if inputs.slots is None else inputs.slots
        assert slots.tolist() == [slot for _, slot, _, _, _ in after]
        assert inputs.num_trees == sum(len(span.branches) > 0 for span in ordered.spans)
    with pytest.raises(ValueError, match="do not come last"):
        mixed_inputs(
            Batch((1,) * 5, (TokenSpan(0, 3, (0,), branches=(-1, -1)), TokenSpan(4, 2, (1,))), ()),
            torch.device("cpu"),
        )


def test_one_path_is_a_chunk() -> None:
    batch = Batch((1, 2, 3), (TokenSpan(4, 3, (1,), branches=(-1, 0)),), (0, 1, 2))
    assert cut_trunks(batch).spans == (TokenSpan(4, 3, (1,)),)


@pytest.mark.parametrize("device", DEVICES)
def test_a_node_has_the_logits_of_its_path(
    device: str, seed: int, scale: Callable[[int], int]
) -> None:
    """40 steps of decodes, chunks, chains and trees; the KV of nodes is in the next slots."""
    rng = random.Random(seed)
    model = small_model(device, torch.float32, seed)
    assert model.guesses is Guesses.TREES
    for index in range(scale(40)):
        kinds = rng.choice(
            [["tree"], ["one", "tree", "chunk"], ["late", "one"], ["chain", "tree", "tree", "late"]]
        )
        batch = _batch(rng, kinds)
        expected = _by_paths(model, batch, seed + index)
        memory = _memory(model, batch, seed + index)
        model.attach(memory)
        found = model.forward(batch)
        torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-4)
        for span in batch.spans:
            for slot in range(len(span.block_ids) * BLOCK):
                numbers = memory.cache[span.block_ids[slot // BLOCK]][..., slot % BLOCK, :]
                assert bool(numbers.isfinite().all()) == (slot < span.end)


def _graphs(
    model: LlamaModel,
    memory: KvMemory,
    max_rows: int = 64,
    max_trees: int | None = None,
    copies_tables: bool = True,
) -> PlainGraphs:
    device = torch.device(model.info.device)
    steps = StepGraphs(
        model.decoder.forward, max_singles=8, max_tokens=64,
        context_window=WINDOW, block_size=BLOCK, device=device,
    )  # fmt: skip
    trees = TreeGraphs(
        model.decoder.forward, max_sequences=6, max_num_nodes=MAX_NODES, max_rows=max_rows,
        context_window=WINDOW, block_size=BLOCK, device=device, max_trees=max_trees,
        max_copied_tables=MAX_COPIED_TABLES if copies_tables else 0,
    )  # fmt: skip
    model.attach(memory)
    return PlainGraphs(steps, trees)


def _run(graphs: PlainGraphs, batch: Batch) -> torch.Tensor | None:
    """As the model does."""
    logits = graphs.verify(batch)
    return graphs.run(singles_first(batch)) if logits is None else logits


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("copies_tables", [True, False])
def test_a_padded_step_is_the_step(
    device: str,
    copies_tables: bool,
    seed: int,
    scale: Callable[[int], int],
) -> None:
    """100 steps, of which some have a long chunk, too, and many have the form of the one before, or
    nearly so (tree_words.py); the KV is that of the step as it is."""
    rng = random.Random(seed)
    model = small_model(device, torch.float32, seed)
    memory = KvMemory(model.layout, NUM_BLOCKS, device)
    graphs = _graphs(model, memory, copies_tables=copies_tables)
    graphs.capture()
    choices = [["tree"], ["chain"], ["one", "tree", "one"], ["late", "one"], ["tree"] * 4]
    choices += [["chunk", "tree"], ["one", "chain", "chunk"]]
    batch = _batch(rng, rng.choice(choices))
    for index in range(scale(100)):
        if rng.random() < 0.4:
            batch = _batch(rng, rng.choice(choices))
        else:
            batch = _elsewhere(rng, batch, as_before=rng.random() < 0.7)
        expected_memory = _memory(model, batch, seed + index)
        memory.cache.copy_(expected_memory.cache)
        model.attach(memory)  # graphs keep its address
        found = _run(graphs, batch)
        assert found is not None and graphs.num_missed == 0
        found = found.clone()
        model.attach(expected_memory)
        expected = model.forward(batch)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            memory.cache, expected_memory.cache, rtol=1e-4, atol=1e-4, equal_nan=True
        )


@pytest.mark.parametrize("device", DEVICES)
def test_steps_of_many_sequences_may_be_chunks(
    device: str, seed: int, scale: Callable[[int], int]
) -> None:
    """20 steps; a tree among several sequences is not taken then."""
    rng = random.Random(seed)
    model = small_model(device, torch.float32, seed)
    memory = KvMemory(model.layout, NUM_BLOCKS, device)
    graphs = _graphs(model, memory, max_trees=1)
    graphs.capture()
    for index in range(scale(20)):
        batch = _batch(rng, rng.choice([["chain"] * 3, ["one", "chain"], ["chain"], ["tree"]]))
        expected_memory = _memory(model, batch, seed + index)
        memory.cache.copy_(expected_memory.cache)
        model.attach(memory)
        found = graphs.verify(batch)
        assert found is not None
        found = found.clone()
        model.attach(expected_memory)
        torch.testing.assert_close(found, model.forward(batch), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            memory.cache, expected_memory.cache, rtol=1e-4, atol=1e-4, equal_nan=True
        )
    tree = TokenSpan(3, 3, (1,), branches=(-1, -1))
    several = Batch((1,) * 6, (tree, tree._replace(block_ids=(2,))), tuple(range(6)))
    assert graphs.verify(several) is None


@pytest.mark.parametrize("device", DEVICES)
def test_a_capture_writes_no_kv(device: str, seed: int) -> None:
    model = small_model(device, torch.bfloat16, seed)
    memory = KvMemory(model.layout, NUM_BLOCKS, device)
    memory.cache.fill_(torch.nan)
    graphs = _graphs(model, memory)
    captured = []
    graphs.capture(on_captured=lambda: captured.append(1))
    assert len(captured) == graphs.num_shapes
    assert memory.cache.isnan().all()


def test_what_no_graph_takes_is_counted(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    model = small_model("cpu", torch.float32, seed)
    graphs = _graphs(model, KvMemory(model.layout, NUM_BLOCKS, "cpu"), max_rows=16)

    def run(*spans: TokenSpan, num_draws: int | None = None) -> torch.Tensor | None:
        num_tokens = sum(span.num_tokens for span in spans)
        draws = tuple(range(num_tokens if num_draws is None else num_draws))
        return _run(graphs, Batch((1,) * num_tokens, spans, draws))

    tree = TokenSpan(3, 5, (1,), branches=(-1, -1, 0, 0))
    assert run(tree) is None and graphs.num_missed == 1, "nothing is captured yet"
    graphs.capture()
    assert run(tree) is not None
    assert run(tree, TokenSpan(0, 1, (2,)), num_draws=6) is not None
    chunk = TokenSpan(0, 20, (4, 5, 6))
    assert run(tree, chunk, num_draws=5) is not None
    assert run(TokenSpan(0, MAX_NODES + 1, (4, 5))) is not None, "a long path is a chunk"
    assert run(TokenSpan(0, 30, (4, 5, 6, 7))) is None, "of which few rows have logits"
    assert run(TokenSpan(0, 1, (2,))) is not None, "without guesses"
    assert graphs.num_missed == 2
    for spans in (
        [tree] * 4,  # rows
        [tree._replace(adapter=1)],
        [tree, tree._replace(block_ids=tuple(range(WINDOW // BLOCK + 1)))],
        [TokenSpan(0, 14, (1, 2), branches=(-1, *[0] * 12))],  # a wide one
        [tree, TokenSpan(0, 80, tuple(range(10)))],  # a chunk that no step takes
    ):
        assert run(*spans) is None
    assert graphs.num_missed == 7
    assert len([one for one in caplog.records if "fits no CUDA graph" in one.message]) == 1


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_that_is_one_graph_is_queued_at_once(device: str, seed: int) -> None:
    model = small_model(device, torch.float32, seed)
    graphs = _graphs(model, KvMemory(model.layout, NUM_BLOCKS, device), max_rows=16)
    tree, single = TokenSpan(3, 5, (1,), branches=(-1, -1, 0, 0)), TokenSpan(0, 1, (2,))

    def is_one(*spans: TokenSpan) -> bool:
        num_tokens = sum(span.num_tokens for span in spans)
        batch = Batch((1,) * num_tokens, spans, tuple(range(num_tokens)))
        assert model.queues_step(batch) == (graphs.takes(batch) and device == "cuda")
        assert not model.queues_step(replace(batch, wants_hidden=True))
        return graphs.takes(batch)

    assert not model.queues_step(Batch((1,), (single,), (0,))), "there are no graphs"
    model._graphs = graphs
    assert not is_one(tree) and not is_one(single), "nothing is captured yet"
    graphs.capture()
    assert is_one(tree) and is_one(tree, tree, tree) and is_one(tree, single) and is_one(single)
    assert not is_one(tree, tree, tree, tree), "17 rows and more"
    assert is_one(*[single] * 8) and not is_one(*[single] * 9)
    assert not is_one(single._replace(block_ids=tuple(range(WINDOW // BLOCK + 1))))
    assert not is_one(single._replace(adapter=1))
    assert not is_one(tree, TokenSpan(0, 20, (4, 5, 6))), "two graphs"


def test_shapes() -> None:
    shapes = tree_shapes(256, 17, 1024)
    assert len(shapes) == len(set(shapes)) == 50
    assert shapes[0] == (256, 1024)
    assert [shape.num_rows for shape in shapes if shape.num_sequences == 1] == [24, 16]
    assert TreeShape(4, 64) in shapes and TreeShape(4, 80) in shapes
    assert TreeShape(4, 128) not in shapes, "more than four sequences can have"
    assert TreeShape(64, 16) not in shapes, "fewer than seventeen have"
    sizes = [shape.num_rows for shape in shapes]
    assert sizes == sorted(sizes, reverse=True)
    assert tree_shapes(3, 5, 10) == [(3, 10), (1, 10)]
    assert tree_shapes(8, 65, 8192)[0] == (8, 576)


def test_bytes_that_graphs_take() -> None:
    """By hand: an 8B model's logits are most of it."""
    sizes = {"vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14336}
    most = reserved_bytes(8192, **sizes, element_bytes=2)
    assert most == 1024 * 2 * (2 * 128_256 + 4 * 4096 + 4 * 14336)
    assert reserved_bytes(512, **sizes, element_bytes=2) == most // 2


def test_exact_steps_whose_parts_are_large_are_chunks() -> None:
    """By hand, 8 kv heads of 4 query heads of 128 dimensions: a sequence's 17 rows are 2 tiles of
    64 rows for each head, 32 kB each, for each of 16 runs of positions: 8 MB."""
    sizes = SimpleNamespace(num_heads=32, num_kv_heads=8, head_dim=128)
    assert max_exact_trees(sizes, 17, 8192) == 8
    assert max_exact_trees(sizes, 16, 8192) == 16
    assert max_exact_trees(sizes, 65, 131_072) == 0


def test_exact_models_take_one_path(seed: int) -> None:
    model = small_model("cpu", torch.float32, seed)
    model.decoder.is_exact = True
    model.attach(KvMemory(model.layout, NUM_BLOCKS, "cpu"))
    assert model.guesses is Guesses.CHAINS
    tree = TokenSpan(0, 3, (0,), branches=(-1, -1))
    with pytest.raises(ValueError, match="exact: one path"):
        model.forward(Batch((1, 2, 3), (tree,), (0,)))
    path = tree._replace(branches=(-1, 0))
    assert model.forward(Batch((1, 2, 3), (path,), (2,))).shape == (1, 211)


@pytest.mark.skipif(len(DEVICES) == 1, reason="bits of our kernels; on CPU: tests/kernels")
@pytest.mark.parametrize("max_trees", [None, 1], ids=["as trees", "as chunks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_exact_chains_in_graphs_have_the_bits_of_decodes(
    dtype: torch.dtype, max_trees: int | None, seed: int, scale: Callable[[int], int]
) -> None:
    """20 steps of chains: padded, and token by token."""
    rng = random.Random(seed)
    model = small_model("cuda", dtype, seed, is_exact=True)
    memory = KvMemory(model.layout, NUM_BLOCKS, "cuda")
    graphs = _graphs(model, memory, max_trees=max_trees)
    graphs.capture()
    for index in range(scale(20)):
        batch = _batch(rng, rng.choice([["chain"], ["chain", "one", "chain"]]), draws_all=True)
        cached = _memory(model, batch, seed + index)
        memory.cache.copy_(cached.cache)
        model.attach(memory)
        found = _run(graphs, batch)
        assert found is not None
        found = found.clone()
        model.attach(cached)
        first = 0
        for span in batch.spans:
            for row in range(span.num_tokens):
                alone = span._replace(start=span.start + row, num_tokens=1)
                single = Batch((batch.token_ids[first],), (alone,), (0,))
                assert torch.equal(model.forward(single)[0], found[first])
                first += 1


def test_a_second_capture_leaves_no_form_behind(seed: int) -> None:
    """The step after it has the form of the one before it, and finds none of its words."""
    rng = random.Random(seed)
    model = small_model("cpu", torch.float32, seed)
    memory = KvMemory(model.layout, NUM_BLOCKS, "cpu")
    graphs = _graphs(model, memory)
    batch = _batch(rng, ["tree", "one"])
    before = _memory(model, batch, seed)
    model.attach(memory)
    found: list[torch.Tensor] = []
    for _ in range(2):
        graphs.capture()
        memory.cache.copy_(before.cache)
        found.append(_run(graphs, batch).clone())
    assert torch.equal(*found)
