"""Engine: continuous batching of one model over one device cache. Tokens in, tokens and filled
blocks out.

Prefill and decode are the same loop: a step is {sample: number of tokens}. What a role is lies in
how it is called: a prefill worker reserves with `hold_after=1` and reads the blocks, a decode
worker loads blocks between `reserve` and `start`; who loads nothing can `submit`, and leave it to
the engine when blocks are taken. States and their meaning: engine/request.py; its parts:
engine/parts.py. No RPC, no asyncio, no text.

Threads: every method is called from one thread, the engine's. Other threads may read `kv` bytes of
filled blocks, write those of reserved blocks that are not started, and read `model_info`. Where
blocks are taken away (`EngineConfig.preemption`), filled blocks may be read by others only of
requests that hold, which are never preempted, and those that `hold_cached` named.

Invariants: a full block of a started request changes no more; free + evictable + referenced +
quarantined == total; who was let in ends (`check_integrity`, tests/unit/engine/test_preemption.py).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Values
from pathlib import Path

from engine.config import EngineConfig
from engine.constraints import MakeService
from engine.errors import InvalidRequest, NoBlocks, UnknownRequest, WrongState
from engine.group import Group
from engine.held import Held, hold
from engine.load import load
from engine.lora.config import LoraLimits
from engine.lora.files import Adapter
from engine.lora.registry import AdapterInfo
from engine.metrics import EngineStats, MetricsSnapshot
from engine.models.interface import LoadedModel, Progress
from engine.outputs import StepOutput
from engine.parking import Parking
from engine.parts import Parts, park_bytes
from engine.request import Request, Reservation, State, StopPolicy
from engine.speculation.draft_port import DraftPeer
from engine.speculation.drafter import Drafter
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
        self._parts = parts = Parts(
            config,
            model,
            stop_policy=stop_policy,
            parking=parking,
            make_grammars=make_grammars,
            drafters=drafters,
            draft_bytes=draft_bytes,
            clock=clock,
        )
        self.kv = parts.kv
        self.model_info = parts.model_info
        self._groups = parts.groups
        self._pool = parts.pool
        self._in_flight = parts.in_flight
        self._cache_manager = parts.cache_manager
        self._preemptor = parts.preemptor
        self._scheduler = parts.scheduler
        self._constraints = parts.constraints
        self._output_processor = parts.output_processor
        self._speculator = parts.speculator

    @property
    def park_bytes(self) -> int:
        """Bytes that a parking may take of this process' memory; 0: nothing is ever parked."""
        return park_bytes(self.config, self.kv)

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
        warm_up(self._model, self._parts.ahead, *most, progress)

    # -- a request's life

    def reserve(self, request: Request) -> Reservation:
        """Take blocks for a request; share those of its prompt that are cached.

        The shared prefix ends at least one token before the prompt does: that token is computed, to
            draw the next one.
        Raises: NoBlocks (nothing was taken; also while preempted requests wait for blocks),
            RequestTooLong, InvalidRequest, DuplicateRequest.
        """
        return self._parts.entrance.reserve(request)

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
        self._parts.entrance.start(group, num_loaded_tokens, outputs, tuple(beam_start))

    def submit(self, request: Request) -> None:
        """Queue a request: the engine takes blocks and starts it when its turn comes, by the policy
        and by who fits (engine/scheduler.py:admit).

        Raises: RequestTooLong, InvalidRequest, DuplicateRequest.
        """
        self._parts.entrance.submit(request)

    def hold(self, request_id: str) -> Held:
        """Take a started request out of the steps as it stands, to go on elsewhere: HOLDING, whose
        blocks stay readable until `release`. No event of it comes any more.

        Raises: UnknownRequest; WrongState for one that was not started, or of several samples or
        beams.
        """
        return hold(
            self._group(request_id),
            self._cache_manager,
            self._scheduler,
            self._preemptor,
            self._constraints,
        )

    def release(self, request_id: str) -> None:
        """HOLDING -> FINISHED: nobody reads the blocks any more. Raises: UnknownRequest,
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
        Does nothing for one that is not live. No event tells of it, but one of a step before may
        still be on its way.

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
        self._pool.unhold(block_ids)

    def refill(self, request_id: str) -> tuple[int, ...]:
        """New blocks for a RESERVED request in place of those that were quarantined, now instead of
        at `start`. Returns: all of its blocks in order, HOLE (-1) for one that there is none for.
        Raises: UnknownRequest, WrongState."""
        sequence = self._group(request_id, State.RESERVED).prompt
        with contextlib.suppress(NoBlocks):  # `start` tries again, and says so
            self._cache_manager.fill_holes(sequence)
        return tuple(sequence.block_ids)

    def hold_cached(self, chain_hashes: Values[bytes], first: int = 0) -> tuple[int, ...]:
        """Keep cached blocks as they are, for a reader: the longest prefix of this chain that the
        prefix cache has, of whatever request, live or over. Its last block is quarantined until
        `unquarantine` is called for that one, and a block of a chain keeps those before it.

        Returns: the ids of its blocks [first, ..); empty where it has no more than `first`, and
        nothing is kept.
        """
        return self._cache_manager.hold_cached(chain_hashes, first)

    def lend_blocks(self, num_blocks: int) -> tuple[int, ...]:
        """Blocks for somebody who is no request and writes into them what he likes, soon to be
        returned: at most `num_blocks`, at most half of the free ones, none while preempted requests
        wait. Nothing is evicted for them."""
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
        return self._parts.steps.has_work()

    @property
    def is_device_behind(self) -> bool:
        """The device may still write into blocks that an event named, or that nobody has any more:
        a plain step gave it work, and no draw has waited for it. False while only launches and
        begun steps are under way: what they write into is kept until they are over."""
        return self._parts.steps.is_device_behind

    def step(self) -> StepOutput:
        """One forward pass over all scheduled samples, and one draw for each whose last token was
        in it.

        Where the model can, the step after this one is begun, too (`EngineConfig.overlap`): no call
        tells, but by the time it takes. With nothing to compute while somebody waits for a grammar
        or for bytes, it waits for that, at most steps.IDLE_WAIT_S. An exception of the model leaves
        every request as it was before.
        """
        return self._parts.steps.take()

    def _group(self, request_id: str, state: State | None = None) -> Group:
        group = self._groups.get(request_id)
        if group is None:
            raise UnknownRequest(f"no live request {request_id}")
        if state is not None and group.state is not state:
            raise WrongState(f"request {request_id} is {group.state.value}, not {state.value}")
        return group

    def close(self) -> None:
        """End the threads and the process that grammars are compiled in, what is in flight, and the
        processes of other ranks; the models that guess, too. No step after it."""
        self._parts.close()

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
        self._parts.check_integrity()

    def stats(self) -> EngineStats:
        """Levels and counts now."""
        return self._parts.stats()

    def metrics(self) -> MetricsSnapshot:
        """How fast it is and was."""
        return self._parts.metrics.snapshot()


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
    return load(
        Engine,
        config,
        progress=progress,
        stop_policy=stop_policy,
        prepares_grammars=prepares_grammars,
        draft_peers=draft_peers,
    )
