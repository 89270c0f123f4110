from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("node_id", "incarnation", "version", "uptime_s", "state", "index", "tiers", "engines", "counters", "metrics_address", "notices", "transfers", "peer_address", "index_reachable", "unpublished")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NOTICES_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    PEER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INDEX_REACHABLE_FIELD_NUMBER: _ClassVar[int]
    UNPUBLISHED_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: int
    version: str
    uptime_s: float
    state: str
    index: str
    tiers: _containers.RepeatedCompositeFieldContainer[TierStatus]
    engines: _containers.RepeatedCompositeFieldContainer[EngineStatus]
    counters: Counters
    metrics_address: str
    notices: _containers.RepeatedScalarFieldContainer[str]
    transfers: _containers.RepeatedCompositeFieldContainer[TransferStatus]
    peer_address: str
    index_reachable: bool
    unpublished: int
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., version: _Optional[str] = ..., uptime_s: _Optional[float] = ..., state: _Optional[str] = ..., index: _Optional[str] = ..., tiers: _Optional[_Iterable[_Union[TierStatus, _Mapping]]] = ..., engines: _Optional[_Iterable[_Union[EngineStatus, _Mapping]]] = ..., counters: _Optional[_Union[Counters, _Mapping]] = ..., metrics_address: _Optional[str] = ..., notices: _Optional[_Iterable[str]] = ..., transfers: _Optional[_Iterable[_Union[TransferStatus, _Mapping]]] = ..., peer_address: _Optional[str] = ..., index_reachable: _Optional[bool] = ..., unpublished: _Optional[int] = ...) -> None: ...

class TransferStatus(_message.Message):
    __slots__ = ("name", "usable", "detail")
    NAME_FIELD_NUMBER: _ClassVar[int]
    USABLE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    name: str
    usable: bool
    detail: str
    def __init__(self, name: _Optional[str] = ..., usable: _Optional[bool] = ..., detail: _Optional[str] = ...) -> None: ...

