"""What is done to a cluster while it serves, each with what it may bring about and how it is known
to have happened.

An action is drawn whole (victims, pauses) before its round begins, so that a seed replays it. Its
`disturb` runs beside the streams and leaves everything healed or on its way to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import redis

from baton import index_audit
from kvstore import index
from process import registry
from tests.chaos import wire_handles
from tests.chaos.arena import READY_S, TIMING, Arena, Disturb, Round, committed_frames
from tests.harness.control_proxy import Mischief

Seen = Callable[[Round], Coroutine[Any, Any, bool]]
Mend = Callable[[Round], Coroutine[Any, Any, None]]

STORM_S = 4.0
MORE_STORMS = 3
"""After one of which nobody read anything."""
_REDIS_S = 5.0


@dataclass(frozen=True)
class Action:
    """One disturbance.

    may_cause: reasons beyond those of timing. lasts: these reasons may show up in later rounds,
    too. seen: that it really happened, by what the cluster itself says after the round; None: it
    need not leave a trace. mend: undoes after the round what would outlast it.
    """

    name: str
    disturb: Disturb
    may_cause: frozenset[str] = frozenset()
    lasts: bool = False
    seen: Seen | None = None
    mend: Mend | None = None


Draw = Callable[[Arena, random.Random], Action]


def _moment(rng: random.Random) -> float:
    """How long after the first token it happens."""
    return rng.choice((0.0, rng.uniform(0.0, 0.1), rng.uniform(0.0, 1.0)))


# -- processes


def _lives(made: Round, name: str) -> tuple[str, str]:
    """The incarnations of a worker or store before and after the round."""

    def life(status: Any) -> str:
        every = {worker.worker_id: worker.incarnation for worker in status.workers}
        every |= {store.node_id: store.incarnation for store in status.stores}
        return str(every.get(name, ""))

    return life(made.before), life(made.after)


def _another_life(name: str) -> Seen:
    async def seen(made: Round) -> bool:
        return len(set(_lives(made, name))) == 2

    return seen


def kill(kind: str) -> Draw:
    """SIGKILL one part of a kind at a random point; it is started again."""

    def draw(arena: Arena, rng: random.Random) -> Action:
        victim, wait_s = rng.choice(_parts(arena, kind)), _moment(rng)

        async def disturb(made: Round) -> None:
            await made.first_token()
            await asyncio.sleep(wait_s)
            await asyncio.to_thread(arena.cluster.kill, victim)

        seen = None if kind == "redis" else _another_life(victim)
        name = f"kill {victim} {wait_s:.3f} s after the first token"
        return Action(name, disturb, seen=seen)

    return draw


def restart(kind: str) -> Draw:
    """SIGTERM one part of a kind: it drains, ends, and a new life begins."""

    def draw(arena: Arena, rng: random.Random) -> Action:
        victim, wait_s = rng.choice(_parts(arena, kind)), _moment(rng)

        async def disturb(made: Round) -> None:
            await made.first_token()
            await asyncio.sleep(wait_s)
            await asyncio.to_thread(arena.cluster.restart, victim)

        name = f"restart {victim} {wait_s:.3f} s after the first token"
        return Action(name, disturb, seen=_another_life(victim))

    return draw


def pause(kind: str) -> Draw:
    """SIGSTOP one part of a kind for a while: alive, and silent."""

    def draw(arena: Arena, rng: random.Random) -> Action:
        victim, wait_s = rng.choice(_parts(arena, kind)), _moment(rng)
        pause_s = rng.choice((0.3, 1.5, 4.5))  # within and beyond what a heartbeat counts

        async def disturb(made: Round) -> None:
            await made.first_token()
            await asyncio.sleep(wait_s)
            arena.send(victim, signal.SIGSTOP)
            try:
                await asyncio.sleep(pause_s)
            finally:
                arena.send(victim, signal.SIGCONT)

        name = f"pause {victim} for {pause_s} s, {wait_s:.3f} s after the first token"
        return Action(name, disturb)

    return draw


def _parts(arena: Arena, kind: str) -> list[str]:
    names = [name for name, info in arena.cluster.processes.items() if info.kind == kind]
    assert names, kind
    return names


# -- bytes at rest


def spoil_frames(arena: Arena, rng: random.Random) -> Action:
    """One bit of each block as soon as it is committed, for as long as the storm lasts: whatever is
    read from a store then is bad, unless it was read within a millisecond."""
    turns = random.Random(rng.randrange(2**63))
    spoiled: dict[int, np.ndarray] = {}  # by slab: each frame's generation when it was spoiled

    def storm() -> None:
        for at, slab in enumerate(arena.slabs()):
            done = spoiled.setdefault(at, np.zeros(len(slab.generations), dtype=np.uint64))
            committed = committed_frames(slab)
            generations = slab.generations[committed]
            is_new = done[committed] != generations
            # What is found good costs nothing: with all frames of a long run in a loop of Python a
            # pass takes longer than a reader does.
            for frame in committed[is_new].tolist():
                block = slab.block(frame)
                block[turns.randrange(len(block))] ^= 1 << turns.randrange(8)
            done[committed] = generations

    async def disturb(made: Round) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + STORM_S
        while loop.time() < until_s:
            await asyncio.to_thread(storm)
            await asyncio.sleep(0)
        assert any(done.any() for done in spoiled.values()), "there was nothing to spoil"

    async def seen(made: Round) -> bool:
        if arena.shape.file_tier_bytes:
            return True  # the store may have found the damage itself, before anybody read it
        for number in range(MORE_STORMS):
            if made.reasons["checksum"] > 0:
                break
            # Nobody read what was spoiled: there was no room to store it, the reader was first, or
            # prefill workers had it in their own caches, which their next lives have not.
            for name in arena.workers("prefill"):
                await asyncio.to_thread(arena.cluster.restart, name)
            await arena.settle(made)
            made = Round(f"{made.name}, storm {number + 2}", arena.plan(len(made.asks)))
            await arena.run(made, disturb)
            await arena.settle(made)
            arena.check(made, may_cause=may_cause)
        return made.reasons["checksum"] > 0

    may_cause = frozenset({"checksum"})
    return Action("spoil every frame", disturb, may_cause=may_cause, lasts=True, seen=seen)


# -- messages


def slow_link(arena: Arena, rng: random.Random) -> Action:
    """What one side says to the other takes its time."""
    link = rng.choice(sorted(arena.links))
    delay_s = rng.choice((0.02, 0.1, 0.3))

    async def disturb(made: Round) -> None:
        arena.links[link].behave(Mischief(delay_s=delay_s))
        try:
            await asyncio.sleep(3.0)
        finally:
            arena.links[link].behave()

    return Action(f"delay {link}'s messages by up to {delay_s} s", disturb)


def silent_link(arena: Arena, rng: random.Random) -> Action:
    """Nothing comes through for a while, and nobody is told."""
    link, wait_s = rng.choice(sorted(arena.links)), _moment(rng)
    silent_s = rng.choice((0.5, 2.0, 6.0))

    async def disturb(made: Round) -> None:
        await asyncio.sleep(wait_s)
        arena.links[link].hold()
        try:
            await asyncio.sleep(silent_s)
        finally:
            arena.links[link].go_on()

    return Action(f"hold {link}'s messages for {silent_s} s", disturb)


def cut_link(arena: Arena, rng: random.Random) -> Action:
    """Connections break, several times."""
    link, times = rng.choice(sorted(arena.links)), rng.randint(1, 4)
    pauses_s = [rng.uniform(0.0, 0.7) for _ in range(times)]

    async def disturb(made: Round) -> None:
        for pause_s in pauses_s:
            await asyncio.sleep(pause_s)
            arena.links[link].cut()

    return Action(f"cut {link}'s connections {times} times", disturb)


def spoil_messages(arena: Arena, rng: random.Random) -> Action:
    """Bits turn over, or pieces are lost, in what workers and stores tell each other."""
    link = rng.choice(("prefill", "decode"))
    garble, drop = rng.choice(((0.02, 0.0), (0.2, 0.0), (0.0, 0.05), (0.05, 0.05)))

    async def disturb(made: Round) -> None:
        proxy = arena.links[link]
        proxy.behave(Mischief(garble=garble, drop=drop))
        try:
            await asyncio.sleep(4.0)
        finally:
            proxy.behave()
            proxy.cut()  # what lost its place in a stream never finds it again

    # A wrong checksum may be committed, a wrong frame or hash be named: found when it is read.
    return Action(
        f"spoil {100 * garble:.0f} % and drop {100 * drop:.0f} % of {link}'s messages",
        disturb,
        may_cause=frozenset({"checksum", "fingerprint", "signature"}),
        lasts=True,
    )


# -- the index


def lose_index(arena: Arena, rng: random.Random) -> Action:
    """Redis forgets entries, has false ones, or loses a store's whole index: hints, all of them."""
    how = rng.choice(("some", "all", "false", "flush"))
    share = rng.uniform(0.2, 0.9)
    turns = random.Random(rng.randrange(2**63))
    num_spoiled = 0

    async def disturb(made: Round) -> None:
        nonlocal num_spoiled
        await made.first_token()
        try:
            async with _redis_of(arena) as client:
                num_spoiled = await _spoil_index(client, how, share, turns)
        except (redis.ConnectionError, TimeoutError):
            # Another action of this round killed it: what was spoiled died with it.
            num_spoiled = 0

    async def seen(made: Round) -> bool:
        """An audit finds what no sequence number shows; a lost index was published again."""
        found = await index_audit.audit(
            arena.cluster.redis_url, settle_s=READY_S, timeout_s=READY_S
        )
        assert {one.node_id for one in found} == set(arena.stores)
        assert all(one.is_settled for one in found), found
        num_drifted = sum(one.num_missing + one.num_false for one in found)
        # Entries that the stores evicted or published anew meanwhile are right again.
        assert num_drifted <= num_spoiled, (num_drifted, num_spoiled)
        if num_drifted:
            assert how in ("some", "false"), found
            async with _redis_of(arena) as client:
                await _spoil_index(client, "all", share, turns)  # published again by that
        return True

    return Action(f"lose index entries: {how}", disturb, seen=seen)


