"""Adapters through the engine: greedy tokens equal those of merged weights, KV is shared within an
adapter and never across, and whatever is refused changes nothing for the others."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.decoder.ahead import AheadDecoder
from engine.engine import LLMEngine
from engine.errors import (
    AdapterInUse,
    InvalidAdapter,
    InvalidRequest,
    TooManyAdapters,
    UnknownAdapter,
)
from engine.lora.adapter import WEIGHTS
from engine.lora.limits import LoraLimits
from engine.request import Beam, Request
from tests.conftest import SESSION_SEED
from tests.harness.adapters import merged, save_adapter
from tests.harness.engines import all_events, hasher
from tests.harness.models import Tiny
from tests.parity.conftest import DEVICES, endless, prompts_of

TIE = 1e-3
"""Of the oracle's logits, which are whole numbers apart: nearer than that both tokens are right."""
NUM_OUTPUT = 10
BLOCK = 16


@pytest.fixture(scope="module")
def tiny(get_tiny: Callable[[str], Tiny]) -> Tiny:
    return get_tiny("qwen3")


@pytest.fixture(scope="module")
def folders(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    path, oracle, rng = tmp_path_factory.mktemp("lora"), tiny.oracle, random.Random(SESSION_SEED)
    seeds = [rng.randrange(2**30) for _ in range(3)]
    return {
        "a": save_adapter(path / "a", oracle, seeds[0]),
        "b": save_adapter(path / "b", oracle, seeds[1], targets=["q_proj", "down_proj"], rank=8),
        "c": save_adapter(path / "c", oracle, seeds[2], targets=["gate_proj", "v_proj"]),
    }


@pytest.fixture(scope="module")
def oracles(tiny: Tiny, folders: dict[str, Path]) -> dict[str, Tiny]:
    """Merged models by adapter; "" is the base."""
    found = {"": tiny}
    for name, folder in folders.items():
        found[name] = Tiny(tiny.family, tiny.path, merged(tiny.oracle, folder))
    return found


@pytest.fixture
def make(
    tiny: Tiny, folders: dict[str, Path], load: Callable[..., LLMEngine]
) -> Callable[..., LLMEngine]:
    """`make(*adapters, <EngineConfig fields>)`"""

    def go(*adapters: str, **fields: Any) -> LLMEngine:
        engine = load(tiny.path, **fields)
        for name in adapters:
            engine.load_adapter(name, folders[name])
        return engine

    return go


Make = Callable[..., LLMEngine]
Tinies = dict[str, Tiny]
Folders = dict[str, Path]


def ask(
    engine: LLMEngine, name: str, prompt: Sequence[int], adapter: str, **fields: Any
) -> Request:
    """A request whose chain hashes are keyed by the adapter's digest."""
    digests = {info.name: info.digest for info in engine.adapters()} | {"": ""}
    fields = {"cache_root": digests.get(adapter, "none").encode()} | fields
    root = hashlib.blake2b(fields["cache_root"], digest_size=32).digest()
    return Request(
        name, tuple(prompt), endless(NUM_OUTPUT), hasher(root), adapter=adapter, **fields
    )


def finish(engine: LLMEngine) -> dict[str, list[int]]:
    """Run everything; output tokens by request."""
    outputs: dict[str, list[int]] = {}
    for event in all_events(engine):
        assert event.error is None
        outputs.setdefault(event.request_id, []).extend(event.token_ids)
    return outputs


def run(engine: LLMEngine, *requests: Request) -> dict[str, list[int]]:
    for request in requests:
        engine.submit(request)
    return finish(engine)


def prompt_of(rng: random.Random, length: int) -> list[int]:
    return prompts_of(rng, [length])["0"]


@pytest.mark.timeout(300)
def test_tokens_equal_merged_weights(
    oracles: Tinies, make: Make, seed: int, scale: Callable[[int], int]
) -> None:
    """Prompts that share their beginnings, under every adapter, twice: the second time from the
    cache."""
    rng = random.Random(f"{seed} lora")
    engine = make(*"abc", max_num_tokens_per_step=rng.choice([9, 24, 100]), max_num_running=8)
    stems = [prompt_of(rng, 50) for _ in range(2)]
    cases = []
    for index in range(max(12, scale(100))):
        prompt = rng.choice(stems)[: rng.randint(1, 50)] + prompt_of(rng, rng.randint(1, 40))
        cases.append((str(index), prompt, rng.choice(["", *"abc"])))
    expected = {
        name: oracles[adapter].generate(prompt, NUM_OUTPUT) for name, prompt, adapter in cases
    }
    for _ in range(2):
        rng.shuffle(cases)
        requests = [ask(engine, name, prompt, adapter) for name, prompt, adapter in cases]
        assert run(engine, *requests) == expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("prompts", [False, True], ids=["decodes", "prompts"])
def test_launched_rows_have_their_adapters(
    *,
    prompts: bool,
    device: str,
    oracles: Tinies,
    folders: Folders,
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    """Adapters of a rank that is launched, and none; beside one of a higher rank, which is not; and
    in each other's slots. Every token is the best of merged weights."""
    limits = LoraLimits(max_num_adapters=2, max_rank=8, max_launched_rank=4)
    rng = random.Random(f"{seed} launched")
    fields: dict[str, Any] = {"max_num_running": 6, "max_num_tokens_per_step": 60}
    fields["overlap_prompts"] = prompts
    engine = make(decoder="own", device=device, lora=limits, **fields)
    launched: list[set[int]] = []
    taking: list[set[int]] = []

    def spy(name: str, seen: list[set[int]]) -> None:
        launch = getattr(AheadDecoder, name)

        def noted(self: AheadDecoder, rows: Sequence[Any]) -> Any:
            seen.append({getattr(row, "adapter", 0) for row in rows})
            return launch(self, rows)

        monkeypatch.setattr(AheadDecoder, name, noted)

    spy("launch", launched)
    spy("launch_mixed", taking)
    for loaded in (("a", "c"), ("b", "c"), ("c", "a")):
        for info in engine.adapters():
            engine.unload_adapter(info.name)
        for name in loaded:
            engine.load_adapter(name, folders[name])
        names = ["", *loaded]
        cases = {str(i): (prompt_of(rng, rng.randint(1, 40)), names[i % 3]) for i in range(6)}
        launched.clear()
        taking.clear()
        outputs = run(engine, *(ask(engine, name, *case) for name, case in cases.items()))
        taken = set().union(*launched)
        assert 1 not in taken if "b" in loaded else taken == {0, 1, 2}
        # With an adapter a step with prompts is a plain one.
        assert set().union(*taking) <= ({0} if prompts else set())
        for name, (prompt, adapter) in cases.items():
            tokens = outputs[name]
            with torch.inference_mode():
                logits = oracles[adapter].oracle(torch.tensor([prompt + tokens])).logits[0]
            for row, token_id in zip(logits[len(prompt) - 1 : -1], tokens, strict=True):
                assert float(row.max() - row[token_id]) < TIE, (name, adapter)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_preempted_request_goes_on_with_its_adapter(
    preemption: str, oracles: Tinies, make: Make, seed: int
) -> None:
    rng = random.Random(f"{seed} {preemption}")
    fields = {"preemption": preemption, "num_blocks": 9, "block_size": 8, "context_window": 64}
    engine = make(*"abc", **fields)
    cases = [
        (str(index), prompt_of(rng, 18), ("", *"abc")[index % 4])  # 3 blocks, then 4
        for index in range(8)
    ]
    assert run(engine, *(ask(engine, *case) for case in cases)) == {
        name: oracles[adapter].generate(prompt, NUM_OUTPUT) for name, prompt, adapter in cases
    }
    assert sum(dict(engine.stats().num_preemptions).values()) > 0


@pytest.mark.parametrize("is_beam", [False, True])
def test_samples_and_beams_equal_those_of_a_merged_checkpoint(
    *, is_beam: bool, tiny: Tiny, oracles: Tinies, make: Make, load: Make, tmp_path: Path, seed: int
) -> None:
    """One engine with the adapter, one with the merged weights, the same seeds."""
    for file in tiny.path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    oracles["a"].oracle.save_pretrained(tmp_path)
    prompt = prompt_of(random.Random(seed), 25)
    sampling = endless(NUM_OUTPUT, temperature=0.0 if is_beam else 1.0, seed=seed)
    beam = Beam(num_beams=3) if is_beam else None
    outputs = []
    for engine, adapter in ((make("a"), "a"), (load(tmp_path), "")):
        engine.submit(
            dataclasses.replace(
                ask(engine, "x", prompt, adapter), sampling=sampling, num_samples=3, beam=beam
            )
        )
        found: dict[int, list[int]] = {}
        for event in all_events(engine):
            assert event.error is None
            found.setdefault(event.sample_index, []).extend(event.token_ids)
        outputs.append(found)
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == 3


def test_blocks_are_shared_within_an_adapter_and_never_across(
    oracles: Tinies, make: Make, seed: int
) -> None:
    engine = make(*"abc")
    prompt = prompt_of(random.Random(seed), 3 * BLOCK + 1)
    for adapter in ("", "a", "b", "c"):
        for num_hit in (0, 3 * BLOCK):
            reservation = engine.reserve(ask(engine, "x", prompt, adapter))
            assert reservation.num_local_tokens == num_hit, adapter
            engine.start("x")
            assert finish(engine)["x"] == oracles[adapter].generate(prompt, NUM_OUTPUT)


def test_a_reload_under_the_same_name_never_meets_old_kv(
    oracles: Tinies, folders: Folders, make: Make, seed: int
) -> None:
    """By unload and load, and by a load in its place; back to the first content, its KV is there
    again."""
    engine = make()
    prompt = prompt_of(random.Random(seed), 2 * BLOCK + 1)
    engine.load_adapter("mine", folders["a"])
    old_root = engine.adapters()[0].digest.encode()

    def hit_and_tokens(**fields: Any) -> tuple[int, list[int]]:
        reservation = engine.reserve(ask(engine, "x", prompt, "mine", **fields))
        engine.start("x")
        return reservation.num_local_tokens, finish(engine)["x"]

    assert hit_and_tokens() == (0, oracles["a"].generate(prompt, NUM_OUTPUT))
    engine.unload_adapter("mine")
    engine.load_adapter("mine", folders["b"])
    assert hit_and_tokens() == (0, oracles["b"].generate(prompt, NUM_OUTPUT))
    engine.load_adapter("mine", folders["c"])
    assert hit_and_tokens() == (0, oracles["c"].generate(prompt, NUM_OUTPUT))
    with pytest.raises(InvalidRequest, match=r"^cache_root: "):  # keyed by the name's first life
        hit_and_tokens(cache_root=old_root)
    engine.load_adapter("other", folders["a"])
    reservation = engine.reserve(ask(engine, "x", prompt, "other"))
    assert reservation.num_local_tokens == 2 * BLOCK, "the same content under another name"
    engine.abort("x")
    engine.check_integrity()


def test_an_adapter_in_use_stays(oracles: Tinies, folders: Folders, make: Make, seed: int) -> None:
    """In every state of its requests, until the last has ended."""
    engine = make("a")
    prompt = prompt_of(random.Random(seed), 20)
    engine.reserve(ask(engine, "x", prompt, "a"))
    engine.reserve(ask(engine, "held", prompt, "a", hold_after=1))

    def is_in_use() -> None:
        for call in (
            lambda: engine.unload_adapter("a"),
            lambda: engine.load_adapter("a", folders["b"]),
        ):
            with pytest.raises(AdapterInUse, match="'a' is in use by"):
                call()
        engine.check_integrity()

    is_in_use()  # reserved
    for name in ("x", "held"):
        engine.start(name)
    is_in_use()  # waiting
    outputs: dict[str, list[int]] = {"x": [], "held": []}
    while engine.has_work():
        for event in engine.step().events:
            outputs[event.request_id] += event.token_ids
        is_in_use()
    assert outputs["x"] == oracles["a"].generate(prompt, NUM_OUTPUT)
    assert outputs["held"] == outputs["x"][:1]
    is_in_use()  # holding
    engine.release("held")
    engine.reserve(ask(engine, "gone", prompt, "a"))
    engine.abort("gone")
    engine.unload_adapter("a")
    assert engine.adapters() == ()
    with pytest.raises(UnknownAdapter):
        engine.unload_adapter("a")
    engine.check_integrity()


def test_an_unknown_adapter_takes_nothing(make: Make) -> None:
    engine = make("a")
    with pytest.raises(InvalidRequest, match=r"^adapter: 'z' is not loaded \(loaded are: a\)"):
        engine.reserve(ask(engine, "x", [2, 3], "z"))
    assert engine.stats().num_reserved == engine.stats().num_referenced_blocks == 0
    engine.check_integrity()


def test_a_request_without_room_does_not_hold_its_adapter(make: Make) -> None:
    engine = make("a", num_blocks=44, context_window=700)
    engine.reserve(ask(engine, "x", [2] * 600, ""))
    with pytest.raises(Exception, match="blocks"):
        engine.reserve(ask(engine, "y", [2] * 600, "a"))
    engine.unload_adapter("a")
    engine.abort("x")
    engine.check_integrity()


def test_bad_adapters_change_nothing_for_the_neighbours(
    tiny: Tiny, oracles: Tinies, make: Make, tmp_path: Path, seed: int
) -> None:
    """Refused loads of every kind between the steps of running requests."""
    rng = random.Random(f"{seed} bad")
    engine = make(*"ab", max_num_tokens_per_step=16, max_num_running=8)
    before = engine.adapters()
    bad = [_spoil(tmp_path / str(index), tiny, index) for index in range(5)]
    prompts = {name: prompt_of(rng, rng.randint(5, 60)) for name in ("", "a", "b")}
    for adapter, prompt in prompts.items():
        engine.submit(ask(engine, f"x{adapter}", prompt, adapter))
    outputs: dict[str, list[int]] = {}
    while engine.has_work():
        for event in engine.step().events:
            outputs.setdefault(event.request_id, []).extend(event.token_ids)
        for name in ("a", "new"):
            with pytest.raises((InvalidAdapter, AdapterInUse, TooManyAdapters)):
                engine.load_adapter(name, rng.choice(bad))
        engine.check_integrity()
    assert engine.adapters() == before
    for adapter, prompt in prompts.items():
        assert outputs[f"x{adapter}"] == oracles[adapter].generate(prompt, NUM_OUTPUT)


def _spoil(folder: Path, tiny: Tiny, index: int) -> Path:
    """A NaN, a wrong shape, a module that is not there, a field that is refused, half a file."""
    save_adapter(folder, tiny.oracle, index)
    tensors = load_file(folder / WEIGHTS)
    name = sorted(tensors)[index]
    if index == 0:
        tensors[name][0, 0] = torch.nan
    elif index == 1:
        tensors[name] = torch.zeros(tensors[name].shape[0] + 1, tensors[name].shape[1])
    elif index == 2:
        tensors[name.replace("layers.0", "layers.77")] = tensors.pop(name)
    save_file(tensors, folder / WEIGHTS)
    if index == 3:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"use_dora": True}))
    elif index == 4:
        path = folder / WEIGHTS
        path.write_bytes(path.read_bytes()[:-100])
    return folder


def test_an_adapter_that_overflows_ends_its_own_requests_only(
    tiny: Tiny, oracles: Tinies, make: Make, tmp_path: Path, seed: int
) -> None:
    """Finite weights, infinite activations: the request has an error, its neighbours their
    tokens."""
    engine = make("a")
    engine.load_adapter("huge", save_adapter(tmp_path / "huge", tiny.oracle, 1, strength=1e37))
    prompt = prompt_of(random.Random(seed), 30)
    for adapter in ("", "huge", "a"):
        engine.submit(ask(engine, f"x{adapter}", prompt, adapter))
    outputs: dict[str, list[int]] = {}
    errors: dict[str, str] = {}
    for event in all_events(engine):
        outputs.setdefault(event.request_id, []).extend(event.token_ids)
        if event.error is not None:
            errors[event.request_id] = type(event.error).__name__
    assert errors == {"xhuge": "InvalidLogits"}
    for adapter in ("", "a"):
        assert outputs[f"x{adapter}"] == oracles[adapter].generate(prompt, NUM_OUTPUT)
    engine.unload_adapter("huge")
