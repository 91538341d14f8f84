"""EAGLE-3 heads as they are published are loaded, whatever they leave out; those that do not go
with the model, or with themselves, are refused in one line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.errors import LoadError
from engine.models.interface import LoadedModel
from engine.models.transformers_backend import TransformersModel
from engine.request import Request, Sampling
from engine.speculation.config import SpeculationConfig
from engine.speculation.drafter import Task
from engine.speculation.heads.eagle import EagleHead
from engine.speculation.heads.eagle3_network import Eagle3Network, chosen_layers
from engine.speculation.heads.hidden import Computed
from engine.speculation.heads.load import load_heads
from engine.speculation.tree import TokenTree
from tests.harness.engines import all_events, hasher, tokens_of
from tests.harness.models import Tiny
from tests.harness.published_eagle3 import (
    EAGLE3_CONFIG,
    IDS,
    LAYERS,
    NUM_DRAFTED,
    eagle3_tensors,
    save_eagle3,
)
from tests.harness.published_heads import HIDDEN, VOCAB, Tensors, save

Change = Callable[[Tensors], None]


def _load(config: EngineConfig, model: LoadedModel, folder: Path) -> EagleHead:
    speculation = SpeculationConfig(draft_heads=(str(folder),))
    (head,) = load_heads(dataclasses.replace(config, speculation=speculation), model)
    assert isinstance(head, EagleHead)
    return head


def _network(head: EagleHead) -> Eagle3Network:
    assert isinstance(head._network, Eagle3Network)
    return head._network


def _set(key: str, value: torch.Tensor) -> Change:
    return lambda tensors: tensors.update({key: value})


def _without(*keys: str) -> Change:
    def change(tensors: Tensors) -> None:
        for key in keys:
            del tensors[key]

    return change


def _add(key: str, index: int, number: int) -> Change:
    def change(tensors: Tensors) -> None:
        tensors[key][index] += number

    return change


def _flip(tensors: Tensors) -> None:
    tensors["t2d"] = ~tensors["t2d"]


def _twice(tensors: Tensors) -> None:
    """Its second token is its first."""
    tensors["d2t"][1] = tensors["d2t"][0] - 1


def _nothing(tensors: Tensors) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "fields", "problem"),
    [
        (
            _set("fc.weight", torch.zeros(HIDDEN, 2 * HIDDEN)),
            {},
            r"fc.weight is \[48, 96\], and must be \[48, 144\]",
        ),
        (
            _set("midlayer.self_attn.q_proj.weight", torch.zeros(24, HIDDEN)),
            {},
            r"q_proj.weight is \[24, 48\], and must be \[24, 96\]",
        ),
        (_without("midlayer.hidden_norm.weight"), {}, "no tensor midlayer.hidden_norm.weight"),
        (_without("norm.weight"), {}, "no tensor norm.weight"),
        (_without("lm_head.weight"), {}, "no tensor lm_head.weight"),
        (_without("d2t"), {}, "no tensor d2t"),
        (_set("layers.1.mlp", torch.zeros(1)), {}, "does not have, first layers.1.mlp"),
        (_nothing, {"draft_vocab_size": 91}, r"lm_head.weight is \[90, 48\], and must be \[91"),
        (_nothing, {"draft_vocab_size": 261}, r"lm_head.weight is \[90, 48\], and must be \[261"),
        (_set("d2t", torch.zeros(89).long()), {}, r"d2t is \[89\], and must be \[90\]"),
        (_set("d2t", torch.zeros(90)), {}, "d2t is of torch.float32, and must be of torch.int64"),
        (_add("d2t", 89, VOCAB), {}, "tokens in d2t that this model does not have"),
        (_add("d2t", 0, -VOCAB), {}, "tokens in d2t that this model does not have"),
        (_twice, {}, "one token of this model twice in d2t"),
        (_set("t2d", torch.zeros(90).bool()), {}, r"t2d is \[90\], and must be \[260\]"),
        (_set("t2d", torch.zeros(VOCAB)), {}, "t2d is of torch.float32, and must be of torch.bool"),
        (_flip, {}, "other tokens in t2d than in d2t: 260 differ"),
        (_nothing, {"vocab_size": 300}, "vocab_size 300, this model has 260"),
        (_nothing, {"target_hidden_size": 64}, "target_hidden_size 64, this model has 48"),
        (_nothing, {"hidden_size": 50}, r"fc.weight is \[48, 144\], and must be \[50, 144\]"),
        (_nothing, {"num_hidden_layers": 2}, "num_hidden_layers 2; EAGLE-3 heads .* with one"),
        (_nothing, {"head_dim": 7}, "4 heads and 2 of keys over hidden_size 48"),
        (_nothing, {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (_nothing, {"sliding_window": 512}, "sliding_window 512"),
        (_nothing, {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state false"),
        (_nothing, {IDS: [0, 1]}, r"\[0, 1\]; three are needed, low to high, of this model's 3"),
        (_nothing, {IDS: [0, 1, 3]}, "three are needed, low to high, of this model's 3 layers"),
        (_nothing, {IDS: [1, 0, 2]}, "three are needed, low to high"),
        (_nothing, {IDS: [0, 1, True]}, "not a list of layers"),
        (_nothing, {"eagle_config": {IDS: [0, 1, 2]}}, r"\[0, 1, 2\]; three are needed"),
        (_nothing, {IDS: None}, "this one has 3: at least 7 are needed, or eagle_aux_hidden"),
    ],
)
def test_eagle3_heads_of_another_form_are_refused(
    *,
    config: EngineConfig,
    model: LoadedModel,
    tmp_path: Path,
    change: Change,
    fields: dict[str, Any],
    problem: str,
) -> None:
    tensors = eagle3_tensors()
    change(tensors)
    with pytest.raises(LoadError, match=rf"draft_heads: e3.*{problem}"):
        _load(config, model, save_eagle3(tmp_path / "e3", tensors, **fields))


def test_layers_are_counted_as_the_published_code_counts_them() -> None:
    def chosen(num_layers: int, **config: Any) -> tuple[int, ...]:
        checkpoint: Any = SimpleNamespace(config=config, name="e3")
        return chosen_layers(checkpoint, num_layers)

    assert chosen(32) == (2, 16, 29)
    assert chosen(7, eagle_config={"use_aux_hidden_state": True}) == (2, 3, 4)
    assert chosen(36, eagle_config={IDS: [1, 17, 32]}) == chosen(36) == (2, 18, 33)
    assert chosen(36, **{IDS: [1, 17, 32]}) == (1, 17, 32)
    with pytest.raises(LoadError, match="has 6: at least 7 are needed"):
        chosen(6)
    with pytest.raises(LoadError, match="keeps its layers where they cannot be had"):
        chosen(0)


def _guess(head: EagleHead) -> TokenTree:
    """After the same three tokens."""
    generator = torch.Generator().manual_seed(3)
    hidden, *inputs = torch.randn(4, 3, HIDDEN, generator=generator)
    task = Task(("r", 0), [5, 6, 7, 8], 1, Sampling(max_tokens=9), 0, 9)
    layers = dict(zip(LAYERS, inputs, strict=True))
    head.see([Computed(task.key, task.token_ids, 0, hidden, layers)])
    (draft,) = head.propose([task])
    head.check_integrity()
    assert len(draft.tree) > 4
    return draft.tree


def test_the_speculators_layout_is_the_same_head(
    config: EngineConfig, model: LoadedModel, tmp_path: Path
) -> None:
    tensors = eagle3_tensors()
    published = save_eagle3(tmp_path / "p", tensors, norm_before_residual=True)
    top = {"draft_vocab_size": NUM_DRAFTED, IDS: list(LAYERS), "norm_before_residual": True}
    nested = {name: value for name, value in EAGLE3_CONFIG.items() if name not in top}
    renamed = {key.replace("midlayer.", "layers.0."): value for key, value in tensors.items()}
    renamed["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN)
    of_library = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "target_hidden_size": None,
        "transformer_layer_config": nested,
    }
    other = _load(config, model, save(tmp_path / "s", renamed, of_library | top))
    same = renamed | {"embed_tokens.weight": model.ends.embed.weight.detach()}  # type: ignore[union-attr]
    one = _load(config, model, save(tmp_path / "t", same, of_library | top))
    expected = _guess(_load(config, model, published))
    assert _guess(one) == expected
    # Its own embedding is read where it is another one, and takes no room where it is not.
    assert _guess(other) != expected
    assert _network(one)._embed is model.ends.embed  # type: ignore[union-attr]


def test_what_a_head_leaves_out_is_the_targets(
    config: EngineConfig, model: LoadedModel, target: Tiny, tmp_path: Path
) -> None:
    """Of the whole vocabulary, with the target's own head; maps would say nothing."""
    tensors = eagle3_tensors(num_drafted=VOCAB)
    assert tensors["t2d"].all() and not tensors["d2t"].any()
    own_head = target.oracle.get_output_embeddings().weight.detach()
    with_all = tensors | {"lm_head.weight": own_head}
    with_none = {key: value for key, value in tensors.items() if key not in ("d2t", "t2d")}
    del with_none["lm_head.weight"]
    trees: list[TokenTree] = []
    for name, given in (("all", with_all), ("none", with_none)):
        folder = save_eagle3(tmp_path / name, given, draft_vocab_size=None)
        head = _load(config, model, folder)
        assert _network(head).token_ids is None
        trees.append(_guess(head))
    assert trees[0].token_ids == trees[1].token_ids
    assert trees[0].chances == pytest.approx(trees[1].chances, abs=1e-4)


