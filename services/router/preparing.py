"""A checked request made ready to be served: its tokens, every default filled in, its answers.

Knows the tokenizer, the model's bounds and the tenants' salts; does not know who serves it. No I/O
but the encoder's threads. One asyncio loop.
"""

from __future__ import annotations

from dataclasses import dataclass

from checkpoints.sampling_defaults import SamplingDefaults
from process.errors import InvalidArgument
from protos import common_pb2, inference_pb2
from services.router import identity, sampling_defaults, validation
from services.router.answer import NO_TOOL_CALLS, Answer
from services.router.candidates import Candidates
from services.router.config import RouterLimits
from services.router.inflight import Attempt
from services.router.job import Job
from services.router.prompt import PromptEncoder
from services.router.tenants import TenantSalts
from services.router.times import StageTimes
from tokens.bad_words import bad_word_ids
from tokens.text import OutputText
from tokens.tool_calls import ToolCallEnds


@dataclass(frozen=True)
class Preparer:
    """See the module."""

    candidates: Candidates
    encoder: PromptEncoder
    defaults: SamplingDefaults
    limits: RouterLimits
    salts: TenantSalts

    async def prepare(
        self, request: inference_pb2.GenerateRequest, attempt: Attempt, times: StageTimes
    ) -> tuple[Job, list[Answer]]:
        """Tokens, the checks that need them, and every default.

        Raises: InvalidArgument naming the field; Unavailable while no worker can be used.
        """
        bounds = self.candidates.bounds()
        prompt = await self.encoder.encode(request)
        max_tokens = validation.check_tokens(
            prompt.token_ids, request, bounds=bounds, limits=self.limits
        )
        times.mark("tokenize")
        tenant, request_id, asked = attempt.tenant, attempt.request_id, request.sampling
        is_prompt_only = request.embed or max_tokens == 0
        if is_prompt_only:
            max_tokens = 1  # a worker answers with the token that it draws, whatever it is
        ends = self._tool_call_ends(asked)
        seed = asked.seed if asked.HasField("seed") else identity.seed_of(tenant, request_id)
        sampling = sampling_defaults.fill(
            asked,
            self.defaults,
            max_tokens=max_tokens,
            seed=seed,
            bad_words=self._bad_word_ids(asked),
            stop_token_ids=sorted(ends.token_ids),
        )
        salt = self.salts.of(tenant)
        job = Job(
            request_id=request_id,
            leg_id=identity.leg_id(request_id),
            tenant=tenant,
            tenant_salt=salt,
            prompt_token_ids=prompt.token_ids,
            sampling=sampling,
            affinity=identity.affinity(salt, request.session, prompt.token_ids),
            priority=request.priority,
            adapter=self.candidates.adapter(request.adapter),
            wants_embedding=request.embed,
            prompt_logprobs=(
                request.prompt_logprobs if request.HasField("prompt_logprobs") else None
            ),
            is_prompt_only=is_prompt_only,
        )
        outputs = [
            OutputText(
                self.encoder.tokenizer,
                stop=asked.stop,
                include_stop_text=asked.include_stop_text,
                tool_call_ends=ends.strings,
                skip_special_tokens=not request.show_special_tokens,
                context_ids=prompt.context_ids,
            )
            for _ in range(sampling.n)
        ]
        answers = [
            Answer(request_id, output, sample_index=index, tool_call_ends=ends)
            for index, output in enumerate(outputs)
        ]
        return job, answers

    def _tool_call_ends(self, asked: common_pb2.SamplingParams) -> ToolCallEnds:
        if not asked.stop_at_tool_call:
            return NO_TOOL_CALLS
        ends = self.encoder.tool_call_ends
        if not ends:
            raise InvalidArgument(
                "sampling.stop_at_tool_call",
                "this model's tokenizer and chat template name no end of a tool call; name it in "
                "stop",
            )
        return ends

    def _bad_word_ids(self, asked: common_pb2.SamplingParams) -> list[tuple[int, ...]]:
        try:
            return bad_word_ids(self.encoder.tokenizer, asked.bad_words)
        except ValueError as error:
            raise InvalidArgument("sampling.bad_words", str(error)) from error
