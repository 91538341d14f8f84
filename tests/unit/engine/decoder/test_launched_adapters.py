"""Launches of the real decoder with LoRA adapters: what a row draws is what a plain pass over its
tokens with its adapter gives, whatever adapters its neighbours have, come and go."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from engine.batch import Batch, TokenSpan
from engine.errors import LoadError
from engine.kv.memory import TORCH_DTYPES, KvMemory
from engine.lora.adapter import Factors, LoraAdapter, PeftConfig
from engine.lora.limits import LoraLimits
from engine.lora.stacked_weights import StackedLora
from engine.models.interface import DRAWN_BEFORE, DecodeRow
from engine.models.llama import LlamaModel, find_sites
from engine.request import Sampling
from engine.sampling.metadata import SamplingRequest
from tests.unit.engine.decoder.small_decoder import BLOCK, DEVICES, NUM_BLOCKS, VOCAB, small_model
from tests.unit.engine.sampling.reference import sample

WINDOW = 64
MAX_ROWS = 20
"""More than a tile has."""
NUM_SLOTS = 3
MAX_RANK = 5
TIE = 1e-3
"""Two ways of summing float32 differ by some 1e-6: a token that so small a bonus makes the winner
is as right as another."""


def _model(
    device: str, dtype: str, seed: int, *, max_launched_rank: int = MAX_RANK, is_exact: bool = False
) -> LlamaModel:
    return small_model(
        device,
        TORCH_DTYPES[dtype],
        seed,
        num_layers=2,
        window=WINDOW,
        max_rows=MAX_ROWS,
        lora=LoraLimits(
            max_num_adapters=NUM_SLOTS, max_rank=MAX_RANK + 1, max_launched_rank=max_launched_rank
        ),
        is_exact=is_exact,
    )


def _adapter(model: LlamaModel, rng: random.Random, rank: int, kinds: Sequence[str]) -> LoraAdapter:
    """As strong as the weights that it is added to."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 40))
    factors = {}
    for name, site in find_sites(model.decoder.weights).items():
        if name.rpartition(".")[2] in kinds:
            own_rank = rng.randint(1, rank) if factors else rank
            weight = site.linear.weight
            assert isinstance(weight, torch.Tensor)
            size = float(weight.float().std()) / own_rank**0.5
            factors[name] = Factors(
                torch.randn(own_rank, site.in_features, generator=generator),
                torch.randn(site.out_features, own_rank, generator=generator),
                size,
            )
    config = PeftConfig(rank, 1.0, False, tuple(kinds), (), None, (), {}, {})
    return LoraAdapter(config, factors, f"{rng.randrange(1 << 250):064x}")


def _kinds(model: LlamaModel) -> list[str]:
    names = find_sites(model.decoder.weights)
    return sorted({name.rpartition(".")[2] for name in names})


def _check_numbers(model: LlamaModel) -> None:
    """Slots hold what is loaded, and zeros."""
    model.adapters.check_integrity()
    stacks = model.decoder.stacks
    assert stacks is not None
    for linear, stack in stacks.by_linear.items():
        for slot in range(1, NUM_SLOTS + 1):
            deltas = None if linear.deltas is None else linear.deltas.by_slot.get(slot)
            held = deltas if stacks.holds(slot) else None
            for ours, theirs in (
                (stack.a[slot - 1], None if held is None else held.a),
                (stack.b[slot - 1], None if held is None else held.b),
            ):
                rank = 0 if theirs is None else theirs.shape[0]
                assert theirs is None or torch.equal(ours[:rank], theirs.to(ours.dtype))
                assert not ours[rank:].any()


@dataclass(eq=False)
class _Sequence:
    name: str
    adapter: str
    sampling: Sampling
    tokens: list[int]
    blocks: tuple[int, ...]
    num_prompt: int = 0
    is_in_flight: bool = False


