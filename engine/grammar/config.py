"""GrammarLimits: limits of one grammar's cost, so that an expensive grammar affects its sender
only. A frozen value; any thread."""

from __future__ import annotations

from dataclasses import dataclass

from process.settings import PositiveFloat, PositiveInt, check_ranges


@dataclass(frozen=True)
class GrammarLimits:
    """Limits of grammars. Raises SettingsError for a value that is not positive."""

    max_spec_bytes: PositiveInt = 65_536
    """Largest size of one specification in bytes of UTF-8, text and choices together."""

    max_num_choices: PositiveInt = 1024
    """Largest number of choices of one specification, and of values of one `enum`."""

    max_num_levels: PositiveInt = 48
    """Largest depth of sub-schemas in a schema."""

    max_num_repeats: PositiveInt = 100_000
    """Largest count in a schema: maxLength, maxItems and the like."""

    compile_timeout_s: PositiveFloat = 4.0
    """Longest wall time of one compilation in seconds, from when a compiling process begins it."""

    compile_bytes: PositiveInt = 256 << 20
    """Largest memory of one compilation in bytes."""

    max_num_compile_fuel: PositiveInt = 1_000_000
    """Largest work on a grammar's terminals when it is compiled, in llguidance's units: 50,000 are
    1 ms."""

    max_grammar_size: PositiveInt = 20_000
    """Largest number of symbols in the rules of a compiled grammar."""

    max_num_compiling: PositiveInt = 2
    """Largest number of concurrent compilations; others wait."""

    max_num_waiting: PositiveInt = 256
    """Largest number of compilations that wait or run; a further one is rejected with
    GrammarBusy."""

    max_num_waiting_per_sender: PositiveInt = 64
    """Largest number of waiting compilations of one sender; a further one is rejected with
    GrammarBusy."""

    max_num_cached: PositiveInt = 128
    """Largest number of cached results: compiled grammars and rejections."""

    cache_bytes: PositiveInt = 256 << 20
    """Largest memory in bytes of the cached compiled grammars, as measured when they were
    compiled."""

    max_num_uses: PositiveInt = 2_000
    """Number of outputs of one compiled grammar before it is compiled again, since it stores lexer
    states of each."""

    max_num_token_fuel: PositiveInt = 1_000_000
    """Largest work on terminals for one mask or one token, in llguidance's units: 14,000 are 1
    ms."""

    max_num_token_items: PositiveInt = 3_000
    """Largest work on rules for one mask or one token, in llguidance's units: 20,000 are 1 ms."""

    token_cpu_s: PositiveFloat = 0.25
    """Longest CPU time in seconds of one mask or one token. A grammar that exceeds it when it is
    compiled is rejected, and an output that exceeds it ends with an error."""

    max_num_lexer_states: PositiveInt = 20_000
    """Largest number of lexer states of one compiled grammar, 1 to 2 kB each."""

    mask_wait_s: PositiveFloat = 0.002
    """Longest time in seconds that a step waits for masks while other rows are ready. A row whose
    mask comes later samples in a later step."""

    max_num_forced_tokens: PositiveInt = 64
    """Largest number of tokens that are added at once for forced text."""

    def __post_init__(self) -> None:
        check_ranges(self)
