"""Entrance: from a request to a group that the scheduler knows: checked, live, and in the queue
when nothing is missing but room. What may be missing: its grammar (compiled elsewhere), or a first
step for what an earlier leg drew. Takes blocks only for who reserves. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Values

from engine import admission
from engine.config import EngineConfig
from engine.constraints import Constraints
from engine.errors import DuplicateRequest, EngineError, InvalidRequest, NoBlocks
from engine.group import Group
from engine.kv.cache_manager import KVCacheManager
from engine.kv.layout import KvLayout
from engine.lora.registry import Adapters
from engine.lora.roots import CacheRoots
from engine.metrics import EngineMetrics
from engine.output_processor import OutputProcessor
from engine.outputs import RequestOutput
from engine.request import ModelInfo, Request, Reservation, State
from engine.sampling.history import TokenHistory, needs_history
from engine.scheduler import Scheduler


class Entrance:
    """See the module.

    Args:
        groups: the live requests by id.
        has_stop_policy: then beams are refused, which no policy sees.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_info: ModelInfo,
        layout: KvLayout,
        groups: dict[str, Group],
        *,
        adapters: Adapters,
        constraints: Constraints,
        scheduler: Scheduler,
        output_processor: OutputProcessor,
        cache_manager: KVCacheManager,
        metrics: EngineMetrics,
        has_stop_policy: bool,
    ) -> None:
        self._config = config
        self._model_info = model_info
        self._layout = layout
        self._groups = groups
        self._adapters = adapters
        self._constraints = constraints
        self._scheduler = scheduler
        self._output_processor = output_processor
        self._cache_manager = cache_manager
        self._metrics = metrics
        self._has_stop_policy = has_stop_policy
        self._cache_roots = CacheRoots()
        self._num_queued = 0
        self._continued: list[Group] = []

    def reserve(self, request: Request) -> Reservation:
        """See engine/loop.py:Engine."""
        group = self._check(request, State.RESERVED)
        sequence = group.prompt
        try:
            if self._scheduler.has_preempted:
                raise NoBlocks("preempted requests wait for blocks, and go first")
            self._cache_manager.allocate_first(group, sequence)
        except BaseException:
            self._constraints.forget(group)  # its grammar is compiled for no request
            raise
        size = self._cache_manager.block_size
        if sequence.num_prompt_tokens >= size:
            sequence.chain_hash(sequence.num_prompt_tokens // size - 1, size)  # and all before it
        self._enter(group, sequence.num_local_tokens)
        return Reservation(
            request.request_id,
            tuple(sequence.block_ids),
            sequence.num_local_tokens,
            tuple(sequence.chain_hashes),
        )

    def start(
        self,
        group: Group,
        num_loaded_tokens: int,
        outputs: Values[Values[int]],
        beam_start: tuple[tuple[int, float], ...],
    ) -> None:
        """See engine/loop.py:Engine."""
        sequence, size = group.prompt, self._cache_manager.block_size
        drawn = admission.check_start(group, num_loaded_tokens, outputs, self._model_info, size)
        candidates = self._output_processor.beams.check_start(
            group, beam_start, self._model_info.vocab_size
        )
        self._cache_manager.fill_holes(sequence)
        group.beam_start = candidates
        if group.num_rows > 1:
            group.first_outputs = drawn
        elif drawn:
            sequence.token_ids.extend(drawn[0])
        num_known = max(num_loaded_tokens, sequence.num_local_tokens)
        num_needless = len(sequence.token_ids) - (0 if group.is_continued else 1)
        num_computed = self._cache_manager.num_resumable(min(num_known, num_needless))
        sequence.num_computed_tokens = num_computed
        # What was loaded nobody needs to be told of.
        sequence.num_told_blocks = max(sequence.num_told_blocks, num_computed // size)
        self._cache_manager.cache_full_blocks(sequence)
        self._metrics.on_start(
            group.request.request_id,
            num_loaded_tokens=max(0, num_known - sequence.num_local_tokens),
            num_earlier_tokens=sum(map(len, drawn)),
        )
        self._queue(group)

    def submit(self, request: Request) -> None:
        """See engine/loop.py:Engine."""
        group = self._check(request, State.QUEUED)
        self._enter(group, 0)
        self._metrics.on_start(request.request_id)
        self._queue(group)

    def _check(self, request: Request, state: State) -> Group:
        """A request that can run, as a group that is not live yet. Its grammar is being compiled
        from here on. Raises: InvalidRequest, RequestTooLong, DuplicateRequest, GrammarBusy."""
        if request.request_id in self._groups:
            raise DuplicateRequest(f"request {request.request_id} is live already")
        info, layout = self._model_info, self._layout
        admission.check_request(request, info)
        admission.check_hashes(request, layout.block_size)
        if request.beam is not None and self._has_stop_policy:
            raise InvalidRequest("beam", "this engine has a stop policy, which sees no beams")
        admission.check_room(
            request,
            self._config,
            layout,
            context_window=info.context_window,
            num_blocks=info.num_blocks,
        )
        self._cache_roots.check(request.cache_root, self._adapters.digest(request.adapter))
        num_output_tokens = admission.max_output_tokens(request, info.context_window)
        group = Group(
            request,
            state,
            max_output_tokens=num_output_tokens,
            is_whole=admission.is_whole(request, self._config),
        )
        group.compilation = self._constraints.ask(request)
        group.num_own_blocks = admission.num_own_blocks(request, num_output_tokens, layout)
        return group

    def _enter(self, group: Group, num_cached_tokens: int) -> None:
        """The request is live from here on."""
        request = group.request
        self._adapters.acquire(request.adapter)
        group.adapter_slot = self._adapters.slot(request.adapter)
        group.may_be_ahead &= self._adapters.is_launched(request.adapter)
        self._groups[request.request_id] = group
        self._metrics.on_reserve(
            request.request_id, len(request.prompt_token_ids), num_cached_tokens
        )

    def _queue(self, group: Group) -> None:
        """It wants to take part in steps, in the order of these calls."""
        self._num_queued += 1
        group.order = self._num_queued
        sequence, sampling = group.prompt, group.request.sampling
        if needs_history(sampling):
            sequence.history = TokenHistory(
                sampling, group.request.prompt_token_ids, sequence.output_token_ids
            )
        if group.compilation is None:
            self._let_in(group)
        else:  # the next step finds it if it is ready already
            sequence.move(State.WAITING_FOR_GRAMMAR)
            self._constraints.wait_for(group)

    def _let_in(self, group: Group) -> None:
        """Nothing is missing but room."""
        sequence = group.prompt
        if sequence.block_ids:
            sequence.move(State.WAITING)
        elif sequence.state is not State.QUEUED:
            sequence.move(State.QUEUED)
        if group.is_continued and sequence.num_pending_tokens == 0:
            self._continued.append(group)
        else:
            self._scheduler.add(sequence)

    # -- before each step

    @property
    def has_waiting(self) -> bool:
        """`let_in_ready` may have something to do."""
        return bool(self._continued) or self._constraints.has_waiting

    @property
    def wants_places(self) -> bool:
        """Somebody waits for several places at once: nobody else shall get one meanwhile."""
        return bool(self._continued)

    def let_in_ready(self, clock: Callable[[], float]) -> list[RequestOutput]:
        """Those whose grammar is compiled, or why it is not; and those that go on from where an
        earlier leg left them, their prompts computed."""
        events: list[RequestOutput] = []
        if not self.has_waiting:
            return events
        for group in self._constraints.poll():
            error = self._constraints.enter(group)
            if error is None:
                self._let_in(group)
            else:
                events.append(self._output_processor.fail(group.prompt, error))
        continued, self._continued = self._continued, []
        for group in continued:
            if self._groups.get(group.request.request_id) is not group:
                continue  # aborted meanwhile
            if group.request.beam is not None and not self._scheduler.has_places(group.num_rows):
                self._continued.append(group)
                continue
            try:
                events += self._output_processor.resume(group, clock())
            except EngineError as problem:
                events.append(self._output_processor.fail(group.prompt, problem))
        return events

    def check_integrity(self) -> None:
        """Raises: IntegrityError."""
        self._cache_roots.check_integrity()
