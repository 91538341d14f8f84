"""Beam search over the real wire: prefill ranks the first tokens, decode searches on from them and
gives the hypotheses of transformers, best first.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

import checkpoints
from protos import common_pb2
from tests.wire.bundled_pair import MODEL, workers
from tests.wire.prefill_call import PrefillCall
from tests.wire.prefill_decode_pair import handover, pair


@pytest.fixture(scope="module")
def model() -> Any:
    folder = checkpoints.resolve(MODEL, files="all").path
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def beam_reference(
    model: Any, prompt: list[int], num_tokens: int, beam: common_pb2.BeamParams, n: int
) -> list[tuple[list[int], float]]:
    """What transformers says: (token ids, score) of the n best, best first."""
    eos = model.generation_config.eos_token_id
    config = GenerationConfig(
        num_beams=beam.num_beams,
        num_return_sequences=n,
        length_penalty=beam.length_penalty if beam.HasField("length_penalty") else 1.0,
        early_stopping=beam.early_stopping,
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=eos[0] if isinstance(eos, list) else eos,
        output_scores=True,
        return_dict_in_generate=True,
    )
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    ends = set(eos if isinstance(eos, list) else [eos])
    found = []
    for row, score in zip(out.sequences, out.sequences_scores, strict=True):
        tokens = row[len(prompt) :].tolist()
        end = next((at + 1 for at, token in enumerate(tokens) if token in ends), len(tokens))
        found.append((tokens[:end], float(score)))
    return found


async def test_hypotheses_are_those_of_transformers(
    tmp_path: Path, model: Any, seed: int, scale: Callable[[int], int]
) -> None:
    rng = random.Random(seed)
    async with workers(tmp_path) as w:
        for index in range(scale(100)):
            prompt = [rng.randrange(20, 2000) for _ in range(rng.randint(1, 40))]
            num_tokens = rng.randint(1, 16)
            num_beams = rng.randint(2, 5)
            n = rng.randint(1, num_beams)
            beam = common_pb2.BeamParams(
                num_beams=num_beams,
                length_penalty=rng.choice((0.0, 0.7, 1.0, 1.3)),
                early_stopping=rng.random() < 0.5,
            )
            samples = await w.generate(
                prompt, name=f"r{index}", max_tokens=num_tokens, n=n, beam=beam, ignore_eos=False
            )
            expected = beam_reference(model, prompt, num_tokens, beam, n)
            assert [samples[i].token_ids for i in range(n)] == [ids for ids, _ in expected]
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
        call = PrefillCall(p.prefill_stub, p.prefill_request(prompt, **asked), timeout_s=10)
        first, account = [message async for message in call]
        assert not first.token_ids and len(first.beam_start) >= 8
        await stream.generate_from(key, handover(account, [first]))
        await stream.cancel(key)
        answer = await stream.collect(key)
        assert answer.finished is not None
        assert answer.finished.finish_reason == common_pb2.FINISH_REASON_CANCELLED
        await p.check()
