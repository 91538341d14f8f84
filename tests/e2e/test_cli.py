"""The command line with real processes behind it: what users type, and that nothing stays."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from baton import ClusterConfig, cli
from baton.client import SyncClient
from checkpoints.resolve import resolve
from tests.harness import fake_hub
from tests.harness.cluster import STORE_SIZE
from tests.harness.fake_hub import NAME, Hub

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
WAIT_S = 160.0
"""Of a request whose only decode worker starts again beside everything else."""
NUM_PARTS = 5


class Up:
    """One `baton up` and the processes that it started."""

    def __init__(self, folder: Path, *options: str, **environment: str) -> None:
        self.environment = _environment(folder) | environment
        self.process = subprocess.Popen(
            [sys.executable, "-m", "baton.cli", "up", "--port", "0", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
        )
        self.children: list[psutil.Process] = []
        self.hints = ""
        """What it prints after its ready line."""

    def wait_ready(self) -> str:
        """Its ready line; from then on `children` are known."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("ready at "), self.process.communicate(timeout=STOP_TIMEOUT_S)
        self.children = psutil.Process(self.process.pid).children(recursive=True)
        # Each worker has a process that compiles grammars.
        assert len(self.children) == NUM_PARTS + 2, self.children
        for said in iter(self.process.stdout.readline, "Ctrl-C stops it.\n"):
            assert said, self.process.communicate(timeout=STOP_TIMEOUT_S)
            self.hints += said
        return line

    def baton(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Another command of the same user."""
        return _in_this_process(self.environment, *arguments)

    def wait_for_nobody(self) -> None:
        _, alive = psutil.wait_procs(self.children, timeout=STOP_TIMEOUT_S)
        assert not alive, alive

    def end(self) -> None:
        """Whatever a failed test left."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=STOP_TIMEOUT_S)


def _environment(folder: Path) -> dict[str, str]:
    """A user of their own: no state of, and for, anybody else."""
    paths = f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"
    return os.environ | {
        "XDG_RUNTIME_DIR": str(folder),
        "TMPDIR": str(folder),
        "PYTHONPATH": paths,
        "COLUMNS": "200",
    }


def _in_this_process(
    environment: dict[str, str], *arguments: str
) -> subprocess.CompletedProcess[str]:
    """A command whose interpreter need not start anew."""
    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        for name, value in environment.items():
            patch.setenv(name, value)
        code = cli.main(arguments)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def _baton(
    environment: dict[str, str], *arguments: str, said: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "baton.cli", *arguments],
        input=said,
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        env=environment,
    )


