"""Decoding: a decode worker's part of an answer: what comes of it is shown, to the answer's end or
until the worker lets go of it.

    taking   tokens come, samples end
    closing  the last sample is over; the worker may have to be told, and gives its account
    lost     the worker moved the stream, broke, or gave it up: what no other worker could do better
             is raised, everything else is a Loss

Law: `handle` is whoever reads it; what came with a move lies there from the moment on at which it
was taken. Finds no workers. One request, one task; `run` once for each worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence

from process import logs
from process.errors import Unavailable
from protos import common_pb2, decode_pb2, inference_pb2
from services.router import kv_account
from services.router.answer import Answer
from services.router.decode_leg import Arrival, DecodeLeg, SampleNews
from services.router.delivery import Delivery
from services.router.failover import OTHERS_MAY, Loss
from services.router.job import Cluster
from services.router.kv_account import KvAccount
from services.router.samples import Samples
from services.router.sealed_handle import SealedHandle
from services.router.times import StageTimes

logger = logging.getLogger(__name__)

_Account = decode_pb2.DecodeFinished | decode_pb2.DecodeMoved
_Last = tuple[Answer, inference_pb2.GenerateResponse]
"""The answer that ended last, and its message, not sent yet."""


class Decoding:
    """See the module."""

    def __init__(
        self,
        cluster: Cluster,
        request_id: str,
        samples: Samples,
        delivery: Delivery,
        account: KvAccount,
        times: StageTimes,
    ) -> None:
        self.handle: SealedHandle | None = None
        """On the KV of prompt and tokens, of a worker that moved the stream."""
        self.has_drawn = False
        """Whether any token came of a decode worker."""
        self._cluster = cluster
        self._request_id = request_id
        self._samples = samples
        self._delivery = delivery
        self._account = account
        self._times = times

    def take_handle(self) -> SealedHandle | None:
        """The handle, which is the caller's from now on."""
        handle, self.handle = self.handle, None
        return handle

    async def run(self, leg: DecodeLeg, fingerprint: str) -> Loss | None:
        """Show all that comes over `leg`, the last message with the request's account included.

        Args: fingerprint: of the model that draws.
        Returns: why the answer must go on elsewhere; None: it is over.
        Raises: BatonError, for what no other worker could do better.
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
            # A stop string: only text could show it, so the worker must be told.
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

    async def _take(self, leg: DecodeLeg, news: SampleNews) -> _Last | None:
        """Show what came of one sample. Returns: its message not sent yet, if it ended last."""
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

    def _loss(self, leg: DecodeLeg, arrival: Arrival) -> Loss | None:
        """What a leg's end means whose answer is not over; None: its last events are still to be
        taken. Raises: see `run`."""
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

    def _moved(self, leg: DecodeLeg, news: decode_pb2.DecodeMoved) -> Loss:
        """Its worker leaves: what it has sent must be what came."""
        self._samples.check_sent(news.num_output_tokens)
        self._close(leg, news, kv_account.MOVED)
        if not self._samples.can_go_on:
            raise Unavailable(
                f"decode worker {leg.worker_id} leaves in the middle of a beam search's answer",
                retry_after_s=0.0,
            )
        if self.handle is None:
            self._account.recompute_for(kv_account.MOVED)
        return Loss(leg.worker_id, leg.incarnation, None)

    def _close(self, leg: DecodeLeg, account: _Account, ended_by: str = "") -> None:
        """The worker's own account of what it did."""
        if account.HasField("leg"):
            self._account.add(account.leg, leg.block_size, ended_by)
        else:
            self._account.add_silent(leg.worker_id, leg.incarnation, ended_by)
        parts = seconds_of(account.times)
        self._times.mark_split(parts, rest="stream", wire="decode_wire")

    async def _account_of(self, leg: DecodeLeg) -> _Account | None:
        """The cancelled worker's account of its leg; None when it does not come in time."""
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
    """A worker's stages."""
    return [(entry.stage, entry.seconds) for entry in times]


def _account_in(arrival: Arrival) -> _Account | None:
    return arrival.moved.news if arrival.moved is not None else arrival.finished
