"""What this router's requests were, model by model: counts since start, and how many are where now.

For whoever plans capacity: every request that passed the first checks is counted once as arrived
and once by its end, and lies in exactly one place in between. Knows no worker, no tenant and no
request by name; writes nowhere (`beats` does).

Law: arrived = finished + refused + failed + cancelled + rejected + those that are somewhere now.
One asyncio loop.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum

from process.errors import (
    AlreadyExists,
    Cancelled,
    Internal,
    InvalidArgument,
    NoCapacity,
    Unavailable,
)
from protos import common_pb2, inference_pb2, router_status_pb2
from services.router.metrics import REQUEST_BOUNDS_S, TOKEN_BOUNDS_S, prompt_sources
from services.router.rate_limit import OverRate


class Place(Enum):
    """Where a request is."""

    HELD = "held because there is no worker"
    QUEUED = "waiting to be admitted"
    RUNNING = "admitted"


class End(Enum):
    """How it ended."""

    FINISHED = "finished"
    REFUSED = "refused"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REJECTED = "rejected"
    """By its own fault, or its tenant's: more workers would not serve it."""


class Durations:
    """Seconds in buckets."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds_s = tuple(bounds_s)
        self._counts = [0] * (len(bounds_s) + 1)
        self._total_s = 0.0

    def observe(self, seconds: float) -> None:
        """One more."""
        self._counts[bisect_left(self._bounds_s, seconds)] += 1
        self._total_s += seconds

    def to_proto(self) -> router_status_pb2.Durations:
        """All so far."""
        return router_status_pb2.Durations(
            bounds_s=self._bounds_s, counts=self._counts, total_s=self._total_s
        )


class ModelCounts:
    """Of one model."""

    def __init__(self) -> None:
        self.num_arrived = 0
        self.ended: Counter[End] = Counter()
        self.places: Counter[Place] = Counter()
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.prefill_s = 0.0
        self.decode_s = 0.0
        self.first_token = Durations(REQUEST_BOUNDS_S)
        self.per_token = Durations(TOKEN_BOUNDS_S)
        self.queue = Durations(REQUEST_BOUNDS_S)

    def to_proto(self, model: str) -> router_status_pb2.ModelTraffic:
        """As it stands now."""
        return router_status_pb2.ModelTraffic(
            model=model,
            num_arrived=self.num_arrived,
            num_finished=self.ended[End.FINISHED],
            num_refused=self.ended[End.REFUSED],
            num_failed=self.ended[End.FAILED],
            num_cancelled=self.ended[End.CANCELLED],
            num_rejected=self.ended[End.REJECTED],
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_output_tokens=self.num_output_tokens,
            first_token=self.first_token.to_proto(),
            per_token=self.per_token.to_proto(),
            queue=self.queue.to_proto(),
            prefill_s=self.prefill_s,
            decode_s=self.decode_s,
            num_held=self.places[Place.HELD],
            num_queued=self.places[Place.QUEUED],
            num_running=self.places[Place.RUNNING],
        )


class RequestTraffic:
    """One request's share in its model's counts."""

    def __init__(self, counts: ModelCounts) -> None:
        self._counts = counts
        self._place = Place.QUEUED
        self._num_output_tokens = 0
        self._provenance: common_pb2.Provenance | None = None
        counts.places[self._place] += 1

    def move(self, place: Place) -> None:
        """It is there now."""
        self._counts.places[self._place] -= 1
        self._place = place
        self._counts.places[place] += 1

    def on_first_token(self, seconds: float) -> None:
        """Seconds since it arrived."""
        self._counts.first_token.observe(seconds)

    def on_sample_end(self, per_token_s: float | None) -> None:
        """One of its samples ended; None: with its first token."""
        if per_token_s is not None:
            self._counts.per_token.observe(per_token_s)

    def on_message(self, message: inference_pb2.GenerateResponse) -> None:
        """A message went out."""
        self._num_output_tokens += len(message.token_ids)
        if message.HasField("provenance"):
            self._provenance = message.provenance

    def on_stages(self, stages: Iterable[tuple[str, float]]) -> None:
        """Where its time went, at its end."""
        queue_s = 0.0
        for stage, seconds in stages:
            if stage in _QUEUES:
                queue_s += seconds
            if stage.startswith("prefill_"):
                self._counts.prefill_s += seconds
            elif stage in _DECODES:
                self._counts.decode_s += seconds
        self._counts.queue.observe(queue_s)

    def leave(self, end: End) -> None:
        """It is over."""
        counts, account = self._counts, self._provenance
        counts.places[self._place] -= 1
        counts.ended[end] += 1
        if end is End.FINISHED and account is not None:
            sources = prompt_sources(account)
            counts.num_prompt_tokens += account.num_prompt_tokens
            counts.num_cached_tokens += sources.get("local", 0) + sources.get("store", 0)
            counts.num_output_tokens += self._num_output_tokens


_QUEUES = frozenset({"hold", "queue", "wait_room", "prefill_queue"})
_DECODES = frozenset({"decode_fetch", "decode_queue", "decode", "stream"})


class Traffic:
    """Of all models that this router serves."""

    def __init__(self, models: Iterable[str]) -> None:
        self._models = {model: ModelCounts() for model in models}

    @contextmanager
    def follow(self, model: str) -> Iterator[RequestTraffic]:
        """Count one request for that model while the body serves it."""
        counts = self._models[model]
        counts.num_arrived += 1
        request = RequestTraffic(counts)
        end = End.FINISHED
        try:
            yield request
        except BaseException as error:
            end = _end_of(error)
            raise
        finally:
            request.leave(end)

    def to_proto(self) -> list[router_status_pb2.ModelTraffic]:
        """Everything, now."""
        return [counts.to_proto(model) for model, counts in self._models.items()]

    def check_integrity(self, *, is_idle: bool = False) -> None:
        """Raises: Internal naming the model whose requests do not add up."""
        for model, counts in self._models.items():
            num_here = counts.places.total()
            if counts.num_arrived != counts.ended.total() + num_here:
                raise Internal(f"{model}: {counts.num_arrived} requests arrived, not all are known")
            if min(counts.places.values(), default=0) < 0:
                raise Internal(f"{model}: more requests left a place than came there")
            if is_idle and num_here:
                raise Internal(f"idle, but {num_here} requests for {model} are counted as here")


def _end_of(error: BaseException) -> End:
    if isinstance(error, OverRate | InvalidArgument | AlreadyExists):
        return End.REJECTED
    if isinstance(error, NoCapacity | Unavailable):
        return End.REFUSED
    if isinstance(error, asyncio.CancelledError | Cancelled | GeneratorExit):
        return End.CANCELLED
    return End.FAILED
