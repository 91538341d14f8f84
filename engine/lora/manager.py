"""LoraManager: the LoRA adapters of one loaded model, in numbered slots.

Life of an adapter: `load` reads and checks it, then adds its factors to the model's linear layers;
a request that names it holds it from `acquire` to `release`; `unload` removes it, and is rejected
while it is held. Slot 0 means no adapter. `begin` sets the slot of each row of the next forward
pass.

Invariants (`check_integrity`): each slot has one adapter; a linear layer holds factors of exactly
the loaded adapters that have it as a target; stacks hold exactly those that are launched; the
counted bytes are the sum of the factors' bytes; adapters are held by live requests only. It knows
no requests and no blocks. Engine thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from engine.batch import Batch
from engine.errors import (
    AdapterInUse,
    IntegrityError,
    InvalidAdapter,
    InvalidRequest,
    TooManyAdapters,
    UnknownAdapter,
)
from engine.lora.adapter import WEIGHTS, LoraAdapter, Progress, read_adapter
from engine.lora.limits import LoraLimits
from engine.lora.stacked_weights import (
    AdapterRows,
    Deltas,
    Linear,
    LowRank,
    Site,
    StackedLora,
    attach,
    detach,
)

logger = logging.getLogger(__name__)

MAX_NAME_CHARS = 128


@dataclass(frozen=True)
class AdapterInfo:
    """The properties of a loaded adapter."""

    name: str

    digest: str
    """Hexadecimal digest over all that the adapter computes; a part of the key of cache roots,
    which its name is not."""

    rank: int
    """The highest rank of its modules."""

    num_bytes: int
    """Size in memory."""

    targets: tuple[str, ...]
    """The kinds of modules that it is on ("q_proj"), sorted."""


@dataclass
class _Loaded:
    info: AdapterInfo
    slot: int
    linears: tuple[nn.Module, ...]
    num_held: int = 0


class LoraManager:
    """The table of adapters, and their factors on the model's linear layers.

    Args:
        find_sites: returns the model's linear layers by name; called once, at the first load.
        dtype: the dtype in which factors are stored.
        refusal: why this model supports no adapters; empty: it does.
        stacks: the stacked factors of launched adapters; None: none is launched.
    """

    def __init__(
        self,
        limits: LoraLimits,
        find_sites: Callable[[], Mapping[str, Site]],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        refusal: str = "",
        stacks: StackedLora | None = None,
    ) -> None:
        self.limits = limits
        self._find_sites = find_sites
        self._sites: Mapping[str, Site] | None = None
        self._dtype = dtype
        self._device = device or torch.device("cpu")
        self._refusal = refusal
        self._stacks = stacks
        self._rows = AdapterRows(self._device)
        self._loaded: dict[str, _Loaded] = {}
        self._deltas: dict[nn.Module, tuple[Linear, Deltas, RemovableHandle | None]] = {}

    @classmethod
    def refused(cls, reason: str) -> LoraManager:
        """Create the manager of a model that supports no adapters: every load is rejected with this
        reason."""
        return cls(LoraLimits(max_num_adapters=0), dict, refusal=reason)

    # -- loading

    def load(self, name: str, folder: Path, progress: Progress | None = None) -> AdapterInfo:
        """Read a PEFT adapter and make it available to requests. Loading the same content again
        changes nothing; other content replaces the adapter of that name.

        Raises: InvalidAdapter, TooManyAdapters; AdapterInUse if an adapter of that name with other
            content is held. Nothing changes then.
        """
        limits = self.reading_limits()
        _check_name(name)
        return self.install(name, read_adapter(folder, limits, progress))

    def reading_limits(self) -> LoraLimits:
        """Return the limits for reading an adapter. Raises: InvalidAdapter if this model supports
        none."""
        if self._refusal:
            raise InvalidAdapter("adapter", f"{self._refusal}: it takes no LoRA adapters")
        return self.limits

    def install(self, name: str, adapter: LoraAdapter) -> AdapterInfo:
        """Make an adapter available that was read before, maybe by another thread. Raises: the
        errors of `load`."""
        self.reading_limits()
        _check_name(name)
        old = self._loaded.get(name)
        if old is not None and old.info.digest == adapter.digest:
            return old.info
        if old is not None and old.num_held:
            raise AdapterInUse(
                f"adapter {name!r} is in use by {old.num_held} requests with other content; load "
                "it under another name, or when they have ended"
            )
        members_of = _by_linear(self._check_sites(adapter))
        num_bytes = sum(
            self._num_low_rank_bytes(members, adapter) for members in members_of.values()
        )
        slot = self._choose_slot(old, num_bytes)  # before anything is made
        by_linear = {
            linear: self._low_rank(members, adapter) for linear, members in members_of.items()
        }
        if old is not None:
            self._take_off(old)
        for linear, factors in by_linear.items():
            if linear not in self._deltas:
                deltas = Deltas(self._rows, factors.b.shape[1], self._dtype)
                self._deltas[linear] = (linear, deltas, attach(linear, deltas))
            self._deltas[linear][1].by_slot[slot] = factors
        launched_rank = 0 if self._stacks is None else self._stacks.max_rank
        if self._stacks is not None and adapter.rank <= launched_rank:
            self._stacks.put(slot, by_linear)
        warning = plain_steps_warning(name, adapter.rank, launched_rank, self._device.type)
        if warning:
            logger.warning(warning)
        targets = tuple(sorted({module.rpartition(".")[2] for module in adapter.factors}))
        info = AdapterInfo(name, adapter.digest, adapter.rank, num_bytes, targets)
        self._loaded[name] = _Loaded(info, slot, tuple(by_linear))
        return info

    def unload(self, name: str) -> None:
        """Remove an adapter from the model. Raises: UnknownAdapter; AdapterInUse with the number of
        requests."""
        loaded = self._get(name)
        if loaded.num_held:
            raise AdapterInUse(
                f"adapter {name!r} is in use by {loaded.num_held} requests; unload it when they "
                "have ended or were aborted"
            )
        self._take_off(loaded)
        del self._loaded[name]

    def infos(self) -> tuple[AdapterInfo, ...]:
        """Return the loaded adapters, in the order of loading."""
        return tuple(loaded.info for loaded in self._loaded.values())

    # -- requests

    def digest(self, name: str) -> str:
        """Return the adapter's digest, with which cache roots are keyed; empty for no adapter.
        Raises: InvalidRequest if it is not loaded."""
        return self._named(name).info.digest if name else ""

    def slot(self, name: str) -> int:
        """Return the adapter's slot (Span.adapter); 0 for no adapter. Raises: InvalidRequest if it
        is not loaded."""
        return self._named(name).slot if name else 0

    def is_launched(self, name: str) -> bool:
        """Return whether rows with this adapter can be launched ahead (DecodesAhead); True for no
        adapter. Raises: InvalidRequest if it is not loaded."""
        if not name:
            return True
        return self._stacks is not None and self._stacks.holds(self._named(name).slot)

    def acquire(self, name: str) -> None:
        """Count one more request that uses the adapter; does nothing for no adapter. Raises:
        InvalidRequest naming the loaded adapters."""
        if name:
            self._named(name).num_held += 1

    def release(self, name: str) -> None:
        """End one `acquire`. Raises: IntegrityError without one."""
        if not name:
            return
        loaded = self._loaded.get(name)
        if loaded is None or not loaded.num_held:
            raise IntegrityError(f"adapter {name!r} was released without being held")
        loaded.num_held -= 1

    # -- the step

    def begin(self, batch: Batch) -> None:
        """Set the slots of the rows of the next forward pass. Raises: IntegrityError for a slot
        without an adapter."""
        self._rows.place(batch.spans)
        if self._rows.slots:
            known = {loaded.slot for loaded in self._loaded.values()}
            unknown = set(self._rows.slots) - known
            if unknown:
                raise IntegrityError(f"a span names adapter slots {sorted(unknown)}: empty")

    def check_integrity(self, num_held: Mapping[str, int] | None = None) -> None:
        """Recompute the invariants that the module's docstring lists.

        Args: num_held: number of live requests by adapter name; None: not checked.
        Raises: IntegrityError.
        """
        slots = [loaded.slot for loaded in self._loaded.values()]
        if len(set(slots)) != len(slots) or not set(slots) <= set(self._all_slots()):
            raise IntegrityError(f"adapter slots {sorted(slots)} of {self.limits}")
        for loaded in self._loaded.values():
            held = {m: d for m, (_, d, _) in self._deltas.items() if loaded.slot in d.by_slot}
            if set(held) != set(loaded.linears):
                raise IntegrityError(f"adapter {loaded.info.name!r} is not on its linears")
            num_bytes = sum(deltas.by_slot[loaded.slot].num_bytes for deltas in held.values())
            if num_bytes != loaded.info.num_bytes:
                raise IntegrityError(f"adapter {loaded.info.name!r} holds {num_bytes} bytes")
        for _, deltas, _ in self._deltas.values():
            if not deltas.by_slot or not set(deltas.by_slot) <= set(slots):
                raise IntegrityError(f"a linear holds slots {sorted(deltas.by_slot)} of {slots}")
        if self._stacks is not None:
            max_rank = self._stacks.max_rank
            self._stacks.check_integrity(
                one.slot for one in self._loaded.values() if one.info.rank <= max_rank
            )
        if self._num_bytes() > self.limits.max_bytes:
            raise IntegrityError(f"adapters hold {self._num_bytes()} bytes")
        for name, loaded in self._loaded.items():
            if num_held is not None and loaded.num_held != num_held.get(name, 0):
                raise IntegrityError(f"adapter {name!r} counts {loaded.num_held} requests")

    # -- inside

    def _get(self, name: str) -> _Loaded:
        loaded = self._loaded.get(name)
        if loaded is None:
            raise UnknownAdapter(f"no adapter {name!r} is loaded; {self._loaded_names()}")
        return loaded

    def _named(self, name: str) -> _Loaded:
        loaded = self._loaded.get(name)
        if loaded is None:
            raise InvalidRequest(
                "adapter", f"{name!r} is not loaded ({self._refusal or self._loaded_names()})"
            )
        return loaded

    def _loaded_names(self) -> str:
        return f"loaded are: {', '.join(sorted(self._loaded)) or 'none'}"

    def _num_bytes(self) -> int:
        return sum(loaded.info.num_bytes for loaded in self._loaded.values())

    def _all_slots(self) -> range:
        return range(1, self.limits.max_num_adapters + 1)

    def _choose_slot(self, old: _Loaded | None, num_bytes: int) -> int:
        """Return the slot of the adapter `old` that is replaced, or the first free one. Raises:
        TooManyAdapters."""
        rest = self._num_bytes() - (old.info.num_bytes if old else 0)
        if rest + num_bytes > self.limits.max_bytes:
            raise TooManyAdapters(
                f"adapters hold {rest} bytes, {num_bytes} more are above lora.max_bytes "
                f"({self.limits.max_bytes}); unload one, or raise it"
            )
        if old is not None:
            return old.slot
        taken = {loaded.slot for loaded in self._loaded.values()}
        for slot in self._all_slots():
            if slot not in taken:
                return slot
        raise TooManyAdapters(
            f"{len(taken)} adapters are loaded, lora.max_num_adapters is "
            f"{self.limits.max_num_adapters}; unload one, or raise it"
        )

    def _check_sites(self, adapter: LoraAdapter) -> dict[str, Site]:
        """Return the sites of an adapter's modules. Raises: InvalidAdapter naming the first that
        does not fit."""
        if self._sites is None:
            self._sites = self._find_sites()
        for module, factors in adapter.factors.items():
            site = self._sites.get(module)
            if site is None:
                kinds = sorted({name.rpartition(".")[2] for name in self._sites})
                raise InvalidAdapter(
                    "target_modules",
                    f"{module} is no linear layer that this model can adapt (those are: "
                    f"{', '.join(kinds)}; never embeddings, the head, or MoE experts)",
                )
            wanted = (factors.b.shape[0], factors.a.shape[1])
            if wanted != (site.out_features, site.in_features):
                raise InvalidAdapter(
                    WEIGHTS,
                    f"{module} is made for a weight of {wanted}, the model's is "
                    f"{(site.out_features, site.in_features)}: another base model",
                )
            if not adapter.config.is_target(module):
                raise InvalidAdapter(
                    "target_modules", f"the file holds {module}, which it does not name"
                )
        for module in self._sites:
            if module not in adapter.factors and adapter.config.is_target(module):
                raise InvalidAdapter(WEIGHTS, f"target_modules names {module}, which it lacks")
        return {module: self._sites[module] for module in adapter.factors}

    def _low_rank(self, members: Mapping[str, Site], adapter: LoraAdapter) -> LowRank:
        """Combine the factors of all modules that are columns of one linear layer into one pair."""
        factors = [adapter.factors[module] for module in members]
        linear = next(iter(members.values())).linear
        a = torch.cat([one.a for one in factors]).to(self._dtype)
        b = torch.zeros(a.shape[0], linear.out_features)
        row = 0
        for one, site in zip(factors, members.values(), strict=True):
            rank = one.a.shape[0]
            columns = slice(site.column, site.column + site.out_features)
            b[row : row + rank, columns] = one.b.float().t() * one.scale
            row += rank
        return LowRank(a.to(self._device), b.to(self._dtype).to(self._device))

    def _num_low_rank_bytes(self, members: Mapping[str, Site], adapter: LoraAdapter) -> int:
        """Return the size in bytes of the result of `_low_rank`."""
        rank = sum(adapter.factors[module].a.shape[0] for module in members)
        site = next(iter(members.values()))
        num_features: int = site.in_features + site.linear.out_features
        return rank * num_features * self._dtype.itemsize

    def _take_off(self, loaded: _Loaded) -> None:
        if self._stacks is not None:
            self._stacks.clear(loaded.slot)
        for linear in loaded.linears:
            owner, deltas, handle = self._deltas[linear]
            del deltas.by_slot[loaded.slot]
            if not deltas.by_slot:
                detach(owner, handle)
                del self._deltas[linear]


def _by_linear(sites: Mapping[str, Site]) -> dict[Linear, dict[str, Site]]:
    members: dict[Linear, dict[str, Site]] = {}
    for module, site in sites.items():
        members.setdefault(site.linear, {})[module] = site
    return members


def plain_steps_warning(name: str, rank: int, launched_rank: int, device_type: str) -> str:
    """Return a warning that an adapter's decode steps will be slow; empty if they will not.

    Args: launched_rank: highest rank that is launched ahead; 0: none is.
    """
    if device_type != "cuda" or rank <= launched_rank:
        return ""
    return (
        f"adapter {name!r} of rank {rank} decodes in plain steps, 14 to 59 times as slow as "
        f"launched ones where it was measured: this engine launches rank {launched_rank} at most "
        "(lora.max_launched_rank)"
    )


def _check_name(name: str) -> None:
    if not name or len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise InvalidAdapter(
            "adapter", f"a name has 1 to {MAX_NAME_CHARS} printable characters, not {name[:40]!r}"
        )
