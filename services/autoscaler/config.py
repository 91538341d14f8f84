"""AutoscalerSettings: the settings of an autoscaler process; and the plan's: targets, limits of the
pools, pace, and priors about workers before any was measured. Values only.

The comment of each default says where it comes from: measured here, another project's, or guessed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from process import registry
from process.registry import RedisAccess
from process.settings import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SettingsError,
    check_host_port,
    check_ranges,
)
from process.tls import TlsSettings
from services.autoscaler.signals import ByRole, Role

# ---- targets, bounds, pace and priors

START_S = 600.0
"""A worker that does not serve so long after it was asked for is not expected any more: no node has
room for it, or it dies at each start. Kubernetes' `progressDeadlineSeconds`, its default."""


@dataclass(frozen=True)
class Targets:
    """What requests shall get."""

    ttft_s: PositiveFloat = 1.0
    """Seconds to the first token. A chat is felt to hang beyond it; half of it is what a peer's
    planner starts from, for short prompts."""

    tpot_s: PositiveFloat = 0.05
    """Seconds between two tokens of a stream: 20 tokens a second, more than people read."""

    quantile: Annotated[float, Meta(gt=0, lt=1)] = 0.9
    """Share of requests that shall meet each of the two; in (0, 1)."""

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class PoolLimits:
    """Bounds of one pool."""

    min_workers: NonNegativeInt = 1
    """The least number of workers. 0 for both pools: after `pace.idle_s` without a request there
    are none."""

    max_workers: int = 8
    """Never more are asked for."""

    num_devices: PositiveInt = 1
    """Devices (or, without any, shares of the budget) that one worker takes."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.max_workers < max(1, self.min_workers):
            raise SettingsError("max_workers: must be at least 1, and at least min_workers")


@dataclass(frozen=True)
class ScaleLimits:
    """Bounds of both pools, and the one budget that they share."""

    prefill: PoolLimits = field(default_factory=PoolLimits)
    """Of the prefill workers."""

    decode: PoolLimits = field(default_factory=PoolLimits)
    """Of the decode workers."""

    budget_devices: NonNegativeInt = 0
    """Devices that both pools may take together; 0: only their own maximum bounds them."""

    max_added_workers: PositiveInt = 4
    """Of both pools together, in one decision. Guessed: a burst that is over before they have
    started costs no more than these."""

    max_removed_workers: PositiveInt = 1
    """Of both pools together, in one decision."""

    def __post_init__(self) -> None:
        check_ranges(self)
        least = self.devices(self.least)
        if self.budget_devices and least > self.budget_devices:
            raise SettingsError(
                f"budget_devices: {self.budget_devices} do not suffice for the fewest workers that "
                f"there must be ({least} devices)"
            )

    def of(self, role: Role) -> PoolLimits:
        """Return the limits of one pool."""
        return self.prefill if role is Role.PREFILL else self.decode

    @property
    def scales_to_zero(self) -> bool:
        """Whether both pools may have no workers at all."""
        return self.prefill.min_workers == 0 and self.decode.min_workers == 0

    @property
    def least(self) -> ByRole[int]:
        """Fewest workers of each role while there are requests; at least one, since a request needs
        both roles."""
        return ByRole(max(1, self.prefill.min_workers), max(1, self.decode.min_workers))

    @property
    def budget(self) -> int:
        """Devices that both pools may take together; without `budget_devices`: the devices of both
        maxima."""
        most = self.devices(ByRole(self.prefill.max_workers, self.decode.max_workers))
        return min(most, self.budget_devices) if self.budget_devices else most

    def devices(self, workers: ByRole[int]) -> int:
        """Return the number of devices that these workers take."""
        return workers.prefill * self.prefill.num_devices + workers.decode * self.decode.num_devices

    def allows(self, workers: ByRole[int]) -> bool:
        """Return whether these numbers are within all limits while there are requests."""
        return (
            all(
                self.least.of(role) <= workers.of(role) <= self.of(role).max_workers
                for role in Role
            )
            and self.devices(workers) <= self.budget
        )


@dataclass(frozen=True)
class Pace:
    """How soon what was seen is acted upon. Up fast, down slowly: a worker too many costs money,
    one too few costs every request that waits."""

    window_s: PositiveFloat = 30.0
    """Rates are taken over so long. Guessed: at 5 requests a second chance moves such a mean by 8
    %, within `slack`."""

    up_s: NonNegativeFloat = 10.0
    """More workers must have been needed for so long."""

    down_s: NonNegativeFloat = 300.0
    """Fewer must have sufficed for so long; what Kubernetes' own autoscaler waits. Counted anew
    when a worker of the pool that was starting serves, or has not come for START_S."""

    flip_s: NonNegativeFloat = 30.0
    """A worker may go over to the other pool when its own did without it for so long: it can be
    back within seconds."""

    flip_cooldown_s: NonNegativeFloat = 20.0
    """Between two flips: a flipped worker begins with an empty cache, and takes seconds."""

    down_cooldown_s: NonNegativeFloat = 30.0
    """Between two removals: what the one before did must be seen."""

    settle_s: NonNegativeFloat = 30.0
    """After any change latencies tell nothing for so long."""

    idle_s: NonNegativeFloat = 600.0
    """After so long without any request there are no workers, where none are allowed."""

    stale_s: PositiveFloat = 15.0
    """Signals older than this are not acted upon: some twenty beats of a router or a worker."""

    slack: NonNegativeFloat = 0.2
    """Fewer workers suffice only if they would at so much more load, as a share. As long as load
    and what workers are measured to do stay within half of it to both sides of their mean, nothing
    is taken away that would have to come back."""

    lead_s: NonNegativeFloat = 60.0
    """How far a rising load is thought on: about what a worker takes to start; 0: not at all. 8B
    models take a minute with an engine of our kind."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.down_s < self.up_s:
            raise SettingsError("down_s: must not be less than up_s: up fast, down slowly")


