from protos import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ToolCall(_message.Message):
    __slots__ = ("id", "name", "arguments")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    arguments: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    REASONING_CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    name: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tool_call_id: str
    reasoning_content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., name: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tool_call_id: _Optional[str] = ..., reasoning_content: _Optional[str] = ...) -> None: ...

class ChatMessages(_message.Message):
    __slots__ = ("messages", "tools", "template_arguments")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    tools: _containers.RepeatedScalarFieldContainer[str]
    template_arguments: str
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., tools: _Optional[_Iterable[str]] = ..., template_arguments: _Optional[str] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("model", "text", "token_ids", "chat", "sampling", "request_id", "tenant", "budget_ms", "adapter", "priority", "session", "embed", "prompt_logprobs", "show_special_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    BUDGET_MS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EMBED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SHOW_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    token_ids: TokenIds
    chat: ChatMessages
    sampling: _common_pb2.SamplingParams
    request_id: str
    tenant: str
    budget_ms: int
    adapter: str
    priority: int
    session: str
    embed: bool
    prompt_logprobs: int
    show_special_tokens: bool
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[ChatMessages, _Mapping]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., budget_ms: _Optional[int] = ..., adapter: _Optional[str] = ..., priority: _Optional[int] = ..., session: _Optional[str] = ..., embed: bool = ..., prompt_logprobs: _Optional[int] = ..., show_special_tokens: bool = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "sample_index", "text", "token_ids", "logprobs", "finish_reason", "usage", "provenance", "times", "seed", "stop_token_id", "stop_string", "traces", "score", "prompt_token_ids", "sampling", "embedding", "prompt_logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    TRACES_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    sample_index: int
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    finish_reason: _common_pb2.FinishReason
    usage: _common_pb2.Usage
    provenance: _common_pb2.Provenance
    times: _containers.RepeatedCompositeFieldContainer[_common_pb2.StageTime]
    seed: int
    stop_token_id: int
    stop_string: str
    traces: _containers.RepeatedCompositeFieldContainer[_common_pb2.StepTrace]
    score: float
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.SamplingParams
    embedding: _containers.RepeatedScalarFieldContainer[float]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    def __init__(self, request_id: _Optional[str] = ..., sample_index: _Optional[int] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., provenance: _Optional[_Union[_common_pb2.Provenance, _Mapping]] = ..., times: _Optional[_Iterable[_Union[_common_pb2.StageTime, _Mapping]]] = ..., seed: _Optional[int] = ..., stop_token_id: _Optional[int] = ..., stop_string: _Optional[str] = ..., traces: _Optional[_Iterable[_Union[_common_pb2.StepTrace, _Mapping]]] = ..., score: _Optional[float] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., embedding: _Optional[_Iterable[float]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request_id", "tenant")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class CostTerm(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: float
    def __init__(self, name: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...

class RoutingCandidate(_message.Message):
    __slots__ = ("worker_id", "role", "chosen", "cost", "terms")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: str
    chosen: bool
    cost: float
    terms: _containers.RepeatedCompositeFieldContainer[CostTerm]
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[str] = ..., chosen: bool = ..., cost: _Optional[float] = ..., terms: _Optional[_Iterable[_Union[CostTerm, _Mapping]]] = ...) -> None: ...

class RoutingDecision(_message.Message):
    __slots__ = ("occasion", "policy", "unit", "decided_unix_ms", "took_s", "prefill_id", "decode_id", "cost", "num_prefill", "num_decode", "num_pairs", "handover", "num_prompt_tokens", "num_computed", "runs", "candidates")
    OCCASION_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    DECIDED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    TOOK_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_ID_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_FIELD_NUMBER: _ClassVar[int]
    NUM_PAIRS_FIELD_NUMBER: _ClassVar[int]
    HANDOVER_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    occasion: str
    policy: str
    unit: str
    decided_unix_ms: int
    took_s: float
    prefill_id: str
    decode_id: str
    cost: float
    num_prefill: int
    num_decode: int
    num_pairs: int
    handover: _common_pb2.HandoverPath
    num_prompt_tokens: int
    num_computed: int
    runs: _containers.RepeatedCompositeFieldContainer[_common_pb2.PrefixRun]
    candidates: _containers.RepeatedCompositeFieldContainer[RoutingCandidate]
    def __init__(self, occasion: _Optional[str] = ..., policy: _Optional[str] = ..., unit: _Optional[str] = ..., decided_unix_ms: _Optional[int] = ..., took_s: _Optional[float] = ..., prefill_id: _Optional[str] = ..., decode_id: _Optional[str] = ..., cost: _Optional[float] = ..., num_prefill: _Optional[int] = ..., num_decode: _Optional[int] = ..., num_pairs: _Optional[int] = ..., handover: _Optional[_Union[_common_pb2.HandoverPath, str]] = ..., num_prompt_tokens: _Optional[int] = ..., num_computed: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[_common_pb2.PrefixRun, _Mapping]]] = ..., candidates: _Optional[_Iterable[_Union[RoutingCandidate, _Mapping]]] = ...) -> None: ...

class Standing(_message.Message):
    __slots__ = ("position", "num_in_line", "num_waiting", "waits_for", "due_in_s", "expected_wait_s")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    NUM_IN_LINE_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    DUE_IN_S_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    position: int
    num_in_line: int
    num_waiting: int
    waits_for: str
    due_in_s: float
    expected_wait_s: float
    def __init__(self, position: _Optional[int] = ..., num_in_line: _Optional[int] = ..., num_waiting: _Optional[int] = ..., waits_for: _Optional[str] = ..., due_in_s: _Optional[float] = ..., expected_wait_s: _Optional[float] = ...) -> None: ...

class Admission(_message.Message):
    __slots__ = ("arrival", "turn", "standing")
    ARRIVAL_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    arrival: int
    turn: int
    standing: Standing
    def __init__(self, arrival: _Optional[int] = ..., turn: _Optional[int] = ..., standing: _Optional[_Union[Standing, _Mapping]] = ...) -> None: ...

class ExplainReply(_message.Message):
    __slots__ = ("request_id", "tenant", "model", "decisions", "admission", "request")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    model: str
    decisions: _containers.RepeatedCompositeFieldContainer[RoutingDecision]
    admission: Admission
    request: RequestInfo
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ..., decisions: _Optional[_Iterable[_Union[RoutingDecision, _Mapping]]] = ..., admission: _Optional[_Union[Admission, _Mapping]] = ..., request: _Optional[_Union[RequestInfo, _Mapping]] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("model", "model_fingerprint", "context_window", "vocab_size", "dtype")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_WINDOW_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    model: str
    model_fingerprint: str
    context_window: int
    vocab_size: int
    dtype: str
    def __init__(self, model: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., context_window: _Optional[int] = ..., vocab_size: _Optional[int] = ..., dtype: _Optional[str] = ...) -> None: ...

class ListModelsReply(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelInfo]
    def __init__(self, models: _Optional[_Iterable[_Union[ModelInfo, _Mapping]]] = ...) -> None: ...

class GetClusterStatusRequest(_message.Message):
    __slots__ = ("as_heard", "num_requests", "with_history")
    AS_HEARD_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WITH_HISTORY_FIELD_NUMBER: _ClassVar[int]
    as_heard: bool
    num_requests: int
    with_history: bool
    def __init__(self, as_heard: bool = ..., num_requests: _Optional[int] = ..., with_history: bool = ...) -> None: ...

class RequestInfo(_message.Message):
    __slots__ = ("request_id", "tenant", "model", "arrived_unix_ms", "elapsed_s", "state", "outcome", "code", "num_prompt_tokens", "num_output_tokens", "first_token_s", "prefill_id", "decode_id", "spans", "provenance")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_S_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_ID_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    model: str
    arrived_unix_ms: int
    elapsed_s: float
    state: str
    outcome: str
    code: str
    num_prompt_tokens: int
    num_output_tokens: int
    first_token_s: float
    prefill_id: str
    decode_id: str
    spans: _containers.RepeatedCompositeFieldContainer[StageSpan]
    provenance: _common_pb2.Provenance
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ..., arrived_unix_ms: _Optional[int] = ..., elapsed_s: _Optional[float] = ..., state: _Optional[str] = ..., outcome: _Optional[str] = ..., code: _Optional[str] = ..., num_prompt_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., first_token_s: _Optional[float] = ..., prefill_id: _Optional[str] = ..., decode_id: _Optional[str] = ..., spans: _Optional[_Iterable[_Union[StageSpan, _Mapping]]] = ..., provenance: _Optional[_Union[_common_pb2.Provenance, _Mapping]] = ...) -> None: ...