@dataclass
class _World:
    """Sequences on one memory, adapters that come and go, and one launch under way."""

    model: LlamaModel
    rng: random.Random
    live: list[_Sequence] = field(default_factory=list)
    free: list[int] = field(default_factory=lambda: list(range(NUM_BLOCKS)))
    under_way: list[tuple] = field(default_factory=list)  # type: ignore[type-arg]
    num_begun: int = 0
    num_adapted: int = 0
    num_other: int = 0
    """Tokens that the model without adapter would not have drawn."""

    def load(self) -> None:
        """An adapter in the place of one that nobody uses, or in a free slot."""
        adapters, rng = self.model.adapters, self.rng
        names = [info.name for info in adapters.infos()]
        idle = [name for name in names if not any(one.adapter == name for one in self.live)]
        if len(names) == NUM_SLOTS:
            if not idle:
                return
            adapters.unload(rng.choice(idle))
        kinds = _kinds(self.model)
        some = rng.sample(kinds, rng.choice([1, 3, len(kinds), len(kinds)]))
        adapter = _adapter(self.model, rng, rng.randint(1, MAX_RANK), some)
        adapters.install(f"adapter {self.num_begun} {rng.random()}", adapter)
        _check_numbers(self.model)

    def begin(self) -> None:
        """A sequence, its prompt computed by a plain step."""
        names = [info.name for info in self.model.adapters.infos()]
        adapter = self.rng.choice(["", *names, *names])
        sampling = Sampling(
            max_tokens=99,
            temperature=self.rng.choice([0.0, 0.0, 0.7, 1.3]),
            seed=self.rng.randrange(1 << 64),
        )
        prompt = [self.rng.randrange(VOCAB) for _ in range(self.rng.randint(1, 30))]
        size = WINDOW // BLOCK
        blocks, self.free = tuple(self.free[:size]), self.free[size:]
        one = _Sequence(str(self.num_begun), adapter, sampling, prompt, blocks, len(prompt))
        self.num_begun += 1
        (drawn,) = sample(self._plain(one, adapter)[-1:], [self._draw(one, len(prompt))])
        one.tokens.append(drawn.token_id)
        self.live.append(one)

    def _plain(self, one: _Sequence, adapter: str) -> torch.Tensor:
        """[T, V], of all its tokens in one plain step."""
        slot = self.model.adapters.slot(adapter)
        num_tokens = len(one.tokens)
        blocks = one.blocks[: -(-num_tokens // BLOCK)]
        batch = Batch(
            tuple(one.tokens), (TokenSpan(0, num_tokens, blocks, slot),), tuple(range(num_tokens))
        )
        return self.model.forward(batch).clone()

    def _draw(self, one: _Sequence, position: int) -> SamplingRequest:
        return SamplingRequest(one.sampling, position, 0)

    def end(self, one: _Sequence) -> None:
        """Not while it is in flight. Every token of it is looked at."""
        self.live.remove(one)
        self.free += one.blocks
        last = one.tokens.pop()
        logits = self._plain(one, one.adapter).float()
        others = self._plain(one, "").float() if one.adapter else logits
        one.tokens.append(last)
        for position in range(one.num_prompt, len(one.tokens)):
            draw, token_id = [self._draw(one, position)], one.tokens[position]
            row = logits[position - 1 : position].clone()
            self.num_adapted += one.adapter != ""
            (other,) = sample(others[position - 1 : position], draw)
            self.num_other += other.token_id != token_id
            if sample(row, draw)[0].token_id != token_id:
                row[0, token_id] += TIE
                assert sample(row, draw)[0].token_id == token_id, (one.name, position)

    def launch(self) -> None:
        ahead = self.model.ahead
        assert ahead is not None
        rows, picked = [], self.rng.sample(self.live, self.rng.randint(1, len(self.live)))
        for one in picked:
            position = len(one.tokens) - 1 + one.is_in_flight
            if position >= WINDOW - 1:
                continue
            token_id = DRAWN_BEFORE if one.is_in_flight else one.tokens[-1]
            draw = self._draw(one, position + 1)
            slot = self.model.adapters.slot(one.adapter)
            rows.append(DecodeRow((one.name, 0), token_id, position, one.blocks, draw, slot))
        picked = [one for one in picked if any(row.key[0] == one.name for row in rows)]
        before = self.under_way
        self.under_way = [(ahead.launch(rows), picked)] if rows else []
        self._read(before)
        for one in self.live:
            one.is_in_flight = bool(self.under_way) and one in picked

    def settle(self) -> None:
        """Nothing is under way."""
        before, self.under_way = self.under_way, []
        self._read(before)
        for one in self.live:
            one.is_in_flight = False

    def _read(self, launches: list[tuple]) -> None:  # type: ignore[type-arg]
        ahead = self.model.ahead
        assert ahead is not None
        for launch, picked in launches:
            for one, drawn in zip(picked, ahead.read(launch), strict=True):
                assert drawn.error is None
                one.tokens.append(drawn.token_id)


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_are_those_of_plain_steps(
    device: str, seed: int, scale: Callable[[int], int]
) -> None:
    """20 lives of 16 launches: some rows with adapters and some without, adapters of rank 1 to the
    highest, of all or of a few layers' kinds, and others in their slots later."""
    rng = random.Random(seed)
    num_adapted = num_other = 0
    for life in range(scale(20)):
        model = _model(device, "float32", seed + life)
        memory = KvMemory(model.layout, NUM_BLOCKS, device)
        memory.cache.fill_(torch.nan)
        model.attach(memory)
        world = _World(model, rng)
        if device == "cuda":  # elsewhere there is nothing to capture
            assert model.ahead is not None
            model.ahead.warm_up()
        world.load()
        for step in range(16):
            while len(world.live) < MAX_ROWS and rng.random() < 0.8:
                world.begin()
            if world.live:
                world.launch()
            if step % 5 == 4:
                world.settle()
                for one in list(world.live):
                    if rng.random() < 0.6:
                        world.end(one)
                for _ in range(rng.randint(1, 4)):
                    world.load()
        world.settle()
        for one in list(world.live):
            world.end(one)
        num_adapted += world.num_adapted
        num_other += world.num_other
    assert num_adapted > 0
    assert num_other > 0, "adapters changed nothing"


@pytest.mark.parametrize("device", DEVICES)
def test_a_slot_gets_another_adapter_while_a_launch_with_the_one_before_is_under_way(
    device: str, seed: int
) -> None:
    """Each row draws by its own adapter."""
    rng = random.Random(seed)
    model = _model(device, "float32", seed)
    model.attach(KvMemory(model.layout, NUM_BLOCKS, device))
    ahead, adapters = model.ahead, model.adapters
    assert ahead is not None
    if device == "cuda":
        ahead.warm_up()
    world, launches = _World(model, rng), []
    logits: dict[str, torch.Tensor] = {}
    for name in ("old", "new"):
        if launches:
            adapters.unload("old")
        adapters.install(name, _adapter(model, rng, MAX_RANK, _kinds(model)))
        assert adapters.slot(name) == 1
        rows = []
        for index in range(8):
            size = WINDOW // BLOCK
            blocks, world.free = tuple(world.free[:size]), world.free[size:]
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(2, 30))]
            one = _Sequence(f"{name} {index}", name, Sampling(max_tokens=9), prompt, blocks)
            logits[one.name] = world._plain(one, name)[-1:].float()
            world.live.append(one)
            draw, position = world._draw(one, len(prompt)), len(prompt) - 1
            rows.append(DecodeRow((one.name, 0), prompt[-1], position, one.blocks, draw, 1))
        if device == "cuda":  # the device is behind, so that nothing is over too early
            torch.cuda._sleep(200_000_000)
        launches.append((ahead.launch(rows), world.live[-8:]))
    for launch, own in launches:
        for one, drawn in zip(own, ahead.read(launch), strict=True):
            row = logits[one.name]
            row[0, drawn.token_id] += TIE
            (expected,) = sample(row, [world._draw(one, len(one.tokens))])
            assert drawn.token_id == expected.token_id, one.name
    news = [world._plain(one, "new")[-1] for one in world.live[:8]]
    others = sum(
        int(row.argmax() != logits[one.name][0].argmax())
        for row, one in zip(news, world.live[:8], strict=True)
    )
    assert others > 0, "both adapters draw the same"


