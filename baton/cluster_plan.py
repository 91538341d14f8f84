"""What a local cluster consists of: from a `ClusterConfig` to command lines. Pure, starts nothing.

The command lines are the same that a pod runs: `python -m services.prefill --set ...`. Which keys
exist is each component's own business; a wrong one is refused by the component, by name.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.errors import ClusterError
from baton.secured import OPEN, Secured
from process.access import Role
from process.settings import SettingsError
from process.tracing import TracingSettings

DEFAULT_PORT = 8500
DRAIN_S = 3
"""How long a stopping part lets requests finish: less than the supervisor waits for it."""
STORE_DRAIN_S = 1
"""How long a stopping store serves its leases. A cluster's end comes to it last, when nobody reads
any more, but leases of those that were killed may be left."""
HOLD_S = 120.0
"""How long the router of an autoscaled cluster keeps requests until the first workers serve."""
AUTOSCALE_INTERVAL_S = 2.0
"""Processes start faster than pods, so it looks more often than the autoscaler's default."""
TRANSPORTS = ("shm", "nixl", "grpc")
DIRECT_TRANSPORTS = ("cuda_ipc", "nixl", "grpc")
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
    "autoscaler": ("autoscaler",),
}


Setting = str | float | bool | tuple[str, ...]
"""A value on a part's command line."""


@dataclass(frozen=True)
class ClusterConfig:
    """A cluster on this machine."""

    model: str = "baton-5m"
    """Bundled name, folder or Hugging Face hub name."""
    more_models: tuple[str, ...] = ()
    """Models served beside `model`, by workers of their own."""
    num_prefill: int = 1
    """Prefill workers of each model."""
    num_decode: int = 1
    """Decode workers of each model."""
    transport: str = "shm"
    """How KV blocks travel between workers and store: shm, nixl or grpc."""
    device: str = "cpu"
    """Where the workers compute and keep their KV: cpu, cuda (the first GPU) or cuda:N; several
    with commas are dealt to the workers in turn, prefill workers first."""
    handover: str = "auto"
    """How a prompt's KV gets from prefill to decode: store, direct (out of the prefill worker's own
    cache) or auto, whichever costs less."""
    direct_transport: str = ""
    """How blocks are read out of a prefill worker's own cache: cuda_ipc (mapped, between GPUs of
    this machine), nixl or grpc; empty: as between workers and other nodes' stores."""
    num_stores: int = 1
    """KV stores of each model, whose blocks no other model's fit; its workers are dealt to them in
    turn, as if each were a machine of its own."""
    port: int = DEFAULT_PORT
    """The router's port on loopback; 0 takes a free one."""
    http_port: int | None = None
    """Of its HTTP API; None: the one after `port`, or a free one if that is 0."""
    redis_url: str = ""
    """A Redis to use; empty starts one of our own without persistence."""
    overrides: tuple[str, ...] = ()
    """Settings of components: `worker.key=value`, also prefill, decode, store, router."""
    tls: bool = False
    """Whether all parts speak TLS, each with a certificate that says what it may call."""
    api_keys: bool = False
    """Whether the router serves only who has an API key."""
    metrics: bool = False
    """Whether each part serves /metrics on a port of its own, and a Prometheus configuration is
    written that finds them."""
    trace_to: str = ""
    """host:port of an OpenTelemetry collector (OTLP over gRPC) that gets the traces of requests;
    empty: nobody traces."""
    trace_ratio: float = 1.0
    """Share of the requests that are traced."""
    autoscale: bool = False
    """Whether workers are started and stopped as load comes and goes; `num_prefill` and
    `num_decode` are those it begins with."""
    num_prefill_min: int = 1
    """Fewest prefill workers, with `autoscale`; 0, for decode as well: none when nobody asks."""
    num_prefill_max: int = 4
    """Most prefill workers, with `autoscale`."""
    num_decode_min: int = 1
    """Fewest decode workers, with `autoscale`."""
    num_decode_max: int = 4
    """Most decode workers, with `autoscale`."""
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
        if self.autoscale:
            self._check_autoscale()
        if self.port > 65535:
            raise ClusterError(f"--port {self.port}: must be at most 65535")
        if not 0 <= self.http_listen_port <= 65535:
            raise ClusterError(f"--http-port {self.http_listen_port}: must be from 0 to 65535")
        if self.http_listen_port == self.port != 0:
            raise ClusterError(f"--http-port {self.port}: is --port as well")
        try:
            TracingSettings(endpoint=self.trace_to, sample_ratio=self.trace_ratio)
        except SettingsError as error:
            raise ClusterError(
                f"--trace-to {self.trace_to}, --trace-ratio {self.trace_ratio}: {error}"
            ) from error
        if self.transport not in TRANSPORTS:
            raise ClusterError(
                f"--transport {self.transport}: choose one of {', '.join(TRANSPORTS)}"
            )
        if self.handover not in HANDOVERS:
            raise ClusterError(f"--handover {self.handover}: choose one of {', '.join(HANDOVERS)}")
        if self.direct_transport not in ("", *DIRECT_TRANSPORTS):
            raise ClusterError(
                f"--direct-transport {self.direct_transport}: choose one of "
                f"{', '.join(DIRECT_TRANSPORTS)}"
            )
        if self.direct_transport == "cuda_ipc" and "cpu" in self.devices:
            raise ClusterError(
                f"--direct-transport cuda_ipc: only GPUs map one another's memory, and --device is "
                f"{self.device}"
            )
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
        if len(set(self.models)) < len(self.models):
            raise ClusterError(f"--model {', '.join(self.models)}: each model once")
        num_sharing = self.num_prefill + self.num_decode
        if self.num_stores > num_sharing:
            raise ClusterError(
                f"--stores {self.num_stores}: at most one for each worker, which are "
                f"{num_sharing}; give more with --prefill or --decode"
            )
        for override in self.overrides:
            _check_override(override)
            if self.num_all_stores > 1 and override.partition("=")[0].strip() in _OF_ONE_STORE:
                raise ClusterError(
                    f"--set {override}: {self.num_all_stores} stores cannot share it; use one "
                    "--model and --stores 1"
                )

    def _check_autoscale(self) -> None:
        if self.more_models:
            raise ClusterError("--autoscale: goes with one --model")
        for role, least, first, most in (
            ("prefill", self.num_prefill_min, self.num_prefill, self.num_prefill_max),
            ("decode", self.num_decode_min, self.num_decode, self.num_decode_max),
        ):
            if not 0 <= least <= most or most < 1:
                raise ClusterError(
                    f"--min-{role} {least} --max-{role} {most}: give 0 or more, and a maximum that "
                    "is not less"
                )
            if not least <= first <= most:
                raise ClusterError(
                    f"--{role} {first}: with --autoscale from --min-{role} ({least}) to "
                    f"--max-{role} ({most})"
                )

    @property
    def models(self) -> tuple[str, ...]:
        """All that are served."""
        return self.model, *self.more_models

    @property
    def num_prefill_places(self) -> int:
        """Prefill workers that a model may have; decode workers are dealt out behind them."""
        return self.num_prefill_max if self.autoscale else self.num_prefill

    @property
    def num_workers(self) -> int:
        """Prefill and decode workers that all models may have."""
        num_decode = self.num_decode_max if self.autoscale else self.num_decode
        return (self.num_prefill_places + num_decode) * len(self.models)

    @property
    def num_all_stores(self) -> int:
        """KV stores of all models."""
        return self.num_stores * len(self.models)

    @property
    def http_listen_port(self) -> int:
        """0: a free one."""
        if self.http_port is not None:
            return self.http_port
        return self.port + 1 if self.port else 0

    @property
    def devices(self) -> tuple[str, ...]:
        """The names in `device`."""
        return tuple(name.strip() for name in self.device.split(","))


