"""Whose KV may meet: each tenant's its own, unless the operator opens a named scope.

The tenants of a scope hash their prompts with one salt, so what one of them leaves in a store is
found by the others. A scope's salt is derived apart from every tenant's: no tenant gets into a
scope by its name. Values; pure.

AdmissionSettings: how many are served at once, how many may wait, and tenants' rates. Values.

RouterSettings: what a router is told at start. Values only; no look at the machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from process import registry
from process.api_keys import TENANT
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
from process.tls import TlsSettings, is_loopback
from process.tracing import TracingSettings
from services.router import identity

# As validation allows tenants, but without the "=" that ends the tenant's name.
_SCOPE = re.compile(r"[A-Za-z0-9._:@/+-]{1,64}")


def parse_scopes(entries: Sequence[str]) -> Mapping[str, str]:
    """Scope by tenant, from entries "tenant=scope".

    Raises: SettingsError naming the entry that is not so, or the tenant that is in two scopes.
    """
    scopes: dict[str, str] = {}
    for entry in entries:
        tenant, _, scope = entry.rpartition("=")
        if not (TENANT.fullmatch(tenant) and _SCOPE.fullmatch(scope)):
            raise SettingsError(
                f"tenant_scopes: {entry!r} is not tenant=scope; both are 1 to 64 letters, digits "
                "and any of . _ : @ / + -"
            )
        if scopes.setdefault(tenant, scope) != scope:
            raise SettingsError(f"tenant_scopes: tenant {tenant!r} is in two scopes; leave one")
    return scopes


class TenantSalts:
    """The salt of each tenant's chain hashes."""

    def __init__(self, secret: str, scopes: Mapping[str, str]) -> None:
        """`scopes`: by tenant; a tenant that is not in it shares with no other."""
        self._secret = secret
        self._scopes = dict(scopes)

    def of(self, tenant: str) -> bytes:
        """32 bytes; equal for two tenants only if they are in one scope."""
        scope = self._scopes.get(tenant)
        if scope is None:
            return identity.tenant_salt(tenant, self._secret)
        return identity.scope_salt(scope, self._secret)


@dataclass(frozen=True)
class AdmissionSettings:
    """Which requests are served, wait or are refused under load."""

    max_active_requests: PositiveInt = 768
    """Requests that are served at the same time; the others wait."""

    max_queued_requests: PositiveInt = 1024
    """Requests that may wait; the next is refused with a retry time."""

    max_queued_per_tenant: PositiveInt = 512
    """Of them, one tenant's, unless the file of API keys says otherwise."""

    num_steps_ahead: PositiveInt = 3
    """Prompt tokens that may be under way without their first token, in engine steps of the prefill
    workers: one computes, one is on its way. Less is fairer, more keeps workers busier.
    """

    max_requests_per_min: NonNegativeInt = 0
    """Rate limit of each tenant that the file of API keys does not name; 0: none."""

    max_tokens_per_min: NonNegativeInt = 0
    """The same for tokens, of prompts and outputs together; 0: none."""

    rate_timeout_s: PositiveFloat = 0.1
    """For one answer of Redis about a rate; without one this router goes on alone."""

    def __post_init__(self) -> None:
        check_ranges(self)


MIB = 1024 * 1024

HandoverMode = Literal["auto", "store", "direct"]
"""Which way a prompt's KV goes from prefill to decode; "auto": the cheaper one of each pair."""

RoutingPolicy = Literal["joint", "prefix_aware", "least_load", "round_robin"]
"""How workers are chosen; see `services/router/policies`."""

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+")

MAX_SAMPLES = 128
"""Samples that a worker's engine takes of one prompt."""


