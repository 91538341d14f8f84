"""Who of several autoscalers acts, or says what is wanted: the holder of a Lease in Kubernetes.

    follower -> leader    the Lease is free, or was not renewed for its whole duration
    leader   -> follower  it was not renewed for `renew_s`, or somebody else has it

A leader acts only while `left_s` is above 0: counted from the moment in which the last renewal that
succeeded was SENT, and shorter than the time after which another may take the Lease. A follower
counts the other's time from when it saw the last renewal. So clocks need not agree, only run
equally fast, and two never act at once. What the leader publishes travels in the Lease, with each
renewal: nobody else can write there, and who follows reads it anyway. One asyncio loop; `left_s`
may be read by any thread.
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
"""Annotation of the Lease: what its holder publishes."""


class Leadership(Protocol):
    """Whether this autoscaler may act."""

    @property
    def left_s(self) -> float:
        """For so long it may act, if nothing is heard any more; 0: not now."""

    @property
    def led_s(self) -> float:
        """For so long it has led without a break; 0: it does not."""

    @property
    def heard(self) -> str:
        """What another that leads has published; empty: nothing, or none does."""

    @property
    def problem(self) -> str:
        """Why it cannot be known; empty: it is."""

    def start(self) -> None: ...
    async def stop(self) -> None: ...


class Alone:
    """The only autoscaler there is."""

    left_s = math.inf
    led_s = math.inf
    heard = ""
    problem = ""

    def start(self) -> None:
        """Nothing to do."""

    async def stop(self) -> None:
        """Nothing to do."""


class LeaseLeader:
    """See the module."""

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
        """`api` stays its owner's. on_change: told of each change, in the loop. publish: asked with
        each renewal what those who follow shall hear."""
        self._api = api
        self._settings = settings
        self._id = autoscaler_id
        self._on_change = on_change
        self._publish = publish
        self._clock = clock
        self._has_asked = False
        """The Lease may be ours: it was asked for, whatever was heard of that."""
        self._renewed_s = -math.inf
        self._since_s = math.inf
        self._was_leader = False
        self._seen = ("", "")
        """Holder and version of the Lease, as last seen."""
        self._seen_s = -math.inf
        self._heard = ("", 0.0)
        """What that holder has published, and for how long it is true."""
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
        """Begin to take or renew it."""
        self._task = start_task(self._run(), "leadership")

    async def stop(self) -> None:
        """Act no more, then let the Lease go, so that another need not wait for it."""
        await end_tasks([self._task])
        self._renewed_s = -math.inf
        if self._has_asked:
            try:
                await self._let_go()
            except ApiError as error:
                logs.event(logger, "lease_not_released", level=logging.WARNING, why=str(error))
        self._tell()

    async def try_once(self) -> None:
        """Take the Lease if it may be taken, renew it if it is ours. Raises: ApiError."""
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
        """The chart makes the Lease, so that it goes with the release, and lets the autoscaler
        create none: a Lease that it created while the release is removed would stay.

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
        """Raises: ApiError."""
        for is_again in (False, True):
            lease = await self._api.lease(self._settings.lease_name)
            if lease is None or _holder(lease) != self._id:
                return
            try:
                body = self._body(lease, holder="")
                return await self._api.replace_lease(self._settings.lease_name, body)
            except ApiError as error:
                # 409, once: what our end left under way has just arrived.
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
                # 409: somebody was faster; whoever it was is seen the next time.
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
        """What to write over `lease`, in exactly the version that was read."""
        now = _timestamp()
        metadata: dict[str, Any] = {
            "name": self._settings.lease_name,
            "namespace": self._api.namespace,
        }
        annotations: dict[str, str] = {}
        if lease is not None:
            # A replacement is whole: what the chart wrote (labels, helm's annotations) stays.
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
    """A field of its spec; None: it says nothing, as one that somebody made by hand may."""
    return getattr(lease.spec, name, None)


def _timestamp(at: datetime.datetime | None = None) -> str:
    """As Kubernetes writes times with microseconds, all six digits of them."""
    at = at or datetime.datetime.now(datetime.UTC)
    return at.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
