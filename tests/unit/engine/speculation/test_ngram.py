"""Prompt lookup against a search through the whole text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.fake import FakeModel
from engine.loop import Engine
from engine.request import Request
from engine.speculation.config import NgramConfig, SpeculationConfig
from engine.speculation.drafter import Draft, Task
from engine.speculation.ngram import NgramIndex, PromptLookup
from process.settings import SettingsError


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=40),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 3),
)
def test_as_a_search_finds_it(
    token_ids: list[int], num_tokens: int, min_length: int, more: int, max_matches: int
) -> None:
    settings = NgramConfig(min_length + more, min_length, max_matches)
    index = NgramIndex(settings)
    for end in range(1, len(token_ids) + 1):
        known = token_ids[:end]
        may_guess = index.may_guess(known)
        tree = index.propose(known, num_tokens)
        wanted: list[tuple[int, ...]] = []
        for length in range(min(settings.max_length, end), min_length - 1, -1):
            places = [
                at for at in range(length, end) if known[at - length : at] == known[end - length :]
            ]
            wanted = [tuple(known[at : at + num_tokens]) for at in reversed(places[-max_matches:])]
            if wanted:
                break
        paths = {tuple(tree.token_ids[one] for one in tree.path(node)) for node in range(len(tree))}
        assert may_guess == bool(wanted)
        assert paths == {path[:cut] for path in wanted for cut in range(1, len(path) + 1)}


def test_a_shorter_text_and_settings_out_of_range_are_refused() -> None:
    index = NgramIndex(NgramConfig())
    index.propose([1, 2, 3], 4)
    with pytest.raises(ValueError, match="2 tokens, 3 at the call before"):
        index.propose([1, 2], 4)
    with pytest.raises(SettingsError, match="min_length"):
        NgramConfig(max_length=2, min_length=3)
    with pytest.raises(SettingsError, match="max_matches"):
        NgramConfig(max_matches=0)


def test_a_look_leaves_a_long_text_to_a_call_that_is_charged() -> None:
    """And says so: nothing was indexed of it."""
    index = NgramIndex(NgramConfig())
    token_ids = list(range(100))
    assert index.may_guess(token_ids)
    assert not len(index.propose(token_ids, 4))
    assert not index.may_guess(token_ids)
    assert not index.may_guess([*token_ids, *range(100, 110)])
    assert index.may_guess([*token_ids, *range(100, 200)])


class _Asked(PromptLookup):
    """Knows what it found, in each call."""

    def __init__(self) -> None:
        super().__init__(NgramConfig())
        self.found: list[list[int]] = []

    def propose(self, tasks: Sequence[Task]) -> list[Draft]:
        drafts = super().propose(tasks)
        self.found.append([len(draft.tree) for draft in drafts])
        return drafts


class _Blind(_Asked):
    may_guess = None  # type: ignore[assignment]  # no Looks


@pytest.mark.parametrize("looks", [True, False])
def test_it_is_asked_where_it_has_a_guess(
    looks: bool, make_request: Callable[..., Request]
) -> None:
    """One call finds out that there is none; the next one that brings nothing is not made."""
    drafter = _Asked() if looks else _Blind()
    config = EngineConfig(num_blocks=40, speculation=SpeculationConfig(always=True))
    model = FakeModel(context_window=128, block_size=4, vocab_size=500)
    engine = Engine(config, model, drafters=[drafter])
    for name in ("a", "b"):
        engine.submit(make_request(name, [1, 2, 3, 4, 1, 2], max_tokens=60))
    while engine.has_work():
        engine.step()
        engine.check_integrity()
    num_empty = sum(not any(found) for found in drafter.found)
    assert (num_empty <= 1) == looks


def test_of_another_request_with_the_same_name_nothing_is_known(
    make_request: Callable[..., Request], caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig(num_blocks=40, speculation=SpeculationConfig(always=True))
    model = FakeModel(context_window=128, block_size=4)
    engine = Engine(config, model, drafters=[_Asked()])
    engine.submit(make_request("a", [1, 2, 3, 4, 1, 2], max_tokens=60))
    for _ in range(12):
        engine.step()
    engine.abort("a")
    engine.submit(make_request("a", [5], max_tokens=8))
    while engine.has_work():
        engine.step()
    assert "has failed" not in caplog.text
