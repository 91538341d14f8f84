"""LLM over an engine of this process with a FakeModel: what goes in, what comes out, what is
refused; and the bar that shows it."""

from __future__ import annotations

import io
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.errors import InvalidLogits
from engine.testing.fake_model import FakeModel
from engine_client import llm as llm_module
from engine_client import progress
from engine_client.in_process import InProcessClient
from engine_client.llm import LLM, ClientLLM
from engine_client.params import SamplingParams
from process.rpc_errors import DeadlineExceeded, FailedPrecondition, Internal, InvalidArgument
from process.settings import SettingsError


@pytest.fixture
def model() -> FakeModel:
    return FakeModel()


@pytest.fixture
def llm(model: FakeModel) -> Iterator[ClientLLM]:
    client = InProcessClient(LLMEngine(EngineConfig(num_blocks=200, max_num_running=4), model))
    with ClientLLM(client) as made:
        yield made
        made.client.receive(0.0)
        made.client.check_integrity()


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 6, "ignore_eos": True} | values))


def test_answers_come_in_the_order_of_the_prompts(llm: ClientLLM, model: FakeModel) -> None:
    prompts = [[5, 6], [7], [8, 9, 10], [11] * 20]
    answers = llm.generate(prompts, params())
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.prompt_token_ids == tuple(prompt)
        assert list(answer.token_ids) == model.generate(prompt, 6)
        assert (answer.finish_reason, answer.error, answer.text) == ("length", None, "")
        assert answer.usage.num_prompt_tokens == len(prompt)
        assert answer.usage.num_output_tokens == 6
        assert len(answer.times.itl_s) == 5
        assert 0 <= answer.times.ttft_s <= answer.times.total_s
    assert llm.generate([5, 6], params())[0].token_ids == answers[0].token_ids
    assert llm.generate([], params()) == []


def test_each_prompt_has_its_own_parameters_and_seed(llm: ClientLLM) -> None:
    hot = params(temperature=1.0)
    answers = llm.generate([[5, 6]] * 2, [params(max_tokens=1), hot])
    assert [len(answer.token_ids) for answer in answers] == [1, 6]
    again = llm.generate([5, 6], params(temperature=1.0, seed=answers[1].seed))
    assert again[0].token_ids == answers[1].token_ids
    assert len({answer.seed for answer in llm.generate([[5]] * 8, hot)}) == 8


def test_an_end_of_sequence_is_said(llm: ClientLLM, model: FakeModel) -> None:
    prompt = next([start] for start in range(1, 97) if 0 in model.generate([start], 60))
    (answer,) = llm.generate(prompt, SamplingParams(max_tokens=60))
    assert answer.finish_reason == "eos" and answer.token_ids[-1] == 0
    assert answer.samples[0].stop_token_id == 0


