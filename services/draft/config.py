"""DraftSettings: the settings of a draft worker process. Frozen; `process.settings` loads them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated

from msgspec import Meta

from engine.config import EngineConfig
from engine.speculation.config import SpeculationConfig
from engine.speculation.draft_sessions import SESSION_BYTES
from process.settings import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    SettingsError,
    check_host_port,
    check_ranges,
)
from process.tls import TlsSettings

HEEDED = (
    "model",
    "device",
    "dtype",
    "decoder",
    "weight_dtype",
    "block_size",
    "max_num_tokens_per_step",
    "max_num_running",
    "context_window",
    "num_threads",
    "speculation",
)
"""Fields of `engine` that a draft worker uses. The others concern an engine that serves requests.
"""
HEEDED_SPECULATION = ("expansion", "draft_kv_bytes", "max_num_nodes")
"""Fields of `engine.speculation` that a draft worker uses."""


@dataclass(frozen=True)
class DraftLimits:
    """Bounds of one draft worker."""

    max_num_sessions: PositiveInt = 256
    """Sequences that the draft worker remembers. For a further one it forgets a sequence that it
    was not asked for lately; where there is none, it does not take the further one."""

    max_session_bytes: Annotated[int, Meta(ge=SESSION_BYTES)] = 64 * 1024 * 1024
    """Of their token ids. Their KV has a bound of its own: engine.speculation.draft_kv_bytes."""

    max_waiting_calls: PositiveInt = 64
    """Calls that are computed or wait for it; the next one is refused."""

    catch_up_tokens: PositiveInt = 128
    """Of a text that is new here, computed at once between two calls: a call may wait for that."""

    max_call_s: PositiveFloat = 10.0
    """A call that waits longer is given up, if its caller has not given it up before."""

    drain_s: NonNegativeFloat = 1.0
    """How long calls under way may take to end when the process is asked to stop."""

    step_timeout_s: NonNegativeFloat = 300.0
    """Guessing that takes longer has failed: the device does not answer, and the worker ends. Far
    above the longest call, compilations included. 0: never."""

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class DraftSettings:
    """Settings of one draft worker."""

    listen: str = "127.0.0.1:0"
    """host:port of its gRPC server (port 0: a free one), or unix:/path."""

    worker_id: str = ""
    """Its name in logs and metrics; empty: "draft" and a random part."""

    tls: TlsSettings = field(default_factory=TlsSettings)
    """Certificate that this worker shows to decode workers; empty: no TLS."""

    metrics_listen: str = ""
    """host:port of /metrics, usually on loopback; port 0: a free one; empty: no /metrics."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    """The model that guesses and its device. What a draft worker does not heed (HEEDED,
    HEEDED_SPECULATION) is refused."""

    limits: DraftLimits = field(default_factory=DraftLimits)
    """Bounds."""

    def __post_init__(self) -> None:
        check_host_port("metrics_listen", self.metrics_listen)
        self.tls.check_peers("tls")
        self.tls.check_listen("listen", self.listen, "tls")
        if not self.engine.model:
            raise SettingsError("engine.model: is empty; name the small model that guesses")
        if self.engine.speculation.is_on:
            raise SettingsError(
                "engine.speculation: a draft worker guesses with engine.model alone; leave "
                "drafters, draft_models and draft_workers empty"
            )
        _check_heeded("engine", self.engine, EngineConfig(), HEEDED)
        own, plain = self.engine.speculation, SpeculationConfig()
        _check_heeded("engine.speculation", own, plain, HEEDED_SPECULATION)


def _check_heeded(
    where: str, own: EngineConfig | SpeculationConfig, plain: object, heeded: tuple[str, ...]
) -> None:
    for one in fields(own):
        if one.name not in heeded and getattr(own, one.name) != getattr(plain, one.name):
            raise SettingsError(
                f"{where}.{one.name}: a draft worker does not heed it; leave it out. It heeds "
                f"{', '.join(heeded)}"
            )
