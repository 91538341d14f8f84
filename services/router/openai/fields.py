"""Every field of the two bodies: what it may hold, and what it means here. Values only.

A field of OpenAI's API that is not served is in the table all the same, as `Refused`: it is
answered by its name and a reason. What is in no table is refused as unknown.
"""

from __future__ import annotations

from services.router.openai.records import Field, Record, Refused, Tagged
from services.router.openai.shapes import (
    AnyObject,
    Either,
    Flag,
    Integer,
    ListOf,
    MapOf,
    Number,
    OneOf,
    Text,
)

MAX_PROMPTS = 64
"""Prompts in one body of /v1/completions."""
MAX_INPUTS = 2048
"""Inputs in one body of /v1/embeddings."""
MAX_TOOLS = 128
_MAX_ID = 2**31 - 1
_MAX_MESSAGES = 16_384
_MAX_BUDGET_MS = 2**32 - 1

TOKEN_IDS = ListOf(Integer(0, _MAX_ID, what="a token id"), least=1)
_NAME = Text(1, 256)
_LABEL = Text(0, 512)

_OWN = (
    Field("provenance", Flag(), "Have the answer say where its KV came from, and stage times."),
    Field("budget_ms", Integer(0, _MAX_BUDGET_MS), "Time the whole request may take."),
    Field("tenant", Text(0, 64), "Where no key says it."),
    Field("session", Text(0, 256), "Conversation, for affinity; as prompt_cache_key."),
    Field("adapter", Text(0, 128), "A loaded LoRA adapter; `model` may name it as well."),
    Field("priority", Integer(-(2**31), 2**31 - 1), "Larger is sooner."),
)
BATON_OF_EMBEDDING = Record(_OWN)
BATON = Record(
    (
        *_OWN,
        Field("token_ids", Flag(), "Have each choice carry its token ids."),
        Field(
            "regex",
            Text(1),
            "The answer matches it as a whole. \\d, \\w and \\s are ASCII; no look-around.",
        ),
        Field(
            "ebnf",
            Text(1),
            "The answer follows this grammar: Lark's dialect (start: ...) or GBNF (root ::= ...).",
        ),
        Field("choice", ListOf(Text(1), least=1, most=1024), "The answer is one of these."),
        Field("no_repeat_ngram", Integer(0, 64), "No n-gram of so many tokens comes twice."),
    ),
    what="an object",
)

SAMPLING = (
    Field("temperature", Number(0, 100), "0 is greedy. Absent: as the model says."),
    Field("top_p", Number(0, 1), "Above 0. Absent: as the model says."),
    Field("top_k", Integer(-1, _MAX_ID), "0 or -1: off."),
    Field("min_p", Number(0, 1), "Below 1."),
    Field(
        "seed",
        Integer(-(2**63), 2**64 - 1),
        "Absent: another one each time; the same for one idempotency key.",
    ),
    Field("n", Integer(1, 128), "Samples of each prompt."),
    Field("stop", Either((Text(), ListOf(Text(1), most=16))), "The answer ends before it."),
    Field("stop_token_ids", ListOf(Integer(0, _MAX_ID)), "The answer ends with one of them."),
    Field("include_stop_str_in_output", Flag(), "What stopped the answer is part of it."),
    Field("presence_penalty", Number(-2, 2)),
    Field("frequency_penalty", Number(-2, 2)),
    Field("repetition_penalty", Number(0.01, 100), "1: off."),
    Field("logit_bias", MapOf(Number(-100, 100), most=1024), "By token id."),
    Field("allowed_token_ids", ListOf(Integer(0, _MAX_ID)), "No other token is drawn."),
    Field("bad_words", ListOf(Text(1), most=128), "Words that do not come."),
    Field("min_tokens", Integer(0, _MAX_ID), "No end before so many tokens."),
    Field("ignore_eos", Flag(), "Go on to max_tokens."),
    Field("skip_special_tokens", Flag(), "False: control tokens are shown as text."),
)

STREAM_OPTIONS = Record(
    (
        Field("include_usage", Flag(), "A last chunk, without choices, with the usage."),
        Field("continuous_usage_stats", Flag(), "The usage so far with every chunk."),
        Field("include_obfuscation", Refused("chunks are not padded; send false", (False,))),
    )
)

