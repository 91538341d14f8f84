"""Write an image's bill of materials: CycloneDX 1.6 JSON, of what is installed in it.

    python -IB /opt/app/bin/gen_sbom.py --image baton/control --version 0.1.0 --out sbom.cdx.json

The last step of each image in the Dockerfile, so it runs inside, with Python alone and no network.
What it reads is what is there: dpkg's list of packages and their copyright files, the metadata of
installed Python distributions, the bills that these carry of what is compiled into them (PEP 770),
and the hashes of the wheels that they came in (`wheels.sha256`, made by images/install_locked.sh).
The same contents give the same bytes: sorted, no time, a serial number that is a hash of the rest.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any
from urllib.parse import quote

Component = dict[str, Any]
"""One entry of a CycloneDX document's `components`."""

OWN = "baton"
"""Name of our own distribution. It is not under `pkg:pypi`: that name belongs to another project's
package there."""

_SERIAL_NUMBERS = uuid.UUID("2c1d2a3e-7c59-5f0a-9a59-1d2f6a0c8b47")
_TYPES = frozenset(
    "application framework library container platform operating-system device device-driver"
    " firmware file machine-learning-model data cryptographic-asset".split()
)
_LICENSE_NAME_CHARACTERS = 80
_EXPRESSION = re.compile(r"[A-Za-z0-9.+-]+( (AND|OR|WITH) [A-Za-z0-9.+-]+)*")


class SbomError(Exception):
    """An image does not say what is in it; the message says where."""


def purl(kind: str, name: str, version: str, qualifiers: Mapping[str, str] | None = None) -> str:
    """Write a package URL. `kind` may hold a namespace: `deb/debian`."""
    told = "&".join(
        f"{key}={quote(value, safe=':')}" for key, value in sorted((qualifiers or {}).items())
    )
    url = f"pkg:{kind}/{quote(name, safe='')}@{quote(version, safe=':')}"
    return f"{url}?{told}" if told else url


def operating_system(root: Path) -> Component:
    """Read the operating system of an image from /etc/os-release. Raises: SbomError."""
    told = {}
    for line in _read(root / "etc/os-release").splitlines():
        key, _, value = line.partition("=")
        told[key] = value.strip('"')
    try:
        name, version = told["ID"], told["VERSION_ID"]
    except KeyError as error:
        raise SbomError(f"{root / 'etc/os-release'}: no {error.args[0]}") from None
    return {
        "bom-ref": f"os:{name}@{version}",
        "type": "operating-system",
        "name": name,
        "version": version,
    }


def debian_components(root: Path) -> list[Component]:
    """List the packages that dpkg has installed below `root`. Raises: SbomError."""
    system = operating_system(root)
    distro = f"{system['name']}-{system['version']}"
    found = []
    for package in _paragraphs(_read(root / "var/lib/dpkg/status")):
        # What was removed and left its configuration is listed as well.
        if package.get("Status", "").split()[-1:] != ["installed"]:
            continue
        name, version = package["Package"], package["Version"]
        qualifiers = {"arch": package["Architecture"], "distro": distro}
        # "gcc-12 (12.2.0-14)": the version stands there only where it is another one.
        source, _, other = package.get("Source", "").partition(" ")
        if source:
            told = other.strip("()")
            qualifiers["upstream"] = f"{source}@{told}" if told else source
        url = purl(f"deb/{system['name']}", name, version, qualifiers)
        component: Component = {
            "bom-ref": url,
            "type": "library",
            "name": name,
            "version": version,
            "purl": url,
        }
        names = _debian_licenses(root / "usr/share/doc" / name / "copyright")
        if names:
            component["licenses"] = [{"license": {"name": each}} for each in names]
        found.append(component)
    if not found:
        raise SbomError(f"{root / 'var/lib/dpkg/status'}: no package is installed")
    return found


def python_components(
    sites: Iterable[Path], hashes: Mapping[str, str] | None = None
) -> list[Component]:
    """List the Python distributions in these folders.

    Args: hashes: SHA-256 (hex) of wheels by `name==version`; all but our own must be there. None:
        no component has one.
    Raises: SbomError for metadata without a name or a version, and for what has no hash.
    """
    found = {}
    for distribution in distributions(path=[str(site) for site in sites]):
        name, version = _field(distribution, "Name"), _field(distribution, "Version")
        if not name or not version:
            raise SbomError(f"{_folder(distribution)}: metadata without a name or a version")
        canonical = re.sub(r"[-_.]+", "-", name).lower()
        is_own = canonical == OWN
        url = purl("generic" if is_own else "pypi", canonical, version)
        component: Component = {
            "bom-ref": url,
            "type": "application" if is_own else "library",
            "name": name,
            "version": version,
            "purl": url,
        }
        licenses = _python_licenses(distribution)
        if licenses:
            component["licenses"] = licenses
        if hashes is not None and not is_own:
            try:
                digest = hashes[f"{canonical}=={version}"]
            except KeyError:
                raise SbomError(f"{canonical}=={version} came in no wheel that is known") from None
            component["hashes"] = [{"alg": "SHA-256", "content": digest}]
        _add_what_is_inside(component, distribution)
        found[url] = component
    return list(found.values())


def bill(image: str, version: str, components: Iterable[Component]) -> dict[str, Any]:
    """Make the whole document (the software bill of materials) of one image."""
    content = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "tools": {"components": [{"type": "application", "name": "baton gen_sbom"}]},
            "component": {
                "bom-ref": f"image:{image}@{version}",
                "type": "container",
                "name": image,
                "version": version,
            },
        },
        "components": sorted(components, key=lambda each: str(each["bom-ref"])),
    }
    serial = uuid.uuid5(_SERIAL_NUMBERS, json.dumps(content, sort_keys=True))
    return {"serialNumber": f"urn:uuid:{serial}", **content}


