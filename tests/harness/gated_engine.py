"""An engine whose tokens say whether its KV is right, and the small values that worker tests are
made of.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import torch

from engine.batch import Batch
from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.outputs import StepOutput
from engine.request import Request, Sampling
from engine.speculation.config import SpeculationConfig
from engine.testing.fake_model import HIDDEN_SIZE as HIDDEN_SIZE
from engine.testing.fake_model import FakeModel
from kvstore import block_hash
from process.rpc_errors import Internal
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

    def __init__(self, *, is_held: bool = False) -> None:
        """is_held: from the start."""
        super().__init__(block_size=BLOCK_SIZE)
        self._changed = threading.Condition()
        self._is_free = not is_held
        self._num_allowed = self._num_releases = 0
        self.is_held = threading.Event()
        """A forward pass waits."""

    def hold(self) -> None:
        """The next forward pass waits for `release` or `allow`."""
        self.hold_at(1)

    def hold_at(self, num_forwards: int) -> None:
        """That forward pass from now on waits."""
        with self._changed:
            self.is_held.clear()
            self._is_free, self._num_allowed = False, num_forwards - 1

    def allow(self, num_forwards: int = 1) -> None:
        """So many pass, with one that waits; the next one waits again."""
        with self._changed:
            self.is_held.clear()
            self._num_allowed += num_forwards
            self._changed.notify_all()

    def release(self) -> None:
        """All pass."""
        with self._changed:
            self._is_free, self._num_releases = True, self._num_releases + 1
            self._changed.notify_all()

    def break_down(self) -> None:
        """The next step raises, as where the device is gone."""
        self._memory = None

    def forward(self, batch: Batch) -> torch.Tensor:
        with self._changed:
            seen = self._num_releases
            if not self._is_free and not self._num_allowed:
                self.is_held.set()
            may_go = self._changed.wait_for(
                lambda: self._is_free or self._num_releases != seen or self._num_allowed, GATE_S
            )
            assert may_go, "the test never released the model"
            if not self._is_free and self._num_releases == seen:
                self._num_allowed -= 1
        return super().forward(batch)


def fake_engine(
    *,
    num_blocks: int = 256,
    chunk: int = 16,
    model: FakeModel | None = None,
    preemption: str = "never",
    speculation: SpeculationConfig | None = None,
    **parts: Any,
) -> LLMEngine:
    """The real engine over a fake model, made of these parts."""
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_num_tokens_per_step=chunk,
        max_num_running=min(8, chunk),
        preemption=preemption,
        speculation=speculation or SpeculationConfig(),
    )
    return LLMEngine(config, model or GatedModel(), **parts)


def request(
    engine: LLMEngine,
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


class Prompts:
    """Prompts that share no block with one another."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def new(self, num_tokens: int) -> tuple[int, ...]:
        number = next(self._numbers)
        first = (1 + number % 96, 1 + number // 96)
        return (*first, *prompt_of(num_tokens, start=number))[:num_tokens]


@contextlib.asynccontextmanager
async def running(
    engine: LLMEngine,
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
