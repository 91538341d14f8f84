"""Guesses through the whole path: random workloads from a client over router, prefill worker, store
and decode workers give what one engine gives that has room for all of them and guesses nothing.
(That this is what plain decoding gives through the same path: test_exact.py.)

Every kind of proposer, random trees, every kind of parameter, adapters, quantized caches, small
ones that preempt, chunks, prefix hits, streams that move. `BATON_TEST_SEED` gives the same requests
and settings again, but not the same moments.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.engine import LLMEngine
from engine.request import GrammarKind, Request, Sampling
from protos import common_pb2, inference_pb2
from services.worker.provenance import FINISH_REASONS, logprobs_to_proto
from tests.conftest import LONG, LONG_TIMEOUT_S, third
from tests.harness.guessing_cluster import Cluster, Site, cluster, leaving_at_times, site
from tests.harness.guessing_models import (
    EOS,
    KINDS,
    CheckpointMaker,
    FakeMaker,
    Maker,
    Nudged,
    random_speculation,
)
from tests.harness.prefill_decode_pair import Sample
from tests.harness.redis_server import RedisServer
from tests.harness.workloads import SIZE, VOCAB, Bench, workload
from tests.unit.engine.test_disturbed import GRAMMARS
from tokens.text import OutputText
from tokens.tokenizer import Tokenizer

STOP_STRING = common_pb2.FINISH_REASON_STOP_STRING
STOP_TOKEN = common_pb2.FINISH_REASON_EOS, common_pb2.FINISH_REASON_STOP_TOKEN
ROUNDING = 1e-4
"""Far above what a logit of these models is off by when it is summed in another order (3e-6)."""


IN_TIME = pytest.mark.timeout(LONG_TIMEOUT_S if LONG else 600)
NOISY = 50.0
"""A temperature at which all tokens are about as likely, for each of these models."""


@dataclasses.dataclass(frozen=True)
class Ask:
    """One request, and the strings at which a router ends its samples."""

    request: Request
    stop: tuple[str, ...]


def random_asks(
    name: str, rng: random.Random, maker: Maker, tokenizer: Tokenizer, *, greedy_or_traced: bool
) -> list[Ask]:
    """A workload of the engine's tests, and what only a router knows."""
    names = tuple(one.partition("=")[0] for one in maker.adapters)
    bench = Bench(size=SIZE, grammars=tuple(rng.sample(GRAMMARS, 2)), adapters=("", *names))
    asks = []
    for request in workload(rng, bench):
        sampling = dataclasses.replace(request.sampling, **_more(request.sampling, rng))
        if greedy_or_traced:
            exact = {"temperature": 0.0} if rng.random() < 0.6 else {"trace": True}
            sampling = dataclasses.replace(sampling, **exact)  # type: ignore[arg-type]
        asked = dataclasses.replace(
            request, request_id=f"{name}-{request.request_id}", sampling=sampling
        )
        stop: tuple[str, ...] = ()
        if sampling.grammar is None and rng.random() < 0.3:
            known = sorted(sampling.allowed_token_ids or range(1, VOCAB))
            stop = tuple(
                tokenizer.decode(rng.choices(known, k=rng.randint(1, 2))) for _ in range(2)
            )
        asks.append(Ask(asked, stop))
    return asks


def _more(sampling: Sampling, rng: random.Random) -> dict[str, Any]:
    """What the engine's workloads lack, and what makes guesses right: long answers, few tokens."""
    max_tokens = max(sampling.min_tokens, rng.choice([sampling.max_tokens, 12, 22]))
    fields: dict[str, Any] = {"max_tokens": max_tokens}
    if rng.random() < 0.25:
        fields["logprobs"] = rng.randint(0, 3)
    if rng.random() < 0.15:
        fields["trace"] = True
    if sampling.grammar is not None:
        return fields
    if rng.random() < 0.3:
        few = rng.sample(range(1, VOCAB), 4)
        stops = {few[0]} if rng.random() < 0.3 else ()
        fields |= {"allowed_token_ids": frozenset(few), "stop_token_ids": frozenset(stops)}
        fields |= {"no_repeat_ngram": 0, "bad_words": ()}
    elif rng.random() < 0.3:
        fields |= {"logit_bias": ((EOS, 2.5),), "ignore_eos": False}
    if rng.random() < 0.3:
        fields[rng.choice(["presence_penalty", "frequency_penalty"])] = 1.5
    return fields


def telling_asks(name: str, rng: random.Random, count: int) -> list[Ask]:
    """So many of each of two, so that of every kind's guesses some are right: of a text of two
    tokens those of lookups are, half of them; and where next to nothing but the noise decides,
    those of heads, which share it, as the trace demands."""
    asks = []
    for index in range(count):
        few = rng.sample(range(1, VOCAB), 2)
        sampling = Sampling(max_tokens=22, ignore_eos=True, seed=rng.randrange(1 << 64))
        repetitive = {"temperature": 0.0, "allowed_token_ids": frozenset(few)}
        noisy = {"temperature": NOISY, "trace": True}
        for kind, fields in (("repetitive", repetitive), ("noisy", noisy)):
            request = dataclasses.replace(
                workload(rng)[0],
                request_id=f"{name}-{kind}-{index}",
                prompt_token_ids=tuple(rng.choices(few, k=16)),
                sampling=dataclasses.replace(sampling, **fields),  # type: ignore[arg-type]
                num_samples=1,
            )
            asks.append(Ask(request, ()))
    return asks