def _with_disk(folder: Path, *options: str, **environment: str) -> Up:
    """A cluster with a file tier."""
    disk = folder / "disk"
    disk.mkdir()
    settings = (STORE_SIZE, f"store.file_tier_dir={disk}", "store.file_tier_bytes=100_000_000")
    given = [part for setting in settings for part in ("--set", setting)]
    return Up(folder, *given, *options, **environment)


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    """A hub that has the bundled model."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
            patch.delenv(name)
        with fake_hub.serve(resolve("baton-5m", files="all").path) as hub:
            yield hub


@pytest.fixture(scope="module")
def up(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("up")
    own = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(folder / "home")}
    started = _with_disk(folder, "--model", NAME, **own)
    try:
        started.wait_ready()
        yield started
    finally:
        started.end()


def test_generate_streams_and_proves(up: Up) -> None:
    prompt = "Once upon a time there was a fox who lived in a quiet forest by the sea."
    arguments = ("generate", prompt, "--max-tokens", "24", "--temperature", "0")
    shown = _baton(up.environment, *arguments)
    assert (shown.returncode, shown.stderr) == (0, "")
    for word in ("prefill-0", "decode-0", "shm", "float32", "host"):
        assert word in shown.stdout.split()
    value = json.loads(up.baton(*arguments, "--json").stdout)
    assert value["text"] in shown.stdout
    prefill, decode = value["provenance"]["legs"]
    num_prompt = value["usage"]["num_prompt_tokens"]
    assert prefill["num_tokens_computed"] == num_prompt - prefill["num_tokens_local"] <= 16
    assert decode["num_tokens_computed"] == 0
    assert value["usage"]["num_output_tokens"] == len(value["token_ids"]) == 24
    assert set(value["times"]) >= {"tokenize", "prefill_compute", "decode"}


def test_the_same_seed_says_the_same(up: Up) -> None:
    arguments = ("generate", "Once", "--max-tokens", "16", "--temperature", "1", "--json")
    first, again, other = (
        json.loads(up.baton(*arguments, "--seed", seed).stdout) for seed in ("5", "5", "6")
    )
    assert first["token_ids"] == again["token_ids"] != other["token_ids"]
    assert first["seed"] == 5


def test_token_ids_in_and_out(up: Up) -> None:
    arguments = ("generate", "7, 8, 9", "--token-ids", "--max-tokens", "4", "--temperature", "0")
    shown = up.baton(*arguments)
    value = json.loads(up.baton(*arguments, "--json").stdout)
    assert value["usage"]["num_prompt_tokens"] == 3
    assert shown.stdout.splitlines()[0].split() == [str(token) for token in value["token_ids"]]


def test_chat_from_a_pipe(up: Up) -> None:
    lines = "Tell me a story.\nAnd then?\n/quit\n"
    asked = ("chat", "--max-tokens", "16", "--temperature", "0")
    chat = _baton(up.environment, *asked, said=lines)
    assert (chat.returncode, chat.stderr) == (0, "")
    sizes = [int(size) for size in re.findall(r"\[(\d+) prompt tokens", chat.stdout)]
    assert len(sizes) == 2 and sizes[1] > sizes[0] + 16 - 1


def test_status(up: Up) -> None:
    up.baton("generate", "hello", "--max-tokens", "2")
    value = json.loads(up.baton("status", "--json").stdout)
    assert {worker["worker_id"] for worker in value["workers"]} == {"prefill-0", "decode-0"}
    assert [store["reachable"] for store in value["stores"]] == [True]
    assert value["redis_reachable"] and value["num_requests_finished"] > 0
    assert all(part["integrity_error"] == "" for part in value["workers"] + value["stores"])
    shown = up.baton("status").stdout
    assert "prefill-0" in shown and "hit rate" in shown and "leases" in shown


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--temperature", "-1"), "temperature"),
        (("--top-p", "0"), "top_p"),
        (("--max-tokens", "100000"), "max_tokens"),
        (("--model", "another"), "another"),
    ],
)
def test_refusals_name_the_field(up: Up, options: tuple[str, ...], says: str) -> None:
    refused = up.baton("generate", "hello", *options)
    assert refused.returncode == 1 and says in refused.stderr
    assert len(refused.stderr.splitlines()) == 1, refused.stderr


def test_a_busy_port(up: Up) -> None:
    (state,) = (Path(up.environment["XDG_RUNTIME_DIR"]) / "baton").glob("*.json")
    listening = json.loads(state.read_text())
    port = listening["address"].rpartition(":")[2]
    refused = up.baton("up", "--port", port)
    assert refused.returncode == 1
    assert f"port {port}" in refused.stderr and len(refused.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "part",
    [
        "worker",
        # Each says it by the same means: tests/wire/test_processes.py and others.
        *(
            pytest.param(part, marks=pytest.mark.long)
            for part in ("store", "router", "prefill", "decode")
        ),
    ],
)
def test_a_wrong_setting_is_the_components_own_line(tmp_path: Path, part: str) -> None:
    refused = _baton(_environment(tmp_path), "up", "--port", "0", "--set", f"{part}.lisen=x")
    assert refused.returncode == 1
    last = refused.stderr.splitlines()[-1]
    assert "unknown key 'lisen', nearest is 'listen'" in last
    assert "Traceback" not in refused.stderr
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("baton-cluster")]


def test_a_broken_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    model = str(tmp_path / "model")
    refused = _in_this_process(_environment(tmp_path), "up", "--model", model)
    assert refused.returncode == 1
    assert "no tokenizer.json" in refused.stderr and len(refused.stderr.splitlines()) == 1


@pytest.mark.usefixtures("up")
def test_a_checkpoint_by_its_hub_name(hub: Hub) -> None:
    """Works like a bundled one in all these tests: fetched once, though four processes want it."""
    assert hub.gets
    assert sorted(hub.gets) == sorted(set(hub.gets)), "each file was fetched once"


ASKED_BY_DEMO = ("demo", "--prompt", "x" * 40, "--max-tokens", "8")


def test_the_demo_compares_two_answers(up: Up, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the cluster that runs: its own starts as that of `baton up` does, by the same function."""

    @contextlib.contextmanager
    def running(_: ClusterConfig) -> Iterator[SimpleNamespace]:
        (state,) = (Path(up.environment["XDG_RUNTIME_DIR"]) / "baton").glob("*.json")
        address = json.loads(state.read_text())["address"]
        yield SimpleNamespace(processes={}, connect=lambda: SyncClient(address))

    monkeypatch.setattr("baton.cli.up.running", running)
    demo = up.baton(*ASKED_BY_DEMO)
    assert demo.returncode == 0, demo.stderr
    assert "decode computed no prompt token" in demo.stdout


