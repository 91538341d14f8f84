"""The table of adapters: slots, limits, in-use counts, and that whatever is refused changes
nothing."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)
from torch import nn

from engine.batch import Batch, TokenSpan
from engine.errors import (
    AdapterInUse,
    IntegrityError,
    InvalidAdapter,
    InvalidRequest,
    TooManyAdapters,
    UnknownAdapter,
)
from engine.lora.adapter import Factors, LoraAdapter, PeftConfig, read_adapter
from engine.lora.limits import LoraLimits
from engine.lora.manager import LoraManager, plain_steps_warning
from engine.lora.stacked_weights import Site, StackedLora
from engine.models.fusion import PlainLinear
from process.settings import SettingsError
from tests.harness.adapters import save_adapter

MODULES = ("l.q_proj", "l.k_proj", "l.o_proj")


class Toy:
    """q and k as columns of one linear, o as a linear of the model's own."""

    def __init__(self) -> None:
        self.qk = PlainLinear(torch.zeros(10, 6), None)
        self.o = nn.Linear(6, 7, bias=False).requires_grad_(False)
        self.num_asked = 0

    def find(self) -> dict[str, Site]:
        self.num_asked += 1
        return {
            "l.q_proj": Site(self.qk, 0, 6, 8),
            "l.k_proj": Site(self.qk, 8, 6, 2),
            "l.o_proj": Site(self.o, 0, 6, 7),
        }

    def outputs(self, adapters: LoraManager, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        adapters.begin(Batch((1, 2), (TokenSpan(0, 2, (0,), slot),), ()))
        x = torch.eye(6)[:2]
        return self.qk(x), self.o(x)


def make_adapter(content: int, modules: tuple[str, ...] = MODULES, rank: int = 2) -> LoraAdapter:
    """An adapter read from nowhere; `content` is its digest and its numbers."""
    sizes = {"l.q_proj": 8, "l.k_proj": 2, "l.o_proj": 7}
    factors = {
        name: Factors(torch.ones(rank, 6) * content, torch.ones(sizes[name], rank), 0.5)
        for name in modules
    }
    config = PeftConfig(rank, 1.0, False, modules, (), None, (), {}, {})
    return LoraAdapter(config, factors, f"{content:064x}")


def num_bytes(modules: tuple[str, ...], rank: int = 2) -> int:
    """As held: q and k are one pair of factors over all ten columns."""
    num_fused = len({"l.q_proj", "l.k_proj"} & set(modules)) * rank
    num_o = rank * ("l.o_proj" in modules)
    return 4 * (num_fused * (6 + 10) + num_o * (6 + 7))


@pytest.fixture
def toy() -> Toy:
    return Toy()


def test_what_is_loaded_is_added_and_taken_off_again(toy: Toy) -> None:
    adapters = LoraManager(LoraLimits(), toy.find)
    before = toy.outputs(adapters, 0)
    info = adapters.install("a", make_adapter(3))
    assert (info.name, info.rank, info.targets) == ("a", 2, ("k_proj", "o_proj", "q_proj"))
    assert info.num_bytes == num_bytes(MODULES)
    adapters.install("b", make_adapter(5, ("l.k_proj",)))
    assert (adapters.slot("a"), adapters.slot("b"), adapters.slot("")) == (1, 2, 0)
    qk, o = toy.outputs(adapters, 1)
    assert torch.equal(qk, torch.full((2, 10), 3.0))  # 0.5 * 2 ranks * 3
    assert torch.allclose(o, before[1] + 3.0)
    qk, o = toy.outputs(adapters, 2)
    assert torch.equal(qk, torch.tensor([[0.0] * 8 + [5.0] * 2] * 2))
    assert torch.equal(o, before[1])
    adapters.check_integrity({})
    for name in ("a", "b"):
        adapters.unload(name)
        adapters.check_integrity({})
    assert toy.qk.deltas is None and not toy.o._forward_hooks
    assert all(map(torch.equal, toy.outputs(adapters, 0), before))
    assert toy.num_asked == 1


def test_the_same_name_again(toy: Toy) -> None:
    adapters = LoraManager(LoraLimits(), toy.find)
    first = adapters.install("a", make_adapter(3))
    assert adapters.install("a", make_adapter(3)) is first, "the same content changes nothing"
    adapters.acquire("a")
    assert adapters.install("a", make_adapter(3)) is first, "even while it is in use"
    with pytest.raises(AdapterInUse, match="'a' is in use by 1 requests"):
        adapters.install("a", make_adapter(4))
    assert torch.equal(toy.outputs(adapters, 1)[0], torch.full((2, 10), 3.0))
    adapters.release("a")
    second = adapters.install("a", make_adapter(4, ("l.o_proj",)))
    assert second.digest != first.digest and adapters.infos() == (second,)
    assert torch.equal(toy.outputs(adapters, 1)[0], torch.zeros(2, 10))
    adapters.check_integrity({})


def test_in_use(toy: Toy) -> None:
    adapters = LoraManager(LoraLimits(), toy.find)
    adapters.install("a", make_adapter(3))
    adapters.acquire("a")
    adapters.acquire("a")
    with pytest.raises(AdapterInUse, match="'a' is in use by 2 requests"):
        adapters.unload("a")
    adapters.check_integrity({"a": 2})
    with pytest.raises(IntegrityError, match="counts 2"):
        adapters.check_integrity({"a": 1})
    adapters.release("a")
    adapters.release("a")
    with pytest.raises(IntegrityError, match="without being held"):
        adapters.release("a")
    adapters.unload("a")
    with pytest.raises(UnknownAdapter, match="no adapter 'a' is loaded; loaded are: none"):
        adapters.unload("a")


def test_no_adapter_is_always_there(toy: Toy) -> None:
    adapters = LoraManager(LoraLimits(), toy.find)
    adapters.acquire("")
    adapters.release("")
    assert (adapters.digest(""), adapters.slot("")) == ("", 0)
    for call in (adapters.acquire, adapters.digest, adapters.slot):
        with pytest.raises(InvalidRequest, match=r"^adapter: 'b' is not loaded") as raised:
            call("b")
        assert raised.value.field == "adapter"
    with pytest.raises(IntegrityError, match=r"slots \[7\]"):
        adapters.begin(Batch((1,), (TokenSpan(0, 1, (0,), 7),), (0,)))


def test_limits(toy: Toy) -> None:
    adapters = LoraManager(LoraLimits(max_num_adapters=2, max_bytes=1000), toy.find)
    adapters.install("a", make_adapter(1))
    with pytest.raises(TooManyAdapters, match="max_bytes"):
        adapters.install("b", make_adapter(2, rank=6))
    adapters.install("b", make_adapter(2))
    with pytest.raises(TooManyAdapters, match="max_num_adapters is 2"):
        adapters.install("c", make_adapter(3, ("l.k_proj",)))
    adapters.install("a", make_adapter(4))  # a replacement takes no further slot
    adapters.unload("b")
    adapters.install("c", make_adapter(3))
    assert [info.name for info in adapters.infos()] == ["a", "c"]
    adapters.check_integrity({})


def test_a_model_without_adapters_says_why(tmp_path: Path) -> None:
    adapters = LoraManager.refused("the fake model has no linear layers")
    with pytest.raises(InvalidAdapter, match="no linear layers: it takes no LoRA"):
        adapters.load("a", tmp_path)
    with pytest.raises(InvalidRequest, match=r"'a' is not loaded \(the fake model"):
        adapters.acquire("a")


@pytest.mark.parametrize("name", ["", "x" * 129, "a\nb"])
def test_bad_names(toy: Toy, tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidAdapter, match=r"^adapter: a name has"):
        LoraManager(LoraLimits(), toy.find).load(name, tmp_path)


class _Module(nn.Module):
    """Named and shaped as Toy, and what it lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Module()
        self.l.q_proj, self.l.k_proj = nn.Linear(6, 8), nn.Linear(6, 2)
        self.l.o_proj, self.l.head = nn.Linear(6, 7), nn.Linear(6, 9)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"targets": ["q_proj", "head"]}, "^target_modules: l.head is no linear.*k_proj, o_proj"),
        (
            {"targets": ["q_proj"], "target_modules": ["k_proj"]},
            "^target_modules: the file holds l.q_proj, which it does not name",
        ),
        (
            {"targets": ["q_proj"], "target_modules": "all-linear"},
            "^adapter_model.safetensors: target_modules names l.k_proj, which it lacks",
        ),
    ],
)
def test_config_file_and_model_must_agree(
    toy: Toy, tmp_path: Path, fields: dict[str, object], match: str
) -> None:
    adapters = LoraManager(LoraLimits(), toy.find)
    folder = save_adapter(tmp_path / "a", _Module(), 1, **fields)  # type: ignore[arg-type]
    with pytest.raises(InvalidAdapter, match=match):
        adapters.load("a", folder)
    assert adapters.infos() == () and toy.qk.deltas is None
    adapters.check_integrity({})


def test_another_base_model_is_seen(toy: Toy, tmp_path: Path) -> None:
    other = _Module()
    other.l.q_proj = nn.Linear(6, 9)
    folder = save_adapter(tmp_path / "a", other, 1, targets=["q_proj"])
    with pytest.raises(InvalidAdapter, match=r"made for a weight of \(9, 6\), the model's is \(8"):
        LoraManager(LoraLimits(), toy.find).load("a", folder)


def test_load_reads_what_was_written(toy: Toy, tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "a", _Module(), 1, targets=["q_proj", "o_proj"])
    adapters = LoraManager(LoraLimits(), toy.find)
    info = adapters.load("a", folder)
    assert info.digest == read_adapter(folder, LoraLimits()).digest == adapters.digest("a")


def check_stacks(stacks: StackedLora, adapters: LoraManager, toy: Toy) -> None:
    """Slots hold the numbers of the adapters that are launched, and zeros beside them."""
    launched = [info.name for info in adapters.infos() if info.rank <= stacks.max_rank]
    slots = {adapters.slot(name) for name in launched}
    assert all(adapters.is_launched(info.name) == (info.name in launched)
               for info in adapters.infos())  # fmt: skip
    bases = toy.outputs(adapters, 0)
    for slot in range(1, stacks.num_slots + 1):
        outputs = toy.outputs(adapters, slot) if slot in slots else bases
        for linear, base, output in zip((toy.qk, toy.o), bases, outputs, strict=True):
            stack, delta = stacks.by_linear[linear], output - base
            a, b = stack.a[slot - 1], stack.b[slot - 1]
            assert torch.allclose(a.t()[:2] @ b, delta, atol=1e-3)
            if not delta.any():
                assert not a.any() and not b.any()


def test_what_is_launched_lies_in_stacks(toy: Toy) -> None:
    """Below the highest rank; another adapter in the slot leaves nothing of the one before."""
    stacks = make_stacks(toy)
    adapters = LoraManager(LoraLimits(max_num_adapters=2), toy.find, stacks=stacks)
    places = {linear: one.a.data_ptr() for linear, one in stacks.by_linear.items()}
    assert [one.a.shape[1] for one in stacks.by_linear.values()] == [4, 2]  # q and k; o
    assert stacks.num_bytes == 4 * 2 * (4 * (6 + 10) + 2 * (6 + 7))
    adapters.install("a", make_adapter(3))
    adapters.install("b", make_adapter(5, ("l.o_proj",), rank=3))
    check_stacks(stacks, adapters, toy)
    adapters.unload("a")
    adapters.install("c", make_adapter(7, ("l.k_proj",), rank=1))
    check_stacks(stacks, adapters, toy)
    adapters.install("c", make_adapter(8, ("l.q_proj",), rank=3))
    check_stacks(stacks, adapters, toy)
    assert stacks.holds(1) is False
    adapters.install("c", make_adapter(9, rank=2))
    check_stacks(stacks, adapters, toy)
    adapters.check_integrity({})
    assert places == {linear: one.a.data_ptr() for linear, one in stacks.by_linear.items()}
    stacks.clear(1)
    with pytest.raises(IntegrityError, match=r"stacks hold slots \[\], not \[1\]"):
        adapters.check_integrity({})
    with pytest.raises(IntegrityError, match="slot 3 of 2"):
        stacks.put(3, {})


def make_stacks(toy: Toy, num_slots: int = 2) -> StackedLora:
    device = torch.device("cpu")
    return StackedLora(
        toy.find(), num_slots=num_slots, max_rank=2, dtype=torch.float32, device=device
    )


@pytest.mark.parametrize(("max_rank", "max_launched_rank"), [(8, -1), (8, 9), (128, 65)])
def test_a_launched_rank_is_one_that_may_be_loaded(max_rank: int, max_launched_rank: int) -> None:
    with pytest.raises(SettingsError, match="max_launched_rank"):
        LoraLimits(max_rank=max_rank, max_launched_rank=max_launched_rank)


def test_a_linear_layer_holds_its_own_stack_alone() -> None:
    """Else weights would be in a cycle with the stacks, and go when the collector comes."""
    toy = Toy()
    stacks = make_stacks(toy)
    alive = weakref.ref(stacks)
    kept = list(stacks.by_linear.values())
    gc.disable()
    try:
        del stacks
        assert alive() is None and kept
    finally:
        gc.enable()


class TableMachine(RuleBasedStateMachine):
    """load, unload, acquire and release in any order, against a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.toy = Toy()
        self.limits = LoraLimits(max_num_adapters=3, max_bytes=3 * num_bytes(MODULES) - 1)
        self.stacks = make_stacks(self.toy, num_slots=3)
        self.adapters = LoraManager(self.limits, self.toy.find, stacks=self.stacks)
        self.known: dict[str, tuple[int, tuple[str, ...]]] = {}
        self.held: Counter[str] = Counter()

    names = st.sampled_from("abcde")

    @rule(
        name=names,
        content=st.integers(1, 4),
        modules=st.sets(st.sampled_from(MODULES), min_size=1).map(lambda s: tuple(sorted(s))),
    )
    def load(self, name: str, content: int, modules: tuple[str, ...]) -> None:
        wanted = (content + 10 * (1 + sum(1 << MODULES.index(m) for m in modules)), modules)
        others = {key: value for key, value in self.known.items() if key != name}
        size = sum(num_bytes(held) for _, held in others.values()) + num_bytes(modules)
        adapter = make_adapter(wanted[0], modules)
        if self.known.get(name) == wanted:
            self.adapters.install(name, adapter)
        elif self.held[name]:
            with pytest.raises(AdapterInUse):
                self.adapters.install(name, adapter)
        elif len(others) == 3 or size > self.limits.max_bytes:
            with pytest.raises(TooManyAdapters):
                self.adapters.install(name, adapter)
        else:
            self.adapters.install(name, adapter)
            self.known[name] = wanted

    @rule(name=names)
    def unload(self, name: str) -> None:
        if name not in self.known:
            with pytest.raises(UnknownAdapter):
                self.adapters.unload(name)
        elif self.held[name]:
            with pytest.raises(AdapterInUse):
                self.adapters.unload(name)
        else:
            self.adapters.unload(name)
            del self.known[name]

    @rule(name=names)
    def acquire(self, name: str) -> None:
        if name in self.known:
            self.adapters.acquire(name)
            self.held[name] += 1
        else:
            with pytest.raises(InvalidRequest):
                self.adapters.acquire(name)

    @rule(name=names)
    def release(self, name: str) -> None:
        if self.held[name]:
            self.adapters.release(name)
            self.held[name] -= 1
        else:
            with pytest.raises(IntegrityError):
                self.adapters.release(name)

    @invariant()
    def everybody_gets_their_own(self) -> None:
        self.adapters.check_integrity(self.held)
        assert {info.name for info in self.adapters.infos()} == set(self.known)
        for name, (content, modules) in self.known.items():
            qk, _ = self.toy.outputs(self.adapters, self.adapters.slot(name))
            has_q, has_k = ("l.q_proj" in modules), ("l.k_proj" in modules)
            assert qk[0].tolist() == [content * has_q] * 8 + [content * has_k] * 2
        qk, _ = self.toy.outputs(self.adapters, 0)
        assert not qk.any()

    def teardown(self) -> None:
        check_stacks(self.stacks, self.adapters, self.toy)


def test_any_order_of_calls(scale: Callable[[int], int]) -> None:
    run_state_machine_as_test(
        TableMachine, settings=settings(max_examples=scale(600), stateful_step_count=30)
    )


def test_what_has_no_room_is_not_made(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal comes before the factors are copied."""
    limits = LoraLimits(max_num_adapters=1, max_bytes=num_bytes(MODULES))
    adapters = LoraManager(limits, toy.find)
    adapters.install("a", make_adapter(1))
    monkeypatch.setattr(adapters, "_low_rank", lambda *_: pytest.fail("was made"))
    with pytest.raises(TooManyAdapters, match="max_bytes"):
        adapters.install("a", make_adapter(2, rank=3))
    with pytest.raises(TooManyAdapters, match="max_bytes"):
        adapters.install("b", make_adapter(2))
    adapters.check_integrity({})


def test_who_loads_an_adapter_that_is_not_launched_on_a_gpu_is_told() -> None:
    assert plain_steps_warning("a", 16, 16, "cuda") == ""
    assert plain_steps_warning("a", 16, 0, "cpu") == "", "nothing is launched faster there"
    assert "lora.max_launched_rank" in plain_steps_warning("a", 16, 8, "cuda")
    assert "rank 0 at most" in plain_steps_warning("a", 16, 0, "cuda")
