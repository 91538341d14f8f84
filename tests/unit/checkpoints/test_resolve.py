"""What a user types becomes a whole checkpoint, or one line that says what is wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoints import CheckpointError, bundled_names, resolve


def test_local_folder_by_relative_and_absolute_path(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkpoint.parent)
    for model in (str(checkpoint), "tiny-qwen3", "./tiny-qwen3"):
        found = resolve(model, files="all")
        assert (found.name, found.path) == ("tiny-qwen3", checkpoint.resolve())


def test_bundled_models_are_whole() -> None:
    names = bundled_names()
    assert "baton-5m" in names
    for name in names:
        found = resolve(name, files="all")
        assert found.name == name
        assert found.path.parent.name == "bundled"


def _remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _pickle_only(folder: Path) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80")


def _no_weights(folder: Path) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()


def _truncate(num_bytes: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / "model-00001-of-00002.safetensors", num_bytes)


def _cut_last_byte(folder: Path) -> None:
    path = folder / "model-00002-of-00002.safetensors"
    os.truncate(path, path.stat().st_size - 1)


def _escaping_shard(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x"}}')


def _write(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None  # type: ignore[func-returns-value]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_remove("config.json"), "no config.json"),
        (_write("config.json", "{"), "cannot be read as JSON"),
        (_write("config.json", "[]"), "expected a JSON object"),
        (_remove("tokenizer.json"), "no tokenizer.json"),
        (_write("tokenizer.json", '{"version'), "cannot be read as JSON"),
        (_pickle_only, "refused"),
        (_no_weights, "no .safetensors file"),
        (_truncate(0), "truncated safetensors header"),
        (_truncate(5), "truncated safetensors header"),
        (_truncate(40), "truncated safetensors header"),
        (_cut_last_byte, "where its header says"),
        (_remove("model-00002-of-00002.safetensors"), "1 of 2 shards missing"),
        (_escaping_shard, "leaves the folder"),
        (_write("model.safetensors.index.json", "{}"), "no weight_map"),
    ],
)
def test_broken_checkpoint_is_one_line(
    checkpoint: Path, damage: Callable[[Path], None], says: str
) -> None:
    damage(checkpoint)
    with pytest.raises(CheckpointError, match=says) as raised:
        resolve(str(checkpoint), files="all")
    assert "\n" not in str(raised.value)
    assert str(checkpoint) in str(raised.value)


def test_tokenizer_only_does_not_ask_for_weights(checkpoint: Path) -> None:
    """The router's machine has no weights and needs none."""
    _no_weights(checkpoint)
    assert resolve(str(checkpoint), files="tokenizer").path == checkpoint
    with pytest.raises(CheckpointError):
        resolve(str(checkpoint), files="all")


def test_a_header_that_is_no_json_is_refused(single_file: Callable[[], Path]) -> None:
    folder = single_file()
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[8] = 0xFF
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="broken safetensors header"):
        resolve(str(folder), files="all")


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("", "empty"),
        ("./nowhere", "no such folder"),
        ("/nowhere/at/all", "no such folder"),
        ("~/nowhere-at-all", "no such folder"),
        ("baton-7m", "there are baton-5m"),
        ("a/b/c", "neither a folder"),
        ("no spaces here", "neither a folder"),
    ],
)
def test_wrong_names_say_so_without_asking_anybody(model: str, says: str) -> None:
    with pytest.raises(CheckpointError, match=says) as raised:
        resolve(model, files="tokenizer")
    assert "\n" not in str(raised.value)


def test_a_file_is_no_checkpoint(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match="is a file"):
        resolve(str(checkpoint / "config.json"), files="tokenizer")
