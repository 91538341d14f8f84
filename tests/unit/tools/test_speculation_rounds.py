"""What the benchmark says of whole rounds, against rounds that were written down."""

from __future__ import annotations

from itertools import islice

from benchmarks.speculation import Round, answers, turns


def test_tokens_per_step_leave_out_what_was_guessed() -> None:
    plain, tree = Round(96, 0, 1.0), Round(96, 72, 1.0)
    found = answers({"plain": [plain, plain], "tree": [tree, Round(96, 48, 1.0)]})
    assert found["plain"]["tokens_per_step"] == 1.0
    assert found["tree"]["tokens_per_step"] == 2.667  # 192 tokens by 72 rows


def test_answers_are_held_against_plain_decodings_by_their_mean_time() -> None:
    """Of two answers one is whole after half of the batch's time."""
    plain, own = Round(96, 0, answers_s=2.0), Round(96, 24, answers_s=1.5)
    found = answers({"plain": [plain, plain], "ngram": [own, own]})
    assert found["ngram"]["answers_speed"] == 1.333 and found["plain"]["answers_speed"] == 1.0


def test_turns_are_shuffled_anew_by_the_seed() -> None:
    ways = ["plain", "ngram", "tree"]
    found = list(islice(turns(ways, "3 batch 8"), 60))
    assert found == list(islice(turns(ways, "3 batch 8"), 60))
    assert all(sorted(order) == sorted(ways) for order in found)
    assert len({tuple(order) for order in found}) > 1
    assert found != list(islice(turns(ways, "4 batch 8"), 60))
