"""What a local cluster consists of: from a `ClusterConfig` to command lines. Pure, starts nothing.

The command lines are the same that a pod runs: `python -m services.prefill --set ...`. Which keys
exist is each component's own business; a wrong one is refused by the component, by name.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.errors import ClusterError

DEFAULT_PORT = 8500
DRAIN_S = 3
"""How long a stopping part lets requests finish: less than the supervisor waits for it."""
TRANSPORTS = ("shm", "nixl", "grpc")
HANDOVERS = ("auto", "store", "direct")
_DEVICE = re.compile(r"cpu|cuda(:\d{1,4})?")
_MEMORY_SHARE = 0.9
"""Of a GPU's memory, for all of its workers together: one worker's default."""
_OF_ONE_STORE = ("store.node_id", "store.listen", "store.advertise")
# Who a `--set` goes to, by the first part of its key.
_GROUPS = {
    "store": ("store",),
    "router": ("router",),
    "prefill": ("prefill",),
    "decode": ("decode",),
    "worker": ("prefill", "decode"),
}


@dataclass(frozen=True)
class ClusterConfig:
    """A cluster on this machine."""

    model: str = "baton-5m"
    """Bundled name, folder or Hugging Face hub name."""
    num_prefill: int = 1
    """Prefill workers."""
    num_decode: int = 1
    """Decode workers."""
    transport: str = "shm"
    """How KV blocks travel between workers and store: shm, nixl or grpc."""
    device: str = "cpu"
    """Where the workers compute and keep their KV: cpu, cuda (the first GPU) or cuda:N; several
    with commas are dealt to the workers in turn, prefill workers first."""
    handover: str = "auto"
    """How a prompt's KV gets from prefill to decode: store, direct (out of the prefill worker's own
    cache) or auto, whichever costs less."""
    num_stores: int = 1
    """KV stores; workers are dealt to them in turn, as if each were a machine of its own."""
    port: int = DEFAULT_PORT
    """The router's port on loopback; 0 takes a free one."""
    redis_url: str = ""
    """A Redis to use; empty starts one of our own without persistence."""
    overrides: tuple[str, ...] = ()
    """Settings of components: `worker.key=value`, also prefill, decode, store, router."""
    log_dir: str = ""
    """Where the children's logs go; empty: a temporary folder that a clean stop removes."""

    def __post_init__(self) -> None:
        for name, value, least in (
            ("prefill", self.num_prefill, 1),
            ("decode", self.num_decode, 1),
            ("stores", self.num_stores, 1),
            ("port", self.port, 0),
        ):
            if value < least:
                raise ClusterError(f"--{name} {value}: must be at least {least}")
        if self.port > 65535:
            raise ClusterError(f"--port {self.port}: must be at most 65535")
        if self.transport not in TRANSPORTS:
            raise ClusterError(
                f"--transport {self.transport}: choose one of {', '.join(TRANSPORTS)}"
            )
        if self.handover not in HANDOVERS:
            raise ClusterError(f"--handover {self.handover}: choose one of {', '.join(HANDOVERS)}")
        for device in self.devices:
            if not _DEVICE.fullmatch(device):
                raise ClusterError(
                    f"--device {self.device}: {device!r} is none of cpu, cuda, cuda:N; several are "
                    "separated by commas"
                )
        if self.transport == "nixl" and set(self.devices) != {"cpu"}:
            raise ClusterError(
                f"--transport nixl: between a GPU ({self.device}) and a store on this machine it "
                "moves blocks 100 times below the bus; use shm"
            )
        if self.num_stores > self.num_prefill + self.num_decode:
            raise ClusterError(
                f"--stores {self.num_stores}: at most one for each worker, which are "
                f"{self.num_prefill + self.num_decode}; give more with --prefill or --decode"
            )
        for override in self.overrides:
            _check_override(override)
            if self.num_stores > 1 and override.partition("=")[0].strip() in _OF_ONE_STORE:
                raise ClusterError(
                    f"--set {override}: {self.num_stores} stores cannot share it; use --stores 1"
                )

    @property
    def devices(self) -> tuple[str, ...]:
        """The names in `device`."""
        return tuple(name.strip() for name in self.device.split(","))


@dataclass(frozen=True)
class ProcessSpec:
    """How to start one process of the cluster."""

    name: str
    kind: str
    """redis, store, prefill, decode or router."""
    argv: tuple[str, ...]


