"""Prometheus metrics on loopback: few series, none named after an engine, a key or a tenant.

What the core counts is read when it is scraped, on the node's event loop; only what the core cannot know
(latencies, faults of media) is counted here.
"""

from __future__ import annotations

import io
import socket
import socketserver
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from kvtier import logs
from kvtier.errors import ResourceShortage

LOOPBACK: Final = "127.0.0.1"
SCRAPE_TIMEOUT_S: Final = 5.0
MAX_SCRAPES: Final = 16
"""Clients that are being answered at once."""
ROOM_TIMEOUT_S: Final = 1.0
"""So long a client waits for one of the others to be gone."""
_LATENCY_BUCKETS_S: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0,
)  # fmt: skip
_PULL_BUCKETS_S: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)

log = logs.get("metrics")


@dataclass(frozen=True, slots=True)
class Sample:
    """What one scrape shows of a node.

    Attributes
    ----------
    counters
        Name without prefix and suffix -> value since the start (fields of `Counters` in admin.proto).
    tiers
        Tier's name -> state of its bytes (``resident``, ``reserved``, ...) -> bytes.
    blocks
        Tier's name -> resident blocks.
    tiers_up
        Tier's name -> whether its medium works.
    tier_events, tier_work, medium_bytes
        Of tiers below the first, by name: blocks to which something happened since the start; what runs, and
        the measured rate; bytes that the medium read and wrote, everything included.
    peers
        State (``up``, ``failing``, ``unreached``) -> other nodes that live.
    index_up
        Whether the index answered last time; None where there is none.
    unpublished
        Changes that the index has not been told yet.
    clock_ahead_s
        This machine's wall clock before the index's; None where that is not known.
    """

    counters: Mapping[str, int]
    tiers: Mapping[str, Mapping[str, int]]
    blocks: Mapping[str, int]
    tiers_up: Mapping[str, bool]
    tier_events: Mapping[str, Mapping[str, int]]
    tier_work: Mapping[str, Mapping[str, float]]
    medium_bytes: Mapping[str, Mapping[str, int]]
    engines: int
    uptime_s: float
    info: Mapping[str, str] = field(default_factory=dict)
    peers: Mapping[str, int] = field(default_factory=dict)
    index_up: bool | None = None
    unpublished: int = 0
    clock_ahead_s: float | None = None


