"""Engines of a simulated fleet: they store and load prefixes that all of them share, on every site."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from kvtier.core import messages as m
from kvtier.errors import KvtierError, UnknownId
from kvtier.testing.fleet_daemon import Daemon, Site
from kvtier.testing.fleet_memory import Arena, checksum_of, make_block, version_of
from kvtier.testing.fleet_world import Process
from kvtier.testing.simulated_engine import make_chain
from kvtier.testing.simulated_node import pages_of
from kvtier.types import BlockId, Key, Layout, Slot

if TYPE_CHECKING:
    from kvtier.testing.fleet import Fleet

CALL_TIMEOUT_S: Final = 0.5
MAX_ATTEMPTS: Final = 3


class FleetEngine(Process):
    """One engine process on a site. What it reports as loaded must be what some engine committed."""

    def __init__(self, fleet: Fleet, site: Site, number: int, layout: Layout) -> None:
        super().__init__(fleet.world, f"e-{number}")
        self.fleet = fleet
        self.site = site
        self.number = number
        self.layout = layout
        self.fingerprint = layout.fingerprint()
        self.pages = len(pages_of(Slot(0, 0, 0, layout.slot_bytes)))
        self.loaded = 0
        self._stores = 0
        site.engines.append(self)

    def die(self) -> None:
        """Killed: the kernel drops its lock, its copies stop where they are."""
        self.kill()
        self.site.engines.remove(self)
        for arena, _ in self.fleet.arenas:
            arena.bury(self)

    def prompt(self) -> list[Key]:
        """One of many prompts that share beginnings."""
        rng = self.world.rng
        length = rng.choice((1, 2, 4, 6, 8))
        return make_chain(self.layout, [min(2, int(rng.expovariate(1.5))) for _ in range(length)])

    # ---- calls

    async def ask(self, request: Any) -> Any:
        """The reply, or the fault, or None where no answer came; repeated under the same id."""
        reply, _ = await self._ask(request)
        return reply

    async def _ask(self, request: Any) -> tuple[Any, Daemon | None]:
        async def serve(daemon: Daemon) -> tuple[Any, Daemon]:
            return await daemon.node_now().execute(request), daemon

        name = self.site.name
        for _ in range(MAX_ATTEMPTS):
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    return await self.world.call(name, name, lambda: self.site.daemon, serve)
            except KvtierError as fault:
                return fault, None
            except TimeoutError:
                continue
        return None, None

    def _call_id(self) -> bytes:
        return self.world.rng.randbytes(16)

    async def register(self) -> None:
        """Make the daemon know this engine, again after a restart."""
        await self.ask(
            m.RegisterEngine(self._call_id(), self.name, self.layout, self.fingerprint, "simulated")
        )

    async def _after_fault(self, reply: object) -> None:
        if isinstance(reply, UnknownId) and "register" in str(reply):
            await self.register()

    async def _pause(self) -> None:
        rng, config = self.world.rng, self.fleet.core_config
        stalls = self.world.chance(0.02 * (not self.world.is_calm))
        await asyncio.sleep(rng.uniform(0, 3 * config.reservation_ttl_s) if stalls else rng.expovariate(200))

    # ---- store

    async def store(self) -> None:
        """Reserve, copy, commit; or fail in one of the ways that copies fail."""
        rng = self.world.rng
        keys, shard = self.prompt(), rng.randrange(self.fleet.shards)
        first = rng.choice((0, 0, 0, len(keys) // 2))
        parent = keys[first - 1] if first else None
        request = m.Reserve(self._call_id(), self.name, parent, keys[first:], shard, self.fingerprint)
        reply, daemon = await self._ask(request)
        if not isinstance(reply, m.Reserved) or daemon is None:
            await self._after_fault(reply)
            return
        granted = {key: slot for key, slot in zip(request.keys, reply.slots, strict=True) if slot is not None}
        if not granted:
            return
        fate = rng.choices(("commit", "abort", "lost"), (12, 1, 0 if self.world.is_calm else 1))[0]
        checksums = await self._copy(daemon.arena, shard, granted, is_slow=fate == "lost")
        if fate == "commit":
            for key, sum_ in checksums.items():
                await self.ask(m.Commit(self._call_id(), self.name, reply.reservation, [key], [sum_]))
        if fate != "lost":
            await self.ask(m.Abort(self._call_id(), self.name, reply.reservation))

    async def _copy(
        self, arena: Arena, shard: int, granted: dict[Key, Slot], *, is_slow: bool
    ) -> dict[Key, bytes]:
        self._stores += 1
        version = (self.number, self._stores)
        writer = _Writer(self)
        checksums: dict[Key, bytes] = {}
        for slot in granted.values():
            arena.begin(slot, writer)
        for key, slot in granted.items():
            block = BlockId(key, shard)
            content = make_block(block, self.pages, version)
            for page, bytes_ in zip(pages_of(slot), content, strict=True):
                await self._pause()
                if is_slow:
                    await asyncio.sleep(self.world.rng.uniform(0, self.fleet.core_config.reservation_ttl_s))
                arena.write(page, bytes_, writer)
            checksums[key] = checksum_of(content)
            self.fleet.truth.committed.setdefault(block, {})[version] = None
        for slot in granted.values():
            arena.end(slot, writer)
        return checksums

    async def administer(self, daemon: Daemon) -> None:
        """What operators do to prefixes on any daemon."""
        rng, keys, id = self.world.rng, self.prompt(), self._call_id()
        request = rng.choice(
            (m.Pin(id, keys, rng.uniform(0.1, 5)), m.Unpin(id, None, keys), m.Evict(id, keys))
        )
        with suppress(KvtierError):
            await daemon.node_now().execute(request)

    # ---- load

    async def load(self) -> None:
        """Lookup, load, copy, release; in some of the ways in which requests end early."""
        rng = self.world.rng
        keys = self.prompt()
        request = f"{self.name}/{rng.getrandbits(64):x}"
        shards = rng.randint(1, self.fleet.shards)
        compute_s = rng.choice((0.0, 0.001, 0.05, 1000.0, 1000.0))
        for _ in range(rng.choice((1, 1, 1, 2))):
            offered = await self._lookup(request, keys, shards, compute_s)
            if not offered:
                return
            await asyncio.sleep(rng.expovariate(4 / self.fleet.core_config.hold_ttl_s))
        if self.world.chance(0.1):
            await self.ask(m.Release(self._call_id(), self.name, request=request))
            return
        for shard in range(shards):
            await self.load_shard(request, keys[:offered], shard)

    async def _lookup(self, request: str, keys: Sequence[Key], shards: int, compute_s: float) -> int:
        reply = await self.ask(m.Lookup(self.name, request, keys, shards, self.fingerprint, compute_s))
        if not isinstance(reply, m.Offered):
            await self._after_fault(reply)
            return 0
        return reply.blocks

    async def load_shard(self, request: str, keys: list[Key], shard: int) -> int:
        """Blocks that a valid load brought."""
        reply, daemon = await self._ask(m.Load(self._call_id(), self.name, request, keys, shard))
        if not isinstance(reply, m.Leased) or daemon is None or not reply.lease:
            await self._after_fault(reply)
            return 0
        if self.world.chance(0.03 * (not self.world.is_calm)):
            return 0
        slots, checksums = list(reply.slots), list(reply.checksums)
        wrong = await self._read(daemon.arena, shard, keys, slots, checksums)
        if reply.coming:
            queue = self._follow(daemon, reply.lease)
            while (ready := await queue.get()) is not None:
                their = keys[len(slots) :]
                wrong |= await self._read(daemon.arena, shard, their, ready.slots, ready.checksums)
                slots += ready.slots
        if self.world.chance(0.1 * (not self.world.is_calm)):
            await asyncio.sleep(self.world.rng.uniform(0, 2 * self.fleet.core_config.lease_ttl_s))
        ended = await self.ask(m.Release(self._call_id(), self.name, reply.lease, None, list(wrong), shard))
        if not isinstance(ended, m.Released) or not ended.valid:
            return 0
        for key, is_flipped in wrong.items():
            if not is_flipped:
                self.world.violate(f"a valid load of {key.hex()[:8]} returned wrong bytes")
        self.loaded += len(slots) - len(wrong)
        return len(slots) - len(wrong)

    def _follow(self, daemon: Daemon, lease: int) -> asyncio.Queue[m.Ready | None]:
        """The rest of the stream of a `Load`, then None; it breaks when its daemon dies."""
        queue: asyncio.Queue[m.Ready | None] = asyncio.Queue()

        async def tell() -> None:
            async for ready in daemon.node_now().arrivals.stream(lease):
                queue.put_nowait(ready)

        daemon.spawn(tell()).add_done_callback(lambda _: queue.put_nowait(None))
        return queue

    async def _read(
        self, arena: Arena, shard: int, keys: Sequence[Key], slots: list[Slot], checksums: list[bytes]
    ) -> dict[Key, bool]:
        """Blocks that have not the bytes that were committed, and whether a flipped bit is to blame."""
        wrong: dict[Key, bool] = {}
        for key, slot, sum_ in zip(keys, slots, checksums, strict=False):
            await self._pause()
            block = BlockId(key, shard)
            content = arena.read(slot)
            version = version_of(block, content)
            if version not in self.fleet.truth.committed.get(block, {}) or sum_ != checksum_of([content]):
                wrong[key] = arena.is_flipped(slot)
        return wrong


class _Writer:
    """One copy of an engine; lets a proof of death find it."""

    def __init__(self, process: Process) -> None:
        self.process = process
