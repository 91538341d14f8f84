"""Random workloads for an engine on a FakeModel, and two ways to run one: undisturbed (each request
alone, on an engine with room for everything) and disturbed (together, on a small engine that
preempts, swaps, forgets and is interrupted)."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.errors import NoBlocks, ParkingRefused, WrongState
from engine.grammar.service import GrammarService
from engine.models.interface import LoadedModel
from engine.outputs import RequestOutput
from engine.parking import Blocks, HostParking, Parked, Parking
from engine.request import FinishReason, GrammarSpec, Request, RequestState, Sampling
from engine.testing.ahead_model import AheadModel
from engine.testing.fake_model import FakeModel
from tests.harness.engines import hasher

SIZE = 4
WINDOW = 48
VOCAB = 97

Outcome = tuple[tuple[int, ...], FinishReason | None, int | None, str]
"""(tokens, finish reason, stop token, error) of one sample."""


@dataclass(frozen=True)
class Bench:
    """What the engines of a workload are made of."""

    make_model: Callable[[], LoadedModel] = lambda: FakeModel(
        context_window=WINDOW, block_size=SIZE
    )
    size: int = SIZE
    make_grammars: Callable[[], GrammarService] | None = None
    grammars: tuple[GrammarSpec, ...] = ()
    adapters: tuple[str, ...] = ("",)
    """Names that requests choose from; empty: none."""

    def engine(
        self,
        config: EngineConfig,
        parking: Parking | None = None,
        rng: random.Random | None = None,
    ) -> LLMEngine:
        """rng: for an engine that may launch ahead."""
        model = self.make_model()
        if rng is not None:
            model = maybe_ahead(model, rng)
        return LLMEngine(config, model, parking=parking, make_grammars=self.make_grammars)


def maybe_ahead(model: LoadedModel, rng: random.Random) -> LoadedModel:
    """The same, as it is, or with launches that are computed at once or as late as may be, of few
    rows or of many, and of all draws or but some. Over a quantized cache nothing is ever launched
    ahead."""
    if rng.random() < 0.3 or model.layout.is_quantized:
        return model
    return AheadModel(
        model,
        is_late=rng.random() < 0.7,
        max_rows=rng.choice([1, 3, 100, 100]),
        takes=rng.choice([None, None, lambda draw: draw.position % 7 != 0]),
    )


PLAIN = Bench()


def workload(rng: random.Random, bench: Bench = PLAIN) -> list[Request]:
    """Requests whose prompts overlap, with every kind of parameter."""
    stems = [[rng.randrange(1, VOCAB) for _ in range(30)] for _ in range(2)]
    requests = []
    for index in range(rng.randint(2, 7)):
        stem = rng.choice(stems)
        prompt = [*stem[: rng.randint(0, 24)], rng.randrange(1, VOCAB)]
        adapter = rng.choice(bench.adapters)
        root = b"root" + adapter.encode()
        requests.append(
            Request(
                request_id=f"r{index}",
                prompt_token_ids=tuple(prompt),
                sampling=_constrained(random_sampling(rng), rng, bench),
                block_hasher=hasher(root),
                cache_root=root,
                adapter=adapter,
                priority=rng.choice([0, 0, 1]),
                num_samples=rng.choice([1, 1, 1, 2, 3]),
            )
        )
    return requests


def random_sampling(rng: random.Random) -> Sampling:
    """Greedy or sampled, with some processors, and some way to end."""
    max_tokens = rng.randint(1, 22)
    fields: dict[str, object] = {
        "max_tokens": max_tokens,
        "temperature": rng.choice([0.0, 0.7, 3.0]),
        "seed": rng.randrange(1 << 64),
        "ignore_eos": rng.random() < 0.5,
    }
    some: dict[str, object] = {
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.05,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
        "no_repeat_ngram": 2,
        "min_tokens": rng.randint(0, max_tokens),
        "stop_token_ids": frozenset(rng.sample(range(1, VOCAB), 3)),
        "bad_words": ((rng.randrange(1, VOCAB),), (5, 6)),
        "logit_bias": ((rng.randrange(VOCAB), 2.0),),
        "allowed_token_ids": frozenset(range(0, VOCAB, 2)),
    }
    fields |= {name: value for name, value in some.items() if rng.random() < 0.15}
    return Sampling(**fields)  # type: ignore[arg-type]


def _constrained(sampling: Sampling, rng: random.Random, bench: Bench) -> Sampling:
    """Half of them follow a grammar, where there are any; hard masks could leave it no token."""
    if not bench.grammars or rng.random() < 0.5:
        return sampling
    return dataclasses.replace(
        sampling,
        grammar=rng.choice(bench.grammars),
        stop_token_ids=frozenset(),
        allowed_token_ids=None,
        bad_words=(),
        no_repeat_ngram=0,
        min_tokens=0,
        ignore_eos=False,
    )


def outcomes(events: Sequence[RequestOutput]) -> dict[int, Outcome]:
    """By sample."""
    found: dict[int, Outcome] = {}
    for event in events:
        tokens, reason, _, error = found.get(event.sample_index, ((), None, None, ""))
        assert reason is None and not error, "an event after the end"
        found[event.sample_index] = (
            tokens + event.token_ids,
            event.finish_reason,
            event.stop_token_id,
            str(event.error or ""),
        )
    return found


def undisturbed(requests: Sequence[Request], bench: Bench = PLAIN) -> dict[str, dict[int, Outcome]]:
    """Each request alone: what a right engine gives."""
    results = {}
    for request in requests:
        config = EngineConfig(num_blocks=200, max_num_tokens_per_step=64, max_num_running=8)
        engine = bench.engine(config)
        engine.reserve(request)
        engine.start(request.request_id)
        events: list[RequestOutput] = []
        while engine.has_work():
            events += engine.step().events
        assert events[-1].is_request_over
        results[request.request_id] = outcomes(events)
    return results


def steps_beyond(engine: LLMEngine, num_tokens: int) -> tuple[tuple[int, ...], int]:
    """Run an engine to its end. Returns: all its tokens, and how many steps brought those beyond
    the first `num_tokens`."""
    found: tuple[int, ...] = ()
    num_steps = 0
    while engine.has_work():
        for event in engine.step().events:
            found += event.token_ids
        num_steps += len(found) > num_tokens
    return found, num_steps


class _Late:
    """Bytes that take a few questions to come, or never do."""

    def __init__(self, parked: Parked, num_questions: int, is_lost: bool) -> None:
        self._parked = parked
        self._num_questions = num_questions
        self._is_lost = is_lost

    @property
    def is_done(self) -> bool:
        self._num_questions -= 1
        return self._num_questions < 0

    def result(self) -> Blocks | None:
        return None if self._is_lost else self._parked.result()


class BadParking:
    """Refuses, loses and takes its time at random; what it gives back is right."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._host = HostParking(1 << 20)

    def put(
        self, key: str, chain_hashes: Sequence[bytes], blocks: Blocks, *, owner: str = ""
    ) -> None:
        if self._rng.random() < 0.2:
            raise ParkingRefused("not now")
        self._host.put(key, chain_hashes, blocks)

    def get(self, key: str) -> Parked:
        return _Late(self._host.get(key), self._rng.randint(0, 3), self._rng.random() < 0.4)

    def drop(self, key: str) -> None:
        self._host.drop(key)

    def check_integrity(self, keys: Collection[str]) -> None:
        self._host.check_integrity(keys)


