"""A rehearsal: does this architecture, run our way, compute what transformers computes? Asked of a
small random instance of the same config, before any weights are loaded.

The instance runs a script of prompts, chunks and decodes of ragged lengths through the paged cache,
with shared blocks; every token's logits are compared with those of the same instance under
transformers' own eager attention, one sequence at a time. What fails is refused by name. Start-up
only; float32 on CPU; tens of milliseconds.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import transformers

from engine.batch import Batch, Span
from engine.decoder.decoder import Decoder
from engine.decoder.load import Forward, attached, attending, pack
from engine.decoder.model import kv_layout
from engine.decoder.shape import read_shape, rope_table
from engine.decoder.sources import take_weights
from engine.errors import ModelNotSupported
from engine.kv.layout import KvLayout, layout_of
from engine.kv.memory import KvMemory
from engine.layers.torch_attention import TorchPagedAttention
from engine.models import transformers_backend
from engine.models.checkpoint_config import Way
from engine.models.probe import probe
from engine.models.shrink import VOCAB_SIZE, shrink
from engine.models.transformers_backend import cache_latents, run

BLOCK_SIZE = 4
"""Of the rehearsal's cache."""
_SCRIPT = (
    ((0, 0, 13), (1, 0, 1), (2, 0, 6)),
    ((0, 13, 14), (1, 1, 2), (2, 6, 19), (3, 8, 9)),
    ((0, 14, 15), (1, 2, 3), (2, 19, 20), (3, 9, 30)),
    ((0, 15, 16),),
)
"""Steps of (prompt, start, end): whole prompts, chunks off and on block borders, decodes; nearly
every step is a mix."""
_LENGTHS = (16, 3, 20, 30)
_SHARED = 8
"""Tokens that the last prompt has in common with the first, and finds in its blocks."""

_MAX_ERROR = 1e-3
"""Of any logit, relative to the greatest one, in float32. Measured: below 1e-5 for what is right;
what is wrong is off by 1e-1 and more."""


Prepared = tuple[KvLayout, Callable[[KvMemory], Forward]]
"""Of a small transformers model: what its cache looks like, and how to run it on such a cache."""


def rehearse(config: Any, name: str, way: Way = "transformers") -> None:
    """Compare a small instance of `config` with transformers.

    Args:
        config: of transformers; not changed.
        name: of the checkpoint, for the message.
        way: how it is run.
    Raises: ModelNotSupported in one line where the instance cannot be built, does not run on
        the paged cache, or gives other logits than transformers.
    """
    try:
        small = shrink(config)
        model = random_instance(small, seed=0)
        expected = _expected(model, _prompts())
        layout, attach = _prepared(copy.deepcopy(model), way)
        actual = _paged(layout, attach, _prompts())
    except ModelNotSupported as error:
        raise ModelNotSupported(f"{name}: {error}") from error
    except Exception as error:  # whatever the modelling code raises on our way of calling it
        line = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ModelNotSupported(
            f"{name}: a small random instance of this architecture ({config.model_type}) does not "
            f"run on the paged cache ({line})"
        ) from error
    errors = [
        float((want - got).abs().max() / want.abs().max())
        for want, got in zip(expected, actual, strict=True)
    ]
    if not all(error <= _MAX_ERROR for error in errors):  # NaN is a difference, too
        raise ModelNotSupported(
            f"{name}: a small random instance of this architecture ({config.model_type}) gives "
            f"logits {max(errors, key=abs):.2g} off those of transformers"
        )


