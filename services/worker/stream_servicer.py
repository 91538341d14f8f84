"""`serve`: the worker side of a multiplexed gRPC stream with one router, for either role. The
router's commands go to a Session, and all events since the last write are sent as one message from
an Outbox.

While the router keeps up, that is one message per engine step. With a slow router steps share a
message, up to MAX_EVENTS, so the requests' own lengths bound the events that wait. The stream ends
when the router has no more commands and its last request is over; when the stream breaks, all of
its requests end. Used on the event loop's thread.

Also here: the conversion of protobuf SamplingParams (sampling, number of samples, grammar, beam
search) and token ids to the engine's values. Stop strings, tool calls and words are handled by the
router, which makes the text: a worker that receives one of them refuses, since it would ignore it.
The engine checks the ranges at `reserve`.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from engine.input_processor import MAX_SAMPLES
from engine.request import Beam, GrammarKind, GrammarSpec, Sampling
from process.rpc_errors import InvalidArgument
from protos import common_pb2

EventT = TypeVar("EventT")
CommandT = TypeVar("CommandT")


MAX_EVENTS = 256
"""Most events in one message: at the largest size of an event (prompt log-probabilities) they take
48 MB of the 64 MiB limit."""


class Session(Protocol):
    """Interface of the requests of one stream."""

    async def wait_idle(self) -> None:
        """Wait until every request is over. Each has its own deadline."""

    def close(self) -> None:
        """Cancel all requests because the stream has ended."""


class Outbox(Generic[EventT]):
    """Queue of events that wait to be written, in order."""

    def __init__(self) -> None:
        self._events: list[EventT] = []
        self._wake = asyncio.Event()
        self._is_ended = False
        self.num_unwritten = 0
        """Events that were put and are not written yet."""
        self.num_batches = 0
        """So many were taken to be written: what was put before the last one cannot be changed."""

    def put(self, event: EventT) -> None:
        """Queue an event until `flush`."""
        self.num_unwritten += 1
        self._events.append(event)

    def flush(self) -> None:
        """Make the queued events available for writing; never blocks."""
        self._wake.set()

    def end(self) -> None:
        """End the queue; no event may be added afterwards."""
        self._is_ended = True
        self._wake.set()

    async def batches(self) -> AsyncIterator[list[EventT]]:
        """Yield the events to be written together, until `end`."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while events := self._events[:MAX_EVENTS]:
                del self._events[:MAX_EVENTS]
                self.num_batches += 1
                yield events
                self.num_unwritten -= len(events)
            if self._is_ended and not self._events:
                return


async def serve(
    commands: AsyncIterator[CommandT],
    obey: Callable[[CommandT], None],
    session: Session,
    outbox: Outbox[EventT],
    write: Callable[[list[EventT]], Awaitable[None]],
    open_ones: set[Outbox[Any]],
) -> None:
    """Serve one stream until it ends. `obey` answers an invalid command itself.

    Args: open_ones: contains the outbox while the stream is served.
    """

    async def read() -> None:
        try:
            async for command in commands:
                obey(command)
            await session.wait_idle()
        finally:
            outbox.end()

    reader = asyncio.create_task(read())
    open_ones.add(outbox)
    try:
        async for events in outbox.batches():
            await write(events)
        await reader
    finally:
        open_ones.discard(outbox)
        session.close()
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)


_REQUIRED = ("temperature", "top_p", "max_tokens", "seed")
_SAMPLING_FIELDS = frozenset(field.name for field in dataclasses.fields(Sampling))
_WIRE_NAMES = {
    "num_samples": "sampling.n",
    "beam": "sampling.beam",
    "bad_words": "sampling.bad_word_ids",
    "wants_embedding": "embed",
}
"""Protobuf names of fields that the engine names differently."""
_GRAMMARS = {
    "json_schema": GrammarKind.JSON_SCHEMA,
    "regex": GrammarKind.REGEX,
    "ebnf": GrammarKind.EBNF,
}


def sampling_from_proto(params: common_pb2.SamplingParams, sample_index: int) -> Sampling:
    """Translate sampling parameters. Raises: InvalidArgument naming the field that is missing or
    belongs to the router."""
    for name in _REQUIRED:
        if not params.HasField(name):
            raise InvalidArgument(f"sampling.{name}", "is absent; the router sets it")
    for name in ("stop", "bad_words", "stop_at_tool_call"):
        if getattr(params, name):
            raise InvalidArgument(f"sampling.{name}", "is the router's; a worker knows no text")
    return Sampling(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        min_tokens=params.min_tokens,
        seed=params.seed,
        sample_index=sample_index,
        stop_token_ids=frozenset(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        repetition_penalty=params.repetition_penalty or 1.0,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=tuple(sorted(params.logit_bias.items())),
        bad_words=tuple(tuple(word.ids) for word in params.bad_word_ids),
        allowed_token_ids=frozenset(params.allowed_token_ids) or None,
        no_repeat_ngram=params.no_repeat_ngram,
        grammar=grammar_from_proto(params),
        trace=params.trace,
    )


def grammar_from_proto(params: common_pb2.SamplingParams) -> GrammarSpec | None:
    """Return the grammar that the output must follow; None: unconstrained."""
    kind = params.WhichOneof("grammar")
    if kind is None:
        return None
    if kind == "choice":
        return GrammarSpec(GrammarKind.CHOICE, choices=tuple(params.choice.values))
    return GrammarSpec(_GRAMMARS[kind], getattr(params, kind))


def beam_from_proto(params: common_pb2.SamplingParams) -> Beam | None:
    """Return the requested beam search; None: sampling."""
    if not params.HasField("beam"):
        return None
    beam = params.beam
    penalty = beam.length_penalty if beam.HasField("length_penalty") else 1.0
    return Beam(beam.num_beams, penalty, beam.early_stopping)


def num_samples_of(params: common_pb2.SamplingParams) -> int:
    """Return the number of samples; 0 in the message means 1. Raises: InvalidArgument for more than
    an engine accepts, since the number sizes per-request state before the engine checks it."""
    if params.n > MAX_SAMPLES:
        raise InvalidArgument("sampling.n", f"{params.n} is above {MAX_SAMPLES}")
    return params.n or 1


def named_on_wire(error: Exception, sampling: Sampling) -> Exception:
    """Return `error` with its field named as in the client's message."""
    if not isinstance(error, InvalidArgument):
        return error
    name = _WIRE_NAMES.get(error.field)
    if name is None and error.field in _SAMPLING_FIELDS:
        name = f"sampling.{error.field}"
    if error.field.startswith("beam."):
        name = f"sampling.{error.field}"
    if error.field == "grammar" and sampling.grammar is not None:
        name = f"sampling.{sampling.grammar.kind.value}"
    if name is None:
        return error
    return InvalidArgument(name, str(error).removeprefix(f"{error.field}: "))


def token_ids_of(field: Sequence[int]) -> tuple[int, ...]:
    """Return the values of a repeated uint32 field. They are read as one column: one by one, those
    of a long prompt took twice as long, with the interpreter's lock held all the while."""
    return tuple(np.array(field, dtype=np.uint32).tolist())
