"""First replies, kept so that a repeat of a call changes nothing."""

from __future__ import annotations

from collections import OrderedDict

from kvtier.core.messages import Leased, Reply, Reserved


def _weight(reply: Reply) -> int:
    return 1 + len(reply.slots) if isinstance(reply, Leased | Reserved) else 1


class ReplyCache:
    """Replies by (engine, call_id); oldest first out, bounded for each engine by count and by blocks."""

    def __init__(self, max_replies: int, max_reply_blocks: int) -> None:
        self._max_replies = max_replies
        self._max_reply_blocks = max_reply_blocks
        self._replies: dict[str, OrderedDict[bytes, Reply]] = {}
        self._blocks: dict[str, int] = {}

    def get(self, engine: str, call_id: bytes) -> Reply | None:
        """The first reply to this call, if it is still remembered."""
        replies = self._replies.get(engine)
        return None if replies is None else replies.get(call_id)

    def put(self, engine: str, call_id: bytes, reply: Reply) -> None:
        """Remember `reply`; the newest one is always kept, whatever it weighs."""
        replies = self._replies.setdefault(engine, OrderedDict())
        replies[call_id] = reply
        blocks = self._blocks.get(engine, 0) + _weight(reply)
        while len(replies) > 1 and (len(replies) > self._max_replies or blocks > self._max_reply_blocks):
            blocks -= _weight(replies.popitem(last=False)[1])
        self._blocks[engine] = blocks

    def forget(self, engine: str) -> None:
        """The engine is gone, and nobody else may use its ids."""
        self._replies.pop(engine, None)
        self._blocks.pop(engine, None)

    def check(self, engines: set[str]) -> None:
        """Assert the bounds, and that only `engines` are remembered."""
        assert self._replies.keys() <= engines
        assert self._replies.keys() == self._blocks.keys()
        for engine, replies in self._replies.items():
            weight = sum(map(_weight, replies.values()))
            assert weight == self._blocks[engine], "blocks of remembered replies do not add up"
            assert len(replies) <= self._max_replies
            assert weight <= self._max_reply_blocks or len(replies) == 1
