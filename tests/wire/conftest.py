"""What the tests of several files share."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.harness.compile_process import one_compile_process as one_compile_process
from tests.harness.prefill_decode_pair import Pair, pair
from tests.harness.router_bench import HttpBench, http_bench


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one_pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    """Of a file; see `p`."""
    async with pair(tmp_path_factory.mktemp("pair")) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def p(one_pair: Pair) -> AsyncIterator[Pair]:
    """One pair for all tests of a file, on the file's loop: each takes prompts of its own, and
    behind each nothing is held and every law holds."""
    yield one_pair
    await one_pair.check()


@pytest.fixture
async def bench() -> AsyncIterator[HttpBench]:
    """A router of a test's own, over a fake prefill and a fake decode worker; nothing may be left
    over."""
    async with http_bench() as made:
        yield made
