"""HashDecoder: logits that are a hash of every token before them, found through the block tables as
a real decoder finds its KV, and of what its adapter's slot holds. One wrong table entry, token,
position or slot, or one token of another sequence, and the logits have nothing in common with the
right ones; and they are the same bits on every device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from baton_kernels import gumbel_noise

from engine.decoder.inputs import DecodeInputs

SPOILED = 3
"""A sequence that ends in this token has NaN for logits."""

_LONGEST = 1 << 14

NUM_SLOTS = 3


class HashDecoder:
    """`cache` [num_blocks + 1, block_size] int64 holds tokens; the last block is a waste heap for
    rows that must not write. It begins full of noise. `adapters` [NUM_SLOTS + 1] int64 is what
    slots hold; slot 0 holds 0."""

    def __init__(
        self, *, num_blocks: int, block_size: int, vocab_size: int, device: torch.device, seed: int
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.vocab_size, self.block_size, self.device = vocab_size, block_size, device
        shape = (num_blocks + 1, block_size)
        self.cache = torch.randint(vocab_size, shape, generator=generator).to(device)
        weights = torch.randint(-(1 << 62), 1 << 62, (_LONGEST,), generator=generator)
        self._weights = weights.to(device)
        self._token_ids = torch.arange(vocab_size, device=device)
        self._waste = num_blocks
        self.adapters = torch.zeros(NUM_SLOTS + 1, dtype=torch.int64, device=device)

    def decode(self, inputs: DecodeInputs) -> torch.Tensor:
        """[B, V] float32, and the tokens into `cache`. No data-dependent shape, no wait."""
        tokens = self._token_ids.index_select(0, inputs.token_ids)  # every row, as embeddings do
        positions = inputs.positions.long()
        is_row = positions >= 0
        at = (positions // self.block_size).clamp(min=0)
        tables = inputs.block_tables.long()
        own = torch.where(is_row, tables.gather(1, at[:, None])[:, 0], self._waste)
        self.cache[own, positions % self.block_size] = tokens
        num_positions = tables.shape[1] * self.block_size
        steps = torch.arange(num_positions, device=self.device)
        is_seen = steps <= positions[:, None]
        each = tables[:, :, None].expand(-1, -1, self.block_size).reshape(len(tables), -1)
        blocks = torch.where(is_seen, each, self._waste)
        seen = self.cache[blocks, steps % self.block_size]
        weighted = torch.where(is_seen, (seen + 1) * self._weights[:num_positions], 0)
        hashes = weighted.sum(dim=1)
        if inputs.adapted is not None:
            rows, slots = inputs.adapted.row_ids.long(), inputs.adapted.slots.long()
            of_rows = torch.zeros(len(tokens) + 1, dtype=torch.int64, device=self.device)
            of_rows[torch.where(rows >= 0, rows, -1)] = slots[:, None].expand_as(rows) + 1
            hashes = hashes + self.adapters[of_rows[:-1]]
        return self._logits(hashes, tokens)

    def _logits(self, hashes: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        words = gumbel_noise.words(hashes[:, None], self._token_ids)
        logits = gumbel_noise.uniform(words) * 8.0 - 4.0
        return torch.where((last == SPOILED)[:, None], torch.nan, logits)

    def logits_of(self, token_ids: Sequence[int], adapter: int = 0) -> torch.Tensor:
        """[1, V] after these tokens, without tables."""
        tokens = torch.tensor(token_ids, device=self.device)
        hashes = ((tokens + 1) * self._weights[: len(tokens)]).sum(dim=0, keepdim=True)
        hashes = hashes + self.adapters[adapter]
        return self._logits(hashes, tokens[-1:])

    def write(self, token_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        """What a prefill does: these tokens from the first slot on."""
        size = self.block_size
        steps = torch.arange(len(token_ids))
        blocks = torch.tensor(block_ids)[steps // size]
        values = torch.tensor(token_ids, dtype=torch.int64, device=self.device)
        self.cache[blocks.to(self.device), (steps % size).to(self.device)] = values
