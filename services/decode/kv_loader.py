"""KvLoader: loads the KV that handles name into one decode request's reserved blocks. It checks the
handles, fetches and verifies the blocks, and counts by reason those that could not be used. Nothing
here fails a request: a block that cannot be fetched is recomputed.

`pull_early`, any number of times, each with a partial handle while prefill still runs; `pull_rest`
when a lender has answered with the rest of the prompt; then `load` once with the final handle (or
none), which fetches only the missing blocks. An early pull that fails is tried again by `load`.
`give_back` releases the final handle's leases, if they are this request's. Invariant: tokens [0,
num_tokens) are verified, named by a handle, and lie in the reservation's blocks; a block that a
late transfer may still write into is not one of those (`LLMEngine.refill`). One call at a time.

KvArrival: the handles of a request while it arrives: created with the request -> `prefetch`, any
number of times -> `hand_over`, once; `wait` pulls meanwhile and returns at the final handover. From
then on the handle belongs to the request; `untaken` has to be released if the request ended before
that.

CopyAhead: copies the rest of a prompt from the prefill worker that lends it, before a handle names
it, so that the bytes move while the handle is on its way. `follow` with the content of a partial
handle -> a call waits at the lender, one at a time (kvstore/block_lender.py) -> all of the prompt
is lent: `on_rest` is called -> `take` returns its location -> `keep` the copied blocks -> `confirm`
with each handle: blocks that it names identically may be used -> `close`, from any state. The
lender's answer is not a handle: a block is used only if a signed handle names it with the same
frame, generation, checksum and lease. So the lender need not wait for checksums: unsealed blocks
are kept with the checksums of the bytes that came, which are compared with the handle's. A failed
call costs nothing, since the handle suffices. It does not count as a failure if its lease has ended
(the prompt was abandoned) or if the lender cannot be reached (the copy of the partial handle's
blocks reports that).

`pull` copies blocks of one prompt from stores and lenders into their places, run by run, up to the
first that fails.

Leases: a final handle hands its leases over to the request that takes it. They are released at the
store that granted them, in the background; a lease that cannot be released expires. A partial
handle hands over nothing.

Used on the event loop's thread; KvLoader, KvArrival and CopyAhead belong to one request.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from engine.request import Reservation
from engine.sequence import HOLE
from kvstore import block_hash
from kvstore.block_lender import LENDER_LIMITS
from kvstore.block_refs import InTier, PackedBlocks, PackedItems
from kvstore.client import KvStoreClient
from kvstore.errors import CHECKSUM, DEADLINE, MISSING, LeaseLapsed
from kvstore.node_ids import is_lender
from process import logs
from process.background_tasks import start_task
from process.deadline import Deadline
from process.rpc_errors import BatonError, Unavailable
from services.decode.request_spec import DecodeRequestSpec, DecodeState
from services.worker import handle as handles
from services.worker.handle import Handle, HandleRun
from services.worker.provenance import FINGERPRINT, LegProvenance
from services.worker.runtime import WorkerCore
from services.worker.store_pool import RELEASE_BUDGET_S, LoadedBlocks, reason_of

logger = logging.getLogger(__name__)


def is_home(core: WorkerCore, run: HandleRun) -> bool:
    """Return whether a run is in this worker's own store; by its address while that store is
    away."""
    client = core.connector.client
    if client is not None:
        return run.node_id == client.node_id
    return run.store_address == core.connector.address


async def client_for(core: WorkerCore, run: HandleRun, deadline: Deadline) -> KvStoreClient:
    """Return a client of the store that holds a run.

    Raises: Unavailable (StoreUnusable for another node's) when it cannot be used now,
        DeadlineExceeded.
    """
    if not is_home(core, run):
        return await core.remote_stores.client(
            run.node_id, run.store_address, run.store_incarnation, deadline
        )
    client = core.connector.client
    if client is None:
        raise Unavailable(f"our store {core.connector.address} is away")
    return client


def place_of(run: HandleRun) -> tuple[str, bytes, str]:
    """Return the key by which blocks are read together: one lease of one store incarnation."""
    return run.node_id, run.store_incarnation, run.lease_id


def is_for(handle: Handle, request_id: str, tenant: str) -> bool:
    """Return whether a handle was made for that request: leases of another request must not be
    released here."""
    return (handle.request_id, handle.tenant) == (request_id, tenant)


def give_back(core: WorkerCore, handle: Handle, home: KvStoreClient | None = None) -> None:
    """Release the leases that a handle hands over, each at its own store.

    Args: home: client of this worker's own store from before it was found stalled; None: the
    present one.
    """
    if handle.is_partial:
        return
    runs = (*handle.runs, *((handle.tail,) if handle.tail else ()))
    by_store: dict[tuple[str, str, bytes], dict[str, HandleRun]] = {}
    for run in runs:
        if run.lease_id:
            place = (run.node_id, run.store_address, run.store_incarnation)
            by_store.setdefault(place, {})[run.lease_id] = run
    for leases in by_store.values():
        run = next(iter(leases.values()))
        if is_home(core, run):
            core.connector.release_later(core.connector.client or home, leases)
        else:
            core.connector.spawn(_give_back_elsewhere(core, run, list(leases)))


async def _give_back_elsewhere(core: WorkerCore, run: HandleRun, lease_ids: Sequence[str]) -> None:
    try:
        client = await client_for(core, run, Deadline.after(RELEASE_BUDGET_S))
    except BatonError as error:
        logs.event(logger, "lease_not_released", level=logging.WARNING, why=str(error))
        return
    core.remote_stores.release_later(client, lease_ids)


@dataclass(frozen=True)
class PullBatch:
    """Blocks and their places, all under one lease of one store incarnation, given by the run.
    num_unsealed, held_until_s: as in KvStoreClient.get_blocks."""

    run: handles.HandleRun
    items: PackedItems
    num_unsealed: int = 0
    held_until_s: float = 0.0

    def came(self, loaded: LoadedBlocks) -> PackedBlocks:
        """Return the leading blocks that were loaded; unsealed ones with the checksums of the bytes
        that are here now."""
        blocks = self.items.blocks[: loaded.num_usable]
        first = len(self.items) - self.num_unsealed
        if first >= len(blocks):
            return blocks
        found = [loaded.checksums[index] for index in range(first, len(blocks))]
        return blocks.with_checksums(first, found)


@dataclass
class Pulled:
    """Result of one pull: loaded blocks by the node they came from, in order; missing ones by
    reason."""

    loaded: list[tuple[str, PackedBlocks]] = field(default_factory=list)
    not_usable: Counter[str] = field(default_factory=Counter)
    num_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Bytes by node that was read and transport."""

    @functools.cached_property
    def tiers(self) -> list[tuple[str, list[InTier]]]:
        """Return the number of blocks of each tier in `loaded`, computed once it is complete."""
        return [(node_id, blocks.tiers()) for node_id, blocks in self.loaded]

    @property
    def num_tokens(self) -> int:
        return sum(each.num_tokens for _, tiers in self.tiers for each in tiers)


async def pull(
    core: WorkerCore, engine_id: str, wanted: Sequence[PullBatch], deadline: Deadline
) -> Pulled:
    """Copy and verify blocks, run by run, up to the first that fails. Unsealed blocks are copied
    without verification."""
    pulled = Pulled()
    num_left = sum(len(batch.items) for batch in wanted)
    for batch in wanted:
        run, items = batch.run, batch.items
        reason = ""
        try:
            budget = deadline.sooner(core.limits.transfer_budget_s)
            client = await client_for(core, run, budget)
        except BatonError as error:
            reason = reason_of(error)
        else:
            begun_s = time.monotonic()
            loaded = await core.connector.load(
                client,
                engine_id,
                run.lease_id,
                items,
                deadline,
                incarnation=run.store_incarnation,
                num_unsealed=batch.num_unsealed,
                held_until_s=batch.held_until_s,
            )
            if core.step_log is not None:
                core.step_log.transfer(begun_s, loaded.num_usable)
            pulled.loaded.append((run.node_id, batch.came(loaded)))
            pulled.num_bytes[run.node_id, client.transport_name] += loaded.num_bytes
            pulled.not_usable.update(loaded.not_usable)
            num_left -= loaded.num_usable
            if loaded.num_usable < len(items):
                reason = next(iter(loaded.not_usable))
        if reason:  # what lies behind it cannot be used without it
            num_more = num_left - pulled.not_usable.total()
            if num_more:
                pulled.not_usable[reason] += num_more
            break
    return pulled


MAX_WAIT_S = LENDER_LIMITS.max_wait_s
"""Most seconds that one question waits at the lender; no lender waits longer."""

ANSWER_S = 1.0
"""Seconds for the answer of a lender whose wait is over. Guessed."""


@dataclass(frozen=True)
class RestOfPrompt:
    """Location of a prompt's remaining blocks at their lender. num_unsealed: number of blocks at
    the end that have no checksum yet. held_until_s: time until which the lender keeps all of them
    (KvStoreClient.await_lent)."""

    run: handles.HandleRun
    num_unsealed: int = 0
    held_until_s: float = 0.0

    def of(self, batch: PullBatch, first: int) -> PullBatch:
        """Return `batch`, whose blocks begin at the prompt's block `first`, with what is known here
        of its unsealed blocks."""
        num_left_out = self.run.first_block + len(self.run.blocks) - first - len(batch.items)
        num_unsealed = max(0, min(len(batch.items), self.num_unsealed - num_left_out))
        return dataclasses.replace(batch, num_unsealed=num_unsealed, held_until_s=self.held_until_s)


@dataclass(frozen=True)
class CopiedAhead:
    """Blocks that were copied to their places here, with the checksums that `run` names."""

    run: handles.HandleRun

    @property
    def blocks(self) -> PackedBlocks:
        return PackedBlocks.of(self.run.blocks)

    @property
    def end(self) -> int:
        return self.run.first_block + len(self.run.blocks)

    def part(self, first: int, end: int) -> CopiedAhead:
        """Return the blocks [first, end), counted from the first block of `run`."""
        refs = self.run.blocks[first:end]
        run = dataclasses.replace(self.run, first_block=self.run.first_block + first, blocks=refs)
        return CopiedAhead(run)


class CopyAhead:
    """Early copy of one request's remaining blocks from their lender."""

    def __init__(
        self, core: WorkerCore, *, on_rest: Callable[[], None], on_failure: Callable[[str], None]
    ) -> None:
        """Create without a question. on_failure: called with the reason why a lender did not answer
        a question."""
        self._core = core
        self._on_rest = on_rest
        self._on_failure = on_failure
        self._asking: asyncio.Task[None] | None = None
        self._rest: RestOfPrompt | None = None
        self._copied: CopiedAhead | None = None
        self._why_not = FINGERPRINT
        self._is_over = False

    @property
    def has_rest(self) -> bool:
        """Return whether `take` has a result."""
        return self._rest is not None

    def follow(self, run: handles.HandleRun, num_wanted: int, deadline: Deadline) -> None:
        """Ask the lender for the blocks after a run from the prompt's first block on. Does nothing
        where the run is not a lender's, or all blocks are known.

        Args: num_wanted: number of blocks of the whole prompt, including an unfilled tail.
        """
        if self._is_over or not is_lender(run.node_id) or run.first_block != 0:
            return
        if len(run.blocks) >= num_wanted:
            return
        if self._asking is not None:
            self._asking.cancel()  # it knew less
        self._asking = start_task(self._ask(run, num_wanted, deadline), "asking ahead")

    def take(self) -> RestOfPrompt | None:
        """Return where the remaining blocks are, once."""
        rest, self._rest = self._rest, None
        return rest

    def keep(self, copied: CopiedAhead) -> None:
        """Keep copied blocks, as the lender described them, until a handle confirms them."""
        self._why_not = FINGERPRINT
        self._copied = copied if copied.blocks else None

    def confirm(self, stretch: handles.Stretch) -> CopiedAhead | None:
        """Return the copied blocks that a handle names with the same contents; they are no longer
        kept here."""
        copied = self._copied
        if copied is None or place_of(copied.run) != place_of(stretch.run):
            return None
        first = copied.run.first_block
        if not stretch.first <= first < stretch.end:
            return None
        ours = copied.blocks
        named = PackedBlocks.of(stretch.blocks(first, copied.end))
        num_same = ours.num_same(named)
        if num_same == len(ours):
            self._copied = None
            return copied
        if num_same:
            self.keep(copied.part(num_same, len(copied.blocks)))
        if num_same < len(named):
            with_checksum = dataclasses.replace(ours[num_same], checksum=named[num_same].checksum)
            self._why_not = CHECKSUM if with_checksum == named[num_same] else FINGERPRINT
        return copied.part(0, num_same) if num_same else None

    def contradiction(self, num_named: int) -> str | None:
        """Return why copied blocks are left although a handle names `num_named` blocks and was
        confirmed: they have other bytes or belong to other blocks. They are dropped then."""
        if self._copied is None or self._copied.run.first_block >= num_named:
            return None
        self._copied = None
        return self._why_not

    def close(self) -> None:
        """Stop asking; copied blocks wait for their handle. Idempotent."""
        self._is_over = True
        self._rest = None
        if self._asking is not None:
            self._asking.cancel()

    async def _ask(self, run: handles.HandleRun, num_wanted: int, deadline: Deadline) -> None:
        budget = deadline.sooner(self._core.limits.transfer_budget_s)
        try:
            client = await client_for(self._core, run, budget)
        except BatonError:
            return  # see the module
        rest = await self._await_rest(client, run, num_wanted, deadline)
        if rest is None:
            return
        self._is_over = True
        self._rest = rest
        self._on_rest()

    async def _await_rest(
        self, client: KvStoreClient, run: handles.HandleRun, num_wanted: int, deadline: Deadline
    ) -> RestOfPrompt | None:
        """Return the lent blocks after a run, once these are all; None: the lender did not say
        so."""
        for _ in range(1 + int(deadline.left_s() / MAX_WAIT_S)):
            left_s = deadline.left_s()
            wait_s = min(MAX_WAIT_S, left_s)
            try:
                update, held_until_s = await client.await_lent(
                    run.lease_id,
                    num_known=len(run.blocks),
                    num_wanted=num_wanted,
                    wait_s=wait_s,
                    deadline=deadline.sooner(MAX_WAIT_S + ANSWER_S),
                )
            except LeaseLapsed:
                return None
            except BatonError as error:
                # It waits as it was told to: to answer it had no more than what is behind that.
                had_s = min(ANSWER_S, left_s - wait_s)
                self._core.connector.suspect(client, error, had_s=had_s)
                self._on_failure(reason_of(error))
                return None
            if update.is_all:
                rest = dataclasses.replace(run, first_block=len(run.blocks), blocks=update.blocks)
                return RestOfPrompt(rest, update.num_unsealed, held_until_s)
        return None


@dataclass(frozen=True)
class GenerateCommand:
    """Final handover to a reserved request. `handle` None: no KV was handed over."""

    handle: handles.Handle | None
    outputs: tuple[tuple[int, ...], ...]
    """Tokens that were drawn already, of each sample in order."""
    over: frozenset[int] = frozenset()
    """Indices of the samples that have ended."""
    beam_start: tuple[tuple[int, float], ...] = ()
    """State from which a beam search continues."""
    refusal: str | None = None
    """Reason why a handle cannot even be parsed; None: it can, or there is none."""
    computes_prompt: bool = False
    """Whether, without a handle, no other worker was asked to compute the prompt, so that none of
    it counts as missing."""


@dataclass(frozen=True)
class _Look:
    """Checked final handover, apart from its blocks."""

    handover: GenerateCommand
    context: tuple[int, ...]
    """Prompt and the tokens drawn already."""
    found: list[handles.Stretch]
    """Stretches that the final handle names, the tail included."""
    why_short: str | None
    """Reason why these are not the whole prompt."""


class KvLoader:
    """Loading of one request's KV from partial handles and the final one."""

    def __init__(
        self,
        core: WorkerCore,
        ask: DecodeRequestSpec,
        engine_id: str,
        reservation: Reservation,
        leg: LegProvenance,
        *,
        on_rest: Callable[[], None] = lambda: None,
    ) -> None:
        """Create for a reservation; no block is loaded yet.

        Args:
            ask: the request whose KV is loaded.
            reservation: reserved blocks of the engine request `engine_id`.
            on_rest: called when `pull_rest` has work.
        """
        self._core = core
        self._ask = ask
        self._engine_id = engine_id
        self._reservation = reservation
        self._leg = leg
        self._size = core.model.block_size
        self._block_ids = reservation.block_ids
        self._home = core.connector.client
        self._early: list[Pulled] = []
        self._look: _Look | None = None
        self._look_problem: Exception | None = None  # of an early look
        self._ahead = CopyAhead(core, on_rest=on_rest, on_failure=self._tell)
        self._has_tail = False
        self._num_counted = 0  # blocks that did not come and have a reason of their own
        self.num_tokens = reservation.num_local_tokens
        """Tokens, counted from the first, whose KV is verified and there."""

    @property
    def block_size(self) -> int:
        """Return the number of tokens per block."""
        return self._size

    @property
    def num_blocks(self) -> int:
        """Return the number of leading full blocks that are loaded and verified."""
        return self.num_tokens // self._size

    def hashes(self, context: tuple[int, ...]) -> list[bytes]:
        """Return the chain hashes of the full blocks of prompt and drawn tokens, with this worker's
        tenant key."""
        size, known = self._size, self._reservation.chain_hashes
        more = context[len(known) * size :]  # with what was drawn one block may be full by now
        parent = known[-1] if known else b""
        hashes = [*known, *block_hash.chain(self._ask.chain.root, more, size, parent)]
        return hashes[: len(context) // size]

    async def pull_early(self, handle: handles.Handle, deadline: Deadline) -> None:
        """Fetch the full blocks that a partial handle names beyond those loaded, and ask its lender
        for the rest meanwhile."""
        prompt = self._ask.prompt_token_ids
        try:
            self._check(handle, prompt)
        except handles.HandleRefused as refused:
            self._tell(refused.reason)
            return
        found, why_short = handles.stretches(handle, self.hashes(prompt))
        if len(found) == 1 and why_short is None:
            self._ahead.follow(found[0].run, self._num_lendable, deadline)
        self._confirm(found)
        wanted, _ = self._wanted(found)
        pulled = await self._pull(wanted, deadline)
        self._take(pulled)
        self._early.append(pulled)
        await self._settle(pulled)

    @property
    def has_rest(self) -> bool:
        """Return whether `pull_rest` has work."""
        return self._ahead.has_rest

    async def pull_rest(self, deadline: Deadline) -> None:
        """Fetch the blocks that the lender offers beyond those loaded, for a handle that will name
        them."""
        rest = self._ahead.take()
        if rest is None or rest.run.first_block > self.num_blocks:
            return
        first, run = self.num_blocks, rest.run
        end = self._end_of_own(run)
        wanted, _ = self._wanted([handles.Stretch(run, run.first_block, end)])
        wanted = [rest.of(batch, first) for batch in wanted]  # one at most
        pulled = await self._pull(wanted, deadline)
        self._count_bytes(pulled)
        for _, blocks in pulled.loaded:
            self._ahead.keep(CopiedAhead(replace(run, first_block=first, blocks=blocks)))
        await self._settle(pulled)

    def follow_no_more(self) -> None:
        """Stop early copies: the final handle is here, or none will come. Idempotent."""
        self._ahead.close()

    def look_early(self, handover: GenerateCommand) -> None:
        """Check the final handover as far as possible while blocks that it may name are still being
        copied. Never raises, since its caller serves other requests too; `load` and `look_at`
        raise."""
        try:
            self._looked_at(handover)
        except Exception as error:
            self._look_problem = error

    def look_at(self, handover: GenerateCommand) -> tuple[int, ...]:
        """Check the final handover, if that was not done. Returns: prompt and the tokens drawn
        already."""
        return self._looked_at(handover).context

    async def load(self, handover: GenerateCommand, deadline: Deadline) -> int:
        """Fetch what was handed over beyond the loaded blocks, and record all of it in the leg. The
        leases must then be released with `give_back`. Returns: number of leading tokens whose KV is
        loaded and verified."""
        self._home = self._core.connector.client or self._home
        why = await self._load(self._looked_at(handover), deadline)
        if not handover.computes_prompt:
            self._count_rest(why)
        return self.num_tokens

    def num_at_home(self, handover: GenerateCommand) -> int:
        """Return the number of leading full blocks that are assumed to be in this worker's own
        store: those before the first one that the handle names in another node's store. (A lender's
        blocks are stored afterwards, in a store that may be this one.)"""
        for stretch in self._looked_at(handover).found:
            if not is_home(self._core, stretch.run) and not is_lender(stretch.run.node_id):
                return min(stretch.first, self.num_blocks)
        return self.num_blocks

    def give_back(self, handover: GenerateCommand) -> None:
        """Release the leases of the final handle, whatever the result of `load`; once."""
        handle = handover.handle
        if handle is not None and is_for(handle, self._ask.request_id, self._ask.tenant):
            give_back(self._core, handle, self._home)

    async def _load(self, look: _Look, deadline: Deadline) -> str:
        """Load the blocks of a checked handover. Returns: why blocks that are missing and not
        counted yet are missing."""
        context, found, why_short = look.context, look.found, look.why_short
        self._confirm(found)
        self._count_early(context)
        wanted, has_hole = self._wanted(found)
        if has_hole:
            why_short = DEADLINE
        pulled = await self._pull(wanted, deadline)
        self._count(pulled, self.num_tokens, context, is_early=False)
        self._take(pulled)
        self._leg.recomputed.update(pulled.not_usable)
        self._num_counted = pulled.not_usable.total()
        return why_short or MISSING

    def _looked_at(self, handover: GenerateCommand) -> _Look:
        if self._look_problem is not None:
            raise self._look_problem
        look = self._look
        if look is None or look.handover is not handover:
            drawn = next(iter(handover.outputs), ()) if self._ask.beam is None else ()
            drawn = drawn or tuple(token_id for token_id, _ in handover.beam_start[:1])
            context = self._ask.prompt_token_ids + drawn
            self._look = look = _Look(handover, context, *self._named(handover, context))
        return look

    def _named(
        self, handover: GenerateCommand, context: tuple[int, ...]
    ) -> tuple[list[handles.Stretch], str | None]:
        """Return the stretches that the final handle names, the tail included, and why they are not
        the whole prompt."""
        handle = handover.handle
        if handle is None:
            return [], handover.refusal
        try:
            self._check(handle, context)
        except handles.HandleRefused as refused:
            return [], refused.reason
        found, why_short = handles.stretches(handle, self.hashes(context))
        if why_short is None:
            tail = handles.tail_stretch(handle, found[-1].end if found else 0)
            if tail is not None:
                found.append(tail)
        return found, why_short

    # ---- checks

    def _check(self, handle: handles.Handle, context: tuple[int, ...]) -> None:
        handles.check(
            handle,
            request_id=self._ask.request_id,
            tenant=self._ask.tenant,
            adapter=self._ask.adapter,
            model_fingerprint=self._core.model.fingerprint,
            block_size=self._size,
        )
        if handle.num_tokens > len(context):
            raise handles.HandleRefused(FINGERPRINT, "the handle covers more tokens than there are")

    @property
    def _num_lendable(self) -> int:
        """Return the number of the prompt's blocks that a prefill worker lends: an unfilled block
        of a quantized cache has no quantized bytes."""
        num_full, num_rest = divmod(len(self._ask.prompt_token_ids), self._size)
        return num_full + (num_rest > 0 and not self._core.layout.is_quantized)

    def _end_of_own(self, rest: handles.HandleRun) -> int:
        """Return the end of the blocks of `rest` that this prompt asks for."""
        prompt, first = self._ask.prompt_token_ids, rest.first_block
        ours = self.hashes(prompt)[first:]
        num_own = PackedBlocks.of(rest.blocks).num_matching(ours, self._size)
        if num_own == len(ours) < len(rest.blocks):
            tail = rest.blocks[num_own]
            num_own += tail.chain_hash == b"" and tail.num_tokens == len(prompt) % self._size > 0
        return first + num_own

    def _confirm(self, found: Sequence[handles.Stretch]) -> None:
        """Use copied blocks that the handle names with the same contents."""
        for stretch in found:
            copied = self._ahead.confirm(stretch)
            if copied is not None:
                pulled = Pulled([(copied.run.node_id, copied.blocks)])
                self._take(pulled)
                self._early.append(pulled)
                self._has_tail = copied.blocks[-1].num_tokens < self._size
        reason = self._ahead.contradiction(found[-1].end) if found else None
        if reason is not None:
            self._tell(reason)

    def _wanted(self, found: Sequence[handles.Stretch]) -> tuple[list[PullBatch], bool]:
        """Return the batches of `found` that are not loaded and have a place, and whether one was
        lost. Where the engine preempts, only the prompt has places before the start. Neighbours
        under one lease of one store incarnation are fetched together; the tail usually with its
        prompt."""
        wanted: list[PullBatch] = []
        first = self.num_blocks + self._has_tail
        for stretch in found:
            end = min(stretch.end, len(self._block_ids))
            if end <= first:
                continue
            block_ids = self._block_ids[first:end]
            num_places = block_ids.index(HOLE) if HOLE in block_ids else len(block_ids)
            blocks = PackedBlocks.of(stretch.blocks(first, first + num_places))
            items = PackedItems(blocks, block_ids[:num_places])
            if wanted and place_of(wanted[-1].run) == place_of(stretch.run):
                wanted[-1] = replace(wanted[-1], items=wanted[-1].items + items)
            elif len(items):
                wanted.append(PullBatch(stretch.run, items))
            if num_places < len(block_ids):
                return wanted, True
            first = end
        return wanted, False

    # ---- bytes

    async def _pull(self, wanted: Sequence[PullBatch], deadline: Deadline) -> Pulled:
        return await pull(self._core, self._engine_id, wanted, deadline)

    async def _settle(self, pulled: Pulled) -> None:
        """Record an early pull's result. Blocks that a transfer may still write into get other
        places."""
        if pulled.not_usable:
            self._tell(next(iter(pulled.not_usable)))
            self._block_ids = await self._core.thread.call(
                lambda engine: engine.refill(self._engine_id)
            )

    def _take(self, pulled: Pulled) -> None:
        self.num_tokens += pulled.num_tokens
        self._count_bytes(pulled)

    def _count_bytes(self, pulled: Pulled) -> None:
        for (node_id, transport), num_bytes in pulled.num_bytes.items():
            self._leg.count_read(node_id, transport, num_bytes)

    # ---- the account

    def _count_early(self, context: tuple[int, ...]) -> None:
        """Record the early pulls in the leg, now that it is known which tokens are computed in any
        case."""
        first_token = self._reservation.num_local_tokens
        for pulled in self._early:
            self._count(pulled, first_token, context, is_early=True)
            first_token += pulled.num_tokens
        self._early = []

    def _count(
        self, pulled: Pulled, first_token: int, context: tuple[int, ...], *, is_early: bool
    ) -> None:
        # The last token is computed in any case: its logits draw the next one.
        for node_id, tiers in pulled.tiers:
            self._leg.count_tiers(
                first_token,
                len(context) - 1,
                tiers,
                block_bytes=self._core.layout.block_bytes,
                node_id=node_id,
                is_early=is_early,
            )
            first_token += sum(each.num_tokens for each in tiers)

    def _count_rest(self, reason: str) -> None:
        """Count the prompt's blocks that are neither loaded nor counted under `reason`."""
        num_blocks = -(-len(self._ask.prompt_token_ids) // self._size)
        num_rest = num_blocks - -(-self.num_tokens // self._size) - self._num_counted
        if num_rest > 0:
            self._leg.recomputed[reason] += num_rest

    def _tell(self, reason: str) -> None:
        self._core.counts.early_pulls_failed[reason] += 1
        logs.event(
            logger,
            "early_pull_failed",
            level=logging.DEBUG,
            request_id=self._ask.request_id,
            reason=reason,
        )


class KvArrival:
    """Partial handles and the final handover of one request."""

    def __init__(self) -> None:
        self.news = asyncio.Event()
        """Something may be pulled, or the last word is here."""
        self._last: asyncio.Future[GenerateCommand] = asyncio.get_running_loop().create_future()
        self._early: handles.Handle | None = None
        self._intake: KvLoader | None = None  # while `wait` runs

    @property
    def is_over(self) -> bool:
        """Return whether the final handover has come."""
        return self._last.done()

    @property
    def untaken(self) -> handles.Handle | None:
        """Return the handle of the final handover, if the request has not taken it."""
        if not self._last.done() or self._last.cancelled():
            return None
        return self._last.result().handle

    def hand_over(self, handover: GenerateCommand) -> None:
        """Record the final handover; called once."""
        self._last.set_result(handover)
        self.news.set()
        if self._intake is not None:
            self._intake.look_early(handover)  # now: what it names may still be on its way

    def prefetch(self, handle: handles.Handle) -> None:
        """Record a partial handle. Only the newest of several waiting ones counts; one after the
        final handover is ignored."""
        self._early = handle
        self.news.set()

    async def wait(
        self,
        intake: KvLoader,
        deadline: Deadline,
        *,
        move: Callable[[DecodeState], None],
        standing_back: Callable[[], AbstractContextManager[None]],
    ) -> GenerateCommand:
        """Wait for the final handover; meanwhile pull what partial handles name and what their
        lender offers. A cancellation leaves no pending question.

        Args: move: called with each state. standing_back: context manager around each pull.
        """
        self._intake = intake
        try:
            while not self.is_over:
                await self.news.wait()
                self.news.clear()
                early, self._early = self._early, None
                if self.is_over or not (early or intake.has_rest):
                    continue
                move(DecodeState.PREFETCHING)
                with standing_back():
                    if early is not None:
                        await intake.pull_early(early, deadline)
                    if not self.is_over:
                        await intake.pull_rest(deadline)
                move(DecodeState.RESERVED)
        finally:
            self._intake = None
            intake.follow_no_more()
        return self._last.result()
