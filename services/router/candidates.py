"""Which workers may take a request now, and how loaded they are: the registry joined with what this
router sees itself.

Turns views into the values that `policy` chooses from. No RPC. One asyncio loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from process.deadline import Clock
from process.errors import InvalidArgument, Unavailable
from services.router.config import RouterTimes
from services.router.decode_streams import DecodeStreams
from services.router.policy import DECODE, PREFILL, WorkerLoad
from services.router.prefill_client import PrefillClient
from services.router.prefix_runs import Layout
from services.router.registry import Registry
from services.router.sampling_checks import ModelBounds
from services.router.views import ServedModel, WorkerView, find_problem


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter by name and content (hex digest); both empty: none."""

    name: str = ""
    digest: str = ""

    def is_on(self, worker: WorkerView) -> bool:
        """Whether the worker can serve it."""
        return not self.name or worker.adapters.get(self.name) == self.digest


NO_ADAPTER = Adapter()


class Candidates:
    """See the module."""

    def __init__(
        self,
        registry: Registry,
        streams: DecodeStreams,
        prefills: PrefillClient,
        *,
        served: ServedModel,
        times: RouterTimes,
        clock: Clock,
    ) -> None:
        self._registry = registry
        self._streams = streams
        self._prefills = prefills
        self._served = served
        self._times = times
        self._clock = clock
        self._suspect_until: dict[str, float] = {}

    def usable(self, role: str) -> list[WorkerView]:
        """Workers of `role` that serve this router's model and take new requests."""
        return [
            worker
            for worker in self._registry.snapshot.workers
            if worker.role == role
            and not worker.is_draining
            and find_problem(worker, self._served) is None
        ]

    def bounds(self) -> ModelBounds:
        """What every usable worker can take, so that any pair can serve what was let in.

        Raises: Unavailable naming the role of which there is no worker.
        """
        prefill, decode = self.usable(PREFILL), self.usable(DECODE)
        for role, workers in ((PREFILL, prefill), (DECODE, decode)):
            if not workers:
                raise Unavailable(f"no {role} worker is available")
        workers = [*prefill, *decode]
        return ModelBounds(
            min(worker.context_window for worker in workers),
            min(worker.vocab_size for worker in workers),
        )

    def adapter(self, name: str) -> Adapter:
        """The adapter of this name, in the content that most workers have and both roles.

        Raises: InvalidArgument when nobody has it; Unavailable when no two workers have the same.
        """
        if not name:
            return NO_ADAPTER
        workers = {role: self.usable(role) for role in (PREFILL, DECODE)}
        having = {
            role: Counter(w.adapters[name] for w in of_role if name in w.adapters)
            for role, of_role in workers.items()
        }
        both = having[PREFILL].keys() & having[DECODE].keys()
        if both:
            counts = having[PREFILL] + having[DECODE]
            return Adapter(name, max(sorted(both), key=lambda digest: counts[digest]))
        if any(having.values()):
            raise Unavailable(
                f"adapter {name[:128]!r} is not loaded with the same content on a prefill and a "
                "decode worker",
                retry_after_s=1.0,
            )
        loaded = sorted({n for of_role in workers.values() for w in of_role for n in w.adapters})
        raise InvalidArgument(
            "adapter", f"'{name[:128]}' is not loaded; loaded are: {', '.join(loaded) or 'none'}"
        )

    def layouts(self) -> set[Layout]:
        """Of the usable prefill workers: what prefixes are looked up for."""
        return {(worker.fingerprint, worker.block_size) for worker in self.usable(PREFILL)}

    def get(self, worker_id: str) -> WorkerView:
        """The worker as last seen. Raises: Unavailable when it is gone."""
        for worker in self._registry.snapshot.workers:
            if worker.worker_id == worker_id:
                return worker
        raise Unavailable(f"worker {worker_id} is gone")

    def suspect(self, worker_id: str) -> None:
        """An RPC to it failed: for a while it is the last choice, until its heartbeat can tell."""
        now = self._clock()
        self._suspect_until = {i: until for i, until in self._suspect_until.items() if until > now}
        self._suspect_until[worker_id] = now + self._times.suspect_s

    def prefill(
        self, excluded: Collection[str] = (), adapter: Adapter = NO_ADAPTER
    ) -> Sequence[WorkerLoad]:
        """Prefill workers to choose from."""
        return [
            self._load(worker, worker.num_free_blocks, worker.num_requests)
            for worker in self.usable(PREFILL)
            if worker.worker_id not in excluded and adapter.is_on(worker)
        ]

    def decode(
        self, excluded: Collection[str] = (), adapter: Adapter = NO_ADAPTER
    ) -> Sequence[WorkerLoad]:
        """Decode workers to choose from."""
        return [
            self._decode_load(worker)
            for worker in self.usable(DECODE)
            if worker.worker_id not in excluded and adapter.is_on(worker)
        ]

    def decode_now(self, worker_id: str) -> WorkerLoad:
        """A decode worker that is chosen already, whether or not it takes new requests.

        Raises: Unavailable when it is gone.
        """
        return self._decode_load(self.get(worker_id))

    def _decode_load(self, worker: WorkerView) -> WorkerLoad:
        # An idle worker sends no news, and the last may be from before a cancel took effect: then
        # its heartbeat knows better.
        num_legs = self._streams.num_legs(worker.worker_id)
        step = self._streams.load(worker.worker_id) if num_legs else None
        num_free = step.num_free_blocks if step else worker.num_free_blocks
        num_requests = step.num_requests if step else worker.num_requests
        # Our own legs are known before any account of them can arrive.
        return self._load(worker, num_free, max(num_requests, num_legs))

    def _load(self, worker: WorkerView, num_free_blocks: int, num_requests: int) -> WorkerLoad:
        is_down = worker.role == DECODE and not self._streams.is_up(worker.worker_id)
        return WorkerLoad(
            worker_id=worker.worker_id,
            fingerprint=worker.fingerprint,
            block_size=worker.block_size,
            block_bytes=worker.block_bytes,
            num_blocks=worker.num_blocks,
            num_free_blocks=num_free_blocks,
            num_requests=num_requests,
            num_queued_tokens=self._prefills.num_queued_tokens(worker.worker_id),
            store_node_id=worker.store_node_id,
            transport=worker.transport,
            remote_transport=worker.remote_transport,
            lender_node_id=worker.lender_node_id,
            links=worker.links,
            is_suspect=is_down or self._suspect_until.get(worker.worker_id, 0.0) > self._clock(),
        )
