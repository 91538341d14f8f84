from protos import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DecodeCommand(_message.Message):
    __slots__ = ("key", "reserve", "generate", "cancel", "cancel_sample", "prefetch")
    KEY_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    GENERATE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    CANCEL_SAMPLE_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    key: int
    reserve: ReserveDecode
    generate: GenerateFromHandle
    cancel: CancelDecode
    cancel_sample: CancelSample
    prefetch: PrefetchDecode
    def __init__(self, key: _Optional[int] = ..., reserve: _Optional[_Union[ReserveDecode, _Mapping]] = ..., generate: _Optional[_Union[GenerateFromHandle, _Mapping]] = ..., cancel: _Optional[_Union[CancelDecode, _Mapping]] = ..., cancel_sample: _Optional[_Union[CancelSample, _Mapping]] = ..., prefetch: _Optional[_Union[PrefetchDecode, _Mapping]] = ...) -> None: ...

class PrefetchDecode(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: _common_pb2.KvHandle
    def __init__(self, handle: _Optional[_Union[_common_pb2.KvHandle, _Mapping]] = ...) -> None: ...

class ReserveDecode(_message.Message):
    __slots__ = ("request_id", "tenant", "tenant_salt", "prompt_token_ids", "sampling", "sample_index", "model_fingerprint", "adapter", "priority", "budget_ms", "adapter_digest", "has_begun", "traceparent")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TENANT_SALT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    BUDGET_MS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    HAS_BEGUN_FIELD_NUMBER: _ClassVar[int]
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
    budget_ms: int
    adapter_digest: str
    has_begun: bool
    traceparent: str
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., tenant_salt: _Optional[bytes] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., sample_index: _Optional[int] = ..., model_fingerprint: _Optional[str] = ..., adapter: _Optional[str] = ..., priority: _Optional[int] = ..., budget_ms: _Optional[int] = ..., adapter_digest: _Optional[str] = ..., has_begun: bool = ..., traceparent: _Optional[str] = ...) -> None: ...

class GenerateFromHandle(_message.Message):
    __slots__ = ("handle", "output_token_ids", "outputs", "beam_start", "computes_prompt")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    BEAM_START_FIELD_NUMBER: _ClassVar[int]
    COMPUTES_PROMPT_FIELD_NUMBER: _ClassVar[int]
    handle: _common_pb2.KvHandle
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    outputs: _containers.RepeatedCompositeFieldContainer[SampleOutput]
    beam_start: _containers.RepeatedCompositeFieldContainer[_common_pb2.BeamCandidate]
    computes_prompt: bool
    def __init__(self, handle: _Optional[_Union[_common_pb2.KvHandle, _Mapping]] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., outputs: _Optional[_Iterable[_Union[SampleOutput, _Mapping]]] = ..., beam_start: _Optional[_Iterable[_Union[_common_pb2.BeamCandidate, _Mapping]]] = ..., computes_prompt: bool = ...) -> None: ...

class SampleOutput(_message.Message):
    __slots__ = ("token_ids", "is_over")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IS_OVER_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    is_over: bool
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., is_over: bool = ...) -> None: ...

