"""Guesses over a quantized cache: each sees what it would on its own path, those that are kept
leave what plain decoding leaves, and the others nothing."""

from __future__ import annotations

import random

import pytest
import torch

from engine.batch import Batch, TokenSpan
from engine.errors import IntegrityError
from engine.kv.layout import LayerKv, layout_of
from engine.kv.memory import KvMemory
from engine.layers.quantized_attention import QuantizedAttention, Scales

SIZE, HEADS, NUM_BLOCKS = 4, 6, 60
CHOICES = [(dtype, scale) for dtype in ("int8", "fp8_e4m3") for scale in
           ("tensor", "block", "token_head")]  # fmt: skip
KINDS = {
    "plain": [LayerKv(2, 8, 2, 8)] * 2,
    "of several kinds": [LayerKv(2, 8, 2, 8), LayerKv(3, 8, 3, 6)],
    "latents": [LayerKv(1, 12, 0, 8)] * 2,
}
Numbers = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""By layer: query [H, 1, D], key [K, 1, D] and value [K, 1, Dv] of one token."""


class _Cache:
    """One quantized cache, and what attends over it.

    Args:
        odd: with a cap on the scores, and sinks.
    """

    def __init__(self, layers: list[LayerKv], dtype: str, scale: str, *, odd: bool = False) -> None:
        self.layers = layers
        self._odd = (2.0, torch.linspace(-1.0, 1.0, HEADS)) if odd else (None, None)
        layout = layout_of(layers, block_size=SIZE, dtype="float32", kv_dtype=dtype, scale=scale)
        self.memory = KvMemory(layout, NUM_BLOCKS)
        self._fixed: list[Scales] = []
        if scale == "tensor":
            self._fixed = [(0.03, None if layer.is_latent else 0.02) for layer in layers]

    def step(self, spans: list[TokenSpan], rows: list[Numbers], window: int | None) -> torch.Tensor:
        """[layers, T, H * Dv] of the spans' tokens; the layers see the same queries."""
        for span in spans:
            if (span.start + span.num_tokens) % SIZE and len(span.block_ids) * SIZE > span.start:
                last = len(span.block_ids) - 1
                if span.start <= last * SIZE:  # entered and not filled, as the engine does
                    self.memory.clear(span.block_ids[-1])
        batch = Batch((0,) * len(rows), tuple(spans), ())
        step = QuantizedAttention(batch, self.memory, self.memory.layer_views(), self._fixed)
        outs = []
        for index, layer in enumerate(self.layers):
            query, key, value = (
                torch.cat([row[index][part] for row in rows], dim=1) for part in range(3)
            )
            out = step.attend(
                index, query, key, value, 0.3, window, *self._odd, is_latent=layer.is_latent
            )
            outs.append(torch.nn.functional.pad(out, (0, 12 - out.shape[2])).flatten(1))
        self.memory.check_integrity()
        return torch.stack(outs)


def _token(layers: list[LayerKv], generator: torch.Generator) -> Numbers:
    found: Numbers = []
    for layer in layers:
        query = torch.randn(HEADS, 1, layer.k_head_dim, generator=generator)
        key = torch.randn(layer.num_k_heads, 1, layer.k_head_dim, generator=generator)
        value = key[..., : layer.v_head_dim]
        if not layer.is_latent:
            value = torch.randn(layer.num_v_heads, 1, layer.v_head_dim, generator=generator)
        found.append((query, key, value))
    return found


def _random_branches(rng: random.Random, num_nodes: int) -> tuple[int, ...]:
    """Depth-first; from one path to a bush."""
    branches: list[int] = []
    open_path = [-1]
    for node in range(num_nodes):
        while len(open_path) > 1 and rng.random() < 0.3:
            open_path.pop()
        branches.append(open_path[-1])
        open_path.append(node)
    return tuple(branches)


