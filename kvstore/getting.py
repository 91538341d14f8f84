"""Getter: blocks out of one store into the worker's own, each verified: generation before and after
by the transport; the checksum, which the transport computed over the worker's bytes as they came,
here and nowhere else.

What fails is a reason for the block, not an exception. Blocks whose checksum failed, or whose
generation was stale although their lease lives, are reported to the store in the background: it
looks at its own bytes, drops what is bad and repairs damaged generations, so that no reader meets
the same bad block again. One asyncio loop.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from kvstore import wire
from kvstore.block import Block
from kvstore.errors import (
    CHECKSUM,
    DEADLINE,
    GENERATION,
    INCARNATION,
    LEASE_LAPSED,
    LeaseLapsed,
    TransferTimeout,
    reason_of,
)
from kvstore.finishing import Background
from kvstore.lease_calls import LeaseCalls
from kvstore.lending.told import NO_WORD, Word
from kvstore.rpc import Attached, StoreRpc
from kvstore.transport.base import GetItems, GetResult, Transport
from process import logs
from process.deadline import Deadline
from process.errors import BatonError
from protos import kvstore_pb2

logger = logging.getLogger(__name__)

REPORT_BUDGET_S = 10.0


class Getter:
    """See the module."""

    def __init__(
        self,
        rpc: StoreRpc,
        attached: Attached,
        transport: Transport,
        leases: LeaseCalls,
        background: Background,
    ) -> None:
        self._rpc = rpc
        self._attached = attached
        self._transport = transport
        self._leases = leases
        self._background = background
        self._to_report: dict[tuple[int, int], Block] = {}
        self._is_reporting = False
        self.num_bad_blocks = 0
        """Blocks that arrived with a wrong checksum."""

    async def get(
        self,
        lease_id: str,
        items: Sequence[tuple[Block, int]],
        deadline: Deadline,
        incarnation: bytes | None,
        word: Word = NO_WORD,
    ) -> GetResult:
        """See StoreClient.get_blocks."""
        if incarnation is not None and incarnation != self._attached.incarnation:
            return GetResult(0, dict.fromkeys(range(len(items)), INCARNATION))
        if deadline.expired:
            return GetResult(0, dict.fromkeys(range(len(items)), DEADLINE))
        wanted = GetItems(items, word.held_until_s)
        try:
            got = await self._transport.get(lease_id, wanted, deadline)
        except TransferTimeout:
            raise
        except BatonError as error:
            return GetResult(0, dict.fromkeys(range(len(items)), reason_of(error)))
        failed = await self._explain(lease_id, got.failed, deadline)
        self._report_later([wanted[i][0] for i, r in failed.items() if r == GENERATION])
        num_sealed = len(items) - word.num_unsealed
        failed |= self._verify(wanted, num_sealed, got, failed)
        if self._attached.keeps_history:
            self._leases.verified(
                [ref for index, (ref, _) in enumerate(wanted[:num_sealed]) if index not in failed]
            )
        found = got.checksums
        unsealed = [index for index in range(num_sealed, len(items)) if index not in failed]
        failed |= {index: CHECKSUM for index in unsealed if index not in found}
        return GetResult(
            (len(items) - len(failed)) * self._attached.frame_bytes,
            failed,
            {index: found[index] for index in unsealed if index in found},
            got.num_bytes if self._transport.counts_own_reads else got.num_bytes_untold,
        )

    async def _explain(
        self, lease_id: str, failed: dict[int, str], deadline: Deadline
    ) -> dict[int, str]:
        """A generation that did not hold means that the lease had lapsed, if it has: ask."""
        if GENERATION not in failed.values() or not lease_id:
            return dict(failed)
        try:
            await self._leases.renew(lease_id, 0.0, deadline)
        except LeaseLapsed:
            return {i: LEASE_LAPSED if r == GENERATION else r for i, r in failed.items()}
        except BatonError:
            return dict(failed)  # the first reason stands
        return dict(failed)

    def _verify(
        self, wanted: GetItems, num_sealed: int, got: GetResult, failed: dict[int, str]
    ) -> dict[int, str]:
        """Compare the checksums of what arrived, of the first `num_sealed`."""
        expected = wanted.checksums[:num_sealed]
        found = list(map(got.checksums.get, range(num_sealed)))
        bad: list[int] = []
        if found != expected:  # next to never
            bad = [
                index
                for index, (ours, theirs) in enumerate(zip(found, expected, strict=True))
                if ours != theirs and index not in failed
            ]
        self.num_bad_blocks += len(bad)
        self._report_later([wanted[index][0] for index in bad])
        return dict.fromkeys(bad, CHECKSUM)

    # -- telling the store

    def _report_later(self, refs: Sequence[Block]) -> None:
        self._to_report |= {(ref.frame, ref.generation): ref for ref in refs}
        if self._to_report and not self._is_reporting:
            self._is_reporting = True
            self._background.spawn(self._report())

    async def _report(self) -> None:
        """One call at a time; what comes while one is under way shares the next."""
        try:
            while self._to_report and not self._rpc.broken:
                refs, self._to_report = list(self._to_report.values()), {}
                request = kvstore_pb2.ReportRequest(
                    attachment_id=self._attached.attachment_id,
                    blocks=[wire.block_to_proto(ref) for ref in refs],
                )
                reply = await self._rpc.call(
                    self._rpc.stub.Report, request, Deadline.after(REPORT_BUDGET_S)
                )
                self._log(len(refs), num_dropped=reply.num_dropped)
        except BatonError as error:
            self._log(len(refs), why=str(error))
        finally:
            self._is_reporting = False

    def _log(self, num_blocks: int, **fields: Any) -> None:
        logs.event(
            logger,
            "bad_blocks_reported",
            level=logging.WARNING,
            node_id=self._attached.node_id,
            num_blocks=num_blocks,
            **fields,
        )
