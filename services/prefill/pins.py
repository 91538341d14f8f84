"""Pins: leases that one prefill request holds in stores, besides its writer's.

Life of a pin: `add` when a store has answered a match -> `take` by the writer that continues under
its lease, or `keep`, which releases all others -> `hand_over` (the handle names it) or `release`
(the request ended otherwise). After `start_renewing` the held leases do not expire meanwhile.

Invariant: a lease that was pinned belongs to a pin here, to the writer or to the handle, or is
being released. Belongs to the loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass

from kvstore.block_refs import Block
from kvstore.client import KvStoreClient
from process.background_tasks import end_tasks, start_task
from process.deadline import Deadline
from process.errors import BatonError
from services.worker.block_writer import RENEWALS_PER_TTL, ReleaseLater
from services.worker.connector import StoreConnector

MIN_RENEWAL_S = 0.01
"""Shortest time between renewals in seconds, however little of the request's time is left."""


@dataclass(eq=False)
class Pin:
    """Leading blocks of a prompt in one store, held by one lease (empty: no block is pinned)."""

    client: KvStoreClient
    lease_id: str
    refs: tuple[Block, ...]
    release_later: ReleaseLater
    """Function that releases leases of the client in the background."""
    num_hits: int = 0
    """Number of earlier matches of the last of `refs`."""

    def release(self) -> None:
        """Release the lease in the background."""
        self.release_later(self.client, [self.lease_id])


class Pins:
    """Leases of one request, renewed together and released or handed over at its end."""

    def __init__(
        self,
        connector: StoreConnector,
        *,
        ttl_s: Callable[[], float],
        renew_budget_s: float,
        deadline: Deadline,
    ) -> None:
        """Create without pins. ttl_s: lease time in seconds from each renewal on."""
        self._connector = connector
        self._ttl_s = ttl_s
        self._renew_budget_s = renew_budget_s
        self._deadline = deadline
        self._pins: list[Pin] = []
        self._renewing: asyncio.Task[None] | None = None

    @property
    def held(self) -> tuple[Pin, ...]:
        """Return the held pins in the order in which they were added."""
        return tuple(self._pins)

    def add(self, pin: Pin) -> None:
        """Add a pin that a store has granted for this request."""
        self._pins.append(pin)

    def anew(self, pin: Pin) -> Pin | None:
        """Return an empty pin at the same store, for a pin that is held no longer; None: the store
        is gone."""
        if pin.client.broken is not None:
            return None
        self.add(Pin(pin.client, "", (), pin.release_later))
        return self._pins[-1]

    def take(self, pin: Pin) -> Pin:
        """Remove a pin, whose lease is the caller's from here on."""
        self._pins.remove(pin)
        return pin

    def keep(self, pins: Collection[Pin]) -> None:
        """Release all pins but these, at once."""
        for pin in [pin for pin in self._pins if pin not in pins]:
            self._give_up(pin)

    def start_renewing(self) -> None:
        """Start to renew the held leases in time. Idempotent."""
        if self._renewing is None:
            self._renewing = start_task(self._renew_often(), "prefix leases")

    async def renew(self) -> None:
        """Renew all leases now, concurrently. One that cannot be renewed is no longer held."""
        await asyncio.gather(*(self._renew(pin) for pin in self.held))

    def hand_over(self, lease_ids: Collection[str]) -> tuple[Pin, ...]:
        """Hand these leases over to a handle and release the others. Returns: the pins handed
        over."""
        handed_over = tuple(pin for pin in self._pins if pin.lease_id in lease_ids)
        for pin in handed_over:
            self._pins.remove(pin)
        self.release()
        return handed_over

    def release(self) -> None:
        """Release all held leases at the end. Idempotent."""
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
        """Remove a pin that can no longer be used; its lease expires or is gone already."""
        if pin in self._pins:
            self._give_up(pin)

    async def _release_after_end(self, task: asyncio.Task[None], pins: list[Pin]) -> None:
        await end_tasks([task])
        for pin in pins:
            pin.release()
