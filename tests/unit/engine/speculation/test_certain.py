"""Under the multi-step rule, those who guess without drawing: draft heads and draft workers, whose
tokens are certain to be proposed. Through the engine's own path each token of an answer has the
distribution of plain decoding. A wrong rule must fail the same test, and so must who proposes by
the random numbers that judge. False alarms: drawn_answers.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.request import Sampling
from engine.speculation import acceptance
from engine.speculation.acceptance import Distribution, Proposal, Proposals, judge
from engine.speculation.config import SpeculationConfig
from engine.speculation.draft_fake import FakeDraftChannel
from engine.speculation.draft_port import About, DraftPeer
from engine.speculation.draft_sessions import DraftSessions
from engine.speculation.drafter import Drafter, Task
from engine.speculation.drawing import random_key
from engine.speculation.heads.load import load_heads
from engine.speculation.remote import RemoteDrafter
from tests.harness import draft_workers as bench
from tests.harness.published_heads import save_eagle, save_medusa
from tests.unit.engine.speculation.drawn_answers import (
    LIMIT,
    NUM_TOKENS,
    VOCAB,
    answer,
    draft_model_of,
    likelihood,
    make_engine,
    requests_of,
    world,
)
from tests.unit.engine.speculation.markov import HIDDEN_SIZE, MarkovModel, Table, Tally

Make = Callable[[MarkovModel, Table, Path], list[Drafter]]


def _matrix(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _heads(model: MarkovModel, folder: Path, *expansion: int) -> list[Drafter]:
    speculation = SpeculationConfig(
        draft_heads=(str(folder),), expansion=expansion, acceptance="multi_step"
    )
    config = EngineConfig(num_blocks=64, max_num_running=32, speculation=speculation)
    return load_heads(config, model)


def _medusa(model: MarkovModel, own: Table, folder: Path) -> list[Drafter]:
    """Two heads: token 0, and one by the hidden state."""
    tensors = {f"{head}.0.linear.weight": _matrix(HIDDEN_SIZE, HIDDEN_SIZE) for head in range(2)}
    for head in range(2):
        tensors[f"{head}.0.linear.bias"] = torch.full((HIDDEN_SIZE,), 10.0)
        tensors[f"{head}.1.weight"] = _matrix(VOCAB, HIDDEN_SIZE) * 0.1
        tensors[f"{head}.1.weight"][0] += 5.0
    fields = {"medusa_num_heads": 2, "medusa_num_layers": 1}
    return _heads(model, save_medusa(folder / "medusa", tensors, **fields), 2, 1)


def _eagle(model: MarkovModel, own: Table, folder: Path) -> list[Drafter]:
    """Token 0, and one by all that it has seen."""
    size = HIDDEN_SIZE
    layer = "layers.0"
    towards = model.ends.head(torch.eye(size))[:, 0]
    tensors = {"fc.weight": _matrix(size, 2 * size) * 0.3, "fc.bias": 10.0 * towards}
    tensors |= {f"{layer}.self_attn.{name}_proj.weight": _matrix(size, size) for name in "qkvo"}
    tensors |= {f"{layer}.mlp.{name}_proj.weight": _matrix(size, size) for name in ("gate", "up")}
    tensors[f"{layer}.self_attn.o_proj.weight"] = _matrix(size, size) * 0.3
    tensors[f"{layer}.mlp.down_proj.weight"] = _matrix(size, size) * 0.3
    tensors[f"{layer}.post_attention_layernorm.weight"] = _matrix(size)
    fields = {"hidden_size": size, "intermediate_size": size, "vocab_size": VOCAB}
    fields |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    return _heads(model, save_eagle(folder / "eagle", tensors, **fields), 2)


def _worker(model: MarkovModel, own: Table, folder: Path) -> list[Drafter]:
    sessions = DraftSessions(draft_model_of(own, 2, 1), VOCAB, bench.LIMITS)
    about = About("tables", model.info.tokenizer_digest, VOCAB)
    peer = DraftPeer(FakeDraftChannel("a:1", about, sessions))
    drafter = RemoteDrafter([peer], model.info, deadline_s=0.0, clock=bench.Clock())
    drafter.meet()
    return [drafter]


def _together(model: MarkovModel, own: Table, folder: Path) -> list[Drafter]:
    """And a draft model that draws."""
    drafters = [draft_model_of(own, 2, 1)]
    for make in (_medusa, _worker):
        drafters += make(model, own, folder)
    return drafters


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "make", [_medusa, _eagle, _worker, pytest.param(_together, marks=pytest.mark.long)]
)
def test_tokens_have_the_models_distribution(
    make: Make, seed: int, scale: Callable[[int], int], tmp_path: Path
) -> None:
    table, (own,) = world(seed, 1, 0.5)
    model = MarkovModel(table)
    engine = make_engine(model, make(model, own, tmp_path))
    requests = requests_of(scale(100_000) // NUM_TOKENS, seed)
    assert likelihood(table, requests, answer(engine, requests)) > LIMIT
    counts = engine.metrics()
    # No token of these tables is rarer than 3 %, and two are proposed.
    assert counts.num_guessed_tokens > counts.num_kept_tokens > 0.02 * counts.num_output_tokens


def _as_if_drawn(
    wanted: Distribution, tries: Sequence[Proposal], uniform: acceptance.Uniform
) -> int:
    """A certain token is taken for one that was drawn with 1 / 2."""
    for one in tries:
        if uniform() * 0.5 < wanted[one.token_id]:
            return one.token_id
        wanted = acceptance._residual(wanted, one)
    return acceptance.pick(wanted, uniform())


@pytest.mark.parametrize("make", [_medusa, _eagle, _worker])
def test_a_wrong_rule_is_found(
    make: Make, seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(acceptance, "accept", _as_if_drawn)
    table = np.full((VOCAB, VOCAB), 1 / VOCAB)
    model = MarkovModel(table)
    own = np.tile(np.arange(VOCAB, 0.0, -1.0), (VOCAB, 1)) / 15.0
    requests = requests_of(1_200 // NUM_TOKENS, seed)
    outputs = answer(make_engine(model, make(model, own, tmp_path)), requests)
    assert likelihood(table, requests, outputs) < LIMIT


@pytest.mark.parametrize("sees", [False, True])
def test_what_judges_must_not_be_seen_by_who_proposes(sees: bool, seed: int) -> None:
    """Token 0 is proposed half of the time: by other numbers, or only where it will be refused."""
    table = np.array([0.5, 0.2, 0.2, 0.1])
    tally = Tally(len(table))
    for position in range(1_000):
        key, other = (random_key(seed, position, purpose) for purpose in range(2))
        if random.Random(key if sees else other).random() >= 0.5:
            token_id = judge(table, Proposals((Proposal(0, 1.0, None),), key))
        else:
            token_id = acceptance.pick(table, random.Random(f"plain {key}").random())
        tally.add("all", token_id, table)
    assert (tally.likelihood() < LIMIT) is sees


def test_a_draft_workers_tokens_come_of_no_random_numbers(seed: int) -> None:
    """Where the target's own noise is not what draws, the likeliest are the best to propose."""
    table, (own,) = world(seed, 1, 0.5)
    (drafter,) = _worker(MarkovModel(table), own, Path())
    trees = set()
    for number in range(20):
        sampling = Sampling(max_tokens=9, temperature=0.9, seed=(seed + number) % 2**64)
        task = Task(("r", number), [1, 2], 2, sampling, 0, 6, is_drawn=True)
        drafter.propose([task])
        trees.add(drafter.propose([task])[0].tree.token_ids)
    likeliest = np.argsort(-own[3 % VOCAB])[:2].tolist()
    (found,) = trees
    assert found[::2] == tuple(likeliest)
