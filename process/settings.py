"""Configuration values: frozen dataclasses, loaded from TOML and `--set a.b=c`, checked at start.

A settings class is a frozen dataclass whose fields are str, int, float, bool, a Literal of
strings, tuple[str, ...], an optional of those, or another settings class. A unit is part of a
field's name (`_s`, `_ms`, `_bytes`, `num_`). An attribute docstring under each field says what it
means. `__post_init__` raises `SettingsError` for a value out of range.

Nothing is changed after `load`; what depends on the machine goes into a second value.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

Settings = TypeVar("Settings")


class SettingsError(Exception):
    """A wrong key or value; the message names it and the fix, in one line."""


def load(
    cls: type[Settings], *, file: Path | None = None, overrides: Sequence[str] = ()
) -> Settings:
    """Build `cls` from its defaults, then a TOML `file`, then `a.b=value` overrides.

    Raises: SettingsError naming the file and key, and the nearest known key when the key is
    unknown.
    """
    values: dict[str, Any] = {}
    if file is not None:
        try:
            values = tomllib.loads(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise SettingsError(f"{file}: cannot be read as TOML: {error}") from error
    for override in overrides:
        _set(values, override)
    return build(cls, values, where=str(file) if file else "settings")


def build(cls: type[Settings], values: Mapping[str, Any], *, where: str = "settings") -> Settings:
    """Build `cls` from nested mappings, checking every key and type."""
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    known = {name: hints[name] for name in names}
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
            raise SettingsError(
                f"{where}: unknown key '{key}'" + (f", nearest is '{near[0]}'" if near else "")
            )
        arguments[key] = _convert(known[key], value, f"{where}: {key}")
    try:
        return cls(**arguments)
    except TypeError as error:
        raise SettingsError(f"{where}: {error}") from error


def to_json(settings: Any) -> str:
    """One line of JSON, for the log at start. Fields whose name holds 'secret' or 'password' are
    masked, and so is the user's part of a URL."""

    def mask(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {
            key: "***" if value and ("secret" in key or "password" in key) else _masked(value)
            for key, value in pairs
        }

    return json.dumps(dataclasses.asdict(settings, dict_factory=mask), default=str)


def _masked(value: Any) -> Any:
    if isinstance(value, str) and "://" in value and "@" in value:
        scheme, _, rest = value.partition("://")
        return f"{scheme}://***@{rest.rpartition('@')[2]}"
    return value


def _set(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise SettingsError(f"--set {override}: write it as key=value")
    try:
        value: Any = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string
    node = values
    *path, last = key.split(".")
    for part in path:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise SettingsError(f"--set {override}: '{part}' is a value, not a group")
    node[last] = value


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        (inner,) = (argument for argument in arguments if argument is not type(None))
        return _convert(inner, value, where)
    if origin is typing.Literal:
        if value not in arguments:
            raise SettingsError(f"{where}: expected one of {', '.join(arguments)}, got {value!r}")
        return value
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise SettingsError(f"{where}: expected a group of keys, got {value!r}")
        return build(typing.cast(type[Any], hint), value, where=where)
    if origin is tuple:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise SettingsError(f"{where}: expected a list, got {value!r}")
        return tuple(_convert(arguments[0], item, where) for item in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise SettingsError(f"{where}: expected {hint.__name__}, got {value!r}")
