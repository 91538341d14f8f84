"""RequestLifecycle: the state machine that serves one request at the router, from the prefix lookup
over prefill and decode to the last message, across workers that leave or fail.

    LOOKING_UP  ask the prefix index which stores hold a prefix of the prompt
    RESERVING  choose a pair of workers; the decode worker sets KV blocks aside (not for an answer
               of a single token)
    LACKING_PREFILL, LACKING_DECODE  no worker of that role is there now; the request waits for one
    LACKING_PLACE  the decode worker holds blocks, and queues the request for places in its batch
    PREFILLING  the prefill worker computes the prompt, draws the first token of each sample (shown
                at once) and stores the KV; the decode worker fetches meanwhile what is stored
                already. Skipped where the decode worker computes a short rest itself
    DECODING  the decode worker takes the KV over and draws the rest of every sample
    MOVING  the decode worker is gone before the end: as from LOOKING_UP on, with all drawn tokens
            as context. A worker that left on purpose may have given a KV handle: then another
            decode worker takes the KV over at once, unless it would have to compute much of it
            itself
    FINISHED  the last message was sent

Cancel, deadline and errors lead out of every state. `run` then tells both workers without waiting
for them: it cancels the prefill call, sends the decode worker a cancel, and gives back a handle
that was not used.

The parts, each for one request:

`Reserving` finds the workers. It chooses, has the decode worker set blocks aside, and chooses again
while decode workers refuse. A worker that refused is left out of the next choice; when all have
refused, they are asked again as room comes, for a bounded time, unless every refusal was a failed
precondition, which time does not cure. While a worker is expected to come, the wait lasts as long
as the request's budget. A request that has lost its decode worker waits longer for room, because
its client may have seen a part of the answer.
Invariant: `leg` is the reservation that stands, which its owner must end; a reservation that
failed, or whose wait was cancelled, has been cancelled at its worker.

`PrefillLeg` has the prompt computed: by one prefill worker, and by others (MAX_TRIES in all) if
that fails before all first tokens were shown. After that a failed prefill worker is not replaced:
the decode worker computes what was not handed over. Partial handles are passed to the decode worker
as they come and never kept; the leases that the final handle names belong to the caller.

`Decoding` shows what one decode worker draws, until the answer is over or the worker moves the
stream, fails or gives the request up. It raises only errors after which no other worker could go
on; every other end is a `Loss`.

`FailoverBudget` counts the decode workers that left or failed. A worker that leaves on purpose
costs nothing from the budget and is not asked again in the same incarnation. A worker that fails
may be the only one and come back, so it may be asked again; but the request itself may be the
cause, so only a few such failures are allowed.

`AnswerDelivery` sends the messages. Each sample ends with its own message; the sample that ends
last carries the request's account.

One asyncio task for each request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

from process import logs, trace_spans
from process.deadline import Deadline
from process.rpc_errors import (
    BatonError,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    NoCapacity,
    Unavailable,
)
from process.trace_spans import SpanKind
from protos import common_pb2, decode_pb2, inference_pb2, prefill_pb2
from services.router import request_stats, tracing
from services.router.output import AnswerOutput, SampleOutput, shows_something
from services.router.placement import DECODE_LEFT, FIRST, REFUSED, RoutingQuery
from services.router.policies import (
    DECODE,
    PREFILL,
    Choice,
    PlacementQuery,
    TransferPath,
    blocks_needed,
)
from services.router.prefixes import Layout, to_hints
from services.router.request import RouterRequest, RoutingServices
from services.router.request_stats import LOST, MOVED, Details, KvAccount, StageTimes
from services.router.sealed_handle import Extent, PrefillNews, SealedHandle
from services.router.worker_client import CallUpdate, DecodeCall, SampleNews
from services.router.worker_views import WorkerView

STAGE = "move"
"""Name of the stage in `StageTimes` that covers finding another worker and handing over to it."""

OTHERS_MAY = (Unavailable, NoCapacity, FailedPrecondition)
"""Errors of a worker that another worker need not share; FailedPrecondition among them, because a
worker may lack the model weights or the adapter that the router believed it has."""

LAPSED = "lapsed"
SHORT = "short"

HANDOVER_S = 1.0
"""Seconds that the leases of a handle must have left when it is sent, to outlive the fetch.
Guessed."""


@dataclass(frozen=True)
class Loss:
    """The end of a decode worker's part before the answer was over."""

    worker_id: str
    incarnation: str
    error: BatonError | None
    """What the worker failed with; None: it moved the stream."""

    @property
    def is_on_purpose(self) -> bool:
        """Whether the worker is leaving, not broken: it moved the stream, or refused with "retry at
        once"."""
        return self.error is None or self.error.retry_after_s == 0.0

    @property
    def ended_by(self) -> str:
        """The reason as `KvAccount` records it: `MOVED` or `LOST`."""
        return MOVED if self.is_on_purpose else LOST

    @property
    def why(self) -> str:
        """The reason of the loss, for logs and errors."""
        return str(self.error or f"decode worker {self.worker_id} left")


