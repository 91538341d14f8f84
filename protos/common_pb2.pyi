from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_EOS: _ClassVar[FinishReason]
    FINISH_REASON_STOP_TOKEN: _ClassVar[FinishReason]
    FINISH_REASON_STOP_STRING: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]
    FINISH_REASON_GRAMMAR: _ClassVar[FinishReason]
    FINISH_REASON_POLICY: _ClassVar[FinishReason]
    FINISH_REASON_TOOL_CALL: _ClassVar[FinishReason]

class HandoverPath(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HANDOVER_PATH_UNSPECIFIED: _ClassVar[HandoverPath]
    HANDOVER_PATH_STORE: _ClassVar[HandoverPath]
    HANDOVER_PATH_DIRECT: _ClassVar[HandoverPath]

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_DEVICE: _ClassVar[Tier]
    TIER_HOST: _ClassVar[Tier]
    TIER_FILE: _ClassVar[Tier]
    TIER_OBJECT: _ClassVar[Tier]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_EOS: FinishReason
FINISH_REASON_STOP_TOKEN: FinishReason
FINISH_REASON_STOP_STRING: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CANCELLED: FinishReason
FINISH_REASON_GRAMMAR: FinishReason
FINISH_REASON_POLICY: FinishReason
FINISH_REASON_TOOL_CALL: FinishReason
HANDOVER_PATH_UNSPECIFIED: HandoverPath
HANDOVER_PATH_STORE: HandoverPath
HANDOVER_PATH_DIRECT: HandoverPath
TIER_UNSPECIFIED: Tier
TIER_DEVICE: Tier
TIER_HOST: Tier
TIER_FILE: Tier
TIER_OBJECT: Tier

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "seed", "stop_token_ids", "stop", "include_stop_text", "ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "n", "logprobs", "json_schema", "regex", "ebnf", "choice", "trace", "bad_words", "bad_word_ids", "no_repeat_ngram", "stop_at_tool_call", "beam")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_TEXT_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    EBNF_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORD_IDS_FIELD_NUMBER: _ClassVar[int]
    NO_REPEAT_NGRAM_FIELD_NUMBER: _ClassVar[int]
    STOP_AT_TOOL_CALL_FIELD_NUMBER: _ClassVar[int]
    BEAM_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_tokens: int
    min_tokens: int
    seed: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    stop: _containers.RepeatedScalarFieldContainer[str]
    include_stop_text: bool
    ignore_eos: bool
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    n: int
    logprobs: int
    json_schema: str
    regex: str
    ebnf: str
    choice: StringList
    trace: bool
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    bad_word_ids: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    no_repeat_ngram: int
    stop_at_tool_call: bool
    beam: BeamParams
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., seed: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., stop: _Optional[_Iterable[str]] = ..., include_stop_text: bool = ..., ignore_eos: bool = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., n: _Optional[int] = ..., logprobs: _Optional[int] = ..., json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., ebnf: _Optional[str] = ..., choice: _Optional[_Union[StringList, _Mapping]] = ..., trace: bool = ..., bad_words: _Optional[_Iterable[str]] = ..., bad_word_ids: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., no_repeat_ngram: _Optional[int] = ..., stop_at_tool_call: bool = ..., beam: _Optional[_Union[BeamParams, _Mapping]] = ...) -> None: ...

