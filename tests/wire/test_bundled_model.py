"""What the fake model cannot show, over the real wire with the small bundled model: grammars,
beams, LoRA adapters, and draws that go on behind tokens that others drew. Against one engine that
serves the whole request, and against transformers.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from process.rpc_errors import BatonError, FailedPrecondition, InvalidArgument, NotFound
from protos import common_pb2
from tests.harness.adapters import merged, save_adapter
from tests.harness.beam_search import draw_searches
from tests.harness.bundled_pair import MODEL, NUM_TOKENS, PROMPT, Workers, workers
from tests.harness.cluster import oracle
from tests.harness.prefill_decode_pair import Sample

pytestmark = [pytest.mark.oracle, pytest.mark.asyncio(loop_scope="module")]

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"enum": ["Ada", "Tom"]}, "likes_soup": {"type": "boolean"}},
        "required": ["name", "likes_soup"],
        "additionalProperties": False,
    }
)
COLOURS = ["red", "green", "dark green"]


@pytest.fixture(scope="module")
def model() -> Any:
    """Transformers' own."""
    return oracle(MODEL).model


@pytest.fixture(scope="module")
def adapter(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of "a", which both workers have from the start."""
    return save_adapter(tmp_path_factory.mktemp("adapters") / "a", model, 1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def w(
    one_compile_process: None, adapter: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Workers]:
    async with workers(tmp_path_factory.mktemp("slab"), f"a={adapter}") as made:
        yield made


def _text(sample: Sample) -> str:
    return str(oracle(MODEL).tokenizer.decode(sample.token_ids, skip_special_tokens=True))


def _plain(samples: list[Sample]) -> list[tuple[list[int], int]]:
    return [(sample.token_ids, sample.finish_reason) for sample in samples]


def _close(found: list[Any], expected: list[Any], abs_tol: float = 1e-3) -> bool:
    """Whether the log probabilities are those: the same tokens, and numbers that other chunks of
    the same prompt may round otherwise."""
    entries = [
        [entry for step in steps for entry in (step.chosen, *step.top)]
        for steps in (found, expected)
    ]
    same_tokens = [e.token_id for e in entries[0]] == [e.token_id for e in entries[1]]
    return same_tokens and all(
        math.isclose(a.logprob, b.logprob, abs_tol=abs_tol) for a, b in zip(*entries, strict=True)
    )


# ---- grammars


async def test_each_kind_gives_what_it_says_and_what_one_engine_gives(w: Workers) -> None:
    kinds: list[tuple[dict[str, Any], Callable[[str], Any]]] = [
        ({"choice": common_pb2.StringList(values=COLOURS)}, lambda text: text in COLOURS),
        (
            {"regex": r"(once|twice), [a-z]{2,6}\."},
            lambda text: re.fullmatch(r"(once|twice), [a-z]{2,6}\.", text),
        ),
        ({"json_schema": SCHEMA}, lambda text: set(json.loads(text)) == {"name", "likes_soup"}),
        (
            {"ebnf": 'root ::= "yes" | "no, " root'},
            lambda text: re.fullmatch(r"(no, )*yes", text) or text.startswith("no, "),
        ),
    ]
    for index, (grammar, is_right) in enumerate(kinds):
        asked = {"max_tokens": 60, "temperature": 0.8, "n": 3, "ignore_eos": False, **grammar}
        samples = await w.generate(name=f"r{index}", **asked)
        ordered = [samples[i] for i in range(3)]
        assert _plain(ordered) == _plain(await w.alone(**asked)), grammar
        for sample in ordered:
            assert is_right(_text(sample)), (grammar, _text(sample))
    await w.check()


async def test_decode_goes_on_in_the_middle_of_a_grammar(
    w: Workers, seed: int, scale: Callable[[int], int]
) -> None:
    """Wherever the first leg's tokens end, forced ones included, the second knows where it is."""
    rng = random.Random(seed)
    letters = "abcdefgh"
    for index in range(scale(60)):
        words = ["".join(rng.choices(letters, k=rng.randint(1, 9))) for _ in range(4)]
        pattern = f"({words[0]}|{words[1]}) {words[2]} [{letters}]{{1,3}} {words[3]}"
        asked: dict[str, Any] = {
            "max_tokens": 60,
            "temperature": rng.choice((0.0, 1.0)),
            "seed": rng.randrange(2**32),
            "regex": pattern,
            "ignore_eos": False,
        }
        (sample,) = (await w.generate(name=f"r{index}", **asked)).values()
        assert re.fullmatch(pattern, _text(sample)), pattern
        assert _plain([sample]) == _plain(await w.alone(**asked))
        assert sample.finish_reason in (
            common_pb2.FINISH_REASON_GRAMMAR,
            common_pb2.FINISH_REASON_EOS,
        )
    await w.check()


@pytest.mark.parametrize(
    ("grammar", "field"),
    [
        ({"regex": "("}, "sampling.regex"),
        ({"regex": "a{30000}"}, "sampling.regex"),
        ({"ebnf": "root ::= missing"}, "sampling.ebnf"),
        ({"json_schema": '{"type": 7}'}, "sampling.json_schema"),
        ({"json_schema": "false"}, "sampling.json_schema"),
    ],
)
async def test_a_grammar_that_cannot_be_followed_is_its_senders_mistake(
    w: Workers, grammar: dict[str, Any], field: str
) -> None:
    with pytest.raises(BatonError) as caught:
        await w.ask_prefill("r", max_tokens=4, **grammar)
    assert isinstance(caught.value, InvalidArgument), caught.value
    assert caught.value.field == field
    await w.generate(name="after", max_tokens=4)  # and no other request is hurt
    await w.check()


# ---- decode alone, and behind tokens that others drew

ALONE: tuple[dict[str, Any], ...] = (
    {"ignore_eos": True},
    {"ignore_eos": True, "temperature": 0.9, "seed": 7},
    {"logprobs": 3},
    {"temperature": 0.9, "seed": 7, "n": 3, "logprobs": 2},
    {"json_schema": SCHEMA, "temperature": 0.9, "seed": 3, "max_tokens": 60},
    {"regex": r"(once|twice), [a-z]{2,6}\.", "n": 3, "temperature": 0.8, "logprobs": 2},
)


@pytest.mark.parametrize("number", range(len(ALONE)))
async def test_decode_alone_draws_what_one_engine_draws(w: Workers, number: int) -> None:
    """The first tokens, too; nothing was to be had elsewhere, so nothing is told as missing."""
    asked = {"max_tokens": NUM_TOKENS, **ALONE[number]}
    expected = await w.alone(**asked)
    assert all(sample.token_ids for sample in expected)
    outputs = [()] * asked.get("n", 1)
    for name in ("first", "again"):
        found, finished = await w.ask_decode(f"{name}-{number}", outputs, **asked)
        for index, sample in enumerate(expected):
            ours = found[index]
            assert _plain([ours]) == _plain([sample]), asked
            assert bool(ours.logprobs) == ("logprobs" in asked)
            assert _close(ours.logprobs, sample.logprobs)
        leg = finished.leg
        assert not leg.recomputed and not leg.from_store
        assert leg.num_tokens_computed + leg.num_tokens_local == len(PROMPT)
    assert leg.num_tokens_local == 16  # its first block was there
    await w.check()


BEHIND: tuple[dict[str, Any], ...] = (
    {"logprobs": 2},
    {"temperature": 0.9, "seed": 7, "logprobs": 2},
    {"temperature": 0.8, "seed": 8, "min_p": 0.02, "top_k": 40, "repetition_penalty": 1.2},
    {"presence_penalty": 0.8, "frequency_penalty": 0.4, "logprobs": 0},
    {"json_schema": SCHEMA, "ignore_eos": False, "temperature": 0.7, "seed": 3, "logprobs": 1},
    {"stop_token_ids": list(range(0, 2048, 17)), "temperature": 1.0, "seed": 11, "min_tokens": 9},
    {"no_repeat_ngram": 2, "temperature": 0.5, "seed": 12},
)


@pytest.mark.parametrize("number", range(len(BEHIND)))
async def test_a_lost_stream_is_taken_up_through_prefill_and_by_decode_alone(
    w: Workers, number: int, seed: int
) -> None:
    """What one engine would have drawn, whatever the draw depends on."""
    asked = {"max_tokens": 40, **BEHIND[number]}
    (right,) = await w.alone(**asked)
    num_drawn = random.Random(seed + number).randint(1, len(right.token_ids) - 2)
    ids = right.token_ids[:num_drawn]
    first, account = await w.ask_prefill(f"p{number}", ids, **asked)
    got = Sample()
    got.add(first)
    assert account.handle.num_tokens == len(PROMPT) + num_drawn
    samples, finished = await w.ask_decode(
        f"p{number}", [[*ids, *first.token_ids]], handle=account.handle, **asked
    )
    _check(right, num_drawn, got, samples[0])
    assert finished.leg.num_tokens_computed == 0 and not finished.leg.recomputed
    samples, _ = await w.ask_decode(f"a{number}", [ids], **asked)
    _check(right, num_drawn, Sample(), samples[0])
    await w.check()


def _check(right: Sample, num_drawn: int, first: Sample, rest: Sample) -> None:
    assert first.token_ids + rest.token_ids == right.token_ids[num_drawn:]
    assert rest.finish_reason == right.finish_reason
    assert _close([*first.logprobs, *rest.logprobs], right.logprobs[num_drawn:], 1e-4)


async def test_several_samples_go_on_each_from_where_it_was(w: Workers, seed: int) -> None:
    """Prefill draws their first tokens again; one is over, the others go on."""
    rng = random.Random(seed)
    asked: dict[str, Any] = {"max_tokens": 30, "temperature": 0.9, "seed": 5, "n": 3}
    right = await w.alone(**asked)
    *firsts, account = await w.ask_prefill("several", **asked)
    for first in firsts:
        assert list(first.token_ids) == right[first.sample_index].token_ids[:1]
    counts = [rng.randint(1, 29) for _ in right]
    outputs = [sample.token_ids[:count] for sample, count in zip(right, counts, strict=True)]
    samples, finished = await w.ask_decode(
        "several", outputs, handle=account.handle, over=[1], **asked
    )
    assert set(samples) == {0, 2}
    for index, got in samples.items():
        assert got.token_ids == right[index].token_ids[counts[index] :]
    assert finished.leg.num_tokens_computed == 0
    await w.check()


# ---- beam search


async def test_hypotheses_are_those_of_transformers(
    w: Workers, model: Any, seed: int, scale: Callable[[int], int]
) -> None:
    """Prefill ranks the first tokens, decode searches on from them; best first."""
    for index, (search, expected) in enumerate(draw_searches(model, seed, scale(100))):
        samples = await w.generate(
            search.prompt,
            name=f"r{index}",
            max_tokens=search.num_tokens,
            n=search.n,
            beam=search.beam,
            ignore_eos=False,
        )
        assert [samples[i].token_ids for i in range(search.n)] == [ids for ids, _ in expected]
        for i, (_, score) in enumerate(expected):
            assert samples[i].score == pytest.approx(score, rel=1e-4, abs=1e-4)
    await w.check()


# ---- adapters


async def _with_adapter(w: Workers, adapter: str, digest: str, *, name: str) -> list[int]:
    (sample,) = (
        await w.generate(adapter=adapter, digest=digest, name=name, max_tokens=NUM_TOKENS)
    ).values()
    return sample.token_ids


def _reference(model: Any) -> list[int]:
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            logits = model(ids).logits[:, -1]
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    tokens: list[int] = ids[0, len(PROMPT) :].tolist()
    return tokens


async def test_each_request_has_its_adapter_and_no_other(
    w: Workers, adapter: Path, model: Any, tmp_path: Path
) -> None:
    folders = {"a": adapter, "b": save_adapter(tmp_path / "b", model, 2)}
    expected = {name: _reference(merged(model, folder)) for name, folder in folders.items()}
    expected[""] = _reference(model)
    assert len({tuple(tokens) for tokens in expected.values()}) == 3
    (digest_b, same) = await w.load("b", folders["b"])
    assert digest_b == same
    digests, others = [
        {adapter.name: adapter.digest for adapter in status.adapters}
        for status in await w.statuses()
    ]
    assert digests == others and digests["b"] == digest_b
    for attempt in range(2):  # the second time from the caches
        for name in ("a", "", "b"):
            tokens = await _with_adapter(w, name, digests.get(name, ""), name=f"{name}{attempt}")
            assert tokens == expected[name]


async def test_a_reload_under_the_same_name_never_meets_old_kv(
    w: Workers, model: Any, tmp_path: Path
) -> None:
    old = save_adapter(tmp_path / "old", model, 3)
    new = save_adapter(tmp_path / "new", model, 4)
    expected = {folder: _reference(merged(model, folder)) for folder in (old, new)}
    (before, _) = await w.load("x", old)
    assert await _with_adapter(w, "x", before, name="one") == expected[old]
    (after, _) = await w.load("x", new)
    assert after != before
    assert await _with_adapter(w, "x", after, name="two") == expected[new]
    # Requests that began with the old content end on it.
    assert await _with_adapter(w, "x", before, name="three") == expected[old]
    # A router that knows another one is told, and may try another worker.
    with pytest.raises(FailedPrecondition):
        await w.ask_prefill("stale", adapter="x", digest="ab" * 32)


async def test_what_is_no_adapter_is_refused(w: Workers, adapter: Path, tmp_path: Path) -> None:
    before = [[adapter.name for adapter in status.adapters] for status in await w.statuses()]
    for index in range(2):
        with pytest.raises(BatonError, match=f"{MODEL}' is the served model"):
            await w.load_at(index, MODEL, adapter)
        with pytest.raises(InvalidArgument):
            await w.load_at(index, "none", tmp_path / "none")
        with pytest.raises(NotFound):
            await w.unload_at(index, "none")
    after = [[adapter.name for adapter in status.adapters] for status in await w.statuses()]
    assert after == before and MODEL not in after[0]