class TierStatus(_message.Message):
    __slots__ = ("tier", "capacity_bytes", "allocated_bytes", "resident_bytes", "reserved_bytes", "quarantined_bytes", "draining_bytes", "leased_bytes", "pinned_bytes", "old_arena_bytes", "blocks", "name")
    TIER_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    ALLOCATED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAINING_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    OLD_ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    tier: int
    capacity_bytes: int
    allocated_bytes: int
    resident_bytes: int
    reserved_bytes: int
    quarantined_bytes: int
    draining_bytes: int
    leased_bytes: int
    pinned_bytes: int
    old_arena_bytes: int
    blocks: int
    name: str
    def __init__(self, tier: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., allocated_bytes: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., reserved_bytes: _Optional[int] = ..., quarantined_bytes: _Optional[int] = ..., draining_bytes: _Optional[int] = ..., leased_bytes: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., old_arena_bytes: _Optional[int] = ..., blocks: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class EngineStatus(_message.Message):
    __slots__ = ("engine_id", "description", "fingerprint", "slot_bytes", "leased_bytes", "reserved_bytes", "quarantined_bytes", "registered_s", "resident_blocks")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BYTES_FIELD_NUMBER: _ClassVar[int]
    REGISTERED_S_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    description: str
    fingerprint: bytes
    slot_bytes: int
    leased_bytes: int
    reserved_bytes: int
    quarantined_bytes: int
    registered_s: float
    resident_blocks: int
    def __init__(self, engine_id: _Optional[str] = ..., description: _Optional[str] = ..., fingerprint: _Optional[bytes] = ..., slot_bytes: _Optional[int] = ..., leased_bytes: _Optional[int] = ..., reserved_bytes: _Optional[int] = ..., quarantined_bytes: _Optional[int] = ..., registered_s: _Optional[float] = ..., resident_blocks: _Optional[int] = ...) -> None: ...

class Counters(_message.Message):
    __slots__ = ("lookups", "lookup_blocks", "hit_blocks", "loaded_blocks", "failed_loads", "stored_blocks", "aborted_blocks", "refused_blocks", "evicted_blocks", "corrupt_blocks", "dead_engines", "expired_leases", "pulled_blocks", "failed_pulls", "given_blocks")
    LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOADED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FAILED_LOADS_FIELD_NUMBER: _ClassVar[int]
    STORED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ABORTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DEAD_ENGINES_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_LEASES_FIELD_NUMBER: _ClassVar[int]
    PULLED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FAILED_PULLS_FIELD_NUMBER: _ClassVar[int]
    GIVEN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    lookups: int
    lookup_blocks: int
    hit_blocks: int
    loaded_blocks: int
    failed_loads: int
    stored_blocks: int
    aborted_blocks: int
    refused_blocks: int
    evicted_blocks: int
    corrupt_blocks: int
    dead_engines: int
    expired_leases: int
    pulled_blocks: int
    failed_pulls: int
    given_blocks: int
    def __init__(self, lookups: _Optional[int] = ..., lookup_blocks: _Optional[int] = ..., hit_blocks: _Optional[int] = ..., loaded_blocks: _Optional[int] = ..., failed_loads: _Optional[int] = ..., stored_blocks: _Optional[int] = ..., aborted_blocks: _Optional[int] = ..., refused_blocks: _Optional[int] = ..., evicted_blocks: _Optional[int] = ..., corrupt_blocks: _Optional[int] = ..., dead_engines: _Optional[int] = ..., expired_leases: _Optional[int] = ..., pulled_blocks: _Optional[int] = ..., failed_pulls: _Optional[int] = ..., given_blocks: _Optional[int] = ...) -> None: ...

class LookupPrefixRequest(_message.Message):
    __slots__ = ("keys", "everywhere")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    EVERYWHERE_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    everywhere: bool
    def __init__(self, keys: _Optional[bytes] = ..., everywhere: _Optional[bool] = ...) -> None: ...

class LookupPrefixResponse(_message.Message):
    __slots__ = ("blocks", "places")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    places: _containers.RepeatedCompositeFieldContainer[BlockPlace]
    def __init__(self, blocks: _Optional[int] = ..., places: _Optional[_Iterable[_Union[BlockPlace, _Mapping]]] = ...) -> None: ...

class BlockPlace(_message.Message):
    __slots__ = ("index", "shard", "node_id", "incarnation", "tier", "arena_id", "offset_bytes", "size_bytes", "pinned", "leases", "replica", "hint", "holder")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    index: int
    shard: int
    node_id: str
    incarnation: int
    tier: int
    arena_id: int
    offset_bytes: int
    size_bytes: int
    pinned: bool
    leases: int
    replica: bool
    hint: bool
    holder: str
    def __init__(self, index: _Optional[int] = ..., shard: _Optional[int] = ..., node_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., tier: _Optional[int] = ..., arena_id: _Optional[int] = ..., offset_bytes: _Optional[int] = ..., size_bytes: _Optional[int] = ..., pinned: _Optional[bool] = ..., leases: _Optional[int] = ..., replica: _Optional[bool] = ..., hint: _Optional[bool] = ..., holder: _Optional[str] = ...) -> None: ...

class ListNodesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListNodesResponse(_message.Message):
    __slots__ = ("nodes",)
    NODES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[NodeStatus]
    def __init__(self, nodes: _Optional[_Iterable[_Union[NodeStatus, _Mapping]]] = ...) -> None: ...

class GetNodeRequest(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: str
    def __init__(self, node: _Optional[str] = ...) -> None: ...

class GetNodeResponse(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: NodeStatus
    def __init__(self, node: _Optional[_Union[NodeStatus, _Mapping]] = ...) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("node_id", "name", "incarnation", "address", "is_self", "capacity_bytes", "resident_bytes", "load", "state", "transfer", "pull_bytes_per_s", "round_trip_s", "pulled_blocks", "failed_pulls", "last_error")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    IS_SELF_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    PULL_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_S_FIELD_NUMBER: _ClassVar[int]
    PULLED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FAILED_PULLS_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    name: str
    incarnation: int
    address: str
    is_self: bool
    capacity_bytes: int
    resident_bytes: int
    load: float
    state: str
    transfer: str
    pull_bytes_per_s: float
    round_trip_s: float
    pulled_blocks: int
    failed_pulls: int
    last_error: str
    def __init__(self, node_id: _Optional[str] = ..., name: _Optional[str] = ..., incarnation: _Optional[int] = ..., address: _Optional[str] = ..., is_self: _Optional[bool] = ..., capacity_bytes: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., load: _Optional[float] = ..., state: _Optional[str] = ..., transfer: _Optional[str] = ..., pull_bytes_per_s: _Optional[float] = ..., round_trip_s: _Optional[float] = ..., pulled_blocks: _Optional[int] = ..., failed_pulls: _Optional[int] = ..., last_error: _Optional[str] = ...) -> None: ...

class EvictPrefixRequest(_message.Message):
    __slots__ = ("call_id", "keys")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    call_id: bytes
    keys: bytes
    def __init__(self, call_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ...) -> None: ...

class EvictPrefixResponse(_message.Message):
    __slots__ = ("evicted", "kept")
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    evicted: int
    kept: int
    def __init__(self, evicted: _Optional[int] = ..., kept: _Optional[int] = ...) -> None: ...

class PinPrefixRequest(_message.Message):
    __slots__ = ("call_id", "keys", "ttl_s")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    call_id: bytes
    keys: bytes
    ttl_s: float
    def __init__(self, call_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class PinPrefixResponse(_message.Message):
    __slots__ = ("pinned", "pin_id")
    PINNED_FIELD_NUMBER: _ClassVar[int]
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    pinned: int
    pin_id: int
    def __init__(self, pinned: _Optional[int] = ..., pin_id: _Optional[int] = ...) -> None: ...

class UnpinPrefixRequest(_message.Message):
    __slots__ = ("call_id", "pin_id", "keys")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    call_id: bytes
    pin_id: int
    keys: bytes
    def __init__(self, call_id: _Optional[bytes] = ..., pin_id: _Optional[int] = ..., keys: _Optional[bytes] = ...) -> None: ...

class UnpinPrefixResponse(_message.Message):
    __slots__ = ("unpinned",)
    UNPINNED_FIELD_NUMBER: _ClassVar[int]
    unpinned: int
    def __init__(self, unpinned: _Optional[int] = ...) -> None: ...
