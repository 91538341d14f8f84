"""Records: written, read again, run again, and the first place where two runs part."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from baton import cli, recorded_request
from baton.answers import Completion, Provenance, StepTrace, Usage
from baton.cli import generate, up
from baton.cluster import running_clusters as cluster_state
from baton.cluster.running_clusters import ClusterState
from baton.errors import InvalidArgument
from baton.request import build_request
from protos import common_pb2, inference_pb2
from tests.unit.baton.conftest import last_message

FINGERPRINT = "ab" * 32
SAMPLING = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.0,
    "max_tokens": 9,
    "seed": str(2**64 - 1),
}


def _trace(position: int, token_id: int, **changes: Any) -> StepTrace:
    base = StepTrace(position, token_id, -1.5, -0.5, ((token_id, -1.5),), 3, ("top_p=0.9",), 7)
    return dataclasses.replace(base, **changes)


def _completion(token_ids: tuple[int, ...], sample_index: int = 0, **changes: Any) -> Completion:
    base = Completion(
        request_id="r",
        text="".join(chr(96 + token_id) for token_id in token_ids),
        token_ids=token_ids,
        finish_reason="length",
        usage=Usage(2, len(token_ids), 0),
        provenance=Provenance("tiny", FINGERPRINT, 2, ()),
        seed=2**64 - 1,
        sample_index=sample_index,
        traces=tuple(_trace(2 + at, token_id) for at, token_id in enumerate(token_ids)),
        prompt_token_ids=(8, 9),
        sampling=SAMPLING,
    )
    return dataclasses.replace(base, **changes)


REQUEST = build_request("hi", stop=["zz"], request_id="r", n=2, trace=True)
RUN = [_completion((1, 2, 3)), _completion((1, 4), 1)]


def test_a_record_comes_back_whole(tmp_path: Path) -> None:
    made = recorded_request.record_of(REQUEST, RUN)
    file = tmp_path / "run.json"
    recorded_request.write(made, file)
    again = recorded_request.read(file)
    assert again.seed == 2**64 - 1 and again.prompt_token_ids == (8, 9)
    assert recorded_request.difference(again, RUN) is None
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_generate_json_has_no_nan() -> None:
    forced = _completion((1,), traces=(_trace(2, 1, raw_logprob=math.nan),))
    parsed = json.loads(generate.to_json(forced), parse_constant=pytest.fail)
    assert parsed["traces"][0]["raw_logprob"] is None


def test_the_second_request_leaves_nothing_to_default() -> None:
    again = recorded_request.request_of(recorded_request.record_of(REQUEST, RUN), timeout_s=1.5)
    sampling = again.sampling
    assert again.text == "hi" and list(sampling.stop) == ["zz"] and sampling.n == 2
    assert not again.request_id and again.budget_ms == 1500 and sampling.trace
    for name in ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"):
        assert sampling.HasField(name)
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.7, 5, 2**64 - 1)


def test_a_forced_token_has_no_number_and_is_json_all_the_same(tmp_path: Path) -> None:
    nan = float("nan")
    forced = _trace(2, 1, raw_logprob=nan, processed_logprob=nan, is_forced=True)
    file = tmp_path / "run.json"
    recorded_request.write(
        recorded_request.record_of(REQUEST, [_completion((1,), traces=(forced,))]), file
    )
    value = json.loads(file.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert value["samples"][0]["traces"][0]["raw_logprob"] is None


@pytest.mark.parametrize(
    ("replayed", "what", "at"),
    [
        ([_completion((1, 2, 3)), _completion((1, 5), 1)], "sample 1 differs at output token 1", 5),
        ([_completion((1, 2)), _completion((1, 4), 1)], "sample 0 differs at output token 2", None),
        ([_completion((7,)), _completion((1, 4), 1)], "sample 0 differs at output token 0", 7),
        (
            [_completion((1, 2, 3), provenance=Provenance("tiny", FINGERPRINT, 2, (), "cd"))],
            "the adapter has other content",
            None,
        ),
        (
            [_completion((1, 2, 3), provenance=Provenance("tiny", "cd" * 32, 2, ()))],
            "another model",
            None,
        ),
        ([_completion((1, 2, 3))], "2 samples were recorded, 1 came", None),
        ([_completion((1, 2, 3), prompt_token_ids=(8,)), RUN[1]], "other tokens", None),
        ([_completion((1, 2, 3), finish_reason="eos"), RUN[1]], "another finish_reason", None),
        ([_completion((1, 2, 3), text="x"), RUN[1]], "another text", None),
    ],
)
def test_the_first_difference_is_named_with_both_traces(
    replayed: list[Completion], what: str, at: int | None
) -> None:
    found = recorded_request.difference(recorded_request.record_of(REQUEST, RUN), replayed)
    assert found is not None and what in found.what
    if at is not None:
        assert found.replayed is not None and found.replayed["token_id"] == at
        assert found.recorded is not None and found.recorded["position"] >= 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "is not a record"),
        ('{"schema": "baton-record", "version": 2}', "version 2, this baton reads 1"),
        ('{"schema": "baton-record", "version": 1}', "damaged"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(InvalidArgument, match=says):
        recorded_request.read(file)


def _traced(router: Any, token_ids: list[int]) -> None:
    """Have the fake router answer as a real one does a traced request."""
    last = last_message()
    last.provenance.model_fingerprint = FINGERPRINT
    last.prompt_token_ids.extend([8, 9])
    last.sampling.CopyFrom(
        common_pb2.SamplingParams(
            temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, max_tokens=3, seed=11
        )
    )
    for at, token_id in enumerate(token_ids):
        last.traces.add(position=2 + at, token_id=token_id, rng_key=2**63 + 1)
    del last.token_ids[:]
    last.token_ids.extend(token_ids)
    router.messages = [last]
    router.models = [
        inference_pb2.ModelInfo(model="tiny", model_fingerprint=FINGERPRINT),
    ]


def test_a_record_does_not_choose_what_is_fetched_and_run(
    router: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.json"
    _traced(router, [1, 2, 3])
    assert cli.main(["generate", "hi", "--address", router.address, "--record", str(file)]) == 0
    value = json.loads(file.read_text())
    for model in ("somebody/model", str(tmp_path)):
        file.write_text(json.dumps({**value, "model": model}))
        capsys.readouterr()
        assert cli.main(["replay", str(file), "--start"]) == 1
        err = capsys.readouterr().err
        assert model in err and "--model" in err and "--address" in err


def test_a_record_is_replayed_where_a_cluster_runs_and_starts_none_unasked(
    router: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def no_cluster(config: object) -> None:
        raise AssertionError("a cluster was started")

    monkeypatch.setattr(up, "running", no_cluster)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    file = tmp_path / "run.json"
    _traced(router, [1, 2, 3])
    assert cli.main(["generate", "hi", "--address", router.address, "--record", str(file)]) == 0
    capsys.readouterr()
    assert cli.main(["replay", str(file)]) == 1
    err = capsys.readouterr().err
    assert "--start" in err and "--address" in err and len(err.splitlines()) == 1
    cluster_state.announce(ClusterState(router.address, "tiny"))
    assert cli.main(["replay", str(file)]) == 0
    assert "all equal" in capsys.readouterr().out


def test_record_and_replay_by_command(
    router: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.json"
    _traced(router, [1, 2, 3])
    generate = ["generate", "hi", "--address", router.address, "--record", str(file)]
    assert cli.main(generate) == 0
    assert router.requests[0].sampling.trace
    capsys.readouterr()

    assert cli.main(["replay", str(file), "--address", router.address]) == 0
    assert capsys.readouterr().out == "replayed: 3 tokens in 1 samples, all equal (seed 11)\n"
    assert router.requests[1].text == "hi" and router.requests[1].sampling.seed == 11
    assert router.requests[1].budget_ms > 1000

    _traced(router, [1, 5, 3])
    assert cli.main(["replay", str(file), "--address", router.address]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "sample 0 differs at output token 1"
    assert '"token_id": 2' in out[1] and '"token_id": 5' in out[2]
    assert f'"rng_key": {2**63 + 1}' in out[1]

    router.models[0].model_fingerprint = "cd" * 32
    assert cli.main(["replay", str(file), "--address", router.address]) == 1
    err = capsys.readouterr().err
    assert "abababababababab" in err and "cdcdcdcdcdcdcdcd" in err and len(err.splitlines()) == 1
