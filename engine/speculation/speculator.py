"""Speculator: all that is guessed for one step. Asks the drafters, leaves out what cannot be drawn,
merges, takes what pays (expansion.py), and has the blocks for it; afterwards learns what was kept.

Guesses never cost anybody else's blocks, tokens of the step's budget that the plan wants, or a
place.

Under the multi-step rule (acceptance.py) all that was drawn is tried, whether it is computed or
not, and a node is computed or not by what is known without what was drawn below it: chances fall on
the way down, so that `choose` and `best` look at a node before they look below. Engine thread only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from engine.config import EngineConfig
from engine.constraints import end_token_ids
from engine.holdings import Holdings
from engine.models.interface import Guesses
from engine.request import Sampling, State
from engine.schedule.order import Key
from engine.sequence import Sequence as Sample
from engine.speculation.acceptance import at_nodes
from engine.speculation.config import SpeculationConfig
from engine.speculation.drafter import Distribution, Draft, Drafter, Guess, Place, Task
from engine.speculation.drawing import random_key
from engine.speculation.expansion import Calibration, calibrated, choose
from engine.speculation.exploration import Exploration
from engine.speculation.heads.readers import Readers
from engine.speculation.ngram import PromptLookup
from engine.speculation.tree import EMPTY, ROOT, TokenTree, merge, numbered
from process.settings import SettingsError

if TYPE_CHECKING:
    from engine.grammar.state import GrammarState

logger = logging.getLogger(__name__)

Planned = tuple[Sample, int]
"""A sample, and how many of its pending tokens a step computes."""


MAX_HISTORY = 8192
"""Tokens up to which a sample with penalties on its own text, or bans in it, is guessed for: each
node has a copy of what is known of them (1.8 ms at this length for 16 nodes)."""

_TRIED, _DRAFTED = range(2)
"""What random numbers are for."""


class _Drafted(NamedTuple):
    """All drafters' guesses for one task."""

    tree: TokenTree
    """What is possible of them, and of use."""
    all_of_them: Draft


_NOTHING = _Drafted(EMPTY, Draft(EMPTY, {}))


