"""Exactness of an engine that guesses: whatever is guessed, and whatever happens meanwhile, the
tokens are those that each request gets alone and without guesses.

The drafter here knows the answers and lies at random: right and wrong nodes, wide and deep, lie in
one tree. The FakeModel's next token is a function of what lies in the blocks, so KV of a wrong path
that is left in the wrong slot is a wrong token from there on.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from checkpoints.resolve import resolve
from engine.batch import Batch
from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.grammar.config import GrammarLimits
from engine.grammar.service import GrammarService
from engine.models.interface import Guesses
from engine.models.loader import load_model
from engine.request import Request
from engine.sequence import Key
from engine.speculation.config import SpeculationConfig
from engine.speculation.drafter import Draft, Task
from engine.speculation.tree import EMPTY, TokenTree, chain, merge
from engine.testing.ahead_model import AheadModel
from engine.testing.fake_model import FakeModel
from tests.harness.adapters import save_adapter
from tests.harness.engines import all_events
from tests.harness.quantized_fake import QuantizedFake
from tests.harness.workloads import (
    SIZE,
    VOCAB,
    WINDOW,
    Bench,
    Outcome,
    disturbed,
    maybe_ahead,
    small_engine,
    undisturbed,
    workload,
)
from tests.unit.engine.test_disturbed import GRAMMARS

pytestmark = pytest.mark.usefixtures("one_compile_process")

Expected = Mapping[str, Mapping[int, Outcome]]


class KnowsTheAnswers:
    """A Drafter that is right as often as it likes."""

    name = "knows"

    def __init__(self, rng: random.Random, expected: Expected, vocab_size: int) -> None:
        self._rng = rng
        self._expected = expected
        self._vocab_size = vocab_size
        self.known: set[Key] = set()

    def propose(self, tasks: Sequence[Task]) -> list[Draft]:
        self.known.update(task.key for task in tasks)
        return [Draft(self._tree(task).best(task.num_nodes), {}) for task in tasks]

    def _tree(self, task: Task) -> TokenTree:
        rng = self._rng
        name, index = task.key
        answer = self._expected[name][index][0]
        rest = answer[len(task.token_ids) - task.num_prompt_tokens :]
        chains = []
        for _ in range(rng.randint(0, 4)):
            right = list(rest[: rng.randint(0, 5)])
            wrong = [rng.randrange(self._vocab_size) for _ in range(rng.randint(0, 3))]
            path = right + wrong
            if path:
                chances = sorted((rng.random() for _ in path), reverse=True)
                chains.append(chain(path, chances))
        return merge(chains) if chains else EMPTY

    def forget(self, key: Key) -> None:
        self.known.discard(key)

    def check_integrity(self) -> None:
        pass


@dataclasses.dataclass(frozen=True)
class GuessingBench(Bench):
    """Engines that guess by a drafter which knows what is expected."""

    drafter: KnowsTheAnswers | None = None
    always: bool = True
    acceptance: str = "exact"

    def engine(
        self,
        config: EngineConfig,
        parking: object = None,
        rng: random.Random | None = None,
    ) -> LLMEngine:
        if self.drafter is None:
            return super().engine(config, parking, rng)  # type: ignore[arg-type]
        config = dataclasses.replace(
            config,
            speculation=SpeculationConfig(
                max_num_nodes=9, always=self.always, acceptance=self.acceptance
            ),
        )
        model = self.make_model()
        if rng is not None:
            model = maybe_ahead(model, rng)
        engine = LLMEngine(
            config,
            model,
            parking=parking,  # type: ignore[arg-type]
            make_grammars=self.make_grammars,
            drafters=[self.drafter],
        )
        if rng is not None:
            _rest_at_random(engine, random.Random(rng.random()))
        return engine


def _maybe_quantized(index: int, rng: random.Random) -> Bench:
    """Every fourth over a quantized cache, with any kind of scale and size of blocks."""
    if index % 4:
        return Bench()
    scale, size = rng.choice(["tensor", "block", "token_head"]), rng.choice([SIZE, SIZE, 16])
    return Bench(
        make_model=lambda: QuantizedFake(scale, context_window=WINDOW, block_size=size), size=size
    )


def _rest_at_random(engine: LLMEngine, rng: random.Random) -> None:
    """Launches begin and end anywhere among guesses, for longer or shorter."""
    speculator = engine._speculator
    assert speculator is not None
    speculator._exploration.rests = (  # type: ignore[method-assign]
        lambda num_sequences: rng.random() < 0.7
    )


def _num_launches(engine: LLMEngine) -> int:
    """Steps that were launched ahead."""
    model = engine._model
    return model.launches.num_launches if isinstance(model, AheadModel) else 0


def _check(bench: Bench, rng: random.Random, vocab_size: int = VOCAB) -> LLMEngine:
    requests = workload(rng, bench)
    expected = undisturbed(requests, bench)
    drafter = KnowsTheAnswers(rng, expected, vocab_size)
    guessing = GuessingBench(
        **{field.name: getattr(bench, field.name) for field in dataclasses.fields(Bench)},
        drafter=drafter,
        always=rng.random() < 0.7,
        acceptance=rng.choice(["exact", "exact", "naive"]),
    )
    engine = small_engine(rng, guessing)
    assert disturbed(engine, requests, rng, expected) == expected
    return engine


def _counts(engine: LLMEngine) -> tuple[int, int]:
    counts = engine.metrics()
    assert 0 <= counts.num_kept_tokens <= counts.num_guessed_tokens
    return counts.num_guessed_tokens, counts.num_kept_tokens


def test_random_workloads_end_as_without_guesses(seed: int, scale: Callable[[int], int]) -> None:
    """500 workloads as those of test_disturbed: every processor, samples, handovers amid answers,
    preemptions, swaps, lack of blocks; steps without guesses may be launched ahead."""
    num_guessed = num_kept = num_launches = 0
    for index in range(scale(500)):
        rng = random.Random(f"guesses {seed} {index}")
        engine = _check(_maybe_quantized(index, rng), rng)
        guessed, kept = _counts(engine)
        num_guessed, num_kept = num_guessed + guessed, num_kept + kept
        num_launches += _num_launches(engine)
    assert num_launches > 0, "nothing was launched ahead"
    assert num_kept > 0, "nothing was kept"
    assert num_guessed > num_kept, "nothing was refused"


def test_random_workloads_under_the_multi_step_rule(seed: int, scale: Callable[[int], int]) -> None:
    for index in range(scale(60)):
        rng = random.Random(f"multi-step {seed} {index}")
        _check_multi_step(_maybe_quantized(index, rng), rng, VOCAB)


def _check_multi_step(bench: Bench, rng: random.Random, vocab_size: int) -> None:
    """Greedy and traced requests end as without guesses; sampled ones end, and never against their
    grammar."""
    requests = [
        dataclasses.replace(
            one, sampling=dataclasses.replace(one.sampling, **rng.choice(_EXACT_OR_NOT))
        )
        for one in workload(rng, bench)
    ]
    expected = undisturbed(requests, bench)
    drafter = KnowsTheAnswers(rng, expected, vocab_size)
    own = {field.name: getattr(bench, field.name) for field in dataclasses.fields(Bench)}
    guessing = GuessingBench(**own, drafter=drafter, acceptance="multi_step")
    found = disturbed(small_engine(rng, guessing), requests, rng)
    for one in requests:
        if one.sampling.temperature == 0.0 or one.sampling.trace:
            assert found[one.request_id] == expected[one.request_id]
            continue
        for _, reason, _, error in found[one.request_id].values():
            assert (reason or error) and "against its grammar" not in error


_EXACT_OR_NOT: list[dict[str, Any]] = [{"temperature": 0.0}, {"trace": True}, {}]


def test_workloads_with_grammars(seed: int, scale: Callable[[int], int]) -> None:
    folder = resolve("baton-5m", files="tokenizer").path
    service = GrammarService.from_checkpoint(folder, 4096, GrammarLimits())
    bench = Bench(
        make_model=lambda: FakeModel(vocab_size=4096, context_window=WINDOW, block_size=SIZE),
        make_grammars=lambda: service,
        grammars=GRAMMARS,
    )
    quantized = dataclasses.replace(
        bench,
        make_model=lambda: QuantizedFake(
            "block", vocab_size=4096, context_window=WINDOW, block_size=SIZE
        ),
    )
    try:
        for index in range(scale(100)):
            rng = random.Random(f"guesses in grammars {seed} {index}")
            _counts(_check(quantized if index % 2 else bench, rng, 4096))
        for index in range(scale(40)):
            rng = random.Random(f"multi-step in grammars {seed} {index}")
            _check_multi_step(bench, rng, 4096)
    finally:
        service.close()


def test_workloads_on_the_bundled_model(
    seed: int, scale: Callable[[int], int], tmp_path: Path
) -> None:
    """On real attention over real KV, with an adapter and without: the topology-aware mask, rotary
    positions by depth, and the kept path's KV moved to where it belongs."""
    size = 8
    config = EngineConfig(
        model="baton-5m",
        device="cpu",
        dtype="float32",
        block_size=size,
        context_window=WINDOW,
        num_threads=1,
    )
    model = load_model(config)
    plain = AutoModelForCausalLM.from_pretrained(resolve("baton-5m", files="all").path)
    engine = LLMEngine(config, model)  # the model keeps it
    engine.load_adapter("a", save_adapter(tmp_path / "a", plain, seed % 2**30))
    bench = Bench(make_model=lambda: model, size=size, adapters=("", "a"))
    for index in range(scale(60)):
        _counts(_check(bench, random.Random(f"guesses on a model {seed} {index}")))


