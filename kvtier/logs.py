"""Structured logs on stderr. Keys, salts and tokens never reach them.

Code logs counts, ids and reasons. As a second line of defence every value of type bytes (a key, a salt, a
checksum) is replaced by its length, and fields that are named like a secret are dropped.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, Final, TextIO

import structlog

_SECRET_FIELDS: Final = frozenset({"key", "keys", "salt", "token", "tokens", "parent", "call_id"})

Logger = structlog.typing.FilteringBoundLogger


def configure(level: str, log_format: str, stream: TextIO | None = None) -> None:
    """Set up the process's logs; called once by the process's entry point.

    Parameters
    ----------
    level
        debug, info, warning, error or critical.
    log_format
        json, console, or auto: console where `stream` is a terminal.
    stream
        Where lines go; None: stderr.
    """
    stream = stream or sys.stderr
    number = logging.getLevelNamesMapping()[level.upper()]
    console = log_format == "console" or (log_format == "auto" and stream.isatty())
    stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)
    common: list[Any] = [structlog.processors.add_log_level, _redact, stamp]
    rendering = _rendering(console, stream)
    structlog.configure(
        processors=[*common, *rendering],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(file=stream),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)  # for modules and libraries that use the standard library's
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_log_level, structlog.stdlib.add_logger_name, stamp],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    logging.basicConfig(level=number, handlers=[handler], force=True)


def _rendering(console: bool, stream: TextIO) -> list[Any]:
    """Tracebacks come without local variables: these hold keys."""
    if console:
        formatter = structlog.dev.plain_traceback
        return [structlog.dev.ConsoleRenderer(colors=stream.isatty(), exception_formatter=formatter)]
    transformer = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    return [structlog.processors.ExceptionRenderer(transformer), structlog.processors.JSONRenderer()]


def get(name: str) -> Logger:
    """A logger that carries `name` as the field `part`; before `configure` it writes to stderr too."""
    if not structlog.is_configured():
        structlog.configure(logger_factory=lambda *_: structlog.PrintLogger(sys.stderr))
    logger: Logger = structlog.get_logger(part=name)
    return logger


def _redact(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for name in _SECRET_FIELDS & event.keys():
        del event[name]
    for name, value in event.items():
        if isinstance(value, bytes | bytearray | memoryview):
            event[name] = f"<{len(value)} bytes>"
    return event