def small_engine(rng: random.Random, bench: Bench = PLAIN) -> LLMEngine:
    """Hardly room for one request, and any setting of what may disturb."""
    running = rng.randint(3, 6)
    preemption = rng.choice(["recompute", "swap", "swap"])
    config = EngineConfig(
        num_blocks=rng.randint(WINDOW // bench.size, 2 * WINDOW // bench.size),
        max_num_tokens_per_step=rng.randint(running, 20),
        max_num_running=running,
        max_num_tokens_per_request_step=rng.choice([0, 0, 1, 5]),
        policy=rng.choice(["fcfs", "priority", "cache_aware"]),
        max_passes=rng.choice([0, 1, 5]),
        preemption=preemption,
        park_bytes=rng.choice([0, 200]),
    )
    parking = BadParking(rng) if preemption == "swap" and rng.random() < 0.7 else None
    return bench.engine(config, parking, rng)


NOTHING: Outcome = ((), None, None, "")

Drawn = dict[str, tuple[tuple[int, ...], ...]]
"""What earlier legs drew: by request, of each sample."""


def drawn_before(
    requests: Sequence[Request], expected: dict[str, dict[int, Outcome]], rng: random.Random
) -> Drawn:
    """For some requests, where an earlier leg left off: after any token of each sample, perhaps
    after the last of some. Not within a grammar: there, legs change between events only."""
    drawn: Drawn = {}
    for request in requests:
        samples = [expected[request.request_id][i] for i in range(request.num_samples)]
        if request.sampling.grammar is not None or rng.random() < 0.6:
            continue
        if any(error for *_, error in samples) or all(len(one[0]) < 2 for one in samples):
            continue
        lengths = [rng.randint(1, len(tokens)) for tokens, *_ in samples]
        open_ones = [i for i, one in enumerate(samples) if len(one[0]) >= 2]
        index = rng.choice(open_ones)
        lengths[index] = min(lengths[index], len(samples[index][0]) - 1)
        drawn[request.request_id] = tuple(
            tokens[:length] for (tokens, *_), length in zip(samples, lengths, strict=True)
        )
    return drawn


def with_drawn(
    found: dict[int, Outcome], expected: dict[int, Outcome], drawn: Drawn, name: str
) -> dict[int, Outcome]:
    """The whole answer, of both legs. A sample that the first one ended draws nothing."""
    whole = dict(found)
    for index, tokens in enumerate(drawn.get(name, ())):
        if tokens == expected[index][0]:
            # The prompt's filled blocks are told as sample 0's, in events without tokens.
            assert found.get(index, NOTHING) == NOTHING, "a sample that had ended drew"
            whole[index] = expected[index]
        else:
            rest, *end = found[index]
            whole[index] = (tokens + rest, *end)  # type: ignore[assignment]
    return whole


def disturbed(
    engine: LLMEngine,
    requests: Sequence[Request],
    rng: random.Random,
    expected: dict[str, dict[int, Outcome]] | None = None,
) -> dict[str, dict[int, Outcome]]:
    """All together, begun at random steps in random ways, blocks taken away at random.
    Where it is told what to expect, some are begun in the middle, as if handed over."""
    drawn = drawn_before(requests, expected, rng) if expected is not None else {}
    events: dict[str, list[RequestOutput]] = {}
    left = list(requests)
    over: set[str] = set()
    num_steps = 0
    while left or engine.has_work():
        num_steps += 1
        assert num_steps < 20_000, "livelock"
        while left and (rng.random() < 0.3 or not engine.has_work()):
            if not _begin(engine, left[0], rng, drawn.get(left[0].request_id, ())):
                break
            left.pop(0)
        for event in engine.step().events:
            assert event.request_id not in over, "an event after the last"
            events.setdefault(event.request_id, []).append(event)
            if event.is_request_over:
                over.add(event.request_id)
        engine.check_integrity()
        if rng.random() < 0.2:
            _interrupt(engine, [one for one in requests if one.request_id not in over], rng)
            engine.check_integrity()
    assert over == {request.request_id for request in requests}
    stats = engine.stats()
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
    found = {name: outcomes(one) for name, one in events.items()}
    if expected is None:
        return found
    return {name: with_drawn(one, expected[name], drawn, name) for name, one in found.items()}


def _begin(
    engine: LLMEngine,
    request: Request,
    rng: random.Random,
    drawn: tuple[tuple[int, ...], ...],
) -> bool:
    if not drawn and rng.random() < 0.5:
        engine.submit(request)
        return True
    try:
        engine.reserve(request)
    except NoBlocks:
        assert engine.has_work(), "refused by an engine that does nothing"
        return False
    engine.start(request.request_id, outputs=drawn)
    return True


def _interrupt(engine: LLMEngine, live: Sequence[Request], rng: random.Random) -> None:
    if live:
        request = rng.choice(live)
        index = rng.randrange(request.num_samples)
        try:
            engine.preempt(request.request_id, index)
        except (WrongState, LookupError):
            return  # it has no blocks just now
        except Exception as error:
            if type(error).__name__ != "UnknownRequest":
                raise


def states(engine: LLMEngine) -> set[RequestState]:
    """Of all live samples."""
    return {
        sequence.state for group in engine._groups.values() for sequence in group.samples.values()
    }
