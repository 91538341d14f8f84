"""EagleProposer: what a head proposes is what the papers say of its weights, whatever tokens were
seen in whatever steps, whatever was proposed beside, and whatever was lost meanwhile. EAGLE-3 heads
as they are published are loaded, whatever they leave out; those that do not fit the model, or
themselves, are refused in one line. The inputs of a target's layers are kept for every token that a
head needs, on transformers' code and on our own decoder, and are what transformers says."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from dataclasses import replace as with_fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.batch import Batch, TokenSpan
from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.errors import LoadError
from engine.models.interface import LoadedModel
from engine.models.loader import load_model
from engine.models.transformers_backend import TransformersModel
from engine.request import Request, Sampling
from engine.speculation.config import SpeculationConfig
from engine.speculation.eagle import Eagle3Network, EagleProposer, choose_aux_layers
from engine.speculation.loader import load_heads
from engine.speculation.proposer import DraftTask, HiddenStates
from engine.speculation.token_tree import TokenTree
from tests.harness.engines import all_events, hasher, tokens_of
from tests.harness.models import FAMILIES, Tiny, save
from tests.harness.published_eagle3 import (
    EAGLE3_CONFIG,
    IDS,
    LAYERS,
    NUM_DRAFTED,
    eagle3_feature,
    eagle3_logits,
    eagle3_out,
    eagle3_tensors,
    save_eagle3,
)
from tests.harness.published_heads import (
    HIDDEN,
    VOCAB,
    Tensors,
    eagle_features,
    eagle_tensors,
    save_eagle,
)
from tests.harness.published_heads import save as save_tensors
from tests.unit.engine.speculation.head_trees import (
    Scores,
    check_tree,
    load_head,
    make_task,
    noisy_scores,
)


@dataclass
class _Sequence:
    """One that a target computes, step by step."""

    task: DraftTask
    hidden: torch.Tensor
    """[n, hidden] of all its tokens, as if computed."""
    num_computed: int
    first: int
    """Where the head's window begins."""
    layers: dict[int, torch.Tensor]
    """[n, hidden] by layer: what went into it."""
    is_new: bool = True
    skips: bool = False
    """One token, in its second step: computed elsewhere."""

    def computed(self, start: int, end: int) -> HiddenStates:
        layers = {layer: rows[start:end] for layer, rows in self.layers.items()}
        known = self.task.token_ids[: end + 1]
        return HiddenStates(self.task.key, known, start, self.hidden[start:end], layers)


