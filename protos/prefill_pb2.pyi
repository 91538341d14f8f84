from protos import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillCommand(_message.Message):
    __slots__ = ("key", "prefill", "cancel")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    key: int
    prefill: PrefillRequest
    cancel: CancelPrefill
    def __init__(self, key: _Optional[int] = ..., prefill: _Optional[_Union[PrefillRequest, _Mapping]] = ..., cancel: _Optional[_Union[CancelPrefill, _Mapping]] = ...) -> None: ...

class CancelPrefill(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefillEvents(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[PrefillEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[PrefillEvent, _Mapping]]] = ...) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("key", "reply", "failed")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REPLY_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    key: int
    reply: PrefillReply
    failed: PrefillFailed
    def __init__(self, key: _Optional[int] = ..., reply: _Optional[_Union[PrefillReply, _Mapping]] = ..., failed: _Optional[_Union[PrefillFailed, _Mapping]] = ...) -> None: ...

class PrefillFailed(_message.Message):
    __slots__ = ("code", "message", "retry_after_s")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    retry_after_s: float
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("request_id", "tenant", "tenant_salt", "prompt_token_ids", "sampling", "sample_index", "model_fingerprint", "adapter", "priority", "wants_handle", "hints", "output_token_ids", "adapter_digest", "handover", "wants_embedding", "prompt_logprobs", "budget_ms", "traceparent")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TENANT_SALT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    WANTS_HANDLE_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    HANDOVER_FIELD_NUMBER: _ClassVar[int]
    WANTS_EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    BUDGET_MS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    tenant_salt: bytes
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.SamplingParams
    sample_index: int
    model_fingerprint: str
    adapter: str
    priority: int
    wants_handle: bool
    hints: _containers.RepeatedCompositeFieldContainer[_common_pb2.PrefixRun]
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    adapter_digest: str
    handover: _common_pb2.HandoverPath
    wants_embedding: bool
    prompt_logprobs: int
    budget_ms: int
    traceparent: str
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., tenant_salt: _Optional[bytes] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., sample_index: _Optional[int] = ..., model_fingerprint: _Optional[str] = ..., adapter: _Optional[str] = ..., priority: _Optional[int] = ..., wants_handle: bool = ..., hints: _Optional[_Iterable[_Union[_common_pb2.PrefixRun, _Mapping]]] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., adapter_digest: _Optional[str] = ..., handover: _Optional[_Union[_common_pb2.HandoverPath, str]] = ..., wants_embedding: bool = ..., prompt_logprobs: _Optional[int] = ..., budget_ms: _Optional[int] = ..., traceparent: _Optional[str] = ...) -> None: ...

class PrefillReply(_message.Message):
    __slots__ = ("token_ids", "logprobs", "finish_reason", "stop_token_id", "handle", "leg", "times", "sample_index", "traces", "beam_start", "embedding", "prompt_logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    LEG_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TRACES_FIELD_NUMBER: _ClassVar[int]
    BEAM_START_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    finish_reason: _common_pb2.FinishReason
    stop_token_id: int
    handle: _common_pb2.KvHandle
    leg: _common_pb2.KvLeg
    times: _containers.RepeatedCompositeFieldContainer[_common_pb2.StageTime]
    sample_index: int
    traces: _containers.RepeatedCompositeFieldContainer[_common_pb2.StepTrace]
    beam_start: _containers.RepeatedCompositeFieldContainer[_common_pb2.BeamCandidate]
    embedding: _containers.RepeatedScalarFieldContainer[float]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., handle: _Optional[_Union[_common_pb2.KvHandle, _Mapping]] = ..., leg: _Optional[_Union[_common_pb2.KvLeg, _Mapping]] = ..., times: _Optional[_Iterable[_Union[_common_pb2.StageTime, _Mapping]]] = ..., sample_index: _Optional[int] = ..., traces: _Optional[_Iterable[_Union[_common_pb2.StepTrace, _Mapping]]] = ..., beam_start: _Optional[_Iterable[_Union[_common_pb2.BeamCandidate, _Mapping]]] = ..., embedding: _Optional[_Iterable[float]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...