class StageSpan(_message.Message):
    __slots__ = ("stage", "begin_s", "end_s")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    BEGIN_S_FIELD_NUMBER: _ClassVar[int]
    END_S_FIELD_NUMBER: _ClassVar[int]
    stage: str
    begin_s: float
    end_s: float
    def __init__(self, stage: _Optional[str] = ..., begin_s: _Optional[float] = ..., end_s: _Optional[float] = ...) -> None: ...

class UsagePoint(_message.Message):
    __slots__ = ("unix_ms", "num_tokens_computed", "num_tokens_local", "num_tokens_from_store", "num_output_tokens", "num_finished", "num_failed", "first_token_s", "num_in_flight", "num_waiting")
    UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_LOCAL_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FROM_STORE_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_FINISHED_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    NUM_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    unix_ms: int
    num_tokens_computed: int
    num_tokens_local: int
    num_tokens_from_store: int
    num_output_tokens: int
    num_finished: int
    num_failed: int
    first_token_s: float
    num_in_flight: int
    num_waiting: int
    def __init__(self, unix_ms: _Optional[int] = ..., num_tokens_computed: _Optional[int] = ..., num_tokens_local: _Optional[int] = ..., num_tokens_from_store: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., num_finished: _Optional[int] = ..., num_failed: _Optional[int] = ..., first_token_s: _Optional[float] = ..., num_in_flight: _Optional[int] = ..., num_waiting: _Optional[int] = ...) -> None: ...

