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
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from engine.constraints import end_token_ids
from engine.kv.cache_manager import KVCacheManager
from engine.models.interface import Guesses
from engine.outputs import RequestOutput
from engine.request import Sampling
from engine.sequence import Key
from engine.sequence import Sequence as Sample
from engine.speculation.config import SpeculationConfig
from engine.speculation.drafter import Distribution, Draft, Drafter, Guess, Place, Task
from engine.speculation.drawing import seeded, with_proposals
from engine.speculation.expansion import choose
from engine.speculation.exploration import Exploration
from engine.speculation.heads.hidden import Wants
from engine.speculation.heads.readers import Readers
from engine.speculation.lessons import Lessons
from engine.speculation.planned import Plan, Planned
from engine.speculation.possible import (
    in_grammar,
    likeliest_path,
    likeliest_way_down,
    num_levels,
    within,
)
from engine.speculation.roster import Roster
from engine.speculation.tree import EMPTY, TokenTree, merge, numbered

logger = logging.getLogger(__name__)

_QUICK_S = 0.001
"""Guesses that take no longer may be asked for before events are told: those of lookups, as a rule;
a draft model takes several times as long, and would keep the events back for what the host saves by
it. Guessed."""


class _Drafted(NamedTuple):
    """All drafters' guesses for one task."""

    tree: TokenTree
    """What is possible of them, and of use."""
    all_of_them: Draft
    is_raw: bool
    """Its chances are those of the first drafter, as they are believed by itself."""


_NOTHING = _Drafted(EMPTY, Draft(EMPTY, {}), is_raw=False)


