"""LLMEngine: continuous batching of one model over one device cache. Tokens in, tokens and filled
KV blocks out.

Prefill and decode are the same loop: a step is {sequence: number of tokens}. A role is a way to
call it: a prefill worker reserves with `hold_after=1` and reads the blocks; a decode worker loads
blocks between `reserve` and `start`; a caller that loads nothing can `submit`, and the engine
allocates blocks when the request's turn comes. States and their meaning: engine/request.py. No RPC,
no asyncio, no text.

What a step calls, in order: engine/input_processor.py admits requests whose grammar is compiled,
engine/scheduler.py plans, engine/runner.py runs the model and samples, engine/output_processor.py
applies the results. Blocks belong to engine/kv/cache_manager.py, preempted sequences to
engine/preemptor.py, steps that run ahead to engine/in_flight.py.

Threads: every method is called from one thread, the engine's. Other threads may read `kv` bytes of
filled blocks, write those of reserved blocks that are not started, and read `model_info`. If blocks
may be preempted (`EngineConfig.preemption`), other threads may read filled blocks only of held
requests, which are never preempted, and those that `hold_cached` named.

Invariants: a full block of a started request does not change any more; free + evictable +
referenced + quarantined == total; every admitted request ends (`check_integrity`,
tests/unit/engine/test_preemption.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Values
from pathlib import Path

import torch

from checkpoints.resolve import resolve
from engine.config import EngineConfig
from engine.constraints import Constraints, MakeService
from engine.decode_rows import DecodeRows
from engine.errors import InvalidRequest, NoBlocks, UnknownRequest, WrongState
from engine.group import Group
from engine.in_flight import InFlight
from engine.input_processor import InputProcessor
from engine.kv.block_pool import BlockPool
from engine.kv.cache_manager import KVCacheManager
from engine.kv.memory import KvMemory
from engine.kv.prefix_cache import PrefixCache
from engine.kv.sizing import choose_num_blocks, free_memory_bytes, held_bytes
from engine.lora.adapter import Adapter
from engine.lora.limits import LoraLimits
from engine.lora.manager import AdapterInfo
from engine.metrics import (
    EngineMetrics,
    EngineStats,
    EngineTotals,
    MetricsSnapshot,
    compute_stats,
    count_running_and_waiting,
)
from engine.models.interface import LoadedModel, Progress
from engine.output_processor import OutputProcessor
from engine.outputs import RequestOutput, StepOutput
from engine.parking import Parking, choose_parking
from engine.plain_steps import PlainSteps
from engine.preemptor import Preemptor
from engine.request import (
    STARTED,
    WITHOUT_BLOCKS,
    DetachedRequest,
    ModelInfo,
    Request,
    Reservation,
    State,
    StopPolicy,
)
from engine.runner import Runner
from engine.scheduler import Scheduler
from engine.speculation.controller import cost_clock
from engine.speculation.manager import make_speculation_manager
from engine.speculation.proposer import Proposer, close_proposers
from engine.speculation.remote import DraftPeer
from engine.warm_up import warm_up

IDLE_WAIT_S = 0.002
"""Seconds that a step waits if it has nothing to compute yet. Short beside a compilation, long
beside a look at the waiting requests; guessed."""

_MAY_DETACH = STARTED | {
    State.WAITING_FOR_GRAMMAR,
    State.PREEMPTED,
    State.PARKED,
    State.SWAPPING,
}


class LLMEngine:
    """One model with its device cache, its requests and its step loop.

    `kv` is the device cache, `model_info` describes the loaded model.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: LoadedModel,
        *,
        stop_policy: StopPolicy | None = None,
        parking: Parking | None = None,
        make_grammars: MakeService | None = None,
        proposers: Values[Proposer] | None = None,
        draft_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take memory for the KV cache.

        Args:
            parking: where swapped blocks go; None: into this process' memory.
            make_grammars: called when the first request with a grammar comes; None: they are
                refused.
            proposers: what proposes draft tokens; None: as `config.speculation` says.
            draft_bytes: memory that they hold on the model's device.
            clock: seconds; for the metrics, and for the cost of draft tokens.
        Raises: TooFewBlocks; SettingsError for a preemption that the device cannot do.
        """
        self.config = config
        self._clock = clock
        self._undelivered: list[RequestOutput] = []
        """Outputs of a step that an exception cut short: the next step returns them."""
        self._model = model
        self._proposers = proposers or ()
        window = model.info.context_window
        device = model.device_memory()
        num_blocks = choose_num_blocks(
            config,
            model.layout,
            window,
            free_memory_bytes(model.info.device),
            None if device is None else dataclasses.replace(device, draft_bytes=draft_bytes),
            model.kv_record,
        )
        self.kv: KvMemory = model.make_memory(num_blocks)
        self.model_info: ModelInfo = dataclasses.replace(model.info, num_blocks=num_blocks)
        model.attach(self.kv)
        self._pool = BlockPool(num_blocks)
        if self.kv.tails is not None:
            self.kv.tails.is_live = self._pool.is_used
        # A stop policy sees every token before the next one is sampled.
        is_ahead = config.overlap and stop_policy is None
        self._ahead = model.ahead if is_ahead else None
        self._in_flight = InFlight(self._ahead, self._pool, self.kv.layout.block_size)
        self._cache_manager = KVCacheManager(self.kv, PrefixCache(self._pool), self._in_flight)
        self._metrics = EngineMetrics(clock, num_blocks)
        parking = choose_parking(config, self.kv.device, self.park_bytes, parking)
        self._preemptor = Preemptor(self._cache_manager, parking, self._metrics)
        self._scheduler = Scheduler(config, self._cache_manager, self._preemptor, self._metrics)
        eos_token_ids = frozenset(model.info.eos_token_ids)
        self._groups: dict[str, Group] = {}
        self._totals = EngineTotals()
        self._constraints = Constraints(
            make_grammars,
            eos_token_ids=eos_token_ids,
            jump_forward=config.jump_forward,
        )
        self._output_processor = OutputProcessor(
            self._groups,
            self._cache_manager,
            self._scheduler,
            self._preemptor,
            self._constraints,
            model.adapters,
            self._metrics,
            self._totals,
            eos_token_ids=eos_token_ids,
            stop_policy=stop_policy,
        )
        self._input_processor = InputProcessor(
            config,
            self.model_info,
            self.kv.layout,
            self._groups,
            adapters=model.adapters,
            constraints=self._constraints,
            scheduler=self._scheduler,
            output_processor=self._output_processor,
            cache_manager=self._cache_manager,
            metrics=self._metrics,
            has_stop_policy=stop_policy is not None,
        )
        self._speculation = make_speculation_manager(
            config,
            self._cache_manager,
            proposers,
            guesses=model.guesses,
            context_window=window,
            eos_token_ids=eos_token_ids,
            clock=cost_clock(config, model.info.device, clock),
        )
        plain = PlainSteps(
            model,
            self.kv,
            self._constraints,
            self._in_flight,
            self._speculation,
            eos_token_ids=eos_token_ids,
        )
        self._runner = Runner(
            model,
            plain,
            self._output_processor,
            self._in_flight,
            DecodeRows(
                self._ahead,
                self._cache_manager,
                eos_token_ids,
                clears_blocks=model.reads_unwritten,
                # Speculation must see each prompt's step.
                takes_prompts=config.overlap_prompts and self._speculation is None,
            ),
            self._scheduler,
            self._speculation,
            begins_early=self._ahead is not None,
            clock=clock,
        )

    @property
    def park_bytes(self) -> int:
        """Bytes of host memory that swapped blocks may take; 0: nothing is ever swapped."""
        if self.config.preemption != "swap":
            return 0
        return self.config.park_bytes or self.kv.num_blocks * self.kv.layout.block_bytes

    def use_parking(self, parking: Parking) -> None:
        """Set where swapped blocks go, for a caller that can make a parking only after the engine
        is loaded.

        Raises: WrongState if nothing is ever swapped, or a request is live already.
        """
        if not self.park_bytes or self._groups:
            raise WrongState("a parking is for an engine that swaps and has no request yet")
        self._preemptor.use_parking(parking)

    def prepare_grammars(self) -> None:
        """Read the vocabulary now, so that the first grammar does not wait for it; blocks
        meanwhile, seconds for a large one. Call it before the first request."""
        self._constraints.prepare()

    def warm_up(self, progress: Progress | None = None) -> None:
        """Run the model once per kind of batch, so that the first request does not pay for it.
        Writes no KV."""
        most = self.config.max_num_tokens_per_step, self.config.max_num_running
        warm_up(self._model, self._ahead, *most, progress)

    # -- a request's life

    def reserve(self, request: Request) -> Reservation:
        """Allocate blocks for a request; share those of its prompt that are cached.

        The shared prefix ends at least one token before the prompt does, because its last token
        must be computed to sample the next one.

        Raises: NoBlocks (nothing was allocated; also while preempted requests wait for blocks),
            RequestTooLong, InvalidRequest, DuplicateRequest.
        """
        return self._input_processor.reserve(request)

    def start(
        self,
        request_id: str,
        *,
        num_loaded_tokens: int = 0,
        outputs: Values[Values[int]] = (),
        beam_start: Values[tuple[int, float]] = (),
    ) -> None:
        """Let a reserved request take part in steps. From here on its blocks belong to the engine.

        Args:
            num_loaded_tokens: tokens whose KV is in its blocks now, counted from the first, the
                local prefix included. Full blocks below enter the prefix cache. 0 where nothing was
                loaded. If nothing is left to compute, the last token is computed again: its logits
                are needed.
            outputs: sampled already by another engine: one list for each sample, or none. They
            count
                as output. Of several samples, one that its tokens end (EOS, stop token, length)
                takes no part and has no event.
            beam_start: of the output with which another engine ended its part of a beam search.
        Raises: UnknownRequest, WrongState, InvalidRequest, NoBlocks (blocks quarantined before
            could not be replaced); nothing changed, a later call may succeed. Outputs that are not
            in the request's grammar end it instead, with an event of the next step.
        """
        group = self._group(request_id, State.RESERVED)
        self._input_processor.start(group, num_loaded_tokens, outputs, tuple(beam_start))

    def submit(self, request: Request) -> None:
        """Queue a request: the engine allocates blocks and starts it when its turn comes, by the
        policy and by what fits (engine/scheduler.py:admit).

        Raises: RequestTooLong, InvalidRequest, DuplicateRequest.
        """
        self._input_processor.submit(request)

    def detach(self, request_id: str) -> DetachedRequest:
        """Take a started request out of the steps as it stands, so that another engine can continue
        it. It is HOLDING then: its blocks stay readable until `release`, and no output of it
        follows.

        Nothing of it is in flight afterwards, so no byte of its blocks changes before `release`. A
        token that a pending step samples for it is dropped; the other engine samples it again. What
        a preempted request lost is not recomputed: it holds what the prefix cache still has.

        Raises: UnknownRequest; WrongState for a request that was not started or has ended, or of
            several samples or beams, each of which has blocks of its own; nothing changed.
        """
        group = self._group(request_id)
        if group.num_rows > 1 or group.request.beam is not None:
            raise WrongState(f"request {request_id} has several samples or beams")
        sequence, blocks = group.prompt, self._cache_manager
        if sequence.state not in _MAY_DETACH or group.request.hold_after is not None:
            raise WrongState(f"request {request_id} is {sequence.state.value}")
        self._in_flight.let_go(sequence)
        self._in_flight.settle()
        blocks.free_draft_blocks(sequence)
        self._scheduler.remove(sequence)
        self._constraints.forget(group)
        self._preemptor.forget(sequence)
        if sequence.state in WITHOUT_BLOCKS:
            blocks.share_cached(sequence)
        sequence.move(State.HOLDING)
        size = blocks.block_size
        num_computed = blocks.num_resumable(sequence.num_computed_tokens)
        num_full = num_computed // size
        if num_full:
            sequence.chain_hash(num_full - 1, size)  # and all before it
        return DetachedRequest(
            tuple(sequence.token_ids),
            num_computed,
            tuple(sequence.block_ids[: -(-num_computed // size)]),
            tuple(sequence.chain_hashes[:num_full]),
        )

    def release(self, request_id: str) -> None:
        """HOLDING -> FINISHED: the blocks are not read any more. Raises: UnknownRequest,
        WrongState."""
        group = self._group(request_id, State.HOLDING)
        outcome = "finished" if group.request.hold_after is not None else "moved"
        self._output_processor.end(group, State.FINISHED, outcome)

    def abort(self, request_id: str) -> None:
        """End a request in any state and give its blocks back. Does nothing for a request that is
        not live.

        Blocks that a transfer may still write into must be quarantined before.
        """
        group = self._groups.get(request_id)
        if group is not None:
            self._output_processor.end(group, State.ABORTED, "aborted")

    def finish_sample(self, request_id: str, sample_index: int) -> None:
        """End one sample and give its blocks back; the others go on. The last one ends the request.
        Does nothing for one that is not live. No output follows, but one of an earlier step may
        still be undelivered.

        Raises: InvalidRequest for an index that the request does not have.
        """
        group = self._groups.get(request_id)
        if group is None:
            return
        if not 0 <= sample_index < group.num_rows:
            raise InvalidRequest("sample_index", f"{sample_index} is outside [0, {group.num_rows})")
        self._output_processor.finish_sample(group, sample_index)

    def preempt(self, request_id: str, sample_index: int = 0) -> None:
        """Take a started sample's blocks away now, as if others needed them: it goes on later, to
        the same tokens. For drills and tests.

        Raises: UnknownRequest, WrongState for one that has no blocks which may be taken.
        """
        self._group(request_id)
        if not self._scheduler.preempt((request_id, sample_index)):
            raise WrongState(f"{request_id}/{sample_index} has no blocks that may be taken")

    # -- quarantine

    def quarantine(self, request_id: str, block_ids: Iterable[int]) -> None:
        """A transfer may still touch these blocks: keep them out of use until as many
        `unquarantine`.

        RESERVED: they leave the request (they must not be of its local prefix) and `start` takes
            others in their place.
        Later states: the transfer can only be reading, so the request goes on using them, and they
            are kept out of use once it lets them go.
        Raises: UnknownRequest, WrongState for a block that is not the request's own; nothing was
            done.
        """
        self._cache_manager.quarantine(self._group(request_id), tuple(block_ids))

    def unquarantine(self, block_ids: Iterable[int]) -> None:
        """The transfer is over. Raises: WrongState naming a block that is not quarantined; nothing
        was done."""
        self._pool.unhold(tuple(block_ids))

    def refill(self, request_id: str) -> tuple[int, ...]:
        """New blocks for a RESERVED request in place of those that were quarantined, now instead of
        at `start`. Returns: all of its blocks in order, HOLE (-1) for one that there is none for.
        Raises: UnknownRequest, WrongState."""
        sequence = self._group(request_id, State.RESERVED).prompt
        with contextlib.suppress(NoBlocks):  # `start` tries again, and says so
            self._cache_manager.fill_holes(sequence)
        return tuple(sequence.block_ids)

    def hold_cached(self, chain_hashes: Values[bytes], first: int = 0) -> tuple[int, ...]:
        """Keep cached blocks as they are, for a reader: blocks [first, ..) of the longest prefix of
        this chain that the prefix cache has, of whatever request, live or over, or failed by then.
        They are quarantined until as many `unquarantine`.

        Returns: their ids; the first of them is the chain's block `first`.
        """
        return self._cache_manager.hold_cached(chain_hashes, first)

    def lend_blocks(self, num_blocks: int) -> tuple[int, ...]:
        """Scratch blocks for a caller that is not a request (link measurement), which may write
        into them and returns them soon: at most `num_blocks`, at most half of the free ones, none
        while preempted requests wait. Nothing is evicted for them."""
        return () if self._scheduler.has_preempted else self._cache_manager.lend_blocks(num_blocks)

    def return_blocks(self, block_ids: Iterable[int]) -> None:
        """End of `lend_blocks`; nothing may touch them any more. Raises: WrongState for a block
        that is not lent; nothing was done."""
        self._cache_manager.return_blocks(tuple(block_ids))

    def block_ids(self, request_id: str, sample_index: int = 0) -> tuple[int, ...]:
        """The blocks of a live sample in order, -1 for one that was quarantined before `start`.
        Raises: UnknownRequest."""
        sequence = self._group(request_id).samples.get(sample_index)
        if sequence is None:
            raise UnknownRequest(f"request {request_id} has no live sample {sample_index}")
        return tuple(sequence.block_ids)

    # -- adapters

    def load_adapter(
        self, name: str, folder: Path, progress: Progress | None = None
    ) -> AdapterInfo:
        """Let requests use a LoRA adapter. Raises: what engine/lora/manager.py:LoraManager.load
        raises."""
        return self._model.adapters.load(name, folder, progress)

    def adapter_limits(self) -> LoraLimits:
        """What an adapter is read with that `install_adapter` shall take. Raises: InvalidAdapter
        where this model takes none."""
        return self._model.adapters.reading_limits()

    def install_adapter(self, name: str, adapter: Adapter) -> AdapterInfo:
        """`load_adapter` for one that was read before, maybe by another thread. Raises: what
        engine/lora/manager.py:LoraManager.install raises."""
        return self._model.adapters.install(name, adapter)

    def unload_adapter(self, name: str) -> None:
        """Raises: UnknownAdapter; AdapterInUse while live requests name it."""
        self._model.adapters.unload(name)

    def adapters(self) -> tuple[AdapterInfo, ...]:
        """What is loaded."""
        return self._model.adapters.infos()

    # -- the step

    def has_work(self) -> bool:
        """Whether `step` would compute or return anything. False also if all blocks belong to
        reserved or held requests: a call must free some first. A pending step counts as work if one
        of its sequences is live."""
        has_outputs = bool(self._undelivered)
        return has_outputs or self._input_processor.has_waiting or self._scheduler.has_work()

    @property
    def is_device_behind(self) -> bool:
        """Whether the device may still write into blocks that an output named or that are free: a
        plain step gave it work, and no sampled token was waited for since. False while only steps
        that run ahead are pending, because the blocks that they write are kept until they end."""
        return self._runner.is_device_behind

    def step(self) -> StepOutput:
        """One forward pass over all scheduled sequences, and one sampled token for each whose last
        token was in it.

        If the model can, the step after this one is begun, too (`EngineConfig.overlap`); only the
        time that the next call takes shows it. With nothing to compute while a request waits for a
        grammar or for swapped bytes, it waits for those, at most IDLE_WAIT_S. An exception of the
        model leaves every request as it was before; outputs of a step that it cut short come with
        the next one.
        """
        began_s = self._clock()
        self._undelivered += self._input_processor.admit_ready(self._clock)
        is_admitting = not self._input_processor.needs_places
        has_begun = self._runner.has_begun
        plan = {} if has_begun else self._scheduler.next_plan(is_admitting=is_admitting)
        num_prefills = num_decodes = num_guessed = num_kept = 0
        is_computing = bool(plan) or has_begun
        if is_computing:
            result = self._runner.run(
                plan,
                is_admitting=is_admitting,
                is_settled=not self._input_processor.has_waiting,
            )
            self._undelivered += result.events
            num_prefills, num_decodes = result.num_prefill_tokens, result.num_decode_tokens
            num_guessed, num_kept = result.num_guessed_tokens, result.num_kept_tokens
        elif not self._undelivered:
            self._idle()
        outputs, self._undelivered = self._undelivered, []
        totals = self._totals
        totals.num_steps += 1
        # Accepted draft tokens are among the decodes.
        totals.num_computed_tokens += num_prefills + num_decodes + num_guessed - num_kept
        if is_computing:
            seconds = self._clock() - began_s
            totals.num_computing_steps += 1
            totals.num_decode_tokens += num_decodes
            totals.step_s += seconds
            num_used_blocks = self._cache_manager.num_used
            self._metrics.on_step(num_prefills, num_decodes, seconds, num_used_blocks)
            if num_guessed:
                self._metrics.on_guesses(num_guessed, num_kept)
        num_running, num_waiting = count_running_and_waiting(self._groups)
        return StepOutput(
            events=tuple(outputs),
            num_scheduled_tokens=num_prefills + num_decodes,
            num_free_blocks=self._cache_manager.num_available,
            num_running=num_running,
            num_waiting=num_waiting,
            step=totals.num_steps,
            began_s=began_s,
            ended_s=self._clock(),
        )

    def _idle(self) -> None:
        self._in_flight.settle()  # no sequence waits for it, and there is time now
        if self._constraints.has_waiting:
            self._constraints.wait(IDLE_WAIT_S)
        elif self._scheduler.running:  # swapped bytes are on their way
            time.sleep(IDLE_WAIT_S)

    def _group(self, request_id: str, state: State | None = None) -> Group:
        group = self._groups.get(request_id)
        if group is None:
            raise UnknownRequest(f"no live request {request_id}")
        if state is not None and group.state is not state:
            raise WrongState(f"request {request_id} is {group.state.value}, not {state.value}")
        return group

    def close(self) -> None:
        """End the pending step, the threads and the process that compile grammars, the draft models
        and the processes of other ranks. No step may follow."""
        with contextlib.ExitStack() as stack:  # the last first; each, whatever another raises
            stack.callback(self._model.close)
            stack.callback(close_proposers, self._proposers)
            stack.callback(self._constraints.close)
            stack.callback(self._in_flight.close)

    def check_alive(self) -> None:
        """For when there is nothing to do; cheap. Raises: RankFailed when a process that computes a
        part of the model has ended: no step will ever succeed."""
        self._model.check_alive()

    def watch(self, tell: Callable[[], None]) -> None:
        """Have `tell` called, from another thread, when `check_alive` would raise from now on. It
        must not block."""
        self._model.watch(tell)

    # -- accounts

    def check_integrity(self) -> None:
        """Recompute every block's class and reference count from the live requests, and everything
        else that is counted.

        Raises: IntegrityError.
        """
        self._cache_manager.check_integrity(self._groups)
        self.kv.check_integrity()
        self._scheduler.check_integrity()
        self._preemptor.check_integrity(
            sequence for group in self._groups.values() for sequence in group.samples.values()
        )
        self._metrics.check_integrity()
        self._input_processor.check_integrity()
        if self._speculation is not None:
            self._speculation.check_integrity()
        self._constraints.check_integrity()
        self._model.check_integrity()
        self._model.adapters.check_integrity(
            Counter(
                group.request.adapter for group in self._groups.values() if group.request.adapter
            )
        )

    def stats(self) -> EngineStats:
        """Levels and counts now."""
        return compute_stats(
            self._groups, self._cache_manager, self._totals, self._preemptor.num_by_cause
        )

    def metrics(self) -> MetricsSnapshot:
        """How fast it is and was."""
        return self._metrics.snapshot()


def load_engine(
    config: EngineConfig,
    *,
    progress: Progress | None = None,
    stop_policy: StopPolicy | None = None,
    prepares_grammars: bool = False,
    draft_peers: Values[DraftPeer] = (),
) -> LLMEngine:
    """Load an engine that is ready for its first request: checkpoint, model, draft models, cache,
    warm-up, in this order, because each takes of the memory that those before it left.

    Args:
        prepares_grammars: call `LLMEngine.prepare_grammars`, which takes memory.
        draft_peers: the channels to `speculation.draft_workers`.
    Raises: LoadError (missing or broken checkpoint, model type, too few blocks), errors of
        checkpoints.resolve; each one line that says what is wrong and how to fix it.
    """
    # Imported here: they import transformers, which takes as long as all the rest, and which an
    # engine over a model that was not loaded does without.
    from engine.grammar.service import GrammarService
    from engine.models.loader import StartupPhases, closed_on_failure, load_model
    from engine.speculation.loader import load_heads, load_proposers

    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    model = load_model(config, progress=progress)
    phases = StartupPhases()
    with closed_on_failure() as closes:
        closes.append(model.close)
        # Resolved now, so that the first grammar does not wait for it.
        folder = resolve(config.model, files="tokenizer").path

        def make_grammars() -> GrammarService:
            return GrammarService.from_checkpoint(folder, model.info.vocab_size, config.grammar)

        with phases.timed("drafters"):
            before_bytes = held_bytes(model.info.device)
            proposers = load_proposers(config, model.info, progress, draft_peers)
            closes.append(lambda: close_proposers(proposers))
            proposers += load_heads(config, model)
            draft_bytes = held_bytes(model.info.device) - before_bytes
        with phases.timed("cache"):
            engine = LLMEngine(
                config,
                model,
                stop_policy=stop_policy,
                make_grammars=make_grammars,
                proposers=proposers,
                draft_bytes=draft_bytes,
            )
        with phases.timed("warm-up"):
            engine.warm_up(progress)
        if prepares_grammars:
            with phases.timed("grammars"):
                engine.prepare_grammars()
    seconds = (*model.info.seconds, *phases.seconds)
    engine.model_info = dataclasses.replace(engine.model_info, seconds=seconds)
    return engine
