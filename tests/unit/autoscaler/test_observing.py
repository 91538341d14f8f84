"""Counters of processes become what happened since the last look, life by life."""

from __future__ import annotations

import math
from typing import Any

import pytest

from protos import common_pb2, router_status_pb2
from protos.router_status_pb2 import Durations, ModelTraffic
from services.autoscaler.observer import LiveEntry, ObservationInputs, Observer, RegistryLook
from services.autoscaler.scaler import PoolScale
from services.autoscaler.signals import ByRole, Observations, ObservedTraffic, Role, Work

SCALE = ByRole(PoolScale(1, 1), PoolScale(2, 2, 1))


class Scene:
    """An Observing, and what is shown to it second by second."""

    def __init__(self, model: str = "") -> None:
        self.observing = Observer(model, lambda worker: worker.device != "odd")
        self.now_s = 1000.0
        self.workers: list[LiveEntry[common_pb2.WorkerStatus]] = []
        self.routers: list[LiveEntry[router_status_pb2.RouterStatus]] = []

    def worker(self, worker_id: str, life: str = "1", age_s: float = 0.5, **fields: Any) -> None:
        status = common_pb2.WorkerStatus(
            worker_id=worker_id, incarnation=life, **{"role": "decode", "model": "m", **fields}
        )
        self.workers = [each for each in self.workers if each.entry_id != worker_id]
        self.workers.append(LiveEntry(worker_id, status, age_s))

    def router(self, router_id: str, life: str = "1", age_s: float = 0.5, **counts: Any) -> None:
        first, uptime_s = counts.pop("first", None), counts.pop("uptime_s", 3600.0)
        durations = {"bounds_s": [0.1, 1.0], "counts": first, "total_s": 1.0}
        if first is not None:
            counts["first_token"] = Durations(**durations)
        self.router_of(router_id, ModelTraffic(model="m", **counts), life, age_s, uptime_s)

    def router_of(
        self,
        router_id: str,
        models: ModelTraffic | list[ModelTraffic],
        life: str = "1",
        age_s: float = 0.1,
        uptime_s: float = 0.0,
    ) -> None:
        models = models if isinstance(models, list) else [models]
        status = router_status_pb2.RouterStatus(
            router_id=router_id, incarnation=life, models=models, uptime_s=uptime_s
        )
        self.routers = [each for each in self.routers if each.entry_id != router_id]
        self.routers.append(LiveEntry(router_id, status, age_s))

    def look(
        self,
        *,
        redis: bool = True,
        scale: ByRole[PoolScale] | None = SCALE,
        flipping: dict[str, Role] | None = None,
        after_s: float = 2.0,
    ) -> Observations:
        self.now_s += after_s
        registry = RegistryLook(tuple(self.workers), tuple(self.routers)) if redis else None
        self.observing.take(registry, self.now_s)
        return self.observing.observe(
            ObservationInputs(self.now_s, registry, scale, flipping or {})
        )

    def traffic(self) -> ObservedTraffic:
        """Of one look more."""
        traffic = self.look().traffic
        assert traffic is not None
        return traffic


def test_the_first_look_has_nothing_to_compare_with() -> None:
    scene = Scene()
    scene.router("r", num_arrived=50)
    assert scene.look().traffic is None
    scene.router("r", num_arrived=53, num_held=2)
    traffic = scene.traffic()
    assert (traffic.num_arrived, traffic.num_waiting, traffic.elapsed_s) == (3, 2, 2.0)


def test_routers_add_up() -> None:
    scene = Scene()
    scene.router("a", num_arrived=10, first=[1, 2, 3])
    scene.router("b", num_arrived=20, first=[0, 0, 0])
    scene.look()
    scene.router("a", num_arrived=11, num_running=4, first=[2, 2, 3])
    scene.router("b", num_arrived=25, num_running=1, first=[0, 4, 1])
    traffic = scene.traffic()
    assert (traffic.num_arrived, traffic.num_running) == (6, 5)
    assert traffic.ttft.counts == (1, 4, 1)


def test_a_router_that_restarts_counts_from_nothing_and_not_from_less() -> None:
    scene = Scene()
    scene.router("r", num_arrived=1000)
    scene.look()
    scene.router("r", life="2", num_arrived=7, uptime_s=1.4)
    assert scene.traffic().num_arrived == 7


def test_a_router_that_was_there_and_not_seen_tells_nothing_yet() -> None:
    """Redis came back empty, or the autoscaler is younger than its first beat."""
    scene = Scene()
    scene.look()
    scene.router("r", num_arrived=5000, uptime_s=1.6)  # and a beat that is 0.5 s old
    assert scene.traffic().num_arrived == 0
    scene.router("r", num_arrived=5001, uptime_s=3.6)
    assert scene.traffic().num_arrived == 1


def test_who_could_not_be_served_by_more_workers_is_no_load() -> None:
    scene = Scene()
    scene.router("r", num_arrived=10, num_rejected=2)
    scene.look()
    scene.router("r", num_arrived=110, num_rejected=97)
    assert scene.traffic().num_arrived == 5


def test_a_router_whose_beat_came_back_is_no_burst() -> None:
    scene = Scene()
    scene.router("r", num_arrived=1000)
    scene.router("other", num_arrived=0)
    scene.look()
    scene.routers = [each for each in scene.routers if each.entry_id == "other"]
    scene.look()
    scene.router("r", num_arrived=1500)
    assert scene.traffic().num_arrived == 0
    scene.router("r", num_arrived=1502)
    assert scene.traffic().num_arrived == 2


