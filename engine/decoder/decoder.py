"""Decoder: the forward pass of a Llama-shaped decoder over the paged cache, five or six launches a
layer.

Two ways in: `decode` takes one token of each sequence, fixed shapes, nothing read back: it can be
captured in a CUDA graph. `forward` takes any step. Both are functional but for the KV that they
write. Knows no requests, no states and no sampling. Invariant: a row sees the cached tokens of its
own sequence and itself. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from baton_kernels.block_rows import BlockRows
from baton_kernels.dispatch import Backend
from baton_kernels.layer_ops import rms_norm
from baton_kernels.linear import HalfNorm
from torch.nn.functional import embedding

from engine.decoder.inputs import DecodeInputs, MixedInputs
from engine.decoder.keeping import Keeping
from engine.decoder.weights import DecoderWeights, LayerWeights
from engine.layers.attention import PagedAttention
from engine.layers.linear import FusedLinear
from engine.layers.torch_attention import Attend
from engine.lora.stacked_weights import StackedLora

_LEAST_SPARED_ROWS = 64
"""The last layer computes only rows that are drawn from, where that spares so many. A guess: what
two more small launches cost."""

_AttendLayer = Callable[[int, LayerWeights, torch.Tensor], torch.Tensor]
"""(index among this stage's layers, layer, qkv [T, (H + 2 K) D]) -> [T, H D]."""


class Collective(Protocol):
    """What ranks that share layers do together."""

    @property
    def rank(self) -> int: ...

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x; may be x, in place."""
        ...

    def join_columns(self, x: torch.Tensor) -> torch.Tensor:
        """[M, V / ranks] of each rank -> [M, V]."""
        ...


class Stream(NamedTuple):
    """The hidden rows between two layers."""

    x: torch.Tensor
    """[T, hidden]."""

    half_norm: HalfNorm | None = None
    """The norm before what comes next, where it is half done."""


class Decoder:
    """See the module.

    Args:
        weights: of this rank.
        rope: [positions, D] float32 (`shape.rope_table`): as many as the longest request has.
        is_exact: a row's bits do not depend on the rows around it, nor on its step; slower.
        backend: of every kernel.
        collective: where several ranks share the layers.
    """

    def __init__(
        self,
        weights: DecoderWeights,
        rope: torch.Tensor,
        *,
        is_exact: bool = False,
        backend: Backend = "auto",
        collective: Collective | None = None,
    ) -> None:
        self.weights = weights
        self.shape = weights.shape
        self.is_exact = is_exact
        self.keeping: Keeping | None = None
        """What `forward` and `forward_attending` leave beside logits. Not under a graph."""
        self.stacks: StackedLora | None = None
        self.backend: Backend
        self._collective = collective
        self._adds_residual = collective is None or collective.rank == 0
        first = weights.share.first_layer
        self._windows = weights.shape.windows[first : first + len(weights.layers)]
        self._attention = PagedAttention(
            num_heads=weights.shape.num_heads,
            scaling=weights.shape.scaling,
            norm_eps=weights.shape.norm_eps,
            rope=rope,
            windows=self._windows,
            is_exact=is_exact,
        )
        for projection in weights.projections:
            projection.is_exact = is_exact
        self.use_backend(backend)

    def use_backend(self, backend: Backend) -> None:
        """Of every kernel, from now on."""
        self.backend = self._attention.backend = backend
        for projection in self.weights.projections:
            projection.backend = backend

    def attach(self, rows: Sequence[BlockRows]) -> None:
        """Use this cache from now on.

        Args:
            rows: one for each of this stage's layers.
        """
        if len(rows) != len(self.weights.layers):
            raise ValueError(f"rows: {len(rows)} for {len(self.weights.layers)} layers")
        self._attention.rows = rows

    def stack(self, stacks: StackedLora) -> None:
        """Rows of `decode` may have adapters from now on, which lie there.

        Args:
            stacks: of this decoder's projections.
        """
        self.stacks = stacks
        for projection in self.weights.projections:
            projection.stack = stacks.by_linear.get(projection)

    def decode(self, inputs: DecodeInputs, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """One token of each sequence.

        Args:
            hidden: [B, hidden] of the stage before, spoiled; None: this is the first.
        Returns: logits [B, V]; of a stage that is not the last, hidden [B, hidden].
        """
        if inputs.adapted is None:
            return self._decode(inputs, hidden)
        if self.stacks is None:
            raise ValueError("inputs: rows with adapters, which lie nowhere")
        with self.stacks.of_step(inputs.adapted):
            return self._decode(inputs, hidden)

    def _decode(self, inputs: DecodeInputs, hidden: torch.Tensor | None) -> torch.Tensor:
        positions, block_tables = inputs.positions, inputs.block_tables

        def attend(index: int, layer: LayerWeights, qkv: torch.Tensor) -> torch.Tensor:
            return self._attention.decode(index, layer, qkv, positions, block_tables)

        stream = Stream(self._embed(inputs.token_ids, hidden))
        for index, layer in enumerate(self.weights.layers):
            stream = self._layer(index, layer, stream, attend)
        return self._logits(stream)

    def forward(self, inputs: MixedInputs, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Any step.

        Args:
            hidden: [T, hidden] of the stage before, spoiled; None: this is the first.
        Returns: logits [R, V] of the rows of `draw_indices`; of a stage that is not the last,
            hidden [T, hidden].
        """

        def attend(index: int, layer: LayerWeights, qkv: torch.Tensor) -> torch.Tensor:
            return self._attention.forward(index, layer, qkv, inputs)

        stream = Stream(self._embed(inputs.token_ids, hidden))
        last = len(self.weights.layers) - 1
        for index, layer in enumerate(self.weights.layers):
            if self.keeping is not None:
                self.keeping.enter(index, stream.x)
            if index == last and self._spares_rows(inputs):
                return self._logits(self._last_layer(index, layer, stream, inputs), inputs.logits)
            stream = self._layer(index, layer, stream, attend)
        if self.weights.head is None:
            return stream.x
        self._keep_every(stream)
        if inputs.draw_indices is None:
            return self._logits(stream, inputs.logits)
        return self._logits(Stream(stream.x.index_select(0, inputs.draw_indices)), inputs.logits)

    def forward_attending(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        draw_indices: torch.Tensor,
        step: Attend,
    ) -> torch.Tensor:
        """Any step whose attention is not the kernels': on a CPU, and over a quantized cache.

        Args:
            token_ids, positions: [T] int32.
            draw_indices: [R] int32.
            step: writes and attends; whole models only, no stages.
        Returns: logits [R, V].
        """

        def attend(index: int, layer: LayerWeights, qkv: torch.Tensor) -> torch.Tensor:
            shape = self.shape
            key = qkv.new_empty(qkv.shape[0], shape.num_kv_heads, shape.head_dim)
            value = torch.empty_like(key)
            query = self._attention.rotate(index, layer, qkv, positions, key_value=(key, value))
            attended = step.attend(
                index,
                query.transpose(0, 1),
                key.transpose(0, 1),
                value.transpose(0, 1),
                shape.scaling,
                self._windows[index],
            )
            return attended.reshape(qkv.shape[0], -1)

        stream = Stream(self._embed(token_ids, None))
        for index, layer in enumerate(self.weights.layers):
            if self.keeping is not None:
                self.keeping.enter(index, stream.x)
            stream = self._layer(index, layer, stream, attend)
        self._keep_every(stream)
        return self._logits(Stream(stream.x.index_select(0, draw_indices)))

    # -- parts

    def _embed(self, token_ids: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
        if hidden is not None:
            return hidden
        if self.weights.embedding is None:
            raise ValueError("hidden: this stage has no embedding")
        return embedding(token_ids, self.weights.embedding)

    def _layer(
        self, index: int, layer: LayerWeights, stream: Stream, attend: _AttendLayer
    ) -> Stream:
        """One layer. Of what `stream` is left only the result is of use."""
        attended = attend(index, layer, self._qkv(layer, stream))
        return self._finish_layer(index, layer, stream.x, attended)

    def _qkv(self, layer: LayerWeights, stream: Stream) -> torch.Tensor:
        return layer.qkv.forward(
            stream.x,
            norm_weight=layer.norm,
            norm_eps=self.shape.norm_eps,
            half_norm=stream.half_norm,
        )

    def _finish_layer(
        self, index: int, layer: LayerWeights, x: torch.Tensor, attended: torch.Tensor
    ) -> Stream:
        """What follows the attention: x [M, hidden], attended [M, H D]."""
        eps = self.shape.norm_eps
        within = self._room(layer.o, attended, layer.gate_up, layer.mlp_norm)
        x = self._added(layer.o.forward(attended, residual=self._residual(x), leaves=within))
        inner = layer.gate_up.forward(x, norm_weight=layer.mlp_norm, norm_eps=eps, half_norm=within)
        behind = None
        taker, norm = self._taker(index + 1)
        if taker is not None and norm is not None:
            behind = self._room(layer.down, inner, taker, norm)
        x = layer.down.forward(inner, residual=self._residual(x), leaves=behind)
        return Stream(self._added(x), behind)

    def _taker(self, index: int) -> tuple[FusedLinear | None, torch.Tensor | None]:
        """Who takes the hidden rows before this layer, or after the last: its norm, too."""
        layers = self.weights.layers
        if index < len(layers):
            return layers[index].qkv, layers[index].norm
        return self.weights.head, self.weights.norm

    def _room(
        self, maker: FusedLinear, x: torch.Tensor, taker: FusedLinear, norm: torch.Tensor
    ) -> HalfNorm | None:
        """See FusedLinear.room. Sums of ranks are no product's, and exact ones have one way."""
        if self._collective is not None or self.is_exact:
            return None
        return maker.room(x, taker, norm, self.shape.norm_eps)

    def _last_layer(
        self, index: int, layer: LayerWeights, stream: Stream, inputs: MixedInputs
    ) -> Stream:
        """Rows that nothing is drawn from only leave their KV: [T, hidden] -> [R, hidden]."""
        drawn = inputs.draw_indices
        if drawn is None:
            raise ValueError("inputs: all rows are drawn from")
        qkv = self._qkv(layer, stream)
        attended = self._attention.forward_drawn(index, layer, qkv, inputs, drawn)
        return self._finish_layer(index, layer, stream.x.index_select(0, drawn), attended)

    def _spares_rows(self, inputs: MixedInputs) -> bool:
        is_head = self.weights.head is not None
        has_adapters = any(one.deltas is not None for one in self.weights.layers[-1].projections)
        spared = inputs.num_rows - inputs.num_draws
        return (
            is_head
            and inputs.num_draws > 0
            and inputs.trees is None  # whose rows are attended by their nodes
            and not has_adapters  # whose rows are those of the whole step
            and not (self.keeping is not None and self.keeping.wants_every)
            and spared >= _LEAST_SPARED_ROWS
        )

    def _residual(self, x: torch.Tensor) -> torch.Tensor | None:
        return x if self._adds_residual else None

    def _added(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._collective is None else self._collective.add_up(x)

    def _keep_every(self, stream: Stream) -> None:
        if self.keeping is not None and self.keeping.wants_every:
            self.keeping.every = self._normed(stream)

    def _normed(self, stream: Stream) -> torch.Tensor:
        """What the head takes; of the last stage."""
        if self.weights.norm is None:
            raise ValueError("keeping: this stage has no norm")
        normed: torch.Tensor = rms_norm(
            stream.x, self.weights.norm, self.shape.norm_eps, backend=self.backend
        )
        return normed

    def _logits(self, stream: Stream, out: torch.Tensor | None = None) -> torch.Tensor:
        """[R, hidden] -> [R, V], or x where the head is another stage's.

        Args:
            out: see MixedInputs.logits.
        """
        head, norm = self.weights.head, self.weights.norm
        if head is None or norm is None:
            return stream.x
        if self.keeping is not None:
            self.keeping.hidden = self._normed(stream)
        logits: torch.Tensor = head.forward(
            stream.x,
            norm_weight=norm,
            norm_eps=self.shape.norm_eps,
            half_norm=stream.half_norm,
            out=out if self._collective is None else None,  # whose columns are some of them
        )
        return logits if self._collective is None else self._collective.join_columns(logits)
