"""Network: what heads/eagle.py needs of a network that guesses token after token. Engine thread
only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from engine.kv.layout import KvLayout
from engine.layers.torch_attention import Attend
from engine.speculation.heads.hidden import Computed


class Network(Protocol):
    """Its features stand for what the target left of a token, where it did, and for what came out
    of a pass here, where it did not yet: [.., its own hidden size]."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Of the target, whose inputs `features` takes."""
        ...

    @property
    def token_ids(self) -> torch.Tensor | None:
        """[draft vocabulary] int64: the target's token of each logit; None: they are the same."""
        ...

    def layout(self, block_size: int, dtype: str) -> KvLayout:
        """Of its own cache."""
        ...

    def features(self, computed: Sequence[Computed]) -> Sequence[torch.Tensor]:
        """Of what the target left: [n, hidden] for each, views of one memory of that size at
        most."""
        ...

    def forward(
        self,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        step: Attend,
    ) -> torch.Tensor:
        """One pass.

        Args:
            token_ids: [T].
            features: [T, hidden]: of the token before each.
            positions: [T]: of the tokens before.
        Returns: features [T, hidden].
        """
        ...

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """Of what follows: features that came out, [R, hidden] -> [R, draft vocabulary]."""
        ...
