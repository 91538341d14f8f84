"""Pairs (prefill, decode) of worker counts: which are allowed, which of them serves most, and where
one worker should go. Pure arithmetic over limits and rates; no time, no history.
"""

from __future__ import annotations

from services.autoscaler.limits import ScaleLimits
from services.autoscaler.rates import Rates
from services.autoscaler.signals import ByRole, Role

_PART_OF_RATE = 1e-9
"""Rates that differ by less are equal."""


def count(limits: ScaleLimits) -> tuple[int, int]:
    """Pairs within the limits of both pools, and those of them that the budget allows."""
    num_decode = limits.decode.max_workers - limits.least.decode + 1
    num_affordable = sum(
        max(0, _most_decode(num, limits) - limits.least.decode + 1) for num in _prefills(limits)
    )
    return len(_prefills(limits)) * num_decode, num_affordable


def most_carried(rates: Rates, limits: ScaleLimits) -> float:
    """Requests a second that the best pair within limits and budget carries."""
    return max(
        rates.carried(ByRole(num, _most_decode(num, limits)))
        for num in _prefills(limits)
        if _most_decode(num, limits) >= limits.least.decode
    )


def allowed(pair: ByRole[int], rates: Rates, limits: ScaleLimits) -> ByRole[int]:
    """`pair`, or if a limit forbids it the next one to it; never more of one role and fewer of the
    other at once: what is too much goes first."""
    least = limits.least

    def raised(some: ByRole[int]) -> ByRole[int]:
        return some.map(lambda role, num: max(num, least.of(role)))

    capped = pair.map(lambda role, num: min(num, limits.of(role).max_workers))
    if limits.devices(raised(capped)) > limits.budget:
        # A pool below its minimum must find room, too.
        return max(
            (
                some
                for num_prefill in range(min(capped.prefill, least.prefill), capped.prefill + 1)
                for num_decode in range(min(capped.decode, least.decode), capped.decode + 1)
                if limits.devices(raised(some := ByRole(num_prefill, num_decode))) <= limits.budget
            ),
            key=lambda some: (rates.carried(some), limits.devices(some), some.prefill),
        )
    return capped if capped != pair else raised(pair)


def broken(pair: ByRole[int], limits: ScaleLimits) -> str:
    """The limit that `pair` breaks, for the record; one of them."""
    for role in Role:
        of_role = limits.of(role)
        if pair.of(role) > of_role.max_workers:
            return f"{role.value}.max_workers {of_role.max_workers}"
        if pair.of(role) < limits.least.of(role):
            return f"{role.value}.min_workers {of_role.min_workers}"
    return f"budget_devices {limits.budget}"


def grown(
    before: ByRole[int],
    needed: ByRole[int],
    rates: Rates,
    limits: ScaleLimits,
    *,
    free_devices: int,
    most: int,
) -> ByRole[int]:
    """`before` with at most `most` workers more, towards `needed`, as far as devices are free: each
    one where it lets most requests through."""
    pair = before
    for _ in range(most):
        fits = [
            role
            for role in Role
            if pair.of(role) < min(needed.of(role), limits.of(role).max_workers)
            and limits.of(role).num_devices <= free_devices
        ]
        if not fits:
            break
        role = min(fits, key=lambda role: (rates.of(role, pair.of(role)), role.value))
        pair = pair.but(role, pair.of(role) + 1)
        free_devices -= limits.of(role).num_devices
    return pair


def shrunk(before: ByRole[int], towards: ByRole[int], rates: Rates, *, most: int) -> ByRole[int]:
    """`before` with at most `most` workers fewer, towards `towards`: each one where what is left
    carries most."""
    pair = before
    for _ in range(most):
        fewer = [
            pair.but(role, pair.of(role) - 1) for role in Role if pair.of(role) > towards.of(role)
        ]
        if not fewer:
            break
        pair = max(fewer, key=lambda some: (rates.carried(some), some.prefill))
    return pair


def helped_by_move(
    before: ByRole[int], rates: Rates, limits: ScaleLimits, *, slack: float
) -> tuple[Role, ByRole[int]] | None:
    """The pool that holds the other up, and the pair in which it has one worker more and the other
    as many fewer as that takes, if that pair carries more by more than `slack`; else None."""
    role = min(Role, key=lambda role: (rates.of(role, before.of(role)), role.value))
    donor, pair = role.other, before.but(role, before.of(role) + 1)
    if pair.of(role) > limits.of(role).max_workers:
        return None
    while limits.devices(pair) > limits.budget and pair.of(donor) > limits.least.of(donor):
        pair = pair.but(donor, pair.of(donor) - 1)
    if not limits.allows(pair) or pair.of(donor) == before.of(donor):
        return None
    gains = rates.carried(pair) > rates.carried(before) * (1 + slack) * (1 + _PART_OF_RATE)
    return (role, pair) if gains else None


def _prefills(limits: ScaleLimits) -> range:
    return range(limits.least.prefill, limits.prefill.max_workers + 1)


def _most_decode(num_prefill: int, limits: ScaleLimits) -> int:
    left = limits.budget - num_prefill * limits.prefill.num_devices
    return min(limits.decode.max_workers, left // limits.decode.num_devices)
