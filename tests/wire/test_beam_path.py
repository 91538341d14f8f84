"""Beam search over the real wire: prefill ranks the first tokens, decode searches on from them and
gives the hypotheses of transformers, best first.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
)

import checkpoints
from protos import common_pb2
from tests.harness.bundled_pair import MODEL, workers
from tests.harness.prefill_decode_pair import WAIT_S, PrefillCall, handover, pair


@pytest.fixture(scope="module")
def model() -> Any:
    folder = checkpoints.resolve(MODEL, files="all").path
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


class Nudge(LogitsProcessor):  # type: ignore[misc]
    """Adds a little noise to each log probability: `scale` times what the same seed draws."""

    def __init__(self, scale: float, seed: int) -> None:
        self._scale = scale
        self._draw = torch.Generator().manual_seed(seed)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + self._scale * torch.randn(scores.shape, generator=self._draw)


NUDGE = 1e-4
"""Many times what another order of the same sums makes of a log probability."""


@dataclass(frozen=True)
class Search:
    """One prompt and how its beams are searched."""

    prompt: list[int]
    num_tokens: int
    n: int
    beam: common_pb2.BeamParams

    @classmethod
    def draw(cls, rng: random.Random) -> Search:
        num_beams = rng.randint(2, 5)
        return cls(
            [rng.randrange(20, 2000) for _ in range(rng.randint(1, 40))],
            rng.randint(1, 16),
            rng.randint(1, num_beams),
            common_pb2.BeamParams(
                num_beams=num_beams,
                length_penalty=rng.choice((0.0, 0.7, 1.0, 1.3)),
                early_stopping=rng.random() < 0.5,
            ),
        )


Hypotheses = list[tuple[list[int], float]]
"""Token ids and score of each, best first."""


def draw_searches(model: Any, seed: int, num: int) -> list[tuple[Search, Hypotheses]]:
    """With what transformers finds. None is near a tie, where either of two choices is right: it
    comes out the same with a little more here and less there, and the other way round."""
    rng = random.Random(seed)
    found: list[tuple[Search, Hypotheses]] = []
    while len(found) < num:
        search, noise = Search.draw(rng), rng.randrange(2**31)
        expected = beam_reference(model, search)
        nudged = [beam_reference(model, search, Nudge(scale, noise)) for scale in (NUDGE, -NUDGE)]
        if all([ids for ids, _ in one] == [ids for ids, _ in expected] for one in nudged):
            found.append((search, expected))
    return found


def beam_reference(model: Any, search: Search, *nudges: Nudge) -> Hypotheses:
    """What transformers says."""
    prompt, beam = search.prompt, search.beam
    eos = model.generation_config.eos_token_id
    config = GenerationConfig(
        num_beams=beam.num_beams,
        num_return_sequences=search.n,
        length_penalty=beam.length_penalty if beam.HasField("length_penalty") else 1.0,
        early_stopping=beam.early_stopping,
        max_new_tokens=search.num_tokens,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=eos[0] if isinstance(eos, list) else eos,
        output_scores=True,
        return_dict_in_generate=True,
    )
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=config,
        logits_processor=LogitsProcessorList(nudges),
    )
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
