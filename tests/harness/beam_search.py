"""Beam searches as transformers does them: drawn ones, and what it finds."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from protos import common_pb2


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