class StoreStatus(_message.Message):
    __slots__ = ("node_id", "address", "incarnation", "reachable", "frame_bytes", "num_frames", "num_free", "num_writing", "num_committed", "num_pinned", "num_quarantined", "num_leases", "num_lookups", "num_blocks_matched", "num_blocks_asked", "num_bytes_written", "num_bytes_read", "num_evictions", "integrity_error", "num_pages", "num_pages_used", "num_demoted", "num_promoted", "num_pages_bad", "tenants", "file_tier_problem", "num_damaged")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REACHABLE_FIELD_NUMBER: _ClassVar[int]
    FRAME_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_FRAMES_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_FIELD_NUMBER: _ClassVar[int]
    NUM_WRITING_FIELD_NUMBER: _ClassVar[int]
    NUM_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    NUM_PINNED_FIELD_NUMBER: _ClassVar[int]
    NUM_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    NUM_LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_MATCHED_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_ASKED_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_READ_FIELD_NUMBER: _ClassVar[int]
    NUM_EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    INTEGRITY_ERROR_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_USED_FIELD_NUMBER: _ClassVar[int]
    NUM_DEMOTED_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMOTED_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_BAD_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    FILE_TIER_PROBLEM_FIELD_NUMBER: _ClassVar[int]
    NUM_DAMAGED_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    address: str
    incarnation: str
    reachable: bool
    frame_bytes: int
    num_frames: int
    num_free: int
    num_writing: int
    num_committed: int
    num_pinned: int
    num_quarantined: int
    num_leases: int
    num_lookups: int
    num_blocks_matched: int
    num_blocks_asked: int
    num_bytes_written: int
    num_bytes_read: int
    num_evictions: int
    integrity_error: str
    num_pages: int
    num_pages_used: int
    num_demoted: int
    num_promoted: int
    num_pages_bad: int
    tenants: _containers.RepeatedCompositeFieldContainer[_common_pb2.TenantUsage]
    file_tier_problem: str
    num_damaged: int
    def __init__(self, node_id: _Optional[str] = ..., address: _Optional[str] = ..., incarnation: _Optional[str] = ..., reachable: bool = ..., frame_bytes: _Optional[int] = ..., num_frames: _Optional[int] = ..., num_free: _Optional[int] = ..., num_writing: _Optional[int] = ..., num_committed: _Optional[int] = ..., num_pinned: _Optional[int] = ..., num_quarantined: _Optional[int] = ..., num_leases: _Optional[int] = ..., num_lookups: _Optional[int] = ..., num_blocks_matched: _Optional[int] = ..., num_blocks_asked: _Optional[int] = ..., num_bytes_written: _Optional[int] = ..., num_bytes_read: _Optional[int] = ..., num_evictions: _Optional[int] = ..., integrity_error: _Optional[str] = ..., num_pages: _Optional[int] = ..., num_pages_used: _Optional[int] = ..., num_demoted: _Optional[int] = ..., num_promoted: _Optional[int] = ..., num_pages_bad: _Optional[int] = ..., tenants: _Optional[_Iterable[_Union[_common_pb2.TenantUsage, _Mapping]]] = ..., file_tier_problem: _Optional[str] = ..., num_damaged: _Optional[int] = ...) -> None: ...

