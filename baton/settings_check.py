"""Checks the `--set` settings of a local cluster before any of its parts starts.

Which keys a part has is known to the part alone, so each kind of part with a setting of the user's
is asked: its own command line with `--check` loads the settings and ends. Addresses and folders
that exist only later are placeholders. Without `--set` nothing is run. Blocking; any thread.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path

from baton import cluster_plan
from baton.cert_set import CertSet
from baton.cluster_config import ClusterConfig
from baton.cluster_plan import ProcessSpec, WorkerSpec
from baton.errors import ClusterError
from baton.secured import Secured

_TIMEOUT_S = 60.0
_REDIS = "unix:///run/redis.sock"
_LISTEN = "127.0.0.1:0"
_FOLDER = Path("/run")


def check(config: ClusterConfig) -> None:
    """Raises: ClusterError with the words of the part that refuses its settings."""
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
            _, said = process.communicate(timeout=_TIMEOUT_S)
            if process.returncode and not refused:
                lines = said.strip().splitlines() or [f"exit code {process.returncode}"]
                refused = f"--set: {spec.kind}: {lines[-1].partition(': ')[2] or lines[-1]}"
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"settings were not checked within {_TIMEOUT_S:g} s") from error
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
    store, *_ = cluster_plan.stores(
        config,
        redis_url=_REDIS,
        sockets=_FOLDER,
        slab_dir=str(_FOLDER),
        capacity_bytes=1 << 29,
        secured=secured,
    )
    store_addresses = ("127.0.0.1:1",) * config.num_all_stores
    parts = WorkerSpec(_REDIS, store_addresses, "/run/keys", _FOLDER, secured)
    with_draft = dataclasses.replace(config, more_models=(), num_stores=1, num_draft=1)
    return [
        store,
        cluster_plan.router(config, redis_url=_REDIS, listen=_LISTEN, secured=secured),
        cluster_plan.numbered_worker(config, "prefill", 0, parts),
        cluster_plan.numbered_worker(config, "decode", 0, parts),
        *cluster_plan.drafts(with_draft, sockets=_FOLDER, secured=secured),
        cluster_plan.autoscaler(
            config,
            redis_url=_REDIS,
            sockets=_FOLDER,
            scale_address="unix:///run/scale.sock",
            secured=secured,
        ),
    ]
