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

from tests.harness.router_bench import JSON, Served, served

pytestmark = pytest.mark.oracle

CHAT, TEXT, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def router() -> Iterator[Served]:
    with served(limits={"max_request_bytes": 64 * 1024, "max_logprobs": 19}) as bench:
        yield bench


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": MESSAGES, **fields}


def said(message: Any) -> dict[str, Any]:
    return {"messages": [message]}


def schema(schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}


def deep(levels: int) -> bytes:
    return b'{"messages":' + b"[" * levels + b"]" * levels + b"}"


BAD: dict[str, list[tuple[Any, str | None, str]]] = {
    # body, param, part of the message
    CHAT: [
        (b"", "body", "no JSON"),
        (b"{", "body", "no JSON at character 1"),
        (b"\xff\xfe{}", "body", "not UTF-8"),
        (b"[]", "body", "must be an object"),
        (b"null", "body", "must be an object"),
        (b'{"messages": NaN}', "body", "no JSON"),
        (deep(20_000), None, "n"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "body", "no JSON"),
        ({}, "messages", "is needed"),
        ({"messages": None}, "messages", "is needed"),
        ({"messages": []}, "messages", "is empty"),
        ({"messages": "hi"}, "messages", "must be a list"),
        ({"messages": ["hi"]}, "messages[0]", "must be an object"),
        (said({}), "messages[0].role", "one of system"),
        (said({"role": "user"}), "messages[0].content", "is needed"),
        (said({"role": "god", "content": "x"}), "messages[0].role", "one of"),
        (said({"role": ["user"], "content": ""}), "messages[0].role", "one of"),
        (said({"role": "function", "name": "f", "content": "x"}), "messages[0].role", "deprecated"),
        (said({"role": "user", "content": 5}), "messages[0].content", "string"),
        (
            said({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}),
            "messages[0].content[0].type",
            "only parts of type text",
        ),
        (said({"role": "user", "content": "\ud800"}), "messages[0].content", "surrogate"),
        (said({"role": "user", "content": "x", "weight": 1}), "messages[0].weight", "unknown"),
        (
            said(
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "a", "type": "function", "function": {"name": 5}}],
                }
            ),
            "messages[0].tool_calls[0].function.name",
            "must be a string",
        ),
        (
            said({"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}),
            "messages[0].content[0].type",
            "must be one of text",
        ),
        (said({"role": "assistant"}), "messages[0].content", "no tool_calls"),
        (said({"role": "tool", "content": "x"}), "messages[0].tool_call_id", "is needed"),
        (chat(model=5), "model", "must be a string"),
        (chat(temperature="hot"), "temperature", "must be a number"),
        (chat(temperature=-1), "temperature", "from 0"),
        (chat(temperature=1e-09), "temperature", "greedy"),
        (chat(temperature=True), "temperature", "must be a number"),
        (chat(top_p=0), "top_p", "(0, 1]"),
        (chat(top_p=1.5), "top_p", "from 0 to 1"),
        (chat(n=0), "n", "from 1"),
        (chat(n=17), "n", "at most 16"),
        (chat(n=1.5), "n", "whole number"),
        (chat(max_tokens=0), "max_tokens", "from 1"),
        (chat(max_tokens=10**30), "max_tokens", "from 1"),
        (chat(max_tokens=5, max_completion_tokens=6), "max_tokens", "differs"),
        (chat(seed=2**64), "seed", "from"),
        (chat(stop=["a"] * 17), "stop", "at most 16"),
        (chat(stop=[""]), "stop[0]", "empty"),
        (chat(stop=["x" * 300]), "stop[0]", "1 to 256"),
        (chat(logit_bias={"a": 1}), "logit_bias", "token ids"),
        (chat(logit_bias={"1": 101}), "logit_bias[1]", "from -100"),
        (chat(logit_bias={"300": 1}), "logit_bias[300]", "vocabulary"),
        (chat(logprobs=5), "logprobs", "true or false"),
        (chat(top_logprobs=2), "top_logprobs", "needs logprobs"),
        (chat(logprobs=True, top_logprobs=21), "top_logprobs", "from 0 to 20"),
        (chat(logprobs=True, top_logprobs=20), "top_logprobs", "at most 19"),
        (chat(stream="yes"), "stream", "true or false"),
        (chat(stream_options={"include_usage": True}), "stream_options", "stream: true"),
        (chat(response_format={"type": "xml"}), "response_format.type", "one of text"),
        (chat(response_format={"type": "json_schema"}), "response_format.json_schema", "is needed"),
        (chat(response_format=schema([])), "response_format.json_schema.schema", "object"),
        (
            chat(response_format=schema({"type": "string"}), baton={"regex": "a"}),
            "response_format",
            "baton.regex",
        ),
        (chat(tool_choice="auto"), "tool_choice", "needs tools"),
        (chat(tools=[TOOL, TOOL]), "tools[1].function.name", "twice"),
        (chat(tools=[{"type": "custom", "custom": {}}]), "tools[0].type", "function"),
        (chat(tools=[{"type": "function"}]), "tools[0].function", "is needed"),
        (
            chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}),
            "tool_choice.function.name",
            "not among",
        ),
        (chat(tools=[TOOL], response_format={"type": "json_object"}), "response_format", "tools"),
        (chat(store=True), "store", "nothing is stored"),
        (chat(modalities=["text", "audio"]), "modalities", "only text"),
        (chat(reasoning_effort="high"), "reasoning_effort", "chat_template_kwargs"),
        (chat(functions=[{"name": "f"}]), "functions", "tools"),
        (chat(chat_template_kwargs={"messages": []}), "chat_template_kwargs", "not the"),
        (chat(baton={"budget_ms": 4_000_000}), "baton.budget_ms", "at most"),
        (chat(baton={"adapter": "none"}), "baton.adapter", "not loaded"),
        (chat(baton={"tenant": "a b"}), "baton.tenant", "letters"),
        (chat(baton={"regex": "a", "ebnf": "b"}), "baton.ebnf", "baton.regex"),
        (chat(baton={"no_repeat_ngram": 65}), "baton.no_repeat_ngram", "64"),
        (chat(frequency_penalty=3), "frequency_penalty", "from -2"),
        (chat(max_token=5), "max_token", "did you mean max_tokens?"),
        (chat(priority=0), "priority", "did you mean baton.priority?"),
        (chat(**{"chat.tools": []}), "chat.tools", "is unknown"),
        (chat(prompt_cache_key="\x00"), "prompt_cache_key", "printable"),
        *(
            (
                chat(tools=[{**TOOL, "function": {"name": "f", "parameters": parameters}}]),
                "tools[0].function.parameters",
                "surrogate",
            )
            for parameters in ({"type": "\ud800"}, {"properties": [{"\ud800": 1}]})
        ),
    ],
    TEXT: [
        ({}, "prompt", "is needed"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": {}}, "prompt", "must be a string"),
        ({"prompt": ["a", 5]}, "prompt[1]", "must be a string"),
        ({"prompt": [1, "a"]}, "prompt[1]", "token id"),
        ({"prompt": [[1], []]}, "prompt[1]", "empty"),
        ({"prompt": [-1]}, "prompt[0]", "from 0"),
        ({"prompt": [5, 300]}, "prompt[1]", "vocabulary"),
        ({"prompt": [[5], [5, 300]]}, "prompt[1][1]", "vocabulary"),
        ({"prompt": ["a"] * 65}, "prompt", "at most 64"),
        ({"prompt": "a", "best_of": 2}, "best_of", "n samples"),
        ({"prompt": "a", "suffix": "b"}, "suffix", "middle"),
        ({"prompt": "a", "echo": True, "logprobs": 1, "n": 2}, "n", "logprobs"),
        ({"prompt": "a", "messages": MESSAGES}, "messages", "unknown"),
        ({"prompt": "a", "logprobs": True}, "logprobs", "whole number"),
        ({"prompt": "a", "priority": 0}, "priority", "did you mean baton.priority?"),
        ({"prompt": "a", "session": "s"}, "session", "did you mean baton.session?"),
        ({"prompt": "a", "include_usage": True}, "include_usage", "stream_options.include"),
        ({"prompt": "a", "guided_regex": "a"}, "guided_regex", "baton.regex?"),
        ({"prompt": "a", "text": "x"}, "text", "is unknown"),
        ({"prompt": "a", "request_id": "x"}, "request_id", "is unknown"),
        ({"prompt": "a", "chat": []}, "chat", "is unknown"),
    ],
    EMBED: [
        ({"input": "a", "tenant": "t"}, "tenant", "did you mean baton.tenant?"),
        ({"input": "a", "prompt": "x"}, "prompt", "is unknown"),
        ({}, "input", "is needed"),
        ({"input": [""]}, "input[0]", "empty"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "float, base64"),
        ({"input": "a", "dimensions": 8}, "dimensions", "own size"),
    ],
}
BODIES: list[tuple[str, Any, int, str | None, str]] = [
    *((path, body, 400, param, part) for path, rows in BAD.items() for body, param, part in rows),
    (CHAT, b" " * 70000, 413, None, "65536"),
    (CHAT, chat(model="other"), 404, "model", "not served"),
]


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "part"), BODIES, ids=[str(i) for i in range(len(BODIES))]
)
def test_a_malformed_body_gets_its_status_and_a_message_that_names_the_field(
    router: Served, path: str, body: Any, status: int, param: str | None, part: str
) -> None:
    found, answer = router.ask(path, body)
    error = answer["error"]
    assert (found, error["type"]) == (status, "invalid_request_error"), error
    assert part in error["message"] and len(error["message"]) < 400
    if param is not None:
        assert error["param"] == param and error["message"].startswith(f"{param}: ")


