"""What this router's requests are doing and what became of the last ones: for the status, the live
page and `baton top`.

Knows of each request who asked for it, where it is, where its time and its KV went; never a word of
what it says. Life of a record: followed (live) -> ended, then kept among the last `num_kept`.

Law: the live records are those of the requests in flight whose turn has come; `totals` is the sum
over all that ended. One asyncio loop.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from protos import common_pb2, inference_pb2
from services.router.admission import Entry
from services.router.metrics import prompt_sources
from services.router.policy import Choice
from services.router.times import Lap

NUM_KEPT = 256
MAX_SPANS = 64
"""Of one record: a request that waits long for room has two for each try."""
MANY = "many tries"


class Flow(Protocol):
    """What a record looks at while the request lives; a RequestFlow fits it."""

    @property
    def state(self) -> Enum:
        """Its value says what the request is doing, in words."""

    @property
    def choice(self) -> Choice | None:
        """The workers chosen last; None: none yet."""


class Times(Protocol):
    """Where the time went so far; StageTimes fits it."""

    @property
    def begin_s(self) -> float: ...
    @property
    def elapsed_s(self) -> float: ...
    def laps(self) -> Sequence[Lap]: ...


@dataclass
class Totals:
    """Sums over all requests since start."""

    num_finished: int = 0
    num_failed: int = 0
    num_output_tokens: int = 0
    num_first_tokens: int = 0
    first_token_s: float = 0.0
    sources: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("computed", "local", "store"), 0)
    )


class RequestRecord:
    """One request; `flow` is set once there is one, and dropped with `times` at the end."""

    def __init__(
        self, request_id: str, tenant: str, model: str, times: Times, arrived_unix_ms: int
    ) -> None:
        self.request_id = request_id
        self.tenant = tenant
        self.model = model
        self.entry = Entry()
        """Its way through the admission."""
        self.flow: Flow | None = None
        self.doing = "waiting to be admitted"
        """What is done with it while there is no flow yet."""
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.first_token_s = 0.0
        self.outcome = ""
        self.code = ""
        self._times: Times | None = times
        self._ended: inference_pb2.RequestInfo | None = None
        self._provenance: common_pb2.Provenance | None = None
        self._arrived_unix_ms = arrived_unix_ms

    def is_of(self, request_id: str, tenant: str) -> bool:
        """Whether it has this id and tenant; empty: any."""
        return request_id in ("", self.request_id) and tenant in ("", self.tenant)

    def on_message(self, message: inference_pb2.GenerateResponse) -> None:
        """A message went out."""
        self.num_output_tokens += len(message.token_ids)
        if message.token_ids and not self.first_token_s and self._times is not None:
            self.first_token_s = self._times.elapsed_s
        if message.HasField("provenance"):
            self._provenance = message.provenance

    def end(self) -> None:
        """Freeze what is to be told, and let everything else go."""
        self._ended = self.to_proto()
        self._times = self.flow = None

    def to_proto(self) -> inference_pb2.RequestInfo:
        """As it stands now."""
        if self._ended is not None:
            return self._ended
        told = inference_pb2.RequestInfo(
            request_id=self.request_id,
            tenant=self.tenant,
            model=self.model,
            arrived_unix_ms=self._arrived_unix_ms,
            outcome=self.outcome,
            code=self.code,
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            first_token_s=self.first_token_s,
            provenance=self._provenance,
        )
        if not self.outcome:
            told.state = self.flow.state.value if self.flow is not None else self.doing
        choice = self.flow.choice if self.flow is not None else None
        if choice is not None:
            told.prefill_id, told.decode_id = choice.prefill_id or "", choice.decode_id or ""
        if self._times is not None:
            told.elapsed_s = self._times.elapsed_s
            told.spans.extend(_spans(self._times, told.state))
        return told

    @property
    def provenance(self) -> common_pb2.Provenance | None:
        """Its account, once it went out."""
        return self._provenance


class RequestLog:
    """See the module."""

    def __init__(
        self, *, num_kept: int = NUM_KEPT, wall_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self._wall_ns = wall_ns
        self._live: dict[RequestRecord, None] = {}
        self._ended: deque[RequestRecord] = deque(maxlen=num_kept)
        self.totals = Totals()

    @property
    def num_live(self) -> int:
        """Requests that are being served."""
        return len(self._live)

    @contextmanager
    def follow(
        self, request_id: str, tenant: str, model: str, times: Times
    ) -> Iterator[RequestRecord]:
        """A record of one request while the body serves it. The body sets its outcome."""
        record = RequestRecord(request_id, tenant, model, times, self._wall_ns() // 1_000_000)
        self._live[record] = None
        try:
            yield record
        finally:
            del self._live[record]
            record.end()
            self._count(record)
            self._ended.append(record)

    def newest(self, num: int) -> list[inference_pb2.RequestInfo]:
        """At most `num`: those under way, newest first, then those that ended last."""
        return [record.to_proto() for record in itertools.islice(self._newest(), num)]

    def find(self, request_id: str, tenant: str = "") -> RequestRecord | None:
        """The newest request of this id and tenant (empty: of any); None: it is not known (any
        more)."""
        return next((one for one in self._newest() if one.is_of(request_id, tenant)), None)

    def ids_with(self, prefix: str, tenant: str = "") -> set[str]:
        """The ids that begin so, of requests of this tenant (empty: of any)."""
        return {
            one.request_id
            for one in self._newest()
            if tenant in ("", one.tenant) and one.request_id.startswith(prefix)
        }

    def _newest(self) -> Iterator[RequestRecord]:
        return itertools.chain(reversed(self._live), reversed(self._ended))

    def _count(self, record: RequestRecord) -> None:
        totals = self.totals
        totals.num_finished += record.outcome == "finished"
        totals.num_failed += record.outcome == "failed"
        totals.num_output_tokens += record.num_output_tokens
        totals.num_first_tokens += record.first_token_s > 0
        totals.first_token_s += record.first_token_s
        if record.provenance is not None:
            for source, num_tokens in prompt_sources(record.provenance).items():
                totals.sources[source] += num_tokens


def _spans(times: Times, state: str) -> Iterator[inference_pb2.StageSpan]:
    """The stages end to end, and what goes on since the last of them. Pieces of one stage that
    follow one another are one; of too many the middle is one piece, which says so.
    """
    merged: list[tuple[str, float, float]] = []
    for lap in times.laps():
        begin_s, end_s = lap.begin_s - times.begin_s, lap.end_s - times.begin_s
        if merged and merged[-1][0] == lap.stage:
            begin_s = merged.pop()[1]
        merged.append((lap.stage, begin_s, end_s))
    if len(merged) > MAX_SPANS:
        half = MAX_SPANS // 2
        gap = (MANY, merged[half][1], merged[-half][1])
        merged = [*merged[:half], gap, *merged[-half:]]
    if state:
        merged.append((state, merged[-1][2] if merged else 0.0, times.elapsed_s))
    for stage, begin_s, end_s in merged:
        yield inference_pb2.StageSpan(stage=stage, begin_s=begin_s, end_s=end_s)
