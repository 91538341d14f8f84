"""EngineCore: one engine and the requests it serves, the same code behind a client in this process
and inside a child. It owns no thread, no socket and no text.

States of a request here, and what `cancel` does in each:

1. QUEUED   not in the engine: highest priority first, then in order of `submit`   forgotten
2. LIVE     in the engine, in any of its states                                    aborted there
3. over     its last news is out; its id may be used again                         nothing

An exception of the engine fails all live requests with it, and no further request is accepted. One
thread, the engine's.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from engine.engine import LLMEngine
from engine.errors import AdapterInUse, IntegrityError
from engine.input_processor import check_request, check_room
from engine.lora.manager import AdapterInfo
from engine.metrics import EngineStats, MetricsSnapshot
from engine.outputs import RequestOutput
from engine.request import ModelInfo, Request
from engine_client.encoded_errors import Failure
from engine_client.interface import Ask, LoadedAdapter, News
from engine_client.messages import check_types
from kvstore import block_hash
from process.rpc_errors import (
    AlreadyExists,
    BatonError,
    Cancelled,
    Internal,
    InvalidArgument,
    NoCapacity,
    Unavailable,
)

logger = logging.getLogger(__name__)

NUM_AHEAD = 4
"""Requests in the engine at once, as a multiple of what one step runs. Enough for the scheduler to
choose from, few enough that its work per step does not grow with the length of the queue.
Guessed."""

_MAX_CANCELLED = 64
"""Cancelled entries that the queue may always keep, so that it is not rebuilt for a few."""


@dataclass
class _Live:
    open_samples: set[int]
    """Indices of the samples that have not ended."""
    num_cached_tokens: int | None = None
    """Number of prompt tokens found in the cache; None before the first event."""


@dataclass(frozen=True)
class _Queued:
    number: int
    """Number of the request's entry in the queue; entries with another number were cancelled."""
    adapter_digest: str
    """Digest that the adapter's name stood for when the request was submitted."""