def handle_unusable_reason(
    extent: Extent, num_context_tokens: int, max_own_tokens: int, now_unix_s: float
) -> str:
    """Return why a decode worker should not go on from a handle of this `extent`: `LAPSED`, or
    `SHORT` when it would have to compute too much of the context itself. Empty when the handle is
    usable.

    Args:
        num_context_tokens: prompt and drawn tokens; the last of them is always computed.
        max_own_tokens: tokens that a decode worker may compute itself for a new request; the rest
            of a block is always allowed.
        now_unix_s: the present, in seconds since the Unix epoch.
    """
    if extent.deadline_unix_ms and extent.deadline_unix_ms / 1000 < now_unix_s + HANDOVER_S:
        return LAPSED
    if num_context_tokens - extent.num_tokens > max(extent.block_size, max_own_tokens, 1):
        return SHORT
    return ""


class FailoverBudget:
    """Count of the decode workers that one request has lost, and limit on those that may fail."""

    def __init__(self, times: StageTimes, max_lost: int) -> None:
        """max_lost: decode workers that may fail while they serve the request before it fails
        itself."""
        self.num_moved = 0
        self.num_lost = 0
        self.left: frozenset[str] = frozenset()
        """Incarnations of workers that left on purpose; they are not asked again."""
        self._max_lost = max_lost
        self._times = times
        self.last: Loss | None = None

    @property
    def is_on(self) -> bool:
        """Whether the request has lost a decode worker before."""
        return bool(self.num_moved or self.num_lost)

    @property
    def mark(self) -> Callable[[str, Details | None], None]:
        """Function that ends a stage of the request's time; between two workers it books all time
        as `STAGE`, whatever stage it is given."""
        return self._mark_move if self.is_on else self._times.mark

    def stage(self, name: str) -> str:
        """Return the name under which time of stage `name` is booked: `STAGE` between two
        workers."""
        return STAGE if self.is_on else name

    def note(self, loss: Loss) -> None:
        """Count a loss. Raises: Unavailable when too many workers failed."""
        self.last = loss
        if loss.error is None or loss.is_on_purpose:
            self.num_moved += 1
            self.left |= {loss.incarnation}
            return
        if self.num_lost == self._max_lost:
            raise Unavailable(
                f"{loss.error} (the last of {self.num_lost + 1} decode workers that failed "
                "this request)",
                retry_after_s=loss.error.retry_after_s,
            ) from loss.error
        self.num_lost += 1

    def explained(self, error: BatonError) -> BatonError:
        """Return `error`, which says why no other worker was found, together with the loss that
        made one necessary. A FailedPrecondition keeps its type, because a retry would not help."""
        why = self.last.why if self.last is not None else "nothing was lost"
        told = f"{why}, and no other worker took over: {error}"
        if isinstance(error, FailedPrecondition):
            return FailedPrecondition(told)
        return Unavailable(told, retry_after_s=error.retry_after_s or 1.0)

    def _mark_move(self, stage: str, details: Details | None = None) -> None:
        self._times.mark(STAGE, details)


Send = Callable[[inference_pb2.GenerateResponse], Awaitable[None]]


class AnswerDelivery:
    """Sender of one request's messages, which fills in usage and the request's account."""

    def __init__(
        self,
        send: Send,
        job: RouterRequest,
        samples: AnswerOutput,
        account: KvAccount,
        times: StageTimes,
    ) -> None:
        self._send = send
        self._job = job
        self._samples = samples
        self._account = account
        self._times = times
        self.embedding: Sequence[float] = ()
        """Embedding of the prompt; empty until a worker gave it."""

    async def show(self, message: inference_pb2.GenerateResponse) -> None:
        """Send `message`, with the usage of the prompt as known so far; an empty message is not
        sent."""
        if shows_something(message):
            message.usage.num_prompt_tokens = len(self._job.prompt_token_ids)
            message.usage.num_cached_tokens = self._account.num_cached_tokens
            await self._send(message)

    async def end(self, answer: SampleOutput, message: inference_pb2.GenerateResponse) -> None:
        """Send the last message of a sample while another sample goes on."""
        await self._send(self._ended(answer, message))

    async def end_last(
        self,
        answer: SampleOutput,
        message: inference_pb2.GenerateResponse,
        *,
        model: str,
        fingerprint: str,
    ) -> None:
        """Send the last message of the request, with its provenance, stage times and embedding.

        Raises: Internal when an embedding was asked for and no worker gave one.
        """
        self._times.mark("stream")
        last, job = self._ended(answer, message), self._job
        last.provenance.CopyFrom(
            common_pb2.Provenance(
                num_prompt_tokens=len(job.prompt_token_ids),
                legs=self._account.legs,
                model=model,
                model_fingerprint=fingerprint,
                adapter_digest=job.adapter.digest,
            )
        )
        if job.wants_embedding:
            if not self.embedding:
                raise Internal("the prefill worker gave no embedding")
            last.embedding.extend(self.embedding)
        if job.is_prompt_only:  # the drawn token means nothing
            last.usage.num_output_tokens = 0
            last.finish_reason = common_pb2.FINISH_REASON_LENGTH
            last.ClearField("stop_token_id")
            last.ClearField("stop_string")
        for stage, seconds in self._times.stages():
            last.times.add(stage=stage, seconds=seconds)
        if job.sampling.trace:
            last.prompt_token_ids.extend(job.prompt_token_ids)
            last.sampling.CopyFrom(job.sampling)
        await self._send(last)

    def _ended(
        self, answer: SampleOutput, message: inference_pb2.GenerateResponse
    ) -> inference_pb2.GenerateResponse:
        """Return `message` with the fields that end its sample."""
        self._samples.say_ended(answer)
        return answer.last(
            message,
            num_prompt_tokens=len(self._job.prompt_token_ids),
            num_cached_tokens=self._account.num_cached_tokens,
            seed=self._job.sampling.seed,
        )