@dataclass(frozen=True)
class Priors:
    """What is believed before enough was seen; each decision says while it still is. What comes in
    takes its place as it is seen, so wrong ones cost the first minutes."""

    prefill_tokens_per_s: PositiveFloat = 10_000.0
    """Prompt tokens that one busy prefill worker computes a second. An 8B model on one large GPU
    does two to three times as many."""

    decode_step_s: PositiveFloat = 0.008
    """One step of a decode worker with one stream. 8B, one large GPU: 6 ms."""

    decode_stream_s: PositiveFloat = 0.00005
    """What each further stream adds to a step. 8B, 1,024 tokens of context: 19.3 ms of 256 streams
    less 6.7 of one, each."""

    num_prompt_tokens: PositiveInt = 1024
    """Of a request. Guessed: between chats and retrieval."""

    num_output_tokens: PositiveInt = 256
    """Of a request; the router's own default."""

    max_num_running: PositiveInt = 64
    """Streams that one decode worker takes; the engine's own default. Never learned."""

    max_utilisation: Annotated[float, Meta(gt=0, lt=1)] = 0.8
    """Share of its time that a worker shall be busy at most, whatever latency that would give;
    beyond it queues grow without measure. Never learned."""

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class PlanSettings:
    """All that the plan is told."""

    targets: Targets = field(default_factory=Targets)
    """What requests shall get."""

    limits: ScaleLimits = field(default_factory=ScaleLimits)
    """What must not be exceeded."""

    pace: Pace = field(default_factory=Pace)
    """How soon it acts."""

    priors: Priors = field(default_factory=Priors)
    """What it believes at first."""


# ---- settings of the process

ScalerName = Literal["kubernetes", "local"]
"""Whose workers are counted and changed; see `scaler`."""


