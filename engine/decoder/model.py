"""DecoderModel: our own decoder behind the engine's seam (models/interface.py). Built by
engine/models/loader.py, which rehearsed and verified it.

It turns a Batch into tensors, and knows how the cache is laid out; it computes nothing itself.
Without the kernels (on a CPU), and over a cache that stores other numbers than are computed
(quantized, or of another dtype), the attention is that of transformers' backend,
layers/torch_attention.py and quantized_attention.py. A warm-up
(spans without blocks) runs what a request runs, with nothing written; its logits mean nothing.
Engine thread only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np
import torch
from baton_kernels.block_rows import BlockRows
from baton_kernels.packed_linear import unavailable_reason

from engine.batch import Batch
from engine.decoder.ahead import AheadDecoder
from engine.decoder.decoder import Decoder
from engine.decoder.graph_set import capture_all
from engine.decoder.inputs import attending_inputs, mixed_inputs, singles_first
from engine.decoder.keeping import Keeping
from engine.decoder.plain_graphs import PlainGraphs
from engine.decoder.shape import DecoderShape
from engine.decoder.weights import DecoderWeights, Share
from engine.errors import LoadError
from engine.kv.layout import KvLayout, LayerKv, layout_of
from engine.kv.memory import TORCH_DTYPES, KvMemory, LayerView
from engine.kv.sizing import DeviceMemory
from engine.layers.quantized_attention import QuantizedAttention, Scales
from engine.layers.torch_attention import Attend, Scratch, TorchPagedAttention, scratch_for
from engine.lora.config import LoraLimits
from engine.lora.manager import LoraManager
from engine.lora.stacked_weights import Site, StackedLora
from engine.models.interface import DecodesAhead, Ends, Guesses, InOneProcess, Progress
from engine.request import ModelInfo
from engine.sampling.copies import bring

MakeAhead = Callable[[Decoder, KvMemory], AheadDecoder]
"""Makes what launches decode steps, for a decoder on its cache."""

MakeGraphs = Callable[[Decoder, KvMemory], PlainGraphs | None]
"""Makes what runs plain steps as graphs, for a decoder on its cache."""

_NO_ROWS = Batch((), (), ())
_HERE = contextlib.nullcontext()


class DecoderModel(InOneProcess):
    """A LoadedModel. See the module.

    Args:
        fixed_scales: by layer, where the cache has one scale for all keys of a layer.
        uses_kernels: False: torch's attention, whatever the cache stores.
        make_ahead: called when `ahead` is first asked for; None: no decode step is launched ahead.
            Not used without the kernels' attention.
        make_graphs: called by `warm_up`, where nothing is launched ahead; None: plain steps are
            launched kernel by kernel then. Not used without the kernels' attention, either.
        graph_bytes: that these graphs take on the device, at most.
        launches_prompts: steps with prompts are launched ahead, too; takes pinned memory.
    """

    def __init__(
        self,
        decoder: Decoder,
        info: ModelInfo,
        layout: KvLayout,
        *,
        lora: LoraLimits | None = None,
        fixed_scales: Sequence[Scales] = (),
        uses_kernels: bool = True,
        make_ahead: MakeAhead | None = None,
        make_graphs: MakeGraphs | None = None,
        graph_bytes: int = 0,
        launches_prompts: bool = False,
    ) -> None:
        self.info = info
        self.layout = layout
        self.decoder = decoder
        self._make_ahead = make_ahead
        self._make_graphs = make_graphs
        self._graph_bytes = graph_bytes
        self._launches_prompts = launches_prompts
        self._ahead: AheadDecoder | None = None
        self._graphs: PlainGraphs | None = None
        self._device = torch.device(info.device)
        self._fixed_scales = fixed_scales
        self._has_kernels = uses_kernels and layout.dtype == info.dtype
        self._memory: KvMemory | None = None
        self._views: list[LayerView] = []
        self._scratch: Scratch | None = None
        is_cpu = self._device.type == "cpu"
        limits = lora or LoraLimits()
        if make_ahead is not None and self._has_kernels and not decoder.is_exact:
            stack_adapters(decoder, limits, self._device, info.dtype)
        self.adapters = LoraManager(
            limits,
            lambda: find_sites(decoder.weights),
            dtype=torch.float32 if is_cpu else TORCH_DTYPES[info.dtype],
            device=self._device,
            stacks=decoder.stacks,
        )

    def attach(self, memory: KvMemory) -> None:
        """Use this cache from now on."""
        share, layers = self.decoder.weights.share, self.decoder.weights.layers
        indices = range(share.first_layer, share.first_layer + len(layers))
        self._memory = memory
        self._views = memory.layer_views(indices, share.rank, share.num_ranks)
        self.decoder.attach([block_rows(view, memory.layout) for view in self._views])
        if not self._has_kernels:
            self._scratch = scratch_for(memory, self.info.dtype)
        self._ahead = self._graphs = None

    def check_integrity(self) -> None:
        """Raises: IntegrityError where the memory that steps gather into is not as accounted."""
        if self._scratch is not None:
            self._scratch.check_integrity()

    def close(self) -> None:
        """See LoadedModel."""
        if self._scratch is not None:
            self._scratch.close()

    @property
    def reads_unwritten(self) -> bool:  # type: ignore[override]  # a constant elsewhere
        """See LoadedModel. Our kernels look no further than a sequence's end."""
        return not self._has_kernels

    @property
    def ends(self) -> Ends | None:
        """See LoadedModel."""
        weights = self.decoder.weights
        embedding, head = weights.embedding, weights.head
        if embedding is None or head is None:
            return None

        def scores(hidden: torch.Tensor) -> torch.Tensor:
            with on_device(self._device):
                return head.forward(hidden)

        return Ends(
            embedding.shape[1],
            lambda token_ids: torch.nn.functional.embedding(token_ids, embedding),
            scores,
            len(weights.layers),
        )

    @property
    def guesses(self) -> Guesses:  # type: ignore[override]  # as above
        """See LoadedModel. A row of a tree sums in another order than that token alone would: exact
        models take one path."""
        return Guesses.CHAINS if self.decoder.is_exact else Guesses.TREES

    @property
    def ahead(self) -> DecodesAhead | None:
        """Made when it is first asked for."""
        if self._memory is None or self._make_ahead is None or not self._has_kernels:
            return None
        if self._ahead is None:
            self._ahead = self._make_ahead(self.decoder, self._memory)
            if self._launches_prompts:
                self._ahead.take_prompts(self._forward)
            self._graphs = self._ahead.plain
        return self._ahead

    @property
    def graphs(self) -> PlainGraphs | None:
        """Of plain steps; None before they are made, and where there are none."""
        return self._graphs

    def device_memory(self) -> DeviceMemory | None:
        """See LoadedModel."""
        found = super().device_memory()
        if found is None:
            return None
        stacks = self.decoder.stacks
        return replace(
            found,
            weight_bytes=found.weight_bytes + (0 if stacks is None else stacks.num_bytes),
            step_bytes=found.step_bytes + self._graph_bytes,
        )

    def warm_up(self, progress: Progress | None = None) -> None:
        """See LoadedModel."""
        if self._memory is None or self._make_graphs is None or not self._has_kernels:
            return
        self._graphs = self._make_graphs(self.decoder, self._memory)
        if self._graphs is not None:
            capture_all([self._graphs], self._device, progress)
            with on_device(self._device):
                self._graphs.reserve()

    def queues_step(self, batch: Batch) -> bool:
        """See LoadedModel. What no graph takes is launched kernel by kernel."""
        graphs = None if batch.wants_hidden or self._device.type != "cuda" else self._graphs
        return graphs is not None and graphs.takes(batch)

    def forward(self, batch: Batch) -> torch.Tensor:
        """See LoadedModel. Logits come in the model's dtype. Raises: ValueError for a tree where
        every bit is promised (`guesses`)."""
        return self._forward(batch)

    def _forward(self, batch: Batch, drawn: torch.Tensor | None = None) -> torch.Tensor:
        """See ForwardDrawn (mixed_launch.py). With `drawn`, a step over a cache that stores what is
        computed, without guesses, that wants no hidden states."""
        if self.decoder.is_exact and any(span.is_tree for span in batch.spans):
            raise ValueError(
                "exact: one path of guesses, no token tree: its sums have another order"
            )
        self.kept_hidden = self.kept_every_hidden = None
        self.kept_layer_inputs = {}
        graphs = None if batch.wants_hidden or drawn is not None else self._graphs
        with on_device(self._device):
            # The device waits until its graph is launched: nothing else is done before.
            logits = None if graphs is None else graphs.verify(batch)
            return self._compute(batch, drawn) if logits is None else logits

    @torch.inference_mode()
    def _compute(self, batch: Batch, drawn: torch.Tensor | None) -> torch.Tensor:
        if not self._has_kernels and not batch.wants_hidden:
            return self._forward_attending(batch)
        if batch.wants_hidden:
            return self._forward_keeping(batch)
        ordered = singles_first(batch)
        logits = None if self._graphs is None else self._graphs.run(ordered, drawn)
        if logits is not None:
            return logits
        with self._adapting(ordered):
            return self.decoder.forward(mixed_inputs(ordered, self._device, drawn))

    def _forward_keeping(self, batch: Batch) -> torch.Tensor:
        """Outside of graphs, and leaving what the batch wants beside logits."""
        keeping = Keeping(batch.wants_every_hidden, batch.wants_layers)
        self.decoder.keeping = keeping
        try:
            if self._has_kernels:
                ordered = singles_first(batch)
                with self._adapting(ordered):
                    logits = self.decoder.forward(mixed_inputs(ordered, self._device))
                if batch.wants_every_hidden:
                    keeping.in_order(_places(batch, self._device))
            else:
                logits = self._forward_attending(batch)
        finally:
            self.decoder.keeping = None
        self.kept_hidden, self.kept_every_hidden = keeping.hidden, keeping.every
        self.kept_layer_inputs = keeping.inputs
        return logits

    @contextlib.contextmanager
    def _adapting(self, batch: Batch) -> Generator[None, None, None]:
        """Rows of `batch` have their adapters meanwhile. Afterwards none has: launches look into
        StackedLora for theirs."""
        self.adapters.begin(batch)
        try:
            yield
        finally:
            self.adapters.begin(_NO_ROWS)

    def _forward_attending(self, batch: Batch) -> torch.Tensor:
        """With torch's attention."""
        if self._memory is None:
            raise ValueError("no cache is attached")
        step: Attend
        if self._memory.tails is not None:
            step = QuantizedAttention(batch, self._memory, self._views, self._fixed_scales)
        else:
            step = TorchPagedAttention(batch, self._views, self.layout.block_size, self._scratch)
        with self._adapting(batch):
            return self.decoder.forward_attending(*attending_inputs(batch, self._device), step)