class GetClusterStatusReply(_message.Message):
    __slots__ = ("workers", "stores", "redis_reachable", "num_requests_in_flight", "num_requests_finished", "num_requests_failed", "router_id", "problems", "requests", "history", "history_interval_ms", "num_requests_failed_by_code")
    class NumRequestsFailedByCodeEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    STORES_FIELD_NUMBER: _ClassVar[int]
    REDIS_REACHABLE_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FINISHED_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FAILED_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    HISTORY_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FAILED_BY_CODE_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[_common_pb2.WorkerStatus]
    stores: _containers.RepeatedCompositeFieldContainer[StoreStatus]
    redis_reachable: bool
    num_requests_in_flight: int
    num_requests_finished: int
    num_requests_failed: int
    router_id: str
    problems: _containers.RepeatedScalarFieldContainer[str]
    requests: _containers.RepeatedCompositeFieldContainer[RequestInfo]
    history: _containers.RepeatedCompositeFieldContainer[UsagePoint]
    history_interval_ms: int
    num_requests_failed_by_code: _containers.ScalarMap[str, int]
    def __init__(self, workers: _Optional[_Iterable[_Union[_common_pb2.WorkerStatus, _Mapping]]] = ..., stores: _Optional[_Iterable[_Union[StoreStatus, _Mapping]]] = ..., redis_reachable: bool = ..., num_requests_in_flight: _Optional[int] = ..., num_requests_finished: _Optional[int] = ..., num_requests_failed: _Optional[int] = ..., router_id: _Optional[str] = ..., problems: _Optional[_Iterable[str]] = ..., requests: _Optional[_Iterable[_Union[RequestInfo, _Mapping]]] = ..., history: _Optional[_Iterable[_Union[UsagePoint, _Mapping]]] = ..., history_interval_ms: _Optional[int] = ..., num_requests_failed_by_code: _Optional[_Mapping[str, int]] = ...) -> None: ...

class LoadClusterAdapterRequest(_message.Message):
    __slots__ = ("name", "folder", "model")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    name: str
    folder: str
    model: str
    def __init__(self, name: _Optional[str] = ..., folder: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class LoadClusterAdapterReply(_message.Message):
    __slots__ = ("digest", "worker_ids")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    digest: str
    worker_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, digest: _Optional[str] = ..., worker_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class UnloadClusterAdapterRequest(_message.Message):
    __slots__ = ("name", "wait")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    name: str
    wait: bool
    def __init__(self, name: _Optional[str] = ..., wait: bool = ...) -> None: ...

class UnloadClusterAdapterReply(_message.Message):
    __slots__ = ("worker_ids",)
    WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    worker_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker_ids: _Optional[_Iterable[str]] = ...) -> None: ...
