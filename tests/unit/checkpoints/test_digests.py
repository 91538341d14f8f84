"""Digests say whether two folders compute the same, wherever they lie."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from checkpoints import (
    CheckpointError,
    config_digest,
    tokenizer_digest,
    weights_digest,
)


def test_a_copy_has_equal_digests(checkpoint: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(checkpoint, tmp_path / "elsewhere"))
    for digest in (tokenizer_digest, config_digest, weights_digest):
        assert digest(checkpoint) == digest(copy)
        assert len(digest(copy)) == 64


def test_one_flipped_bit_of_a_weight_shows(checkpoint: Path) -> None:
    before = weights_digest(checkpoint)
    path = checkpoint / "model-00002-of-00002.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert weights_digest(checkpoint) != before


def test_weight_file_names_do_not_count(checkpoint: Path) -> None:
    """A snapshot with renamed shards is the same model as long as their order holds."""
    before = weights_digest(checkpoint)
    index = checkpoint / "model.safetensors.index.json"
    text = index.read_text()
    for number in ("1", "2"):
        old, new = f"model-0000{number}-of-00002.safetensors", f"part-{number}.safetensors"
        (checkpoint / old).rename(checkpoint / new)
        text = text.replace(old, new)
    index.write_text(text)
    assert weights_digest(checkpoint) == before


def test_config_digest_is_of_the_value(checkpoint: Path) -> None:
    path = checkpoint / "config.json"
    config = json.loads(path.read_text())
    before = config_digest(checkpoint)
    reordered = dict(reversed(config.items())) | {"transformers_version": "9", "_name_or_path": "x"}
    path.write_text(json.dumps(reordered, indent=4))
    assert config_digest(checkpoint) == before
    path.write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    assert config_digest(checkpoint) != before


def test_tokenizer_digest_counts_the_tokenizer_only(checkpoint: Path) -> None:
    before = tokenizer_digest(checkpoint)
    (checkpoint / "tokenizer_config.json").write_text("{}")
    assert tokenizer_digest(checkpoint) == before
    path = checkpoint / "tokenizer.json"
    path.write_text(path.read_text() + "\n")
    assert tokenizer_digest(checkpoint) != before


def test_progress_counts_every_byte_once(checkpoint: Path) -> None:
    seen: list[tuple[int, int]] = []
    weights_digest(checkpoint, lambda what, done, total: seen.append((done, total)))
    total = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_a_broken_checkpoint_has_no_digest(checkpoint: Path) -> None:
    (checkpoint / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError):
        weights_digest(checkpoint)


def test_pieces_count_in_their_order(checkpoint: Path) -> None:
    """A file is digested in pieces at once: none is left out, and two that changed places show."""
    path = checkpoint / "model-00001-of-00002.safetensors"
    content = path.read_bytes()
    assert len(content) > 1000
    before = weights_digest(checkpoint, piece_bytes=200)
    assert weights_digest(checkpoint, piece_bytes=200) == before
    changed = [content[-600:-400] + content[-800:-600] + content[-400:]]
    changed += [content[-800:-400] + bytes([content[-400] ^ 1]) + content[-399:]]
    changed += [content[-800:-1] + bytes([content[-1] ^ 1])]
    found = {before}
    for tail in changed:
        path.write_bytes(content[:-800] + tail)
        found.add(weights_digest(checkpoint, piece_bytes=200))
    assert len(found) == 4
