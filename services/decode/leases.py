"""Leases of handles: which store a run is in, and the release of leases that a final handle hands
over.

A final handle hands its leases over to the request that takes it: they are released at the store
that granted them, in the background. A partial handle hands over nothing. A lease that cannot be
released expires. Belongs to the loop's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvstore.client import KvStoreClient
from process import logs
from process.deadline import Deadline
from process.errors import BatonError, Unavailable
from services.worker.connector import RELEASE_BUDGET_S
from services.worker.core import WorkerCore
from services.worker.handle import Handle, Run

logger = logging.getLogger(__name__)


def is_home(core: WorkerCore, run: Run) -> bool:
    """Return whether a run is in this worker's own store; by its address while that store is
    away."""
    client = core.connector.client
    if client is not None:
        return run.node_id == client.node_id
    return run.store_address == core.connector.address


async def client_for(core: WorkerCore, run: Run, deadline: Deadline) -> KvStoreClient:
    """Return a client of the store that holds a run.

    Raises: Unavailable (StoreUnusable for another node's) when it cannot be used now,
        DeadlineExceeded.
    """
    if not is_home(core, run):
        return await core.remote_stores.client(
            run.node_id, run.store_address, run.store_incarnation, deadline
        )
    client = core.connector.client
    if client is None:
        raise Unavailable(f"our store {core.connector.address} is away")
    return client


def place_of(run: Run) -> tuple[str, bytes, str]:
    """Return the key by which blocks are read together: one lease of one store incarnation."""
    return run.node_id, run.store_incarnation, run.lease_id


def is_for(handle: Handle, request_id: str, tenant: str) -> bool:
    """Return whether a handle was made for that request: leases of another request must not be
    released here."""
    return (handle.request_id, handle.tenant) == (request_id, tenant)


def give_back(core: WorkerCore, handle: Handle, home: KvStoreClient | None = None) -> None:
    """Release the leases that a handle hands over, each at its own store.

    Args: home: client of this worker's own store from before it was found stalled; None: the
    present one.
    """
    if handle.is_partial:
        return
    runs = (*handle.runs, *((handle.tail,) if handle.tail else ()))
    by_store: dict[tuple[str, str, bytes], dict[str, Run]] = {}
    for run in runs:
        if run.lease_id:
            place = (run.node_id, run.store_address, run.store_incarnation)
            by_store.setdefault(place, {})[run.lease_id] = run
    for leases in by_store.values():
        run = next(iter(leases.values()))
        if is_home(core, run):
            core.connector.release_later(core.connector.client or home, leases)
        else:
            core.connector.spawn(_give_back_elsewhere(core, run, list(leases)))


async def _give_back_elsewhere(core: WorkerCore, run: Run, lease_ids: Sequence[str]) -> None:
    try:
        client = await client_for(core, run, Deadline.after(RELEASE_BUDGET_S))
    except BatonError as error:
        logs.event(logger, "lease_not_released", level=logging.WARNING, why=str(error))
        return
    core.remote_stores.release_later(client, lease_ids)
