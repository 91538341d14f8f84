"""The child of an engine client, with a FakeModel in it: long contexts, and mistakes on demand.

    python fake_engine_child.py <mode> <socket>

Modes: fine; failing (the third step raises); stuck (the third step never ends); odd (`stats` takes
0.6 s, `adapters` raises what no engine should).
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine_client import engine_process

if TYPE_CHECKING:
    import torch

    from engine.batch import Batch
    from engine.engine import LLMEngine, Progress
    from engine.lora.manager import AdapterInfo
    from engine.metrics import EngineStats

CONTEXT_WINDOW = 20_000


def make_engine(config: EngineConfig, *, progress: Progress | None = None) -> LLMEngine:
    """One that makes this process' mistakes."""
    from engine.engine import LLMEngine
    from engine.testing.fake_model import FakeModel

    class _Model(FakeModel):
        def forward(self, batch: Batch) -> torch.Tensor:
            if self.num_forwards == 2 and mode == "failing":
                raise RuntimeError("the model tripped")
            if self.num_forwards == 2 and mode == "stuck":
                time.sleep(3600)
            return super().forward(batch)

    class _Engine(LLMEngine):
        def stats(self) -> EngineStats:
            if mode == "odd":
                time.sleep(0.6)
            return super().stats()

        def adapters(self) -> tuple[AdapterInfo, ...]:
            if mode == "odd":
                raise RuntimeError("the question tripped")
            return super().adapters()

    assert "transformers" not in sys.modules, "it makes each start of a child take twice as long"
    if progress is not None:
        progress("weights", 1, 1)
    return _Engine(config, _Model(context_window=CONTEXT_WINDOW))


if __name__ == "__main__":
    mode = sys.argv.pop(1)
    engine_process.run(make_engine)
