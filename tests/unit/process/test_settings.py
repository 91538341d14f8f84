"""A wrong key or value must stop the start with one line that names it; nothing may be ignored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest
from msgspec import Meta

from process import settings


@dataclass(frozen=True)
class Inner:
    REMOVED: ClassVar[Mapping[str, str]] = {"num_pages": "set num_blocks"}

    num_blocks: int = 4
    """Blocks."""


@dataclass(frozen=True)
class Outer:
    listen: str = "127.0.0.1:0"
    """Address."""
    timeout_s: float = 1.0
    """Seconds."""
    transport: Literal["shm", "nixl"] = "shm"
    """Transport."""
    names: tuple[str, ...] = ()
    """Names."""
    api_secret: str = ""
    """Secret."""
    limit: int | None = None
    """Limit."""
    inner: Inner = field(default_factory=Inner)
    """Group."""

    def __post_init__(self) -> None:
        if self.timeout_s <= 0:
            raise settings.SettingsError("timeout_s: must be above 0")


def test_file_then_overrides(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('timeout_s = 2\nnames = ["a"]\n[inner]\nnum_blocks = 7\n')
    loaded = settings.load(
        Outer, files=[file], overrides=["inner.num_blocks=9", "listen=127.0.0.1:80", "limit=3"]
    )
    assert loaded == Outer("127.0.0.1:80", 2.0, "shm", ("a",), "", 3, Inner(9))


def test_later_files_win_key_by_key(tmp_path: Path) -> None:
    """A secret lies in a file of its own, beside a group that the first file has begun."""
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text('timeout_s = 2\nnames = ["a", "b"]\n[inner]\nnum_blocks = 7\n')
    second.write_text('api_secret = "hush"\nnames = ["c"]\ninner.num_blocks = 8\n')
    loaded = settings.load(Outer, files=[first, second])
    assert loaded == Outer(timeout_s=2.0, names=("c",), api_secret="hush", inner=Inner(8))
    assert settings.load(Outer, files=[second, first]).inner == Inner(7)


@pytest.mark.parametrize("text", ["tiemout_s = 1", "[inner]\nnum_block = 1"])
def test_the_file_with_the_wrong_key_is_named(tmp_path: Path, text: str) -> None:
    right, wrong = tmp_path / "right.toml", tmp_path / "wrong.toml"
    right.write_text("timeout_s = 2\n")
    wrong.write_text(text)
    for order in ([right, wrong], [wrong, right]):
        with pytest.raises(settings.SettingsError, match=r"/wrong\.toml: .*unknown key") as told:
            settings.load(Outer, files=order)
        assert "right.toml" not in str(told.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("timeuot_s=1", "unknown key 'timeuot_s', nearest is 'timeout_s'"),
        ("inner.num_block=1", "unknown key 'num_block', nearest is 'num_blocks'"),
        ("inner.num_pages=1", "settings: inner: 'num_pages' was removed: set num_blocks"),
        ("timeout_s=fast", "timeout_s: expected float, got 'fast'"),
        ("timeout_s=-1", "timeout_s: must be above 0"),
        ("inner=3", "inner: expected a group of keys"),
        ("inner.num_blocks=true", "num_blocks: expected int, got True"),
        ("inner.num_blocks=1.5", "num_blocks: expected int, got 1.5"),
        ("transport=smoke", "transport: expected one of shm, nixl, got 'smoke'"),
        ("names=a", "names: expected a list"),
        ("listen", "write it as key=value"),
        ("listen.port=3", "expected str"),
    ],
)
def test_what_is_wrong_is_named(override: str, message: str) -> None:
    with pytest.raises(settings.SettingsError, match=message.replace("(", r"\(")):
        settings.load(Outer, overrides=[override])


def test_broken_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("timeout_s = [")
    with pytest.raises(settings.SettingsError, match="cannot be read as TOML"):
        settings.load(Outer, files=[file])
    with pytest.raises(settings.SettingsError, match=r"absent\.toml"):
        settings.load(Outer, files=[tmp_path / "absent.toml"])


def test_a_secret_of_the_wrong_kind_is_not_repeated() -> None:
    with pytest.raises(settings.SettingsError) as raised:
        settings.load(Outer, overrides=["api_secret=['hunter2']"])
    assert "api_secret" in str(raised.value) and "hunter2" not in str(raised.value)


def test_secrets_are_masked() -> None:
    line = settings.to_json(Outer(api_secret="hunter2"))
    assert "hunter2" not in line
    assert '"api_secret": "***"' in line


@pytest.mark.parametrize("address", ["h:0", "[::1]:65535", "unix:/x", "unix:/" + 106 * "x"])
def test_an_address_is_a_port_or_a_unix_socket(address: str) -> None:
    settings.check_address("listen", address)


@pytest.mark.parametrize(
    "address", ["", "h", ":1", "h:", "h:65536", "h:x", "unix:x", "unix:", "unix:/" + 107 * "x"]
)
def test_what_is_no_address_is_refused_by_name(address: str) -> None:
    with pytest.raises(settings.SettingsError, match=r"^listen: "):
        settings.check_address("listen", address)


@dataclass(frozen=True)
class Words:
    name: str = ""
    mode: Literal["off", "2"] = "off"
    maybe: str | None = None
    flag: bool = False
    num: int = 0


@pytest.mark.parametrize(
    "word", ["round_robin", "/var/tmp", "true", "1_000", "2026-01-31", "0x10", "a=b", "1.0", "a b"]
)
def test_a_bare_word_is_a_string_where_one_is_wanted(word: str) -> None:
    for given in (word, f'"{word}"'):
        found = settings.load(Words, overrides=[f"name={given}", f"maybe={given}"])
        assert (found.name, found.maybe) == (word, word)


def test_a_bare_word_is_what_the_setting_is() -> None:
    found = settings.load(Words, overrides=["mode=2", "flag=true", "num=1_000"])
    assert (found.mode, found.flag, found.num) == ("2", True, 1000)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("dtype=bfloat16", ("dtype", "bfloat16")),
        ('kv_dtype="int8"', ("kv_dtype", "int8")),
        ("num_blocks=7", ("num_blocks", 7)),
        ("exact=true", ("exact", True)),
        ("a.b=[1, 2]", ("a.b", [1, 2])),
        ("path=/var/tmp", ("path", "/var/tmp")),
    ],
)
def test_an_override_is_toml_or_a_bare_word(override: str, expected: tuple[str, object]) -> None:
    assert settings.parse_override(override) == expected


def test_a_host_and_its_port() -> None:
    assert settings.split_host_port("localhost:80") == ("localhost", 80)
    assert settings.split_host_port("[::1]:0") == ("::1", 0)
    for wrong in ("", "host", ":80", "host:", "host:65536", "host:-1", "host:\u0661"):
        with pytest.raises(ValueError, match="is not host:port"):
            settings.split_host_port(wrong)


@dataclass(frozen=True)
class Ranged:
    num_blocks: settings.PositiveInt = 1
    budget_s: settings.PositiveFloat = 1.0
    grace_s: settings.NonNegativeFloat = 0.0
    quantile: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    plain_s: float = 0.0
    limit_s: float | None = None

    def __post_init__(self) -> None:
        settings.check_ranges(self)


@dataclass(frozen=True)
class Group:
    ranged: Ranged = field(default_factory=Ranged)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("num_blocks", 0, "must be at least 1, got 0"),
        ("budget_s", 0.0, "must be above 0, got 0.0"),
        ("grace_s", -0.1, "must be at least 0, got -0.1"),
        ("quantile", 1.0, "must be below 1, got 1.0"),
        ("grace_s", float("inf"), "must be finite, got inf"),
        ("plain_s", float("nan"), "must be finite, got nan"),
    ],
)
def test_a_range_holds_for_a_value_however_it_is_made(key: str, value: Any, problem: str) -> None:
    with pytest.raises(settings.SettingsError, match=f"^{key}: {problem}$"):
        Ranged(**{key: value})
    with pytest.raises(settings.SettingsError, match=rf"^ranged\.{key}: {problem}$"):
        settings.load(Group, overrides=[f"ranged.{key}={value}"])
