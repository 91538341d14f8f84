"""Settings of a KV store process (`python -m kvstore`). Values only; nothing here looks at the
machine."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from kvstore.tenant_shares import TenantShares
from process import registry
from process.registry import RedisAccess
from process.settings import (
    UNIX,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SettingsError,
    check_address,
    check_host_port,
    check_ranges,
)
from process.tls import TlsSettings
from process.tracing import TracingSettings

_NODE_ID = re.compile(r"[A-Za-z0-9._-]{0,128}")


@dataclass(frozen=True)
class KvStoreSettings:
    """Settings of one KV store: where it listens, how much memory it takes for blocks, how long it
    waits."""

    listen: str = "127.0.0.1:0"
    """host:port of the control service (port 0: a free one, which the `ready` line names), or
    unix:/path."""

    advertise: str = ""
    """host:port at which workers reach this store; empty: the address that it listens on."""

    metrics_listen: str = ""
    """host:port of /metrics, usually on loopback; port 0: a free one; empty: no /metrics."""

    node_id: str = ""
    """Name of this store in the index and in provenance: letters, digits and ._- only. Empty: the
    host's name and the port."""

    capacity_bytes: NonNegativeInt = 0
    """Memory for frames. Taken when the first worker attaches and tells how large a block is. On
    huge pages rounded up to whole ones, and then all that is taken. 0: a tenth of the memory that
    is free then, 1,024 blocks at least, 131,072 blocks, 8 GiB and half of what is free in memory
    and in slab_dir at most."""

    slab_dir: str = "/dev/shm"
    """Folder of the slab's file, in memory (also huge pages: a hugetlbfs mount); workers that use
    shared memory must see it under this path, too."""

    file_tier_dir: str = ""
    """Folder on disk for a file tier under the memory; empty: none. Needs node_id, by which the
    store's next life finds its pages."""

    file_tier_bytes: PositiveInt = 4 * 1024 * 1024 * 1024
    """Room for the file tier, taken on disk when the first worker attaches."""

    demote_below_free: Annotated[float, Meta(gt=0, le=1)] = 0.1
    """Share of the frames that are kept free, or copied to the file tier so that they can come free
    at once; below it the oldest blocks are copied."""

    num_file_io_threads: PositiveInt = 4
    """Threads that read and write the file tier."""

    tenant_shares: tuple[str, ...] = ()
    """Guaranteed parts of every tier, each as "tenant=0.25", together at most 1. A tenant within
    its part never loses a block to another; all tenants not named share the rest."""

    max_lease_s: PositiveFloat = 300.0
    """Longest time for which a lease is given or renewed at once."""

    attachment_ttl_s: PositiveFloat = 60.0
    """Time without a call after which a worker counts as gone (clients send a heartbeat every few
    seconds)."""

    quarantine_grace_s: NonNegativeFloat = 30.0
    """Time for which frames stay out of use after the worker that may still write into them is
    gone."""

    sweep_interval_s: PositiveFloat = 0.25
    """Time between two sweeps that end lapsed leases and detach workers that are gone."""

    integrity_interval_s: PositiveFloat = 5.0
    """Least time between two checks of the store's invariants; one runs when something changed and
    no call is under way."""

    drain_s: NonNegativeFloat = 10.0
    """Longest time for which a stopping store still serves workers that have a lease on its blocks,
    above all for streams that have just moved to another worker; nothing new is stored meanwhile.
    """

    stop_timeout_s: NonNegativeFloat = 2.0
    """Longest time that calls under way may take to end when the process is asked to stop."""

    max_history_blocks: NonNegativeInt = 4096
    """Blocks whose last events are remembered, for `baton block` and for traces; 0: none. About
    1 KB each, 4 KB at most."""

    redis_url: str = field(default="", repr=False)
    """URL of the Redis with the prefix index and the registry; empty: this store is in no index."""

    redis: RedisAccess = field(default_factory=RedisAccess)
    """TLS and password of the Redis at `redis_url`."""

    tracing: TracingSettings = field(default_factory=TracingSettings)
    """Traces of requests that the router traces."""

    tls: TlsSettings = field(default_factory=TlsSettings)
    """Certificate that this store shows to workers and routers; empty: no TLS."""

    redis_timeout_s: PositiveFloat = 1.0
    """Longest wait for one answer of Redis."""

    heartbeat_s: PositiveFloat = 1.0
    """Time between two heartbeats of the store to Redis."""

    heartbeat_ttl_s: PositiveFloat = 3.0
    """Time for which a heartbeat in Redis counts; after that the store is taken for gone."""

    nixl_net_devices: str = "lo"
    """Network devices that NIXL (UCX) may listen on and use, as UCX_NET_DEVICES; `all` for every
    one."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if not _NODE_ID.fullmatch(self.node_id):
            raise SettingsError(
                f"node_id: letters, digits and ._- only, at most 128, got {self.node_id!r}"
            )
        if self.file_tier_dir and not self.node_id:
            raise SettingsError("node_id: needed with file_tier_dir; give the store a lasting name")
        try:
            TenantShares.parse(self.tenant_shares)
        except ValueError as error:
            raise SettingsError(f"tenant_shares: {error}") from error
        if self.heartbeat_ttl_s < 2 * self.heartbeat_s:
            raise SettingsError("heartbeat_ttl_s: must be at least twice heartbeat_s")
        check_host_port("metrics_listen", self.metrics_listen)
        self.tls.check_peers("tls")
        registry.check_redis(self.redis_url, self.redis)
        if self.advertise:
            check_address("advertise", self.advertise)
        host = self.listen.rpartition(":")[0]
        if host in ("0.0.0.0", "[::]") and not self.advertise:
            raise SettingsError(
                f"advertise: needed when listen is {self.listen}; say the host:port workers reach"
            )
        if self.listen.startswith(UNIX) and not self.node_id:
            raise SettingsError(f"node_id: needed when listen is {self.listen}")
        self.tls.check_listen("listen", self.listen, "tls")
