"""One daemon from start to stop: identity, metrics, node, server, and everything undone on failure."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict
from pathlib import Path

import kvtier
from kvtier import logs
from kvtier.build import Sharing, build, is_shared, make_index
from kvtier.config import Config
from kvtier.errors import AlreadyRunning, Fenced, KvtierError
from kvtier.identity import Identity, open_identity, refuse_owned
from kvtier.liveness import check_socket_place, prepare_run_dir
from kvtier.metrics import SCRAPE_TIMEOUT_S, Metrics, MetricsServer, Sample
from kvtier.node import Node
from kvtier.remote.life import begin_life, new_life
from kvtier.remote.remote import NO_INDEX
from kvtier.server.app import Server, clear_stale_socket, is_stale_socket
from kvtier.server.peer_app import PeerServer, refuse_busy_port
from kvtier.tiers.arena import Arena
from kvtier.types import TierKind

Progress = Callable[[int, int], None]
"""Told (bytes ready, bytes wanted) while the arena is made."""

log = logs.get("daemon")


class Daemon:
    """A node and its server in this process, on the running event loop.

    Attributes
    ----------
    node
        Set by `start`.
    metrics_address
        ``host:port`` after `start`, empty where metrics are off.
    """

    def __init__(self, config: Config, on_progress: Progress | None = None) -> None:
        self.config = config
        self.node: Node | None = None
        self.metrics_address = ""
        self._on_progress = on_progress
        self._undo = AsyncExitStack()

    @property
    def socket(self) -> Path:
        """Where engines and operators connect."""
        return self.config.socket

    async def start(self) -> None:
        """Answer on the socket when this returns; a start that fails or is cancelled leaves nothing behind.

        Raises
        ------
        AlreadyRunning
            A live daemon owns the data directory, the arena or the socket.
        ResourceShortage
            Memory, /dev/shm or the metrics port is not to be had.
        ConfigError
            A directory or the socket's path cannot be used.
        """
        made = [path for path in (self.config.data_dir, self.config.run_dir) if not path.exists()]
        try:
            await self._start()
        except BaseException as error:
            await self.stop()
            if not isinstance(error, AlreadyRunning):  # then somebody else has made them meanwhile
                for path in made:
                    shutil.rmtree(path, ignore_errors=True)
            raise

    async def _start(self) -> None:
        config = self.config
        check_socket_place(config.socket, config.run_dir)
        refuse_owned(config.data_dir)  # what is taken is found out before anything is made
        is_stale_socket(config.socket)
        identity = open_identity(config.data_dir)
        self._undo.callback(identity.release)
        # From here on no other daemon uses this data directory: what lies around is a dead one's.
        prepare_run_dir(config.run_dir)
        clear_stale_socket(config.socket)
        metrics = Metrics()
        if config.metrics_port >= 0:
            self._start_metrics(metrics)
        node = await build(
            config, identity, metrics, self._on_progress, lambda: self._begin_to_share(identity)
        )
        self.node = node
        self._undo.push_async_callback(node.stop)
        loop = asyncio.get_running_loop()
        metrics.read_from(lambda: _sample_from_thread(node, loop))
        await node.start()
        arena = node.tiers[TierKind.DRAM]
        assert isinstance(arena, Arena)
        peer_address = await self._serve_peers(node, arena)
        server = Server(node, arena, config.socket, self.metrics_address)
        self._undo.push_async_callback(server.stop)
        await server.start()
        node.join(peer_address)
        log.info(
            "ready",
            version=kvtier.__version__,
            node=node.identity.node_id,
            incarnation=node.identity.incarnation,
            socket=str(config.socket),
            dram_bytes=arena.capacity_bytes,
            allocated_bytes=arena.allocated_bytes,
            metrics=self.metrics_address or "off",
            index=node.remote.index_text if node.remote else NO_INDEX,
            peers=peer_address or "off",
        )

    async def _begin_to_share(self, identity: Identity) -> Sharing | None:
        """The index, and the incarnation that it issues; what it cannot do now it does when it can."""
        index = make_index(self.config)
        if index is None:
            return None
        self._undo.push_async_callback(index.close)
        if not is_shared(index):  # it is started when the socket answers
            return Sharing(index, new_life(identity, self.config))
        # Registering fences whoever else has this identity: what can be known to fail must fail before.
        refuse_busy_port(self.config)
        return Sharing(index, await begin_life(index, identity, self.config))

    async def _serve_peers(self, node: Node, arena: Arena) -> str:
        if node.remote is None or not is_shared(node.remote.index):
            return ""
        server = PeerServer(node, arena, node.remote.transfers)
        self._undo.push_async_callback(server.stop)
        await server.start()
        return server.address

    def _start_metrics(self, metrics: Metrics) -> None:
        server = MetricsServer(metrics, self.config.metrics_port)
        server.start()
        self.metrics_address = server.address
        # In a thread: a scrape that runs waits for this loop.
        self._undo.push_async_callback(asyncio.to_thread, server.stop)

    async def stop(self) -> None:
        """Socket, arena and locks are gone when this returns; idempotent."""
        await self._undo.aclose()


async def run_daemon(
    config: Config,
    on_ready: Callable[[Daemon], None] | None = None,
    on_progress: Progress | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then stop cleanly; also sets up the process's logs.

    Parameters
    ----------
    on_ready
        Called once, when the socket answers.
    on_progress
        Told how far the arena is.

    Raises
    ------
    KvtierError
        The start failed (see `Daemon.start`), or something that it needs is gone.
    Fenced
        Another daemon of this node's identity has taken over.
    RuntimeError
        The node met a bug and was stopped, so that nothing wrong is served.
    """
    logs.configure(config.log_level, config.log_format)
    if unknown := Config.unknown_variables():
        log.warning("variables that name no field are ignored: is one misspelt?", variables=unknown)
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    daemon = Daemon(config, on_progress)
    try:
        # What a start makes lives as long as the process, a hundred thousand blocks of an earlier life
        # perhaps: no collection walks it, neither now nor later.
        gc.collect()
        gc.disable()
        try:
            is_started = await _unless(stopping, asyncio.create_task(daemon.start()))
            gc.freeze()
        finally:
            gc.enable()
        if is_started:
            if on_ready is not None:
                on_ready(daemon)
            await _serve(daemon, stopping)
    finally:
        await daemon.stop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        log.info("stopped")
        if daemon.node is not None and daemon.node.is_left_waiting:
            os._exit(0)  # an orderly end would wait for the medium


