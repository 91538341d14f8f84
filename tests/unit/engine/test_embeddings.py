"""A prompt's embedding comes with its first token, and with no other, whatever the step that drew
it: also where steps are launched ahead, and where the request was preempted."""

from __future__ import annotations

import torch

from engine.outputs import RequestOutput
from engine.request import Request, Sampling
from engine.testing.ahead_model import AheadModel
from tests.harness.engines import PROMPT, SIZE, fake_model, hasher, make


def _request(name: str, prompt: tuple[int, ...], max_tokens: int, *, wants: bool = True) -> Request:
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
    return Request(name, prompt, sampling, hasher(b""), wants_embedding=wants)


def _expected(prompt: tuple[int, ...]) -> torch.Tensor:
    return torch.nn.functional.normalize(fake_model().logits(prompt)[:8].float(), dim=0)


def test_a_prompt_of_which_one_token_is_left_is_not_launched_ahead() -> None:
    prompt = PROMPT[: 2 * SIZE + 1]  # all but the last token is found in the prefix cache
    engine = make(AheadModel(fake_model(), is_late=True))
    found: list[RequestOutput] = []
    for name in ("first", "again"):
        engine.reserve(_request(name, prompt, 1))
        engine.start(name)
        while engine.has_work():
            found += engine.step().events
    assert [event.embedding is not None for event in found if event.token_ids] == [True, True]
    for event in found:
        assert event.embedding is None or torch.allclose(
            torch.tensor(event.embedding), _expected(prompt)
        )


def test_it_comes_once_also_when_the_request_was_preempted() -> None:
    """Recomputed with what it drew already, its last token is not the prompt's."""
    engine = make(fake_model(context_window=32), num_blocks=9, preemption="recompute")
    for name in ("other", "one"):
        engine.reserve(_request(name, PROMPT, 12, wants=name == "one"))
        engine.start(name)
    events: list[RequestOutput] = []
    while engine.has_work():
        events += [event for event in engine.step().events if event.request_id == "one"]
        engine.check_integrity()
    assert engine.stats().num_preemptions
    told = [event.embedding for event in events if event.token_ids]
    assert told[0] is not None and told[1:] == [None] * (len(told) - 1)
    assert torch.allclose(torch.tensor(told[0]), _expected(PROMPT))
