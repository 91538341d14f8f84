"""Workers of a local cluster whose devices take a set time for a step, so that on few cores more
workers serve more: `paced` has a LocalCluster start them in place of its own.

    with paced({"prefill": DevicePace(token_s=0.005), "decode": DevicePace(step_s=0.05)}):
        with LocalCluster(ClusterConfig(autoscale=True)) as cluster: ...

Run as a program it is one worker; its arguments are its role and its pace, then those of `python -m
services.ROLE`. All but the pace (see engine/paced.py) is that worker's own. It starts services, so
it cannot lie in engine/, and tests use it as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from baton import ClusterConfig
from baton.cluster import plan as cluster_plan
from engine import load
from engine.paced import DevicePace, PacedModel
from process import entrypoint
from services.decode.role import DecodeRole
from services.prefill.role import PrefillRole
from services.worker import main as worker_main
from services.worker.config import WorkerSettings

_ROLES = {"prefill": PrefillRole, "decode": DecodeRole}


@contextlib.contextmanager
def paced(paces: Mapping[str, DevicePace]) -> Iterator[None]:
    """While this lasts, workers of clusters with `autoscale` are started at these paces, by role;
    those of other roles as they are."""
    plain = cluster_plan.numbered_worker

    @functools.wraps(plain)
    def numbered_worker(
        config: ClusterConfig, role: str, index: int, parts: cluster_plan.WorkerSpec
    ) -> cluster_plan.ProcessSpec:
        spec = plain(config, role, index, parts)
        if role not in paces:
            return spec
        interpreter, safe, *module = spec.argv
        if module[:2] != ["-m", f"services.{role}"]:
            raise ValueError(f"{spec.name} is started in a way that is not known here: {spec.argv}")
        pace = (role, repr(paces[role].step_s), repr(paces[role].token_s))
        return replace(spec, argv=(interpreter, safe, str(Path(__file__)), *pace, *module[2:]))

    cluster_plan.numbered_worker = numbered_worker
    try:
        yield
    finally:
        cluster_plan.numbered_worker = plain


def pace_models(pace: DevicePace) -> None:
    """Models that engines of this process load from now on take so long."""
    load_model = load.load_model

    @functools.wraps(load_model)
    def load_paced(*args: object, **more: object) -> PacedModel:
        return PacedModel(load_model(*args, **more), pace)

    load.load_model = load_paced


def main(role: str, step_s: str, token_s: str, *arguments: str) -> int:
    """One worker's whole life. Returns: the exit code."""
    pace_models(DevicePace(float(step_s), float(token_s)))

    async def serve(settings: WorkerSettings, stop: asyncio.Event) -> None:
        await worker_main.run(settings, stop, role, _ROLES[role])

    return entrypoint.run(role, WorkerSettings, serve, arguments)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
