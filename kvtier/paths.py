"""Where daemon and engines meet unless told otherwise: the same rule on both sides. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

SOCKET_NAME: Final = "kvtier.sock"


def default_run_dir(uid: int, environ: Mapping[str, str]) -> Path:
    """The run directory of user `uid`: root's, the user's runtime directory, or one of its own in /tmp."""
    if uid == 0:
        return Path("/run/kvtier")
    base = environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "kvtier" if base else Path(f"/tmp/kvtier-{uid}")
