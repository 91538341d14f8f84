"""What a whole cluster of real processes answers. The first promise: disaggregated == one engine ==
`transformers`, token for token, over each transport; and the KV really moved. Then, on the first of
these clusters, all that can be asked beyond a plain answer: samples, beams, structured output,
adapters, records and metrics; and the openai client, for which what comes over HTTP is what comes
over gRPC.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from baton import ClusterConfig, LocalCluster, cli
from baton.answers import Completion
from baton.client import Client, SyncClient
from baton.errors import InvalidArgument
from protos import common_pb2
from tests.conftest import LONG, SESSION_SEED
from tests.harness.adapters import merged, save_adapter
from tests.harness.beam_search import Search, beam_reference
from tests.harness.bundled_pair import alone
from tests.harness.cluster import (
    BLOCK_SIZE,
    CLUSTERS,
    Oracle,
    Sampling,
    assert_idle,
    leg,
    oracle,
    problems_of,
    prompts,
    run_engine,
    single_engine,
)

# The long run takes minutes a test.
pytestmark = [pytest.mark.oracle, pytest.mark.e2e, pytest.mark.timeout(1200)]

MODEL = ClusterConfig().model
MAX_TOKENS = 24
# What no transport changes runs over one.
over_one_transport = pytest.mark.parametrize("cluster", CLUSTERS[:1], indirect=True)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"enum": [1, 2, 3]}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
PROMPT = "Once upon a time"
TALK: Any = [{"role": "user", "content": "Tell me a story about a dog."}]


@pytest.fixture(scope="module")
def greedy(reference: Oracle) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and what is right, over whichever transport."""
    wanted = prompts(reference, random.Random(SESSION_SEED), 200 if LONG else 12)
    return wanted, [reference.greedy(prompt, MAX_TOKENS) for prompt in wanted]


async def complete_all(
    address: str,
    wanted: Sequence[Sequence[int]],
    concurrency: int,
    options: Sequence[dict[str, object]] = (),
) -> list[Completion]:
    """All prompts, at most `concurrency` at once; answers in their order."""
    gate = asyncio.Semaphore(concurrency)
    async with Client(address) as client:

        async def one(index: int) -> Completion:
            async with gate:
                extra = options[index] if options else {"temperature": 0.0}
                return await client.complete(
                    list(wanted[index]), max_tokens=MAX_TOKENS, timeout_s=120, **extra
                )

        return list(await asyncio.gather(*(one(index) for index in range(len(wanted)))))


def assert_moved(completion: Completion) -> None:
    """The account sums up, and decode computed nothing of the prompt."""
    num_prompt = completion.usage.num_prompt_tokens
    for one in completion.provenance.legs:
        total = one.num_tokens_computed + one.num_tokens_local + one.num_tokens_from_store
        assert total == num_prompt, one
        assert not one.recomputed, one
    if len(completion.token_ids) > 1:
        assert leg(completion, "decode").num_tokens_computed == 0


def split(total: int, rng: random.Random) -> list[int]:
    """Random group sizes of 1 to 32 that sum to `total`: how ragged batches come about."""
    sizes = []
    while total:
        sizes.append(min(total, rng.randint(1, 32)))
        total -= sizes[-1]
    return sizes