class CancelDecode(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CancelSample(_message.Message):
    __slots__ = ("sample_index",)
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    sample_index: int
    def __init__(self, sample_index: _Optional[int] = ...) -> None: ...

class DecodeEvents(_message.Message):
    __slots__ = ("events", "num_free_blocks", "num_running", "num_waiting", "step", "num_free_places")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_PLACES_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[DecodeEvent]
    num_free_blocks: int
    num_running: int
    num_waiting: int
    step: int
    num_free_places: int
    def __init__(self, events: _Optional[_Iterable[_Union[DecodeEvent, _Mapping]]] = ..., num_free_blocks: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., step: _Optional[int] = ..., num_free_places: _Optional[int] = ...) -> None: ...

class DecodeEvent(_message.Message):
    __slots__ = ("key", "reserved", "tokens", "finished", "failed", "queued", "moved")
    KEY_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    key: int
    reserved: DecodeReserved
    tokens: DecodeTokens
    finished: DecodeFinished
    failed: DecodeFailed
    queued: DecodeQueued
    moved: DecodeMoved
    def __init__(self, key: _Optional[int] = ..., reserved: _Optional[_Union[DecodeReserved, _Mapping]] = ..., tokens: _Optional[_Union[DecodeTokens, _Mapping]] = ..., finished: _Optional[_Union[DecodeFinished, _Mapping]] = ..., failed: _Optional[_Union[DecodeFailed, _Mapping]] = ..., queued: _Optional[_Union[DecodeQueued, _Mapping]] = ..., moved: _Optional[_Union[DecodeMoved, _Mapping]] = ...) -> None: ...

class DecodeQueued(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DecodeReserved(_message.Message):
    __slots__ = ("num_tokens_local",)
    NUM_TOKENS_LOCAL_FIELD_NUMBER: _ClassVar[int]
    num_tokens_local: int
    def __init__(self, num_tokens_local: _Optional[int] = ...) -> None: ...

class DecodeTokens(_message.Message):
    __slots__ = ("token_ids", "logprobs", "sample_index", "traces", "finish_reason", "stop_token_id", "score")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TRACES_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    sample_index: int
    traces: _containers.RepeatedCompositeFieldContainer[_common_pb2.StepTrace]
    finish_reason: _common_pb2.FinishReason
    stop_token_id: int
    score: float
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., sample_index: _Optional[int] = ..., traces: _Optional[_Iterable[_Union[_common_pb2.StepTrace, _Mapping]]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., score: _Optional[float] = ...) -> None: ...

class DecodeFinished(_message.Message):
    __slots__ = ("token_ids", "logprobs", "finish_reason", "stop_token_id", "leg", "times", "sample_index", "traces", "score")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LEG_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TRACES_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    finish_reason: _common_pb2.FinishReason
    stop_token_id: int
    leg: _common_pb2.KvLeg
    times: _containers.RepeatedCompositeFieldContainer[_common_pb2.StageTime]
    sample_index: int
    traces: _containers.RepeatedCompositeFieldContainer[_common_pb2.StepTrace]
    score: float
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., leg: _Optional[_Union[_common_pb2.KvLeg, _Mapping]] = ..., times: _Optional[_Iterable[_Union[_common_pb2.StageTime, _Mapping]]] = ..., sample_index: _Optional[int] = ..., traces: _Optional[_Iterable[_Union[_common_pb2.StepTrace, _Mapping]]] = ..., score: _Optional[float] = ...) -> None: ...

class DecodeFailed(_message.Message):
    __slots__ = ("code", "message", "retry_after_s", "leg")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    LEG_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    retry_after_s: float
    leg: _common_pb2.KvLeg
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., retry_after_s: _Optional[float] = ..., leg: _Optional[_Union[_common_pb2.KvLeg, _Mapping]] = ...) -> None: ...

class DecodeMoved(_message.Message):
    __slots__ = ("handle", "num_output_tokens", "leg", "times", "reason")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEG_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    handle: _common_pb2.KvHandle
    num_output_tokens: _containers.RepeatedScalarFieldContainer[int]
    leg: _common_pb2.KvLeg
    times: _containers.RepeatedCompositeFieldContainer[_common_pb2.StageTime]
    reason: str
    def __init__(self, handle: _Optional[_Union[_common_pb2.KvHandle, _Mapping]] = ..., num_output_tokens: _Optional[_Iterable[int]] = ..., leg: _Optional[_Union[_common_pb2.KvLeg, _Mapping]] = ..., times: _Optional[_Iterable[_Union[_common_pb2.StageTime, _Mapping]]] = ..., reason: _Optional[str] = ...) -> None: ...
