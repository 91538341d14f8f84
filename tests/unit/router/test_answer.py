"""What a client sees joins to the whole: text and ids, wherever arrivals are cut and however the
answer ends."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from protos import common_pb2
from services.router.answer import Answer
from tests.unit.tokens.builders import byte_level
from tokens.text import OutputText

TOKENIZER = byte_level()
IDS = TOKENIZER.encode("hello a hell\n\n. naïve — 中 é hell")


@given(
    cuts=st.sets(st.integers(1, len(IDS) - 1)),
    length=st.integers(1, len(IDS)),
    stops=st.lists(st.sampled_from(["hellx", "\n\n!", ".x", " hell o", "zz"]), max_size=3),
)
def test_all_text_comes_out_when_the_length_ends_it(
    cuts: set[int], length: int, stops: list[str]
) -> None:
    """Held-back text is released by the end behind what the last tokens made visible; once it
    took their place instead."""
    ids = IDS[:length]
    answer = Answer("r", OutputText(TOKENIZER, stop=stops))
    bounds = [0, *sorted(cut for cut in cuts if cut < length), length]
    text, seen = "", []
    for begin, end in itertools.pairwise(bounds):
        is_last = end == length
        reason = common_pb2.FINISH_REASON_LENGTH if is_last else 0
        message = answer.take(ids[begin:end], (), reason=reason)
        text += message.text
        seen += message.token_ids
    assert answer.is_over
    assert text == TOKENIZER.decode(ids)
    assert seen == list(ids)
