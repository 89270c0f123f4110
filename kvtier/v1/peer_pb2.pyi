from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HelloRequest(_message.Message):
    __slots__ = ("protocol_version", "node_id", "incarnation", "wants_metadata")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    WANTS_METADATA_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    node_id: str
    incarnation: int
    wants_metadata: bool
    def __init__(self, protocol_version: _Optional[int] = ..., node_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., wants_metadata: _Optional[bool] = ...) -> None: ...

class HelloResponse(_message.Message):
    __slots__ = ("protocol_version", "node_id", "incarnation", "arena_id", "arena_bytes", "base_address", "transfers")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    BASE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    node_id: str
    incarnation: int
    arena_id: int
    arena_bytes: int
    base_address: int
    transfers: _containers.RepeatedCompositeFieldContainer[TransferOffer]
    def __init__(self, protocol_version: _Optional[int] = ..., node_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., arena_id: _Optional[int] = ..., arena_bytes: _Optional[int] = ..., base_address: _Optional[int] = ..., transfers: _Optional[_Iterable[_Union[TransferOffer, _Mapping]]] = ...) -> None: ...

class TransferOffer(_message.Message):
    __slots__ = ("name", "metadata")
    NAME_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    name: str
    metadata: bytes
    def __init__(self, name: _Optional[str] = ..., metadata: _Optional[bytes] = ...) -> None: ...

class AcquireRequest(_message.Message):
    __slots__ = ("call_id", "node_id", "incarnation", "keys", "shard", "fingerprint", "block_bytes", "owner_id", "waits")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    OWNER_ID_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    call_id: bytes
    node_id: str
    incarnation: int
    keys: bytes
    shard: int
    fingerprint: bytes
    block_bytes: int
    owner_id: str
    waits: bool
    def __init__(self, call_id: _Optional[bytes] = ..., node_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., keys: _Optional[bytes] = ..., shard: _Optional[int] = ..., fingerprint: _Optional[bytes] = ..., block_bytes: _Optional[int] = ..., owner_id: _Optional[str] = ..., waits: _Optional[bool] = ...) -> None: ...

class AcquireResponse(_message.Message):
    __slots__ = ("lease_id", "arena_id", "slots", "checksums", "lease_ttl_s", "coming")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_S_FIELD_NUMBER: _ClassVar[int]
    COMING_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    arena_id: int
    slots: bytes
    checksums: bytes
    lease_ttl_s: float
    coming: int
    def __init__(self, lease_id: _Optional[int] = ..., arena_id: _Optional[int] = ..., slots: _Optional[bytes] = ..., checksums: _Optional[bytes] = ..., lease_ttl_s: _Optional[float] = ..., coming: _Optional[int] = ...) -> None: ...

class ReleaseLeaseRequest(_message.Message):
    __slots__ = ("call_id", "node_id", "lease_id", "corrupt_keys", "shard")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_KEYS_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    call_id: bytes
    node_id: str
    lease_id: int
    corrupt_keys: bytes
    shard: int
    def __init__(self, call_id: _Optional[bytes] = ..., node_id: _Optional[str] = ..., lease_id: _Optional[int] = ..., corrupt_keys: _Optional[bytes] = ..., shard: _Optional[int] = ...) -> None: ...

class ReleaseLeaseResponse(_message.Message):
    __slots__ = ("valid",)
    VALID_FIELD_NUMBER: _ClassVar[int]
    valid: bool
    def __init__(self, valid: _Optional[bool] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("node_id", "lease_id", "slots", "sizes", "codecs", "bytes_per_s")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    lease_id: int
    slots: bytes
    sizes: bytes
    codecs: _containers.RepeatedScalarFieldContainer[int]
    bytes_per_s: float
    def __init__(self, node_id: _Optional[str] = ..., lease_id: _Optional[int] = ..., slots: _Optional[bytes] = ..., sizes: _Optional[bytes] = ..., codecs: _Optional[_Iterable[int]] = ..., bytes_per_s: _Optional[float] = ...) -> None: ...

class ReadResponse(_message.Message):
    __slots__ = ("data", "codec", "size_bytes")
    DATA_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    codec: int
    size_bytes: int
    def __init__(self, data: _Optional[bytes] = ..., codec: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...