_ELSEWHERE = {
    "guided_regex": "baton.regex",
    "guided_grammar": "baton.ebnf",
    "guided_choice": "baton.choice",
    "guided_json": "response_format",
    "no_repeat_ngram_size": "baton.no_repeat_ngram",
    "num_return_sequences": "n",
    "max_new_tokens": "max_tokens",
}
"""What other servers call it."""

_SHARED = (
    Field("model", _LABEL, "A name of /v1/models. Absent: the only model."),
    Field("stream", Flag(), "Server-sent events instead of one object."),
    Field("stream_options", STREAM_OPTIONS, "With `stream` only."),
    Field("user", _LABEL, "A label of yours; ignored."),
    Field("safety_identifier", _LABEL, "A label of yours; ignored."),
    Field("metadata", MapOf(Text(0, 512), most=16), "Labels of yours; ignored."),
    Field("store", Refused("nothing is stored here; send false", (False,))),
    Field("baton", BATON, "What OpenAI's API has no word for."),
)

_PROMPTS = Either(
    (
        Text(1),
        ListOf(Text(1), least=1, most=MAX_PROMPTS),
        TOKEN_IDS,
        ListOf(TOKEN_IDS, least=1, most=MAX_PROMPTS),
    )
)

COMPLETION = Record(
    (
        *_SHARED,
        Field("prompt", _PROMPTS, "Text, token ids, or several of one kind.", is_needed=True),
        Field(
            "max_tokens",
            Integer(0, _MAX_ID),
            "Absent: the router's default. 0: nothing is drawn; with `echo`, the prompt alone.",
        ),
        *SAMPLING,
        Field(
            "logprobs",
            Integer(0, 20),
            "Of each token, beside so many others; with `echo`, of the prompt's, too.",
        ),
        Field("echo", Flag(), "The text begins with the prompt. With `logprobs`: `n` is 1."),
        Field("best_of", Refused("not served; ask for n samples and choose among them", (1,))),
        Field("suffix", Refused("not served: no model here fills in the middle", ("",))),
    ),
    elsewhere=_ELSEWHERE,
)

_INPUTS = Either(
    (
        Text(1),
        ListOf(Text(1), least=1, most=MAX_INPUTS),
        TOKEN_IDS,
        ListOf(TOKEN_IDS, least=1, most=MAX_INPUTS),
    )
)

EMBEDDING = Record(
    (
        Field("model", _LABEL, "A name of /v1/models. Absent: the only model."),
        Field("input", _INPUTS, "Text, token ids, or several of one kind.", is_needed=True),
        Field("encoding_format", OneOf(("float", "base64")), "Absent: float."),
        Field("dimensions", Refused("not served: an embedding has the model's own size")),
        Field("user", _LABEL, "A label of yours; ignored."),
        Field("baton", BATON_OF_EMBEDDING, "What OpenAI's API has no word for."),
    )
)

FUNCTION = Record(
    (
        Field("name", Text(1, 64), "Letters, digits, _ - and .", is_needed=True),
        Field("description", Text()),
        Field("parameters", AnyObject(), "JSON schema of its arguments."),
        Field("strict", Flag(), "A call that is forced follows the schema in any case."),
    )
)
_TYPE_FUNCTION = Field("type", OneOf(("function",)), is_needed=True)
TOOL = Tagged(
    "type",
    {"function": Record((_TYPE_FUNCTION, Field("function", FUNCTION, is_needed=True)))},
    {"custom": "only tools of type function are served"},
)
_NAMED_TOOL = Tagged(
    "type",
    {
        "function": Record(
            (
                _TYPE_FUNCTION,
                Field("function", Record((Field("name", _NAME, is_needed=True),)), is_needed=True),
            )
        )
    },
    {
        "custom": "only tools of type function are served",
        "allowed_tools": "not served; send only the tools that are allowed",
    },
)
TOOL_CHOICE = Either((OneOf(("none", "auto", "required")), _NAMED_TOOL))

RESPONSE_FORMAT = Tagged(
    "type",
    {
        "text": Record((Field("type", OneOf(("text",)), is_needed=True),)),
        "json_object": Record((Field("type", OneOf(("json_object",)), is_needed=True),)),
        "json_schema": Record(
            (
                Field("type", OneOf(("json_schema",)), is_needed=True),
                Field(
                    "json_schema",
                    Record(
                        (
                            Field("name", _NAME, is_needed=True),
                            Field("schema", AnyObject(), is_needed=True),
                            Field("description", Text()),
                            Field("strict", Flag(), "The schema holds in any case."),
                        )
                    ),
                    is_needed=True,
                ),
            )
        ),
    },
)

