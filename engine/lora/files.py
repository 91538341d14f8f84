"""An adapter's folder -> its low-rank factors by module, each with its scale, and one digest of all
that an adapter computes.

Safetensors only: nothing that could run code. Does not know the model; engine/lora/registry.py
compares the shapes. Any thread may call; reads the file once, so what was digested is what is used.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine.lora.config import LoraLimits
from engine.lora.errors import InvalidAdapter, TooManyAdapters
from engine.lora.peft import PeftConfig, read_config

WEIGHTS = "adapter_model.safetensors"
Progress = Callable[[str, int, int], None]

_PREFIX = "base_model.model."
_SUFFIXES = {".lora_A.weight": "A", ".lora_B.weight": "B"}
_REASONS = (
    ("lora_embedding", "adapters on embeddings are not supported"),
    ("lora_magnitude_vector", "DoRA is not supported"),
    ("modules_to_save", "whole retrained modules are not supported"),
    ("embed_tokens", "retrained or resized embeddings are not supported"),
    ("lm_head", "a retrained or resized head is not supported"),
    ("experts", "adapters on MoE experts are not supported"),
    ("bias", "biases are not supported"),
)
_MAX_MODULE_CHARS = 256
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Factors:
    """One module's part: it adds `scale * b @ a @ x`."""

    a: torch.Tensor  # [r, in], as stored
    b: torch.Tensor  # [out, r], as stored
    scale: float


@dataclass(frozen=True)
class Adapter:
    """A whole adapter, checked by itself."""

    config: PeftConfig
    factors: dict[str, Factors]
    """By the module's name in the model, "model.layers.0.self_attn.q_proj"."""
    digest: str
    """Hex, 64 characters: equal exactly if modules, factors and scales are."""

    @property
    def rank(self) -> int:
        """The highest of its modules."""
        return max(one.a.shape[0] for one in self.factors.values())


def read_adapter(folder: Path, limits: LoraLimits, progress: Progress | None = None) -> Adapter:
    """Read and check an adapter.

    Args:
        progress: called with ("adapter", bytes done, bytes in all).
    Raises: InvalidAdapter naming the field or tensor; TooManyAdapters where it alone is larger than
        all may be.
    """
    config = read_config(folder)
    tensors = _read_tensors(folder, limits, progress)
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        module, half = _split(name)
        _check_tensor(name, tensor)
        halves.setdefault(module, {})[half] = tensor
    factors = {
        module: _factors(module, halves[module], config, limits) for module in sorted(halves)
    }
    if not factors:
        raise InvalidAdapter(WEIGHTS, "holds no tensor; fetch the adapter again")
    return Adapter(config, factors, _digest(factors))


def _read_tensors(
    folder: Path, limits: LoraLimits, progress: Progress | None
) -> dict[str, torch.Tensor]:
    path = folder / WEIGHTS
    if not path.is_file():
        pickles = sorted(file.name for file in folder.glob("adapter_model.*"))
        raise InvalidAdapter(
            WEIGHTS,
            f"{folder} has only {pickles[0]}, which can run code when loaded; convert it"
            if pickles
            else f"{folder} has none; give the folder that PEFT's save_pretrained wrote",
        )
    total = path.stat().st_size
    if total > limits.max_bytes:
        raise TooManyAdapters(
            f"{path}: {total} bytes, but all adapters may take {limits.max_bytes}; raise "
            "lora.max_bytes"
        )
    tensors: dict[str, torch.Tensor] = {}
    done = 0
    try:
        with safe_open(path, framework="pt", device="cpu") as source:
            for name in source.keys():
                tensors[name] = source.get_tensor(name)
                done += tensors[name].numel() * tensors[name].element_size()
                if progress is not None:
                    progress("adapter", done, total)
    except (SafetensorError, OSError) as error:
        raise InvalidAdapter(WEIGHTS, f"cannot be read ({error}); fetch it again") from error
    return tensors


def _split(name: str) -> tuple[str, str]:
    """A tensor's name -> (module, "A" or "B")."""
    for part, reason in _REASONS:
        if part in name.split(".") or (part.startswith("lora_") and part in name):
            raise InvalidAdapter(name, f"{reason}; merge the adapter into the model")
    for suffix, half in _SUFFIXES.items():
        if name.startswith(_PREFIX) and name.endswith(suffix):
            module = name[len(_PREFIX) : -len(suffix)]
            if len(module) > _MAX_MODULE_CHARS:
                raise InvalidAdapter(
                    f"{name[:80]}...", f"a module's name above {_MAX_MODULE_CHARS} characters"
                )
            return module, half
    raise InvalidAdapter(
        name, f"is no tensor of a PEFT LoRA adapter ({_PREFIX}<module>.lora_A.weight)"
    )


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in _DTYPES:
        raise InvalidAdapter(name, f"has dtype {tensor.dtype}; save it in float32 or bfloat16")
    if tensor.ndim != 2 or not tensor.numel():
        raise InvalidAdapter(name, f"has shape {tuple(tensor.shape)}, not [rank, features]")
    if not bool(torch.isfinite(tensor).all()):
        raise InvalidAdapter(name, "holds NaN or infinite values; fetch or train it again")


def _factors(
    module: str, halves: dict[str, torch.Tensor], config: PeftConfig, limits: LoraLimits
) -> Factors:
    if set(halves) != {"A", "B"}:
        raise InvalidAdapter(module, "has only one of lora_A and lora_B; fetch the adapter again")
    a, b, rank = halves["A"], halves["B"], config.rank_of(module)
    if a.shape[0] != rank or b.shape[1] != rank:
        raise InvalidAdapter(
            "r",
            f"the config gives {module} rank {rank}, but lora_A is {tuple(a.shape)} and lora_B "
            f"{tuple(b.shape)}; fetch the adapter again",
        )
    if rank > limits.max_rank:
        raise InvalidAdapter(
            "r", f"{module} has rank {rank}, above {limits.max_rank}; raise lora.max_rank"
        )
    return Factors(a, b, config.scale_of(module))


def _digest(factors: dict[str, Factors]) -> str:
    """BLAKE2b over every module's name, scale, and both factors with dtype and shape, by name."""
    digest = hashlib.blake2b(digest_size=32, person=b"baton-adapter-v1")
    for module in sorted(factors):
        one = factors[module]
        for part in (module.encode(), struct.pack("<d", one.scale)):
            digest.update(len(part).to_bytes(8, "little") + part)
        for tensor in (one.a, one.b):
            head = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
            digest.update(len(head).to_bytes(8, "little") + head)
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
