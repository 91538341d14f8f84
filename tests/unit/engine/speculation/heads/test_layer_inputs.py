"""What goes into a target's layers, and into its head, is kept for every token that a head wants to
go by, on transformers' code and on our own decoder, and is what transformers says it is."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from engine.batch import Batch, Span
from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.models.interface import LoadedModel
from engine.models.loader import load_model
from engine.models.transformers_backend import TransformersModel
from engine.request import Request, Sampling
from engine.speculation.config import SpeculationConfig
from engine.speculation.heads.eagle import EagleHead
from engine.speculation.heads.hidden import Computed
from engine.speculation.heads.load import load_heads
from tests.harness.engines import all_events, hasher, tokens_of
from tests.harness.models import FAMILIES, Tiny, save
from tests.harness.published_eagle3 import save_eagle3
from tests.harness.published_heads import save_eagle

LAYERS = (0, 2)
Texts = list[tuple[list[int], int]]
"""(tokens, how many of the last of them were computed)"""


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder: Path = tmp_path_factory.mktemp("qwen3")
    return Tiny("qwen3", folder, save(FAMILIES["qwen3"](), folder, 2))


@pytest.fixture(scope="module")
def own_config(qwen3: Tiny, config: EngineConfig) -> EngineConfig:
    return dataclasses.replace(
        config, model=str(qwen3.path), context_window=96, decoder="own", num_blocks=40
    )


@pytest.fixture(scope="module")
def own(own_config: EngineConfig) -> LoadedModel:
    return load_model(own_config)


@pytest.fixture(params=["llama", "streamed", "own", "own without kernels"])
def pair(
    request: pytest.FixtureRequest, target: Tiny, qwen3: Tiny, own_config: EngineConfig
) -> Iterator[tuple[LoadedModel, Tiny]]:
    if request.param == "llama":
        yield request.getfixturevalue("model"), target
    elif request.param == "own":
        yield request.getfixturevalue("own"), qwen3
    elif request.param == "own without kernels":
        yield load_model(dataclasses.replace(own_config, decoder="auto")), qwen3
    else:
        most = sum(tensor.nbytes for tensor in qwen3.oracle.parameters()) - 20_000
        config = dataclasses.replace(own_config, decoder="auto", weights_device_bytes=most)
        streamed = load_model(config)
        assert isinstance(streamed, TransformersModel) and streamed.stream is not None
        yield streamed, qwen3
        streamed.close()


def _step(model: LoadedModel) -> tuple[Batch, Texts]:
    """A prompt, a tree and a decode in one step, and its rows' texts."""
    model.attach(model.make_memory(24))
    before = [7, 8, 9, 10, 11, 12, 13, 14, 15]
    model.forward(Batch(tuple(before), (Span(0, 9, (0, 1)),), (8,)))
    model.forward(Batch(tuple(before), (Span(0, 9, (3, 4)),), (8,)))
    spans = (
        Span(0, 3, (8,)),
        Span(9, 4, (0, 1), branches=(-1, 0, -1)),
        Span(9, 1, (3, 4)),
    )
    texts: Texts = [([3, 4, 5], 3)]
    texts += [([*before, *own], 1) for own in ([20], [20, 21], [20, 21, 22], [20, 23], [24])]
    return Batch(
        (3, 4, 5, 20, 21, 22, 23, 24), spans, (2, 3, 4, 5, 6, 7), True, True, LAYERS
    ), texts


def _oracle(tiny: Tiny, texts: Texts) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """What goes into each of LAYERS, and into the head, row by row."""
    with torch.inference_mode():
        found = [
            (tiny.oracle.base_model(torch.tensor([text]), output_hidden_states=True), -count)
            for text, count in texts
        ]
    inputs = {
        layer: torch.cat([one.hidden_states[layer][0, first:] for one, first in found])
        for layer in LAYERS
    }
    return inputs, torch.cat([one.last_hidden_state[0, first:] for one, first in found])


