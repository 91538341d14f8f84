"""Which path of a token tree is kept. Tokens have the distribution of plain decoding, given those
before them: by the rules alone, with a model and proposers as tables; and through the engine's own
path, with draft models that draw, and with proposers that do not (draft heads, draft workers,
lookups), whose tokens are certain to be proposed. A wrong rule, children that are no draws, and a
proposer that sees the random numbers that judge must each fail the same test. False alarms:
drawn_answers.py."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.models.interface import Guesses
from engine.request import FinishReason, Sampling
from engine.sampling.metadata import SamplingRequest
from engine.sampling.sampler import Sampler
from engine.sampling.token_history import TokenHistory
from engine.speculation import draft_model, rejection_sampler
from engine.speculation.config import NgramConfig, SpeculationConfig
from engine.speculation.draft_protocol import DraftModelInfo
from engine.speculation.draft_sessions import DraftSessions
from engine.speculation.loader import load_heads
from engine.speculation.ngram import NgramProposer
from engine.speculation.proposer import DraftTask, Proposer
from engine.speculation.rejection_sampler import (
    AcceptedPath,
    Distribution,
    DistributionKey,
    Proposal,
    Proposals,
    Uniform,
    accept,
    judge,
    multi_step,
    naive,
    pick,
    proposals_at_nodes,
    random_key,
)
from engine.speculation.remote import DraftPeer, RemoteProposer
from engine.speculation.token_tree import EMPTY, ROOT, TokenTree, Try, chain, merge
from engine.testing.fake_draft_channel import FakeDraftChannel
from process.settings import SettingsError
from tests.conftest import third
from tests.harness import draft_workers as bench
from tests.harness.published_heads import save_eagle, save_medusa
from tests.unit.engine.sampling.reference import sample
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

_DEPTH = 2
"""As many tokens are compared."""
_CONFIGURATION = (3, 2)
"""<k1, k2>: draws at each depth."""


class World:
    """A model and proposers as tables: a distribution after each path."""

    def __init__(self, seed: int, num_proposers: int, likeness: float) -> None:
        rng = np.random.default_rng(seed)
        self.model: dict[tuple[int, ...], Distribution] = {}
        self.proposers: list[dict[tuple[int, ...], Distribution]] = [
            {} for _ in range(num_proposers)
        ]
        for depth in range(_DEPTH + 1):
            for path in itertools.product(range(VOCAB), repeat=depth):
                own = rng.dirichlet(np.full(VOCAB, 0.6))
                self.model[path] = own
                for table in self.proposers:
                    other = rng.dirichlet(np.full(VOCAB, 0.6))
                    table[path] = likeness * own + (1.0 - likeness) * other

    def draw_tree(
        self, rng: random.Random, *, is_best: bool = False
    ) -> tuple[TokenTree, dict[DistributionKey, Distribution]]:
        """An expansion-based tree of each proposer, merged. `is_best`: its likeliest children
        instead of draws."""
        places: dict[DistributionKey, Distribution] = {}
        trees = [
            self._expanded(proposer, table, rng, places, is_best=is_best)
            for proposer, table in enumerate(self.proposers)
        ]
        return merge(trees), places

    def _expanded(
        self,
        proposer: int,
        table: dict[tuple[int, ...], Distribution],
        rng: random.Random,
        places: dict[DistributionKey, Distribution],
        *,
        is_best: bool,
    ) -> TokenTree:
        token_ids: list[int] = []
        parents: list[int] = []
        tries: list[tuple[Try, ...]] = []

        def expand(path: tuple[int, ...], parent: int) -> None:
            if len(path) == _DEPTH:
                return
            own = places[path, proposer] = table[path]
            width = _CONFIGURATION[len(path)]
            if is_best:
                drawn = Counter(int(one) for one in np.argsort(-own)[:width])
            else:
                drawn = Counter(pick(own, rng.random()) for _ in range(width))
            for token_id, count in drawn.items():
                token_ids.append(token_id)
                parents.append(parent)
                tries.append((Try(proposer, float(own[token_id])),) * count)
                expand((*path, token_id), len(token_ids) - 1)

        expand((), ROOT)
        return TokenTree(tuple(token_ids), tuple(parents), (1.0,) * len(token_ids), tuple(tries))

    def target(self, tree: TokenTree) -> Callable[[int], Distribution]:
        def after(node: int) -> Distribution:
            return self.model[tuple(tree.token_ids[one] for one in tree.path(node))]

        return after


def _likelihood_of(
    draw: Callable[[random.Random], int], shares: Distribution, num_draws: int, seed: int
) -> float:
    """Of what was drawn, if it comes with these shares."""
    rng, tally = random.Random(seed), Tally(len(shares))
    for _ in range(num_draws):
        tally.add("all", draw(rng), shares)
    return tally.likelihood()


Rule = Callable[
    [TokenTree, dict[DistributionKey, Distribution], World, random.Random], AcceptedPath
]


def _by_multi_step(
    tree: TokenTree, places: dict[DistributionKey, Distribution], world: World, rng: random.Random
) -> AcceptedPath:
    return multi_step(tree, places, world.target(tree), rng.random)


def _by_naive(tree: TokenTree, _: object, world: World, rng: random.Random) -> AcceptedPath:
    return naive(tree, world.target(tree), rng.random)


def _accepts_all(tree: TokenTree, *_: object) -> AcceptedPath:
    """Whatever was drawn first is kept: the proposer's distribution."""
    node = tree.children[ROOT][next(iter(tree.children[ROOT]))]
    return AcceptedPath((), tree.token_ids[node])


