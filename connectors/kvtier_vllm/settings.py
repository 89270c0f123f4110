"""What a user may write into `kv_connector_extra_config`; every entry has a default."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError
from kvtier.paths import SOCKET_NAME, default_run_dir


def default_socket() -> str:
    """The socket of a daemon that was started without arguments by the same user."""
    return str(default_run_dir(os.geteuid(), os.environ) / SOCKET_NAME)


@dataclass(frozen=True, slots=True)
class Settings:
    """The connector's settings.

    Attributes
    ----------
    socket
        Path of the daemon's Unix socket; empty means where `kvtier serve` puts it.
    tenant
        Part of every key: engines of different tenants share nothing.
    revision
        A name for the weights beyond what can be read from their files. Required reading for dummy
        weights, which share nothing without it.
    verify_loads
        ``""`` (what the node says), ``"off"``, ``"sample"`` or ``"all"``.
    lookup_timeout_s, call_timeout_s
        Deadlines of a lookup and of any other call.
    load_floor_s
        A load is cut after twice its estimate, but never before this.
    save_timeout_s
        A save that has not ended by then is stopped, joined and aborted.
    save_fraction
        Part of the engine's blocks that may wait for their copy at once; more are not saved.
    lookup_threads, max_lookups
        Threads that ask, and requests that wait for them at once; one more is a miss.
    min_load_blocks
        Fewer blocks beyond the engine's own are computed, not loaded.
    """

    socket: str = ""
    tenant: str = ""
    revision: str = ""
    verify_loads: str = ""
    lookup_timeout_s: float = 0.05
    call_timeout_s: float = 1.0
    load_floor_s: float = 0.1
    save_timeout_s: float = 2.0
    save_fraction: float = 0.25
    lookup_threads: int = 4
    max_lookups: int = 1024
    min_load_blocks: int = 1

    @property
    def socket_path(self) -> str:
        """`socket`, or the default."""
        return self.socket or default_socket()

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> Settings:
        """Settings from `kv_connector_extra_config`; raises `ConfigError` naming the entry."""
        allowed = {field.name: field.default for field in fields(cls)}
        values: dict[str, Any] = {}
        for name, value in extra.items():
            if name not in allowed:
                raise ConfigError(
                    f"kv_connector_extra_config.{name} is unknown: allowed are {', '.join(allowed)}"
                )
            values[name] = _typed(name, value, allowed[name])
        settings = cls(**values)
        _check(settings)
        return settings


def _typed(name: str, value: Any, default: Any) -> Any:
    if isinstance(default, float) and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if type(value) is type(default):
        return value
    kind = {str: "a text", float: "a number", int: "a whole number"}[type(default)]
    raise ConfigError(f"kv_connector_extra_config.{name} is {value!r}: allowed is {kind}")


def _check(settings: Settings) -> None:
    def refuse(name: str, allowed: str) -> None:
        raise ConfigError(
            f"kv_connector_extra_config.{name} is {getattr(settings, name)!r}: allowed is {allowed}"
        )

    if settings.socket and not Path(settings.socket).is_absolute():
        refuse("socket", "an absolute path")
    if settings.verify_loads not in ("", "off", "sample", "all"):
        refuse("verify_loads", "'off', 'sample' or 'all'")
    for name in ("lookup_timeout_s", "call_timeout_s", "load_floor_s", "save_timeout_s"):
        value = getattr(settings, name)
        if not (math.isfinite(value) and 0 < value <= 60):
            refuse(name, "more than 0 and at most 60")
    if not 0 < settings.save_fraction <= 1:
        refuse("save_fraction", "more than 0 and at most 1")
    for name, most in (("lookup_threads", 64), ("max_lookups", 1 << 20), ("min_load_blocks", 1 << 20)):
        if not 1 <= getattr(settings, name) <= most:
            refuse(name, f"1 .. {most}")
