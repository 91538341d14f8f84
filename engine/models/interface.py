"""LoadedModel: what the engine needs of a model; and DecodesAhead: what it needs of one whose
decode steps may be launched before the tokens of the last one were read. One seam; the Hugging Face
backend, engine/models/llama.py and engine/testing/fake_model.py stand behind it.

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
"""Stands for a token that is not read yet."""

Progress = Callable[[str, int, int], None]
"""(what, done, total): bytes read for "weights" and "digest", steps for "warm-up"."""


class DecodeRow(NamedTuple):
    """One row of a launch: one token of one sample, whose KV is written and from whose logits the
    next one is drawn."""

    key: Key
    """(request id, sample index). In a launch at most once; used again by others later."""

    token_id: int
    """The token to compute; DRAWN_BEFORE: what the row of this key drew in the launch just before
    this one. If that was an error, this row's draw is never looked at, but must not disturb others,
    and its KV is written where it belongs."""

    position: int
    """Of the token computed; 0 is the prompt's first. Those before it are in the cache, or written
    by the launch just before."""

    block_ids: tuple[int, ...]
    """Blocks of tokens [0, position + 1), and maybe further ones of the same sample. The same
    object as in the launch before if they are the same: `is` tells what must be sent."""

    draw: SamplingRequest
    """`draw.position` is position + 1. With DRAWN_BEFORE, `draw.history` is None."""

    adapter: int = 0
    """As Span.adapter: of one that launches take (LoraManager.is_launched)."""

    @property
    def num_tokens(self) -> int:
        """That it computes."""
        return 1


class MixedRow(NamedTuple):
    """One row of a mixed launch: some tokens of one sample, one after the other, whose KV is
    written: a chunk of a prompt, or what a DecodeRow is."""

    key: Key
    """As DecodeRow's."""

    token_ids: tuple[int, ...]
    """At least one. (DRAWN_BEFORE,): as DecodeRow's."""

    position: int
    """Of the first of them. Those before it are as DecodeRow's."""

    block_ids: tuple[int, ...]
    """Blocks of tokens [0, position + num_tokens), and no further ones: they go to the device with
    the step."""

    draw: SamplingRequest | None
    """From the last one's logits; None: nothing is drawn, the prompt goes on. Its position is
    `position` + `num_tokens`."""

    @property
    def num_tokens(self) -> int:
        """That it computes."""
        return len(self.token_ids)


LaunchRow = DecodeRow | MixedRow


class Launch(Protocol):
    """What `launch` gives and `read` takes; whoever made it knows what is in it."""


