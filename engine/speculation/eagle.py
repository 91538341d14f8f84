"""EagleProposer: EAGLE's autoregression head (EagleNetwork) or EAGLE-3's (Eagle3Network) proposes
token after token, level by level of a tree with a configuration <k1, ..., km>, as a draft model
does, but from the target's hidden states.

A head's layers have a KV cache of their own. Its entries of a sequence are the sequence's window:
consecutive tokens whose hidden states the target computed here. Tokens that were computed
elsewhere, or found in the prefix cache, have no hidden states, so a new window begins after them.
Drafts are worse while a window is short; answers are the same, since the target verifies them.

Entry i of a sequence is made of token i + 1 and the hidden state of token i; the last entry
contains the newest token, which has no hidden state yet. A tree's nodes are computed again with
each of its levels, and none is kept. Engine thread only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn.functional import embedding, linear, rms_norm, silu

from engine.batch import Batch, TokenSpan
from engine.errors import IntegrityError, LoadError
from engine.kv.layout import KvLayout
from engine.kv.memory import KvMemory
from engine.layers.torch_attention import Attend, TorchPagedAttention
from engine.models.fusion import rotate
from engine.models.interface import Ends
from engine.sequence import Key
from engine.speculation.draft_model import DraftBlocks, DraftKVCache, best_children
from engine.speculation.head_checkpoint import HeadCheckpoint
from engine.speculation.proposer import Draft, DraftTask, HiddenStates, HiddenStateScope
from engine.speculation.token_tree import EMPTY, ROOT, ordered

ROPE_KINDS = ("default", "linear", "llama3", "yarn")
_NOT_READ = ("embed_tokens.weight", "lm_head.weight")
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_ROWS_AT_ONCE = 4096
"""Number of rows of two embeddings that are compared at once, which bounds the memory; guessed."""
_INTEGERS = (torch.int64, torch.int32)
_FLAGS = (torch.bool, torch.uint8)
_KINDS = ("weight", "bias")

_PendingEntries = list[tuple[tuple[int, ...], torch.Tensor]]
"""Entries that are not computed yet: (tokens [n], features [n, hidden]) each."""


@dataclass(slots=True)
class _Window:
    """The entries of one sequence in the head's KV cache."""

    first: int
    """Position of the first entry in the sequence."""
    num_computed: int = 0
    """Number of entries whose KV is in the cache."""
    newest: torch.Tensor | None = None
    """The head's output [hidden] at the last of them; None if there is none."""
    pending: _PendingEntries = field(default_factory=list)

    @property
    def num_pending(self) -> int:
        return sum(len(token_ids) for token_ids, _ in self.pending)

    @property
    def end(self) -> int:
        """The position of the next entry in the sequence."""
        return self.first + self.num_computed + self.num_pending


@dataclass(slots=True)
class _Growing:
    """The growing draft tree of one task; parents come before children."""

    task: DraftTask
    window: _Window
    blocks: DraftBlocks
    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    features: list[torch.Tensor] = field(default_factory=list)
    """The feature [hidden] of each node's entry: the output at its parent."""
    newest: list[int] = field(default_factory=lambda: [ROOT])
    """Nodes whose children are added next."""


