"""Each bad field is refused by its name; what is fine passes."""

from __future__ import annotations

from typing import Any

import pytest

from process.errors import InvalidArgument
from protos import inference_pb2
from services.router.config import RouterLimits
from services.router.validation import ModelBounds, check_request, check_tokens

LIMITS = RouterLimits(max_stop_strings=2, max_stop_chars=5, max_stop_token_ids=3, max_logprobs=4)
BOUNDS = ModelBounds(context_window=10, vocab_size=100)
NAN, INF = float("nan"), float("inf")


def _request(**fields: Any) -> inference_pb2.GenerateRequest:
    message = inference_pb2.GenerateRequest(**fields)
    if message.WhichOneof("prompt") is None:
        message.text = "hello"
    return message


def _check(message: inference_pb2.GenerateRequest) -> None:
    check_request(message, served=("m", "/path/m"), limits=LIMITS)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"model": "m"},
        {"model": "/path/m"},
        {"request_id": "a-B_c.1:2@x/y+z=", "tenant": "t", "session": "any words, é"},
        {"sampling": {"temperature": 0.0}},
        {"sampling": {"temperature": 2.0, "top_p": 1.0, "top_k": 50, "min_p": 0.0}},
        {"sampling": {"top_p": 1e-9, "min_p": 0.999}},
        {"sampling": {"n": 1, "repetition_penalty": 1.0}},
        {"sampling": {"stop": ["a", "abcde"], "stop_token_ids": [1, 2, 3], "logprobs": 4}},
        {"chat": {"messages": [{"role": "user", "content": ""}]}},
        {"token_ids": {"ids": [0]}},
        {"budget_ms": 3_600_000},
    ],
)
def test_what_is_fine_passes(fields: dict[str, Any]) -> None:
    _check(_request(**fields))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"model": "other"}, "model"),
        ({"request_id": "a b"}, "request_id"),
        ({"request_id": "x" * 129}, "request_id"),
        ({"request_id": "\u00e9"}, "request_id"),
        ({"request_id": "a\n"}, "request_id"),
        ({"tenant": "x" * 65}, "tenant"),
        ({"tenant": "a\x00b"}, "tenant"),
        ({"session": "x" * 257}, "session"),
        ({"session": "a\x1b[0m"}, "session"),
        ({"adapter": "lora"}, "adapter"),
        ({"budget_ms": 3_600_001}, "budget_ms"),
        ({"sampling": {"temperature": -0.1}}, "sampling.temperature"),
        ({"sampling": {"temperature": NAN}}, "sampling.temperature"),
        ({"sampling": {"temperature": INF}}, "sampling.temperature"),
        ({"sampling": {"temperature": 1e-300}}, "sampling.temperature"),
        ({"sampling": {"temperature": 1e9}}, "sampling.temperature"),
        ({"sampling": {"top_p": 0.0}}, "sampling.top_p"),
        ({"sampling": {"top_p": 1.0001}}, "sampling.top_p"),
        ({"sampling": {"top_p": NAN}}, "sampling.top_p"),
        ({"sampling": {"min_p": 1.0}}, "sampling.min_p"),
        ({"sampling": {"min_p": -0.1}}, "sampling.min_p"),
        ({"sampling": {"min_p": NAN}}, "sampling.min_p"),
        ({"sampling": {"top_k": 2**31}}, "sampling.top_k"),
        ({"sampling": {"max_tokens": 0}}, "sampling.max_tokens"),
        ({"sampling": {"logprobs": 5}}, "sampling.logprobs"),
        ({"sampling": {"stop": ["a", "b", "c"]}}, "sampling.stop"),
        ({"sampling": {"stop": ["a", ""]}}, "sampling.stop[1]"),
        ({"sampling": {"stop": ["abcdef"]}}, "sampling.stop[0]"),
        ({"sampling": {"stop_token_ids": [1, 2, 3, 4]}}, "sampling.stop_token_ids"),
        ({"sampling": {"n": 2}}, "sampling.n"),
        ({"sampling": {"presence_penalty": 0.1}}, "sampling.presence_penalty"),
        ({"sampling": {"frequency_penalty": NAN}}, "sampling.frequency_penalty"),
        ({"sampling": {"repetition_penalty": 1.1}}, "sampling.repetition_penalty"),
        ({"sampling": {"logit_bias": {1: 1.0}}}, "sampling.logit_bias"),
        ({"sampling": {"allowed_token_ids": [1]}}, "sampling.allowed_token_ids"),
        ({"sampling": {"trace": True}}, "sampling.trace"),
        ({"sampling": {"json_schema": "{}"}}, "sampling.json_schema"),
        ({"sampling": {"regex": ""}}, "sampling.regex"),
        ({"sampling": {"ebnf": "x"}}, "sampling.ebnf"),
        ({"sampling": {"choice": {"values": ["a"]}}}, "sampling.choice"),
        ({"token_ids": {"ids": []}}, "token_ids.ids"),
        ({"chat": {"messages": []}}, "chat.messages"),
        ({"chat": {"messages": [{"role": "", "content": "x"}]}}, "chat.messages[0].role"),
        ({"chat": {"messages": [{"role": "a b", "content": "x"}]}}, "chat.messages[0].role"),
        (
            {"chat": {"messages": [{"role": "u", "name": "x" * 129}]}},
            "chat.messages[0].name",
        ),
    ],
)
def test_each_bad_field_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        _check(_request(**fields))
    assert caught.value.field == field