@dataclass(frozen=True)
class RouterLimits:
    """Bounds of one request and of all together."""

    max_request_bytes: PositiveInt = 4 * MIB
    """Largest request message; a larger one is refused with INVALID_ARGUMENT."""

    hard_request_bytes: PositiveInt = 8 * MIB
    """Above this gRPC itself refuses (RESOURCE_EXHAUSTED), before the message is in memory."""

    max_intake_bytes: PositiveInt = 256 * MIB
    """Memory for the messages of all requests together, of which one tenant has at most half. A
    message counts with its largest possible size while it is read, then with its own size. A
    message that takes longer than a quarter of `intake_wait_s` to arrive is refused while another
    one waits for memory."""

    max_connections: PositiveInt = 4096
    """At each port at the same time, counted from the accept; the next one is closed at once."""

    max_requests_in_flight: PositiveInt = 2048
    """The next request is refused with a retry time, of any tenant. Larger than what `admission`
    serves and queues together, where the tenant with the most requests is refused first."""

    max_held_requests: PositiveInt = 256
    """Requests that are held while there are no workers, with `hold_without_workers_s`; the next is
    refused with a retry time.
    """

    default_budget_s: PositiveFloat = 300.0
    """Time of a request that names none."""

    max_budget_s: PositiveFloat = 3600.0
    """Most time a request may ask for."""

    default_max_tokens: PositiveInt = 256
    """Output tokens of a request that does not say, if the window has room for them."""

    max_stop_strings: PositiveInt = 16
    """Stop strings per request."""

    max_stop_chars: PositiveInt = 256
    """Characters of one stop string; as much text may be held back."""

    max_stop_token_ids: PositiveInt = 128
    """Stop token ids per request."""

    max_logprobs: PositiveInt = 20
    """Alternatives per token."""

    max_prompt_logprobs: PositiveInt = 256 * 1024
    """Log probabilities of one prompt, the alternatives of its tokens counted: about 150 bytes each
    while its answer is put together."""

    max_samples: PositiveInt = 16
    """Samples of one prompt, and beams; at most MAX_SAMPLES."""

    max_logit_bias: PositiveInt = 1024
    """Tokens whose logits one request may shift."""

    max_bad_words: PositiveInt = 128
    """Words that one request may forbid; each has at most `max_stop_chars` characters."""

    max_choices: PositiveInt = 1024
    """Strings of a choice."""

    num_decisions_kept: PositiveInt = 1024
    """Requests whose choices of workers are kept with their reasons, of each model."""

    num_prefixes_kept: PositiveInt = 64 * 1024
    """Prefixes of each model for which the router remembers the workers that should still have
    them; about 200 bytes each."""

    max_failovers: PositiveInt = 3
    """Decode workers that one request may lose before it fails: it might be what breaks them.
    Workers that leave on purpose do not count.
    """

    max_grammar_chars: PositiveInt = 64 * 1024
    """Characters of a schema, pattern, grammar or of all choices together."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.hard_request_bytes < self.max_request_bytes:
            raise SettingsError("hard_request_bytes: must not be below max_request_bytes")
        if self.max_intake_bytes < 2 * self.hard_request_bytes:
            raise SettingsError("max_intake_bytes: must be at least twice hard_request_bytes")
        if self.max_samples > MAX_SAMPLES:
            raise SettingsError(f"max_samples: at most {MAX_SAMPLES}, got {self.max_samples}")


@dataclass(frozen=True)
class RouterTimes:
    """How often the router looks, and how long it waits for one thing."""

    poll_interval_s: PositiveFloat = 0.5
    """Between two looks at the registry in Redis."""

    redis_timeout_s: PositiveFloat = 1.0
    """For one answer of the registry."""

    lookup_timeout_s: PositiveFloat = 0.25
    """For the index's answer to one prefix lookup; after it the request goes on without remote
    hits."""

    connect_timeout_s: PositiveFloat = 2.0
    """For one attempt to reach a decode worker."""

    reserve_answer_s: PositiveFloat = 10.0
    """For a decode worker's answer to a reservation (its engine may be inside a step)."""

    reserve_wait_s: PositiveFloat = 5.0
    """How long a request waits for room when every decode worker is full."""

    failover_wait_s: PositiveFloat = 60.0
    """How long requests wait for a worker that is away, counted from when it last served or was
    starting, where no other takes them: longer than a process takes from its end until it loads its
    model again. Also how long an answer whose decode worker went waits for room at another."""

    supersede_wait_s: PositiveFloat = 5.0
    """How long a repeated request waits for its old attempt to end."""

    finish_wait_s: PositiveFloat = 2.0
    """How long the last message waits for the decode worker's account after a stop string."""

    status_timeout_s: PositiveFloat = 1.0
    """For one process's answer in a cluster status."""

    suspect_s: PositiveFloat = 0.5
    """How long a worker that failed is the last choice before it is probed; each failed probe
    doubles it.
    """

    max_suspect_s: PositiveFloat = 30.0
    """Longest pause between two probes."""

    max_step_s: PositiveFloat = 30.0
    """A worker whose engine has been inside one step for longer is taken to hang, while another one
    of its role can take over: its requests go on there, and it gets no new ones until the step
    ends. Well above a long step, kernels compiled in it included. `baton up` starts a part again
    whose process is silent for as long."""

    lapse_grace_s: PositiveFloat = 10.0
    """How long the streams and calls of a worker without heartbeat are kept before they fail."""

    read_s: PositiveFloat = 60.0
    """For a request's message, or body, to arrive. Guessed: 4 MiB at 70 KiB a second."""

    intake_wait_s: PositiveFloat = 5.0
    """How long a request waits for room to be read, before it is refused with a retry time."""

    stall_s: PositiveFloat = 30.0
    """How long a client may take nothing of the answer that waits for it; then its request is
    cancelled.
    """

    sse_keep_alive_s: PositiveFloat = 15.0
    """After how long without an event a stream over HTTP gets a comment, so that no proxy takes it
    for dead. It also begins an answer whose first token is not there: an error behind it is an
    event and no status.
    """

    idle_s: PositiveFloat = 75.0
    """A client's connection without a request is closed after so long. Longer than what proxies
    keep open, so that they do not meet one that just closed.
    """

    adapter_s: PositiveFloat = 120.0
    """For every worker to load an adapter, and then for every router to serve it; also for all of
    them to drop one. A load that some worker does not manage in this time fails, and all keep what
    they had."""

    drain_s: PositiveFloat = 10.0
    """How long a stopping router lets requests finish. Those that are left then end with an error,
    in a stream as its last event; a second signal ends the router at once.
    """

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.max_suspect_s < self.suspect_s:
            raise SettingsError("max_suspect_s: must not be below suspect_s")


