"""WriteBehind: what requests fill reaches the store parents first and as it is, whatever becomes of
its request; loads go first; trouble ends one chain, is counted, and holds nothing.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from engine.engine import LLMEngine
from engine.outputs import RequestOutput, StepOutput
from engine.testing.fake_model import FakeModel
from kvstore import block_hash
from kvstore.block_refs import Block, PackedBlocks
from kvstore.client import KvStoreClient, PutChain, PutResult
from kvstore.errors import TransferFailed
from process.background_tasks import end_tasks
from process.deadline import Deadline
from process.rpc_errors import BatonError, DeadlineExceeded, Unavailable
from services.worker import store_writer
from services.worker.config import WorkerLimits
from services.worker.engine_thread import EngineThread
from services.worker.provenance import LegProvenance, WorkerCounts
from services.worker.store_pool import StoreConnector
from services.worker.store_writer import WriteBehind, WriteChain, next_put_bytes
from tests.harness.gated_engine import BLOCK_SIZE, SALT, fake_engine, prompt_of, request, running
from tests.harness.waiting import WAIT_S, settled, until

FRAME_BYTES = 64
PROMPT = prompt_of(18, start=3)  # four full blocks, and a half


class FakeStore:
    """Takes what follows something that it has, with room for so many blocks. `stored`: chain hash
    -> the bytes that its put read."""

    frame_bytes = FRAME_BYTES
    address = "store:1"
    broken: str | None = None

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.room = 1000
        self.stored: dict[bytes, bytes] = {}
        self.num_puts: list[int] = []
        """Blocks that each call has written."""
        self.num_cancelled = 0
        self.num_chains: list[int] = []
        """Chains of each call."""
        self.puts_again: list[bool] = []
        """Of each chain of each call: whether it is put again when its parent is missing."""
        self.error: BatonError | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.entered = asyncio.Event()

    async def put_chains(
        self, chains: Sequence[PutChain], ttl_s: float, deadline: Deadline
    ) -> list[PutResult]:
        self.entered.set()
        if self.error is not None:
            raise self.error
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        self.num_puts.append(0)
        self.num_chains.append(len(chains))
        return list(map(self._put, chains))

    def _put(self, chain: PutChain) -> PutResult:
        assert chain.tail is None and chain.tenant == "t"
        self.puts_again.append(chain.puts_again)
        if chain.parent and chain.parent not in self.stored:
            return PutResult("lease", PackedBlocks(), None, 0, 0, lacks_parent=True)
        refs, num_written = [], 0
        for chain_hash, block_id in chain.blocks:
            if chain_hash not in self.stored:
                if len(self.stored) >= self.room:
                    break
                self.stored[chain_hash] = self.engine.kv.host_view[block_id].tobytes()
                num_written += 1
            refs.append(Block(chain_hash, 7, 2, 0, chain.num_tokens))
        self.num_puts[-1] += num_written
        lost = len(chain.blocks) - len(refs)
        return PutResult("lease", PackedBlocks.of(refs), None, FRAME_BYTES * num_written, lost)


class FakeConnector:
    """What WriteBehind needs of a connector."""

    address = "store:1"

    def __init__(self, store: FakeStore) -> None:
        self.client: FakeStore | None = store
        self.suspected: list[BatonError] = []
        self.tasks: list[asyncio.Task[None]] = []

    def suspect(self, client: FakeStore, error: BatonError) -> None:
        self.suspected.append(error)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self.tasks.append(asyncio.create_task(work))
        return self.tasks[-1]


class Bench:
    """An engine on its thread, and a WriteBehind to a fake store."""

    def __init__(self, engine: LLMEngine, limits: WorkerLimits) -> None:
        self.engine = engine
        self.limits = limits
        self.store = FakeStore(engine)
        self.connector = FakeConnector(self.store)
        self.counts = WorkerCounts()
        self.thread: EngineThread
        self.events: list[RequestOutput] = []
        self.done = asyncio.Event()
        self.root = block_hash.root_key(SALT, engine.model_info.fingerprint)
        self.writes: WriteBehind
        self.num_times_room = 0
        """How often blocks were given back."""

    def on_room(self) -> None:
        self.num_times_room += 1

    def on_step(self, output: StepOutput) -> None:
        self.events += output.events
        if any(event.is_request_over for event in output.events):
            self.done.set()

    async def generate(self, prompt: tuple[int, ...], num_tokens: int) -> list[RequestOutput]:
        """A whole request. Returns: its events."""
        self.events, self.done = [], asyncio.Event()
        asked = request(self.engine, prompt, max_tokens=num_tokens)
        await self.thread.call(lambda engine: engine.reserve(asked))
        await self.thread.call(lambda engine: engine.start("r"))
        async with asyncio.timeout(30):
            await self.done.wait()
        return self.events

    def tokens(self, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
        """Prompt and answer, as far as their KV is computed."""
        model = cast(Any, self.engine)._model
        return [*prompt, *model.generate(prompt, num_tokens)][:-1]

    def hashes(self, tokens: Sequence[int]) -> list[bytes]:
        return block_hash.chain(self.root, tuple(tokens), BLOCK_SIZE)

    def begin(self, prompt: tuple[int, ...], *, num_known: int | None = None) -> WriteChain:
        hashes = self.hashes(prompt)
        leg = LegProvenance(len(prompt))
        known = hashes[:num_known]
        return self.writes.begin(
            "t", known, leg, num_stored=len(known), num_prompt_blocks=len(hashes)
        )

    async def answer(
        self, chain: WriteChain, prompt: tuple[int, ...] = PROMPT, num_tokens: int = 31
    ) -> list[int]:
        """A request whose events all reach the chain. Returns: its computed tokens."""
        for event in await self.generate(prompt, num_tokens):
            self.writes.add(chain, event.filled)
        return self.tokens(prompt, num_tokens)

    async def serve(
        self,
        prompt: tuple[int, ...] = PROMPT,
        num_tokens: int = 31,
        *,
        num_known: int | None = None,
    ) -> tuple[WriteChain, list[int]]:
        """A whole request. Returns: its chain, which is ended, and its computed tokens."""
        chain = self.begin(prompt, num_known=num_known)
        tokens = await self.answer(chain, prompt, num_tokens)
        self.writes.end(chain)
        return chain, tokens

    def have_prompt(self) -> None:
        """It lies in the store already, and its bytes do not matter."""
        self.store.stored = dict.fromkeys(self.hashes(PROMPT), b"")

    async def settle(self) -> None:
        async with asyncio.timeout(30):
            while any(not task.done() for task in self.connector.tasks):
                await asyncio.wait(self.connector.tasks)
        for task in self.connector.tasks:
            task.result()
        await self.thread.call(lambda engine: engine.check_integrity())
        assert self.thread.stats.num_quarantined_blocks == 0

    def assert_stored(self, tokens: Sequence[int], num_blocks: int) -> None:
        """Exactly the leading `num_blocks` of this chain lie in the store, with the right bytes."""
        hashes = self.hashes(tokens)
        assert [each in self.store.stored for each in hashes] == [
            index < num_blocks for index in range(len(hashes))
        ]
        view = self.engine.kv.host_view
        for index, chain_hash in enumerate(hashes[:num_blocks]):
            data = self.store.stored[chain_hash]
            part = list(tokens[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE])
            places = range(index * BLOCK_SIZE, (index + 1) * BLOCK_SIZE)
            assert len(data) == view.shape[1]
            assert data == expected_bytes(part, places)


def expected_bytes(tokens: Sequence[int], places: Iterable[int]) -> bytes:
    """What the fake model keeps of a block's tokens: ids, then positions."""

    return np.array([list(tokens), list(places)], dtype=np.float32).tobytes()


