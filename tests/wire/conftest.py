"""What the tests of several files share."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.harness.compile_process import one_compile_process as one_compile_process
from tests.harness.prefill_decode_pair import Pair, pair
from tests.harness.router_bench import HttpBench, http_bench


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def p(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    """One pair for all tests of a file, which run on the file's loop: each takes prompts of its own
    and leaves nothing held."""
    async with pair(tmp_path_factory.mktemp("pair")) as made:
        yield made


@pytest.fixture
async def bench() -> AsyncIterator[HttpBench]:
    """A router of a test's own, over a fake prefill and a fake decode worker; nothing may be left
    over."""
    async with http_bench() as made:
        yield made
