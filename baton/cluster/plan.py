"""What a local cluster consists of: from a `ClusterConfig` to command lines, and whether the parts
take their settings. Starts no part.

The command lines are the same that a pod runs: `python -m services.prefill --set ...`. Which keys
exist is each component's own business; a wrong one is refused by the component, by name. No part of
a secret is in a command line, which all users of a machine can read: only the file that holds it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from baton.cert_set import CertSet
from baton.cluster.config import ClusterConfig
from baton.errors import ClusterError
from process.access import PeerRole

DRAIN_S = 3
"""How long a stopping part lets requests finish, unless `--set` says otherwise."""
STORE_DRAIN_S = 1
"""How long a stopping store serves its leases. A cluster's end comes to it last, when nobody reads
any more, but leases of those that were killed may be left."""
MAX_STEP_S = 30.0
"""For so long a part may be silent, as long as the router lets a step of an engine take
(`times.max_step_s`), unless `--set` says otherwise."""
HOLD_S = 120.0
"""How long the router of a cluster that may have no worker keeps requests until the first serve."""
AUTOSCALE_INTERVAL_S = 2.0
"""Processes start faster than pods, so it looks more often than the autoscaler's default."""
_MEMORY_SHARE = 0.9
"""Of a GPU's memory, for all of its workers together: one worker's default."""
_DRAFT_PART = 0.25
"""What is left for a draft worker on a GPU, in shares of the others there: it loads before them.
Guessed: far above a small model and its KV (`draft_kv_bytes`), which are not known here."""


_DRAIN_KEYS = ("drain_s", "limits.drain_s", "times.drain_s")
"""Of a store, a worker and a router."""

Setting = str | float | bool | tuple[str, ...]
"""A value on a part's command line."""


@dataclass(frozen=True)
class Secured:
    """What protects a local cluster, as settings of its parts. Empty: nothing does."""

    certs: CertSet | None = None
    """For TLS to clients and between all parts but Redis; None: none."""
    api_keys_file: str = ""
    """Keys that the router asks clients for."""
    redis_user: str = ""
    redis_password_file: str = ""

    def settings_of(self, role: PeerRole) -> dict[str, str | float]:
        """The settings of a part of that role."""
        values: dict[str, str | float] = {}
        if self.certs is not None:
            values |= _files("tls", self.certs, role) | {"tls.ca_file": str(self.certs.ca_file)}
        if self.redis_password_file:
            values |= {"redis.password_file": self.redis_password_file}
            values |= {"redis.user": self.redis_user} if self.redis_user else {}
        if role is PeerRole.ROUTER:
            values |= _files("client_tls", self.certs, role) if self.certs is not None else {}
            values |= {"api_keys_file": self.api_keys_file} if self.api_keys_file else {}
        return values


OPEN = Secured()


def _files(group: str, certs: CertSet, role: PeerRole) -> dict[str, str | float]:
    return {
        f"{group}.cert_file": str(certs.cert_file(role)),
        f"{group}.key_file": str(certs.key_file(role)),
    }


def take_password(redis_url: str, file: Path) -> tuple[str, str]:
    """Write the password in a Redis URL into `file`, for our eyes only.

    Returns: the URL without user and password, and the user; an URL without a password comes back
    as it is, and nothing is written.
    """
    parts = urlsplit(redis_url)
    if not parts.password:
        return redis_url, ""
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as out:
        out.write(unquote(parts.password))
    bare = parts._replace(netloc=parts.netloc.rpartition("@")[2])
    return urlunsplit(bare), unquote(parts.username or "")


@dataclass(frozen=True)
class ProcessSpec:
    """How to start one process of the cluster."""

    name: str
    kind: str
    """redis, store, draft, prefill, decode, router or autoscaler."""
    argv: tuple[str, ...]
    drain_s: float = 0.0
    """How long it lets requests finish when it is told to end."""
    socket: str = ""
    """Redis' socket file."""


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
    argv = [sys.executable, "-P", "-m", "baton.cluster.with_parent", str(server)]
    for key, value in options.items():
        argv += [f"--{key}", value]
    return ProcessSpec("redis", "redis", tuple(argv), socket=str(socket))


def socket_address(folder: Path, name: str) -> str:
    """Where the part of that name listens: a Unix socket in a folder that only this user may open,
    so that no other user of the machine can call it."""
    return f"unix:{folder / name}.sock"


