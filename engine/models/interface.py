"""LoadedModel: the interface between the engine and a model; and DecodesAhead: that of a model
whose decode steps may be launched before the previous step's tokens were read. Implemented by
transformers_backend.py, llama.py, engine/parallel and engine/testing/fake_model.py.

Called from the engine's thread only.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch

from engine.batch import Batch
from engine.kv.layout import KvLayout
from engine.kv.memory import KvMemory
from engine.kv.sizing import DeviceMemory, device_memory
from engine.lora.manager import LoraManager
from engine.request import ModelInfo
from engine.sampling.metadata import SamplerOutput, SamplingRequest
from engine.sequence import Key

DRAWN_BEFORE = -1
"""The token id of a token that was sampled by the previous launch and is not read yet."""

Progress = Callable[[str, int, int], None]
"""A callback (phase, done, total): bytes read for "weights" and "digest", steps for "warm-up"."""


class DecodeRow(NamedTuple):
    """One row of a launch: one token of one sample, whose KV is written and from whose logits the
    next token is sampled."""

    key: Key
    """(request id, sample index). At most once in a launch; a later request may reuse it."""

    token_id: int
    """The token to compute; DRAWN_BEFORE: the token that the row of this key sampled in the launch
    just before. If that was an error, the result of this row is not used, but the row must not
    disturb others, and writes its KV to its own place."""

    position: int
    """Position of the token; 0 is the prompt's first. Tokens before it are in the cache, or are
    written by the launch just before."""

    block_ids: tuple[int, ...]
    """Blocks of tokens [0, position + 1), maybe with further ones of the same sample. The same
    object as in the launch before if they are equal, so that `is` shows whether they must be
    sent to the device."""

    draw: SamplingRequest
    """The sampling of the next token; its position is `position` + 1. With DRAWN_BEFORE its
    `history` is None."""

    adapter: int = 0
    """The slot of the row's LoRA adapter (Span.adapter), of an adapter for which
    LoraManager.is_launched; 0: none."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the row: 1."""
        return 1


class MixedRow(NamedTuple):
    """One row of a mixed launch: consecutive tokens of one sample, whose KV is written: a chunk of
    a prompt, or one token as in a DecodeRow."""

    key: Key
    """(request id, sample index), as in DecodeRow."""

    token_ids: tuple[int, ...]
    """The tokens to compute, at least one; (DRAWN_BEFORE,): the token sampled in the launch just
    before, as in DecodeRow."""

    position: int
    """Position of the first of them. Tokens before it are in the cache, or are written by the
    launch just before."""

    block_ids: tuple[int, ...]
    """Blocks of tokens [0, position + num_tokens), and no further ones, since they are sent to the
    device with the step."""

    draw: SamplingRequest | None
    """The sampling from the last token's logits, at `position` + `num_tokens`; None: no token is
    sampled, since the prompt is not complete."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the row."""
        return len(self.token_ids)


LaunchRow = DecodeRow | MixedRow


class Launch(Protocol):
    """A handle that `launch` returns and `read` needs; its contents belong to the
    implementation."""


