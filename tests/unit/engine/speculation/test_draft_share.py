"""Draft models that go on from each other's KV: bit for bit what they would have computed, the same
guesses, no row or block lost, whatever does not come."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from engine.batch import Batch
from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.errors import IntegrityError
from engine.fake import FakeModel
from engine.kv.layout import KvLayout, LayerKv
from engine.kv.memory import KvMemory
from engine.models.load import load_model
from engine.request import Request, Sampling
from engine.sequence import Key
from engine.speculation.config import SpeculationConfig
from engine.speculation.draft_cache import Held
from engine.speculation.draft_choice import NUM_PROBES
from engine.speculation.draft_model import DraftModel
from engine.speculation.draft_pages import Pages, PagesRefused
from engine.speculation.draft_pages_fake import FakeDraftPages
from engine.speculation.draft_share import (
    MAX_PUT_PAGES,
    MAX_UNASKED,
    PATIENCE_S,
    DraftShare,
)
from engine.speculation.draft_sharing import DraftSharing
from engine.speculation.drafter import Draft, Task
from engine.speculation.roster import MAX_EXPECTED
from process.settings import SettingsError
from tests.harness.engines import hasher
from tests.harness.waiting import Clock

SIZE = 4
BLOCK_BYTES = FakeModel().layout.block_bytes
PAGE_BYTES = 3 * BLOCK_BYTES + 7  # three blocks, and a rest
PAGE_TOKENS = 3 * SIZE
SAMPLING = Sampling(max_tokens=8)
KEY = ("r", 0)


class TimedModel(FakeModel):
    """A token takes 1 ms."""

    def __init__(self, clock: Clock, **fields: int) -> None:
        super().__init__(**fields)  # type: ignore[arg-type]
        self.clock = clock
        self.forwards: list[int] = []

    def forward(self, batch: Batch) -> torch.Tensor:
        self.clock.now_s += 0.001 * len(batch.token_ids)
        self.forwards.append(len(batch.token_ids))
        return super().forward(batch)


class Worker:
    """A draft model that shares. It has measured what computing costs."""

    def __init__(
        self,
        pages: FakeDraftPages | None,
        *,
        num_blocks: int = 200,
        max_num_tokens: int = 256,
        **fields: int,
    ) -> None:
        self.clock = Clock()
        self.model = TimedModel(self.clock, **fields)
        self.drafter = DraftModel(
            self.model,
            (2, 1),
            num_blocks=num_blocks,
            max_num_tokens=max_num_tokens,
            clock=self.clock,
        )
        if pages is not None:
            self.drafter.share(pages)
            self.share.choice.on_recomputed(100, 0.1)

    @property
    def share(self) -> DraftShare:
        share = self.drafter._share
        assert share is not None
        return share

    def propose(self, tokens: Sequence[int], key: Key = KEY, tenant: bytes = b"") -> Draft:
        (draft,) = self.drafter.propose([task(tokens, key, tenant)])
        return draft

    def computed(self, tokens: Sequence[int], key: Key = KEY) -> int:
        """Tokens that were missing, of a proposal that comes at once."""
        num_before = len(self.model.forwards)
        assert len(self.propose(tokens, key).tree)
        return self.model.forwards[num_before]


def task(tokens: Sequence[int], key: Key = KEY, tenant: bytes = b"") -> Task:
    return Task(key, list(tokens), 3, SAMPLING, 0, 9, chain_hashes=hashes(tokens, tenant))


def hashes(tokens: Sequence[int], tenant: bytes = b"") -> list[bytes]:
    """As a target gives them to its full blocks."""
    found: list[bytes] = []
    for start in range(0, len(tokens) // SIZE * SIZE, SIZE):
        found.append(hasher(tenant)(found[-1] if found else b"", tokens[start : start + SIZE]))
    return found


def text(num_tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(1, 96) for _ in range(num_tokens)]


def same(one: Draft, other: Draft) -> bool:
    return (one.tree.token_ids, one.tree.parents) == (other.tree.token_ids, other.tree.parents)


def law(pages: FakeDraftPages, *workers: Worker) -> None:
    for worker in workers:
        worker.drafter.check_integrity()
    pages.check_integrity([one for each in workers for one in each.drafter.fetches])


def test_a_second_worker_goes_on_from_what_the_first_one_left() -> None:
    pages = FakeDraftPages(PAGE_BYTES, 64)
    first, second = Worker(pages), Worker(pages)
    tokens = text(6 * PAGE_TOKENS + 5)
    draft = first.propose(tokens)
    assert pages.counts.num_put == len(pages.kept) == 6
    assert second.computed(tokens) == 5
    assert same(second.propose(tokens), draft)
    assert (pages.counts.num_fetched, pages.counts.choices["fetch"]) == (6, 2)
    law(pages, first, second)
    # What both have of the text is the same, bit for bit.
    held = [worker.drafter._cache.find(KEY) for worker in (first, second)]
    assert held[0] is not None and held[1] is not None
    cells = [
        worker.drafter._memory.host_view[one.block_ids[: len(tokens) // SIZE]]
        for worker, one in zip((first, second), held, strict=True)
        if one is not None
    ]
    assert np.array_equal(*cells)
    # And it writes what comes next alone.
    longer = [*tokens, *text(2 * PAGE_TOKENS, 1)]
    second.propose(longer)
    assert pages.counts.num_put == 8
    assert list(pages.parents.values()) == [b"", *list(pages.kept)[:-1]]
    second.drafter.forget(KEY)
    assert second.computed(longer) == len(longer) - 8 * PAGE_TOKENS
    law(pages, first, second)


def test_the_rest_of_a_page_is_zeros() -> None:
    pages = FakeDraftPages(PAGE_BYTES, 64)
    Worker(pages).propose(text(40))
    for num_tokens, page in pages.kept.values():
        assert num_tokens == PAGE_TOKENS
        assert page[: 3 * BLOCK_BYTES].any() and not page[3 * BLOCK_BYTES :].any()


def test_another_draft_model_or_tenant_never_meets_them() -> None:
    """Nor another text that ends alike."""
    pages = FakeDraftPages(PAGE_BYTES, 64)
    tokens = text(60)
    Worker(pages).propose(tokens)
    other = Worker(pages, context_window=300)
    assert other.model.info.fingerprint != FakeModel().info.fingerprint
    assert other.computed(tokens) == 60
    same_model = Worker(pages)
    same_model.propose(tokens, tenant=b"another")
    same_model.propose([1, *tokens[1:]], ("s", 0))
    assert pages.counts.num_fetched == 0
    assert pages.counts.not_fetched == {"missing": 20}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pages_of_odd_layouts_come_back_bit_for_bit(dtype: str) -> None:
    layers = (LayerKv(3, 5, 3, 7), LayerKv(1, 6, 0, 2), LayerKv(3, 5, 3, 5))
    for layout in (
        KvLayout(layers, 3, dtype),
        KvLayout.plain(num_layers=2, num_kv_heads=3, head_dim=5, block_size=3, dtype=dtype),
    ):
        for num_page_blocks, rest in ((1, 0), (2, 1), (3, layout.block_bytes - 1)):
            pages = FakeDraftPages(num_page_blocks * layout.block_bytes + rest, 8)
            memory = KvMemory(layout, 12)
            share = DraftShare(pages, "ab", memory, Clock())
            assert share.page_tokens == 3 * num_page_blocks
            rng = np.random.default_rng(1)
            memory.host_view[:] = rng.integers(0, 256, memory.host_view.shape, dtype=np.uint8)
            before = memory.host_view.copy()
            source, target = [7, 2, 9, 4, 0, 11], [1, 3, 5, 6, 8, 10]
            share._write(target, share._read(source))
            assert np.array_equal(memory.host_view[target], before[source])
            assert np.array_equal(memory.host_view[source], before[source])


def test_the_bundled_model_goes_on_from_its_own_kv() -> None:
    """Guesses are bit-equal where the KV is."""
    config = EngineConfig(
        model="baton-5m-draft", device="cpu", dtype="float32", num_threads=1, context_window=256
    )
    clock, drafts, cells = Clock(), [], []
    pages = FakeDraftPages(6 * 16384, 8)
    tokens = text(3 * 96 // 2 + 96, 4)  # two pages and a half
    found: list[bytes] = []
    for start in range(0, len(tokens) // 16 * 16, 16):
        found.append(hasher()(found[-1] if found else b"", tokens[start : start + 16]))
    asked = Task(KEY, tokens, 3, SAMPLING, 0, 9, chain_hashes=found)
    model = load_model(config, is_draft=True)
    for _ in range(2):
        drafter = DraftModel(model, (2, 1), num_blocks=20, max_num_tokens=512, clock=clock)
        drafter.share(pages)
        assert drafter._share is not None
        drafter._share.choice.on_recomputed(1, 1.0)
        drafts.append(drafter.propose([asked])[0])
        held = drafter._cache.find(KEY)
        assert held is not None and held.num_tokens == len(tokens)
        cells.append(drafter._memory.host_view[held.block_ids[:12]])
    assert (pages.counts.num_put, pages.counts.num_fetched) == (2, 2)
    assert np.array_equal(*cells)
    assert same(*drafts)


def test_pages_on_their_way_cost_guesses_and_nothing_else() -> None:
    pages = FakeDraftPages(PAGE_BYTES, 64)
    first, second = Worker(pages), Worker(pages)
    tokens = text(50)
    draft = first.propose(tokens)
    pages.withholds = True
    assert not len(second.propose(tokens).tree)
    assert not len(second.propose(tokens).tree)
    assert not second.model.forwards
    law(pages, first, second)
    pages.let_go()
    assert second.computed(tokens) == 50 - 4 * PAGE_TOKENS
    assert same(second.propose(tokens), draft)
    law(pages, first, second)


def test_pages_that_do_not_come_are_not_waited_for_long() -> None:
    """Twice what computing takes, and a little."""
    pages = FakeDraftPages(PAGE_BYTES, 64)
    worker = Worker(pages)
    tokens = text(50)
    pages.withholds = True
    assert not len(worker.propose(tokens).tree)
    worker.clock.now_s += 2 * 4 * PAGE_TOKENS * 0.001 + 0.99 * PATIENCE_S
    assert not len(worker.propose(tokens).tree)
    worker.clock.now_s += 0.02 * PATIENCE_S
    assert worker.computed(tokens) == 50
    assert pages.counts.not_fetched == {"slow": 4}
    pages.let_go()
    assert pages.counts.not_fetched == {"slow": 4} and pages.counts.num_fetched == 0
    assert worker.computed(tokens) == 1  # it does not ask again
    law(pages, worker)


def test_what_is_missing_or_of_another_size_is_computed_and_counted() -> None:
    pages = FakeDraftPages(PAGE_BYTES, 64)
    first = Worker(pages)
    tokens = text(50)
    draft = first.propose(tokens)
    keys = list(pages.kept)
    del pages.kept[keys[3]]
    assert Worker(pages).computed(tokens) == 50 - 3 * PAGE_TOKENS
    assert pages.counts.not_fetched == {"missing": 4 + 1}  # 4: of the first
    pages.kept[keys[1]] = (PAGE_TOKENS + 1, pages.kept[keys[1]][1])
    other = Worker(pages)
    assert other.computed(tokens) == 50 - PAGE_TOKENS
    assert same(other.propose(tokens), draft)
    assert pages.counts.not_fetched == {"missing": 5, "size": 3}
    assert pages.counts.num_recomputed_tokens == 50 + (50 - 3 * PAGE_TOKENS) + (50 - PAGE_TOKENS)


def test_few_rows_bring_a_part_and_then_the_next() -> None:
    pages = FakeDraftPages(PAGE_BYTES, 2)
    first, second = Worker(pages), Worker(pages)
    tokens = text(70)
    for _ in range(5):
        first.propose(tokens)
    assert len(pages.kept) == 5  # one at a time: half of the rows
    assert second.computed(tokens) == 10
    assert pages.num_gets == 1 + 3
    law(pages, first, second)
    # Nothing comes where others have the rows.
    pages.withholds = True
    assert not len(second.propose(tokens, ("a", 0)).tree)
    assert second.computed(tokens, ("b", 0)) == 70
    assert pages.counts.not_fetched == {"missing": 2, "no_rows": 5}  # 2: of the first
    second.drafter.forget(("a", 0))
    law(pages, first, second)


def test_a_part_whose_place_is_lost_is_not_taken() -> None:
    """Between two parts of a text its blocks became another sequence's."""
    pages = FakeDraftPages(PAGE_BYTES, 64)
    first, second = Worker(pages), Worker(pages, num_blocks=25)
    tokens, cache = text(70), second.drafter._cache
    draft = first.propose(tokens)
    pages.num_rows, pages.withholds = 1, True
    second.propose(tokens)
    pages.let_go()
    second.propose(tokens)  # the first page is here, the second one is asked for
    assert cache.num_tokens(KEY) == PAGE_TOKENS and second.drafter.fetches
    second.propose(text(70, 5), ("y", 0))
    assert cache.find(KEY) is None
    second.drafter.forget(("y", 0))
    pages.let_go()
    pages.withholds = False
    assert same(second.propose(tokens), draft)
    law(pages, first, second)
    # Who takes it all the same is told.
    late = second.share._texts[KEY]
    late.first_page, late.fetch = 1, pages.get([b"a"], PAGE_TOKENS)
    with pytest.raises(IntegrityError, match="page 1 follows 0 tokens"):
        second.share._take(late, Held())
    second.drafter.forget(KEY)
    law(pages, first, second)