@dataclass(frozen=True)
class ProcessSpec:
    """How to start one process of the cluster."""

    name: str
    kind: str
    """redis, store, prefill, decode, router or autoscaler."""
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
    config: ClusterConfig,
    *,
    redis_url: str,
    listen: str,
    slab_dir: str,
    capacity_bytes: int,
    secured: Secured = OPEN,
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
                "drain_s": str(STORE_DRAIN_S),
                **secured.settings_of(Role.KVSTORE),
                **_metrics(config),
                **_tracing(config),
            },
        )
        for name in store_names(config.num_all_stores)
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
    secured: Secured = OPEN,
) -> list[ProcessSpec]:
    """All prefill and decode workers, dealt to the stores and devices in turn."""
    parts = WorkerSpec(redis_url, tuple(store_addresses), handle_keys_file, secured)
    if config.autoscale:
        counts = (("prefill", config.num_prefill), ("decode", config.num_decode))
        return [
            numbered_worker(config, role, index, parts)
            for role, count in counts
            for index in range(count)
        ]
    return [
        _worker(config, role, index, model, store, place, parts)
        for place, (role, index, model, store) in enumerate(_placed(config))
    ]


def numbered_worker(config: ClusterConfig, role: str, index: int, parts: WorkerSpec) -> ProcessSpec:
    """A worker of the only model, with the number `index` of its role; its place depends on that
    alone, whichever others there are."""
    place = index if role == "prefill" else config.num_prefill_places + index
    return _worker(config, role, index, config.model, place % config.num_stores, place, parts)


@dataclass(frozen=True)
class WorkerSpec:
    """What workers are told of the other parts."""

    redis_url: str
    store_addresses: tuple[str, ...]
    handle_keys_file: str
    secured: Secured


