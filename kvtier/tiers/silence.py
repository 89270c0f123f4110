"""Whether a path answers at all, asked so that a dead mount costs a bounded time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

_STAT: Final = """
import os, sys
path, may_be_made = sys.argv[1], sys.argv[2] == "1"
while True:
    try:
        os.stat(path)
    except FileNotFoundError as error:
        if not may_be_made or path == os.path.dirname(path):
            sys.exit(error.strerror)
        path = os.path.dirname(path)
    except OSError as error:
        sys.exit(error.strerror)
    else:
        break
"""


def silence(path: Path, timeout_s: float, *, may_be_made: bool = False) -> str:
    """Why `path` (or, if it may be made, what it would be made in) cannot be looked at; empty where it can.

    Asked in a process of its own: nothing ends a wait for a dead mount, so that process is left behind.
    Blocks for `timeout_s` at most.
    """
    command = [sys.executable, "-I", "-S", "-c", _STAT, str(path), str(int(may_be_made))]
    asking = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        _, said = asking.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        asking.kill()
        return f"does not answer within {timeout_s:g} s"
    return " ".join(said.split()) if asking.returncode else ""


def existing(path: Path) -> Path:
    """What a directory that is not there yet would be made in; only for a path that has just answered."""
    return next((its for its in (path, *path.parents) if its.exists()), path)