def _run(
    world: World, rule: Rule, num_draws: int, seed: int, *, is_best: bool = False
) -> tuple[float, float]:
    """(likelihood of what came out, mean tokens a step). Two tokens are looked at: what a step left
    open is drawn by the model."""
    num_tokens = 0

    def first_two(rng: random.Random) -> int:
        nonlocal num_tokens
        tree, places = world.draw_tree(rng, is_best=is_best)
        accepted = rule(tree, places, world, rng)
        out = [tree.token_ids[node] for node in accepted.nodes] + [accepted.token_id]
        num_tokens += len(out)
        if len(out) < 2:
            out.append(pick(world.model[tuple(out)], rng.random()))
        return out[0] * VOCAB + out[1]

    shares = np.array([world.model[()][one] * world.model[one,] for one in range(VOCAB)]).ravel()
    return _likelihood_of(first_two, shares, num_draws, seed), num_tokens / num_draws


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("num_proposers", "likeness"),
    third([(1, 0.7), (2, 0.0), (1, 0.0), (2, 0.7)]),
)
def test_the_distribution_is_the_models(
    num_proposers: int, likeness: float, seed: int, scale: Callable[[int], int]
) -> None:
    world = World(seed, num_proposers, likeness)
    num_draws = scale(60_000)
    found, num_tokens = _run(world, _by_multi_step, num_draws, seed)
    assert found > LIMIT
    # Children chosen in any way are right for the naive rule.
    is_best = likeness <= 0.5
    found, num_naive = _run(world, _by_naive, num_draws, seed + 1, is_best=is_best)
    assert found > LIMIT
    if not is_best:
        assert num_tokens > num_naive  # the paper's table: what the multi-step rule is for


@pytest.mark.parametrize(
    ("rule", "is_best", "is_right"),
    [(_by_multi_step, False, True), (_by_multi_step, True, False), (_accepts_all, False, False)],
    ids=["right", "top-k children under the multi-step rule", "accepts everything"],
)
def test_a_rule_that_does_not_keep_the_distribution_is_found(
    rule: Rule, is_best: bool, is_right: bool, seed: int
) -> None:
    """At the short form's count: the world is such that both are far off."""
    found, _ = _run(World(7, 1, 0.3), rule, 1_500, seed, is_best=is_best)
    assert (found > LIMIT) == is_right


