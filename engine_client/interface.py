"""Requests and news as values, and the interface `EngineClient` that every engine client
implements.

`Ask` is a request as a value: it can cross to another process, since the chain-hash function that
`engine.request.Request` carries is made where the engine lives (from `salt` and the adapter).
`News` is what one step did for one sample. Neither knows text.

Life of an ask at any client:

1. `submit` takes it: it waits in the line of its engine (`core.EngineCore`)
2. the engine has room: it is reserved and runs; its news come out of `receive`
3. news with `is_over` are its last: it has ended, failed (`failure` says how) or was cancelled

`cancel` in 1 and 2 leads to 3 with a `Cancelled` failure. An engine that dies takes its asks to 3
with `Unavailable`. No torch here. Values: any thread; a client says itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from engine.metrics import EngineStats, MetricsSnapshot
from engine.outputs import PositionLogprobs, SampleTrace
from engine.request import Beam, FinishReason, ModelInfo, Sampling
from engine_client.encoded_errors import Failure


@dataclass(frozen=True)
class Ask:
    """One generation request: a prompt and its sampling parameters. The fields mean the same as
    those of `engine.request.Request`."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    num_samples: int = 1
    beam: Beam | None = None
    adapter: str = ""
    salt: bytes = b""
    """Cache salt: requests share cached blocks only if their salts are equal. Empty is a value like
    any other."""
    priority: int = 0
    prompt_logprobs: int | None = None


@dataclass(frozen=True)
class News:
    """Output of one step for one sample of one request, or the end of the request."""

    request_id: str
    sample_index: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] | None = None
    traces: tuple[SampleTrace, ...] | None = None
    finish_reason: FinishReason | None = None
    """Finish reason; set in the last news of a sample that the engine ended."""
    stop_token_id: int | None = None
    score: float | None = None
    """Score of the beam search hypothesis of rank `sample_index`."""
    num_cached_tokens: int = 0
    """Number of prompt tokens found in the device's KV cache and not computed for this request."""
    is_over: bool = False
    """Whether these are the last news of the request."""
    failure: Failure | None = None
    """Error that ended the request before all its samples; then `is_over` is set and there are no
    tokens."""
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    """Log-probabilities of the prompt's next tokens; all of them have come by the first output
    token."""


@dataclass(frozen=True)
class LoadedAdapter:
    """A LoRA adapter that requests can name: `engine.lora.manager.AdapterInfo` without its torch
    types."""

    name: str
    digest: str
    rank: int
    num_bytes: int
    targets: tuple[str, ...]


class EngineClient(Protocol):
    """Interface of a client of one engine, or of several engines of one model, wherever they
    run."""

    @property
    def model(self) -> ModelInfo:
        """Describe the model that the engines have loaded."""
        ...

    @property
    def num_engines(self) -> int:
        """Return the number of engines; their ranks are 0 to num_engines - 1."""
        ...

    @property
    def num_live(self) -> int:
        """Return the number of requests whose last news are still to come. If it is 0 and `receive`
        returns nothing, no news will follow."""
        ...

    def check(self, asks: Sequence[Ask]) -> None:
        """Check whether an engine would accept these requests, without submitting them.

        Raises: InvalidArgument with the field `asks[<i>].<field>` for the first that it would
            refuse.
        """
        ...

    def submit(self, ask: Ask, *, rank: int | None = None) -> None:
        """Submit a request. An invalid one is reported as its only news.

        Args:
            rank: engine to run it on (external load balancing); None: the client chooses.
        Raises: AlreadyExists for an id that is live, InvalidArgument for a rank that does not
            exist, Unavailable when no engine (or not that one) is alive, FailedPrecondition after
            `close`.
        """
        ...

    def receive(self, timeout_s: float) -> tuple[News, ...]:
        """Return the news since the last call, in order; wait up to `timeout_s` seconds for the
        first. The result is empty when no request is live or the time ran out. A client in this
        process runs one engine step instead of waiting."""
        ...

    def cancel(self, request_id: str) -> None:
        """Cancel a request in any state; an id that is not live is ignored."""
        ...

    def end_sample(self, request_id: str, sample_index: int) -> None:
        """End one sample whose text has ended before its tokens; the others go on. No news follow,
        except when it was the last sample: then the request's last news have neither tokens nor a
        failure. A sample that has ended is ignored."""
        ...

    def stats(self) -> tuple[EngineStats, ...]:
        """Return gauges and counters of each engine that is alive, in order of rank."""
        ...

    def metrics(self) -> tuple[MetricsSnapshot, ...]:
        """Return throughput and latency histograms of each engine that is alive, in order of
        rank."""
        ...

    def load_adapter(self, name: str, folder: str) -> LoadedAdapter:
        """Load a LoRA adapter from `folder` on every engine that is alive, so that requests can
        name it.

        Raises: what `engine.engine.LLMEngine.load_adapter` raises; where several engines disagree,
        some
            have it. FailedPrecondition where they have loaded different content.
        """
        ...

    def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter from every engine that is alive. Raises: the errors of
        `engine.engine.LLMEngine.unload_adapter`."""
        ...

    def adapters(self) -> tuple[LoadedAdapter, ...]:
        """Return the adapters loaded on the first engine that is alive."""
        ...

    def check_integrity(self) -> None:
        """Check the invariants of every engine that is alive and of the client itself. Raises:
        IntegrityError."""
        ...

    def close(self) -> None:
        """Stop all engines and end all live requests; bounded in time and idempotent. Later calls
        are refused."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
