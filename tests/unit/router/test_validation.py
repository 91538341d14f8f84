"""Each bad field is refused by its name; what is fine passes."""

from __future__ import annotations

from typing import Any

import pytest

from process.rpc_errors import InvalidArgument
from protos import inference_pb2
from services.router.config import RouterLimits
from services.router.validation import ModelBounds, check_request, check_tokens, check_vocabulary

LIMITS = RouterLimits(
    max_stop_strings=2,
    max_stop_chars=5,
    max_stop_token_ids=3,
    max_logprobs=4,
    max_logit_bias=2,
    max_bad_words=2,
    max_choices=4,
    max_grammar_chars=64,
)
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
        {"sampling": {"n": 16, "repetition_penalty": 100.0, "trace": True}},
        {"sampling": {"presence_penalty": 2.0, "frequency_penalty": -2.0}},
        {"sampling": {"logit_bias": {1: -100.0, 99: 100.0}, "allowed_token_ids": [0, 99]}},
        {"sampling": {"bad_words": ["ab", " b"], "bad_word_ids": [{"ids": [1, 2]}]}},
        {"sampling": {"no_repeat_ngram": 3, "stop_at_tool_call": True}},
        {"sampling": {"json_schema": "{}"}},
        {"sampling": {"json_schema": "true"}},
        {"sampling": {"regex": "a*"}},
        {"sampling": {"ebnf": 'root ::= "x"'}},
        {"sampling": {"beam": {"num_beams": 4, "length_penalty": -1.5}, "n": 4}},
        {"sampling": {"beam": {"num_beams": 2, "early_stopping": True}, "temperature": 0.0}},
        {"sampling": {"beam": {"num_beams": 2}, "top_p": 1.0, "top_k": 0, "ignore_eos": True}},
        {"sampling": {"choice": {"values": ["a", "b"]}}},
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
        ({"adapter": "x" * 129}, "adapter"),
        ({"adapter": "a\x00"}, "adapter"),
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
        ({"sampling": {"max_tokens": 0, "n": 2}}, "sampling.n"),
        ({"sampling": {"max_tokens": 0, "beam": {"num_beams": 2}}}, "sampling.beam"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 0, "embed": True}, "prompt_logprobs"),
        ({"sampling": {"logprobs": 5}}, "sampling.logprobs"),
        ({"sampling": {"stop": ["a", "b", "c"]}}, "sampling.stop"),
        ({"sampling": {"stop": ["a", ""]}}, "sampling.stop[1]"),
        ({"sampling": {"stop": ["abcdef"]}}, "sampling.stop[0]"),
        ({"sampling": {"stop_token_ids": [1, 2, 3, 4]}}, "sampling.stop_token_ids"),
        ({"sampling": {"n": 17}}, "sampling.n"),
        ({"sampling": {"presence_penalty": 2.1}}, "sampling.presence_penalty"),
        ({"sampling": {"presence_penalty": INF}}, "sampling.presence_penalty"),
        ({"sampling": {"frequency_penalty": -2.1}}, "sampling.frequency_penalty"),
        ({"sampling": {"frequency_penalty": NAN}}, "sampling.frequency_penalty"),
        ({"sampling": {"repetition_penalty": -1.0}}, "sampling.repetition_penalty"),
        ({"sampling": {"repetition_penalty": 0.009}}, "sampling.repetition_penalty"),
        ({"sampling": {"repetition_penalty": NAN}}, "sampling.repetition_penalty"),
        ({"sampling": {"logit_bias": {7: 100.1}}}, "sampling.logit_bias[7]"),
        ({"sampling": {"logit_bias": {7: NAN}}}, "sampling.logit_bias[7]"),
        ({"sampling": {"logit_bias": {1: 1.0, 2: 1.0, 3: 1.0}}}, "sampling.logit_bias"),
        ({"sampling": {"bad_words": ["a", "b", "c"]}}, "sampling.bad_words"),
        ({"sampling": {"bad_words": ["a", ""]}}, "sampling.bad_words[1]"),
        ({"sampling": {"bad_words": [" "]}}, "sampling.bad_words[0]"),
        ({"sampling": {"bad_words": ["abcdef"]}}, "sampling.bad_words[0]"),
        ({"sampling": {"bad_word_ids": [{"ids": [1]}, {}]}}, "sampling.bad_word_ids[1].ids"),
        ({"sampling": {"bad_word_ids": [{"ids": [1]}] * 3}}, "sampling.bad_word_ids"),
        ({"sampling": {"no_repeat_ngram": 65}}, "sampling.no_repeat_ngram"),
        ({"sampling": {"json_schema": ""}}, "sampling.json_schema"),
        ({"sampling": {"json_schema": "{"}}, "sampling.json_schema"),
        ({"sampling": {"json_schema": "[]"}}, "sampling.json_schema"),
        ({"sampling": {"json_schema": "[" * 60}}, "sampling.json_schema"),
        ({"sampling": {"json_schema": "true" + " " * 61}}, "sampling.json_schema"),
        ({"sampling": {"regex": ""}}, "sampling.regex"),
        ({"sampling": {"regex": "a" * 65}}, "sampling.regex"),
        ({"sampling": {"ebnf": ""}}, "sampling.ebnf"),
        ({"sampling": {"choice": {"values": []}}}, "sampling.choice.values"),
        ({"sampling": {"choice": {"values": ["a", ""]}}}, "sampling.choice.values[1]"),
        ({"sampling": {"choice": {"values": ["a"] * 5}}}, "sampling.choice.values"),
        ({"sampling": {"choice": {"values": ["a" * 33, "b" * 32]}}}, "sampling.choice"),
        ({"sampling": {"beam": {"num_beams": 1}}}, "sampling.beam.num_beams"),
        ({"sampling": {"beam": {"num_beams": 17}}}, "sampling.beam.num_beams"),
        ({"sampling": {"beam": {"num_beams": 2}, "n": 3}}, "sampling.n"),
        (
            {"sampling": {"beam": {"num_beams": 2, "length_penalty": NAN}}},
            "sampling.beam.length_penalty",
        ),
        ({"sampling": {"beam": {"num_beams": 2}, "temperature": 0.5}}, "sampling.temperature"),
        ({"sampling": {"beam": {"num_beams": 2}, "top_k": 3}}, "sampling.top_k"),
        ({"sampling": {"beam": {"num_beams": 2}, "min_tokens": 1}}, "sampling.min_tokens"),
        ({"sampling": {"beam": {"num_beams": 2}, "stop": ["a"]}}, "sampling.stop"),
        ({"sampling": {"beam": {"num_beams": 2}, "logprobs": 0}}, "sampling.logprobs"),
        ({"sampling": {"beam": {"num_beams": 2}, "trace": True}}, "sampling.trace"),
        ({"sampling": {"beam": {"num_beams": 2}, "regex": "a"}}, "sampling.regex"),
        (
            {"sampling": {"beam": {"num_beams": 2}, "stop_at_tool_call": True}},
            "sampling.stop_at_tool_call",
        ),
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
        *("bad_words", "bad_word_ids", "no_repeat_ngram", "stop_at_tool_call", "beam"),
    }
    assert {field.name for field in common_pb2.SamplingParams.DESCRIPTOR.fields} == known


