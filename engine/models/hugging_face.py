"""HuggingFaceModel: the universal backend. Modelling code of transformers, our paged attention, no
cache class of theirs.

All new tokens of all requests lie in one row [1, T]; position ids say where each belongs,
TorchPagedAttention which KV it sees. Runs under inference mode. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch

from engine.batch import Batch
from engine.kv.layout import KvLayout
from engine.kv.memory import TORCH_DTYPES, KvMemory, LayerView
from engine.layers.quantized_attention import QuantizedAttention, Scales
from engine.layers.torch_attention import Attend, Scratch, TorchPagedAttention, scratch_for
from engine.lora.config import LoraLimits
from engine.lora.manager import LoraManager
from engine.models.interface import DecodesAhead, Ends, Guesses, InOneProcess
from engine.models.layer_lists import layer_lists
from engine.models.lora_sites import find_sites
from engine.models.offload import LayerStream
from engine.request import ModelInfo


class HuggingFaceModel(InOneProcess):
    """A LoadedModel (models/interface.py). Built by models/built.py, which probed, fused and
    verified it.

    Attributes: stream: what brings its layers to the device; None: all of them lie there.
    """

    def __init__(
        self,
        model: Any,
        info: ModelInfo,
        layout: KvLayout,
        lora: LoraLimits | None = None,
        fixed_scales: Sequence[Scales] = (),
        stream: LayerStream | None = None,
    ) -> None:
        has_head = model.get_output_embeddings() is not None
        self.info = replace(info, gives_embeddings=info.gives_embeddings and has_head)
        self.layout = layout
        self._model = model
        self._device = torch.device(info.device)
        self._fixed_scales = fixed_scales
        self.stream = stream
        self._memory: KvMemory | None = None
        self._views: list[LayerView] = []
        self._scratch: Scratch | None = None
        self._has_body_before_head = model.base_model is not model
        self._is_body_checked = False
        self.ahead: DecodesAhead | None = None
        self.guesses = Guesses.TREES
        is_cpu = self._device.type == "cpu"
        self.adapters = LoraManager(
            lora or LoraLimits(),
            lambda: find_sites(model, self.forward),
            dtype=torch.float32 if is_cpu else TORCH_DTYPES[info.dtype],
            device=self._device,
        )

    def attach(self, memory: KvMemory) -> None:
        """Views of each layer's keys and values in the cache."""
        self._memory = memory
        self._views = memory.layer_views()
        self._scratch = scratch_for(memory, self.info.dtype)

    @property
    def ends(self) -> Ends | None:
        """See LoadedModel."""
        embedding, head = self._model.get_input_embeddings(), self._model.get_output_embeddings()
        if embedding is None or head is None:
            return None
        return Ends(int(embedding.weight.shape[1]), embedding, head, len(self._layers))

    @cached_property
    def _layers(self) -> tuple[torch.nn.Module, ...]:
        """Its decoder layers; none where it keeps them in several lists."""
        found = layer_lists(self._model)
        return tuple(found[0]) if len(found) == 1 else ()

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """See LoadedModel. Logits come in the model's dtype."""
        self.adapters.begin(batch)
        if self._memory is None or self._memory.tails is None:
            step = TorchPagedAttention(batch, self._views, self.layout.block_size, self._scratch)
            return self._run(batch, step)
        quantized = QuantizedAttention(batch, self._memory, self._views, self._fixed_scales)
        return self._run(batch, quantized)

    def check_integrity(self) -> None:
        """Raises: IntegrityError where the books of streamed layers, or of what steps gather into,
        do not add up."""
        if self._scratch is not None:
            self._scratch.check_integrity()
        if self.stream is not None:
            self.stream.check_integrity()

    def close(self) -> None:
        """See LoadedModel."""
        if self._scratch is not None:
            self._scratch.close()
        if self.stream is not None:
            self.stream.close()

    def _run(self, batch: Batch, step: Attend) -> torch.Tensor:
        self.kept_hidden = self.kept_every_hidden = None
        self.kept_layer_inputs = {}
        if not batch.wants_hidden:
            return run(self._model, batch, step, self._device)

        def keep(head: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            rows = inputs[0].reshape(-1, inputs[0].shape[-1])
            # Most code of theirs takes the wanted rows before the head; some after it.
            if len(rows) != len(batch.draw_indices):
                rows = rows[list(batch.draw_indices)]
            self.kept_hidden = rows.clone()

        def keep_every(body: torch.nn.Module, inputs: object, output: Any) -> None:
            self.kept_every_hidden = output[0][0].clone()

        layer_inputs: dict[int, torch.Tensor] = {}

        def keep_input(
            index: int, layer: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
        ) -> None:
            rows = inputs[0] if inputs else named.get("hidden_states")
            # Some code has several streams between its layers: no head was trained for those.
            if rows is not None and rows.shape[:-1] == (1, len(batch.token_ids)):
                layer_inputs[index] = rows[0].clone()

        watches = [self._model.get_output_embeddings().register_forward_pre_hook(keep)]
        if batch.wants_every_hidden and self._has_body_before_head:
            watches.append(self._model.base_model.register_forward_hook(keep_every))
        for index in batch.wants_layers:
            keep_it, layer = partial(keep_input, index), self._layers[index]
            watches.append(layer.register_forward_pre_hook(keep_it, with_kwargs=True))
        try:
            logits = run(self._model, batch, step, self._device)
        finally:
            for watch in watches:
                watch.remove()
        self.kept_layer_inputs = layer_inputs
        self._check_body(batch)
        return logits

    def _check_body(self, batch: Batch) -> None:
        """Once: code that does something between its last norm and its head leaves other numbers
        here than the head takes, and keeps those of the draws alone."""
        if self._is_body_checked or self.kept_every_hidden is None or not batch.draw_indices:
            return
        if not any(span.block_ids for span in batch.spans):
            return  # a warm-up's numbers say nothing
        drawn = self.kept_every_hidden[list(batch.draw_indices)]
        self._is_body_checked = True
        # What is no number is none in both.
        self._has_body_before_head = self.kept_hidden is not None and torch.equal(
            drawn.nan_to_num(), self.kept_hidden.nan_to_num()
        )
        if not self._has_body_before_head:
            self.kept_every_hidden = None


def run(model: Any, batch: Batch, step: Attend, device: torch.device) -> torch.Tensor:
    """One forward pass of a transformers model over a batch; logits [R, V]."""
    token_ids = torch.tensor([batch.token_ids], device=device)
    positions = torch.tensor([batch.positions], device=device)
    logits: torch.Tensor = model(
        input_ids=token_ids,
        position_ids=positions,
        use_cache=False,
        past_key_values=None,
        logits_to_keep=torch.tensor(batch.draw_indices, dtype=torch.int64, device=device),
        baton_step=step,
    ).logits
    return logits[0]
