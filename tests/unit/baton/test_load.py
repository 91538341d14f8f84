"""A load's parts: when it sends, what it sends, what comes of it. The sender is a fake that counts
time itself where figures matter."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import math
import random
import statistics
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from baton.cli import plots
from baton.load import workload
from baton.load.report import Limits, Report, report
from baton.load.runner import MessageArrival, RequestOutcome, run
from baton.load.senders import OpenAiSender, Update
from baton.load.workload import Lengths, Planned, SharedPrefixes, random_load
from process.rpc_errors import InvalidArgument, NoCapacity


class TestArrivals:
    def test_constant_is_even_and_begins_at_once(self) -> None:
        times = workload.arrival_times(workload.parse_rates("4"), num_requests=5, kind="constant")
        assert times == [0.0, 0.25, 0.5, 0.75, 1.0]

    def test_phases_send_what_their_rates_say(self) -> None:
        times = workload.arrival_times(
            workload.parse_rates("2:10,8:5,0:3,2:10"), num_requests=None, kind="constant"
        )
        per_phase = [
            sum(begin <= at < end for at in times)
            for begin, end in ((0, 10), (10, 15), (15, 18), (18, 28))
        ]
        assert per_phase == [20, 40, 0, 20]

    def test_a_ramp_grows_evenly(self) -> None:
        times = workload.arrival_times(
            workload.parse_rates("0..10:20"), num_requests=None, kind="constant"
        )
        assert len(times) == 100
        # A quarter of the requests in the first half of the time.
        assert sum(at < 10 for at in times) == 25

    @given(
        rate=st.floats(0.1, 100),
        kind=st.sampled_from(["poisson", "constant"]),
        burstiness=st.floats(0.2, 5),
        seed=st.integers(0, 2**32),
    )
    def test_ordered_finite_and_the_same_again(
        self, rate: float, kind: workload.ArrivalKind, burstiness: float, seed: int
    ) -> None:
        phases = workload.parse_rates(f"{rate!r}")
        made = [
            workload.arrival_times(
                phases, num_requests=50, kind=kind, burstiness=burstiness, seed=seed
            )
            for _ in range(2)
        ]
        assert made[0] == made[1] == sorted(made[0])
        assert len(made[0]) == 50 and all(math.isfinite(at) and at >= 0 for at in made[0])

    def test_poisson_gaps_are_exponential_and_bursts_are_not(self) -> None:
        """Of 20,000 gaps: mean 1 and deviation 1 (Poisson), deviation 2 of shape 1/4. Standard
        errors are below 0.03: four of them is a false alarm in 10,000."""
        for burstiness, deviation in ((1.0, 1.0), (0.25, 2.0)):
            times = workload.arrival_times(
                workload.parse_rates("1"), num_requests=20_000, burstiness=burstiness, seed=3
            )
            gaps = [after - before for before, after in itertools.pairwise(times)]
            assert statistics.fmean(gaps) == pytest.approx(1.0, abs=0.06)
            assert statistics.stdev(gaps) == pytest.approx(deviation, abs=0.2)

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("x", "'x' is not a number"),
            ("0", "more than 0"),
            ("nan", "not 0 or more"),
            ("-1:3", "not 0 or more"),
            ("1:0", "seconds must be more than 0"),
            ("1:2,3", "RATE:SECONDS"),
            ("0:5", "sends nothing"),
            ("1..x:5", "'x' is not a number"),
        ],
    )
    def test_wrong_rates_are_named(self, text: str, said: str) -> None:
        with pytest.raises(InvalidArgument, match=f"--rate.*{said}"):
            workload.parse_rates(text)

    def test_a_load_without_end_is_refused(self) -> None:
        with pytest.raises(InvalidArgument, match="--requests: needed"):
            workload.arrival_times(workload.parse_rates("1"), num_requests=None)


class TestLoads:
    def test_the_same_seed_the_same_load(self) -> None:
        loads = [
            random_load([0.0, 1.0], Lengths(20, 5, 0.5), vocab_size=100, seed=seed)
            for seed in (1, 1, 2)
        ]
        assert loads[0] == loads[1] != loads[2]

    def test_prompts_of_a_group_share_its_prefix_only(self) -> None:
        shared = SharedPrefixes(num_groups=3, num_prefix_tokens=16)
        load = random_load([0.0] * 60, Lengths(8, 5), vocab_size=30_000, seed=0, shared=shared)
        prefixes = {planned.prompt_token_ids[:16] for planned in load}
        assert len(prefixes) == 3
        assert len({planned.prompt_token_ids[16:] for planned in load}) == 60
        assert all(len(planned.prompt_token_ids) == 24 for planned in load)

    @given(spread=st.floats(0, 0.99), seed=st.integers())
    def test_lengths_stay_within_their_spread(self, spread: float, seed: int) -> None:
        num_input, num_output = Lengths(100, 10, spread).draw(random.Random(seed))
        assert 100 * (1 - spread) - 1 <= num_input <= 100 * (1 + spread) + 1
        assert 1 <= num_output <= 10 * (1 + spread) + 1

    @pytest.mark.parametrize(
        ("made", "field"),
        [
            (lambda: Lengths(0), "--input-len"),
            (lambda: Lengths(1, 0), "--output-len"),
            (lambda: Lengths(1, 1, 1.0), "--spread"),
            (lambda: SharedPrefixes(0, 4), "--prefix-groups"),
            (lambda: SharedPrefixes(1, 0), "--prefix-len"),
            (lambda: random_load([0.0], Lengths(), vocab_size=8, seed=0), "vocab_size"),
        ],
    )
    def test_what_is_out_of_range_is_named(self, made: object, field: str) -> None:
        with pytest.raises(InvalidArgument) as caught:
            made()  # type: ignore[operator]
        assert caught.value.field == field


def _trace_line(**changes: object) -> str:
    entry = {"timestamp": 0, "input_length": 600, "output_length": 9, "hash_ids": [1, 2]}
    return json.dumps(entry | changes)


class TestTrace:
    def test_replayed_at_its_times_with_equal_prefixes(self, tmp_path: Path) -> None:
        file = tmp_path / "trace.jsonl"
        lines = [
            _trace_line(timestamp=3000, hash_ids=[1, 3]),
            _trace_line(timestamp=1000),
            "",
            _trace_line(timestamp=5000, input_length=513),
        ]
        file.write_text("\n".join(lines), encoding="utf-8")
        load = workload.replay_trace(
            workload.read_trace(file), vocab_size=500, seed=0, speed=2.0, shrink=4
        )
        assert [planned.at_s for planned in load] == [0.0, 1.0, 2.0]
        assert [len(planned.prompt_token_ids) for planned in load] == [150, 150, 128]
        first, second, third = (planned.prompt_token_ids for planned in load)
        assert first[:128] == second[:128] and first[128:] != second[128:]
        assert third == first[:128]
        assert {planned.num_output_tokens for planned in load} == {2}

    @pytest.mark.parametrize(
        ("line", "said"),
        [
            ("{", "line 1: not JSON"),
            ("[]", "line 1: not a JSON object"),
            (_trace_line(timestamp=-1), "timestamp: not a number of at least 0"),
            (_trace_line(timestamp="1"), "timestamp"),
            (_trace_line(input_length=0), "input_length"),
            (_trace_line(output_length=True), "output_length"),
            (_trace_line(hash_ids="1"), "hash_ids: not a list"),
            (_trace_line(hash_ids=[1]), "1 ids for 600 tokens"),
        ],
    )
    def test_a_wrong_line_is_named(self, tmp_path: Path, line: str, said: str) -> None:
        file = tmp_path / "trace.jsonl"
        file.write_text(line + "\n", encoding="utf-8")
        with pytest.raises(InvalidArgument, match=said):
            workload.read_trace(file)

    def test_an_empty_trace_is_refused(self, tmp_path: Path) -> None:
        file = tmp_path / "trace.jsonl"
        file.write_text("\n", encoding="utf-8")
        with pytest.raises(InvalidArgument, match="has no request"):
            workload.read_trace(file)


class _Sender:
    """Answers of two tokens; every third prompt is refused, and some wait to be let go."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.num_live = self.most_live = 0

    async def send(self, planned: Planned, timeout_s: float) -> AsyncGenerator[Update, None]:
        self.num_live += 1
        self.most_live = max(self.most_live, self.num_live)
        try:
            if planned.prompt_token_ids[0] % 3 == 0:
                raise NoCapacity("full", retry_after_s=2.0)
            yield Update(num_tokens=1)
            async with asyncio.timeout(timeout_s):
                await self.gate.wait()
            yield Update(num_tokens=1, num_cached_tokens=1, num_output_tokens=4)
        finally:
            self.num_live -= 1

    async def vocab_size(self) -> int:
        return 100

    async def close(self) -> None:
        pass


