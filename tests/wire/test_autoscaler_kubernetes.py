"""What is Kubernetes' alone: leadership by a Lease, deletion costs, events, conflicts, refusals;
the official client over HTTP.

The state machine of leadership: follower -> leader -> follower, by each way there is.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import kmock
import pytest

from process.rpc_errors import Unavailable
from process.settings import SettingsError
from services.autoscaler.app import Autoscaler
from services.autoscaler.config import KubernetesSettings
from services.autoscaler.decision import Decision, Direction, Reason
from services.autoscaler.kubernetes_scaler import (
    DELETION_COST,
    ApiError,
    KubernetesApi,
    KubernetesScaler,
)
from services.autoscaler.leader import PUBLISHED, LeaseLeader
from services.autoscaler.scaler import ScalerError
from services.autoscaler.signals import ByRole, Role
from tests.harness import kubernetes_server
from tests.harness.autoscaler_bench import Cluster, settings_for
from tests.harness.kubernetes_server import NAMESPACE, ApiServer
from tests.harness.redis_server import RedisServer
from tests.harness.waiting import WAIT_S, Clock, until

LEASE = kmock.resource("coordination.k8s.io/v1/leases")


class Rivals:
    """Autoscalers that want the same Lease, and one clock."""

    def __init__(self, api: ApiServer, settings: KubernetesSettings) -> None:
        self.api = api
        self.clock = Clock()
        self.settings = settings
        self.clients: list[KubernetesApi] = []
        self.heard: list[tuple[str, bool]] = []

    def add(self, name: str) -> LeaseLeader:
        client = KubernetesApi(self.settings)
        self.clients.append(client)
        return LeaseLeader(
            client,
            self.settings,
            name,
            clock=self.clock,
            on_change=lambda is_leader: self.heard.append((name, is_leader)),
        )

    async def two(self) -> tuple[LeaseLeader, LeaseLeader]:
        """The first has taken it, the second has seen that."""
        first, second = self.add("first"), self.add("second")
        assert first.left_s == second.left_s == 0
        await first.try_once()
        await second.try_once()
        return first, second

    @property
    def lease(self) -> dict[str, Any]:
        key = (LEASE, NAMESPACE, self.settings.lease_name)
        return self.api.objects[key].raw["spec"]


@pytest.fixture
async def rivals() -> AsyncIterator[Rivals]:
    async with kubernetes_server.running() as (api, server):
        settings = kubernetes_server.settings_for(server, lease_s=15.0, renew_s=10.0, retry_s=2.0)
        made = Rivals(api, settings)
        yield made
        for client in made.clients:
            await client.close()


async def test_who_is_first_leads_and_others_wait(rivals: Rivals) -> None:
    first, second = await rivals.two()
    assert (first.left_s, second.left_s) == (10.0, 0.0)
    assert rivals.lease["holderIdentity"] == "first"
    assert rivals.lease["leaseDurationSeconds"] == 15
    rivals.clock.now_s += 4
    assert first.left_s == 6.0
    await first.try_once()
    assert first.left_s == 10.0
    assert rivals.lease["leaseTransitions"] == 0


async def test_a_leader_that_cannot_renew_acts_no_more_before_another_may(rivals: Rivals) -> None:
    first, second = await rivals.two()
    rivals.api.down = "etcd is away"
    for _ in range(10):
        rivals.clock.now_s += 1
        with pytest.raises(ApiError):
            await first.try_once()
    assert first.left_s == 0.0
    rivals.api.down = ""
    # Not the moment it comes back: the other counts from when it saw the last renewal.
    rivals.clock.now_s += 4.9
    await second.try_once()
    assert (first.left_s, second.left_s) == (0.0, 0.0)
    rivals.clock.now_s += 0.2
    await second.try_once()
    assert (first.left_s, second.left_s) == (0.0, 10.0)
    assert rivals.lease["leaseTransitions"] == 1
    await first.try_once()
    assert first.left_s == 0.0


async def test_two_never_lead_at_once_whatever_fails(rivals: Rivals, seed: int) -> None:
    """Whoever is slow, cut off or late: at no moment may both act."""
    rng = random.Random(seed)
    both = [rivals.add("first"), rivals.add("second")]
    led: set[LeaseLeader] = set()
    num_tries = 0
    while num_tries < 60 or (led != set(both) and num_tries < 600):
        num_tries += 1
        rivals.clock.now_s += rng.uniform(0, 6)
        rivals.api.down = "away" if rng.random() < 0.3 else ""
        who = rng.choice(both)
        with contextlib.suppress(ApiError):
            await who.try_once()
        leading = [leader for leader in both if leader.left_s > 0]
        assert len(leading) <= 1
        led.update(leading)
    assert led == set(both)


async def test_a_renewal_counts_from_when_it_was_sent(rivals: Rivals) -> None:
    """The server may have had it at once, and another counts from then."""
    first = rivals.add("first")
    await first.try_once()
    write = first._api.replace_lease

    async def slow(name: str, body: dict[str, Any]) -> None:
        await write(name, body)
        rivals.clock.now_s += 4

    first._api.replace_lease = slow  # type: ignore[method-assign]
    await first.try_once()
    assert first.left_s == 6.0


async def test_an_empty_lease_that_was_made_by_hand_is_taken(rivals: Rivals) -> None:
    rivals.api.objects[LEASE, NAMESPACE, rivals.settings.lease_name] = {
        "metadata": {"name": rivals.settings.lease_name, "resourceVersion": "7"}
    }
    first = rivals.add("first")
    await first.try_once()
    assert first.left_s == 10.0 and rivals.lease["holderIdentity"] == "first"


async def test_the_lease_of_the_chart_keeps_its_labels_and_annotations(rivals: Rivals) -> None:
    """Helm and operators find it by them; what a leader publishes is added and taken away."""
    key = (LEASE, NAMESPACE, rivals.settings.lease_name)
    labels = {"app.kubernetes.io/instance": "baton"}
    of_helm = {"meta.helm.sh/release-name": "baton"}
    rivals.api.objects[key] = {
        "metadata": {
            "name": rivals.settings.lease_name,
            "resourceVersion": "7",
            "labels": labels,
            "annotations": of_helm,
        }
    }
    first = rivals.add("first")
    for published in ("1", ""):
        first._publish = lambda said=published: said
        await first.try_once()
        metadata = rivals.api.objects[key].raw["metadata"]
        assert metadata["labels"] == labels
        assert metadata["annotations"] == of_helm | ({PUBLISHED: "1"} if published else {})


async def test_a_lease_that_is_gone_and_may_not_be_created_says_what_to_do(rivals: Rivals) -> None:
    """With the chart's Role: a Lease made while the release is removed would stay behind."""
    rivals.api.refused = ("POST leases",)
    first = rivals.add("first")
    with pytest.raises(ApiError, match=r"no lease .*creating it is not allowed: `helm upgrade`"):
        await first.try_once()
    assert first.left_s == 0.0


