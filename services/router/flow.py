"""The life of one request between the two workers.

    LOOKING_UP   which stores hold its prefix
    RESERVING    choose the pair; the decode worker sets blocks aside (not for a single token)
    LACKING_PREFILL, LACKING_DECODE  no worker of that role is there now, and one is waited for
    PREFILLING   the prefill worker computes the prompt, draws the first token of each sample (shown
                 at once), stores the KV; decode fetches what is stored already. Passed over where
                 the decode worker computes a short rest itself
    DECODING     the decode worker takes the KV over and draws the rest of every sample
    MOVING       the decode worker is gone before the end: as from LOOKING_UP on, with all that was
                 drawn as context. A worker that left on purpose has given a handle on the KV: then
                 another one takes it over at once, unless it would have to compute much of it alone
    FINISHED     the last message is out

Cancel, deadline and errors lead out of every state; `run` then tells both legs before it returns,
without waiting: the prefill call is cancelled, the decode leg gets its cancel. What is visible to
the client is made in `answer` and `delivery`; what a decode worker says is heard in `decoding`; who
is chosen, in `policy`; how often a request may lose its worker, in `failover`. One request, one
task.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import Any

from process import logs
from process.deadline import Deadline
from process.errors import Internal
from protos import common_pb2, inference_pb2, prefill_pb2
from services.router import request_trace
from services.router.answer import Answer
from services.router.decode_leg import DecodeLeg
from services.router.decoding import Decoding, seconds_of
from services.router.delivery import Delivery, Send
from services.router.failover import OTHERS_MAY, Failover, Loss, shortcoming
from services.router.job import Cluster, Job
from services.router.kv_account import KvAccount
from services.router.policy import PREFILL, Ask, Choice
from services.router.prefill_leg import PrefillLeg
from services.router.reserving import Reserving
from services.router.routing import Asking
from services.router.samples import Samples
from services.router.sealed_handle import SealedHandle
from services.router.times import StageTimes

logger = logging.getLogger(__name__)

_RETRY_S = 0.2
"""Between two tries to find a prefill worker while one is waited for; guessed."""


class State(Enum):
    """See the module."""

    LOOKING_UP = "looking up its prefix"
    RESERVING = "waiting for decode blocks"
    LACKING_PREFILL = "waiting for a prefill worker"
    LACKING_DECODE = "waiting for a decode worker"
    LACKING_PLACE = "waiting for a decode place"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    MOVING = "being moved to another decode worker"
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
        on_reserved: Callable[[], None] = lambda: None,
    ) -> None:
        """on_reserved: called when a decode worker has taken the request on."""
        self.state = State.LOOKING_UP
        self.choice: Choice | None = None
        """The workers chosen last; None: none yet."""
        self._cluster = cluster
        self._job = job
        num_scored = 0 if job.prompt_logprobs is None else len(job.prompt_token_ids)
        self._samples = Samples(answers, job.sampling, num_scored_tokens=num_scored)
        self._times = times
        self._deadline = deadline
        self._account = KvAccount()
        self._delivery = Delivery(send, job, self._samples, self._account, times)
        self._failover = Failover(times, cluster.max_failovers)
        self._decoding = Decoding(
            cluster, job.request_id, self._samples, self._delivery, self._account, times
        )
        self._asking: Asking | None = None
        self._leg: DecodeLeg | None = None
        self._on_reserved = on_reserved
        # Ours until a decode worker is told of it.
        self._handle: SealedHandle | None = None
        self._fingerprint = ""
        self._to_note: Callable[[], None] | None = None

    async def run(self) -> None:
        """Serve the request to its last message. The caller bounds it by the deadline.

        Raises: BatonError; asyncio.CancelledError. Both legs have been told by then.
        """
        try:
            loss = await self._attempt()
            while loss is not None:
                self._note_loss(loss)
                loss = await self._attempt()
            self._note_answer()
            self.state = State.FINISHED
        finally:
            if self._leg is not None:
                self._leg.cancel()
            if self._handle is not None:
                self._cluster.leases.release(self._handle)

    async def _attempt(self) -> Loss | None:
        """One pair of workers. Returns: None when the answer is over."""
        is_again = self._failover.is_on
        wait_s = self._cluster.times.failover_wait_s if is_again else 0.0
        bound = self._deadline.sooner(wait_s)
        broken = set[str]()  # lives of prefill workers
        while True:
            asking = await self._ask_again() if is_again else await self._look_up()
            choice, asking = await self._reserve(asking)
            if asking.has_kv:
                if self._has_kv():
                    break
                # It lapsed while a worker was looked for.
                self._need_leg("a handle without decode").cancel()
                self.state = State.MOVING
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
                self.state = State.MOVING if is_again else State.LACKING_PREFILL
                # Progress of decode workers is no news of prefill's: our own cancelled leg is some.
                await asyncio.sleep(min(_RETRY_S, self._deadline.left_s()))
                self._failover.mark("wait_room", None)
        return await self._hand_over(asking)

    # ---- finding workers

    async def _look_up(self) -> Asking:
        """What is asked for from here on: of one sample all that was drawn is context now."""
        job, samples = self._job, self._samples
        drawn = samples.drawn if samples.is_alone else ()
        prefixes = await self._cluster.find_prefixes(job, drawn)
        await asyncio.sleep(0)  # the choice is a turn's work, too
        self._failover.mark("lookup", partial(request_trace.of_lookup, prefixes))
        num_context_tokens = len(job.prompt_token_ids) + len(drawn)
        ask = Ask(
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

    async def _ask_again(self) -> Asking:
        """As `_look_up`, after a loss; who holds a handle on the KV needs to know no more."""
        has_kv = self._has_kv()
        asking = self._asking if has_kv else None
        if asking is None:
            asking = await self._look_up()
        fingerprint = self._fingerprint if has_kv or self._samples.has_drawn else ""
        return replace(asking, has_kv=has_kv, left=self._failover.left, fingerprint=fingerprint)

    def _has_kv(self) -> bool:
        """Whether a handle is there with which nobody computes much alone; any other is given
        back."""
        if self._handle is None:
            return False
        drawn = self._samples.drawn if self._samples.is_alone else ()
        try:
            why = shortcoming(
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

    async def _reserve(self, asking: Asking) -> tuple[Choice, Asking]:
        """Choose a pair whose decode worker has set blocks aside."""
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
        self.choice = choice
        if not self._failover.is_on:
            self.state = State.RESERVING

    def _on_lack(self, role: str) -> None:
        if not self._failover.is_on:
            self.state = State.LACKING_PREFILL if role == PREFILL else State.LACKING_DECODE

    def _on_queued(self) -> None:
        self._on_reserved()
        if not self._failover.is_on:
            self.state = State.LACKING_PLACE

    # ---- the prefill worker

    async def _prefill(self, choice: Choice, asking: Asking) -> Asking:
        """The next token of each sample, and the handle on the KV before it if there is one."""
        self.state = State.PREFILLING
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
            self.choice = asking.decision.choice  # another one than the first, after a retry
        if self._leg is not None:
            workers = [prefilled.worker_id, self._leg.worker_id]
            self._to_note = partial(
                self._cluster.routing.note_prompt, asking, prefilled.layout, workers
            )
        account = prefilled.account
        if account is None:
            self._account.expect(0)  # it was lost, and what was found with it
            self._account.recompute_for("")  # the decode worker says that it is missing
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
        """A sample's first token is there. If it ends the answer, the decode worker is told right
        away.
        """
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
        new = self._samples.take_prompt(logprobs)
        request_id = self._job.request_id
        await self._delivery.show(
            inference_pb2.GenerateResponse(request_id=request_id, prompt_logprobs=new)
        )

    # ---- the decode worker

    async def _decode_alone(self, asking: Asking) -> Loss | None:
        """The decode worker computes the prompt itself, and draws all the rest."""
        leg = self._need_leg("nobody was chosen to compute the prompt")
        self._asking, self.state = asking, State.DECODING
        self._account.expect(min(leg.num_tokens_local, len(self._job.prompt_token_ids) - 1))
        try:
            leg.generate(self._samples.handover(computes_prompt=True), None)
        except OTHERS_MAY as error:
            return Loss(leg.worker_id, leg.incarnation, error)
        self._failover.mark("handover", None)
        return await self._decode(leg)

    async def _hand_over(self, asking: Asking) -> Loss | None:
        """Have the decode worker go on from what was drawn, unless all answers ended with it."""
        self._asking = asking
        ended = list(self._samples.ended())
        last = ended.pop() if self._samples.is_over else None
        leg = self._leg
        if last is None:
            leg = self._need_leg("the prefill worker did not end an answer of one token")
            self.state = State.DECODING
            try:
                leg.generate(self._samples.handover(), self._handle)
            except OTHERS_MAY as error:
                return Loss(leg.worker_id, leg.incarnation, error)
            finally:
                self._note_prompt()  # not before: decode waits for the handle
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
        """Have it remembered who has the prompt's KV, once."""
        note, self._to_note = self._to_note, None
        if note is not None:
            note()

    def _need_leg(self, otherwise: str) -> DecodeLeg:
        if self._leg is None:
            raise Internal(otherwise)
        return self._leg

    async def _decode(self, leg: DecodeLeg) -> Loss | None:
        """All that comes of one decode worker."""
        try:
            return await self._decoding.run(leg, self._fingerprint)
        finally:
            self._handle = self._decoding.take_handle()  # given back at the end, if not used

    def _note_loss(self, loss: Loss) -> None:
        """Raises: BatonError when the request has lost too many workers."""
        self._failover.note(loss)
        self.state = State.MOVING
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
        """The next turn of the conversation may go where this one was decoded."""
        if self._leg is not None and self._asking is not None and self._decoding.has_drawn:
            job = self._job
            # What was drawn last was never fed back: nobody has its KV.
            drawn, worker_id = self._samples.drawn[:-1], self._leg.worker_id
            self._cluster.routing.note_answer(
                self._asking, job.tenant_salt, job.prompt_token_ids, drawn, worker_id
            )
