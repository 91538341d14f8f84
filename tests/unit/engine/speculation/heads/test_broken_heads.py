"""What breaks in what heads are told costs their guesses, never a token that was drawn; and what
they keep of a step takes no more than its own bytes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.batch import Span
from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.models.interface import LoadedModel
from engine.request import Request, Sampling, State
from engine.speculation.config import SpeculationConfig
from engine.speculation.drafter import Draft, Task
from engine.speculation.exploration import Exploration
from engine.speculation.heads import readers
from engine.speculation.heads.eagle import EagleHead
from engine.speculation.heads.hidden import Computed, Wants
from engine.speculation.heads.kept import computed
from engine.speculation.heads.load import load_heads
from engine.speculation.heads.medusa import MedusaHeads
from engine.speculation.tree import chain
from engine.testing.fake_model import FakeModel
from tests.harness import published_heads as heads
from tests.harness.engines import all_events, hasher, tokens_of
from tests.harness.published_eagle3 import LAYERS, save_eagle3

PROMPT = (1, 2, 3, 4, 5)
ALWAYS = SpeculationConfig(always=True)


class _Reader:
    """It guesses one token, which is wrong most times."""

    name = "reader"
    wants = Wants.EVERY
    layers: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.num_asked = self.num_seen = 0
        self.known: set[object] = set()

    def see(self, computed: Sequence[Computed]) -> None:
        self.num_seen += 1
        self.known |= {one.key for one in computed}

    def propose(self, tasks: Sequence[Task]) -> list[Draft]:
        self.num_asked += 1
        return [Draft(chain([7], [0.5]), {}) for _ in tasks]

    def forget(self, key: object) -> None:
        self.known.discard(key)

    def check_integrity(self) -> None:
        pass


def _engine(reader: _Reader, **fields: Any) -> LLMEngine:
    config = EngineConfig(num_blocks=64, speculation=ALWAYS)
    return LLMEngine(config, FakeModel(block_size=4), drafters=[reader], **fields)


def _run(engine: LLMEngine, num_tokens: int = 8, prompt: tuple[int, ...] = PROMPT) -> list[int]:
    sampling = Sampling(max_tokens=num_tokens, ignore_eos=True)
    engine.submit(Request("r", prompt, sampling, hasher()))
    token_ids = tokens_of(all_events(engine))
    return token_ids


def _third(real: Any) -> Any:
    calls = itertools.count(1)

    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 3:
            raise torch.OutOfMemoryError("no memory on the device")
        return real(*args, **kwargs)

    return failing


def test_a_head_whose_pass_fails_costs_no_token_and_no_integrity(
    config: EngineConfig, model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = (str(heads.save_eagle(tmp_path / "e")),)
    speculation = dataclasses.replace(ALWAYS, draft_heads=names)
    config = dataclasses.replace(config, num_blocks=20, speculation=speculation)
    (head,) = load_heads(config, model)
    assert isinstance(head, EagleHead)
    monkeypatch.setattr(EagleHead, "_pass", _third(EagleHead._pass))
    engine = LLMEngine(config, model, drafters=[head])
    assert len(_run(engine, 12, (5, 6, 7, 8))) == 12
    assert engine._speculator is not None and engine._speculator._roster.failed == {0}
    assert not head._windows
    head.check_integrity()


def test_books_of_a_head_say_what_was_computed(
    config: EngineConfig, model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = _head(config, model, heads.save_eagle(tmp_path / "e"))
    assert isinstance(head, EagleHead)
    task = Task(("r", 0), [1, 2, 3, 4], 1, Sampling(max_tokens=9), 0, 4)
    head.see([Computed(task.key, task.token_ids, 0, torch.randn(3, heads.HIDDEN))])
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(EagleHead, "_pass", lambda *_: _raise(torch.OutOfMemoryError("none")))
        head.propose([task])
    head.check_integrity()
    assert head._windows[task.key].num_waiting == 3
    assert len(head.propose([task])[0].tree) > 0


def _raise(error: Exception) -> None:
    raise error


def _head(config: EngineConfig, model: LoadedModel, folder: Path) -> EagleHead | MedusaHeads:
    speculation = SpeculationConfig(draft_heads=(str(folder),))
    (head,) = load_heads(dataclasses.replace(config, speculation=speculation), model)
    assert isinstance(head, EagleHead | MedusaHeads)
    return head


@pytest.mark.parametrize(
    ("owner", "name"),
    [(readers, "computed"), (_Reader, "see"), (_Reader, "forget")],
)
def test_what_fails_behind_a_step_fails_its_drafters_and_loses_no_token(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    expected = FakeModel(block_size=4).generate(PROMPT, 8)
    if name == "forget":
        monkeypatch.setattr(_Reader, "forget", lambda *_: _raise(MemoryError("none")))
    else:
        monkeypatch.setattr(owner, name, _third(getattr(owner, name)))
    reader = _Reader()
    engine = _engine(reader)
    assert _run(engine) == expected
    if name == "forget":  # when the next one comes, the first is forgotten
        assert _run(engine) == expected
    else:
        assert reader.num_asked < 4, "it is not asked now"
        assert not reader.known
    assert engine._speculator is not None and engine._speculator._roster.failed == {0}


def test_what_a_reader_sees_is_its_own_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    found: list[Mapping[int, float]] = []
    real = Exploration.learn

    class Slow(_Reader):
        def see(self, computed: Sequence[Computed]) -> None:
            nonlocal now
            now += 1.0
            super().see(computed)

    def learn(
        self: Exploration, rows: int, seconds: float, own_s: Any, right: Any, *, beside_s: float
    ) -> None:
        assert seconds >= sum(own_s.values()) + beside_s
        found.append(dict(own_s))
        real(self, rows, seconds, own_s, right, beside_s=beside_s)

    monkeypatch.setattr(Exploration, "learn", learn)
    _run(_engine(Slow(), clock=lambda: now))
    asked = [own_s[0] for own_s in found if own_s]
    assert len(asked) > 4 and set(asked) == {1.0}


def test_no_embedding_is_made_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def normalize(*_: object, **__: object) -> None:
        raise AssertionError("of no row")

    monkeypatch.setattr(torch.nn.functional, "normalize", normalize)
    assert len(_run(_engine(_Reader()))) == 8


def _sample(name: str, num_computed: int, **request: Any) -> Any:
    return SimpleNamespace(
        request=SimpleNamespace(**{"beam": None, "hold_after": None, **request}),
        state=State.RUNNING,
        token_ids=list(range(num_computed + 1)),
        num_computed_tokens=num_computed,
        key=(name, 0),
        num_output_tokens=5,
        group=SimpleNamespace(samples={}),
    )


@pytest.mark.parametrize("wants", [Wants.DRAWN, Wants.EVERY])
def test_what_a_step_leaves_takes_its_own_bytes(wants: Wants) -> None:
    """Beside a long prompt that does not go on here."""
    num_tokens, size = 512, 16
    every = torch.randn(num_tokens + 2, size)
    decodes = [_sample("a", 49), _sample("b", 59)]
    step: Any = SimpleNamespace(
        samples=decodes,
        drawn_of=lambda rows: rows,
        draw_indices=(0, num_tokens + 1),
        batch=SimpleNamespace(
            spans=[Span(48, 1, (1,)), Span(0, num_tokens, (2,)), Span(58, 1, (3,))],
        ),
    )
    drawn = every[[0, num_tokens + 1]]
    model: Any = SimpleNamespace(
        hidden=lambda: drawn,
        every_hidden=lambda: every if wants is Wants.EVERY else None,
        layer_inputs=lambda: {3: every + 3},
    )
    planned = [(decodes[0], 1), (_sample("p", num_tokens, hold_after=1), num_tokens)]
    found = computed(step, [*planned, (decodes[1], 1)], {}, model)
    assert [one.key for _, one in found] == [("a", 0), ("b", 0)]
    assert torch.cat([one.hidden for _, one in found]).equal(drawn)
    assert torch.cat([one.layers[3] for _, one in found]).equal(drawn + 3)
    for _, one in found:
        assert one.hidden.untyped_storage().nbytes() == drawn.nbytes
        assert one.layers[3].untyped_storage().nbytes() == drawn.nbytes


def _computed(name: str, token_ids: list[int], start: int, hidden: torch.Tensor) -> Computed:
    """What goes into each layer is the same."""
    return Computed((name, 0), token_ids, start, hidden, dict.fromkeys(LAYERS, hidden))


@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3"])
def test_what_heads_keep_is_bound_by_what_they_know(
    config: EngineConfig, model: LoadedModel, tmp_path: Path, kind: str
) -> None:
    """A prompt comes and goes with each step; one sequence gets a token in each, another waits."""
    saves = {"medusa": heads.save_medusa, "eagle": heads.save_eagle, "eagle3": save_eagle3}
    head = _head(config, model, saves[kind](tmp_path / kind))
    token_ids = list(range(40))
    for step in range(8):
        left = torch.randn(31, heads.HIDDEN)
        head.see(
            [
                _computed("stays" if step else "waits", token_ids, step, left[:1]),
                _computed(f"goes {step}", token_ids, 0, left[1:]),
            ]
        )
        head.forget((f"goes {step}", 0))
    head.see([_computed("stays", token_ids, 8, torch.randn(1, heads.HIDDEN))])
    kept: list[torch.Tensor]
    if isinstance(head, MedusaHeads):
        kept = [hidden for _, hidden in head._seen.values()]
    else:
        kept = [hidden for one in head._windows.values() for _, hidden in one.waiting]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in kept}
    own = sum(one.nbytes for one in kept)
    assert own > 0
    assert sum(storages.values()) <= 2 * own
