"""Links: measured speeds of a worker's links to KV stores.

Each client is measured in the background right after it attached, and again every AGAIN_S while its
link is degraded, so that one bad measurement is not final. A measurement that says nothing about
the link (no free blocks at either end, or the client was closed) does not change the known speed.
Measurements run one at a time, so that they do not slow one another. The engine lends free blocks
for them and gets each one back when no transfer can touch it any more, whatever the result. Used on
the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from kvstore.client import KvStoreClient
from kvstore.errors import Quarantine, TransferFailed, TransferTimeout, quarantine_of
from kvstore.link_quality import Link, LinkRates, Verdict, judge, num_blocks_wanted
from process import logs
from process.background_tasks import end_tasks, start_task
from process.deadline import Deadline
from process.rpc_errors import BatonError, DeadlineExceeded, Unavailable
from services.worker.engine_thread import EngineThread

logger = logging.getLogger(__name__)

BUDGET_S = 0.5
"""Seconds for the first measurement of a link."""

LEND_BUDGET_S = 5.0
"""Seconds for the engine to lend blocks: longer than a step should take."""

AGAIN_S = 60.0

MAX_LINKS = 64
"""Most links that are remembered; the one measured longest ago is dropped first."""


class Links:
    """Measurements of the links to stores, in the background, one at a time."""

    def __init__(
        self,
        thread: EngineThread,
        block_bytes: int,
        floor_bytes_per_s: float,
        *,
        second_budget_s: float = 2.0,
        on_room: Callable[[], None] = lambda: None,
        again_s: float = AGAIN_S,
        max_links: int = MAX_LINKS,
    ) -> None:
        """Create without any measurement. floor_bytes_per_s: the configured speed below which a
        link counts as degraded, 0: none. second_budget_s: seconds for a repeated measurement after
        a first one that timed out. on_room: called when the engine has its blocks back."""
        self._thread = thread
        self._num_blocks = num_blocks_wanted(block_bytes)
        self._floor_bytes_per_s = floor_bytes_per_s
        self._budgets_s = (BUDGET_S, second_budget_s)
        self._on_room = on_room
        self._again_s = again_s
        self._max_links = max_links
        self._links: dict[tuple[str, str], Link] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()
        self._is_stopped = False
        self._again: dict[tuple[str, str], asyncio.TimerHandle] = {}

    def measure_later(self, client: KvStoreClient) -> None:
        """Queue a measurement of the client's link, after those already queued."""
        if self._is_stopped:
            return
        task = start_task(self._measure(client), "link measurement", is_for_many=True)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def links(self) -> list[tuple[Link, Verdict]]:
        """Return the links as last measured, oldest first."""
        return [(link, judge(link, self._floor_bytes_per_s)) for link in self._links.values()]

    @property
    def num_repeated(self) -> int:
        """Return the number of degraded links that are measured again periodically."""
        return len(self._again)

    async def settle(self) -> None:
        """Wait for the measurements that are queued now (each has its own bound)."""
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    async def stop(self) -> None:
        """Stop running measurements and start no more."""
        self._is_stopped = True
        for timer in self._again.values():
            timer.cancel()
        self._again.clear()
        await end_tasks(self._tasks)

    # ---- inside

    def _measure_again(self, client: KvStoreClient) -> None:
        self._again.pop((client.node_id, client.transport_name), None)
        if client.broken is None:
            self.measure_later(client)

    async def _measure(self, client: KvStoreClient) -> None:
        async with self._turn:
            rates, problem, is_fault = None, "", False
            for budget_s in self._budgets_s:
                try:
                    rates, problem, is_fault = await self._rates(client, budget_s), "", False
                except (DeadlineExceeded, TransferTimeout) as error:
                    problem, is_fault = f"not measured within {budget_s:g} s: {error}", True
                    continue
                except BatonError as error:
                    problem, is_fault = str(error), isinstance(error, TransferFailed)
                break
        link = Link(
            client.node_id,
            client.address,
            client.transport_name,
            time.time_ns() // 1_000_000,
            rates,
            problem,
            is_fault,
        )
        if self._note(link) and client.broken is None and not self._is_stopped:
            timer = asyncio.get_running_loop().call_later(
                self._again_s, self._measure_again, client
            )
            self._again[link.node_id, link.transport] = timer

    async def _rates(self, client: KvStoreClient, budget_s: float) -> LinkRates:
        lent: list[int] = []
        held: Quarantine | None = None
        try:
            try:
                async with asyncio.timeout(LEND_BUDGET_S):
                    await self._thread.call(
                        lambda engine: lent.extend(engine.lend_blocks(self._num_blocks))
                    )
            except TimeoutError:
                raise Unavailable("the engine lent no blocks in time") from None
            return await client.measure(lent, Deadline.after(budget_s))
        except BaseException as error:
            held = quarantine_of(error)
            if held is not None and isinstance(error, asyncio.CancelledError):
                # A plain one: asyncio.timeout of this Python recognises no subclass.
                raise asyncio.CancelledError(str(error)) from error
            raise
        finally:
            # After the job that lends, even one that its caller did not wait for.
            if held is None:
                self._give_back(lent)
            else:
                held.settled.add_done_callback(lambda _: self._give_back(lent))

    def _give_back(self, lent: list[int]) -> None:
        self._thread.post(lambda engine: engine.return_blocks(lent), self._on_room)

    def _note(self, link: Link) -> bool:
        """Record a measured link and report it. Returns: whether it is degraded."""
        key = (link.node_id, link.transport)
        timer = self._again.pop(key, None)
        if timer is not None:
            timer.cancel()  # its client's, or a former one's
        link = _newest_known(self._links.pop(key, None), link)
        self._links[key] = link
        while len(self._links) > self._max_links:
            del self._links[next(iter(self._links))]
        rates, verdict = link.rates, judge(link, self._floor_bytes_per_s)
        logs.event(
            logger,
            "link_measured",
            level=logging.WARNING if verdict.degraded else logging.INFO,
            node_id=link.node_id,
            address=link.address,
            transport=link.transport,
            write_bytes_per_s=round(rates.write_bytes_per_s) if rates else 0,
            read_bytes_per_s=round(rates.read_bytes_per_s) if rates else 0,
            latency_s=round(rates.latency_s, 6) if rates else 0.0,
            floor_bytes_per_s=round(verdict.floor_bytes_per_s),
            degraded=verdict.degraded,
            problem=link.problem,
        )
        return verdict.degraded


def _newest_known(before: Link | None, link: Link) -> Link:
    """Return the newer measurement, unless it says nothing about the link and the earlier one of
    the same address does."""
    says_nothing = link.rates is None and not link.is_fault
    if before is not None and before.address == link.address and says_nothing:
        is_known = before.rates is not None or before.is_fault
        return before if is_known else link
    return link