@asynccontextmanager
async def bench(
    *,
    num_blocks: int = 64,
    put_budget_s: float = 5.0,
    max_held_blocks: int = 64,
    **options: Any,
) -> AsyncIterator[Bench]:
    window = min(256, num_blocks * BLOCK_SIZE)
    engine = fake_engine(
        num_blocks=num_blocks, model=FakeModel(block_size=BLOCK_SIZE, context_window=window)
    )
    limits = WorkerLimits(put_budget_s=put_budget_s)
    made = Bench(engine, limits)
    async with running(engine, on_step=made.on_step) as thread:
        made.thread = thread
        made.writes = WriteBehind(
            cast(StoreConnector, made.connector),
            thread,
            limits,
            made.counts,
            block_size=BLOCK_SIZE,
            max_held_blocks=max_held_blocks,
            on_room=made.on_room,
            **options,
        )
        try:
            yield made
        finally:
            made.store.gate.set()
            await end_tasks(made.connector.tasks)


async def test_answers_are_stored_behind_their_prompt_with_the_right_bytes() -> None:
    async with bench() as b:
        b.have_prompt()
        chain = b.begin(PROMPT)
        tokens = await b.answer(chain)  # 18 + 30: twelve blocks, eight of them the answer's
        b.writes.end(chain)
        b.writes.end(chain)
        await b.settle()
        assert sum(b.store.num_puts) == 8
        assert chain.leg.num_blocks_written_back == b.counts.num_blocks_written_back == 8
        b.store.stored = {k: v for k, v in b.store.stored.items() if v}
        assert list(b.store.stored) == b.hashes(tokens)[4:]
        parts = [tokens[i : i + BLOCK_SIZE] for i in range(16, 48, BLOCK_SIZE)]
        places = [range(i, i + BLOCK_SIZE) for i in range(16, 48, BLOCK_SIZE)]
        assert list(b.store.stored.values()) == list(map(expected_bytes, parts, places))
        assert not b.counts.not_written_back


