"""Pins: a lease is renewed while it is kept, and in the end it is somebody's or given back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from process.deadline import Deadline
from process.rpc_errors import BatonError
from services.prefill.request import PrefixLease, PrefixLeases
from services.worker.config import WorkerLimits
from services.worker.store_pool import StoreConnector
from tests.harness.gated_engine import fake_engine, running


class FakeStore:
    """Renews and takes back leases."""

    def __init__(self) -> None:
        self.broken: str | None = None
        self.renewed: list[str] = []
        self.released: list[str] = []
        self.error: BatonError | None = None
        self.was_renewed = asyncio.Event()

    async def renew(self, lease_id: str, *, ttl_s: float, deadline: Deadline) -> None:
        self.renewed.append(lease_id)
        self.was_renewed.set()
        if self.error is not None:
            raise self.error

    def release_later(self, client: Any, lease_ids: Iterable[str]) -> None:
        assert client is self
        self.released += [lease_id for lease_id in lease_ids if lease_id]


def pin(store: FakeStore, lease_id: str) -> PrefixLease:
    client: Any = store
    return PrefixLease(client, lease_id, (), store.release_later)


@asynccontextmanager
async def pinning(ttl_s: float = 5.0) -> AsyncIterator[tuple[PrefixLeases, StoreConnector]]:
    async with running(fake_engine(num_blocks=64)) as thread:
        connector = StoreConnector(None, thread, WorkerLimits())
        pins = PrefixLeases(
            connector, ttl_s=lambda: ttl_s, renew_budget_s=5.0, deadline=Deadline.after(30)
        )
        yield pins, connector
        pins.release()
        await connector.settle()
        await connector.stop(timeout_s=1)


async def test_what_is_not_kept_is_given_back_at_once() -> None:
    store = FakeStore()
    async with pinning() as (pins, _):
        kept, taken, other = (pin(store, name) for name in ("kept", "taken", "other"))
        for each in (kept, taken, other):
            pins.add(each)
        assert pins.take(taken) is taken
        pins.keep([kept])
        assert store.released == ["other"]
        assert pins.held == (kept,)
    assert sorted(store.released) == ["kept", "other"]


async def test_what_is_kept_is_renewed_until_it_is_handed_over() -> None:
    store = FakeStore()
    async with pinning(ttl_s=0.03) as (pins, connector):
        named, unnamed = pin(store, "named"), pin(store, "unnamed")
        for each in (named, unnamed):
            pins.add(each)
        pins.start_renewing()
        pins.start_renewing()
        async with asyncio.timeout(30):
            while store.renewed.count("named") < 3:
                store.was_renewed.clear()
                await store.was_renewed.wait()
        assert pins.hand_over({"named"}) == (named,)
        await connector.settle()
        assert store.released == ["unnamed"]
        assert pins._renewing is None
    assert store.released == ["unnamed"]


async def test_the_end_comes_in_the_middle_of_a_renewal() -> None:
    """A release waits for the renewal to end, and comes once."""
    store = FakeStore()
    entered, left = asyncio.Event(), asyncio.Event()

    async def stuck(lease_id: str, *, ttl_s: float, deadline: Deadline) -> None:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            assert not store.released
            left.set()

    store.renew = stuck  # type: ignore[method-assign]
    async with pinning(ttl_s=0.003) as (pins, connector):
        pins.add(pin(store, "a"))
        pins.start_renewing()
        async with asyncio.timeout(30):
            await entered.wait()
        pins.release()
        pins.release()
        await connector.settle()
        assert left.is_set()
    assert store.released == ["a"]
