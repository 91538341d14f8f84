"""The stochastic rules keep the model's distribution: chi-square over first tokens and over whole
paths, with one drafter and with several, with folded duplicates. What does not keep it (children
chosen for their probability, a rule that accepts too much) must fail the same test.

False alarms: a right rule fails with probability 1e-9 (`_LIMIT`), a test; a wrong one of these
passes with far less.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from engine.speculation import acceptance
from engine.speculation.acceptance import (
    Accepted,
    Proposal,
    Uniform,
    accept,
    at_nodes,
    judge,
    multi_step,
    naive,
    pick,
)
from engine.speculation.drafter import Distribution, Place
from engine.speculation.tree import EMPTY, ROOT, TokenTree, Try, chain, merge
from tests.conftest import third

_VOCAB_SIZE = 5
_DEPTH = 3
_LIMIT = 1e-9
_CONFIGURATION = (3, 2, 1)
"""<k1, k2, k3>: draws at each depth."""


class World:
    """A model and drafters as tables: a distribution after each path."""

    def __init__(self, seed: int, num_drafters: int, likeness: float) -> None:
        rng = np.random.default_rng(seed)
        self.model: dict[tuple[int, ...], Distribution] = {}
        self.drafters: list[dict[tuple[int, ...], Distribution]] = [{} for _ in range(num_drafters)]
        for depth in range(_DEPTH + 1):
            for path in itertools.product(range(_VOCAB_SIZE), repeat=depth):
                own = rng.dirichlet(np.full(_VOCAB_SIZE, 0.6))
                self.model[path] = own
                for table in self.drafters:
                    other = rng.dirichlet(np.full(_VOCAB_SIZE, 0.6))
                    table[path] = likeness * own + (1.0 - likeness) * other

    def draw_tree(
        self, rng: random.Random, *, is_best: bool = False
    ) -> tuple[TokenTree, dict[Place, Distribution]]:
        """An expansion-based tree of each drafter, merged. `is_best`: its likeliest children
        instead of draws."""
        places: dict[Place, Distribution] = {}
        trees = [
            self._expanded(drafter, table, rng, places, is_best=is_best)
            for drafter, table in enumerate(self.drafters)
        ]
        return merge(trees), places

    def _expanded(
        self,
        drafter: int,
        table: dict[tuple[int, ...], Distribution],
        rng: random.Random,
        places: dict[Place, Distribution],
        *,
        is_best: bool,
    ) -> TokenTree:
        token_ids: list[int] = []
        parents: list[int] = []
        tries: list[tuple[Try, ...]] = []

        def expand(path: tuple[int, ...], parent: int) -> None:
            if len(path) == _DEPTH:
                return
            own = places[path, drafter] = table[path]
            width = _CONFIGURATION[len(path)]
            if is_best:
                drawn = Counter(int(one) for one in np.argsort(-own)[:width])
            else:
                drawn = Counter(pick(own, rng.random()) for _ in range(width))
            for token_id, count in drawn.items():
                token_ids.append(token_id)
                parents.append(parent)
                tries.append((Try(drafter, float(own[token_id])),) * count)
                expand((*path, token_id), len(token_ids) - 1)

        expand((), ROOT)
        return TokenTree(tuple(token_ids), tuple(parents), (1.0,) * len(token_ids), tuple(tries))

    def target(self, tree: TokenTree) -> Callable[[int], Distribution]:
        def after(node: int) -> Distribution:
            return self.model[tuple(tree.token_ids[one] for one in tree.path(node))]

        return after


def _tail_probability(statistic: float, freedom: int) -> float:
    """Of a chi-square at least as large (Wilson and Hilferty's approximation, 1931)."""
    cube = (statistic / freedom) ** (1 / 3)
    z = (cube - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2))