async def test_few_blocks_of_a_running_request_wait_for_more() -> None:
    async with bench() as b:
        b.have_prompt()
        chain = b.begin(PROMPT)
        await b.answer(chain, num_tokens=15)  # 18 + 14: four blocks of the answer
        assert len(b.connector.tasks) == 1, "a whole batch is not left to wait"
        other = b.begin(prompt_of(18, start=9))
        await b.answer(other, prompt_of(18, start=9), 7)
        await b.settle()
        assert other.num_left == 2 and not b.store.stored.keys() & set(other.hashes[4:])
        b.writes.end(other)
        await b.settle()
        assert other.leg.num_blocks_written_back == 2
        b.assert_stored(b.tokens(prompt_of(18, start=9), 7), 6)


async def test_the_puts_of_one_turn_ask_the_engine_once() -> None:
    """An engine can be asked between two steps only: one put a step would store too little."""
    async with bench(max_put_bytes=3 * FRAME_BYTES) as b:
        b.store.gate.clear()
        _, tokens = await b.serve(num_known=0)
        await b.store.entered.wait()
        step_is_over = threading.Event()
        b.thread.post(lambda engine: step_is_over.wait(WAIT_S))
        b.store.gate.set()
        await until(lambda: b.store.num_puts == [3, 3, 3, 3])
        step_is_over.set()
        await b.settle()
        b.assert_stored(tokens, 12)
        await b.thread.call(lambda engine: engine.check_integrity())
        assert b.thread.stats.num_quarantined_blocks == 0


async def test_one_put_carries_the_chains_of_several_requests() -> None:
    """Its two calls cost more than the blocks in it."""
    async with bench() as b:
        prompts = [prompt_of(18, start=start) for start in (3, 5, 7)]
        b.store.gate.clear()
        await b.serve(prompt_of(8, start=1), 10, num_known=0)
        await b.store.entered.wait()
        for prompt in prompts:
            await b.serve(prompt, 1, num_known=0)
        b.store.gate.set()
        await b.settle()
        assert b.store.num_chains == [1, 3] and b.store.num_puts[1] == 12
        for prompt in prompts:
            b.assert_stored(prompt, 4)


