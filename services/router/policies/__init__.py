"""The policies that a router can choose workers by, each in a module of its own; pure.

    joint         seconds until the answer could go on: queues, computing, bytes over links, load
    prefix_aware  prompt tokens to be computed, then load
    least_load    requests and tokens under way
    round_robin   whose turn it is

All of them search the pairs in one way (`search`), keep away from workers under suspicion or
without room (`penalties`), and tell what they weighed. `make` is where a setting becomes a policy.
"""

from __future__ import annotations

from services.router.config import HandoverMode, RouterCosts, RoutingPolicy
from services.router.policies.joint import Joint
from services.router.policies.least_load import LeastLoad
from services.router.policies.prefix_aware import PrefixAware
from services.router.policies.round_robin import RoundRobin
from services.router.policy import Policy


def make(name: RoutingPolicy, costs: RouterCosts, mode: HandoverMode = "auto") -> Policy:
    """The policy of that name. `mode`: which way KV goes from prefill to decode."""
    made: dict[RoutingPolicy, Policy] = {
        "joint": Joint(costs, mode),
        "prefix_aware": PrefixAware(costs, mode),
        "least_load": LeastLoad(costs, mode),
        "round_robin": RoundRobin(costs, mode),
    }
    return made[name]


__all__ = ["make"]
