"""Load on a cluster whose parts are restarted one after the other: clients that ask all the time,
of routers that take new requests, and compare each answer with the right one."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Self

from baton.answers import Provenance
from baton.client import Client, SyncClient
from baton.cluster import command_lines as cluster_plan
from baton.cluster.local_cluster import START_TIMEOUT_S, LocalCluster
from engine.request import Sampling
from tests.conftest import LONG
from tests.harness.cluster import oracle, prompts, run_engine, single_engine

NUM_CLIENTS = 8 if LONG else 2
PAUSE_S = 0.0 if LONG else 1.0
"""Between two requests of one client: parts start sooner where others leave them a core."""
MAX_TOKENS = 48 if LONG else 24
LONG_TOKENS = 512
"""Of an answer whose worker ends in its middle: finding and signalling that takes a few tokens."""
BUDGET_S = 60.0
SECOND = "router-1"
LONG_ID = "outlives-its-worker"


@dataclass(frozen=True)
class Ask:
    """One request, and what is right."""

    prompt: Sequence[int]
    temperature: float
    seed: int
    right: Sequence[int]

    @property
    def options(self) -> dict[str, Any]:
        """Of `Client.complete` and `Client.generate`."""
        return {
            "max_tokens": len(self.right),
            "ignore_eos": True,
            "temperature": self.temperature,
            "seed": self.seed,
            "timeout_s": BUDGET_S,
        }


@cache
def asks(model: str, seed: int, count: int, max_tokens: int = MAX_TOKENS) -> list[Ask]:
    """Different ones, greedy and sampled, with what one engine alone draws."""
    rng = random.Random(seed)
    made = [
        (prompt, rng.choice((0.0, 0.7, 1.0)), rng.randrange(2**63))
        for prompt in prompts(oracle(model), rng, count)
    ]
    wanted = [
        (prompt, Sampling(max_tokens=max_tokens, ignore_eos=True, temperature=heat, seed=number))
        for prompt, heat, number in made
    ]
    right = run_engine(single_engine(model), wanted, prefix_cache=f"{seed}-{max_tokens}-rolling")
    return [Ask(*each, tokens) for each, tokens in zip(made, right, strict=True)]


@dataclass
class Load:
    """See the module. It goes on until `num_wanted` were asked and `is_enough` is set."""

    cluster: LocalCluster
    asks: Sequence[Ask]
    num_wanted: int
    num_asked: int = 0
    num_right: int = 0
    is_enough: bool = False
    moves: Counter[str] = field(default_factory=Counter)
    """Answers that a worker left, by why."""
    _clients: dict[str, Client] = field(default_factory=dict)

    async def __aenter__(self) -> Self:
        """With a second router, as behind one Service."""
        cluster = self.cluster
        plan = cluster_plan.router(
            cluster.config,
            redis_url=cluster.redis_url,
            listen="127.0.0.1:0",
            secured=cluster.secured,
        )
        await asyncio.to_thread(cluster._parts().launch, [replace(plan, name=SECOND)])
        await asyncio.to_thread(cluster.wait_ready, START_TIMEOUT_S)
        for name in ("router", SECOND):
            self._clients[name] = Client(cluster.processes[name].address)
        return self

    async def __aexit__(self, *error: object) -> None:
        for client in self._clients.values():
            await client.close()
        with SyncClient(self.cluster.processes[SECOND].address) as second:
            num_left = second.status().num_requests_in_flight
        await self._retire(SECOND)
        assert not num_left, f"{num_left} requests are left at {SECOND}"

    async def run(self) -> None:
        """Raises: what any request fails with."""
        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_CLIENTS):
                group.create_task(self._ask_on())

    async def restart(self, *names: str) -> None:
        """End these parts (SIGTERM) and wait until their next lives serve."""
        async with self._out_of_rotation([name for name in names if name in self._clients]):
            for name in names:
                await asyncio.to_thread(self.cluster.restart, name)
            await asyncio.to_thread(self.cluster.wait_ready, START_TIMEOUT_S)

    async def restart_under(self, ask: Ask) -> None:
        """Ask this, too, and restart the decode worker that streams the answer: it must be moved.

        A worker restarted by its name may stream nothing just then: prompts go where their KV is,
        which a worker that has just begun lacks, and what has only blocks there is refused.

        Args: ask: of many tokens, see LONG_TOKENS.
        """
        client, worker_id = self._clients[SECOND], ""
        tokens: list[int] = []
        end = None
        async with asyncio.TaskGroup() as group:
            async for chunk in client.generate(list(ask.prompt), request_id=LONG_ID, **ask.options):
                tokens += chunk.token_ids
                end = chunk.end
                if not worker_id and len(tokens) > 1:  # the first may be the prefill worker's
                    worker_id = (await client.explain(LONG_ID)).decisions[-1].decode_id
                    group.create_task(self.restart(worker_id))
        assert tokens == list(ask.right)
        assert end is not None and end.provenance is not None
        left = [leg.worker_id for leg in end.provenance.legs if leg.ended_by == "moved"]
        assert left == [worker_id], end.provenance.legs
        self._note_moves(end.provenance)

    async def scale_down_and_up(self, *names: str) -> None:
        """End these workers for good, and start as many later."""
        parts = self.cluster._parts()
        specs = [parts._parts[name].spec for name in names]
        await self._retire(*names)
        await asyncio.to_thread(parts.launch, specs)
        await asyncio.to_thread(self.cluster.wait_ready, START_TIMEOUT_S)

    async def _retire(self, *names: str) -> None:
        parts = self.cluster._parts()
        await asyncio.to_thread(parts.retire, names, BUDGET_S)
        async with asyncio.timeout(2 * BUDGET_S):
            while any(name in self.cluster.processes for name in names):
                await asyncio.sleep(0.05)

    async def _ask_on(self) -> None:
        while self.num_asked < self.num_wanted or not self.is_enough:
            number, self.num_asked = self.num_asked, self.num_asked + 1
            ask = self.asks[number % len(self.asks)]
            names = sorted(self._clients)
            answer = await self._clients[names[number % len(names)]].complete(
                list(ask.prompt), **ask.options
            )
            assert list(answer.token_ids) == list(ask.right), (number, answer.provenance.legs)
            self.num_right += 1
            self._note_moves(answer.provenance)
            await asyncio.sleep(PAUSE_S)

    def _note_moves(self, provenance: Provenance) -> None:
        self.moves.update(leg.ended_by for leg in provenance.legs if leg.ended_by)

    @asynccontextmanager
    async def _out_of_rotation(self, routers: Sequence[str]) -> AsyncIterator[None]:
        """Routers that are about to end get no new requests in the body, as behind a Service. They
        end when what they have has ended: a pod's grace is longer than what `baton up` gives."""
        leaving = [self._clients.pop(name) for name in routers]
        async with asyncio.timeout(BUDGET_S):
            for client in leaving:
                while (await client.status()).num_requests_in_flight:
                    await asyncio.sleep(0.05)
                await client.close()
        yield
        for name in routers:
            self._clients[name] = Client(self.cluster.processes[name].address)