def test_a_certain_proposal_is_kept_as_often_as_the_model_draws_it(seed: int) -> None:
    """A looked-up token: q is 1 there, and rejecting it leaves the model's others."""
    own = np.array([0.1, 0.6, 0.3])
    tree = TokenTree((1, 2), (-1, -1), (0.5, 0.5), ((), ()))

    def first(rng: random.Random) -> int:
        accepted = multi_step(tree, {}, lambda _: own, rng.random)
        return [*(tree.token_ids[node] for node in accepted.nodes), accepted.token_id][0]

    assert _likelihood_of(first, own, 2_500, seed) > LIMIT


def test_pick_gives_no_token_of_probability_zero() -> None:
    own = np.array([0.0, 0.5, 0.0, 0.5, 0.0])
    assert {pick(own, one) for one in (0.0, 0.25, 0.5, 0.75, 1.0 - 2**-53, 1.0)} == {1, 3}


_MODEL = np.array([0.1, 0.5, 0.2, 0.2])
_FAR_OFF = np.array([0.55, 0.15, 0.15, 0.15])


def _one_deep(own: Distribution, num_draws: int, rng: random.Random) -> TokenTree:
    drawn = Counter(pick(own, rng.random()) for _ in range(num_draws))
    shares = tuple(float(own[token_id]) for token_id in drawn)
    tries = tuple(
        (Try(0, share),) * count for share, count in zip(shares, drawn.values(), strict=True)
    )
    return TokenTree(tuple(drawn), (ROOT,) * len(drawn), shares, tries)


def _first(own: Distribution, computed: TokenTree, tried: TokenTree, rng: random.Random) -> int:
    """The token after the newest, as a step draws it."""
    found = proposals_at_nodes(computed, tried, {((), 0): own}, lambda _: rng.getrandbits(64))
    assert found[0] is not None
    return judge(_MODEL, found[0])


def test_a_tree_is_cut_and_its_draws_are_not(seed: int) -> None:
    def all_tried(rng: random.Random) -> int:
        tree = _one_deep(_FAR_OFF, 3, rng)
        return _first(_FAR_OFF, tree.best(1), tree, rng)

    def only_computed(rng: random.Random) -> int:
        computed = _one_deep(_FAR_OFF, 3, rng).best(1)
        return _first(_FAR_OFF, computed, computed, rng)

    assert _likelihood_of(all_tried, _MODEL, 2_500, seed) > LIMIT
    assert _likelihood_of(only_computed, _MODEL, 2_500, seed) < LIMIT, (
        "draws that are left out for their value"
    )


