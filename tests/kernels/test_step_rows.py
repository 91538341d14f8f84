"""begin_step: the kernel against plain torch, over odd sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from baton_kernels.step_rows import begin_step, begin_step_reference

VOCAB = 1000


def _arguments(
    num_rows: int,
    num_changes: int,
    generator: torch.Generator,
    poisoned: Callable[..., torch.Tensor],
) -> dict[str, torch.Tensor]:
    device = generator.device
    max_rows, width = num_rows + 3, 37

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, device=device).int()

    places = torch.randperm(max_rows * width, generator=generator, device=device)[: num_changes + 5]
    changes = torch.stack([places.int(), draw(0, 1 << 30, len(places))], dim=1)
    return {
        "given": draw(0, VOCAB, num_rows),
        "sources": draw(-1, max_rows, num_rows),
        "drawn": draw(-5, VOCAB + 5, max_rows),  # beyond the vocabulary: of a NaN's row
        "token_ids": poisoned(num_rows, dtype=torch.int32),
        "changes": changes.contiguous(),
        "num_changes": torch.tensor([min(num_changes, len(places))], device=device).int(),
        "block_tables": draw(0, 99, max_rows, width),
    }


@pytest.mark.parametrize("num_rows", [1, 2, 17, 513])
@pytest.mark.parametrize("num_changes", [0, 1, 511, 1200])
def test_tokens_and_tables(
    num_rows: int,
    num_changes: int,
    generator: torch.Generator,
    poisoned: Callable[..., torch.Tensor],
) -> None:
    own = _arguments(num_rows, num_changes, generator, poisoned)
    other = {name: value.clone() for name, value in own.items()}
    begin_step(**own, vocab_size=VOCAB, backend="triton")
    begin_step_reference(**other, vocab_size=VOCAB)
    for name, value in own.items():
        assert torch.equal(value, other[name]), name
    assert int(own["token_ids"].min()) >= 0 and int(own["token_ids"].max()) < VOCAB


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("given", torch.zeros(3, dtype=torch.int64)),
        ("sources", torch.zeros(4, dtype=torch.int32)),
        ("token_ids", torch.zeros(6, dtype=torch.int32)[::2]),
        ("changes", torch.zeros(3, 3, dtype=torch.int32)),
        ("num_changes", torch.zeros(2, dtype=torch.int32)),
        ("block_tables", torch.zeros(4, dtype=torch.int32)),
        ("drawn", torch.zeros(1, 2, dtype=torch.int32)),
    ],
)
def test_what_does_not_fit_is_named(
    name: str,
    value: torch.Tensor,
    generator: torch.Generator,
    poisoned: Callable[..., torch.Tensor],
) -> None:
    arguments = _arguments(3, 2, generator, poisoned)
    arguments[name] = value.to(generator.device)
    with pytest.raises(ValueError, match=name):
        begin_step(**arguments, vocab_size=VOCAB)
