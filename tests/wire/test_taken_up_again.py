"""A stream whose decode worker is lost, as workers meet it: asked to go on behind tokens that
others drew, they draw what one engine alone would have drawn, whatever the draw depends on."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.loop import Engine, load_engine
from protos import common_pb2, decode_pb2, prefill_pb2
from tests.harness.bundled_pair import MODEL, PROMPT, Workers, alone, workers
from tests.harness.prefill_decode_pair import PrefillCall, RouterStream, Sample

pytestmark = pytest.mark.usefixtures("one_compile_process")

SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
KINDS: tuple[dict[str, Any], ...] = (
    {"logprobs": 2},
    {"temperature": 0.9, "seed": 7, "logprobs": 2},
    {"temperature": 0.8, "seed": 8, "min_p": 0.02, "top_k": 40, "repetition_penalty": 1.2},
    {"presence_penalty": 0.8, "frequency_penalty": 0.4, "logprobs": 0},
    {"json_schema": SCHEMA, "ignore_eos": False, "temperature": 0.7, "seed": 3, "logprobs": 1},
    {"stop_token_ids": list(range(0, 2048, 17)), "temperature": 1.0, "seed": 11, "min_tokens": 9},
    {"no_repeat_ngram": 2, "temperature": 0.5, "seed": 12},
)
NUM_TOKENS = 40
PATIENCE_S = 60.0
"""The first grammar of a worker starts a process."""


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = load_engine(EngineConfig(model=MODEL, device="cpu", kv_bytes=8 * 1024 * 1024))
    yield made
    made.close()


async def _decoded(
    w: Workers, fields: dict[str, Any], command: decode_pb2.GenerateFromHandle
) -> tuple[dict[int, Sample], common_pb2.KvLeg]:
    """What the decode worker draws behind the outputs of `command`, by sample."""
    samples: dict[int, Sample] = {}
    stream = RouterStream(w.stubs[1].Stream())
    try:
        key = await stream.reserve(decode_pb2.ReserveDecode(budget_ms=60_000, **fields))
        assert (await stream.next(key)).HasField("reserved")
        await stream.generate_from(key, command)
        while True:
            event = await stream.next(key, timeout_s=PATIENCE_S)
            assert event.WhichOneof("event") in ("tokens", "finished"), event
            part = event.finished if event.HasField("finished") else event.tokens
            samples.setdefault(part.sample_index, Sample()).add(part)
            if event.HasField("finished"):
                return samples, event.finished.leg
    finally:
        await stream.close()


async def _prefilled(
    w: Workers, fields: dict[str, Any], drawn: Sequence[int] = ()
) -> list[prefill_pb2.PrefillReply]:
    request = prefill_pb2.PrefillRequest(wants_handle=True, output_token_ids=drawn, **fields)
    call = PrefillCall(w.stubs[0], request, timeout_s=PATIENCE_S)
    return await call.answer()


async def test_one_sample_through_prefill_and_alone(
    tmp_path: Path, engine: Engine, seed: int
) -> None:
    rng = random.Random(seed)
    every = [{"max_tokens": NUM_TOKENS, **kind} for kind in KINDS]
    # Before there is anybody whose loop it would hold.
    rights = [alone(engine, **asked)[0] for asked in every]
    async with workers(tmp_path) as w:
        for number, (asked, right) in enumerate(zip(every, rights, strict=True)):
            num_drawn = rng.randint(1, len(right.token_ids) - 2)
            ids = right.token_ids[:num_drawn]
            fields = w.fields(PROMPT, f"r{number}", "", "", **asked)
            first, account = await _prefilled(w, fields, ids)
            got = Sample()
            got.add(first)
            assert account.handle.num_tokens == len(PROMPT) + num_drawn
            command = decode_pb2.GenerateFromHandle(
                handle=account.handle, output_token_ids=[*ids, *first.token_ids]
            )
            samples, leg = await _decoded(w, fields, command)
            _check(right, num_drawn, got, samples[0])
            assert leg.num_tokens_computed == 0 and not leg.recomputed, asked
            # The same by a decode worker that computes what it lacks.
            fields["request_id"] = f"a{number}"
            command = decode_pb2.GenerateFromHandle(output_token_ids=ids, computes_prompt=True)
            samples, _ = await _decoded(w, fields, command)
            _check(right, num_drawn, Sample(), samples[0])
        await w.check()


def _check(right: Sample, num_drawn: int, first: Sample, rest: Sample) -> None:
    assert first.token_ids + rest.token_ids == right.token_ids[num_drawn:]
    assert rest.finish_reason == right.finish_reason
    theirs = [*first.logprobs, *rest.logprobs]
    ours = right.logprobs[num_drawn:]
    assert len(theirs) == len(ours)
    for one, other in zip(theirs, ours, strict=True):
        assert one.chosen.token_id == other.chosen.token_id
        assert one.chosen.logprob == pytest.approx(other.chosen.logprob, abs=1e-4)
        assert [top.token_id for top in one.top] == [top.token_id for top in other.top]


async def test_several_samples_each_from_where_it_was(
    tmp_path: Path, engine: Engine, seed: int
) -> None:
    """Prefill draws their first tokens again; one is over, the others go on."""
    rng = random.Random(seed)
    asked = {"max_tokens": 30, "temperature": 0.9, "seed": 5, "n": 3}
    right = alone(engine, **asked)
    async with workers(tmp_path) as w:
        fields = w.fields(PROMPT, "r", "", "", **asked)
        *firsts, account = await _prefilled(w, fields)
        for first in firsts:
            assert list(first.token_ids) == right[first.sample_index].token_ids[:1]
        command = decode_pb2.GenerateFromHandle(handle=account.handle)
        counts = [rng.randint(1, 29) for _ in right]
        for sample, count in zip(right, counts, strict=True):
            command.outputs.add(token_ids=sample.token_ids[:count], is_over=sample is right[1])
        samples, leg = await _decoded(w, fields, command)
        assert set(samples) == {0, 2}
        for index, got in samples.items():
            assert got.token_ids == right[index].token_ids[counts[index] :]
        assert leg.num_tokens_computed == 0
        await w.check()
