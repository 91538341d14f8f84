"""Every command of a benchmark that a page names is one: arguments are parsed, nothing is run."""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = (ROOT / "README.md", ROOT / "kernels" / "README.md", *(ROOT / "docs").glob("*.md"))


def _commands() -> Iterator[tuple[str, str, list[str]]]:
    """(page, program, arguments); a line that ends in a backslash goes on in the next."""
    for page in sorted(PAGES):
        text = re.sub(r" *\\\n +", " ", page.read_text(encoding="utf-8"))
        for indented in re.findall(r"^ {4,}.*?(python -m benchmarks\..*?) *(?:#.*)?$", text, re.M):
            yield page.name, *_split(indented)
        for quoted in re.findall(r"`((?:OMP_NUM_THREADS=1 )?python -m benchmarks\.[^`]*)`", text):
            yield page.name, *_split(quoted)


def _split(command: str) -> tuple[str, list[str]]:
    """Brackets are for options that may be left out, CASE and FILE stand for any."""
    words = shlex.split(command.replace("[", "").replace("]", "").replace(" ...", ""))
    program, *arguments = words[words.index("-m") + 1 :]
    return program, arguments


def test_every_command_is_one() -> None:
    found = [(page, program, arguments) for page, program, arguments in _commands()]
    assert len(found) > 15
    for page, program, arguments in found:
        if "CASE" in arguments:
            continue
        module = importlib.import_module(program)
        if not isinstance(module.main, click.Command):
            continue  # has no options that a page names
        context = click.Context(module.main, info_name=program)
        command: click.Command = module.main
        try:
            while isinstance(command, click.Group):
                _, inner, arguments = command.resolve_command(context, arguments)
                assert inner is not None, f"{page}: {program} without a case"
                command = inner
            command.make_context(program, list(arguments), parent=context)
        except click.ClickException as error:
            pytest.fail(f"{page}: {program} {arguments}: {error.format_message()}")
