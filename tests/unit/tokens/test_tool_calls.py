"""A model's own marker ends its tool calls, as a control token or as text."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from tests.harness.small_tokenizers import byte_level
from tokens.tokenizer import Tokenizer
from tokens.tool_calls import MARKERS, ToolCallEnds, find_tool_call_ends


def _tokenizer(token: str, *, special: bool) -> Tokenizer:
    backend = Backend(models.BPE({"a": 0}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(token, special=special)])
    return Tokenizer(backend)


@pytest.mark.parametrize("marker", MARKERS)
def test_each_marker_by_its_kind(marker: str) -> None:
    assert find_tool_call_ends(_tokenizer(marker, special=True), "") == ToolCallEnds(frozenset({1}))
    plain = find_tool_call_ends(_tokenizer(marker, special=False), "")
    assert plain == ToolCallEnds(strings=(marker,))
    # Only the template says it: the model spells it with its usual tokens.
    assert find_tool_call_ends(byte_level(), "{{ '" + marker + "' }}").strings == (marker,)


def test_a_model_without_tools_has_none() -> None:
    assert not find_tool_call_ends(byte_level(), "{{ messages }}")