class Metrics:
    """The node's registry. Observing is thread-safe; scraping asks `source`, which may hop threads."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.rpc_seconds = Histogram(
            "kvtier_rpc_seconds",
            "Time the node took for a call",
            ["method"],
            buckets=_LATENCY_BUCKETS_S,
            registry=self.registry,
        )
        self.rpc_errors = Counter(
            "kvtier_rpc_errors",
            "Calls refused, by class of error",
            ["method", "error"],
            registry=self.registry,
        )
        self.lost_blocks = Counter(
            "kvtier_lost_blocks", "Blocks gone though nobody asked", ["reason"], registry=self.registry
        )
        self.verified_bytes = Counter(
            "kvtier_verified_bytes", "Bytes hashed by the node", ["where"], registry=self.registry
        )
        self.mismatches = Counter(
            "kvtier_checksum_mismatches", "Blocks whose bytes were wrong", ["where"], registry=self.registry
        )
        self.tier_faults = Counter(
            "kvtier_tier_faults", "Operations that a medium failed", ["tier"], registry=self.registry
        )
        self.fetched_bytes = Counter(
            "kvtier_fetched_bytes", "Bytes read from a tier below, verified", ["tier"], registry=self.registry
        )
        self.demoted_bytes = Counter(
            "kvtier_demoted_bytes", "Bytes copied down to a tier", ["tier"], registry=self.registry
        )
        self._add_remote()

    def _add_remote(self) -> None:
        """What concerns other nodes. Labels: names of transfers, and words from a fixed list."""
        self.pulls = Counter(
            "kvtier_pulls",
            "Reads from other nodes that ended, by outcome (whole, part, none) and the reason for less",
            ["outcome", "reason"],
            registry=self.registry,
        )
        self.pulled_bytes = Counter(
            "kvtier_pulled_bytes",
            "Bytes read from other nodes, verified",
            ["transfer"],
            registry=self.registry,
        )
        self.stream_block_bytes = Counter(
            "kvtier_stream_block_bytes",
            "Bytes of blocks that streams brought (in) and gave (out), by codec",
            ["direction", "codec"],
            registry=self.registry,
        )
        self.stream_wire_bytes = Counter(
            "kvtier_stream_wire_bytes",
            "What they were on the wire",
            ["direction", "codec"],
            registry=self.registry,
        )
        self.pull_seconds = Histogram(
            "kvtier_pull_seconds",
            "Time that a read from another node took",
            ["transfer"],
            buckets=_PULL_BUCKETS_S,
            registry=self.registry,
        )
        self.transfers_running = Gauge(
            "kvtier_transfers_running",
            "Reads from other nodes under way",
            ["transfer"],
            registry=self.registry,
        )
        self.index_faults = Counter(
            "kvtier_index_faults",
            "Calls that the index did not answer in time",
            ["operation"],
            registry=self.registry,
        )
        self.index_garbage = Counter(
            "kvtier_index_garbage",
            "Values in the index that no node can have written",
            registry=self.registry,
        )
        self.published = Counter(
            "kvtier_index_changes", "Locations told to the index", ["change"], registry=self.registry
        )

    def count_stream(self, direction: str, codec: str, block_bytes: int, wire_bytes: int) -> None:
        """One message of a stream, ``in`` or ``out``."""
        self.stream_block_bytes.labels(direction, codec).inc(block_bytes)
        self.stream_wire_bytes.labels(direction, codec).inc(wire_bytes)

    def read_from(self, source: Callable[[], Sample]) -> None:
        """Let scrapes show what `source` returns; it is called in the thread that scrapes."""
        self.registry.register(_NodeCollector(source))


class _NodeCollector(Collector):
    def __init__(self, source: Callable[[], Sample]) -> None:
        self._source = source

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        sample = self._source()
        for name, value in sample.counters.items():
            yield CounterMetricFamily(f"kvtier_{name}", f"{name} since the start", value=value)
        tier_bytes = GaugeMetricFamily(
            "kvtier_tier_bytes", "Bytes of a tier by state", labels=["tier", "state"]
        )
        for tier, states in sample.tiers.items():
            for state, value in states.items():
                tier_bytes.add_metric([tier, state], value)
        yield tier_bytes
        blocks = GaugeMetricFamily("kvtier_tier_blocks", "Resident blocks of a tier", labels=["tier"])
        for tier, value in sample.blocks.items():
            blocks.add_metric([tier], value)
        yield blocks
        up = GaugeMetricFamily("kvtier_tier_up", "Whether a tier's medium works", labels=["tier"])
        for tier, works in sample.tiers_up.items():
            up.add_metric([tier], int(works))
        yield up
        yield from _below(sample)
        yield from _remote(sample)
        yield GaugeMetricFamily("kvtier_engines", "Engine processes registered", value=sample.engines)
        yield GaugeMetricFamily("kvtier_uptime_seconds", "Time since the start", value=sample.uptime_s)
        info = GaugeMetricFamily("kvtier_node_info", "Always 1", labels=list(sample.info))
        info.add_metric(list(sample.info.values()), 1)
        yield info


def _below(sample: Sample) -> Iterator[Metric]:
    events = CounterMetricFamily(
        "kvtier_tier_block_events", "What happened to blocks of a tier", labels=["tier", "event"]
    )
    work = GaugeMetricFamily("kvtier_tier_work", "Copies that run, and the rate", labels=["tier", "what"])
    moved = GaugeMetricFamily(
        "kvtier_medium_bytes", "Bytes that a medium read and wrote", labels=["tier", "what"]
    )
    for family, by_tier in (
        (events, sample.tier_events),
        (work, sample.tier_work),
        (moved, sample.medium_bytes),
    ):
        for tier, values in by_tier.items():
            for name, value in values.items():
                family.add_metric([tier, name], value)
        yield family


def _remote(sample: Sample) -> Iterator[Metric]:
    if sample.index_up is None:
        return
    peers = GaugeMetricFamily("kvtier_peers", "Other nodes that live", labels=["state"])
    for state, value in sample.peers.items():
        peers.add_metric([state], value)
    yield peers
    yield GaugeMetricFamily(
        "kvtier_index_up", "Whether the index answered last time", value=int(sample.index_up)
    )
    yield GaugeMetricFamily(
        "kvtier_unpublished", "Changes that the index has not been told yet", value=sample.unpublished
    )
    if sample.clock_ahead_s is not None:
        yield GaugeMetricFamily(
            "kvtier_clock_ahead_seconds",
            "This machine's clock before the index's, to about a second",
            value=sample.clock_ahead_s,
        )


class MetricsServer:
    """Answers scrapes on loopback, each in a thread of its own, at most `MAX_SCRAPES` at once.

    Parameters
    ----------
    port
        0: any free port.

    Raises
    ------
    ResourceShortage
        From `start`: the port is in use.
    """

    def __init__(self, metrics: Metrics, port: int) -> None:
        self._metrics = metrics
        self._port = port
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> str:
        """``host:port`` while it runs, otherwise empty."""
        return f"{LOOPBACK}:{self._server.server_port}" if self._server else ""

    def bind(self) -> None:
        """Take the port, and answer nobody yet; `stop` gives it back."""
        try:
            self._server = _Server((LOOPBACK, self._port), _Handler)
        except OSError as error:
            raise ResourceShortage(
                f"metrics_port {self._port} on {LOOPBACK} cannot be used ({error.strerror}): "
                "choose another, 0 for any free one or -1 for no metrics"
            ) from error

    def start(self) -> None:
        """Bind and answer from now on."""
        self.bind()
        assert self._server is not None
        self._server.set_app(_guarded(make_wsgi_app(self._metrics.registry)))
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            name="kvtier-metrics",
            kwargs={"poll_interval": 0.25},
            daemon=True,
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop and free the port; idempotent. Blocks for running scrapes at most, silent clients are left."""
        server, thread = self._server, self._thread
        self._server = self._thread = None
        if server is None:
            return
        if thread is not None:
            server.shutdown()
            thread.join(SCRAPE_TIMEOUT_S)
            server.end_scrapes()
        server.server_close()


