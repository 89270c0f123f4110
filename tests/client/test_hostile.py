"""A peer on the socket that is not the daemon: nothing it says makes the client touch other memory."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from kvtier.client.copies import CpuCopier, SlotMemory
from kvtier.client.device import DeviceMapping
from kvtier.errors import TierFault, Unavailable
from kvtier.tiers import device as devices
from kvtier.types import PAGE_SIZE_BYTES
from kvtier.v1 import engine_pb2 as pb
from kvtier.v1 import engine_pb2_grpc
from tests.client.harness import LAYOUT, Engine, chain

MIB = 1 << 20
NO_SLOT = 2**64 - 1
ALLOCATED = 2 * MIB
SLOT = LAYOUT.slot_bytes
KEYS = chain("hostile", 4)
GOOD = [0, SLOT, 2 * SLOT, 3 * SLOT]


def offsets(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


class Hostile(engine_pb2_grpc.EngineServiceServicer):
    """Answers whatever a test puts here."""

    def __init__(self, arena: Path) -> None:
        self.registration = pb.RegisterResponse(
            node_id="hostile",
            incarnation=1,
            arena=pb.Arena(arena_id=1, path=str(arena), size_bytes=4 * MIB, allocated_bytes=ALLOCATED),
            lease_ttl_s=30,
            reservation_ttl_s=60,
            max_keys_per_call=1000,
            slot_bytes=SLOT,
            verify_loads="off",
        )
        self.lookup = pb.LookupResponse(blocks=4, estimate_s=0.01)
        self.loads: list[pb.LoadResponse] = []
        self.reserve = pb.ReserveResponse()
        self.valid = True
        self.said: list[Any] = []
        self.delay = threading.Event()

    def Register(self, request: Any, context: Any) -> Any:
        return self.registration

    def Lookup(self, request: Any, context: Any) -> Any:
        return self.lookup

    def Load(self, request: Any, context: Any) -> Iterator[Any]:
        yield from self.loads

    def Release(self, request: Any, context: Any) -> Any:
        self.said.append(request)
        return pb.ReleaseResponse(valid=self.valid)

    def Reserve(self, request: Any, context: Any) -> Any:
        return self.reserve

    def Commit(self, request: Any, context: Any) -> Any:
        self.said.append(request)
        return pb.CommitResponse(committed=len(request.keys) // 32)

    def Abort(self, request: Any, context: Any) -> Any:
        self.said.append(request)
        return pb.AbortResponse()


@pytest.fixture
def hostile(tmp_path: Path, shm: Path) -> Iterator[Hostile]:
    (tmp_path / "engines").mkdir()
    arena = shm / "hostile.arena"
    with arena.open("wb") as file:
        file.write(bytes(range(256)) * (ALLOCATED // 256))
        file.truncate(4 * MIB)
    service = Hostile(arena)
    server = grpc.server(ThreadPoolExecutor(4))
    engine_pb2_grpc.add_EngineServiceServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    server.add_insecure_port(f"unix:{tmp_path}/kvtier.sock")
    server.start()
    yield service
    server.stop(0).wait()


@pytest.fixture
def engine(tmp_path: Path, hostile: Hostile) -> Iterator[Engine]:
    engine = Engine(f"{tmp_path}/kvtier.sock")
    yield engine
    engine.close()


def load(**changes: Any) -> pb.LoadResponse:
    fields = {"lease_id": 5, "first": 0, "slots": offsets(*GOOD), "checksums": bytes(64)}
    return pb.LoadResponse(**(fields | changes))


def test_the_peer_is_good_enough_to_load_and_store(hostile: Hostile, engine: Engine) -> None:
    hostile.loads = [load()]
    assert engine.client.load("a", KEYS, engine.pages, range(4)).loaded == 4
    hostile.reserve = pb.ReserveResponse(reservation_id=3, states=b"\1\1\1\1", slots=offsets(*GOOD))
    assert engine.client.store(None, KEYS, engine.pages, range(4)).committed == 4


BAD_SLOTS = {
    "beyond what is allocated": offsets(0, SLOT, 2 * SLOT, ALLOCATED),
    "half beyond": offsets(0, SLOT, 2 * SLOT, ALLOCATED - PAGE_SIZE_BYTES),
    "beyond the file": offsets(0, SLOT, 2 * SLOT, 1 << 40),
    "around the end of numbers": offsets(0, SLOT, 2 * SLOT, 2**64 - PAGE_SIZE_BYTES),
    "minus one": offsets(0, SLOT, 2 * SLOT, 2**64 - 1),
    "in the middle of a page": offsets(0, SLOT, 2 * SLOT, 3 * SLOT + 64),
    "overlapping": offsets(0, SLOT, 2 * SLOT, 2 * SLOT + PAGE_SIZE_BYTES),
    "twice": offsets(0, SLOT, 2 * SLOT, 0),
    "cut off": offsets(*GOOD)[:-1],
}


@pytest.mark.parametrize("slots", BAD_SLOTS.values(), ids=BAD_SLOTS)
def test_slots_of_a_load(hostile: Hostile, engine: Engine, slots: bytes) -> None:
    hostile.loads = [load(slots=slots)]
    before = engine.memory.copy()
    result = engine.client.load("b", KEYS, engine.pages, range(4))
    assert (result.loaded, result.failed_reason) == (0, "fault")
    assert np.array_equal(engine.memory, before), "pages were written"


@pytest.mark.parametrize("slots", BAD_SLOTS.values(), ids=BAD_SLOTS)
def test_slots_of_a_store(hostile: Hostile, engine: Engine, shm: Path, slots: bytes) -> None:
    hostile.reserve = pb.ReserveResponse(reservation_id=3, states=b"\1\1\1\1", slots=slots)
    before = (shm / "hostile.arena").read_bytes()
    result = engine.client.store(None, KEYS, engine.pages, range(4))
    assert (result.committed, result.reason) == (0, "fault")
    assert (shm / "hostile.arena").read_bytes() == before, "the arena was written"
    assert [type(request) for request in hostile.said] == [pb.AbortRequest]


@pytest.mark.parametrize(
    "messages",
    [
        [load(checksums=bytes(63))],
        [load(first=1)],
        [load(lease_id=0)],
        [load(), load(first=4)],
        [load(slots=offsets(*GOOD, 4 * SLOT), checksums=bytes(80))],
    ],
    ids=["checksums", "first", "no lease", "more than asked", "five for four"],
)
def test_malformed_loads(hostile: Hostile, engine: Engine, messages: list[pb.LoadResponse]) -> None:
    hostile.loads = messages
    loaded = engine.client.load("c", KEYS, engine.pages, range(4)).loaded
    assert loaded == (4 if len(messages) == 2 else 0)


def test_parts_that_do_not_follow_each_other_are_not_loaded(hostile: Hostile, engine: Engine) -> None:
    half = {"slots": offsets(*GOOD[:2]), "checksums": bytes(32)}
    for second in (load(first=3, **half), load(first=2, lease_id=6, **half)):
        hostile.loads = [load(**half), second]
        assert engine.client.load("d", KEYS, engine.pages, range(4)).loaded <= 2
    hostile.loads = [load(**half), load(first=2, **half)]
    assert engine.client.load("d", KEYS, engine.pages, range(4)).loaded == 4


def test_a_lease_that_was_not_valid_loads_nothing(hostile: Hostile, engine: Engine) -> None:
    hostile.loads, hostile.valid = [load()], False
    result = engine.client.load("e", KEYS, engine.pages, range(4))
    assert (result.loaded, result.failed_reason) == (0, "expired")


def test_an_answer_without_end_ends_with_the_keys(hostile: Hostile, engine: Engine) -> None:
    empty = load(slots=b"", checksums=b"")

    def endless() -> Iterator[pb.LoadResponse]:
        while True:
            yield empty

    hostile.loads = endless()  # type: ignore[assignment]
    assert engine.client.load("f", KEYS, engine.pages, range(4), budget_s=0.5).loaded == 0


@pytest.mark.parametrize(
    "reply",
    [
        pb.ReserveResponse(reservation_id=3, states=b"\1\1\1", slots=offsets(*GOOD)),
        pb.ReserveResponse(reservation_id=3, states=b"\1" * 5, slots=offsets(*GOOD, 4 * SLOT)),
        pb.ReserveResponse(reservation_id=3, states=b"\2\2\2\2", slots=offsets(*GOOD)),
        pb.ReserveResponse(reservation_id=3),
    ],
)
def test_malformed_reservations(hostile: Hostile, engine: Engine, reply: pb.ReserveResponse) -> None:
    hostile.reserve = reply
    assert engine.client.store(None, KEYS, engine.pages, range(4)).committed == 0
    assert [type(request) for request in hostile.said] == [pb.AbortRequest]


@pytest.mark.parametrize(
    "reply",
    [
        pb.LookupResponse(blocks=5, estimate_s=0.1),
        pb.LookupResponse(blocks=2**32 - 1, estimate_s=0.1),
        pb.LookupResponse(blocks=1, estimate_s=float("nan")),
        pb.LookupResponse(blocks=1, estimate_s=float("inf")),
        pb.LookupResponse(blocks=1, estimate_s=-1.0),
    ],
)
def test_malformed_offers(hostile: Hostile, engine: Engine, reply: pb.LookupResponse) -> None:
    hostile.lookup = reply
    offer = engine.client.lookup("g", KEYS)
    assert (offer.blocks, offer.reason) == (0, "fault")


@pytest.mark.parametrize(
    "change",
    [
        {"slot_bytes": LAYOUT.block_bytes - 1},
        {"slot_bytes": SLOT + PAGE_SIZE_BYTES},
        {"max_keys_per_call": 0},
        {"reservation_ttl_s": float("nan")},
    ],
)
def test_registrations_that_cannot_be_worked_with(
    hostile: Hostile, engine: Engine, change: dict[str, Any]
) -> None:
    hostile.registration.MergeFrom(pb.RegisterResponse(**{k: v for k, v in change.items() if v}))
    if "max_keys_per_call" in change:
        hostile.registration.max_keys_per_call = 0
    assert engine.client.lookup("h", KEYS).blocks == 0


def test_an_arena_that_is_none(hostile: Hostile, engine: Engine) -> None:
    hostile.registration.arena.path = "/etc/passwd"
    assert engine.client.lookup("i", KEYS).blocks == 4
    hostile.loads = [load()]
    assert engine.client.load("i", KEYS, engine.pages, range(4)).loaded == 0


@pytest.fixture
def slab(hostile: Hostile) -> Iterator[devices.Slab]:
    """The node says that it has device memory, which holds other bytes than the arena."""
    made = devices.allocate("cpu", MIB)
    made.copy_in([(0, memoryview(b"\xee" * MIB))])
    hostile.registration.device_memory.CopyFrom(
        pb.DeviceMemory(device="cpu", handle=made.handle(), size_bytes=MIB)
    )
    yield made
    made.close()


def test_copies_in_device_memory_are_read_and_the_rest_from_the_arena(
    hostile: Hostile, engine: Engine, slab: devices.Slab
) -> None:
    hostile.loads = [load(copies=offsets(0, NO_SLOT, SLOT, NO_SLOT))]
    assert engine.client.load("a", KEYS, engine.pages, range(4)).loaded == 4
    assert (engine.rows([0, 2]) == 0xEE).all()
    assert not (engine.rows([1, 3]) == 0xEE).all(axis=None)
    assert engine.client.stats().device_blocks == 2


@pytest.mark.parametrize(
    "copies",
    [
        offsets(MIB, NO_SLOT, NO_SLOT, NO_SLOT),
        offsets(MIB - PAGE_SIZE_BYTES, NO_SLOT, NO_SLOT, NO_SLOT),
        offsets(NO_SLOT - PAGE_SIZE_BYTES + 1, NO_SLOT, NO_SLOT, NO_SLOT),
        offsets(0, PAGE_SIZE_BYTES, NO_SLOT, NO_SLOT),
        offsets(64, NO_SLOT, NO_SLOT, NO_SLOT),
        offsets(0, NO_SLOT),
        offsets(*GOOD, 4 * SLOT),
        b"x",
    ],
)
def test_copies_outside_device_memory_touch_nothing(
    hostile: Hostile, engine: Engine, slab: devices.Slab, copies: bytes
) -> None:
    before = engine.memory.copy()
    hostile.loads = [load(copies=copies)]
    assert engine.client.load("a", KEYS, engine.pages, range(4)).loaded == 0
    assert np.array_equal(engine.memory, before)


@pytest.mark.parametrize(
    "memory",
    [
        pb.DeviceMemory(),
        pb.DeviceMemory(device="cpu", handle=b"{}", size_bytes=MIB),
        pb.DeviceMemory(device="cuda:0", handle=b'{"kind": "cuda"}', size_bytes=MIB),
        pb.DeviceMemory(device="cpu", handle=b"x" * (1 << 20), size_bytes=MIB),
        pb.DeviceMemory(device="cpu", handle=b"[" * 4000, size_bytes=MIB),
        pb.DeviceMemory(device="cpu", handle=b'{"kind": "cpu", "size_bytes": Infinity}', size_bytes=MIB),
    ],
)
def test_device_memory_that_cannot_be_mapped_leaves_the_arena(
    hostile: Hostile, engine: Engine, memory: pb.DeviceMemory
) -> None:
    hostile.registration.device_memory.CopyFrom(memory)
    hostile.loads = [load(copies=offsets(*GOOD))]
    for _ in range(2):
        assert engine.client.load("a", KEYS, engine.pages, range(4)).loaded == 4
    assert engine.client.stats().device_blocks == 0


def test_device_memory_of_another_size_than_said_is_not_used(
    hostile: Hostile, engine: Engine, slab: devices.Slab
) -> None:
    hostile.registration.device_memory.size_bytes = 2 * MIB
    hostile.loads = [load(copies=offsets(*GOOD))]
    assert engine.client.load("a", KEYS, engine.pages, range(4)).loaded == 4
    assert engine.client.stats().device_blocks == 0


def test_memory_of_another_kind_than_the_pages_is_not_touched(slab: devices.Slab) -> None:
    with pytest.raises(Unavailable, match="not 1048576 of cuda"):
        DeviceMapping(slab.handle(), MIB, "cuda")


class NoWayFromTheDevice(CpuCopier):
    """Pages to which nothing can be copied from device memory, as between GPUs without mutual access."""

    tried = 0

    def to_pages(self, memory: SlotMemory, offsets: Sequence[int], ids: Sequence[int]) -> None:
        if isinstance(memory, DeviceMapping):
            self.tried += 1
            raise TierFault("no access")
        super().to_pages(memory, offsets, ids)


def test_device_memory_that_cannot_be_copied_from_leaves_the_arena(
    hostile: Hostile, engine: Engine, slab: devices.Slab
) -> None:
    hostile.loads = [load(copies=offsets(0, NO_SLOT, SLOT, NO_SLOT))]
    known = engine.pages.copier
    assert isinstance(known, CpuCopier)
    copier = NoWayFromTheDevice(known._layout, known._bands)
    engine.pages.copier = copier
    for _ in range(2):
        assert engine.client.load("a", KEYS, engine.pages, range(4)).loaded == 4
        assert not (engine.memory == 0xEE).all(axis=-1).any()
    assert copier.tried == 1, "once is enough"
    assert engine.client.stats().device_blocks == 0
