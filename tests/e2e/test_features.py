"""What can be asked beyond a plain answer, through a whole cluster of real processes: samples,
beams, structured output, adapters, traces, records and metrics; and the openai client, for which
what comes over HTTP is what comes over gRPC.
"""

from __future__ import annotations

import json
import random
import re
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from baton import cli
from baton.client import SyncClient
from baton.errors import InvalidArgument
from baton.local_cluster import ClusterConfig, LocalCluster
from protos import common_pb2
from tests.harness.adapters import merged, save_adapter
from tests.harness.beam_search import Search, beam_reference
from tests.harness.bundled_pair import MODEL, alone
from tests.harness.cluster import Oracle, assert_idle, oracle, prompts, single_engine

pytestmark = [pytest.mark.oracle, pytest.mark.e2e, pytest.mark.timeout(600)]

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"enum": [1, 2, 3]}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
PROMPT = "Once upon a time"
TALK: Any = [{"role": "user", "content": "Tell me a story about a dog."}]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(tmp_path_factory.mktemp("adapter") / "a", oracle(MODEL).model, 1)


@pytest.fixture(scope="module")
def cluster(adapter: Path) -> Iterator[LocalCluster]:
    config = ClusterConfig(
        port=0,
        model=MODEL,
        overrides=(
            f'worker.adapters=["tales={adapter}"]',
            "worker.metrics_listen=127.0.0.1:0",
            # No token of an answer may depend on it, whatever is asked.
            'decode.engine.speculation.drafters=["ngram"]',
            'decode.engine.speculation.draft_models=["baton-5m-draft"]',
            "decode.engine.speculation.always=true",
        ),
    )
    with LocalCluster(config) as running:
        yield running
        assert_idle(running)


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[SyncClient]:
    with SyncClient(cluster.address) as connected:
        yield connected


