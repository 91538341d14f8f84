"""The life of one request between the two workers.

    LOOKING_UP   which stores hold its prefix
    RESERVING    choose the pair; the decode worker sets blocks aside (not for a single token)
    PREFILLING   the prefill worker computes the prompt, draws the first token of each sample (shown
                 at once), stores the KV; decode fetches what is stored already
    DECODING     the decode worker takes the KV over and draws the rest of every sample
    FINISHED     the last message is out

Each sample ends with a message of its own; the one that ends last carries the request's account.

Cancel, deadline and errors lead out of every state; `run` then tells both legs before it returns,
without waiting: the prefill call is cancelled, the decode leg gets its cancel. What is visible to
the client is made in `answer`; who is chosen, in `policy`. One request, one task.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from enum import Enum

from process import logs
from process.deadline import Deadline
from process.errors import BatonError, Internal, Unavailable
from protos import common_pb2, decode_pb2, inference_pb2, prefill_pb2
from services.router.answer import Answer, shows_something
from services.router.decode_leg import DecodeLeg, SampleNews
from services.router.job import Cluster, Job
from services.router.policy import Ask, Choice, choose
from services.router.prefill_leg import TRY_ANOTHER, PrefillLeg
from services.router.samples import Samples
from services.router.sealed_handle import SealedHandle
from services.router.times import StageTimes
from services.router.views import WorkerView

logger = logging.getLogger(__name__)

Send = Callable[[inference_pb2.GenerateResponse], Awaitable[None]]

# Without news a full cluster is asked again after so long; guessed, about one step of a large
# batch.
_ROOM_POLL_S = 0.1


class State(Enum):
    """See the module."""

    LOOKING_UP = "looking up its prefix"
    RESERVING = "waiting for decode blocks"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"


class RequestFlow:
    """See the module."""

    def __init__(
        self,
        cluster: Cluster,
        job: Job,
        answers: Sequence[Answer],
        *,
        times: StageTimes,
        deadline: Deadline,
        send: Send,
    ) -> None:
        self.state = State.LOOKING_UP
        self._cluster = cluster
        self._job = job
        self._samples = Samples(answers, job.sampling)
        self._times = times
        self._deadline = deadline
        self._send = send
        self._leg: DecodeLeg | None = None
        # Ours until the decode worker is told of it.
        self._handle: SealedHandle | None = None
        self._kv_legs: list[common_pb2.KvLeg] = []
        self._fingerprint = ""

    async def run(self) -> None:
        """Serve the request to its last message. The caller bounds it by the deadline.

        Raises: BatonError; asyncio.CancelledError. Both legs have been told by then.
        """
        try:
            ask = await self._look_up()
            choice = await self._reserve(ask)
            await self._prefill(choice, ask)
            await self._hand_over()
            self.state = State.FINISHED
        finally:
            if self._leg is not None:
                self._leg.cancel()
            if self._handle is not None:
                self._cluster.leases.release(self._handle)

    async def _look_up(self) -> Ask:
        job = self._job
        prefixes = await self._cluster.find_prefixes(job)
        self._times.mark("lookup")
        return Ask(
            num_prompt_tokens=len(job.prompt_token_ids),
            max_tokens=job.sampling.max_tokens * job.num_sequences,
            affinity=job.affinity,
            prefixes=prefixes,
            needs_decode=job.needs_decode,
        )

    async def _reserve(self, ask: Ask) -> Choice:
        """Choose a pair whose decode worker has set blocks aside.

        A worker that refuses is left out of the next choice; when all have refused, they are asked
        again as room comes.
        """
        self.state = State.RESERVING
        candidates, refused = self._cluster.candidates, set[str]()
        bound = self._deadline.sooner(self._cluster.times.reserve_wait_s)
        last_error: BatonError | None = None
        while True:
            decode = candidates.decode(refused, self._job.adapter)
            if last_error is not None and not decode:
                if bound.expired:
                    raise last_error
                await self._cluster.streams.wait_for_progress(min(_ROOM_POLL_S, bound.left_s()))
                refused.clear()
                decode = candidates.decode((), self._job.adapter)
            prefill = candidates.prefill((), self._job.adapter)
            cluster = self._cluster
            choice = choose(prefill, decode, ask, cluster.costs, cluster.handover)
            self._times.mark("choose")
            self._log_choice(choice)
            if choice.decode_id is None:
                return choice
            try:
                await self._reserve_at(candidates.get(choice.decode_id))
                return choice
            except TRY_ANOTHER as error:
                last_error = error
                refused.add(choice.decode_id)
                if isinstance(error, Unavailable):
                    candidates.suspect(choice.decode_id)
            finally:
                self._times.mark("reserve")

    async def _reserve_at(self, worker: WorkerView) -> None:
        job = self._job
        request = decode_pb2.ReserveDecode(
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
        )
        bound = self._deadline.sooner(self._cluster.times.reserve_answer_s)
        leg = await self._cluster.streams.open(worker.worker_id, request, bound)
        try:
            await leg.wait_reserved(bound)
        except BaseException:
            leg.cancel()
            raise
        self._leg = leg

    async def _prefill(self, choice: Choice, ask: Ask) -> None:
        """The first token of each sample, and the handle on the prompt's KV if there is one."""
        self.state = State.PREFILLING
        leg = PrefillLeg(
            self._cluster,
            self._job,
            self._samples,
            deadline=self._deadline,
            decode=self._leg,
            show_first=self._show_first,
        )
        prefilled = await leg.run(choice, ask)
        self._fingerprint = prefilled.fingerprint
        account = prefilled.account
        if account is None:
            self._times.mark("prefill_compute")
            return
        self._handle = account.handle
        self._kv_legs.append(account.reply.leg)
        self._times.mark_split(_seconds(account.reply.times), rest="handover")

    async def _show_first(self, first: prefill_pb2.PrefillReply) -> None:
        """A sample's first token is there. If it ends the answer, the decode worker is told right
        away.
        """
        message = self._samples.take_first(first)
        if message is None:
            return
        if self._samples.is_over and self._leg is not None:
            self._leg.cancel()
        await self._show(message)

    async def _hand_over(self) -> None:
        """Have the decode worker go on from the first tokens, unless all answers ended with
        them.
        """
        ended = list(self._samples.ended())
        last = ended.pop() if self._samples.is_over else None
        if last is None:
            if self._leg is None:
                raise Internal("the prefill worker did not end an answer of one token")
            self.state = State.DECODING
            self._leg.generate(self._samples.handover(), self._handle)
            self._handle = None
        self._times.mark("handover")
        for answer in ended:
            await self._send(self._end(answer, answer.empty()))
        if last is not None:
            await self._send_last(last, last.empty())
        elif self._leg is not None:
            await self._decode(self._leg)

    async def _decode(self, leg: DecodeLeg) -> None:
        last: tuple[Answer, inference_pb2.GenerateResponse] | None = None
        while last is None:
            arrival = await leg.take()
            if arrival.error is not None:
                if isinstance(arrival.error, Unavailable):
                    self._cluster.candidates.suspect(leg.worker_id)
                raise arrival.error
            for news in arrival.samples:
                last = await self._take(leg, news) or last
            finished = arrival.finished
            if finished is not None and last is None:
                raise Unavailable(
                    f"decode worker {leg.worker_id} gave the request up", retry_after_s=1.0
                )
        answer, message = last
        if finished is None:
            # A stop string: only text could show it, so the worker must be told.
            leg.cancel()
            await self._show(message)
            message = answer.empty()
            finished = await self._account_of(leg)
        if finished is not None:
            self._kv_legs.append(finished.leg)
            self._times.mark_split(_seconds(finished.times), rest="stream")
        await self._send_last(answer, message)

    async def _take(
        self, leg: DecodeLeg, news: SampleNews
    ) -> tuple[Answer, inference_pb2.GenerateResponse] | None:
        """Show what came of one sample. Returns: its message not sent yet, if it ended last."""
        taken = self._samples.take(news)
        if taken is None:
            return None
        answer, message = taken
        if not answer.is_over:
            await self._show(message)
            return None
        if self._samples.is_over:
            return taken
        if not news.reason:
            leg.cancel_sample(news.sample_index)
        await self._send(self._end(answer, message))
        return None

    async def _account_of(self, leg: DecodeLeg) -> decode_pb2.DecodeFinished | None:
        """The cancelled worker's account of its leg; None when it does not come in time."""
        try:
            async with asyncio.timeout(self._cluster.times.finish_wait_s):
                return await leg.wait_over()
        except TimeoutError:
            logs.event(
                logger,
                "no_account_after_cancel",
                level=logging.WARNING,
                request_id=self._job.request_id,
                worker_id=leg.worker_id,
            )
            return None

    async def _show(self, message: inference_pb2.GenerateResponse) -> None:
        if shows_something(message):
            await self._send(message)

    def _end(
        self, answer: Answer, message: inference_pb2.GenerateResponse
    ) -> inference_pb2.GenerateResponse:
        """`message` with what ends its sample."""
        return answer.last(
            message,
            num_prompt_tokens=len(self._job.prompt_token_ids),
            kv_legs=self._kv_legs,
            seed=self._job.sampling.seed,
        )

    async def _send_last(self, answer: Answer, message: inference_pb2.GenerateResponse) -> None:
        """The end of the last sample, with the request's account."""
        self._times.mark("stream")
        last, job = self._end(answer, message), self._job
        last.provenance.CopyFrom(
            common_pb2.Provenance(
                num_prompt_tokens=len(job.prompt_token_ids),
                legs=self._kv_legs,
                model=self._cluster.model,
                model_fingerprint=self._fingerprint,
                adapter_digest=job.adapter.digest,
            )
        )
        for stage, seconds in self._times.stages():
            last.times.add(stage=stage, seconds=seconds)
        if job.sampling.trace:
            last.prompt_token_ids.extend(job.prompt_token_ids)
            last.sampling.CopyFrom(job.sampling)
        await self._send(last)

    def _log_choice(self, choice: Choice) -> None:
        logs.event(
            logger,
            "chosen",
            level=logging.DEBUG,
            request_id=self._job.request_id,
            prefill=choice.prefill_id,
            decode=choice.decode_id,
            why=dict(choice.why),
            num_pairs=choice.num_pairs,
            runs=[(run.node_id, run.num_blocks) for run in choice.runs],
            handover=choice.path.value,
        )


def _seconds(times: Iterable[common_pb2.StageTime]) -> Sequence[tuple[str, float]]:
    return [(entry.stage, entry.seconds) for entry in times]
