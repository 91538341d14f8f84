"""What a start keeps of a config that it read and rehearsed, and what it does not believe."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.engine import load_engine
from engine.errors import ModelNotSupported
from engine.models.checkpoint_config import Rehearsed, read_checkpoint_config
from tests.harness.models import FAMILIES, save


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    folder = tmp_path / "llama"
    save(FAMILIES["llama-tied-llama3-rope"](), folder, 1)
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "rehearsed"


def test_the_next_start_finds_what_passed_and_nothing_else(llama: Path, cache: Path) -> None:
    first = Rehearsed(llama, cache)
    assert first.config is None
    assert not first.has("own")
    config = read_checkpoint_config(llama)
    first.keep(config, "own")
    second = Rehearsed(llama, cache)
    assert second.config == config
    assert second.has("own")
    assert not second.has("own kernels")
    assert not second.has("transformers")
    second.keep(config, "transformers")
    third = Rehearsed(llama, cache)
    assert third.has("own")
    assert third.has("transformers")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_config_comes_back_as_it_was_read(family: str, tmp_path: Path, cache: Path) -> None:
    save(FAMILIES[family](), tmp_path, 1)
    config = read_checkpoint_config(tmp_path)
    Rehearsed(tmp_path, cache).keep(config, "own")
    assert Rehearsed(tmp_path, cache).config == config


@pytest.mark.parametrize(
    ("name", "field"), [("config.json", "rms_norm_eps"), ("generation_config.json", "eos_token_id")]
)
def test_another_config_is_rehearsed_anew(name: str, field: str, llama: Path, cache: Path) -> None:
    Rehearsed(llama, cache).keep(read_checkpoint_config(llama), "own")
    path = llama / name
    before = path.read_text()
    path.write_text(json.dumps(json.loads(before) | {field: 7}))
    assert Rehearsed(llama, cache).config is None
    path.write_text(before)
    assert Rehearsed(llama, cache).config is not None


def test_other_code_rehearses_anew(llama: Path, cache: Path, tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "decoder.py").write_text("SCALE = 1")
    Rehearsed(llama, cache, code=[str(code)]).keep(read_checkpoint_config(llama), "own")
    assert Rehearsed(llama, cache, code=[str(code)]).has("own")
    (code / "decoder.py").write_text("SCALE = 2")
    assert not Rehearsed(llama, cache, code=[str(code)]).has("own")


@pytest.mark.parametrize("damage", ["cut", "other", "writable"])
def test_what_it_did_not_write_is_passed_over_and_written_anew(
    damage: str, llama: Path, cache: Path
) -> None:
    config = read_checkpoint_config(llama)
    Rehearsed(llama, cache).keep(config, "own")
    (path,) = cache.iterdir()
    if damage == "cut":
        path.write_text(path.read_text()[:-9])
    elif damage == "other":
        path.write_text('{"config": {"model_type": "llama", "shape": null}, "ways": ["own"]}')
    else:
        path.chmod(0o666)
    found = Rehearsed(llama, cache)
    assert found.config is None
    assert not found.has("own")
    found.keep(config, "own")
    assert Rehearsed(llama, cache).has("own")


def test_where_nothing_can_be_written_a_start_goes_on(llama: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    rehearsed = Rehearsed(llama, blocked / "rehearsed")
    rehearsed.keep(read_checkpoint_config(llama), "own")
    assert rehearsed.has("own")
    assert Rehearsed(llama, blocked / "rehearsed").config is None


def test_of_several_starts_at_once_one_rehearses(llama: Path, cache: Path) -> None:
    """The others wait for it, and find what it kept; or do it themselves when it failed."""
    is_in, may_go_on = threading.Event(), threading.Event()
    config = read_checkpoint_config(llama)

    def begin() -> None:
        with Rehearsed(llama, cache).alone():
            is_in.set()
            assert may_go_on.wait(60)
            raise ModelNotSupported("refused")

    def follow() -> bool:
        rehearsed = Rehearsed(llama, cache)
        with rehearsed.alone(wait_s=300.0):
            found = rehearsed.config is not None
            if not found:
                rehearsed.keep(config, "own")
        return found

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(begin)
        assert is_in.wait(60)
        others = [pool.submit(follow) for _ in range(3)]
        with Rehearsed(llama, cache).alone(wait_s=0.0):  # it waits for none of them
            assert not any(other.done() for other in others)
        may_go_on.set()
        with pytest.raises(ModelNotSupported):
            first.result(60)
        assert sorted(other.result(60) for other in others) == [False, True, True]


def test_a_second_start_imports_none_of_transformers(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which takes two CPU seconds. The first start is in this process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load_engine(EngineConfig(model=str(llama), device="cpu", num_blocks=44)).close()
    assert "transformers" in sys.modules
    program = (
        "import sys; from engine.config import EngineConfig\n"
        "from engine.engine import load_engine\n"
        "load_engine(EngineConfig(model=sys.argv[1], device='cpu', num_blocks=44))\n"
        "print('transformers' in sys.modules)"
    )
    second = subprocess.run(
        [sys.executable, "-c", program, str(llama)],
        env={"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert second.stdout.split()[-1] == "False"
