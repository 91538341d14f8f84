"""LeaseLeader: leader election among replicas of the autoscaler by a Lease in Kubernetes. The
holder of the Lease acts; the others follow.

    follower -> leader    the Lease is free, or was not renewed for its whole duration
    leader   -> follower  the Lease was not renewed for `renew_s`, or another replica holds it

A leader acts only while `left_s` is above 0. `left_s` counts from the time at which the last
successful renewal was sent, and ends before another replica may take the Lease. A follower counts
the Lease's duration from when it first saw the last renewal. So the clocks of two replicas need not
agree, only run equally fast, and two replicas never act at once. The leader's published text
travels in an annotation of the Lease with each renewal: followers read the Lease anyway, and only
its holder writes it. One asyncio loop; `left_s` may be read by any thread.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import math
import time
from collections.abc import Callable
from typing import Any, Protocol

from process import logs
from process.background_tasks import end_tasks, start_task
from services.autoscaler.config import KubernetesSettings
from services.autoscaler.kubernetes_scaler import ApiError, KubernetesApi

logger = logging.getLogger(__name__)


PUBLISHED = "baton.internal/published"
"""Annotation of the Lease with the text that its holder publishes."""


class Leadership(Protocol):
    """Interface of leader election: whether this autoscaler may act."""

    @property
    def left_s(self) -> float:
        """Seconds for which this autoscaler may act without a further renewal; 0: it may not."""

    @property
    def led_s(self) -> float:
        """Seconds for which this autoscaler has led without a break; 0: it does not lead."""

    @property
    def heard(self) -> str:
        """Text that the present leader, another replica, has published; empty: there is none."""

    @property
    def problem(self) -> str:
        """Why the leadership cannot be determined; empty: no problem."""

    def start(self) -> None: ...
    async def stop(self) -> None: ...


class Alone:
    """Leadership of the only autoscaler: it always leads."""

    left_s = math.inf
    led_s = math.inf
    heard = ""
    problem = ""

    def start(self) -> None:
        """Do nothing."""

    async def stop(self) -> None:
        """Do nothing."""


class LeaseLeader:
    """Leadership by a Lease, which a background task takes and renews."""

    def __init__(
        self,
        api: KubernetesApi,
        settings: KubernetesSettings,
        autoscaler_id: str,
        *,
        on_change: Callable[[bool], None] = lambda is_leader: None,
        publish: Callable[[], str] = lambda: "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            api: not closed here.
            on_change: called in the loop at each change, with whether this autoscaler leads.
            publish: called at each renewal; returns the text for the followers, or "".
            clock: monotonic, in seconds.
        """
        self._api = api
        self._settings = settings
        self._id = autoscaler_id
        self._on_change = on_change
        self._publish = publish
        self._clock = clock
        self._has_asked = False
        """Whether a request to take the Lease was ever sent, answered or not: the Lease may be
        held by this autoscaler."""
        self._renewed_s = -math.inf
        self._since_s = math.inf
        self._was_leader = False
        self._seen = ("", "")
        """Holder and resource version of the Lease when it was last read."""
        self._seen_s = -math.inf
        self._heard = ("", 0.0)
        """Text that this holder has published, and the seconds from `_seen_s` for which it is
        valid."""
        self._task: asyncio.Task[None] | None = None
        self.problem = ""

    @property
    def left_s(self) -> float:
        """See Leadership."""
        return max(0.0, self._renewed_s + self._settings.renew_s - self._clock())

    @property
    def led_s(self) -> float:
        """See Leadership."""
        return max(0.0, self._clock() - self._since_s) if self.left_s > 0 else 0.0

    @property
    def heard(self) -> str:
        """See Leadership."""
        said, lasts_s = self._heard
        return said if self._clock() < self._seen_s + lasts_s else ""

    def start(self) -> None:
        """Start the task that takes and renews the Lease."""
        self._task = start_task(self._run(), "leadership")

    async def stop(self) -> None:
        """End the leadership and release the Lease, so that another replica need not wait for its
        expiry."""
        await end_tasks([self._task])
        self._renewed_s = -math.inf
        if self._has_asked:
            try:
                await self._let_go()
            except ApiError as error:
                logs.event(logger, "lease_not_released", level=logging.WARNING, why=str(error))
        self._tell()

    async def try_once(self) -> None:
        """Take the Lease if it is free or has expired, or renew it if this autoscaler holds it.

        Raises: ApiError.
        """
        sent_s = self._clock()
        lease = await self._api.lease(self._settings.lease_name)
        if lease is None:
            sent_s, self._has_asked = self._clock(), True
            await self._create()
            self._lead(sent_s)
            return
        holder, version = _holder(lease), str(lease.metadata.resource_version)
        if (holder, version) != self._seen:
            self._seen, self._seen_s = (holder, version), self._clock()
        self._heard = ("", 0.0)
        if holder != self._id:
            self._renewed_s = -math.inf
            if holder and self._clock() < self._seen_s + _duration_s(lease):
                self._heard = (_published(lease), _duration_s(lease))
                return
        sent_s, self._has_asked = self._clock(), True
        body = self._body(lease, holder=self._id)
        await self._api.replace_lease(self._settings.lease_name, body)
        self._lead(sent_s)

    async def _create(self) -> None:
        """Create the Lease. The Helm chart makes the Lease, so that it is removed with the release,
        and does not allow the autoscaler to create one: a Lease created during the removal of the
        release would stay. The call then fails with an error that explains this.

        Raises: ApiError.
        """
        try:
            await self._api.create_lease(self._body(None, holder=self._id))
        except ApiError as error:
            if error.status != 403:
                raise
            raise ApiError(
                f"there is no lease {self._settings.lease_name} in namespace "
                f"{self._api.namespace}, and creating it is not allowed: `helm upgrade` makes it "
                "again",
                error.status,
            ) from error

    async def _let_go(self) -> None:
        """Release the Lease if this autoscaler holds it.

        Raises: ApiError.
        """
        for is_again in (False, True):
            lease = await self._api.lease(self._settings.lease_name)
            if lease is None or _holder(lease) != self._id:
                return
            try:
                body = self._body(lease, holder="")
                return await self._api.replace_lease(self._settings.lease_name, body)
            except ApiError as error:
                # 409, once: a renewal that was in flight at `stop` has just arrived.
                if is_again or error.status != 409:
                    raise

    def _lead(self, sent_s: float) -> None:
        if self.left_s <= 0:
            self._since_s = self._clock()
        self._renewed_s = sent_s

    async def _run(self) -> None:
        while True:
            try:
                await self.try_once()
                self.problem = ""
            except ApiError as error:
                # 409: another replica was faster; the next read shows it.
                if error.status != 409:
                    if not self.problem:
                        logs.event(logger, "lease_failed", level=logging.WARNING, why=str(error))
                    self.problem = str(error)
            except Exception as error:  # the last line of defence: leadership lapses by itself
                logger.exception("leadership_failed")
                self.problem = f"the lease cannot be understood: {error!r}"
            self._tell()
            await asyncio.sleep(self._settings.retry_s)
            self._tell()

    def _tell(self) -> None:
        is_leader = self.left_s > 0
        if is_leader is not self._was_leader:
            self._was_leader = is_leader
            logs.event(logger, "leading" if is_leader else "following", autoscaler_id=self._id)
            self._on_change(is_leader)

    def _body(self, lease: Any | None, holder: str) -> dict[str, Any]:
        """Return the Lease to write in place of `lease`, if its version is still the one read.

        Args:
            lease: as read; None: the Lease is to be created.
            holder: the new holder's id; empty: the Lease is released.
        """
        now = _timestamp()
        metadata: dict[str, Any] = {
            "name": self._settings.lease_name,
            "namespace": self._api.namespace,
        }
        annotations: dict[str, str] = {}
        if lease is not None:
            # A replacement is complete, so it must keep the chart's labels and annotations.
            metadata["labels"] = lease.metadata.labels or {}
            annotations = dict(lease.metadata.annotations or {})
        annotations.pop(PUBLISHED, None)
        if holder and (published := self._publish()):
            annotations[PUBLISHED] = published
        metadata["annotations"] = annotations
        spec: dict[str, Any] = {
            "holderIdentity": holder,
            "leaseDurationSeconds": math.ceil(self._settings.lease_s) if holder else 1,
            "renewTime": now,
            "acquireTime": now,
            "leaseTransitions": 0,
        }
        if lease is not None:
            metadata["resourceVersion"] = lease.metadata.resource_version
            transitions = int(_told(lease, "lease_transitions") or 0)
            acquired_at = _told(lease, "acquire_time")
            if _holder(lease) == holder and acquired_at is not None:
                spec["acquireTime"] = _timestamp(acquired_at)
            elif holder:
                transitions += 1
            spec["leaseTransitions"] = transitions
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": spec,
        }


def _holder(lease: Any) -> str:
    return str(_told(lease, "holder_identity") or "")


def _published(lease: Any) -> str:
    annotations = getattr(lease.metadata, "annotations", None) or {}
    return str(annotations.get(PUBLISHED, ""))


def _duration_s(lease: Any) -> float:
    return float(_told(lease, "lease_duration_seconds") or 0)


def _told(lease: Any, name: str) -> Any:
    """Return a field of the Lease's spec; None: it is not set, as in a Lease made by hand."""
    return getattr(lease.spec, name, None)


def _timestamp(at: datetime.datetime | None = None) -> str:
    """Return `at` (None: now) in the format of Kubernetes' MicroTime: UTC with six digits of
    microseconds."""
    at = at or datetime.datetime.now(datetime.UTC)
    return at.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
