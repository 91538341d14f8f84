"""The engine's state machine under any order of calls, on a FakeModel and a small cache.

Each request is driven by a model of what it may do; every token drawn is compared with what a
correct engine must draw; blocks that a "transfer" may still write are overwritten with garbage.
Blocks are taken before a request begins, or as they are needed and away again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.errors import InvalidLogits, NoBlocks, UnknownRequest, WrongState
from engine.models.interface import LoadedModel
from engine.request import DetachedRequest, Request, RequestState, Reservation, Sampling
from engine.testing.ahead_model import AheadModel
from engine.testing.fake_model import FakeModel
from tests.conftest import examples
from tests.harness.engines import hasher

NUM_BLOCKS = 14
WINDOW = 40
SIZE = 4


@dataclass
class Known:
    """What the test knows of one live request."""

    request: Request
    reservation: Reservation
    state: RequestState = RequestState.RESERVED
    outputs: list[int] = field(default_factory=list)
    quarantined: set[int] = field(default_factory=set)
    held: DetachedRequest | None = None


class EngineMachine(RuleBasedStateMachine):
    """reserve, load, start, submit, step, fail, preempt, hold, abort, release, quarantine,
    unquarantine, refill, hold_cached, lend and return, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.configure("never", "priority", None)
        self.live: dict[str, Known] = {}
        self.num_requests = 0
        self.in_transfer: list[int] = []
        self.in_reading: list[tuple[int, int, list[int]]] = []
        """(block id, place of its first token, its tokens)."""
        self.lent: list[int] = []

    @initialize(
        preemption=st.sampled_from(["never", "recompute", "swap"]),
        policy=st.sampled_from(["fcfs", "priority", "cache_aware"]),
        is_late=st.sampled_from([None, False, True]),
    )
    def configure(self, preemption: str, policy: str, is_late: bool | None) -> None:
        """is_late: None: plain steps; else launches ahead, computed late or at once."""
        config = EngineConfig(
            num_blocks=NUM_BLOCKS,
            max_num_tokens_per_step=7,
            max_num_running=3,
            preemption=preemption,
            policy=policy,
            park_bytes=400,
        )
        self.model = FakeModel(context_window=WINDOW)
        self.oracle = FakeModel(context_window=WINDOW)
        """The same model, without the tokens that `fail` poisons."""
        model: LoadedModel = self.model
        if is_late is not None:
            model = AheadModel(model, is_late=is_late)
        self.engine = LLMEngine(config, model)

    def pick(self, data: st.DataObject, *states: RequestState) -> Known | None:
        names = [name for name, known in self.live.items() if known.state in states]
        return self.live[data.draw(st.sampled_from(names))] if names else None

    @rule(family=st.integers(1, 3), length=st.integers(1, 20), max_tokens=st.integers(1, 12))
    def submit(self, family: int, length: int, max_tokens: int) -> None:
        """The engine takes blocks when it can."""
        self.num_requests += 1
        prompt = tuple((family * 31 + i) % 97 for i in range(length))
        sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
        request = Request(str(self.num_requests), prompt, sampling, hasher())
        self.engine.submit(request)
        nothing = Reservation(request.request_id, (), 0, ())
        self.live[request.request_id] = Known(request, nothing, RequestState.WAITING)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        known = self.pick(data, RequestState.WAITING, RequestState.PREFILLING, RequestState.RUNNING)
        if known is None:
            return
        try:
            self.engine.preempt(known.request.request_id)
        except WrongState:
            assert (
                self.engine.config.preemption == "never"
                or known.request.hold_after is not None
                or not self.engine.block_ids(known.request.request_id)
            )

    @rule(
        family=st.integers(1, 3),
        length=st.integers(1, 20),
        max_tokens=st.integers(1, 12),
        hold_after=st.sampled_from([None, None, 1, 3]),
        priority=st.integers(0, 1),
        is_eos_ignored=st.booleans(),
    )
    def reserve(
        self,
        family: int,
        length: int,
        max_tokens: int,
        hold_after: int | None,
        priority: int,
        is_eos_ignored: bool,
    ) -> None:
        self.num_requests += 1
        prompt = tuple((family * 31 + i) % 97 for i in range(length))
        request = Request(
            request_id=str(self.num_requests),
            prompt_token_ids=prompt,
            sampling=Sampling(max_tokens=max_tokens, ignore_eos=is_eos_ignored),
            block_hasher=hasher(),
            hold_after=hold_after,
            priority=priority,
        )
        before = self.engine.stats()
        try:
            reservation = self.engine.reserve(request)
        except NoBlocks:
            assert self.engine.stats() == before
            return
        assert reservation.num_local_tokens <= (length - 1) // SIZE * SIZE
        assert not set(reservation.block_ids) & set(self.in_transfer)
        self.live[request.request_id] = Known(request, reservation)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), is_output_known=st.booleans())
    def load_and_start(self, data: st.DataObject, is_output_known: bool) -> None:
        """Another thread wrote some leading tokens into the reserved blocks; then start."""
        known = self.pick(data, RequestState.RESERVED)
        if known is None:
            return
        request, prompt = known.request, known.request.prompt_token_ids
        limit = min(request.sampling.max_tokens, request.hold_after or WINDOW)
        outputs = [self.model.next_token(prompt)] if is_output_known and limit > 1 else []
        ids = self.engine.block_ids(request.request_id)
        num_whole = ids.index(-1) * SIZE if -1 in ids else len(prompt)
        most = min(num_whole, len(prompt))
        num_loaded = data.draw(st.one_of(st.just(most), st.integers(0, most)))
        first = known.reservation.num_local_tokens
        for position in range(first, num_loaded):
            cell = self.engine.kv.cache[ids[position // SIZE], 0, 0, :, position % SIZE, 0]
            cell[0], cell[1] = float(prompt[position]), float(position)
        try:
            self.engine.start(request.request_id, num_loaded_tokens=num_loaded, outputs=[outputs])
        except NoBlocks:
            assert -1 in ids
            return
        known.outputs = list(outputs)
        known.state = RequestState.WAITING

    @rule()
    def step(self) -> None:
        output = self.engine.step()
        assert output.num_scheduled_tokens <= 7
        stats = self.engine.stats()
        levels = output.num_running, output.num_waiting
        assert levels == (stats.num_running, stats.num_waiting)
        for event in output.events:
            known = self.live[event.request_id]
            if event.error is not None:
                assert isinstance(event.error, InvalidLogits) and self.model.poison
                del self.live[event.request_id]
                continue
            known.state = (
                RequestState.PREFILLING if known.state is RequestState.WAITING else known.state
            )
            for token_id in event.token_ids:
                history = [*known.request.prompt_token_ids, *known.outputs]
                assert token_id == self.oracle.next_token(history), event.request_id
                known.outputs.append(token_id)
                known.state = RequestState.RUNNING
            hold_after = known.request.hold_after
            if hold_after is not None and (
                event.finish_reason is not None or len(known.outputs) >= hold_after
            ):
                known.state = RequestState.HOLDING
            elif event.finish_reason is not None:
                del self.live[event.request_id]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """A request fails in the middle, while a writer to a store holds its blocks: the model's
        logits after its next tokens are NaN. So are those of other requests after these tokens."""
        self.step()  # so that a waiting one may have begun
        known = self.pick(data, RequestState.PREFILLING, RequestState.RUNNING)
        if known is None:
            return
        tokens = [*known.request.prompt_token_ids, *known.outputs]
        self.hold_chain(tokens, 0)
        self.model.poison = frozenset((tokens[-1], *self.oracle.generate(tokens, 2)))
        for _ in range(4):  # steps under way have computed the next tokens already
            self.step()
        self.model.poison = frozenset()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        known = self.pick(data, *RequestState)
        assert known is not None
        self.engine.abort(known.request.request_id)
        del self.live[known.request.request_id]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        """It shall go on elsewhere."""
        known = self.pick(data, RequestState.WAITING, RequestState.PREFILLING, RequestState.RUNNING)
        if known is None:
            return
        try:
            held = self.engine.detach(known.request.request_id)
        except WrongState:
            assert known.request.hold_after is not None or known.state is RequestState.WAITING
            return
        assert held.token_ids == (*known.request.prompt_token_ids, *known.outputs)
        known.state, known.held = RequestState.HOLDING, held

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        known = self.pick(data, RequestState.HOLDING)
        if known is not None:
            self.engine.release(known.request.request_id)
            del self.live[known.request.request_id]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        """A load timed out; whoever writes may go on writing."""
        known = self.pick(data, RequestState.RESERVED)
        if known is None:
            return
        first = known.reservation.num_local_tokens // SIZE
        own = [b for b in self.engine.block_ids(known.request.request_id)[first:] if b != -1]
        if own:
            chosen = data.draw(st.lists(st.sampled_from(own), unique=True, max_size=3))
            self.engine.quarantine(known.request.request_id, chosen)
            self.in_transfer += chosen

    @precondition(lambda self: self.in_transfer)
    @rule(data=st.data())
    def late_write(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(self.in_transfer))
        self.engine.kv.host_view[block_id] = 0x5A

    @precondition(lambda self: self.in_transfer)
    @rule(data=st.data())
    def unquarantine(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.in_transfer) - 1))
        self.engine.unquarantine([self.in_transfer.pop(index)])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def refill(self, data: st.DataObject) -> None:
        known = self.pick(data, RequestState.RESERVED)
        if known is None:
            return
        name = known.request.request_id
        before = self.engine.block_ids(name)
        num_available = self.engine.stats().num_free_blocks + self.engine.stats().num_cached_blocks
        after = self.engine.refill(name)
        assert after == self.engine.block_ids(name)
        assert -1 not in after or before.count(-1) > num_available
        kept = [(old, new) for old, new in zip(before, after, strict=True) if old != -1]
        assert all(old == new for old, new in kept)
        assert not set(after) & set(self.in_transfer)

    @rule(data=st.data(), family=st.integers(1, 3), first=st.integers(0, 2))
    def hold_cached(self, data: st.DataObject, family: int, first: int) -> None:
        """A chain is to be read, of whatever request."""
        tokens = [(family * 31 + i) % 97 for i in range(20)]
        known = self.pick(data, *RequestState)
        if known is not None:
            tokens = [*known.request.prompt_token_ids, *known.outputs]
        self.hold_chain(tokens, first)

    def hold_chain(self, tokens: list[int], first: int) -> None:
        """Hold blocks [first, ..) of what is cached of these tokens."""
        blocks = [tokens[i : i + SIZE] for i in range(0, len(tokens) - SIZE + 1, SIZE)]
        hashes: list[bytes] = []
        for block in blocks:
            hashes.append(hasher()(hashes[-1] if hashes else b"", block))
        for index, block_id in enumerate(self.engine.hold_cached(hashes, first), first):
            self.in_reading.append((block_id, index * SIZE, blocks[index]))

    @precondition(lambda self: self.in_reading)
    @rule(data=st.data())
    def end_reading(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.in_reading) - 1))
        self.engine.unquarantine([self.in_reading.pop(index)[0]])

    @rule(num_blocks=st.integers(0, 6))
    def lend(self, num_blocks: int) -> None:
        """Somebody who is no request measures with them, and writes what he likes."""
        before = self.engine.stats()
        block_ids = self.engine.lend_blocks(num_blocks)
        assert len(block_ids) <= min(num_blocks, before.num_free_blocks // 2)
        assert self.engine.stats().num_evicted_blocks == before.num_evicted_blocks
        self.engine.kv.host_view[list(block_ids)] = 0x5A
        self.lent += block_ids

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def return_blocks(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.lent), unique=True, min_size=1))
        self.engine.return_blocks(chosen)
        self.lent = [block_id for block_id in self.lent if block_id not in chosen]
        with pytest.raises(WrongState):
            self.engine.return_blocks(chosen)

    @invariant()
    def what_is_lent_is_nobody_elses(self) -> None:
        for name in self.live:
            if self.live[name].state is not RequestState.WAITING:  # it may have no sample just now
                assert not set(self.engine.block_ids(name)) & set(self.lent)

    @invariant()
    def what_is_read_stays_as_it_is(self) -> None:
        for block_id, start, tokens in self.in_reading:
            cell = self.engine.kv.cache[block_id, 0, 0, :, :, 0]
            assert cell[0].tolist() == tokens
            assert cell[1].tolist() == list(range(start, start + SIZE))

    @invariant()
    def what_is_read_is_given_to_no_request(self) -> None:
        """A held block is a request's only as a part of the same prefix."""
        held = {block_id: (start, tokens) for block_id, start, tokens in self.in_reading}
        for name, known in self.live.items():
            history = [*known.request.prompt_token_ids, *known.outputs]
            for place, block_id in enumerate(self.block_ids(name)):
                if block_id in held:
                    start, tokens = held[block_id]
                    assert (start, tokens) == (place * SIZE, history[start : start + SIZE])

    def block_ids(self, name: str) -> tuple[int, ...]:
        try:
            return self.engine.block_ids(name)
        except UnknownRequest:  # it has no sample now
            return ()

    @invariant()
    def what_was_taken_out_stays_as_it_was(self) -> None:
        for held in [known.held for known in self.live.values() if known.held is not None]:
            for place, token_id in enumerate(held.token_ids[: held.num_computed_tokens]):
                cell = self.engine.kv.cache[held.block_ids[place // SIZE], 0, 0, :, place % SIZE, 0]
                assert cell.tolist() == [token_id, place]

    @invariant()
    def holds_its_law(self) -> None:
        self.engine.check_integrity()
        stats = self.engine.stats()
        states = [known.state for known in self.live.values()]
        assert stats.num_reserved == states.count(RequestState.RESERVED)
        started = (RequestState.WAITING, RequestState.PREFILLING, RequestState.RUNNING)
        assert stats.num_waiting + stats.num_running == sum(map(states.count, started))
        assert stats.num_holding == states.count(RequestState.HOLDING)
        assert stats.num_running <= 3
        num_read = len({block_id for block_id, _, _ in self.in_reading})
        num_more = stats.num_quarantined_blocks - len(self.in_transfer)
        assert 0 <= num_more <= num_read

    def teardown(self) -> None:
        """Whatever happened: let everything end, and nothing is left."""
        self.engine.return_blocks(self.lent)
        self.engine.unquarantine(self.in_transfer)
        self.engine.unquarantine([block_id for block_id, _, _ in self.in_reading])
        for name in [n for n, known in self.live.items() if known.state is RequestState.RESERVED]:
            self.engine.abort(name)
            del self.live[name]
        rounds: Callable[[], bool] = self.engine.has_work
        while self.live:
            assert rounds() or RequestState.HOLDING in {known.state for known in self.live.values()}
            while rounds():
                self.step()
            for name in [
                n for n, known in self.live.items() if known.state is RequestState.HOLDING
            ]:
                self.engine.release(name)
                del self.live[name]
        self.engine.check_integrity()
        stats = self.engine.stats()
        assert stats.num_free_blocks + stats.num_cached_blocks == NUM_BLOCKS


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
