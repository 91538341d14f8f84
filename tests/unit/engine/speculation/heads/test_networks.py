"""What heads guess is what the papers say of their weights: whatever tokens were seen in whatever
steps, whoever guessed beside, and whatever was lost meanwhile."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from dataclasses import replace as with_fields
from pathlib import Path
from typing import Any

import pytest
import torch
from baton_kernels import noise

from engine.config import EngineConfig
from engine.models.interface import LoadedModel
from engine.request import Sampling
from engine.speculation.config import SpeculationConfig
from engine.speculation.drafter import Task
from engine.speculation.heads.eagle import EagleHead
from engine.speculation.heads.hidden import Computed
from engine.speculation.heads.load import load_heads
from engine.speculation.heads.medusa import MedusaHeads, product_tree
from engine.speculation.tree import ROOT, TokenTree
from tests.harness.models import Tiny
from tests.harness.published_eagle3 import (
    LAYERS,
    eagle3_feature,
    eagle3_logits,
    eagle3_out,
    eagle3_tensors,
    save_eagle3,
)
from tests.harness.published_heads import (
    HIDDEN,
    VOCAB,
    eagle_features,
    eagle_tensors,
    medusa_logits,
    medusa_tensors,
    save_eagle,
    save_medusa,
)

Scores = Callable[[tuple[int, ...]], torch.Tensor]
"""Of what follows a path: [V], noise included."""


def _load(config: EngineConfig, model: LoadedModel, folder: Path, **fields: object) -> object:
    speculation = SpeculationConfig(draft_heads=(str(folder),), **fields)  # type: ignore[arg-type]
    (head,) = load_heads(with_fields(config, speculation=speculation), model)
    return head


def _task(name: str, token_ids: Sequence[int], *, num_nodes: int, sampling: Sampling) -> Task:
    return Task((name, 0), list(token_ids), 1, sampling, 0, num_nodes)


def _scores(logits: torch.Tensor, task: Task, ahead: int) -> torch.Tensor:
    """As plain decoding would compare them."""
    if task.sampling.temperature == 0.0:
        return logits
    keys = noise.row_keys([task.sampling.seed], [task.sample_index], [len(task.token_ids) + ahead])
    found = noise.gumbel(torch.from_numpy(keys)[:, None], torch.arange(VOCAB)[None])[0]
    return logits / task.sampling.temperature + found


def _check(tree: TokenTree, scores: Scores, widths: Sequence[int]) -> None:
    """Every node is one of the best of its parent, with the belief that its scores give it. Ties
    and rounding apart, by which another token may come first."""
    for parent in (ROOT, *range(len(tree))):
        children = tree.children.get(parent, {})
        if not children:
            continue
        path = tuple(tree.token_ids[node] for node in tree.path(parent))
        own = scores(path)
        assert len(children) <= widths[len(path)]
        worst = own.sort(descending=True).values[len(children) - 1]
        shares = own.softmax(0)
        above = 1.0 if parent == ROOT else tree.chances[parent]
        for token_id, node in children.items():
            assert own[token_id] >= worst - 1e-3
            assert tree.chances[node] == pytest.approx(above * float(shares[token_id]), abs=1e-4)


@pytest.fixture
def rng(seed: int) -> random.Random:
    return random.Random(f"heads {seed}")


@pytest.fixture
def numbers(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed % 2**40)


@pytest.mark.parametrize("has_projections", [True, False])
def test_medusa_heads_guess_by_the_newest_hidden_state(
    *,
    config: EngineConfig,
    model: LoadedModel,
    target: Tiny,
    tmp_path: Path,
    rng: random.Random,
    numbers: torch.Generator,
    has_projections: bool,
) -> None:
    """The target's own head where they have no projections. One task has tokens that a grammar
    forced behind the newest one computed: its first heads are passed over."""
    tensors = medusa_tensors(has_projections=has_projections)
    head = _load(config, model, save_medusa(tmp_path / "m", tensors), expansion=(3, 2, 2))
    assert isinstance(head, MedusaHeads)
    tasks: list[Task] = []
    seen: dict[str, tuple[int, torch.Tensor]] = {}
    for index, num_forced in enumerate((0, 1, 2, 3, 0)):
        sampling = Sampling(max_tokens=9, temperature=rng.choice([0.0, 0.7]), seed=index)
        num_computed = rng.randint(1, 5)
        hidden = torch.randn(num_computed, HIDDEN, generator=numbers)
        token_ids = [rng.randrange(VOCAB) for _ in range(num_computed + 1 + num_forced)]
        name = f"r{index}"
        head.see([Computed((name, 0), token_ids, 0, hidden)])
        tasks.append(_task(name, token_ids, num_nodes=50, sampling=sampling))
        seen[name] = num_forced, hidden[-1]
    tasks.append(_task("unknown", [1, 2], num_nodes=9, sampling=Sampling(max_tokens=9)))
    own_head = target.oracle.get_output_embeddings().weight.detach()
    drafts = dict(zip([task.key[0] for task in tasks], head.propose(tasks), strict=True))
    assert not len(drafts["unknown"].tree)
    assert [len(drafts[f"r{index}"].tree) for index in range(5)] == [3 + 6 + 12, 3 + 6, 3, 0, 21]
    for task in tasks[:5]:
        num_forced, hidden = seen[task.key[0]]

        def scores(path: tuple[int, ...], task=task, forced=num_forced, hidden=hidden):  # type: ignore[no-untyped-def]
            logits = medusa_logits(tensors, forced + len(path), hidden[None], own_head)[0]
            return _scores(logits, task, len(path))

        _check(drafts[task.key[0]].tree, scores, (3, 2, 2))
    head.forget(tasks[0].key)
    assert not len(head.propose(tasks[:1])[0].tree)


def test_the_likeliest_nodes_of_a_product_are_taken(rng: random.Random) -> None:
    for _ in range(50):
        places = [
            sorted(
                ((token, rng.random()) for token in rng.sample(range(9), rng.randint(1, 3))),
                key=lambda child: -child[1],
            )
            for _ in range(rng.randint(0, 3))
        ]
        all_of_it = product_tree(places, 1000)
        widths = [len(place) for place in places]
        assert len(all_of_it) == sum(
            torch.tensor(widths[: depth + 1]).prod().item() for depth in range(len(widths))
        )
        some = product_tree(places, 5)
        assert len(some) == min(5, len(all_of_it))
        assert sorted(some.chances) == pytest.approx(sorted(all_of_it.best(5).chances))


@dataclass
class _Sequence:
    """One that a target computes, step by step."""

    task: Task
    hidden: torch.Tensor
    """[n, hidden] of all its tokens, as if computed."""
    num_computed: int
    first: int
    """Where the head's window begins."""
    layers: dict[int, torch.Tensor]
    """[n, hidden] by layer: what went into it."""
    is_new: bool = True
    skips: bool = False
    """One token, in its second step: computed elsewhere."""

    def computed(self, start: int, end: int) -> Computed:
        layers = {layer: rows[start:end] for layer, rows in self.layers.items()}
        known = self.task.token_ids[: end + 1]
        return Computed(self.task.key, known, start, self.hidden[start:end], layers)