def test_a_lookup_beside_draws(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a draw has the certain token, too, there is one try less: right only if that would have
    come last."""

    def folded(rng: random.Random) -> int:
        tree = merge([_one_deep(_MODEL, 1, rng), chain([1], [0.5])])
        return _first(_MODEL, tree, tree, rng)

    def in_any_order(wanted: Distribution, tries: Sequence[Proposal], uniform: Uniform) -> int:
        for one in sorted(tries, key=lambda _: uniform()):
            if uniform() * one.probability < wanted[one.token_id]:
                return one.token_id
            wanted = rejection_sampler._residual(wanted, one)
        return pick(wanted, uniform())

    assert _likelihood_of(folded, _MODEL, 5_000, seed) > LIMIT
    monkeypatch.setattr(rejection_sampler, "accept", in_any_order)
    assert _likelihood_of(folded, _MODEL, 5_000, seed) < LIMIT


def test_tries_are_found_by_path_in_a_cut_tree() -> None:
    world = World(3, 2, 0.5)
    tree, places = world.draw_tree(random.Random(3))
    computed = tree.best(len(tree) // 2).without([0])
    found = proposals_at_nodes(computed, tree, places, lambda depth: 100 + depth)
    assert len(found) == 1 + len(computed)
    for node, proposals in enumerate(found, ROOT):
        own = computed.path(node)
        path = tuple(computed.token_ids[one] for one in own)
        place = ROOT
        for token_id in path:
            place = tree.children[place][token_id]
        children = tree.children.get(place, {}).values()
        expected = [
            (tree.token_ids[child], one.probability)
            for child in children
            for one in tree.tries[child]
        ]
        assert [one[:2] for one in (proposals.tries if proposals else ())] == expected
        assert proposals is None or proposals.key == 100 + len(path)
        for one in proposals.tries if proposals else ():
            assert one.drawn_from is not None
            assert one.drawn_from[one.token_id] == one.probability
    assert proposals_at_nodes(EMPTY, EMPTY, {}, lambda _: 0) == ()


def test_accepting_without_tries_is_drawing() -> None:
    assert accept(np.array([0.25, 0.75]), (), lambda: 0.2) == 0
    assert accept(np.array([0.25, 0.75]), (), lambda: 0.3) == 1


Make = Callable[[MarkovModel, Table, Path], list[Proposer]]


def _matrix(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _heads(model: MarkovModel, folder: Path, *expansion: int) -> list[Proposer]:
    speculation = SpeculationConfig(
        draft_heads=(str(folder),), expansion=expansion, acceptance="multi_step"
    )
    config = EngineConfig(num_blocks=64, max_num_running=32, speculation=speculation)
    return load_heads(config, model)


def _medusa(model: MarkovModel, own: Table, folder: Path) -> list[Proposer]:
    """Two heads: token 0, and one by the hidden state."""
    tensors = {f"{head}.0.linear.weight": _matrix(HIDDEN_SIZE, HIDDEN_SIZE) for head in range(2)}
    for head in range(2):
        tensors[f"{head}.0.linear.bias"] = torch.full((HIDDEN_SIZE,), 10.0)
        tensors[f"{head}.1.weight"] = _matrix(VOCAB, HIDDEN_SIZE) * 0.1
        tensors[f"{head}.1.weight"][0] += 5.0
    fields = {"medusa_num_heads": 2, "medusa_num_layers": 1}
    return _heads(model, save_medusa(folder / "medusa", tensors, **fields), 2, 1)


def _eagle(model: MarkovModel, own: Table, folder: Path) -> list[Proposer]:
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


def _worker(model: MarkovModel, own: Table, folder: Path) -> list[Proposer]:
    sessions = DraftSessions(draft_model_of(own, 2, 1), VOCAB, bench.LIMITS)
    about = DraftModelInfo("tables", model.info.tokenizer_digest, VOCAB)
    peer = DraftPeer(FakeDraftChannel("a:1", about, sessions))
    proposer = RemoteProposer([peer], model.info, deadline_s=0.0, clock=bench.Clock())
    proposer.connect()
    return [proposer]


_CERTAIN = [_medusa, _eagle, _worker]


def _together(model: MarkovModel, own: Table, folder: Path) -> list[Proposer]:
    """And a draft model that draws."""
    proposers = [draft_model_of(own, 2, 1)]
    for make in (_medusa, _worker):
        proposers += make(model, own, folder)
    return proposers


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "make", [*third(_CERTAIN), pytest.param(_together, marks=pytest.mark.long)]
)
def test_answers_with_certain_proposals_have_the_models_distribution(
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
    wanted: Distribution, tries: Sequence[Proposal], uniform: rejection_sampler.Uniform
) -> int:
    """A certain token is taken for one that was drawn with 1 / 2."""
    for one in tries:
        if uniform() * 0.5 < wanted[one.token_id]:
            return one.token_id
        wanted = rejection_sampler._residual(wanted, one)
    return rejection_sampler.pick(wanted, uniform())


@pytest.mark.parametrize("make", third(_CERTAIN))
def test_a_wrong_rule_for_certain_proposals_is_found(
    make: Make, seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rejection_sampler, "accept", _as_if_drawn)
    table = np.full((VOCAB, VOCAB), 1 / VOCAB)
    model = MarkovModel(table)
    own = np.tile(np.arange(VOCAB, 0.0, -1.0), (VOCAB, 1)) / 15.0
    requests = requests_of(2_400 // NUM_TOKENS, seed)  # as many as in the short form
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
            token_id = rejection_sampler.pick(table, random.Random(f"plain {key}").random())
        tally.add("all", token_id, table)
    assert (tally.likelihood() < LIMIT) is sees


def test_a_draft_workers_tokens_come_of_no_random_numbers(seed: int) -> None:
    """Where the target's own noise is not what draws, the likeliest are the best to propose."""
    table, (own,) = world(seed, 1, 0.5)
    (proposer,) = _worker(MarkovModel(table), own, Path())
    trees = set()
    for number in range(20):
        sampling = Sampling(max_tokens=9, temperature=0.9, seed=(seed + number) % 2**64)
        task = DraftTask(("r", number), [1, 2], 2, sampling, 0, 6, is_drawn=True)
        proposer.propose([task])
        trees.add(proposer.propose([task])[0].tree.token_ids)
    likeliest = np.argsort(-own[3 % VOCAB])[:2].tolist()
    (found,) = trees
    assert found[::2] == tuple(likeliest)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("expansions", "likeness"), [([(3, 1)], 0.6), ([(2, 1), (2, 1)], 0.3)])
