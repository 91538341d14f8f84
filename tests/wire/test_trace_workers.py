"""What workers and the store add to a request's trace: chunks, transfers, steps, a block's way."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.speculation.remote import DraftTraces
from process import rpc
from process.trace_spans import TraceContext, parse_traceparent
from process.tracing import TracingSettings
from protos import common_pb2, decode_pb2, kvstore_pb2, kvstore_pb2_grpc
from tests.harness.gated_engine import BLOCK_SIZE, prompt_of
from tests.harness.otlp_receiver import OtlpReceiver, Received, receiving
from tests.harness.prefill_decode_pair import WAIT_S, Answer, Pair, PrefillCall, pair, whole

TRACE = TraceContext(0xA1, 0xB2, True)
OTHER = TraceContext(0xC3, 0xD4, True)
PROMPT = prompt_of(3 * BLOCK_SIZE + 2, start=3)
NUM_TOKENS = 8


def settings(receiver: OtlpReceiver) -> TracingSettings:
    return TracingSettings(endpoint=receiver.address, send_interval_s=0.02, stop_timeout_s=WAIT_S)


@asynccontextmanager
async def traced_pair(folder: Path, **options: Any) -> AsyncIterator[tuple[Pair, OtlpReceiver]]:
    """A pair that tells a receiver; nothing is held in the end."""
    with receiving() as receiver:
        async with pair(folder, tracing=settings(receiver), **options) as p:
            yield p, receiver
            await p.check()


async def traced(
    p: Pair, prompt: Sequence[int], parent: TraceContext | None, **options: Any
) -> Answer:
    """As the router does it, with its trace on both legs."""
    asked = {"name": "r", "max_tokens": NUM_TOKENS, **options}
    handover = asked.pop("handover", common_pb2.HANDOVER_PATH_UNSPECIFIED)
    reserve = p.reserve(prompt, **asked)
    reserve.traceparent = parent.traceparent if parent is not None else ""
    async with p.stream() as stream:
        key = await stream.begin(reserve)
        request = p.prefill_request(prompt, handover=handover, **asked)
        call = PrefillCall(
            p.prefill_stub,
            request,
            timeout_s=WAIT_S,
            traceparent=parent.traceparent if parent is not None else "",
        )
        reply = await whole(call)
        await stream.generate(key, reply)
        answer = await stream.collect(key)
    answer.token_ids[:0] = reply.token_ids
    return answer


class Noting(DraftTraces):
    """As if a draft worker had been called for every traced request."""

    def watch(self, request_id: str) -> None:
        super().watch(request_id)
        began_s = time.monotonic()
        for num_nodes in (0, 3):
            self.note(
                "a:1",
                began_s,
                began_s + 0.25,
                [((request_id, 0), num_nodes), (("another's", 0), 5)],
                is_late=num_nodes == 0,
                is_failed=False,
            )


def under(spans: Sequence[Received], parent: Received) -> list[Received]:
    """Its children, in order."""
    children = [each for each in spans if each.parent_id == parent.span_id]
    return sorted(children, key=lambda each: (each.begin_ns, each.end_ns))


def only(spans: Sequence[Received], service: str, name: str) -> Received:
    (found,) = [each for each in spans if (each.service, each.name) == (service, name)]
    return found


def both_over(spans: Sequence[Received]) -> bool:
    return {"serve prefill", "serve decode"} <= {each.name for each in spans}


@pytest.mark.parametrize("transport", ["shm", "grpc"])
async def test_each_chunk_and_each_transfer_is_a_span(tmp_path: Path, transport: str) -> None:
    async with traced_pair(tmp_path, transport=transport, chunk=BLOCK_SIZE) as (p, receiver):
        p.decode.core.draft_traces = Noting()
        answer = await traced(p, PROMPT, TRACE)
        assert answer.token_ids == p.expected(PROMPT, NUM_TOKENS)
        spans = await asyncio.to_thread(receiver.wait, both_over)
        node_id = p.store.node.node_id
    spans = receiver.spans
    assert {each.trace_id for each in spans} == {f"{0xA1:032x}"}
    prefill = only(spans, "baton-prefill", "serve prefill")
    decode = only(spans, "baton-decode", "serve decode")
    assert prefill.parent_id == decode.parent_id == f"{0xB2:016x}"

    chunks = [each for each in under(spans, prefill) if each.name == "prefill_chunk"]
    assert [each.attributes["baton.num_tokens"] for each in chunks] == [BLOCK_SIZE] * 3 + [2]
    stages = [each for each in under(spans, prefill) if "baton.worker_stage" in each.attributes]
    assert [each.name for each in stages] == [
        "worker.prefill_queue",
        "worker.prefill_fetch",
        "worker.prefill_compute",
        "worker.prefill_store",
    ]
    assert all(a.end_ns == b.begin_ns for a, b in itertools.pairwise(stages))
    compute = stages[2]
    assert all(compute.begin_ns <= each.begin_ns for each in chunks)
    assert all(each.end_ns <= compute.end_ns for each in chunks)

    frame_bytes = p.prefill.core.layout.block_bytes
    writes = [each for each in spans if (each.service, each.name) == ("baton-prefill", "kv_write")]
    assert sum(each.attributes["baton.num_blocks"] for each in writes) == 4, "the tail is one"
    assert sum(each.attributes["baton.num_bytes"] for each in writes) == 4 * frame_bytes
    reads = [each for each in spans if each.name == "kv_read"]
    assert {each.service for each in reads} == {"baton-decode"}
    assert sum(each.attributes["baton.num_bytes"] for each in reads) == 4 * frame_bytes
    for each in (*writes, *reads):
        assert each.attributes["baton.transport"] == transport
        assert each.attributes["baton.store.node_id"] == node_id
    assert sum(each.attributes["baton.tier.host"] for each in reads) == 4
    at_store = {each.name for each in spans if each.service == "baton-kvstore"}
    assert {"kvstore Match", "kvstore Reserve", "kvstore Commit"} <= at_store
    parents = {each.span_id: each for each in spans}
    for each in spans:
        if each.service == "baton-kvstore":
            assert parents[each.parent_id].name.startswith(("kv_", "serve", "put"))
            method = each.name.removeprefix("kvstore ")
            assert each.attributes["rpc.method"] == f"baton.v1.KvStore/{method}"
            assert each.attributes["rpc.response.status_code"] == "OK"
            if method in ("Match", "Reserve", "Commit", "Write", "Read"):
                # A service graph has an edge for a SERVER span below a CLIENT span.
                assert (parents[each.parent_id].span.kind, each.span.kind) == (3, 2)
    # Through shared memory a read asks nobody.
    assert {each.span.kind for each in reads} == {1 if transport == "shm" else 3}

    steps = only(spans, "baton-decode", "decode_steps")
    assert steps.attributes["baton.num_tokens"] == NUM_TOKENS - 1, "the first is prefill's"
    drafts = only(spans, "baton-decode", "draft_calls")
    assert drafts.parent_id == decode.span_id
    assert drafts.end_ns - drafts.begin_ns == 250_000_000
    assert drafts.attributes["baton.num_calls"] == 2
    assert drafts.attributes["baton.num_late"] == 1
    assert drafts.attributes["baton.num_guessed_tokens"] == 3
    assert decode.attributes["baton.num_tokens_computed"] == 0
    assert decode.attributes["baton.num_tokens_from_store"] == len(PROMPT)


async def test_chunks_that_decode_computes_itself_are_spans_there(tmp_path: Path) -> None:
    async with traced_pair(tmp_path, chunk=BLOCK_SIZE) as (p, receiver):
        reserve = p.reserve(PROMPT, max_tokens=NUM_TOKENS)
        reserve.traceparent = TRACE.traceparent
        async with p.stream() as stream:
            key = await stream.begin(reserve)
            command = decode_pb2.GenerateFromHandle(computes_prompt=True)
            await stream.generate_from(key, command)
            answer = await stream.collect(key)
        assert answer.token_ids == p.expected(PROMPT, NUM_TOKENS)
    spans = receiver.spans
    decode = only(spans, "baton-decode", "serve decode")
    chunks = [each for each in under(spans, decode) if each.name == "prefill_chunk"]
    assert [each.attributes["baton.num_tokens"] for each in chunks] == [BLOCK_SIZE] * 3 + [2]
    assert decode.attributes["baton.num_tokens_computed"] == len(PROMPT)
    steps = only(spans, "baton-decode", "decode_steps")
    assert steps.attributes["baton.num_tokens"] == NUM_TOKENS


async def test_who_is_not_traced_leaves_nothing_at_the_workers(tmp_path: Path) -> None:
    silent = TraceContext(0xA1, 0xB2, False)
    async with traced_pair(tmp_path) as (p, receiver):
        for number, parent in enumerate((None, silent)):
            await traced(p, PROMPT, parent, name=f"r{number}")
        await p.check()
        assert not p.decode.core.draft_traces.is_on
        counters = [p.prefill.core.tracing.counters, p.decode.core.tracing.counters]
        assert [each.num_ended for each in counters] == [0, 0]
    assert receiver.spans == []


async def test_a_match_is_linked_to_the_traces_that_wrote_the_blocks(tmp_path: Path) -> None:
    """Across requests: who hits a prefix sees whose prefill it rests on."""
    async with traced_pair(tmp_path) as (p, receiver):
        await traced(p, PROMPT, TRACE)
        await traced(p, PROMPT, OTHER, name="again")
    spans = receiver.spans
    linked = [
        each
        for each in spans
        if each.name == "kvstore Match" and each.trace_id == f"{0xC3:032x}" and each.span.links
    ]
    assert linked, "the second request's match found the first one's blocks"
    (link,) = linked[0].span.links
    assert link.trace_id.hex() == f"{0xA1:032x}"
    writer = next(each for each in spans if each.span_id == link.span_id.hex())
    assert writer.name == "kvstore Commit"


async def test_meeting_another_nodes_store_is_part_of_the_request_and_no_more_of_it(
    tmp_path: Path,
) -> None:
    """The handshake is; heartbeats to it, and the measuring of the way there, are nobody's."""
    async with traced_pair(tmp_path, has_two_nodes=True) as (p, receiver):
        answer = await traced(p, PROMPT, TRACE)
        assert answer.token_ids == p.expected(PROMPT, NUM_TOKENS)
        await p.decode.core.links.settle()
    spans = receiver.spans
    attach = only(spans, "baton-decode", "kv_attach")
    decode = only(spans, "baton-decode", "serve decode")
    assert attach.attributes["baton.transport"] == "grpc" and attach.parent_id == decode.span_id
    parents = {each.span_id: each.name for each in spans}
    for each in spans:
        if each.service == "baton-kvstore":
            by_itself = each.name in ("kvstore Renew", "kvstore Release")
            assert by_itself or parents[each.parent_id].startswith("kv_"), each.name


