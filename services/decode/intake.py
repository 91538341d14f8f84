"""From a handle to KV in reserved blocks: check, fetch, verify, and say what could not be used and
why.

Nothing here fails a request: what cannot be fetched is recomputed and counted by reason. The
handle's leases are given back whatever happens. Belongs to the loop's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.request import Reservation
from kvstore.block import Block
from kvstore.client import StoreClient
from kvstore.errors import INCARNATION, MISSING, STORE_UNAVAILABLE
from process.deadline import Deadline
from services.worker import handle as handles
from services.worker.core import Chain, WorkerCore
from services.worker.provenance import FINGERPRINT, Leg


@dataclass(frozen=True)
class Handover:
    """What ends the wait of a reserved request. `handle` None: nothing was handed over."""

    handle: handles.Handle | None
    outputs: tuple[tuple[int, ...], ...]
    """Tokens drawn already, of each sample in order."""
    over: frozenset[int] = frozenset()
    """Samples that have ended."""
    beam_start: tuple[tuple[int, float], ...] = ()
    """What a beam search goes on from."""
    refusal: str | None = None
    """Why a handle that came cannot even be read; None: it can, or none came."""


@dataclass(frozen=True)
class IntakeAsk:
    """Whose KV is to be loaded, and where to."""

    request_id: str
    tenant: str
    adapter: str
    chain: Chain
    engine_id: str
    reservation: Reservation
    num_prompt_tokens: int
    context: tuple[int, ...]
    """Prompt and the tokens drawn already."""


async def load_handle(
    core: WorkerCore,
    ask: IntakeAsk,
    handover: Handover,
    leg: Leg,
    deadline: Deadline,
) -> int:
    """Fetch what was handed over beyond our local prefix into the reserved blocks.

    Returns: tokens, counted from the first, whose KV is verified and there. `leg` is told the rest.
    """
    client = core.connector.client
    try:
        return await _Intake(core, ask, leg, client, deadline).load(handover)
    finally:
        if handover.handle is not None:
            core.connector.release_later(client, handover.handle.lease_ids)


class _Intake:
    """One load, step by step."""

    def __init__(
        self,
        core: WorkerCore,
        ask: IntakeAsk,
        leg: Leg,
        client: StoreClient | None,
        deadline: Deadline,
    ) -> None:
        self._core = core
        self._ask = ask
        self._leg = leg
        self._client = client
        self._deadline = deadline
        self._size = core.model.block_size
        self._num_local_blocks = ask.reservation.num_local_tokens // self._size

    async def load(self, handover: Handover) -> int:
        """Returns: leading tokens whose KV is there."""
        local = self._ask.reservation.num_local_tokens
        handle = handover.handle
        if handle is None:
            return self._count_lost(local, handover.refusal or MISSING)
        try:
            self._check(handle)
        except handles.HandleRefused as refused:
            return self._count_lost(local, refused.reason)
        if self._client is None:
            return self._count_lost(local, STORE_UNAVAILABLE)
        wanted, why_short = self._wanted(handle)
        why_short = why_short or MISSING
        num_tokens = local
        for run, items in _by_run(wanted):
            reason = self._misfit(run, self._client)
            if reason is not None:
                return self._count_lost(num_tokens, reason)
            loaded = await self._core.connector.load(
                self._client,
                self._ask.engine_id,
                run.lease_id,
                items,
                self._deadline,
                incarnation=run.store_incarnation,
            )
            num_tokens = self._count_loaded(num_tokens, items[: loaded.num_usable])
            self._leg.num_bytes_read += loaded.num_bytes
            if loaded.num_usable < len(items):
                self._leg.recomputed.update(loaded.not_usable)
                num_asked = num_tokens // self._size + loaded.not_usable.total()
                return self._count_lost(num_tokens, why_short, first_block=num_asked)
        return self._count_lost(num_tokens, why_short)

    def _check(self, handle: handles.Handle) -> None:
        handles.check(
            handle,
            request_id=self._ask.request_id,
            tenant=self._ask.tenant,
            adapter=self._ask.adapter,
            model_fingerprint=self._core.model.fingerprint,
            block_size=self._size,
        )
        if handle.num_tokens > len(self._ask.context):
            raise handles.HandleRefused(FINGERPRINT, "the handle covers more tokens than there are")

    def _wanted(
        self, handle: handles.Handle
    ) -> tuple[list[tuple[handles.Run, Block, int]], str | None]:
        """(run, block, destination) beyond the local prefix, and why it ends before the handle
        does.
        """
        hashes = self._ask.chain.hashes(self._ask.context)
        found, why_short = handles.blocks_in_order(handle, hashes)
        if why_short is None:
            tail = handles.tail_block(handle, len(found))
            if tail is not None:
                found.append(tail)
        block_ids = self._ask.reservation.block_ids
        wanted = [
            (run, block, block_ids[index])
            for index, (run, block) in enumerate(found)
            if index >= self._num_local_blocks
        ]
        return wanted, why_short

    def _misfit(self, run: handles.Run, client: StoreClient) -> str | None:
        """Why our store cannot have this run; None: it can."""
        if run.node_id != client.node_id:
            return STORE_UNAVAILABLE
        if run.store_incarnation != client.incarnation:
            return INCARNATION
        return None

    def _count_loaded(self, num_tokens: int, items: Sequence[tuple[Block, int]]) -> int:
        blocks = [block for block, _ in items]
        if not blocks or self._client is None:
            return num_tokens
        end = num_tokens + sum(block.num_tokens for block in blocks)
        self._leg.store_node_id = self._client.node_id
        # The last token is computed in any case: its logits draw the next one.
        self._leg.count_loaded(
            num_tokens,
            min(end, len(self._ask.context) - 1),
            blocks,
            block_bytes=self._core.layout.block_bytes,
        )
        return end

    def _count_lost(self, num_tokens: int, reason: str, *, first_block: int | None = None) -> int:
        """Count the prompt's blocks from `first_block` (by default the first not there) under
        `reason`.
        """
        if first_block is None:
            first_block = -(-num_tokens // self._size)
        num_blocks = -(-self._ask.num_prompt_tokens // self._size)
        if num_blocks > first_block:
            self._leg.recomputed[reason] += num_blocks - first_block
        return num_tokens


def _by_run(
    wanted: Sequence[tuple[handles.Run, Block, int]],
) -> list[tuple[handles.Run, list[tuple[Block, int]]]]:
    """Neighbours under one lease of one store life go into one load; the tail usually shares its
    prompt's.
    """
    groups: list[tuple[handles.Run, list[tuple[Block, int]]]] = []
    for run, block, block_id in wanted:
        last = groups[-1][0] if groups else None
        if last is None or _place(last) != _place(run):
            groups.append((run, []))
        groups[-1][1].append((block, block_id))
    return groups


def _place(run: handles.Run) -> tuple[str, bytes, str]:
    return run.node_id, run.store_incarnation, run.lease_id