@pytest.fixture
def http(cluster: LocalCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"http://{cluster.http_address}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


def test_samples_are_those_of_one_engine(
    client: SyncClient, seed: int, scale: Callable[[int], int]
) -> None:
    rng = random.Random(seed)
    for prompt in prompts(oracle(MODEL), rng, scale(60)):
        n, draw = rng.randint(1, 4), rng.randrange(2**32)
        penalty = rng.uniform(0.0, 1.0)
        found = client.complete_samples(
            prompt,
            n=n,
            max_tokens=20,
            temperature=0.9,
            top_p=1.0,
            top_k=0,
            seed=draw,
            presence_penalty=penalty,
        )
        expected = alone(
            single_engine(MODEL),
            prompt,
            n=n,
            max_tokens=20,
            temperature=0.9,
            seed=draw,
            presence_penalty=penalty,
            ignore_eos=False,
        )
        assert [list(one.token_ids) for one in found] == [one.token_ids for one in expected]


def test_stop_strings_end_their_own_sample(client: SyncClient) -> None:
    options: dict[str, Any] = {"n": 4, "max_tokens": 60, "temperature": 1.0, "seed": 3}
    whole = client.complete_samples("Once upon a time", **options)
    cut = client.complete_samples("Once upon a time", stop=[" the"], **options)
    for one, other in zip(whole, cut, strict=True):
        assert other.text == one.text.partition(" the")[0]
        is_stopped = " the" in one.text
        assert other.finish_reason == ("stop_string" if is_stopped else one.finish_reason)


def test_beams_are_those_of_transformers(client: SyncClient) -> None:
    source = oracle(MODEL)
    for index, prompt in enumerate(prompts(source, random.Random(5), 4)):
        beam = common_pb2.BeamParams(num_beams=4, length_penalty=1.2)
        num_tokens = (1, 9, 12, 20)[index]
        found = client.complete_samples(
            prompt, num_beams=4, n=2, length_penalty=1.2, max_tokens=num_tokens
        )
        expected = beam_reference(source.model, Search(list(prompt), num_tokens, 2, beam))
        assert [list(one.token_ids) for one in found] == [ids for ids, _ in expected]
        for one, (_, score) in zip(found, expected, strict=True):
            assert one.score == pytest.approx(score, rel=1e-3, abs=1e-3)
            assert one.text == source.tokenizer.decode(one.token_ids, skip_special_tokens=True)


def test_structured_output(client: SyncClient) -> None:
    options: dict[str, Any] = {"max_tokens": 80, "temperature": 1.0}
    for seed in range(3):
        answer = client.complete("Tell me:", json_schema=SCHEMA, seed=seed, **options)
        assert json.loads(answer.text)["n"] in (1, 2, 3)
        answer = client.complete("Tell me:", regex=r"(yes|no)+, \d{2}", seed=seed, **options)
        assert re.fullmatch(r"(yes|no)+, \d{2}", answer.text) or answer.finish_reason == "length"
        answer = client.complete("Tell me:", choice=["left", "right"], seed=seed, **options)
        assert answer.text in ("left", "right")
    with pytest.raises(InvalidArgument, match=r"^sampling\.regex: ") as caught:
        client.complete("Tell me:", regex="(", **options)
    assert caught.value.field == "sampling.regex"


def test_words_that_are_forbidden_never_come(client: SyncClient) -> None:
    asked: dict[str, Any] = {"max_tokens": 60, "temperature": 0.0}
    plain = client.complete("Once upon a time", **asked)
    word = re.findall(r" [a-z]+", plain.text)[1]
    other = client.complete("Once upon a time", bad_words=[word], **asked)
    assert other.token_ids != plain.token_ids


def test_an_adapter_is_its_merged_weights(client: SyncClient, adapter: Path) -> None:
    source = oracle(MODEL)
    model = merged(source.model, adapter)
    for prompt in prompts(source, random.Random(7), 3):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=12,
                do_sample=False,
                pad_token_id=0,
            )
        for _ in range(2):  # the second time its prefix is in the caches
            answer = client.complete(prompt, adapter="tales", max_tokens=12, temperature=0.0)
            assert list(answer.token_ids) == out[0, len(prompt) :].tolist()
        plain = client.complete(prompt, max_tokens=12, temperature=0.0)
        assert list(plain.token_ids) == source.greedy(prompt, 12)
    with pytest.raises(InvalidArgument, match="loaded are: tales"):
        client.complete("x", adapter="none")


