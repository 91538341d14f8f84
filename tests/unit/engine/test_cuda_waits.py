"""The look-out for waits ends with its body, although torch warns when it is begun."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.unit.engine.cuda_waits import refused_waits


@pytest.mark.filterwarnings("error")
def test_the_mode_is_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[int | str] = [1]

    def set_mode(mode: int | str) -> None:
        modes.append(mode)
        warnings.warn(
            "Synchronization debug mode is a prototype feature and does not yet detect all "
            "synchronizing operations (Triggered internally at Module.cpp:1003.)",
            stacklevel=2,
        )

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with refused_waits():
        assert modes == [1, "error"]
    with pytest.raises(KeyError), refused_waits():
        raise KeyError
    assert modes == [1, "error", 1, "error", 1]
    with pytest.raises(UserWarning):
        set_mode(1)  # only there, and only that one
