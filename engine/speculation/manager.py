"""SpeculationManager: the draft tokens of one step. It calls the proposers, drops draft tokens that
cannot be sampled, merges the trees, chooses the nodes to verify (controller.py) and allocates
their blocks; after the step it reports the accepted tokens to the controller.

Drafts never take another request's blocks, tokens of the step's budget that are planned for others,
or another sequence's place in the step. With multi-step acceptance (rejection_sampler.py) all draws
are tried, whether their nodes are computed or not, and whether a node is computed must not depend
on draws below it: chances never grow downwards, so `choose_nodes` and `best` reach a node before
its descendants.

A proposer that raises forgets all sequences and is not called during a back-off that doubles with
each failure; answers do not depend on proposers. Engine thread only.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Sequence as Values
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from engine.config import EngineConfig
from engine.grammar_constraints import end_token_ids
from engine.kv.cache_manager import KVCacheManager
from engine.models.interface import Guesses, LoadedModel
from engine.outputs import RequestOutput
from engine.request import RequestState, Sampling
from engine.sampling.host_device_copies import bring
from engine.sequence import Key, Sequence
from engine.speculation.config import SpeculationConfig
from engine.speculation.controller import SpeculationController
from engine.speculation.ngram import NgramProposer
from engine.speculation.proposer import (
    Draft,
    DraftTask,
    DraftTokens,
    HiddenStateProposer,
    HiddenStates,
    HiddenStateScope,
    Proposer,
)
from engine.speculation.rejection_sampler import (
    Distribution,
    DistributionKey,
    seeded,
    with_proposals,
)
from engine.speculation.token_tree import (
    EMPTY,
    ROOT,
    TokenTree,
    best_path,
    greedy_path,
    merge,
    numbered,
    prune,
)
from process.settings import SettingsError

if TYPE_CHECKING:
    from engine.grammar.state import GrammarState
    from engine.step_builder import Step

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 60.0
MAX_BACKOFF_S = 3600.0
"""Longest back-off, in seconds, after a proposer's failures; guessed."""
MAX_HISTORY = 8192
"""Length in tokens up to which a sequence with penalties on its own text, or with n-gram bans, gets
drafts: each node has a copy of the token history (1.8 ms at this length for 16 nodes)."""
_QUICK_S = 0.001
"""Longest duration of drafting, in seconds, at which drafts may be made before outputs are sent.
N-gram lookup is usually faster; a draft model takes several times as long and would delay
outputs. Guessed."""

_Planned = tuple[Sequence, int]
"""(a sequence, the number of its pending tokens that a step computes)."""


class _StepPlan:
    """A step without drafts, as far as drafts depend on it.

    Attributes:
        num_rows: tokens that are computed.
        num_sampling: sequences that sample a token.
        num_tokens: tokens that all sequences have.
        is_going_on: some sequence has sampled before.
    """

    def __init__(self, planned: Values[_Planned]) -> None:
        self.planned = planned
        self._draftable: list[Sequence] | None = None
        self.num_rows = self.num_sampling = self.num_tokens = 0
        self.is_going_on = False
        for sequence, num_tokens in planned:
            num_known = len(sequence.token_ids)
            self.num_rows += num_tokens
            self.num_tokens += num_known
            self.num_sampling += num_tokens == num_known - sequence.num_computed_tokens
            self.is_going_on = self.is_going_on or sequence.state is RequestState.RUNNING

    @property
    def draftable(self) -> list[Sequence]:
        """The sequences that may get drafts, computed on first use."""
        if self._draftable is None:
            self._draftable = [
                sequence
                for sequence, num_tokens in self.planned
                if may_draft(sequence, num_tokens) and max_draft_depth(sequence) > 0
            ]
        return self._draftable


class _MergedDraft(NamedTuple):
    """The merged drafts of all proposers for one task."""

    tree: TokenTree
    """The nodes that can be sampled and that the step can use."""
    all_nodes: Draft
    is_raw: bool
    """Whether the chances are those of the first proposer, not calibrated."""


_NOTHING = _MergedDraft(EMPTY, Draft(EMPTY, {}), is_raw=False)


