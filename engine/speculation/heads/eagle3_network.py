"""Eagle3Network: EAGLE-3's head (arXiv 2503.01840). `fc` makes one feature of what goes into three
of the target's layers: a low, a middle and a high one. One decoder layer attends over a token's
embedding beside the feature of the token before it, each with a norm of its own; the feature is
what it adds to. What comes out stands for the feature where the target left none yet. A last norm
and a head of its own make logits of it, of a vocabulary that may be a part of the target's: `d2t`
says how far each of its tokens is from the target's number, `t2d` which of the target's it has.

Layers are counted as the published code counts them: 2, n // 2 and n - 3 of n, each by the layers
before it. config.json may name others: `eagle_config`'s list counts those whose output is meant
(one less), a list beside it counts as here.

Read are the published layout (`midlayer`) and that of vLLM's speculators library (`layers.0`, and
its fields in `transformer_layer_config`). Embedding and head are the target's where there are none;
d2t and t2d may be left out where the vocabulary is the target's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import embedding, linear

from engine.errors import LoadError
from engine.kv.layout import KvLayout
from engine.layers.torch_attention import Attend
from engine.models.interface import Ends
from engine.speculation.heads.checkpoint import HeadCheckpoint
from engine.speculation.heads.hidden import Computed
from engine.speculation.heads.layers import Layers, layer_names, read_layer, read_shape, says
from engine.speculation.heads.rope import read_rope
from engine.speculation.heads.vocabulary import read_vocabulary

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_ROWS_AT_ONCE = 4096
"""Of two embeddings that are compared: a guess; it bounds the copy."""


class Norms(NamedTuple):
    """[hidden] each."""

    embedded: torch.Tensor
    feature: torch.Tensor
    last: torch.Tensor


class Eagle3Network:
    """A Network (heads/network.py). See the module.

    Args:
        fc: [hidden, 3 * target's hidden], and its bias.
        adds_normed: the layer adds to the feature's norm, not to it (norm_before_residual).
        embed: token ids [T] -> [T, hidden].
        head: [R, hidden] -> [R, draft vocabulary].
    """

    def __init__(
        self,
        layers: tuple[int, ...],
        fc: tuple[torch.Tensor, torch.Tensor | None],
        own_layers: Layers,
        norms: Norms,
        *,
        adds_normed: bool,
        embed: Callable[[torch.Tensor], torch.Tensor],
        head: Callable[[torch.Tensor], torch.Tensor],
        token_ids: torch.Tensor | None,
    ) -> None:
        self.layers = layers
        self.token_ids = token_ids
        self.own_layers = own_layers
        self._fc = fc
        self._norms = norms
        self._adds_normed = adds_normed
        self._embed = embed
        self._head = head

    def layout(self, block_size: int, dtype: str) -> KvLayout:
        """See Network."""
        return self.own_layers.layout(block_size, dtype)

    @torch.inference_mode()
    def features(self, computed: Sequence[Computed]) -> Sequence[torch.Tensor]:
        """See Network: a third of what the target left, so it is made at once."""
        if not computed:
            return []
        inputs = [torch.cat([one.layers[layer] for one in computed]) for layer in self.layers]
        made = linear(torch.cat(inputs, dim=-1).to(self._fc[0].dtype), *self._fc)
        return torch.split(made, [len(one.hidden) for one in computed])

    def forward(
        self,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        step: Attend,
    ) -> torch.Tensor:
        """See Network."""
        own, norms = self.own_layers, self._norms
        embedded = own.normed(self._embed(token_ids).to(features.dtype), norms.embedded)
        normed = own.normed(features, norms.feature)
        seen = torch.cat((embedded, normed), dim=-1)
        x = normed if self._adds_normed else features
        return own.forward(0, x, seen, own.rope.turns(positions, x.dtype), step)

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """See Network."""
        return self._head(self.own_layers.normed(features, self._norms.last))


def is_eagle3(checkpoint: HeadCheckpoint) -> bool:
    """By its tensors: published ones call themselves many things."""
    return "fc.weight" in checkpoint.keys and not checkpoint.keys.isdisjoint(
        ("d2t", "midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight")
    )


def read_eagle3(checkpoint: HeadCheckpoint, ends: Ends, *, vocab_size: int) -> Eagle3Network:
    """The network of a checkpoint. Raises: LoadError."""
    nested = checkpoint.config.get("transformer_layer_config")
    if isinstance(nested, dict):
        checkpoint.config = nested | checkpoint.config
    config, where = checkpoint.config, says(checkpoint)
    hidden = checkpoint.number("hidden_size", ends.hidden_size)
    _check(checkpoint, ends, vocab_size)
    layers = chosen_layers(checkpoint, ends.num_layers)
    shape = read_shape(checkpoint, hidden)
    has_midlayer = any(key.startswith("midlayer.") for key in checkpoint.keys)
    prefix = "midlayer" if has_midlayer else "layers.0"
    fc_shape = (hidden, len(layers) * ends.hidden_size)
    fc = checkpoint.tensor("fc.weight", fc_shape), checkpoint.optional("fc.bias", (hidden,))
    layer = read_layer(checkpoint, shape, prefix, 2 * hidden)
    names = (f"{prefix}.input_layernorm.weight", f"{prefix}.hidden_norm.weight", "norm.weight")
    norms = Norms(*(checkpoint.tensor(name, (hidden,)) for name in names))
    known = {"fc.weight", "fc.bias", "d2t", "t2d", "embed_tokens.weight", "lm_head.weight", *names}
    known |= layer_names(prefix) | {f"{prefix}.self_attn.rotary_emb.inv_freq"}
    checkpoint.check_known(known)
    num_drafted = checkpoint.number("draft_vocab_size", vocab_size)
    return Eagle3Network(
        layers,
        fc,
        Layers(shape, read_rope(config, shape.head_dim, checkpoint.device, where), (layer,)),
        norms,
        adds_normed=bool(config.get("norm_before_residual", False)),
        embed=_embed(checkpoint, ends, hidden, vocab_size),
        head=_head(checkpoint, ends, hidden, num_drafted, vocab_size),
        token_ids=read_vocabulary(checkpoint, num_drafted, vocab_size),
    )


def _check(checkpoint: HeadCheckpoint, ends: Ends, vocab_size: int) -> None:
    """Raises: LoadError for a config.json that does not go with the target, or that asks for
    something else than is computed here."""
    config, where = checkpoint.config, says(checkpoint)
    for field, own in (("target_hidden_size", ends.hidden_size), ("vocab_size", vocab_size)):
        if config.get(field) not in (None, own):
            raise LoadError(
                f"{where} {field} {config[field]!r}, this model has {own}; name heads that were "
                "made for it"
            )
    eagle = config.get("eagle_config") or {}
    if eagle.get("use_aux_hidden_state") is False:
        raise LoadError(
            f"{where} use_aux_hidden_state false; EAGLE-3 heads are computed from the hidden "
            "states of three layers"
        )
    if config.get("num_hidden_layers", 1) != 1:
        raise LoadError(
            f"{where} num_hidden_layers {config['num_hidden_layers']!r}; EAGLE-3 heads are "
            "computed with one"
        )
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        raise LoadError(
            f"{where} sliding_window {config['sliding_window']!r}; heads see all of their window"
        )


def chosen_layers(checkpoint: HeadCheckpoint, num_layers: int) -> tuple[int, ...]:
    """Of the target, whose inputs the head goes by, low to high.

    Args:
        num_layers: the target's; 0: it keeps none of them.
    Raises: LoadError.
    """
    config, where = checkpoint.config, says(checkpoint)
    if num_layers == 0:
        raise LoadError(
            f"speculation.draft_heads: {checkpoint.name} is an EAGLE-3 head, which goes by hidden "
            "states between layers; this model's code keeps its layers where they cannot be had"
        )
    outputs = (config.get("eagle_config") or {}).get(_LAYER_IDS)
    inputs = config.get(_LAYER_IDS)
    if outputs is None and inputs is None:
        layers = (2, num_layers // 2, num_layers - 3)
        if not layers[0] < layers[1] < layers[2]:
            raise LoadError(
                f"speculation.draft_heads: {checkpoint.name} goes by layers 2, n / 2 and n - 3 of "
                f"a model, and this one has {num_layers}: at least 7 are needed, or {_LAYER_IDS} "
                "in its config.json"
            )
        return layers
    named = inputs if outputs is None else outputs
    if not isinstance(named, list) or not all(type(one) is int for one in named):
        raise LoadError(f"{where} {_LAYER_IDS} {named!r}, not a list of layers; fix it")
    layers = tuple(one + (outputs is not None) for one in named)
    is_rising = all(low < high for low, high in itertools.pairwise(layers))
    if len(layers) != 3 or not is_rising or layers[0] < 0 or layers[-1] >= num_layers:
        raise LoadError(
            f"{where} {_LAYER_IDS} {named!r}; three are needed, low to high, of this model's "
            f"{num_layers} layers"
        )
    return layers


def _embed(
    checkpoint: HeadCheckpoint, ends: Ends, hidden: int, vocab_size: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The target's, where that is no other one: it takes no second place then."""
    is_wide = hidden == ends.hidden_size
    if is_wide and "embed_tokens.weight" not in checkpoint.keys:
        return ends.embed
    own = checkpoint.tensor("embed_tokens.weight", (vocab_size, hidden))
    if is_wide and _is_same(own, ends):
        return ends.embed
    return lambda token_ids: embedding(token_ids, own)


@torch.inference_mode()
def _is_same(own: torch.Tensor, ends: Ends) -> bool:
    for first in range(0, len(own), _ROWS_AT_ONCE):
        part = own[first : first + _ROWS_AT_ONCE]
        token_ids = torch.arange(first, first + len(part), device=own.device)
        if not torch.equal(part, ends.embed(token_ids).to(own.dtype)):
            return False
    return True


def _head(
    checkpoint: HeadCheckpoint, ends: Ends, hidden: int, num_drafted: int, vocab_size: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    is_like_targets = hidden == ends.hidden_size and num_drafted == vocab_size
    if is_like_targets and "lm_head.weight" not in checkpoint.keys:
        return ends.head
    weight = checkpoint.tensor("lm_head.weight", (num_drafted, hidden))
    return lambda normed: linear(normed, weight)
