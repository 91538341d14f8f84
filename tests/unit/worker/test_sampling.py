"""Sampling at a worker's door: every field arrives, and what is not served is refused by its
name.
"""

from __future__ import annotations

import pytest

from process.errors import InvalidArgument
from protos import common_pb2
from services.worker.sampling import sampling_from_proto


def params(**fields: object) -> common_pb2.SamplingParams:
    values = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 7, "seed": 2**64 - 1} | fields
    return common_pb2.SamplingParams(**values)  # type: ignore[arg-type]


def test_every_served_field_arrives() -> None:
    sampling = sampling_from_proto(
        params(
            top_k=5,
            min_p=0.1,
            min_tokens=2,
            stop_token_ids=[3, 4],
            ignore_eos=True,
            logprobs=0,
            stop=["the router's"],
            n=3,
        ),
        sample_index=2,
    )
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.5, 0.9, 7)
    assert (sampling.seed, sampling.sample_index) == (2**64 - 1, 2)
    assert (sampling.top_k, sampling.min_p, sampling.min_tokens) == (5, 0.1, 2)
    assert sampling.stop_token_ids == {3, 4}
    assert sampling.ignore_eos
    assert sampling.logprobs == 0
    assert sampling_from_proto(params(), 0).logprobs is None


@pytest.mark.parametrize("name", ["temperature", "top_p", "max_tokens", "seed"])
def test_what_the_router_forgot_is_named(name: str) -> None:
    message = params()
    message.ClearField(name)
    with pytest.raises(InvalidArgument) as caught:
        sampling_from_proto(message, 0)
    assert caught.value.field == f"sampling.{name}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", 0.1),
        ("frequency_penalty", -0.1),
        ("repetition_penalty", 1.1),
        ("logit_bias", {1: 2.0}),
        ("allowed_token_ids", [1]),
        ("trace", True),
        ("json_schema", "{}"),
        ("regex", "a*"),
        ("ebnf", "root ::= x"),
        ("choice", common_pb2.StringList(values=["a"])),
    ],
)
def test_what_is_not_served_is_named(name: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match="not served") as caught:
        sampling_from_proto(params(**{name: value}), 0)
    assert caught.value.field == f"sampling.{name}"


def test_an_off_value_is_no_wish() -> None:
    sampling_from_proto(params(repetition_penalty=1.0, presence_penalty=0.0), 0)
