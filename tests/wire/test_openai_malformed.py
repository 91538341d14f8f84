"""Malformed bodies and odd headers over HTTP: each gets its status and a message that names the
field; the router stays whole.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness.router_bench import Served, served

pytestmark = pytest.mark.oracle

CHAT, TEXT, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
JSON = {"content-type": "application/json"}
MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def router() -> Iterator[Served]:
    with served(limits={"max_request_bytes": 64 * 1024, "max_logprobs": 19}) as bench:
        yield bench


def ask(router: Served, path: str, body: Any, headers: dict[str, str] = JSON) -> tuple[int, Any]:
    """Status and parsed answer; `body` is sent as it is if it is bytes."""
    host = router.url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=20)
    try:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", path, data, headers)
        response = connection.getresponse()
        assert response.getheader("server") == "baton"
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": MESSAGES, **fields}


def schema(schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}


def deep(levels: int) -> bytes:
    return b'{"messages":' + b"[" * levels + b"]" * levels + b"}"


BODIES: list[tuple[str, Any, int, str | None, str]] = [
    # path, body, status, param, part of the message
    (CHAT, b"", 400, "body", "no JSON"),
    (CHAT, b"{", 400, "body", "no JSON at character 1"),
    (CHAT, b"\xff\xfe{}", 400, "body", "not UTF-8"),
    (CHAT, b"[]", 400, "body", "must be an object"),
    (CHAT, b"null", 400, "body", "must be an object"),
    (CHAT, b'{"messages": NaN}', 400, "body", "no JSON"),
    (CHAT, deep(40_000 // 2), 400, None, "n"),
    (CHAT, b'{"seed": ' + b"9" * 5000 + b"}", 400, "body", "no JSON"),
    (CHAT, b" " * 70_000, 413, None, "65536"),
    (CHAT, {}, 400, "messages", "is needed"),
    (CHAT, {"messages": None}, 400, "messages", "is needed"),
    (CHAT, {"messages": []}, 400, "messages", "is empty"),
    (CHAT, {"messages": "hi"}, 400, "messages", "must be a list"),
    (CHAT, {"messages": ["hi"]}, 400, "messages[0]", "must be an object"),
    (CHAT, {"messages": [{}]}, 400, "messages[0].role", "one of system"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages[0].content", "is needed"),
    (CHAT, {"messages": [{"role": "god", "content": "x"}]}, 400, "messages[0].role", "one of"),
    (CHAT, {"messages": [{"role": ["user"], "content": ""}]}, 400, "messages[0].role", "one of"),
    (
        CHAT,
        {"messages": [{"role": "function", "name": "f", "content": "x"}]},
        400,
        "messages[0].role",
        "deprecated",
    ),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content", "string"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        400,
        "messages[0].content[0].type",
        "only parts of type text",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "\ud800"}]},
        400,
        "messages[0].content",
        "surrogate",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "x", "weight": 1}]},
        400,
        "messages[0].weight",
        "unknown",
    ),
    (
        CHAT,
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "a", "type": "function", "function": {"name": 5}}],
                }
            ]
        },
        400,
        "messages[0].tool_calls[0].function.name",
        "must be a string",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}]},
        400,
        "messages[0].content[0].type",
        "must be one of text",
    ),
    (CHAT, {"messages": [{"role": "assistant"}]}, 400, "messages[0].content", "no tool_calls"),
    (
        CHAT,
        {"messages": [{"role": "tool", "content": "x"}]},
        400,
        "messages[0].tool_call_id",
        "is needed",
    ),
    (CHAT, chat(model="other"), 404, "model", "not served"),
    (CHAT, chat(model=5), 400, "model", "must be a string"),
    (CHAT, chat(temperature="hot"), 400, "temperature", "must be a number"),
    (CHAT, chat(temperature=-1), 400, "temperature", "from 0"),
    (CHAT, chat(temperature=1e-9), 400, "temperature", "greedy"),
    (CHAT, chat(temperature=True), 400, "temperature", "must be a number"),
    (CHAT, chat(top_p=0), 400, "top_p", "(0, 1]"),
    (CHAT, chat(top_p=1.5), 400, "top_p", "from 0 to 1"),
    (CHAT, chat(n=0), 400, "n", "from 1"),
    (CHAT, chat(n=17), 400, "n", "at most 16"),
    (CHAT, chat(n=1.5), 400, "n", "whole number"),
    (CHAT, chat(max_tokens=0), 400, "max_tokens", "from 1"),
    (CHAT, chat(max_tokens=10**30), 400, "max_tokens", "from 1"),
    (CHAT, chat(max_tokens=5, max_completion_tokens=6), 400, "max_tokens", "differs"),
    (CHAT, chat(seed=2**64), 400, "seed", "from"),
    (CHAT, chat(stop=["a"] * 17), 400, "stop", "at most 16"),
    (CHAT, chat(stop=[""]), 400, "stop[0]", "empty"),
    (CHAT, chat(stop=["x" * 300]), 400, "stop[0]", "1 to 256"),
    (CHAT, chat(logit_bias={"a": 1}), 400, "logit_bias", "token ids"),
    (CHAT, chat(logit_bias={"1": 101}), 400, "logit_bias[1]", "from -100"),
    (CHAT, chat(logit_bias={"300": 1}), 400, "logit_bias[300]", "vocabulary"),
    (CHAT, chat(logprobs=5), 400, "logprobs", "true or false"),
    (CHAT, chat(top_logprobs=2), 400, "top_logprobs", "needs logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=21), 400, "top_logprobs", "from 0 to 20"),
    (CHAT, chat(logprobs=True, top_logprobs=20), 400, "top_logprobs", "at most 19"),
    *(
        (
            CHAT,
            chat(tools=[{**TOOL, "function": {"name": "f", "parameters": parameters}}]),
            400,
            "tools[0].function.parameters",
            "surrogate",
        )
        for parameters in ({"type": "\ud800"}, {"properties": [{"\ud800": 1}]})
    ),
    (CHAT, chat(stream="yes"), 400, "stream", "true or false"),
    (CHAT, chat(stream_options={"include_usage": True}), 400, "stream_options", "stream: true"),
    (CHAT, chat(response_format={"type": "xml"}), 400, "response_format.type", "one of text"),
    (
        CHAT,
        chat(response_format={"type": "json_schema"}),
        400,
        "response_format.json_schema",
        "is needed",
    ),
    (CHAT, chat(response_format=schema([])), 400, "response_format.json_schema.schema", "object"),
    (
        CHAT,
        chat(response_format=schema({"type": "string"}), baton={"regex": "a"}),
        400,
        "response_format",
        "baton.regex",
    ),
    (CHAT, chat(tool_choice="auto"), 400, "tool_choice", "needs tools"),
    (CHAT, chat(tools=[TOOL, TOOL]), 400, "tools[1].function.name", "twice"),
    (CHAT, chat(tools=[{"type": "custom", "custom": {}}]), 400, "tools[0].type", "function"),
    (CHAT, chat(tools=[{"type": "function"}]), 400, "tools[0].function", "is needed"),
    (
        CHAT,
        chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}),
        400,
        "tool_choice.function.name",
        "not among",
    ),
    (
        CHAT,
        chat(tools=[TOOL], response_format={"type": "json_object"}),
        400,
        "response_format",
        "tools",
    ),
    (CHAT, chat(store=True), 400, "store", "nothing is stored"),
    (CHAT, chat(modalities=["text", "audio"]), 400, "modalities", "only text"),
    (CHAT, chat(reasoning_effort="high"), 400, "reasoning_effort", "chat_template_kwargs"),
    (CHAT, chat(functions=[{"name": "f"}]), 400, "functions", "tools"),
    (CHAT, chat(chat_template_kwargs={"messages": []}), 400, "chat_template_kwargs", "not the"),
    (CHAT, chat(baton={"budget_ms": 4_000_000}), 400, "baton.budget_ms", "at most"),
    (CHAT, chat(baton={"adapter": "none"}), 400, "baton.adapter", "not loaded"),
    (CHAT, chat(baton={"tenant": "a b"}), 400, "baton.tenant", "letters"),
    (CHAT, chat(baton={"regex": "a", "ebnf": "b"}), 400, "baton.ebnf", "baton.regex"),
    (CHAT, chat(baton={"no_repeat_ngram": 65}), 400, "baton.no_repeat_ngram", "64"),
    (CHAT, chat(frequency_penalty=3), 400, "frequency_penalty", "from -2"),
    (CHAT, chat(max_token=5), 400, "max_token", "did you mean max_tokens?"),
    (TEXT, {}, 400, "prompt", "is needed"),
    (TEXT, {"prompt": ""}, 400, "prompt", "empty"),
    (TEXT, {"prompt": []}, 400, "prompt", "empty"),
    (TEXT, {"prompt": {}}, 400, "prompt", "must be a string"),
    (TEXT, {"prompt": ["a", 5]}, 400, "prompt[1]", "must be a string"),
    (TEXT, {"prompt": [1, "a"]}, 400, "prompt[1]", "token id"),
    (TEXT, {"prompt": [[1], []]}, 400, "prompt[1]", "empty"),
    (TEXT, {"prompt": [-1]}, 400, "prompt[0]", "from 0"),
    (TEXT, {"prompt": [5, 300]}, 400, "prompt[1]", "vocabulary"),
    (TEXT, {"prompt": [[5], [5, 300]]}, 400, "prompt[1][1]", "vocabulary"),
    (TEXT, {"prompt": ["a"] * 65}, 400, "prompt", "at most 64"),
    (TEXT, {"prompt": "a", "best_of": 2}, 400, "best_of", "n samples"),
    (TEXT, {"prompt": "a", "suffix": "b"}, 400, "suffix", "middle"),
    (TEXT, {"prompt": "a", "echo": True, "logprobs": 1, "n": 2}, 400, "n", "logprobs"),
    (TEXT, {"prompt": "a", "messages": MESSAGES}, 400, "messages", "unknown"),
    (TEXT, {"prompt": "a", "logprobs": True}, 400, "logprobs", "whole number"),
    (TEXT, {"prompt": "a", "priority": 0}, 400, "priority", "did you mean baton.priority?"),
    (TEXT, {"prompt": "a", "session": "s"}, 400, "session", "did you mean baton.session?"),
    (TEXT, {"prompt": "a", "include_usage": True}, 400, "include_usage", "stream_options.include"),
    (TEXT, {"prompt": "a", "guided_regex": "a"}, 400, "guided_regex", "baton.regex?"),
    (TEXT, {"prompt": "a", "text": "x"}, 400, "text", "is unknown"),
    (TEXT, {"prompt": "a", "request_id": "x"}, 400, "request_id", "is unknown"),
    (TEXT, {"prompt": "a", "chat": []}, 400, "chat", "is unknown"),
    (CHAT, chat(priority=0), 400, "priority", "did you mean baton.priority?"),
    (CHAT, chat(**{"chat.tools": []}), 400, "chat.tools", "is unknown"),
    (CHAT, chat(prompt_cache_key="\x00"), 400, "prompt_cache_key", "printable"),
    (EMBED, {"input": "a", "tenant": "t"}, 400, "tenant", "did you mean baton.tenant?"),
    (EMBED, {"input": "a", "prompt": "x"}, 400, "prompt", "is unknown"),
    (EMBED, {}, 400, "input", "is needed"),
    (EMBED, {"input": [""]}, 400, "input[0]", "empty"),
    (EMBED, {"input": "a", "encoding_format": "int8"}, 400, "encoding_format", "float, base64"),
    (EMBED, {"input": "a", "dimensions": 8}, 400, "dimensions", "own size"),
]


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "part"), BODIES, ids=[str(i) for i in range(len(BODIES))]
)
def test_a_malformed_body_gets_its_status_and_a_message_that_names_the_field(
    router: Served, path: str, body: Any, status: int, param: str | None, part: str
) -> None:
    found, answer = ask(router, path, body)
    error = answer["error"]
    assert (found, error["type"]) == (status, "invalid_request_error"), error
    assert part in error["message"] and len(error["message"]) < 400
    if param is not None:
        assert error["param"] == param and error["message"].startswith(f"{param}: ")


def test_null_and_harmless_values_are_as_good_as_absent(router: Served) -> None:
    body = chat(max_tokens=2, store=False, modalities=["text"], service_tier="auto")
    nulls = dict.fromkeys(("temperature", "stop", "tools", "audio", "user", "logit_bias", "n"))
    status, answer = ask(router, CHAT, {**body, **nulls, "seed": 5.0})
    assert status == 200 and answer["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("path", "defaults"),
    [
        (CHAT, {"top_logprobs": 0}),
        (CHAT, {"top_logprobs": 0, "logprobs": False}),
        (TEXT, {"best_of": 1}),
        (TEXT, {"best_of": 1, "n": 1, "suffix": "", "echo": False, "store": False}),
    ],
)
def test_what_is_written_out_and_is_the_default_passes(
    router: Served, path: str, defaults: dict[str, Any]
) -> None:
    body = chat(max_tokens=2) if path == CHAT else {"prompt": "a", "max_tokens": 2}
    status, answer = ask(router, path, {**body, **defaults})
    assert status == 200, answer
    assert answer["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_labels_that_mean_nothing_to_a_server_are_taken_and_bounded(
    router: Served, path: str
) -> None:
    body = chat(max_tokens=2) if path == CHAT else {"prompt": "a", "max_tokens": 2}
    labels: dict[str, Any] = {
        "metadata": {"run": "7", "team": "blue"},
        "user": "ada",
        "safety_identifier": "0f3c",
        "store": False,
    }
    if path == CHAT:
        labels |= {"prompt_cache_key": "chat-1", "service_tier": "default"}
    status, answer = ask(router, path, {**body, **labels})
    assert status == 200, answer
    for metadata, part in (
        ({str(index): "" for index in range(17)}, "at most 16"),
        ({"a": 1}, "must be a string"),
        ({"a": "b" * 513}, "512"),
    ):
        status, answer = ask(router, path, {**body, "metadata": metadata})
        assert status == 400 and answer["error"]["param"].startswith("metadata")
        assert part in answer["error"]["message"]
    status, answer = ask(router, path, {**body, "store": True})
    assert status == 400 and answer["error"]["param"] == "store"


@pytest.mark.parametrize(
    ("headers", "status", "part"),
    [
        ({}, 415, "application/json"),
        ({"content-type": "text/plain"}, 415, "application/json"),
        ({**JSON, "content-encoding": "gzip"}, 415, "content-encoding"),
        ({**JSON, "x-baton-budget-ms": "soon"}, 400, "x-baton-budget-ms"),
        ({**JSON, "x-baton-budget-ms": "4000000"}, 400, "baton.budget_ms"),
        ({**JSON, "idempotency-key": "a b"}, 400, "idempotency-key"),
        ({**JSON, "idempotency-key": "a" * 200}, 400, "idempotency-key"),
        ({**JSON, "idempotency-key": "\u00ff"}, 400, "idempotency-key"),
        ({**JSON, "x-request-id": "a b"}, 200, ""),
        ({**JSON, "x-request-id": "a" * 2000}, 200, ""),
        ({**JSON, "x-request-id": "\u00ff"}, 200, ""),
        ({**JSON, "authorization": "Bearer \u00ff"}, 200, ""),
        ({**JSON, "traceparent": "\u00ff", "baggage": "=" * 1000}, 200, ""),
    ],
)
def test_odd_headers(router: Served, headers: dict[str, str], status: int, part: str) -> None:
    found, answer = ask(router, CHAT, chat(max_tokens=1), headers)
    assert found == status, answer
    if status != 200:
        assert part in answer["error"]["message"].lower()


def test_other_paths_and_methods(router: Served) -> None:
    host = router.url.removeprefix("http://")
    for method, path, status in (
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("GET", "/", 404),
        ("GET", "/v1/models/other%2Fmodel", 404),
        ("GET", "/v1/models/%ff", 404),
        ("POST", "/v1/../etc/passwd", 404),
    ):
        connection = http.client.HTTPConnection(host, timeout=20)
        connection.request(method, path)
        response = connection.getresponse()
        assert response.status == status, (method, path)
        assert json.loads(response.read())["error"]["message"]
        if status == 405:
            assert response.getheader("allow")
        connection.close()


def test_what_is_no_http_does_not_hurt(router: Served) -> None:
    address = router.url.removeprefix("http://").split(":")
    for data in (
        b"\x00" * 64 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"a" * 100_000 + b": b\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"h%d: x\r\n" % i for i in range(1000)) + b"\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ):
        with (
            socket.create_connection((address[0], int(address[1])), timeout=20) as peer,
            contextlib.suppress(ConnectionError),  # closed before it had read all of that
        ):
            peer.sendall(data)
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_WR)
            while peer.recv(65536):
                pass
    assert ask(router, CHAT, chat(max_tokens=1))[0] == 200


def test_what_is_no_http_is_one_line_in_the_log_and_400(
    router: Served, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = router.url.removeprefix("http://").split(":")
    caplog.set_level(logging.INFO)
    malformed = (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: -5\r\n\r\n",
        b"GET / HTTP/1.1\r\n\x00: b\r\n\r\n",
    )
    for data in malformed:
        with socket.create_connection((host, int(port)), timeout=20) as peer:
            peer.sendall(data)
            with peer.makefile("rb") as answer:
                assert answer.readline().split()[1] == b"400", data
    assert not [record for record in caplog.records if record.exc_info]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    lines = [record for record in caplog.records if record.message == "http_malformed"]
    assert len(lines) == len(malformed) and all(line.fields["why"] for line in lines)  # type: ignore[attr-defined]
