"""What the Dockerfile promises: pinned, not root, nothing secret in the context, a health check."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINES = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text()).splitlines()
TARGETS = ("control", "worker-cpu", "worker-cuda")


def _stage(name: str) -> list[str]:
    """The instructions of one stage, those of the stages that it is made from first."""
    start = next(i for i, line in enumerate(LINES) if line.endswith(f" AS {name}"))
    end = next((i for i in range(start + 1, len(LINES)) if LINES[i].startswith("FROM ")), None)
    parent = LINES[start].split()[1]
    before = [] if parent.startswith("$") else _stage(parent)
    return [*before, *LINES[start:end]]


def test_the_base_image_is_pinned_by_digest() -> None:
    (base,) = [line for line in LINES if line.startswith("ARG BASE_IMAGE=")]
    assert re.search(r":bookworm-\d{8}-slim@sha256:[0-9a-f]{64}$", base)
    assert "ARG DEBIAN_OF_BASE_DAY=yes" in LINES
    others = [line.split()[1] for line in LINES if line.startswith("FROM ")]
    stages = {line.split()[-1] for line in LINES if line.startswith("FROM ")}
    assert set(others) <= stages | {"${BASE_IMAGE}"}


SOURCES = """Types: deb
# http://archive.test/debian/20260824T000000Z
URIs: http://mirror.test/debian
Suites: bookworm bookworm-updates

