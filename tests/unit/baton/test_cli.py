"""The command line against a fake router: what is shown, what is refused, exit codes."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from baton import ClusterConfig, LocalCluster, cli
from baton.cli import up
from baton.cli.options import RouterTarget
from baton.client import Credentials
from baton.cluster import running_clusters as cluster_state
from baton.cluster.command_lines import Secured
from baton.cluster.running_clusters import ClusterState
from baton.development_certificates import CertSet
from baton.errors import InvalidArgument, NoCapacity
from protos import common_pb2, inference_pb2

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees, or is seen by, a cluster that this user runs."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def test_generate_streams_then_accounts(router: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "hi", "--address", router.address, "--temperature", "0"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Hello!\n")
    words = out.split()
    for shown in ("prefill-0", "decode-0", "40", "32", "host", "shm", "float32", "checksum"):
        assert shown in words
    assert "early" in words and "blocks written back" in out
    row = next(line.split() for line in out.splitlines() if line.startswith("decode-0"))
    assert row[-4:] == ["16", "2", "checksum", "1"]
    assert "1.50 s" in out and "seed 11" in out and "stop_token" in out
    assert router.requests[0].sampling.temperature == 0.0


def test_generate_json_is_one_object(router: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "hi", "--json", "--address", router.address]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["text"] == "Hello!" and value["token_ids"] == [1, 2, 3]
    assert value["provenance"]["legs"][1]["from_store"][0]["num_tokens"] == 32


def test_generate_from_token_ids(router: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "[5, 6]", "--token-ids", "--address", router.address]) == 0
    assert list(router.requests[0].token_ids.ids) == [5, 6]
    assert capsys.readouterr().out.startswith("1 2 3 \n")


def test_generate_reads_standard_input(
    router: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert cli.main(["generate", "-", "--address", router.address]) == 0
    assert router.requests[0].text == "from a pipe"


def test_the_running_cluster_is_found(router: Any, capsys: pytest.CaptureFixture[str]) -> None:
    cluster_state.announce(ClusterState(router.address, "tiny"))
    assert cli.main(["generate", "hi"]) == 0
    assert capsys.readouterr().out.startswith("Hello!")


def test_the_address_of_a_cluster_of_ones_own_brings_its_trust_and_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BATON_API_KEY", raising=False)
    files = {"tls_dir": str(tmp_path / "tls"), "api_key": "baton-1-x"}
    cluster_state.announce(ClusterState("127.0.0.1:1", "tiny", http_address="127.0.0.1:2", **files))
    for address in ("127.0.0.1:1", "localhost:1"):
        own = RouterTarget(address=address).credentials()
        assert own == RouterTarget().credentials()
        assert own.api_key == "baton-1-x" and own.tls is not None
        assert own.tls.ca_file == str(tmp_path / "tls" / "ca.crt")
    assert RouterTarget(address="x:1").credentials() == Credentials()


def test_the_http_port_is_no_address(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a cluster of one's own the right one is said; of another only what the port is."""
    port = 0

    def answer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        assert cli.main(["generate", "hi", "--address", f"127.0.0.1:{port}"]) == 1
        thread.join()
        assert f"127.0.0.1:{port} is an HTTP port" in capsys.readouterr().err
        cluster_state.announce(
            ClusterState("127.0.0.1:1", "tiny", http_address=f"127.0.0.1:{port}")
        )
        for host in ("127.0.0.1", "localhost"):
            assert cli.main(["status", "--address", f"{host}:{port}"]) == 1
            err = capsys.readouterr().err
            assert f"{host}:{port} is the HTTP port; gRPC is at 127.0.0.1:1" in err