async def test_a_lease_that_somebody_else_took_ends_it_at_once(rivals: Rivals) -> None:
    first, second = await rivals.two()
    rivals.clock.now_s += 20
    await second.try_once()
    assert second.left_s > 0
    await first.try_once()
    assert first.left_s == 0


async def test_what_a_leader_publishes_is_heard_while_it_leads(rivals: Rivals) -> None:
    first, second = rivals.add("first"), rivals.add("second")
    said = {"first": "", "second": "2"}
    for leader in (first, second):
        leader._publish = lambda name=leader._id: said[name]
    await first.try_once()
    await second.try_once()
    assert second.heard == ""  # nothing was said yet
    rivals.clock.now_s += 2
    said["first"] = "1"
    await first.try_once()
    await second.try_once()
    assert (first.heard, second.heard) == ("", "1")
    assert (first.led_s, second.led_s) == (2.0, 0.0)
    rivals.api.down = "etcd is away"
    for passed_s, heard in ((14.9, "1"), (0.2, "")):  # as long as nobody else may lead
        rivals.clock.now_s += passed_s
        with pytest.raises(ApiError):
            await second.try_once()
        assert second.heard == heard
    assert first.led_s == 0.0
    rivals.api.down = ""
    await second.try_once()
    await first.try_once()
    assert (first.heard, second.heard) == ("2", "")
    rivals.clock.now_s += 3
    await second.try_once()
    assert (first.led_s, second.led_s) == (0.0, 3.0)
    await second.stop()
    await first.try_once()
    # Let go, and taken at once: its time begins anew, and nobody else is heard.
    assert (first.led_s, first.heard, second.heard) == (0.0, "", "")
    rivals.clock.now_s += 1
    assert first.led_s == 1.0


