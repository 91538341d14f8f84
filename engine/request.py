"""Request, Sampling, Reservation and other values of the engine's interface, and the states of a
request; the results of a step are in engine/outputs.py. Frozen values: no torch, no RPC. Any thread
may read them.

Life of a request:

1. RESERVED    by `reserve`: it has blocks, which another thread may write; the engine does not
   QUEUED      by `submit`: it waits for blocks, which the engine allocates when its turn comes
2. WAITING_FOR_GRAMMAR  its grammar is being compiled; other requests are not delayed
3. WAITING     it has its blocks, and waits for a place in a step
4. PREFILLING  a step has computed some of its prompt; more is left before its next token
5. RUNNING     it has sampled a token: each step computes one token of it
6. HOLDING     by `hold_after`, or by `detach`: it samples no more, and its blocks stay readable
               until `release`
7. FINISHED    ended, or released: its blocks are freed, full ones stay cached
8. ABORTED     by `abort` from any state, or by an error of its own: its blocks are freed

If blocks are allocated as they are needed (`EngineConfig.preemption`), it can be preempted:

a. PREEMPTED   it has no blocks and waits for new ones; KV that is not cached is recomputed
b. PARKED      as PREEMPTED, but its KV is stored elsewhere (engine/parking.py)
c. SWAPPING    it has blocks again, and its KV is being copied into them; then WAITING

The samples of one request share one state up to the end of the prompt; then each has its own.
FINISHED and ABORTED requests are forgotten: their ids may be reused.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

BlockHasher = Callable[[bytes, Sequence[int]], bytes]
"""(parent chain hash, one full block's token ids) -> chain hash. The parent of the first block is
b""."""


class RequestState(enum.Enum):
    """The state of a request or sample. `ALLOWED` contains the transitions."""

    RESERVED = "reserved"
    QUEUED = "queued"
    WAITING_FOR_GRAMMAR = "waiting_for_grammar"
    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    PREEMPTED = "preempted"
    PARKED = "parked"
    SWAPPING = "swapping"
    HOLDING = "holding"
    FINISHED = "finished"
    ABORTED = "aborted"

    # By identity, as they compare: Enum's own is Python, and is asked for several times a row.
    __hash__ = object.__hash__


_TAKEN = frozenset({RequestState.PREEMPTED, RequestState.PARKED, RequestState.ABORTED})
_OVER = frozenset({RequestState.HOLDING, RequestState.FINISHED})

ALLOWED: dict[RequestState, frozenset[RequestState]] = {
    RequestState.RESERVED: frozenset(
        {RequestState.WAITING_FOR_GRAMMAR, RequestState.WAITING, RequestState.ABORTED}
    ),
    RequestState.QUEUED: frozenset(
        {RequestState.WAITING_FOR_GRAMMAR, RequestState.WAITING, RequestState.ABORTED}
    ),
    RequestState.WAITING_FOR_GRAMMAR: frozenset(
        {RequestState.QUEUED, RequestState.WAITING, RequestState.HOLDING, RequestState.ABORTED}
    ),
    RequestState.WAITING: frozenset({RequestState.PREFILLING, RequestState.HOLDING}) | _TAKEN,
    RequestState.PREFILLING: frozenset({RequestState.RUNNING}) | _OVER | _TAKEN,
    RequestState.RUNNING: _OVER | _TAKEN,
    RequestState.PREEMPTED: frozenset(
        {RequestState.WAITING, RequestState.HOLDING, RequestState.ABORTED}
    ),
    RequestState.PARKED: frozenset(
        {RequestState.SWAPPING, RequestState.HOLDING, RequestState.ABORTED}
    ),
    RequestState.SWAPPING: frozenset(
        {RequestState.WAITING, RequestState.HOLDING, RequestState.ABORTED}
    ),
    RequestState.HOLDING: frozenset({RequestState.FINISHED, RequestState.ABORTED}),
    RequestState.FINISHED: frozenset(),
    RequestState.ABORTED: frozenset(),
}


STARTED = frozenset({RequestState.WAITING, RequestState.PREFILLING, RequestState.RUNNING})
"""States in which a request has blocks and tokens to compute."""

WITHOUT_BLOCKS = frozenset({RequestState.QUEUED, RequestState.PREEMPTED, RequestState.PARKED})
"""States in which a request waits for blocks."""


class FinishReason(enum.Enum):
    """The reason why a sample has no further token."""

    EOS = "eos"
    STOP_TOKEN = "stop_token"
    LENGTH = "length"
    GRAMMAR = "grammar"
    """The grammar is complete: nothing but an end could follow."""
    POLICY = "policy"
    """The engine's stop policy (`StopPolicy`) ended the sample."""

    @property
    def is_token(self) -> bool:
        """Whether a particular token ended the sample."""
        return self in (FinishReason.EOS, FinishReason.STOP_TOKEN)


class GrammarKind(enum.Enum):
    """The language of a GrammarSpec's text."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    CHOICE = "choice"


@dataclass(frozen=True)
class GrammarSpec:
    """A constraint on the output, as the client wrote it. Compiled outside of the engine's
    thread."""

    kind: GrammarKind

    text: str = ""
    """The schema, pattern or grammar; empty for a choice."""

    choices: tuple[str, ...] = ()
    """The complete outputs that are allowed; only for CHOICE."""


@dataclass(frozen=True)
class Beam:
    """The parameters of beam search in place of sampling, as transformers defines them
    (`num_beams`, `length_penalty`, `early_stopping`). The request's best `Request.num_samples`
    hypotheses are its samples."""

    num_beams: int
    """Number of beams: at least 2, and at least `num_samples`."""

    length_penalty: float = 1.0
    """Exponent of the length in a finished hypothesis' score: sum of log probabilities / length **
    length_penalty."""

    early_stopping: bool = False
    """True: end as soon as there are `num_beams` finished hypotheses. False: end when no open beam
    can become better than the worst of them, by transformers' rule."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. The engine checks their ranges at `reserve` and `submit`."""

    max_tokens: int
    """Largest number of output tokens, those sampled by another engine before included. At least
    1."""

    temperature: float = 0.0
    """Divisor of the logits, finite, >= 0; 0: greedy."""

    top_p: float = 1.0
    """Probability mass of the nucleus that is sampled from, in (0, 1]; 1: off."""

    top_k: int = 0
    """Number of most probable tokens that are sampled from; 0: off."""

    min_p: float = 0.0
    """Smallest probability of a token that is sampled, relative to that of the most probable one,
    in [0, 1]; 0: off."""

    min_tokens: int = 0
    """Number of output tokens before which EOS and stop token ids are masked."""

    seed: int = 0
    """Seed of the noise, unsigned 64 bits. The API server always sets it, so that the request can
    be resumed."""

    sample_index: int = 0
    """Index of the request's first sample among the n samples of one prompt; the other samples
    follow it."""

    stop_token_ids: frozenset[int] = frozenset()
    """Tokens whose sampling ends the sample; the token is part of the output."""

    ignore_eos: bool = False
    """Whether EOS is treated as any other token."""

    logprobs: int | None = None
    """Number of most probable tokens whose log probabilities are reported with each token's own, at
    most `MAX_LOGPROBS`; 0: the sampled token's only; None: none."""

    repetition_penalty: float = 1.0
    """Penalty of every token in prompt or output: a positive logit is divided by it, a negative one
    multiplied. > 0; 1: off."""

    presence_penalty: float = 0.0
    """Number subtracted once from the logit of each token in the output. Finite."""

    frequency_penalty: float = 0.0
    """Number subtracted from the logit of a token for each of its occurrences in the output.
    Finite."""

    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, number added to its logit) pairs, no id twice. Finite."""

    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not appear: the last token of each is masked where the tokens
    before it end the text so far (prompt and output together)."""

    allowed_token_ids: frozenset[int] | None = None
    """The only tokens that may be sampled; None: all."""

    no_repeat_ngram: int = 0
    """Number of tokens of n-grams that must not appear twice in prompt and output together. At most
    64; 0: off."""

    grammar: GrammarSpec | None = None
    """The grammar of the output; None: unconstrained."""

    trace: bool = False
    """Whether a `SampleTrace` is reported with every token."""