async def test_one_chain_that_lacks_its_parent_costs_the_others_nothing() -> None:
    async with bench() as b:
        b.store.gate.clear()
        await b.serve(prompt_of(18, start=9), 1, num_known=0)
        await b.store.entered.wait()
        lacking, whole = b.begin(PROMPT), b.begin(prompt_of(18, start=5), num_known=0)
        tokens = await b.answer(lacking)
        await b.answer(whole, prompt_of(18, start=5), 1)
        b.writes.end(whole)
        b.writes.end(lacking)
        b.store.gate.set()
        await b.settle()
        assert b.store.num_chains[1] == 2 and b.store.num_puts[1] == 4
        b.assert_stored(tokens, 12)
        b.assert_stored(prompt_of(18, start=5), 4)
        assert lacking.num_restarts == 1 and not b.counts.not_written_back


@pytest.mark.parametrize(
    ("share", "is_whole", "expected"),
    [(0.01, True, 128), (0.01, False, 64), (0.1, True, 64), (0.3, True, 32), (1.0, False, 32)],
)
def test_puts_grow_while_they_are_quick_and_shrink_when_they_are_slow(
    share: float, is_whole: bool, expected: int
) -> None:
    assert next_put_bytes(64, share, is_whole=is_whole, least=8, most=512) == expected
    assert next_put_bytes(512, 0.01, is_whole=True, least=8, most=512) == 512
    assert next_put_bytes(8, 1.0, is_whole=False, least=8, most=512) == 8


async def test_puts_that_are_quick_grow_until_they_carry_all_that_is_held() -> None:
    async with bench(put_budget_s=3600.0) as b:
        b.writes._put_bytes["store:1"] = FRAME_BYTES
        await b.serve(num_known=0)
        await b.settle()
        assert b.store.num_puts == [1, 2, 4, 5]


async def test_a_put_that_gave_way_is_followed_by_a_smaller_one() -> None:
    async with bench(max_put_bytes=8 * FRAME_BYTES) as b:
        b.store.gate.clear()
        await b.serve(num_known=0)
        await b.store.entered.wait()
        b.writes.give_way()
        await until(lambda: b.store.num_cancelled == 1)
        await until(lambda: b.writes._put_bytes == {"store:1": 4 * FRAME_BYTES})
        b.store.gate.set()
        await b.settle()
        assert sum(b.store.num_puts) == 12


async def test_a_request_that_asks_while_a_load_is_under_way_gets_the_blocks_too() -> None:
    """The put that waits for the load does not begin."""
    async with bench() as b:
        chain = b.begin(PROMPT, num_known=0)
        await b.answer(chain, num_tokens=2)
        with b.writes.standing_back():
            b.writes.end(chain)
            await until(lambda: b.thread.stats.num_quarantined_blocks > 0)
            b.writes.give_way()
            num_before = b.num_times_room
            await until(lambda: b.num_times_room > num_before)
            assert not b.store.entered.is_set()
        await b.settle()
        assert sum(b.store.num_puts) == 4


async def test_a_turn_holds_no_more_than_it_may() -> None:
    async with bench(max_held_blocks=5) as b:
        b.store.gate.clear()
        chains = [b.begin(PROMPT, num_known=0) for _ in range(2)]
        tokens = await b.answer(chains[0])
        for chain in chains:
            b.writes.end(chain)
        await b.store.entered.wait()
        assert b.thread.stats.num_quarantined_blocks == 5
        b.store.gate.set()
        await b.settle()
        b.assert_stored(tokens, 12)
        assert max(b.store.num_puts) == 5


async def test_a_put_that_is_slow_reads_what_nobody_overwrites() -> None:
    """The request is over, and others need every block that there is."""
    async with bench(num_blocks=16) as b:
        b.have_prompt()
        b.store.gate.clear()
        chain, tokens = await b.serve()
        await b.store.entered.wait()
        num_held = len(chain.hashes) - 4
        await b.thread.call(lambda engine: engine.check_integrity())
        assert b.thread.stats.num_quarantined_blocks == num_held == 8
        for start in (20, 21, 22):  # 4 blocks are all that they have
            await b.generate(prompt_of(9, start=start), 7)
        b.store.gate.set()
        await b.settle()
        b.store.stored.update(
            zip(
                b.hashes(PROMPT),
                (
                    expected_bytes(PROMPT[i : i + BLOCK_SIZE], range(i, i + BLOCK_SIZE))
                    for i in range(0, 16, BLOCK_SIZE)
                ),
                strict=True,
            )
        )
        b.assert_stored(tokens, 12)


