"""Adapter: a LoRA adapter in PEFT's format: the settings of its adapter_config.json (`PeftConfig`),
its low-rank factors by module, each with its scale, and one digest of all that it computes
(`read_adapter`).

Only safetensors are read, since other formats can run code. A field whose effect differs from
PEFT's is rejected by name. Module patterns are regular expressions from untrusted files: `Pattern`
matches them in bounded time. It does not know the model; manager.py compares the shapes. Any thread
may call; the file is read once, so that the digest is of the tensors in use. Source: PEFT's
LoraConfig and its `check_target_module_exists` and `get_pattern_key` (behaviour, not code).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import InvalidAdapter, TooManyAdapters
from engine.lora.limits import LoraLimits

# -- patterns over modules' names


_MAX_PATTERN_CHARS = 512
_MAX_PATTERN_REPEATS = 16
_MAX_PATTERN_COUNT = 256
_MAX_PATTERN_DEPTH = 16

_TOKEN = re.compile(
    r"(?P<escape>\\.)|(?P<set>\[\^?(?:\\.|[^\[\]\\])+\])|(?P<open>\((?:\?:)?)|(?P<close>\))"
    r"|(?P<either>\|)|(?P<repeat>(?:[*+?]|\{\d{1,3}(?:,\d{0,3})?\})\??)|(?P<edge>[\^$])"
    r"|(?P<one>[^\\\[\](){}|*+?^$])",
    re.DOTALL,
)
_PLAIN = re.compile(r"[\w.\-]+")


@dataclass(frozen=True)
class _One:
    """A pattern node that matches one character."""

    allowed: re.Pattern[str]


@dataclass(frozen=True)
class _Edge:
    """A pattern node that matches the beginning or the end of the name."""

    place: re.Pattern[str]


@dataclass(frozen=True)
class _Repeat:
    part: _Node
    least: int
    most: int | None
    """Largest number of repetitions; None: unlimited."""


@dataclass(frozen=True)
class _Either:
    """A pattern node that matches one of several sequences of nodes; a group is one of them."""

    ways: tuple[tuple[_Node, ...], ...]


_Node = _One | _Edge | _Repeat | _Either


class NotAPattern(ValueError):
    """Raised for a text that is not a pattern, or a pattern that is not supported; says what and
    where."""


@dataclass(frozen=True)
class Pattern:
    """A regular expression over module names that is matched in bounded time.

    Python's matcher backtracks: a few characters can keep it busy for years. Here all positions
    that are reachable are advanced together, so that the work is at most (length of the pattern) x
    (length of the name) x (length of the name). The result is only whether a name matches, so that
    greedy and lazy repetitions are equal. Two patterns are equal if their texts are.

    Source: Thompson, "Regular expression search algorithm" (1968), by sets of positions.
    """

    text: str
    num_repeats: int = field(compare=False)
    _root: _Node = field(compare=False, repr=False)
    _plain: re.Pattern[str] | None = field(compare=False, repr=False)
    """The compiled pattern if it has no repetitions or alternatives, for which Python's own matcher
    is bounded, too; else None."""

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """Parse a pattern. Raises: NotAPattern for a text that is not one, or not supported."""
        parser = _Parser(text)
        root = parser.parse()
        plain = re.compile(rf"(?:.*\.)?(?:{text})$") if _PLAIN.fullmatch(text) else None
        return cls(text, parser.num_repeats, root, plain)

    @property
    def is_plain(self) -> bool:
        """Whether the pattern consists of letters, digits, dots and dashes only."""
        return self._plain is not None

    def is_whole(self, name: str) -> bool:
        """Whether the pattern matches all of `name`."""
        return len(name) in _ends(self._root, name, {0})

    def is_end(self, name: str) -> bool:
        """Whether the pattern matches all of `name`, or all that follows one of its dots."""
        if self._plain is not None:
            return self._plain.match(name) is not None
        starts = {0} | {index + 1 for index, character in enumerate(name) if character == "."}
        return len(name) in _ends(self._root, name, starts)


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0
        self.num_repeats = 0

    def parse(self) -> _Node:
        if len(self._text) > _MAX_PATTERN_CHARS:
            self._refuse(f"above {_MAX_PATTERN_CHARS} characters")
        root = self._either()
        if self._at < len(self._text):
            self._refuse("a closing bracket without an opening one")
        return root

    def _either(self) -> _Node:
        """Parse alternatives up to a closing bracket or the end."""
        ways: list[tuple[_Node, ...]] = []
        row: list[_Node] = []
        while self._at < len(self._text):
            found = _TOKEN.match(self._text, self._at)
            if found is None:
                self._refuse("not supported")
            if found.lastgroup == "close":
                break
            self._at = found.end()
            token = found.group()
            match found.lastgroup:
                case "either":
                    ways.append(tuple(row))
                    row = []
                case "repeat":
                    if not row:
                        self._refuse("nothing to repeat")
                    row.append(self._repeat(row.pop(), token))
                case "open":
                    row.append(self._group())
                case kind:
                    row.append(self._single(token, str(kind)))
        return _Either((*ways, tuple(row)))

    def _group(self) -> _Node:
        self._depth += 1
        if self._depth > _MAX_PATTERN_DEPTH:
            self._refuse(f"groups more than {_MAX_PATTERN_DEPTH} deep")
        inner = self._either()
        if self._at == len(self._text):
            self._refuse("an opening bracket without a closing one")
        self._at += 1
        self._depth -= 1
        return inner

    def _single(self, token: str, kind: str) -> _Node:
        if kind == "edge" or token in (r"\b", r"\B", r"\A", r"\Z"):
            return _Edge(re.compile(token))
        if kind == "escape" and token[1].isalnum() and token[1] not in "dDwWsS":
            self._refuse(f"{token} is not supported")
        if kind == "set" and re.search(r"--|&&|\|\||~~", token):
            self._refuse(f"{token} is not supported")
        try:
            return _One(re.compile(re.escape(token) if kind == "one" and token != "." else token))
        except (re.error, OverflowError) as error:
            self._refuse(str(error))

    def _repeat(self, part: _Node, token: str) -> _Node:
        self.num_repeats += 1
        if self.num_repeats > _MAX_PATTERN_REPEATS:
            self._refuse(f"above {_MAX_PATTERN_REPEATS} repeats")
        if isinstance(part, _Repeat | _Edge):
            self._refuse("nothing to repeat")
        if token[0] != "?" and _has_repeat(part):
            self._refuse("a repeat of what repeats")
        bounds = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(token[0])
        if bounds is not None:
            return _Repeat(part, *bounds)
        first, comma, last = token.rstrip("?")[1:-1].partition(",")
        least = int(first)
        most = int(last) if last else None if comma else least
        if max(least, most or 0) > _MAX_PATTERN_COUNT or (most is not None and most < least):
            self._refuse(f"{token} is out of bounds")
        return _Repeat(part, least, most)

    def _refuse(self, problem: str) -> NoReturn:
        raise NotAPattern(f"character {self._at}: {problem}")


def _has_repeat(node: _Node) -> bool:
    if isinstance(node, _Either):
        return any(_has_repeat(part) for way in node.ways for part in way)
    return isinstance(node, _Repeat)


def _ends(node: _Node, text: str, starts: set[int]) -> set[int]:
    """Return the positions at which a match of the node that starts at any of `starts` may end."""
    match node:
        case _One(allowed):
            return {at + 1 for at in starts if allowed.fullmatch(text, at, at + 1)}
        case _Edge(place):
            return {at for at in starts if place.match(text, at)}
        case _Either(ways):
            return set().union(*(_row_ends(way, text, starts) for way in ways))
        case _Repeat(part, least, most):
            return _repeat_ends(part, least, most, text, starts)


def _row_ends(way: tuple[_Node, ...], text: str, starts: set[int]) -> set[int]:
    for node in way:
        if not starts:
            break
        starts = _ends(node, text, starts)
    return starts


def _repeat_ends(
    part: _Node, least: int, most: int | None, text: str, starts: set[int]
) -> set[int]:
    for _ in range(least):
        starts = _ends(part, text, starts)
    found = new = starts
    num_done = least
    while new and num_done != most:
        new = _ends(part, text, new) - found  # what was found before has been gone on from
        found = found | new
        num_done += 1
    return found


# -- adapter_config.json


T = TypeVar("T")

CONFIG = "adapter_config.json"
ALL_LINEAR = "all-linear"

_MAX_CONFIG_BYTES = 1 << 20
_MAX_PATTERNS = 64
"""Largest number of patterns with repetitions or alternatives; plain names are limited by the size
of the file only."""

_READ = frozenset(
    {
        "peft_type", "task_type", "r", "lora_alpha", "use_rslora", "target_modules",
        "exclude_modules", "layers_to_transform", "layers_pattern", "rank_pattern",
        "alpha_pattern", "bias", "init_lora_weights",
    }
)  # fmt: skip

_HARMLESS = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "revision", "peft_version", "inference_mode",
        "lora_dropout", "megatron_core", "qalora_group_size", "loftq_config", "eva_config",
    }
)  # fmt: skip
"""Fields of adapter_config.json that do not affect serving. Any other unknown field that is set is
rejected."""

_FIELD_REASONS = {
    "use_dora": "DoRA scales the base weights, too",
    "modules_to_save": "whole retrained modules are not LoRA",
    "target_parameters": "adapters on bare parameters (MoE experts)",
    "trainable_token_indices": "retrained embeddings",
    "layer_replication": "a model with copied layers is another model",
    "alora_invocation_tokens": "an adapter that begins in the middle of a prompt",
    "lora_bias": "biases beside B",
    "fan_in_fan_out": "transposed weights",
    "use_qalora": "pooled inputs",
}

_HARMLESS_INITS = frozenset({True, False, None, "gaussian", "eva"})
"""Values of `init_lora_weights` that leave the base weights unchanged; those of PiSSA, OLoRA, CorDA
and LoftQ change them."""


@dataclass(frozen=True)
class PeftConfig:
    """The settings of an adapter_config.json that affect serving."""

    rank: int
    alpha: float
    is_rank_stabilised: bool
    targets: str | Pattern | tuple[str, ...]
    """The target modules: a pattern, or names; the only string is ALL_LINEAR."""
    excluded: Pattern | tuple[str, ...]
    layers: frozenset[int] | None
    """Indices of the layers with an adapter; None: all."""
    layers_patterns: tuple[str, ...]
    rank_pattern: Mapping[Pattern, int]
    alpha_pattern: Mapping[Pattern, float]

    def rank_of(self, module: str) -> int:
        """Return the rank of one module."""
        return _find(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor of a module's B @ A: alpha / rank, or alpha / sqrt(rank) (rsLoRA,
        arXiv:2312.03732)."""
        alpha = _find(self.alpha_pattern, module, self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)

    def is_target(self, module: str) -> bool:
        """Return whether PEFT would add the adapter to the linear layer of this name, which must
        not be the LM head."""
        if _is_named(self.excluded, module):
            return False
        if isinstance(self.targets, str):
            return True
        if not _is_named(self.targets, module):
            return False
        if self.layers is None or isinstance(self.targets, Pattern) or module in self.targets:
            return True
        for pattern in self.layers_patterns or (r"[^.]*",):
            found = re.match(rf".*\.{pattern}\.(\d+)\.", module)
            if found:
                return int(found.group(1)) in self.layers
        return False