MAX_LOGPROBS = 64


@dataclass(frozen=True)
class Request:
    """One prompt, and the parameters of its processing."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling

    block_hasher: BlockHasher
    """Computes the chain hash of a full block. It is keyed by `cache_root`, which separates tenants
    in the prefix cache."""

    cache_root: bytes = b""
    """The key of `block_hasher`. Two requests share blocks only if it is equal."""

    hold_after: int | None = None
    """Number of output tokens in all at which the request is HOLDING, as it also is when it
    finishes before: its blocks stay until `release`. Prefill workers set 1. None: run to the end
    and free the blocks."""

    priority: int = 0
    """Priority of admission: higher first, unless the engine's policy is "fcfs"; equal ones in
    order of `start` or `submit`. The lowest is preempted first."""

    num_samples: int = 1
    """Number of samples of this prompt, with sample indices from `sampling.sample_index` on. They
    share the prompt's blocks."""

    beam: Beam | None = None
    """Beam search in place of sampling; None: sampling."""

    adapter: str = ""
    """Name of a loaded LoRA adapter; empty: none. `cache_root` must depend on the adapter's digest:
    the engine rejects a root that was used with another adapter."""

    prompt_hashes: tuple[bytes, ...] = ()
    """Chain hashes of the prompt's first full blocks, as `block_hasher` computes them, if the
    caller has them, to save the engine's thread the time. They are not checked."""

    wants_embedding: bool = False
    """Whether the prompt's embedding is reported with the first token, which is then meaningless.
    One sample, no beams."""

    prompt_logprobs: int | None = None
    """Number of most probable tokens whose log probabilities are reported with those of each prompt
    token, with the outputs of the prompt's chunks; at most `MAX_LOGPROBS`; None: none. The whole
    prompt is computed, without cached prefixes. No beams."""

    owner: str = ""
    """The account that bytes of this request outside of the engine (parked blocks) are charged to.
    The engine passes it on and does not read it."""

    token_id_range: tuple[int, int] = field(init=False, repr=False, compare=False)
    """(smallest, greatest) token id of the prompt; (0, 0) of an empty one. Computed when the
    request is created, to save the engine's thread the time."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_id_range", _range_of(self.prompt_token_ids))


def _range_of(token_ids: Sequence[int]) -> tuple[int, int]:
    if not token_ids:
        return 0, 0
    try:
        column = np.asarray(array("I", token_ids))
    except (OverflowError, TypeError):  # not from a wire: whoever admits it says what is wrong
        return min(token_ids), max(token_ids)
    return int(column.min()), int(column.max())


@dataclass(frozen=True)
class Reservation:
    """Blocks allocated for a request: all that it may need, or, if the engine preempts
    (`EngineConfig.preemption`) and the request does not hold, those of its prompt."""

    request_id: str

    block_ids: tuple[int, ...]
    """The block of tokens [i * block_size, (i + 1) * block_size) is block_ids[i]; if there are
    several samples, of the first one."""

    num_local_tokens: int
    """Number of prompt tokens whose KV is in the device cache already: a multiple of block_size, at
    most num_prompt - 1."""

    chain_hashes: tuple[bytes, ...]
    """Chain hashes of the prompt's full blocks."""


