"""The port that metrics are read from: clients that hang, hang up or talk nonsense."""

from __future__ import annotations

import socket
import struct
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from structlog.testing import CapturingLogger

from kvtier.errors import ResourceShortage
from kvtier.metrics import MAX_SCRAPES, Metrics, MetricsServer, Sample

DEADLINE_S = 30.0


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    server = MetricsServer(Metrics(), 0)
    server.start()
    yield server
    server.stop()


def connect(server: MetricsServer) -> socket.socket:
    host, _, port = server.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=DEADLINE_S)


def scrape(server: MetricsServer) -> str:
    with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=DEADLINE_S) as answer:
        return str(answer.read().decode())


def test_more_silent_clients_than_threads(server: MetricsServer) -> None:
    """The oldest make room for who has something to say; the bound holds."""
    silent = [connect(server) for _ in range(2 * MAX_SCRAPES)]
    assert "kvtier_tier_faults" in scrape(server)
    for client in silent[:MAX_SCRAPES]:
        assert client.recv(1) == b"", "it was left open"
    answering = [thread for thread in threading.enumerate() if "process_request_thread" in thread.name]
    assert len(answering) <= MAX_SCRAPES
    for client in silent:
        client.close()


@pytest.mark.parametrize(
    "said",
    [b"", b"GET /metrics HT", b"\xff\x00\xff\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"x" * 70_000 + b"\r\n"],
    ids=["nothing", "half", "nonsense", "no wish to hear", "too long"],
)
def test_clients_that_hang_up_leave_no_trace(
    server: MetricsServer, said: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(5):
        client = connect(server)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closed by a reset
        client.sendall(said)
        client.close()
    assert "kvtier_tier_faults" in scrape(server)
    server.stop()  # all of them have been seen to the end
    assert "Traceback" not in "".join(capfd.readouterr())


def test_a_client_that_says_nothing_is_left_without_a_trace(
    server: MetricsServer, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.metrics._Handler.timeout", 0.05)
    with connect(server) as client:
        assert client.recv(1) == b""
    server.stop()
    assert "Traceback" not in "".join(capfd.readouterr())


def test_a_node_that_does_not_answer_is_a_503_and_a_line(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = CapturingLogger()
    monkeypatch.setattr("kvtier.metrics.log", log)
    metrics = Metrics()

    def stuck() -> Sample:
        raise TimeoutError

    metrics.read_from(stuck)
    server = MetricsServer(metrics, 0)
    server.start()
    with pytest.raises(urllib.error.HTTPError) as caught:
        scrape(server)
    assert caught.value.code == 503
    server.stop()
    assert [call.args for call in log.calls] == [("a scrape of the metrics got no answer from the node",)]
    assert "Traceback" not in "".join(capfd.readouterr())


def test_a_port_that_is_only_bound_is_given_back() -> None:
    server = MetricsServer(Metrics(), 0)
    server.bind()
    port = int(server.address.rpartition(":")[2])
    with pytest.raises(ResourceShortage, match=str(port)):
        MetricsServer(Metrics(), port).bind()
    server.stop()
    again = MetricsServer(Metrics(), port)
    again.start()
    again.stop()
