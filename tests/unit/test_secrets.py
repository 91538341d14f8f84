"""No setting that holds a secret shows it, in a repr or in the line at start.

Every settings class of every component is walked, so a field added tomorrow is, too.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any

import pytest

from baton.client import Credentials
from baton.cluster.running_clusters import ClusterState
from kvstore.config import KvStoreSettings
from process import settings
from process.api_keys import ApiKey
from process.signing_keys import SigningKey
from services.router.caller import Caller
from services.router.config import RouterSettings
from services.worker.config import WorkerSettings

WORD = "hunter2"
COMPONENTS = (RouterSettings, WorkerSettings, KvStoreSettings)
NAMES = ("secret", "password", "token", "api_key", "credential")


def classes(cls: type[Any]) -> Iterator[type[Any]]:
    yield cls
    for hint in typing.get_type_hints(cls).values():
        if dataclasses.is_dataclass(hint):
            yield from classes(typing.cast(type[Any], hint))


def secret_fields(cls: type[Any]) -> list[str]:
    return [
        field.name
        for field in dataclasses.fields(cls)
        if field.type == "str"
        and any(part in field.name for part in NAMES)
        and not field.name.endswith("_file")
    ]


def needed(cls: type[Any]) -> dict[str, Any]:
    return {"model": "m"} if cls is RouterSettings else {}


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_secret_is_in_no_repr_and_in_no_line_at_start(component: type[Any]) -> None:
    found = 0
    for cls in classes(component):
        for name in secret_fields(cls):
            made = cls(**{**needed(cls), name: WORD})
            assert WORD not in repr(made), (cls, name)
            assert WORD not in settings.to_json(made), (cls, name)
            found += 1
    assert found or component is not RouterSettings


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_password_in_the_url_of_redis_is_masked(component: type[Any]) -> None:
    url = f"rediss://user:{WORD}@redis.example:6380/0"
    made = component(**needed(component), redis_url=url)
    assert WORD not in repr(made)
    line = settings.to_json(made)
    assert WORD not in line and "redis.example:6380" in line


def test_other_values_with_secrets_do_not_show_them() -> None:
    shown = [
        Credentials(api_key=WORD),
        ClusterState("a", "m", "1 1", 0.0, f"redis://:{WORD}@h/0", api_key=WORD),
        ApiKey("acme", digest="ab" * 32),
        SigningKey("k", b"hunter2" + bytes(25)),
        Caller("acme", key_id="0123456789ab"),
    ]
    for value in shown:
        assert WORD not in repr(value) and "ab" * 32 not in repr(value)
