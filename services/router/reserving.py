"""Finding the workers of one request: choose, have the decode worker set blocks aside, and choose
again as long as decode workers refuse.

A worker that refuses is left out of the next choice; when all have refused, they are asked again as
room comes, for a bounded time, unless each lacks what does not come with time: a precondition.
While a worker is expected (`holding.is_expected`) the wait lasts as long as the request's budget.
An answer that has begun waits longer for room: its client has seen a part.
A worker that has blocks, but no place in its steps, answers that the request is queued: it waits
there, bounded by its budget, and no prompt is computed before its turn.
Law: `leg` is the reservation that stands, its owner's to end; one that failed, or whose wait was
cancelled, has been told so. One request, one task.
"""

from __future__ import annotations

from collections.abc import Callable

from process import trace_spans
from process.deadline import Deadline
from process.errors import BatonError, FailedPrecondition, Unavailable
from process.trace_spans import SpanKind
from protos import decode_pb2
from services.router.decisions import FIRST
from services.router.decode_leg import DecodeLeg
from services.router.job import Cluster, Job
from services.router.policy import DECODE, PREFILL, Ask, Choice, blocks_needed
from services.router.prefill_leg import TRY_ANOTHER
from services.router.routing import DECODE_LEFT, REFUSED, Asking
from services.router.times import Details
from services.router.views import WorkerView

# Without news a full cluster is asked again after so long; guessed, about one step of a large
# batch.
_ROOM_POLL_S = 0.1


class Reserving:
    """See the module."""

    def __init__(
        self,
        cluster: Cluster,
        job: Job,
        *,
        mark: Callable[[str, Details | None], None],
        deadline: Deadline,
        on_choice: Callable[[Choice], None],
        on_lack: Callable[[str], None],
        on_queued: Callable[[], None],
        is_again: bool = False,
    ) -> None:
        """`mark`: told each stage as it ends; `on_choice`: each choice as it is made; `on_lack`:
        the role of which a worker is waited for; `on_queued`: when a decode worker has taken the
        request on, and has it wait for places. `is_again`: the answer has begun, and its decode
        worker is gone."""
        self.leg: DecodeLeg | None = None
        """None: no decode worker is needed, or none was found."""
        self.fingerprint = ""
        """Of the model that its worker has."""
        self._cluster = cluster
        self._job = job
        self._mark = mark
        self._deadline = deadline
        self._on_choice = on_choice
        self._on_lack = on_lack
        self._on_queued = on_queued
        self._is_again = is_again

    async def run(self, asking: Asking) -> tuple[Choice, Asking]:
        """Who serves; the decode worker, if one is needed, has set blocks aside by then.

        Raises: BatonError: what the last worker said, or that there is none.
        """
        routing, refused = self._cluster.routing, set[str]()
        times = self._cluster.times
        wait_s = times.failover_wait_s if self._is_again else times.reserve_wait_s
        bound = self._deadline.sooner(wait_s)
        last_error: BatonError | None = None
        may_room_help = False  # one of those that refused
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
        """Until there may be room."""
        await self._cluster.streams.wait_for_progress(min(_ROOM_POLL_S, self._deadline.left_s()))
        self._mark("wait_room", None)

    async def _wait_for_places(self, leg: DecodeLeg) -> None:
        """Until the worker that has answered holds places, too; the request's time bounds it."""
        if leg.is_queued:
            self._on_queued()
        try:
            await leg.wait_reserved()
        except BaseException:
            leg.cancel()
            raise

    async def _ask(self, worker: WorkerView, ask: Ask) -> DecodeLeg:
        """Have `worker` set blocks aside, or queue the request; the leg is ours from here on."""
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
