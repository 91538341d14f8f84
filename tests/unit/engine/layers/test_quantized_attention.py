"""A quantized cache: what a token sees of it; bytes and results do not depend on chunks."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from baton_kernels.kv_quantization import dequantize, quantize, scale_for
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.batch import Batch, TokenSpan
from engine.engine import LLMEngine
from engine.errors import IntegrityError
from engine.kv.layout import KvLayout, LayerKv, layout_of
from engine.kv.memory import KvMemory
from engine.kv.unquantized_tails import UnquantizedTails
from engine.layers import quantized_attention
from engine.layers.quantized_attention import QuantizedAttention, Scales
from tests.conftest import examples
from tests.harness.engines import make_request

SIZE, HEADS = 4, 6
CHOICES = [(dtype, scale) for dtype in ("int8", "fp8_e4m3") for scale in
           ("tensor", "block", "token_head")]  # fmt: skip
LAYERS = {
    "plain": LayerKv(2, 8, 2, 8),
    "other value dim": LayerKv(3, 8, 3, 6),
    "latents": LayerKv(1, 12, 0, 8),
}
FIXED = 0.03


@pytest.fixture(params=[False, True], ids=["copies", "kernel's door"])
def by_door(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans of one token as on CPU, and as on CUDA (there by a kernel, here by its reference)."""
    monkeypatch.setattr(quantized_attention, "uses_kernel", lambda _: request.param)


def _layout(layer: LayerKv, dtype: str, scale: str) -> KvLayout:
    return layout_of([layer], block_size=SIZE, dtype="float32", kv_dtype=dtype, scale=scale)


