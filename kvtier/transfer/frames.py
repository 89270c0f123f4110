"""What a daemon and its agent process say to each other over a socket pair.

A frame is ``length of the rest u32 | length of the head u32 | head, JSON | body``, little endian.

From the daemon: ``pull`` (id, node, incarnation, count; body: 3 x count u64 of sources, sizes and
destinations, then the peer's offer), ``serve`` (seconds), ``forget`` (id, node). From the agent: ``ready``
(body: the own offer), ``unusable`` (why), ``done`` (id), ``failed`` (id, why; nothing was begun), ``broken``
(why; the process ends).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any, Final

MAX_FRAME_BYTES: Final = 8 << 20
_LENGTHS: Final = struct.Struct("<II")
_U32_BYTES: Final = 4

Frame = tuple[dict[str, Any], bytes]


def pack(head: dict[str, Any], body: bytes = b"") -> bytes:
    """One frame."""
    text = json.dumps(head).encode()
    return _LENGTHS.pack(_U32_BYTES + len(text) + len(body), len(text)) + text + body


class Unpacker:
    """Bytes as they come in, frames out; raises `ValueError` on what is no frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that are complete now."""
        buffer = self._buffer
        buffer += data
        while len(buffer) >= _LENGTHS.size:
            rest_bytes, head_bytes = _LENGTHS.unpack_from(buffer)
            if not _U32_BYTES + head_bytes <= rest_bytes <= MAX_FRAME_BYTES:
                raise ValueError("a frame of impossible length")
            end = _U32_BYTES + rest_bytes
            if len(buffer) < end:
                return
            begin = _LENGTHS.size
            head = json.loads(bytes(buffer[begin : begin + head_bytes]))
            body = bytes(buffer[begin + head_bytes : end])
            del buffer[:end]
            if not isinstance(head, dict):
                raise ValueError("a frame without a head")
            yield head, body
