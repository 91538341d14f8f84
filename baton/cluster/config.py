"""The configuration of a local cluster. Wrong values are refused here, in the words of the command
line; the settings of a part (`overrides`) are checked by the part. Reads and starts nothing.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from dataclasses import dataclass, field

from baton.errors import ClusterError
from process.settings import SettingsError, text_of
from process.tracing import TracingSettings

DEFAULT_PORT = 8500
TRANSPORTS = ("shm", "nixl", "grpc")
DIRECT_TRANSPORTS = ("cuda_ipc", "nixl", "grpc")
HANDOVERS = ("auto", "store", "direct")
_DEVICE = re.compile(r"cpu|cuda(:\d{1,4})?")
_OF_ONE_STORE = ("store.node_id", "store.listen", "store.advertise")
# The kinds of parts that a `--set` is for, by the first part of its key.
_GROUPS = {
    "store": ("store",),
    "router": ("router",),
    "prefill": ("prefill",),
    "decode": ("decode",),
    "worker": ("prefill", "decode"),
    "draft": ("draft",),
    "autoscaler": ("autoscaler",),
}


@dataclass(frozen=True)
class ClusterConfig:
    """A cluster on this machine. Its fields are the options of `baton up` (`num_prefill` is
    --prefill), and their docstrings the help. `metadata` has another name of the option, the name
    of its value, and the values allowed.
    """

    model: str = field(default="baton-5m", metadata={"metavar": "NAME"})
    """Serve this model: a bundled name, a folder with a checkpoint, or a Hugging Face name
    (name@revision)."""
    more_models: tuple[str, ...] = ()
    """Serve these models beside `model`, each with workers of its own."""
    num_prefill: int = 1
    """Start N prefill workers for each model."""
    num_decode: int = 1
    """Start N decode workers for each model."""
    num_draft: int = 0
    """Start N draft workers. Their small model proposes tokens for the decode workers, which then
    check several in a step."""
    draft_model: str = field(default="baton-5m-draft", metadata={"metavar": "NAME"})
    """Serve this model by the draft workers; it needs the tokenizer of `model`."""
    num_stores: int = 1
    """Start N KV stores for each model. Workers are assigned to them in turn, as if each store were
    on a machine of its own."""
    transport: str = field(default="shm", metadata={"choices": TRANSPORTS})
    """Move KV blocks between workers and their store by this transport."""
    device: str = field(default="cpu", metadata={"metavar": "DEVICE[,...]"})
    """Compute on this device: cpu, cuda (the first GPU) or cuda:N. Several, separated by commas,
    are assigned to the workers in turn, prefill workers first."""
    handover: str = field(default="auto", metadata={"choices": HANDOVERS})
    """Hand a prompt's KV from prefill to decode through the store, directly out of the prefill
    worker's cache, or (auto) the way that is estimated to cost less."""
    direct_transport: str = field(default="", metadata={"choices": DIRECT_TRANSPORTS})
    """Read blocks out of a prefill worker's cache by this transport; cuda_ipc maps the memory of
    another GPU of this machine. The default is the transport to stores of other nodes."""
    port: int = field(default=DEFAULT_PORT, metadata={"metavar": "PORT"})
    """Listen for gRPC on this port of the loopback interface; 0 takes a free one."""
    http_port: int | None = field(default=None, metadata={"metavar": "PORT"})
    """Listen for the OpenAI API over HTTP on this port; 0 takes a free one. The default is the port
    after `port`, or a free one if that is 0."""
    redis_url: str = field(default="", metadata={"option": "--redis", "metavar": "URL"})
    """Use this Redis. By default the cluster starts one of its own, which keeps nothing on disk."""
    overrides: tuple[str, ...] = field(
        default=(), metadata={"option": "--set", "metavar": "PART.KEY=VALUE"}
    )
    """Change a setting of store, router, prefill, decode, worker (prefill and decode), draft or
    autoscaler."""
    tls: bool = False
    """Use TLS for clients and between all parts except Redis. The cluster makes the certificates;
    the role in a certificate decides what its process may call. /metrics stays plain HTTP."""
    api_keys: bool = False
    """Serve only requests with an API key; `baton api-key add` makes keys."""
    metrics: bool = False
    """Serve /metrics at each part, over plain HTTP on a port of the loopback interface, and write a
    Prometheus configuration for them."""
    trace_to: str = field(default="", metadata={"metavar": "HOST:PORT"})
    """Send traces of requests to this OpenTelemetry collector (OTLP over gRPC)."""
    trace_ratio: float = field(default=1.0, metadata={"metavar": "SHARE"})
    """Trace this share of the requests, from 0 to 1."""
    autoscale: bool = False
    """Start and stop workers as the load changes. The cluster begins with `num_prefill` and
    `num_decode` workers."""
    num_prefill_min: int = field(default=1, metadata={"option": "--min-prefill"})
    """With `autoscale`, keep at least N prefill workers. 0 for both roles stops all workers
    while there are no requests."""
    num_prefill_max: int = field(default=4, metadata={"option": "--max-prefill"})
    """With `autoscale`, run at most N prefill workers."""
    num_decode_min: int = field(default=1, metadata={"option": "--min-decode"})
    """With `autoscale`, keep at least N decode workers. 0 for both roles stops all workers
    while there are no requests."""
    num_decode_max: int = field(default=4, metadata={"option": "--max-decode"})
    """With `autoscale`, run at most N decode workers."""
    log_dir: str = field(default="", metadata={"metavar": "FOLDER"})
    """Write the logs of all processes into this folder. By default they are in a temporary folder
    that a clean stop removes."""

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            choices, value = each.metadata.get("choices"), getattr(self, each.name)
            if choices and value not in ("", *choices):
                option = each.name.replace("_", "-")
                raise ClusterError(f"--{option} {value}: choose one of {', '.join(choices)}")
        for name, value, least in (
            ("prefill", self.num_prefill, 1),
            ("decode", self.num_decode, 1),
            ("stores", self.num_stores, 1),
            ("draft", self.num_draft, 0),
            ("port", self.port, 0),
        ):
            if value < least:
                raise ClusterError(f"--{name} {value}: must be at least {least}")
        if self.autoscale:
            self._check_autoscale()
        if self.port > 65535:
            raise ClusterError(f"--port {self.port}: must be at most 65535")
        if not 0 <= self.http_listen_port <= 65535:
            raise ClusterError(f"--http-port {self.http_listen_port}: must be from 0 to 65535")
        if self.http_listen_port == self.port != 0:
            raise ClusterError(f"--http-port {self.port}: is --port as well")
        try:
            TracingSettings(endpoint=self.trace_to, sample_ratio=self.trace_ratio)
        except SettingsError as error:
            raise ClusterError(
                f"--trace-to {self.trace_to}, --trace-ratio {self.trace_ratio}: {error}"
            ) from error
        if self.direct_transport == "cuda_ipc" and "cpu" in self.devices:
            raise ClusterError(
                f"--direct-transport cuda_ipc: only GPUs map one another's memory, and --device is "
                f"{self.device}"
            )
        for device in self.devices:
            if not _DEVICE.fullmatch(device):
                raise ClusterError(
                    f"--device {self.device}: {device!r} is none of cpu, cuda, cuda:N; several are "
                    "separated by commas"
                )
        if self.transport == "nixl" and set(self.devices) != {"cpu"}:
            raise ClusterError(
                f"--transport nixl: between a GPU ({self.device}) and a store on this machine it "
                "moves blocks 100 times below the bus; use shm"
            )
        if self.num_draft and self.more_models:
            raise ClusterError("--draft: goes with one --model, whose tokens it guesses")
        if len(set(self.models)) < len(self.models):
            raise ClusterError(f"--model {', '.join(self.models)}: each model once")
        num_sharing = self.num_prefill + self.num_decode
        if self.num_stores > num_sharing:
            raise ClusterError(
                f"--stores {self.num_stores}: at most one for each worker, which are "
                f"{num_sharing}; give more with --prefill or --decode"
            )
        for override in self.overrides:
            _check_override(override)
            if self.num_all_stores > 1 and override.partition("=")[0].strip() in _OF_ONE_STORE:
                raise ClusterError(
                    f"--set {override}: {self.num_all_stores} stores cannot share it; use one "
                    "--model and --stores 1"
                )

    def _check_autoscale(self) -> None:
        if self.more_models:
            raise ClusterError("--autoscale: goes with one --model")
        for role, least, first, most in (
            ("prefill", self.num_prefill_min, self.num_prefill, self.num_prefill_max),
            ("decode", self.num_decode_min, self.num_decode, self.num_decode_max),
        ):
            if not 0 <= least <= most or most < 1:
                raise ClusterError(
                    f"--min-{role} {least} --max-{role} {most}: give 0 or more, and a maximum that "
                    "is not less"
                )
            if not least <= first <= most:
                raise ClusterError(
                    f"--{role} {first}: with --autoscale from --min-{role} ({least}) to "
                    f"--max-{role} ({most})"
                )

    @property
    def models(self) -> tuple[str, ...]:
        """All models that the cluster serves, `model` first."""
        return self.model, *self.more_models

    @property
    def num_prefill_places(self) -> int:
        """The largest number of prefill workers that a model may have; decode workers get the next
        stores and devices."""
        return self.num_prefill_max if self.autoscale else self.num_prefill

    @property
    def num_workers(self) -> int:
        """The largest number of prefill and decode workers that all models may have."""
        num_decode = self.num_decode_max if self.autoscale else self.num_decode
        return (self.num_prefill_places + num_decode) * len(self.models)

    @property
    def num_all_stores(self) -> int:
        """The number of KV stores of all models."""
        return self.num_stores * len(self.models)

    @property
    def http_listen_port(self) -> int:
        """The port of the HTTP API; 0: a free one."""
        if self.http_port is not None:
            return self.http_port
        return self.port + 1 if self.port else 0

    def overrides_of(self, kind: str) -> tuple[str, ...]:
        """The `overrides` for a process of this kind (`ProcessSpec.kind`), as key=value."""
        parts = (override.partition(".") for override in self.overrides)
        return tuple(rest for group, _, rest in parts if kind in _GROUPS[group])

    @property
    def file_tier_dir(self) -> str:
        """The folder of the stores' file tiers; empty: they have none."""
        found = ""
        for override in self.overrides_of("store"):
            key, _, value = override.partition("=")
            if key.strip() == "file_tier_dir":
                found = text_of(value)
        return found

    @property
    def may_scale_to_zero(self) -> bool:
        """Whether all workers may be stopped while there are no requests."""
        return self.autoscale and not (self.num_prefill_min or self.num_decode_min)

    @property
    def uses_nixl(self) -> bool:
        """Whether a part opens NIXL's sockets."""
        settings = (override.partition("=") for override in self.overrides)
        return "nixl" in (self.transport, self.direct_transport) or any(
            key.strip().endswith("transport") and text_of(value) == "nixl"
            for key, _, value in settings
        )

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that `device` names."""
        return tuple(name.strip() for name in self.device.split(","))


def _check_override(override: str) -> None:
    group, dot, rest = override.partition(".")
    if group not in _GROUPS:
        near = difflib.get_close_matches(group, _GROUPS, n=1, cutoff=0.0)[0]
        raise ClusterError(
            f"--set {override}: unknown component '{group}', nearest is '{near}' "
            f"(there are {', '.join(_GROUPS)})"
        )
    if not dot or "=" not in rest:
        raise ClusterError(f"--set {override}: write it as {group}.key=value")