def test_the_time_of_a_call_counts_from_its_start(
    llm: ClientLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is checked is checked within it."""
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(llm_module, "time", clock)

    def slow(asks: object) -> None:
        clock.now += 3.0

    monkeypatch.setattr(llm.client, "check", slow)
    with pytest.raises(DeadlineExceeded):
        llm.generate([5, 6], params(), timeout_s=2.0)
    assert len(llm.generate([5, 6], params(), timeout_s=4.0)) == 1


def test_a_client_that_loses_a_prompt_is_told_on(
    llm: ClientLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(llm.client, "submit", lambda ask: None)
        with pytest.raises(Internal, match="1 of 1 prompts were lost"):
            llm.generate([5, 6], params(), timeout_s=5.0)


def test_a_failing_prompt_ends_the_call_or_is_returned(llm: ClientLLM, model: FakeModel) -> None:
    drawn = {*model.generate([5, 6], 6), *model.generate([8, 9], 6)}
    poison = next(token for token in range(10, 97) if token not in drawn)
    model.poison = frozenset({poison})
    prompts = [[5, 6], [7, poison], [8, 9]]
    with pytest.raises(InvalidLogits):
        llm.generate(prompts, params())
    answers = llm.generate(prompts, params(), return_errors=True)
    assert isinstance(answers[1].error, InvalidLogits) and not answers[1].samples
    assert (answers[1].finish_reason, answers[1].token_ids) == ("error", ())
    assert [len(answers[index].token_ids) for index in (0, 2)] == [6, 6]


def test_what_needs_a_tokenizer_is_refused_without_one(llm: ClientLLM) -> None:
    for call in (
        lambda: llm.generate("text"),
        lambda: llm.generate([5], params(stop="x")),
        lambda: llm.generate([5], params(bad_words=["x"])),
        lambda: llm.chat([{"role": "user", "content": "hi"}]),
    ):
        with pytest.raises(InvalidArgument):
            call()


@pytest.mark.parametrize(
    ("prompts", "field"),
    [
        ([[5], 5], "prompts[1]"),
        ([[5], None], "prompts[1]"),
        ([[5], ["a"]], "prompts[1]"),
        ([[5], [True]], "prompts[1]"),
        ([[5], []], "prompts[1].prompt_token_ids"),
        ([[5], [-1]], "prompts[1].prompt_token_ids"),
        ([[5], [96] * 256], "prompts[1].prompt_token_ids"),
    ],
)
def test_bad_prompts_are_named(llm: ClientLLM, prompts: Any, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        llm.generate(prompts, params(max_tokens=None))
    assert caught.value.field == field
    assert llm.stats()[0].num_steps == 0


def test_parameters_must_fit_the_prompts(llm: ClientLLM) -> None:
    with pytest.raises(InvalidArgument, match=r"^params: 3 of them for 2 prompts"):
        llm.generate([[5], [6]], [params()] * 3)
    with pytest.raises(InvalidArgument) as caught:
        llm.generate([[5], [6]], [params(), {"max_tokens": 3}])  # type: ignore[list-item]
    assert caught.value.field == "params[1]"


def test_settings_are_checked_before_anything_is_loaded() -> None:
    with pytest.raises(SettingsError, match="nearest is 'num_blocks'"):
        LLM("baton-5m", num_block=3)
    with pytest.raises(SettingsError, match="max_num_running"):
        LLM("baton-5m", max_num_running=0)
    with pytest.raises(InvalidArgument, match=r"^engine: 'cloud'"):
        LLM("baton-5m", engine="cloud")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"^num_engines: 0"):
        LLM("baton-5m", num_engines=0)
    with pytest.raises(InvalidArgument, match=r"^stop_policy: "):
        LLM("baton-5m", engine="process", stop_policy=lambda view: True)


def test_a_stop_policy_ends_a_sample() -> None:
    """The hook sees each token, in this process."""
    with LLM(
        "baton-5m-draft",
        progress=False,
        num_blocks=160,
        stop_policy=lambda view: len(view.output_token_ids) == 3,
    ) as llm:
        (answer,) = llm.generate("Once upon a time", progress=False)
    assert (answer.finish_reason, len(answer.token_ids)) == ("policy", 3)


def test_a_closed_one_is_refused(llm: ClientLLM) -> None:
    other = ClientLLM(InProcessClient(LLMEngine(EngineConfig(num_blocks=80), FakeModel())))
    other.close()
    other.close()
    with pytest.raises(FailedPrecondition, match="closed"):
        other.generate([5], params())


def test_the_bar_counts_prompts_and_tokens_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, color_system=None)
    with progress.PromptsBar(4, is_shown=True, console=console) as bar:
        now[0] = 102.0
        bar.add_tokens(50)
        bar.add_prompt(2_000)
    assert "1/4" in out.getvalue() and "in 1,000 tok/s, out 25 tok/s" in out.getvalue()


@pytest.mark.parametrize(("is_shown", "is_terminal"), [(False, True), (True, False)])
def test_no_bar_where_nobody_looks(is_shown: bool, is_terminal: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=is_terminal, width=120)
    with progress.PromptsBar(4, is_shown=is_shown, console=console) as bar:
        bar.add_tokens(50)
    with progress.LoadingBar(is_shown=is_shown, console=console) as loading:
        loading("weights", 1, 2)
    assert out.getvalue() == ""