class StringList(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, values: _Optional[_Iterable[str]] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class BeamParams(_message.Message):
    __slots__ = ("num_beams", "length_penalty", "early_stopping")
    NUM_BEAMS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOPPING_FIELD_NUMBER: _ClassVar[int]
    num_beams: int
    length_penalty: float
    early_stopping: bool
    def __init__(self, num_beams: _Optional[int] = ..., length_penalty: _Optional[float] = ..., early_stopping: bool = ...) -> None: ...

class BlockRef(_message.Message):
    __slots__ = ("chain_hash", "frame", "generation", "checksum", "num_tokens", "tier")
    CHAIN_HASH_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    chain_hash: bytes
    frame: int
    generation: int
    checksum: int
    num_tokens: int
    tier: Tier
    def __init__(self, chain_hash: _Optional[bytes] = ..., frame: _Optional[int] = ..., generation: _Optional[int] = ..., checksum: _Optional[int] = ..., num_tokens: _Optional[int] = ..., tier: _Optional[_Union[Tier, str]] = ...) -> None: ...

class BlockRun(_message.Message):
    __slots__ = ("node_id", "store_address", "store_incarnation", "lease_id", "first_block", "blocks")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STORE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    store_address: str
    store_incarnation: bytes
    lease_id: str
    first_block: int
    blocks: bytes
    def __init__(self, node_id: _Optional[str] = ..., store_address: _Optional[str] = ..., store_incarnation: _Optional[bytes] = ..., lease_id: _Optional[str] = ..., first_block: _Optional[int] = ..., blocks: _Optional[bytes] = ...) -> None: ...

class PrefixRun(_message.Message):
    __slots__ = ("node_id", "store_address", "store_incarnation", "first_block", "num_blocks")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STORE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    store_address: str
    store_incarnation: bytes
    first_block: int
    num_blocks: int
    def __init__(self, node_id: _Optional[str] = ..., store_address: _Optional[str] = ..., store_incarnation: _Optional[bytes] = ..., first_block: _Optional[int] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class LinkStatus(_message.Message):
    __slots__ = ("node_id", "store_address", "transport", "write_bytes_per_s", "read_bytes_per_s", "latency_s", "floor_bytes_per_s", "degraded", "problem", "measured_unix_ms")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    WRITE_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    FLOOR_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    MEASURED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    store_address: str
    transport: str
    write_bytes_per_s: float
    read_bytes_per_s: float
    latency_s: float
    floor_bytes_per_s: float
    degraded: bool
    problem: str
    measured_unix_ms: int
    def __init__(self, node_id: _Optional[str] = ..., store_address: _Optional[str] = ..., transport: _Optional[str] = ..., write_bytes_per_s: _Optional[float] = ..., read_bytes_per_s: _Optional[float] = ..., latency_s: _Optional[float] = ..., floor_bytes_per_s: _Optional[float] = ..., degraded: bool = ..., problem: _Optional[str] = ..., measured_unix_ms: _Optional[int] = ...) -> None: ...

class KvHandle(_message.Message):
    __slots__ = ("version", "request_id", "tenant", "model_fingerprint", "producer_id", "producer_incarnation", "block_size", "num_tokens", "runs", "tail", "deadline_unix_ms", "key_id", "signature", "adapter", "nonce", "is_partial")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_ID_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    TAIL_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    IS_PARTIAL_FIELD_NUMBER: _ClassVar[int]
    version: int
    request_id: str
    tenant: str
    model_fingerprint: bytes
    producer_id: str
    producer_incarnation: bytes
    block_size: int
    num_tokens: int
    runs: _containers.RepeatedCompositeFieldContainer[BlockRun]
    tail: BlockRun
    deadline_unix_ms: int
    key_id: str
    signature: bytes
    adapter: str
    nonce: bytes
    is_partial: bool
    def __init__(self, version: _Optional[int] = ..., request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., model_fingerprint: _Optional[bytes] = ..., producer_id: _Optional[str] = ..., producer_incarnation: _Optional[bytes] = ..., block_size: _Optional[int] = ..., num_tokens: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[BlockRun, _Mapping]]] = ..., tail: _Optional[_Union[BlockRun, _Mapping]] = ..., deadline_unix_ms: _Optional[int] = ..., key_id: _Optional[str] = ..., signature: _Optional[bytes] = ..., adapter: _Optional[str] = ..., nonce: _Optional[bytes] = ..., is_partial: bool = ...) -> None: ...

