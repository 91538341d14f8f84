"""What `baton explain` shows of a decision."""

from __future__ import annotations

import io

from rich.console import Console

from baton.cli.explain import explanation
from protos import inference_pb2


def test_a_last_choice_has_no_unit() -> None:
    def candidate(name: str, cost: float) -> inference_pb2.RoutingCandidate:
        return inference_pb2.RoutingCandidate(
            worker_id=name, role="decode", cost=cost, chosen=cost < 1
        )

    decision = inference_pb2.RoutingDecision(
        occasion="first",
        policy="joint",
        unit="s",
        prefill_id="prefill-0",
        decode_id="decode-0",
        cost=0.25,
        candidates=[candidate("decode-0", 0.25), candidate("decode-1", 1e9)],
    )
    out = io.StringIO()
    shown = explanation(inference_pb2.ExplainReply(decisions=[decision]))
    Console(file=out, width=160).print(shown)
    lines = [line.split() for line in out.getvalue().splitlines()]
    assert "(0.25 s)" in out.getvalue()
    assert [">", "decode-0", "0.25", "s"] in lines
    assert ["decode-1", "last", "choice"] in lines
