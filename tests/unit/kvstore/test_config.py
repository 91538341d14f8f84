"""Wrong settings of a store end in one line that names the key."""

from __future__ import annotations

import pytest

from kvstore.config import KvStoreSettings
from process import settings


def test_the_defaults_are_valid_and_stay_on_this_machine() -> None:
    assert KvStoreSettings().listen.startswith("127.0.0.1:")


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("capacity_bytes=-1", "capacity_bytes"),
        ("node_id=a/b", "node_id"),
        ("max_lease_s=0", "max_lease_s"),
        ("max_lease_s=nan", "max_lease_s"),
        ("quarantine_grace_s=-1", "quarantine_grace_s"),
        ("heartbeat_s=5", "heartbeat_ttl_s"),
        ("listen=0.0.0.0:1", "advertise"),
        ("capacity_byte=1", "capacity_bytes"),
        ("listen=127.0.0.1", "listen"),
        ("listen=127.0.0.1:65536", "listen"),
        ("advertise=node:", "advertise"),
        ("listen=unix:/x/store.sock", "node_id"),
    ],
)
def test_a_wrong_value_is_refused_by_name(override: str, names: str) -> None:
    with pytest.raises(settings.SettingsError, match=names):
        settings.load(KvStoreSettings, overrides=[override])
