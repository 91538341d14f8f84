"""AheadDecoder: launches that are read late draw what the model and the sampler draw step by step,
whatever comes, goes, moves or grows between them."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from baton_kernels.decode_step_rows import LAST_NUMBER

from engine.decoder.ahead import MAX_CHANGES, AheadDecoder, RowLaunch
from engine.decoder.graph_set import capture_all
from engine.decoder.graphs import row_buckets
from engine.errors import IntegrityError, InvalidLogits, LoadError, WrongState
from engine.lora.stacked_weights import StackedLora
from engine.models.interface import DecodeRow
from engine.request import Sampling
from engine.sampling.metadata import SamplerOutput, SamplingRequest
from tests.unit.engine.decoder.hash_decoder import NUM_SLOTS, SPOILED, HashDecoder
from tests.unit.engine.sampling.reference import sample

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
VOCAB = 97
BLOCK = 4
WINDOW = 1500
"""Tokens."""
MAX_ROWS = 12


@dataclass(eq=False)
class _Sequence:
    key: tuple[str, int]
    sampling: Sampling
    token_ids: list[int]
    block_ids: tuple[int, ...]
    adapter: int = 0
    num_in_flight: int = 0
    is_over: bool = False


@dataclass
class _World:
    """An engine's part: sequences, their blocks, and what is under way."""

    rng: random.Random
    decoder: HashDecoder
    ahead: AheadDecoder
    free: list[int]
    live: list[_Sequence] = field(default_factory=list)
    under_way: deque[tuple[RowLaunch, list[_Sequence]]] = field(default_factory=deque)
    num_begun: int = 0
    num_checked: int = 0
    num_spoiled: int = 0
    num_adapted: int = 0
    has_adapters: bool = False
    """There are adapters, and some sequences have one."""

    def _take(self, num_tokens: int) -> tuple[int, ...]:
        """Blocks for so many tokens, and sometimes some to spare."""
        count = -(-num_tokens // BLOCK) + self.rng.choice([0, 0, 0, 1, 5])
        count = min(count, WINDOW // BLOCK)
        taken, self.free = self.free[:count], self.free[count:]
        return tuple(taken)

    def _give_back(self, block_ids: tuple[int, ...]) -> None:
        """What is in them is anybody's from now on."""
        self.free += block_ids
        self.rng.shuffle(self.free)
        if block_ids:
            self.decoder.cache[list(block_ids)] = self.rng.randrange(VOCAB)

    def begin(self, num_tokens: int = 0) -> None:
        longest = self.rng.randrange(900, WINDOW - 60)
        num_tokens = num_tokens or self.rng.choice([1, 3, 4, 5, 30, longest])
        token_ids = self._prompt(num_tokens)
        sampling = _random_sampling(self.rng)
        key = (f"request {self.num_begun}", 0)
        if self.live and self.rng.random() < 0.3:  # another sample of a request, or its successor
            other = self.rng.choice(self.live)
            key = (other.key[0], 1 - other.key[1])
            sampling = self.rng.choice([sampling, other.sampling])
        if key in [one.key for one in self.live]:
            return
        self.num_begun += 1
        adapter = self._adapter()
        sequence = _Sequence(key, sampling, token_ids, self._take(num_tokens), adapter)
        self.decoder.write(token_ids[:-1], sequence.block_ids)
        self.live.append(sequence)

    def _prompt(self, num_tokens: int) -> list[int]:
        return [self.rng.choice([0, 1, 2, *range(SPOILED + 1, VOCAB)]) for _ in range(num_tokens)]

    def end(self, sequence: _Sequence) -> None:
        self.live.remove(sequence)
        sequence.is_over = True
        if not sequence.num_in_flight:
            self._give_back(sequence.block_ids)

    def replace(self, sequence: _Sequence) -> None:
        """Another one of the same name."""
        self.end(sequence)
        token_ids = self._prompt(len(sequence.token_ids))
        other = _Sequence(
            sequence.key,
            _random_sampling(self.rng),
            token_ids,
            self._take(len(token_ids)),
            self._adapter(),
        )
        self.decoder.write(token_ids[:-1], other.block_ids)
        self.live.append(other)

    def _adapter(self) -> int:
        """Of a new sequence; it may be another one now, in a slot that nobody alive uses."""
        if not self.has_adapters:
            return 0
        slot = self.rng.choice([0, 0, *range(1, NUM_SLOTS + 1)])
        if slot and not any(one.adapter == slot for one in self.live):
            self.decoder.adapters[slot] = self.rng.randrange(1 << 40)
        return slot

    def move(self, sequence: _Sequence) -> None:
        """As a preemption and its end: other blocks, the same tokens."""
        if sequence.num_in_flight:
            return
        old = sequence.block_ids
        sequence.block_ids = self._take(len(sequence.token_ids))
        self._give_back(old)
        self.decoder.write(sequence.token_ids[:-1], sequence.block_ids)

    def plain_step(self, sequence: _Sequence) -> None:
        """A step of others' doing, between two launches."""
        if sequence.num_in_flight or len(sequence.token_ids) + 1 >= WINDOW:
            return
        self._grow(sequence, len(sequence.token_ids))
        self.decoder.write(sequence.token_ids, sequence.block_ids)
        sequence.token_ids.append(self.expected(sequence).token_id)
        if SPOILED in sequence.token_ids[-1:] or sequence.token_ids[-1] < 0:
            sequence.token_ids[-1] = 0

    def _grow(self, sequence: _Sequence, num_tokens: int) -> None:
        if num_tokens > len(sequence.block_ids) * BLOCK:
            sequence.block_ids += self._take(BLOCK)

    def expected(self, sequence: _Sequence) -> SamplerOutput:
        logits = self.decoder.logits_of(sequence.token_ids, sequence.adapter).cpu()
        return sample(logits, [_draw(sequence, len(sequence.token_ids))])[0]

    def launch(self, max_rows: int = 0) -> None:
        """Of some of those that are ready; or of as many as are named."""
        ready = [one for one in self.live if len(one.token_ids) + one.num_in_flight < WINDOW]
        if self.rng.random() < 0.2:
            self.rng.shuffle(ready)
        picked = ready[: max_rows or self.rng.choice([MAX_ROWS, MAX_ROWS, 5, 1])]
        rows = []
        for one in picked:
            position = len(one.token_ids) - 1 + one.num_in_flight
            self._grow(one, position + 1)
            token_id = -1 if one.num_in_flight else one.token_ids[-1]
            # A list is as good as a tuple, though found unchanged at a higher price.
            block_ids = one.block_ids if self.rng.random() < 0.8 else list(one.block_ids)
            draw = _draw(one, position + 1)
            rows.append(DecodeRow(one.key, token_id, position, block_ids, draw, one.adapter))
            one.num_in_flight += 1
        if rows:
            self.under_way.append((self.ahead.launch(rows), picked))

    def read(self) -> None:
        launch, sequences = self.under_way.popleft()
        for sequence, drawn in zip(sequences, self.ahead.read(launch), strict=True):
            sequence.num_in_flight -= 1
            if sequence.is_over:
                if not sequence.num_in_flight:
                    self._give_back(sequence.block_ids)
                continue
            expected = self.expected(sequence)
            self.num_checked += 1
            self.num_adapted += sequence.adapter > 0
            if expected.error is not None:
                self.num_spoiled += 1
                assert isinstance(drawn.error, InvalidLogits)
                assert str(drawn.error) == str(expected.error)
                assert drawn.token_id == -1
                self.end(sequence)
                continue
            assert drawn == expected
            sequence.token_ids.append(drawn.token_id)

    def live_through(self, num_ticks: int) -> None:
        """`num_ticks` times: something happens, something is launched, something is read; nearly
        always one launch is under way when the next begins."""
        for _ in range(num_ticks):
            while len(self.live) < 4 or (len(self.live) < MAX_ROWS and self.rng.random() < 0.5):
                self.begin()
            act = self.rng.random()
            victim = self.rng.choice(self.live)
            if act < 0.08:
                self.end(victim)
            elif act < 0.16:
                self.move(victim)
            elif act < 0.24:
                self.plain_step(victim)
            elif act < 0.4:
                while self.under_way:
                    self.read()
                for one in list(self.live):
                    self.rng.choice([self.end, self.move, self.replace, self.plain_step, id])(one)
            self.launch()
            if len(self.under_way) == 2:
                self.read()
        while self.under_way:
            self.read()


def _draw(sequence: _Sequence, position: int) -> SamplingRequest:
    return SamplingRequest(
        sequence.sampling, position, sequence.sampling.sample_index + sequence.key[1]
    )


def _random_sampling(rng: random.Random) -> Sampling:
    if rng.random() < 0.3:
        return Sampling(max_tokens=1)
    return Sampling(
        max_tokens=1,
        temperature=rng.choice([0.1, 0.7, 1.0, 2.5]),
        top_k=rng.choice([0, 0, 1, 5, 50, VOCAB + 5]),
        top_p=rng.choice([1.0, 1.0, 0.9, 0.3]),
        min_p=rng.choice([0.0, 0.0, 0.05]),
        seed=rng.randrange(1 << 64),
        sample_index=rng.randrange(3),
    )


def _world(
    device: str,
    seed: int,
    max_rows: int = MAX_ROWS,
    num_blocks: int = 0,
    has_adapters: bool = False,
    max_changes: int = MAX_CHANGES,
) -> _World:
    """Tables are of up to 20 tokens, 160, 1280, or all."""
    num_blocks = num_blocks or MAX_ROWS * WINDOW // BLOCK * 2
    decoder = HashDecoder(
        num_blocks=num_blocks,
        block_size=BLOCK,
        vocab_size=VOCAB,
        device=torch.device(device),
        seed=seed,
    )
    stacks = None
    if has_adapters:
        stacks = StackedLora(
            {},
            num_slots=NUM_SLOTS,
            max_rank=1,
            dtype=torch.float32,
            device=torch.device(device),
        )
        for slot in range(1, NUM_SLOTS + 1):
            stacks.put(slot, {})
    ahead = AheadDecoder(
        decoder.decode,
        max_rows=max_rows,
        context_window=WINDOW,
        block_size=BLOCK,
        vocab_size=VOCAB,
        device=torch.device(device),
        stacks=stacks,
        max_changes=max_changes,
        first_width_tokens=20,
    )
    free = list(range(num_blocks))
    random.Random(seed).shuffle(free)
    return _World(random.Random(seed), decoder, ahead, free, has_adapters=has_adapters)


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_are_those_of_plain_steps(
    device: str, seed: int, scale: Callable[[int], int]
) -> None:
    """20 lives of 60 launches, and some more until one had logits that are not finite."""
    num_checked = num_spoiled = 0
    for life in range(scale(20) + 20):
        if life >= scale(20) and num_spoiled:
            break
        world = _world(device, seed + life)
        world.ahead.warm_up()
        number = LAST_NUMBER - 20  # steps are numbered in a circle
        world.ahead._next_number = number
        world.ahead._step._number.fill_(number)
        world.live_through(60)
        num_checked += world.num_checked
        num_spoiled += world.num_spoiled
    assert num_checked > scale(20) * 150
    assert num_spoiled > 0, "no row with logits that are not finite was among them"


@pytest.mark.parametrize("device", DEVICES)
def test_rows_have_their_own_adapters(device: str, seed: int, scale: Callable[[int], int]) -> None:
    """The same with sequences of several adapters and of none in a launch, of none at all, and with
    slots that another adapter takes."""
    num_adapted = num_checked = 0
    for life in range(scale(6)):
        world = _world(device, seed + life, has_adapters=True)
        if device == "cuda":  # elsewhere it only takes time
            world.ahead.warm_up()
        world.live_through(30)
        num_adapted += world.num_adapted
        num_checked += world.num_checked
    assert 0 < num_adapted < num_checked


def test_launches_without_adapters_take_the_graphs_without(seed: int) -> None:
    """And there are none with, where no adapter is launched."""
    for has_adapters in (False, True):
        world = _world("cpu", seed, has_adapters=has_adapters)
        graphs = world.ahead._graphs
        each = len(row_buckets(MAX_ROWS)) * 4 * 2  # widths; draws
        assert graphs.num_shapes == len(set(graphs.buckets)) == each * (1 + has_adapters)
        assert any(bucket.has_adapters for bucket in graphs.buckets) == has_adapters
        taken: list[bool] = []
        world.ahead._graphs._graphs._compute = lambda bucket, taken=taken: taken.append(
            bucket.has_adapters
        )
        world.ahead.launch([_row(world, "a")])
        if has_adapters:
            world.ahead.launch([_row(world, "a"), _row(world, "b", adapter=2)])
        assert taken == [False, True][: 1 + has_adapters]


def test_an_adapter_that_is_not_there_is_named(seed: int) -> None:
    world = _world("cpu", seed, has_adapters=True)
    stacks = world.ahead._stacks
    assert stacks is not None
    stacks.clear(2)
    for slot, complaint in ((2, "not launched"), (NUM_SLOTS + 1, "have adapters"), (-1, "have")):
        with pytest.raises(IntegrityError, match=complaint):
            world.ahead.launch([_row(world, "a"), _row(world, "b", adapter=slot)])
    with pytest.raises(IntegrityError, match="have adapters"):
        _world("cpu", seed).ahead.launch([_row(world, "a", adapter=1)])


@pytest.mark.parametrize("device", DEVICES)
def test_a_warm_up_writes_no_kv(device: str, seed: int) -> None:
    world = _world(device, seed)
    before = world.decoder.cache.clone()
    told: list[tuple[str, int, int]] = []
    world.ahead.warm_up(lambda *news: told.append(news))
    if device == "cpu":  # it has nothing to capture
        world.ahead._graphs.capture()
    assert torch.equal(world.decoder.cache[:-1], before[:-1])
    assert device == "cpu" or told[-1][1] == told[-1][2] > 0


def test_no_memory_for_a_warm_up_is_said_in_one_line(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = _world("cpu", seed)

    def full(*bucket: object) -> None:
        raise torch.OutOfMemoryError("a page\nof numbers")

    monkeypatch.setattr(world.ahead._step, "compute", full)
    with pytest.raises(LoadError, match="lower memory_share") as caught:
        capture_all([world.ahead._graphs], torch.device("cpu"))
    assert "\n" not in str(caught.value)


def _row(world: _World, name: str, **changes: object) -> DecodeRow:
    sampling = Sampling(max_tokens=1)
    row = DecodeRow((name, 0), 5, 0, world.free[:1], SamplingRequest(sampling, 1))
    return row._replace(**changes)


@pytest.mark.parametrize("device", DEVICES)
def test_many_new_rows_at_once(device: str, seed: int) -> None:
    """More new entries of the tables than one image brings."""
    world = _world(device, seed, max_changes=300)
    world.ahead.warm_up()
    while len(world.live) < MAX_ROWS:
        world.begin(num_tokens=1000)
    for _ in range(4):
        world.launch(MAX_ROWS)
        world.read()
    assert world.num_checked > 2 * MAX_ROWS


@pytest.mark.parametrize("device", DEVICES)
def test_samples_that_share_one_sampling_draw_apart(device: str, seed: int) -> None:
    """Each in its own noise, also where one takes the place of the other, or comes back to its
    own."""
    world = _world(device, seed)
    world.ahead.warm_up()
    sampling = Sampling(max_tokens=1, temperature=2.0, seed=seed)
    for name, index in (("a", 0), ("b", 0), ("a", 1)):
        sequence = _Sequence((name, index), sampling, [5], world._take(1))
        world.live.append(sequence)
    everyone = list(world.live)
    for _ in range(8):
        for picked in ([0, 1, 2], [2, 1], [0, 1], [0, 1, 2], [2], [0], [1, 2]):
            world.live = [everyone[at] for at in picked]
            world.launch(MAX_ROWS)
            world.read()
            for one in everyone:
                one.token_ids[-1] = max(one.token_ids[-1], SPOILED + 1)
    assert world.num_checked == 8 * 14


def test_what_the_device_can_draw() -> None:
    world = _world("cpu", 0)

    def takes(**fields: object) -> bool:
        return world.ahead.takes(SamplingRequest(Sampling(**({"max_tokens": 9} | fields)), 3))  # type: ignore[arg-type]

    assert takes()
    assert takes(temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, seed=7)
    assert takes(stop_token_ids=frozenset({1}), ignore_eos=True)
    for refused in (
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"logit_bias": ((1, 1.0),)},
        {"bad_words": ((1,),)},
        {"allowed_token_ids": frozenset({1})},
        {"no_repeat_ngram": 2},
        {"logprobs": 0},
        {"trace": True},
    ):
        assert not takes(**refused), refused
        assert not takes(temperature=1.0, **refused), refused
    pending = SamplingRequest(Sampling(max_tokens=9, min_tokens=2), 3, 0, 1, frozenset({0}))
    assert not world.ahead.takes(pending)
    assert world.ahead.takes(pending._replace(num_output_tokens=2))
    assert not world.ahead.takes(
        SamplingRequest(Sampling(max_tokens=9), 3, bitmask=torch.zeros(4).int())
    )


def test_misuse_is_named() -> None:
    world = _world("cpu", 0)
    ahead = world.ahead
    for count in (0, MAX_ROWS + 1):
        with pytest.raises(WrongState, match=f" {count} rows"):
            ahead.launch([_row(world, str(name)) for name in range(count)])
    first, second = ahead.launch([_row(world, "a")]), ahead.launch([_row(world, "b")])
    with pytest.raises(WrongState, match="not read"):
        ahead.launch([_row(world, "c")])
    with pytest.raises(WrongState, match="in order"):
        ahead.read(second)
    with pytest.raises(WrongState, match="under way"):
        ahead.warm_up()
    ahead.read(first)
    with pytest.raises(WrongState, match="in order"):
        ahead.read(first)
    ahead.read(second)
    for rows, complaint in (
        ([_row(world, "a"), _row(world, "a")], "twice"),
        ([_row(world, "a", position=BLOCK)], "blocks"),
        ([_row(world, "a", position=-1)], "blocks"),
        ([_row(world, "a", token_id=-1)], "was not in it"),
        ([_row(world, "a", block_ids=range(1 << 12))], "a table has"),
    ):
        with pytest.raises(IntegrityError, match=complaint):
            ahead.launch(rows)


@pytest.mark.parametrize("device", DEVICES)
def test_an_error_of_a_launch_spoils_no_other(device: str, seed: int) -> None:
    """A refused launch leaves the one under way readable, and the next one right."""
    world = _world(device, seed)
    world.ahead.warm_up()
    while len(world.live) < 6:
        world.begin()
    for _ in range(8):
        world.launch()
        if world.live:
            with pytest.raises(IntegrityError):
                bad = _row(world, "bad", position=BLOCK * 9)
                world.ahead.launch([_row(world, "good"), bad])
        world.read()
    assert world.num_checked >= 8


@pytest.mark.parametrize("device", DEVICES)
def test_an_error_of_the_model_leaves_the_tables_right(
    device: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = _world(device, seed)
    world.ahead.warm_up()
    while len(world.live) < 6:
        world.begin()
    run = world.ahead._graphs.run

    def broken(*bucket: object) -> None:
        raise RuntimeError("device lost its mind")

    for _ in range(6):
        world.live[0].token_ids[-1] = 1  # no row ends all of them
        monkeypatch.setattr(world.ahead._graphs, "run", broken)
        in_flight = [one.num_in_flight for one in world.live]
        with pytest.raises(RuntimeError, match="mind"):
            world.launch()
        for one, before in zip(world.live, in_flight, strict=True):
            one.num_in_flight = before
        monkeypatch.setattr(world.ahead._graphs, "run", run)
        world.launch()
        world.read()
    assert world.num_checked >= 6


@pytest.mark.parametrize("device", DEVICES)
def test_after_a_drain_all_begins_anew(device: str, seed: int) -> None:
    """What was under way is forgotten, unread; rows give their tokens again."""
    world = _world(device, seed)
    world.ahead.warm_up()
    while len(world.live) < 6:
        world.begin()
    for _ in range(5):
        for one in world.live:
            one.token_ids[-1] = max(one.token_ids[-1], SPOILED + 1)
        world.launch(MAX_ROWS)
        world.launch(MAX_ROWS)
        world.ahead.drain()
        (first, _), (second, _) = world.under_way
        for launch in (first, second):
            with pytest.raises(WrongState, match="in order"):
                world.ahead.read(launch)
        world.under_way.clear()
        for one in world.live:
            one.num_in_flight = 0
        with pytest.raises(IntegrityError, match="was not in it"):
            world.ahead.launch([_row(world, world.live[0].key[0], token_id=-1)])
        world.launch(MAX_ROWS)
        world.read()
    assert world.num_checked >= 5


def test_values_of_float32_are_told_as_the_pipeline_does(seed: int) -> None:
    """+inf and a row of -inf, beside NaN, which the lives have."""
    world = _world("cpu", seed)
    for value in (np.inf, -np.inf):
        logits = torch.full((1, VOCAB), value)
        world.ahead._step._decode = lambda inputs, logits=logits: logits.expand(
            inputs.num_rows, VOCAB
        ).contiguous()
        row = _row(world, "a")
        (drawn,) = world.ahead.read(world.ahead.launch([row]))
        (expected,) = sample(logits, [row.draw])
        assert isinstance(drawn.error, InvalidLogits)
        assert str(drawn.error) == str(expected.error)
