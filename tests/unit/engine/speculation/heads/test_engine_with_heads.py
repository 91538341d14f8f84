"""An engine whose guesses come of hidden states: these are the target's own of the tokens that are
kept, and answers are those of plain decoding."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from engine.batch import Batch, Span
from engine.config import EngineConfig
from engine.engine import LLMEngine, load_engine
from engine.models import llama as model_module
from engine.models.interface import Ends, LoadedModel
from engine.models.llama import LlamaDecoder, LlamaModel, kv_layout, read_llama_config, rope_table
from engine.models.weights import random_weights
from engine.outputs import RequestOutput
from engine.request import ModelInfo, Request, Sampling
from engine.sequence import Key
from engine.speculation.config import SpeculationConfig
from engine.speculation.drafter import Draft, Drafter, Task
from engine.speculation.heads.hidden import Computed, Wants
from engine.speculation.heads.load import load_heads
from engine.speculation.tree import EMPTY, TokenTree, chain, merge
from engine.testing import fake_model
from engine.testing.fake_model import FakeModel
from tests.harness import published_heads as heads
from tests.harness.engines import all_events, hasher, tokens_of
from tests.harness.models import FAMILIES, Tiny
from tests.harness.published_eagle3 import save_eagle3
from tests.harness.workloads import (
    VOCAB,
    WINDOW,
    Bench,
    Outcome,
    disturbed,
    small_engine,
    undisturbed,
    workload,
)

Expected = Mapping[str, Mapping[int, Outcome]]


@dataclasses.dataclass(frozen=True)
class _GuessingBench(Bench):
    """Engines with some drafters, if there are any."""

    drafters: tuple[Drafter, ...] = ()
    always: bool = True

    def engine(
        self,
        config: EngineConfig,
        parking: object = None,
        rng: random.Random | None = None,
    ) -> LLMEngine:
        if not self.drafters:
            return super().engine(config, parking, rng)  # type: ignore[arg-type]
        config = dataclasses.replace(
            config, speculation=SpeculationConfig(max_num_nodes=9, always=self.always)
        )
        return LLMEngine(
            config,
            self.make_model(),
            parking=parking,  # type: ignore[arg-type]
            drafters=self.drafters,
        )


class _Spy:
    """A Drafter that ReadsHidden: it compares what it sees with what a FakeModel makes of the same
    tokens, and guesses right and wrong ones."""

    name = "spy"

    def __init__(self, rng: random.Random, expected: Expected, wants: Wants) -> None:
        self.wants = wants
        self.layers = (1, 3) if wants is Wants.EVERY else ()
        self.places: dict[Key, list[tuple[int, int]]] = {}
        self._rng = rng
        self._model = FakeModel(context_window=WINDOW, block_size=4)
        self._expected = expected
        self._ends: dict[Key, int] = {}

    def see(self, computed: Sequence[Computed]) -> None:
        for one in computed:
            end = one.start + len(one.hidden)
            assert 0 < end < len(one.token_ids)
            for position, hidden in enumerate(one.hidden, one.start):
                logits = self._model.logits(one.token_ids[: position + 1])
                assert hidden.equal(logits[: fake_model.HIDDEN_SIZE])
            for layer in self.layers:
                assert one.layers[layer].equal(one.hidden + 1 + layer)
            self.places.setdefault(one.key, []).append((one.start, end))
            self._ends[one.key] = end

    def propose(self, tasks: Sequence[Task]) -> list[Draft]:
        for task in tasks:  # the newest token's own is not computed yet
            assert self._ends.get(task.key, 0) < len(task.token_ids)
        return [Draft(self._tree(task).best(task.num_nodes), {}) for task in tasks]

    def _tree(self, task: Task) -> TokenTree:
        rng = self._rng
        answer = self._expected[task.key[0]][task.key[1]][0]
        rest = answer[len(task.token_ids) - task.num_prompt_tokens :]
        chains: list[TokenTree] = []
        for _ in range(rng.randint(0, 3)):
            wrong = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 2))]
            path = list(rest[: rng.randint(0, 4)]) + wrong
            if path:
                chains.append(chain(path, sorted((rng.random() for _ in path), reverse=True)))
        return merge(chains) if chains else EMPTY

    def forget(self, key: Key) -> None:
        self._ends.pop(key, None)

    def check_integrity(self) -> None:
        pass


def test_hidden_states_are_those_of_the_tokens_that_are_kept(
    seed: int, scale: Callable[[int], int]
) -> None:
    """Whatever is kept of a tree, and whatever happens meanwhile."""
    bench = Bench()
    for index in range(scale(40)):
        rng = random.Random(f"hidden {seed} {index}")
        wants = (Wants.DRAWN, Wants.EVERY)[index % 2]
        requests = workload(rng, bench)[:4]
        expected = undisturbed(requests, bench)
        spy = _Spy(rng, expected, wants)
        engine = small_engine(rng, _GuessingBench(drafters=(spy,)))
        assert disturbed(engine, requests, rng, expected) == expected
        _check_none_has_failed(engine)


def test_every_token_of_a_prompt_is_seen_and_its_last_by_all_samples() -> None:
    """In chunks; where only those are wanted that were drawn after, a prompt's last alone."""
    sampling = Sampling(max_tokens=6, temperature=1.0, seed=4, ignore_eos=True)
    request = Request("r", tuple(range(2, 21)), sampling, hasher(), num_samples=2)
    expected = undisturbed([request])
    for wants in (Wants.EVERY, Wants.DRAWN):
        spy = _Spy(random.Random(1), expected, wants)
        config = EngineConfig(
            num_blocks=40,
            max_num_tokens_per_step=8,
            max_num_running=4,
            speculation=SpeculationConfig(always=True),
        )
        engine = LLMEngine(config, FakeModel(context_window=WINDOW, block_size=4), drafters=[spy])
        engine.submit(request)
        while engine.has_work():
            engine.step()
        first, twin = spy.places["r", 0], spy.places["r", 1]
        if wants is Wants.EVERY:
            assert first[:3] == [(0, 8), (8, 16), (16, 19)]
            assert twin[0] == (16, 19)
        else:
            assert first[0] == twin[0] == (18, 19)
        for own in (first, twin):
            assert all(before[1] == after[0] for before, after in itertools.pairwise(own))