class _Server(ThreadingWSGIServer):
    request_queue_size = 16

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler]) -> None:
        self._open: dict[socket.socket, None] = {}  # the oldest first
        self._changed = threading.Condition()
        super().__init__(address, handler)

    def server_bind(self) -> None:
        # Not HTTPServer's: that asks the resolver for the host's name, which can take seconds.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = LOOPBACK, int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Where all threads are taken, the client that takes longest makes room: it is the one that hangs."""
        with self._changed:
            if len(self._open) >= MAX_SCRAPES:
                _hang_up(next(iter(self._open)))
                if not self._changed.wait_for(lambda: len(self._open) < MAX_SCRAPES, ROOM_TIMEOUT_S):
                    self.shutdown_request(request)
                    return
            self._open[request] = None
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread is to be had
            self._ended(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """In the request's own thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._ended(request)

    def _ended(self, request: socket.socket) -> None:
        with self._changed:
            self._open.pop(request, None)
            self._changed.notify_all()

    def end_scrapes(self) -> None:
        """Hang up on whoever is left, and wait for their threads."""
        with self._changed:
            for request in self._open:
                _hang_up(request)
            self._changed.wait_for(lambda: not self._open, SCRAPE_TIMEOUT_S)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs, hangs up or says nonsense is no fault of ours: no traceback."""
        log.debug("a client of the metrics was left", error=repr(sys.exception()))


class _Handler(WSGIRequestHandler):
    timeout = SCRAPE_TIMEOUT_S  # for each read and write: a client that says nothing keeps no thread for ever

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not news."""

    def get_stderr(self) -> Any:
        """Where wsgiref writes tracebacks of clients that are gone; faults of ours `_guarded` has logged."""
        return io.StringIO()

    def address_string(self) -> str:
        return str(self.client_address[0])


def _hang_up(request: socket.socket) -> None:
    with suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


def _guarded(app: Callable[..., Any]) -> Callable[..., Any]:
    """A scrape that fails is a line of the log and status 503, and the next one is none the worse."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        try:
            return app(environ, start_response)
        except TimeoutError:  # the event loop is busy, or ends
            log.warning("a scrape of the metrics got no answer from the node", timeout_s=SCRAPE_TIMEOUT_S)
        except Exception:
            log.exception("a scrape of the metrics failed")
        start_response("503 Service Unavailable", [("Content-Type", "text/plain")])
        return [b"the node does not answer\n"]

    return answer
