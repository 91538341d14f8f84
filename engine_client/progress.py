"""Progress bars of the library: loading a model, and prompts done with tokens per second.

Drawn on standard error, and only on a terminal. Called from any thread (rich takes that).
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class LoadingBar:
    """Progress bar of `load_engine`, one line for each stage of loading."""

    def __init__(self, *, is_shown: bool, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description:<14}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not (is_shown and self._console.is_terminal),
        )
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=total or None)
        self._progress.update(self._tasks[what], completed=done, total=total or None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()


class PromptsBar:
    """Progress bar of prompts done, with input and output tokens per second so far."""

    def __init__(
        self,
        num_prompts: int,
        *,
        is_shown: bool,
        what: str = "prompts",
        console: Console | None = None,
    ) -> None:
        self._console = console or Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[speed]}"),
            console=self._console,
            disable=not (is_shown and self._console.is_terminal),
        )
        self._task = self._progress.add_task(what, total=num_prompts, speed="")
        self._began_s = time.monotonic()
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0

    def add_tokens(self, num_output_tokens: int) -> None:
        """Count new output tokens."""
        self._num_output_tokens += num_output_tokens
        self._show()

    def add_prompt(self, num_prompt_tokens: int) -> None:
        """Count a finished prompt and its tokens."""
        self._num_prompt_tokens += num_prompt_tokens
        self._progress.advance(self._task)
        self._show()

    def _show(self) -> None:
        spent_s = max(time.monotonic() - self._began_s, 1e-6)
        into, out = self._num_prompt_tokens / spent_s, self._num_output_tokens / spent_s
        self._progress.update(self._task, speed=f"in {into:,.0f} tok/s, out {out:,.0f} tok/s")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()