def test_a_step_that_failed_leaves_no_hidden_states() -> None:
    """A token after which nothing is a number: its sample is computed once more, without guesses,
    and then fails."""

    class Blind(_Spy):
        def _tree(self, task: Task) -> TokenTree:
            return chain([1, 2], [0.5, 0.2])

    plain = FakeModel(context_window=WINDOW, block_size=4)
    poison = plain.generate([5, 6, 7], 6)[-1]
    model = FakeModel(context_window=WINDOW, block_size=4, poison=frozenset({poison}))
    spy = Blind(random.Random(0), {}, Wants.EVERY)
    config = EngineConfig(num_blocks=40, speculation=SpeculationConfig(always=True))
    engine = LLMEngine(config, model, drafters=[spy])
    sampling = Sampling(max_tokens=20, ignore_eos=True)
    engine.submit(Request("r", (5, 6, 7), sampling, hasher()))
    errors = [event.error for event in _events(engine) if event.error is not None]
    assert len(errors) == 1
    assert engine.metrics().num_guessed_tokens > 2
    _check_none_has_failed(engine)
    assert spy.places["r", 0][-1][1] <= 3 + 5


def _events(engine: LLMEngine) -> Iterator[RequestOutput]:
    while engine.has_work():
        yield from engine.step().events


