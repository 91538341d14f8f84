"""Load: from settings to an engine that is ready for its first request: checkpoint, model, who
guesses, cache, warm-up, in this order, since each takes of the memory that those before it left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Values
from typing import TYPE_CHECKING

import torch

from checkpoints.resolve import resolve
from engine.closing import closed_on_failure
from engine.config import EngineConfig
from engine.grammar.service import GrammarService
from engine.kv.sizing import held_bytes
from engine.models.interface import Progress
from engine.models.load import load_model
from engine.models.phases import Phases
from engine.request import StopPolicy
from engine.speculation.draft_port import DraftPeer
from engine.speculation.drafter import close_all
from engine.speculation.heads.load import load_heads
from engine.speculation.load import load_drafters

if TYPE_CHECKING:
    from engine.loop import Engine


def load(
    make: type[Engine],
    config: EngineConfig,
    *,
    progress: Progress | None,
    stop_policy: StopPolicy | None,
    prepares_grammars: bool,
    draft_peers: Values[DraftPeer],
) -> Engine:
    """See engine/loop.py:load_engine. `make` is the engine's class."""
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    model = load_model(config, progress=progress)
    phases = Phases()
    with closed_on_failure() as closes:
        closes.append(model.close)
        # The first grammar must not wait for it.
        folder = resolve(config.model, files="tokenizer").path

        def make_grammars() -> GrammarService:
            return GrammarService.from_checkpoint(folder, model.info.vocab_size, config.grammar)

        with phases.timed("drafters"):
            before_bytes = held_bytes(model.info.device)
            drafters = load_drafters(config, model.info, progress, draft_peers)
            closes.append(lambda: close_all(drafters))
            drafters += load_heads(config, model)
            draft_bytes = held_bytes(model.info.device) - before_bytes
        with phases.timed("cache"):
            engine = make(
                config,
                model,
                stop_policy=stop_policy,
                make_grammars=make_grammars,
                drafters=drafters,
                draft_bytes=draft_bytes,
            )
        with phases.timed("warm-up"):
            engine.warm_up(progress)
        if prepares_grammars:
            with phases.timed("grammars"):
                engine.prepare_grammars()
    seconds = (*model.info.seconds, *phases.seconds)
    engine.model_info = dataclasses.replace(engine.model_info, seconds=seconds)
    return engine
