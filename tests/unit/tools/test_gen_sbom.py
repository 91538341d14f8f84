"""An image's bill of materials names what is installed in it, and says the same each time."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest

from tools import gen_sbom

DIGEST = "ab" * 32

STATUS = """\
Package: libc6
Status: install ok installed
Architecture: amd64
Source: glibc
Version: 2.36-9+deb12u10
Description: GNU C library
 Version: 9 stands in a description

Package: gone
Status: deinstall ok config-files
Architecture: amd64
Version: 1.0

Package: g++
Status: hold ok installed
Architecture: amd64
Source: gcc-defaults (1.203)
Version: 4:12.2.0-3
"""

DEP5 = """\
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/

Files: *
License: LGPL-2.1+

Files: x
License: GPL-2+ and BSD
 Text of it.

License: LGPL-2.1+
"""

INSIDE = {
    "bomFormat": "CycloneDX",
    "metadata": {"timestamp": "2026-01-02T03:04:05Z"},
    "components": [
        {"type": "library", "name": "zlib", "version": "1.3", "purl": "pkg:generic/zlib@1.3"},
        {"type": "library", "name": "zlib", "version": "1.3", "purl": "pkg:generic/zlib@1.3"},
        {"type": "later-kind", "name": "a", "version": "2", "purl": "pkg:cargo/a@2"},
        {"type": "library", "name": "Fast_One", "purl": "pkg:pypi/fast_one@2.0?file_name=x.whl"},
        {"type": "library", "name": "ext", "purl": "pkg:pypi/fast-one@2.0#ext"},
    ],
}


def _install(site: Path, name: str, version: str, *fields: str, **sboms: str) -> None:
    """A distribution as pip leaves it. Keywords: files of its folder `sboms`, by stem."""
    folder = site / f"{name}-{version}.dist-info"
    (folder / "sboms").mkdir(parents=True)
    lines = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}", *fields]
    (folder / "METADATA").write_text("\n".join(lines) + "\n")
    files = ["METADATA"]
    for stem, text in sboms.items():
        (folder / "sboms" / f"{stem}.json").write_text(text)
        files.append(f"sboms/{stem}.json")
    (folder / "RECORD").write_text("".join(f"{folder.name}/{file},,\n" for file in files))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The files of a small image."""
    root = tmp_path / "image"
    packages = root / "opt/baton/lib/python3.11/site-packages"
    for folder in ("etc", "var/lib/dpkg", "usr/share/doc/libc6", "usr/share/doc/g++"):
        (root / folder).mkdir(parents=True)
    (root / "etc/os-release").write_text('PRETTY_NAME="Debian"\nID=debian\nVERSION_ID="12"\n')
    (root / "var/lib/dpkg/status").write_text(STATUS)
    (root / "usr/share/doc/libc6/copyright").write_text(DEP5)
    (root / "usr/share/doc/g++/copyright").write_text(
        "Look at\n`/usr/share/common-licenses/GPL-3'. See /usr/share/common-licenses/GPL.\n"
    )
    _install(
        packages,
        "Fast_One",
        "2.0",
        "License-Expression: MIT",
        inside=json.dumps(INSIDE),
        other=json.dumps({"spdxVersion": "SPDX-2.3"}),
        torn="{",
    )
    _install(packages, "named", "1+cpu", "License: BSD", "Classifier: License :: DFSG approved")
    _install(packages, "either", "1", "License: MIT OR Apache-2.0")
    _install(
        packages,
        "classified",
        "1",
        "License: Copyright\n  all of it",
        "Classifier: License :: OSI Approved :: MIT License",
        "Classifier: License :: OSI Approved :: Apache Software License",
    )
    _install(root / "opt/app", "baton", "0.1.0", "License-Expression: Apache-2.0")
    names = ("Fast_One==2.0", "named==1+cpu", "either==1", "classified==1")
    (root / "opt/baton/wheels.sha256").write_text("".join(f"{DIGEST}  {n}\n" for n in names))
    return root


def _run(root: Path, out: Path) -> int:
    told = ["--image", "baton/control", "--version", "0.1.0"]
    return gen_sbom.main([*told, "--root", str(root), "--out", str(out)])


def _bill(root: Path) -> dict[str, Any]:
    out = root.parent / "sbom.cdx.json"
    assert _run(root, out) == 0
    bill: dict[str, Any] = json.loads(out.read_text())
    return bill


def _by_name(bill: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in bill["components"]}


def test_the_document_is_what_cyclonedx_1_6_asks_for(root: Path) -> None:
    bill = _bill(root)
    assert (bill["bomFormat"], bill["specVersion"], bill["version"]) == ("CycloneDX", "1.6", 1)
    hexadecimal = "[0-9a-f]"
    form = "-".join(f"{hexadecimal}{{{count}}}" for count in (8, 4, 4, 4, 12))
    assert re.fullmatch(f"urn:uuid:{form}", bill["serialNumber"])
    subject = bill["metadata"]["component"]
    assert (subject["type"], subject["name"]) == ("container", "baton/control")
    assert subject["version"] == "0.1.0"
    refs = [each["bom-ref"] for each in bill["components"]]
    assert refs == sorted(refs) and len({*refs, subject["bom-ref"]}) == len(refs) + 1
    for each in bill["components"]:
        assert each["type"] in ("library", "application", "operating-system")
        assert each["name"] and each["version"]
        # Either names of licenses, or one expression.
        licenses = each.get("licenses", [])
        kinds = {key for entry in licenses for key in entry}
        assert kinds <= {"license"} or (kinds == {"expression"} and len(licenses) == 1)