def test_transformers_code_gives_what_its_head_takes(model: LoadedModel, target: Tiny) -> None:
    """Of draws, and of all tokens; of a prompt, a decode and a tree in one step."""
    memory = model.make_memory(12)
    model.attach(memory)
    prompt = [7, 8, 9, 10, 11, 12, 13, 14, 15]
    model.forward(Batch(tuple(prompt), (Span(0, 9, (0, 1)),), (8,)))
    tree = Span(9, 4, (0, 1), branches=(-1, 0, -1))
    spans = (Span(0, 3, (2,)), tree)
    batch = Batch((3, 4, 5, 20, 21, 22, 23), spans, (2, 3, 4, 5, 6), True, True)
    model.forward(batch)
    texts = [[3], [3, 4], [3, 4, 5], [*prompt, 20], [*prompt, 20, 21], [*prompt, 20, 21, 22]]
    texts.append([*prompt, 20, 23])
    with torch.inference_mode():
        expected = torch.stack(
            [
                target.oracle.base_model(torch.tensor([own])).last_hidden_state[0, -1]
                for own in texts
            ]
        )
    every = model.every_hidden()
    assert every is not None
    torch.testing.assert_close(every, expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(model.hidden(), expected[2:], rtol=1e-3, atol=1e-3)
    model.forward(dataclasses.replace(batch, wants_every_hidden=False))
    assert model.every_hidden() is None


def _own_decoder(info: ModelInfo) -> LoadedModel:
    """Our decoder: paths for trees."""
    shape = read_llama_config(FAMILIES["llama"]())
    device = torch.device("cpu")
    return LlamaModel(
        LlamaDecoder(
            random_weights(shape, dtype=torch.float32, device=device, seed=5),
            rope_table(shape, info.context_window, device),
        ),
        dataclasses.replace(info, gives_embeddings=True),
        kv_layout(shape, block_size=info.block_size, dtype="float32"),
    )


def test_our_decoders_head_is_launched_on_its_own_device(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which need not be the current one."""
    entered: list[torch.device] = []

    @contextlib.contextmanager
    def on_device(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield

    ends = _own_decoder(model.info).ends
    assert ends is not None
    monkeypatch.setattr(model_module, "on_device", on_device)
    assert ends.head(torch.randn(2, ends.hidden_size)).shape == (2, model.info.vocab_size)
    assert entered == [torch.device("cpu")]


class _FakeWithEnds(FakeModel):
    """Random ends, as the heads' sizes want them."""

    def __init__(self) -> None:
        super().__init__(
            vocab_size=heads.VOCAB, context_window=WINDOW, block_size=4, hidden_size=heads.HIDDEN
        )
        generator = torch.Generator().manual_seed(1)
        self._table = torch.randn(heads.VOCAB, heads.HIDDEN, generator=generator)

    @property
    def ends(self) -> Ends:
        return Ends(heads.HIDDEN, lambda ids: self._table[ids], lambda x: x @ self._table.T, 3)


@pytest.mark.parametrize("kind", ["fake", "transformers", "own"])
def test_workloads_with_heads_end_as_without(
    *,
    config: EngineConfig,
    model: LoadedModel,
    tmp_path: Path,
    seed: int,
    scale: Callable[[int], int],
    kind: str,
) -> None:
    """Medusa's, EAGLE's and EAGLE-3's together, or some of them."""
    made = {
        "fake": _FakeWithEnds,
        "transformers": lambda: model,
        "own": lambda: _own_decoder(model.info),
    }
    target = made[kind]()
    saves = (heads.save_medusa, heads.save_eagle, save_eagle3)
    names = [str(save(tmp_path / save.__name__)) for save in saves]
    num_guessed = 0
    for index in range(scale(20)):
        rng = random.Random(f"heads {kind} {seed} {index}")
        speculation = SpeculationConfig(
            draft_heads=tuple(rng.sample(names, rng.choice([1, 2, 3, 3]))),
            expansion=rng.choice([(2, 1, 1, 1), (1, 1), (4,), (2, 2, 2)]),
        )
        drafters = load_heads(dataclasses.replace(config, speculation=speculation), target)
        size = target.layout.block_size
        bench = Bench(make_model=lambda: target, size=size)
        requests = workload(rng, bench)[:2]
        expected = undisturbed(requests, bench)
        guessing = _GuessingBench(
            make_model=lambda: target,
            size=size,
            drafters=tuple(drafters),
            always=rng.random() < 0.7,
        )
        engine = small_engine(rng, guessing)
        assert disturbed(engine, requests, rng, expected) == expected
        _check_none_has_failed(engine)
        num_guessed += engine.metrics().num_guessed_tokens
    assert scale(20) == 1 or num_guessed > 0


def _check_none_has_failed(engine: LLMEngine) -> None:
    """A drafter's exception costs guesses, and no test would see it."""
    assert engine._speculator is not None
    assert not engine._speculator._roster.failed


def test_an_engine_loads_the_heads_that_its_settings_name(
    config: EngineConfig, model: LoadedModel, tmp_path: Path
) -> None:
    saves = (heads.save_medusa, heads.save_eagle, save_eagle3)
    names = tuple(str(save(tmp_path / save.__name__)) for save in saves)
    speculation = SpeculationConfig(draft_heads=names, always=True, max_num_nodes=6)
    sampling = Sampling(max_tokens=14, temperature=0.8, seed=3, ignore_eos=True)
    answers: list[list[int]] = []
    for engine in (
        LLMEngine(dataclasses.replace(config, num_blocks=20), model),
        load_engine(dataclasses.replace(config, num_blocks=20, speculation=speculation)),
    ):
        engine.submit(Request("r", (5, 6, 7, 8), sampling, hasher()))
        token_ids = tokens_of(all_events(engine))
        answers.append(token_ids)
    assert engine.metrics().num_guessed_tokens > 30
    _check_none_has_failed(engine)
    assert answers[0] == answers[1]
