"""FakeModel: a LoadedModel whose next token is a function of the token history as it reads it from
the KV blocks.

It keeps, as the "KV" of a token, its id and its position, and draws from a digest of what it finds
in the blocks: a block that is missing, stale, swapped or someone else's changes every token after
it. So an engine with a FakeModel shows a mistake of block handling as wrong tokens, in
microseconds.

Not a language model: no weights, no parity. Engine thread only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from baton_kernels.gumbel_noise import uniform, words

from engine.batch import Batch, TokenSpan
from engine.kv.layout import KvLayout
from engine.kv.memory import KvMemory
from engine.lora.manager import LoraManager
from engine.models.interface import DecodesAhead, Guesses, InOneProcess
from engine.request import ModelInfo

HIDDEN_SIZE = 8
"""Size of a hidden state: it contains the first logits; an input of layer i contains 1 + i more
than these."""


class FakeModel(InOneProcess):
    """A model of one layer without weights: its logits are a digest of the ids and positions that
    its KV blocks contain.

    Args:
        poison: tokens after which the logits are NaN.
        hidden_size: size of a hidden state, which contains the first logits.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 97,
        context_window: int = 256,
        block_size: int = 4,
        eos_token_ids: tuple[int, ...] = (0,),
        poison: frozenset[int] = frozenset(),
        hidden_size: int = HIDDEN_SIZE,
    ) -> None:
        self.layout = KvLayout.plain(
            num_layers=1, num_kv_heads=1, head_dim=1, block_size=block_size, dtype="float32"
        )
        self.adapters = LoraManager.refused("the fake model has no linear layers")
        self.poison = poison
        self.hidden_size = hidden_size
        self.ahead: DecodesAhead | None = None
        self.guesses = Guesses.TREES
        self.num_forwards = 0
        identity = f"fake {vocab_size} {context_window} {self.layout.fingerprint_part}"
        self.info = ModelInfo(
            model="fake",
            model_type="fake",
            fingerprint=hashlib.blake2b(identity.encode(), digest_size=32).hexdigest(),
            tokenizer_digest="",
            dtype="float32",
            context_window=context_window,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            block_size=block_size,
            num_blocks=0,
            device="cpu",
            linear="none",
            fused=(),
            num_parameters=0,
            weight_bytes=0,
            gives_embeddings=True,
        )
        self._memory: KvMemory | None = None

    def attach(self, memory: KvMemory) -> None:
        self._memory = memory

    def forward(self, batch: Batch) -> torch.Tensor:
        """Write ids and positions of the new tokens, and return logits computed from the contents
        of each sequence's blocks."""
        self.num_forwards += 1
        self.kept_hidden = self.kept_every_hidden = None
        self.kept_layer_inputs = {}
        rows: dict[int, torch.Tensor] = {}
        wanted = batch.draw_indices
        if batch.wants_every_hidden:
            wanted = tuple(range(len(batch.token_ids)))
        first = 0
        for span in batch.spans:
            token_ids = batch.token_ids[first : first + span.num_tokens]
            if span.block_ids:
                self._write(span, token_ids)
            for index in range(first, first + span.num_tokens):
                if index in wanted:
                    history = (
                        self._read(span, span.slots_seen(index - first)) if span.block_ids else b""
                    )
                    rows[index] = self._logits(history, batch.token_ids[index])
            first += span.num_tokens
        drawn = [rows[index] for index in batch.draw_indices]
        logits = torch.stack(drawn) if drawn else torch.empty(0, self.info.vocab_size)
        if batch.wants_hidden:
            self.kept_hidden = logits[:, : self.hidden_size].clone()
        if batch.wants_every_hidden:
            every = torch.stack([rows[i] for i in wanted])
            self.kept_every_hidden = every[:, : self.hidden_size].clone()
            self.kept_layer_inputs = {
                layer: self.kept_every_hidden + 1 + layer for layer in batch.wants_layers
            }
        return logits

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return the logits [V] float32 after `token_ids`, from which a correct engine samples."""
        positions = range(len(token_ids))
        history = np.array([list(token_ids), list(positions)], dtype=np.float32).tobytes()
        return self._logits(history, token_ids[-1])

    def next_token(self, token_ids: Sequence[int]) -> int:
        """Return the greedy token after `token_ids`."""
        return int(self.logits(token_ids).argmax())

    def generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Return `num_tokens` greedy tokens, ignoring EOS."""
        token_ids = list(prompt)
        for _ in range(num_tokens):
            token_ids.append(self.next_token(token_ids))
        return token_ids[len(prompt) :]

    def _cells(self) -> torch.Tensor:
        if self._memory is None:
            raise RuntimeError("FakeModel.forward before attach")
        return self._memory.cache[:, 0, 0, :, :, 0]  # [N, 2, P]: ids, positions

    def _write(self, span: TokenSpan, token_ids: Sequence[int]) -> None:
        cells, size = self._cells(), self.layout.block_size
        places = range(span.start, span.end)
        for place, position, token_id in zip(places, span.positions, token_ids, strict=True):
            block_id, slot = span.block_ids[place // size], place % size
            cells[block_id, 0, slot] = float(token_id)
            cells[block_id, 1, slot] = float(position)

    def _read(self, span: TokenSpan, slots: list[int]) -> bytes:
        cells = self._cells()[list(span.block_ids)]  # [n, 2, P]
        history: bytes = cells.transpose(0, 1).reshape(2, -1)[:, slots].numpy().tobytes()
        return history

    def _logits(self, history: bytes, last_token_id: int) -> torch.Tensor:
        if last_token_id in self.poison:
            return torch.full((self.info.vocab_size,), float("nan"))
        digest = hashlib.blake2b(history, digest_size=8).digest()
        key = torch.tensor([int.from_bytes(digest, "little", signed=True)])
        return uniform(words(key, torch.arange(self.info.vocab_size))) * 4.0