@contextlib.asynccontextmanager
async def _redis_of(arena: Arena) -> AsyncIterator[Any]:
    client = registry.connect_redis(arena.cluster.redis_url, _REDIS_S)
    try:
        async with asyncio.timeout(_REDIS_S):
            yield client
    finally:
        await client.aclose()


async def _spoil_index(client: Any, how: str, share: float, turns: random.Random) -> int:
    """Returns: how many single entries are wrong now; 0 where whole indexes are gone."""
    if how == "flush":
        await client.flushall()
        return 0
    num_spoiled = 0
    async for key in client.scan_iter(match=index.index_key("*", "*")):
        if how == "all":
            await client.delete(key)
        elif how == "false":
            false = {turns.randbytes(16): 1 for _ in range(100)}
            num_spoiled += await client.hset(key, mapping=false)
        else:
            hashes = [name for name in await client.hkeys(key) if len(name) == 16]
            lost = [name for name in hashes if turns.random() < share]
            num_spoiled += await client.hdel(key, *lost) if lost else 0
    return num_spoiled


# -- handles


def forge_handles(arena: Arena, rng: random.Random) -> Action:
    """Somebody who can reach a decode worker hands over what no prefill worker signed, or what was
    handed over before."""
    prompts = [[rng.randrange(100, 2000) for _ in range(rng.randint(20, 90))] for _ in range(3)]
    forgeries = rng.sample(sorted(wire_handles.FORGERIES), 3)

    async def disturb(made: Round) -> None:
        workers = wire_handles.workers_of(await asyncio.to_thread(arena.status))
        for prompt, forgery in zip(prompts, forgeries, strict=True):
            answer = await wire_handles.forged(workers, prompt, forgery)
            assert answer.recomputed.keys() == {"signature"}, (forgery, answer.recomputed)
            assert answer.token_ids == arena.right(prompt, wire_handles.MAX_TOKENS), forgery
        first, again = await wire_handles.replayed(workers, prompts[0])
        assert first.recomputed.keys() <= TIMING, first.recomputed
        assert again.recomputed.keys() == {"replayed"}, again.recomputed
        right = arena.right(prompts[0], wire_handles.MAX_TOKENS)
        assert first.token_ids == again.token_ids == right

    return Action(f"forge handles ({', '.join(forgeries)}) and replay one", disturb)