class EngineCore:
    """Queue in front of one engine: submits requests to it, runs its steps and turns its events
    into news."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._max_num_live = NUM_AHEAD * engine.config.max_num_running
        self._queue: list[tuple[int, int, Ask]] = []
        self._queued: dict[str, _Queued] = {}
        self._live: dict[str, _Live] = {}
        self._news: list[News] = []
        self._num_submitted = 0
        self.failure: Internal | None = None
        """Why this engine serves no more; None while it does."""

    @property
    def num_live(self) -> int:
        """Return the number of requests that are not over."""
        return len(self._queued) + len(self._live)

    @property
    def model(self) -> ModelInfo:
        """Describe the model that the engine has loaded."""
        return self._engine.model_info

    def check(self, asks: Sequence[Ask]) -> None:
        """Check requests without submitting them. Raises: InvalidArgument with the field
        `asks[<i>].<field>` for the first invalid one."""
        for index, ask in enumerate(asks):
            try:
                self._check(ask)
            except InvalidArgument as error:
                raise Failure.of(error).to_error(at=f"asks[{index}].") from error

    def submit(self, ask: Ask) -> None:
        """Submit a request; an invalid one is reported as its only news.

        Raises: AlreadyExists, Unavailable when the engine has failed.
        """
        if self.failure is not None:
            raise Unavailable(str(self.failure))
        if ask.request_id in self._queued or ask.request_id in self._live:
            raise AlreadyExists(f"ask {ask.request_id} is live already")
        try:
            self._check(ask)
        except InvalidArgument as error:
            self._fail(ask.request_id, error)
            return
        self._num_submitted += 1
        self._queued[ask.request_id] = _Queued(self._num_submitted, self._adapter_digest(ask))
        heapq.heappush(self._queue, (-ask.priority, self._num_submitted, ask))

    def cancel(self, request_id: str) -> None:
        """Cancel a request in any state; one that is over is ignored."""
        if self._queued.pop(request_id, None) is not None:
            self._forget_cancelled()
        else:
            if self._live.pop(request_id, None) is None:
                return
            self._engine.abort(request_id)
        self._fail(request_id, Cancelled(f"ask {request_id} was cancelled"))

    def end_sample(self, request_id: str, sample_index: int) -> None:
        """End one sample of a live request; a sample that has ended is ignored. No news follow,
        except when it was the last sample: then news say that the request is over."""
        live = self._live.get(request_id)
        if live is None or sample_index not in live.open_samples:
            return
        self._engine.finish_sample(request_id, sample_index)
        live.open_samples.discard(sample_index)
        if not live.open_samples:
            del self._live[request_id]
            num_cached = live.num_cached_tokens or 0
            self._news.append(
                News(request_id, sample_index, num_cached_tokens=num_cached, is_over=True)
            )

    def has_work(self) -> bool:
        """Return whether `step` has anything to do. `step` waits a little itself where all live
        requests wait, for a grammar for example."""
        return bool(self._news or self._queued or self._live)

    def step(self) -> tuple[News, ...]:
        """Admit queued requests, run one engine step, and return the news."""
        if self.failure is None:
            try:
                self._admit()
                if self._engine.has_work():
                    for event in self._engine.step().events:
                        self._take(event)
            except Exception as error:  # the last line of defence
                self._fail_all(error)
        news, self._news = tuple(self._news), []
        return news

    def load_adapter(self, name: str, folder: str) -> LoadedAdapter:
        """Load a LoRA adapter from `folder` into the engine. Raises: the errors of
        `engine.engine.LLMEngine.load_adapter`."""
        return _loaded(self._engine.load_adapter(name, Path(folder)))

    def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter; queued requests count as its users, too. Raises: the errors of
        `engine.engine.LLMEngine.unload_adapter`."""
        num_queued = sum(
            ask.adapter == name for _, number, ask in self._queue if self._is_queued(ask, number)
        )
        if num_queued:
            raise AdapterInUse(
                f"adapter {name!r} is wanted by {num_queued} asks that wait; unload it when they "
                "have ended or were cancelled"
            )
        self._engine.unload_adapter(name)

    def adapters(self) -> tuple[LoadedAdapter, ...]:
        """Return the adapters that the engine has loaded."""
        return tuple(_loaded(info) for info in self._engine.adapters())

    def metrics(self) -> MetricsSnapshot:
        """Return the engine's throughput and latency histograms."""
        return self._engine.metrics()

    def stats(self) -> EngineStats:
        """Return the engine's gauges and counters."""
        return self._engine.stats()

    def check_integrity(self) -> None:
        """Check the engine's invariants, and that the requests live here and in the engine are the
        same.

        Raises: IntegrityError.
        """
        self._engine.check_integrity()
        stats = self._engine.stats()
        num_engine = stats.num_reserved + stats.num_waiting + stats.num_running + stats.num_holding
        if num_engine != len(self._live):
            raise IntegrityError(f"{num_engine} asks in the engine, {len(self._live)} live here")
        for name, live in self._live.items():
            if not live.open_samples:
                raise IntegrityError(f"ask {name} is live and has no open sample")
        num_queued = sum(self._is_queued(ask, number) for _, number, ask in self._queue)
        if num_queued != len(self._queued):
            raise IntegrityError(f"{num_queued} asks in the queue, {len(self._queued)} queued")

    def check_when_idle(self) -> None:
        """Check the invariants during idleness; a violation fails the engine."""
        try:
            self.check_integrity()
        except Exception as error:  # the last line of defence
            self._fail_all(error)

    def check_alive(self) -> None:
        """Check that the engine can still compute; cheap enough for idle times."""
        try:
            self._engine.check_alive()
        except Exception as error:  # the last line of defence
            self._fail_all(error)

    def close(self) -> None:
        """Stop the engine's threads and processes. No method may be called afterwards."""
        self._engine.close()

    # -- in

    def _check(self, ask: Ask) -> None:
        check_types(ask)
        request, model = self._request(ask), self.model
        check_request(request, model)
        check_room(
            request,
            self._engine.config,
            self._engine.kv.layout,
            context_window=model.context_window,
            num_blocks=model.num_blocks,
        )

    def _request(self, ask: Ask) -> Request:
        """Convert an Ask to the engine's Request. Raises: InvalidArgument for an adapter that is
        not loaded."""
        root = block_hash.root_key(ask.salt, self.model.fingerprint, self._adapter_digest(ask))
        return Request(
            request_id=ask.request_id,
            prompt_token_ids=ask.prompt_token_ids,
            sampling=ask.sampling,
            block_hasher=partial(block_hash.extend, root),
            cache_root=root,
            priority=ask.priority,
            num_samples=ask.num_samples,
            beam=ask.beam,
            adapter=ask.adapter,
            prompt_logprobs=ask.prompt_logprobs,
        )

    def _adapter_digest(self, ask: Ask) -> str:
        """Return the digest of the request's adapter; empty for none. Raises: InvalidArgument for
        one that is not loaded."""
        if not ask.adapter:
            return ""
        digests = {info.name: info.digest for info in self._engine.adapters()}
        if ask.adapter not in digests:
            raise InvalidArgument("adapter", f"{ask.adapter!r} is not loaded")
        return digests[ask.adapter]

    def _is_queued(self, ask: Ask, number: int) -> bool:
        """Return whether this queue entry is current, not cancelled."""
        queued = self._queued.get(ask.request_id)
        return queued is not None and queued.number == number

    def _forget_cancelled(self) -> None:
        """Remove the entries of cancelled requests where they are most of the queue."""
        if len(self._queue) > 2 * len(self._queued) + _MAX_CANCELLED:
            self._queue = [entry for entry in self._queue if self._is_queued(entry[2], entry[1])]
            heapq.heapify(self._queue)

    def _admit(self) -> None:
        """Move requests from the head of the queue to the engine, up to NUM_AHEAD times one step's
        requests."""
        while self._queue and len(self._live) < self._max_num_live:
            _, number, ask = heapq.heappop(self._queue)
            if not self._is_queued(ask, number):
                continue  # cancelled meanwhile
            try:
                self._let_in(ask)
            except NoCapacity as error:
                if self._live:
                    # Such as too many grammars to compile: there will be room.
                    heapq.heappush(self._queue, (-ask.priority, number, ask))
                    return
                self._fail(ask.request_id, error)
            except BatonError as error:
                self._fail(ask.request_id, error)
            else:
                self._live[ask.request_id] = _Live(set(range(ask.num_samples)))
            # Only now: where something else is raised, it is told to all that are queued.
            del self._queued[ask.request_id]

    def _let_in(self, ask: Ask) -> None:
        """Pass a queued request to the engine. Raises: the engine's errors; InvalidArgument where
        the adapter was unloaded or loaded again with other content."""
        request = self._request(ask)
        if self._adapter_digest(ask) != self._queued[ask.request_id].adapter_digest:
            raise InvalidArgument(
                "adapter", f"{ask.adapter!r} was loaded again with other content meanwhile"
            )
        self._engine.submit(request)

    # -- out

    def _take(self, event: RequestOutput) -> None:
        live = self._live.get(event.request_id)
        if live is None:
            return  # its last sample was ended in this very step
        if event.error is not None:
            del self._live[event.request_id]
            self._fail(event.request_id, event.error)
            return
        if live.num_cached_tokens is None:
            # Full blocks before the first that it filled itself; all, where it has filled none.
            size = self.model.block_size
            num_full = event.num_computed_tokens // size
            live.num_cached_tokens = size * min((b.index for b in event.filled), default=num_full)
        is_chunk = not event.token_ids and event.finish_reason is None
        if is_chunk and not event.prompt_logprobs:
            return
        if event.finish_reason is not None:
            live.open_samples.discard(event.sample_index)
        is_over = event.is_request_over or not live.open_samples
        if is_over:
            del self._live[event.request_id]
        self._news.append(
            News(
                request_id=event.request_id,
                sample_index=event.sample_index,
                token_ids=event.token_ids,
                logprobs=event.logprobs,
                traces=event.traces,
                finish_reason=event.finish_reason,
                stop_token_id=event.stop_token_id,
                num_cached_tokens=live.num_cached_tokens,
                score=event.score,
                is_over=is_over,
                prompt_logprobs=event.prompt_logprobs or (),
            )
        )

    def _fail(self, request_id: str, error: Exception) -> None:
        self._news.append(News(request_id, is_over=True, failure=Failure.of(error)))

    def _fail_all(self, error: Exception) -> None:
        logger.error("engine_failed", exc_info=error)
        message = f"{type(error).__name__}: {error}"
        try:
            self._engine.check_integrity()
        except Exception as broken:  # said together with the first
            message += f"; and {broken}"
        self.failure = Internal(f"the engine failed: {message}")
        for request_id in [*self._live, *self._queued]:
            self._fail(request_id, self.failure)
        self._live.clear()
        self._queued.clear()
        self._queue.clear()


def _loaded(info: AdapterInfo) -> LoadedAdapter:
    return LoadedAdapter(info.name, info.digest, info.rank, info.num_bytes, info.targets)
