"""What every command prints and how it ends: tables or JSON on stdout, all else on stderr, exit codes."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvtier import errors

OK: Final = 0
NEGATIVE: Final = 1
USAGE: Final = 2
UNREACHABLE: Final = 3
SHORTAGE: Final = 4
ALREADY_RUNNING: Final = 5
FAULT: Final = 6
SIGNALLED: Final = 128
NOTICE_AFTER_S: Final = 1.0

EXIT_CODES: Final = (
    "Exit codes: 0 done; 1 the answer is no (nothing found, something missing, a target missed); "
    "2 bad usage or configuration; 3 the daemon cannot be reached; 4 this machine lacks something "
    "(memory, a port, a package); 5 a live daemon is in the way; 6 any other fault; "
    "128 + N ended by signal N."
)

_CODES: Final[Sequence[tuple[type[errors.KvtierError], int]]] = (
    (errors.ConfigError, USAGE),
    (errors.InvalidRequest, USAGE),
    (errors.LimitExceeded, USAGE),
    (errors.Unavailable, UNREACHABLE),
    (errors.ResourceShortage, SHORTAGE),
    (errors.AlreadyRunning, ALREADY_RUNNING),
    (errors.Fenced, ALREADY_RUNNING),
)
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def exit_code(error: errors.KvtierError) -> int:
    """The exit code that stands for this class of errors."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), FAULT)


def print_error(message: str) -> None:
    """A message on stderr; where it has several lines, the first says what is wrong and what to do."""
    print(f"kvtier: {message}", file=sys.stderr)


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=2))


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str | Text]], *, right: int = 0
) -> None:
    """A table on stdout, its last `right` columns aligned to the right; brackets in texts are plain."""
    table = Table(title=escape(title), title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(
            column, justify="right" if index >= len(columns) - right else "left", overflow="fold"
        )
    for row in rows:
        table.add_row(*(escape(cell) if isinstance(cell, str) else cell for cell in row))
    console().print(table)


def print_pairs(title: str, pairs: Mapping[str, str]) -> None:
    """Names and values, one a line."""
    table = Table(title=escape(title), title_justify="left", title_style="bold", show_header=False)
    for name, value in pairs.items():
        table.add_row(name, escape(value))
    console().print(table)


def console() -> Console:
    """Stdout, as it is now; wide enough where it is no terminal that nothing is cut off."""
    return Console() if sys.stdout.isatty() else Console(width=160)


def size_text(size_bytes: int) -> str:
    """A size with three or four digits: ``"1.25 GiB"``."""
    value = float(size_bytes)
    for unit in _UNITS:
        if value < 1024 or unit == _UNITS[-1]:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.4g} {unit}"
        value /= 1024
    raise AssertionError(size_bytes)


def duration_text(duration_s: float) -> str:
    """A duration for people: ``"3 d 4 h"``, ``"12 min 5 s"``, ``"0.25 s"``."""
    if duration_s < 60:
        return f"{duration_s:.3g} s"
    parts: list[str] = []
    rest = int(duration_s)
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        if rest >= length or parts:
            parts.append(f"{rest // length} {unit}")
            rest %= length
    return " ".join(parts[:2])


@contextmanager
def patience(message: str) -> Iterator[None]:
    """Say on stderr what is waited for where the block takes longer than `NOTICE_AFTER_S`."""
    notice = threading.Timer(NOTICE_AFTER_S, print_error, [message])
    notice.daemon = True
    notice.start()
    try:
        yield
    finally:
        notice.cancel()


class Progress:
    """Says on stderr what goes on: a spinner on a terminal, a line for each step elsewhere."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Console(stderr=True, quiet=quiet)
        self._status = self._console.status("") if self._console.is_terminal and not quiet else None
        self._begin_s = time.monotonic()

    def __call__(self, message: str) -> None:
        """A new step begins."""
        if self._status is not None:
            self._status.update(escape(message))
        else:
            elapsed_s = time.monotonic() - self._begin_s
            self._console.print(
                f"[{elapsed_s:6.1f} s] {message}", markup=False, highlight=False, soft_wrap=True
            )

    @contextmanager
    def shown(self) -> Iterator[Progress]:
        """Show the spinner while the block runs."""
        if self._status is None:
            yield self
        else:
            with self._status:
                yield self