class DecodesAhead(Protocol):
    """Steps, sampling included, that one call launches and another reads: decode steps, and with
    `takes_prompts` mixed ones, too.

    Order on the device: work that the engine queued before `launch` (forward passes,
    `KvMemory.clear` and `copy`) is done before it; work queued after it is done after it. Launches
    run in the order of the calls.
    """

    @property
    def max_rows(self) -> int:
        """Largest number of rows of one launch."""
        ...

    @property
    def takes_prompts(self) -> bool:
        """Whether `launch_mixed` is available."""
        ...

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile and capture all that `launch` needs, without writing KV. Called once, after
        `attach`."""
        ...

    def takes(self, draw: SamplingRequest) -> bool:
        """Whether a launch can sample a row with these parameters, with the same result as
        engine/sampling/sampler.py. Must be fast: it is called for each row of each launch. It is
        not called for sampling that depends on earlier tokens (`history`) or a grammar."""
        ...

    def launch(self, rows: Sequence[DecodeRow]) -> Launch:
        """Launch a step of 1 to `max_rows` rows, without waiting for the device. At most two
        launches are unread at any time, those of `launch_mixed` included. If it raises, nothing
        was launched, or `drain` ends it."""
        ...

    def launch_mixed(self, rows: Sequence[MixedRow]) -> Launch:
        """Launch a step that has rows of several tokens, or rows without sampling. Tokens sampled
        by the launch just before are available, whichever of the two calls made it."""
        ...

    def read(self, launch: Launch) -> list[SamplerOutput]:
        """Wait for a launch, whose KV is then in the cache. Launches are read in their order, each
        once. Returns: the outputs in the order of its rows, without rows that do not sample."""
        ...

    def drain(self) -> None:
        """Wait until no launch touches the cache any more, and discard all unread launches; called
        after an exception. No row of the next launch is DRAWN_BEFORE."""
        ...


class Guesses(enum.Enum):
    """The kinds of draft tokens that a model can verify in one forward pass."""

    CHAINS = "chains"
    """A single path of draft tokens, computed like any tokens of a span."""
    TREES = "trees"
    """A tree of draft tokens (Span.branches)."""


class Ends(NamedTuple):
    """The embedding and the LM head of a model, for draft heads that share them."""

    hidden_size: int

    embed: Callable[[torch.Tensor], torch.Tensor]
    """Embed token ids: [T] -> [T, hidden]."""

    head: Callable[[torch.Tensor], torch.Tensor]
    """Compute logits from hidden states after the final norm: [R, hidden] -> [R, vocab_size];
    without adapters."""

    num_layers: int = 0
    """Number of layers whose input can be kept (Batch.wants_layers): all, or 0."""


class InOneProcess:
    """Default implementations of LoadedModel for a model that this process computes alone."""

    info: ModelInfo
    layout: KvLayout
    kept_hidden: torch.Tensor | None = None
    """Hidden states of the last `forward`, [R, hidden], if its batch wanted them; else None."""
    kept_every_hidden: torch.Tensor | None = None
    """Hidden states of all tokens of the last `forward`, [T, hidden], if its batch wanted them and
    the model supports it; else None."""
    kept_layer_inputs: Mapping[int, torch.Tensor] = MappingProxyType({})
    """Inputs of the layers that the last batch wanted, [T, hidden] each, by layer."""
    reads_unwritten: bool = True
    """Whether a forward pass reads slots that were not written; True unless a subclass knows
    better."""
    guesses: Guesses = Guesses.CHAINS
    """The kinds of draft tokens that the model can verify in one forward pass."""

    @property
    def kv_record(self) -> KvLayout:
        """The layout of the part of a block on this device: the whole block."""
        return self.layout

    def device_memory(self) -> DeviceMemory | None:
        """Return the memory of the model's CUDA device; None on CPU."""
        info = self.info
        return device_memory(
            info.device, weight_bytes=info.weight_bytes, step_bytes=info.step_bytes
        )

    def make_memory(self, num_blocks: int) -> KvMemory:
        """Create a KV cache of `num_blocks` blocks on the model's device."""
        return KvMemory(self.layout, num_blocks, self.info.device)

    def hidden(self) -> torch.Tensor:
        """Return the hidden states that the last `forward` kept. Raises: ValueError if its batch
        did not want them."""
        if self.kept_hidden is None:
            raise ValueError("the last batch did not want hidden states")
        return self.kept_hidden

    def every_hidden(self) -> torch.Tensor | None:
        """Return the hidden states of all tokens that the last `forward` kept; None if it kept
        none."""
        return self.kept_every_hidden

    def layer_inputs(self) -> Mapping[int, torch.Tensor]:
        """Return the layer inputs that the last `forward` kept, by layer."""
        return self.kept_layer_inputs

    @property
    def ends(self) -> Ends | None:
        """None: embedding and head cannot be called by themselves."""
        return None

    def queues_step(self, batch: Batch) -> bool:
        """Return False: `forward` launches kernel by kernel."""
        return False

    def warm_up(self, progress: Progress | None = None) -> None:
        """Do nothing: no graphs are captured."""

    def check_alive(self) -> None:
        """Do nothing: there are no other processes that could end."""

    def watch(self, tell: Callable[[], None]) -> None:
        """Do nothing: there are no other processes that could end."""

    def check_integrity(self) -> None:
        """Do nothing: the model keeps no state to check."""

    def close(self) -> None:
        """Do nothing: there are no other processes to end."""


