"""SpeculationManager: exactness of an engine with draft tokens. Whatever is drafted, and whatever
happens meanwhile, the tokens are those that each request gets alone and without drafts.

The proposer here knows the answers and lies at random: right and wrong nodes, wide and deep, are in
one tree. The FakeModel's next token is a function of what is in the blocks, so KV of a wrong path
that is left in the wrong slot is a wrong token from there on.

What breaks beside drafts costs what it costs without them: a request of its own, or nothing.
Settings that do not go together are refused by name. Hidden states that proposers get are the
target's own of the tokens that are kept; a failure in them costs drafts, never a token; and what is
kept of a step takes no more than its own bytes."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from checkpoints.resolve import resolve
from engine.batch import Batch, TokenSpan
from engine.config import EngineConfig
from engine.engine import LLMEngine, load_engine
from engine.errors import LoadError, PolicyFailed
from engine.grammar.config import GrammarLimits
from engine.grammar.service import GrammarService
from engine.grammar.state import GrammarState
from engine.models import llama as model_module
from engine.models.interface import Ends, Guesses, LoadedModel
from engine.models.llama import LlamaDecoder, LlamaModel, kv_layout, read_llama_config, rope_table
from engine.models.loader import load_model
from engine.models.weights import random_weights
from engine.parking import Parking
from engine.request import ModelInfo, Request, RequestState, Sampling, StopView
from engine.sequence import Key
from engine.speculation import manager
from engine.speculation.config import SpeculationConfig
from engine.speculation.controller import SpeculationController
from engine.speculation.draft_model import DraftModelProposer
from engine.speculation.eagle import EagleProposer
from engine.speculation.loader import load_heads
from engine.speculation.manager import collect_hidden_states, in_grammar
from engine.speculation.medusa import MedusaProposer
from engine.speculation.proposer import Draft, DraftTask, HiddenStates, HiddenStateScope, Proposer
from engine.speculation.token_tree import EMPTY, TokenTree, chain, merge
from engine.testing import fake_model
from engine.testing.ahead_model import AheadModel
from engine.testing.fake_model import FakeModel
from process.settings import SettingsError
from tests.harness import published_heads as heads
from tests.harness.adapters import save_adapter
from tests.harness.engines import all_events, all_steps, hasher, tokens_of
from tests.harness.models import FAMILIES, save
from tests.harness.published_eagle3 import LAYERS, save_eagle3
from tests.harness.published_heads import save_medusa
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
    steps_beyond,
    undisturbed,
    workload,
)
from tests.unit.engine.test_disturbed import GRAMMARS

pytestmark = pytest.mark.usefixtures("one_compile_process")

Expected = Mapping[str, Mapping[int, Outcome]]


class KnowsTheAnswers:
    """A Proposer that is right as often as it likes."""

    name = "knows"

    def __init__(self, rng: random.Random, expected: Expected, vocab_size: int) -> None:
        self._rng = rng
        self._expected = expected
        self._vocab_size = vocab_size
        self.known: set[Key] = set()

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        self.known.update(task.key for task in tasks)
        return [Draft(self._tree(task).best(task.num_nodes), {}) for task in tasks]

    def _tree(self, task: DraftTask) -> TokenTree:
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


class Right(KnowsTheAnswers):
    """The next `length` tokens of the answer, each time."""

    length = 3

    def _tree(self, task: DraftTask) -> TokenTree:
        name, index = task.key
        done = len(task.token_ids) - task.num_prompt_tokens
        rest = self._expected[name][index][0][done : done + self.length]
        return chain(rest, [0.9**place for place in range(1, len(rest) + 1)])


class Same(KnowsTheAnswers):
    """One path, whatever the text."""

    def __init__(self, *path: int) -> None:
        super().__init__(random.Random(0), {}, VOCAB)
        self._path = chain(path, [0.5**place for place in range(1, len(path) + 1)])

    def _tree(self, task: DraftTask) -> TokenTree:
        return self._path


ALWAYS = SpeculationConfig(always=True)
CONFIG = EngineConfig(num_blocks=40, preemption="recompute", speculation=ALWAYS)


def _model(**fields: Any) -> FakeModel:
    return FakeModel(context_window=WINDOW, block_size=SIZE, **fields)


@dataclasses.dataclass(frozen=True)
class GuessingBench(Bench):
    """Engines that guess, if they have a proposer."""

    proposer: Proposer | None = None
    others: tuple[Proposer, ...] = ()
    always: bool = True
    acceptance: str = "exact"
    may_launch: bool = True

    def engine(
        self,
        config: EngineConfig,
        parking: Parking | None = None,
        rng: random.Random | None = None,
    ) -> LLMEngine:
        if self.proposer is None:
            return super().engine(config, parking, rng)
        config = dataclasses.replace(
            config,
            speculation=SpeculationConfig(
                max_num_nodes=9, always=self.always, acceptance=self.acceptance
            ),
        )
        model = self.make_model()
        if rng is not None and self.may_launch:
            model = maybe_ahead(model, rng)
        engine = LLMEngine(
            config,
            model,
            parking=parking,
            make_grammars=self.make_grammars,
            proposers=[self.proposer, *self.others],
        )
        if rng is not None and self.may_launch:
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
    speculation = engine._speculation
    assert speculation is not None
    speculation._controller.is_idle = (  # type: ignore[method-assign]
        lambda num_sequences: rng.random() < 0.7
    )


def _num_launches(engine: LLMEngine) -> int:
    """Steps that were launched ahead."""
    model = engine._model
    return model.launches.num_launches if isinstance(model, AheadModel) else 0


def _guessing(bench: Bench, proposer: Proposer, **fields: Any) -> GuessingBench:
    own = {field.name: getattr(bench, field.name) for field in dataclasses.fields(Bench)}
    return GuessingBench(**own, proposer=proposer, **fields)


def _check(bench: Bench, rng: random.Random, vocab_size: int = VOCAB) -> LLMEngine:
    requests = workload(rng, bench)
    expected = undisturbed(requests, bench)
    proposer = KnowsTheAnswers(rng, expected, vocab_size)
    acceptance = rng.choice(["exact", "exact", "naive"])
    guessing = _guessing(bench, proposer, always=rng.random() < 0.7, acceptance=acceptance)
    engine = small_engine(rng, guessing)
    assert disturbed(engine, requests, rng, expected) == expected
    return engine


def _counts(engine: LLMEngine) -> tuple[int, int]:
    counts = engine.metrics()
    assert 0 <= counts.num_kept_tokens <= counts.num_guessed_tokens
    return counts.num_guessed_tokens, counts.num_kept_tokens


def test_random_workloads_end_as_without_guesses(seed: int, scale: Callable[[int], int]) -> None:
    """300 workloads as those of test_disturbed: every processor, samples, handovers amid answers,
    preemptions, swaps, lack of blocks; steps without guesses may be launched ahead."""
    num_guessed = num_kept = num_launches = 0
    for index in range(scale(300)):
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
    proposer = KnowsTheAnswers(rng, expected, vocab_size)
    guessing = _guessing(bench, proposer, acceptance="multi_step")
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
    fields: dict[str, Any] = {"vocab_size": 4096, "context_window": WINDOW, "block_size": SIZE}
    bench = Bench(
        make_model=lambda: FakeModel(**fields), make_grammars=lambda: service, grammars=GRAMMARS
    )
    quantized = dataclasses.replace(bench, make_model=lambda: QuantizedFake("block", **fields))
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

        def forward(self, batch: Batch) -> torch.Tensor:
            assert not any(span.branches for span in batch.spans)
            return super().forward(batch)

    num_kept = 0
    for index in range(4):
        engine = _check(Bench(make_model=Chains), random.Random(f"chains {seed} {index}"))
        num_kept += _counts(engine)[1]
    assert num_kept > 0


def test_blocks_that_were_for_guesses_go_back(make_request: Callable[..., Request]) -> None:
    """Preempting, so that blocks are taken as they are needed, and not all before."""
    request = make_request("r", [1, 2, 3], max_tokens=12)
    engine = LLMEngine(CONFIG, _model(), proposers=[Same(*[VOCAB - 1] * 9)])
    engine.submit(request)
    token_ids: list[int] = []
    for event in all_events(engine):
        token_ids += event.token_ids
        if not event.is_request_over:
            num_tokens = len(request.prompt_token_ids) + len(token_ids)
            assert len(engine.block_ids("r")) == -(-num_tokens // SIZE)
    assert tuple(token_ids) == undisturbed([request])["r"][0][0]
    assert _counts(engine)[0] > 20


def test_the_proposer_forgets_who_is_gone(make_request: Callable[..., Request]) -> None:
    requests = [make_request(f"r{index}", [1, 2, 3], max_tokens=6) for index in range(3)]
    proposer = KnowsTheAnswers(random.Random(3), undisturbed(requests), VOCAB)
    engine = LLMEngine(EngineConfig(num_blocks=40), _model(), proposers=[proposer])
    for request in requests:
        engine.submit(request)
        engine.step()
        engine.step()
        if request.request_id == "r1":
            engine.abort("r1")
    for _ in all_events(engine):
        assert "r1" not in {name for name, _ in proposer.known}


class _Wide:
    """A Proposer of one level: the right token is the least likely."""

    name = "wide"

    def __init__(self, answer: Sequence[int]) -> None:
        self._answer = answer

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        drafts = []
        for task in tasks:
            right = self._answer[len(task.token_ids) - task.num_prompt_tokens]
            wrong = [token_id for token_id in range(1, VOCAB) if token_id != right][:3]
            tree = merge([chain([one], [0.1]) for one in [*wrong, right]])
            drafts.append(Draft(tree.best(min(task.num_nodes, 4)), {}))
        return drafts

    def forget(self, key: Key) -> None:
        pass

    def check_integrity(self) -> None:
        pass


def test_what_is_left_of_a_text_bounds_depth_and_not_width(
    make_request: Callable[..., Request],
) -> None:
    """Three tokens: the second one's guess may be one deep and four wide, and brings the third."""
    model = _model()
    answer = model.generate([1, 2, 3], 3)
    speculation = SpeculationConfig(max_num_nodes=4, always=True)
    engine = LLMEngine(replace(CONFIG, speculation=speculation), model, proposers=[_Wide(answer)])
    engine.submit(make_request("r", [1, 2, 3], max_tokens=3))
    assert [tokens_of(output.events) for output in all_steps(engine)] == [answer[:1], answer[1:]]


