"""What is asked of an engine and what comes back, and the face that every client of one shows.

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
from engine.outputs import SampleTrace, TokenLogprobs
from engine.request import Beam, FinishReason, ModelInfo, Sampling
from engine_client.failure import Failure


@dataclass(frozen=True)
class Ask:
    """One prompt and what is wanted of it. The fields mean what they mean in
    `engine.request.Request`."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    num_samples: int = 1
    beam: Beam | None = None
    adapter: str = ""
    salt: bytes = b""
    """Asks share cached blocks only if it is equal. Empty is a value like any other."""
    priority: int = 0
    prompt_logprobs: int | None = None


@dataclass(frozen=True)
class News:
    """What one step did for one sample of one ask, or how the ask ended."""

    request_id: str
    sample_index: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    traces: tuple[SampleTrace, ...] | None = None
    finish_reason: FinishReason | None = None
    """Set in the last news of a sample that ended by itself."""
    stop_token_id: int | None = None
    score: float | None = None
    """Of a hypothesis of beam search, which `sample_index` is the place of."""
    num_cached_tokens: int = 0
    """Prompt tokens that were found in the device cache, not computed for this ask."""
    is_over: bool = False
    """The last news of this ask."""
    failure: Failure | None = None
    """Why the ask ended without all its samples; `is_over` is set and there are no tokens."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the prompt's next tokens; all of them have come with the first output token."""


@dataclass(frozen=True)
class LoadedAdapter:
    """A LoRA adapter that asks can name; as `engine.lora.manager.AdapterInfo`, without torch."""

    name: str
    digest: str
    rank: int
    num_bytes: int
    targets: tuple[str, ...]


class EngineClient(Protocol):
    """An engine somewhere, or several of one model. One conformance suite holds for all of them."""

    @property
    def model(self) -> ModelInfo:
        """What is loaded."""
        ...

    @property
    def num_engines(self) -> int:
        """Ranks are 0 to num_engines - 1."""
        ...

    @property
    def num_live(self) -> int:
        """Asks whose last news are still to come. Where it is 0 before `receive`, and that returns
        nothing, nothing will come."""
        ...

    def check(self, asks: Sequence[Ask]) -> None:
        """Whether an engine would take these; nothing is done with them.

        Raises: InvalidArgument with the field `asks[<i>].<field>` for the first that it would
            refuse.
        """
        ...

    def submit(self, ask: Ask, *, rank: int | None = None) -> None:
        """Take an ask. What is wrong with it comes as its only news.

        Args:
            rank: the engine that is to serve it (external balancing); None: the client chooses.
        Raises: AlreadyExists for an id that is live, InvalidArgument for a rank that does not
            exist, Unavailable when no engine (or not that one) is alive, FailedPrecondition after
            `close`.
        """
        ...

    def receive(self, timeout_s: float) -> tuple[News, ...]:
        """News since the last call, in order; waits up to `timeout_s` for the first.

        Empty when nothing is live or the time ran out. A client in this process takes one step
        instead of waiting.
        """
        ...

    def cancel(self, request_id: str) -> None:
        """End an ask in whatever state it is. Does nothing for one that is not live."""
        ...

    def end_sample(self, request_id: str, sample_index: int) -> None:
        """Draw no more for one sample, whose text has ended before its tokens; the others go on.
        Nothing tells of it, but where it was the last: then the ask's last news have neither tokens
        nor a failure. Does nothing for a sample that has ended."""
        ...

    def stats(self) -> tuple[EngineStats, ...]:
        """Levels and counts of each engine that is alive, in order of rank."""
        ...

    def metrics(self) -> tuple[MetricsSnapshot, ...]:
        """Speeds and histograms of each engine that is alive, in order of rank."""
        ...

    def load_adapter(self, name: str, folder: str) -> LoadedAdapter:
        """Let asks name a LoRA adapter, at every engine alive.

        Raises: what `engine.engine.LLMEngine.load_adapter` raises; where several engines disagree,
        some
            have it. FailedPrecondition where they have loaded different content.
        """
        ...

    def unload_adapter(self, name: str) -> None:
        """The reverse. Raises: what `engine.engine.LLMEngine.unload_adapter` raises."""
        ...

    def adapters(self) -> tuple[LoadedAdapter, ...]:
        """What the first engine alive has loaded."""
        ...

    def check_integrity(self) -> None:
        """Recompute the conservation laws of every engine alive and of the client itself.

        Raises: IntegrityError.
        """
        ...

    def close(self) -> None:
        """End all engines and whatever is live; bounded, idempotent. Later calls are refused."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