def read_config(folder: Path) -> PeftConfig:
    """Read an adapter's config. Raises: InvalidAdapter naming the field and the fix."""
    path = folder / CONFIG
    try:
        if not path.is_file():
            raise InvalidAdapter(
                CONFIG, f"{folder} has none; give the folder that PEFT's save_pretrained wrote"
            )
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise InvalidAdapter(CONFIG, f"above {_MAX_CONFIG_BYTES} bytes; give a PEFT adapter")
        values = json.loads(path.read_text(encoding="utf-8"))
    except InvalidAdapter:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidAdapter(CONFIG, f"cannot be read as JSON ({error}); fetch it again") from None
    if not isinstance(values, dict):
        raise InvalidAdapter(CONFIG, "is no JSON object; fetch it again")
    return parse_config(values)


def parse_config(values: Mapping[str, Any]) -> PeftConfig:
    """Create a config from the values of its file. Raises: InvalidAdapter naming the field."""
    _check_refused(values)
    layers = values.get("layers_to_transform")
    if isinstance(layers, int):
        layers = [layers]
    config = PeftConfig(
        rank=_positive_int("r", values.get("r")),
        alpha=_finite("lora_alpha", values.get("lora_alpha")),
        is_rank_stabilised=bool(values.get("use_rslora")),
        targets=_names("target_modules", values.get("target_modules")),
        excluded=_listed("exclude_modules", values.get("exclude_modules") or ()),
        layers=frozenset(_ints("layers_to_transform", layers)) if layers else None,
        layers_patterns=_layers_patterns(values.get("layers_pattern")),
        rank_pattern={
            _pattern("rank_pattern", key): _positive_int(f"rank_pattern.{key}", value)
            for key, value in _mapping("rank_pattern", values).items()
        },
        alpha_pattern={
            _pattern("alpha_pattern", key): _finite(f"alpha_pattern.{key}", value)
            for key, value in _mapping("alpha_pattern", values).items()
        },
    )
    for name in ("rank_pattern", "alpha_pattern"):
        num_patterns = sum(not pattern.is_plain for pattern in getattr(config, name))
        if num_patterns > _MAX_PATTERNS:
            raise InvalidAdapter(
                name, f"{num_patterns} patterns, above {_MAX_PATTERNS}; name the modules"
            )
    return config


