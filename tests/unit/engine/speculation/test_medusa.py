"""MedusaProposer: what heads propose is what the paper says of their weights."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.models.interface import LoadedModel
from engine.request import Sampling
from engine.speculation.medusa import MedusaProposer, product_tree
from engine.speculation.proposer import DraftTask, HiddenStates
from tests.harness.models import Tiny
from tests.harness.published_heads import (
    HIDDEN,
    VOCAB,
    medusa_logits,
    medusa_tensors,
    save_medusa,
)
from tests.unit.engine.speculation.head_trees import (
    check_tree,
    load_head,
    make_task,
    noisy_scores,
)


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
    head = load_head(config, model, save_medusa(tmp_path / "m", tensors), expansion=(3, 2, 2))
    assert isinstance(head, MedusaProposer)
    tasks: list[DraftTask] = []
    seen: dict[str, tuple[int, torch.Tensor]] = {}
    for index, num_forced in enumerate((0, 1, 2, 3, 0)):
        sampling = Sampling(max_tokens=9, temperature=rng.choice([0.0, 0.7]), seed=index)
        num_computed = rng.randint(1, 5)
        hidden = torch.randn(num_computed, HIDDEN, generator=numbers)
        token_ids = [rng.randrange(VOCAB) for _ in range(num_computed + 1 + num_forced)]
        name = f"r{index}"
        head.feed_hidden_states([HiddenStates((name, 0), token_ids, 0, hidden)])
        tasks.append(make_task(name, token_ids, num_nodes=50, sampling=sampling))
        seen[name] = num_forced, hidden[-1]
    tasks.append(make_task("unknown", [1, 2], num_nodes=9, sampling=Sampling(max_tokens=9)))
    own_head = target.oracle.get_output_embeddings().weight.detach()
    drafts = dict(zip([task.key[0] for task in tasks], head.propose(tasks), strict=True))
    assert not len(drafts["unknown"].tree)
    assert [len(drafts[f"r{index}"].tree) for index in range(5)] == [3 + 6 + 12, 3 + 6, 3, 0, 21]
    for task in tasks[:5]:
        num_forced, hidden = seen[task.key[0]]

        def scores(path: tuple[int, ...], task=task, forced=num_forced, hidden=hidden):  # type: ignore[no-untyped-def]
            logits = medusa_logits(tensors, forced + len(path), hidden[None], own_head)[0]
            return noisy_scores(logits, task, len(path))

        check_tree(drafts[task.key[0]].tree, scores, (3, 2, 2))
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
