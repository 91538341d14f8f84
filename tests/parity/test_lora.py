"""LoRA on the fly == LoRA merged into the weights (W + scale * B @ A) of unmodified transformers.

Several adapters and no adapter in one ragged batch, prompts in chunks of random sizes, decodes
beside them, on every way that linear layers run: fused and packed, fused and plain, packed in
place, and modelling code untouched; and on every model type that is served.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.overrides import TorchFunctionMode

from checkpoints.architectures import SERVED
from engine.batch import Batch, TokenSpan
from engine.config import EngineConfig
from engine.errors import InvalidAdapter
from engine.kv.memory import KvMemory
from engine.lora.adapter import WEIGHTS
from engine.models import loader, transformers_backend
from engine.models.self_check import VOCAB_SIZE, random_instance
from engine.models.transformers_backend import TransformersModel, find_sites
from tests.conftest import LONG, SESSION_SEED, third
from tests.harness.adapters import ALL, linear_names, merged, save_adapter
from tests.harness.models import FAMILIES, save, small_config

MAX_RELATIVE_ERROR = 1e-4
"""L2 of float32 logits, ours against merged weights. Measured 3e-7 to 6e-6, with two types of MoE
at 3e-5 (8e-6 without adapters); without the delta of one module it is above 1e-2."""

WAYS = ["packed", "plain", "untouched"]
NUM_TYPES = 6
"""Of the model types that are not fused, in a run that is not the full one."""


def _types() -> list[str]:
    names = sorted(set(SERVED) - _WITHOUT_LINEARS)
    return names if LONG else sorted(random.Random(SESSION_SEED).sample(names, NUM_TYPES))


_WITHOUT_LINEARS = {"gpt2", "gpt-sw3"}
"""Their projections are no nn.Linear (Conv1D): adapters are refused by name."""


def _adapters(folder: Path, oracle: Any, seed: int) -> list[Path]:
    """Three unlike ones: one kind of module; the others, ranks by pattern; all, of one layer."""
    pattern = {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {"down_proj": 3.0}}
    return [
        save_adapter(folder / "a1", oracle, seed, targets=["q_proj"], rank=8, use_rslora=True),
        save_adapter(folder / "a2", oracle, seed + 1, targets=ALL[1:], **pattern),
        save_adapter(folder / "a3", oracle, seed + 2, layers=[1], rank=3),
    ]


def _load(path: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> TransformersModel:
    if way != "packed":
        monkeypatch.setattr(transformers_backend, "unavailable_reason", lambda *_: "a test's wish")
    if way == "untouched":
        monkeypatch.setattr(transformers_backend, "fuse", lambda *_, **__: ())
    return loader.load_model(EngineConfig(model=str(path), device="cpu"))


MIN_ROUTING_MARGIN = 1e-4
"""Of each choice of experts in a case, as a share of the scores' spread. Two ways of summing differ
by some 1e-6 of it: below that both choices are right, and the answers differ by a whole expert."""


MAX_DRAWS = 20
"""Some types choose among experts that were masked, all alike, whatever the prompt: no harm."""


class _RoutingMargin(TorchFunctionMode):
    """How near a tie any `torch.topk` inside was: the last value taken against the first left."""

    def __init__(self) -> None:
        super().__init__()
        self.narrowest = math.inf

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.topk, torch.Tensor.topk):
            count = result[0].shape[-1]
            ordered = args[0].sort(dim=-1, descending=True)[0]
            if count < ordered.shape[-1]:
                margin = (ordered[..., count - 1] - ordered[..., count]) / (
                    ordered[..., 0] - ordered[..., -1]
                )
                self.narrowest = min(self.narrowest, float(margin.min()))
        return result


class Case:
    """A request and the logits that merged weights give after each of its tokens."""

    def __init__(
        self, rng: random.Random, oracles: list[Any], first_block: int, block_size: int
    ) -> None:
        self.slot = rng.randrange(len(oracles))
        max_tokens = 6 * block_size if block_size > 8 else 50
        length = rng.randint(1, max_tokens)
        for _ in range(MAX_DRAWS):
            self.tokens = [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]
            with torch.inference_mode(), _RoutingMargin() as routing:
                output = oracles[self.slot](torch.tensor([self.tokens]), use_cache=False)
            if routing.narrowest >= MIN_ROUTING_MARGIN:
                break
        self.logits = output.logits[0]
        num_blocks = -(-length // block_size)
        self.blocks = tuple(range(first_block, first_block + num_blocks))
        self.done = 0


def _batch(rng: random.Random, cases: list[Case], block_size: int) -> tuple[Batch, list[Case]]:
    """Some of what is left: chunks of any size, single tokens like decodes among them."""
    open_cases = [case for case in cases if case.done < len(case.tokens)]
    chosen = rng.sample(open_cases, rng.randint(1, len(open_cases)))
    spans: list[TokenSpan] = []
    row: list[int] = []
    draws: list[int] = []
    for case in chosen:
        left = len(case.tokens) - case.done
        count = min(left, rng.choice([1, 1, 2, 7, 40]))
        end = case.done + count
        spans.append(TokenSpan(case.done, count, case.blocks[: -(-end // block_size)], case.slot))
        row += case.tokens[case.done : end]
        draws.append(len(row) - 1)
        case.done = end
    return Batch(tuple(row), tuple(spans), tuple(draws)), chosen


def _run(
    model: TransformersModel,
    oracles: list[Any],
    rng: random.Random,
    num_cases: int,
    *,
    is_row_alone: bool = True,
) -> None:
    """One workload. `is_row_alone`: the base model computes each row without its neighbours."""
    cases: list[Case] = []
    for _ in range(num_cases):
        first_block = sum(len(case.blocks) for case in cases)
        cases.append(Case(rng, oracles, first_block, model.layout.block_size))
    num_blocks = sum(len(case.blocks) for case in cases)
    memory, without = (KvMemory(model.layout, num_blocks, "cpu") for _ in range(2))
    changes: dict[int, float] = {}
    while any(case.done < len(case.tokens) for case in cases):
        batch, chosen = _batch(rng, cases, model.layout.block_size)
        model.attach(memory)
        logits = model.forward(batch)
        spans = tuple(span._replace(adapter=0) for span in batch.spans)
        model.attach(without)
        base = model.forward(dataclasses.replace(batch, spans=spans))
        for case, got, plain in zip(chosen, logits, base, strict=True):
            wanted = case.logits[case.done - 1]
            error = float((got - wanted).norm() / wanted.norm())
            assert error < MAX_RELATIVE_ERROR, (case.slot, case.done, error)
            if case.slot == 0 and is_row_alone:
                assert torch.equal(got, plain), "a neighbour's adapter changed a base row"
            if case.slot and case.done > 2:  # one token attends to itself whatever the query
                change = float((got - plain).norm() / plain.norm())
                changes[case.slot] = max(changes.get(case.slot, 0.0), change)
    assert all(change > 0.01 for change in changes.values()), changes
    model.adapters.check_integrity()


@pytest.mark.parametrize(
    ("family", "way"),
    third(
        [
            *((family, way) for family in ("llama", "qwen2") for way in WAYS),
            *((family, "packed") for family in ("mistral-window", "qwen3")),
            ("llama-tied-llama3-rope", "packed"),
        ]
    ),
)
@pytest.mark.timeout(300)
def test_on_the_fly_equals_merged(
    family: str,
    way: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    scale: Callable[[int], int],
) -> None:
    rng = random.Random(f"{seed} {family} {way}")
    oracle = save(FAMILIES[family](), tmp_path / "model", SESSION_SEED)
    folders = _adapters(tmp_path, oracle, rng.randrange(2**30))
    model = _load(tmp_path / "model", way, monkeypatch)
    model.attach(KvMemory(model.layout, 1, "cpu"))
    for index, folder in enumerate(folders):
        model.adapters.load(f"a{index}", folder)
        assert model.adapters.slot(f"a{index}") == index + 1
    oracles = [oracle, *(merged(oracle, folder) for folder in folders)]
    for _ in range(max(2, scale(20))):
        _run(model, oracles, rng, 8)


def test_bfloat16_is_within_its_own_rounding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Against merged float32 weights, as far off as the model without adapters is from its own."""
    oracle = save(FAMILIES["llama"](), tmp_path / "model", SESSION_SEED).to(torch.bfloat16).float()
    oracle.save_pretrained(tmp_path / "model")
    folder = save_adapter(tmp_path / "a", oracle, seed % 2**30, rank=8)
    model = loader.load_model(
        EngineConfig(model=str(tmp_path / "model"), device="cpu", dtype="bfloat16")
    )
    model.attach(KvMemory(model.layout, 8, "cpu"))
    model.adapters.load("a", folder)
    rng = random.Random(seed)
    tokens = tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(100))
    errors = {}
    for slot, reference in ((0, oracle), (1, merged(oracle, folder))):
        batch = Batch(tokens, (TokenSpan(0, 100, tuple(range(7)), slot),), tuple(range(100)))
        with torch.inference_mode():
            wanted = reference(torch.tensor([tokens])).logits[0]
        errors[slot] = float((model.forward(batch).float() - wanted).norm() / wanted.norm())
    assert errors[1] < 3 * errors[0] < 0.3, errors