# -- the disk


def spoil_pages(arena: Arena, rng: random.Random) -> Action:
    """Bits turn over in the files of the file tiers."""
    turns = random.Random(rng.randrange(2**63))

    async def disturb(made: Round) -> None:
        for path in arena.page_files():
            size = path.stat().st_size
            with path.open("r+b", buffering=0) as pages:
                for _ in range(200):
                    at = turns.randrange(4096, size)
                    byte = os.pread(pages.fileno(), 1, at)
                    os.pwrite(pages.fileno(), bytes([byte[0] ^ 1 << turns.randrange(8)]), at)

    return Action("spoil pages", disturb)


def fill_disk(arena: Arena, rng: random.Random) -> Action:
    """The store cannot write to its disk any more: the tier goes off by name, the store lives on.
    Its next life has the tier again."""
    victim = rng.choice(arena.stores)

    async def disturb(made: Round) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):  # somebody else has killed it
            process = psutil.Process(arena.cluster.processes[victim].pid)
            _, hard = process.rlimit(psutil.RLIMIT_FSIZE)
            process.rlimit(psutil.RLIMIT_FSIZE, (0, hard))

    async def seen(made: Round) -> bool:
        # Asked itself: the cluster's status is as old as its last heartbeat.
        if (await arena.own_status(victim)).file_tier_problem:
            async with asyncio.timeout(READY_S):
                while not any(
                    "file tier" in problem
                    for problem in (await asyncio.to_thread(arena.status)).problems
                ):
                    await asyncio.sleep(0.1)
        return True  # or nothing had to be written meanwhile

    async def mend(made: Round) -> None:
        await asyncio.to_thread(arena.cluster.restart, victim)
        await arena.settle(made)
        assert not (await arena.own_status(victim)).file_tier_problem

    return Action(f"{victim}'s disk is full", disturb, seen=seen, mend=mend)


