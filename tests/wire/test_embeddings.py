"""Embeddings on their way: through the router with fake workers, and out of a real prefill worker
of the fake model."""

from __future__ import annotations

from pathlib import Path

import grpc.aio
import pytest
import torch

from process.errors import InvalidArgument
from tests.harness.gated_engine import HIDDEN_SIZE, prompt_of
from tests.harness.prefill_decode_pair import WAIT_S, PrefillCall, pair, whole
from tests.harness.router_bench import BOUND_S, TOKENIZER, request, rest_of, running

pytestmark = pytest.mark.oracle


async def test_the_router_passes_it_on_with_its_account() -> None:
    async with running() as bench:
        (message,) = await bench.generate(request(text="hello", embed=True))
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
        call = bench.stub.Generate(request(text="hello", embed=True), timeout=BOUND_S)
        victim, other = await bench.busy_prefill()
        other.gate.open()
        await victim.stop()
        (message,) = await rest_of(call)
        assert len(message.embedding) == 4 and len(other.requests) == 1


@pytest.mark.parametrize(
    "sampling", [{"max_tokens": 4}, {"n": 2}, {"temperature": 0.5}, {"trace": True}]
)
async def test_sampling_does_not_go_with_it(sampling: dict[str, object]) -> None:
    async with running() as bench:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await bench.generate(request(embed=True, sampling=sampling))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "sampling: does not go with embed" in (caught.value.details() or "")
        assert not bench.prefill.requests


async def test_a_prefill_worker_gives_the_same_computed_or_cached(tmp_path: Path) -> None:
    prompt = prompt_of(45, start=3)
    async with pair(tmp_path) as p:
        replies = []
        for name in ("computed", "cached"):
            asked = p.prefill_request(prompt, name=name, max_tokens=1, wants_handle=False)
            asked.wants_embedding = True
            replies.append(await whole(PrefillCall(p.prefill_stub, asked, timeout_s=WAIT_S)))
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
                await whole(PrefillCall(p.prefill_stub, asked, timeout_s=WAIT_S))