def read_hashes(file: Path) -> dict[str, str]:
    """Read the SHA-256 of wheels, by `name==version`, from lines `HASH NAME==VERSION`. Raises:
    SbomError."""
    found = {}
    for line in _read(file).splitlines():
        match = re.fullmatch(r"([0-9a-f]{64})  ([^ =]+)==([^ ]+)", line)
        if match is None:
            raise SbomError(f"{file}: not a hash and a package: {line!r}")
        digest, name, version = match.groups()
        found[f"{re.sub(r'[-_.]+', '-', name).lower()}=={version}"] = digest
    return found


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise SbomError(f"{file}: {error.strerror}") from None


def _paragraphs(text: str) -> Iterator[dict[str, str]]:
    """Parse Debian's control format: fields by name, first lines only."""
    for paragraph in re.split(r"\n\s*\n", text):
        fields = {}
        for line in paragraph.splitlines():
            key, colon, value = line.partition(":")
            if colon and not line.startswith((" ", "\t", "#")):
                fields[key] = value.strip()
        if fields:
            yield fields


def _debian_licenses(copyright_file: Path) -> list[str]:
    """Names that the file declares, or, in free text, of the common licenses that it points to."""
    if not copyright_file.is_file():
        return []
    text = _read(copyright_file)
    paragraphs = list(_paragraphs(text))
    if not paragraphs or "Format" not in paragraphs[0]:
        pointed = re.findall(r"/usr/share/common-licenses/([A-Za-z0-9.+-]+)", text)
        return sorted({each.rstrip(".") for each in pointed})
    return sorted({each["License"] for each in paragraphs if each.get("License")})


def _python_licenses(distribution: Distribution) -> list[dict[str, Any]]:
    """An expression where it has one, else a name, else what its classifiers say."""
    expression = _field(distribution, "License-Expression")
    if expression:
        return [{"expression": expression}]
    told = _field(distribution, "License")
    # The field is free text: some hold the license itself.
    if told and "\n" not in told and len(told) <= _LICENSE_NAME_CHARACTERS:
        if " " in told and _EXPRESSION.fullmatch(told):
            return [{"expression": told}]
        return [{"license": {"name": told}}]
    prefix = "License :: OSI Approved :: "
    classifiers = distribution.metadata.get_all("Classifier") or []
    names = {each.removeprefix(prefix) for each in classifiers if each.startswith(prefix)}
    return [{"license": {"name": each}} for each in sorted(names)]


def _field(distribution: Distribution, name: str) -> str:
    """A field of a distribution's metadata; empty where there is none."""
    return str((distribution.metadata.get_all(name) or [""])[0]).strip()


def _folder(distribution: Distribution) -> Path:
    return Path(str(distribution.locate_file("")))


def _add_what_is_inside(component: Component, distribution: Distribution) -> None:
    """Add, below `component`, the libraries compiled into a wheel, as the wheel names them in its
    folder `sboms`."""
    inside: dict[str, Component] = {}
    unread = []
    files = [
        each
        for each in distribution.files or ()
        if each.parts[0].endswith(".dist-info") and each.parts[1:2] == ("sboms",)
    ]
    for file in files:
        try:
            told = json.loads(_read(Path(str(distribution.locate_file(file)))))
            entries = told["components"] if told["bomFormat"] == "CycloneDX" else None
        except (ValueError, KeyError, TypeError):
            entries = None
        if entries is None:
            unread.append(file.name)
            continue
        for entry in entries:
            url = entry.get("purl", "")
            # Some list themselves and files of their own.
            if not url or url.startswith(f"{component['purl']}#") or _is_same(url, component):
                continue
            kind = entry.get("type")
            inside[url] = {
                "type": kind if kind in _TYPES else "library",
                "name": entry["name"],
                "version": entry.get("version", ""),
                "purl": url,
            }
    if inside:
        component["components"] = [inside[url] for url in sorted(inside)]
    if unread:
        component["properties"] = [
            {"name": "baton:sbom-not-read", "value": each} for each in sorted(unread)
        ]


def _is_same(url: str, component: Component) -> bool:
    """Whether `url` is the component's own, but for how it is written and its qualifiers."""
    bare = re.split(r"[?#]", url)[0].lower().replace("_", "-")
    return bare == str(component["purl"]).lower()


def main(arguments: list[str] | None = None) -> int:
    """Write the bill of an image. Returns: the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--image", required=True, help="its name, as baton/control")
    parser.add_argument("--version", required=True, help="of the image")
    parser.add_argument("--root", type=Path, default=Path("/"), help="where the image's files lie")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parsed = parser.parse_args(arguments)
    root: Path = parsed.root
    sites = [*sorted(root.glob("opt/baton/lib/python3*/site-packages")), root / "opt/app"]
    try:
        packages = python_components(sites, read_hashes(root / "opt/baton/wheels.sha256"))
        if not any(each["purl"].startswith(f"pkg:generic/{OWN}@") for each in packages):
            raise SbomError(f"{root / 'opt/app'}: {OWN} is not installed")
        components = [operating_system(root), *debian_components(root), *packages]
    except SbomError as error:
        sys.stderr.write(f"gen_sbom: {error}\n")
        return 1
    text = json.dumps(bill(parsed.image, parsed.version, components), indent=1, sort_keys=True)
    parsed.out.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