@pytest.mark.parametrize("device", DEVICES)
def test_logits_are_those_of_a_plain_step(device: str, seed: int) -> None:
    """In the dtype that models have."""
    rng = random.Random(seed)
    model = _model(device, "bfloat16", seed)
    model.attach(KvMemory(model.layout, NUM_BLOCKS, device))
    for index in range(NUM_SLOTS):
        adapter = _adapter(model, rng, MAX_RANK, _kinds(model))
        model.adapters.install(str(index), adapter)
    slots = [rng.randrange(NUM_SLOTS + 1) for _ in range(MAX_ROWS - 1)] + [1]
    token_ids = tuple(rng.randrange(VOCAB) for _ in slots)
    each = WINDOW // BLOCK
    tables = [tuple(range(at * each, (at + 1) * each)) for at in range(MAX_ROWS)]
    spans = tuple(
        TokenSpan(0, 1, table[:1], slot) for table, slot in zip(tables, slots, strict=True)
    )
    batch = Batch(token_ids, spans, tuple(range(MAX_ROWS)))
    expected = model.forward(batch).float()
    without = [span._replace(adapter=0) for span in spans]
    base = model.forward(Batch(token_ids, tuple(without), batch.draw_indices)).float()
    ahead, found = model.ahead, []
    assert ahead is not None
    step = ahead._step  # type: ignore[attr-defined]
    decode = step._decode

    def keep(inputs: object) -> torch.Tensor:
        found.append(decode(inputs))
        return found[-1]

    step._decode = keep
    if device == "cuda":
        ahead.warm_up()
    found.clear()
    rows = [
        DecodeRow(
            (str(at), 0), token_ids[at], 0, table, SamplingRequest(Sampling(max_tokens=9), 1), slot
        )
        for at, (table, slot) in enumerate(zip(tables, slots, strict=True))
    ]
    if device == "cuda":  # the same kernels, launched one by one: a graph's tensors are its own
        ahead._graphs._graphs._uses_graphs = False  # type: ignore[attr-defined]
    ahead.read(ahead.launch(rows))
    (logits,) = found
    places = list(ahead._table._place_list)  # type: ignore[attr-defined]
    own = logits[places].float()
    scale = expected.norm(dim=1)
    errors = (own - expected).norm(dim=1) / scale
    assert float(errors.mean()) < 0.05 and float(errors.max()) < 0.25
    has_adapter = torch.tensor(slots) > 0
    changes = ((base - expected).norm(dim=1) / scale).cpu()[has_adapter]
    assert float(changes.mean()) > 0.4, "adapters change hardly anything"