class TestRun:
    async def test_it_waits_for_nobody_and_forgets_nobody(self) -> None:
        sender = _Sender()
        load = [Planned(0.0, (index, 1), 4) for index in range(12)]
        told: list[tuple[int, int, int]] = []

        def on_progress(*counts: int) -> None:
            told.append((counts[0], counts[1], counts[2]))
            if counts[1] == 12:
                sender.gate.set()

        outcomes = await run(load, sender, timeout_s=30.0, on_progress=on_progress)
        assert sender.most_live > 4 and sender.num_live == 0
        assert [outcome.error for outcome in outcomes] == ["NoCapacity", "", ""] * 4
        assert [outcome.num_output_tokens for outcome in outcomes] == [0, 4, 4] * 4
        assert {outcome.retry_after_s for outcome in outcomes} == {2.0, None}
        assert told[-1] == (12, 12, 12)

    async def test_a_bound_on_those_under_way_is_kept_and_shows_as_lag(self) -> None:
        sender = _Sender()

        def on_progress(num_planned: int, num_sent: int, num_ended: int) -> None:
            if num_sent - num_ended == 2:
                sender.gate.set()

        outcomes = await run(
            [Planned(0.0, (1, 1), 4)] * 8,
            sender,
            timeout_s=30.0,
            max_concurrency=2,
            on_progress=on_progress,
        )
        assert sender.most_live == 2
        assert outcomes[-1].lag_s > outcomes[0].lag_s

    async def test_who_never_answers_is_a_failure(self) -> None:
        (outcome,) = await run([Planned(0.0, (1,), 2)], _Sender(), timeout_s=0.01)
        assert outcome.error == "DeadlineExceeded" and outcome.num_output_tokens == 1


