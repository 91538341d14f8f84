"""The values that cross the engine's surface: what is asked (Request, Sampling), what is promised
(Reservation), and the states of a request; the results of a step are in engine/outputs.py. Plain
frozen values: no torch, no RPC. Any thread may read them.

Life of a request (each arrow is one call or one step):

1. RESERVED    `reserve`: blocks are taken; another thread may write them, the engine does not
   QUEUED      or `submit`: it waits for blocks, which the engine takes when its turn comes
2. WAITING_FOR_GRAMMAR  its grammar is being compiled elsewhere; others pass it
3. WAITING     its blocks are there, its computed length is known: it waits for room in a step
4. PREFILLING  a step has given it tokens; more are left before its next draw
5. RUNNING     it has drawn: from here on one token a step
6. HOLDING     with `hold_after`, or by `hold`, which takes it out as it stands: it draws no more,
               its blocks stay readable until `release`
7. FINISHED    ended by itself, or released: blocks are back in the pool, full ones stay cached
8. ABORTED     `abort` from any state, or an error of its own: blocks are back in the pool

Where blocks are taken as they are needed (`EngineConfig.preemption`), others may need them more:

a. PREEMPTED   its blocks are gone; it waits for new ones, and what is not cached is computed again
b. PARKED      ... its bytes lie elsewhere (engine/parking.py); it waits for blocks
c. SWAPPING    it has blocks again and its bytes are on their way into them; then WAITING

The samples of one request share a life up to the prompt's end; from there on each has its own.
FINISHED and ABORTED requests are forgotten: their ids may be used again.
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


class State(enum.Enum):
    """Where a request is. `ALLOWED` holds the transitions."""

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


_TAKEN = frozenset({State.PREEMPTED, State.PARKED, State.ABORTED})
_OVER = frozenset({State.HOLDING, State.FINISHED})

ALLOWED: dict[State, frozenset[State]] = {
    State.RESERVED: frozenset({State.WAITING_FOR_GRAMMAR, State.WAITING, State.ABORTED}),
    State.QUEUED: frozenset({State.WAITING_FOR_GRAMMAR, State.WAITING, State.ABORTED}),
    State.WAITING_FOR_GRAMMAR: frozenset(
        {State.QUEUED, State.WAITING, State.HOLDING, State.ABORTED}
    ),
    State.WAITING: frozenset({State.PREFILLING, State.HOLDING}) | _TAKEN,
    State.PREFILLING: frozenset({State.RUNNING}) | _OVER | _TAKEN,
    State.RUNNING: _OVER | _TAKEN,
    State.PREEMPTED: frozenset({State.WAITING, State.HOLDING, State.ABORTED}),
    State.PARKED: frozenset({State.SWAPPING, State.HOLDING, State.ABORTED}),
    State.SWAPPING: frozenset({State.WAITING, State.HOLDING, State.ABORTED}),
    State.HOLDING: frozenset({State.FINISHED, State.ABORTED}),
    State.FINISHED: frozenset(),
    State.ABORTED: frozenset(),
}


STARTED = frozenset({State.WAITING, State.PREFILLING, State.RUNNING})
"""States in which a request has blocks and tokens to compute."""

WITHOUT_BLOCKS = frozenset({State.QUEUED, State.PREEMPTED, State.PARKED})
"""States in which a request waits for blocks."""


class FinishReason(enum.Enum):
    """Why the engine drew no further token."""

    EOS = "eos"
    STOP_TOKEN = "stop_token"
    LENGTH = "length"
    GRAMMAR = "grammar"
    """The grammar is complete: nothing but an end could follow."""
    POLICY = "policy"
    """The engine's stop policy ended it (a `StopPolicy`, given by whoever builds the engine)."""

    @property
    def is_token(self) -> bool:
        """A particular token ended the request."""
        return self in (FinishReason.EOS, FinishReason.STOP_TOKEN)


class GrammarKind(enum.Enum):
    """What a GrammarSpec's text is written in."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    CHOICE = "choice"


@dataclass(frozen=True)
class GrammarSpec:
    """What an output must look like, as the client wrote it. Compiled off the engine's thread."""

    kind: GrammarKind

    text: str = ""
    """The schema, pattern or grammar; empty for a choice."""

    choices: tuple[str, ...] = ()
    """The whole outputs that are allowed; only for CHOICE."""


@dataclass(frozen=True)
class Beam:
    """Beam search instead of draws, as transformers defines it (`num_beams`, `length_penalty`,
    `early_stopping`). The request's best `Request.num_samples` hypotheses are its samples."""

    num_beams: int
    """At least 2, and at least `num_samples`."""

    length_penalty: float = 1.0
    """A finished hypothesis' score is its sum of log probabilities / length ** length_penalty."""

    early_stopping: bool = False
    """True: end as soon as there are `num_beams` finished hypotheses. False: end when no open beam
    can become better than the worst of them, by transformers' rule."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Ranges are checked by the engine at `reserve`."""

    max_tokens: int
    """Most output tokens, tokens drawn by an earlier leg included. At least 1."""

    temperature: float = 0.0
    """0 is greedy. Finite, >= 0."""

    top_p: float = 1.0
    """In (0, 1]."""

    top_k: int = 0
    """0: off."""

    min_p: float = 0.0
    """In [0, 1]; 0: off."""

    min_tokens: int = 0
    """EOS and stop token ids are masked until there are this many output tokens."""

    seed: int = 0
    """Unsigned 64 bits. Always set by the edge, so that the request can be resumed."""

    sample_index: int = 0
    """Which of the n samples of one prompt the request's first one is; the others count on."""

    stop_token_ids: frozenset[int] = frozenset()
    """Drawing one of these ends the request; the token is reported."""

    ignore_eos: bool = False
    """EOS is a token like any other."""

    logprobs: int | None = None
    """None: none. 0: of the chosen token. k: of the k best beside it. At most `MAX_LOGPROBS`."""

    repetition_penalty: float = 1.0
    """Of every token in prompt or output: a positive logit is divided by it, a negative one
    multiplied. > 0; 1: off."""

    presence_penalty: float = 0.0
    """Taken once from the logit of each token in the output. Finite."""

    frequency_penalty: float = 0.0
    """Taken from the logit of a token as often as the output has it. Finite."""

    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit), no id twice. Finite values."""

    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token id sequences that shall not appear: the last id of each is masked where the ids before
    it end the output so far (prompt and output together are looked at)."""

    allowed_token_ids: frozenset[int] | None = None
    """None: all. Otherwise every other token is masked."""

    no_repeat_ngram: int = 0
    """No n-gram of this many tokens appears twice in prompt and output together. At most 64; 0:
    off."""

    grammar: GrammarSpec | None = None
    """What the output must look like."""

    trace: bool = False
    """Report a `SampleTrace` with every token."""


