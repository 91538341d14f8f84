"""GrammarLimits: what one grammar may cost, so that a bomb hurts only its sender. A frozen value;
any thread."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from process.settings import SettingsError


@dataclass(frozen=True)
class GrammarLimits:
    """Bounds on grammars. Raises SettingsError for a value that is not positive."""

    max_spec_bytes: int = 65_536
    """UTF-8 bytes of one spec, text and choices together."""

    max_num_choices: int = 1024
    """Choices of one spec, and values of one `enum`."""

    max_num_levels: int = 48
    """Depth of groups in a pattern or grammar, and of sub-schemas and values in a schema."""

    max_num_repeats: int = 10_000
    """Largest bound of a repetition: {n} in a pattern, maxLength or maxItems in a schema."""

    compile_timeout_s: float = 60.0
    """Wall time of one compilation, from when a compiling process takes it up."""

    compile_bytes: int = 1 << 30
    """Memory that one compilation may take."""

    compiled_bytes: int = 64 << 20
    """Largest compiled grammar that is taken over from the compiling process."""

    max_num_compiling: int = 2
    """Compilations at one time; the others wait their turn."""

    max_num_waiting: int = 256
    """Compilations that may wait or run; one more is refused for now."""

    max_num_waiting_per_sender: int = 64
    """Compilations of one sender that may wait for their turn; one more is refused for now."""

    max_num_cached: int = 256
    """Compiled grammars, and refusals, that are kept."""

    cache_bytes: int = 256 << 20
    """Memory of the compiled grammars that are kept."""

    token_cpu_s: float = 1.0
    """CPU time that one token may cost one request: to move its parser, or to fill its mask. (The
    dearest mask of an honest grammar measured: 0.3 s, a counted string with 152,000 tokens.)"""

    token_timeout_s: float = 5.0
    """Wall time that a step waits for one request's parser before it gives up on that request."""

    max_num_forced_tokens: int = 64
    """Most tokens of one jump over forced text."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) <= 0:
                raise SettingsError(f"{field.name}: {getattr(self, field.name)} is not positive")