class Speculator:
    """See the module.

    Args:
        guesses: what the model takes.
        max_num_tokens: of one step.
        clock: what guesses cost is measured by; no token depends on it, up to rounding.
    """

    def __init__(
        self,
        config: SpeculationConfig,
        drafters: Sequence[Drafter],
        holdings: Holdings,
        *,
        guesses: Guesses,
        max_num_tokens: int,
        eos_token_ids: frozenset[int],
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._drafters = drafters
        self._holdings = holdings
        self._guesses = guesses
        self._max_num_tokens = max_num_tokens
        self._eos_token_ids = eos_token_ids
        self._clock = clock
        self._calibrations = [Calibration() for _ in drafters]
        self._exploration = Exploration(len(drafters), always=config.always)
        self._asked: dict[int, float] = {}
        """Drafters that guessed for the step that is being computed: seconds that it took them."""
        self._known: dict[Key, Sample] = {}
        self._believed: dict[Key, list[tuple[int, TokenTree]]] = {}
        """Of the step that is being computed: each drafter's own tree, before all choice."""
        self._failed: set[int] = set()
        self.readers = Readers(drafters, self._failed, self._fail, self._meet)

    def guess(self, planned: Sequence[Planned], running: Collection[Key]) -> dict[Key, Guess]:
        """For those of a plan that are worth it; the blocks for them are there.

        Args:
            running: whoever has a place in steps; all others are forgotten.
        """
        began = self._clock()
        self._believed.clear()
        self._asked.clear()
        for key in [key for key in self._known if key not in running]:
            self._forget(key)
        num_rows = sum(num_tokens for _, num_tokens in planned)
        num_drawing = sum(num == sample.num_pending_tokens for sample, num in planned)
        if not self._exploration.begin(num_drawing, num_rows):
            return {}
        samples = self._exploration.among(
            [sample for sample, num_tokens in planned if _may_guess(sample, num_tokens)]
        )
        tasks = [task for sample in samples if (task := self._task(sample)).num_nodes > 0]
        budget = self._max_num_tokens - num_rows
        if not tasks or budget < 1:
            return {}
        by_key = {sample.key: sample for sample in samples}
        drafted = self._draft(tasks, by_key)
        trees = [one.tree for one in drafted]
        if not self._config.always:
            trees = choose(trees, self._exploration.load, budget)
        guesses: dict[Key, Guess] = {}
        for task, tree, one in zip(tasks, trees, drafted, strict=True):
            if not len(one.all_of_them.tree):
                continue
            sample = by_key[task.key]
            room = self._holdings.room(sample, num_kept_blocks=len(running))
            guess = _in_grammar(tree.best(min(room, budget)), sample.grammar)
            if self._is_tried(task):
                guess = _with_proposals(guess, task, one.all_of_them)
            if len(guess.tree) or guess.proposals:
                self._holdings.grow(sample, len(sample.token_ids) + len(guess.tree))
                guesses[task.key] = guess
                budget -= len(guess.tree)
        # What is done with the drafts is part of their price.
        rest_s = self._clock() - began - sum(self._asked.values())
        for index in self._asked:
            self._asked[index] += rest_s / len(self._asked)
        return guesses

    def take_back(self, planned: Sequence[Planned], guesses: Mapping[Key, Guess]) -> None:
        """The step failed: the blocks for its guesses go back."""
        for sample, _ in planned:
            if sample.key in guesses:
                self._holdings.shrink(sample)

    def learn(
        self,
        told: Mapping[Key, Sequence[int]],
        num_kept: Mapping[Key, int],
        *,
        num_rows: int,
        seconds: float,
    ) -> None:
        """What came of `guess`.

        Args:
            told: the tokens that each sample of the step has now and had not before.
            num_kept: of each guess, how many nodes.
            num_rows, seconds: of the step.
        """
        num_right = dict.fromkeys(self._asked, 0)
        for key, drafts in self._believed.items():
            # One token more than was kept is known to be the model's: it judges all guesses of it,
            # those that were not computed, too, so that a drafter can win its trust back.
            token_ids = told.get(key, ())[: num_kept.get(key, 0) + 1]
            for drafter, tree in drafts:
                right = _observe(self._calibrations[drafter], tree, token_ids)
                num_right[drafter] += min(right, num_kept.get(key, 0))
        self._exploration.learn(num_rows, seconds, self._asked, num_right)

    def _draft(self, tasks: list[Task], samples: Mapping[Key, Sample]) -> list[_Drafted]:
        found: list[list[TokenTree]] = [[] for _ in tasks]
        drawn_from: list[dict[Place, Distribution]] = [{} for _ in tasks]
        for index, drafter in enumerate(self._drafters):
            asked = self._exploration.choose(index, tasks)
            if not asked:
                continue
            began = self._clock()
            drafts = self._propose(index, drafter, [_seeded(task, index) for task in asked])
            self._asked[index] = self._clock() - began
            by_key = {task.key: draft for task, draft in zip(asked, drafts, strict=True)}
            for own, places, task in zip(found, drawn_from, tasks, strict=True):
                draft = by_key.get(task.key)
                if draft is None:
                    continue
                self._believed.setdefault(task.key, []).append((index, draft.tree))
                tree = calibrated(draft.tree, self._calibrations[index])
                if self._is_tried(task):
                    tree = numbered(tree, index)
                    for (path, _), distribution in draft.distributions.items():
                        places[path, index] = distribution
                own.append(tree)
        drafted: list[_Drafted] = []
        for own, places, task in zip(found, drawn_from, tasks, strict=True):
            merged = merge(own) if own else EMPTY
            if not len(merged):
                drafted.append(_NOTHING)
                continue
            tree = self._possible(merged, samples[task.key]).best(task.num_nodes)
            if self._guesses is Guesses.CHAINS:
                tree = _likeliest_way_down(tree) if self._is_tried(task) else _likeliest_path(tree)
            drafted.append(_Drafted(tree, Draft(merged, places)))
        return drafted

    def _is_tried(self, task: Task) -> bool:
        """Its draws are judged by the multi-step rule."""
        return task.is_drawn and self._config.acceptance == "multi_step"

    def _propose(self, index: int, drafter: Drafter, tasks: list[Task]) -> list[Draft]:
        """A drafter that fails guesses no more: nobody's answer needs it."""
        if index in self._failed:
            return [Draft(EMPTY, {})] * len(tasks)
        try:
            return drafter.propose(tasks)
        except Exception:
            self._fail(index)
            return [Draft(EMPTY, {})] * len(tasks)

    def _fail(self, index: int) -> None:
        """With the exception that is being handled."""
        self._failed.add(index)
        name = self._drafters[index].name
        logger.exception("drafter %s has failed, and guesses no more", name)

    def _meet(self, sample: Sample) -> None:
        """From now on its key is this sample's."""
        if self._known.get(sample.key) is not sample:
            self._forget(sample.key)
            self._known[sample.key] = sample

    def _task(self, sample: Sample) -> Task:
        key = sample.key
        self._meet(sample)
        # The last token that it may have is never computed, and so nothing is guessed after it.
        num_left = sample.group.max_output_tokens - sample.num_output_tokens - 1
        return Task(
            key,
            sample.token_ids,
            sample.num_prompt_tokens,
            sample.sampling,
            sample.sampling.sample_index + sample.sample_index,
            min(self._config.max_num_nodes, max(0, num_left)),
            is_drawn=self._is_drawn(sample.sampling),
        )

    def _is_drawn(self, sampling: Sampling) -> bool:
        # A trace says how each token is drawn again: with plain decoding's noise.
        is_bound = self._config.acceptance == "exact" or sampling.trace
        return sampling.temperature > 0.0 and not is_bound

    def _possible(self, tree: TokenTree, sample: Sample) -> TokenTree:
        """Without what follows an end, or lies beyond the sample's last place."""
        ends = end_token_ids(sample.sampling, self._eos_token_ids)
        num_left = sample.group.max_output_tokens - sample.num_output_tokens - 1
        dropped = {
            node
            for node, (parent, depth) in enumerate(zip(tree.parents, tree.depths, strict=True))
            if depth > num_left or (parent != ROOT and tree.token_ids[parent] in ends)
        }
        return tree.without(dropped)

    def _forget(self, key: Key) -> None:
        if self._known.pop(key, None) is not None:
            for drafter in self._drafters:
                drafter.forget(key)

    def check_integrity(self) -> None:
        """Raises: IntegrityError."""
        for drafter in self._drafters:
            drafter.check_integrity()


def make_speculator(
    config: EngineConfig,
    holdings: Holdings,
    drafters: Sequence[Drafter] | None = None,
    *,
    guesses: Guesses,
    eos_token_ids: frozenset[int],
    clock: Callable[[], float] = time.monotonic,
) -> Speculator | None:
    """None where nobody guesses.

    Args:
        drafters: None: those that the config names.
    Raises: SettingsError where the model takes no guesses.
    """
    wanted = config.speculation
    if drafters is None:
        drafters = [PromptLookup(wanted.ngram) for _ in wanted.drafters]
    num_wanted = len(wanted.drafters) + len(wanted.draft_models) + bool(wanted.draft_workers)
    num_wanted += len(wanted.draft_heads)
    if len(drafters) < num_wanted:
        raise SettingsError("speculation.draft_models: whoever makes the engine must load them")
    if not drafters:
        return None
    if guesses is Guesses.NONE:
        raise SettingsError(
            f"speculation: not with kv_dtype={config.kv_dtype}, whose blocks are "
            "quantized once, of the tokens that fill them; leave it empty, or kv_dtype at auto"
        )
    if config.exact and wanted.acceptance == "multi_step":
        raise SettingsError(
            "speculation.acceptance: multi_step is not for exact=true: which tokens are drawn "
            "depends on what was guessed, and so on what else is in a step; leave it at exact"
        )
    return Speculator(
        wanted,
        drafters,
        holdings,
        guesses=guesses,
        max_num_tokens=config.max_num_tokens_per_step,
        eos_token_ids=eos_token_ids,
        clock=clock,
    )


def _may_guess(sample: Sample, num_tokens: int) -> bool:
    """It draws in this step, and drew before."""
    request = sample.request
    return (
        sample.state is State.RUNNING
        and num_tokens == sample.num_pending_tokens
        and sample.takes_guesses
        and request.beam is None
        and request.hold_after is None
        and (sample.history is None or len(sample.token_ids) <= MAX_HISTORY)
        and not sample.group.is_continued
    )


def _in_grammar(tree: TokenTree, grammar: GrammarState | None) -> Guess:
    """The tree without what its grammar does not allow, and where each node is in it."""
    if grammar is None:
        return Guess(tree, (None,) * len(tree))
    states = {ROOT: grammar}
    dropped: set[int] = set()
    for node, (parent, token_id) in enumerate(zip(tree.parents, tree.token_ids, strict=True)):
        state = None if parent in dropped else states[parent].fork()
        if state is not None and state.accept(token_id) and not state.is_complete:
            states[node] = state
        else:
            dropped.add(node)
    kept = [states[node] for node in range(len(tree)) if node not in dropped]
    return Guess(tree.without(dropped), tuple(kept))


def _likeliest_path(tree: TokenTree) -> TokenTree:
    """The path to the node with the most to gain: the sum of chances along it."""
    if not len(tree):
        return EMPTY
    gains: list[float] = []
    for parent, chance in zip(tree.parents, tree.chances, strict=True):
        gains.append(chance + (0.0 if parent == ROOT else gains[parent]))
    best = tree.path(max(range(len(tree)), key=gains.__getitem__))
    return tree.without(set(range(len(tree))) - set(best))


def _likeliest_way_down(tree: TokenTree) -> TokenTree:
    """The path to a leaf by the likeliest child of each node, whatever is below it."""
    path: list[int] = []
    below = tree.children.get(ROOT)
    while below:
        path.append(max(below.values(), key=lambda node: (tree.chances[node], -node)))
        below = tree.children.get(path[-1])
    return tree.without(set(range(len(tree))) - set(path))


def _seeded(task: Task, drafter: int) -> Task:
    """With a seed of this drafter's and this step's own, if it is drawn: draws of two drafters are
    independent, and of what was drawn before."""
    if not task.is_drawn:
        return task
    one = task.sampling
    seed = random_key(one.seed, task.sample_index, len(task.token_ids), _DRAFTED, drafter)
    return task._replace(sampling=replace(one, seed=seed))


def _with_proposals(guess: Guess, task: Task, drafted: Draft) -> Guess:
    def key(depth: int) -> int:
        position = len(task.token_ids) + depth
        return random_key(task.sampling.seed, task.sample_index, position, _TRIED)

    return guess._replace(proposals=at_nodes(guess.tree, drafted.tree, drafted.distributions, key))


def _observe(calibration: Calibration, tree: TokenTree, token_ids: Iterable[int]) -> int:
    """Each node whose parent was kept, put to the test by the token that came there. Returns: how
    many were right.

    Args:
        token_ids: the last of them was drawn in any case.
    """
    node, chance, num_right = ROOT, 1.0, 0
    for token_id in token_ids:
        for guess, child in tree.children.get(node, {}).items():
            belief = tree.chances[child] / chance if chance > 0.0 else 0.0
            calibration.observe(belief, is_kept=guess == token_id)
        next_node = tree.child(node, token_id)
        if next_node is None:
            break
        num_right += 1
        node, chance = next_node, tree.chances[next_node]
    return num_right
