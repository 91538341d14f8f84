"""An engine whose tokens say whether its KV is right, and the small values that worker tests are
made of.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import torch

from engine.batch import Batch
from engine.config import EngineConfig
from engine.fake import FakeModel
from engine.loop import Engine
from engine.request import Request, Sampling
from engine.speculation.config import SpeculationConfig
from engine.step_output import StepOutput
from kvstore import block_hash
from process.errors import Internal
from services.worker.engine_thread import EngineThread
from tests.harness.waiting import WAIT_S

BLOCK_SIZE = 4
GATE_S = 60.0
"""A test that leaves a step held for so long has forgotten it: above any of its own waits."""
SALT = b"a tenant's salt"


class GatedModel(FakeModel):
    """A fake model whose forward pass can be held, so that a test meets a request in a known
    state.
    """

    def __init__(self) -> None:
        super().__init__(block_size=BLOCK_SIZE)
        self._gate = threading.Event()
        self._gate.set()
        self.is_held = threading.Event()

    def hold(self) -> None:
        """The next forward pass waits for `release`."""
        self.is_held.clear()
        self._gate.clear()

    def release(self) -> None:
        self._gate.set()

    def forward(self, batch: Batch) -> torch.Tensor:
        if not self._gate.is_set():
            self.is_held.set()
            assert self._gate.wait(GATE_S), "the test never released the model"
        return super().forward(batch)


def fake_engine(
    *,
    num_blocks: int = 256,
    chunk: int = 16,
    model: FakeModel | None = None,
    preemption: str = "never",
    speculation: SpeculationConfig | None = None,
    **parts: Any,
) -> Engine:
    """The real engine over a fake model, made of these parts."""
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_num_tokens_per_step=chunk,
        max_num_running=min(8, chunk),
        preemption=preemption,
        speculation=speculation or SpeculationConfig(),
    )
    return Engine(config, model or GatedModel(), **parts)


def request(
    engine: Engine,
    prompt: tuple[int, ...],
    *,
    name: str = "r",
    max_tokens: int = 4,
    hold_after: int | None = None,
) -> Request:
    """A greedy request of one tenant."""
    root = block_hash.root_key(SALT, engine.model_info.fingerprint)
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling=Sampling(max_tokens=max_tokens, ignore_eos=True),
        block_hasher=partial(block_hash.extend, root),
        cache_root=root,
        hold_after=hold_after,
    )


def prompt_of(num_tokens: int, start: int = 1) -> tuple[int, ...]:
    """Token ids within the fake vocabulary, never EOS."""
    return tuple(1 + (start * 31 + i * 7) % 96 for i in range(num_tokens))


@contextlib.asynccontextmanager
async def running(
    engine: Engine,
    *,
    on_step: Callable[[StepOutput], None] = lambda output: None,
    on_failure: Callable[[Internal], None] = lambda error: None,
    idle_check_s: float = 0.01,
    **options: Any,
) -> AsyncIterator[EngineThread]:
    """The engine on its thread; stopped at the end, and its laws checked when it is healthy."""
    thread = EngineThread(engine, idle_check_s=idle_check_s, **options)
    thread.start(on_step, on_failure)
    try:
        yield thread
    finally:
        await thread.stop(WAIT_S)
    if thread.failure is None:
        engine.check_integrity()
