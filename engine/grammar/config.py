"""GrammarLimits: what one grammar may cost, so that a bomb hurts only its sender. A frozen value;
any thread."""

from __future__ import annotations

from dataclasses import dataclass

from process.settings import PositiveFloat, PositiveInt, check_ranges


@dataclass(frozen=True)
class GrammarLimits:
    """Bounds on grammars. Raises SettingsError for a value that is not positive."""

    max_spec_bytes: PositiveInt = 65_536
    """UTF-8 bytes of one spec, text and choices together."""

    max_num_choices: PositiveInt = 1024
    """Choices of one spec, and values of one `enum`."""

    max_num_levels: PositiveInt = 48
    """Depth of sub-schemas in a schema."""

    max_num_repeats: PositiveInt = 100_000
    """Largest count in a schema: maxLength, maxItems and the like."""

    compile_timeout_s: PositiveFloat = 4.0
    """Wall time of one compilation, from when a compiling process takes it up."""

    compile_bytes: PositiveInt = 256 << 20
    """Memory that one compilation may take."""

    max_num_compile_fuel: PositiveInt = 1_000_000
    """Work on a grammar's terminals when it is compiled, in llguidance's units: 50,000 are 1 ms."""

    max_grammar_size: PositiveInt = 20_000
    """Symbols in the rules of a compiled grammar."""

    max_num_compiling: PositiveInt = 2
    """Compilations at one time; the others wait their turn."""

    max_num_waiting: PositiveInt = 256
    """Compilations that may wait or run; one more is refused for now."""

    max_num_waiting_per_sender: PositiveInt = 64
    """Compilations of one sender that may wait for their turn; one more is refused for now."""

    max_num_cached: PositiveInt = 128
    """Compiled grammars, and refusals, that are kept."""

    cache_bytes: PositiveInt = 256 << 20
    """Memory of the compiled grammars that are kept, as it was when they were compiled."""

    max_num_uses: PositiveInt = 2_000
    """Outputs of one compiled grammar, which learns lexer states from each and keeps them, before
    it is compiled anew."""

    max_num_token_fuel: PositiveInt = 1_000_000
    """Work on terminals for one mask or one token: 14,000 are 1 ms."""

    max_num_token_items: PositiveInt = 3_000
    """Work on rules for one mask or one token: 20,000 are 1 ms."""

    token_cpu_s: PositiveFloat = 0.25
    """CPU time of one mask or one token. Above it a grammar is refused when it is tried out, and an
    output that follows it ends."""

    max_num_lexer_states: PositiveInt = 20_000
    """Lexer states of one compiled grammar, 1 to 2 kB each."""

    mask_wait_s: PositiveFloat = 0.002
    """How long a step waits for masks when other rows have what they need. A row whose mask comes
    later draws in a later step."""

    max_num_forced_tokens: PositiveInt = 64
    """Most tokens of one jump over forced text."""

    def __post_init__(self) -> None:
        check_ranges(self)