def test_keys_are_made_of_as_many_pages_as_there_are_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = FakeDraftPages(PAGE_BYTES, 2)
    worker, made = Worker(pages, num_blocks=400), []
    key = pages.key
    monkeypatch.setattr(pages, "key", lambda *about: made.append(about) or key(*about))
    pages.withholds = True
    worker.propose(text(15 * PAGE_TOKENS))
    assert len(made) == worker.drafter.fetches[0].num_asked == 2


def test_a_lost_put_ends_the_writing_of_that_text_alone() -> None:
    pages = FakeDraftPages(PAGE_BYTES, 64)
    worker = Worker(pages)
    tokens = text(200)
    pages.loses = True
    worker.propose(tokens[:40])
    pages.loses = False
    worker.propose(tokens)
    assert not pages.kept and pages.counts.not_put == {"missing": 3}
    worker.propose(text(40, 5), ("s", 0))
    assert len(pages.kept) == 3


def test_what_a_failed_call_left_is_never_written() -> None:
    """It counts as computed, but was not: others would guess by it for as long as it is stored."""
    pages = FakeDraftPages(PAGE_BYTES, 64)
    worker = Worker(pages)
    tokens = text(60)
    worker.propose(tokens[:30])
    assert len(pages.kept) == 2
    worker.model.forward = lambda batch: pytest.fail("no device")  # type: ignore[method-assign]
    with pytest.raises(pytest.fail.Exception):
        worker.propose(tokens)
    worker.drafter.forget(KEY)
    assert len(pages.kept) == 2
    law(pages, worker)


