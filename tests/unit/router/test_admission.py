"""Admission: who is served, who waits, who is refused and why; no cancel breaks a law."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from process.api_keys import TenantLimits
from process.deadline import Deadline
from process.rpc_errors import DeadlineExceeded, NoCapacity
from services.router.admission import (
    MAX_PATIENCE_S,
    Admission,
    AdmissionEntry,
    AdmissionRequest,
    AdmissionTicket,
)
from services.router.config import AdmissionSettings
from tests.harness.waiting import Clock, settled

WAIT_S = 10.0


class Rates:
    """Counts; refuses whoever is in `over`."""

    def __init__(self) -> None:
        self.charged: Counter[str] = Counter()
        self.over: set[str] = set()
        self.problem = ""

    async def take(self, tenant: str, limits: TenantLimits, num_tokens: int) -> None:
        if tenant in self.over:
            raise NoCapacity("over", retry_after_s=7.0)
        self.charged[tenant] += num_tokens

    async def give_back(self, tenant: str, limits: TenantLimits, num_tokens: int) -> None:
        self.charged[tenant] -= num_tokens


class World:
    """An admission, and tasks in it that end when they are told."""

    def __init__(self, limits: dict[str, TenantLimits] | None = None, **settings: int) -> None:
        self.rates, self.clock = Rates(), Clock(0.0)
        rates: Any = self.rates
        self.num_free_places: dict[str, int] = {}
        """By model; of others many."""
        self.admission = Admission(
            AdmissionSettings(**settings),
            rates,
            limits_of=(limits or {}).get,
            has_decode_place=lambda model, num_ahead: (
                num_ahead < self.num_free_places.get(model, 1_000)
            ),
            clock=self.clock,
        )
        self.order: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}
        self.tickets: dict[str, AdmissionTicket] = {}
        self.entries: dict[str, AdmissionEntry] = {}

    async def ask(
        self,
        name: str,
        tenant: str = "a",
        *,
        prompt: int = 10,
        output: int = 10,
        priority: int = 0,
        model: str = "",
        places: int = 0,
        deadline: Deadline | None = None,
    ) -> asyncio.Task[None]:
        self.ends[name], self.entries[name] = asyncio.Event(), AdmissionEntry()
        asked = AdmissionRequest(tenant, priority, prompt, output, model, places)
        bound, entry = deadline or Deadline.after(WAIT_S), self.entries[name]

        async def serve() -> None:
            async with self.admission.admit(asked, bound, entry) as ticket:
                self.order.append(name)
                self.tickets[name] = ticket
                await self.ends[name].wait()

        task = asyncio.create_task(serve())
        await self.settle()
        return task

    async def reserve(self, name: str) -> None:
        """A decode worker takes the request on."""
        asked = self.tickets[name].asked
        if self.tickets[name].places_ahead:
            left = self.num_free_places.get(asked.model, 1_000) - asked.num_places
            self.num_free_places[asked.model] = max(0, left)
        self.tickets[name].on_reserved()
        await self.settle()

    async def have_places(self, model: str, num: int) -> None:
        """The model's decode workers say how many are left."""
        self.num_free_places[model] = num
        self.admission.look()
        await self.settle()

    async def end(self, name: str) -> None:
        self.ends[name].set()
        await self.settle()

    async def end_all(self) -> None:
        for name in self.ends:
            await self.end(name)

    async def settle(self) -> None:
        await settled()
        self.admission.check_integrity()


async def test_who_finds_room_is_served_and_the_others_in_turn() -> None:
    world = World(max_active_requests=1)
    tasks = [await world.ask(name, tenant) for name, tenant in (("1", "a"), ("2", "a"), ("3", "b"))]
    assert world.order == ["1"]
    assert (world.admission.num_active, world.admission.num_waiting) == (1, 2)
    for name in "123":
        await world.end(name)
    assert world.order == ["1", "2", "3"] and all(task.done() for task in tasks)
    assert (world.admission.num_active, world.admission.num_waiting) == (0, 0)
    assert world.admission.counts.num_admitted == 3 and world.admission.counts.num_waited == 2


