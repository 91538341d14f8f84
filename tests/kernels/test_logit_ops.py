"""Penalties, biases and masks: the kernels change exactly what the reference changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from baton_kernels.logit_ops import (
    Penalties,
    add_bias,
    add_bias_reference,
    apply_bitmask,
    apply_bitmask_reference,
    penalise,
    penalise_reference,
)

from tests.kernels.conftest import DEVICE

Randn = Callable[..., torch.Tensor]


def _ids(
    num_rows: int, num_places: int, num_tokens: int, generator: torch.Generator
) -> torch.Tensor:
    """Distinct within a row; about a fifth of the places have none."""
    scores = torch.rand(num_rows, num_tokens, generator=generator, device=DEVICE)
    ids = scores.argsort(dim=1)[:, :num_places].to(torch.int32)
    is_token = torch.rand(num_rows, num_places, generator=generator, device=DEVICE) < 0.8
    return torch.where(is_token, ids, -1).contiguous()


@pytest.mark.parametrize("num_places", [1, 300])
def test_penalties(num_places: int, randn: Randn, generator: torch.Generator) -> None:
    num_rows, num_tokens = 5, 1003
    wide = randn(num_rows, num_tokens + 5) * 4
    wide[:, 7] = 0.0
    ids = _ids(num_rows, num_places, num_tokens, generator)
    counts = torch.randint(0, 4, (num_rows, num_places), generator=generator, device=DEVICE).float()
    rates = [torch.rand(num_rows, generator=generator, device=DEVICE) * 2 + 0.1 for _ in range(3)]
    rates[0][0] = 1.0
    penalties = Penalties(ids, counts, rates[0], rates[1] - 1, rates[2] - 1)
    expected, found = wide.clone(), wide.clone()
    penalise_reference(expected[:, :num_tokens], penalties)
    penalise(found[:, :num_tokens], penalties, backend="triton")
    assert found.equal(expected)
    assert found[:, num_tokens:].equal(wide[:, num_tokens:])
    changed = (found != wide).sum()
    assert 0 < changed <= (ids >= 0).sum()


def test_biases(randn: Randn, generator: torch.Generator) -> None:
    num_rows, num_tokens = 3, 777
    logits = randn(num_rows, num_tokens)
    ids = _ids(num_rows, 40, num_tokens, generator)
    values = randn(num_rows, 40)
    values[:, 5] = -torch.inf
    expected, found = logits.clone(), logits.clone()
    add_bias_reference(expected, ids, values)
    add_bias(found, ids, values, backend="triton")
    assert found.equal(expected)
    assert int((found != logits).sum()) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 31, 2100])
def test_bitmasks(
    num_tokens: int, dtype: torch.dtype, randn: Randn, generator: torch.Generator
) -> None:
    logits = randn(4, num_tokens + 3, dtype=dtype)[:, :num_tokens]
    num_words = -(-num_tokens // 32)
    words = torch.randint(
        -(1 << 31), 1 << 31, (4, num_words), generator=generator, device=DEVICE
    ).to(torch.int32)
    words[0] = -1
    words[1] = 0
    rows = torch.tensor([2, 0, -1, 3], dtype=torch.int32, device=DEVICE)
    for chosen in (None, rows):
        expected, found = logits.clone(), logits.clone()
        apply_bitmask_reference(expected, words, chosen)
        apply_bitmask(found, words, chosen, backend="triton")
        assert found.equal(expected)
    # The masks by `rows`: all of row 2 stays, nothing of row 0, row 1 has none.
    assert found[1:3].equal(logits[1:3])
    assert bool((found[0] == -torch.inf).all())


def test_arguments_that_do_not_fit_are_named(randn: Randn) -> None:
    logits = randn(2, 64)
    ids = torch.zeros(2, 3, dtype=torch.int32, device=DEVICE)
    ones, many = torch.ones(2, device=DEVICE), torch.ones(2, 3, device=DEVICE)
    fits = Penalties(ids, many, ones, ones, ones)
    for name in Penalties._fields:
        wrong = fits._replace(**{name: getattr(fits, name).double()})
        with pytest.raises(ValueError, match=f"^{name}"):
            penalise(logits, wrong)
    with pytest.raises(ValueError, match=r"^logits"):
        penalise(logits.t(), fits)
    with pytest.raises(ValueError, match=r"^values"):
        add_bias(logits, ids, many[:1])
    with pytest.raises(ValueError, match=r"^words"):
        apply_bitmask(logits, ids)
    with pytest.raises(ValueError, match=r"^rows"):
        apply_bitmask(logits, ids[:, :2].contiguous(), ids[:, 0])
    empty = ids[:, :0]
    penalise(logits, fits._replace(token_ids=empty, counts=many[:, :0]))
    add_bias(logits, empty, many[:, :0])
