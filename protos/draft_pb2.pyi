from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeDraftRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeDraftReply(_message.Message):
    __slots__ = ("worker_id", "incarnation", "model", "tokenizer_digest", "vocab_size")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: bytes
    model: str
    tokenizer_digest: str
    vocab_size: int
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[bytes] = ..., model: _Optional[str] = ..., tokenizer_digest: _Optional[str] = ..., vocab_size: _Optional[int] = ...) -> None: ...

class ProposeRequest(_message.Message):
    __slots__ = ("verifier", "tasks")
    VERIFIER_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    verifier: bytes
    tasks: _containers.RepeatedCompositeFieldContainer[DraftTask]
    def __init__(self, verifier: _Optional[bytes] = ..., tasks: _Optional[_Iterable[_Union[DraftTask, _Mapping]]] = ...) -> None: ...

class DraftTask(_message.Message):
    __slots__ = ("session", "start", "token_ids", "num_prompt_tokens", "num_nodes", "temperature", "top_p", "top_k", "min_p", "seed", "sample_index")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_NODES_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    session: int
    start: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    num_nodes: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    sample_index: int
    def __init__(self, session: _Optional[int] = ..., start: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., num_nodes: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., sample_index: _Optional[int] = ...) -> None: ...

class ProposeReply(_message.Message):
    __slots__ = ("trees",)
    TREES_FIELD_NUMBER: _ClassVar[int]
    trees: _containers.RepeatedCompositeFieldContainer[DraftTree]
    def __init__(self, trees: _Optional[_Iterable[_Union[DraftTree, _Mapping]]] = ...) -> None: ...

class DraftTree(_message.Message):
    __slots__ = ("is_unknown", "token_ids", "parents", "chances")
    IS_UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    CHANCES_FIELD_NUMBER: _ClassVar[int]
    is_unknown: bool
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    chances: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, is_unknown: bool = ..., token_ids: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., chances: _Optional[_Iterable[float]] = ...) -> None: ...

class ForgetRequest(_message.Message):
    __slots__ = ("verifier", "sessions")
    VERIFIER_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    verifier: bytes
    sessions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, verifier: _Optional[bytes] = ..., sessions: _Optional[_Iterable[int]] = ...) -> None: ...

class ForgetReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
