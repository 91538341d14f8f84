"""What the fake workers pretend to run: tokens from a hash, and why they end. Pure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from protos import common_pb2


@dataclass(frozen=True)
class FakeModel:
    """What a fake worker pretends to run."""

    name: str = "fake"
    tokenizer_digest: str = "00" * 32
    fingerprint: str = "ab" * 32
    alphabet: tuple[int, ...] = tuple(range(97, 123))
    """Ids it draws from."""
    eos_token_id: int = 0
    eos_at: int | None = None
    """Output position at which EOS is drawn."""
    context_window: int = 512
    vocab_size: int = 300
    block_size: int = 16

    def token(
        self,
        prompt: Sequence[int],
        params: common_pb2.SamplingParams,
        position: int,
        sample_index: int = 0,
    ) -> int:
        """The output token at `position` (0 is the first) of one sample."""
        if position == self.eos_at and not params.ignore_eos:
            return self.eos_token_id
        seed = repr((params.seed, tuple(prompt), position, sample_index)).encode()
        number = int.from_bytes(hashlib.blake2b(seed, digest_size=8).digest(), "little")
        return self.alphabet[number % len(self.alphabet)]

    def embedding(self, prompt: Sequence[int]) -> list[float]:
        """Four numbers of length 1."""
        digest = hashlib.blake2b(repr(tuple(prompt)).encode(), digest_size=4).digest()
        numbers = [byte - 127.5 for byte in digest]
        length = math.hypot(*numbers)
        return [number / length for number in numbers]

    def reason(
        self, token_id: int, params: common_pb2.SamplingParams, num_output_tokens: int
    ) -> common_pb2.FinishReason:
        """Why the answer ends with `token_id`, its `num_output_tokens`-th; UNSPECIFIED: it does
        not.
        """
        if token_id == self.eos_token_id and not params.ignore_eos:
            return common_pb2.FINISH_REASON_EOS
        if token_id in params.stop_token_ids:
            return common_pb2.FINISH_REASON_STOP_TOKEN
        if num_output_tokens >= params.max_tokens:
            return common_pb2.FINISH_REASON_LENGTH
        return common_pb2.FINISH_REASON_UNSPECIFIED


def logprobs(
    token_ids: Sequence[int], params: common_pb2.SamplingParams
) -> list[common_pb2.TokenLogprobs]:
    """One for each token, if they are asked for. A token is as likely as its id is low; those that
    come with one are its predecessor and those from it on.
    """
    if not params.HasField("logprobs"):
        return []

    def of(token_id: int) -> common_pb2.TokenLogprob:
        return common_pb2.TokenLogprob(token_id=token_id, logprob=-float(token_id))

    return [
        common_pb2.TokenLogprobs(chosen=of(token_id), top=map(of, _near(token_id, params.logprobs)))
        for token_id in token_ids
    ]


def prompt_logprobs(prompt: Sequence[int], num: int) -> list[common_pb2.TokenLogprobs]:
    """The same of a prompt's tokens, with `num` others each."""
    told = logprobs(prompt, common_pb2.SamplingParams(logprobs=num))
    told[0] = common_pb2.TokenLogprobs(
        chosen=common_pb2.TokenLogprob(token_id=prompt[0], logprob=math.nan)
    )
    return told


def _near(token_id: int, num: int) -> range:
    first = max(0, token_id - 1)
    return range(first, first + num)
