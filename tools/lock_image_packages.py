"""Lock the Python packages of the container images by version and hashes: `images/*.lock`.

    python tools/lock_image_packages.py  # after pyproject.toml or constraints.txt changed
    python tools/lock_image_packages.py --torch-links DIR  # without PyTorch's own CPU index

A lock is for every platform of `PLATFORMS`: uv solves for each, with wheels only, and what it
finds has to be the same text, since a package's hashes are those of all its files. `DIR` may hold
torch for some of them only: the lock then names these, and a build for another one is refused.

Needs uv on PATH and a package index. Versions are those of `constraints.txt`, which the tests
passed with; what it does not name is the newest that fits, so a lock is reviewed like any change.
`tests/unit/tools/test_lock_image_packages.py` sees that locks and constraints agree.
"""

from __future__ import annotations

import argparse
import difflib
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "images"
PYTHON_VERSION = "3.11"
"""Version of Python in the base image, Debian 12."""

PLATFORMS = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}
"""Machine names in wheels' platform tags, by the platforms of images."""

_HEAD = """\
# Made by tools/lock_image_packages.py; not edited by hand. {what}
"""


class LockError(Exception):
    """No one lock file serves all platforms; the message says what hinders it."""


@dataclass(frozen=True)
class Lock:
    """One lock file of an image's packages."""

    name: str
    """Name of the file, without its ending."""

    what: str
    """Description of whose packages these are, for the file's first line."""

    extras: tuple[str, ...]
    """Extras of the project whose packages are locked."""

    is_cpu: bool = False
    """Whether torch comes from PyTorch's index of builds without CUDA."""

    without: tuple[str, ...] = ()
    """Packages that others ask for and that nothing of ours uses in this image."""


LOCKS = (
    Lock("control", "The control image: router, store, autoscaler, commands.", ("kubernetes",)),
    Lock("worker-cpu", "The worker image without CUDA.", ("worker", "nixl"), True),
    Lock("worker-cuda", "The worker image for CUDA.", ("worker", "nixl")),
)


def compile_lock(lock: Lock, scratch: Path, torch_links: str) -> str:
    """Make the text of one lock file. Raises: CalledProcessError when uv finds no solution,
    LockError when it finds different ones."""
    platforms = platforms_of(lock, torch_links)
    text = the_same({each: _compile(lock, each, scratch, torch_links) for each in platforms})
    return _HEAD.format(what=lock.what) + f"# For {' and '.join(platforms)}.\n" + text


def platforms_of(lock: Lock, torch_links: str) -> Sequence[str]:
    """The platforms of images that a lock can be for. Raises: LockError when a folder has torch for
    none."""
    if not (lock.is_cpu and torch_links):
        return tuple(PLATFORMS)
    files = [file.name for file in Path(torch_links).glob("torch-*.whl")]
    found = tuple(
        platform
        for platform, machine in PLATFORMS.items()
        if any(file.endswith(f"_{machine}.whl") for file in files)
    )
    if not found:
        raise LockError(f"{torch_links} has no wheel of torch for any of {', '.join(PLATFORMS)}")
    return found


def the_same(texts: Mapping[str, str]) -> str:
    """The one solution that was found for every platform. Raises: LockError with the lines that
    differ."""
    (first, text), *others = texts.items()
    for platform, other in others:
        if other != text:
            lines = difflib.unified_diff(
                text.splitlines(), other.splitlines(), first, platform, lineterm="", n=1
            )
            raise LockError("\n".join(["no lock is for all platforms:", *lines]))
    return text


def _compile(lock: Lock, platform: str, scratch: Path, torch_links: str) -> str:
    """Packages and hashes, as uv finds them for one platform."""
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if lock.extras and not lock.is_cpu:
        # torch's CUDA builds name their own triton; ours is for the tests by the interpreter.
        constraints = [line for line in constraints if not line.startswith("triton==")]
    pins = scratch / "constraints.txt"
    pins.write_text("\n".join(constraints) + "\n", encoding="utf-8")
    overrides = scratch / "overrides.txt"
    nowhere = [f"{name}; sys_platform == 'none'" for name in lock.without]
    overrides.write_text("\n".join(nowhere) + "\n", encoding="utf-8")
    # uv takes an older output as a wish for its versions.
    out = scratch / f"{lock.name}.{PLATFORMS[platform]}.txt"
    command = ["uv", "pip", "compile", "--quiet", "--no-config", "--no-header", "--no-annotate"]
    command += ["--generate-hashes", "--only-binary", ":all:", "--python-version", PYTHON_VERSION]
    # As new as llguidance's wheels ask for; Debian 12 has glibc 2.36.
    command += ["--python-platform", f"{PLATFORMS[platform]}-manylinux_2_31"]
    command += ["--constraints", str(pins), "--overrides", str(overrides)]
    command += ["--output-file", str(out)]
    command += [word for extra in lock.extras for word in ("--extra", extra)]
    if lock.is_cpu:
        command += ["--find-links", torch_links] if torch_links else ["--torch-backend", "cpu"]
    command.append(str(ROOT / "pyproject.toml"))
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = out.read_text(encoding="utf-8").splitlines()
    return "\n".join(_without_links(lines)) + "\n"


def compile_build_lock(scratch: Path) -> str:
    """Make the lock of the packages that build our own wheel, apart from every image."""
    out = scratch / "build.txt"
    command = ["uv", "pip", "compile", "--quiet", "--no-config", "--no-header", "--no-annotate"]
    command += ["--generate-hashes", "--python-version", PYTHON_VERSION, "--output-file", str(out)]
    subprocess.run(
        [*command, "-"], check=True, input=b"hatchling>=1.27\n", stdout=subprocess.DEVNULL
    )
    return _HEAD.format(what="What makes our own wheel.") + out.read_text(encoding="utf-8")


def _without_links(lines: list[str]) -> list[str]:
    """Remove from a lock where packages came from: that is an argument of the build, not part of
    the lock."""
    return [line for line in lines if line and not line.startswith("--")]


def main() -> int:
    """Write all lock files. Returns: the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch-links", default="", help="folder with torch's CPU wheel")
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        try:
            texts = {lock.name: compile_lock(lock, scratch, parsed.torch_links) for lock in LOCKS}
            texts["build"] = compile_build_lock(scratch)
        except (LockError, subprocess.CalledProcessError, FileNotFoundError) as error:
            sys.stderr.write(f"lock_image_packages: {error}\n")
            return 1
    for name, text in texts.items():
        (IMAGES / f"{name}.lock").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