# Seconds after which a full cluster is asked again without news of room. Guessed: about one step
# of a large batch.
_ROOM_POLL_S = 0.1


class Reserving:
    """Search for the workers of one request; its result is a pair whose decode worker holds
    blocks."""

    def __init__(
        self,
        cluster: RoutingServices,
        job: RouterRequest,
        *,
        mark: Callable[[str, Details | None], None],
        deadline: Deadline,
        on_choice: Callable[[Choice], None],
        on_lack: Callable[[str], None],
        on_queued: Callable[[], None],
        is_again: bool = False,
    ) -> None:
        """mark: called with each stage as it ends.
        on_choice: called with each choice as it is made.
        on_lack: called with the role of which a worker is waited for.
        on_queued: called when a decode worker has queued the request for places.
        is_again: whether the request has lost its decode worker."""
        self.leg: DecodeCall | None = None
        """The reservation; None: no decode worker is needed, or none was found."""
        self.fingerprint = ""
        """Fingerprint of the model on the reserved decode worker."""
        self._cluster = cluster
        self._job = job
        self._mark = mark
        self._deadline = deadline
        self._on_choice = on_choice
        self._on_lack = on_lack
        self._on_queued = on_queued
        self._is_again = is_again

    async def run(self, asking: RoutingQuery) -> tuple[Choice, RoutingQuery]:
        """Find the workers. Returns: the choice, whose decode worker (if one is needed) has set
        blocks aside, and the routing query that it answers.

        Raises: BatonError: the last worker's refusal, or that there is no worker.
        """
        routing, refused = self._cluster.routing, set[str]()
        times = self._cluster.times
        wait_s = times.failover_wait_s if self._is_again else times.reserve_wait_s
        bound = self._deadline.sooner(wait_s)
        last_error: BatonError | None = None
        may_room_help = False  # whether one of the refusals may be over when room comes
        occasion = DECODE_LEFT if self._is_again else FIRST
        while True:
            if last_error is not None and not routing.pools(asking, refused).decode:
                is_final = bool(refused) and not may_room_help
                if is_final or (bound.expired and not routing.candidates.expects(DECODE)):
                    raise last_error
                await self._wait()
                refused.clear()
                may_room_help = False
            try:
                choice, asking = routing.choose(asking, refused, occasion)
            except Unavailable:
                may_wait = self._is_again and not bound.expired
                if not (may_wait or routing.candidates.are_expected()):
                    raise
                has_decode = bool(routing.pools(asking, refused).decode)
                self._on_lack(PREFILL if has_decode else DECODE)
                await self._wait()
                continue
            occasion = REFUSED
            self._on_choice(choice)
            self._mark("choose", asking.details)
            if choice.decode_id is None:
                return choice, asking
            try:
                worker = routing.candidates.get(choice.decode_id)
                with routing.trial(worker):
                    leg = await self._ask(worker, asking.ask)
                await self._wait_for_places(leg)
            except TRY_ANOTHER as error:
                last_error = error
                may_room_help |= not isinstance(error, FailedPrecondition)
                refused.add(choice.decode_id)
                routing.metrics.on_retry("decode_refused")
            else:
                self.leg, self.fingerprint = leg, worker.fingerprint
                if not asking.has_kv:
                    choice, asking = routing.reserved(asking, choice, leg.num_tokens_local)
                    self._on_choice(choice)
                return choice, asking
            finally:
                self._mark("reserve", None)

    async def _wait(self) -> None:
        """Wait until there may be room, at most `_ROOM_POLL_S`."""
        await self._cluster.streams.wait_for_progress(min(_ROOM_POLL_S, self._deadline.left_s()))
        self._mark("wait_room", None)

    async def _wait_for_places(self, leg: DecodeCall) -> None:
        """Wait until the worker that has answered also holds places; the caller bounds the wait by
        the request's deadline."""
        if leg.is_queued:
            self._on_queued()
        try:
            await leg.wait_reserved()
        except BaseException:
            leg.cancel()
            raise

    async def _ask(self, worker: WorkerView, ask: PlacementQuery) -> DecodeCall:
        """Have `worker` set blocks aside or queue the request. The returned reservation belongs to
        the caller.

        Raises: BatonError: the worker's refusal, or that it did not answer; the reservation is
            cancelled.
        """
        bound = self._deadline.sooner(self._cluster.times.reserve_answer_s)
        span = trace_spans.current_span().child(
            "call decode",
            {
                "baton.worker_id": worker.worker_id,
                **trace_spans.server_attributes(worker.address),
                **trace_spans.rpc_attributes("Decode", "Stream"),
            },
            kind=SpanKind.CLIENT,
        )
        request = self._request(worker)
        request.traceparent = span.traceparent
        num_blocks = blocks_needed(ask.num_prompt_tokens, ask.max_tokens, worker.block_size)
        try:
            leg = await self._cluster.streams.open(
                worker.worker_id, request, bound, num_blocks, self._job.num_sequences
            )
        except BaseException as error:
            span.end(error)
            raise
        leg.span = span
        leg.incarnation, leg.block_size = worker.incarnation, worker.block_size
        leg.give_back = self._cluster.leases.release
        try:
            await leg.wait_answered(bound)
        except BaseException:
            leg.cancel()
            raise
        return leg

    def _request(self, worker: WorkerView) -> decode_pb2.ReserveDecode:
        """Make the reservation message for `worker`."""
        job = self._job
        return decode_pb2.ReserveDecode(
            request_id=job.leg_id,
            tenant=job.tenant,
            tenant_salt=job.tenant_salt,
            prompt_token_ids=job.prompt_token_ids,
            sampling=job.sampling,
            model_fingerprint=worker.fingerprint,
            adapter=job.adapter.name,
            adapter_digest=job.adapter.digest,
            priority=job.priority,
            budget_ms=max(1, int(self._deadline.left_s() * 1000)),
            has_begun=self._is_again,
        )