def _check_refused(values: Mapping[str, Any]) -> None:
    if values.get("peft_type") != "LORA":
        raise InvalidAdapter("peft_type", f"{values.get('peft_type')!r}; only LORA is served")
    if values.get("task_type") not in (None, "CAUSAL_LM"):
        raise InvalidAdapter(
            "task_type", f"{values.get('task_type')!r}; only CAUSAL_LM adapters are served"
        )
    if values.get("bias", "none") != "none":
        raise InvalidAdapter(
            "bias", f"{values['bias']!r} is not supported; train with bias='none' or merge it"
        )
    init = values.get("init_lora_weights")
    if not isinstance(init, bool | str | None) or init not in _HARMLESS_INITS:
        raise InvalidAdapter(
            "init_lora_weights",
            f"{init!r} changes the base weights; save the adapter converted to plain LoRA "
            "(path_initial_model_for_weight_conversion) or merge it",
        )
    for name, value in values.items():
        if name in _READ or name in _HARMLESS or value in (None, False, "", [], {}):
            continue
        reason = _FIELD_REASONS.get(name, "this engine does not know the field")
        raise InvalidAdapter(name, f"{value!r} is not supported ({reason}); merge the adapter")


def _layers_patterns(value: Any) -> tuple[str, ...]:
    listed = [value] if isinstance(value, str) else value or []
    for one in _strings("layers_pattern", listed):
        if not re.fullmatch(r"\w{1,64}", one):
            raise InvalidAdapter("layers_pattern", f"{one[:80]!r} is no name of a list of layers")
    return tuple(listed)