class EagleProposer:
    """A HiddenStateProposer that runs an EAGLE or EAGLE-3 head.

    Args:
        memory: the head's KV cache.
        expansion: number of children of each node, level by level (k1, k2, ...).
        context_window: the target's context window, in tokens.
        max_num_tokens: largest number of entries of one forward pass, and of pending entries.
    """

    hidden_state_scope = HiddenStateScope.ALL

    def __init__(
        self,
        name: str,
        network: DraftNetwork,
        memory: KvMemory,
        expansion: Sequence[int],
        *,
        context_window: int,
        max_num_tokens: int,
    ) -> None:
        self.name = name
        self.aux_layers = network.aux_layers
        self._network = network
        self._memory = memory
        self._views = memory.layer_views()
        self._block_size = memory.layout.block_size
        self._cache = DraftKVCache(memory.num_blocks, self._block_size)
        self._expansion = tuple(expansion)
        self._context_window = context_window
        self._max_num_tokens = max_num_tokens
        self._windows: dict[Key, _Window] = {}

    def feed_hidden_states(self, computed: Sequence[HiddenStates]) -> None:
        """Add the hidden states to the windows of their sequences as pending entries; a gap starts
        a new window."""
        features = self._network.features(computed)
        for one, own in zip(computed, features, strict=True):
            window = self._windows.get(one.key)
            if window is None or window.end != one.start:
                self.forget(one.key)
                window = self._windows[one.key] = _Window(one.start)
            end = one.start + len(own)
            window.pending.append((tuple(one.token_ids[one.start + 1 : end + 1]), own))
        # Not for long: features of long prompts are large.
        if sum(window.num_pending for window in self._windows.values()) > self._max_num_tokens:
            self._compute_pending([one.key for one in computed])
        _compact(self._windows.values())

    @torch.inference_mode()
    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        """Compute pending entries and propose trees, level by level; an empty draft where the
        newest hidden state is missing or the KV cache has no room."""
        self._compute_pending([task.key for task in tasks])
        growing = [one for task in tasks if (one := self._begin(task, tasks)) is not None]
        trees = {one.task.key: one for one in growing}
        for depth, width in enumerate(self._expansion):
            growing = [one for one in growing if one.newest and _has_room(one)]
            if not growing:
                break
            if depth == 0:
                made = [one.window.newest for one in growing if one.window.newest is not None]
                features = torch.stack(made)
            else:
                features = self._forward(growing)
            self._expand(growing, features, depth, width)
        drafts: list[Draft] = []
        for task in tasks:
            one = trees.get(task.key)
            tree = EMPTY if one is None else ordered(one.token_ids, one.parents, one.chances)
            drafts.append(Draft(tree.best(task.num_nodes), {}))
        return drafts

    def forget(self, key: Key) -> None:
        """Drop the window and free the blocks of a sequence."""
        self._windows.pop(key, None)
        self._cache.forget(key)

    def check_integrity(self) -> None:
        """Check blocks and windows. Raises: IntegrityError where they are inconsistent."""
        self._cache.check_integrity()
        for key, window in self._windows.items():
            if (window.newest is None) != (window.num_computed == 0):
                raise IntegrityError(f"{key}: {window.num_computed} entries of an EAGLE window")

    # -- hidden states of the target

    def _compute_pending(self, keys: Collection[Key]) -> None:
        """Compute the pending entries of these sequences."""
        busy = set(keys)
        while True:
            left = self._max_num_tokens
            token_ids: list[int] = []
            features: list[torch.Tensor] = []
            positions: list[int] = []
            spans: list[TokenSpan] = []
            computed: list[tuple[_Window, DraftBlocks, _PendingEntries]] = []
            for key in keys:
                window = self._windows.get(key)
                if window is None or not window.pending or left == 0:
                    continue
                blocks = self._allocate(key, window, busy)
                if blocks is None:
                    continue
                own_tokens, own_features, rest = _split(window.pending, left)
                start, count = window.num_computed, len(own_tokens)
                left -= count
                token_ids += own_tokens
                features.append(own_features)
                positions += range(window.first + start, window.first + start + count)
                spans.append(self._span(blocks, start, count))
                computed.append((window, blocks, rest))
            if not spans:
                return
            out = self._pass(token_ids, torch.cat(features), positions, spans)
            ends = itertools.accumulate(span.num_tokens for span in spans)
            newest = [out[end - 1].clone() for end in ends]
            # Nothing can fail any more: noted before, it would say what was not computed.
            for (window, blocks, rest), span, last in zip(computed, spans, newest, strict=True):
                window.num_computed = blocks.num_tokens = span.end
                window.pending, window.newest = rest, last

    def _allocate(self, key: Key, window: _Window, busy: Collection[Key]) -> DraftBlocks | None:
        """Allocate blocks for all entries of a window and a tree. Returns: None if there is no
        room; the window is dropped, and a new one begins with the next hidden states."""
        num_entries = window.num_computed + window.num_pending
        blocks = self._cache.allocate(key, num_entries + self._num_nodes, busy)
        if blocks is None:
            self.forget(key)
            return None
        if blocks.num_tokens != window.num_computed:  # another sequence took its blocks meanwhile
            window.first += window.num_computed
            window.num_computed, window.newest = 0, None
        return blocks

    @property
    def _num_nodes(self) -> int:
        """Largest number of nodes of one tree that are computed."""
        total, level = 0, 1
        for width in self._expansion[:-1]:
            level *= width
            total += level
        return total

    # -- trees

    def _begin(self, task: DraftTask, tasks: Sequence[DraftTask]) -> _Growing | None:
        """Start the tree of a task. Returns: None if the newest hidden state is missing (after
        tokens that a grammar forced it comes with the next step), or there is no room."""
        window = self._windows.get(task.key)
        num_tokens = len(task.token_ids)
        if window is None or window.pending or window.end != num_tokens - 1:
            return None
        if num_tokens + self._num_nodes > self._context_window:
            return None
        blocks = self._allocate(task.key, window, {one.key for one in tasks})
        return None if blocks is None or window.newest is None else _Growing(task, window, blocks)

    def _forward(self, growing: Sequence[_Growing]) -> torch.Tensor:
        """Compute the output at each tree's newest nodes, tree after tree: [rows, hidden]."""
        token_ids: list[int] = []
        features: list[torch.Tensor] = []
        positions: list[int] = []
        spans: list[TokenSpan] = []
        wanted: list[int] = []
        for one in growing:
            nodes = _computed(one)
            places = {ROOT: ROOT, **{node: place for place, node in enumerate(nodes)}}
            branches = tuple(places[one.parents[node]] for node in nodes)
            wanted += [len(token_ids) + places[node] for node in one.newest]
            token_ids += [one.token_ids[node] for node in nodes]
            features += [one.features[node] for node in nodes]
            start = one.window.num_computed
            span = self._span(one.blocks, start, len(nodes))._replace(branches=branches)
            positions += [one.window.first + position for position in span.positions]
            spans.append(span if span.is_tree else span._replace(branches=()))
        return self._pass(token_ids, torch.stack(features), positions, spans)[wanted]

    def _expand(
        self, growing: Sequence[_Growing], features: torch.Tensor, depth: int, width: int
    ) -> None:
        """Add `width` children to each of the newest nodes. Args: features: [number of newest
        nodes, hidden]."""
        rows = [(one.task, depth) for one in growing for _ in one.newest]
        logits = self._network.logits(features)
        best = best_children(logits, rows, [width] * len(rows), self._network.token_ids)
        children = iter(zip(best, features, strict=True))
        for one in growing:
            added: list[int] = []
            for parent in one.newest:
                found, feature = next(children)
                above = 1.0 if parent == ROOT else one.chances[parent]
                for token_id, share in found:
                    added.append(len(one.token_ids))
                    one.token_ids.append(token_id)
                    one.parents.append(parent)
                    one.chances.append(above * share)
                    one.features.append(feature)
            one.newest = added

    # -- the network

    def _span(self, blocks: DraftBlocks, start: int, count: int) -> TokenSpan:
        """Return the span of `count` entries of a window. Blocks that begin in it are zeroed, since
        slots that were not written are read with weight 0."""
        size, end = self._block_size, start + count
        for index in range(-(-start // size), -(-end // size)):
            self._memory.clear(blocks.block_ids[index])
        return TokenSpan(start, count, tuple(blocks.block_ids[: -(-end // size)]))

    @torch.inference_mode()
    def _pass(
        self,
        token_ids: Sequence[int],
        features: torch.Tensor,
        positions: Sequence[int],
        spans: Sequence[TokenSpan],
    ) -> torch.Tensor:
        device = features.device
        batch = Batch(tuple(token_ids), tuple(spans), ())
        return self._network.forward(
            torch.tensor(token_ids, device=device),
            features,
            torch.tensor(positions, device=device),
            TorchPagedAttention(batch, self._views, self._block_size),
        )


def _split(
    pending: _PendingEntries, most: int
) -> tuple[tuple[int, ...], torch.Tensor, _PendingEntries]:
    """Split pending entries. Returns: tokens and features of the first `most` entries, and the
    rest."""
    token_ids = tuple(token_id for part, _ in pending for token_id in part)
    hidden = torch.cat([part for _, part in pending])
    # A copy: the rest may be pending for long, and must not keep the memory of the first ones.
    rest = [(token_ids[most:], hidden[most:].clone())] if len(token_ids) > most else []
    return token_ids[:most], hidden[:most], rest


def _compact(windows: Collection[_Window]) -> None:
    """Copy pending features to memory of their own if they occupy less than half of the tensors
    that they are views of."""
    parts = [hidden for window in windows for _, hidden in window.pending]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in parts}
    if sum(storages.values()) <= 2 * sum(part.nbytes for part in parts):
        return
    for window in windows:
        window.pending = [(token_ids, hidden.clone()) for token_ids, hidden in window.pending]


def _has_room(one: _Growing) -> bool:
    return len(one.token_ids) < one.task.num_nodes


def _computed(one: _Growing) -> list[int]:
    """Return the newest nodes and all nodes above them, in ascending order."""
    wanted: set[int] = set()
    for node in one.newest:
        while node != ROOT and node not in wanted:
            wanted.add(node)
            node = one.parents[node]
    return sorted(wanted)


class DraftNetwork(Protocol):
    """Protocol of a network that proposes token after token. A token's feature, [hidden] of the
    network, is computed from the target's hidden state, or, where that is not known yet, is the
    network's own output."""

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Indices of the target's layers whose inputs `features` needs."""
        ...

    @property
    def token_ids(self) -> torch.Tensor | None:
        """The target's token of each logit, [draft vocabulary] int64; None: the target's
        vocabulary."""
        ...

    def layout(self, block_size: int, dtype: str) -> KvLayout:
        """Return the layout of the network's own KV cache."""
        ...

    def features(self, computed: Sequence[HiddenStates]) -> Sequence[torch.Tensor]:
        """Compute features [n, hidden] from each of the target's hidden states. They are views of
        at most one tensor of that total size."""
        ...

    def forward(
        self,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        step: Attend,
    ) -> torch.Tensor:
        """Run one forward pass.

        Args:
            token_ids: [T].
            features: [T, hidden], the feature of the token before each one.
            positions: [T], the position of the token before each one.
            step: computes the attention.
        Returns: output features [T, hidden].
        """
        ...

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """Compute the logits of the next token: output features [R, hidden] -> [R, draft
        vocabulary]."""
        ...


class RotaryEmbedding(NamedTuple):
    """The rotary embedding that a head's config.json specifies. Scaled variants are computed by
    transformers."""

    frequencies: torch.Tensor
    """Inverse frequencies, [D / 2] float32."""

    scale: float
    """Factor of cosines and sines."""

    def cos_sin(
        self, positions: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cosines and sines of positions [T], [1, T, D] each."""
        angles = positions.float()[:, None] * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)[None]
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)


def read_rotary_embedding(
    config: Mapping[str, Any], head_dim: int, device: str, where: str
) -> RotaryEmbedding:
    """Create the rotary embedding of a config.json. Raises: LoadError, whose message begins with
    `where`."""
    scaling = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise LoadError(
            f"{where} rope_scaling {kind!r}; heads are computed with {', '.join(ROPE_KINDS)}"
        )
    theta = float(config.get("rope_theta") or scaling.get("rope_theta") or 10000.0)
    if kind in ("default", "linear"):
        steps = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        divisor = float(scaling.get("factor", 1.0)) if kind == "linear" else 1.0
        return RotaryEmbedding((theta**-steps / divisor).to(device), 1.0)
    # Imported here: a process without heads needs none of it.
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = scaling | {"rope_type": kind, "rope_theta": theta}
    parameters.pop("type", None)
    fields = {"max_position_embeddings": config.get("max_position_embeddings")}
    fields = {name: value for name, value in fields.items() if value is not None}
    try:
        whole = LlamaConfig(head_dim=head_dim, rope_parameters=parameters, **fields)
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](whole, torch.device("cpu"))
    except (KeyError, ValueError, TypeError, ZeroDivisionError) as error:
        line = str(error).partition("\n")[0]
        raise LoadError(f"{where} rope_scaling {scaling}, which cannot be ({line})") from error
    return RotaryEmbedding(frequencies.float().to(device), float(scale))


CosSin = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, as RotaryEmbedding.cos_sin returns them."""


class LayerShape(NamedTuple):
    """The sizes that all layers of a head share."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inner_size: int
    norm_eps: float


class DraftLayerWeights(NamedTuple):
    """The weights of one decoder layer."""

    qkv: torch.Tensor
    """The weights of query, key and value, [(H + 2 K) D, inputs of the attention]."""
    qkv_bias: torch.Tensor | None
    o: torch.Tensor
    o_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


class DraftLayers:
    """The decoder layers of a head, in Llama's form: attention, residual, norm, gated SiLU,
    residual. The input of the attention, its norm included, is computed by the network."""

    def __init__(
        self, shape: LayerShape, rope: RotaryEmbedding, layers: tuple[DraftLayerWeights, ...]
    ) -> None:
        self.shape = shape
        self.rope = rope
        self.all = layers

    def layout(self, block_size: int, dtype: str) -> KvLayout:
        """Return the layout of the layers' KV cache."""
        return KvLayout.plain(
            num_layers=len(self.all),
            num_kv_heads=self.shape.num_kv_heads,
            head_dim=self.shape.head_dim,
            block_size=block_size,
            dtype=dtype,
        )

    def forward(
        self, index: int, x: torch.Tensor, seen: torch.Tensor, cos_sin: CosSin, step: Attend
    ) -> torch.Tensor:
        """Compute one layer.

        Args:
            x: [T, hidden], the residual.
            seen: [T, inputs of its qkv], the input of its attention.
        Returns: [T, hidden].
        """
        layer, shape = self.all[index], self.shape
        num_rotated = shape.num_heads + shape.num_kv_heads
        heads = linear(seen, layer.qkv, layer.qkv_bias).view(len(x), -1, shape.head_dim)
        rotated = rotate(heads[:, :num_rotated], *cos_sin).transpose(0, 1)
        attended = step.attend(
            index,
            rotated[: shape.num_heads],
            rotated[shape.num_heads :],
            heads[:, num_rotated:].transpose(0, 1),
            shape.head_dim**-0.5,
            None,
        )
        x = x + linear(attended.reshape(len(x), -1), layer.o, layer.o_bias)
        normed = self.normed(x, layer.mlp_norm)
        return x + linear(silu(linear(normed, layer.gate)) * linear(normed, layer.up), layer.down)

    def normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Apply RMSNorm to each row of `x`."""
        return rms_norm(x, weight.shape, weight, self.shape.norm_eps)


def read_shape(checkpoint: HeadCheckpoint, hidden_size: int) -> LayerShape:
    """Read the sizes of the layers from config.json. Raises: LoadError for impossible numbers, or a
    network that is not implemented."""
    config, where = checkpoint.config, _config_says(checkpoint)
    if config.get("hidden_act", "silu") != "silu":
        raise LoadError(f"{where} hidden_act {config['hidden_act']!r}; only silu is computed")
    num_heads = checkpoint.number("num_attention_heads", 1)
    num_kv_heads = checkpoint.number("num_key_value_heads", num_heads)
    head_dim = checkpoint.number("head_dim", max(1, hidden_size // num_heads))
    is_cut = config.get("head_dim") is None and hidden_size % num_heads
    if is_cut or num_heads % num_kv_heads or head_dim % 2:
        raise LoadError(
            f"{where} {num_heads} heads and {num_kv_heads} of keys over hidden_size {hidden_size}, "
            "which cannot be; fix it, or fetch it again"
        )
    return LayerShape(
        hidden_size,
        num_heads,
        num_kv_heads,
        head_dim,
        checkpoint.number("intermediate_size", 4 * hidden_size),
        float(config.get("rms_norm_eps", 1e-6)),
    )


def _config_says(checkpoint: HeadCheckpoint) -> str:
    """Return the beginning of an error about the checkpoint's config.json."""
    return f"speculation.draft_heads: {checkpoint.name}: config.json says"


def layer_names(prefix: str) -> set[str]:
    """Return the names of the tensors of one layer that `read_layer` reads where they exist."""
    names = {f"{prefix}.self_attn.{name}_proj.{kind}" for name in "qkvo" for kind in _KINDS}
    names |= {f"{prefix}.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    return names | {f"{prefix}.post_attention_layernorm.weight"}


def read_layer(
    checkpoint: HeadCheckpoint, shape: LayerShape, prefix: str, seen_size: int
) -> DraftLayerWeights:
    """Read one layer of a checkpoint. Args: seen_size: number of inputs of its attention. Raises:
    LoadError."""
    hidden, inner = shape.hidden_size, shape.inner_size
    query_size, key_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    rows = {"q": query_size, "k": key_size, "v": key_size}
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    qkv = [checkpoint.tensor(f"{attention}.{n}_proj.weight", (rows[n], seen_size)) for n in rows]
    biases: list[torch.Tensor] = []
    if f"{attention}.q_proj.bias" in checkpoint.keys:
        biases = [checkpoint.tensor(f"{attention}.{n}_proj.bias", (rows[n],)) for n in rows]
    return DraftLayerWeights(
        torch.cat(qkv),
        torch.cat(biases) if biases else None,
        checkpoint.tensor(f"{attention}.o_proj.weight", (hidden, query_size)),
        checkpoint.optional(f"{attention}.o_proj.bias", (hidden,)),
        checkpoint.tensor(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
        checkpoint.tensor(f"{mlp}.gate_proj.weight", (inner, hidden)),
        checkpoint.tensor(f"{mlp}.up_proj.weight", (inner, hidden)),
        checkpoint.tensor(f"{mlp}.down_proj.weight", (hidden, inner)),
    )


def read_vocabulary(
    checkpoint: HeadCheckpoint, num_drafted: int, vocab_size: int
) -> torch.Tensor | None:
    """Read the part of the target's vocabulary that a head proposes: integers `d2t` [draft
    vocabulary], the offset from each of the head's token ids to the target's, and booleans `t2d`
    [vocabulary], whether the head has each of the target's tokens.

    Returns: [num_drafted] int64 on the checkpoint's device, the target's token of each logit; None:
        the target's vocabulary.
    Raises: LoadError if one map is missing, has another shape or type, leads out of the vocabulary
        or twice to one token, or contradicts the other.
    """
    if num_drafted > vocab_size:
        raise LoadError(
            f"{_has(checkpoint)} a draft vocabulary of {num_drafted}, this model's has "
            f"{vocab_size}; name heads that were made for it"
        )
    token_ids = torch.arange(num_drafted)
    if num_drafted < vocab_size or "d2t" in checkpoint.keys:
        token_ids = token_ids + checkpoint.exact("d2t", (num_drafted,), _INTEGERS).long()
    if int(token_ids.min()) < 0 or int(token_ids.max()) >= vocab_size:
        raise LoadError(f"{_has(checkpoint)} tokens in d2t that this model does not have")
    is_drafted = torch.zeros(vocab_size, dtype=torch.bool)
    is_drafted[token_ids] = True
    if int(is_drafted.sum()) < num_drafted:
        raise LoadError(f"{_has(checkpoint)} one token of this model twice in d2t")
    if "t2d" in checkpoint.keys:
        said = checkpoint.exact("t2d", (vocab_size,), _FLAGS).bool()
        if not torch.equal(said, is_drafted):
            num_other = int((said != is_drafted).sum())
            raise LoadError(
                f"{_has(checkpoint)} other tokens in t2d than in d2t: {num_other} differ"
            )
    if torch.equal(token_ids, torch.arange(vocab_size)):
        return None
    return token_ids.to(checkpoint.device)


def _has(checkpoint: HeadCheckpoint) -> str:
    return f"speculation.draft_heads: {checkpoint.name} has"


class EagleNetwork:
    """EAGLE's autoregression head (arXiv 2401.15077; EAGLE-2's, 2406.16858, is the same): `fc` over
    a token's embedding beside the target's hidden state of the token before it, then decoder layers
    of Llama's form, of which the first has no norm ahead of its attention. The output is a
    prediction of the target's hidden state of that token: the target's head makes logits of it, and
    it stands for the hidden state where that is not known yet.

    Embedding and head are the target's own. A checkpoint may carry copies, which training never
    changes: they are not read.

    Args:
        norms: those ahead of each layer's attention; None for the first.
    """

    aux_layers: tuple[int, ...] = ()
    token_ids: torch.Tensor | None = None

    def __init__(
        self,
        fc: tuple[torch.Tensor, torch.Tensor | None],
        layers: DraftLayers,
        norms: tuple[torch.Tensor | None, ...],
        ends: Ends,
    ) -> None:
        self.own_layers = layers
        self._fc = fc
        self._norms = norms
        self._ends = ends

    def layout(self, block_size: int, dtype: str) -> KvLayout:
        """Return the layout of the decoder layers' KV cache."""
        return self.own_layers.layout(block_size, dtype)

    def features(self, computed: Sequence[HiddenStates]) -> Sequence[torch.Tensor]:
        """Return the target's hidden states unchanged."""
        return [one.hidden for one in computed]

    def forward(
        self,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        step: Attend,
    ) -> torch.Tensor:
        """Apply `fc` to embedding and feature of each token, then the decoder layers."""
        own = self.own_layers
        embedded = self._ends.embed(token_ids).to(features.dtype)
        x = linear(torch.cat((embedded, features), dim=-1), *self._fc)
        cos_sin = own.rope.cos_sin(positions, x.dtype)
        for index, norm in enumerate(self._norms):
            x = own.forward(index, x, x if norm is None else own.normed(x, norm), cos_sin, step)
        return x

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """Compute logits with the target's LM head."""
        return self._ends.head(features)


def is_eagle(checkpoint: HeadCheckpoint) -> bool:
    """Whether the checkpoint is EAGLE's, judged by its tensors, since its config.json is that of a
    small Llama."""
    return "fc.weight" in checkpoint.keys


def read_eagle(checkpoint: HeadCheckpoint, ends: Ends, *, vocab_size: int) -> EagleNetwork:
    """Read an EAGLE network. Raises: LoadError."""
    config, where, hidden = checkpoint.config, _config_says(checkpoint), ends.hidden_size
    for name, own in (("hidden_size", hidden), ("vocab_size", vocab_size)):
        if config.get(name) != own:
            raise LoadError(
                f"{where} {name} {config.get(name)!r}, this model has {own}; name heads that "
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
    rope = read_rotary_embedding(config, shape.head_dim, checkpoint.device, where)
    read = tuple(checkpoint.tensor(name, (hidden,)) for name in norms)
    return EagleNetwork(fc, DraftLayers(shape, rope, layers), (None, *read), ends)


class Eagle3Norms(NamedTuple):
    """The weights of the norms, [hidden] each."""

    embedded: torch.Tensor
    feature: torch.Tensor
    last: torch.Tensor


class Eagle3Network:
    """EAGLE-3's head (arXiv 2503.01840). `fc` makes one feature of the inputs of three of the
    target's layers: a low, a middle and a high one. One decoder layer attends over a token's
    embedding beside the feature of the token before it, each with a norm of its own, and adds to
    the feature. The output stands for the feature where the target left none yet. A last norm and a
    head of its own make logits of it, of a vocabulary that may be a part of the target's
    (read_vocabulary).

    Args:
        fc: [hidden, 3 * target's hidden], and its bias.
        adds_normed: the layer adds to the normed feature (norm_before_residual).
        embed: token ids [T] -> [T, hidden].
        head: [R, hidden] -> [R, draft vocabulary].
    """

    def __init__(
        self,
        aux_layers: tuple[int, ...],
        fc: tuple[torch.Tensor, torch.Tensor | None],
        own_layers: DraftLayers,
        norms: Eagle3Norms,
        *,
        adds_normed: bool,
        embed: Callable[[torch.Tensor], torch.Tensor],
        head: Callable[[torch.Tensor], torch.Tensor],
        token_ids: torch.Tensor | None,
    ) -> None:
        self.aux_layers = aux_layers
        self.token_ids = token_ids
        self.own_layers = own_layers
        self._fc = fc
        self._norms = norms
        self._adds_normed = adds_normed
        self._embed = embed
        self._head = head

    def layout(self, block_size: int, dtype: str) -> KvLayout:
        """Return the layout of the decoder layer's KV cache."""
        return self.own_layers.layout(block_size, dtype)

    @torch.inference_mode()
    def features(self, computed: Sequence[HiddenStates]) -> Sequence[torch.Tensor]:
        """Apply `fc` to the inputs of the three layers, at once, since the result is a third of
        their size."""
        if not computed:
            return []
        inputs = [torch.cat([one.layers[layer] for one in computed]) for layer in self.aux_layers]
        made = linear(torch.cat(inputs, dim=-1).to(self._fc[0].dtype), *self._fc)
        return torch.split(made, [len(one.hidden) for one in computed])

    def forward(
        self,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        step: Attend,
    ) -> torch.Tensor:
        """Run the decoder layer over embedding and feature of each token."""
        own, norms = self.own_layers, self._norms
        embedded = own.normed(self._embed(token_ids).to(features.dtype), norms.embedded)
        normed = own.normed(features, norms.feature)
        seen = torch.cat((embedded, normed), dim=-1)
        x = normed if self._adds_normed else features
        return own.forward(0, x, seen, own.rope.cos_sin(positions, x.dtype), step)

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """Compute logits with the last norm and the head."""
        return self._head(self.own_layers.normed(features, self._norms.last))


def is_eagle3(checkpoint: HeadCheckpoint) -> bool:
    """Whether the checkpoint is EAGLE-3's, judged by its tensors, since names in config.json
    differ."""
    return "fc.weight" in checkpoint.keys and not checkpoint.keys.isdisjoint(
        ("d2t", "midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight")
    )


def read_eagle3(checkpoint: HeadCheckpoint, ends: Ends, *, vocab_size: int) -> Eagle3Network:
    """Read the network of a checkpoint: the published layout (`midlayer`), or that of vLLM's
    speculators library (`layers.0`, and its fields in `transformer_layer_config`). Embedding and
    head are the target's where there are none; d2t and t2d may be left out where the vocabulary is
    the target's. Raises: LoadError."""
    nested = checkpoint.config.get("transformer_layer_config")
    if isinstance(nested, dict):
        checkpoint.config = nested | checkpoint.config
    config, where = checkpoint.config, _config_says(checkpoint)
    hidden = checkpoint.number("hidden_size", ends.hidden_size)
    _check_eagle3(checkpoint, ends, vocab_size)
    layers = choose_aux_layers(checkpoint, ends.num_layers)
    shape = read_shape(checkpoint, hidden)
    has_midlayer = any(key.startswith("midlayer.") for key in checkpoint.keys)
    prefix = "midlayer" if has_midlayer else "layers.0"
    fc_shape = (hidden, len(layers) * ends.hidden_size)
    fc = checkpoint.tensor("fc.weight", fc_shape), checkpoint.optional("fc.bias", (hidden,))
    layer = read_layer(checkpoint, shape, prefix, 2 * hidden)
    names = (f"{prefix}.input_layernorm.weight", f"{prefix}.hidden_norm.weight", "norm.weight")
    norms = Eagle3Norms(*(checkpoint.tensor(name, (hidden,)) for name in names))
    known = {"fc.weight", "fc.bias", "d2t", "t2d", "embed_tokens.weight", "lm_head.weight", *names}
    known |= layer_names(prefix) | {f"{prefix}.self_attn.rotary_emb.inv_freq"}
    checkpoint.check_known(known)
    num_drafted = checkpoint.number("draft_vocab_size", vocab_size)
    return Eagle3Network(
        layers,
        fc,
        DraftLayers(
            shape, read_rotary_embedding(config, shape.head_dim, checkpoint.device, where), (layer,)
        ),
        norms,
        adds_normed=bool(config.get("norm_before_residual", False)),
        embed=_embed(checkpoint, ends, hidden, vocab_size),
        head=_head(checkpoint, ends, hidden, num_drafted, vocab_size),
        token_ids=read_vocabulary(checkpoint, num_drafted, vocab_size),
    )


def _check_eagle3(checkpoint: HeadCheckpoint, ends: Ends, vocab_size: int) -> None:
    """Check a head against the target. Raises: LoadError for a config.json that does not fit the
    target, or specifies a network that is not implemented."""
    config, where = checkpoint.config, _config_says(checkpoint)
    for name, own in (("target_hidden_size", ends.hidden_size), ("vocab_size", vocab_size)):
        if config.get(name) not in (None, own):
            raise LoadError(
                f"{where} {name} {config[name]!r}, this model has {own}; name heads that were "
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


def choose_aux_layers(checkpoint: HeadCheckpoint, num_layers: int) -> tuple[int, ...]:
    """Return the indices of the target's layers whose inputs the head needs, low to high: 2, n // 2
    and n - 3 of n layers by default, as in the published code. config.json may name others: a
    list in `eagle_config` names layers whose output is used, which is the input of the next
    layer; a list outside of it names layers whose input is used.

    Args: num_layers: the target's; 0: it keeps no inputs of layers.
    Raises: LoadError.
    """
    config, where = checkpoint.config, _config_says(checkpoint)
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
    """Return the embedding: the target's if both are equal, which saves memory."""
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
