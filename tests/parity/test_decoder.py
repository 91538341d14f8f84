"""Our own decoder against transformers' code: sampled tokens, quantized caches, bfloat16, adapters;
and exact mode. (Greedy tokens: test_greedy.py.) On the GPU, too, where there is one: then these are
its kernels' numbers."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.batch import Batch, TokenSpan
from engine.config import EngineConfig
from engine.kv.memory import KvMemory
from engine.models.loader import load_model
from tests.harness.adapters import merged, save_adapter
from tests.harness.models import FAMILIES, VOCAB_SIZE, Tiny, save
from tests.parity.conftest import DEVICES, endless, prompts_of, random_sampling

EDGES = [1, 2, 15, 16, 17, 31, 32, 33, 48, 127, 129, 256, 300]
NUM_OUTPUT = 10


def _prompts(rng: random.Random, count: int) -> dict[str, list[int]]:
    lengths = rng.sample(EDGES, count)
    return prompts_of(rng, lengths)


@pytest.mark.parametrize("device", DEVICES)
def test_a_sampled_token_depends_on_its_request_alone(
    device: str,
    get_wide: Callable[[str], Tiny],
    load: Callable[..., Any],
    run: Callable[..., Any],
    seed: int,
) -> None:
    """The same draws as through transformers' code on CPU, whatever the batch."""
    rng = random.Random(f"{seed} own sampled")
    path = get_wide("qwen3").path
    prompts = prompts_of(rng, (rng.randint(1, 100) for _ in range(8)))
    requests = {name: (own, random_sampling(rng, NUM_OUTPUT)) for name, own in prompts.items()}
    expected = run(load(path, decoder="transformers"), requests)
    for budget in (512, 33):
        engine = load(path, decoder="own", device=device, max_num_tokens_per_step=budget,
                      max_num_running=min(budget, 5))  # fmt: skip
        assert run(engine, requests) == expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("kv_dtype", "kv_scale"),
    [("int8", "token_head"), ("fp8_e4m3", "tensor"), ("bfloat16", "tensor")],
)
def test_another_cache_dtype_gives_the_tokens_of_transformers_code(
    kv_dtype: str,
    kv_scale: str,
    device: str,
    get_wide: Callable[[str], Tiny],
    load: Callable[..., Any],
    run: Callable[..., Any],
    seed: int,
) -> None:
    rng = random.Random(f"{seed} own {kv_dtype}")
    path = get_wide("llama").path
    fields: dict[str, Any] = {
        "kv_dtype": kv_dtype,
        "kv_scale": kv_scale,
        "max_num_tokens_per_step": 40,
        "max_num_running": 4,
    }
    prompts = _prompts(rng, 4)
    requests = {name: (prompt, endless(NUM_OUTPUT)) for name, prompt in prompts.items()}
    expected = run(load(path, decoder="transformers", **fields), requests)
    engine = load(path, decoder="own", device=device, **fields)
    assert engine.model_info.decoder == "own"
    outputs = run(engine, requests)
    same = sum(outputs[name] == expected[name] for name in requests)
    assert same >= len(requests) - 1  # a number on a rounding edge may fall to either side


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["llama-tied-llama3-rope", "qwen3"])
def test_bfloat16_logits_are_those_of_transformers_code_but_for_rounding(
    family: str, device: str, tmp_path: Path
) -> None:
    config = FAMILIES[family]()
    config.head_dim = 16
    save(config, tmp_path, 2)
    logits = {}
    token_ids = tuple((31 * i + 5) % 259 + 1 for i in range(40))
    for decoder, where in (("transformers", "cpu"), ("own", device)):
        model = load_model(
            EngineConfig(model=str(tmp_path), device=where, dtype="bfloat16", decoder=decoder)
        )
        model.attach(KvMemory(model.layout, 4, where))
        first = model.forward(
            Batch(token_ids[:39], (TokenSpan(0, 39, (2, 0, 3)),), tuple(range(39)))
        )
        last = model.forward(Batch(token_ids[39:], (TokenSpan(39, 1, (2, 0, 3)),), (0,)))
        logits[decoder] = torch.cat((first, last)).float().cpu()
    error = (logits["own"] - logits["transformers"]).norm() / logits["transformers"].norm()
    assert float(error) < 0.1


