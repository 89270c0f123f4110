from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReserveState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RESERVE_STATE_UNSPECIFIED: _ClassVar[ReserveState]
    RESERVE_STATE_GRANTED: _ClassVar[ReserveState]
    RESERVE_STATE_PRESENT: _ClassVar[ReserveState]
    RESERVE_STATE_BUSY: _ClassVar[ReserveState]
    RESERVE_STATE_REFUSED: _ClassVar[ReserveState]
RESERVE_STATE_UNSPECIFIED: ReserveState
RESERVE_STATE_GRANTED: ReserveState
RESERVE_STATE_PRESENT: ReserveState
RESERVE_STATE_BUSY: ReserveState
RESERVE_STATE_REFUSED: ReserveState

class Layout(_message.Message):
    __slots__ = ("kind", "num_layers", "num_kv_heads", "head_dim", "dtype", "block_tokens", "order", "layer_block_bytes", "interior", "scale_bytes", "padding_bytes")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    LAYER_BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    INTERIOR_FIELD_NUMBER: _ClassVar[int]
    SCALE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PADDING_BYTES_FIELD_NUMBER: _ClassVar[int]
    kind: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    block_tokens: int
    order: str
    layer_block_bytes: int
    interior: str
    scale_bytes: int
    padding_bytes: int
    def __init__(self, kind: _Optional[str] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[str] = ..., block_tokens: _Optional[int] = ..., order: _Optional[str] = ..., layer_block_bytes: _Optional[int] = ..., interior: _Optional[str] = ..., scale_bytes: _Optional[int] = ..., padding_bytes: _Optional[int] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("protocol_version", "call_id", "engine_id", "layout", "fingerprint", "description", "maps_device_memory")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    MAPS_DEVICE_MEMORY_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    call_id: bytes
    engine_id: str
    layout: Layout
    fingerprint: bytes
    description: str
    maps_device_memory: bool
    def __init__(self, protocol_version: _Optional[int] = ..., call_id: _Optional[bytes] = ..., engine_id: _Optional[str] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ..., fingerprint: _Optional[bytes] = ..., description: _Optional[str] = ..., maps_device_memory: _Optional[bool] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("node_id", "incarnation", "arena", "lease_ttl_s", "reservation_ttl_s", "max_keys_per_call", "slot_bytes", "verify_loads", "device_memory")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ARENA_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_S_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_TTL_S_FIELD_NUMBER: _ClassVar[int]
    MAX_KEYS_PER_CALL_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    VERIFY_LOADS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_MEMORY_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: int
    arena: Arena
    lease_ttl_s: float
    reservation_ttl_s: float
    max_keys_per_call: int
    slot_bytes: int
    verify_loads: str
    device_memory: DeviceMemory
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., arena: _Optional[_Union[Arena, _Mapping]] = ..., lease_ttl_s: _Optional[float] = ..., reservation_ttl_s: _Optional[float] = ..., max_keys_per_call: _Optional[int] = ..., slot_bytes: _Optional[int] = ..., verify_loads: _Optional[str] = ..., device_memory: _Optional[_Union[DeviceMemory, _Mapping]] = ...) -> None: ...

class DeviceMemory(_message.Message):
    __slots__ = ("device", "handle", "size_bytes")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    device: str
    handle: bytes
    size_bytes: int
    def __init__(self, device: _Optional[str] = ..., handle: _Optional[bytes] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class Arena(_message.Message):
    __slots__ = ("arena_id", "path", "size_bytes", "allocated_bytes")
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ALLOCATED_BYTES_FIELD_NUMBER: _ClassVar[int]
    arena_id: int
    path: str
    size_bytes: int
    allocated_bytes: int
    def __init__(self, arena_id: _Optional[int] = ..., path: _Optional[str] = ..., size_bytes: _Optional[int] = ..., allocated_bytes: _Optional[int] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("engine_id", "request_id", "keys", "shard_count", "fingerprint", "block_compute_s")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SHARD_COUNT_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    request_id: str
    keys: bytes
    shard_count: int
    fingerprint: bytes
    block_compute_s: float
    def __init__(self, engine_id: _Optional[str] = ..., request_id: _Optional[str] = ..., keys: _Optional[bytes] = ..., shard_count: _Optional[int] = ..., fingerprint: _Optional[bytes] = ..., block_compute_s: _Optional[float] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("blocks", "estimate_s", "hold_ttl_s", "reason", "tiers", "coming")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ESTIMATE_S_FIELD_NUMBER: _ClassVar[int]
    HOLD_TTL_S_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    COMING_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    estimate_s: float
    hold_ttl_s: float
    reason: str
    tiers: _containers.RepeatedCompositeFieldContainer[TierCount]
    coming: int
    def __init__(self, blocks: _Optional[int] = ..., estimate_s: _Optional[float] = ..., hold_ttl_s: _Optional[float] = ..., reason: _Optional[str] = ..., tiers: _Optional[_Iterable[_Union[TierCount, _Mapping]]] = ..., coming: _Optional[int] = ...) -> None: ...

class TierCount(_message.Message):
    __slots__ = ("tier", "blocks")
    TIER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    tier: int
    blocks: int
    def __init__(self, tier: _Optional[int] = ..., blocks: _Optional[int] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ("call_id", "engine_id", "request_id", "keys", "shard")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    call_id: bytes
    engine_id: str
    request_id: str
    keys: bytes
    shard: int
    def __init__(self, call_id: _Optional[bytes] = ..., engine_id: _Optional[str] = ..., request_id: _Optional[str] = ..., keys: _Optional[bytes] = ..., shard: _Optional[int] = ...) -> None: ...

class LoadResponse(_message.Message):
    __slots__ = ("lease_id", "first", "slots", "checksums", "lease_ttl_s", "tier", "coming", "copies")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_S_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    COMING_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    first: int
    slots: bytes
    checksums: bytes
    lease_ttl_s: float
    tier: int
    coming: int
    copies: bytes
    def __init__(self, lease_id: _Optional[int] = ..., first: _Optional[int] = ..., slots: _Optional[bytes] = ..., checksums: _Optional[bytes] = ..., lease_ttl_s: _Optional[float] = ..., tier: _Optional[int] = ..., coming: _Optional[int] = ..., copies: _Optional[bytes] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("call_id", "engine_id", "lease_id", "request_id", "corrupt_keys", "shard")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_KEYS_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    call_id: bytes
    engine_id: str
    lease_id: int
    request_id: str
    corrupt_keys: bytes
    shard: int
    def __init__(self, call_id: _Optional[bytes] = ..., engine_id: _Optional[str] = ..., lease_id: _Optional[int] = ..., request_id: _Optional[str] = ..., corrupt_keys: _Optional[bytes] = ..., shard: _Optional[int] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("valid",)
    VALID_FIELD_NUMBER: _ClassVar[int]
    valid: bool
    def __init__(self, valid: _Optional[bool] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("call_id", "engine_id", "parent", "keys", "shard", "fingerprint")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    call_id: bytes
    engine_id: str
    parent: bytes
    keys: bytes
    shard: int
    fingerprint: bytes
    def __init__(self, call_id: _Optional[bytes] = ..., engine_id: _Optional[str] = ..., parent: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., shard: _Optional[int] = ..., fingerprint: _Optional[bytes] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("reservation_id", "states", "slots", "reservation_ttl_s")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_TTL_S_FIELD_NUMBER: _ClassVar[int]
    reservation_id: int
    states: bytes
    slots: bytes
    reservation_ttl_s: float
    def __init__(self, reservation_id: _Optional[int] = ..., states: _Optional[bytes] = ..., slots: _Optional[bytes] = ..., reservation_ttl_s: _Optional[float] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("call_id", "engine_id", "reservation_id", "keys", "checksums")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    call_id: bytes
    engine_id: str
    reservation_id: int
    keys: bytes
    checksums: bytes
    def __init__(self, call_id: _Optional[bytes] = ..., engine_id: _Optional[str] = ..., reservation_id: _Optional[int] = ..., keys: _Optional[bytes] = ..., checksums: _Optional[bytes] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("committed",)
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    committed: int
    def __init__(self, committed: _Optional[int] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("call_id", "engine_id", "reservation_id", "keys")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    call_id: bytes
    engine_id: str
    reservation_id: int
    keys: bytes
    def __init__(self, call_id: _Optional[bytes] = ..., engine_id: _Optional[str] = ..., reservation_id: _Optional[int] = ..., keys: _Optional[bytes] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("freed",)
    FREED_FIELD_NUMBER: _ClassVar[int]
    freed: int
    def __init__(self, freed: _Optional[int] = ...) -> None: ...

class ReportResidentRequest(_message.Message):
    __slots__ = ("call_id", "engine_id", "added", "removed", "clear")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEAR_FIELD_NUMBER: _ClassVar[int]
    call_id: bytes
    engine_id: str
    added: bytes
    removed: bytes
    clear: bool
    def __init__(self, call_id: _Optional[bytes] = ..., engine_id: _Optional[str] = ..., added: _Optional[bytes] = ..., removed: _Optional[bytes] = ..., clear: _Optional[bool] = ...) -> None: ...

class ReportResidentResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...
