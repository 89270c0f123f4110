"""All stripes of a file tier together: found or made, checked against the configuration, given their space.

Everything here blocks and runs on one thread at a time.

Making a medium writes nothing but superblocks, in two rounds:

1. every stripe gets its superblock, marked as incomplete;
2. when all of them are on stable storage, each is written again as complete.

A crash in round 1 leaves no complete one: the next start makes all of them anew. A crash in round 2 leaves a
superblock of the same medium everywhere, so the next start goes on with it.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from kvtier import logs
from kvtier.errors import AlreadyRunning, ConfigError, ResourceShortage, TierFault
from kvtier.tiers import file_format
from kvtier.tiers.file_format import FORMAT_VERSION, MAX_EXTENTS, MEDIUM_BYTES, SUPERBLOCK_READERS, Superblock
from kvtier.tiers.file_io import SLAB_NAME, Calls, Rates, Stripe
from kvtier.tiers.file_threads import Health, Rate
from kvtier.types import PAGE_SIZE_BYTES, whole_pages

MAX_STRIPES: Final = 64
GROW_STEP_BYTES: Final = 1 << 30
"""One step sets so much space apart before free space is looked at again."""
_NODE_ID: Final = re.compile(r"[0-9a-f]{32}")

_log = logs.get("file")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is configured.

    Attributes
    ----------
    capacity_bytes
        Hard cap on what all paths together take, the file systems' own overhead included.
    catalogue_bytes
        Of each of the two areas of each stripe; None: in proportion.
    keep_free_bytes
        What a file system keeps for others.
    """

    node_id: str
    paths: tuple[Path, ...]
    capacity_bytes: int
    extent_bytes: int
    catalogue_bytes: int | None
    keep_free_bytes: int

    def check(self) -> None:
        """Raises `ConfigError`."""
        if _NODE_ID.fullmatch(self.node_id) is None:
            raise ConfigError(f"node_id is {self.node_id!r}: allowed are 32 hexadecimal digits")
        if not 0 < len(self.paths) <= MAX_STRIPES:
            raise ConfigError(f"nvme_paths has {len(self.paths)} paths: allowed are 1 .. {MAX_STRIPES}")
        twice = [path for path, count in Counter(map(os.path.realpath, self.paths)).items() if count > 1]
        if twice:
            raise ConfigError(f"nvme_paths names {twice[0]} twice: name each path once")
        if self.extent_bytes < 2 * PAGE_SIZE_BYTES or self.extent_bytes % PAGE_SIZE_BYTES:
            raise ConfigError(
                f"extent_bytes is {self.extent_bytes}: allowed is a multiple of {PAGE_SIZE_BYTES} from "
                f"{2 * PAGE_SIZE_BYTES} on"
            )

    def superblock(self, sizes: Sequence[int | None]) -> Superblock:
        """The superblock of stripe 0 on devices of these sizes (None: a file in a directory).

        A directory's share leaves a part for what the file system itself needs for the file.
        """
        share = self.capacity_bytes // len(self.paths)
        usable = min(
            share - share // 512 - (64 << 10) if size is None else min(share, size) for size in sizes
        )
        area = self.catalogue_bytes if self.catalogue_bytes is not None else usable // 256
        area = max(PAGE_SIZE_BYTES, whole_pages(area))
        extents = (usable - 2 * PAGE_SIZE_BYTES - 2 * area) // (self.extent_bytes + PAGE_SIZE_BYTES)
        if extents < 1:
            raise ConfigError(
                f"nvme_bytes is {self.capacity_bytes}: too little for an extent of {self.extent_bytes} bytes "
                f"on each of {len(self.paths)} paths; allowed is more, or lower extent_bytes"
            )
        if extents * len(self.paths) > MAX_EXTENTS:
            raise ConfigError(
                f"nvme_bytes is {self.capacity_bytes}: that is more than {MAX_EXTENTS} extents of "
                f"{self.extent_bytes} bytes; raise extent_bytes"
            )
        medium = os.urandom(MEDIUM_BYTES)
        node = bytes.fromhex(self.node_id)
        return Superblock(medium, node, 0, len(self.paths), self.extent_bytes, extents, area, complete=False)


