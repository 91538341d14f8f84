"""What may be imported where Triton is not installed: every module but the kernels themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import baton_kernels

_PROGRAM = """
import importlib, sys

sys.modules["triton"] = None  # importing it raises ImportError
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def test_doors_are_imported_without_triton() -> None:
    names = sorted(path.stem for path in Path(baton_kernels.__path__[0]).glob("*.py"))
    doors = [
        f"baton_kernels.{name}"
        for name in names
        if name != "__init__" and not name.endswith(("_triton", "_hopper"))
    ]
    assert "baton_kernels.attention" in doors
    subprocess.run([sys.executable, "-c", _PROGRAM, *doors], check=True, timeout=100)
