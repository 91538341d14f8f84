"""Configuration values: frozen dataclasses, loaded from TOML files and `--set a.b=c`, checked at
start.

A settings class is a frozen dataclass whose fields are str, int, float, bool, a Literal of
strings, tuple[str, ...], an optional of those, or another settings class. A unit is part of a
field's name (`_s`, `_ms`, `_bytes`, `num_`), its range part of its type (`PositiveInt`, or
`Annotated` with a `Meta`). An attribute docstring under each field says what it means.
`__post_init__` calls `check_ranges`, and checks what several fields say together.

Nothing is changed after `load`; what depends on the machine goes into a second value.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import json
import math
import operator
import os
import sys
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

from msgspec import Meta

Settings = TypeVar("Settings")

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]

_BOUNDS = (
    ("ge", "at least", operator.ge),
    ("gt", "above", operator.gt),
    ("le", "at most", operator.le),
    ("lt", "below", operator.lt),
)

UNIX = "unix:"
"""Prefix of an address that is the path of a Unix socket."""
_MAX_SOCKET_BYTES = 107
"""Most bytes of a Unix socket's path (sun_path, less its final zero)."""


class SettingsError(Exception):
    """A setting has a wrong key or value; the message names it and the fix, in one line."""


@functools.cache
def ranges(cls: Any) -> Mapping[str, Sequence[Meta]]:
    """The `Meta` objects (the ranges) of each field of a settings class, by field."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {
        field.name: [
            each for each in getattr(hints[field.name], "__metadata__", ()) if type(each) is Meta
        ]
        for field in dataclasses.fields(cls)
    }


def check_ranges(settings: Any) -> None:
    """Check that each field of a settings object is within its range, finite and a number. Raises:
    SettingsError naming the field."""
    cls: Any = type(settings)
    for name, metas in ranges(cls).items():
        value = getattr(settings, name)
        if isinstance(value, float) and not math.isfinite(value):
            raise SettingsError(f"{name}: must be finite, got {value}")
        for meta in metas:
            for kind, words, holds in _BOUNDS:
                bound = getattr(meta, kind)
                if bound is not None and not holds(value, bound):
                    raise SettingsError(f"{name}: must be {words} {bound}, got {value}")


def split_host_port(address: str) -> tuple[str, int]:
    """Split host:port. Returns: the host, an IPv6 one without its brackets, and the port. Raises:
    ValueError."""
    host, colon, port = address.rpartition(":")
    # gRPC would take the port modulo 65536 in silence.
    if not (host and colon and port.isascii() and port.isdigit() and int(port) < 65536):
        raise ValueError(f"{address!r} is not host:port")
    return host.strip("[]"), int(port)


def check_host_port(name: str, address: str) -> None:
    """Check that a setting is host:port, or empty. Raises: SettingsError."""
    try:
        if address:
            split_host_port(address)
    except ValueError as error:
        raise SettingsError(f"{name}: {error}") from None


def check_address(name: str, address: str) -> None:
    """Check that a setting is host:port, or unix:/path of a Unix socket. Raises: SettingsError."""
    if address.startswith(UNIX):
        path = address.removeprefix(UNIX)
        if not path.startswith("/") or len(os.fsencode(path)) > _MAX_SOCKET_BYTES:
            raise SettingsError(
                f"{name}: {address!r} needs an absolute path of at most {_MAX_SOCKET_BYTES} bytes "
                f"after {UNIX}"
            )
        return
    try:
        split_host_port(address)
    except ValueError as error:
        raise SettingsError(f"{name}: {error}, nor {UNIX}/path") from None


def load(
    cls: type[Settings], *, files: Sequence[Path] = (), overrides: Sequence[str] = ()
) -> Settings:
    """Build a settings object from the defaults of `cls`, then TOML `files` (later ones win, key by
    key, so that secrets may lie in one of their own), then `a.b=value` overrides: values as in
    TOML, but that a bare word is a string.

    Raises: SettingsError naming the file and key, and the nearest known key when the key is
        unknown, or what the class says of it in `REMOVED` when it was known once.
    """
    values: dict[str, Any] = {}
    for file in files:
        try:
            read = tomllib.loads(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise SettingsError(f"{file}: cannot be read as TOML: {error}") from error
        _check_keys(cls, read, str(file))
        _merge(values, read)
    for override in overrides:
        _set(values, override)
    return build(cls, values, where=", ".join(map(str, files)) or "settings")


def build(
    cls: type[Settings], values: Mapping[str, Any], *, where: str = "settings", group: str = ""
) -> Settings:
    """Build a settings object of `cls` from nested mappings, checking every key and type.

    Args: group: prefix of the fields of a class that is a group within another one, such as
        `engine.`.
    Raises: SettingsError.
    """
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    known = {name: hints[name] for name in names}
    arguments: dict[str, Any] = {}
    _check_known(cls, known, values, where)
    for key, value in values.items():
        try:
            if dataclasses.is_dataclass(known[key]):
                arguments[key] = _build_group(
                    known[key], value, f"{where}: {key}", f"{group}{key}."
                )
            else:
                arguments[key] = _convert(known[key], value, f"{where}: {key}")
        except SettingsError:
            if _is_secret(key):  # the message would show it
                raise SettingsError(f"{where}: {key}: expected another kind of value") from None
            raise
    try:
        return cls(**arguments)
    except SettingsError as error:
        raise SettingsError(f"{group}{error}") from error
    except TypeError as error:
        raise SettingsError(f"{where}: {error}") from error


def _build_group(hint: Any, value: Any, where: str, group: str) -> Any:
    if not isinstance(value, Mapping):
        value = value.value if isinstance(value, _Bare) else value
        raise SettingsError(f"{where}: expected a group of keys, got {value!r}")
    return build(typing.cast(type[Any], hint), value, where=where, group=group)


def _check_known(
    cls: type[Any], known: Mapping[str, Any], values: Mapping[str, Any], where: str
) -> None:
    for key in values:
        if key not in known:
            removed = getattr(cls, "REMOVED", {}).get(key)
            if removed is not None:
                raise SettingsError(f"{where}: '{key}' was removed: {removed}")
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
            raise SettingsError(
                f"{where}: unknown key '{key}'" + (f", nearest is '{near[0]}'" if near else "")
            )


def _check_keys(cls: type[Any], values: Mapping[str, Any], where: str) -> None:
    """Refuse unknown keys of one file among several, so that the error names the file. The values
    are checked when those of all files are there.
    """
    hints = typing.get_type_hints(cls)
    known = {field.name: hints[field.name] for field in dataclasses.fields(cls)}
    _check_known(cls, known, values, where)
    for key, value in values.items():
        if dataclasses.is_dataclass(known[key]) and isinstance(value, Mapping):
            _check_keys(typing.cast(type[Any], known[key]), value, f"{where}: {key}")


def _merge(values: dict[str, Any], later: Mapping[str, Any]) -> None:
    """Groups key by key; all else is replaced."""
    for key, value in later.items():
        before = values.get(key)
        if isinstance(before, dict) and isinstance(value, Mapping):
            _merge(before, value)
        else:
            values[key] = value


def to_json(settings: Any) -> str:
    """Settings as one line of JSON, for the log at start. Fields that hold a secret by their name
    are masked, and so is the user's part of a URL."""

    def mask(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {key: "***" if value and _is_secret(key) else _masked(value) for key, value in pairs}

    return json.dumps(dataclasses.asdict(settings, dict_factory=mask), default=str)


def refuse_secrets(overrides: Sequence[str]) -> None:
    """Refuse secrets on a command line, which every user of the machine can read.

    Raises: SettingsError for an override that holds a secret, without it.
    """
    for override in overrides:
        key, _, value = override.partition("=")
        if _is_secret(key.rpartition(".")[2]):
            raise SettingsError(
                f"--set {key}: everybody on this machine can read a command line; write it into "
                "the --config file"
            )
        if _has_password(value.strip("\"'")):
            raise SettingsError(
                f"--set {key}: holds a password, and everybody on this machine can read a command "
                "line; use a password_file, or the --config file"
            )


def _has_password(value: str) -> bool:
    try:
        return "://" in value and bool(urlsplit(value).password)
    except ValueError:  # no URL, whatever it is
        return False


def _is_secret(key: str) -> bool:
    """Whether a field holds a secret; one that names the file with it does not."""
    return ("secret" in key or "password" in key) and not key.endswith("_file")


def _masked(value: Any) -> Any:
    if isinstance(value, str) and "://" in value and "@" in value:
        scheme, _, rest = value.partition("://")
        return f"{scheme}://***@{rest.rpartition('@')[2]}"
    return value


def field_docstrings(cls: type[Any]) -> dict[str, str]:
    """The attribute docstring of each field of a settings class, as one line, read from its
    source."""
    module = ast.parse(inspect.getsource(sys.modules[cls.__module__]))
    definition = next(
        node for node in module.body if isinstance(node, ast.ClassDef) and node.name == cls.__name__
    )
    found = {}
    for field, after in zip(definition.body, definition.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            found[field.target.id] = " ".join(str(after.value.value).split())
    return found


def text_of(value: str) -> str:
    """The string that the value of a `--set` override means where a string is wanted."""
    try:
        found = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return value
    return found if isinstance(found, str) else value.strip()


def parse_override(override: str) -> tuple[str, Any]:
    """Parse one `--set key=value`: the value is TOML, and a bare word is a string. Returns: key and
    value.

    Raises: SettingsError for what is no `key=value`.
    """
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise SettingsError(f"--set {override}: write it as key=value")
    try:
        return key, tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return key, text


def _set(values: dict[str, Any], override: str) -> None:
    key, value = parse_override(override)
    text = override.partition("=")[2]
    if not isinstance(value, str | list | dict):
        value = _Bare(text.strip(), value)
    node = values
    *path, last = key.split(".")
    for part in path:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise SettingsError(f"--set {override}: '{part}' is a value, not a group")
    node[last] = value


@dataclasses.dataclass(frozen=True)
class _Bare:
    """A word of the command line without quotes, which is a number, a truth value or a date, too:
    what it is depends on the setting."""

    text: str
    value: Any


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(value, _Bare) and origin not in (types.UnionType, typing.Union):
        value = value.text if hint is str or origin is typing.Literal else value.value
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        (inner,) = (argument for argument in arguments if argument is not type(None))
        return _convert(inner, value, where)
    if origin is typing.Literal:
        if value not in arguments:
            raise SettingsError(f"{where}: expected one of {', '.join(arguments)}, got {value!r}")
        return value
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
