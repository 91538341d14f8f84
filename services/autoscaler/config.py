"""AutoscalerSettings: what an autoscaler is told at start. Values only; no look at the machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from process import registry
from process.registry import RedisAccess
from process.settings import (
    PositiveFloat,
    PositiveInt,
    SettingsError,
    check_host_port,
    check_ranges,
)
from process.tls import TlsSettings
from services.autoscaler.limits import PlanSettings

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