def stores(
    config: ClusterConfig,
    *,
    redis_url: str,
    sockets: Path,
    slab_dir: str,
    secured: Secured = OPEN,
) -> list[ProcessSpec]:
    """The KV stores, named by their node ids. They listen in the folder `sockets`; the slab of
    each lies in `slab_dir`.
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
                "listen": socket_address(sockets, name),
                "slab_dir": slab_dir,
                "drain_s": str(STORE_DRAIN_S),
                **secured.settings_of(PeerRole.KVSTORE),
                **_metrics(config),
                **_tracing(config),
            },
        )
        for name in store_names(config.num_all_stores)
    ]


def in_turn(
    config: ClusterConfig, workers: Sequence[ProcessSpec], router: ProcessSpec
) -> list[list[ProcessSpec]]:
    """What is started together, and then when that is ready. The workers come first where the model
    may be scaled to zero: a router that sees none would take it for that, and itself for ready."""
    return [[*workers], [router]] if config.may_scale_to_zero else [[*workers, router]]


def store_names(num_stores: int) -> list[str]:
    """One is "store", of several each has its number."""
    return ["store"] if num_stores == 1 else [f"store-{index}" for index in range(num_stores)]


def workers(config: ClusterConfig, parts: WorkerSpec) -> list[ProcessSpec]:
    """All prefill and decode workers, dealt to the stores and devices in turn."""
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
    sockets: Path
    """The folder in which they listen."""
    secured: Secured = OPEN
    draft_addresses: tuple[str, ...] = ()


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
    name = f"{role}-{index}"
    return _python(
        config,
        name,
        role,
        f"services.{role}",
        {
            "worker_id": name,
            "listen": socket_address(parts.sockets, name),
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
            **parts.secured.settings_of(PeerRole(role)),
            **_direct(config, role),
            **_drafts(config, role, parts),
            **_metrics(config),
            **_tracing(config),
        },
    )


def _drafts(config: ClusterConfig, role: str, parts: WorkerSpec) -> dict[str, tuple[str, ...]]:
    """Only decode workers have anything guessed; an autoscaler makes some of prefill workers."""
    if not parts.draft_addresses or (role != "decode" and not config.autoscale):
        return {}
    return {"engine.speculation.draft_workers": parts.draft_addresses}


def drafts(config: ClusterConfig, *, sockets: Path, secured: Secured = OPEN) -> list[ProcessSpec]:
    """The draft workers, dealt to the devices behind all others."""
    return [
        _python(
            config,
            name,
            "draft",
            "services.draft",
            {
                "worker_id": name,
                "listen": socket_address(sockets, name),
                "engine.model": config.draft_model,
                "engine.device": config.devices[_draft_place(config, index)],
                "engine.num_threads": "1",
                **secured.settings_of(PeerRole.DRAFT),
                **_metrics(config),
            },
        )
        for index, name in enumerate(f"draft-{number}" for number in range(config.num_draft))
    ]


def _draft_place(config: ClusterConfig, index: int) -> int:
    """The number of a draft worker's device."""
    return (config.num_workers + index) % len(config.devices)


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
    """Workers that are dealt the same GPU share its memory, draft workers with a smaller part; an
    override has the last word."""
    device = place % len(config.devices)
    num_sharing = sum(other % len(config.devices) == device for other in range(num_workers))
    num_drafts = sum(_draft_place(config, index) == device for index in range(config.num_draft))
    num_shares = num_sharing + _DRAFT_PART * num_drafts
    if num_shares == 1 or config.devices[device] == "cpu":
        return {}
    return {"engine.memory_share": _MEMORY_SHARE / num_shares}


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
            **({"hold_without_workers_s": HOLD_S} if config.may_scale_to_zero else {}),
            "handover": config.handover,
            "times.drain_s": str(DRAIN_S),
            "times.max_step_s": MAX_STEP_S,
            **secured.settings_of(PeerRole.ROUTER),
            **_metrics(config),
            **_tracing(config),
        },
    )