class LoadedModel(Protocol):
    """Protocol of a model with its weights loaded."""

    @property
    def info(self) -> ModelInfo:
        """Name, sizes, dtype and device of the model; `num_blocks` is 0, since the engine chooses
        it."""
        ...

    @property
    def layout(self) -> KvLayout:
        """The layout of a block of its KV cache."""
        ...

    @property
    def kv_record(self) -> KvLayout:
        """The layout of the part of a block that lies on one device: `layout`, unless several ranks
        share the blocks."""
        ...

    @property
    def adapters(self) -> LoraManager:
        """The model's LoRA adapters; a manager that rejects every load if the model supports
        none."""
        ...

    @property
    def reads_unwritten(self) -> bool:
        """Whether a forward pass reads slots of a block that nothing was written to yet, with
        weight 0, so that they must hold finite numbers. Valid after `attach`."""
        ...

    def queues_step(self, batch: Batch) -> bool:
        """Whether `forward` of this batch queues all work of the device at once and returns long
        before it is done. Such a step is begun before the events of the previous one are sent.
        False where `forward` waits for results, or launches kernel by kernel. Must be fast."""
        ...

    @property
    def guesses(self) -> Guesses:
        """The kinds of draft tokens that the model can verify in one forward pass. Valid after
        `attach`."""
        ...

    @property
    def ahead(self) -> DecodesAhead | None:
        """The interface for launching decode steps ahead; None if the model has none. Valid after
        `attach`."""
        ...

    def device_memory(self) -> DeviceMemory | None:
        """Return the memory of the device with the least room; None if it is not known."""
        ...

    def make_memory(self, num_blocks: int) -> KvMemory:
        """Create a KV cache of `num_blocks` blocks that `attach` accepts."""
        ...

    def attach(self, memory: KvMemory) -> None:
        """Use a cache that `make_memory` created, from now on. Called before `forward`: once for
        measuring, and once with the cache that serves."""
        ...

    def forward(self, batch: Batch) -> torch.Tensor:
        """Compute the batch's tokens, write their KV to their blocks, and return logits [R,
        vocab_size] for its `draw_indices`, valid until the next call.

        A token attends to the cached tokens before it in its own sequence, and to itself, never to
        other sequences of the batch. A row's logits do not depend on the rest of the batch, beyond
        rounding.
        """
        ...

    def hidden(self) -> torch.Tensor:
        """Return the hidden states [R, hidden] that the last `forward` computed its logits from,
        the final norm included. Only after a batch that `wants_hidden`, and if
        `info.gives_embeddings`."""
        ...

    def every_hidden(self) -> torch.Tensor | None:
        """Return the hidden states [T, hidden] of all tokens of the last batch, in their order.
        Only after a batch that `wants_every_hidden`; None if the model keeps those of
        `draw_indices` only."""
        ...

    def layer_inputs(self) -> Mapping[int, torch.Tensor]:
        """Return, for each of the last batch's `wants_layers`, the layer's input for each token
        before any norm, [T, hidden]. Layer i's is the output of the first i layers."""
        ...

    @property
    def ends(self) -> Ends | None:
        """The embedding and the LM head; None if they cannot be called by themselves."""
        ...

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile and capture what plain steps need, without writing KV. At most once, after
        `attach`; not if `ahead` is warmed up, which includes it."""
        ...

    def check_alive(self) -> None:
        """Check that all processes of the model are alive. Raises: RankFailed if one has ended; the
        model cannot be used again. Cheap; for idle times."""
        ...

    def watch(self, tell: Callable[[], None]) -> None:
        """Register a callback for the moment from which `check_alive` raises. It is called once,
        from another thread, and must not block."""
        ...

    def check_integrity(self) -> None:
        """Check the model's own state between two steps. Raises: IntegrityError where it is
        inconsistent."""
        ...

    def close(self) -> None:
        """End the model's other processes. No call follows. Idempotent."""
        ...
