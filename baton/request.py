"""Makes the protobuf GenerateRequest of a request from Python values. Pure.

A value of None leaves the default of the model. Only values that the protobuf message cannot hold
are refused here; the router checks the others, and its errors name the field.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from baton import errors
from protos import common_pb2, inference_pb2

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A prompt: text, token ids, or chat messages ({"role": ..., "content": ...}) with tool calls and
their results in the format of OpenAI."""

DEFAULT_TIMEOUT_S = 300.0
"""Time limit of a whole generation. The bundled model fills its context window on one core in a
tenth of it."""


def build_request(
    prompt: Prompt,
    *,
    max_tokens: int | None = None,
    min_tokens: int = 0,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    seed: int | None = None,
    n: int = 1,
    stop: str | Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    include_stop_text: bool = False,
    stop_at_tool_call: bool = False,
    ignore_eos: bool = False,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    repetition_penalty: float = 1.0,
    logit_bias: Mapping[int, float] | None = None,
    allowed_token_ids: Sequence[int] | None = None,
    bad_words: Sequence[str | Sequence[int]] = (),
    no_repeat_ngram: int = 0,
    json_schema: str | bool | Mapping[str, Any] | None = None,
    regex: str | None = None,
    ebnf: str | None = None,
    choice: Sequence[str] | None = None,
    num_beams: int = 1,
    length_penalty: float | None = None,
    early_stopping: bool = False,
    trace: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
    template_arguments: Mapping[str, Any] | None = None,
    adapter: str = "",
    priority: int = 0,
    session: str = "",
    model: str = "",
    request_id: str = "",
    tenant: str = "",
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> inference_pb2.GenerateRequest:
    """Build the GenerateRequest of one request. The arguments are the fields of `SamplingParams` in
    protos/common.proto and of `GenerateRequest` in protos/inference.proto.

    Args: bad_words: each is a text or its token ids. json_schema: the schema as text or as a value.
        tools: the tools of a chat in the format of OpenAI; the model's calls arrive as text.
        template_arguments: further variables of the chat template.
    Raises: InvalidArgument for a value that the protobuf message cannot hold.
    """
    with _refusing("sampling"):
        sampling = common_pb2.SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=seed,
            n=n,
            stop=[stop] if isinstance(stop, str) else list(stop),
            stop_token_ids=list(stop_token_ids),
            include_stop_text=include_stop_text,
            stop_at_tool_call=stop_at_tool_call,
            ignore_eos=ignore_eos,
            logprobs=logprobs,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            repetition_penalty=repetition_penalty,
            logit_bias=dict(logit_bias or {}),
            bad_words=[word for word in bad_words if isinstance(word, str)],
            bad_word_ids=[
                common_pb2.TokenSequence(ids=word)
                for word in bad_words
                if not isinstance(word, str)
            ],
            no_repeat_ngram=no_repeat_ngram,
            trace=trace,
        )
    _set_allowed(sampling, allowed_token_ids)
    _set_grammar(sampling, json_schema=json_schema, regex=regex, ebnf=ebnf, choice=choice)
    _set_beam(sampling, num_beams, length_penalty, early_stopping)
    request = _base_request(
        model=model,
        sampling=sampling,
        request_id=request_id,
        tenant=tenant,
        adapter=adapter,
        priority=priority,
        session=session,
        prompt_logprobs=prompt_logprobs,
        timeout_s=timeout_s,
    )
    _set_prompt(request, prompt)
    _set_tools(request, tools, template_arguments)
    return request


