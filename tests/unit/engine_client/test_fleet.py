"""Fleet: what one question can hold, and what must not lock it up."""

from __future__ import annotations

import threading

import pytest

from engine.config import EngineConfig
from engine.request import Sampling
from engine_client import data_parallel
from engine_client.config import ClientLimits
from engine_client.data_parallel import Fleet, check_groups, common_adapter
from engine_client.interface import Ask, LoadedAdapter, News
from engine_client.messages import Call, encode
from process.rpc_errors import FailedPrecondition, InvalidArgument


def test_many_long_asks_are_asked_about_in_several_questions() -> None:
    """Each of them fits a frame, all of them do not."""
    lengths = [10, 800, 800, 10, 2_000, 10, 10]
    asks = [Ask(f"{i}", (70_000,) * n, Sampling(max_tokens=1)) for i, n in enumerate(lengths)]
    groups = check_groups(asks, max_bytes=5_000)
    assert [ask for _, group in groups for ask in group] == asks
    for start, group in groups:
        assert list(group) == asks[start : start + len(group)]
        assert len(group) == 1 or len(encode(Call(1, "check", tuple(group)))) < 5_100
    assert len(groups) == 4
    assert check_groups([]) == []
    many = [asks[0]] * (2 * data_parallel.MAX_ASKS_PER_CALL + 1)
    assert [start for start, _ in check_groups(many)] == [0, 256, 512]


def test_an_ask_that_cannot_be_sent_is_named() -> None:
    wrong = Ask("x", ("y",), Sampling(max_tokens=1))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument) as caught:
        check_groups([Ask("a", (5,), Sampling(max_tokens=1)), wrong])
    assert caught.value.field.startswith("asks[1].prompt_token_ids")


def test_engines_with_different_adapters_of_one_name_are_refused() -> None:
    """The folder was changed while they loaded it."""
    first, second = (LoadedAdapter("style", digest, 1, 1, ()) for digest in ("ab", "cd"))
    assert common_adapter([first, first]) == first
    with pytest.raises(FailedPrecondition, match=r"style.*different"):
        common_adapter([first, second])


def test_who_is_told_may_ask() -> None:
    """`deliver` runs under the lock; so may a finalizer that the collector starts in there."""
    seen: list[int] = []

    def deliver(news: tuple[News, ...]) -> None:
        seen.append(made.num_live)

    made = Fleet(EngineConfig(), 1, deliver=deliver, limits=ClientLimits())
    wrong = Ask("x", ("y",), Sampling(max_tokens=1))  # type: ignore[arg-type]
    thread = threading.Thread(target=made.submit, args=(wrong, None), daemon=True)
    thread.start()
    thread.join(30)
    assert seen == [0]
