"""A worker's keys: what was signed verifies, a changed file is taken up, a bad one changes
nothing.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from process import signing_keys
from services.worker.handle import MAC_BYTES, HandleKeys

KEYS = HandleKeys([signing_keys.new_key(), signing_keys.new_key()])


@given(st.binary(max_size=64), st.integers(0, MAC_BYTES * 8 - 1))
def test_only_the_exact_signature_of_the_exact_content_verifies(content: bytes, bit: int) -> None:
    for key_id in KEYS.key_ids:
        mac = KEYS.mac(key_id, content)
        assert KEYS.is_signed(key_id, content, mac)
        assert not KEYS.is_signed(key_id, content + b"x", mac)
        flipped = bytearray(mac)
        flipped[bit // 8] ^= 1 << bit % 8
        assert not KEYS.is_signed(key_id, content, bytes(flipped))
        assert not KEYS.is_signed(key_id, content, mac[:-1])
        assert not KEYS.is_signed(key_id, content, b"")
    one, other = KEYS.key_ids
    assert not KEYS.is_signed(one, content, KEYS.mac(other, content))
    assert not KEYS.is_signed("", content, KEYS.mac(one, content))


def test_a_mac_for_anything_else_is_none_for_a_handle() -> None:
    """The same key over the same bytes without our personal string."""
    key = signing_keys.new_key()
    keys = HandleKeys([key])
    plain = hashlib.blake2b(b"content", digest_size=MAC_BYTES, key=key.secret).digest()
    assert not keys.is_signed(key.key_id, b"content", plain)


def test_a_changed_file_is_taken_up_by_signer_and_verifier(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    old = signing_keys.create(path)
    signer, verifier = HandleKeys.load(path), HandleKeys.load(path)
    before = signer.mac(signer.signing_key_id(), b"x")
    new = signing_keys.rotate(path)
    assert signer.signing_key_id() == new.key_id
    assert verifier.key_ids == (old.key_id,)
    assert verifier.is_signed(new.key_id, b"x", signer.mac(new.key_id, b"x"))
    assert verifier.key_ids == (new.key_id, old.key_id)
    assert verifier.is_signed(old.key_id, b"x", before)
    assert signer.num_reloads == verifier.num_reloads == 1
    signing_keys.drop_old(path)
    assert verifier.signing_key_id() == new.key_id
    assert not verifier.is_signed(old.key_id, b"x", before)


def test_an_unknown_key_reads_the_file_once_per_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forged handles do not make a worker read files."""
    path = tmp_path / "keys"
    signing_keys.create(path)
    keys = HandleKeys.load(path)
    reads = []
    monkeypatch.setattr(signing_keys, "load", reads.append)
    for _ in range(100):
        assert not keys.is_signed("forged", b"x", bytes(MAC_BYTES))
    assert not reads


def test_no_file_is_no_keys() -> None:
    keys = HandleKeys.of("")
    assert keys.key_ids == ()
    assert not keys.is_signed("", b"", b"")
