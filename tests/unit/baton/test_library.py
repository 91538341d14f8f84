"""The engine from `baton`: there when torch is, no burden when it is not; and its benchmarks as a
command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from baton import cli

ROOT = Path(__file__).resolve().parents[3]


def test_the_library_is_loaded_when_it_is_asked_for() -> None:
    script = "\n".join(
        [
            "import sys",
            "import baton",
            "import baton.cli",
            "assert not {'grpc', 'redis', 'numpy'} & set(sys.modules)",
            "baton.SyncClient",
            "assert 'grpc' in sys.modules and 'redis' not in sys.modules",
            "from baton.cli import status",
            "assert not {'baton.cluster.config', 'process.tracing'} & set(sys.modules)",
            "from baton.cli import explain, generate",
            "slow = {'redis', 'cryptography', 'aiohttp', 'huggingface_hub', 'kubernetes'}",
            "assert not slow & set(sys.modules)",
            "from baton import *",
            "assert set(baton.__all__) <= set(globals()) and 'redis' in sys.modules",
            "assert 'engine_client' not in sys.modules and 'torch' not in sys.modules",
            "assert {'LLM', 'SamplingParams'} <= set(dir(baton))",
            "sys.modules['torch'] = None",
            "assert baton.SamplingParams(n=2).n == 2",
            "try:",
            "    baton.LLM",
            "except ImportError:",
            "    pass",
            "else:",
            "    raise SystemExit('LLM without torch?')",
            "try:",
            "    baton.nothing",
            "except AttributeError:",
            "    pass",
        ]
    )
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stderr


SHORT = ["--model", "baton-5m-draft", "--input-len", "8", "--output-len", "4"]


def test_bench_latency_ends_with_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    options = [*SHORT, "--batch", "2", "--rounds", "2", "--warm-up", "1", "--json"]
    assert cli.main(["bench", "latency", *options]) == 0
    out = capsys.readouterr().out.splitlines()
    value = json.loads(out[-1])
    assert value["benchmark"] == "latency" and value["model"] == "baton-5m-draft"
    assert value["ttft"]["num"] == 4 and value["itl"]["num"] == 12
    assert any("p99" in line for line in out[:-1])


def test_bench_throughput_of_texts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("Once upon a time\n\nThe dog\n")
    options = [*SHORT, "--prompts", "5", "--texts", str(texts), "--set", "max_num_running=2"]
    assert cli.main(["bench", "throughput", *options, "--json"]) == 0
    value = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (value["num_prompts"], value["num_output_tokens"]) == (5, 20)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--set", "max_num_runing=2"], "nearest is 'max_num_running'"),
        (["--set", "nothing"], "write it as key=value"),
        (["--texts", "/no/such/file"], "/no/such/file"),
        (["--prompts", "0"], "num_prompts: 0"),
    ],
)
def test_bench_says_what_is_wrong(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "throughput", *SHORT, *options]) == 1
    err = capsys.readouterr().err.splitlines()
    assert words in err[-1]
