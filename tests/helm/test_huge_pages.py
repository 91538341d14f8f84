"""A store on huge pages: what Kubernetes is asked for is what the store takes, and where."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helm.conftest import Refused, Render, containers, num_bytes, of_kind, pod_specs
from tests.helm.test_meaning import loaded
from tests.helm.test_rendered import MATRIX


def test_a_sidecar_asks_for_just_the_pages_that_its_store_takes(
    render: Render, tmp_path: Path
) -> None:
    objects = render(
        "kvstore.hugepages=1Gi", "kvstore.capacity=3Gi", "prefill.shmSizeLimit=1Gi", release="mine"
    )
    pod = pod_specs(objects)["Deployment/mine-baton-prefill"]
    (store,) = pod["initContainers"]
    (worker,) = pod["containers"]
    told = loaded(objects, "Deployment/mine-baton-prefill", "kvstore", tmp_path)
    assert told.capacity_bytes == 3 * 2**30
    for kind in ("requests", "limits"):  # Kubernetes takes no other
        assert num_bytes(store["resources"][kind]["hugepages-1Gi"]) == told.capacity_bytes
        # Huge pages are no part of a container's memory.
        assert num_bytes(store["resources"][kind]["memory"]) == 128 * 2**20
    # A worker maps pages that the store has taken: it needs none of its own.
    assert not [name for name in worker["resources"]["limits"] if name.startswith("hugepages")]
    for container in (store, worker):
        (mount,) = [each for each in container["volumeMounts"] if each["name"] == "slab"]
        assert mount["mountPath"] == told.slab_dir and not mount.get("readOnly")
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert volumes["slab"] == {"name": "slab", "emptyDir": {"medium": "HugePages-1Gi"}}
    # What processes of one model share stays in ordinary memory, without the blocks' room.
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    assert num_bytes(volumes["shm"]["emptyDir"]["sizeLimit"]) == 2**30
    assert "shm" not in [each["name"] for each in store["volumeMounts"]]
    assert pod["securityContext"]["fsGroup"] == 65532  # the mount is root's else


def test_a_store_of_the_node_lies_on_the_node_s_mount(render: Render, tmp_path: Path) -> None:
    objects = render(*MATRIX["daemonset_huge_pages"])
    told = loaded(objects, "DaemonSet/baton-kvstore", "kvstore", tmp_path)
    store = containers(pod_specs(objects)["DaemonSet/baton-kvstore"])["kvstore"]
    assert num_bytes(store["resources"]["limits"]["hugepages-1Gi"]) == told.capacity_bytes
    for name, container in (
        ("DaemonSet/baton-kvstore", "kvstore"),
        ("Deployment/baton-prefill", "worker"),
        ("Deployment/baton-decode", "worker"),
    ):
        pod = pod_specs(objects)[name]
        (mount,) = [
            each for each in containers(pod)[container]["volumeMounts"] if each["name"] == "slab"
        ]
        assert mount["mountPath"] == told.slab_dir  # workers are told the file's path
        (volume,) = [each for each in pod["volumes"] if each["name"] == "slab"]
        assert volume["hostPath"] == {"path": "/dev/hugepages/baton", "type": "Directory"}
    worker = pod_specs(objects)["Deployment/baton-decode"]
    (shm,) = [each for each in worker["volumes"] if each["name"] == "shm"]
    assert shm["emptyDir"]["medium"] == "Memory"


def test_without_the_value_nothing_asks_for_them(render: Render) -> None:
    for name, values in MATRIX.items():
        assert ("hugepages-" in str(render(*values))) == ("huge_pages" in name), name
    assert of_kind(render("kvstore.hugepages="), "Deployment") == of_kind(render(), "Deployment")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            ["kvstore.hugepages=1Gi"],
            "kvstore.capacity: 256Mi is no whole number of pages of 1Gi",
        ),
        (
            ["kvstore.hugepages=2Mi", "kvstore.capacity=3000k"],
            "kvstore.capacity: 3000k is no whole number of pages of 2Mi",
        ),
        (
            ["kvstore.hugepages=2Mi", "kvstore.placement=none"],
            "kvstore.hugepages: 2Mi, but kvstore.placement=none",
        ),
        (
            [
                "kvstore.hugepages=2Mi",
                "kvstore.placement=daemonset",
                "kvstore.allowPlaintext=true",
            ],
            "kvstore.hostPath: /dev/shm has no huge pages",
        ),
        (
            ["kvstore.hugepages=2Mi", "kvstore.resources.limits.hugepages-2Mi=1Gi"],
            "kvstore.resources.limits: hugepages-2Mi follows from",
        ),
    ],
)
def test_what_does_not_fit_huge_pages_is_named(
    render: Render, values: list[str], message: str
) -> None:
    with pytest.raises(Refused) as told:
        render(*values)
    assert f"baton: {message}" in str(told.value).splitlines()[0]


def test_only_sizes_that_nodes_have_are_taken(render: Render) -> None:
    with pytest.raises(Refused, match=r"kvstore\.hugepages must be one of the following"):
        render("kvstore.hugepages=4Mi")
