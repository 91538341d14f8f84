"""begin_step and end_step: the kernels against plain torch, over odd sizes; the host's buffers in
pinned memory where there is a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from baton_kernels.decode_step_rows import (
    HEADER_WORDS,
    LAST_NUMBER,
    ImageLayout,
    begin_step,
    begin_step_reference,
    end_step,
    end_step_reference,
    next_number,
)

VOCAB = 1000
Poisoned = Callable[..., torch.Tensor]


def _on_host(buffers: torch.Tensor) -> torch.Tensor:
    return buffers.cpu().pin_memory() if buffers.is_cuda else buffers


def _arguments(
    num_rows: int, num_changes: int, number: int, generator: torch.Generator, poisoned: Poisoned
) -> dict[str, Any]:
    device = generator.device
    max_rows, width = num_rows + 3, 37

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, device=device).int()

    places = torch.randperm(max_rows * width, generator=generator, device=device)[: num_changes + 5]
    layout = ImageLayout(16, 16 + max_rows, 16 + 2 * max_rows + 7)
    images = draw(0, 1 << 30, 2, layout.first_change + 2 * len(places))
    image = images[number % 2]
    image[0] = min(num_changes, len(places))
    image[layout.given : layout.sources] = draw(0, VOCAB, max_rows)
    image[layout.sources : layout.sources + max_rows] = draw(-1, max_rows, max_rows)
    changes = image[layout.first_change :].view(-1, 2)
    changes[:, 0] = places
    return {
        "images": _on_host(images),
        "number": torch.tensor([number], device=device).int(),
        "drawn": draw(-5, VOCAB + 5, 2, max_rows),  # beyond the vocabulary: of a NaN's row
        "words": poisoned(layout.first_change, dtype=torch.int32),
        "token_ids": poisoned(num_rows, dtype=torch.int32),
        "block_tables": draw(0, 99, max_rows, width),
        "layout": layout,
    }


@pytest.mark.parametrize("num_rows", [1, 2, 17, 513])
@pytest.mark.parametrize(("num_changes", "number"), [(0, 0), (1, 7), (511, 1), (1200, 6)])
def test_a_step_begins(
    num_rows: int, num_changes: int, number: int, generator: torch.Generator, poisoned: Poisoned
) -> None:
    own = _arguments(num_rows, num_changes, number, generator, poisoned)
    other = {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in own.items()
    }
    begin_step(**own, vocab_size=VOCAB, backend="triton")
    begin_step_reference(**other, vocab_size=VOCAB)
    for name in ("words", "token_ids", "block_tables"):
        assert torch.equal(own[name], other[name]), name
    assert int(own["token_ids"].min()) >= 0 and int(own["token_ids"].max()) < VOCAB
    image = other["images"][number % 2]
    assert own["words"].tolist() == image[: len(own["words"])].tolist()


@pytest.mark.parametrize("num_rows", [1, 16, 300])
def test_a_step_ends(
    num_rows: int, generator: torch.Generator, poisoned: Poisoned, seed: int
) -> None:
    """Several in a row: each leaves its draws in its buffer, and counts, also past the last
    number."""
    device = generator.device
    num_words = HEADER_WORDS + 2 * num_rows
    first = LAST_NUMBER - seed % 3
    numbers = [torch.tensor([first], device=device).int() for _ in range(2)]
    outputs = [_on_host(poisoned(2, num_words, dtype=torch.int32)) for _ in range(2)]
    step = first
    for _ in range(3):
        shape = (2, num_rows)
        drawn = torch.randint(-9, 9, shape, generator=generator, device=device).int()
        end_step(drawn, numbers[0], outputs[0], backend="triton")
        end_step_reference(drawn, numbers[1], outputs[1])
        if device.type == "cuda":
            torch.cuda.synchronize()
        assert int(numbers[0]) == int(numbers[1]) == next_number(step)
        assert torch.equal(outputs[0], outputs[1])
        output = outputs[0][step % 2]
        assert output[0] == step
        assert output[HEADER_WORDS:].tolist() == drawn.view(-1).tolist()
        step = next_number(step)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("images", torch.zeros(3, 500, dtype=torch.int32)),
        ("images", torch.zeros(2, 500)),
        ("number", torch.zeros(2, dtype=torch.int32)),
        ("drawn", torch.zeros(4, dtype=torch.int32)),
        ("words", torch.zeros(4, dtype=torch.int32)),
        ("token_ids", torch.zeros(900, dtype=torch.int32)),
        ("token_ids", torch.zeros(3, dtype=torch.int64)),
        ("block_tables", torch.zeros(4, dtype=torch.int32)),
        ("block_tables", torch.zeros(4, 4, dtype=torch.int32).t()[::2]),
    ],
)
def test_what_does_not_fit_is_named(
    name: str, value: torch.Tensor, generator: torch.Generator, poisoned: Poisoned
) -> None:
    arguments = _arguments(3, 2, 0, generator, poisoned)
    device = arguments[name].device
    arguments[name] = value.to(device) if value.is_contiguous() else value
    with pytest.raises(ValueError, match=name):
        begin_step(**arguments, vocab_size=VOCAB)


def test_an_output_that_does_not_fit_is_named(generator: torch.Generator) -> None:
    device = generator.device
    number = torch.zeros(1, dtype=torch.int32, device=device)
    drawn = torch.zeros(2, 5, dtype=torch.int32, device=device)
    for outputs in (torch.zeros(2, 9).int(), torch.zeros(3, HEADER_WORDS + 10).int()):
        with pytest.raises(ValueError, match="outputs"):
            end_step(drawn, number, outputs.to(device))
