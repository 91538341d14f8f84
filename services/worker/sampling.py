"""SamplingParams of the wire to the engine's Sampling, refusing by name what this version does not
serve.

Stop strings are the router's (text is made there); n is the router's too: a worker sees one sample.
Ranges are checked by the engine at `reserve`. Pure.
"""

from __future__ import annotations

from engine.request import Sampling
from process.errors import InvalidArgument
from protos import common_pb2

_REQUIRED = ("temperature", "top_p", "max_tokens", "seed")


def sampling_from_proto(params: common_pb2.SamplingParams, sample_index: int) -> Sampling:
    """Translate. Raises: InvalidArgument naming the field that is absent or not served."""
    for name in _REQUIRED:
        if not params.HasField(name):
            raise InvalidArgument(f"sampling.{name}", "is absent; the router sets it")
    _refuse_unserved(params)
    return Sampling(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        min_tokens=params.min_tokens,
        seed=params.seed,
        sample_index=sample_index,
        stop_token_ids=frozenset(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs if params.HasField("logprobs") else None,
    )


def _refuse_unserved(params: common_pb2.SamplingParams) -> None:
    asked = {
        "presence_penalty": params.presence_penalty != 0.0,
        "frequency_penalty": params.frequency_penalty != 0.0,
        "repetition_penalty": params.repetition_penalty not in (0.0, 1.0),
        "logit_bias": bool(params.logit_bias),
        "allowed_token_ids": bool(params.allowed_token_ids),
        "trace": params.trace,
    }
    grammar = params.WhichOneof("grammar")
    if grammar is not None:
        asked[grammar] = True
    for name, is_asked in asked.items():
        if is_asked:
            raise InvalidArgument(f"sampling.{name}", "is not served by this version")
