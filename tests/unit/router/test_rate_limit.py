"""Rate limits: the script in a real Redis and the bucket here do the same sums; both bound what
passes; Redis away is visible and no stop."""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from process import registry
from process.api_keys import TenantLimits
from process.rpc_errors import NoCapacity
from services.router import rate_limit
from services.router.rate_limit import RateLimits, TokenBucket
from tests.harness.redis_server import RedisServer
from tests.harness.waiting import Clock

TIMEOUT_S = 5.0


@pytest.fixture
async def server() -> AsyncIterator[RedisServer]:
    made = RedisServer()
    await made.start()
    yield made
    made.remove()


async def passes(rates: RateLimits, limits: TenantLimits, num_tokens: int) -> bool:
    try:
        await rates.take("acme", limits, num_tokens)
    except NoCapacity as error:
        assert error.retry_after_s is not None and error.retry_after_s > 0
        return False
    return True


async def test_routers_share_one_bucket_and_what_was_not_used_comes_back(
    server: RedisServer,
) -> None:
    client = registry.connect_redis(server.url, TIMEOUT_S)
    one, other = RateLimits(client, TIMEOUT_S), RateLimits(client, TIMEOUT_S)
    limits = TenantLimits(max_tokens_per_min=6_000)
    try:
        assert await passes(one, limits, 4_000) and await passes(other, limits, 1_900)
        with pytest.raises(NoCapacity, match=r"6000 tokens a minute.*try again in") as raised:
            await other.take("acme", limits, 4_000)
        assert 30 < (raised.value.retry_after_s or 0) < 40  # 3,900 are missing, 100 come a second
        await other.take("somebody else", limits, 4_000)
        await one.give_back("acme", limits, 3_950)
        assert await passes(one, limits, 4_000)
        # Larger than a whole minute: only out of a full bucket, and then nothing for long.
        await one.take("large", limits, 50_000)
        with pytest.raises(NoCapacity) as raised:
            await one.take("large", limits, 1)
        assert (raised.value.retry_after_s or 0) > 400
    finally:
        await client.aclose()


async def test_requests_are_counted_too(server: RedisServer) -> None:
    client = registry.connect_redis(server.url, TIMEOUT_S)
    rates = RateLimits(client, TIMEOUT_S)
    limits = TenantLimits(max_requests_per_min=3)
    try:
        assert [await passes(rates, limits, 10**9) for _ in range(5)] == [True] * 3 + [False] * 2
        await rates.take("acme", TenantLimits(), 10**9)  # without limits nothing is asked
    finally:
        await client.aclose()


LIMITS = [pair for pair in itertools.product((0, 5, 100), (0, 50, 10_000)) if any(pair)]
"""Requests and tokens per minute; 0: no limit."""
ROUNDING_S = 0.002
"""Redis tells whole milliseconds, and keeps millionths."""


async def _redis_s(client: Any) -> float:
    seconds, micros = await client.time()
    return float(seconds + micros / 1e6)


async def test_the_script_does_the_sums_of_the_bucket(
    server: RedisServer, seed: int, scale: Callable[[int], int]
) -> None:
    """By Redis's own clock, which is put on by hand: the level's moment is set back."""
    rng = random.Random(seed)
    client = registry.connect_redis(server.url, TIMEOUT_S)
    rates = RateLimits(client, TIMEOUT_S)
    try:
        for number in range(scale(100)):
            requests, tokens_per_min = rng.choice(LIMITS)
            limits = TenantLimits(max_requests_per_min=requests, max_tokens_per_min=tokens_per_min)
            key = f"{rate_limit.KEY}t{number}"
            bucket = TokenBucket(requests, tokens_per_min, await _redis_s(client))
            for _ in range(20):
                passed_s = rng.choice([0.0, 1.0, 20.0]) * rng.random()
                tokens = rng.choice([1, 30, 5_000])
                if await client.exists(key):
                    bucket.at_s -= passed_s
                    await client.hset(key, "at", f"{bucket.at_s:.6f}")
                begin_s = await _redis_s(client)
                found_s = await rates._in_redis(f"t{number}", limits, tokens)
                end_s = await _redis_s(client)
                assert found_s is not None
                if found_s == 0:
                    at_s = float(await client.hget(key, "at"))
                    assert begin_s - ROUNDING_S < at_s < end_s + ROUNDING_S
                    left_s = replace(bucket).take(limits, tokens, at_s)
                    assert left_s < ROUNDING_S
                    assert bucket.take(limits, tokens, at_s + left_s) == 0
                    bucket.at_s = at_s
                else:
                    longest_s = replace(bucket).take(limits, tokens, begin_s)
                    shortest_s = replace(bucket).take(limits, tokens, end_s)
                    assert shortest_s - ROUNDING_S < found_s < longest_s + ROUNDING_S
    finally:
        await client.aclose()


async def test_redis_away_is_visible_and_limits_go_on_here(server: RedisServer) -> None:
    clock = Clock(1000.0)
    client = registry.connect_redis(server.url, TIMEOUT_S)
    rates = RateLimits(client, TIMEOUT_S, clock)
    limits = TenantLimits(max_requests_per_min=2)
    try:
        assert await passes(rates, limits, 1) and not rates.problem
        server.kill()
        assert [await passes(rates, limits, 1) for _ in range(4)] == [True, True, False, False]
        assert "Redis does not answer" in rates.problem
        clock.now_s += 31
        assert await passes(rates, limits, 1)
        await server.start()
        clock.now_s += 2
        assert await passes(rates, limits, 1) and not rates.problem
    finally:
        await client.aclose()


def test_what_passes_is_bounded_whatever_is_asked(seed: int, scale: Callable[[int], int]) -> None:
    """Over any time: a full bucket, what came in since, and one request that overdrew."""
    rng = random.Random(seed)
    for _ in range(scale(300)):
        limit = rng.choice([60, 600])
        limits = TenantLimits(max_tokens_per_min=limit)
        bucket, now_s, passed, largest = TokenBucket(0, limit, 0.0), 0.0, 0, 0
        for _ in range(200):
            now_s += rng.expovariate(1.0)
            tokens = rng.choice([1, 5, limit // 2, limit * 3])
            if bucket.take(limits, tokens, now_s) == 0:
                passed += tokens
                largest = max(largest, tokens)
            assert passed <= limit + now_s * limit / 60 + largest + 1e-6


def test_the_time_that_is_named_suffices(seed: int, scale: Callable[[int], int]) -> None:
    rng = random.Random(seed)
    for _ in range(scale(300)):
        limits = TenantLimits(max_requests_per_min=7, max_tokens_per_min=rng.choice([10, 1000]))
        bucket, now_s = TokenBucket(7, limits.max_tokens_per_min, 0.0), 0.0
        for _ in range(40):
            tokens = rng.randint(1, 2000)
            wait_s = bucket.take(limits, tokens, now_s)
            if wait_s:
                assert bucket.take(limits, tokens, now_s + wait_s * 0.9) > 0
                assert bucket.take(limits, tokens, now_s + wait_s + 1e-6) == 0
                now_s += wait_s + 1e-6
