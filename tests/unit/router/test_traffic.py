"""Requests are counted once as they arrive and once as they end, and are in one place between."""

from __future__ import annotations

import asyncio

import pytest

from process.rpc_errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    NoCapacity,
    Unavailable,
)
from protos import common_pb2, inference_pb2
from services.router.metrics import Traffic, TrafficPlace
from services.router.rate_limit import OverRate


def account(prompt: int = 10, local: int = 2, store: int = 3) -> inference_pb2.GenerateResponse:
    leg = common_pb2.KvLeg(
        num_tokens_computed=prompt - local - store,
        num_tokens_local=local,
        from_store=[common_pb2.TierCount(num_tokens=store)],
    )
    return inference_pb2.GenerateResponse(
        provenance=common_pb2.Provenance(num_prompt_tokens=prompt, legs=[leg])
    )


def told(traffic: Traffic):  # type: ignore[no-untyped-def]
    (model,) = traffic.to_proto()
    return model


def test_a_finished_request_counts_what_it_took() -> None:
    traffic = Traffic(["m"])
    with traffic.follow("m") as request:
        assert told(traffic).num_queued == 1
        request.move(TrafficPlace.HELD)
        assert (told(traffic).num_held, told(traffic).num_queued) == (1, 0)
        request.move(TrafficPlace.RUNNING)
        request.on_first_token(0.3)
        request.on_message(inference_pb2.GenerateResponse(token_ids=[1, 2, 3]))
        # Not before its end: what is divided by finished requests is of finished requests.
        assert told(traffic).num_output_tokens == 0
        request.on_sample_end(0.02)
        request.on_sample_end(None)
        request.on_message(account())
        request.on_stages([("queue", 1.0), ("hold", 2.0), ("prefill_queue", 0.5), ("decode", 4.0)])
        traffic.check_integrity()
    model = told(traffic)
    assert (model.num_arrived, model.num_finished, model.num_running) == (1, 1, 0)
    assert (model.num_prompt_tokens, model.num_cached_tokens, model.num_output_tokens) == (10, 5, 3)
    assert (model.queue.total_s, model.prefill_s, model.decode_s) == (3.5, 0.5, 4.0)
    assert sum(model.first_token.counts) == 1 and sum(model.per_token.counts) == 1
    assert len(model.first_token.counts) == len(model.first_token.bounds_s) + 1
    traffic.check_integrity(is_idle=True)


@pytest.mark.parametrize(
    ("error", "field"),
    [
        (NoCapacity("full"), "num_refused"),
        (Unavailable("nobody"), "num_refused"),
        (asyncio.CancelledError(), "num_cancelled"),
        (Cancelled("newer"), "num_cancelled"),
        (DeadlineExceeded("late"), "num_failed"),
        (InvalidArgument("x", "y"), "num_rejected"),
        (OverRate("slow down"), "num_rejected"),
        (AlreadyExists("another body"), "num_rejected"),
        (Internal("oops"), "num_failed"),
    ],
)
@pytest.mark.parametrize("place", TrafficPlace)
def test_every_end_in_every_place_is_one_end(
    error: BaseException, field: str, place: TrafficPlace
) -> None:
    traffic = Traffic(["m"])
    with pytest.raises(type(error)), traffic.follow("m") as request:
        request.move(place)
        request.on_message(account())
        raise error
    model = told(traffic)
    ends = ("num_finished", "num_refused", "num_failed", "num_cancelled", "num_rejected")
    assert {name: getattr(model, name) for name in ends if getattr(model, name)} == {field: 1}
    assert model.num_prompt_tokens == 0
    traffic.check_integrity(is_idle=True)


def test_a_request_that_is_left_behind_breaks_the_law() -> None:
    traffic = Traffic(["m"])
    left_behind = traffic.follow("m")
    left_behind.__enter__()
    traffic.check_integrity()
    with pytest.raises(Internal, match="idle, but 1 requests"):
        traffic.check_integrity(is_idle=True)
    traffic._models["m"].num_arrived += 1
    with pytest.raises(Internal, match="not all are known"):
        traffic.check_integrity()


@pytest.mark.parametrize(("seconds", "index"), [(0.0, 0), (0.001, 0), (0.0011, 1), (1e6, -1)])
def test_durations_lie_in_the_class_that_ends_at_or_above_them(seconds: float, index: int) -> None:
    traffic = Traffic(["m"])
    with traffic.follow("m") as request:
        request.on_first_token(seconds)
    assert told(traffic).first_token.counts[index] == 1