MAX_LOGPROBS = 64


@dataclass(frozen=True)
class Request:
    """One prompt, and what is asked for it."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling

    block_hasher: BlockHasher
    """Makes the chain hash of a full block. Keyed by `cache_root`: that is what separates tenants
    in the prefix cache."""

    cache_root: bytes = b""
    """The root key that `block_hasher` is keyed with. Two requests share blocks only if it is
    equal."""

    hold_after: int | None = None
    """HOLD once this many output tokens were drawn in all, or when it finishes before: blocks stay
    until `release`. The prefill role asks for 1. None: run to the end and give the blocks back."""

    priority: int = 0
    """Higher first among those that wait for room, unless the engine's policy is "fcfs"; equal ones
    in order of `start` or `submit`. The lowest is preempted first."""

    num_samples: int = 1
    """Samples of this prompt, drawn with sample indices `sampling.sample_index` and on. They share
    the prompt's blocks."""

    beam: Beam | None = None
    """Beam search instead of draws."""

    adapter: str = ""
    """Name of a loaded LoRA adapter; empty: the model as it is. `cache_root` must differ by the
    adapter's digest: the engine refuses a root it has seen with another adapter."""

    prompt_hashes: tuple[bytes, ...] = ()
    """Chain hashes of the prompt's first full blocks, as `block_hasher` makes them, where the
    caller has them: the engine's thread then need not. Believed."""

    wants_embedding: bool = False
    """Report the prompt's embedding with its first token, which means nothing. One sample, no
    beams."""

    prompt_logprobs: int | None = None
    """None: none. k: report log probabilities of the prompt's own tokens with the events of its
    chunks, and the k best beside each; at most `MAX_LOGPROBS`. Each token's place is computed for
    it: of a cached prefix nothing is used. No beams."""

    owner: str = ""
    """Whom bytes of this request that leave the engine (parked blocks, pages of draft models) are
    charged to. The engine passes it on and does not read it."""

    token_id_range: tuple[int, int] = field(init=False, repr=False, compare=False)
    """(least, greatest) token id of the prompt; (0, 0) of an empty one. Looked for by whoever makes
    the request, so that the engine's thread, for which all streams wait, need not."""

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
    """Blocks taken for a request: enough for all it may ever compute, or for its prompt where the
    engine preempts (`EngineConfig.preemption`) and the request does not hold."""

    request_id: str

    block_ids: tuple[int, ...]
    """Tokens [i * block_size, (i + 1) * block_size) lie in block_ids[i]; of the first sample where
    there are several."""

    num_local_tokens: int
    """Prompt tokens whose KV is in the device cache already: a multiple of block_size, at most
    num_prompt - 1."""

    chain_hashes: tuple[bytes, ...]
    """Of the prompt's full blocks."""


@dataclass(frozen=True)
class DetachedRequest:
    """What a request had when it was detached, for the engine that continues it."""

    token_ids: tuple[int, ...]
    """Prompt and output."""

    num_computed_tokens: int
    """Tokens, from the first one on, whose KV lies in `block_ids` and can be taken over: all but
    the last one for a request that was decoding, fewer for one that was not there yet."""

    block_ids: tuple[int, ...]
    """The blocks with their KV; the last one may be unfilled."""

    chain_hashes: tuple[bytes, ...]
    """Chain hashes of the full ones among them."""


@dataclass(frozen=True)
class StopView:
    """What a stop policy sees of one sample after each of its tokens."""

    request_id: str
    sample_index: int
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]


StopPolicy = Callable[[StopView], bool]
"""True: end this sample here (FinishReason.POLICY). Called on the engine's thread after each token:
it must be quick. An exception ends that request with PolicyFailed."""


@dataclass(frozen=True)
class ModelInfo:
    """What others must know of the loaded model. Two engines may exchange KV only if `fingerprint`
    is equal."""

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
    """How linear layers run: "packed" (oneDNN, reordered once at load) or "plain" (F.linear), with
    the reason."""

    fused: tuple[str, ...]
    """What was fused after loading."""

    num_parameters: int
    weight_bytes: int

    decoder: str = ""
    """Whose code computes it: "own" (engine/models/llama.py), or "transformers" with the reason."""

    gives_embeddings: bool = False
    """Whether requests may ask for an embedding."""

    step_bytes: int = 0
    """What the largest step needs on the device beside weights and cache, as measured at start; 0:
    not measured."""

    seconds: tuple[tuple[str, float], ...] = ()
    """(phase of the start, how long it took), up to ready."""
