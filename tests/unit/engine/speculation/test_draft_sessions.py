"""What a draft worker keeps of verifiers' sequences: bounded, told apart, and never what does not
belong together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from engine.errors import IntegrityError
from engine.fake import FakeModel
from engine.speculation.draft_port import Answer, Ask
from engine.speculation.draft_sessions import SESSION_BYTES, TOKEN_BYTES, SessionLimits
from tests import draft_workers as bench

VERIFIER = bytes(16)


def _ask(session: int, token_ids: Sequence[int], start: int = 0, **fields: Any) -> Ask:
    made = Ask(session, start, token_ids, 1, 6, 0.0, 1.0, 0, 0.0, 0, 0)
    return made._replace(**fields)


def test_sessions_are_bounded_and_what_gave_way_is_asked_for_again() -> None:
    held = bench.sessions(SessionLimits(2, 1 << 20, 16, 8))

    def propose(*asks: Ask) -> list[Answer]:
        answers = held.propose([(VERIFIER, ask) for ask in asks])
        held.check_integrity()
        return answers

    assert all(one.is_known for one in propose(_ask(1, [1, 2]), _ask(2, [1, 2])))
    assert propose(_ask(3, [1, 2]))[0].is_known
    assert len(held) == 2 and held.num_evicted == 1
    assert not propose(_ask(1, [3], start=2))[0].is_known, "it was used longest ago"
    assert propose(_ask(3, [3], start=2))[0].is_known
    (whole,) = propose(_ask(1, [1, 2, 3]))
    (other,) = held.propose([(bytes(range(16)), _ask(1, [1, 2, 3]))])
    assert whole.token_ids == other.token_ids and len(whole.token_ids)
    held.forget(VERIFIER, [1, 3, 7])
    assert len(held) == 1, "the other verifier's is its own"
    answers = propose(_ask(4, [1]), _ask(5, [1]), _ask(6, [1]))
    assert [one.is_known for one in answers] == [True, True, False]


def test_bytes_are_bounded() -> None:
    held = bench.sessions(SessionLimits(64, 2 * SESSION_BYTES + 20 * TOKEN_BYTES, 16, 8))
    for number in range(9):
        held.propose([(VERIFIER, _ask(number, [1] * 10))])
        held.check_integrity()
    assert len(held) == 2
    (answer,) = held.propose([(VERIFIER, _ask(9, [1] * 1000))])
    assert not answer.is_known and len(held) == 0


def test_a_long_text_is_caught_up_with_between_calls() -> None:
    held = bench.sessions()
    model = FakeModel()
    tokens = [3 + index % 50 for index in range(100)]
    (answer,) = held.propose([(VERIFIER, _ask(1, tokens))])
    assert answer.is_known and not len(answer.token_ids)
    num_pieces = 1
    while held.catch_up():
        num_pieces += 1
        held.check_integrity()
    assert num_pieces == 13  # of 8 tokens
    tokens.append(model.next_token(tokens))
    (answer,) = held.propose([(VERIFIER, _ask(1, tokens[100:], start=100))])
    assert model.next_token(tokens) in answer.token_ids


def test_another_text_under_the_same_number_is_taken_for_what_it_is() -> None:
    held = bench.sessions()
    model = FakeModel()
    held.propose([(VERIFIER, _ask(1, [1, 2, 3, 4, 5]))])
    (answer,) = held.propose([(VERIFIER, _ask(1, [9, 9], start=2))])
    held.check_integrity()
    assert model.next_token([1, 2, 9, 9]) in answer.token_ids


@pytest.mark.parametrize(
    ("ask", "problem"),
    [
        (_ask(1, [97]), "token_ids: 97 is not below 97"),
        (_ask(1, []), "token_ids: a sequence has none"),
        (_ask(1, [1], temperature=float("nan")), "temperature"),
        (_ask(1, [1], temperature=-1.0), "temperature"),
        (_ask(1, [1], top_p=0.0), "top_p"),
        (_ask(1, [1], min_p=2.0), "min_p"),
    ],
)
def test_what_must_not_get_to_the_model_is_refused(ask: Ask, problem: str) -> None:
    held = bench.sessions()
    with pytest.raises(ValueError, match=problem):
        held.check(VERIFIER, [ask])
    with pytest.raises(ValueError, match="verifier: 3 bytes"):
        held.check(b"abc", [])
    with pytest.raises(ValueError, match="session: 1 is asked for twice"):
        held.check(VERIFIER, [_ask(1, [1]), _ask(1, [1])])


def test_laws_that_do_not_hold_are_told() -> None:
    held = bench.sessions()
    held.propose([(VERIFIER, _ask(1, [1]))])
    held.num_bytes += 1
    with pytest.raises(IntegrityError, match="bytes counted"):
        held.check_integrity()