class Speculator:
    """See the module.

    Args:
        guesses: what the model takes.
        context_window: slots that one sequence may have, those of guesses included.
        max_num_tokens: of one step.
        clock: what guesses cost is measured by; no token depends on it, up to rounding.
    """

    def __init__(
        self,
        config: SpeculationConfig,
        drafters: Sequence[Drafter],
        cache_manager: KVCacheManager,
        *,
        guesses: Guesses,
        context_window: int,
        max_num_tokens: int,
        eos_token_ids: frozenset[int],
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._roster = Roster(drafters, clock)
        self._cache_manager = cache_manager
        self._guesses = guesses
        self._context_window = context_window
        self._max_num_tokens = max_num_tokens
        self._eos_token_ids = eos_token_ids
        self._clock = clock
        self._num_drafters = len(drafters)
        self._weighs = not config.always or len(drafters) > 1 or guesses is Guesses.CHAINS
        """Nodes are chosen although there is room for all."""
        self._began_s = self._ended_s = clock()
        """Of the step that is being computed; of the one before."""
        self._asked: dict[int, float] = {}
        """Drafters that guessed for the step that is being computed: seconds that it took them."""
        self._beside_s = 0.0
        """That the step that is being computed has spent here beside that, and would not have were
        it slept through. What is done in the wait for a step is not counted: a device computes
        meanwhile."""
        self._own_s = float("inf")
        """That guessing took when somebody was asked last."""
        self._met: set[Key] = set()
        """Who could be guessed for then."""
        self._plan = Plan(())
        """That is being computed."""
        self._is_asleep = False
        """Of the step that is being computed nothing is learnt but how long it lasts."""
        self.readers = Readers(drafters, self._roster, clock)
        # Launched steps leave no hidden states: a gap, which costs their drafters the context.
        self._measures_again = self.readers.wants is Wants.NONE
        self._forget_lessons()

    def _forget_lessons(self) -> None:
        """Nothing was learnt yet of what guesses are worth."""
        self._lessons = Lessons(self._num_drafters)
        self._exploration = Exploration(
            self._num_drafters, always=self._config.always, measures_again=self._measures_again
        )

    def _learn_anew(self) -> None:
        """With the exception that is being handled: what was learnt may be wrong. The drafters are
        not to blame, and go on."""
        logger.exception("what guesses are worth was not learnt from a step: learnt anew")
        self._forget_lessons()

    def is_quick(self, running: Collection[Key]) -> bool:
        """It takes no time to speak of to guess for these: it took none when somebody was last
        asked, and there is nobody among them whose tokens drafters may have to catch up with."""
        return self._own_s <= _QUICK_S and all(key in self._met for key in running)

    def begin(self, planned: Sequence[Planned]) -> None:
        """A step of this plan begins. Whoever decodes waits from one step's end to the next one's,
        so that what the engine does in between is part of a step: a launched one is computed
        meanwhile."""
        self._plan = Plan(planned)
        if self._plan.is_going_on:
            self._began_s = self._ended_s
        else:
            self._began_s, self._beside_s = self._clock(), 0.0

    def rests(self, planned: Sequence[Planned], *, num_unread: int = 0) -> bool:
        """Nobody would be asked for a step of this plan, so that it may as well be launched ahead.
        Changes nothing.

        Args:
            num_unread: steps that are under way for its samples.
        """
        plan = self._plan_of(planned)
        if self._exploration.sleeps(plan.num_drawing):
            return True
        began = self._clock()
        found = self._rests_awake(plan, num_unread)
        self._beside_s += self._clock() - began
        return found

    def _rests_awake(self, plan: Plan, num_unread: int) -> bool:
        if self._exploration.rests(plan.num_drawing):
            return True
        if not self._roster.is_live or plan.num_rows >= self._max_num_tokens:
            return True
        if num_unread == 0:
            return not plan.possible
        return not any(num_levels(sample) > num_unread for sample in plan.possible)

    def pass_by(
        self, num_sequences: int, running: Collection[Key], *, is_first: bool, is_last: bool
    ) -> None:
        """A launched step of so many sequences is over, without guesses.

        Args:
            running: see `guess`.
            is_first, is_last: see Exploration.pass_by.
        """
        self._roster.forget_all_but(running)
        self._ended_s = self._clock()
        seconds = self._ended_s - self._began_s
        self._beside_s = 0.0
        try:
            self._lessons.study()
            self._exploration.pass_by(num_sequences, seconds, is_first=is_first, is_last=is_last)
        except Exception:
            self._learn_anew()

    def guess(self, planned: Sequence[Planned], running: Collection[Key]) -> dict[Key, Guess]:
        """For those of a plan that are worth it; the blocks for them are there.

        Args:
            running: whoever has a place in steps; all others are forgotten.
        """
        self._lessons.begin()
        self._asked = {}
        self._roster.forget_all_but(running)
        plan = self._plan_of(planned)
        self._is_asleep = self._exploration.sleeps(plan.num_drawing)
        if self._is_asleep:
            return {}
        began = self._clock()
        guesses = self._guess(plan, began, num_running=len(running))
        if not self._asked:
            self._beside_s += self._clock() - began
        return guesses

    def _guess(self, plan: Plan, began: float, *, num_running: int) -> dict[Key, Guess]:
        num_rows, num_drawing = plan.num_rows, plan.num_drawing
        budget = self._max_num_tokens - num_rows
        can_ask = bool(plan.possible) and budget >= 1
        is_asking = self._exploration.begin(num_drawing, num_rows, plan.num_tokens, can_ask=can_ask)
        if not (is_asking and can_ask):
            return {}
        samples = self._exploration.among(plan.possible)
        tasks = [task for sample in samples if (task := self._task(sample)).num_nodes > 0]
        if not tasks:
            return {}
        by_key = {sample.key: sample for sample in samples}
        drafted = self._draft(tasks, by_key)
        trees = [one.tree for one in drafted]
        if not self._config.always:
            trees = choose(trees, self._exploration.load, budget)
        guesses: dict[Key, Guess] = {}
        for task, tree, one in zip(tasks, trees, drafted, strict=True):
            if one is _NOTHING:
                continue
            sample = by_key[task.key]
            num_known = len(sample.token_ids)
            room = self._cache_manager.max_draft_tokens(sample, num_kept_blocks=num_running)
            room = min(room, self._context_window - num_known, budget)
            if len(tree) > room:
                if one.is_raw:
                    tree = self._lessons.calibrated(0, tree)
                tree = tree.best(room)
            guess = in_grammar(tree, sample.grammar)
            if self._is_tried(task):
                guess = with_proposals(guess, task, one.all_of_them)
            num_nodes = len(guess.tree)
            if num_nodes or guess.proposals:
                self._cache_manager.fit_draft_blocks(sample, num_nodes)
                guesses[task.key] = guess
                budget -= num_nodes
        # What is done with the drafts is part of their price.
        rest_s = self._clock() - began - sum(self._asked.values())
        for index in self._asked:
            self._asked[index] += rest_s / len(self._asked)
        self._own_s = self._clock() - began
        self._met = {sample.key for sample in plan.possible}
        return guesses

    def use_wait(self, guesses: Mapping[Key, Guess]) -> None:
        """Called when a step with these is queued on the device: what the step before has taught is
        learnt, and what this one's draws will be held against is made ready."""
        if self._is_asleep:
            return  # nobody will guess in the next steps, and there may be no device to wait for
        try:
            self._lessons.study()
        except Exception:
            self._learn_anew()
        for guess in guesses.values():
            guess.tree.prepare()
        self._lessons.prepare()

    def take_back(self, planned: Sequence[Planned], guesses: Mapping[Key, Guess]) -> None:
        """The step failed, or is computed again: the blocks for its guesses go back."""
        self._exploration.take_back()
        self._beside_s += sum(self._asked.values())
        self._asked = {}
        for sample, _ in planned:
            if sample.key in guesses:
                self._cache_manager.free_draft_blocks(sample)

    def learn(
        self,
        events: Sequence[RequestOutput],
        num_kept: Mapping[Key, int],
        *,
        num_rows: int,
        seen_s: Mapping[int, float],
    ) -> None:
        """What came of `guess`; the step is over, and whatever fails here costs nobody's tokens.

        Args:
            events: of the step.
            num_kept: of each guess, how many nodes.
            num_rows: of the step.
            seen_s: seconds that its hidden states took, by number of the drafter.
        """
        if self._is_asleep:
            self._ended_s = self._clock()
            seconds = self._ended_s - self._began_s
            self._exploration.sleep(self._plan.num_drawing, seconds)
            self._beside_s = 0.0
            return
        began = self._clock()
        try:
            self._learn(began, events, num_kept, num_rows, seen_s)
        except Exception:
            self._learn_anew()

    def _learn(
        self,
        began: float,
        events: Sequence[RequestOutput],
        num_kept: Mapping[Key, int],
        num_rows: int,
        seen_s: Mapping[int, float],
    ) -> None:
        self._lessons.hear(events, num_kept)
        self._ended_s = self._clock()
        seconds = self._ended_s - self._began_s
        beside_s = self._beside_s + self._ended_s - began
        # Nobody asks for it where guesses are made always.
        num_right = {} if self._config.always else self._lessons.num_right(self._asked)
        own_s = {index: one_s + seen_s.get(index, 0.0) for index, one_s in self._asked.items()}
        self._exploration.learn(num_rows, seconds, own_s, num_right, beside_s=beside_s)
        self._beside_s = self._clock() - self._ended_s  # of the next step

    def _plan_of(self, planned: Sequence[Planned]) -> Plan:
        return self._plan if self._plan.planned is planned else Plan(planned)

    def _draft(self, tasks: list[Task], samples: Mapping[Key, Sample]) -> list[_Drafted]:
        found: list[list[TokenTree]] = [[] for _ in tasks]
        drawn_from: list[dict[Place, Distribution]] = [{} for _ in tasks]
        for index in range(len(self._roster)):
            asked = self._exploration.choose(index, tasks)
            if not asked:
                continue
            began = self._clock()
            drafts = self._roster.propose(index, [seeded(task, index) for task in asked])
            self._asked[index] = self._clock() - began
            for place, (task, draft) in enumerate(zip(asked, drafts, strict=True)):
                tree = draft.tree
                self._lessons.note(task.key, index, tree)
                if not self._is_raw(task, tree):
                    tree = self._lessons.calibrated(index, tree)
                if self._is_tried(task):
                    tree = numbered(tree, index)
                    for (path, _), distribution in draft.distributions.items():
                        drawn_from[place][path, index] = distribution
                found[place].append(tree)
        drafted: list[_Drafted] = []
        for own, places, task in zip(found, drawn_from, tasks, strict=True):
            merged = merge(own) if own else EMPTY
            if not len(merged):
                drafted.append(_NOTHING)
                continue
            ends = end_token_ids(samples[task.key].sampling, self._eos_token_ids)
            tree = within(merged, task.max_depth, ends).best(task.num_nodes)
            if self._guesses is Guesses.CHAINS:
                tree = likeliest_way_down(tree) if self._is_tried(task) else likeliest_path(tree)
            is_raw = self._is_raw(task, merged)
            drafted.append(_Drafted(tree, Draft(merged, places), is_raw))
        return drafted

    def _is_raw(self, task: Task, tree: TokenTree) -> bool:
        """Nobody needs to know which of its nodes are the likeliest, or else finds out."""
        return not self._weighs and len(tree) <= task.num_nodes

    def _is_tried(self, task: Task) -> bool:
        """Its draws are judged by the multi-step rule."""
        return task.is_drawn and self._config.acceptance == "multi_step"

    def _task(self, sample: Sample) -> Task:
        self._roster.meet(sample)
        max_depth, sampling = num_levels(sample), sample.request.sampling
        return Task(  # positional: a third of the price by name
            sample.key,
            sample.token_ids,
            sample.num_prompt_tokens,
            sampling,
            sampling.sample_index + sample.sample_index,
            self._config.max_num_nodes if max_depth > 0 else 0,
            max_depth,
            self._is_drawn(sampling),
        )

    def _is_drawn(self, sampling: Sampling) -> bool:
        # A trace says how each token is drawn again: with plain decoding's noise.
        is_bound = self._config.acceptance == "exact" or sampling.trace
        return sampling.temperature > 0.0 and not is_bound

    def check_integrity(self) -> None:
        """Raises: IntegrityError."""
        self._roster.check_integrity()