class DecodesAhead(Protocol):
    """Steps with the draws in them, begun by one call and read by another: decode steps, and where
    it `takes_prompts` mixed ones, too.

    Order on the device: what the engine queued before `launch` (forward passes, `KvMemory.clear`
    and `copy`) is done before it, what it queues after, after it. Launches run in their order.
    """

    @property
    def max_rows(self) -> int:
        """Most rows of one launch."""
        ...

    @property
    def takes_prompts(self) -> bool:
        """Whether there is `launch_mixed`."""
        ...

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile and capture whatever `launch` needs; writes no KV. Once, after `attach`."""
        ...

    def takes(self, draw: SamplingRequest) -> bool:
        """Whether a launch can make this draw: exactly as engine/sampling/sampler.py would. Asked
        for each row before each launch: quick. Draws that depend on tokens drawn before (`history`)
        or on a grammar are never asked for."""
        ...

    def launch(self, rows: Sequence[DecodeRow]) -> Launch:
        """Begin a step of 1 to `max_rows` rows. Does not wait for the device. At most two launches
        are unread at any time, those of `launch_mixed` counted. May raise: then nothing of it was
        begun, or `drain` ends it."""
        ...

    def launch_mixed(self, rows: Sequence[MixedRow]) -> Launch:
        """`launch` for rows of several tokens, or without a draw, among others. What a row of the
        launch just before drew is known to either; their order is that of the calls."""
        ...

    def read(self, launch: Launch) -> list[SamplerOutput]:
        """Wait for a launch: its draws, in the order of its rows, those without one left out; its
        KV is in the cache. In the order in which they were launched, each once."""
        ...

    def drain(self) -> None:
        """After an exception: wait until nothing that was launched touches the cache any more, and
        forget it. Nothing of it will be read, and no row says DRAWN_BEFORE in the next launch."""
        ...


class Guesses(enum.Enum):
    """What of tokens that were guessed a model can compute in one pass."""

    CHAINS = "chains"
    """One continuation: tokens of a span like any others."""
    TREES = "trees"
    """Span.branches."""


class Ends(NamedTuple):
    """What a model begins and ends with, for draft heads that share it."""

    hidden_size: int

    embed: Callable[[torch.Tensor], torch.Tensor]
    """Token ids [T] -> [T, hidden]."""

    head: Callable[[torch.Tensor], torch.Tensor]
    """[R, hidden], after the last norm -> logits [R, vocab_size]; without adapters."""

    num_layers: int = 0
    """Layers whose input can be kept (Batch.wants_layers): all of them, or 0."""


class InOneProcess:
    """What a LoadedModel does that is computed by this process alone."""

    info: ModelInfo
    layout: KvLayout
    kept_hidden: torch.Tensor | None = None
    """Of the last `forward`, if its batch wanted it."""
    kept_every_hidden: torch.Tensor | None = None
    """The same of all its tokens, if its batch wanted that and the model can."""
    kept_layer_inputs: Mapping[int, torch.Tensor] = MappingProxyType({})
    """Of its layers, those that its batch wanted."""
    reads_unwritten: bool = True
    """See LoadedModel."""
    guesses: Guesses = Guesses.CHAINS
    """See LoadedModel."""

    @property
    def kv_record(self) -> KvLayout:
        """See LoadedModel."""
        return self.layout

    def device_memory(self) -> DeviceMemory | None:
        """See LoadedModel."""
        info = self.info
        return device_memory(
            info.device, weight_bytes=info.weight_bytes, step_bytes=info.step_bytes
        )

    def make_memory(self, num_blocks: int) -> KvMemory:
        """See LoadedModel."""
        return KvMemory(self.layout, num_blocks, self.info.device)

    def hidden(self) -> torch.Tensor:
        """See LoadedModel."""
        if self.kept_hidden is None:
            raise ValueError("the last batch did not want hidden states")
        return self.kept_hidden

    def every_hidden(self) -> torch.Tensor | None:
        """See LoadedModel."""
        return self.kept_every_hidden

    def layer_inputs(self) -> Mapping[int, torch.Tensor]:
        """See LoadedModel."""
        return self.kept_layer_inputs

    @property
    def ends(self) -> Ends | None:
        """See LoadedModel."""
        return None

    def queues_step(self, batch: Batch) -> bool:
        """See LoadedModel."""
        return False

    def warm_up(self, progress: Progress | None = None) -> None:
        """See LoadedModel."""

    def check_alive(self) -> None:
        """See LoadedModel."""

    def watch(self, tell: Callable[[], None]) -> None:
        """See LoadedModel."""

    def check_integrity(self) -> None:
        """See LoadedModel."""

    def close(self) -> None:
        """See LoadedModel."""


class LoadedModel(Protocol):
    """A model with its weights in place."""

    @property
    def info(self) -> ModelInfo:
        """What it is; `num_blocks` is 0, the engine knows it."""
        ...

    @property
    def layout(self) -> KvLayout:
        """What it caches per block."""
        ...

    @property
    def kv_record(self) -> KvLayout:
        """What of a block lies on one device: `layout`, unless several processes share the
        blocks."""
        ...

    @property
    def adapters(self) -> LoraManager:
        """Its LoRA adapters; one that refuses every load where the model takes none."""
        ...

    @property
    def reads_unwritten(self) -> bool:
        """Whether a pass reads the slots of a block that nothing was written to yet, with weight 0:
        they must hold numbers then. Asked for after `attach`."""
        ...

    def queues_step(self, batch: Batch) -> bool:
        """Whether `forward` of this batch has given a device its work at once, long before that is
        done: then it pays to begin such a step before the events of the last one are told. False
        where the caller waits for the numbers, or launches kernel by kernel. Quick."""
        ...

    @property
    def guesses(self) -> Guesses:
        """What it takes of what was guessed. Asked for after `attach`."""
        ...

    @property
    def ahead(self) -> DecodesAhead | None:
        """Its decode steps that may be launched ahead; None where it has none. Asked for after
        `attach`."""
        ...

    def device_memory(self) -> DeviceMemory | None:
        """Of the device with the least room, where that is known; None where it is not."""
        ...

    def make_memory(self, num_blocks: int) -> KvMemory:
        """A cache for `attach`."""
        ...

    def attach(self, memory: KvMemory) -> None:
        """Use this cache, which `make_memory` made, from now on; once for measuring and once for
        good, before `forward`."""
        ...

    def forward(self, batch: Batch) -> torch.Tensor:
        """Compute the batch's tokens, write their KV into their blocks, and give logits [R,
        vocab_size] for its draws, which hold until the next call.

        A token sees the cached tokens before it in its own request, and itself. The KV of
        batch-mates is never seen. A row's logits do not depend on what else is in the batch, beyond
        rounding.
        """
        ...

    def hidden(self) -> torch.Tensor:
        """[R, hidden]: what the head made the last `forward`'s logits of, the model's last norm
        included. Only after a batch that `wants_hidden`, and where `info.gives_embeddings`."""
        ...

    def every_hidden(self) -> torch.Tensor | None:
        """[T, hidden]: `hidden` of all tokens of the last batch, in their order. Only after a batch
        that `wants_every_hidden`; None: this model has it for the draws alone."""
        ...

    def layer_inputs(self) -> Mapping[int, torch.Tensor]:
        """[T, hidden] by layer, for the last batch's `wants_layers`: what went into that layer for
        each token, before any norm. Layer i's is what the first i layers made of the embedding."""
        ...

    @property
    def ends(self) -> Ends | None:
        """Its embedding and its head; None where they cannot be called by themselves."""
        ...

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile and capture what plain steps need beyond having been run once; writes no KV. At
        most once, after `attach`, and where `ahead` is not warmed up, which does it, too."""
        ...

    def check_alive(self) -> None:
        """Raises: RankFailed when a process that computes a part of it has ended; it never computes
        again. Cheap; for when nothing is computed."""
        ...

    def watch(self, tell: Callable[[], None]) -> None:
        """Have `tell` called when `check_alive` would raise from now on. From another thread, once;
        it must not block."""
        ...

    def check_integrity(self) -> None:
        """Raises: IntegrityError where it keeps books of its own and they do not add up. Between
        two steps."""
        ...

    def close(self) -> None:
        """End the other processes. No call after it. Idempotent."""
        ...
