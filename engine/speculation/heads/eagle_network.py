"""EagleNetwork: EAGLE's autoregression head (arXiv 2401.15077; of EAGLE-2, 2406.16858, the same):
`fc` over a token's embedding beside the target's hidden state of the token before it, then decoder
layers of Llama's form, of which the first has no norm ahead of its attention. What comes out is a
guess of the target's hidden state of that token: the target's head makes logits of it, and it
stands for the hidden state where that is not known yet.

Embedding and head are the target's own. A checkpoint may carry copies, which training never
changes: they are not read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import linear

from engine.errors import LoadError
from engine.kv.layout import KvLayout
from engine.layers.torch_attention import Attend
from engine.models.interface import Ends
from engine.speculation.heads.checkpoint import HeadCheckpoint
from engine.speculation.heads.hidden import Computed
from engine.speculation.heads.layers import Layers, layer_names, read_layer, read_shape, says
from engine.speculation.heads.rope import read_rope

_NOT_READ = ("embed_tokens.weight", "lm_head.weight")


class EagleNetwork:
    """A Network (heads/network.py). See the module.

    Args:
        norms: ahead of each layer's attention; None: the first's.
    """

    layers: tuple[int, ...] = ()
    token_ids: torch.Tensor | None = None

    def __init__(
        self,
        fc: tuple[torch.Tensor, torch.Tensor | None],
        layers: Layers,
        norms: tuple[torch.Tensor | None, ...],
        ends: Ends,
    ) -> None:
        self.own_layers = layers
        self._fc = fc
        self._norms = norms
        self._ends = ends

    def layout(self, block_size: int, dtype: str) -> KvLayout:
        """See Network."""
        return self.own_layers.layout(block_size, dtype)

    def features(self, computed: Sequence[Computed]) -> Sequence[torch.Tensor]:
        """See Network: the target's hidden states."""
        return [one.hidden for one in computed]

    def forward(
        self,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        step: Attend,
    ) -> torch.Tensor:
        """See Network."""
        own = self.own_layers
        embedded = self._ends.embed(token_ids).to(features.dtype)
        x = linear(torch.cat((embedded, features), dim=-1), *self._fc)
        turns = own.rope.turns(positions, x.dtype)
        for index, norm in enumerate(self._norms):
            x = own.forward(index, x, x if norm is None else own.normed(x, norm), turns, step)
        return x

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """See Network."""
        return self._ends.head(features)


def is_eagle(checkpoint: HeadCheckpoint) -> bool:
    """By its tensors: its config.json is that of a small Llama."""
    return "fc.weight" in checkpoint.keys


def read_eagle(checkpoint: HeadCheckpoint, ends: Ends, *, vocab_size: int) -> EagleNetwork:
    """The network of a checkpoint. Raises: LoadError."""
    config, where, hidden = checkpoint.config, says(checkpoint), ends.hidden_size
    for field, own in (("hidden_size", hidden), ("vocab_size", vocab_size)):
        if config.get(field) != own:
            raise LoadError(
                f"{where} {field} {config.get(field)!r}, this model has {own}; name heads that "
                "were made for it"
            )
    shape, num_layers = read_shape(checkpoint, hidden), checkpoint.number("num_hidden_layers", 1)
    fc = (
        checkpoint.tensor("fc.weight", (hidden, 2 * hidden)),
        checkpoint.optional("fc.bias", (hidden,)),
    )
    prefixes = [f"layers.{index}" for index in range(num_layers)]
    layers = tuple(read_layer(checkpoint, shape, prefix, hidden) for prefix in prefixes)
    norms = [f"{prefix}.input_layernorm.weight" for prefix in prefixes[1:]]
    known = {"fc.weight", "fc.bias", *_NOT_READ, *norms}
    for prefix in prefixes:
        known |= layer_names(prefix) | {f"{prefix}.self_attn.rotary_emb.inv_freq"}
    checkpoint.check_known(known)
    rope = read_rope(config, shape.head_dim, checkpoint.device, where)
    read = tuple(checkpoint.tensor(name, (hidden,)) for name in norms)
    return EagleNetwork(fc, Layers(shape, rope, layers), (None, *read), ends)