def test_null_and_harmless_values_are_as_good_as_absent(router: Served) -> None:
    body = chat(max_tokens=2, store=False, modalities=["text"], service_tier="auto")
    nulls = dict.fromkeys(("temperature", "stop", "tools", "audio", "user", "logit_bias", "n"))
    status, answer = router.ask(CHAT, {**body, **nulls, "seed": 5.0})
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
    status, answer = router.ask(path, {**body, **defaults})
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
    status, answer = router.ask(path, {**body, **labels})
    assert status == 200, answer
    for metadata, part in (
        ({str(index): "" for index in range(17)}, "at most 16"),
        ({"a": 1}, "must be a string"),
        ({"a": "b" * 513}, "512"),
    ):
        status, answer = router.ask(path, {**body, "metadata": metadata})
        assert status == 400 and answer["error"]["param"].startswith("metadata")
        assert part in answer["error"]["message"]
    status, answer = router.ask(path, {**body, "store": True})
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
    found, answer = router.ask(CHAT, chat(max_tokens=1), headers)
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
            router.connect() as peer,
            contextlib.suppress(ConnectionError),  # closed before it had read all of that
        ):
            peer.sendall(data)
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_WR)
            while peer.recv(65536):
                pass
    assert router.ask(CHAT, chat(max_tokens=1))[0] == 200


def test_what_is_no_http_is_one_line_in_the_log_and_400(
    router: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    malformed = (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: -5\r\n\r\n",
        b"GET / HTTP/1.1\r\n\x00: b\r\n\r\n",
    )
    for data in malformed:
        with router.connect() as peer:
            peer.sendall(data)
            with peer.makefile("rb") as answer:
                assert answer.readline().split()[1] == b"400", data
    assert not [record for record in caplog.records if record.exc_info]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    lines = [record for record in caplog.records if record.message == "http_malformed"]
    assert len(lines) == len(malformed) and all(line.fields["why"] for line in lines)  # type: ignore[attr-defined]
