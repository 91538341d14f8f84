"""A cluster that is killed, paused, cut off, lied to and spoiled while it serves: every stream is
exact, no wrong byte is used, nothing leaks, each loss is counted under its reason.

    make chaos                              the long form: all clusters, some minutes each
    BATON_TEST_SEED=<seed> make chaos       the same prompts, actions and pauses again
    pytest tests/chaos --log-cli-level=INFO shows each round as it ends
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.chaos import actions
from tests.chaos.arena import Arena, Round, Shape
from tests.conftest import LONG, SESSION_SEED

logger = logging.getLogger(__name__)

pytestmark = [pytest.mark.e2e, pytest.mark.chaos, pytest.mark.timeout(2300 if LONG else 240)]

NUM_ROUNDS = 40 if LONG else 1
NUM_STREAMS = 8 if LONG else 6

# A store that holds about two of a round's prompts.
_SMALL = ("store.capacity_bytes=4000000",)
_REMOTE_NIXL = ('worker.remote_transport="nixl"',)
SHAPES = (
    Shape("shm"),
    Shape("shm small store", overrides=_SMALL, is_roomy=False),
    Shape("nixl", transport="nixl"),
    Shape("grpc", transport="grpc"),
    Shape("grpc small store", transport="grpc", overrides=_SMALL, is_roomy=False),
    Shape("shm two stores", num_stores=2),
    Shape("nixl two stores", transport="nixl", num_stores=2, overrides=_REMOTE_NIXL),
    Shape("shm files", file_tier_bytes=16_000_000, overrides=_SMALL, is_roomy=False),
    Shape(
        "grpc two stores files",
        transport="grpc",
        num_stores=2,
        file_tier_bytes=2_000_000,
        overrides=_SMALL,
        is_roomy=False,
    ),
    Shape("shm short leases", overrides=("worker.limits.lease_ttl_s=0.3",)),
    Shape("direct", handover="direct"),
    Shape(
        "nixl direct small store",
        overrides=(*_REMOTE_NIXL, *_SMALL),
        handover="direct",
        is_roomy=False,
    ),
)


def _shapes() -> list[Shape]:
    """The long run has all, the short one the one that the seed draws."""
    return list(SHAPES) if LONG else [SHAPES[SESSION_SEED % len(SHAPES)]]


@pytest.fixture(scope="module", params=_shapes(), ids=lambda shape: shape.name)
def arena(request: pytest.FixtureRequest) -> Iterator[Arena]:
    shape = request.param
    with Arena(shape, f"{SESSION_SEED}-{shape.name}").running() as running:
        yield running


def _schedule(arena: Arena, num_rounds: int) -> list[list[actions.Draw]]:
    """Which actions each round has: every one comes before any comes twice; sometimes two meet."""
    rng = arena.rng
    schedule: list[list[actions.Draw]] = []
    deck: list[actions.Draw] = []
    for _ in range(num_rounds):
        together = []
        for _ in range(rng.choice((1, 1, 2))):
            if not deck:
                deck = list(actions.for_shape(arena))
                rng.shuffle(deck)
            if together and not actions.ALONE.isdisjoint([*together, deck[-1]]):
                break
            together.append(deck.pop())
        schedule.append(together)
    return schedule


async def test_a_cluster_under_attack_is_exact(arena: Arena, seed: int) -> None:
    log: list[str] = []
    schedule: list[list[actions.Draw]] = [[], *_schedule(arena, NUM_ROUNDS), []]
    try:
        for number, draws in enumerate(schedule):
            drawn = [draw(arena, arena.rng) for draw in draws]
            action = drawn[0] if len(drawn) == 1 else actions.together(drawn)
            made = Round(f"round {number}", arena.plan(NUM_STREAMS))
            log.append(f"round {number}: {action.name or 'nothing is done'}")
            await _play(arena, made, action)
            log[-1] += f"; {len(made.completed)} exact; {actions.count(made.reasons)}"
            logger.info(log[-1])
    except BaseException as error:
        error.add_note(f"replay with BATON_TEST_SEED={seed}\n" + "\n".join(log))
        raise
    await _check_that_the_shape_was_met(arena)


async def _play(arena: Arena, made: Round, action: actions.Action) -> None:
    await arena.run(made, action.disturb)
    await arena.settle(made)
    arena.check(made, may_cause=action.may_cause)
    assert action.seen is None or await action.seen(made), f"{action.name}: it left no trace"
    if action.mend is not None:
        await action.mend(made)
    if action.lasts:
        arena.tolerated |= action.may_cause


async def _check_that_the_shape_was_met(arena: Arena) -> None:
    """A store too small must have evicted or refused, a file tier have been written, a direct
    handover have gone directly: else the cluster was not what it was meant to be."""
    stores = [await arena.own_status(name) for name in arena.stores]
    if not arena.shape.is_roomy:
        assert arena.counted["no_room"] or sum(store.num_evictions for store in stores) > 0
    if arena.shape.handover == "direct":
        assert arena.num_tokens_direct > 0
    if arena.shape.file_tier_bytes:
        assert sum(store.num_pages_used for store in stores) > 0