def random_instance(config: Any, seed: int) -> Any:
    """A float32 model of `config` on CPU, all of whose parameters do something: matrices keep the
    scale of what passes through them, norms and biases are neither 1 nor 0."""
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"  # noqa: SLF001  (as transformers' own loading sets it)
    model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.random.fork_rng(devices=[]):  # nobody else's draws shall change
        torch.manual_seed(seed)
        model = model_class(config)
    model = model.to(torch.float32).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            gain = 4.0 if "embed" in name else 1.5
            deviation = gain / math.sqrt(parameter.shape[-1])
            parameter.normal_(0.0, deviation, generator=generator)
        elif "norm" in name and name.endswith("weight"):
            parameter.uniform_(0.5, 1.5, generator=generator)
        else:
            parameter.normal_(0.0, 0.3, generator=generator)
    return model


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    prompts: list[list[int]] = [
        torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in _LENGTHS
    ]
    prompts[-1][:_SHARED] = prompts[0][:_SHARED]
    return prompts


@torch.inference_mode()
def _expected(model: Any, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Per prompt logits [T, V], by transformers alone."""
    return [
        model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0] for prompt in prompts
    ]


def _prepared(model: Any, way: Way) -> Prepared:
    """From a model that may be changed."""
    return _transformers_code(model) if way == "transformers" else _own_decoder(model, way)


def _own_decoder(model: Any, way: Way) -> Prepared:
    """With the weights of `model`."""
    shape, device = read_shape(model.config), torch.device("cpu")
    weights = take_weights(model.state_dict(), shape, dtype=torch.float32, device=device)
    positions = int(model.config.max_position_embeddings)
    decoder = Decoder(weights, rope_table(shape, min(positions, 64), device))
    layout = kv_layout(shape, block_size=BLOCK_SIZE, dtype="float32")
    if way == "own kernels":
        return layout, lambda memory: attached(decoder, memory)
    pack(decoder, "float32")
    return layout, lambda memory: attending(decoder, memory)


def _transformers_code(model: Any) -> Prepared:
    model.set_attn_implementation(transformers_backend.ATTENTION_NAME)
    cache_latents(model)
    probed = probe(model, num_layers=int(model.config.num_hidden_layers), device="cpu")

    def attach(memory: KvMemory) -> Forward:
        views = memory.layer_views()

        def forward(batch: Batch) -> torch.Tensor:
            step = TorchPagedAttention(batch, views, BLOCK_SIZE)
            return run(model, batch, step, torch.device("cpu"))

        return forward

    return layout_of(probed.layers, block_size=BLOCK_SIZE, dtype="float32"), attach


@torch.inference_mode()
def _paged(
    layout: KvLayout, attach: Callable[[KvMemory], Forward], prompts: list[list[int]]
) -> list[torch.Tensor]:
    """The same by our way: by the script, through the paged cache."""
    tables, num_blocks = _tables(layout)
    memory = KvMemory(layout, num_blocks)
    memory.cache.fill_(1e3)  # a slot that is read before it was written must show
    forward = attach(memory)
    found: list[list[torch.Tensor]] = [[] for _ in prompts]
    for members in _SCRIPT:
        spans = tuple(
            Span(start, end - start, tables[index][: layout.num_blocks_for(end)])
            for index, start, end in members
        )
        token_ids = [token for index, start, end in members for token in prompts[index][start:end]]
        batch = Batch(tuple(token_ids), spans, tuple(range(len(token_ids))))
        logits = forward(batch)
        first = 0
        for (index, _, _), span in zip(members, spans, strict=True):
            if index == len(prompts) - 1 and span.start == _SHARED:
                found[index].append(found[0][0][:_SHARED])
            found[index].append(logits[first : first + span.num_tokens])
            first += span.num_tokens
    return [torch.cat(parts) for parts in found]


def _tables(layout: KvLayout) -> tuple[list[tuple[int, ...]], int]:
    """Block ids per prompt, in no order; the last prompt begins with the first one's."""
    counts = [layout.num_blocks_for(length) for length in _LENGTHS]
    num_shared = _SHARED // layout.block_size
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(2)).tolist()
    tables = [tuple(order.pop() for _ in range(count)) for count in counts]
    tables[-1] = tables[0][:num_shared] + tables[-1][num_shared:]
    return tables, sum(counts)