def test_an_adapter_comes_and_goes_at_run_time(
    cluster: LocalCluster,
    client: SyncClient,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = oracle(MODEL)
    folder = save_adapter(tmp_path / "b", source.model, 2)
    here = ["--address", cluster.address]
    assert cli.main(["adapter", "load", "more", str(folder), *here]) == 0
    assert cli.main(["adapter", "list", *here]) == 0
    out = capsys.readouterr().out
    assert out.count("loaded more") == 2 and out.count(": tales, ") == 2
    prompt = prompts(source, random.Random(9), 1)[0]
    asked: dict[str, Any] = {"adapter": "more", "max_tokens": 12, "temperature": 0.0}
    answer = client.complete(prompt, **asked)  # "loaded" means that it is served
    expected = Oracle(source.path, merged(source.model, folder), source.tokenizer)
    assert list(answer.token_ids) == expected.greedy(prompt, 12)
    assert cli.main(["adapter", "unload", "more", *here]) == 0
    assert cli.main(["adapter", "unload", "more", *here]) == 1
    assert "no adapter 'more' is loaded; loaded are: tales" in capsys.readouterr().err


def test_a_record_is_replayed(
    cluster: LocalCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.json"
    arguments = ["generate", "Once upon a time", "-n", "2", "--temperature", "0.9"]
    arguments += ["--max-tokens", "24", "--stop", " and", "--frequency-penalty", "0.4"]
    assert cli.main([*arguments, "--record", str(file), "--address", cluster.address]) == 0
    capsys.readouterr()
    assert cli.main(["replay", str(file), "--address", cluster.address]) == 0
    assert capsys.readouterr().out.startswith("replayed: ")
    value = json.loads(file.read_text())
    sample = value["samples"][1]
    assert [trace["token_id"] for trace in sample["traces"]] == sample["token_ids"]
    sample["token_ids"][3] += 1
    file.write_text(json.dumps(value))
    assert cli.main(["replay", str(file), "--address", cluster.address]) == 1
    assert capsys.readouterr().out.startswith("sample 1 differs at output token 3\n")


@pytest.mark.long
def test_a_record_is_replayed_by_a_cluster_of_its_own(
    cluster: LocalCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.json"
    arguments = ["generate", "Once", "--temperature", "1", "--max-tokens", "9", "--record"]
    assert cli.main([*arguments, str(file), "--address", cluster.address]) == 0
    capsys.readouterr()
    assert cli.main(["replay", str(file), "--start"]) == 0
    assert "all equal" in capsys.readouterr().out
    value = json.loads(file.read_text())
    value["model_fingerprint"] = "ab" * 32
    file.write_text(json.dumps(value))
    assert cli.main(["replay", str(file), "--address", cluster.address]) == 1
    assert "abababababababab" in capsys.readouterr().err


def test_metrics_are_served_where_status_says(client: SyncClient) -> None:
    client.complete("Once upon a time there was", max_tokens=24, ignore_eos=True)
    workers = client.status().workers
    assert all(worker.num_prefix_tokens_asked for worker in workers)
    for worker in workers:
        with urllib.request.urlopen(f"http://{worker.metrics_address}/metrics", timeout=10) as got:
            text = got.read().decode()
        assert f'baton_up{{role="{worker.role}",worker_id="{worker.worker_id}"}} 1.0' in text
        kept = re.search(r"^baton_guessed_tokens_kept_total\{.*\} (\S+)$", text, re.MULTILINE)
        assert kept, text
        # One of the cluster's workers guesses; its answers are everybody's.
        assert (float(kept[1]) > 0) == (worker.role == "decode")


def test_both_doors_give_the_same_answer(client: SyncClient, http: openai.OpenAI) -> None:
    expected = client.complete(PROMPT, max_tokens=24, seed=7, temperature=1.0)
    stream = http.completions.create(
        model=MODEL,
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
        usage = http.completions.create(model=MODEL, prompt=prompt, max_tokens=2).usage
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
        model=MODEL,
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
    client: SyncClient, http: openai.OpenAI
) -> None:
    """As evaluation harnesses ask: nothing drawn, or one token that they leave out; the second time
    with the prompt in every cache."""
    truth = oracle(MODEL)
    text = "One day a little girl went to the caf\u00e9 with her mom and her dog. " * 20
    ids = truth.tokenizer(text).input_ids
    with torch.inference_mode():
        expected = torch.log_softmax(truth.model(torch.tensor([ids])).logits[0].float(), dim=-1)
    own = [float(row[token_id]) for row, token_id in zip(expected, ids[1:], strict=False)]
    for max_tokens in (0, 1):
        answer = http.completions.create(
            model=MODEL, prompt=text, max_tokens=max_tokens, echo=True, logprobs=3
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
    completion = client.complete(text, max_tokens=2, prompt_logprobs=0)
    assert [entry.token_id for entry in completion.prompt_logprobs] == ids
    assert [entry.logprob for entry in completion.prompt_logprobs][1:] == pytest.approx(
        own, abs=1e-3
    )
    assert completion.usage.num_output_tokens == 2


def test_embeddings_are_of_length_1_and_alike_for_alike_texts(http: openai.OpenAI) -> None:
    texts = ["The dog ran home.", "The dog ran home.", "She gave him a red ball."]
    answer = http.embeddings.create(model=MODEL, input=texts)
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
        model=MODEL,
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
        model=MODEL, messages=[*TALK, assistant, result], tools=[tool], max_tokens=8
    )
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")
