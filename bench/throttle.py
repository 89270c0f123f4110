"""A link of a given rate: ``python -m bench.throttle HOST:PORT BYTES_PER_S``.

A TCP port in front of another, in a process of its own; prints its address, ends with its stdin. What the
target answers goes through at that rate, all connections together; the kernel moves it from socket to socket
(splice), so that the proxy itself takes little of the processors.
"""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

F_SETPIPE_SZ: Final = 1031
PIECE_BYTES: Final = 256 << 10
BUFFER_BYTES: Final = 512 << 10
"""Of a socket: what a link lets its sender be ahead."""
CATCH_UP_S: Final = 0.005
"""A sleep that was so much too long is made up for."""


class Line:
    """So many bytes a second, for all that share it."""

    def __init__(self, bytes_per_s: float) -> None:
        self.piece_bytes = max(4096, min(PIECE_BYTES, int(bytes_per_s / 1000)))
        self._bytes_per_s = bytes_per_s
        self._free_at_s = 0.0
        self._lock = threading.Lock()

    def wait(self, size_bytes: int) -> None:
        """Until these bytes have gone through."""
        with self._lock:
            now_s = time.monotonic()
            self._free_at_s = max(now_s - CATCH_UP_S, self._free_at_s) + size_bytes / self._bytes_per_s
            left_s = self._free_at_s - now_s
        if left_s > 0:
            time.sleep(left_s)


def forth(source: socket.socket, target: socket.socket) -> None:
    """What is asked: little."""
    with suppress(OSError):
        while data := source.recv(64 << 10):
            target.sendall(data)
    _end(source, target)


def back(source: socket.socket, target: socket.socket, line: Line) -> None:
    """What is answered."""
    reader, writer = os.pipe()
    try:
        fcntl.fcntl(writer, F_SETPIPE_SZ, PIECE_BYTES)
        with suppress(OSError):
            while size_bytes := os.splice(source.fileno(), writer, line.piece_bytes):
                line.wait(size_bytes)
                while size_bytes:
                    size_bytes -= os.splice(reader, target.fileno(), size_bytes)
    finally:
        os.close(reader)
        os.close(writer)
        _end(source, target)


def _end(*sockets: socket.socket) -> None:
    for each in sockets:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def main(target: str, bytes_per_s: float) -> None:
    """Serve until stdin ends."""
    host, _, port = target.rpartition(":")
    line = Line(bytes_per_s)
    server = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            near, _ = server.accept()
            far = socket.socket()
            far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
            far.connect((host, int(port)))
            for each in (near, far):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=forth, args=(near, far), daemon=True).start()
            threading.Thread(target=back, args=(far, near, line), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    print(f"127.0.0.1:{server.getsockname()[1]}", flush=True)
    sys.stdin.read()


@contextmanager
def throttled(target: str, bytes_per_s: float) -> Iterator[str]:
    """The address of a link to `target` that gives so much."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.throttle", target, str(bytes_per_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        assert address, "the link did not start"
        yield address
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