def _steps(rng: random.Random, one: _Sequence) -> Iterator[int]:
    left = len(one.task.token_ids) - 1 - one.num_computed
    while left:
        count = rng.randint(1, left)
        if one.skips:
            count = max(2, left // 2)
        left -= count
        yield count


@dataclass(frozen=True)
class _Kind:
    """A head's format, and what the paper says of one."""

    save: Callable[[Path], Path]
    features: Callable[[_Sequence], torch.Tensor]
    """[n, own size] of all that was computed."""
    out: Callable[..., torch.Tensor]
    """(embedding, token ids, features, first) -> [n, own size] that come out."""
    logits: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """(target's head, one row that came out) -> [V]"""


def _eagle(num_layers: int) -> _Kind:
    tensors = eagle_tensors(num_layers)
    return _Kind(
        lambda folder: save_eagle(folder, tensors, num_hidden_layers=num_layers),
        lambda one: one.hidden,
        lambda *given: eagle_features(tensors, *given, num_layers),
        lambda own_head, row: own_head @ row,
    )


def _eagle3(own_size: int, *, adds_normed: bool) -> _Kind:
    """With sizes and an embedding of its own, if its size is not the target's."""
    tensors = eagle3_tensors(own_size=own_size)
    own = tensors.get("embed_tokens.weight")

    def out(embedding: torch.Tensor, *given: Any) -> torch.Tensor:
        embedding = embedding if own is None else own
        return eagle3_out(tensors, embedding, *given, adds_normed=adds_normed)

    fields = {"hidden_size": own_size, "norm_before_residual": adds_normed}
    return _Kind(
        lambda folder: save_eagle3(folder, tensors, **fields),
        lambda one: eagle3_feature(tensors, one.layers),
        out,
        lambda _, row: eagle3_logits(tensors, row),
    )


@pytest.mark.parametrize(
    ("kind", "max_num_tokens"),
    [
        (_eagle(1), 64),
        (_eagle(2), 3),
        (_eagle3(HIDDEN, adds_normed=False), 64),
        (_eagle3(30, adds_normed=True), 3),
    ],
    ids=["eagle", "eagle of two layers", "eagle3", "eagle3 of its own size"],
)
def test_an_eagle_head_guesses_by_its_window(
    *,
    config: EngineConfig,
    model: LoadedModel,
    target: Tiny,
    tmp_path: Path,
    rng: random.Random,
    numbers: torch.Generator,
    kind: _Kind,
    max_num_tokens: int,
    scale: Callable[[int], int],
) -> None:
    """Hidden states come in pieces, from any place on; one sequence lacks one amid them, and its
    window begins behind."""
    folder = kind.save(tmp_path / "e")
    small = with_fields(config, max_num_tokens_per_step=max_num_tokens, max_num_running=3)
    head = _load(small, model, folder, expansion=(2, 2, 1))
    assert isinstance(head, EagleHead)
    embedding = target.oracle.get_input_embeddings().weight.detach()
    own_head = target.oracle.get_output_embeddings().weight.detach()
    for round_index in range(scale(20)):
        sequences = [_sequence(f"{round_index} {index}", rng, numbers) for index in range(3)]
        lacking = sequences[0] = _sequence(f"{round_index} 0", rng, numbers, num_tokens=9)
        lacking.num_computed, lacking.first, lacking.skips = 0, 0, True
        waiting = [(one, iter(list(_steps(rng, one)))) for one in sequences]
        while waiting:
            seen: list[Computed] = []
            for one, steps in list(waiting):
                count = next(steps, None)
                if count is None:
                    waiting.remove((one, steps))
                    continue
                if one.skips and not one.is_new:
                    one.num_computed += 1
                    one.first, count, one.skips = one.num_computed, count - 1, False
                one.is_new = False
                start, end = one.num_computed, one.num_computed + count
                one.num_computed = end
                seen.append(one.computed(start, end))
            head.see(seen)
            head.check_integrity()
        tasks = [one.task for one in sequences]
        assert lacking.first == 5
        for one, draft in zip(sequences, head.propose(tasks), strict=True):
            assert len(draft.tree) == 2 + 4 + 4
            scores = _eagle_scores(one, kind, embedding, own_head)
            _check(draft.tree, scores, (2, 2, 1))
        again = head.propose(tasks[:1])[0].tree  # nothing of a tree was kept
        assert again.token_ids == head.propose(tasks)[0].tree.token_ids
        for task in tasks[1:]:
            head.forget(task.key)
        head.check_integrity()


def _sequence(
    name: str, rng: random.Random, numbers: torch.Generator, *, num_tokens: int = 0
) -> _Sequence:
    num_tokens = num_tokens or rng.randint(3, 30)
    sampling = Sampling(max_tokens=9, temperature=rng.choice([0.0, 0.8]), seed=num_tokens)
    token_ids = [rng.randrange(VOCAB) for _ in range(num_tokens)]
    first = rng.randint(0, num_tokens - 2)
    hidden, *inputs = torch.randn(4, num_tokens - 1, HIDDEN, generator=numbers)
    task = _task(name, token_ids, num_nodes=20, sampling=sampling)
    return _Sequence(task, hidden, first, first, dict(zip(LAYERS, inputs, strict=True)))


def _eagle_scores(
    one: _Sequence, kind: _Kind, embedding: torch.Tensor, own_head: torch.Tensor
) -> Scores:
    def scores(path: tuple[int, ...]) -> torch.Tensor:
        token_ids = [*one.task.token_ids[one.first + 1 :]]
        features = kind.features(one)[one.first :]
        for token_id in (*path, None):
            out = kind.out(embedding, token_ids, features, one.first)
            if token_id is not None:
                token_ids.append(token_id)
                features = torch.cat((features, out[-1:]))
        return _scores(kind.logits(own_head, out[-1]), one.task, len(path))

    return scores


def test_an_eagle_head_without_room_begins_anew(
    config: EngineConfig, model: LoadedModel, tmp_path: Path, numbers: torch.Generator
) -> None:
    """One context window of blocks for two sequences: who loses its blocks guesses again when it
    has seen more, and who was evicted while it guessed gives no guess."""
    small = with_fields(config, max_num_running=1)
    head = _load(small, model, save_eagle(tmp_path / "e"), expansion=(2, 1))
    assert isinstance(head, EagleHead)
    sampling = Sampling(max_tokens=9)
    hidden = torch.randn(40, HIDDEN, generator=numbers)
    token_ids = list(range(1, 42))

    def see(name: str, start: int, end: int) -> Task:
        known = token_ids[: end + 1]
        head.see([Computed((name, 0), known, start, hidden[start:end])])
        return _task(name, known, num_nodes=9, sampling=sampling)

    first = see("first", 0, 38)
    assert len(head.propose([first])[0].tree) == 4
    second = see("second", 0, 38)
    assert len(head.propose([second])[0].tree) == 4
    head.check_integrity()
    assert not len(head.propose([first])[0].tree)
    first = see("first", 38, 39)
    # A window of one entry, which fits beside nobody: only one of two can have blocks in a step.
    trees = [draft.tree for draft in head.propose([first, second])]
    head.check_integrity()
    assert sorted(len(tree) for tree in trees) == [0, 4]
    assert len(head.propose([see("first", 39, 40)])[0].tree) == 4
