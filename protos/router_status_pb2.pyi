from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Durations(_message.Message):
    __slots__ = ("bounds_s", "counts", "total_s")
    BOUNDS_S_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    bounds_s: _containers.RepeatedScalarFieldContainer[float]
    counts: _containers.RepeatedScalarFieldContainer[int]
    total_s: float
    def __init__(self, bounds_s: _Optional[_Iterable[float]] = ..., counts: _Optional[_Iterable[int]] = ..., total_s: _Optional[float] = ...) -> None: ...

class ModelTraffic(_message.Message):
    __slots__ = ("model", "num_arrived", "num_finished", "num_refused", "num_failed", "num_cancelled", "num_rejected", "num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "first_token", "per_token", "queue", "prefill_s", "decode_s", "num_held", "num_queued", "num_running")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_ARRIVED_FIELD_NUMBER: _ClassVar[int]
    NUM_FINISHED_FIELD_NUMBER: _ClassVar[int]
    NUM_REFUSED_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_FIELD_NUMBER: _ClassVar[int]
    NUM_CANCELLED_FIELD_NUMBER: _ClassVar[int]
    NUM_REJECTED_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    model: str
    num_arrived: int
    num_finished: int
    num_refused: int
    num_failed: int
    num_cancelled: int
    num_rejected: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    first_token: Durations
    per_token: Durations
    queue: Durations
    prefill_s: float
    decode_s: float
    num_held: int
    num_queued: int
    num_running: int
    def __init__(self, model: _Optional[str] = ..., num_arrived: _Optional[int] = ..., num_finished: _Optional[int] = ..., num_refused: _Optional[int] = ..., num_failed: _Optional[int] = ..., num_cancelled: _Optional[int] = ..., num_rejected: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., first_token: _Optional[_Union[Durations, _Mapping]] = ..., per_token: _Optional[_Union[Durations, _Mapping]] = ..., queue: _Optional[_Union[Durations, _Mapping]] = ..., prefill_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., num_held: _Optional[int] = ..., num_queued: _Optional[int] = ..., num_running: _Optional[int] = ...) -> None: ...

class RouterAdapter(_message.Message):
    __slots__ = ("name", "version", "is_served", "num_requests")
    class NumRequestsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    IS_SERVED_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: int
    is_served: bool
    num_requests: _containers.ScalarMap[str, int]
    def __init__(self, name: _Optional[str] = ..., version: _Optional[int] = ..., is_served: bool = ..., num_requests: _Optional[_Mapping[str, int]] = ...) -> None: ...

class RouterStatus(_message.Message):
    __slots__ = ("router_id", "incarnation", "address", "models", "uptime_s", "adapters")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    incarnation: str
    address: str
    models: _containers.RepeatedCompositeFieldContainer[ModelTraffic]
    uptime_s: float
    adapters: _containers.RepeatedCompositeFieldContainer[RouterAdapter]
    def __init__(self, router_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ..., models: _Optional[_Iterable[_Union[ModelTraffic, _Mapping]]] = ..., uptime_s: _Optional[float] = ..., adapters: _Optional[_Iterable[_Union[RouterAdapter, _Mapping]]] = ...) -> None: ...