@pytest.mark.long
def test_the_demo_starts_and_ends_a_cluster(tmp_path: Path) -> None:
    demo = _baton(_environment(tmp_path), *ASKED_BY_DEMO)
    assert demo.returncode == 0, demo.stderr
    assert "decode computed no prompt token" in demo.stdout
    assert not list(tmp_path.glob("baton-cluster*"))


def test_ctrl_c_while_it_starts_leaves_nothing(tmp_path: Path) -> None:
    up = Up(tmp_path)
    try:
        assert up.process.stderr is not None
        assert up.process.stderr.readline().startswith("redis ready")
        up.children = psutil.Process(up.process.pid).children(recursive=True)
        up.process.send_signal(signal.SIGINT)
        _, err = up.process.communicate(timeout=STOP_TIMEOUT_S)
        assert up.process.returncode == 130 and "Traceback" not in err
        up.wait_for_nobody()
    finally:
        up.end()


def test_a_part_that_dies_comes_back_and_the_next_answer_is_right(up: Up) -> None:
    """The only decode worker: a request that comes meanwhile waits for it. The router may try the
    dead process once before it knows: that attempt is a leg of its own, with what ended it."""
    asked = ("generate", "Once upon a time", "--max-tokens", "8", "--temperature", "0")
    asked += ("--timeout", str(WAIT_S), "--json")
    before = json.loads(up.baton(*asked).stdout)
    by_line = {" ".join(child.cmdline()): child for child in up.children}
    victim = next(child for line, child in by_line.items() if "services.decode" in line)
    victim.kill()
    assert up.process.stderr is not None
    seen = ""
    while "decode-0 restarting" not in seen:
        seen = up.process.stderr.readline()
        assert seen, "baton up ended"
    answer = up.baton(*asked)
    assert answer.returncode == 0, answer.stderr
    after = json.loads(answer.stdout)
    assert after["token_ids"] == before["token_ids"]
    legs = [leg for leg in after["provenance"]["legs"] if leg["role"] == "decode"]
    assert {leg["worker_id"] for leg in legs} == {"decode-0"}
    assert [leg["ended_by"] for leg in legs][-1] == "", legs
    assert {leg["ended_by"] for leg in legs[:-1]} <= {"worker_lost"}, legs
    assert legs[-1]["incarnation"] not in {leg["incarnation"] for leg in legs[:-1]}


@pytest.mark.long
def test_a_killed_baton_up_leaves_no_orphan(tmp_path: Path) -> None:
    """SIGKILL: the kernel ends the children, and the next command does not believe the state. Each
    time: test_supervisor.py and test_run_folder.py of tests/unit/baton."""
    up = Up(tmp_path)
    try:
        up.wait_ready()
        up.process.kill()
        up.process.communicate(timeout=STOP_TIMEOUT_S)
        up.wait_for_nobody()
        lost = up.baton("status")
        assert lost.returncode == 1 and "baton up" in lost.stderr
    finally:
        up.end()


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_other_signals_are_clean_stops(tmp_path: Path, number: signal.Signals) -> None:
    up = _with_disk(tmp_path)
    try:
        up.wait_ready()
        _stop_cleanly(up, number)
    finally:
        up.end()


def test_a_clean_stop_leaves_nothing(up: Up) -> None:
    """Last, since it ends the cluster of the tests before."""
    up.children = psutil.Process(up.process.pid).children(recursive=True)
    _stop_cleanly(up, signal.SIGTERM)


def _stop_cleanly(up: Up, number: signal.Signals) -> None:
    folder = Path(up.environment["TMPDIR"])
    disk = folder / "disk"
    assert len(list(disk.glob("baton-cluster-*/store.baton-pages"))) == 1
    up.process.send_signal(number)
    out, err = up.process.communicate(timeout=STOP_TIMEOUT_S)
    assert up.process.returncode == 0, err
    assert "Any user of this machine may use the router's ports" in up.hints
    assert "only you can connect to the other parts" in up.hints
    assert "Traceback" not in out + err
    up.wait_for_nobody()
    assert not list(folder.glob("baton-cluster-*")) and not list(disk.iterdir())
    assert up.baton("status").returncode == 1