def to_message(ask: Ask) -> inference_pb2.GenerateRequest:
    """As a client writes it."""
    request, one = ask.request, ask.request.sampling
    params = common_pb2.SamplingParams(
        temperature=one.temperature,
        top_p=one.top_p,
        top_k=one.top_k,
        min_p=one.min_p,
        max_tokens=one.max_tokens,
        min_tokens=one.min_tokens,
        seed=one.seed,
        stop_token_ids=sorted(one.stop_token_ids),
        stop=ask.stop,
        ignore_eos=one.ignore_eos,
        presence_penalty=one.presence_penalty,
        frequency_penalty=one.frequency_penalty,
        repetition_penalty=one.repetition_penalty,
        logit_bias=dict(one.logit_bias),
        allowed_token_ids=sorted(one.allowed_token_ids or ()),
        n=request.num_samples,
        logprobs=one.logprobs,
        trace=one.trace,
        bad_word_ids=[common_pb2.TokenSequence(ids=word) for word in one.bad_words],
        no_repeat_ngram=one.no_repeat_ngram,
    )
    if one.grammar is not None and one.grammar.kind is GrammarKind.CHOICE:
        params.choice.values.extend(one.grammar.choices)
    elif one.grammar is not None:
        setattr(params, one.grammar.kind.value, one.grammar.text)
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=request.prompt_token_ids),
        sampling=params,
        request_id=request.request_id,
        tenant="t",
        adapter=request.adapter,
        priority=request.priority,
    )


def plain_answers(
    engine: LLMEngine, asks: Sequence[Ask], tokenizer: Tokenizer
) -> dict[str, dict[int, Sample]]:
    """What plain decoding gives: by request and sample."""
    found = {
        ask.request.request_id: {index: Sample() for index in range(ask.request.num_samples)}
        for ask in asks
    }
    for ask in asks:
        engine.submit(ask.request)
    while engine.has_work():
        for event in engine.step().events:
            assert event.error is None, event
            sample = found[event.request_id][event.sample_index]
            sample.token_ids += event.token_ids
            sample.logprobs += logprobs_to_proto(event.logprobs or ())
            if event.finish_reason is not None:
                sample.finish_reason = FINISH_REASONS[event.finish_reason]
    for ask in asks:
        for sample in found[ask.request.request_id].values():
            _cut(sample, ask.stop, tokenizer)
    return found


def _cut(sample: Sample, stop: Sequence[str], tokenizer: Tokenizer) -> None:
    """At a stop string, token by token. A token that ends an answer is no text."""
    text = OutputText(tokenizer, stop=stop)
    for number, token_id in enumerate(sample.token_ids, 1):
        is_end = number == len(sample.token_ids) and sample.finish_reason in STOP_TOKEN
        text.feed([token_id], ends_with_stop_token=is_end)
    text.finish()
    if text.stop_string:
        sample.finish_reason = STOP_STRING
        del sample.token_ids[text.num_tokens :]
        del sample.logprobs[text.num_tokens :]


Plain = dict[int, tuple[list[int], int]]


def plainly(samples: dict[int, Sample]) -> Plain:
    """Tokens, and how they ended."""
    return {index: (one.token_ids, one.finish_reason) for index, one in sorted(samples.items())}


def check_beside(found: dict[int, Sample], expected: dict[int, Sample], ask: Ask) -> None:
    """Log probabilities and traces come with each token."""
    for index, one in found.items():
        assert len(one.logprobs) == len(expected[index].logprobs)
        for own, other in zip(one.logprobs, expected[index].logprobs, strict=True):
            assert own.chosen.token_id == other.chosen.token_id
            assert own.chosen.logprob == pytest.approx(other.chosen.logprob, abs=1e-3)
            assert len(own.top) == len(other.top)
            for best, plain in zip(own.top, other.top, strict=True):
                assert best.logprob == pytest.approx(plain.logprob, abs=1e-3)
        assert len(one.traces) == (len(one.token_ids) if ask.request.sampling.trace else 0)


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    server = RedisServer()
    try:
        asyncio.run(server.start())
        yield server
    finally:
        server.remove()