def _path(branches: tuple[int, ...], node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = branches[node]
    return path


class _Text:
    """A sequence that guesses, in blocks of its own."""

    def __init__(self, layers: list[LayerKv], rng: random.Random, block_ids: list[int]) -> None:
        self._generator = torch.Generator().manual_seed(rng.getrandbits(60))
        self._layers = layers
        self.known: list[Numbers] = [self.token() for _ in range(rng.randint(0, 11))]
        self.block_ids = block_ids

    def token(self) -> Numbers:
        return _token(self._layers, self._generator)

    def span(self, start: int, num_tokens: int, branches: tuple[int, ...] = ()) -> TokenSpan:
        num_blocks = -(-(start + num_tokens) // SIZE)
        return TokenSpan(start, num_tokens, tuple(self.block_ids[:num_blocks]), branches=branches)


def _alone(text: list[Numbers], cache: _Cache, window: int | None) -> torch.Tensor:
    """As one chunk in a cache of its own, which is the same as token by token
    (test_quantized_attention.py): what each token gets."""
    table = tuple(range(-(-len(text) // SIZE)))
    return cache.step([TokenSpan(0, len(text), table)], text, window)


@pytest.mark.parametrize(("dtype", "scale"), CHOICES)
def test_each_guess_sees_its_own_path_and_what_is_kept_is_plain_decodings(
    dtype: str, scale: str, seed: int
) -> None:
    """Steps of three sequences with any trees, each path against itself alone; a path's beginning
    is kept, and the bytes of full blocks are what they would have been."""
    rng = random.Random(f"{seed} {dtype} {scale}")
    window = rng.choice([None, 6])
    layers = KINDS[rng.choice(sorted(KINDS))]
    is_odd = rng.random() < 0.5

    def make() -> _Cache:
        return _Cache(layers, dtype, scale, odd=is_odd)

    cache = make()
    assert cache.memory.tails is not None
    order = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    texts = [_Text(layers, rng, order[20 * i : 20 * i + 20]) for i in range(3)]
    done = [0, 0, 0]
    for text in texts:
        if text.known:
            cache.step([text.span(0, len(text.known))], text.known, window)
    done = [len(text.known) for text in texts]
    for _ in range(2):
        spans: list[TokenSpan] = []
        rows: list[Numbers] = []
        nodes: list[list[Numbers]] = []
        for text, start in zip(texts, done, strict=True):
            text.known += [text.token() for _ in range(rng.choice([1, 1, 1, 2, 5]))]
            branches = _random_branches(rng, rng.randint(0, 9))
            nodes.append([text.token() for _ in branches])
            span = text.span(start, len(text.known) - start + len(branches), branches)
            spans.append(span)
            rows += text.known[start:] + nodes[-1]
        out = cache.step(spans, rows, window)
        first = 0
        for index, (text, span, own) in enumerate(zip(texts, spans, nodes, strict=True)):
            num_known = span.num_tokens - len(own)
            leaves = set(range(len(own))) - set(span.branches) or {-1}
            for leaf in leaves:
                path = _path(span.branches, leaf)
                text_then = text.known + [own[node] for node in path]
                expected = _alone(text_then, make(), window)
                places = [*range(num_known), *(num_known + node for node in path)]
                actual = out[:, [first + place for place in places]]
                assert torch.allclose(actual, expected[:, span.start :], atol=1e-5), (span, leaf)
            first += span.num_tokens
            if own:
                kept = _path(span.branches, rng.randrange(-1, len(own)))
                start = len(text.known)
                room = cache.memory.tails.memory
                cache.memory.tails.keep(text.block_ids, start, kept)
                assert cache.memory.tails.memory is room, "what is kept takes no new memory"
                text.known += [own[node] for node in kept]
            done[index] = len(text.known)
            for block_id in text.block_ids[: len(text.known) // SIZE]:  # it is booked
                cache.memory.tails.close(block_id)
            cache.memory.check_integrity()
        assert cache.memory.tails.num_guess_slots == 0
        assert len(cache.memory.tails) == sum(len(text.known) % SIZE > 0 for text in texts)
    for text in texts:
        plain = make()
        _alone(text.known, plain, window)
        num_full = len(text.known) // SIZE
        own = cache.memory.host_view[text.block_ids[:num_full]]
        assert (own == plain.memory.host_view[:num_full]).all()


@pytest.mark.parametrize("length", [2 * SIZE - 2, 2 * SIZE])
def test_a_step_with_guesses_can_be_computed_again(length: int, seed: int) -> None:
    """Its draws failed, as guesses were no numbers: its token is computed once more without any,
    also where it fills a block."""
    rng = random.Random(seed)
    layers = KINDS["plain"]
    cache = _Cache(layers, "int8", "block")
    text = _Text(layers, rng, list(range(20)))
    text.known = [text.token() for _ in range(length)]
    before = length - 1
    cache.step([text.span(0, before)], text.known[:before], None)
    wrong: list[Numbers] = []
    for _ in range(6):
        own = [tuple(torch.full_like(one, torch.nan) for one in of) for of in text.token()]
        wrong.append(own)  # type: ignore[arg-type]  # three
    cache.step([text.span(before, 7, (-1, 0, 1, 2, 3, -1))], text.known[before:] + wrong, None)
    out = cache.step([text.span(before, 1)], text.known[before:], None)
    plain = _Cache(layers, "int8", "block")
    expected = _alone(text.known, plain, None)
    assert torch.allclose(out[:, 0], expected[:, -1], atol=1e-5)
    assert cache.memory.tails is not None
    assert cache.memory.tails.num_guess_slots == 0
    num_full = length // SIZE
    assert (cache.memory.host_view[:num_full] == plain.memory.host_view[:num_full]).all()


def test_guesses_that_no_step_has_computed_cannot_be_kept(seed: int) -> None:
    rng = random.Random(seed)
    layers = KINDS["plain"]
    cache = _Cache(layers, "int8", "block")
    text = _Text(layers, rng, list(range(20)))
    text.known = [text.token() for _ in range(5)]
    cache.step([text.span(0, 5)], text.known, None)
    assert cache.memory.tails is not None
    with pytest.raises(IntegrityError, match="no guesses were computed"):
        cache.memory.tails.keep(text.block_ids, 5, [0])