def test_who_is_launched(seed: int) -> None:
    """Adapters of up to the launched rank; none where every bit is promised, or none is wanted."""
    rng = random.Random(seed)
    for rank in (MAX_RANK, MAX_RANK + 1):
        model = _model("cpu", "float32", seed)
        model.adapters.install("a", _adapter(model, rng, rank, ["q_proj"]))
        assert model.adapters.is_launched("a") == (rank == MAX_RANK)
        assert model.adapters.is_launched("")
        model.adapters.check_integrity()
        model.adapters.unload("a")
        _check_numbers(model)
    exact = _model("cpu", "float32", seed, is_exact=True)
    unwanted = _model("cpu", "float32", seed, max_launched_rank=0)
    for other in (exact, unwanted):
        assert other.decoder.stacks is None
        other.adapters.install("a", _adapter(other, rng, 1, ["q_proj"]))
        assert not other.adapters.is_launched("a")


def test_memory_is_counted_and_its_lack_is_said(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model("cpu", "bfloat16", seed)
    stacks = model.decoder.stacks
    assert stacks is not None
    # By layer: q, k and v; o; gate and up; down. (rank, in + out)
    parts = ((3, 64 + 256), (1, 128 + 64), (2, 64 + 192), (1, 96 + 64))
    each = sum(count * MAX_RANK * features for count, features in parts)
    assert stacks.num_bytes == 2 * 2 * NUM_SLOTS * each

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("a page\nof numbers")

    monkeypatch.setattr(StackedLora, "__init__", full)
    with pytest.raises(LoadError, match=r"lower lora\.max_launched_rank") as caught:
        _model("cpu", "float32", seed)
    assert "\n" not in str(caught.value)
