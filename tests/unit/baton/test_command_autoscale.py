"""What `baton autoscale` shows, and says where there is nothing to show."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from baton import cli
from baton.cli import explain
from baton.cluster import running_clusters as cluster_state
from baton.cluster.running_clusters import ClusterState
from protos import autoscaler_pb2

REPLY = autoscaler_pb2.GetDecisionsReply(
    autoscaler_id="me",
    is_leader=True,
    pools=[autoscaler_pb2.PoolView(role="decode", num_wanted=2, num_ready=1, num_draining=1)],
    problems=["Redis does not answer"],
    decisions=[
        autoscaler_pb2.ScalingDecision(
            decided_unix_ms=1_700_000_000_000,
            direction="up",
            reason="load",
            summary="up (prefill 1, decode 1 -> 2): load",
            why_json=json.dumps(
                {
                    "terms": {"decode.needed": 2.0},
                    "notes": ["seen for long enough"],
                    "num_candidates": 16,
                    "num_affordable": 10,
                }
            ),
            outcome="failed",
            problem="no rights",
        )
    ],
)


def shown(reply: autoscaler_pb2.GetDecisionsReply, *, with_why: bool = False) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(explain.decisions_view(reply, with_why=with_why))
    return out.getvalue()


def test_decisions_and_pools_are_shown() -> None:
    text = shown(REPLY)
    assert "me acts" in text and "problem: Redis does not answer" in text
    assert "up (prefill 1, decode 1 -> 2): load [failed]: no rights" in text
    assert "decode.needed" not in text
    text = shown(REPLY, with_why=True)
    assert "decode.needed" in text and "note: seen for long enough" in text
    assert "16 pairs within the limits, 10 of them within the budget" in text


def test_who_does_not_lead_says_so() -> None:
    text = shown(autoscaler_pb2.GetDecisionsReply(autoscaler_id="me"))
    assert "does not act" in text and "no decision yet" in text


def test_as_json_the_why_is_an_object() -> None:
    plain = explain.decisions_as_json(REPLY)
    assert plain["decisions"][0]["why"]["terms"] == {"decode.needed": 2.0}
    assert "why_json" not in plain["decisions"][0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["autoscale"], "start one with `baton up --autoscale`"),
        (["autoscale", "-n", "0"], "must be at least 1"),
        (["autoscale", "--address", "127.0.0.1:9"], "127.0.0.1:9"),
    ],
)
def test_what_is_wrong_is_one_line(
    arguments: list[str],
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert cli.main(arguments) == 1
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1


def test_its_options_say_what_is_asked_and_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    async def ask(
        dial: object, address: str, request: autoscaler_pb2.GetDecisionsRequest
    ) -> autoscaler_pb2.GetDecisionsReply:
        asked.append((request.num_decisions, request.only_actions))
        return REPLY

    monkeypatch.setattr(explain, "_ask", ask)
    where = ["--address", "127.0.0.1:1"]
    assert cli.main(["autoscale", "-n", "3", "--all", "--why", *where]) == 0
    assert "decode.needed" in capsys.readouterr().out
    assert cli.main(["autoscale", *where]) == 0
    assert "decode.needed" not in capsys.readouterr().out
    assert asked == [(3, False), (10, True)]


@pytest.mark.parametrize("option", ["--min-decode", "--max-prefill"])
def test_bounds_of_workers_go_with_autoscale(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["up", option, "1"]) == 1
    assert f"{option} 1: goes with --autoscale" in capsys.readouterr().err


def test_the_routers_address_leads_to_its_autoscaler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    asked = []

    async def ask(dial: object, address: str, request: object) -> object:
        asked.append(address)
        return REPLY

    monkeypatch.setattr(explain, "_ask", ask)
    scaled = cluster_state.announce(
        ClusterState("127.0.0.1:1", "m", autoscaler_address="unix:/x.sock")
    )
    assert cli.main(["autoscale", "--address", "127.0.0.1:1"]) == 0
    assert cli.main(["autoscale", "--address", "localhost:8530"]) == 0  # a port-forward's
    assert asked == ["unix:/x.sock", "localhost:8530"]
    scaled.unlink()
    cluster_state.announce(ClusterState("127.0.0.1:1", "m"))
    assert cli.main(["autoscale", "--address", "127.0.0.1:1"]) == 1
    assert "has no autoscaler" in capsys.readouterr().err
