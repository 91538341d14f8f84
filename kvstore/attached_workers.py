"""The workers attached to a KV store, and the frames (block slots) in quarantine: those that a
stalled worker may still write into.

An attachment is one piece of memory of one start of a worker (its incarnation), on one transport.
One incarnation may have several (its cache, and the memory that it swaps sequences to); one that
the worker no longer uses shows only by its silence. An attachment is gone when it detaches, when
the same worker attaches after a restart, or when it has been silent too long. Frames quarantined on
its account come free when the worker says that its transfer is over (a second Abort), or a grace
period after it is gone.

Times are seconds on the caller's clock. Plain and synchronous, one thread.
"""

from __future__ import annotations

import heapq
import math
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.errors import StoreIntegrityError, UnknownAttachment


@dataclass(slots=True, eq=False)
class Attachment:
    """One piece of memory of one worker process, attached to the store over one transport.

    one_sided: the worker itself writes into frames (shm, nixl), so the store cannot stop a
    transfer.
    """

    attachment_id: str
    worker_id: str
    worker_incarnation: bytes
    transport: str
    one_sided: bool
    attached_at_s: float
    last_seen_s: float


class AttachmentTable:
    """The store's attachments by id. An attachment leaves the table when its worker is gone."""

    def __init__(self) -> None:
        self._attachments: dict[str, Attachment] = {}

    def __len__(self) -> int:
        return len(self._attachments)

    def __iter__(self) -> Iterator[Attachment]:
        return iter(self._attachments.values())

    def add(
        self,
        worker_id: str,
        worker_incarnation: bytes,
        transport: str,
        one_sided: bool,
        now_s: float,
    ) -> Attachment:
        """Add an attachment under a new random id, last seen at `now_s`."""
        attachment = Attachment(
            secrets.token_hex(16), worker_id, worker_incarnation, transport, one_sided, now_s, now_s
        )
        self._attachments[attachment.attachment_id] = attachment
        return attachment

    def find(self, attachment_id: str) -> Attachment | None:
        """The attachment with this id; None when it is not in the table. Its last-seen time does
        not change."""
        return self._attachments.get(attachment_id)

    def get(self, attachment_id: str, now_s: float) -> Attachment:
        """The attachment with this id, whose last-seen time becomes `now_s`. Raises:
        UnknownAttachment."""
        attachment = self._attachments.get(attachment_id)
        if attachment is None:
            raise UnknownAttachment(
                f"attachment {attachment_id or '(empty)'}: not known to this start of the store; "
                "attach again"
            )
        attachment.last_seen_s = max(attachment.last_seen_s, now_s)
        return attachment

    def remove(self, attachment_id: str) -> Attachment | None:
        """Take an attachment out of the table. Returns: the attachment, None when it was not
        there."""
        return self._attachments.pop(attachment_id, None)

    def earlier_lives(self, worker_id: str, worker_incarnation: bytes) -> list[str]:
        """Ids of the worker's attachments that belong to other incarnations (starts) of the worker
        than this one."""
        return [
            a.attachment_id
            for a in self
            if a.worker_id == worker_id and a.worker_incarnation != worker_incarnation
        ]

    def silent_since(self, moment_s: float) -> list[str]:
        """Ids of the attachments whose workers made no call after `moment_s`."""
        return [a.attachment_id for a in self if a.last_seen_s <= moment_s]


@dataclass(slots=True)
class _Quarantined:
    attachment_id: str
    generation: int
    free_at_s: float


class QuarantineList:
    """Frames that a stalled worker may still write into, each with the attachment of that
    worker."""

    def __init__(self) -> None:
        self._frames: dict[int, _Quarantined] = {}
        self._due: list[tuple[float, int, int]] = []  # a heap of (free_at_s, frame, generation)

    def __len__(self) -> int:
        return len(self._frames)

    def add(self, frame: int, generation: int, attachment_id: str) -> None:
        """Quarantine a frame at its (odd) generation until the attachment's transfer is over, or a
        grace period after the attachment is gone. Raises: IntegrityError for a frame that is
        quarantined already."""
        if frame in self._frames:
            raise StoreIntegrityError(f"frame {frame} is quarantined already")
        self._frames[frame] = _Quarantined(attachment_id, generation, math.inf)

    def take(self, frame: int, generation: int, attachment_id: str) -> bool:
        """Take a frame off the list, since the attachment's transfer into it is over; the caller
        frees it. Returns: False, and nothing changes, where the frame is not quarantined for this
        attachment at this generation."""
        held = self._frames.get(frame)
        if held is None or (held.generation, held.attachment_id) != (generation, attachment_id):
            return False
        del self._frames[frame]
        return True

    def owner_gone(self, attachment_id: str, free_at_s: float) -> None:
        """Note that an attachment is gone: all frames quarantined for it come free at
        `free_at_s`."""
        for frame, held in self._frames.items():
            if held.attachment_id == attachment_id:
                held.free_at_s = min(held.free_at_s, free_at_s)
                heapq.heappush(self._due, (held.free_at_s, frame, held.generation))

    def pop_due(self, now_s: float) -> int | None:
        """Take one frame off the list whose quarantine ends by `now_s`. Returns: the frame, None
        when there is none."""
        while self._due and self._due[0][0] <= now_s:
            _, frame, generation = heapq.heappop(self._due)
            held = self._frames.get(frame)
            if held is not None and held.generation == generation:
                del self._frames[frame]
                return frame
        return None

    def frames(self) -> dict[int, int]:
        """The quarantined frames, each with its (odd) generation."""
        return {frame: held.generation for frame, held in self._frames.items()}

    def owners(self) -> set[str]:
        """Ids of the attachments, not gone yet, that quarantined frames wait for."""
        return {h.attachment_id for h in self._frames.values() if math.isinf(h.free_at_s)}
