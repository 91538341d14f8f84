"""Where the kernel tests run: on CUDA where there is one, else the very same Triton kernels through
Triton's interpreter (tests/conftest.py chooses it before anything imports triton), on CPU tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from tests.conftest import third

T = TypeVar("T")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDS = DEVICE == "cuda"
"""Triton's interpreter cuts numbers off where the machine rounds them to bfloat16."""
PRODUCT_TOLERANCE = {torch.bfloat16: 1e-2 if ROUNDS else 2e-2, torch.float32: 1e-5}
"""Relative, of products of matrices against float64."""


def error_of(out: torch.Tensor, truth: torch.Tensor) -> float:
    """Relative, of the whole result."""
    assert not out.isnan().any(), "something was not written"
    wide = truth.double()
    return float((out.double() - wide).norm() / wide.norm().clamp(min=1e-30))


def some(cases: Iterable[T]) -> list[T]:
    """All on a GPU; a third by the interpreter, which is slow."""
    return list(cases) if DEVICE == "cuda" else third(cases)


@pytest.fixture(scope="session", autouse=True)
def triton_runs() -> None:
    """No GPU, no Triton: nothing to run the kernels with is a reason to skip, and to say so. A
    Triton that was imported as a compiler cannot interpret: an error, or these tests would be
    green without a kernel."""
    triton = pytest.importorskip("triton", reason="Triton is for Linux on x86_64")
    if DEVICE == "cuda":
        return
    if not triton.knobs.runtime.interpret:
        pytest.fail("no GPU, and TRITON_INTERPRET is not 1: no kernel would run")
    _mend_interpreter()


def _mend_interpreter() -> None:
    """Three faults of Triton 3.6's interpreter, kept out of the kernels; and its products in
    float64, as a row depends on its place in the tile where BLAS computes them in float32."""
    from triton import language as tl
    from triton.runtime import interpreter

    patch, create_dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def with_index(tensor: type, scope: Any) -> None:
        """It counts to a number that was loaded by int([number]), which numpy 2.4 ends."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def product(self: Any, a: Any, b: Any, d: Any, *others: Any) -> Any:
        """It multiplies bfloat16 as the integers that it keeps them in."""
        if a.dtype.scalar not in (tl.float32, tl.bfloat16):
            return create_dot(self, a, b, d, *others)
        found = np.matmul(_as_float64(a), _as_float64(b)) + d.data
        return interpreter.TensorHandle(found.astype(d.data.dtype), d.dtype.scalar)

    def as_numbers(self: Any, source: Any, target: Any) -> Any:
        """It takes an integer's value for the bits of a bfloat16."""
        if target.scalar == tl.bfloat16:
            source = self.cast_impl(source, tl.float32)
        return self.cast_impl(source, target)

    interpreter.InterpreterBuilder.create_si_to_fp = as_numbers
    interpreter._patch_lang_tensor = with_index
    interpreter.InterpreterBuilder.create_dot = product


def _as_float64(handle: Any) -> Any:
    from triton import language as tl

    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return handle.data.astype(np.float64)


@pytest.fixture(scope="session")
def device() -> str:
    """ "cuda" or "cpu"."""
    return DEVICE


@pytest.fixture
def generator(seed: int) -> torch.Generator:
    """On `device`, from this run's seed."""
    return torch.Generator(device=DEVICE).manual_seed(seed)


@pytest.fixture
def randn(generator: torch.Generator) -> Callable[..., torch.Tensor]:
    """`randn(*shape, dtype=torch.float32)`: fresh normal numbers on `device`."""

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE).to(dtype)

    return draw


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Full of NaN (of the greatest number, where integers): an output that is not written shows."""
    value = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
    return torch.full(shape, value, dtype=dtype, device=DEVICE)


@pytest.fixture(name="poisoned")
def poisoned_fixture() -> Callable[..., torch.Tensor]:
    """`poisoned(*shape, dtype=...)`."""
    return poisoned


def block_tables_for(
    num_blocks_each: Sequence[int], num_blocks: int, generator: torch.Generator
) -> torch.Tensor:
    """[B, longest] int32: blocks of a cache of `num_blocks` in random order, none twice; entries
    beyond a sequence's own are stale: any valid id."""
    width = max(1, *num_blocks_each)
    order = torch.randperm(num_blocks, generator=generator, device=DEVICE).tolist()
    stale = torch.randint(
        num_blocks, (len(num_blocks_each), width), generator=generator, device=DEVICE
    )
    tables = stale.to(torch.int32)
    for index, count in enumerate(num_blocks_each):
        own, order = order[:count], order[count:]
        assert len(own) == count, "the cache is too small for these sequences"
        tables[index, :count] = torch.tensor(own, dtype=torch.int32, device=DEVICE)
    return tables


@pytest.fixture
def block_tables(generator: torch.Generator) -> Callable[..., torch.Tensor]:
    """`block_tables(num_blocks_each, num_blocks)`: see block_tables_for."""
    return lambda each, num_blocks: block_tables_for(each, num_blocks, generator)