async def test_a_lapse_ends_the_time_that_it_has_led(rivals: Rivals) -> None:
    """Also one that nobody used: for a while others may have been shown more than it knows."""
    first = rivals.add("first")
    await first.try_once()
    rivals.clock.now_s += 10.5
    assert first.led_s == 0.0
    await first.try_once()
    assert first.led_s == 0.0
    rivals.clock.now_s += 4
    assert first.led_s == 4.0


async def test_of_two_at_once_the_api_server_lets_one_through(rivals: Rivals) -> None:
    first, second = rivals.add("first"), rivals.add("second")
    results = await asyncio.gather(first.try_once(), second.try_once(), return_exceptions=True)
    assert sum(leader.left_s > 0 for leader in (first, second)) == 1, results


async def test_a_renewal_that_arrives_in_the_middle_of_the_end_keeps_nothing(
    rivals: Rivals,
) -> None:
    """It was sent before; its thread runs on when its task is cancelled."""
    first, second = rivals.add("first"), rivals.add("second")
    await first.try_once()
    api = first._api
    read = api.lease

    async def read_then_renewed(name: str) -> Any:
        lease = await read(name)
        api.lease = read  # type: ignore[method-assign]
        await api.replace_lease(name, first._body(lease, holder="first"))
        return lease

    api.lease = read_then_renewed  # type: ignore[method-assign]
    await first.stop()
    assert rivals.lease["holderIdentity"] == ""
    await second.try_once()
    assert (first.left_s, second.left_s) == (0.0, 10.0)


@pytest.mark.parametrize("is_there", [False, True])
async def test_who_ends_while_it_takes_the_lease_lets_it_go(rivals: Rivals, is_there: bool) -> None:
    first, second = rivals.add("first"), rivals.add("second")
    if is_there:
        await second.try_once()
        await second.stop()
    api, has_arrived = first._api, asyncio.Event()
    create, replace = api.create_lease, api.replace_lease

    async def created(body: Any) -> None:
        await create(body)
        has_arrived.set()
        await asyncio.Event().wait()

    async def replaced(name: str, body: Any) -> None:
        await replace(name, body)
        has_arrived.set()
        await asyncio.Event().wait()

    api.create_lease, api.replace_lease = created, replaced  # type: ignore[method-assign]
    taking = asyncio.create_task(first.try_once())
    async with asyncio.timeout(20):
        await has_arrived.wait()
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
    assert rivals.lease["holderIdentity"] == "first" and not first.left_s
    api.create_lease, api.replace_lease = create, replace  # type: ignore[method-assign]
    await first.stop()
    assert rivals.lease["holderIdentity"] == ""


async def test_leadership_is_told_and_let_go_at_the_end() -> None:
    async with kubernetes_server.running() as (api, server):
        settings = kubernetes_server.settings_for(server, lease_s=500.0, renew_s=400.0)
        rivals = Rivals(api, settings)
        rivals.clock.now_s = 0.0
        client = KubernetesApi(settings)
        heard = asyncio.Queue[bool]()
        first = LeaseLeader(client, settings, "first", on_change=heard.put_nowait)
        second = LeaseLeader(client, settings, "second")
        try:
            async with asyncio.timeout(20):
                first.start()
                assert await heard.get() is True
                second.start()
                await first.stop()
                assert await heard.get() is False
                while not second.left_s:  # well before the lease would have lapsed
                    await asyncio.sleep(0.01)
        finally:
            await second.stop()
            await client.close()
        assert rivals.lease["holderIdentity"] == ""


@asynccontextmanager
async def scaling(**counts: int) -> AsyncIterator[tuple[ApiServer, KubernetesScaler]]:
    async with kubernetes_server.running(**counts) as (api, server):
        settings = kubernetes_server.settings_for(server)
        scaler = KubernetesScaler(KubernetesApi(settings), settings, "me")
        try:
            yield api, scaler
        finally:
            await scaler.close()


def costs_of(api: ApiServer) -> dict[str, int]:
    """What it costs to delete each decode pod, by name."""
    pods = [pod["metadata"] for pod in api.pods("baton-decode")]
    return {pod["name"]: int(pod["annotations"].get(DELETION_COST, 0)) for pod in pods}


async def shrink(scaler: KubernetesScaler, wanted: int, *first: str) -> None:
    await scaler.set(Role.DECODE, wanted, roles={}, leave_first=first, fence=lambda: None)


