"""A look-out for calls that wait for the GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def refused_waits() -> Iterator[None]:
    """In its body torch raises RuntimeError for whatever waits for the device; torch's own list of
    such calls is not complete. Behind it the mode is what it was, however the body ends."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        _set("error")
        yield
    finally:
        _set(before)


def _set(mode: int | str) -> None:
    """torch says once per process, after it has set the mode, that this is a prototype."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
        torch.cuda.set_sync_debug_mode(mode)