def _names(field: str, value: Any) -> str | Pattern | tuple[str, ...]:
    if value is None:
        raise InvalidAdapter(field, "missing; name the modules that the adapter is on")
    return ALL_LINEAR if value == ALL_LINEAR else _listed(field, value)


def _listed(field: str, value: Any) -> Pattern | tuple[str, ...]:
    if isinstance(value, str):
        return _pattern(field, value)
    return tuple(sorted(_strings(field, value)))


def _strings(field: str, value: Any) -> list[str]:
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
        raise InvalidAdapter(field, "is neither a string nor a list of strings")
    return list(value)


def _ints(field: str, value: Any) -> list[int]:
    if not isinstance(value, list) or not all(type(one) is int for one in value):
        raise InvalidAdapter(field, "is no list of layer numbers")
    return value


def _mapping(field: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    value = values.get(field) or {}
    if not isinstance(value, dict):
        raise InvalidAdapter(field, "is no JSON object")
    return value


def _positive_int(field: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise InvalidAdapter(field, f"{value!r} is no positive integer")
    return value


def _finite(field: str, value: Any) -> float:
    try:
        if isinstance(value, int | float) and type(value) is not bool and math.isfinite(value):
            return float(value)
    except OverflowError:  # an integer beyond the floats
        raise InvalidAdapter(field, "is no finite number: too large") from None
    raise InvalidAdapter(field, f"{value!r} is no finite number")


def _pattern(field: str, text: str) -> Pattern:
    try:
        return Pattern.parse(text)
    except NotAPattern as error:
        raise InvalidAdapter(
            field, f"{text[:80]!r} is no pattern that is matched here ({error}); list the modules"
        ) from None


def _is_named(names: Pattern | tuple[str, ...], module: str) -> bool:
    """Return whether a pattern matches the whole module name, or a list contains it or a suffix of
    it after a dot."""
    if isinstance(names, Pattern):
        return names.is_whole(module)
    return any(module == name or module.endswith(f".{name}") for name in names)


def _find(patterns: Mapping[Pattern, T], module: str, default: T) -> T:
    """Return the value of the first key that matches the end of the name, or `default`."""
    return next((each for pattern, each in patterns.items() if pattern.is_end(module)), default)


# -- tensors


WEIGHTS = "adapter_model.safetensors"
Progress = Callable[[str, int, int], None]

_PREFIX = "base_model.model."
_SUFFIXES = {".lora_A.weight": "A", ".lora_B.weight": "B"}
_TENSOR_REASONS = (
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
    """The factors of one module, which adds `scale * b @ a @ x`."""

    a: torch.Tensor  # [r, in], as stored
    b: torch.Tensor  # [out, r], as stored
    scale: float


@dataclass(frozen=True)
class LoraAdapter:
    """An adapter whose config and tensors are consistent with each other."""

    config: PeftConfig
    factors: dict[str, Factors]
    """The factors of each module, by its name in the model ("model.layers.0.self_attn.q_proj")."""
    digest: str
    """Digest of 64 hexadecimal characters, equal exactly if modules, factors and scales are."""

    @property
    def rank(self) -> int:
        """The highest rank of its modules."""
        return max(one.a.shape[0] for one in self.factors.values())


def read_adapter(folder: Path, limits: LoraLimits, progress: Progress | None = None) -> LoraAdapter:
    """Read and check an adapter.

    Args: progress: called with ("adapter", bytes done, bytes in all).
    Raises: InvalidAdapter naming the field or tensor; TooManyAdapters if it alone exceeds
        `limits.max_bytes`.
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
    return LoraAdapter(config, factors, _digest(factors))


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
    """Split a tensor's name into (module, "A" or "B"). Raises: InvalidAdapter for a tensor that is
    not supported."""
    for part, reason in _TENSOR_REASONS:
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
    """Return the BLAKE2b digest over every module's name, scale, and both factors with dtype and
    shape, in the order of names."""
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
