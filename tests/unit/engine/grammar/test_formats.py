"""Values of `format` parse with Python's parser of that format."""

from __future__ import annotations

import datetime
import ipaddress
import json
import random
import re
import urllib.parse
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from engine.grammar.formats import PATTERNS
from tests.unit.engine.grammar.driver import Grammars, run, schema_spec


def _label_check(value: str) -> None:
    assert len(value) <= 253
    for label in value.split("."):
        assert re.fullmatch("(?!-)[a-zA-Z0-9-]{1,63}(?<!-)", label), value
        assert "--" not in label


def _email(value: str) -> None:
    local, _, domain = value.rpartition("@")
    assert local and not local.startswith(".") and ".." not in local
    assert "." in domain and "--" not in domain
    assert all(re.fullmatch("(?!-)[a-zA-Z0-9-]+(?<!-)", label) for label in domain.split("."))


def _uri(value: str) -> None:
    found = urllib.parse.urlsplit(value)
    assert found.scheme and found.geturl()
    assert found.port is None or 0 < found.port < 65536


def _duration(value: str) -> None:
    number = r"\d+"
    assert re.fullmatch(
        rf"P(?!$)({number}Y)?({number}M)?({number}W)?({number}D)?"
        rf"(T(?=\d)({number}H)?({number}M)?({number}S)?)?",
        value,
    ), value


CHECKS: dict[str, Callable[[str], Any]] = {
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "date-time": datetime.datetime.fromisoformat,
    "duration": _duration,
    "email": _email,
    "hostname": _label_check,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uuid": uuid.UUID,
    "uri": _uri,
}


@pytest.mark.parametrize("name", CHECKS)
def test_values_parse(
    name: str, grammars: Grammars, seed: int, scale: Callable[[int], int]
) -> None:
    rng = random.Random(f"{seed} {name}")
    compiled = grammars.compiled(schema_spec({"type": "string", "format": name}))
    num_whole = 0
    for _ in range(scale(600)):
        output = run(grammars, compiled.state(frozenset({1})), rng, num_free=rng.randint(0, 30))
        if output.is_whole:
            num_whole += 1
            CHECKS[name](json.loads(grammars.text(output.token_ids)))
    assert num_whole > 0


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        (
            "date",
            ["2024-02-29", "2000-02-29", "1900-02-28"],
            ["2023-02-29", "1900-02-29", "0000-01-01", "2024-11-31"],
        ),
        ("time", ["23:59:59Z", "00:00:00.25+01:30"], ["24:00:00Z", "12:00:60Z", "12:00:00"]),
        ("ipv4", ["0.0.0.0", "255.255.255.255"], ["256.1.1.1", "01.1.1.1"]),
        (
            "ipv6",
            ["::", "::1", "1::", "1:2:3:4:5:6:7:8", "1:2::7:8"],
            ["1::2::3", "1:2:3:4:5:6:7", ":1"],
        ),
        ("duration", ["P1D", "PT5M", "P1Y2M3DT4H", "P3W"], ["P", "PT", "P1DT", "1D"]),
        ("email", ["a.b@example.com"], ["a@b", ".a@b.com", "a..b@c.com"]),
    ],
)
def test_edges(name: str, inside: list[str], outside: list[str]) -> None:
    for text in inside:
        assert re.fullmatch(PATTERNS[name], text), text
    for text in outside:
        assert not re.fullmatch(PATTERNS[name], text), text