def redis(server: Path, socket: Path) -> ProcessSpec:
    """A Redis that keeps nothing on disk and is reached by a socket file that only we may open."""
    options = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "save": "",
        "appendonly": "no",
        "dir": str(socket.parent),
        "daemonize": "no",
        "loglevel": "notice",
    }
    argv = [sys.executable, "-P", "-m", "baton.with_parent", str(server)]
    for key, value in options.items():
        argv += [f"--{key}", value]
    return ProcessSpec("redis", "redis", tuple(argv))


def stores(
    config: ClusterConfig, *, redis_url: str, listen: str, slab_dir: str, capacity_bytes: int
) -> list[ProcessSpec]:
    """The KV stores, named by their node ids; the slab of each, of `capacity_bytes`, lies in
    `slab_dir`.
    """
    return [
        _python(
            config,
            name,
            "store",
            "kvstore",
            {
                "node_id": name,
                "redis_url": redis_url,
                "listen": listen,
                "slab_dir": slab_dir,
                "capacity_bytes": str(capacity_bytes),
            },
        )
        for name in store_names(config.num_stores)
    ]


def store_names(num_stores: int) -> list[str]:
    """One is "store", of several each has its number."""
    return ["store"] if num_stores == 1 else [f"store-{index}" for index in range(num_stores)]


def workers(
    config: ClusterConfig,
    *,
    redis_url: str,
    store_addresses: Sequence[str],
    handle_keys_file: str,
) -> list[ProcessSpec]:
    """All prefill and decode workers, dealt to the stores and devices in turn. They share the
    cores: one thread each when there are few.
    """
    num_workers = config.num_prefill + config.num_decode
    num_threads = max(1, len(os.sched_getaffinity(0)) // num_workers)
    names = [("prefill", index) for index in range(config.num_prefill)]
    names += [("decode", index) for index in range(config.num_decode)]
    return [
        _python(
            config,
            f"{role}-{index}",
            role,
            f"services.{role}",
            {
                "worker_id": f"{role}-{index}",
                "listen": "127.0.0.1:0",
                "redis_url": redis_url,
                "store_address": store_addresses[place % len(store_addresses)],
                "transport": config.transport,
                "remote_transport": "nixl" if config.transport == "nixl" else "grpc",
                "handle_keys_file": handle_keys_file,
                "engine.model": config.model,
                "engine.device": config.devices[place % len(config.devices)],
                "limits.drain_s": str(DRAIN_S),
                "engine.num_threads": str(num_threads),
                **_memory_share(config, place, num_workers),
            },
        )
        for place, (role, index) in enumerate(names)
    ]


def _memory_share(config: ClusterConfig, place: int, num_workers: int) -> dict[str, float]:
    """Workers that are dealt the same GPU share its memory; an override has the last word."""
    num_devices = len(config.devices)
    num_sharing = sum(other % num_devices == place % num_devices for other in range(num_workers))
    if num_sharing == 1 or config.devices[place % num_devices] == "cpu":
        return {}
    return {"engine.memory_share": _MEMORY_SHARE / num_sharing}


def router(config: ClusterConfig, *, redis_url: str, listen: str) -> ProcessSpec:
    """The router."""
    return _python(
        config,
        "router",
        "router",
        "services.router",
        {
            "listen": listen,
            "redis_url": redis_url,
            "model": config.model,
            "handover": config.handover,
            "times.drain_s": str(DRAIN_S),
        },
    )


def _python(
    config: ClusterConfig, name: str, kind: str, module: str, settings: dict[str, str | float]
) -> ProcessSpec:
    argv = [sys.executable, "-P", "-m", module]  # never import from the current folder
    # The user's own come last and win.
    for override in [f"{key}={quoted(value)}" for key, value in settings.items()] + [
        override.partition(".")[2]
        for override in config.overrides
        if kind in _GROUPS[override.partition(".")[0]]
    ]:
        argv += ["--set", override]
    return ProcessSpec(name, kind, tuple(argv))


def quoted(value: str | float) -> str:
    """A value as the settings loader reads it: numbers bare, all else a TOML string."""
    if isinstance(value, float):
        return f"{value:g}"
    if value.isdecimal():
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _check_override(override: str) -> None:
    group, dot, rest = override.partition(".")
    if group not in _GROUPS:
        near = difflib.get_close_matches(group, _GROUPS, n=1, cutoff=0.0)[0]
        raise ClusterError(
            f"--set {override}: unknown component '{group}', nearest is '{near}' "
            f"(there are {', '.join(_GROUPS)})"
        )
    if not dot or "=" not in rest:
        raise ClusterError(f"--set {override}: write it as {group}.key=value")