def _outcome(
    sent_s: float, *tokens_at_s: float, error: str = "", end_s: float = 0.0
) -> RequestOutcome:
    return RequestOutcome(
        planned_s=sent_s,
        sent_s=sent_s,
        end_s=end_s or tokens_at_s[-1],
        arrivals=tuple(MessageArrival(at_s, 1) for at_s in tokens_at_s),
        num_input_tokens=10,
        num_cached_tokens=5,
        error=error,
        error_text=f"{error} happened",
    )


class TestReport:
    OUTCOMES = (
        _outcome(0.0, 0.1, 0.2, 0.4),
        _outcome(1.0, 1.5, 1.6),
        _outcome(2.0, error="NoCapacity", end_s=2.1),
        _outcome(3.0, 3.2, error="Unavailable", end_s=10.0),
    )

    def made(self, *limits: str) -> Report:
        return report(self.OUTCOMES, Limits.parse(limits))

    def test_the_definitions(self) -> None:
        made = self.made()
        assert made.ttft is not None and made.tpot is not None and made.itl is not None
        assert (made.ttft.mean_ms, made.ttft.p50_ms, made.ttft.max_ms) == (300.0, 100.0, 500.0)
        # (0.4 - 0.1) / 2 and (0.6 - 0.5) / 1
        assert made.tpot.mean_ms == 125.0
        assert (made.itl.num, made.itl.max_ms) == (3, 200.0)
        assert made.seconds == 10.0 and made.num_served == 2
        assert made.output_tokens_per_s == 0.5 and made.hit_rate == 0.5
        assert [(failure.kind, failure.num) for failure in made.failures] == [
            ("NoCapacity", 1),
            ("Unavailable", 1),
        ]
        json.dumps(dataclasses.asdict(made))

    @pytest.mark.parametrize(
        ("limits", "num_good"),
        [((), 2), (("ttft:200",), 1), (("ttft:200", "e2e:300"), 0), (("tpot:149",), 1)],
    )
    def test_goodput_counts_failures(self, limits: tuple[str, ...], num_good: int) -> None:
        made = self.made(*limits)
        assert made.num_good == num_good
        assert made.good_share == num_good / 4

    def test_nothing_served_is_no_error(self) -> None:
        made = report(self.OUTCOMES[2:3], Limits())
        assert made.ttft is None and made.num_served == 0 and made.good_share == 0.0

    @pytest.mark.parametrize("text", ["ttft", "ttft:x", "ttft:0", "speed:1", "ttft:-1"])
    def test_wrong_limits_are_named(self, text: str) -> None:
        with pytest.raises(InvalidArgument, match="--goodput"):
            Limits.parse([text])


