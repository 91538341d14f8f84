"""Beam search over the real wire: prefill ranks the first tokens, decode searches on from them and
gives the hypotheses of transformers, best first.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protos import common_pb2
from tests.harness.beam_search import draw_searches
from tests.harness.bundled_pair import MODEL, workers
from tests.harness.cluster import oracle
from tests.harness.prefill_decode_pair import WAIT_S, PrefillCall, handover, pair

pytestmark = pytest.mark.oracle


@pytest.fixture(scope="module")
def model() -> Any:
    return oracle(MODEL).model


async def test_hypotheses_are_those_of_transformers(
    tmp_path: Path, model: Any, seed: int, scale: Callable[[int], int]
) -> None:
    searches = draw_searches(model, seed, scale(100))
    async with workers(tmp_path) as w:
        for index, (search, expected) in enumerate(searches):
            samples = await w.generate(
                search.prompt,
                name=f"r{index}",
                max_tokens=search.num_tokens,
                n=search.n,
                beam=search.beam,
                ignore_eos=False,
            )
            assert [samples[i].token_ids for i in range(search.n)] == [ids for ids, _ in expected]
            for i, (_, score) in enumerate(expected):
                assert samples[i].score == pytest.approx(score, rel=1e-4, abs=1e-4)
        await w.check()


@pytest.mark.parametrize("length", [1, 3, 4, 5, 17])
async def test_one_engine_alone_gives_the_same(tmp_path: Path, length: int) -> None:
    prompt = [1 + index % 90 for index in range(length)]
    asked: dict[str, Any] = {
        "max_tokens": 12,
        "n": 3,
        "beam": common_pb2.BeamParams(num_beams=4),
    }
    async with pair(tmp_path) as p:
        samples = await p.generate_samples(prompt, **asked)
        alone = p.alone(prompt, **asked)
        assert [samples[index] for index in range(3)] == alone
        assert [sample.score for sample in alone] == sorted(
            (sample.score for sample in alone), reverse=True
        )
        leg = samples[0].leg
        assert leg is not None and leg.num_tokens_computed == 0
        await p.check()


async def test_a_beam_search_can_be_cancelled(tmp_path: Path) -> None:
    async with pair(tmp_path) as p, p.stream() as stream:
        prompt = list(range(1, 20))
        asked: dict[str, Any] = {
            "max_tokens": 200,
            "beam": common_pb2.BeamParams(num_beams=4),
        }
        key = await stream.reserve(p.reserve(prompt, **asked))
        await stream.next(key)
        call = PrefillCall(p.prefill_stub, p.prefill_request(prompt, **asked), timeout_s=WAIT_S)
        first, account = await call.answer()
        assert not first.token_ids and len(first.beam_start) >= 8
        await stream.generate_from(key, handover(account, [first]))
        await stream.cancel(key)
        answer = await stream.collect(key)
        assert answer.finished is not None
        assert answer.finished.finish_reason == common_pb2.FINISH_REASON_CANCELLED
        await p.check()
