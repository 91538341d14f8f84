"""The processes of a local cluster: from a `ClusterConfig` to command lines.

The command lines are those of pods: `python -m services.prefill --set ...`. Each component checks
its own settings; `check_settings` lets the components do so before a start. A command line is
readable for all users of a machine, so it has no secrets, only the names of files with secrets.
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
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit, urlunsplit

from baton.cluster.config import ClusterConfig
from baton.errors import ClusterError
from process.authorization import PeerRole

if TYPE_CHECKING:
    from baton.development_certificates import CertSet  # cryptography takes a while to import

DRAIN_S = 3
"""Time for which a stopping part lets requests end, unless `--set` changes it."""
STORE_DRAIN_S = 1
"""Time for which a stopping store serves its leases. Stores stop last, when no worker reads, but
killed workers may have left leases."""
MAX_STEP_S = 30.0
"""Longest time that a part may show no sign of life: as long as a step of an engine may take
(`times.max_step_s` of the router), unless `--set` changes it."""
HOLD_S = 120.0
"""Time for which the router of a cluster that may scale to zero holds requests until a worker
serves."""
AUTOSCALE_INTERVAL_S = 2.0
"""Time between two decisions of a local cluster's autoscaler: shorter than its default, since
processes start faster than pods."""
_MEMORY_SHARE = 0.9
"""Share of a GPU's memory for all its workers together: the default of one worker."""
_DRAFT_PART = 0.25
"""The part of a draft worker on a GPU, where another worker counts 1.0. An estimate: far more than
a small model and its KV (`draft_kv_bytes`), which are not known here."""

_DRAIN_KEYS = ("drain_s", "limits.drain_s", "times.drain_s")
"""The keys of a store, a worker and a router."""
Setting = str | float | bool | tuple[str, ...]
"""The value of a setting, as it is written on a command line."""


@dataclass(frozen=True)
class Secured:
    """The security of a local cluster, as settings of its parts; by default there is none."""

    certs: CertSet | None = None
    """Certificates for TLS to clients and between all parts except Redis; None: no TLS."""
    api_keys_file: str = ""
    """File with the API keys of clients; empty: the router asks for none."""
    redis_user: str = ""
    redis_password_file: str = ""

    def settings_of(self, role: PeerRole) -> dict[str, str | float]:
        """The TLS and key settings of a part of this role."""
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
    """Write the password of a Redis URL into `file`, which only this user may read.

    Returns: the URL without user and password, and the user. A URL without a password is returned
    unchanged, and no file is written.
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
    """The command line, name and time limits of one process of the cluster."""

    name: str
    kind: str
    """Kind of the process: redis, store, draft, prefill, decode, router or autoscaler."""
    argv: tuple[str, ...]
    drain_s: float = 0.0
    """Time for which the process lets requests end after SIGTERM."""
    socket: str = ""
    """Path of the socket file of a Redis."""


def redis(server: Path, socket: Path) -> ProcessSpec:
    """Plan a Redis without persistence, at a socket file that only this user may open."""
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
    argv = [sys.executable, "-P", "-m", "baton.cluster.end_with_parent", str(server)]
    for key, value in options.items():
        argv += [f"--{key}", value]
    return ProcessSpec("redis", "redis", tuple(argv), socket=str(socket))


def socket_address(folder: Path, name: str) -> str:
    """The address of the part of this name: a Unix socket in a folder that only this user may open,
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
    """Plan the KV stores, named by their node ids. Their sockets are in the folder `sockets`, their
    slabs in `slab_dir`."""
    return [
        _python(
            config,
            secured,
            PeerRole.KVSTORE,
            name,
            {
                "node_id": name,
                "redis_url": redis_url,
                "listen": socket_address(sockets, name),
                "slab_dir": slab_dir,
                "drain_s": str(STORE_DRAIN_S),
            },
        )
        for name in store_names(config.num_all_stores)
    ]


def in_turn(
    config: ClusterConfig, workers: Sequence[ProcessSpec], router: ProcessSpec
) -> list[list[ProcessSpec]]:
    """Group processes for the start: each group is started when the one before is ready. The
    workers come first where the model may scale to zero: a router without workers would report
    itself ready."""
    return [[*workers], [router]] if config.may_scale_to_zero else [[*workers, router]]


def store_names(num_stores: int) -> list[str]:
    """The names of a cluster's stores: one is "store"; several are "store-0", "store-1", and so
    on."""
    return ["store"] if num_stores == 1 else [f"store-{index}" for index in range(num_stores)]


def workers(config: ClusterConfig, parts: WorkerSpec) -> list[ProcessSpec]:
    """Plan all prefill and decode workers, assigned to the stores and devices in turn."""
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
    """Plan worker number `index` of a role, in a cluster with one model. Its store and device
    depend on the number alone, not on the other workers."""
    place = index if role == "prefill" else config.num_prefill_places + index
    return _worker(config, role, index, config.model, place % config.num_stores, place, parts)


@dataclass(frozen=True)
class WorkerSpec:
    """The addresses and folders of other parts that a worker's command line names."""

    redis_url: str
    store_addresses: tuple[str, ...]
    handle_keys_file: str
    sockets: Path
    """Folder of the workers' sockets."""
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
    """The workers share the cores: with few cores each has one thread."""
    num_threads = max(1, len(os.sched_getaffinity(0)) // config.num_workers)
    name = f"{role}-{index}"
    return _python(
        config,
        parts.secured,
        PeerRole(role),
        name,
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
            **_direct(config, role),
            **_drafts(config, role, parts),
        },
    )


