"""The prefill half of one request: one prompt at one worker, and once more at another.

    CALLING      a worker computes the prompt; first tokens are shown as they come, and what it has
                 stored so far is passed on to the decode leg, which fetches it meanwhile
    RETRYING     it failed before all first tokens were there: another one, which is told where the
                 prefix lies by now
    OVER         with its account, or without: once the tokens are shown there is no other try,
                 decode computes what was not handed over

Law: leases that a handle names are the caller's from the account on. Those of a partial handle stay
the worker's; they are never kept here. Knows no text and no client. One request, one task.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from process import logs
from process.deadline import Deadline
from process.errors import (
    BatonError,
    DeadlineExceeded,
    FailedPrecondition,
    NoCapacity,
    Unavailable,
)
from protos import common_pb2, prefill_pb2
from services.router.decode_leg import DecodeLeg
from services.router.handover import Path
from services.router.job import Cluster, Job
from services.router.policy import Ask, Choice, choose
from services.router.prefix_runs import to_hints
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

ShowFirst = Callable[[prefill_pb2.PrefillReply], Awaitable[None]]


@dataclass(frozen=True)
class Prefilled:
    """All first tokens are drawn and shown."""

    fingerprint: str
    account: PrefillNews | None
    """The worker's last message, which holds the handle; None: it was lost."""


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
    ) -> None:
        """`decode`: where blocks are reserved for the answer; None: it ends with its first token.
        `show_first`: puts a first token into `samples` and shows it.
        """
        self._cluster = cluster
        self._job = job
        self._samples = samples
        self._deadline = deadline
        self._decode = decode
        self._show_first = show_first

    async def run(self, choice: Choice, ask: Ask) -> Prefilled:
        """Have the prompt computed where `choice` says.

        Raises: BatonError, when first tokens are missing and nobody else can draw them.
        """
        for is_retry in (False, True):
            worker: WorkerView | None = None
            try:
                worker = self._cluster.candidates.get(choice.prefill_id)
                hints = to_hints(choice.runs, ask.prefixes.stores)
                account = await self._call(worker, hints, choice.path)
                return Prefilled(worker.fingerprint, account)
            except BatonError as error:
                if isinstance(error, Unavailable):
                    self._cluster.candidates.suspect(choice.prefill_id)
                if worker is not None and self._samples.has_all_firsts:
                    if isinstance(error, DeadlineExceeded) and not self._samples.is_over:
                        raise
                    self._log("handle_lost", worker.worker_id, error)
                    return Prefilled(worker.fingerprint, None)
                if is_retry or not isinstance(error, TRY_ANOTHER):
                    raise
                choice, ask = await self._another(choice.prefill_id, ask, error)
        raise AssertionError("both tries either return or raise")

    # What the prefill client asks for: services.router.prefill_client.Listener.

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

    async def _call(
        self, worker: WorkerView, hints: Sequence[common_pb2.PrefixRun], path: Path
    ) -> PrefillNews:
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
            hints=hints,
            handover=_PATHS[path],
        )
        return await self._cluster.prefills.prefill(worker, request, self._deadline, self)

    async def _another(self, failed_id: str, ask: Ask, error: BatonError) -> tuple[Choice, Ask]:
        """Who tries again; the same model only, because blocks may be reserved for it already. The
        index is asked anew: the first worker has stored a part, maybe at another node.

        Raises: `error` when there is nobody.
        """
        candidates = self._cluster.candidates
        others = candidates.prefill({failed_id}, self._job.adapter)
        decode = []
        if self._decode is not None:
            decode = [candidates.decode_now(self._decode.worker_id)]
            others = [load for load in others if load.layout == decode[0].layout]
        if not others:
            raise error
        self._log("prefill_retried", failed_id, error)
        prefixes = await self._cluster.find_prefixes(self._job)
        ask = replace(ask, prefixes=prefixes, needs_decode=bool(decode))
        return choose(others, decode, ask, self._cluster.costs, self._cluster.handover), ask

    def _log(self, event: str, worker_id: str, error: BatonError) -> None:
        logs.event(
            logger,
            event,
            level=logging.WARNING,
            request_id=self._job.request_id,
            worker_id=worker_id,
            why=str(error),
        )
