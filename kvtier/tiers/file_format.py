"""What the file tier writes, byte by byte: superblock, table, catalogue, slot headers.

One **stripe** is one slab file or block device. From its offset 0, in pages of 4096 bytes, little endian:

=============  ===============================================================================
superblock     one page: whose it is, the format's version, the geometry, the medium's number
probe          one page that is written and read to find out whether the device works
catalogue      two areas of `catalogue_bytes`; checkpoints go to them in turn
table          one page an extent: slot size, generation, epoch of its last change
extents        `extents` times `extent_bytes`; a slot is a header page and the block behind it
=============  ===============================================================================

What stands behind a header is the block, or a payload of a codec (`kvtier.codecs`) that has at least a page
less; the header says which. The slot has the size for the raw block in any case, so a codec saves reading,
writing and wear, not space: slots of other sizes would have to be chosen before anything is encoded. A kvtier
that does not know a codec finds no block there.

The **medium** number is drawn at random when all stripes of a tier are made. It keys the checksums
(BLAKE2b) of headers and table: a page that only looks like a header, because a block holds such bytes or
because the disk was somebody else's before, is never taken for one. So slots may begin where older blocks of
another size lie, and nothing has to be erased.

Versions
--------
The superblock begins with magic and version, in every version. `SUPERBLOCK_READERS` and `HEADER_READERS`
have one entry for each version that this code can read, and each header names its own. To change the
format: raise `FORMAT_VERSION`, add the new readers, keep the old ones. A slab of a version that has a reader
is opened; its superblock is rewritten as `FORMAT_VERSION` (one page, after which older programs refuse it),
its slots are read as what they say they are, and become new ones as they are overwritten. A version without a
reader, older or newer, is a `ConfigError` that says what to do; nothing is changed then.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.codecs import CODEC_NAMES
from kvtier.types import KEY_SIZE_BYTES, PAGE_SIZE_BYTES, BlockId, BlockRecord, whole_pages

FORMAT_VERSION: Final = 1
HEADER_BYTES: Final = 192
"""What of a header page says anything; the rest is zeros."""
CODEC_RAW: Final = CODEC_NAMES.index("raw")
MEDIUM_BYTES: Final = 16
MAX_EXTENTS: Final = 1 << 24
MAX_COUNT: Final = 1 << 62
"""No medium lives to see positions, counters or epochs as large: they are damage, and must not overflow."""

_SUPERBLOCK_MAGIC: Final = b"KVTSLAB\n"
_TABLE_MAGIC: Final = 0x4254564B
_CATALOGUE_MAGIC: Final = 0x4354564B
_HEADER_MAGIC: Final = 0x4853564B
_HAS_PARENT: Final = 1

_SUPERBLOCK: Final = struct.Struct("<8sII16s16sIIQQQ")
_TABLE: Final = struct.Struct("<IIQQQI4x")
_CATALOGUE: Final = struct.Struct("<IIQQIIQQQQ16s")
_HEADER: Final = struct.Struct("<IHHIIII32s32s32s16sQQQQQ")
_ROW: Final = struct.Struct(f"{_HEADER.format}16x")

Raw = bytes | bytearray | memoryview
Rows = npt.NDArray[np.uint8]
"""``[n, HEADER_BYTES]``: headers as they lie on the medium."""

ROW_DTYPE: Final = np.dtype(
    [
        ("magic", "<u4"),
        ("version", "<u2"),
        ("codec", "<u2"),
        ("shard", "<u4"),
        ("flags", "<u4"),
        ("generation", "<u4"),
        ("reserved", "<u4"),
        ("key", "V32"),
        ("parent", "V32"),
        ("fingerprint", "V32"),
        ("checksum", "V16"),
        ("block_bytes", "<u8"),
        ("payload_bytes", "<u8"),
        ("slot_bytes", "<u8"),
        ("offset_bytes", "<u8"),
        ("position", "<u8"),
        ("mac", "V16"),
    ]
)
COVERED_DTYPE: Final = np.dtype(
    [("extent", "<u4"), ("generation", "<u4"), ("slot_bytes", "<u8"), ("rows", "<u4"), ("reserved", "<u4")]
)
assert ROW_DTYPE.itemsize == HEADER_BYTES == _HEADER.size + 16
_PAYLOAD_AT: Final = int(ROW_DTYPE.fields["payload_bytes"][1])  # type: ignore[index]


def _page(content: bytes) -> bytes:
    return content.ljust(PAGE_SIZE_BYTES, b"\0")


def _mac(medium: bytes, content: Raw) -> bytes:
    return blake2b(content, digest_size=16, key=medium).digest()


# ---- the superblock


@dataclass(frozen=True, slots=True)
class Superblock:
    """Whose stripe this is, and where everything lies in it.

    Attributes
    ----------
    medium
        Shared by all stripes of a tier and by nothing else; never logged.
    node
        16 bytes.
    stripe, stripes
        Extent ``e`` of the tier is extent ``e // stripes`` of stripe ``e % stripes``.
    extents
        How many this stripe has at most.
    catalogue_bytes
        Of each of the two areas.
    complete
        All stripes have their superblock.
    """

    medium: bytes
    node: bytes
    stripe: int
    stripes: int
    extent_bytes: int
    extents: int
    catalogue_bytes: int
    complete: bool
    version: int = FORMAT_VERSION

    @property
    def table_offset(self) -> int:
        """Where the table begins."""
        return 2 * PAGE_SIZE_BYTES + 2 * self.catalogue_bytes

    def catalogue_offset(self, epoch: int) -> int:
        """Where the checkpoint of that epoch goes."""
        return 2 * PAGE_SIZE_BYTES + epoch % 2 * self.catalogue_bytes

    def extent_offset(self, index: int) -> int:
        """Where the stripe's own extent `index` begins; with the number of extents, the stripe's size."""
        return self.table_offset + self.extents * PAGE_SIZE_BYTES + index * self.extent_bytes

    def pack(self) -> bytes:
        """One page."""
        content = _SUPERBLOCK.pack(
            _SUPERBLOCK_MAGIC,
            self.version,
            self.complete,
            self.medium,
            self.node,
            self.stripe,
            self.stripes,
            self.extent_bytes,
            self.extents,
            self.catalogue_bytes,
        )
        return _page(content + xxhash.xxh3_128_digest(content))


def _superblock_v1(page: bytes) -> Superblock | None:
    content = page[: _SUPERBLOCK.size]
    if page[_SUPERBLOCK.size : _SUPERBLOCK.size + 16] != xxhash.xxh3_128_digest(content):
        return None
    _, version, complete, medium, node, stripe, stripes, extent_bytes, extents, area = _SUPERBLOCK.unpack(
        content
    )
    whole = not (extent_bytes % PAGE_SIZE_BYTES or area % PAGE_SIZE_BYTES)
    if not (whole and extent_bytes and stripe < stripes and 0 < extents * stripes <= MAX_EXTENTS):
        return None
    return Superblock(medium, node, stripe, stripes, extent_bytes, extents, area, bool(complete), version)


SUPERBLOCK_READERS: Final[Mapping[int, Callable[[bytes], Superblock | None]]] = {1: _superblock_v1}


def superblock_version(page: bytes) -> int | None:
    """The version that a superblock is of; None where the page is none of kvtier's."""
    magic, version = struct.unpack_from("<8sI", page)
    return int(version) if magic == _SUPERBLOCK_MAGIC else None


