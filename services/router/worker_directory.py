"""`WorkerDirectory`: the workers of one model that may take a request now, with their load.

It joins the registry's snapshot with what this router observes itself (open streams, calls under
way, suspicion) and keeps the result as the `WorkerLoad` values from which policies choose. A load
is computed again only where something changed: the snapshot, a stream or a call, the worker's own
report, its suspicion. Invariant: every load that is kept equals one computed afresh. It also knows
which workers are away and expected back, and which content of an adapter requests get.

No RPC. One asyncio loop.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from process.deadline import Clock
from process.rpc_errors import Internal, InvalidArgument, Unavailable
from protos import common_pb2
from services import adapter_wishes
from services.router.admission import is_expected
from services.router.circuit_breaker import Probation
from services.router.config import RouterCosts
from services.router.policies import (
    DECODE,
    PREFILL,
    PlacementQuery,
    Pools,
    WorkerLoad,
    blocks_needed,
)
from services.router.prefixes import Layout
from services.router.registry import Registry
from services.router.validation import ModelBounds
from services.router.worker_client import DecodeStreams, PrefillClient
from services.router.worker_views import (
    ServedModel,
    Snapshot,
    WorkerView,
    find_problem,
    hung_workers,
)


@dataclass(frozen=True)
class AdapterContent:
    """A LoRA adapter by name and content (hex digest); both empty: no adapter. A value."""

    name: str = ""
    digest: str = ""

    def is_on(self, worker: WorkerView) -> bool:
        """Return whether the worker has this adapter with this content loaded."""
        return not self.name or self.digest in worker.adapters.get(self.name, ())


NO_ADAPTER = AdapterContent()
_NOTHING_SEEN = Snapshot()


class WorkerDirectory:
    """Live directory of one model's workers: usable ones, expected ones, loads and adapters."""

    def __init__(
        self,
        registry: Registry,
        streams: DecodeStreams,
        prefills: PrefillClient,
        probation: Probation,
        *,
        served: ServedModel,
        costs: RouterCosts,
        return_wait_s: float = 0.0,
        max_step_s: float = math.inf,
        clock: Clock = time.monotonic,
    ) -> None:
        """Args: return_wait_s: how long a worker that is away is expected back. max_step_s: longest
        step of an engine that does not count as hung (`hung_workers`)."""
        self._registry = registry
        self._streams = streams
        self._prefills = prefills
        self._probation = probation
        self._served = served
        self._costs = costs
        self._return_wait_s = return_wait_s
        self._max_step_s = max_step_s
        self._clock = clock
        self._last_s: dict[str, dict[str, float]] = {PREFILL: {}, DECODE: {}}
        """Time when each worker last served or was starting, by role and id; older ones than
        `return_wait_s` are dropped."""
        self._adapter_last_s: dict[str, float] = {}
        """Time when each adapter could last be served, or workers that may have it were expected
        back; by name."""
        self._seen = _NOTHING_SEEN
        self._views: dict[str, WorkerView] = {}
        self._loads: dict[str, WorkerLoad] = {}
        self._pools = Pools.of((), (), costs)
        self._bounds: ModelBounds | None = None
        self._last_bounds: ModelBounds | None = None
        self._num_blocks: Mapping[str, int] = {}
        self._changed: set[str] = set()
        for source in (streams, prefills, probation):
            source.on_change.append(self._changed.add)

    def usable(self, role: str) -> list[WorkerView]:
        """Return the workers of `role` that serve this model and take new requests."""
        self._refresh()
        return [worker for worker in self._views.values() if worker.role == role]

    def bounds(self) -> ModelBounds:
        """Return the limits of a request: those of the pair with the longest context window.

        While a role has no worker and one is expected back, these are the limits from before.

        Raises: Unavailable when a role has no worker and none is expected.
        """
        self._refresh()
        if self._bounds is None:
            try:
                self._bounds = _bounds(self.usable(PREFILL), self.usable(DECODE))
            except Unavailable:
                if self._last_bounds is None or not self.are_expected():
                    raise
                return self._last_bounds
            self._last_bounds = self._bounds
        return self._bounds

    def has_decode_place(self, num_ahead: int) -> bool:
        """Return whether the decode workers have a place for a further sample, beside `num_ahead`
        places for admitted requests that have not reached a decode worker yet.

        True where a worker does not report its places, and where all are suspect: then waiting
        does not help, and placement reports the error.
        """
        self._refresh()
        loads = [load for load in self._pools.decode if not load.is_suspect]
        free = [load.num_free_places for load in loads if load.num_free_places is not None]
        return len(free) < len(loads) or not loads or sum(free) > num_ahead

    def note_seen(self) -> None:
        """Record which workers serve or start now; called after each read of the registry."""
        with contextlib.suppress(Unavailable):
            self.bounds()  # kept for when the workers are gone
        now_s = self._clock()
        for role, last_s in self._last_s.items():
            names = {*self._serving(role), *self._starting(role)}
            last_s.update(dict.fromkeys(names, now_s))
            for name in [n for n, at_s in last_s.items() if now_s - at_s >= self._return_wait_s]:
                del last_s[name]
        is_due = self.are_expected()
        known = self._loaded_adapters() | self._wished_adapters()
        for name in known if not is_due else known | self._adapter_last_s.keys():
            if is_due or name not in self._adapter_last_s or self._is_served(name):
                self._adapter_last_s[name] = now_s
        gone = [name for name in self._adapter_last_s if name not in known]
        for name in gone:
            if now_s - self._adapter_last_s[name] >= self._return_wait_s:
                del self._adapter_last_s[name]

    def expects(self, role: str) -> bool:
        """Return whether a worker of `role` is away and expected back; see `is_expected`."""
        here = self._serving(role)
        return is_expected(self._last_s[role], here, self._clock(), self._return_wait_s)

    def is_at_zero(self) -> bool:
        """Return whether Redis has been read and has no usable and no starting worker."""
        return self._registry.has_met_redis and not any(
            self.usable(role) or self._starting(role) for role in (PREFILL, DECODE)
        )

    def check_serving(self) -> None:
        """Check both roles. Raises: Unavailable naming the role of which no worker serves now."""
        for role in (PREFILL, DECODE):
            if not self._serving(role):
                raise Unavailable(f"no {role} worker serves", retry_after_s=1.0)

    def are_expected(self) -> bool:
        """Return whether a worker is expected back such that both roles then have one."""
        expected = [self.expects(role) for role in (PREFILL, DECODE)]
        roles = zip((PREFILL, DECODE), expected, strict=True)
        return any(expected) and all(is_due or self.usable(role) for role, is_due in roles)

    def adapter(self, name: str) -> AdapterContent:
        """Return the adapter with this name, in the wished content; without a wish, in the content
        that most workers have, of those that both roles have.

        Raises: InvalidArgument when the adapter is neither wished nor loaded; Unavailable when it
            is not loaded with the same content at both roles.
        """
        if not name:
            return NO_ADAPTER
        having = self._having(name)
        both = having[PREFILL].keys() & having[DECODE].keys()
        wish = self._wish(name)
        wished = adapter_wishes.digest_of(wish)
        if wished and wished in both:
            return AdapterContent(name, wished)
        if both and wish is None:
            counts = having[PREFILL] + having[DECODE]
            return AdapterContent(name, max(sorted(both), key=lambda digest: counts[digest]))
        if name in self.adapter_names():
            raise Unavailable(
                f"adapter {name[:128]!r} is not loaded with the same content on a prefill and a "
                "decode worker",
                retry_after_s=1.0,
            )
        loaded = ", ".join(sorted(self.adapter_names())) or "none"
        raise InvalidArgument("adapter", f"'{name[:128]}' is not loaded; loaded are: {loaded}")

    def adapter_names(self) -> Set[str]:
        """Return the adapter names that requests may use: the wished ones, whether or not they are
        loaded, and those without a wish that workers have, or had and are expected back."""
        own = self._loaded_adapters()
        if self.are_expected():
            own |= self._adapter_last_s.keys()
        return self._wished_adapters() | {name for name in own if self._wish(name) is None}

    def is_adapter_expected(self, name: str) -> bool:
        """Return whether the adapter may be served again soon: less than `return_wait_s` ago it
        could be served, or workers were expected back."""
        last_s = self._adapter_last_s.get(name, -math.inf)
        return self._clock() - last_s < self._return_wait_s

    def _having(self, name: str) -> Mapping[str, Counter[str]]:
        """Return the number of workers that have each content of the adapter, by role."""
        return {
            role: Counter(d for w in self.usable(role) for d in w.adapters.get(name, ()))
            for role in (PREFILL, DECODE)
        }

    def _is_served(self, name: str) -> bool:
        try:
            return bool(self.adapter(name).name)
        except (InvalidArgument, Unavailable):
            return False

    def _wish(self, name: str) -> common_pb2.AdapterWish | None:
        return self._registry.snapshot.wishes.get(name)

    def _wished_adapters(self) -> set[str]:
        return {
            name
            for name, wish in self._registry.snapshot.wishes.items()
            if wish.model in self._served.names and wish.HasField("current")
        }

    def _loaded_adapters(self) -> set[str]:
        workers = [*self.usable(PREFILL), *self.usable(DECODE)]
        return {name for worker in workers for name in worker.adapters}

    @property
    def num_blocks(self) -> Mapping[str, int]:
        """Cache size of each usable worker in blocks, by incarnation."""
        self._refresh()
        return self._num_blocks

    def layouts(self) -> set[Layout]:
        """Return the layouts of the usable prefill workers, for which prefixes are looked up."""
        self._refresh()
        return {p.layout for p in self._pools.prefill}

    def get(self, worker_id: str) -> WorkerView:
        """Return the worker as last seen. Raises: Unavailable when it is gone."""
        worker = self.find(worker_id)
        if worker is None:
            raise Unavailable(f"worker {worker_id} is gone")
        return worker

    def find(self, worker_id: str) -> WorkerView | None:
        """Return the worker as last seen, even if it takes no new requests; None: it is gone."""
        return self._registry.find(worker_id)

    def pools(
        self,
        adapter: AdapterContent = NO_ADAPTER,
        *,
        not_prefill: Collection[str] = (),
        not_decode: Collection[str] = (),
    ) -> Pools:
        """Return the workers that may serve with this adapter, without the excluded ids."""
        self._refresh()
        pools = self._pools
        if not (adapter.name or not_prefill or not_decode):
            return pools
        return replace(
            pools,
            prefill=self._filtered(pools.prefill, adapter, not_prefill),
            decode=self._filtered(pools.decode, adapter, not_decode),
        )

    def with_decode(self, pools: Pools, worker_id: str, ask: PlacementQuery) -> Pools:
        """Return `pools` for a request that has blocks reserved at a decode worker.

        That worker is the only decode worker, even if it takes no new requests, with its load from
        before the reservation. Prefill workers of other layouts are left out.

        Raises: Unavailable when it is gone.
        """
        load = self._load(self.get(worker_id))
        needed = blocks_needed(ask.num_prompt_tokens, ask.max_tokens, load.block_size)
        load = replace(
            load,
            num_requests=max(0, load.num_requests - 1),
            num_free_blocks=load.num_free_blocks + needed,
        )
        prefill = tuple(p for p in pools.prefill if p.layout == load.layout)
        return replace(pools, prefill=prefill, decode=(load,))

    def check_integrity(self) -> None:
        """Check the kept loads. Raises: Internal when one differs from a load computed now."""
        self._refresh()
        for worker_id, load in self._loads.items():
            if load != self._load(self._views[worker_id]):
                raise Internal(f"the load kept of {worker_id} is old")
        kept = {load.worker_id for load in (*self._pools.prefill, *self._pools.decode)}
        if kept != set(self._loads):
            raise Internal("the pools differ from the loads that are kept")

    def _serving(self, role: str) -> set[str]:
        """Return the ids of the usable workers with an open stream."""
        is_up = self._streams.is_up if role == DECODE else self._prefills.is_up
        return {w.worker_id for w in self.usable(role) if is_up(w.worker_id)}

    def _starting(self, role: str) -> set[str]:
        names = self._served.names
        return {
            worker.worker_id
            for worker in self._registry.snapshot.starting
            if worker.role == role and worker.model in names
        }

    def _filtered(
        self, loads: Sequence[WorkerLoad], adapter: AdapterContent, excluded: Collection[str]
    ) -> tuple[WorkerLoad, ...]:
        return tuple(
            load
            for load in loads
            if load.worker_id not in excluded and adapter.is_on(self._views[load.worker_id])
        )

    def _refresh(self) -> None:
        """Compute again the loads that changed."""
        if self._registry.snapshot is not self._seen:
            self._look_again()
        elif self._changed:
            for worker_id in self._changed & self._loads.keys():
                self._loads[worker_id] = self._load(self._views[worker_id])
            prefill, decode = self._of_roles()
            self._pools = replace(self._pools, prefill=prefill, decode=decode)
        self._changed.clear()

    def _look_again(self) -> None:
        """Take over a new snapshot of the registry."""
        self._seen = self._registry.snapshot
        hung = hung_workers(self._seen.workers, self._max_step_s)
        views = {
            worker.worker_id: worker
            for worker in self._seen.workers
            if not worker.is_draining
            and worker.worker_id not in hung
            and worker.role in (PREFILL, DECODE)
            and find_problem(worker, self._served) is None
        }
        before, self._views, self._bounds = self._views, views, None
        loads = {}
        has_same_links = views.keys() == before.keys()
        for worker_id, worker in views.items():
            old = before.get(worker_id)
            if old is None or old.incarnation != worker.incarnation:
                self._last_s[worker.role][worker_id] = self._clock()  # its stream opens next
            is_same = worker is old and worker_id not in self._changed
            loads[worker_id] = self._loads[worker_id] if is_same else self._load(worker)
            has_same_links &= old is not None and worker.links is old.links
        self._loads = loads
        self._num_blocks = {view.incarnation: view.num_blocks for view in views.values()}
        prefill, decode = self._of_roles()
        if has_same_links:
            self._pools = replace(self._pools, prefill=prefill, decode=decode)
        else:
            self._pools = Pools.of(prefill, decode, self._costs)

    def _of_roles(self) -> tuple[tuple[WorkerLoad, ...], tuple[WorkerLoad, ...]]:
        loads, views = self._loads.values(), self._views
        return (
            tuple(load for load in loads if views[load.worker_id].role == PREFILL),
            tuple(load for load in loads if views[load.worker_id].role == DECODE),
        )

    def _load(self, worker: WorkerView) -> WorkerLoad:
        name, is_decode = worker.worker_id, worker.role == DECODE
        is_down = not (self._streams if is_decode else self._prefills).is_up(name)
        now = self._streams.load(worker) if is_decode else None
        return WorkerLoad(
            worker_id=name,
            fingerprint=worker.fingerprint,
            block_size=worker.block_size,
            block_bytes=worker.block_bytes,
            num_blocks=worker.num_blocks,
            num_free_blocks=now.num_free_blocks if now else worker.num_free_blocks,
            num_requests=now.num_requests if now else worker.num_requests,
            num_queued_tokens=0 if is_decode else self._prefills.num_queued_tokens(name),
            store_node_id=worker.store_node_id,
            transport=worker.transport,
            remote_transport=worker.remote_transport,
            lender_node_id=worker.lender_node_id,
            links=worker.links,
            is_suspect=is_down or self._probation.is_suspect(name, worker.incarnation),
            incarnation=worker.incarnation,
            context_window=worker.context_window,
            num_free_places=self._streams.num_free_places(worker) if is_decode else None,
        )


def _bounds(prefill: Sequence[WorkerView], decode: Sequence[WorkerView]) -> ModelBounds:
    for role, workers in ((PREFILL, prefill), (DECODE, decode)):
        if not workers:
            raise Unavailable(f"no {role} worker is available")
    windows = [
        min(p.context_window, d.context_window)
        for p in _longest(prefill)
        for d in _longest(decode)
        if (p.fingerprint, p.block_size) == (d.fingerprint, d.block_size)
    ]
    # Without a pair no request is served anyway; placement reports it.
    window = max(windows, default=min(w.context_window for w in (*prefill, *decode)))
    return ModelBounds(window, min(worker.vocab_size for worker in (*prefill, *decode)))


def _longest(workers: Sequence[WorkerView]) -> Collection[WorkerView]:
    """Return the worker with the longest context window of each layout."""
    longest: dict[Layout, WorkerView] = {}
    for worker in workers:
        layout = (worker.fingerprint, worker.block_size)
        known = longest.get(layout)
        if known is None or worker.context_window > known.context_window:
            longest[layout] = worker
    return longest.values()
