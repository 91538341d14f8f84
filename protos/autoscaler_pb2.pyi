from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetDecisionsRequest(_message.Message):
    __slots__ = ("num_decisions", "only_actions")
    NUM_DECISIONS_FIELD_NUMBER: _ClassVar[int]
    ONLY_ACTIONS_FIELD_NUMBER: _ClassVar[int]
    num_decisions: int
    only_actions: bool
    def __init__(self, num_decisions: _Optional[int] = ..., only_actions: bool = ...) -> None: ...

class PoolView(_message.Message):
    __slots__ = ("role", "num_wanted", "num_ready", "num_draining")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NUM_WANTED_FIELD_NUMBER: _ClassVar[int]
    NUM_READY_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAINING_FIELD_NUMBER: _ClassVar[int]
    role: str
    num_wanted: int
    num_ready: int
    num_draining: int
    def __init__(self, role: _Optional[str] = ..., num_wanted: _Optional[int] = ..., num_ready: _Optional[int] = ..., num_draining: _Optional[int] = ...) -> None: ...

class ScalingDecision(_message.Message):
    __slots__ = ("decided_unix_ms", "direction", "reason", "summary", "why_json", "outcome", "problem")
    DECIDED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    WHY_JSON_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    decided_unix_ms: int
    direction: str
    reason: str
    summary: str
    why_json: str
    outcome: str
    problem: str
    def __init__(self, decided_unix_ms: _Optional[int] = ..., direction: _Optional[str] = ..., reason: _Optional[str] = ..., summary: _Optional[str] = ..., why_json: _Optional[str] = ..., outcome: _Optional[str] = ..., problem: _Optional[str] = ...) -> None: ...

class GetDecisionsReply(_message.Message):
    __slots__ = ("autoscaler_id", "is_leader", "decisions", "pools", "problems")
    AUTOSCALER_ID_FIELD_NUMBER: _ClassVar[int]
    IS_LEADER_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    autoscaler_id: str
    is_leader: bool
    decisions: _containers.RepeatedCompositeFieldContainer[ScalingDecision]
    pools: _containers.RepeatedCompositeFieldContainer[PoolView]
    problems: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, autoscaler_id: _Optional[str] = ..., is_leader: bool = ..., decisions: _Optional[_Iterable[_Union[ScalingDecision, _Mapping]]] = ..., pools: _Optional[_Iterable[_Union[PoolView, _Mapping]]] = ..., problems: _Optional[_Iterable[str]] = ...) -> None: ...