def read_superblock(page: bytes) -> Superblock | None:
    """A superblock of a version that can be read; None where it is damaged."""
    version = superblock_version(page)
    return None if version is None else SUPERBLOCK_READERS[version](page)


# ---- the table


class TableEntry(NamedTuple):
    """What one extent serves since when: of `slot_bytes` 0 nothing yet."""

    slot_bytes: int
    generation: int
    epoch: int


def pack_table_entry(medium: bytes, extent: int, entry: TableEntry) -> bytes:
    """The page of the tier's extent `extent`."""
    content = _TABLE.pack(_TABLE_MAGIC, 1, extent, entry.slot_bytes, entry.epoch, entry.generation)
    return _page(content + _mac(medium, content))


def read_table_entry(medium: bytes, extent: int, page: memoryview) -> TableEntry | None:
    """None where the page is damaged, another extent's, or was never written."""
    content = page[: _TABLE.size]
    magic, _, number, slot_bytes, epoch, generation = _TABLE.unpack(content)
    if magic != _TABLE_MAGIC or number != extent or epoch >= MAX_COUNT:
        return None
    if page[_TABLE.size : _TABLE.size + 16] != _mac(medium, content):
        return None
    return TableEntry(slot_bytes, generation, epoch)


def may_serve(slot_bytes: int, extent_bytes: int) -> bool:
    """Whether an extent can have slots of this size."""
    return PAGE_SIZE_BYTES < slot_bytes <= extent_bytes and not slot_bytes % PAGE_SIZE_BYTES


# ---- slot headers


class Place(NamedTuple):
    """Where a slot lies in the tier, and under which generation of its extent."""

    offset_bytes: int
    slot_bytes: int
    generation: int


class Form(NamedTuple):
    """What stands behind a header: so many bytes that the codec of this wire id decodes to the block."""

    codec: int
    payload_bytes: int


def raw_form(block_bytes: int) -> Form:
    """The block as it is."""
    return Form(CODEC_RAW, block_bytes)