async def _unless(stopping: asyncio.Event, work: asyncio.Task[None]) -> bool:
    """Wait for `work`, or cancel it when `stopping` is set; whether it was done."""
    stopped = asyncio.create_task(stopping.wait())
    await asyncio.wait([work, stopped], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if work.done():
        work.result()
        return True
    work.cancel()
    with suppress(asyncio.CancelledError):
        await work
    return False


async def _serve(daemon: Daemon, stopping: asyncio.Event) -> None:
    assert daemon.node is not None
    assert daemon.node.failed is not None
    failed = daemon.node.failed
    failed.add_done_callback(lambda _: stopping.set())
    await stopping.wait()
    if failed.done() and isinstance(error := failed.result(), Fenced):
        log.critical(
            "another daemon of this node's identity has taken over: this one stops", error=str(error)
        )
        raise error
    if failed.done() and isinstance(error, KvtierError):
        log.critical("the daemon cannot go on", error=str(error))
        raise error
    if failed.done():
        raise RuntimeError("kvtier met a bug and stopped: please report the log") from failed.result()


def _sample_from_thread(node: Node, loop: asyncio.AbstractEventLoop) -> Sample:
    async def sample() -> Sample:
        return _sample(node)

    return asyncio.run_coroutine_threadsafe(sample(), loop).result(SCRAPE_TIMEOUT_S)


def _sample(node: Node) -> Sample:
    stats = node.stats()
    tiers = {
        tier.kind.name.lower(): {
            "capacity": tier.capacity_bytes,
            "allocated": tier.allocated_bytes,
            "resident": tier.resident_bytes,
            "reserved": tier.reserved_bytes,
            "quarantined": tier.quarantined_bytes,
            "draining": tier.draining_bytes,
            "leased": tier.leased_bytes,
            "pinned": tier.pinned_bytes,
            "old_arena": node.old_arena_bytes(tier.kind),
        }
        for tier in stats.tiers
    }
    return Sample(
        counters=asdict(stats.counters),
        tiers=tiers,
        blocks={tier.kind.name.lower(): tier.blocks for tier in stats.tiers},
        tiers_up={tier.kind.name.lower(): not tier.is_down for tier in stats.tiers},
        tier_events={
            tier.kind.name.lower(): {
                "demoted": tier.demoted_blocks,
                "demote_failed": tier.failed_demotes,
                "fetched": tier.fetched_blocks,
                "fetch_failed": tier.failed_fetches,
                "wrong": tier.wrong_blocks,
                "recovered": tier.recovered_blocks,
                "evicted": tier.evicted_blocks,
            }
            for tier in stats.tiers[1:]
        },
        tier_work={
            tier.kind.name.lower(): {
                "demotes": tier.demotes,
                "fetches": tier.fetches,
                "fetch_bytes_per_s": tier.fetch_bytes_per_s,
            }
            for tier in stats.tiers[1:]
        },
        medium_bytes={kind.name.lower(): moved for kind, moved in node.tiering.moved_bytes.items()},
        engines=len(stats.engines),
        uptime_s=node.uptime_s,
        peers=node.remote.peers_by_state() if node.remote else {},
        index_up=node.remote.index_up if node.remote else None,
        unpublished=node.remote.unpublished if node.remote else 0,
        clock_ahead_s=node.remote.membership.clock_ahead_s if node.remote else None,
        info={
            "version": kvtier.__version__,
            "node_id": node.identity.node_id,
            "incarnation": str(node.identity.incarnation),
        },
    )