@dataclasses.dataclass
class Run:
    """Workloads of one kind, and what was seen of them."""

    site: Site
    seed: str
    tokenizer: Tokenizer
    counts: Counter[str] = dataclasses.field(default_factory=Counter)

    async def clusters(self, kinds: Sequence[str], num_workloads: int, per_cluster: int) -> None:
        """At least so many workloads, and on until they show something: guesses that were kept and
        that were not, for which there are requests until both were seen; in the long run all that
        shall have happened."""
        counts = self.counts
        wanted = (
            ("kept", "refused", "moves", "preemptions", "prefix") if LONG else ("kept", "refused")
        )
        while counts["workloads"] < num_workloads or min(counts[name] for name in wanted) == 0:
            assert counts["workloads"] < 20 * num_workloads, counts
            number = counts["clusters"]
            await self._cluster(kinds[number % len(kinds)], f"{self.seed} {number}", per_cluster)

    async def _cluster(self, kind: str, seed: str, num_workloads: int) -> None:
        rng = random.Random(seed)
        maker, counts = self.site.maker, self.counts
        speculation = random_speculation(kind, rng, names=maker.draft_names, heads=maker.heads)
        has_shown = min(counts["kept"], counts["refused"]) > 0
        if counts["clusters"] > 0 and not has_shown:
            speculation = dataclasses.replace(speculation, always=True)
        bound = speculation.acceptance == "multi_step"
        asks = [
            ask
            for index in range(num_workloads)
            for ask in random_asks(
                f"{counts['clusters']}-{index}", rng, maker, self.tokenizer, greedy_or_traced=bound
            )
        ]
        if not has_shown:
            asks += telling_asks(f"{counts['clusters']}", rng, 3 if counts["clusters"] else 1)
        expected = await asyncio.to_thread(self._plain_answers, asks)
        rng.shuffle(asks)
        with_draft_workers = "draft_workers" in KINDS[kind]
        async with cluster(
            self.site, speculation, rng, with_draft_workers=with_draft_workers
        ) as made:
            at_once = asyncio.Semaphore(rng.randint(3, 12))

            async def follow(ask: Ask) -> None:
                async with at_once:
                    answers = await made.ask(to_message(ask))
                own = expected[ask.request.request_id]
                if plainly(answers.samples) == plainly(own):
                    check_beside(answers.samples, own, ask)
                else:
                    same = await asyncio.to_thread(self._is_rounding, ask, answers.samples)
                    assert same, (
                        f"Random({seed!r}): {kind}, {speculation}\n{ask}\n"
                        f"got {plainly(answers.samples)}\nnot {plainly(own)}"
                    )
                    counts["by rounding"] += 1
                counts["moves"] += sum(leg.ended_by == "moved" for leg in answers.legs)

            async with leaving_at_times(made, rng):
                async with asyncio.TaskGroup() as group:
                    for ask in asks:
                        group.create_task(follow(ask))
            self._count(made)
        counts["clusters"] += 1
        counts["workloads"] += num_workloads
        counts["requests"] += len(asks)

    def _plain_answers(
        self, asks: Sequence[Ask], model: Any = None
    ) -> dict[str, dict[int, Sample]]:
        engine = self.site.reference(model)
        try:
            return plain_answers(engine, asks, self.tokenizer)
        finally:
            engine.close()

    def _is_rounding(self, ask: Ask, found: dict[int, Sample]) -> bool:
        """Plain decoding gives this as well when its logits are moved by next to nothing."""
        maker = self.site.maker
        if maker.is_to_the_bit:
            return False
        moved = (Nudged(maker.model("rounding"), ROUNDING, number) for number in range(30))
        answers = (self._plain_answers([ask], model) for model in moved)
        return any(plainly(one[ask.request.request_id]) == plainly(found) for one in answers)

    def _count(self, made: Cluster) -> None:
        for index in range(len(made.decodes)):
            engine = made.engine(index)
            metrics = engine.metrics()
            self.counts["kept"] += metrics.num_kept_tokens
            self.counts["refused"] += metrics.num_guessed_tokens - metrics.num_kept_tokens
            stats = engine.stats()
            self.counts["prefix"] += stats.num_local_prefix_tokens
            self.counts["preemptions"] += sum(dict(stats.num_preemptions).values())


@IN_TIME
@pytest.mark.parametrize("kind", third(KINDS))
async def test_random_workloads_end_as_plain_decoding_does(
    kind: str, tmp_path: Path, redis: RedisServer, seed: int
) -> None:
    """55 of each kind in the long run; at random over a quantized cache."""
    rng = random.Random(f"path {kind} {seed}")
    maker = FakeMaker(tmp_path, kv_scale=rng.choice(["", "", "", "tensor", "block", "token_head"]))
    async with site(maker, tmp_path, redis, rng.choice(["auto", "store", "direct"])) as made:
        run = Run(made, f"path {kind} {seed}", Tokenizer.load(maker.folder))
        await run.clusters([kind], 55 if LONG else 2, per_cluster=3 if LONG else 2)


@IN_TIME
async def test_random_workloads_of_checkpoints_end_as_plain_decoding_does(
    tmp_path: Path, redis: RedisServer, seed: int, scale: Callable[[int], int]
) -> None:
    """60 of all kinds: real attention, an adapter, draft models and heads as settings name them."""
    rng = random.Random(f"path of checkpoints {seed}")
    maker = CheckpointMaker(tmp_path, rng)
    kinds = sorted(KINDS)
    rng.shuffle(kinds)
    async with site(maker, tmp_path, redis, rng.choice(["auto", "store", "direct"])) as made:
        run = Run(made, f"path of checkpoints {seed}", Tokenizer.load(maker.folder))
        await run.clusters(kinds, scale(60), per_cluster=3)
    assert run.counts["by rounding"] <= 2 + run.counts["requests"] // 50