@pytest.mark.parametrize("model_type", _types())
def test_every_model_type(model_type: str, tmp_path: Path, seed: int) -> None:
    """Adapters on every linear layer that can have one, and on half of them."""
    rng = random.Random(f"{seed} {model_type}")
    oracle = random_instance(small_config(model_type), SESSION_SEED)
    oracle.save_pretrained(tmp_path / "model")
    vocabulary = {str(token_id): token_id for token_id in range(oracle.config.vocab_size)}
    Tokenizer(WordLevel(vocabulary, unk_token="0")).save(str(tmp_path / "model/tokenizer.json"))
    config = EngineConfig(
        model=str(tmp_path / "model"),
        device="cpu",
        block_size=4,
        context_window=64,
        decoder="transformers",
    )
    model = loader.load_model(config)
    model.attach(KvMemory(model.layout, 1, "cpu"))
    sites = sorted(find_sites(model._model, model.forward))
    left_out = set(linear_names(oracle)) - set(sites)
    assert {name.rpartition(".")[2] for name in left_out} <= _NO_SITES, left_out
    halves = rng.sample(sites, len(sites) // 2)
    folders = [
        save_adapter(tmp_path / str(index), oracle, rng.randrange(2**30), targets=targets)
        for index, targets in enumerate((sites, halves))
    ]
    for folder in folders:
        model.adapters.load(folder.name, folder)
    oracles = [oracle, *(merged(oracle, folder) for folder in folders)]
    has_experts = any("expert" in name for name, _ in oracle.named_modules())
    _run(model, oracles, rng, 8, is_row_alone=not has_experts)


_NO_SITES = {
    *("lm_head", "output_projection", "decoder", "dense"),  # heads
    *("classifier", "router", "layer", "modality_router"),  # routers
    "kv_b_proj",  # its weight is moved to the queries' side (MLA)
}


@pytest.mark.parametrize("name", ["lm_head", "model.layers.0.mlp.gate", "model.embed_tokens"])
def test_what_is_no_site_is_refused_by_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    oracle = save(FAMILIES["llama"](), tmp_path / "model", SESSION_SEED)
    model = _load(tmp_path / "model", "packed", monkeypatch)
    model.attach(KvMemory(model.layout, 1, "cpu"))
    folder = save_adapter(tmp_path / "a", oracle, seed % 2**30, targets=["q_proj"])
    tensors = load_file(folder / WEIGHTS)
    for half, shape in (("A", (4, 48)), ("B", (4, 4))):
        tensors[f"base_model.model.{name}.lora_{half}.weight"] = torch.ones(shape)
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(InvalidAdapter, match=name):
        model.adapters.load("a", folder)
    model.adapters.check_integrity({})