def _steps(rng: random.Random, one: _Sequence) -> Iterator[int]:
    left = len(one.task.token_ids) - 1 - one.num_computed
    while left:
        count = rng.randint(1, left)
        if one.skips:
            count = max(2, left // 2)
        left -= count
        yield count


@dataclass(frozen=True)
class _Kind:
    """A head's format, and what the paper says of one."""

    save: Callable[[Path], Path]
    features: Callable[[_Sequence], torch.Tensor]
    """[n, own size] of all that was computed."""
    out: Callable[..., torch.Tensor]
    """(embedding, token ids, features, first) -> [n, own size] that come out."""
    logits: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """(target's head, one row that came out) -> [V]"""


def _eagle(num_layers: int) -> _Kind:
    tensors = eagle_tensors(num_layers)
    return _Kind(
        lambda folder: save_eagle(folder, tensors, num_hidden_layers=num_layers),
        lambda one: one.hidden,
        lambda *given: eagle_features(tensors, *given, num_layers),
        lambda own_head, row: own_head @ row,
    )


def _eagle3(own_size: int, *, adds_normed: bool) -> _Kind:
    """With sizes and an embedding of its own, if its size is not the target's."""
    tensors = eagle3_tensors(own_size=own_size)
    own = tensors.get("embed_tokens.weight")

    def out(embedding: torch.Tensor, *given: Any) -> torch.Tensor:
        embedding = embedding if own is None else own
        return eagle3_out(tensors, embedding, *given, adds_normed=adds_normed)

    fields = {"hidden_size": own_size, "norm_before_residual": adds_normed}
    return _Kind(
        lambda folder: save_eagle3(folder, tensors, **fields),
        lambda one: eagle3_feature(tensors, one.layers),
        out,
        lambda _, row: eagle3_logits(tensors, row),
    )


@pytest.mark.parametrize(
    ("kind", "max_num_tokens"),
    [
        (_eagle(1), 64),
        (_eagle(2), 3),
        (_eagle3(HIDDEN, adds_normed=False), 64),
        (_eagle3(30, adds_normed=True), 3),
    ],
    ids=["eagle", "eagle of two layers", "eagle3", "eagle3 of its own size"],
)
def test_an_eagle_head_guesses_by_its_window(
    *,
    config: EngineConfig,
    model: LoadedModel,
    target: Tiny,
    tmp_path: Path,
    rng: random.Random,
    numbers: torch.Generator,
    kind: _Kind,
    max_num_tokens: int,
    scale: Callable[[int], int],
) -> None:
    """Hidden states come in pieces, from any place on; one sequence lacks one amid them, and its
    window begins behind."""
    folder = kind.save(tmp_path / "e")
    small = with_fields(config, max_num_tokens_per_step=max_num_tokens, max_num_running=3)
    head = load_head(small, model, folder, expansion=(2, 2, 1))
    assert isinstance(head, EagleProposer)
    embedding = target.oracle.get_input_embeddings().weight.detach()
    own_head = target.oracle.get_output_embeddings().weight.detach()
    for round_index in range(scale(20)):
        sequences = [_sequence(f"{round_index} {index}", rng, numbers) for index in range(3)]
        lacking = sequences[0] = _sequence(f"{round_index} 0", rng, numbers, num_tokens=9)
        lacking.num_computed, lacking.first, lacking.skips = 0, 0, True
        waiting = [(one, iter(list(_steps(rng, one)))) for one in sequences]
        while waiting:
            seen: list[HiddenStates] = []
            for one, steps in list(waiting):
                count = next(steps, None)
                if count is None:
                    waiting.remove((one, steps))
                    continue
                if one.skips and not one.is_new:
                    one.num_computed += 1
                    one.first, count, one.skips = one.num_computed, count - 1, False
                one.is_new = False
                start, end = one.num_computed, one.num_computed + count
                one.num_computed = end
                seen.append(one.computed(start, end))
            head.feed_hidden_states(seen)
            head.check_integrity()
        tasks = [one.task for one in sequences]
        assert lacking.first == 5
        for one, draft in zip(sequences, head.propose(tasks), strict=True):
            assert len(draft.tree) == 2 + 4 + 4
            scores = _eagle_scores(one, kind, embedding, own_head)
            check_tree(draft.tree, scores, (2, 2, 1))
        again = head.propose(tasks[:1])[0].tree  # nothing of a tree was kept
        assert again.token_ids == head.propose(tasks)[0].tree.token_ids
        for task in tasks[1:]:
            head.forget(task.key)
        head.check_integrity()


def _sequence(
    name: str, rng: random.Random, numbers: torch.Generator, *, num_tokens: int = 0
) -> _Sequence:
    num_tokens = num_tokens or rng.randint(3, 30)
    sampling = Sampling(max_tokens=9, temperature=rng.choice([0.0, 0.8]), seed=num_tokens)
    token_ids = [rng.randrange(VOCAB) for _ in range(num_tokens)]
    first = rng.randint(0, num_tokens - 2)
    hidden, *inputs = torch.randn(4, num_tokens - 1, HIDDEN, generator=numbers)
    task = make_task(name, token_ids, num_nodes=20, sampling=sampling)
    return _Sequence(task, hidden, first, first, dict(zip(LAYERS, inputs, strict=True)))


def _eagle_scores(
    one: _Sequence, kind: _Kind, embedding: torch.Tensor, own_head: torch.Tensor
) -> Scores:
    def scores(path: tuple[int, ...]) -> torch.Tensor:
        token_ids = [*one.task.token_ids[one.first + 1 :]]
        features = kind.features(one)[one.first :]
        for token_id in (*path, None):
            out = kind.out(embedding, token_ids, features, one.first)
            if token_id is not None:
                token_ids.append(token_id)
                features = torch.cat((features, out[-1:]))
        return noisy_scores(kind.logits(own_head, out[-1]), one.task, len(path))

    return scores


def test_an_eagle_head_without_room_begins_anew(
    config: EngineConfig, model: LoadedModel, tmp_path: Path, numbers: torch.Generator
) -> None:
    """One context window of blocks for two sequences: who loses its blocks guesses again when it
    has seen more, and who was evicted while it guessed gives no guess."""
    small = with_fields(config, max_num_running=1)
    head = load_head(small, model, save_eagle(tmp_path / "e"), expansion=(2, 1))
    assert isinstance(head, EagleProposer)
    sampling = Sampling(max_tokens=9)
    hidden = torch.randn(40, HIDDEN, generator=numbers)
    token_ids = list(range(1, 42))

    def see(name: str, start: int, end: int) -> DraftTask:
        known = token_ids[: end + 1]
        head.feed_hidden_states([HiddenStates((name, 0), known, start, hidden[start:end])])
        return make_task(name, known, num_nodes=9, sampling=sampling)

    first = see("first", 0, 38)
    assert len(head.propose([first])[0].tree) == 4
    second = see("second", 0, 38)
    assert len(head.propose([second])[0].tree) == 4
    head.check_integrity()
    assert not len(head.propose([first])[0].tree)
    first = see("first", 38, 39)
    # A window of one entry, which fits beside nobody: only one of two can have blocks in a step.
    trees = [draft.tree for draft in head.propose([first, second])]
    head.check_integrity()
    assert sorted(len(tree) for tree in trees) == [0, 4]
    assert len(head.propose([see("first", 39, 40)])[0].tree) == 4


Change = Callable[[Tensors], None]


def _load_eagle3(config: EngineConfig, model: LoadedModel, folder: Path) -> EagleProposer:
    speculation = SpeculationConfig(draft_heads=(str(folder),))
    (head,) = load_heads(dataclasses.replace(config, speculation=speculation), model)
    assert isinstance(head, EagleProposer)
    return head


def _network(head: EagleProposer) -> Eagle3Network:
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
        _load_eagle3(config, model, save_eagle3(tmp_path / "e3", tensors, **fields))


def test_layers_are_counted_as_the_published_code_counts_them() -> None:
    def chosen(num_layers: int, **config: Any) -> tuple[int, ...]:
        checkpoint: Any = SimpleNamespace(config=config, name="e3")
        return choose_aux_layers(checkpoint, num_layers)

    assert chosen(32) == (2, 16, 29)
    assert chosen(7, eagle_config={"use_aux_hidden_state": True}) == (2, 3, 4)
    assert chosen(36, eagle_config={IDS: [1, 17, 32]}) == chosen(36) == (2, 18, 33)
    assert chosen(36, **{IDS: [1, 17, 32]}) == (1, 17, 32)
    with pytest.raises(LoadError, match="has 6: at least 7 are needed"):
        chosen(6)
    with pytest.raises(LoadError, match="keeps its layers where they cannot be had"):
        chosen(0)


def _draft_tree(head: EagleProposer) -> TokenTree:
    """After the same three tokens."""
    generator = torch.Generator().manual_seed(3)
    hidden, *inputs = torch.randn(4, 3, HIDDEN, generator=generator)
    task = DraftTask(("r", 0), [5, 6, 7, 8], 1, Sampling(max_tokens=9), 0, 9)
    layers = dict(zip(LAYERS, inputs, strict=True))
    head.feed_hidden_states([HiddenStates(task.key, task.token_ids, 0, hidden, layers)])
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
    other = _load_eagle3(config, model, save_tensors(tmp_path / "s", renamed, of_library | top))
    same = renamed | {"embed_tokens.weight": model.ends.embed.weight.detach()}  # type: ignore[union-attr]
    one = _load_eagle3(config, model, save_tensors(tmp_path / "t", same, of_library | top))
    expected = _draft_tree(_load_eagle3(config, model, published))
    assert _draft_tree(one) == expected
    # Its own embedding is read where it is another one, and takes no room where it is not.
    assert _draft_tree(other) != expected
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
        head = _load_eagle3(config, model, folder)
        assert _network(head).token_ids is None
        trees.append(_draft_tree(head))
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
        _load_eagle3(config, model, save_eagle3(tmp_path / "e3", rope_scaling=scaling))
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
    engine = LLMEngine(config, model, proposers=[head])
    monkeypatch.setattr(TransformersModel, "layer_inputs", lambda _: {})
    sampling = Sampling(max_tokens=5, ignore_eos=True)
    engine.submit(Request("r", (5, 6, 7, 8), sampling, hasher()))
    token_ids = tokens_of(all_events(engine))
    assert len(token_ids) == 5
    assert engine._speculation is not None and engine._speculation.failed_proposers == {0}
    head.check_integrity()


KEPT_LAYERS = (0, 2)
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


def _two_texts(model: LoadedModel) -> tuple[Batch, Texts]:
    """A prompt, a tree and a decode in one step, and its rows' texts."""
    model.attach(model.make_memory(24))
    before = [7, 8, 9, 10, 11, 12, 13, 14, 15]
    model.forward(Batch(tuple(before), (TokenSpan(0, 9, (0, 1)),), (8,)))
    model.forward(Batch(tuple(before), (TokenSpan(0, 9, (3, 4)),), (8,)))
    spans = (
        TokenSpan(0, 3, (8,)),
        TokenSpan(9, 4, (0, 1), branches=(-1, 0, -1)),
        TokenSpan(9, 1, (3, 4)),
    )
    texts: Texts = [([3, 4, 5], 3)]
    texts += [([*before, *own], 1) for own in ([20], [20, 21], [20, 21, 22], [20, 23], [24])]
    return Batch(
        (3, 4, 5, 20, 21, 22, 23, 24), spans, (2, 3, 4, 5, 6, 7), True, True, KEPT_LAYERS
    ), texts


def _oracle(tiny: Tiny, texts: Texts) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """What goes into each of KEPT_LAYERS, and into the head, row by row."""
    with torch.inference_mode():
        found = [
            (tiny.oracle.base_model(torch.tensor([text]), output_hidden_states=True), -count)
            for text, count in texts
        ]
    inputs = {
        layer: torch.cat([one.hidden_states[layer][0, first:] for one, first in found])
        for layer in KEPT_LAYERS
    }
    return inputs, torch.cat([one.last_hidden_state[0, first:] for one, first in found])


def test_what_goes_into_layers_is_what_transformers_says(pair: tuple[LoadedModel, Tiny]) -> None:
    model, tiny = pair
    batch, texts = _two_texts(model)
    model.forward(batch)
    inputs, every = _oracle(tiny, texts)
    assert set(model.layer_inputs()) == set(KEPT_LAYERS)
    for layer in KEPT_LAYERS:
        torch.testing.assert_close(model.layer_inputs()[layer], inputs[layer], rtol=1e-3, atol=1e-3)
    kept = model.every_hidden()
    assert kept is not None
    torch.testing.assert_close(kept, every, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(model.hidden(), every[2:], rtol=1e-3, atol=1e-3)
    model.forward(dataclasses.replace(batch, wants_every_hidden=False, wants_layers=()))
    assert not model.layer_inputs() and model.every_hidden() is None
    torch.testing.assert_close(model.hidden(), every[2:], rtol=1e-3, atol=1e-3)
    assert model.ends is not None and model.ends.num_layers == 3


def test_our_decoder_keeps_all_rows_of_a_long_prompt(own: LoadedModel, qwen3: Tiny) -> None:
    """Its last layer would compute but those that are drawn from."""
    own.attach(own.make_memory(24))
    prompt = tuple((7 * i + 3) % 260 for i in range(80))
    plain = Batch(
        (*prompt, 9), (TokenSpan(0, 80, tuple(range(10))), TokenSpan(0, 1, (10,))), (79, 80)
    )
    expected = own.forward(plain).clone()
    logits = own.forward(
        dataclasses.replace(
            plain, wants_hidden=True, wants_every_hidden=True, wants_layers=KEPT_LAYERS
        )
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
    batch, _ = _two_texts(model)
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
    proposers = load_heads(config, own)
    engine = LLMEngine(config, own, proposers=proposers)
    begins: set[int] = set()
    real = EagleProposer.feed_hidden_states

    def see(head: EagleProposer, computed: Sequence[HiddenStates]) -> None:
        real(head, computed)
        begins.update(window.first for window in head._windows.values())

    monkeypatch.setattr(EagleProposer, "feed_hidden_states", see)
    for temperature, answer, first in zip((0.0, 0.8), expected, (0, 16), strict=True):
        begins.clear()
        assert _answer(engine, prompt, temperature) == answer
        assert begins == {first}
    assert engine.metrics().num_guessed_tokens > 8
    assert engine._speculation is not None and not engine._speculation.failed_proposers


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
        model.forward(Batch((3, 4), (TokenSpan(0, 2, blocks),), (1,), True, True, KEPT_LAYERS))
        assert set(model.layer_inputs()) == set(KEPT_LAYERS)
        assert model._is_body_checked is bool(blocks)  # type: ignore[attr-defined]
