"""What Triton compiles while somebody waits: kernels that a warm-up has missed."""

from __future__ import annotations

from typing import Any

import triton


class Compiles:
    """Names of the kernels compiled since it was made, a name for each time, read from disk or not.
    Of the whole process; the newest one alone is told."""

    def __init__(self) -> None:
        self.names: list[str] = []
        triton.knobs.runtime.jit_post_compile_hook = self._told

    def take(self) -> list[str]:
        """Those since it was last called."""
        names, self.names = self.names, []
        return names

    def _told(self, *, fn: Any, **_: Any) -> None:
        self.names.append(str(fn.name))