# -- several at once


def together(actions: list[Action]) -> Action:
    """Several actions at the same time."""

    async def disturb(made: Round) -> None:
        await asyncio.gather(*(action.disturb(made) for action in actions))

    async def mend(made: Round) -> None:
        for action in actions:
            if action.mend is not None:
                await action.mend(made)

    # Whether each left its trace cannot be told apart from what the others did.
    return Action(
        " and ".join(action.name for action in actions),
        disturb,
        may_cause=frozenset().union(*(action.may_cause for action in actions)),
        lasts=any(action.lasts for action in actions),
        mend=mend,
    )


EVERYWHERE: tuple[Draw, ...] = (
    kill("store"),
    kill("prefill"),
    kill("decode"),
    kill("redis"),
    restart("store"),
    restart("prefill"),
    restart("decode"),
    pause("store"),
    pause("prefill"),
    pause("decode"),
    spoil_frames,
    slow_link,
    silent_link,
    cut_link,
    spoil_messages,
    lose_index,
    forge_handles,
)
WITH_FILES: tuple[Draw, ...] = (spoil_pages, fill_disk)
ALONE: frozenset[Draw] = frozenset({forge_handles})
"""What says exactly what must come of it, and so meets no other."""


def for_shape(arena: Arena) -> tuple[Draw, ...]:
    """What can be done to this cluster."""
    return EVERYWHERE + WITH_FILES * bool(arena.shape.file_tier_bytes)


def count(reasons: Counter[str]) -> str:
    """For the log of a run."""
    return ", ".join(f"{reason} {num}" for reason, num in sorted(reasons.items())) or "nothing"