@dataclass(frozen=True)
class KubernetesSettings:
    """What is scaled in Kubernetes, and how replicas of the autoscaler agree on one that acts."""

    api_url: str = ""
    """Of the API server, for tests and proxies on this machine; empty: as the pod's service account
    says or, outside of a cluster, the user's kubeconfig.
    """

    namespace: str = ""
    """Where everything lies; empty: the pod's own or, outside of a cluster, the kubeconfig's."""

    prefill_deployment: str = "baton-prefill"
    """The Deployment whose pods start as prefill workers."""

    decode_deployment: str = "baton-decode"
    """The Deployment whose pods start as decode workers."""

    pod_selector: str = "app.kubernetes.io/instance=baton"
    """Labels that all workers' pods carry; which Deployment's they are says their label
    app.kubernetes.io/component, prefill or decode. A worker's id is its pod's name.
    """

    lease_name: str = "baton-autoscaler"
    """The Lease (coordination.k8s.io) whose holder acts; with act=false, NAME-advice is taken."""

    lease_s: PositiveFloat = 15.0
    """No other replica takes the Lease from a holder that renewed it within this time; Kubernetes'
    own controllers use the same."""

    renew_s: PositiveFloat = 10.0
    """A holder that could not renew for so long stops acting: clearly before another may act."""

    retry_s: PositiveFloat = 2.0
    """Between two attempts to take or renew it."""

    api_timeout_s: PositiveFloat = 5.0
    """For one answer of the API server."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if not self.retry_s < self.renew_s < self.lease_s:
            raise SettingsError("renew_s: must be above retry_s and below lease_s")
        if self.prefill_deployment == self.decode_deployment:
            raise SettingsError("decode_deployment: must be another than prefill_deployment")
        if self.api_url:
            scheme, _, rest = self.api_url.partition("://")
            if scheme not in ("http", "https") or not rest:
                raise SettingsError(f"api_url: {self.api_url!r} is no http(s) URL")


@dataclass(frozen=True)
class AutoscalerSettings:
    """Settings of one autoscaler."""

    listen: str = "127.0.0.1:0"
    """host:port (port 0: a free one) or unix:/path where it says what it decided and why, and
    serves KEDA's external scaler.
    """

    metrics_listen: str = ""
    """host:port of /metrics; port 0: a free one; empty: no /metrics."""

    autoscaler_id: str = ""
    """Name of this one among its replicas, which the Lease shows; empty: a random one."""

    redis_url: str = field(default="redis://127.0.0.1:6379/0", repr=False)
    """Where workers and routers say what they see."""

    redis: RedisAccess = field(default_factory=RedisAccess)
    """TLS and password of that Redis."""

    tls: TlsSettings = field(default_factory=TlsSettings)
    """Certificate that this autoscaler shows to workers and to its own callers; empty: no TLS."""

    model: str = ""
    """The model whose workers are scaled, as routers name it; empty: the only one they serve."""

    scaler: ScalerName = "kubernetes"
    """Whose workers: "kubernetes": those of two Deployments; "local": those of `baton up`."""

    local_address: str = ""
    """Where `baton up` starts and stops workers, host:port or unix:path; with scaler="local"."""

    kubernetes: KubernetesSettings = field(default_factory=KubernetesSettings)
    """With scaler="kubernetes"."""

    act: bool = True
    """False: it plans and says what it would do, and changes nothing: for KEDA or an HPA that act
    upon its numbers.
    """

    allow_flips: bool = True
    """Whether the autoscaler may move a running worker to the other role. Under mTLS its
    certificate must name both roles (`baton certs --flips`). A worker that refuses is asked again
    after five minutes at the earliest: it takes up another certificate without a restart."""

    interval_s: PositiveFloat = 5.0
    """Between two decisions."""

    look_timeout_s: PositiveFloat = 2.0
    """For one look at Redis."""

    act_timeout_s: PositiveFloat = 10.0
    """For one action but a flip."""

    flip_timeout_s: PositiveFloat = 60.0
    """For one worker to hand its streams over and serve in its other role."""

    num_decisions_kept: PositiveInt = 500
    """Decisions that can be asked for, and as many of those that acted."""

    plan: PlanSettings = field(default_factory=PlanSettings)
    """What is aimed at, what must hold, and how fast."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if not self.redis_url:
            raise SettingsError("redis_url: needed; workers and routers are found there")
        if self.scaler == "local" and not self.local_address:
            raise SettingsError("local_address: needed with scaler=local")
        check_host_port("metrics_listen", self.metrics_listen)
        registry.check_redis(self.redis_url, self.redis)
        self.tls.check_peers("tls")
        self.tls.check_listen("listen", self.listen, "tls")
