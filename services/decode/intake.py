"""Intake: loads the KV that handles name into one request's reserved blocks: checks, fetches and
verifies it, and counts by reason what could not be used.

Life of one request's intake: `pull_early` any number of times, each with a partial handle of what
is stored while prefill still runs, and `pull_rest` when a lender has answered with the rest
(services/decode/ahead.py); then `load` once with the final one (or none), which fetches only what
is not there yet. An early pull that fails costs nothing but itself: the final handle tries again.

Nothing here fails a request: what cannot be fetched is recomputed and counted by reason.
`give_back` releases the final handle's leases, if they are this request's.

Invariant: tokens [0, num_tokens) are verified, named by a handle, and lie in the reservation's
blocks; a block that a late transfer may still write into is not one of those (`LLMEngine.refill`).
Belongs to the loop's thread; one call at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine.request import Reservation
from engine.sequence import HOLE
from kvstore import block_hash
from kvstore.block_refs import PackedBlocks, PackedItems
from kvstore.errors import DEADLINE, MISSING
from kvstore.node_ids import is_lender
from process import logs
from process.deadline import Deadline
from services.decode.ahead import Ahead, Copied
from services.decode.ask import DecodeAsk
from services.decode.leases import give_back, is_for, is_home, place_of
from services.decode.pulls import PullBatch, Pulled, pull
from services.worker import handle as handles
from services.worker.core import WorkerCore
from services.worker.provenance import FINGERPRINT, Leg

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Handover:
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

    handover: Handover
    context: tuple[int, ...]
    """Prompt and the tokens drawn already."""
    found: list[handles.Stretch]
    """Stretches that the final handle names, the tail included."""
    why_short: str | None
    """Reason why these are not the whole prompt."""


class Intake:
    """Loading of one request's KV from partial handles and the final one."""

    def __init__(
        self,
        core: WorkerCore,
        ask: DecodeAsk,
        engine_id: str,
        reservation: Reservation,
        leg: Leg,
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
        self._ahead = Ahead(core, on_rest=on_rest, on_failure=self._tell)
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
            self._ahead.keep(Copied(replace(run, first_block=first, blocks=blocks)))
        await self._settle(pulled)

    def follow_no_more(self) -> None:
        """Stop early copies: the final handle is here, or none will come. Idempotent."""
        self._ahead.close()

    def look_early(self, handover: Handover) -> None:
        """Check the final handover as far as possible while blocks that it may name are still being
        copied. Never raises, since its caller serves other requests too; `load` and `look_at`
        raise."""
        try:
            self._looked_at(handover)
        except Exception as error:
            self._look_problem = error

    def look_at(self, handover: Handover) -> tuple[int, ...]:
        """Check the final handover, if that was not done. Returns: prompt and the tokens drawn
        already."""
        return self._looked_at(handover).context

    async def load(self, handover: Handover, deadline: Deadline) -> int:
        """Fetch what was handed over beyond the loaded blocks, and record all of it in the leg. The
        leases must then be released with `give_back`. Returns: number of leading tokens whose KV is
        loaded and verified."""
        self._home = self._core.connector.client or self._home
        why = await self._load(self._looked_at(handover), deadline)
        if not handover.computes_prompt:
            self._count_rest(why)
        return self.num_tokens

    def num_at_home(self, handover: Handover) -> int:
        """Return the number of leading full blocks that are assumed to be in this worker's own
        store: those before the first one that the handle names in another node's store. (A lender's
        blocks are stored afterwards, in a store that may be this one.)"""
        for stretch in self._looked_at(handover).found:
            if not is_home(self._core, stretch.run) and not is_lender(stretch.run.node_id):
                return min(stretch.first, self.num_blocks)
        return self.num_blocks

    def give_back(self, handover: Handover) -> None:
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

    def _looked_at(self, handover: Handover) -> _Look:
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
        self, handover: Handover, context: tuple[int, ...]
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

    def _end_of_own(self, rest: handles.Run) -> int:
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
