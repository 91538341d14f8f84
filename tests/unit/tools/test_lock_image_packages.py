"""Locks of the images agree with what the project asks for and with what its tests passed with."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tools import lock_image_packages
from tools.lock_image_packages import LOCKS, PLATFORMS, Lock, LockError

ROOT = Path(__file__).resolve().parents[3]
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^ ;\\]+)")


def _pins(text: str) -> dict[str, Version]:
    found = (_PIN.match(line) for line in text.splitlines())
    return {canonicalize_name(pin[1]): Version(pin[2]) for pin in found if pin}


def _lock(name: str) -> dict[str, Version]:
    return _pins((ROOT / "images" / f"{name}.lock").read_text())


def _asked(lock: Lock) -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = list(project["dependencies"])
    for extra in lock.extras:
        lines += project["optional-dependencies"][extra]
    asked = [Requirement(line) for line in lines]
    here = {"sys_platform": "linux", "python_version": lock_image_packages.PYTHON_VERSION}
    return [each for each in asked if each.marker is None or each.marker.evaluate(here)]


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_a_lock_holds_all_that_its_image_asks_for(lock: Lock) -> None:
    pins = _lock(lock.name)
    for each in _asked(lock):
        name = canonicalize_name(each.name)
        assert name in pins, f"{name}: run tools/lock_image_packages.py"
        assert each.specifier.contains(pins[name]), f"{name}: run tools/lock_image_packages.py"


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_a_lock_has_the_versions_that_the_tests_passed_with(lock: Lock) -> None:
    tested = _pins((ROOT / "constraints.txt").read_text())
    # CUDA's torch names its own triton; the tests' is for the interpreter on CPU.
    tested.pop("triton")
    differing = {
        name: (str(version), str(tested[name]))
        for name, version in _lock(lock.name).items()
        if name in tested and version.public != tested[name].public
    }
    assert not differing, f"{differing}: run tools/lock_image_packages.py"


@pytest.mark.parametrize("name", [*(lock.name for lock in LOCKS), "build"])
def test_every_package_of_a_lock_has_hashes(name: str) -> None:
    entries = re.split(r"\n(?=[A-Za-z0-9])", (ROOT / "images" / f"{name}.lock").read_text())
    packages = [entry for entry in entries if _PIN.match(entry)]
    assert packages
    bare = [entry for entry in packages if "--hash=sha256:" not in entry]
    assert not bare
    assert not [line for entry in entries for line in entry.splitlines() if "://" in line]


def test_the_control_image_has_no_torch_and_the_worker_without_cuda_no_cuda() -> None:
    assert not _lock("control").keys() & {"torch", "transformers", "triton"}
    assert _lock("worker-cpu")["torch"].local == "cpu"
    assert not [name for name in _lock("worker-cpu") if name.startswith(("nvidia-", "cuda-"))]
    assert _lock("worker-cuda")["torch"].local is None
    assert "nvidia-cublas" in _lock("worker-cuda")


def test_what_an_image_goes_without_is_asked_for_by_others_only() -> None:
    """A package of our own list that is left out would be missed at run time."""
    for lock in LOCKS:
        assert not {each.name for each in _asked(lock)} & set(lock.without)
        assert not _lock(lock.name).keys() & set(lock.without)
    assert Marker("sys_platform == 'none'").evaluate() is False


def test_the_locks_are_for_the_python_of_the_base_image() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert "ARG BASE_IMAGE=debian:bookworm-" in dockerfile  # its python3 is 3.11
    assert lock_image_packages.PYTHON_VERSION == "3.11"
    assert f"libpython{lock_image_packages.PYTHON_VERSION}-dev" in dockerfile


def _platforms(name: str) -> set[str]:
    (line,) = re.findall(r"^# For (.*)\.$", (ROOT / "images" / f"{name}.lock").read_text(), re.M)
    return set(line.split(" and "))


def test_locks_are_for_both_kinds_of_machines() -> None:
    """torch without CUDA has an index of its own; without it, its lock is for what was at hand."""
    assert _platforms("control") == _platforms("worker-cuda") == set(PLATFORMS)
    assert "linux/amd64" in _platforms("worker-cpu") <= set(PLATFORMS)


def test_a_lock_is_for_the_platforms_that_a_folder_has_torch_for(tmp_path: Path) -> None:
    cpu = next(lock for lock in LOCKS if lock.is_cpu)
    control = next(lock for lock in LOCKS if not lock.is_cpu)
    with pytest.raises(LockError, match="no wheel of torch"):
        lock_image_packages.platforms_of(cpu, str(tmp_path))
    for machine, platforms in {"x86_64": ("linux/amd64",), "aarch64": tuple(PLATFORMS)}.items():
        (tmp_path / f"torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_{machine}.whl").touch()
        assert lock_image_packages.platforms_of(cpu, str(tmp_path)) == platforms
    assert lock_image_packages.platforms_of(cpu, "") == tuple(PLATFORMS)
    assert lock_image_packages.platforms_of(control, "/nowhere") == tuple(PLATFORMS)


def test_no_lock_is_written_of_which_platforms_differ() -> None:
    text = "a==1 \\\n    --hash=sha256:00\n"
    assert lock_image_packages.the_same(dict.fromkeys(PLATFORMS, text)) == text
    with pytest.raises(LockError, match=r"\+b==1"):
        lock_image_packages.the_same({"linux/amd64": text, "linux/arm64": text + "b==1\n"})