def test_without_redis_what_was_seen_grows_old() -> None:
    scene = Scene()
    scene.worker("d", age_s=0.5)
    scene.router("r", age_s=0.25)
    scene.look()
    scene.look()
    seen = scene.look(redis=False, after_s=7.0)
    assert seen.traffic is None
    assert seen.routers_age_s == 7.25
    assert seen.pools.decode.workers[0].age_s == 7.5
    # Rates are over all the time since the last look that succeeded.
    scene.router("r", num_arrived=9)
    traffic = scene.traffic()
    assert (traffic.elapsed_s, traffic.num_arrived) == (9.0, 9)
    assert not scene.observing.problems


def test_the_oldest_router_counts() -> None:
    assert Scene().look().routers_age_s == math.inf
    scene = Scene()
    scene.router("a", age_s=0.1)
    scene.router("b", age_s=2.9)
    assert scene.look().routers_age_s == 2.9


def test_without_a_scaler_the_last_count_stands_and_grows_old() -> None:
    scene = Scene()
    scene.look()
    seen = scene.look(scale=None, after_s=5.0)
    assert seen.scale_age_s == 5.0
    assert (seen.pools.decode.wanted, seen.pools.decode.num_draining) == (2, 1)


def test_a_worker_s_work_is_of_its_own_life() -> None:
    scene = Scene()
    work = {"num_steps": 10, "step_s": 1.0, "num_computed_tokens": 100, "num_decode_tokens": 90}
    scene.worker("d", **work)
    assert scene.look().pools.decode.workers[0].work == Work()
    scene.worker("d", **{name: 2 * value for name, value in work.items()})
    assert scene.look().pools.decode.workers[0].work == Work(10, 1.0, 100, 90)
    scene.worker("d", life="2", **work)
    assert scene.look().pools.decode.workers[0].work == Work()


def test_a_flipping_worker_belongs_where_it_goes_and_serves_nobody() -> None:
    scene = Scene()
    scene.worker("p", role="prefill")
    scene.worker("d0")
    scene.worker("d1", draining=True)
    scale = ByRole(PoolScale(2, 2), PoolScale(1, 1))
    flipping = {"d1": Role.PREFILL}
    assert scene.observing.roles(flipping) == {}
    seen = scene.look(scale=scale, flipping=flipping)
    assert scene.observing.roles(flipping) == {
        "p": Role.PREFILL,
        "d0": Role.DECODE,
        "d1": Role.PREFILL,
    }
    assert [worker.worker_id for worker in seen.pools.prefill.workers] == ["p", "d1"]
    assert (seen.pools.prefill.num_ready, seen.num_flipping) == (1, 1)
    assert not seen.pools.prefill.workers[1].can_flip


def test_a_flipped_worker_whose_heartbeat_is_late_counts_where_it_was() -> None:
    scene = Scene()
    scene.worker("decode-1", role="prefill")
    scene.look()
    scene.workers = []
    seen = scene.look()
    assert scene.observing.roles({}) == {"decode-1": Role.PREFILL}
    assert not seen.pools.prefill.workers
    scene.look(after_s=15.0)
    assert scene.observing.roles({}) == {}
    # A new life of it is what it says.
    scene.worker("decode-1", life="2")
    scene.look()
    assert scene.observing.roles({}) == {"decode-1": Role.DECODE}


def test_only_the_model_s_workers_and_traffic_count() -> None:
    scene = Scene(model="m")
    scene.worker("d0")
    scene.worker("d1", model="another")
    scene.worker("x", role="king")
    another = ModelTraffic(model="another", num_arrived=5)
    scene.router_of("r", [another, ModelTraffic(model="m", num_arrived=1)])
    scene.look()
    scene.router_of("r", [another, ModelTraffic(model="m", num_arrived=4)])
    seen = scene.look()
    assert seen.traffic is not None and seen.traffic.num_arrived == 3
    assert [worker.worker_id for worker in seen.pools.decode.workers] == ["d0"]


def test_several_models_and_none_named_is_said() -> None:
    scene = Scene()
    scene.router_of("r", [ModelTraffic(model=name) for name in ("a", "b")])
    scene.look()
    assert scene.look().traffic is None
    assert "serves several models; set model" in scene.observing.problems[0]


def test_who_has_least_to_do_is_named_first() -> None:
    scene = Scene()
    scene.worker("busy", num_running=5)
    scene.worker("idle")
    scene.worker("waits", num_waiting=1, num_queued_tokens=10)
    scene.worker("waits for less", num_waiting=1, num_queued_tokens=5)
    scene.look()
    assert scene.observing.leave_first() == ["idle", "waits for less", "waits", "busy"]


@pytest.mark.parametrize(
    "spoiled",
    [
        {"bounds_s": [2.0, 1.0], "counts": [1, 1, 1]},
        {"bounds_s": [1.0], "counts": [1]},
        {"bounds_s": [], "counts": []},
    ],
)
def test_latencies_that_make_no_sense_count_as_none(spoiled: dict[str, Any]) -> None:
    scene = Scene()
    scene.router("r")
    scene.look()
    spoilt = Durations(**spoiled)
    scene.router_of("r", ModelTraffic(model="m", num_arrived=1, first_token=spoilt))
    traffic = scene.traffic()
    assert traffic.num_arrived == 1 and not traffic.ttft.total


def test_routers_that_measure_differently_lose_their_latencies_only() -> None:
    scene = Scene()
    scene.router("a", first=[0, 0, 0])
    scene.router("b")
    scene.look()
    scene.router("a", num_arrived=2, first=[1, 1, 1])
    other = Durations(bounds_s=[0.2], counts=[1, 1])
    scene.router_of("b", ModelTraffic(model="m", num_arrived=3, first_token=other))
    traffic = scene.traffic()
    assert traffic.num_arrived == 5 and not traffic.ttft.total
    assert "different classes" in scene.observing.problems[0]