def test_a_model_that_takes_chains_gets_chains(seed: int) -> None:
    class Chains(FakeModel):
        def __init__(self) -> None:
            super().__init__(context_window=WINDOW, block_size=SIZE)
            self.guesses = Guesses.CHAINS

        def forward(self, batch):  # type: ignore[no-untyped-def]
            assert not any(span.branches for span in batch.spans)
            return super().forward(batch)

    num_kept = 0
    for index in range(4):
        engine = _check(Bench(make_model=Chains), random.Random(f"chains {seed} {index}"))
        num_kept += _counts(engine)[1]
    assert num_kept > 0


def test_blocks_that_were_for_guesses_go_back(make_request: Callable[..., Request]) -> None:
    """Preempting, so that blocks are taken as they are needed, and not all before."""

    class Wrong(KnowsTheAnswers):
        def _tree(self, task: Task) -> TokenTree:
            return chain([VOCAB - 1] * 9, [0.5**i for i in range(9)])

    request = make_request("r", [1, 2, 3], max_tokens=12)
    expected = undisturbed([request])
    config = EngineConfig(
        num_blocks=40, preemption="recompute", speculation=SpeculationConfig(always=True)
    )
    drafter = Wrong(random.Random(0), expected, VOCAB)
    engine = LLMEngine(
        config, FakeModel(context_window=WINDOW, block_size=SIZE), drafters=[drafter]
    )
    engine.submit(request)
    token_ids: list[int] = []
    for event in all_events(engine):
        token_ids += event.token_ids
        if not event.is_request_over:
            num_tokens = len(request.prompt_token_ids) + len(token_ids)
            assert len(engine.block_ids("r")) == -(-num_tokens // SIZE)
    assert tuple(token_ids) == expected["r"][0][0]
    assert _counts(engine)[0] > 20


def test_the_drafter_forgets_who_is_gone(make_request: Callable[..., Request]) -> None:
    rng = random.Random(3)
    requests = [make_request(f"r{index}", [1, 2, 3], max_tokens=6) for index in range(3)]
    expected = undisturbed(requests)
    drafter = KnowsTheAnswers(rng, expected, VOCAB)
    engine = LLMEngine(
        EngineConfig(num_blocks=40),
        FakeModel(context_window=WINDOW, block_size=SIZE),
        drafters=[drafter],
    )
    for request in requests:
        engine.submit(request)
        engine.step()
        engine.step()
        if request.request_id == "r1":
            engine.abort("r1")
    while engine.has_work():
        engine.step()
        engine.check_integrity()
        live = {name for name, _ in drafter.known}
        assert "r1" not in live


class _Wide:
    """A Drafter of one level: the right token is the least likely."""

    name = "wide"

    def __init__(self, answer: Sequence[int]) -> None:
        self._answer = answer

    def propose(self, tasks: Sequence[Task]) -> list[Draft]:
        drafts = []
        for task in tasks:
            right = self._answer[len(task.token_ids) - task.num_prompt_tokens]
            wrong = [token_id for token_id in range(1, VOCAB) if token_id != right][:3]
            tree = merge([chain([one], [0.1]) for one in [*wrong, right]])
            drafts.append(Draft(tree.best(task.num_nodes), {}))
        return drafts

    def forget(self, key: Key) -> None:
        pass

    def check_integrity(self) -> None:
        pass


def test_what_is_left_of_a_text_bounds_depth_and_not_width(
    make_request: Callable[..., Request],
) -> None:
    """Three tokens: the second one's guess may be one deep and four wide, and brings the third."""
    model = FakeModel(vocab_size=VOCAB, context_window=WINDOW, block_size=SIZE)
    prompt = [1, 2, 3]
    answer = model.generate(prompt, 3)
    config = EngineConfig(
        num_blocks=32,
        max_num_tokens_per_step=64,
        speculation=SpeculationConfig(max_num_nodes=4, always=True),
    )
    engine = LLMEngine(config, model, drafters=[_Wide(answer)])
    engine.submit(make_request("r", prompt, max_tokens=3))
    found: list[list[int]] = []
    while engine.has_work():
        found.append([one for event in engine.step().events for one in event.token_ids])
    assert found == [answer[:1], answer[1:]]
    engine.check_integrity()


def test_no_slot_lies_beyond_the_context_window(make_request: Callable[..., Request]) -> None:
    """A wide tree near its end: block tables are as wide as the window, and no wider."""

    class Narrow(FakeModel):
        def forward(self, batch: Batch) -> torch.Tensor:
            assert all(span.end <= WINDOW for span in batch.spans)
            return super().forward(batch)

    model = Narrow(vocab_size=VOCAB, context_window=WINDOW, block_size=SIZE)
    prompt = [1 + token_id % 50 for token_id in range(WINDOW - 5)]
    num_tokens = 5
    answer = FakeModel(vocab_size=VOCAB, context_window=WINDOW, block_size=SIZE).generate(
        prompt, num_tokens
    )
    config = EngineConfig(
        num_blocks=4 * WINDOW // SIZE,
        max_num_tokens_per_step=2 * WINDOW,
        preemption="recompute",  # blocks are not taken beforehand, which would bound them, too
        speculation=SpeculationConfig(max_num_nodes=4, always=True),
    )
    engine = LLMEngine(config, model, drafters=[_Wide(answer)])
    engine.submit(make_request("r", prompt, max_tokens=num_tokens, ignore_eos=True))
    found: list[int] = []
    while engine.has_work():
        for event in engine.step().events:
            found += event.token_ids
    assert found == answer
    engine.check_integrity()
