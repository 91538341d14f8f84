"""WorkerSettings: the settings of a prefill or decode worker. Frozen values, loaded by
`process.settings`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from engine.config import EngineConfig
from process import registry
from process.registry import RedisAccess
from process.settings import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SettingsError,
    check_host_port,
    check_ranges,
)
from process.tls import TlsSettings
from process.tracing import TracingSettings

TRANSPORTS = ("shm", "nixl", "grpc")
REMOTE_TRANSPORTS = ("nixl", "grpc", "")
DIRECT_TRANSPORTS = ("cuda_ipc", "nixl", "grpc", "")


@dataclass(frozen=True)
class WorkerLimits:
    """Bounds of one worker. Each wait that has no tighter one has one of these."""

    max_waiting_requests: PositiveInt = 256
    """Requests that may wait for room or for their first token; the next one is refused with a
    retry time.
    """

    default_budget_s: PositiveFloat = 300.0
    """Time of a request that names none."""

    max_budget_s: PositiveFloat = 3600.0
    """Most time that a request gets; the router's bound."""

    lease_ttl_s: PositiveFloat = 30.0
    """Most that a lease on a handed-over prompt outlives the last word about it."""

    transfer_budget_s: PositiveFloat = 5.0
    """Time for fetching one request's blocks; after it they are recomputed."""

    put_budget_s: PositiveFloat = 5.0
    """Time for storing one batch of blocks; after it the handle covers what was stored before."""

    put_yield_s: NonNegativeFloat = 0.05
    """How long the last blocks of a prompt that is lent wait to be stored, for decode to read them
    first: it answers to a client, and nothing waits for the store. Guessed: ten times what that
    takes."""

    fetch_batch_bytes: PositiveInt = 64 * 1024 * 1024
    """A prefill worker fetches a prefix from a store in batches of so many bytes; what came before
    the time ran out is used. Guessed: far above what a call costs."""

    link_budget_s: PositiveFloat = 2.0
    """Time of the second measurement of the way to a store, after a first that was late: the first
    transfer also makes connections, and a starting machine is busy."""

    attach_budget_s: NonNegativeFloat = 3.0
    """Time of one attempt to attach to the store."""

    ping_budget_s: PositiveFloat = 1.0
    """Time for a store, or a worker that lends, to say that it is there, after a call that failed.
    Later than that a store of this node counts as stalled, and any other one's client is over."""

    store_wait_s: NonNegativeFloat = 5.0
    """How long a starting worker waits for its store before it serves without."""

    drain_s: NonNegativeFloat = 10.0
    """How long a stopping worker, or one that changes its role, lets requests finish or move
    elsewhere, and waits for workers that read its blocks."""

    stop_grace_s: NonNegativeFloat = 1.0
    """How long a stopping worker lets streams that are open bring their last messages."""

    step_timeout_s: NonNegativeFloat = 120.0
    """A step of the engine that takes longer has failed: its device does not answer, and the worker
    ends. Far above the longest step, compilations included, and below a request's budget, so that
    there is time left to go on elsewhere. 0: never.
    """

    write_back: bool = True
    """Whether a decode worker stores the blocks that it fills, so that the next turn of a
    conversation finds them.
    """

    replicate_after_hits: NonNegativeInt = 0
    """Matches that a block of another node's store must have had before a copy is written to the
    home store too. 0: always copied.
    """

    lend_blocks: bool = True
    """Whether a prefill worker lends its own blocks to decode workers, where a request's handover
    is direct. False, or where the engine preempts: it hands over through the store, and says so.
    """

    max_remote_stores: PositiveInt = 16
    """Other nodes' stores that a worker keeps attached at once; the idlest one makes room. An empty
    remote_transport pulls from none."""

    def __post_init__(self) -> None:
        if self.max_remote_stores == 0:
            raise SettingsError(
                "max_remote_stores: must be at least 1; an empty remote_transport pulls from none"
            )
        check_ranges(self)