@dataclass(frozen=True)
class DetachedRequest:
    """The state of a request at `detach`, for the engine that continues it."""

    token_ids: tuple[int, ...]
    """The tokens of prompt and output."""

    num_computed_tokens: int
    """Number of first tokens whose KV lies in `block_ids`: all but the last one for a request that
    was decoding, fewer before that."""

    block_ids: tuple[int, ...]
    """The blocks with the KV; the last one may be unfilled."""

    chain_hashes: tuple[bytes, ...]
    """Chain hashes of the full blocks among them."""


@dataclass(frozen=True)
class StopView:
    """The state of one sample after one of its tokens, for a stop policy."""

    request_id: str
    sample_index: int
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]


StopPolicy = Callable[[StopView], bool]
"""Returns True to end the sample (FinishReason.POLICY). Called on the engine's thread after each
token: it must be fast. An exception ends the request with PolicyFailed."""


@dataclass(frozen=True)
class ModelInfo:
    """The properties of the loaded model. Two engines may exchange KV only if `fingerprint` is
    equal."""

    model: str
    model_type: str

    fingerprint: str
    """Hex digest over weights, config, tokenizer, KV dtype and layout (engine/models/loader.py)."""

    tokenizer_digest: str
    dtype: str
    context_window: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    block_size: int
    num_blocks: int
    device: str

    linear: str
    """How linear layers are computed: "packed" (oneDNN, reordered at load) or "plain" (F.linear),
    with the reason."""

    fused: tuple[str, ...]
    """Descriptions of the layers that were fused after loading."""

    num_parameters: int
    weight_bytes: int

    decoder: str = ""
    """The implementation of the model: "own" (engine/models/llama.py), or "transformers" with the
    reason."""

    gives_embeddings: bool = False
    """Whether requests may ask for an embedding."""

    step_bytes: int = 0
    """Bytes of device memory that the largest step needs in addition to weights and cache, as
    measured at start; 0: not measured."""

    seconds: tuple[tuple[str, float], ...] = ()
    """(phase of the start, its duration in seconds) pairs."""