def test_no_slot_lies_beyond_the_context_window(make_request: Callable[..., Request]) -> None:
    """A wide tree near its end: block tables are as wide as the window, and no wider."""

    class Narrow(FakeModel):
        def forward(self, batch: Batch) -> torch.Tensor:
            assert all(span.end <= WINDOW for span in batch.spans)
            return super().forward(batch)

    prompt = [1 + token_id % 50 for token_id in range(WINDOW - 5)]
    answer = _model().generate(prompt, 5)
    # Preempting: blocks are not taken beforehand, which would bound them, too.
    config = replace(CONFIG, max_num_tokens_per_step=2 * WINDOW)
    model = Narrow(context_window=WINDOW, block_size=SIZE)
    engine = LLMEngine(config, model, proposers=[_Wide(answer)])
    engine.submit(make_request("r", prompt, max_tokens=5, ignore_eos=True))
    assert tokens_of(all_events(engine)) == answer


def _right(request: Request) -> Right:
    return Right(random.Random(0), undisturbed([request]), VOCAB)


def _run(engine: LLMEngine) -> tuple[list[int], Exception | None]:
    token_ids: list[int] = []
    error: Exception | None = None
    for event in all_events(engine):
        token_ids += event.token_ids
        error = event.error or error
    return token_ids, error


