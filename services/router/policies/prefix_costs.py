"""What a prompt's prefix is worth at a prefill worker: how much of it need not be computed, from
where it comes, and what that takes. Pure; made for one request, and remembered for all workers that
have the same stores at the same distance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from services.router import handover
from services.router.config import RouterCosts
from services.router.policies.penalties import parts
from services.router.policy import Ask, Pools, WorkerLoad
from services.router.prefix_runs import Run, plan_runs


@dataclass(frozen=True)
class Prefix:
    """At one worker."""

    runs: tuple[Run, ...]
    num_computed: int
    """Prompt tokens left to compute."""
    link: int
    """Cost of what its own store has, in parts."""
    pull: int
    """Cost of what other stores have."""
    num_pulled: int
    """Prompt tokens that other stores have."""


class PrefixCosts:
    """See the module."""

    def __init__(self, ask: Ask, costs: RouterCosts, pools: Pools) -> None:
        self._ask = ask
        self._costs = costs
        self._pools = pools
        self._known: dict[object, Prefix] = {}

    def of(self, p: WorkerLoad) -> Prefix:
        """At `p`."""
        num_local = self._ask.local.get(p.incarnation, 0) if self._ask.local else 0
        slow = self._pools.slow.get(p.worker_id) if self._pools.slow else None
        key = (p.place, num_local, tuple(sorted(slow.items())) if slow else None)
        prefix = self._known.get(key)
        if prefix is None:
            prefix = self._known[key] = self._reckon(p, num_local)
        return prefix

    def _reckon(self, p: WorkerLoad, num_local: int) -> Prefix:
        # The last prompt token is always computed: its logits are what the first draw needs.
        num_cacheable = self._ask.num_prompt_tokens - 1
        links, runs = self._pools.links, self._runs(p)
        done = 0
        link_s = pull_s = 0.0
        num_pulled = 0
        for run in runs:
            end = min(num_cacheable, (run.first_block + run.num_blocks) * p.block_size)
            # What lies in its own cache is not fetched.
            num_tokens = max(0, end - max(done, num_local))
            done = max(done, end)
            seconds = links.move_s(p, run.node_id, handover.num_bytes_of(num_tokens, p))
            if run.node_id == p.store_node_id:
                link_s += seconds
            else:
                pull_s += seconds
                num_pulled += num_tokens
        done = max(done, min(num_local, num_cacheable))
        num_computed = self._ask.num_prompt_tokens - done
        return Prefix(runs, num_computed, parts(link_s), parts(pull_s), num_pulled)

    def _runs(self, p: WorkerLoad) -> tuple[Run, ...]:
        """What `p` should take from which store."""
        held = self._ask.prefixes.of(p.layout)
        if not held:
            return ()
        compute_s = p.block_size / self._costs.prefill_tokens_per_s
        links = self._pools.links

        def distance(node_id: str) -> float:
            if not handover.can_read(p, node_id):
                return math.inf
            link, block_s = p.links.get(node_id), links.move_s(p, node_id, p.block_bytes)
            # Only a link known to be bad is left out: the rate of computing is a guess.
            if link is not None and link.is_degraded:
                is_worth_it = link.read_bytes_per_s > 0 and block_s < compute_s
                return block_s if is_worth_it else math.inf
            return block_s

        return plan_runs(held, p.store_node_id, distance)