def test_llama3s_rope_is_transformers_own(
    config: EngineConfig, model: LoadedModel, tmp_path: Path
) -> None:
    """Low frequencies are divided, high ones are not."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    rope = _network(
        _load(config, model, save_eagle3(tmp_path / "e3", rope_scaling=scaling))
    ).own_layers.rope
    plain = 3000.0 ** (-torch.arange(0, 6, 2) / 6)
    assert rope.scale == 1.0
    assert rope.frequencies[0] == plain[0]
    torch.testing.assert_close(rope.frequencies[2], plain[2] / 8)


def test_a_model_that_does_not_leave_them_costs_guesses_alone(
    config: EngineConfig,
    model: LoadedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = save_eagle3(tmp_path / "e3")
    speculation = SpeculationConfig(draft_heads=(str(folder),), always=True)
    config = dataclasses.replace(config, num_blocks=20, speculation=speculation)
    (head,) = load_heads(config, model)
    engine = LLMEngine(config, model, drafters=[head])
    monkeypatch.setattr(TransformersModel, "layer_inputs", lambda _: {})
    sampling = Sampling(max_tokens=5, ignore_eos=True)
    engine.submit(Request("r", (5, 6, 7, 8), sampling, hasher()))
    token_ids = tokens_of(all_events(engine))
    assert len(token_ids) == 5
    assert engine._speculator is not None and engine._speculator._roster.failed == {0}
    head.check_integrity()
