"""Engine: continuous batching of one model over one device cache. Tokens in, tokens and filled
blocks out.

Prefill and decode are the same loop: a step is {sample: number of tokens}. What a role is lies in
how it is called: a prefill worker reserves with `hold_after=1` and reads the blocks, a decode
worker loads blocks between `reserve` and `start`; who loads nothing can `submit`, and leave it to
the engine when blocks are taken. States and their meaning: engine/request.py. No RPC, no asyncio,
no text.

What the parts do: engine/scheduler.py who computes next, engine/holdings.py whose blocks are which,
engine/preemptor.py how blocks are taken away and brought back, engine/constraints.py grammars,
engine/entrance.py from a request to the queue, engine/steps.py one step after the other,
engine/runner.py one forward pass and its draws, engine/booking.py what came of it,
engine/in_flight.py steps that are computed before they are told.

Threads: every method is called from one thread, the engine's. Other threads may read `kv` bytes of
filled blocks, write those of reserved blocks that are not started, and read `model_info`. Where
blocks are taken away (`EngineConfig.preemption`), filled blocks may be read by others only of
requests that hold, which are never preempted, and those that `hold_cached` named.

Invariants: a full block of a started request changes no more; free + evictable + referenced +
quarantined == total; who was let in ends (`check_integrity`, tests/unit/engine/test_preemption.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Values
from pathlib import Path

import torch

from checkpoints.resolve import resolve
from engine import accounts, admission
from engine.booking import Booking
from engine.config import EngineConfig
from engine.constraints import Constraints, MakeService
from engine.decode_rows import DecodeRows
from engine.entrance import Entrance
from engine.errors import (
    InvalidRequest,
    NoBlocks,
    UnknownRequest,
    WrongState,
)
from engine.foresight import Foresight
from engine.grammar.service import GrammarService
from engine.group import Group
from engine.held import Held, hold
from engine.holdings import Holdings
from engine.in_flight import InFlight
from engine.kv.block_pool import BlockPool
from engine.kv.memory import KvMemory
from engine.kv.radix_tree import RadixTree
from engine.kv.sizing import choose_num_blocks, free_memory_bytes, held_bytes
from engine.lora.config import LoraLimits
from engine.lora.files import Adapter
from engine.lora.registry import AdapterInfo
from engine.metrics import EngineMetrics, MetricsSnapshot
from engine.models.interface import LoadedModel, Progress
from engine.models.load import load_model
from engine.models.phases import Phases
from engine.parking import Parking, choose_parking
from engine.preemptor import Preemptor
from engine.request import EngineStats, ModelInfo, Request, Reservation, State, StopPolicy
from engine.runner import Runner
from engine.scheduler import Scheduler
from engine.speculation.draft_port import DraftPeer
from engine.speculation.drafter import Drafter
from engine.speculation.heads.load import load_heads
from engine.speculation.load import load_drafters
from engine.speculation.speculator import make_speculator
from engine.step_output import StepOutput
from engine.steps import Steps
from engine.warm_up import warm_up


class Engine:
    """See the module. `kv` is the device cache, `model_info` what was loaded."""

    def __init__(
        self,
        config: EngineConfig,
        model: LoadedModel,
        *,
        stop_policy: StopPolicy | None = None,
        parking: Parking | None = None,
        make_grammars: MakeService | None = None,
        drafters: Values[Drafter] | None = None,
        draft_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take memory for the KV cache.

        Args:
            parking: where swapped blocks go; None: into this process' memory.
            make_grammars: called when the first request with a grammar comes; None: they are
                refused.
            drafters: who guesses; None: whoever `config.speculation` names.
            draft_bytes: that they hold of the model's device.
            clock: for the metrics, and for what guesses cost.
        Raises: TooFewBlocks; SettingsError for a preemption that the device cannot do.
        """
        self.config = config
        self._model = model
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
        # A stop policy looks at every token before the next is drawn.
        is_guessing = config.speculation.is_on if drafters is None else bool(drafters)
        is_ahead = config.overlap and stop_policy is None and not is_guessing
        self._ahead = model.ahead if is_ahead else None
        self._in_flight = InFlight(self._ahead, self._pool, self.kv.layout.block_size)
        self._holdings = Holdings(self.kv, RadixTree(self._pool), self._in_flight)
        self._metrics = EngineMetrics(clock, num_blocks)
        parking = choose_parking(config, self.kv.device, self.park_bytes, parking)
        self._preemptor = Preemptor(self._holdings, parking, self._metrics)
        self._scheduler = Scheduler(config, self._holdings, self._preemptor, self._metrics)
        eos_token_ids = frozenset(model.info.eos_token_ids)
        self._groups: dict[str, Group] = {}
        self._totals = accounts.Totals()
        self._constraints = Constraints(
            make_grammars,
            eos_token_ids=eos_token_ids,
            jumps_forward=config.jump_forward,
        )
        self._booking = Booking(
            self._groups,
            self._holdings,
            self._scheduler,
            self._preemptor,
            self._constraints,
            model.adapters,
            self._metrics,
            self._totals,
            eos_token_ids=eos_token_ids,
            stop_policy=stop_policy,
        )
        self._entrance = Entrance(
            config,
            self.model_info,
            self.kv.layout,
            self._groups,
            adapters=model.adapters,
            constraints=self._constraints,
            scheduler=self._scheduler,
            booking=self._booking,
            metrics=self._metrics,
            has_stop_policy=stop_policy is not None,
        )
        self._speculator = make_speculator(
            config,
            self._holdings,
            drafters,
            guesses=model.guesses,
            eos_token_ids=eos_token_ids,
            clock=clock,
        )
        runner = Runner(
            model,
            self.kv,
            self._constraints,
            self._booking,
            self._in_flight,
            DecodeRows(
                self._ahead,
                self._holdings,
                eos_token_ids,
                clears_blocks=model.reads_unwritten,
            ),
            Foresight(self._scheduler, self._holdings.block_size),
            self._speculator,
            eos_token_ids=eos_token_ids,
            clock=clock,
        )
        self._steps = Steps(
            self._entrance,
            self._scheduler,
            runner,
            self._constraints,
            self._holdings,
            self._metrics,
            self._totals,
            stats=self.stats,
            clock=clock,
        )

    @property
    def park_bytes(self) -> int:
        """Bytes that a parking may take of this process' memory; 0: nothing is ever parked."""
        if self.config.preemption != "swap":
            return 0
        return self.config.park_bytes or self.kv.num_blocks * self.kv.layout.block_bytes

    def use_parking(self, parking: Parking) -> None:
        """Park there from now on. For who can make one only when the engine is loaded.

        Raises: WrongState where nothing is ever parked, or a request is live already.
        """
        if not self.park_bytes or self._groups:
            raise WrongState("a parking is for an engine that swaps and has no request yet")
        self._preemptor.use_parking(parking)

    def prepare_grammars(self) -> None:
        """Have ready what the first grammar would wait for; blocks while the vocabulary is read
        (seconds for a large one). Before the first request."""
        self._constraints.prepare()

    def warm_up(self, progress: Progress | None = None) -> None:
        """Run the model once per kind of batch, so that the first request does not pay for it.
        Writes no KV."""
        most = self.config.max_num_tokens_per_step, self.config.max_num_running
        warm_up(self._model, self._ahead, *most, progress)

    # -- a request's life

    def reserve(self, request: Request) -> Reservation:
        """Take blocks for a request; share those of its prompt that are cached.

        The shared prefix ends at least one token before the prompt does: that token is computed, to
            draw the next one.
        Raises: NoBlocks (nothing was taken; also while preempted requests wait for blocks),
            RequestTooLong, InvalidRequest, DuplicateRequest.
        """
        group = self._entrance.check(request, State.RESERVED)
        if self._scheduler.has_preempted:
            raise NoBlocks("preempted requests wait for blocks, and go first")
        sequence = group.prompt
        self._holdings.give_first(group, sequence)
        size = self._holdings.block_size
        if sequence.num_prompt_tokens >= size:
            sequence.chain_hash(sequence.num_prompt_tokens // size - 1, size)  # and all before it
        self._entrance.enter(group, sequence.num_local_tokens)
        return Reservation(
            request.request_id,
            tuple(sequence.block_ids),
            sequence.num_local_tokens,
            tuple(sequence.chain_hashes),
        )

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
            outputs: drawn already, by an earlier leg: one list for each sample, or none. They count
                as output. Of several samples, one that its tokens end (EOS, stop token, length)
                takes no part and has no event.
            beam_start: of the event that ended an earlier leg of a beam search.
        Raises: UnknownRequest, WrongState, InvalidRequest, NoBlocks (blocks quarantined before
            could not be replaced); nothing changed, a later call may succeed. Outputs that are not
            in the request's grammar end it instead, with an event of the next step.
        """
        group = self._group(request_id, State.RESERVED)
        sequence, size = group.prompt, self._holdings.block_size
        drawn = admission.check_start(group, num_loaded_tokens, outputs, self.model_info, size)
        candidates = self._booking.beams.check_start(
            group, tuple(beam_start), self.model_info.vocab_size
        )
        self._holdings.fill_holes(sequence)
        group.beam_start = candidates
        if group.num_rows > 1:
            group.first_outputs = drawn
        elif drawn:
            sequence.token_ids.extend(drawn[0])
        num_known = max(num_loaded_tokens, sequence.num_local_tokens)
        num_needless = len(sequence.token_ids) - (0 if group.is_continued else 1)
        num_computed = self._holdings.num_resumable(min(num_known, num_needless))
        sequence.num_computed_tokens = num_computed
        # What was loaded nobody needs to be told of.
        sequence.num_told_blocks = max(sequence.num_told_blocks, num_computed // size)
        self._holdings.cache_full_blocks(sequence)
        self._metrics.on_start(
            request_id,
            num_loaded_tokens=max(0, num_known - sequence.num_local_tokens),
            num_earlier_tokens=sum(map(len, drawn)),
        )
        self._entrance.queue(group)

    def submit(self, request: Request) -> None:
        """Queue a request: the engine takes blocks and starts it when its turn comes, by the policy
        and by who fits (engine/schedule/admit.py).

        Raises: RequestTooLong, InvalidRequest, DuplicateRequest.
        """
        group = self._entrance.check(request, State.QUEUED)
        self._entrance.enter(group, 0)
        self._metrics.on_start(request.request_id)
        self._entrance.queue(group)

    def hold(self, request_id: str) -> Held:
        """Take a started request out of the steps as it stands, to go on elsewhere: HOLDING, whose
        blocks stay readable until `release`. No event of it comes any more.

        Raises: UnknownRequest; WrongState for one that was not started, or of several samples or
        beams.
        """
        return hold(
            self._group(request_id),
            self._holdings,
            self._scheduler,
            self._preemptor,
            self._constraints,
        )

    def release(self, request_id: str) -> None:
        """HOLDING -> FINISHED: nobody reads the blocks any more. Raises: UnknownRequest,
        WrongState."""
        group = self._group(request_id, State.HOLDING)
        outcome = "finished" if group.request.hold_after is not None else "moved"
        self._booking.end(group, State.FINISHED, outcome)

    def abort(self, request_id: str) -> None:
        """End a request in any state and give its blocks back. Does nothing for a request that is
        not live.

        Blocks that a transfer may still write into must be quarantined before.
        """
        group = self._groups.get(request_id)
        if group is not None:
            self._booking.end(group, State.ABORTED, "aborted")

    def finish_sample(self, request_id: str, sample_index: int) -> None:
        """End one sample and give its blocks back; the others go on. The last one ends the request.
        Does nothing for one that is not live. No event tells of it, but one of a step before may
        still be on its way.

        Raises: InvalidRequest for an index that the request does not have.
        """
        group = self._groups.get(request_id)
        if group is None:
            return
        if not 0 <= sample_index < group.num_rows:
            raise InvalidRequest("sample_index", f"{sample_index} is outside [0, {group.num_rows})")
        self._booking.finish_sample(group, sample_index)

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
        self._holdings.hold(self._group(request_id), tuple(block_ids))

    def unquarantine(self, block_ids: Iterable[int]) -> None:
        """The transfer is over. Raises: WrongState naming a block that is not quarantined; nothing
        was done."""
        self._pool.unhold(block_ids)

    def refill(self, request_id: str) -> tuple[int, ...]:
        """New blocks for a RESERVED request in place of those that were quarantined, now instead of
        at `start`. Returns: all of its blocks in order, HOLE (-1) for one that there is none for.
        Raises: UnknownRequest, WrongState."""
        sequence = self._group(request_id, State.RESERVED).prompt
        with contextlib.suppress(NoBlocks):  # `start` tries again, and says so
            self._holdings.fill_holes(sequence)
        return tuple(sequence.block_ids)

    def hold_cached(self, chain_hashes: Values[bytes], first: int = 0) -> tuple[int, ...]:
        """Keep cached blocks as they are, for who wants to read them: blocks [first, ..) of the
        longest prefix of this chain that the prefix cache has, of whatever request, live or over.
        They are quarantined until as many `unquarantine`.

        Returns: their ids; the first of them is the chain's block `first`.
        """
        return self._holdings.hold_cached(chain_hashes, first)

    def lend_blocks(self, num_blocks: int) -> tuple[int, ...]:
        """Blocks for somebody who is no request and writes into them what he likes, soon to be
        returned: at most `num_blocks`, at most half of the free ones, none while preempted requests
        wait. Nothing is evicted for them."""
        return () if self._scheduler.has_preempted else self._holdings.lend(num_blocks)

    def return_blocks(self, block_ids: Iterable[int]) -> None:
        """End of `lend_blocks`; nothing may touch them any more. Raises: WrongState for a block
        that is not lent; nothing was done."""
        self._holdings.take_back(tuple(block_ids))

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
        """Let requests use a LoRA adapter. Raises: what engine/lora/registry.py:Adapters.load
        raises."""
        return self._model.adapters.load(name, folder, progress)

    def adapter_limits(self) -> LoraLimits:
        """What an adapter is read with that `install_adapter` shall take. Raises: InvalidAdapter
        where this model takes none."""
        return self._model.adapters.reading_limits()

    def install_adapter(self, name: str, adapter: Adapter) -> AdapterInfo:
        """`load_adapter` for one that was read before, maybe by another thread. Raises: what
        engine/lora/registry.py:Adapters.install raises."""
        return self._model.adapters.install(name, adapter)

    def unload_adapter(self, name: str) -> None:
        """Raises: UnknownAdapter; AdapterInUse while live requests name it."""
        self._model.adapters.unload(name)

    def adapters(self) -> tuple[AdapterInfo, ...]:
        """What is loaded."""
        return self._model.adapters.infos()

    # -- the step

    def has_work(self) -> bool:
        """Whether `step` would compute anything. False also where all blocks are others', which
        are reserved or held: a call must free some first."""
        return self._steps.has_work()

    @property
    def is_device_behind(self) -> bool:
        """The device may still write into blocks that an event named, or that nobody has any more:
        a plain step gave it work, and no draw has waited for it. False while only launches are
        under way: what they write into is kept until they were read."""
        return self._steps.is_device_behind

    def step(self) -> StepOutput:
        """One forward pass over all scheduled samples, and one draw for each whose last token was
        in it.

        Where the model can, the step after this one is begun, too (`EngineConfig.overlap`): no call
        tells, but by the time it takes. With nothing to compute while somebody waits for a grammar
        or for bytes, it waits for that, at most steps.IDLE_WAIT_S. An exception of the model leaves
        every request as it was before.
        """
        return self._steps.take()

    def _group(self, request_id: str, state: State | None = None) -> Group:
        group = self._groups.get(request_id)
        if group is None:
            raise UnknownRequest(f"no live request {request_id}")
        if state is not None and group.state is not state:
            raise WrongState(f"request {request_id} is {group.state.value}, not {state.value}")
        return group

    def close(self) -> None:
        """End the threads and the process that grammars are compiled in, what is in flight, and the
        processes of other ranks. No step after it."""
        self._in_flight.close()
        self._constraints.close()
        self._model.close()

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
        """Recompute every block's class and reference count from the live requests, and whatever
        else is counted.

        Raises: IntegrityError.
        """
        accounts.check_integrity(self._groups, self._holdings)
        self.kv.check_integrity()
        self._scheduler.check_integrity()
        self._preemptor.check_integrity(
            sequence for group in self._groups.values() for sequence in group.samples.values()
        )
        self._metrics.check_integrity()
        self._entrance.check_integrity()
        if self._speculator is not None:
            self._speculator.check_integrity()
        self._constraints.check_integrity()
        self._model.adapters.check_integrity(
            accounts.num_by_adapter(group.request for group in self._groups.values())
        )

    def stats(self) -> EngineStats:
        """Levels and counts now."""
        return accounts.stats(
            self._groups, self._holdings, self._totals, self._preemptor.num_by_cause
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
) -> Engine:
    """Resolve the checkpoint, load the model, size the cache, warm up.

    Args: prepares_grammars: for who will serve some: `Engine.prepare_grammars`, which takes memory.
        draft_peers: the ways to `speculation.draft_workers`.
    Raises: LoadError (missing or broken checkpoint, model type, too few blocks), errors of
        checkpoints.resolve; each one line that says what is wrong and how to fix it.
    """
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    model = load_model(config, progress=progress)
    phases = Phases()
    try:
        # The first grammar must not wait for it.
        folder = resolve(config.model, files="tokenizer").path

        def make_grammars() -> GrammarService:
            return GrammarService.from_checkpoint(folder, model.info.vocab_size, config.grammar)

        with phases.timed("drafters"):
            before_bytes = held_bytes(model.info.device)
            drafters = load_drafters(config, model.info, progress, draft_peers)
            drafters += load_heads(config, model)
            draft_bytes = held_bytes(model.info.device) - before_bytes
        with phases.timed("cache"):
            engine = Engine(
                config,
                model,
                stop_policy=stop_policy,
                make_grammars=make_grammars,
                drafters=drafters,
                draft_bytes=draft_bytes,
            )
        with phases.timed("warm-up"):
            engine.warm_up(progress)
        if prepares_grammars:
            with phases.timed("grammars"):
                engine.prepare_grammars()
    except BaseException:
        model.close()
        raise
    seconds = (*model.info.seconds, *phases.seconds)
    engine.model_info = dataclasses.replace(engine.model_info, seconds=seconds)
    return engine
