"""Writes docs/settings.md: every setting of every process, out of the classes that they load.

    python tools/gen_settings_docs.py           write it
    python tools/gen_settings_docs.py --check   fail if the file differs

A group of settings that several processes have (`tls`, `engine`, ...) gets one section, to which
the processes' tables link. Types, defaults and meanings are the fields' own; the values schema of
the chart is made of the same fields (`gen_values_schema.settings_fields`).
"""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from services.draft.config import HEEDED, HEEDED_SPECULATION
from services.worker.config import WorkerSettings
from tools.gen_values_schema import MANAGED, settings_fields

PAGE = Path(__file__).parent.parent / "docs" / "settings.md"

PROCESSES: Mapping[str, tuple[type[Any], str]] = {
    "store": (MANAGED["kvstore"][0], "python -m kvstore"),
    "router": (MANAGED["router"][0], "python -m services.router"),
    "worker": (WorkerSettings, "python -m services.prefill`, `python -m services.decode"),
    "draft": (MANAGED["draft"][0], "python -m services.draft"),
    "autoscaler": (MANAGED["autoscaler"][0], "python -m services.autoscaler"),
}
"""The settings class of each kind of process, and the command that loads it."""

_INTRODUCTION = """\
# Settings

Made by `tools/gen_settings_docs.py` from the settings classes (`make schema`); do not edit.

The same keys can be set in four places:

| where | how |
|---|---|
| a cluster on this machine | `baton up --set router.routing_policy=round_robin` |
| one process | `python -m services.router --set model=baton-5m --set routing_policy=round_robin` |
| a TOML file | `python -m services.router --config router.toml` |
| the Helm chart | `router.settings.routing_policy: round_robin` |

- After `baton up --set` comes the part, then the key. Parts are `store`, `router`, `prefill`,
  `decode`, `worker` (prefill and decode), `draft` and `autoscaler`; the chart calls the store
  `kvstore`. `baton up` sets addresses, keys and certificates itself; `--set` has the last word.
- The chart sets some keys itself and refuses them under `settings`.
- `--config` may be given several times: later files win key by key, and `--set` wins over files.
  `--check` checks the settings of one process and ends without starting it.
- A value after `--set` is TOML; a bare word is taken as a string. A list needs quotes for the
  shell: `--set 'router.cors_origins=["https://app.example.com"]'`.
- An unknown key is refused, and the message names the nearest known key. A secret is refused in
  `--set`, because other users of the machine can read command lines: write it into a file.
- Names carry units: `_s` seconds, `_ms` milliseconds, `_bytes` bytes, `num_` a count.
"""


def text() -> str:
    """Make the content of docs/settings.md."""
    users = _users()
    shared = {cls: paths for cls, paths in users.items() if _num_parts(paths) > 1}
    lines = [_INTRODUCTION]
    for part, (cls, command) in PROCESSES.items():
        lines += [f"## {part}", "", f"`{command}`", ""]
        if part == "draft":
            lines += [_draft_note(), ""]
        lines += _tables(cls, "", shared)
    lines += ["# Groups that several parts have", ""]
    for cls, paths in shared.items():
        lines += [f"## {_title(cls, shared)}", "", f"{_summary(cls)} Used as {_joined(paths)}.", ""]
        lines += _tables(cls, "", shared)
    return "\n".join(lines).rstrip() + "\n"


def _users() -> dict[type[Any], list[str]]:
    """The paths at which processes have each class of a group."""
    found: dict[type[Any], list[str]] = {}

    def visit(cls: type[Any], path: str) -> None:
        for field in settings_fields(cls):
            if field.group is not None:
                found.setdefault(field.group, []).append(f"{path}.{field.name}")
                visit(field.group, f"{path}.{field.name}")

    for part, (cls, _) in PROCESSES.items():
        visit(cls, part)
    return found


def _num_parts(paths: Sequence[str]) -> int:
    return len({path.partition(".")[0] for path in paths})


def _tables(cls: type[Any], prefix: str, shared: Mapping[type[Any], list[str]]) -> Iterator[str]:
    """The tables of a class: its own, then one of each group that is this process's alone."""
    yield from ("| key | type | default | meaning |", "|---|---|---|---|")
    own = []
    for field in settings_fields(cls):
        key, group = prefix + field.name, field.group
        if group is None:
            cells = (
                f"`{key}`",
                _type_name(field.hint),
                _shown(field.name, field.default),
                field.text,
            )
        elif group in shared:
            title = _title(group, shared)
            cells = (f"`{key}`", f"[{title}](#{_anchor(title)})", "", field.text)
        else:
            cells = (f"`{key}`", "group, below", "", field.text)
            own.append((key, group))
        yield f"| {' | '.join(map(_escaped, cells))} |"
    yield ""
    for key, group in own:
        yield from (f"### `{key}`", "")
        yield from _tables(group, f"{key}.", shared)


def _escaped(cell: str) -> str:
    """Escape what Markdown would take for the end of a cell, or for HTML."""
    return cell.replace("|", "\\|").replace("<", "&lt;")


def _draft_note() -> str:
    return (
        f"Of `engine` a draft worker reads only {_joined(HEEDED)}; of `engine.speculation` only "
        f"{_joined(HEEDED_SPECULATION)}. It refuses other values for the rest."
    )


def _title(cls: type[Any], shared: Mapping[type[Any], list[str]]) -> str:
    """The shortest path within a part: `tls`, `engine.speculation`."""
    return min((path.partition(".")[2] for path in shared[cls]), key=len)


def _anchor(title: str) -> str:
    return title.replace(".", "")


def _summary(cls: type[Any]) -> str:
    """The first paragraph of a class' docstring, less what it raises."""
    paragraph = " ".join((cls.__doc__ or "").split("\n\n")[0].split())
    return paragraph.partition(" Raises ")[0]


def _joined(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _type_name(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_type_name(each) for each in arguments)
    if origin is typing.Literal:
        return ", ".join(f"`{each}`" for each in arguments)
    if origin is tuple:
        return f"list of {_type_name(arguments[0])}"
    names = {str: "string", bool: "boolean", int: "integer", float: "number"}
    return names.get(hint, "none")


def _shown(name: str, value: Any) -> str:
    """A default as TOML has it; bytes also in the largest binary unit that holds them exactly."""
    if value is dataclasses.MISSING:
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str):
        return f"`{value}`" if value else '`""`'
    if isinstance(value, tuple):
        return f"`{list(value)}`".replace("'", '"')
    if isinstance(value, float):
        return f"`{value:g}`"
    if name.endswith("_bytes") and value:
        for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
            if value % size == 0:
                return f"`{value}` ({value // size} {unit})"
    return f"`{value}`"


def main(arguments: Sequence[str]) -> int:
    """Write docs/settings.md, or check that it is up to date. Returns: the exit code."""
    made = text()
    if "--check" in arguments:
        is_stale = not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != made
        if is_stale:
            sys.stderr.write(f"{PAGE.name}: not as tools/gen_settings_docs.py makes it\n")
        return int(is_stale)
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
