"""A PacedModel is the model that it was given, but for the time its passes take."""

from __future__ import annotations

import random

import pytest

from engine.batch import Batch, warm_up
from engine.request import Request, Sampling
from engine.testing.paced_model import DevicePace, PacedModel
from tests.harness.engines import all_steps, fake_model, hasher, make, tokens_of


class Device:
    """Time that passes when somebody waits, or when a pass is computed."""

    def __init__(self, pass_s: float = 0.0) -> None:
        self.now_s = 0.0
        self.pass_s = pass_s
        self.waits_s: list[float] = []

    def wait(self, seconds: float) -> None:
        self.waits_s.append(seconds)
        self.now_s += seconds

    def model(self, pace: DevicePace) -> PacedModel:
        plain = fake_model()
        forward = plain.forward

        def timed(batch: Batch) -> object:
            self.now_s += self.pass_s
            return forward(batch)

        plain.forward = timed
        return PacedModel(plain, pace, clock=lambda: self.now_s, wait=self.wait)


def test_tokens_are_the_models_own(seed: int) -> None:
    rng, device = random.Random(seed), Device()
    engine = make(device.model(DevicePace(step_s=0.05)))
    prompts = [tuple(rng.randrange(1, 97) for _ in range(rng.randint(1, 20))) for _ in range(6)]
    for index, prompt in enumerate(prompts):
        engine.submit(Request(f"r{index}", prompt, Sampling(5, ignore_eos=True), hasher()))
    events = [event for output in all_steps(engine) for event in output.events]
    for index, prompt in enumerate(prompts):
        drawn = tokens_of([event for event in events if event.request_id == f"r{index}"])
        assert drawn == fake_model().generate(prompt, 5)


def test_a_pass_takes_what_the_device_takes_for_its_tokens() -> None:
    """A prompt of 14 tokens with its draw, then two steps of one token each: 16 tokens in all."""
    device = Device(pass_s=0.25)
    engine = make(device.model(DevicePace(step_s=2.0, token_s=0.5)))
    engine.submit(Request("r", tuple(range(1, 15)), Sampling(3, ignore_eos=True), hasher()))
    num_steps = len(all_steps(engine))
    assert num_steps == 3
    assert device.now_s == 3 * 2.0 + 16 * 0.5
    assert device.waits_s == [2.0 + 14 * 0.5 - 0.25, 2.25, 2.25]


def test_a_model_that_is_slower_than_its_device_waits_for_nothing() -> None:
    device = Device(pass_s=3.0)
    engine = make(device.model(DevicePace(step_s=2.0)))
    engine.submit(Request("r", (1, 2, 3), Sampling(2, ignore_eos=True), hasher()))
    assert len(all_steps(engine)) == 2
    assert device.waits_s == []
    assert device.now_s == 6.0


def test_a_warm_up_is_no_pass_of_the_device() -> None:
    device = Device()
    model = device.model(DevicePace(step_s=2.0))
    make(model)
    model.forward(warm_up(8))
    assert device.waits_s == []


def test_nothing_is_launched_ahead() -> None:
    """A launch would take no time of the device."""
    assert Device().model(DevicePace(step_s=2.0)).ahead is None


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["step_s", "token_s"])
def test_a_pace_is_a_time(name: str, wrong: float) -> None:
    with pytest.raises(ValueError, match=name):
        DevicePace(**{name: wrong})