logger = logging.getLogger(__name__)

_PATHS = {
    TransferPath.STORE: common_pb2.HANDOVER_PATH_STORE,
    TransferPath.DIRECT: common_pb2.HANDOVER_PATH_DIRECT,
}

TRY_ANOTHER = (Unavailable, NoCapacity, FailedPrecondition)
"""Errors of a worker that another worker need not share."""

MAX_TRIES = 3
"""Prefill workers that are asked in turn; each costs the client the time until it failed."""

ShowFirst = Callable[[prefill_pb2.PrefillReply], Awaitable[None]]
ShowPrompt = Callable[[Sequence[common_pb2.TokenLogprobs]], Awaitable[None]]


@dataclass(frozen=True)
class Prefilled:
    """Result of prefill: the first token of every sample is drawn and shown."""

    worker_id: str
    layout: Layout
    account: PrefillNews | None
    """The worker's last message, which holds the handle; None: it was lost."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the model on the prefill worker."""
        return self.layout[0]


class PrefillLeg:
    """Computation of one prompt at a prefill worker, with retries at others."""

    def __init__(
        self,
        cluster: RoutingServices,
        job: RouterRequest,
        samples: AnswerOutput,
        *,
        deadline: Deadline,
        decode: DecodeCall | None,
        show_first: ShowFirst,
        show_prompt_logprobs: ShowPrompt,
    ) -> None:
        """decode: the reservation for the answer; None: the answer ends with its first token.
        show_first: puts a first token into `samples` and shows it.
        show_prompt_logprobs: does the same with log probabilities of the prompt's next tokens.
        """
        self._cluster = cluster
        self._job = job
        self._samples = samples
        self._deadline = deadline
        self._decode = decode
        self._show_first = show_first
        self._show_prompt_logprobs = show_prompt_logprobs

    async def run(self, choice: Choice, asking: RoutingQuery) -> tuple[Prefilled, RoutingQuery]:
        """Have the prompt computed by the worker of `choice`, or by a later choice. Returns: the
        result, and the routing query of the last choice.

        Raises: BatonError when first tokens are missing and no other worker can draw them.
        """
        failed: set[str] = set()
        while True:
            prefill_id, worker = choice.prefill_id or "", None
            try:
                worker = self._chosen(choice)
                with self._cluster.routing.trial(worker):
                    account = await self._call(worker, choice, asking)
                return self._prefilled(worker, account), asking
            except BatonError as error:
                if worker is not None and self._samples.has_all_firsts:
                    if isinstance(error, DeadlineExceeded) and not self._samples.is_over:
                        raise
                    self._log("handle_lost", worker.worker_id, error)
                    return self._prefilled(worker, None), asking
                failed.add(prefill_id)
                if len(failed) == MAX_TRIES or not isinstance(error, TRY_ANOTHER):
                    raise
                choice, asking = await self._another(failed, prefill_id, asking, error)

    # The methods of worker_client.Listener.

    async def show_prompt_logprobs(self, logprobs: Sequence[common_pb2.TokenLogprobs]) -> None:
        """Show log probabilities of the prompt's next tokens."""
        await self._show_prompt_logprobs(logprobs)

    async def show(self, first: prefill_pb2.PrefillReply) -> None:
        """Show a sample's first token."""
        await self._show_first(first)

    def prefetch(self, partial: SealedHandle) -> None:
        """Pass a partial handle on to the decode worker, which ignores it once it cannot use it."""
        if self._decode is not None:
            self._decode.prefetch(partial)

    def account_deadline(self) -> Deadline:
        """Return how long to wait for the worker's account; an answer that is over waits only
        briefly."""
        if not self._samples.is_over:
            return self._deadline
        return self._deadline.sooner(self._cluster.times.finish_wait_s)

    def _prefilled(self, worker: WorkerView, account: PrefillNews | None) -> Prefilled:
        return Prefilled(worker.worker_id, (worker.fingerprint, worker.block_size), account)

    def _chosen(self, choice: Choice) -> WorkerView:
        """Return the chosen worker. Raises: Unavailable when it is gone or has restarted since."""
        worker = self._cluster.candidates.get(choice.prefill_id or "")
        if worker.incarnation != choice.prefill_life:
            raise Unavailable(f"prefill worker {worker.worker_id} restarted")
        return worker

    async def _call(self, worker: WorkerView, choice: Choice, asking: RoutingQuery) -> PrefillNews:
        """Send the prompt to `worker`. Returns: its last message. Raises: BatonError."""
        job = self._job
        request = prefill_pb2.PrefillRequest(
            request_id=job.leg_id,
            tenant=job.tenant,
            tenant_salt=job.tenant_salt,
            prompt_token_ids=job.prompt_token_ids,
            sampling=job.sampling,
            model_fingerprint=worker.fingerprint,
            adapter=job.adapter.name,
            adapter_digest=job.adapter.digest,
            priority=job.priority,
            wants_handle=job.needs_decode,
            wants_embedding=job.wants_embedding,
            hints=to_hints(choice.runs, asking.ask.prefixes.stores),
            handover=_PATHS[choice.path],
            output_token_ids=self._samples.told_to_prefill,
            prompt_logprobs=job.prompt_logprobs if self._samples.begin_prompt() else None,
        )
        about: dict[str, trace_spans.Value] = {
            "baton.worker_id": worker.worker_id,
            **trace_spans.server_attributes(worker.address),
            **trace_spans.rpc_attributes("Prefill", "Stream"),
        }
        with trace_spans.current_span().child("call prefill", about, kind=SpanKind.CLIENT) as span:
            request.traceparent = span.traceparent
            return await self._cluster.prefills.prefill(
                worker, request, self._deadline, self, choice.num_computed
            )

    async def _another(
        self, failed: set[str], last_id: str, asking: RoutingQuery, error: BatonError
    ) -> tuple[Choice, RoutingQuery]:
        """Choose a prefill worker for another try. The model stays the same, because blocks may be
        reserved for it already. The prefix index is asked again, because the failed worker may have
        stored a part of the KV, perhaps at another store.

        Raises: `error` when there is no other worker.
        """
        drawn = self._samples.drawn if self._samples.is_alone else ()
        asking = asking.with_prefixes(await self._cluster.find_prefixes(self._job, drawn))
        decode = self._decode
        decode_id = decode.worker_id if decode is not None and not decode.is_over else None
        again = self._cluster.routing.again(asking, failed, decode_id)
        if again is None:
            raise error
        self._log("prefill_retried", last_id, error)
        return again

    def _log(self, event: str, worker_id: str, error: BatonError) -> None:
        """Count and log that the call to a prefill worker failed."""
        self._cluster.routing.metrics.on_retry(event)
        logs.event(
            logger,
            event,
            level=logging.WARNING,
            request_id=self._job.request_id,
            worker_id=worker_id,
            why=str(error),
        )


