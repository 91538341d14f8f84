"""What `baton up` shows while a cluster starts and lives: bars on a terminal, else plain lines.

`on_event` is called from the supervisor's thread; rich's displays take that.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from baton.part import ClusterEvent

# What is worth a line once the cluster is up.
_NOTEWORTHY = ("silent", "died", "restarting", "ready", "stopped")


class StartView:
    """Bars between `with` and its end; one line per change after it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description:<12}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[what]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}
        self._loading = False
        self._quiet = False

    def __enter__(self) -> Self:
        self._loading = True
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loading = False
        if self._console.is_terminal:
            self._progress.stop()

    def silence(self) -> None:
        """Nothing more is worth a line: the cluster is being stopped."""
        self._quiet = True

    def on_event(self, event: ClusterEvent) -> None:
        """Show it."""
        if self._quiet:
            return
        if self._loading and self._console.is_terminal:
            self._advance(event)
        elif event.what in _NOTEWORTHY and not (self._loading and event.what == "died"):
            # A death at the start is told by the error that ends it.
            detail = f": {event.detail}" if event.detail else ""
            self._console.print(f"{event.name} {event.what}{detail}", highlight=False, markup=False)

    def on_fetch(self, what: str, done: int, total: int) -> None:
        """Progress of fetching a checkpoint, in bytes."""
        self.on_event(ClusterEvent("checkpoint", "loading", what, done, total))

    def _advance(self, event: ClusterEvent) -> None:
        if event.name not in self._tasks:
            self._tasks[event.name] = self._progress.add_task(event.name, total=None, what="")
        task = self._tasks[event.name]
        if event.what == "loading":
            self._progress.update(
                task, completed=event.done, total=event.total or None, what=event.detail
            )
        elif event.what == "ready":
            self._progress.update(task, completed=1, total=1, what="ready")
        else:
            self._progress.update(task, what=event.what)
