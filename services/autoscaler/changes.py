"""Changes: what is done about a load that is known: more workers, fewer, or one that takes the
other role. Pure rules over a case; the order among them is the plan's (see `plan.py`).
"""

from __future__ import annotations

from dataclasses import replace

from services.autoscaler import pairs
from services.autoscaler.case import Asked, Case
from services.autoscaler.decision import Decision, Direction, Flip, Reason
from services.autoscaler.signals import ByRole, Role, Traffic, Worker

_MANY = 1 << 30
"""Workers that no pool has: nothing can be spared."""

STRAINED = 1.05
"""A pool is believed to carry less by so much: what it lacks, it lacks for its latencies."""


def first_workers(case: Case, traffic: Traffic, asked: Asked) -> Decision | None:
    """There is nobody, which is allowed: until somebody waits."""
    if case.before != ByRole(0, 0):
        return None
    if not traffic.num_open and not traffic.num_arrived:
        return case.hold(Reason.IDLE, "nobody asks for anything")
    least = case.limits.least
    num_more = case.limits.max_added_workers - least.prefill - least.decode
    free = case.free_devices - case.limits.devices(least)
    if free < 0:
        return case.hold(Reason.DEVICES, "workers on their way out hold the devices")
    wanted = pairs.grown(
        least,
        asked.load.needed,
        asked.rates,
        case.limits,
        free_devices=free,
        most=max(0, num_more),
    )
    return case.to(wanted, Direction.UP, Reason.WAKE, f"{traffic.num_open} requests wait")


def no_workers(case: Case) -> Decision | None:
    """Nobody has asked for anything for long, and there may be none."""
    since_s, idle_s = case.state.idle_since_s, case.pace.idle_s
    if since_s is None or not case.limits.scales_to_zero or case.seen.now_s - since_s < idle_s:
        return None
    return case.to(ByRole(0, 0), Direction.DOWN, Reason.IDLE, f"idle_s {idle_s:g}")


def change(case: Case, asked: Asked) -> Decision:
    """There are workers, and somebody uses them."""
    pace, now_s = case.pace, case.seen.now_s
    needed = case.state.fewest(now_s, pace.up_s)
    lacking = [role for role in Role if needed.of(role) > case.before.of(role)]
    if lacking:
        return _more(case, asked, needed, lacking)
    if any(asked.load.needed.of(role) > case.before.of(role) for role in Role):
        return case.hold(Reason.WAIT_UP, f"up_s {pace.up_s:g}")
    if asked.load.rate <= asked.load.most:
        return _fewer(case, asked)
    for decision in (_moved(case, asked), _fewer(case, asked)):
        if decision is not None and decision.is_action:
            return decision
    return case.hold(Reason.BUDGET, _bound(case, asked))


def _more(case: Case, asked: Asked, needed: ByRole[int], lacking: list[Role]) -> Decision:
    is_late = asked.pressure.role is not None or any(
        case.state.strain.of(role) > STRAINED for role in lacking
    )
    reason = Reason.LATENCY if is_late else Reason.LOAD
    enough = case.state.most(case.seen.now_s, case.pace.flip_s, uncovered=_MANY)
    spared = [role for role in lacking if case.before.of(role.other) > enough.of(role.other)]
    for role in spared:
        flipped = _flip(case, role, f"{role.other.value} has more than it needs")
        if flipped is not None:
            return flipped
    free = case.free_devices
    wanted = pairs.grown(
        case.before,
        needed,
        asked.rates,
        case.limits,
        free_devices=free,
        most=case.limits.max_added_workers,
    )
    if wanted != case.before:
        cut = any(wanted.of(role) < needed.of(role) for role in lacking)
        return case.to(wanted, Direction.UP, reason, "max_added_workers or budget" if cut else "")
    leaving = [case.seen.pools.of(role).num_draining for role in Role]
    if any(leaving):
        return case.hold(Reason.DEVICES, "workers on their way out hold the devices")
    for role in spared:
        room = _room(case, role, 1)
        if room is not None:
            return room
    return _moved(case, asked) or case.hold(Reason.BUDGET, _bound(case, asked))


def _moved(case: Case, asked: Asked) -> Decision | None:
    """The same devices would serve more by more than the slack, for a while already."""
    role = case.state.helped(case.seen.now_s, case.pace.flip_s)
    if asked.helped is None or asked.helped[0] is not role:
        return None
    pair = asked.helped[1]
    flipped = _flip(case, role, "the budget serves more so")
    return flipped or _room(case, role, case.before.of(role.other) - pair.of(role.other))