def _likelihood(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Of counts at least as far from the expected ones. Cells below 8 are one."""
    assert set(counts) <= set(expected)
    total = sum(counts.values())
    cells = [(counts[path], total * share) for path, share in expected.items()]
    large = [(seen, wanted) for seen, wanted in cells if wanted >= 8]
    small = [(seen, wanted) for seen, wanted in cells if wanted < 8]
    rest = sum(seen for seen, _ in small), sum(wanted for _, wanted in small)
    if rest[1] > 8:
        large.append(rest)
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in large)
    return _tail_probability(statistic, len(large) - 1)


def _run(
    world: World,
    rule: Callable[[TokenTree, dict[Place, Distribution], random.Random], Accepted],
    num_draws: int,
    seed: int,
    *,
    is_best: bool = False,
) -> tuple[float, float]:
    """(likelihood of what came out, mean tokens a step). Two tokens are looked at: what a step left
    open is drawn by the model."""
    rng = random.Random(seed)
    counts: Counter[tuple[int, ...]] = Counter()
    num_tokens = 0
    for _ in range(num_draws):
        tree, places = world.draw_tree(rng, is_best=is_best)
        accepted = rule(tree, places, rng)
        out = [tree.token_ids[node] for node in accepted.nodes] + [accepted.token_id]
        num_tokens += len(out)
        if len(out) < 2:
            out.append(pick(world.model[tuple(out)], rng.random()))
        counts[tuple(out[:2])] += 1
    expected = {
        (one, two): float(world.model[()][one] * world.model[one,][two])
        for one in range(_VOCAB_SIZE)
        for two in range(_VOCAB_SIZE)
    }
    return _likelihood(counts, expected), num_tokens / num_draws


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("num_drafters", "likeness"),
    third([(1, 0.7), (2, 0.0), (1, 0.0), (2, 0.7)]),
)
def test_the_distribution_is_the_models(
    num_drafters: int, likeness: float, seed: int, scale: Callable[[int], int]
) -> None:
    world = World(seed, num_drafters, likeness)
    num_draws = scale(100_000)

    def by_multi_step(
        tree: TokenTree, places: dict[Place, Distribution], rng: random.Random
    ) -> Accepted:
        return multi_step(tree, places, world.target(tree), rng.random)

    def by_naive(tree: TokenTree, _: object, rng: random.Random) -> Accepted:
        return naive(tree, world.target(tree), rng.random)

    found, num_tokens = _run(world, by_multi_step, num_draws, seed)
    assert found > _LIMIT
    found, num_naive = _run(world, by_naive, num_draws, seed + 1)
    assert found > _LIMIT
    # Children chosen in any way are right for the naive rule.
    found, _ = _run(world, by_naive, num_draws, seed + 2, is_best=True)
    assert found > _LIMIT
    if likeness > 0.5:
        assert num_tokens > num_naive  # the paper's table: what the multi-step rule is for


def _accepts_all(tree: TokenTree, *_: object) -> Accepted:
    """Whatever was drawn first is kept: the drafter's distribution."""
    node = tree.children[ROOT][next(iter(tree.children[ROOT]))]
    return Accepted((), tree.token_ids[node])


def test_what_does_not_keep_it_is_found(seed: int) -> None:
    """At the short form's count: the world is such that both are far off."""
    world = World(7, 1, 0.3)

    def by_multi_step(
        tree: TokenTree, places: dict[Place, Distribution], rng: random.Random
    ) -> Accepted:
        return multi_step(tree, places, world.target(tree), rng.random)

    found, _ = _run(world, by_multi_step, 2_500, seed)
    assert found > _LIMIT
    found, _ = _run(world, by_multi_step, 2_500, seed, is_best=True)
    assert found < _LIMIT, "top-k children under the multi-step rule"
    found, _ = _run(world, _accepts_all, 2_500, seed)
    assert found < _LIMIT, "a rule that accepts everything"


def test_a_certain_proposal_is_kept_as_often_as_the_model_draws_it(seed: int) -> None:
    """A looked-up token: q is 1 there, and rejecting it leaves the model's others."""
    rng = random.Random(seed)
    own = np.array([0.1, 0.6, 0.3])
    tree = TokenTree((1, 2), (-1, -1), (0.5, 0.5), ((), ()))
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(5_000):
        accepted = multi_step(tree, {}, lambda _: own, rng.random)
        out = [tree.token_ids[node] for node in accepted.nodes] + [accepted.token_id]
        counts[out[0],] += 1
    assert _likelihood(counts, {(i,): float(share) for i, share in enumerate(own)}) > _LIMIT


def test_pick_gives_no_token_of_probability_zero() -> None:
    own = np.array([0.0, 0.5, 0.0, 0.5, 0.0])
    assert {pick(own, one) for one in (0.0, 0.25, 0.5, 0.75, 1.0 - 2**-53, 1.0)} == {1, 3}


_MODEL = np.array([0.1, 0.5, 0.2, 0.2])
_FAR_OFF = np.array([0.55, 0.15, 0.15, 0.15])
_NUM_DRAWS = 5_000


def _one_deep(own: Distribution, num_draws: int, rng: random.Random) -> TokenTree:
    drawn = Counter(pick(own, rng.random()) for _ in range(num_draws))
    shares = tuple(float(own[token_id]) for token_id in drawn)
    tries = tuple(
        (Try(0, share),) * count for share, count in zip(shares, drawn.values(), strict=True)
    )
    return TokenTree(tuple(drawn), (ROOT,) * len(drawn), shares, tries)


def _first(own: Distribution, computed: TokenTree, tried: TokenTree, rng: random.Random) -> int:
    """The token after the newest, as a step draws it."""
    found = at_nodes(computed, tried, {((), 0): own}, lambda _: rng.getrandbits(64))
    assert found[0] is not None
    return judge(_MODEL, found[0])


def _of_first(draw: Callable[[random.Random], int], seed: int) -> float:
    rng = random.Random(seed)
    counts = Counter((draw(rng),) for _ in range(_NUM_DRAWS))
    return _likelihood(counts, {(i,): float(share) for i, share in enumerate(_MODEL)})


def test_a_tree_is_cut_and_its_draws_are_not(seed: int) -> None:
    def all_tried(rng: random.Random) -> int:
        tree = _one_deep(_FAR_OFF, 3, rng)
        return _first(_FAR_OFF, tree.best(1), tree, rng)

    def only_computed(rng: random.Random) -> int:
        computed = _one_deep(_FAR_OFF, 3, rng).best(1)
        return _first(_FAR_OFF, computed, computed, rng)

    assert _of_first(all_tried, seed) > _LIMIT
    assert _of_first(only_computed, seed) < _LIMIT, "draws that are left out for their value"


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
            wanted = acceptance._residual(wanted, one)
        return pick(wanted, uniform())

    assert _of_first(folded, seed) > _LIMIT
    monkeypatch.setattr(acceptance, "accept", in_any_order)
    assert _of_first(folded, seed) < _LIMIT


def test_tries_are_found_by_path_in_a_cut_tree() -> None:
    world = World(3, 2, 0.5)
    tree, places = world.draw_tree(random.Random(3))
    computed = tree.best(len(tree) // 2).without([0])
    found = at_nodes(computed, tree, places, lambda depth: 100 + depth)
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
    assert at_nodes(EMPTY, EMPTY, {}, lambda _: 0) == ()


def test_accepting_without_tries_is_drawing() -> None:
    assert accept(np.array([0.25, 0.75]), (), lambda: 0.2) == 0
    assert accept(np.array([0.25, 0.75]), (), lambda: 0.3) == 1