class StageTime(_message.Message):
    __slots__ = ("stage", "seconds")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    stage: str
    seconds: float
    def __init__(self, stage: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class TierCount(_message.Message):
    __slots__ = ("tier", "node_id", "num_tokens", "num_bytes", "transport")
    TIER_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    tier: Tier
    node_id: str
    num_tokens: int
    num_bytes: int
    transport: str
    def __init__(self, tier: _Optional[_Union[Tier, str]] = ..., node_id: _Optional[str] = ..., num_tokens: _Optional[int] = ..., num_bytes: _Optional[int] = ..., transport: _Optional[str] = ...) -> None: ...

class TransportCount(_message.Message):
    __slots__ = ("transport", "num_bytes_read", "num_bytes_written")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_READ_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    transport: str
    num_bytes_read: int
    num_bytes_written: int
    def __init__(self, transport: _Optional[str] = ..., num_bytes_read: _Optional[int] = ..., num_bytes_written: _Optional[int] = ...) -> None: ...

class TenantUsage(_message.Message):
    __slots__ = ("tenant", "num_blocks", "num_blocks_guaranteed")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_GUARANTEED_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    num_blocks: int
    num_blocks_guaranteed: int
    def __init__(self, tenant: _Optional[str] = ..., num_blocks: _Optional[int] = ..., num_blocks_guaranteed: _Optional[int] = ...) -> None: ...

class RecomputeCount(_message.Message):
    __slots__ = ("reason", "num_blocks")
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    num_blocks: int
    def __init__(self, reason: _Optional[str] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class KvLeg(_message.Message):
    __slots__ = ("role", "worker_id", "incarnation", "transport", "dtype", "num_tokens_computed", "num_tokens_local", "from_store", "num_bytes_read", "num_bytes_written", "recomputed", "not_stored", "num_tokens_early", "num_blocks_written_back", "handover", "num_tokens_direct", "num_blocks_behind", "transports", "ended_by")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_LOCAL_FIELD_NUMBER: _ClassVar[int]
    FROM_STORE_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_READ_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_FIELD_NUMBER: _ClassVar[int]
    NOT_STORED_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_EARLY_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_WRITTEN_BACK_FIELD_NUMBER: _ClassVar[int]
    HANDOVER_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_DIRECT_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_BEHIND_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    ENDED_BY_FIELD_NUMBER: _ClassVar[int]
    role: str
    worker_id: str
    incarnation: str
    transport: str
    dtype: str
    num_tokens_computed: int
    num_tokens_local: int
    from_store: _containers.RepeatedCompositeFieldContainer[TierCount]
    num_bytes_read: int
    num_bytes_written: int
    recomputed: _containers.RepeatedCompositeFieldContainer[RecomputeCount]
    not_stored: _containers.RepeatedCompositeFieldContainer[RecomputeCount]
    num_tokens_early: int
    num_blocks_written_back: int
    handover: HandoverPath
    num_tokens_direct: int
    num_blocks_behind: int
    transports: _containers.RepeatedCompositeFieldContainer[TransportCount]
    ended_by: str
    def __init__(self, role: _Optional[str] = ..., worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., transport: _Optional[str] = ..., dtype: _Optional[str] = ..., num_tokens_computed: _Optional[int] = ..., num_tokens_local: _Optional[int] = ..., from_store: _Optional[_Iterable[_Union[TierCount, _Mapping]]] = ..., num_bytes_read: _Optional[int] = ..., num_bytes_written: _Optional[int] = ..., recomputed: _Optional[_Iterable[_Union[RecomputeCount, _Mapping]]] = ..., not_stored: _Optional[_Iterable[_Union[RecomputeCount, _Mapping]]] = ..., num_tokens_early: _Optional[int] = ..., num_blocks_written_back: _Optional[int] = ..., handover: _Optional[_Union[HandoverPath, str]] = ..., num_tokens_direct: _Optional[int] = ..., num_blocks_behind: _Optional[int] = ..., transports: _Optional[_Iterable[_Union[TransportCount, _Mapping]]] = ..., ended_by: _Optional[str] = ...) -> None: ...

class Provenance(_message.Message):
    __slots__ = ("num_prompt_tokens", "legs", "model", "model_fingerprint", "adapter_digest")
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEGS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    num_prompt_tokens: int
    legs: _containers.RepeatedCompositeFieldContainer[KvLeg]
    model: str
    model_fingerprint: str
    adapter_digest: str
    def __init__(self, num_prompt_tokens: _Optional[int] = ..., legs: _Optional[_Iterable[_Union[KvLeg, _Mapping]]] = ..., model: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., adapter_digest: _Optional[str] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("num_prompt_tokens", "num_output_tokens", "num_cached_tokens")
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    def __init__(self, num_prompt_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("chosen", "top")
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    chosen: TokenLogprob
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, chosen: _Optional[_Union[TokenLogprob, _Mapping]] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class StepTrace(_message.Message):
    __slots__ = ("position", "token_id", "raw_logprob", "processed_logprob", "top", "support_size", "processors", "rng_key", "is_forced")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    RAW_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    PROCESSED_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    SUPPORT_SIZE_FIELD_NUMBER: _ClassVar[int]
    PROCESSORS_FIELD_NUMBER: _ClassVar[int]
    RNG_KEY_FIELD_NUMBER: _ClassVar[int]
    IS_FORCED_FIELD_NUMBER: _ClassVar[int]
    position: int
    token_id: int
    raw_logprob: float
    processed_logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    support_size: int
    processors: _containers.RepeatedScalarFieldContainer[str]
    rng_key: int
    is_forced: bool
    def __init__(self, position: _Optional[int] = ..., token_id: _Optional[int] = ..., raw_logprob: _Optional[float] = ..., processed_logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., support_size: _Optional[int] = ..., processors: _Optional[_Iterable[str]] = ..., rng_key: _Optional[int] = ..., is_forced: bool = ...) -> None: ...

class BeamCandidate(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class AdapterStatus(_message.Message):
    __slots__ = ("name", "digest", "rank", "num_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    rank: int
    num_bytes: int
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., rank: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "folder", "hold_ms", "version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    HOLD_MS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    folder: str
    hold_ms: int
    version: int
    def __init__(self, name: _Optional[str] = ..., folder: _Optional[str] = ..., hold_ms: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class LoadAdapterReply(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: AdapterStatus
    def __init__(self, adapter: _Optional[_Union[AdapterStatus, _Mapping]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class UnloadAdapterReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AdapterVersion(_message.Message):
    __slots__ = ("digest", "folder")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    digest: str
    folder: str
    def __init__(self, digest: _Optional[str] = ..., folder: _Optional[str] = ...) -> None: ...

class AdapterWish(_message.Message):
    __slots__ = ("name", "model", "version", "current", "old", "changed_unix_ms")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CURRENT_FIELD_NUMBER: _ClassVar[int]
    OLD_FIELD_NUMBER: _ClassVar[int]
    CHANGED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    name: str
    model: str
    version: int
    current: AdapterVersion
    old: _containers.RepeatedCompositeFieldContainer[AdapterVersion]
    changed_unix_ms: int
    def __init__(self, name: _Optional[str] = ..., model: _Optional[str] = ..., version: _Optional[int] = ..., current: _Optional[_Union[AdapterVersion, _Mapping]] = ..., old: _Optional[_Iterable[_Union[AdapterVersion, _Mapping]]] = ..., changed_unix_ms: _Optional[int] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("worker_id", "role", "address", "incarnation", "model", "model_fingerprint", "tokenizer_digest", "dtype", "device", "block_size", "block_bytes", "num_blocks", "num_free_blocks", "num_cached_blocks", "num_quarantined_blocks", "num_waiting", "num_running", "num_holding", "context_window", "vocab_size", "transport", "store_node_id", "store_address", "num_prompt_tokens_computed", "num_prompt_tokens_local", "num_prompt_tokens_from_store", "num_output_tokens", "recomputed", "draining", "integrity_error", "adapters", "num_prefix_tokens_asked", "num_prefix_tokens_cached", "metrics_address", "links", "remote_transport", "lender_node_id", "num_lent_blocks", "num_queued_tokens", "num_step_tokens", "direct_transport", "num_steps", "step_s", "num_computed_tokens", "num_decode_tokens", "step_age_s", "num_free_places")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUARANTINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_HOLDING_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_WINDOW_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    STORE_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_LOCAL_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FROM_STORE_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    INTEGRITY_ERROR_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_TOKENS_ASKED_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_TOKENS_CACHED_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    REMOTE_TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    LENDER_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_LENT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIRECT_TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_AGE_S_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_PLACES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: str
    address: str
    incarnation: str
    model: str
    model_fingerprint: str
    tokenizer_digest: str
    dtype: str
    device: str
    block_size: int
    block_bytes: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_quarantined_blocks: int
    num_waiting: int
    num_running: int
    num_holding: int
    context_window: int
    vocab_size: int
    transport: str
    store_node_id: str
    store_address: str
    num_prompt_tokens_computed: int
    num_prompt_tokens_local: int
    num_prompt_tokens_from_store: int
    num_output_tokens: int
    recomputed: _containers.RepeatedCompositeFieldContainer[RecomputeCount]
    draining: bool
    integrity_error: str
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterStatus]
    num_prefix_tokens_asked: int
    num_prefix_tokens_cached: int
    metrics_address: str
    links: _containers.RepeatedCompositeFieldContainer[LinkStatus]
    remote_transport: str
    lender_node_id: str
    num_lent_blocks: int
    num_queued_tokens: int
    num_step_tokens: int
    direct_transport: str
    num_steps: int
    step_s: float
    num_computed_tokens: int
    num_decode_tokens: int
    step_age_s: float
    num_free_places: int
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[str] = ..., address: _Optional[str] = ..., incarnation: _Optional[str] = ..., model: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., tokenizer_digest: _Optional[str] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., block_size: _Optional[int] = ..., block_bytes: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., num_quarantined_blocks: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_running: _Optional[int] = ..., num_holding: _Optional[int] = ..., context_window: _Optional[int] = ..., vocab_size: _Optional[int] = ..., transport: _Optional[str] = ..., store_node_id: _Optional[str] = ..., store_address: _Optional[str] = ..., num_prompt_tokens_computed: _Optional[int] = ..., num_prompt_tokens_local: _Optional[int] = ..., num_prompt_tokens_from_store: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., recomputed: _Optional[_Iterable[_Union[RecomputeCount, _Mapping]]] = ..., draining: bool = ..., integrity_error: _Optional[str] = ..., adapters: _Optional[_Iterable[_Union[AdapterStatus, _Mapping]]] = ..., num_prefix_tokens_asked: _Optional[int] = ..., num_prefix_tokens_cached: _Optional[int] = ..., metrics_address: _Optional[str] = ..., links: _Optional[_Iterable[_Union[LinkStatus, _Mapping]]] = ..., remote_transport: _Optional[str] = ..., lender_node_id: _Optional[str] = ..., num_lent_blocks: _Optional[int] = ..., num_queued_tokens: _Optional[int] = ..., num_step_tokens: _Optional[int] = ..., direct_transport: _Optional[str] = ..., num_steps: _Optional[int] = ..., step_s: _Optional[float] = ..., num_computed_tokens: _Optional[int] = ..., num_decode_tokens: _Optional[int] = ..., step_age_s: _Optional[float] = ..., num_free_places: _Optional[int] = ...) -> None: ...

class GetWorkerStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
