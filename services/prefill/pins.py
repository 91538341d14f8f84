"""Pins: what one prefill request has pinned in stores, beside what its writer writes under.

Life of a pin: `add` when a store has answered a match -> `take` by the writer that goes on under
its lease, or `keep`, which gives up all others -> `hand_over` (the handle names it) or `release`
(the request ended otherwise). After `start_renewing` those that are held do not lapse meanwhile.

Invariant: a lease that was pinned is a pin here, or its writer's, or the handle's, or is being
given back. Belongs to the loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass

from kvstore.block_refs import Block
from kvstore.client import KvStoreClient
from process.deadline import Deadline
from process.errors import BatonError
from process.tasks import end_tasks, start_task
from services.worker.block_writer import RENEWALS_PER_TTL, ReleaseLater
from services.worker.connector import StoreConnector

MIN_RENEWAL_S = 0.01
"""Never more often, however little is left of the request's time."""


@dataclass(eq=False)
class Pin:
    """Blocks 0.. of one prompt in one store, held by one lease (empty: nothing is pinned)."""

    client: KvStoreClient
    lease_id: str
    refs: tuple[Block, ...]
    release_later: ReleaseLater
    """Of whoever keeps the client."""
    num_hits: int = 0
    """How often the last of `refs` was matched before."""

    def release(self) -> None:
        """Give the lease back in the background."""
        self.release_later(self.client, [self.lease_id])


class Pins:
    """See the module."""

    def __init__(
        self,
        connector: StoreConnector,
        *,
        ttl_s: Callable[[], float],
        renew_budget_s: float,
        deadline: Deadline,
    ) -> None:
        """ttl_s: how long a lease shall live from now on."""
        self._connector = connector
        self._ttl_s = ttl_s
        self._renew_budget_s = renew_budget_s
        self._deadline = deadline
        self._pins: list[Pin] = []
        self._renewing: asyncio.Task[None] | None = None

    @property
    def held(self) -> tuple[Pin, ...]:
        """In the order in which they were added."""
        return tuple(self._pins)

    def add(self, pin: Pin) -> None:
        """A store has pinned something for this request."""
        self._pins.append(pin)

    def anew(self, pin: Pin) -> Pin | None:
        """For one that is held no more: the same store, with nothing pinned yet. None: it is
        gone."""
        if pin.client.broken is not None:
            return None
        self.add(Pin(pin.client, "", (), pin.release_later))
        return self._pins[-1]

    def take(self, pin: Pin) -> Pin:
        """From here on its lease is the caller's."""
        self._pins.remove(pin)
        return pin

    def keep(self, pins: Collection[Pin]) -> None:
        """Give up all others, at once."""
        for pin in [pin for pin in self._pins if pin not in pins]:
            self._give_up(pin)

    def start_renewing(self) -> None:
        """From now on what is held is renewed in time. Idempotent."""
        if self._renewing is None:
            self._renewing = start_task(self._renew_often(), "prefix leases")

    async def renew(self) -> None:
        """Renew all, now, at once. One that cannot be renewed is held no more."""
        await asyncio.gather(*(self._renew(pin) for pin in self.held))

    def hand_over(self, lease_ids: Collection[str]) -> tuple[Pin, ...]:
        """The end: these leases are a handle's now, and the others are given back.

        Returns: the pins handed over.
        """
        handed_over = tuple(pin for pin in self._pins if pin.lease_id in lease_ids)
        for pin in handed_over:
            self._pins.remove(pin)
        self.release()
        return handed_over

    def release(self) -> None:
        """The end: give back what is held. Idempotent."""
        pins, self._pins = self._pins, []
        task, self._renewing = self._renewing, None
        if task is None:
            for pin in pins:
                pin.release()
        else:
            self._connector.spawn(self._release_after_end(task, pins))

    # ---- inside

    def _give_up(self, pin: Pin) -> None:
        self._pins.remove(pin)
        pin.release()

    async def _renew_often(self) -> None:
        while True:
            # The request's deadline is the end of it: then nothing is worth a renewal.
            await asyncio.sleep(max(self._ttl_s() / RENEWALS_PER_TTL, MIN_RENEWAL_S))
            await self.renew()

    async def _renew(self, pin: Pin) -> None:
        if not pin.lease_id:
            return
        if pin.client.broken is not None:
            self._lose(pin)
            return
        deadline = self._deadline.sooner(self._renew_budget_s)
        had_s = deadline.left_s()
        try:
            await pin.client.renew(pin.lease_id, ttl_s=self._ttl_s(), deadline=deadline)
        except BatonError as error:
            self._connector.suspect(pin.client, error, had_s=had_s)
            self._lose(pin)

    def _lose(self, pin: Pin) -> None:
        """Nobody may be told of it any more; it lapses, or is gone already."""
        if pin in self._pins:
            self._give_up(pin)

    async def _release_after_end(self, task: asyncio.Task[None], pins: list[Pin]) -> None:
        await end_tasks([task])
        for pin in pins:
            pin.release()