async def test_a_blocks_history_is_kept_at_the_store(tmp_path: Path) -> None:
    """Written by prefill, verified by decode: each with its worker and its trace."""
    async with traced_pair(tmp_path) as (p, _):
        await traced(p, PROMPT, TRACE)
        await p.check()
        async with rpc.channel(p.store.address) as channel:
            stub = kvstore_pb2_grpc.KvStoreStub(channel)
            newest = await stub.GetBlockHistory(
                kvstore_pb2.GetBlockHistoryRequest(), timeout=WAIT_S
            )
            of_one = await stub.GetBlockHistory(
                kvstore_pb2.GetBlockHistoryRequest(
                    chain_hash=newest.blocks[0].chain_hash[:6], max_blocks=5
                ),
                timeout=WAIT_S,
            )
    assert newest.keeps_history and newest.node_id
    histories = {block.chain_hash: block for block in newest.blocks}
    assert len(of_one.blocks) == 1 and of_one.blocks[0].chain_hash in histories
    whats = [[(e.what, e.worker_id) for e in block.events] for block in newest.blocks]
    assert whats.count([("written", "prefill-0"), ("verified", "decode-0")]) == 3
    for block in newest.blocks:
        assert {event.trace_id for event in block.events} == {f"{0xA1:032x}"}
        assert list(block.tiers) == [common_pb2.TIER_HOST]
        assert block.parent in {b"", *histories}
        assert all(event.unix_us > 1e15 for event in block.events)


async def test_the_traceparent_in_a_message_is_checked_as_one_in_a_header(tmp_path: Path) -> None:
    assert parse_traceparent("00-nonsense") is None
    async with traced_pair(tmp_path) as (p, receiver):
        reserve = p.reserve(PROMPT)
        reserve.traceparent = "00-" + "\N{ARABIC-INDIC DIGIT ONE}" * 40
        async with p.stream() as stream:
            key = await stream.begin(reserve)
            await stream.end(key)
    assert receiver.spans == []
