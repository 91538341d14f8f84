"""Engine: continuous batching of one model over one device cache. Tokens in, tokens and filled
blocks out.

Prefill and decode are the same loop: a step is {request: number of tokens}. What a role is lies in
how it is called: a prefill worker reserves with `hold_after=1` and reads the blocks, a decode
worker loads blocks between `reserve` and `start`. States
and their meaning: engine/request.py. No RPC, no asyncio, no text.

Threads: every method is called from one thread, the engine's. Other threads may read `kv` bytes of
filled blocks, write those of reserved blocks that are not started, and read `model_info`.

Invariants: an admitted request never runs out of blocks (`reserve` takes all that it may need); a
full block of a started request changes no more; free + evictable + referenced + quarantined ==
total (`check_integrity`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import torch

from engine import accounts, admission, sampler
from engine.batch import Batch, Span, warm_up
from engine.config import EngineConfig
from engine.errors import (
    DuplicateRequest,
    UnknownRequest,
    WrongState,
)
from engine.kv.block_pool import BlockPool
from engine.kv.memory import KvMemory
from engine.kv.prefix_cache import PrefixCache
from engine.kv.sizing import choose_num_blocks, free_memory_bytes
from engine.models.interface import LoadedModel
from engine.models.load import load_model
from engine.request import (
    STARTED,
    EngineStats,
    FilledBlock,
    ModelInfo,
    Request,
    RequestEvent,
    Reservation,
    State,
    StepOutput,
)
from engine.schedule.step import Candidate, plan_step
from engine.sequence import HOLE, Sequence, finish_reason, should_hold

Progress = Callable[[str, int, int], None]
"""(what, done, total): bytes read for "weights" and "digest", steps for "warm-up"."""


class Engine:
    """See the module. `kv` is the device cache, `model_info` what was loaded."""

    def __init__(self, config: EngineConfig, model: LoadedModel) -> None:
        """Take memory for the KV cache. Raises: TooFewBlocks."""
        self.config = config
        self._model = model
        window = model.info.context_window
        num_blocks = choose_num_blocks(
            config, model.layout, window, free_memory_bytes(model.info.device)
        )
        self.kv = KvMemory(model.layout, num_blocks, model.info.device)
        self.model_info: ModelInfo = dataclasses.replace(model.info, num_blocks=num_blocks)
        model.attach(self.kv)
        self._pool = BlockPool(num_blocks)
        self._prefix_cache = PrefixCache(self._pool)
        self._block_size = model.layout.block_size
        self._eos_token_ids = frozenset(model.info.eos_token_ids)
        self._sequences: dict[str, Sequence] = {}
        self._num_started = 0
        self._totals = accounts.Totals()

    def warm_up(self, progress: Progress | None = None) -> None:
        """Run the model once per kind of batch, so that the first request does not pay for it.
        Writes no KV."""
        sizes = (1, self.config.max_num_tokens_per_step)
        for done, num_tokens in enumerate(sizes):
            if progress is not None:
                progress("warm-up", done, len(sizes))
            sampler.draw(self._model.forward(warm_up(num_tokens)), [sampler.WARM_UP])
        if progress is not None:
            progress("warm-up", len(sizes), len(sizes))

    # -- a request's life

    def reserve(self, request: Request) -> Reservation:
        """Take blocks for all that the request may compute; share those of its prompt that are
        cached.

        The shared prefix ends at least one token before the prompt does: that token is computed, to
            draw the next one.
        Raises: NoBlocks (nothing was taken), RequestTooLong, InvalidRequest, DuplicateRequest.
        """
        if request.request_id in self._sequences:
            raise DuplicateRequest(f"request {request.request_id} is live already")
        admission.check_request(request, self.model_info)
        max_output_tokens = admission.max_output_tokens(request, self.model_info.context_window)
        num_blocks = admission.num_blocks(request, max_output_tokens, self.kv.layout)
        size, prompt = self._block_size, request.prompt_token_ids
        chain_hashes: list[bytes] = []
        for start in range(0, len(prompt) - size + 1, size):
            parent = chain_hashes[-1] if chain_hashes else b""
            chain_hashes.append(request.block_hasher(parent, prompt[start : start + size]))
        num_shareable = (len(prompt) - 1) // size
        block_ids, num_shared = self._prefix_cache.reserve(chain_hashes[:num_shareable], num_blocks)
        sequence = Sequence(
            request,
            max_output_tokens=max_output_tokens,
            block_ids=block_ids,
            num_local_tokens=num_shared * size,
            chain_hashes=tuple(chain_hashes),
        )
        self._sequences[request.request_id] = sequence
        self._totals.num_local_prefix_tokens += sequence.num_local_tokens
        return Reservation(
            request.request_id, block_ids, sequence.num_local_tokens, tuple(chain_hashes)
        )

    def start(
        self,
        request_id: str,
        *,
        num_loaded_tokens: int = 0,
        output_token_ids: Iterable[int] = (),
    ) -> None:
        """Let a reserved request take part in steps. From here on its blocks belong to the engine.

        Args:
            num_loaded_tokens: tokens whose KV is in its blocks now, counted from the first, the
                local prefix included. Full blocks below enter the prefix cache. 0 where nothing was
                loaded. If nothing is left to compute, the last
                token is computed again: its logits are needed.
            output_token_ids: drawn already, by an earlier leg. They count as output.
        Raises: UnknownRequest, WrongState, InvalidRequest, NoBlocks (blocks quarantined before
            could not be replaced; nothing changed, a later call may succeed).
        """
        sequence = self._sequence(request_id, State.RESERVED)
        outputs = tuple(output_token_ids)
        admission.check_start(
            sequence, num_loaded_tokens, outputs, self.model_info, self._block_size
        )
        holes = [index for index, block_id in enumerate(sequence.block_ids) if block_id == HOLE]
        for index, block_id in zip(holes, self._prefix_cache.take(len(holes)), strict=True):
            sequence.block_ids[index] = block_id
        sequence.token_ids.extend(outputs)
        num_known = max(num_loaded_tokens, sequence.num_local_tokens)
        sequence.num_computed_tokens = min(num_known, len(sequence.token_ids) - 1)
        self._cache_full_blocks(sequence)
        self._num_started += 1
        sequence.order = self._num_started
        sequence.move(State.WAITING)

    def release(self, request_id: str) -> None:
        """HOLDING -> FINISHED: nobody reads the blocks any more. Raises: UnknownRequest,
        WrongState."""
        self._end(self._sequence(request_id, State.HOLDING), State.FINISHED)

    def abort(self, request_id: str) -> None:
        """End a request in any state and give its blocks back. Does nothing for a request that is
        not live.

        Blocks that a transfer may still write into must be quarantined before.
        """
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._end(sequence, State.ABORTED)

    def quarantine(self, request_id: str, block_ids: Iterable[int]) -> None:
        """A transfer may still touch these blocks: keep them out of use until as many
        `unquarantine`.

        RESERVED: they leave the request (they must not be of its local prefix) and `start` takes
            others in their place.
        Later states: the transfer can only be reading, so the request goes on using them, and they
            are kept out of use
        once it lets them go.
        Raises: UnknownRequest, WrongState for a block that is not the request's own; nothing was
            done.
        """
        sequence = self._sequence(request_id)
        wanted = tuple(block_ids)
        is_reserved = sequence.state is State.RESERVED
        first = sequence.num_local_tokens // self._block_size if is_reserved else 0
        own = {block_id: first + i for i, block_id in enumerate(sequence.block_ids[first:])}
        for block_id in wanted:
            if block_id == HOLE or block_id not in own or wanted.count(block_id) > 1:
                raise WrongState(f"block {block_id} is not {request_id}'s own, or was named twice")
        self._pool.hold(wanted)
        if is_reserved:
            for block_id in wanted:
                sequence.block_ids[own[block_id]] = HOLE
            self._pool.put_back(wanted)

    def unquarantine(self, block_ids: Iterable[int]) -> None:
        """The transfer is over. Raises: WrongState naming a block that is not quarantined; nothing
        was done."""
        self._pool.unhold(block_ids)

    def block_ids(self, request_id: str) -> tuple[int, ...]:
        """The blocks of a live request in order, -1 for one that was quarantined before `start`."""
        return tuple(self._sequence(request_id).block_ids)

    # -- the step

    def has_work(self) -> bool:
        """Whether `step` would compute anything."""
        return any(sequence.state in STARTED for sequence in self._sequences.values())

    def step(self) -> StepOutput:
        """One forward pass over all scheduled requests, and one draw for each whose last token was
        in it.

        An exception of the model leaves every request as it was before the step.
        """
        plan = self._plan()
        events: list[RequestEvent] = []
        if plan:
            batch, draws = self._prepare(plan)
            logits = self._model.forward(batch)
            drawn = iter(sampler.draw(logits, draws) if draws else ())
            for request_id, num_tokens in plan.items():
                sequence = self._sequences[request_id]
                result = next(drawn) if num_tokens == sequence.num_pending_tokens else None
                events.append(self._advance(sequence, num_tokens, result))
        num_scheduled = sum(plan.values())
        self._totals.num_steps += 1
        self._totals.num_computed_tokens += num_scheduled
        stats = self.stats()
        return StepOutput(
            events=tuple(events),
            num_scheduled_tokens=num_scheduled,
            num_free_blocks=self._pool.num_available,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            step=self._totals.num_steps,
        )

    def _plan(self) -> dict[str, int]:
        candidates = [
            Candidate(
                request_id=request_id,
                num_pending_tokens=sequence.num_pending_tokens,
                has_drawn=sequence.state is State.RUNNING,
                is_admitted=sequence.state is not State.WAITING,
                priority=sequence.request.priority,
                order=sequence.order,
            )
            for request_id, sequence in self._sequences.items()
            if sequence.state in STARTED
        ]
        return plan_step(
            candidates,
            num_tokens_budget=self.config.max_num_tokens_per_step,
            max_num_running=self.config.max_num_running,
        )

    def _prepare(self, plan: dict[str, int]) -> tuple[Batch, list[sampler.Draw]]:
        """Plan -> the model's input, and what to draw from its rows of logits."""
        token_ids: list[int] = []
        spans: list[Span] = []
        draw_indices: list[int] = []
        draws: list[sampler.Draw] = []
        for request_id, num_tokens in plan.items():
            sequence = self._sequences[request_id]
            start = sequence.num_computed_tokens
            end = start + num_tokens
            num_blocks = self.kv.layout.num_blocks_for(end)
            last_block_start = (num_blocks - 1) * self._block_size
            if start <= last_block_start and end < last_block_start + self._block_size:
                # Entered and not filled: what an earlier user or a refused transfer left in the
                # other slots is read, with weight 0, and 0 times NaN is NaN.
                self.kv.clear(sequence.block_ids[num_blocks - 1])
            token_ids += sequence.token_ids[start:end]
            spans.append(Span(start, num_tokens, tuple(sequence.block_ids[:num_blocks])))
            if end == len(sequence.token_ids):
                draw_indices.append(len(token_ids) - 1)
                draws.append(sampler.Draw(sequence.request.sampling, position=end))
        return Batch(tuple(token_ids), tuple(spans), tuple(draw_indices)), draws

    def _advance(
        self, sequence: Sequence, num_tokens: int, drawn: sampler.Drawn | None
    ) -> RequestEvent:
        """Book what the step computed for one request, and its draw."""
        request = sequence.request
        if sequence.state is State.WAITING:
            sequence.move(State.PREFILLING)
        if drawn is not None and drawn.error is not None:
            self._distrust(sequence)
            num_computed = sequence.num_computed_tokens
            self._end(sequence, State.ABORTED)
            return RequestEvent(
                request.request_id, (), None, (), num_computed, None, None, drawn.error
            )
        sequence.num_computed_tokens += num_tokens
        filled = self._cache_full_blocks(sequence)
        num_computed = sequence.num_computed_tokens
        if drawn is None:
            return RequestEvent(
                request.request_id, (), None, filled, num_computed, None, None, None
            )
        sequence.token_ids.append(drawn.token_id)
        self._totals.num_output_tokens += 1
        reason = finish_reason(sequence, drawn.token_id, self._eos_token_ids)
        if (reason is not None and request.hold_after is not None) or should_hold(sequence):
            sequence.move(State.HOLDING)
        elif reason is not None:
            self._end(sequence, State.FINISHED)
        elif sequence.state is State.PREFILLING:
            sequence.move(State.RUNNING)
        return RequestEvent(
            request_id=request.request_id,
            token_ids=(drawn.token_id,),
            logprobs=None if drawn.logprobs is None else (drawn.logprobs,),
            filled=filled,
            num_computed_tokens=num_computed,
            finish_reason=reason,
            stop_token_id=drawn.token_id if reason is not None and reason.is_token else None,
            error=None,
        )

    # -- blocks

    def _cache_full_blocks(self, sequence: Sequence) -> tuple[FilledBlock, ...]:
        """Offer blocks that became full to the prefix cache."""
        filled: list[FilledBlock] = []
        for index in range(
            sequence.num_cached_blocks, sequence.num_computed_tokens // self._block_size
        ):
            chain_hash = sequence.chain_hash(index, self._block_size)
            block_id = sequence.block_ids[index]
            if index >= sequence.num_local_tokens // self._block_size:
                self._prefix_cache.insert(chain_hash, block_id)
            filled.append(FilledBlock(index, block_id, chain_hash))
            sequence.num_cached_blocks += 1
        return tuple(filled)

    def _distrust(self, sequence: Sequence) -> None:
        """Its logits were not numbers, so its KV may not be either: nobody else shall find it."""
        for block_id in sequence.block_ids[sequence.num_local_tokens // self._block_size :]:
            self._prefix_cache.forget(block_id)

    def _end(self, sequence: Sequence, state: State) -> None:
        """Give the blocks back, the tail of the chain to be evicted first, and forget the
        request."""
        sequence.move(state)
        self._pool.put_back(reversed(sequence.held_block_ids))
        del self._sequences[sequence.request.request_id]

    def _sequence(self, request_id: str, state: State | None = None) -> Sequence:
        sequence = self._sequences.get(request_id)
        if sequence is None:
            raise UnknownRequest(f"no live request {request_id}")
        if state is not None and sequence.state is not state:
            raise WrongState(f"request {request_id} is {sequence.state.value}, not {state.value}")
        return sequence

    # -- accounts

    def check_integrity(self) -> None:
        """Recompute every block's class and reference count from the live requests.

        Raises: IntegrityError.
        """
        accounts.check_integrity(self._sequences, self._pool, self._prefix_cache, self._block_size)

    def stats(self) -> EngineStats:
        """Levels and counts now."""
        return accounts.stats(self._sequences, self._pool, self._totals)


def load_engine(config: EngineConfig, *, progress: Progress | None = None) -> Engine:
    """Resolve the checkpoint, load the model, size the cache, warm up.

    Raises: LoadError (missing or broken checkpoint, model type, too few blocks), errors of
        checkpoints.resolve; each one
    line that says what is wrong and how to fix it.
    """
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    engine = Engine(config, load_model(config, progress=progress))
    engine.warm_up(progress)
    return engine
