"""Engines of one model in child processes, and which of them serves what.

Balances internally (the engine with the fewest outstanding tokens) unless the caller names a rank.
An engine that dies fails what it served; the others go on, and nothing more is given to it.

Faces of it: `process_client` (blocking) and `async_client`. Any thread may call; `deliver` is
called from the links' reading threads and must not block.

Law (`check_integrity`): a rank's load is the sum of what its live asks may still need.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec

from engine.config import EngineConfig
from engine.errors import IntegrityError
from engine.parallel.framing import MAX_FRAME_BYTES
from engine.request import ModelInfo
from engine_client import link
from engine_client.balancing import least_loaded, num_outstanding_tokens
from engine_client.base import Ask, LoadedAdapter, News
from engine_client.config import ClientLimits
from engine_client.failure import Failure
from engine_client.link import ChildLink, Progress
from engine_client.messages import What, check_types
from process.errors import (
    AlreadyExists,
    BatonError,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    Unavailable,
)

T = TypeVar("T")

MAX_ASKS_PER_CALL = 256
"""Bounds how long one question can hold up an engine. Guessed."""
MAX_BYTES_PER_CALL = MAX_FRAME_BYTES // 2
"""Of asks: so that each that fits a frame can be asked about together with others."""


@dataclass
class _Live:
    rank: int
    num_tokens: int
    """Outstanding."""
    num_prompt_tokens: int
    """Of them; they are done with the first news."""


class Fleet:
    """See the module."""

    def __init__(
        self,
        config: EngineConfig,
        num_engines: int,
        *,
        deliver: Callable[[tuple[News, ...]], None],
        limits: ClientLimits,
        program: Sequence[str] = link.PROGRAM,
        progress: Progress | None = None,
    ) -> None:
        """`progress` hears of the first engine's loading.

        Raises: InvalidArgument for a number of engines below 1.
        """
        if num_engines < 1:
            raise InvalidArgument("num_engines", f"{num_engines} is below 1")
        self.limits = limits
        self._deliver_to = deliver
        # Reentrant: `deliver` may ask, and `close` may be the collector's, in the midst of it.
        self._lock = threading.RLock()
        self._live: dict[str, _Live] = {}
        self._loads = [0] * num_engines
        self._is_closed = False
        self._links = [
            ChildLink(
                config,
                rank=rank,
                deliver=self._deliver,
                limits=limits,
                program=program,
                progress=progress if rank == 0 else None,
            )
            for rank in range(num_engines)
        ]
        self.model: ModelInfo

    @property
    def num_engines(self) -> int:
        return len(self._links)

    @property
    def pids(self) -> tuple[int | None, ...]:
        """Of the children, by rank."""
        return tuple(each.pid for each in self._links)

    @property
    def num_live(self) -> int:
        """Asks whose last news have not come."""
        with self._lock:
            return len(self._live)

    def start(self) -> None:
        """Start all engines and wait until they are loaded.

        Raises: what kept one from loading; no process is left then.
        """
        ends_s = time.monotonic() + self.limits.start_timeout_s
        try:
            for each in self._links:
                each.start()
            models = [each.wait_ready(max(0.0, ends_s - time.monotonic())) for each in self._links]
        except BaseException:
            self.close()
            raise
        self.model = models[0]
        if any(model.fingerprint != self.model.fingerprint for model in models):
            self.close()
            raise FailedPrecondition("the engines loaded different models: did the folder change?")

    # -- asks

    def submit(self, ask: Ask, rank: int | None) -> None:
        """See `EngineClient.submit`."""
        problem = _problem(ask)
        with self._lock:
            self._refuse_when_closed()
            if ask.request_id in self._live:
                raise AlreadyExists(f"ask {ask.request_id} is live already")
            chosen = self._choose(rank)
            if problem is not None:
                self._deliver_to((News(ask.request_id, is_over=True, failure=problem),))
                return
            while not self._hand_over(ask, chosen):
                chosen = self._choose(rank)

    def _hand_over(self, ask: Ask, rank: int) -> bool:
        """Returns: False when that engine ended just now."""
        try:
            self._links[rank].submit(ask)
        except Unavailable:
            return False
        num_tokens = num_outstanding_tokens(ask, self.model.context_window)
        self._live[ask.request_id] = _Live(rank, num_tokens, len(ask.prompt_token_ids))
        self._loads[rank] += num_tokens
        return True

    def cancel(self, request_id: str) -> None:
        """See `EngineClient.cancel`."""
        with self._lock:
            self._refuse_when_closed()
            live = self._live.get(request_id)
            if live is not None:
                self._links[live.rank].cancel(request_id)

    def end_sample(self, request_id: str, sample_index: int) -> None:
        """See `EngineClient.end_sample`."""
        with self._lock:
            self._refuse_when_closed()
            live = self._live.get(request_id)
            if live is not None:
                self._links[live.rank].end_sample(request_id, sample_index)

    def _choose(self, rank: int | None) -> int:
        if rank is None:
            loads = [
                None if each.end is not None else load
                for each, load in zip(self._links, self._loads, strict=True)
            ]
            rank = least_loaded(loads)
            if rank is None:
                raise Unavailable(f"no engine is alive: {self._links[0].end}")
        elif not 0 <= rank < self.num_engines:
            raise InvalidArgument(
                "rank", f"{rank} does not exist; there are {self.num_engines}, from 0"
            )
        elif (end := self._links[rank].end) is not None:
            raise Unavailable(str(end))
        return rank

    # -- questions

    def ask_all(
        self, what: What, *, name: str = "", folder: str = ""
    ) -> list[concurrent.futures.Future[msgspec.Raw]]:
        """One question to every engine alive, in order of rank. Raises: Unavailable when none is,
        FailedPrecondition after `close`."""
        return [each.call(what, name=name, folder=folder) for each in self._alive()]

    def ask_one(
        self, what: What, asks: Sequence[Ask] = ()
    ) -> concurrent.futures.Future[msgspec.Raw]:
        """One question to the engine alive of the lowest rank. Raises: as `ask_all`."""
        return self._alive()[0].call(what, asks)

    def _alive(self) -> list[ChildLink]:
        self._refuse_when_closed()
        alive = [each for each in self._links if each.end is None]
        if not alive:
            raise Unavailable(f"no engine is alive: {self._links[0].end}")
        return alive

    def wait(self, future: concurrent.futures.Future[msgspec.Raw]) -> msgspec.Raw:
        """The answer. Raises: what the engine raised, Unavailable, DeadlineExceeded."""
        try:
            return future.result(self.limits.call_timeout_s)
        except concurrent.futures.TimeoutError as error:
            limit_s = self.limits.call_timeout_s
            raise DeadlineExceeded(f"no answer of the engine within {limit_s:g} s") from error

    def check_own_integrity(self) -> None:
        """Raises: IntegrityError when a rank's load is not what its live asks may need."""
        with self._lock:
            expected = [0] * self.num_engines
            for live in self._live.values():
                expected[live.rank] += live.num_tokens
            if expected != self._loads:
                raise IntegrityError(f"loads are {self._loads}, but live asks need {expected}")

    # -- the end

    def close(self) -> None:
        """End all engines, at once and within a bound; idempotent."""
        with self._lock:
            self._is_closed = True
        for each in self._links:
            each.tell_to_end()
        for each in self._links:
            each.close()

    # -- the links' threads

    def _deliver(self, rank: int, news: tuple[News, ...]) -> None:
        with self._lock:
            for each in news:
                self._book(each)
            self._deliver_to(news)  # under the lock: nobody finds nothing live and no news of it

    def _book(self, news: News) -> None:
        live = self._live.get(news.request_id)
        if live is None:
            return
        done = live.num_prompt_tokens + len(news.token_ids)
        live.num_prompt_tokens = 0
        done = live.num_tokens if news.is_over else min(done, live.num_tokens)
        live.num_tokens -= done
        self._loads[live.rank] -= done
        if news.is_over:
            del self._live[news.request_id]

    def _refuse_when_closed(self) -> None:
        if self._is_closed:
            raise FailedPrecondition("the client is closed")