async def test_prompts_ahead_bound_who_begins_and_one_alone_always_does() -> None:
    world = World(num_steps_ahead=1)
    await world.ask("huge", prompt=5_000)
    await world.ask("next")
    assert world.order == ["huge"]
    world.tickets["huge"].on_tokens(1)  # its first token is out; it goes on
    await world.settle()
    assert world.order == ["huge", "next"]
    await world.end_all()


async def test_a_long_prompt_leaves_room_for_another_beside_it() -> None:
    world = World(num_steps_ahead=3)
    await world.ask("long", prompt=1_000_000)
    await world.ask("short")
    assert world.order == ["long", "short"]
    await world.ask("long too", prompt=1_000_000)
    await world.ask("waits")
    assert world.order == ["long", "short", "long too"]
    await world.end_all()


async def test_a_full_queue_refuses_and_says_when_to_come_again() -> None:
    world = World(max_active_requests=1, max_queued_requests=4, max_queued_per_tenant=3)
    tasks = [await world.ask(f"a{number}") for number in range(5)]
    with pytest.raises(NoCapacity, match="3 requests of your tenant wait; try again in 1 s"):
        await tasks[4]
    tasks.append(await world.ask("b0", "b"))
    # Full: b has one waiting, a three; a's newest gives way.
    tasks.append(await world.ask("b1", "b"))
    with pytest.raises(NoCapacity, match="your tenant has most of the requests that wait"):
        await tasks[3]
    with pytest.raises(NoCapacity, match="4 requests wait"):
        await (await world.ask("b2", "b"))
    assert world.admission.counts.refused == {"tenant_queue": 1, "pushed_out": 1, "queue": 1}
    await world.end_all()
    assert sorted(world.order) == ["a0", "a1", "a2", "b0", "b1"]


async def test_who_cannot_be_served_in_time_is_refused_before_it_waits() -> None:
    world = World(max_active_requests=1)
    await world.ask("first", prompt=1000, output=0)
    for number in range(8):
        before = Deadline(10.0, world.clock)  # due before the one that comes late
        await world.ask(f"w{number}", prompt=1000, output=0, deadline=before)
    # Nothing is known of the pace yet; then 1,000 tokens take 2 s.
    for name in ("first", "w0", "w1", "w2"):
        world.clock.now_s += 2.0
        await world.end(name)
    late = Deadline(world.clock.now_s + 5.0, world.clock)
    with pytest.raises(NoCapacity, match=r"would wait for about .* and has 5\.0 s") as raised:
        await (await world.ask("late", prompt=1000, output=0, deadline=late))
    assert raised.value.retry_after_s is not None and raised.value.retry_after_s >= 1
    assert world.admission.counts.refused == {"deadline": 1}
    # Another tenant does not wait behind all of this one's, and has a turn in time.
    await world.ask("other", "b", prompt=1000, output=0, deadline=late)
    assert world.admission.num_waiting == 5
    await world.end_all()


async def test_a_deadline_and_a_cancel_in_the_queue_leave_nothing() -> None:
    world = World(max_active_requests=1)
    await world.ask("first")
    short = await world.ask("short", deadline=Deadline.after(0.05))
    gone = await world.ask("gone")
    await world.ask("last")
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    with pytest.raises(DeadlineExceeded, match="waiting to be admitted"):
        await short
    await world.settle()
    assert world.admission.num_waiting == 1
    await world.end_all()
    assert world.order == ["first", "last"]


async def test_a_cancel_in_the_moment_of_ones_turn_gives_the_turn_on() -> None:
    world = World(max_active_requests=1)
    await world.ask("first")
    second = await world.ask("second")
    await world.ask("third")
    world.ends["first"].set()
    await asyncio.sleep(0)  # first is over, second's turn has come, and it has not run yet
    assert world.admission.num_active == 1 and world.order == ["first"]
    second.cancel()
    await world.settle()
    assert world.order == ["first", "third"]
    await world.end("third")
    assert world.admission.num_active == 0