def test_answers_with_draws_have_the_models_distribution(
    expansions: list[tuple[int, ...]],
    likeness: float,
    seed: int,
    scale: Callable[[int], int],
) -> None:
    """One draft model and two; three draws of five tokens are often the same."""
    table, tables = world(seed, len(expansions), likeness)
    proposers = [draft_model_of(own, *one) for own, one in zip(tables, expansions, strict=True)]
    engine = make_engine(table, proposers)
    requests = requests_of(scale(60_000) // NUM_TOKENS, seed)
    assert likelihood(table, requests, answer(engine, requests)) > LIMIT
    counts = engine.metrics()
    assert counts.num_kept_tokens > 0.1 * counts.num_output_tokens


def _chains(table: Table, own: Table, _: object) -> LLMEngine:
    """Of a target and a draft model without masks for trees."""
    model = MarkovModel(table)
    model.guesses = Guesses.CHAINS
    return make_engine(model, [draft_model_of(own, 2, 2, takes_trees=False)])


_CUTS: dict[str, Callable[[Table, Table, Callable[[], float]], LLMEngine]] = {
    "room for two of four": lambda table, own, _: make_engine(
        table, [draft_model_of(own, 3, 1)], max_num_nodes=2
    ),
    "what pays": lambda table, own, clock: make_engine(
        table, [draft_model_of(own, 2, 1, 1)], always=False, clock=clock
    ),
    "a lookup beside": lambda table, own, _: make_engine(
        table,
        [draft_model_of(own, 2, 1), NgramProposer(NgramConfig(min_length=1, max_matches=2))],
        max_num_nodes=4,
    ),
    "chains": _chains,
}


@pytest.mark.parametrize("cut", _CUTS)
def test_what_is_not_computed_is_tried_all_the_same(
    cut: str, seed: int, scale: Callable[[int], int]
) -> None:
    table, (own,) = world(seed, 1, 0.3)
    ticks = itertools.count()
    engine = _CUTS[cut](table, own, lambda: next(ticks) * 1e-3)
    requests = requests_of(max(3, scale(10_000) // 200), seed, max_tokens=200)
    assert likelihood(table, requests, answer(engine, requests)) > LIMIT
    assert engine.metrics().num_guessed_tokens > 0


def _best_children(
    distributions: Sequence[Distribution], keys: Sequence[int], width: int
) -> list[rejection_sampler.DrawnChildren | None]:
    """A distribution's best, as if they were draws from it."""
    found: list[rejection_sampler.DrawnChildren | None] = []
    for one in rejection_sampler.draw_children(np.array(distributions), keys, width):
        assert one is not None
        best = np.argsort(-one.distribution)[:width].tolist()
        found.append(rejection_sampler.DrawnChildren(Counter(best), one.distribution))
    return found


def _leaves_no_residual(
    wanted: Distribution, tries: Sequence[Proposal], uniform: rejection_sampler.Uniform
) -> int:
    """The model's own distribution after all are rejected: what they took of it comes twice."""
    for one in tries:
        if uniform() * one.probability < wanted[one.token_id]:
            return one.token_id
    return rejection_sampler.pick(wanted, uniform())


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (draft_model, "draw_children", _best_children),
        (rejection_sampler, "accept", _leaves_no_residual),
    ],
)
def test_what_does_not_keep_the_distribution_of_answers_is_found(
    owner: Any, name: str, wrong: Any, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Top-k children under the multi-step rule, and a wrong rule: in a world where drafts are far
    off, at less than the short form's count."""
    monkeypatch.setattr(owner, name, wrong)
    row = np.array([0.7, 0.15, 0.08, 0.04, 0.03])
    table = np.stack([np.roll(row, shift) for shift in range(VOCAB)])
    own = np.stack([np.roll(row[::-1], shift) for shift in range(VOCAB)])
    requests = requests_of(1_000 // NUM_TOKENS, seed)
    outputs = answer(make_engine(table, [draft_model_of(own, 3)]), requests)
    assert likelihood(table, requests, outputs) < LIMIT


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.4, "repetition_penalty": 1.2},
        {
            "temperature": 1.3,
            "top_k": 4,
            "min_p": 0.05,
            "frequency_penalty": 0.1,
            "logit_bias": ((2, 0.7),),
            "stop_token_ids": frozenset({3}),
        },
    ],
)
def test_the_distribution_is_the_processed_one(sampling: dict[str, Any], seed: int) -> None:
    """Of two samples each: every processor, each node with its own history; ends inside a kept
    run."""
    table, (own,) = world(seed, 1, 0.6)
    requests = requests_of(30, seed, num_samples=2, max_tokens=12, **sampling)
    outputs = answer(make_engine(table, [draft_model_of(own, 2, 1)]), requests)
    assert likelihood(table, requests, outputs) > LIMIT
    for token_ids, reason in outputs.values():
        assert (reason is FinishReason.STOP_TOKEN) == (
            bool(sampling.get("stop_token_ids")) and token_ids[-1] == 3
        )
        assert "stop_token_ids" not in sampling or 3 not in token_ids[:-1]
        assert reason is FinishReason.STOP_TOKEN or len(token_ids) == 12