@dataclass(frozen=True)
class RouterCosts:
    """What the choice of workers reckons with. Orders of magnitude are enough: they weigh queues
    against bytes.
    """

    prefill_tokens_per_s: PositiveFloat = 5_000.0
    """Prompt tokens a prefill worker computes. Guessed, for a small model on a CPU."""

    link_bytes_per_s: PositiveFloat = 2e9
    """KV bytes between a worker and a store. Guessed, for shared memory and 25 Gbit/s alike."""

    decode_request_s: PositiveFloat = 0.02
    """What each request on a decode worker adds to the wait of the next. Guessed."""

    scarce_window_s: PositiveFloat = 0.05
    """What it costs to take a worker with a longer window than the request needs, where others have
    a shorter one: it is kept for prompts that need it. Guessed.
    """

    exposed_put_tokens: PositiveInt = 512
    """Most tokens of a prompt whose way into the store nothing hides: those of its last chunk.
    As many as a worker's step takes by default.
    """

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class RouterSettings:
    """Settings of one router."""

    listen: str = "127.0.0.1:0"
    """host:port that clients speak to (port 0: a free one, which the `ready` line names), or
    unix:/path."""

    http_listen: str = ""
    """host:port of the OpenAI API over HTTP; port 0: a free one; empty: no HTTP."""

    metrics_listen: str = ""
    """host:port of /metrics, usually on loopback; port 0: a free one; empty: no /metrics."""

    router_id: str = ""
    """Name of this router in status and logs; empty: a random one."""

    model: str = ""
    """The model served: a bundled name, a local folder, or a Hugging Face hub name. Needed."""

    models: tuple[str, ...] = ()
    """Further models served beside `model`, each by its own workers; a request names the one that
    it is for.
    """

    redis_url: str = field(default="redis://127.0.0.1:6379/0", repr=False)
    """Where workers and stores register and the prefix index lies."""

    redis: RedisAccess = field(default_factory=RedisAccess)
    """TLS and password of that Redis."""

    tls: TlsSettings = field(default_factory=TlsSettings)
    """Certificate that this router shows to workers and stores; empty: no TLS."""

    client_tls: TlsSettings = field(default_factory=TlsSettings)
    """What clients are shown; empty: no TLS. With a `ca_file` they need a certificate of it, too,
    of role client or admin.
    """

    api_keys_file: str = ""
    """File of API keys and of tenants' limits, written by `baton api-key`, read again when it
    changes. Empty: requests need no key and name their own tenant."""

    allow_anonymous: bool = False
    """Whether other machines may send requests without an API key."""

    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may use the HTTP API from a browser, each as
    "https://app.example.com"; "*": any, where clients are asked for keys. Empty: pages of other
    origins may not.
    """

    tenant_secret: str = field(default="", repr=False)
    """Keys the salts that keep tenants' KV apart. Equal on every router; empty: salts from names
    alone.
    """

    tenant_scopes: tuple[str, ...] = ()
    """Tenants that share cached prefixes, each as "tenant=scope": tenants of one scope find each
    other's prefixes, and can infer each other's prompts from the time to the first token. Equal on
    every router. Empty: no two tenants share."""

    handover: HandoverMode = "auto"
    """How decode gets a prompt's KV: "store": out of the store, which prefill writes; "direct": out
    of the prefill worker's own cache where that worker lends it and the decode worker can read
    elsewhere, with the store written behind; "auto": whichever costs less.
    """

    routing_policy: RoutingPolicy = "joint"
    """How the workers of a request are chosen: "joint": the pair that costs least time (queue,
    uncached tokens, bytes over links, load); "prefix_aware": fewest tokens to compute;
    "least_load": fewest requests and tokens under way; "round_robin": in turn.
    """

    short_prefill_tokens: NonNegativeInt = 0
    """Longest uncached rest of a prompt that a decode worker may compute by itself, where the
    policy finds that cheaper than a prefill worker and a handover; 0: never.
    """

    hold_without_workers_s: NonNegativeFloat = 0.0
    """How long a request waits for a worker while there is none for its model, and none starts or
    went within `times.failover_wait_s`; 0: it is refused at once. Where an autoscaler may take all
    workers away, longer than one takes to start.
    """

    admission: AdmissionSettings = field(default_factory=AdmissionSettings)
    """Which requests are served, wait or are refused under load."""

    limits: RouterLimits = field(default_factory=RouterLimits)
    """Bounds."""

    times: RouterTimes = field(default_factory=RouterTimes)
    """Intervals and waits."""

    costs: RouterCosts = field(default_factory=RouterCosts)
    """Weights of the choice of workers."""

    tracing: TracingSettings = field(default_factory=TracingSettings)
    """Traces of requests."""

    log_prompts: bool = False
    """Whether prompts and answers are written into the log, as events `prompt` and `answer`: for
    looking into one's own requests, never where others' are served.
    """

    def __post_init__(self) -> None:
        check_ranges(self)
        if not self.model:
            raise SettingsError("model: needed; say --set model=<name or folder>")
        for name in self.models:
            if (self.model, *self.models).count(name) > 1:
                raise SettingsError(f"models: {name!r} is named twice")
            if not name:
                raise SettingsError("models: an empty name")
        if not self.redis_url:
            raise SettingsError("redis_url: needed; workers are found there")
        check_host_port("metrics_listen", self.metrics_listen)
        check_host_port("http_listen", self.http_listen)
        self._check_cors()
        self.tls.check_peers("tls")
        if self.client_tls.ca_file and not self.client_tls.is_on:
            raise SettingsError("client_tls.ca_file: needs client_tls.cert_file and key_file")
        self.check_clients_listen("listen", self.listen)
        if self.http_listen:
            self.check_clients_listen("http_listen", self.http_listen)
        registry.check_redis(self.redis_url, self.redis)
        if len(self.tenant_secret.encode()) > 64:
            raise SettingsError("tenant_secret: at most 64 bytes")
        parse_scopes(self.tenant_scopes)

    def _check_cors(self) -> None:
        for origin in self.cors_origins:
            if origin == "*" and (self.api_keys_file or self.allow_anonymous):
                continue
            if origin == "*":
                raise SettingsError(
                    "cors_origins: '*' lets every web page use this port without a key; name the "
                    "origins, or set api_keys_file"
                )
            if not _ORIGIN.fullmatch(origin):
                raise SettingsError(
                    f"cors_origins: {origin!r} is no origin; write https://host or "
                    "https://host:port, without a path"
                )

    def check_clients_listen(self, name: str, listen: str) -> None:
        """Raises: SettingsError for an address where anybody on the network would be served, or
        would read along.
        """
        self.client_tls.check_listen(name, listen, "client_tls")
        if not (self.api_keys_file or self.allow_anonymous or is_loopback(listen)):
            raise SettingsError(
                f"{name}: {listen} is reached from other machines, by anybody; set api_keys_file, "
                "or allow_anonymous=true"
            )
