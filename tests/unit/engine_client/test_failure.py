"""Errors cross a process border as what they were, and nothing else does."""

from __future__ import annotations

import msgspec
import pytest

from engine import errors as engine_errors
from engine_client import encoded_errors
from engine_client.encoded_errors import Failure
from process.rpc_errors import BatonError, Internal, InvalidArgument, NoCapacity


def across(error: Exception) -> BatonError:
    data = msgspec.msgpack.encode(Failure.of(error))
    return msgspec.msgpack.decode(data, type=Failure).to_error()


@pytest.mark.parametrize("kind", encoded_errors._KINDS.values(), ids=lambda kind: kind.__name__)
def test_every_error_of_ours_keeps_its_class_and_words(kind: type[BatonError]) -> None:
    if kind is engine_errors.EmptySupport:
        error: BatonError = engine_errors.EmptySupport(("top_k=1", "bad_words"), 7)
    elif issubclass(kind, InvalidArgument):
        error = kind("field", "is odd")
    else:
        error = kind("is odd")
    again = across(error)
    assert (type(again), str(again)) == (kind, str(error))
    assert again.retry_after_s == error.retry_after_s
    assert vars(again) == vars(error) | {
        name: value for name, value in vars(again).items() if name == "retry_after_s"
    }


def test_attributes_cross() -> None:
    assert across(NoCapacity("full", retry_after_s=7.5)).retry_after_s == 7.5
    again = across(InvalidArgument("prompt", "is odd"))
    assert isinstance(again, InvalidArgument) and again.field == "prompt"
    moved = Failure.of(InvalidArgument("prompt", "is odd")).to_error(at="asks[3].")
    assert isinstance(moved, InvalidArgument)
    assert (moved.field, str(moved)) == ("asks[3].prompt", "asks[3].prompt: is odd")


def test_what_is_not_ours_becomes_internal() -> None:
    class Own(engine_errors.NoBlocks):
        """A class that the other side does not know: its nearest known base crosses."""

    assert type(across(Own("none"))) is engine_errors.NoBlocks
    error = across(ValueError("odd"))
    assert type(error) is Internal and str(error) == "ValueError: odd"
    for name in ("os.system", "SystemExit", "Exception", ""):
        assert type(Failure(name, "x").to_error()) is Internal
    hostile = Failure("Internal", "x", details={"__class__": "y", "args": ["z"], "a b": 1})
    assert type(hostile.to_error()) is Internal