async def test_a_rate_limit_refuses_and_what_was_not_used_is_given_back() -> None:
    limits = {"a": TenantLimits(max_tokens_per_min=1000)}
    world = World(limits, max_active_requests=1)
    await world.ask("1", prompt=30, output=70)
    waiting = await world.ask("2", prompt=30, output=70)
    assert world.rates.charged["a"] == 200
    waiting.cancel()
    world.tickets["1"].on_tokens(31)
    world.tickets["1"].on_tokens(4)
    await world.end("1")
    await asyncio.gather(waiting, return_exceptions=True)
    await world.admission.close()
    assert world.rates.charged["a"] == 35
    world.rates.over.add("a")
    with pytest.raises(NoCapacity) as raised:
        await (await world.ask("3"))
    assert raised.value.retry_after_s == 7.0
    assert world.admission.counts.refused == {"rate": 1}


async def test_the_laws_hold_under_any_order_of_events(
    seed: int, scale: Callable[[int], int]
) -> None:
    rng = random.Random(seed)
    for round_number in range(scale(100)):
        world = World(
            {"t0": TenantLimits(max_active_requests=2, weight=3.0)},
            max_active_requests=rng.choice([1, 3]),
            max_queued_requests=rng.choice([2, 20]),
            max_queued_per_tenant=rng.choice([1, 15]),
            num_steps_ahead=rng.choice([1, 5]),
        )
        world.num_free_places = {"m": 1, "n": 1}
        tasks: dict[str, asyncio.Task[None]] = {}
        for number in range(60):
            what = rng.random()
            if what < 0.5:
                name = f"{round_number}.{number}"
                tasks[name] = await world.ask(
                    name,
                    f"t{rng.randrange(3)}",
                    prompt=rng.choice([1, 50, 700]),
                    priority=rng.choice([0, 0, 1]),
                    model=rng.choice("mn"),
                    places=rng.choice([0, 1, 1, 3]),
                )
            elif what < 0.7 and tasks:
                tasks[rng.choice(list(tasks))].cancel()
            elif what < 0.8 and world.tickets:
                name = rng.choice(list(world.tickets))
                if not tasks[name].done():
                    if rng.random() < 0.5:
                        await world.reserve(name)
                    else:
                        world.tickets[name].on_tokens(1)
            elif what < 0.9:
                await world.have_places(rng.choice("mn"), rng.choice([0, 1, 2]))
            elif tasks:
                world.ends[rng.choice(list(tasks))].set()
            if rng.random() < 0.7:
                await world.settle()
        for end in world.ends.values():
            end.set()
        for model in "mn":
            await world.have_places(model, 1_000)
        results = await asyncio.gather(*tasks.values(), return_exceptions=True)
        assert all(
            result is None or isinstance(result, NoCapacity | asyncio.CancelledError)
            for result in results
        )
        await world.settle()
        assert (world.admission.num_active, world.admission.num_waiting) == (0, 0)


async def test_a_tenant_held_up_by_its_own_bound_makes_nobody_else_wait_longer() -> None:
    world = World(limits={"a": TenantLimits(max_active_requests=1)}, max_active_requests=10)
    tasks = [await world.ask(f"a{i}", "a", output=990) for i in range(20)]
    world.clock.now_s = 10.0
    await world.end("a0")  # one in ten seconds: as slow as the tenant itself
    world.clock.now_s = 20.0
    tasks.append(await world.ask("b0", "b", prompt=10, output=0, deadline=Deadline.after(5)))
    assert world.order == ["a0", "a1", "b0"] and not world.admission.counts.refused
    # One that does have to wait for room is not told to wait for those either.
    tasks += [await world.ask(f"b{i}", "b", output=490) for i in range(1, 9)]
    assert world.admission.num_active == 10
    world.clock.now_s = 21.0
    tasks.append(await world.ask("c0", "c", prompt=10, output=0, deadline=Deadline.after(5)))
    world.clock.now_s = 23.0
    await world.end("b0")
    assert world.order[-1] == "c0" and not world.admission.counts.refused
    for task in tasks:
        task.cancel()
    await world.settle()
    assert (world.admission.num_active, world.admission.num_waiting) == (0, 0)


