"""Engines on a FakeModel that launch ahead: computed as late as may be, or noting each call."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.models.interface import DecodeRow, Launch, LaunchRow, MixedRow
from engine.outputs import RequestOutput, StepOutput
from engine.request import Request, Sampling
from engine.sampling.metadata import SamplerOutput
from engine.testing.ahead_model import AheadModel, PlainAhead
from engine.testing.fake_model import FakeModel
from tests.harness.compile_process import one_compile_process as one_compile_process

SIZE = 4
WINDOW = 64
PROMPT = tuple(range(1, 15))


def fake_model(**fields: Any) -> FakeModel:
    """Of WINDOW and SIZE."""
    return FakeModel(**{"context_window": WINDOW, "block_size": SIZE} | fields)


def make(model: Any, *, num_blocks: int = 64, **config: Any) -> LLMEngine:
    """An engine with room for eight, which launches prompts, too."""
    defaults = {"num_blocks": num_blocks, "max_num_running": 8, "overlap_prompts": True}
    return LLMEngine(EngineConfig(**defaults | config), model)


def late_engine(*, takes_prompts: bool = True, **fields: Any) -> tuple[LLMEngine, AheadModel]:
    """Every launch is computed as late as may be."""
    model = AheadModel(fake_model(), is_late=True, takes_prompts=takes_prompts)
    return make(model, **fields), model


def all_steps(engine: LLMEngine) -> list[StepOutput]:
    """Until nothing is left; integrity is checked after each."""
    outputs = []
    while engine.has_work():
        outputs.append(engine.step())
        engine.check_integrity()
    return outputs


def all_events(engine: LLMEngine) -> Iterator[RequestOutput]:
    """As they come, until nothing is left; integrity is checked after each step."""
    while engine.has_work():
        events = engine.step().events
        engine.check_integrity()
        yield from events


def finish(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    """`all_events` by request."""
    events: dict[str, list[RequestOutput]] = {}
    for event in all_events(engine):
        events.setdefault(event.request_id, []).append(event)
    return events


def tokens_of(events: Iterable[RequestOutput]) -> list[int]:
    """All that they told."""
    return [token for event in events for token in event.token_ids]


def without_ids(events: Sequence[RequestOutput]) -> list[RequestOutput]:
    """Which block is taken is nobody's business."""
    return [
        event._replace(filled=tuple(block._replace(block_id=0) for block in event.filled))
        for event in events
    ]


def arriving(
    engine: LLMEngine, requests: Sequence[Request], rng: random.Random
) -> dict[tuple[str, int], list[RequestOutput]]:
    """Requests that begin at random steps: the events of each sample, without block ids."""
    events: dict[tuple[str, int], list[RequestOutput]] = {}
    left = list(requests)
    while left or engine.has_work():
        while left and (rng.random() < 0.3 or not engine.has_work()):
            engine.submit(left.pop(0))
        for event in without_ids(engine.step().events):
            events.setdefault((event.request_id, event.sample_index), []).append(event)
        engine.check_integrity()
    return events


def write_tokens(engine: LLMEngine, block_ids: Sequence[int], token_ids: Sequence[int]) -> None:
    """As a transfer would: what the fake model takes for their KV."""
    for position, token_id in enumerate(token_ids):
        cell = engine.kv.cache[block_ids[position // SIZE], 0, 0, :, position % SIZE, 0]
        cell[0], cell[1] = float(token_id), float(position)


def hand_over(source: LLMEngine, target: LLMEngine, name: str, num_tokens: int) -> None:
    """The KV of a request's first tokens, as a transfer would."""
    given, taken = (
        list(engine.block_ids(name)[: -(-num_tokens // SIZE)]) for engine in (source, target)
    )
    target.kv.host_view[taken] = source.kv.host_view[given]


class Recording(PlainAhead):
    """What was called in which order, with which rows. The call named `fails_at` raises."""

    def __init__(self, model: FakeModel, **fields: Any) -> None:
        defaults = {"is_late": True, "max_rows": 100, "takes": None, "takes_prompts": False}
        super().__init__(model, **defaults | fields)
        self.calls: list[str] = []
        self.launched: list[Sequence[Any]] = []
        self.fails_at = ""

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.calls[-1] == self.fails_at:
            raise RuntimeError("the device is gone")

    def launch(self, rows: Sequence[DecodeRow]) -> Launch:
        self._note(rows)
        return super().launch(rows)

    def launch_mixed(self, rows: Sequence[MixedRow]) -> Launch:
        self._note(rows)
        return super().launch_mixed(rows)

    def _note(self, rows: Sequence[LaunchRow]) -> None:
        self._call(f"launch {len(self.launched)}")
        self.launched.append(rows)

    def read(self, launch: Launch) -> list[SamplerOutput]:
        self._call(f"read {sum(one.startswith('read') for one in self.calls)}")
        return super().read(launch)

    def drain(self) -> None:
        self._call("drain")
        super().drain()


def recording_engine(
    *,
    takes_prompts: bool = False,
    context_window: int = WINDOW,
    block_size: int = SIZE,
    **config: Any,
) -> tuple[LLMEngine, Recording]:
    """As `late_engine`, and what it calls."""
    fake = fake_model(context_window=context_window, block_size=block_size)
    model = AheadModel(fake)
    model.launches = Recording(fake, takes_prompts=takes_prompts)
    model.ahead = model.launches
    return make(model, **config), model.launches


def hasher(root: bytes = b"") -> Callable[[bytes, Sequence[int]], bytes]:
    """A chain hash keyed by `root`."""

    def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
        data = b"".join(token.to_bytes(4, "little") for token in token_ids)
        return hashlib.blake2b(parent + data, key=root, digest_size=16).digest()

    return block_hash


block_hash = hasher()


def make_request(
    request_id: str, prompt: Iterable[int], *, root: bytes = b"", **fields: Any
) -> Request:
    """Eight tokens, whatever they are, but for what `fields` of a Request or a Sampling say."""
    own = {name: fields.pop(name) for name in Request.__dataclass_fields__ if name in fields}
    sampling = Sampling(**{"max_tokens": 8, "ignore_eos": True} | fields)
    return Request(request_id, tuple(prompt), sampling, hasher(root), cache_root=root, **own)
