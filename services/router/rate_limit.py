"""`RateLimits`: requests and tokens per minute of each tenant, over all routers, kept in Redis.

Each tenant has a token bucket for requests and one for tokens, which hold one minute's worth and
refill evenly. A request takes its expected tokens at its start and returns the unused ones at its
end, so that concurrent requests cannot overdraw. A request larger than one minute's worth passes
when the bucket is full. One Lua script decides by Redis's clock, so routers need not agree on time.

While Redis is away, each router uses buckets of its own and reports it (`problem`): with N routers
a tenant then gets up to N times its limit. Redis is asked again after a pause. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from dataclasses import dataclass

import redis.asyncio

from process import logs, registry
from process.api_keys import TenantLimits
from process.deadline import Clock
from process.rpc_errors import NoCapacity

logger = logging.getLogger(__name__)

KEY = "baton:rate:"
_PAUSE_S = 1.0
"""Pause after a failure of Redis, in which no request waits for it."""
_EXPIRE_MS = 240_000
"""Expiry of an unused bucket, after which it is surely full: that takes a minute, or two from the
deepest debt."""
_DUST_S = 0.001
"""Wait that counts as none, here and in the script."""
_MAX_BUCKETS = 10_000
"""Most buckets of this router's own; the least recently used one is then dropped, as if full."""

# KEYS: the bucket. ARGV: requests and tokens per minute (0: no limit), tokens wanted.
# Returns: milliseconds until the request would pass; 0: it has passed and was charged.
_TAKE = """
local now = redis.call('TIME')
local now_s = tonumber(now[1]) + tonumber(now[2]) / 1e6
local held = redis.call('HMGET', KEYS[1], 'requests', 'tokens', 'at')
local limits = {tonumber(ARGV[1]), tonumber(ARGV[2])}
local wanted = {1, tonumber(ARGV[3])}
local left, wait_s = {}, 0
for i = 1, 2 do
  local limit = limits[i]
  local level = tonumber(held[i]) or limit
  level = math.min(limit, level + math.max(0, now_s - (tonumber(held[3]) or now_s)) * limit / 60)
  if limit > 0 then
    local short = math.min(wanted[i], limit) - level
    if short > 0 then wait_s = math.max(wait_s, short * 60 / limit) end
    level = level - wanted[i]
  end
  left[i] = level
end
if wait_s > 0.001 then return math.ceil(wait_s * 1000) end
redis.call('HSET', KEYS[1], 'requests', string.format('%.6f', left[1]),
  'tokens', string.format('%.6f', left[2]), 'at', string.format('%.6f', now_s))
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return 0
"""

# A bucket that has expired is full: there is nothing to return.
_GIVE_BACK = """
if redis.call('HEXISTS', KEYS[1], 'tokens') == 1 then
  redis.call('HINCRBYFLOAT', KEYS[1], 'tokens', ARGV[1])
end
return 0
"""


class OverRate(NoCapacity):
    """Refusal of a request that is over its tenant's rate limit."""


@dataclass
class TokenBucket:
    """One tenant's buckets in this process, with the arithmetic of the script.

    `requests`, `tokens`: levels at time `at_s`; below 0: debt.
    """

    requests: float
    tokens: float
    at_s: float

    def take(self, limits: TenantLimits, num_tokens: int, now_s: float) -> float:
        """Charge a request if it passes. Return the seconds until it would pass; 0: charged."""
        passed_s = max(0.0, now_s - self.at_s)
        levels, waits = [], [0.0]
        for level, limit, wanted in (
            (self.requests, limits.max_requests_per_min, 1),
            (self.tokens, limits.max_tokens_per_min, num_tokens),
        ):
            level = min(limit, level + passed_s * limit / 60)
            if limit:
                short = min(wanted, limit) - level
                waits.append(short * 60 / limit)
                level -= wanted
            levels.append(level)
        if max(waits) > _DUST_S:
            return max(waits)
        (self.requests, self.tokens), self.at_s = levels, now_s
        return 0.0