@dataclass(frozen=True)
class WorkerSettings:
    """Settings of one worker."""

    listen: str = "127.0.0.1:0"
    """host:port of its gRPC server (port 0: a free one), or unix:/path."""

    advertised: str = ""
    """Address at which routers reach this worker; empty: the address that it listens on."""

    worker_id: str = ""
    """Unique among the workers of a deployment; empty: the role and a random part."""

    redis_url: str = field(default="redis://127.0.0.1:6379/0", repr=False)
    """Where workers register; empty: this worker registers nowhere."""

    redis: RedisAccess = field(default_factory=RedisAccess)
    """TLS and password of that Redis."""

    tls: TlsSettings = field(default_factory=TlsSettings)
    """Certificate that this worker shows to routers, stores and other workers; empty: no TLS."""

    store_address: str = ""
    """host:port or unix:/path of its KV store; empty: none, and it computes everything itself."""

    transport: str = "shm"
    """How block bytes move between worker and store: "shm", "nixl" or "grpc".

    Never changed in silence.
    """

    remote_transport: str = "grpc"
    """How blocks are pulled from other nodes' stores: "nixl" or "grpc".

    Empty: they are never pulled; what only another node holds is computed again.
    """

    direct_transport: str = ""
    """How blocks are pulled out of the cache of a prefill worker that lends them: "cuda_ipc",
    "nixl" or "grpc".

    "cuda_ipc" maps that worker's whole cache into this process: both on one host, on GPUs that
    reach each other, and it with lend_mapped. Empty: as remote_transport says.
    """

    lend_mapped: bool = False
    """Whether decode workers of this host may map this worker's whole cache (direct_transport
    "cuda_ipc"), once they have attached.

    A mapping lets them read, and write, all of it, whichever tenant's, as long as they live. Only
    where the workers of a host trust each other.
    """

    link_floor_bytes_per_s: NonNegativeFloat = 0.0
    """Measured rate below which the link to a store is called degraded. 0: no floor, only the
    comparison with a copy in memory.
    """

    nixl_net_devices: str = "lo"
    """NIXL only: network devices UCX may use, by name."""

    handle_keys_file: str = ""
    """File of the keys that sign and verify handles, made by `baton keys new FILE`; the same for
    all workers of a deployment. Needed with a store: there is no unsigned mode.
    """

    metrics_listen: str = ""
    """host:port of /metrics, usually on loopback; port 0: a free one; empty: no /metrics."""

    step_log: str = ""
    """Folder for a log of every step, and of what delayed it, written when the worker ends; empty:
    none. For finding out why a step was late.
    """

    adapters: tuple[str, ...] = ()
    """LoRA adapters loaded at start, each as "name=folder". More may be loaded at run time."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    """The model and its device."""

    limits: WorkerLimits = field(default_factory=WorkerLimits)
    """Bounds."""

    tracing: TracingSettings = field(default_factory=TracingSettings)
    """Traces of requests that the router traces."""

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise SettingsError(f"transport: {self.transport!r} is none of {', '.join(TRANSPORTS)}")
        if self.remote_transport not in REMOTE_TRANSPORTS:
            raise SettingsError(
                f"remote_transport: {self.remote_transport!r} is none of nixl, grpc and ''"
            )
        if self.direct_transport not in DIRECT_TRANSPORTS:
            raise SettingsError(
                f"direct_transport: {self.direct_transport!r} is none of cuda_ipc, nixl, grpc and "
                "''"
            )
        if self.direct_transport and not self.remote_transport:
            raise SettingsError(
                "direct_transport: needs remote_transport, for a worker that pulls no blocks from "
                "elsewhere pulls none from other workers"
            )
        check_ranges(self)
        self.tls.check_peers("tls")
        self.tls.check_listen("listen", self.listen, "tls")
        registry.check_redis(self.redis_url, self.redis)
        if self.store_address and not self.handle_keys_file:
            raise SettingsError(
                "handle_keys_file: is needed with store_address, for handles are signed; "
                "`baton keys new FILE` makes one"
            )
        check_host_port("metrics_listen", self.metrics_listen)
        names = [name for name, _ in adapter_folders(self)]
        if len(set(names)) < len(names):
            raise SettingsError(f"adapters: a name twice in {names}")
        if self.engine.model in names:
            raise SettingsError(
                f"adapters: {self.engine.model!r} is the served model's name; choose another"
            )


def adapter_folders(settings: WorkerSettings) -> list[tuple[str, Path]]:
    """(name, folder) of the adapters that are loaded at start. Raises: SettingsError."""
    pairs = []
    for entry in settings.adapters:
        name, _, folder = entry.partition("=")
        if not (name and folder):
            raise SettingsError(f"adapters: {entry!r} is not name=folder")
        pairs.append((name, Path(folder)))
    return pairs