def _room(case: Case, role: Role, num: int) -> Decision | None:
    """The other pool gives up `num` workers, as many as may go at once, for `role`; None: not now,
    or one can be flipped some looks later. The next look finds their devices free, when they
    are."""
    if not case.may_remove or case.num_missing(role.other) or _able(case, role):
        return None
    if case.num_on_their_way(role.other):
        return None
    num = min(num, case.limits.max_removed_workers)
    wanted = case.before.but(role.other, case.before.of(role.other) - num)
    return case.to(wanted, Direction.DOWN, Reason.BALANCE, f"room for {role.value}")


def _flip(case: Case, role: Role, binding: str) -> Decision | None:
    """One worker of the other pool takes `role`: the one with the least to do; None: not now."""
    since_s, able = case.seen.now_s - case.state.flip_at_s, _able(case, role)
    if (
        not able
        or case.seen.num_flipping
        or since_s < case.pace.flip_cooldown_s
        or case.num_missing(role.other)
    ):
        return None
    chosen = min(
        able, key=lambda w: (w.num_running + w.num_waiting, w.num_queued_tokens, w.worker_id)
    )
    decision = case.to(_flipped(case.before, role), Direction.FLIP, Reason.BALANCE, binding)
    return replace(decision, flips=(Flip(chosen.worker_id, role),))


def _able(case: Case, role: Role) -> list[Worker]:
    """Workers of the other pool that could take `role`, if not now. None while those that it must
    keep do not all serve: one that is wanted may never come."""
    limits, donor = case.limits, role.other
    if case.num_serving(donor) <= limits.least.of(donor):
        return []
    is_same = limits.prefill.num_devices == limits.decode.num_devices
    if not (is_same and limits.allows(_flipped(case.before, role))):
        return []
    return [
        worker
        for worker in case.seen.pools.of(donor).workers
        if worker.can_flip and not worker.is_draining and worker.age_s <= case.pace.stale_s
    ]


def _flipped(before: ByRole[int], role: Role) -> ByRole[int]:
    return ByRole(before.prefill - 1, before.decode - 1).but(role, before.of(role) + 1)


def _fewer(case: Case, asked: Asked) -> Decision:
    pace, now_s, before, limits = case.pace, case.seen.now_s, case.before, case.limits
    spare_now = [role for role in Role if before.of(role) > asked.load.enough.of(role)]
    if not spare_now:
        return case.hold(Reason.STEADY)
    enough = case.state.most(now_s, pace.down_s, uncovered=_MANY)
    spare = [role for role in spare_now if before.of(role) > enough.of(role)]
    if not spare:
        return case.hold(Reason.WAIT_DOWN, f"down_s {pace.down_s:g}")
    started_s = case.state.started_at_s
    starting = [role for role in spare if started_s.of(role) == now_s]  # whatever down_s is
    settled = [
        role for role in spare if role not in starting and now_s - started_s.of(role) >= pace.down_s
    ]
    if not settled:
        starts = f"a {starting[0].value} worker starts" if starting else "since a start"
        return case.hold(Reason.WAIT_DOWN, f"down_s {pace.down_s:g}, {starts}")
    spare = settled
    if not case.may_remove:
        return case.hold(Reason.WAIT_DOWN, f"down_cooldown_s {pace.down_cooldown_s:g}")
    missing = case.unreported()
    if missing:
        return case.hold(Reason.INCOMPLETE, missing)
    wanted = before
    for _ in range(limits.max_removed_workers):
        spare = [role for role in spare if wanted.of(role) > enough.of(role)]
        if not spare:
            break
        role = max(spare, key=lambda r: (wanted.of(r) / max(1, enough.of(r)), r.value))
        wanted = wanted.but(role, wanted.of(role) - 1)
    return case.to(wanted, Direction.DOWN, Reason.LOAD)


def _bound(case: Case, asked: Asked) -> str:
    """What keeps the pools from what is wished."""
    for role in Role:
        if asked.load.wished.of(role) > case.limits.of(role).max_workers == case.before.of(role):
            return f"{role.value}.max_workers {case.limits.of(role).max_workers}"
    return f"budget_devices {case.limits.budget}"