class RateLimits:
    """Rate limits of all tenants, in Redis or, while Redis is away, in this process."""

    def __init__(
        self, client: redis.asyncio.Redis, timeout_s: float, clock: Clock = time.monotonic
    ) -> None:
        """Args: client: not closed here. timeout_s: for one answer of Redis."""
        self._client = client
        self._timeout_s = timeout_s
        self._clock = clock
        self._take = client.register_script(_TAKE)
        self._give_back = client.register_script(_GIVE_BACK)
        self._ask_again_at_s = 0.0
        self._own: OrderedDict[str, TokenBucket] = OrderedDict()
        self.problem = ""
        """Why the limits are this router's alone; empty: all routers share them."""

    async def take(self, tenant: str, limits: TenantLimits, num_tokens: int) -> None:
        """Charge a request of `num_tokens`. A request that does not pass is not charged.

        Raises: OverRate naming the limit, with the seconds until the request would pass.
        """
        if not (limits.max_requests_per_min or limits.max_tokens_per_min):
            return
        wait_s = await self._in_redis(tenant, limits, num_tokens)
        if wait_s is None:
            wait_s = self._bucket(tenant, limits).take(limits, num_tokens, self._clock())
        if wait_s > 0:
            raise OverRate(
                f"tenant {tenant} is at its limit ({_said(limits)}); try again in {wait_s:.1f} s",
                retry_after_s=wait_s,
            )

    async def give_back(self, tenant: str, limits: TenantLimits, num_tokens: int) -> None:
        """Give back charged tokens that were not used; below 0: charge more. Best effort."""
        if not (limits.max_tokens_per_min and num_tokens):
            return
        own = self._own.get(tenant)
        if own is not None:
            own.tokens = min(limits.max_tokens_per_min, own.tokens + num_tokens)
        if self._clock() < self._ask_again_at_s:
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._give_back(keys=[KEY + tenant], args=[num_tokens])
        except registry.REDIS_FAILURES as error:
            self._fail(error)

    async def _in_redis(self, tenant: str, limits: TenantLimits, num_tokens: int) -> float | None:
        """Return the seconds to wait, 0: charged; None: Redis does not answer."""
        if self._clock() < self._ask_again_at_s:
            return None
        numbers = [limits.max_requests_per_min, limits.max_tokens_per_min, num_tokens, _EXPIRE_MS]
        try:
            async with asyncio.timeout(self._timeout_s):
                wait_ms = await self._take(keys=[KEY + tenant], args=numbers)
        except registry.REDIS_FAILURES as error:
            self._fail(error)
            return None
        if self.problem:
            logs.event(logger, "rate_limits_shared_again")
            self.problem = ""
            self._own.clear()
        return int(wait_ms) / 1000

    def _fail(self, error: BaseException) -> None:
        self._ask_again_at_s = self._clock() + _PAUSE_S
        if not self.problem:
            why = str(error) or type(error).__name__
            logs.event(logger, "rate_limits_alone", level=logging.WARNING, why=why)
        self.problem = "rate limits are kept by each router alone: Redis does not answer"

    def _bucket(self, tenant: str, limits: TenantLimits) -> TokenBucket:
        bucket = self._own.get(tenant)
        if bucket is None:
            full = (float(limits.max_requests_per_min), float(limits.max_tokens_per_min))
            bucket = self._own[tenant] = TokenBucket(*full, self._clock())
            if len(self._own) > _MAX_BUCKETS:
                self._own.popitem(last=False)
        self._own.move_to_end(tenant)
        return bucket


def _said(limits: TenantLimits) -> str:
    parts = [
        f"{number} {what} a minute"
        for number, what in (
            (limits.max_requests_per_min, "requests"),
            (limits.max_tokens_per_min, "tokens"),
        )
        if number
    ]
    return ", ".join(parts)
