"""What a client sees joins to the whole: text and ids, wherever arrivals are cut and however the
answer ends."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from protos import common_pb2
from services.router.output import SampleOutput
from tests.harness.small_tokenizers import byte_level
from tokens.text import OutputText
from tokens.tool_calls import ToolCallEnds

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
    answer = SampleOutput("r", OutputText(TOKENIZER, stop=stops))
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


def test_a_tool_call_ends_by_its_text_which_is_shown() -> None:
    ends = ToolCallEnds(strings=("llo", "zz"))
    output = OutputText(TOKENIZER, stop=["!"], tool_call_ends=ends.strings)
    answer = SampleOutput("r", output, tool_call_ends=ends)
    message = answer.take(TOKENIZER.encode("hello! more"), ())
    assert message.text == "hello"
    assert answer.finish_reason == common_pb2.FINISH_REASON_TOOL_CALL
    other = SampleOutput("r", OutputText(TOKENIZER, stop=["l"], tool_call_ends=ends.strings))
    assert other.take(TOKENIZER.encode("hello"), ()).text == "he"
    assert other.finish_reason == common_pb2.FINISH_REASON_STOP_STRING


def test_a_tool_call_ends_by_its_token() -> None:
    token_id = TOKENIZER.encode("!")[0]
    ends = ToolCallEnds(token_ids=frozenset({token_id}))
    ids = TOKENIZER.encode("hello!")
    for reason in (common_pb2.FINISH_REASON_EOS, common_pb2.FINISH_REASON_STOP_TOKEN):
        answer = SampleOutput("r", OutputText(TOKENIZER), tool_call_ends=ends)
        answer.take(ids, (), reason=reason, stop_token_id=token_id)
        assert answer.finish_reason == common_pb2.FINISH_REASON_TOOL_CALL
        plain = SampleOutput("r", OutputText(TOKENIZER))
        plain.take(ids, (), reason=reason, stop_token_id=token_id)
        assert plain.finish_reason == reason