def _places(batch: Batch, device: torch.device) -> torch.Tensor:
    """[T] int64: where each row of a batch lies in what `singles_first` makes of it."""
    every = tuple(range(len(batch.token_ids)))
    places = singles_first(replace(batch, draw_indices=every)).draw_indices
    return bring(np.array(places, dtype=np.int64), device)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Kernels are launched on the current device, not on that of their tensors."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    # The device waits meanwhile, and mostly it is the current one.
    if torch.cuda.current_device() == device.index:
        return _HERE
    return torch.cuda.device(device)


def kv_layout(
    shape: DecoderShape, *, block_size: int, dtype: str, kv_dtype: str = "", scale: str = ""
) -> KvLayout:
    """What a whole model of this shape caches per block. See layout_of."""
    layer = LayerKv(shape.num_kv_heads, shape.head_dim, shape.num_kv_heads, shape.head_dim)
    return layout_of(
        (layer,) * shape.num_layers,
        block_size=block_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
        scale=scale,
    )


def block_rows(view: LayerView, layout: KvLayout) -> BlockRows:
    """One layer's part of the cache, as kernels take it."""
    return view.block_rows(layout.dtype if layout.is_quantized else "")


def find_sites(weights: DecoderWeights) -> dict[str, Site]:
    """The linear layers that adapters can add to, by their names in the checkpoint. Raises:
    ValueError for a share of the layers: adapters are not cut."""
    if weights.share != Share():
        raise ValueError("adapters on a model that several ranks share")
    shape = weights.shape
    sites: dict[str, Site] = {}
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    hidden, inner = shape.hidden_size, shape.intermediate_size
    for index, layer in enumerate(weights.layers):
        parts = {
            "self_attn.q_proj": Site(layer.qkv, 0, hidden, query),
            "self_attn.k_proj": Site(layer.qkv, query, hidden, key),
            "self_attn.v_proj": Site(layer.qkv, query + key, hidden, key),
            "self_attn.o_proj": Site(layer.o, 0, query, hidden),
            "mlp.gate_proj": Site(layer.gate_up, 0, hidden, inner),
            "mlp.up_proj": Site(layer.gate_up, inner, hidden, inner),
            "mlp.down_proj": Site(layer.down, 0, inner, hidden),
        }
        sites |= {f"model.layers.{index}.{name}": site for name, site in parts.items()}
    return sites


