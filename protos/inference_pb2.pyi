from protos import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "name")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    name: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class ChatMessages(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("model", "text", "token_ids", "chat", "sampling", "request_id", "tenant", "budget_ms", "adapter", "priority", "session")
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
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[ChatMessages, _Mapping]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., budget_ms: _Optional[int] = ..., adapter: _Optional[str] = ..., priority: _Optional[int] = ..., session: _Optional[str] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "sample_index", "text", "token_ids", "logprobs", "finish_reason", "usage", "provenance", "times", "seed", "stop_token_id", "stop_string", "traces", "score", "prompt_token_ids", "sampling")
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
    def __init__(self, request_id: _Optional[str] = ..., sample_index: _Optional[int] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., provenance: _Optional[_Union[_common_pb2.Provenance, _Mapping]] = ..., times: _Optional[_Iterable[_Union[_common_pb2.StageTime, _Mapping]]] = ..., seed: _Optional[int] = ..., stop_token_id: _Optional[int] = ..., stop_string: _Optional[str] = ..., traces: _Optional[_Iterable[_Union[_common_pb2.StepTrace, _Mapping]]] = ..., score: _Optional[float] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ...) -> None: ...

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
    __slots__ = ()
    def __init__(self) -> None: ...

class StoreStatus(_message.Message):
    __slots__ = ("node_id", "address", "incarnation", "reachable", "frame_bytes", "num_frames", "num_free", "num_writing", "num_committed", "num_pinned", "num_quarantined", "num_leases", "num_lookups", "num_blocks_matched", "num_blocks_asked", "num_bytes_written", "num_bytes_read", "num_evictions", "integrity_error", "num_pages", "num_pages_used", "num_demoted", "num_promoted", "num_pages_bad", "tenants", "file_tier_problem")
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
    def __init__(self, node_id: _Optional[str] = ..., address: _Optional[str] = ..., incarnation: _Optional[str] = ..., reachable: bool = ..., frame_bytes: _Optional[int] = ..., num_frames: _Optional[int] = ..., num_free: _Optional[int] = ..., num_writing: _Optional[int] = ..., num_committed: _Optional[int] = ..., num_pinned: _Optional[int] = ..., num_quarantined: _Optional[int] = ..., num_leases: _Optional[int] = ..., num_lookups: _Optional[int] = ..., num_blocks_matched: _Optional[int] = ..., num_blocks_asked: _Optional[int] = ..., num_bytes_written: _Optional[int] = ..., num_bytes_read: _Optional[int] = ..., num_evictions: _Optional[int] = ..., integrity_error: _Optional[str] = ..., num_pages: _Optional[int] = ..., num_pages_used: _Optional[int] = ..., num_demoted: _Optional[int] = ..., num_promoted: _Optional[int] = ..., num_pages_bad: _Optional[int] = ..., tenants: _Optional[_Iterable[_Union[_common_pb2.TenantUsage, _Mapping]]] = ..., file_tier_problem: _Optional[str] = ...) -> None: ...

class GetClusterStatusReply(_message.Message):
    __slots__ = ("workers", "stores", "redis_reachable", "num_requests_in_flight", "num_requests_finished", "num_requests_failed", "router_id", "problems")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    STORES_FIELD_NUMBER: _ClassVar[int]
    REDIS_REACHABLE_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FINISHED_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FAILED_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[_common_pb2.WorkerStatus]
    stores: _containers.RepeatedCompositeFieldContainer[StoreStatus]
    redis_reachable: bool
    num_requests_in_flight: int
    num_requests_finished: int
    num_requests_failed: int
    router_id: str
    problems: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, workers: _Optional[_Iterable[_Union[_common_pb2.WorkerStatus, _Mapping]]] = ..., stores: _Optional[_Iterable[_Union[StoreStatus, _Mapping]]] = ..., redis_reachable: bool = ..., num_requests_in_flight: _Optional[int] = ..., num_requests_finished: _Optional[int] = ..., num_requests_failed: _Optional[int] = ..., router_id: _Optional[str] = ..., problems: _Optional[_Iterable[str]] = ...) -> None: ...