def _worker(
    config: ClusterConfig,
    role: str,
    index: int,
    model: str,
    store: int,
    place: int,
    parts: WorkerSpec,
) -> ProcessSpec:
    """They share the cores: one thread each when there are few."""
    num_threads = max(1, len(os.sched_getaffinity(0)) // config.num_workers)
    return _python(
        config,
        f"{role}-{index}",
        role,
        f"services.{role}",
        {
            "worker_id": f"{role}-{index}",
            "listen": "127.0.0.1:0",
            "redis_url": parts.redis_url,
            "store_address": parts.store_addresses[store],
            "transport": config.transport,
            "remote_transport": "nixl" if config.transport == "nixl" else "grpc",
            "handle_keys_file": parts.handle_keys_file,
            "engine.model": model,
            "engine.device": config.devices[place % len(config.devices)],
            "limits.drain_s": str(DRAIN_S),
            "engine.num_threads": str(num_threads),
            **_memory_share(config, place, config.num_workers),
            **parts.secured.settings_of(Role(role)),
            **_direct(config, role),
            **_metrics(config),
            **_tracing(config),
        },
    )


def _placed(config: ClusterConfig) -> Iterator[tuple[str, int, str, int]]:
    """Role, number, model and number of its store, of each worker: prefill workers first. Numbers
    go on from model to model."""
    for role, count, before in (
        ("prefill", config.num_prefill, 0),
        ("decode", config.num_decode, config.num_prefill),
    ):
        for number, model in enumerate(config.models):
            for index in range(count):
                store = number * config.num_stores + (before + index) % config.num_stores
                yield role, number * count + index, model, store


def _direct(config: ClusterConfig, role: str) -> dict[str, str | bool]:
    """All workers of this cluster are one user's, so who asks for mappings trusts them."""
    if not config.direct_transport:
        return {}
    is_mapped = role == "prefill" and config.direct_transport == "cuda_ipc"
    return {"direct_transport": config.direct_transport, "lend_mapped": is_mapped}


def _metrics(config: ClusterConfig) -> dict[str, str]:
    return {"metrics_listen": "127.0.0.1:0"} if config.metrics else {}


def _tracing(config: ClusterConfig) -> dict[str, str | float]:
    """The router decides who is traced; the others follow it."""
    if not config.trace_to:
        return {}
    return {"tracing.endpoint": config.trace_to, "tracing.sample_ratio": config.trace_ratio}


def _memory_share(config: ClusterConfig, place: int, num_workers: int) -> dict[str, float]:
    """Workers that are dealt the same GPU share its memory; an override has the last word."""
    num_devices = len(config.devices)
    num_sharing = sum(other % num_devices == place % num_devices for other in range(num_workers))
    if num_sharing == 1 or config.devices[place % num_devices] == "cpu":
        return {}
    return {"engine.memory_share": _MEMORY_SHARE / num_sharing}


def router(
    config: ClusterConfig, *, redis_url: str, listen: str, secured: Secured = OPEN
) -> ProcessSpec:
    """The router."""
    return _python(
        config,
        "router",
        "router",
        "services.router",
        {
            "listen": listen,
            "http_listen": f"127.0.0.1:{config.http_listen_port}",
            "redis_url": redis_url,
            "model": config.model,
            **({"models": config.more_models} if config.more_models else {}),
            **({"hold_without_workers_s": HOLD_S} if config.autoscale else {}),
            "handover": config.handover,
            "times.drain_s": str(DRAIN_S),
            **secured.settings_of(Role.ROUTER),
            **_metrics(config),
            **_tracing(config),
        },
    )


def autoscaler(
    config: ClusterConfig, *, redis_url: str, scale_address: str, secured: Secured = OPEN
) -> ProcessSpec:
    """The autoscaler; `scale_address` is where it has workers started and stopped."""
    return _python(
        config,
        "autoscaler",
        "autoscaler",
        "services.autoscaler",
        {
            "autoscaler_id": "autoscaler",
            "listen": "127.0.0.1:0",
            "redis_url": redis_url,
            "scaler": "local",
            "local_address": scale_address,
            "interval_s": AUTOSCALE_INTERVAL_S,
            "plan.limits.prefill.min_workers": str(config.num_prefill_min),
            "plan.limits.prefill.max_workers": str(config.num_prefill_max),
            "plan.limits.decode.min_workers": str(config.num_decode_min),
            "plan.limits.decode.max_workers": str(config.num_decode_max),
            **secured.settings_of(Role.AUTOSCALER),
            **_metrics(config),
        },
    )


def _python(
    config: ClusterConfig,
    name: str,
    kind: str,
    module: str,
    settings: Mapping[str, Setting],
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


def quoted(value: Setting) -> str:
    """A value as the settings loader reads it: numbers and truths bare, all else a TOML string, or
    a list of them."""
    if isinstance(value, tuple):
        return f"[{', '.join(quoted(each) for each in value)}]"
    if isinstance(value, bool):
        return str(value).lower()
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
