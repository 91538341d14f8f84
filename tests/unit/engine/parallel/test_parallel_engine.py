"""An engine over processes of its own: the tokens of one process, refusals by name, and a clean end
however it comes."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import torch
import transformers

from engine.batch import Batch, TokenSpan
from engine.config import EngineConfig
from engine.decoder.ahead import RowLaunch
from engine.engine import LLMEngine, load_engine
from engine.errors import LoadError, RankFailed
from engine.models import loader
from engine.models.interface import DecodeRow
from engine.models.llama import read_llama_config
from engine.parallel.messages import Change, StartRank
from engine.parallel.parallel_launches import ParallelAhead
from engine.parallel.parallel_model import ParallelModel
from engine.parallel.rank_memory import RankMemory
from engine.parallel.rank_processes import RankProcesses
from engine.request import Request
from process.settings import SettingsError
from tests.conftest import SESSION_SEED
from tests.harness.engines import finish, make_request, tokens_of
from tests.harness.models import save

BOUND_S = 60.0
CONFIG = EngineConfig(
    device="cpu", decoder="own", num_threads=1, num_blocks=200, block_size=4,
    max_num_tokens_per_step=160, max_num_running=16,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3: head norms and a tied head."""
    path = tmp_path_factory.mktemp("qwen3")
    config = transformers.Qwen3Config(
        vocab_size=260, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=256, head_dim=16,
        eos_token_id=1, dtype="float32", tie_word_embeddings=True,
        initializer_range=0.3,  # so that logits are far apart, as a trained model's are
    )  # fmt: skip
    save(config, path, SESSION_SEED)
    return path


@pytest.fixture
def engines() -> Iterator[list[LLMEngine]]:
    """Closed afterwards; none of their processes is left."""
    made: list[LLMEngine] = []
    yield made
    processes = [psutil.Process(pid) for engine in made for pid in _living(engine)]
    for engine in made:
        engine.close()
    _, alive = psutil.wait_procs(processes, timeout=BOUND_S)
    assert not alive


def _living(engine: LLMEngine) -> list[int]:
    model = engine._model
    pids = model.pids if isinstance(model, ParallelModel) else ()
    return [pid for pid in pids if psutil.pid_exists(pid)]


def _requests() -> list[Request]:
    generator = torch.Generator().manual_seed(SESSION_SEED)
    requests = []
    for index, length in enumerate((3, 40, 1, 150, 17)):
        prompt = torch.randint(2, 260, (length,), generator=generator).tolist()
        drawn = {"temperature": 0.8, "top_p": 0.9, "seed": 5} if index == 2 else {}
        requests.append(make_request(f"r{index}", prompt, max_tokens=9, **drawn))
    return requests


def _run(engine: LLMEngine) -> dict[str, list[int]]:
    for request in _requests():
        engine.submit(request)
    events = finish(engine)
    assert not any(event.error for own in events.values() for event in own)
    return {name: tokens_of(own) for name, own in events.items()}


def _until_step_fails(engine: LLMEngine) -> str:
    """Steps go on until one raises; what it says."""
    ends_s = time.monotonic() + BOUND_S
    engine.submit(make_request("r", (5, 6, 7), max_tokens=200))
    with pytest.raises(RankFailed) as caught:
        while time.monotonic() < ends_s:
            engine.step()
    return str(caught.value)


