"""What the tests of several files share."""

from __future__ import annotations

from tests.harness.compile_process import one_compile_process as one_compile_process
