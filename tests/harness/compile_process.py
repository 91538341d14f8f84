"""One compiling process for many grammar services: to start one takes seconds of a core. That an
engine starts, misses and ends its own is told in tests/unit/engine/grammar/test_service.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.grammar import service
from engine.grammar.compiler import CompileProcess


class SharedProcess(CompileProcess):
    """Whoever has it closes it, and others go on with it."""

    def close(self) -> None:
        """It goes on for the next service."""

    def end(self) -> None:
        super().close()


class SharedProcesses:
    """One for each tokenizer."""

    def __init__(self) -> None:
        self._made: dict[tuple[Path, int], SharedProcess] = {}

    def of(self, folder: Path, vocab_size: int) -> SharedProcess:
        """Stands for `CompileProcess(folder, vocab_size)`."""
        key = (folder.resolve(), vocab_size)
        if key not in self._made:
            self._made[key] = SharedProcess(*key)
        return self._made[key]

    @contextmanager
    def for_all_engines(self) -> Iterator[None]:
        """Engines that are made in the body compile in these."""
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(service, "CompileProcess", self.of)
            yield

    def end(self) -> None:
        for process in self._made.values():
            process.end()


@pytest.fixture(scope="module")
def one_compile_process() -> Iterator[None]:
    """Of all engines of a file: `pytestmark = pytest.mark.usefixtures("one_compile_process")`. It
    ends with the file: other tests look for processes that were left behind."""
    made = SharedProcesses()
    with made.for_all_engines():
        yield
    made.end()