async def test_who_shall_leave_is_the_cheapest_to_delete() -> None:
    async with scaling(decode=4) as (api, scaler):
        names = [pod["metadata"]["name"] for pod in api.pods("baton-decode")]
        api.set_ready(names[3], False)
        await shrink(scaler, 2, names[1], names[3], names[0], names[2])
        costs = costs_of(api)
        # Who does not serve yet goes before who has least to do; the others are not touched.
        assert costs[names[3]] < costs[names[1]] < 0
        assert costs[names[0]] == costs[names[2]] == 0
        assert api.replicas("decode") == 2
        assert api.replicas("prefill") == 1


async def test_a_removal_that_failed_marks_nobody_for_later() -> None:
    """Whoever was to leave then may be the busiest by now; costs that others set are theirs."""
    async with scaling(decode=4) as (api, scaler):
        names = [pod["metadata"]["name"] for pod in api.pods("baton-decode")]
        await scaler._api.annotate_pod(names[3], DELETION_COST, "-7", lambda: None)
        write = scaler._api.set_scale

        async def overtaken(*_: Any) -> None:
            raise ApiError("writing the scale: the API server says 409 Conflict", 409)

        scaler._api.set_scale = overtaken  # type: ignore[method-assign]
        with pytest.raises(ScalerError, match="409"):
            await shrink(scaler, 3, *names)
        scaler._api.set_scale = write  # type: ignore[method-assign]
        await shrink(scaler, 3, *reversed(names[:3]))
        costs = costs_of(api)
        assert costs[names[2]] < -1000
        assert (costs[names[0]], costs[names[1]], costs[names[3]]) == (0, 0, -7)


async def test_pods_that_do_not_serve_or_leave_are_told_apart() -> None:
    async with scaling(decode=3) as (api, scaler):
        names = [pod["metadata"]["name"] for pod in api.pods("baton-decode")]
        api.set_ready(names[0], False)
        api.set_leaving(names[1])
        scale = (await scaler.get({})).decode
        assert (scale.wanted, scale.ready, scale.num_leaving) == (3, 1, 1)


async def test_a_change_of_somebody_else_is_not_undone() -> None:
    async with scaling(decode=2) as (api, scaler):
        read = scaler._api.scale

        async def read_then_overtaken(deployment: str) -> tuple[int, str]:
            answer = await read(deployment)
            if deployment == "baton-decode":
                await scaler._api.set_scale(deployment, 7, answer[1], lambda: None)
            return answer

        scaler._api.scale = read_then_overtaken  # type: ignore[method-assign]
        with pytest.raises(ScalerError, match="409"):
            await shrink(scaler, 1)
        assert api.replicas("decode") == 7


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda api: setattr(api, "down", "etcd is away"), "500.*etcd is away"),
        (lambda api: setattr(api, "refused", ("deployments/scale",)), "403.*is forbidden"),
        (lambda api: setattr(api, "refused", ("pods",)), "listing pods.*403"),
        (lambda api: api.objects.clear(), "baton-prefill: the API server says 404"),
    ],
)
async def test_what_the_api_server_says_is_one_line(
    spoil: Callable[[ApiServer], None], says: str
) -> None:
    async with scaling() as (api, scaler):
        spoil(api)
        with pytest.raises(ScalerError, match=says) as caught:
            await scaler.get({})
        assert "\n" not in str(caught.value)


async def test_no_api_server_is_one_line() -> None:
    settings = KubernetesSettings(api_url="http://127.0.0.1:9", namespace=NAMESPACE)
    scaler = KubernetesScaler(KubernetesApi(settings), settings, "me")
    try:
        with pytest.raises(ScalerError, match="no answer of the API server") as caught:
            await scaler.get({})
        assert "\n" not in str(caught.value)
    finally:
        await scaler.close()


def test_outside_of_a_pod_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/no/such/file")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(SettingsError, match="neither in a pod with a service account"):
        KubernetesApi(KubernetesSettings())
    with pytest.raises(SettingsError, match=r"kubernetes\.namespace: needed"):
        KubernetesApi(KubernetesSettings(api_url="http://127.0.0.1:9"))


DECIDED = Decision(
    at_s=1.0,
    direction=Direction.UP,
    reason=Reason.LOAD,
    before=ByRole(1, 1),
    wanted=ByRole(1, 3),
    binding="ttft",
)