@pytest.mark.parametrize(("shares", "stages"), [pytest.param(2, 1, marks=pytest.mark.long), (2, 2)])
def test_processes_give_the_tokens_of_one(
    shares: int,
    stages: int,
    folder: Path,
    engines: list[LLMEngine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the same fingerprint: they may exchange KV. Then a rank is killed."""
    launched: list[int] = []
    real = ParallelAhead.launch

    def launch(self: ParallelAhead, rows: Sequence[DecodeRow]) -> RowLaunch:
        launched.append(len(rows))
        return real(self, rows)

    monkeypatch.setattr(ParallelAhead, "launch", launch)
    config = dataclasses.replace(CONFIG, model=str(folder))
    one = load_engine(config)
    degrees = {"tensor_parallel": shares, "pipeline_parallel": stages}
    many = load_engine(dataclasses.replace(config, **degrees, rank_timeout_s=BOUND_S))
    engines += [one, many]
    assert many.model_info.fingerprint == one.model_info.fingerprint
    assert many.kv.layout == one.kv.layout
    assert _run(many) == _run(one)
    assert sum(launched) > 20, "decode steps are launched ahead"

    ahead = many._model.ahead
    assert ahead is not None
    ahead.drain()  # as after an error: all ranks begin anew

    # Blocks that several processes filled, in an engine of one process.
    one.kv.host_view[:] = 0
    copied = _run(many)
    one.kv.host_view[:] = many.kv.host_view
    assert one.kv.host_view.any() and copied == _run(one)

    pids = _living(many)
    assert len(pids) == shares * stages - 1
    many.check_alive()
    os.kill(pids[-1], signal.SIGKILL)
    message = _until_step_fails(many)
    assert message.startswith(f"rank {len(pids)} (stage 0, share {shares - 1}), pid {pids[-1]}")
    assert message.endswith("ended (signal 9)") and "\n" not in message
    with pytest.raises(RankFailed):
        many.check_alive()
    with pytest.raises(RankFailed):
        many.step()


_PARENT = """
import sys, msgspec
import engine.parallel.rank_main
assert "transformers" not in sys.modules, "a rank starts without it"
from engine.parallel.messages import StartRank
from engine.parallel.rank_grid import Grid
from engine.parallel.rank_processes import RankProcesses
start = msgspec.json.decode(sys.argv[1], type=StartRank)
ranks = RankProcesses(Grid(1, 2), [start], timeout_s=60.0, files=(0, 1), on_failure=lambda: None)
ranks.start()
ranks.wait_ready()
sys.stdout.write(f"{ranks.pids[0]}\\n")
sys.stdout.flush()
sys.stdin.read()
"""


def test_ranks_end_with_a_parent_that_is_killed(folder: Path) -> None:
    """The real ones: loaded, and waiting for others to meet."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
    config = dataclasses.replace(
        CONFIG, pipeline_parallel=2, dtype="float32", context_window=256, model=str(folder)
    )
    shape = read_llama_config(transformers.AutoConfig.from_pretrained(folder))
    start = msgspec.json.encode(StartRank(config, str(folder), shape, 1)).decode()
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT, start],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    ) as parent:
        assert parent.stdout is not None
        rank = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        _, alive = psutil.wait_procs([rank], timeout=BOUND_S)
    assert not alive


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tensor_parallel": 3}, "tensor_parallel: 3 does not divide the 8 attention heads"),
        ({"tensor_parallel": 8}, "tensor_parallel: 8 does not divide the 4 key-value heads"),
        ({"pipeline_parallel": 4}, "pipeline_parallel: 4 stages, but .* has 3 layers"),
        (
            {"tensor_parallel": 2, "kv_dtype": "int8"},
            "kv_dtype: int8 is not for a model of several",
        ),
        ({"tensor_parallel": 4, "exact": True}, "exact: the sum over 4 ranks has no fixed order"),
        ({"pipeline_parallel": 2, "decoder": "transformers"}, "only our own decoder"),
    ],
)
def test_what_cannot_be_shared_is_refused_by_name(
    fields: dict[str, Any], message: str, folder: Path
) -> None:
    with pytest.raises(LoadError, match=message):
        load_engine(dataclasses.replace(CONFIG, model=str(folder), **fields))


@pytest.mark.parametrize("name", ["tensor_parallel", "pipeline_parallel", "rank_timeout_s"])
def test_settings_out_of_range_are_refused(name: str) -> None:
    with pytest.raises(SettingsError, match=name):
        EngineConfig(**{name: 0})


_OWN_CACHE = """
from engine.parallel import rank_main
from engine.parallel.rank_memory import RankMemory
from engine.parallel.cuda_ipc import SharedCache
rank_main._Child._memory = lambda self, layout, ranks, n, device: RankMemory(
    layout, ranks.place, n, device
)
rank_main._share = lambda memory: SharedCache(0, b"", 0)
rank_main.run()
"""


def test_blocks_are_cleared_and_copied_at_every_rank(
    folder: Path, engines: list[LLMEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ranks with caches of their own, as on CUDA, here on CPU: what the engine does to a block
    is done at each, and `settle` waits for it."""
    told: list[object] = []  # what the other rank is told
    tell, load_parallel = RankProcesses.tell, loader.load_parallel

    def noted(self: RankProcesses, message: Any) -> None:
        told.append(message)
        tell(self, message)

    def load(*args: Any, **fields: Any) -> ParallelModel:
        return load_parallel(*args, **fields, program=(sys.executable, "-P", "-c", _OWN_CACHE))

    def make_memory(self: ParallelModel, num_blocks: int) -> RankMemory:
        how: dict[str, Any] = {"on_change": self._processes.tell, "settle": self._settle}
        return RankMemory(self.layout, self._place, num_blocks, "cpu", **how)

    monkeypatch.setattr(RankProcesses, "tell", noted)
    monkeypatch.setattr(loader, "load_parallel", load)
    monkeypatch.setattr(ParallelModel, "make_memory", make_memory)
    engine = load_engine(
        dataclasses.replace(
            CONFIG, model=str(folder), num_blocks=40, tensor_parallel=2, context_window=128
        )
    )
    engines.append(engine)
    kv = engine.kv

    def decode(*blocks: int) -> torch.Tensor:
        """Logits of a ninth token, whose predecessors are in the first two blocks."""
        return engine._model.forward(Batch((17,), (TokenSpan(8, 1, blocks),), (0,))).clone()

    assert not kv.is_whole and kv.parts == (), "nobody can reach the other rank's part"
    assert kv.cache.nbytes == 40 * kv.layout.block_bytes // 2
    engine._model.forward(Batch(tuple(range(5, 13)), (TokenSpan(0, 8, (3, 4)),), (7,)))
    expected = decode(3, 4, 9)

    kv.copy(3, 20)
    kv.copy(4, 21)
    kv.clear(3)
    kv.clear(4)
    assert told[-4:] == [Change(20, 3), Change(21, 4), Change(3), Change(4)]
    kv.settle()
    num_told = len(told)
    kv.settle()
    assert len(told) == num_told, "nothing has changed since"
    assert torch.equal(decode(20, 21, 9), expected)

    # What is left of (3, 4) is zeros at both ranks: the same as of blocks that nobody wrote.
    assert not np.asarray(kv.host_view[[3, 4]]).any()
    assert torch.equal(decode(3, 4, 9), decode(30, 31, 9))
    assert not torch.allclose(decode(3, 4, 9), expected)