def _fixed(layer: LayerKv, scale: str) -> list[Scales]:
    return [(FIXED, None if layer.is_latent else FIXED)] if scale == "tensor" else []


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize("num_scales", [1, SIZE])
def test_the_error_is_at_most_half_a_step(dtype: str, num_scales: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = (
        torch.randn(3, 2, SIZE, 8, generator=generator)
        * torch.logspace(-3, 3, 3)[:, None, None, None]
    )
    quantized, scales = quantize(x, dtype, num_scales, None)
    assert quantized.dtype is torch.int8 and scales.shape == (3, 2, num_scales)
    back = dequantize(quantized, scales, dtype, torch.float32)
    if dtype == "int8":
        step = scales[..., None].expand_as(x) / 2
    else:  # three bits of mantissa; below the least normal number, a fixed step
        step = x.abs() / 16 + scales[..., None] * 2.0**-10
    assert bool(((back - x).abs() <= step * 1.001).all())


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3"])
def test_zeros_stay_zeros_and_a_fixed_scale_clamps(dtype: str) -> None:
    quantized, scales = quantize(torch.zeros(1, SIZE, 8), dtype, 1, None)
    assert not bool(dequantize(quantized, scales, dtype, torch.float32).any())
    x = torch.tensor([[[0.5, -9.0]]])
    fixed = float(scale_for(torch.tensor(1.0), dtype))
    back = dequantize(*quantize(x, dtype, 1, fixed), dtype, torch.float32)
    assert torch.allclose(back, torch.tensor([[[0.5, -1.0]]]), rtol=0.02)


class _Sequences:
    """Keys, values and queries of several sequences, given to a QuantizedAttention in chunks."""

    def __init__(self, layer: LayerKv, lengths: list[int], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.layer = layer
        self.lengths = lengths
        self.parts = []
        for length in lengths:
            key = torch.randn(layer.num_k_heads, length, layer.k_head_dim, generator=generator)
            value = key[..., : layer.v_head_dim]
            if not layer.is_latent:
                value = torch.randn(
                    layer.num_v_heads, length, layer.v_head_dim, generator=generator
                )
            query = torch.randn(HEADS, length, layer.k_head_dim, generator=generator)
            self.parts.append((query, key, value))
        order = iter(torch.randperm(200, generator=generator).tolist())
        self.tables = [tuple(next(order) for _ in range(-(-n // SIZE))) for n in lengths]

    def run(
        self, layout: KvLayout, fixed: list[Scales], cuts: list[list[int]], window: int | None
    ) -> tuple[list[torch.Tensor], KvMemory]:
        """Step i takes each sequence to its i-th cut. Returns: outputs by sequence, the memory."""
        memory = KvMemory(layout, 200)
        outputs: list[list[torch.Tensor]] = [[] for _ in self.lengths]
        done = [0] * len(self.lengths)
        waiting = [list(each) for each in cuts]
        while any(waiting):
            members = [index for index, left in enumerate(waiting) if left]
            spans = []
            for index in members:
                end = waiting[index].pop(0)
                table = self.tables[index][: -(-end // SIZE)]
                if end % SIZE and done[index] <= end // SIZE * SIZE:
                    memory.clear(table[-1])  # as the engine does for a block that is entered
                spans.append(TokenSpan(done[index], end - done[index], table))
                done[index] = end
            query, key, value = (
                torch.cat(
                    [self.parts[index][i][:, span.start : span.end] for index, span in
                     zip(members, spans, strict=True)], dim=1,
                )
                for i in range(3)
            )  # fmt: skip
            batch = Batch((0,) * query.shape[1], tuple(spans), ())
            step = QuantizedAttention(batch, memory, memory.layer_views(), fixed)
            out = step.attend(0, query, key, value, 0.3, window, is_latent=self.layer.is_latent)
            memory.check_integrity()
            first = 0
            for index, span in zip(members, spans, strict=True):
                outputs[index].append(out[first : first + span.num_tokens])
                first += span.num_tokens
        return [torch.cat(parts) for parts in outputs], memory


def _random_cuts(rng: random.Random, length: int) -> list[int]:
    cuts = sorted(rng.sample(range(1, length), rng.randint(0, min(6, length - 1))))
    return [*cuts, length]


@pytest.mark.usefixtures("by_door")
@pytest.mark.parametrize(("dtype", "scale"), CHOICES)
@pytest.mark.parametrize("kind", LAYERS)
def test_bytes_and_results_do_not_depend_on_chunks_or_batch_mates(
    dtype: str, scale: str, kind: str, seed: int
) -> None:
    """The same numbers go in, so the bytes of full blocks are equal to the last bit."""
    rng = random.Random(f"{seed} {dtype} {scale} {kind}")
    window = rng.choice([None, 6])
    layer = LAYERS[kind]
    sequences = _Sequences(layer, [1, 3, 4, 5, 9, 16, 30], seed)
    layout, fixed = _layout(layer, dtype, scale), _fixed(layer, scale)
    whole, memory = sequences.run(layout, fixed, [[n] for n in sequences.lengths], window)
    single, _ = sequences.run(
        layout, fixed, [list(range(1, n + 1)) for n in sequences.lengths], window
    )
    ways = [
        sequences.run(
            layout, fixed, [_random_cuts(rng, n) if n > 1 else [n] for n in sequences.lengths],
            window,
        )
        for _ in range(4)
    ]  # fmt: skip
    for outputs, other in [*ways, (single, None)]:
        for expected, actual in zip(whole, outputs, strict=True):
            assert torch.allclose(actual, expected, atol=1e-5)
        if other is not None:
            for length, table in zip(sequences.lengths, sequences.tables, strict=True):
                full = list(table[: length // SIZE])
                assert (other.host_view[full] == memory.host_view[full]).all()


@pytest.mark.usefixtures("by_door")
@pytest.mark.parametrize(("dtype", "scale"), CHOICES)
@pytest.mark.parametrize("window", [None, 6])
def test_a_token_sees_earlier_blocks_quantized_and_its_own_as_computed(
    dtype: str, scale: str, window: int | None, seed: int
) -> None:
    """Against the definition, written out."""
    layer = LAYERS["plain"]
    sequences = _Sequences(layer, [19], seed)
    layout, fixed = _layout(layer, dtype, scale), _fixed(layer, scale)
    (actual,), _ = sequences.run(layout, fixed, [[1, 2, 7, 8, 9, 17, 18, 19]], window)
    query, key, value = sequences.parts[0]
    rounded = []
    for numbers in (key, value):
        blocks = numbers[:, :16].reshape(2, 4, SIZE, 8)
        num_scales = SIZE if scale == "token_head" else 1
        pair = quantize(blocks, dtype, num_scales, FIXED if fixed else None)
        back = dequantize(*pair, dtype, torch.float32)
        rounded.append(torch.cat((back.reshape(2, 16, 8), numbers[:, 16:]), dim=1))
    assert not torch.allclose(rounded[0], key, atol=1e-3)  # it does make a difference
    for position in range(19):
        own = position // SIZE * SIZE
        low = 0 if window is None else max(0, position - window + 1)
        keys = torch.cat((rounded[0][:, :own], key[:, own : position + 1]), dim=1)[:, low:]
        values = torch.cat((rounded[1][:, :own], value[:, own : position + 1]), dim=1)[:, low:]
        for head in range(HEADS):
            group = head * 2 // HEADS
            weights = torch.softmax(keys[group] @ query[head, position] * 0.3, 0)
            assert torch.allclose(actual[position, head], weights @ values[group], atol=1e-5)


def test_a_block_is_one_record_with_its_scales() -> None:
    layer = LayerKv(2, 8, 2, 8)
    sizes = {scale: _layout(layer, "int8", scale).block_bytes for _, scale in CHOICES}
    numbers = 2 * SIZE * (8 + 8)
    assert sizes["tensor"] == sizes["block"] == numbers + 2 * 2 * 4
    assert sizes["token_head"] == numbers + 2 * 2 * 4 * SIZE
    parts = {_layout(layer, dtype, scale).fingerprint_part for dtype, scale in CHOICES}
    assert len(parts) == len(CHOICES)
    raw = layout_of([layer], block_size=SIZE, dtype="float32")
    assert _layout(layer, "int8", "block").raw == raw
    stored = layout_of([layer], block_size=SIZE, dtype="float32", kv_dtype="bfloat16")
    assert stored.block_bytes * 2 == raw.block_bytes
    computed = layout_of([layer], block_size=SIZE, dtype="bfloat16")
    assert stored.fingerprint_part != computed.fingerprint_part


def test_a_copied_block_takes_its_tail_along(seed: int) -> None:
    """Copy-on-write of a block that is being filled."""
    layer = LAYERS["plain"]
    sequences = _Sequences(layer, [7, 7], seed)
    sequences.parts[1] = sequences.parts[0]
    layout = _layout(layer, "int8", "block")
    (expected, _), _ = sequences.run(layout, [], [[7], [7]], None)
    memory = KvMemory(layout, 200)
    query, key, value = sequences.parts[0]
    table = sequences.tables[0]
    other = next(block_id for block_id in range(200) if block_id not in table)
    for start, end in ((0, 6), (6, 7)):
        if start:
            memory.copy(table[1], other)
            table = (table[0], other)
        span = TokenSpan(start, end - start, table)
        step = QuantizedAttention(
            Batch((0,) * (end - start), (span,), ()), memory, memory.layer_views(), []
        )
        out = step.attend(0, query[:, start:end], key[:, start:end], value[:, start:end], 0.3, None)
    assert torch.allclose(out, expected[6:], atol=1e-5)


def test_tails_that_grew_in_a_step_are_written_to_between_steps() -> None:
    """Models compute in inference mode; a block is copied, or guesses are kept, outside of it."""
    memory = KvMemory(_layout(LAYERS["plain"], "int8", "block"), 64)
    assert memory.tails is not None
    with torch.inference_mode():
        for block_id in range(9):
            memory.tails.open(block_id)
    memory.copy(0, 40)
    assert 40 in memory.tails


def test_a_block_entered_in_its_middle_without_a_tail_is_no_silent_zero() -> None:
    layout = _layout(LAYERS["plain"], "int8", "block")
    memory = KvMemory(layout, 4)
    with pytest.raises(IntegrityError, match="no tail"):
        QuantizedAttention(
            Batch((0,), (TokenSpan(5, 1, (0, 1)),), ()), memory, memory.layer_views(), []
        )


class TailsMachine(RuleBasedStateMachine):
    """Blocks come and go; tails keep each its own numbers, and no slot is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.live: set[int] = set()
        self.expected: dict[int, float] = {}
        raw = layout_of([LayerKv(1, 2, 1, 2)], block_size=2, dtype="float32")
        self.tails = UnquantizedTails(lambda num_slots: KvMemory(raw, num_slots))
        self.tails.is_live = lambda block_id: block_id in self.live

    @rule(block_id=st.integers(0, 40), number=st.floats(1, 9, width=32))
    def enter(self, block_id: int, number: float) -> None:
        self.live.add(block_id)
        slot = self.tails.open(block_id)
        assert not bool(self.tails.memory.cache[slot].any())
        self.tails.memory.cache[slot] = number
        self.expected[block_id] = number

    @precondition(lambda self: self.live)
    @rule(data=st.data(), other=st.integers(0, 40))
    def copy(self, data: st.DataObject, other: int) -> None:
        source = data.draw(st.sampled_from(sorted(self.live)))
        if source == other:
            return
        self.live.add(other)
        self.tails.copy(source, other)
        self.expected.pop(other, None)
        if source in self.expected:
            self.expected[other] = self.expected[source]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.live)))
        self.tails.close(block_id)
        self.expected.pop(block_id, None)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), num_nodes=st.integers(1, 9), is_known=st.booleans())
    def guess(self, data: st.DataObject, num_nodes: int, is_known: bool) -> None:
        """None is kept; or nobody asks before the next step."""
        block_id = data.draw(st.sampled_from(sorted(self.live)))
        self.tails.drop_guesses()
        slots = self.tails.guess(block_id, num_nodes)
        self.tails.memory.cache[list(slots)] = 77.0
        assert self.tails.num_guess_slots == -(-num_nodes // 2)
        if is_known:
            self.tails.keep([block_id], 1, [])
            assert self.tails.num_guess_slots == 0

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        """Unfilled, and nobody says so."""
        block_id = data.draw(st.sampled_from(sorted(self.live)))
        self.live.discard(block_id)
        self.expected.pop(block_id, None)

    @invariant()
    def every_live_tail_has_its_numbers(self) -> None:
        self.tails.check_integrity()
        for block_id, number in self.expected.items():
            slot = self.tails.slot(block_id)
            assert bool((self.tails.memory.cache[slot] == number).all())
        assert self.tails.memory.num_blocks <= 8 * math.ceil(2 * (41 + 5) / 8)


TestTails = TailsMachine.TestCase
TestTails.settings = settings(max_examples=examples(40), stateful_step_count=40, deadline=None)


def test_a_block_that_was_loaded_full_keeps_no_tail(make_engine: Callable[..., LLMEngine]) -> None:
    """Its last owner gave it back unfilled; now it is live again, and no step fills it."""
    engine = make_engine()
    tails = engine.kv.tails = UnquantizedTails(
        lambda num_slots: KvMemory(engine.kv.layout, num_slots)
    )
    for block_id in range(engine.kv.num_blocks):
        tails.open(block_id)
    reserved = engine.reserve(make_request("a", tuple(range(1, 10))))
    engine.start("a", num_loaded_tokens=8)
    for block_id in reserved.block_ids[:2]:
        with pytest.raises(IntegrityError, match="has no tail"):
            tails.slot(block_id)
    assert len(tails) == engine.kv.num_blocks - 2
    engine.abort("a")
    engine.check_integrity()
