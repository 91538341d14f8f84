"""Delivery: the messages of one request on their way to its client, and what its last ones say.

Each sample ends with a message of its own; the one that ends last carries the request's account.
Knows the account and the times; no worker and no state. One request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from process.errors import Internal
from protos import common_pb2, inference_pb2
from services.router.answer import Answer, shows_something
from services.router.job import Job
from services.router.kv_account import KvAccount
from services.router.samples import Samples
from services.router.times import StageTimes

Send = Callable[[inference_pb2.GenerateResponse], Awaitable[None]]


class Delivery:
    """See the module."""

    def __init__(
        self, send: Send, job: Job, samples: Samples, account: KvAccount, times: StageTimes
    ) -> None:
        self._send = send
        self._job = job
        self._samples = samples
        self._account = account
        self._times = times
        self.embedding: Sequence[float] = ()
        """Of the prompt, once a worker gave it."""

    async def show(self, message: inference_pb2.GenerateResponse) -> None:
        """Send what is not empty, with the prompt's usage as it is known so far."""
        if shows_something(message):
            message.usage.num_prompt_tokens = len(self._job.prompt_token_ids)
            message.usage.num_cached_tokens = self._account.num_cached_tokens
            await self._send(message)

    async def end(self, answer: Answer, message: inference_pb2.GenerateResponse) -> None:
        """One sample is over, and another one goes on."""
        await self._send(self._ended(answer, message))

    async def end_last(
        self,
        answer: Answer,
        message: inference_pb2.GenerateResponse,
        *,
        model: str,
        fingerprint: str,
    ) -> None:
        """The end of the last sample, with the request's account."""
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
        if job.is_prompt_only:  # whatever the token was that came with it
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
        self, answer: Answer, message: inference_pb2.GenerateResponse
    ) -> inference_pb2.GenerateResponse:
        """`message` with what ends its sample."""
        self._samples.say_ended(answer)
        return answer.last(
            message,
            num_prompt_tokens=len(self._job.prompt_token_ids),
            num_cached_tokens=self._account.num_cached_tokens,
            seed=self._job.sampling.seed,
        )
