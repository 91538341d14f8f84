"""The child of an engine client, with a FakeModel in it: long contexts, and mistakes on demand.

    python fake_engine_child.py <mode> <socket>

Modes: fine; odd (`stats` takes 0.6 s, `adapters` raises what no engine should); refusing (nothing
can be loaded). A prompt of TRIPS tokens makes the third step raise, one of HANGS never end.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.errors import LoadError
from engine_client import engine_process

if TYPE_CHECKING:
    import torch

    from engine.batch import Batch
    from engine.engine import LLMEngine, Progress
    from engine.lora.manager import AdapterInfo
    from engine.metrics import EngineStats

CONTEXT_WINDOW = 20_000
TRIPS, HANGS = 11, 12


def make_engine(config: EngineConfig, *, progress: Progress | None = None) -> LLMEngine:
    """One that makes this process' mistakes."""
    if mode == "refusing":
        raise LoadError("there is no such model")
    from engine.engine import LLMEngine
    from engine.testing.fake_model import FakeModel

    class _Model(FakeModel):
        fatal, num_left = 0, 0
        """What the prompt asks for, and after how many more steps."""

        def forward(self, batch: Batch) -> torch.Tensor:
            for span in batch.spans:
                if not span.start and span.num_tokens in (TRIPS, HANGS):
                    self.fatal, self.num_left = span.num_tokens, 3
            self.num_left -= 1
            if self.fatal and not self.num_left:
                if self.fatal == TRIPS:
                    raise RuntimeError("the model tripped")
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
    assert "torch" not in sys.modules, "it is imported when the client has said what to load"
    mode = sys.argv.pop(1)
    engine_process.run(make_engine)
