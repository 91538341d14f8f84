"""What a draft worker keeps of verifiers' sequences: bounded, told apart, and never what does not
belong together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from engine.batch import Batch
from engine.errors import IntegrityError
from engine.speculation.draft_model import DraftModelProposer
from engine.speculation.draft_protocol import NEW_TOKENS, DraftRequest, DraftResponse
from engine.speculation.draft_sessions import BUSY_S, SESSION_BYTES, TOKEN_BYTES, SessionLimits
from engine.testing.fake_model import FakeModel
from tests.harness import draft_workers as bench

VERIFIER = bytes(16)


def _ask(session: int, token_ids: Sequence[int], start: int = 0, **fields: Any) -> DraftRequest:
    made = DraftRequest(session, start, token_ids, 1, 6, 0.0, 1.0, 0, 0.0, 0, 0)
    return made._replace(**fields)


def test_sessions_are_bounded_and_what_gave_way_is_asked_for_again() -> None:
    clock = bench.Clock()
    held = bench.sessions(SessionLimits(2, 1 << 20, 16, 8), clock=clock)

    def propose(*asks: DraftRequest) -> list[DraftResponse]:
        answers = held.propose([(VERIFIER, ask) for ask in asks])
        held.check_integrity()
        return answers

    assert all(one.is_known for one in propose(_ask(1, [1, 2]), _ask(2, [1, 2])))
    assert not propose(_ask(3, [1, 2]))[0].is_known, "both were asked for just now"
    assert len(held) == 2 and held.num_evicted == 0
    clock.now_s += BUSY_S
    assert propose(_ask(2, [3], start=2), _ask(3, [1, 2]))[1].is_known
    assert held.num_evicted == 1
    clock.now_s += BUSY_S
    assert propose(_ask(3, [3], start=2))[0].is_known
    assert len(held) == 2 and held.num_evicted == 1
    assert not propose(_ask(1, [3], start=2))[0].is_known, "it was used longest ago"
    assert propose(_ask(3, [4], start=3))[0].is_known
    (whole,) = propose(_ask(1, [1, 2, 3]))
    clock.now_s += BUSY_S
    (other,) = held.propose([(bytes(range(16)), _ask(1, [1, 2, 3]))])
    assert whole.token_ids == other.token_ids and len(whole.token_ids)
    held.forget(VERIFIER, [1, 3, 7])
    assert len(held) == 1, "the other verifier's is its own"
    clock.now_s += BUSY_S
    answers = propose(_ask(4, [1]), _ask(5, [1]), _ask(6, [1]))
    assert [one.is_known for one in answers] == [True, True, False]


def test_bytes_are_bounded() -> None:
    clock = bench.Clock()
    limits = SessionLimits(64, 2 * SESSION_BYTES + 20 * TOKEN_BYTES, 16, 8)
    held = bench.sessions(limits, clock=clock)
    for number in range(9):
        clock.now_s += BUSY_S
        held.propose([(VERIFIER, _ask(number, [1] * 10))])
        held.check_integrity()
    assert len(held) == 2
    answers = held.propose([(VERIFIER, _ask(number, [1] * 10)) for number in (7, 8, 9)])
    assert [one.is_known for one in answers] == [True, True, False], "who comes is not kept"
    clock.now_s += BUSY_S
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


class Counting(bench.Wrapped):
    """Counts the tokens that its model computes."""

    def __init__(self, num_blocks: int) -> None:
        model = FakeModel(block_size=4)
        self.num_computed = 0
        forward = model.forward

        def counted(batch: Batch) -> torch.Tensor:
            self.num_computed += len(batch.token_ids)
            return forward(batch)

        model.forward = counted  # type: ignore[method-assign]
        super().__init__(
            DraftModelProposer(model, (1, 1), num_blocks=num_blocks, max_num_tokens=2048)
        )


def test_what_lost_its_kv_is_computed_between_calls_or_not_at_all() -> None:
    """Room for one text, two that are asked for in turn: the one that has its KV keeps it, until
    it is not asked for any more."""
    proposer, clock = Counting(num_blocks=60), bench.Clock()
    held = bench.sessions(by=proposer, clock=clock)
    texts = {number: [2 + number] * 200 for number in (1, 2)}
    start = dict.fromkeys(texts, 0)

    def propose(number: int) -> DraftResponse:
        before = proposer.num_computed
        ask = _ask(number, texts[number][start[number] :], start[number], num_nodes=2)
        (answer,) = held.propose([(VERIFIER, ask)])
        assert answer.is_known and proposer.num_computed - before <= NEW_TOKENS + 2
        start[number] = len(texts[number])
        texts[number].append(5)
        for _ in range(200):
            if not held.catch_up():
                break
        assert not held.is_behind, "it comes to an end"
        held.check_integrity()
        return answer

    num_guessed = {1: 0, 2: 0}
    for _ in range(6):
        for number in texts:
            num_guessed[number] += len(propose(number).token_ids) > 0
    assert num_guessed == {1: 5, 2: 0}
    assert proposer.num_computed < 250, "nothing was computed twice"
    clock.now_s += BUSY_S
    propose(2)
    assert len(propose(2).token_ids)
    assert not len(propose(1).token_ids)


def test_a_text_that_has_no_room_at_all_ends_the_catching_up() -> None:
    """Nor does anybody lose KV for it."""
    held = bench.sessions(by=Counting(num_blocks=60))
    held.propose([(VERIFIER, _ask(1, [1, 2]))])
    held.propose([(VERIFIER, _ask(2, [1] * 1000))])
    assert held.is_behind and not held.catch_up()
    assert held._proposer.num_cached((VERIFIER.hex(), 1)) == 2
    held.check_integrity()


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
def test_what_must_not_get_to_the_model_is_refused(ask: DraftRequest, problem: str) -> None:
    held = bench.sessions()
    with pytest.raises(ValueError, match=problem):
        held.check(VERIFIER, [ask])
    with pytest.raises(ValueError, match="verifier: 3 bytes"):
        held.check(b"abc", [])
    with pytest.raises(ValueError, match="session: 1 has two requests"):
        held.check(VERIFIER, [_ask(1, [1]), _ask(1, [1])])
    with pytest.raises(ValueError, match="token_ids: a call brings more than 8192"):
        held.check(VERIFIER, [_ask(1, [1] * 8000), _ask(2, [1] * 193)])
    with pytest.raises(ValueError, match="verifier: 3 bytes"):
        held.check_ended(b"abc", [])
    with pytest.raises(ValueError, match="sessions: 4097, above 4096"):
        held.check_ended(VERIFIER, range(4097))


def test_laws_that_do_not_hold_are_told() -> None:
    held = bench.sessions()
    held.propose([(VERIFIER, _ask(1, [1]))])
    held.num_bytes += 1
    with pytest.raises(IntegrityError, match="bytes counted"):
        held.check_integrity()