_Account = decode_pb2.DecodeFinished | decode_pb2.DecodeMoved
_Last = tuple[SampleOutput, inference_pb2.GenerateResponse]
"""The sample that ended last, and its last message, not sent yet."""


class Decoding:
    """Receiver of what decode workers draw for one request; `run` is called once for each
    worker."""

    def __init__(
        self,
        cluster: RoutingServices,
        request_id: str,
        samples: AnswerOutput,
        delivery: AnswerDelivery,
        account: KvAccount,
        times: StageTimes,
    ) -> None:
        self.handle: SealedHandle | None = None
        """KV handle on prompt and drawn tokens, from a worker that moved the stream."""
        self.has_drawn = False
        """Whether any token came from a decode worker."""
        self._cluster = cluster
        self._request_id = request_id
        self._samples = samples
        self._delivery = delivery
        self._account = account
        self._times = times

    def take_handle(self) -> SealedHandle | None:
        """Return the handle, whose leases belong to the caller from now on; None: there is none."""
        handle, self.handle = self.handle, None
        return handle

    async def run(self, leg: DecodeCall, fingerprint: str) -> Loss | None:
        """Show everything that comes over `leg`, including the last message with the request's
        account.

        Args: fingerprint: of the model that draws.
        Returns: why the answer must go on elsewhere; None: it is over.
        Raises: BatonError when no other worker could go on.
        """
        last: _Last | None = None
        while last is None:
            arrival = await leg.take()
            if arrival.moved is not None:
                self.handle = arrival.moved.handle
            for news in arrival.samples:
                last = await self._take(leg, news) or last
            if last is None and leg.is_over and (loss := self._loss(leg, arrival)):
                return loss
        answer, message = last
        account = _account_in(arrival)
        if account is None:
            # A stop string ended the sample. The worker does not see text, so it must be told.
            leg.cancel()
            await self._delivery.show(message)
            message = answer.empty()
            account = await self._account_of(leg)
        if account is not None:
            self._close(leg, account)
        await self._delivery.end_last(
            answer, message, model=self._cluster.model, fingerprint=fingerprint
        )
        return None

    async def _take(self, leg: DecodeCall, news: SampleNews) -> _Last | None:
        """Show what came for one sample. Returns: its message, not sent yet, if it ended last."""
        self.has_drawn = True
        taken = self._samples.take(news)
        if taken is None:
            return None
        answer, message = taken
        if not answer.is_over:
            await self._delivery.show(message)
            return None
        if self._samples.is_over:
            return taken
        if not news.reason:
            leg.cancel_sample(news.sample_index)
        await self._delivery.end(answer, message)
        return None

    def _loss(self, leg: DecodeCall, arrival: CallUpdate) -> Loss | None:
        """Return what the end of `leg` means while the answer is not over; None: it has not ended.

        Raises: BatonError, as `run`.
        """
        if arrival.moved is not None:
            return self._moved(leg, arrival.moved.news)
        error = arrival.error
        if error is None and arrival.finished is None:
            return None
        if error is None:
            error = Unavailable(
                f"decode worker {leg.worker_id} gave the request up", retry_after_s=1.0
            )
        loss = Loss(leg.worker_id, leg.incarnation, error)
        ended_by = loss.ended_by
        if isinstance(error, Unavailable) and not loss.is_on_purpose:
            self._cluster.routing.failed(leg.worker_id)
        if not (isinstance(error, OTHERS_MAY) and self._samples.can_go_on):
            raise error
        if arrival.finished is not None:
            self._close(leg, arrival.finished, ended_by)
        else:
            self._times.mark("stream")
            self._account.add_silent(leg.worker_id, leg.incarnation, ended_by)
        self._account.recompute_for(ended_by)
        return loss

    def _moved(self, leg: DecodeCall, news: decode_pb2.DecodeMoved) -> Loss:
        """Book the part of a worker that leaves.

        Raises: Internal when the tokens that came are not those that it sent; Unavailable for a
            beam search, which cannot be moved.
        """
        self._samples.check_sent(news.num_output_tokens)
        self._close(leg, news, request_stats.MOVED)
        if not self._samples.can_go_on:
            raise Unavailable(
                f"decode worker {leg.worker_id} leaves in the middle of a beam search's answer",
                retry_after_s=0.0,
            )
        if self.handle is None:
            self._account.recompute_for(request_stats.MOVED)
        return Loss(leg.worker_id, leg.incarnation, None)

    def _close(self, leg: DecodeCall, account: _Account, ended_by: str = "") -> None:
        """Book the worker's own account of its part."""
        if account.HasField("leg"):
            self._account.add(account.leg, leg.block_size, ended_by)
        else:
            self._account.add_silent(leg.worker_id, leg.incarnation, ended_by)
        parts = seconds_of(account.times)
        self._times.mark_split(parts, rest="stream", wire="decode_wire")

    async def _account_of(self, leg: DecodeCall) -> _Account | None:
        """Return the cancelled worker's account of its part; None when it does not come in time."""
        try:
            async with asyncio.timeout(self._cluster.times.finish_wait_s):
                return await leg.wait_over()
        except TimeoutError:
            logs.event(
                logger,
                "no_account_after_cancel",
                level=logging.WARNING,
                request_id=self._request_id,
                worker_id=leg.worker_id,
            )
            return None


