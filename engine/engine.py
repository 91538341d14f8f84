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
engine/preemption.py, steps that run ahead to engine/in_flight.py.

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
from engine.decode_rows import DecodeRows
from engine.errors import InvalidRequest, NoBlocks, UnknownRequest, WrongState
from engine.grammar_constraints import Constraints, MakeService
from engine.in_flight import InFlight
from engine.input_processor import InputProcessor
from engine.kv.block_pool import BlockPool
from engine.kv.cache_manager import KVCacheManager
from engine.kv.memory import KvMemory
from engine.kv.prefix_cache import PrefixCache
from engine.kv.sizing import choose_num_blocks, free_memory_bytes, held_bytes
from engine.lora.adapter import LoraAdapter
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
from engine.preemption import Preemptor
from engine.request import (
    STARTED,
    WITHOUT_BLOCKS,
    DetachedRequest,
    ModelInfo,
    Request,
    RequestState,
    Reservation,
    StopPolicy,
)
from engine.runner import Runner
from engine.scheduler import Scheduler
from engine.sequence_group import Group
from engine.speculation.controller import cost_clock
from engine.speculation.manager import make_speculation_manager
from engine.speculation.proposer import Proposer, close_proposers
from engine.speculation.remote import DraftPeer
from engine.step_start import PlainSteps
from engine.warm_up import warm_up

IDLE_WAIT_S = 0.002
"""Longest time in seconds that a step waits if it has nothing to compute yet. It is short compared
to a compilation, and long compared to a check of the waiting requests; guessed."""