def value(raw: msgspec.Raw, kind: type[T]) -> T:
    """The value of a reply. Raises: Unavailable for one that is none of this kind."""
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except msgspec.MsgspecError as error:
        raise Unavailable(f"the engine answered with no {kind.__name__}: {error}") from error


def check_groups(
    asks: Sequence[Ask], max_bytes: int = MAX_BYTES_PER_CALL
) -> list[tuple[int, Sequence[Ask]]]:
    """Asks in groups that one question can hold, each with the index of its first.

    Raises: InvalidArgument for a value of the wrong type, which could not be sent.
    """
    groups: list[tuple[int, Sequence[Ask]]] = []
    start = num_bytes = 0
    for index, ask in enumerate(asks):
        try:
            more = check_types(ask)
        except InvalidArgument as error:
            raise Failure.of(error).to_error(at=f"asks[{index}].") from error
        is_full = index - start == MAX_ASKS_PER_CALL or num_bytes + more > max_bytes
        if is_full and index > start:
            groups.append((start, asks[start:index]))
            start, num_bytes = index, 0
        num_bytes += more
    return [*groups, (start, asks[start:])] if asks else []


def common_adapter(loaded: Sequence[LoadedAdapter]) -> LoadedAdapter:
    """What all engines have loaded under one name. Raises: FailedPrecondition where it differs:
    then the same ask would mean something else at each."""
    if len({each.digest for each in loaded}) > 1:
        raise FailedPrecondition(
            f"adapter {loaded[0].name!r}: the engines loaded different content (did the folder "
            "change?); unload it and load it again"
        )
    return loaded[0]


def shifted(error: BatonError, start: int) -> BatonError:
    """An error about `asks[<i>]` of a group that begins at `start`, about asks[<start + i>]."""
    if not (isinstance(error, InvalidArgument) and error.field.startswith("asks[")):
        return error
    index, _, rest = error.field.removeprefix("asks[").partition("]")
    failure = Failure.of(error)
    moved = f"asks[{start + int(index)}]{rest}"
    message = moved + failure.message.removeprefix(failure.field)
    return replace(failure, message=message, field=moved).to_error()


def _problem(ask: Ask) -> Failure | None:
    try:
        check_types(ask)
    except InvalidArgument as error:
        return Failure.of(error)
    return None
