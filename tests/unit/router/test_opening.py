"""The first command of a leg is what its message would be, and the prompt comes from the request's
field."""

from __future__ import annotations

from protos import common_pb2, decode_pb2, inference_pb2, prefill_pb2
from services.router.sealed_handle import Opening

IDS = inference_pb2.TokenIds(ids=range(0, 128_000, 16)).ids


def test_a_reservation_reads_as_its_message() -> None:
    reserve = decode_pb2.ReserveDecode(
        request_id="r", prompt_token_ids=IDS, sampling=common_pb2.SamplingParams(max_tokens=2)
    )
    number = decode_pb2.DecodeCommand.RESERVE_FIELD_NUMBER
    data = Opening(decode_pb2.DecodeCommand(key=300), number, reserve).write()
    assert data == decode_pb2.DecodeCommand(key=300, reserve=reserve).SerializeToString()


def test_an_empty_prompt_to_prefill_is_one_all_the_same() -> None:
    number = prefill_pb2.PrefillCommand.PREFILL_FIELD_NUMBER
    for request in (
        prefill_pb2.PrefillRequest(),
        prefill_pb2.PrefillRequest(prompt_token_ids=IDS, wants_handle=True),
    ):
        data = Opening(prefill_pb2.PrefillCommand(key=7), number, request).write()
        read = prefill_pb2.PrefillCommand.FromString(data)
        assert read == prefill_pb2.PrefillCommand(key=7, prefill=request)
        assert read.WhichOneof("command") == "prefill"


def test_a_field_of_ids_is_read_as_one_column() -> None:
    """As protobuf has it from 7.34 on: number by number a long prompt holds the router's loop up,
    in its digest, its check, its hashes and its openings."""
    assert hasattr(IDS, "__array__")