def _failing_at(number: int, real: Any) -> Any:
    """Its call of this number, counted from 1."""
    calls = itertools.count(1)

    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            raise torch.OutOfMemoryError("no memory on the device")
        return real(*args, **kwargs)

    return failing


@pytest.fixture
def request_(make_request: Callable[..., Request]) -> Request:
    return make_request("r", [1, 2, 3], max_tokens=20)


def test_a_policy_that_fails_after_kept_tokens(request_: Request) -> None:
    """What was drawn before is told, as without guesses."""

    def policy(view: StopView) -> bool:
        if len(view.output_token_ids) == 7:
            raise ZeroDivisionError("seven")
        return False

    engine = LLMEngine(CONFIG, _model(), stop_policy=policy, proposers=[_right(request_)])
    engine.submit(request_)
    token_ids, error = _run(engine)
    assert tuple(token_ids) == undisturbed([request_])["r"][0][0][:6]
    assert isinstance(error, PolicyFailed)
    assert engine.metrics().num_kept_tokens > 0


def test_a_proposer_that_fails_is_not_called_for_a_while(
    request_: Request, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, proposer, now_s = list(undisturbed([request_])["r"][0][0]), _right(request_), 0.0
    asked: list[int] = []
    real = _failing_at(3, proposer.propose)

    def propose(tasks: Sequence[DraftTask]) -> list[Draft]:
        asked.append(len(tasks))
        return real(tasks)  # type: ignore[no-any-return]

    monkeypatch.setattr(proposer, "propose", propose)
    engine = LLMEngine(CONFIG, _model(), proposers=[proposer], clock=lambda: now_s)
    engine.submit(request_)
    assert _run(engine) == (expected, None)
    assert len(asked) == 3
    assert "proposer knows has failed; it is called again in 60 s" in caplog.text

    now_s = manager.FIRST_BACKOFF_S
    engine.submit(request_)
    assert _run(engine) == (expected, None)
    assert len(asked) > 4, "it is asked again, for the same tokens"


def test_a_proposer_rests_longer_with_each_failure() -> None:
    rests = [manager.backoff_s(num_failures) for num_failures in range(1, 40)]
    assert rests[:3] == [60.0, 120.0, 240.0]
    assert rests[-1] == manager.MAX_BACKOFF_S and rests == sorted(rests)


@pytest.mark.parametrize("name", ["on_outputs", "update_rates", "on_step"])
def test_what_fails_in_learning_costs_no_proposer(
    request_: Request, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Once: proposers are asked in the steps after it, for the same tokens."""
    expected = undisturbed([request_])
    failing = _failing_at(2, getattr(SpeculationController, name))
    monkeypatch.setattr(SpeculationController, name, failing)
    engine = LLMEngine(CONFIG, _model(), proposers=[_right(request_)])
    engine.submit(request_)
    assert _run(engine) == (list(expected["r"][0][0]), None)
    assert "learnt anew" in caplog.text
    _check_none_has_failed(engine)
    # 20 tokens in steps of up to four: as many are kept as without the failure, but for one step's.
    assert engine.metrics().num_kept_tokens >= 9


def test_a_draft_model_whose_logits_are_no_numbers(request_: Request) -> None:
    expected = undisturbed([request_])["r"][0][0]
    draft = DraftModelProposer(
        _model(poison=frozenset(expected[::3])), (2, 1), num_blocks=40, max_num_tokens=64
    )
    engine = LLMEngine(CONFIG, _model(), proposers=[draft])
    engine.submit(request_)
    assert _run(engine) == (list(expected), None)


def test_a_model_that_raises_leaves_no_block_for_guesses(request_: Request) -> None:
    class Raising(FakeModel):
        is_raising = False

        def forward(self, batch: Batch) -> torch.Tensor:
            if self.is_raising and len(batch.token_ids) > 1:
                raise MemoryError("no room")
            return super().forward(batch)

    model = Raising(context_window=WINDOW, block_size=SIZE)
    engine = LLMEngine(CONFIG, model, proposers=[_right(request_)])
    engine.submit(request_)
    token_ids: list[int] = []
    for number in range(4):
        for event in engine.step().events:
            token_ids += event.token_ids
        model.is_raising = True
        num_blocks = len(engine.block_ids("r"))
        with pytest.raises(MemoryError):
            engine.step()
        assert len(engine.block_ids("r")) == num_blocks, number
        engine.check_integrity()
        model.is_raising = False
    rest, error = _run(engine)
    assert (tuple(token_ids + rest), error) == (undisturbed([request_])["r"][0][0], None)


def test_a_guess_that_spoils_the_sums_of_its_neighbours(request_: Request) -> None:
    """Its KV is no number, and 0 times NaN is NaN: the request goes on without guesses."""
    answer = undisturbed([request_])["r"][0][0]
    bad = next(token_id for token_id in range(VOCAB) if token_id not in answer)

    class Spoiled(FakeModel):
        def forward(self, batch: Batch) -> torch.Tensor:
            logits = super().forward(batch)
            if bad in batch.token_ids:
                logits[:] = float("nan")
            return logits

    model = Spoiled(context_window=WINDOW, block_size=SIZE)
    engine = LLMEngine(CONFIG, model, proposers=[Same(bad)])
    engine.submit(request_)
    assert _run(engine) == (list(answer), None)
    assert engine.metrics().num_guessed_tokens == 1


def test_a_cache_in_several_places_takes_chains(
    request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of one path is ever moved."""
    model = _model()
    model.guesses = Guesses.CHAINS
    engine = LLMEngine(CONFIG, model, proposers=[_right(request_)])
    monkeypatch.setattr(type(engine.kv), "is_whole", False)
    engine.submit(request_)
    assert _run(engine) == (list(undisturbed([request_])["r"][0][0]), None)
    assert engine.metrics().num_kept_tokens > 0


def test_a_parser_that_is_late_costs_the_guess() -> None:
    class Late:
        is_complete = False

        def __init__(self, num_left: int) -> None:
            self._num_left = num_left

        def fork(self) -> Late:
            return Late(self._num_left)

        def accept(self, token_id: int) -> bool:
            self._num_left -= 1
            return self._num_left >= 0

    late: Any = Late(2)
    state: GrammarState = late
    guess = in_grammar(chain([5, 6, 7, 8], [0.9, 0.8, 0.7, 0.6]), state)
    assert guess.tree == chain([5, 6], [0.9, 0.8])
    assert len(guess.grammars) == 2


def test_a_proposer_wins_its_trust_back(make_request: Callable[..., Request]) -> None:
    """Wrong for 400 tokens, then right: guesses that were not computed are judged, too. Time is a
    device's, moved by rows."""
    now = 0.0

    class Timed(FakeModel):
        def forward(self, batch: Batch) -> torch.Tensor:
            nonlocal now
            now += 1e-3 + 2e-4 * len(batch.token_ids)
            return super().forward(batch)

    class Late(Right):
        def _tree(self, task: DraftTask) -> TokenTree:
            tree = super()._tree(task)
            if len(task.token_ids) > 400:
                return tree
            wrong = [(token_id + 1) % VOCAB for token_id in tree.token_ids]
            return chain(wrong, tree.chances)

    window = 2048
    request = make_request("r", [1, 2, 3], max_tokens=1500)
    token_ids = FakeModel(context_window=window, block_size=16).generate([1, 2, 3], 1500)
    proposer = Late(random.Random(0), {"r": {0: (tuple(token_ids), None, None, "")}}, VOCAB)
    engine = LLMEngine(
        dataclasses.replace(CONFIG, num_blocks=200, speculation=SpeculationConfig()),
        Timed(context_window=window, block_size=16),
        proposers=[proposer],
        clock=lambda: now,
    )
    engine.submit(request)
    found, num_steps = steps_beyond(engine, 500)
    assert found == tuple(token_ids)
    assert num_steps < 800, "of 1,000 tokens"


NGRAM = SpeculationConfig(drafters=("ngram",))


@pytest.fixture(scope="module")
def small_config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("target") / "target"
    save(FAMILIES["llama"](), folder, 1)
    return EngineConfig(
        model=str(folder),
        device="cpu",
        dtype="float32",
        block_size=8,
        num_blocks=16,
        context_window=48,
        num_threads=1,
    )


def test_multi_step_does_not_keep_the_promise_of_exact(small_config: EngineConfig) -> None:
    wanted = replace(NGRAM, acceptance="multi_step")
    with pytest.raises(SettingsError, match="acceptance: multi_step is not for exact=true"):
        load_engine(replace(small_config, exact=True, decoder="own", speculation=wanted))


@pytest.mark.long
def test_heads_on_a_model_that_several_ranks_share(
    small_config: EngineConfig, tmp_path: Path
) -> None:
    wanted = SpeculationConfig(draft_heads=(str(save_medusa(tmp_path / "medusa")),))
    before = set(psutil.Process().children())
    with pytest.raises(LoadError, match=r"draft_heads: .* several ranks share .*tensor_parallel"):
        load_engine(replace(small_config, decoder="own", tensor_parallel=2, speculation=wanted))
    _, alive = psutil.wait_procs(set(psutil.Process().children()) - before, timeout=60)
    assert not alive


class _Spy(KnowsTheAnswers):
    """A HiddenStateProposer that compares what it sees with what a FakeModel makes of the same
    tokens, and guesses right and wrong ones."""

    name = "spy"

    def __init__(self, rng: random.Random, expected: Expected, scope: HiddenStateScope) -> None:
        super().__init__(rng, expected, VOCAB)
        self.hidden_state_scope = scope
        self.aux_layers = (1, 3) if scope is HiddenStateScope.ALL else ()
        self.places: dict[Key, list[tuple[int, int]]] = {}
        self._model = FakeModel(context_window=WINDOW, block_size=4)
        self._ends: dict[Key, int] = {}

    def feed_hidden_states(self, computed: Sequence[HiddenStates]) -> None:
        for one in computed:
            end = one.start + len(one.hidden)
            assert 0 < end < len(one.token_ids)
            for position, hidden in enumerate(one.hidden, one.start):
                logits = self._model.logits(one.token_ids[: position + 1])
                assert hidden.equal(logits[: fake_model.HIDDEN_SIZE])
            for layer in self.aux_layers:
                assert one.layers[layer].equal(one.hidden + 1 + layer)
            self.places.setdefault(one.key, []).append((one.start, end))
            self._ends[one.key] = end

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        for task in tasks:  # the newest token's own is not computed yet
            assert self._ends.get(task.key, 0) < len(task.token_ids)
        return super().propose(tasks)

    def forget(self, key: Key) -> None:
        self._ends.pop(key, None)


def test_hidden_states_are_those_of_the_tokens_that_are_kept(
    seed: int, scale: Callable[[int], int]
) -> None:
    """Whatever is kept of a tree, and whatever happens meanwhile."""
    bench = Bench()
    for index in range(scale(40)):
        rng = random.Random(f"hidden {seed} {index}")
        wants = (HiddenStateScope.SAMPLED, HiddenStateScope.ALL)[index % 2]
        requests = workload(rng, bench)[:4]
        expected = undisturbed(requests, bench)
        spy = _Spy(rng, expected, wants)
        engine = small_engine(rng, _guessing(bench, spy, may_launch=False))
        assert disturbed(engine, requests, rng, expected) == expected
        _check_none_has_failed(engine)


def test_every_token_of_a_prompt_is_seen_and_its_last_by_all_samples() -> None:
    """In chunks; where only those are wanted that were drawn after, a prompt's last alone."""
    sampling = Sampling(max_tokens=6, temperature=1.0, seed=4, ignore_eos=True)
    request = Request("r", tuple(range(2, 21)), sampling, hasher(), num_samples=2)
    expected = undisturbed([request])
    for wants in (HiddenStateScope.ALL, HiddenStateScope.SAMPLED):
        spy = _Spy(random.Random(1), expected, wants)
        config = EngineConfig(
            num_blocks=40,
            max_num_tokens_per_step=8,
            max_num_running=4,
            speculation=SpeculationConfig(always=True),
        )
        engine = LLMEngine(config, FakeModel(context_window=WINDOW, block_size=4), proposers=[spy])
        engine.submit(request)
        while engine.has_work():
            engine.step()
        first, twin = spy.places["r", 0], spy.places["r", 1]
        if wants is HiddenStateScope.ALL:
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
        def _tree(self, task: DraftTask) -> TokenTree:
            return chain([1, 2], [0.5, 0.2])

    plain = FakeModel(context_window=WINDOW, block_size=4)
    poison = plain.generate([5, 6, 7], 6)[-1]
    model = FakeModel(context_window=WINDOW, block_size=4, poison=frozenset({poison}))
    spy = Blind(random.Random(0), {}, HiddenStateScope.ALL)
    config = EngineConfig(num_blocks=40, speculation=SpeculationConfig(always=True))
    engine = LLMEngine(config, model, proposers=[spy])
    sampling = Sampling(max_tokens=20, ignore_eos=True)
    engine.submit(Request("r", (5, 6, 7), sampling, hasher()))
    errors = [event.error for event in all_events(engine) if event.error is not None]
    assert len(errors) == 1
    assert engine.metrics().num_guessed_tokens > 2
    _check_none_has_failed(engine)
    assert spy.places["r", 0][-1][1] <= 3 + 5


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
        proposers = load_heads(dataclasses.replace(config, speculation=speculation), target)
        size = target.layout.block_size
        bench = Bench(make_model=lambda: target, size=size)
        requests = workload(rng, bench)[:2]
        expected = undisturbed(requests, bench)
        first, *others = proposers
        guessing = _guessing(
            bench, first, others=tuple(others), always=rng.random() < 0.7, may_launch=False
        )
        engine = small_engine(rng, guessing)
        assert disturbed(engine, requests, rng, expected) == expected
        _check_none_has_failed(engine)
        num_guessed += engine.metrics().num_guessed_tokens
    assert scale(20) == 1 or num_guessed > 0


def _check_none_has_failed(engine: LLMEngine) -> None:
    """A proposer's exception costs guesses, and no test would see it."""
    assert engine._speculation is not None
    assert not engine._speculation.failed_proposers


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


PROMPT = (1, 2, 3, 4, 5)


class _Reader:
    """It guesses one token, which is wrong most times."""

    name = "reader"
    hidden_state_scope = HiddenStateScope.ALL
    aux_layers: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.num_asked = self.num_seen = 0
        self.known: set[object] = set()

    def feed_hidden_states(self, computed: Sequence[HiddenStates]) -> None:
        self.num_seen += 1
        self.known |= {one.key for one in computed}

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        self.num_asked += 1
        return [Draft(chain([7], [0.5]), {}) for _ in tasks]

    def forget(self, key: object) -> None:
        self.known.discard(key)

    def check_integrity(self) -> None:
        pass


def _reader_engine(reader: _Reader, **fields: Any) -> LLMEngine:
    config = EngineConfig(num_blocks=64, speculation=ALWAYS)
    return LLMEngine(config, FakeModel(block_size=4), proposers=[reader], **fields)


def _run_reader(
    engine: LLMEngine, num_tokens: int = 8, prompt: tuple[int, ...] = PROMPT
) -> list[int]:
    sampling = Sampling(max_tokens=num_tokens, ignore_eos=True)
    engine.submit(Request("r", prompt, sampling, hasher()))
    return tokens_of(all_events(engine))


def test_a_head_whose_pass_fails_costs_no_token_and_no_integrity(
    config: EngineConfig, model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = (str(heads.save_eagle(tmp_path / "e")),)
    speculation = dataclasses.replace(ALWAYS, draft_heads=names)
    config = dataclasses.replace(config, num_blocks=20, speculation=speculation)
    (head,) = load_heads(config, model)
    assert isinstance(head, EagleProposer)
    monkeypatch.setattr(EagleProposer, "_pass", _failing_at(3, EagleProposer._pass))
    engine = LLMEngine(config, model, proposers=[head])
    assert len(_run_reader(engine, 12, (5, 6, 7, 8))) == 12
    assert engine._speculation is not None and engine._speculation.failed_proposers == {0}
    assert not head._windows
    head.check_integrity()


def test_books_of_a_head_say_what_was_computed(
    config: EngineConfig, model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = _head(config, model, heads.save_eagle(tmp_path / "e"))
    assert isinstance(head, EagleProposer)
    task = DraftTask(("r", 0), [1, 2, 3, 4], 1, Sampling(max_tokens=9), 0, 4)
    head.feed_hidden_states(
        [HiddenStates(task.key, task.token_ids, 0, torch.randn(3, heads.HIDDEN))]
    )
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(EagleProposer, "_pass", lambda *_: _raise(torch.OutOfMemoryError("none")))
        head.propose([task])
    head.check_integrity()
    assert head._windows[task.key].num_pending == 3
    assert len(head.propose([task])[0].tree) > 0


def _raise(error: Exception) -> None:
    raise error


def _head(config: EngineConfig, model: LoadedModel, folder: Path) -> EagleProposer | MedusaProposer:
    speculation = SpeculationConfig(draft_heads=(str(folder),))
    (head,) = load_heads(dataclasses.replace(config, speculation=speculation), model)
    assert isinstance(head, EagleProposer | MedusaProposer)
    return head


@pytest.mark.parametrize(
    ("owner", "name"),
    [(manager, "collect_hidden_states"), (_Reader, "feed_hidden_states"), (_Reader, "forget")],
)
def test_what_fails_behind_a_step_fails_its_proposers_and_loses_no_token(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    expected = FakeModel(block_size=4).generate(PROMPT, 8)
    if name == "forget":
        monkeypatch.setattr(_Reader, "forget", lambda *_: _raise(MemoryError("none")))
    else:
        monkeypatch.setattr(owner, name, _failing_at(3, getattr(owner, name)))
    reader = _Reader()
    engine = _reader_engine(reader)
    assert _run_reader(engine) == expected
    if name == "forget":  # when the next one comes, the first is forgotten
        assert _run_reader(engine) == expected
    else:
        assert reader.num_asked < 4, "it is not asked now"
        assert not reader.known
    assert engine._speculation is not None and engine._speculation.failed_proposers == {0}


def test_what_a_reader_sees_is_its_own_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    found: list[Mapping[int, float]] = []
    real = SpeculationController.on_step

    class Slow(_Reader):
        def feed_hidden_states(self, computed: Sequence[HiddenStates]) -> None:
            nonlocal now
            now += 1.0
            super().feed_hidden_states(computed)

    def on_step(*args: Any, beside_s: float) -> None:
        _, _, seconds, own_s, _ = args
        assert seconds >= sum(own_s.values()) + beside_s
        found.append(dict(own_s))
        real(*args, beside_s=beside_s)

    monkeypatch.setattr(SpeculationController, "on_step", on_step)
    _run_reader(_reader_engine(Slow(), clock=lambda: now))
    asked = [own_s[0] for own_s in found if own_s]
    assert len(asked) > 4 and set(asked) == {1.0}


def _sample(name: str, num_computed: int, **request: Any) -> Any:
    return SimpleNamespace(
        request=SimpleNamespace(**{"beam": None, "hold_after": None, **request}),
        state=RequestState.RUNNING,
        token_ids=list(range(num_computed + 1)),
        num_computed_tokens=num_computed,
        key=(name, 0),
        num_output_tokens=5,
        group=SimpleNamespace(samples={}),
    )


@pytest.mark.parametrize("wants", [HiddenStateScope.SAMPLED, HiddenStateScope.ALL])
def test_what_a_step_leaves_takes_its_own_bytes(wants: HiddenStateScope) -> None:
    """Beside a long prompt that does not go on here."""
    num_tokens, size = 512, 16
    every = torch.randn(num_tokens + 2, size)
    decodes = [_sample("a", 49), _sample("b", 59)]
    step: Any = SimpleNamespace(
        samples=decodes,
        drawn_of=lambda rows: rows,
        draw_indices=(0, num_tokens + 1),
        batch=SimpleNamespace(
            spans=[TokenSpan(48, 1, (1,)), TokenSpan(0, num_tokens, (2,)), TokenSpan(58, 1, (3,))],
        ),
    )
    drawn = every[[0, num_tokens + 1]]
    model: Any = SimpleNamespace(
        hidden=lambda: drawn,
        every_hidden=lambda: every if wants is HiddenStateScope.ALL else None,
        layer_inputs=lambda: {3: every + 3},
    )
    planned = [(decodes[0], 1), (_sample("p", num_tokens, hold_after=1), num_tokens)]
    found = collect_hidden_states(step, [*planned, (decodes[1], 1)], {}, model)
    assert [one.key for _, one in found] == [("a", 0), ("b", 0)]
    assert torch.cat([one.hidden for _, one in found]).equal(drawn)
    assert torch.cat([one.layers[3] for _, one in found]).equal(drawn + 3)
    for _, one in found:
        assert one.hidden.untyped_storage().nbytes() == drawn.nbytes
        assert one.layers[3].untyped_storage().nbytes() == drawn.nbytes


def _hidden_states(
    name: str, token_ids: list[int], start: int, hidden: torch.Tensor
) -> HiddenStates:
    """What goes into each layer is the same."""
    return HiddenStates((name, 0), token_ids, start, hidden, dict.fromkeys(LAYERS, hidden))


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
        head.feed_hidden_states(
            [
                _hidden_states("stays" if step else "waits", token_ids, step, left[:1]),
                _hidden_states(f"goes {step}", token_ids, 0, left[1:]),
            ]
        )
        head.forget((f"goes {step}", 0))
    head.feed_hidden_states([_hidden_states("stays", token_ids, 8, torch.randn(1, heads.HIDDEN))])
    kept: list[torch.Tensor]
    if isinstance(head, MedusaProposer):
        kept = [hidden for _, hidden in head._newest.values()]
    else:
        kept = [hidden for one in head._windows.values() for _, hidden in one.pending]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in kept}
    own = sum(one.nbytes for one in kept)
    assert own > 0
    assert sum(storages.values()) <= 2 * own
