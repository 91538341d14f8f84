"""InputProcessor: validates a request, creates its sequence group, and queues it when it lacks only
a place and blocks.

A request may have to wait for its grammar, which another process compiles. One that another engine
has sampled tokens for may begin without a step. Blocks are allocated only by `reserve`.

The checks are pure functions over values, for any thread. The services check fields at the edge
with narrower bounds and better words; the engine checks again what would make it compute nonsense,
or one step expensive for all. Whether a grammar compiles is not known here.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection
from collections.abc import Sequence as Values

from engine.config import EngineConfig
from engine.errors import (
    DuplicateRequest,
    EngineError,
    IntegrityError,
    InvalidRequest,
    NoBlocks,
    RequestTooLong,
)
from engine.grammar_constraints import Constraints
from engine.kv.cache_manager import KVCacheManager
from engine.kv.layout import KvLayout
from engine.lora.manager import LoraManager
from engine.metrics import EngineMetrics
from engine.open_beams import check_beams
from engine.output_processor import OutputProcessor
from engine.outputs import RequestOutput
from engine.request import MAX_LOGPROBS, ModelInfo, Request, RequestState, Reservation, Sampling
from engine.sampling.token_history import TokenHistory, needs_history
from engine.scheduler import Scheduler
from engine.sequence import HOLE, finish_reason
from engine.sequence_group import Group, num_rows

MAX_SAMPLES = 128
"""Largest number of samples of one request; guessed."""

MIN_TEMPERATURE = 1e-4
"""Smallest temperature above 0; scores would exceed float32's range below it. Use 0 for greedy
decoding."""

MAX_TEMPERATURE = 1e6
"""Largest temperature. Above it, differences of logits vanish in float32."""

MAX_REPETITION_PENALTY = 1e6
"""Largest repetition penalty; the smallest is its inverse. Keeps a logit of 1e30 finite."""

MAX_SHIFT = 1e9
"""Largest presence penalty, frequency penalty (per occurrence) or bias of a logit. With a million
occurrences, and divided by the smallest temperature, scores stay finite in float32."""

MAX_NGRAM_SIZE = 64
"""Largest n of n-grams: n - 1 tokens are stored as a key for each token. Guessed: 3 is usual."""

MAX_BAD_WORD_TOKENS = 1 << 16
"""Largest number of tokens of all bad words together; guessed."""

MAX_NUM_ROOTS = 65_536
"""Largest number of cache roots that are remembered: about 10 MB. There is one root per (tenant,
adapter)."""

_SHIFT = f"from {-MAX_SHIFT:g} to {MAX_SHIFT:g}"


class InputProcessor:
    """Makes sequence groups of requests, and puts them into the scheduler's queue.

    Args:
        groups: the live requests by id.
        has_stop_policy: True: beam searches are rejected, because a stop policy sees no beams.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_info: ModelInfo,
        layout: KvLayout,
        groups: dict[str, Group],
        *,
        adapters: LoraManager,
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
        self._cache_roots = CacheRootGuard()
        self._num_queued = 0
        self._continued: list[Group] = []

    def reserve(self, request: Request) -> Reservation:
        """Validate a request and allocate its blocks. Raises: NoBlocks, RequestTooLong,
        InvalidRequest, DuplicateRequest, GrammarBusy."""
        group = self._make_group(request, RequestState.RESERVED)
        sequence = group.prompt
        try:
            if self._scheduler.has_preempted:
                raise NoBlocks("preempted requests wait for blocks, and go first")
            self._cache_manager.allocate_first(group, sequence)
        except BaseException:
            self._constraints.forget(group)  # no request waits for its grammar any more
            raise
        size = self._cache_manager.block_size
        if sequence.num_prompt_tokens >= size:
            sequence.chain_hash(sequence.num_prompt_tokens // size - 1, size)  # and all before it
        self._add(group, sequence.num_local_tokens)
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
        """Queue a reserved request. Arguments and errors: LLMEngine.start."""
        sequence, size = group.prompt, self._cache_manager.block_size
        drawn = check_start(group, num_loaded_tokens, outputs, self._model_info, size)
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
        # No output needs to name loaded blocks.
        sequence.num_told_blocks = max(sequence.num_told_blocks, num_computed // size)
        self._cache_manager.cache_full_blocks(sequence)
        self._metrics.on_start(
            group.request.request_id,
            num_loaded_tokens=max(0, num_known - sequence.num_local_tokens),
            num_earlier_tokens=sum(map(len, drawn)),
        )
        self._enqueue(group)

    def submit(self, request: Request) -> None:
        """Validate a request and queue it without blocks. Raises: RequestTooLong, InvalidRequest,
        DuplicateRequest, GrammarBusy."""
        group = self._make_group(request, RequestState.QUEUED)
        self._add(group, 0)
        self._metrics.on_start(request.request_id)
        self._enqueue(group)

    def _make_group(self, request: Request, state: RequestState) -> Group:
        """Validate a request, begin to compile its grammar, and make its group, which is not live
        yet. Raises: InvalidRequest, RequestTooLong, DuplicateRequest, GrammarBusy."""
        if request.request_id in self._groups:
            raise DuplicateRequest(f"request {request.request_id} is live already")
        info, layout = self._model_info, self._layout
        check_request(request, info)
        check_hashes(request, layout.block_size)
        if request.beam is not None and self._has_stop_policy:
            raise InvalidRequest("beam", "this engine has a stop policy, which sees no beams")
        check_room(
            request,
            self._config,
            layout,
            context_window=info.context_window,
            num_blocks=info.num_blocks,
        )
        self._cache_roots.check(request.cache_root, self._adapters.digest(request.adapter))
        num_output_tokens = max_output_tokens(request, info.context_window)
        group = Group(
            request,
            state,
            max_output_tokens=num_output_tokens,
            is_whole=is_whole(request, self._config),
        )
        group.compilation = self._constraints.ask(request)
        group.num_own_blocks = num_own_blocks(request, num_output_tokens, layout)
        return group

    def _add(self, group: Group, num_cached_tokens: int) -> None:
        """Make the request live."""
        request = group.request
        self._adapters.acquire(request.adapter)
        group.adapter_slot = self._adapters.slot(request.adapter)
        group.may_be_ahead &= self._adapters.is_launched(request.adapter)
        self._groups[request.request_id] = group
        self._metrics.on_reserve(
            request.request_id, len(request.prompt_token_ids), num_cached_tokens
        )

    def _enqueue(self, group: Group) -> None:
        """Let the request take part in steps; requests are ordered by these calls."""
        self._num_queued += 1
        group.order = self._num_queued
        sequence, sampling = group.prompt, group.request.sampling
        if needs_history(sampling):
            sequence.history = TokenHistory(
                sampling, group.request.prompt_token_ids, sequence.output_token_ids
            )
        if group.compilation is None:
            self._admit(group)
        else:  # if it is compiled already, the next step admits the request
            sequence.move(RequestState.WAITING_FOR_GRAMMAR)
            self._constraints.wait_for(group)

    def _admit(self, group: Group) -> None:
        """Put the request into the scheduler's queue: it lacks only a place, and maybe blocks."""
        sequence = group.prompt
        if sequence.block_ids:
            sequence.move(RequestState.WAITING)
        elif sequence.state is not RequestState.QUEUED:
            sequence.move(RequestState.QUEUED)
        if group.is_continued and sequence.num_pending_tokens == 0:
            self._continued.append(group)
        else:
            self._scheduler.add(sequence)

    # -- before each step

    @property
    def has_waiting(self) -> bool:
        """Whether `admit_ready` may have something to do."""
        return bool(self._continued) or self._constraints.has_waiting

    @property
    def needs_places(self) -> bool:
        """Whether a request waits for several places at once: no other gets one until it has
        them."""
        return bool(self._continued)

    def admit_ready(self, clock: Callable[[], float]) -> list[RequestOutput]:
        """Admit the requests whose grammar is compiled, and continue those whose prompt is computed
        from what another engine has sampled. Returns: the outputs of the latter, and errors of
        grammars."""
        outputs: list[RequestOutput] = []
        if not self.has_waiting:
            return outputs
        for group in self._constraints.poll():
            error = self._constraints.enter(group)
            if error is None:
                self._admit(group)
            else:
                outputs.append(self._output_processor.fail(group.prompt, error))
        continued, self._continued = self._continued, []
        for group in continued:
            if self._groups.get(group.request.request_id) is not group:
                continue  # aborted meanwhile
            if group.request.beam is not None and not self._scheduler.has_places(group.num_rows):
                self._continued.append(group)
                continue
            try:
                outputs += self._output_processor.resume(group, clock())
            except EngineError as problem:
                outputs.append(self._output_processor.fail(group.prompt, problem))
        return outputs

    def check_integrity(self) -> None:
        """Check the number of cache roots. Raises: IntegrityError if it exceeds the limit."""
        self._cache_roots.check_integrity()


def check_request(request: Request, model: ModelInfo) -> None:
    """Check a request against the model. Raises: InvalidRequest naming the field, RequestTooLong
    for a prompt without room for one output token."""
    prompt = request.prompt_token_ids
    if not prompt:
        raise InvalidRequest("prompt_token_ids", "empty")
    least, greatest = request.token_id_range
    if least < 0 or greatest >= model.vocab_size:
        raise InvalidRequest("prompt_token_ids", f"an id outside [0, {model.vocab_size})")
    if len(prompt) >= model.context_window:
        raise RequestTooLong(
            "prompt_token_ids",
            f"{len(prompt)} tokens leave no room for output in a context window of "
            f"{model.context_window}",
        )
    if request.hold_after is not None and request.hold_after < 1:
        raise InvalidRequest("hold_after", f"{request.hold_after} is below 1")
    if not 1 <= request.num_samples <= MAX_SAMPLES:
        raise InvalidRequest("num_samples", f"{request.num_samples} is outside [1, {MAX_SAMPLES}]")
    if request.wants_embedding and not model.gives_embeddings:
        raise InvalidRequest("wants_embedding", "this model gives none, as it is loaded")
    if request.wants_embedding and (request.num_samples > 1 or request.beam is not None):
        raise InvalidRequest("wants_embedding", "goes with one sample, drawn without beams")
    if not 0 <= (request.prompt_logprobs or 0) <= MAX_LOGPROBS:
        raise InvalidRequest("prompt_logprobs", f"must be from 0 to {MAX_LOGPROBS}")
    if request.prompt_logprobs is not None and request.beam is not None:
        raise InvalidRequest("prompt_logprobs", "does not go with a beam search")
    check_sampling(request.sampling, model.vocab_size)
    check_beams(request, model.vocab_size, frozenset(model.eos_token_ids))


def check_hashes(request: Request, block_size: int) -> None:
    """Check the chain hashes of a request. Raises: InvalidRequest for hashes of more blocks than
    the prompt fills."""
    num_full = len(request.prompt_token_ids) // block_size
    if len(request.prompt_hashes) > num_full:
        raise InvalidRequest(
            "prompt_hashes", f"{len(request.prompt_hashes)} of {num_full} full blocks"
        )


def check_room(
    request: Request,
    config: EngineConfig,
    layout: KvLayout,
    *,
    context_window: int,
    num_blocks: int,
) -> None:
    """Check that a request could run in this engine if no other request did. Raises: InvalidRequest
    or RequestTooLong."""
    field = "num_samples" if request.beam is None else "beam.num_beams"
    rows = num_rows(request)
    if rows > config.max_num_running:
        raise InvalidRequest(
            field,
            f"{rows} are more than the {config.max_num_running} that run at once (max_num_running)",
        )
    if not is_whole(request, config):
        return  # its samples can run one after another, and each of them fits
    num_full = len(request.prompt_token_ids) // layout.block_size
    num_own = num_own_blocks(request, max_output_tokens(request, context_window), layout)
    num_needed = num_full + rows * num_own
    if num_needed > num_blocks:
        raise RequestTooLong(
            field,
            f"{rows} of them need {num_needed} blocks together, there are {num_blocks}",
        )


def is_whole(request: Request, config: EngineConfig) -> bool:
    """Return whether all blocks that the request may need are allocated before it starts, so that
    it is never preempted: so configured, or another process reads its blocks (`hold_after`), or
    it is a beam search, all of whose beams take part in each step."""
    is_bound = request.hold_after is not None or request.beam is not None
    return is_bound or config.preemption == "never"


def max_output_tokens(request: Request, context_window: int) -> int:
    """Return the number of output tokens after which the request ends by its length: max_tokens, or
    as many as the context window leaves."""
    return min(request.sampling.max_tokens, context_window - len(request.prompt_token_ids))


def num_own_blocks(request: Request, num_output_tokens: int, layout: KvLayout) -> int:
    """Return the number of blocks that one sample may need after the prompt's full ones. The last
    sampled token is never computed."""
    num_drawn = num_output_tokens
    if request.hold_after is not None:
        num_drawn = min(num_drawn, request.hold_after)
    num_prompt = len(request.prompt_token_ids)
    return layout.num_blocks_for(num_prompt + num_drawn - 1) - num_prompt // layout.block_size


def check_start(
    group: Group,
    num_loaded_tokens: int,
    outputs: Values[Values[int]],
    model: ModelInfo,
    block_size: int,
) -> tuple[tuple[int, ...], ...]:
    """Check the arguments of `start` against the reservation.

    Returns: the outputs, one for each sample, or none at all.
    Raises: InvalidRequest naming the argument.
    """
    drawn = tuple(tuple(token_ids) for token_ids in outputs)
    if any(drawn) and group.request.beam is not None:
        raise InvalidRequest("outputs", "a beam search goes on from beam_start")
    if not any(drawn):
        drawn = ()
    elif len(drawn) != group.num_rows or not all(drawn):
        raise InvalidRequest(
            "outputs", f"{group.num_rows} samples need as many outputs, or none, not {drawn}"
        )
    if any(not 0 <= token_id < model.vocab_size for one in drawn for token_id in one):
        raise InvalidRequest("outputs", f"an id outside [0, {model.vocab_size})")
    limit = group.max_output_tokens
    if group.request.hold_after is not None:
        limit = min(limit, group.request.hold_after)
    _check_not_over(group, drawn, limit, frozenset(model.eos_token_ids))
    num_tokens = group.prompt.num_prompt_tokens
    if group.num_rows == 1 and drawn:
        num_tokens += len(drawn[0])  # of several samples only the prompt's KV can be loaded
    num_tokens = min(num_tokens, len(group.prompt.block_ids) * block_size)
    if not 0 <= num_loaded_tokens <= num_tokens:
        raise InvalidRequest(
            "num_loaded_tokens", f"{num_loaded_tokens} is outside [0, {num_tokens}]"
        )
    if num_loaded_tokens and group.prompt.is_scored:
        raise InvalidRequest(
            "num_loaded_tokens", "prompt_logprobs need each token's logits; load nothing"
        )
    num_blocks_loaded = -(-num_loaded_tokens // block_size)
    if HOLE in group.prompt.block_ids[:num_blocks_loaded]:
        raise InvalidRequest(
            "num_loaded_tokens", f"{num_loaded_tokens} reaches into a block that was quarantined"
        )
    return drawn


def _check_not_over(
    group: Group, outputs: Values[tuple[int, ...]], limit: int, eos_token_ids: frozenset[int]
) -> None:
    """Check that at least one sample has tokens left to sample. The end of a single sample is not
    checked, because the caller knows it. Raises: InvalidRequest."""
    if outputs and min(map(len, outputs)) >= limit:
        num_tokens = min(map(len, outputs))
        raise InvalidRequest("outputs", f"{num_tokens} tokens, but {limit} are all there may be")
    if len(outputs) < 2:
        return
    hold_after = group.request.hold_after
    if hold_after is not None and max(map(len, outputs)) >= hold_after:
        raise InvalidRequest(
            "outputs", f"a sample has {max(map(len, outputs))} tokens; all hold after {hold_after}"
        )
    ended = [
        finish_reason(group.request.sampling, one[-1], len(one), limit, eos_token_ids)
        for one in outputs
    ]
    if None not in ended:
        raise InvalidRequest("outputs", "every sample has ended already")


def check_sampling(sampling: Sampling, vocab_size: int) -> None:
    """Check the sampling parameters. Raises: InvalidRequest naming the first field that is out of
    its range."""
    _check_ranges(sampling)
    _check_ids(sampling, vocab_size)


def _check_ranges(one: Sampling) -> None:
    # Each condition is written so that NaN fails it.
    least_penalty = 1 / MAX_REPETITION_PENALTY
    checks = (
        ("max_tokens", one.max_tokens, one.max_tokens >= 1, "at least 1"),
        (
            "temperature",
            one.temperature,
            one.temperature == 0 or MIN_TEMPERATURE <= one.temperature <= MAX_TEMPERATURE,
            f"0 (greedy), or from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}",
        ),
        ("top_p", one.top_p, 0 < one.top_p <= 1, "above 0, at most 1"),
        ("top_k", one.top_k, 0 <= one.top_k < 1 << 31, "from 0 (off), below 2^31"),
        ("min_p", one.min_p, 0 <= one.min_p <= 1, "from 0 (off) to 1"),
        (
            "min_tokens",
            one.min_tokens,
            0 <= one.min_tokens <= one.max_tokens,
            f"from 0 to max_tokens, which is {one.max_tokens}",
        ),
        ("seed", one.seed, 0 <= one.seed < 1 << 64, "an unsigned integer of 64 bits"),
        ("sample_index", one.sample_index, 0 <= one.sample_index < 1 << 31, "from 0, below 2^31"),
        (
            "logprobs",
            one.logprobs,
            0 <= (one.logprobs or 0) <= MAX_LOGPROBS,
            f"from 0 to {MAX_LOGPROBS}",
        ),
        (
            "repetition_penalty",
            one.repetition_penalty,
            least_penalty <= one.repetition_penalty <= MAX_REPETITION_PENALTY,
            f"from {least_penalty:g} to {MAX_REPETITION_PENALTY:g} (1 is off)",
        ),
        ("presence_penalty", one.presence_penalty, _is_shift(one.presence_penalty), _SHIFT),
        ("frequency_penalty", one.frequency_penalty, _is_shift(one.frequency_penalty), _SHIFT),
        (
            "no_repeat_ngram",
            one.no_repeat_ngram,
            0 <= one.no_repeat_ngram <= MAX_NGRAM_SIZE,
            f"from 0 (off) to {MAX_NGRAM_SIZE}",
        ),
    )
    for name, value, is_valid, wanted in checks:
        if not is_valid:
            raise InvalidRequest(name, f"{value} is out of range; it must be {wanted}")


def _is_shift(value: float) -> bool:
    return math.isfinite(value) and -MAX_SHIFT <= value <= MAX_SHIFT


def _check_ids(one: Sampling, vocab_size: int) -> None:
    """Check that token ids lie in the vocabulary, and that lists that were given are not empty.
    Raises: InvalidRequest."""
    _check_vocabulary("stop_token_ids", one.stop_token_ids, vocab_size)
    biased = [token_id for token_id, _ in one.logit_bias]
    _check_vocabulary("logit_bias", biased, vocab_size)
    if len(set(biased)) != len(biased):
        twice = next(token_id for token_id in biased if biased.count(token_id) > 1)
        raise InvalidRequest("logit_bias", f"token {twice} is named twice")
    for token_id, value in one.logit_bias:
        if not _is_shift(value):
            raise InvalidRequest(
                "logit_bias", f"{value} of token {token_id} is out of range; it must be {_SHIFT}"
            )
    for word in one.bad_words:
        if not word:
            raise InvalidRequest("bad_words", "one of them has no token")
        _check_vocabulary("bad_words", word, vocab_size)
    if sum(map(len, one.bad_words)) > MAX_BAD_WORD_TOKENS:
        raise InvalidRequest("bad_words", f"more than {MAX_BAD_WORD_TOKENS} tokens in all")
    if one.allowed_token_ids is not None:
        if not one.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids", "empty: no token could be drawn")
        _check_vocabulary("allowed_token_ids", one.allowed_token_ids, vocab_size)


def _check_vocabulary(field: str, token_ids: Collection[int], vocab_size: int) -> None:
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return  # there may be as many as the vocabulary has, on the engine's thread
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(field, f"token {token_id} is outside [0, {vocab_size})")


class CacheRootGuard:
    """Remembers the adapter of each cache root.

    A second line of defence: the creator of chain hashes keys their root with the adapter's digest;
    a root that is used with two adapters would let requests of one read the KV of the other.
    Bounded: the least recently used roots are forgotten. Engine thread only.
    """

    def __init__(self, max_num_roots: int = MAX_NUM_ROOTS) -> None:
        self._max_num_roots = max_num_roots
        self._digest_of: OrderedDict[bytes, str] = OrderedDict()

    def check(self, cache_root: bytes, digest: str) -> None:
        """Record that blocks under `cache_root` are KV of the adapter with this digest (empty: of
        the model without an adapter). Raises: InvalidRequest if they are another adapter's."""
        known = self._digest_of.setdefault(cache_root, digest)
        if known != digest:
            raise InvalidRequest(
                "cache_root",
                f"was used with {known[:12] or 'no adapter'} and now with "
                f"{digest[:12] or 'no adapter'}; key it with the adapter's digest",
            )
        self._digest_of.move_to_end(cache_root)
        if len(self._digest_of) > self._max_num_roots:
            self._digest_of.popitem(last=False)

    def __len__(self) -> int:
        return len(self._digest_of)

    def check_integrity(self) -> None:
        """Check the number of cache roots. Raises: IntegrityError if it exceeds the limit."""
        if len(self._digest_of) > self._max_num_roots:
            raise IntegrityError(f"{len(self._digest_of)} cache roots are known")