def test_what_goes_into_layers_is_what_transformers_says(pair: tuple[LoadedModel, Tiny]) -> None:
    model, tiny = pair
    batch, texts = _step(model)
    model.forward(batch)
    inputs, every = _oracle(tiny, texts)
    assert set(model.layer_inputs()) == set(LAYERS)
    for layer in LAYERS:
        torch.testing.assert_close(model.layer_inputs()[layer], inputs[layer], rtol=1e-3, atol=1e-3)
    kept = model.every_hidden()
    assert kept is not None
    torch.testing.assert_close(kept, every, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(model.hidden(), every[2:], rtol=1e-3, atol=1e-3)
    model.forward(Batch(batch.token_ids, batch.spans, batch.draw_indices))
    assert not model.layer_inputs() and model.every_hidden() is None
    assert model.ends is not None and model.ends.num_layers == 3


def test_our_decoder_keeps_all_rows_of_a_long_prompt(own: LoadedModel, qwen3: Tiny) -> None:
    """Its last layer would compute but those that are drawn from."""
    own.attach(own.make_memory(24))
    prompt = tuple((7 * i + 3) % 260 for i in range(80))
    plain = Batch((*prompt, 9), (Span(0, 80, tuple(range(10))), Span(0, 1, (10,))), (79, 80))
    expected = own.forward(plain).clone()
    logits = own.forward(
        dataclasses.replace(plain, wants_hidden=True, wants_every_hidden=True, wants_layers=LAYERS)
    )
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
    inputs, every = _oracle(qwen3, [([*prompt], 80), ([9], 1)])
    torch.testing.assert_close(own.layer_inputs()[2], inputs[2], rtol=1e-3, atol=1e-3)
    kept = own.every_hidden()
    assert kept is not None
    torch.testing.assert_close(kept, every, rtol=1e-3, atol=1e-3)


def test_our_decoder_keeps_them_over_a_cache_of_other_numbers(
    own_config: EngineConfig, qwen3: Tiny
) -> None:
    """What goes into the first layer says whose row each is."""
    model = load_model(dataclasses.replace(own_config, kv_dtype="bfloat16"))
    batch, _ = _step(model)
    model.forward(batch)
    embedding = qwen3.oracle.get_input_embeddings().weight.detach()
    assert model.layer_inputs()[0].equal(embedding[list(batch.token_ids)])
    kept = model.every_hidden()
    assert kept is not None
    torch.testing.assert_close(kept[list(batch.draw_indices)], model.hidden())


def test_on_our_decoder_a_window_begins_with_the_prompt(
    *,
    own: LoadedModel,
    own_config: EngineConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    """And behind what the prefix cache had; answers are those of plain decoding."""
    names = (str(save_eagle(tmp_path / "e")), str(save_eagle3(tmp_path / "e3")))
    speculation = SpeculationConfig(
        draft_heads=names, expansion=(2, 1), always=True, max_num_nodes=4
    )
    config = dataclasses.replace(
        own_config, speculation=speculation, max_num_tokens_per_step=11, max_num_running=3
    )
    rng = random.Random(f"window {seed}")
    prompt = tuple(rng.randrange(2, 260) for _ in range(20))
    plain = LLMEngine(dataclasses.replace(own_config, max_num_running=3), own)
    expected = [_answer(plain, prompt, temperature) for temperature in (0.0, 0.8)]
    drafters = load_heads(config, own)
    engine = LLMEngine(config, own, drafters=drafters)
    begins: set[int] = set()
    real = EagleHead.see

    def see(head: EagleHead, computed: Sequence[Computed]) -> None:
        real(head, computed)
        begins.update(window.first for window in head._windows.values())

    monkeypatch.setattr(EagleHead, "see", see)
    for temperature, answer, first in zip((0.0, 0.8), expected, (0, 16), strict=True):
        begins.clear()
        assert _answer(engine, prompt, temperature) == answer
        assert begins == {first}
    assert engine.metrics().num_guessed_tokens > 8
    assert engine._speculator is not None and not engine._speculator._roster.failed


def _answer(engine: LLMEngine, prompt: tuple[int, ...], temperature: float) -> list[int]:
    sampling = Sampling(max_tokens=8, temperature=temperature, seed=5, ignore_eos=True)
    engine.submit(Request(f"at {temperature}", prompt, sampling, hasher()))
    token_ids = tokens_of(all_events(engine))
    assert len(token_ids) == 8
    return token_ids


def test_a_warm_up_says_nothing_of_what_the_head_takes(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the one that measures the largest step."""
    monkeypatch.setattr(model, "_is_body_checked", False)
    model.attach(model.make_memory(2))
    for blocks in ((), (0,)):
        model.forward(Batch((3, 4), (Span(0, 2, blocks),), (1,), True, True, LAYERS))
        assert set(model.layer_inputs()) == set(LAYERS)
        assert model._is_body_checked is bool(blocks)  # type: ignore[attr-defined]
