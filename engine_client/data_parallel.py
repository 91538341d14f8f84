"""Fleet: engines of one model in child processes, and the balancing of requests over them.

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
from engine_client import child_process_link
from engine_client.child_process_link import ChildLink, Progress
from engine_client.config import ClientLimits
from engine_client.encoded_errors import Failure
from engine_client.interface import Ask, LoadedAdapter, News
from engine_client.load_balancing import least_loaded, num_outstanding_tokens
from engine_client.messages import What, check_types
from process.rpc_errors import (
    AlreadyExists,
    BatonError,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    Unavailable,
)

T = TypeVar("T")

MAX_ASKS_PER_CALL = 256
"""Most requests in one `check` call, which bounds how long it can hold up an engine. Guessed."""
MAX_BYTES_PER_CALL = MAX_FRAME_BYTES // 2
"""Most bytes of requests in one `check` call, so that any request that fits a frame also fits
together with others."""


@dataclass
class _Live:
    rank: int
    num_tokens: int
    """Outstanding tokens of the request."""
    num_prompt_tokens: int
    """Prompt tokens among them, which are computed by the first news."""


class Fleet:
    """Child processes with one engine each, with load balancing and failure isolation;
    `process_client` and `async_client` are its blocking and its asyncio interface."""

    def __init__(
        self,
        config: EngineConfig,
        num_engines: int,
        *,
        deliver: Callable[[tuple[News, ...]], None],
        limits: ClientLimits,
        program: Sequence[str] = child_process_link.PROGRAM,
        progress: Progress | None = None,
    ) -> None:
        """Create the fleet without starting it. `progress` reports the loading of the first engine.

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
        """Return the child process ids by rank; None for one that was not started."""
        return tuple(each.pid for each in self._links)

    @property
    def num_live(self) -> int:
        """Return the number of requests whose last news have not come."""
        with self._lock:
            return len(self._live)

    def start(self) -> None:
        """Start all engines and wait until they are loaded.

        Raises: LoadError, Unavailable, DeadlineExceeded; FailedPrecondition where the engines
        loaded different models. No process is left then.
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
        """Submit a request to the engine with the fewest outstanding tokens, or to `rank`. Raises:
        as `EngineClient.submit`."""
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
        """Submit a request to one engine. Returns: False when that engine has just ended."""
        try:
            self._links[rank].submit(ask)
        except Unavailable:
            return False
        num_tokens = num_outstanding_tokens(ask, self.model.context_window)
        self._live[ask.request_id] = _Live(rank, num_tokens, len(ask.prompt_token_ids))
        self._loads[rank] += num_tokens
        return True

    def cancel(self, request_id: str) -> None:
        """Cancel a request in any state; an id that is not live is ignored."""
        with self._lock:
            self._refuse_when_closed()
            live = self._live.get(request_id)
            if live is not None:
                self._links[live.rank].cancel(request_id)

    def end_sample(self, request_id: str, sample_index: int) -> None:
        """End one sample whose text has ended before its tokens; the others go on."""
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
        """Send a call to every engine that is alive, in order of rank. Raises: Unavailable when
        none is, FailedPrecondition after `close`."""
        return [each.call(what, name=name, folder=folder) for each in self._alive()]

    def ask_one(
        self, what: What, asks: Sequence[Ask] = ()
    ) -> concurrent.futures.Future[msgspec.Raw]:
        """Send a call to the lowest-ranked engine that is alive. Raises: as `ask_all`."""
        return self._alive()[0].call(what, asks)

    def _alive(self) -> list[ChildLink]:
        self._refuse_when_closed()
        alive = [each for each in self._links if each.end is None]
        if not alive:
            raise Unavailable(f"no engine is alive: {self._links[0].end}")
        return alive

    def wait(self, future: concurrent.futures.Future[msgspec.Raw]) -> msgspec.Raw:
        """Wait for the reply to a call. Raises: the engine's error, Unavailable,
        DeadlineExceeded."""
        try:
            return future.result(self.limits.call_timeout_s)
        except concurrent.futures.TimeoutError as error:
            limit_s = self.limits.call_timeout_s
            raise DeadlineExceeded(f"no answer of the engine within {limit_s:g} s") from error

    def check_own_integrity(self) -> None:
        """Check that each rank's load is the sum of what its live requests may need. Raises:
        IntegrityError."""
        with self._lock:
            expected = [0] * self.num_engines
            for live in self._live.values():
                expected[live.rank] += live.num_tokens
            if expected != self._loads:
                raise IntegrityError(f"loads are {self._loads}, but live asks need {expected}")

    # -- the end

    def close(self) -> None:
        """Stop all engines at once, bounded in time; idempotent."""
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
    """Decode the value of a reply. Raises: Unavailable for bytes that are not of this type."""
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except msgspec.MsgspecError as error:
        raise Unavailable(f"the engine answered with no {kind.__name__}: {error}") from error


def check_groups(
    asks: Sequence[Ask], max_bytes: int = MAX_BYTES_PER_CALL
) -> list[tuple[int, Sequence[Ask]]]:
    """Split requests into groups that fit one call, each with the index of its first request.

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
    """Return the adapter that all engines have loaded under one name. Raises: FailedPrecondition
    where its content differs, since a request would get different weights on each engine."""
    if len({each.digest for each in loaded}) > 1:
        raise FailedPrecondition(
            f"adapter {loaded[0].name!r}: the engines loaded different content (did the folder "
            "change?); unload it and load it again"
        )
    return loaded[0]


def shifted(error: BatonError, start: int) -> BatonError:
    """Shift the index of an error about `asks[<i>]` of a group that begins at `start` to
    asks[<start + i>]."""
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