async def test_who_is_cancelled_while_it_is_charged_gets_all_back() -> None:
    world = World(limits={"a": TenantLimits(max_tokens_per_min=1000)})
    answer, take = asyncio.Event(), world.rates.take

    async def slow(tenant: str, limits: TenantLimits, num_tokens: int) -> None:
        await answer.wait()
        await take(tenant, limits, num_tokens)

    world.rates.take = slow  # type: ignore[method-assign]
    task = await world.ask("1")
    task.cancel()
    await world.settle()
    assert task.cancelled() and not world.order
    answer.set()
    await world.admission.close()
    assert world.rates.charged == {"a": 0}


async def test_who_leaves_before_the_first_token_has_had_its_prompt_computed() -> None:
    world = World(limits={"a": TenantLimits(max_tokens_per_min=1000)})
    task = await world.ask("1", prompt=100, output=10)
    task.cancel()
    await world.settle()
    await world.admission.close()
    assert world.rates.charged == {"a": 100}


async def test_another_models_queue_makes_no_wait_look_longer() -> None:
    world = World()
    world.num_free_places = {"m": 0, "n": 0}
    for number in range(20):
        await world.ask(f"m{number}", model="m", places=1, output=990)
    for number in range(3):
        await world.ask(f"n{number}", model="n", places=1, output=90)
    for number in range(3):
        world.clock.now_s += 2.0
        await world.have_places("n", 1)
        await world.reserve(f"n{number}")
    # One of n in two seconds, and none waits for it; of m none has begun.
    late = Deadline(world.clock.now_s + 5.0, world.clock)
    task = await world.ask("n3", model="n", places=1, output=90, deadline=late)
    assert not task.done() and not world.admission.counts.refused
    for model in "mn":
        await world.have_places(model, 1_000)
    await world.end_all()


async def test_a_request_in_a_hurry_goes_first_but_passes_none_that_came_a_minute_before() -> None:
    world = World(max_active_requests=1)

    def budget(seconds: float) -> Deadline:
        return Deadline(world.clock.now_s + seconds, world.clock)

    for name, budget_s, now_s in (
        ("runs", 300.0, 0.0),
        ("old", 300.0, 0.0),
        ("patient", 3600.0, 1.0),
        ("hurried", 30.0, 2.0),
        ("late", 20.0, 2.0 + MAX_PATIENCE_S),
    ):
        world.clock.now_s = now_s
        await world.ask(name, deadline=budget(budget_s))
    for name in ("runs", "hurried", "old", "patient", "late"):
        assert world.order[-1] == name
        await world.end(name)


async def test_where_a_request_stands_and_what_it_waits_for() -> None:
    limits = {"b": TenantLimits(max_active_requests=1)}
    world = World(limits, max_active_requests=3, num_steps_ahead=1)
    world.num_free_places = {"m": 0}
    standing, entries = world.admission.standing, world.entries
    await world.ask("b1", "b")
    await world.ask("b2", "b")
    await world.ask("m1", model="m", places=1)
    await world.ask("m2", model="m", places=1)
    seen = [standing(entries[name]) for name in ("b1", "b2", "m1", "m2")]
    assert seen[0] is None
    assert [(one.position, one.num_in_line, one.num_waiting) for one in seen if one] == [
        (1, 1, 3),
        (1, 2, 3),
        (2, 2, 3),
    ]
    words = [one.waits_for for one in seen if one]
    assert "of its tenant" in words[0] and "decode worker" in words[1] == words[2]
    await world.ask("long", prompt=5_000)
    await world.ask("short")
    found = standing(entries["short"])
    assert found is not None and "num_steps_ahead" in found.waits_for
    world.tickets["long"].on_tokens(1)
    await world.settle()
    await world.ask("more")
    found = standing(entries["more"])
    assert found is not None and "max_active_requests" in found.waits_for
    numbers = [(name, entry.arrival, entry.turn) for name, entry in entries.items() if entry.turn]
    assert numbers == [("b1", 1, 1), ("long", 5, 2), ("short", 6, 3)]
    await world.end("b1")
    assert standing(entries["more"]) is None and entries["more"].turn == 4