def test_chat_keeps_both_sides(
    router: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "one\n\ntwo\n/new\nthree\n/quit\nnever\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert cli.main(["chat", "--system", "be kind", "--address", router.address]) == 0
    said = [
        [(message.role, message.content) for message in request.chat.messages]
        for request in router.requests
    ]
    assert said == [
        [("system", "be kind"), ("user", "one")],
        [("system", "be kind"), ("user", "one"), ("assistant", "Hello!"), ("user", "two")],
        [("system", "be kind"), ("user", "three")],
    ]
    assert capsys.readouterr().out.count("decode-0: 0 computed, 8 local, 32 from store") == 3


def test_status_as_tables_and_as_json(router: Any, capsys: pytest.CaptureFixture[str]) -> None:
    router.status = inference_pb2.GetClusterStatusReply(
        workers=[
            common_pb2.WorkerStatus(
                worker_id="decode-0",
                role="decode",
                num_prompt_tokens_computed=25,
                num_prompt_tokens_from_store=75,
            )
        ],
        stores=[
            inference_pb2.StoreStatus(
                node_id="store", reachable=True, num_blocks_asked=4, num_blocks_matched=1
            )
        ],
        num_requests_finished=9,
        num_requests_failed_by_code={"internal": 3},
    )
    assert cli.main(["status", "--address", router.address]) == 0
    out = capsys.readouterr().out
    assert "decode-0" in out and "75 %" in out and "25 %" in out and "NOT reachable" in out
    assert cli.main(["status", "--json", "--address", router.address]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["workers"][0]["num_prompt_tokens_from_store"] == 75
    assert value["stores"][0]["reachable"] is True and value["num_requests_finished"] == 9
    assert value["num_requests_failed_by_code"] == {"internal": 3}


def test_status_shows_links_tiers_tenants_and_problems_where_there_are_any(
    router: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    router.status = inference_pb2.GetClusterStatusReply(
        workers=[
            common_pb2.WorkerStatus(
                worker_id="decode-0",
                store_node_id="store-1",
                store_address="127.0.0.1:2",
                links=[
                    common_pb2.LinkStatus(
                        node_id="store-1",
                        transport="shm",
                        write_bytes_per_s=3 << 30,
                        read_bytes_per_s=5 << 30,
                        latency_s=0.0004,
                    ),
                    common_pb2.LinkStatus(
                        node_id="store-0",
                        transport="grpc",
                        write_bytes_per_s=1 << 20,
                        floor_bytes_per_s=1 << 30,
                        degraded=True,
                    ),
                    common_pb2.LinkStatus(store_address="127.0.0.1:9", problem="no room"),
                ],
            ),
            common_pb2.WorkerStatus(worker_id="prefill-0", store_address="127.0.0.1:1"),
            common_pb2.WorkerStatus(worker_id="prefill-1"),
        ],
        stores=[
            inference_pb2.StoreStatus(
                node_id="store-1",
                num_pages=800,
                num_pages_used=71,
                num_demoted=77,
                num_promoted=6,
                num_pages_bad=3,
                tenants=[
                    common_pb2.TenantUsage(tenant="b", num_blocks=12, num_blocks_guaranteed=99),
                    common_pb2.TenantUsage(num_blocks=4),
                ],
            ),
            inference_pb2.StoreStatus(node_id="store-0"),
        ],
        problems=["link decode-0 -> store-0 is degraded"],
    )
    assert cli.main(["status", "--address", router.address]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    for row in (
        "problem: link decode-0 -> store-0 is degraded",
        "store-1 800 71 77 6 3",
        "store-1 (none) 4 -",
        "store-1 b 12 99",
        "decode-0 store-1 shm 3.0 GiB/s 5.0 GiB/s 0.4 ms - ok",
        "decode-0 store-0 grpc 1.0 MiB/s - - 1.0 GiB/s DEGRADED",
        "decode-0 127.0.0.1:9 - - - - not measured: no room",
    ):
        assert row.split() in rows, row
    assert ["decode-0", "store-1", "-", "-", "-", "ok"] in rows
    assert ["prefill-0", "not", "attached", "-", "-", "-", "ok"] in rows
    assert ["prefill-1", "none", "-", "-", "-", "ok"] in rows
    # Without any of it no table stands empty.
    router.status = inference_pb2.GetClusterStatusReply()
    assert cli.main(["status", "--address", router.address]) == 0
    shown = capsys.readouterr().out
    assert not any(word in shown for word in ("pages of", "tenants of", "links of", "problem"))


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (InvalidArgument("sampling.top_p", "must be in (0, 1]"), "sampling.top_p: must be"),
        (NoCapacity("every decode worker is full"), "every decode worker is full"),
    ],
)
@pytest.mark.parametrize("command", [["generate", "hi"], ["chat"]])
def test_refusals_are_one_line(
    router: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    error: Exception,
    says: str,
) -> None:
    router.fail = error
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    assert cli.main([*command, "--address", router.address]) == 1
    err = capsys.readouterr().err
    assert says in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", "hi"], "baton up"),
        (["status"], "baton up"),
        (["generate", "hi", "--address", "127.0.0.1:1"], "no router answers at 127.0.0.1:1"),
        (["generate", "a b", "--token-ids", "--address", "127.0.0.1:1"], "as numbers"),
        (["up", "--model", "./nowhere"], "no such folder"),
        (["up", "--model", "baton-7m"], "there are baton-5m"),
        (["up", "--set", "wroker.x=1"], "nearest is 'worker'"),
        (["up", "--model", "/nowhere", "--set", "store.capacity_byte=1"], "'capacity_bytes'"),
        (["up", "--prefill", "0"], "at least 1"),
        (["up", "--port", "0", "--redis", "redis://127.0.0.1:1"], "check the URL"),
        (["up", "--port", "0", "--redis", "http://127.0.0.1:1"], "check the URL"),
        (["up", "--port", "0", "--log-dir", "/proc/nowhere"], "--log-dir"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_1(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert cli.main(arguments) == 1
    err = capsys.readouterr().err
    assert says in err
    assert len(err.splitlines()) == 1


def test_a_file_that_cannot_be_used_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused() -> None:
        raise PermissionError(13, "Permission denied", "/home/x")

    monkeypatch.setattr(cluster_state, "running", refused)
    assert cli.main(["status"]) == 1
    assert capsys.readouterr().err == "baton: [Errno 13] Permission denied: '/home/x'\n"


def test_a_busy_port_is_told_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["up", "--port", str(port)]) == 1
    assert f"port {port} cannot be used" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["generate"], ["up", "--transport", "x"]])
def test_wrong_arguments_exit_with_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and "--help`" in err


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["status", "--address", "x:1", "--cluster", "x"], ("--address", "--cluster")),
        (["audit", "--cluster", "x", "--redis", "redis://x"], ("--cluster", "--redis")),
        (["replay", "x", "--start", "--address", "x:1"], ("--start", "--address")),
        (["generate", "x", "--regex", "a", "--choice", "b"], ("--regex", "--choice")),
        (["certs", "--out", "x", "--secrets", "x"], ("--out", "--secrets")),
        (["certs"], ("--out", "--secrets")),
        (["api-key", "list", "--file", "x", "--cluster", "x"], ("--file", "--cluster")),
    ],
)
def test_options_that_exclude_each_other_are_both_named(
    arguments: list[str], names: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    err = capsys.readouterr().err
    assert all(name in err for name in names) and len(err.splitlines()) == 1


@pytest.mark.parametrize("arguments", [[], ["up"], ["api-key", "add"]])
def test_each_command_explains_itself(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for option in ("-h", "--help"):
        assert cli.main([*arguments, option]) == 0
        assert capsys.readouterr().out.startswith(" ".join(["Usage: baton", *arguments]))


def test_the_shell_completes_commands_and_values(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_BATON_COMPLETE", "bash_complete")
    for words, expected in (
        ("baton sta", ["plain,status"]),
        ("baton up --handover ", ["plain,auto", "plain,store", "plain,direct"]),
    ):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
        with pytest.raises(SystemExit) as ended:
            cli.main([])
        assert ended.value.code == 0
        assert capsys.readouterr().out.splitlines() == expected


def test_a_reader_that_left_is_no_traceback(router: Any) -> None:
    """`baton generate ... | head -c1` ends in silence."""
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(
        [sys.executable, "-m", "baton.cli", "generate", "hi", "--address", router.address],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=30,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    os.close(writer)
    assert (result.returncode, result.stderr) == (1, "")


def _start(router: Any, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "baton.cli", *arguments, "--address", router.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def test_ctrl_c_cancels_a_generation(router: Any) -> None:
    router.messages, router.hang = router.messages[:2], True
    process = _start(router, "generate", "hi")
    assert process.stdout is not None
    assert process.stdout.read(5) == "Hello"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in err
    assert router.cancelled.wait(30)


def test_ctrl_c_ends_the_answer_but_not_the_chat(router: Any) -> None:
    """And the turn that was ended leaves no trace in the history."""
    whole = list(router.messages)
    router.messages, router.hang = whole[:2], True
    process = _start(router, "chat")
    assert process.stdout is not None and process.stdin is not None
    process.stdin.write("one\n")
    process.stdin.flush()
    assert process.stdout.read(5) == "Hello"
    process.send_signal(signal.SIGINT)
    assert router.cancelled.wait(30)
    router.messages, router.hang = whole, False
    out, err = process.communicate("two\n", timeout=30)
    assert (process.returncode, err) == (0, "(ended)\n")
    assert "Hello!" in out
    assert [message.content for message in router.requests[1].chat.messages] == ["two"]


def test_up_says_what_clients_of_a_secured_cluster_need(tmp_path: Path) -> None:
    cluster = LocalCluster(ClusterConfig(tls=True, api_keys=True))
    cluster.address, cluster.http_address = "127.0.0.1:1", "127.0.0.1:2"
    cluster.secured = Secured(CertSet(tmp_path / "tls"), str(tmp_path / "api_keys.toml"))
    lines = up._ready_lines(cluster)
    assert f"{tmp_path}/tls/ca.crt\n" in lines and f"{tmp_path}/api_keys.toml\n" in lines
    assert "baton api-key add --tenant NAME\n" in lines
    cluster.secured = Secured()
    lines = up._ready_lines(cluster)
    assert "api-key" not in lines and " CA " not in lines


def test_up_names_the_files_of_earlier_versions(tmp_path: Path) -> None:
    """Nothing else lies beside the folders of clusters; what a user put there is the user's."""
    (tmp_path / "baton-cluster-x").mkdir()
    for name in ("store.baton-pages", "store-1.baton-pages", "mine.baton-pages"):
        (tmp_path / name).touch()
    (tmp_path / "baton-cluster-x" / "store.baton-pages").touch()
    said = []
    for override in (f"store.file_tier_dir={tmp_path}", "store.file_tier_bytes=1000"):
        cluster = LocalCluster(ClusterConfig(overrides=(override,)))
        lines = up._ready_lines(cluster).splitlines()
        said.append([line.partition(" ")[0] for line in lines if ".baton-pages" in line])
    left = [str(tmp_path / name) for name in ("store-1.baton-pages", "store.baton-pages")]
    assert said == [left, []]
    assert (tmp_path / "store.baton-pages").exists()


def test_of_two_clusters_the_one_that_is_taken_is_said_and_may_be_chosen(
    router: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = ClusterState(router.address, "tiny", "1 1", 1.0, chosen_name="mine")
    second = ClusterState("127.0.0.1:1", "tiny", "1 1", 2.0)
    monkeypatch.setattr(cluster_state, "running", lambda: [first, second])
    assert cli.main(["generate", "hi", "--cluster", "mine"]) == 0
    assert capsys.readouterr().err == ""
    assert cli.main(["status"]) == 1
    told = "using cluster 1, the last one started; --cluster NAME chooses another: mine\n"
    assert capsys.readouterr().err.startswith(told)
    assert cli.main(["status", "--cluster", "other"]) == 1
    assert (
        "--cluster other: no cluster of yours has this name; running: mine, 1"
        in capsys.readouterr().err
    )
    assert cli.main(["up", "--cluster", "mine"]) == 1
    assert "another cluster of yours has this name" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        {"transport": "nixl"},
        {"direct_transport": "nixl"},
        {"overrides": ("worker.remote_transport=nixl",)},
        {"overrides": ('prefill.transport="nixl"',)},
    ],
)
def test_what_nixl_opens_to_every_user_is_said(options: dict[str, Any]) -> None:
    told = up._access_lines(ClusterConfig(**options))
    assert "connections of any user" in " ".join(told.split()) and "--transport shm" in told
    plain = up._access_lines(ClusterConfig())
    assert plain.endswith("; only you can connect to the other parts\n")
