"""A stream's outbox: what was put is unwritten until it is, and one that nobody reads any more
keeps nobody waiting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.worker.stream_servicer import Outbox, serve


class Session:
    """One that is idle, and hears when its stream is gone."""

    is_closed = False

    async def wait_idle(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("breaks", [False, True])
async def test_what_was_put_is_unwritten_until_it_is_written(breaks: bool) -> None:
    outbox, session, go_on = Outbox[int](), Session(), asyncio.Event()
    open_ones: set[Outbox[Any]] = set()
    written: list[list[int]] = []
    writing = asyncio.Event()

    async def commands() -> AsyncIterator[int]:
        await go_on.wait()
        return
        yield 0

    async def write(events: list[int]) -> None:
        writing.set()
        await go_on.wait()
        if breaks:
            raise ConnectionError("the router is gone")
        written.append(events)

    stream = asyncio.create_task(
        serve(commands(), lambda command: None, session, outbox, write, open_ones)
    )
    outbox.put(1)
    outbox.flush()
    await writing.wait()
    outbox.put(2)
    outbox.flush()
    assert outbox.num_unwritten == 2 and open_ones == {outbox}
    go_on.set()
    if breaks:
        with pytest.raises(ConnectionError):
            await stream
    else:
        await stream
        assert written == [[1], [2]] and outbox.num_unwritten == 0
    assert session.is_closed and not open_ones