_NO_PARTS = dict.fromkeys(
    ("image_url", "input_audio", "file"), "only parts of type text are served"
)
_PART = Tagged(
    "type",
    {
        "text": Record(
            (
                Field("type", OneOf(("text",)), is_needed=True),
                Field("text", Text(), is_needed=True),
                Field("cache_control", AnyObject(), "Of another API; means nothing here."),
            )
        )
    },
    _NO_PARTS,
)
_SAID_PART = Tagged(
    "type",
    {
        **_PART.records,
        "refusal": Record(
            (
                Field("type", OneOf(("refusal",)), is_needed=True),
                Field("refusal", Text(), is_needed=True),
            )
        ),
    },
    _NO_PARTS,
)
"""Of an assistant's message."""
_CONTENT = Field("content", Either((Text(), ListOf(_PART))), is_needed=True)
_TOOL_CALL = Record(
    (
        Field("id", _NAME, is_needed=True),
        _TYPE_FUNCTION,
        Field(
            "function",
            Record(
                (
                    Field("name", _NAME, is_needed=True),
                    Field("arguments", Text(), "As the model wrote them: JSON, if not cut."),
                )
            ),
            is_needed=True,
        ),
        Field("index", Integer(0, _MAX_ID), "As a stream gave it; means nothing here."),
    )
)


def _message(role: str, *more: Field) -> Record:
    return Record((Field("role", OneOf((role,)), is_needed=True), *more, Field("name", _LABEL)))


MESSAGE = Tagged(
    "role",
    {
        "system": _message("system", _CONTENT),
        "developer": _message("developer", _CONTENT),
        "user": _message("user", _CONTENT),
        "assistant": _message(
            "assistant",
            Field(
                "content",
                Either((Text(), ListOf(_SAID_PART))),
                "May be absent beside tool_calls, a refusal, or reasoning_content.",
            ),
            Field("tool_calls", ListOf(_TOOL_CALL, most=MAX_TOOLS)),
            Field("refusal", Text(), "Shown to the model where there is no content."),
            Field("reasoning_content", Text(), "For chat templates that show it."),
            Field("reasoning", Text(), "Another name of reasoning_content."),
            Field("annotations", ListOf(AnyObject()), "Means nothing here."),
            Field("audio", Refused("only text is served")),
            Field("function_call", Refused("deprecated; send tool_calls")),
        ),
        "tool": _message(
            "tool",
            Field("content", _CONTENT.shape, "Absent: the call gave nothing."),
            Field("tool_call_id", _NAME, is_needed=True),
        ),
    },
    {"function": "deprecated; send role tool with a tool_call_id"},
)

CHAT = Record(
    (
        *_SHARED,
        Field("messages", ListOf(MESSAGE, least=1, most=_MAX_MESSAGES), is_needed=True),
        Field("max_completion_tokens", Integer(1, _MAX_ID), "Absent: the router's default."),
        Field("max_tokens", Integer(1, _MAX_ID), "The older name of max_completion_tokens."),
        *SAMPLING,
        Field("logprobs", Flag(), "Of each token."),
        Field("top_logprobs", Integer(0, 20), "With `logprobs`: of so many others, too. 0: none."),
        Field("response_format", RESPONSE_FORMAT),
        Field("tools", ListOf(TOOL, most=MAX_TOOLS), "For models whose chat template takes them."),
        Field("tool_choice", TOOL_CHOICE, "Absent: auto if there are tools."),
        Field("parallel_tool_calls", Flag(), "False: at most one call in an answer."),
        Field("chat_template_kwargs", AnyObject(), "Variables of the chat template."),
        Field("prompt_cache_key", _LABEL, "Requests of one key meet the same workers."),
        Field("service_tier", Refused("there is one tier", ("auto", "default"))),
        Field("modalities", Refused("only text is served", (["text"],))),
        Field("audio", Refused("only text is served")),
        Field("prediction", Refused("not served")),
        Field("reasoning_effort", Refused("not served; say it in chat_template_kwargs")),
        Field("verbosity", Refused("not served; say it in a message", ("medium",))),
        Field("web_search_options", Refused("there is no web search here")),
        Field("prompt_cache_retention", Refused("the store decides what is kept")),
        Field("functions", Refused("deprecated; send tools", ([],))),
        Field("function_call", Refused("deprecated; send tool_choice", ("none",))),
    ),
    elsewhere=_ELSEWHERE,
)
