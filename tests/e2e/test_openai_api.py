"""The openai client against a whole cluster: what comes over HTTP is what comes over gRPC, computed
by the same two workers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch

from baton.client import SyncClient
from baton.local_cluster import ClusterConfig, LocalCluster
from tests.e2e.conftest import assert_idle
from tests.e2e.oracle import oracle

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

PROMPT = "Once upon a time"
TALK: Any = [{"role": "user", "content": "Tell me a story about a dog."}]


@pytest.fixture(scope="module")
def running() -> Iterator[LocalCluster]:
    with LocalCluster(ClusterConfig(port=0)) as cluster:
        yield cluster
        assert_idle(cluster)


@pytest.fixture
def http(running: LocalCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"http://{running.http_address}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


def test_both_doors_give_the_same_answer(running: LocalCluster, http: openai.OpenAI) -> None:
    with SyncClient(running.address) as grpc_client:
        expected = grpc_client.complete(PROMPT, max_tokens=24, seed=7, temperature=1.0)
    stream = http.completions.create(
        model="baton-5m",
        prompt=PROMPT,
        max_tokens=24,
        seed=7,
        temperature=1.0,
        stream=True,
        extra_body={"baton": {"provenance": True}},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text
    extra: Any = chunks[-1].model_extra
    (account,) = extra["baton"]["requests"]
    assert [leg["role"] for leg in account["provenance"]["legs"]] == ["prefill", "decode"]
    assert account["seed"] == 7


def test_a_cached_prompt_shows_in_the_usage(http: openai.OpenAI) -> None:
    prompt = "One day a little girl went to the park with her mom and her dog. " * 4

    def num_cached() -> int:
        usage = http.completions.create(model="baton-5m", prompt=prompt, max_tokens=2).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    assert num_cached() == 0
    assert num_cached() >= 32


def test_a_schema_holds_and_logprobs_spell_the_text(http: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    answer = http.chat.completions.create(
        model="baton-5m",
        messages=TALK,
        max_tokens=64,
        n=2,
        logprobs=True,
        top_logprobs=3,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "who", "schema": schema, "strict": True},
        },
    )
    for choice in answer.choices:
        content = choice.message.content or ""
        found = json.loads(content)
        assert choice.finish_reason == "stop" and set(found) == {"name", "age"}
        assert choice.logprobs is not None and choice.logprobs.content is not None
        entries = choice.logprobs.content
        assert b"".join(bytes(entry.bytes or ()) for entry in entries).decode() == content
        assert all(len(entry.top_logprobs) == 3 and entry.logprob <= 0 for entry in entries)


def test_a_prompts_log_probabilities_are_those_of_transformers(
    running: LocalCluster, http: openai.OpenAI
) -> None:
    """As evaluation harnesses ask: nothing drawn, or one token that they leave out; the second time
    with the prompt in every cache."""
    truth = oracle("baton-5m")
    text = "One day a little girl went to the caf\u00e9 with her mom and her dog. " * 20
    ids = truth.tokenizer(text).input_ids
    with torch.inference_mode():
        expected = torch.log_softmax(truth.model(torch.tensor([ids])).logits[0].float(), dim=-1)
    own = [float(row[token_id]) for row, token_id in zip(expected, ids[1:], strict=False)]
    for max_tokens in (0, 1):
        answer = http.completions.create(
            model="baton-5m", prompt=text, max_tokens=max_tokens, echo=True, logprobs=3
        )
        (choice,) = answer.choices
        found: Any = choice.logprobs
        assert choice.text.startswith(text) and answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
            len(ids),
            max_tokens,
        )
        assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
        assert found.token_logprobs[1 : len(ids)] == pytest.approx(own, abs=1e-3)
        assert len(found.tokens) == len(ids) + max_tokens
        for top, row in zip(found.top_logprobs[1 : len(ids)], expected, strict=False):
            assert sorted(top.values())[-3:] == pytest.approx(
                sorted(row.topk(3).values.tolist()), abs=1e-3
            )
    with SyncClient(running.address) as grpc_client:
        completion = grpc_client.complete(text, max_tokens=2, prompt_logprobs=0)
        assert [entry.token_id for entry in completion.prompt_logprobs] == ids
        assert [entry.logprob for entry in completion.prompt_logprobs][1:] == pytest.approx(
            own, abs=1e-3
        )
        assert completion.usage.num_output_tokens == 2


def test_embeddings_are_of_length_1_and_alike_for_alike_texts(http: openai.OpenAI) -> None:
    texts = ["The dog ran home.", "The dog ran home.", "She gave him a red ball."]
    answer = http.embeddings.create(model="baton-5m", input=texts)
    one, same, other = (entry.embedding for entry in answer.data)
    assert sum(x * x for x in one) == pytest.approx(1, abs=1e-3)
    assert one == pytest.approx(same, abs=1e-4) and one != pytest.approx(other, abs=1e-2)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_the_bundled_model_calls_a_tool_where_a_call_is_forced(
    http: openai.OpenAI, choice: Any
) -> None:
    parameters = {
        "type": "object",
        "properties": {"mood": {"enum": ["glad", "sad"]}},
        "required": ["mood"],
        "additionalProperties": False,
    }
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    asked = http.chat.completions.create(
        model="baton-5m",
        messages=TALK,
        tools=[tool],
        tool_choice=choice,
        parallel_tool_calls=False,
        max_tokens=64,
        temperature=0,
    )
    (call,) = asked.choices[0].message.tool_calls or []
    assert call.type == "function" and call.function.name == "f"
    assert json.loads(call.function.arguments)["mood"] in ("glad", "sad")
    # The call and its result go into the next prompt; auto reads what the model writes.
    assistant: Any = {"role": "assistant", "tool_calls": [call.model_dump()]}
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    answer = http.chat.completions.create(
        model="baton-5m", messages=[*TALK, assistant, result], tools=[tool], max_tokens=8
    )
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")
