"""Child process that runs one engine for the client that started it.

    python -m engine_client.engine_process <number of an inherited socket>

Life: Start -> loading -> Hello -> messages and steps alternate until Stop, or until the socket is
closed. It ends when its parent dies (`process.entrypoint.die_with_parent`).
Exit codes: 0 after Stop, 1 the engine failed, 2 it could not start.

The main thread is the engine's; a second one reads, so that the client never waits to write.
Modules that take seconds to import, torch above all, are imported after Start.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, NoReturn, Protocol

from engine.config import EngineConfig
from engine.parallel.framing import MAX_FRAME_BYTES, FrameReader, FrameWriter
from engine_client.encoded_errors import Failure
from engine_client.interface import News
from engine_client.messages import (
    VERSION,
    Call,
    Cancel,
    EndSample,
    Failed,
    FromEngine,
    Hello,
    Loading,
    Refused,
    Reply,
    Start,
    StepNews,
    Stop,
    Submit,
    ToEngine,
    encode,
    encode_value,
    read_to_engine,
)
from process import entrypoint, logs
from process.rpc_errors import BatonError, FailedPrecondition, Internal, Unavailable

if TYPE_CHECKING:
    from engine.engine import LLMEngine
    from engine.models.interface import Progress
    from engine_client.engine_core import EngineCore

START_S = 60.0
"""Seconds to wait for the client's first message, which is sent before this process begins to
run."""
WRITE_S = 60.0
"""Seconds for the client to read a message; one of its threads does nothing else."""
IDLE_CHECK_S = 0.25
"""Seconds of idleness after which the engine checks its invariants once."""
PROGRESS_EVERY = 0.02
SIGN_OF_LIFE_S = 1.0
"""Seconds between empty batches sent while steps bring no news, as a sign of life."""

logger = logging.getLogger(__name__)


class MakeEngine(Protocol):
    """Function that loads an engine: `engine.engine.load_engine`, or a replacement in a test."""

    def __call__(self, config: EngineConfig, *, progress: Progress | None = None) -> LLMEngine: ...


def _load_engine(config: EngineConfig, *, progress: Progress | None = None) -> LLMEngine:
    from engine.engine import load_engine

    return load_engine(config, progress=progress)


def main(make_engine: MakeEngine = _load_engine) -> int:
    """Serve one client on the socket whose number is the last command-line argument. Returns: the
    exit code."""
    logs.configure("engine", "warning")
    try:
        entrypoint.die_with_parent()
        connection = socket.socket(fileno=int(sys.argv[1]))
    except (Unavailable, OSError, ValueError, IndexError) as error:
        sys.stderr.write(f"engine_client.engine_process: {error}\n")
        return 2
    with connection:
        return _Child(connection).run(make_engine)


class _Child:
    def __init__(self, connection: socket.socket) -> None:
        self._reader = FrameReader(connection)
        self._writer = FrameWriter(connection)
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._checked_idle = False
        self._shown = ("", 0)
        self._wrote_s = 0.0

    def run(self, make_engine: MakeEngine) -> int:
        try:
            core = self._load(make_engine)
            if core is None:
                return 2
            threading.Thread(target=self._read, name="reader", daemon=True).start()
            try:
                return self._serve(core)
            finally:
                core.close()
        except EOFError:
            return 0  # the client has gone
        except BatonError as error:  # it broke the rules of this connection
            self._write(Failed(Failure.of(error)))
            return 1
        finally:
            self._reader.close()
            self._writer.close()

    # -- start

    def _load(self, make_engine: MakeEngine) -> EngineCore | None:
        try:
            start = self._first_message()
            with entrypoint.importing():
                from engine_client.engine_core import EngineCore
            engine = make_engine(start.config, progress=self._show)
        except EOFError:
            raise
        except Exception as error:  # told to the client; one that is not ours is shown here, too
            if not isinstance(error, BatonError):
                logger.error("engine_not_loaded", exc_info=error)
            self._write(Refused(Failure.of(error)))
            return None
        self._write(Hello(VERSION, engine.model_info))
        return EngineCore(engine)

    def _first_message(self) -> Start:
        frame = self._reader.read(START_S)
        if frame is None:
            raise EOFError("no first message")
        message = read_to_engine(frame)
        if not isinstance(message, Start) or message.version != VERSION:
            raise FailedPrecondition(f"the first message is no Start of version {VERSION}")
        return message

    def _show(self, what: str, done: int, total: int) -> None:
        """Send loading progress, at most in steps of PROGRESS_EVERY."""
        last_what, last_done = self._shown
        if what == last_what and done < total and done - last_done < PROGRESS_EVERY * total:
            return
        self._shown = (what, done)
        self._write(Loading(what, done, total))

    # -- serve

    def _serve(self, core: EngineCore) -> int:
        while True:
            for message in self._messages(core):
                if isinstance(message, Stop):
                    return 0
                self._handle(core, message)
            if core.has_work():
                self._tell(core, core.step())
            if core.failure is not None:
                self._write(Failed(Failure.of(core.failure)))
                return 1

    def _messages(self, core: EngineCore) -> list[ToEngine]:
        """Return all messages that have arrived; waits for one when the engine is idle."""
        messages: list[ToEngine] = []
        if not core.has_work():
            try:
                messages.append(self._inbox.get(timeout=IDLE_CHECK_S))
            except queue.Empty:
                core.check_alive()
                if not self._checked_idle:
                    core.check_when_idle()
                self._checked_idle = True
                return messages
        self._checked_idle = False
        try:
            while True:
                messages.append(self._inbox.get_nowait())
        except queue.Empty:
            return messages

    def _handle(self, core: EngineCore, message: ToEngine) -> None:
        match message:
            case Submit(ask):
                core.submit(ask)
            case Cancel(request_id):
                core.cancel(request_id)
            case EndSample(request_id, sample_index):
                core.end_sample(request_id, sample_index)
            case Call():
                self._write(_answer(core, message))
            case _:
                raise Unavailable(f"{type(message).__name__} does not belong here")

    def _tell(self, core: EngineCore, news: tuple[News, ...]) -> None:
        """Send news in as many messages as they need; an empty one now and then, as a sign of
        life."""
        if not news and time.monotonic() - self._wrote_s < SIGN_OF_LIFE_S:
            return
        frame = encode(StepNews(news))
        if len(frame) <= MAX_FRAME_BYTES:
            self._send(frame)
        elif len(news) > 1:
            middle = len(news) // 2
            self._tell(core, news[:middle])
            self._tell(core, news[middle:])
        else:
            core.cancel(news[0].request_id)
            error = Internal(f"news of {len(frame)} bytes are too long to be sent")
            failed = News(news[0].request_id, is_over=True, failure=Failure.of(error))
            self._write(StepNews((failed,)))

    def _write(self, message: FromEngine) -> None:
        self._send(encode(message))

    def _send(self, frame: bytes) -> None:
        self._writer.write(frame, WRITE_S)
        self._wrote_s = time.monotonic()

    # -- the reader's thread

    def _read(self) -> None:
        """Put every message into the inbox; the end of the stream counts as Stop."""
        try:
            while True:
                frame = self._reader.read(3600.0)
                if frame is not None:
                    self._inbox.put(read_to_engine(frame))
        except (EOFError, OSError):
            pass
        except BatonError as error:
            logs.event(logger, "broken_message", level=logging.ERROR, error=str(error))
        self._inbox.put(Stop())


def _answer(core: EngineCore, call: Call) -> Reply:
    try:
        return Reply(call.call_id, encode_value(_value(core, call)))
    except Exception as error:  # one question's mistake is not the end of all that is live
        if not isinstance(error, BatonError):
            logger.error("call_failed", exc_info=error)
        return Reply(call.call_id, failure=Failure.of(error))


def _value(core: EngineCore, call: Call) -> object:
    match call.what:
        case "check":
            core.check(call.asks)
        case "check_integrity":
            core.check_integrity()
        case "stats":
            return core.stats()
        case "metrics":
            return core.metrics()
        case "load_adapter":
            return core.load_adapter(call.name, call.folder)
        case "unload_adapter":
            core.unload_adapter(call.name)
        case "adapters":
            return core.adapters()
    return None


def run(make_engine: MakeEngine = _load_engine) -> NoReturn:
    """Run `main` and exit the process at once: an orderly teardown of torch takes a second, and
    there is nothing to save."""
    code = main(make_engine)
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run()