class Medium:
    """The stripes in order, and how extents lie on them.

    Attributes
    ----------
    number
        `Superblock.medium`.
    notices
        What an operator should know, a line each.
    """

    def __init__(self, plan: Plan, health: Health, calls: Calls) -> None:
        plan.check()
        self._plan = plan
        self._health = health
        self._calls = calls
        self.rates = Rates(Rate(), Rate())
        self.notices: list[str] = []
        self.stripes: list[Stripe] = []
        self.superblocks: list[Superblock] = []
        self._own: list[int] = []

    # ---- life

    def open(self) -> None:
        """Open, lock, and check or make; then back with space what can be.

        Raises
        ------
        ConfigError, AlreadyRunning, ResourceShortage
            Each says what to do; nothing has been changed, or it will be made anew.
        """
        self.stripes = [Stripe(path, self._health, self._calls, self.rates) for path in self._plan.paths]
        try:
            for stripe in self.stripes:
                stripe.open()
                if not stripe.direct:
                    self._note(f"{stripe.path}: no O_DIRECT there, so bytes pass through the page cache")
            self._agree()
            self._settle_space()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close all; idempotent."""
        for stripe in self.stripes:
            stripe.close()

    def reopen(self) -> None:
        """Find the same medium behind the same paths: a file system mounted again, a new device node.

        Raises
        ------
        TierFault
            It is not there, or is another one.
        """
        for stripe, superblock in zip(self.stripes, self.superblocks, strict=True):
            stripe.forget_check()
            try:
                stripe.check_path()
                self._check_device(stripe, superblock)
            except TierFault:
                stripe.close()
                try:
                    stripe.open(create=False)
                except (ConfigError, AlreadyRunning) as error:
                    raise TierFault(str(error)) from error
                self._check_device(stripe, superblock)

    def _check_device(self, stripe: Stripe, superblock: Superblock) -> None:
        """It holds this stripe, and takes and gives a page."""
        try:
            found = _look(stripe)
        except ConfigError as error:
            raise TierFault(str(error)) from error
        if found != superblock:
            raise TierFault(f"{stripe.path}: this is not the medium that was there; restart the daemon")
        if stripe.size_bytes < superblock.extent_offset(0):
            raise TierFault(f"{stripe.path}: it was truncated; restart the daemon")
        page = os.urandom(PAGE_SIZE_BYTES)
        stripe.store(PAGE_SIZE_BYTES, page)
        stripe.flush()
        if stripe.load(PAGE_SIZE_BYTES, PAGE_SIZE_BYTES) != page:
            raise TierFault(f"{stripe.path}: it does not give back what was written")

    # ---- superblocks

    def _agree(self) -> None:
        wanted = self._plan.superblock([stripe.fixed_bytes for stripe in self.stripes])
        found = [_look(stripe) for stripe in self.stripes]
        for stripe, superblock in zip(self.stripes, found, strict=True):
            if superblock is not None:
                self._check_owner(stripe, superblock)
        known = [superblock for superblock in found if superblock is not None]
        same = len({superblock.medium for superblock in known}) == 1
        if not (same and len(known) == len(found)):
            if any(superblock.complete for superblock in known):
                raise self._mixed(found)
            known = self._make(wanted)
        if sorted(superblock.stripe for superblock in known) != list(range(len(known))):
            raise self._mixed(found)
        self._check_geometry(known, wanted)
        order = sorted(range(len(known)), key=lambda i: known[i].stripe)
        self.stripes = [self.stripes[i] for i in order]
        self.superblocks = [replace(known[i], complete=True, version=FORMAT_VERSION) for i in order]
        if self.superblocks != [known[i] for i in order]:
            self._write(self.superblocks)

    def _make(self, wanted: Superblock) -> list[Superblock]:
        made = [replace(wanted, stripe=i) for i in range(len(self.stripes))]
        for stripe, superblock in zip(self.stripes, made, strict=True):
            if stripe.fixed_bytes is None and not stripe.allocate(0, superblock.extent_offset(0)):
                raise _full(stripe)
        self._write(made)
        return made

    def _write(self, superblocks: Sequence[Superblock]) -> None:
        for stripe, superblock in zip(self.stripes, superblocks, strict=True):
            stripe.store(0, superblock.pack())
            stripe.flush()

    def _check_owner(self, stripe: Stripe, superblock: Superblock) -> None:
        if superblock.node.hex() != self._plan.node_id:
            raise ConfigError(
                f"{stripe.path}: it holds blocks of node {superblock.node.hex()}, and this is node "
                f"{self._plan.node_id}; name another path, restore that node's data_dir, or {_erase(stripe)}"
            )

    def _check_geometry(self, known: Sequence[Superblock], wanted: Superblock) -> None:
        for superblock in known:
            stripe = self.stripes[known.index(superblock)]
            for name in ("stripes", "extent_bytes", "extents", "catalogue_bytes"):
                was, now = getattr(superblock, name), getattr(wanted, name)
                if was != now:
                    raise ConfigError(
                        f"{stripe.path}: it was made with {name} {was}, and the configuration gives {now}; "
                        f"set nvme_bytes, nvme_paths and extent_bytes back to what they were, or "
                        f"{_erase(stripe)}"
                    )

    def _mixed(self, found: Sequence[Superblock | None]) -> ConfigError:
        states = ", ".join(
            f"{stripe.path}: "
            + ("empty" if superblock is None else f"stripe {superblock.stripe + 1} of {superblock.stripes}")
            for stripe, superblock in zip(self.stripes, found, strict=True)
        )
        erase = "; ".join(
            _erase(stripe)
            for stripe, superblock in zip(self.stripes, found, strict=True)
            if superblock is not None
        )
        return ConfigError(
            f"the paths do not belong together ({states}): name the paths that were used together, or begin "
            f"anew: {erase}"
        )

    # ---- space

    @property
    def extent_bytes(self) -> int:
        """Size of an extent."""
        return self._plan.extent_bytes

    @property
    def number(self) -> bytes:
        """See `Superblock.medium`."""
        return self.superblocks[0].medium

    @property
    def extents(self) -> int:
        """Of all stripes, at most."""
        return self.superblocks[0].extents * len(self.stripes)

    @property
    def allocated_extents(self) -> int:
        """Extents from 0 on that space stands behind."""
        count = len(self.stripes)
        return min(self.extents, *(own * count + stripe for stripe, own in enumerate(self._own)))

    def place(self, extent: int) -> tuple[Stripe, int]:
        """Stripe of an extent, and where it begins there."""
        stripe, index = extent % len(self.stripes), extent // len(self.stripes)
        return self.stripes[stripe], self.superblocks[stripe].extent_offset(index)

    def table_page(self, extent: int) -> tuple[Stripe, int]:
        """Stripe of an extent, and where its page of the table lies there."""
        stripe, index = extent % len(self.stripes), extent // len(self.stripes)
        return self.stripes[stripe], self.superblocks[stripe].table_offset + index * PAGE_SIZE_BYTES

    def _settle_space(self) -> None:
        """Fill holes, cut what is beyond the cap, and take what is free."""
        for stripe, superblock in zip(self.stripes, self.superblocks, strict=True):
            if stripe.fixed_bytes is not None:
                self._own.append(superblock.extents)
                continue
            end_bytes = min(stripe.size_bytes, superblock.extent_offset(superblock.extents))
            if end_bytes < stripe.size_bytes:
                stripe.truncate(end_bytes)
            if not stripe.allocate(0, max(end_bytes, superblock.extent_offset(0))):
                raise _full(stripe)
            self._own.append(max(0, end_bytes - superblock.extent_offset(0)) // superblock.extent_bytes)
        while self.extend():
            pass

    def extend(self) -> bool:
        """Take one more step of space; False where there is none, or the cap is reached."""
        count = len(self.stripes)
        rounds = (self.extents - self.allocated_extents) // count
        rounds = min(rounds, max(1, GROW_STEP_BYTES // (self.extent_bytes * count)))
        step = range(self.allocated_extents, self.allocated_extents + max(1, rounds) * count)
        for extents in (step, step[:1]):
            wanted = Counter(extent % count for extent in extents if extent < self.extents)
            if wanted and self._fits(wanted):
                return all(self._take(stripe, extents) for stripe in wanted)
        return False

    def _fits(self, wanted: Counter[int]) -> bool:
        needed: Counter[int] = Counter()
        free: dict[int, int] = {}
        for number, extents in wanted.items():
            stripe = self.stripes[number]
            if stripe.fixed_bytes is None:
                needed[stripe.file_system()] += extents * self.extent_bytes
                free[stripe.file_system()] = stripe.free_bytes()
        keep_bytes = self._plan.keep_free_bytes
        return all(size_bytes + keep_bytes <= free[where] for where, size_bytes in needed.items())

    def _take(self, number: int, extents: range) -> bool:
        """Back the stripe's part of `extents`."""
        stripe, superblock = self.stripes[number], self.superblocks[number]
        own = max(
            extent // len(self.stripes) + 1 for extent in extents if extent % len(self.stripes) == number
        )
        own = min(own, superblock.extents)
        if own > self._own[number]:
            end_bytes = superblock.extent_offset(own)
            if not stripe.allocate(superblock.extent_offset(self._own[number]), end_bytes):
                return False
            self._own[number] = own
        return True

    def _note(self, line: str) -> None:
        self.notices.append(line)
        _log.info(line)


