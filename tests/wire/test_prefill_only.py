"""What a prefill worker answers alone, embeddings and log probabilities of prompts: over HTTP and
gRPC through the router with fake workers, and out of a real prefill worker of the fake model."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import pytest
import torch

from process.rpc_errors import InvalidArgument
from tests.harness.gated_engine import HIDDEN_SIZE, prompt_of
from tests.harness.odd_prefills import LeavesOut
from tests.harness.prefill_decode_pair import handover_of, pair, whole
from tests.harness.router_bench import (
    TOKENIZER,
    Bench,
    HttpBench,
    http_bench,
    ids_of,
    request,
    rest_of,
    running,
    saying,
)

pytestmark = pytest.mark.oracle

# ---- log probabilities of prompts


async def _ask(bench: HttpBench, **body: Any) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session:
        asked = session.post(f"{bench.url}/v1/completions", json={"echo": True, **body})
        async with asked as response:
            if not body.get("stream"):
                return response.status, await response.json()
            lines = (await response.text()).splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    whole: dict[str, Any] = {"text": "", "logprobs": {}}
    for (choice,) in (json.loads(line)["choices"] for line in data):
        whole["text"] += choice["text"]
        whole["finish_reason"] = choice["finish_reason"]
        for key, values in choice["logprobs"].items():
            whole["logprobs"].setdefault(key, []).extend(values)
    return response.status, {"choices": [whole]}


@pytest.mark.parametrize("max_tokens", [0, 1, 4])
async def test_an_echo_has_them_before_those_of_the_answer(max_tokens: int) -> None:
    text = "<|user|>h\u00e9llo \U0001f600"
    ids = TOKENIZER.encode(text)
    drawn = TOKENIZER.encode("j\u00fcst")[:max_tokens]
    all_ids = [*ids, *drawn]
    asked = {"max_tokens": max_tokens, "logprobs": 3}
    async with http_bench(model=saying("j\u00fcst")) as bench:
        for prompt, is_streamed in itertools.product((text, ids), (False, True)):
            status, answer = await _ask(bench, prompt=prompt, stream=is_streamed, **asked)
            assert status == 200
            (choice,) = answer["choices"]
            assert bench.decode.num_open == 0
            found = choice["logprobs"]
            assert choice["text"].startswith(text) and choice["finish_reason"] == "length"
            if not is_streamed:
                usage = answer["usage"]
                assert usage["prompt_tokens"] == len(ids)
                assert usage["completion_tokens"] == max_tokens
            assert len(found["tokens"]) == len(all_ids) == len(found["text_offset"])
            rest = [-float(token_id) for token_id in all_ids[1:]]
            assert found["token_logprobs"] == [None, *rest]
            first, *tops = found["top_logprobs"]
            assert first is None
            for token, logprob, top in zip(found["tokens"][1:], rest, tops, strict=True):
                assert top[token] == logprob and 3 <= len(top) <= 4
            assert any(name.startswith("bytes:") for top in tops for name in top)
            for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
                if "\ufffd" not in token:
                    assert choice["text"][offset:].startswith(token)
            assert any("\ufffd" in token for token in found["tokens"])  # parts of characters
            assert found["text_offset"] == sorted(found["text_offset"])


async def test_nothing_is_drawn_for_max_tokens_0(bench: HttpBench) -> None:
    for echo in (True, False):
        status, answer = await _ask(bench, prompt=["hi", "you"], max_tokens=0, echo=echo)
        assert status == 200 and answer["usage"]["completion_tokens"] == 0
        texts = [(one["text"], one["finish_reason"]) for one in answer["choices"]]
        assert texts == [("hi" * echo, "length"), ("you" * echo, "length")]
        assert all(one["logprobs"] is None for one in answer["choices"])
    assert not bench.decode.num_open
    assert not any(asked.HasField("prompt_logprobs") for asked in bench.prefill.requests)


@pytest.mark.parametrize(
    ("body", "field", "said"),
    [
        ({"n": 2, "logprobs": 1}, "n", "echo"),
        ({"n": 2, "max_tokens": 0}, "n", "max_tokens 0"),
        ({"logprobs": 3}, "logprobs", "5 prompt tokens with 3 .* at most 19"),
        ({"max_tokens": 0, "min_tokens": 1}, "min_tokens", "above"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(
    body: dict[str, Any], field: str, said: str
) -> None:
    async with http_bench(limits={"max_prompt_logprobs": 19}) as bench:
        status, answer = await _ask(bench, prompt=[104] * 5, **body)
        assert status == 400 and answer["error"]["param"] == field
        assert re.search(said, answer["error"]["message"])
        assert not bench.prefill.requests


@pytest.mark.parametrize(("max_tokens", "n"), [(0, 1), (4, 1), (4, 2)])
async def test_over_grpc_they_come_before_the_first_token(
    bench: Bench, max_tokens: int, n: int
) -> None:
    ids = TOKENIZER.encode("hello")
    sampling = {"max_tokens": max_tokens, "n": n, "seed": 1}
    messages = await bench.generate(text="hello", prompt_logprobs=2, sampling=sampling)
    (plain,) = bench.prefill.requests
    expected = await bench.generate(text="hello", sampling=sampling)
    told = [message for message in messages if message.prompt_logprobs]
    assert messages[: len(told)] == told and not any(one.token_ids for one in told)
    entries = [entry for message in told for entry in message.prompt_logprobs]
    assert [entry.chosen.token_id for entry in entries] == ids
    assert math.isnan(entries[0].chosen.logprob) and not entries[0].top
    assert all(len(entry.top) == 2 for entry in entries[1:])
    assert plain.prompt_logprobs == 2 and not plain.hints
    for index in range(n):
        one, other = (
            [token_id for m in some if m.sample_index == index for token_id in m.token_ids]
            for some in (messages, expected)
        )
        assert one == other and len(one) == max_tokens
    assert messages[-1].usage.num_output_tokens == max_tokens


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_logprobs": 21},
        {"prompt_logprobs": 1, "embed": True},
        {"prompt_logprobs": 1, "sampling": {"beam": {"num_beams": 2}, "max_tokens": 2}},
    ],
)
async def test_over_grpc_what_does_not_go_with_them_is_refused(
    bench: Bench, fields: dict[str, Any]
) -> None:
    code, error = await bench.failure(text="hello", **fields)
    assert code is grpc.StatusCode.INVALID_ARGUMENT and str(error).startswith("prompt_logprobs: ")


async def test_another_prefill_worker_tells_the_rest_when_one_dies() -> None:
    """Each is told once, also those that both have sent."""
    async with running(num_prefill=2) as bench:
        for worker in bench.prefills:
            worker.gate.close()  # half of them are sent before it
        asked = request(text="hello", prompt_logprobs=1, sampling={"max_tokens": 3})
        call = bench.call(asked)
        first = await call.read()
        victim = next(worker for worker in bench.prefills if worker.num_active)
        other = next(worker for worker in bench.prefills if worker is not victim)
        other.gate.open()
        await victim.stop()
        messages = [first, *await rest_of(call)]
        assert len(other.requests) == 1
    ids = [entry.chosen.token_id for one in messages for entry in one.prompt_logprobs]
    assert ids == TOKENIZER.encode("hello")
    assert len(ids_of(messages)) == 3


async def test_a_worker_that_leaves_some_out_is_an_error() -> None:
    async with running(num_prefill=0) as bench:
        await bench.add(LeavesOut("p0", bench.model))
        assert (
            await bench.code_of(text="<|user|>hello, you", prompt_logprobs=1)
            is grpc.StatusCode.INTERNAL
        )


async def test_a_prefill_worker_tells_all_whatever_is_cached_or_stored(tmp_path: Path) -> None:
    """In bounded messages, and its handle is one as any."""
    prompt = prompt_of(90, start=3)
    async with pair(tmp_path) as p, p.stream() as stream:
        for name in ("computed", "cached"):
            key = await stream.begin(p.reserve(prompt, name=name))
            asked = p.prefill_request(prompt, name=name)
            asked.prompt_logprobs = 2
            replies = await p.call(asked).answer()
            told = [reply for reply in replies if reply.prompt_logprobs]
            *_, first, account = replies
            assert replies == [*told, first, account]
            entries = [entry for reply in told for entry in reply.prompt_logprobs]
            assert [entry.chosen.token_id for entry in entries] == list(prompt)
            assert math.isnan(entries[0].chosen.logprob)
            for end in (1, 5, 15, 16, 17, 89):
                row = torch.log_softmax(p.model.logits(prompt[:end]), dim=-1)
                assert entries[end].chosen.logprob == pytest.approx(float(row[prompt[end]]))
                assert [other.logprob for other in entries[end].top] == pytest.approx(
                    row.topk(2).values.tolist()
                )
            assert (account.leg.num_tokens_computed, account.leg.num_tokens_local) == (90, 0)
            assert not account.leg.recomputed
            await stream.generate_from(key, handover_of(account, [first]))
            answer = await stream.collect(key)
            assert [*first.token_ids, *answer.token_ids] == p.expected(prompt, 8)


async def test_a_prefill_worker_tells_a_prompt_of_one_token(tmp_path: Path) -> None:
    """No less is left of any prompt."""
    async with pair(tmp_path) as p:
        asked = p.prefill_request([5], max_tokens=1, wants_handle=False)
        asked.prompt_logprobs = 2
        replies = await p.call(asked).answer()
        (entry,) = [entry for reply in replies for entry in reply.prompt_logprobs]
        assert entry.chosen.token_id == 5 and math.isnan(entry.chosen.logprob)
        assert [i for reply in replies for i in reply.token_ids] == p.expected([5], 1)


async def test_a_worker_refuses_more_than_it_can_tell(tmp_path: Path) -> None:
    async with pair(tmp_path) as p:
        asked = p.prefill_request([5, 6], max_tokens=1, wants_handle=False)
        asked.prompt_logprobs = 65
        with pytest.raises(InvalidArgument, match="prompt_logprobs"):
            await p.call(asked).answer()


# ---- embeddings


async def test_the_router_passes_it_on_with_its_account(bench: Bench) -> None:
    (message,) = await bench.generate(text="hello", embed=True)
    assert not bench.decode.num_open
    prompt = TOKENIZER.encode("hello")
    assert list(message.embedding) == pytest.approx(bench.model.embedding(prompt), abs=1e-6)
    assert not message.text and not message.token_ids
    assert message.usage.num_prompt_tokens == len(prompt)
    assert message.usage.num_output_tokens == 0
    assert [leg.role for leg in message.provenance.legs] == ["prefill"]


async def test_another_prefill_worker_gives_it_when_one_dies() -> None:
    async with running(num_prefill=2) as bench:
        for worker in bench.prefills:
            worker.gate.close()
        call = bench.call(text="hello", embed=True)
        victim, other = await bench.busy_prefill()
        other.gate.open()
        await victim.stop()
        (message,) = await rest_of(call)
        assert len(message.embedding) == 4 and len(other.requests) == 1


@pytest.mark.parametrize(
    "sampling", [{"max_tokens": 4}, {"n": 2}, {"temperature": 0.5}, {"trace": True}]
)
async def test_sampling_does_not_go_with_it(bench: Bench, sampling: dict[str, object]) -> None:
    code, error = await bench.failure(embed=True, sampling=sampling)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "sampling: does not go with embed" in str(error)
    assert not bench.prefill.requests


async def test_a_prefill_worker_gives_the_same_computed_or_cached(tmp_path: Path) -> None:
    prompt = prompt_of(45, start=3)
    async with pair(tmp_path) as p:
        replies = []
        for name in ("computed", "cached"):
            asked = p.prefill_request(prompt, name=name, max_tokens=1, wants_handle=False)
            asked.wants_embedding = True
            replies.append(await whole(p.call(asked)))
        hidden = p.model.logits(prompt)[:HIDDEN_SIZE]
    expected = torch.nn.functional.normalize(hidden, dim=0).tolist()
    for reply in replies:
        assert list(reply.embedding) == pytest.approx(expected, abs=1e-6)
    assert replies[0].leg.num_tokens_computed == len(prompt)
    assert replies[1].leg.num_tokens_local == 44


async def test_a_worker_refuses_what_would_go_on(tmp_path: Path) -> None:
    async with pair(tmp_path) as p:
        for max_tokens, wants_handle in ((2, False), (1, True)):
            asked = p.prefill_request([5, 6], max_tokens=max_tokens, wants_handle=wants_handle)
            asked.wants_embedding = True
            with pytest.raises(InvalidArgument, match="wants_embedding"):
                await whole(p.call(asked))
