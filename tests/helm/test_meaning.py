"""What the chart says to each process: settings that it takes, times that fit together, memory that
suffices, and peers that may meet."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.config import KvStoreSettings
from process import settings, signing_keys
from services.autoscaler.config import AutoscalerSettings
from services.draft.config import DraftSettings
from services.router.config import RouterSettings
from services.worker.config import WorkerSettings
from tests.helm.conftest import (
    CHART,
    KUBERNETES,
    Objects,
    Render,
    containers,
    data_of,
    num_bytes,
    num_cores,
    of_kind,
    pod_specs,
)
from tests.helm.test_rendered import MATRIX

CLASSES: dict[str, Any] = {
    "router": RouterSettings,
    "prefill": WorkerSettings,
    "decode": WorkerSettings,
    "draft": DraftSettings,
    "kvstore": KvStoreSettings,
    "autoscaler": AutoscalerSettings,
}
# What a pod's environment has.
ENVIRONMENT = {"$(POD_NAME)": "baton-1", "$(POD_IP)": "10.0.0.7", "$(HOST_IP)": "192.168.1.7"}


def loaded(objects: Objects, pod_name: str, container: str, folder: Path) -> Any:
    """The settings of one container, read by its own class from what the pod has."""
    pod = pod_specs(objects)[pod_name]
    spec = containers(pod)[container]
    maps = [volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume]
    files, overrides, component = [], [], ""
    for argument in spec["args"]:
        option, _, value = argument.partition("=")
        for name, known in ENVIRONMENT.items():
            value = value.replace(name, known)
        assert "$(" not in value, "a variable that no pod has"
        if option == "--config" and "/config/" in value:
            path = folder / Path(value).name
            component = path.stem
            path.write_text(data_of(objects, maps[0])[path.name])
            files.append(path)
        elif option == "--config":
            secret = of_kind(objects, "Secret").get("baton-keys")
            if secret is not None:
                path = folder / Path(value).name
                path.write_bytes(base64.b64decode(secret["data"][path.name]))
                files.append(path)
        elif option == "--set":
            overrides.append(value)
    settings.refuse_secrets(overrides)
    return settings.load(CLASSES[component], files=files, overrides=overrides)


def processes(objects: Objects) -> list[tuple[str, str]]:
    """(pod, container) of each process of ours with settings."""
    return [
        (name, each["name"])
        for name, pod in pod_specs(objects).items()
        for each in containers(pod).values()
        if any(argument.startswith("--config=") for argument in each.get("args", []))
    ]


@pytest.mark.parametrize("name", sorted(MATRIX))
def test_every_process_takes_its_settings(render: Render, tmp_path: Path, name: str) -> None:
    """Each by the class that it loads them with, wherever the chart puts them together."""
    objects = render(*MATRIX[name])
    found = processes(objects)
    stores = {"daemonset": 1, "daemonset_huge_pages": 1, "no_store": 0}.get(name, 2)
    assert len([each for each in found if each[1] == "kvstore"]) == stores
    made = {each: loaded(objects, *each, tmp_path) for each in found}
    for (pod, container), told in made.items():
        mounts = containers(pod_specs(objects)[pod])[container]["volumeMounts"]
        folders = [Path(mount["mountPath"]) for mount in mounts]
        for file in _files(told):
            assert Path(file).parent in folders, (pod, container, file)
        assert not told.tls.is_on or told.tls.ca_file
        assert told.metrics_listen.startswith("0.0.0.0:")


def _files(told: Any) -> list[str]:
    groups = [told, told.tls, *(getattr(told, name, None) for name in ("redis", "client_tls"))]
    return [
        value
        for group in groups
        if group is not None
        for key, value in vars(group).items()
        if key.endswith("_file") and value
    ]


def test_what_workers_and_stores_say_of_themselves(render: Render, tmp_path: Path) -> None:
    objects = render()
    worker = loaded(objects, "Deployment/baton-decode", "worker", tmp_path)
    store = loaded(objects, "Deployment/baton-decode", "kvstore", tmp_path)
    router = loaded(objects, "Deployment/baton-router", "router", tmp_path)
    # Handles name the store: others must reach it under the same address.
    assert worker.store_address == store.advertise == "10.0.0.7:8520"
    assert (worker.worker_id, worker.advertised) == ("baton-1", "10.0.0.7:8510")
    assert worker.engine.model == router.model == "baton-5m"
    assert len(router.tenant_secret) == 48
    assert store.capacity_bytes == 256 * 2**20
    secret = of_kind(objects, "Secret")["baton-keys"]["data"]["handle-keys"]
    assert len(signing_keys.parse(base64.b64decode(secret).decode(), where="")) == 1


def test_a_user_s_settings_reach_their_process_whole(render: Render, tmp_path: Path) -> None:
    """Numbers keep their kind: helm has read each as a float."""
    values = tmp_path / "values.yaml"
    values.write_text(
        "decode: {settings: {engine: {kv_bytes: 34359738368, memory_share: 0.85},"
        ' adapters: ["a=/x", "b=/y"], link_floor_bytes_per_s: 5.0e+9}}\n'
        'router: {settings: {tenant_scopes: ["a=\\"s\\\\"], times: {poll_interval_s: 1}}}\n'
    )
    objects = render(files=(values,))
    worker = loaded(objects, "Deployment/baton-decode", "worker", tmp_path)
    assert (worker.engine.kv_bytes, worker.engine.memory_share) == (32 * 2**30, 0.85)
    assert worker.adapters == ("a=/x", "b=/y") and worker.link_floor_bytes_per_s == 5e9
    assert worker.engine.num_threads == 1  # the chart's, beside the user's
    with pytest.raises(settings.SettingsError, match="tenant_scopes"):
        loaded(objects, "Deployment/baton-router", "router", tmp_path)


def test_the_grace_period_covers_the_end(render: Render, tmp_path: Path) -> None:
    """Or the kubelet kills what is still being handed over."""
    for values in (
        (),
        ("decode.drainSeconds=600", "kvstore.drainSeconds=30", "router.preStopSeconds=15"),
        ("kvstore.placement=daemonset", "kvstore.drainSeconds=90", "kvstore.allowPlaintext=true"),
        ("draft.replicas=1", "draft.model=baton-5m-draft", "draft.drainSeconds=30"),
    ):
        objects = render(*values)
        for name, container in processes(objects):
            pod = pod_specs(objects)[name]
            if container == "kvstore" and "Deployment" in name:
                continue  # counted with its worker
            told = loaded(objects, name, container, tmp_path)
            group = getattr(told, "limits", None) if container == "worker" else None
            drain_s = getattr(group or getattr(told, "times", told), "drain_s", 0)
            hook = containers(pod)[container].get("lifecycle", {}).get("preStop")
            drain_s += float(hook["exec"]["command"][1]) if hook else 0
            if container == "worker" and "initContainers" in pod:
                store = loaded(objects, name, "kvstore", tmp_path)
                drain_s += store.drain_s + store.stop_timeout_s
            assert pod["terminationGracePeriodSeconds"] >= drain_s + 10, name


@pytest.mark.parametrize("values", [(), ("router.settings.times.poll_interval_s=20",)])
def test_a_new_worker_is_known_before_an_old_one_is_told_to_end(
    render: Render, tmp_path: Path, values: tuple[str, ...]
) -> None:
    """Ready means registered; routers look only so often. Seen on a cluster: 6 of 100 requests
    found no prefill worker while one was replaced."""
    objects = render(*values)
    router = loaded(objects, "Deployment/baton-router", "router", tmp_path)
    look_s = router.times.poll_interval_s + router.times.redis_timeout_s
    for role in ("prefill", "decode"):
        spec = of_kind(objects, "Deployment")[f"baton-{role}"]["spec"]
        assert spec["minReadySeconds"] >= look_s + 2  # and 2 s for both to have been late
        assert spec["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


def test_probes(render: Render) -> None:
    drafts = ("draft.replicas=1", "draft.model=baton-5m-draft")
    objects = render("prefill.startupSeconds=3600", "scaling.by=autoscaler", *drafts)
    for name, container in processes(objects):
        spec = containers(pod_specs(objects)[name])[container]
        alive = spec["livenessProbe"]
        assert alive["httpGet"]["path"] == "/livez"
        # Nobody is restarted for being slow: 3 s were seen with seven busy processes a core.
        assert (
            min(alive["timeoutSeconds"], alive["periodSeconds"]) * alive["failureThreshold"] >= 60
        )
        for kind in ("startupProbe", "readinessProbe"):
            assert spec[kind]["httpGet"]["path"] == "/readyz"
    probe = containers(pod_specs(objects)["Deployment/baton-prefill"])["worker"]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 3600


def test_the_default_fits_a_small_machine(render: Render) -> None:
    """4 GiB and 2 cores, in sum of what is asked for and of what may be taken."""
    memory = cores = 0.0
    for name, pod in pod_specs(render()).items():
        if name.startswith("Pod/"):
            continue  # `helm test`
        for container in containers(pod).values():
            resources = container["resources"]
            assert num_bytes(resources["requests"]["memory"]) <= num_bytes(
                resources["limits"]["memory"]
            )
            memory += num_bytes(resources["limits"]["memory"])
            cores += num_cores(resources["requests"]["cpu"])
    assert memory <= 4 * 2**30
    assert cores <= 2


def test_the_slab_is_one_folder_of_both_and_its_memory_is_counted(
    render: Render, tmp_path: Path
) -> None:
    objects = render("kvstore.capacity=3Gi", "prefill.shmSizeLimit=1Gi")
    pod = pod_specs(objects)["Deployment/baton-prefill"]
    (store,) = pod["initContainers"]
    (worker,) = pod["containers"]
    assert store["restartPolicy"] == "Always"
    told = loaded(objects, "Deployment/baton-prefill", "kvstore", tmp_path)
    for container in (store, worker):
        (mount,) = [each for each in container["volumeMounts"] if each["name"] == "shm"]
        assert mount["mountPath"] == told.slab_dir
    (volume,) = [each for each in pod["volumes"] if each["name"] == "shm"]
    assert volume["emptyDir"]["medium"] == "Memory"
    assert num_bytes(volume["emptyDir"]["sizeLimit"]) == 4 * 2**30
    # What the store takes in that folder counts as the store's memory.
    limit = num_bytes(store["resources"]["limits"]["memory"])
    assert limit == told.capacity_bytes + 128 * 2**20 == 3 * 2**30 + 128 * 2**20


def test_gpus(render: Render, tmp_path: Path) -> None:
    objects = render(*MATRIX["gpu_hub"])
    pod = pod_specs(objects)["Deployment/baton-decode"]
    worker = containers(pod)["worker"]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert worker["image"] == "baton/worker-cuda:0.1.0"
    assert containers(pod)["kvstore"]["image"] == "baton/control:0.1.0"
    told = loaded(objects, "Deployment/baton-decode", "worker", tmp_path)
    assert (told.engine.device, told.engine.num_threads) == ("cuda", 0)
    assert pod["nodeSelector"] == {"accelerator": "h100"}
    names = [each["name"] for each in worker["env"]]
    assert len(set(names)) == len(names)
    environment = {each["name"]: each.get("value") for each in worker["env"]}
    assert pod["runtimeClassName"] == "nvidia" and environment["NCCL_DEBUG"] == "WARN"
    assert environment["HF_ENDPOINT"] == "https://hub.example.com"
    assert environment["HF_TOKEN_PATH"] == "/etc/baton/hub/token"
    assert "HF_TOKEN" not in environment  # a file: environments are shown by many tools
    nixl = pod_specs(render(*MATRIX["gpu_nixl"]))["Deployment/baton-decode"]
    assert containers(nixl)["kvstore"]["image"] == "baton/worker-cuda:0.1.0"


@pytest.mark.parametrize(("source", "folder"), [("pvc", "/models/mine"), ("image", "/models/mine")])
def test_a_mounted_model_is_called_by_its_folder(
    render: Render, tmp_path: Path, source: str, folder: str
) -> None:
    objects = render(*MATRIX[source])
    for name in ("router", "prefill", "decode"):
        container = "router" if name == "router" else "worker"
        told = loaded(objects, f"Deployment/baton-{name}", container, tmp_path)
        assert (told.model if name == "router" else told.engine.model) == folder
        spec = containers(pod_specs(objects)[f"Deployment/baton-{name}"])[container]
        (mount,) = [each for each in spec["volumeMounts"] if each["name"] == "models"]
        assert mount["mountPath"] == folder and mount["readOnly"]


def test_who_scales_is_told_what_the_chart_made(render: Render, tmp_path: Path) -> None:
    objects = render(
        "scaling.by=autoscaler",
        "scaling.prefill.min=0",
        "scaling.decode.min=0",
        "scaling.decode.max=7",
        "decode.gpus=1",
        release="mine",
    )
    told = loaded(objects, "Deployment/mine-baton-autoscaler", "autoscaler", tmp_path)
    deployments = of_kind(objects, "Deployment")
    assert told.kubernetes.prefill_deployment in deployments
    assert told.kubernetes.decode_deployment in deployments
    assert told.kubernetes.namespace == "models" and told.act
    assert told.plan.limits.decode.max_workers == 7 and told.plan.limits.scales_to_zero
    (scale,) = [
        rule
        for rule in of_kind(objects, "Role")["mine-baton-autoscaler"]["rules"]
        if rule["resources"] == ["deployments/scale"]
    ]
    assert set(scale["resourceNames"]) == {
        told.kubernetes.prefill_deployment,
        told.kubernetes.decode_deployment,
    }
    router = loaded(objects, "Deployment/mine-baton-router", "router", tmp_path)
    assert router.hold_without_workers_s >= 900  # while one starts
    advising = render("scaling.by=keda")
    told = loaded(advising, "Deployment/baton-autoscaler", "autoscaler", tmp_path)
    assert not told.act
    for each in of_kind(advising, "ScaledObject").values():
        host, _, port = each["spec"]["triggers"][0]["metadata"]["scalerAddress"].partition(":")
        service = of_kind(advising, "Service")[host.partition(".")[0]]
        assert int(port) == service["spec"]["ports"][0]["port"]


def test_network_policies_let_through_what_is_dialled(render: Render) -> None:
    drafts = ("draft.replicas=1", "draft.model=baton-5m-draft")
    objects = render("scaling.by=autoscaler", *drafts)
    policies = of_kind(objects, "NetworkPolicy")
    for source, target, port in (
        ("router", "prefill", 8510),
        ("router", "decode", 8520),
        ("decode", "prefill", 8510),  # a lender
        ("decode", "prefill", 8520),  # its store
        ("prefill", "decode", 8520),
        ("autoscaler", "decode", 8510),
        ("router", "redis", 6379),
        ("prefill", "redis", 6379),
        ("autoscaler", "redis", 6379),
        ("decode", "draft", 8540),
        ("stranger", "draft", 9100),  # metrics
    ):
        assert _lets(policies[f"baton-{target}"], source, port), (source, target, port)
    for source in ("router", "prefill", "kvstore", "autoscaler", "draft", "stranger"):
        assert not _lets(policies["baton-draft"], source, 8540), source
    for target, port in (("prefill", 8510), ("decode", 8510), ("decode", 8520), ("redis", 6379)):
        assert not _lets(policies[f"baton-{target}"], "draft", port), target
    assert not _lets(policies["baton-redis"], "stranger", 6379)
    assert not _lets(policies["baton-decode"], "redis", 8510)
    assert _lets(policies["baton-router"], "stranger", 8500)
    closed = render("networkPolicy.clientsFrom[0].podSelector.matchLabels.app=web")
    assert not _lets(of_kind(closed, "NetworkPolicy")["baton-router"], "stranger", 8500)


def _lets(policy: dict[str, Any], component: str, port: int) -> bool:
    """Whether a pod of ours of that component may connect."""
    for rule in policy["spec"]["ingress"]:
        ports = [each["port"] for each in rule.get("ports", [])]
        peers = rule.get("from")
        if ports and port not in ports:
            continue
        if peers is None:
            return True
        for peer in peers:
            labels = peer.get("podSelector", {}).get("matchLabels", {})
            if labels.get("app.kubernetes.io/component") == component:
                return True
    return False


def test_a_change_of_settings_makes_new_pods_and_only_those(render: Render) -> None:
    def sums(objects: Objects) -> dict[str, str]:
        return {
            name: each["spec"]["template"]["metadata"]["annotations"]["checksum/config"]
            for name, each in of_kind(objects, "Deployment").items()
        }

    before = sums(render())
    after = sums(render("decode.settings.engine.max_num_running=8"))
    assert [name for name in before if before[name] != after[name]] == ["baton-decode"]
    after = sums(render("kvstore.settings.max_lease_s=100"))
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"baton-prefill", "baton-decode"}  # whose sidecar it is


def test_notes_say_what_to_type(helm: Callable[..., str], tmp_path: Path) -> None:
    """helm shows them only of what it installs; here they are put into an object."""
    chart = tmp_path / "baton"
    shutil.copytree(CHART, chart)
    notes = (chart / "templates" / "NOTES.txt").read_text()
    lines = "".join(f"  {line}\n" for line in notes.splitlines())
    (chart / "templates" / "notes.yaml").write_text(f"kind: Notes\ntext: |\n{lines}")

    def told(*values: str) -> str:
        options = [option for value in values for option in ("--set", value)]
        only = ("--show-only", "templates/notes.yaml", "--namespace", "models")
        return helm("template", "baton", str(chart), "--kube-version", KUBERNETES, *only, *options)

    plain = told()
    assert "port-forward service/baton-router" in plain and "helm test baton" in plain
    assert "in the clear" in plain and "without a key" in plain and "'content-type" in plain
    assert "secrets.existingSecret" in plain  # rendered without a cluster
    assert "draft" not in plain
    drafts = told("draft.replicas=2", "draft.model=baton-5m-draft")
    assert "baton-5m-draft by 2 draft workers" in drafts and "statefulset/baton-draft" in drafts
    closed = told("clients.apiKeysSecret=k", "clients.tlsSecret=t", "tls.mode=self-made")
    assert "https://localhost:8501" in closed and "authorization: Bearer" in closed
    assert "in the clear" not in closed and "without a key" not in closed
    idle = ("scaling.prefill.min=0", "scaling.decode.min=0")
    assert "router.drainSeconds" in told("scaling.by=autoscaler", *idle)
    assert "router.drainSeconds" not in told("scaling.by=autoscaler")
    assert "router.drainSeconds" not in told("scaling.by=keda", *idle, "router.drainSeconds=900")


@pytest.mark.parametrize("password", ["plain", 'with "quotes" and \\back\\slashes', "$(id) `id`"])
def test_redis_is_the_process_that_is_told_to_end(
    render: Render, tmp_path: Path, password: str
) -> None:
    """A shell in front of it would swallow the signal, and the kubelet kill both. It gets the
    password in a file that nobody else may read, whatever is in it."""
    spec = containers(pod_specs(render())["Deployment/baton-redis"])["redis"]
    (tmp_path / "password").write_text(password)
    (tmp_path / "redis.conf").write_text(data_of(render(), "baton-redis")["redis.conf"])
    told = tmp_path / "redis-server"
    told.write_text(f'#!/bin/sh\necho "$$" "$@" > {tmp_path}/told\ncp -p "$1" {tmp_path}/seen\n')
    told.chmod(0o755)
    script = spec["args"][0]
    for mounted, here in (
        ("/tmp/", f"{tmp_path}/made-"),  # first: that of the test may lie there
        ("/etc/baton/redis/password", tmp_path / "password"),
        ("/etc/baton/config/redis.conf", tmp_path / "redis.conf"),
    ):
        assert mounted in script
        script = script.replace(mounted, str(here))
    process = subprocess.Popen(
        [*spec["command"], script], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}
    )
    assert process.wait(30) == 0
    pid, *arguments = (tmp_path / "told").read_text().split()
    assert int(pid) == process.pid
    assert password not in arguments
    assert (tmp_path / "seen").stat().st_mode & 0o077 == 0
    *_, last = (tmp_path / "seen").read_text().splitlines()
    escaped = password.replace("\\", "\\\\").replace('"', '\\"')
    assert last == f'requirepass "{escaped}"'


@pytest.mark.parametrize(
    ("is_renewed", "answers", "is_alive"),
    [(False, True, True), (True, True, False), (False, False, False)],
)
def test_redis_with_an_old_certificate_is_not_alive(
    render: Render, tmp_path: Path, is_renewed: bool, answers: bool, is_alive: bool
) -> None:
    """It reads its certificate once: only a restart gives it the new one."""
    objects = render("tls.mode=self-made")
    spec = containers(pod_specs(objects)["Deployment/baton-redis"])["redis"]
    command = spec["livenessProbe"]["exec"]["command"]
    for name, age_s in (("tls.crt", 10 if is_renewed else 30), ("redis.conf", 20)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1e9 - age_s, 1e9 - age_s))
    asked = tmp_path / "redis-cli"
    asked.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\nexit {int(not answers)}\n')
    asked.chmod(0o755)
    script = command[-1]
    for mounted, here in (("/tmp/", f"{tmp_path}/"), ("/etc/baton/tls/", f"{tmp_path}/")):
        assert mounted in command[-1]
        script = script.replace(mounted, here)
    told = subprocess.run(
        [*command[:-1], script], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=False
    )
    assert (told.returncode == 0) == is_alive
    if not is_renewed:
        assert "--tls" in (tmp_path / "asked").read_text().split()
    plain = containers(pod_specs(render())["Deployment/baton-redis"])["redis"]
    assert "tcpSocket" in plain["livenessProbe"]