_MAY_DETACH = STARTED | {
    RequestState.WAITING_FOR_GRAMMAR,
    RequestState.PREEMPTED,
    RequestState.PARKED,
    RequestState.SWAPPING,
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
        """Allocate the KV cache.

        Args:
            parking: stores swapped blocks; None: they are stored in this process's memory.
            make_grammars: called when the first request with a grammar arrives; None: such requests
                are rejected.
            proposers: the proposers of draft tokens; None: those that `config.speculation` names.
            draft_bytes: device memory that the proposers' models hold.
            clock: returns the time in seconds, for the metrics and the cost of draft tokens.
        Raises: TooFewBlocks; SettingsError for a preemption that the device does not support.
        """
        self.config = config
        self._clock = clock
        self._undelivered: list[RequestOutput] = []
        """Outputs of a step that an exception interrupted; the next step returns them."""
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
        """Host memory in bytes that swapped blocks may use; 0: nothing is ever swapped."""
        if self.config.preemption != "swap":
            return 0
        return self.config.park_bytes or self.kv.num_blocks * self.kv.layout.block_bytes

    def use_parking(self, parking: Parking) -> None:
        """Set the store of swapped blocks, for a caller that can create it only after the engine is
        loaded. Raises: WrongState if nothing is ever swapped, or a request is live already."""
        if not self.park_bytes or self._groups:
            raise WrongState("a parking is for an engine that swaps and has no request yet")
        self._preemptor.use_parking(parking)

    def prepare_grammars(self) -> None:
        """Read the vocabulary now, so that the first grammar does not wait for it. Blocks, seconds
        for a large vocabulary; call it before the first request."""
        self._constraints.prepare()

    def warm_up(self, progress: Progress | None = None) -> None:
        """Run the model once per kind of batch, so that the first request does not wait for
        compilation and allocation. Writes no KV."""
        most = self.config.max_num_tokens_per_step, self.config.max_num_running
        warm_up(self._model, self._ahead, *most, progress)

    # -- a request's life

    def reserve(self, request: Request) -> Reservation:
        """Allocate blocks for a request, sharing those of its longest cached prefix.

        The shared prefix ends at least one token before the prompt does, because the last token
        must be computed to sample the next one. Raises: NoBlocks (no block is allocated then; also
        while preempted requests wait for blocks), RequestTooLong, InvalidRequest, DuplicateRequest.
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
        """Let a reserved request take part in steps. From now on only the engine writes its blocks.

        Args:
            num_loaded_tokens: number of first tokens whose KV is in its blocks now, the local
                prefix included; 0 if nothing was loaded. Full blocks of them are inserted into the
                prefix cache. If nothing is left to compute, the last token is computed again, since
                its logits are needed.
            outputs: the output tokens that another engine has sampled, one list for each sample, or
                none. Of several samples, one that its tokens end (EOS, stop token, length) takes no
                part and has no output.
            beam_start: the candidates in the output with which another engine ended its part of a
                beam search.
        Raises: UnknownRequest, WrongState, InvalidRequest, NoBlocks (quarantined blocks could not
            be replaced); nothing changes then, and a later call may succeed. Outputs that the
            request's grammar does not allow end it instead, with an output of the next step.
        """
        group = self._group(request_id, RequestState.RESERVED)
        self._input_processor.start(group, num_loaded_tokens, outputs, tuple(beam_start))

    def submit(self, request: Request) -> None:
        """Queue a request: the engine allocates blocks and starts it when its turn comes, by the
        policy and by what fits (engine/scheduler.py:admit).

        Raises: RequestTooLong, InvalidRequest, DuplicateRequest.
        """
        self._input_processor.submit(request)

    def detach(self, request_id: str) -> DetachedRequest:
        """Take a started request out of the steps in its present state, so that another engine can
        continue it. It is HOLDING then: its blocks stay readable until `release`, and it has no
        further output.

        No step of it is in flight afterwards, so that no byte of its blocks changes before
        `release`. A token that a pending step samples for it is dropped; the other engine samples
        it again. KV that a preempted request lost is not recomputed: the request has the blocks
        that the prefix cache still has.

        Raises: UnknownRequest; WrongState for a request that was not started or has ended, or has
            several samples or beams; nothing changes then.
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
        sequence.move(RequestState.HOLDING)
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
        """Free the blocks of a HOLDING request, which is FINISHED then. Raises: UnknownRequest,
        WrongState."""
        group = self._group(request_id, RequestState.HOLDING)
        outcome = "finished" if group.request.hold_after is not None else "moved"
        self._output_processor.end(group, RequestState.FINISHED, outcome)

    def abort(self, request_id: str) -> None:
        """End a request in any state and free its blocks. Does nothing for a request that is not
        live. Blocks that a transfer may still write must be quarantined before."""
        group = self._groups.get(request_id)
        if group is not None:
            self._output_processor.end(group, RequestState.ABORTED, "aborted")

    def finish_sample(self, request_id: str, sample_index: int) -> None:
        """End one sample and free its blocks; the others continue. The end of the last sample ends
        the request. Does nothing for a sample that is not live. An output of an earlier step may
        still follow. Raises: InvalidRequest for an index that the request does not have."""
        group = self._groups.get(request_id)
        if group is None:
            return
        if not 0 <= sample_index < group.num_rows:
            raise InvalidRequest("sample_index", f"{sample_index} is outside [0, {group.num_rows})")
        self._output_processor.finish_sample(group, sample_index)

    def preempt(self, request_id: str, sample_index: int = 0) -> None:
        """Preempt a started sample now; it continues later with the same tokens. For drills and
        tests. Raises: UnknownRequest, WrongState for a sample without blocks that may be
        preempted."""
        self._group(request_id)
        if not self._scheduler.preempt((request_id, sample_index)):
            raise WrongState(f"{request_id}/{sample_index} has no blocks that may be taken")

    # -- quarantine

    def quarantine(self, request_id: str, block_ids: Iterable[int]) -> None:
        """Keep blocks that a transfer may still access out of use until `unquarantine` was called
        as often.

        A RESERVED request loses the blocks, which must not be of its local prefix, and `start`
        replaces them. In later states the transfer only reads: the request keeps using the blocks,
        and they are kept out of use once it frees them. Raises: UnknownRequest, WrongState for a
        block that is not the request's own; nothing is done then.
        """
        self._cache_manager.quarantine(self._group(request_id), tuple(block_ids))

    def unquarantine(self, block_ids: Iterable[int]) -> None:
        """End one `quarantine` of each block. Raises: WrongState naming a block that is not
        quarantined; nothing is done then."""
        self._pool.unhold(tuple(block_ids))

    def refill(self, request_id: str) -> tuple[int, ...]:
        """Replace quarantined blocks of a RESERVED request now instead of at `start`. Returns: all
        of its blocks in order, HOLE (-1) for one that cannot be replaced. Raises:
        UnknownRequest, WrongState."""
        sequence = self._group(request_id, RequestState.RESERVED).prompt
        with contextlib.suppress(NoBlocks):  # `start` tries again, and says so
            self._cache_manager.fill_holes(sequence)
        return tuple(sequence.block_ids)

    def hold_cached(self, chain_hashes: Values[bytes], first: int = 0) -> tuple[int, ...]:
        """Quarantine cached blocks for a reader: those from index `first` on of the chain's longest
        cached prefix, whichever request computed them. They are kept until `unquarantine` was
        called as often. Returns: their ids, in order."""
        return self._cache_manager.hold_cached(chain_hashes, first)

    def lend_blocks(self, num_blocks: int) -> tuple[int, ...]:
        """Lend scratch blocks to a caller that is not a request (link measurement), which may write
        them and must return them soon: at most `num_blocks`, at most half of the free ones, none
        while preempted requests wait. Nothing is evicted for them. Returns: their ids."""
        return () if self._scheduler.has_preempted else self._cache_manager.lend_blocks(num_blocks)

    def return_blocks(self, block_ids: Iterable[int]) -> None:
        """Free blocks that `lend_blocks` returned; no transfer may access them any more. Raises:
        WrongState for a block that is not lent; nothing is done then."""
        self._cache_manager.return_blocks(tuple(block_ids))

    def block_ids(self, request_id: str, sample_index: int = 0) -> tuple[int, ...]:
        """Return the blocks of a live sample in order, -1 for one that was quarantined before
        `start`. Raises: UnknownRequest."""
        sequence = self._group(request_id).samples.get(sample_index)
        if sequence is None:
            raise UnknownRequest(f"request {request_id} has no live sample {sample_index}")
        return tuple(sequence.block_ids)

    # -- adapters

    def load_adapter(
        self, name: str, folder: Path, progress: Progress | None = None
    ) -> AdapterInfo:
        """Load a LoRA adapter and make it available to requests. Raises: InvalidAdapter,
        TooManyAdapters, AdapterInUse (LoraManager.load)."""
        return self._model.adapters.load(name, folder, progress)

    def adapter_limits(self) -> LoraLimits:
        """Return the limits for reading an adapter that `install_adapter` will accept. Raises:
        InvalidAdapter if the model supports no adapters."""
        return self._model.adapters.reading_limits()

    def install_adapter(self, name: str, adapter: LoraAdapter) -> AdapterInfo:
        """Make a LoRA adapter available that was read before, maybe by another thread. Raises:
        InvalidAdapter, TooManyAdapters, AdapterInUse (LoraManager.install)."""
        return self._model.adapters.install(name, adapter)

    def unload_adapter(self, name: str) -> None:
        """Remove a LoRA adapter. Raises: UnknownAdapter; AdapterInUse while live requests name
        it."""
        self._model.adapters.unload(name)

    def adapters(self) -> tuple[AdapterInfo, ...]:
        """Return the loaded adapters, in the order of loading."""
        return self._model.adapters.infos()

    # -- the step

    def has_work(self) -> bool:
        """Whether `step` would compute or return anything. False also if all blocks belong to
        reserved or held requests, one of which must be released first. A pending step counts as
        work if one of its sequences is live."""
        has_outputs = bool(self._undelivered)
        return has_outputs or self._input_processor.has_waiting or self._scheduler.has_work()

    @property
    def is_device_behind(self) -> bool:
        """Whether the device may still write blocks that an output named or that are free: a plain
        step was queued, and no sampled token was waited for since. False while only launched
        steps are pending, because the blocks that they write are kept until they end."""
        return self._runner.is_device_behind

    def step(self) -> StepOutput:
        """Run one forward pass over all scheduled sequences, and sample a token for each whose last
        token was in it.

        If the model supports it, the next step is begun, too (`EngineConfig.overlap`), which only
        changes timing. With nothing to compute while a request waits for a grammar or for swapped
        blocks, it waits for those for at most IDLE_WAIT_S. An exception of the model leaves every
        request as it was; outputs of an interrupted step are returned by the next one.
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

    def _group(self, request_id: str, state: RequestState | None = None) -> Group:
        group = self._groups.get(request_id)
        if group is None:
            raise UnknownRequest(f"no live request {request_id}")
        if state is not None and group.state is not state:
            raise WrongState(f"request {request_id} is {group.state.value}, not {state.value}")
        return group

    def close(self) -> None:
        """End the pending step, the threads and the process that compile grammars, the draft
        models, and the processes of other ranks. No step may follow."""
        with contextlib.ExitStack() as stack:  # the last first; each, whatever another raises
            stack.callback(self._model.close)
            stack.callback(close_proposers, self._proposers)
            stack.callback(self._constraints.close)
            stack.callback(self._in_flight.close)

    def check_alive(self) -> None:
        """Check that all processes of the model are alive; cheap, for idle times. Raises:
        RankFailed if one has ended, after which no step can succeed."""
        self._model.check_alive()

    def watch(self, tell: Callable[[], None]) -> None:
        """Register a callback for the moment from which `check_alive` raises. It is called from
        another thread and must not block."""
        self._model.watch(tell)

    # -- accounts

    def check_integrity(self) -> None:
        """Recompute every block's class and reference count from the live requests, and check all
        other counts. Raises: IntegrityError."""
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
        """Return the present levels, and counts since start."""
        return compute_stats(
            self._groups, self._cache_manager, self._totals, self._preemptor.num_by_cause
        )

    def metrics(self) -> MetricsSnapshot:
        """Return latencies, throughputs and counts since start."""
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
    warm-up, in this order, because each uses memory that the ones before it left.

    Args:
        prepares_grammars: call `LLMEngine.prepare_grammars`, which needs memory.
        draft_peers: the channels to `speculation.draft_workers`.
    Raises: LoadError (missing or broken checkpoint, model type, too few blocks), errors of
        checkpoints.resolve; each in one line that says what is wrong and how to fix it.
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
