"""The life of a release on Kubernetes: installed, used, scaled, renewed, hurt, removed.

The tests of this file build on one another, in their order: each takes the release as the one
before has left it. Under load no request may fail, whatever comes and goes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import openai
import pytest

from baton import Client, cli
from tests.kind.kubernetes_cluster import VALUES, KubernetesCluster, Load

pytestmark = [pytest.mark.timeout(1800)]

MODEL = "baton-5m"
PROMPT = "Once upon a time"


def _steady(num_requests: int, rate: float = 4.0) -> tuple[str, ...]:
    """Options of a load that outlasts what happens meanwhile."""
    return (
        *("--rate", f"{rate:g}", "--requests", str(num_requests)),
        *("--input-len", "64", "--output-len", "64", "--spread", "0.5"),
    )


_FEWEST_IN_BURST = 600
"""Requests of the burst, also in a short run: more workers are wanted after 10 to 20 s of a load
only (`pace.up_s`, and a look every 5 s), and this is 100 s of it."""

_MOST_IN_BURST = ("--max-concurrency", "64")
"""Under way at once; the rest waits at the client. Too much for one worker, and below what the
router lets one tenant queue (128): a slow machine gets its load more slowly and refuses none."""


def _assert_all_served(found: list[Load], num_requests: int) -> None:
    (load,) = found
    assert not load.failures
    assert load.num_served == num_requests


def test_preflight_finds_the_cluster_ready(
    cluster: KubernetesCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--context", cluster.context, "--namespace", cluster.namespace)
    chart = ("--chart", str(VALUES.parents[2] / "helm" / "baton"), "--values", str(VALUES))
    assert cli.main(["preflight", *chart, *where]) == 0, capsys.readouterr().out


def test_install_alone_serves(cluster: KubernetesCluster) -> None:
    cluster.upgrade()
    pods = {name: cluster.get("pod", name) for name in cluster.names("pods")}
    assert len(pods) == 4  # router, redis, prefill, decode
    restarts = {
        name: status["restartCount"]
        for name, pod in pods.items()
        for status in pod["status"]["containerStatuses"]
    }
    assert not any(restarts.values()), restarts
    cluster.helm("test", cluster.release, timeout_s=180)


def test_grpc_and_openai_clients(cluster: KubernetesCluster) -> None:
    async def over_grpc(address: str) -> str:
        async with Client(address) as client:
            answer = await client.complete(PROMPT, max_tokens=24, seed=7)
            assert answer.usage.num_output_tokens == 24
            return answer.text

    service = f"{cluster.release}-router"
    with cluster.forward(service, 8500) as address:
        text = asyncio.run(over_grpc(address))
    with cluster.forward(service, 8501) as address:
        client = openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0)
        with client:
            chunks = client.completions.create(
                model=MODEL, prompt=PROMPT, max_tokens=24, seed=7, stream=True
            )
            assert "".join(chunk.choices[0].text for chunk in chunks) == text


def test_load(cluster: KubernetesCluster, scale: Callable[[int], int]) -> None:
    num_requests = scale(1000)
    with cluster.load("load", *_steady(num_requests)) as found:
        pass
    _assert_all_served(found, num_requests)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_scaled_up_and_down_under_load(
    cluster: KubernetesCluster, role: str, scale: Callable[[int], int]
) -> None:
    deployment = f"deployment/{cluster.release}-{role}"
    num_requests = scale(2000)
    with cluster.load(f"scale-{role}", *_steady(num_requests)) as found:
        cluster.kubectl("scale", deployment, "--replicas=2")
        cluster.wait_ready()
        assert len(cluster.names("pods", role)) == 2
        cluster.kubectl("scale", deployment, "--replicas=1")
        cluster.wait("the pod left", lambda: len(cluster.names("pods", role)) == 1)
    _assert_all_served(found, num_requests)


@pytest.mark.parametrize("role", ["prefill", "decode", "router"])
def test_rolling_upgrade_under_load(
    cluster: KubernetesCluster, role: str, scale: Callable[[int], int]
) -> None:
    before = set(cluster.names("pods", role))
    num_requests = scale(2000)
    with cluster.load(f"upgrade-{role}", *_steady(num_requests)) as found:
        cluster.upgrade(f"{role}.podAnnotations.renewed=yes")
        cluster.wait("old pods left", lambda: not before & set(cluster.names("pods", role)))
    _assert_all_served(found, num_requests)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_killed_pod_costs_no_request(
    cluster: KubernetesCluster, role: str, scale: Callable[[int], int]
) -> None:
    cluster.kubectl("scale", f"deployment/{cluster.release}-{role}", "--replicas=2")
    cluster.wait_ready()
    num_requests = scale(2000)
    with cluster.load(f"kill-{role}", *_steady(num_requests)) as found:
        victim = cluster.names("pods", role)[0]
        cluster.kubectl("delete", "pod", victim, "--grace-period=0", "--force")
        cluster.wait_ready()
    _assert_all_served(found, num_requests)


_SCRAPE = (
    "from urllib.request import urlopen as get; "
    "print(get('http://127.0.0.1:9100/metrics').read().decode())"
)
"""What a pod says of itself, to itself."""


def test_draft_workers_guess(cluster: KubernetesCluster, scale: Callable[[int], int]) -> None:
    always = "decode.settings.engine.speculation.always=true"
    cluster.upgrade("draft.replicas=2", f"draft.model={MODEL}-draft", always)
    pods = cluster.names("pods", "draft")
    assert len(pods) == 2
    num_requests = scale(1000)
    with cluster.load("drafts", *_steady(num_requests)) as found:
        pass
    _assert_all_served(found, num_requests)
    for pod in pods:  # sequences are dealt to both
        told = cluster.kubectl("exec", pod, "--", "python", "-c", _SCRAPE)
        (line,) = [one for one in told.splitlines() if one.startswith("baton_draft_nodes_total")]
        assert float(line.rpartition(" ")[2]) > 0, pod


def test_the_autoscaler_adds_and_removes_workers(
    cluster: KubernetesCluster, scale: Callable[[int], int]
) -> None:
    cluster.upgrade("scaling.by=autoscaler", "scaling.prefill.max=2", "scaling.decode.max=2")

    def num_workers() -> int:
        return len(cluster.names("pods", "prefill")) + len(cluster.names("pods", "decode"))

    # Those of the last test leave by themselves: nobody asks for anything.
    cluster.wait("idle workers left", lambda: num_workers() == 2, timeout_s=900)
    num_requests = max(scale(4000), _FEWEST_IN_BURST)
    burst = (*_steady(num_requests, rate=6.0), *_MOST_IN_BURST)
    with cluster.load("burst", *burst) as found:
        cluster.wait("workers were added", lambda: num_workers() > 2, timeout_s=600)
    _assert_all_served(found, num_requests)
    cluster.wait("they left again", lambda: num_workers() == 2, timeout_s=900)


def test_uninstall_leaves_nothing(cluster: KubernetesCluster) -> None:
    cluster.helm("uninstall", cluster.release)
    cluster.wait("pods are gone", lambda: not cluster.names("pods"), timeout_s=300)
    for kind in (
        "deployment",
        "statefulset",
        "service",
        "configmap",
        "secret",
        "pvc",
        "role",
    ):
        assert not cluster.names(kind), kind
    # In the whole namespace: a Lease that an autoscaler created by itself would have no labels.
    assert not cluster.kubectl("get", "lease", "--output", "name")