def test_what_is_left_at_the_end_is_written_within_bounds() -> None:
    pages = FakeDraftPages(PAGE_BYTES, 64)
    worker = Worker(pages)
    worker.propose(text(20 * PAGE_TOKENS))
    assert pages.counts.num_put == MAX_PUT_PAGES
    worker.drafter.forget(KEY)
    assert pages.counts.num_put == 2 * MAX_PUT_PAGES
    assert pages.counts.not_put == {"ended": 20 - 2 * MAX_PUT_PAGES}
    pages.is_stopped = True
    worker.propose(text(40, 2))
    worker.drafter.forget(KEY)
    assert pages.counts.not_fetched == {"stopped": 3, "missing": 20}
    law(pages, worker)


def test_nothing_is_copied_out_that_nobody_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = FakeDraftPages(PAGE_BYTES, 64)
    worker = Worker(pages, num_blocks=400)
    taken = pages.get([bytes([index]) for index in range(64)], 1)
    copied: list[int] = []
    read = worker.share._read

    def reading(block_ids: Sequence[int]) -> Pages:
        copied.append(len(block_ids) // 3)
        return read(block_ids)

    monkeypatch.setattr(worker.share, "_read", reading)
    asked = [task(text(60, index), (f"r{index}", 0)) for index in range(4)]
    for _ in range(3):
        worker.drafter.propose(asked)
    worker.drafter.forget(("r0", 0))
    assert not copied and pages.counts.not_put == {"ended": 5}
    pages.drop(taken)
    worker.drafter.propose(asked[1:])
    assert copied == [5, 3] and pages.counts.num_put == MAX_PUT_PAGES
    law(pages, worker)


def test_all_that_end_in_a_step_share_one_bound() -> None:
    pages = FakeDraftPages(PAGE_BYTES, 64)
    worker = Worker(pages, num_blocks=400, max_num_tokens=1000)
    names = [(f"r{index}", 0) for index in range(5)]
    worker.drafter.propose([task(text(7 * PAGE_TOKENS, index), names[index]) for index in range(5)])
    assert pages.counts.num_put == MAX_PUT_PAGES == 8
    for name in names[1:4]:
        worker.drafter.forget(name)
    assert pages.counts.num_put == 2 * MAX_PUT_PAGES
    assert pages.counts.not_put == {"ended": 6 + 7 + 7 - MAX_PUT_PAGES}
    worker.drafter.begin_step()
    worker.drafter.forget(names[4])
    assert pages.counts.num_put == 2 * MAX_PUT_PAGES + 7
    law(pages, worker)


def test_pages_that_never_come_are_soon_not_asked_for() -> None:
    pages = FakeDraftPages(PAGE_BYTES, 64)
    worker = Worker(pages)
    for index in range(60):
        worker.propose(text(30, index), (f"r{index}", 0))
        worker.drafter.forget((f"r{index}", 0))
    assert NUM_PROBES <= pages.num_gets <= NUM_PROBES + 3
    assert pages.counts.choices["recompute"] == 60 - pages.num_gets


def test_random_events_change_no_guess_and_break_no_law(
    seed: int, scale: Callable[[int], int]
) -> None:
    """200 runs of two workers with little room in cache and rows, and pages that come late, are
    lost or taken away: a guess is none, or that of a model that computed everything."""
    alone = Worker(None)
    texts = {(name, 0): text(70, index) for index, name in enumerate("xyz")}
    computed: dict[tuple[Key, int], Draft] = {}

    def expected(key: Key, num_tokens: int) -> Draft:
        if (key, num_tokens) not in computed:
            computed[key, num_tokens] = alone.propose(texts[key][:num_tokens], key)
        return computed[key, num_tokens]

    def ask(worker: Worker, keys: Sequence[Key], lengths: dict[Key, int]) -> None:
        asked = [task(texts[each][: lengths[each]], each) for each in keys]
        for each, draft in zip(keys, worker.drafter.propose(asked), strict=True):
            assert not len(draft.tree) or same(draft, expected(each, lengths[each]))

    for index in range(scale(200)):
        rng = random.Random(f"{seed} {index}")
        pages = FakeDraftPages(PAGE_BYTES, rng.choice((1, 2, 5, 40)))
        num_blocks, most = rng.choice((20, 40)), rng.choice((7, 256))
        workers = [Worker(pages, num_blocks=num_blocks, max_num_tokens=most) for _ in "ab"]
        lengths = {key: rng.randint(PAGE_TOKENS, 40) for key in texts}
        for worker in workers:  # the second one has something to fetch
            while not len(worker.propose(texts["x", 0][: lengths["x", 0]], ("x", 0)).tree):
                pass
        for _ in range(16):
            worker, key = rng.choice(workers), rng.choice(list(texts))
            event = rng.random()
            if event < 0.5:
                lengths[key] = min(lengths[key] + rng.choice((0, 1, 3, 30)), 70)
                ask(worker, rng.sample(list(texts), rng.randint(1, 3)), lengths)
            elif event < 0.6:  # a part comes, the rest not yet: another takes its place meanwhile
                worker.drafter.forget(key)
                ask(workers[worker is workers[0]], [key], lengths)
                pages.withholds = True
                for _ in range(2):
                    ask(worker, [key], lengths)
                    pages.let_go()
                other = rng.choice([each for each in texts if each != key])
                ask(worker, [other], lengths)
                if rng.random() < 0.5:
                    worker.drafter.forget(other)
                pages.withholds = rng.random() < 0.5
                ask(worker, [key], lengths)
            elif event < 0.7:
                known = hashes(texts[key][: lengths[key]])
                worker.drafter.expect(key, lengths[key], known)
            elif event < 0.8:
                worker.drafter.forget(key)
            elif event < 0.9:
                pages.withholds = rng.random() < 0.5
                pages.let_go()
            elif pages.kept:
                pages.loses = rng.random() < 0.3
                for gone in rng.sample(list(pages.kept), rng.randint(1, len(pages.kept))):
                    del pages.kept[gone]
            law(pages, *workers)
        for worker in workers:
            for key in texts:
                worker.drafter.forget(key)
            assert not worker.drafter.fetches
            assert worker.drafter._cache.has_room(KEY, num_blocks * SIZE)
        law(pages, *workers)
        assert pages.counts.num_fetched > 0
        pages.withholds = False
        for _ in range(5):  # in parts of 7 tokens
            draft = workers[0].propose(texts["y", 0][:30], ("y", 0))
        assert len(draft.tree) and same(draft, expected(("y", 0), 30))


# ---- with an engine


def engine_of(drafter: DraftModel, **speculation: int) -> LLMEngine:
    config = EngineConfig(
        num_blocks=100,
        block_size=SIZE,
        context_window=256,
        speculation=SpeculationConfig(always=True, max_num_nodes=4, **speculation),
    )
    return LLMEngine(config, FakeModel(block_size=SIZE), drafters=[drafter])


def run(
    engine: LLMEngine, name: str, prompt: Sequence[int], max_tokens: int
) -> tuple[list[int], int]:
    """Returns: tokens, steps. Its laws are checked each step."""
    if name not in engine._groups:
        own = Sampling(max_tokens=max_tokens, ignore_eos=True)
        engine.reserve(Request(name, tuple(prompt), own, hasher()))
    engine.check_integrity()
    engine.start(name)
    tokens: list[int] = []
    num_steps = 0
    while engine.has_work():
        tokens += [token for event in engine.step().events for token in event.token_ids]
        num_steps += 1
        engine.check_integrity()
    return tokens, num_steps


def test_pages_are_fetched_while_a_reserved_request_waits() -> None:
    pages = FakeDraftPages(BLOCK_BYTES, 128)
    first, second = Worker(None), Worker(None)
    engines = [engine_of(worker.drafter) for worker in (first, second)]
    for engine, worker in zip(engines, (first, second), strict=True):
        assert engine.draft_sharing.num_bytes == 64 * 2**20
        engine.draft_sharing.use(pages)
        worker.share.choice.on_recomputed(100, 0.1)
    prompt = text(40)
    answer, num_steps = run(engines[0], "a", prompt, 30)
    assert answer == FakeModel().generate(prompt, 30) and num_steps < 20
    engines[0].check_integrity()
    # The next turn, at another worker.
    prompt += [*answer, *text(6, 3)]
    pages.withholds = True
    own = Sampling(max_tokens=20, ignore_eos=True)
    engines[1].reserve(Request("b", tuple(prompt), own, hasher()))
    assert pages.num_gets == 2 and second.drafter.fetches
    engines[1].check_integrity()
    pages.let_go()
    assert run(engines[1], "b", prompt, 20)[0] == FakeModel().generate(prompt, 20)
    assert pages.counts.num_fetched >= 16
    # Both texts but for what came: the second one begins with what was drawn of its prompt.
    num_came = 4 * pages.counts.num_fetched
    assert pages.counts.num_recomputed_tokens == 41 + len(prompt) + 1 - num_came
    # One that is aborted while it waits leaves nothing behind.
    pages.withholds = True
    engines[1].reserve(Request("c", tuple(prompt), own, hasher()))
    engines[1].abort("c")
    engines[1].check_integrity()
    engines[1].reserve(Request("d", tuple(prompt), own, hasher()))
    engines[1].abort("d")
    assert len(second.drafter.fetches) == 1
    pages.withholds = False
    run(engines[1], "e", prompt, 3)
    run(engines[1], "f", text(3), 2)
    assert not second.drafter.fetches


def test_a_request_that_nobody_guesses_for_fetches_only_for_a_while() -> None:
    pages = FakeDraftPages(BLOCK_BYTES, 400)
    first, second = Worker(pages), Worker(pages)
    tokens = text(40)
    first.propose(tokens)
    for index in range(2 * MAX_UNASKED):
        second.drafter.expect((f"r{index}", 0), 40, hashes(tokens))
    assert len(second.drafter.fetches) == MAX_UNASKED
    second.propose(text(3))
    second.drafter.expect(("again", 0), 40, hashes(tokens))
    law(pages, first, second)
    assert second.drafter._cache.num_tokens(("r0", 0)) == 4 * MAX_PUT_PAGES  # by now
    assert len(second.drafter.fetches) == 1


def test_requests_that_wait_leave_rows_to_those_that_run() -> None:
    """A quarter is theirs, and none where the cache has no room for what came."""
    tokens, running = text(8 * PAGE_TOKENS), text(8 * PAGE_TOKENS, 7)
    pages = FakeDraftPages(PAGE_BYTES, 8)
    first, second = Worker(pages), Worker(pages, num_blocks=30)
    for each in (tokens, running):
        for _ in range(2):
            first.propose(each, ("run", 0) if each is running else KEY)
    assert len(pages.kept) == 16
    asked = [second.drafter.expect((f"q{i}", 0), 99, hashes(tokens)) for i in range(3)]
    assert asked == [True, False, False]
    assert [fetch.num_asked for fetch in second.drafter.fetches] == [2]
    assert second.computed(running, ("run", 0)) == 1  # it has all the other rows
    assert not second.drafter.fetches
    assert second.drafter._cache.find(("q0", 0)) is None
    # What is asked for now finds its pages here, whoever has blocks that it may take.
    assert second.drafter.expect(("q3", 0), 99, hashes(tokens))
    num_gets = pages.num_gets
    assert second.computed(tokens, ("q3", 0)) == 1
    assert pages.num_gets == num_gets + 1  # for the other six
    law(pages, first, second)
    # One row is enough for one page.
    few = FakeDraftPages(PAGE_BYTES, 1)
    third = Worker(few)
    assert third.drafter.expect(KEY, 99, hashes(tokens))
    assert [fetch.num_asked for fetch in third.drafter.fetches] == [1]
    law(few, third)


def test_only_requests_that_something_is_kept_for_are_expected() -> None:
    """Each step goes through them."""
    pages = FakeDraftPages(BLOCK_BYTES, 400)
    worker = Worker(None)
    engine = engine_of(worker.drafter)
    engine.draft_sharing.use(pages)
    worker.share.choice.on_recomputed(100, 0.1)
    assert engine._speculator is not None
    known = engine._speculator._roster._known
    own = Sampling(max_tokens=1)

    def reserve(name: str, num_tokens: int) -> None:
        engine.reserve(Request(name, tuple(text(num_tokens)), own, hasher()))
        worker.share._num_unasked = 0  # as if guesses were asked for in between

    for index in range(3):
        reserve(f"short {index}", SIZE - 1)
    assert not known
    for index in range(MAX_EXPECTED + 2):
        reserve(f"r{index}", SIZE)
    assert len(known) == MAX_EXPECTED
    for index in range(MAX_EXPECTED + 2):
        engine.abort(f"r{index}")
    reserve("last", SIZE)
    assert set(known) == {("last", 0)} and len(worker.drafter.fetches) <= 1
    engine.check_integrity()


def test_nothing_is_shared_where_it_cannot_be(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SettingsError, match="draft_share_bytes: must be at least 0"):
        SpeculationConfig(draft_share_bytes=-1)
    drafter = Worker(None).drafter
    layout = drafter.layout
    assert DraftSharing(0, layout, [drafter]).num_bytes == 0
    assert DraftSharing(1000, layout, [drafter]).num_bytes == 1000
    assert DraftSharing(layout.block_bytes - 1, layout, [drafter]).num_bytes == 0
    assert not caplog.messages
    small = KvLayout.plain(num_layers=1, num_kv_heads=1, head_dim=1, block_size=2, dtype="float32")
    with caplog.at_level("INFO"):
        sharing = DraftSharing(1000, small, [drafter])
    assert sharing.num_bytes == 0
    (message,) = caplog.messages
    assert message.startswith("draft model fake: a block of 32 bytes for 4 tokens does not fit")
    assert engine_of(drafter, draft_share_bytes=0).draft_sharing.num_bytes == 0


def test_the_fake_keeps_the_law() -> None:
    pages = FakeDraftPages(10, 2)
    fetch = pages.get([b"a", b"b", b"c"], 4)
    assert fetch.num_asked == 2 and fetch.result().reason == "missing"
    with pytest.raises(PagesRefused, match="no_rows"):
        pages.get([b"a"], 4)
    with pytest.raises(IntegrityError, match="1 fetches are kept, not 0"):
        pages.check_integrity([])
    pages.drop(fetch)
    pages.check_integrity([])