def autoscaler(
    config: ClusterConfig,
    *,
    redis_url: str,
    sockets: Path,
    scale_address: str,
    secured: Secured = OPEN,
) -> ProcessSpec:
    """The autoscaler; `scale_address` is where it has workers started and stopped."""
    return _python(
        config,
        "autoscaler",
        "autoscaler",
        "services.autoscaler",
        {
            "autoscaler_id": "autoscaler",
            "listen": socket_address(sockets, "autoscaler"),
            "redis_url": redis_url,
            "scaler": "local",
            "local_address": scale_address,
            "interval_s": AUTOSCALE_INTERVAL_S,
            "plan.limits.prefill.min_workers": str(config.num_prefill_min),
            "plan.limits.prefill.max_workers": str(config.num_prefill_max),
            "plan.limits.decode.min_workers": str(config.num_decode_min),
            "plan.limits.decode.max_workers": str(config.num_decode_max),
            **secured.settings_of(PeerRole.AUTOSCALER),
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
    ours = (f"{key}={quoted(value)}" for key, value in settings.items())
    given = (*ours, *config.overrides_of(kind))
    for override in given:
        argv += ["--set", override]
    return ProcessSpec(name, kind, tuple(argv), _seconds(given, _DRAIN_KEYS, 0.0))


def max_silence_s(config: ClusterConfig) -> float:
    """A part whose loop has not turned for so long is started again."""
    return _seconds(config.overrides_of("router"), ("times.max_step_s",), MAX_STEP_S)


def _seconds(overrides: Sequence[str], keys: Sequence[str], otherwise: float) -> float:
    """The last that these say; the part itself refuses what is no number."""
    found = otherwise
    for override in overrides:
        key, _, value = override.partition("=")
        if key.strip() in keys:
            with contextlib.suppress(ValueError):
                found = float(value)
    return found


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


_CHECK_TIMEOUT_S = 60.0
_REDIS = "unix:///run/redis.sock"
_LISTEN = "127.0.0.1:0"
_FOLDER = Path("/run")


def check_settings(config: ClusterConfig) -> None:
    """Check the `--set` settings before any part starts: only a part knows which keys it has, so
    each kind of part with a setting of the user's is asked by its own command line and `--check`.
    Addresses and folders that exist only later are placeholders. Without `--set` nothing is run.

    Blocking; any thread. Raises: ClusterError with the words of the part that refuses.
    """
    if not config.overrides:
        return
    specs = [spec for spec in _one_of_each_kind(config) if config.overrides_of(spec.kind)]
    environment = {**os.environ, "BATON_PARENT_PID": str(os.getpid())}
    checks = [
        subprocess.Popen(
            [*spec.argv, "--check"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for spec in specs
    ]
    refused = ""
    try:
        for spec, process in zip(specs, checks, strict=True):
            _, said = process.communicate(timeout=_CHECK_TIMEOUT_S)
            if process.returncode and not refused:
                lines = said.strip().splitlines() or [f"exit code {process.returncode}"]
                refused = f"--set: {spec.kind}: {lines[-1].partition(': ')[2] or lines[-1]}"
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"settings were not checked within {_CHECK_TIMEOUT_S:g} s") from error
    finally:
        for process in checks:
            process.kill()
            process.communicate()
    if refused:
        raise ClusterError(refused)


def _one_of_each_kind(config: ClusterConfig) -> list[ProcessSpec]:
    """Of every kind that a `--set` may name, whether or not this cluster has such a part."""
    secured = Secured(
        CertSet(_FOLDER / "tls") if config.tls else None,
        str(_FOLDER / "api_keys.toml") if config.api_keys else "",
    )
    store, *_ = stores(
        config,
        redis_url=_REDIS,
        sockets=_FOLDER,
        slab_dir=str(_FOLDER),
        secured=secured,
    )
    store_addresses = ("127.0.0.1:1",) * config.num_all_stores
    parts = WorkerSpec(_REDIS, store_addresses, "/run/keys", _FOLDER, secured)
    with_draft = dataclasses.replace(config, more_models=(), num_stores=1, num_draft=1)
    return [
        store,
        router(config, redis_url=_REDIS, listen=_LISTEN, secured=secured),
        numbered_worker(config, "prefill", 0, parts),
        numbered_worker(config, "decode", 0, parts),
        *drafts(with_draft, sockets=_FOLDER, secured=secured),
        autoscaler(
            config,
            redis_url=_REDIS,
            sockets=_FOLDER,
            scale_address="unix:///run/scale.sock",
            secured=secured,
        ),
    ]