def _drafts(config: ClusterConfig, role: str, parts: WorkerSpec) -> dict[str, tuple[str, ...]]:
    """Only decode workers use draft workers; an autoscaler may turn prefill workers into them."""
    if not parts.draft_addresses or (role != "decode" and not config.autoscale):
        return {}
    return {"engine.speculation.draft_workers": parts.draft_addresses}


def drafts(config: ClusterConfig, *, sockets: Path, secured: Secured = OPEN) -> list[ProcessSpec]:
    """Plan the draft workers, assigned to the devices after all other workers."""
    return [
        _python(
            config,
            secured,
            PeerRole.DRAFT,
            name,
            {
                "worker_id": name,
                "listen": socket_address(sockets, name),
                "engine.model": config.draft_model,
                "engine.device": config.devices[_draft_place(config, index)],
                "engine.num_threads": "1",
            },
        )
        for index, name in enumerate(f"draft-{number}" for number in range(config.num_draft))
    ]


def _draft_place(config: ClusterConfig, index: int) -> int:
    """The index of a draft worker's device."""
    return (config.num_workers + index) % len(config.devices)


def _placed(config: ClusterConfig) -> Iterator[tuple[str, int, str, int]]:
    """PeerRole, index, model and index of the store of each worker, prefill workers first. Indices
    continue from model to model."""
    for role, count, before in (
        ("prefill", config.num_prefill, 0),
        ("decode", config.num_decode, config.num_prefill),
    ):
        for number, model in enumerate(config.models):
            for index in range(count):
                store = number * config.num_stores + (before + index) % config.num_stores
                yield role, number * count + index, model, store


def _direct(config: ClusterConfig, role: str) -> dict[str, str | bool]:
    """Workers may map each other's memory: all of them belong to one user."""
    if not config.direct_transport:
        return {}
    is_mapped = role == "prefill" and config.direct_transport == "cuda_ipc"
    return {"direct_transport": config.direct_transport, "lend_mapped": is_mapped}


def _memory_share(config: ClusterConfig, place: int, num_workers: int) -> dict[str, float]:
    """Workers on the same GPU share its memory, draft workers with a smaller part. A user's
    override wins."""
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
    """Plan the router."""
    return _python(
        config,
        secured,
        PeerRole.ROUTER,
        "router",
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
    """Plan the autoscaler; it starts and stops workers by the service at `scale_address`."""
    return _python(
        config,
        secured,
        PeerRole.AUTOSCALER,
        "autoscaler",
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
        },
    )


def _python(
    config: ClusterConfig,
    secured: Secured,
    role: PeerRole,
    name: str,
    settings: Mapping[str, Setting],
) -> ProcessSpec:
    """A process with these settings and those that the parts of every role have."""
    is_store = role is PeerRole.KVSTORE
    kind, module = ("store", "kvstore") if is_store else (role.value, f"services.{role.value}")
    argv = [sys.executable, "-P", "-m", module]  # never import from the current folder
    settings = {**settings, **secured.settings_of(role)}
    if config.metrics:
        settings["metrics_listen"] = "127.0.0.1:0"
    if config.trace_to and role not in (PeerRole.DRAFT, PeerRole.AUTOSCALER):
        settings["tracing.endpoint"] = config.trace_to
        # The router decides which requests are traced; the other parts follow.
        settings["tracing.sample_ratio"] = config.trace_ratio
    # The user's overrides come last and win.
    ours = (f"{key}={quoted(value)}" for key, value in settings.items())
    given = (*ours, *config.overrides_of(kind))
    for override in given:
        argv += ["--set", override]
    return ProcessSpec(name, kind, tuple(argv), _seconds(given, _DRAIN_KEYS, 0.0))


def max_silence_s(config: ClusterConfig) -> float:
    """Longest time that a part's event loop may stand still before the part is restarted."""
    return _seconds(config.overrides_of("router"), ("times.max_step_s",), MAX_STEP_S)


def _seconds(overrides: Sequence[str], keys: Sequence[str], otherwise: float) -> float:
    """The last value of these keys; the part itself refuses one that is not a number."""
    found = otherwise
    for override in overrides:
        key, _, value = override.partition("=")
        if key.strip() in keys:
            with contextlib.suppress(ValueError):
                found = float(value)
    return found


def quoted(value: Setting) -> str:
    """Write a value as TOML, as the settings loader reads it."""
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


# -- the check of settings

_CHECK_TIMEOUT_S = 60.0
# Placeholders of what exists only after a start.
_REDIS = "unix:///run/redis.sock"
_LISTEN = "127.0.0.1:0"
_FOLDER = Path("/run")


def check_settings(config: ClusterConfig) -> None:
    """Check the settings of `--set` before any part starts.

    Only a part knows its settings, so each kind of part that has overrides is run with `--check`,
    with placeholders for addresses and folders that exist only later. Without overrides nothing is
    run. Blocking; any thread. Raises: ClusterError with the error of the part.
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
            _, output = process.communicate(timeout=_CHECK_TIMEOUT_S)
            if process.returncode and not refused:
                lines = output.strip().splitlines() or [f"exit code {process.returncode}"]
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
    """A process of each kind that `--set` may name, even if this cluster has none of the kind."""
    certs = None
    if config.tls:
        from baton.development_certificates import CertSet

        certs = CertSet(_FOLDER / "tls")
    secured = Secured(certs, str(_FOLDER / "api_keys.toml") if config.api_keys else "")
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