def seconds_of(times: Iterable[common_pb2.StageTime]) -> Sequence[tuple[str, float]]:
    """Return a worker's stages as (stage, seconds)."""
    return [(entry.stage, entry.seconds) for entry in times]


def _account_in(arrival: CallUpdate) -> _Account | None:
    """Return the worker's account in an update; None: it has not come."""
    return arrival.moved.news if arrival.moved is not None else arrival.finished


_RETRY_S = 0.2
"""Seconds between two tries to find a prefill worker while one is waited for. Guessed."""


class LifecycleState(Enum):
    """State of a request at the router, described in the module docstring; the value is shown to
    users."""

    LOOKING_UP = "looking up its prefix"
    RESERVING = "waiting for decode blocks"
    LACKING_PREFILL = "waiting for a prefill worker"
    LACKING_DECODE = "waiting for a decode worker"
    LACKING_PLACE = "waiting for a decode place"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    MOVING = "being moved to another decode worker"
    FINISHED = "finished"


class RequestLifecycle:
    """Serving of one request from lookup to its last message; `run` drives it."""

    def __init__(
        self,
        cluster: RoutingServices,
        job: RouterRequest,
        answers: Sequence[SampleOutput],
        *,
        times: StageTimes,
        deadline: Deadline,
        send: Send,
        on_reserved: Callable[[], None] = lambda: None,
    ) -> None:
        """on_reserved: called when a decode worker has accepted or queued the request."""
        self.state = LifecycleState.LOOKING_UP
        self.choice: Choice | None = None
        """The workers chosen last; None: none yet."""
        self._cluster = cluster
        self._job = job
        num_scored = 0 if job.prompt_logprobs is None else len(job.prompt_token_ids)
        self._samples = AnswerOutput(answers, job.sampling, num_scored_tokens=num_scored)
        self._times = times
        self._deadline = deadline
        self._account = KvAccount()
        self._delivery = AnswerDelivery(send, job, self._samples, self._account, times)
        self._failover = FailoverBudget(times, cluster.max_failovers)
        self._decoding = Decoding(
            cluster, job.request_id, self._samples, self._delivery, self._account, times
        )
        self._asking: RoutingQuery | None = None
        self._leg: DecodeCall | None = None
        self._on_reserved = on_reserved
        # Its leases are this object's until the handle is sent to a decode worker.
        self._handle: SealedHandle | None = None
        self._fingerprint = ""
        self._to_note: Callable[[], None] | None = None

    async def run(self) -> None:
        """Serve the request to its last message. The caller bounds the time by the deadline.

        Raises: BatonError; asyncio.CancelledError. Both workers have been told by then.
        """
        try:
            loss = await self._attempt()
            while loss is not None:
                self._note_loss(loss)
                loss = await self._attempt()
            self._note_answer()
            self.state = LifecycleState.FINISHED
        finally:
            if self._leg is not None:
                self._leg.cancel()
            if self._handle is not None:
                self._cluster.leases.release(self._handle)

    async def _attempt(self) -> Loss | None:
        """Serve the request with one pair of workers. Returns: None when the answer is over."""
        is_again = self._failover.is_on
        wait_s = self._cluster.times.failover_wait_s if is_again else 0.0
        bound = self._deadline.sooner(wait_s)
        broken = set[str]()  # incarnations of prefill workers
        while True:
            asking = await self._ask_again() if is_again else await self._look_up()
            choice, asking = await self._reserve(asking)
            if asking.has_kv:
                if self._has_kv():
                    break
                # The handle lapsed during the search for a worker.
                self._need_leg("a handle without decode").cancel()
                self.state = LifecycleState.MOVING
                continue
            if choice.prefill_id is None:
                return await self._decode_alone(asking)
            try:
                asking = await self._prefill(choice, asking)
                break
            except OTHERS_MAY as error:
                broken.add(choice.prefill_life)
                is_expected = self._cluster.candidates.expects(PREFILL)
                # The request may be what breaks them.
                has_broken_many = len(broken) > self._cluster.max_failovers
                if has_broken_many or (bound.expired and not is_expected):
                    if is_again:
                        raise self._failover.explained(error) from error
                    raise
                if self._leg is not None:
                    self._leg.cancel()
                self.state = LifecycleState.MOVING if is_again else LifecycleState.LACKING_PREFILL
                # A sleep, not a wait for progress of decode workers: the reservation cancelled
                # above counts as progress, and says nothing about prefill workers.
                await asyncio.sleep(min(_RETRY_S, self._deadline.left_s()))
                self._failover.mark("wait_room", None)
        return await self._hand_over(asking)

    # ---- finding workers

    async def _look_up(self) -> RoutingQuery:
        """Ask the prefix index and return what workers are chosen by. For a single sample all drawn
        tokens are context."""
        job, samples = self._job, self._samples
        drawn = samples.drawn if samples.is_alone else ()
        prefixes = await self._cluster.find_prefixes(job, drawn)
        await asyncio.sleep(0)  # the choice takes time, too: let other requests run first
        self._failover.mark("lookup", partial(tracing.of_lookup, prefixes))
        num_context_tokens = len(job.prompt_token_ids) + len(drawn)
        ask = PlacementQuery(
            num_prompt_tokens=num_context_tokens,
            max_tokens=(job.sampling.max_tokens - len(drawn)) * job.num_sequences,
            affinity=job.affinity,
            prefixes=prefixes,
            needs_decode=job.needs_decode,
            window=len(job.prompt_token_ids) + job.sampling.max_tokens,
        )
        return self._cluster.routing.asking(
            job.tenant,
            job.request_id,
            job.adapter,
            ask,
            may_skip_prefill=job.may_skip_prefill and samples.may_skip_prefill,
        )

    async def _ask_again(self) -> RoutingQuery:
        """Return the routing query after a loss; with a usable handle no new lookup is needed."""
        has_kv = self._has_kv()
        asking = self._asking if has_kv else None
        if asking is None:
            asking = await self._look_up()
        fingerprint = self._fingerprint if has_kv or self._samples.has_drawn else ""
        return replace(asking, has_kv=has_kv, left=self._failover.left, fingerprint=fingerprint)

    def _has_kv(self) -> bool:
        """Return whether there is a handle from which a worker can go on without computing much
        itself; an unusable handle is given back."""
        if self._handle is None:
            return False
        drawn = self._samples.drawn if self._samples.is_alone else ()
        try:
            why = handle_unusable_reason(
                self._handle.extent(),
                len(self._job.prompt_token_ids) + len(drawn),
                self._cluster.routing.max_own_tokens,
                time.time(),
            )
        except ValueError:
            why = "unreadable"
        if not why:
            return True
        self._log_retry("handle_not_used", logging.INFO, why=why)
        self._cluster.leases.release(self._handle)
        self._handle = None
        if self._failover.last is not None:
            self._account.recompute_for(self._failover.last.ended_by)
        return False

    async def _reserve(self, asking: RoutingQuery) -> tuple[Choice, RoutingQuery]:
        """Choose a pair of workers whose decode worker has set blocks aside."""
        reserving = Reserving(
            self._cluster,
            self._job,
            mark=self._failover.mark,
            deadline=self._deadline,
            on_choice=self._on_choice,
            on_lack=self._on_lack,
            on_queued=self._on_queued,
            is_again=self._failover.is_on,
        )
        try:
            return await reserving.run(asking)
        except OTHERS_MAY as error:
            if not self._failover.is_on:
                raise
            raise self._failover.explained(error) from error
        finally:
            self._leg = reserving.leg
            if self._leg is not None:
                self._on_reserved()
            self._fingerprint = reserving.fingerprint or self._fingerprint

    def _on_choice(self, choice: Choice) -> None:
        """Record a choice of `Reserving`."""
        self.choice = choice
        if not self._failover.is_on:
            self.state = LifecycleState.RESERVING

    def _on_lack(self, role: str) -> None:
        """Record that a worker of `role` is waited for."""
        if not self._failover.is_on:
            self.state = (
                LifecycleState.LACKING_PREFILL if role == PREFILL else LifecycleState.LACKING_DECODE
            )

    def _on_queued(self) -> None:
        """Record that the decode worker queues the request for places."""
        self._on_reserved()
        if not self._failover.is_on:
            self.state = LifecycleState.LACKING_PLACE

    # ---- the prefill worker

    async def _prefill(self, choice: Choice, asking: RoutingQuery) -> RoutingQuery:
        """Obtain the next token of each sample, and the handle on the KV before it if there
        is one."""
        self.state = LifecycleState.PREFILLING
        self._samples.begin_prefill()
        num_found = asking.ask.num_prompt_tokens - choice.num_computed
        self._account.expect(min(num_found, len(self._job.prompt_token_ids) - 1))
        leg = PrefillLeg(
            self._cluster,
            self._job,
            self._samples,
            deadline=self._deadline,
            decode=self._leg,
            show_first=self._show_first,
            show_prompt_logprobs=self._show_prompt_logprobs,
        )
        prefilled, asking = await leg.run(choice, asking)
        self._fingerprint = prefilled.fingerprint
        if asking.decision is not None:
            self.choice = asking.decision.choice  # differs from `choice` after a retry
        if self._leg is not None:
            workers = [prefilled.worker_id, self._leg.worker_id]
            self._to_note = partial(
                self._cluster.routing.note_prompt, asking, prefilled.layout, workers
            )
        account = prefilled.account
        if account is None:
            self._account.expect(0)  # the account is lost, and with it how much KV was found
            self._account.recompute_for("")  # the decode worker reports what is missing
            self._times.mark("prefill_compute")
            return asking
        self._handle = account.handle
        self._account.add(account.reply.leg, prefilled.layout[1])
        self._times.mark_split(
            seconds_of(account.reply.times),
            rest=self._failover.stage("handover"),
            wire="prefill_wire",
        )
        return asking

    async def _show_first(self, first: prefill_pb2.PrefillReply) -> None:
        """Show a sample's first token. If it ends the answer, cancel the decode worker
        right away."""
        num_otherwise = self._samples.num_drawn_otherwise
        message = self._samples.take_first(first)
        if self._samples.num_drawn_otherwise > num_otherwise:
            self._log_retry("first_drawn_otherwise", logging.INFO, sample_index=first.sample_index)
        self._delivery.embedding = self._delivery.embedding or first.embedding
        if message is None or self._job.is_prompt_only:
            return
        if self._samples.is_over and self._leg is not None:
            self._leg.cancel()
        await self._delivery.show(message)

    async def _show_prompt_logprobs(self, logprobs: Sequence[common_pb2.TokenLogprobs]) -> None:
        """Show those of the prompt's log probabilities that are new."""
        new = self._samples.take_prompt(logprobs)
        request_id = self._job.request_id
        await self._delivery.show(
            inference_pb2.GenerateResponse(request_id=request_id, prompt_logprobs=new)
        )

    # ---- the decode worker

    async def _decode_alone(self, asking: RoutingQuery) -> Loss | None:
        """Have the decode worker compute the prompt itself and draw the whole rest of the
        answer."""
        leg = self._need_leg("nobody was chosen to compute the prompt")
        self._asking, self.state = asking, LifecycleState.DECODING
        self._account.expect(min(leg.num_tokens_local, len(self._job.prompt_token_ids) - 1))
        try:
            leg.generate(self._samples.handover(computes_prompt=True), None)
        except OTHERS_MAY as error:
            return Loss(leg.worker_id, leg.incarnation, error)
        self._failover.mark("handover", None)
        return await self._decode(leg)

    async def _hand_over(self, asking: RoutingQuery) -> Loss | None:
        """Have the decode worker go on from what was drawn, unless all samples ended with it."""
        self._asking = asking
        ended = list(self._samples.ended())
        last = ended.pop() if self._samples.is_over else None
        leg = self._leg
        if last is None:
            leg = self._need_leg("the prefill worker did not end an answer of one token")
            self.state = LifecycleState.DECODING
            try:
                leg.generate(self._samples.handover(), self._handle)
            except OTHERS_MAY as error:
                return Loss(leg.worker_id, leg.incarnation, error)
            finally:
                self._note_prompt()  # after the handle is sent: the decode worker waits for it
            self._handle = None
        else:
            self._note_prompt()
        self._failover.mark("handover", None)
        for answer in ended:
            await self._delivery.end(answer, answer.empty())
        if last is None and leg is not None:
            return await self._decode(leg)
        if last is not None:
            await self._delivery.end_last(
                last,
                last.empty(),
                model=self._cluster.model,
                fingerprint=self._fingerprint,
            )
        return None

    def _note_prompt(self) -> None:
        """Record, once, which workers hold the prompt's KV."""
        note, self._to_note = self._to_note, None
        if note is not None:
            note()

    def _need_leg(self, otherwise: str) -> DecodeCall:
        """Return the reservation. Raises: Internal, with `otherwise`, when there is none."""
        if self._leg is None:
            raise Internal(otherwise)
        return self._leg

    async def _decode(self, leg: DecodeCall) -> Loss | None:
        """Show what one decode worker draws."""
        try:
            return await self._decoding.run(leg, self._fingerprint)
        finally:
            self._handle = self._decoding.take_handle()  # given back at the end, if not used

    def _note_loss(self, loss: Loss) -> None:
        """Count a loss and log it. Raises: BatonError when the request has lost too many
        workers."""
        self._failover.note(loss)
        self.state = LifecycleState.MOVING
        self._log_retry(
            "stream_moved" if loss.is_on_purpose else "decode_lost",
            logging.INFO if loss.is_on_purpose else logging.WARNING,
            worker_id=loss.worker_id,
            has_handle=self._handle is not None,
            why=loss.why,
        )

    def _log_retry(self, event: str, level: int, **about: Any) -> None:
        self._cluster.routing.metrics.on_retry(event)
        logs.event(logger, event, level=level, request_id=self._job.request_id, **about)

    def _note_answer(self) -> None:
        """Record where the answer's KV is, so that the conversation's next turn may be sent
        there."""
        if self._leg is not None and self._asking is not None and self._decoding.has_drawn:
            job = self._job
            # The last token was never fed back into the model: no worker has its KV.
            drawn, worker_id = self._samples.drawn[:-1], self._leg.worker_id
            self._cluster.routing.note_answer(
                self._asking, job.tenant_salt, job.prompt_token_ids, drawn, worker_id
            )
