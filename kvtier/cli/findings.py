"""One line of `kvtier check`: what, in which state, why, and what to do."""

from __future__ import annotations

from typing import Any, Final

OK: Final = "ok"
DEGRADED: Final = "degraded"
MISSING: Final = "missing"

Finding = dict[str, Any]
"""Plain, since probes hand it over as JSON from a process of their own."""


def finding(name: str, state: str, why: str, todo: str = "", *, needed: bool = False) -> Finding:
    """One line; `needed`: `kvtier serve` does not start without it."""
    return {"name": name, "state": state, "why": why, "todo": todo, "needed": needed}


def one_line(error: BaseException | str) -> str:
    """What a table has room for."""
    text = " ".join(str(error).split())
    return text[:160] or type(error).__name__