Types: deb
# http://archive.test/security/20260824T000000Z
URIs: http://mirror.test/security
Suites: bookworm-security
"""


@pytest.mark.parametrize("is_told", [True, False])
def test_debians_packages_are_of_the_base_images_day(tmp_path: Path, is_told: bool) -> None:
    """The image itself says where they lie; one that does not ends the build with a line."""
    sources = tmp_path / "debian.sources"
    sources.write_text(SOURCES if is_told else SOURCES.replace("# http", "# at http"))
    script = (ROOT / "images" / "install_packages.sh").read_text()
    choosing, _, _ = script.partition("export DEBIAN_FRONTEND")
    told = {"DEBIAN_OF_BASE_DAY": "yes", "DEBIAN_SOURCES": str(sources), "PATH": os.environ["PATH"]}
    ended = subprocess.run(
        ["sh", "-c", choosing], env=told, capture_output=True, text=True, check=False
    )
    if is_told:
        assert ended.returncode == 0, ended.stderr
        lines = sources.read_text().splitlines()
        assert [line for line in lines if line.startswith("URIs:")] == [
            "URIs: http://archive.test/debian/20260824T000000Z",
            "URIs: http://archive.test/security/20260824T000000Z",
        ]
        assert lines.count("Check-Valid-Until: no") == 2 and "Suites: bookworm-security" in lines
    else:
        assert ended.returncode == 1 and "DEBIAN_OF_BASE_DAY" in ended.stderr


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_runs_as_nobody_in_particular(target: str) -> None:
    stage = _stage(target)
    users = [line for line in stage if line.startswith("USER ")]
    assert users[-1] == "USER 65532:65532"
    assert stage.index(users[-1]) > max(
        i for i, line in enumerate(stage) if line.startswith(("RUN ", "COPY "))
    ), "nothing in it belongs to that user"


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_says_how_to_see_that_it_is_alive(target: str) -> None:
    (check,) = [line for line in _stage(target) if line.startswith("HEALTHCHECK ")]
    assert "/livez" in check
    assert "BATON_HEALTH_PORT" in check


@pytest.mark.parametrize("target", TARGETS)
def test_packages_come_by_hash_and_leave_no_cache(target: str) -> None:
    text = "\n".join(LINES)
    assert f"COPY images/{target}.lock" in text
    assert (ROOT / "images" / f"{target}.lock").is_file()
    installs = [line for line in LINES if "pip" in line and " install" in line]
    assert all("--require-hashes" in each or "--no-index" in each for each in installs)
    assert "--require-hashes" in (ROOT / "images" / "install_locked.sh").read_text()
    assert "PIP_NO_CACHE_DIR=1" in text


@pytest.mark.parametrize(("machine", "is_refused"), [("amd64", False), ("arm64", True)])
def test_a_lock_for_other_machines_is_refused_by_name(
    tmp_path: Path, machine: str, is_refused: bool
) -> None:
    """Not by a hash that is wrong, which would look like an attack."""
    lock = tmp_path / "worker-cpu.lock"
    lock.write_text("# Made by a tool.\n# For linux/amd64.\ntorch==2.13.0\n")
    dpkg = tmp_path / "dpkg"
    dpkg.write_text(f"#!/bin/sh\necho {machine}\n")
    dpkg.chmod(0o755)
    script = (ROOT / "images" / "install_locked.sh").read_text()
    checking, _, _ = script.partition("report=")
    ended = subprocess.run(
        ["sh", "-c", checking, "install-locked", str(lock)],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode != 0) is is_refused, ended.stderr
    assert ("worker-cpu.lock is not for linux/arm64" in ended.stderr) is is_refused


def test_the_hash_that_a_package_came_with_is_kept(tmp_path: Path) -> None:
    """Out of pip's report: of a file from an index, and of one from a folder as pip 23 tells it."""
    digests = {"indexed": "12" * 32, "local": "ab" * 32}
    told: list[dict[str, object]] = [
        {"hash": f"sha256={digests['indexed']}", "hashes": {"sha256": digests["indexed"]}},
        {"hash": f"sha256={digests['local']}"},
    ]
    report = {
        "install": [
            {
                "metadata": {"name": name, "version": "1.0+cpu", "license": "MIT"},
                "download_info": {"url": "https://index.test/x.whl", "archive_info": archive},
            }
            for name, archive in zip(digests, told, strict=True)
        ]
    }
    file = tmp_path / "report.json"
    file.write_text(json.dumps(report))
    script = (ROOT / "images" / "install_locked.sh").read_text()
    _, _, rest = script.partition(">/opt/baton/wheels.sha256 <<'END'\n")
    program, _, _ = rest.partition("END\n")
    ended = subprocess.run(
        [sys.executable, "-", str(file)],
        input=program,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.splitlines() == [f"{digests[n]}  {n}==1.0+cpu" for n in sorted(digests)]


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_says_last_what_is_in_it(target: str) -> None:
    """A bill made before a package came would not name it."""
    stage = [line for line in _stage(target) if line.startswith(("RUN ", "COPY "))]
    assert f"gen_sbom.py --image baton/{target} " in stage[-1]
    assert "--out /opt/app/sbom.cdx.json" in stage[-1]
    assert 'touch -h -d "@$SOURCE_DATE_EPOCH"' in stage[-1]
    assert "cp tools/gen_sbom.py /opt/app/bin/" in "\n".join(_stage("app"))
    own = [line for line in LINES if line.startswith(("FROM", "ARG"))]
    start = own.index(f"FROM runtime AS {target}")
    assert {"ARG VERSION", "ARG SOURCE_DATE_EPOCH"} <= set(own[start + 1 : start + 4])


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_asks_for_no_gpu_by_itself(target: str) -> None:
    """The store beside a worker runs the same image: who gets GPUs is for the pod to say."""
    assert not [line for line in _stage(target) if "NVIDIA_VISIBLE_DEVICES" in line]


def test_the_version_is_the_projects() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"ARG VERSION={project['version']}" in LINES


@pytest.mark.parametrize("script", sorted((ROOT / "images").glob("*.sh")), ids=lambda p: p.name)
def test_scripts_are_of_the_plain_shell(script: Path) -> None:
    subprocess.run(["sh", "-n", str(script)], check=True)
    assert "set -eu" in script.read_text()


def test_the_context_holds_what_the_wheel_needs_and_nothing_else() -> None:
    rules = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert rules[0] == "*", "what is not named is left out"
    let_in = {rule[1:] for rule in rules if rule.startswith("!")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {
        folder.partition("/")[0]
        for folder in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    }
    assert packages <= let_in, "a package that is not in the image"
    assert {each for each in let_in if each.startswith("tools")} == {"tools/gen_sbom.py"}
    for kept_out in (".git", "certs", "keys", ".venv", "tests", "id_rsa", ".env"):
        assert not any(fnmatch.fnmatch(kept_out, rule) for rule in let_in), kept_out