class Header(NamedTuple):
    """What a header page says."""

    record: BlockRecord
    place: Place
    form: Form
    position: int


def pack_header(medium: bytes, record: BlockRecord, place: Place, form: Form, position: int) -> bytes:
    """`HEADER_BYTES` bytes; `position` counts the bytes that were written to the medium before this slot."""
    content = _HEADER.pack(
        _HEADER_MAGIC,
        1,
        form.codec,
        record.block.shard,
        0 if record.parent is None else _HAS_PARENT,
        place.generation,
        0,
        record.block.key,
        record.parent or bytes(KEY_SIZE_BYTES),
        record.fingerprint,
        record.checksum,
        record.block_bytes,
        form.payload_bytes,
        place.slot_bytes,
        place.offset_bytes,
        position,
    )
    return content + _mac(medium, content)


def _is_whole_v1(medium: bytes, raw: Raw) -> bool:
    return raw[_HEADER.size : HEADER_BYTES] == _mac(medium, raw[: _HEADER.size])


def unpack_row(content: Raw) -> Header:
    """A header that has been verified."""
    return _header(_HEADER.unpack(content[: _HEADER.size]))


def unpack_places(rows: Rows) -> Iterator[tuple[int, int, BlockRecord]]:
    """Offset and size of each slot, and what is in it: what a start needs of a hundred thousand headers."""
    for fields in _ROW.iter_unpack(rows.tobytes()):
        yield fields[14], fields[13], _record(fields)


def _record(fields: Sequence[Any]) -> BlockRecord:
    _, _, _, shard, flags, _, _, key, parent, fingerprint, checksum, block_bytes = fields[:12]
    return BlockRecord(
        BlockId(key, shard), parent if flags & _HAS_PARENT else None, fingerprint, block_bytes, checksum
    )


def _header(fields: Sequence[Any]) -> Header:
    codec, generation = fields[2], fields[5]
    payload_bytes, slot_bytes, offset_bytes, position = fields[12:]
    place = Place(offset_bytes, slot_bytes, generation)
    return Header(_record(fields), place, Form(codec, payload_bytes), position)


class HeaderReader(NamedTuple):
    """Of one version: whether these bytes are a whole header of the medium, and what it says then."""

    is_whole: Callable[[bytes, Raw], bool]
    unpack: Callable[[Raw], Header]


HEADER_READERS: Final[Mapping[int, HeaderReader]] = {1: HeaderReader(_is_whole_v1, unpack_row)}


def _reader(medium: bytes, raw: Raw) -> HeaderReader | None:
    magic, version = struct.unpack_from("<IH", raw)
    reader = HEADER_READERS.get(version) if magic == _HEADER_MAGIC else None
    return reader if reader is not None and reader.is_whole(medium, raw) else None


def read_header(medium: bytes, raw: Raw) -> Header | None:
    """None where these `HEADER_BYTES` bytes are no whole header of this medium."""
    reader = _reader(medium, raw)
    return None if reader is None else reader.unpack(raw)


def says(header: Header | None, record: BlockRecord, place: Place, form: Form) -> bool:
    """Whether the slot holds this block in this form. The parent is left out: the key names the prefix."""
    return (
        header is not None
        and header.place == place
        and header.form == form
        and header.record.block_bytes == record.block_bytes
        and header.record.block == record.block
        and header.record.checksum == record.checksum
        and header.record.fingerprint == record.fingerprint
    )


def form_of(row: Raw, block_bytes: int) -> Form:
    """In which form a slot that is to hold a block of this size has to be read, as its row says.

    The row may come from a medium: a form that no slot can have is taken for the raw one, so that the block
    is read within its slot, and found to be something else.
    """
    if len(row) < HEADER_BYTES:
        return raw_form(block_bytes)
    (codec,), (payload_bytes,) = struct.unpack_from("<H", row, 6), struct.unpack_from("<Q", row, _PAYLOAD_AT)
    coded = 0 < codec < len(CODEC_NAMES) and 0 < whole_pages(payload_bytes) < whole_pages(block_bytes)
    return Form(codec, payload_bytes) if coded else raw_form(block_bytes)


def valid_rows(
    medium: bytes, rows: Rows, base_bytes: int, slot_bytes: int, generation: int
) -> npt.NDArray[np.intp]:
    """Which slots of an extent, which begins at `base_bytes`, have a whole header: its numbers, ascending."""
    offsets = base_bytes + slot_bytes * np.arange(len(rows), dtype=np.uint64)
    plausible = _fields(rows)["offset_bytes"] == offsets
    plausible &= _are_plausible(rows, slot_bytes, generation)
    found = [i for i in np.flatnonzero(plausible).tolist() if _reader(medium, rows[i].tobytes()) is not None]
    return np.array(found, dtype=np.intp)


