"""What the Baton client asks of a real router beside plain answers: embeddings, tools."""

from __future__ import annotations

import asyncio

import pytest

from baton import Client, InvalidArgument, SyncClient
from tests.harness.router_bench import TOKENIZER, http_bench

pytestmark = pytest.mark.oracle

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
TALK = [
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "c1", "function": {"name": "look", "arguments": {"x": 1}}},
            {"id": "c2", "function": {"name": "look", "arguments": '{"x": 2}'}},
        ],
    },
    {"role": "tool", "content": "seen", "tool_call_id": "c2"},
]


async def test_a_prompts_embedding() -> None:
    async with http_bench() as bench, Client(bench.router.address) as client:
        ids = TOKENIZER.encode("hello")
        found = await client.embed("hello", request_id="e1", tenant="t")
        assert found.values == pytest.approx(bench.model.embedding(ids), abs=1e-6)
        assert found.request_id == "e1" and found.usage.num_prompt_tokens == len(ids)
        assert found.usage.num_output_tokens == 0 and found.times["tokenize"] > 0
        assert [leg.role for leg in found.provenance.legs] == ["prefill"]
        with pytest.raises(InvalidArgument, match=r"^text: is empty"):
            await client.embed("")

        def ask() -> tuple[float, ...]:
            with SyncClient(bench.router.address) as blocking:
                return blocking.embed(ids).values

        assert await asyncio.to_thread(ask) == found.values


async def test_tools_go_to_the_template() -> None:
    async with http_bench() as bench, Client(bench.router.address) as client:
        await client.complete(
            TALK, tools=TOOLS, template_arguments={"mood": "gladly "}, max_tokens=1
        )
        prompt = TOKENIZER.decode(bench.prefill.requests[0].prompt_token_ids)
        assert '"name": "look"' in prompt and prompt.endswith("gladly assistant:")
        assert 'assistant: [look {"x": 1}][look {"x": 2}]\ntool: seen re c2\n' in prompt
        with pytest.raises(InvalidArgument, match=r"^chat.tools: needs chat messages"):
            await client.complete("text", tools=TOOLS)
        with pytest.raises(InvalidArgument, match=r"^prompt: "):
            await client.complete([{"role": "assistant", "content": "", "tool_calls": [{}]}])
        with pytest.raises(InvalidArgument, match=r"^chat.tools\[0\]: must be"):
            await client.complete(TALK, tools=[{"name": "look"}])
