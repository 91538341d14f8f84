"""Draft workers of the chart: each has a name that decode workers are told, a model of its own, and
nothing that it does not need."""

from __future__ import annotations

from pathlib import Path

import pytest

from process.authorization import PeerRole
from tests.helm.conftest import NAMESPACE, Render, containers, data_of, of_kind, pod_specs
from tests.helm.test_meaning import loaded
from tests.helm.test_rendered import MATRIX

DRAFTS = ("draft.replicas=3", "draft.model=baton-5m-draft")


def test_without_replicas_there_is_nothing_of_them(render: Render) -> None:
    """Also with a model, so that they can be turned off and on."""
    plain = [each for each in render("tls.mode=self-made") if each["kind"] != "Role"]
    assert "draft" not in str(plain)
    off = render("draft.model=baton-5m-draft", "tls.mode=self-made")
    assert not of_kind(off, "StatefulSet") and "draft" not in data_of(off, "baton-decode")


def test_decode_workers_are_told_the_name_of_each(render: Render, tmp_path: Path) -> None:
    """A StatefulSet's pods have names below that of its headless Service; behind a name for all of
    them a sequence would come to another one with each connection."""
    objects = render(*DRAFTS, release="mine")
    (owner,) = of_kind(objects, "StatefulSet").values()
    service = of_kind(objects, "Service")[owner["spec"]["serviceName"]]
    name = owner["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    # Who loads is asked, too, and says no; a name that is missing is missed for half a minute.
    assert service["spec"]["publishNotReadyAddresses"] is True
    told = loaded(objects, f"StatefulSet/{name}", "worker", tmp_path)
    port = int(told.listen.rpartition(":")[2])
    host = f"{service['metadata']['name']}.{NAMESPACE}.svc:{port}"
    decode = loaded(objects, "Deployment/mine-baton-decode", "worker", tmp_path)
    assert decode.engine.speculation.draft_workers == tuple(
        f"{name}-{index}.{host}" for index in range(owner["spec"]["replicas"])
    )
    assert len(decode.engine.speculation.draft_workers) == 3
    prefill = loaded(objects, "Deployment/mine-baton-prefill", "worker", tmp_path)
    assert not prefill.engine.speculation.is_on
    ports = containers(pod_specs(objects)[f"StatefulSet/{name}"])["worker"]["ports"]
    assert port in [each["containerPort"] for each in ports]
    assert [each["port"] for each in service["spec"]["ports"]] == [port]


def test_what_else_a_user_says_of_guessing_stays(render: Render, tmp_path: Path) -> None:
    objects = render(*DRAFTS, "decode.settings.engine.speculation.draft_deadline_s=1")
    told = loaded(objects, "Deployment/baton-decode", "worker", tmp_path).engine.speculation
    assert told.draft_deadline_s == 1 and len(told.draft_workers) == 3


def test_another_number_of_them_makes_new_decode_workers(render: Render) -> None:
    """They read their settings once."""

    def sums(num_drafts: int) -> dict[str, str]:
        objects = render(f"draft.replicas={num_drafts}", "draft.model=baton-5m-draft")
        owners = {**of_kind(objects, "Deployment"), **of_kind(objects, "StatefulSet")}
        return {
            name: each["spec"]["template"]["metadata"]["annotations"].get("checksum/config")
            for name, each in owners.items()
        }

    before, after = sums(3), sums(1)
    assert [name for name in before if before[name] != after[name]] == ["baton-decode"]


def test_on_gpus(render: Render, tmp_path: Path) -> None:
    objects = render(*MATRIX["drafts"])
    pod = pod_specs(objects)["StatefulSet/baton-draft"]
    worker = containers(pod)["worker"]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert worker["image"] == "baton/worker-cuda:0.1.0"
    assert pod["nodeSelector"] == {"accelerator": "l4"} and pod["priorityClassName"] == "spare"
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    told = loaded(objects, "StatefulSet/baton-draft", "worker", tmp_path)
    assert (told.engine.device, told.engine.model) == ("cuda", "Qwen/Qwen3-0.6B")
    assert told.engine.speculation.max_num_nodes == 8 and told.engine.num_threads == 0
    assert told.worker_id == "baton-1"
    environment = {each["name"]: each.get("value") for each in worker["env"]}
    assert environment["HF_TOKEN_PATH"] == "/etc/baton/hub/token"
    on_cpu = render(*DRAFTS)
    told = loaded(on_cpu, "StatefulSet/baton-draft", "worker", tmp_path)
    assert (told.engine.device, told.engine.num_threads) == ("cpu", 1)


@pytest.mark.parametrize(
    ("values", "folder", "volume"),
    [
        (MATRIX["drafts_pvc"], "small", {"claimName": "models", "readOnly": True}),
        (
            (*MATRIX["drafts_pvc"], "draft.pvc.claimName=others"),
            "small",
            {"claimName": "others", "readOnly": True},
        ),
        (
            (
                *("model.source=image", "model.name=mine", "model.image.reference=r/m:1"),
                *("draft.replicas=1", "draft.model=small", "draft.image.reference=r/d:1"),
            ),
            "",
            {"reference": "r/d:1", "pullPolicy": "IfNotPresent"},
        ),
    ],
)
def test_its_model_is_not_the_one_that_is_served(
    render: Render, tmp_path: Path, values: tuple[str, ...], folder: str, volume: dict[str, str]
) -> None:
    objects = render(*values)
    pod = pod_specs(objects)["StatefulSet/baton-draft"]
    (mount,) = [
        each for each in containers(pod)["worker"]["volumeMounts"] if each["name"] == "models"
    ]
    told = loaded(objects, "StatefulSet/baton-draft", "worker", tmp_path)
    assert told.engine.model == mount["mountPath"] == "/models/small" and mount["readOnly"]
    assert mount.get("subPath", "") == folder
    (found,) = [each for each in pod["volumes"] if each["name"] == "models"]
    assert found.get("persistentVolumeClaim", found.get("image")) == volume
    decode = loaded(objects, "Deployment/baton-decode", "worker", tmp_path)
    assert decode.engine.model == "/models/mine"


def test_it_is_shown_its_own_certificate_and_no_password(render: Render) -> None:
    objects = render(*MATRIX["drafts_pvc"])
    made = of_kind(objects, "Certificate")["baton-tls-draft"]["spec"]
    assert made["uris"] == [PeerRole.DRAFT.uri] and made["dnsNames"] == [PeerRole.DRAFT.server_name]
    assert of_kind(objects, "Secret")["baton-redis"]
    volumes = pod_specs(objects)["StatefulSet/baton-draft"]["volumes"]
    secrets = [each["secret"]["secretName"] for each in volumes if "secret" in each]
    assert secrets == [made["secretName"]] == ["baton-tls-draft"]


def test_one_at_a_time_is_taken_away_and_all_are_watched(render: Render) -> None:
    objects = render(*DRAFTS, "monitoring.podMonitor.enabled=true", "draft.maxUnavailable=2")
    (owner,) = of_kind(objects, "StatefulSet").values()
    labels = owner["spec"]["template"]["metadata"]["labels"]
    budget = of_kind(objects, "PodDisruptionBudget")["baton-draft"]["spec"]
    assert budget["maxUnavailable"] == 2
    assert budget["selector"]["matchLabels"].items() <= labels.items()
    monitor = of_kind(objects, "PodMonitor")["baton-monitoring"]["spec"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    watched = [each["port"] for each in monitor["podMetricsEndpoints"]]
    (worker,) = owner["spec"]["template"]["spec"]["containers"]
    (metrics,) = [each for each in worker["ports"] if each["name"] in watched]
    assert metrics["containerPort"] == 9100
    default = of_kind(render(*DRAFTS), "PodDisruptionBudget")["baton-draft"]
    assert default["spec"]["maxUnavailable"] == 1


def test_they_go_with_multi_step_and_take_the_weights_dtype(render: Render, tmp_path: Path) -> None:
    objects = render(
        *DRAFTS,
        "decode.settings.engine.speculation.acceptance=multi_step",
        "draft.settings.engine.weight_dtype=fp8_e4m3",
    )
    decode = loaded(objects, "Deployment/baton-decode", "worker", tmp_path).engine.speculation
    assert decode.acceptance == "multi_step" and len(decode.draft_workers) == 3
    draft = loaded(objects, "StatefulSet/baton-draft", "worker", tmp_path)
    assert draft.engine.weight_dtype == "fp8_e4m3"