def build_embed_request(
    prompt: Prompt,
    *,
    adapter: str = "",
    priority: int = 0,
    session: str = "",
    model: str = "",
    request_id: str = "",
    tenant: str = "",
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> inference_pb2.GenerateRequest:
    """Build a request for a prompt's embedding. Raises: InvalidArgument as `build_request`."""
    request = _base_request(
        model=model,
        request_id=request_id,
        tenant=tenant,
        adapter=adapter,
        priority=priority,
        session=session,
        embed=True,
        timeout_s=timeout_s,
    )
    _set_prompt(request, prompt)
    return request


def _base_request(*, timeout_s: float, **fields: Any) -> inference_pb2.GenerateRequest:
    with _refusing("request"):
        return inference_pb2.GenerateRequest(budget_ms=max(1, int(timeout_s * 1000)), **fields)


def _set_allowed(sampling: common_pb2.SamplingParams, allowed: Sequence[int] | None) -> None:
    if allowed is None:
        return
    if not allowed:
        raise errors.InvalidArgument("sampling.allowed_token_ids", "allows nothing")
    with _refusing("sampling.allowed_token_ids"):
        sampling.allowed_token_ids.extend(allowed)


def _set_grammar(
    sampling: common_pb2.SamplingParams,
    *,
    json_schema: str | bool | Mapping[str, Any] | None,
    regex: str | None,
    ebnf: str | None,
    choice: Sequence[str] | None,
) -> None:
    """Set the grammar of a request. Raises: InvalidArgument for more than one of them."""
    asked = {"json_schema": json_schema, "regex": regex, "ebnf": ebnf, "choice": choice}
    names = [name for name, value in asked.items() if value is not None]
    if len(names) > 1:
        raise errors.InvalidArgument(
            f"sampling.{names[1]}", f"does not go with {names[0]}: an output has one grammar"
        )
    with _refusing(f"sampling.{names[0]}" if names else "sampling"):
        if json_schema is not None:
            sampling.json_schema = (
                json_schema if isinstance(json_schema, str) else json.dumps(json_schema)
            )
        elif regex is not None:
            sampling.regex = regex
        elif ebnf is not None:
            sampling.ebnf = ebnf
        elif choice is not None:
            sampling.choice.SetInParent()
            sampling.choice.values.extend(choice)


def _set_beam(
    sampling: common_pb2.SamplingParams,
    num_beams: int,
    length_penalty: float | None,
    early_stopping: bool,
) -> None:
    if num_beams == 1:
        if length_penalty is not None or early_stopping:
            name = "length_penalty" if length_penalty is not None else "early_stopping"
            raise errors.InvalidArgument(f"sampling.beam.{name}", "needs num_beams of at least 2")
        return
    with _refusing("sampling.beam"):
        beam = common_pb2.BeamParams(
            num_beams=num_beams, length_penalty=length_penalty, early_stopping=early_stopping
        )
    sampling.beam.CopyFrom(beam)


def _set_prompt(request: inference_pb2.GenerateRequest, prompt: Prompt) -> None:
    with _refusing("prompt"):
        if isinstance(prompt, str):
            request.text = prompt
        elif prompt and isinstance(prompt[0], Mapping):
            request.chat.SetInParent()
            for message in prompt:
                _add_message(request, message)  # type: ignore[arg-type]
        else:
            request.token_ids.SetInParent()
            request.token_ids.ids.extend(prompt)  # type: ignore[arg-type]


def _add_message(request: inference_pb2.GenerateRequest, message: Mapping[str, Any]) -> None:
    fields = {key: value for key, value in message.items() if key != "tool_calls"}
    added = request.chat.messages.add(**fields)
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = function["arguments"]
        added.tool_calls.add(
            id=call.get("id", ""),
            name=function["name"],
            arguments=arguments if isinstance(arguments, str) else json.dumps(arguments),
        )


def _set_tools(
    request: inference_pb2.GenerateRequest,
    tools: Sequence[Mapping[str, Any]],
    arguments: Mapping[str, Any] | None,
) -> None:
    """Set the tools of a chat. Raises: InvalidArgument without chat messages: only a chat template
    uses tools."""
    for name, given in (("tools", tools), ("template_arguments", arguments)):
        if given and request.WhichOneof("prompt") != "chat":
            raise errors.InvalidArgument(f"chat.{name}", "needs chat messages")
    with _refusing("chat.tools"):
        if tools:
            request.chat.tools.extend(json.dumps(tool) for tool in tools)
        if arguments:
            request.chat.template_arguments = json.dumps(arguments)


@contextlib.contextmanager
def _refusing(field: str) -> Iterator[None]:
    """Context in which a value that the protobuf message cannot hold becomes InvalidArgument,
    naming the field."""
    try:
        yield
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise errors.InvalidArgument(field, str(error).splitlines()[0]) from error
