"""The child of an engine client, with a FakeModel in it: long contexts, and mistakes on demand.

    python fake_engine_child.py <mode> <socket>

Modes: fine; failing (the third step raises); stuck (the third step never ends); slow (`stats` takes
0.6 s); tripping (`adapters` raises what no engine should).
"""

from __future__ import annotations

import sys
import time
import types

import torch

# A FakeModel loads nothing. What loads models imports transformers, which takes longer than a test.
_loading = types.ModuleType("engine.load")
_loading.load = None  # type: ignore[attr-defined]
sys.modules["engine.load"] = _loading

from engine.batch import Batch  # noqa: E402
from engine.config import EngineConfig  # noqa: E402
from engine.fake import FakeModel  # noqa: E402
from engine.loop import Engine, Progress  # noqa: E402
from engine.lora.registry import AdapterInfo  # noqa: E402
from engine.request import EngineStats  # noqa: E402
from engine_client import child  # noqa: E402

CONTEXT_WINDOW = 20_000


class _Model(FakeModel):
    def __init__(self, mode: str) -> None:
        super().__init__(context_window=CONTEXT_WINDOW)
        self._mode = mode

    def forward(self, batch: Batch) -> torch.Tensor:
        if self.num_forwards == 2 and self._mode == "failing":
            raise RuntimeError("the model tripped")
        if self.num_forwards == 2 and self._mode == "stuck":
            time.sleep(3600)
        return super().forward(batch)


class _Engine(Engine):
    def stats(self) -> EngineStats:
        if mode == "slow":
            time.sleep(0.6)
        return super().stats()

    def adapters(self) -> tuple[AdapterInfo, ...]:
        if mode == "tripping":
            raise RuntimeError("the question tripped")
        return super().adapters()


def make_engine(config: EngineConfig, *, progress: Progress | None = None) -> Engine:
    if progress is not None:
        progress("weights", 1, 1)
    return _Engine(config, _Model(mode))


if __name__ == "__main__":
    assert "transformers" not in sys.modules, "it makes each start of a child take twice as long"
    mode = sys.argv.pop(1)
    child.run(make_engine)