@over_one_transport
def test_the_stores_own_counters_saw_the_bytes(
    cluster: LocalCluster, client: SyncClient, seed: int
) -> None:
    """First of all: blocks of earlier answers would be written back late."""
    rng = random.Random(seed + 2)
    before = assert_idle(cluster).stores[0]
    frame_bytes = before.frame_bytes
    for length in (5, 16, 33, 90):
        prompt = [rng.randrange(100, 2000) for _ in range(length)]
        answer = client.complete(prompt, max_tokens=4, temperature=0.0, ignore_eos=True)
        num_bytes = -(-length // BLOCK_SIZE) * frame_bytes  # a tail block travels like a full one
        after = before
        deadline_s = time.monotonic() + 40
        while after.num_bytes_read - before.num_bytes_read < num_bytes:
            assert time.monotonic() < deadline_s, "the store does not hear of what was read"
            after = assert_idle(cluster).stores[0]
        assert after.num_bytes_written - before.num_bytes_written == num_bytes
        # A worker tells of its reads with its next renewal or release: some may be older.
        assert after.num_bytes_read % frame_bytes == 0
        assert leg(answer, "decode").num_bytes_read == num_bytes
        assert leg(answer, "prefill").num_bytes_written == num_bytes
        assert answer.provenance.legs[0].transport == cluster.config.transport
        before = after
    assert assert_idle(cluster).stores[0].num_bytes_written == before.num_bytes_written


async def test_greedy_equals_transformers_with_and_without_a_prefix_hit(
    cluster: LocalCluster, greedy: tuple[list[list[int]], list[list[int]]], seed: int
) -> None:
    rng = random.Random(seed)
    wanted, expected = greedy
    for attempt in ("cold", "prefix hit"):
        done = 0
        for size in split(len(wanted), rng):
            group = slice(done, done + size)
            answers = await complete_all(cluster.address, wanted[group], concurrency=size)
            for prompt, answer, right in zip(wanted[group], answers, expected[group], strict=True):
                assert list(answer.token_ids) == right, (attempt, len(prompt), prompt)
                assert_moved(answer)
            done += size


async def test_sampled_equals_one_engine_whatever_the_batch_around(
    cluster: LocalCluster, reference: Oracle, seed: int, scale: Callable[[int], int]
) -> None:
    rng = random.Random(seed + 1)
    count = max(12, scale(200))
    wanted = prompts(reference, rng, count)
    settings = [
        {
            "temperature": rng.choice([0.3, 0.7, 1.0, 1.5]),
            "top_p": rng.choice([0.5, 0.9, 1.0]),
            "top_k": rng.choice([0, 5, 40]),
            "seed": rng.randrange(2**63),
        }
        for _ in range(count)
    ]
    engine = single_engine(MODEL)
    expected = []
    for index, (prompt, one) in enumerate(zip(wanted, settings, strict=True)):
        sampling = Sampling(max_tokens=MAX_TOKENS, **one)  # type: ignore[arg-type]
        expected += run_engine(engine, [(prompt, sampling)], prefix_cache=f"{seed}-{index}")
    answers = await complete_all(cluster.address, wanted, concurrency=8, options=settings)
    for prompt, answer, right, one in zip(wanted, answers, expected, settings, strict=True):
        assert list(answer.token_ids) == right, (len(prompt), one)
        assert answer.seed == one["seed"]
        assert_moved(answer)


@over_one_transport
def test_a_second_prompt_computes_only_what_follows_its_last_full_block(
    cluster: LocalCluster, client: SyncClient, reference: Oracle, seed: int
) -> None:
    rng = random.Random(seed + 3)
    for length in (1, 15, 16, 17, 32, 33, 100):
        prompt = [rng.randrange(100, 2000) for _ in range(length)]
        options = {"max_tokens": 3, "temperature": 0.0, "ignore_eos": True}
        first = client.complete(prompt, **options)
        second = client.complete(prompt, **options)
        num_cached = (length - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert second.token_ids == first.token_ids
        assert leg(second, "prefill").num_tokens_computed == length - num_cached
        assert second.usage.num_cached_tokens == num_cached
        if length == 100:
            # A new life of the prefill worker has an empty device cache: the store must give it.
            cluster.restart("prefill-0")
            cluster.wait_ready(60)
            third = client.complete(prompt, **options)
            assert third.token_ids == first.token_ids
            assert leg(third, "prefill").num_tokens_local == 0
            assert leg(third, "prefill").num_tokens_from_store == num_cached
            assert leg(third, "prefill").num_tokens_computed == length - num_cached
            assert leg(third, "prefill").incarnation != leg(first, "prefill").incarnation


@over_one_transport
def test_the_index_in_redis_knows_what_the_store_holds(
    cluster: LocalCluster, client: SyncClient, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """`baton audit` compares them, hash by hash, once the store has told Redis what is new."""

    def audited() -> dict[str, Any]:
        assert cli.main(["audit", "--redis", cluster.redis_url, "--json"]) == 0
        (store,) = json.loads(capsys.readouterr().out)["stores"]
        assert store["num_missing"] == store["num_false"] == 0
        found: dict[str, Any] = store
        return found

    before = audited()
    prompt = [random.Random(seed + 5).randrange(100, 2000) for _ in range(70)]
    client.complete(prompt, max_tokens=2, temperature=0.0, ignore_eos=True)
    deadline = time.monotonic() + 10
    while audited()["num_right"] < before["num_right"] + 70 // BLOCK_SIZE:
        assert time.monotonic() < deadline, "the prompt's blocks are not in the index"
    assert problems_of(client.status()) == []


@over_one_transport
def test_one_token_never_touches_decode(
    cluster: LocalCluster, client: SyncClient, reference: Oracle, seed: int
) -> None:
    (prompt,) = prompts(reference, random.Random(seed + 4), 1)
    (right,) = reference.greedy(prompt, 1)
    before = {worker.worker_id: worker.num_output_tokens for worker in client.status().workers}
    by_length = client.complete(prompt, max_tokens=1, temperature=0.0, ignore_eos=True)
    assert by_length.token_ids == (right,)
    assert by_length.finish_reason == "length"
    by_stop = client.complete(
        prompt, max_tokens=9, temperature=0.0, ignore_eos=True, stop_token_ids=[right]
    )
    assert by_stop.finish_reason == "stop_token"
    assert by_stop.stop_token_id == right
    for answer in (by_length, by_stop):
        assert [one.role for one in answer.provenance.legs] == ["prefill"]
    after = {worker.worker_id: worker.num_output_tokens for worker in assert_idle(cluster).workers}
    assert after["decode-0"] == before["decode-0"]


@over_one_transport
def test_text_streams_in_pieces_that_join_to_the_whole(
    client: SyncClient, reference: Oracle
) -> None:
    chunks = list(client.generate("Once upon a time", max_tokens=40, temperature=0.0))
    text = "".join(chunk.text for chunk in chunks)
    ids = [token for chunk in chunks for token in chunk.token_ids]
    assert len(chunks) > 3
    kept = [token for token in ids if token not in reference.eos_token_ids]
    assert text == reference.tokenizer.decode(kept, skip_special_tokens=True)
    # A stop string is cut where it begins, and what overshot it is not counted.
    word = text.split()[4]
    cut = client.complete("Once upon a time", max_tokens=40, temperature=0.0, stop=[word])
    assert cut.finish_reason == "stop_string"
    assert cut.stop_string == word
    assert cut.text == text[: text.index(word)]
    assert cut.usage.num_output_tokens == len(cut.token_ids) < len(ids)


@over_one_transport
def test_a_prompt_meets_what_its_own_tenants_left_and_nothing_else(
    cluster: LocalCluster, client: SyncClient, reference: Oracle, seed: int
) -> None:
    """The same prompt from each tenant, twice: a and b share a scope (conftest.py) and hit each
    other's blocks from the first time on; a tenant called like the scope hits only its own."""
    rng = random.Random(seed + 6)
    prompt = [rng.randrange(100, 2000) for _ in range(200)]
    expected = reference.greedy(prompt, 4)
    full = (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    seen: dict[str, list[int]] = {}
    for tenant in ("a", "b", "c", "team", "") * 2:
        answer = client.complete(prompt, max_tokens=4, temperature=0.0, tenant=tenant)
        assert list(answer.token_ids) == expected
        num_cached = len(prompt) - leg(answer, "prefill").num_tokens_computed
        seen.setdefault(tenant, []).append(num_cached)
    assert seen == {
        "a": [0, full],
        "b": [full, full],
        "c": [0, full],
        "team": [0, full],
        "": [0, full],
    }


@pytest.fixture
def http(cluster: LocalCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"http://{cluster.http_address}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


@over_one_transport
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


@over_one_transport
def test_stop_strings_end_their_own_sample(client: SyncClient) -> None:
    options: dict[str, Any] = {"n": 4, "max_tokens": 60, "temperature": 1.0, "seed": 3}
    whole = client.complete_samples("Once upon a time", **options)
    cut = client.complete_samples("Once upon a time", stop=[" the"], **options)
    for one, other in zip(whole, cut, strict=True):
        assert other.text == one.text.partition(" the")[0]
        is_stopped = " the" in one.text
        assert other.finish_reason == ("stop_string" if is_stopped else one.finish_reason)


@over_one_transport
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


@over_one_transport
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


@over_one_transport
def test_words_that_are_forbidden_never_come(client: SyncClient) -> None:
    asked: dict[str, Any] = {"max_tokens": 60, "temperature": 0.0}
    plain = client.complete("Once upon a time", **asked)
    word = re.findall(r" [a-z]+", plain.text)[1]
    other = client.complete("Once upon a time", bad_words=[word], **asked)
    assert other.token_ids != plain.token_ids


@over_one_transport
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


@over_one_transport
def test_an_adapter_comes_and_goes_at_run_time(
    cluster: LocalCluster, client: SyncClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
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


@over_one_transport
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
@over_one_transport
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


@over_one_transport
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


@over_one_transport
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


@over_one_transport
def test_a_cached_prompt_shows_in_the_usage(http: openai.OpenAI) -> None:
    prompt = "One day a little girl went to the park with her mom and her dog. " * 4

    def num_cached() -> int:
        usage = http.completions.create(model=MODEL, prompt=prompt, max_tokens=2).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    assert num_cached() == 0
    assert num_cached() >= 32


@over_one_transport
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


@over_one_transport
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


@over_one_transport
def test_embeddings_are_of_length_1_and_alike_for_alike_texts(http: openai.OpenAI) -> None:
    texts = ["The dog ran home.", "The dog ran home.", "She gave him a red ball."]
    answer = http.embeddings.create(model=MODEL, input=texts)
    one, same, other = (entry.embedding for entry in answer.data)
    assert sum(x * x for x in one) == pytest.approx(1, abs=1e-3)
    assert one == pytest.approx(same, abs=1e-4) and one != pytest.approx(other, abs=1e-2)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
@over_one_transport
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
