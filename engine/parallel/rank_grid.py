"""Grid and Place: the part of a model that each rank computes. Pure values, without torch or
processes. Any thread.

There are `num_stages` stages of consecutive layers, and `num_shares` shares of each layer's heads
and columns. Rank 0 is in the *last* stage, which computes the logits: it is the engine's process.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import LoadError
from engine.kv.layout import KvLayout, LayerKv


@dataclass(frozen=True)
class RankPlace:
    """The part of a model that one rank computes."""

    stage: int
    num_stages: int
    share: int
    num_shares: int

    @property
    def is_first(self) -> bool:
        """Whether the rank is in the first stage, which has the embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether the rank is in the last stage, which has the LM head."""
        return self.stage == self.num_stages - 1

    def layers(self, num_layers: int) -> range:
        """Return the indices of this stage's layers. If the number of layers is not divisible, the
        first stages have one more, since the last one also computes logits."""
        size, rest = divmod(num_layers, self.num_stages)
        first = self.stage * size + min(self.stage, rest)
        return range(first, first + size + (self.stage < rest))

    def part(self, count: int) -> range:
        """Return this share's part of `count` heads, columns or rows; `count` is divisible by the
        degree."""
        size = count // self.num_shares
        return range(self.share * size, (self.share + 1) * size)

    def layout(self, whole: KvLayout) -> KvLayout:
        """Return the layout of this rank's part of a block."""
        mine = (whole.layers[index] for index in self.layers(whole.num_layers))
        layers = tuple(
            LayerKv(
                layer.num_k_heads // self.num_shares,
                layer.k_head_dim,
                layer.num_v_heads // self.num_shares,
                layer.v_head_dim,
            )
            for layer in mine
        )
        return KvLayout(layers, whole.block_size, whole.dtype, whole.scale, whole.compute_dtype)


SINGLE = RankPlace(0, 1, 0, 1)
"""The place of the only rank of a model that is not split."""


@dataclass(frozen=True)
class Grid:
    """All ranks of an engine."""

    num_shares: int
    """Tensor-parallel degree: the number of ranks that split each layer's heads and columns."""

    num_stages: int
    """Pipeline-parallel degree: the number of stages that split the layers."""

    @property
    def num_ranks(self) -> int:
        return self.num_shares * self.num_stages

    def place(self, rank: int) -> RankPlace:
        """Return the place of a rank. Ranks count stages from the last to the first, and shares
        within a stage."""
        stage = self.num_stages - 1 - rank // self.num_shares
        return RankPlace(stage, self.num_stages, rank % self.num_shares, self.num_shares)

    def rank(self, stage: int, share: int) -> int:
        """Return the rank of a stage and share, the inverse of `place`."""
        return (self.num_stages - 1 - stage) * self.num_shares + share

    def name(self, rank: int) -> str:
        """Return the rank's name for messages, with its stage and share counted from 0."""
        place = self.place(rank)
        return f"rank {rank} (stage {place.stage}, share {place.share})"


def check_degrees(
    grid: Grid,
    *,
    name: str,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    intermediate_size: int,
    vocab_size: int,
) -> None:
    """Check that the degrees divide this model. Raises: LoadError naming the setting, the number
    that it does not divide, and the degrees that would."""
    if grid.num_stages > num_layers:
        raise LoadError(
            f"pipeline_parallel: {grid.num_stages} stages, but {name} has {num_layers} layers; "
            f"set it to at most {num_layers}"
        )
    counts = {
        "attention heads": num_heads,
        "key-value heads": num_kv_heads,
        "columns of the MLP": intermediate_size,
        "tokens in its vocabulary": vocab_size,
    }
    degree = grid.num_shares
    for what, count in counts.items():
        if count % degree:
            good = [str(n) for n in range(1, degree) if not any(c % n for c in counts.values())]
            raise LoadError(
                f"tensor_parallel: {degree} does not divide the {count} {what} of {name}; "
                f"set it to {' or '.join(good)}"
            )
