"""What the Dockerfile promises: pinned, not root, nothing secret in the context, a health check."""

from __future__ import annotations

import fnmatch
import os
import re
import subprocess
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
    for kept_out in (".git", "certs", "keys", ".venv", "tests", "id_rsa", ".env"):
        assert not any(fnmatch.fnmatch(kept_out, rule) for rule in let_in), kept_out