@pytest.mark.parametrize("device", DEVICES)
def test_adapters_add_what_merged_weights_compute(
    device: str, get_wide: Callable[[str], Tiny], tmp_path: Path, seed: int
) -> None:
    """Two adapters and no adapter in one step, decodes beside chunks. Rows without keep every
    bit."""
    tiny = get_wide("qwen3")
    folders = {
        "a": save_adapter(tmp_path / "a", tiny.oracle, seed % 1000),
        "b": save_adapter(tmp_path / "b", tiny.oracle, seed % 999, targets=["v_proj", "up_proj"]),
    }
    oracles = {name: merged(tiny.oracle, folder) for name, folder in folders.items()}
    oracles[""] = tiny.oracle
    model = load_model(EngineConfig(model=str(tiny.path), device=device, decoder="own"))
    model.attach(KvMemory(model.layout, 40, device))
    for name, folder in folders.items():
        model.adapters.load(name, folder)
    rng = random.Random(seed)
    prompts = [[rng.randrange(2, VOCAB_SIZE) for _ in range(30)] for _ in range(5)]
    names = ["a", "", "b", "a", ""]
    cuts = [29, 29, 29, 10, 20]  # the second step: three decodes, two chunks

    def logits(names: list[str]) -> list[torch.Tensor]:
        found: list[list[torch.Tensor]] = [[] for _ in prompts]
        for begins, ends in (([0] * 5, cuts), (cuts, [30] * 5)):
            spans = tuple(
                TokenSpan(begin, end - begin, (2 * i, 2 * i + 1)[: -(-end // 16)],
                     model.adapters.slot(name))
                for i, (name, begin, end) in enumerate(zip(names, begins, ends, strict=True))
            )  # fmt: skip
            ids = [t for i, span in enumerate(spans) for t in prompts[i][span.start : span.end]]
            out = model.forward(Batch(tuple(ids), spans, tuple(range(len(ids)))))
            parts = out.split([span.num_tokens for span in spans])
            for own, part in zip(found, parts, strict=True):
                own.append(part)
        return [torch.cat(parts) for parts in found]

    actual = logits(names)
    for name, prompt, found in zip(names, prompts, actual, strict=True):
        with torch.inference_mode():
            expected = oracles[name](input_ids=torch.tensor([prompt]), use_cache=False).logits[0]
        error = (found.cpu() - expected).abs().max() / expected.abs().max()
        assert float(error) < 1e-4, name
    without = logits([""] * 5)
    assert all(torch.equal(actual[i], without[i]) for i in (1, 4))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="kernels' own order of sums: on a GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_logits_do_not_depend_on_the_step(
    dtype: str, get_wide: Callable[[str], Tiny], seed: int
) -> None:
    """Whole, in chunks, token by token, and beside others: the same bits."""
    rng = random.Random(f"{seed} exact")
    path = get_wide("qwen3").path
    config = EngineConfig(model=str(path), device="cuda", dtype=dtype, decoder="own", exact=True)
    model = load_model(config)
    tokens = [[rng.randrange(2, VOCAB_SIZE) for _ in range(70)] for _ in range(3)]
    tables = [tuple(range(5 * i, 5 * i + 5)) for i in range(3)]

    def logits(steps: list[list[tuple[int, int, int]]]) -> torch.Tensor:
        """Of request 0; steps of (request, start, end)."""
        model.attach(KvMemory(model.layout, 15, "cuda"))
        found = []
        for step in steps:
            ids = [token for who, start, end in step for token in tokens[who][start:end]]
            spans = tuple(
                TokenSpan(start, end - start, tables[who][: -(-end // 16)])
                for who, start, end in step
            )
            out = model.forward(Batch(tuple(ids), spans, tuple(range(len(ids)))))
            first = 0
            for who, start, end in step:
                if who == 0:
                    found.append(out[first : first + end - start])
                first += end - start
        return torch.cat(found)

    whole = logits([[(0, 0, 70)]])
    assert bool(torch.isfinite(whole).all())
    cut = logits([[(1, 0, 33), (0, 0, 17)], [(0, 17, 69), (1, 33, 70)], [(0, 69, 70), (2, 0, 1)]])
    assert torch.equal(cut, whole)
    singly = logits([[(0, i, i + 1), (1, i, i + 1), (2, i, i + 1)] for i in range(70)])
    assert torch.equal(singly, whole)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs and kernels: on a GPU")
@pytest.mark.timeout(600)
def test_exact_tokens_do_not_depend_on_the_engine(
    get_wide: Callable[[str], Tiny], load: Callable[..., Any], run: Callable[..., Any], seed: int
) -> None:
    """In bfloat16, where rounding of another order changes tokens: with other neighbours, chunks,
    prefix hits and graphs, and with steps launched ahead or not."""
    rng = random.Random(f"{seed} exact engine")
    path = get_wide("qwen3").path
    requests = {name: (prompt, endless(40)) for name, prompt in _prompts(rng, 12).items()}
    fields: dict[str, Any] = {
        "decoder": "own", "device": "cuda:0", "dtype": "bfloat16", "exact": True
    }  # fmt: skip
    alone = load(path, **fields)
    expected: dict[str, list[int]] = {}
    for name, one in requests.items():
        expected |= run(alone, {name: one})
    assert run(alone, requests) == expected  # all at once, with every prefix cached
    for budget, running, overlap in ((33, 5, True), (100, 12, False)):
        engine = load(path, **fields, overlap=overlap, max_num_tokens_per_step=budget,
                      max_num_running=running)  # fmt: skip
        assert run(engine, requests) == expected
