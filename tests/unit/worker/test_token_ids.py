"""Token ids of a message must be its own, whatever they are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protos import decode_pb2
from services.worker.stream_servicer import token_ids_of


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_the_values_are_those_of_the_message(token_ids: list[int]) -> None:
    message = decode_pb2.ReserveDecode(prompt_token_ids=token_ids)
    found = token_ids_of(message.prompt_token_ids)
    assert found == tuple(token_ids)
    assert all(type(token_id) is int for token_id in found)
