"""What callers give, checked before anything is done: a mistake is `InvalidRequest`, no fault from within."""

from __future__ import annotations

import numbers
import os
from collections.abc import Sequence
from typing import Any

from kvtier.client.transport import MAX_TIMEOUT_S
from kvtier.errors import InvalidRequest
from kvtier.types import KEY_SIZE_BYTES, MAX_REQUEST_ID_CHARS, Key


def socket_path(path: str | os.PathLike[str]) -> str:
    """The path of the daemon's socket as text."""
    found: Any = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(found, str) or not found or "\0" in found:
        raise InvalidRequest(f"socket_path is {path!r}: allowed is the path of the daemon's socket")
    try:
        os.fsencode(found)
    except UnicodeEncodeError:
        raise InvalidRequest(f"socket_path is {path!r}: no file can have this name") from None
    return found


def text(name: str, value: Any) -> str:
    """Text that a message can carry: without lone surrogates."""
    if not isinstance(value, str) or any("\ud800" <= char <= "\udfff" for char in value):
        raise InvalidRequest(f"{name} is {value!r}: allowed is text that UTF-8 can express")
    return value


def is_number(value: Any) -> bool:
    """Whether it is a real number: neither a flag nor NaN."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and bool(value == value)


def seconds(name: str, value: Any) -> float:
    """How long something may take: 0 or more. More than a day, infinity included, counts as a day."""
    if not is_number(value) or value < 0:
        raise InvalidRequest(f"{name} is {value!r}: allowed is a number of seconds, 0 or more")
    return float(min(value, MAX_TIMEOUT_S))


def is_count(value: Any, least: int, most: int) -> bool:
    """Whether it is a whole number between them."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def keys(values: Sequence[Key]) -> None:
    """A list of keys."""
    if not isinstance(values, Sequence) or any(not is_key(value) for value in values):
        raise InvalidRequest(f"a list of keys of {KEY_SIZE_BYTES} bytes is wanted: something else was given")


def is_key(value: Any) -> bool:
    """Whether it is 32 bytes."""
    return isinstance(value, bytes) and len(value) == KEY_SIZE_BYTES


def parent(value: Key | None) -> None:
    """The key of the block before the first one."""
    if value is not None and not is_key(value):
        raise InvalidRequest(
            f"a parent is the key of a block, {KEY_SIZE_BYTES} bytes, or None where a prompt begins: "
            "something else was given"
        )


def block_ids(values: Sequence[int]) -> None:
    """A list of ints."""
    if not isinstance(values, Sequence) or any(type(value) is not int for value in values):
        raise InvalidRequest("a block id is no int: give a list of them")


def request_id(value: str) -> None:
    """Printable text."""
    is_good = isinstance(value, str) and value.isprintable()
    if not is_good or not 0 < len(value) <= MAX_REQUEST_ID_CHARS:
        raise InvalidRequest(f"a request id is text of 1 .. {MAX_REQUEST_ID_CHARS} printable characters")
