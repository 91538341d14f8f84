"""A Redis that is killed and replaced by an empty one, as a pod is: no request fails for it, and
whoever lives is registered in the new one."""

from __future__ import annotations

import pytest

from tests.harness.router_bench import Bench, request, running
from tests.harness.waiting import until

pytestmark = pytest.mark.oracle

SHORT = {"max_tokens": 4}


async def _serves(bench: Bench) -> None:
    messages = await bench.generate(request(text="a prompt of one block", sampling=SHORT))
    assert messages[-1].usage.num_output_tokens == 4


@pytest.mark.parametrize("is_seen_away", [True, False])
async def test_no_request_fails_while_redis_is_replaced(is_seen_away: bool) -> None:
    """Whether the router found it away, or meets the new one at its next look."""
    async with running() as bench, bench.beating(bench.prefill, bench.decode) as beats:
        await bench.probe.look()
        bench.redis.kill()
        if is_seen_away:
            await until(lambda: not bench.probe.is_redis_reachable)
            await until(lambda: not any(beat.is_registered for beat in beats))
            await _serves(bench)
        await bench.redis.start()
        before = [beat.num_beats for beat in beats]
        assert len(await bench.probe.look()) == 2
        await _serves(bench)
        while not all(beat.num_beats > num for beat, num in zip(beats, before, strict=True)):
            await _serves(bench)
        assert len(await bench.probe.look()) == 2 and bench.probe.is_redis_reachable
        await _serves(bench)


async def test_who_does_not_come_back_is_gone_when_its_time_is_over() -> None:
    async with running(num_decode=2) as bench, bench.beating(bench.prefill, bench.decodes[0]):
        assert len(await bench.probe.look()) == 3
        bench.redis.kill()
        await bench.redis.start()
        assert len(await bench.probe.look()) == 3
        await until(lambda: bench.probe.worker_ids == {"p0", "d0"})
        await _serves(bench)