def test_debian_packages_are_those_that_are_installed(root: Path) -> None:
    found = _by_name(_bill(root))
    assert "gone" not in found
    assert found["libc6"]["purl"] == (
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u10?arch=amd64&distro=debian-12&upstream=glibc"
    )
    assert found["g++"]["purl"] == (
        "pkg:deb/debian/g%2B%2B@4:12.2.0-3?arch=amd64&distro=debian-12&upstream=gcc-defaults%401.203"
    )
    assert found["libc6"]["licenses"] == [
        {"license": {"name": "GPL-2+ and BSD"}},
        {"license": {"name": "LGPL-2.1+"}},
    ]
    names = [each["license"]["name"] for each in found["g++"]["licenses"]]
    assert names == ["GPL", "GPL-3"]
    assert found["debian"]["type"] == "operating-system"


def test_python_packages_have_license_and_hash(root: Path) -> None:
    found = _by_name(_bill(root))
    assert found["Fast_One"]["purl"] == "pkg:pypi/fast-one@2.0"
    assert found["Fast_One"]["licenses"] == [{"expression": "MIT"}]
    assert found["Fast_One"]["hashes"] == [{"alg": "SHA-256", "content": DIGEST}]
    assert found["named"]["purl"] == "pkg:pypi/named@1%2Bcpu"
    assert found["named"]["licenses"] == [{"license": {"name": "BSD"}}]
    assert found["either"]["licenses"] == [{"expression": "MIT OR Apache-2.0"}]
    names = [each["license"]["name"] for each in found["classified"]["licenses"]]
    assert names == ["Apache Software License", "MIT License"]


def test_our_own_code_is_not_taken_for_somebody_elses_package(root: Path) -> None:
    own = _by_name(_bill(root))["baton"]
    assert own["purl"] == "pkg:generic/baton@0.1.0" and own["type"] == "application"


def test_what_a_wheel_says_of_what_is_compiled_into_it_stands_below_it(root: Path) -> None:
    fast = _by_name(_bill(root))["Fast_One"]
    assert fast["components"] == [
        {"type": "library", "name": "a", "version": "2", "purl": "pkg:cargo/a@2"},
        {"type": "library", "name": "zlib", "version": "1.3", "purl": "pkg:generic/zlib@1.3"},
    ]
    assert fast["properties"] == [
        {"name": "baton:sbom-not-read", "value": "other.json"},
        {"name": "baton:sbom-not-read", "value": "torn.json"},
    ]


def test_same_contents_same_bytes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the time, and in whatever order a file system names its files."""
    first, second = root.parent / "first", root.parent / "second"
    assert _run(root, first) == 0
    os.utime(root / "var/lib/dpkg/status", (1, 1))

    def backwards(path: list[str]) -> Iterator[Any]:
        return reversed(list(distributions(path=path)))

    monkeypatch.setattr(gen_sbom, "distributions", backwards)
    assert _run(root, second) == 0
    assert first.read_bytes() == second.read_bytes()


def test_other_contents_another_serial_number(root: Path) -> None:
    before = _bill(root)["serialNumber"]
    status = root / "var/lib/dpkg/status"
    status.write_text(STATUS.replace("4:12.2.0-3", "4:12.2.0-4"))
    assert _bill(root)["serialNumber"] != before


def test_every_distribution_of_this_environment_is_there() -> None:
    sites = [Path(each) for each in dict.fromkeys(sys.path) if each.endswith("site-packages")]
    installed = {
        (each.metadata["Name"], each.version)
        for each in distributions(path=[str(site) for site in sites])
    }
    components = gen_sbom.python_components(sites)
    assert {(each["name"], each["version"]) for each in components} == installed
    assert len(installed) > 50
    refs = [each["bom-ref"] for each in components]
    assert len(refs) == len(set(refs))


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("etc/os-release", "ID=debian\n", "VERSION_ID"),
        ("etc/os-release", None, "os-release"),
        ("var/lib/dpkg/status", "", "no package is installed"),
        ("opt/baton/wheels.sha256", None, "wheels.sha256"),
        ("opt/baton/wheels.sha256", "abc  named==1\n", "not a hash"),
        ("opt/baton/wheels.sha256", f"{DIGEST}  named==1+cpu\n", "came in no wheel"),
        ("opt/app/baton-0.1.0.dist-info/METADATA", "Name: other\nVersion: 1\n", "other==1"),
        ("opt/app/baton-0.1.0.dist-info/METADATA", "Name: baton\n", "without a name"),
    ],
)
def test_an_image_that_does_not_say_what_is_in_it_ends_the_build(
    root: Path, capsys: pytest.CaptureFixture[str], file: str, text: str | None, said: str
) -> None:
    if text is None:
        (root / file).unlink()
    else:
        (root / file).write_text(text)
    out = root.parent / "sbom.cdx.json"
    assert _run(root, out) == 1
    assert said in capsys.readouterr().err
    assert not out.exists()


def test_our_own_code_must_be_there(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in sorted((root / "opt/app").rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    assert _run(root, root.parent / "out") == 1
    assert "baton is not installed" in capsys.readouterr().err
