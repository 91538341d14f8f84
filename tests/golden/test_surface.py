"""What a running cluster answers at each of its doors: OpenAI bodies, gRPC requests, command lines
and metrics, as they were recorded. Texts of errors are part of it.
"""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format

from baton import ClusterConfig, LocalCluster, cli
from protos import common_pb2, inference_pb2, inference_pb2_grpc
from tests.golden.recorded import check
from tests.harness.cluster import STORE_SIZE

pytestmark = [pytest.mark.oracle, pytest.mark.e2e, pytest.mark.timeout(300)]

TIMEOUT_S = 60.0
CHAT, TEXT, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
TALK = [{"role": "user", "content": "Tell me a story about a dog."}]
SCHEMA = {
    "type": "object",
    "properties": {"mood": {"enum": ["glad", "sad"]}},
    "required": ["mood"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(ClusterConfig(port=0, metrics=True, overrides=(STORE_SIZE,))) as running:
        yield running


# -- OpenAI

_ASKED: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
_TEXT = {"prompt": "Once upon a time", **_ASKED}
_CHAT = {"messages": TALK, **_ASKED}
_DRAWN = {"temperature": 1, "seed": 7}
_STREAM = {"stream": True, "stream_options": {"include_usage": True}}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_HISTORY: list[Any] = [
    *TALK,
    {"role": "assistant", "content": None, "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "done"},
]

GOOD: list[tuple[str, dict[str, Any]]] = [
    (TEXT, _TEXT),
    *((TEXT, {**_TEXT, **more}) for more in (_DRAWN, _STREAM, {"n": 2, **_DRAWN}, {"echo": True})),
    *((TEXT, {**_TEXT, "logprobs": num}) for num in (0, 1, 5)),
    *((TEXT, {**_TEXT, "stop": stop}) for stop in ("nobody", [" but", "."], None)),
    *((TEXT, {**_TEXT, "prompt": prompt}) for prompt in ([7, 8, 9], ["One", "Two"], [[7], [8, 9]])),
    *((TEXT, {**_TEXT, "max_tokens": num}) for num in (1, 2, 16)),
    (TEXT, {**_TEXT, "prompt": ["One", "Two"], **_STREAM}),
    (TEXT, {**_TEXT, "best_of": 1, "user": "u", "suffix": None, "logit_bias": {"300": 5}}),
    (TEXT, {**_TEXT, "presence_penalty": 1, "frequency_penalty": 0.5, "top_p": 0.9, **_DRAWN}),
    (TEXT, {**_TEXT, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, **_DRAWN}),
    (TEXT, {**_TEXT, "metadata": {"a": "b"}, "store": False, "safety_identifier": "s"}),
    (TEXT, {**_TEXT, "ignore_eos": True, "min_tokens": 3}),
    *(
        (TEXT, {**_TEXT, "max_tokens": 40, "baton": grammar})
        for grammar in (
            {"regex": "(cat|dog)s?"},
            {"choice": ["yes", "no"]},
            {"ebnf": 'root ::= "a"'},
        )
    ),
    (TEXT, {**_TEXT, "baton": {"no_repeat_ngram": 2}}),
    (CHAT, _CHAT),
    *((CHAT, {**_CHAT, **more}) for more in (_DRAWN, _STREAM, {"n": 2, **_DRAWN}, {"n": 1})),
    *((CHAT, {**_CHAT, "logprobs": True, "top_logprobs": num}) for num in (0, 2)),
    *((CHAT, {**_CHAT, "logprobs": True, **_STREAM}) for _ in range(1)),
    *((CHAT, {**_CHAT, "stop": stop}) for stop in (".", ["\n"])),
    (CHAT, {**_CHAT, "response_format": {"type": "text"}}),
    (CHAT, {**_CHAT, "response_format": FORMAT, "max_tokens": 40}),
    (CHAT, {**_CHAT, "response_format": FORMAT, "max_tokens": 40, **_STREAM}),
    (CHAT, {**_CHAT, "response_format": {"type": "json_object"}, "max_tokens": 40}),
    *(
        (CHAT, {**_CHAT, "tools": [TOOL], "tool_choice": choice, "max_tokens": 40, **more})
        for choice in (
            "none",
            "auto",
            "required",
            {"type": "function", "function": {"name": "f"}},
        )
        for more in ({}, _STREAM)
    ),
    (CHAT, {**_CHAT, "messages": _HISTORY, "tools": [TOOL]}),
    (CHAT, {**_CHAT, "messages": [{"role": "system", "content": "Be kind."}, *TALK]}),
    (CHAT, {**_CHAT, "messages": [{"role": "developer", "content": "Be kind."}, *TALK]}),
    (CHAT, {**_CHAT, "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}),
    (CHAT, {"messages": TALK, "max_completion_tokens": 8, "temperature": 0}),
    (CHAT, {**_CHAT, "user": "u", "metadata": {}, "store": False}),
    (CHAT, {**_CHAT, "model": "baton-5m"}),
    (CHAT, {**_CHAT, "service_tier": "auto", "modalities": ["text"]}),
    *((EMBED, {"input": text}) for text in ("One", ["One", "Two"], [7, 8, 9])),
]

_WRONG_FIELDS: list[dict[str, Any]] = [
    {"temperature": -1},
    {"temperature": "warm"},
    {"min_p": 2},
    {"top_p": 0},
    {"top_p": 1.5},
    {"max_tokens": -1},
    {"max_tokens": 1.5},
    {"max_tokens": 10**9},
    {"n": 0},
    {"n": 1000},
    {"seed": "x"},
    {"stop": 5},
    {"stop": [""]},
    {"logit_bias": {"x": 1}},
    {"logit_bias": {"99999": 1}},
    {"presence_penalty": 9},
    {"frequency_penalty": "x"},
    {"stream": "yes"},
    {"stream_options": {"include_usage": True}},
    {"model": "another"},
    {"temprature": 1},
    {"baton": {"regexp": "a"}},
    {"baton": {"regex": "("}},
    {"baton": {"regex": "a", "choice": ["a"]}},
]

BAD: list[tuple[str, Any]] = [
    *((TEXT, {**_TEXT, **wrong}) for wrong in _WRONG_FIELDS),
    *((CHAT, {**_CHAT, **wrong}) for wrong in _WRONG_FIELDS[:4]),
    (TEXT, b""),
    (TEXT, b"{"),
    (TEXT, []),
    (TEXT, {}),
    *((TEXT, {**_TEXT, "prompt": wrong}) for wrong in ("", [], 5, [1, "a"], [-1], [10**6], None)),
    (TEXT, {**_TEXT, "prompt": "a " * 3000}),
    (TEXT, {**_TEXT, "logprobs": 1000}),
    (TEXT, {**_TEXT, "best_of": 3}),
    (CHAT, {**_ASKED}),
    *(
        (CHAT, {**_CHAT, "messages": wrong})
        for wrong in (
            [],
            "hi",
            [5],
            [{"role": "user"}],
            [{"role": "nurse", "content": "hi"}],
            [{"role": "tool", "content": "x"}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        )
    ),
    (CHAT, {**_CHAT, "messages": [{"role": "user", "content": "a " * 3000}]}),
    (CHAT, {**_CHAT, "top_logprobs": 2}),
    (CHAT, {**_CHAT, "tools": [{"type": "search"}]}),
    (CHAT, {**_CHAT, "tool_choice": "required"}),
    (
        CHAT,
        {**_CHAT, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
    ),
    (CHAT, {**_CHAT, "response_format": {"type": "xml"}}),
    (
        CHAT,
        {
            **_CHAT,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"type": "array", "uniqueItems": True}},
            },
        },
    ),
    (EMBED, {}),
    (EMBED, {"input": []}),
    (EMBED, {"input": "x", "dimensions": 7}),
    ("/v1/nothing", {}),
]


def _ask(address: str, path: str, body: Any) -> dict[str, Any]:
    """Status and what came, without what differs from one time to the next."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://{address}{path}", data, {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            status, text = answer.status, answer.read().decode()
            is_stream = answer.headers.get_content_type() == "text/event-stream"
    except urllib.error.HTTPError as error:
        status, text, is_stream = error.code, error.read().decode(), False
    if not is_stream:
        return {"status": status, "body": _plain(json.loads(text))}
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data")]
    assert events.pop() == "[DONE]"
    # How tokens share chunks is a matter of time: what all chunks have, and the text they join to.
    chunks = [_plain(json.loads(event)) for event in events]
    joined: dict[str, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        delta = choice.get("delta", choice)
        calls = "".join(call["function"]["arguments"] for call in delta.get("tool_calls", ()))
        piece = delta.get("text", delta.get("content")) or calls
        joined[str(choice["index"])] = joined.get(str(choice["index"]), "") + piece
    paths = sorted(set().union(*map(_paths, chunks)))
    usage = next((chunk["usage"] for chunk in chunks[::-1] if chunk.get("usage")), None)
    return {"status": status, "joined": joined, "paths": paths, "usage": usage}


_CHANGING = {"id", "created", "system_fingerprint", "cached_tokens"}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: "*" if key in _CHANGING and one is not None else _plain(one)
            for key, one in value.items()
        }
    if isinstance(value, list):
        if len(value) > 64 and all(isinstance(one, float) for one in value):
            return f"{len(value)} numbers, {value[0]:.2f} first"
        return [_plain(one) for one in value]
    return value


def _paths(value: Any, path: str = "$") -> set[str]:
    """Where a chunk has what: types, and the words that are one of a few."""
    if isinstance(value, dict):
        words = ("object", "role", "finish_reason", "type", "name")
        return set().union(
            *(
                {f"{path}.{key} = {one}"} if key in words else _paths(one, f"{path}.{key}")
                for key, one in value.items()
            )
        )
    if isinstance(value, list):
        return set().union(*(_paths(one, f"{path}[]") for one in value))
    return {f"{path}: {type(value).__name__}"}


@pytest.fixture(scope="module")
def openai_answers(cluster: LocalCluster) -> dict[str, Any]:
    found = {}
    for kind, bodies in (("good", GOOD), ("bad", BAD)):
        for index, (path, body) in enumerate(bodies):
            answer = _ask(cluster.http_address, path, body)
            found[f"{kind} {index} {path}"] = answer
    return found


def test_openai_bodies(openai_answers: dict[str, Any]) -> None:
    found = openai_answers
    wrong = [key for key, one in found.items() if (one["status"] == 200) != ("good" in key)]
    assert not wrong, "\n".join(f"{key}: {json.dumps(found[key])[:300]}" for key in wrong)
    assert len(GOOD) >= 60 and len(BAD) >= 55
    check("openai", found)


# -- gRPC

_SAMPLING = {"max_tokens": 8, "temperature": 0.0}
REQUESTS: list[dict[str, Any]] = [
    *(
        {"text": "Once upon a time", "sampling": {**_SAMPLING, **more}}
        for more in (
            {},
            {"temperature": 1.0, "seed": "7"},
            {"n": 2, "temperature": 1.0, "seed": "7"},
            {"stop": [" but"]},
            {"stop_token_ids": [738]},
            {"logprobs": 1},
            {"beam": {"num_beams": 2}},
            {"json_schema": json.dumps(SCHEMA), "max_tokens": 40},
            {"regex": "(cat|dog)"},
            {"choice": {"values": ["yes", "no"]}},
            {"bad_words": ["nobody"]},
            {"min_tokens": 4},
            {"ignore_eos": True},
            {"repetition_penalty": 1.3},
            {"allowed_token_ids": [300, 301]},
            {"top_k": 3, "temperature": 1.0, "seed": "9"},
            # refused
            {"temperature": -1.0},
            {"temperature": "NaN"},
            {"top_p": 1.5},
            {"top_p": -0.5},
            {"min_p": 2.0},
            {"max_tokens": 100_000},
            {"n": 1000},
            {"logprobs": 1000},
            {"presence_penalty": 9.0},
            {"frequency_penalty": -9.0},
            {"repetition_penalty": -1.0},
            {"stop": [""]},
            {"stop_token_ids": [100_000]},
            {"bad_words": [""]},
            {"regex": "("},
            {"json_schema": "{"},
            {"json_schema": '{"type": "array", "uniqueItems": true}'},
            {"beam": {"num_beams": 1000}},
            {"allowed_token_ids": [100_000]},
            {"min_tokens": 9},
        )
    ),
    *(
        {"sampling": _SAMPLING, **more}
        for more in (
            {"token_ids": {"ids": [7, 8, 9]}},
            {"chat": {"messages": [{"role": "user", "content": "Hello"}]}},
            {"text": "Once", "session": "s", "priority": 3, "tenant": "t"},
            {"text": "Once", "model": "baton-5m", "show_special_tokens": True},
            {"text": "Once upon", "request_id": "mine"},
            {},
            {"text": ""},
            {"token_ids": {"ids": []}},
            {"token_ids": {"ids": [100_000]}},
            {"text": "a " * 3000},
            {"text": "Once", "model": "another"},
            {"text": "Once", "adapter": "none"},
            {"text": "Once", "request_id": "x" * 1000},
            {"text": "Once", "tenant": "x" * 1000},
            {"text": "Once", "session": "x" * 10_000},
            {"chat": {"messages": []}},
            {"chat": {"messages": [{"role": "nurse", "content": "Hello"}]}},
            {"text": "Once", "embed": True},
        )
    ),
    {"text": "Once", "embed": True},
]


@pytest.fixture(scope="module")
def grpc_answers(cluster: LocalCluster) -> dict[str, Any]:
    found = {}
    with grpc.insecure_channel(cluster.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for index, fields in enumerate(REQUESTS):
            try:
                request = json_format.ParseDict(fields, inference_pb2.GenerateRequest())
            except json_format.ParseError as error:
                raise AssertionError((index, fields)) from error
            texts: dict[str, str] = {}
            reasons: dict[str, str] = {}
            answer: dict[str, Any] = {"code": "OK"}
            try:
                for message in stub.Generate(request, timeout=TIMEOUT_S):
                    sample = str(message.sample_index)
                    texts[sample] = texts.get(sample, "") + message.text
                    if message.finish_reason:
                        reasons[sample] = common_pb2.FinishReason.Name(message.finish_reason)
                    if message.HasField("usage"):
                        answer["num_output_tokens"] = message.usage.num_output_tokens
            except grpc.RpcError as error:
                answer = {"code": error.code().name, "details": error.details()}
            else:
                answer |= {"texts": texts, "reasons": reasons}
            found[f"{index} {json.dumps(fields)[:80]}"] = answer
    return found


def test_grpc_requests(grpc_answers: dict[str, Any]) -> None:
    check("grpc", grpc_answers)


# -- command lines


WRONG_LINES = (
    "",
    "nothing",
    "up --prot 1",
    "up --port x",
    "up --port 99999",
    "up --prefill 0",
    "up --decode -1",
    "up --model /nothing/here",
    "up --set router",
    "up --set router.liste=x",
    "up --set nothing.listen=x",
    "up --transport tcp",
    "up --min-decode 1",
    "generate",
    "generate hi --max-tokens 0",
    "generate hi --temperature hot",
    "generate hi --address nowhere",
    "generate x,y --token-ids",
    "chat --temperature -1",
    "status --address 127.0.0.1:1",
    "status extra",
    "explain --address 127.0.0.1:1",
    "top --address 127.0.0.1:1",
    "audit --address 127.0.0.1:1",
    "block",
    "block zz --address 127.0.0.1:1",
    "models --address 127.0.0.1:1",
    "demo --max-tokens x",
    "replay",
    "replay /nowhere.json",
    "bench",
    "bench nothing",
    "bench latency --batch 0",
    "adapter",
    "adapter load",
    "adapter load x",
    "keys",
    "keys rotate /nowhere",
    "api-key",
    "certs",
)


def test_command_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert len(WRONG_LINES) == 40
    found: dict[str, Any] = {}
    shown = _help(capsys)
    commands = re.findall(r"^  ([a-z-]+) ", shown.partition("Commands:")[2], re.MULTILINE)
    assert len(commands) > 12
    for command in ("", *commands):
        shown = _help(capsys, *command.split())
        found[f"{command} --help"] = shown.splitlines()
    for line in WRONG_LINES:
        code, out, err = _exit(capsys, *line.split())
        last = err.strip().splitlines()[-1] if err.strip() else ""
        found[line] = {"code": code, "prints": bool(out), "says": last}
    check("command_lines", found)


def _exit(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[Any, str, str]:
    try:
        code: Any = cli.main(list(arguments))
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    return code, out, err


def _help(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    code, out, _ = _exit(capsys, *command, "--help")
    assert code == 0
    return out


# -- metrics


def _metrics(cluster: LocalCluster) -> dict[str, Any]:
    """Type and labels of each family, by kind of process."""
    found: dict[str, dict[str, Any]] = {}
    for info in cluster.processes.values():
        if not info.metrics_address:
            continue
        url = f"http://{info.metrics_address}/metrics"
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            lines = answer.read().decode().splitlines()
        kinds = dict(line.split()[2:4] for line in lines if line.startswith("# TYPE"))
        for name, kind in kinds.items():
            if name.startswith("baton_"):
                labels: set[str] = set()
                for line in lines:
                    if re.match(rf"{name}(_bucket|_sum|_count|_total)?[{{ ]", line):
                        labels |= set(re.findall(r'[{,]([a-z_]+)="', line))
                found[f"{info.kind} {name}"] = {"type": kind, "labels": sorted(labels)}
    return dict(sorted(found.items()))


@pytest.mark.usefixtures("openai_answers", "grpc_answers")  # what was never counted has no labels
def test_names_types_and_labels_of_all_metrics(cluster: LocalCluster) -> None:
    """Some are counted only after a while, such as a measured link."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while True:
        found = _metrics(cluster)
        assert len(found) > 100
        try:
            check("metrics", found)
        except AssertionError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.2)
        else:
            return


# -- blocks


@pytest.mark.usefixtures("openai_answers")
def test_each_block_has_a_history_that_begins_where_it_was_written(
    cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = _exit(capsys, "block", "--json", "--num", "64", "--redis", cluster.redis_url)
    assert code == 0, err
    stores = json.loads(out)["stores"]
    blocks = [block for store in stores for block in store["blocks"]]
    begun = [block["events"][0] for block in blocks if not block.get("num_events_forgotten")]
    assert begun and {event["what"] for event in begun} == {"written"}
