"""`kvtier serve`: the daemon in this process."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from kvtier import logs
from kvtier.cli import output
from kvtier.cli.options import AsJson, ConfigFile, with_config_options
from kvtier.config import Config

if TYPE_CHECKING:
    from kvtier.daemon import Daemon

_REPORT_EVERY_S: Final = 1.0


@with_config_options
def serve(*, config: ConfigFile = None, as_json: AsJson = False, **values: Any) -> None:
    """Run the daemon of this node; no option is needed.

    Each option can be given here, as an environment variable, or in a TOML file, in this order; the index's
    password only in KVTIER_INDEX_PASSWORD, or in a file that an option names. Logs go to stderr. With --json
    one JSON document on stdout says when the socket answers.
    """
    settings = Config.load(config, **values)
    # gRPC's core writes lines of its own to stderr, between the structured ones; we log what matters.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from kvtier.daemon import run_daemon

    pretouch = _Pretouch()

    def ready(daemon: Daemon) -> None:
        if as_json:
            output.print_json(_readiness(daemon, pretouch.seconds))
            sys.stdout.flush()

    asyncio.run(run_daemon(settings, on_ready=ready, on_progress=pretouch))


class _Pretouch:
    """Measures how long memory takes to be made, and says so where one waits."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._begin_s: float | None = None
        self._reported_s = 0.0

    def __call__(self, ready_bytes: int, wanted_bytes: int) -> None:
        now_s = time.monotonic()
        if self._begin_s is None:
            self._begin_s = self._reported_s = now_s
        self.seconds = now_s - self._begin_s
        if now_s - self._reported_s >= _REPORT_EVERY_S:
            self._reported_s = now_s
            ready, wanted = output.size_text(ready_bytes), output.size_text(wanted_bytes)
            logs.get("serve").info("memory is being made", ready=ready, wanted=wanted)


def _readiness(daemon: Daemon, pretouch_s: float) -> dict[str, Any]:
    assert daemon.node is not None
    return {
        "socket": str(daemon.socket),
        "pid": os.getpid(),
        "node_id": daemon.node.identity.node_id,
        "incarnation": daemon.node.identity.incarnation,
        "metrics_address": daemon.metrics_address,
        "pretouch_s": pretouch_s,
    }
