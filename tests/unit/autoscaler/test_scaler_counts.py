"""Counting and removing, whoever starts the workers: nobody is counted twice, and just as many go
as shall go."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from services.autoscaler import scaler
from services.autoscaler.scaler import Unit, UnitState
from services.autoscaler.signals import Role

roles = st.sampled_from(Role)


@st.composite
def scenes(draw: st.DrawFn) -> tuple[list[Unit], dict[Role, int], dict[str, Role]]:
    """Workers of both homes, some flipped, some leaving, some not there yet."""
    units = [
        Unit(f"w{index}", draw(roles), draw(st.sampled_from(UnitState)))
        for index in range(draw(st.integers(0, 8)))
    ]
    there = Counter(unit.home for unit in units if unit.state is not UnitState.LEAVING)
    asked = {role: there[role] + draw(st.integers(0, 2)) for role in Role}
    flipped = {unit.worker_id: draw(roles) for unit in units if draw(st.booleans())}
    return units, asked, flipped


@given(scenes())
def test_every_worker_is_in_one_pool(
    scene: tuple[list[Unit], dict[Role, int], dict[str, Role]],
) -> None:
    units, asked, flipped = scene
    pools = scaler.count(units, asked, flipped)
    assert pools.prefill.wanted + pools.decode.wanted == sum(asked.values())
    num_leaving = sum(unit.state is UnitState.LEAVING for unit in units)
    assert pools.prefill.num_leaving + pools.decode.num_leaving == num_leaving
    for role in Role:
        ready = [
            unit
            for unit in units
            if unit.state is UnitState.READY and flipped.get(unit.worker_id, unit.home) is role
        ]
        assert pools.of(role).ready == len(ready) <= pools.of(role).wanted


@given(scenes(), roles, st.data())
def test_as_many_go_as_shall_go_and_the_pool_is_as_asked(
    scene: tuple[list[Unit], dict[Role, int], dict[str, Role]], role: Role, data: st.DataObject
) -> None:
    units, asked, flipped = scene
    before = scaler.count(units, asked, flipped).of(role).wanted
    num_fewer = data.draw(st.integers(0, before))
    order = data.draw(st.permutations([unit.worker_id for unit in units]))
    gone = scaler.removal(
        role, num_fewer, units=units, asked=asked, roles=flipped, leave_first=order
    )
    assert sum(gone.homes.values()) == num_fewer
    assert len(gone.worker_ids) == len(set(gone.worker_ids)) <= num_fewer
    left = [unit for unit in units if unit.worker_id not in gone.worker_ids]
    asked_then = {home: asked[home] - gone.homes.get(home, 0) for home in Role}
    assert min(asked_then.values()) >= 0
    after = scaler.count(left, asked_then, flipped)
    assert after.of(role).wanted == before - num_fewer
    assert after.of(role.other) == scaler.count(units, asked, flipped).of(role.other)
    # Nobody who serves goes while somebody stays who does not.
    by_id = {unit.worker_id: unit for unit in units}
    served = [w for w in gone.worker_ids if by_id[w].state is UnitState.READY]
    idle = [
        unit
        for unit in left
        if unit.state is UnitState.STARTING and flipped.get(unit.worker_id, unit.home) is role
    ]
    assert not (served and idle)
    assert served == sorted(served, key=order.index)