def _event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


_TEXT = _event(choices=[{"text": "a"}])
_USAGE = _event(
    choices=[],
    usage={"completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 3}},
)
_DONE = b"data: [DONE]\n\n"


class TestOpenAi:
    """The sender over a real socket, with a server that says what the test tells it to."""

    async def ask(self, status: int, body: bytes, headers: dict[str, str]) -> RequestOutcome:
        asked: list[tuple[str, object]] = []

        async def answer(request: web.Request) -> web.Response:
            asked.append((request.headers.get("Authorization", ""), await request.json()))
            return web.Response(status=status, body=body, headers=headers)

        app = web.Application()
        app.router.add_post("/v1/completions", answer)
        async with TestServer(app) as server:
            sender = OpenAiSender(
                str(server.make_url("/v1/")), model="m", api_key="k", extra={"ignore_eos": True}
            )
            try:
                (outcome,) = await run([Planned(0.0, (9, 8), 4)], sender, timeout_s=10.0)
            finally:
                await sender.close()
        ((authorization, sent),) = asked
        assert authorization == "Bearer k"
        assert isinstance(sent, dict) and sent["prompt"] == [9, 8] and sent["max_tokens"] == 4
        assert sent["stream"] is True and sent["ignore_eos"] is True
        return outcome

    async def test_a_stream_with_its_account(self) -> None:
        outcome = await self.ask(200, _TEXT + b": ping\n\n" + _TEXT + _USAGE + _DONE, {})
        assert outcome.is_served, outcome
        assert (outcome.num_output_tokens, outcome.num_cached_tokens) == (4, 3)
        assert [arrival.num_tokens for arrival in outcome.arrivals] == [2, 2]

    @pytest.mark.parametrize(
        ("status", "body", "kind", "said"),
        [
            (429, b'{"error": {"message": "slow down"}}', "NoCapacity", "429: slow down"),
            (503, b"away", "Unavailable", "503: away"),
            (504, b"", "DeadlineExceeded", "504"),
            (404, b"", "NotFound", "404"),
            (400, b'{"error": {"message": "prompt: no"}}', "FailedPrecondition", "prompt: no"),
            (500, b"", "Internal", "500"),
            (200, _TEXT, "Internal", "without [DONE]"),
            (200, _TEXT + b"data: {\n\n", "Internal", "not JSON"),
            (200, _TEXT + b"data: 7\n\n", "Internal", "not an object"),
            (
                200,
                _TEXT + _event(error={"message": "gone", "code": 503}) + _DONE,
                "Unavailable",
                "gone",
            ),
        ],
    )
    async def test_every_failure_has_its_kind(
        self, status: int, body: bytes, kind: str, said: str
    ) -> None:
        outcome = await self.ask(status, body, {"Retry-After": "7"})
        assert outcome.error == kind and said in outcome.error_text
        told = {"NoCapacity": 7.0, "Unavailable": 7.0 if status == 503 else 1.0}
        assert outcome.retry_after_s == told.get(kind)

    async def test_nobody_there(self) -> None:
        sender = OpenAiSender("http://127.0.0.1:1/v1", model="m")
        (outcome,) = await run([Planned(0.0, (9,), 4)], sender, timeout_s=10.0)
        await sender.close()
        assert outcome.error == "Unavailable" and "127.0.0.1" in outcome.error_text


def test_a_picture_of_it(tmp_path: Path) -> None:
    """Drawn for served, failed and no requests; the file is what its name says."""
    for index, outcomes in enumerate((TestReport.OUTCOMES, TestReport.OUTCOMES[2:3])):
        file = tmp_path / "sub" / f"{index}.png"
        plots.check("--plot", file)
        plots.draw_load(outcomes, Limits.parse(["ttft:200"]), file, "title")
        assert file.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InvalidArgument, match="--plot"):
        plots.check("--plot", tmp_path / "a.gif")