def test_every_sampling_field_is_checked_or_passed_on() -> None:
    """A field added to the proto must be decided on here, or it would be ignored in silence."""
    from protos import common_pb2

    known = {
        *("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "seed"),
        *("stop_token_ids", "stop", "include_stop_text", "ignore_eos", "logprobs"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
        *("allowed_token_ids", "n", "json_schema", "regex", "ebnf", "choice", "trace"),
    }
    assert {field.name for field in common_pb2.SamplingParams.DESCRIPTOR.fields} == known


def test_an_unset_and_an_empty_prompt() -> None:
    with pytest.raises(InvalidArgument, match=r"^prompt: is not set"):
        _check(inference_pb2.GenerateRequest())
    with pytest.raises(InvalidArgument, match=r"^text: is empty"):
        _check(inference_pb2.GenerateRequest(text=""))


def _tokens(ids: list[int], **fields: Any) -> int:
    return check_tokens(ids, _request(**fields), bounds=BOUNDS, limits=LIMITS)


def test_max_tokens_defaults_to_the_room_that_is_left() -> None:
    assert _tokens([1] * 4) == 6
    assert _tokens([1] * 9) == 1
    wide = ModelBounds(10_000, 100)
    assert check_tokens([1], _request(), bounds=wide, limits=LIMITS) == 256


def test_max_tokens_up_to_the_window() -> None:
    assert _tokens([1] * 4, sampling={"max_tokens": 6}) == 6
    with pytest.raises(InvalidArgument, match=r"^sampling.max_tokens: is 7, .* room for 6"):
        _tokens([1] * 4, sampling={"max_tokens": 7})


@pytest.mark.parametrize(
    ("ids", "fields", "message"),
    [
        ([], {}, "text: has no tokens"),
        ([1] * 10, {}, "text: has 10 tokens"),
        ([1] * 10, {"token_ids": {"ids": [1]}}, "token_ids.ids: has 10 tokens"),
        ([1] * 10, {"chat": {"messages": [{"role": "u"}]}}, "chat: has 10 tokens"),
        ([1, 100], {"token_ids": {"ids": [1]}}, "token_ids.ids[1]: is 100"),
        ([1], {"sampling": {"stop_token_ids": [5, 100]}}, "sampling.stop_token_ids[1]: is 100"),
        ([1], {"sampling": {"min_tokens": 4, "max_tokens": 3}}, "sampling.min_tokens: is 4"),
    ],
)
def test_what_needs_the_model(ids: list[int], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        _tokens(ids, **fields)
    assert str(caught.value).startswith(message)
