"""RouterSettings: what a router is told at start. Values only; no look at the machine."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Literal

from process.metrics import check_listen
from process.settings import SettingsError
from services.router.tenants import parse_scopes

MIB = 1024 * 1024

HandoverMode = Literal["auto", "store", "direct"]
"""Which way a prompt's KV goes from prefill to decode; "auto": the cheaper one of each pair."""

MAX_SAMPLES = 128
"""Samples that a worker's engine takes of one prompt."""


@dataclass(frozen=True)
class RouterLimits:
    """Bounds of one request and of all together."""

    max_request_bytes: int = 4 * MIB
    """Largest request message; a larger one is refused with INVALID_ARGUMENT."""

    hard_request_bytes: int = 32 * MIB
    """Above this gRPC itself refuses (RESOURCE_EXHAUSTED), before the message is in memory."""

    max_requests_in_flight: int = 1024
    """The next request is refused with a retry time."""

    default_budget_s: float = 300.0
    """Time of a request that names none."""

    max_budget_s: float = 3600.0
    """Most time a request may ask for."""

    default_max_tokens: int = 256
    """Output tokens of a request that does not say, if the window has room for them."""

    max_stop_strings: int = 16
    """Stop strings per request."""

    max_stop_chars: int = 256
    """Characters of one stop string; as much text may be held back."""

    max_stop_token_ids: int = 128
    """Stop token ids per request."""

    max_logprobs: int = 20
    """Alternatives per token."""

    max_samples: int = 16
    """Samples of one prompt, and beams; at most MAX_SAMPLES."""

    max_logit_bias: int = 1024
    """Tokens whose logits one request may shift."""

    max_bad_words: int = 128
    """Words that one request may forbid; each has at most `max_stop_chars` characters."""

    max_choices: int = 1024
    """Strings of a choice."""

    max_grammar_chars: int = 64 * 1024
    """Characters of a schema, pattern, grammar or of all choices together."""

    def __post_init__(self) -> None:
        _check_positive(self)
        if self.hard_request_bytes < self.max_request_bytes:
            raise SettingsError("hard_request_bytes: must not be below max_request_bytes")
        if self.max_samples > MAX_SAMPLES:
            raise SettingsError(f"max_samples: at most {MAX_SAMPLES}, got {self.max_samples}")


@dataclass(frozen=True)
class RouterTimes:
    """How often the router looks, and how long it waits for one thing."""

    poll_interval_s: float = 0.5
    """Between two looks at the registry in Redis."""

    redis_timeout_s: float = 1.0
    """For one answer of the registry."""

    lookup_timeout_s: float = 0.25
    """For one prefix lookup; after it the request goes on without remote hits."""

    connect_timeout_s: float = 2.0
    """For one attempt to reach a decode worker."""

    reserve_answer_s: float = 10.0
    """For a decode worker's answer to a reservation (its engine may be inside a step)."""

    reserve_wait_s: float = 5.0
    """How long a request waits for room when every decode worker is full."""

    supersede_wait_s: float = 5.0
    """How long a repeated request waits for its old attempt to end."""

    finish_wait_s: float = 2.0
    """How long the last message waits for the decode worker's account after a stop string."""

    status_timeout_s: float = 1.0
    """For one process's answer in a cluster status."""

    suspect_s: float = 2.0
    """How long a worker that failed an RPC is the last choice."""

    lapse_grace_s: float = 10.0
    """How long the streams of a worker without heartbeat are kept before they are failed."""

    drain_s: float = 10.0
    """How long a stopping router lets requests finish."""

    def __post_init__(self) -> None:
        _check_positive(self)


@dataclass(frozen=True)
class RouterCosts:
    """What the choice of workers reckons with. Orders of magnitude are enough: they weigh queues
    against bytes.
    """

    prefill_tokens_per_s: float = 5_000.0
    """Prompt tokens a prefill worker computes. Guessed, for a small model on a CPU."""

    link_bytes_per_s: float = 2e9
    """KV bytes between a worker and a store. Guessed, for shared memory and 25 Gbit/s alike."""

    decode_request_s: float = 0.02
    """What each request on a decode worker adds to the wait of the next. Guessed."""

    exposed_put_tokens: int = 512
    """Most tokens of a prompt whose way into the store nothing hides: those of its last chunk.
    As many as a worker's step takes by default.
    """

    def __post_init__(self) -> None:
        _check_positive(self)


@dataclass(frozen=True)
class RouterSettings:
    """Settings of one router."""

    listen: str = "127.0.0.1:0"
    """host:port that clients speak to; port 0: a free one, which the `ready` line names."""

    metrics_listen: str = ""
    """host:port of /metrics, usually on loopback; port 0: a free one; empty: nobody listens."""

    router_id: str = ""
    """Name of this router in status and logs; empty: a random one."""

    model: str = ""
    """The model served: a bundled name, a local folder, or a Hugging Face hub name. Needed."""

    redis_url: str = "redis://127.0.0.1:6379/0"
    """Where workers and stores register and the prefix index lies."""

    tenant_secret: str = ""
    """Keys the salts that keep tenants' KV apart. Equal on every router; empty: salts from names
    alone.
    """

    tenant_scopes: tuple[str, ...] = ()
    """Tenants that share what is cached, each as "tenant=scope": those of one scope find each
    other's prefixes, and can tell by the time to the first token what others have asked. Equal on
    every router. Empty: nobody shares with anybody.
    """

    handover: HandoverMode = "auto"
    """How decode gets a prompt's KV: "store": out of the store, which prefill writes; "direct": out
    of the prefill worker's own cache where that worker lends it and the decode worker can read
    elsewhere, with the store written behind; "auto": whichever costs less.
    """

    limits: RouterLimits = field(default_factory=RouterLimits)
    """Bounds."""

    times: RouterTimes = field(default_factory=RouterTimes)
    """Intervals and waits."""

    costs: RouterCosts = field(default_factory=RouterCosts)
    """Weights of the choice of workers."""

    def __post_init__(self) -> None:
        if not self.model:
            raise SettingsError("model: needed; say --set model=<name or folder>")
        if not self.redis_url:
            raise SettingsError("redis_url: needed; workers are found there")
        host, colon, port = self.listen.rpartition(":")
        if not (host and colon and port.isdecimal() and int(port) < 65536):
            raise SettingsError(f"listen: {self.listen!r} is not host:port")
        check_listen("metrics_listen", self.metrics_listen)
        if len(self.tenant_secret.encode()) > 64:
            raise SettingsError("tenant_secret: at most 64 bytes")
        parse_scopes(self.tenant_scopes)


def _check_positive(settings: RouterLimits | RouterTimes | RouterCosts) -> None:
    for entry in fields(settings):
        value = getattr(settings, entry.name)
        if not (math.isfinite(value) and value > 0):
            raise SettingsError(f"{entry.name}: must be above 0, got {value}")
