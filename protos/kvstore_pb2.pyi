from protos import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AttachRequest(_message.Message):
    __slots__ = ("worker_id", "worker_incarnation", "model_fingerprint", "block_bytes", "transport", "nixl_metadata", "region_address", "region_num_blocks", "region_device_id", "region_memory", "checksum", "host_id")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    NIXL_METADATA_FIELD_NUMBER: _ClassVar[int]
    REGION_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REGION_NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REGION_DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    REGION_MEMORY_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    worker_incarnation: bytes
    model_fingerprint: bytes
    block_bytes: int
    transport: str
    nixl_metadata: bytes
    region_address: int
    region_num_blocks: int
    region_device_id: int
    region_memory: str
    checksum: int
    host_id: str
    def __init__(self, worker_id: _Optional[str] = ..., worker_incarnation: _Optional[bytes] = ..., model_fingerprint: _Optional[bytes] = ..., block_bytes: _Optional[int] = ..., transport: _Optional[str] = ..., nixl_metadata: _Optional[bytes] = ..., region_address: _Optional[int] = ..., region_num_blocks: _Optional[int] = ..., region_device_id: _Optional[int] = ..., region_memory: _Optional[str] = ..., checksum: _Optional[int] = ..., host_id: _Optional[str] = ...) -> None: ...

class AttachReply(_message.Message):
    __slots__ = ("node_id", "incarnation", "frame_bytes", "num_frames", "slab_path", "nixl_metadata", "region_address", "attachment_id", "checksum", "ipc_handle", "ipc_offset_bytes", "keeps_history")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FRAME_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_FRAMES_FIELD_NUMBER: _ClassVar[int]
    SLAB_PATH_FIELD_NUMBER: _ClassVar[int]
    NIXL_METADATA_FIELD_NUMBER: _ClassVar[int]
    REGION_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ATTACHMENT_ID_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    IPC_HANDLE_FIELD_NUMBER: _ClassVar[int]
    IPC_OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    KEEPS_HISTORY_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: bytes
    frame_bytes: int
    num_frames: int
    slab_path: str
    nixl_metadata: bytes
    region_address: int
    attachment_id: str
    checksum: int
    ipc_handle: bytes
    ipc_offset_bytes: int
    keeps_history: bool
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[bytes] = ..., frame_bytes: _Optional[int] = ..., num_frames: _Optional[int] = ..., slab_path: _Optional[str] = ..., nixl_metadata: _Optional[bytes] = ..., region_address: _Optional[int] = ..., attachment_id: _Optional[str] = ..., checksum: _Optional[int] = ..., ipc_handle: _Optional[bytes] = ..., ipc_offset_bytes: _Optional[int] = ..., keeps_history: bool = ...) -> None: ...

class DetachRequest(_message.Message):
    __slots__ = ("attachment_id",)
    ATTACHMENT_ID_FIELD_NUMBER: _ClassVar[int]
    attachment_id: str
    def __init__(self, attachment_id: _Optional[str] = ...) -> None: ...

class DetachReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MatchRequest(_message.Message):
    __slots__ = ("attachment_id", "chain_hashes", "pin", "lease_id", "ttl_ms")
    ATTACHMENT_ID_FIELD_NUMBER: _ClassVar[int]
    CHAIN_HASHES_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    attachment_id: str
    chain_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    pin: bool
    lease_id: str
    ttl_ms: int
    def __init__(self, attachment_id: _Optional[str] = ..., chain_hashes: _Optional[_Iterable[bytes]] = ..., pin: bool = ..., lease_id: _Optional[str] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class MatchReply(_message.Message):
    __slots__ = ("blocks", "lease_id", "incarnation", "num_hits")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUM_HITS_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[_common_pb2.BlockRef]
    lease_id: str
    incarnation: bytes
    num_hits: int
    def __init__(self, blocks: _Optional[_Iterable[_Union[_common_pb2.BlockRef, _Mapping]]] = ..., lease_id: _Optional[str] = ..., incarnation: _Optional[bytes] = ..., num_hits: _Optional[int] = ...) -> None: ...

class ReserveChain(_message.Message):
    __slots__ = ("parent", "chain_hashes", "tail_name", "tenant")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    CHAIN_HASHES_FIELD_NUMBER: _ClassVar[int]
    TAIL_NAME_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    parent: bytes
    chain_hashes: bytes
    tail_name: str
    tenant: str
    def __init__(self, parent: _Optional[bytes] = ..., chain_hashes: _Optional[bytes] = ..., tail_name: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("attachment_id", "lease_id", "ttl_ms", "is_probe", "chains")
    ATTACHMENT_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    IS_PROBE_FIELD_NUMBER: _ClassVar[int]
    CHAINS_FIELD_NUMBER: _ClassVar[int]
    attachment_id: str
    lease_id: str
    ttl_ms: int
    is_probe: bool
    chains: _containers.RepeatedCompositeFieldContainer[ReserveChain]
    def __init__(self, attachment_id: _Optional[str] = ..., lease_id: _Optional[str] = ..., ttl_ms: _Optional[int] = ..., is_probe: bool = ..., chains: _Optional[_Iterable[_Union[ReserveChain, _Mapping]]] = ...) -> None: ...

class ReservedChain(_message.Message):
    __slots__ = ("blocks", "lacks_parent")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LACKS_PARENT_FIELD_NUMBER: _ClassVar[int]
    blocks: bytes
    lacks_parent: bool
    def __init__(self, blocks: _Optional[bytes] = ..., lacks_parent: bool = ...) -> None: ...

class ReserveReply(_message.Message):
    __slots__ = ("lease_id", "incarnation", "checksum", "chains")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    CHAINS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    incarnation: bytes
    checksum: int
    chains: _containers.RepeatedCompositeFieldContainer[ReservedChain]
    def __init__(self, lease_id: _Optional[str] = ..., incarnation: _Optional[bytes] = ..., checksum: _Optional[int] = ..., chains: _Optional[_Iterable[_Union[ReservedChain, _Mapping]]] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("attachment_id", "lease_id", "blocks", "ends_lease")
    ATTACHMENT_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ENDS_LEASE_FIELD_NUMBER: _ClassVar[int]
    attachment_id: str
    lease_id: str
    blocks: bytes
    ends_lease: bool
    def __init__(self, attachment_id: _Optional[str] = ..., lease_id: _Optional[str] = ..., blocks: _Optional[bytes] = ..., ends_lease: bool = ...) -> None: ...

class CommitReply(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: bytes
    def __init__(self, blocks: _Optional[bytes] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("attachment_id", "lease_id", "quarantine", "blocks")
    ATTACHMENT_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    QUARANTINE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    attachment_id: str
    lease_id: str
    quarantine: bool
    blocks: bytes
    def __init__(self, attachment_id: _Optional[str] = ..., lease_id: _Optional[str] = ..., quarantine: bool = ..., blocks: _Optional[bytes] = ...) -> None: ...

class AbortReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("attachment_id", "blocks", "ttl_ms")
    ATTACHMENT_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    attachment_id: str
    blocks: _containers.RepeatedCompositeFieldContainer[_common_pb2.BlockRef]
    ttl_ms: int
    def __init__(self, attachment_id: _Optional[str] = ..., blocks: _Optional[_Iterable[_Union[_common_pb2.BlockRef, _Mapping]]] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class PinReply(_message.Message):
    __slots__ = ("lease_id", "num_pinned")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_PINNED_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    num_pinned: int
    def __init__(self, lease_id: _Optional[str] = ..., num_pinned: _Optional[int] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("lease_id", "ttl_ms", "num_bytes_read", "verified", "attachment_id")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_READ_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    ATTACHMENT_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    ttl_ms: int
    num_bytes_read: int
    verified: _containers.RepeatedCompositeFieldContainer[VerifiedBlocks]
    attachment_id: str
    def __init__(self, lease_id: _Optional[str] = ..., ttl_ms: _Optional[int] = ..., num_bytes_read: _Optional[int] = ..., verified: _Optional[_Iterable[_Union[VerifiedBlocks, _Mapping]]] = ..., attachment_id: _Optional[str] = ...) -> None: ...

class VerifiedBlocks(_message.Message):
    __slots__ = ("frames", "generations", "traceparent")
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    frames: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    traceparent: str
    def __init__(self, frames: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ..., traceparent: _Optional[str] = ...) -> None: ...

class RenewReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lease_ids", "num_bytes_read", "verified", "attachment_id")
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_READ_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    ATTACHMENT_ID_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[str]
    num_bytes_read: int
    verified: _containers.RepeatedCompositeFieldContainer[VerifiedBlocks]
    attachment_id: str
    def __init__(self, lease_ids: _Optional[_Iterable[str]] = ..., num_bytes_read: _Optional[int] = ..., verified: _Optional[_Iterable[_Union[VerifiedBlocks, _Mapping]]] = ..., attachment_id: _Optional[str] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ("num_released",)
    NUM_RELEASED_FIELD_NUMBER: _ClassVar[int]
    num_released: int
    def __init__(self, num_released: _Optional[int] = ...) -> None: ...

class PushRequest(_message.Message):
    __slots__ = ("attachment_id", "lease_id", "blocks", "destinations", "budget_ms", "push_id", "checksum")
    ATTACHMENT_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DESTINATIONS_FIELD_NUMBER: _ClassVar[int]
    BUDGET_MS_FIELD_NUMBER: _ClassVar[int]
    PUSH_ID_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    attachment_id: str
    lease_id: str
    blocks: _containers.RepeatedCompositeFieldContainer[_common_pb2.BlockRef]
    destinations: _containers.RepeatedScalarFieldContainer[int]
    budget_ms: int
    push_id: str
    checksum: int
    def __init__(self, attachment_id: _Optional[str] = ..., lease_id: _Optional[str] = ..., blocks: _Optional[_Iterable[_Union[_common_pb2.BlockRef, _Mapping]]] = ..., destinations: _Optional[_Iterable[int]] = ..., budget_ms: _Optional[int] = ..., push_id: _Optional[str] = ..., checksum: _Optional[int] = ...) -> None: ...

class PushReply(_message.Message):
    __slots__ = ("push_id", "terminal", "num_bytes", "stale")
    PUSH_ID_FIELD_NUMBER: _ClassVar[int]
    TERMINAL_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    push_id: str
    terminal: bool
    num_bytes: int
    stale: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, push_id: _Optional[str] = ..., terminal: bool = ..., num_bytes: _Optional[int] = ..., stale: _Optional[_Iterable[int]] = ...) -> None: ...

class GetPushRequest(_message.Message):
    __slots__ = ("push_id",)
    PUSH_ID_FIELD_NUMBER: _ClassVar[int]
    push_id: str
    def __init__(self, push_id: _Optional[str] = ...) -> None: ...

class GetPushReply(_message.Message):
    __slots__ = ("terminal",)
    TERMINAL_FIELD_NUMBER: _ClassVar[int]
    terminal: bool
    def __init__(self, terminal: bool = ...) -> None: ...

class HoldRequest(_message.Message):
    __slots__ = ("attachment_id", "lease_id", "frames", "generations", "ttl_ms")
    ATTACHMENT_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    attachment_id: str
    lease_id: str
    frames: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    ttl_ms: int
    def __init__(self, attachment_id: _Optional[str] = ..., lease_id: _Optional[str] = ..., frames: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class HoldReply(_message.Message):
    __slots__ = ("stale", "held_ms", "checksum")
    STALE_FIELD_NUMBER: _ClassVar[int]
    HELD_MS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    stale: _containers.RepeatedScalarFieldContainer[int]
    held_ms: int
    checksum: int
    def __init__(self, stale: _Optional[_Iterable[int]] = ..., held_ms: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class AwaitLentRequest(_message.Message):
    __slots__ = ("attachment_id", "lease_id", "num_known", "num_wanted", "budget_ms", "hold_ms")
    ATTACHMENT_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_KNOWN_FIELD_NUMBER: _ClassVar[int]
    NUM_WANTED_FIELD_NUMBER: _ClassVar[int]
    BUDGET_MS_FIELD_NUMBER: _ClassVar[int]
    HOLD_MS_FIELD_NUMBER: _ClassVar[int]
    attachment_id: str
    lease_id: str
    num_known: int
    num_wanted: int
    budget_ms: int
    hold_ms: int
    def __init__(self, attachment_id: _Optional[str] = ..., lease_id: _Optional[str] = ..., num_known: _Optional[int] = ..., num_wanted: _Optional[int] = ..., budget_ms: _Optional[int] = ..., hold_ms: _Optional[int] = ...) -> None: ...

class AwaitLentReply(_message.Message):
    __slots__ = ("blocks", "is_all", "num_unsealed", "held_ms", "waited_us", "checksum")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    IS_ALL_FIELD_NUMBER: _ClassVar[int]
    NUM_UNSEALED_FIELD_NUMBER: _ClassVar[int]
    HELD_MS_FIELD_NUMBER: _ClassVar[int]
    WAITED_US_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    blocks: bytes
    is_all: bool
    num_unsealed: int
    held_ms: int
    waited_us: int
    checksum: int
    def __init__(self, blocks: _Optional[bytes] = ..., is_all: bool = ..., num_unsealed: _Optional[int] = ..., held_ms: _Optional[int] = ..., waited_us: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class WriteChunk(_message.Message):
    __slots__ = ("attachment_id", "lease_id", "frame", "generation", "offset", "data")
    ATTACHMENT_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    attachment_id: str
    lease_id: str
    frame: int
    generation: int
    offset: int
    data: bytes
    def __init__(self, attachment_id: _Optional[str] = ..., lease_id: _Optional[str] = ..., frame: _Optional[int] = ..., generation: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class WriteReply(_message.Message):
    __slots__ = ("num_bytes",)
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    def __init__(self, num_bytes: _Optional[int] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("attachment_id", "lease_id", "blocks", "chunk_bytes")
    ATTACHMENT_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    attachment_id: str
    lease_id: str
    blocks: _containers.RepeatedCompositeFieldContainer[_common_pb2.BlockRef]
    chunk_bytes: int
    def __init__(self, attachment_id: _Optional[str] = ..., lease_id: _Optional[str] = ..., blocks: _Optional[_Iterable[_Union[_common_pb2.BlockRef, _Mapping]]] = ..., chunk_bytes: _Optional[int] = ...) -> None: ...

class ReadChunk(_message.Message):
    __slots__ = ("index", "offset", "data", "stale")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    index: int
    offset: int
    data: bytes
    stale: bool
    def __init__(self, index: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., stale: bool = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ("check_integrity",)
    CHECK_INTEGRITY_FIELD_NUMBER: _ClassVar[int]
    check_integrity: bool
    def __init__(self, check_integrity: bool = ...) -> None: ...

class GetStatusReply(_message.Message):
    __slots__ = ("node_id", "incarnation", "frame_bytes", "num_frames", "num_free", "num_writing", "num_committed", "num_pinned", "num_quarantined", "num_leases", "num_attachments", "num_lookups", "num_blocks_asked", "num_blocks_matched", "num_bytes_written", "num_bytes_read", "num_evictions", "num_leases_lapsed", "num_tails", "index_sequence", "index_synced", "integrity_error", "refused", "num_pages", "num_pages_used", "num_demoted", "num_promoted", "num_pages_bad", "tenants", "file_tier_problem", "num_damaged")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FRAME_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_FRAMES_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_FIELD_NUMBER: _ClassVar[int]
    NUM_WRITING_FIELD_NUMBER: _ClassVar[int]
    NUM_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    NUM_PINNED_FIELD_NUMBER: _ClassVar[int]
    NUM_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    NUM_ATTACHMENTS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_ASKED_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_MATCHED_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_READ_FIELD_NUMBER: _ClassVar[int]
    NUM_EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_LAPSED_FIELD_NUMBER: _ClassVar[int]
    NUM_TAILS_FIELD_NUMBER: _ClassVar[int]
    INDEX_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    INDEX_SYNCED_FIELD_NUMBER: _ClassVar[int]
    INTEGRITY_ERROR_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_USED_FIELD_NUMBER: _ClassVar[int]
    NUM_DEMOTED_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMOTED_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_BAD_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    FILE_TIER_PROBLEM_FIELD_NUMBER: _ClassVar[int]
    NUM_DAMAGED_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: bytes
    frame_bytes: int
    num_frames: int
    num_free: int
    num_writing: int
    num_committed: int
    num_pinned: int
    num_quarantined: int
    num_leases: int
    num_attachments: int
    num_lookups: int
    num_blocks_asked: int
    num_blocks_matched: int
    num_bytes_written: int
    num_bytes_read: int
    num_evictions: int
    num_leases_lapsed: int
    num_tails: int
    index_sequence: int
    index_synced: bool
    integrity_error: str
    refused: _containers.RepeatedCompositeFieldContainer[_common_pb2.RecomputeCount]
    num_pages: int
    num_pages_used: int
    num_demoted: int
    num_promoted: int
    num_pages_bad: int
    tenants: _containers.RepeatedCompositeFieldContainer[_common_pb2.TenantUsage]
    file_tier_problem: str
    num_damaged: int
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[bytes] = ..., frame_bytes: _Optional[int] = ..., num_frames: _Optional[int] = ..., num_free: _Optional[int] = ..., num_writing: _Optional[int] = ..., num_committed: _Optional[int] = ..., num_pinned: _Optional[int] = ..., num_quarantined: _Optional[int] = ..., num_leases: _Optional[int] = ..., num_attachments: _Optional[int] = ..., num_lookups: _Optional[int] = ..., num_blocks_asked: _Optional[int] = ..., num_blocks_matched: _Optional[int] = ..., num_bytes_written: _Optional[int] = ..., num_bytes_read: _Optional[int] = ..., num_evictions: _Optional[int] = ..., num_leases_lapsed: _Optional[int] = ..., num_tails: _Optional[int] = ..., index_sequence: _Optional[int] = ..., index_synced: bool = ..., integrity_error: _Optional[str] = ..., refused: _Optional[_Iterable[_Union[_common_pb2.RecomputeCount, _Mapping]]] = ..., num_pages: _Optional[int] = ..., num_pages_used: _Optional[int] = ..., num_demoted: _Optional[int] = ..., num_promoted: _Optional[int] = ..., num_pages_bad: _Optional[int] = ..., tenants: _Optional[_Iterable[_Union[_common_pb2.TenantUsage, _Mapping]]] = ..., file_tier_problem: _Optional[str] = ..., num_damaged: _Optional[int] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("attachment_id", "blocks")
    ATTACHMENT_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    attachment_id: str
    blocks: _containers.RepeatedCompositeFieldContainer[_common_pb2.BlockRef]
    def __init__(self, attachment_id: _Optional[str] = ..., blocks: _Optional[_Iterable[_Union[_common_pb2.BlockRef, _Mapping]]] = ...) -> None: ...

class ReportReply(_message.Message):
    __slots__ = ("num_dropped",)
    NUM_DROPPED_FIELD_NUMBER: _ClassVar[int]
    num_dropped: int
    def __init__(self, num_dropped: _Optional[int] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListReply(_message.Message):
    __slots__ = ("incarnation", "index_sequence", "chain_hashes")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    INDEX_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CHAIN_HASHES_FIELD_NUMBER: _ClassVar[int]
    incarnation: bytes
    index_sequence: int
    chain_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, incarnation: _Optional[bytes] = ..., index_sequence: _Optional[int] = ..., chain_hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class GetBlockHistoryRequest(_message.Message):
    __slots__ = ("chain_hash", "max_blocks")
    CHAIN_HASH_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    chain_hash: bytes
    max_blocks: int
    def __init__(self, chain_hash: _Optional[bytes] = ..., max_blocks: _Optional[int] = ...) -> None: ...

class BlockEvent(_message.Message):
    __slots__ = ("unix_us", "what", "worker_id", "trace_id")
    UNIX_US_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    unix_us: int
    what: str
    worker_id: str
    trace_id: str
    def __init__(self, unix_us: _Optional[int] = ..., what: _Optional[str] = ..., worker_id: _Optional[str] = ..., trace_id: _Optional[str] = ...) -> None: ...

class BlockHistory(_message.Message):
    __slots__ = ("chain_hash", "events", "num_events_forgotten", "tiers", "num_hits", "num_pins", "parent")
    CHAIN_HASH_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    NUM_EVENTS_FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    NUM_HITS_FIELD_NUMBER: _ClassVar[int]
    NUM_PINS_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    chain_hash: bytes
    events: _containers.RepeatedCompositeFieldContainer[BlockEvent]
    num_events_forgotten: int
    tiers: _containers.RepeatedScalarFieldContainer[_common_pb2.Tier]
    num_hits: int
    num_pins: int
    parent: bytes
    def __init__(self, chain_hash: _Optional[bytes] = ..., events: _Optional[_Iterable[_Union[BlockEvent, _Mapping]]] = ..., num_events_forgotten: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[_common_pb2.Tier, str]]] = ..., num_hits: _Optional[int] = ..., num_pins: _Optional[int] = ..., parent: _Optional[bytes] = ...) -> None: ...

class GetBlockHistoryReply(_message.Message):
    __slots__ = ("node_id", "incarnation", "blocks", "keeps_history")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KEEPS_HISTORY_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: bytes
    blocks: _containers.RepeatedCompositeFieldContainer[BlockHistory]
    keeps_history: bool
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[bytes] = ..., blocks: _Optional[_Iterable[_Union[BlockHistory, _Mapping]]] = ..., keeps_history: bool = ...) -> None: ...