class SpeculationManager:
    """Calls the proposers and manages the draft tokens of each step.

    Args:
        guesses: the kinds of token trees that the model supports.
        context_window: largest number of tokens of one sequence, draft tokens included.
        max_num_tokens: largest number of tokens of one step.
        clock: returns the time in seconds, with which costs of drafts are measured; it affects
            which drafts are made, and answers only by rounding.
    """

    def __init__(
        self,
        config: SpeculationConfig,
        proposers: Values[Proposer],
        cache_manager: KVCacheManager,
        *,
        guesses: Guesses,
        context_window: int,
        max_num_tokens: int,
        eos_token_ids: frozenset[int],
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._proposers = proposers
        self._hidden_state_proposers = {
            index: proposer
            for index, proposer in enumerate(proposers)
            if isinstance(proposer, HiddenStateProposer)
        }
        self._cache_manager = cache_manager
        self._guesses = guesses
        self._context_window = context_window
        self._max_num_tokens = max_num_tokens
        self._eos_token_ids = eos_token_ids
        self._clock = clock
        self._known: dict[Key, Sequence] = {}
        """The sequences that proposers may have state of, by key."""
        self._failed: dict[int, float] = {}
        """The end of the back-off, in seconds of the clock, of each proposer that failed, by
        index."""
        self._num_failures = Counter[int]()
        self._chooses_nodes = not config.always or len(proposers) > 1 or guesses is Guesses.CHAINS
        """Whether nodes are chosen even if there is room for all."""
        self._began_s = self._ended_s = clock()
        """Start time of the step that is being computed; end time of the previous one."""
        self._own_s: dict[int, float] = {}
        """Seconds spent on drafts of each proposer called for the step that is being computed, by
        index."""
        self._fed_s: dict[int, float] = {}
        """Seconds that `feed_hidden_states` of each proposer took in the step, by index."""
        self._beside_s = 0.0
        """Seconds of bookkeeping in the step, beyond the proposers' own time, that a step slept
        through would not have. Work done while the device computes is not counted."""
        self._last_s = float("inf")
        """Seconds that the last drafting took."""
        self._met: set[Key] = set()
        """Keys of the sequences that could get drafts in the last drafting."""
        self._plan = _StepPlan(())
        """The plan of the step that is being computed."""
        self._is_asleep = False
        """Whether only the duration of the step that is being computed is learnt."""
        # Launched steps leave no hidden states: a gap, which costs proposers their context.
        self._measures_again = self.hidden_state_scope is HiddenStateScope.NONE
        self._controller = self._new_controller()

    def _new_controller(self) -> SpeculationController:
        return SpeculationController(
            len(self._proposers), always=self._config.always, measures_again=self._measures_again
        )

    def _reset_controller(self) -> None:
        """Replace the controller by a new one after an error in it, since what it learnt may be
        wrong. Called in an exception handler; the proposers are kept."""
        logger.exception("costs of drafts were not learnt from a step: learnt anew")
        self._controller = self._new_controller()

    # ---- a step

    def is_quick(self, running: Collection[Key]) -> bool:
        """Whether drafting for these sequences should take at most `_QUICK_S`: the last drafting
        did, and no sequence is new, so that no proposer has to catch up with its tokens."""
        return self._last_s <= _QUICK_S and all(key in self._met for key in running)

    def begin_step(self, planned: Values[_Planned]) -> None:
        """Note the plan of a step that begins. If one of its sequences has sampled before, the step
        is timed from the end of the previous step, so that the engine's work in between is
        counted."""
        self._plan = _StepPlan(planned)
        if self._plan.is_going_on:
            self._began_s = self._ended_s
        else:
            self._began_s, self._beside_s = self._clock(), 0.0

    def is_idle(self, planned: Values[_Planned], *, num_unread: int = 0) -> bool:
        """Whether no proposer would be called for a step of this plan, so that the step may be
        launched ahead of time. Affects no later result.

        Args: num_unread: number of steps in flight for its sequences.
        """
        plan = self._plan_of(planned)
        if self._controller.is_asleep(plan.num_sampling):
            return True
        began = self._clock()
        found = self._is_idle_awake(plan, num_unread)
        self._beside_s += self._clock() - began
        return found

    def _is_idle_awake(self, plan: _StepPlan, num_unread: int) -> bool:
        if self._controller.is_idle(plan.num_sampling):
            return True
        if len(self._failed) == len(self._proposers) or plan.num_rows >= self._max_num_tokens:
            return True
        if num_unread == 0:
            return not plan.draftable
        return not any(max_draft_depth(sequence) > num_unread for sequence in plan.draftable)

    def on_launched_step(
        self, num_sequences: int, running: Collection[Key], *, is_first: bool, is_last: bool
    ) -> None:
        """Record the end of a step without drafts that was launched ahead of time.

        Args:
            num_sequences: number of sequences of the step.
            running: all sequences with a place in steps; state of all others is dropped.
            is_first: no other step was in flight when it was launched.
            is_last: no step was launched after it.
        """
        self._retain_only(running)
        self._ended_s = self._clock()
        seconds = self._ended_s - self._began_s
        self._beside_s = 0.0
        try:
            self._controller.update_rates()
            self._controller.on_launched_step(
                num_sequences, seconds, is_first=is_first, is_last=is_last
            )
        except Exception:
            self._reset_controller()

    def propose(
        self, planned: Values[_Planned], running: Collection[Key]
    ) -> dict[Key, DraftTokens]:
        """Make draft tokens for those sequences of a plan for which they should pay, and allocate
        their blocks. Returns: draft tokens by sequence.

        Args: running: all sequences with a place in steps; state of all others is dropped.
        """
        self._controller.begin_drafts()
        self._own_s = {}
        self._retain_only(running)
        plan = self._plan_of(planned)
        self._is_asleep = self._controller.is_asleep(plan.num_sampling)
        if self._is_asleep:
            return {}
        began = self._clock()
        drafts = self._propose(plan, began, num_running=len(running))
        if not self._own_s:
            self._beside_s += self._clock() - began
        return drafts

    def _propose(
        self, plan: _StepPlan, began: float, *, num_running: int
    ) -> dict[Key, DraftTokens]:
        num_rows, num_sampling = plan.num_rows, plan.num_sampling
        budget = self._max_num_tokens - num_rows
        can_draft = bool(plan.draftable) and budget >= 1
        is_calling = self._controller.begin_step(
            num_sampling, num_rows, plan.num_tokens, can_draft=can_draft
        )
        if not (is_calling and can_draft):
            return {}
        sequences = self._controller.select_sequences(plan.draftable)
        tasks = [task for one in sequences if (task := self._task(one)).num_nodes > 0]
        if not tasks:
            return {}
        by_key = {sequence.key: sequence for sequence in sequences}
        merged = self._merged_drafts(tasks, by_key)
        trees = self._controller.choose_nodes([one.tree for one in merged], budget)
        drafts: dict[Key, DraftTokens] = {}
        for task, tree, one in zip(tasks, trees, merged, strict=True):
            if one is _NOTHING:
                continue
            sequence = by_key[task.key]
            num_known = len(sequence.token_ids)
            room = self._cache_manager.max_draft_tokens(sequence, num_kept_blocks=num_running)
            room = min(room, self._context_window - num_known, budget)
            if len(tree) > room:
                if one.is_raw:
                    tree = self._controller.calibrate(0, tree)
                tree = tree.best(room)
            tokens = in_grammar(tree, sequence.grammar)
            if self._is_tried(task):
                tokens = with_proposals(tokens, task, one.all_nodes)
            num_nodes = len(tokens.tree)
            if num_nodes or tokens.proposals:
                self._cache_manager.fit_draft_blocks(sequence, num_nodes)
                drafts[task.key] = tokens
                budget -= num_nodes
        # What is done with the drafts is part of their price.
        rest_s = self._clock() - began - sum(self._own_s.values())
        for index in self._own_s:
            self._own_s[index] += rest_s / len(self._own_s)
        self._last_s = self._clock() - began
        self._met = {sequence.key for sequence in plan.draftable}
        return drafts

    def overlap_host_work(self, drafts: Mapping[Key, DraftTokens]) -> None:
        """Learn the last step's result and prepare the comparison of this step's drafts with its
        tokens. Called when the step is queued on the device, so that the device is not kept
        waiting."""
        if self._is_asleep:
            return  # the next steps have no drafts, and there may be no device to wait for
        try:
            self._controller.update_rates()
        except Exception:
            self._reset_controller()
        for tokens in drafts.values():
            tokens.tree.prepare()
        self._controller.prepare()

    def discard(self, planned: Values[_Planned], drafts: Mapping[Key, DraftTokens]) -> None:
        """Free the blocks of the drafts of a step that failed or is computed again."""
        self._controller.cancel_step()
        self._beside_s += sum(self._own_s.values())
        self._own_s = {}
        for sequence, _ in planned:
            if sequence.key in drafts:
                self._cache_manager.free_draft_blocks(sequence)

    def on_accepted(
        self, outputs: Values[RequestOutput], num_accepted: Mapping[Key, int], *, num_rows: int
    ) -> None:
        """Report the end of the step of the last `propose`, after `feed_hidden_states`. An error
        here is logged, and costs no token.

        Args:
            outputs: the outputs of the step.
            num_accepted: number of accepted nodes by sequence.
            num_rows: number of rows of the step, draft tokens included.
        """
        if self._is_asleep:
            self._ended_s = self._clock()
            seconds = self._ended_s - self._began_s
            self._controller.on_slept_step(self._plan.num_sampling, seconds)
            self._beside_s = 0.0
            return
        began = self._clock()
        try:
            self._on_accepted(began, outputs, num_accepted, num_rows)
        except Exception:
            self._reset_controller()

    def _on_accepted(
        self,
        began: float,
        outputs: Values[RequestOutput],
        num_accepted: Mapping[Key, int],
        num_rows: int,
    ) -> None:
        self._controller.on_outputs(outputs, num_accepted)
        self._ended_s = self._clock()
        seconds = self._ended_s - self._began_s
        beside_s = self._beside_s + self._ended_s - began
        # Not used where drafts are made always.
        num_right = {} if self._config.always else self._controller.num_accepted(self._own_s)
        own_s = {index: one_s + self._fed_s.get(index, 0.0) for index, one_s in self._own_s.items()}
        self._controller.on_step(num_rows, seconds, own_s, num_right, beside_s=beside_s)
        self._beside_s = self._clock() - self._ended_s  # of the next step

    def _plan_of(self, planned: Values[_Planned]) -> _StepPlan:
        return self._plan if self._plan.planned is planned else _StepPlan(planned)

    # ---- trees

    def _merged_drafts(
        self, tasks: list[DraftTask], sequences: Mapping[Key, Sequence]
    ) -> list[_MergedDraft]:
        """Call the proposers, and merge their drafts of each task."""
        found: list[list[TokenTree]] = [[] for _ in tasks]
        drawn_from: list[dict[DistributionKey, Distribution]] = [{} for _ in tasks]
        for index in range(len(self._proposers)):
            own_tasks = self._controller.select_tasks(index, tasks)
            if not own_tasks:
                continue
            began = self._clock()
            drafts = self._call(index, [seeded(task, index) for task in own_tasks])
            self._own_s[index] = self._clock() - began
            for place, (task, draft) in enumerate(zip(own_tasks, drafts, strict=True)):
                tree = draft.tree
                self._controller.on_proposed(task.key, index, tree)
                if not self._is_raw(task, tree):
                    tree = self._controller.calibrate(index, tree)
                if self._is_tried(task):
                    tree = numbered(tree, index)
                    for (path, _), distribution in draft.distributions.items():
                        drawn_from[place][path, index] = distribution
                found[place].append(tree)
        merged_drafts: list[_MergedDraft] = []
        for own, distributions, task in zip(found, drawn_from, tasks, strict=True):
            merged = merge(own) if own else EMPTY
            if not len(merged):
                merged_drafts.append(_NOTHING)
                continue
            ends = end_token_ids(sequences[task.key].sampling, self._eos_token_ids)
            tree = prune(merged, task.max_depth, ends).best(task.num_nodes)
            if self._guesses is Guesses.CHAINS:
                tree = greedy_path(tree) if self._is_tried(task) else best_path(tree)
            is_raw = self._is_raw(task, merged)
            merged_drafts.append(_MergedDraft(tree, Draft(merged, distributions), is_raw))
        return merged_drafts

    def _is_raw(self, task: DraftTask, tree: TokenTree) -> bool:
        """Whether chances need no calibration yet: all nodes are taken if there is room."""
        return not self._chooses_nodes and len(tree) <= task.num_nodes

    def _is_tried(self, task: DraftTask) -> bool:
        """Whether the draws of the task are verified with multi-step acceptance."""
        return task.is_drawn and self._config.acceptance == "multi_step"

    def _task(self, sequence: Sequence) -> DraftTask:
        self._add_sequence(sequence)
        max_depth, sampling = max_draft_depth(sequence), sequence.request.sampling
        return DraftTask(  # positional: a third of the price by name
            sequence.key,
            sequence.token_ids,
            sequence.num_prompt_tokens,
            sampling,
            sampling.sample_index + sequence.sample_index,
            self._config.max_num_nodes if max_depth > 0 else 0,
            max_depth,
            self._is_drawn(sampling),
        )

    def _is_drawn(self, sampling: Sampling) -> bool:
        # A trace tells how each token can be sampled again: with plain decoding's noise.
        is_bound = self._config.acceptance == "exact" or sampling.trace
        return sampling.temperature > 0.0 and not is_bound

    # ---- proposers

    def _call(self, index: int, tasks: list[DraftTask]) -> list[Draft]:
        """Call one proposer. Returns: empty drafts if it fails or is in its back-off."""
        if index not in self._failed:
            try:
                return self._proposers[index].propose(tasks)
            except Exception:
                self._fail(index)
        return [Draft(EMPTY, {})] * len(tasks)

    def _fail(self, index: int) -> None:
        """Start the back-off of a proposer that raised. Called in an exception handler."""
        self._num_failures[index] += 1
        seconds = backoff_s(self._num_failures[index])
        self._failed[index] = self._clock() + seconds
        proposer = self._proposers[index]
        logger.exception(
            "proposer %s has failed; it is called again in %g s", proposer.name, seconds
        )
        for key in self._known:
            with contextlib.suppress(Exception):  # it may well be broken
                proposer.forget(key)

    def _add_sequence(self, sequence: Sequence) -> None:
        """Register the sequence under its key, in place of an earlier one."""
        if self._known.get(sequence.key) is not sequence:
            self._forget(sequence.key)
            self._known[sequence.key] = sequence

    def _retain_only(self, running: Collection[Key]) -> None:
        """Drop the state of all sequences not in `running`, and end back-offs that are over: the
        proposer is called again and has no state of any sequence."""
        if self._failed:
            now_s = self._clock()
            for index in [index for index, due_s in self._failed.items() if now_s >= due_s]:
                del self._failed[index]
        for key in [key for key in self._known if key not in running]:
            self._forget(key)

    def _forget(self, key: Key) -> None:
        if self._known.pop(key, None) is None:
            return
        for index, proposer in enumerate(self._proposers):
            try:
                if index not in self._failed:
                    proposer.forget(key)
            except Exception:
                self._fail(index)

    @property
    def failed_proposers(self) -> set[int]:
        """Indices of the proposers that are not called now because they failed."""
        return set(self._failed)

    def check_integrity(self) -> None:
        """Check the proposers that have not failed. Raises: IntegrityError where the state of one
        is inconsistent."""
        for index, proposer in enumerate(self._proposers):
            if index not in self._failed:
                proposer.check_integrity()

    # ---- hidden states

    @property
    def hidden_state_scope(self) -> HiddenStateScope:
        """The hidden states that a step must keep for the proposers."""
        if not self._hidden_state_proposers:
            return HiddenStateScope.NONE
        scopes = (one.hidden_state_scope for one in self._live_hidden_state_proposers().values())
        return max(scopes, default=HiddenStateScope.NONE)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Indices of the layers whose inputs a step must keep for the proposers."""
        if not self._hidden_state_proposers:
            return ()
        live = self._live_hidden_state_proposers().values()
        return tuple(sorted({layer for one in live for layer in one.aux_layers}))

    def feed_hidden_states(
        self,
        step: Step,
        planned: Values[_Planned],
        drafts: Mapping[Key, DraftTokens],
        model: LoadedModel,
    ) -> None:
        """Pass the hidden states of a step to the proposers, after its tokens were added to the
        sequences. An error of a proposer is logged, and costs no token.

        Args: planned, drafts: the plan and the drafts that the step was built from.
        """
        self._fed_s = {}
        if not self._hidden_state_proposers:
            return
        live = dict(self._live_hidden_state_proposers())
        if not live:
            return
        began_s = self._clock()
        try:
            collected = collect_hidden_states(step, planned, drafts, model)
            for sequence, _ in collected:
                self._add_sequence(sequence)
        except Exception:
            for index in live:
                self._fail(index)
            return
        collected_s = (self._clock() - began_s) / len(live)
        for index, proposer in live.items():
            began_s = self._clock()
            try:
                if index in self._failed:  # since the step ended
                    continue
                proposer.feed_hidden_states([states for _, states in collected])
            except Exception:
                self._fail(index)
            self._fed_s[index] = self._clock() - began_s + collected_s

    def _live_hidden_state_proposers(self) -> dict[int, HiddenStateProposer]:
        if not self._failed:
            return self._hidden_state_proposers
        return {
            index: one
            for index, one in self._hidden_state_proposers.items()
            if index not in self._failed
        }


def make_speculation_manager(
    config: EngineConfig,
    cache_manager: KVCacheManager,
    proposers: Values[Proposer] | None = None,
    *,
    guesses: Guesses,
    context_window: int,
    eos_token_ids: frozenset[int],
    clock: Callable[[], float],
) -> SpeculationManager | None:
    """Create the SpeculationManager that the settings ask for; None without a proposer.

    Args: proposers: the proposers; None: those that the settings name.
    Raises: SettingsError for settings that contradict each other.
    """
    wanted = config.speculation
    if proposers is None:
        proposers = [NgramProposer(wanted.ngram) for _ in wanted.drafters]
    num_wanted = len(wanted.drafters) + len(wanted.draft_models) + bool(wanted.draft_workers)
    num_wanted += len(wanted.draft_heads)
    if len(proposers) < num_wanted:
        raise SettingsError(
            "speculation.draft_models: load them (load_proposers), and pass them as proposers"
        )
    if not proposers:
        return None
    if config.exact and wanted.acceptance == "multi_step":
        raise SettingsError(
            "speculation.acceptance: multi_step is not for exact=true: which tokens are drawn "
            "depends on what was guessed, and so on what else is in a step; leave it at exact"
        )
    return SpeculationManager(
        wanted,
        proposers,
        cache_manager,
        guesses=guesses,
        context_window=context_window,
        max_num_tokens=config.max_num_tokens_per_step,
        eos_token_ids=eos_token_ids,
        clock=clock,
    )


def backoff_s(num_failures: int) -> float:
    """Return the back-off in seconds after a proposer's failure number `num_failures`, counted from
    1: FIRST_BACKOFF_S, doubled with each failure, at most MAX_BACKOFF_S. Pure."""
    return min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(num_failures - 1, 16))


def may_draft(sequence: Sequence, num_tokens: int) -> bool:
    """Return whether a sequence may get drafts in a step that computes `num_tokens` of its tokens:
    it samples a token in the step, and has sampled one before."""
    request = sequence.request
    return (
        sequence.state is RequestState.RUNNING
        and num_tokens == sequence.num_pending_tokens
        and sequence.takes_guesses
        and (sequence.grammar is None or not sequence.grammar.is_busy)
        and request.beam is None
        and request.hold_after is None
        and (sequence.history is None or len(sequence.token_ids) <= MAX_HISTORY)
        and not sequence.group.is_continued
    )


def max_draft_depth(sequence: Sequence) -> int:
    """Return the largest useful depth of a sequence's draft tree: the last token that the sequence
    may have is never computed, so nothing is drafted after it."""
    return max(0, sequence.group.max_output_tokens - sequence.num_output_tokens - 1)


def in_grammar(tree: TokenTree, grammar: GrammarState | None) -> DraftTokens:
    """Remove the nodes that the grammar does not allow. Returns: the remaining tree, with the
    grammar state after each node."""
    if grammar is None:
        return DraftTokens(tree, (None,) * len(tree))
    states = {ROOT: grammar}
    dropped: set[int] = set()
    for node, (parent, token_id) in enumerate(zip(tree.parents, tree.token_ids, strict=True)):
        state = None if parent in dropped else states[parent].fork()
        if state is not None and state.accept(token_id) and not state.is_complete:
            states[node] = state
        else:
            dropped.add(node)
    kept = [states[node] for node in range(len(tree)) if node not in dropped]
    return DraftTokens(tree.without(dropped), tuple(kept))


def collect_hidden_states(
    step: Step,
    planned: Values[_Planned],
    drafts: Mapping[Key, DraftTokens],
    model: LoadedModel,
) -> list[tuple[Sequence, HiddenStates]]:
    """Copy the hidden states of the tokens that a step computed, without rejected draft tokens, by
    sequence. Called when the step's tokens were added to the sequences. All are views of one new
    tensor, none of the model's memory.

    Args: planned: the plan that the step was built from.
    """
    every = model.every_hidden()
    kept = step.drawn_of(model.hidden()) if every is None else every
    rows: dict[int, int] = {}  # by sequence: its first row of logits
    for row, sequence in enumerate(step.samples):
        rows.setdefault(id(sequence), row)
    found: list[tuple[Sequence, int, int]] = []  # (sequence, position of the first, number)
    places: list[int] = []  # in `kept`: those of all of them
    first = 0
    for (sequence, num_tokens), span in zip(planned, step.batch.spans, strict=True):
        first_row = rows.get(id(sequence))
        nodes = _accepted_nodes(sequence, drafts.get(sequence.key), span.start + num_tokens)
        if every is not None:
            trunk = range(first, first + num_tokens)
        elif first_row is not None:
            trunk = range(first_row, first_row + 1)
        else:
            trunk = range(0)
        own = [*trunk, *(trunk.stop + node for node in nodes)] if trunk else []
        first += span.num_tokens
        start = span.start + num_tokens - len(trunk)
        for one in _sequences_of(sequence, is_sampled=first_row is not None):
            own_places = own[: max(0, one.num_computed_tokens - start)]
            if own_places:
                found.append((one, start, len(own_places)))
                places += own_places
    if not found:
        return []
    # A copy: views would keep the hidden states of the whole step on the device.
    counts = [count for _, _, count in found]

    def split(of_all: torch.Tensor, wanted: Values[int]) -> tuple[torch.Tensor, ...]:
        rows = bring(np.array(wanted, dtype=np.int64), of_all.device)
        return torch.split(of_all.index_select(0, rows), counts)

    parts = split(kept, places)
    if every is None:
        draw_indices = step.draw_indices
        places = [draw_indices[place] for place in places]
    layers = {layer: split(rows, places) for layer, rows in model.layer_inputs().items()}
    return [
        (
            one,
            HiddenStates(
                one.key,
                one.token_ids,
                start,
                parts[index],
                {layer: own[index] for layer, own in layers.items()},
            ),
        )
        for index, (one, start, _) in enumerate(found)
    ]


def _accepted_nodes(sequence: Sequence, tokens: DraftTokens | None, end: int) -> list[int]:
    """Return the nodes of a sequence's tree that were accepted: those whose tokens it has from
    position `end` on."""
    nodes: list[int] = []
    if tokens is None:
        return nodes
    for token_id in sequence.token_ids[end : sequence.num_computed_tokens]:
        node = tokens.tree.child(nodes[-1] if nodes else ROOT, token_id)
        if node is None:
            break
        nodes.append(node)
    return nodes


def _sequences_of(sequence: Sequence, *, is_sampled: bool) -> Iterator[Sequence]:
    """Iterate over the sequence and the samples that were forked from its prompt in this step, as
    far as they are still running."""
    yield from filter(_goes_on, (sequence,))
    if is_sampled and sequence.num_output_tokens == 1:
        for one in sequence.group.samples.values():
            if one is not sequence and one.num_output_tokens == 1 and _goes_on(one):
                yield one


def _goes_on(sequence: Sequence) -> bool:
    request = sequence.request
    is_here = sequence.state in (RequestState.PREFILLING, RequestState.RUNNING)
    return is_here and request.beam is None and request.hold_after is None