def test_json_nested_beyond_the_parser_is_refused_by_name() -> None:
    deep = RouterLimits()
    with pytest.raises(InvalidArgument, match=r"^sampling.json_schema: is nested too deep"):
        check_request(_request(sampling={"json_schema": "[" * 60_000}), served=("m",), limits=deep)


def test_an_unset_and_an_empty_prompt() -> None:
    with pytest.raises(InvalidArgument, match=r"^prompt: is not set"):
        _check(inference_pb2.GenerateRequest())
    with pytest.raises(InvalidArgument, match=r"^text: is empty"):
        _check(inference_pb2.GenerateRequest(text=""))


def _tokens(ids: list[int], **fields: Any) -> int:
    return check_tokens(ids, _request(**fields), bounds=BOUNDS, limits=LIMITS)


def test_ids_are_held_against_the_vocabulary_up_to_the_highest() -> None:
    for token in (100, 2**31, 2**32 - 1):
        ids = inference_pb2.TokenIds(ids=[1, token]).ids
        with pytest.raises(InvalidArgument, match=rf"^f\[1\]: is {token}"):
            check_vocabulary("f", ids, BOUNDS)


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
        ([1], {"sampling": {"allowed_token_ids": [100]}}, "sampling.allowed_token_ids[0]: is 100"),
        ([1], {"sampling": {"logit_bias": {100: 1.0}}}, "sampling.logit_bias[100]: is outside"),
        (
            [1],
            {"sampling": {"bad_word_ids": [{"ids": [1]}, {"ids": [2, 100]}]}},
            "sampling.bad_word_ids[1].ids[1]: is 100",
        ),
    ],
)
def test_what_needs_the_model(ids: list[int], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        _tokens(ids, **fields)
    assert str(caught.value).startswith(message)