def test_naive_and_greedy_and_traced_answers_are_plain_ones(seed: int) -> None:
    """Whatever the draft models draw: and a record can be replayed under the multi-step rule."""
    table, tables = world(seed, 2, 0.5)
    cases: list[tuple[str, Mapping[str, Any]]] = [
        ("naive", {}),
        ("naive", {"top_p": 0.8, "frequency_penalty": 0.5, "num_samples": 2}),
        ("multi_step", {"temperature": 0.0, "repetition_penalty": 1.3}),
        ("multi_step", {"trace": True}),
    ]
    num_kept = num_guessed = 0
    for rule, fields in cases:
        requests = requests_of(3, seed, **({"max_tokens": 25} | dict(fields)))
        engine = make_engine(table, [draft_model_of(own, 2, 1) for own in tables], rule)
        assert answer(engine, requests) == answer(make_engine(table, []), requests)
        counts = engine.metrics()
        num_kept += counts.num_kept_tokens
        num_guessed += counts.num_guessed_tokens
    assert 0 < num_kept < num_guessed


def test_a_run_can_be_repeated(seed: int) -> None:
    """And its tokens are not plain decoding's."""
    table, tables = world(seed, 2, 0.5)
    requests = requests_of(2, seed, max_tokens=60)
    first, again = (
        answer(make_engine(table, [draft_model_of(own, 2, 1) for own in tables]), requests)
        for _ in range(2)
    )
    assert first == again
    assert first != answer(make_engine(table, []), requests)


