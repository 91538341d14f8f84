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
import psutil
import pytest
import torch
import transformers

from engine.config import EngineConfig
from engine.decoder.ahead import RowLaunch
from engine.engine import LLMEngine, load_engine
from engine.errors import LoadError, RankFailed
from engine.models.interface import DecodeRow
from engine.models.llama import read_llama_config
from engine.parallel.ahead import ParallelAhead
from engine.parallel.messages import StartRank
from engine.parallel.parallel_model import ParallelModel
from engine.request import Request, Sampling
from process.settings import SettingsError
from tests.conftest import SESSION_SEED
from tests.harness.engines import all_events, block_hash
from tests.harness.models import save

BOUND_S = 60.0
_SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "head_dim": 16,
    "eos_token_id": 1,
    "initializer_range": 0.3,  # so that logits are far apart, as a trained model's are
    "dtype": "float32",
}
CONFIG = EngineConfig(
    device="cpu",
    decoder="own",
    num_threads=1,
    num_blocks=200,
    block_size=4,
    max_num_tokens_per_step=160,
    max_num_running=16,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3: head norms and a tied head."""
    path = tmp_path_factory.mktemp("qwen3")
    save(transformers.Qwen3Config(**_SIZES, tie_word_embeddings=True), path, SESSION_SEED)
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
    return [pid for pid in model.pids if psutil.pid_exists(pid)] if _is_parallel(model) else []


def _is_parallel(model: object) -> bool:
    return isinstance(model, ParallelModel)


def _requests() -> list[Request]:
    generator = torch.Generator().manual_seed(SESSION_SEED)
    requests = []
    for index, length in enumerate((3, 40, 1, 150, 17)):
        prompt = torch.randint(2, 260, (length,), generator=generator).tolist()
        sampling = Sampling(max_tokens=9, ignore_eos=True)
        if index == 2:
            sampling = Sampling(max_tokens=9, ignore_eos=True, temperature=0.8, top_p=0.9, seed=5)
        requests.append(Request(f"r{index}", tuple(prompt), sampling, block_hash))
    return requests


def _run(engine: LLMEngine) -> dict[str, list[int]]:
    requests = _requests()
    outputs: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.submit(request)
    for event in all_events(engine):
        assert event.error is None
        outputs[event.request_id] += event.token_ids
    return outputs


def _until_step_fails(engine: LLMEngine) -> str:
    """Steps go on until one raises; what it says."""
    ends_s = time.monotonic() + BOUND_S
    engine.submit(
        dataclasses.replace(_requests()[0], sampling=Sampling(max_tokens=200, ignore_eos=True))
    )
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
    many = load_engine(
        dataclasses.replace(
            config, tensor_parallel=shares, pipeline_parallel=stages, rank_timeout_s=BOUND_S
        )
    )
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
from engine.parallel.messages import Start
from engine.parallel.rank_grid import Grid
from engine.parallel.rank_processes import RankProcesses
start = msgspec.json.decode(sys.argv[1], type=Start)
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
