"""One suite for everybody who starts and stops workers: the fake, the service of `baton up` with
real processes behind a supervisor, and Kubernetes by its official client over HTTP."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from baton.cluster.command_lines import ProcessSpec
from baton.cluster.scale_service import ScaleService
from baton.cluster.supervisor import ProcessState, Supervisor
from baton.errors import ClusterError
from services.autoscaler.kubernetes_scaler import KubernetesApi, KubernetesScaler
from services.autoscaler.local_scaler import LocalScaler
from services.autoscaler.scaler import PoolScale, Scaler, ScalerError
from services.autoscaler.signals import ByRole, Role
from services.autoscaler.testing.fake_scaler import FakeScaler
from tests.harness import kubernetes_server

P, D = Role.PREFILL, Role.DECODE

_WORKER = """
import json, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print(json.dumps({"event": "ready", "address": ""}), flush=True)
signal.sigwait([signal.SIGTERM])
"""


class Bench:
    """A scaler and what it scales."""

    def __init__(self, scaler: Scaler, settle: Callable[[], Any], names: Callable[[], Any]) -> None:
        self.scaler = scaler
        self._settle = settle
        self._names = names

    async def settle(self) -> None:
        """Who starts serves, who leaves is gone."""
        async with asyncio.timeout(20):
            done = self._settle()
            if asyncio.iscoroutine(done):
                await done

    def names(self) -> list[str]:
        """Workers that are not leaving, by their homes."""
        return sorted(self._names())

    async def set(self, role: Role, wanted: int, **changes: Any) -> None:
        nothing: dict[str, Any] = {"roles": {}, "leave_first": (), "fence": lambda: None}
        await self.scaler.set(role, wanted, **{**nothing, **changes})


class ManyProcesses:
    """Workers of a supervisor that are small scripts."""

    def __init__(self, folder: Path) -> None:
        self.supervisor = Supervisor(folder, lambda event: None)
        self.supervisor.keep_up()
        self.num_started = 0

    def list_workers(self) -> list[tuple[str, str, str]]:
        states = {ProcessState.READY: "ready", ProcessState.RETIRING: "leaving"}
        infos = self.supervisor.processes().values()
        return [(info.name, info.kind, states.get(info.state, "starting")) for info in infos]

    def start_workers(self, role: str, num: int) -> list[str]:
        names = [f"{role}-{self.num_started + index}" for index in range(num)]
        self.num_started += num
        command = (sys.executable, "-c", _WORKER)
        self.supervisor.launch([ProcessSpec(name, role, command) for name in names])
        return names

    def stop_workers(self, names: Sequence[str]) -> None:
        there = [name for name, _, _ in self.list_workers()]
        if missing := [name for name in names if name not in there]:
            raise ClusterError(f"no worker {missing[0]}")
        self.supervisor.retire(names, 10.0)

    async def settle(self) -> None:
        while any(state != "ready" for _, _, state in self.list_workers()):
            await asyncio.sleep(0.01)

    def names(self) -> list[str]:
        return [name for name, _, state in self.list_workers() if state != "leaving"]


@asynccontextmanager
async def fake(folder: Path) -> AsyncIterator[Bench]:
    scaler = FakeScaler(prefill=1, decode=1)

    def names() -> list[str]:
        return [unit.worker_id for unit in scaler.units if unit.state != "leaving"]

    yield Bench(scaler, scaler.settle, names)


@asynccontextmanager
async def local(folder: Path) -> AsyncIterator[Bench]:
    workers = ManyProcesses(folder)
    service = ScaleService(workers, folder / "scale.sock")
    service.start()
    scaler = LocalScaler(service.address, 10.0)
    try:
        workers.start_workers("prefill", 1)
        workers.start_workers("decode", 1)
        await workers.settle()
        yield Bench(scaler, workers.settle, workers.names)
    finally:
        await scaler.close()
        service.stop()
        workers.supervisor.stop((("prefill", "decode"),))


@asynccontextmanager
async def kubernetes(folder: Path) -> AsyncIterator[Bench]:
    async with kubernetes_server.running() as (api, server):
        settings = kubernetes_server.settings_for(server)
        scaler = KubernetesScaler(KubernetesApi(settings), settings, "me")

        def names() -> list[str]:
            return [pod["metadata"]["name"] for pod in api.pods()]

        try:
            yield Bench(scaler, api.reconcile, names)
        finally:
            await scaler.close()


@pytest.fixture(params=[fake, local, kubernetes], ids=lambda make: make.__name__)
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    async with request.param(tmp_path) as made:
        yield made


def pools(prefill: tuple[int, int], decode: tuple[int, int]) -> ByRole[tuple[int, int]]:
    return ByRole(prefill, decode)


def seen(scale: ByRole[PoolScale]) -> ByRole[tuple[int, int]]:
    return scale.map(lambda _, pool: (pool.wanted, pool.ready))


async def test_more_workers_are_asked_for_and_come(bench: Bench) -> None:
    assert seen(await bench.scaler.get({})) == pools((1, 1), (1, 1))
    await bench.set(D, 3)
    asked = await bench.scaler.get({})
    assert (asked.decode.wanted, asked.prefill.wanted) == (3, 1)
    await bench.settle()
    assert seen(await bench.scaler.get({})) == pools((1, 1), (3, 3))


async def test_who_has_least_to_do_leaves(bench: Bench) -> None:
    await bench.set(D, 3)
    await bench.settle()
    before = bench.names()
    busy = [name for name in before if "decode" in name]
    idle = busy.pop(1)
    await bench.set(D, 2, leave_first=[idle, *busy])
    assert (await bench.scaler.get({})).decode.wanted == 2
    await bench.settle()
    assert bench.names() == sorted(set(before) - {idle})
    assert seen(await bench.scaler.get({})) == pools((1, 1), (2, 2))


async def test_to_nothing_and_back(bench: Bench) -> None:
    await bench.set(P, 0)
    await bench.set(D, 0)
    await bench.settle()
    assert seen(await bench.scaler.get({})) == pools((0, 0), (0, 0))
    await bench.set(P, 1)
    await bench.set(D, 2)
    await bench.settle()
    assert seen(await bench.scaler.get({})) == pools((1, 1), (2, 2))


async def test_a_flipped_worker_counts_where_it_is_and_goes_from_where_it_came(
    bench: Bench,
) -> None:
    await bench.set(D, 2)
    await bench.settle()
    flipped = next(name for name in bench.names() if "decode" in name)
    roles = {flipped: P}
    assert seen(await bench.scaler.get(roles)) == pools((2, 2), (1, 1))
    # The pool that it went to shrinks by it: its old home has one less, too.
    await bench.set(P, 1, roles=roles, leave_first=[flipped])
    await bench.settle()
    assert flipped not in bench.names()
    assert seen(await bench.scaler.get({})) == pools((1, 1), (1, 1))
    # Growing a pool starts workers of that home.
    other = next(name for name in bench.names() if "decode" in name)
    await bench.set(D, 2, roles={other: P})
    await bench.settle()
    assert seen(await bench.scaler.get({other: P})) == pools((2, 2), (2, 2))


async def test_the_same_again_changes_nothing(bench: Bench) -> None:
    before = bench.names()
    await bench.set(P, 1)
    await bench.set(D, 1)
    assert bench.names() == before
    assert seen(await bench.scaler.get({})) == pools((1, 1), (1, 1))


@pytest.mark.parametrize("wanted", [0, 3])
async def test_behind_a_fence_nothing_changes(bench: Bench, wanted: int) -> None:
    def fence() -> None:
        raise ScalerError("another leads")

    before = bench.names()
    with pytest.raises(ScalerError, match="another leads"):
        await bench.set(D, wanted, fence=fence)
    await bench.settle()
    assert bench.names() == before
    assert seen(await bench.scaler.get({})) == pools((1, 1), (1, 1))


async def test_nobody_there_is_one_line(tmp_path: Path) -> None:
    scaler = LocalScaler(f"unix:{tmp_path}/nobody.sock", 1.0)
    try:
        with pytest.raises(ScalerError, match="`baton up` does not scale its workers"):
            await scaler.get({})
    finally:
        await scaler.close()