async def test_what_was_evicted_before_its_turn_is_not_stored() -> None:
    async with bench(num_blocks=16) as b:
        b.have_prompt()
        chain = b.begin(PROMPT)
        events = await b.generate(PROMPT, 31)
        for start in (20, 21):
            await b.generate(prompt_of(30, start=start), 31)
        for event in events:
            b.writes.add(chain, event.filled)
        b.writes.end(chain)
        await b.settle()
        assert b.store.num_puts == []
        assert chain.problem == "missing" and b.counts.not_written_back == Counter(missing=8)


async def test_a_store_that_forgets_all_the_time_is_given_up() -> None:
    async with bench() as b:
        chain = b.begin(PROMPT)
        real = b.store.put_chains

        async def forgetful(*asked: Any) -> list[PutResult]:
            results = await real(*asked)
            b.store.stored.clear()
            return results

        b.store.put_chains = forgetful  # type: ignore[method-assign, assignment]
        for turn in range(1, 8):
            for event in await b.generate(PROMPT, 16 * turn):
                b.writes.add(chain, event.filled)
            await b.settle()
        assert chain.problem == "missing" and chain.num_restarts == store_writer.MAX_RESTARTS + 1
        assert b.store.puts_again[-1] is False and b.store.puts_again.count(True) >= 2
        assert b.counts.not_written_back["missing"] > 0


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Unavailable("gone"), "store_unavailable"),
        (DeadlineExceeded("slow"), "deadline"),
        (TransferFailed("broken"), "transport"),
    ],
)
async def test_trouble_ends_one_chain_and_is_counted(error: BatonError, reason: str) -> None:
    async with bench() as b:
        b.have_prompt()
        b.store.error = error
        chain = b.begin(PROMPT)
        await b.answer(chain)
        await b.settle()
        b.writes.end(chain)
        await b.settle()
        assert chain.problem == reason and b.connector.suspected == [error]
        assert chain.leg.not_stored == b.counts.not_written_back == Counter({reason: 8})
        b.store.error = None
        other, _ = await b.serve()
        await b.settle()
        assert other.leg.num_blocks_written_back == 8


async def test_no_store_and_no_room() -> None:
    async with bench() as b:
        b.connector.client = None
        chain, _ = await b.serve()
        await b.settle()
        assert b.counts.not_written_back == Counter(store_unavailable=8)
        b.connector.client = b.store
        b.store.room = 7
        chain, tokens = await b.serve()
        await b.settle()
        b.assert_stored(tokens, 7)
        assert chain.leg.num_blocks_written_back == 3 and chain.leg.not_stored == Counter(no_room=5)


async def test_more_chains_than_may_wait_are_given_up() -> None:
    async with bench(max_chains=1) as b:
        b.store.gate.clear()
        chains = [b.begin(PROMPT) for _ in range(4)]
        events = await b.generate(PROMPT, 31)
        for index, chain in enumerate(chains):
            for event in events:
                b.writes.add(chain, event.filled)
            b.writes.end(chain)
            if index == 0:
                await b.store.entered.wait()
        assert [chain.problem for chain in chains] == ["", "", "no_room", "no_room"]
        b.store.gate.set()
        await b.settle()
        assert [chain.problem for chain in chains[:2]] == ["", ""]
        assert b.counts.num_blocks_written_back == 8


async def test_loads_go_first_but_not_for_ever() -> None:
    async with bench(put_budget_s=2 * WAIT_S) as b:
        b.have_prompt()
        chain = b.begin(PROMPT)
        with b.writes.standing_back():
            with b.writes.standing_back():
                await b.answer(chain)
            await settled()
            assert b.store.num_puts == []
        await b.settle()
        assert sum(b.store.num_puts) >= 4
        b.writes._limits = replace(b.writes._limits, put_budget_s=2.0)
        other = b.begin(prompt_of(16, start=8), num_known=0)
        with b.writes.standing_back():  # a load that does not end
            await b.answer(other, prompt_of(16, start=8), 17)
            await b.settle()
        assert other.num_stored >= 4