def stack_adapters(decoder: Decoder, limits: LoraLimits, device: torch.device, dtype: str) -> None:
    """Make the tensors that adapters of launched rows will lie in, where some are to be launched:
    `decoder` adds them from now on. Raises: LoadError where the device has no memory for it."""
    if not limits.max_launched_rank or not limits.max_num_adapters:
        return
    try:
        stacks = StackedLora(
            find_sites(decoder.weights),
            num_slots=limits.max_num_adapters,
            max_rank=limits.max_launched_rank,
            dtype=TORCH_DTYPES[dtype],
            device=device,
        )
    except torch.OutOfMemoryError as error:
        raise LoadError(
            f"no memory on {device} for {limits.max_num_adapters} adapters of rank "
            f"{limits.max_launched_rank} beside the weights: lower lora.max_launched_rank, or "
            "lora.max_num_adapters"
        ) from error
    decoder.stack(stacks)


def pack_weights(decoder: Decoder, dtype: str) -> str:
    """Reorder a decoder's weights for this CPU, where that can be. Returns how products are
    computed, in words."""
    reason = unavailable_reason(TORCH_DTYPES[dtype], "cpu")
    if reason is not None:
        return f"plain ({reason})"
    for projection in decoder.weights.projections:
        projection.pack()
    return "packed"