async def test_a_decision_is_an_event_on_the_deployment_that_it_is_about() -> None:
    async with scaling() as (api, scaler):
        await scaler.announce(DECIDED, "done", "", lambda: None)
        (event,) = api.events()
        assert event["involvedObject"]["name"] == "baton-decode"
        assert event["involvedObject"]["kind"] == "Deployment"
        assert event["type"] == "Normal" and "decode 1 -> 3" in event["message"]
        failed = replace(DECIDED, wanted=ByRole(2, 3))
        await scaler.announce(failed, "failed", "no rights", lambda: None)
        warnings = [event for event in api.events() if event["type"] == "Warning"]
        assert {event["involvedObject"]["name"] for event in warnings} == {
            "baton-prefill",
            "baton-decode",
        }
        assert all("no rights" in event["message"] for event in warnings)


async def test_an_event_that_cannot_be_written_ends_nothing() -> None:
    async with scaling() as (api, scaler):
        api.refused = ("events",)
        await scaler.announce(DECIDED, "done", "", lambda: None)
        assert not api.events()


async def test_a_whole_autoscaler_wakes_deployments_from_zero_and_lets_its_lease_go() -> None:
    redis = RedisServer()
    await redis.start()
    async with kubernetes_server.running(prefill=0, decode=0) as (api, server):
        kubernetes = kubernetes_server.settings_for(server, lease_s=150.0, renew_s=100.0)
        autoscaler = Autoscaler(
            settings_for(
                redis, least=0, scaler="kubernetes", kubernetes=kubernetes, autoscaler_id="me"
            )
        )
        cluster = Cluster(redis, autoscaler)
        try:
            await cluster.beat()
            await autoscaler.start()
            await until(lambda: autoscaler.records.last is not None)
            await until(lambda: autoscaler._leadership.left_s > 0)
            assert (api.replicas("prefill"), api.replicas("decode")) == (0, 0)
            cluster.traffic.num_arrived += 1
            cluster.traffic.num_held = 1
            async with asyncio.timeout(WAIT_S):
                while not api.replicas("decode"):
                    await cluster.decide()
            assert api.replicas("prefill") >= 1 and api.replicas("decode") >= 1
            reasons = {event["reason"] for event in api.events()}
            assert reasons == {"ScalingUp"}
            assert lease_holder(api, kubernetes) == "me"
        finally:
            await cluster.stop()
            redis.remove()
        assert lease_holder(api, kubernetes) == ""


def lease_holder(api: ApiServer, settings: KubernetesSettings) -> str:
    return str(api.objects[LEASE, NAMESPACE, settings.lease_name].raw["spec"]["holderIdentity"])


async def test_of_two_that_advise_both_tell_keda_what_the_leader_wants() -> None:
    """And one that advises never keeps one that acts from leading."""
    redis = RedisServer()
    await redis.start()
    async with kubernetes_server.running() as (_, server):
        kubernetes = kubernetes_server.settings_for(server, lease_s=150.0, renew_s=100.0)
        settings = settings_for(redis, scaler="kubernetes", kubernetes=kubernetes, act=False)
        both = [
            Cluster(redis, Autoscaler(replace(settings, autoscaler_id=name)))
            for name in ("first", "second")
        ]
        first, second = (cluster.autoscaler for cluster in both)
        acting = Autoscaler(replace(settings, act=True, autoscaler_id="acting"))
        try:
            await both[0].beat()
            # Its first decision is made as leader or before, whichever: it says nothing of it.
            leader = first._leadership
            assert isinstance(leader, LeaseLeader)
            publish, leader._publish = leader._publish, lambda: ""
            await first.start()
            await until(lambda: first._leads and first.records.last is not None)
            await second.start()
            await until(lambda: second.records.last is not None)
            with pytest.raises(Unavailable):
                second._wanted()
            await both[0].decide()
            own = first._wanted()
            assert own == first._led_wanted()
            leader._publish = publish
            await until(lambda: bool(second._leadership.heard))
            assert second._wanted() == own and second._led_wanted() is None
            await acting.start()
            await until(lambda: acting._leads)
            assert first._leads and not second._leads
            await both.pop(0).stop()
            await until(lambda: second._leads)
            await both[0].decide()
            assert second._wanted() == second._led_wanted()
            assert acting._leads
        finally:
            await acting.stop()
            for cluster in both:
                await cluster.stop()
            redis.remove()