def places_of(
    rows: Rows, base_bytes: int, extent_bytes: int, slot_bytes: int, generation: int
) -> Sequence[int] | None:
    """The numbers of the slots of these headers; None if an extent that begins at `base_bytes` can not have
    them, or not in this order. Their checksums are not compared."""
    numbers, rests = np.divmod(_fields(rows)["offset_bytes"] - np.uint64(base_bytes), np.uint64(slot_bytes))
    in_order = bool((numbers[1:] > numbers[:-1]).all()) and not rests.any()
    if not in_order or not _are_plausible(rows, slot_bytes, generation).all():
        return None
    if len(numbers) and int(numbers[-1]) >= extent_bytes // slot_bytes:
        return None
    places: list[int] = numbers.tolist()
    return places


def _fields(rows: Rows) -> np.ndarray:
    return np.ascontiguousarray(rows).view(ROW_DTYPE)[:, 0]


def _are_plausible(rows: Rows, slot_bytes: int, generation: int) -> npt.NDArray[np.bool_]:
    """Which headers an extent of such slots can have somewhere."""
    fields = _fields(rows)
    plausible: npt.NDArray[np.bool_] = (
        (fields["magic"] == _HEADER_MAGIC)
        & (fields["slot_bytes"] == slot_bytes)
        & (fields["generation"] == generation)
        & (fields["codec"] < len(CODEC_NAMES))
        & (fields["payload_bytes"] > 0)
        & (fields["payload_bytes"] <= fields["block_bytes"])
        & (fields["block_bytes"] <= slot_bytes - PAGE_SIZE_BYTES)
        & (fields["position"] < MAX_COUNT)
    )
    return plausible


# ---- the catalogue


@dataclass(frozen=True, slots=True)
class Catalogue:
    """A checkpoint of one stripe.

    Attributes
    ----------
    epoch
        Extents whose table entry has a lower epoch are as they were when this was written.
    position
        Every write at a lower one had ended.
    written_bytes
        To the whole medium, since it was made.
    day, day_begin_bytes
        The UTC day (days since 1970) and `written_bytes` when it began.
    covered
        `COVERED_DTYPE`: the extents that are in it, each with the number of its rows.
    rows
        The headers of all their slots that hold a block.
    """

    epoch: int
    position: int
    written_bytes: int
    day: int
    day_begin_bytes: int
    covered: np.ndarray
    rows: Rows

    @property
    def size_bytes(self) -> int:
        """Of the area that it needs."""
        return PAGE_SIZE_BYTES + whole_pages(self.covered.nbytes + self.rows.nbytes)

    def pack(self, medium: bytes) -> bytes:
        """Whole pages."""
        payload = self.covered.tobytes() + self.rows.tobytes()
        content = _CATALOGUE.pack(
            _CATALOGUE_MAGIC,
            1,
            self.epoch,
            len(payload),
            len(self.covered),
            len(self.rows),
            self.position,
            self.written_bytes,
            self.day,
            self.day_begin_bytes,
            xxhash.xxh3_128_digest(payload),
        )
        return _page(content + _mac(medium, content)) + payload.ljust(whole_pages(len(payload)), b"\0")


def catalogue_bytes(medium: bytes, page: memoryview) -> int:
    """How much of an area its catalogue takes, as its first page says; 0 where that begins none."""
    content = page[: _CATALOGUE.size]
    magic, version, _, size, *_ = _CATALOGUE.unpack(content)
    if magic != _CATALOGUE_MAGIC or version != 1:
        return 0
    if page[_CATALOGUE.size : _CATALOGUE.size + 16] != _mac(medium, content):
        return 0
    return PAGE_SIZE_BYTES + whole_pages(size)


def read_catalogue(medium: bytes, area: memoryview) -> Catalogue | None:
    """None where the area holds no whole catalogue of this medium."""
    content = area[: _CATALOGUE.size]
    magic, version, epoch, size, covered, rows, position, written, day, day_begin, checksum = (
        _CATALOGUE.unpack(content)
    )
    if magic != _CATALOGUE_MAGIC or version != 1:
        return None
    if area[_CATALOGUE.size : _CATALOGUE.size + 16] != _mac(medium, content):
        return None
    payload = area[PAGE_SIZE_BYTES : PAGE_SIZE_BYTES + size]
    border = covered * COVERED_DTYPE.itemsize
    if size != border + rows * HEADER_BYTES or xxhash.xxh3_128_digest(payload) != checksum:
        return None
    if max(epoch, position, written, day_begin) >= MAX_COUNT:
        return None
    return Catalogue(
        epoch,
        position,
        written,
        day,
        day_begin,
        np.frombuffer(payload[:border], COVERED_DTYPE),
        np.frombuffer(payload[border:], np.uint8).reshape(rows, HEADER_BYTES),
    )