def _look(stripe: Stripe) -> Superblock | None:
    """The superblock of a stripe; None where it is new.

    Raises
    ------
    ConfigError
        It cannot be read, or what is there is somebody else's.
    """
    if stripe.fixed_bytes is not None and stripe.fixed_bytes < PAGE_SIZE_BYTES:
        raise ConfigError(f"{stripe.path}: it has {stripe.fixed_bytes} bytes; name a larger one")
    page = bytes(stripe.load(0, PAGE_SIZE_BYTES))
    version = file_format.superblock_version(page)
    if version is None:
        if not any(page) and (stripe.fixed_bytes is None or stripe.is_blank()):
            return None
        raise ConfigError(
            f"{stripe.path}: what is there was not written by kvtier, or its first page is damaged; name "
            f"another path, or {_erase(stripe)}"
        )
    if version not in SUPERBLOCK_READERS:
        age = "a newer" if version > FORMAT_VERSION else "an older"
        raise ConfigError(
            f"{stripe.path}: it is of format {version}, which {age} kvtier wrote; this one reads "
            f"{', '.join(map(str, sorted(SUPERBLOCK_READERS)))}; start that version again, or "
            f"{_erase(stripe)}"
        )
    superblock = file_format.read_superblock(page)
    if superblock is None:
        raise ConfigError(f"{stripe.path}: its first page is damaged; {_erase(stripe)}")
    return superblock


def _erase(stripe: Stripe) -> str:
    if stripe.fixed_bytes is None:
        return f"delete {stripe.path / SLAB_NAME} (the blocks in it are lost)"
    return f"erase it (all that is on it is lost): dd if=/dev/zero of={stripe.path} bs=1M count=1"


def _full(stripe: Stripe) -> ResourceShortage:
    return ResourceShortage(f"{stripe.path}: its file system is full: free some space, or lower nvme_bytes")