def test_masks_of_grammars_hold_for_what_was_proposed(seed: int) -> None:
    """Draws from the mask's own distribution alone, though most of what is proposed is banned."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(size=6).astype(np.float32))
    draft = rng.dirichlet(np.ones(6))
    sampling = Sampling(max_tokens=1, temperature=0.7)
    bitmask = torch.tensor([0b011010], dtype=torch.int32)
    draws = []
    for key in range(4_000):
        drawn = rng.choice(6, size=2, p=draft).tolist()
        tries = tuple(Proposal(token, float(draft[token]), draft) for token in drawn)
        proposals = Proposals(tries, rejection_sampler.random_key(seed, key))
        draws.append(SamplingRequest(sampling, 0, bitmask=bitmask, proposals=proposals))
    tally = Tally(6)
    shares = np.where([0, 1, 0, 1, 1, 0], np.exp(logits.double().numpy() / 0.7), 0.0)
    for one in sample(logits.expand(len(draws), -1), draws):
        tally.add("all", one.token_id, shares / shares.sum())
    assert tally.likelihood() > LIMIT


def test_what_a_draft_model_draws_from_is_what_the_target_would(seed: int) -> None:
    """`distributions` against `draw` on the same rows, each processor on; and errors."""
    sampling = Sampling(
        max_tokens=9, temperature=0.8, top_p=0.95, presence_penalty=0.5, logit_bias=((1, 0.3),)
    )
    history = TokenHistory(sampling, (1, 2), (3,))
    logits = torch.from_numpy(np.random.default_rng(seed).normal(size=6).astype(np.float32))
    own = Sampler().distributions(logits[None], [SamplingRequest(sampling, 3, history=history)])[0]
    tally = Tally(6)
    rows = [
        SamplingRequest(replace(sampling, seed=(seed + key) % 2**64), 3, history=history)
        for key in range(2_000)
    ]
    for one in sample(logits.expand(len(rows), -1), rows):
        tally.add("all", one.token_id, own)
    assert tally.likelihood() > LIMIT
    broken = torch.stack([torch.full((6,), torch.nan), logits])
    found = Sampler().distributions(broken, [SamplingRequest(sampling, 3, history=history)] * 2)
    assert np.isnan(found[0]).all()
    assert np.array_equal(found[1], own)


def test_distributions_are_made_of_few_rows_at_once(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the number of rows: to the last bit what all of them at once are."""
    drawn = np.random.default_rng(seed).normal(size=(7, 200_000))
    logits = torch.from_numpy(drawn.astype(np.float32))
    logits[4] = torch.nan
    draws = [
        SamplingRequest(Sampling(max_tokens=9, temperature=0.5 + row / 4, top_p=0.9), 3)
        for row in range(7)
    ]
    alone = [Sampler().distributions(logits[i : i + 1], draws[i : i + 1])[0] for i in range(7)]
    most: list[int] = []
    real = Sampler._distributions

    def few(sampler: Sampler, own: torch.Tensor, requests: list[SamplingRequest]) -> Any:
        most.append(len(own))
        return real(sampler, own, requests)

    monkeypatch.setattr(Sampler, "_distributions", few)
    found = Sampler().distributions(logits, draws)
    assert np.array_equal(found, np.stack(alone), equal_nan=True)
    assert most == [5, 2]


def test_multi_step_does_not_keep_the_promise_of_exact() -> None:
    config = EngineConfig(
        num_blocks=64, exact=True, speculation=SpeculationConfig(acceptance="multi_step")
    )
    table, (own,) = world(0, 1, 0.5)
    with pytest.raises(SettingsError, match="multi_step is not for exact=true"):
        LLMEngine(config, MarkovModel(table), proposers=[draft_model_of(own, 1)])
