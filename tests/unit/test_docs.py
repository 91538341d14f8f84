"""README.md and docs/: commands are ones that `baton` and the benchmarks have, links lead
somewhere, Python compiles, docs/api.md names every field and error of the HTTP API, and
docs/architecture.md every package.

docs/library.md is run by tests/unit/engine_client/test_docs.py.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from baton.cli import commands as command_group
from process import rpc_errors
from services.router.http_errors import http_error_of
from services.router.openai.schemas import BATON, CHAT, COMPLETION, EMBEDDING, BodyRecord

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_PLACEHOLDER = re.compile(r"\.\.\.|\$\(")


def _text(page: Path) -> str:
    """A page; an indented command that goes on in the next line is one line."""
    return re.sub(r" *\\\n +", " ", page.read_text(encoding="utf-8"))


def _commands() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for command in re.findall(r"^ {4,8}baton (.+)$", _text(page), re.MULTILINE):
            if not _PLACEHOLDER.search(command.partition(" #")[0]):
                yield page.name, command


def test_every_command_is_one() -> None:
    """Arguments are parsed, not run."""
    found = list(_commands())
    assert len(found) > 100
    for page, line in found:
        arguments = shlex.split(line, comments=True)
        command: click.Command = command_group
        context = click.Context(command_group, **command_group.context_settings)
        try:
            while isinstance(command, click.Group):
                _, inner, arguments = command.resolve_command(context, arguments)
                assert inner is not None
                command = inner
            command.make_context(str(command.name), arguments, parent=context)
        except click.ClickException as error:
            pytest.fail(f"{page}: baton {line}: {error.format_message()}")


def _modules() -> Iterator[tuple[str, str, str]]:
    """Page, module and arguments of each `python -m` of this repository."""
    module = r"python -m ((?:benchmarks|kvstore|services|tools)[\w.]*)"
    for page in [*PAGES, ROOT / "benchmarks" / "README.md", ROOT / "kernels" / "README.md"]:
        found = re.findall(rf"^ {{4,8}}{module}([^#\n]*)", _text(page), re.MULTILINE)
        found += re.findall(rf"`{module}([^`]*)`", _text(page))
        for name, arguments in found:
            yield str(page.relative_to(ROOT)), name, re.sub(r"[\[\]]", "", arguments)


def test_every_module_is_one() -> None:
    """Arguments of benchmarks are parsed, not run. `...` and words in capitals stand for others."""
    found = list(_modules())
    assert len(found) > 30
    for page, module, line in found:
        assert importlib.util.find_spec(module), f"{page}: {module}"
        if not module.startswith("benchmarks.") or re.search(r"\b[A-Z]+\b", line):
            continue
        arguments = shlex.split(line.replace("...", ""))
        command: click.Command = importlib.import_module(module).main
        context = click.Context(command)
        try:
            if isinstance(command, click.Group):
                _, inner, arguments = command.resolve_command(context, arguments)
                assert inner is not None
                command = inner
            command.make_context(str(command.name), arguments, parent=context)
        except click.ClickException as error:
            pytest.fail(f"{page}: python -m {module}{line}: {error.format_message()}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in _anchors(target), f"{page.name}: {link}"


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}


def test_python_compiles() -> None:
    found = []
    for page in PAGES:
        for snippet in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S):
            found.append(compile(snippet, str(page), "exec"))
    assert len(found) > 10


@pytest.mark.parametrize(
    "record", (COMPLETION, CHAT, EMBEDDING, BATON), ids=("completion", "chat", "embedding", "baton")
)
def test_the_page_of_the_api_names_every_field(record: BodyRecord) -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    named = {word for found in re.findall(r"`([^`]+)`", text) for word in re.findall(r"\w+", found)}
    assert {field.name for field in record.fields} <= named


@pytest.mark.parametrize(
    "error",
    (
        rpc_errors.InvalidArgument("n", "is wrong"),
        rpc_errors.Unauthenticated(""),
        rpc_errors.PermissionDenied(""),
        rpc_errors.NotFound(""),
        rpc_errors.AlreadyExists(""),
        rpc_errors.FailedPrecondition(""),
        rpc_errors.NoCapacity(""),
        rpc_errors.Cancelled(""),
        rpc_errors.Internal(""),
        rpc_errors.Unavailable(""),
        rpc_errors.DeadlineExceeded(""),
    ),
    ids=lambda error: type(error).__name__,
)
def test_the_page_of_the_api_names_every_error(error: rpc_errors.BatonError) -> None:
    found = http_error_of(error)
    rows = (ROOT / "docs" / "api.md").read_text(encoding="utf-8").splitlines()
    begin = f"| {found.status} | `{found.kind}` | "
    assert any(row.startswith(begin) and f"`{found.code}`" in row for row in rows), found


def test_the_page_of_the_architecture_names_every_package() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    packages = [path.parent for path in ROOT.glob("*/__init__.py")]
    packages += [path.parent for path in (ROOT / "services").glob("*/__init__.py")]
    names = {path.relative_to(ROOT).as_posix() for path in packages} - {"services", "tests"}
    assert len(names) > 10
    missing = sorted(name for name in names if f"`{name}/`" not in text)
    assert not missing
    for file in re.findall(r"`([\w/]+\.(?:py|proto))`", text):
        assert (ROOT / file).is_file(), file
