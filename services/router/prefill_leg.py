"""The prefill half of one request: one prompt at one worker, and once more at another.

    CALLING      a worker computes the prompt; first tokens are shown as they come, and what it has
                 stored so far is passed on to the decode leg, which fetches it meanwhile
    RETRYING     it failed before all first tokens were there: another one, which is told where the
                 prefix lies by now; MAX_TRIES in all
    OVER         with its account, or without: once the tokens are shown there is no other try,
                 decode computes what was not handed over

Law: leases that a handle names are the caller's from the account on. Those of a partial handle stay
the worker's; they are never kept here. Knows no text and no client. One request, one task.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from process import logs, trace_spans
from process.deadline import Deadline
from process.errors import (
    BatonError,
    DeadlineExceeded,
    FailedPrecondition,
    NoCapacity,
    Unavailable,
)
from process.trace_spans import SpanKind
from protos import common_pb2, prefill_pb2
from services.router.decode_leg import DecodeLeg
from services.router.handover import Path
from services.router.job import Cluster, Job
from services.router.policy import Choice
from services.router.prefix_runs import Layout, to_hints
from services.router.routing import Asking
from services.router.samples import Samples
from services.router.sealed_handle import PrefillNews, SealedHandle
from services.router.views import WorkerView

logger = logging.getLogger(__name__)

_PATHS = {
    Path.STORE: common_pb2.HANDOVER_PATH_STORE,
    Path.DIRECT: common_pb2.HANDOVER_PATH_DIRECT,
}

TRY_ANOTHER = (Unavailable, NoCapacity, FailedPrecondition)
"""What another worker may be able to do although this one cannot."""

MAX_TRIES = 3
"""Prefill workers asked in turn: each costs the client the time until it failed."""

ShowFirst = Callable[[prefill_pb2.PrefillReply], Awaitable[None]]
ShowPrompt = Callable[[Sequence[common_pb2.TokenLogprobs]], Awaitable[None]]


@dataclass(frozen=True)
class Prefilled:
    """All first tokens are drawn and shown."""

    worker_id: str
    layout: Layout
    account: PrefillNews | None
    """The worker's last message, which holds the handle; None: it was lost."""

    @property
    def fingerprint(self) -> str:
        return self.layout[0]


class PrefillLeg:
    """See the module."""

    def __init__(
        self,
        cluster: Cluster,
        job: Job,
        samples: Samples,
        *,
        deadline: Deadline,
        decode: DecodeLeg | None,
        show_first: ShowFirst,
        show_prompt_logprobs: ShowPrompt,
    ) -> None:
        """`decode`: where blocks are reserved for the answer; None: it ends with its first token.
        `show_first`: puts a first token into `samples` and shows it; `show_prompt_logprobs`: the
        same with those of the prompt's next tokens.
        """
        self._cluster = cluster
        self._job = job
        self._samples = samples
        self._deadline = deadline
        self._decode = decode
        self._show_first = show_first
        self._show_prompt_logprobs = show_prompt_logprobs

    async def run(self, choice: Choice, asking: Asking) -> tuple[Prefilled, Asking]:
        """Have the prompt computed where `choice` says, or where a later one does.

        Raises: BatonError, when first tokens are missing and nobody else can draw them.
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

    # What the prefill client asks for: services.router.prefill_client.Listener.

    async def show_prompt_logprobs(self, logprobs: Sequence[common_pb2.TokenLogprobs]) -> None:
        """Of the prompt's next tokens."""
        await self._show_prompt_logprobs(logprobs)

    async def show(self, first: prefill_pb2.PrefillReply) -> None:
        """A sample's first token is there."""
        await self._show_first(first)

    def prefetch(self, partial: SealedHandle) -> None:
        """Pass on what is stored so far; nothing when the decode leg cannot use it any more."""
        if self._decode is not None:
            self._decode.prefetch(partial)

    def account_deadline(self) -> Deadline:
        """An answer that is over does not wait long for the account of how it came about."""
        if not self._samples.is_over:
            return self._deadline
        return self._deadline.sooner(self._cluster.times.finish_wait_s)

    def _prefilled(self, worker: WorkerView, account: PrefillNews | None) -> Prefilled:
        return Prefilled(worker.worker_id, (worker.fingerprint, worker.block_size), account)

    def _chosen(self, choice: Choice) -> WorkerView:
        """Raises: Unavailable when it is gone, or begun anew since it was chosen."""
        worker = self._cluster.candidates.get(choice.prefill_id or "")
        if worker.incarnation != choice.prefill_life:
            raise Unavailable(f"prefill worker {worker.worker_id} restarted")
        return worker

    async def _call(self, worker: WorkerView, choice: Choice, asking: Asking) -> PrefillNews:
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
        self, failed: set[str], last_id: str, asking: Asking, error: BatonError
    ) -> tuple[Choice, Asking]:
        """Who tries again; the same model only, because blocks may be reserved for it already. The
        index is asked anew: the first worker has stored a part, maybe at another node.

        Raises: `error` when there is nobody.
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
        self._cluster.routing.metrics.on_retry(event)
        logs.event(
            logger,
            event,
            level=logging.WARNING,
            request_id=self._job.request_id,
            worker_id=worker_id,
            why=str(error),
        )