async def test_a_chain_is_dropped_while_it_waits_for_loads() -> None:
    """Its request was cancelled, say; the next one's is stored."""
    async with bench(put_budget_s=2 * WAIT_S) as b:
        chain = b.begin(PROMPT, num_known=0)
        with b.writes.standing_back():
            tokens = await b.answer(chain)
            await settled()
            b.writes.drop(chain)
            assert b.writes.num_chains == 0
        await b.settle()
        assert not b.store.num_puts and not b.counts.not_written_back
        await b.serve()
        await b.settle()
        b.assert_stored(tokens, 12)


async def test_a_store_that_is_slow_keeps_no_other_stores_chains_waiting() -> None:
    async with bench(put_budget_s=WAIT_S) as b:
        far = FakeStore(b.engine)
        far.gate.clear()
        await b.generate(PROMPT, 31)
        hashes = b.hashes(PROMPT)
        chains = [
            b.writes.begin(
                "t", hashes, LegProvenance(18), num_stored=0, client=cast(KvStoreClient, client)
            )
            for client in (far, far, None)
        ]
        for chain in chains:
            b.writes.end(chain)
        await far.entered.wait()
        await until(lambda: chains[2].num_left == 0)
        assert b.store.num_puts == [4] and not far.num_puts and b.writes.num_chains == 2
        far.gate.set()
        await b.settle()
        assert far.num_puts == [4] and far.num_chains == [2] and b.writes.num_chains == 0


async def test_any_order_of_turns_stores_prefixes_with_the_right_bytes(
    seed: int, scale: Callable[[int], int]
) -> None:
    """200 conversations of several turns on a small cache, over a store that forgets."""
    draw = random.Random(f"write behind {seed}")
    options = {"max_held_blocks": draw.randint(1, 30), "max_put_bytes": draw.randint(1, 900)}
    print(options)  # noqa: T201  pytest shows it with a failure
    async with bench(num_blocks=40, **options) as b:
        for index in range(scale(200)):
            rng = random.Random(f"write back {seed} {index}")
            prompt = prompt_of(rng.randint(1, 30), start=rng.randint(1, 3))
            chains = []
            for _ in range(rng.randint(1, 3)):
                num_tokens = rng.randint(1, 40)
                hashes = b.hashes(prompt)
                num_known = rng.choice([None, 0]) if len(prompt) > 40 else None
                known = hashes[:num_known]
                num_stored = rng.choice([len(known), rng.randint(0, len(known))])
                leg = LegProvenance(len(prompt))
                chain = b.writes.begin(
                    "t",
                    known,
                    leg,
                    num_stored=num_stored,
                    num_reached=len(known),
                    num_prompt_blocks=len(hashes),
                )
                chains.append(chain)
                for event in await b.generate(prompt, num_tokens):
                    b.writes.add(chain, event.filled)
                if rng.random() < 0.9:
                    b.writes.end(chain)
                tokens = b.tokens(prompt, num_tokens)
                if rng.random() < 0.5:
                    await b.settle()
                    assert_prefix(b, tokens)
                if rng.random() < 0.2:
                    b.store.room = rng.choice([5, 1000])
                prompt = (*tokens, *prompt_of(rng.randint(1, 5), start=rng.randint(1, 9)))
                if len(prompt) > 110:
                    break
            await b.settle()
            for chain in chains:
                num_there = [each in b.store.stored for each in chain.hashes]
                assert num_there == sorted(num_there, reverse=True), "presence has a gap"
            if rng.random() < 0.3:
                b.store.stored.clear()
        assert b.counts.num_blocks_written_back > 0


def assert_prefix(b: Bench, tokens: Sequence[int]) -> None:
    hashes = b.hashes(tokens)
    b.assert_stored(tokens, sum(each in b.store.stored for each in hashes))
